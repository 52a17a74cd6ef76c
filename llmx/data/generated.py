"""A model's text as a data set: prompts cut from a corpus, and a file of JSON lines that grows.

Sequence-level distillation (arXiv 1606.07947) trains a student on what its teacher writes.
"""

import collections
import itertools
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence

from llmx.data import build, documents, full_disk, tokenizers


def prefixes(
    sources: Sequence[str], tokenizer: tokenizers.Tokenizer, *, length: int, stride: int,
    text_key: str = "text",
) -> Iterator[list[int]]:  # fmt: skip
    """The first `length` tokens of each document, then those from `stride` tokens on, and so on, as
    long as a document has them. Raises ValueError for sources that cannot be read."""
    recipe = build.make_recipe(sources, tokenizer=tokenizer, text_key=text_key, skip_bad=False)
    for document in recipe.documents(documents.Position(), collections.Counter()):
        ids = [*recipe.start, *tokenizer.encode(document.text).tolist()]
        for begin in range(0, len(ids) - length + 1, stride):
            yield ids[begin : begin + length]


def num_lines(path: pathlib.Path) -> int:
    """The complete lines of a file, 0 where there is none; what follows the last is cut off."""
    if not path.is_file():
        return 0
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        os.truncate(path, end)
    return content.count(b"\n")


@full_disk.names_path
def write(
    path: pathlib.Path, prompts: Iterator[list[int]],
    texts_of: Callable[[list[list[int]], int], list[str]], *, number: int, batch: int,
    key: str = "text", report: Callable[[int], None] = lambda done: None,
) -> int:  # fmt: skip
    """Adds lines {"text": ...} until there are `number`; returns how many there are.

    Args:
      prompts: of all lines, those that are there already included.
      texts_of: (prompts, number of the batch) -> texts. Batches are the same however often the
        command was interrupted, so that the file is.
      batch: prompts of a batch.

    There are fewer where the prompts end.
    """
    done = num_lines(path)
    whole = done - done % batch
    if done < number:
        _keep(path, whole)
        done = whole
    wanted = itertools.islice(prompts, done, number)
    with path.open("a", encoding="utf-8") as file:
        while chosen := list(itertools.islice(wanted, batch)):
            texts = texts_of(chosen, done // batch)
            for text in texts:
                file.write(json.dumps({key: text}, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
            done += len(chosen)
            report(done)
    return done


def _keep(path: pathlib.Path, lines: int) -> None:
    """Cuts a file after so many lines."""
    if not path.is_file():
        return
    content = path.read_bytes().splitlines(keepends=True)
    os.truncate(path, sum(map(len, content[:lines])))

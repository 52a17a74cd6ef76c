"""Documents in a terminal as the model gets them: their tokens, and which of them are learned.

In colour learned tokens are green and others grey, and special ones underlined. Without, each
token is a line: weight, id, text.
"""

import collections
import itertools
import os
import sys
from collections.abc import Callable, Iterator

import numpy as np

from llmx.data import build, documents, shards, tokenizers

_LEARNED, _OTHER, _UNDERLINED, _OFF = "\x1b[32m", "\x1b[90m", "\x1b[4m", "\x1b[0m"


def has_color() -> bool:
    """Whether standard output is a terminal that is to be coloured (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def lines(
    recipe: build.Recipe, *, count: int, color: bool, shown: Callable[[str], str]
) -> Iterator[str]:  # fmt: skip
    """The first documents of a recipe. `shown`: a text of others as a terminal can take it."""
    skipped: collections.Counter = collections.Counter()
    found = recipe.documents(documents.Position(), skipped)
    for number, document in enumerate(itertools.islice(found, count), 1):
        ((ids, weights),) = build.encode(recipe.tokenizer, recipe, [document])
        # As packed: of plain text all but the first token, which nothing comes before.
        learned = np.arange(len(ids)) > 0 if weights is None else (weights & shards.LEARNED) > 0
        yield f"--- document {number}: {len(ids)} tokens, {int(learned.sum())} learned"
        show = _colored if color else _plain
        yield from show(recipe.tokenizer, ids.tolist(), learned.tolist(), shown)


def _names(tokenizer: tokenizers.Tokenizer) -> dict[int, str]:
    special = {index: token for token, index in tokenizer.special.items()}
    return {tokenizer.end_of_document: "<end of document>"} | special


def _plain(
    tokenizer: tokenizers.Tokenizer, ids: list[int], learned: list[bool],
    shown: Callable[[str], str],
) -> Iterator[str]:  # fmt: skip
    names = _names(tokenizer)
    for token, weight in zip(ids, learned, strict=True):
        text = names.get(token) or repr(tokenizer.decode([token]))
        yield f"{int(weight)} {token:>7} {shown(text)}"


def _colored(
    tokenizer: tokenizers.Tokenizer, ids: list[int], learned: list[bool],
    shown: Callable[[str], str],
) -> Iterator[str]:  # fmt: skip
    names, text = _names(tokenizer), ""
    # Runs are decoded whole, so that characters of several tokens appear.
    runs = itertools.groupby(
        zip(ids, learned, strict=True), key=lambda pair: (pair[1], names.get(pair[0]))
    )
    for (weight, name), pairs in runs:
        run = [token for token, _ in pairs]
        said = shown(name * len(run) if name else tokenizer.decode(run))
        text += (_LEARNED if weight else _OTHER) + (_UNDERLINED if name else "") + said + _OFF
    yield text

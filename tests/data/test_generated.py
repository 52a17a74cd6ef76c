"""A model's text as a data set: the prompts, and a file that grows to the same bytes."""

import itertools
import json

import pytest

from llmx.data import generated, tokenizers

BYTES = tokenizers.ByteTokenizer()


def test_prefixes_are_pieces_of_documents_in_order(tmp_path):
    texts = ["abcdefghij", "klm", "nopqrstu"]
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    found = generated.prefixes([str(path)], BYTES, length=4, stride=6)
    assert [BYTES.decode(ids) for ids in found] == ["abcd", "ghij", "nopq"]


def written(path, *, number, batch=3, fail_at=None):
    calls = []

    def texts_of(prompts, index):
        if index == fail_at:
            raise KeyboardInterrupt
        calls.append(index)
        return [f"{index}: {prompt[0]}\n" for prompt in prompts]

    prompts = ([n] for n in itertools.count())
    done = generated.write(path, prompts, texts_of, number=number, batch=batch)
    return done, calls


@pytest.mark.parametrize("torn", [b"", b'{"text": "ha', b'{"text": "whole"}\n{"te'])
def test_an_interrupted_file_goes_on_to_the_same_bytes(tmp_path, torn):
    """Whole batches stay; a part of one is written anew, with the texts it had."""
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    assert written(whole, number=8) == (8, [0, 1, 2])
    with pytest.raises(KeyboardInterrupt):
        written(cut, number=8, fail_at=1)
    with cut.open("ab") as file:
        file.write(torn)
    assert written(cut, number=8) == (8, [1, 2])
    assert cut.read_bytes() == whole.read_bytes()
    assert written(cut, number=8) == (8, [])  # nothing to do
    assert written(cut, number=11) == (11, [2, 3])  # more
    lines = [json.loads(line)["text"] for line in cut.read_text().splitlines()]
    assert lines[:2] == ["0: 0\n", "0: 1\n"] and len(lines) == 11


def test_prompts_that_end_are_fewer_texts(tmp_path):
    found = generated.write(
        tmp_path / "x.jsonl", iter([[1], [2]]), lambda prompts, _: ["t"] * len(prompts),
        number=5, batch=4,
    )  # fmt: skip
    assert found == 2

"""Streamed text: whole characters, the same as decoded at once, nothing from a stop string on."""

import numpy as np
import pytest
from support import small_tokenizers

from llmx.data import text_stream, tokenizers

TEXT = "the model reads\n été 日本語 🙂👩‍👩‍👧 1234 <|eot_id|>  [INST] user"


@pytest.fixture(scope="module")
def coders(tmp_path_factory):
    root = tmp_path_factory.mktemp("tokenizers")
    kinds = ("byte_level", "sentencepiece", "unigram", "wordpiece")
    made = {k: tokenizers.load(small_tokenizers.write(root / k, k)) for k in kinds}
    return made | {"bytes": tokenizers.ByteTokenizer()}


KINDS = ("byte_level", "sentencepiece", "unigram", "wordpiece", "bytes")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_pieces_are_the_text(kind, size, coders):
    coder = coders[kind]
    prompt = coder.encode_prompt("a text").tolist()
    for text in (TEXT, *small_tokenizers.mixed_texts(30, seed=size)):
        ids = coder.encode(text).tolist()
        stream = text_stream.TextStream(coder, prompt)
        pieces = [stream.add(ids[at : at + size]) for at in range(0, len(ids), size)]
        whole = coder.decode([*prompt, *ids])
        assert coder.decode(prompt) + "".join([*pieces, stream.end()]) == whole
        assert coder.decode(prompt) + stream.text == whole
        if "\ufffd" not in whole:
            assert not any("\ufffd" in piece for piece in pieces)


def test_a_cut_character_waits_and_a_broken_one_does_not():
    coder = tokenizers.ByteTokenizer()
    stream = text_stream.TextStream(coder, [97])
    raw = list("é🙂".encode())
    said = [stream.add([byte]) for byte in raw]
    assert said == ["", "é", "", "", "", "🙂"]
    assert stream.add([0xF0]) == "" and stream.add([120]) == "\ufffdx"
    assert stream.add(raw[:1]) == "" and stream.end() == "\ufffd"
    # A special token has no text, and is passed over.
    stream = text_stream.TextStream(coder, [256] * 20)
    assert stream.add([256]) == "" and stream.add([97]) == "a"


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize(
    ("stops", "want", "stopped"),
    [
        (["\nuser:"], "one\nus two", True), (["two"], "one\nus ", True), (["xyz"], None, False),
        (["er:", "user"], "one\nus two\n", True), ([""], None, False), (["o"], "", True),
        (["thre", "three!"], "one\nus two\nuser: ", True), (["!"], None, False),
    ],
)  # fmt: skip
def test_texts_end_before_a_stop_string(size, stops, want, stopped):
    coder, text = tokenizers.ByteTokenizer(), "one\nus two\nuser: three four\nuse"
    want = text if want is None else want
    ids = list(text.encode())
    stream = text_stream.TextStream(coder, [], stops=stops)
    shown = ""
    for at in range(0, len(ids), size):
        shown += stream.add(ids[at : at + size])
        assert want.startswith(shown)
    assert shown + stream.end() == want == stream.text and stream.stopped == stopped
    assert stream.add([97]) == "" or not stopped


def test_long_texts_are_not_decoded_again_and_again(coders):
    """A token costs the same wherever it comes."""
    coder, sizes = coders["byte_level"], []
    ids = coder.encode("the model reads a text " * 200).tolist()
    stream = text_stream.TextStream(coder, ids)
    decode = coder.decode
    coder.decode = lambda ids: sizes.append(len(ids)) or decode(ids)
    try:
        for token in ids[:200]:
            stream.add([token])
    finally:
        del coder.decode
    assert np.max(sizes) < 20

"""Tokenizer files that ask for too much: an error at once, before the library sees them."""

import json
import resource
import time

import pytest
from support import small_tokenizers

from llmx.data import tokenizer_limits, tokenizers

SPLIT, BYTES = {"type": "WhitespaceSplit"}, {"type": "ByteLevel"}
BYTE_SPLIT = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


def doubled(count):
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    return {"type": "Sequence", "normalizers": [step] * count}


def nested(count):
    step = SPLIT
    for _ in range(count):
        step = {"type": "Sequence", "pretokenizers": [step]}
    return step


def repeated(count):
    single = [{"Sequence": {"id": "A", "type_id": 0}}] * 2
    step = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": {}}
    return {"type": "Sequence", "processors": [step] * count}


def with_id(parsed, number):
    parsed["model"]["vocab"]["zz"] = number


@pytest.mark.parametrize(("change", "said"), [
    (lambda file: with_id(file, 10**9), "it has the token id 1,000,000,000, above 66,"),
    (lambda file: with_id(file, 200_000), "it has the token id 200,000, above 66,"),
    (lambda file: file["added_tokens"][0].update(id=10**9), "the token id 1,000,000,000"),
    (lambda file: file.update(pre_tokenizer={
        "type": "Sequence", "pretokenizers": [SPLIT] * 100_000}),
     r"its normalizer and pre_tokenizer has 100,001 steps, above 200, the most"),
    (lambda file: file.update(normalizer=doubled(201)), "has 205 steps, above 200"),
    (lambda file: file.update(normalizer=doubled(30)),
     "can make a text 2,147,483,648 times as long, above 256"),
    (lambda file: file.update(normalizer={"type": "Sequence", "normalizers": [BYTES] * 40}),
     "times as long, above 256"),
    (lambda file: file.update(pre_tokenizer={
        "type": "Sequence", "pretokenizers": [BYTE_SPLIT] * 40}), "times as long, above 256"),
    (lambda file: file.update(decoder={"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": ""}, "content": "aaa"}] * 40}),
     "its decoder can make a text"),
    (lambda file: file.update(normalizer={
        "type": "Replace", "pattern": {"Regex": "a?"}, "content": "a" * 900}),
     "times as long, above 256"),
    (lambda file: file.update(post_processor=repeated(40)), "its post_processor can make a text"),
    (lambda file: file.update(post_processor={"type": "BertProcessing", "cls": ["a", 10**9],
                                              "sep": ["b", 1]}), "the token id 1,000,000,000"),
    (lambda file: file.update(post_processor={"type": "BertProcessing", "cls": ["a", 5000],
                                              "sep": ["b", 1]}), "puts the token id 5000 around"),
    # The library does not come back from the first text.
    (lambda file: file.update(
        normalizer={"type": "Strip", "strip_left": True, "strip_right": True},
        added_tokens=[{"id": 0, "content": "\n", "single_word": False, "lstrip": False,
                       "rstrip": False, "normalized": True, "special": False}]),
     r"its normalizer leaves nothing of its added token '\\n'"),
])  # fmt: skip
def test_files_that_ask_for_too_much(tmp_path, change, said):
    folder = small_tokenizers.write(tmp_path, "byte_level")
    path = folder / "tokenizer.json"
    parsed = json.loads(path.read_text())
    change(parsed)
    path.write_text(json.dumps(parsed))
    before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=said) as error:
        tokenizers.load(folder)
    assert str(path) in str(error.value)
    assert time.process_time() - before[0] < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before[1] < 200 << 10


def test_nested_steps_are_counted():
    assert tokenizer_limits.problem({"pre_tokenizer": nested(60)}) == ""
    assert "has 301 steps" in tokenizer_limits.problem({"pre_tokenizer": nested(300)})


@pytest.mark.parametrize("kind", small_tokenizers.KINDS)
def test_files_as_models_have_them_are_far_from_the_limits(tmp_path, kind):
    """With ids left out, as where added tokens begin at a round number."""
    folder = small_tokenizers.write(tmp_path, kind)
    parsed = json.loads((folder / "tokenizer.json").read_text())
    assert tokenizer_limits.problem(parsed) == ""
    parsed["added_tokens"].append({"id": 32_000, "content": "<more>", "special": True})
    assert tokenizer_limits.problem(parsed) == ""

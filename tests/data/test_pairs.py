"""Pairs of answers: what reaches a row of a batch, and what bad records get."""

import json

import numpy as np
import pytest

from llmx.data import __main__ as command
from llmx.data import config, dataset, shards, tokenizers

TEMPLATE = (
    "{% for message in messages %}{{ message.role[0] + message.content + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)
END = 256  # of the byte tokenizer


def record(prompt, chosen, rejected):
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


RECORDS = [
    record("hi", "yes", "no"),
    {
        "chosen": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "good"}],
        "rejected": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "bad!!"}],
    },
    record([{"role": "user", "content": "w"}], [{"role": "assistant", "content": "x"}], "yy"),
]


def opened(tmp_path, records=RECORDS, length=32, **options):
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, records)))
    options = dict(pack=False, format="preference", held_out=0.0) | options
    values = config.DataConfig(
        sources=(str(tmp_path / "pairs.jsonl"),), chat_template=str(tmp_path / "t.jinja"),
        shuffle=False, cache_dir=str(tmp_path / "cache"), **options,
    )  # fmt: skip
    return dataset.open_dataset(values, sequence_length=length, seed=0, log=lambda line: None)


def texts(ids) -> str:
    return "".join("#" if token == END else chr(token) for token in ids)


def test_a_row_holds_both_texts_as_segments(tmp_path):
    batch = opened(tmp_path).train_rows(0, range(3), 3)
    for row, (chosen, rejected, learned) in enumerate([
        ("uhi#ayes#", "uhi#ano#", ("yes#", "no#")),
        ("uq#agood#", "uq#abad!!#", ("good#", "bad!!#")),
        ("uw#ax#", "uw#ayy#", ("x#", "yy#")),
    ]):  # fmt: skip
        tokens, segments = batch["tokens"][row], batch["segment_ids"][row]
        assert texts(tokens[segments == 1]) == chosen
        assert texts(tokens[segments == 2]) == rejected
        for segment, wanted in zip((1, 2), learned, strict=True):
            inside = (segments == segment) & (batch["weights"][row] > 0)
            assert texts(batch["targets"][row][inside]) == wanted
        for segment in (1, 2):
            positions = batch["positions"][row][segments == segment]
            np.testing.assert_array_equal(positions, np.arange(len(positions)))
        assert set(batch["weights"][row]) == {0.0, 1.0}
        assert not batch["weights"][row][segments == 0].any()


def test_a_length_that_just_holds_the_longest(tmp_path):
    longest = len("uhi#ayes#uhi#ano#")
    batch = opened(tmp_path, length=len("uq#agood#uq#abad!!#") - 1).train_rows(0, range(3), 3)
    assert batch["tokens"].shape == (3, 18)
    with pytest.raises(ValueError, match=r"1 pairs .* of 19 tokens .* to at least 18"):
        opened(tmp_path, length=longest)


def test_shards_of_pairs(tmp_path, capsys):
    """Written by the command, they are the same rows; other shards are none, and the reverse."""
    wanted = opened(tmp_path).train_rows(0, range(3), 3)
    common = ["--source", str(tmp_path / "pairs.jsonl"), "--chat-template", f"{tmp_path}/t.jinja"]
    flags = [*common, "--format", "preference"]
    assert command.main([*flags, "--output", f"{tmp_path}/shards"]) == 0
    assert shards.open_shards(tmp_path / "shards").pairs
    values = dict(sources=(f"shards:{tmp_path}/shards",), shuffle=False, held_out=0.0, pack=False)
    open_it = lambda **more: dataset.open_dataset(  # noqa: E731
        config.DataConfig(**values | more), sequence_length=32, seed=0, log=lambda line: None
    )
    found = open_it(format="preference").train_rows(0, range(3), 3)
    for name in wanted:
        np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)
    with pytest.raises(ValueError, match=r"holds pairs and data.format='text': use .*'preference'"):
        open_it(format="text")
    assert command.main(["--source", __file__, "--output", f"{tmp_path}/text"]) == 0
    with pytest.raises(ValueError, match=r"holds no pairs and data.format='preference'"):
        open_it(sources=(f"shards:{tmp_path}/text",), format="preference")
    capsys.readouterr()
    assert command.main([*flags, "--preview", "1"]) == 0
    first, *tokens = capsys.readouterr().out.splitlines()
    assert first == "--- document 1: 17 tokens, 7 learned"
    assert [line[0] for line in tokens] == list("00000111100000111")


@pytest.mark.parametrize(("bad", "said"), [
    ({"messages": []}, r"no pair in the record \(its keys: 'messages'\)"),
    (record("q", "same", "same"), "chosen and rejected are the same"),
    ({"chosen": "a", "rejected": "b"}, "neither .* begins with what is asked: add a prompt"),
    ({"chosen": [{"role": "user", "content": "a"}], "rejected": [{"role": "user", "content": "b"}]},
     "have no common message"),
    (record("q", [], "b"), "no turn of the assistant"),
    (record("q", 5, "b"), "has int as its content"),
])  # fmt: skip
def test_bad_records(tmp_path, bad, said):
    with pytest.raises(ValueError, match=said) as error:
        opened(tmp_path, [RECORDS[0], bad])
    assert "line 2" in str(error.value)
    # Or left out, and counted.
    assert len(opened(tmp_path, [*RECORDS, bad], skip_bad=True).train_rows(0, range(3), 3)) == 5


def test_a_tokenizer_without_a_template(tmp_path):
    coder = tokenizers.ByteTokenizer()
    assert not coder.template
    (tmp_path / "pairs.jsonl").write_text(json.dumps(RECORDS[0]))
    values = config.DataConfig(
        sources=(str(tmp_path / "pairs.jsonl"),), format="preference", pack=False, held_out=0.0,
        cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip
    with pytest.raises(ValueError, match="has no chat template"):
        dataset.open_dataset(values, sequence_length=32, seed=0, log=lambda line: None)


def test_pairs_are_held_out_whole(tmp_path):
    """Or it is said that there are too few: no pair is cut."""
    for records in (RECORDS[:1], RECORDS[:2], [RECORDS[0]] * 6):
        with pytest.raises(ValueError, match=r"holds out none as a whole: set data.held_out=0"):
            opened(tmp_path, records, held_out=0.05)
    many = [record(f"question {number}", "yes", "no") for number in range(40)]
    found = opened(tmp_path, many, length=64, held_out=0.3)
    assert found.num_held_out_windows + found.num_train_windows == 40
    assert found.num_held_out_windows > 3
    for rows in (found.held_out_rows(0, range(4), 4), found.train_rows(0, range(4), 4)):
        for segment in (1, 2):
            learned = (rows["segment_ids"] == segment) & (rows["weights"] > 0)
            assert learned.any(axis=1).all()


def test_one_pair_is_enough(tmp_path):
    """Its row is padding else, however long."""
    batch = opened(tmp_path, RECORDS[:1], length=200).train_rows(0, range(2), 2)
    assert (batch["segment_ids"] == 2).any(axis=1).all()

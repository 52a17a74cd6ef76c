"""Data: order, packing, split, formats, errors, the command, against plain Python references."""

import collections
import errno
import io
import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from llmx.data import __main__ as command
from llmx.data import (
    build,
    config,
    dataset,
    documents,
    loader,
    packing,
    shards,
    sources,
    split,
    tokenizers,
)

KEYS = {"tokens", "targets", "segment_ids", "positions", "weights"}
ROOT = pathlib.Path(__file__).parents[2]


def quiet(message):
    del message


def write_documents(folder, texts, *, suffix=".txt"):
    folder.mkdir(parents=True, exist_ok=True)
    for i, text in enumerate(texts):
        raw = text if isinstance(text, bytes) else text.encode()
        (folder / f"{i:04d}{suffix}").write_bytes(raw)
    return str(folder)


def random_texts(count, *, seed=0, low=1, high=40):
    rng = np.random.default_rng(seed)
    letters = list("abcdefghij \n\u00e9\u4e2d")
    return [
        f"{i}:" + "".join(rng.choice(letters, size=rng.integers(low, high))) for i in range(count)
    ]


def open_texts(tmp_path, texts, *, T=16, seed=0, name="corpus", **settings):
    settings.setdefault("held_out", 0.0)
    settings.setdefault("sources", (write_documents(tmp_path / name, texts),))
    made = config.DataConfig(**settings)
    cache_dir = tmp_path / "cache"
    return dataset.open_dataset(made, sequence_length=T, seed=seed, cache_dir=cache_dir, log=quiet)


def expected_rows(documents, *, T, pack):
    """The rows over lists of ids, written token by token."""
    if pack:
        streams = [[(i, p, token) for i, d in enumerate(documents) for p, token in enumerate(d)]]
    else:
        streams = [[(i, p, token) for p, token in enumerate(d)] for i, d in enumerate(documents)]
    rows = []
    for stream in streams:
        for begin in range(0, max(len(stream) - 1, 0), T):
            row = {"tokens": [], "targets": [], "segment_ids": [], "positions": [], "weights": []}
            segment, position, before = 0, 0, None
            for at in range(begin, begin + T):
                if at >= len(stream):
                    filled = {"tokens": 256, "targets": 256}
                    for key in row:
                        row[key].append(filled.get(key, 0))
                    continue
                document, _, token = stream[at]
                segment, position = (
                    (segment, position + 1) if document == before else (segment + 1, 0)
                )
                before = document
                following = stream[at + 1] if at + 1 < len(stream) else (None, 0, 256)
                row["tokens"].append(token)
                row["targets"].append(following[2])
                row["segment_ids"].append(segment)
                row["positions"].append(position)
                row["weights"].append(float(following[0] == document))
            rows.append(row)
    return rows


def all_rows(opened, *, batch_size=4):
    """Every window of the first epoch, in the order of the stream, as one batch."""
    steps = -(-opened.num_train_windows // batch_size)
    batches = [opened.train_rows(s, range(batch_size), batch_size) for s in range(steps)]
    return {k: np.concatenate([b[k] for b in batches])[: opened.num_train_windows] for k in KEYS}


def row_bytes(batch):
    return sorted(
        b"".join(batch[key][i].tobytes() for key in sorted(KEYS))
        for i in range(len(batch["tokens"]))
    )


def assert_equal(a, b):
    assert a.keys() == b.keys() == KEYS
    for key in KEYS:
        np.testing.assert_array_equal(a[key], b[key], err_msg=key)


# ---- packing ----


@pytest.mark.parametrize("T", [1, 2, 7, 16, 64])
@pytest.mark.parametrize("pack", [True, False])
def test_rows_equal_a_token_by_token_reference(tmp_path, T, pack):
    texts = [*random_texts(23), "x", "y" * 100]
    opened = open_texts(tmp_path, texts, T=T, pack=pack, shuffle=False)
    want = expected_rows([[*t.encode(), 256] for t in texts], T=T, pack=pack)
    assert opened.num_train_windows == len(want)
    got = all_rows(opened)
    for key in KEYS:
        np.testing.assert_array_equal(got[key], np.array([row[key] for row in want]), key)
    assert {key: got[key].dtype for key in KEYS} == {
        key: np.dtype(np.float32 if key == "weights" else np.int32) for key in KEYS
    }
    assert got["positions"].max() < T


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_token_is_predicted_exactly_once_an_epoch(tmp_path, pack, shuffle):
    texts = random_texts(40)
    opened = open_texts(tmp_path, texts, T=9, pack=pack, shuffle=shuffle)
    got = all_rows(opened)
    real = got["weights"] == 1
    predicted = collections.Counter(zip(got["tokens"][real], got["targets"][real], strict=True))
    documents = [[*t.encode(), 256] for t in texts]
    pairs = collections.Counter(p for d in documents for p in itertools.pairwise(d))
    assert predicted == pairs
    assert (got["targets"][real] == 256).sum() == len(texts)


def test_rows_cross_shards(tmp_path):
    texts = random_texts(30)
    folder = write_documents(tmp_path / "corpus", texts)
    arguments = ["--source", folder, "--output", str(tmp_path / "out"), "--shard-tokens", "50"]
    assert command.main(arguments) == 0
    assert len(shards.read_index(tmp_path / "out")["shards"]) > 5
    opened = open_texts(tmp_path, texts, shuffle=False, sources=(f"shards:{tmp_path / 'out'}",))
    want = expected_rows([[*t.encode(), 256] for t in texts], T=16, pack=True)
    got = all_rows(opened)
    for key in KEYS:
        np.testing.assert_array_equal(got[key], np.array([row[key] for row in want]), key)


# ---- order ----


def test_order_is_a_function_of_seed_and_epoch(tmp_path):
    texts = random_texts(60)
    first = open_texts(tmp_path, texts, seed=3)
    again = open_texts(tmp_path, texts, seed=3)
    other = open_texts(tmp_path, texts, seed=4)
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert_equal(all_rows(first), all_rows(again))
    assert not np.array_equal(all_rows(first)["tokens"], all_rows(other)["tokens"])
    assert row_bytes(all_rows(first)) == row_bytes(all_rows(other))
    plain = open_texts(tmp_path, texts, seed=3, shuffle=False)
    assert not np.array_equal(all_rows(first)["tokens"], all_rows(plain)["tokens"])
    assert row_bytes(all_rows(first)) == row_bytes(all_rows(plain))


def test_epochs_are_complete_and_differ(tmp_path):
    opened = open_texts(tmp_path, random_texts(60))
    n = opened.num_train_windows
    epochs = [opened.train_rows(e, range(n), n) for e in range(3)]
    assert row_bytes(epochs[0]) == row_bytes(epochs[1]) == row_bytes(epochs[2])
    assert len(set(row_bytes(epochs[0]))) == n
    for a, b in ((0, 1), (1, 2), (0, 2)):
        assert not np.array_equal(epochs[a]["tokens"], epochs[b]["tokens"])
    # Epoch 1 of one seed must not be epoch 0 of the next seed.
    following = open_texts(tmp_path, random_texts(60), seed=1)
    assert not np.array_equal(epochs[1]["tokens"], following.train_rows(0, range(n), n)["tokens"])


def test_global_batch_does_not_depend_on_the_number_of_processes(tmp_path):
    opened = open_texts(tmp_path, random_texts(60))
    for processes in (1, 2, 4):
        size = 8 // processes
        loaders = [
            loader.Loader(opened, batch_size=8, rows=range(p * size, (p + 1) * size))
            for p in range(processes)
        ]
        for step in range(12):
            parts = [next(one) for one in loaders]
            assert [s for s, _ in parts] == [step] * processes
            joined = {k: np.concatenate([b[k] for _, b in parts]) for k in KEYS}
            assert_equal(joined, opened.train_rows(step, range(8), 8))
        for one in loaders:
            one.close()


def test_a_batch_has_arrays_of_the_next_one(tmp_path):
    """From any step, and of the batch that the next step takes."""
    opened = open_texts(tmp_path, random_texts(30), num_threads=0)
    keys = dict(
        batch_size=4, rows=(2, 0), ahead={"tokens": "next_tokens"}, batch_of=lambda s: 2 * s
    )
    for start in (0, 3):
        one = loader.Loader(opened, start_step=start, **keys)
        one.set_state(one.state())
        for step in range(start, start + 3):
            found, batch = next(one)
            assert found == step and one.state()["step"] == step + 1
            after = opened.train_rows(2 * step + 2, (2, 0), 4)["tokens"]
            np.testing.assert_array_equal(batch.pop("next_tokens"), after)
            assert_equal(batch, opened.train_rows(2 * step, (2, 0), 4))


@pytest.mark.parametrize(("threads", "prefetch"), [(0, 0), (0, 4), (1, 4), (3, 5), (2, 0)])
def test_loader_order_does_not_depend_on_threads_and_resumes_at_any_step(
    tmp_path, threads, prefetch
):
    opened = open_texts(tmp_path, random_texts(30), num_threads=threads, prefetch=prefetch)
    rows = (2, 0, 3)
    whole = loader.Loader(opened, batch_size=4, rows=rows)
    batches = [next(whole) for _ in range(15)]
    assert [step for step, _ in batches] == list(range(15))
    for step, batch in batches:
        assert_equal(batch, opened.train_rows(step, rows, 4))
    for stop in (0, 1, 7):
        whole.set_state({**whole.state(), "step": stop})
        step, batch = next(whole)
        assert step == stop
        assert_equal(batch, batches[stop][1])
        state = json.loads(json.dumps(whole.state()))
        assert state["step"] == stop + 1
        resumed = loader.Loader(opened, batch_size=4, rows=rows, start_step=state["step"])
        restored = loader.Loader(opened, batch_size=4, rows=rows)
        restored.set_state(state)
        for one in (resumed, restored):
            for want_step, want in batches[stop + 1 : stop + 4]:
                step, batch = next(one)
                assert step == want_step
                assert_equal(batch, want)
            one.close()
    whole.close()


def test_resuming_on_other_data_is_an_error(tmp_path):
    first = open_texts(tmp_path, random_texts(30))
    state = loader.Loader(first, batch_size=2, rows=range(2)).state()
    for changed in (
        open_texts(tmp_path, random_texts(30, seed=1), name="other"),
        open_texts(tmp_path, random_texts(30), T=8),
        open_texts(tmp_path, random_texts(30), held_out=0.2),
        open_texts(tmp_path, random_texts(30), pack=False),
    ):
        other = loader.Loader(changed, batch_size=2, rows=range(2))
        with pytest.raises(ValueError, match=r"data differs .* start a new run"):
            other.set_state(state)
        other.close()


def test_same_content_elsewhere_has_the_same_fingerprint(tmp_path):
    a = open_texts(tmp_path, random_texts(30), name="a")
    b = open_texts(tmp_path, random_texts(30), name="b")
    assert a.fingerprint == b.fingerprint


@pytest.mark.parametrize("weights", [(0.7, 0.3), (1, 3), (0.1, 0.9), (5, 5)])
def test_mixture_shares_are_exact(tmp_path, weights):
    folders = tuple(
        write_documents(tmp_path / name, [name * 200 for _ in range(1)] + [name * 100] * count)
        for name, count in (("a", 5), ("b", 2))
    )
    opened = open_texts(tmp_path, [], sources=folders, weights=weights)
    total = sum(config.integer_shares(weights))
    for cycle in range(5):
        batch = opened.train_rows(cycle, range(total), total)
        from_a = (batch["tokens"] == ord("a")).any(axis=1).sum()
        assert from_a == config.integer_shares(weights)[0]


def test_integer_shares():
    assert config.integer_shares((0.7, 0.3)) == (7, 3)
    assert config.integer_shares((2, 4.0, 6)) == (1, 2, 3)
    assert config.integer_shares((1e-6, 1)) == (1, 1_000_000)


def test_mixture_visits_every_window_of_a_source_before_repeating_one(tmp_path):
    folders = tuple(
        write_documents(tmp_path / name, random_texts(20, seed=seed))
        for seed, name in enumerate("ab")
    )
    alone = [open_texts(tmp_path, [], sources=(f,)) for f in folders]
    windows = [set(row_bytes(all_rows(one))) for one in alone]
    mixed = open_texts(tmp_path, [], sources=folders, weights=(1, 3))
    seen = [[], []]
    for step in range(50):
        for row in row_bytes(mixed.train_rows(step, range(4), 4)):
            seen[row in windows[1]].append(row)
    for source, rows in enumerate(seen):
        n = len(windows[source])
        for begin in range(0, len(rows) - n, n):
            assert set(rows[begin : begin + n]) <= windows[source]
    assert len(seen[0]) == 50 and len(seen[1]) == 150
    n = len(windows[0])
    assert len(seen[0][:n]) == len(set(seen[0][:n]))
    unweighted = open_texts(tmp_path, [], sources=folders)
    assert row_bytes(all_rows(unweighted)) == sorted(
        row for one in alone for row in row_bytes(all_rows(one))
    )


# ---- held-out split ----


def marked(batch):
    """The markers <n> of the documents of a batch of one whole document a row."""
    text = tokenizers.ByteTokenizer().decode(batch["tokens"].reshape(-1))
    return {part.split(">")[0] for part in text.split("<")[1:]}


def held_out_rows(opened, batch_size=4):
    n = -(-opened.num_held_out_windows // batch_size)
    batches = [opened.held_out_rows(i, range(batch_size), batch_size) for i in range(n)]
    return {k: np.concatenate([b[k] for b in batches]) for k in KEYS}


@pytest.mark.parametrize("held_out", [0.05, 0.2, 0.5])
def test_held_out_documents_are_never_trained_on(tmp_path, held_out):
    texts = [f"<{i}> some text" for i in range(200)]
    one_a_row = {"T": 256, "held_out": held_out, "pack": False}
    opened = open_texts(tmp_path, texts, **one_a_row)
    train, held = marked(all_rows(opened)), marked(held_out_rows(opened))
    assert train and held and not train & held
    assert train | held == {str(i) for i in range(200)}
    assert held_out / 2 < len(held) / 200 < held_out * 2
    more = open_texts(tmp_path, [f"<{i}> some text" for i in range(220)], **one_a_row)
    assert marked(held_out_rows(more)) >= held


def test_identical_documents_lie_on_one_side_also_across_sources(tmp_path):
    texts = [f"<{i}> some text" for i in range(100)]
    folders = (
        write_documents(tmp_path / "a", texts + texts[:50]),
        write_documents(tmp_path / "b", texts[30:60]),
        write_documents(tmp_path / "c", [texts[3], texts[4], "<999> " + "z" * 60]),
    )
    opened = open_texts(tmp_path, [], T=40, sources=folders, held_out=0.1, pack=False)
    train, held = marked(all_rows(opened)), marked(held_out_rows(opened))
    assert train | held == {str(i) for i in range(100)} | {"999"}
    assert held and not train & held
    assert held & {"3", "4"}  # what the third source holds out, the first may not train on


def test_split_rules():
    def table(lengths, hashes):
        return np.array(lengths, np.int64), np.array(hashes, np.uint64)

    one = split.split_sources([table([1000], [7])], held_out=0.1, names=["one"])[0]
    assert (one.rule, one.train.num_tokens, one.held_out.num_tokens) == ("end", 900, 100)
    assert one.held_out.starts.tolist() == [900]
    twice = split.split_sources([table([500, 500], [7, 7])], held_out=0.1, names=["twice"])[0]
    assert twice.held_out.starts.tolist() == [450, 950]
    few = split.split_sources(
        [table([500, 50, 450], [2**63, 2**63 + 1, 2**63 + 2])], held_out=0.05, names=["few"]
    )[0]
    assert few.rule == "document" and few.held_out.starts.tolist() == [500]
    books = split.split_sources(
        [table([400, 600], [2**63, 2**63 + 1])], held_out=0.05, names=["books"]
    )[0]
    assert books.rule == "end" and books.held_out.starts.tolist() == [950]
    # The cut document of one source is cut at the same place where another has it too.
    lengths = [10] * 100 + [1000]
    hashes = [*(i << 57 for i in range(100)), 2**64 - 1]
    both = split.split_sources(
        [table([1000], [2**64 - 1]), table(lengths, hashes)], held_out=0.1, names=["x", "y"]
    )
    assert both[0].held_out.starts.tolist() == [900]
    assert both[1].held_out.starts.tolist()[-1] == 1900
    # Two sources that would cut one document at different places agree on the larger part.
    other = table([1000, 200, 200, 200], [2**64 - 1, 2**63, 2**63 + 1, 2**63 + 2])
    same = split.split_sources([other, table([1000], [2**64 - 1])], held_out=0.01, names="xy")
    assert [one.rule for one in same] == ["end", "end"]
    assert same[0].held_out.starts.tolist() == same[1].held_out.starts.tolist() == [984]
    with pytest.raises(ValueError, match=r"too few for a held-out split of 0.1.*held_out=0"):
        split.split_sources([table([3], [1])], held_out=0.1, names=["tiny"])


def test_held_out_is_fixed_complete_and_padded(tmp_path):
    texts = random_texts(80)
    a = open_texts(tmp_path, texts, T=8, held_out=0.3, seed=0)
    b = open_texts(tmp_path, texts, T=8, held_out=0.3, seed=9)
    n = a.num_held_out_windows
    assert n % 7 and n > 7
    assert_equal(held_out_rows(a, 7), held_out_rows(b, 7))
    rows = held_out_rows(a, 7)
    assert len(rows["tokens"]) > n
    for key in ("segment_ids", "positions", "weights"):
        assert not rows[key][n:].any()
    assert (rows["weights"][:n].sum(axis=1) > 0).all()
    assert row_bytes({k: v[:n] for k, v in rows.items()}) == row_bytes(
        {k: v[:n] for k, v in held_out_rows(a, 5).items()}
    )
    halves = [a.held_out_rows(1, rows, 6) for rows in (range(3), range(3, 6))]
    joined = {k: np.concatenate([h[k] for h in halves]) for k in KEYS}
    assert_equal(joined, a.held_out_rows(1, range(6), 6))
    far = a.held_out_rows(10**6, range(4), 4)
    assert not far["weights"].any()
    train = all_rows(a)
    predicted = int(train["weights"].sum() + rows["weights"].sum())
    assert predicted == sum(len(t.encode()) for t in texts)


def test_no_held_out(tmp_path):
    opened = open_texts(tmp_path, random_texts(10), held_out=0)
    assert opened.num_held_out_windows == 0
    with pytest.raises(ValueError, match="held_out=0 keeps no held-out split: set it above 0"):
        opened.held_out_rows(0, range(2), 2)


# ---- sources ----


def test_kinds_and_folders_give_the_same_documents(tmp_path):
    import pyarrow
    from pyarrow import parquet

    texts = [t + "\u2028 \r\n end" for t in random_texts(12)]
    jsonl = tmp_path / "x.jsonl"
    lines = [json.dumps({"id": i, "body": t}) for i, t in enumerate(texts)]
    jsonl.write_text("\n\n".join(lines) + "\n\n", encoding="utf-8")
    table = pyarrow.table({"id": list(range(12)), "body": texts})
    parquet.write_table(table, tmp_path / "x.parquet", row_group_size=5)
    parquet.write_table(
        pyarrow.table({"body": pyarrow.array(texts).dictionary_encode()}), tmp_path / "y.parquet"
    )
    folder = write_documents(tmp_path / "deep" / "er", texts)
    (tmp_path / "deep" / "ignored.bin").write_bytes(b"\xff\xfe")
    (tmp_path / "deep" / ".hidden.txt").write_bytes(b"hidden")
    names = [
        folder,
        str(tmp_path / "deep"),
        str(tmp_path / "deep" / "**" / "*.txt"),
        str(jsonl),
        str(tmp_path / "x.parquet"),
        str(tmp_path / "y.parquet"),
    ]
    opened = [open_texts(tmp_path, [], sources=(name,), text_key="body") for name in names]
    for one in opened[1:]:
        assert one.fingerprint == opened[0].fingerprint
        assert_equal(all_rows(one), all_rows(opened[0]))


def test_long_text_is_cut_at_lines_and_loses_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "MAX_PIECE_BYTES", 64)
    text = ("line of t\u00e9xt\n" * 30 + "x" + "\u4e2d" * 90 + "\nend").encode()
    for name, raw in (("a.txt", text), ("b.txt", b"x" * 64), ("c.txt", b"\xef\xbb\xbfbom")):
        (tmp_path / name).write_bytes(raw)
    files = sources.list_files(str(tmp_path)).files
    read = list(
        documents.read_documents(files, text_key="", skip_bad=False, skipped=collections.Counter())
    )
    pieces = [d.text for d in read]
    assert b"".join(pieces) == text + b"x" * 64 + b"bom" and max(map(len, pieces)) <= 64
    assert pieces[0].endswith(b"\n") and pieces[-2:] == [b"x" * 64, b"bom"]
    for piece in pieces:
        piece.decode("utf-8")
    for i, document in enumerate(read):  # reading goes on exactly after any document
        rest = documents.read_documents(
            files,
            text_key="",
            skip_bad=False,
            start=document.end,
            skipped=collections.Counter(),
        )
        assert [d.text for d in rest] == pieces[i + 1 :]


def test_stdlib_source(tmp_path):
    files = sources.list_files("stdlib").files
    assert 5_000_000 < sum(f.num_bytes for f in files) <= sources.STDLIB_BYTES
    assert not any("site-packages" in f.path or "/test/" in f.path for f in files)
    start = time.perf_counter()
    opened = dataset.open_dataset(
        config.DataConfig(), sequence_length=256, seed=0, cache_dir=tmp_path, log=quiet
    )
    built = time.perf_counter() - start
    assert opened.vocab_size == 257 and opened.num_train_windows > 10_000
    assert opened.num_held_out_windows > 100
    start = time.perf_counter()
    again = dataset.open_dataset(
        config.DataConfig(), sequence_length=256, seed=0, cache_dir=tmp_path, log=quiet
    )
    assert time.perf_counter() - start < max(2.0, built / 2)
    assert again.fingerprint == opened.fingerprint


def _bad_parquet(path):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": ["a"] * 100}), path)
    path.write_bytes(path.read_bytes()[:-20])


def _parquet(path, **columns):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path)


BAD_FILES = {
    "empty": ("a.txt", b"", r"a\.txt: the file is empty \(0 bytes\).*--skip-bad"),
    "bom alone": ("a.txt", b"\xef\xbb\xbf", r"a\.txt: the file is empty"),
    "utf8": (
        "a.txt",
        b"one\ntwo\nthr\xff",
        r"a\.txt: line 3, byte 11: 0xff is not valid UTF-8.*iconv.*skip_bad=True",
    ),
    "utf16": ("a.md", "word".encode("utf-16"), r"a\.md: byte 3 is NUL: .*iconv -f UTF-16"),
    "json": (
        "a.jsonl",
        b'{"text": "x"}\n{"text": "y"\n{"text": "z"}\n',
        r"a\.jsonl: line 2 \(byte 14\): malformed JSON",
    ),
    "json cut off": ("a.jsonl", b'{"text": "x"}\n{"te', r"line 2 .*last line is cut off"),
    "json utf8": ("a.jsonl", b'{"text": "x"}\n{"text": "\xe9"}\n', r"line 2, byte 24: 0xe9"),
    "json list": ("a.jsonl", b'{"text": "x"}\n["y"]\n', r"line 2: a JSON list .* object"),
    "json key": ("a.jsonl", b'{"body": "x"}\n', r"line 1: no key 'text'.*'body'.*--text-key"),
    "json null": ("a.jsonl", b'\n{"text": null}\n', r"line 2: key 'text' is null, not a string"),
    "json number": ("a.jsonl", b'{"text": 3}\n', r"line 1: key 'text' is int, not a string"),
    "json empty": ("a.jsonl", b'{"text": ""}\n', r"line 1: key 'text' is an empty string"),
    "json surrogate": ("a.jsonl", b'{"text": "a\\ud800"}\n', r"line 1: .*surrogate.*character 1"),
    "json blank": ("a.jsonl", b"\n \n", r"a\.jsonl: the file is empty \(2 blank lines"),
    "json deep": ("a.jsonl", b"[" * 200_000 + b"\n", r"line 1 \(byte 0\): malformed JSON"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_file_is_named(tmp_path, case):
    name, raw, message = BAD_FILES[case]
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / name).write_bytes(raw)
    with pytest.raises(ValueError, match=message):
        open_texts(tmp_path, [], sources=(str(folder),))
    assert not list((tmp_path / "cache").glob(".*"))
    (folder / "good.txt").write_text("good text " * 20)
    opened = open_texts(tmp_path, [], sources=(str(folder),), skip_bad=True)
    text = tokenizers.ByteTokenizer().decode(all_rows(opened)["tokens"].reshape(-1))
    assert "good text" in text


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"body": ["x"]}, r"a\.parquet: no column 'text' \(its columns: 'body'\).*--text-key"),
        ({"text": [1, 2]}, r"a\.parquet: column 'text' is of type int64, not text"),
        ({"text": ["x", None]}, r"a\.parquet: row 2: column 'text' is null"),
        ({"text": ["x", ""]}, r"a\.parquet: row 2: column 'text' is an empty string"),
        ({"text": [b"x", b"\xff"]}, r"a\.parquet: row 2: byte 0 of the text is not valid UTF-8"),
    ],
)
def test_bad_parquet_is_named(tmp_path, columns, message):
    _parquet(tmp_path / "a.parquet", **columns)
    with pytest.raises(ValueError, match=message):
        open_texts(tmp_path, [], sources=(str(tmp_path / "a.parquet"),))


def test_truncated_parquet_is_named(tmp_path):
    _bad_parquet(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet: not readable as Parquet.*cut off"):
        open_texts(tmp_path, [], sources=(str(tmp_path / "a.parquet"),))


def test_all_empty_folder_and_too_small_corpora(tmp_path):
    folder = write_documents(tmp_path / "empties", ["", ""])
    with pytest.raises(ValueError, match="the file is empty"):
        open_texts(tmp_path, [], sources=(folder,))
    with pytest.raises(ValueError, match=r"hold no document with text.*'empty': 2"):
        open_texts(tmp_path, [], sources=(folder,), skip_bad=True)
    with pytest.raises(ValueError, match=r"6 tokens to train on, fewer than one window.*below 6"):
        open_texts(tmp_path, ["small"], T=16)
    with pytest.raises(ValueError, match="too few for a held-out split"):
        open_texts(tmp_path, ["s"], T=1, held_out=0.1, name="single")


BAD_CONFIGS = [
    ({"sources": ()}, "data.sources is empty"),
    ({"sources": ("stdlb",)}, "'stdlb' does not exist .*did you mean 'stdlib'"),
    ({"sources": ("/no/such/*.txt",)}, "matches no file .*check the pattern"),
    ({"sources": ("shards:/no/such",)}, "there is no folder '/no/such': write it with python -m"),
    ({"sources": ("{tmp}/none",)}, "has no file of a known kind .*only .bin"),
    ({"sources": ("{tmp}/a.bz2",)}, "of kind .bz2 are not read: decompress"),
    ({"sources": ("{tmp}/a.json",)}, "of kind .json are not read: write one JSON object per line"),
    ({"sources": ("shards:{tmp}/none",)}, "holds no index.json"),
    ({"sources": ("stdlib", "stdlib")}, "names 'stdlib' 2 times: .* data.weights"),
    ({"weights": (1.0, 2.0)}, "data.weights has 2 entries for 1 data.sources"),
    ({"weights": (0.0,)}, "data.weights holds 0.0: each must be a finite number above 0"),
    ({"weights": (-1.0,)}, "data.weights holds -1.0"),
    ({"weights": (float("nan"),)}, "data.weights holds nan"),
    ({"tokenizer": "byte"}, "'byte' is no tokenizer: use"),
    ({"tokenizer": "{tmp}/none"}, "holds no tokenizer.json"),
    ({"train_tokenizer": 300, "tokenizer": "bytes"}, "exclude each other"),
    (
        {"train_tokenizer": 300, "sources": ("shards:x",)},
        "train_tokenizer=300 cannot be used with 'shards:x'",
    ),
    ({"text_key": ""}, "data.text_key='' is not a field name"),
    ({"cache_dir": "{tmp}/a.gz"}, "data.cache_dir=.* is a file: give a folder"),
]


@pytest.mark.parametrize(("settings", "message"), BAD_CONFIGS)
def test_config_problems(tmp_path, settings, message):
    import re

    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "x.bin").write_bytes(b"x")
    for name in ("a.gz", "a.bz2"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "a.json").write_bytes(b"[]")

    def place(value):
        if isinstance(value, str):
            return value.replace("{tmp}", str(tmp_path))
        return tuple(map(place, value)) if isinstance(value, tuple) else value

    made = config.DataConfig(**{key: place(value) for key, value in settings.items()})
    found = config.problems(made)
    assert any(re.search(message, text) for text in found), found
    with pytest.raises(ValueError, match=message):
        dataset.open_dataset(
            made, sequence_length=8, seed=0, cache_dir=tmp_path / "cache", log=quiet
        )


def test_all_problems_at_once():
    made = config.DataConfig(sources=("nowhere",), weights=(1, 2), text_key="", tokenizer="x")
    assert len(config.problems(made)) == 4
    assert config.problems(config.DataConfig()) == []


def test_rows_outside_the_batch(tmp_path):
    opened = open_texts(tmp_path, random_texts(20))
    with pytest.raises(ValueError, match="row 4 is outside the global batch of 4"):
        opened.train_rows(0, [4], 4)
    with pytest.raises(ValueError, match="step=-1 is negative"):
        loader.Loader(opened, batch_size=4, rows=range(4), start_step=-1)


# ---- tokenizers ----

TEXTS = [
    "plain",
    "t\u00e9xt \u4e2d\u6587 \U0001f600",
    "",
    " leading and  trailing ",
    "a<|endoftext|>b\n",
]


def test_byte_tokenizer_round_trip(tmp_path):
    tokenizer = tokenizers.load("bytes")
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (257, 256)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids.tolist() == list(text.encode()) == tokenizer.encode(text.encode()).tolist()
        assert tokenizer.decode(ids) == text
    assert tokenizer.decode([104, 105, 256, 0xFF]) == "hi\ufffd"
    assert tokenizer.decode([257, 104, 999, 105, 257]) == "\ufffdh\ufffdi\ufffd"
    assert tokenizer.decode([]) == ""
    with pytest.raises(ValueError, match="token id -1 is negative"):
        tokenizer.decode([104, -1])
    tokenizer.save(tmp_path / "t.json")
    assert tokenizers.load(tmp_path / "t.json").fingerprint == "bytes"


def test_trained_tokenizer_round_trip(tmp_path):
    corpus = [t.encode() for t in random_texts(200)]
    tokenizer = tokenizers.train(corpus, vocab_size=400)
    assert tokenizer.fingerprint == tokenizers.train(corpus, vocab_size=400).fingerprint
    assert 257 < tokenizer.vocab_size <= 400
    tokenizer.save(tmp_path / "tokenizer.json")
    for loaded in (tokenizers.load(tmp_path / "tokenizer.json"), tokenizers.load(tmp_path)):
        assert loaded.fingerprint == tokenizer.fingerprint
        assert loaded.end_of_document == tokenizer.end_of_document
        for text in TEXTS:
            ids = loaded.encode(text)
            assert loaded.decode(ids) == text
            assert loaded.end_of_document not in ids
            assert ids.tolist() == loaded.encode_documents([text.encode()])[0].tolist()
    assert tokenizer.decode([*tokenizer.encode("hi"), tokenizer.end_of_document]) == "hi"
    assert tokenizer.decode([*tokenizer.encode("hi"), 400, *tokenizer.encode("a")]) == "hi\ufffda"


def test_end_token_is_found_or_added(tmp_path):
    import tokenizers as hugging_face

    def make(vocabulary):
        path = tmp_path / "t.json"
        hugging_face.Tokenizer(
            hugging_face.models.WordLevel({w: i for i, w in enumerate(vocabulary)}, unk_token="u")
        ).save(str(path))
        return tokenizers.load(path)

    found = make(["u", "a", "</s>"])
    assert (found.end_of_document, found.vocab_size) == (2, 3)
    added = make(["u", "a"])
    assert (added.end_of_document, added.vocab_size) == (2, 3)
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    with pytest.raises(ValueError, match=r"bad\.json: the `tokenizers` library does not accept"):
        tokenizers.load(bad)
    bad.write_text("{")
    with pytest.raises(ValueError, match=r"bad\.json: not a readable tokenizer file"):
        tokenizers.load(bad)


def test_train_tokenizer_in_config(tmp_path):
    texts = ["some words to merge, " * 5 + t for t in random_texts(50)]
    opened = open_texts(tmp_path, texts, T=8, train_tokenizer=300)
    again = open_texts(tmp_path, texts, T=8, train_tokenizer=300)
    assert opened.fingerprint == again.fingerprint
    assert opened.vocab_size == 300 == opened.tokenizer.vocab_size
    plain = open_texts(tmp_path, texts, T=8, shuffle=False, train_tokenizer=300)
    rows = all_rows(plain)
    stream = np.append(rows["tokens"][rows["segment_ids"] > 0], rows["targets"][-1].max())
    text = opened.tokenizer.decode(stream)
    assert "".join(texts)[:1000] == text[:1000]


# ---- shards and the command ----


def run_command(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "llmx.data", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **options,
    )


def folder_bytes(folder):
    return {p.name: p.read_bytes() for p in sorted(pathlib.Path(folder).iterdir())}


def test_command_end_to_end(tmp_path):
    texts = random_texts(50)
    folder = write_documents(tmp_path / "corpus", texts)
    out = tmp_path / "out"
    help_text = run_command("--help")
    assert help_text.returncode == 0 and "--train-tokenizer" in help_text.stdout
    done = run_command("--source", folder, "--output", out, "--train-tokenizer", 300)
    assert done.returncode == 0, done.stderr
    assert "50 documents" in done.stdout
    before = folder_bytes(out)
    assert set(before) == {
        "index.json", "tokenizer.json", "shard-00000.tokens", "shard-00000.documents"
    }  # fmt: skip
    again = run_command("--source", folder, "--output", out, "--train-tokenizer", 300)
    assert again.returncode == 0 and "complete already" in again.stdout
    assert folder_bytes(out) == before
    checked = run_command("--verify", out)
    assert checked.returncode == 0 and "all checksums match" in checked.stdout
    opened = open_texts(tmp_path, [], sources=(f"shards:{out}",), T=8)
    assert opened.vocab_size == 300
    config_trained = open_texts(tmp_path, [], sources=(folder,), T=8, train_tokenizer=300)
    assert config_trained.fingerprint == opened.fingerprint
    other = run_command("--source", folder, "--output", out)
    assert other.returncode == 2 and "--overwrite" in other.stderr
    assert folder_bytes(out) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--source is missing"),
        (["--source", "stdlib"], "--output is missing"),
        (
            ["--source", "stdlib", "--output", "az://b/x"],
            "az://b/x needs adlfs, which is not",
        ),
        (["--source", "nowhere.txt", "--output", "{tmp}/o"], "'nowhere.txt' does not exist"),
        (["--source", "{tmp}/bad.jsonl", "--output", "{tmp}/o"], "bad.jsonl: line 2"),
        (["--source", "stdlib", "--output", "{tmp}"], "holds other files"),
        (["--source", "stdlib", "--output", "{tmp}/o", "--tokenizer", "x"], "is no tokenizer"),
        (["--source", "stdlib", "--output", "{tmp}/bad.jsonl"], "is a file: name a folder"),
        (["--source", "stdlib", "--output", "{tmp}/o", "--train-tokenizer", "9"], "outside 257"),
        (["--source", "shards:x", "--output", "{tmp}/o"], "is tokens already"),
        (["--verify", "{tmp}/nothing"], "does not exist"),
    ],
)
def test_command_errors(tmp_path, capsys, arguments, message):
    (tmp_path / "bad.jsonl").write_text('{"text": "x"}\nbroken\n')
    assert command.main([a.replace("{tmp}", str(tmp_path)) for a in arguments]) == 2
    assert message in capsys.readouterr().err


def _write_jsonl(path, count):
    with open(path, "w", encoding="utf-8") as file:
        for i, text in enumerate(random_texts(300) * (count // 300)):
            file.write(json.dumps({"text": f"{i} {text}"}) + "\n")
            if i % 1000 == 999:
                file.write("broken\n")


def test_killed_command_continues_to_identical_bytes(tmp_path):
    _write_jsonl(tmp_path / "a.jsonl", 60_000)
    _write_jsonl(tmp_path / "b.jsonl", 30_000)
    fixed = ["--source", str(tmp_path / "*.jsonl"), "--skip-bad", "--shard-tokens", "20000"]
    assert command.main([*fixed, "--output", str(tmp_path / "whole")]) == 0
    whole = folder_bytes(tmp_path / "whole")
    assert len(whole) > 50
    assert shards.read_index(tmp_path / "whole")["skipped"] == {"malformed": 90}
    out = tmp_path / "killed"
    started = [sys.executable, "-m", "llmx.data", *fixed, "--output", str(out)]
    kills = 0
    for number_of_shards in (3, 25):
        process = subprocess.Popen(
            started, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while process.poll() is None:
            if len(list(out.glob("*.documents"))) >= number_of_shards:
                process.send_signal(signal.SIGKILL)
                process.wait()
                kills += not (out / "index.json").exists()
                break
            time.sleep(0.002)
        with pytest.raises(ValueError, match="unfinished: run the same"):
            open_texts(tmp_path, [], sources=(f"shards:{out}",))
    assert kills == 2
    kept = json.loads((out / "progress.json").read_text())
    assert len(kept["shards"]) >= 20
    times = {e["name"]: (out / f"{e['name']}.tokens").stat().st_mtime_ns for e in kept["shards"]}
    changed = run_command(*fixed, "--output", out, "--text-key", "other")
    assert changed.returncode == 2 and "--overwrite" in changed.stderr
    assert run_command(*fixed, "--output", out).returncode == 0
    assert folder_bytes(out) == whole
    for name, before in times.items():  # finished shards were kept, not written again
        assert (out / f"{name}.tokens").stat().st_mtime_ns == before


@pytest.fixture
def written(tmp_path):
    folder = write_documents(tmp_path / "corpus", random_texts(60))
    out = tmp_path / "out"
    arguments = ["--source", folder, "--output", str(out), "--shard-tokens", "300"]
    assert command.main(arguments) == 0
    return out


def flip(path, at):
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def test_damage_is_detected(tmp_path, written, monkeypatch):
    source = (f"shards:{written}",)
    good = folder_bytes(written)

    def check(message, **settings):
        with pytest.raises(ValueError, match=message):
            open_texts(tmp_path, [], sources=source, **settings)
        assert command.main(["--verify", str(written)]) == 2
        for name, raw in good.items():
            (written / name).write_bytes(raw)

    tokens = written / "shard-00001.tokens"
    tokens.write_bytes(good[tokens.name][:-3])
    check(rf"shard-00001.tokens is truncated: it ends at byte {len(good[tokens.name]) - 3}, the")
    tokens.write_bytes(good[tokens.name] + b"x")
    check("shard-00001.tokens is too long")
    tokens.unlink()
    check("shard-00001.tokens is missing")
    flip(tokens, 10)
    check("shard-00001.tokens: checksum mismatch")
    flip(written / "shard-00000.documents", 0)
    check("shard-00000.documents: checksum mismatch")
    flip(written / "tokenizer.json", 20)
    check("tokenizer.json: checksum mismatch")
    raw = good["index.json"].replace(b'"vocab_size": 257', b'"vocab_size": 258')
    (written / "index.json").write_bytes(raw)
    check("does not match its own checksum")
    (written / "index.json").write_bytes(raw[:40])
    check("index.json: not readable as JSON")
    # Folders too large to be read whole at start: the tokens only on request.
    monkeypatch.setattr(shards, "VERIFY_BYTES", 10)
    flip(tokens, 10)
    open_texts(tmp_path, [], sources=source)
    check("shard-00001.tokens: checksum mismatch", verify=True)
    flip(written / "shard-00000.documents", 0)
    check("shard-00000.documents: checksum mismatch")


def test_token_outside_the_vocabulary_is_named(tmp_path, written, monkeypatch):
    monkeypatch.setattr(shards, "VERIFY_BYTES", 10)
    path = written / "shard-00001.tokens"
    array = np.fromfile(path, "<u2")
    array[7] = 300
    array.tofile(path)
    opened = open_texts(tmp_path, [], sources=(f"shards:{written}",))
    with pytest.raises(
        ValueError, match=r"shard-00001.tokens: byte 14: token id 300 .* vocabulary of 257"
    ):
        all_rows(opened)


def test_shards_with_another_tokenizer(tmp_path, written):
    text = write_documents(tmp_path / "text", ["plain text " * 20])
    mixed = open_texts(tmp_path, [], sources=(text, f"shards:{written}"))
    assert mixed.vocab_size == 257
    trained = tmp_path / "bpe"
    arguments = ["--source", text, "--output", str(trained), "--train-tokenizer", "270"]
    assert command.main(arguments) == 0
    for settings in (
        {"sources": (f"shards:{trained}", f"shards:{written}")},
        {"sources": (f"shards:{trained}",), "tokenizer": "bytes"},
    ):
        with pytest.raises(ValueError, match="was written with another tokenizer"):
            open_texts(tmp_path, [], **settings)


def test_token_types():
    assert tokenizers.token_dtype(65536) == np.dtype("<u2")
    assert tokenizers.token_dtype(65537) == np.dtype("<u4")


# ---- the cache ----

OPEN = """
import sys
from llmx.data import config, dataset
folder, cache_dir = sys.argv[1:]
opened = dataset.open_dataset(
    config.DataConfig(sources=(folder,), train_tokenizer=300), sequence_length=32, seed=0,
    cache_dir=cache_dir, log=lambda text: print(text, file=sys.stderr))
print(opened.fingerprint)
"""


def start_open(tmp_path, folder):
    return subprocess.Popen(
        [sys.executable, "-c", OPEN, folder, str(tmp_path / "cache")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_processes_that_start_together_share_one_cache(tmp_path):
    folder = write_documents(tmp_path / "corpus", random_texts(400, high=2000))
    started = [start_open(tmp_path, folder) for _ in range(4)]
    ends = [process.communicate(timeout=120) for process in started]
    assert [p.returncode for p in started] == [0] * 4, ends
    assert len({out for out, _ in ends}) == 1
    logs = "".join(log for _, log in ends)
    assert logs.count("bytes in 400 files to") == 1
    left = sorted(p.name.split("-")[0] for p in (tmp_path / "cache").iterdir())
    assert left == ["corpus", "tokenizer"]


def test_cache_follows_the_files_and_survives_a_kill(tmp_path, monkeypatch):
    texts = random_texts(40)
    first = open_texts(tmp_path, texts)
    built = []
    real = build.write_shards
    monkeypatch.setattr(build, "write_shards", lambda *a, **k: (built.append(1), real(*a, **k))[1])
    assert open_texts(tmp_path, [], sources=(str(tmp_path / "corpus"),)).fingerprint == (
        first.fingerprint
    )
    assert not built
    (tmp_path / "corpus" / "0003.txt").write_text("changed")
    changed = open_texts(tmp_path, [], sources=(str(tmp_path / "corpus"),))
    assert changed.fingerprint != first.fingerprint and len(built) == 1

    def die(*arguments, **options):
        raise KeyboardInterrupt

    (tmp_path / "corpus" / "0004.txt").write_text("changed again")
    monkeypatch.setattr(build, "_finish", die)
    with pytest.raises(KeyboardInterrupt):
        open_texts(tmp_path, [], sources=(str(tmp_path / "corpus"),))
    assert len(list((tmp_path / "cache").glob(".*.partial"))) == 1
    monkeypatch.undo()
    open_texts(tmp_path, [], sources=(str(tmp_path / "corpus"),))
    assert not list((tmp_path / "cache").glob(".*"))


def test_importing_the_package_loads_nothing_heavy():
    code = (
        "import sys; from llmx.data import config; config.problems(config.DataConfig()); "
        "print([m for m in ('jax', 'grain', 'rich', 'tokenizers', 'pyarrow') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_windows_are_read_without_copying_the_corpus(tmp_path, written):
    opened = shards.open_shards(written)
    assert all(isinstance(t.base, np.memmap) or t.base is not None for t in opened.tokens)
    assert all(not t.flags.writeable and not t.flags.owndata for t in opened.tokens)
    part = split.Part(np.array([0]), np.array([int(opened.lengths[0])]))
    windows = packing.Windows(opened, part, sequence_length=4, one_document_per_row=False)
    assert windows.num_windows == -(-(int(opened.lengths[0]) - 1) // 4)
    assert os.path.getsize(written / "shard-00000.tokens") == opened.tokens[0].nbytes


def test_a_reader_who_has_seen_enough_is_no_error(tmp_path, monkeypatch):
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    (tmp_path / "read.txt").write_text("some words " * 10)
    source, out = ["--source", f"{tmp_path}/read.txt"], f"{tmp_path}/out"
    write = [*source, "--output", out]
    for flags in ([*source, "--preview", "24"], write, write, ["--verify", out]):
        monkeypatch.setattr(sys, "stdout", Closed())
        assert command.main(flags) == 0
        assert sys.stdout is None

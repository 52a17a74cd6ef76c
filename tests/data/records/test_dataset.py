"""Records on disk, their order, and the rows of a batch."""

import json
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet as pq

from llmx.data import config, dataset, loader
from llmx.data.records import __main__ as command
from llmx.data.records import build, generated, order, shards
from llmx.data.records.config import RecordsConfig

NAMES = dict(dense=("x",), features=("a", "b:2"), rows=1000)


def write_parquet(path, first, number):
    """Records whose only number says which one it is."""
    numbers = np.arange(first, first + number)
    pq.write_table(
        pa.table(dict(
            label=numbers % 2, x=numbers.astype(np.float32), a=numbers % 1000,
            b=[[n % 7] * (n % 3) for n in numbers.tolist()],
        )),
        path,
    )  # fmt: skip


def opened(tmp_path, *, sources=None, seed=0, **options):
    if sources is None:
        sources = (str(tmp_path / "x.parquet"),)
        write_parquet(sources[0], 0, 100)
    options = dict(held_out=0.2, records=RecordsConfig(**NAMES)) | options
    values = config.DataConfig(
        format="records", sources=tuple(sources), cache_dir=str(tmp_path / "cache"), **options
    )
    assert not config.problems(values)
    return dataset.open_dataset(values, sequence_length=1, seed=seed, log=lambda line: None)


def numbers_of(batch):
    return batch["dense"][:, 0, 0].astype(int).tolist()


def test_a_row_of_a_batch_is_a_record_of_one_position(tmp_path):
    data = opened(tmp_path, shuffle=False)
    batch = data.train_rows(2, range(4), 4)
    assert numbers_of(batch) == [8, 9, 10, 11]
    ids = [[8, 1, 1], [9, -1, -1], [10, 3, -1], [11, 4, 4]]
    expected = dict(
        tokens=[[0]] * 4, targets=[[0], [1], [0], [1]], segment_ids=[[1]] * 4,
        positions=[[0]] * 4, weights=[[1.0]] * 4, dense=[[[8]], [[9]], [[10]], [[11]]],
        ids=[[row] for row in ids],
    )  # fmt: skip
    assert batch.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(batch[name], value, err_msg=name)
    kinds = {name: array.dtype for name, array in batch.items()}
    floats = ("weights", "dense")
    assert kinds == {name: np.float32 if name in floats else np.int32 for name in expected}
    assert data.sequence_length == 1 and data.schema.tables == {"a": 1000, "b": 1000}


def test_every_epoch_has_each_record_once_in_another_order(tmp_path):
    data = opened(tmp_path)
    epochs = [
        [n for step in range(8) for n in numbers_of(data.train_rows(8 * e + step, range(10), 10))]
        for e in range(3)
    ]
    for epoch in epochs:
        assert sorted(epoch) == list(range(80)) and epoch != sorted(epoch)
    assert epochs[0] != epochs[1] != epochs[2]
    assert opened(tmp_path, seed=1).train_rows(0, range(10), 10)["dense"].tolist() != (
        data.train_rows(0, range(10), 10)["dense"].tolist()
    )


def test_rows_are_the_same_whoever_reads_them(tmp_path):
    """Also where a batch lies over the end of an epoch: 80 records, batches of 12."""
    data = opened(tmp_path)
    for step in (0, 6, 13):
        whole = data.train_rows(step, range(12), 12)
        for part in ([0, 1, 2], [11, 3], [7]):
            found = data.train_rows(step, part, 12)
            for name in whole:
                np.testing.assert_array_equal(found[name], whole[name][part])


def test_the_end_of_each_source_is_held_out_and_evaluated_once(tmp_path):
    sources = [str(tmp_path / "x.parquet"), str(tmp_path / "y.parquet")]
    write_parquet(sources[0], 0, 100)
    write_parquet(sources[1], 500, 50)
    data = opened(tmp_path, sources=sources)
    assert (data.num_train_windows, data.num_held_out_windows) == (120, 30)
    held, padding = [], 0
    for index in range(4):
        batch = data.held_out_rows(index, range(8), 8)
        there = batch["weights"][:, 0] > 0
        held += np.array(numbers_of(batch))[there].tolist()
        padding += (~there).sum()
        assert np.all(batch["ids"][~there] == -1) and not np.any(batch["segment_ids"][~there])
    assert sorted(held) == [*range(80, 100), *range(540, 550)] and padding == 2
    trained = [n for step in range(12) for n in numbers_of(data.train_rows(step, range(10), 10))]
    assert sorted(trained) == [*range(80), *range(500, 540)]


def test_a_loader_goes_on_where_another_stood(tmp_path):
    data = opened(tmp_path, num_threads=2)
    one = loader.Loader(data, batch_size=6, rows=range(6))
    steps = [next(one) for _ in range(5)]
    state = one.state()
    following = next(one)
    other = loader.Loader(data, batch_size=6, rows=range(6))
    other.set_state(state)
    step, batch = next(other)
    assert step == following[0] == 5 and len(steps) == 5
    for name in batch:
        np.testing.assert_array_equal(batch[name], following[1][name])
    one.close()
    other.close()
    changed = loader.Loader(opened(tmp_path, seed=9), batch_size=6, rows=range(6))
    with pytest.raises(ValueError, match="the data differs from that of the saved state"):
        changed.set_state(state)
    changed.close()


@pytest.mark.parametrize("n", [1, 2, 3, 17, 64, 1000])
def test_the_order_is_a_permutation(n):
    found = order.permuted(np.arange(n), n, key="k")
    assert sorted(found.tolist()) == list(range(n))
    one_by_one = [int(order.permuted(np.array([at]), n, key="k")[0]) for at in range(min(n, 20))]
    assert one_by_one == found[:20].tolist()


def test_the_order_of_many_records_is_like_a_random_one():
    """No correlation with the numbers, no runs of neighbors, as many fixed as by chance."""
    n = 100_000
    found = order.permuted(np.arange(n), n, key="k")
    assert abs(np.corrcoef(np.arange(n), found)[0, 1]) < 0.015  # 5 sigma
    assert (np.abs(np.diff(found)) == 1).sum() < 15 and (found == np.arange(n)).sum() < 10
    other = order.permuted(np.arange(n), n, key="l")
    assert (found == other).sum() < 10 and abs(np.corrcoef(found, other)[0, 1]) < 0.015
    huge = order.permuted(np.arange(1000), 1 << 40, key="k")
    assert len(np.unique(huge)) == 1000 and huge.max() > 1 << 39


# ---------------------------------------------------------------------------------------- on disk


def lines_of(number):
    return "".join(f"{n % 2}\t{n}\t{n:x}\n" for n in range(number))


LINES = dict(dense=("x",), features=("a",), rows=1000)


def test_shards_say_when_something_is_wrong_with_them(tmp_path):
    folder = tmp_path / "s"
    arguments = ["--source", "generated:3000", "--output", str(folder)]
    assert command.main(arguments) == 0
    assert shards.open_shards(folder).num_records == 3000
    path = folder / "shard-00000.records"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"checksum mismatch .* its content has changed on disk"):
        shards.open_shards(folder)
    path.write_bytes(content[:-1])
    with pytest.raises(ValueError, match=r"has .* bytes, the index says .*: delete"):
        shards.open_shards(folder)
    path.unlink()
    with pytest.raises(ValueError, match="is missing"):
        shards.open_shards(folder)
    index = json.loads((folder / "index.json").read_text())
    index["shards"][0]["clicks"] += 1
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="does not match its own checksum"):
        shards.open_shards(folder)
    with pytest.raises(ValueError, match="does not exist: the folder holds no finished record"):
        shards.open_shards(tmp_path)


def test_several_shards_of_several_files_are_one_list(tmp_path, monkeypatch):
    monkeypatch.setattr(generated, "SHARD_RECORDS", 30)
    (tmp_path / "one.tsv").write_text(lines_of(100))
    write = pa.table(dict(label=[0, 1], x=pa.array([7, 8]), a=["7", "8"]))
    pq.write_table(write, tmp_path / "two.parquet")
    monkeypatch.setattr(build.tsv, "BLOCK_BYTES", 100)
    recipe = build.make_recipe(str(tmp_path), RecordsConfig(**LINES), skip_bad=False)
    folder = tmp_path / "out"
    folder.mkdir()
    build.write(folder, recipe)
    found = shards.open_shards(folder)
    assert found.num_records == 102 and len(found.records) >= 3 and found.num_clicks == 51
    chunk = found.take(np.array([101, 0, 57, 100]))
    np.testing.assert_allclose(chunk.dense[:, 0], np.log1p([8, 0, 57, 7]), rtol=1e-6)
    assert chunk.ids[0] == found.take(np.array([8])).ids  # the hash of "8" is the same


@pytest.mark.parametrize("source", ["lines", "uneven lines", "generated:200"])
def test_an_interrupted_build_goes_on_to_the_same_bytes(tmp_path, monkeypatch, source):
    monkeypatch.setattr(generated, "SHARD_RECORDS", 30)
    monkeypatch.setattr(build.tsv, "BLOCK_BYTES", 100)
    if "lines" in source:
        lines = lines_of(300)
        if source == "uneven lines":
            rng = np.random.default_rng(0)
            columns = [line.split("\t") for line in lines.splitlines()]
            lines = "".join(
                "\t".join([label, "0" * rng.integers(0, 18) + number, *rest]) + "\n"
                for label, number, *rest in columns
            )
        (tmp_path / "x.tsv").write_text(lines)
        source = str(tmp_path / "x.tsv")
    recipe = build.make_recipe(source, RecordsConfig(**LINES), skip_bad=False)
    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()
    build.write(tmp_path / "whole", recipe)

    written, write_progress = [], shards.write_progress

    def stop_after_three(*arguments):
        write_progress(*arguments)
        written.append(arguments)
        if len(written) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(shards, "write_progress", stop_after_three)
    with pytest.raises(KeyboardInterrupt):
        build.write(tmp_path / "broken", recipe)
    monkeypatch.setattr(shards, "write_progress", write_progress)
    before = (tmp_path / "broken" / "shard-00001.records").stat().st_mtime_ns
    build.write(tmp_path / "broken", recipe)
    assert (tmp_path / "broken" / "shard-00001.records").stat().st_mtime_ns == before
    contents = [
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        for name in ("whole", "broken")
    ]
    assert contents[0] == contents[1] and len(contents[0]) > 5


@pytest.mark.slow
def test_a_killed_command_goes_on(tmp_path):
    def start(name):
        arguments = [sys.executable, "-m", "llmx.data.records", "--source", "generated:3000000"]
        return subprocess.Popen([*arguments, "--output", str(tmp_path / name)])

    killed = start("killed")
    deadline = time.time() + 60
    while not (tmp_path / "killed" / "progress.json").exists() and time.time() < deadline:
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    assert not (tmp_path / "killed" / "index.json").exists()
    assert start("killed").wait() == 0 and start("whole").wait() == 0
    indices = [(tmp_path / name / "index.json").read_bytes() for name in ("killed", "whole")]
    assert indices[0] == indices[1]


def test_the_command_says_what_it_does_not_take(tmp_path, capsys):
    folder, file = tmp_path / "s", tmp_path / "file"
    file.write_text("1\t2\n")
    cases = {
        (): "--source is missing",
        ("--source", "generated:5"): "--output is missing",
        ("--source", "generated:5", "--output", str(file)): "is a file: name a folder",
        ("--source", "generated:no", "--output", str(folder)): "is no number of records",
        ("--source", "shards:x", "--output", str(folder)): "is shards already",
        ("--source", str(file), "--rows", "0", "--output", str(folder)): "data.records.rows=0",
        ("--source", str(file), "--output", str(folder)): f"{file} line 1: it has 2 columns",
        ("--source", "generated:5", "--output", str(tmp_path)): "holds other files (file, s)",
    }
    for arguments, words in cases.items():
        assert command.main(list(arguments)) == 2
        assert words in capsys.readouterr().err
    arguments = ["--source", "generated:50", "--output", str(tmp_path / "new")]
    assert command.main(arguments) == command.main(arguments) == 0
    assert "50 records" in capsys.readouterr().out
    other = ["--source", "generated:60", *arguments[2:]]
    assert command.main(other) == 2 and "--overwrite" in capsys.readouterr().err
    assert command.main([*other, "--overwrite"]) == 0
    assert command.main(["--verify", str(tmp_path / "new")]) == 0
    assert "60 records" in capsys.readouterr().out


# ----------------------------------------------------------------------------------------- configs


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(sources=()), "data.sources is empty"),
        (dict(sources=("nothing.tsv",)), "'nothing.tsv' names no files of records"),
        (dict(sources=("s3://bucket/x.tsv",)), "is a URL, and this must be local"),
        (dict(sources=("object:x",)), "is an object of a program"),
        (dict(sources=("generated:0",)), "records number from 1 to"),
        (dict(sources=("generated:9:x",)), "is no number of records"),
        (dict(sources=("generated:9", "generated:9")), "2 times: name it once"),
        (dict(weights=(1.0,)), "an epoch visits each record once; set data.weights=()"),
        (dict(tokenizer="bytes"), "have no use with data.format='records'"),
        (dict(records=RecordsConfig(features=())), "a record has no features"),
        (dict(records=RecordsConfig(features=("C1", "C1"))), "'C1' is named 2 times"),
        (dict(records=RecordsConfig(features=("C1:x",))), "'C1:x' is no feature"),
        (dict(records=RecordsConfig(features=("a:60000", "b:60000"))), "above the 65,536"),
        (dict(records=RecordsConfig(label="")), "data.records.label='' is no column"),
    ],
)
def test_what_a_config_cannot_have_is_an_error(options, words):
    values = config.DataConfig(**dict(format="records", sources=("generated:9",)) | options)
    assert any(words in problem for problem in config.problems(values)), config.problems(values)


def test_lists_in_lines_and_sources_of_other_columns_are_errors(tmp_path):
    (tmp_path / "x.tsv").write_text(lines_of(5))
    values = config.DataConfig(
        format="records", sources=(str(tmp_path / "x.tsv"),),
        records=RecordsConfig(**LINES | {"features": ("a:2",)}),
    )  # fmt: skip
    assert "one id of each feature: write Parquet" in config.problems(values)[0]
    with pytest.raises(ValueError, match="has other columns than 'generated:9'"):
        opened(tmp_path, sources=("generated:9", "generated-history:9"))
    values.sources = ("generated:9",)
    with pytest.raises(ValueError, match=r"batch\.sequence_length=8 .* set batch\.sequence_len"):
        dataset.open_dataset(values, sequence_length=8, seed=0)

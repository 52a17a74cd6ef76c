"""Which files a source names: nothing is left out silently, and changed content is noticed."""

import os
import pathlib

import pytest

from llmx.data import __main__ as command
from llmx.data import config, dataset, shards, sources


def names(listing):
    return [pathlib.Path(file.path).name for file in listing.files]


def fill(folder, **contents):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name.replace("__", ".")).write_text(content)
    return str(folder)


def open_source(tmp_path, source, *, lines=None, **settings):
    return dataset.open_dataset(
        config.DataConfig(sources=(str(source),), held_out=0.0, **settings),
        sequence_length=4, seed=0, cache_dir=tmp_path / "cache",
        log=(lines if lines is not None else []).append,
    )  # fmt: skip


def test_data_of_another_kind_in_a_folder_is_an_error_with_counts(tmp_path, capsys):
    folder = fill(tmp_path / "c", a__jsonl='{"text": "some text"}\n', b__html="<p>", d__html="<p>")
    for name in ("x.csv.gz", "y.jsonl.xz", "z.zip", "w.json", "v.feather", "u.csv", "P.ZST"):
        (tmp_path / "c" / name).write_bytes(b"x")
    wanted = (
        r"\.csv 1 \(write it as .*\.csv\.gz 1 \(decompress it, and write it as .*\.feather 1 .*"
        r"\.json 1 .*\.xz 1 \(decompress it first\).*\.zst 1 \(name it \.txt\.zst or "
    )
    with pytest.raises(ValueError, match=wanted + r".*'\*\.jsonl', or set data.skip_bad=True"):
        open_source(tmp_path, folder)
    assert any(
        ".csv.gz 1" in text for text in config.problems(config.DataConfig(sources=(folder,)))
    )
    assert command.main(["--source", folder, "--output", str(tmp_path / "out")]) == 2
    assert ".csv.gz 1" in capsys.readouterr().err
    lines = []
    assert open_source(tmp_path, folder, lines=lines, skip_bad=True).num_train_windows
    counts = ".csv 1, .csv.gz 1, .feather 1, .html 2, .json 1, .xz 1, .zip 1, .zst 1"
    assert f"data: {folder}: left out: {counts}" in lines
    with pytest.raises(ValueError, match=r"holds data of kinds that are not read: .csv 1"):
        sources.list_files(f"{folder}/*")
    out = ["--source", f"{folder}/*.[!Z]*", "--output", str(tmp_path / "out"), "--skip-bad"]
    assert command.main(out) == 0
    assert "left out: .csv 1" in capsys.readouterr().err


def test_other_and_hidden_files_are_counted(tmp_path):
    folder = tmp_path / "c"
    fill(folder, a__txt="some text", i__png="x", j__PNG="x", k="x", __hidden__txt="x", __DS="x")
    fill(folder / ".git", a__txt="x")
    os.mkfifo(folder / "pipe.txt")
    left_out = {".png": 2, "device, pipe or socket": 1, "hidden": 1, "hidden folder": 1}
    assert sources.list_files(str(folder)).left_out == left_out | {"without suffix": 1}
    lines = []
    open_source(tmp_path, folder, lines=lines)
    assert any("left out: .png 2, device, pipe or socket 1, hidden 1" in line for line in lines)
    fill(folder / "sub", b__txt="x")
    assert sources.list_files(f"{folder}/*.txt").left_out["device, pipe or socket"] == 1
    assert sources.list_files(f"{folder}/[as]*").left_out == {"folder": 1}
    with pytest.raises(ValueError, match=r"pipe.txt is a device, pipe or socket"):
        sources.list_files(str(folder / "pipe.txt"))


def test_linked_folders_are_followed_and_nothing_is_read_twice(tmp_path):
    fill(tmp_path / "elsewhere", b__txt="x", c__txt="x")
    folder = tmp_path / "c"
    fill(folder, a__txt="x")
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    (folder / "same").symlink_to(tmp_path / "elsewhere")
    (folder / "cycle").symlink_to(folder)
    (tmp_path / "elsewhere" / "back").symlink_to(folder)
    (folder / "z.txt").symlink_to(folder / "a.txt")
    listing = sources.list_files(str(folder))
    assert names(listing) == ["a.txt", "b.txt", "c.txt"]
    assert listing.left_out == {"linked twice": 1}
    for pattern in ("**/*.txt", "**"):
        assert names(sources.list_files(f"{folder}/{pattern}")) == ["a.txt", "b.txt", "c.txt"]
    assert names(sources.list_files(f"{folder}/*.txt")) == ["a.txt"]
    (folder / "gone.txt").symlink_to(tmp_path / "nothing")
    for source in (str(folder), f"{folder}/**", f"{folder}/*"):
        with pytest.raises(ValueError, match=r"gone.txt \(broken link\): fix or remove"):
            sources.list_files(source)
        assert sources.list_files(source, skip_bad=True).left_out["broken links or folders"] == 1
    with pytest.raises(ValueError, match=r"gone.txt' is a link to nothing"):
        sources.list_files(str(folder / "gone.txt"))


@pytest.mark.parametrize("hash_bytes", [sources.HASH_BYTES, 10])
def test_other_content_of_the_same_size_and_time_is_noticed(tmp_path, monkeypatch, hash_bytes):
    """Hashed whole, or beyond HASH_BYTES by sample and time of change."""
    monkeypatch.setattr(sources, "HASH_BYTES", hash_bytes)
    folder = tmp_path / "c"
    fill(folder, a__txt="first text of the file", b__txt="and another")
    before = open_source(tmp_path, folder)
    status = (folder / "a.txt").stat()
    (folder / "a.txt").write_text("other text of the file")
    os.utime(folder / "a.txt", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (folder / "a.txt").stat().st_mtime_ns == status.st_mtime_ns
    after = open_source(tmp_path, folder)
    assert after.fingerprint != before.fingerprint
    assert after.fingerprint == open_source(tmp_path, folder).fingerprint
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_samples_of_large_sources_are_spread_over_all_files(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "HASH_BYTES", 10)
    monkeypatch.setattr(sources, "_SAMPLE_BYTES", 8)
    monkeypatch.setattr(sources, "_SAMPLES", 5)
    (tmp_path / "a.txt").write_bytes(b"a" * 1000)
    (tmp_path / "b.txt").write_bytes(b"b" * 1000)
    files = sources.list_files(str(tmp_path)).files
    before = sources.content_hash(files)
    for at in (0, 498, 996, 1494, 1999):  # begin, quarters and end of the two together
        path = tmp_path / ("a.txt" if at < 1000 else "b.txt")
        raw = bytearray(path.read_bytes())
        raw[at % 1000] = 0
        path.write_bytes(raw)
        after = sources.content_hash(files)
        assert after != before and before.startswith("sampled:")
        before = after


def test_names_that_no_file_can_have(tmp_path):
    for name in ("~nobody-here/x", "a" * 5000, "a\0b", "shards:" + "b" * 5000, "\udcff", "[" * 300):
        made = config.DataConfig(sources=(name,), tokenizer=name.removeprefix("shards:"))
        assert len(config.problems(made)) == 2


def test_a_crafted_index_is_refused(tmp_path):
    """With a checksum that fits: only its content is wrong."""
    folder = fill(tmp_path / "c", a__txt="some text to read")
    out = tmp_path / "out"
    assert command.main(["--source", folder, "--output", str(out)]) == 0
    index = shards.read_index(out)
    entry = index["shards"][0]
    for changes, words in (
        ({"shards": [entry | {"name": "../c/a"}]}, r"shards\[0\] is .*describes no shard"),
        ({"shards": [entry | {"tokens": -1}]}, "describes no shard"),
        ({"shards": [entry | {"tokens": True}]}, "describes no shard"),
        ({"shards": [{"name": "shard-00000"}]}, "describes no shard"),
        ({"shards": {}}, "shards is not a list"),
        ({"vocab_size": 10**30}, "vocab_size is 1000"),
        ({"vocab_size": "257"}, "vocab_size is '257'"),
        ({"dtype": "<u4"}, "dtype is '<u4', and 257 tokens are written as <u2"),
        ({"dtype": ["O"]}, "dtype is "),
        ({"end_of_document": 257}, "end_of_document=257 is not one of 257"),
        ({"end_of_document": 3}, "ends documents by token 256, index.json says 3"),
        ({"tokenizer_sha256": None}, "tokenizer_sha256 is None"),
    ):
        shards.write_json(out / shards.INDEX, shards.seal(index | changes))
        with pytest.raises(ValueError, match=words):
            shards.open_shards(out)
        assert command.main(["--verify", str(out)]) == 2
    for raw in (b"[]", b"[" * 10**5, b"\xff", b'{"format": NaN}', b'{"a": 1, "a": 1}', b"{},"):
        (out / shards.INDEX).write_bytes(raw)
        with pytest.raises(ValueError, match=r"index\.json: .*delete .* and make it again"):
            shards.open_shards(out)


def test_damaged_progress_is_refused(tmp_path):
    folder = fill(tmp_path / "c", a__txt="some text to read", b__txt="more text to read")
    out = tmp_path / "out"
    arguments = ["--source", folder, "--output", str(out), "--shard-tokens", "1"]
    assert command.main(arguments) == 0
    index = shards.read_index(out)
    position = {"file": 1, "offset": 0, "record": 0}
    progress = {"identity": index["identity"], "shards": index["shards"][:1], "skipped": {}}
    (out / shards.INDEX).unlink()
    for changes, code in (
        ({"position": position | {"offset": -1}}, 2),
        ({"position": [1]}, 2),
        ({"position": position, "skipped": [1]}, 2),
        ({"position": position, "shards": [{}]}, 2),
        ({"position": position, "identity": 3}, 2),
        ({"position": position}, 0),
    ):
        shards.write_json(out / shards.PROGRESS, shards.seal(progress | changes))
        assert command.main(arguments) == code
    assert shards.read_index(out)["shards"] == index["shards"]
    (out / shards.INDEX).unlink()
    shards.write_json(out / shards.PROGRESS, progress | {"position": position})  # without a seal
    assert command.main(arguments) == 2

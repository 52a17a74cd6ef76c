"""URLs in place of local paths: what each command does with them, and what they need."""

import collections
import hashlib
import importlib.util
import json
import os
import pathlib
import re
import sys

import pytest
from support import data_formats as formats
from support import memory_store

from llmx.data import __main__ as command
from llmx.data import (
    build,
    dataset,
    documents,
    remote,
    shards,
    sources,
    tokenizers,
    transient,
)

COMMANDS = {
    "train": ["train", "--config", "configs/quickstart.py", "--workdir", "URL"],
    "start_from": ["train", "--config", "configs/quickstart.py", "--config.start_from=URL"],
    "cache_dir": ["train", "--config", "configs/quickstart.py", "--config.data.cache_dir=URL"],
    "generate": ["generate", "--workdir", "URL", "--prompt", "x"],
    "evaluate": ["evaluate", "--workdir", "URL"],
    "from_hf": ["convert", "--from-hf", "URL", "--workdir", "OUT"],
    "convert": ["convert", "--from-hf", "OUT", "--workdir", "URL"],
    "to_hf": ["convert", "--to-hf", "URL", "--workdir", "OUT"],
    "output": ["data", "--source", "stdlib", "--output", "URL"],
    "source": ["data", "--source", "URL", "--output", "OUT"],
    "verify": ["data", "--verify", "URL"],
    "checkpoint": ["checkpoint", "ls", "URL"],
    "metrics": ["metrics", "URL"],
    "history": ["config.history", "URL"],
}
LOCAL = ("cache_dir", "convert", "verify")
WORKDIRS = ("checkpoint", "evaluate", "generate", "history", "metrics", "train")
ABSENT = ("from_hf", "source", "start_from")


def run(arguments, tmp_path, monkeypatch, url):
    """The exit code of a command in this process, and in an empty folder."""
    root = pathlib.Path(__file__).parents[2]
    name, *rest = (
        {"URL": url, "OUT": str(tmp_path / "out")}.get(a, a)
        .replace("=URL", f"={url}").replace("configs/", f"{root}/configs/")
        for a in arguments
    )  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, *rest])
    package = f"llmx.{name}"
    with_main = name in ("data", "checkpoint", "evaluate")
    module = importlib.import_module(f"{package}.__main__" if with_main else package)
    try:
        return module.main() if name == "metrics" else module.main(rest)
    except SystemExit as ended:
        return ended.code


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_url_that_cannot_be_used_is_refused_and_nothing_is_written(
    tmp_path, monkeypatch, capsys, name
):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    url, message = "memory://bucket/key", "does not exist"
    if name in LOCAL:
        message = "is a URL, and this must be local"
    elif name in WORKDIRS:
        message = "a work directory is local, or in one of the stores s3://, gs://"
    elif name not in ABSENT:
        url, message = "nonsense://bucket/key", "nonsense is no kind of store that is known"
    assert run(COMMANDS[name], tmp_path, monkeypatch, url) == 2
    said = capsys.readouterr().err
    (line,) = [line for line in said.splitlines() if url in line]
    assert message in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["source", "output", "from_hf", "start_from", "to_hf", "train", "evaluate"]
)
def test_a_url_whose_package_is_missing_is_refused_with_what_brings_it(
    tmp_path, monkeypatch, capsys, name
):
    find = importlib.util.find_spec
    absent = lambda module, *rest: None if module == "s3fs" else find(module, *rest)  # noqa: E731
    monkeypatch.setattr(remote.importlib.util, "find_spec", absent)
    assert run(COMMANDS[name], tmp_path, monkeypatch, "s3://bucket/key") == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "s3://bucket" in line]
    assert "needs s3fs, which is not installed: pip install 's3fs>=2025.3'" in line
    assert list(tmp_path.iterdir()) == []


def test_what_a_url_needs(monkeypatch):
    monkeypatch.setattr(remote.importlib.util, "find_spec", lambda name: None)
    for url, remedy in [
        ("s3://b/k", "--output s3://b/k needs s3fs, which is not installed: pip install 's3fs>="),
        ("gs://b/k", "pip install 'gcsfs>=2025.3'"),
        ("az://b/k", "pip install 'adlfs>=2024.12'"),
        ("hf://datasets/o/n", "pip install 'huggingface-hub'"),
        ("nonsense://b", "nonsense is no kind of store that is known"),
        ("://b", "this is no kind of store"),
        ("file:///data/x", "without file://"),
    ]:
        (problem,) = remote.problems("--output ", url)
        assert remedy in problem
    assert not remote.problems("", "memory://x/y") and not remote.problems("", "C:/x")
    assert remote.scheme_of("zip://a.txt::s3://b/k.zip") == "zip"


# ---- data files ----


@pytest.fixture
def store():
    with memory_store.emptied() as files:
        yield files


def put(files, folder, url):
    """Copies a local folder or file to a URL, hidden files included."""
    if folder.is_file():
        return files.pipe_file(url, folder.read_bytes())
    for path in folder.rglob("*"):
        if path.is_file():
            files.pipe_file(f"{url}/{path.relative_to(folder).as_posix()}", path.read_bytes())


def test_every_format_gives_the_rows_of_the_local_file(tmp_path, store):
    names = [pathlib.Path(name) for name in formats.write_all(tmp_path / "c")]
    plain = formats.open_source(tmp_path, str(tmp_path / "c" / "plain.jsonl"))
    for name in names:
        url = f"memory://bucket/c/{name.name}"
        put(store, name, url)
        if "array_record" in name.name:
            with pytest.raises(ValueError, match="ArrayRecord is read from local files only"):
                sources.list_files(url)
            continue
        opened = formats.open_source(tmp_path, url)
        assert opened.fingerprint == plain.fingerprint, url
        expected, found = (one.train_rows(3, range(4), 4) for one in (plain, opened))
        assert all((found[key] == value).all() for key, value in expected.items()), url
        whole, _ = formats.read(url)
        for i in (0, 6, 19, 58):
            assert formats.read(url, start=whole[i].end)[0] == whole[i + 1 :], (url, i)


def test_folders_and_globs_list_as_local_ones_do(tmp_path, store):
    folder = tmp_path / "c"
    formats.write_all(folder / "data")
    formats.write_records(folder / "a.html", [b"x"])
    for name in ("b/z.txt", "b/a.txt", "b.txt", "a/x.md", ".h/x.txt", "b/.x.txt", "x", "b/p.html"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("text")
    for name in folder.rglob("*array_record*"):
        name.unlink()
    put(store, folder, "memory://bucket/c")
    for pattern in ("", "/data/*.arrow", "/b/*", "/data/t.parquet", "/data/saved", "/data/*ed"):
        local = sources.list_files(f"{folder}{pattern}")
        listing = sources.list_files(f"memory://bucket/c{pattern}")
        local_names = [str(pathlib.Path(f.path).relative_to(folder)) for f in local.files]
        assert [f.path.removeprefix("memory://bucket/c/") for f in listing.files] == local_names
        assert listing.left_out == local.left_out or pattern == "/b/*"  # globs skip hidden files
    deep = [f.path for f in sources.list_files("memory://bucket/c/**/*.txt").files]
    assert {"memory://bucket/c/b/a.txt", "memory://bucket/c/b/z.txt"} <= set(deep)


def test_urls_that_name_nothing_to_read(tmp_path, store):
    put(store, (tmp_path / "x.csv").write_text("a") and tmp_path / "x.csv", "memory://b/c/x.csv")
    for url, message in [
        ("memory://b/none.txt", r"'memory://b/none.txt' does not exist: check its name"),
        ("memory://b/*.txt", r"matches no file"),
        ("memory://b/c", r"holds data of kinds that are not read: \.csv 1"),
        ("memory://b/c/x.csv", r"files of kind \.csv are not read"),
        ("s3n://b/c", r"s3n is no kind of store"),
        ("shards:memory://b/c", r"holds no finished token shards"),
    ]:
        (problem,) = sources.problems(url)
        assert re.search(message, problem), problem
    (tmp_path / "d").mkdir()
    for split in ("train", "test"):
        formats.save_dataset(tmp_path / "d" / split, [[split]])
    (tmp_path / "d" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    put(store, tmp_path / "d", "memory://b/d")
    assert (
        "name the one to read, such as 'memory://b/d/train'" in sources.problems("memory://b/d")[0]
    )
    assert [d.text for d in formats.read("memory://b/d/test")[0]] == [b"test"]


def test_a_changed_object_is_read_again(tmp_path, store):
    url = "memory://b/a.txt"
    store.pipe_file(url, b"one text " * 30)
    first = formats.open_source(tmp_path, url)
    assert formats.open_source(tmp_path, url).fingerprint == first.fingerprint
    store.pipe_file(url, b"two text " * 30)
    assert formats.open_source(tmp_path, url).fingerprint != first.fingerprint
    recipe = build.make_recipe(
        [url], tokenizer=tokenizers.ByteTokenizer(), text_key="", skip_bad=False
    )
    store.pipe_file(url, b"three text " * 30)
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match=r"b/a\.txt changed while it was read: run again"):
        build.write_shards(tmp_path / "out", recipe, report=lambda *_: None)
    store.rm(url)
    with pytest.raises(ValueError, match=r"b/a\.txt: cannot be read"):
        list(recipe.documents(documents.Position(), collections.Counter()))


def test_a_fetched_folder_follows_the_store(tmp_path, store):
    put_all = {"a.txt": b"one", "b/c.txt": b"two"}
    for name, raw in put_all.items():
        store.pipe_file(f"memory://b/f/{name}", raw)
    target = tmp_path / "t"
    held = lambda: {  # noqa: E731
        p.relative_to(target).as_posix(): p.read_bytes() for p in target.rglob("*") if p.is_file()
    }
    remote.fetch("memory://b/f", target)
    assert held() == put_all
    (target / "d.txt").write_bytes(b"left here")
    before = (target / "a.txt").stat().st_ino
    store.rm("memory://b/f/b/c.txt")
    store.pipe_file("memory://b/f/d.txt", b"new")
    remote.fetch("memory://b/f", target)
    assert held() == {"a.txt": b"one", "d.txt": b"new"}
    assert (target / "a.txt").stat().st_ino == before  # not read again
    (target / "a.txt").write_bytes(b"own")
    remote.fetch("memory://b/f", target)
    assert held()["a.txt"] == b"one"
    store.pipe_file("memory://b/f/a.txt", b"changed")
    remote.fetch("memory://b/f", target)
    assert held()["a.txt"] == b"changed"
    store.store["/b/f//x/y"] = store.store["/b/f/a.txt"]  # a key that a store may hold
    with pytest.raises(OSError, match="holds the name '/x/y', which leads out of a folder"):
        remote.fetch("memory://b/f", target)
    with pytest.raises(FileNotFoundError, match="does not exist, or holds no files"):
        remote.fetch("memory://b/none", tmp_path / "n")


# ---- token shards ----


@pytest.fixture
def machines(tmp_path, monkeypatch):
    """Calls `llmx.data` as on a machine of that name, each with its own disk."""

    def call(machine, *arguments):
        monkeypatch.setattr(dataset, "DATA_CACHE", str(tmp_path / machine))
        return command.main([*map(str, arguments)])

    return call


def test_shards_in_a_store_are_those_of_a_local_folder(tmp_path, store, machines, capsys):
    (tmp_path / "a.jsonl").write_bytes(formats.jsonl())
    source = ["--source", tmp_path / "a.jsonl", "--shard-tokens", 300]
    assert machines("a", *source, "--output", tmp_path / "local") == 0
    assert machines("a", *source, "--output", "memory://b/out") == 0
    local = {path.name: path.read_bytes() for path in (tmp_path / "local").iterdir()}
    assert memory_store.objects(store, "b/out") == local and len(local) > 10
    assert not list((tmp_path / "a" / "uploads").glob("*/*"))  # nothing is left on the disk
    assert machines("b", *source, "--output", "memory://b/out/") == 0
    assert "is complete already" in capsys.readouterr().out
    changed = [*source[:-1], 400, "--output", "memory://b/out"]
    assert machines("a", *changed) == 2
    assert "memory://b/out holds the shards of other sources" in capsys.readouterr().err
    assert memory_store.objects(store, "b/out") == local
    assert machines("a", *changed, "--overwrite") == 0
    assert len(memory_store.objects(store, "b/out")) < len(local)
    store.pipe_file("memory://b/mine/thesis.txt", b"x")
    assert machines("a", *source, "--output", "memory://b/mine") == 2
    assert "memory://b/mine holds other files (thesis.txt)" in capsys.readouterr().err
    opened = [
        formats.open_source(tmp_path, f"shards:{place}", num_threads=0)
        for place in (tmp_path / "local", "memory://b/out")
    ]
    assert opened[0].fingerprint == opened[1].fingerprint  # it does not depend on their size
    assert machines("a", *source, "--output", "memory://b/out", "--overwrite") == 0
    again = formats.open_source(tmp_path, "shards:memory://b/out")
    assert again.fingerprint == opened[0].fingerprint
    (copied,) = (tmp_path / "cache" / "fetched").glob("*/")
    assert {path.name: path.read_bytes() for path in copied.iterdir()} == local


def test_another_machine_continues_shards_to_the_same_bytes(tmp_path, store, machines, monkeypatch):
    (tmp_path / "a.jsonl").write_bytes(formats.jsonl())
    source = ["--source", tmp_path / "a.jsonl", "--shard-tokens", 300]
    assert machines("a", *source, "--output", tmp_path / "local") == 0
    local = {path.name: path.read_bytes() for path in (tmp_path / "local").iterdir()}
    original, written = shards.ShardWriter.close, []

    def close(writer):
        written.append(writer.name)
        if len(written) == 3:
            raise KeyboardInterrupt
        return original(writer)

    monkeypatch.setattr(shards.ShardWriter, "close", close)
    assert machines("a", *source, "--output", "memory://b/out") == 130
    assert {"progress.json", "shard-00001.tokens"} < memory_store.objects(store, "b/out").keys()
    assert "shard-00002.tokens" not in memory_store.objects(store, "b/out")
    assert machines("b", *source, "--output", "memory://b/out") == 0
    assert written[3] == "shard-00002"  # it went on, and did not begin again
    assert memory_store.objects(store, "b/out") == local


@pytest.fixture
def cut_off(tmp_path, store, machines, monkeypatch, capsys):
    """Three shards of a build are complete on this disk, two of them in the store; its options, the
    files of the whole, and the shards that are written from then on."""
    (tmp_path / "a.jsonl").write_bytes(formats.jsonl())
    source = ["--source", tmp_path / "a.jsonl", "--shard-tokens", 300]
    assert machines("a", *source, "--output", tmp_path / "local") == 0
    original, close, written = remote.upload, shards.ShardWriter.close, []

    def upload(file, url):
        if "shard-00002" in url:
            raise transient.Transient(f"503 SlowDown ({url})")
        original(file, url)

    with monkeypatch.context() as patch:
        patch.setattr(remote, "upload", upload)
        assert machines("a", *source, "--output", "memory://b/out") == 75
    said = capsys.readouterr().err
    assert "error: --output memory://b/out cannot be written (503 SlowDown (" in said
    assert said.endswith("): run again\n")
    assert "shard-00002.tokens" not in memory_store.objects(store, "b/out")
    monkeypatch.setattr(shards.ShardWriter, "close", lambda w: written.append(w.name) or close(w))
    whole = {path.name: path.read_bytes() for path in (tmp_path / "local").iterdir()}
    return source, whole, written


@pytest.mark.parametrize("listing", ["whole", "empty", "without progress"])
def test_shards_that_were_not_uploaded_are_not_made_again(
    store, machines, cut_off, monkeypatch, listing
):
    """Those on this disk are good: a store that is behind, or lists nothing, takes none of them."""
    source, whole, written = cut_off
    if listing == "without progress":
        remote.remove("memory://b/out/progress.json")
    with monkeypatch.context() as patch:
        if listing == "empty":
            patch.setattr(remote, "find", lambda url: {})
        assert machines("a", *source, "--output", "memory://b/out") == 0
    assert written[0] == "shard-00003"
    assert memory_store.objects(store, "b/out") == whole


def test_a_finished_build_that_was_not_uploaded_is_not_made_again(
    store, machines, cut_off, monkeypatch
):
    source, whole, written = cut_off
    original = remote.upload

    def upload(file, url):
        if url.endswith("index.json"):
            raise transient.Transient(f"503 SlowDown ({url})")
        original(file, url)

    with monkeypatch.context() as patch:
        patch.setattr(remote, "upload", upload)
        assert machines("a", *source, "--output", "memory://b/out") == 75
    written.clear()
    assert machines("a", *source, "--output", "memory://b/out") == 0
    assert written == [] and memory_store.objects(store, "b/out") == whole


def test_a_shard_that_this_disk_has_lost_is_taken_from_the_store(
    tmp_path, store, machines, cut_off
):
    source, whole, written = cut_off
    next((tmp_path / "a" / "uploads").rglob("shard-00001.tokens")).unlink()
    assert machines("a", *source, "--output", "memory://b/out") == 0
    assert written[0] == "shard-00003"
    assert memory_store.objects(store, "b/out") == whole


def test_another_machine_does_not_believe_an_empty_listing(
    store, machines, cut_off, monkeypatch, capsys
):
    """The store has the progress, and does not list it."""
    source, *_ = cut_off
    before = memory_store.objects(store, "b/out")
    monkeypatch.setattr(remote, "find", lambda url: {})
    assert machines("b", *source, "--output", "memory://b/out") == 75
    assert "the store does not list what it holds" in capsys.readouterr().err
    assert memory_store.objects(store, "b/out") == before


def test_finished_shards_of_other_settings_are_not_removed(store, machines, cut_off, capsys):
    source, whole, _ = cut_off
    remote.remove("memory://b/out/progress.json")
    other = [*source[:-1], 400, "--output", "memory://b/out"]
    assert machines("a", *other) == 2
    assert "the unfinished result of other sources or settings" in capsys.readouterr().err
    assert machines("a", *source, "--output", "memory://b/out") == 0
    assert memory_store.objects(store, "b/out") == whole


def test_a_bucket_that_does_not_exist_is_named_with_what_to_do(
    tmp_path, store, machines, monkeypatch, capsys
):
    (tmp_path / "a.txt").write_text("text")

    def fail(*_, **__):
        raise FileNotFoundError("The specified bucket does not exist")

    monkeypatch.setattr(type(store), "put_file", fail)
    assert machines("a", "--source", tmp_path / "a.txt", "--output", "memory://nobucket/tok") == 2
    said = capsys.readouterr().err.splitlines()[-1]
    for words in ("--output memory://nobucket/tok", "bucket does not exist", "check its name"):
        assert words in said


@pytest.mark.parametrize("damage", [b"", b'{"a.txt": [1, 2', b"[1]", b"\xff\xfe"])
def test_a_damaged_list_of_what_was_copied_is_no_list(tmp_path, store, damage):
    """As where the machine went down while it was written: it is copied anew."""
    remote.write_bytes("memory://b/run/a.txt", b"of the store")
    target = tmp_path / "copy"
    remote.fetch("memory://b/run", target)
    target.with_name("copy.json").write_bytes(damage)
    (target / "a.txt").write_bytes(b"changed here")
    remote.fetch("memory://b/run", target)
    assert (target / "a.txt").read_bytes() == b"of the store"
    assert json.loads(target.with_name("copy.json").read_bytes()).keys() == {"a.txt"}


def test_the_list_of_what_was_copied_is_whole_wherever_a_copy_is_cut_off(
    tmp_path, store, monkeypatch
):
    for name in ("a.txt", "b.txt"):
        remote.write_bytes(f"memory://b/run/{name}", b"x" * 1000)
    target, original = tmp_path / "copy", os.replace

    def replace(source, to):
        if str(to).endswith("copy.json") and target.with_name("copy.json").exists():
            raise KeyboardInterrupt  # the second list is written, and not yet in its place
        original(source, to)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        remote.fetch("memory://b/run", target)
    assert json.loads(target.with_name("copy.json").read_bytes()).keys() == {"a.txt"}


@pytest.mark.parametrize(
    ("given", "reads"),
    [
        ([b"right"], 1), ([b"wrong", b"right"], 2), ([b"other", b"other"], 2),
        ([b"short"[:3], b"other", b"other"], 3), ([b"one  ", b"two  ", b"three"], 0),
    ],
)  # fmt: skip
def test_an_etag_that_is_no_md5(tmp_path, monkeypatch, caplog, given, reads):
    """It may look like one: what is read twice alike is the content."""
    calls = []

    class Store:
        def get_file(self, source, target):
            pathlib.Path(target).write_bytes(given[len(calls)])
            calls.append(source)

        def call_s3(self, *_, **__):
            return {}

    monkeypatch.setattr(remote, "_of", lambda url: (Store(), url))
    monkeypatch.setattr(remote, "PAUSE_SECONDS", 0.0)
    state = remote.Status(5, 1, hashlib.md5(b"right", usedforsecurity=False).hexdigest())
    target = tmp_path / "copy"
    if not reads:
        with pytest.raises(transient.Transient, match="3 times"):
            remote._copy("s3://b/x", state, target)
        return
    remote._copy("s3://b/x", state, target)
    assert len(calls) == reads and target.read_bytes() == given[-1]
    told = "the ETag of 's3://b/x' is not the MD5" in caplog.text
    assert told == (given[-1] != b"right")

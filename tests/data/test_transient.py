"""A disk or a store that fails for a while is no bad input: what was finished stays."""

import errno
import importlib
import json
import os

import jax
import pytest

from llmx.checkpoint import directory, manifest, restore
from llmx.data import __main__ as command
from llmx.data import build, documents, opening, sources, tokenizers, transient
from llmx.runtime import exits, ownership


class ClientError(Exception):
    """As botocore's."""

    def __init__(self, code, status):
        self.response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}


class ReadTimeoutError(Exception):
    """As of urllib3 and botocore."""


def raised(error, *causes):
    """An error raised from others, the last one first."""
    for cause, effect in zip(causes, (error, *causes), strict=False):
        effect.__cause__ = cause
    return error


TRANSIENT = [
    OSError(errno.EIO, "Input/output error"),
    OSError(errno.ESTALE, "Stale file handle"),
    ConnectionResetError(errno.ECONNRESET, "reset"),
    TimeoutError(),
    ClientError("InternalError", 500),
    ClientError("TooManyRequests", 429),
    ClientError("BadDigest", 400),
    ReadTimeoutError(),
    RuntimeError("UNAVAILABLE: no answer"),
    ValueError("ABORTED: the generation has changed"),  # as TensorStore's
    jax.errors.JaxRuntimeError("collective: DEADLINE_EXCEEDED: no word"),
    transient.Transient("cut"),
]
LASTING = [
    FileNotFoundError(errno.ENOENT, "no"),
    PermissionError("Access Denied"),
    OSError(errno.ENOSPC, "full"),
    OSError("no end mark"),
    ClientError("AccessDenied", 403),
    ClientError("NoSuchBucket", 404),
    ValueError("malformed"),
    ValueError("a.jsonl:1: role 'UNAVAILABLE' is none of user, assistant"),
    ValueError("a.jsonl:1: ORDER ABORTED: no column"),
    KeyError("DEADLINE_EXCEEDED"),
    manifest.Corrupt("UNAVAILABLE: is the name of a leaf"),
]


@pytest.mark.parametrize("error", TRANSIENT, ids=repr)
def test_what_goes_away_by_itself(error):
    for given in (error, raised(ValueError("x.jsonl"), OSError("of a package"), error)):
        assert transient.is_transient(given) and transient.is_of_access(given)
        with pytest.raises(ValueError, match=r"^a\.txt \(.*\): run again$") as found:
            transient.problem("a.txt", given, "mend it")
        assert transient.is_transient(found.value)
        assert transient.told(given) == f"{given}: run again"
        assert transient.told(found.value) is found.value  # which says so already


@pytest.mark.parametrize("error", LASTING, ids=repr)
def test_what_does_not(error):
    for given in (error, raised(ValueError("x.jsonl"), error)):
        assert not transient.is_transient(given)
        assert transient.problem("a.txt", given, "mend it").endswith(": mend it")
    numbered = isinstance(error, OSError) and error.errno is not None
    assert transient.is_of_access(error) == (numbered or isinstance(error, PermissionError))


class Failing:
    """A file that fails after some bytes."""

    def __init__(self, file, at, error):
        self._file, self._at, self._error = file, at, error

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._file.close()

    def _checked(self, raw):
        if self._file.tell() > self._at:
            raise self._error
        return raw

    def read(self, size=-1):
        return self._checked(self._file.read(size))

    def readline(self, size=-1):
        return self._checked(self._file.readline(size))


def source(tmp_path, *, lines=300):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"line {i} " * 20}) + "\n" for i in range(lines)))
    return path


def recipe_of(path):
    return build.make_recipe(
        (str(path),), tokenizer=tokenizers.ByteTokenizer(), text_key="text", skip_bad=False,
        shard_tokens=2000,
    )  # fmt: skip


def shards(tmp_path):
    return {p.name: p.stat().st_mtime_ns for p in tmp_path.glob("cache/.*.partial/shard-*")}


@pytest.fixture
def small_batches(monkeypatch):
    monkeypatch.setattr(build, "_BATCH_DOCUMENTS", 16)


@pytest.mark.parametrize("error", [*TRANSIENT[:4], PermissionError(errno.EACCES, "no")], ids=repr)
def test_finished_shards_stay_where_a_source_cannot_be_read(
    tmp_path, monkeypatch, small_batches, error
):
    path, cache = source(tmp_path), tmp_path / "cache"
    original = opening.open_at

    def open_at(name, offset=0):
        return Failing(original(name, offset), 30_000, error)

    with monkeypatch.context() as patch, pytest.raises(ValueError, match="cannot be read") as found:
        patch.setattr(opening, "open_at", open_at)
        build.cached_shards(recipe_of(path), cache_dir=cache, log=print)
    assert str(path) in str(found.value)
    assert transient.is_transient(found.value) == (error.errno != errno.EACCES)
    before = shards(tmp_path)
    assert len(before) > 6
    folder = build.cached_shards(recipe_of(path), cache_dir=cache, log=print)
    after = {p.name: p.stat().st_mtime_ns for p in folder.glob("shard-*")}
    finished = list(before.items())[:4]
    assert dict(finished).items() <= after.items(), "finished shards were written again"
    other = build.cached_shards(recipe_of(path), cache_dir=tmp_path / "whole", log=print)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == {
        p.name: p.read_bytes() for p in other.iterdir()
    }


def test_malformed_input_leaves_nothing(tmp_path, small_batches):
    path = source(tmp_path)
    path.write_text(path.read_text() + "{broken\n")
    with pytest.raises(ValueError, match="malformed JSON") as found:
        build.cached_shards(recipe_of(path), cache_dir=tmp_path / "cache", log=print)
    assert not transient.is_transient(found.value) and shards(tmp_path) == {}


@pytest.mark.parametrize("how", ["touched", "changed", "removed"])
def test_a_source_that_changes_while_it_is_read(tmp_path, monkeypatch, small_batches, how):
    path, cache = source(tmp_path), tmp_path / "cache"
    original, text = build.encode, path.read_text()

    def encode(*args):
        if how == "removed":
            path.unlink(missing_ok=True)
        elif how == "changed":
            path.write_text(text.replace("line 299", "LINE 299"))
        os.utime(path, ns=(1, 1)) if how == "touched" else None
        return original(*args)

    recipe = recipe_of(path)
    monkeypatch.setattr(build, "encode", encode)
    if how == "touched":  # the same bytes
        assert (build.cached_shards(recipe, cache_dir=cache, log=print) / "index.json").exists()
        return
    with pytest.raises(ValueError, match="while it was read: run again") as found:
        build.cached_shards(recipe, cache_dir=cache, log=print)
    assert str(path) in str(found.value) and shards(tmp_path)
    assert transient.is_transient(found.value)


@pytest.mark.parametrize(("number", "code"), [(errno.EIO, exits.AGAIN), (errno.EACCES, 2)])
def test_the_command_says_whether_to_run_again(tmp_path, monkeypatch, capsys, number, code):
    path = source(tmp_path)

    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(opening, "open_at", fail)
    command_line = ["--source", str(path), "--output", str(tmp_path / "out")]
    assert command.main(command_line) == code
    said = capsys.readouterr().err
    assert str(path) in said and ("run again" in said) == (code == exits.AGAIN)


def test_words_of_a_source_are_no_codes(tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    messages = [{"role": "UNAVAILABLE", "content": "ORDER ABORTED"}]
    path.write_text(json.dumps({"messages": messages}) + "\n")
    template = tmp_path / "a.jinja"
    template.write_text("{{ raise_exception('no such role: ' + messages[0].role) }}")
    command_line = ["--source", str(path), "--format", "chat", "--chat-template", str(template)]
    assert command.main([*command_line, "--output", str(tmp_path / "out")]) == exits.REFUSED
    assert "UNAVAILABLE" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_tables_that_cannot_be_read_are_not_damaged(tmp_path, monkeypatch, suffix):
    import pyarrow
    from pyarrow import ipc, parquet

    path, table = tmp_path / f"a{suffix}", pyarrow.table({"text": ["x"] * 100})
    if suffix == ".parquet":
        parquet.write_table(table, path)
    else:
        with ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table)

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(opening, "open_random", fail)
    monkeypatch.setattr(pyarrow, "memory_map", fail)
    file = sources.InputFile(str(path), suffix[1:], 1, 1, 1)
    with pytest.raises(ValueError, match="cannot be read") as found:
        list(documents.read_documents([file], text_key="text", skip_bad=True, skipped={}))
    assert transient.is_transient(found.value)


def test_a_folder_that_cannot_be_listed_is_not_left_out(tmp_path, monkeypatch):
    source(tmp_path)
    (tmp_path / "b").mkdir()
    original = os.scandir

    def scandir(path):
        if str(path).endswith("b"):
            raise OSError(errno.EIO, "Input/output error", str(path))
        return original(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(OSError, match="Input/output"):
        sources.list_files(str(tmp_path), skip_bad=True)


class Meta:
    """A checkpoint's document that cannot be read."""

    def __init__(self, error):
        self._error = error

    def read_text(self):
        raise self._error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(errno.EIO, "Input/output error"), manifest.Unanswered),
        (PermissionError("no"), manifest.Unreadable),
        (IsADirectoryError(errno.EISDIR, "a folder"), manifest.Corrupt),
        (ValueError("UNAVAILABLE: slow"), manifest.Unanswered),
        (ValueError("DATA_LOSS: torn"), manifest.Corrupt),
    ],
)
def test_a_checkpoint_on_a_failing_disk_is_not_corrupt(error, kind):
    if isinstance(error, OSError):
        with pytest.raises(manifest.Unreadable if kind is not manifest.Corrupt else kind) as found:
            manifest.read(Meta(error))
        assert type(found.value) is kind
    assert type(restore.unread(error)) is (
        manifest.Corrupt if isinstance(error, IsADirectoryError)
        else manifest.Unreadable if isinstance(error, PermissionError) else kind
    )  # fmt: skip


COMMANDS = (
    "generate", "evaluate.__main__", "convert", "compress.__main__", "checkpoint.__main__",
    "tables.__main__", "report.__main__", "config.history", "metrics",
)  # fmt: skip


@pytest.mark.parametrize("module", COMMANDS)
def test_commands_that_read_a_run_say_whether_to_run_again(tmp_path, monkeypatch, capsys, module):
    """The store of a run does not answer: exit code 75, not that of wrong input."""
    command = importlib.import_module(f"llmx.{module}")
    run = str(tmp_path / "run")
    options = {
        "generate": ["--prompt", "a"], "convert": ["--to-hf", f"{tmp_path}/out"],
        "compress.__main__": ["--recipe", "configs/compress_quickstart.py", "--output", "out"],
        "checkpoint.__main__": ["ls", run], "report.__main__": [run], "config.history": [run],
        "metrics": [run], "tables.__main__": ["export", "--workdir", run, "--output", "out"],
    }  # fmt: skip

    def unanswered(path, *rest, **others):
        raise ValueError(f"{path} cannot be read") from OSError(errno.ECONNRESET, "reset", path)

    monkeypatch.setattr("llmx.checkpoint.mirror.reading", unanswered)
    monkeypatch.setattr("llmx.compress.command.compress", unanswered)
    monkeypatch.setattr("llmx.config.load_run", unanswered)
    monkeypatch.setattr("llmx.config.load_run_with_tables", unanswered)
    monkeypatch.setattr("llmx.report.runs.problems", unanswered)
    monkeypatch.setattr("llmx.tables.__main__.export", unanswered)
    arguments = options.get(module, [])
    if run not in arguments:
        arguments = ["--workdir", run, *arguments]
    monkeypatch.setattr("sys.argv", [module, *arguments])
    try:
        code = command.main() if module == "metrics" else command.main(arguments)
    except SystemExit as ended:
        code = ended.code
    assert code == exits.AGAIN and "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    "number, remedy", [(errno.EIO, "run again"), (errno.EACCES, "make it readable")]
)
def test_checkpoints_that_cannot_be_listed(tmp_path, monkeypatch, number, remedy):
    (tmp_path / "checkpoints").mkdir()
    root = directory.root_of(str(tmp_path / "checkpoints"))

    def fail(path):
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(type(root), "iterdir", fail)
    with pytest.raises(ValueError, match=rf"cannot be listed \(.*\): {remedy}") as error:
        directory.steps(root)
    assert transient.is_transient(error.value) == (remedy == "run again")


@pytest.mark.parametrize("text, remedy", [
    ("UNAVAILABLE: 503", "run again"), ("PERMISSION_DENIED: 403", "make it writable"),
])  # fmt: skip
def test_a_lease_that_a_store_refuses(monkeypatch, text, remedy):
    def fail(workdir):
        raise ownership.Unavailable(text) from ValueError(text)

    monkeypatch.setattr(ownership, "open_store", fail)
    with pytest.raises(ValueError, match=rf"cannot be written \({text}\): {remedy}") as error:
        ownership.take("s3://bucket/a", log=print)
    assert transient.is_transient(error.value) == (remedy == "run again")


def test_exit_codes_of_commands():
    assert transient.exit_code(OSError(errno.EIO, "failed")) == exits.AGAIN
    assert transient.exit_code(ValueError("malformed")) == exits.REFUSED
    assert transient.exit_code(OSError(errno.ENOSPC, "full"), exits.UNSAVED) == exits.UNSAVED

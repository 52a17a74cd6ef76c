"""Damaged files of a run end the other commands with exit code 2 and a clear line."""

import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest

from llmx import config as config_lib
from llmx import convert, generate
from llmx.checkpoint import hf, hf_formats
from llmx.data import tokenizers
from llmx.evaluate import __main__ as evaluate
from llmx.model import families
from llmx.runtime import exits

ROOT = pathlib.Path(__file__).parents[2]
DAMAGED = {
    "empty": b"", "torn": b'{"seed": 1, "mod', "list": b"[]", "null": b"null",
    "binary": b"\xff\x00\xfe" * 50, "deep": b"[" * 99_999, "section": b'{"batch": 5}',
    "type": b'{"seed": "one"}', "key": b'{"sede": 1}', "size": b'{"model": {"num_heads": 0}}',
    "huge": b'{"model": {"num_heads": 1000000000001}}', "nan": b'{"seed": NaN}',
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGED)
@pytest.mark.parametrize("command", [evaluate, generate, convert])
def test_a_damaged_config(tmp_path, capsys, command, damage):
    (tmp_path / "config.json").write_bytes(DAMAGED[damage])
    flags = ["--to-hf", str(tmp_path / "hf")] if command is convert else []
    assert command.main(["--workdir", str(tmp_path), *flags]) == 2
    said = capsys.readouterr().err
    assert f"error: {tmp_path}/config.json is damaged, or of another version: " in said
    assert "bring back a copy, or run the training command again" in said.splitlines()[-1]


@pytest.fixture
def workdir(tmp_path):
    """A run whose only checkpoint is garbage."""
    run = config_lib.default()
    run.workdir = str(tmp_path / "run")
    run.model.vocab_size, run.model.num_layers, run.model.width = 257, 1, 16
    (tmp_path / "text.jsonl").write_text('{"text": "good"}\n' * 200)
    run.data.sources = (str(tmp_path / "text.jsonl"),)
    run.data.cache_dir = str(tmp_path / "cache")
    run.batch.sequence_length, run.mesh.data = 16, 1
    config_lib.save_run(run)
    tokenizers.ByteTokenizer().save(tmp_path / "run/tokenizer.json")
    for folder in ("state", "meta"):
        (tmp_path / "run/checkpoints/3" / folder).mkdir(parents=True)
    (tmp_path / "run/checkpoints/3/meta/metadata").write_bytes(b"\x00" * 64)
    return tmp_path / "run"


def evaluated(workdir, *flags):
    command = [sys.executable, "-m", "llmx.evaluate", "--workdir", str(workdir), *flags]
    done = subprocess.run(
        command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, cwd=ROOT, capture_output=True,
        text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stdout + done.stderr
    return done.stderr


def test_all_checkpoints_are_bad(workdir):
    said = evaluated(workdir)
    assert f"error: no good checkpoint in {workdir}/checkpoints" in said
    assert "bring back a copy of one" in said.splitlines()[-1]


@pytest.mark.slow
def test_data_that_cannot_be_read(workdir):
    (workdir.parent / "text.jsonl").write_text('{"text": "good"}\n{"text": \n')
    assert "text.jsonl" in evaluated(workdir).splitlines()[-1]


@pytest.mark.parametrize("module", ["evaluate", "generate", "checkpoint", "metrics", "aot"])
def test_ctrl_c_ends_in_silence(module):
    """Also among the imports: nothing is to be saved."""
    program = (  # a shell's background job ignores SIGINT; the name is that of the command
        "import runpy, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "sys.argv = ['x', '--help']; import llmx.runtime.exits; "
        f"runpy.run_module('llmx.{module}', run_name='__main__', alter_sys=True)"
    )
    code = "import atexit, os, signal; atexit.register(os.kill, os.getpid(), signal.SIGINT); "
    done = subprocess.run(
        [sys.executable, "-c", code + program], capture_output=True, text=True, timeout=100,
        cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGINT, done.stderr
    assert done.stdout.startswith("usage: ") and not done.stderr


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_an_export_that_fails_leaves_no_files(tmp_path, monkeypatch, capsys, error):
    def torn(*_):
        assert list((tmp_path / "x").iterdir())  # a file is begun
        raise error

    def to_hf(workdir, directory, **_):
        hf.export(params, model, directory)

    model = families.preset("llama3", num_layers=1, width=16, num_heads=1, num_kv_heads=1,
                            head_dim=16, mlp_dim=16, vocab_size=8, vocab_multiple=8)  # fmt: skip
    params = {
        path: np.zeros(shape, np.float32)
        for row in hf_formats.rows(model)
        for path, shape in hf_formats.our_shapes(row, model).items()
    }  # fmt: skip
    monkeypatch.setattr(hf, "parts_of", torn)
    monkeypatch.setattr(convert, "to_hf", to_hf)
    interrupted = isinstance(error, KeyboardInterrupt)
    code = exits.INTERRUPTED if interrupted else exits.UNSAVED
    assert convert.main(["--workdir", "unused", "--to-hf", str(tmp_path / "x")]) == code
    assert ("interrupted" if interrupted else "the disk is full") in capsys.readouterr().err
    assert not list((tmp_path / "x").iterdir())


def test_a_reader_that_leaves_is_no_error(tmp_path):
    (tmp_path / "history.jsonl").write_text('{"kind": "note", "text": "x"}\n' * 20_000)
    command = [sys.executable, "-m", "llmx.config.history", str(tmp_path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as child:
        assert child.stdout.readline() == " note: x\n"
        child.stdout.close()
        assert child.stderr.read() == "" and child.wait(60) == 0


def test_a_reader_who_has_seen_enough_is_no_error():
    """`| head`: a pipe whose reader is gone, and a text that it cannot hold."""
    code = "from llmx.runtime import exits; exits.show('line\\n' * 100_000)"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")

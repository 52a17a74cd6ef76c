"""Damaged files of a run end the other commands with exit code 2 and a clear line."""

import os
import pathlib
import subprocess
import sys

import pytest

from llmx import config as config_lib
from llmx import convert, evaluate, generate
from llmx.checkpoint import checkpointer
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


def test_an_import_onto_a_full_disk(tmp_path, capsys, monkeypatch):
    def full(directory, workdir):
        raise checkpointer.Unsaved("the checkpoint of step 0 was not written: the disk is full")

    monkeypatch.setattr(convert, "from_hf", full)
    command = ["--workdir", str(tmp_path / "run"), "--from-hf", str(tmp_path)]
    assert convert.main(command) == exits.UNSAVED
    assert capsys.readouterr().err.startswith("error: the checkpoint of step 0 was not written")

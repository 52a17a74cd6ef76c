"""python -m llmx.checkpoint: ls, verify, diff, export, rm."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from llmx.checkpoint import __main__ as commands
from llmx.checkpoint.checkpointer import CheckpointConfig, Checkpointer


@pytest.fixture
def workdir(tmp_path):
    with Checkpointer(f"{tmp_path}/checkpoints", CheckpointConfig(), log=print) as checkpoints:
        for step in (4, 8):
            w = np.random.RandomState(step).randn(8, 4).astype(np.float32)
            state = {"params": {"w": jnp.asarray(w, jnp.bfloat16), "b": jnp.ones(3)}}
            meta = {"batch_size": 2, "config": {"lr": step}, "mesh": {"data": 1}}
            checkpoints.save(step, state, meta=meta, wait=True)
    (tmp_path / "checkpoints/9.orbax-checkpoint-tmp").mkdir()
    return tmp_path


def damage(workdir, step):
    folder = workdir / f"checkpoints/{step}/state"
    path = max(folder.rglob("d/*"), key=lambda file: file.stat().st_size)
    path.write_bytes(path.read_bytes()[:10])


def test_ls_names_each_with_its_state(workdir, capsys):
    (workdir / "checkpoints/8/meta/metadata").write_text("{}")
    assert commands.main(["ls", str(workdir), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["state"] for row in rows] == ["complete", "corrupt", "unfinished"]
    assert rows[0]["samples"] == 8 and rows[0]["bytes"] > 0 and rows[0]["mesh"] == {"data": 1}
    assert commands.main(["ls", str(workdir)]) == 0
    assert "corrupt" in capsys.readouterr().out


def test_verify_finds_the_bad_one(workdir, capsys):
    assert commands.main(["verify", str(workdir), "--all"]) == 0
    damage(workdir, 4)
    assert commands.main(["verify", str(workdir)]) == 0
    assert commands.main(["verify", str(workdir), "--all"]) == 1
    out = capsys.readouterr().out
    assert "checkpoint 4: corrupt" in out and "checkpoint 8: good" in out
    assert commands.main(["verify", str(workdir), "--step", "5"]) == 2
    assert commands.main(["verify", str(workdir / "nowhere")]) == 2


@pytest.mark.parametrize(
    "command", ["ls X", "ls --json X", "verify X", "verify --all X", "diff X", "diff W X",
                "export X {}/x.npz", "rm X 3"],
)  # fmt: skip
def test_what_is_no_run_is_an_error_in_words(workdir, tmp_path, capsys, command):
    """A folder of something else, one that is not there, a file, a run without checkpoints."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "begun" / "checkpoints").mkdir(parents=True)
    (tmp_path / "early").mkdir()
    (tmp_path / "early" / "config.json").write_text("{}")
    words = {
        "folder": "holds no checkpoints: name the work directory", "file": "is not a directory",
        "nowhere": "is not a directory", "begun": "no checkpoint", "early": "saved none yet",
    }  # fmt: skip
    for name, word in words.items():
        paths = {"X": str(tmp_path / name), "W": str(workdir)}
        assert commands.main([paths.get(c, c.format(tmp_path)) for c in command.split()]) == 2
        out, error = capsys.readouterr()
        assert word in error and not out and len(error.splitlines()) == 1
    assert not (tmp_path / "x.npz").exists()


def test_diff_shows_configs_and_leaves(workdir, capsys):
    assert commands.main(["diff", str(workdir), "--step", "8"]) == 0
    assert commands.main(["diff", str(workdir), "--step", "4"]) == 1
    out = capsys.readouterr().out
    assert "config lr: 4 -> 8" in out and "params/w: 32 of 32 elements" in out
    assert "params/b" not in out


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_an_export_that_cannot_be_written_leaves_nothing(workdir, tmp_path, capsys, kind):
    (tmp_path / f"folder.{kind}").mkdir()
    before = sorted(tmp_path.iterdir())
    for file, words in {
        f"folder.{kind}": "a folder is in the way",
        f"no/x.{kind}": "vanished",
    }.items():
        assert commands.main(["export", str(workdir), str(tmp_path / file)]) == 2
        error = capsys.readouterr().err
        assert f"{file} cannot be written: " in error and words in error
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_export_writes_the_values(workdir, kind):
    file = workdir / f"out.{kind}"
    assert commands.main(["export", str(workdir), str(file), "--step", "4"]) == 0
    if kind == "npz":
        arrays = np.load(file)
    else:
        from safetensors.numpy import load_file

        arrays = load_file(file)
    want = np.random.RandomState(4).randn(8, 4).astype(np.float32).astype(jnp.bfloat16)
    assert np.array_equal(arrays["params/w"].astype(np.float32), want.astype(np.float32))
    assert commands.main(["export", str(workdir), str(file), "--prefix", "none"]) == 2
    assert commands.main(["export", str(workdir), str(workdir / "x.txt")]) == 2


def test_rm_keeps_the_last_good_one(workdir, capsys):
    (workdir / "checkpoints/4/meta/metadata").write_text("{}")
    assert commands.main(["rm", str(workdir), "8"]) == 2
    assert "last good checkpoint" in capsys.readouterr().err
    assert commands.main(["rm", str(workdir), "4"]) == 0
    assert commands.main(["rm", str(workdir), "8", "--force"]) == 0
    assert not (workdir / "checkpoints/8").exists()

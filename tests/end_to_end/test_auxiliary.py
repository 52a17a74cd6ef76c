"""What training can do without fails all at once: a run ends as an undisturbed one."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from support.text_runs import records

# Its tests share runs, each a process.
pytestmark = pytest.mark.xdist_group("auxiliary")

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = """
from llmx import config
from llmx.model import families

def get_config():
    run = config.default()
    run.model = families.preset("llama3", num_layers=1, width=16, num_heads=2, head_dim=8,
                                num_kv_heads=2, mlp_dim=32)
    run.steps, run.precision = 6, "fp32"
    run.batch.size, run.batch.sequence_length = 4, 16
    run.checkpoint.every, run.evaluation.every, run.evaluation.batches = 3, 3, 1
    run.profile.first_step, run.profile.num_steps = 2, 2
    run.metrics.log_every, run.metrics.progress, run.metrics.plot_every = 1, "plain", 2
    run.sample.prompt, run.sample.max_tokens = "def ", 2
    run.data.sources, run.data.cache_dir = ({text!r},), {cache!r}
    return run
"""
# As llmx.train, but the sample fails, and the evaluation after the last save.
PROGRAM = """
import sys
from llmx import generate, train
from llmx.evaluate import held_out

def fails(*args):
    raise RuntimeError("no memory for it")

held_out_loss, calls = held_out.losses, []

def fails_at_the_end(*args, **options):
    calls.append(1)
    return held_out_loss(*args, **options) if len(calls) == 1 else fails()

if sys.argv.pop(1) == "disturbed":
    generate.show_sample, held_out.losses = fails, fails_at_the_end
sys.exit(train.main())
"""


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    folder = tmp_path_factory.mktemp("auxiliary")
    (folder / "text").mkdir()
    for number in range(20):
        (folder / "text" / f"{number}.txt").write_text(f"some words, {number}; " * 40)
    paths = {"text": str(folder / "text"), "cache": str(folder / "cache")}
    (folder / "run.py").write_text(CONFIG.format(**paths))
    return folder


def train(scratch, workdir, how="whole", *flags, processes=1):
    """A run; its exit code and all that it says."""
    command = [sys.executable, "-c", PROGRAM, how, "--config", str(scratch / "run.py"),
               "--workdir", str(workdir), *flags]  # fmt: skip
    if processes > 1:
        cluster = [sys.executable, "scripts/local_cluster.py", "-n", str(processes)]
        command = [*cluster, "--devices-per-process", "1", "--", *command]
    done = subprocess.run(
        command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, cwd=ROOT, capture_output=True,
        text=True, timeout=200, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def losses(workdir):
    return np.array([record["loss"] for record in records(workdir).values()])


@pytest.fixture(scope="module")
def undisturbed(scratch):
    code, said = train(scratch, scratch / "whole")
    assert code == 0, said
    return scratch / "whole", said


@pytest.fixture(scope="module")
def disturbed(scratch):
    workdir = scratch / "disturbed"
    workdir.mkdir()
    for folder in ("loss.png.tmp", "goodput.tmp"):
        (workdir / folder).mkdir()
    for file in ("tensorboard", "profile"):
        (workdir / file).write_text("in the way")
    code, said = train(scratch, workdir, "disturbed", "--check-determinism")
    assert code == 0 and "Traceback" not in said, said
    return workdir, said


@pytest.mark.slow
def test_goodput_is_shown_and_recorded(undisturbed, disturbed):
    workdir, said = undisturbed
    assert "goodput: " in said and " in 1 launch; " in said
    (record,) = records(workdir, "goodput").values()
    shares = [record[f"{kind}_share"] for kind in ("useful", "compile", "checkpoint", "start")]
    assert min(shares) > 0 and sum(shares) < 1
    assert json.loads((workdir / "goodput.json").read_text())["step"] == 6
    np.testing.assert_array_equal(losses(workdir), losses(disturbed[0]))


def test_all_that_can_fail_without_ending_a_run(disturbed):
    workdir, said = disturbed
    for what in ("TensorBoard events", "loss.png", "goodput.json", "the sample",
                 "the final evaluation"):  # fmt: skip
        warnings = [line for line in said.splitlines() if line.startswith(f"warning: {what}: ")]
        # The drawings of the run, and the one at its end.
        assert len(warnings) == 1 + (what == "loss.png"), said
    assert "the profile: " in said
    assert "warning: the sample: RuntimeError: no memory for it; it is left out" in said
    assert "deterministic: step 1, taken twice, agrees bit for bit" in said
    assert "goodput: " in said and "everything is in" in said
    assert list(records(workdir)) == [1, 2, 3, 4, 5, 6]
    assert list(records(workdir, "eval")) == [3] and (workdir / "checkpoints" / "6").is_dir()


@pytest.mark.slow
def test_a_damaged_metrics_file_does_not_stop_a_resume(scratch):
    workdir = scratch / "resumed"
    assert train(scratch, workdir, "whole", "--config.steps=3")[0] == 0
    path = workdir / "metrics.jsonl"
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([*lines[:2], b"\x00" * 99, b'{"kind": 1}', *lines[2:]]) + b"\n{")
    code, said = train(scratch, workdir)
    assert code == 0 and "Traceback" not in said, said
    assert f"warning: 2 lines of {path} are no records: moved to" in said
    assert list(records(workdir)) == [1, 2, 3, 4, 5, 6]
    assert "in 2 launches" in said


@pytest.mark.slow
def test_two_processes_check_and_fail_together(scratch, undisturbed):
    workdir = scratch / "two"
    flags = ("--check-determinism", "--config.batch.size=4")
    code, said = train(scratch, workdir, "disturbed", *flags, processes=2)
    assert code == 0 and "Traceback" not in said, said
    assert said.count("deterministic: step 1") == 1
    assert "warning: the sample: RuntimeError" in said
    np.testing.assert_allclose(losses(workdir), losses(undisturbed[0]), rtol=1e-5)

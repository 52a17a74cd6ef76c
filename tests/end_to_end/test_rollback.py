"""A run whose loss rises goes back to before it did, by itself or by hand, with the same losses."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
from support import text_runs

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("rollback")]

ROOT = pathlib.Path(__file__).parents[2]

# The targets of batches 12 to 14 are drawn at random: a loss of 7 nats where it was 1.5.
CONFIG = """
import numpy as np

from llmx import config
from llmx.data import dataset
from llmx.model import families

# The file is read more than once.
original = vars(dataset.Dataset).get("original", dataset.Dataset.train_rows)


def train_rows(self, step, rows, batch_size):
    batch = original(self, step, rows, batch_size)
    if 12 <= step < 15:
        shape = batch["targets"].shape
        batch["targets"] = np.random.default_rng(step).integers(0, 255, shape).astype("i4")
    return batch


dataset.Dataset.original, dataset.Dataset.train_rows = original, train_rows


def get_config():
    run = config.default()
    run.model = families.preset("llama3", num_layers=1, width=32, num_heads=2, head_dim=16,
                                num_kv_heads=2, mlp_dim=64)
    run.steps, run.precision = 20, "fp32"
    run.batch.size, run.batch.sequence_length = 8, 32
    run.optimizer.warmup_steps, run.optimizer.learning_rate = 2, 1e-2
    run.checkpoint.every, run.metrics.log_every, run.metrics.progress = 2, 1, "plain"
    run.rollback.window = 3
    run.data.sources, run.data.cache_dir = ({source!r},), {cache!r}
    return run
"""


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rollback")
    source, cache = str(text_runs.write_corpus(folder, files=40, words=300)), str(folder / "cache")
    (folder / "run.py").write_text(CONFIG.format(source=source, cache=cache))
    return folder


def start(scratch, workdir, *flags) -> subprocess.Popen:
    command = [sys.executable, "-m", "llmx.train", "--config", str(scratch / "run.py"),
               "--workdir", str(workdir), *flags]  # fmt: skip
    surroundings = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return subprocess.Popen(command, env=surroundings, cwd=ROOT, text=True, **pipes)


def train(scratch, workdir, *flags) -> tuple[int, str]:
    process = start(scratch, workdir, *flags)
    said, _ = process.communicate(timeout=300)
    return process.returncode, said


def losses(workdir) -> list[float]:
    return text_runs.losses(workdir, steps=20)


@pytest.fixture(scope="module")
def rolled_back(scratch):
    code, said = train(scratch, scratch / "by_itself", "--config.rollback.at_most=2")
    assert code == 0, said
    return scratch / "by_itself", said


def test_a_run_goes_back_by_itself(rolled_back):
    workdir, said = rolled_back
    assert "rollback 1 of 2: back to step 10, without batches 10 to 14" in said
    assert max(losses(workdir)[10:]) < 3 and "set aside checkpoint 12 as 12.replaced" in said
    saved = json.loads((workdir / "config.json").read_text())["rollback"]
    assert (saved["at"], saved["skipped"]) == ([10], [5])
    kinds = [json.loads(line)["kind"] for line in (workdir / "history.jsonl").open()]
    assert kinds == ["start", "saved", "rollback", "start"]
    records = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    assert [(r["step"], r["skipped"]) for r in records if r["kind"] == "rollback"] == [(10, 5.0)]


@pytest.mark.full_grid  # each of both is tested
def test_killed_after_the_rollback(scratch, rolled_back):
    """The same command goes on with it, bit for bit."""
    process = start(scratch, scratch / "killed", "--config.rollback.at_most=2")
    for line in process.stdout:
        if "rollback 1 of 2" in line:
            process.kill()
    assert process.wait() == -9
    code, said = train(scratch, scratch / "killed", "--config.rollback.at_most=2")
    assert code == 0 and "rollback.at=(10,), rollback.skipped=(5,)" in said, said
    assert losses(scratch / "killed") == losses(rolled_back[0])


def test_without_rollbacks_it_stops_and_goes_back_by_hand(scratch, rolled_back):
    """The message names the step; with the rollback in the config the same run follows."""
    workdir = scratch / "by_hand"
    code, said = train(scratch, workdir)
    assert code == 3 and "Traceback" not in said, said
    last = said.splitlines()[-1]
    for words in ("nats above its best", "--config.resume_step=10", "--config.rollback.at_most=2"):
        assert words in last
    code, said = train(scratch, workdir, "--config.resume_step=10",
                       "--config.rollback.at=(10,)", "--config.rollback.skipped=(5,)")  # fmt: skip
    assert code == 0, said
    assert "config: rollback.at: [] -> [10]" in said
    assert losses(workdir) == losses(rolled_back[0])

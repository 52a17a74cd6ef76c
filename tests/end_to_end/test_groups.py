"""Two groups of replicas, each a run of its own, one of which is killed and started again."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from support import runs, text_runs

from llmx.checkpoint import model_params
from llmx.model import families
from llmx.runtime import exits
from llmx.sharding import trees

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("groups")]

ROOT = pathlib.Path(__file__).parents[2]
MODEL = dict(num_layers=2, width=32, num_heads=2, head_dim=16, num_kv_heads=2, mlp_dim=64)
STEPS, EVERY, BATCH = 40, 10, 4
SAME = 1e-5  # relative: fp32 sums in other programs, of ten steps
PATIENCE = 240  # seconds that a test waits for what has to come

CONFIG = """
import os, pathlib, time
from llmx import config
from llmx.data import dataset
from llmx.model import families

def held_back(rows):
    def train_rows(self, step, *args, **kwargs):
        while step >= int(os.environ["HELD_AT"]) and not pathlib.Path({go!r}).exists():
            time.sleep(0.05)
        return rows(self, step, *args, **kwargs)
    return train_rows

if "HELD_AT" in os.environ:
    dataset.Dataset.train_rows = held_back(dataset.Dataset.train_rows)

def get_config():
    run = config.default()
    run.model = families.preset("llama3", **{model})
    run.steps, run.precision = {steps}, "fp32"
    run.batch.size, run.batch.sequence_length = {batch}, 32
    run.optimizer.warmup_steps, run.optimizer.learning_rate = 2, 1e-2
    run.evaluation.every = {every}
    run.optimizer.schedule = "constant"  # so that each round counts alike
    run.optimizer.eps = 1e-3  # rounding of a gradient near zero is not divided by itself
    run.checkpoint.every, run.evaluation.batches, run.checkpoint.keep_last = 5, 32 // {batch}, 100
    run.watchdog.step_seconds = {patience}.0  # one is held back
    run.metrics.log_every, run.metrics.progress = 1, "plain"
    run.data.sources, run.data.cache_dir, run.data.prefetch = ({source!r},), {cache!r}, 1
    run.sync.strategy, run.sync.every, run.sync.groups = "diloco", {every}, {groups}
    if run.sync.groups > 1:
        run.sync.exchange = {exchange!r}
        run.sync.round_seconds = float(os.environ.get("WAITS", 120))
        run.sync.group = int(os.environ.get("GROUP", "0"))
    return run
"""


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    folder = tmp_path_factory.mktemp("groups")
    text_runs.write_corpus(folder, files=3, words=4000)
    (folder / "shared").mkdir()
    values = dict(
        go=str(folder / "go"), model=MODEL, steps=STEPS, every=EVERY, patience=PATIENCE,
        source=str(folder / "text"), cache=str(folder / "cache"), exchange=str(folder / "shared"),
    )  # fmt: skip
    (folder / "groups.py").write_text(CONFIG.format(**values, batch=BATCH, groups=2))
    (folder / "one.py").write_text(CONFIG.format(**values, batch=2 * BATCH, groups=1))
    return folder


def start(scratch, name: str, *flags: str, config: str = "groups", devices: int = 1, **environment):
    """A run in the background; its lines go to WORKDIR.log."""
    command = [
        sys.executable, "-m", "llmx.train", "--config", str(scratch / f"{config}.py"), "--workdir",
        str(scratch / name), f"--config.launch.cpu_devices={devices}", *flags,
    ]  # fmt: skip
    with open(scratch / f"{name}.log", "a") as log:
        return subprocess.Popen(
            command, cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"} | environment,
            stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip


def wait_for(condition, what: str, processes):
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until, f"{what} did not come"
        assert not any(process.poll() for process in processes), "a run has ended"
        time.sleep(0.05)


def steps_of(workdir: pathlib.Path) -> list[int]:
    return list(text_runs.records(workdir)) if (workdir / "metrics.jsonl").exists() else []


def ended(scratch, name: str, process) -> str:
    code = process.wait(timeout=PATIENCE)
    said = (scratch / f"{name}.log").read_text()
    assert code == exits.DONE, said
    return said


def params_of(workdir: pathlib.Path, step: int) -> dict[str, np.ndarray]:
    model = families.preset("llama3", **MODEL)
    recipe = runs.make_recipe(
        runs.make_config(model, batch__size=BATCH, batch__sequence_length=32)
    )  # fmt: skip
    restored = model_params.restore_params(
        str(workdir), recipe.loss.params, step=step, log=lambda text: None
    )
    return {name: np.asarray(leaf) for name, leaf in trees.named(restored.state).items()}


def evaluations(workdir: pathlib.Path) -> dict[int, float]:
    return {step: one["loss"] for step, one in text_runs.records(workdir, "eval").items()}


def closed(scratch, step: int) -> list[int]:
    path = scratch / "shared" / "rounds" / f"{step:010d}" / "closed.json"
    return json.loads(path.read_text())["groups"] if path.exists() else []


@pytest.fixture(scope="module")
def finished(scratch):
    """Group 1 is killed in the second round, and starts again in the third, in which group 0 waits
    for it; beside them one program with both replicas."""
    one = start(scratch, "one", "--config.mesh.data=2", config="one", devices=2)
    group_0 = start(scratch, "group_0", GROUP="0", HELD_AT="27", WAITS="20")
    group_1 = start(scratch, "group_1", GROUP="1", HELD_AT="14")
    others = [one, group_0, group_1]
    try:
        wait_for(lambda: len(steps_of(scratch / "group_1")) >= 12, "the second round", others)
        group_1.send_signal(signal.SIGKILL)
        group_1.wait()
        others.remove(group_1)
        wait_for(lambda: closed(scratch, 20), "the second round's end", others)
        again = start(scratch, "group_1", GROUP="1")
        others.append(again)
        moved = scratch / "shared" / "rounds" / "0000000030" / "moved" / "0001.json"
        wait_for(moved.exists, "the third round of the group that was killed", others)
        (scratch / "go").touch()
        ended(scratch, "one", one)
        return ended(scratch, "group_0", group_0), ended(scratch, "group_1", again)
    finally:
        for process in others:
            process.kill()


def test_a_group_that_is_killed_is_left_out_and_comes_back(scratch, finished):
    said = finished
    for step, groups in ((10, "0, 1 of 2"), (20, "0 of 2"), (30, "0, 1 of 2"), (40, "0, 1 of 2")):
        assert f"step {step}: group 0: round of groups {groups}" in said[0]
    assert "group 1 goes on from step 20, where the others are" in said[1]
    # Group 1 was killed between the steps 10 and 20, and has taken none of those that it missed.
    found = steps_of(scratch / "group_1")
    after = {*range(21, STEPS + 1)}
    assert {*range(1, 11)} | after <= set(found) <= {*range(1, 15)} | after
    for step in (30, 40):
        one, other = (params_of(scratch / f"group_{group}", step) for group in range(2))
        for name in one:
            np.testing.assert_array_equal(one[name], other[name], err_msg=name)


def test_as_long_as_none_is_gone_groups_are_the_replicas_of_one_program(scratch, finished):
    """Of the same tokens: after the first round."""
    wanted = params_of(scratch / "one", 10)
    found = params_of(scratch / "group_0", 10)
    for name, array in wanted.items():
        np.testing.assert_allclose(
            found[name], array, atol=SAME * np.abs(array).max(), err_msg=name
        )


def test_the_loss_is_close_to_that_of_an_undisturbed_run(scratch, finished):
    """Half a round of tokens is lost: it is below what the other had a round before its end."""
    undisturbed = evaluations(scratch / "one")
    assert undisturbed[STEPS] < undisturbed[STEPS - EVERY]
    for group in range(2):
        assert evaluations(scratch / f"group_{group}")[STEPS] < undisturbed[STEPS - EVERY]


def test_another_config_is_refused(scratch, finished):
    """Without a traceback, with both values."""
    process = start(scratch, "other", "--config.optimizer.learning_rate=0.02", GROUP="1")
    assert process.wait(timeout=PATIENCE) == exits.REFUSED
    said = (scratch / "other.log").read_text()
    assert "optimizer.learning_rate is 0.01 there and 0.02 here" in said
    assert "Traceback" not in said

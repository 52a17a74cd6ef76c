"""Several processes of one run: they agree, refuse, stop and end together."""

import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from support import text_runs

from llmx.runtime import exits

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes")]

ROOT = pathlib.Path(__file__).parents[2]
STOPS_WITHIN = 30  # seconds from a cause to the end, on a busy machine
STEPS = 12

CONFIG = """
import os, time
from llmx import config
from llmx.data import dataset
from llmx.model import families

def hang(rows):
    def train_rows(self, step, *args, **kwargs):
        if step == 6:
            time.sleep(1000)
        return rows(self, step, *args, **kwargs)
    return train_rows

if os.environ.get("HANGS") == os.environ["LLMX_PROCESS_ID"]:
    dataset.Dataset.train_rows = hang(dataset.Dataset.train_rows)

def get_config():
    run = config.default()
    run.model = families.preset("llama3", num_layers=2, width=32, num_heads=2, head_dim=16,
                                num_kv_heads=2, mlp_dim=64)
    run.steps, run.precision, run.sharding.layout = {steps}, "fp32", "zero3"
    run.mesh.fsdp = 2  # and data = 2
    run.batch.size, run.batch.sequence_length = 8, 32
    run.optimizer.warmup_steps, run.optimizer.learning_rate = 2, 1e-2
    run.checkpoint.every, run.evaluation.batches = 4, 1
    run.metrics.log_every, run.metrics.progress = 1, "plain"
    run.watchdog.step_seconds = 4.0
    run.data.sources = ({source!r},)
    run.data.cache_dir = {cache!r}
    return run
"""


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    """A small corpus, another one, and a config file that trains on the first."""
    folder = tmp_path_factory.mktemp("processes")
    random = np.random.default_rng(0)
    for name in ("text", "other"):
        words = random.choice(["alpha", "beta", "gamma", "def", "return", "x", "=", "\n"], 9000)
        (folder / f"{name}.txt").write_text(" ".join(words))
    source, cache = str(folder / "text.txt"), str(folder / "cache")
    (folder / "run.py").write_text(CONFIG.format(source=source, cache=cache, steps=STEPS))
    return folder


class Processes:
    """The processes of a run; `flags[i]` are those of process i alone."""

    def __init__(self, scratch, workdir, count, *common, flags=(), **environment):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        flags, self.all, self.began = [*flags, *[()] * count], [], time.monotonic()
        for index in range(count):
            place = {
                "LLMX_COORDINATOR": f"127.0.0.1:{port}", "LLMX_NUM_PROCESSES": str(count),
                "LLMX_PROCESS_ID": str(index), "JAX_NUM_CPU_DEVICES": str(4 // count),
                "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1",
            }  # fmt: skip
            command = [sys.executable, "-m", "llmx.train", "--config", str(scratch / "run.py"),
                       "--workdir", str(workdir), *common, *flags[index]]  # fmt: skip
            self.all.append(subprocess.Popen(
                command, cwd=ROOT, text=True, env=os.environ | place | environment,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            ))  # fmt: skip

    def until(self, words: str) -> str:
        """What process 0 says until a line with these words."""
        said = ""
        for line in self.all[0].stdout:
            said += line
            if words in line:
                return said
        raise AssertionError(said)

    def ends(self) -> tuple[list[int], list[str]]:
        """Exit codes, and what each process said."""
        try:
            said = [process.communicate(timeout=240)[0] for process in self.all]
        finally:
            for process in self.all:
                process.kill()
        return [process.returncode for process in self.all], said


def train(scratch, workdir, count, *common) -> str:
    codes, said = Processes(scratch, workdir, count, *common).ends()
    assert codes == [exits.DONE] * count, said
    return said[0]


def losses(workdir) -> list[float]:
    return text_runs.losses(workdir, steps=STEPS)


def last_line(said: str) -> str:
    return said.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def undisturbed(scratch):
    """By two processes."""
    train(scratch, scratch / "whole", 2)
    return scratch / "whole"


def test_as_many_devices_in_other_processes(scratch, undisturbed):
    """Bit for bit the losses of two in four; and a checkpoint of four processes goes on in one.
    tests/checkpoint/test_checkpointer.py has other numbers of processes."""
    wanted = losses(undisturbed)
    train(scratch, scratch / "four", 4)
    assert losses(scratch / "four") == wanted
    shutil.rmtree(scratch / "four" / "checkpoints" / "12")
    said = train(scratch, scratch / "four", 1)
    assert "resumed from checkpoint 8" in said and losses(scratch / "four") == wanted


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--config.optimizer.learning_rate=0.02", "optimizer.learning_rate is 0.02"),
        ("--config.data.sources=('{other}',)", "other.txt"),
        ("--config.remat=ful", "did you mean 'full'"),
        ("--unknown", "the command line is wrong"),
    ],
)
def test_a_process_that_differs_ends_all_with_the_cause(scratch, flags, words):
    workdir = scratch / "never"
    flags = [(), (flags.format(other=scratch / "other.txt"),)]
    codes, said = Processes(scratch, workdir, 2, flags=flags).ends()
    assert codes == [exits.REFUSED] * 2, said
    assert words in said[0] and "process 1 (" in said[0], said
    assert last_line(said[0]) in said[0][said[0].index("process 1 (") :], said
    assert not any("Traceback" in text for text in said)
    assert not (workdir / "checkpoints").exists()


def test_sigterm_to_one_saves_in_all_and_asks_for_another_start(scratch, undisturbed):
    workdir = scratch / "told"
    run = Processes(scratch, workdir, 2)
    run.until("step  3/12")
    run.all[1].send_signal(signal.SIGTERM)
    codes, said = run.ends()
    assert codes == [exits.AGAIN] * 2, said
    assert "SIGTERM: stopped at step" in last_line(said[0])
    assert "run the same command again" in last_line(said[0])
    train(scratch, workdir, 2)
    assert losses(workdir) == losses(undisturbed)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_the_others_and_is_named(scratch, undisturbed, victim):
    workdir = scratch / f"killed_{victim}"
    run = Processes(scratch, workdir, 2)
    run.until("step  6/12")
    run.all[victim].kill()
    killed = time.monotonic()
    codes, said = run.ends()
    assert codes[1 - victim] == exits.AGAIN and time.monotonic() - killed < STOPS_WITHIN, said
    assert f"process {victim}" in last_line(said[1 - victim]), said
    train(scratch, workdir, 2)
    assert losses(workdir) == losses(undisturbed)


def test_a_hang_names_the_process_that_is_behind(scratch, undisturbed):
    workdir = scratch / "hung"
    run = Processes(scratch, workdir, 2, "--config.data.prefetch=0", HANGS="1")
    codes, said = run.ends()
    assert codes == [exits.AGAIN] * 2, said
    # On a busy machine 20 times the median is the longer of the two limits.
    assert re.search(r"watchdog\.step_(seconds|factor)", last_line(said[0])), said
    assert "slowest is process 1" in said[0] and "'data wait'" in said[0], said
    train(scratch, workdir, 2)
    assert losses(workdir) == losses(undisturbed)

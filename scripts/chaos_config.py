"""The config of the runs that scripts/chaos.py disturbs, and the faults that act inside a trainer.

A config file is Python code that runs in the trainer before anything else. This one reads the
environment variable LLMX_CHAOS (JSON, see `Orders`), writes a line into <folder>/marks.<process>
where a phase of the run begins, and lets the process fail as it is told.
"""

import ctypes
import dataclasses
import functools
import json
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from llmx import config
from llmx.model import families

STEPS, SAVE_EVERY = 24, 3
PACE_SECONDS = (
    0.1  # of a step, slept in the loader: a fault shall strike in the step it is meant for
)
STEP_LIMIT = 8  # seconds without a step, until the watchdog ends a process
NOISE_STEP = 10  # the first batch of noise
START_LIMIT = 60  # seconds of any other phase, and of a step until three are measured


@dataclasses.dataclass
class Orders:
    """What this launch is told by scripts/chaos.py."""

    folder: str  # marks go here, and what must happen once a case
    source: str  # of the text
    scratch: str  # caches, shared by all cases
    victim: int = -1  # number of the process that fails; -1 = all, or none
    inject: str = ""  # a name in SETTINGS or BATCHES
    step: int = 0  # of an injected fault: steps taken before


def get_config():
    """A tiny model on text of random words; the victim's differs where it is told so."""
    orders = Orders(**json.loads(os.environ["LLMX_CHAOS"]))
    run = config.default()
    run.model = families.preset(
        "llama3", num_layers=2, width=48, num_heads=2, head_dim=16, num_kv_heads=2, mlp_dim=96
    )
    run.steps, run.precision = STEPS, "fp32"
    run.batch.size, run.batch.sequence_length = 24, 32
    run.optimizer.warmup_steps, run.optimizer.learning_rate = 2, 1e-2
    run.checkpoint.every = SAVE_EVERY
    run.evaluation.batches = 2
    run.metrics.log_every, run.metrics.progress = 1, "plain"
    run.data.sources, run.data.cache_dir = (orders.source,), f"{orders.scratch}/data"
    run.data.prefetch = 0
    run.sharding.layout = "zero1"
    run.launch.compile_cache = f"{orders.scratch}/xla"
    run.launch.heartbeat_seconds, run.watchdog.step_seconds = 10, STEP_LIMIT
    for phase in ("start", "compile", "first_step", "evaluation", "save"):
        setattr(run.watchdog, f"{phase}_seconds", START_LIMIT)
    run.rollback.window = 3
    run.metrics.tensorboard = False
    number = int(os.environ.get("LLMX_PROCESS_ID", "0"))
    if number == orders.victim and orders.inject in SETTINGS:
        SETTINGS[orders.inject](run, orders)
    watch(orders, number)
    return run


# ----------------------------------------------------------------- one process has another config


def _other_rate(run: Any, orders: Orders) -> None:
    run.optimizer.learning_rate = 2e-2


def _other_seed(run: Any, orders: Orders) -> None:
    run.seed = 1


def _other_data(run: Any, orders: Orders) -> None:
    """The same config, and other text under it, as on a host whose disk has an older copy."""
    from llmx.data import dataset

    inner = dataset.open_dataset

    def open_dataset(config, **rest):
        other = dataclasses.replace(config, sources=(f"{orders.scratch}/other_text",))
        return inner(other, **rest)

    dataset.open_dataset = open_dataset


SETTINGS: dict[str, Callable] = {"rate": _other_rate, "seed": _other_seed, "data": _other_data}

# ------------------------------------------------------------- marks, and faults within the loader


def watch(orders: Orders, number: int) -> None:
    """Marks the phases of this process, and disturbs its batches."""
    from llmx.checkpoint import checkpointer, resume
    from llmx.data import dataset
    from llmx.runtime import plot
    from llmx.step import step

    if hasattr(dataset.Dataset, "undisturbed"):
        return  # the config file is read twice
    path = pathlib.Path(orders.folder) / f"marks.{number}"
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def mark(name: str, step: int = -1) -> None:
        os.write(file, f"{time.time():.3f} {name} {step} {os.getpid()}\n".encode())

    def marked(owner: Any, attribute: str, name: str) -> None:
        inner = getattr(owner, attribute)

        @functools.wraps(inner)
        def outer(*args, **kwargs):
            mark(name, args[1] if name == "save" else -1)
            if name == "data":
                read_programs_back()
            return inner(*args, **kwargs)

        setattr(owner, attribute, outer)

    def read_programs_back() -> None:
        # `llmx.runtime.launch` switches the cache off for several CPU processes: jaxlib reads back
        # programs with collectives within loops wrongly. With ZeRO-1 all of them are outside.
        jax.config.update("jax_enable_compilation_cache", True)
        compilation_cache.reset_cache()

    plot.plot_loss = str  # nobody looks at the curves, and drawing takes a second
    mark("launch")
    marked(dataset, "open_dataset", "data")
    marked(resume, "restore_or_init", "restore")
    marked(step, "make_train_step", "compile")
    marked(checkpointer.Checkpointer, "save", "save")
    dataset.Dataset.undisturbed = dataset.Dataset.train_rows

    def train_rows(self, step, rows, batch_size):
        mark("step", step)
        time.sleep(PACE_SECONDS)
        batch = self.undisturbed(step, rows, batch_size)
        if orders.inject in BATCHES and orders.victim in (-1, number):  # -1: in all processes
            BATCHES[orders.inject](batch, step, orders)
        return batch

    dataset.Dataset.train_rows = train_rows


def _once(orders: Orders) -> bool:
    try:
        os.close(os.open(f"{orders.folder}/once", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def _hang(batch: dict, step: int, orders: Orders) -> None:
    if step >= orders.step and _once(orders):
        time.sleep(3600)


def _hang_with_lock(batch: dict, step: int, orders: Orders) -> None:
    if step >= orders.step and _once(orders):
        ctypes.PyDLL(None).sleep(3600)  # keeps the interpreter's lock: no Python thread runs


def _nan(batch: dict, step: int, orders: Orders) -> None:
    if step == orders.step:
        batch["weights"][:] = np.nan


def _noise(batch: dict, step: int, orders: Orders) -> None:
    """Batches of a few steps have targets that nobody can guess."""
    if NOISE_STEP <= step < NOISE_STEP + 4:
        shape = batch["targets"].shape
        batch["targets"][:] = np.random.default_rng(step).integers(0, 256, shape)


BATCHES: dict[str, Callable] = {
    "hang": _hang, "hang_with_lock": _hang_with_lock, "nan": _nan, "noise": _noise,
}  # fmt: skip

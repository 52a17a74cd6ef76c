"""Runs that were saved, and runs that begin in their work directory."""

import functools
import types
from pathlib import Path

from support import runs

from llmx import config
from llmx.checkpoint import checkpointer, resume

DATA = types.SimpleNamespace(fingerprint="of the data")


MODEL = dict(
    num_layers=2, width=16, num_heads=2, num_kv_heads=2, head_dim=8, mlp_dim=32, vocab_multiple=8
)


def run_of(workdir: Path, num_devices: int, **values):
    mesh = {} if "mesh__stage" in values else {"data": num_devices}
    options = dict(optimizer__warmup_steps=1, optimizer__ema_decay=0.5) | values
    run = runs.make_config(
        "llama3", model=MODEL, mesh=mesh, workdir=str(workdir), steps=4, batch__size=8,
        batch__sequence_length=16, **options,
    )  # fmt: skip
    return run, runs.make_recipe(run)


@functools.cache
def new_state(num_devices: int, seed: int, values: tuple):
    """Made once for all tests: making one compiles a program."""
    _, recipe = run_of(Path("unused"), num_devices, **dict(values))
    return recipe.init(seed)


def opened(workdir: Path, log=print) -> checkpointer.Checkpointer:
    kept = checkpointer.CheckpointConfig(keep_last=100)
    return checkpointer.Checkpointer(str(workdir / "checkpoints"), kept, log=log)


def save(workdir: Path, step: int, num_devices: int, state=None, **values):
    """Writes and returns checkpoint `step`: a state, or that of a new run with seed `step`."""
    run, recipe = run_of(workdir, num_devices, **values)
    meta = {
        "fingerprint": DATA.fingerprint,
        "batch_size": run.batch.size,
        "config": config.to_json(run),
    }
    with opened(workdir) as checkpoints:
        if state is None:
            state = new_state(num_devices, step, tuple(values.items()))
        checkpoints.save(step, state, meta=meta, order=recipe.order)
    return state


def resumed(workdir: Path, num_devices: int, **values):
    """The recipe, state, first step and log of a run that begins in `workdir`."""
    run, recipe = run_of(workdir, num_devices, **values)
    said: list[str] = []
    with opened(workdir, said.append) as checkpoints:
        restored = resume.restore_or_init(run, recipe, checkpoints, DATA, said.append)
    return recipe, restored.state, restored.step, "\n".join(said)

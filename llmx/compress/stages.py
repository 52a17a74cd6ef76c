"""What a recipe can do with a run: `STAGES`, a name with options and a function.

A function takes the run of one folder and makes that of another, complete when it returns. Killed
before, it is called again and finds what it left in its own folder.
"""

import copy
import dataclasses
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from llmx import config as config_lib
from llmx import library
from llmx.compress import (
    low_rank_stage,
    pruning,
    quantize_stage,
    saved,
    structured,
    tensor_train_stage,
)
from llmx.compress.low_rank_stage import LowRank
from llmx.compress.quantize_stage import Quantize
from llmx.compress.tensor_train_stage import TensorTrain
from llmx.config import starting
from llmx.model import distillation
from llmx.model.families import ModelConfig
from llmx.runtime.bounds import bounded, choice

BEGIN = "0_start"  # the folder of the run that a compression began with
RUN = "run"  # behind the folder's name of a stage that trains, that of the run that it trains


class Stopped(RuntimeError):
    """A stage that trains ended before its last step, with a checkpoint: it can go on."""


class Job(NamedTuple):
    """One stage of one compression: where it takes its run, and where it makes one."""

    source: str  # the work directory of a run
    folder: pathlib.Path  # of the run that the stage makes
    options: Any  # of the stage's dataclass


class Stage(NamedTuple):
    """A row of `STAGES`."""

    options: type  # a dataclass with bounds, as a section of the config
    run: Callable[[Job], None]
    # (model before, options) -> what is wrong, each with its remedy
    problems: Callable[[ModelConfig, Any], Iterator[str]]
    # (model before, options) -> the model behind it, as far as it is known before anything runs
    model: Callable[[ModelConfig, Any], ModelConfig] = lambda model, options: model
    about: str = ""
    last: bool = False  # no other can follow: weights are codes then


@dataclasses.dataclass
class Train:
    """The run is trained further, by the loop of `llmx.train`."""

    steps: int = bounded(100, at_least=1)
    learning_rate: float = bounded(0.0, at_least=0)  # at its peak; 0 = that of the run
    warmup_steps: int = bounded(0, at_least=0)
    config: dict = dataclasses.field(default_factory=dict)  # other keys: {"batch.size": 8}


@dataclasses.dataclass
class Distil(Train):
    """The run is trained further beside a teacher, by what that makes of the same text."""

    teacher: str = ""  # as `distillation.teacher`; "" = the run that the compression began with
    weight: float = bounded(0.5, at_least=0, at_most=1)  # of the teacher
    temperature: float = bounded(1.0, at_least=0.1, at_most=100.0)
    divergence: str = choice("forward", distillation.DIVERGENCES)


def distil(job: Job) -> None:
    """Trains the run of a folder beside its teacher, and goes on where it was killed."""
    options = job.options
    train(
        job, distillation__teacher=options.teacher or str(job.folder.with_name(BEGIN)),
        distillation__weight=options.weight, distillation__temperature=options.temperature,
        distillation__divergence=options.divergence,
    )  # fmt: skip


def train(job: Job, **changes: Any) -> None:
    """Trains the run of a folder, and goes on where it was killed. `changes`: see `trained`."""
    run = config_lib.load_run(job.source)
    workdir = job.folder.with_name(f"{job.folder.name}.{RUN}")
    trained(run, job.options, job.source, workdir, **changes)
    found = saved.opened(str(workdir))
    saved.written(config_lib.load_run(str(workdir)), found.params, job.folder, origin=str(workdir))


def trained(
    run: config_lib.Config, options: Train, source: str, workdir: pathlib.Path, **changes: Any
) -> None:  # fmt: skip
    """A run of `options.steps` steps that begins with another's parameters. `changes`: keys of the
    config, "__" in the place of dots. Raises Stopped where it does not end."""
    run = copy.deepcopy(run)
    run.start_from, run.workdir, run.steps = str(source), str(workdir), options.steps
    run.optimizer.warmup_steps = min(options.warmup_steps, options.steps)
    if options.learning_rate:
        run.optimizer.learning_rate = options.learning_rate
    run.checkpoint.every = min(run.checkpoint.every, max(options.steps // 4, 1))
    run.sample.prompt = ""
    for key, value in (dict(options.config) | changes).items():
        config_lib.set_value(run, key.replace("__", "."), value)
    found = library.fit(run)
    if not found.done:
        raise Stopped(f"the training in {workdir} stopped at step {found.step}: {found.why}")


def problems_of_training(model: ModelConfig, options: Train) -> Iterator[str]:
    """Keys that the config does not have, and those that are options of the stage; all else the
    training itself checks."""
    known = config_lib.leaf_types(config_lib.Config)
    for key in options.config:
        if key not in known:
            yield f"config: {config_lib.unknown_key(key, known)}"
        if key in ("steps", "workdir", "start_from"):
            yield f"config: {key!r} is the stage's own; leave it out, and use the option `steps`"


def problems_of_distilling(model: ModelConfig, options: Distil) -> Iterator[str]:
    """Those of training, and a teacher that is not there."""
    yield from problems_of_training(model, options)
    run = config_lib.default()
    run.distillation.teacher = options.teacher
    try:
        starting.teacher_of(run)
    except ValueError as error:
        yield f"teacher: {error}"


# fmt: off
STAGES: dict[str, Stage] = {
    "low_rank": Stage(LowRank, low_rank_stage.run, low_rank_stage.problems, low_rank_stage.model_of,
                      "products become two factors of low rank"),
    "tensor_train": Stage(TensorTrain, tensor_train_stage.run, tensor_train_stage.problems,
                          tensor_train_stage.model_of,
                          "the embedding table becomes a train of tensors"),
    "prune": Stage(pruning.Prune, lambda job: pruning.prune(*job), pruning.problems_of_pruning,
                   about="weights become zero: magnitude, Wanda, SparseGPT; N:M"),
    "shrink": Stage(pruning.Shrink, lambda job: pruning.shrink(*job),
                    pruning.problems_of_shrinking, structured.smaller_model,
                    "heads, MLP columns and layers are removed"),
    "quantize": Stage(Quantize, quantize_stage.run, quantize_stage.problems, last=True,
                      about="weights of products in 8 or 4 bits"),
    "train": Stage(Train, train, problems_of_training, about="the run is trained further"),
    "distil": Stage(Distil, distil, problems_of_distilling,
                    about="the run is trained further beside a teacher, by default the first run"),
}
# fmt: on

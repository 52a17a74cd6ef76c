"""What a recipe can do with a run: `STAGES`, a name with options and a function.

A function takes the run of one folder and makes that of another, complete when it returns. Killed
before, it is called again and finds what it left in its own folder.
"""

import copy
import dataclasses
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from llmx import config as config_lib
from llmx import library
from llmx.compress import calibration, low_rank, pruning, quantize_stage, saved, structured
from llmx.compress.quantize_stage import Quantize
from llmx.model import adapters, distillation, ranks, tensor_train
from llmx.model.apply import Apply
from llmx.model.families import ModelConfig
from llmx.runtime import launch
from llmx.runtime.bounds import bounded, choice
from llmx.sharding import trees

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
class LowRank:
    """Products become two factors; one of rank, share and energy says how large."""

    # modules or products: "attention", "mlp/up"
    products: tuple[str, ...] = ranks.MODULES
    rank: int = bounded(0, at_least=0)  # of each product
    share: float = bounded(0.0, at_least=0, below=1)  # of each product's parameters
    energy: float = bounded(0.0, at_least=0, at_most=1)  # of each product's squared singular values
    # "whitened" by the inputs of calibration text, "scaled" by their magnitudes, or "plain"
    method: str = choice(
        low_rank.WHITENED, (low_rank.WHITENED, low_rank.SCALED, low_rank.PLAIN)
    )  # fmt: skip
    calibration_batches: int = bounded(8, at_least=1)  # of the training text


@dataclasses.dataclass
class TensorTrain:
    """The embedding table becomes a train of tensors."""

    rank: int = bounded(16, at_least=1)
    cores: int = bounded(3, at_least=2, at_most=3)


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
    """Keys that the config does not have; all else the training itself checks."""
    known = config_lib.leaf_types(config_lib.Config)
    for key in options.config:
        if key not in known:
            yield f"config: {config_lib.unknown_key(key, known)}"


def factor(job: Job) -> None:
    """Puts two factors in the place of the products that a recipe names."""
    options, run = job.options, saved.opened(job.source)
    model = run.config.model
    named = trees.named(jax.device_get(run.params))
    statistics = {}
    if options.method != low_rank.PLAIN:
        batches = saved.training_batches(run, options.calibration_batches)
        loss = run.recipe.loss
        statistics = calibration.statistics(loss.apply, run.params, batches, loss.execution)
    sizes, found = ranks.sizes_of_products(model), {}
    for product in _chosen(model, options.products):
        paths = [path for path in named if path.partition("/")[2] == f"{product}/kernel"]
        spectra = {path: _spectra(named[path], path, statistics, options.method) for path in paths}
        every = [one for of_path in spectra.values() for one in of_path]
        rank = low_rank.rank_of(
            sizes[product], every, rank=options.rank, share=options.share, energy=options.energy
        )
        if not low_rank.saves(sizes[product], rank):
            launch.note(f"{product} stays one weight: rank {rank} would not make it smaller")
            continue
        found[product] = rank
        for path in paths:
            parts = low_rank.factored_leaves(
                named.pop(path), adapters.contracted(path), spectra[path], rank
            )
            named |= {f"{path}/{name}": leaf for name, leaf in parts.items()}
    config = config_lib.load_run(job.source)
    config.model = dataclasses.replace(config.model, ranks=ranks.texts(ranks.of(model) | found))
    saved.written(config, trees.nest(named), job.folder, origin=job.source)


def _spectra(leaf: np.ndarray, path: str, statistics: dict, method: str) -> list:
    """Of each layer of a stacked weight."""
    inputs = int(np.prod(leaf.shape[1 : 1 + adapters.contracted(path)]))
    sides = low_rank.sides_of(statistics.get(path), method) or [None] * len(leaf)
    return [
        low_rank.spectrum(layer.reshape(inputs, -1), side)
        for layer, side in zip(leaf, sides, strict=True)
    ]


def _chosen(model: ModelConfig, products: tuple[str, ...]) -> list[str]:
    """Products of one weight that the names mean."""
    return [
        product for product in ranks.sizes_of_products(model)
        if product not in ranks.of(model) and ranks.is_within(product, products)
    ]  # fmt: skip


def problems_of_factors(model: ModelConfig, options: LowRank) -> Iterator[str]:
    """What is wrong with factors of a model, each with its remedy."""
    given = [name for name in ("rank", "share", "energy") if getattr(options, name)]
    if len(given) != 1:
        yield f"give one of rank, share and energy: {', '.join(given) or 'none'} is given"
    for name in options.products:
        if not _chosen(model, (name,)):
            known = _chosen(model, ranks.MODULES)
            yield (
                f"products names {name!r}, which has no product of one weight: use some of "
                f"{', '.join((*ranks.MODULES, *known))}"
            )
    if not options.products:
        yield "products=() leaves nothing to do: name products, or leave the stage out"
    if options.method != low_rank.PLAIN:
        for text in calibration.problems(Apply(model)):
            yield f"method={options.method!r}: {text}, method='plain'"


def factored_model(model: ModelConfig, options: LowRank) -> ModelConfig:
    """With ranks of all that is chosen, if only of size one where they are not known yet."""
    found = dict.fromkeys(_chosen(model, options.products), options.rank or 1)
    sizes = ranks.sizes_of_products(model)
    found = {name: rank for name, rank in found.items() if low_rank.saves(sizes[name], rank)}
    return dataclasses.replace(model, ranks=ranks.texts(ranks.of(model) | found))


def make_train(job: Job) -> None:
    """Puts a train of tensors in the place of the embedding table."""
    config, run = config_lib.load_run(job.source), saved.opened(job.source)
    config.model = trained_table(config.model, job.options)
    params = dict(jax.device_get(run.params))
    shapes = tensor_train.shapes(config.model)
    cores = low_rank.train_of_table(np.float64(params["embedding"]), list(shapes.values()))
    params["embedding"] = dict(zip(shapes, cores, strict=True))
    saved.written(config, params, job.folder, origin=job.source)


def trained_table(model: ModelConfig, options: TensorTrain) -> ModelConfig:
    """The model with the train."""
    return dataclasses.replace(
        model, embedding_rank=options.rank, embedding_cores=options.cores
    )  # fmt: skip


def problems_of_train(model: ModelConfig, options: TensorTrain) -> Iterator[str]:
    """What is wrong with a train in the place of a model's table."""
    if model.embedding_rank:
        yield f"the embedding is a train of rank {model.embedding_rank} already: leave it out"
        return
    yield from tensor_train.problems(trained_table(model, options))


# fmt: off
STAGES: dict[str, Stage] = {
    "low_rank": Stage(LowRank, factor, problems_of_factors, factored_model,
                      "products become two factors of low rank"),
    "tensor_train": Stage(TensorTrain, make_train, problems_of_train, trained_table,
                          "the embedding table becomes a train of tensors"),
    "prune": Stage(pruning.Prune, lambda job: pruning.prune(*job), pruning.problems_of_pruning,
                   about="weights become zero: magnitude, Wanda, SparseGPT; N:M"),
    "shrink": Stage(pruning.Shrink, lambda job: pruning.shrink(*job),
                    pruning.problems_of_shrinking, structured.smaller_model,
                    "heads, MLP columns and layers are removed"),
    "quantize": Stage(Quantize, quantize_stage.run, quantize_stage.problems, last=True,
                      about="weights of products in 8 or 4 bits"),
    "train": Stage(Train, train, problems_of_training, about="the run is trained further"),
    "distil": Stage(Distil, distil, problems_of_training,
                    about="the run is trained further beside a teacher, by default the first run"),
}
# fmt: on

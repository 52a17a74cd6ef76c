"""Pruning as stages of a recipe: zeros in the weights of a run, or a run of fewer units."""

import dataclasses
from collections.abc import Iterator

import jax

from llmx import config as config_lib
from llmx.compress import calibration, saved, structured, unstructured
from llmx.compress.structured import StructuredOptions
from llmx.compress.unstructured import PruneOptions
from llmx.model import ranks
from llmx.model.families import ModelConfig
from llmx.runtime import launch
from llmx.runtime.bounds import bounded, choice

MAGNITUDE, TAYLOR = "magnitude", "taylor"


@dataclasses.dataclass
class Prune(PruneOptions):
    """Weights become zero. A stage `train` keeps them so with `pruning.method="fixed"`."""

    calibration_batches: int = bounded(8, at_least=1)  # of the training text


@dataclasses.dataclass
class Shrink(StructuredOptions):
    """Heads, MLP columns and layers are removed."""

    # "magnitude" of a unit's weights, or "taylor": the first-order change of the loss without it
    score: str = choice(TAYLOR, (MAGNITUDE, TAYLOR))
    calibration_batches: int = bounded(8, at_least=1)  # of the training text


def prune(source: str, folder, options: Prune) -> None:
    """Makes the run in `folder` of that of `source`, with zeros."""
    config, run = config_lib.load_run(source), saved.opened(source)
    if options.calibrates:
        loss = run.recipe.loss
        params = calibration.layer_by_layer(
            loss.apply, run.params, saved.training_batches(run, options.calibration_batches),
            loss.execution, unstructured.of_layer(options),
        )  # fmt: skip
    else:
        params = unstructured.by_magnitude(
            run.config.model, jax.device_get(run.params), options
        )  # fmt: skip
    saved.written(config, params, folder, origin=source)


def shrink(source: str, folder, options: Shrink) -> None:
    """Makes the run in `folder` of that of `source`, with a smaller model."""
    config, run = config_lib.load_run(source), saved.opened(source)
    model, params = run.config.model, jax.device_get(run.params)
    if options.score == TAYLOR:
        batches = saved.training_batches(run, options.calibration_batches)
        scores = structured.taylor_scores(model, params, _gradient_of(run), batches)
    else:
        scores = structured.magnitude_scores(model, params)
    smaller, params, kept = structured.pruned(model, params, options, scores)
    if options.num_layers:
        launch.note(f"layers that stay: {', '.join(map(str, kept['layers']))}")
    config.model = smaller
    saved.written(config, params, folder, origin=source)


def _gradient_of(run: saved.Opened):
    """batch -> the gradient of the loss at the run's parameters, on the host."""
    recipe, mesh = run.recipe, run.recipe.mesh

    @jax.jit
    def gradient(params, batch):
        return recipe.gradient.take(params, batch, (), recipe.loss.init_extra())[0].tree

    def of(batch):
        with jax.set_mesh(mesh):
            return jax.device_get(gradient(run.params, batch))

    return of


def problems_of_shrinking(model: ModelConfig, options: Shrink) -> Iterator[str]:
    """What is wrong with a smaller model, each with its remedy."""
    if ranks.of(model):
        yield "the products of the model are of low rank: shrink it before they are factored"
        return
    yield from structured.problems(options, model)


def problems_of_pruning(model: ModelConfig, options: Prune) -> Iterator[str]:
    """What is wrong with zeros in a model, each with its remedy."""
    if ranks.of(model):
        yield "the products of the model are of low rank, and have no weight to prune"
        return
    yield from unstructured.problems(options, model)

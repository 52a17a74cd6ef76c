"""Configs of small models, and the programs that llmx makes of them.

Every test that initializes or trains a model comes through here, so that one file knows how a
config becomes a program:

    config = make_config("llama3", mesh={"fsdp": 4}, batch__size=8, batch__sequence_length=16)
    recipe = make_recipe(config)
    losses, norms, params = train(recipe, batches)
"""

import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from support import text_runs

from llmx import config as config_lib
from llmx import library, sharding
from llmx.config import checks
from llmx.config import recipe as recipe_lib
from llmx.model import families
from llmx.step import optimizers, programs, step
from llmx.step.step import Recipe
from llmx.sync import replicas as replicas_lib
from llmx.sync.compressors import Tensor
from llmx.sync.config import SyncConfig
from llmx.sync.strategy import STRATEGIES

# Adam's first steps are g / (|g| + eps): where a gradient happens to be near zero, a large eps
# keeps its rounding noise from being divided by itself. Parameters still move by about the
# learning rate.
PARITY_OPTIMIZER = dict(
    optimizer__learning_rate=1e-3, optimizer__warmup_steps=1, optimizer__eps=1e-3
)


def make_config(
    family: str | families.ModelConfig = "llama3",
    *,
    model: Mapping[str, Any] | None = None,
    mesh: Mapping[str, int] | None = None,
    **keys: Any,
) -> config_lib.Config:
    """A resolved fp32 config.

    Args:
      family: a preset, or the whole model.
      model: what differs from the preset.
      mesh: sizes of the mesh axes that are not 1.
      keys: other values of the config, with "__" in the place of dots: `batch__size=8`.

    Raises ConfigError where the values do not fit together.
    """
    config = config_lib.default()
    preset = isinstance(family, str)
    config.model = families.preset(family, **(model or {})) if preset else family
    config.workdir, config.steps, config.precision = "unused", 10, "fp32"
    sizes = dict.fromkeys(sharding.AXES, 1) | dict(mesh or {})
    for axis, size in sizes.items():
        setattr(config.mesh, axis, size)
    for key, value in keys.items():
        config_lib.set_value(config, key.replace("__", "."), value)
    return checks.resolve(config, num_devices(config))


def num_devices(config: config_lib.Config) -> int:
    return math.prod(vars(config.mesh)[axis] for axis in sharding.AXES)


def make_recipe(config: config_lib.Config, devices: Sequence[jax.Device] | None = None) -> Recipe:
    """The program of a resolved config, on the first of these devices; nothing is allocated."""
    devices = (jax.devices() if devices is None else devices)[: num_devices(config)]
    return recipe_lib.make_recipe(config, devices=devices)


def make_train_step(recipe: Recipe, phase: str = "mean") -> Callable:
    """The jitted (State, Batch) -> (State, Report)."""
    return step.make_train_step(recipe, phase)


def make_outer_steps(recipe: Recipe) -> dict[tuple[int, ...], Callable]:
    """By fragments: jitted State -> State, what replicas exchange between steps."""
    return recipe.strategy.outer


def make_programs(recipe: Recipe) -> programs.Programs:
    """(step number, State, Batch) -> (State, Report), as training runs them; compiled when used."""
    steps = {phase: make_train_step(recipe, phase) for phase in recipe.strategy.phases}
    return programs.Programs(recipe, steps, make_outer_steps(recipe), dict(recipe.between))


def phase(recipe: Recipe, number: int, freeze_step: int = -1) -> str:
    """Of step `number`; `freeze_step`: see `contract.Timetable`."""
    return recipe.strategy.timetable.phase_of(number, freeze_step)


def outer_after(recipe: Recipe, number: int) -> tuple[int, ...]:
    """The fragments whose outer step follows step `number`."""
    return recipe.strategy.timetable.fragments_after(number)


def replicas(recipe: Recipe, config: SyncConfig) -> replicas_lib.Replicas:
    """The replicas of the recipe's model on its mesh; `config`: its section `sync`."""
    return replicas_lib.make(
        config, recipe.mesh, STRATEGIES[config.strategy].compressor, shapes=recipe.loss.params,
        axes=recipe.loss.axes, updates=recipe.loss.updates,
    )  # fmt: skip


def tensors(recipe: Recipe) -> Mapping[str, Tensor]:
    """By parameter: what a strategy knows of the tensors that it exchanges."""
    return replicas(recipe, SyncConfig()).tensors


def messages(recipe: Recipe) -> tuple[int, tuple[int, ...]]:
    """Number of compressed tensors, and bytes of each message that they travel in."""
    return recipe.strategy.messages


def make_evaluation(recipe: Recipe) -> Callable:
    """The jitted (params, batch) -> (sum of nats, number of tokens)."""
    return jax.jit(recipe.gradient.loss)


def make_gradient(recipe: Recipe) -> Callable:
    """The jitted (params, batch) -> (loss, tokens, gradients), before clipping."""

    def gradient(params, batch):
        found, _ = recipe.gradient.take(params, batch, (), recipe.loss.init_extra())
        return found.loss, found.tokens, found.tree

    return jax.jit(gradient)


def make_update(recipe: Recipe, config: config_lib.Config) -> Callable:
    """The jitted (State, gradients) -> State after an accepted update, at the next step."""
    update = step.make_update(recipe.loss, recipe.ema_decay)
    optimizer = optimizers.make(
        config.optimizer, axes=recipe.loss.axes, splits=recipe.loss.updates,
        total_steps=config.steps,
    )  # fmt: skip

    def updated(state, grads):
        return update(grads, state, True, optimizer.whole)._replace(step=state.step + 1)

    return jax.jit(updated)


def logits(recipe: Recipe, params, batch: dict) -> jax.Array:
    """[B, T, V] of the padded vocabulary."""
    rows = (batch[name] for name in ("tokens", "segment_ids", "positions"))
    return recipe.loss.apply.logits(params, *rows, recipe.loss.execution)


def losses(recipe: Recipe, params, batch: dict) -> tuple[jax.Array, jax.Array]:
    """Nats and log(Z) by token [B, T]."""
    return recipe.loss.apply.losses(params, batch, recipe.loss.execution)


def abstract_batch(recipe: Recipe) -> dict[str, jax.ShapeDtypeStruct]:
    return recipe.abstract_batch


def lower(recipe: Recipe, phase: str = "mean") -> jax.stages.Lowered:
    """The train step, lowered."""
    with jax.set_mesh(recipe.mesh):
        return make_train_step(recipe, phase).lower(recipe.abstract, recipe.abstract_batch)


def put_batch(recipe, batch: dict) -> dict[str, jax.Array]:
    return jax.device_put(batch, recipe.loss.batch_sharding)


def put_state(recipe, state):
    """A state on the host, on the recipe's devices."""
    return jax.device_put(state, jax.tree.map(lambda leaf: leaf.sharding, recipe.abstract))


def put_params(recipe, params: dict):
    """Parameters on the host, layers in the model's order, on the recipe's devices."""
    to = jax.tree.map(lambda leaf: leaf.sharding, recipe.loss.params)
    return jax.device_put(jax.device_get(in_stages(recipe, params)), to)


def in_stages(recipe, params: dict) -> dict:
    """Parameters with their layers in the order in which the recipe's stages hold them."""
    return params | {"blocks": recipe.order.apply(params["blocks"])}


def in_order(recipe, params: dict) -> dict:
    """On the host, with layers in the model's order: the inverse of `in_stages`."""
    params = jax.device_get(params)
    return params | {"blocks": jax.device_get(recipe.order.inverse(params["blocks"]))}


class Trained(NamedTuple):
    """What a few steps leave, on the host."""

    losses: np.ndarray
    norms: np.ndarray  # of gradients, before clipping
    params: dict  # in the model's order


def train(recipe, batches: Sequence[dict], state=None) -> Trained:
    """A step per batch, from this state or from seed 0. The state is donated."""
    train_step = make_train_step(recipe, phase(recipe, 0))
    losses, norms = [], []
    with jax.set_mesh(recipe.mesh):
        state = recipe.init(0) if state is None else state
        for batch in batches:
            state, report = train_step(state, put_batch(recipe, batch))
            losses.append(float(report.loss))
            norms.append(float(report.grad_norm))
    return Trained(np.array(losses), np.array(norms), in_order(recipe, state.params))


def trained_workdir(folder: pathlib.Path, **sizes: int) -> str:
    """The work directory of a run of two steps of a small Llama, on a text of its own."""
    run = config_lib.default()
    run.workdir, run.steps, run.precision = str(folder / "run"), 2, "fp32"
    run.model = families.preset("llama3", **sizes, vocab_multiple=8, max_positions=32)
    run.batch.size, run.batch.sequence_length = 8, 16
    run.metrics.progress, run.metrics.tensorboard, run.launch.compile_cache = "plain", False, ""
    run.data.sources = (str(text_runs.write_corpus(folder, files=2, words=400)),)
    run.data.cache_dir, run.data.num_threads = str(folder / "cache"), 0
    assert library.fit(run).done
    return run.workdir

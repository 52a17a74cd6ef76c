"""The bias by which experts are chosen, moved towards equal loads beside the optimizer.

In the gradient tree the bias has the loads of its experts (`llmx.model.experts.router`): how many
tokens of the batch went to each. The optimizer sees zeros there. The bias of an expert that has
more than the mean moves down by the rate, of one that has less up. Neither the learning rate nor
clipping acts on it.

Source: auxiliary-loss-free balancing, arXiv 2408.15664; DeepSeek-V3, arXiv 2412.19437.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from llmx.contract import BY_LAYER, Gradients, Transform
from llmx.model.experts import router
from llmx.model.experts.config import (
    CAPACITY,
    DROPPED,
    ENTROPY,
    LOAD_MAX,
    LOAD_MIN,
    ExpertsConfig,
)
from llmx.model.families import ModelConfig


def with_bias_rate(
    optimizer: optax.GradientTransformation, rate: float
) -> optax.GradientTransformationExtraArgs:
    """`optimizer`, beside which the biases of experts move by `rate`; 0 = they stay."""
    optimizer = optax.with_extra_args_support(optimizer)

    def update(gradients, state, params=None, **extra):
        updates, state = optimizer.update(without_loads(gradients), state, params, **extra)
        step = lambda loads: rate * jnp.sign(loads.mean(axis=-1, keepdims=True) - loads)  # noqa: E731
        moved = _of_loads(step, gradients)
        chosen = lambda path, new, bias: bias if router.is_loads(path) else new  # noqa: E731
        return jax.tree_util.tree_map_with_path(chosen, updates, moved), state

    return optax.GradientTransformationExtraArgs(optimizer.init, update)


def _of_loads(function, tree: Any) -> Any:
    """`tree` with `function` of its loads."""
    one = lambda path, leaf: function(leaf) if router.is_loads(path) else leaf  # noqa: E731
    return jax.tree_util.tree_map_with_path(one, tree)


def without_loads(tree: Any) -> Any:
    """Gradients with zeros in the place of loads."""
    return _of_loads(jnp.zeros_like, tree)


def transforms(
    model: ModelConfig, config: ExpertsConfig, strategy: str = "mean",
    in_order: Callable[[Any], Any] = lambda stacked: stacked,
) -> Mapping[str, Transform]:  # fmt: skip
    """The transform that reports loads, by name; {} where there are no experts, or where replicas
    do not add up their gradients in full and so know their own loads only.

    `in_order`: from arrays as the blocks' parameters are stacked, to [layers, ...] in the model's
    order.
    """
    if not model.num_experts or strategy != "mean":
        return {}

    def scalars(found: Gradients, state: tuple) -> dict[str, jax.Array]:
        loads = found.tree["blocks"]["mlp"]["bias"]
        loads_LE = in_order(jax.sharding.reshard(loads, PartitionSpec(None, None)))
        by_layer = of_layers(loads_LE)
        whole = {
            LOAD_MAX: by_layer[LOAD_MAX].max(), LOAD_MIN: by_layer[LOAD_MIN].min(),
            ENTROPY: by_layer[ENTROPY].mean(),
        }  # fmt: skip
        if config.dispatch == CAPACITY:
            wanted = jnp.maximum(found.tokens * model.experts_per_token, 1)
            by_layer[DROPPED] = jnp.maximum(1 - loads_LE.sum(axis=1) / wanted, 0)
            whole[DROPPED] = by_layer[DROPPED].mean()
        dense = jnp.full(model.num_first, jnp.nan)
        return whole | {
            f"{name}{BY_LAYER}": jnp.concatenate([dense, values_L])
            for name, values_L in by_layer.items()
        }

    return {
        "experts": Transform(
            init=lambda: (), loss=lambda loss, state: loss,
            gradients=lambda found, state: found, after=lambda state, found, accepted: state,
            scalars=scalars, resumed=lambda state: state,
        )
    }  # fmt: skip


def of_layers(loads_LE: jax.Array) -> dict[str, jax.Array]:
    """Largest and least load over the mean, and entropy over log E, of each layer: fp32 [L]. Of no
    load, as equal ones."""
    means_L1 = loads_LE.mean(axis=1, keepdims=True)
    used_L1 = means_L1 > 0
    shares_LE = jnp.where(used_L1, loads_LE / jnp.where(used_L1, means_L1, 1), 1)
    E = loads_LE.shape[1]
    parts_LE = shares_LE / E
    terms_LE = jnp.where(parts_LE > 0, parts_LE * jnp.log(parts_LE), 0)
    return {
        LOAD_MAX: shares_LE.max(axis=1), LOAD_MIN: shares_LE.min(axis=1),
        ENTROPY: -terms_LE.sum(axis=1) / jnp.log(max(E, 2)),
    }  # fmt: skip

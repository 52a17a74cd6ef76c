"""What is reported of the loads of experts: it changes neither loss nor gradient.

In the gradient tree the bias by which experts are chosen has their loads (`model.experts.router`).
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from llmx.contract import BY_LAYER, Gradients, Transform
from llmx.model.experts.config import (
    CAPACITY,
    DROPPED,
    ENTROPY,
    LOAD_MAX,
    LOAD_MIN,
    ExpertsConfig,
)
from llmx.model.families import ModelConfig

NAME = "experts"


def transforms(
    model: ModelConfig, config: ExpertsConfig, strategy: str = "mean", *, delayed: bool = False,
    in_order: Callable[[Any], Any] = lambda stacked: stacked,
) -> Mapping[str, Transform]:  # fmt: skip
    """The transform by name; {} where there are no experts, or where replicas do not add up their
    gradients in full and so know their own loads only.

    Args:
      model, config, strategy: the model, and sections of the config.
      delayed: a gradient is of microbatches of two batches, and so of no number of tokens: the
        share that is dropped is not reported.
      in_order: from arrays as the blocks' parameters are stacked, to [layers, ...] in the model's
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
        if config.dispatch == CAPACITY and not delayed:
            wanted = found.tokens * model.experts_per_token
            taken_L = loads_LE.sum(axis=1) / jnp.maximum(wanted, 1)
            by_layer[DROPPED] = jnp.where(wanted > 0, 1 - taken_L, 0)
            whole[DROPPED] = by_layer[DROPPED].mean()
        dense = jnp.full(model.num_first, jnp.nan)
        return whole | {
            f"{name}{BY_LAYER}": jnp.concatenate([dense, values_L])
            for name, values_L in by_layer.items()
        }

    return {
        NAME: Transform(
            init=lambda: (), loss=lambda loss, state: loss,
            gradients=lambda found, state: found, after=lambda state, found, accepted: state,
            scalars=scalars, resumed=lambda state: state,
        )
    }  # fmt: skip


def of_layers(loads_LE: jax.Array) -> dict[str, jax.Array]:
    """Largest and least load over the mean, and entropy over log E, of each layer: fp32 [L]. No
    load at all, and that of a single expert, counts as equal."""
    E = loads_LE.shape[1]
    means_L1 = loads_LE.mean(axis=1, keepdims=True)
    used_L1 = means_L1 > 0
    shares_LE = jnp.where(used_L1, loads_LE / jnp.where(used_L1, means_L1, 1), 1)
    parts_LE = shares_LE / E
    terms_LE = jnp.where(parts_LE > 0, parts_LE * jnp.log(parts_LE), 0)
    entropy_L = -terms_LE.sum(axis=1) / jnp.log(E) if E > 1 else jnp.ones(len(loads_LE))
    return {
        LOAD_MAX: shares_LE.max(axis=1), LOAD_MIN: shares_LE.min(axis=1), ENTROPY: entropy_L
    }  # fmt: skip

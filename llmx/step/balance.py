"""The bias by which experts are chosen, moved towards equal loads beside the optimizer.

In the gradient tree the bias has the loads of its experts (`llmx.model.experts.router`): how many
tokens of the batch went to each. The optimizer sees zeros there. The bias of an expert that has
more than the mean moves down by the rate, of one that has less up. Neither the learning rate nor
clipping acts on it.

Source: auxiliary-loss-free balancing, arXiv 2408.15664; DeepSeek-V3, arXiv 2412.19437.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from llmx.contract import Gradients, Transform
from llmx.model.experts import router
from llmx.model.experts.config import SCALARS
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


def transforms(model: ModelConfig, strategy: str = "mean") -> Mapping[str, Transform]:
    """The transform that reports loads, by name; {} where there are no experts, or where replicas
    do not add up their gradients in full and so know their own loads only."""
    if not model.num_experts or strategy != "mean":
        return {}

    def scalars(found: Gradients, state: tuple) -> dict[str, jax.Array]:
        loads = found.tree["blocks"]["mlp"]["bias"]
        loads_LE = loads.reshape(-1, loads.shape[-1])
        means_L1 = loads_LE.mean(axis=1, keepdims=True)
        # Of an empty slot of a pipeline's stage there are none.
        used_L1 = means_L1 > 0
        shares = jnp.where(used_L1, loads_LE / jnp.where(used_L1, means_L1, 1), 1)
        parts = shares / model.num_experts
        entropy = -jnp.sum(jnp.where(parts > 0, parts * jnp.log(parts), 0), axis=1)
        entropy = jnp.sum(jnp.where(used_L1[:, 0], entropy, 0)) / jnp.maximum(used_L1.sum(), 1)
        evenness = entropy / jnp.log(max(model.num_experts, 2))
        return dict(zip(SCALARS, (shares.max(), shares.min(), evenness), strict=True))

    return {
        "experts": Transform(
            init=lambda: (), loss=lambda loss, state: loss,
            gradients=lambda found, state: found, after=lambda state, found, accepted: state,
            scalars=scalars, resumed=lambda state: state,
        )
    }  # fmt: skip

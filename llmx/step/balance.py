"""The bias by which experts are chosen, moved towards equal loads beside the optimizer.

In the gradient tree the bias has the loads of its experts (`llmx.model.experts.router`): how many
tokens of the batch went to each. The optimizer sees zeros there. The bias of an expert that has
more than the mean moves down by the rate, of one that has less up. Neither the learning rate nor
clipping acts on it.

Source: auxiliary-loss-free balancing, arXiv 2408.15664; DeepSeek-V3, arXiv 2412.19437.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from llmx.model.experts import router


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

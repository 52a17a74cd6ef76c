"""Fully connected layers of models of clicks, as functions of a flat dict of parameters.

Letters: B records, D a width.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# Logical axes. The layout splits one dimension of a matrix over replicas, as it does a decoder's.
WEIGHT_AXES, BIAS_AXES = ("embed", "mlp"), ("mlp",)
LAST_AXES = ("embed", None)  # of a layer with one output


def prelu(x_BD: Array, slope_D: Array) -> Array:
    """max(x, 0) + slope min(x, 0), of learned slopes (PReLU, arXiv 1502.01852)."""
    return jnp.maximum(x_BD, 0) + slope_D * jnp.minimum(x_BD, 0)


def init_linear(key: Array, name: str, inputs: int, outputs: int) -> dict[str, Array]:
    """As DLRM's own: normal, of variance 2 / (inputs + outputs), and biases of 1 / outputs."""
    of_weight, of_bias = jax.random.split(key)
    weight = jax.random.normal(of_weight, (inputs, outputs)) * (2 / (inputs + outputs)) ** 0.5
    bias = jax.random.normal(of_bias, (outputs,)) * (1 / outputs) ** 0.5
    return {f"{name}.weight": weight, f"{name}.bias": bias}


def init_layers(key: Array, name: str, widths: Sequence[int], *, slopes: bool = False) -> dict:
    """Parameters of layers from widths[0] to widths[1], and so on. `slopes`: for `prelu`."""
    params = {}
    for at, (one, inputs, outputs) in enumerate(_steps(key, widths)):
        params |= init_linear(one, f"{name}.{at}", inputs, outputs)
        if slopes:
            params[f"{name}.{at}.slope"] = jnp.full((outputs,), 0.25)
    return params


def _steps(key: Array, widths: Sequence[int]) -> Any:
    keys = jax.random.split(key, max(len(widths) - 1, 1))
    return list(zip(keys, widths[:-1], widths[1:], strict=False))


def linear(params: dict[str, Array], name: str, x: Array) -> Array:
    return x @ params[f"{name}.weight"] + params[f"{name}.bias"]


def layers(
    params: dict[str, Array], name: str, x: Float[Array, "... D"], number: int,
    activation: Callable[[Array, dict, str], Array],
) -> Array:  # fmt: skip
    """x through `number` layers, each with the activation behind it."""
    for at in range(number):
        x = activation(linear(params, f"{name}.{at}", x), params, f"{name}.{at}")
    return x


def with_relu(x: Array, params: dict, name: str) -> Array:
    return jax.nn.relu(x)


def with_prelu(x: Array, params: dict, name: str) -> Array:
    return prelu(x, params[f"{name}.slope"])


def with_sigmoid(x: Array, params: dict, name: str) -> Array:
    return jax.nn.sigmoid(x)


def axes_of(params: dict[str, Any]) -> dict[str, tuple[str | None, ...]]:
    """The logical axes of parameters, by their shapes."""

    def one(shape: tuple[int, ...]) -> tuple[str | None, ...]:
        if shape[-1] == 1:
            return LAST_AXES[-len(shape) :]
        return WEIGHT_AXES if len(shape) == 2 else BIAS_AXES

    return {path: one(leaf.shape) for path, leaf in params.items()}

"""Statistics of what the products of a model multiply their weights with.

A product whose weight is `Observed` hands them out as the gradient of its `Statistics`, summed over
all tokens: whatever the model is a function of, one backward pass by the statistics collects them.
No gradient of an activation enters them, so XLA drops the rest of that pass.

Letters: B batch, T positions, I the numbers that a product contracts.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from llmx import sharding


class Statistics(NamedTuple):
    """Of the vectors x that one product takes, fp32; [l, ...] each of stacked layers."""

    gram_II: Float[Array, "I I"]  # sum over tokens of x x^T
    magnitude_I: Float[Array, " I"]  # sum of |x|
    amax_I: Float[Array, " I"]  # the largest |x|
    tokens: Float[Array, ""]  # how many x

    @property
    def squares_I(self) -> Any:
        """Sum over tokens of x^2."""
        return self.gram_II.diagonal(axis1=-2, axis2=-1)

    @property
    def mean_magnitude_I(self) -> Any:
        return self.magnitude_I / self.tokens[..., None]


class Observed(NamedTuple):
    """A weight, of whose product the inputs are wanted."""

    weight: Any
    statistics: Statistics  # zeros: differentiated by, their gradient is what was found


def empty(size: int) -> Statistics:
    """Of no tokens."""
    shapes = (size, size), (size,), (size,), ()
    return Statistics(*(jnp.zeros(shape, jnp.float32) for shape in shapes))


def added(total: Statistics, new: Statistics) -> Statistics:
    """Of the tokens of both."""
    sums = jax.tree.map(jnp.add, total, new)
    return sums._replace(amax_I=jnp.maximum(total.amax_I, new.amax_I))


def observe(expression: str, x: Array, statistics: Statistics) -> Array:
    """x, whose statistics as the first operand of a product are the gradient of `statistics`.

    Communicates in the backward pass: x over the axes that split what is contracted, the
    statistics over those that split tokens.
    """
    inputs, out = expression.split("->")
    of_x, of_weight = inputs.split(",")
    summed = "".join(letter for letter in of_x if letter in of_weight and letter not in out)
    assert of_x.endswith(summed), f"{expression}: what is contracted is not last in x"
    return _observe(len(of_x) - len(summed), x, statistics)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _observe(tokens: int, x: Array, statistics: Statistics) -> Array:
    return x


def _found(tokens: int, x: Array, gradient: Array) -> tuple[Array, Statistics]:
    spec = sharding.split_only(jax.typeof(x).sharding.spec)
    to = PartitionSpec(*spec.partitions[:tokens], None)
    whole = jax.sharding.reshard(x, PartitionSpec(*spec.partitions[:tokens]))
    x_BTI = jnp.reshape(whole, (*x.shape[:tokens], -1), out_sharding=to).astype(jnp.float32)
    left, magnitudes_BTI = "ab"[:tokens], jnp.abs(x_BTI)
    gram_II = jnp.einsum(
        f"{left}i,{left}j->ij", x_BTI, x_BTI, precision=jax.lax.Precision.HIGHEST,
        out_sharding=PartitionSpec(),
    )  # fmt: skip
    over = tuple(range(tokens))
    number = jnp.float32(x_BTI.size // x_BTI.shape[-1])
    found = Statistics(gram_II, magnitudes_BTI.sum(over), magnitudes_BTI.max(over), number)
    return gradient, found


_observe.defvjp(lambda tokens, x, statistics: (x, x), _found)

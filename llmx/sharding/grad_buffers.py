"""Gradient buffers: in which dtype, how split and when summed a parameter's gradient is."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from llmx.sharding import scatter, specs


def zeros(leaf: jax.ShapeDtypeStruct, *leading: int) -> jax.Array:
    """Zeros of a type; with `leading`, these sizes stand in the place of its first dimension."""
    shape = (*leading, *leaf.shape[1:]) if leading else leaf.shape
    return jnp.zeros(shape, leaf.dtype, out_sharding=leaf.sharding)


def empty_sum(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """fp32 zeros to accumulate gradients in, where each device keeps its own terms of the sum."""
    to = specs.unreduced(leaf.sharding.spec, leaf.sharding.spec.reduced)
    return jnp.zeros(leaf.shape, jnp.float32, out_sharding=leaf.sharding.update(spec=to))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def accumulate_into(axes: tuple[str, ...], array: jax.Array, buffer: jax.Array) -> jax.Array:
    """`array`, whose gradient goes to `buffer`: in its dtype, and split and summed as it is.

    A gradient has the type of what it is the gradient of. ZeRO-2 keeps whole parameters and split
    gradients, mixed precision sums gradients of fp32 parameters in bf16: so `array` is held
    constant, and the gradient is taken by `buffer`, an array of its shape whose value is not used.

    `axes` are the mesh axes along which devices see different tokens (`Placement.token_axes`).
    Communicates, in the backward pass, over those of them over which `buffer` is not `reduced`.
    """
    # A gathered weight has the compute dtype, and its gradient the dtype that it is summed in.
    return with_unreduced_grad(axes, array.astype(jnp.promote_types(array.dtype, buffer.dtype)))


def with_unreduced_grad(axes: Sequence[str], array: jax.Array) -> jax.Array:
    """A parameter whose gradient stays a sum of terms, one on each device along `axes`."""
    to = jax.typeof(array).sharding.spec
    later = [axis for axis in axes if axis not in specs.used_axes(to)]
    return jax.sharding.reshard(array, specs.reduced(to, later))


def to_buffer(gradient: jax.Array, buffer: Any) -> jax.Array:
    """The gradient of a parameter `with_unreduced_grad`, in the type of its buffer.

    Communicates over the axes along which `gradient` has terms and `buffer` is not `reduced`.
    """
    to = buffer.sharding.spec
    return scatter.scattered(gradient.astype(buffer.dtype), specs.unreduced(to, to.reduced))


accumulate_into.defvjp(
    lambda axes, array, buffer: (accumulate_into(axes, array, buffer), buffer),
    lambda axes, buffer, gradient: (None, to_buffer(gradient, jax.typeof(buffer))),
)

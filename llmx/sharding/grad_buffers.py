"""Gradient buffers: in which dtype a parameter's gradient is added up, how it is split, and when it
is summed over devices.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from llmx.sharding import specs


def regrouped(stacked: jax.Array, size: int) -> jax.Array:
    """[num * size, ...] as [num, size, ...], the other dimensions split as they were."""
    to = jax.typeof(stacked).sharding.spec
    grouped = specs.split_as(to, None, *to.partitions)
    shape = (stacked.shape[0] // size, size, *stacked.shape[1:])
    return jnp.reshape(stacked, shape, out_sharding=grouped)


def zeros(leaf: jax.ShapeDtypeStruct, *leading: int) -> jax.Array:
    """Zeros of a type, the first dimension replaced by `leading` if it is given."""
    shape = (*leading, *leaf.shape[1:]) if leading else leaf.shape
    return jnp.zeros(shape, leaf.dtype, out_sharding=leaf.sharding)


def empty_sum(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """Zeros in fp32 to add up gradients of a type in, each device its own terms."""
    spec = leaf.sharding.spec
    to = NamedSharding(leaf.sharding.mesh, specs.unreduced(spec, spec.reduced))
    return jnp.zeros(leaf.shape, jnp.float32, out_sharding=to)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def accumulate_into(axes: tuple[str, ...], array: jax.Array, buffer: jax.Array) -> jax.Array:
    """`array`, whose gradient goes to `buffer`: in its dtype, and split and summed as it is.

    A gradient must have the type of what it is the gradient of. ZeRO-2 keeps whole parameters and
    split gradients, mixed precision sums gradients of fp32 parameters in bf16: so `array` is held
    constant and the gradient is taken by `buffer`, an array of the same shape whose value is not
    used. Where the type of `buffer` is `reduced` along an axis, its gradient is not summed over it.

    Args:
      axes: the mesh axes along which devices see different tokens (`Placement.token_axes`).
      array: a parameter.
      buffer: any array of its shape.
    """
    # A gathered weight has the compute dtype, and its gradient the dtype that it is summed in.
    return with_unreduced_grad(axes, array.astype(jnp.promote_types(array.dtype, buffer.dtype)))


def with_unreduced_grad(axes: Sequence[str], array: jax.Array) -> jax.Array:
    to = jax.typeof(array).sharding.spec
    return jax.sharding.reshard(
        array, specs.reduced(to, [a for a in axes if a not in specs.used_axes(to)])
    )


def to_buffer(gradient: jax.Array, buffer: Any) -> jax.Array:
    """The gradient of a parameter `with_unreduced_grad`, in the type of its buffer."""
    to = buffer.sharding.spec
    return jax.sharding.reshard(gradient.astype(buffer.dtype), specs.unreduced(to, to.reduced))


def _route_forward(axes, array, buffer):
    return accumulate_into(axes, array, buffer), buffer


def _route_backward(axes, buffer, gradient):
    return None, to_buffer(gradient, jax.typeof(buffer))


accumulate_into.defvjp(_route_forward, _route_backward)

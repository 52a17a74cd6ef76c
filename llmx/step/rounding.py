"""Stochastic rounding: numbers of few bits that move by less than half a unit, as fp32 moves.

A bf16 parameter has 8 significant bits. An update below 1/512 of it is lost when the sum is rounded
to nearest, in every step again. Rounded up with the probability of what is cut off, the sum is
right on average, and small updates add up (arXiv 1502.02551, 2010.06192, 2502.20566).

Random bits are a hash of (step, name of the array, index of the number). So they need no state, are
the same wherever shards live and after a restart, and no device asks another one. Threefry would do
as well and takes five times the operations; `rbg` differs from mesh to mesh.
"""

import functools
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from llmx.sharding import trees

# Multipliers of `lowbias32` (nullprogram.com/blog/2018/07/31): a finaliser in the manner of
# MurmurHash3, in which every bit of the input changes every bit of the result.
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B
_GOLDEN = 0x9E3779B9  # 2^32 / golden ratio


def _mix(x: jax.Array) -> jax.Array:
    """A bijection of uint32 in which neighbours become far apart."""
    x = (x ^ (x >> 16)) * jnp.uint32(_FIRST)
    x = (x ^ (x >> 15)) * jnp.uint32(_SECOND)
    return x ^ (x >> 16)


def random_bits(
    shape: tuple[int, ...], *, step: jax.Array, name: str, rows: jax.Array | None = None
) -> jax.Array:
    """uint32 random numbers of an array, in a step; nothing communicates.

    Args:
      shape: of the array, globally. Each dimension may have up to 2^32 rows.
      step: int32 [], other bits in every step.
      name: of the array; others have other bits.
      rows: int32 [n]; the array has these rows of a larger one, whose bits it gets.
    """
    # Two words, so that rows whose first word is near do not get each other's numbers, shifted.
    salt = zlib.crc32(name.encode())
    one = _mix(step.astype(jnp.uint32) * jnp.uint32(_GOLDEN) ^ jnp.uint32(salt))
    other = _mix(one ^ jnp.uint32(_GOLDEN))

    def index(dim):
        ones = [1] * len(shape)
        ones[dim] = shape[dim]
        if dim == 0 and rows is not None:
            return rows.astype(jnp.uint32).reshape(ones)
        return jax.lax.broadcasted_iota(jnp.uint32, ones, dim)

    # Rows by themselves: only the last dimension is hashed for every number.
    for dim in range(len(shape) - 1):
        one, other = _mix(one + index(dim)), _mix(other ^ index(dim))
    last = index(len(shape) - 1) if shape else jnp.uint32(0)
    return jnp.broadcast_to(_mix(_mix(one + last) + other), shape)


def to_bf16(x: jax.Array, random: jax.Array) -> jax.Array:
    """fp32 as bf16, up or down with probabilities that make it right on average.

    What bf16 holds stays as it is, infinities and NaN too; no finite number becomes infinite.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    rounded = (bits + (random & 0xFFFF)) & jnp.uint32(0xFFFF0000)
    # The carry out of the largest finite number would make it infinite.
    infinite = (rounded & 0x7F800000) == 0x7F800000
    rounded = jnp.where(infinite, bits, rounded)
    halves = jax.lax.bitcast_convert_type((rounded >> 16).astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), halves, x.astype(jnp.bfloat16))


class Rounding(NamedTuple):
    """How new parameters are stored."""

    seed: Callable  # State.step -> what `add` draws random numbers from, or ()
    add: Callable  # (params, updates, seed, layers) -> new params; layers: see `rows_of`


def rows_of(name: str, layers: jax.Array | None) -> jax.Array | None:
    """The rows that an array has of a parameter; `layers`, int32 [n]: those that are given of the
    blocks, None = all."""
    return layers if name.startswith("blocks/") else None


def _add(params: Any, updates: Any, step: jax.Array, layers: jax.Array | None = None) -> Any:
    def one(path, param, update):
        exact = param.astype(jnp.float32) + update.astype(jnp.float32)
        name = trees.path_name(path)
        rows = rows_of(name, layers)
        bits = random_bits(param.shape, step=step, name=f"params/{name}", rows=rows)
        return to_bf16(exact, bits)

    return jax.tree_util.tree_map_with_path(one, params, updates)


NEAREST = Rounding(
    lambda step: (), lambda params, updates, *_: optax.apply_updates(params, updates)
)
STOCHASTIC = Rounding(lambda step: step, _add)

# By the dtype of master parameters.
ROUNDINGS = {"float32": NEAREST, "bfloat16": STOCHASTIC}


@functools.cache
def of(dtype: jnp.dtype) -> Rounding:
    """How parameters of this dtype are stored."""
    return ROUNDINGS[dtype.name]

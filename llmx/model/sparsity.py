"""Which weights are pruned: masks from scores, on weights that are split over a mesh.

A mask is True where a weight stays. Scores are compared as `keys`, whole numbers in the same order,
so that a threshold is found exactly: bit by bit, by counting how many keys are below. What devices
exchange are these counts, one for each layer; no weight or score leaves its device. Among equal
keys the first by position are pruned: by name of the parameter as `trees.named` has it, by layer,
then by index in the layer. So exactly as many weights are pruned as are asked for.

N:M masks (arXiv 2104.08378) keep the N largest of each M neighbours along the dimension that the
product sums over, which is what sparse matrix units multiply.

Functions take and return dicts by parameter name of arrays [l, ...], whose first dimension counts
layers, and are to be called under Auto axes. Keys are functions that make them: they are made anew
in each pass, of a zero that differs from pass to pass for all that the compiler knows. Kept from
pass to pass they, and the index of each weight, would take as much memory as the weights.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_BITS = 32
Keys = Callable[[jax.Array], jax.Array]  # uint32 [], zero -> keys, uint32 [l, ...]
PRUNED = np.uint32(0)  # the key of what is pruned already: it is the first to be pruned again


class Goal(NamedTuple):
    """How many weights to prune, as two uint32: thousands of millions do not fit one."""

    high: jax.Array  # in units of 2**16
    low: jax.Array  # below 2**16


def goal(count: int) -> tuple[int, int]:
    """The numbers of a `Goal`."""
    return count >> 16, count & 0xFFFF


def contracted_dim(axes: Sequence[str]) -> int:
    """The dimension of a weight with these logical axes that its product sums over; of several
    (heads and their numbers, in the output of attention) the last."""
    width = list(axes).index("embed")
    return width if width < len(axes) - 1 else width - 1


def magnitude_keys(weights: jax.Array, zero: jax.Array | int = 0) -> jax.Array:
    """uint32 in the order of |w|; the least is above `PRUNED`, those of NaN are the largest."""
    bits = jax.lax.bitcast_convert_type(weights.astype(jnp.float32), jnp.uint32) + zero
    return (bits & jnp.uint32(0x7FFFFFFF)) + 1


def signed_keys(scores: jax.Array, zero: jax.Array | int = 0) -> jax.Array:
    """uint32 in the order of fp32 scores; the least is above `PRUNED`."""
    bits = jax.lax.bitcast_convert_type(scores.astype(jnp.float32) + 0.0, jnp.uint32) + zero
    return jnp.where(bits >> 31, ~bits, bits | jnp.uint32(1 << 31))


def of_kept(keys: jax.Array, mask: jax.Array) -> jax.Array:
    """The keys, with `PRUNED` where the mask is False."""
    return jnp.where(mask, keys, PRUNED)


def smallest_of_all(
    keys: Mapping[str, Keys], filled: Mapping[str, np.ndarray], goal: Goal
) -> dict[str, jax.Array]:
    """Masks without the `goal` smallest keys of all parameters together.

    `filled`: bool [l], the rows that are layers; others stay as they are. Communicates counts.
    """

    def counts(of: Callable, zero) -> jax.Array:
        return jnp.concatenate([_count(of(key(zero)), filled[name]) for name, key in keys.items()])

    below = lambda t, zero: _total(counts(lambda key: key < t, zero))  # noqa: E731
    threshold = _largest(lambda t, zero: _at_most(below(t, zero), goal), ())
    left = _minus(goal, below(threshold, jnp.uint32(0)))
    ties_R = counts(lambda key: key == threshold, jnp.uint32(0))
    number_R = jnp.arange(ties_R.shape[0], dtype=jnp.uint32)
    before = lambda row: _total(jnp.where(number_R < row, ties_R, 0))  # noqa: E731
    last = _largest(lambda row, zero: _at_most(before(row), left), ())
    rest = _minus(left, before(last))
    of_last = (rest.high << 16) + rest.low  # fewer than the ties of one layer
    quota_R = jnp.where(number_R < last, ties_R, jnp.where(number_R == last, of_last, 0))
    found, start = {}, 0
    for name, key in keys.items():
        rows = len(filled[name])
        quota_l, threshold_l = quota_R[start : start + rows], jnp.full(rows, threshold)
        found[name], start = _without(key, filled[name], threshold_l, quota_l), start + rows
    return found


def smallest_of_each(
    keys: Mapping[str, Keys], filled: Mapping[str, np.ndarray], goals: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
    """Masks without the smallest keys of each layer of each parameter.

    `goals`: uint32 [], how many of a layer. `filled` and communication: see `smallest_of_all`.
    """

    def one(key: Keys, filled: np.ndarray, goal: jax.Array) -> jax.Array:
        def below(t_l, zero):
            made = key(zero)
            return _count(made < _along(t_l, made), filled)

        threshold_l = _largest(lambda t_l, zero: below(t_l, zero) <= goal, filled.shape)
        return _without(key, filled, threshold_l, goal - below(threshold_l, jnp.uint32(0)))

    return {name: one(key, filled[name], goals[name]) for name, key in keys.items()}


def largest_of_groups(key: jax.Array, dim: int, kept: jax.Array, size: int) -> jax.Array:
    """The mask of the `kept` largest keys in each group of `size` neighbours along `dim`; of equal
    ones the last are kept. `kept`: int []."""
    shape = key.shape
    groups = key.reshape(*shape[:dim], -1, size, *shape[dim + 1 :])
    index = jax.lax.broadcasted_iota(jnp.int32, groups.shape, dim + 1)
    larger = jnp.zeros(groups.shape, jnp.int32)
    for other in range(size):
        one = jax.lax.slice_in_dim(groups, other, other + 1, axis=dim + 1)
        larger += (one > groups) | ((one == groups) & (other > index))
    return (larger < kept).reshape(shape)


def _without(key: Keys, filled: np.ndarray, threshold_l, quota_l) -> jax.Array:
    """The mask without keys below a layer's threshold, and the first `quota_l` of those equal."""

    def ties_before(index_l, zero):
        made = key(zero)
        first = _index(made.shape, zero) < _along(index_l, made)
        return (made == _along(threshold_l, made)) & first

    first_l = _largest(
        lambda index_l, zero: _count(ties_before(index_l, zero), filled) <= quota_l, filled.shape
    )
    zero = jnp.uint32(0)
    made = key(zero)
    pruned = (made < _along(threshold_l, made)) | ties_before(first_l, zero)
    return ~(pruned & _along(jnp.asarray(filled), made))


def _largest(
    holds: Callable[[jax.Array, jax.Array], jax.Array], shape: tuple[int, ...]
) -> jax.Array:
    """The largest uint32 of which something holds, that holds of 0 and of all below it.

    `holds`: (uint32 of this shape, zero) -> bool.
    """

    def bit(number, found):
        number = number.astype(jnp.uint32)
        zero = number ^ jax.lax.optimization_barrier(number)
        higher = found | (jnp.uint32(1) << (_BITS - 1 - number))
        return jnp.where(holds(higher, zero), higher, found)

    return jax.lax.fori_loop(0, _BITS, bit, jnp.zeros(shape, jnp.uint32))


def _index(shape: tuple[int, ...], zero: jax.Array) -> jax.Array:
    """uint32 [l, ...]: the index of each number in its layer."""
    found = jnp.broadcast_to(zero, shape)
    for dim in range(1, len(shape)):
        stride = jnp.uint32(math.prod(shape[dim + 1 :]))
        found += stride * (jax.lax.broadcasted_iota(jnp.uint32, shape, dim) + zero)
    return found


def _along(values_l: jax.Array, like: jax.Array) -> jax.Array:
    return values_l.reshape(-1, *[1] * (like.ndim - 1))


def _count(found: jax.Array, filled: np.ndarray) -> jax.Array:
    """How many are True of each layer, uint32 [l]; 0 of rows that are none."""
    counts_l = jnp.sum(found, axis=tuple(range(1, found.ndim)), dtype=jnp.uint32)
    return jnp.where(filled, counts_l, 0)


def _total(counts_R: jax.Array) -> Goal:
    low = jnp.sum(counts_R & 0xFFFF, dtype=jnp.uint32)
    high = jnp.sum(counts_R >> 16, dtype=jnp.uint32)
    return Goal(high + (low >> 16), low & 0xFFFF)


def _at_most(count: Goal, limit: Goal) -> jax.Array:
    return (count.high < limit.high) | ((count.high == limit.high) & (count.low <= limit.low))


def _minus(a: Goal, b: Goal) -> Goal:
    borrow = (a.low < b.low).astype(jnp.uint32)
    return Goal(a.high - b.high - borrow, a.low + (borrow << 16) - b.low)

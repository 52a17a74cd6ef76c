"""Which weights are pruned: masks from scores, on weights that are split over a mesh.

A mask is True where a weight stays. Scores are compared as `keys`, whole numbers in the same order,
so that a threshold is found exactly: bit by bit, by counting how many keys are below. What devices
exchange are these counts, one for each layer; no weight or score leaves its device. Among equal
keys the first by position are pruned: by name of the parameter as `trees.named` has it, by layer,
then by index in the layer. So exactly as many weights are pruned as are asked for.

N:M masks (arXiv 2104.08378) keep the N largest of each M neighbours along the dimension that the
product sums over, which is what sparse matrix units multiply.

Functions take and return dicts by parameter name of arrays [l, ...], whose first dimension counts
layers, and are to be called under Auto axes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_BITS = 32
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


def magnitude_keys(weights: jax.Array) -> jax.Array:
    """uint32 in the order of |w|; the least is above `PRUNED`, those of NaN are the largest."""
    bits = jax.lax.bitcast_convert_type(jnp.abs(weights.astype(jnp.float32)), jnp.uint32)
    return bits + 1


def signed_keys(scores: jax.Array) -> jax.Array:
    """uint32 in the order of fp32 scores; the least is above `PRUNED`."""
    bits = jax.lax.bitcast_convert_type(scores.astype(jnp.float32) + 0.0, jnp.uint32)
    return jnp.where(bits >> 31, ~bits, bits | jnp.uint32(1 << 31))


def of_kept(keys: jax.Array, mask: jax.Array) -> jax.Array:
    """The keys, with `PRUNED` where the mask is False."""
    return jnp.where(mask, keys, PRUNED)


def smallest_of_all(
    keys: Mapping[str, jax.Array], filled: Mapping[str, np.ndarray], goal: Goal
) -> dict[str, jax.Array]:
    """Masks without the `goal` smallest keys of all parameters together.

    `filled`: bool [l], the rows that are layers; others stay as they are. Communicates counts.
    """
    counts = lambda below: _concatenated(keys, filled, below)  # noqa: E731
    threshold = _largest(lambda t: _at_most(_total(counts(lambda key, name: key < t)), goal), ())
    left = _minus(goal, _total(counts(lambda key, name: key < threshold)))
    ties_R = counts(lambda key, name: key == threshold)
    number_R = jnp.arange(ties_R.shape[0], dtype=jnp.uint32)
    before = lambda row: _total(jnp.where(number_R < row, ties_R, 0))  # noqa: E731
    last = _largest(lambda row: _at_most(before(row), left), ())
    rest = _minus(left, before(last))
    of_last = (rest.high << 16) + rest.low  # fewer than the ties of one layer
    quota_R = jnp.where(number_R < last, ties_R, jnp.where(number_R == last, of_last, 0))
    found, start = {}, 0
    for name, key in keys.items():
        quota_l = quota_R[start : start + key.shape[0]]
        found[name] = _without(key, filled[name], jnp.full(key.shape[0], threshold), quota_l)
        start += key.shape[0]
    return found


def smallest_of_each(
    keys: Mapping[str, jax.Array], filled: Mapping[str, np.ndarray], goals: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
    """Masks without the smallest keys of each layer of each parameter.

    `goals`: uint32 [], how many of a layer. `filled` and communication: see `smallest_of_all`.
    """
    found = {}
    for name, key in keys.items():

        def below(t_l, key=key, name=name):
            return _count(key < _along(t_l, key), filled[name])

        threshold_l = _largest(lambda t: below(t) <= goals[name], key.shape[:1])  # noqa: B023
        quota_l = goals[name] - below(threshold_l)
        found[name] = _without(key, filled[name], threshold_l, quota_l)
    return found


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


def _without(key, filled: np.ndarray, threshold_l, quota_l) -> jax.Array:
    """The mask without keys below a layer's threshold, and the first `quota_l` of those equal."""
    ties, index = key == _along(threshold_l, key), _index(key.shape)
    reached = lambda i: _count(ties & (index < _along(i, key)), filled) <= quota_l  # noqa: E731
    first_l = _largest(reached, key.shape[:1])
    pruned = (key < _along(threshold_l, key)) | (ties & (index < _along(first_l, key)))
    return ~(pruned & _along(jnp.asarray(filled), key))


def _largest(holds: Callable[[jax.Array], jax.Array], shape: tuple[int, ...]) -> jax.Array:
    """The largest uint32 of which something holds, that holds of 0 and of all below it."""

    def bit(number, found):
        higher = found | (jnp.uint32(1) << (_BITS - 1 - number).astype(jnp.uint32))
        return jnp.where(holds(higher), higher, found)

    return jax.lax.fori_loop(0, _BITS, bit, jnp.zeros(shape, jnp.uint32))


def _index(shape: tuple[int, ...]) -> jax.Array:
    """uint32 [l, ...]: the index of each number in its layer."""
    found = jnp.zeros(shape, jnp.uint32)
    for dim in range(1, len(shape)):
        stride = jnp.uint32(math.prod(shape[dim + 1 :]))
        found += stride * jax.lax.broadcasted_iota(jnp.uint32, shape, dim)
    return found


def _along(values_l: jax.Array, like: jax.Array) -> jax.Array:
    return values_l.reshape(-1, *[1] * (like.ndim - 1))


def _count(found: jax.Array, filled: np.ndarray) -> jax.Array:
    """How many are True of each layer, uint32 [l]; 0 of rows that are none."""
    counts_l = jnp.sum(found, axis=tuple(range(1, found.ndim)), dtype=jnp.uint32)
    return jnp.where(filled, counts_l, 0)


def _concatenated(keys, filled, below: Callable) -> jax.Array:
    """Counts of the layers of all parameters, uint32 [R]."""
    return jnp.concatenate([_count(below(key, name), filled[name]) for name, key in keys.items()])


def _total(counts_R: jax.Array) -> Goal:
    low = jnp.sum(counts_R & 0xFFFF, dtype=jnp.uint32)
    high = jnp.sum(counts_R >> 16, dtype=jnp.uint32)
    return Goal(high + (low >> 16), low & 0xFFFF)


def _at_most(count: Goal, limit: Goal) -> jax.Array:
    return (count.high < limit.high) | ((count.high == limit.high) & (count.low <= limit.low))


def _minus(a: Goal, b: Goal) -> Goal:
    borrow = (a.low < b.low).astype(jnp.uint32)
    return Goal(a.high - b.high - borrow, a.low + (borrow << 16) - b.low)

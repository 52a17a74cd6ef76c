"""Layers one after the other: scanned by the period of their kinds, and in segments.

A layer is a function (x, arrays) -> (x, cache). `stacked` has the arrays of several layers,
[l, ...] each.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from llmx import sharding
from llmx.model import remat


def scan_layers(
    layer_of: Callable[..., Callable], kinds: tuple[str, ...] | Array, x: Any, weights: Any,
    others: Any, *, names: Sequence[str], rules: Sequence[remat.Rule],
    offloaded: Sequence[str] = (), row: Array | None = None, first: int = 0,
    around: Callable[[Callable], Callable] = lambda layer: layer,
) -> tuple[Any, Any]:  # fmt: skip
    """x after l layers, and their stacked caches.

    Layers are scanned in the shortest period of their kinds, then what is left of a period; inside
    it neighbours of one kind are a scan: the program holds equal neighbours once.

    Args:
      layer_of: (one of `names`, whether it is checkpointed, a stack) -> a layer of that kind. It
        takes (weights, others) of one layer; with a stack, of which it takes them itself, its index
        in the place of the weights.
      kinds: of the layers; or int32 [l], indices into `names`, if they are known at run time only:
        -1 is no layer.
      weights: of the layers, [l, ...] each; or of more, if `row` is the row of the first.
      others: of the layers, [l, ...] each.
      rules: which policy a layer has; `offloaded`: see `remat.checkpointed`.
      first: the number of the first layer, by which `rules` count.
      around: makes of a checkpointed layer what stands in its place: goes through it several times.
    """
    caches, num = [], len(kinds)
    for start, end, policy_of in remat.series(rules, num, first):
        policies = {kind: policy_of(kind) for kind in names}
        whole, part, others_of = (start, end) == (0, num), kinds, others
        if not whole:
            part, others_of = kinds[start:end], _rows(others, start, end)
        recomputed = all(policy.saved is not None for policy in policies.values())
        stack, rows = None, weights
        if row is not None or not (whole and _in_one_loop(kinds, policies[names[0]])):
            # A loop over a part of the weights would take a copy of them, and a loop inside a loop
            # over periods would save what it goes over: a copy, too.
            stack, rows = weights, jnp.arange(start, end, dtype=jnp.int32)
        layer = functools.partial(layer_of, recomputed=recomputed, stack=stack)
        x, cache = _scan(layer, part, x, (rows, others_of), policies, offloaded, around)
        caches.append(cache)
    return x, _concatenated(*caches)


def _in_one_loop(kinds: tuple[str, ...] | Array, policy: remat.Policy) -> bool:
    """Whether one loop goes over all layers: they are of one kind, and all in whole segments, which
    save nothing of what is inside them."""
    if remat.period_of(kinds) > 1:
        return False
    return len(kinds) % remat.segment_size(policy, len(kinds)) == 0


def _scan(
    layer_of, kinds, x, stacked, policies: dict[str, remat.Policy], offloaded, around: Callable
):
    """`scan_layers` where one rule holds for the layers of each kind."""
    num, period = len(kinds), remat.period_of(kinds)
    if isinstance(kinds, tuple):
        checkpointed = {
            kind: around(remat.checkpointed(layer_of(kind), policy, offloaded))
            for kind, policy in policies.items()
        }
        scan = functools.partial(_scan_periods, checkpointed, kinds[:period])
    else:
        layer = _any_of([layer_of(kind) for kind in policies])
        layer = remat.checkpointed(layer, remat.union(policies.values()), offloaded)
        layer = _of_kind(layer, around)
        scan, stacked = functools.partial(jax.lax.scan, _unless_empty(layer)), (kinds, stacked)
    policy = next(iter(policies.values()))
    size = remat.segment_size(policy, num, period)
    if size == 1:
        return scan(x, stacked)
    segment, end = remat.checkpointed_segment(scan, offloaded), num // size * size
    caches = []
    if end:
        groups = _regrouped(stacked, end, size)
        x, cache = jax.lax.scan(segment, x, groups)
        caches.append(_joined(cache))
    if end < num:
        x, cache = segment(x, _rows(stacked, end))
        caches.append(cache)
    return x, _concatenated(*caches)


def _any_of(layers: Sequence[Callable]) -> Callable:
    """A layer whose kind is known at run time: a number, beside its arrays. Of -1, no layer, it is
    the last kind: a local layer, where there are some, takes least.

    It is checkpointed as a whole: a conditional inside out would save the weights that it read.
    """
    if len(layers) == 1:
        return lambda x, row: layers[0](x, row[1])
    kind = lambda number: jnp.where(number < 0, len(layers) - 1, number)  # noqa: E731
    return lambda x, row: jax.lax.switch(kind(row[0]), layers, x, row[1])


def _of_kind(layer: Callable, around: Callable) -> Callable:
    """`around` of a layer whose kind is beside its arrays."""
    return lambda x, row: around(lambda x, arrays: layer(x, (row[0], arrays)))(x, row[1])


def _unless_empty(layer: Callable) -> Callable:
    """`layer`, whose result is x where its kind is -1.

    It computes there too: in a pipeline the other stages have a layer at the same time.
    """

    def masked(x, row):
        out, cache = layer(x, row)
        return jax.tree.map(lambda new, old: jnp.where(row[0] < 0, old, new), out, x), cache

    return masked


def _scan_periods(layers: dict[str, Callable], period: tuple[str, ...], x, stacked):
    """x after layers whose kinds repeat `period`, and their stacked second results."""
    num, size = jax.tree.leaves(stacked)[0].shape[0], len(period)
    if size == 1:
        return jax.lax.scan(layers[period[0]], x, stacked)
    end = num // size * size
    x, caches = jax.lax.scan(
        functools.partial(_scan_series, layers, period), x, _regrouped(stacked, end, size)
    )
    caches = _joined(caches)
    if end < num:
        x, last = _scan_series(layers, period[: num - end], x, _rows(stacked, end))
        caches = _concatenated(caches, last)
    return x, caches


def _scan_series(layers: dict[str, Callable], kinds: tuple[str, ...], x, stacked):
    """`_scan_periods` for one period: a scan for each series of neighbours of one kind."""
    caches, first = [], 0
    for kind, series in itertools.groupby(kinds):
        end = first + len(list(series))
        x, cache = jax.lax.scan(layers[kind], x, _rows(stacked, first, end))
        caches.append(cache)
        first = end
    return x, _concatenated(*caches)


def _rows(tree, first: int, end: int | None = None):
    return jax.tree.map(lambda array: array[first:end], tree)


def _regrouped(tree, end: int, size: int):
    def one(array):
        differentiated = jnp.issubdtype(array.dtype, jnp.floating)
        return (_regroup if differentiated else sharding.regrouped)(array[:end], size)

    return jax.tree.map(one, tree)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _regroup(array: Array, size: int) -> Array:
    return sharding.regrouped(array, size)


def _ungroup(size: int, _, gradient: Array) -> tuple[Array]:
    """Behind a barrier: XLA would move what follows before the change of shape, and keep it."""
    to = jax.typeof(gradient).sharding.spec
    whole = jnp.reshape(
        gradient, (-1, *gradient.shape[2:]),
        out_sharding=sharding.split_as(to, *to.partitions[1:]),
    )  # fmt: skip
    return (jax.lax.optimization_barrier(whole),)


_regroup.defvjp(lambda array, size: (_regroup(array, size), None), _ungroup)


def _joined(tree):
    return jax.tree.map(lambda array: array.reshape(-1, *array.shape[2:]), tree)


def _concatenated(*trees):
    if len(trees) == 1:
        return trees[0]
    return jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *trees)

"""Local views: arrays that differ along a mesh axis which their types do not name.

The stages of a pipeline do different things at the same time. On explicit axes a program says so
by a local axis `stage`: arrays that differ along it have types as if they were whole. Products,
gathers and sums over other axes then stay within a stage, a conditional takes the branch of its
stage's predicate, and only manual regions communicate between stages. So it is with replicas.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from llmx.sharding import specs


def leading(axes: tuple[str, ...], to: PartitionSpec) -> PartitionSpec:
    """`to` with a new first dimension, split over `axes`."""
    return PartitionSpec(axes, *to.partitions)


def _relabel(mesh: Mesh, array: jax.Array, in_specs, out_specs) -> jax.Array:
    """The same data on each device, under another type."""
    region = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
    return region(lambda local: local, in_specs=in_specs, out_specs=out_specs)(array)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def to_local(mesh: Mesh, axes: tuple[str, ...], array: jax.Array) -> jax.Array:
    """[n * ways, ...], split over the `ways` devices of `axes`, as a local view [n, ...].

    Each device keeps its own part: neither this nor its gradient (`from_local`) communicates.
    """
    rest = jax.typeof(array).sharding.spec.partitions[1:]
    return _relabel(mesh, array, PartitionSpec(axes, *rest), PartitionSpec(None, *rest))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def from_local(mesh: Mesh, axes: tuple[str, ...], array: jax.Array) -> jax.Array:
    """The reverse of `to_local`: a local view [n, ...] as [n * ways, ...] split over `axes`."""
    to = jax.typeof(array).sharding.spec
    return _relabel(mesh, array, to, PartitionSpec(axes, *to.partitions[1:]))


def local_part(mesh: Mesh, axes: tuple[str, ...], array: jax.Array) -> jax.Array:
    """Each device's part of an array that `axes` split, in any dimensions; not differentiable."""
    to = jax.typeof(array).sharding.spec
    return _relabel(mesh, array, to, specs.without(to, axes))


def manual(
    mesh: Mesh, axes: tuple[str, ...], function: Callable, *, in_specs: Any, out_specs: Any
) -> Callable:
    """`jax.shard_map` of `function`, whose arrays are local views along `axes`, if there are any.

    Differentiable: the gradient of an input is a sum over the axes along which it is whole, local
    ones apart.
    """
    region = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
    if not axes:
        return region(function, in_specs=in_specs, out_specs=out_specs)
    split = functools.partial(jax.tree.map, functools.partial(leading, axes))
    whole = lambda array: from_local(mesh, axes, array[None])  # noqa: E731

    def local(*arrays):
        out = function(*jax.tree.map(lambda array: array[0], arrays))
        return jax.tree.map(lambda array: array[None], out)

    inner = region(local, in_specs=split(in_specs), out_specs=split(out_specs))
    return lambda *arrays: jax.tree.map(
        lambda array: to_local(mesh, axes, array)[0], inner(*jax.tree.map(whole, arrays))
    )


to_local.defvjp(
    lambda mesh, axes, array: (to_local(mesh, axes, array), None),
    lambda mesh, axes, _, gradient: (from_local(mesh, axes, gradient),),
)
from_local.defvjp(
    lambda mesh, axes, array: (from_local(mesh, axes, array), None),
    lambda mesh, axes, _, gradient: (to_local(mesh, axes, gradient),),
)

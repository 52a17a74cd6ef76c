"""PartitionSpecs: what their entries say, and sums over devices that are not done yet.

On explicit axes a type can say that each device holds one term of a sum over some mesh axes
(`unreduced`), and that an array's gradient will be such a sum (`reduced`). So each sum is done once
and at a chosen time: in the layer, or after the last microbatch.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

# What stands in a PartitionSpec for one dimension.
Entry = str | tuple[str, ...] | None


def mesh_axes(entry: Entry) -> tuple[str, ...]:
    """The mesh axes in one entry of a PartitionSpec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def used_axes(to: PartitionSpec) -> tuple[str, ...]:
    """The mesh axes that split some dimension of `to`."""
    return tuple(axis for entry in to.partitions for axis in mesh_axes(entry))


def ways(mesh: Mesh, entry: Entry) -> int:
    """The number of parts into which one entry of a PartitionSpec splits."""
    return math.prod(mesh.shape[axis] for axis in mesh_axes(entry))


def without(to: PartitionSpec, axes: Sequence[str]) -> PartitionSpec:
    """`to` with these mesh axes removed: what a parameter looks like gathered over them."""
    rest = [tuple(a for a in mesh_axes(entry) if a not in axes) for entry in to.partitions]
    return PartitionSpec(*rest)


def unreduced(to: PartitionSpec, axes: Sequence[str]) -> PartitionSpec:
    """`to` for an array of which each device along `axes` holds one term of a sum."""
    return PartitionSpec(*to.partitions, unreduced=frozenset(axes))


def reduced(to: PartitionSpec, axes: Sequence[str]) -> PartitionSpec:
    """`to` for an array whose gradient is `unreduced(to, axes)`; the same arrays on the devices."""
    return PartitionSpec(*to.partitions, reduced=frozenset(axes))


def split_as(to: PartitionSpec, *entries: Entry) -> PartitionSpec:
    """Other entries, with the unreduced and reduced axes of `to`."""
    return PartitionSpec(*entries, unreduced=to.unreduced, reduced=to.reduced)


def split_only(to: PartitionSpec) -> PartitionSpec:
    """`to` without its unreduced and reduced axes."""
    return PartitionSpec(*to.partitions)


def constrain(array: jax.Array, mesh: Mesh, to: PartitionSpec) -> jax.Array:
    """`array` with sharding `to`: a reshard on Explicit axes, a compiler hint on Auto ones."""
    explicit = all(kind == AxisType.Explicit for kind in mesh.axis_types)
    place = jax.sharding.reshard if explicit else jax.lax.with_sharding_constraint
    return place(array, NamedSharding(mesh, to))


def regrouped(stacked: jax.Array, size: int) -> jax.Array:
    """[num * size, ...] as [num, size, ...], the other dimensions split as they were."""
    to = jax.typeof(stacked).sharding.spec
    shape = (stacked.shape[0] // size, size, *stacked.shape[1:])
    return jnp.reshape(stacked, shape, out_sharding=split_as(to, None, *to.partitions))


def device_bytes(tree: Any) -> int:
    """Bytes that each device holds of the arrays of `tree`, or of shapes with shardings."""
    shards = [(leaf.sharding.shard_shape(leaf.shape), leaf.dtype) for leaf in jax.tree.leaves(tree)]
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shards)

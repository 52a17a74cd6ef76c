"""Local views: arrays that differ along a mesh axis which their types do not name."""

import functools

import jax
from jax.sharding import Mesh, PartitionSpec

from llmx.sharding import specs

# ------------------------------------------------------------------------------------- hidden axes
#
# Stages of a pipeline do different things at one time: this one a forward pass, that one a backward
# pass, or nothing. A program of explicit axes can say that if the axis `stage` is hidden: arrays
# that differ from stage to stage have types that do not name it, as if they were whole along it.
# Products, gathers and sums over the other axes then stay within a stage, and a conditional takes
# the branch that its stage's predicate says. Between stages only manual regions communicate.


def shown(axes: tuple[str, ...], to: PartitionSpec) -> PartitionSpec:
    return PartitionSpec(axes[0] if len(axes) == 1 else axes, *to.partitions)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def to_local(mesh: Mesh, axes: tuple[str, ...], array: jax.Array) -> jax.Array:
    """[n * ways, ...] split over `axes`, as [n, ...] of which each device keeps its own."""
    to = jax.typeof(array).sharding.spec
    rest = PartitionSpec(None, *to.partitions[1:])
    return jax.shard_map(
        lambda local: local, mesh=mesh, in_specs=shown(axes, PartitionSpec(*to.partitions[1:])),
        out_specs=rest, check_vma=False,
    )(array)  # fmt: skip


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def from_local(mesh: Mesh, axes: tuple[str, ...], array: jax.Array) -> jax.Array:
    """The reverse of `to_local`."""
    to = jax.typeof(array).sharding.spec
    return jax.shard_map(
        lambda local: local, mesh=mesh, in_specs=to,
        out_specs=shown(axes, PartitionSpec(*to.partitions[1:])), check_vma=False,
    )(array)  # fmt: skip


def local_part(mesh: Mesh, axes: tuple[str, ...], array: jax.Array) -> jax.Array:
    """Each device's part along `axes` of an array that they split, as an array of its own."""
    to = jax.typeof(array).sharding.spec
    return jax.shard_map(
        lambda local: local,
        mesh=mesh,
        in_specs=to,
        out_specs=specs.without(to, axes),
        check_vma=False,
    )(array)


to_local.defvjp(
    lambda mesh, axes, array: (to_local(mesh, axes, array), None),
    lambda mesh, axes, _, gradient: (from_local(mesh, axes, gradient),),
)
from_local.defvjp(
    lambda mesh, axes, array: (from_local(mesh, axes, array), None),
    lambda mesh, axes, _, gradient: (to_local(mesh, axes, gradient),),
)

"""Sums over devices of which each keeps a part: reduce-scatters, by the compiler or by exchange.

The compilers of some TPUs turn a reduce-scatter over all devices of a slice into an all-reduce, of
which each device keeps its part: twice the bytes. Over a part of a slice it stays what it is, but
nothing runs beside it. There each device instead sends every other one its part of the terms (an
all-to-all, which runs beside computation) and adds up, in fp32, what it receives: the bytes of one
reduce-scatter. docs/performance.md has both, compiled.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec

from llmx.sharding import specs

# Device kinds on which sums are exchanged, and on how many devices at most: in larger slices of v5e
# all-to-alls are not asynchronous ("not supported on limited ICI", libtpu 0.0.42.1 and 0.0.50.1).
EXCHANGING = {"TPU v4": math.inf, "TPU v5 lite": 16, "TPU v5e": 16}
# Terms that are added in one operation; more devices exchange in several steps.
MOST_TERMS = 16


def psum_scatter(
    array: jax.Array, axes: Sequence[str], *, dimension: int, exchange: bool = True
) -> jax.Array:
    """`array` summed over mesh axes; each device keeps its part of `dimension`. In manual regions.

    Args:
      axes: of the mesh, outermost first: a device's number along them is that of its part.
      dimension: its size is a multiple of the number of devices along `axes`.
      exchange: on chips of `EXCHANGING`, by all-to-alls. False: by reduce-scatters on every chip.

    Communicates over `axes`.
    """
    if not exchange or not _exchanging(jax.sharding.get_abstract_mesh()):
        return _reduce_scatter(array, tuple(axes), dimension)
    for axis in axes:
        stride = jax.lax.axis_size(axis)
        for size in steps_of(stride):
            stride //= size
            array = _exchanged(array, axis, dimension, size, stride)
    return array


def _reduce_scatter(array: jax.Array, axes: tuple[str, ...], dimension: int) -> jax.Array:
    """jax's `psum_scatter`, of an array without leading dimensions of size 1.

    With them XLA:TPU makes an all-reduce of it, and a slice (libtpu 0.0.42.1).
    """
    ones = next(n for n in range(dimension + 1) if n == dimension or array.shape[n] > 1)
    rest = array.reshape(array.shape[ones:])
    part = jax.lax.psum_scatter(rest, axes, scatter_dimension=dimension - ones, tiled=True)
    return part.reshape(*array.shape[:ones], *part.shape)


def _exchanging(mesh: AbstractMesh) -> bool:
    device = mesh.abstract_device
    return device is not None and exchanges(device.device_kind, mesh.size)


def exchanges(device_kind: str, num_devices: int) -> bool:
    """Whether sums of which each device keeps a part are exchanged on these devices."""
    return num_devices <= EXCHANGING.get(device_kind, 0)


def is_summed(device_kind: str, num_devices: int) -> bool:
    """Whether the compiler makes all-reduces of reduce-scatters over all devices of a slice, which
    are not exchanged."""
    return device_kind in EXCHANGING and not exchanges(device_kind, num_devices)


def steps_of(n: int) -> tuple[int, ...]:
    """Factors of n, outermost first, each at most MOST_TERMS if n has such factors."""
    if n <= MOST_TERMS:
        return (n,) if n > 1 else ()
    outer = max(size for size in range(1, math.isqrt(n) + 1) if n % size == 0)
    return (n,) if outer == 1 else (*steps_of(outer), *steps_of(n // outer))


def _exchanged(array, axis: str, dimension: int, size: int, stride: int) -> jax.Array:
    """`psum_scatter` within groups of `size` devices of a mesh axis, `stride` apart."""
    devices = range(jax.lax.axis_size(axis))
    groups = [
        [first + stride * digit for digit in range(size)]
        for first in devices if first // stride % size == 0
    ]  # fmt: skip
    shape = list(array.shape)
    shape[dimension : dimension + 1] = size, shape[dimension] // size
    with jax.named_scope("psum_scatter"):  # in profiles and reports
        terms = jax.lax.all_to_all(
            array.reshape(shape), axis, split_axis=dimension, concat_axis=0,
            axis_index_groups=None if len(groups) == 1 else groups,
        )  # fmt: skip
    # Written out: XLA makes one addition of it, and a slow reduction of `sum`.
    exact = jnp.promote_types(array.dtype, jnp.float32)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        exact = array.dtype
    total = functools.reduce(jnp.add, [term.astype(exact) for term in terms])
    return total.astype(array.dtype)


def scattered(terms: jax.Array, to: PartitionSpec, *, exchange: bool = True) -> jax.Array:
    """`terms`, of a sum over mesh axes, summed and placed as `to`.

    `exchange`: by `psum_scatter` above, where the chip is one of `EXCHANGING`, else left to the
    compiler; False: by jax's own on every chip. A sum over further axes is taken after it: left to
    the compiler, it may be an all-reduce over all of them.

    Communicates over the axes of which `terms` are and `to` is not `unreduced`: reduce-scatters
    over those that split a dimension of `to`, and all-reduces over the others.
    """
    kind = jax.typeof(terms).sharding
    entries, split = list(kind.spec.partitions), {}
    left = set(kind.spec.unreduced) - set(to.unreduced)
    for dimension, after in enumerate(map(specs.mesh_axes, to.partitions)):
        before = specs.mesh_axes(entries[dimension])
        axes = after[len(before) :]
        if axes and after[: len(before)] == before and left.issuperset(axes):
            entries[dimension], split[dimension] = after, axes
            left -= set(axes)
    if split and (left or not exchange or _exchanging(kind.mesh)):
        local = functools.partial(_scattered_local, split=split, exchange=exchange)
        done = specs.unreduced(PartitionSpec(*entries), left | set(to.unreduced))
        terms = jax.shard_map(
            local, mesh=kind.mesh, in_specs=kind.spec, out_specs=done, check_vma=False
        )(terms)
    return jax.sharding.reshard(terms, to)


def _scattered_local(array: jax.Array, split: dict[int, tuple], exchange: bool) -> jax.Array:
    for dimension, axes in split.items():
        array = psum_scatter(array, axes, dimension=dimension, exchange=exchange)
    return array

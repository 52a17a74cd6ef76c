"""Layers moved between devices, from the layer permutation of a saved run to that of its reader."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from llmx.checkpoint import checksums
from llmx.pipeline.permutation import LayerPermutation, take_rows


def stored(wanted: Mapping[str, Any], *, order: LayerPermutation, saved: LayerPermutation) -> dict:
    """{name: abstract array} in the permutation `saved`, of arrays that are wanted in `order`."""
    arrays = dict(wanted)
    for name, leaf in wanted.items():
        if order.moves(name, leaf.shape, saved):
            shape = order.shape(leaf.shape, saved)
            to = None if leaf.sharding is None else spread(leaf.sharding, shape)
            arrays[name] = jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=to)
    return arrays


def move(arrays: dict, wanted: Mapping, *, order: LayerPermutation, saved: LayerPermutation):
    """Converts `arrays` from the permutation `saved` to `order`, placed as `wanted`, in place.

    Bit for bit; empty slots become zero; arrays that do not move are not copied. Communicates over
    the mesh axes that split the layers.
    """
    for name, leaf in wanted.items():
        if order.moves(name, leaf.shape, saved):
            to = leaf.sharding or arrays[name].sharding
            # One at a time: no device holds more than one of them twice.
            array = checksums.onto_device(arrays.pop(name))
            array = _moved(array, saved.rows(order), to.with_memory_kind(None))
            arrays[name] = jax.block_until_ready(jax.device_put(array, to))


def spread(to: Sharding, shape: Sequence[int]) -> Sharding:
    """`to` for an array with another number of rows, `shape`: split as often, where it divides.

    Mesh axes that do not divide the rows go to the first other dimension that they divide, so that
    no device has to hold more; if there is none, the array is not split over them.
    """
    if not isinstance(to, NamedSharding):
        return to
    axes = [(e,) if isinstance(e, str) else tuple(e or ()) for e in to.spec]
    axes += [()] * (len(shape) - len(axes))
    ways = [math.prod(to.mesh.shape[axis] for axis in over) for over in axes]
    if shape[0] % ways[0] == 0:
        return to
    of_rows, axes[0] = axes[0], ()
    for dim in range(1, len(shape)):
        if shape[dim] % (ways[dim] * ways[0]) == 0:
            axes[dim] += of_rows
            break
    return to.update(spec=PartitionSpec(*(over or None for over in axes)))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _moved(array: jax.Array, rows: tuple[int, ...], to: Sharding) -> jax.Array:
    take = lambda array: take_rows(array, rows)  # noqa: E731
    if isinstance(to, NamedSharding):
        # The compiler finds the way from device to device.
        take = jax.sharding.auto_axes(take, out_sharding=to)
    return take(array)

"""Layers on their way from the order of one pipeline to that of another, or to none.

Stages hold the layers of a model in an order that follows from their schedule, perhaps with empty
places between them (`parts`). A checkpoint has them as they were, with that order beside them, and
whoever reads it has an order of its own: here are shapes and shardings of what is stored, and the
move on the devices.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from llmx.checkpoint import checksums
from llmx.pipeline import stages
from llmx.pipeline.stages import EMPTY, Order

LAYERS = "blocks"  # arrays whose path has this name have a row for each place
APART = "sync"  # but not those of replicas, which are moved by `llmx.checkpoint.resume`


def has_layers(name: str, shape: Sequence[int], order: Order) -> bool:
    """Whether an array has a row for each place of `order`; factored moments may have none."""
    if name.startswith(f"{APART}/"):
        return False
    return LAYERS in name.split("/") and len(shape) > 0 and shape[0] == len(order)


def plain_shape(name: str, shape: Sequence[int], order: Order) -> list[int]:
    """The shape that an array in `order` has with the layers in the model's order."""
    return [_num_layers(order), *shape[1:]] if has_layers(name, shape, order) else list(shape)


def stored(wanted: Mapping[str, Any], *, order: Order, saved: Order) -> dict[str, Any]:
    """{name: abstract array} in the order `saved`, where they are wanted in `order`."""
    found = dict(wanted)
    for name in _moving(wanted, order=order, saved=saved):
        leaf = wanted[name]
        shape = (len(_rows(order, saved)), *leaf.shape[1:])
        to = None if leaf.sharding is None else spread(leaf.sharding, shape)
        found[name] = jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=to)
    return found


def move(arrays: dict[str, jax.Array], wanted: Mapping[str, Any], *, order: Order, saved: Order):
    """Brings `arrays` from the order `saved` into `order`, placed as they are wanted, in place.

    Bit for bit; empty places are zero; nothing is copied where the orders are equal. Communicates
    over the mesh axes that split the layers.
    """
    for name in _moving(wanted, order=order, saved=saved):
        to = wanted[name].sharding or arrays[name].sharding
        # One after the other: no device holds more than one of them twice.
        array = checksums.onto_device(arrays.pop(name))
        array = _moved(array, _rows(saved, order), to.with_memory_kind(None))
        arrays[name] = jax.block_until_ready(jax.device_put(array, to))


def ordered(name: str, array: jax.Array, *, order: Order, saved: Order) -> jax.Array:
    """`array`, in the order `saved`, in `order`; for use in a program."""
    if order == saved or not has_layers(name, array.shape, saved or range(_num_layers(order))):
        return array
    return stages.taken(array, np.array(_rows(saved, order)))


def spread(to: Sharding, shape: Sequence[int]) -> Sharding:
    """`to` for an array with another number of rows, `shape`: split as often, where it divides.

    Mesh axes that the rows do not divide over go to another dimension that does, so that no device
    has to hold more; to none where there is no such dimension.
    """
    if not isinstance(to, NamedSharding):
        return to
    axes = [(e,) if isinstance(e, str) else tuple(e or ()) for e in to.spec]
    axes += [()] * (len(shape) - len(axes))
    ways = [int(np.prod([to.mesh.shape[axis] for axis in over])) for over in axes]
    if shape[0] % ways[0] == 0:
        return to
    of_rows, axes[0] = axes[0], ()
    for dim in range(1, len(shape)):
        if shape[dim] % (ways[dim] * ways[0]) == 0:
            axes[dim] += of_rows
            break
    return to.update(spec=PartitionSpec(*(over or None for over in axes)))


def _num_layers(order: Order) -> int:
    return max(order) + 1


def _moving(wanted: Mapping[str, Any], *, order: Order, saved: Order) -> list[str]:
    """The arrays that have their layers in another order than they are wanted in."""
    if order == saved:
        return []
    places = order or tuple(range(_num_layers(saved)))
    return [name for name, leaf in wanted.items() if has_layers(name, leaf.shape, places)]


def _rows(order: Order, wanted: Order) -> tuple[int, ...]:
    """For each place of `wanted`, the place of `order` that has its layer, or EMPTY."""
    plain = tuple(range(_num_layers(order or wanted)))
    place_of = {layer: place for place, layer in enumerate(order or plain) if layer != EMPTY}
    return tuple(EMPTY if layer == EMPTY else place_of[layer] for layer in wanted or plain)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _moved(array: jax.Array, rows: tuple[int, ...], to: Sharding) -> jax.Array:
    take = lambda array: stages.taken(array, np.array(rows))  # noqa: E731
    if isinstance(to, NamedSharding):
        # The compiler finds the way from device to device.
        take = jax.sharding.auto_axes(take, out_sharding=to)
    return take(array)

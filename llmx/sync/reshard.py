"""A strategy's state for another number of replicas, or for replicas that are split otherwise.

The sum of all residuals of a parameter, of replicas and of servers, is kept. As many replicas keep
their own; among another number the sum is split evenly. Replicas with parameters of their own begin
again at the mean of the old ones'.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from llmx import sharding
from llmx.sync.compressors import Residuals


@dataclasses.dataclass(frozen=True)
class Layers:
    """How the layers lay in what was saved.

    shapes: of the parameters, by name, as they were.
    ordered: (name, array of a parameter's shape) -> its layers in the new order.
    """

    shapes: Mapping[str, Sequence[int]]
    ordered: Callable[[str, jax.Array], jax.Array] = lambda name, array: array


def zeros(abstract: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract)


def residuals(saved: Residuals, wanted: Residuals, layers: Layers) -> Residuals:
    """Residuals whose sum is as saved; a compressor's `queries` begin anew.

    As many replicas keep their own, however each is split. What servers keep is of the sum, and
    goes to the servers of the same numbers.
    """
    errors = of_replicas(saved.errors, wanted.errors, layers)
    server = {name: jnp.zeros(like.shape, like.dtype) for name, like in wanted.server.items()}
    for name, kept in saved.server.items():
        total = layers.ordered(name, whole(kept, layers.shapes[name]))
        if name in server:
            server[name] = in_parts(total, server[name].shape)
        elif name in errors:
            errors[name] = errors[name] + total / errors[name].shape[0]
    return Residuals(errors, server, zeros(wanted.queries))


def of_replicas(
    saved: Mapping[str, jax.Array], wanted: Mapping[str, Any], layers: Layers
) -> dict[str, jax.Array]:
    """Terms of a sum over replicas, [n, ...] by name: as they are for as many, else the sum split
    evenly among the new ones."""
    found = {}
    for name, like in wanted.items():
        terms = jax.vmap(lambda term, name=name: layers.ordered(name, term))(saved[name])
        if terms.shape[0] != like.shape[0]:
            terms = jnp.broadcast_to(terms.sum(0) / like.shape[0], like.shape)
        found[name] = terms.astype(like.dtype)
    return found


def averaged(saved: Any, wanted: Any, layers: Layers) -> Any:
    """The mean over old replicas of a tree [n, ...], for each of the new ones."""

    def one(path, old, like):
        mean = old.astype(jnp.float32).mean(0).astype(like.dtype)
        return jnp.broadcast_to(layers.ordered(sharding.path_name(path), mean), like.shape)

    return jax.tree_util.tree_map_with_path(one, saved, wanted)


def placed(saved: dict[str, jax.Array], layers: Layers) -> dict[str, jax.Array]:
    """Arrays in the parameters' shapes, by name, with their layers in the new order."""
    return {name: layers.ordered(name, array) for name, array in saved.items()}


def as_saved(wanted: Any, shapes: Mapping[str, Sequence[int]]) -> Any:
    """A strategy's state in the shapes in which it was saved, split as far as they divide.

    `shapes`: of what was saved, by name.
    """

    def one(path, leaf):
        shape = tuple(shapes.get(sharding.path_name(path), leaf.shape))
        if len(shape) != len(leaf.shape):
            return leaf  # of another structure, which the restore reports
        to = leaf.sharding
        entries = [
            None if dim % sharding.ways(to.mesh, entry) else entry
            for dim, entry in zip(shape, to.spec.partitions, strict=False)
        ]
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=to.update(spec=jax.P(*entries)))

    return jax.tree_util.tree_map_with_path(one, wanted)


def whole(server: jax.Array, shape: Sequence[int]) -> jax.Array:
    """What servers keep of a parameter, [n, L, parts..., Q], in the parameter's shape."""
    n, rows, *parts, q = server.shape
    dims = shape[len(shape) - len(parts) :]
    sizes = [dim // part for dim, part in zip(dims, parts, strict=True)]
    length = math.prod(sizes)
    flat = jnp.moveaxis(server, 0, -2).reshape(rows, *parts, n * q)[..., :length]
    blocks = flat.reshape(rows, *parts, *sizes)
    count = len(parts)
    order = [0, *(1 + i + j * count for i in range(count) for j in range(2))]
    return blocks.transpose(order).reshape(shape)


def in_parts(total: jax.Array, shape: Sequence[int]) -> jax.Array:
    """The reverse of `whole`: an array in the parameter's shape as servers keep it, `shape`."""
    n, rows, *parts, q = shape
    dims = total.shape[total.ndim - len(parts) :]
    split = [size for dim, part in zip(dims, parts, strict=True) for size in (part, dim // part)]
    count = len(parts)
    order = [0, *range(1, 2 * count, 2), *range(2, 2 * count + 1, 2)]
    flat = total.reshape(rows, *split).transpose(order).reshape(rows, *parts, -1)
    padded = jnp.pad(flat, [(0, 0)] * (1 + count) + [(0, n * q - flat.shape[-1])])
    return jnp.moveaxis(padded.reshape(rows, *parts, n, q), -2, 0)

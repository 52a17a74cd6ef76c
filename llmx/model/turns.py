"""Groups of a device's rows that take turns in a layer: one computes while another communicates.

With tensor parallelism every product of a layer waits for its input, gathered over `tensor`, and
its output is scattered before the layer goes on: nothing else of these rows can run meanwhile. The
rows of the batch do not depend on each other. So a layer is written once for each group of them,
and the compiler's scheduler runs the products of one beside the collectives of another.

Weights are gathered once for all groups; without remat, which would keep them, by each. Their
gradients are reduce-scattered by each group, and the shares are added up: to add up whole gradients
first would take longer than what it saves in traffic.

Source: two batches in turns, DeepSeek-V3 (arXiv 2412.19437), section 3.2, there for experts.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array

from llmx import sharding


def number(wanted: int, array: Array) -> int:
    """The most groups, up to a divisor of `wanted`, into which each device's rows divide."""
    kind = jax.typeof(array).sharding
    axes = sharding.mesh_axes(kind.spec[0])
    return math.gcd(wanted, array.shape[0] // math.prod(kind.mesh.shape[axis] for axis in axes))


def split(tree: Any, groups: int) -> list[Any]:
    """A tree of arrays [B, ...] as `groups` trees of arrays [B / groups, ...].

    Each device divides the rows that it holds. Communicates nothing, nor does its gradient.
    """
    if groups == 1:
        return [tree]
    leaves, structure = jax.tree.flatten(tree)
    parts = [_split(groups, leaf) for leaf in leaves]
    return [jax.tree.unflatten(structure, part) for part in zip(*parts, strict=True)]


def join(parts: list[Array]) -> Array:
    """The reverse of `split` for one array."""
    return parts[0] if len(parts) == 1 else _join(tuple(parts))


def shared(buffers: Any, groups: int) -> list[Any]:
    """Gradient buffers once for each group; what the groups put into them is added up."""
    if groups == 1:
        return [buffers]
    leaves, structure = jax.tree.flatten(buffers)
    copies = zip(*[_shared(groups, leaf) for leaf in leaves], strict=True) if leaves else ()
    return [jax.tree.unflatten(structure, one) for one in copies or [()] * groups]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _shared(groups: int, buffer: Array) -> tuple[Array, ...]:
    return (buffer,) * groups


def _summed(groups: int, _, gradients: tuple[Array, ...]) -> tuple[Array]:
    """In fp32, so that XLA leaves the sum where it is: after it, whole gradients would be added."""
    total = functools.reduce(jnp.add, (one.astype(jnp.float32) for one in gradients))
    return (total.astype(gradients[0].dtype),)


_shared.defvjp(lambda groups, buffer: (_shared(groups, buffer), None), _summed)


def _region(function, kind: NamedSharding):
    mesh, spec = kind.mesh, sharding.split_only(kind.spec)
    return jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)


# Their gradients are each other's: automatic differentiation of a manual region would add up those
# of devices that hold the same rows.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _split(groups: int, array: Array) -> tuple[Array, ...]:
    return _region(lambda rows: tuple(jnp.split(rows, groups)), jax.typeof(array).sharding)(array)


@jax.custom_vjp
def _join(parts: tuple[Array, ...]) -> Array:
    return _region(jnp.concatenate, jax.typeof(parts[0]).sharding)(parts)


_split.defvjp(
    lambda groups, array: (_split(groups, array), None), lambda groups, _, parts: (_join(parts),)
)
_join.defvjp(
    lambda parts: (_join(parts), len(parts)), lambda groups, array: (_split(groups, array),)
)

"""Groups of a device's tokens that take turns in a layer: one computes while another communicates.

With tensor parallelism every product of a layer waits for its input, gathered over `tensor`, and
its output is scattered before the layer goes on: nothing else of these tokens can run meanwhile.
The rows of the batch do not depend on each other. So a layer is written once for each group of
them, and the compiler's scheduler runs the products of one beside the collectives of another. Of
one row the groups are its positions: attention of the later ones takes the keys and values of the
earlier ones, and everything else is their own.

With remat, weights are gathered once for all groups. Without it the gathered weights would be kept
until the backward pass, so each group gathers its own. Weight gradients are reduce-scattered by
each group, and the shares are added up: to add up whole gradients first would take longer than what
it saves in traffic.

Sources: groups of rows, Domino (arXiv 2409.15241); two batches in turns, DeepSeek-V3
(arXiv 2412.19437), section 3.4.1, there for experts.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array

from llmx import sharding
from llmx.model.attention.masks import Mask
from llmx.model.decoder import BLOCK, INSIDE
from llmx.model.quantized import Ranges, added

ROWS, POSITIONS = "rows", "positions"


@dataclasses.dataclass(frozen=True)
class Groups:
    """How many groups, and whether each has some rows of a device or some positions of all rows."""

    number: int = 1
    of: str = ROWS

    def split_x(self, x_BTD: Array, place: sharding.Placement) -> list[Array]:
        """The input of a layer for each group.

        Communicates over `tensor`, if groups are of positions.
        """
        if self.of == ROWS:
            return split(x_BTD, self.number)
        parts = jnp.split(place.constrain(x_BTD, INSIDE), self.number, axis=1)
        return [place.constrain(part, BLOCK) for part in parts]

    def join_x(self, parts: list[Array], place: sharding.Placement) -> Array:
        """The reverse of `split_x`. Communicates as it does."""
        if self.of == ROWS:
            return join(parts)
        whole = jnp.concatenate([place.constrain(part, INSIDE) for part in parts], axis=1)
        return place.constrain(whole, BLOCK)

    def split_masks(self, mask: Mask, rotations: dict) -> list[tuple[Mask, dict]]:
        """What each group sees, and its rotations. Groups of positions see those before, too."""
        if self.of == ROWS:
            return split((mask, rotations), self.number)
        size = mask.segments_BT.shape[1] // self.number
        cut = lambda tree, low, high: jax.tree.map(lambda array: array[:, low:high], tree)  # noqa: E731
        return [
            (
                Mask(
                    *cut((mask.segments_BT, mask.positions_BT), low, low + size),
                    *cut((mask.key_segments_BS, mask.key_positions_BS), 0, low + size),
                    ahead=low, one_document=mask.one_document,
                ),
                cut(rotations, low, low + size),
            )
            for low in range(0, self.number * size, size)
        ]  # fmt: skip


def groups_of(wanted: int, x_BTD: Array, mask: Mask, place: sharding.Placement) -> Groups:
    """`wanted` groups of rows if they divide those of a device, or of positions if these are whole
    and in order; otherwise as many groups of rows as divide them."""
    kind = jax.typeof(x_BTD).sharding
    rows = x_BTD.shape[0] // sharding.ways(kind.mesh, kind.spec[0])
    whole = not sharding.mesh_axes(place.activation(INSIDE)[1]) and mask.ahead == 0
    ways = sharding.ways(kind.mesh, place.activation(BLOCK)[1])
    if rows % wanted and whole and x_BTD.shape[1] % (wanted * ways) == 0:
        return Groups(wanted, POSITIONS)
    return Groups(math.gcd(wanted, rows))


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
    """Gradient buffers once for each group; what the groups put into them is added up, and the
    largest ranges are kept."""
    if groups == 1:
        return [buffers]
    is_leaf = lambda leaf: isinstance(leaf, Ranges)  # noqa: E731
    leaves, structure = jax.tree.flatten(buffers, is_leaf=is_leaf)
    copies = zip(*[_shared(groups, leaf) for leaf in leaves], strict=True) if leaves else ()
    return [jax.tree.unflatten(structure, one) for one in copies or [()] * groups]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _shared(groups: int, buffer: Array | Ranges) -> tuple[Array | Ranges, ...]:
    return (buffer,) * groups


def _summed(groups: int, _, gradients: tuple[Array | Ranges, ...]) -> tuple[Array | Ranges]:
    """In fp32: XLA would otherwise move the sum before the reduce-scatters and add whole
    gradients."""
    if isinstance(gradients[0], Ranges):
        return (functools.reduce(added, gradients),)
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

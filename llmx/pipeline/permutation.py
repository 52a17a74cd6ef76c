"""Layer permutations: which layer of the model each slot of a stacked weight [slots, ...] holds.

The schedule orders the layers on stages, perhaps with empty slots. A checkpoint stores arrays in
that order, with the permutation beside them. Letters: L layers.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

EMPTY = -1
LAYERS = "blocks"  # arrays whose path has this name are stacked over layers ...
OWN_MOVE = "sync"  # ... but the sync strategy moves its own arrays to other permutations


@dataclasses.dataclass(frozen=True)
class LayerPermutation:
    """The layer in each slot, or EMPTY. `slots=()` is the identity, for any number of layers."""

    slots: tuple[int, ...] = ()

    @property
    def is_identity(self) -> bool:
        return not self.slots

    def moves(self, name: str, shape: Sequence[int], to: "LayerPermutation") -> bool:
        """Whether an array of this permutation, stored at path `name`, differs in that of `to`.

        Arrays without a row per slot do not: factored moments under `blocks` may have none.
        """
        if self == to or name.startswith(f"{OWN_MOVE}/") or LAYERS not in name.split("/"):
            return False
        return tuple(shape[:1]) == (len(self.slots or to.rows(self)),)

    def shape(self, shape: Sequence[int], to: "LayerPermutation") -> tuple[int, ...]:
        """The shape in the permutation `to` of a stacked array."""
        return tuple(shape) if self == to else (len(self.rows(to)), *shape[1:])

    def plain_shape(self, name: str, shape: Sequence[int]) -> list[int]:
        """The shape that an array has with its layers in the model's order."""
        return list(self.shape(shape, IDENTITY) if self.moves(name, shape, IDENTITY) else shape)

    def rows(self, to: "LayerPermutation") -> tuple[int, ...]:
        """For each slot of `to`, the slot of this permutation with its layer, or EMPTY."""
        plain = tuple(range(max(self.slots or to.slots) + 1))
        slot_of = {layer: slot for slot, layer in enumerate(self.slots or plain) if layer != EMPTY}
        return tuple(EMPTY if layer == EMPTY else slot_of[layer] for layer in to.slots or plain)

    def convert(self, stacked: Any, to: "LayerPermutation") -> Any:
        """Stacked arrays of this permutation in that of `to`; empty slots are zero."""
        if self == to:
            return stacked
        rows = self.rows(to)
        return jax.tree.map(lambda array: take_rows(array, rows), stacked)

    def apply(self, blocks: Any) -> Any:
        """Arrays [L, ...] in the model's order, as [slots, ...]."""
        return IDENTITY.convert(blocks, self)

    def inverse(self, stacked: Any) -> Any:
        """Arrays [slots, ...] as [L, ...] in the model's order."""
        return self.convert(stacked, IDENTITY)


IDENTITY = LayerPermutation()


def take_rows(array: jax.Array, rows: Sequence[int]) -> jax.Array:
    """These rows of an array; zeros for EMPTY."""
    rows = np.array(rows)
    filled = rows != EMPTY
    found = jnp.take(array, np.where(filled, rows, 0), axis=0)
    there = filled.reshape(-1, *(1,) * (array.ndim - 1))
    return found if filled.all() else jnp.where(there, found, jnp.zeros((), array.dtype))

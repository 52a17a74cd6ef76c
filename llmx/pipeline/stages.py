"""A model's layers cut into the parts of a pipeline: which stage holds which, and in what order.

A pipeline's table (`llmx.pipeline`) runs parts: runs of consecutive layers. Each stage holds the
same number of places for layers, so that one array per weight, split over `stage`, holds them all:
the layers *as staged*. Where parts have fewer layers than others, places stay empty.

Letters: L layers.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

EMPTY = -1


@dataclasses.dataclass(frozen=True)
class Parts:
    """Parts of a model: how many layers each has, and on which stage it is."""

    layers: tuple[int, ...]
    stage_of: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        return max(self.stage_of) + 1

    @property
    def size(self) -> int:
        """Places for layers in a part."""
        return max(self.layers)

    @property
    def chunks(self) -> int:
        """Places for parts on a stage."""
        return int(np.bincount(self.stage_of).max())

    @property
    def chunk_of(self) -> tuple[int, ...]:
        """Which of its stage's parts each part is."""
        return tuple(self.stage_of[:part].count(s) for part, s in enumerate(self.stage_of))

    @functools.cached_property
    def order(self) -> np.ndarray:
        """int[stages x chunks x size]: the layer at each place, or EMPTY."""
        places = np.full((self.num_stages, self.chunks, self.size), EMPTY)
        first = 0
        for num, stage, chunk in zip(self.layers, self.stage_of, self.chunk_of, strict=True):
            places[stage, chunk, :num] = np.arange(first, first + num)
            first += num
        return places.reshape(-1)

    @property
    def full(self) -> bool:
        """Whether every place has a layer."""
        return EMPTY not in self.order

    @property
    def in_order(self) -> bool:
        """Whether layers as staged are just the layers."""
        return np.array_equal(self.order, np.arange(sum(self.layers)))

    def staged(self, blocks: Any) -> Any:
        """Arrays [L, ...] with a row for each place; those of empty places are zero."""
        if self.in_order:
            return blocks
        return jax.tree.map(lambda array: taken(array, self.order), blocks)

    def unstaged(self, blocks: Any) -> Any:
        """The reverse of `staged`."""
        if self.in_order:
            return blocks
        places = np.argsort(np.where(self.order == EMPTY, self.order.size, self.order))
        places = places[: sum(self.layers)]
        return jax.tree.map(lambda array: jnp.take(array, places, axis=0), blocks)


def cut(num_layers: int, stage_of: Sequence[int], layers: Sequence[int] = ()) -> Parts:
    """The parts of a model with so many layers.

    Args:
      num_layers: of the model.
      stage_of: the stage of each part.
      layers: of each part; () = equal, or where that does not divide the earlier parts one more.

    Raises ValueError where the layers do not fill the parts.
    """
    num_parts = len(stage_of)
    if not layers:
        if num_layers < num_parts:
            raise ValueError(
                f"{num_layers} layers are too few for {num_parts} parts: use at most {num_layers} "
                "stages x virtual stages"
            )
        layers = [(num_layers + num_parts - 1 - part) // num_parts for part in range(num_parts)]
    if len(layers) != num_parts or sum(layers) != num_layers or min(layers) < 1:
        raise ValueError(
            f"pipeline.layers={tuple(layers)} must be {num_parts} numbers of at least 1, one for "
            f"each part, that add up to {num_layers} layers: their sum is {sum(layers)}"
        )
    return Parts(tuple(layers), tuple(int(stage) for stage in stage_of))


def taken(array: jax.Array, rows: np.ndarray) -> jax.Array:
    """These rows of an array; EMPTY gives zeros."""
    filled = rows != EMPTY
    found = jnp.take(array, np.where(filled, rows, 0), axis=0)
    there = filled.reshape(-1, *(1,) * (array.ndim - 1))
    return found if filled.all() else jnp.where(there, found, jnp.zeros((), array.dtype))


# The layer at each place, or EMPTY; () = the layers in the model's order.
Order = tuple[int, ...]

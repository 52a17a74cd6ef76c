"""A model's layers cut into model chunks: which stage of a pipeline holds which layers.

Model chunks (virtual stages) are runs of consecutive layers. Each stage has as many slots for
layers as the others, so that one array per weight, split over `stage`, holds all; chunks that are
shorter than the longest leave slots empty.
"""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from llmx.pipeline.permutation import EMPTY, LayerPermutation


@dataclasses.dataclass(frozen=True)
class ModelChunks:
    """Chunks of a model, in its order: the number of layers of each, and its stage."""

    layers: tuple[int, ...]
    stage_of: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        return max(self.stage_of) + 1

    @property
    def size(self) -> int:  # slots for layers in a chunk
        return max(self.layers)

    @property
    def per_stage(self) -> int:  # chunks
        return int(np.bincount(self.stage_of).max())

    @property
    def local_index(self) -> tuple[int, ...]:
        """Which of its stage's chunks each chunk is."""
        return tuple(self.stage_of[:chunk].count(s) for chunk, s in enumerate(self.stage_of))

    @functools.cached_property
    def slots(self) -> tuple[int, ...]:
        """The layer in each of the stages x chunks x size slots, or EMPTY."""
        slots = np.full((self.num_stages, self.per_stage, self.size), EMPTY)
        first = 0
        for num, stage, chunk in zip(self.layers, self.stage_of, self.local_index, strict=True):
            slots[stage, chunk, :num] = np.arange(first, first + num)
            first += num
        return tuple(slots.reshape(-1).tolist())

    @property
    def permutation(self) -> LayerPermutation:
        """From the model's order to the slots of all stages."""
        identity = self.slots == tuple(range(sum(self.layers)))
        return LayerPermutation(() if identity else self.slots)


def cut(num_layers: int, stage_of: Sequence[int], layers: Sequence[int] = ()) -> ModelChunks:
    """The chunks of a model with `num_layers` layers; `stage_of`: the stage of each chunk.

    `layers`: of each chunk; () = equal, or where that does not divide the earlier chunks one more.
    Raises ValueError where the layers do not fill the chunks.
    """
    num_chunks = len(stage_of)
    if not layers:
        if num_layers < num_chunks:
            raise ValueError(
                f"{num_layers} layers are too few for {num_chunks} model chunks: use at most "
                f"{num_layers} stages x virtual stages"
            )
        layers = [len(part) for part in np.array_split(np.arange(num_layers), num_chunks)]
    if len(layers) != num_chunks or sum(layers) != num_layers or min(layers) < 1:
        found = f"{len(layers)} numbers from {min(layers)}, whose sum is {sum(layers)}"
        raise ValueError(
            f"pipeline.layers={tuple(layers)} must be {num_chunks} numbers of at least 1, one for "
            f"each model chunk, that add up to {num_layers} layers: these are {found}"
        )
    return ModelChunks(tuple(layers), tuple(map(int, stage_of)))

"""How a model is run: where, in which numbers, and what its forward pass keeps."""

import dataclasses

from llmx import sharding
from llmx.model import precision
from llmx.model.attention import attend, split
from llmx.model.attention.attend import AttentionConfig


@dataclasses.dataclass(frozen=True, eq=False)
class Execution:
    """How a decoder is run: what a config resolves to, and no part of its parameters."""

    place: sharding.Placement
    policy: precision.Policy
    remat: str = "none"
    attention: AttentionConfig = dataclasses.field(default_factory=AttentionConfig)
    packed: bool = True  # rows may hold several documents
    loss_chunks: int = 0

    @property
    def split(self) -> split.Split:
        """Which device holds which positions of a row."""
        return attend.split_of(self.attention, self.place)

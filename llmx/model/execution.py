"""How a model is executed: where, in which dtypes, and what its forward pass saves."""

import dataclasses

from llmx import sharding
from llmx.model import precision
from llmx.model.attention import attend, split
from llmx.model.attention.attend import AttentionConfig
from llmx.model.distillation import Distilled
from llmx.model.experts.config import ExpertsConfig
from llmx.tables.tables import Tables


@dataclasses.dataclass(frozen=True, eq=False)
class Execution:
    """How a decoder is executed: all of it resolved from a config, none of it a parameter."""

    place: sharding.Placement  # mesh and layout
    policy: precision.Policy
    remat: str = "none"  # rules, see `llmx.model.remat`
    offloaded: tuple[str, ...] = ()  # of `remat.SAVES`, those that are saved in host memory
    recomputed: bool = False  # in a layer: its products are made again before their gradients
    attention: AttentionConfig = dataclasses.field(default_factory=AttentionConfig)
    experts: ExpertsConfig = dataclasses.field(default_factory=ExpertsConfig)
    packed: bool = True  # rows may hold several documents
    loss_chunks: int = 0  # chunks of the vocabulary in the loss; 0 = by their size
    kv_cache: str = ""  # how decoding keeps keys and values, one of `cache.FORMATS`
    distilled: Distilled | None = None  # what a teacher says adds to the losses of tokens
    tables: Tables | None = None  # where a batch looks rows up
    hands_out: bool = False  # attention returns queries, keys and values, and no cache
    turns: int = 1  # groups of a device's tokens that take turns in a layer: `turns.groups_of`

    @property
    def split(self) -> split.Split:
        """Which device holds which positions of a row."""
        return attend.split_of(self.attention, self.place)

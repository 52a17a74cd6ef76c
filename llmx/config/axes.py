"""The mesh axes over which a config's layout splits its arrays."""

from llmx import sharding
from llmx.config import Config
from llmx.sync import replicas


def replica_axes(config: Config, table: str) -> tuple[str, ...]:
    """The mesh axes over which a layout's table splits the width, with the config's strategy."""
    over = vars(sharding.LAYOUTS[config.sharding.layout])[table]["embed"]
    whole = () if config.sync.strategy == "mean" else replicas.AXES
    return tuple(axis for axis in over if axis not in whole)

"""The mesh axes over which a config's layout splits its arrays."""

from llmx import sharding
from llmx.config import Config
from llmx.sync import replicas

WRITTEN_OUT = 2  # turns of a loop, by XLA:GPU where it gathers ahead


def layout_of(config: Config) -> sharding.Layout:
    """The layout's tables, with the config's variations and strategy."""
    layout = sharding.make_layout(
        config.sharding.layout, sequence_parallel=config.sharding.sequence_parallel,
        replicate_kv=config.sharding.replicate_kv,
    )  # fmt: skip
    if config.sync.strategy == "mean":
        return layout
    # Replicas are whole, each split over the other axes only.
    return layout.without(replicas.AXES, "parameters", "gradients", "optimizer")


def replica_axes(config: Config, table: str) -> tuple[str, ...]:
    """The mesh axes over which a layout's table splits the width, with the config's strategy."""
    return vars(layout_of(config))[table]["embed"]


def is_one_device(config: Config) -> bool:
    """Whether all mesh axes of a resolved config are 1."""
    return all(vars(config.mesh)[axis] == 1 for axis in sharding.AXES)


def splits_parameters(config: Config) -> bool:
    """Whether devices have shares of the parameters' width."""
    return any(vars(config.mesh)[axis] > 1 for axis in replica_axes(config, "parameters"))


def gathers_once(config: Config) -> bool:
    """Whether weights that are split are gathered once a step."""
    return config.sharding.gather == "step" and splits_parameters(config)


def gathers_head_once(config: Config) -> bool:
    """Whether the head is: a tied one is a table of lookups, which stays split."""
    return gathers_once(config) and not config.model.tied_head


def exchanges_ahead(config: Config) -> bool:
    """Whether XLA:GPU gathers for the next iteration of a loop, as it does where tokens are not
    split over `tensor` (`runtime.compiler_options`): in a loop over ticks token ids, at least.

    The last iteration then has no loop around it, and sends nothing that no stage stores; a loop of
    two is written out.
    """
    return splits_parameters(config) and config.mesh.tensor == 1


def gathers_ahead(config: Config) -> bool:
    """Whether XLA:GPU gathers layers' weights for the next iteration of a loop."""
    return exchanges_ahead(config) and config.sharding.gather == "layer"


def gathers_head_ahead(config: Config) -> bool:
    """Whether XLA:GPU gathers chunks of the head for the next iteration of a loop over them."""
    return exchanges_ahead(config) and not gathers_head_once(config)

"""What adapters can be trained of, and what they cannot be combined with."""

from collections.abc import Iterator

from llmx.config import Config
from llmx.model import adapters, families
from llmx.model import apply as apply_lib
from llmx.runtime import bounds


def problems(config: Config) -> Iterator[str]:
    """All problems, each with its remedy."""
    section = config.adapters
    if bounds.problems(section, "adapters."):
        return  # said already
    if not section.rank:
        return
    if not families.problems(config.model):
        yield from adapters.problems(section, apply_lib.abstract_parameters(config.model)[0])
    if config.pipeline.schedule == "pipedream_2bw" and config.mesh.stage > 1:
        yield (
            f"adapters.rank={section.rank} with pipeline.schedule='pipedream_2bw', which keeps two "
            "versions of all parameters, frozen ones too: use another schedule"
        )
    if section.dropout and config.sharding.turns > 1:
        yield (
            f"adapters.dropout={section.dropout} with sharding.turns={config.sharding.turns}: what "
            "is dropped is drawn for all tokens of a device; use sharding.turns=1"
        )
    if config.products.scaling == "delayed":
        yield (
            f"adapters.rank={section.rank} with products.scaling='delayed': ranges of operands are "
            "kept beside gradients, and frozen weights have none; use products.scaling='current'"
        )
    if config.experts.bias_rate:
        yield (
            f"experts.bias_rate={config.experts.bias_rate} with adapters.rank={section.rank}: the "
            "bias by which experts are chosen is frozen; leave it out"
        )

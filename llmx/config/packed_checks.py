"""What weights can be packed, and what packed weights cannot be used for."""

from collections.abc import Iterator

from llmx.config import Config
from llmx.model import apply, families, packed
from llmx.runtime import bounds


def problems(config: Config) -> Iterator[str]:
    """All problems, each with its remedy."""
    section = config.packed
    if bounds.problems(section, "packed."):
        return  # said already
    if not section.format:
        return
    if not families.problems(config.model):
        yield from packed.problems(section, apply.abstract_parameters(config.model)[0])


def of_training(config: Config) -> Iterator[str]:
    """Why a run is not trained, with the remedy."""
    if config.packed.format:
        yield (
            f"packed.format={config.packed.format!r}: packed weights are whole codes, and have no "
            "gradient: train the run that was quantized, and quantize it again"
        )

"""Whether pairs of answers are learned from, and what that cannot be combined with."""

from collections.abc import Iterator

from llmx.config import Config
from llmx.data import pairs
from llmx.model import preference
from llmx.runtime import bounds


def is_on(config: Config) -> bool:
    """Whether the loss is that of pairs."""
    return preference.is_minimized(config.data.format, config.preference.loss)


def problems(config: Config) -> Iterator[str]:
    """All problems, each with its remedy."""
    section = config.preference
    if bounds.problems(section, "preference."):
        return  # said already
    idle = {}
    if not is_on(config):
        cause = f"data.format={config.data.format!r}"
        if config.data.format == pairs.FORMAT:
            cause = f"preference.loss={section.loss!r}"
        idle = dict.fromkeys(("beta", "label_smoothing", "chosen_weight"), cause)
        if config.data.format != pairs.FORMAT and section.loss != preference.NONE:
            idle["loss"] = cause
    elif section.loss != "dpo":
        idle = {"label_smoothing": f"preference.loss={section.loss!r}"}
    why = {key: f"with {cause}: leave it out" for key, cause in idle.items()}
    yield from bounds.without_effect(section, "preference.", why)
    if config.data.format == pairs.FORMAT and config.attention.implementation == "cudnn":
        yield (
            "attention.implementation='cudnn' with data.format='preference': it does not tell the "
            "two texts of a row apart; use 'auto'"
        )
    if not is_on(config):
        return
    if config.mesh.stage > 1:
        yield (
            f"data.format='preference' with mesh.stage={config.mesh.stage}: the reference is not "
            "computed in stages; use mesh.stage=1, and fsdp or tensor"
        )
    if config.sync.strategy != "mean":
        yield (
            f"data.format='preference' with sync.strategy={config.sync.strategy!r}: replicas weigh "
            "their gradients by tokens, not by pairs; use sync.strategy='mean'"
        )
    if config.loss.z_loss:
        yield (
            f"loss.z_loss={config.loss.z_loss} with data.format='preference': it is of tokens, and "
            "the loss of pairs; use loss.z_loss=0"
        )

"""The `recommender` section of a config."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

MODELS = ("", "dlrm", "dcn", "din")
STRUCTURES = ("stacked", "parallel")


def _whole(default: int, low: int, high: int) -> Any:
    return dataclasses.field(
        default=default, metadata={"limits": {"at least": low, "at most": high}}
    )


@dataclasses.dataclass(unsafe_hash=True)
class RecommenderConfig:
    """A model of clicks in the place of the decoder; widths are of the layers' outputs."""

    # "dlrm" | "dcn" (DCN-v2) | "din"; "" = the model is a decoder
    name: str = dataclasses.field(default="", metadata={"choices": MODELS})
    width: int = _whole(16, 1, 1 << 14)  # of the tables' rows
    # Layers of the numbers, for DLRM the last as wide as the rows; () = the numbers as they are
    bottom: tuple[int, ...] = (512, 256, 64, 16)
    top: tuple[int, ...] = (512, 256)  # layers before the one output
    cross_layers: int = _whole(3, 0, 64)  # of DCN-v2
    cross_rank: int = _whole(0, 0, 1 << 14)  # of their matrices; 0 = they are whole
    # of DCN-v2, the top's input: what the cross layers return, or the cross layers' own input
    structure: str = dataclasses.field(default="stacked", metadata={"choices": STRUCTURES})
    # of DIN: layers that give an id of a history its weight
    attention: tuple[int, ...] = (80, 40)
    # of DIN: which feature is the candidate, of which feature of several ids: "history=item"
    histories: tuple[str, ...] = ()
    num_dense: int = _whole(0, 0, 1 << 16)  # filled in from the data: numbers of a record
    features: tuple[str, ...] = ()  # filled in: names of a record's features
    # filled in: of features that are not combined the number of their ids, 0 of others
    lengths: tuple[int, ...] = ()
    num_ids: int = _whole(0, 0, 1 << 16)  # filled in: ids of a record
    # filled in: of each feature how many weights its ids have; () = none has any
    weights: tuple[int, ...] = ()


def pairs(config: RecommenderConfig) -> dict[str, str]:
    """The candidate of each history."""
    return dict(text.split("=") for text in config.histories)


def problems(
    config: RecommenderConfig, *, num_dense: int, lengths: Mapping[str, int]
) -> Iterator[str]:
    """What does not fit together, or the columns.

    Args:
      num_dense: numbers of a record.
      lengths: of each feature that is not combined, its number of ids; 0 of the others.
    """
    for name in ("bottom", "top", "attention"):
        if bad := [width for width in vars(config)[name] if width < 1]:
            yield f"model.recommender.{name} has a layer of width {bad[0]}: each must be 1 or more"
    if not num_dense and config.bottom:
        yield (
            "model.recommender.bottom has layers, and records have no numbers "
            "(data.records.dense): set model.recommender.bottom=()"
        )
    if config.name == "dlrm" and num_dense and config.bottom[-1:] != (config.width,):
        yield (
            f"model.recommender.bottom={config.bottom} of a DLRM must end in the width of the "
            f"rows: let it end in model.recommender.width={config.width}"
        )
    yield from _history_problems(config, lengths)


def _history_problems(config: RecommenderConfig, lengths: Mapping[str, int]) -> Iterator[str]:
    whole = [name for name, length in lengths.items() if length]
    if config.name != "din":
        if whole:
            yield (
                f"model.recommender.name={config.name!r} takes one row of each feature, and "
                f"{whole[0]!r} is not combined: let its rows be summed, or use 'din'"
            )
        return
    for text in config.histories:
        history, equals, candidate = text.partition("=")
        if not equals or "=" in candidate:
            yield f"model.recommender.histories: {text!r} is no pair: write 'HISTORY=CANDIDATE'"
        elif not lengths.get(history, 0) or lengths.get(candidate, 1):
            yield (
                f"model.recommender.histories: {text!r} must name a feature of several ids that "
                "are not combined, and one of a single row; features are " + ", ".join(lengths)
            )
    named = [text.partition("=")[0] for text in config.histories]
    if missing := [name for name in whole if name not in named]:
        yield (
            f"model.recommender.histories has no candidate for {missing[0]!r}: add "
            f"'{missing[0]}=CANDIDATE', or let its rows be combined"
        )
    if not config.histories:
        yield (
            "model.recommender.histories=() leaves DIN without a history: write 'HISTORY=CANDIDATE'"
        )
    if len(set(named)) < len(named):
        yield "model.recommender.histories names a history twice: name each once"

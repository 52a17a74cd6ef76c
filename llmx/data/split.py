"""The held-out split: which documents, or which end of one, are kept for evaluation.

A document is held out when the 64-bit hash of its text lies below `held_out` of the range: equal
documents, also in different sources, lie on the same side, and adding others changes nothing.

Where the held-out side of a source would get less than a fifth or more than five times its share of
the tokens (or more than half), one document of a fitting size is held out instead, and where there
is none, the end of the longest document.
"""

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np

_TOLERANCE = 5.0
_MAX_SHARE = 0.5
_MIN_CUT_TOKENS = 4  # two on each side: one to read and one to predict


@dataclasses.dataclass(frozen=True)
class Part:
    """Token ranges of a source, in document order: where each starts there, and its length."""

    starts: np.ndarray
    lengths: np.ndarray

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())


@dataclasses.dataclass(frozen=True)
class Split:
    """The two sides of a source and how they were chosen: "documents", "document" or "end"; "all"
    or "none" is held out."""

    train: Part
    held_out: Part
    rule: str


@dataclasses.dataclass(frozen=True)
class _Choice:
    rule: str
    held: np.ndarray  # hashes of documents held out whole
    # hash -> tokens held out at its end
    cuts: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)


def _fits(held_tokens: int, total: int, held_out: float) -> bool:
    share = held_tokens / total
    low, high = held_out / _TOLERANCE, min(held_out * _TOLERANCE, _MAX_SHARE)
    return 0 < held_tokens < total and low <= share <= high


def _choose(lengths: np.ndarray, hashes: np.ndarray, held_out: float, name: str) -> _Choice:
    total = int(lengths.sum())
    mask = hashes < np.uint64(int(held_out * 2**64))
    if _fits(int(lengths[mask].sum()), total, held_out):
        return _Choice("documents", np.unique(hashes[mask]))
    distinct, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    tokens = np.bincount(inverse, weights=lengths).astype(np.int64)
    nearest = int(np.argmin(np.abs(tokens / total - held_out)))
    if _fits(int(tokens[nearest]), total, held_out):
        return _Choice("document", distinct[nearest : nearest + 1])
    longest = int(np.argmax(lengths[first]))
    length = int(lengths[first[longest]])
    copies = int(tokens[longest]) // length
    if length < _MIN_CUT_TOKENS:
        raise ValueError(
            f"source {name!r} has {total} tokens in {len(lengths)} documents, too few for a "
            f"held-out split of {held_out}: add text, or set data.held_out=0"
        )
    kept_back = int(np.clip(round(held_out * total / copies), 2, length // 2))
    cuts = collections.Counter({int(distinct[longest]): kept_back})
    return _Choice("end", distinct[:0], cuts)


def split_sources(
    tables: Sequence[tuple[np.ndarray, np.ndarray]], *, held_out: float, names: Sequence[str]
) -> list[Split]:
    """Splits sources given as (lengths, hashes) of their documents; never overlapping, also
    between sources. `held_out=1` leaves nothing to train on."""
    if held_out in (0, 1):
        rule = "all" if held_out else "none"
        held = [_Choice(rule, hashes if held_out else hashes[:0]) for _, hashes in tables]
        return [_apply(*table, choice) for table, choice in zip(tables, held, strict=True)]
    choices = [
        _choose(lengths, hashes, held_out, name)
        for (lengths, hashes), name in zip(tables, names, strict=True)
    ]
    # What one source holds out, every other one must: content alone decides the side.
    held = np.unique(np.concatenate([choice.held for choice in choices]))
    cuts = collections.Counter()
    for choice in choices:
        cuts |= choice.cuts  # the longer of two
    splits = []
    for (lengths, hashes), choice, name in zip(tables, choices, names, strict=True):
        split = _apply(lengths, hashes, _Choice(choice.rule, held, cuts))
        for side, part in (("train", split.train), ("held-out", split.held_out)):
            if part.num_tokens < 2:
                raise ValueError(
                    f"source {name!r} leaves the {side} side without text: its {len(lengths)} "
                    f"documents are too few for data.held_out={held_out}; add text, or set "
                    "data.held_out=0"
                )
        splits.append(split)
    return splits


def _apply(lengths: np.ndarray, hashes: np.ndarray, choice: _Choice) -> Split:
    starts = np.cumsum(lengths) - lengths
    is_held = np.isin(hashes, choice.held)
    at_end = np.zeros(len(lengths), np.int64)
    for key, kept_back in choice.cuts.items():
        at_end[hashes == np.uint64(key)] = kept_back
    is_cut = at_end > 0
    in_train = ~is_held | is_cut
    in_held = is_held | is_cut
    train = Part(starts[in_train], (lengths - at_end)[in_train])
    held_starts = np.where(is_cut, starts + lengths - at_end, starts)
    held_lengths = np.where(is_cut, at_end, lengths)
    return Split(train, Part(held_starts[in_held], held_lengths[in_held]), choice.rule)

"""Records of a known law: ids by Zipf's law, and clicks by interactions between them.

"generated:N" has the columns of Criteo's challenge and numbers of ids near those of its features.
Each id has one of 64 types, at random, and each type of a feature a vector. The log odds of a click
are a sum of terms of single features, of products of the vectors of pairs of features, and of
bumps in the numbers. What a linear model cannot have is the pairs: they decide most.

"generated-history:N" has an item and the items that a user took before, from a few types that the
user likes; a click is likely where the item's type is among those of the latest ones.

A shard of records is a function of (seed, number of the shard) alone. Features are independent of
each other, which those of real logs are not.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import numpy as np

from llmx.data.records import schema as schema_lib
from llmx.data.records.schema import NONE, Chunk, Feature, Schema, no_weights

PREFIXES = ("generated:", "generated-history:")
SHARD_RECORDS = 1 << 18
MAX_RECORDS = 1 << 36
MEAN_CLICKS = 0.25  # near that of Criteo's challenge, 0.256
# Ids of Criteo's features, the five with millions of them cut to fewer.
_ROWS = (1460, 583, 1_000_000, 300_000, 305, 24, 12_517, 633, 3, 93_145, 5683, 300_000, 3194, 27,
         14_992, 300_000, 10, 5652, 2173, 4, 300_000, 18, 15, 286_181, 105, 142_572)  # fmt: skip
_TYPES, _WIDTH = 64, 4
_ZIPF = 1.2  # exponent of the ids
_BLANKS = 0.1  # share of records without an id of a feature, in every third one
_PAIRS = ((0, 4), (0, 7), (1, 4), (1, 12), (4, 18), (7, 18), (12, 14), (6, 17), (10, 24), (14, 17),
          (9, 10), (6, 25))  # fmt: skip
_PAIR_SCALE, _LINEAR_SCALE, _BUMP_SCALE = 0.45, 0.15, 0.4
_USERS, _ITEMS, _HISTORY, _LATEST, _LIKED = 50_000, 200_000, 20, 8, 3


@dataclasses.dataclass(frozen=True)
class Law:
    """Which records there are."""

    kind: str  # one of PREFIXES
    num_records: int
    seed: int = 0

    @property
    def num_shards(self) -> int:
        return -(-self.num_records // SHARD_RECORDS)

    @property
    def schema(self) -> Schema:
        return _KINDS[self.kind].schema()


def parse(source: str) -> Law:
    """The law of the source "generated:N" or "generated:N:SEED". Raises ValueError for others."""
    kind = source.partition(":")[0] + ":"
    number, _, seed = source.removeprefix(kind).partition(":")
    if kind not in PREFIXES or not (number.isdecimal() and (seed or "0").isdecimal()):
        raise ValueError(
            f"{source!r} is no number of records: write for example '{PREFIXES[0]}100000', or "
            f"'{PREFIXES[0]}100000:SEED'"
        )
    if not 1 <= int(number) <= MAX_RECORDS or int(seed or 0) >= 1 << 32:
        raise ValueError(
            f"{source!r}: records number from 1 to {MAX_RECORDS:,}, and the seed is below 2^32"
        )
    return Law(kind, int(number), int(seed or 0))


def shard(law: Law, number: int) -> tuple[Chunk, np.ndarray]:
    """The records of a shard, and the log odds of a click of each, fp32 [B]."""
    assert 0 <= number < law.num_shards
    size = min(SHARD_RECORDS, law.num_records - number * SHARD_RECORDS)
    rng = np.random.Generator(np.random.Philox(key=[law.seed, number + 1]))
    make, bias = _KINDS[law.kind].make, _bias(law.kind, law.seed)
    dense, ids, odds = make(law.seed, rng, size)
    odds = odds + np.float32(bias)
    labels = rng.random(size, np.float32) < _sigmoid(odds)
    return Chunk(labels.astype(np.uint8), dense, ids, no_weights(len(ids))), odds


@functools.lru_cache(8)
def _bias(kind: str, seed: int) -> float:
    """What is added to the log odds so that MEAN_CLICKS of the records are clicks."""
    rng = np.random.Generator(np.random.Philox(key=[seed, 0]))
    _, _, odds = _KINDS[kind].make(seed, rng, 1 << 15)
    low, high = -30.0, 30.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if _sigmoid(odds + middle).mean() < MEAN_CLICKS else (low, middle)
        )
    return low


def _sigmoid(odds: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-odds))


def _zipf(rng: np.random.Generator, rows: int, shape: tuple[int, ...]) -> np.ndarray:
    """Ranks from 0, int64: rank r about as often as (r + 1)^-s, by the inverse of its integral."""
    power = 1 - _ZIPF
    spread = rng.random(shape) * ((rows + 1) ** power - 1)
    return np.minimum((1 + spread) ** (1 / power), rows).astype(np.int64) - 1


def _scattered(ranks: np.ndarray, rows: int) -> np.ndarray:
    """Ids of ranks: frequent ids are anywhere among the others."""
    multiplier = int(rows * 0.6180339887) | 1
    while math.gcd(multiplier, rows) > 1:
        multiplier += 2
    return (ranks * multiplier + rows // 3) % rows


# ------------------------------------------------------------------------------- Criteo's columns


@dataclasses.dataclass(frozen=True)
class _Planted:
    """What decides the clicks, of a seed."""

    types: tuple[np.ndarray, ...]  # of each feature, the type of each rank, uint8
    linear: np.ndarray  # fp32 [features, types]
    pairs: np.ndarray  # fp32 [pairs, types, types]
    bumps: np.ndarray  # fp32 [F, 2]: where ln(1 + x) has its bump, and how high


@functools.lru_cache(4)
def _planted(seed: int) -> _Planted:
    rng = np.random.Generator(np.random.Philox(key=[seed, 1 << 63]))
    vectors = rng.standard_normal((len(_ROWS), _TYPES, _WIDTH), np.float32)
    pairs = [vectors[one] @ vectors[other].T for one, other in _PAIRS]
    heights = rng.standard_normal(len(schema_lib.CRITEO_DENSE)) * _BUMP_SCALE
    places = rng.uniform(0.5, 3, len(heights))
    return _Planted(
        types=tuple(rng.integers(0, _TYPES, rows, np.uint8) for rows in _ROWS),
        linear=rng.standard_normal((len(_ROWS), _TYPES), np.float32) * np.float32(_LINEAR_SCALE),
        pairs=np.stack(pairs) * np.float32(_PAIR_SCALE / math.sqrt(_WIDTH)),
        bumps=np.stack([places, heights], axis=1).astype(np.float32),
    )


def _criteo_schema() -> Schema:
    features = zip(schema_lib.CRITEO_FEATURES, _ROWS, strict=True)
    return Schema(schema_lib.CRITEO_DENSE, tuple(Feature(*one) for one in features))


def _criteo(
    seed: int, rng: np.random.Generator, size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Numbers, ids, and log odds but for a constant."""
    planted, odds = _planted(seed), np.zeros(size, np.float32)
    ids = np.empty((size, len(_ROWS)), np.int32)
    types, there = [], []
    for at, rows in enumerate(_ROWS):
        ranks = _zipf(rng, rows, (size,))
        types.append(planted.types[at][ranks].astype(np.int64))
        kept = rng.random(size, np.float32) >= _BLANKS if at % 3 == 2 else np.ones(size, bool)
        there.append(kept)
        ids[:, at] = np.where(kept, _scattered(ranks, rows), NONE)
        odds += planted.linear[at][types[at]] * kept
    for table, (one, other) in zip(planted.pairs, _PAIRS, strict=True):
        flat = types[one] * _TYPES + types[other]
        odds += table.ravel()[flat] * (there[one] & there[other])
    counts = np.exp(rng.standard_normal((size, len(planted.bumps)), np.float32) * 1.2 + 1)
    dense = np.log1p(np.floor(counts))
    distance = (dense - planted.bumps[:, 0]) / np.float32(0.5)
    odds += np.exp(-distance * distance) @ planted.bumps[:, 1]
    return dense, ids, odds


# --------------------------------------------------------------------------------------- histories


def _history_schema() -> Schema:
    features = (
        Feature("user", _USERS), Feature("item", _ITEMS),
        Feature("history", _ITEMS, _HISTORY, "item"),
    )  # fmt: skip
    return Schema(("I1",), features)


def _history(
    seed: int, rng: np.random.Generator, size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Items have the type of their rank modulo `_TYPES`; the last of a history is the latest."""
    planted = np.random.Generator(np.random.Philox(key=[seed, 1 << 62]))
    liked = planted.integers(0, _TYPES, (_USERS, _LIKED))
    users = _zipf(rng, _USERS, (size,))
    choice = rng.integers(0, _LIKED, (size, _HISTORY + 1))
    types = np.take_along_axis(liked[users], choice, axis=1)
    # The item is of any type in half of the records.
    types[:, -1] = np.where(rng.random(size) < 0.5, types[:, -1], rng.integers(0, _TYPES, size))
    ranks = _zipf(rng, _ITEMS // _TYPES, types.shape) * _TYPES + types
    items = _scattered(ranks, _ITEMS)
    lengths = rng.integers(1, _HISTORY + 1, size)
    there = np.arange(_HISTORY) < lengths[:, None]
    latest = there & (np.arange(_HISTORY) >= lengths[:, None] - _LATEST)
    same = (latest & (types[:, :-1] == types[:, -1:])).sum(axis=1)
    count = np.floor(np.exp(rng.standard_normal(size) + 1))
    odds = 3.0 * (same > 0) + 0.3 * np.log1p(count)
    ids = np.concatenate(
        [_scattered(users, _USERS)[:, None], items[:, -1:], np.where(there, items[:, :-1], NONE)],
        axis=1,
    )
    return np.log1p(count)[:, None].astype(np.float32), ids.astype(np.int32), odds


@dataclasses.dataclass(frozen=True)
class _Kind:
    schema: Callable[[], Schema]
    make: Callable


_KINDS = {
    PREFIXES[0]: _Kind(_criteo_schema, _criteo),
    PREFIXES[1]: _Kind(_history_schema, _history),
}

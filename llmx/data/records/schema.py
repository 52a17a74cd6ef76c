"""What a record has: a label, numbers, and features of ids; and its form on disk and in a batch.

Letters: B records, F numbers ("dense"), I ids of all features side by side, J weights of ids of
the features that have some.
"""

import collections
import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from llmx.data import json_files

NONE = -1  # in `ids`: no id
MAX_ROWS = 2**31 - 1  # ids are int32, but for those of 64 bits
# What an id is: a row below `rows`; two such rows, by two hashes; or 64 bits as they are
KINDS = ("rows", "double", "exact")
MAX_LENGTH = 1 << 16
MAX_COLUMNS = 1 << 16
# Names of the columns of Criteo's display advertising challenge, in the order of its lines.
CRITEO_DENSE = tuple(f"I{number}" for number in range(1, 14))
CRITEO_FEATURES = tuple(f"C{number}" for number in range(1, 27))
_FEATURE = re.compile(
    r"(?P<name>[^:@*]+)(:(?P<length>[0-9]{1,6}))?(\*(?P<weights>[^:@*]+))?(@(?P<table>[^:@*]+))?"
)


class Chunk(NamedTuple):
    """Records as arrays."""

    labels: np.ndarray  # uint8 [B], 1 = clicked
    dense: np.ndarray  # fp32 [B, F]
    ids: np.ndarray  # int32 [B, I], or int64 (`Schema.ids_dtype`); NONE where there is no id
    weights: np.ndarray  # fp32 [B, J], 0 where there is no id


@dataclasses.dataclass(frozen=True)
class Feature:
    """One feature: up to `length` ids, each below `rows`. Features of one `table` have the same
    ids, as the item of a record and those of its history.

    rows: 0 = ids have 64 bits. hashes: 2 = each id is two rows, side by side.
    """

    name: str
    rows: int
    length: int = 1
    table: str = ""  # "" = one by the feature's own name
    weights: str = ""  # the column of its ids' weights; "" = they have none
    hashes: int = 1

    @property
    def columns(self) -> int:
        """Of `ids`."""
        return self.length * self.hashes

    @property
    def table_name(self) -> str:
        return self.table or self.name


@dataclasses.dataclass(frozen=True)
class Schema:
    """The columns of a record."""

    dense: tuple[str, ...]
    features: tuple[Feature, ...]

    @functools.cached_property
    def slices(self) -> dict[str, slice]:
        """Where the ids of each feature are in the I of `ids`."""
        return _slices({one.name: one.columns for one in self.features})

    @functools.cached_property
    def weight_slices(self) -> dict[str, slice]:
        """The same of the J of `weights`, of the features that have some."""
        return _slices({one.name: one.length for one in self.features if one.weights})

    @property
    def tables(self) -> dict[str, int]:
        """The rows of each table."""
        return {feature.table_name: feature.rows for feature in self.features}

    @property
    def num_ids(self) -> int:
        return sum(feature.columns for feature in self.features)

    @property
    def ids_dtype(self) -> np.dtype:
        """Of ids in memory."""
        return np.dtype(np.int32 if all(one.rows for one in self.features) else np.int64)

    @property
    def num_weights(self) -> int:
        return sum(feature.length for feature in self.features if feature.weights)

    @functools.cached_property
    def _by_type(self) -> dict[str, np.ndarray]:
        """The columns of `ids` by the smallest unsigned type that holds their ids plus 1."""
        columns = collections.defaultdict(list)
        for feature in self.features:
            where = self.slices[feature.name]
            kind = np.min_scalar_type(feature.rows) if feature.rows else np.dtype("<u8")
            columns[kind.str] += range(where.start, where.stop)
        return {kind: np.array(found) for kind, found in sorted(columns.items())}

    @functools.cached_property
    def dtype(self) -> np.dtype:
        """A record on disk: ids are kept plus 1, so that 0 is none, by type."""
        fields = [("label", "u1"), ("dense", "<f4", (len(self.dense),))]
        fields += [(f"ids{kind}", kind, (len(at),)) for kind, at in self._by_type.items()]
        fields += [("weights", "<f4", (self.num_weights,))] if self.num_weights else []
        return np.dtype(fields)

    def pack(self, chunk: Chunk) -> np.ndarray:
        """Records [B] of `dtype`."""
        packed = np.empty(len(chunk.labels), self.dtype)
        packed["label"], packed["dense"] = chunk.labels, chunk.dense
        for kind, columns in self._by_type.items():
            packed[f"ids{kind}"] = chunk.ids[:, columns] + 1
        if self.num_weights:
            packed["weights"] = chunk.weights
        return packed

    def unpack(self, packed: np.ndarray) -> Chunk:
        """The reverse of `pack`."""
        ids = np.empty((len(packed), self.num_ids), self.ids_dtype)
        for kind, columns in self._by_type.items():
            ids[:, columns] = packed[f"ids{kind}"].astype(self.ids_dtype) - 1
        weights = packed["weights"].copy() if self.num_weights else no_weights(len(packed))
        return Chunk(packed["label"].copy(), packed["dense"].copy(), ids, weights)

    def as_json(self) -> dict[str, Any]:
        return {
            "dense": list(self.dense),
            "features": [_as_list(one) for one in self.features],
        }


def _as_list(feature: Feature) -> list:
    """Without defaults at the end: as before there were weights and second hashes."""
    found = [*dataclasses.astuple(feature)]
    return found[: 6 if feature.hashes > 1 else 5 if feature.weights else 4]


def from_json(value: Any) -> Schema:
    """The reverse of `as_json`. Raises ValueError for what is no schema."""
    shown = json_files.shown(value)
    if not isinstance(value, Mapping) or value.keys() != {"dense", "features"}:
        raise ValueError(f"schema is {shown}, not an object with dense and features")
    dense, features = value["dense"], value["features"]
    if not isinstance(dense, list) or not all(isinstance(name, str) for name in dense):
        raise ValueError(f"the schema's dense is {json_files.shown(dense)}, not a list of names")
    right = isinstance(features, list) and all(
        isinstance(one, list) and 4 <= len(one) <= 6
        and all(isinstance(name, str) for name in (one[0], *one[3:5]))
        and json_files.is_whole(one[1], 0, MAX_ROWS)
        and json_files.is_whole((one[5:] or [1])[0], 1, 2)
        and json_files.is_whole(one[2], 1, MAX_LENGTH)
        for one in features
    )  # fmt: skip
    if not right:
        raise ValueError(f"the schema's features are {json_files.shown(features)}, not features")
    found = Schema(tuple(dense), tuple(Feature(*one) for one in features))
    if wrong := list(problems(found)):
        raise ValueError(wrong[0])
    return found


def parse_feature(text: str, rows: int, kind: str = "rows") -> Feature:
    """The feature of an entry of `data.records.features`; `kind`: of its ids, one of KINDS."""
    found = _FEATURE.fullmatch(text)
    if not found or not 1 <= int(found["length"] or 1) <= MAX_LENGTH:
        raise ValueError(
            f"data.records.features: {text!r} is no feature: write the name of a column, "
            f"'NAME:LENGTH' with a length from 1 to {MAX_LENGTH} for lists of ids, 'NAME*WEIGHTS' "
            "with the column of their weights, or 'NAME@TABLE' for the ids of another feature's "
            "table"
        )
    return Feature(
        found["name"], 0 if kind == "exact" else rows, int(found["length"] or 1),
        found["table"] or "", found["weights"] or "", 2 if kind == "double" else 1,
    )  # fmt: skip


def problems(schema: Schema) -> Iterator[str]:
    """What is wrong with the columns of a schema together."""
    names = [*schema.dense, *(feature.name for feature in schema.features)]
    names += [feature.weights for feature in schema.features if feature.weights]
    for name, count in collections.Counter(names).items():
        if count > 1:
            yield f"data.records: the column {name!r} is named {count} times: name it once"
    if not schema.features:
        yield "data.records.features: a record has no features: name at least one"
    for feature in schema.features:
        if feature.hashes > 1 and not feature.rows:
            yield (
                f"data.records: the feature {feature.name!r} has two hashes of ids of 64 bits: "
                "give it rows, or one hash"
            )
        if schema.tables[feature.table_name] != feature.rows:
            yield (
                f"data.records.features: those of the table {feature.table_name!r} have different "
                f"numbers of rows, {feature.rows} and {schema.tables[feature.table_name]}: give "
                "them the same"
            )
    width = len(schema.dense) + schema.num_ids + schema.num_weights
    if width > MAX_COLUMNS:
        yield (
            f"data.records: a record has {width:,} numbers and ids, above the {MAX_COLUMNS:,} "
            "that are read: name fewer features, or shorter ones"
        )


def _slices(sizes: Mapping[str, int]) -> dict[str, slice]:
    """Where each feature is, side by side."""
    bounds = np.cumsum([0, *sizes.values()]).tolist()
    starts = zip(sizes, bounds[:-1], bounds[1:], strict=True)
    return {name: slice(low, high) for name, low, high in starts}


def no_weights(num_records: int) -> np.ndarray:
    """Those of records whose ids have none."""
    return np.zeros((num_records, 0), np.float32)


def concatenated(chunks: Sequence[Chunk]) -> Chunk:
    """The records of all chunks, in order."""
    return Chunk(*(np.concatenate(parts) for parts in zip(*chunks, strict=True)))

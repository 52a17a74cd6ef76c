"""Records in Parquet files: a column for the label, for each number and for each feature.

The label is 0 or 1, or true or false. Whole numbers are counts, of which ln(1 + x) is taken as of
the other format's; floats are taken as they are. A category is a whole number, which is the row
itself, or a text, whose row is its hash; a feature of several ids is a list of these. Missing
values, and empty texts, are 0, or no id.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from llmx.data import opening
from llmx.data.records import hashing
from llmx.data.records.schema import MAX_ROWS, NONE, Chunk, Feature, Schema
from llmx.data.records.tsv import of_counts

BATCH_RECORDS = 1 << 16


def read(path: str, schema: Schema, *, label: str, start: int = 0) -> Iterator[tuple[Chunk, int]]:
    """The records of a file from record `start` on, and the number of the next, some at a time.

    Raises ValueError, naming file, column and record, for what cannot be used.
    """
    import pyarrow
    from pyarrow import parquet

    with opening.open_random(path) as file:
        try:
            opened = parquet.ParquetFile(file)
            names = _columns(schema, label)
            _check_columns(path, opened.schema_arrow.names, names)
            first = 0
            for group in range(opened.num_row_groups):
                after = first + opened.metadata.row_group(group).num_rows
                if after > start:
                    yield from _groups(opened, group, path, schema, label, first, start)
                first = after
        except pyarrow.ArrowException as error:
            raise ValueError(
                f"{path} cannot be read as Parquet ({error}): copy or write it again"
            ) from error


def _columns(schema: Schema, label: str) -> list[str]:
    weights = (feature.weights for feature in schema.features if feature.weights)
    return [label, *schema.dense, *(feature.name for feature in schema.features), *weights]


def _check_columns(path: str, there: list[str], names: list[str]) -> None:
    if missing := [name for name in names if name not in there]:
        raise ValueError(
            f"{path} has no column {missing[0]!r}, but {', '.join(there[:50])}: set "
            "data.records.label, data.records.dense and data.records.features to names of these"
        )
    if twice := [name for name in names if there.count(name) > 1]:
        raise ValueError(f"{path} has the column {twice[0]!r} more than once: rename one")


def _groups(
    opened: Any, group: int, path: str, schema: Schema, label: str, first: int, start: int
) -> Iterator[tuple[Chunk, int]]:
    """The records of a row group from record `start` of the file on."""
    names = _columns(schema, label)
    for batch in opened.iter_batches(BATCH_RECORDS, row_groups=[group], columns=names):
        after = first + len(batch)
        if after > start:
            left = max(start - first, 0)
            yield _chunk(batch.slice(left), path, schema, label, first + left), after
        first = after


def _chunk(batch: Any, path: str, schema: Schema, label: str, first: int) -> Chunk:
    """`first`: the number of the batch's first record in the file."""
    place = f"{path} record {{}} column {{!r}}"
    labels = _labels(batch.column(label), label, place, first)
    dense = np.zeros((len(batch), len(schema.dense)), np.float32)
    for at, name in enumerate(schema.dense):
        dense[:, at] = _numbers(batch.column(name), name, place, first)
    ids = np.full((len(batch), schema.num_ids), NONE, schema.ids_dtype)
    for feature in schema.features:
        ids[:, schema.slices[feature.name]] = _ids(
            batch.column(feature.name), feature, place, first
        )
    weights = np.zeros((len(batch), schema.num_weights), np.float32)
    for feature in schema.features:
        if feature.weights:
            weights[:, schema.weight_slices[feature.name]] = _weights(
                batch.column(feature.weights), batch.column(feature.name), feature, place, first
            )
    return Chunk(labels, dense, ids, weights)


def _labels(column: Any, name: str, place: str, first: int) -> np.ndarray:
    import pyarrow

    kind = column.type
    if pyarrow.types.is_boolean(kind):
        column = column.cast(pyarrow.int8())
    elif not (pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind)):
        raise ValueError(
            f"{place.format(first, name)} is of type {kind}: a label is a number, 0 or 1"
        )
    values = column.cast(pyarrow.float64(), safe=False).fill_null(float("nan")).to_numpy()
    if (wrong := ~np.isin(values, (0, 1))).any():
        at = int(np.argmax(wrong))
        shown = column[at].as_py()
        raise ValueError(
            f"{place.format(first + at, name)} is {shown!r}, not 0 or 1: leave such records out of "
            "the file, or set data.records.label to another column"
        )
    return values.astype(np.uint8)


def _numbers(column: Any, name: str, place: str, first: int) -> np.ndarray:
    import pyarrow

    kind = column.type
    if pyarrow.types.is_integer(kind) or pyarrow.types.is_null(kind):
        return of_counts(column.cast(pyarrow.float64(), safe=False).fill_null(0).to_numpy())
    if not pyarrow.types.is_floating(kind):
        raise ValueError(
            f"{place.format(first, name)} is of type {kind}, no number: name it in "
            "data.records.features, or leave it out of data.records.dense"
        )
    values = column.cast(pyarrow.float64()).fill_null(0).to_numpy()
    with np.errstate(over="ignore"):  # is infinite then
        values = values.astype(np.float32)
    if (wrong := ~np.isfinite(values)).any():
        at = int(np.argmax(wrong))
        raise ValueError(
            f"{place.format(first + at, name)} is {column[at].as_py()}, not a finite number of 32 "
            "bits: write a blank (null) where there is none"
        )
    return values


def _ids(column: Any, feature: Feature, place: str, first: int) -> np.ndarray:
    """Ids [B, length x hashes] of a column of values or of lists of them."""
    import pyarrow

    kind = column.type
    is_list = pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind)
    shape = (len(column), feature.length, feature.hashes)
    found = np.full(shape, NONE, np.int32 if feature.rows else np.int64)
    if not is_list:
        found[:, 0] = _flat_ids(column, feature, place, first, None)
        return found.reshape(len(found), -1)
    lengths = column.value_lengths().fill_null(0).to_numpy()
    if len(lengths) and lengths.max() > feature.length:
        at = int(np.argmax(lengths))
        raise ValueError(
            f"{place.format(first + at, feature.name)} has {lengths[at]:,} ids, more than the "
            f"{feature.length} of the feature: write '{feature.name}:{lengths[at]}' in "
            "data.records.features, or shorten the lists"
        )
    records = np.repeat(np.arange(len(column)), lengths)
    ends = np.cumsum(lengths)
    positions = np.arange(len(records)) - np.repeat(ends - lengths, lengths)
    found[records, positions] = _flat_ids(column.flatten(), feature, place, first, records)
    return found.reshape(len(found), -1)


def _weights(column: Any, ids: Any, feature: Feature, place: str, first: int) -> np.ndarray:
    """Weights [B, length] of the ids that a column has, 0 where there is none."""
    import pyarrow

    is_list = lambda one: hasattr(one, "value_lengths")  # noqa: E731
    found = np.zeros((len(column), feature.length), np.float32)
    if is_list(ids) != is_list(column):
        raise ValueError(
            f"{place.format(first, feature.weights)} is of type {column.type}, and its ids "
            f"{feature.name!r} of {ids.type}: write a weight for each id, in lists where ids are"
        )
    records, positions, of_ids = np.arange(len(column)), 0, ids
    if is_list(column):
        lengths, wanted = (one.value_lengths().fill_null(0).to_numpy() for one in (column, ids))
        if (wrong := lengths != wanted).any():
            at = int(np.argmax(wrong))
            raise ValueError(
                f"{place.format(first + at, feature.weights)} has {lengths[at]} weights, and "
                f"{feature.name!r} {wanted[at]} ids: write a weight for each id"
            )
        records = np.repeat(records, lengths)
        positions = np.arange(len(records)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        column, of_ids = column.flatten(), ids.flatten()
    kind = column.type
    if not (pyarrow.types.is_floating(kind) or pyarrow.types.is_integer(kind)):
        raise ValueError(f"{place.format(first, feature.weights)} is of type {kind}, no number")
    there = of_ids.is_valid().to_numpy(zero_copy_only=False)
    values = column.cast(pyarrow.float64(), safe=False).fill_null(-1).to_numpy()
    fits = (values >= 0) & (values <= np.finfo(np.float32).max)  # neither is nan
    if (wrong := there & ~fits).any():
        at = int(np.argmax(wrong))
        raise ValueError(
            f"{place.format(first + int(records[at]), feature.weights)} is {column[at].as_py()}, "
            "and the weight of an id is a finite number, 0 or more: write 1 where there is none"
        )
    found[records, positions] = np.where(there, values, 0)
    return found


def _flat_ids(
    column: Any, feature: Feature, place: str, first: int, records: np.ndarray | None
) -> np.ndarray:
    """Ids of values, [n, hashes]; `records`: the record of each, by default its own."""
    import pyarrow

    kind = column.type
    if pyarrow.types.is_dictionary(kind):
        column = column.dictionary_decode()
        kind = column.type
    if str(kind) == "string_view":  # a type that pyarrow has since 16
        column, kind = column.cast(pyarrow.large_string()), pyarrow.large_string()
    if pyarrow.types.is_null(kind):
        return np.full((len(column), feature.hashes), NONE, np.int32)
    if pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind):
        return _hashed(column, feature, place, first, records)
    if not pyarrow.types.is_integer(kind):
        raise ValueError(
            f"{place.format(first, feature.name)} is of type {kind}, and ids are whole numbers or "
            "texts, or lists of them: write it as one of these; numbers are for data.records.dense"
        )
    valid = column.is_valid().to_numpy(zero_copy_only=False)
    values = column.fill_null(0).to_numpy()
    if feature.hashes > 1:
        return np.where(valid[:, None], hashing.of_numbers(values, feature), NONE)
    if (wrong := valid & ((values < 0) | (values >= (feature.rows or 2**63)))).any():
        at = int(np.argmax(wrong))
        record = first + (at if records is None else int(records[at]))
        more = "set data.records.ids='double', which takes any, or " if feature.rows else ""
        if 0 <= values[at] < MAX_ROWS and feature.rows:
            more = f"raise data.records.rows={feature.rows}, or "
        raise ValueError(
            f"{place.format(record, feature.name)} is the id {values[at]}, and the feature has ids "
            f"from 0 to {(feature.rows or 2**63) - 1}: {more}write it as text, which is hashed"
        )
    return np.where(valid, values.astype(np.int32 if feature.rows else np.int64), NONE)[:, None]


def _hashed(
    column: Any, feature: Feature, place: str, first: int, records: np.ndarray | None
) -> np.ndarray:
    import pyarrow
    from pyarrow import compute

    encoded = column.dictionary_encode()
    lengths = compute.binary_length(encoded.dictionary)
    if len(lengths) and (longest := compute.max(lengths).as_py()) > hashing.MAX_BYTES:
        code = lengths.index(longest).as_py()
        at = encoded.indices.index(code).as_py()
        record = first + (at if records is None else int(records[at]))
        raise ValueError(
            f"{place.format(record, feature.name)} is a text of {longest:,} bytes, and a category "
            f"has at most {hashing.MAX_BYTES}: shorten it, or leave the column out of "
            "data.records.features"
        )
    texts = encoded.dictionary.cast(pyarrow.binary()).to_pylist() or [b""]
    texts = np.array(texts, dtype=bytes)
    found = hashing.of_texts(texts, feature)
    found[texts == b""] = NONE  # a blank
    positions = encoded.indices.fill_null(0).to_numpy()
    there = column.is_valid().to_numpy(zero_copy_only=False)
    return np.where(there[:, None], found[positions], NONE)

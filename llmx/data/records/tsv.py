"""Lines of Criteo's display advertising challenge: tab-separated, without a header.

A line is a label (0 or 1), then whole numbers, then categories of up to 8 hexadecimal digits; any
but the label may be blank. The format is at
https://www.kaggle.com/c/criteo-display-ad-challenge/data; files may be compressed (`opening`).

pyarrow reads whole blocks of lines. Where it refuses a block, its lines are looked at one by one.
"""

import dataclasses
import io
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from llmx.data import opening
from llmx.data.records import hashing
from llmx.data.records.schema import NONE, Chunk, Feature, Schema, no_weights

BLOCK_BYTES = 8 << 20
MAX_LINE_BYTES = 1 << 20
_LABEL = re.compile(rb"[01]")
_NUMBER = re.compile(rb"(-?[0-9]+)?")
_LARGEST = 2**63 - 1  # of a number's magnitude
_CATEGORY = re.compile(rb"([0-9a-fA-F]{1,8})?")
_IS_HEX = np.isin(np.arange(256), list(b"0123456789abcdefABCDEF"))
# Of lines. pyarrow would take " 5", "+5" and "0x1F" for numbers.
_IS_KNOWN = _IS_HEX | np.isin(np.arange(256), list(b"-\t\r\n"))


class Block(NamedTuple):
    """What was read at once, and where reading goes on."""

    chunk: Chunk
    offset: int  # bytes of the (decompressed) file before the next line
    lines: int  # lines before it
    skipped: int  # lines left out


@dataclasses.dataclass(frozen=True)
class _Lines:
    path: str
    schema: Schema
    skip_bad: bool

    @property
    def num_columns(self) -> int:
        return 1 + len(self.schema.dense) + len(self.schema.features)


def read(
    path: str, schema: Schema, *, skip_bad: bool = False, offset: int = 0, lines: int = 0
) -> Iterator[Block]:
    """The records of a file from a line on, which begins at the byte `offset`.

    Raises ValueError, naming file, line and column, for a line that is not of the format; with
    `skip_bad` it is left out.
    """
    reader = _Lines(path, schema, skip_bad)
    with opening.open_at(path, offset) as file:
        for block in _blocks(file, path, offset, lines):
            chunk = _chunk(reader, block, lines)
            number = block.count(b"\n") + (not block.endswith(b"\n"))
            offset, lines = offset + len(block), lines + number
            yield Block(chunk, offset, lines, number - len(chunk.labels))


def _blocks(file: Any, path: str, offset: int, lines: int) -> Iterator[bytes]:
    """Whole lines, some at a time; the last may be without its end. Blocks are the same wherever
    reading begins: each ends with the last line before a multiple of `BLOCK_BYTES`."""
    rest, size = b"", BLOCK_BYTES + -offset % BLOCK_BYTES
    while raw := _full(file, size):
        size = BLOCK_BYTES
        end = raw.rfind(b"\n") + 1
        if end:
            block = rest + raw[:end]
            lines += block.count(b"\n")
            yield block
        rest = raw[end:] if end else rest + raw
        if len(rest) > BLOCK_BYTES:
            raise ValueError(
                f"{path} line {lines + 1}: it has more than {MAX_LINE_BYTES:,} bytes: check that "
                "the file is text of tab-separated lines"
            )
    if rest:
        yield rest


def _full(file: Any, size: int) -> bytes:
    """As many bytes, or all that there are; a compressed file may return fewer at once."""
    parts = []
    while size and (part := file.read(size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _chunk(reader: _Lines, block: bytes, lines: int) -> Chunk:
    """The records of a block, whose first line is number `lines` + 1."""
    import pyarrow

    try:
        found, wrong = _parse(reader.schema, block), None
    except (pyarrow.ArrowInvalid, _Refused) as error:
        wrong = error
    if wrong is None:
        return found
    good = _good_lines(reader, block, lines)
    return _parse(reader.schema, b"".join(good)) if good else _empty(reader.schema)


class _Refused(Exception):
    """A block holds a label or a category that is none."""


def _parse(schema: Schema, block: bytes) -> Chunk:
    """The records of a block. Raises ArrowInvalid or _Refused for lines of another format."""
    import pyarrow
    from pyarrow import csv

    names = ["label", *(f"dense {at}" for at in range(len(schema.dense)))]
    names += [f"feature {at}" for at in range(len(schema.features))]
    if not _IS_KNOWN[np.frombuffer(block, np.uint8)].all():
        raise _Refused
    whole, text = pyarrow.int64(), pyarrow.binary()
    types = [text] + [whole] * len(schema.dense) + [text] * len(schema.features)
    table = csv.read_csv(
        io.BytesIO(block),
        csv.ReadOptions(column_names=names, use_threads=False, block_size=len(block) + 1),
        csv.ParseOptions(
            delimiter="\t", quote_char=False, double_quote=False, ignore_empty_lines=False
        ),
        csv.ConvertOptions(
            column_types=dict(zip(names, types, strict=True)), null_values=[""],
            strings_can_be_null=True,
        ),
    )  # fmt: skip
    columns = [column.combine_chunks() for column in table.columns]
    labels, *rest = columns
    labels = labels.dictionary_encode()
    known = labels.dictionary.to_pylist()
    if labels.null_count or not {*known} <= {b"0", b"1"}:
        raise _Refused
    labels = np.array([int(one) for one in known], np.uint8)[labels.indices.to_numpy()]
    dense = np.zeros((len(labels), len(schema.dense)), np.float32)
    for at, column in enumerate(rest[: len(schema.dense)]):
        numbers = column.fill_null(0).to_numpy()
        if numbers.size and numbers.min() < -_LARGEST:
            raise _Refused
        dense[:, at] = of_counts(numbers)
    ids = np.empty((len(labels), schema.num_ids), schema.ids_dtype)
    for feature, column in zip(schema.features, rest[len(schema.dense) :], strict=True):
        ids[:, schema.slices[feature.name]] = of_categories(column, feature)
    return Chunk(labels, dense, ids, no_weights(len(ids)))


def of_counts(numbers: np.ndarray) -> np.ndarray:
    """ln(1 + x) of counts, in fp32; those below 0 as 0 (DLRM's own preparation of the data)."""
    return np.log1p(np.maximum(numbers, 0).astype(np.float64)).astype(np.float32)


def of_categories(column: Any, feature: Feature) -> np.ndarray:
    """The ids of a column of hexadecimal categories, [B, hashes], NONE for blanks."""
    encoded = column.dictionary_encode()
    texts = np.array(encoded.dictionary.to_pylist() or [b""], dtype=bytes)
    bytes_nw = texts.view(np.uint8).reshape(len(texts), -1)
    lengths = np.char.str_len(texts)
    inside = np.arange(bytes_nw.shape[1]) < lengths[:, None]
    if lengths.max() > 8 or not (_IS_HEX[bytes_nw] | ~inside).all():
        raise _Refused
    found = hashing.of_texts(texts, feature)
    positions = encoded.indices.fill_null(0).to_numpy()
    there = encoded.is_valid().to_numpy(zero_copy_only=False)
    return np.where(there[:, None], found[positions], NONE)


def _good_lines(reader: _Lines, block: bytes, lines: int) -> list[bytes]:
    """The lines of a block that are of the format. Raises ValueError for others, unless they are
    left out."""
    good = []
    for number, line in enumerate(block.split(b"\n"), lines + 1):
        if line == b"" and number == lines + 1 + block.count(b"\n"):
            break  # behind the last line's end
        if problem := _problem(reader, line.removesuffix(b"\r")):
            if not reader.skip_bad:
                raise ValueError(
                    f"{reader.path} line {number}: {problem}, or set data.skip_bad=True to leave "
                    "such lines out"
                )
            continue
        good.append(line + b"\n")
    return good


def _problem(reader: _Lines, line: bytes) -> str:
    """What is wrong with a line; "" = nothing."""
    columns = line.split(b"\t")
    if len(line) > MAX_LINE_BYTES:
        return f"it has {len(line):,} bytes, more than {MAX_LINE_BYTES:,}: mend the line"
    if len(columns) != reader.num_columns:
        return (
            f"it has {len(columns)} columns, not {reader.num_columns} (label, "
            f"{len(reader.schema.dense)} numbers, {len(reader.schema.features)} categories), "
            "separated by tabs: mend the line, or name the columns that there are in "
            "data.records.dense and data.records.features"
        )
    num_dense = len(reader.schema.dense)
    names = ["label", *reader.schema.dense, *(one.name for one in reader.schema.features)]
    for at, (name, value) in enumerate(zip(names, columns, strict=True)):
        pattern, what = _FORMS[(at > 0) + (at > num_dense)]
        shown = value[:40].decode(errors="backslashreplace")
        if not pattern.fullmatch(value):
            return f"column {at + 1} ({name}) is {shown!r}, not {what}: mend the line"
        if 0 < at <= num_dense and _is_too_large(value):
            return (
                f"column {at + 1} ({name}) is {shown!r}, which has more than 63 bits: mend the line"
            )
    return ""


def _is_too_large(number: bytes) -> bool:
    digits = number.lstrip(b"-").lstrip(b"0")
    return len(digits) > 19 or int(digits or b"0") > _LARGEST


_FORMS: Sequence[tuple[re.Pattern, str]] = (
    (_LABEL, "0 or 1"),
    (_NUMBER, "a whole number or blank"),
    (_CATEGORY, "up to 8 hexadecimal digits or blank"),
)


def _empty(schema: Schema) -> Chunk:
    return Chunk(
        np.zeros(0, np.uint8),
        np.zeros((0, len(schema.dense)), np.float32),
        np.zeros((0, schema.num_ids), schema.ids_dtype),
        no_weights(0),
    )

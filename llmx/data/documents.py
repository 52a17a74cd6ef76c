"""The documents in the files of a source, in a fixed order, from any position on.

A document is UTF-8 bytes: a text file, cut at line ends where it is longer than MAX_PIECE_BYTES, a
JSONL record, a row of Parquet or Arrow, or a record of ArrayRecord. Every error names the file and
the line, byte or row; bytes of a compressed file are those of its text. What a file makes this
program hold in memory is bounded: see MAX_RECORD_BYTES.
"""

import bisect
import collections
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO

from llmx.data import (
    array_records,
    arrow_files,
    json_files,
    opening,
    parquet_pages,
    template_process,
    transient,
)
from llmx.data.sources import InputFile

MAX_PIECE_BYTES = 1 << 20
# Of a JSONL line, or of the text in a Parquet row.
MAX_RECORD_BYTES = 64 << 20
_SMALL_CHUNK_BYTES = 32 << 20  # Parquet column chunks whose dictionary is kept as one
_BATCH_BYTES = 16 << 20  # of Parquet rows that are decoded together
_MAX_PAGE_BYTES = 256 << 20  # of a Parquet page, decompressed, where the file itself is small
_MAX_CONTROLS = 0.3  # share of control characters; binary content has more (perlfunc's -B)
# ASCII without tab, newline, vertical tab, form feed, return.
_CONTROLS = bytes({*range(32), 127} - {9, 10, 11, 12, 13})
_BOM = b"\xef\xbb\xbf"


@dataclasses.dataclass(frozen=True)
class Position:
    """Where reading continues: a file, its byte (row in tables), and the records before it."""

    file: int = 0
    offset: int = 0
    record: int = 0


# From a record to the bytes that identify it, and what is encoded of it. Raises ValueError.
Render = Callable[[dict], tuple[bytes, Any]]


@dataclasses.dataclass(frozen=True)
class Document:
    """The text of one document and the position after it."""

    text: bytes
    end: Position
    # `chat.Rendered` or `pairs.RenderedPair`, which `text` identifies; None = the text itself
    chat: Any = None


class _BadText(ValueError):
    """Text that cannot be used: its kind, what to do about it, and what `skip_bad` leaves out."""

    def __init__(self, kind: str, message: str, what: str):
        remedy = f"set data.skip_bad=True (--skip-bad) to leave such {what} out"
        super().__init__(f"{message}, or {remedy}")
        self.kind = kind


@dataclasses.dataclass(frozen=True)
class _Skips:
    """Raises for bad text, or counts it where it may be left out."""

    skip_bad: bool
    counts: collections.Counter

    def text(self, read: Callable[..., bytes], *args: Any) -> bytes:
        """What `read` returns, b"" where it finds bad text that is left out."""
        try:
            return read(*args)
        except _BadText as error:
            self.bad(error)
            return b""

    def bad(self, error: _BadText) -> None:
        """Raises or counts an error."""
        if not self.skip_bad:
            raise error
        self.counts[error.kind] += 1

    def empty(self, path: str, holds: str) -> None:
        """Raises or counts a file without text."""
        self.bad(_BadText("empty", f"{path}: the file is empty ({holds}): remove it", "files"))


def read_documents(
    files: Sequence[InputFile], *, text_key: str, skip_bad: bool, start: Position = Position(),
    skipped: collections.Counter, render: Render | None = None,
) -> Iterator[Document]:  # fmt: skip
    """Documents from a position on. `skipped` counts what was left out, by kind.

    render: reads the records as conversations or pairs of them, of JSONL only.
    """
    skips = _Skips(skip_bad, skipped)
    for index, file in enumerate(files[start.file :], start.file):
        begin = start if index == start.file else Position(file=index)
        try:
            if opening.status(file.path).num_bytes == 0:
                skips.empty(file.path, "0 bytes")
                continue
            if render and file.kind != "jsonl":
                raise ValueError(
                    f"{file.path}: conversations are read from .jsonl and .ndjson only: write one "
                    "a line, or name it as a source of a run with data.format='text'"
                )
            if file.kind == "parquet":
                yield from _parquet_documents(file.path, begin, text_key, skips)
            elif file.kind == "arrow":
                yield from _arrow_documents(file.path, begin, text_key, skips)
            elif file.kind == "array_record":
                yield from _array_record_documents(file.path, begin, text_key, skips)
            elif file.kind == "jsonl":
                yield from _jsonl_documents(file.path, begin, text_key, skips, render)
            else:
                yield from _text_documents(file.path, begin, skips)
        except template_process.Ended:  # that says nothing of the file
            raise
        except OSError as error:
            remedy = "check that it exists and that this user may read it"
            raise transient.refusal(f"{file.path}: cannot be read", error, remedy) from error


def _check_utf8(path: str, raw: bytes, offset: int, line: int, what: str) -> bytes:
    """`raw`, which starts at that offset and line of the file, without a byte-order mark."""
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line += raw.count(b"\n", 0, error.start)
        message = (
            f"{path}: line {line}, byte {offset + error.start}: 0x{raw[error.start]:02x} is not "
            f"valid UTF-8 ({error.reason}): convert the file (iconv -f ENCODING -t UTF-8)"
        )
        raise _BadText("bad UTF-8", message, what) from error
    return raw.removeprefix(_BOM) if offset == 0 else raw


def _find_nul(path: str, file: BinaryIO) -> _BadText | None:
    """The error of a text file with a NUL byte: such a file is binary as a whole."""
    offset = 0
    while block := file.read(MAX_PIECE_BYTES):
        if (at := block.find(0)) >= 0:
            message = (
                f"{path}: byte {offset + at} is NUL: the file is binary, damaged, or text in "
                "UTF-16 or UTF-32: remove it, or convert it (iconv -f UTF-16 -t UTF-8)"
            )
            return _BadText("binary", message, "files")
        offset += len(block)
    return None


def _check_controls(text: bytes, where: str, what: str) -> bytes:
    """`text`, unless so many of its bytes are control characters that it must be binary."""
    num_controls = len(text) - len(text.translate(None, _CONTROLS))
    if num_controls > _MAX_CONTROLS * len(text):
        message = (
            f"{where}: {num_controls} of {len(text)} bytes are NUL or other control characters, "
            f"above {_MAX_CONTROLS:.0%}: this is binary content, not text: remove it"
        )
        raise _BadText("binary", message, what)
    return text


def _text_of_piece(path: str, raw: bytes, offset: int, line: int) -> bytes:
    text = _check_utf8(path, raw, offset, line, "text")
    return _check_controls(text, f"{path}: from byte {offset} on", "text")


def _cut(raw: bytes) -> int:
    """Where a piece that is not the end of its file ends: after a line, else after a character."""
    if newline := raw.rfind(b"\n") + 1:
        return newline
    for end in range(len(raw) - 1, max(len(raw) - 4, 0), -1):
        if raw[end] & 0xC0 != 0x80:
            return end
    return len(raw)


def _text_documents(path: str, start: Position, skips: _Skips) -> Iterator[Document]:
    offset, lines = start.offset, start.record
    if offset == 0:
        with opening.open_at(path) as file:
            if binary := _find_nul(path, file):
                return skips.bad(binary)
    with opening.open_at(path, offset) as file:
        carried = b""
        while True:
            carried += file.read(MAX_PIECE_BYTES + 1 - len(carried))
            if not carried:
                if offset == 0:
                    skips.empty(path, "0 bytes when decompressed")
                return
            last = len(carried) <= MAX_PIECE_BYTES
            end = len(carried) if last else _cut(carried[:MAX_PIECE_BYTES])
            raw, carried = carried[:end], carried[end:]
            if offset == 0 and raw == _BOM:
                skips.empty(path, "a byte-order mark alone")
            text = skips.text(_text_of_piece, path, raw, offset, lines + 1)
            offset += len(raw)
            lines += raw.count(b"\n")
            if text:
                after = Position(start.file + 1) if last else Position(start.file, offset, lines)
                yield Document(text, after)
            if last:
                return


def _jsonl_documents(
    path: str, start: Position, text_key: str, skips: _Skips, render: Render | None
) -> Iterator[Document]:
    offset, number = start.offset, start.record
    rendered: list = []  # of the line, where it is a conversation or a pair

    def read(record: dict, where: str) -> bytes:
        if render is None:
            return _text_of(record, where, text_key)
        try:
            text, *rendered[:] = render(record)
        except RecursionError as error:
            message = f"{where}: lists or objects that are nested too deep: write flatter ones"
            raise _BadText("no conversation", message, "lines") from error
        except ValueError as error:
            raise _BadText("no conversation", f"{where}: {error}", "lines") from error
        return text

    blank = offset == 0
    with opening.open_at(path, offset) as file:
        while raw := file.readline(MAX_RECORD_BYTES + 1):
            number += 1
            length = len(raw)
            if length > MAX_RECORD_BYTES:
                skips.bad(_too_long(f"{path}: line {number} (byte {offset})", "line", "lines"))
                raw, more = b"-", raw
                while more and not more.endswith(b"\n"):
                    more = file.readline(1 << 20)
                    length += len(more)
                text = b""
            else:
                text = skips.text(_jsonl_text, path, raw, offset, number, read)
            blank = blank and not raw.removeprefix(_BOM if number == 1 else b"").strip()
            offset += length
            if text:
                yield Document(text, Position(start.file, offset, number), *rendered)
    if blank:
        skips.empty(path, f"{number} blank lines, no record")


def _jsonl_text(
    path: str, raw: bytes, offset: int, number: int, read: Callable[[dict, str], bytes]
) -> bytes:
    """What `read` makes of the record of one line, b"" for a blank one. Raises _BadText."""
    where = f"{path}: line {number}"
    if (nul := raw.find(0)) >= 0:
        message = (
            f"{where}, byte {offset + nul} is NUL: the file is damaged or binary: fix the line"
        )
        raise _BadText("binary", message, "lines")
    line = _check_utf8(path, raw, offset, number, "lines")
    if not line.strip():
        return b""
    if len(line) > MAX_PIECE_BYTES and (problem := json_files.too_many_values(line)):
        message = f"{where} (byte {offset}) has {problem}: write the text alone"
        raise _BadText("too long", message, "lines")
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        cut = "" if raw.endswith(b"\n") else "; the file's last line is cut off"
        message = f"{where} (byte {offset}): malformed JSON ({error}{cut}): write one JSON object"
        raise _BadText("malformed", message, "lines") from error
    if not isinstance(record, dict):
        kind = type(record).__name__
        message = f"{where}: a JSON {kind} in place of an object: write one JSON object"
        raise _BadText("malformed", message, "lines")
    return read(record, where)


def _text_of(record: dict, where: str, text_key: str) -> bytes:
    """The text of a record. Raises _BadText."""
    if text_key not in record:
        names = ", ".join(map(repr, list(record)[:10])) or "none"
        message = (
            f"{where}: no key {text_key!r} in the record (its keys: {names}): set data.text_key "
            "(--text-key) to the one that holds the text"
        )
        raise _BadText("without text", message, "lines")
    return _record_text(record[text_key], f"{where}: key {text_key!r}")


def _too_long(where: str, what: str, unit: str) -> _BadText:
    message = (
        f"{where}: a {what} of more than {MAX_RECORD_BYTES:,} bytes: write it as several records, "
        "or as a text file"
    )
    return _BadText("too long", message, unit)


def _record_text(value: object, where: str) -> bytes:
    """The UTF-8 bytes of a record's text. Raises _BadText where it has none."""
    if not isinstance(value, str):
        kind = "null" if value is None else type(value).__name__
        message = f"{where} is {kind}, not a string: fix the record"
        raise _BadText("without text", message, "records")
    if not value:
        raise _BadText("empty", f"{where} is an empty string: remove the record", "records")
    try:
        return _check_controls(value.encode("utf-8"), where, "records")
    except UnicodeEncodeError as error:
        message = (
            f"{where} has the lone surrogate {value[error.start]!r} at character {error.start}, "
            "which is not valid UTF-8: fix the record"
        )
        raise _BadText("bad UTF-8", message, "records") from error


def _parquet_documents(
    path: str, start: Position, text_key: str, skips: _Skips
) -> Iterator[Document]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ValueError(f"{path}: reading Parquet needs pyarrow: pip install pyarrow") from error
    try:
        with opening.open_random(path) as raw, parquet.ParquetFile(raw) as file:
            metadata, column = file.metadata, _parquet_column(path, file, text_key)
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        decoding = _decoding(path, [group.column(column) for group in groups], metadata.num_rows)
        with opening.open_random(path) as raw, parquet.ParquetFile(
            raw, metadata=metadata, buffer_size=1 << 20, pre_buffer=False,
            read_dictionary=[text_key] if decoding.dictionary else None,
        ) as file:  # fmt: skip
            if file.metadata.num_rows == 0:
                skips.empty(path, "0 rows")
            ends = [0, *itertools.accumulate(group.num_rows for group in groups)]
            read = bisect.bisect_right(ends, start.offset) - 1  # groups that are read already
            batches = file.iter_batches(
                batch_size=decoding.rows, row_groups=range(read, len(groups)),
                columns=[text_key], use_threads=False,
            )  # fmt: skip
            # One by one: rows of a dictionary can hold one large value many times.
            values = (value for batch in batches for value in batch.column(0))
            for row, value in enumerate(values, ends[read] + 1):
                if row <= start.offset:
                    continue
                text = skips.text(_parquet_text, value, f"{path}: row {row}", text_key)
                if text:
                    yield Document(text, Position(start.file, row, row))
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError, OverflowError) as error:
        if transient.is_of_access(error):
            raise
        raise ValueError(
            f"{path}: not readable as Parquet ({error}): the file is damaged or cut off; write it "
            "again"
        ) from error


@dataclasses.dataclass(frozen=True)
class _Decoding:
    """How a Parquet column is decoded, so that little of it is in memory at once."""

    rows: int  # in a batch
    dictionary: bool  # keep the values of a dictionary single, however many rows have them


def _decoding(path: str, columns: Sequence[Any], num_rows: int) -> _Decoding:
    """Raises ValueError where a page would take much more memory than the file has bytes."""
    sizes = [column.total_uncompressed_size for column in columns]
    rows = max(min(1024, _BATCH_BYTES * num_rows // max(sum(sizes), 1)), 1)
    # What a value adds to the one before it: pyarrow makes no dictionary of such values, and each
    # may be as large as all that is stored.
    delta = any(name.startswith("DELTA") for column in columns for name in column.encodings)
    if delta:
        rows = max(min(rows, _MAX_PAGE_BYTES // max(*sizes, 1)), 1)
    if max(sizes, default=0) <= _SMALL_CHUNK_BYTES:
        return _Decoding(rows, dictionary=not delta)
    most = max(_MAX_PAGE_BYTES, 2 * opening.status(path).num_bytes)
    with opening.open_random(path) as file:
        for group, (column, size) in enumerate(zip(columns, sizes, strict=True)):
            pages = parquet_pages.sizes(file, column)
            try:
                page = next(pages, 0)
                if column.has_dictionary_page:  # at most: every row of a batch is the largest value
                    rows = max(min(rows, _MAX_PAGE_BYTES // max(page, 1)), 1)
                page = max([page, *pages]) if size > most else page
            except ValueError as error:
                raise OSError(error) from error
            if page > most:
                raise ValueError(
                    f"{path}: row group {group} has a page of {page:,} bytes, above the {most:,} "
                    "that a file of this size may decompress to: write it with smaller pages "
                    "(pyarrow: data_page_size, write_batch_size) or fewer rows in a row group"
                )
    return _Decoding(rows, dictionary=False)


def _parquet_text(value: Any, where: str, text_key: str) -> bytes:
    """The text of one row, a pyarrow scalar. Raises _BadText."""
    value = value.as_py()
    if isinstance(value, str):  # its length in bytes is at least that
        if len(value) > MAX_RECORD_BYTES:
            raise _too_long(where, "text", "rows")
        return _record_text(value, f"{where}: column {text_key!r}")
    return _stored_text(value, where, f"column {text_key!r}", "rows")


def _parquet_column(path: str, file: Any, text_key: str) -> int:
    """The number of the column with the text."""
    arrow_files.check_text_column(path, file.schema_arrow, text_key)
    return next(i for i in range(len(file.schema)) if file.schema.column(i).path == text_key)


def _arrow_documents(
    path: str, start: Position, text_key: str, skips: _Skips
) -> Iterator[Document]:
    row = start.offset
    for value in arrow_files.values(path, row, text_key):
        row += 1
        text = skips.text(_stored_text, value, f"{path}: row {row}", f"column {text_key!r}", "rows")
        if text:
            yield Document(text, Position(start.file, row, row))
    if row == 0:
        skips.empty(path, "0 rows")


def _array_record_documents(
    path: str, start: Position, text_key: str, skips: _Skips
) -> Iterator[Document]:
    number = start.offset
    for record in array_records.values(path, number):
        number += 1
        where = f"{path}: record {number}"
        text = skips.text(_array_record_text, record, where, text_key)
        if text:
            yield Document(text, Position(start.file, number, number))
    if number == 0:
        skips.empty(path, "0 records")


def _array_record_text(record: bytes, where: str, text_key: str) -> bytes:
    """The text of a record, which is text or a serialized example. Raises _BadText."""
    features = array_records.features(record)
    if features is None:
        return _stored_text(record, where, "the text", "records")
    values = features.get(text_key, [])
    if len(values) != 1 or not isinstance(values[0], bytes):
        names = ", ".join(map(repr, sorted(features)[:10]))
        message = (
            f"{where}: no feature {text_key!r} with one string in the example (its features: "
            f"{names}): set data.text_key (--text-key) to the one that holds the text"
        )
        raise _BadText("without text", message, "records")
    return _stored_text(values[0], where, f"feature {text_key!r}", "records")


def _stored_text(
    value: bytes | memoryview | None, where: str, what: str, unit: str
) -> bytes:  # fmt: skip
    """The text of one value of a table. Raises _BadText."""
    if value is None:
        return _record_text(None, f"{where}: {what}")
    if len(value) > MAX_RECORD_BYTES:
        raise _too_long(where, "text", unit)
    try:
        return _record_text(str(value, "utf-8"), f"{where}: {what}")
    except UnicodeDecodeError as error:
        message = f"{where}: byte {error.start} of the text is not valid UTF-8: fix the row"
        raise _BadText("bad UTF-8", message, unit) from error

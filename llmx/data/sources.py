"""Sources of text: which files a source names, and the documents in them, in a fixed order.

A document is UTF-8 bytes: a text file, cut at line ends where it is longer than MAX_PIECE_BYTES, a
JSONL record, or a Parquet row. Every error names the file and the line, byte or row.
"""

import bisect
import collections
import dataclasses
import difflib
import glob
import hashlib
import itertools
import json
import os
import pathlib
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from typing import Any

STDLIB = "stdlib"
SHARDS_PREFIX = "shards:"
STDLIB_BYTES = 10_000_000
MAX_PIECE_BYTES = 1 << 20

KIND_BY_SUFFIX = {
    **dict.fromkeys((".txt", ".text", ".md", ".rst", ".py"), "text"),
    **dict.fromkeys((".jsonl", ".ndjson"), "jsonl"),
    ".parquet": "parquet",
}
_UNREADABLE_SUFFIXES = {
    **dict.fromkeys((".gz", ".bz2", ".xz", ".zst"), "decompress it first"),
    **dict.fromkeys((".zip", ".tar", ".tgz"), "unpack it first"),
    ".json": "write one JSON object per line and name it .jsonl",
    ".arrow": "write it as .parquet or .jsonl",
    ".npy": "write the text as .txt or .jsonl",
}
_STDLIB_EXCLUDED = {
    "__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib",
    "lib2to3", "turtledemo", "ensurepip", "lib-dynload",
}  # fmt: skip
_BOM = b"\xef\xbb\xbf"


@dataclasses.dataclass(frozen=True)
class InputFile:
    """One file of a source, with what tells whether it has changed since."""

    path: str
    kind: str  # "text", "jsonl" or "parquet"
    num_bytes: int
    mtime_ns: int


@dataclasses.dataclass(frozen=True)
class Position:
    """Where reading continues: a file, its byte (row in Parquet), and the records before it."""

    file: int = 0
    offset: int = 0
    record: int = 0


@dataclasses.dataclass(frozen=True)
class Document:
    """The text of one document and the position after it."""

    text: bytes
    end: Position


def problems(source: str) -> list[str]:
    """What is wrong with a source's name, without reading any content."""
    if source == STDLIB:
        root = sysconfig.get_path("stdlib")
        wrong = f"{STDLIB!r}: this Python keeps its library at {root}, which is no folder"
        return [] if os.path.isdir(root) else [wrong]
    if source.startswith(SHARDS_PREFIX):
        return _shards_problems(source)
    path = pathlib.Path(source).expanduser()
    if path.is_dir():
        if any(_walk(path)):
            return []
        seen = sorted({p.suffix or p.name for p in list(path.rglob("*"))[:1000] if p.is_file()})
        holds = f"only {', '.join(seen[:8])}" if seen else "no files at all"
        return [
            f"folder {source!r} has no file of a known kind ({', '.join(KIND_BY_SUFFIX)}) but "
            f"{holds}: name the files by a glob such as {os.path.join(source, '*')!r}"
        ]
    paths = [str(path)] if path.exists() else _glob(path)
    if paths:
        return [text for name in paths[:1000] for text in _suffix_problem(name)][:3]
    if glob.has_magic(source):
        return [
            f"{source!r} matches no file (from {os.getcwd()}): check the pattern; ** goes into "
            "subfolders"
        ]
    siblings = os.listdir(path.parent) if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, [STDLIB, *siblings], n=1)
    hint = f"did you mean {near[0]!r}? Otherwise give" if near else "give"
    return [
        f'{source!r} does not exist (from {os.getcwd()}): {hint} "{STDLIB}", an existing file, '
        f'folder or glob, or "{SHARDS_PREFIX}DIR"'
    ]


def _shards_problems(source: str) -> list[str]:
    folder = pathlib.Path(source[len(SHARDS_PREFIX) :]).expanduser()
    remedy = f"write it with python -m llmx.data --source ... --output {folder}"
    if not folder.is_dir():
        return [f"{source!r}: there is no folder {str(folder)!r}: {remedy}"]
    if (folder / "index.json").is_file():
        return []
    if (folder / "progress.json").is_file():
        return [f"{source!r} is unfinished: run the same python -m llmx.data command again"]
    return [f"{source!r}: folder {str(folder)!r} holds no index.json of token shards: {remedy}"]


def _suffix_problem(name: str) -> list[str]:
    suffix = pathlib.PurePath(name).suffix.lower()
    if suffix in _UNREADABLE_SUFFIXES:
        return [f"{name}: files of kind {suffix} are not read: {_UNREADABLE_SUFFIXES[suffix]}"]
    return []


def _glob(pattern: pathlib.Path) -> list[str]:
    return sorted(filter(os.path.isfile, glob.glob(str(pattern), recursive=True)))


def _walk(root: pathlib.Path) -> Iterator[str]:
    """Files of a known kind below a folder, sorted; hidden ones and bytecode folders left out."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(n for n in subfolders if n[0] != "." and n != "__pycache__")
        for name in sorted(names):
            path = os.path.join(folder, name)
            known = pathlib.PurePath(name).suffix.lower() in KIND_BY_SUFFIX
            if known and name[0] != "." and os.path.isfile(path):
                yield path


def _stdlib_paths() -> list[str]:
    """Python files of the standard library, at most STDLIB_BYTES, the same choice every time."""
    root = sysconfig.get_path("stdlib")
    found = []
    for folder, subfolders, names in os.walk(root):
        kept = (n for n in subfolders if n not in _STDLIB_EXCLUDED and not n.startswith("config-"))
        subfolders[:] = sorted(kept)
        for name in names:
            if name.endswith(".py"):
                path = os.path.join(folder, name)
                found.append((os.path.relpath(path, root), path, os.path.getsize(path)))
    # By a hash of the name, so that the bound drops files evenly and not the end of the alphabet.
    found.sort(key=lambda entry: hashlib.sha256(entry[0].encode()).digest())
    chosen, total = [], 0
    for relative, path, size in found:
        if size > 0 and total + size <= STDLIB_BYTES:
            chosen.append((relative, path))
            total += size
    return [path for _, path in sorted(chosen)]


def list_files(source: str) -> list[InputFile]:
    """The files of a text source in reading order. Raises ValueError when there are none."""
    if found := problems(source):
        raise ValueError(found[0])
    path = pathlib.Path(source).expanduser()
    if source == STDLIB:
        names = _stdlib_paths()
    elif path.is_dir():
        names = list(_walk(path))
    else:
        names = [str(path)] if path.exists() else _glob(path)
    files = []
    for name in names:
        if wrong := _suffix_problem(name):
            raise ValueError(wrong[0])
        status = os.stat(name)
        kind = KIND_BY_SUFFIX.get(pathlib.PurePath(name).suffix.lower(), "text")
        files.append(InputFile(os.path.abspath(name), kind, status.st_size, status.st_mtime_ns))
    if not files:
        version = ".".join(map(str, sys.version_info[:3]))
        raise ValueError(
            f"{source!r} gives no files (Python {version}): name a file, folder or glob of text"
        )
    return files


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
    skipped: collections.Counter,
) -> Iterator[Document]:  # fmt: skip
    """Documents from a position on. `skipped` counts what was left out, by kind."""
    skips = _Skips(skip_bad, skipped)
    for index, file in enumerate(files[start.file :], start.file):
        begin = start if index == start.file else Position(file=index)
        try:
            if os.stat(file.path).st_size == 0:
                skips.empty(file.path, "0 bytes")
                continue
            if file.kind == "parquet":
                yield from _parquet_documents(file.path, begin, text_key, skips)
            elif file.kind == "jsonl":
                yield from _jsonl_documents(file.path, begin, text_key, skips)
            else:
                yield from _text_documents(file.path, begin, skips)
        except OSError as error:
            raise ValueError(
                f"{file.path}: cannot be read ({error.strerror or error}): check that it exists "
                "and that this user may read it"
            ) from error


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
    with open(path, "rb") as file:
        file.seek(offset)
        carried = b""
        while True:
            carried += file.read(MAX_PIECE_BYTES + 1 - len(carried))
            if not carried:
                return
            last = len(carried) <= MAX_PIECE_BYTES
            end = len(carried) if last else _cut(carried[:MAX_PIECE_BYTES])
            raw, carried = carried[:end], carried[end:]
            if offset == 0 and raw == _BOM:
                skips.empty(path, "a byte-order mark alone")
            text = skips.text(_check_utf8, path, raw, offset, lines + 1, "text")
            offset += len(raw)
            lines += raw.count(b"\n")
            if text:
                after = Position(start.file + 1) if last else Position(start.file, offset, lines)
                yield Document(text, after)
            if last:
                return


def _jsonl_documents(
    path: str, start: Position, text_key: str, skips: _Skips
) -> Iterator[Document]:
    offset, number = start.offset, start.record
    blank = offset == 0
    with open(path, "rb") as file:
        file.seek(offset)
        for raw in file:
            number += 1
            blank = blank and not raw.strip()
            text = skips.text(_jsonl_text, path, raw, offset, number, text_key)
            offset += len(raw)
            if text:
                yield Document(text, Position(start.file, offset, number))
    if blank:
        skips.empty(path, f"{number} blank lines, no record")


def _jsonl_text(path: str, raw: bytes, offset: int, number: int, text_key: str) -> bytes:
    """The text of one line, b"" for a blank one. Raises _BadText."""
    where = f"{path}: line {number}"
    line = _check_utf8(path, raw, offset, number, "lines").decode("utf-8")
    if not line.strip():
        return b""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        cut = "" if raw.endswith(b"\n") else "; the file's last line is cut off"
        message = f"{where} (byte {offset}): malformed JSON ({error}{cut}): write one JSON object"
        raise _BadText("malformed", message, "lines") from error
    if not isinstance(record, dict):
        kind = type(record).__name__
        message = f'{where}: a JSON {kind} in place of an object: write {{"{text_key}": "..."}}'
        raise _BadText("malformed", message, "lines")
    if text_key not in record:
        names = ", ".join(map(repr, list(record)[:10])) or "none"
        message = (
            f"{where}: no key {text_key!r} in the record (its keys: {names}): set data.text_key "
            "(--text-key) to the one that holds the text"
        )
        raise _BadText("without text", message, "lines")
    return _record_text(record[text_key], f"{where}: key {text_key!r}")


def _record_text(value: object, where: str) -> bytes:
    """The UTF-8 bytes of a record's text. Raises _BadText where it has none."""
    if not isinstance(value, str):
        kind = "null" if value is None else type(value).__name__
        message = f"{where} is {kind}, not a string: mend the record"
        raise _BadText("without text", message, "records")
    if not value:
        raise _BadText("empty", f"{where} is an empty string: remove the record", "records")
    try:
        return value.encode("utf-8")
    except UnicodeEncodeError as error:
        message = (
            f"{where} has the lone surrogate {value[error.start]!r} at character {error.start}, "
            "which is not valid UTF-8: mend the record"
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
        with parquet.ParquetFile(path) as file:
            _check_parquet_column(path, file.schema_arrow, text_key)
            if file.metadata.num_rows == 0:
                skips.empty(path, "0 rows")
            groups = range(file.num_row_groups)
            ends = [0, *itertools.accumulate(file.metadata.row_group(i).num_rows for i in groups)]
            read = bisect.bisect_right(ends, start.offset) - 1  # groups that are read already
            batches = file.iter_batches(
                batch_size=1024, row_groups=groups[read:], columns=[text_key], use_threads=False
            )
            values = (value for batch in batches for value in batch.column(0).to_pylist())
            for row, value in enumerate(values, ends[read] + 1):
                if row <= start.offset:
                    continue
                text = skips.text(_parquet_text, value, f"{path}: row {row}", text_key)
                if text:
                    yield Document(text, Position(start.file, row, row))
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path}: not readable as Parquet ({error}): the file is damaged or cut off; write it "
            "again"
        ) from error


def _parquet_text(value: object, where: str, text_key: str) -> bytes:
    """The text of one row. Raises _BadText."""
    if isinstance(value, bytes):
        try:
            value = value.decode("utf-8")
        except UnicodeDecodeError as error:
            message = f"{where}: byte {error.start} of the text is not valid UTF-8: mend the row"
            raise _BadText("bad UTF-8", message, "rows") from error
    return _record_text(value, f"{where}: column {text_key!r}")


def _check_parquet_column(path: str, schema: Any, text_key: str) -> None:
    from pyarrow import types

    if text_key not in schema.names:
        raise ValueError(
            f"{path}: no column {text_key!r} (its columns: {', '.join(map(repr, schema.names))}): "
            "set data.text_key (--text-key) to the one that holds the text"
        )
    kind = schema.field(text_key).type
    kind = kind.value_type if types.is_dictionary(kind) else kind
    readable = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
    if not any(check(kind) for check in readable):
        raise ValueError(
            f"{path}: column {text_key!r} is of type {kind}, not text: set data.text_key "
            "(--text-key) to a string column"
        )

"""JSON files read strictly: within a size, an object, no key twice, no NaN; errors name the file.

A few bytes of JSON can take a hundred times their size in memory (`{},{},...`), so values are
counted before anything is parsed.
"""

import collections
import json
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any

from llmx.data import remote, transient

MAX_BYTES = 64 << 20
MAX_VALUES = 2_000_000  # lists, objects and what they hold; about 200 bytes each
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


def too_many_values(raw: bytes, *, most: int = MAX_VALUES) -> str:
    """What is wrong with JSON of more values than `most`, "" with less. Strings count as one."""
    if _count(raw) <= most:
        return ""
    count = at = 0
    for string in _STRING.finditer(raw):
        count += _count(raw[at : string.start()])
        if count > most:
            break
        at = string.end()
    count += _count(raw[at:])
    return f"more than the {most:,} JSON values that are read" if count > most else ""


def _count(raw: bytes) -> int:
    return raw.count(b",") + raw.count(b"[") + raw.count(b"{")


def read_bytes(path: str | os.PathLike, *, remedy: str, max_bytes: int = MAX_BYTES) -> bytes:
    """The bytes of a file. Raises ValueError, naming it, if it cannot be read or is too large."""
    try:
        if remote.is_url(os.fspath(path)):
            raw = remote.read_bytes(os.fspath(path), most=max_bytes + 1)
        elif not os.path.isfile(path):
            kind = "is not a file" if os.path.exists(path) else "does not exist"
            raise ValueError(f"{path} {kind}: {remedy}")
        else:
            with open(path, "rb") as file:
                raw = file.read(max_bytes + 1)
    except OSError as error:
        raise transient.refusal(f"{path}: cannot be read", error, remedy) from error
    if len(raw) > max_bytes:
        raise ValueError(f"{path} has more than {max_bytes:,} bytes, the most read: {remedy}")
    return raw


def read_object(path: str | os.PathLike, *, remedy: str, max_bytes: int = MAX_BYTES) -> dict:
    """The JSON object in a file. Raises ValueError, naming file and remedy, for all else."""
    raw = read_bytes(path, remedy=remedy, max_bytes=max_bytes)
    if problem := too_many_values(raw):
        raise ValueError(f"{path}: {problem}: {remedy}")
    try:
        value = json.loads(
            raw.decode("utf-8"), object_pairs_hook=_unique,
            parse_constant=_no_constant,
        )  # fmt: skip
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not readable as JSON ({error}): {remedy}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: a JSON {type(value).__name__}, not an object: {remedy}")
    return value


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict:
    found = dict(pairs)
    if len(found) < len(pairs):
        (twice, _), *_ = collections.Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key {twice[:80]!r} appears twice")
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def shown(value: Any) -> str:
    """A value for an error message: at most 80 characters of it."""
    text = repr(value if not isinstance(value, str | bytes | list | tuple) else value[:80])
    return text if len(text) <= 80 else f"{text[:77]}..."


def is_whole(value: Any, low: int, high: int) -> bool:
    """Whether a JSON value is a whole number within limits."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def is_plain_name(name: Any) -> bool:
    """Whether a JSON value is the name of a file in the same folder, with no way out of it."""
    return (
        isinstance(name, str)
        and 0 < len(name) <= 255
        and name == pathlib.PurePath(name).name
        and name.isprintable()
        and name not in (".", "..")
        and "\\" not in name
    )

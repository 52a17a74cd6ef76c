"""Record shards on disk: a folder of flat files that are memory-mapped, never read whole.

    index.json            the schema, and what follows with a SHA-256 of each and of the index
    shard-00000.records   the records one after another, each as `Schema.dtype` says

Each shard also has, in the index, where reading went on behind it: an interrupted build continues.
"""

import dataclasses
import functools
import hashlib
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llmx.data import json_files
from llmx.data import shards as token_shards
from llmx.data.records import schema as schema_lib
from llmx.data.records.schema import Chunk, Schema

FORMAT = "llmx-record-shards"
VERSION = 1
INDEX, PROGRESS = "index.json", "progress.json"
_SHARD_NAME = re.compile(r"shard-[0-9]{5,9}")
_MAX_COUNT = 1 << 48
_ENTRY = {"name", "records", "clicks", "skipped", "end", "sha256"}


@dataclasses.dataclass(frozen=True)
class RecordShards:
    """An opened folder of record shards."""

    folder: pathlib.Path
    schema: Schema
    records: tuple[np.ndarray, ...]  # one memory-mapped array of `schema.dtype` per shard
    num_clicks: int
    content: str  # a hash of all records

    @functools.cached_property
    def bounds(self) -> np.ndarray:
        """Number of the first record of each shard, and of all of them."""
        return np.cumsum([0] + [len(records) for records in self.records])

    @property
    def num_records(self) -> int:
        return sum(map(len, self.records))

    def take(self, numbers: np.ndarray) -> Chunk:
        """The records of these numbers, in this order."""
        packed = np.empty(len(numbers), self.schema.dtype)
        order = np.argsort(numbers)
        ends = np.searchsorted(numbers[order], self.bounds)
        for shard, records in enumerate(self.records):
            at = order[ends[shard] : ends[shard + 1]]
            if at.size:
                packed[at] = records[numbers[at] - self.bounds[shard]]
        return self.schema.unpack(packed)


def write_shard(
    folder: pathlib.Path, number: int, schema: Schema, chunk: Chunk, *, skipped: int, end: Any
) -> dict[str, Any]:
    """Writes the file of a shard and returns its entry in the index. `end`: JSON, where reading
    goes on."""
    name = f"shard-{number:05d}"
    content = memoryview(schema.pack(chunk)).cast("B")
    with open(folder / f"{name}.records", "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return {
        "name": name, "records": len(chunk.labels), "clicks": int(chunk.labels.sum()),
        "skipped": skipped, "end": end, "sha256": hashlib.sha256(content).hexdigest(),
    }  # fmt: skip


def write_progress(folder: pathlib.Path, identity: str, entries: Sequence[Mapping]) -> None:
    """Says which shards are finished."""
    progress = {"identity": identity, "shards": list(entries)}
    token_shards.write_json(folder / PROGRESS, progress)


def read_progress(folder: pathlib.Path, identity: str) -> list[dict[str, Any]]:
    """The finished shards of an interrupted build of the same records; [] of another's."""
    if not (folder / PROGRESS).is_file():
        return []
    progress = json_files.read_object(folder / PROGRESS, remedy=f"delete {folder} and run again")
    entries = progress.get("shards")
    if progress.get("identity") != identity or not isinstance(entries, list):
        return []
    finished = []
    for entry in entries:
        if not _is_entry(entry) or not (folder / f"{entry['name']}.records").is_file():
            break
        finished.append(entry)
    return finished


def write_index(
    folder: pathlib.Path, schema: Schema, identity: str, entries: Sequence[Mapping]
) -> None:
    """Makes the folder complete."""
    index = {
        "format": FORMAT, "version": VERSION, "identity": identity,
        "schema": schema.as_json(), "shards": list(entries),
    }  # fmt: skip
    token_shards.write_json(folder / INDEX, token_shards.seal(index))
    (folder / PROGRESS).unlink(missing_ok=True)


def _remedy(folder: pathlib.Path) -> str:
    return f"delete {folder} and make it again"


def _is_entry(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and entry.keys() == _ENTRY
        and isinstance(entry["name"], str)
        and _SHARD_NAME.fullmatch(entry["name"]) is not None
        and json_files.is_whole(entry["records"], 1, _MAX_COUNT)
        and json_files.is_whole(entry["clicks"], 0, entry["records"])
        and json_files.is_whole(entry["skipped"], 0, _MAX_COUNT)
        and isinstance(entry["sha256"], str)
    )


def read_index(folder: pathlib.Path) -> tuple[Schema, list[dict[str, Any]]]:
    """The schema and the shards of a folder. Raises ValueError for a damaged or another index."""
    path, remedy = folder / INDEX, _remedy(folder)
    index = _sealed(folder)
    entries = index.get("shards")
    if not isinstance(entries, list) or not entries or not all(map(_is_entry, entries)):
        raise ValueError(f"{path}: shards is {json_files.shown(entries)}, no shards: {remedy}")
    try:
        return schema_lib.from_json(index.get("schema")), entries
    except ValueError as error:
        raise ValueError(f"{path}: {error}: {remedy}") from error


def identity_of(folder: pathlib.Path) -> str:
    """That of the recipe of a finished folder."""
    return str(_sealed(folder).get("identity"))


def _sealed(folder: pathlib.Path) -> dict:
    """The content of the index, which is as it was written."""
    path, remedy = folder / INDEX, _remedy(folder)
    if not path.exists():
        raise ValueError(
            f"{path} does not exist: the folder holds no finished record shards; write them with "
            f"python -m llmx.data.records --source ... --output {folder}"
        )
    return token_shards.read_sealed(
        path, what="index", name="a folder of record shards", format=FORMAT, version=VERSION,
        remedy=remedy,
    )  # fmt: skip


def open_shards(folder: str | os.PathLike, *, verify: bool = False) -> RecordShards:
    """Opens a folder of record shards.

    The index and sizes are always checked, the records where the folder holds at most
    `token_shards.VERIFY_BYTES`, or where `verify` asks for it.
    """
    folder = pathlib.Path(os.path.expanduser(folder))
    schema, entries = read_index(folder)
    total = sum(_check_size(folder, schema, entry) for entry in entries)
    if verify or total <= token_shards.VERIFY_BYTES:
        for entry in entries:
            _check_sum(folder, entry)
    records = tuple(
        np.asarray(np.memmap(folder / f"{entry['name']}.records", schema.dtype, mode="r"))
        for entry in entries
    )
    content = {"schema": schema.as_json(), "sha256": [entry["sha256"] for entry in entries]}
    return RecordShards(
        folder=folder, schema=schema, records=records,
        num_clicks=sum(entry["clicks"] for entry in entries),
        content=token_shards.json_hash(content),
    )  # fmt: skip


def _check_size(folder: pathlib.Path, schema: Schema, entry: Mapping) -> int:
    path = folder / f"{entry['name']}.records"
    if not path.is_file():
        raise ValueError(f"{path} is missing: {_remedy(folder)}")
    expected, actual = entry["records"] * schema.dtype.itemsize, path.stat().st_size
    if expected != actual:
        raise ValueError(
            f"{path} has {actual:,} bytes, the index says {expected:,}: {_remedy(folder)}"
        )
    return actual


def _check_sum(folder: pathlib.Path, entry: Mapping) -> None:
    path = folder / f"{entry['name']}.records"
    with open(path, "rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != entry["sha256"]:
        raise ValueError(
            f"{path}: checksum mismatch (sha256 {actual[:12]}..., the index says "
            f"{entry['sha256'][:12]}...): its content has changed on disk; {_remedy(folder)}"
        )

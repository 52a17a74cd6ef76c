"""Rows of the host in a folder of a checkpoint.

    index.json     what there is, with a SHA-256 of each file, and of the index itself
    NAME.array     numbers of one kind, of all admitted rows one after another: ids, tables,
                   last_named, rows, and the optimizer's state; of ids that are not admitted
                   seen_ids, seen_tables, seen_counts, seen_last

Only rows that are there are written, so that the files fit a host with more or less memory.
"""

import hashlib
import json
import math
import os
import pathlib
from typing import Any

import numpy as np

from llmx.data import json_files
from llmx.data import shards as token_shards
from llmx.tables.host_rows import HostRows

FOLDER, INDEX = "host_rows", "index.json"
VERSION = 1
_CHUNK = 1 << 16  # rows that are copied at a time


def _arrays(rows: HostRows) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """By name: an array by number, and the numbers that are in use."""
    numbers, seen = rows.admitted.numbers(), rows.seen.numbers()
    of_rows = {"ids": rows.admitted.ids, "tables": rows.admitted.tables,
               "last_named": rows.last_named, "rows": rows.rows}  # fmt: skip
    of_rows |= {f"state_{name}": each for name, each in rows.slots.items()}
    of_seen = {"seen_ids": rows.seen.ids, "seen_tables": rows.seen.tables,
               "seen_counts": rows.seen_counts, "seen_last": rows.seen_last}  # fmt: skip
    return {name: (each, numbers) for name, each in of_rows.items()} | {
        name: (each, seen) for name, each in of_seen.items()
    }


def save(rows: HostRows, folder: Any) -> None:
    """Writes the files into a new folder; all rows are written back. Raises OSError."""
    folder = pathlib.Path(folder)
    folder.mkdir()
    entries = {}
    for name, (array, numbers) in _arrays(rows).items():
        digest = hashlib.sha256()
        with open(folder / f"{name}.array", "wb") as file:
            for first in range(0, len(numbers), _CHUNK):
                chunk = memoryview(array[numbers[first : first + _CHUNK]]).cast("B")
                digest.update(chunk)
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        shape = [len(numbers), *array.shape[1:]]
        entries[name] = {"shape": shape, "dtype": array.dtype.str, "sha256": digest.hexdigest()}
    index = {
        "version": VERSION, "tables": _tables(rows), "seed": rows.virtual.seed,
        "batches": rows.batches, "admitted": rows.num_admitted, "forgotten": rows.num_forgotten,
        "arrays": entries,
    }  # fmt: skip
    token_shards.write_json(folder / INDEX, token_shards.seal(index))


def _tables(rows: HostRows) -> list[list[Any]]:
    return [[table.name, table.rows, table.width, table.bound] for table in rows.virtual.tables]


def read_index(folder: Any) -> dict:
    """The index. Raises ValueError for one that is missing or damaged."""
    path = pathlib.Path(folder) / INDEX
    if not path.is_file():
        raise ValueError(f"{path} does not exist")
    index = json_files.read_object(path, remedy="go back to another checkpoint")
    if index != token_shards.seal(index):
        raise ValueError(f"{path} does not match its own checksum")
    if index.get("version") != VERSION:
        raise ValueError(f"{path} has version {index.get('version')!r}, this llmx reads {VERSION}")
    return index


def check(folder: Any) -> None:
    """Compares the files with their checksums. Raises ValueError, naming the first that differs."""
    for name, entry in read_index(folder)["arrays"].items():
        path = pathlib.Path(folder) / f"{name}.array"
        if not path.is_file():
            raise ValueError(f"{path} is missing")
        with open(path, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != entry["sha256"]:
                raise ValueError(f"{path}: its content has changed on disk (sha256)")


def load(rows: HostRows, folder: Any) -> None:
    """Reads what `save` wrote into rows that are new. Raises ValueError for other tables, or where
    there is no room."""
    index, folder = read_index(folder), pathlib.Path(folder)
    for what, found, wanted in (
        ("tables (name, rows, width, bound of new rows)", index["tables"], _tables(rows)),
        ("seed of new rows", index["seed"], rows.virtual.seed),
    ):
        if json.loads(json.dumps(wanted)) != found:
            raise ValueError(
                f"{folder} has other {what} than the config gives:\n  {found}\n  {wanted}\n"
                "restore them, or use another work directory"
            )
    entries = index["arrays"]
    names = {name for name in _arrays(rows) if name.startswith("state_")}
    if missing := names ^ {name for name in entries if name.startswith("state_")}:
        raise ValueError(
            f"{folder} was written with another optimizer of rows ({sorted(missing)} differ): "
            "restore tables.optimizer and whether there is tables.weight_decay"
        )
    num_rows, num_seen = entries["ids"]["shape"][0], entries["seen_ids"]["shape"][0]
    if num_rows > rows.capacity:
        more = math.ceil(1000 * num_rows / rows.capacity) / 1000
        raise ValueError(
            f"{folder} has {num_rows:,} rows, and tables.host_gib is for {rows.capacity:,}: set it "
            f"to at least {more:.3f} times as much"
        )
    read = lambda name: np.memmap(  # noqa: E731
        folder / f"{name}.array", entries[name]["dtype"], "r", shape=tuple(entries[name]["shape"])
    )
    for first in range(0, num_rows, _CHUNK):
        part = slice(first, min(first + _CHUNK, num_rows))
        numbers = rows.admitted.add(read("ids")[part], read("tables")[part])
        rows.last_named[numbers] = read("last_named")[part]
        slots = {name: read(f"state_{name}")[part] for name in rows.slots}
        rows.write(numbers, read("rows")[part], slots)
    # Where ids are admitted at once now, or memory is for fewer, those seen last are kept.
    order = np.argsort(read("seen_last"), kind="stable") if num_seen else np.zeros(0, np.int64)
    kept = np.sort(order[num_seen - min(num_seen, rows.seen.capacity) :])
    if kept.size:
        numbers = rows.seen.add(read("seen_ids")[kept], read("seen_tables")[kept])
        rows.seen_counts[numbers] = read("seen_counts")[kept]
        rows.seen_last[numbers] = read("seen_last")[kept]
    rows.batches = index["batches"]
    rows.num_admitted, rows.num_forgotten = index["admitted"], index["forgotten"]

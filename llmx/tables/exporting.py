"""Writes tables by id, some rows at a time: whole, or the rows that have changed. NumPy only;
Parquet needs pyarrow.

Letters: R rows, W width.
"""

import contextlib
import dataclasses
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from llmx.data import full_disk
from llmx.tables import by_id, exports
from llmx.tables.by_id import ROWS, Source
from llmx.tables.config import Feature, Table
from llmx.tables.exports import IDS, Export

FILES, PARQUET = "npy", "parquet"
BLOCK_BYTES = 64 << 20  # of rows and what an optimizer keeps of them, in memory at a time
HASH = "FNV-1a 64 of TABLE, NUL, TEXT; MurmurHash3's finalizer; modulo rows"


@dataclasses.dataclass(frozen=True)
class Content:
    """What an export holds beside rows."""

    step: int
    tables: Sequence[Table]
    features: Sequence[Feature]
    slots: Mapping[str, bool]  # of the optimizer: whether each number of a row has one; {} = none
    optimizer: str
    dense: Mapping[str, np.ndarray]  # parameters of the network, by path
    model: Mapping[str, Any]  # the section of the config


@full_disk.names_path
def write(
    folder: pathlib.Path, content: Content, source: Source, *,
    block_rows: Callable[[Table], int], files: str = FILES, since: Export | None = None,
) -> dict[str, int]:  # fmt: skip
    """Writes an export into a new folder, which has its name once it is complete; returns how many
    rows of each table are in it.

    Args:
      block_rows: how many rows of a table to read at a time.
      files: one .npy for each table and slot, or one Parquet for each table.
      since: only rows are written of which a bit has changed since this one.

    Raises ValueError where `since` is of other tables.
    """
    if since is not None:
        _require_same_tables(content, since)
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        listed = [
            _write_table(
                unfinished, number, table, content, source, block_rows(table), files, since
            )
            for number, table in enumerate(content.tables)
        ]
        path = os.path.relpath(since.folder.resolve(), folder.resolve()) if since else ""
        exports.write_manifest(unfinished, {
            "step": content.step, "files": files, "tables": listed,
            "features": [dataclasses.asdict(one) for one in content.features],
            "slots": dict(content.slots), "optimizer": content.optimizer, "hash": HASH,
            "model": content.model, "dense": exports.write_dense(unfinished, content.dense),
            "since": since and {"path": path, "checksum": since.checksum},
        })  # fmt: skip
        _require_read_back(content, exports.open_export(unfinished))
        unfinished.rename(folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return {one["name"]: one["stored"] for one in listed}


def _require_read_back(content: Content, export: Export) -> None:
    """Raises ValueError where a reader finds other tables, features or a model than were meant."""
    of = lambda tables: [(one.name, one.rows, one.width) for one in tables]  # noqa: E731
    found = {
        "tables": (of(content.tables), of(export.tables.values())),
        "features": (list(content.features), list(export.features.values())),
        "model": (dict(content.model), export.manifest["model"]),
    }
    for what, (meant, read) in found.items():
        if meant != read:
            raise ValueError(f"an export cannot hold the {what} {meant}: it would say {read}")


def _require_same_tables(content: Content, since: Export) -> None:
    of = lambda tables: [(one.name, one.rows, one.width) for one in tables]  # noqa: E731
    if of(content.tables) != of(since.tables.values()):
        raise ValueError(f"--since {since.folder} has other tables: export all, without --since")
    features = [dataclasses.asdict(one) for one in content.features]
    if features != since.manifest["features"]:
        raise ValueError(
            f"--since {since.folder} has other features, or combines them otherwise "
            "(tables.combine): export all, without --since"
        )
    if dict(content.slots) != dict(since.manifest["slots"]):
        raise ValueError(
            f"--since {since.folder} has {list(since.slots) or 'nothing'} of the optimizer, and "
            f"this export {list(content.slots) or 'nothing'}: give --optimizer-state to both or "
            "to none"
        )


def _write_table(
    folder: pathlib.Path, number: int, table: Table, content: Content, source: Source,
    block_rows: int, files: str, since: Export | None,
) -> dict[str, Any]:  # fmt: skip
    """One table; returns its entry in the manifest."""
    if files == FILES:
        writer = _Arrays(folder, number, table, content.slots, since is not None)
    else:
        from llmx.tables import parquet_files

        name = parquet_files.file_name(exports.file_name(number, table.name))
        writer = parquet_files.Writer(folder / name, table, content.slots)
    with contextlib.closing(writer) as out:
        for ids, arrays in _blocks(table, tuple(content.slots), source, block_rows, since):
            out.append(ids, arrays)
    return {
        "name": table.name, "rows": table.rows, "width": table.width, "stored": out.rows,
        "sha256": out.sums,
    }  # fmt: skip


def _blocks(
    table: Table, slots: tuple[str, ...], source: Source, block_rows: int, since: Export | None
) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """Ids and arrays of some rows at a time; with `since` of those that have changed."""
    for first in range(0, table.rows, block_rows):
        ids = slice(first, min(first + block_rows, table.rows))
        arrays = {slot: source.read(table.name, slot, ids) for slot in (ROWS, *slots)}
        numbers = np.arange(ids.start, ids.stop, dtype=np.int32)
        if since is not None:
            changed = np.zeros(len(numbers), bool)
            for slot, array in arrays.items():
                before = since.read(table.name, slot, ids)
                changed |= (_bits(array) != _bits(before)).any(axis=1)
            numbers = numbers[changed]
            arrays = {slot: array[changed] for slot, array in arrays.items()}
        yield numbers, arrays


def _bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint32)


class _Arrays:
    """The .npy files of a table."""

    def __init__(self, folder, number: int, table: Table, slots: Mapping[str, bool], some: bool):
        widths = by_id.widths_of(table.width, slots)
        name = lambda slot: folder / exports.file_name(number, table.name, slot)  # noqa: E731
        self._files = {
            slot: exports.ArrayFile(name(slot), np.float32, width) for slot, width in widths.items()
        }
        if some:
            self._files[IDS] = exports.ArrayFile(name(IDS), np.int32, None)
        self.sums: dict[str, str] = {}

    def append(self, ids: np.ndarray, arrays: Mapping[str, np.ndarray]) -> None:
        for slot, file in self._files.items():
            file.append(ids if slot == IDS else arrays[slot])

    @property
    def rows(self) -> int:
        return self._files[ROWS].rows

    def close(self) -> None:
        self.sums = {slot: file.close() for slot, file in self._files.items()}

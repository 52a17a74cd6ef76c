"""Exported tables on disk: rows in the order of ids, in files that are memory-mapped or of Parquet.
NumPy only, but for Parquet.

    manifest.json     tables, features, model, and a SHA-256 of each file's numbers and of itself
    000-C1.npy        the rows of a table, fp32 [rows, width]
    000-C1.squares.npy    what the optimizer keeps of them, if that was asked for
    dense.npz         the parameters of the network, by path
    000-C1.parquet    in place of a table's .npy files, with `files` = "parquet" (`parquet_files`)

An increment has only the rows whose bits have changed since another export, which it names by a
relative path and by its checksum: beside 000-C1.npy there is 000-C1.ids.npy, ids that ascend.
Exports of both kinds may be behind each other.

Letters: R rows, W width.
"""

import dataclasses
import functools
import hashlib
import os
import pathlib
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import numpy as np

from llmx.data import shards as token_shards
from llmx.tables import by_id
from llmx.tables.by_id import ROWS
from llmx.tables.config import Feature, Table

FORMAT, VERSION = "llmx-tables", 1
MANIFEST, DENSE = "manifest.json", "dense.npz"
IDS = "ids"
_READ = 1 << 24  # bytes that are hashed at a time
_MOST_INCREMENTS = 1000


def is_export(folder: str | os.PathLike) -> bool:
    """Whether a folder has a manifest; "" names none."""
    return bool(os.fspath(folder)) and pathlib.Path(folder, MANIFEST).is_file()


def file_name(number: int, table: str, slot: str = ROWS) -> str:
    """Of the rows of a table, of an optimizer's slot, or of the ids of an increment."""
    plain = re.sub(r"[^A-Za-z0-9_-]", "_", table)[:80]
    return f"{number:03d}-{plain}{f'.{slot}' if slot else ''}.npy"


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """The rows of a table in one export."""

    arrays: Mapping[str, Any]  # by slot, [R, W] or [R, 1]: memory-mapped, or `Column`s of Parquet
    ids: np.ndarray | None  # int32 [R], ascending; None = all ids

    def put(self, found: np.ndarray, ids: np.ndarray, slot: str) -> None:
        """Writes the rows of these ids, as far as they are here, into their places of `found`."""
        if self.ids is None:
            found[...] = self.arrays[slot][ids]
        elif len(self.ids):
            at = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
            here = np.flatnonzero(self.ids[at] == ids)
            found[here] = self.arrays[slot][at[here]]


@dataclasses.dataclass(frozen=True, eq=False)
class Export:
    """An opened export: one that is whole, and the increments behind it."""

    folder: pathlib.Path
    manifest: Mapping[str, Any]
    parts: Mapping[str, tuple[Part, ...]]  # by table; the first has all ids

    @property
    def step(self) -> int:
        return self.manifest["step"]

    @property
    def checksum(self) -> str:
        return self.manifest["checksum"]

    @functools.cached_property
    def tables(self) -> dict[str, Table]:
        return {
            one["name"]: Table(one["name"], one["rows"], one["width"])
            for one in self.manifest["tables"]
        }

    @functools.cached_property
    def features(self) -> dict[str, Feature]:
        return {one["name"]: Feature(**one) for one in self.manifest["features"]}

    @property
    def slots(self) -> tuple[str, ...]:
        """What an optimizer keeps, if it is there."""
        return tuple(self.manifest["slots"])

    @functools.cached_property
    def dense(self) -> dict[str, np.ndarray]:
        """The parameters of the network, by path."""
        place = self.folder / DENSE
        try:
            with np.load(place, allow_pickle=False) as file:
                return dict(file)
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise ValueError(
                f"{place} is damaged ({error}): export again, or bring the file back"
            ) from error

    def read(self, table: str, slot: str, ids: slice) -> np.ndarray:
        """See `by_id.Source`."""
        first, *increments = self.parts[table]
        if not increments:
            return np.array(first.arrays[slot][ids])
        return self.take(table, np.arange(ids.start, ids.stop, ids.step or 1), slot)

    def take(self, table: str, ids_R: np.ndarray, slot: str = ROWS) -> np.ndarray:
        """The rows of ids that there are, [R, W]."""
        found = np.empty((len(ids_R), self.parts[table][0].arrays[slot].shape[1]), np.float32)
        for part in self.parts[table]:
            part.put(found, ids_R, slot)
        return found


# ----------------------------------------------------------------------------------------- reading


def open_export(folder: str | os.PathLike, *, verify: bool = False) -> Export:
    """Opens an export, and those that it is an increment to. Sizes and the manifest's checksum are
    always checked, the files' with `verify`. Raises ValueError."""
    folder = pathlib.Path(os.path.expanduser(folder))
    chain = list(_chain(folder))
    manifests = [manifest for _, manifest in chain]
    newest = manifests[0]
    for key in ("features", "slots"):
        if any(manifest[key] != newest[key] for manifest in manifests):
            raise ValueError(f"{folder}: {key} differ from those of the exports that it is behind")
    parts: dict[str, list[Part]] = {one["name"]: [] for one in newest["tables"]}
    for place, manifest in reversed(chain):
        for number, one in enumerate(manifest["tables"]):
            opened = _open_table(place, manifest, number, verify)
            parts[one["name"]].append(opened)
        if verify:
            _check(place / DENSE, _hash_of(place / DENSE, 0), manifest["dense"])
    return Export(folder, newest, {name: tuple(several) for name, several in parts.items()})


def _chain(folder: pathlib.Path) -> Iterator[tuple[pathlib.Path, dict]]:
    """Folders and manifests, the newest first, the whole export last."""
    wanted = None
    for _ in range(_MOST_INCREMENTS):
        manifest = read_manifest(folder)
        if wanted is not None and manifest["checksum"] != wanted:
            raise ValueError(
                f"{folder} is another export than the increment behind it was made from: bring "
                "that one back, or export again"
            )
        yield folder, manifest
        if manifest["since"] is None:
            return
        folder = folder / manifest["since"]["path"]
        wanted = manifest["since"]["checksum"]
    raise ValueError(f"{folder}: more than {_MOST_INCREMENTS} increments: merge them")


def read_manifest(folder: pathlib.Path) -> dict[str, Any]:
    """Raises ValueError where there is none, or a damaged one."""
    path, remedy = folder / MANIFEST, "export again, with python -m llmx.tables export"
    if not path.exists():
        raise ValueError(f"{path} does not exist: {folder} is no finished export: {remedy}")
    return token_shards.read_sealed(
        path, what="manifest", name="an export of tables", format=FORMAT, version=VERSION,
        remedy=remedy,
    )  # fmt: skip


def _open_table(folder: pathlib.Path, manifest: Mapping, number: int, verify: bool) -> Part:
    one, slots = manifest["tables"][number], manifest["slots"]
    rows, widths = one["stored"], by_id.widths_of(one["width"], slots)
    has_ids = manifest["since"] is not None
    path = lambda slot: folder / file_name(number, one["name"], slot)  # noqa: E731
    if manifest["files"] != "npy":
        from llmx.tables import parquet_files

        file = folder / parquet_files.file_name(path(ROWS).name)
        if not file.is_file():
            raise ValueError(f"{file} is missing: export again")
        if verify:
            _check(file, _hash_of(file, 0), one["sha256"].get(parquet_files.FILE, "none"))
        return Part(*parquet_files.read(file, rows, widths, ids=has_ids))
    arrays = {slot: _mapped(path(slot), (rows, n), np.float32) for slot, n in widths.items()}
    if has_ids:
        arrays[IDS] = _mapped(path(IDS), (rows,), np.int32)
    for slot, array in arrays.items() if verify else ():
        begin = path(slot).stat().st_size - array.nbytes
        _check(path(slot), _hash_of(path(slot), begin), one["sha256"][slot])
    return Part(arrays, arrays.pop(IDS, None))


def _mapped(path: pathlib.Path, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array in a file. Raises ValueError where it is not as the manifest says."""
    if not path.is_file():
        raise ValueError(f"{path} is missing: export again")
    try:
        if not shape[0]:  # nothing to map
            return np.load(path, allow_pickle=False).reshape(shape).astype(dtype, copy=False)
        array = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except ValueError as error:
        raise ValueError(f"{path} cannot be read ({error}): export again") from error
    if array.shape != shape or array.dtype != dtype:
        raise ValueError(
            f"{path} has {array.dtype}{list(array.shape)}, the manifest says "
            f"{np.dtype(dtype)}{list(shape)}: export again"
        )
    return array


def _hash_of(path: pathlib.Path, start: int) -> str:
    """SHA-256 of a file from a byte on."""
    with open(path, "rb") as file:
        file.seek(start)
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check(path: pathlib.Path, actual: str, expected: str) -> None:
    if actual != expected:
        raise ValueError(
            f"{path}: checksum mismatch (sha256 {actual[:12]}..., the manifest says "
            f"{expected[:12]}...): its content has changed on disk; export again"
        )


# ----------------------------------------------------------------------------------------- writing


class ArrayFile:
    """A .npy file that is written some rows at a time, however many there will be."""

    def __init__(self, path: pathlib.Path, dtype: Any, width: int | None):
        """width: None = one dimension."""
        self._dtype, self._width = np.dtype(dtype), width
        self._file: BinaryIO = open(path, "wb", buffering=0)  # noqa: SIM115
        self._hash, self.rows = hashlib.sha256(), 0
        self._header()
        self._begin = self._file.tell()

    def _header(self) -> None:
        # NumPy leaves room in it for the number of rows to become any.
        shape = (self.rows,) if self._width is None else (self.rows, self._width)
        text = {"descr": self._dtype.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self._file, text)

    def append(self, array: np.ndarray) -> None:
        flat = np.ascontiguousarray(array, self._dtype).reshape(-1)
        content = memoryview(flat.view(np.uint8))
        self._hash.update(content)
        while content:  # a file takes at most 2 GiB at once
            content = content[self._file.write(content[:_READ]) :]
        self.rows += len(array)

    def close(self) -> str:
        """Returns the SHA-256 of the numbers."""
        self._file.seek(0)
        self._header()
        assert self._file.tell() == self._begin
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return self._hash.hexdigest()


def write_dense(folder: pathlib.Path, params: Mapping[str, np.ndarray]) -> str:
    """Writes the parameters of the network; returns the file's SHA-256."""
    with open(folder / DENSE, "wb") as file:
        np.savez(file, **params)
        file.flush()
        os.fsync(file.fileno())
    return _hash_of(folder / DENSE, 0)


def write_manifest(folder: pathlib.Path, content: Mapping[str, Any]) -> None:
    """Makes the export complete."""
    manifest = {"format": FORMAT, "version": VERSION, **content}
    token_shards.write_json(folder / MANIFEST, token_shards.seal(manifest))

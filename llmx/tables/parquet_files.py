"""Exported tables as Parquet: of each table one file, with "id", and "row" and what the optimizer
keeps as lists of fixed size. Needs pyarrow.

Letters: R rows, W width.
"""

import functools
import hashlib
import os
import pathlib
from collections.abc import Mapping

import numpy as np
import pyarrow
from pyarrow import parquet

from llmx.tables import by_id
from llmx.tables.config import Table

FILE = "file"  # whose checksum the manifest has
_ID, _ROW = "id", "row"


def file_name(of_rows: str) -> str:
    """Of a table whose .npy file of rows would be `of_rows`."""
    return f"{of_rows.removesuffix('.npy')}.parquet"


class Writer:
    """The file of a table; what is appended at once is a row group."""

    def __init__(self, path: pathlib.Path, table: Table, slots: Mapping[str, bool]):
        fields = [(_ID, pyarrow.int32())]
        for slot, width in by_id.widths_of(table.width, slots).items():
            fields.append((slot or _ROW, pyarrow.list_(pyarrow.float32(), width)))
        self._schema, self._path, self.rows = pyarrow.schema(fields), path, 0
        self._writer = parquet.ParquetWriter(path, self._schema)
        self.sums: dict[str, str] = {}

    def append(self, ids: np.ndarray, arrays: Mapping[str, np.ndarray]) -> None:
        columns = [pyarrow.array(ids)]
        for array in arrays.values():
            flat = pyarrow.array(np.ascontiguousarray(array).reshape(-1))
            columns.append(pyarrow.FixedSizeListArray.from_arrays(flat, array.shape[1]))
        self._writer.write_batch(pyarrow.record_batch(columns, schema=self._schema))
        self.rows += len(ids)

    def close(self) -> None:
        self._writer.close()
        with open(self._path, "rb+") as file:
            os.fsync(file.fileno())
            self.sums = {FILE: hashlib.file_digest(file, "sha256").hexdigest()}


class Column:
    """A column of lists as an array [R, W] of which a row group is read at a time."""

    def __init__(self, file: parquet.ParquetFile, name: str, width: int):
        groups = [file.metadata.row_group(at).num_rows for at in range(file.num_row_groups)]
        self._ends = np.cumsum(groups, dtype=np.int64)
        self._name, self.shape = name, (file.metadata.num_rows, width)
        self._group = functools.lru_cache(1)(functools.partial(self._read, file))

    def _read(self, file: parquet.ParquetFile, at: int) -> np.ndarray:
        lists = file.read_row_group(at, columns=[self._name]).column(0).combine_chunks()
        return lists.flatten().to_numpy(zero_copy_only=False).reshape(-1, self.shape[1])

    def __getitem__(self, rows: slice | np.ndarray) -> np.ndarray:
        at_R = np.arange(self.shape[0])[rows] if isinstance(rows, slice) else np.asarray(rows)
        group_R = np.searchsorted(self._ends, at_R, side="right")
        found_RW = np.empty((len(at_R), self.shape[1]), np.float32)
        for group in np.unique(group_R):
            array, here = self._group(int(group)), group_R == group
            found_RW[here] = array[at_R[here] - (self._ends[group] - len(array))]
        return found_RW


def read(
    path: pathlib.Path, rows: int, widths: Mapping[str, int], *, ids: bool
) -> tuple[dict[str, Column], np.ndarray | None]:
    """The columns of a file by slot, and with `ids` the ids of its rows, int32 [R].

    widths: by slot, the rows' too. Raises ValueError where the file has other columns or rows.
    """
    try:
        file = parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path} cannot be read ({error}): export again") from error
    names = {slot: slot or _ROW for slot in widths}  # "" are the rows
    wanted = {_ID: "int32"}
    wanted |= {names[slot]: f"{width} x float" for slot, width in widths.items()}
    found = {field.name: _shown(field.type) for field in file.schema_arrow}
    if found != wanted:
        raise ValueError(f"{path} has columns {found}, the manifest says {wanted}: export again")
    if file.metadata.num_rows != rows:
        raise ValueError(
            f"{path} has {file.metadata.num_rows:,} rows, the manifest says {rows:,}: export again"
        )
    columns = {slot: Column(file, names[slot], width) for slot, width in widths.items()}
    if not ids:
        return columns, None
    return columns, file.read(columns=[_ID]).column(0).to_numpy().astype(np.int32, copy=False)


def _shown(kind: pyarrow.DataType) -> str:
    if pyarrow.types.is_fixed_size_list(kind):
        return f"{kind.list_size} x {kind.value_type}"
    return str(kind)

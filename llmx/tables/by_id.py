"""Tables as rows in the order of ids, whatever devices have them: read from the arrays of devices,
and arrays of devices made of them, some rows at a time. NumPy only.

Letters: n devices, R rows, W width.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from llmx.tables import placement
from llmx.tables.config import Feature, Table
from llmx.tables.placement import Group, Part

ROWS = ""  # in the place of a slot's name
DECAYED = "decayed"  # of a row: the sum of log(1 - lr weight_decay) up to its last update


def widths_of(width: int, slots: Mapping[str, bool]) -> dict[str, int]:
    """Numbers of a row, and of what an optimizer keeps of it: `slots` says of what each number has
    one, and not the row."""
    return {ROWS: width} | {slot: width if each else 1 for slot, each in slots.items()}


class Source(Protocol):
    """Where rows come from."""

    def read(self, table: str, slot: str, ids: slice) -> np.ndarray:
        """Rows, fp32 [R, W], or what an optimizer keeps of them, [R, W or 1]. `ids` has first and
        end, and may have a step."""


@dataclasses.dataclass(frozen=True, eq=False)
class ByDevice:
    """The arrays of a `TablesState`, in memory or in a checkpoint's files (what an index of slices
    reads of them)."""

    groups: Mapping[str, Group]
    rows: Mapping[str, Any]  # [n slots, W]
    slots: Mapping[str, Mapping[str, Any]]
    of_row: frozenset[str]  # slots of which a row has one number
    decay: float | None = None  # that of the state: rows are read with what is due taken off

    def read(self, table: str, slot: str, ids: slice) -> np.ndarray:
        """See `Source`. Reads of every device the rows that it has of these, at once."""
        columns = []
        for key, group in self.groups.items():
            arrays = self.slots[key]
            for part in group.parts_of(table):
                array = arrays[slot] if slot else self.rows[key]
                found = _of_devices(group, part, array, ids)
                if slot == ROWS and self.decay is not None and DECAYED in arrays:
                    passed = _of_devices(group, part, arrays[DECAYED], ids)
                    found = found * np.exp(self.decay - passed)
                columns.append((part.columns, found))
        columns.sort(key=lambda one: one[0])
        if len(columns) == 1 or slot in self.of_row:  # which all columns have
            return columns[0][1]
        return np.concatenate([array for _, array in columns], axis=1)


def of_state(
    state: Any, tables: Sequence[Table], features: Sequence[Feature], devices: int, *,
    slots: Mapping[str, bool], due: bool = False,
) -> ByDevice:  # fmt: skip
    """The arrays of a state of so many devices.

    slots: of the optimizer, and whether each number of a row has one. due: whether to take off what
    is due.
    """
    groups = {}
    for group in placement.placed(tables, features, devices):
        key = str(group.width)
        # As it was saved: an older version had less room behind the last row.
        groups[key] = dataclasses.replace(group, slots=state.rows[key].shape[0] // devices)
    decay = float(np.asarray(state.decay[...])[0]) if due else None
    of_row = {DECAYED, *(name for name, each in slots.items() if not each)}
    return ByDevice(groups, state.rows, state.slots, frozenset(of_row), decay)


def _of_devices(group: Group, part: Part, array: Any, ids: slice) -> np.ndarray:
    """The rows of a part, in the order of ids."""
    first, end, step = ids.start, ids.stop, ids.step or 1
    if isinstance(array, np.ndarray):
        return array[placement.places(group, part, np.arange(first, end, step))]
    if part.device >= 0:
        at = part.device * group.slots + part.base
        return np.asarray(array[at + first : at + end])[::step]
    # Files are read faster in ranges: of each device these rows are neighbors.
    n = group.devices
    found = np.empty((end - first, array.shape[1]), np.float32)
    for device in range(n):
        least = first + (device - part.shift - first) % n
        if least < end:
            at = device * group.slots + part.base + least // n
            found[least - first :: n] = array[at : at + -(-(end - least) // n)]
    return found[::step]


def of_device(
    group: Group, device: int, source: Source, slot: str, *, width: int, fill: float
) -> np.ndarray:
    """A device's part of a group's array, [slots, width], of rows by id; `fill` elsewhere.

    width: the group's, or 1 of what a row has one of.
    """
    found = np.full((group.slots, width), fill, np.float32)
    for part in group.parts:
        if part.device not in (-1, device):
            continue
        first, step = 0, 1
        if part.device < 0:
            first, step = (device - part.shift) % group.devices, group.devices
        number = max(0, -(-(part.table.rows - first) // step))
        for at in range(0, number, _AT_ONCE):
            after = min(at + _AT_ONCE, number)
            ids = slice(first + at * step, first + (after - 1) * step + 1, step)
            read = source.read(part.table.name, slot, ids)
            has_columns = read.shape[1] == part.table.width
            columns = slice(*part.columns) if has_columns else slice(0, 1)
            found[part.base + at : part.base + after] = read[:, columns]
    return found


_AT_ONCE = 1 << 16  # rows


def block_rows(table: Table, devices: int, stored: int, *, slots: int, num_bytes: int) -> int:
    """How many rows to read at a time: what fills `num_bytes`, or as many as all devices have in a
    chunk of files of `stored` rows, if that is more."""
    width = table.width * (1 + slots)
    split = devices if table.split == "rows" else 1
    whole = max(1, stored) * split
    return max(1, num_bytes // (4 * width) // whole) * whole

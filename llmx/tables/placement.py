"""Which device has which rows, at which place of its part.

Tables of one width are a group: one array of rows, [devices x slots, width], split by devices. A
table that is split row by row has row r on device (r + shift) % devices, so that ids that are close
are spread. A whole table is on one device, chosen so that bytes and lookups are balanced. A table
that is split by columns is as many whole ones, of some columns each.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from llmx.tables.config import Feature, Table

LARGEST = 2**31 - 2  # a row of a group is an int32 number, and one more says that there is none
# The slots of a device are a multiple, if there are more: so that a checkpoint's files can have
# them in equal parts.
MULTIPLE = 1024


@dataclasses.dataclass(frozen=True)
class Part:
    """A table, or some columns of one, in a group."""

    table: Table
    number: int  # of the table
    columns: tuple[int, int]  # first and end
    device: int  # -1: split by rows
    shift: int
    base: int  # its first slot on a device

    def slots(self, devices: int) -> int:
        return -(-self.table.rows // devices) if self.device < 0 else self.table.rows


@dataclasses.dataclass(frozen=True)
class Group:
    """All parts of one width."""

    width: int
    parts: tuple[Part, ...]
    slots: int  # of each device
    devices: int

    @property
    def none(self) -> int:
        """The number that no row has."""
        return self.devices * self.slots

    def parts_of(self, table: str) -> list[Part]:
        """In the order of their columns."""
        found = [part for part in self.parts if part.table.name == table]
        return sorted(found, key=lambda part: part.columns)

    def lookups(self, features: Sequence[Feature]) -> list[tuple[Feature, Part]]:
        """What is looked up, in order: of each feature its parts."""
        return [(feature, part) for feature in features for part in self.parts_of(feature.table)]


def placed(tables: Sequence[Table], features: Sequence[Feature], devices: int) -> tuple[Group, ...]:
    """The groups. Raises ValueError for widths that do not divide, and for too many rows."""
    looked_up = {table.name: 0 for table in tables}
    for feature in features:
        looked_up[feature.table] += feature.columns
    by_width: dict[int, list[tuple[int, Table, tuple[int, int]]]] = {}
    for number, table in enumerate(tables):
        ways = devices if table.split == "columns" else 1
        if table.width % ways:
            raise ValueError(
                f"table {table.name!r}: width {table.width} does not divide over {ways} devices by "
                "columns: use a multiple, or split='rows'"
            )
        width = table.width // ways
        for way in range(ways):
            part = (number, table, (way * width, (way + 1) * width))
            by_width.setdefault(width, []).append(part)
    return tuple(
        _group(width, parts, looked_up, devices) for width, parts in sorted(by_width.items())
    )


def _group(
    width: int, listed: Sequence[tuple[int, Table, tuple[int, int]]],
    looked_up: Mapping[str, int], devices: int,
) -> Group:  # fmt: skip
    parts, base = [], 0
    for number, table, columns in listed:
        if table.split == "rows":
            parts.append(Part(table, number, columns, -1, number % devices, base))
            base += parts[-1].slots(devices)
    # The largest first, to the device that has least; a lookup weighs as much as a row.
    loads, ends = [0.0] * devices, [base] * devices
    whole = [one for one in listed if one[1].split != "rows"]
    of_all = sum(one[1].rows for one in whole) or 1
    of_lookups = sum(looked_up[one[1].name] for one in whole) or 1
    weight = lambda one: one[1].rows / of_all + looked_up[one[1].name] / of_lookups  # noqa: E731
    for number, table, columns in sorted(whole, key=weight, reverse=True):
        device = loads.index(min(loads))
        if table.split == "columns":
            device = columns[0] // width
        parts.append(Part(table, number, columns, device, 0, ends[device]))
        ends[device] += table.rows
        loads[device] += weight((number, table, columns))
    slots = max(ends)
    if slots > MULTIPLE:
        slots = -(-slots // MULTIPLE) * MULTIPLE
    if devices * slots > LARGEST:
        raise ValueError(
            f"tables of width {width} have {devices * slots:,} rows with those that fill up the "
            f"devices: at most {LARGEST:,} rows can be numbered: use fewer (data.records.rows), or "
            "give some of them another width"
        )
    return Group(width, tuple(parts), slots, devices)


def places(group: Group, part: Part, ids: np.ndarray | None = None) -> np.ndarray:
    """Where rows of a part are in its group's array, by id; None = all of them."""
    ids = np.arange(part.table.rows) if ids is None else ids
    if part.device >= 0:
        return part.device * group.slots + part.base + ids
    device = (ids + part.shift) % group.devices
    return device * group.slots + part.base + ids // group.devices


def ids(group: Group, part: Part, places: np.ndarray) -> np.ndarray:
    """The reverse of `places`: the id of the row at each place, int64; -1: none of the part."""
    device, slot = np.divmod(np.asarray(places, np.int64), group.slots)
    found = slot - part.base
    if part.device >= 0:
        is_here = device == part.device
    else:
        is_here = device < group.devices
        found = found * group.devices + (device - part.shift) % group.devices
    return np.where(is_here & (slot >= part.base) & (found < part.table.rows), found, -1)

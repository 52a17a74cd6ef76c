"""Rows in host memory by id of 64 bits, each beside the state of its optimizer.

Rows are virtual: before a row is written it is a function of seed, table and id (`numbers`), and
takes no memory. An id that was seen `admit_after` times is admitted: it gets a number, at which its
row is kept. Where as many rows are there as the memory is for, those that no batch has named for
longest are forgotten, all of one age together: what is forgotten does not depend on numbers, and so
not on when a run was interrupted. A forgotten id is one that was never seen.

Letters: N ids of a batch, R rows, W width.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from llmx.tables import numbers
from llmx.tables.config import TablesConfig
from llmx.tables.dictionary import Dictionary
from llmx.tables.tables import DECAYED, Tables

MAX_TABLES = 1 << 16
_OLDEST = 16  # where memory is full, one row of so many is forgotten


class Keys(NamedTuple):
    """Ids of tables."""

    ids: np.ndarray  # uint64 [N]
    tables: np.ndarray  # uint16 [N]


class Resolved(NamedTuple):
    """What a batch's ids are."""

    numbers_N: np.ndarray  # int32: of admitted ids; -1 - i of the i-th of `others`
    others: Keys  # different ids that are not admitted
    forgotten: np.ndarray  # int32: numbers that belong to no id, or another, from now on


class HostRows:
    """All rows that were ever written, of tables of one width."""

    def __init__(self, device: Tables):
        """device: the tables that hold a cache of them."""
        config = device.config
        self.virtual, self.width = device.virtual, device.tables[0].width
        self.widths = widths_of(device.optimizer.slots, config, self.width)
        self.capacity = capacity_of(config, self.widths, self.width)
        self.rows = np.empty((self.capacity, self.width), np.float32)
        self.slots = {
            name: np.empty((self.capacity, width), np.float32)
            for name, width in self.widths.items()
        }
        self.is_written = np.zeros(self.capacity, bool)  # else it is virtual
        self.admitted = Dictionary(self.capacity)
        self.last_named = np.full(self.capacity, -1, np.int32)  # in which batch
        self.admit_after = config.admit_after
        # Ids that are not admitted: as many as rows.
        self.seen = Dictionary(self.capacity if self.admit_after > 1 else 0)
        self.seen_counts = np.empty(self.seen.capacity, np.int32)
        self.seen_last = np.full(self.seen.capacity, -1, np.int32)
        self.batches = 0
        self.num_admitted = self.num_forgotten = 0
        self._initial = {name: device.optimizer.initial.get(name, 0.0) for name in self.widths}
        self._bounds = np.array([table.bound for table in self.virtual.tables], np.float32)

    @property
    def num_bytes(self) -> int:
        """Of memory that is in use."""
        ends = self.admitted.num_bytes + self.seen.num_bytes
        per_row = bytes_per_row(self.widths, self.width)
        return ends + len(self.admitted) * per_row + len(self.seen) * 8

    def virtual_rows(self, keys: Keys) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """New rows, fp32 [R, W], and the optimizer's state of them, [R, W or 1]."""
        columns_W = np.arange(self.width, dtype=np.int32)
        rows = numbers.uniform(
            np.full(1, self.virtual.seed & 0xFFFFFFFF, np.uint32), keys.tables, keys.ids, columns_W
        )
        rows *= self._bounds[keys.tables][:, None]
        slots = {
            name: np.full((len(rows), width), self._initial[name], np.float32)
            for name, width in self.widths.items()
        }
        return rows, slots

    def read(self, numbers_R: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Rows, fp32 [R, W], and the optimizer's state of them, [R, W or 1]."""
        rows = self.rows[numbers_R]
        slots = {name: each[numbers_R] for name, each in self.slots.items()}
        if (at := np.flatnonzero(~self.is_written[numbers_R])).size:
            new = numbers_R[at]
            rows[at], of_new = self.virtual_rows(
                Keys(self.admitted.ids[new], self.admitted.tables[new])
            )
            for name, each in slots.items():
                each[at] = of_new[name]
        return rows, slots

    def write(
        self, numbers_R: np.ndarray, rows_RW: np.ndarray, slots: Mapping[str, np.ndarray]
    ) -> None:
        """What rows are now, and their state."""
        self.rows[numbers_R], self.is_written[numbers_R] = rows_RW, True
        for name, each in self.slots.items():
            each[numbers_R] = slots[name]

    def look_up(self, keys: Keys) -> Resolved:
        """What ids are, of which nothing is remembered: no id is counted or admitted."""
        numbers_N = self.admitted.find(*keys)
        others, numbers_N, _ = _others(keys, numbers_N)
        return Resolved(numbers_N, others, numbers_N[:0])

    def count(self, keys: Keys) -> Resolved:
        """What the ids of a batch that is trained on are: they are counted, and admitted."""
        now = self.batches = self.batches + 1
        numbers_N = self.admitted.find(*keys)
        self.last_named[numbers_N[numbers_N >= 0]] = now
        others, numbers_N, counts = _others(keys, numbers_N)
        enough = counts >= self.admit_after
        if self.admit_after > 1:
            seen = self._seen(others, counts)
            enough = self.seen_counts[seen] >= self.admit_after
            self.seen_last[seen[enough]] = -1
            self.seen.remove(seen[enough])
        forgotten = self._make_room(int(enough.sum()))
        new_R = self.admitted.add(others.ids[enough], others.tables[enough])
        self.last_named[new_R], self.is_written[new_R] = now, False
        self.num_admitted += len(new_R)
        # Numbers of what the others have become.
        become = np.full(len(enough), 0, np.int32)
        become[enough], become[~enough] = new_R, -1 - np.arange(np.count_nonzero(~enough))
        unknown = numbers_N < 0
        numbers_N[unknown] = become[-1 - numbers_N[unknown]]
        left = Keys(others.ids[~enough], others.tables[~enough])
        return Resolved(numbers_N, left, forgotten)

    def _seen(self, others: Keys, counts: np.ndarray) -> np.ndarray:
        """The numbers of ids that are not admitted, with their counts added."""
        seen = self.seen.find(*others)
        known = seen >= 0
        self.seen_last[seen[known]] = self.batches
        excess = len(self.seen) + int((~known).sum()) - self.seen.capacity
        if excess > 0:
            gone = _oldest(self.seen, self.seen_last, excess, self.batches)
            self.seen_last[gone] = -1
            self.seen.remove(gone)
        new = self.seen.add(others.ids[~known], others.tables[~known])
        self.seen_counts[new], self.seen_last[new] = 0, self.batches
        seen[~known] = new
        self.seen_counts[seen] += counts
        return seen

    def _make_room(self, num_new: int) -> np.ndarray:
        """The numbers of rows that are forgotten, so that so many new ones have room."""
        excess = len(self.admitted) + num_new - self.capacity
        if excess <= 0:
            return np.zeros(0, np.int32)
        gone = _oldest(self.admitted, self.last_named, excess, self.batches)
        self.last_named[gone] = -1
        self.admitted.remove(gone)
        self.num_forgotten += len(gone)
        return gone


def _oldest(of: Dictionary, last: np.ndarray, least: int, now: int) -> np.ndarray:
    """Numbers of those that were not named for longest: `least` or more, whole batches."""
    there = of.numbers()
    number = min(max(least, of.capacity // _OLDEST), len(there))
    ages = last[there]
    limit = np.partition(ages, number - 1)[number - 1]
    return there[ages <= min(limit, now - 1)]


def _others(keys: Keys, numbers_N: np.ndarray) -> tuple[Keys, np.ndarray, np.ndarray]:
    """The different keys of those that have no number; numbers, -1 - i of the i-th of these; and
    how often each is there."""
    at = np.flatnonzero(numbers_N < 0)
    some = Keys(keys.ids[at], keys.tables[at])
    order, is_first = grouped(some)
    starts = np.flatnonzero(is_first)
    numbers_N[at[order]] = -np.cumsum(is_first, dtype=np.int32)
    counts = np.diff(np.append(starts, len(order))).astype(np.int32)
    first = order[starts]
    return Keys(some.ids[first], some.tables[first]), numbers_N, counts


def grouped(keys: Keys) -> tuple[np.ndarray, np.ndarray]:
    """An order in which equal keys are neighbors, [N], and which in it are the first of theirs."""
    order = np.lexsort((keys.tables, keys.ids))
    ids, tables = keys.ids[order], keys.tables[order]
    is_first = np.ones(len(ids), bool)
    is_first[1:] = (ids[1:] != ids[:-1]) | (tables[1:] != tables[:-1])
    return order, is_first


def bytes_per_row(widths: Mapping[str, int], width: int) -> int:
    """Of a row, its state, when it was named, where a cache has it, and whether it is written."""
    return 4 * (2 + width + sum(widths.values())) + 1


def capacity_of(config: TablesConfig, widths: Mapping[str, int], width: int) -> int:
    """Rows of this width, with state of these widths, that `tables.host_gib` is for.

    Raises ValueError where the cache and as many rows again do not fit.
    """
    of_row = bytes_per_row(widths, width)
    of_row += 8 * (config.admit_after > 1)
    ways = 1 + (config.admit_after > 1)
    largest = 1 << 24
    of_row += ways * Dictionary.bytes_of(largest) / largest
    capacity = min(int(config.host_gib * 2**30 / of_row), 2**31 - 2)
    if capacity < 2 * config.cache_rows:
        raise ValueError(
            f"tables.host_gib={config.host_gib:g} is for {capacity:,} rows of {of_row:.0f} bytes, "
            f"and has to hold twice tables.cache_rows={config.cache_rows:,}: set it to at least "
            f"{2 * config.cache_rows * of_row / 2**30 + 1e-3:.3f}, or lower tables.cache_rows"
        )
    return capacity


def widths_of(slots: Mapping[str, bool], config: TablesConfig, width: int) -> dict[str, int]:
    """Numbers of each state of a row. `slots`: whether each number of a row has one."""
    own = dict(slots) | ({DECAYED: False} if config.weight_decay else {})
    return {name: width if each else 1 for name, each in own.items()}

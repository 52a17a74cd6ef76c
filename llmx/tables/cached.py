"""Tables larger than the devices: rows in host memory, of which the devices hold a cache.

    tables = make(tables, features, config, mesh, axes=("data",), seed=0)   # with cache_rows
    cached = Cached(tables)                                # rows of the host, on the host
    state = tables.init(0)
    for ids_BK in ...:                                     # of 64 bits, -1 = none
        state, slots_BK = cached.prepare(state, ids_BK)    # between steps
        state = step(state, slots_BK)                      # as of any tables: slots are ids

The devices have one table of `cache_rows` slots for all tables together, split as any other. Before
a step the slots of its ids are found. Where a row is not there, the slot that was not used for
longest is given to it: one jitted program takes the old rows of such slots out, with the
optimizer's state, and puts the new ones in. It runs behind the step before, and the host fetches
what it took out when the next batch is prepared. Nothing communicates: each device gets and gives
rows of its own slots. A row is the same numbers wherever it is, so training equals that of a table
that the devices have whole, bit for bit.

An id that is not admitted (`host_rows`) has a slot for one step, with the row that it begins with;
what the step makes of it is dropped.

Letters: B records, K ids of a record, N ids of a batch, X slots of an exchange, n devices, W width.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from llmx.tables import config as config_lib
from llmx.tables import host_files, host_rows, placement
from llmx.tables import tables as tables_lib
from llmx.tables.config import Feature, Table, TablesConfig
from llmx.tables.host_rows import HostRows, Keys, Resolved
from llmx.tables.tables import Tables, TablesState, Virtual

CACHE = "cache"  # the table of the devices
_LEAST = 64  # slots of an exchange: a power of two from here on, so that few programs are compiled
_MOST_READ = 1 << 16
_ORDERED = dict(indices_are_sorted=True, unique_indices=True)  # of an exchange's places


class CacheTooSmall(ValueError):
    """A batch names more different rows than the devices have room for."""


def make(
    tables: Sequence[Table], features: Sequence[Feature], config: TablesConfig, mesh: Mesh, *,
    axes: Sequence[str] = ("data",), seed: int = 0,
) -> Tables:  # fmt: skip
    """The devices' table of `config.cache_rows` slots, whose features look slots up.

    Raises ValueError, all problems together.
    """
    known = [dataclasses.replace(table, rows=table.rows or 1) for table in tables]
    wrong = list(config_lib.problems(known, features))
    if len({(table.width, table.split) for table in tables}) > 1:
        wrong.append(
            "tables with a cache have different widths or splits: give them one, or each width a "
            "cache of its own"
        )
    if len(tables) >= host_rows.MAX_TABLES:
        wrong.append(f"{len(tables):,} tables: a cache is for fewer than {host_rows.MAX_TABLES:,}")
    if jax.process_count() > 1:
        wrong.append(
            f"tables.cache_rows={config.cache_rows} with {jax.process_count()} processes: rows are "
            "in the memory of one host; use one process, or tables.cache_rows=0"
        )
    if wrong:
        raise ValueError("\n".join(wrong))
    table, looking_up = on_devices(tables, features, config.cache_rows)
    device = tables_lib.make([table], looking_up, config, mesh, axes=axes)
    widths = host_rows.widths_of(device.optimizer.slots, config, table.width)
    host_rows.capacity_of(config, widths, table.width)
    virtual = Virtual(tuple(tables), tuple(features), seed)
    return dataclasses.replace(device, virtual=virtual)


def on_devices(
    tables: Sequence[Table], features: Sequence[Feature], cache_rows: int
) -> tuple[Table, list[Feature]]:
    """The table of slots that devices have, and the features, which look slots up."""
    table = Table(CACHE, cache_rows, tables[0].width, tables[0].split, scale=1.0)
    return table, [dataclasses.replace(one, table=CACHE) for one in features]


class Cached:
    """The rows of the host, and what of them the devices have. Of one run; not for threads."""

    def __init__(self, device: Tables):
        self.tables, self.rows = device, HostRows(device)
        self._columns, self._layout = _Columns(device.virtual), _Layout(device)
        self._cache = _Cache(self._layout, self.rows)

    def prepare(self, state: TablesState, ids_BK: np.ndarray) -> tuple[TablesState, np.ndarray]:
        """The state with the rows of a batch that is trained on next, and their slots.

        Args:
          state: donated.
          ids_BK: of all features side by side, in their order; -1 = none.

        Returns slots int32 [B, K], -1 = none. To be called once before each step, in their order.
        Raises CacheTooSmall, and ValueError for an id that its table does not have.
        """
        self._cache.settle()
        there_BK, keys = self._columns.keys(ids_BK)
        self._cache.require_room(keys)
        return self._cache.placed(state, self.rows.count(keys), there_BK, trains=True)

    def write_back(self, state: TablesState) -> None:
        """Afterwards the host has what the devices have changed."""
        self._cache.write_back(state)

    def view(self, state: TablesState) -> "View":
        """For evaluation: rows as they are after the last step."""
        self.write_back(state)
        return View(self, state)

    def save(self, folder: Any) -> None:
        """Writes the rows and ids into a new folder; `write_back` comes first. Raises OSError."""
        host_files.save(self.rows, folder)

    def load(self, folder: Any) -> None:
        """The reverse of `save`, of a cache that is new. Raises ValueError."""
        host_files.load(self.rows, folder)

    def scalars(self) -> dict[str, float]:
        """For the report: of the last batch the share of its ids whose rows were on the devices;
        and rows on the host, that were admitted and forgotten so far, GiB."""
        return {
            "cache_hits": self._cache.hit_rate, "host_rows": float(len(self.rows.admitted)),
            "rows_admitted": float(self.rows.num_admitted),
            "rows_forgotten": float(self.rows.num_forgotten),
            "host_gib": self.rows.num_bytes / 2**30,
        }  # fmt: skip


class View:
    """A cache of its own, which leaves rows, counts and the cache of training as they are."""

    def __init__(self, cached: Cached, state: TablesState):
        """state: of which only the decay is read."""
        self._rows, self._columns = cached.rows, cached._columns
        self._cache = _Cache(cached._layout, cached.rows)
        self.state = cached.tables.emptied(state.decay)

    def prepare(self, ids_BK: np.ndarray) -> tuple[TablesState, np.ndarray]:
        """As `Cached.prepare`; the state is good until the next call."""
        there_BK, keys = self._columns.keys(ids_BK)
        self._cache.require_room(keys)
        found = self._rows.look_up(keys)
        self.state, slots_BK = self._cache.placed(self.state, found, there_BK, trains=False)
        return self.state, slots_BK


class _Columns:
    """Which table each id of a record is of."""

    def __init__(self, virtual: Virtual):
        number = {table.name: number for number, table in enumerate(virtual.tables)}
        rows = {table.name: table.rows or 2**63 for table in virtual.tables}
        self._features_K = [one for one in virtual.features for _ in range(one.columns)]
        self._tables_K = np.array([number[one.table] for one in self._features_K], np.uint16)
        self._last_K = np.array([rows[one.table] - 1 for one in self._features_K], np.int64)

    def keys(self, ids_BK: np.ndarray) -> tuple[np.ndarray, Keys]:
        """Which ids there are, bool [B, K], and these, [N]."""
        ids_BK = np.asarray(ids_BK)
        assert ids_BK.ndim == 2 and ids_BK.shape[1] == len(self._tables_K), ids_BK.shape
        wrong_BK = (ids_BK < -1) | (ids_BK.astype(np.int64) > self._last_K)
        if wrong_BK.any():
            record, column = np.argwhere(wrong_BK)[0]
            feature = self._features_K[column]
            raise ValueError(
                f"table {feature.table!r}: id {ids_BK[record, column]} of feature "
                f"{feature.name!r} in record {record:,} of a batch is not from 0 to "
                f"{self._last_K[column]:,}: hash ids, or make the table larger; -1 says that there "
                "is no id"
            )
        there_BK = ids_BK >= 0
        tables_BK = np.broadcast_to(self._tables_K, ids_BK.shape)
        return there_BK, Keys(ids_BK[there_BK].astype(np.uint64), tables_BK[there_BK])


class _Pending(NamedTuple):
    """Rows that were taken out, on their way to the host."""

    numbers_R: np.ndarray
    at_R: np.ndarray  # of which of the slots of the exchange
    exchange: "_Exchange"
    rows: jax.Array
    slots: Mapping[str, jax.Array]


class _Cache:
    """Which row each slot has."""

    def __init__(self, layout: "_Layout", rows: HostRows):
        self._layout, self._rows = layout, rows
        self._size = size = layout.device.tables[0].rows
        self._row_of = np.full(size, -1, np.int32)
        self._used_at = np.full(size, -1, np.int32)  # in which call; -1: it has no row
        self._is_dirty = np.zeros(size, bool)
        self._slot_of = np.full(rows.capacity, -1, np.int32)
        self._now = 0
        self._passing = np.zeros(0, np.int32)  # slots with a row for one step
        # Slots that were used the longest time ago, and when that was
        self._queue = (np.zeros(0, np.int64), np.zeros(0, np.int32))
        self._pending: _Pending | None = None
        self.hit_rate = 0.0

    def require_room(self, keys: Keys) -> None:
        """Raises CacheTooSmall."""
        if len(keys.ids) <= self._size:
            return
        different = int(host_rows.grouped(keys)[1].sum())
        if different > self._size:
            raise CacheTooSmall(
                f"a batch names {different:,} different rows, and tables.cache_rows={self._size:,} "
                f"are on the devices: set it to at least {different:,}, or lower batch.size"
            )

    def placed(
        self, state: TablesState, found: Resolved, there_BK: np.ndarray, *, trains: bool
    ) -> tuple[TablesState, np.ndarray]:
        """The state with the rows of a batch, and their slots, int32 [B, K]."""
        self._now += 1
        gone = self._slot_of[found.forgotten]
        self._slot_of[found.forgotten] = -1
        self._release(np.concatenate([gone[gone >= 0], self._passing]))
        numbers_N = found.numbers_N
        is_row_N = numbers_N >= 0
        slots_N = np.full(len(numbers_N), -1, np.int32)
        slots_N[is_row_N] = self._slot_of[numbers_N[is_row_N]]
        hit_N = slots_N >= 0
        self.hit_rate = float(hit_N.mean()) if len(hit_N) else 1.0
        self._used_at[slots_N[hit_N]] = self._now
        missing = np.sort(numbers_N[is_row_N & ~hit_N])
        missing = missing[np.diff(missing, prepend=-1) > 0]
        chosen = self._oldest(len(missing) + len(found.others.ids))
        taken, self._passing = chosen[: len(missing)], chosen[len(missing) :]
        state = self._exchanged(state, chosen, missing, found.others)
        self._slot_of[missing], self._row_of[taken] = taken, missing
        slots_N[is_row_N] = self._slot_of[numbers_N[is_row_N]]
        slots_N[~is_row_N] = self._passing[-1 - numbers_N[~is_row_N]]
        if trains:
            self._is_dirty[slots_N[is_row_N]] = True
        slots_BK = np.full(there_BK.shape, -1, np.int32)
        slots_BK[there_BK] = slots_N
        return state, slots_BK

    def _release(self, slots: np.ndarray) -> None:
        """Slots whose rows are dropped: the first to be given away."""
        self._row_of[slots], self._used_at[slots], self._is_dirty[slots] = -1, -1, False
        queue, stamps = self._queue
        new = np.full(len(slots), -1, np.int32)
        self._queue = np.concatenate([slots, queue]), np.concatenate([new, stamps])

    def _oldest(self, number: int) -> np.ndarray:
        """So many slots that this batch does not use, from now on used by it."""
        chosen = []
        while number:
            queue, stamps = self._queue
            if not queue.size:
                size = min(self._size, max(number, self._size // 16))
                queue = np.argpartition(self._used_at, size - 1)[:size]
                queue = queue[np.argsort(self._used_at[queue], kind="stable")]
                stamps = self._used_at[queue]
            first, self._queue = queue[:number], (queue[number:], stamps[number:])
            # Others were used since, by this batch too.
            same = (self._used_at[first] == stamps[:number]) & (stamps[:number] < self._now)
            chosen.append(first[same])
            self._used_at[chosen[-1]] = self._now
            number -= len(chosen[-1])
        return np.concatenate(chosen) if chosen else np.zeros(0, np.int64)

    def _exchanged(
        self, state: TablesState, chosen: np.ndarray, missing: np.ndarray, others: Keys
    ) -> TablesState:
        """The state with other rows in the slots `chosen`."""
        if not len(chosen):
            return state
        rows, slots = self._rows.read(missing)
        if len(others.ids):
            more, of_more = self._rows.virtual_rows(others)
            rows = np.concatenate([rows, more])
            slots = {name: np.concatenate([slots[name], of_more[name]]) for name in slots}
        exchange = self._layout.exchange(chosen)
        state, old, old_slots = exchange.swap(state, rows, slots)
        at = np.flatnonzero(self._is_dirty[chosen])
        before = self._row_of[chosen]
        self._slot_of[before[before >= 0]] = -1
        self._row_of[chosen], self._is_dirty[chosen] = -1, False
        if at.size:
            for leaf in jax.tree.leaves((old, old_slots)):
                leaf.copy_to_host_async()
            self._pending = _Pending(before[at], at, exchange, old, old_slots)
        return state

    def settle(self) -> None:
        """Waits for the rows that the last exchange took out, and writes them to the host."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        rows, slots = pending.exchange.gathered(pending.rows, pending.slots)
        at = pending.at_R
        slots = {name: each[at] for name, each in slots.items()}
        self._rows.write(pending.numbers_R, rows[at], slots)

    def write_back(self, state: TablesState) -> None:
        """Writes rows that have changed to the host; they stay where they are."""
        self.settle()
        dirty = np.flatnonzero(self._is_dirty)
        for first in range(0, len(dirty), _MOST_READ):
            chosen = dirty[first : first + _MOST_READ]
            exchange = self._layout.exchange(chosen)
            rows, slots = exchange.gathered(*exchange.read(state))
            self._rows.write(self._row_of[chosen], rows, slots)
        self._is_dirty[dirty] = False


class _Layout:
    """Where slots are in the devices' arrays, and the programs that move them."""

    def __init__(self, device: Tables):
        self.device = device
        [(self.key, self.group)] = device.groups.items()
        self.parts = self.group.parts_of(CACHE)
        self.per_number = dict(device.optimizer.slots)
        self.to = NamedSharding(device.mesh, device.split)
        split = device.split
        swap = device.region(_swapped, (split,) * 5, (split,) * 4)
        self.swap = jax.jit(swap, donate_argnums=(0, 1))
        self.read = jax.jit(device.region(_read, (split,) * 3, (split,) * 2))

    @functools.cached_property
    def places(self) -> list[np.ndarray]:
        """Of each part, the place of each slot."""
        return [placement.places(self.group, part) for part in self.parts]

    def exchange(self, chosen: np.ndarray) -> "_Exchange":
        return _Exchange(self, chosen)


class _Exchange:
    """Some slots, and which of each device's places they are: arrays [n X, ...], X of a device."""

    def __init__(self, layout: _Layout, chosen: np.ndarray):
        self._layout, group, n = layout, layout.group, layout.group.devices
        self._num, self._at = len(chosen), []  # of each part: where each slot is in the arrays
        found = []
        for places in layout.places:
            device, local = np.divmod(places[chosen], group.slots)
            order = np.lexsort((local, device))
            counts = np.bincount(device, minlength=n)
            rank = np.empty(len(chosen), np.int64)
            rank[order] = np.arange(len(chosen)) - np.repeat(np.cumsum(counts) - counts, counts)
            found.append((device, local, rank, int(counts.max())))
        most = max(each[3] for each in found)
        size = max(_LEAST, 1 << (most - 1).bit_length())
        self._shape = n * size
        # Ascending and different ones of each device; from group.slots on: none.
        places_X = np.tile(np.arange(group.slots, group.slots + size, dtype=np.int32), n)
        for device, local, rank, _ in found:
            self._at.append(device * size + rank)
            places_X[self._at[-1]] = local
        self._places = jax.device_put(places_X, layout.to)

    def swap(
        self, state: TablesState, rows_RW: np.ndarray, slots: Mapping[str, np.ndarray]
    ) -> tuple[TablesState, jax.Array, dict[str, jax.Array]]:
        """The state with these rows in the slots, and what was there, [n X, ...]; donates it."""
        layout, key = self._layout, self._layout.key
        new = self._scattered(rows_RW, of_numbers=True)
        of_new = {
            name: self._scattered(each, of_numbers=layout.per_number.get(name, False))
            for name, each in slots.items()
        }
        with jax.set_mesh(layout.device.mesh):
            rows, of_rows, old, of_old = layout.swap(
                state.rows[key], state.slots[key], self._places, new, of_new
            )
        return TablesState({key: rows}, {key: of_rows}, state.decay), old, of_old

    def read(self, state: TablesState) -> tuple[jax.Array, dict[str, jax.Array]]:
        """What is in the slots, [n X, ...]."""
        layout, key = self._layout, self._layout.key
        with jax.set_mesh(layout.device.mesh):
            return layout.read(state.rows[key], state.slots[key], self._places)

    def gathered(
        self, rows: jax.Array, slots: Mapping[str, jax.Array]
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Of arrays [n X, ...] those of the slots, [R, ...], on the host."""
        per_number = self._layout.per_number
        return self._joined(rows, of_numbers=True), {
            name: self._joined(each, of_numbers=per_number.get(name, False))
            for name, each in slots.items()
        }

    def _scattered(self, array: np.ndarray, *, of_numbers: bool) -> jax.Array:
        """[R, W or 1] as each device takes it; `of_numbers`: each number of a row has one."""
        width = self._layout.group.width if of_numbers else 1
        found = np.zeros((self._shape, width), np.float32)
        for at, part in zip(self._at, self._layout.parts, strict=True):
            found[at] = array[:, slice(*part.columns)] if of_numbers else array
        return jax.device_put(found, self._layout.to)

    def _joined(self, array: jax.Array, *, of_numbers: bool) -> np.ndarray:
        array = np.asarray(array)
        if not of_numbers:  # parts have the same
            return array[self._at[0]]
        return np.concatenate([array[at] for at in self._at], axis=1)


def _swapped(rows, slots, places_X, new, of_new):
    """Of one device: rows and state with new ones at places, and those that were there."""
    old, of_old = _read(rows, slots, places_X)

    def put(whole, old, new):
        # Places are not negative. What is written depends on what was read: else the compiler would
        # copy the whole array first, so that reads may follow.
        part = jax.numpy.where((places_X < 0)[:, None], old, new)
        return whole.at[places_X].set(part, mode="drop", **_ORDERED)

    return put(rows, old, new), jax.tree.map(put, slots, of_old, of_new), old, of_old


def _read(rows, slots, places_X):
    take = lambda whole: whole.at[places_X].get(mode="fill", fill_value=0, **_ORDERED)  # noqa: E731
    return take(rows), jax.tree.map(take, slots)

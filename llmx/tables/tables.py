"""Tables on a mesh: rows taken for a batch, combined, and updated where a batch has touched them.

    tables = make(tables, features, config, mesh, axes=("data",))
    state = tables.init(seed)
    taken = tables.take(state, ids)                        # in a jitted step, as all that follows
    def loss(rows, ...):
        inputs = tables.combine(rows, taken.plan)          # {feature: [B, W]}
        ...
    state = tables.update(state, taken, jax.grad(loss)(taken.rows), rate=0.02)

The mesh has explicit axes, and is that of the context (`jax.set_mesh`); ids are split as the batch.
Rows are split over the mesh axes `axes` of the batch; along other axes they are whole. Each device
asks for the different rows of its records. That is one all-to-all of ids and one of rows, for all
tables; gradients go back by one more. On one device nothing communicates.

Letters: B records, L ids of a feature, K ids of a device, U = K places of different rows, W width,
n devices along `axes`, C rows that a device asks of each other.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from llmx.sharding import local_view
from llmx.tables import by_id, checks, costs, numbers, placement, requests, row_optimizers
from llmx.tables.by_id import DECAYED, ROWS, Source
from llmx.tables.config import Feature, Table, TablesConfig
from llmx.tables.placement import Group
from llmx.tables.row_optimizers import RowOptimizer

Ids = Mapping[str, Any]  # by feature, int32 [B, L x hashes]; -1 = none
NO_DECAY = (0.0, 0.0)  # of a new state


class Virtual(NamedTuple):
    """Tables of which the host has the rows: `tables.cached`."""

    tables: tuple[Table, ...]
    features: tuple[Feature, ...]
    seed: int


class TablesState(NamedTuple):
    """What tables are, by width: in checkpoints, split by devices."""

    rows: dict[str, jax.Array]  # fp32 [n x slots, W]
    slots: dict[str, dict[str, jax.Array]]  # of the optimizer, fp32 [n x slots, W or 1]
    # fp32 [2]: the sum of log(1 - lr weight_decay) of all steps, and what rounding took of it
    decay: jax.Array


def by_path(saved: Any) -> TablesState:
    """The state of arrays in nested dicts, in which an optimizer may keep nothing."""
    if isinstance(saved, TablesState):
        return saved
    kept = saved.get("slots", {})
    slots = {key: kept.get(key, {}) for key in saved["rows"]}
    return TablesState(saved["rows"], slots, saved["decay"])


class Plan(NamedTuple):
    """Which rows a batch looks up: integers."""

    rows_U: jax.Array  # int32 [n U]: the different rows that each device asks for
    place_BK: jax.Array  # int32: where each id of a record is in the device's U
    present_BK: jax.Array  # bool: there is such an id
    rounds: jax.Array  # int32 [], exchanges that it takes


class Taken(NamedTuple):
    """Rows for a batch, by width."""

    rows: dict[str, jax.Array]  # fp32 [n U, W]: what is differentiated
    plan: dict[str, Plan]
    unknown: jax.Array  # int32 [n]: how many ids of each device's records tables do not have


@dataclasses.dataclass(frozen=True, eq=False)
class Tables:
    """Sparse tables on a mesh, as functions of their state."""

    tables: tuple[Table, ...]
    features: tuple[Feature, ...]
    config: TablesConfig
    mesh: Mesh
    axes: tuple[str, ...]  # that split rows and records; () = one device has all
    all_axes: tuple[str, ...]  # with those of size 1
    groups: Mapping[str, Group]
    optimizer: RowOptimizer
    virtual: Virtual | None = None  # what they are a cache of; ids are slots of it then
    local_axes: tuple[str, ...] = ()  # along which rows are local views, see `per_replica`

    # ------------------------------------------------------------------------------------ state

    @property
    def devices(self) -> int:
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    @property
    def split(self) -> PartitionSpec:
        """Of rows, and of records."""
        return PartitionSpec(self.axes if self.axes else None)

    def groups_on(self, sizes: Mapping[str, int], split: str = "") -> dict[str, Group]:
        """Where rows are on a mesh of these sizes, with this `split` of all tables; "" = as they
        are here."""
        devices, tables = self._on(sizes, split)
        return _groups(tables, self.features, devices)

    def _on(self, sizes: Mapping[str, int], split: str) -> tuple[int, tuple[Table, ...]]:
        devices = math.prod(sizes.get(axis, 1) for axis in self.all_axes)
        if not split:
            return devices, self.tables
        return devices, tuple(dataclasses.replace(table, split=split) for table in self.tables)

    @functools.cached_property
    def abstract(self) -> TablesState:
        """Shapes with shardings of the state."""
        by_row, whole = (NamedSharding(self.mesh, spec) for spec in (self.split, PartitionSpec()))

        def array(group: Group, width: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((group.none, width), jnp.float32, sharding=by_row)

        return TablesState(
            {key: array(group, group.width) for key, group in self.groups.items()},
            {
                key: {name: array(group, group.width if each else 1)
                      for name, each in self._slots.items()}
                for key, group in self.groups.items()
            },
            jax.ShapeDtypeStruct((2,), jnp.float32, sharding=whole),
        )  # fmt: skip

    @property
    def _slots(self) -> dict[str, bool]:
        """What is kept of a row, and whether of each of its numbers."""
        return dict(self.optimizer.slots) | ({DECAYED: False} if self.config.weight_decay else {})

    def per_replica(self, axes: Sequence[str]) -> "Tables":
        """The same for what a replica along `axes` does with rows that were taken: they are local
        views. Only to `combine`, and for `abstract_rows` of its records."""
        return dataclasses.replace(
            self, axes=tuple(axis for axis in self.axes if axis not in axes),
            local_axes=tuple(axis for axis in self.axes if axis in axes),
        )  # fmt: skip

    def of_length(self, length: int) -> "Tables":
        """The same for records of so many ids of each feature. Only to `take` and `combine`."""
        features = (dataclasses.replace(one, length=length) for one in self.features)
        return dataclasses.replace(self, features=tuple(features))

    def abstract_rows(self, num_records: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes with shardings of the rows that so many records look up, by width."""
        to, found = NamedSharding(self.mesh, self.split), {}
        for key, group in self.groups.items():
            columns = sum(feature.columns for feature, _ in group.lookups(self.features))
            shape = (num_records * columns, group.width)
            found[key] = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=to)
        return found

    def init(self, seed: int) -> TablesState:
        """`new`, each device's part made there."""
        to = jax.tree.map(lambda leaf: leaf.sharding, self.abstract)
        make = jax.sharding.auto_axes(lambda: self.new(seed), out_sharding=to)
        return jax.jit(make, out_shardings=to)()

    def new(self, seed: int) -> TablesState:
        """New tables: a function of seed, table and id, however rows are split."""
        slots = {
            key: {
                name: jnp.full(leaf.shape, self.optimizer.initial.get(name, 0.0), leaf.dtype)
                for name, leaf in of_group.items()
            }
            for key, of_group in self.abstract.slots.items()
        }
        rows = {key: self._new_rows(seed, group) for key, group in self.groups.items()}
        return TablesState(rows, slots, jnp.zeros(2))

    def _new_rows(self, seed: int, group: Group) -> jax.Array:
        """Those of all devices, [n slots, W], each device's made there; 0 where it has no row."""
        # Behind a barrier: the compiler would compute rows of constants itself, for minutes.
        seed = jax.lax.optimization_barrier(jnp.uint32(seed & 0xFFFFFFFF))
        if not self.axes:
            return self._rows_of_device(group, seed, jnp.zeros((), jnp.int32))
        of_device = lambda seed: self._rows_of_device(group, seed, self._device())  # noqa: E731
        # The mesh is that of the context, whose axes are automatic here.
        return jax.shard_map(
            of_device, in_specs=PartitionSpec(), out_specs=self.split, check_vma=False
        )(seed)

    def _device(self) -> jax.Array:
        """The number of this device along `axes`."""
        return jax.lax.axis_index(self.axes)

    def _rows_of_device(self, group: Group, seed: jax.Array, device: jax.Array) -> jax.Array:
        rows = jnp.zeros((group.slots, group.width), jnp.float32)
        for part in group.parts:
            ids = jnp.arange(part.slots(group.devices), dtype=jnp.int32)
            if part.device < 0:
                ids = ids * group.devices + (device - part.shift) % group.devices
            columns = jnp.arange(*part.columns, dtype=jnp.int32)
            new = part.table.bound * numbers.uniform(seed, part.number, ids, columns, xp=jnp)
            new = jnp.where((ids < part.table.rows)[:, None], new, 0.0)
            if part.device >= 0:  # there others may have other parts at these slots
                old = rows[part.base : part.base + part.table.rows]
                new = jnp.where(device == part.device, new, old)
            rows = jax.lax.dynamic_update_slice(rows, new, (part.base, 0))
        return rows

    # ----------------------------------------------------------------------------------- lookups

    def take(self, state: TablesState, ids: Ids) -> Taken:
        """The rows that a batch looks up. Ids that a table does not have count as none
        (`problems_of` names them). Communicates ids and rows over `axes`, of all tables at once.

        Raises ValueError for ids on the host of more than 32 bits, and for no records."""
        for feature in self.features:
            checks.require_32_bits(feature, ids[feature.name])
        each = {f.name: jnp.asarray(ids[f.name], jnp.int32) for f in self.features}
        if not all(len(array) for array in each.values()):
            raise ValueError("a batch without records: give take at least one of each device")
        passed = {key: slots[DECAYED] for key, slots in state.slots.items() if DECAYED in slots}
        one, by_key = PartitionSpec(), dict.fromkeys(self.groups, self.split)
        plan = dict.fromkeys(self.groups, Plan(self.split, self.split, self.split, one))
        found = self.region(
            self._take, (self.split, self.split, one, self.split), (by_key, plan, self.split)
        )(state.rows, passed, state.decay[0], each)
        return Taken(*found)

    def _numbered(self, group: Group, ids: Mapping[str, jax.Array]):
        """Numbers of rows, [B, K], of the ids of each lookup, and which there are."""
        found, there = [], []
        for feature, part in group.lookups(self.features):
            each = ids[feature.name]
            is_there = (each >= 0) & (each < part.table.rows)
            if part.device < 0:
                device, slot = (each + part.shift) % group.devices, each // group.devices
            else:
                device, slot = part.device, each
            number = device * group.slots + part.base + slot
            found.append(jnp.where(is_there, number, group.none))
            there.append(is_there)
        return jnp.concatenate(found, axis=1), jnp.concatenate(there, axis=1)

    def capacities(self, asked: requests.Asked) -> dict[str, int]:
        """C, by width."""
        return {
            key: costs.capacity(group, asked[key].shape[0], self.config.capacity)
            for key, group in self.groups.items()
        }

    def _take(self, rows, passed, decay, ids):
        """`take` of one device."""
        asked, place, there = {}, {}, {}
        for key, group in self.groups.items():
            number_BK, there[key] = self._numbered(group, ids)
            asked[key], place_K = requests.once(number_BK.reshape(-1), none=group.none)
            place[key] = place_K.reshape(number_BK.shape)
        unknown = self._num_unknown(ids)

        def of_slots(key, slots):
            """Rows of slots, 0 where there is none, as a decay that is to come leaves them."""
            slots = jnp.where(slots < 0, self.groups[key].slots, slots)
            found = rows[key].at[slots].get(mode="fill", fill_value=0)
            if key in passed:
                last = passed[key].at[slots].get(mode="fill", fill_value=0)
                found = found * jnp.exp(decay - last)
            return found

        if not self.axes:
            rounds, taken = jnp.ones((), jnp.int32), {}
            for key, group in self.groups.items():
                # Written, so that what follows reads few rows in their order and not the table.
                taken[key] = jax.lax.optimization_barrier(
                    of_slots(key, jnp.where(asked[key] < group.none, asked[key], -1))
                )
        else:
            capacities = self.capacities(asked)
            rounds = requests.num_rounds(self.groups, asked, capacities, self.axes)
            taken = self._taken(of_slots, asked, capacities, rounds)
        plans = {key: Plan(asked[key], place[key], there[key], rounds) for key in self.groups}
        return taken, plans, unknown

    def _taken(self, of_slots, asked, capacities, rounds) -> dict[str, jax.Array]:
        """The rows [U, W] that a device asks for, from the devices that have them."""
        known = requests.fit(self.groups, asked, capacities)

        def one_round(number, taken):
            buckets = {
                key: requests.bucket(group, asked[key], capacities[key], rounds, number)
                for key, group in self.groups.items()
            }
            wanted = {key: bucket.slots_nC for key, bucket in buckets.items()}
            wanted = requests.exchange(wanted, self.axes)
            sent = {key: of_slots(key, slots_nC) for key, slots_nC in wanted.items()}
            sent = requests.exchange(sent, self.axes)
            new = {}
            for key, group in self.groups.items():
                sent_MW = sent[key].reshape(-1, group.width)
                new[key] = sent_MW.at[buckets[key].at_U].get(mode="fill", fill_value=0)
            return jax.tree.map(jnp.add, taken, new)

        zeros = {
            key: jnp.zeros((asked[key].shape[0], group.width))
            for key, group in self.groups.items()
        }  # fmt: skip
        return requests.each_round(1 if known else rounds, one_round, zeros)

    def _num_unknown(self, ids: Mapping[str, jax.Array]) -> jax.Array:
        """How many ids of a device's records tables do not have, int32 [1]."""
        rows = {table.name: table.rows for table in self.tables}
        each = [
            jnp.sum((ids[f.name] < -1) | (ids[f.name] >= rows[f.table]), dtype=jnp.int32)
            for f in self.features
        ]  # fmt: skip
        return sum(each).reshape(1)

    def region(self, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """`function`, which is the text of one device."""
        return local_view.manual(
            self.mesh, self.local_axes, function, in_specs=in_specs, out_specs=out_specs
        )

    def combine(
        self, rows: Mapping[str, jax.Array], plan: Mapping[str, Plan],
        weights: Mapping[str, jax.Array] | None = None,
    ) -> dict[str, jax.Array]:  # fmt: skip
        """By feature, its rows combined to one, [B, W], or not, [B, L, W]; 0 where there is none.

        weights: by feature fp32 [B, L]: rows are multiplied by them first; means are divided by
        their sum. Differentiable in rows and weights. Nothing communicates.
        """
        weights = dict(weights or {})
        found: dict[str, list[jax.Array]] = {feature.name: [] for feature in self.features}
        for key, group in self.groups.items():
            lookups = group.lookups(self.features)
            names = [feature.name for feature, _ in lookups]
            own = {name: weights[name] for name in dict.fromkeys(names) if name in weights}
            combined = self.region(
                functools.partial(self._combine, lookups), (self.split,) * 4, self.split
            )(rows[key], plan[key].place_BK, plan[key].present_BK, own)
            for name, array in zip(names, combined, strict=True):
                found[name].append(array)
        return {
            name: parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)
            for name, parts in found.items()
        }

    def _combine(self, lookups, rows_UW, place_BK, present_BK, weights) -> list[jax.Array]:
        rows_BKW = rows_UW[place_BK]
        found, first = [], 0
        for feature, _ in lookups:
            end = first + feature.columns
            of_feature, there = rows_BKW[:, first:end], present_BK[:, first:end, None]
            first = end
            if feature.hashes > 1:
                # An id has all of its rows, or none.
                shape = (len(of_feature), feature.length, feature.hashes, -1)
                of_feature = of_feature.reshape(shape) * there.reshape(shape)
                of_feature, there = of_feature.sum(axis=2), there.reshape(shape)[:, :, 0]
            scale = there.astype(rows_UW.dtype)
            if feature.name in weights:
                scale = scale * weights[feature.name][..., None]
            if feature.combine == "max":
                lowest = jnp.where(there, of_feature * scale, -jnp.inf).max(axis=1)
                found.append(jnp.where(there.any(axis=1), lowest, 0.0))
                continue
            if feature.combine == "none":
                found.append(of_feature * scale)
                continue
            total = (of_feature * scale).sum(axis=1)
            if feature.combine == "mean":
                count = scale.sum(axis=1)
                total = total / jnp.where(count == 0, 1.0, count)
            found.append(total)
        return found

    # ------------------------------------------------------------------------------------ updates

    def update(
        self, state: TablesState, taken: Taken, gradients: Mapping[str, jax.Array], *,
        rate: jax.Array | float, accepted: jax.Array | bool = True,
    ) -> TablesState:  # fmt: skip
        """The state after an update of the rows that were taken; others stay, bit for bit.

        gradients: by width, fp32 [n U, W], of what is the sum over all devices' records. rate: the
        learning rate. Communicates gradients over `axes`, of all tables at once.
        """
        rate, accepted = jnp.asarray(rate, jnp.float32), jnp.asarray(accepted)
        decay = state.decay
        if self.config.weight_decay:
            more = jnp.where(accepted, jnp.log1p(-rate * self.config.weight_decay), 0.0)
            decay = _added(decay, more)
        one, by_key = PartitionSpec(), dict.fromkeys(self.groups, self.split)
        asked = {key: plan.rows_U for key, plan in taken.plan.items()}
        rounds = next(iter(taken.plan.values())).rounds
        rows, slots = self.region(
            self._update, (self.split,) * 4 + (one,) * 4, (by_key, self.split),
        )(
            state.rows, state.slots, asked, dict(gradients), rounds, rate, accepted,
            jnp.stack([state.decay[0], decay[0]]),
        )  # fmt: skip
        return TablesState(rows, slots, decay)

    def _update(self, rows, slots, asked, gradients, rounds, rate, accepted, decay):
        """`update` of one device."""
        if not self.axes:
            found = {}
            for key, group in self.groups.items():
                # The different rows ascend already, and none is there twice.
                at_U = jnp.where(asked[key] < group.none, asked[key], group.slots)
                found[key] = self._applied(
                    group, rows[key], slots[key], at_U, gradients[key], rate, accepted, decay
                )
            return _unzipped(found)
        capacities = self.capacities(asked)
        known = requests.fit(self.groups, asked, capacities)

        def one_round(number, state):
            sent = {}
            for key, group in self.groups.items():
                bucket = requests.bucket(group, asked[key], capacities[key], rounds, number)
                sent_nCW = gradients[key].at[bucket.from_nC].get(mode="fill", fill_value=0)
                # Slots travel beside the gradients, all as bits.
                sent_nCW = jax.lax.bitcast_convert_type(sent_nCW, jnp.int32)
                sent[key] = jnp.concatenate([sent_nCW, bucket.slots_nC[..., None]], axis=-1)
            found = {}
            for key, both in requests.exchange(sent, self.axes).items():
                group, both_MW = self.groups[key], both.reshape(-1, both.shape[-1])
                own_MW = jax.lax.bitcast_convert_type(both_MW[:, :-1], jnp.float32)
                at_M, sums_MW = requests.summed(both_MW[:, -1], own_MW, none=group.slots)
                found[key] = self._applied(
                    group, state[0][key], state[1][key], at_M, sums_MW, rate, accepted, decay
                )
            return _unzipped(found)

        return requests.each_round(1 if known else rounds, one_round, (rows, slots))

    def _applied(self, group: Group, rows, slots, at_M, gradients_MW, rate, accepted, decay):
        """The state with these slots updated; `group.slots` and more stand for none."""
        before, after = decay
        old = rows.at[at_M].get(mode="fill", fill_value=0, indices_are_sorted=True)
        kept = {
            name: leaf.at[at_M].get(mode="fill", fill_value=0, indices_are_sorted=True)
            for name, leaf in slots.items()
        }
        own = dict(kept)
        if (passed := own.pop(DECAYED, None)) is not None:
            old = old * jnp.exp(before - passed)
        new, new_slots = self.optimizer.update(old, own, gradients_MW.astype(jnp.float32), rate)
        if passed is not None:
            new = new + old * jnp.expm1(after - before)
            new_slots = new_slots | {DECAYED: jnp.broadcast_to(after, passed.shape)}
        at_M = jnp.where(accepted, at_M, group.slots)  # else nothing is written
        put = lambda whole, part: whole.at[at_M].set(  # noqa: E731
            part, mode="drop", indices_are_sorted=True
        )
        return put(rows, new), {name: put(leaf, new_slots[name]) for name, leaf in slots.items()}

    # ------------------------------------------------------------------------------ whole tables

    def table(self, state: TablesState, name: str) -> np.ndarray:
        """All rows of a table, fp32 [rows, width], on the host: of small ones, for tests. All
        processes' devices must be addressable."""
        [table] = [table for table in self.tables if table.name == name]
        held = by_id.of_state(
            jax.device_get(state), self.tables, self.features, self.devices,
            slots=self.optimizer.slots, due=True,
        )  # fmt: skip
        return held.read(name, ROWS, slice(0, table.rows))

    def relaid(self, saved: Any, sizes: Mapping[str, int], split: str = "") -> TablesState:
        """A state that was saved on a mesh of other sizes, or with another `split` of all tables,
        as it is here; itself, if that is the same. Numbers stay what they are, bit for bit. A cache
        is empty.

        saved: a state, or its arrays by path where its shapes are others. Raises ValueError where
        it is another optimizer's.
        """
        if isinstance(saved, TablesState) and not self.is_moved(sizes, split):
            return saved
        if self.virtual:
            return self.emptied(
                saved.decay if isinstance(saved, TablesState) else saved["decay"]
            )  # fmt: skip
        devices, were = self._on(sizes, split)
        state = jax.device_get(by_path(saved))
        kept = {name for of_group in state.slots.values() for name in of_group}
        if missing := self.optimizer.slots.keys() - kept:
            raise ValueError(
                f"tables.optimizer={self.config.optimizer!r} keeps {', '.join(sorted(missing))} of "
                f"rows, and the checkpoint has {', '.join(sorted(kept)) or 'nothing'}: restore "
                "tables.optimizer, or begin another run with an export (start_from)"
            )
        # Without a weight decay to come, what is due is taken off now.
        due = DECAYED in kept and not self.config.weight_decay
        slots = self.optimizer.slots
        held = by_id.of_state(state, were, self.features, devices, slots=slots, due=due)
        return self.filled(held, tuple(kept & self._slots.keys()), NO_DECAY if due else state.decay)

    def emptied(self, decay: Any) -> TablesState:
        """A cache without rows. The decay is copied: it may be another state's, that is donated."""
        zeros = lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)  # noqa: E731
        rows, slots = jax.tree.map(zeros, (self.abstract.rows, self.abstract.slots))
        to = self.abstract.decay.sharding
        return TablesState(rows, slots, jax.device_put(np.array(decay), to))

    def filled(self, source: Source, slots: Sequence[str], decay: Any = NO_DECAY) -> TablesState:
        """The state of rows by id, and of what optimizers keep in `slots`; others are new. Each
        process reads the rows of its own devices."""
        abstract, to = self.abstract, self.abstract.decay.sharding

        def array(key: str, slot: str, like: jax.ShapeDtypeStruct) -> jax.Array:
            group = self.groups[key]
            fill = self.optimizer.initial.get(slot, 0.0)

            def of_device(index: tuple[slice, ...]) -> np.ndarray:
                device = (index[0].start or 0) // group.slots
                width = like.shape[1]
                if slot != ROWS and slot not in slots:
                    return np.full((group.slots, width), fill, np.float32)
                return by_id.of_device(group, device, source, slot, width=width, fill=fill)

            return jax.make_array_from_callback(like.shape, like.sharding, of_device)

        return TablesState(
            {key: array(key, ROWS, like) for key, like in abstract.rows.items()},
            {
                key: {name: array(key, name, like) for name, like in of_group.items()}
                for key, of_group in abstract.slots.items()
            },
            jax.device_put(np.array(decay, np.float32), to),
        )  # fmt: skip

    def is_moved(self, sizes: Mapping[str, int], split: str = "") -> bool:
        """Whether rows are elsewhere on a mesh of these sizes, or with this `split`; a checkpoint
        has none of a cache."""
        return bool(self.virtual) or self._on(sizes, split) != (self.devices, self.tables)

    def problems_of(self, ids: Mapping[str, np.ndarray], first_record: int = 0) -> Iterator[str]:
        """Ids on the host that a table does not have."""
        return checks.problems_of_ids(self.tables, self.features, ids, first_record)


def _added(decay_2: jax.Array, more: jax.Array) -> jax.Array:
    """A sum with what it has lost (Kahan's): a step adds less than fp32 has digits for."""
    total, lost = decay_2
    more = more + lost
    new = total + more
    return jnp.stack([new, more - (new - total)])


def _groups(tables: Sequence[Table], features: Sequence[Feature], devices: int) -> dict[str, Group]:
    """The groups by width."""
    return {str(group.width): group for group in placement.placed(tables, features, devices)}


def _unzipped(found: Mapping[str, tuple[Any, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Firsts and seconds."""
    return {key: one for key, (one, _) in found.items()}, {
        key: other for key, (_, other) in found.items()
    }


def make(
    tables: Sequence[Table], features: Sequence[Feature], config: TablesConfig, mesh: Mesh, *,
    axes: Sequence[str] = ("data",),
) -> Tables:  # fmt: skip
    """Tables on a mesh. `axes`: mesh axes of the batch, that split records and rows.

    Raises ValueError, all problems together.
    """
    all_axes = tuple(axes)
    axes = tuple(axis for axis in all_axes if mesh.shape[axis] > 1)
    devices = math.prod(mesh.shape[axis] for axis in axes)
    if wrong := list(checks.problems(tables, features, config, devices)):
        raise ValueError("\n".join(wrong))
    return Tables(
        tuple(tables),
        tuple(features),
        config,
        mesh,
        axes,
        all_axes,
        _groups(tables, features, devices),
        row_optimizers.make(config),
    )

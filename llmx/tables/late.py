"""Updates that reach tables up to s steps late, and rows that are looked up a step ahead.

With `TablesConfig.staleness` = s > 0, step t does three things that do not wait for each other:

- it takes the gradient of batch t, whose rows step t - 1 has looked up,
- it updates the tables with the gradients of step t - s, which have waited,
- and in these tables it looks up the rows of batch t + 1.

So the rows of step t are from tables that have all updates of the steps before t - s and none of
later ones: s = 0 would be the synchronous step. An update is made whole where it arrives, with the
learning rate, the weight decay and the verdict of the step that sent it.

    late = new(tables, num_records)
    late = late._replace(ready=tables.take(state, ids_of_the_first_batch))
    state = arrived(tables, state, late)                 # in each step
    ready = tables.take(state, ids_of_the_next_batch)
    late = sent(late, ready, gradients, rate=rate, accepted=accepted)   # of late.ready.rows
    state, late = settled(tables, state, late)           # at the end: none is late any more

Persia (arXiv 2111.05897) trains tables asynchronously beside a synchronous network. Here each
update is late by exactly s steps, the same in any run.

Letters: s steps, n devices, U places of different rows of a device, W width, R rows.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from llmx.tables import placement, requests
from llmx.tables.tables import Plan, Tables, TablesState, Taken


class Waiting(NamedTuple):
    """Updates of the last s steps; step t has place t % s, counted from the first step."""

    rows_U: dict[str, jax.Array]  # by width, int32 [s, n U]: as `Plan.rows_U`
    gradients: dict[str, jax.Array]  # by width, fp32 [s, n U, W]
    rounds: jax.Array  # int32 [s], exchanges that it takes
    rate: jax.Array  # fp32 [s], of learning
    accepted: jax.Array  # bool [s]; False: rows stay, as where there is no update yet


class Late(NamedTuple):
    """What is under way between steps."""

    waiting: Waiting
    oldest: jax.Array  # int32 []: the place of the update that comes next
    ready: Taken  # of the next batch


def abstract(tables: Tables, num_records: int) -> Late:
    """Shapes with shardings, of batches of so many records."""
    steps, by_row = tables.config.staleness, tables.split
    device = by_row.partitions

    def array(shape, dtype=jnp.int32, spec=None):
        to = NamedSharding(tables.mesh, PartitionSpec() if spec is None else spec)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=to)

    rows = tables.abstract_rows(num_records)
    plan, each_step = {}, PartitionSpec(None, *device)
    for key, leaf in rows.items():
        ids = (num_records, leaf.shape[0] // num_records)
        plan[key] = Plan(
            array(leaf.shape[:1], spec=by_row), array(ids, spec=by_row),
            array(ids, bool, by_row), array(()),
        )  # fmt: skip
    waiting = Waiting(
        {key: array((steps, leaf.shape[0]), spec=each_step) for key, leaf in rows.items()},
        {key: array((steps, *leaf.shape), jnp.float32, each_step) for key, leaf in rows.items()},
        array((steps,)), array((steps,), jnp.float32), array((steps,), bool),
    )  # fmt: skip
    return Late(waiting, array(()), Taken(rows, plan, array((tables.devices,), spec=by_row)))


def new(tables: Tables, num_records: int) -> Late:
    """Nothing is under way; what is `ready` is the caller's to fill in."""
    late = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract(tables, num_records)
    )
    return late._replace(waiting=_empty(tables, late.waiting))


def _empty(tables: Tables, waiting: Waiting) -> Waiting:
    """Without updates."""
    none = {
        key: jnp.full_like(rows_U, tables.groups[key].none)
        for key, rows_U in waiting.rows_U.items()
    }
    return waiting._replace(
        rows_U=none, rounds=jnp.ones_like(waiting.rounds),
        accepted=jnp.zeros_like(waiting.accepted),
    )  # fmt: skip


def _of_step(tree: Any, place: jax.Array) -> Any:
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, place, 0, False), tree)


def arrived(tables: Tables, state: TablesState, late: Late) -> TablesState:
    """The tables with the update that is oldest. Communicates as `Tables.update`."""
    return _updated(tables, state, _of_step(late.waiting, late.oldest))


def _updated(tables: Tables, state: TablesState, update: Waiting) -> TablesState:
    """`update`: of one step."""
    plan = {key: Plan(rows, None, None, update.rounds) for key, rows in update.rows_U.items()}
    return tables.update(
        state, Taken({}, plan, None), update.gradients, rate=update.rate, accepted=update.accepted
    )


def sent(
    late: Late, ready: Taken, gradients: Mapping[str, jax.Array], *, rate: jax.Array,
    accepted: jax.Array,
) -> Late:  # fmt: skip
    """What is under way after a step; nothing communicates.

    ready: rows of the next batch. gradients: by width, fp32 [n U, W], of `late.ready.rows`. rate,
    accepted: of the update of these, which comes in s steps, in the place of the one that
    `arrived`.
    """
    plan = late.ready.plan
    update = Waiting(
        {key: each.rows_U for key, each in plan.items()}, dict(gradients),
        next(iter(plan.values())).rounds, jnp.asarray(rate, jnp.float32), jnp.asarray(accepted),
    )  # fmt: skip
    put = lambda whole, part: jax.lax.dynamic_update_index_in_dim(whole, part, late.oldest, 0)  # noqa: E731
    waiting = jax.tree.map(put, late.waiting, update)
    return Late(waiting, (late.oldest + 1) % len(waiting.rate), ready)


def settled(tables: Tables, state: TablesState, late: Late) -> tuple[TablesState, Late]:
    """The tables with all updates that wait, one after the other, and nothing that waits."""
    steps = tables.config.staleness
    for number in range(steps):
        update = _of_step(late.waiting, (late.oldest + number) % steps)
        state = _updated(tables, state, update)
    return state, late._replace(waiting=_empty(tables, late.waiting))


# ------------------------------------------------------------------------------- on other devices


def relaid(tables: Tables, saved: Any, sizes: Mapping[str, int], split: str = "") -> Late:
    """What was under way on a mesh of other sizes, or with another `split` of all tables, as it is
    on this one; itself, if that is the same.

    saved: it, or its arrays by path. What is said of a row is added up. What is `ready` is not
    moved: it is the caller's to look up again.
    """
    if isinstance(saved, Late) and not tables.is_moved(sizes, split):
        return saved
    if not isinstance(saved, Late):
        ready = Taken(saved["ready"]["rows"], _plans(saved["ready"]["plan"]), None)
        saved = Late(Waiting(**saved["waiting"]), saved["oldest"], ready)
    saved = jax.device_get(saved)
    num_records = next(iter(saved.ready.plan.values())).place_BK.shape[0]
    like = abstract(tables, num_records)
    before = tables.groups_on(sizes, split)
    moved = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), like)
    waiting = moved.waiting
    waiting.rate[:], waiting.accepted[:] = saved.waiting.rate, saved.waiting.accepted
    for step in range(len(waiting.rate)):
        of_tables = _by_table(before, tables, saved.waiting, step)
        for key, group in tables.groups.items():
            rows_R, gradients_RW = _in_group(group, of_tables)
            waiting.rows_U[key][step], waiting.gradients[key][step] = _dealt(
                group, rows_R, gradients_RW, waiting.gradients[key].shape[1]
            )
        asked = {key: rows[step] for key, rows in waiting.rows_U.items()}
        waiting.rounds[step] = _num_rounds(tables, asked)
    moved = moved._replace(oldest=np.asarray(saved.oldest))
    return jax.device_put(moved, jax.tree.map(lambda leaf: leaf.sharding, like))


def _plans(by_path: Mapping[str, Any]) -> dict[str, Plan]:
    return {key: Plan(**each) for key, each in by_path.items()}


def _by_table(groups, tables: Tables, waiting: Waiting, step: int) -> dict:
    """By table, ids that ascend and the sums of their gradients, [R, width]."""
    found = {}
    for table in tables.tables:
        ids, columns = [], []
        for key, group in groups.items():
            rows_U = np.asarray(waiting.rows_U[key][step])
            gradients_UW = np.asarray(waiting.gradients[key][step])
            for part in group.parts_of(table.name):
                ids_U = placement.ids(group, part, rows_U)
                there = ids_U >= 0
                ids.append(ids_U[there])
                whole = np.zeros((len(ids[-1]), table.width), np.float32)
                whole[:, slice(*part.columns)] = gradients_UW[there]
                columns.append(whole)
        distinct, place = np.unique(np.concatenate(ids), return_inverse=True)
        sums = np.zeros((len(distinct), table.width), np.float32)
        np.add.at(sums, place.reshape(-1), np.concatenate(columns))
        found[table.name] = distinct, sums
    return found


def _in_group(group: placement.Group, of_tables: Mapping) -> tuple[np.ndarray, np.ndarray]:
    """Rows of a group, ascending, and their gradients."""
    rows, gradients = [], []
    for part in group.parts:
        ids, sums = of_tables[part.table.name]
        rows.append(placement.places(group, part, ids))
        gradients.append(sums[:, slice(*part.columns)])
    rows_R, gradients_RW = np.concatenate(rows), np.concatenate(gradients)
    order = np.argsort(rows_R)
    return rows_R[order], gradients_RW[order]


def _dealt(group: placement.Group, rows_R, gradients_RW, places_nU: int):
    """Rows and gradients, each on one device, in turn: a device's rows ascend."""
    size = places_nU // group.devices
    rows_U = np.full(places_nU, group.none, np.int32)
    gradients_UW = np.zeros((places_nU, group.width), np.float32)
    for device in range(group.devices):
        own = rows_R[device :: group.devices]
        at = slice(device * size, device * size + len(own))
        rows_U[at], gradients_UW[at] = own, gradients_RW[device :: group.devices]
    return rows_U, gradients_UW


def _num_rounds(tables: Tables, asked: Mapping[str, np.ndarray]) -> int:
    """What `requests.num_rounds` finds of the rows of all devices."""
    groups = tables.groups
    each = {key: rows.reshape(tables.devices, -1) for key, rows in asked.items()}
    capacities = tables.capacities({key: rows[0] for key, rows in each.items()})
    if requests.fit(groups, {key: rows[0] for key, rows in each.items()}, capacities):
        return 1
    rounds, most = 1, max(group.slots for group in groups.values())

    def too_many(key: str) -> bool:
        group = groups[key]
        for rows_U in each[key]:
            rows = rows_U[rows_U < group.none]
            bins = rows // group.slots * rounds + rows % group.slots % rounds
            if len(bins) and np.bincount(bins).max() > capacities[key]:
                return True
        return False

    while rounds < most and any(map(too_many, groups)):
        rounds = min(2 * rounds, most)
    return rounds

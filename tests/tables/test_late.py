"""Updates of rows that come late equal those of a plain loop with a list of what waits."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from support.tiers import full_grid
from tables import test_tables
from tables.test_tables import FEATURES, TABLES, B

from llmx.tables import late as late_lib
from llmx.tables import tables as tables_lib

# fp32 against fp64: sums over records in another order, and roots of them.
EXACT = dict(rtol=1e-5, atol=1e-6)
NAMES = {"s": "squares", "t": "count"}  # of what the plain formulas keep of a row
STEPS, REFUSED = 7, 2  # the number of the step whose update is refused


def rate_of(step: int) -> float:
    return 0.1 / (1 + step)


@functools.cache
def step_of(tables: tables_lib.Tables):
    def step(state, late, after, rate, accepted):
        state = late_lib.arrived(tables, state, late)
        ready = tables.take(state, after)

        def loss(rows):
            embedded = tables.combine(rows, late.ready.plan)
            whole = lambda array: jax.sharding.reshard(array, PartitionSpec())  # noqa: E731
            return test_tables.loss_of(jax.tree.map(whole, embedded))

        value, gradients = jax.value_and_grad(loss)(late.ready.rows)
        late = late_lib.sent(late, ready, gradients, rate=rate, accepted=accepted)
        return state, late, value

    return jax.jit(step, donate_argnums=(0, 1))


def batches() -> list[dict]:
    """Random ids, of which steps that follow each other share many."""
    found = [test_tables.ids_of(number) for number in range(STEPS + 1)]
    found[4] = found[3]
    found[5] = {name: np.minimum(array, 3) for name, array in found[5].items()}
    return found


def begun(tables, state, ids):
    """What is under way before the first of these batches."""
    with jax.set_mesh(tables.mesh):
        late = jax.tree.map(np.asarray, jax.jit(lambda: late_lib.new(tables, B))())
        to = jax.tree.map(lambda leaf: leaf.sharding, late_lib.abstract(tables, B))
        late = jax.tree.map(jax.device_put, late, to)
        return late._replace(ready=jax.jit(tables.take)(state, test_tables.placed(tables, ids)))


def run(tables, state, late, listed, first: int, end: int):
    losses = []
    with jax.set_mesh(tables.mesh):
        for number in range(first, end):
            after = test_tables.placed(tables, listed[number + 1])
            state, late, value = step_of(tables)(
                state, late, after, rate_of(number), number != REFUSED
            )
            losses.append(float(value))
    return state, late, losses


def settled(tables, state, late):
    with jax.set_mesh(tables.mesh):
        return jax.jit(functools.partial(late_lib.settled, tables))(state, late)


def rows_of(tables, state) -> dict[str, np.ndarray]:
    return {table.name: tables.table(state, table.name) for table in TABLES}


class Plain:
    """Dense tables in NumPy: whole updates, each applied a number of steps late."""

    def __init__(self, tables, state):
        self.optimizer, self.config = tables.config.optimizer, tables.config
        self.rows = {n: array.astype(np.float64) for n, array in rows_of(tables, state).items()}
        self.slots: dict = {}
        self.waiting: list = [None] * self.config.staleness

    def step(self, ids: dict, rate: float, accepted: bool) -> float:
        value, _, gradients = jax.device_get(
            test_tables.wanted_of(
                {name: array.astype(np.float32) for name, array in self.rows.items()}, ids
            )
        )
        self.waiting.append((ids, gradients, rate) if accepted else None)
        self.arrive()
        return float(value)

    def arrive(self):
        if (update := self.waiting.pop(0)) is None:
            return
        ids, gradients, rate = update
        for table in TABLES:
            used = {int(i) for f in FEATURES if f.table == table.name for i in ids[f.name].flat}
            for row in range(table.rows):
                new = old = self.rows[table.name][row]
                if row in used:
                    own = self.slots.setdefault((table.name, row), {})
                    g = np.asarray(gradients[table.name][row], np.float64)
                    new, own = test_tables.reference(self.optimizer, old, own, g, rate, self.config)
                    self.slots[table.name, row] = own
                self.rows[table.name][row] = new - rate * self.config.weight_decay * old


@pytest.mark.parametrize(
    "optimizer, weight_decay, mesh, steps",
    [
        ("row_adagrad", 0.5, "2", 1), full_grid("adam", 0.5, "4", 4),
        full_grid("sgd", 0.5, "1", 1), full_grid("adagrad", 0.0, "4", 2),
        full_grid("ftrl", 0.0, "2", 2),
    ],
)  # fmt: skip
def test_late_updates_equal_a_plain_loop(optimizer, weight_decay, mesh, steps):
    """Losses, rows and what optimizers keep: of any split, with a refused update, rates that
    change and ids that steps share."""
    # Adam: with 1 - b2 = 0.001 in fp32 its first steps would have a rounding error of 1e-4.
    options = {"ftrl": dict(l1=0.01, l2=0.1), "adam": dict(b2=0.9)}.get(optimizer, {})
    tables = test_tables.made(
        mesh, optimizer=optimizer, weight_decay=weight_decay, eps=1e-2, staleness=steps, **options
    )
    state, listed = test_tables.state_of(tables, 1), batches()
    plain = Plain(tables, state)
    state, late, losses = run(tables, state, begun(tables, state, listed[0]), listed, 0, STEPS)
    wanted = [plain.step(listed[at], rate_of(at), at != REFUSED) for at in range(STEPS)]
    np.testing.assert_allclose(losses, wanted, **EXACT)
    for name, rows in rows_of(tables, state).items():
        np.testing.assert_allclose(rows, plain.rows[name], **EXACT)
    state, late = jax.device_get(settled(tables, state, late))
    for _ in range(steps):
        plain.arrive()
        plain.waiting.append(None)
    for name, rows in rows_of(tables, state).items():
        np.testing.assert_allclose(rows, plain.rows[name], **EXACT)
    for (name, row), own in plain.slots.items():
        for slot, number in own.items():
            of_group = {key: leaves[NAMES.get(slot, slot)] for key, leaves in state.slots.items()}
            found = tables_lib.whole_table(tables.groups, of_group, name)[row]
            np.testing.assert_allclose(
                found, number if found.size > 1 else np.mean(number), **EXACT
            )
    assert not late.waiting.accepted.any()


@pytest.mark.slow
def test_a_list_of_updates_in_a_loop_gives_the_same_bits():
    """Of the same programs of tables: what waits is kept as it is."""
    tables, listed = test_tables.made("4", optimizer="adam", eps=1e-2, staleness=2), batches()
    start = test_tables.new_state(tables, 1)
    state = test_tables.state_of(tables, 1)
    state, late, _ = run(tables, state, begun(tables, state, listed[0]), listed, 0, STEPS)
    found = jax.tree.map(np.array, settled(tables, state, late)[0])
    with jax.set_mesh(tables.mesh):
        to = jax.tree.map(lambda leaf: leaf.sharding, tables.abstract)
        state, waiting = jax.tree.map(jax.device_put, start, to), [None, None]
        take = jax.jit(tables.take)

        @jax.jit
        def gradient(taken):
            def loss(rows):
                embedded = tables.combine(rows, taken.plan)
                whole = lambda array: jax.sharding.reshard(array, PartitionSpec())  # noqa: E731
                return test_tables.loss_of(jax.tree.map(whole, embedded))

            return jax.grad(loss)(taken.rows)

        @jax.jit
        def update(state, taken, gradients, rate):
            return tables.update(state, taken, gradients, rate=rate)

        taken = take(state, test_tables.placed(tables, listed[0]))
        for number in range(STEPS):
            own = (taken, gradient(taken), np.float32(rate_of(number)))
            waiting.append(own if number != REFUSED else None)
            if (oldest := waiting.pop(0)) is not None:
                state = update(state, *oldest)
            taken = take(state, test_tables.placed(tables, listed[number + 1]))
        for oldest in waiting:
            state = update(state, *oldest)
    jax.tree.map(np.testing.assert_array_equal, found, jax.tree.map(np.array, state))


@pytest.mark.slow
@pytest.mark.parametrize("before, after", [("2", "1"), full_grid("8", "2")])
def test_what_is_under_way_goes_on_on_other_devices(before, after):
    """As if it had never moved; rows of all splits."""
    options = dict(optimizer="adagrad", eps=1e-2, staleness=3)
    listed = batches()
    one, other = (test_tables.made(name, **options) for name in (before, after))
    state = test_tables.state_of(one, 1)
    state, late, _ = run(one, state, begun(one, state, listed[0]), listed, 0, 4)
    state, late = jax.device_get((state, late))
    sizes = dict(one.mesh.shape)
    assert other.is_moved(sizes) and not one.is_moved(sizes)
    own = jax.tree.map(
        lambda leaf, like: jax.device_put(leaf, like.sharding), other.relaid(state, sizes),
        other.abstract,
    )  # fmt: skip
    moved = jax.tree.map(
        lambda leaf, like: jax.device_put(leaf, like.sharding),
        late_lib.relaid(other, late, sizes), late_lib.abstract(other, B),
    )  # fmt: skip
    moved = moved._replace(ready=begun(other, own, listed[4]).ready)
    found, moved, losses = run(other, own, moved, listed, 4, STEPS)
    found, _ = settled(other, found, moved)

    state = test_tables.state_of(one, 1)
    state, late, wanted = run(one, state, begun(one, state, listed[0]), listed, 0, STEPS)
    state, _ = settled(one, state, late)
    np.testing.assert_allclose(losses, wanted[4:], **EXACT)
    for name, rows in rows_of(one, state).items():
        np.testing.assert_allclose(rows_of(other, found)[name], rows, **EXACT)

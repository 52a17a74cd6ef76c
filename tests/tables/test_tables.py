"""Tables on any mesh equal dense ones on one device: values, gradients and updates."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from llmx.tables import by_id, placement, row_optimizers
from llmx.tables import config as config_lib
from llmx.tables import tables as tables_lib
from llmx.tables.config import Feature, Table, TablesConfig

# fp32: sums over records of other devices in another order.
EXACT = dict(rtol=1e-6, atol=1e-6)

TABLES = (
    Table("a", 50, 8), Table("b", 7, 8, split="whole"), Table("c", 1, 8),
    Table("d", 33, 8, split="columns"), Table("e", 20, 4, split="whole", scale=0.5),
)  # fmt: skip
FEATURES = (
    Feature("a1", "a"), Feature("a2", "a", 3, "mean"), Feature("b1", "b", 4, "max"),
    Feature("c1", "c", 2), Feature("d1", "d", 2, "none"), Feature("e1", "e", 5, "sum"),
)  # fmt: skip
B = 24


def mesh_of(devices: int, axes=("data",)):
    shape = (devices,) if len(axes) == 1 else (devices // 2, 2)
    return jax.make_mesh(
        shape, axes, axis_types=(AxisType.Explicit,) * len(axes), devices=jax.devices()[:devices]
    )


def ids_of(seed: int, kind: str = "random") -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    rows = {table.name: table.rows for table in TABLES}
    found = {}
    for feature in FEATURES:
        shape, limit = (B, feature.length), rows[feature.table]
        ids = rng.integers(-1, limit, shape)
        if kind == "hot":
            ids = np.full(shape, limit - 1)
        elif kind == "one_device":  # of eight: each round has room for a share only
            ids = rng.integers(0, max(1, limit // 8), shape) * 8 % limit
        elif kind == "empty":
            ids = np.full(shape, -1)
        elif kind == "distinct":
            ids = (np.arange(B * feature.length) % limit).reshape(shape)
        found[feature.name] = ids.astype(np.int32)
    return found


def dense(params: dict, ids: dict) -> dict:
    """The same lookups of whole tables."""
    found = {}
    for feature in FEATURES:
        at = jnp.asarray(ids[feature.name])
        there = (at >= 0)[..., None]
        rows = params[feature.table][jnp.maximum(at, 0)]
        if feature.combine == "max":
            most = jnp.where(there, rows, -jnp.inf).max(axis=1)
            found[feature.name] = jnp.where(there.any(axis=1), most, 0.0)
            continue
        rows = rows * there
        if feature.combine == "none":
            found[feature.name] = rows
            continue
        found[feature.name] = rows.sum(axis=1)
        if feature.combine == "mean":
            found[feature.name] /= jnp.maximum(there.sum(axis=1), 1)
    return found


def loss_of(embedded: dict) -> jax.Array:
    """Weighs all numbers differently."""
    total = 0.0
    for number, name in enumerate(sorted(embedded)):
        array = embedded[name]
        weights = jnp.cos(jnp.arange(array.size, dtype=jnp.float32) + number).reshape(array.shape)
        total = total + jnp.sum(jnp.sin(3 * array) * weights)
    return total


MESHES = {
    "1": (1, ("data",)), "2": (2, ("data",)), "3": (3, ("data",)), "4": (4, ("data", "fsdp")),
    "8": (8, ("data",)),
}  # fmt: skip


@functools.cache
def made(name: str, **options) -> tables_lib.Tables:
    """On a mesh; tables that cannot be split by columns are by rows."""
    devices, axes = MESHES[name]
    by_row = options.get("optimizer", "row_adagrad") == "row_adagrad"
    listed = [
        table if table.split != "columns" or (table.width % devices == 0 and not by_row)
        else Table(table.name, table.rows, table.width)
        for table in TABLES
    ]  # fmt: skip
    return tables_lib.make(
        listed, FEATURES, TablesConfig(**options), mesh_of(devices, axes), axes=axes
    )


def placed(tables: tables_lib.Tables, ids: dict) -> dict:
    to = NamedSharding(tables.mesh, tables.split)
    return {name: jax.device_put(array, to) for name, array in ids.items()}


RATE = 0.1


@functools.cache
def step_of(tables: tables_lib.Tables):
    """One step: what is looked up, the loss, and the new state."""

    def step(state, ids, accepted):
        taken = tables.take(state, ids)

        def loss(rows):
            embedded = tables.combine(rows, taken.plan)
            whole = {
                name: jax.sharding.reshard(array, PartitionSpec())
                for name, array in embedded.items()
            }
            return loss_of(whole), whole

        (value, embedded), gradients = jax.value_and_grad(loss, has_aux=True)(taken.rows)
        state = tables.update(state, taken, gradients, rate=RATE, accepted=accepted)
        rounds = jnp.stack([plan.rounds for plan in taken.plan.values()])
        return state, value, embedded, rounds, taken.unknown

    return jax.jit(step, donate_argnums=0)


def run(tables, state, ids, *, accepted=True):
    with jax.set_mesh(tables.mesh):
        return jax.block_until_ready(step_of(tables)(state, placed(tables, ids), accepted))


@functools.cache
def new_state(tables: tables_lib.Tables, seed: int):
    """On the host: a step is given its own copy."""
    with jax.set_mesh(tables.mesh):
        return jax.tree.map(np.array, tables.init(seed))


def state_of(tables: tables_lib.Tables, seed: int):
    to = jax.tree.map(lambda leaf: leaf.sharding, tables.abstract)
    return jax.tree.map(jax.device_put, new_state(tables, seed), to)


@jax.jit
def wanted_of(params: dict, ids: dict):
    """By dense tables: the loss, what is looked up, and gradients."""

    def loss(params):
        embedded = dense(params, ids)
        return loss_of(embedded), embedded

    (value, embedded), gradients = jax.value_and_grad(loss, has_aux=True)(params)
    return value, embedded, gradients


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("kind", ["random", "hot", "one_device", "empty", "distinct"])
def test_any_split_equals_dense_tables(mesh, kind):
    tables, ids = made(mesh, optimizer="sgd"), ids_of(0, kind)
    state = state_of(tables, 7)
    params = {table.name: tables.table(state, table.name) for table in TABLES}
    state, value, embedded, rounds, unknown = run(tables, state, ids)
    wanted_value, wanted, gradients = wanted_of(params, ids)
    for name in wanted:
        np.testing.assert_allclose(embedded[name], wanted[name], **EXACT)
    np.testing.assert_allclose(value, wanted_value, **EXACT)
    for name in params:
        np.testing.assert_allclose(
            tables.table(state, name), params[name] - RATE * gradients[name], **EXACT
        )
    assert not unknown.any()
    if mesh == "8" and kind == "one_device":
        assert rounds.max() > 1  # what did not fit went in further rounds
    if kind == "hot":
        assert rounds.max() == 1


def test_new_rows_do_not_depend_on_the_split():
    found = []
    for mesh in MESHES:
        tables = made(mesh, optimizer="sgd")
        state = new_state(tables, 7)
        found.append({table.name: tables.table(state, table.name) for table in TABLES})
    for other in found[1:]:
        jax.tree.map(np.testing.assert_array_equal, other, found[0])
    assert abs(found[0]["a"].mean()) < 0.02 and found[0]["a"].std() > 0.05


def reference(optimizer: str, rows, slots, g, rate, config):
    """One row's update in NumPy, from the papers' formulas."""
    if optimizer == "sgd":
        return rows - rate * g, slots
    if optimizer in ("adagrad", "row_adagrad"):
        square = g**2 if optimizer == "adagrad" else np.full_like(g, (g**2).mean())
        s = slots.get("s", np.full_like(g, config.initial_square)) + square
        return rows - rate * g / (np.sqrt(s) + config.eps), {"s": s}
    if optimizer == "adam":
        t = slots.get("t", 0) + 1
        m = config.b1 * slots.get("m", 0 * g) + (1 - config.b1) * g
        v = config.b2 * slots.get("v", 0 * g) + (1 - config.b2) * g**2
        hat = (m / (1 - config.b1**t)) / (np.sqrt(v / (1 - config.b2**t)) + config.eps)
        return rows - rate * hat, {"m": m, "v": v, "t": t}
    n = slots.get("n", 0 * g)
    z = slots.get("z", -rows * (config.eps / rate + config.l2))
    new_n = n + g**2
    before, now = ((config.eps + np.sqrt(each)) / rate for each in (n, new_n))
    before = slots.get("per_rate", before)
    z = z + g - (now - before) * rows
    new = np.where(
        np.abs(z) <= config.l1, 0, -(z - np.sign(z) * config.l1) / (now + config.l2)
    )  # fmt: skip
    return new, {"z": z, "n": new_n, "per_rate": now}


@pytest.mark.parametrize(
    "optimizer, weight_decay, mesh",
    [
        ("sgd", 0.5, "1"), ("adagrad", 0.0, "1"), ("row_adagrad", 0.5, "4"), ("adam", 0.0, "4"),
        ("adam", 0.5, "4"), ("ftrl", 0.0, "4"),
    ],
)  # fmt: skip
def test_optimizers_equal_the_formulas(optimizer, weight_decay, mesh):
    """Of touched rows; others keep their bits, and a decay that is to come is in what is read."""
    options = dict(l1=0.01, l2=0.1, eps=1e-3) if optimizer == "ftrl" else dict(eps=1e-6)
    tables = made(mesh, optimizer=optimizer, weight_decay=weight_decay, **options)
    state = state_of(tables, 1)
    wanted = {t.name: tables.table(state, t.name).astype(np.float64) for t in TABLES}
    slots: dict = {}
    for number in range(3):
        ids = ids_of(number)
        if number == 1:
            ids = {name: np.minimum(array, 3) for name, array in ids.items()}
        as_fp32 = {name: array.astype(np.float32) for name, array in wanted.items()}
        _, _, gradients = jax.device_get(wanted_of(as_fp32, ids))
        before = {table.name: tables.table(state, table.name) for table in TABLES}
        state, *_ = run(tables, state, ids)
        untouched = 0
        for table in TABLES:
            used = {
                int(one) for f in FEATURES if f.table == table.name for one in ids[f.name].flat
            } - {-1}
            for row in range(table.rows):
                old = wanted[table.name][row]
                if row in used:
                    own = slots.setdefault((table.name, row), {})
                    g = np.asarray(gradients[table.name][row], np.float64)
                    new, own = reference(optimizer, old, own, g, RATE, tables.config)
                    slots[table.name, row] = own
                else:
                    new, untouched = old, untouched + 1
                wanted[table.name][row] = new - RATE * weight_decay * old
            found = tables.table(state, table.name)
            np.testing.assert_allclose(found, wanted[table.name], rtol=2e-4, atol=2e-5)
            if not weight_decay:  # which is in what `table` reads
                others = sorted({*range(table.rows)} - used)
                np.testing.assert_array_equal(found[others], before[table.name][others])
        assert untouched > 0


def test_bits_of_untouched_rows_stay_where_they_decay():
    """As the devices have them: what is due is taken off when a row is read."""
    tables = made("4", optimizer="adam", weight_decay=0.5, eps=1e-6)
    state, ids = state_of(tables, 1), ids_of(0)
    by_id_of = lambda state: by_id.of_state(  # noqa: E731
        jax.device_get(state), TABLES, FEATURES, tables.devices, slots=tables.optimizer.slots
    )
    before = by_id_of(state)
    state, *_ = run(tables, state, ids)
    after, number = by_id_of(state), 0
    for table in TABLES:
        used = {i for f in FEATURES if f.table == table.name for i in ids[f.name].flat if i >= 0}
        others = sorted({*range(table.rows)} - used)
        number += len(others)
        for slot in (by_id.ROWS, *tables.optimizer.slots):
            old, new = (
                held.read(table.name, slot, slice(0, table.rows)) for held in (before, after)
            )
            np.testing.assert_array_equal(new[others], old[others])
    assert number > 0


@pytest.mark.parametrize("name", config_lib.OPTIMIZERS)
def test_a_rate_alone_moves_no_row(name):
    """Rows with a gradient of zero stay whatever the schedule says, also at 0; and with a gradient
    at a rate of 0."""
    optimizer = row_optimizers.make(config_lib.TablesConfig(optimizer=name, l2=0.1, b1=0.0))
    rng = np.random.default_rng(0)
    rows = jnp.asarray(rng.standard_normal((5, 4)), jnp.float32)
    slots = {
        key: jnp.full((5, 4 if each else 1), optimizer.initial[key])
        for key, each in optimizer.slots.items()
    }
    g = jnp.asarray(rng.standard_normal((5, 4)), jnp.float32)
    rows, slots = optimizer.update(rows, slots, g, jnp.float32(0.01))
    for rate in (0.02, 0.2, 0.001):
        new, slots = optimizer.update(rows, slots, jnp.zeros_like(g), jnp.float32(rate))
        np.testing.assert_allclose(new, rows, rtol=2e-6, atol=1e-7)
    new, slots = optimizer.update(new, slots, g, jnp.float32(0.0))
    np.testing.assert_allclose(new, rows, rtol=2e-6, atol=1e-7)
    new, slots = optimizer.update(new, slots, g, jnp.float32(0.01))
    assert np.isfinite(new).all() and not np.array_equal(new, rows)


def test_a_decay_is_added_up_exactly():
    """10 million steps of 2e-7 are 2, and not 2.13."""
    more, number = np.float32(np.log1p(-2e-7)), 1_000_000
    add = jax.jit(lambda decay: jax.lax.fori_loop(
        0, number, lambda _, decay: tables_lib._added(decay, more), decay
    ))  # fmt: skip
    decay = jnp.zeros(2)
    for _ in range(10):
        decay = add(decay)
    np.testing.assert_allclose(decay[0], 10.0 * number * float(more), rtol=1e-6)


def test_an_empty_batch_is_refused():
    tables = made("1", optimizer="adagrad")
    none = {f.name: np.zeros((0, f.columns), np.int32) for f in FEATURES}
    with pytest.raises(ValueError, match="a batch without records: give take at least one"):
        tables.take(state_of(tables, 1), none)


def test_ids_of_more_than_32_bits_are_refused():
    tables, ids = made("1", optimizer="sgd"), ids_of(0)
    ids = {name: array.astype(np.int64) for name, array in ids.items()}
    tables.take(state_of(tables, 1), ids)
    ids["a2"][5, 1] = 2**32 + 3
    with pytest.raises(ValueError, match="'a2': id 4294967299 has more than 32 bits"):
        tables.take(state_of(tables, 1), ids)


def test_a_step_that_is_not_accepted_changes_nothing():
    tables = made("4", optimizer="adam", weight_decay=0.5, eps=1e-6)
    state = state_of(tables, 1)
    before = jax.tree.map(np.array, state)
    state, *_ = run(tables, state, ids_of(0), accepted=False)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.array, state), before)


def test_ids_that_a_table_does_not_have_are_counted_and_looked_up_as_none():
    tables, ids = made("4", optimizer="adam", weight_decay=0.5, eps=1e-6), ids_of(0)
    none, wrong = ({name: array.copy() for name, array in ids.items()} for _ in range(2))
    none["a2"][5, 1], none["b1"][20, 0] = -1, -1
    wrong["a2"][5, 1], wrong["b1"][20, 0] = 50, -2
    *_, expected, _, nothing = run(tables, state_of(tables, 1), none)
    *_, found, _, unknown = run(tables, state_of(tables, 1), wrong)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert nothing.tolist() == [0, 0, 0, 0] and unknown.tolist() == [1, 0, 0, 1]


def test_ids_that_a_table_does_not_have_are_named():
    tables, ids = made("1", optimizer="sgd"), ids_of(0)
    assert not list(tables.problems_of(ids))
    ids["a2"][5, 1] = 50
    [text] = tables.problems_of(ids, first_record=100)
    assert "table 'a'" in text and "id 50" in text and "record 105" in text and "50 rows" in text


def test_weights_multiply_rows():
    tables, ids = made("2", optimizer="sgd"), ids_of(2)
    rng = np.random.default_rng(0)
    weights = {"a2": rng.uniform(size=(B, 3)).astype(np.float32)}
    state = state_of(tables, 7)
    with jax.set_mesh(tables.mesh):
        taken = jax.jit(tables.take)(state, placed(tables, ids))
        found = jax.jit(tables.combine)(taken.rows, taken.plan, placed(tables, weights))
    table = tables.table(state, "a")
    there = (ids["a2"] >= 0) * weights["a2"]
    total = (table[np.maximum(ids["a2"], 0)] * there[..., None]).sum(axis=1)
    np.testing.assert_allclose(found["a2"], total / there.sum(axis=1, keepdims=True), **EXACT)


def test_gradients_of_rows_with_weights():
    """Of a sum and a mean, of rows that records share: added up in plain NumPy."""
    tables, ids = made("2", optimizer="sgd"), ids_of(2)
    rng = np.random.default_rng(0)
    weights = {f.name: rng.uniform(size=(B, f.length)).astype(np.float32) for f in FEATURES[1:2]}
    weights |= {"e1": rng.uniform(size=(B, 5)).astype(np.float32)}
    factor = {"a2": rng.standard_normal((B, 8)), "e1": rng.standard_normal((B, 4))}

    def gradient(state, ids, weights):
        taken = tables.take(state, ids)

        def loss(rows):
            combined = tables.combine(rows, taken.plan, weights)
            return sum((combined[name] * jnp.float32(each)).sum() for name, each in factor.items())

        return tables.update(state, taken, jax.grad(loss)(taken.rows), rate=1.0)

    state = state_of(tables, 7)
    before = {name: tables.table(state, name) for name in "ae"}
    with jax.set_mesh(tables.mesh):
        state = jax.jit(gradient)(state, placed(tables, ids), placed(tables, weights))
    for feature in (FEATURES[1], FEATURES[5]):
        wanted = before[feature.table].astype(np.float64)
        for own, weight, each in zip(
            ids[feature.name], weights[feature.name], factor[feature.name], strict=True
        ):
            total = weight[own >= 0].sum() if feature.combine == "mean" else 1
            for row, one in zip(own[own >= 0], weight[own >= 0], strict=True):
                wanted[row] -= one / total * each
        np.testing.assert_allclose(tables.table(state, feature.table), wanted, rtol=2e-6, atol=4e-6)


@pytest.mark.parametrize(
    "tables, features, part",
    [
        ((Table("a", 5, 4), Table("a", 5, 4)), (), "twice"),
        ((Table("a", 0, 4),), (), "0 rows"),
        ((Table("a", 5, 4, split="diagonal"),), (), "diagonal"),
        ((Table("a", 5, 4),), (Feature("x", "b"),), "looks up table 'b'"),
        ((Table("a", 5, 4),), (Feature("x", "a", combine="min"),), "min"),
        ((Table("a", 2**31, 4),), (Feature("x", "a"),), "another width"),
    ],
)
def test_what_does_not_fit_is_an_error(tables, features, part):
    with pytest.raises(ValueError, match=part):
        tables_lib.make(tables, features, TablesConfig(), mesh_of(2))


def test_columns_that_do_not_divide_are_an_error():
    table, config = Table("a", 5, 3, split="columns"), TablesConfig(optimizer="adagrad")
    with pytest.raises(ValueError, match="width 3 does not divide over 2 devices"):
        tables_lib.make((table,), (Feature("x", "a"),), config, mesh_of(2))
    with pytest.raises(ValueError, match=r"goes not with .*row_adagrad"):
        tables_lib.make((table,), (Feature("x", "a"),), TablesConfig(), mesh_of(2))


def test_two_rows_of_an_id_are_added_up_first():
    """As a dense table gives them, in value and gradient; on two devices."""
    rng, mesh = np.random.default_rng(0), mesh_of(2)
    names = ("sum", "mean", "max", "none")
    features = [Feature(name, "a", 3, name, hashes=2) for name in names]
    tables = tables_lib.make([Table("a", 20, 4)], features, TablesConfig(), mesh)
    ids = rng.integers(0, 20, (4, 3, 2))
    ids[rng.random((4, 3)) < 0.4] = -1
    there_B3, to = ids[..., 0] >= 0, NamedSharding(mesh, tables.split)

    def dense(whole):
        pairs = whole[jnp.maximum(ids, 0)].sum(axis=2) * there_B3[..., None]
        most = jnp.where(there_B3[..., None], pairs, -jnp.inf).max(axis=1)
        count = jnp.maximum(there_B3.sum(axis=1), 1)[:, None]
        return {
            "sum": pairs.sum(axis=1), "mean": pairs.sum(axis=1) / count, "none": pairs,
            "max": jnp.where(there_B3.any(axis=1)[:, None], most, 0.0),
        }  # fmt: skip

    def step(state, at):
        taken = tables.take(state, dict.fromkeys(names, at))

        def loss(rows):
            arrays = tables.combine(rows, taken.plan)
            arrays = jax.tree.map(lambda x: jax.sharding.reshard(x, PartitionSpec()), arrays)
            return loss_of(arrays), arrays

        gradients, arrays = jax.grad(loss, has_aux=True)(taken.rows)
        return arrays, tables.update(state, taken, gradients, rate=RATE)

    with jax.set_mesh(mesh):
        state = tables.init(0)
        at = jax.device_put(ids.reshape(4, 6).astype(np.int32), to)
        found, new = jax.jit(step)(state, at)
    before = jnp.asarray(tables.table(state, "a"))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **EXACT), found, dense(before))
    gradient = jax.grad(lambda whole: loss_of(dense(whole)))(before)
    total = tables.config.initial_square + jnp.mean(gradient**2, axis=1, keepdims=True)
    after = before - RATE * gradient / (jnp.sqrt(total) + tables.config.eps)
    np.testing.assert_allclose(tables.table(new, "a"), after, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("devices", [1, 2, 3, 8])
def test_places_and_ids_are_inverse(devices):
    """Each place of a group's array has one row of one part, or none."""
    tables = [dataclasses.replace(one, width=24) if one.name == "d" else one for one in TABLES]
    for group in placement.placed(tables, FEATURES, devices):
        every = np.arange(group.none + 1)
        found = np.stack([placement.ids(group, part, every) for part in group.parts])
        assert (found >= 0).sum(axis=0).max() == 1 and (found[:, -1] == -1).all()
        for part, ids in zip(group.parts, found, strict=True):
            there = ids >= 0
            assert sorted(ids[there]) == [*range(part.table.rows)]
            np.testing.assert_array_equal(placement.places(group, part, ids[there]), every[there])

"""A cache of host rows trains to the bits of tables that the devices have whole; what it forgets,
admits, saves and loads."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from llmx.tables import cached as cached_lib
from llmx.tables import tables as tables_lib
from llmx.tables.cached import Cached
from llmx.tables.config import Feature, Table, TablesConfig
from llmx.tables.dictionary import NONE
from llmx.tables.host_rows import Keys

W, B = 4, 8
TABLES = (Table("a", 90, W), Table("b", 40, W, scale=0.5))
FEATURES = (
    Feature("a1", "a"), Feature("a2", "a", 2, "mean"), Feature("b1", "b", 2, "sum", hashes=2),
)  # fmt: skip
K = sum(feature.columns for feature in FEATURES)
RATE, SEED = 0.1, 5


def mesh_of(devices: int):
    return jax.make_mesh(
        (devices,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:devices]
    )


def batches_of(number: int, seed: int = 0) -> list[np.ndarray]:
    """Some ids are hot, some are none, and the pairs of b1 are both there or not."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(number):
        ids = np.concatenate(
            [rng.integers(-1, 90, (B, 3)), np.repeat(rng.integers(-1, 40, (B, 2)), 2, axis=1)], 1
        )
        ids[: B // 2, 0] = rng.integers(0, 3, B // 2)
        ids[:, 4::2] = np.where(ids[:, 4::2] < 0, -1, (ids[:, 4::2] * 7 + 1) % 40)
        found.append(ids.astype(np.int64))
    return found


def by_feature(tables: tables_lib.Tables, ids_BK: np.ndarray) -> dict:
    to, found, first = NamedSharding(tables.mesh, tables.split), {}, 0
    for feature in tables.features:
        own = ids_BK[:, first : first + feature.columns].astype(np.int32)
        found[feature.name] = jax.device_put(own, to)
        first += feature.columns
    return found


@functools.cache
def step_of(tables: tables_lib.Tables):
    def step(state, ids):
        taken = tables.take(state, ids)

        def loss(rows):
            total = 0.0
            for name, array in sorted(tables.combine(rows, taken.plan).items()):
                array = jax.sharding.reshard(array, PartitionSpec())
                weights = jnp.cos(jnp.arange(array.size, dtype=jnp.float32) + len(name))
                total = total + jnp.sum(jnp.sin(3 * array) * weights.reshape(array.shape))
            return total

        value, gradients = jax.value_and_grad(loss)(taken.rows)
        return tables.update(state, taken, gradients, rate=RATE), value

    return jax.jit(step, donate_argnums=0)


def options(optimizer: str, **more) -> TablesConfig:
    decay = 0.0 if optimizer == "ftrl" else 0.3
    return TablesConfig(optimizer=optimizer, weight_decay=decay, host_gib=0.001, **more)


@functools.cache
def plain(optimizer: str, devices: int, split: str) -> tables_lib.Tables:
    listed = [Table(t.name, t.rows, W, split, t.scale) for t in TABLES]
    return tables_lib.make(listed, FEATURES, options(optimizer), mesh_of(devices))


@functools.cache
def small(optimizer: str, devices: int, split: str, cache_rows: int = 48, **more):
    listed = [Table(t.name, t.rows, W, split, t.scale) for t in TABLES]
    config = options(optimizer, cache_rows=cache_rows, **more)
    return cached_lib.make(listed, FEATURES, config, mesh_of(devices), seed=SEED)


def train_plain(tables: tables_lib.Tables, batches) -> tuple[list, dict]:
    losses = []
    with jax.set_mesh(tables.mesh):
        state = tables.init(SEED)
        for ids in batches:
            state, loss = step_of(tables)(state, by_feature(tables, ids))
            losses.append(float(loss))
    return losses, {table.name: tables.table(state, table.name) for table in TABLES}


def train(cached: Cached, state, batches) -> tuple[list, object]:
    losses, tables = [], cached.tables
    with jax.set_mesh(tables.mesh):
        for ids in batches:
            state, slots = cached.prepare(state, ids)
            state, loss = step_of(tables)(state, by_feature(tables, slots))
            losses.append(float(loss))
    return losses, state


def rows_of(cached: Cached, state) -> dict[str, np.ndarray]:
    """All rows of all tables, as a lookup would give them."""
    cached.write_back(state)
    found = {}
    for number, table in enumerate(TABLES):
        ids = np.arange(table.rows, dtype=np.uint64)
        keys = Keys(ids, np.full(table.rows, number, np.uint16))
        at, (rows, slots) = cached.rows.admitted.find(*keys), cached.rows.virtual_rows(keys)
        there = at != NONE
        stored, of_stored = cached.rows.read(at[there])
        rows[there] = stored
        if tables_lib.DECAYED in slots:
            slots[tables_lib.DECAYED][there] = of_stored[tables_lib.DECAYED]
            rows = rows * np.exp(float(state.decay) - slots[tables_lib.DECAYED])
        found[table.name] = rows
    return found


def new(tables: tables_lib.Tables):
    with jax.set_mesh(tables.mesh):
        return Cached(tables), tables.init(0)


CASES = [
    ("sgd", 1, "rows"), ("row_adagrad", 4, "rows"), ("adagrad", 2, "columns"), ("adam", 1, "rows"),
    ("adam", 4, "whole"), ("ftrl", 2, "rows"),
]  # fmt: skip


@pytest.mark.parametrize("optimizer, devices, split", CASES)
def test_a_small_cache_equals_whole_tables(optimizer, devices, split):
    """Bit for bit: the least cache that a batch fits, so that most rows come and go."""
    batches = batches_of(12)
    wanted, tables = train_plain(plain(optimizer, devices, split), batches)
    cached, state = new(small(optimizer, devices, split))
    losses, state = train(cached, state, batches)
    assert losses == wanted
    found = rows_of(cached, state)
    for name in tables:
        np.testing.assert_array_equal(found[name], tables[name])
    assert len(cached.rows.admitted) > 2 * 48 and 0 < cached.scalars()["cache_hits"] < 1

"""A cache of host rows trains to the bits of tables that the devices have whole; what it forgets,
admits, saves and loads."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from llmx.tables import cached as cached_lib
from llmx.tables import host_files, host_rows, numbers
from llmx.tables import tables as tables_lib
from llmx.tables.cached import Cached, CacheTooSmall
from llmx.tables.config import Feature, Table, TablesConfig
from llmx.tables.dictionary import NONE, Dictionary
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
            for name, of_feature in sorted(tables.combine(rows, taken.plan).items()):
                array = jax.sharding.reshard(of_feature, PartitionSpec())
                weights = jnp.cos(jnp.arange(array.size, dtype=jnp.float32) + len(name))
                total = total + jnp.sum(jnp.sin(3 * array) * weights.reshape(array.shape))
            return total

        value, gradients = jax.value_and_grad(loss)(taken.rows)
        return tables.update(state, taken, gradients, rate=RATE), value

    return jax.jit(step, donate_argnums=0)


def options(optimizer: str, **more) -> TablesConfig:
    decay = 0.0 if optimizer == "ftrl" else 0.3
    own = dict(optimizer=optimizer, weight_decay=decay, host_gib=0.001)
    return TablesConfig(**own | more)


@functools.cache
def plain(optimizer: str, devices: int, split: str, **more) -> tables_lib.Tables:
    listed = [Table(t.name, t.rows, W, split, t.scale) for t in TABLES]
    return tables_lib.make(listed, FEATURES, options(optimizer, **more), mesh_of(devices))


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
            rows = rows * np.exp(float(state.decay[0]) - slots[tables_lib.DECAYED])
        found[table.name] = rows
    return found


def new(tables: tables_lib.Tables):
    with jax.set_mesh(tables.mesh):
        return Cached(tables), tables.init(0)


CASES = [
    ("row_adagrad", 4, "rows"), ("adam", 1, "rows"), ("adagrad", 2, "columns"),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (("sgd", 1, "rows"), ("adam", 4, "whole"), ("ftrl", 2, "rows"))
    ),
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


def test_a_dictionary_is_exact():
    """As a dict of Python, of ids that share hashes, with many removed."""
    rng, found, plain = np.random.default_rng(0), Dictionary(3000), {}
    for _ in range(60):
        ids = rng.integers(0, 2500, 400).astype(np.uint64) * np.uint64(2**40 + 1)
        tables = rng.integers(0, 3, 400).astype(np.uint16)
        pairs = list(zip(ids.tolist(), tables.tolist(), strict=True))
        assert found.find(ids, tables).tolist() == [plain.get(pair, NONE) for pair in pairs]
        missing = sorted(set(pairs) - plain.keys())
        if len(found) + len(missing) > found.capacity:
            gone = set(rng.permutation(found.numbers())[:1500].tolist())
            found.remove(np.array(sorted(gone), np.int32))
            plain = {pair: number for pair, number in plain.items() if number not in gone}
        missing = [pair for pair in missing if pair not in plain]
        new = found.add(
            np.array([pair[0] for pair in missing], np.uint64),
            np.array([pair[1] for pair in missing], np.uint16),
        )
        plain |= zip(missing, new.tolist(), strict=True)
        assert len(found) == len(plain) and set(found.numbers().tolist()) == set(plain.values())


def test_new_rows_of_large_ids_differ_and_those_of_small_ones_are_the_tables():
    low = np.arange(50)
    wide = numbers.uniform(3, np.full(50, 1, np.uint16), low.astype(np.uint64), np.arange(4))
    np.testing.assert_array_equal(wide, numbers.uniform(3, 1, low, np.arange(4), xp=jnp))
    high = numbers.uniform(3, 1, (low + 2**32).astype(np.uint64), np.arange(4))
    assert not (high == wide).any()


def rows_for(admit_after: int, capacity: int, monkeypatch) -> host_rows.HostRows:
    tables = small("sgd", 1, "rows", 4, admit_after=admit_after)
    monkeypatch.setattr(host_rows, "capacity_of", lambda *_: capacity)
    return host_rows.HostRows(tables)


def keys_of(*ids: int) -> Keys:
    return Keys(np.array(ids, np.uint64), np.zeros(len(ids), np.uint16))


def test_ids_are_admitted_when_they_were_seen_so_often(monkeypatch):
    rows = rows_for(3, 40, monkeypatch)
    first = rows.count(keys_of(7, 7, 9, 11))
    assert first.numbers_N.tolist() == [-1, -1, -2, -3]
    assert first.others.ids.tolist() == [7, 9, 11]
    second = rows.count(keys_of(9, 7, 11))
    assert second.numbers_N.tolist() == [-1, 0, -2] and second.others.ids.tolist() == [9, 11]
    assert len(rows.admitted) == 1 and len(rows.seen) == 2
    # Looking up counts nothing.
    assert [rows.look_up(keys_of(9)).numbers_N[0] for _ in range(5)] == [-1] * 5
    assert rows.count(keys_of(9, 11)).numbers_N.tolist() == [1, 2] and not len(rows.seen)


def test_the_rows_that_were_not_named_for_longest_are_forgotten(monkeypatch):
    rows = rows_for(1, 8, monkeypatch)
    rows.count(keys_of(1, 2, 3))
    rows.count(keys_of(4, 5, 6))
    assert not len(rows.count(keys_of(2, 7, 8)).forgotten)
    three = rows.admitted.find(*keys_of(1, 3))
    # Those of one age go together, though one would do.
    assert sorted(rows.count(keys_of(9)).forgotten) == sorted(three)
    assert rows.look_up(keys_of(1, 2, 3, 9)).others.ids.tolist() == [1, 3]
    assert rows.num_forgotten == 2 and rows.num_admitted == 9


def test_an_id_that_is_not_admitted_stays_as_it_begins():
    """It is read, and not trained before its admission, though it is in the cache."""
    batches = [np.where(np.arange(K) == 0, np.array([[5]] * B), -1) for _ in range(5)]
    keys = dict(weight_decay=0.0)
    cached, state = new(small("sgd", 1, "rows", 40, admit_after=2 * B + 1, **keys))
    losses, state = train(cached, state, batches)
    wanted, tables = train_plain(plain("sgd", 1, "rows", **keys), batches[:3])
    assert losses == [wanted[0], wanted[0], *wanted]
    np.testing.assert_array_equal(rows_of(cached, state)["a"], tables["a"])
    assert cached.scalars()["rows_admitted"] == 1


def test_a_batch_with_too_many_rows_is_an_error():
    cached, state = new(small("sgd", 1, "rows", 20))
    with pytest.raises(CacheTooSmall, match=r"rows=20 are on the devices: set it to at least"):
        train(cached, state, batches_of(1))
    assert not len(cached.rows.admitted)


def test_an_exchange_is_in_place():
    """Beside its arguments the program has a few times what it moves, not the whole cache."""
    tables = small("sgd", 1, "rows", 1 << 15, host_gib=0.01)
    layout, state = cached_lib._Layout(tables), tables.abstract
    moved = jax.ShapeDtypeStruct((64, W), jnp.float32, sharding=layout.to)
    places = jax.ShapeDtypeStruct((64,), jnp.int32, sharding=layout.to)
    rows, slots = state.rows[layout.key], state.slots[layout.key]
    one = jax.ShapeDtypeStruct((64, 1), jnp.float32, sharding=layout.to)
    with jax.set_mesh(tables.mesh):
        lowered = layout.swap.lower(rows, slots, places, moved, dict.fromkeys(slots, one))
    memory = lowered.compile().memory_analysis()
    assert memory.temp_size_in_bytes < 16 * 64 * W * 4 < memory.alias_size_in_bytes / 10


def test_an_evaluation_changes_nothing():
    batches, tables = batches_of(8), small("row_adagrad", 4, "rows")
    wanted, _ = train(*new(tables), batches)
    cached, state = new(tables)
    losses, state = train(cached, state, batches[:4])
    view = cached.view(state)

    @jax.jit
    def look_up(state, ids):
        taken = tables.take(state, ids)
        return tables.combine(taken.rows, taken.plan)["a1"]

    before = rows_of(cached, state)
    with jax.set_mesh(tables.mesh):
        for ids in batches[5:7]:
            own, slots = view.prepare(ids)
            found = np.asarray(look_up(own, by_feature(tables, slots)))
            there = ids[:, 0] >= 0
            np.testing.assert_allclose(
                found[there], before["a"][ids[there, 0]], rtol=1e-6, atol=1e-9
            )
    more, _ = train(cached, state, batches[4:])
    assert losses + more == wanted


def test_saved_rows_go_on_bit_for_bit_on_other_devices_with_another_cache(tmp_path):
    batches = batches_of(10)
    first, second = small("adam", 1, "rows"), small("adam", 4, "rows", 60)
    cached, state = new(first)
    _, state = train(cached, state, batches[:5])
    cached.write_back(state)
    cached.save(tmp_path / "rows")
    decay = np.array(state.decay)
    more, state = train(cached, state, batches[5:])
    wanted = rows_of(cached, state)

    again, empty = new(second)
    again.load(tmp_path / "rows")
    decay = jax.device_put(decay, second.abstract.decay.sharding)  # a checkpoint's state has it
    found, state = train(again, empty._replace(decay=decay), batches[5:])
    assert found == more
    for name, rows in rows_of(again, state).items():
        np.testing.assert_array_equal(rows, wanted[name])
    assert again.scalars()["rows_admitted"] == cached.scalars()["rows_admitted"]

    path = pathlib.Path(tmp_path / "rows/rows.array")
    path.write_bytes(path.read_bytes()[:-1] + b"\7")
    with pytest.raises(ValueError, match=r"rows\.array: its content has changed"):
        host_files.check(tmp_path / "rows")
    with pytest.raises(ValueError, match="with another optimizer of rows"):
        new(small("sgd", 1, "rows"))[0].load(tmp_path / "rows")
    other = small("adam", 1, "rows", 2)
    less = Cached(other)
    less.rows.capacity = 3
    with pytest.raises(ValueError, match=r"tables\.host_gib is for 3: set it to at least"):
        less.load(tmp_path / "rows")

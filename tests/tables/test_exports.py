"""Tables by id, whatever devices have them: exports whole and in increments, lookups of them
without jax, and runs that begin with them."""

import dataclasses
import functools
import json
import re
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from support import runs
from tables import test_tables

from llmx import config as config_lib
from llmx.checkpoint import from_export, identity, resume, streamed
from llmx.data.records import hashing, schema
from llmx.model import looked_up
from llmx.model.families import ModelConfig
from llmx.model.recommender import online as online_models
from llmx.model.recommender import recommender
from llmx.model.recommender.config import RecommenderConfig
from llmx.sharding import trees
from llmx.tables import __main__ as command
from llmx.tables import by_id, exporting, exports, numbers, online
from llmx.tables import tables as tables_lib
from llmx.tables.by_id import ROWS
from llmx.tables.config import Feature, Table, TablesConfig
from llmx.tables.tables import TablesState

PREDICTIONS = dict(rtol=1e-5, atol=1e-5)  # fp32, sums in another order
SEED = 5


def _renamed(each, key: str):
    """With a name that files cannot have."""
    return dataclasses.replace(each, **{key: "d/1"}) if getattr(each, key) == "d" else each


TABLES = tuple(_renamed(table, "name") for table in test_tables.TABLES)
FEATURES = tuple(_renamed(feature, "table") for feature in test_tables.FEATURES)
B = 6


def made(devices: int, listed=TABLES, **options) -> tables_lib.Tables:
    mesh = test_tables.mesh_of(devices)
    return tables_lib.make(
        listed, FEATURES, TablesConfig(**{"optimizer": "adam"} | options), mesh, axes=("data",)
    )


def new_rows(number: int, table: Table) -> np.ndarray:
    """What any device should have."""
    hashes = numbers.uniform(
        np.array([SEED]), number, np.arange(table.rows), np.arange(table.width)
    )
    return table.bound * hashes


class ById:
    """Rows by id in memory: the plain form of all others."""

    def __init__(self, tables=TABLES, seed: int = 0, slots=("m", "count")):
        rng = np.random.default_rng(seed)
        self.arrays = {
            (table.name, slot): rng.standard_normal(
                (table.rows, 1 if slot == "count" else table.width)
            ).astype(np.float32)
            for table in tables
            for slot in (ROWS, *slots)
        }

    def read(self, table: str, slot: str, ids: slice) -> np.ndarray:
        return self.arrays[table, slot][ids]


class InFiles:
    """An array that is read by ranges only, as one in a checkpoint's files."""

    def __init__(self, array: np.ndarray):
        self._array, self.shape = array, array.shape

    def __getitem__(self, index: slice) -> np.ndarray:
        assert isinstance(index, slice) and index.step is None
        return self._array[index]


SLOTS = {"m": True, "count": False}


def content(source_step: int = 7, *, slots=SLOTS, tables=TABLES) -> exporting.Content:
    return exporting.Content(
        source_step, tables, FEATURES, slots, "adam", {"w": np.ones((2, 3), np.float32)},
        identity.as_json(ModelConfig()),
    )  # fmt: skip


def export(folder, source, *, rows: int = 9, since=None, step: int = 7, **options):
    written = exporting.write(
        folder, content(step), source, block_rows=lambda table: rows,
        since=since and exports.open_export(since), **options,
    )  # fmt: skip
    return written


# --------------------------------------------------------------------------------- rows of devices


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_rows_of_devices_by_id(devices):
    """In memory and read by ranges, of any first, end and step; and laid out again on others."""
    tables = made(devices)
    with jax.set_mesh(tables.mesh):
        state = jax.device_get(tables.init(SEED))
    files = TablesState(
        {key: InFiles(array) for key, array in state.rows.items()}, state.slots, state.decay
    )
    for number, table in enumerate(TABLES):
        wanted = new_rows(number, table)
        for of in (state, files):
            held = by_id.of_state(of, TABLES, FEATURES, devices, slots={})
            for first, end, step in ((0, table.rows, None), (3, 31, 1), (2, 47, 5), (0, 1, 1)):
                ids = slice(first, min(end, table.rows), step)
                if first < table.rows:
                    np.testing.assert_array_equal(held.read(table.name, ROWS, ids), wanted[ids])


@pytest.mark.parametrize("devices", [1, 3, 8])
def test_arrays_of_devices_of_rows_by_id(devices):
    by_row = [t if t.split != "columns" or t.width % devices == 0 else TABLES[0] for t in TABLES]
    by_row = [Table(t.name, t.rows, t.width, o.split) for t, o in zip(TABLES, by_row, strict=True)]
    tables, source = made(devices, by_row), ById()
    with jax.set_mesh(tables.mesh):
        state = tables.filled(source, ("m", "count"))
        abstract = jax.tree.map(lambda leaf: leaf.sharding, tables.abstract)
        assert jax.tree.map(lambda leaf: leaf.sharding, state) == abstract
    held = by_id.of_state(
        jax.device_get(state), by_row, FEATURES, devices, slots=tables.optimizer.slots
    )
    for (name, slot), wanted in source.arrays.items():
        np.testing.assert_array_equal(held.read(name, slot, slice(0, len(wanted))), wanted)
    assert not np.any(jax.device_get(state.slots["8"]["v"]))  # is new


def test_a_state_is_moved_to_another_split_and_as_many_devices():
    """Shapes may be the same, and rows are elsewhere; what is due is taken off where no more is to
    come; another optimizer's state is refused."""
    split = [Table(table.name, table.rows, table.width, "rows") for table in TABLES[:4]]
    columns = [Table(table.name, table.rows, table.width, "columns") for table in TABLES[:4]]
    features = FEATURES[:5]
    meshes = [test_tables.mesh_of(2), test_tables.mesh_of(4)]
    config = TablesConfig(optimizer="adam", weight_decay=0.1)
    source = ById(split)
    make = functools.partial(tables_lib.make, split, features, axes=("data",))
    before = tables_lib.make(columns, features, config, meshes[1], axes=("data",))
    with jax.set_mesh(meshes[1]):
        state = before.filled(source, ("m", "count"), (-0.5, 0.0))
        assert before.relaid(state, {"data": 4}, split="columns") is state
    by_paths = {"rows": state.rows, "slots": state.slots, "decay": state.decay}
    for mesh, decay in ((meshes[1], 0.1), (meshes[0], 0.1), (meshes[0], 0.0)):
        after = make(dataclasses.replace(config, weight_decay=decay), mesh)
        with jax.set_mesh(mesh):
            moved = jax.device_get(after.relaid(by_paths, {"data": 4}, split="columns"))
        assert moved.decay.tolist() == [-0.5 if decay else 0, 0]
        slots, factor = after.optimizer.slots, 1 if decay else np.exp(np.float32(-0.5))
        held = by_id.of_state(moved, split, features, after.devices, slots=slots)
        for (name, slot), wanted in source.arrays.items():
            found = held.read(name, slot, slice(0, len(wanted)))
            np.testing.assert_array_equal(found, wanted if slot else wanted * factor)
    other = make(TablesConfig(optimizer="adagrad"), meshes[0])
    with pytest.raises(ValueError, match=r"keeps squares of rows, and .* has count, decayed, m, v"):
        other.relaid(by_paths, {"data": 4}, split="columns")


def test_slots_are_in_equal_parts_and_older_states_are_read():
    """A large table has some more slots than rows; a state without them is of an older version."""
    [group] = tables_lib.placement.placed([Table("a", 10_007, 4)], [], 2)
    assert group.slots % 1024 == 0 and 0 <= group.slots - 5004 < 1024
    rows = np.arange(2 * 5004, dtype=np.float32)[:, None]
    held = by_id.of_state(
        TablesState({"1": rows}, {"1": {}}, np.float32(0)),
        [Table("a", 10_007, 1)],
        [],
        2,
        slots={},
    )
    found = held.read("a", ROWS, slice(0, 10_007))[:, 0]
    np.testing.assert_array_equal(found, np.arange(10_007) % 2 * 5004 + np.arange(10_007) // 2)


# ---------------------------------------------------------------------------------------- exports


def same(folder, source: ById):
    opened = exports.open_export(folder, verify=True)
    for (name, slot), wanted in source.arrays.items():
        np.testing.assert_array_equal(opened.read(name, slot, slice(0, len(wanted))), wanted)


def test_an_export_has_the_rows_in_files_that_are_mapped(tmp_path):
    source = ById()
    assert export(tmp_path / "a", source) == {table.name: table.rows for table in TABLES}
    same(tmp_path / "a", source)
    found = np.load(tmp_path / "a" / "003-d_1.npy", mmap_mode="r")
    np.testing.assert_array_equal(found, source.arrays["d/1", ROWS])
    opened = exports.open_export(tmp_path / "a")
    assert opened.step == 7 and opened.dense["w"].shape == (2, 3)
    assert [dict(vars(f)) for f in opened.features.values()] == [vars(f) for f in FEATURES]


def test_memory_of_an_export_is_that_of_a_block(tmp_path):
    """As many rows as fill it, or as all devices have in one chunk."""
    asked = []

    class Watched(ById):
        def read(self, table, slot, ids):
            asked.append(ids.stop - ids.start)
            return super().read(table, slot, ids)

    export(tmp_path / "a", Watched(), rows=6)
    assert max(asked) == 6
    rows = functools.partial(by_id.block_rows, slots=1, num_bytes=4 * 2 * 8 * 1000)
    assert rows(TABLES[0], 1, 10) == 1000  # 8 numbers and 8 of a slot
    assert rows(TABLES[0], 16, 100) == 1600  # split by rows over 16 devices
    assert rows(TABLES[1], 16, 100) == 1000  # on one


def test_increments_are_the_rows_that_have_changed(tmp_path):
    """Also of which only the optimizer's state has, or the sign of a zero; a chain of them equals
    the whole, file by file."""
    source, rng = ById(), np.random.default_rng(1)
    source.arrays["a", ROWS][3, 2] = 0.0
    export(tmp_path / "0", source, step=0)
    folder = tmp_path / "0"
    for number in range(1, 4):
        changed = {"a": {3, 49} if number == 1 else set(), "b": {int(rng.integers(7))}}
        if number == 1:
            source.arrays["a", ROWS][3, 2] = -0.0
            source.arrays["a", "count"][49] += 1
        for row in changed["b"]:
            source.arrays["b", ROWS][row] += rng.standard_normal(8).astype(np.float32)
        written = export(tmp_path / str(number), source, since=folder, step=number)
        assert written == {t.name: len(changed.get(t.name, ())) for t in TABLES}
        folder = tmp_path / str(number)
        ids = np.load(folder / "000-a.ids.npy")
        assert set(ids.tolist()) == changed["a"]
        same(folder, source)
    export(tmp_path / "whole", source, step=3)
    assert command.main(["merge", str(folder), "--output", str(tmp_path / "merged")]) == 0
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "merged" / path.name).read_bytes(), path.name


def test_parquet_has_a_file_for_each_table(tmp_path):
    from pyarrow import parquet

    source = ById()
    export(tmp_path / "a", source)
    source.arrays["a", ROWS][[4, 17]] += 1
    export(tmp_path / "p", source, files=exporting.PARQUET)
    export(tmp_path / "q", source, files=exporting.PARQUET, since=tmp_path / "a")
    assert len(list((tmp_path / "p").glob("*.parquet"))) == len(TABLES)
    for folder, ids in (("p", np.arange(50)), ("q", np.array([4, 17]))):
        table = parquet.read_table(tmp_path / folder / "000-a.parquet")
        np.testing.assert_array_equal(table["id"].to_numpy(), ids)
        rows = np.stack(table["row"].to_numpy(zero_copy_only=False))
        np.testing.assert_array_equal(rows, source.arrays["a", ROWS][ids])
        counts = np.stack(table["count"].to_numpy(zero_copy_only=False))
        np.testing.assert_array_equal(counts, source.arrays["a", "count"][ids])


def test_parquet_is_read_back(tmp_path, capsys):
    """In row groups, behind and before increments of the other kind; merged into the same files."""
    source, folder, files = ById(), None, (exporting.PARQUET, exporting.FILES, exporting.PARQUET)
    for number, kind in enumerate(files):
        source.arrays["a", ROWS][[4, 17 + number]] += 1
        export(tmp_path / f"{number}", source, since=folder, files=kind, step=3)
        folder = tmp_path / f"{number}"
        assert exports.open_export(folder, verify=True).step == 3
        same(folder, source)
    export(tmp_path / "whole", source, step=3)
    assert command.main(["merge", str(folder), "--output", str(tmp_path / "merged")]) == 0
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "merged" / path.name).read_bytes(), path.name
    opened = online.open_export(folder)
    ids = np.random.default_rng(0).integers(-1, 50, (5, 7))
    wanted = source.arrays["a", ROWS][np.maximum(ids, 0)] * (ids >= 0)[..., None]
    np.testing.assert_array_equal(opened.lookup("a", ids), wanted)
    capsys.readouterr()
    path = tmp_path / "0" / "001-b.parquet"
    raw = bytearray(path.read_bytes())
    for change, said in ((len(raw) // 2, "checksum mismatch"), (len(raw) - 2, "export again")):
        damaged = raw.copy()
        damaged[change] ^= 1
        path.write_bytes(damaged)
        assert command.main(["verify", str(folder)]) == 2
        assert said in capsys.readouterr().err
    path.write_bytes((tmp_path / "0" / "000-a.parquet").read_bytes())
    with pytest.raises(ValueError, match="the manifest says"):
        exports.open_export(tmp_path / "0")
    path.unlink()
    with pytest.raises(ValueError, match=r"001-b\.parquet is missing: export again"):
        exports.open_export(tmp_path / "0")


def test_an_export_that_stops_leaves_nothing(tmp_path):
    class Broken(ById):
        def read(self, table, slot, ids):
            if table == "c":
                raise OSError("no space")
            return super().read(table, slot, ids)

    with pytest.raises(OSError, match="no space"):
        export(tmp_path / "a", Broken())
    assert not list(tmp_path.iterdir())
    (tmp_path / ".a.unfinished").mkdir()  # of one that was killed
    (tmp_path / ".a.unfinished" / "000-a.npy").touch()
    export(tmp_path / "a", ById())
    same(tmp_path / "a", ById())


def _flip(folder):
    path = folder / "001-b.npy"
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 1
    path.write_bytes(raw)


def _cut(folder):
    path = folder / "001-b.npy"
    path.write_bytes(path.read_bytes()[:-32])


def _replace(folder):
    shutil.rmtree(folder)
    export(folder, ById(seed=9))


def _edit(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"step": 8}))


@pytest.mark.parametrize(
    "harm, text",
    [
        (_flip, "001-b.npy: checksum mismatch"),
        (_cut, "001-b.npy cannot be read"),
        (_replace, "is another export than the increment"),
        (_edit, "does not match its own checksum"),
        (shutil.rmtree, "does not exist"),
        (lambda folder: (folder / "004-e.m.npy").unlink(), "004-e.m.npy is missing"),
    ],
)
def test_damage_is_named(tmp_path, harm, text, capsys):
    export(tmp_path / "a", ById())
    export(tmp_path / "b", ById(), since=tmp_path / "a")
    assert command.main(["verify", str(tmp_path / "b")]) == 0
    harm(tmp_path / "a")
    assert command.main(["verify", str(tmp_path / "b")]) == 2
    assert re.search(re.escape(text), capsys.readouterr().err)
    # What is made of it would have checksums of its own.
    assert command.main(["merge", str(tmp_path / "b"), "--output", str(tmp_path / "c")]) == 2
    assert text in capsys.readouterr().err and not (tmp_path / "c").exists()


def test_an_increment_to_other_tables_is_an_error(tmp_path):
    export(tmp_path / "a", ById())
    opened = exports.open_export(tmp_path / "a")
    for other, text in (
        (content(tables=TABLES[:3]), "has other tables"),
        (content(slots={}), "give --optimizer-state to both"),
        (dataclasses.replace(content(), features=FEATURES[1:]), "has other features, or combines"),
    ):
        with pytest.raises(ValueError, match=text):
            exporting.write(tmp_path / "b", other, ById(), block_rows=lambda table: 9, since=opened)


def test_what_a_reader_would_not_find_is_not_written(tmp_path):
    twice = dataclasses.replace(content(), features=[*FEATURES, FEATURES[0]])
    with pytest.raises(ValueError, match="an export cannot hold the features"):
        exporting.write(tmp_path / "a", twice, ById(), block_rows=lambda table: 9)
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------ lookups without jax


def test_bags_equal_those_of_training(tmp_path):
    tables, rng = made(1, weight_decay=0.5), np.random.default_rng(0)
    ids = {
        f.name: rng.integers(-1, {t.name: t.rows for t in TABLES}[f.table], (B, f.length))
        for f in FEATURES
    }
    weights = {f.name: rng.uniform(size=(B, f.length)).astype(np.float32) for f in FEATURES}

    def both(state, ids, weights):
        taken = tables.take(state, ids)
        plans = taken.rows, taken.plan
        return tables.combine(*plans), tables.combine(*plans, weights)

    with jax.set_mesh(tables.mesh):
        state = tables.init(SEED)._replace(decay=jax.numpy.array([-0.25, 0.0]))
        plain, weighed = jax.jit(both)(state, ids, weights)
    held = by_id.of_state(jax.device_get(state), TABLES, FEATURES, 1, slots={}, due=True)
    exporting.write(tmp_path / "a", content(slots={}), held, block_rows=lambda table: 9)
    opened = online.open_export(tmp_path / "a", verify=True)
    for feature in FEATURES:
        own = ids[feature.name]
        found = opened.bags(feature.name, own)
        np.testing.assert_allclose(found, plain[feature.name], rtol=1e-6, atol=1e-7)
        found = opened.bags(feature.name, own, weights[feature.name])
        np.testing.assert_allclose(found, weighed[feature.name], rtol=1e-6, atol=1e-7)
    decayed = new_rows(0, TABLES[0]) * np.exp(np.float32(-0.25))
    np.testing.assert_array_equal(opened.lookup("a", np.arange(50)), decayed)


def test_texts_become_the_rows_that_records_have(tmp_path):
    export(tmp_path / "a", ById())
    opened = online.open_export(tmp_path / "a")
    found = opened.ids_of("a", ["shoes", "", "bread", b"\xc3\xa4"])
    texts = np.array([b"shoes", b"bread", b"\xc3\xa4"])
    wanted = hashing.of_texts(texts, schema.Feature("a", 50))[:, 0]
    assert found.tolist() == [wanted[0], -1, *wanted[1:]]
    assert not len(opened.ids_of("a", []))
    with pytest.raises(ValueError, match="257 bytes"):
        opened.ids_of("a", ["x" * 257])


def test_wrong_lookups_are_errors(tmp_path):
    export(tmp_path / "a", ById())
    opened = online.open_export(tmp_path / "a")
    assert opened.lookup("a", np.zeros((2, 0), int)).shape == (2, 0, 8)
    for ids in ([[3, 50]], [[3, -2]]):
        with pytest.raises(ValueError, match="is not from 0 to 49"):
            opened.lookup("a", np.array(ids))
    assert opened.lookup("a", []).shape == (0, 8)
    for ids in ([1.5], ["x"], [None], [True]):
        with pytest.raises(ValueError, match="they are whole numbers"):
            opened.lookup("a", ids)
    with pytest.raises(ValueError, match="5 is no text"):
        opened.ids_of("a", [5])
    feature = FEATURES[0].name
    for weight in (-1.0, np.nan):
        with pytest.raises(ValueError, match="finite and not below 0"):
            opened.bags(feature, [[0]], [[weight]])
    bags = (
        ([[0, 1]], None, r"ids of shape \[1, 2\], and they are \[B, L\] with L up to 1"),
        ([0], None, r"ids of shape \[1\]"),
        ([[0], [1]], [[1.0]], r"weights of shape \[1, 1\] for ids of shape \[2, 1\]"),
    )
    for ids, weights, text in bags:
        with pytest.raises(ValueError, match=text):
            opened.bags(feature, ids, weights)
    with pytest.raises(ValueError, match="there is no feature 'z': use one of a1"):
        opened.bags("z", [[0]])
    with pytest.raises(ValueError, match="there is no table 'z'"):
        opened.lookup("z", np.array([0]))
    with pytest.raises(ValueError, match="of a language model"):
        online_models.open_model(tmp_path / "a")


WEIGHED = dict(features=("item", "user", "history"), weights=(0, 0, 4))
MODELS = {
    "dlrm": dict(name="dlrm", bottom=(12, 8), top=(16, 8)),
    "dlrm with weights": dict(name="dlrm", bottom=(12, 8), top=(16, 8), **WEIGHED),
    "dlrm without numbers": dict(name="dlrm", bottom=(), top=(16,), num_dense=0),
    "dcn": dict(name="dcn", bottom=(), top=(16,), cross_layers=2),
    "dcn of low rank": dict(name="dcn", bottom=(6,), cross_rank=3, structure="parallel"),
    "din": dict(name="din", bottom=(4,), top=(8,), attention=(6,), histories=("history=item",)),
}


def clicks(folder, **keys):
    """An export of a new model, and the model."""
    config = RecommenderConfig(**dict(width=8, num_dense=3, top=(16,)) | keys)
    combine = "none" if config.name == "din" else "sum"
    features = [Feature("item", "items", combine="mean"), Feature("user", "users", combine="mean"),
                Feature("history", "items", 4, combine)]  # fmt: skip
    tables = [Table("items", 40, 8), Table("users", 30, 8)]
    lengths = {f.name: f.length if f.combine == "none" else 0 for f in features}
    model = recommender.make(config, num_dense=config.num_dense, lengths=lengths)
    params = jax.device_get(model.init(jax.random.key(1)))
    source = ById(tables, slots=())
    exporting.write(
        folder, exporting.Content(
            3, tables, features, {}, "sgd", params,
            {"recommender": identity.as_json(config)},
        ), source, block_rows=lambda table: 9,
    )  # fmt: skip
    return model, params, source, config


@pytest.mark.parametrize("name", MODELS)
def test_predictions_equal_those_of_training(tmp_path, name):
    model, params, source, config = clicks(tmp_path / "a", **MODELS[name])
    rng = np.random.default_rng(2)
    ids = np.concatenate([rng.integers(0, 30, (B, 2)), rng.integers(-1, 40, (B, 4))], axis=1)
    dense = rng.standard_normal((B, config.num_dense)).astype(np.float32)
    rows, there = source.arrays["items", ROWS], ids[:, 2:] >= 0
    weights = rng.uniform(size=(B, 4)).astype(np.float32) if config.weights else None
    history = rows[np.maximum(ids[:, 2:], 0)] * there[..., None]
    history = history if weights is None else history * weights[..., None]
    embedded = {"item": rows[ids[:, 0]], "user": source.arrays["users", ROWS][ids[:, 1]],
                "history": history if name == "din" else history.sum(axis=1)}  # fmt: skip
    wanted = jax.jit(model.logits)(params, dense, embedded, {"history": there})
    opened = online_models.open_model(tmp_path / "a")
    np.testing.assert_allclose(opened.logits(dense, ids, weights), wanted, **PREDICTIONS)
    np.testing.assert_allclose(
        opened.click(dense, ids, weights), jax.nn.sigmoid(wanted), **PREDICTIONS
    )
    with pytest.raises(ValueError, match="have weights"):
        opened.click(dense, ids, None if config.weights else np.ones((B, 4)))
    wrong = [(dense, ids[:, 1:], weights), (dense[1:], ids, weights), (dense, ids[1:], weights)]
    if config.weights:  # beside all ids, not those that have some
        wrong.append((dense, ids, np.ones((B, 6))))
    for given in wrong:
        with pytest.raises(ValueError, match="a row for each record"):
            opened.click(*given)


def test_predictions_need_no_jax(tmp_path):
    clicks(tmp_path / "a", **MODELS["din"])
    text = (
        "import sys, numpy as np\n"
        "from llmx.model.recommender import online\n"
        "model = online.open_model(sys.argv[1], verify=True)\n"
        "found = model.click(np.zeros((2, 3)), np.array([[1, 2, 3, -1, 5, 6]] * 2))\n"
        "assert found.shape == (2,) and 'jax' not in sys.modules and 'pyarrow' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", text, str(tmp_path / "a")], capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


# ----------------------------------------------------------------- checkpoints, and runs from them


def config_of(folder, **keys) -> config_lib.Config:
    (folder / "records.parquet").touch()
    model = ModelConfig(recommender=RecommenderConfig("dlrm", width=8, bottom=(8,), top=(8,)))
    own = dict(
        batch__size=24, batch__sequence_length=1, data__format="records",
        data__sources=(str(folder / "records.parquet"),), data__records__dense=("x", "y"),
        data__records__features=("C1", "C2:3", "C3@C1"), data__records__rows=3000,
        tables__optimizer="adagrad",
    )  # fmt: skip
    return runs.make_config(model, **own | keys)


def streamed_array(array: np.ndarray) -> streamed.Streamed:
    return streamed.Streamed(array.shape, array.dtype, False, lambda at: np.asarray(array[at]))


def checkpoint(folder, devices: int, *, step: int = 40, weight_decay: float = 0.0):
    """One of a run on so many devices, as if there were as many; and its rows by id."""
    config = config_of(folder, tables__weight_decay=weight_decay, mesh={"data": 4})
    config.workdir = str(folder / "run")
    config_lib.save_run(config)
    recipe = runs.make_recipe(config)
    listed = recipe.loss.execution.tables
    source = ById(listed.tables, seed=step, slots=("squares",))
    groups = tables_lib.placement.placed(listed.tables, listed.features, devices)
    parts = functools.partial(np.concatenate, axis=0)
    arrays = {"extra/tables/decay": np.array([-0.5, 0.0], np.float32)}
    for group in groups:
        key = f"extra/tables/rows/{group.width}"
        of = [
            functools.partial(by_id.of_device, group, device, source, width=group.width, fill=0)
            for device in range(devices)
        ]
        arrays[key] = parts([each(slot=ROWS) for each in of])
        key = f"extra/tables/slots/{group.width}"
        arrays[f"{key}/squares"] = parts([each(slot="squares") for each in of])
        if weight_decay:
            arrays[f"{key}/decayed"] = np.full((len(arrays[f"{key}/squares"]), 1), -0.25, "f4")
    with jax.set_mesh(recipe.mesh):
        params = jax.device_get(recipe.init(0).params)
    arrays |= {f"params/{name}": np.asarray(leaf) for name, leaf in trees.named(params).items()}
    meta = {"mesh": {"data": devices // 2, "fsdp": 2}, "config": config_lib.to_json(config)}
    streamed.save(
        f"{config.workdir}/checkpoints", step,
        {name: streamed_array(array) for name, array in arrays.items()}, meta,
    )  # fmt: skip
    return source, params


def test_a_checkpoint_of_hundreds_of_shards_is_exported(tmp_path):
    """With the decay that is due taken off."""
    source, params = checkpoint(tmp_path, 256, weight_decay=0.1)
    args = ["--workdir", str(tmp_path / "run"), "--optimizer-state", "--output"]
    assert command.main(["export", *args, str(tmp_path / "a")]) == 0
    opened = exports.open_export(tmp_path / "a", verify=True)
    for (name, slot), wanted in source.arrays.items():
        found = opened.read(name, slot, slice(0, len(wanted)))
        due = np.exp(-0.5 - np.full((1, 1), -0.25, np.float32))
        np.testing.assert_array_equal(found, wanted * due if slot == ROWS else wanted)
    jax.tree.map(np.testing.assert_array_equal, dict(opened.dense), trees.named(params))
    assert opened.step == 40


def test_a_command_refuses_what_it_cannot_do(tmp_path, capsys):
    checkpoint(tmp_path, 4)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").touch()
    for args, text in (
        (["--output", str(tmp_path / "full")], "is not empty"),
        (["--output", str(tmp_path / "x"), "--step", "3"], "no checkpoint of step 3"),
        (["--output", str(tmp_path / "x"), "--since", str(tmp_path / "full")], "does not exist"),
    ):
        assert command.main(["export", "--workdir", str(tmp_path / "run"), *args]) == 2
        assert text in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


STARTS = {
    "one device": {}, "fsdp4": dict(mesh={"fsdp": 4}), "whole": dict(
        mesh={"data": 2}, tables__split="whole"
    ), "columns": dict(mesh={"data": 4}, tables__split="columns"),
    "another optimizer": dict(mesh={"data": 2}, tables__optimizer="sgd"),
    "of Parquet": dict(mesh={"data": 2}),
}  # fmt: skip


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    source, params = checkpoint(folder, 4)
    args = ["--workdir", str(folder / "run"), "--optimizer-state", "--output", str(folder / "a")]
    assert command.main(["export", *args]) == 0
    assert command.main(["export", *args[:-1], str(folder / "p"), "--format", "parquet"]) == 0
    return folder, source, params


@pytest.mark.parametrize("name", STARTS)
def test_a_run_begins_with_an_export(exported, name):
    """On another number of devices and by another split: rows and the optimizer's state are the
    same, bit for bit."""
    folder, source, params = exported
    place = folder / ("p" if name == "of Parquet" else "a")
    config = config_of(folder, start_from=str(place), **STARTS[name])
    recipe, said = runs.make_recipe(config), []
    with jax.set_mesh(recipe.mesh):
        state = recipe.init_constraints(recipe.init(0))
        state = resume.start_with(config, recipe, state, config.start_from, said.append)
        state = from_export.with_tables(recipe, state, config.start_from, said.append)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), params)
    tables = recipe.loss.execution.tables
    own = jax.device_get(state.extra[looked_up.TABLES])
    slots = tables.optimizer.slots
    held = by_id.of_state(own, tables.tables, tables.features, tables.devices, slots=slots)
    for (table, slot), wanted in source.arrays.items():
        if slot == ROWS or name != "another optimizer":
            found = held.read(table, slot, slice(0, len(wanted)))
            np.testing.assert_array_equal(found, wanted)
    assert ("has kept of them" in said[-1]) == (name != "another optimizer")


def test_a_damaged_export_is_not_begun_with(exported, tmp_path):
    folder, *_ = exported
    place = tmp_path / "damaged"
    shutil.copytree(folder / "a", place)
    [rows] = place.glob("000-*[!a-z].npy")
    raw = bytearray(rows.read_bytes())
    raw[-3] ^= 1
    rows.write_bytes(raw)
    config = config_of(folder, start_from=str(place))
    recipe = runs.make_recipe(config)
    with jax.set_mesh(recipe.mesh):
        state = recipe.init_constraints(recipe.init(0))
        with pytest.raises(ValueError, match="checksum mismatch"):
            resume.start_with(config, recipe, state, config.start_from, print)


def test_a_run_that_cannot_begin_with_an_export_says_why(exported):
    folder, *_ = exported
    place = str(folder / "a")
    with pytest.raises(config_lib.ConfigError, match="rows are taken of an export"):
        config_of(folder, start_from=str(folder / "run"))
    with pytest.raises(config_lib.ConfigError, match="is an export of sparse tables"):
        runs.make_config("llama3", start_from=place)
    config = config_of(folder, start_from=place, data__records__rows=2999)
    recipe = runs.make_recipe(config)
    with jax.set_mesh(recipe.mesh):
        state = recipe.init_constraints(recipe.init(0))
        with pytest.raises(ValueError, match=r"'C1' has \(rows, width\) \(3000, 8\)"):
            from_export.with_tables(recipe, state, place, print)
        wide = config_of(folder, start_from=place)
        wide.model.recommender.top = (16,)
        with pytest.raises(ValueError, match="another function"):
            resume.start_with(wide, recipe, state, place, print)

"""Checkpoints: exact on every mesh, safe against kills, and never silently wrong."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from llmx.checkpoint import checkpointer, checksums, manifest
from llmx.checkpoint.checkpointer import CheckpointConfig, Checkpointer

ROOT = Path(__file__).parents[2]


class Moments(NamedTuple):
    mu: Any
    nu: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Inner:
    count: Any
    history: list


def make_mesh(shape, axis_type=AxisType.Explicit):
    return jax.make_mesh(shape, ("fsdp", "tensor"), axis_types=(axis_type,) * 2)


def put(value, mesh, *spec, **kinds):
    return jax.device_put(value, NamedSharding(mesh, P(*spec), **kinds))


def make_state(mesh, seed=0):
    """Every kind of leaf and container that a state may have."""
    rng = np.random.RandomState(seed)
    w = rng.randn(16, 8).astype(np.float32)
    return {
        "params": {"w": put(w, mesh, "fsdp", "tensor"), "b": put(w[0], mesh)},
        "opt": (
            Moments(
                mu={"w": put(w.astype(jnp.bfloat16), mesh, "tensor")},
                nu={"w": put(w * w, mesh, None, "fsdp", memory_kind="pinned_host")},
            ),
            Inner(count=put(np.int32(7), mesh), history=[put(w[:, 0] > 0, mesh, "fsdp")]),
        ),
        "fp8": put(w.astype(jnp.float8_e4m3fn), mesh, "fsdp"),
        "key": put(jax.random.key(seed), mesh),
        "keys": put(jax.random.split(jax.random.key(seed), 8), mesh, "tensor"),
        "epoch": 3,
        "scale": 0.1,
        "done": False,
    }


def abstract_like(state, mesh):
    """The shapes of `state`, to be placed on `mesh` with the axes of every spec swapped."""
    swap = {"fsdp": "tensor", "tensor": "fsdp", None: None}

    def one(leaf):
        if not isinstance(leaf, jax.Array):
            return leaf
        spec = P(*(swap[axis] for axis in leaf.sharding.spec))
        sharding = NamedSharding(mesh, spec, memory_kind=leaf.sharding.memory_kind)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(one, state)


def assert_same(a, b):
    """Equal in structure, type and every bit."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True
    ):
        assert type(x) is type(y), path
        if not isinstance(x, jax.Array):
            assert x == y, path
            continue
        assert x.dtype == y.dtype, path
        bits = jax.random.key_data if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else np.asarray
        assert np.asarray(bits(x)).tobytes() == np.asarray(bits(y)).tobytes(), path


def small_state(value):
    mesh = make_mesh((8, 1))
    w = np.random.RandomState(int(value)).randn(64, 8).astype(np.float32)
    return {"params": {"w": put(w, mesh, "fsdp")}, "opt": {"mu": put(w * 2, mesh, "fsdp")}}


def small_abstract():
    return abstract_like(small_state(0), make_mesh((1, 8)))


def write(directory, steps, **config):
    """Checkpoints of `small_state(step)` for each of `steps`."""
    config = {"keep_last": 100, **config}
    with Checkpointer(directory, CheckpointConfig(**config), log=print) as checkpoints:
        for step in steps:
            checkpoints.save(step, small_state(step), meta={"data": step})


def reopen(directory, log=print):
    return Checkpointer(directory, CheckpointConfig(keep_last=100), log=log)


def names(directory):
    return sorted(path.name for path in Path(directory).iterdir())


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_restores_bit_for_bit_onto_another_mesh_and_layout(tmp_path, axis_type):
    mesh, other = make_mesh((4, 2), axis_type), make_mesh((2, 4), axis_type)
    state = make_state(mesh)
    with (
        Checkpointer(tmp_path, CheckpointConfig(), log=print) as checkpoints,
        jax.set_mesh(mesh),
        jax.transfer_guard("disallow"),
    ):
        assert checkpoints.save(5, state, meta={"data": {"position": 5}, "seed": 0.1}, wait=True)
    abstract = abstract_like(state, other)
    with reopen(tmp_path) as checkpoints:
        restored, meta, step = checkpoints.restore(abstract)
    assert (meta, step) == ({"data": {"position": 5}, "seed": 0.1}, 5)
    assert_same(restored, state)
    for want, have in zip(jax.tree.leaves(abstract), jax.tree.leaves(restored), strict=True):
        if isinstance(have, jax.Array):
            assert have.sharding.is_equivalent_to(want.sharding, have.ndim)
            assert have.sharding.memory_kind == want.sharding.memory_kind


def test_arrays_without_a_mesh_come_back_on_one_device(tmp_path):
    state = {"x": jnp.arange(4.0), "key": jax.random.key(1, impl="rbg")}
    with Checkpointer(tmp_path, CheckpointConfig(), log=print) as checkpoints:
        checkpoints.save(1, state, meta={}, wait=True)
        restored = checkpoints.restore(jax.eval_shape(lambda: state))
    assert_same(restored.state, state)


def test_leaves_have_their_paths_as_names(tmp_path):
    with Checkpointer(tmp_path, CheckpointConfig(), log=print) as checkpoints:
        checkpoints.save(1, make_state(make_mesh((4, 2))), meta={}, wait=True)
    document = json.loads((tmp_path / "1/meta/metadata").read_text())["document"]
    assert set(document["leaves"]) >= {"params/w", "opt/0/mu/w", "opt/1/count", "opt/1/history/0"}
    on_disk = json.loads((tmp_path / "1/state/_METADATA").read_text())["tree_metadata"]
    assert "('opt', '0', 'mu', 'w')" in on_disk


def test_fingerprints_do_not_depend_on_mesh_layout_or_neighbours():
    w = np.random.RandomState(0).randn(16, 8).astype(np.float32)
    spread = {
        "a": put(w, make_mesh((4, 2)), "fsdp", "tensor"),
        "b": put(w, make_mesh((2, 4), AxisType.Auto), None, "tensor"),
        "c": put(w, make_mesh((8, 1)), None, "fsdp"),
        "d": put(w, make_mesh((4, 2)), "tensor", memory_kind="pinned_host"),
        "e": jnp.asarray(w),
    }
    sums = checksums.fingerprints(spread)
    assert len(set(sums.values())) == 1


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8", "bool", "complex64"]
)
def test_fingerprints_see_every_flipped_byte_and_every_swap(dtype):
    dtype = jnp.dtype(dtype)
    x = np.arange(1, 13).reshape(3, 4).astype(dtype)
    x[0, 2] = -x[0, 0] if dtype.kind not in "b" else False  # a sign flip: one bit, the top one

    def sums(array):
        return checksums.fingerprints({"x": jnp.asarray(array)})["x"]

    changed = []
    for position in range(x.nbytes):
        raw = bytearray(x.tobytes())
        raw[position] ^= 1 if dtype == jnp.bool_ else 0x80
        changed.append(np.frombuffer(raw, dtype).reshape(x.shape))
    flat = x.reshape(-1)
    for i in range(flat.size):
        for j in range(i):
            if flat[i] != flat[j]:
                swapped = flat.copy()
                swapped[[i, j]] = swapped[[j, i]]
                changed.append(swapped.reshape(x.shape))
    found = {sums(array) for array in changed}
    assert sums(x) not in found
    assert len(found) == len({array.tobytes() for array in changed})


def test_a_save_is_not_disturbed_by_donation(tmp_path):
    mesh = make_mesh((4, 2))
    step = jax.jit(lambda state: jax.tree.map(lambda x: x * 1.5 + 1, state), donate_argnums=0)
    rng = np.random.RandomState(0)
    state = {"a": put(rng.randn(1024, 512).astype(np.float32), mesh, "fsdp", "tensor")}
    state["b"] = put(rng.randn(512, 512).astype(np.float32), mesh)
    with Checkpointer(tmp_path, CheckpointConfig(keep_last=9), log=print) as checkpoints:
        truth = {}
        for number in range(1, 5):
            truth[number] = jax.tree.map(lambda x: np.array(x, copy=True), state)
            checkpoints.save(number, state, meta={})
            for _ in range(3):
                state = step(state)
        checkpoints.wait()
        for number, want in truth.items():
            have = checkpoints.restore(abstract_like(state, mesh), number).state
            assert all(np.array_equal(want[name], have[name]) for name in want)


def test_nothing_to_restore(tmp_path):
    with reopen(tmp_path / "new") as checkpoints:
        assert checkpoints.restore(small_abstract()) is None
        assert checkpoints.latest_step() is None
    assert not (tmp_path / "new").exists()


def largest_data_file(step_directory):
    files = [path for path in (step_directory / "state").rglob("d/*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size)


def truncate_data(step):
    path = largest_data_file(step)
    os.truncate(path, path.stat().st_size // 2)


def empty_data(step):
    os.truncate(largest_data_file(step), 0)


def flip_data(step):
    path = largest_data_file(step)
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 0xFF
    path.write_bytes(raw)


def flip_meta(step):
    path = step / "meta/metadata"
    path.write_text(path.read_text().replace('"data": 2', '"data": 3'))


def exchange_state(step):
    """Sound files with other values: only our checksums can see it."""
    shutil.rmtree(step / "state")
    shutil.copytree(step.parent / "1/state", step / "state")


DAMAGE = {
    "truncated data": (truncate_data, "arrays"),
    "empty data": (empty_data, "arrays"),
    "flipped data": (flip_data, ""),
    "other data": (exchange_state, "checksum differs in leaf opt/mu, params/w"),
    "no data": (lambda step: shutil.rmtree(step / "state"), "arrays"),
    "no manifest": (lambda step: (step / "state/manifest.ocdbt").unlink(), "arrays"),
    "torn meta": (lambda step: os.truncate(step / "meta/metadata", 100), "meta"),
    "flipped meta": (flip_meta, "meta does not match its own checksum"),
    "no meta": (lambda step: shutil.rmtree(step / "meta"), "meta"),
    "empty directory": (lambda step: (shutil.rmtree(step), step.mkdir()), "meta"),
}


# Orbax abandons a write to its closed event loop when a read fails.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_corrupt_newest_checkpoint_falls_back_saying_so(tmp_path, damage):
    write(tmp_path, [1, 2])
    break_it, words = DAMAGE[damage]
    break_it(tmp_path / "2")
    said = []
    with reopen(tmp_path, said.append) as checkpoints:
        assert checkpoints.latest_step() == 2
        restored = checkpoints.restore(small_abstract())
        assert (restored.step, restored.meta) == (1, {"data": 1})
        assert_same(restored.state, small_state(1))
        text = "\n".join(said)
        assert "checkpoint 2 is corrupt" in text and words in text and "2.corrupt" in text
        assert names(tmp_path) == ["1", "2.corrupt"]
        checkpoints.save(2, small_state(2), meta={"data": 2}, wait=True)
        assert checkpoints.restore(small_abstract()).step == 2
    assert names(tmp_path) == ["1", "2", "2.corrupt"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_any_flipped_byte_gives_the_exact_values_or_the_checkpoint_before(tmp_path):
    write(tmp_path, [1, 2])
    rng = np.random.RandomState(0)
    steps = []
    for path in sorted(path for path in (tmp_path / "2").rglob("*") if path.is_file()):
        whole = path.read_bytes()
        for position in rng.choice(len(whole), size=min(4, len(whole)), replace=False):
            damaged = bytearray(whole)
            damaged[position] ^= 1 << rng.randint(8)
            path.write_bytes(damaged)
            restored = checkpointer.restore_part(tmp_path, small_abstract(), prefix="", log=print)
            assert_same(restored.state, small_state(restored.step))
            assert restored.meta == {"data": restored.step}
            steps.append(restored.step)
        path.write_bytes(whole)
    assert 1 in steps and 2 in steps  # some bytes matter, some are padding or bookkeeping


def test_with_no_good_checkpoint_nothing_is_touched(tmp_path):
    write(tmp_path, [1, 2])
    truncate_data(tmp_path / "1")
    flip_meta(tmp_path / "2")
    for _ in range(2):
        with reopen(tmp_path) as checkpoints, pytest.raises(ValueError) as caught:
            checkpoints.restore(small_abstract())
        for word in ("no good checkpoint", "1: its arrays", "2: its meta", "begin anew"):
            assert word in str(caught.value)
        assert names(tmp_path) == ["1", "2"]


def test_an_explicit_step_is_that_step_or_an_error(tmp_path):
    write(tmp_path, [1, 2, 3])
    with reopen(tmp_path) as checkpoints:
        assert checkpoints.restore(small_abstract(), 2).step == 2
        flip_data(tmp_path / "2")
        with pytest.raises(ValueError, match=r"choose another step of \[1, 3\]"):
            checkpoints.restore(small_abstract(), 2)
        with pytest.raises(ValueError, match=r"no checkpoint of step 4 .* \[1, 2, 3\]"):
            checkpoints.restore(small_abstract(), 4)
    assert names(tmp_path) == ["1", "2", "3"]


def widen(abstract):
    old = abstract["params"]["w"]
    abstract["params"]["w"] = jax.ShapeDtypeStruct((64, 16), old.dtype, sharding=old.sharding)


def soften(abstract):
    old = abstract["params"]["w"]
    abstract["params"]["w"] = jax.ShapeDtypeStruct(old.shape, jnp.bfloat16, sharding=old.sharding)


MISMATCHES = {
    "shape": (widen, "params/w: saved float32[64, 8], wanted float32[64, 16]"),
    "dtype": (soften, "params/w: saved float32[64, 8], wanted bfloat16[64, 8]"),
    "missing": (lambda a: a["opt"].update(nu=a["opt"]["mu"]), "opt/nu: saved nothing, wanted"),
    "extra": (lambda a: a.pop("opt"), "opt/mu: saved, not wanted"),
    "kind": (lambda a: a["opt"].update(mu=3), "opt/mu: saved float32[64, 8], wanted int"),
}


@pytest.mark.parametrize("mismatch", MISMATCHES)
def test_another_structure_is_an_error_and_not_corruption(tmp_path, mismatch):
    write(tmp_path, [1, 2])
    change, words = MISMATCHES[mismatch]
    abstract = small_abstract()
    change(abstract)
    with reopen(tmp_path) as checkpoints, pytest.raises(ValueError) as caught:
        checkpoints.restore(abstract)
    assert words in str(caught.value) and "configuration that it was saved with" in str(
        caught.value
    )
    assert names(tmp_path) == ["1", "2"]


RENAMED = (r"^opt/mu$", "moments/first"), (r"^(params)/w$", r"\1/dense/kernel")


def renamed(state):
    return {
        "params": {"dense": {"kernel": state["params"]["w"]}},
        "moments": {"first": state["opt"]["mu"]},
    }


def test_renamed_leaves_are_restored_under_their_current_names(tmp_path, monkeypatch):
    write(tmp_path, [1, 2])
    monkeypatch.setattr(manifest, "RENAMED", (*manifest.RENAMED, *RENAMED))
    flip_data(tmp_path / "2")
    said = []
    with reopen(tmp_path, said.append) as checkpoints:
        restored = checkpoints.restore(renamed(small_abstract()))
        assert_same(restored.state, renamed(small_state(1)))
        assert "checkpoint 2 is corrupt" in said[0]
        # The checksums of the renamed leaves are compared too, by their current names.
        exchange = tmp_path / "1/meta/metadata"
        sealed = json.loads(exchange.read_text())
        sealed["document"]["leaves"]["opt/mu"]["checksum"] += 1
        exchange.write_text(json.dumps(checksums.seal(sealed["document"])))
        with pytest.raises(ValueError, match="checksum differs in leaf moments/first"):
            checkpoints.restore(renamed(small_abstract()), 1)


def test_rows_of_renamed_leaves_apply_to_older_checkpoints_only(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "RENAMED", (*manifest.RENAMED, *RENAMED))
    write(tmp_path, [1])
    with reopen(tmp_path) as checkpoints:
        assert_same(checkpoints.restore(small_abstract()).state, small_state(1))


def test_a_checkpoint_of_a_newer_format_is_left_alone(tmp_path, monkeypatch):
    write(tmp_path, [1])
    monkeypatch.setattr(manifest, "FORMAT", 0)
    with reopen(tmp_path) as checkpoints, pytest.raises(ValueError, match="use a newer llmx"):
        checkpoints.restore(small_abstract())
    assert names(tmp_path) == ["1"]


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "kept"),
    [(1, 0, [6]), (2, 0, [5, 6]), (9, 0, [1, 2, 3, 4, 5, 6]), (1, 2, [2, 4, 6]), (2, 3, [3, 5, 6])],
)
def test_retention(tmp_path, keep_last, keep_every, kept):
    write(tmp_path, range(1, 7), keep_last=keep_last, keep_every=keep_every, every=1)
    assert names(tmp_path) == [str(step) for step in kept]


def test_leftovers_of_killed_programs_go_with_the_first_save_and_only_then(tmp_path):
    write(tmp_path, [1])
    for name in ("2.orbax-checkpoint-tmp", "0.deleted"):
        shutil.copytree(tmp_path / "1", tmp_path / name)
    said = []
    part = {"w": small_abstract()["params"]["w"]}
    assert checkpointer.restore_part(tmp_path, part, prefix="params", log=said.append).step == 1
    assert len(names(tmp_path)) == 3
    with reopen(tmp_path, said.append) as checkpoints:
        assert checkpoints.latest_step() == 1
        checkpoints.save(3, small_state(3), meta={})
    assert names(tmp_path) == ["1", "3"]
    assert said == ["removing the unfinished checkpoint of step 2"]


def test_a_part_is_restored_alone_and_nothing_is_changed(tmp_path):
    write(tmp_path, [1, 2])
    part = {"w": small_abstract()["params"]["w"]}
    restored = checkpointer.restore_part(tmp_path, part, prefix="params", log=print)
    assert_same(restored.state, small_state(2)["params"])
    assert restored.meta == {"data": 2}
    said = []
    flip_meta(tmp_path / "2")
    restored = checkpointer.restore_part(tmp_path, part, prefix="params", log=said.append)
    assert restored.step == 1 and "checkpoint 2 is corrupt" in said[0]
    assert names(tmp_path) == ["1", "2"]
    with pytest.raises(ValueError, match="ema/w: saved nothing"):
        checkpointer.restore_part(tmp_path, part, prefix="ema", step=1, log=print)
    assert checkpointer.restore_part(tmp_path / "x", part, prefix="params", log=print) is None


def test_meta_is_read_without_arrays(tmp_path):
    write(tmp_path, [1, 2])
    assert checkpointer.read_meta(tmp_path, 2) == {"data": 2}
    with pytest.raises(ValueError, match="no checkpoint of step 3"):
        checkpointer.read_meta(tmp_path, 3)
    flip_meta(tmp_path / "2")
    with pytest.raises(ValueError, match="does not match its own checksum"):
        checkpointer.read_meta(tmp_path, 2)


def test_the_same_step_is_written_once_and_an_abandoned_one_is_set_aside(tmp_path):
    write(tmp_path, [1, 2, 3])
    said = []
    with reopen(tmp_path, said.append) as checkpoints:
        checkpoints.restore(small_abstract(), 2)
        assert not checkpoints.save(2, small_state(2), meta={})
        assert checkpoints.save(3, small_state(30), meta={})
        assert not checkpoints.save(3, small_state(30), meta={}, wait=True)
        assert_same(checkpoints.restore(small_abstract()).state, small_state(30))
    assert names(tmp_path) == ["1", "2", "3", "3.replaced"]
    assert "set aside checkpoint 3 as 3.replaced" in said[0]


def test_what_cannot_be_saved_is_named(tmp_path):
    x = jnp.ones(2)
    donated = jnp.ones(2)
    jax.jit(lambda y: y + 1, donate_argnums=0)(donated)
    bad = {
        "'a/b' is a ndarray": ({"a": {"b": np.ones(2)}}, {}),
        "'a' of shape (0, 2) is empty": ({"a": jnp.ones((0, 2))}, {}),
        "'a' was donated": ({"a": donated}, {}),
        "two leaves of the state have the path 'a/b'": ({"a/b": x, "a": {"b": x}}, {}),
        "'a/b' lies under another leaf": ({"a": x, "a/b": x}, {}),
        "meta must be JSON": ({"a": x}, {"when": object()}),
    }
    with reopen(tmp_path / "c") as checkpoints:
        for words, (state, meta) in bad.items():
            with pytest.raises(ValueError) as caught:
                checkpoints.save(1, state, meta=meta)
            assert words in str(caught.value)
        assert checkpoints.save(1, {"a": x}, meta={}, wait=True)


def test_due_and_problems():
    log = print
    assert [s for s in range(1, 9) if Checkpointer("x", CheckpointConfig(4), log=log).due(s)] == [
        4,
        8,
    ]
    assert not Checkpointer("x", CheckpointConfig(every=0), log=log).due(0)
    assert checkpointer.problems(CheckpointConfig()) == []
    for config, words in [
        (CheckpointConfig(every=-1), "checkpoint.every=-1"),
        (CheckpointConfig(keep_last=0), "keep_last=0 must be at least 1"),
        (CheckpointConfig(keep_every=-2), "0 for off"),
        (CheckpointConfig(every=100, keep_every=250), "use 300"),
    ]:
        assert words in checkpointer.problems(config)[0]
        with pytest.raises(ValueError, match=words):
            Checkpointer("x", config, log=log)


def test_importing_does_not_load_orbax():
    code = "import sys, llmx.checkpoint.checkpointer; sys.exit('orbax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


KILLED = """
    import sys, numpy as np, jax
    from llmx.checkpoint.checkpointer import Checkpointer, CheckpointConfig
    c = Checkpointer(sys.argv[1], CheckpointConfig(keep_last=9), log=print)
    rng = np.random.RandomState(0)
    for step in range(1, 100):
        w = jax.numpy.asarray(rng.rand(int(sys.argv[2])).astype("f"))
        c.save(step, {"w": w}, meta={"step": step})
"""


@pytest.mark.slow
def test_kill_9_in_the_middle_of_a_save(tmp_path):
    size = 16_000_000
    truth = np.random.RandomState(0)
    values = [truth.rand(size).astype("f") for _ in range(3)]
    code = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path), str(size)]
    child = subprocess.Popen(code, cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    try:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("3.orbax-checkpoint-tmp*")):
            assert time.monotonic() < deadline and child.poll() is None
            time.sleep(0.002)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert any("orbax-checkpoint-tmp" in name for name in names(tmp_path))
    with reopen(tmp_path) as checkpoints:
        restored = checkpoints.restore({"w": jax.ShapeDtypeStruct((size,), jnp.float32)})
        assert restored.step == 2 and np.array_equal(restored.state["w"], values[1])
        checkpoints.save(3, {"w": jnp.asarray(values[2])}, meta={}, wait=True)
    assert names(tmp_path) == ["1", "2", "3"]


SHARDED = """
    import sys, numpy as np, jax, jax.numpy as jnp
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    from llmx.checkpoint import checkpointer
    from llmx.runtime import launch
    directory, what = sys.argv[1:]
    launch.start(launch.LaunchConfig(platform="cpu", compile_cache=""))
    assert jax.device_count() == 4
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    specs = {"w": P("a", "b"), "v": P(("a", "b")), "c": P()}
    if what.startswith("restore"):
        specs = {"w": P("b"), "v": P(None, ("b", "a")), "c": P()}
    def values(step):
        rng = np.random.RandomState(step)
        w, v = rng.randn(256, 256).astype("f"), rng.randn(4, 4).astype("f")
        return {"w": w, "v": v, "c": np.float32(step)}
    def put(value, sharding):
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])
    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    def place(step):
        return {name: put(value, shardings[name]) for name, value in values(step).items()}
    log = lambda text: launch.log("said: " + text)
    config = checkpointer.CheckpointConfig(keep_last=2)
    with checkpointer.Checkpointer(directory, config, log=log) as checkpoints, jax.set_mesh(mesh):
        if what == "save":
            for step in (1, 2, 3):
                checkpoints.save(step, place(step), meta={"step": step})
        else:
            like = {name: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=shardings[name])
                    for name, v in values(0).items()}
            state, meta, step = checkpoints.restore(like, 3 if what == "rewind" else None)
            assert meta == {"step": step}
            for name, value in values(step).items():
                assert state[name].sharding.spec == specs[name]
                for shard in state[name].addressable_shards:
                    assert np.array_equal(shard.data, value[shard.index]), name
            print(f"process {jax.process_index()} restored {step}", flush=True)
            if what != "restore":
                checkpoints.save(step + 1, place(step + 1), meta={"step": step + 1})
"""


def run_sharded(directory, processes, what):
    command = [sys.executable, "scripts/local_cluster.py", "-n", str(processes)]
    command += ["--devices-per-process", str(4 // processes), "--"]
    command += [sys.executable, "-c", textwrap.dedent(SHARDED), str(directory), what]
    run = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout + run.stderr


@pytest.mark.slow
def test_written_by_two_processes_and_read_by_one_and_four(tmp_path):
    run_sharded(tmp_path, 2, "save")
    assert names(tmp_path) == ["2", "3"]
    assert "process 0 restored 3" in run_sharded(tmp_path, 1, "restore")
    out = run_sharded(tmp_path, 4, "restore and save")
    assert all(f"process {i} restored 3" in out for i in range(4))
    assert names(tmp_path) == ["3", "4"]
    assert "said: set aside checkpoint 4 as 4.replaced" in run_sharded(tmp_path, 2, "rewind")
    assert names(tmp_path) == ["3", "4", "4.replaced"]


@pytest.mark.slow
def test_all_processes_agree_to_fall_back(tmp_path):
    run_sharded(tmp_path, 2, "save")
    # Only the second process reads these files when the layout stays as it was saved.
    shutil.rmtree(tmp_path / "3/state/ocdbt.process_1/d")
    out = run_sharded(tmp_path, 2, "resume")
    assert all(f"process {i} restored 2" in out for i in range(2))
    assert "said: checkpoint 3 is corrupt" in out
    assert names(tmp_path) == ["2", "3", "3.corrupt"]

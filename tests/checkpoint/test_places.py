"""Checkpoints in a store that each process writes and reads by itself; the store is a folder here.

`tests/end_to_end/test_object_store.py` has two processes and an S3 server.
"""

import contextlib
import json
import pathlib

import fsspec
import jax
import numpy as np
import pytest

from llmx.checkpoint import checkpointer, directory, manifest, mirror, places, restore
from llmx.data import remote
from llmx.pipeline.permutation import IDENTITY
from llmx.runtime import ownership

LAUNCH = "f00d"


@pytest.fixture
def url(tmp_path, monkeypatch):
    """Of a store; fsspec and TensorStore each have their own way to it."""
    monkeypatch.setitem(fsspec.config.conf, "local", {"auto_mkdir": True})
    monkeypatch.setattr(
        ownership, "kvstore_spec",
        lambda url: {"driver": "file", "path": url.removeprefix("local://")},
    )  # fmt: skip
    monkeypatch.setattr(remote, "PAUSE_SECONDS", 0.0)
    (tmp_path / "store").mkdir()
    return f"local://{tmp_path}/store/run"


def sharded(axes, shape=(2, 2), names=("a", "b")):
    mesh = jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))
    return jax.NamedSharding(mesh, jax.P(*axes))


def state_on(weight, rest):
    values = np.arange(6144, dtype=np.float32).reshape(64, 96)  # small ones are in the index
    return {
        "params": {"w": jax.device_put(values, weight)},
        "moment": jax.device_put(values.astype("bfloat16")[::2], weight),
        "step": jax.device_put(np.int32(7), rest), "key": jax.device_put(jax.random.key(3), rest),
        "epoch": 2,
    }  # fmt: skip


@contextlib.contextmanager
def opened(folder, url, said, launch=LAUNCH, **options):
    remote.write_bytes(f"{url}/owner.json", b"{}")  # as by the lease
    run = mirror.Mirror(url, folder, log=said.append, launch=launch)
    run.pull()
    config = checkpointer.CheckpointConfig(**options)
    with checkpointer.Checkpointer(
        f"{folder}/checkpoints", config, log=said.append, place=run.place,
        on_saved=run.pushing(lambda step: None),
    ) as checkpoints:  # fmt: skip
        yield checkpoints
    assert run.end(0) == 0


def abstract(state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        if isinstance(x, jax.Array) else x, state,
    )  # fmt: skip


def assert_same(got, wanted):
    as_numpy = lambda x: jax.random.key_data(x) if manifest.is_key(x) else np.asarray(x)  # noqa: E731
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        if isinstance(other, jax.Array):
            assert one.sharding == other.sharding and one.dtype == other.dtype
            np.testing.assert_array_equal(as_numpy(one), as_numpy(other))
        else:
            assert one == other


def in_store(tmp_path):
    root = tmp_path / "store" / "run"
    found = {p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()}
    return found - {"owner.json", mirror.RECORD}


def test_a_restore_reads_the_store_on_any_mesh(url, tmp_path):
    """The disk keeps what lists and documents need, and Orbax reads what the store has."""
    rows, rest = sharded(("a", "b")), sharded(())
    wanted = state_on(rows, rest)
    with opened(tmp_path / "here", url, []) as checkpoints:
        checkpoints.save(7, wanted, meta={"x": 1}, wait=True)
    local = tmp_path / "here" / "checkpoints" / "7"
    assert not list(local.glob("state/ocdbt*")) and (local / "meta" / "metadata").is_file()
    names = {name.split("/")[3] for name in in_store(tmp_path) if "/state/ocdbt" in name}
    assert names == {f"ocdbt.process_0x{LAUNCH}x1"}
    for other in (wanted, state_on(sharded((None, ("b", "a"))), sharded(()))):
        with opened(tmp_path / "there", url, []) as checkpoints:
            assert checkpoints.steps() == [7]
            restored = checkpoints.restore(abstract(other))
        assert restored.meta == {"x": 1} and restored.step == 7
        assert_same(restored.state, other)
    # One process copies all of it, and reads files.
    mirror.pull(url, tmp_path / "alone")
    root = directory.root_of(f"{tmp_path}/alone/checkpoints")
    restored, bad = restore.newest(root, abstract(wanted), "", IDENTITY, None, log=print)
    assert not bad
    assert_same(restored.state, wanted)


def test_little_is_read_at_a_time(url, tmp_path, monkeypatch):
    monkeypatch.setattr(places, "_FLIGHT_BYTES", 1)
    wanted = state_on(sharded(("a",)), sharded(()))
    with opened(tmp_path / "here", url, []) as checkpoints:
        checkpoints.save(7, wanted, meta={}, wait=True)
        assert_same(checkpoints.restore(abstract(wanted)).state, wanted)


@pytest.mark.parametrize("fails_at", ["manifest.ocdbt", "metadata", "write_bytes"])
def test_an_upload_that_fails_leaves_no_checkpoint(url, tmp_path, monkeypatch, fails_at):
    """The run says so and goes on; the next save removes what is left."""
    said, state = [], state_on(sharded(("a",)), sharded(()))
    upload, write = remote.upload, remote.write_bytes

    def failing(file, to):
        if str(file).endswith(fails_at):
            raise OSError("503 slow down")
        upload(file, to)

    def not_written(to, content):
        raise OSError("503 slow down")

    with opened(tmp_path / "here", url, said, keep_last=1) as checkpoints:
        with monkeypatch.context() as patch:
            patch.setattr(remote, "upload", failing)
            if fails_at == "write_bytes":
                patch.setattr(remote, "write_bytes", not_written)
            checkpoints.save(4, state, meta={})
            checkpoints.wait()
        assert "step 4 was not written" in said[0] and "503 slow down" in said[0]
        assert not any(name.endswith(directory.MARKER) for name in in_store(tmp_path))
        assert checkpoints.steps() == [] and checkpoints.due(4 + 500 // 4)
        checkpoints.save(5, state, meta={}, wait=True)
        assert {name.split("/")[1] for name in in_store(tmp_path)} == {"5"}
        checkpoints.save(6, state, meta={}, wait=True)
    assert {name.split("/")[1] for name in in_store(tmp_path)} == {"6"}
    assert write is remote.write_bytes


def test_an_earlier_launch_cannot_change_a_checkpoint(url, tmp_path):
    """What it still uploads has other names, and is not merged."""
    state = state_on(sharded(("a",)), sharded(()))
    with opened(tmp_path / "here", url, [], launch="aaaa") as checkpoints:
        checkpoints.save(4, state, meta={}, wait=True)
    other = jax.tree.map(lambda x: x + 1 if getattr(x, "ndim", 0) else x, state)
    store = tmp_path / "store" / "run" / "checkpoints" / "4"
    old = {p.relative_to(store): p.read_bytes() for p in store.rglob("ocdbt*/**/*") if p.is_file()}
    (store / directory.MARKER).unlink()
    with opened(tmp_path / "here", url, [], launch="bbbb") as checkpoints:
        checkpoints.save(4, other, meta={}, wait=True)
        for name, content in old.items():
            (store / name).parent.mkdir(parents=True, exist_ok=True)
            (store / name).write_bytes(content)
        assert_same(checkpoints.restore(abstract(other)).state, other)


def test_damage_and_a_store_that_does_not_answer_are_told_apart(url, tmp_path, monkeypatch):
    """The run falls back from the first; the second says nothing of the checkpoint."""
    state, said = state_on(sharded(("a",)), sharded(())), []
    with opened(tmp_path / "here", url, said) as checkpoints:
        for step in (4, 8):
            checkpoints.save(step, state, meta={}, wait=True)
    store = tmp_path / "store" / "run" / "checkpoints" / "8" / "state"
    original = places._read_parts

    def unanswered(*args):
        raise ValueError("UNAVAILABLE: the connection was reset")

    monkeypatch.setattr(places, "_read_parts", unanswered)
    with opened(tmp_path / "there", url, said) as checkpoints:
        with pytest.raises(ValueError, match=r"checkpoint 8 .*UNAVAILABLE.*nothing was changed"):
            checkpoints.restore(abstract(state))
        assert checkpoints.steps() == [4, 8]
    monkeypatch.setattr(places, "_read_parts", original)
    for path in store.glob("ocdbt*/d/*"):
        path.unlink()
    with opened(tmp_path / "there", url, said) as checkpoints:
        assert checkpoints.restore(abstract(state)).step == 4
        assert checkpoints.steps() == [4]
    assert any("checkpoint 8 is corrupt" in line for line in said)


def test_without_an_index_of_all_arrays_there_is_no_checkpoint(url, tmp_path):
    state = state_on(sharded(("a",)), sharded(()))
    with opened(tmp_path / "here", url, []) as checkpoints:
        checkpoints.save(4, state, meta={}, wait=True)
    sealed = json.loads(
        pathlib.Path(tmp_path, "here", "checkpoints", "4", "meta", "metadata").read_text()
    )
    sealed["document"]["leaves"]["params/other"] = sealed["document"]["leaves"]["params/w"]
    with pytest.raises(OSError, match=r"lacks \['params.other'\]"):
        places._merge(f"{url}/checkpoints/4/state/", [], sealed)


def test_other_processes_begin_with_an_empty_folder(url, tmp_path):
    (tmp_path / "second" / "old").mkdir(parents=True)
    second = mirror.Mirror(url, tmp_path / "second", log=print, launch=LAUNCH, rank=1)
    second.pull()
    assert list((tmp_path / "second").iterdir()) == [] and second.named == url
    (tmp_path / "second" / "metrics.jsonl").write_text("of another")
    second.push()
    assert second.end(0) == 0 and in_store(tmp_path) == set()

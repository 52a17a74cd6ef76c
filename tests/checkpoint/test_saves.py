"""Saves that go wrong: replicas that differ, disks that are full, directories that vanish."""

import errno
import logging
import os
import re
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from llmx.checkpoint import checkpointer, checksums, places, writer
from llmx.checkpoint import directory as directories
from llmx.checkpoint.checkpointer import CheckpointConfig, Checkpointer
from llmx.runtime import output_paths

ROOT = Path(__file__).parents[2]

SPECS = {
    "whole": P(),
    "rows": P("data"),
    "both": P(("data", "fsdp"), "tensor"),
    "odd": P(None, "tensor"),
}


def make_mesh(axis_type=AxisType.Explicit):
    return jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(axis_type,) * 3)


def put(value, mesh, spec=None):
    return jax.device_put(value, NamedSharding(mesh, spec or P()))


def with_changed_shard(array, device, change):
    """`array`, where the part on one device was changed as a faulty memory would."""
    shards = []
    for shard in array.addressable_shards:
        data = np.array(shard.data)
        if shard.device.id == device:
            raw = bytearray(data.tobytes())
            raw[len(raw) // 2] ^= change
            data = np.frombuffer(bytes(raw), data.dtype).reshape(data.shape)
        shards.append(jax.device_put(data, shard.device))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def replicas_text(arrays):
    return checksums.combine(checksums.fetch(checksums.start_device_sums(arrays)), arrays)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float8_e4m3fn", "int4", "int8", "bool", "complex64", "uint32"]
)
def test_the_sums_of_the_parts_are_the_fingerprint(dtype, axis_type):
    mesh = make_mesh(axis_type)
    w = (np.random.RandomState(0).randn(16, 8) * 3).astype(jnp.dtype(dtype))
    arrays = {name: put(w, mesh, spec) for name, spec in SPECS.items()}
    arrays["alone"] = jnp.asarray(w)
    with jax.transfer_guard("disallow"):
        totals, text = replicas_text(arrays)
    assert set(totals.values()) == {checksums.fingerprints({"x": jnp.asarray(w)})["x"]}
    assert text == ""


def test_the_sums_need_no_communication():
    array = put(np.ones((16, 8), np.float32), make_mesh(), P("data", "tensor"))
    program = checksums._sharded_sum(array.sharding.mesh, array.sharding.spec)
    text = program.__wrapped__.lower(array).compile().as_text()
    assert not [word for word in ("all-reduce", "all-gather", "permute(") if word in text]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "float8_e4m3fn"])
@pytest.mark.parametrize("spec", ["whole", "rows", "odd"])
def test_one_flipped_bit_on_one_device_is_found_and_the_device_named(spec, dtype):
    w = (np.random.RandomState(0).randn(16, 8) * 3).astype(jnp.dtype(dtype))
    arrays = {"a": put(w, make_mesh(), SPECS[spec]), "b": put(w, make_mesh())}
    arrays["a"] = with_changed_shard(arrays["a"], 5, 1)
    _, text = replicas_text(arrays)
    assert text.startswith("replicas of a differ: device 5 (process 0) holds other values than dev")


def test_two_camps_of_the_same_size_are_both_named():
    array = put(np.ones((16, 8), np.float32), make_mesh(), P(("data", "fsdp")))
    _, text = replicas_text({"w": with_changed_shard(array, 4, 1)})
    words = "device 4 (process 0) and device 5 (process 0) hold different values"
    other = "device 5 (process 0) and device 4 (process 0) hold different values"
    assert words in text or other in text
    camps = [[1, 2], [3], [4, 5]]
    fakes = [[type("D", (), {"id": i, "process_index": i // 2})() for i in ids] for ids in camps]
    text = checksums._camps_text("w", fakes)
    assert "devices 1, 2 (processes 0, 1) and device 3 (process 1) and devices 4, 5" in text


def state_of(step):
    w = np.random.RandomState(step).randn(64, 32).astype(np.float32)
    return {"w": put(w, make_mesh(), P("fsdp")), "b": put(w[0], make_mesh())}


def names(directory):
    return sorted(path.name for path in Path(directory).iterdir())


def opened(directory, log=print, **config):
    return Checkpointer(directory, CheckpointConfig(**{"every": 4} | config), log=log)


def poll_until(checkpoints, step, seconds=20):
    """Calls `poll` as a loop would; the step after which nothing is in progress."""
    end = time.monotonic() + seconds
    while checkpoints._save is not None:
        assert time.monotonic() < end
        checkpoints.poll(step)
        if checkpoints._save is None or checkpoints._save.verdict == writer.Verdict(writer.SAVED):
            break
        time.sleep(0.01)
        step += 1
    return step


@pytest.mark.parametrize("policy", ["stop", "restore"])
def test_replicas_that_differ_at_a_save_stop_the_run_or_send_it_back(tmp_path, policy):
    with opened(tmp_path, on_corruption=policy) as checkpoints:
        checkpoints.save(4, state_of(4), meta={}, wait=True)
        bad = state_of(8)
        bad["b"] = with_changed_shard(bad["b"], 3, 0x40)
        checkpoints.save(8, bad, meta={})
        with pytest.raises(checkpointer.ReplicasDiffer) as caught:
            poll_until(checkpoints, 9)
        text = str(caught.value)
        assert "replicas of b differ: device 3 (process 0) holds other" in text
        assert "step 8 was not written" in text and "newest checkpoint is step 4" in text
        assert caught.value.restore == (policy == "restore") and caught.value.code == 3
        assert names(tmp_path) == ["4"]
        like = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), bad
        )
        assert checkpoints.restore(like).step == 4
        assert checkpoints.save(8, state_of(8), meta={}, wait=True)
    assert names(tmp_path) == ["4", "8"]


def test_process_0_says_which_checkpoint_is_newest_where_replicas_differ(tmp_path, monkeypatch):
    """Listings of a shared directory may differ, and all must do the same."""
    told = lambda board, key, text: "4" if key.endswith("newest") else text  # noqa: E731
    monkeypatch.setattr(writer.Board, "share", told)
    bad = state_of(8)
    bad["b"] = with_changed_shard(bad["b"], 3, 0x40)
    with opened(tmp_path, on_corruption="restore") as checkpoints:
        checkpoints.save(8, bad, meta={})
        with pytest.raises(checkpointer.ReplicasDiffer) as caught:
            checkpoints.wait()
    assert caught.value.restore and caught.value.newest == 4


class Disk:
    """Lets writes of arrays fail as the operating system would, where `error` is set."""

    def __init__(self, monkeypatch):
        import orbax.checkpoint as ocp

        self.error = None
        finalize = ocp.PyTreeCheckpointHandler.finalize

        def failing(handler, directory):
            if self.error:
                raise OSError(self.error, os.strerror(self.error), str(directory))
            finalize(handler, directory)

        monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "finalize", failing)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (errno.ENOSPC, "the disk is full"),
        (errno.EDQUOT, "the disk quota is used up"),
        (errno.EIO, "network file system fails"),
        (errno.EACCES, "not permitted"),
        (errno.EROFS, "read-only"),
    ],
)
def test_a_save_that_fails_is_told_at_once_and_tried_again(tmp_path, monkeypatch, error, words):
    disk, said = Disk(monkeypatch), []
    with opened(tmp_path, said.append) as checkpoints:
        checkpoints.save(4, state_of(4), meta={}, wait=True)
        disk.error = error
        assert checkpoints.save(8, state_of(8), meta={})
        step = poll_until(checkpoints, 9)
        assert len(said) == 1 and words in said[0] and "tried again" in said[0]
        assert "step 8 was not written" in said[0] and "newest checkpoint is step 4" in said[0]
        assert names(tmp_path) == ["4"]  # nothing is left of it
        again = next(s for s in range(step, step + 9) if checkpoints.due(s))
        assert again <= step + 1
        disk.error = None
        assert checkpoints.save(again, state_of(again), meta={}, wait=True)
        assert [s for s in range(again + 1, again + 9) if checkpoints.due(s)] == [
            s for s in range(again + 1, again + 9) if s % 4 == 0
        ]
    assert names(tmp_path) == sorted(["4", str(again)])


def test_the_cause_of_a_failed_write_names_the_file_from_its_beginning():
    path = "/data/runs/a/" + "long/" * 40
    cause, remedy = writer.reason(RuntimeError(
        f'Error writing "{path}8.orbax-checkpoint-tmp/d/331152": Failed to write 187 bytes: '
        f"No space left on device [os_error_code='28'] {'[source location] ' * 20}"
    ))  # fmt: skip
    assert cause.startswith('the disk is full (Error writing "/data/runs/a/long/')
    assert "Failed to write 187 bytes: No space left on device [os_error_code='28']" in cause
    assert len(cause) < 400 and remedy == "free space on it"
    short = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/data/a")
    assert writer.reason(short)[0] == f"the disk is full ({short})"


def test_a_save_that_fails_stops_the_run_where_the_policy_says_so(tmp_path, monkeypatch):
    disk = Disk(monkeypatch)
    with opened(tmp_path, on_failure="stop") as checkpoints:
        checkpoints.save(4, state_of(4), meta={}, wait=True)
        disk.error = errno.ENOSPC
        checkpoints.save(8, state_of(8), meta={})
        with pytest.raises(
            checkpointer.Unsaved, match=r"disk is full.*step 4; free space"
        ) as caught:
            poll_until(checkpoints, 9)
        assert caught.value.code == 74
        # The final save is tried again, and what it raises is the end.
        with pytest.raises(checkpointer.Unsaved):
            checkpoints.save(9, state_of(9), meta={}, wait=True)
        disk.error = None
        assert checkpoints.save(9, state_of(9), meta={}, wait=True)
    assert names(tmp_path) == ["4", "9"]


def test_a_final_save_that_fails_is_an_error_under_any_policy(tmp_path, monkeypatch):
    disk = Disk(monkeypatch)
    disk.error = errno.ENOSPC
    with pytest.raises(checkpointer.Unsaved, match="disk is full"), opened(tmp_path) as checkpoints:
        checkpoints.save(4, state_of(4), meta={})
    # It does not hide the error that ended the run.
    with pytest.raises(KeyError), opened(tmp_path) as checkpoints:
        checkpoints.save(4, state_of(4), meta={})
        raise KeyError


def test_the_cause_of_a_final_save_that_fails_is_told_once(tmp_path, monkeypatch, caplog):
    """By the error alone; and not by asyncio, of the writes that were under way too."""
    disk, log = Disk(monkeypatch), []
    disk.error = errno.ENOSPC
    with (
        opened(tmp_path, log.append) as checkpoints,
        pytest.raises(checkpointer.Unsaved) as raised,
    ):
        checkpoints.save(4, state_of(4), meta={}, wait=True)
    assert not log and str(raised.value).endswith("there is none; free space on it and run again "
                                                  "to resume")  # fmt: skip
    assert writer.reason(KeyError("x")) == ("KeyError: 'x'", "mend that")
    asyncio = logging.getLogger("asyncio")
    for coroutine, is_shown in (("orbax/checkpoint/serialization.py", False), ("own.py", True)):
        caplog.clear()
        asyncio.error(f"Task exception was never retrieved, future: <Task of {coroutine}>")
        assert bool(caplog.records) == is_shown


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 3 MB."""
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(path)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_full_disk_is_free_again_when_the_save_has_failed(small_disk):
    said = []
    big = put(np.random.RandomState(0).randn(1_000_000).astype(np.float32), make_mesh(), P("fsdp"))
    with opened(small_disk / "c", said.append) as checkpoints:
        checkpoints.save(4, state_of(4), meta={}, wait=True)
        free = shutil.disk_usage(small_disk).free
        checkpoints.save(8, {"w": big}, meta={})
        poll_until(checkpoints, 9)
        assert "the disk is full" in said[0] and "free space on it" in said[0]
        assert shutil.disk_usage(small_disk).free >= free - 65536
        checkpoints.save(12, state_of(12), meta={}, wait=True)
    assert names(small_disk / "c") == ["12", "4"]


def test_what_is_written_beside_arrays_is_of_the_checkpoint_or_nothing_is(tmp_path):
    def beside(folder):
        (folder / "more").mkdir()
        (folder / "more/rows").write_text("rows")
        if len(written) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(folder)

    written, log = [], []
    with opened(tmp_path, log=log.append) as checkpoints:
        checkpoints.save(1, state_of(1), meta={}, beside=beside)
        assert written[0].name.startswith("1.")  # before it returns, and before the commit
        checkpoints.wait()
        checkpoints.save(2, state_of(2), meta={}, beside=beside)
        checkpoints.wait()
    assert names(tmp_path) == ["1"] and (tmp_path / "1/more/rows").read_text() == "rows"
    assert "the checkpoint of step 2 was not written: the disk is full" in "".join(log)


def test_a_directory_that_has_vanished_is_made_anew_saying_so(tmp_path):
    said = []
    with opened(tmp_path / "c", said.append) as checkpoints:
        checkpoints.save(4, state_of(4), meta={}, wait=True)
        shutil.rmtree(tmp_path / "c")
        checkpoints.save(8, state_of(8), meta={}, wait=True)
    assert names(tmp_path / "c") == ["8"] and "has vanished" in said[0]


def test_who_may_not_write_writes_nothing(tmp_path):
    owned = [True]

    def may_write():
        if not owned[0]:
            raise RuntimeError("owned by host b, process 7")

    config = CheckpointConfig(every=4, keep_last=1)
    checkpoints = Checkpointer(tmp_path, config, log=print, may_write=may_write)
    checkpoints.save(4, state_of(4), meta={}, wait=True)
    checkpoints.save(8, state_of(8), meta={}, wait=True)
    owned[0] = False
    (tmp_path / f"12{directories.UNFINISHED}").mkdir()  # the other's
    with pytest.raises(checkpointer.NotOwner, match="owned by host b, process 7") as caught:
        checkpoints.save(12, state_of(12), meta={}, wait=True)
    assert caught.value.code == 2
    checkpoints.close()
    assert names(tmp_path) == [f"12{directories.UNFINISHED}", "8"]


def test_ownership_lost_during_a_save_commits_nothing(tmp_path):
    calls = []

    def may_write():
        calls.append(threading.current_thread().name)
        if len(calls) > 1:
            raise RuntimeError("owned by host b")

    with (
        pytest.raises(checkpointer.NotOwner, match="owned by host b"),
        Checkpointer(tmp_path, CheckpointConfig(), log=print, may_write=may_write) as checkpoints,
    ):
        checkpoints.save(4, state_of(4), meta={}, wait=True)
    assert calls[1] == "llmx-save" and not [n for n in names(tmp_path) if n == "4"]


def test_the_last_good_checkpoint_is_never_deleted(tmp_path):
    with opened(tmp_path, keep_last=2) as checkpoints:
        for step in (4, 8):
            checkpoints.save(step, state_of(step), meta={}, wait=True)
        (tmp_path / "8/meta/metadata").write_text("{}")
        checkpoints.save(12, state_of(12), meta={}, wait=True)
        assert names(tmp_path) == ["12", "4", "8"]  # 8 does not count
        checkpoints.save(16, state_of(16), meta={}, wait=True)
    assert names(tmp_path) == ["12", "16"]


def test_foreign_names_are_neither_checkpoints_nor_touched(tmp_path):
    with opened(tmp_path, keep_last=1) as checkpoints:
        checkpoints.save(4, state_of(4), meta={}, wait=True)
    for name in ("007", "٣", "9" * 40, "-3", "5.other", "notes"):
        (tmp_path / name).mkdir()
    (tmp_path / "12").write_text("a file")
    (tmp_path / "16").symlink_to(tmp_path / "nowhere")
    (tmp_path / "3").symlink_to(tmp_path / "4")
    said = []
    with opened(tmp_path, said.append, keep_last=1) as checkpoints:
        assert checkpointer.list_steps(str(tmp_path)) == [3, 4]
        for step in (12, 16):
            checkpoints.save(step, state_of(step), meta={}, wait=True)
    left = {"007", "٣", "9" * 40, "-3", "5.other", "notes", "12.replaced", "16.replaced", "16"}
    assert set(names(tmp_path)) == left and "set aside checkpoint 12" in said[0]


def test_a_file_in_place_of_the_directory_is_an_error_in_words(tmp_path):
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(ValueError, match=r"is a file.*move it away"):
        checkpointer.list_steps(str(tmp_path / "checkpoints"))
    with pytest.raises(checkpointer.Unsaved, match="file is in the way"):
        opened(tmp_path / "checkpoints").save(4, state_of(4), meta={}, wait=True)


def test_in_an_object_store_the_marker_makes_a_checkpoint_complete(tmp_path, monkeypatch):
    monkeypatch.setattr(directories, "renames_atomically", lambda root: False)
    with opened(tmp_path, keep_last=1) as checkpoints:
        for step in (4, 8):
            checkpoints.save(step, state_of(step), meta={}, wait=True)
        assert checkpointer.list_steps(str(tmp_path)) == [8]
        (tmp_path / "8" / directories.MARKER).unlink()  # as a kill before the end leaves it
        assert checkpointer.list_steps(str(tmp_path)) == []
    with opened(tmp_path) as checkpoints:
        checkpoints.save(12, state_of(12), meta={}, wait=True)
    assert names(tmp_path) == ["12"]


TWO = """
    import sys, time, jax, numpy as np, orbax.checkpoint as ocp
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    from llmx.checkpoint import checkpointer
    from llmx.runtime import launch
    launch.start(launch.LaunchConfig(platform="cpu", compile_cache=""))
    me = jax.process_index()
    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Explicit,))
    whole = NamedSharding(mesh, P())
    def state(value):
        data = jax.device_put(np.full(8, value, "f"), jax.local_devices()[0])
        return {"w": jax.make_array_from_single_device_arrays((8,), whole, [data])}
    def loop(checkpoints, step):
        for step in range(step, step + 200):
            checkpoints.poll(step)
            if checkpoints._save is None or checkpoints.latest_step() == checkpoints._save.step:
                return step
            time.sleep(0.01 * (1 + me))
    config = checkpointer.CheckpointConfig(every=4)
    with checkpointer.Checkpointer(sys.argv[1], config, log=launch.log) as checkpoints:
        checkpoints.save(4, state(4), meta={}, wait=True)
        save = ocp.PyTreeCheckpointHandler.async_save
        async def full(*args, **kwargs):
            raise OSError(28, "No space left on device")
        if me == 1:
            ocp.PyTreeCheckpointHandler.async_save = full
        begun = time.monotonic()
        checkpoints.save(8, state(8), meta={})
        step = loop(checkpoints, 9)
        assert time.monotonic() - begun < 20
        ocp.PyTreeCheckpointHandler.async_save = save
        checkpoints.save(12, state(12), meta={}, wait=True)
        checkpoints.save(16, state(16 + me), meta={})
        try:
            loop(checkpoints, 17)
        except checkpointer.ReplicasDiffer as error:
            print(f"process {me} after poll {checkpoints._polls}: {error}", flush=True)
"""


@pytest.mark.slow
def test_two_processes_know_of_a_failure_in_one_and_that_they_differ(tmp_path):
    command = [sys.executable, "scripts/local_cluster.py", "-n", "2", "--devices-per-process", "1"]
    command += ["--", sys.executable, "-c", textwrap.dedent(TWO), str(tmp_path)]
    run = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    out = run.stdout + run.stderr
    assert run.returncode == 0, out
    assert "step 8 was not written: process 1: the disk is full" in out
    words = (
        r"process (\d) after poll (\d+): .*replicas of w differ: device 0 \(process 0\) and device"
    )
    found = re.findall(words, out)
    assert {who for who, _ in found} == {"0", "1"} and len({poll for _, poll in found}) == 1
    assert names(tmp_path) == ["12", "4"]


def test_a_save_that_takes_long_is_not_waited_for(tmp_path, monkeypatch):
    """The next one is left out, and tried again some steps later."""
    monkeypatch.setattr(checkpointer, "WAIT_SECONDS", 0.1)
    go_on, lines, state = threading.Event(), [], {"w": jnp.ones(4)}

    def written(path, step, number):
        go_on.wait(60)
        return ""

    place = places.SHARED._replace(written=written)
    config = CheckpointConfig(every=8)
    with Checkpointer(str(tmp_path), config, log=lines.append, place=place) as checkpoints:
        assert checkpoints.save(8, state, meta={})
        assert not checkpoints.save(16, state, meta={})
        assert "step 8 is still being written, since " in lines[-1] and "step 16" in lines[-1]
        assert checkpoints.due(18) and not checkpoints.due(17)
        go_on.set()
        assert checkpoints.save(18, state, meta={}, wait=True)
        assert checkpoints.steps() == [8, 18]


def test_a_folder_is_filled_by_one_process_at_a_time(tmp_path):
    folder = tmp_path / "out"
    with writer.filling(folder, last="last"):
        (folder / "first").write_text("1")
        refused = pytest.raises(ValueError, match=r"another process is writing .*out: wait")
        with refused, writer.filling(folder, last="last"):
            pass
        (folder / "last").write_text("2")
    assert names(folder) == ["first", "last"]


def test_a_folder_that_is_complete_keeps_its_files_and_loses_its_mark(tmp_path):
    for name in ("last", output_paths.UNFINISHED):
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match="not empty"), writer.filling(tmp_path, last="last"):
        pass
    assert names(tmp_path) == ["last"]

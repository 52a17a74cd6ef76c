"""The local tier: what is written, copied to a neighbor, found again, and never mixed."""

import concurrent.futures
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from support import text_runs
from support.compare import assert_same

from llmx.checkpoint import checkpointer, local_files, local_places, local_tier, neighbors
from llmx.checkpoint.checkpointer import CheckpointConfig
from llmx.pipeline.permutation import LayerPermutation


class Texts:
    """What `agreement.Peers` does, between threads."""

    def __init__(self, index: int, count: int, store: dict):
        self.index, self.count = index, count
        self._store, self._calls = store, {}
        self._changed = store.setdefault("changed", threading.Condition())

    def publish(self, key: str, text: str):
        with self._changed:
            self._store[key] = text
            self._changed.notify_all()

    def read(self, folder: str) -> dict[str, str]:
        with self._changed:
            keys = [k for k in self._store if k.startswith(f"{folder}/")]
            return {key.removeprefix(f"{folder}/"): self._store[key] for key in keys}

    def exchange(self, name: str, text: str) -> list[str]:
        self._calls[name] = number = self._calls.get(name, 0) + 1
        keys = [f"{name}/{number}/{k}" for k in range(self.count)]
        self.publish(keys[self.index], text)
        with self._changed:
            assert self._changed.wait_for(lambda: all(key in self._store for key in keys), 60)
            return [self._store[key] for key in keys]


def together(count: int, work) -> list:
    """Runs work(peers) of `count` processes, each a thread; their results."""
    store: dict = {}
    with concurrent.futures.ThreadPoolExecutor(count) as threads:
        jobs = [threads.submit(work, Texts(index, count, store)) for index in range(count)]
        return [job.result(120) for job in jobs]


def state_of(step: int, *axes: str | None) -> dict:
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    place = lambda *axes: NamedSharding(mesh, PartitionSpec(*axes))  # noqa: E731
    values = np.arange(64, dtype=np.float32).reshape(8, 8) + step
    return {
        "w": jax.device_put(values, place(*(axes or ("x", "y")))),
        "half": jax.device_put(values.astype("bfloat16"), place(None, "x")),
        "whole": jax.device_put(values[0], place()),
        "step": jax.device_put(np.int32(step), place()),
        "number": step / 4,
    }


def abstract(state: dict) -> dict:
    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)  # noqa: E731
    return {k: shape(v) if isinstance(v, jax.Array) else v for k, v in state.items()}


class Place:
    """A work directory and a local one."""

    def __init__(self, folder: pathlib.Path, **values):
        self.work, self.local, self.said = folder / "work", folder / "local", []
        self.config = CheckpointConfig(every=0, local_directory=str(self.local), **values)

    def tier(self, peers) -> local_tier.LocalTier:
        log = self.said.append if peers.index == 0 else lambda text: None
        return local_tier.LocalTier(self.config, str(self.work), peers, log=log)

    def save(self, *steps: int, count: int = 1, states=state_of):
        def work(peers):
            with self.tier(peers) as tier:
                for step in steps:
                    tier.save(step, states(step), meta={"position": step}, wait=True)
                return tier.newest()

        return together(count, work)

    def restore(self, *, count: int = 1, like=None, **options):
        """(step, state) in each process, or None; raises what a process raises."""
        like = like or abstract(state_of(0))

        def work(peers):
            with self.tier(peers) as tier:
                found = tier.restore(like, **options)
            if found is None:
                return None
            (state, meta, step), document = found
            assert meta == {"position": step} and document.step == step
            return step, state

        return together(count, work)

    def files(self, pattern: str = "*") -> list[pathlib.Path]:
        return sorted(self.local.glob(f"llmx-*/{pattern}"))

    def steps(self, process: int = 0, kind: str = "own") -> list[int]:
        return sorted(int(p.name.split("-")[0]) for p in self.files(f"process-{process}/*.{kind}"))


@pytest.fixture
def place(tmp_path) -> Place:
    return Place(tmp_path)


def flip(path: pathlib.Path, offset: int):
    with open(path, "r+b") as file:
        file.seek(offset, os.SEEK_END if offset < 0 else os.SEEK_SET)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 16]))


def test_a_work_directory_named_by_a_link_is_the_same(place, tmp_path):
    place.save(4)
    (tmp_path / "link").symlink_to(place.work)
    place.work = tmp_path / "link"
    ((step, _),) = place.restore()
    assert step == 4


def test_what_another_path_of_the_run_has_is_told(place, tmp_path):
    place.save(4, 8)
    place.work.rename(tmp_path / "moved")
    place.work = tmp_path / "moved"
    assert place.restore() == [None]
    (line,) = place.said[1:]
    (old,) = {path.parent for path in place.files("process-0") if list(path.iterdir())}
    assert line.startswith(f"process 0: local checkpoint 8 in {old} is of the same run"), line
    new = line.rpartition(" ")[2]
    shutil.rmtree(new)
    old.rename(new)  # as it says
    ((step, _),) = place.restore()
    assert step == 8 and not place.said[2:-1]


def test_off_it_does_nothing(tmp_path):
    with local_tier.LocalTier(CheckpointConfig(), str(tmp_path), Texts(0, 1, {}), log=print) as off:
        assert not off.due(10) and off.restore({}) is None and off.newest() is None
        off.save(10, {"w": object()}, meta={})
        off.forget(after=3)
        off.superseded(3)
    assert not list(tmp_path.iterdir())


def test_one_process_restores_its_newest_step_bit_for_bit(place):
    assert place.save(2, 4, 6) == [6]
    assert place.steps() == [4, 6]
    ((step, state),) = place.restore()
    assert step == 6
    assert_same(state, state_of(6))
    assert {k: v.sharding for k, v in state.items() if k != "number"} == {
        k: v.sharding for k, v in state_of(6).items() if k != "number"
    }
    assert place.restore(newer_than=6) == [None]
    # Every shard once, though some stand on all eight devices.
    size = 64 * 4 + 64 * 2 + 8 * 4 + 4
    with open(place.files("process-0/6-*.own")[0], "rb") as file:
        header = local_files.read_header(file)
        assert sum(shard.size for shard in header.shards) == size == len(file.read())


def test_what_is_saved_is_the_state_before_the_next_step(place):
    step = jax.jit(lambda x: jax.tree.map(lambda leaf: leaf * 2 + 1, x), donate_argnums=0)

    def work(peers):
        with place.tier(peers) as tier:
            arrays = {k: v for k, v in state_of(1).items() if k != "number"}
            wanted = jax.device_get(arrays)
            for number in range(1, 5):
                tier.save(number, arrays, meta={"position": number})
                arrays = step(arrays)
                wanted = jax.device_get(arrays) if number < 4 else wanted
        return wanted

    (wanted,) = together(1, work)
    like = {k: v for k, v in abstract(state_of(0)).items() if k != "number"}
    ((number, state),) = place.restore(like=like)
    assert number == 4
    assert_same(jax.device_get(state), wanted)


@pytest.mark.parametrize("damage", ["flipped", "header", "cut", "empty"])
def test_a_damaged_file_falls_back_to_the_step_before(place, damage):
    place.save(2, 4)
    (path,) = place.files("process-0/4-*.own")
    if damage == "cut":
        os.truncate(path, path.stat().st_size - 7)
    elif damage == "empty":
        os.truncate(path, 0)
    else:
        flip(path, -20 if damage == "flipped" else 30)
    ((step, state),) = place.restore()
    assert step == 2
    assert_same(state, state_of(2))
    said = "\n".join(place.said)
    reason = {"flipped": "checksum differs in leaf whole", "cut": "cut off in leaf",
              "header": "its header does not match", "empty": "does not begin"}[damage]  # fmt: skip
    assert "local checkpoint 4" in said and reason in said, said


def test_a_lost_or_damaged_host_is_restored_from_its_neighbor(place):
    """Process 0 sends all its shards; those of process 1 are also in the file of process 0."""
    assert place.save(2, 4, count=2) == [4, 4]
    assert place.steps(1, "copy") == [2, 4] == place.steps(0, "copy")
    copies = {p.stat().st_size for p in place.files("process-*/4-*.copy")}
    owns = {p.stat().st_size for p in place.files("process-*/4-*.own")}
    assert max(copies) == max(owns) and min(copies) < min(owns)
    for process in (0, 1):
        for path in place.files(f"process-{process}/*"):
            path.unlink()
        for step, state in place.restore(count=2):
            assert step == 4
            assert_same(state, state_of(4))
        assert place.steps(process) == [4]  # it has its file again
        flip(place.files(f"process-{process}/4-*.own")[0], -40)
        assert [step for step, _ in place.restore(count=2)] == [4, 4]
        takes = f"process {process}: its files are not on this host; it takes the copy"
        assert any(takes in text for text in place.said), place.said
        assert place.save(6, count=2) == [6, 6] and place.save(2, 4, count=2) == [4, 4]


@pytest.mark.parametrize("first", [0, 1])
def test_a_file_is_restored_from_one_that_was_itself_damaged(place, monkeypatch, first):
    """The copy of process 1 needs the file of process 0, whichever is fetched first."""
    fetch, fetched = local_tier.LocalTier._fetch, threading.Event()

    def in_turn(tier, name):
        if tier._peers.index == first:
            found = fetch(tier, name)
            fetched.set()
            return found
        assert fetched.wait(60)
        return fetch(tier, name)

    monkeypatch.setattr(local_tier.LocalTier, "_fetch", in_turn)
    place.save(2, 4, count=2)
    owns = place.files("process-*/4-*.own")
    (copy,) = place.files("process-1/4-*.0.copy")  # with all shards; that of process 1 has none
    good = {path: path.read_bytes() for path in (*owns, copy)}
    assert len(good) == 3
    for path in owns:
        flip(path, -40)
    for step, state in place.restore(count=2):
        assert step == 4
        assert_same(state, state_of(4))
    assert {path: path.read_bytes() for path in owns} == {path: good[path] for path in owns}
    # No good one of a shard is left: the step before.
    fetched.clear()
    for path in good:
        flip(path, -40)
    for step, state in place.restore(count=2):
        assert step == 2
        assert_same(state, state_of(2))
    assert any("not used" in text for text in place.said), place.said


def test_of_several_files_of_a_process_the_good_one_is_given(place):
    """The host of process 0 has files of process 1 too, from when that one was on it."""
    place.save(2, 4, count=2)
    (own,) = place.files("process-1/4-*.1.own")
    orphans = place.files()[0].parent / "process-7"
    orphans.mkdir()
    (orphans / own.name).write_bytes(good := own.read_bytes())
    flip(orphans / own.name, -40)
    own.unlink()
    for step, _ in place.restore(count=2):
        assert step == 4
    assert own.read_bytes() == good


def test_a_process_takes_a_copy_from_its_own_host(place):
    """Its own file is damaged, and the only good one is that of a process that was here."""
    place.save(2, 4)
    (own,) = place.files("process-0/4-*.0.own")
    orphans = own.parent.with_name("process-7")
    orphans.mkdir()
    (orphans / own.name).write_bytes(good := own.read_bytes())
    flip(own, -40)
    ((step, state),) = place.restore()
    assert step == 4 and own.read_bytes() == good
    assert_same(state, state_of(4))


def test_steps_of_two_launches_are_never_mixed(place):
    place.save(2, 4, count=2)
    (old,) = place.files("process-0/4-*.own")
    kept = old.read_bytes()
    place.save(4, count=2, states=lambda step: state_of(step + 100))
    old.write_bytes(kept)
    for path in [*place.files("process-1/*"), *place.files("process-0/*.copy")]:
        if path.name.split(".")[0] != old.name.split(".")[0]:
            path.unlink()
    assert place.restore(count=2) == [None, None]
    assert any("lacks the shards of process 1" in text for text in place.said), place.said


def test_another_run_in_the_same_folder_begins_anew(place):
    place.save(2, 4)
    (place.work / "checkpoints" / local_places.RUN).unlink()
    assert place.restore() == [None]
    assert place.steps() == []


def test_other_processes_or_shardings_are_ignored_with_a_line(place):
    place.save(2, 4)
    assert place.restore(like=abstract(state_of(0, None, "y"))) == [None]
    assert "leaf w was split in another way" in place.said[-1], place.said
    assert place.restore(order=LayerPermutation((1, 0))) == [None]
    assert place.restore(count=2) == [None, None]
    assert any("lacks the shards of process 1" in text for text in place.said)
    place.save(6, count=2)
    assert place.restore() == [None]
    assert "it was saved by 2 processes" in place.said[-1]


def test_another_structure_is_refused(place):
    place.save(4)
    like = abstract(state_of(0))
    del like["whole"]
    with pytest.raises(ValueError, match="whole: saved, not wanted"):
        place.restore(like=like)
    assert place.steps() == [4]


def test_going_back_deletes_later_steps_and_a_save_elsewhere_earlier_ones(place):
    place.save(2, 4, count=2)

    def work(peers):
        with place.tier(peers) as tier:
            tier.forget(after=3)
            found = tier.restore(abstract(state_of(0)))
            # As after a rollback: steps with the numbers of those that were deleted.
            for step in (4, 6):
                tier.save(step, state_of(step), meta={"position": step}, wait=True)
            tier.forget(after=4)
            tier.save(6, state_of(106), meta={"position": 6}, wait=True)
            return found[0].step, tier.newest()

    assert together(2, work) == [(2, 6)] * 2
    for step, state in place.restore(count=2):
        assert step == 6
        assert_same(state, state_of(106))
    assert place.steps() == [6]

    def end(peers):
        with place.tier(peers) as tier:
            tier.superseded(6)

    together(2, end)
    assert place.steps() == []


def test_going_back_keeps_the_copy_of_a_save_that_the_neighbor_has_begun(place):
    forgotten = threading.Event()

    def work(peers):
        with place.tier(peers) as tier:
            if peers.index == 1:
                assert sent.wait(60)
                tier.forget(after=4)
                forgotten.set()
            tier.save(6, state_of(6), meta={"position": 6}, wait=True)
            return tier.newest()

    sent, put = threading.Event(), neighbors.put

    def late(*args):
        put(*args)
        sent.set()
        assert forgotten.wait(60)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(neighbors, "put", late)
        assert together(2, work) == [6, 6]
    assert place.steps(0, "copy") == place.steps(1, "copy") == [6]


def test_a_failed_save_is_a_warning_and_the_one_before_stays(place, monkeypatch, capfd):
    write = local_files.write

    def full(path, header, data):
        if path.name.startswith("4-") and path.name.endswith(".1.own"):
            raise OSError(28, "No space left on device")
        write(path, header, data)

    monkeypatch.setattr(local_files, "write", full)
    monkeypatch.setattr(local_tier, "COMMIT_SECONDS", 1.0)
    assert place.save(2, 4, count=2) == [2, 2]
    assert "process 1: local checkpoint 4 was not written: OSError" in capfd.readouterr().err
    assert [step for step, _ in place.restore(count=2)] == [2, 2]
    assert place.save(2, 4, 6, count=2) == [6, 6]


def test_where_replicas_differ_the_step_does_not_count(place, capfd):
    place.save(2, count=2)

    def work(peers):
        with place.tier(peers) as tier:
            tier.restore(abstract(state_of(0)))
            state = state_of(4) | ({"whole": state_of(5)["whole"]} if peers.index else {})
            tier.save(4, state, meta={"position": 4}, wait=True)
            return tier.newest()

    assert together(2, work) == [2, 2]
    reason = "leaf whole has other values in process 1 than in process 0"
    assert f"checkpoint 4 was not written: Corrupt: {reason}" in capfd.readouterr().err
    assert [step for step, _ in place.restore(count=2)] == [2, 2]
    assert any(f"{reason}, and both should hold the same: not used" in t for t in place.said)


def test_a_folder_that_cannot_be_used_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    place = Place(tmp_path)
    place.config.local_directory = str(tmp_path / "file" / "x")
    with pytest.raises(ValueError, match=r"checkpoint\.local_directory=.* cannot be written"):
        place.save(2)


def test_a_stranger_gets_nothing_and_leaves_nothing():
    taken = []
    server = neighbors.Server(
        "127.0.0.1", b"secret", take=lambda message, chunks: taken.append(list(chunks)),
        give=lambda message: [b"bytes"],
    )  # fmt: skip
    try:
        for token in (b"other", b""):
            with pytest.raises(OSError, match=r"no process of this run|closed|reset"):
                list(neighbors.get(server.address, token, {}))
            with pytest.raises(OSError):
                neighbors.put(server.address, token, {}, [b"evil"])
        assert not taken
        assert b"".join(neighbors.get(server.address, b"secret", {})) == b"bytes"
        big = os.urandom(2 * neighbors.CHUNK + 5)
        neighbors.put(server.address, b"secret", {}, [b"small", big])
        assert b"".join(taken[0]) == b"small" + big
    finally:
        server.close()
    with pytest.raises(OSError):
        neighbors.put(server.address, b"secret", {}, [])


class Shared:
    """The work directory's checkpoints, as far as `restore_newest` sees them."""

    def __init__(self, *good: int, corrupt: tuple[int, ...] = ()):
        self.good, self.corrupt, self.tried = good, corrupt, []

    def latest_step(self):
        return max(self.good + self.corrupt, default=None)

    def restore(self, wanted, step=None, **options):
        self.tried.append(step)
        if self.corrupt and not self.good:
            raise RuntimeError("no good checkpoint")
        if not self.good:
            return None
        step = max(self.good) if step is None else step
        return checkpointer.Restored("shared", {}, step)

    def document(self, step):
        return step


@pytest.mark.parametrize(
    ("shared", "step", "taken", "left"),
    [
        (Shared(), None, 4, [2, 4]),
        (Shared(3), None, 4, [2, 4]),  # the local one is newer
        (Shared(5), None, "shared", []),  # what is older than the shared one is deleted
        (Shared(3, corrupt=(5,)), None, 4, [2, 4]),
        (Shared(corrupt=(5,)), None, 4, [2, 4]),
        (Shared(3), 3, "shared", [4]),  # asked for by number
    ],
)
def test_the_newest_good_checkpoint_of_both_tiers_is_taken(place, shared, step, taken, left):
    place.save(2, 4)

    def work(peers):
        with place.tier(peers) as tier:
            options = dict(order=LayerPermutation(), ignored="")
            return local_tier.restore_newest(shared, tier, abstract(state_of(0)), step, **options)

    ((restored, _),) = together(1, work)
    assert taken in (restored.step, restored.state if restored.state == "shared" else None)
    assert place.steps() == left
    with pytest.raises(RuntimeError, match="no good checkpoint"):
        local_tier.restore_newest(
            Shared(corrupt=(5,)), local_tier.OFF, {}, order=LayerPermutation(), ignored=""
        )


# ------------------------------------------------------------------------------------- end to end

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = """
from llmx import config
from llmx.model import families

def get_config():
    run = config.default()
    run.model = families.preset("llama3", num_layers=2, width=32, num_heads=2, head_dim=16,
                                num_kv_heads=2, mlp_dim=64)
    run.steps, run.precision, run.sharding.layout = 16, "fp32", "zero1"
    run.batch.size, run.batch.sequence_length = 4, 32
    run.optimizer.warmup_steps, run.optimizer.learning_rate = 2, 1e-2
    run.checkpoint.every = 100
    run.evaluation.every, run.sample.prompt = 0, ""
    run.metrics.log_every, run.metrics.progress, run.metrics.tensorboard = 1, "plain", False
    run.data.sources, run.data.cache_dir = ({source!r},), {cache!r}
    return run
"""


class Cluster:
    """Trains with two processes, whose local tiers are folders of their own."""

    def __init__(self, folder: pathlib.Path):
        self.folder, self.local = folder, folder / "local"
        source = str(text_runs.write_corpus(folder, files=8, words=300))
        text = CONFIG.format(source=source, cache=str(folder / "cache"))
        (folder / "run.py").write_text(text)

    def start(self, workdir: str, *flags: str) -> subprocess.Popen:
        command = [
            sys.executable, "scripts/local_cluster.py", "-n", "2", "--", sys.executable, "-m",
            "llmx.train", "--config", str(self.folder / "run.py"), "--workdir",
            str(self.folder / workdir), *flags,
        ]  # fmt: skip
        return subprocess.Popen(
            command, cwd=ROOT, env=os.environ | {"PYTHONUNBUFFERED": "1"}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def run(self, workdir: str, *flags: str) -> str:
        process = self.start(workdir, *flags)
        said = process.communicate(timeout=300)[0]
        assert process.returncode == 0, said
        return said

    def losses(self, workdir: str) -> list[float]:
        return text_runs.losses(self.folder / workdir)

    def disturb(self, workdir: str, step: int, number: int, *flags: str) -> tuple[int, str]:
        """Sends process 1 the signal `number` after a step; the exit code and what was said."""
        process, said = self.start(workdir, *flags), ""
        for line in process.stdout:
            said += line
            if f"step {step:2}/16" in line:
                path = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
                os.kill(int(path.read_text().split()[1]), number)
        assert process.wait(120) != 0, said
        return process.returncode, said


def whole_steps(root: pathlib.Path) -> set[int]:
    """The steps of a local tier of two processes of which the shards of both are there."""
    paths = [*root.glob("*/*.own"), *root.glob("*/*.copy")]
    shards = {tuple(path.name.split(".")[:2]) for path in paths}
    names = {name for name, _ in shards}
    return {int(name.partition("-")[0]) for name in names if {(name, "0"), (name, "1")} <= shards}


@pytest.mark.slow
def test_a_lost_host_is_restored_from_its_neighbor_end_to_end(tmp_path):
    cluster = Cluster(tmp_path)
    cluster.run("whole")
    tier = (
        f"--config.checkpoint.local_directory={cluster.local}", "--config.checkpoint.local_every=2"
    )  # fmt: skip
    cluster.disturb("run", 7, signal.SIGKILL, *tier)
    assert not list((tmp_path / "run" / "checkpoints").glob("[0-9]*"))
    (root,) = cluster.local.glob("llmx-*")
    shutil.rmtree(root / "process-1")
    newest = max(whole_steps(root))
    # Saves run beside training: that of step 6 may have been cut off.
    assert newest in (4, 6, 8)

    # And with no time to save after SIGTERM: the last line names what is safe.
    flags = (*tier, "--config.checkpoint.grace_seconds=0.01")
    code, said = cluster.disturb("run", 11, signal.SIGTERM, *flags)
    assert "process 1: its files are not on this host; it takes the copy of process 0" in said
    assert f"resumed from checkpoint {newest} " in said, said
    assert code == 75 and "grace_seconds=0.01 are over before the save is complete" in said, said
    assert not list((tmp_path / "run" / "checkpoints").glob("[0-9]*"))
    safe = int(re.search(r"the newest checkpoint is that of step (\d+)", said)[1])
    # What runs beside step 11 may be cut off, but not all that this run has saved.
    assert min(newest + 1, 8) <= safe <= max(whole_steps(root)), said
    newest = max(whole_steps(root))

    said = cluster.run("run", *tier)
    assert f"resumed from checkpoint {newest} " in said, said
    assert cluster.losses("run") == cluster.losses("whole")
    assert not list(root.glob("*/*.own"))  # nothing stays behind when all is saved

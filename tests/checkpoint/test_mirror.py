"""The copy of a work directory in a store: what is uploaded when, and what another start finds."""

import errno
import json
import shutil
import threading
import time

import jax
import jax.numpy as jnp
import pytest
from support import memory_store

from llmx.checkpoint import checkpointer, directory, grace, mirror
from llmx.data import remote, transient
from llmx.runtime import exits

URL = "memory://bucket/run"


@pytest.fixture
def store():
    with memory_store.emptied() as files:
        yield files


def objects(files):
    return memory_store.objects(files, "bucket/run")


def held(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*") if path.is_file()
    }  # fmt: skip


def checkpoint(folder, step):
    """As a save leaves it."""
    root = folder / "checkpoints"
    path = directory.unfinished_path(root, step)
    (path / "state" / "d").mkdir(parents=True)
    (path / "state" / "d" / "array").write_bytes(b"%d" % step)
    directory.commit(root, step)


def started(folder, log=lambda line: None):
    """As a launch begins, which has taken the lease."""
    remote.write_bytes(f"{URL}/owner.json", b"{}")
    made = mirror.Mirror(URL, folder, log=log)
    made.pull()
    return made


def without_record(files):
    """Of names of files, or their contents by name: those that a run itself has, or wants."""
    return {name: files[name] for name in files if name not in (mirror.RECORD, "owner.json")}


def test_another_machine_finds_what_was_uploaded(tmp_path, store):
    first, second = tmp_path / "a", tmp_path / "b"
    run = started(first)
    assert without_record(held(first)) == {}
    (first / "metrics.jsonl").write_text("1\n")
    (first / "owner.json").write_text("{}")
    (first / "config.tmp").write_text("half")
    checkpoint(first, 4)
    (first / "checkpoints" / "8.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    (first / "checkpoints" / "8.orbax-checkpoint-tmp" / "state" / "x").write_text("half")
    run.push()
    wanted = {"metrics.jsonl", "checkpoints/4/state/d/array", f"checkpoints/4/{directory.MARKER}"}
    assert without_record(objects(store)).keys() == wanted
    started(second)
    assert without_record(held(second)) == without_record(objects(store))
    assert directory.steps(second / "checkpoints") == [4]


def test_files_follow_and_old_checkpoints_go(tmp_path, store):
    run = started(tmp_path / "a")
    for step in (4, 8):
        checkpoint(tmp_path / "a", step)
        (tmp_path / "a" / "metrics.jsonl").write_text(f"{step}\n" * step)
        (tmp_path / "a" / "going_back").write_text("4")
        run.push()
    directory.start_removing(tmp_path / "a" / "checkpoints", "4").join()
    (tmp_path / "a" / "going_back").unlink()
    run.push()
    found = objects(store)
    assert found["metrics.jsonl"] == b"8\n" * 8 and "going_back" not in found
    assert {name.split("/")[1] for name in found if "/" in name} == {"8"}


def test_a_checkpoint_is_there_only_with_its_marker(tmp_path, store, monkeypatch):
    """Wherever the upload is cut off, another start finds the checkpoint whole, or not at all."""
    original = remote.upload
    for allowed in range(6):
        store.store.clear()
        folder = tmp_path / f"a{allowed}"
        run = started(folder)
        (folder / "metrics.jsonl").write_text("4\n")
        checkpoint(folder, 4)
        count = 0

        def upload(file, url, allowed=allowed):
            nonlocal count
            count += 1
            if count > allowed:
                raise KeyboardInterrupt
            original(file, url)

        monkeypatch.setattr(remote, "upload", upload)
        if allowed < 4:
            with pytest.raises(KeyboardInterrupt):
                run.push()
        else:
            run.push()
        monkeypatch.setattr(remote, "upload", original)
        other = tmp_path / f"b{allowed}"
        started(other)
        complete = directory.steps(other / "checkpoints")
        assert complete == ([4] if allowed >= 4 else [])
        if complete:
            assert without_record(held(other)) == without_record(held(folder))
        else:
            assert without_record(held(other)).keys() <= {"metrics.jsonl"}


def test_newer_local_checkpoints_of_the_run_stay_and_are_uploaded(tmp_path, store):
    """Those that were complete when the run was killed, and what lies beside them."""
    folder, lines = tmp_path / "a", []
    run = started(folder)
    checkpoint(folder, 4)
    (folder / "metrics.jsonl").write_text("of step 4")
    (folder / "going_back").write_text("4")
    run.push()
    (folder / "going_back").unlink()
    checkpoint(folder, 8)  # of these nothing was uploaded
    checkpoint(folder, 12)
    (folder / "metrics.jsonl").write_text("of step 13")
    again = started(folder, lines.append)
    assert directory.steps(folder / "checkpoints") == [4, 8, 12]
    assert (folder / "metrics.jsonl").read_text() == "of step 13"
    assert "lacks the checkpoints 8, 12" in lines[0] and str(folder) in lines[0]
    assert again.end(exits.DONE) == exits.DONE
    assert held(folder).items() <= objects(store).items()
    assert "going_back" not in objects(store)
    started(tmp_path / "b")
    assert directory.steps(tmp_path / "b" / "checkpoints") == [4, 8, 12]


def test_newer_local_checkpoints_before_anything_was_uploaded_stay(tmp_path, store):
    started(tmp_path / "a")
    checkpoint(tmp_path / "a", 8)
    again = started(tmp_path / "a")
    assert directory.steps(tmp_path / "a" / "checkpoints") == [8]
    assert again.end(exits.DONE) == exits.DONE
    assert f"checkpoints/8/{directory.MARKER}" in objects(store)


def test_a_checkpoint_that_only_the_store_has_good_is_fetched(tmp_path, store):
    """Not one that the run went back from."""
    run, folder = started(tmp_path / "a"), tmp_path / "a" / "checkpoints"
    for step in (4, 8, 12):
        checkpoint(tmp_path / "a", step)
    run.push()
    directory.set_aside(folder, 12, "replaced")
    directory.set_aside(folder, 8, "corrupt")
    started(tmp_path / "a")
    assert directory.steps(folder) == [4, 8]


def saved_state(value):
    return {"w": jnp.full(4, value, jnp.float32)}


def flip(folder):
    for path in folder.rglob("d/*"):
        path.write_bytes(bytes(byte ^ 0xFF for byte in path.read_bytes()))


@pytest.fixture
def damaged(tmp_path, store):
    """(Run, its checkpointer, its checkpoints): 4, 8 and 12 are in the store, and 12 is damaged in
    the folder."""
    run = started(tmp_path / "a")
    root = tmp_path / "a" / "checkpoints"
    with checkpointer.Checkpointer(root, checkpointer.CheckpointConfig(), log=print) as made:
        for step in (4, 8, 12):
            made.save(step, saved_state(step), meta={}, wait=True)
    run.push()
    flip(root / "12")
    again = started(tmp_path / "a")
    config = checkpointer.CheckpointConfig()
    return again, checkpointer.Checkpointer(root, config, log=print, again=again.again), root


def restored_step(checkpoints):
    like = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=jnp.zeros(1).sharding)
    found = checkpoints.restore({"w": like})
    assert found.state["w"].tolist() == [found.step] * 4
    return found.step


# Orbax abandons a write to its closed event loop when a read fails.
broken_reads = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@broken_reads
@pytest.mark.parametrize("bad", [(12,), (4, 8, 12)])
def test_a_checkpoint_that_is_damaged_here_is_taken_from_the_store(store, damaged, bad):
    run, checkpoints, root = damaged
    for step in bad[:-1]:
        flip(root / f"{step}")
    before = objects(store)
    with checkpoints:
        assert restored_step(checkpoints) == 12
    assert (root / "12.corrupt").is_dir() and directory.steps(root) == [4, 8, 12]
    run.push()
    assert run.end(exits.DONE) == exits.DONE
    assert without_record(objects(store)) == without_record(before)


@broken_reads
@pytest.mark.parametrize("why", ["damaged", "gone", "replaced here"])
def test_without_a_good_copy_in_the_store_the_one_before_is_taken(store, damaged, why):
    _, checkpoints, root = damaged
    lead = "memory://bucket/run/checkpoints/12"
    if why == "damaged":
        for name in remote.find(lead):
            if "/d/" in name:
                remote.write_bytes(f"{lead}/{name}", b"others")
    if why == "gone":
        store.rm("/bucket/run/checkpoints/12", recursive=True)
        again = started(root.parent)
        checkpoints = checkpointer.Checkpointer(
            root, checkpointer.CheckpointConfig(), log=print, again=again.again
        )
    if why == "replaced here":
        (root / "12.replaced").mkdir()
    with checkpoints:
        assert restored_step(checkpoints) == 8
    assert (root / "12.corrupt").is_dir() and directory.steps(root) == [4, 8]


@broken_reads
def test_a_store_that_fails_is_no_reason_to_take_the_one_before(store, damaged, monkeypatch):
    _, checkpoints, root = damaged

    def fail(*_, **__):
        raise transient.Transient("503 SlowDown")

    monkeypatch.setattr(remote, "fetch", fail)
    with checkpoints, pytest.raises(ValueError, match=r"checkpoint 12 of .*run again") as error:
        restored_step(checkpoints)
    assert transient.is_transient(error.value) and directory.steps(root) == [4, 8, 12]


@broken_reads
def test_an_upload_meanwhile_does_not_take_the_checkpoint_for_deleted(store, damaged, monkeypatch):
    run, checkpoints, _ = damaged
    original, noted = directory.set_aside, []

    def set_aside(*arguments):  # the upload looks between this and the other rename
        found = original(*arguments)
        noted.append(threading.Thread(target=run._note_pruned))
        noted[0].start()
        time.sleep(0.2)
        return found

    monkeypatch.setattr(directory, "set_aside", set_aside)
    with checkpoints:
        assert restored_step(checkpoints) == 12
    noted[0].join()
    removed = []
    monkeypatch.setattr(remote, "remove", removed.append)
    run.push()
    assert removed == [] and steps_in(store) == {"4", "8", "12"}


@pytest.mark.parametrize("how", ["went on elsewhere", "another run", "of no known run"])
def test_the_store_counts_where_the_folder_is_not_its_continuation(tmp_path, store, how):
    """What only the folder has is not lost: it lies beside it."""
    folder, lines = tmp_path / "a", []
    run = started(folder)
    checkpoint(folder, 4)
    (folder / "metrics.jsonl").write_text("of step 4")
    run.push()
    checkpoint(folder, 8)
    (folder / "metrics.jsonl").write_text("of step 8")
    if how == "another run":
        store.store.clear()
    if how == "of no known run":
        (folder / mirror.RECORD).unlink()
    else:
        other = started(tmp_path / "b")
        checkpoint(tmp_path / "b", 6)
        other.push()
    again = started(folder, lines.append)
    steps = {"went on elsewhere": [4, 6], "another run": [6], "of no known run": [4]}[how]
    assert directory.steps(folder / "checkpoints") == steps
    assert without_record(held(folder)) == without_record(objects(store))
    (aside,) = tmp_path.glob("a.aside-*")
    assert 8 in directory.steps(aside / "checkpoints") and str(aside) in lines[0]
    assert (aside / "metrics.jsonl").read_text() == "of step 8"
    checkpoint(folder, 8)
    again.push()
    assert f"checkpoints/8/{directory.MARKER}" in objects(store)


def test_a_copy_that_was_cut_off_is_not_believed(tmp_path, store, monkeypatch):
    run = started(tmp_path / "a")
    for step in (4, 8):
        checkpoint(tmp_path / "a", step)
    run.push()

    def cut(url, state, partial):
        if "8/state" in url:
            raise KeyboardInterrupt
        original(url, state, partial)

    original = remote._copy
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(remote, "_copy", cut)
        started(tmp_path / "b")
    started(tmp_path / "b")
    assert without_record(held(tmp_path / "b")) == without_record(objects(store))


@pytest.mark.parametrize("found", ["nothing", "another file"])
def test_a_listing_without_the_lease_is_no_new_start(tmp_path, store, monkeypatch, found):
    run = started(tmp_path / "a")
    checkpoint(tmp_path / "a", 4)
    run.push()
    before = objects(store), held(tmp_path / "a")
    listed = {} if found == "nothing" else {"metrics.jsonl": remote.Status(1, 1)}
    monkeypatch.setattr(remote, "find", lambda url: dict(listed))
    for folder in ("a", "b"):
        with pytest.raises(ValueError, match=r"lacks owner.json.*run again") as error:
            started(tmp_path / folder)
        assert transient.is_transient(error.value)
    assert (objects(store), held(tmp_path / "a")) == before


def test_a_store_that_lost_the_run_is_not_written_over(tmp_path, store):
    run = started(tmp_path / "a")
    checkpoint(tmp_path / "a", 4)
    run.push()
    store.store.clear()
    before = held(tmp_path / "a")
    with pytest.raises(ValueError, match=r"holds nothing of the run.*checkpoints 4") as error:
        started(tmp_path / "a")
    assert not transient.is_transient(error.value) and held(tmp_path / "a") == before
    started(tmp_path / "b")  # of a machine that knows of no run


def test_a_folder_that_vanished_takes_nothing_from_the_store(tmp_path, store):
    run = started(tmp_path / "a")
    checkpoint(tmp_path / "a", 4)
    run.push()
    shutil.rmtree(tmp_path / "a" / "checkpoints")
    run.push()
    assert f"checkpoints/4/{directory.MARKER}" in objects(store)


def test_what_is_deleted_here_while_it_is_uploaded_is_removed_there(tmp_path, store, monkeypatch):
    run, original = started(tmp_path / "a"), remote.upload
    checkpoint(tmp_path / "a", 4)
    checkpoint(tmp_path / "a", 8)

    def upload(file, url):
        if "checkpoints/4/state" in url:
            shutil.rmtree(tmp_path / "a" / "checkpoints" / "4")
        original(file, url)

    monkeypatch.setattr(remote, "upload", upload)
    run.push()
    assert {name.split("/")[1] for name in objects(store) if "/" in name} == {"8"}


def test_a_slow_store_is_not_waited_for(tmp_path, store, monkeypatch):
    """The newest checkpoint goes first, what is uploaded is in use, and one line tells of it."""
    lines, order, go_on, original = [], [], threading.Event(), remote.upload
    run = started(tmp_path / "a", lines.append)

    def upload(file, url):
        if "checkpoints/4/" in url:
            go_on.wait(60)
        original(file, url)
        if url.endswith(directory.MARKER):
            order.append(url.split("/")[-2])

    monkeypatch.setattr(remote, "upload", upload)
    monkeypatch.setattr(mirror, "TELL_SECONDS", 0.05)
    saved = run.pushing(lambda step: None)
    for step in (4, 8, 12):
        checkpoint(tmp_path / "a", step)
        saved(step)
        deadline = time.monotonic() + 30
        while not run.uses(4):
            assert time.monotonic() < deadline
        time.sleep(0.1)
    assert "memory://bucket/run has not taken checkpoint 4 yet, since " in lines[-1]
    limit = grace.GraceLimit(0.3, process=0, newest=lambda: "none", end=lines.append)
    limit.cancel()  # all is saved
    signal_comes, began = threading.Timer(0.3, limit.start), time.monotonic()
    signal_comes.start()
    assert run.end(exits.DONE, limit.left) == exits.AGAIN
    assert 0.6 <= time.monotonic() - began < 20 and limit.left() == 0
    assert "all is in" in lines[-1] and directory.steps(tmp_path / "a" / "checkpoints") == [
        4,
        8,
        12,
    ]
    monkeypatch.setattr(mirror, "QUIET_SECONDS", 0.2)
    assert run.end(exits.DONE) == exits.AGAIN
    for code in (exits.STOPPED, exits.INTERRUPTED, exits.AGAIN):
        assert run.end(code, limit.left) == code
    monkeypatch.setattr(mirror, "QUIET_SECONDS", 60.0)
    go_on.set()
    assert run.end(exits.DONE) == exits.DONE
    assert order == ["4", "12", "8"] and lines[-1] == f"uploaded to {URL}"


def steps_in(files):
    return {name.split("/")[1] for name in objects(files) if name.endswith(directory.MARKER)}


def of_several(folder):
    """Process 0 of several, as it begins, and its saves: the store gets all, the disk no arrays."""
    remote.write_bytes(f"{URL}/owner.json", b"{}")
    run = mirror.Mirror(URL, folder, log=lambda line: None, launch="f00d")
    run.pull()

    def save(step, between=lambda: None):
        run.place.prepare(step)
        remote.write_bytes(f"{URL}/checkpoints/{step}/state/d/array", b"%d" % step)
        run.place.publish(step)
        between()
        root = folder / "checkpoints"
        (directory.unfinished_path(root, step) / "state").mkdir(parents=True)
        directory.commit(root, step)

    return run, save


def test_a_checkpoint_of_several_processes_is_not_touched_by_uploads(tmp_path, store):
    """Its arrays are in the store alone, before and after its folder here has its name."""
    run, save = of_several(tmp_path / "a")
    saved = run.pushing(lambda step: None)
    save(4)
    saved(4)
    save(8, between=run.push)
    before = objects(store)
    run.push()
    assert steps_in(store) == {"4", "8"} and objects(store) == before
    assert before["checkpoints/8/state/d/array"] == b"8"
    directory.start_removing(tmp_path / "a" / "checkpoints", "4").join()
    assert run.end(exits.DONE) == exits.DONE  # which asks, as a save does at its end
    assert not any(name.startswith("checkpoints/4/") for name in objects(store))
    assert objects(store)["checkpoints/8/state/d/array"] == b"8"


def test_a_checkpoint_that_is_saved_anew_is_not_removed_meanwhile(tmp_path, store, monkeypatch):
    run, save = of_several(tmp_path / "a")
    for step in (4, 8):
        save(step)
    directory.set_aside(tmp_path / "a" / "checkpoints", 8, "replaced")
    run._note_pruned()
    listed = []

    def find(url):  # between the list of the old one's files and their removal
        names = original(url)
        if url.endswith("/8") and not listed:
            listed.append(url)
            save(8)
        return names

    original = remote.find
    monkeypatch.setattr(remote, "find", find)
    run.push()
    run.push()
    assert listed and steps_in(store) == {"4", "8"}
    assert objects(store)["checkpoints/8/state/d/array"] == b"8"


def test_a_checkpoint_that_is_made_anew_is_uploaded_anew(tmp_path, store):
    run, folder = started(tmp_path / "a"), tmp_path / "a" / "checkpoints"
    saved = run.pushing(lambda step: None)
    for step in (4, 8):
        checkpoint(tmp_path / "a", step)
    run.push()
    directory.set_aside(folder, 8, "replaced")
    checkpoint(tmp_path / "a", 8)
    (folder / "8" / "state" / "d" / "array").write_bytes(b"anew")
    saved(8)
    assert run.end(exits.DONE) == exits.DONE
    assert objects(store)["checkpoints/8/state/d/array"] == b"anew"
    assert steps_in(store) == {"4", "8"}


def test_a_slow_store_is_pruned(tmp_path, store, monkeypatch):
    """Each time that a newer checkpoint has arrived, though others are missing still; not before,
    for then the store would hold none."""
    run, folder, seen = started(tmp_path / "a"), tmp_path / "a" / "checkpoints", []
    checkpoint(tmp_path / "a", 4)
    run.push()
    directory.start_removing(folder, "4").join()
    checkpoint(tmp_path / "a", 8)
    checkpoint(tmp_path / "a", 12)
    original = remote.upload_folder

    def upload(source, url, **options):
        seen.append((url.rsplit("/", 1)[1], steps_in(store)))
        original(source, url, **options)

    monkeypatch.setattr(remote, "upload_folder", upload)
    run.push()
    assert seen == [("12", {"4"}), ("8", {"12"})] and steps_in(store) == {"8", "12"}


def test_a_failed_upload_is_told_and_tried_again(tmp_path, store, monkeypatch):
    lines = []
    run = started(tmp_path / "a", lines.append)
    checkpoint(tmp_path / "a", 4)
    monkeypatch.setattr(remote, "PAUSE_SECONDS", 0.0)

    failures: list[OSError] = []

    def fail(file, url):
        raise failures[-1]

    with monkeypatch.context() as patch:
        patch.setattr(remote, "upload", fail)
        failures.append(PermissionError("403 access denied"))
        assert run.end(exits.DONE) == exits.UNSAVED
        failures.append(OSError(errno.EBUSY, "503 slow down"))
        assert run.end(exits.DONE) == exits.AGAIN
    assert "warning: memory://bucket/run is not up to date (403 access denied)" in lines[0]
    assert objects(store).keys() == {"owner.json"}
    assert run.end(exits.DONE) == exits.DONE
    assert f"checkpoints/4/{directory.MARKER}" in objects(store)
    assert lines[-1] == f"uploaded to {URL}"


def test_a_small_file_that_the_store_does_not_take_has_not_arrived(tmp_path, store, monkeypatch):
    """A store without the bucket says so as a disk does of a file that is gone."""
    run = started(tmp_path / "a")
    run.push()
    (tmp_path / "a" / "metrics.jsonl").write_text("1\n")

    def fail(file, url):
        raise FileNotFoundError(errno.ENOENT, "The specified bucket does not exist", url)

    monkeypatch.setattr(remote, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(remote, "upload", fail)
    assert run.end(exits.DONE) == exits.UNSAVED


def test_reading_takes_a_copy(tmp_path, store, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(mirror, "SCHEMES", ("memory",))
    run = started(tmp_path / "a")
    (tmp_path / "a" / "config.json").write_text(json.dumps({"steps": 3}))
    checkpoint(tmp_path / "a", 4)
    run.push()
    local = mirror.reading(URL)
    assert without_record(held(tmp_path / "a")) == without_record(held(type(tmp_path)(local)))
    (tmp_path / "a" / "config.json").unlink()
    monkeypatch.setattr(remote, "find", lambda url: {})
    with pytest.raises(ValueError, match="holds nothing that may be listed"):
        mirror.reading(URL)
    assert held(type(tmp_path)(local))["config.json"]
    assert mirror.reading(str(tmp_path)) == str(tmp_path)


def test_where_a_work_directory_may_be():
    assert not mirror.problems("workdir=", "/runs/a")
    (problem,) = mirror.problems("workdir=", "hf://datasets/a/b")
    assert problem.startswith("workdir=hf://datasets/a/b: a work directory is local, or in one of")

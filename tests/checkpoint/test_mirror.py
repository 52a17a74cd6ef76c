"""The copy of a work directory in a store: what is uploaded when, and what another start finds."""

import json

import pytest
from support import memory_store

from llmx.checkpoint import directory, mirror
from llmx.data import remote
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


def started(folder):
    made = mirror.Mirror(URL, folder, log=lambda line: None)
    made.pull()
    return made


def test_another_machine_finds_what_was_uploaded(tmp_path, store):
    first, second = tmp_path / "a", tmp_path / "b"
    run = started(first)
    assert held(first) == {}
    (first / "metrics.jsonl").write_text("1\n")
    (first / "owner.json").write_text("{}")
    (first / "config.tmp").write_text("half")
    checkpoint(first, 4)
    (first / "checkpoints" / "8.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    (first / "checkpoints" / "8.orbax-checkpoint-tmp" / "state" / "x").write_text("half")
    run.push()
    wanted = {"metrics.jsonl", "checkpoints/4/state/d/array", f"checkpoints/4/{directory.MARKER}"}
    assert objects(store).keys() == wanted
    started(second)
    assert held(second) == objects(store)
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
    for allowed in range(5):
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
        if allowed < 3:
            with pytest.raises(KeyboardInterrupt):
                run.push()
        else:
            run.push()
        monkeypatch.setattr(remote, "upload", original)
        other = tmp_path / f"b{allowed}"
        started(other)
        complete = directory.steps(other / "checkpoints")
        assert complete == ([4] if allowed >= 3 else [])
        if complete:
            assert held(other) == held(folder)
        else:
            assert held(other).keys() <= {"metrics.jsonl"}


def test_the_store_counts_not_what_a_machine_has_left(tmp_path, store):
    run = started(tmp_path / "a")
    checkpoint(tmp_path / "a", 4)
    (tmp_path / "a" / "metrics.jsonl").write_text("of step 4")
    run.push()
    checkpoint(tmp_path / "a", 8)  # was not uploaded when the run was killed
    (tmp_path / "a" / "metrics.jsonl").write_text("of step 8")
    again = started(tmp_path / "a")
    assert directory.steps(tmp_path / "a" / "checkpoints") == [4]
    assert held(tmp_path / "a") == objects(store)
    assert objects(store)["metrics.jsonl"] == b"of step 4"
    (tmp_path / "a" / "metrics.jsonl").write_text("of step 9")
    again = started(tmp_path / "a")
    assert held(tmp_path / "a") == objects(store)
    assert not list((tmp_path / "a" / "checkpoints").glob("8*"))
    checkpoint(tmp_path / "a", 8)
    again.push()
    assert f"checkpoints/8/{directory.MARKER}" in objects(store)


def test_a_failed_upload_is_told_and_tried_again(tmp_path, store, monkeypatch):
    lines = []
    run = mirror.Mirror(URL, tmp_path / "a", log=lines.append)
    run.pull()
    checkpoint(tmp_path / "a", 4)
    monkeypatch.setattr(remote, "PAUSE_SECONDS", 0.0)

    def fail(file, url):
        raise OSError("503 slow down")

    with monkeypatch.context() as patch:
        patch.setattr(remote, "upload", fail)
        run.push()
        assert run.end(exits.DONE) == exits.UNSAVED
    assert "warning: memory://bucket/run is not up to date (503 slow down)" in lines[0]
    assert objects(store) == {}
    assert run.end(exits.DONE) == exits.DONE
    assert f"checkpoints/4/{directory.MARKER}" in objects(store)
    assert lines[-1] == f"uploaded to {URL}"


def test_reading_takes_a_copy(tmp_path, store, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(mirror, "SCHEMES", ("memory",))
    run = started(tmp_path / "a")
    (tmp_path / "a" / "config.json").write_text(json.dumps({"steps": 3}))
    checkpoint(tmp_path / "a", 4)
    run.push()
    local = mirror.reading(URL)
    assert held(tmp_path / "a") == held(type(tmp_path)(local))
    assert mirror.reading(str(tmp_path)) == str(tmp_path)


def test_where_a_work_directory_may_be():
    assert not mirror.problems("workdir=", "/runs/a")
    (problem,) = mirror.problems("workdir=", "hf://datasets/a/b")
    assert problem.startswith("workdir=hf://datasets/a/b: a work directory is local, or in one of")

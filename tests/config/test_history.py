"""What is on record of a run: its starts, what changed between them, and its rollbacks."""

import json
import pathlib
import shutil
from types import SimpleNamespace

import pytest

from llmx import config as config_lib
from llmx.config import history
from llmx.runtime import agreement


@pytest.fixture
def run(tmp_path):
    made = config_lib.default()
    made.workdir = str(tmp_path / "run")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    return made


def start(run, step=0):
    said = []
    history.record_start(run, resumed_from=step, log=said.append)
    return said


def test_starts_have_what_changed(run, capsys):
    assert not start(run)
    run.optimizer.learning_rate, run.mesh.fsdp = 0.5, 4
    start(run, 20)
    start(run, 30)
    first, second, third = history.read(run.workdir)
    assert first["config"] == config_lib.to_json(run) | {
        "optimizer": first["config"]["optimizer"], "mesh": first["config"]["mesh"],
    }  # fmt: skip
    assert second["changed"] == {"optimizer.learning_rate": [3e-4, 0.5], "mesh.fsdp": [1, 4]}
    assert third["changed"] == {} and third["resumed_from"] == 30
    assert history.last_config(run.workdir) == config_lib.to_json(run)
    assert {"llmx", "jax", "jaxlib"} <= second["versions"].keys()
    assert history.main([run.workdir]) == 0
    told = capsys.readouterr().out
    assert "start at step 20: 1 processes" in told
    assert "    optimizer.learning_rate: 0.0003 -> 0.5" in told


def test_lines_that_are_torn_or_lost(run):
    """A torn line is left out; where changes are lost, the whole config is written again."""
    start(run)
    run.seed = 1
    start(run)
    path = pathlib.Path(run.workdir, history.FILE)
    first, second = path.read_text().splitlines()
    path.write_text(first + "\n" + second[:40])  # killed while it wrote
    run.seed = 2
    start(run)
    kinds = [record["kind"] for record in history.read(run.workdir)]
    assert kinds == ["start", "start"] and path.read_text().endswith("\n")
    assert history.last_config(run.workdir)["seed"] == 2
    path.write_text(json.dumps({"kind": "start", "changed": {}}) + "\n[]\nnot json\n")
    assert history.last_config(run.workdir) is None
    start(run)
    assert "config" in list(history.read(run.workdir))[-1]


def save(run, step, told):
    """As after a complete checkpoint, whose folder lies there."""
    (pathlib.Path(run.workdir) / "checkpoints" / str(step)).mkdir(parents=True)
    history.noting_saves(run.workdir, lambda *saved: told.append(saved), print)(step)


def lose_checkpoints(run):
    shutil.rmtree(pathlib.Path(run.workdir) / "checkpoints")


def test_a_run_that_lost_its_checkpoints_does_not_begin_anew(run):
    told = []
    start(run)
    for step in (4, 8):
        save(run, step, told)
    assert told == [(run.workdir, 4), (run.workdir, 8)] and history.last_saved(run.workdir) == 4
    history.require_checkpoints(run)
    metrics = pathlib.Path(run.workdir, "metrics.jsonl")
    metrics.write_text('{"kind": "train", "step": 11}\n')
    lose_checkpoints(run)
    for restored in (None, 0):
        with pytest.raises(ValueError, match="no checkpoint") as refused:
            history.require_checkpoints(run, restored)
        for words in ("step 4,", "up to 11", "another --workdir", "move history.jsonl away"):
            assert words in str(refused.value)
    pathlib.Path(run.workdir, history.FILE).unlink()
    history.require_checkpoints(run)  # begun anew on purpose


def test_a_run_that_saved_nothing_yet_begins_anew(run):
    start(run)
    lose_checkpoints(run)
    history.require_checkpoints(run)
    history.require_checkpoints(run, 0)


@pytest.mark.parametrize("at, lost", [([0], False), ([4], True), ([4, 0], False), (None, True)])
def test_a_rollback_to_the_beginning_loses_no_checkpoints(run, at, lost):
    """They are set aside, and a launch that is killed then begins anew; a start that resumed says
    as well as a record of a save that there was a checkpoint."""
    start(run)
    start(run, 8)
    history.append(run.workdir, history.ROLLBACK, {"at": at}, log=print)
    assert bool(history.last_saved(run.workdir)) == lost
    save(run, 2, [])
    lose_checkpoints(run)
    with pytest.raises(ValueError, match="step 8" if lost else "step 2"):
        history.require_checkpoints(run)


def test_what_the_local_tier_may_have_is_asked_for_first(run):
    start(run, 8)
    run.checkpoint.local_directory = "/dev/shm/tier"
    (pathlib.Path(run.workdir) / "checkpoints" / "run_id").write_text("f00d")
    history.require_checkpoints(run)
    history.require_checkpoints(run, 8)
    with pytest.raises(ValueError, match="no checkpoint"):
        history.require_checkpoints(run, 0)
    lose_checkpoints(run)  # and with it what ties the tier's files to the run
    with pytest.raises(ValueError, match="no checkpoint"):
        history.require_checkpoints(run)


def test_what_cannot_be_written_is_a_warning(run, tmp_path):
    (tmp_path / "run" / history.FILE).mkdir()
    (said,) = start(run)
    assert said.startswith("warning: ") and "the run goes on" in said
    assert history.main([str(tmp_path)]) == 2


@pytest.mark.parametrize("rest", [
    '"changed": [1]', '"changed": {"a.b": 3}', '"versions": "x"', '"config": 7',
    '"config": ' + '{"a": ' * 5000 + "1" + "}" * 5000,
])  # fmt: skip
def test_records_of_something_else_are_a_warning(run, rest, capsys):
    start(run)
    path = pathlib.Path(run.workdir, history.FILE)
    path.write_text(path.read_text() + '{"kind": "start", ' + rest + "}\n")
    run.seed = 3
    (said,) = start(run)
    assert said == f"warning: {path}: line 2 is no record, and left out: delete what is damaged"
    assert list(history.read(run.workdir))[-1]["changed"] == {"seed": [0, 3]}
    assert history.main([run.workdir]) == 0
    out, error = capsys.readouterr()
    assert out.count("start at step 0") == 2 and error == f"{said}\n"


def test_changes_of_what_the_config_lacks_begin_it_anew(run):
    start(run)
    path = pathlib.Path(run.workdir, history.FILE)
    path.write_text(path.read_text() + '{"kind": "start", "changed": {"seed.x": [1, 2]}}\n')
    assert not start(run)
    assert "config" in list(history.read(run.workdir))[-1]


def with_rollbacks(run, **values):
    given = config_lib.default()
    given.workdir = run.workdir
    for name, value in values.items():
        config_lib.set_value(given, name.replace("__", "."), value)
    said = []
    found = history.with_rollbacks(given, said.append, agreement.Peers())
    return found.rollback.at, found.rollback.skipped, "\n".join(said)


def test_recorded_rollbacks_count(run):
    assert with_rollbacks(run) == ((), (), "")
    run.rollback.at, run.rollback.skipped = (4, 8), (2, 3)
    config_lib.save_run(run)
    at, skipped, said = with_rollbacks(run)
    assert (at, skipped) == ((4, 8), (2, 3)) and "rollback.at=(4, 8)" in said
    # By hand, as many: those of the command line.
    given = dict(rollback__at=(5, 6), rollback__skipped=(1, 1))
    assert with_rollbacks(run, **given)[:2] == ((5, 6), (1, 1))
    assert with_rollbacks(run, rollback__at=(4,), rollback__skipped=(2,))[0] == (4, 8)
    # Back to before the second: it has not happened.
    at, skipped, said = with_rollbacks(run, resume_step=6)
    assert (at, skipped) == ((4,), (2,)) and "rollback to step 8 is forgotten" in said


def test_process_0_says_which_rollbacks_there_were(run):
    """Another process may see an older file on a shared file system."""
    run.rollback.at, run.rollback.skipped = (4,), (2,)
    config_lib.save_run(run)
    told = SimpleNamespace(index=1, broadcast=lambda name, text: "[[4, 8], [2, 3]]")
    given = config_lib.default()
    given.workdir = run.workdir
    assert history.with_rollbacks(given, print, told).rollback.at == (4, 8)


def test_the_history_serves_where_the_config_is_lost(run, tmp_path):
    record = {"at": [4], "skipped": [2], "text": "back to step 4"}
    history.append(run.workdir, history.ROLLBACK, record, log=print)
    (tmp_path / "run" / "config.json").write_text('{"rollback": {"at": [1')
    assert with_rollbacks(run)[:2] == ((4,), (2,))
    (tmp_path / "run" / "checkpoints").rmdir()  # begun anew
    assert with_rollbacks(run)[0] == ()

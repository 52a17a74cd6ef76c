"""goodput.py: the seconds of a run over its launches; what a kill loses, and what a gap costs."""

import json

import pytest

from llmx.runtime import goodput
from llmx.runtime.goodput import Goodput
from llmx.runtime.metrics import MetricsConfig, Reporter
from llmx.runtime.records import read_records


class Launch:
    """A launch on a clock of its own, one second a step."""

    def __init__(self, workdir, *, at, start_step=0, compile_seconds=20.0):
        self.now, self.began, self.step = at, at, start_step
        self.phases = {"launch": 0.0, "compile": 0.0, "step": 0.0, "data wait": 0.0, "save": 0.0}
        self.count = Goodput(workdir, start_step=start_step, began=at, clock=lambda: self.now)
        self.spend("launch", 10.0)
        self.spend("compile", compile_seconds)

    def spend(self, phase, seconds):
        self.phases[phase] += seconds
        self.now += seconds

    def train(self, steps):
        for _ in range(steps):
            self.spend("data wait", 0.25)
            self.spend("step", 0.75)
            self.step += 1
            self.count.update(self.step, self.phases)
        self.count.write()


def killed_run(workdir):
    """40 steps, a save at step 30, a kill; a minute later it goes on from 30 to 50."""
    first = Launch(workdir, at=1000.0)
    first.train(30)
    first.spend("save", 5.0)
    first.train(10)
    first.now += 3.0  # killed in step 41: nobody knows of these seconds
    second = Launch(workdir, at=first.now + 60.0, start_step=30)
    second.train(20)
    return first, second


def test_what_comes_after_the_last_step_is_not_lost(tmp_path):
    first = Launch(tmp_path, at=1000.0)
    first.train(4)
    first.spend("step", 2.0)  # a plot, for example
    first.count.update(4, first.phases)
    first.count.write()
    second = Launch(tmp_path, at=1100.0, start_step=4)
    second.train(1)
    assert second.count.seconds()["lost"] == 0.0


def test_a_launch_by_itself(tmp_path):
    first = Launch(tmp_path, at=1000.0)
    first.train(4)
    first.now += 2.0
    first.count.update(4, first.phases)
    assert first.count.seconds() == {
        "useful": 3.0, "lost": 0.0, "compile": 20.0, "data wait": 1.0, "checkpoint": 0.0,
        "evaluation": 0.0, "start": 10.0, "restart": 0.0, "other": 2.0,
    }  # fmt: skip
    assert first.count.text() == (
        "goodput: 8.3% of 36 s in 1 launch; compile 55.6%, start 27.8%, other 5.6%, data wait 2.8%"
    )


def test_a_kill_loses_the_steps_that_are_taken_again(tmp_path):
    _, second = killed_run(tmp_path)
    seconds = second.count.seconds()
    assert seconds == pytest.approx({
        "useful": 0.75 * 50, "lost": 0.75 * 10, "compile": 40.0, "data wait": 0.25 * 60,
        "checkpoint": 5.0, "evaluation": 0.0, "start": 10.0, "restart": 3.0 + 60.0 + 10.0,
        "other": 0.0,
    })  # fmt: skip
    assert sum(seconds.values()) == pytest.approx(second.now - 1000.0)  # all of it, once
    scalars = second.count.scalars()
    assert scalars["launches"] == 2 and scalars["total_seconds"] == pytest.approx(188.0)
    assert sum(v for k, v in scalars.items() if k.endswith("_share")) == pytest.approx(1.0)


def test_three_launches_that_lose_the_same_steps_each(tmp_path):
    _, second = killed_run(tmp_path)
    third = Launch(tmp_path, at=second.now, start_step=30)
    third.train(20)
    assert third.count.seconds()["lost"] == pytest.approx(0.75 * (10 + 20))
    assert third.count.seconds()["useful"] == pytest.approx(0.75 * 50)


def test_step_zero_begins_anew(tmp_path):
    killed_run(tmp_path)
    anew = Launch(tmp_path, at=5000.0)
    anew.train(1)
    assert anew.count.launches == 1 and sum(anew.count.seconds().values()) == 31.0


def test_a_kill_before_the_first_save_loses_all_steps(tmp_path):
    first = Launch(tmp_path, at=0.0)
    first.train(8)
    second = Launch(tmp_path, at=first.now + 5.0)
    second.train(8)
    seconds = second.count.seconds()
    assert (seconds["lost"], seconds["useful"], seconds["restart"]) == (6.0, 6.0, 15.0)


def test_the_meter_records_and_ends_nothing(tmp_path):
    (tmp_path / (goodput.FILE.replace(".json", ".tmp"))).mkdir()  # it cannot be written
    config, printed = MetricsConfig(tensorboard=False, progress="off"), []
    with Reporter(
        tmp_path, config, total_steps=3, tokens_per_step=1, log=printed.append
    ) as reporter:
        phases = {"launch": 1.0, "compile": 2.0, "step": 5.0}
        meter = goodput.Meter(tmp_path, lambda: phases, reporter, start_step=0)
        for step in (1, 2, 3):
            meter.step(step)
        meter.end(3, done=True)
    (record,) = read_records(tmp_path / "metrics.jsonl")
    assert (record["kind"], record["step"], record["launches"]) == ("goodput", 3, 1.0)
    assert record["useful_share"] == pytest.approx(5 / 8, rel=0.05)
    assert printed[0].startswith("warning: goodput.json: Is a directory")
    assert printed[1].startswith("goodput: 6") and len(printed) == 2


def test_a_rollback_in_the_same_process_counts_nothing_twice(tmp_path):
    launch = Launch(tmp_path, at=1000.0)
    launch.spend("save", 1.0)
    launch.train(40)
    launch.now += 2.0  # that nobody measured
    launch.phases["restore"] = 0.0
    launch.spend("restore", 4.0)
    launch.count = Goodput(tmp_path, start_step=30, began=launch.began, clock=lambda: launch.now)
    launch.step = 30
    launch.train(10)
    seconds = launch.count.seconds()
    assert launch.count.launches == 1 and sum(seconds.values()) == launch.now - launch.began
    assert (seconds["useful"], seconds["lost"], seconds["restart"]) == (30.0, 7.5, 4.0)
    assert (seconds["compile"], seconds["start"], seconds["other"]) == (20.0, 10.0, 2.0)


def test_marks_are_bounded_and_still_tell(tmp_path):
    first = Launch(tmp_path, at=0.0)
    first.train(3000)
    assert (tmp_path / goodput.FILE).stat().st_size < 16_384
    second = Launch(tmp_path, at=first.now, start_step=1234)
    assert second.count.seconds()["useful"] == pytest.approx(0.75 * 1234)


@pytest.mark.parametrize(
    "damage",
    ["", "{", "[]", "\0" * 50, '{"seconds": 3}', "[" * 99_999, '{"seconds": {}, "marks": []}'],
)
def test_a_damaged_file_is_no_error(tmp_path, damage):
    (tmp_path / goodput.FILE).write_text(damage)
    assert Goodput(tmp_path, start_step=5, began=0.0).launches == 1


def test_values_that_make_no_sense_are_not_added(tmp_path):
    Launch(tmp_path, at=0.0).train(2)
    path = tmp_path / goodput.FILE
    whole = json.loads(path.read_text())
    for change in ({"alive": "x"}, {"launches": None}, {"phases": 3}, {"marks": [[3, 1], [1, 0]]},
                   {"seconds": whole["seconds"] | {"useful": "nan"}}):  # fmt: skip
        path.write_text(json.dumps(whole | change))
        assert Goodput(tmp_path, start_step=5, began=0.0).launches == 1, change


def test_a_sign_of_life_is_due_now_and_then(tmp_path):
    now = [0.0]
    count = Goodput(tmp_path, start_step=0, began=0.0, clock=lambda: now[0])
    assert not count.is_due()
    now[0] = goodput.WRITE_EVERY
    assert count.is_due()
    count.write()
    assert not count.is_due()


@pytest.mark.parametrize(("done", "restart"), [(True, 0.0), (False, 1000.0)])
def test_nobody_waits_after_the_end_of_a_run(tmp_path, done, restart):
    now = [100.0]
    first = goodput.Goodput(tmp_path, start_step=0, began=100.0, clock=lambda: now[0])
    first.done = done
    first.update(3, {"step": 5.0, "save": 1.0})
    first.write()
    now[0] += 1000
    again = goodput.Goodput(tmp_path, start_step=3, began=now[0], clock=lambda: now[0])
    assert again.seconds()["restart"] == restart

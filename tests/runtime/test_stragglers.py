"""stragglers.py: the process that others wait for is named, and nobody where all is well."""

import pytest

from llmx.runtime import stragglers


def beats(*places, **more):
    """Heartbeats of (phase, step, seconds); more: a list of values by name."""
    found = [
        {
            "process": number,
            "host": "abcd"[number],
            "phase": phase,
            "step": step,
            "phase_seconds": seconds,
        }
        for number, (phase, step, seconds) in enumerate(places)
    ]
    for name, values in more.items():
        for beat, value in zip(found, values, strict=True):
            beat[name] = value
    return found


WAIT = ("step", 120, 6.0)


@pytest.mark.parametrize(
    "places, text",
    [
        ([WAIT, WAIT, ("data wait", 120, 6.1), WAIT],
         "process 2 (host c) is in 'data wait' of step 120 for 6.1 s, the others wait"),
        ([WAIT, ("step", 119, 9.0), WAIT],
         "process 1 (host b) is in 'step' of step 119 for 9.0 s, the others wait"),
        ([("save", 120, 30.0), WAIT],
         "process 0 (host a) is in 'save' of step 120 for 30.0 s, the others wait"),
        # The longest one of two.
        ([WAIT, WAIT, ("data wait", 120, 5.5), ("save", 120, 7.0)],
         "process 3 (host d) is in 'save' of step 120 for 7.0 s, the others wait"),
        ([("compile", 0, 99.0), ("compile", 0, 99.0), ("restore", 0, 99.0)],
         "process 2 (host c) is in 'restore' of step 0 for 99.0 s, the others wait"),
    ],
)  # fmt: skip
def test_the_one_that_others_wait_for(places, text):
    assert stragglers.find(beats(*places)).text == text


@pytest.mark.parametrize(
    "places",
    [
        [],
        [("data wait", 7, 99.0)],  # alone
        [WAIT, WAIT],  # the devices are slow, or nobody knows
        [("step", 120, 1.0), ("data wait", 120, 1.0)],  # not long
        # It came there long ago, the others wait since now.
        [("step", 120, 0.2), ("step", 120, 0.3), ("data wait", 120, 40.0)],
        # Most are there: none of them is the straggler.
        [("data wait", 120, 9.0), ("data wait", 120, 9.0), ("data wait", 120, 9.0), WAIT],
    ],
)
def test_nobody(places):
    assert stragglers.find(beats(*places)) is None


def test_slow_but_moving():
    moving = [("step", 5, 0.1)] * 4
    found = stragglers.find(beats(*moving, data_per_step=[0.02, 0.41, 0.02, 0.03]))
    assert found.text == (
        "process 1 (host b) takes 0.41 s of each step waiting for data, the others 0.02 s"
    )
    assert stragglers.find(beats(*moving, data_per_step=[0.001, 0.04, 0.001, 0.001])) is None
    assert stragglers.find(beats(*moving, data_per_step=[1.0, 2.0, 1.0, 1.0])) is None


class Watched:
    """A watch on a clock of its own."""

    def __init__(self):
        self.said, self.now = [], 0.0
        self.watch = stragglers.Watch(log=self.said.append, clock=lambda: self.now)

    def look(self, *places, **more):
        return self.watch.look(beats(*places, **more))


def test_the_same_one_is_told_once_a_minute():
    watched = Watched()
    for watched.now in range(130):
        more = {"beat": [watched.now] * 2}
        watched.look(WAIT, ("data wait", 120, 6.1 + watched.now), **more)
    assert len(watched.said) == 3 and "for 66.1 s" in watched.said[1]
    watched.now += 1
    watched.look(("save", 120, 30.0), WAIT, beat=[999, 999])
    assert len(watched.said) == 4


def test_a_stopped_process_is_told_by_its_silence():
    watched = Watched()
    for watched.now in range(8):
        watched.look(("step", 9, 1.0), ("step", 9, 1.0), beat=[watched.now, min(watched.now, 2)])
    assert watched.said == [
        "process 1 (host b) has sent no heartbeat for 5.0 s, its last was in 'step' of step 9"
    ]
    for watched.now in range(8, 16):  # of all processes: the store, or this process, was away
        watched.look(("step", 9, 1.0), ("step", 9, 1.0), beat=[7, 2])
    assert len(watched.said) == 1


def test_rates_come_from_what_processes_have_waited_so_far():
    watched = Watched()
    for watched.now in range(40):
        step = 2 * watched.now
        places = [("step", step, 0.1)] * 3
        waited = [0.01 * step, 0.5 * step, 0.02 * step]
        watched.look(*places, beat=[watched.now] * 3, data_seconds=waited)
    assert watched.said == [
        "process 1 (host b) takes 0.5 s of each step waiting for data, the others 0.015 s"
    ]

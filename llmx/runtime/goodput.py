"""Goodput: the share of a run's time, over all its launches, that went into steps that count.

WORKDIR/goodput.json holds the seconds of the run by what they were spent on, so that a launch goes
on counting where the last one ended, or was killed:

- useful: steps that are part of the run's state; lost: steps that were taken again, because a
  restore began before them;
- compile, data wait, checkpoint (the loop waits for a save), evaluation (and samples);
- start: of the first launch until its first step, without compilation; restart: of each later one
  the same, together with the time since the last sign of life of the launch before;
- other: the rest, which nobody measured.

They add up to the time from the first launch until now, without that between the end of a run and a
launch after it. The word is that of Google Cloud ("Goodput
metric as measure of ML productivity", 2024).
"""

import itertools
import json
import os
import pathlib
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from llmx.runtime.auxiliary import Auxiliary
from llmx.runtime.metrics import Reporter
from llmx.runtime.records import number

FILE = "goodput.json"
KINDS = (
    "useful", "lost", "compile", "data wait", "checkpoint", "evaluation", "start", "restart",
    "other",
)  # fmt: skip
# Phases of `progress` -> what their seconds are spent on, once the first step has begun.
SPENT_ON = {
    "step": "useful", "compile": "compile", "data wait": "data wait", "save": "checkpoint",
    "evaluation": "evaluation", "sample": "evaluation",
}  # fmt: skip
MOST_MARKS = 256  # (step, useful seconds) kept to know what a restore loses
WRITE_EVERY = 5.0  # seconds between signs of life
RECORD_EVERY = 60.0  # seconds between records in metrics.jsonl


class Goodput:
    """Counts the seconds of one run; of each launch one object, in the first process.

    `update` with the seconds by phase whenever there is something new, `write` after it. Errors of
    the file are raised: what it says is nothing that a run needs.
    """

    def __init__(
        self, workdir: str | os.PathLike, *, start_step: int, began: float,
        clock: Callable[[], float] = time.time,
    ):  # fmt: skip
        """Continues with what earlier launches wrote.

        start_step: of the state that was restored; 0 begins a new run, unless the earlier launches
        never came to a save. began: Unix seconds at which this process started.
        """
        self._path, self._clock, self._began = pathlib.Path(workdir) / FILE, clock, began
        self._before = dict.fromkeys(KINDS, 0.0)  # of what was counted by earlier objects
        self._from, self._phases_before, self._phases = began, {}, {}
        self._marks: list[tuple[int, float]] = [(start_step, 0.0)]
        self._seconds, self._step, self._written = {}, start_step, began
        self.launches, self._is_first = 1, True
        self.done = False  # whether the run has reached its last step
        earlier = read(self._path)
        if earlier is not None and (start_step > 0 or not earlier["seconds"]["checkpoint"]):
            self._continue(earlier, start_step)

    def _continue(self, earlier: dict[str, Any], start_step: int):
        self._before, self._is_first = earlier["seconds"], False
        self.launches = earlier["launches"] + 1
        same = earlier["process"] == _process() and abs(earlier["began"] - self._began) < 2
        if same:  # this process went back to a checkpoint by itself
            self.launches, self._from = earlier["launches"], earlier["alive"]
            self._phases_before = earlier["phases"]
        else:
            # After a run that had reached its end nobody waited for the next launch.
            idle = 0.0 if earlier["done"] else max(0.0, self._began - earlier["alive"])
            self._before["restart"] += idle
        marks = [mark for mark in earlier["marks"] if mark[0] <= start_step]
        kept = _interpolate(earlier["marks"], start_step)
        lost = max(0.0, self._before["useful"] - kept)
        self._before["useful"] -= lost
        self._before["lost"] += lost
        self._marks = [*marks, (start_step, kept)]

    def update(self, step: int, phases: Mapping[str, float]):
        """Takes the seconds by phase since this process started; `step`: steps taken so far."""
        found = dict.fromkeys(KINDS, 0.0)
        before_steps = "start" if self._is_first else "restart"
        self._phases = dict(phases)
        for phase, seconds in phases.items():
            kind = SPENT_ON.get(phase, before_steps)
            found[kind] += seconds - self._phases_before.get(phase, 0.0)
        found["other"] = max(0.0, self._clock() - self._from - sum(found.values()))
        self._seconds, self._step = found, step
        useful = self._before["useful"] + found["useful"]
        if step == self._marks[-1][0]:  # what came after the last step is not taken again
            self._marks[-1] = (step, useful)
        elif step > self._marks[-1][0]:
            self._marks.append((step, useful))
            if len(self._marks) > MOST_MARKS:  # the recent ones stay as they are
                half = MOST_MARKS // 2
                self._marks = self._marks[:half:2] + self._marks[half:]

    def seconds(self) -> dict[str, float]:
        """By kind, over all launches."""
        return {kind: self._before[kind] + self._seconds.get(kind, 0.0) for kind in KINDS}

    def scalars(self) -> dict[str, float]:
        """For metrics: seconds and shares by kind, and the number of launches."""
        seconds = self.seconds()
        total = sum(seconds.values()) or 1.0
        name = lambda kind: kind.replace(" ", "_")  # noqa: E731
        shares = {f"{name(kind)}_share": value / total for kind, value in seconds.items()}
        found = {f"{name(kind)}_seconds": value for kind, value in seconds.items()}
        return {"total_seconds": total, **found, **shares, "launches": float(self.launches)}

    def text(self) -> str:
        """One line for the end of a run."""
        seconds = self.seconds()
        total = sum(seconds.values()) or 1.0
        rest = [(value, kind) for kind, value in seconds.items() if kind != "useful"]
        shares = [f"{kind} {value / total:.1%}" for value, kind in sorted(rest)[::-1] if value]
        launches = "1 launch" if self.launches == 1 else f"{self.launches} launches"
        useful = f"{seconds['useful'] / total:.1%} of {total:,.0f} s in {launches}"
        return f"goodput: {useful}; {', '.join(shares)}"

    def is_due(self) -> bool:
        """Whether the last sign of life is old."""
        return self._clock() - self._written >= WRITE_EVERY

    def write(self):
        """Writes the file, a sign of life."""
        self._written = self._clock()
        document = {
            "launches": self.launches, "step": self._step, "alive": self._written,
            "seconds": self.seconds(), "marks": self._marks, "process": _process(),
            "began": self._began, "phases": self._phases, "done": self.done,
        }  # fmt: skip
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps(document) + "\n")
        temporary.replace(self._path)


class Meter:
    """Keeps the goodput of a run in its file and in metrics, in the first process.

    It never ends a run. Call `step` after each step, `end` once.
    """

    def __init__(
        self, workdir: str | os.PathLike, phases: Callable[[], Mapping[str, float]],
        reporter: Reporter, *, start_step: int,
    ):  # fmt: skip
        """phases: gives the seconds by phase since this process started."""
        self._phases, self._reporter = phases, reporter
        self._recorded = time.monotonic()
        self._auxiliary = Auxiliary(FILE, log=reporter.note)
        began = time.time() - sum(phases().values())
        self._count = Goodput(workdir, start_step=start_step, began=began)
        self._update(start_step)

    def step(self, step: int):
        """Takes note of a step that is done."""
        if self._reporter.writes and self._count.is_due():
            self._update(step)
            if time.monotonic() - self._recorded >= RECORD_EVERY:
                self._recorded = time.monotonic()
                self._reporter.event("goodput", step, self._count.scalars())

    def end(self, step: int, *, done: bool):
        """Records the goodput and shows it in a line; `done`: the run has no more steps."""
        if self._reporter.writes:
            self._count.done = done
            self._update(step)
            self._reporter.event("goodput", step, self._count.scalars())
            self._reporter.note(self._count.text())

    def close(self, step: int):
        """Writes the file, for a later launch, or for this one where it goes back to a step."""
        self._update(step)

    def _update(self, step: int):
        if self._reporter.writes:
            self._count.update(step, self._phases())
            self._auxiliary(self._count.write)


def read(path: pathlib.Path) -> dict[str, Any] | None:
    """What an earlier launch wrote; None where there is nothing, or nothing that makes sense."""
    try:
        document = json.loads(path.read_text())
        seconds = {kind: number(document["seconds"][kind]) for kind in KINDS}
        marks = [(int(step), float(useful)) for step, useful in document["marks"]]
        alive, launches = float(document["alive"]), int(document["launches"])
        phases = {str(name): number(value) for name, value in document["phases"].items()}
        process, began = str(document["process"]), float(document["began"])
        done = document.get("done") is True
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError,
            OverflowError):  # fmt: skip
        return None
    whole = all(value >= 0 for value in seconds.values()) and alive >= 0 and launches >= 1
    if not whole or not marks or marks != sorted(marks):
        return None
    return {
        "seconds": seconds, "marks": marks, "alive": alive, "launches": launches,
        "phases": phases, "process": process, "began": began, "done": done,
    }  # fmt: skip


def _process() -> str:
    return f"{os.getpid()} on {socket.gethostname()}"


def _interpolate(marks: list[tuple[int, float]], step: int) -> float:
    """Useful seconds when that many steps were taken."""
    for (low, begin), (high, end) in itertools.pairwise(marks):
        if low <= step < high:
            return begin + (end - begin) * (step - low) / (high - low)
    return marks[0][1] if step < marks[0][0] else marks[-1][1]

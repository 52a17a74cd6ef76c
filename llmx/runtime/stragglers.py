"""Which process the others wait for, from the heartbeats of all of them.

A process that is blocked in a step's collective waits for one that is elsewhere: in data, in a
save, or a step behind. One that moves but is slow shows by the seconds that its steps wait for
data.
"""

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

PATIENCE = 5.0  # seconds in one place before a process is said to hold up the others
FACTOR, LEAST = 3.0, 0.05  # slow: so many times the others' median, and so many seconds above it
TELL_AGAIN = 60.0  # seconds until the same straggler is told again
LOOK_EVERY, USUAL_SILENCE = 1.0, 3.0  # seconds: between looks; between heartbeats, at most
STEPS = 10  # that a rate is taken over
BLOCKED = "step"  # the phase in which a process waits for the others


class Straggler(NamedTuple):
    """A process that holds up the others."""

    process: int
    what: str  # its phase, or the seconds that it takes more of
    text: str  # one line


def find(
    heartbeats: Sequence[Mapping[str, Any]], *, patience: float = PATIENCE
) -> Straggler | None:
    """The process that the others wait for, or None.

    Args:
      heartbeats: of each process "process", "host", "phase", "step", "phase_seconds" (in this
        phase of this step); and, where known, "silent_seconds" (since its last heartbeat) and
        "data_per_step" (seconds).
      patience: seconds in one place that are no reason to speak.
    """
    return _silent(heartbeats, patience) or _stuck(heartbeats, patience) or _slow(heartbeats)


def _silent(heartbeats: Sequence[Mapping[str, Any]], patience: float) -> Straggler | None:
    """The process that is stopped, or whose host is."""
    silent = [beat for beat in heartbeats if beat.get("silent_seconds", 0) >= patience]
    if not silent or len(silent) == len(heartbeats):
        return None
    beat = max(silent, key=lambda beat: beat["silent_seconds"])
    text = f"{_name(beat)} has sent no heartbeat for {beat['silent_seconds']:.1f} s"
    last = f"its last was in {beat['phase']!r} of step {beat['step']}"
    return Straggler(beat["process"], "silent", f"{text}, {last}")


def _stuck(heartbeats: Sequence[Mapping[str, Any]], patience: float) -> Straggler | None:
    """The process in a place of its own, where the others are blocked."""
    place = lambda beat: (beat["step"], beat["phase"])  # noqa: E731
    places = Counter(map(place, heartbeats))
    if len(places) < 2:
        return None
    behind = min(beat["step"] for beat in heartbeats)
    candidates = [beat for beat in heartbeats if beat["step"] == behind]
    # In the same step, those in the collective wait for those that are not.
    candidates = [beat for beat in candidates if beat["phase"] != BLOCKED] or candidates
    rarest = min(places[place(beat)] for beat in candidates)
    candidates = [beat for beat in candidates if places[place(beat)] == rarest]
    beat = max(candidates, key=lambda beat: beat["phase_seconds"])
    waiting = [other for other in heartbeats if place(other) != place(beat)]
    # It is waited for since it came here, or since the last of the others got there.
    seconds = min(beat["phase_seconds"], max(other["phase_seconds"] for other in waiting))
    if 2 * len(waiting) < len(heartbeats) or seconds < patience:
        return None
    where = f"{_name(beat)} is in {beat['phase']!r} of step {beat['step']}"
    text = f"{where} for {beat['phase_seconds']:.1f} s, the others wait"
    return Straggler(beat["process"], beat["phase"], text)


def _slow(heartbeats: Sequence[Mapping[str, Any]]) -> Straggler | None:
    """The process that waits far longer for its data in each step than the others."""
    name = "data_per_step"
    measured = [beat for beat in heartbeats if math.isfinite(beat.get(name, math.nan))]
    if len(measured) < 2:
        return None
    beat = max(measured, key=lambda beat: beat[name])
    usual = statistics.median(other[name] for other in measured if other is not beat)
    if beat[name] <= max(FACTOR * usual, usual + LEAST):
        return None
    text = f"{_name(beat)} takes {beat[name]:.3g} s of each step waiting for data"
    return Straggler(beat["process"], name, f"{text}, the others {usual:.3g} s")


def _name(beat: Mapping[str, Any]) -> str:
    return f"process {beat['process']} (host {beat['host']})"


class Watch:
    """Tells of stragglers while a run goes on, of the same one once in a while.

    Give it the heartbeats of all processes as `agreement.Peers` has them: with "beat", a number
    that grows, and "data_seconds", waited so far.
    """

    def __init__(
        self, *, log: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ):  # fmt: skip
        self._log, self._clock, self._looked = log, clock, -math.inf
        self._told: dict[tuple[int, str], float] = {}
        self._beats: dict[int, tuple[int, float]] = {}  # process -> its last beat, seen when
        self._began: dict[int, tuple[int, float]] = {}  # process -> step, data seconds
        self._rates: dict[int, float] = {}  # process -> data seconds per step

    def look(self, heartbeats: Sequence[Mapping[str, Any]]) -> Straggler | None:
        """The straggler, if there is one; logged where it was not lately."""
        now = self._clock()
        if now - self._looked < LOOK_EVERY:
            return None
        self._looked = now
        found = find([self._measured(beat, now) for beat in heartbeats if "phase" in beat])
        if found is not None and now - self._told.get(found[:2], -math.inf) >= TELL_AGAIN:
            self._told[found[:2]] = now
            self._log(found.text)
        return found

    def _measured(self, beat: Mapping[str, Any], now: float) -> dict[str, Any]:
        """The heartbeat, with what follows from the earlier ones of its process."""
        process, number = beat["process"], beat.get("beat", 0)
        if self._beats.get(process, (None, now))[0] != number:
            self._beats[process] = number, now
        waited = beat.get("data_seconds", 0.0)
        step, before = self._began.setdefault(process, (beat["step"], waited))
        if beat["step"] - step >= STEPS:
            self._rates[process] = (waited - before) / (beat["step"] - step)
            self._began[process] = beat["step"], waited
        silent = now - self._beats[process][1]
        return {
            **beat, "silent_seconds": silent if silent > USUAL_SILENCE else 0.0,
            "data_per_step": self._rates.get(process, math.nan),
        }  # fmt: skip

"""Which process the others wait for, from the heartbeats of all of them.

A process that is blocked in a step's collective waits for one that is elsewhere: in data, in a
save, or a step behind. One that moves but is slow shows by its seconds on the host in every step.
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
      heartbeats: of each process "process", "host", "phase", "step", "seconds" (in this phase of
        this step); and, where measured, "host_seconds" and "data_seconds" per step.
      patience: seconds in one place that are no reason to speak.
    """
    return _stuck(heartbeats, patience) or _slow(heartbeats)


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
    beat = max(candidates, key=lambda beat: beat["seconds"])
    waiting = [other for other in heartbeats if place(other) != place(beat)]
    # It is waited for since it came here, or since the last of the others got there.
    seconds = min(beat["seconds"], max(other["seconds"] for other in waiting))
    if 2 * len(waiting) < len(heartbeats) or seconds < patience:
        return None
    text = (
        f"{_name(beat)} is in {beat['phase']!r} of step {beat['step']} for {beat['seconds']:.1f} s"
    )
    return Straggler(beat["process"], beat["phase"], f"{text}, the others wait")


def _slow(heartbeats: Sequence[Mapping[str, Any]]) -> Straggler | None:
    """The process with far more seconds of its own in each step than the others."""
    for name, words in (("data_seconds", "waiting for data"), ("host_seconds", "on the host")):
        measured = [beat for beat in heartbeats if math.isfinite(beat.get(name, math.nan))]
        if len(measured) < 2:
            continue
        beat = max(measured, key=lambda beat: beat[name])
        usual = statistics.median(other[name] for other in measured if other is not beat)
        if beat[name] > max(FACTOR * usual, usual + LEAST):
            text = f"{_name(beat)} takes {beat[name]:.3g} s of each step {words}"
            return Straggler(beat["process"], name, f"{text}, the others {usual:.3g} s")
    return None


def _name(beat: Mapping[str, Any]) -> str:
    return f"process {beat['process']} (host {beat['host']})"


class Watch:
    """Tells of stragglers while a run goes on, of the same one once in a while."""

    def __init__(
        self, *, log: Callable[[str], None], clock: Callable[[], float] = time.monotonic,
    ):  # fmt: skip
        self._log, self._clock = log, clock
        self._told: dict[tuple[int, str], float] = {}

    def look(self, heartbeats: Sequence[Mapping[str, Any]]) -> Straggler | None:
        """The straggler, if there is one; logged where it was not lately."""
        found = find(heartbeats)
        if found is not None:
            now, key = self._clock(), found[:2]
            if now - self._told.get(key, -math.inf) >= TELL_AGAIN:
                self._told[key] = now
                self._log(found.text)
        return found

"""What a process is doing: its phase, its step, and how long each phase has taken.

Heartbeats, the watchdog's limits and goodput all read this one object.
"""

import collections
import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator

# Where a run spends its time. "step" is the loop, and all that is not another phase inside it.
PHASES = (
    "launch", "backend", "data", "restore", "compile", "step", "data wait", "evaluation", "save",
    "sample", "exchange",
)  # fmt: skip
RECENT = 64  # steps that the median is taken over


class Progress:
    """Written by the main thread, read by any.

    progress = Progress()
    with progress("compile"):
        ...
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._lock = clock, threading.Lock()
        self._phase, self._since = PHASES[0], clock()
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._recent: collections.deque[float] = collections.deque(maxlen=RECENT)
        self._step, self._alive = 0, clock()
        self._laps = self._measured = False

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """This phase inside, the one before after it."""
        before = self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def enter(self, phase: str) -> str:
        """From now on `phase`; returns the one before."""
        if phase not in PHASES:
            raise ValueError(f"phase {phase!r} is unknown: use one of {', '.join(PHASES)}")
        with self._lock:
            now, before = self._clock(), self._phase
            self._seconds[before] += now - self._since
            self._phase, self._since = phase, now
            # A lap with anything but training inside is no measure of a step.
            self._laps = self._laps and phase in ("step", "data wait")
            if before not in ("step", "data wait"):
                self._alive = now
        return before

    def step_done(self, step: int) -> None:
        """Step number `step` (the first is 1) has ended."""
        with self._lock:
            now = self._clock()
            if self._laps:
                self._recent.append(now - self._alive)
            self._step, self._alive = step, now
            self._laps = self._measured = True

    def begin_at(self, step: int) -> None:
        """The run continues after `step` steps."""
        with self._lock:
            self._step = step

    @property
    def phase(self) -> str:
        return self._phase

    @property
    def step(self) -> int:
        return self._step

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds spent so far, by phase."""
        with self._lock:
            found = dict(self._seconds)
            found[self._phase] += self._clock() - self._since
        return found

    @property
    def measured(self) -> bool:
        """Whether a step has ended in this process."""
        return self._measured

    def median_step(self) -> float | None:
        """Seconds; None before three steps are measured."""
        with self._lock:
            return statistics.median(self._recent) if len(self._recent) >= 3 else None

    def idle(self) -> tuple[str, float]:
        """The phase, and the seconds without progress in it: in the loop, those since a step."""
        with self._lock:
            looping = self._phase in ("step", "data wait")
            return self._phase, self._clock() - (self._alive if looping else self._since)

    def snapshot(self) -> dict[str, float | str]:
        """For a heartbeat: {"phase", "step", "phase_seconds", "data_seconds" per step}."""
        with self._lock:
            now, waited = self._clock(), self._seconds["data wait"]
            waited += now - self._since if self._phase == "data wait" else 0.0
            return {
                "phase": self._phase, "step": self._step,
                "phase_seconds": round(now - self._since, 3), "data_seconds": round(waited, 3),
            }  # fmt: skip

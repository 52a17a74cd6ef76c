"""A run that hangs ends: with the stacks of all threads, and the process that is behind."""

import dataclasses
import faulthandler
import sys
import threading
import time
from typing import Any

from llmx.runtime import exits
from llmx.runtime.agreement import Peers
from llmx.runtime.bounds import bounded
from llmx.runtime.progress import Progress

LONGEST_SECONDS = 1e8  # of a limit: three years
HELD_SECONDS = 600.0  # how long the interpreter may be held outside of steps
# Until a held interpreter ends, behind the limit: a process that was suspended for longer than the
# limit has time to find the cause, and whether its work directory is another's by now.
LATER_SECONDS = 20.0
# Phases that may wait for other processes.
WAITING = ("backend", "step", "save", "restore", "evaluation", "exchange")


def _limit(seconds: float) -> Any:
    return bounded(seconds, above=0, at_most=LONGEST_SECONDS)


@dataclasses.dataclass
class WatchdogConfig:
    """How long each phase may take. What takes longer ends the process with 75."""

    # a step may take this many times the median of the measured ones; 0 = the watchdog is off
    step_factor: float = bounded(20.0, above=1, at_most=1e6, unless=0, remedy="0 is off")
    # ... but at least this, so that a short pause of the machine or the storage is no hang
    step_seconds: float = _limit(60.0)
    first_step_seconds: float = _limit(1800.0)  # before three steps are measured
    # the start of the devices (jax's backend), once the processes have met
    backend_seconds: float = _limit(1200.0)
    start_seconds: float = _limit(86400.0)  # launch, or tokenizing the data
    restore_seconds: float = _limit(7200.0)  # a restore, or the first state
    compile_seconds: float = _limit(7200.0)  # all programs of a start
    evaluation_seconds: float = _limit(7200.0)  # one evaluation, or the sample at the end
    # of a save: what the steps wait for, at the end of the run until everything is written; of an
    # exchange with other groups of replicas
    save_seconds: float = _limit(3600.0)


class Watchdog:
    """Prints the stacks of all threads and ends the process when a phase takes too long.

    A process that hangs in a collective keeps its heartbeat: without a watchdog its run never ends.
    The last line names the process that is behind the others and what it does.

    Args:
      step_seconds: a fixed limit of a step; 0 = `config.step_factor` times the median.
    """

    def __init__(
        self, config: WatchdogConfig, progress: Progress, peers: Peers, *, step_seconds: float = 0
    ):
        self._config, self._progress, self._peers = config, progress, peers
        self._step_seconds, self._over = step_seconds, threading.Event()
        self.on = config.step_factor > 0 or step_seconds > 0

    def __enter__(self) -> "Watchdog":
        if self.on:
            self._thread = threading.Thread(target=self._watch, daemon=True, name="watchdog")
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.on:
            self._over.set()
            self._thread.join()
            faulthandler.cancel_dump_traceback_later()

    def limit(self, phase: str) -> tuple[float, str]:
        """Seconds that a phase may take, and the key of the config that says so."""
        config = self._config
        if phase in ("step", "data wait"):
            if self._step_seconds > 0:
                # Before the first step other processes may still compile.
                early = max(60.0, 4 * self._step_seconds) if not self._progress.measured else 0.0
                return max(self._step_seconds, early), "launch.watchdog_seconds"
            median = self._progress.median_step()
            if median is None:
                return config.first_step_seconds, "watchdog.first_step_seconds"
            if config.step_factor * median > config.step_seconds:
                return config.step_factor * median, "watchdog.step_factor"
            return config.step_seconds, "watchdog.step_seconds"
        shared = {"launch": "start", "data": "start", "sample": "evaluation", "exchange": "save"}
        key = shared.get(phase, phase)
        return vars(config)[f"{key}_seconds"], f"watchdog.{key}_seconds"

    def _watch(self) -> None:
        tick = min(1.0, self.limit("step")[0] / 4, self._config.step_seconds / 4)
        while not self._over.wait(tick):
            phase, idle = self._progress.idle()
            limit, key = self.limit(phase)
            # If the interpreter itself hangs, this thread does too: faulthandler's own then exits.
            # Outside of steps a library may hold the interpreter for a while.
            held = limit if phase in ("step", "data wait") else min(limit, HELD_SECONDS)
            later = held + 4 * tick + min(held, LATER_SECONDS)
            faulthandler.dump_traceback_later(later, exit=True, file=sys.__stderr__)
            if idle > limit:
                self._end(phase, idle, limit, key)

    def _end(self, phase: str, idle: float, limit: float, key: str) -> None:
        faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)
        # The log may wait for a lock that the stuck thread holds.
        faulthandler.dump_traceback_later(30, exit=True, file=sys.__stderr__)
        what = "no step" if phase in ("step", "data wait") else f"phase {phase!r}"
        cause = (
            f"{what} for {idle:.0f} s in process {self._peers.index}, {key} allows {limit:.3g}"
            f"{self._slowest()}: start the run again, it continues from its newest checkpoint, "
            f"or raise {key}"
        )
        self._peers.refuse(cause, exits.AGAIN)
        self._peers.end(exits.AGAIN, cause)

    def _slowest(self) -> str:
        """The process that is behind, of many."""
        if not self._peers.many:
            return ""
        beats = self._peers.heartbeats()
        time.sleep(2.5)  # one that no longer sends any is the slowest
        later = {beat["process"]: beat for beat in self._peers.heartbeats()}
        order = lambda beat: (  # noqa: E731
            later.get(beat["process"], beat).get("beat") != beat.get("beat"),
            beat.get("step", 0), beat.get("phase") in WAITING, -beat.get("phase_seconds", 0),
        )  # fmt: skip
        if not beats:
            return ""
        last = later.get((slow := min(beats, key=order))["process"], slow)
        silent = "; it sends no heartbeat" if last.get("beat") == slow.get("beat") else ""
        return (
            f"; the slowest is process {last['process']} ({last['host']}), in phase "
            f"{last.get('phase')!r} after step {last.get('step')} for "
            f"{last.get('phase_seconds', 0):.0f} s{silent}"
        )

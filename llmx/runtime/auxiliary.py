"""What training can do without: event files, drawings, samples, profiles, trackers.

An error in one of them becomes one warning, and training goes on. Retries wait for 1, 2, 4, ... up
to 60 seconds, so that a broken disk costs no time, and a repaired one is used again.
"""

import math
import time
from collections.abc import Callable

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds from a failed attempt to the next
QUIET = 600.0  # seconds: what fails, works and fails again is not told about more often


class Auxiliary:
    """Calls functions that may fail, on behalf of one thing that a run can do without."""

    def __init__(
        self, what: str, *, log: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ):  # fmt: skip
        """what: the subject of the warning, as "TensorBoard events"; log: prints one line."""
        self._what, self._log, self._clock = what, log, clock
        self._failures, self._told = 0, False  # of the present series of failures
        self._pause, self._next, self._quiet_until = FIRST_PAUSE, -math.inf, -math.inf

    def __call__(self, function: Callable, *args, last: bool = False) -> bool:
        """Calls `function(*args)`; whether it returned.

        After a failure it is not called again before the pause has passed. With `last` it is
        called all the same, and the warning does not promise another attempt.
        """
        if not last and self._clock() < self._next:
            return False
        try:
            function(*args)
        except Exception as error:
            self._fail(error, last)
            return False
        if self._failures and self._told:
            self._log(f"{self._what}: works again")
        self._failures, self._told = 0, False
        self._pause, self._next = FIRST_PAUSE, -math.inf
        return True

    def _fail(self, error: Exception, last: bool):
        now = self._clock()
        self._failures += 1
        self._next, self._pause = now + self._pause, min(2 * self._pause, LONGEST_PAUSE)
        if not self._told and now >= self._quiet_until:
            self._told, self._quiet_until = True, now + QUIET
            end = "it is left out" if last else "training goes on without it, and tries again"
            self._log(f"warning: {self._what}: {cause(error)}; {end}")


def cause(error: BaseException) -> str:
    """An error in one line: what went wrong, and with which file."""
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else ""
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    name = type(error).__name__
    return text if isinstance(error, OSError) and text else f"{name}: {text}" if text else name

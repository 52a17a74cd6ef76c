"""The end of a run whose scheduler has asked it to stop: saved within a stated time, or said so."""

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

LOOK_SECONDS = 1.0
LAST_SECONDS = 0.5  # process 0, without which jax aborts the others, ends so much later


class GraceLimit(contextlib.AbstractContextManager):
    """Ends this process when the time after SIGTERM is over, whatever it is doing.

    Args:
      seconds: from `start` on; `checkpoint.grace_seconds`.
      process: the index of this process.
      newest: names the newest checkpoint that is complete.
      end: is called with the last line to print, in a thread, and does not return.
    """

    def __init__(
        self, seconds: float, *, process: int, newest: Callable[[], str],
        end: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._seconds, self._process, self._newest, self._end = seconds, process, newest, end
        self._over, self._lock = threading.Event(), threading.Lock()
        self._deadline: float | None = None

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def cancel(self) -> None:
        """All is saved: the process ends by itself."""
        self._over.set()

    def start(self, since: float | None = None) -> None:
        """The signal has come, at `time.monotonic()` = `since`; a second call changes nothing."""
        with self._lock:
            if self._deadline is not None:
                return
            self._deadline = (time.monotonic() if since is None else since) + self._seconds
            if self._over.is_set():
                return
        threading.Thread(target=self._watch, daemon=True, name="grace").start()

    def left(self) -> float | None:
        """Seconds until the time is over, for what comes after the save; None before the signal."""
        deadline = self._deadline
        return None if deadline is None else max(deadline - time.monotonic(), 0.0)

    def _watch(self) -> None:
        last = LAST_SECONDS if self._process == 0 else 0.0
        if self._over.wait(max(self._deadline + last - time.monotonic(), 0.0)):
            return
        # The file system may be what hangs.
        names: list[str] = []
        thread = threading.Thread(target=lambda: names.append(self._newest()), daemon=True)
        thread.start()
        thread.join(LOOK_SECONDS)
        newest = names[0] if names else "unknown, since the work directory does not answer"
        self._end(
            f"checkpoint.grace_seconds={self._seconds:g} are over before the save is complete; "
            f"the newest checkpoint is {newest}: run again to continue from it"
        )


def newest_text(checkpoints: Any, tier: Any, directory: str) -> str:
    """The newest complete checkpoint of a `Checkpointer` and a `LocalTier`, in words."""
    shared, local = checkpoints.latest_step(), tier.newest()
    if local is not None and (shared is None or local > shared):
        return f"that of step {local} on the hosts' own disks ({directory})"
    return "none" if shared is None else f"that of step {shared}"

"""Stopping a run: signals that end it after the step, and a watchdog for hangs."""

import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable

import jax

# Exit codes: the shell's for Ctrl-C; "try again" of sysexits.h for a hang.
INTERRUPTED = 130
HUNG = 75


class StopSignal:
    """SIGTERM or Ctrl-C stops the loop after its step; a second Ctrl-C exits at once with 130.

    With many processes JAX's preemption notice, which handles SIGTERM, makes all stop at the same
    step: none waits in a collective for one that left. Enter it in the main thread, after `start`.
    """

    def __init__(self, *, log: Callable[[str], None]) -> None:
        self._log, self._requested, self._agreed = log, False, False

    def __enter__(self) -> "StopSignal":
        self._many = jax.process_count() > 1
        # JAX's notifier must keep SIGTERM where it runs.
        handled = (signal.SIGINT,) if self._many else (signal.SIGINT, signal.SIGTERM)
        # Python runs handlers between bytecodes of the main thread, which may be compiling. The
        # wakeup descriptor is written at once, and a thread reads it.
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._previous = {number: signal.signal(number, lambda *_: None) for number in handled}
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._previous_fd)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._writer.close()
        self._thread.join()
        self._reader.close()

    def agreed(self, step: int) -> bool:
        """Whether to stop before `step`; the same in all processes, which must all call it."""
        if not self._many:
            return self._requested
        if not self._agreed:
            from jax.experimental import multihost_utils

            self._agreed = multihost_utils.reached_preemption_sync_point(step)
            if self._agreed:
                self._log(f"all processes stop at step {step}")
        return self._agreed

    def _listen(self) -> None:
        interrupts = 0
        while numbers := self._reader.recv(64):
            for number in numbers:
                interrupts += number == signal.SIGINT
                if interrupts > 1:
                    os._exit(INTERRUPTED)
                if not self._requested:
                    self._requested = True
                    name = signal.Signals(number).name
                    self._log(f"{name}: stopping after this step; Ctrl-C exits at once")
                    if self._many:
                        os.kill(os.getpid(), signal.SIGTERM)


class Watchdog:
    """Prints the stacks of all threads and exits with 75 when `beat` is not called for `seconds`.

    A process that hangs in a collective keeps its heartbeat: without a watchdog its run never ends.
    0 seconds is off. Enter it after compilation; evaluations and checkpoints must `beat` too.
    """

    def __init__(self, seconds: float, *, log: Callable[[str], None]) -> None:
        self._seconds, self._log = seconds, log
        self._over = threading.Event()
        self._last = 0.0

    def __enter__(self) -> "Watchdog":
        self.beat()
        if self._seconds > 0:
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._seconds > 0:
            self._over.set()
            self._thread.join()
            faulthandler.cancel_dump_traceback_later()

    def beat(self) -> None:
        """A step is done."""
        self._last = time.monotonic()

    def _watch(self) -> None:
        tick = min(1.0, self._seconds / 4)
        later = self._seconds + 4 * tick
        while not self._over.wait(tick):
            # If the interpreter itself hangs, this thread does too: faulthandler's own then exits.
            faulthandler.dump_traceback_later(later, exit=True, file=sys.__stderr__)
            idle = time.monotonic() - self._last
            if idle > self._seconds:
                faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)
                # The log may wait for a lock that the stuck thread holds.
                faulthandler.dump_traceback_later(5, exit=True, file=sys.__stderr__)
                limit = f"watchdog_seconds={self._seconds}"
                self._log(f"no step for {idle:.0f} s, {limit}: exit {HUNG}")
                os._exit(HUNG)

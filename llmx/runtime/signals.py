"""Signals that end a run after a step at which all processes stop together."""

import contextlib
import json
import signal
import socket
import threading
from collections.abc import Callable

from llmx.runtime import exits
from llmx.runtime.agreement import Peers
from llmx.runtime.progress import Progress

AHEAD = 2  # steps that a process may take while the common last step is being agreed on
CODES = {signal.SIGTERM: exits.AGAIN, signal.SIGINT: exits.INTERRUPTED}


class StopSignal:
    """SIGTERM or Ctrl-C stops the loop after a step; a second Ctrl-C exits at once with 130.

    Before the first step there is nothing new to save: either signal ends the process at once, with
    143 or 130. With many processes a signal to one stops all, at the same step: each says which
    step it has reached and takes at most `AHEAD` more until it knows what the others say. Nobody
    waits in a collective for a process that left. Enter it in the main thread, before
    `launch.start`; `join` tells it of the other processes.
    """

    def __init__(
        self, *, log: Callable[[str], None], progress: Progress | None = None,
        peers: Peers | None = None, raises: bool = False,
    ) -> None:  # fmt: skip
        """raises: where Ctrl-C would end the process, it raises KeyboardInterrupt instead: for a
        program that goes on after the run."""
        self._raises, self._presses = raises, 0
        self._log, self._progress, self._peers = log, progress, peers or Peers()
        self._changed = threading.Condition()
        self._step, self._limit, self._target = 0, None, None
        self._reason, self.code = "", exits.DONE
        self._interrupts, self._started = 0, progress is None
        # Called once this process knows of a request to stop, in any thread.
        self.noticed: list[Callable[[], None]] = []

    def __enter__(self) -> "StopSignal":
        self._previous: dict[int, object] = {}
        if threading.current_thread() is not threading.main_thread():
            return self  # only the main thread may handle signals
        # Python runs handlers between bytecodes of the main thread, which may be compiling. The
        # wakeup descriptor is written at once, and a thread reads it.
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._previous = {number: signal.signal(number, self._handle) for number in CODES}
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, daemon=True, name="signals")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._previous:
            return
        signal.set_wakeup_fd(self._previous_fd)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._writer.close()
        self._thread.join()
        self._reader.close()

    def join(self, peers: Peers) -> None:
        """From now on these processes stop together."""
        self._peers = peers
        peers.watchers.append(self._look)

    def start(self) -> None:
        """The loop begins: from now on a signal asks for a common last step."""
        self._started = True

    @property
    def requested(self) -> bool:
        """Whether this process knows of a request to stop."""
        return bool(self._reason)

    @property
    def reason(self) -> str:
        """Why the run stops; "" = it does not."""
        return self._reason

    def request(self, reason: str, code: int) -> None:
        """Asks all processes to stop after a step, for this reason and with this exit code.

        Any thread of any process may call it; the first request counts.
        """
        with self._changed:
            if self._reason:
                return
            self._reason, self.code = reason, code
        self._notice()
        if self._peers.many:
            with contextlib.suppress(Exception):
                text = json.dumps({"reason": reason, "code": code})
                self._peers.publish(f"stop/{self._peers.index}", text)

    def agreed(self, step: int) -> bool:
        """Whether to stop before `step`; the same in all processes, which must all call it."""
        with self._changed:
            self._step = step
            if not self._peers.many:
                return bool(self._reason)
            while self._target is None and self._limit is not None and step >= self._limit:
                self._changed.wait(1.0)
            stop = self._target is not None and step >= self._target
        if stop:
            self._log(f"{self._reason}: all processes stop at step {step}")
        return stop

    def asked_anywhere(self) -> bool:
        """Whether any process knows of a request; the same in all, which must all call it.

        For a run that goes back to an earlier step: what was agreed on is a later one.
        """
        mine = json.dumps({"reason": self._reason, "code": self.code})
        asked = [found for text in self._peers.exchange("asked to stop", mine)
                 if (found := json.loads(text))["reason"]]  # fmt: skip
        if asked and not self._reason:
            with self._changed:
                self._reason, self.code = asked[0]["reason"], asked[0]["code"]
        return bool(asked)

    def _notice(self) -> None:
        for call in self.noticed:
            call()

    def _look(self) -> None:
        """Called by the thread of `Peers`, now and then."""
        if self._target is not None:
            return
        if not self._reason:
            requests = self._peers.read("stop")
            if not requests:
                return
            index = min(requests, key=int)
            request = json.loads(requests[index])
            with self._changed:
                self._reason = f"process {index}: {request['reason']}"
                self.code = request["code"]
            self._notice()
        with self._changed:
            if self._limit is None:
                # Not before it is published: this is tried again if it fails.
                self._peers.publish(f"stop_at/{self._peers.index}", str(self._step))
                self._limit = self._step + AHEAD
        steps = self._peers.read("stop_at")
        if len(steps) == self._peers.count:
            with self._changed:
                self._target = max(map(int, steps.values())) + AHEAD
                self._changed.notify_all()

    def _handle(self, number: int, _frame: object) -> None:
        """In the main thread; `_listen` does the rest."""
        self._presses += number == signal.SIGINT
        if self._raises and number == signal.SIGINT and (not self._started or self._presses > 1):
            raise KeyboardInterrupt

    def _listen(self) -> None:
        while numbers := self._reader.recv(64):
            for number in numbers:
                if number in CODES:
                    self._received(number)

    def _received(self, number: int) -> None:
        name = signal.Signals(number).name
        self._interrupts += number == signal.SIGINT
        if self._raises and number == signal.SIGINT and (not self._started or self._interrupts > 1):
            return  # `_handle` raises
        if self._interrupts > 1:
            self._peers.end(exits.INTERRUPTED, f"{name} again: exit at once")
        if not self._started:
            phase = self._progress.phase
            code = exits.TERMINATED if number == signal.SIGTERM else exits.INTERRUPTED
            cause = (
                f"{name} in phase {phase!r}, before the first step: nothing new to save; "
                "run the same command again to continue"
            )
            self._peers.refuse(cause, code)
            self._peers.end(code, cause)
        if not self._reason:
            again = "; Ctrl-C exits at once" if number == signal.SIGINT else ""
            self._log(f"{name}: stopping after this step{again}")
            self.request(name, CODES[number])

"""What the processes of a run tell each other beside their arrays, and how they end together.

Texts in the key-value store of `jax.distributed`. No device takes part, so it works while a program
compiles, runs or hangs. Every process sends a heartbeat with its phase and step. A thread looks for
refusals, requests to stop, and processes that are gone. With one process each call returns at once.
"""

import contextlib
import faulthandler
import functools
import hashlib
import importlib.metadata
import json
import os
import pathlib
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import llmx
from llmx.runtime import exits, fatal, printable

LOOK_SECONDS = 0.25  # between looks for refusals; longer with many processes
BEAT_SECONDS = 1.0
FAREWELL_SECONDS = 5.0  # a refusing process waits so long for the others to have read it
CAUSE_SECONDS = 2.0  # an ending process asks so long for a deeper cause: a store may not answer
EXCHANGE_SECONDS = 3600.0  # the watchdog's limits are shorter

Heartbeat = dict[str, Any]


class Disagreement(ValueError):
    """The processes of a run were started with different values."""


@functools.cache
def versions() -> dict[str, str]:
    """Of llmx's code (a hash of its files) and of the packages that compile and run it."""
    digest = hashlib.sha256()
    root = pathlib.Path(llmx.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    found = {name: importlib.metadata.version(name) for name in packages}
    return {"llmx": f"{llmx.__version__}+{digest.hexdigest()[:12]}", **found}


class Store:
    """Texts by key, seen by all processes. Errors: those of the client."""

    def __init__(self, client: Any):
        self._client = client

    def put(self, key: str, text: str) -> None:
        self._client.key_value_set(key, text, allow_overwrite=True)

    def get(self, key: str, seconds: float) -> str:
        """Waits for the key."""
        return self._client.blocking_key_value_get(key, int(seconds * 1000))

    def delete(self, key: str) -> None:
        self._client.key_value_delete(key)

    def list(self, folder: str) -> dict[str, str]:
        """{name in the folder: text}."""
        pairs = self._client.key_value_dir_get(f"{folder}/")
        return {key.rsplit("/", 1)[1]: text for key, text in pairs}

    def barrier(self, name: str, seconds: float) -> None:
        self._client.wait_at_barrier(name, int(seconds * 1000))


class Peers:
    """The processes of this run.

    Args:
      store: None = there is one process.
      index, count: of this process.
      heartbeat: returns what this process is doing, for `heartbeats`.
      silence: seconds after which a process without heartbeats counts as gone.
    """

    def __init__(
        self, store: Store | None = None, index: int = 0, count: int = 1, *,
        heartbeat: Callable[[], Heartbeat] = dict, silence: float = 30.0,
    ):  # fmt: skip
        self.index, self.count = index, count
        self._store, self._heartbeat, self._silence = store, heartbeat, silence
        self._over, self._lock = threading.Event(), threading.Lock()
        self._calls: dict[str, int] = {}
        # The exit code and the cause, once this process has refused.
        self._refused: tuple[int, str] | None = None
        self._ending = False
        self._seen: dict[str, tuple[str, float]] = {}  # heartbeats, and when they last changed
        self._reached = time.monotonic()  # when the store last answered
        self.watchers: list[Callable[[], None]] = []  # called at every look
        self.endings: list[Callable[[], None]] = []  # called before this process ends early
        # Asked before it ends with AGAIN: the exit code and the text of a deeper cause, if any.
        self.causes: list[Callable[[], tuple[int, str] | None]] = []
        self._threads: list[threading.Thread] = []

    @property
    def many(self) -> bool:
        """Whether there is more than this process."""
        return self._store is not None

    def start(self) -> None:
        """Begins to send heartbeats and to look for those of the others."""
        if not self.many:
            return
        _explain_abort(self)
        for work in (self._look, self._beat, self._guard):
            thread = threading.Thread(target=work, daemon=True, name=f"peers{work.__name__}")
            thread.start()
            self._threads.append(thread)

    def close(self) -> None:
        """Stops looking: from now on processes may leave."""
        self._over.set()
        for thread in self._threads:
            thread.join(5)
        if self.many:  # it is not gone but done: process 0 may still be busy with what is its own
            with contextlib.suppress(Exception):
                self._store.delete(f"llmx/beat/{self.index}")

    # ------------------------------------------------------------------------------------ talking

    def publish(self, key: str, text: str) -> None:
        """Sets `key` for all to `read`; later texts replace earlier ones."""
        if self.many:
            self._store.put(f"llmx/{key}", text)

    def read(self, folder: str) -> dict[str, str]:
        """{name: text} of the keys "folder/name"."""
        return self._store.list(f"llmx/{folder}") if self.many else {}

    def exchange(self, name: str, text: str) -> list[str]:
        """The texts of all processes, by index. Every process must call it, in the same order."""
        if not self.many:
            return [text]
        folder = f"llmx/exchange/{self._numbered(name)}"
        self._store.put(f"{folder}/{self.index}", text)
        return [self._store.get(f"{folder}/{i}", EXCHANGE_SECONDS) for i in range(self.count)]

    def broadcast(self, name: str, text: str = "") -> str:
        """The text of process 0, in all."""
        if not self.many:
            return text
        key = f"llmx/broadcast/{self._numbered(name)}"
        if self.index == 0:
            self._store.put(key, text)
        return self._store.get(key, EXCHANGE_SECONDS)

    def barrier(self, name: str) -> None:
        """Waits until all processes have called it."""
        if self.many:
            self._store.barrier(f"llmx/{self._numbered(name)}", EXCHANGE_SECONDS)

    def agree(self, name: str, values: Mapping[str, Any]) -> None:
        """Returns once all processes have been found to have the same `values`.

        Every process must call it. Raises Disagreement in those that differ from process 0.
        """
        if not self.many:
            return
        mine = json.loads(json.dumps(values))
        theirs = json.loads(self.broadcast(f"agree/{name}", json.dumps(mine)))
        if wrong := [key for key in {**theirs, **mine} if theirs.get(key) != mine.get(key)]:
            rows = [f"{key} is {mine.get(key)!r}, in process 0 {theirs.get(key)!r}"
                    for key in wrong[:8]]  # fmt: skip
            rows += [f"and {len(wrong) - 8} more"] if len(wrong) > 8 else []
            raise Disagreement(
                f"{name}: process {self.index} of {self.count} ({socket.gethostname()}) differs "
                f"from process 0: {'; '.join(rows)}. Start all processes with the same command, "
                "code and data"
            )
        self.barrier(f"agree/{name}")

    def _numbered(self, name: str) -> str:
        with self._lock:
            self._calls[name] = number = self._calls.get(name, -1) + 1
        return f"{name}/{number}"

    # ------------------------------------------------------------------------------------- ending

    def refuse(self, cause: str, code: int = exits.REFUSED) -> None:
        """Tells the others why this process ends; they print it and end with the same code."""
        if not self.many or self._refused is not None:
            return
        self._refused = code, cause
        text = json.dumps({"cause": cause, "code": code, "host": socket.gethostname()})
        with contextlib.suppress(Exception):
            self._store.put(f"llmx/refusal/{self.index}", text)
            deadline = time.monotonic() + FAREWELL_SECONDS
            # Process 0 holds the store: it leaves last.
            while time.monotonic() < deadline:
                told = (
                    self._store.list("llmx/told").keys() | self._store.list("llmx/refusal").keys()
                )
                if len(told | {str(self.index)}) >= self.count:
                    return
                time.sleep(LOOK_SECONDS / 2)

    def end(self, code: int, text: str = "") -> None:
        """Ends this process now, whatever its other threads do, after `endings`."""
        with self._lock:
            first, self._ending = not self._ending, True
        if not first:
            time.sleep(60)  # another thread is at it
        faulthandler.cancel_dump_traceback_later()  # of the watchdog
        found: list[tuple[int, str]] = []
        if code == exits.AGAIN and self.causes:
            _within(CAUSE_SECONDS, lambda: self._find_causes(found))
        code, text = found[0] if found else (code, text)
        _within(FAREWELL_SECONDS, self._finish)
        if text:  # the last line
            printable.try_to_stderr(text)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)

    def _find_causes(self, found: list[tuple[int, str]]) -> None:
        for cause in self.causes:
            with contextlib.suppress(Exception):
                found.extend(filter(None, [cause()]))

    def _finish(self) -> None:
        for ending in reversed(self.endings):
            with contextlib.suppress(Exception):
                ending()

    def crashed(self, error: BaseException) -> None:
        """Ends this process after an error that it did not foresee, and the others with it.

        A process that is gone breaks the collectives of the others: then it is named, and the error
        is not shown.
        """
        if not self.many:
            return
        gone, deadline = [], time.monotonic() + 3 * BEAT_SECONDS + LOOK_SECONDS
        before = self._read_beats()
        while time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)  # a refusal ends this process meanwhile
        after = self._read_beats()
        gone = [i for i in sorted(before) if before[i] == after.get(i) and int(i) != self.index]
        if gone:
            cause = "; ".join(self._told_of(i, before[i]) for i in gone)
            text = f"{cause}: start the run again, it continues from its newest checkpoint"
            self.refuse(text, exits.AGAIN)
            self.end(exits.AGAIN, text)
        traceback.print_exception(error)
        what = f"process {self.index} failed: {type(error).__name__}: {_first_line(error)}"
        self.refuse(f"{what}; its log says more", exits.AGAIN)
        self.end(exits.CRASHED, what)

    # ------------------------------------------------------------------------------------ looking

    def heartbeats(self) -> list[Heartbeat]:
        """The last heartbeat of each process that has sent one, and has not left, by index; without
        the store: []."""
        if not self.many:
            return [{"process": 0, "host": socket.gethostname(), **self._heartbeat()}]
        beats = self._read_beats()
        return [json.loads(beats[i]) for i in sorted(beats, key=int)]

    def _read_beats(self) -> dict[str, str]:
        try:
            return self._store.list("llmx/beat")
        except Exception:
            return {}

    def _told_of(self, index: str, beat: str) -> str:
        last = json.loads(beat)
        return (
            f"process {index} ({last.get('host')}) is gone: no heartbeat; its last was in phase "
            f"{last.get('phase')!r} of step {last.get('step')}"
        )

    def _beat(self) -> None:
        host, number = socket.gethostname(), 0
        while not self._over.wait(BEAT_SECONDS):
            number += 1
            beat = {"process": self.index, "host": host, "beat": number, **self._heartbeat()}
            with contextlib.suppress(Exception):
                self._store.put(f"llmx/beat/{self.index}", json.dumps(beat))
            # One process looks at all of them: the store is asked by all only for refusals.
            if self.index == 0:
                with contextlib.suppress(Exception):
                    self._find_silent()

    def _find_silent(self) -> None:
        now = time.monotonic()
        beats = self._store.list("llmx/beat")
        for index in self._seen.keys() - beats.keys():  # it has left at the end of the run
            del self._seen[index]
        for index, text in beats.items():
            if self._seen.get(index, ("", 0))[0] != text:
                self._seen[index] = (text, now)
        silent = {i: text for i, (text, at) in self._seen.items() if now - at > self._silence}
        if silent and not self._over.is_set():
            cause = "; ".join(self._told_of(i, text) for i, text in silent.items())
            limit = f"launch.heartbeat_seconds={self._silence:g}"
            text = f"{cause} for {limit}: start the run again, it continues from its checkpoint"
            self.refuse(text, exits.AGAIN)
            self.end(exits.AGAIN, text)

    def _look(self) -> None:
        pause = max(LOOK_SECONDS, self.count / 2000)
        while not self._over.wait(pause):
            try:
                refusals = self._store.list("llmx/refusal")
                self._reached = time.monotonic()
            except Exception:
                # With process 0 the store is gone; jax ends this process too, see _explain_abort.
                gone = time.monotonic() - self._reached > 3 and self._refused is None
                if gone and not self._over.is_set():
                    self.end(exits.AGAIN, self.text_of_abort())
                continue
            refusals.pop(str(self.index), None)
            if refusals and self._refused is None and not self._over.is_set():
                self._leave(refusals)
            for watch in list(self.watchers):
                with contextlib.suppress(Exception):
                    watch()

    def _guard(self) -> None:
        """Ends this process where the store does not answer: process 0 is stopped, or cut off.

        Counted in own looks: a process that was itself stopped for a while gets time to ask again.
        """
        last, unanswered = self._reached, 0
        while not self._over.wait(BEAT_SECONDS):
            unanswered, last = (unanswered + 1 if last == self._reached else 0), self._reached
            if unanswered * BEAT_SECONDS > self._silence:
                limit = f"launch.heartbeat_seconds={self._silence:g}"
                self.end(
                    exits.AGAIN,
                    f"process 0, which coordinates the run, has not answered for {limit}: it is "
                    "stopped or cut off; start the run again, it continues from its checkpoint",
                )

    def _leave(self, refusals: Mapping[str, str]) -> None:
        index = min(refusals, key=int)
        refusal = json.loads(refusals[index])
        with contextlib.suppress(Exception):
            self._store.put(f"llmx/told/{self.index}", "")
        text = f"process {index} ({refusal['host']}): {refusal['cause']}"
        if self.index == 0:  # it holds the store: the others must have read it too
            with contextlib.suppress(Exception):
                deadline = time.monotonic() + FAREWELL_SECONDS
                known = lambda: self._store.list("llmx/told").keys() | refusals.keys()  # noqa: E731
                while len(known() | {"0"}) < self.count and time.monotonic() < deadline:
                    time.sleep(LOOK_SECONDS / 2)
        self.end(refusal["code"], text)

    def text_of_abort(self) -> str:
        """What is known when jax ends this process: its coordinator is gone, or it never came."""
        if self.many:
            return (
                "process 0, which coordinates the run, is gone: start the run again, it continues "
                "from its newest checkpoint"
            )
        return "the processes of the run did not meet"


def _within(seconds: float, work: Callable[[], None]) -> None:
    """Does it in a thread, which is left behind after so long."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]


def _explain_abort(peers: Peers) -> None:
    def end(text: str) -> None:
        peers.end(*(peers._refused or (exits.AGAIN, text)))

    explain_abort(peers.text_of_abort, end)


def explain_abort(text: Callable[[], str], end: Callable[[str], None]) -> None:
    """From now on SIGABRT calls `end(text())`.

    jax aborts a process, with a C++ stack, when its coordinator cannot be reached. The last
    registration counts.
    """
    fatal.on_signal(signal.SIGABRT, lambda: end(text()))

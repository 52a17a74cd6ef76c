"""Who asks for a run: a command, or a program with callbacks that goes on after it (`llmx.fit`).

A callback is a plain function of a record: a dict as it stands in metrics.jsonl, with "kind"
("train", "eval", "layers", "spike", "goodput", "rollback"), "step", "tokens", "time" and numbers;
not finite ones are floats here. A checkpoint that is complete gives a record too, of kind
"checkpoint" with "step", "time" and "path". Callbacks run in the first process, in the thread that
trains: the next step waits for them.
"""

import collections
import dataclasses
import functools
import pathlib
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llmx.runtime import auxiliary, exits

Record = dict[str, Any]


@dataclasses.dataclass
class Caller:
    """What a caller gives to a run, and what it gets back; by default that of a command."""

    # As `train.read_config`; None: the config is that of the command line, and the run may end the
    # process.
    settings: Callable[..., Any] | None = None
    callbacks: Sequence[Callable[[Record], Any]] = ()
    errors: dict[str, Exception] = dataclasses.field(default_factory=dict)  # first of a callback
    refused: BaseException | str = ""  # why there was no run, or no end of it
    ended: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    stop: Any = None  # `signals.StopSignal` of the run
    _saved: collections.deque = dataclasses.field(default_factory=collections.deque)
    _failures: collections.Counter = dataclasses.field(default_factory=collections.Counter)

    @property
    def is_program(self) -> bool:
        return self.settings is not None

    def record(self, record: Mapping[str, Any], note: Callable[[str], None]) -> None:
        """Calls every callback; an error in one becomes a warning, and training goes on.

        KeyboardInterrupt of a callback stops the run after the step under way, as Ctrl-C does.
        """
        for callback in self.callbacks:
            name = name_of(callback)
            try:
                callback(dict(record))
            except KeyboardInterrupt:
                self.stop.request(f"stopped by callback {name}", exits.INTERRUPTED)
            except Exception as error:
                self._failures[name] += 1
                self.errors.setdefault(name, error)
                if self._failures[name] == 1:
                    note(
                        f"warning: callback {name}: {auxiliary.cause(error)}{_place(error)}; "
                        "training goes on, and calls it again"
                    )

    def saved(self, workdir: str, step: int) -> None:
        """The checkpoint of `step` is complete. Any thread may call it."""
        path = str(pathlib.Path(workdir) / "checkpoints" / str(step))
        record = {"kind": "checkpoint", "step": step, "time": round(time.time(), 3), "path": path}
        self._saved.append(record)

    def deliver(self, note: Callable[[str], None]) -> None:
        """Calls the callbacks with the checkpoints that became complete since the last call."""
        while self._saved:
            self.record(self._saved.popleft(), note)

    def end(self, note: Callable[[str], None], **ended: Any) -> None:
        """The run has ended as `ended` says: the last checkpoint, how often callbacks failed."""
        self.ended = ended
        self.deliver(note)
        for name, count in self._failures.items():
            if count > 1:
                note(f"warning: callback {name} failed {count} times")


def name_of(function: Callable) -> str:
    """What messages call it."""
    if isinstance(function, functools.partial):
        return name_of(function.func)
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return name.rpartition("<locals>.")[2]


def _place(error: BaseException) -> str:
    """Where an error was raised, as " (my_run.py:12)"."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # behind the call above
    return f" ({pathlib.PurePath(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""

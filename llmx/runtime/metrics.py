"""What a run shows and writes: progress line, metrics.jsonl, TensorBoard events, loss.png.

`Reporter` is the one place that the train loop reports to. In the work directory it keeps

- `metrics.jsonl`: one JSON object a line, with "kind" ("train", "layers", "eval", "spike" or
  "goodput"), "step" (updates made so far, so the first is 1), "tokens" (seen so far), "time" (Unix
  seconds) and the scalars; numbers that are not finite stand as the strings "nan", "inf", "-inf".
  Of "layers" each value is a list, with a number for each layer, null for one that has none. Each
  step of a kind stands there once, also after a run was killed and resumed from an earlier step;
- `tensorboard/`: the same numbers as event files;
- `loss.png`: the curves, and `layers.png`, the numbers by layer of models that have some; drawn by
  `plot_all` or `python -m llmx.metrics WORKDIR`.

None of them ends a run: see `auxiliary`.

MFU and HFU are the figures of `llmx.runtime.utilization`.
"""

import collections
import concurrent.futures
import contextlib
import copy
import dataclasses
import functools
import math
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from llmx.runtime import plot, printable, spikes, utilization
from llmx.runtime.auxiliary import Auxiliary
from llmx.runtime.bounds import MACHINE, bounded, choice
from llmx.runtime.caller import Caller
from llmx.runtime.records import EVENTS, RECORDS, EventFile, RecordFile
from llmx.runtime.utilization import Utilization

REFRESH_SECONDS = 0.25  # of the live line: 4 a second reads as live and costs 0.1% of a core
RECENT = 64  # steps that the shown rates are taken over


@dataclasses.dataclass
class MetricsConfig:
    """What is reported, how often."""

    # steps between records, and between lines where there is no live one
    log_every: int = bounded(10, at_least=1, remedy="1 = every step")
    tensorboard: bool = True  # also write event files for TensorBoard
    # "rich" (a live line) | "plain" | "off"; auto: rich on a terminal
    progress: str = choice("auto", ("auto", "rich", "plain", "off"), of=MACHINE)
    plot_every: int = bounded(0, at_least=0)  # steps between drawings of loss.png; 0 = at the end
    # loss or gradient norm this many deviations above its running median is noted; 0 = off
    spike_deviations: float = bounded(10.0, at_least=3, unless=0)


class StepTimer:
    """True step times: from the end of one step to the end of the next, nothing else inside.

    jax returns before a step has run: the caller waits for its output before `lap()`. Waiting for
    step n-1 after step n was started keeps the device busy. Call `start()` after compilation.
    """

    def __init__(self):
        self.start()

    def start(self):
        """Begins a lap now and discards the measurements of the current one."""
        self._begin, self._data_seconds, self._interrupted = time.perf_counter(), 0.0, False

    @contextlib.contextmanager
    def data(self) -> Iterator[None]:
        """Time spent inside counts as waiting for data (and as part of the step)."""
        begin = time.perf_counter()
        yield
        self._data_seconds += time.perf_counter() - begin

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Time inside is not training: the lap gets no time, as its step runs on meanwhile."""
        yield
        self._interrupted = True

    def lap(self) -> tuple[float | None, float]:
        """Seconds since the last lap, or None where it was paused; seconds of it spent on data."""
        seconds = None if self._interrupted else time.perf_counter() - self._begin
        data_seconds = self._data_seconds
        self.start()
        return seconds, data_seconds


class Reporter(contextlib.ExitStack):
    """Shows and writes the metrics of one run; only the first process does.

    Use it as a context manager, or call `close()`: it restores the terminal and closes the files. A
    background thread writes event files and drawings.
    """

    def __init__(
        self, workdir: str | os.PathLike, config: MetricsConfig, *,
        total_steps: int, tokens_per_step: int, reached: Utilization | None = None,
        start_step: int = 0, log: Callable[[str], None] | None = None,
        caller: Caller | None = None, recorded: Mapping[str, Any] | None = None,
    ):  # fmt: skip
        """Open the files; records after `start_step`, left by a killed run, are dropped.

        reached: gives MFU and HFU for a rate of tokens; None: an unknown chip, neither is shown.
        start_step: updates that the restored state has behind it; 0 begins the files afresh.
        log: prints one line. Default: print to stdout.
        caller: whose callbacks get each record.
        recorded: what `recorded` was when `start_step` was saved.
        """
        super().__init__()
        self._caller = caller or Caller()
        self._config, self._workdir = config, pathlib.Path(workdir)
        self._total_steps, self._tokens_per_step = total_steps, tokens_per_step
        self._reached = reached
        self._recent = collections.deque(maxlen=RECENT)  # (step_seconds, data_seconds)
        self._first = None  # (step, time) of the first report
        self._refreshed = -math.inf
        self._drawing = None  # the last drawing handed to the worker
        self._writing = None  # the last writing of events handed to the worker
        self._spikes = spikes.Spikes(config.spike_deviations)

        import jax  # here: drawing a plot should not wait for it

        self.writes = jax.process_index() == 0
        if not self.writes:
            return
        live = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        progress = config.progress.replace("auto", "rich" if live else "plain")
        display = {"rich": _LiveLine, "plain": _PlainLines, "off": _Quiet}[progress]
        log = log or functools.partial(print, flush=True)
        self._display = display(log)
        # stdout is a pipe, or on a full disk.
        self._show = Auxiliary("the display", log=printable.try_to_stderr)
        # The last is closed first: the worker ends before the event file that it writes, and the
        # display before them, so that their warnings stay.
        self._records = self._open(
            RecordFile(
                self._workdir / RECORDS, start_step=start_step, log=self.note, expected=recorded
            )
        )
        self._events = self._open(EventFile(self._workdir / EVENTS, start_step=start_step))
        self._write_events = Auxiliary("TensorBoard events", log=self.note)
        self._draw = Auxiliary(plot.PLOT, log=self.note)
        self.callback(lambda: self._write_events(self._events.flush, last=True))
        worker = concurrent.futures.ThreadPoolExecutor(1, "llmx-metrics")
        self._worker = self.enter_context(worker)
        self.callback(lambda: self._show(self._display.close, last=True))

    def _open(self, resource: Any) -> Any:
        return self.enter_context(contextlib.closing(resource))

    def train(
        self, step: int, scalars: dict[str, float], *,
        step_seconds: float | None = None, data_seconds: float = 0.0,
        by_layer: Mapping[str, Sequence[float]] | None = None,
    ):  # fmt: skip
        """Report step number `step` (the first is 1), with its "loss" and other host numbers.

        by_layer: numbers of each layer, recorded as kind "layers".
        step_seconds, data_seconds: from `StepTimer.lap`; None: not measured, rates keep theirs.
        """
        if step_seconds is not None:
            self._recent.append((step_seconds, data_seconds))
        if not self.writes:
            return
        now = time.monotonic()
        self._first = self._first or (step, now)
        last, every = step == self._total_steps, self._config.log_every
        finite = all(map(math.isfinite, scalars.values()))
        # Which steps are recorded does not depend on where the run was resumed.
        if step % every == 0 or step == 1 or last or not finite:
            timing = self.rates()
            if step_seconds is not None:
                timing |= {"step_seconds": step_seconds, "data_seconds": data_seconds}
            self._record("train", step, {**scalars, **timing})
            if by_layer:
                self._record("layers", step, by_layer)
        if step % every == 0 or step == self._first[0] or last:
            pieces = _scalar_pieces(scalars) + self._pieces(step)
            self._show(self._display.line, self._position(step), pieces)
        if now - self._refreshed >= REFRESH_SECONDS or last:
            self._refreshed = now
            shown = _scalar_pieces({k: v for k, v in scalars.items() if k == "loss"})
            progress = step / max(self._total_steps, 1)
            shown += self._pieces(step)
            self._show(self._display.refresh, progress, self._position(step), shown)
        self._caller.deliver(self.note)
        if found := self._spikes.look(step, scalars):
            self._record("spike", step, found.scalars)
            if found.text:
                self.note(found.text)
        drawing = self._drawing is not None and not self._drawing.done()
        if self._config.plot_every and step % self._config.plot_every == 0 and not drawing:
            self._drawing = self._worker.submit(self._draw, plot.plot_all, self._workdir)

    def eval(self, step: int, scalars: dict[str, float], extent: str = ""):
        """Report an evaluation made after update number `step`; "loss" is the held-out loss.

        extent: which data it was made on; shown, not recorded.
        """
        if self.writes:
            self._record("eval", step, scalars)
            pieces = [f"eval at step {step:,}:", *_scalar_pieces(scalars), extent]
            self.note("  ".join(filter(None, pieces)))

    def event(self, kind: str, step: int, scalars: dict[str, float]):
        """Record numbers of another kind than training and evaluation; nothing is shown."""
        if self.writes:
            self._record(kind, step, scalars)

    @property
    def recorded(self) -> dict[str, Any]:
        """Which steps have a record, for a checkpoint; empty in processes that write none."""
        return copy.deepcopy(self._records.steps) if self.writes else {}

    def has_evaluated(self, step: int) -> bool:
        """Whether the newest evaluation on record is of this step."""
        ranges = self.recorded.get("eval")
        return bool(ranges) and ranges[-1][1] == step

    def note(self, text: str):
        """Print a line (a warning, a checkpoint, ...) without breaking the live one."""
        if self.writes:
            self._show(self._display.note, printable.printable(text))

    def rates(self) -> dict[str, float]:
        """Over the recent steps: tokens_per_second (median), data_share, MFU, HFU where known."""
        if not self._recent:
            return {}
        steps, data = zip(*self._recent, strict=True)
        rate = self._tokens_per_step / statistics.median(steps)
        found = {"tokens_per_second": rate, "data_share": sum(data) / sum(steps)}
        return found | (self._reached.shares(rate) if self._reached else {})

    def _record(self, kind: str, step: int, scalars: Mapping[str, float | Sequence[float]]):
        assert not scalars.keys() & {"kind", "step", "tokens", "time"}, "names taken by the record"
        scalars = {name: _plain_numbers(value) for name, value in scalars.items()}
        now = round(time.time(), 3)
        head = {"kind": kind, "step": step, "tokens": step * self._tokens_per_step, "time": now}
        if not self._records.write(head | scalars):
            return
        self._caller.record(head | scalars, self.note)
        if not self._config.tensorboard:
            return
        self._events.add(kind, step, now, scalars)
        if self._writing is None or self._writing.done():  # else the next one takes this as well
            self._writing = self._worker.submit(self._write_events, self._events.flush)

    def _position(self, step: int) -> str:
        total = f"{self._total_steps:,}"
        return f"step {step:>{len(total)},}/{total}"

    def _pieces(self, step: int) -> list[str]:
        """The measured part of a progress line."""
        pieces, rates = [], self.rates()
        if rates:
            seconds = self._tokens_per_step / rates["tokens_per_second"]
            pieces += [
                f"{_count(rates['tokens_per_second'])} tok/s",
                *filter(None, [utilization.text(rates)]),
                f"{seconds * 1e3:.4g} ms/step" if seconds < 1 else f"{seconds:.3g} s/step",
                f"data {rates['data_share']:.1%}",
            ]
        first_step, first_time = self._first
        if step > first_step:
            # By the clock and not by step times: evaluations and checkpoints are to come as well.
            pace = (time.monotonic() - first_time) / (step - first_step)
            pieces.append(f"ETA {_duration(pace * (self._total_steps - step))}")
        return pieces


class _Quiet:
    """Notes and evaluations only."""

    def __init__(self, log: Callable[[str], None]):
        self.note = log

    def line(self, position: str, pieces: list[str]):
        """Shows the progress of a logged step."""

    def refresh(self, progress: float, position: str, pieces: list[str]):
        """Draws the live line again."""

    def close(self):
        """Restores the terminal."""


class _PlainLines(_Quiet):
    """A line per logged step."""

    def line(self, position: str, pieces: list[str]):
        self.note("  ".join([position, *pieces]))


class _LiveLine(_Quiet):
    """One line at the foot of the terminal, drawn again in place; other output goes above it."""

    _live = None  # until the first step: nothing to show while XLA compiles

    def refresh(self, progress: float, position: str, pieces: list[str]):
        from rich.text import Text

        if self._live is None:
            self._start()
        done = round(20 * min(progress, 1))
        text = Text(no_wrap=True, overflow="ellipsis")
        text.append("━" * done, style="green")
        text.append("━" * (20 - done), style="bright_black")
        text.append(f" {progress:4.0%}  " + "  ".join([position, *pieces]))
        self._live.update(text, refresh=True)

    def _start(self):
        from rich.console import Console
        from rich.live import Live

        # No refresh thread; and while it lives, stdout and stderr print above the line.
        console = Console(force_terminal=True, highlight=False)
        self._live = Live(console=console, auto_refresh=False)
        self._live.start()
        console.show_cursor(True)  # a run that is killed must not leave a terminal without one

    def close(self):
        if self._live is not None:
            self._live.stop()


def _plain_numbers(value: float | Sequence[float]) -> float | list[float | None]:
    """A number, or a list of such with null for those that are not finite, short enough to keep."""
    if not isinstance(value, Sequence):
        return float(value)
    return [float(f"{each:.6g}") if math.isfinite(each) else None for each in value]


def _scalar_pieces(scalars: dict[str, float]) -> list[str]:
    def piece(name: str, value: float) -> str:
        if name.endswith("loss"):
            return f"{name} {value:.4f}"
        return f"{name} {value:.0f}" if value % 1 == 0 else f"{name} {value:.4g}"

    return [piece(name, value) for name, value in scalars.items()]


def _count(value: float) -> str:
    """41234 -> "41.2k"."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def _duration(seconds: float) -> str:
    """372 -> "6m12s"."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days or hours:
        return f"{days}d{hours:02}h" if days else f"{hours}h{minutes:02}m"
    return f"{minutes}m{seconds:02}s" if minutes else f"{seconds}s"

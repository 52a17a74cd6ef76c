"""What a run shows and writes: progress line, metrics.jsonl, TensorBoard events, loss.png.

`Reporter` is the one place that the train loop reports to. In the work directory it keeps

- `metrics.jsonl`: one JSON object a line, with "kind" ("train" or "eval"), "step" (updates made so
  far, so the first is 1), "tokens" (seen so far), "time" (Unix seconds) and the scalars; numbers
  that are not finite stand as the strings "nan", "inf", "-inf". Each step stands there once, also
  after a run was killed and resumed from an earlier step;
- `tensorboard/`: the same numbers as event files;
- `loss.png`: the curves, drawn by `plot_loss` or `python -m llmx.metrics WORKDIR`.

Rates follow PaLM (arXiv 2204.02311, appendix B): MFU is the model's training FLOPs per second
(costs.py; recomputation not counted) over the chips' peak in bfloat16, whatever type the run uses.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import pathlib
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator

from llmx.hardware import Chip

RECORDS = "metrics.jsonl"
EVENTS = "tensorboard"
PLOT = "loss.png"
PROGRESS = ("auto", "rich", "plain", "off")
REFRESH_SECONDS = 0.25  # of the live line: 4 a second reads as live and costs 0.1% of a core
RECENT = 64  # steps that the shown rates are taken over


@dataclasses.dataclass
class MetricsConfig:
    """What is reported, how often."""

    log_every: int = 10  # steps between records, and between lines where there is no live one
    tensorboard: bool = True  # also write event files for TensorBoard
    progress: str = "auto"  # "rich" (a live line) | "plain" | "off"; auto: rich on a terminal
    plot_every: int = 0  # steps between drawings of loss.png; 0 = when training ends


def problems(config: MetricsConfig) -> list[str]:
    """All that is wrong with the section, each with its remedy."""
    found = []
    if config.log_every < 1:
        found.append(f"metrics.log_every={config.log_every} must be at least 1: 1 = every step")
    if config.plot_every < 0:
        found.append(f"metrics.plot_every={config.plot_every} must be at least 0: 0 = at the end")
    if config.progress not in PROGRESS:
        found.append(f"metrics.progress={config.progress!r} is unknown: use one of {PROGRESS}")
    return found


class StepTimer:
    """True step times: from the end of one step to the end of the next, nothing else inside.

    jax returns from a step before the step has run, so the caller must wait for a step's output
    before `lap()`. Waiting for step n-1 after step n was started keeps the device busy:

        timer.start()                                   # after compilation
        for step in ...:
            with timer.data():
                batch = next(batches)
            state, report = train_step(state, batch)    # step n is under way
            jax.block_until_ready(previous)             # step n-1 is done
            step_seconds, data_seconds = timer.lap()    # how long step n-1 took
            with timer.pause():
                ...                                     # evaluation, a checkpoint
    """

    def __init__(self):
        self._begin = time.perf_counter()
        self._data_seconds = 0.0
        self._interrupted = False

    def start(self):
        """Begin a lap now and forget what was measured of the present one."""
        self._begin = time.perf_counter()
        self._data_seconds = 0.0
        self._interrupted = False

    @contextlib.contextmanager
    def data(self) -> Iterator[None]:
        """Time spent inside counts as waiting for data (and as part of the step)."""
        begin = time.perf_counter()
        yield
        self._data_seconds += time.perf_counter() - begin

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """What happens inside is no training: the lap that it falls in gets no time at all.

        Subtracting would not do: the step that was under way goes on meanwhile.
        """
        yield
        self._interrupted = True

    def lap(self) -> tuple[float | None, float]:
        """Seconds since the last lap, or None where it was paused; seconds of it spent on data."""
        now = time.perf_counter()
        seconds = None if self._interrupted else now - self._begin
        data_seconds = self._data_seconds
        self._begin, self._data_seconds, self._interrupted = now, 0.0, False
        return seconds, data_seconds


class Reporter:
    """Shows and writes the numbers of one run; on processes other than the first it is silent.

    Use it as a context manager, or call `close()`: that gives the terminal back and finishes the
    files. A call costs microseconds except where a line or record is due; event files and drawings
    are made by a background thread.
    """

    def __init__(
        self, workdir: str | os.PathLike, config: MetricsConfig, *,
        total_steps: int, tokens_per_step: int, flops_per_token: float = 0.0,
        chip: Chip | None = None, num_devices: int = 1, start_step: int = 0,
        log: Callable[[str], None] | None = None,
    ):  # fmt: skip
        """Open the files; records after `start_step`, left by a killed run, are dropped.

        flops_per_token: training FLOPs (forward and backward); with `chip` it gives the MFU.
        start_step: updates that the restored state has behind it; 0 begins the files afresh.
        log: prints one line. Default: print to stdout.
        """
        self._config = config
        self._workdir = pathlib.Path(workdir)
        self._total_steps = total_steps
        self._start_step = start_step
        self._tokens_per_step = tokens_per_step
        peak = chip.device_flops("bfloat16") * num_devices if chip else math.inf
        self._mfu_per_rate = flops_per_token / peak  # times tokens/s gives the MFU
        self._recent = collections.deque(maxlen=RECENT)  # (step_seconds, data_seconds)
        self._first = None  # (step, time) of the first report
        self._refreshed = -math.inf
        self._drawing = None  # the last drawing handed to the worker
        self._closed = False

        import jax  # here: drawing a plot should not wait for it

        self._writes = jax.process_index() == 0
        if not self._writes:
            return
        self._workdir.mkdir(parents=True, exist_ok=True)
        self._records = _RecordFile(self._workdir / RECORDS, start_step=start_step)
        self._worker = concurrent.futures.ThreadPoolExecutor(1, "llmx-metrics")
        self._pending = collections.deque()  # what the worker has not been seen to finish
        self._events = _EventFile(self._workdir / EVENTS, start_step=start_step)
        self._display = _make_display(config.progress, log or functools.partial(print, flush=True))

    def train(
        self, step: int, scalars: dict[str, float], *,
        step_seconds: float | None = None, data_seconds: float = 0.0,
    ):  # fmt: skip
        """Report step number `step` (the first is 1), with its "loss" and other host numbers.

        step_seconds, data_seconds: from `StepTimer.lap`; None: not measured, rates keep theirs.
        """
        if step_seconds is not None:
            self._recent.append((step_seconds, data_seconds))
        if not self._writes:
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
        if step % every == 0 or step == self._first[0] or last:
            self._display.line(self._position(step), _scalar_pieces(scalars) + self._pieces(step))
        if now - self._refreshed >= REFRESH_SECONDS or last:
            self._refreshed = now
            shown = _scalar_pieces({k: v for k, v in scalars.items() if k == "loss"})
            progress = step / max(self._total_steps, 1)
            self._display.refresh(progress, self._position(step), shown + self._pieces(step))
        drawing = self._drawing is not None and not self._drawing.done()
        if self._config.plot_every and step % self._config.plot_every == 0 and not drawing:
            self._drawing = self._submit(plot_loss, self._workdir)

    def eval(self, step: int, scalars: dict[str, float]):
        """Report an evaluation made after update number `step`; "loss" is the held-out loss."""
        if self._writes:
            self._record("eval", step, scalars)
            self.note("  ".join([f"eval at step {step:,}:", *_scalar_pieces(scalars)]))

    def note(self, text: str):
        """Print a line (a warning, a checkpoint, ...) without breaking the live one."""
        if self._writes:
            self._display.note(text)

    def rates(self) -> dict[str, float]:
        """Over the recent steps: tokens_per_second (median), data_share, and mfu where known."""
        if not self._recent:
            return {}
        rate = self._tokens_per_step / statistics.median(step for step, _ in self._recent)
        total = sum(step for step, _ in self._recent)
        found = {
            "tokens_per_second": rate,
            "data_share": sum(data for _, data in self._recent) / total,
        }
        if self._mfu_per_rate:
            found["mfu"] = rate * self._mfu_per_rate
        return found

    def close(self):
        """Give the terminal back and finish the files. Does nothing the second time."""
        if self._closed or not self._writes:
            return
        self._closed = True
        self._display.close()
        self._records.close()
        self._worker.shutdown(wait=True)
        self._events.close()
        for future in self._pending:
            future.result()

    def __enter__(self) -> "Reporter":
        return self

    def __exit__(self, *_):
        self.close()

    def _record(self, kind: str, step: int, scalars: dict[str, float]):
        assert not scalars.keys() & {"kind", "step", "tokens", "time"}, "names taken by the record"
        scalars = {name: float(value) for name, value in scalars.items()}
        now = round(time.time(), 3)
        head = {"kind": kind, "step": step, "tokens": step * self._tokens_per_step, "time": now}
        if self._records.write(head | scalars) and self._config.tensorboard:
            self._submit(self._events.write, kind, step, now, scalars)

    def _submit(self, function: Callable, *args) -> concurrent.futures.Future:
        """Run in the background; what went wrong there is raised here, at a later call."""
        while self._pending and self._pending[0].done():
            self._pending.popleft().result()
        self._pending.append(self._worker.submit(function, *args))
        return self._pending[-1]

    def _position(self, step: int) -> str:
        total = f"{self._total_steps:,}"
        return f"step {step:>{len(total)},}/{total}"

    def _pieces(self, step: int) -> list[str]:
        """The measured part of a progress line."""
        pieces, rates = [], self.rates()
        if rates:
            seconds = self._tokens_per_step / rates["tokens_per_second"]
            pieces.append(f"{_count(rates['tokens_per_second'])} tok/s")
            if "mfu" in rates:
                pieces.append(f"MFU {rates['mfu']:.1%}")
            pieces.append(
                f"{seconds * 1e3:.4g} ms/step" if seconds < 1 else f"{seconds:.3g} s/step"
            )
            pieces.append(f"data {rates['data_share']:.1%}")
        first_step, first_time = self._first
        if step > first_step:
            # By the clock and not by step times: evaluations and checkpoints are to come as well.
            pace = (time.monotonic() - first_time) / (step - first_step)
            pieces.append(f"ETA {_duration(pace * (self._total_steps - step))}")
        return pieces


class _RecordFile:
    """metrics.jsonl, each (kind, step) once and in order; every record is in the file at once."""

    def __init__(self, path: pathlib.Path, *, start_step: int):
        kept = {}
        if start_step > 0 and path.exists():
            for line, record in read_records(path):
                if record["step"] <= start_step:
                    kept[record["kind"], record["step"]] = line
        # Made aside and renamed: a run killed here leaves the old file or the new one.
        temporary = path.with_suffix(".tmp")
        with open(temporary, "w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in kept.values())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        self._last = {kind: step for kind, step in sorted(kept)}
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed by close)

    def write(self, record: dict) -> bool:
        """Append and flush; False where this step is recorded already (evaluated again)."""
        kind, step = record["kind"], record["step"]
        if step <= self._last.get(kind, -1):
            return False
        self._last[kind] = step
        clean = {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v
                 for k, v in record.items()}  # fmt: skip
        self._file.write(json.dumps(clean, allow_nan=False) + "\n")
        self._file.flush()
        return True

    def close(self):
        self._file.close()


def read_records(path: str | os.PathLike) -> list[tuple[str, dict]]:
    """The lines of a metrics.jsonl with what they say; a torn last line is left out.

    Raises ValueError, with the line's number, for any other line that is no record.
    """
    text = pathlib.Path(path).read_text(encoding="utf-8")
    lines = text.split("\n")
    lines.pop()  # empty, or the start of a record that a crash cut off
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            record["kind"], record["step"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}:{number}: {line[:80]!r} is not a metrics record: remove the line"
            ) from error
        found.append((line, record))
    return found


class _EventFile:
    """A TensorBoard event file, opened by the first write (the imports take 0.2 seconds)."""

    def __init__(self, directory: pathlib.Path, *, start_step: int):
        self._directory = directory
        self._start_step = start_step
        self._writer = None

    def write(self, kind: str, step: int, seconds: float, scalars: dict[str, float]):
        # Record format and message types only: TensorBoard's own writer imports TensorFlow
        # wherever it is installed.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        def put(**fields):
            self._writer.write(Event(wall_time=seconds, **fields).SerializeToString())

        if self._writer is None:
            self._writer = self._open()
            put(file_version="brain.Event:2")
            if self._start_step > 0:  # TensorBoard forgets this step and all after it
                put(step=self._start_step + 1, session_log=SessionLog(status=SessionLog.START))
        values = [Summary.Value(tag=f"{kind}/{k}", simple_value=v) for k, v in scalars.items()]
        put(step=step, summary=Summary(value=values))
        self._writer.flush()

    def _open(self):
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._directory.mkdir(parents=True, exist_ok=True)
        stem = f"events.out.tfevents.{time.time():.3f}.{socket.gethostname()}.{os.getpid()}"
        return RecordWriter(open(self._directory / stem, "wb"))

    def close(self):
        if self._writer is not None:
            self._writer.close()


def _make_display(progress: str, log: Callable[[str], None]):
    """The display of a kind in PROGRESS."""
    if progress == "auto":
        progress = "rich" if sys.stdout.isatty() and os.environ.get("TERM") != "dumb" else "plain"
    return {"rich": _LiveLine, "plain": _PlainLines, "off": _Quiet}[progress](log)


class _PlainLines:
    """A line per logged step."""

    def __init__(self, log: Callable[[str], None]):
        self._log = log

    def line(self, position: str, pieces: list[str]):
        self._log("  ".join([position, *pieces]))

    def refresh(self, progress: float, position: str, pieces: list[str]):
        """Lines that are printed stay as they are."""

    def note(self, text: str):
        self._log(text)

    def close(self):
        """Nothing is held."""


class _Quiet:
    """Notes and evaluations only."""

    def __init__(self, log: Callable[[str], None]):
        self._log = log

    def line(self, position: str, pieces: list[str]):
        """No progress is shown."""

    def refresh(self, progress: float, position: str, pieces: list[str]):
        """No progress is shown."""

    def note(self, text: str):
        self._log(text)

    def close(self):
        """Nothing is held."""


class _LiveLine:
    """One line at the foot of the terminal, drawn again in place; other output goes above it."""

    def __init__(self, log: Callable[[str], None]):
        self._log = log
        self._live = None  # until the first step: nothing to show while XLA compiles

    def line(self, position: str, pieces: list[str]):
        """The live line says it."""

    def refresh(self, progress: float, position: str, pieces: list[str]):
        from rich.text import Text

        if self._live is None:
            self._start()
        width = 20
        done = round(width * min(progress, 1))
        text = Text(no_wrap=True, overflow="ellipsis")
        text.append("━" * done, style="green")
        text.append("━" * (width - done), style="bright_black")
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

    def note(self, text: str):
        self._log(text)

    def close(self):
        if self._live is not None:
            self._live.stop()


def _scalar_pieces(scalars: dict[str, float]) -> list[str]:
    return [f"{k} {v:.4f}" if "loss" in k else f"{k} {v:.4g}" for k, v in scalars.items()]


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
    if days:
        return f"{days}d{hours:02}h"
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{seconds:02}s" if minutes else f"{seconds}s"


def plot_loss(workdir: str | os.PathLike) -> pathlib.Path:
    """Draw train and held-out loss against tokens into WORKDIR/loss.png; returns its path.

    Raises ValueError where the run has recorded no step yet.
    """
    path = pathlib.Path(workdir) / RECORDS
    if not path.exists():
        raise ValueError(f"{path} does not exist: give the --workdir of a run that has trained")
    curves = {"train": ([], []), "eval": ([], [])}
    for _, record in read_records(path):
        tokens, losses = curves.get(record["kind"], ([], []))
        if "loss" in record and math.isfinite(loss := float(record["loss"])):
            tokens.append(record["tokens"])
            losses.append(loss)
    if not curves["train"][0]:
        raise ValueError(f"{path} has no step with a finite loss: nothing to draw yet")
    figure = _draw(*curves["train"], *curves["eval"], title=path.absolute().parent.name)
    # Made aside and renamed: who looks during training never sees half a picture.
    target, temporary = path.with_name(PLOT), path.with_name(PLOT + ".tmp")
    figure.savefig(temporary, format="png", dpi=150)
    temporary.replace(target)
    return target


def _draw(tokens, losses, eval_tokens, eval_losses, *, title: str):
    """A matplotlib figure of the curves."""
    from matplotlib.figure import Figure  # not pyplot: no global state, safe in a thread

    largest = max(tokens + eval_tokens)
    unit, name = next(
        (u, n) for u, n in ((1e9, "billions"), (1e6, "millions"), (1e3, "thousands"), (1, ""))
        if largest >= u or u == 1
    )  # fmt: skip
    x, eval_x = [t / unit for t in tokens], [t / unit for t in eval_tokens]
    smooth = _smoothed(losses)

    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.add_subplot()
    label = "train"
    if len(losses) >= 100:  # with fewer, smoothing leaves them as they are
        label = "train, smoothed"
        axes.plot(
            x, losses, color="tab:blue", alpha=0.25, linewidth=0.8, label="train, each record"
        )
    axes.plot(x, smooth, color="tab:blue", linewidth=1.8, label=f"{label}: {smooth[-1]:.3f} at end")
    if eval_x:
        label = f"held-out: {eval_losses[-1]:.3f} at end"
        axes.plot(eval_x, eval_losses, color="tab:orange", linewidth=1.8, marker="o", markersize=4,
                  label=label)  # fmt: skip
    # The steep first steps and single spikes may leave the frame: the rest is what one looks for.
    settled = smooth[len(smooth) // 50 :] + [
        loss for t, loss in zip(eval_tokens, eval_losses, strict=True) if t >= largest / 50
    ]
    low, high = min(settled), max(settled)
    margin = 0.08 * (high - low) or 0.1
    axes.set_ylim(low - margin, high + margin)
    axes.set_xlim(0, largest / unit * 1.01)
    axes.set_title(f"Loss of {title}")
    axes.set_xlabel(f"training tokens ({name})" if name else "training tokens")
    axes.set_ylabel("cross-entropy (nats per token)")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


def _smoothed(values: list[float]) -> list[float]:
    """Mean over a fiftieth of the values around each: no lag, but for the last ones; few: as is."""
    reach = len(values) // 100
    sums = [0.0, *itertools.accumulate(values)]
    smooth = []
    for i in range(len(values)):
        left = min(reach, i)  # symmetric in the steep beginning
        right = min(left, len(values) - 1 - i)
        smooth.append((sums[i + right + 1] - sums[i - left]) / (left + right + 1))
    return smooth


def main():
    """`python -m llmx.metrics WORKDIR`."""
    parser = argparse.ArgumentParser(
        prog="python -m llmx.metrics", description="Draw the loss curves of a run to loss.png."
    )
    parser.add_argument("workdir", help="the --workdir of the run; it may still be training")
    try:
        print(plot_loss(parser.parse_args().workdir))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()

"""What a run writes of its metrics: metrics.jsonl and TensorBoard events.

Both are read and written line by line: 10^6 records need no more memory than ten. A disk that is
full, or away, is told once; what could not be written waits in memory and is written later.
"""

import collections
import contextlib
import json
import math
import os
import pathlib
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from llmx.runtime.auxiliary import Auxiliary

RECORDS = "metrics.jsonl"
DAMAGED = "metrics.damaged.jsonl"  # lines of metrics.jsonl that are no records
REPLACED = "metrics.replaced.jsonl"  # what it held when the run began anew
EVENTS = "tensorboard"
LONGEST_LINE = 2**16  # bytes; records have some hundreds
LONGEST_KIND = 64  # characters of "train", "eval", ...
MOST_WAITING = 20_000  # records that wait for a disk, some megabytes
EXPECTED = ("train", "eval")  # kinds of which a checkpoint says which steps have a record
MOST_RANGES = 1000  # of a kind that a checkpoint names; the newest, where there are more

Ranges = list[list[int]]  # ascending steps, as [first, last, stride] each


class RecordFile:
    """metrics.jsonl, each (kind, step) once and in order; every record is in the file at once.

    A file that cannot be written is no error: see the head of this module.
    """

    def __init__(
        self, path: pathlib.Path, *, start_step: int, log: Callable[[str], None],
        expected: Mapping[str, Ranges] | None = None,
    ):  # fmt: skip
        """Records after `start_step` are dropped, and lines that are no records are set aside.

        expected: what `steps` was when `start_step` was saved; what is missing of it is told.
        """
        self._path, self._start_step, self._log = path, start_step, log
        self._expected = expected or {}
        self.steps: dict[str, Ranges] = {}  # of `EXPECTED`: which have a record, also if it waits
        self._waiting: collections.deque[tuple[str, int, bytes]] = collections.deque()
        self._num_lost = 0
        self._file: int | None = None  # descriptor
        self._end, self._torn = 0, False  # of the file's whole lines; whether bytes follow them
        self._written: dict[str, int] = {}  # kind -> its latest step in the file
        self._auxiliary = Auxiliary(f"{path} cannot be written", log=log)
        self._auxiliary(self._open)
        self._last = dict(self._written)  # kind -> its latest step, also if it waits

    def write(self, record: dict) -> bool:
        """Append and flush; False where this step is recorded already (evaluated again)."""
        kind, step = record["kind"], record["step"]
        if step <= self._last.get(kind, -1):
            return False
        self._last[kind] = step
        _append_step(self.steps, kind, step)
        clean = {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v
                 for k, v in record.items()}  # fmt: skip
        self._waiting.append((kind, step, f"{json.dumps(clean, allow_nan=False)}\n".encode()))
        if len(self._waiting) > MOST_WAITING:
            self._waiting.popleft()
            self._num_lost += 1
        self._auxiliary(self._flush)
        return True

    def close(self):
        """Writes what still waits, if the disk is back."""
        if self._waiting:
            self._auxiliary(self._flush, last=True)
        if self._waiting or self._num_lost:
            self._log(
                f"warning: {self._num_lost + len(self._waiting)} records are not in {self._path}"
            )
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open(self):
        if self._file is not None:
            os.close(self._file)
            self._file = None
        if self._start_step is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            found: dict[str, Ranges] = {}
            self._written = keep_until(self._path, self._start_step, self._log, found)
            self._tell_missing(found)
            later = self.steps  # records that wait already
            self.steps = found | {kind: found.get(kind, []) + later[kind] for kind in later}
            self._start_step = None  # opened again, the file is continued as it is
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        self._end, self._torn = os.fstat(self._file).st_size, False

    def _tell_missing(self, found: Mapping[str, Ranges]):
        for kind, ranges in self._expected.items():
            missing: dict[str, Ranges] = {}
            for step in _difference(ranges, found.get(kind, [])):
                if step <= self._start_step:
                    _append_step(missing, kind, step)
            if missing:
                self._log(
                    f"warning: {self._path} has no {kind!r} records of {_steps_text(missing[kind])}"
                    f", which it had when step {self._start_step} was saved (the file was cut or "
                    "edited, or its disk was full): curves lack them, and the training goes on"
                )

    def _flush(self):
        if self._file is None or not self._is_in_place():
            self._open()
        if self._torn:
            os.ftruncate(self._file, self._end)
            self._torn = False
        while self._waiting:
            kind, step, line = self._waiting[0]
            if step > self._written.get(kind, -1):
                self._append(line)
                self._written[kind] = step
            self._waiting.popleft()

    def _append(self, line: bytes):
        self._torn, rest = True, line
        while rest:  # a disk that becomes full takes a part
            rest = rest[os.write(self._file, rest) :]
        self._end, self._torn = self._end + len(line), False

    def _is_in_place(self) -> bool:
        """Whether the open file is still the one under this name: a deleted one takes writes."""
        try:
            found = os.stat(self._path)
        except FileNotFoundError:
            return False
        return os.path.samestat(found, os.fstat(self._file))


def scan(path: str | os.PathLike) -> Iterator[tuple[bytes, dict | None]]:
    """Each line of a metrics.jsonl with its record, or None where it is none.

    A last line without its end, where a crash cut a record off, is left out. Longer lines than any
    record has come in pieces.
    """
    with open(path, "rb") as file:
        inside = False  # a line that is too long
        while line := file.readline(LONGEST_LINE):
            ends = line.endswith(b"\n")
            if not ends and len(line) < LONGEST_LINE:
                return
            yield line, _parse(line) if ends and not inside else None
            inside = not ends


def read_records(path: str | os.PathLike) -> Iterator[dict]:
    """The records of a metrics.jsonl; lines that are none are skipped."""
    return (record for _, record in scan(path) if record is not None)


def _parse(line: bytes) -> dict | None:
    try:
        record = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return None
    if len(record["kind"]) > LONGEST_KIND:
        return None
    step, tokens = record.get("step"), record.get("tokens", 0)
    whole = type(step) is int and type(tokens) is int
    return record if whole and 0 <= step < 2**62 and 0 <= tokens < 2**62 else None


def number(value: object) -> float:
    """A scalar of a record; nan for "nan" and for what is no number."""
    try:
        return float(value) if isinstance(value, int | float | str) else math.nan
    except (ValueError, OverflowError):
        return math.nan


def keep_until(
    path: pathlib.Path, last_step: int, log: Callable[[str], None], steps: dict[str, Ranges]
) -> dict[str, int]:  # fmt: skip
    """Leaves the records up to `last_step` in the file, each (kind, step) once.

    Lines that are no records are moved into metrics.damaged.jsonl, with one warning; from step 0
    all are moved into metrics.replaced.jsonl. Killed at any
    moment, the file is the old one or the new one. Puts the steps of `EXPECTED` kinds into `steps`.

    Returns {kind: its latest step}.
    """
    if not path.exists():
        return {}
    if last_step <= 0:
        if path.stat().st_size:
            _replace(path)
            log(f"{path.name} had records of an earlier start: moved to {path.with_name(REPLACED)}")
        return {}
    latest: dict[str, int] = {}
    end, in_order, num_damaged = 0, True, 0  # end: of the first lines, as long as all are kept
    position = 0
    for line, kept, damaged in _sorted_out(path, last_step, latest, steps):
        if kept:
            in_order = in_order and end == position
            end += len(line)
        position += len(line)
        num_damaged += damaged
    if num_damaged:
        _set_aside(path, last_step)
        log(f"warning: {damaged_text(num_damaged, path)}: moved to {path.with_name(DAMAGED)}")
    if in_order:
        os.truncate(path, end)
    else:
        temporary = path.with_suffix(".tmp")
        with open(temporary, "wb") as file:
            file.writelines(line for line, kept, _ in _sorted_out(path, last_step, {}) if kept)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    return latest


def damaged_text(count: int, path: pathlib.Path) -> str:
    """How many lines of a file are no records."""
    return (
        f"{count} lines of {path} are no records" if count > 1 else f"1 line of {path} is no record"
    )


def _sorted_out(
    path: pathlib.Path, last_step: int, latest: dict[str, int],
    steps: dict[str, Ranges] | None = None,
) -> Iterator[tuple[bytes, bool, bool]]:  # fmt: skip
    """(line, kept, damaged); puts the latest step of each kind into `latest`, and those of
    `EXPECTED` kinds into `steps`."""
    for line, record in scan(path):
        kept = record is not None and latest.get(record["kind"], -1) < record["step"] <= last_step
        if kept:
            latest[record["kind"]] = record["step"]
            if steps is not None:
                _append_step(steps, record["kind"], record["step"])
        yield line, kept, record is None


def _append_step(steps: dict[str, Ranges], kind: str, step: int):
    """Adds a step, which is after those that are there."""
    if kind not in EXPECTED:
        return
    ranges = steps.setdefault(kind, [])
    if ranges and ranges[-1][1] + ranges[-1][2] == step:
        ranges[-1][1] = step
    elif ranges and not ranges[-1][2]:
        ranges[-1] = [ranges[-1][0], step, step - ranges[-1][0]]
    else:
        ranges.append([step, step, 0])
        del ranges[:-MOST_RANGES]


def _steps_of(ranges: Ranges) -> Iterator[int]:
    for first, last, stride in ranges:
        yield from range(first, last + 1, stride or 1)


def _difference(ranges: Ranges, others: Ranges) -> Iterator[int]:
    """The steps of the first that are not among those of the second."""
    rest = _steps_of(others)
    other = next(rest, math.inf)
    for step in _steps_of(ranges):
        while other < step:
            other = next(rest, math.inf)
        if step != other:
            yield step


def _steps_text(ranges: Ranges) -> str:
    """The first of them in words: "steps 1, 10 to 40 by 10"."""
    texts = [
        f"{first}" if first == last else f"{first} to {last}" + f" by {stride}" * (stride > 1)
        for first, last, stride in ranges
    ]
    noun = "step" if len(texts) == 1 and ranges[0][0] == ranges[0][1] else "steps"
    return f"{noun} {', '.join(texts[:8])}" + f" and {len(texts) - 8} more" * (len(texts) > 8)


def _set_aside(path: pathlib.Path, last_step: int):
    with open(path.with_name(DAMAGED), "ab") as file:
        file.writelines(line for line, _, damaged in _sorted_out(path, last_step, {}) if damaged)


def _replace(path: pathlib.Path):
    """Moves all of a file to the end of `REPLACED`."""
    with open(path.with_name(REPLACED), "ab") as file, open(path, "rb") as source:
        shutil.copyfileobj(source, file)
        file.flush()
        os.fsync(file.fileno())
    os.truncate(path, 0)


def _tags(kind: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Each number with its tag; of a list by its place there."""
    for name, value in values.items():
        several = isinstance(value, list)
        for place, each in enumerate(value if several else [value]):
            if each is not None:
                yield f"{kind}/{name}" + f"/{place:03}" * several, each


class EventFile:
    """TensorBoard event files, opened by the first write (the imports take 0.2 seconds).

    `add` is for the thread that trains, the rest for the one that writes.
    """

    def __init__(self, directory: pathlib.Path, *, start_step: int):
        self._directory, self._start_step, self._writer = directory, start_step, None
        self._waiting = collections.deque(maxlen=MOST_WAITING)

    def add(self, kind: str, step: int, seconds: float, scalars: Mapping[str, Any]):
        """Notes what the next `flush` writes."""
        self._waiting.append((kind, step, seconds, scalars))

    def flush(self):
        """Writes what waits. After an error it waits still, and goes into another file."""
        if not self._waiting:
            return
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        try:
            if self._writer is None:
                self._writer = self._open()
                self._put(time.time(), file_version="brain.Event:2")
                if self._start_step > 0:  # TensorBoard forgets this step and all after it
                    session = SessionLog(status=SessionLog.START)
                    self._put(time.time(), step=self._start_step + 1, session_log=session)
            while self._waiting:
                kind, step, seconds, scalars = self._waiting[0]
                values = [Summary.Value(tag=tag, simple_value=v) for tag, v in _tags(kind, scalars)]
                self._put(seconds, step=step, summary=Summary(value=values))
                self._writer.flush()
                self._start_step = max(self._start_step, step)
                self._waiting.popleft()
        except Exception:
            self.close()
            raise

    def _put(self, seconds: float, **fields):
        # Record format and message types only: TensorBoard's own writer imports TensorFlow
        # wherever it is installed.
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.write(Event(wall_time=seconds, **fields).SerializeToString())

    def _open(self):
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._directory.mkdir(parents=True, exist_ok=True)
        stem = f"events.out.tfevents.{time.time():.3f}.{socket.gethostname()}.{os.getpid()}"
        return RecordWriter(open(self._directory / stem, "wb"))

    def close(self):
        """Closes the file; a later `flush` opens another."""
        writer, self._writer = self._writer, None
        if writer is not None:
            with contextlib.suppress(OSError):  # of what a full disk did not take: it waits still
                writer.close()

"""What a run writes of its metrics: metrics.jsonl and TensorBoard events."""

import json
import math
import os
import pathlib
import socket
import time

RECORDS = "metrics.jsonl"
EVENTS = "tensorboard"


class RecordFile:
    """metrics.jsonl, each (kind, step) once and in order; every record is in the file at once."""

    def __init__(self, path: pathlib.Path, *, start_step: int):
        earlier = read_records(path) if start_step > 0 and path.exists() else []
        kept = {(r["kind"], r["step"]): line for line, r in earlier if r["step"] <= start_step}
        # Made aside and renamed: a run killed here leaves the old file or the new one.
        temporary = path.with_suffix(".tmp")
        with open(temporary, "w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in kept.values())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        self._last = dict(sorted(kept))  # kind -> its latest step
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
    # The last is empty, or the start of a record that a crash cut off.
    *lines, _ = pathlib.Path(path).read_text(encoding="utf-8").split("\n")
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


class EventFile:
    """A TensorBoard event file, opened by the first write (the imports take 0.2 seconds)."""

    def __init__(self, directory: pathlib.Path, *, start_step: int):
        self._directory, self._start_step, self._writer = directory, start_step, None

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

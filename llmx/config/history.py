"""WORKDIR/history.jsonl: a line for each start of a run, for its first checkpoint, for each time
that it went back, and for each rollback. A start has what changed in the config since the start
before it.

The first process writes it. A line that cannot be written is a warning; a line that was torn by a
kill, or is damaged, is left out when the file is read. `python -m llmx.config.history WORKDIR`
shows it.
"""

import contextlib
import copy
import hashlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import llmx
from llmx import config as config_lib
from llmx.checkpoint import checkpointer, identity, mirror
from llmx.checkpoint.local_places import RUN
from llmx.config import Config
from llmx.data import transient
from llmx.runtime import agreement, auxiliary, exits, printable, records

FILE = "history.jsonl"
START, WENT_BACK, ROLLBACK, SAVED = "start", "went back", "rollback", "saved"
Log = Callable[[str], None]
_DAMAGED = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


def read(workdir: str | os.PathLike) -> Iterator[dict[str, Any]]:
    """The records of a run, oldest first; lines that are no records are left out."""
    return (record for record in _lines(workdir) if record is not None)


def damaged(workdir: str | os.PathLike) -> str:
    """Which lines of the file are no records, and what to do; "" where all are."""
    wrong = [number for number, record in enumerate(_lines(workdir), 1) if record is None]
    if not wrong:
        return ""
    few = ", ".join(map(str, wrong[:8])) + (", ..." if len(wrong) > 8 else "")
    what = f"line {few} is no record" if len(wrong) == 1 else f"lines {few} are no records"
    return f"{pathlib.Path(workdir, FILE)}: {what}, and left out: delete what is damaged"


def _lines(workdir: str | os.PathLike) -> Iterator[dict[str, Any] | None]:
    """The record of each line; None where it is none."""
    path = pathlib.Path(workdir, FILE)
    if not path.is_file():
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
                yield record if _is_record(record) else None
            except (ValueError, RecursionError):
                yield None


def _is_record(record: Any) -> bool:
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return False
    sections = [record.get(name, {}) for name in ("config", "changed", "versions")]
    if not all(isinstance(section, dict) for section in sections):
        return False
    identity.flat(sections[0])  # RecursionError where it is too deep
    return all(isinstance(pair, list) and len(pair) == 2 for pair in sections[1].values())


def append(workdir: str | os.PathLike, kind: str, values: Mapping[str, Any], *, log: Log) -> None:
    """Adds a record of this kind, with the time; only the first process does."""
    import jax

    if jax.process_index() != 0:
        return
    path = pathlib.Path(workdir, FILE)
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    line = json.dumps({"kind": kind, "time": now, **values}) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a+b") as file:
            end = file.seek(0, os.SEEK_END)
            if end:
                file.seek(end - 1)
                line = line if file.read(1) == b"\n" else "\n" + line  # behind a torn line
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        log(f"warning: {path} is not kept: {error}; the run goes on")


def record_start(config: Config, *, resumed_from: int, log: Log) -> None:
    """Records that the run starts, with its config: whole, or what differs from the last start."""
    import jax

    if jax.process_index() != 0:
        return
    present = config_lib.to_json(config)
    try:
        last = last_config(config.workdir)
        if text := damaged(config.workdir):
            log(f"warning: {text}")
    except OSError as error:
        path = pathlib.Path(config.workdir, FILE)
        log(f"warning: {path} cannot be read: {auxiliary.cause(error)}; the run goes on")
        last = None
    if last is None:
        values = {"config": present}
    else:
        values = {"changed": identity.differences(last, present)}
    device = jax.devices()[0]
    values |= {
        "config_hash": _hash(present),
        "resumed_from": resumed_from,
        "versions": versions(),
        "host": socket.gethostname(),
        "processes": jax.process_count(),
        "devices": f"{jax.device_count()} x {device.device_kind}",
    }
    append(config.workdir, START, values, log=log)


def noting_saves(
    workdir: str, saved: Callable[[str, int], None], log: Log
) -> Callable[[int], None]:  # fmt: skip
    """What is called with the step of each complete checkpoint: it records the first, and calls
    `saved` with work directory and step."""

    def note(step: int) -> None:
        with contextlib.suppress(OSError):
            if not last_saved(workdir):
                append(workdir, SAVED, {"step": step, "text": f"checkpoint {step}"}, log=log)
        saved(workdir, step)

    return note


def last_saved(workdir: str | os.PathLike) -> int:
    """The newest step of which the history says that it was saved; 0 where it says so of none, or
    the run went back to its beginning since."""
    step = 0
    for record in read(workdir):
        back_to = record.get("at") if record["kind"] == ROLLBACK else None
        if isinstance(back_to, list) and back_to[-1:] == [0]:
            step = 0
        found = record.get({SAVED: "step", START: "resumed_from"}.get(record["kind"], ""))
        step = max(step, found) if type(found) is int else step
    return step


def require_checkpoints(config: Config, restored: int | None = None) -> None:
    """Raises ValueError where the run has saved checkpoints and none is left: it would begin anew.

    restored: the step that was restored. Before that is known, what the local tier may have counts.
    """
    import jax

    folder = pathlib.Path(config.workdir, "checkpoints")
    unknown = restored is None and config.checkpoint.local_directory and (folder / RUN).exists()
    if restored or unknown or jax.process_index() != 0:
        return
    if checkpointer.list_steps(str(folder)) or not (step := last_saved(config.workdir)):
        return
    metrics = pathlib.Path(config.workdir, records.RECORDS)
    found = records.read_records(metrics) if metrics.exists() else ()
    last = max((record["step"] for record in found), default=0)
    raise ValueError(
        f"{folder} holds no checkpoint, and the run has saved some: {FILE} tells of step {step}, "
        f"{records.RECORDS} of steps up to {last}. Bring the checkpoints back; to begin anew, name "
        f"another --workdir, or move {FILE} away (and {records.RECORDS}, if it is not to be "
        f"moved to {records.REPLACED})"
    )


def last_config(workdir: str | os.PathLike) -> dict[str, Any] | None:
    """The config of the last start as JSON, put together from the changes; None if unknown."""
    keys: dict[str, Any] | None = None
    wanted = None
    for record in read(workdir):
        if record["kind"] != START:
            continue
        wanted = record.get("config_hash")
        if "config" in record:
            keys = identity.flat(record["config"])
        elif keys is not None:
            for key, (_, now) in record.get("changed", {}).items():
                if now == identity.ABSENT:
                    keys.pop(key, None)
                else:
                    keys[key] = now
    # A line in between may be lost: then the next start has the whole config again.
    if keys is None or _hash(keys) != wanted:
        return None
    return _nested(keys)


def versions() -> dict[str, str]:
    """Those that processes compare (`agreement.versions`), and the commit of a checkout."""
    root = pathlib.Path(llmx.__file__).parents[1]
    if not (root / ".git").exists():
        return agreement.versions()
    command = ("git", "-C", str(root), "rev-parse", "HEAD")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return agreement.versions()
    return agreement.versions() | {"commit": done.stdout.strip()}


def with_rollbacks(config: Config, log: Log, peers: agreement.Peers) -> Config:
    """The config with the rollbacks that its work directory has recorded, as process 0 reads them.

    Those of the command line count where they are as many; where the user goes back to before a
    rollback, it is forgotten. Every process must call it.
    """
    from llmx.checkpoint import resume

    found = recorded_rollbacks(config.workdir) if peers.index == 0 else ""
    at, skipped = json.loads(peers.broadcast("recorded rollbacks", json.dumps(found)))
    if len(at) <= len(config.rollback.at):
        return config
    back_to = resume.going_back_to(config)
    kept = [i for i in range(len(at)) if back_to is None or at[i] <= back_to]
    for number in sorted({*range(len(at))} - {*kept}):
        log(f"the rollback to step {at[number]} is forgotten: the run goes back to before it")
    if len(kept) <= len(config.rollback.at):
        return config
    config = copy.deepcopy(config)
    config.rollback.at = tuple(at[i] for i in kept)
    config.rollback.skipped = tuple(skipped[i] for i in kept)
    log(
        f"the rollbacks of {config.workdir} count: rollback.at={config.rollback.at}, "
        f"rollback.skipped={config.rollback.skipped}"
    )
    return config


def recorded_rollbacks(workdir: str | os.PathLike) -> tuple[list[int], list[int]]:
    """(rollback.at, rollback.skipped) of the run in a work directory: of its config.json, or of
    its history where that cannot be read."""
    root = pathlib.Path(workdir)
    if not (root / "checkpoints").is_dir():
        return [], []  # a new run
    try:
        section = json.loads((root / "config.json").read_text())["rollback"]
        return _pairs(section)
    except (OSError, *_DAMAGED):
        pass
    last: tuple[list[int], list[int]] = [], []
    for record in read(workdir):
        if record["kind"] == ROLLBACK:
            try:
                last = _pairs(record)
            except _DAMAGED:
                continue
    return last


def _pairs(section: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    at, skipped = (list(map(int, section[name])) for name in ("at", "skipped"))
    if len(at) != len(skipped) or any(number < 0 for number in at + skipped):
        raise ValueError("not pairs of steps and numbers of batches")
    return at, skipped


def lines(workdir: str | os.PathLike) -> Iterator[str]:
    """The history for people."""
    for record in read(workdir):
        when = record.get("time", "")
        if record["kind"] != START:
            yield f"{when} {record['kind']}: {record.get('text', '')}"
            continue
        versions = record.get("versions", {})
        yield (
            f"{when} start at step {record.get('resumed_from')}: {record.get('processes')} "
            f"processes, {record.get('devices')}, on {record.get('host')}; "
            + ", ".join(f"{name} {value}" for name, value in versions.items())
        )
        changed = record.get("changed", {})
        yield from (f"    {line}" for line in identity.difference_lines(changed))


def main(argv: Sequence[str] | None = None) -> int:
    """Shows the history of a run."""
    command = printable.Parser(prog="python -m llmx.config.history", description=FILE)
    command.add_argument("workdir", help="of the run")
    workdir = command.parse_args(argv).workdir
    try:
        workdir = mirror.reading(workdir)
        if not pathlib.Path(workdir, FILE).is_file():
            raise ValueError(f"{workdir} holds no {FILE}: name the workdir of a run")
        exits.show("\n".join(lines(workdir)))
        if text := damaged(workdir):
            printable.to_stderr(f"warning: {text}")
    except ValueError as error:
        printable.to_stderr(transient.told(error))
        return transient.exit_code(error)
    except OSError as error:
        printable.to_stderr(f"{workdir}/{FILE} cannot be shown: {auxiliary.cause(error)}")
        return transient.exit_code(error)
    return 0


def _hash(config: Mapping[str, Any]) -> str:
    text = json.dumps(identity.flat(config), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _nested(keys: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in keys.items():
        *sections, name = key.split(".")
        inner = nested
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = value
    return nested


if __name__ == "__main__":
    sys.exit(main())

"""What work directories say of their runs: numbers by step, config, launches, state.

A number takes 8 bytes for each record, so that 10^6 records fit. A step that stands in the file
more than once, as after files were joined, counts as the last launch took it.
"""

import array
import bisect
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llmx.checkpoint import identity
from llmx.runtime import goodput, ownership, records

TRAIN = ("loss", "grad_norm", "learning_rate", "tokens_per_second", "data_share")
HELD_OUT = "held-out"  # the series of the loss of evaluations
HISTORY = "history.jsonl"  # `llmx.config.history` writes it
UNKNOWN = "unknown"  # values of a config that cannot be read
ALIVE_SECONDS = 60.0  # since the owner of a work directory gave a sign of life


@dataclasses.dataclass(frozen=True)
class Series:
    """A number by step: arrays [records]; NaN where a record has none that is finite."""

    steps: np.ndarray
    tokens: np.ndarray
    values: np.ndarray

    @property
    def last(self) -> float:
        """NaN where there is none."""
        return float(self.values[-1]) if len(self.values) else math.nan


@dataclasses.dataclass(frozen=True)
class Run:
    """One run, as its work directory has it now."""

    name: str
    workdir: str
    series: Mapping[str, Series]  # by the names of TRAIN, and HELD_OUT
    config: Mapping[str, Any]  # {"batch.size": 8, ...}; {} where it cannot be read
    launches: int
    rollbacks: int
    seconds: float  # by the clock, over all launches; NaN where nothing says so
    useful: float  # share of them that went into steps which count; NaN as above
    alive: bool  # whether a process trains it now
    notes: Sequence[str]  # what is damaged or odd

    @property
    def num_steps(self) -> int:
        """Number of the last recorded step; 0 = there is none yet."""
        steps = self.series["loss"].steps
        return int(steps[-1]) if len(steps) else 0

    @property
    def num_tokens(self) -> int:
        tokens = self.series["loss"].tokens
        return int(tokens[-1]) if len(tokens) else 0

    @property
    def state(self) -> str:
        """ "finished", or how far it is."""
        total = self.config.get("steps")
        known = isinstance(total, int) and total > 0
        if known and self.num_steps >= total:
            return "finished"
        share = f" at {self.num_steps / total:.0%}" if known else ""
        return f"going on{share}" if self.alive else f"stopped{share}"


def problems(workdirs: Sequence[str]) -> list[str]:
    """Which of them are no runs, each with its remedy."""
    found, seen = [], {}
    for workdir in workdirs:
        path = pathlib.Path(workdir)
        if not (path / records.RECORDS).is_file():
            what = f"has no {records.RECORDS}" if path.is_dir() else "is no folder"
            found.append(f"{workdir} {what}: name the work directory of a run that has trained")
        elif (real := os.path.realpath(workdir)) in seen:
            found.append(f"{workdir} is the same run as {seen[real]}: name it once")
        else:
            seen[real] = workdir
    return found


def names(workdirs: Sequence[str]) -> list[str]:
    """What runs are called: the last part of the path, or as much of it as tells them apart."""
    parts = [pathlib.Path(workdir).absolute().parts for workdir in workdirs]
    for count in range(1, max(map(len, parts)) + 1):
        short = ["/".join(each[-count:]) for each in parts]
        if len(set(short)) == len(short):
            break
    return short


def read(workdir: str, name: str) -> Run:
    """The run of a work directory. Raises OSError where its records cannot be read."""
    path = pathlib.Path(workdir, records.RECORDS)
    train, held_out, notes, span = _series(path)
    config, text = _config(workdir)
    notes += [text] if text else []
    starts, rollbacks = _launches(workdir)
    counted = goodput.read(pathlib.Path(workdir, goodput.FILE))
    seconds = sum(counted["seconds"].values()) if counted else span
    useful = counted["seconds"]["useful"] / seconds if counted and seconds else math.nan
    return Run(
        name=name, workdir=workdir, series={**train, HELD_OUT: held_out}, config=config,
        launches=max(starts, counted["launches"] if counted else 0, 1), rollbacks=rollbacks,
        seconds=seconds, useful=useful, alive=_alive(workdir), notes=notes,
    )  # fmt: skip


class _Columns:
    """Numbers of the records of one kind."""

    def __init__(self, fields: Sequence[str]):
        self._fields = fields
        self._steps, self._tokens = array.array("q"), array.array("q")
        self._values = {field: array.array("d") for field in fields}
        self.repeated = self.not_finite = 0
        self.first_not_finite = 0  # step

    def add(self, record: Mapping[str, Any]) -> None:
        step = record["step"]
        if self._steps and step <= self._steps[-1]:
            first = bisect.bisect_left(self._steps, step)
            self.repeated += len(self._steps) - first
            for column in (self._steps, self._tokens, *self._values.values()):
                del column[first:]
        self._steps.append(step)
        self._tokens.append(record.get("tokens", 0))
        for field, column in self._values.items():
            value = records.number(record.get(field))
            column.append(value if math.isfinite(value) else math.nan)
        if "loss" in record and math.isnan(self._values["loss"][-1]):
            self.first_not_finite = self.first_not_finite or step
            self.not_finite += 1

    def series(self) -> dict[str, Series]:
        steps, tokens = np.array(self._steps), np.array(self._tokens)
        return {
            field: Series(steps, tokens, np.array(column)) for field, column in self._values.items()
        }


def _series(path: pathlib.Path) -> tuple[dict[str, Series], Series, list[str], float]:
    """Series of training, that of evaluations, what is wrong, and seconds from first to last."""
    kinds = {"train": _Columns(TRAIN), "eval": _Columns(("loss",))}
    num_damaged, times = 0, []
    for _, record in records.scan(path):
        if record is None:
            num_damaged += 1
        elif record["kind"] in kinds:
            kinds[record["kind"]].add(record)
            moment = records.number(record.get("time"))
            if math.isfinite(moment):
                times = [min([moment, *times[:1]]), max([moment, *times[1:]])]
    train, notes = kinds["train"], []
    if num_damaged:
        notes.append(f"{records.damaged_text(num_damaged, path)}: left out")
    if train.repeated:
        notes.append(f"{path}: {train.repeated} records of steps that were taken again: left out")
    if train.not_finite:
        count = "1 record" if train.not_finite == 1 else f"{train.not_finite} records"
        notes.append(
            f"{path}: {count} with a loss that is not finite, the first at step "
            f"{train.first_not_finite}"
        )
    span = times[-1] - times[0] if times else math.nan
    return train.series(), kinds["eval"].series()["loss"], notes, span


def _config(workdir: str) -> tuple[dict[str, Any], str]:
    """The config, and what is wrong with its file."""
    path = pathlib.Path(workdir, "config.json")
    try:
        values = json.loads(path.read_bytes().decode())
        if not isinstance(values, dict):
            raise ValueError("it is no JSON object")
        return identity.flat(values), ""
    except (OSError, ValueError, RecursionError) as error:
        return {}, f"{path} cannot be read ({error}): its values are left out"


def _launches(workdir: str) -> tuple[int, int]:
    """Starts and rollbacks in the history; lines that are no records count as none."""
    kinds: list[Any] = []
    with contextlib.suppress(OSError), open(pathlib.Path(workdir, HISTORY), "rb") as file:
        for line in file:
            with contextlib.suppress(ValueError, RecursionError, AttributeError):
                kinds.append(json.loads(line).get("kind"))
    return kinds.count("start"), kinds.count("rollback")


def _alive(workdir: str) -> bool:
    try:
        return time.time() - os.path.getmtime(pathlib.Path(workdir, ownership.FILE)) < ALIVE_SECONDS
    except OSError:
        return False


def differences(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """{key: its value in each run} of the keys whose values differ."""
    known = [run for run in runs if run.config]
    keys = dict.fromkeys(key for run in known for key in run.config if key != "workdir")
    value = lambda run, key: run.config.get(key, identity.ABSENT)  # noqa: E731
    return {
        key: [value(run, key) if run.config else UNKNOWN for run in runs]
        for key in keys
        if len({json.dumps(value(run, key)) for run in known}) > 1
    }

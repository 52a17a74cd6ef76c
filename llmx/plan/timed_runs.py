"""Steps of llmx that a GPU took, beside what the planner says of them.

A table is a CSV file, a row for each step of `scripts/bench_gpu.py`: `machine` as `--machine` takes
it, `model` a preset, the batch, some keys of the config, `seconds` of a step and `peak_bytes` of
the allocator.
"""

import csv
import pathlib
from typing import NamedTuple

from llmx import config
from llmx.config import checks
from llmx.model import families
from llmx.plan import machines, run_report, step_time

COLUMNS = (
    "machine", "model", "rows", "length", "remat", "loss_chunks", "attention", "seconds",
    "peak_bytes",
)  # fmt: skip


class Run(NamedTuple):
    """One row of a table. Errors are predicted over measured, less one."""

    name: str
    seconds: float  # of a step, measured
    predicted: float
    peak: float  # bytes, measured
    counted: float

    @property
    def step_error(self) -> float:
        return self.predicted / self.seconds - 1

    @property
    def peak_error(self) -> float:
        return self.counted / self.peak - 1


def is_table(path: pathlib.Path) -> bool:
    """Whether a CSV file has these columns."""
    with path.open(newline="") as file:
        return set(COLUMNS) <= set(next(csv.reader(file), ()))


def read(path: pathlib.Path) -> list[Run]:
    with path.open(newline="") as file:
        return [_run(row) for row in csv.DictReader(file)]


def _run(row: dict[str, str]) -> Run:
    run, machine = config.default(), machines.parse(row["machine"])
    run.model = families.preset(row["model"])
    run.batch.size, run.batch.sequence_length = int(row["rows"]), int(row["length"])
    run.data.pack, run.remat = False, row["remat"]
    run.loss.chunks = int(row["loss_chunks"])
    run.attention.implementation = row["attention"]
    run = checks.resolve(run, machine.topology.num_devices)
    held, _ = run_report.count(run, machine.topology)
    name = (
        f"{row['model']} {row['rows']} x {row['length']} {row['machine']} remat={row['remat']} "
        f"loss.chunks={row['loss_chunks']} attention.implementation={row['attention']}"
    )
    predicted = step_time.of(run, machine).step
    return Run(name, float(row["seconds"]), predicted, float(row["peak_bytes"]), held.peak)

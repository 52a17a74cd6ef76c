"""The planner's step time against steps of llmx that an H200 took (tests/golden/steps)."""

import csv
import pathlib

import pytest

from llmx import config
from llmx.config import checks
from llmx.model import families
from llmx.plan import machines, step_time

TABLE = pathlib.Path(__file__).parent.parent / "golden" / "steps" / "h200_llmx.csv"
ROWS = list(csv.DictReader(TABLE.open()))
# Attention's share of the peak grows with the length of rows (docs/performance.md), and the planner
# takes one share for all.
TIME = 0.05


def predicted(row: dict[str, str]) -> float:
    run = config.default()
    run.model = families.preset(row["model"])
    run.batch.size, run.batch.sequence_length = int(row["rows"]), int(row["length"])
    run.data.pack, run.remat = False, row["remat"]
    run.loss.chunks = int(row["loss_chunks"])
    run.attention.implementation = row["attention"]
    return step_time.of(checks.resolve(run, 1), machines.parse("h200:1")).step


@pytest.mark.parametrize(
    "row", ROWS, ids=lambda row: f"{row['model']}-{row['length']}-{row['remat']}"
)
def test_the_step_time_is_that_of_the_device(row):
    assert abs(predicted(row) / float(row["seconds"]) - 1) < TIME

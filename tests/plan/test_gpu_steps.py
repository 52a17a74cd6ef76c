"""The planner against steps of llmx that an H200 took (tests/golden/steps)."""

import pathlib

import pytest

from llmx.plan import timed_runs

TABLE = pathlib.Path(__file__).parent.parent / "golden" / "steps" / "h200_llmx.csv"
RUNS = timed_runs.read(TABLE)
# Attention's share of the peak grows with the length of rows (docs/performance.md), and the planner
# takes one share for all.
TIME, PEAK = 0.05, 0.03


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_the_step_is_that_of_the_device(run):
    assert abs(run.step_error) < TIME
    assert abs(run.peak_error) < PEAK

"""The planner against steps of llmx that an H200 took (tests/golden/steps)."""

import dataclasses
import importlib.resources
import pathlib

import numpy as np
import pytest

from llmx.plan import hardware_file, machines, timed_runs

TABLE = pathlib.Path(__file__).parent.parent / "golden" / "steps" / "h200_llmx.csv"
RUNS = timed_runs.read(TABLE)
TIME, PEAK = 0.05, 0.03
FIRST = RUNS[:6]  # that were measured: Llama 1B and 3B with saved products


@pytest.mark.parametrize("run", FIRST, ids=lambda run: run.name)
def test_the_step_is_that_of_the_device(run):
    assert abs(run.step_error) < TIME
    assert abs(run.peak_error) < PEAK


def test_steps_that_were_measured_later():
    """Gemma-2 takes longer than counted, and GPT-2 less memory than it was compiled for."""
    others = RUNS[len(FIRST) :]
    assert len(others) == 12
    assert np.mean([abs(run.step_error) for run in others]) <= 0.04
    assert max(abs(run.step_error) for run in others) <= 0.09
    peaks = sorted(abs(run.peak_error) for run in others)
    assert peaks[-2] < PEAK and peaks[-1] < 0.09


def test_steps_by_a_calibration_of_ones_own(monkeypatch):
    """With all that `calibrate` measured on the same device."""
    own = hardware_file.read(importlib.resources.files("llmx.plan") / "tables" / "h200.json")
    parse = machines.parse
    as_measured = lambda name: dataclasses.replace(parse(name), core=own.core)  # noqa: E731
    monkeypatch.setattr(machines, "parse", as_measured)
    errors = [abs(run.step_error) for run in timed_runs.read(TABLE)]
    assert np.mean(errors) <= 0.04 and max(errors) <= 0.11

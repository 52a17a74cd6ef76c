"""megatron.py and measured_steps.py: operators by formulas, pipelines by the simulator, errors on
published step times, and that these errors can tell a wrong model."""

import dataclasses
import pathlib
import runpy
import sys

import numpy as np
import pytest

from llmx.pipeline import schedules, simulate
from llmx.plan import measured_steps, megatron
from llmx.plan.measured_steps import A100, H100, Step
from llmx.plan.megatron import FUSED, UNFUSED, Attention, Collective, Job, Prices, Product

ROOT = pathlib.Path(__file__).parents[2]
TABLES = ROOT / "tests" / "golden" / "steps"
SCRIPT = ROOT / "scripts" / "validate_planner.py"
JOB = Job(
    width=2048, heads=16, layers=24, sequence=1024, vocabulary=51200, batch=64, microbatch=2,
    tensor=4, data=2, pipeline=2,
)  # fmt: skip
# Largest mean absolute errors: the project's goals, on whole tables and on rows that constants were
# not fitted to. Reached are 6.5%, 8.2% and 4.2%, and 7.0%, 7.7% and 5% on the rows held out.
GOALS = {"a100_single_node": 0.08, "a100_multi_node": 0.10, "h100_megatron": 0.08}


@pytest.fixture(scope="module")
def tables():
    return {name: measured_steps.read(TABLES / f"{name}.csv") for name in GOALS}


# -------------------------------------------------------------------------------------- operators


def flops(operators) -> float:
    products = [one for one in operators if isinstance(one, Product)]
    fused = sum(one.flops for one in operators if isinstance(one, Attention))
    return fused + sum(2.0 * one.m * one.n * one.k * one.batch for one in products)


@pytest.mark.parametrize("tensor", [1, 4, 16])
def test_flops_of_a_layer(tensor):
    """arXiv 2104.04473: forward 24 n D^2 + 4 n T D, backward twice that."""
    job = dataclasses.replace(JOB, tensor=tensor)
    n, D, T = job.tokens, job.width, job.sequence
    forward, backward = megatron.layer(job, UNFUSED)
    assert flops(forward) * tensor == 24 * n * D**2 + 4 * n * T * D
    assert flops(backward) == 2 * flops(forward)
    forward, backward = megatron.layer(job, FUSED)
    weights, scores = 24 * n * D**2, 4 * n * T * D / 2  # causal: half of the scores
    assert flops(forward) * tensor == weights + scores
    assert flops(backward) * tensor == 2 * weights + 2.5 * scores


def test_flops_of_the_head():
    job = dataclasses.replace(JOB, tensor=1)
    forward, backward = megatron.head(job, UNFUSED)
    assert flops(forward) == 2 * job.tokens * job.width * 51200
    assert flops(backward) == 2 * flops(forward)


def test_flops_of_the_model():
    """GPT-3: 6 FLOPs for each of 174.6 billion parameters and token, and 96 layers of scores."""
    gpt3 = Job(width=12288, heads=96, layers=96, sequence=2048, vocabulary=51200, batch=1)
    parameters = 12 * 96 * 12288**2 + 51200 * 12288
    by_hand = 2048 * (6 * parameters + 12 * 96 * 2048 * 12288)
    assert megatron.model_flops(gpt3) == pytest.approx(by_hand)
    assert megatron.parameters(gpt3) == parameters


def test_collectives_of_a_layer():
    """Two all-reduces forward and two backward; or twice as many halves, and two more gathers."""
    size = 2 * JOB.tokens * JOB.width
    for pass_ in megatron.layer(JOB, UNFUSED):
        found = [one for one in pass_ if isinstance(one, Collective)]
        assert found == [Collective("all-reduce", size)] * 2
    forward, backward = megatron.layer(JOB, FUSED)
    kinds = [one.kind for one in (*forward, *backward) if isinstance(one, Collective)]
    assert (kinds.count("reduce-scatter"), kinds.count("all-gather")) == (4, 6)
    alone = dataclasses.replace(JOB, tensor=1)
    assert not any(isinstance(one, Collective) for one in megatron.layer(alone, UNFUSED)[0])


def test_words_are_padded_to_tensor():
    assert dataclasses.replace(JOB, vocabulary=50257, tensor=8).words * 8 == 51200


# ------------------------------------------------------------------------------------------- time


@pytest.mark.parametrize("stages", [[1.0] * 4, [1.0, 1.0, 1.0, 1.5], [1.2, 1.0, 1.0, 1.5], [2.0]])
@pytest.mark.parametrize("microbatches", [2, 8])
def test_pipeline_as_simulated(stages, microbatches):
    table = schedules.one_f_one_b(len(stages), microbatches)
    forward = np.array(stages)
    simulated = simulate.simulate(table, forward=forward, backward=3 * forward, barriers=False)
    assert megatron.pipeline_seconds(4 * forward, microbatches) == pytest.approx(
        simulated.step_time
    )


@pytest.mark.parametrize("stages, microbatches, chunks", [(4, 8, 2), (4, 4, 3), (2, 8, 4)])
def test_interleaved_pipeline_as_simulated(stages, microbatches, chunks):
    table = schedules.interleaved_1f1b(stages, microbatches, chunks)
    simulated = simulate.simulate(table, forward=1.0, backward=2.0, barriers=False).step_time
    assert megatron.pipeline_seconds([3.0] * stages, microbatches, chunks) == pytest.approx(
        simulated
    )


def test_the_slower_of_host_and_device_sets_the_pace():
    """Small microbatches take as long as the host needs; without a host half as large ones less."""
    small = dataclasses.replace(JOB, width=512, heads=8, tensor=1, pipeline=1, microbatch=1)
    smaller = dataclasses.replace(small, sequence=512)
    by_host = [sum(megatron.stage_seconds(Prices(job, UNFUSED, A100.core)))
               for job in (small, smaller)]  # fmt: skip
    assert by_host[1] == pytest.approx(by_host[0], rel=0.02)
    compiled = A100.replace({"host": 0.0})
    by_device = [sum(megatron.stage_seconds(Prices(job, UNFUSED, compiled.core)))
                 for job in (small, smaller)]  # fmt: skip
    assert by_device[1] < 0.7 * by_device[0] < 0.7 * by_host[0]


def test_tensor_parallelism_beyond_a_node_is_slow():
    inside = dataclasses.replace(JOB, tensor=8, data=1, pipeline=1, microbatch=8)
    across = dataclasses.replace(inside, tensor=16)
    times = [Prices(job, UNFUSED, A100.core).over_tensor("all-reduce", 1e8)
             for job in (inside, across)]  # fmt: skip
    assert times[1] > 3 * times[0]


def test_microbatches_share_the_bubble():
    few, many = (dataclasses.replace(JOB, pipeline=4, batch=batch) for batch in (16, 160))
    per_sequence = [megatron.step_seconds(job, UNFUSED, A100.core) / job.batch
                    for job in (few, many)]  # fmt: skip
    assert per_sequence[1] < 0.7 * per_sequence[0]


# ---------------------------------------------------------------------------- published step times


@pytest.mark.parametrize("name", GOALS)
def test_errors_reach_the_goals(name, tables):
    table = tables[name]
    error = measured_steps.mean_error(table.trainer, table.steps)
    assert error <= GOALS[name]
    _, constant = measured_steps.constant_errors(table.trainer, table.steps)
    assert error < np.abs(constant).mean()


def test_one_calibration_for_both_tables_of_a100(tables):
    assert tables["a100_single_node"].trainer is tables["a100_multi_node"].trainer
    assert len(A100.fitted) <= 8 and len(H100.fitted) <= 3


@pytest.mark.parametrize("name, constant, factor", [
    ("a100_multi_node", "products", 0.8), ("a100_single_node", "host", 0.7),
    ("a100_single_node", "memory", 0.5), ("a100_multi_node", "network", 0.4),
    ("h100_megatron", "products", 0.85),
])  # fmt: skip
def test_another_constant_misses_the_goals(name, constant, factor, tables):
    table = tables[name]
    value = table.trainer.constants()[constant]
    wrong = table.trainer.replace({constant: factor * value})
    assert measured_steps.mean_error(wrong, table.steps) > GOALS[name]


@pytest.mark.parametrize("trainer, names", [
    (A100, ("a100_single_node", "a100_multi_node")), (H100, ("h100_megatron",)),
])  # fmt: skip
def test_errors_on_rows_held_out(trainer, names, tables):
    steps = [tables[name].steps for name in names]
    errors = measured_steps.held_out_errors(trainer, steps, splits=3)
    for name, error in zip(names, errors, strict=True):
        assert error <= GOALS[name]


def test_fit_finds_the_constants_of_computed_steps(tables):
    """Steps as other constants give them; the fit starts from the recorded ones."""
    steps = tables["a100_single_node"].steps[::6] + tables["a100_multi_node"].steps[::4]
    truth = {"products": 0.75, "memory": 0.6, "host": 40e-6, "network": 0.5}
    other = A100.replace(truth)
    found = measured_steps.fit(A100, [[Step(job, other.seconds(job)) for job, _ in steps]])
    assert found.constants() == pytest.approx(truth, rel=0.03)


def test_constant_utilisation_is_the_best(tables):
    table = tables["a100_single_node"]
    best, errors = measured_steps.constant_errors(table.trainer, table.steps)
    for factor in np.geomspace(0.3, 3, 50):
        assert np.abs(errors).mean() <= np.abs((errors + 1) / factor - 1).mean() + 1e-12
    assert 0 < best < 1


def test_unknown_columns_are_refused(tmp_path):
    path = tmp_path / "other.csv"
    path.write_text("hidden,seconds\n1,2\n")
    with pytest.raises(ValueError, match="neither form"):
        measured_steps.read(path)


def test_the_script_compares_all_tables(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["validate_planner.py", "--times", "--splits=0"])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    printed = capsys.readouterr().out
    for path in TABLES.glob("*.csv"):
        assert path.stem in printed


def test_the_script_compares_files_of_the_users(tmp_path, monkeypatch, capsys):
    lines = (TABLES / "h100_megatron.csv").read_text().splitlines()
    path = tmp_path / "mine.csv"
    path.write_text("\n".join(lines[:4]) + "\n")
    monkeypatch.setattr(sys, "argv", ["validate_planner.py", "--times", str(path), "--splits=0"])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    printed = capsys.readouterr().out
    assert "mine: " in printed and "constant utilisation" in printed
    assert printed.count("pipeline 1") == 3

"""What replicas with a strategy keep is what their recipe has, and phases send what the run's mean
is made of."""

import json
import pathlib

import pytest

from llmx.config import checks, flags
from llmx.plan import __main__ as command
from llmx.plan import exchange, memory, sizes, step_time, traffic
from llmx.plan.machines import parse

ROOT = pathlib.Path(__file__).parents[2]
STRATEGIES = {
    "int8": (), "top_k": (), "power_sgd": (), "stale": (), "zero_one": (), "local_sgd": (),
    "diloco": (), "one_bit": ("--config.sync.warmup_steps=100",),
}  # fmt: skip


def _run(strategy, *more):
    given = (f"--config={ROOT}/configs/gpt2_124m.py", f"--config.sync.strategy={strategy}",
             "--config.sharding.layout=hsdp", "--config.batch.accumulation=1", *more)  # fmt: skip
    _, run, problems = flags.parse(flags.parser("test", ""), given)
    return checks.resolve(run, 8, problems=problems)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_more_is_kept_and_less_is_sent(strategy):
    run = _run(strategy, *STRATEGIES[strategy])
    plain = sizes.of(_run("mean"))
    held, before = memory.state(sizes.of(run)), memory.state(plain)
    assert held["parameters"] == pytest.approx(before["parameters"], rel=1e-3)
    assert held["exchange"] > 0.9 * held["parameters"]
    sent = traffic.by_axes(exchange.messages(sizes.of(run)))
    mean = traffic.by_axes(exchange.messages(plain))
    # Stale sums are in fp32; all others send less than the mean.
    assert (sent["data"] > mean["data"]) == (strategy == "stale")
    assert step_time.of(run, parse("h100:8")).step > 0


def test_the_command_counts_replicas_with_a_strategy(capsys):
    given = (f"--config={ROOT}/configs/gpt2_124m.py", "--machine=v5e:2x4", "--json",
             "--config.sync.strategy=int8", "--config.sharding.layout=hsdp")  # fmt: skip
    code = command.main(given)
    report = json.loads(capsys.readouterr().out)
    assert code == 0 and report["memory"]["state"]["exchange"] > 0
    assert report["phases"]["compressed"]["data"] == pytest.approx(report["sent"]["data"])


def test_the_mean_over_a_run_is_that_of_its_phases():
    run = _run("one_bit", *STRATEGIES["one_bit"])
    by_phase = {
        phase: traffic.by_axes(exchange.messages(sizes.of(run), phase=phase))["data"]
        for phase in ("mean", "compressed")
    }
    share = 100 / run.steps
    expected = share * by_phase["mean"] + (1 - share) * by_phase["compressed"]
    found = traffic.by_axes(exchange.messages(sizes.of(run)))["data"]
    assert found == pytest.approx(expected, rel=1e-6)
    assert by_phase["compressed"] < by_phase["mean"] / 10
    assert by_phase["mean"] == pytest.approx(
        traffic.by_axes(traffic.of(sizes.of(_run("mean"))))["data"], rel=0.01
    )


def test_sums_within_a_replica_stay():
    run = _run("int8", "--config.mesh.data=2", "--config.mesh.fsdp=4")
    kinds = {(one.purpose, one.axes) for one in exchange.messages(sizes.of(run))}
    assert (exchange.PURPOSE, ("data",)) in kinds and ("gradients", ("fsdp",)) in kinds
    assert not any("data" in axes and purpose == "gradients" for purpose, axes in kinds)

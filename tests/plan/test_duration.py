"""How long a run takes: goodput against a simulation, intervals against a scan."""

import functools
import json
import math
import pathlib

import numpy as np
import pytest

from llmx.plan import __main__ as command
from llmx.plan import duration
from llmx.runtime import hardware

ROOT = pathlib.Path(__file__).parents[2]
H100 = hardware.CHIPS["h100_sxm"]


def _simulated(interval, save, restart, mtbf, segments=20_000):
    """Failures at random, one segment of work and its checkpoint after the other."""
    random, spent = np.random.default_rng(0), 0.0
    for _ in range(segments):
        needed = interval + save
        while (failure := random.exponential(mtbf)) < needed:
            spent += failure
            while (again := random.exponential(mtbf)) < restart:
                spent += again
            spent += restart
        spent += needed
    return segments * interval / spent


@pytest.mark.parametrize(
    ("interval", "save", "restart", "mtbf"),
    [(600, 10, 300, 10_000), (100, 30, 60, 1_000), (2_000, 5, 600, 4_000), (50, 20, 0, 200)],
)
def test_goodput_is_that_of_a_simulation(interval, save, restart, mtbf):
    told = duration.goodput(interval, save=save, restart=restart, mtbf=mtbf)
    assert told == pytest.approx(_simulated(interval, save, restart, mtbf), rel=0.02)


@pytest.mark.parametrize(("save", "mtbf"), [(10, 10_000), (60, 3_600), (300, 2_000), (1, 1e6)])
def test_no_interval_is_better_than_the_best(save, mtbf):
    at = lambda interval: duration.goodput(interval, save=save, restart=60, mtbf=mtbf)  # noqa: E731
    best = duration.best_interval(save, mtbf)
    scan = np.geomspace(best / 30, best * 30, 4_001)
    assert at(best) == pytest.approx(max(map(at, scan)), rel=1e-3)


def test_rare_failures_give_youngs_interval():
    assert duration.best_interval(10, 1e9) == pytest.approx(math.sqrt(2 * 10 * 1e9), rel=1e-3)
    assert duration.best_interval(100, 40) == 40  # Daly's limit for frequent ones


def test_goodput_falls_to_nothing_without_an_error():
    assert duration.goodput(1e6, save=10, restart=10, mtbf=1.0) == 0.0
    assert duration.goodput(1.0, save=1e-9, restart=0, mtbf=1e9) == pytest.approx(1.0)


def test_llama3_spent_nine_tenths_of_its_time_on_training():
    """arXiv 2407.21783, 3.3.4: 16,384 H100s, 54 days, 419 unexpected interruptions, over 90%."""
    of = duration.of(1e12, 16 * 2**20, 5.0, 16_384, H100)
    assert of.seconds / of.failures == pytest.approx(54 * 86400 / 419, rel=1e-6)
    assert 0.9 < of.goodput < 0.95


def test_a_run_of_one_device():
    of = duration.of(1e6, 1_000, 3.6, 1, H100, price=2.0)
    assert of.steps == 1_000 and of.seconds == pytest.approx(3_600 / of.goodput)
    assert of.dollars == pytest.approx(2.0 * of.device_hours)
    assert of.kilowatt_hours == pytest.approx(0.7 * of.device_hours)
    # Two devices are one chip of a TPU7x, whose power is not published.
    of = duration.of(1e6, 1_000, 3.6, 2, hardware.CHIPS["tpu7x"], price=2.0)
    assert of.dollars == pytest.approx(of.device_hours) and of.kilowatt_hours is None


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_what_is_not_above_zero_is_refused(bad):
    for name in ("interval", "save", "mtbf"):
        values = {"interval": 1.0, "save": 1.0, "restart": 0.0, "mtbf": 1.0} | {name: bad}
        with pytest.raises(ValueError, match=f"{name}=.* above 0"):
            duration.goodput(values.pop("interval"), **values)
    with pytest.raises(ValueError, match="tokens="):
        duration.of(bad, 1, 1.0, 1, H100)
    if bad != 0:
        with pytest.raises(ValueError, match="restart="):
            duration.goodput(1.0, save=1.0, restart=bad, mtbf=1.0)


def _run(capsys, *args: str):
    code = command.main((f"--config={ROOT}/configs/llama3_8b.py", "--machine=h100:8", *args))
    return code, capsys.readouterr()


def test_the_report_has_days_cost_and_an_interval(capsys):
    args = ("--step-seconds=1.5", "--tokens=1e12", "--price=2", "--json")
    code, printed = _run(capsys, *args)
    told = json.loads(printed.out)["duration"]
    assert code == 0 and told["steps"] == math.ceil(1e12 / 65_536)
    assert told["seconds"] == pytest.approx(told["steps"] * 1.5 / told["goodput"])
    assert told["flops"]["6PD"] == pytest.approx(6 * 8.030e9 * 1e12, rel=1e-3)
    assert told["flops"]["6PD"] < told["flops"]["exact"]
    assert 0.2 < told["mfu"] < 0.5
    assert told["step_seconds"] == 1.5
    code, printed = _run(capsys, "--step-seconds=1.5", "--config.checkpoint.every=7")
    assert code == 0 and "as configured, checkpoint.every=7: goodput" in printed.out


def test_an_interval_of_ones_own_costs_what_it_costs():
    of = functools.partial(duration.of, 1e9, 65_536, 2.0, 8, H100)
    best, own = of(), of(every=7)
    assert own.interval == 7 and own.goodput < best.goodput and own.seconds > best.seconds
    # Saves of 10 s behind 14 s of work.
    assert own.goodput == pytest.approx(14 / 24, rel=0.01)
    # No longer than the run.
    assert duration.of(1e6, 65_536, 2.0, 8, H100).interval == math.ceil(1e6 / 65_536)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--html=/dev/full",), "--html=/dev/full: No space left on device: use another file"),
        (("--tokens=0",), "tokens=0 must be a number of tokens above 0"),
        (("--step-seconds=0",), "step_seconds=0 must be a number of seconds above 0"),
        (("--step-seconds=1", "--device-mtbf=-2"), "device_mtbf=-2"),
        (("--step-seconds=1", "--restart-seconds=-1"), "restart_seconds=-1"),
        (("--step-seconds=1", "--save-seconds=inf"), "save_seconds=inf"),
        (("--step-seconds=1", "--price=-1"), "price=-1"),
        (("--step-seconds=1", "--price=inf"), "price=inf"),
        (("--step-seconds=1", "--price=1e308"), "price=1e+308 must be a number of dollars"),
        (("--step-seconds=1", "--tokens=1e300"), "tokens=1e+300"),
        (("--step-seconds=0.2",), "no step is shorter than 0.5"),
    ],
)
def test_bad_input(args, words, capsys):
    code, printed = _run(capsys, *args)
    assert code == 2 and words in printed.err and not printed.out


def test_an_interval_that_gets_nowhere_is_said(capsys):
    often = ("--step-seconds=1.5", "--device-mtbf=0.5", "--restart-seconds=1")
    code, printed = _run(capsys, *often, "--config.checkpoint.every=20000")
    assert code == 0 and "checkpoint.every=20000: with a failure every" in printed.out


def test_where_a_run_never_ends_the_report_stays(capsys, tmp_path):
    html = tmp_path / "plan.html"
    args = ("--step-seconds=1", "--device-mtbf=1e-5", f"--html={html}")
    code, printed = _run(capsys, *args, "--json")
    report = json.loads(printed.out)
    assert code == 0 and report["memory"]["fits"] and report["time"]["step"] > 0
    assert report["duration"] is None and "are hardly ever done" in report["no_duration"]
    assert "are hardly ever done" in html.read_text()
    code, printed = _run(capsys, *args)
    assert code == 0 and "no length of the run: with a failure every" in printed.out


def test_a_duration_needs_a_machine(capsys):
    config = f"--config={ROOT}/configs/llama3_70b_pipeline.py"
    code = command.main((config, "--chip=v5p", "--step-seconds=2"))
    assert code == 2 and "--step-seconds without --machine" in capsys.readouterr().err


def test_the_planners_own_time_is_not_refused(capsys):
    """fp32 on H100: shares are of the peak of exact fp32, as the time is."""
    code, printed = _run(capsys, "--config.precision=fp32", "--json")
    time = json.loads(printed.out)["time"]
    assert code == 0 and 0.3 < time["mfu"] < time["hfu"] < 1 and time["peak_flops"] == 67e12

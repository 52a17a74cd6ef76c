"""`llmx.plan calibrate`: what it measures, that it goes on where it was, and what it writes."""

import dataclasses
import functools
import itertools
import json
import os
import re
import types

import jax
import numpy as np
import pytest

from llmx.aot import topologies
from llmx.plan import __main__ as command
from llmx.plan import calibrate, gemm, hardware_file, machines, routes, stopwatch
from llmx.plan.traffic import Message

ABOUT = {"device_kind": "cpu", "num_devices": 2, "shape": "2", "jax": "0", "cores": 2,
         "processor": "A CPU"}  # fmt: skip
PEAK, BANDWIDTH = 1e11, 2e10


def fake(key):
    """Seconds of a machine with constant rates, where each operator takes a microsecond more."""
    if key[0] == "product":
        _, m, n, k, *_ = key
        return 1e-6 + 2.0 * m * n * k / PEAK
    if key[0] == "attention":
        _, batch, length, heads, _, _, _, passes = key
        scores = batch * heads * gemm.scores_of(length, in_blocks=True)
        return passes * (1e-6 + scores * 1e-9)
    return 1e-6 + 2.0 * key[1] / BANDWIDTH if key[1:] else 1e-6


def test_a_stopped_run_goes_on_where_it_was(tmp_path):
    keys, path, asked = calibrate.keys_of("cpu", 2, True), tmp_path / "cpu.json.part", []

    def stops(key):
        if len(asked) == 5:
            raise KeyboardInterrupt
        asked.append(key)
        return fake(key)

    with pytest.raises(KeyboardInterrupt):
        calibrate.run(path, ABOUT, keys, stops, lambda text: None)
    with path.open("a") as file:
        file.write('[["product", 12')  # killed while it wrote
    again, said = [], []
    found = calibrate.run(
        path, ABOUT, keys, lambda key: again.append(key) or fake(key), said.append
    )
    assert asked == keys[:5] and again == keys[5:]
    assert found == {key: fake(key) for key in keys}
    assert said[0] == f"{path}: 5 of {len(keys)} are measured already"
    assert calibrate.run(path, ABOUT, keys, None, said.append) == found  # nothing is measured


def test_a_last_line_without_its_end_is_kept(tmp_path):
    keys, path, asked = calibrate.keys_of("cpu", 2, True)[:5], tmp_path / "cpu.json.part", []
    clock = lambda key: asked.append(key) or fake(key)  # noqa: E731
    calibrate.run(path, ABOUT, keys[:3], clock, lambda text: None)
    path.write_text(path.read_text().removesuffix("\n"))
    for _ in range(2):  # what is added is on lines of its own
        found = calibrate.run(path, ABOUT, keys, clock, lambda text: None)
        assert found == {key: fake(key) for key in keys} and asked == keys


@pytest.mark.parametrize("damage", ["5", '[["start"], "x"]', "[7, 0.5]", '[["start"], 0]', "\xff"])
def test_damaged_measurements_are_made_again(damage, tmp_path):
    keys, path, asked = calibrate.keys_of("cpu", 2, True)[:3], tmp_path / "cpu.json.part", []
    calibrate.run(path, ABOUT, keys[:1], fake, lambda text: None)
    with path.open("ab") as file:
        file.write(damage.encode("latin-1") + b"\n")
    clock = lambda key: asked.append(key) or fake(key)  # noqa: E731
    assert calibrate.run(path, ABOUT, keys, clock, lambda text: None).keys() == {*keys}
    assert asked == keys[1:]


def test_ctrl_c_says_how_to_go_on(tmp_path, monkeypatch, capsys):
    def stops(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(calibrate, "run", stops)
    monkeypatch.setattr(calibrate, "this_machine", lambda: dict(ABOUT))
    out = tmp_path / "cpu.json"
    assert calibrate.main(["--out", str(out)]) == calibrate.STOPPED
    assert f"the same command goes on from {out}.part" in capsys.readouterr().err


def test_measurements_of_another_machine_are_refused(tmp_path):
    path = tmp_path / "cpu.json.part"
    calibrate.run(path, ABOUT, [("start",)], fake, lambda text: None)
    with pytest.raises(ValueError, match=r"holds measurements of .* remove it"):
        calibrate.run(path, ABOUT | {"jax": "1"}, [("start",)], fake, lambda text: None)


def test_what_was_measured_is_what_the_planner_computes_with(tmp_path):
    keys = calibrate.keys_of("cpu", 2, False)
    own = calibrate.hardware_of({key: fake(key) for key in keys}, "cpu", ABOUT)
    path = tmp_path / "cpu.json"
    path.write_text(json.dumps(hardware_file.to_json(own)))
    core = machines.parse("cpu:2", path).core
    for key in keys:
        if key[0] == "product":
            _, m, n, k, dtype, _ = key
            assert gemm.seconds(m, n, k, dtype, core) == pytest.approx(fake(key), rel=2e-3)
    between = gemm.seconds(300, 700, 500, "float32", core)
    assert between == pytest.approx(2.0 * 300 * 700 * 500 / PEAK, rel=0.1)
    assert core.bandwidth == pytest.approx(BANDWIDTH, rel=0.01)
    scores = 6 * 4 * gemm.scores_of(512, in_blocks=True)
    for seconds in gemm.attended_seconds(scores, 512, 24, 64, "float32", core):
        assert seconds == pytest.approx(1e-6 + scores * 1e-9, rel=1e-2)
    for key in keys:
        if key[0] == "attention" and key[-1] == 1:
            _, batch, length, heads, _, head_dim, dtype, _ = key
            scores = batch * heads * gemm.scores_of(length, in_blocks=True)
            times = gemm.attended_seconds(scores, length, batch * heads, head_dim, dtype, core)
            for seconds in times:
                assert seconds == pytest.approx(fake(key), rel=1e-3)
    assert own.rates.link == pytest.approx(BANDWIDTH / 2, rel=0.01)


def test_a_known_chip_keeps_its_row():
    about = ABOUT | {"device_kind": "NVIDIA H100 80GB HBM3", "num_devices": 8, "shape": "1x8"}
    keys = calibrate.keys_of("accelerator", 8, True)
    seconds = lambda key: fake(key) * PEAK / 600e12  # noqa: E731
    own = calibrate.hardware_of({key: seconds(key) for key in keys}, "h100", about)
    assert own.base == "h100" and own.platform == "gpu" and own.core.chip.max_domain == 8
    assert own.core.calibration.products == pytest.approx(600 / 989.5, rel=0.01)
    assert own.core.calibration.units == 132
    assert hardware_file.of(hardware_file.to_json(own)) == own


def _reduced(machine, size):
    """Seconds of a sum over all devices by the planner."""
    n = machine.topology.num_devices
    message = Message("sums", "all-reduce", ("data",), size, 1, n)
    return routes.Routes(machine, {"data": n}).seconds(message)


@pytest.mark.parametrize(
    "name", ["v5p:2x2x2", "v5p:4x4x4", "v5e:2x4", "tpu7x:2x2x1", "h100:8", "h100:2x8"]
)
def test_the_planners_own_times_give_its_own_rates(name):
    machine = machines.parse(name)
    topology = machine.topology
    about = ABOUT | {
        "device_kind": topology.device_kind, "num_devices": topology.num_devices,
        "shape": "x".join(map(str, topology.shape)),
    }  # fmt: skip
    seconds = {key: fake(key) for key in calibrate.keys_of("accelerator", 1, True)}
    sizes = [key[1] for key in calibrate.keys_of("accelerator", 2, True) if key[0] == "all_reduce"]
    sums = {("all_reduce", size): _reduced(machine, size) for size in sizes}
    own = calibrate.hardware_of(seconds | sums, topology.family, about)
    assert own.rates.link == pytest.approx(machine.rates.link)
    assert own.rates.start == pytest.approx(machine.rates.start, abs=1e-12)
    # Of links twice as slow, with a start, where no network is in between.
    slow = {key: 2 * time + 1e-5 for key, time in sums.items()}
    rates = calibrate.hardware_of(seconds | slow, topology.family, about).rates
    if name == "h100:2x8":
        assert rates == machine.rates
        return
    assert rates.link == pytest.approx(machine.rates.link / 2)
    again = dataclasses.replace(machine, rates=rates)
    for key, time in slow.items():
        assert _reduced(again, key[1]) == pytest.approx(time)


@pytest.mark.parametrize("name", ["v5p:2x2x2", "v5e:2x4", "tpu7x:2x2x1", "h100:2x8"])
def test_the_shape_of_devices(name):
    topology = machines.parse(name).topology
    shape = (*topology.shape, 1, 1)[:3] if topology.platform == "tpu" else topology.shape
    places = list(itertools.product(*map(range, shape), range(topology.chip.devices_per_chip)))
    devices = [
        types.SimpleNamespace(
            platform=topology.platform, device_kind=topology.device_kind, coords=place[:3],
            process_index=place[0],
        )
        for place in places
    ]  # fmt: skip
    assert calibrate.shape_of(devices) == name.partition(":")[2]
    if topology.platform == "tpu":
        assert calibrate.shape_of(devices[:1] + devices[-1:]) == ""
    assert calibrate.shape_of(jax.devices()) == str(jax.device_count())


@pytest.mark.parametrize("line", ["", "{", '[["start", []], 1.0]', '[["start"], 1e-300]',
                                  f'[["start"], {10**400}]'])  # fmt: skip
def test_one_bad_line_loses_no_other(line, tmp_path):
    keys = calibrate.keys_of("cpu", 1, True)
    path = tmp_path / "cpu.json.part"
    calibrate.run(path, ABOUT, keys, fake, lambda text: None)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:5], line, *lines[6:]]) + "\n")
    again = []
    clock = lambda key: again.append(key) or fake(key)  # noqa: E731
    assert set(calibrate.run(path, ABOUT, keys, clock, lambda text: None)) == set(keys)
    assert len(again) == 1


def test_what_is_no_file_is_not_written_over(tmp_path, capsys):
    out = tmp_path / "pipe.json"
    os.mkfifo(out)
    assert calibrate.main(["--out", str(out), "--quick"]) == 2
    assert "is no file: give another --out" in capsys.readouterr().err
    (tmp_path / "cpu.json.new").mkdir()
    assert calibrate.main(["--out", str(tmp_path / "cpu.json"), "--quick"]) == 2
    assert "cpu.json.new is no file" in capsys.readouterr().err


def test_no_row_of_a_table_beats_the_peak():
    core = machines.parse("v5p:2x2x2").core
    wrong = dataclasses.replace(
        core.calibration, table=(gemm.Measured(1, 1, 1, "bfloat16", 1.0),)
    )  # fmt: skip
    core = dataclasses.replace(core, calibration=wrong)
    seconds = gemm.seconds(4096, 4096, 4096, "bfloat16", core)
    assert seconds >= 2 * 4096**3 / core.chip.peak("bfloat16")[0]


def test_products_above_the_peak_are_measured_again(tmp_path, monkeypatch, capsys):
    """A compiler that left out every second product gave 1.5 times the peak of an H200."""
    out, asked = tmp_path / "h200.json", []
    part = out.with_name("h200.json.part")

    def clock(key):
        asked.append(key)
        if key[0] == "product":
            return 2.0 * key[1] * key[2] * key[3] / (1.5e15 if key[1] == 1024 else 9.95e14)
        return fake(key)

    monkeypatch.setattr(calibrate, "measure", clock)
    about = ABOUT | {"device_kind": "NVIDIA H200", "num_devices": 1, "shape": "1x1"}
    monkeypatch.setattr(calibrate, "this_machine", lambda: dict(about))
    assert calibrate.main(["--quick", f"--out={out}"]) == 2 and not out.exists()
    said = capsys.readouterr().err.splitlines()[-1]
    assert "12 of 24 products took less than the peak of NVIDIA H200" in said
    assert re.search(r"allows: \[1024, \d+\] x \[\d+, \d+\] of bfloat16, \w", said)
    assert "at 989.5 TFLOP/s it takes" in said and part.exists()
    asked.clear()
    monkeypatch.setattr(calibrate, "measure", lambda key: asked.append(key) or 1e-3)
    assert calibrate.main(["--quick", f"--out={out}"]) == 0
    assert len(asked) == 12 and {key[0] for key in asked} == {"product"}


@pytest.mark.aot
@pytest.mark.parametrize("role", stopwatch.ROLES)
@pytest.mark.parametrize("turns", [50, 51])
def test_a_loop_on_gpus_computes_each_product(role, turns, monkeypatch):
    """As XLA:GPU compiles it with the flags of a run."""
    given, own = [], []
    monkeypatch.setattr(stopwatch, "_on_gpu", lambda: True)
    jit = jax.jit
    monkeypatch.setattr(
        jax, "jit", lambda *a, **k: own.append(k.get("compiler_options")) or jit(*a, **k)
    )
    monkeypatch.setattr(stopwatch, "seconds_of", lambda *loop: given.extend(loop))
    stopwatch.product(512, 1024, 256, "bfloat16", role)
    body, carry = given
    place = jax.sharding.SingleDeviceSharding(topologies.devices("h200:1")[0])
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), carry)
    lowered = stopwatch.loop_of(body).lower(shapes, turns)
    trips = r'known_trip_count":{"n":"(\d+)"'
    # Options of a run go before the loop's own here.
    in_pairs = topologies.compile(lowered, "gpu").as_text()
    assert re.findall(trips, in_pairs) == [str(turns // 2)]
    text = topologies.compile(lowered, "gpu", own[0]).as_text()
    assert re.findall(trips, text) == [str(turns)]
    assert text.count('custom_call_target="__cublas') == 1


def test_blocks_of_attention_are_counted():
    assert gemm.scores_of(512, in_blocks=True) == 512 * 512
    assert gemm.scores_of(1024, in_blocks=True) == 3 * 512 * 512
    assert gemm.scores_of(2048, 512, in_blocks=True) == 7 * 512 * 512
    for length, window in ((16, 0), (16, 5), (16, 40)):
        i, j = np.mgrid[:length, :length]
        seen = (j <= i) & (i - j < (window or length))
        assert gemm.scores_of(length, window, in_blocks=False) == seen.sum()


def test_the_stopwatch_measures_more_for_more_work(monkeypatch):
    monkeypatch.setattr(stopwatch, "least", functools.partial(stopwatch.least, most=0.3))
    # The least of several times: what else runs on the machine only adds to each.
    least = lambda measure, *given: min(measure(*given) for _ in range(3))  # noqa: E731
    small, large = (
        least(stopwatch.product, 8, size, size, "float32", "forward") for size in (32, 512)
    )
    assert 0 < small < large
    # Long enough for the backward pass, 2.5 forward ones, to be more than what else runs here.
    once, both = (
        least(stopwatch.attention, 1, 512, 2, 1, 8, "float32", passes) for passes in (1, 2)
    )
    assert 0 < once < both
    assert 0 < least(stopwatch.move, 2**10) < least(stopwatch.move, 2**22)
    assert stopwatch.first_touch(2**22) > 0


@pytest.mark.skipif(jax.device_count() < 2, reason="one device sums over nothing")
def test_sums_over_devices_are_measured():
    assert 0 < stopwatch.all_reduce(2**10) < stopwatch.all_reduce(2**24)


def test_the_command_writes_a_file_that_the_planner_takes(tmp_path, monkeypatch, capsys):
    out = tmp_path / "own.json"
    monkeypatch.setattr(calibrate, "measure", fake)
    monkeypatch.setattr(calibrate, "this_machine", lambda: dict(ABOUT))
    assert command.main(["calibrate", "--quick", f"--out={out}"]) == 0
    said = capsys.readouterr()
    assert "float32 99" in said.out or "float32 100" in said.out
    assert "1 of " in said.err and not out.with_name("own.json.part").exists()
    argv = ["--config=configs/quickstart.py", "--machine=cpu:1", f"--hardware={out}", "--json"]
    assert command.main(argv) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["time"]["step"] > 0


@pytest.mark.parametrize(
    ("out", "words"), [("", "is a folder: name a file"), ("none/cpu.json", "does not exist")]
)
def test_where_to_write_is_checked_before_anything_is_measured(
    out, words, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(calibrate, "measure", lambda key: pytest.fail("it was measured"))
    assert calibrate.main(["--quick", f"--out={tmp_path / out}"]) == 2
    assert words in capsys.readouterr().err and not list(tmp_path.iterdir())
    assert not tmp_path.with_name(f"{tmp_path.name}.part").exists()

"""metrics.py: the record file over kills and resumes, rates, displays, event files, the plot."""

import errno
import json
import math
import os
import pathlib
import shutil
import socket
import struct
import subprocess
import sys
import time
import tracemalloc

import numpy as np
import pytest

from llmx.model.experts.config import ENTROPY, LOAD_MAX
from llmx.runtime import auxiliary, bounds, records
from llmx.runtime.hardware import CHIPS
from llmx.runtime.metrics import MetricsConfig, Reporter, StepTimer, _duration
from llmx.runtime.plot import (
    MOST_COLUMNS,
    MOST_POINTS,
    Columns,
    Curve,
    plot_all,
    plot_layers,
    plot_loss,
    smoothed,
)
from llmx.runtime.records import read_records
from llmx.runtime.utilization import Utilization

QUIET = MetricsConfig(log_every=1, tensorboard=False, progress="off")


def report(workdir, config=QUIET, *, first=1, last=6, total=6, start_step=0, **options):
    """Steps first..last out of `total`, evaluated every 2: loss 10/step, held-out loss 11/step."""
    printed = []
    with Reporter(
        workdir, config, total_steps=total, tokens_per_step=100, start_step=start_step,
        log=printed.append, **options,
    ) as reporter:  # fmt: skip
        for step in range(first, last + 1):
            reporter.train(step, {"loss": 10 / step}, step_seconds=0.5, data_seconds=0.05)
            if step % 2 == 0:
                reporter.eval(step, {"loss": 11 / step})
    return printed


def recorded(workdir):
    return [(r["kind"], r["step"], r["loss"]) for r in read_records(workdir / "metrics.jsonl")]


def test_records_hold_what_was_reported(tmp_path):
    report(tmp_path, last=2)
    first, second, held_out = read_records(tmp_path / "metrics.jsonl")
    assert abs(first.pop("time") - time.time()) < 60
    assert first == {
        "kind": "train", "step": 1, "tokens": 100, "loss": 10.0, "step_seconds": 0.5,
        "data_seconds": 0.05, "tokens_per_second": 200.0, "data_share": pytest.approx(0.1),
    }  # fmt: skip
    assert (second["step"], second["tokens"], second["loss"]) == (2, 200, 5.0)
    assert (held_out["kind"], held_out["step"], held_out["loss"]) == ("eval", 2, 5.5)


@pytest.mark.parametrize("log_every", [1, 4])
def test_killed_and_resumed_equals_undisturbed(tmp_path, log_every):
    config = MetricsConfig(log_every=log_every, tensorboard=False, progress="off")
    report(tmp_path / "undisturbed", config, last=9, total=9)
    # Killed in step 7, in the middle of a record; the last checkpoint was of step 3.
    report(tmp_path / "killed", config, last=6, total=9)
    with open(tmp_path / "killed/metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "st')
    report(tmp_path / "killed", config, first=4, last=9, total=9, start_step=3)
    expected = recorded(tmp_path / "undisturbed")
    assert recorded(tmp_path / "killed") == expected
    steps = [step for kind, step, _ in expected if kind == "train"]
    assert steps == ([1, 2, 3, 4, 5, 6, 7, 8, 9] if log_every == 1 else [1, 4, 8, 9])


def test_spikes_are_recorded_and_noted(tmp_path):
    printed = []
    with Reporter(
        tmp_path, QUIET, total_steps=99, tokens_per_step=10, log=printed.append
    ) as reporter:
        for step in range(1, 51):
            norm = 40.0 if step == 45 else 1.0
            reporter.train(step, {"loss": 2.0, "grad_norm": norm})
    (spike,) = (r for r in read_records(tmp_path / "metrics.jsonl") if r["kind"] == "spike")
    assert (spike["step"], spike["tokens"], spike["grad_norm_median"]) == (45, 450, 1.0)
    assert printed == ["step 45: spike: grad_norm 40 against a running median of 1"]


def test_records_of_the_killed_run_give_way(tmp_path):
    report(tmp_path, last=4)
    with Reporter(tmp_path, QUIET, total_steps=6, tokens_per_step=100, start_step=2) as reporter:
        reporter.train(3, {"loss": 0.5})  # the same step on another mesh, say
    trained = [(step, loss) for kind, step, loss in recorded(tmp_path) if kind == "train"]
    assert trained == [(1, 10.0), (2, 5.0), (3, 0.5)]


def test_each_step_once_even_if_evaluated_again(tmp_path):
    report(tmp_path, last=4)
    with Reporter(tmp_path, QUIET, total_steps=6, tokens_per_step=100, start_step=4) as reporter:
        reporter.eval(4, {"loss": 99.0})
        reporter.eval(5, {"loss": 1.0})
    assert [r for r in recorded(tmp_path) if r[0] == "eval"] == [
        ("eval", 2, 5.5), ("eval", 4, 2.75), ("eval", 5, 1.0),
    ]  # fmt: skip


@pytest.mark.parametrize("cut, train, held_out", [
    (lambda lines: lines, "", ""),
    (lambda lines: [*lines[:-1], lines[-1][:9]], "", "step 12"),  # a torn last line
    (lambda lines: lines[:4], "steps 4 to 12", "steps 4 to 12 by 2"),
    (lambda lines: lines[1:], "step 1", ""),
    (lambda lines: [line for line in lines if b'"step": 5,' not in line], "step 5", ""),
    (lambda lines: [], "steps 1 to 12", "steps 2 to 12 by 2"),
], ids=["whole", "torn", "half", "head", "middle", "empty"])  # fmt: skip
def test_what_a_cut_file_lacks_is_told(tmp_path, cut, train, held_out):
    """A checkpoint says which steps have had records; those that the next one says are the rest."""
    path = tmp_path / "metrics.jsonl"
    with Reporter(tmp_path, QUIET, total_steps=20, tokens_per_step=1) as reporter:
        for step in range(1, 15):
            if step == 13:
                saved = json.loads(json.dumps(reporter.recorded))
            reporter.train(step, {"loss": 1.0})
            if step % 2 == 0:
                reporter.eval(step, {"loss": 2.0})
    whole = [line for line in path.read_bytes().splitlines(True) if json.loads(line)["step"] < 13]
    path.write_bytes(b"".join(cut(whole)))
    said = []
    with Reporter(
        tmp_path, QUIET, total_steps=20, tokens_per_step=1, start_step=12, recorded=saved,
        log=said.append,
    ) as reporter:  # fmt: skip
        again = reporter.recorded
        assert reporter.has_evaluated(12) == (not held_out.endswith(("12", "by 2")))
    texts = [f"no {kind!r} records of {steps}," for kind, steps in
             (("train", train), ("eval", held_out)) if steps]  # fmt: skip
    assert len(said) == len(texts) and all(map(str.__contains__, said, texts)), said
    report(tmp_path, first=13, last=13, total=20, start_step=12, recorded=again)
    assert report(tmp_path, first=13, last=13, total=20, start_step=12, recorded=again) == []


def test_a_checkpoint_names_few_ranges_of_steps(tmp_path):
    """Also where steps are recorded without an order."""
    with Reporter(tmp_path, QUIET, total_steps=9, tokens_per_step=1) as reporter:
        for number in range(3 * records.MOST_RANGES):
            reporter.train(number**2 + 1, {"loss": 1.0})
        assert len(reporter.recorded["train"]) <= records.MOST_RANGES


def test_starting_at_zero_begins_the_file_afresh(tmp_path):
    """What was in it is not lost."""
    before = b""
    for last in (4, 3):
        report(tmp_path, last=last)
        before += (tmp_path / "metrics.jsonl").read_bytes()
    report(tmp_path, last=1)
    assert recorded(tmp_path) == [("train", 1, 10.0)]
    replaced = tmp_path / "metrics.replaced.jsonl"
    assert replaced.read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", replaced.name}


GARBAGE = [
    b"oops", b"\x00" * 500, b"\xff\xfe{}", b"[1, 2]", b"[" * 50_000, b'{"loss": 1}', b"1e999", b"",
    b'{"kind": "train", "step": "3", "loss": 1}', b'{"kind": "train", "step": NaN}',
    b'{"kind": ["train"], "step": 3}', b'{"kind": "train", "step": 3, "tokens": {}}',
    b"x" * 200_000,
    b'{"kind": "train", "step": 4, "loss": 2.5, {"kind": "train", "step": 5}',
]  # fmt: skip


def test_damaged_lines_are_set_aside_on_resume(tmp_path):
    report(tmp_path, last=3)
    path = tmp_path / "metrics.jsonl"
    before = recorded(tmp_path)
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([lines[0], *GARBAGE, *lines[1:]]) + b"\n")
    assert recorded(tmp_path) == before
    printed = report(tmp_path, first=3, last=4, total=4, start_step=2)
    assert sum("no records: moved to" in line for line in printed) == 1
    assert printed[0].startswith(f"warning: {len(GARBAGE) + 3} lines of")  # one is in pieces
    assert recorded(tmp_path) == [*before[:3], ("train", 3, 10 / 3), ("train", 4, 2.5),
                                  ("eval", 4, 2.75)]  # fmt: skip
    aside = (tmp_path / "metrics.damaged.jsonl").read_bytes()
    assert all(line in aside for line in GARBAGE)
    assert not any("moved" in line for line in report(tmp_path, first=5, start_step=4))


def test_a_plot_skips_damaged_lines(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"\n".join(GARBAGE) + b"\n")
    with pytest.raises(ValueError, match=r"nothing to draw yet \(\d+ lines of .* are no records\)"):
        plot_loss(tmp_path)
    values = (b'"nan"', b"[]", b"NaN", b'"2,5"', b"1" + b"0" * 400, b"null")
    wrong = [b'{"kind": "train", "step": 2, "loss": %s}' % value for value in values]
    lines = [b'{"kind": "train", "step": 1, "tokens": 8, "loss": 3.0}', *wrong, b"torn"]
    path.write_bytes(b"\n".join(lines) + b"\n")
    told = []
    assert plot_loss(tmp_path, log=told.append).exists()
    assert told == [f"1 line of {path} is no record: skipped"]


def test_a_duplicated_record_stands_once_after_a_resume(tmp_path):
    report(tmp_path, last=4)
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], *lines[:2], *lines[2:]]))
    expected = [("train", 1, 10.0), ("train", 2, 5.0), ("eval", 2, 5.5), ("train", 3, 10 / 3)]
    report(tmp_path, first=4, last=3, start_step=3)
    assert recorded(tmp_path) == expected


def test_not_finite_is_recorded_at_once_and_is_valid_json(tmp_path):
    config = MetricsConfig(log_every=100, tensorboard=False, progress="off")
    with Reporter(tmp_path, config, total_steps=50, tokens_per_step=1) as reporter:
        reporter.train(3, {"loss": math.nan, "grad_norm": math.inf})
        reporter.train(4, {"loss": 1.0})
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    record = json.loads(line, parse_constant=refuse)
    assert (record["step"], record["loss"], record["grad_norm"]) == (3, "nan", "inf")


def test_rates(tmp_path):
    reached = Utilization({"mfu": 6e9, "hfu": 8e9}, CHIPS["tpu7x"], "bfloat16", num_devices=4)
    with Reporter(
        tmp_path, QUIET, total_steps=9, tokens_per_step=1_000_000, reached=reached
    ) as reporter:
        assert reporter.rates() == {}
        for step, seconds in enumerate([2.0, 2.0, 8.0], start=1):
            reporter.train(step, {"loss": 1.0}, step_seconds=seconds, data_seconds=0.3)
        reporter.train(4, {"loss": 1.0})  # paused: no time of its own
        rates = reporter.rates()
    assert rates["tokens_per_second"] == 500_000  # the median ignores the slow step
    assert rates["data_share"] == pytest.approx(0.9 / 12)
    # 500k tok/s of 6 GFLOP each, over 4 devices of half a chip of 2307 TFLOP/s each.
    assert rates["mfu"] == pytest.approx(500_000 * 6e9 / (4 * 2307e12 / 2))
    assert rates["hfu"] == pytest.approx(500_000 * 8e9 / (4 * 2307e12 / 2))


def test_plain_lines(tmp_path):
    config = MetricsConfig(log_every=3, tensorboard=False, progress="plain")
    flops = {"mfu": 989.5e9, "mfu_full": 1.1 * 989.5e9, "hfu": 1.25 * 989.5e9}
    reached = Utilization(flops, CHIPS["h100_sxm"], "bfloat16", num_devices=1)
    printed = report(tmp_path, config, reached=reached)
    assert [line.split("  ")[0] for line in printed] == [
        "step 1/6", "eval at step 2:", "step 3/6", "eval at step 4:", "step 6/6", "eval at step 6:",
    ]  # fmt: skip
    share = "MFU 20.0% (full 22.0%, HFU 25.0%)"
    for piece in ("loss 3.3333", "200 tok/s", share, "500 ms/step", "data 10.0%", "ETA "):
        assert piece in printed[2], printed[2]
    assert printed[1] == "eval at step 2:  loss 5.5000"


def test_progress_off_keeps_evaluations_and_notes(tmp_path):
    assert report(tmp_path, last=3) == ["eval at step 2:  loss 5.5000"]


def test_auto_is_plain_where_stdout_is_no_terminal(tmp_path, capsys):
    config = MetricsConfig(log_every=1, tensorboard=False, progress="auto")
    with Reporter(tmp_path, config, total_steps=2, tokens_per_step=1) as reporter:
        reporter.train(1, {"loss": 2.5})
        reporter.note("saved")
    assert capsys.readouterr().out == "step 1/2  loss 2.5000\nsaved\n"


def test_live_line_stays_below_other_output(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    config = MetricsConfig(tensorboard=False, progress="rich")
    stdout = sys.stdout
    with Reporter(tmp_path, config, total_steps=8, tokens_per_step=10) as reporter:
        reporter.note("before the first step")
        reporter.train(2, {"loss": 2.5, "grad_norm": 1.0}, step_seconds=0.5)
        print("a stray print")
        reporter.eval(2, {"loss": 2.25})
        reporter.train(8, {"loss": 1.5}, step_seconds=0.5)
    assert sys.stdout is stdout
    out = capsys.readouterr().out
    before, live = out.split("\n", 1)
    assert before == "before the first step"
    erase = "\x1b[2K"
    for text in ("a stray print", "eval at step 2:  loss 2.2500"):
        assert f"{erase}{text}" in live  # written over the live line, which is drawn again below
        assert "step 2/8" in live.split(text)[1]
    assert "grad_norm" not in live
    assert "100%  step 8/8  loss 1.5000" in live
    hide, show = "\x1b[?25l", "\x1b[?25h"
    assert live.index(hide) < live.index(show) < live.index("step 2/8")  # a kill leaves a cursor


def test_step_timer():
    timer = StepTimer()
    timer.start()
    with timer.data():
        time.sleep(0.02)
    time.sleep(0.01)
    seconds, data_seconds = timer.lap()
    assert 0.03 <= seconds < 1 and 0.02 <= data_seconds < seconds
    with timer.pause():
        time.sleep(0.5)
    assert timer.lap() == (None, 0.0)
    seconds, data_seconds = timer.lap()
    assert 0 <= seconds < 0.5 and data_seconds == 0
    time.sleep(0.5)
    timer.start()
    assert timer.lap()[0] < 0.5


def test_step_timer_lets_the_end_of_data_through():
    timer, batches = StepTimer(), iter([])
    with pytest.raises(StopIteration), timer.data():
        next(batches)


def events(workdir):
    """TensorBoard's own reading of the event files: {tag: [(step, value), ...]}."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(workdir / "tensorboard"))
    accumulator.Reload()
    tensor_tags = accumulator.Tags()["tensors"]
    return {
        tag: [(event.step, event.tensor_proto.float_val[0]) for event in accumulator.Tensors(tag)]
        for tag in tensor_tags
    } | {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()["scalars"]
    }


def test_tensorboard_reads_the_events_also_after_a_resume(tmp_path):
    config = MetricsConfig(log_every=1, tensorboard=True, progress="off")
    report(tmp_path, config, last=5)
    report(tmp_path, config, first=4, start_step=3)  # 4 and 5 of the first run are forgotten
    found = events(tmp_path)
    assert found["train/loss"] == [(s, pytest.approx(10 / s)) for s in range(1, 7)]
    assert found["eval/loss"] == [(s, pytest.approx(11 / s)) for s in (2, 4, 6)]
    assert {"train/tokens_per_second", "train/step_seconds"} <= found.keys()


def test_a_folder_of_events_that_cannot_be_made_is_told_once_and_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(auxiliary, "FIRST_PAUSE", 0.01)
    (tmp_path / "tensorboard").write_text("a file where the folder should be")
    config = MetricsConfig(log_every=1, progress="off")
    printed = []
    with Reporter(
        tmp_path, config, total_steps=1000, tokens_per_step=1, log=printed.append
    ) as reporter:
        for step in range(1, 6):
            reporter.train(step, {"loss": 1.0})
            time.sleep(0.02)
        end = time.monotonic() + 60
        while not printed and time.monotonic() < end:  # a busy machine imports TensorBoard slowly
            time.sleep(0.02)
        assert len(printed) == 1 and "TensorBoard events: File exists" in printed[0]
        assert str(tmp_path / "tensorboard") in printed[0] and "tries again" in printed[0]
        (tmp_path / "tensorboard").unlink()
    assert printed[1:] == ["TensorBoard events: works again"]
    assert [step for step, _ in events(tmp_path)["train/loss"]] == [1, 2, 3, 4, 5]


def test_a_missing_package_for_events_is_told_once(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    printed = report(tmp_path, MetricsConfig(log_every=1, progress="off"))
    assert sum("warning: TensorBoard events: ModuleNotFoundError" in line for line in printed) == 1
    assert len(recorded(tmp_path)) == 9


def test_a_picture_that_cannot_be_drawn_ends_nothing(tmp_path):
    (tmp_path / "loss.png.tmp").mkdir()
    config = MetricsConfig(log_every=1, tensorboard=False, progress="off", plot_every=1)
    printed = report(tmp_path, config)
    assert sum(line.startswith("warning: loss.png: Is a directory") for line in printed) == 1
    assert len(recorded(tmp_path)) == 9


class Disk:
    """os.write with room for a number of bytes."""

    def __init__(self, monkeypatch, room):
        self.room, self._write = room, os.write
        monkeypatch.setattr(records.os, "write", self.write)

    def write(self, file, data):
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self._write(file, data[: self.room])
        self.room -= written
        return written


def test_records_wait_for_a_full_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(auxiliary, "FIRST_PAUSE", 0.0)
    disk = Disk(monkeypatch, room=300)  # in the middle of a record
    printed = []
    with Reporter(
        tmp_path, QUIET, total_steps=9, tokens_per_step=1, log=printed.append
    ) as reporter:
        for step in range(1, 8):
            reporter.train(step, {"loss": 1.0})
        assert len(printed) == 1 and "metrics.jsonl cannot be written: No space left" in printed[0]
        disk.room = 10**6
        reporter.train(8, {"loss": 1.0})
        assert printed[1:] == [f"{tmp_path}/metrics.jsonl cannot be written: works again"]
    assert recorded(tmp_path) == [("train", step, 1.0) for step in range(1, 9)]


def test_records_follow_a_folder_that_vanishes(tmp_path, monkeypatch):
    monkeypatch.setattr(auxiliary, "FIRST_PAUSE", 0.0)
    printed, workdir = [], tmp_path / "run"
    with Reporter(workdir, QUIET, total_steps=9, tokens_per_step=1, log=printed.append) as reporter:
        reporter.train(1, {"loss": 1.0})
        shutil.rmtree(workdir)
        reporter.train(2, {"loss": 1.0})
        assert "No such file or directory" in printed[0]
        workdir.mkdir()  # a save makes it again
        reporter.train(3, {"loss": 1.0})
    assert recorded(workdir) == [("train", 2, 1.0), ("train", 3, 1.0)]


def test_what_waits_for_a_disk_is_bounded_and_its_loss_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "MOST_WAITING", 3)
    Disk(monkeypatch, room=0)
    printed = report(tmp_path, last=6)
    assert printed[-1] == f"warning: 9 records are not in {tmp_path}/metrics.jsonl"


def test_a_display_that_breaks_ends_nothing(tmp_path, capsys):
    def broken(text):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    config = MetricsConfig(log_every=1, tensorboard=False, progress="plain")
    with Reporter(tmp_path, config, total_steps=3, tokens_per_step=1, log=broken) as reporter:
        for step in range(1, 4):
            reporter.train(step, {"loss": 1.0})
    assert len(recorded(tmp_path)) == 3
    assert capsys.readouterr().err.count("the display: Broken pipe") == 1


def test_memory_does_not_grow_with_the_records(tmp_path):
    line = (
        '{"kind": "train", "step": %d, "tokens": %d, "time": 1.5, "loss": 2.5, "grad_norm": 1.0}\n'
    )
    with open(tmp_path / "metrics.jsonl", "w") as file:
        file.writelines(line % (step, step * 100) for step in range(1, 40_001))
    report(tmp_path / "warm", last=1)
    plot_loss(tmp_path / "warm")
    tracemalloc.start()
    report(tmp_path, first=39_001, last=39_001, total=50_000, start_step=39_000)
    resumed = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    plot_loss(tmp_path)
    drawn = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert resumed < 2**20, resumed  # of 40,000 records as dicts: 30 MiB
    assert drawn < 8 * 2**20, drawn  # the picture has 3.5 MB


def test_a_spike_stays_in_a_curve_of_many_records():
    curve = Curve()
    for step in range(100_000):
        curve.add(step, 50.0 if step == 77_777 else 2.0)
    curve.close()
    assert len(curve.means) <= MOST_POINTS and curve.width == 32
    at = curve.highs.index(50.0)
    assert curve.highs.count(50.0) == 1 and abs(curve.tokens[at] - 77_777) <= curve.width
    assert sum(mean * curve.width for mean in curve.means) == pytest.approx(200_048, abs=1e-6)


def test_plot(tmp_path):
    report(tmp_path, MetricsConfig(log_every=1, tensorboard=False, progress="off", plot_every=2))
    path = tmp_path / "loss.png"
    drawn = path.read_bytes()  # during the run
    assert plot_loss(tmp_path) == path
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n" == drawn[:8]
    assert struct.unpack(">II", header[16:]) == (1200, 720)
    assert not path.with_name("loss.png.tmp").exists()


def test_plot_shows_the_records(tmp_path, monkeypatch):
    with Reporter(tmp_path / "my_run", QUIET, total_steps=9, tokens_per_step=500_000) as reporter:
        for step, loss in enumerate([4.0, math.nan, 3.0, 2.0], start=1):
            reporter.train(step, {"loss": loss})
        reporter.eval(4, {"loss": 2.5})
    figures = []
    from matplotlib.figure import Figure

    save = Figure.savefig

    def spy(figure, *args, **options):
        figures.append(figure)
        save(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", spy)
    plot_loss(tmp_path / "my_run")
    (axes,) = figures[0].axes
    curves = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert curves == {
        "train: 2.000 at end": [[0.5, 4.0], [1.5, 3.0], [2.0, 2.0]],
        "held-out: 2.500 at end": [[2.0, 2.5]],
    }
    assert axes.get_title() == "Loss of my_run"
    assert axes.get_xlabel() == "training tokens (millions)"
    assert axes.get_ylabel() == "cross-entropy (nats per token)"


def test_numbers_by_layer_are_recorded_and_drawn(tmp_path, monkeypatch):
    with Reporter(tmp_path, MetricsConfig(progress="off", log_every=2), total_steps=9,
                  tokens_per_step=4) as reporter:  # fmt: skip
        for step in range(1, 10):
            by_layer = {LOAD_MAX: [math.nan, 1.0 + step, 1 / 3], ENTROPY: [math.nan, 0.5, 0.25]}
            reporter.train(step, {"loss": 1.0}, by_layer=by_layer)
    found = [
        record
        for record in records.read_records(tmp_path / "metrics.jsonl")
        if record["kind"] == "layers"
    ]
    assert [record["step"] for record in found] == [1, 2, 4, 6, 8, 9]
    assert found[1][LOAD_MAX] == [None, 3.0, 0.333333]
    assert found[1][ENTROPY] == [None, 0.5, 0.25]
    tags = {name: len(points) for name, points in events(tmp_path).items()}
    assert tags[f"layers/{LOAD_MAX}/001"] == 6 and f"layers/{LOAD_MAX}/000" not in tags
    figures = []
    from matplotlib.figure import Figure

    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **_: figures.append(figure))
    monkeypatch.setattr(pathlib.Path, "replace", lambda *_: None)
    assert plot_layers(tmp_path) == tmp_path / "layers.png"
    top, bottom = figures[0].axes[:2]
    assert (top.get_title("left"), bottom.get_title("left")) == (
        "expert load max",
        "expert entropy",
    )
    (mesh,) = top.collections
    shown = mesh.get_array().filled(np.nan)
    np.testing.assert_array_equal(shown[1], [2.0, 3.0, 5.0, 7.0, 9.0, 10.0])
    assert np.isnan(shown[0]).all()
    # Each column ends at its own step.
    np.testing.assert_array_equal(mesh.get_coordinates()[0, 1:, 0], [1, 2, 4, 6, 8, 9])


def test_layers_of_a_long_run_are_few_columns():
    largest, mean = Columns(LOAD_MAX), Columns(ENTROPY)
    for step in range(10_000):
        for columns in (largest, mean):
            columns.add(step, [9.0 if step == 7_777 else 1.0, None])
    largest.add(10_000, [1.0])  # of another number of layers
    for columns in (largest, mean):
        columns.close()
        assert columns.steps[-1] == 9_999
        assert len(columns.steps) == len(columns.columns) <= MOST_COLUMNS and columns.width == 32
        assert all(np.isnan(column[1]) for column in columns.columns)
    assert max(column[0] for column in largest.columns) == 9.0
    assert max(column[0] for column in mean.columns) == 1.0 + 8 / 32


def test_layers_are_drawn_where_no_loss_is_finite(tmp_path):
    with Reporter(tmp_path, QUIET, total_steps=2, tokens_per_step=4) as reporter:
        for step in (1, 2):
            reporter.train(step, {"loss": math.nan}, by_layer={LOAD_MAX: [4.0, 1.0]})
    told = []
    assert plot_all(tmp_path, log=told.append) == [tmp_path / "layers.png"]
    assert "no step with a finite loss" in told[0]
    assert (tmp_path / "layers.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_without_numbers_by_layer_nothing_is_drawn(tmp_path):
    assert plot_layers(tmp_path) is None
    report(tmp_path)
    assert plot_all(tmp_path) == [tmp_path / "loss.png"]
    with open(tmp_path / "metrics.jsonl", "a") as file:
        print('{"kind": "layers", "step": 1, "tokens": 1, "load": [], "other": "x"}', file=file)
    assert plot_layers(tmp_path) is None


def test_plot_says_what_is_missing(tmp_path):
    with pytest.raises(ValueError, match="does not exist: give the --workdir of a run"):
        plot_loss(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="no step with a finite loss"):
        plot_loss(tmp_path)


def test_smoothing_has_no_lag():
    line = [float(i) for i in range(1000)]
    smooth = smoothed(line)
    assert smooth[:990] == pytest.approx(line[:990])  # symmetric: a straight line stays
    assert smooth[-1] == pytest.approx(sum(line[-11:]) / 11)
    assert smoothed([3.0, 1.0, 2.0]) == [3.0, 1.0, 2.0]


def test_durations():
    assert [_duration(s) for s in (0.4, 59, 372, 7260, 90061)] == [
        "0s", "59s", "6m12s", "2h01m", "1d01h",
    ]  # fmt: skip


def test_problems():
    assert bounds.problems(MetricsConfig(), "metrics.") == []
    bad = MetricsConfig(log_every=0, plot_every=-1, progress="fancy")
    assert bounds.problems(bad, "metrics.") == [
        "metrics.log_every=0 must be at least 1: 1 = every step",
        "metrics.progress='fancy' is unknown: use one of auto, rich, plain, off",
        "metrics.plot_every=-1 must be at least 0",
    ]


def test_command_line(tmp_path):
    command = [sys.executable, "-m", "llmx.metrics"]
    report(tmp_path)
    done = subprocess.run([*command, tmp_path], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(tmp_path / "loss.png")
    failed = subprocess.run(
        [*command, tmp_path / "absent"], capture_output=True, text=True, check=False
    )
    assert failed.returncode == 2 and "does not exist" in failed.stderr


def test_what_is_heavy_is_imported_late():
    heavy = "{'jax', 'numpy', 'rich', 'matplotlib', 'tensorboard'}"
    code = f"import sys, llmx.metrics; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


PROCESS = """
import sys, jax
from llmx.runtime.metrics import MetricsConfig, Reporter
address, index, workdir = sys.argv[1:]
jax.distributed.initialize(address, 2, int(index))
config = MetricsConfig(log_every=1, progress="plain")
with Reporter(f"{workdir}/{index}", config, total_steps=1, tokens_per_step=8) as reporter:
    reporter.note("hello")
    reporter.train(1, {"loss": 1.0}, step_seconds=0.5)
    reporter.eval(1, {"loss": 1.0})
    assert reporter.rates()["tokens_per_second"] == 16
"""


@pytest.mark.slow
def test_only_the_first_process_writes(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, address, str(i), str(tmp_path)],
            stdout=subprocess.PIPE, text=True, env=environment,
        )
        for i in range(2)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert "hello\nstep 1/1" in outputs[0] and outputs[1] == ""
    assert [path.name for path in tmp_path.iterdir()] == ["0"]

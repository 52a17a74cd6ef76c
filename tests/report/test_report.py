"""`python -m llmx.report`: one HTML page that compares runs and loads nothing."""

import json
import math
import os
import time

import numpy as np
import pytest
from support import html_page

from llmx.report import __main__ as command
from llmx.report import charts, page, runs


class Page(html_page.Page):
    """The report: it refers to places of its own only, and loads nothing."""

    def __init__(self, text):
        super().__init__(text)
        assert not self.tags & {*html_page.LOADING, "embed"}

    def handle_startendtag(self, tag, attrs):
        super().handle_startendtag(tag, attrs)
        for name, value in attrs:
            assert name not in ("src", "srcset", "action")
            assert name not in ("href", "xlink:href") or value.startswith("#")


def train(step, loss=None, **numbers):
    loss = {} if loss is None else {"loss": loss}
    head = {"kind": "train", "step": step, "tokens": 100 * step, "time": 10.0 * step}
    rest = {"grad_norm": 1.0, "learning_rate": 1e-3, "tokens_per_second": 50.0 + step}
    return head | loss | rest | numbers


def held_out(step, loss):
    return {"kind": "eval", "step": step, "tokens": 100 * step, "time": 10.0 * step, "loss": loss}


def write(folder, lines, *, launches=1, **config):
    """A work directory with these records; texts stand there as they are."""
    folder.mkdir(parents=True)
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (folder / "metrics.jsonl").write_text("".join(f"{text}\n" for text in texts))
    made = {
        "workdir": str(folder), "steps": 20, "seed": 0, "optimizer": {"learning_rate": 0.0003},
        "data": {"tokenizer": "auto"}, "sample": {"prompt": ""},
    }  # fmt: skip
    for key, value in config.items():
        section, _, name = key.rpartition("__")
        (made[section] if section else made)[name] = value
    (folder / "config.json").write_text(json.dumps(made))
    starts = [json.dumps({"kind": "start"}) for _ in range(launches)]
    (folder / "history.jsonl").write_text("".join(f"{start}\n" for start in starts))
    return folder


def report(capsys, folder, *workdirs, code=0):
    """(the page, what is said on stderr)."""
    output = folder / "report.html"
    found = command.main([*map(str, workdirs), "--output", str(output)])
    told = capsys.readouterr().err
    assert found == code, told
    return (Page(output.read_text()) if code == 0 else None), told


def of(folder, name="run"):
    return runs.read(str(folder), name)


def test_two_runs_of_unequal_length(tmp_path, capsys):
    long = [train(step, 5 - step / 10) for step in range(1, 21)] + [held_out(20, 3.25)]
    short = [train(step, 4.0) for step in range(1, 6)] + [held_out(3, 4.5), held_out(5, 4.75)]
    first = write(tmp_path / "long", long, launches=3)
    second = write(tmp_path / "short", short, optimizer__learning_rate=0.5, seed=7)
    found, told = report(capsys, tmp_path, first, second)
    assert not told
    for words in (
        "2 runs compared", "Lowest held-out loss 3.2500", "4.5000 at 3", "4.7500",
        "stopped at 25%", "1 of 2", "optimizer.learning_rate 0.0003 0.5", "seed 0 7",
    ):  # fmt: skip
        assert words in found.text
    assert "workdir" not in found.text and "differ in" not in found.text
    row = found.text[found.text.index("long finished") :]
    assert row.startswith("long finished 20 2,000 3.0000 3.2500 3.2500 at 20 60")
    assert {"loss-steps-figure_1", "loss-tokens-figure_1", "learning-rate-figure_1"} <= {*found.ids}
    assert of(first).launches == 3 and of(first).seconds == 190


def test_one_run(tmp_path, capsys):
    found, _ = report(capsys, tmp_path, write(tmp_path / "alone", [train(1, 2.0)]))
    assert "alone" in found.text and "configs" not in found.text
    assert "Held-out" not in found.text.partition("Summary")[0]  # there is none


def test_names_are_escaped(tmp_path, capsys):
    name = '<u>x & "y" $z_1$'
    first = write(tmp_path / name, [train(1, 2.0)], sample__prompt="<script>alert(1)</script>")
    second = write(tmp_path / "_hidden", [train(1, 2.0)])
    found, _ = report(capsys, tmp_path, first, second)
    assert "u" not in found.tags and "script" not in found.tags
    assert name in found.text and "<script>alert(1)</script>" in found.text


def test_losses_that_are_not_finite(tmp_path, capsys):
    lines = [train(step, 3.0 if step < 8 else "nan") for step in range(1, 11)]
    folder = write(tmp_path / "lost", lines)
    found, told = report(capsys, tmp_path, folder)
    said = "3 records with a loss that is not finite, the first at step 8"
    assert said in told and said in found.text
    assert math.isnan(charts.at_end(of(folder).series["loss"]))
    assert np.isnan(of(folder).series["loss"].values).tolist() == [False] * 7 + [True] * 3


def test_a_step_without_a_loss_is_no_such_loss(tmp_path):
    folder = write(tmp_path / "delayed", [train(1), train(2, 2.0)])
    assert of(folder).notes == []


def test_a_resumed_run_with_repeated_steps(tmp_path, capsys):
    """The later records count, as a launch that began again took the steps."""
    lines = [train(step, 9.0) for step in range(1, 11)] + [train(step, 1.0) for step in (6, 7)]
    folder = write(tmp_path / "again", lines)
    loss = of(folder).series["loss"]
    assert loss.steps.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert loss.values.tolist() == [9.0] * 5 + [1.0] * 2
    _, told = report(capsys, tmp_path, folder)
    assert "5 records of steps that were taken again: left out" in told


def test_a_run_that_is_going_on(tmp_path):
    folder = write(tmp_path / "run", [train(5, 2.0)])
    assert of(folder).state == "stopped at 25%"
    (folder / "owner.json").write_text("{}")
    assert of(folder).state == "going on at 25%"
    done = write(tmp_path / "done", [train(20, 2.0)])  # it saves, after its last step
    (done / "owner.json").write_text("{}")
    text = Page(page.render([of(folder, "a"), of(done, "b")])).text
    assert "1 of 2 1 going on" in text
    old = time.time() - runs.ALIVE_SECONDS - 1
    os.utime(folder / "owner.json", (old, old))
    assert of(folder).state == "stopped at 25%"


def test_goodput_says_how_long_it_took(tmp_path):
    folder = write(tmp_path / "run", [train(5, 2.0)])
    seconds = dict.fromkeys(
        ("lost", "compile", "data wait", "checkpoint", "evaluation", "start", "restart", "other"), 0
    )
    values = {"seconds": {**seconds, "useful": 30, "compile": 10}, "marks": [[0, 0.0]],
              "alive": 1.0, "launches": 4, "phases": {}, "process": "1", "began": 0.0}  # fmt: skip
    (folder / "goodput.json").write_text(json.dumps(values))
    run = of(folder)
    assert (run.seconds, run.useful, run.launches) == (40, 0.75, 4)


def test_what_is_damaged_is_said(tmp_path, capsys):
    good = write(tmp_path / "good", [train(1, 2.0)])
    bad = write(tmp_path / "bad", [train(1, 2.0), "{", "[1]", train(2, 1.5)])
    (bad / "config.json").write_text("{")
    found, told = report(capsys, tmp_path, good, bad)
    assert "2 lines of" in told and "are no records: left out" in told
    assert "config.json cannot be read" in told and "its values are left out" in found.text
    assert "Nothing." in found.text


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["nowhere"], ["nowhere is no folder: name the work directory of a run that has trained"]),
        (["empty"], ["empty has no metrics.jsonl: name the work directory"]),
        (["good", "./good"], ["is the same run as"]),
        (["no steps"], ["no steps: no step is recorded yet: nothing to show"]),
        (["nowhere", "empty"], ["nowhere is no folder", "empty has no metrics.jsonl"]),
    ],
)
def test_what_is_no_run(tmp_path, capsys, names, words):
    write(tmp_path / "good", [train(1, 2.0)])
    write(tmp_path / "no steps", [])
    (tmp_path / "empty").mkdir()
    _, told = report(capsys, tmp_path, *(f"{tmp_path}/{name}" for name in names), code=2)
    assert all(word in told for word in words) and len(told.splitlines()) == len(words)
    assert not (tmp_path / "report.html").exists()


def test_a_run_without_a_step_beside_one_that_has_some(tmp_path, capsys):
    first, second = write(tmp_path / "new", []), write(tmp_path / "old", [train(3, 2.0)])
    found, _ = report(capsys, tmp_path, first, second)
    assert "new stopped at 0% 0 0 – – – – –" in found.text


def test_the_output_is_checked_first(tmp_path, capsys):
    folder = write(tmp_path / "run", [train(1, 2.0)])
    assert command.main([str(folder), "--output", str(tmp_path / "no/page.html")]) == 2
    assert "does not exist: create it" in capsys.readouterr().err
    assert command.main([str(folder), "--output", str(tmp_path)]) == 2
    assert "is a folder: name a file" in capsys.readouterr().err


def test_names_tell_runs_apart():
    assert runs.names(["x/a", "x/b/"]) == ["a", "b"]
    assert runs.names(["x/a", "y/a", "y/b"]) == ["x/a", "y/a", "y/b"]


def test_losses_of_other_tokens_are_said_to_be(tmp_path):
    first = write(tmp_path / "a", [train(1, 2.0)])
    second = write(tmp_path / "b", [train(1, 2.0)], data__tokenizer="my.json")
    text = Page(page.render([of(first, "a"), of(second, "b")])).text
    assert "The runs differ in data.tokenizer: their losses may be of other tokens" in text


def test_all_of_a_run_is_in_its_charts(tmp_path, monkeypatch):
    lines = [train(step, 9 / step, grad_norm=100.0 / step) for step in range(1, 301)]
    lines += [held_out(300, 0.5)]
    found = [of(write(tmp_path / "a", lines), "a"), of(write(tmp_path / "b", lines[:40]), "b")]
    monkeypatch.setattr(charts, "svg", lambda name, make, label: make().axes[0])
    for x in ("steps", "tokens"):
        axes = charts.loss(found, x)
        last = 300 * (100 if x == "tokens" else 1)
        assert axes.get_xlim() == pytest.approx((0, 1.01 * last))
        faint, smooth, dots, of_short = axes.lines  # few records are not smoothed
        assert [line.get_xdata()[-1] for line in axes.lines] == [last, last, last, last * 40 // 300]
        assert (faint.get_alpha(), smooth.get_alpha()) == (0.3, None)
        assert smooth.get_color() == dots.get_color() != of_short.get_color()
        low, high = axes.get_ylim()
        assert low < min(smooth.get_ydata()) and high < 1  # the steep beginning may leave the frame
    axes = charts.number(found, "grad_norm", "gradient norm", smooth=True)
    assert axes.get_yscale() == "log" and axes.get_xlim()[1] == pytest.approx(303)
    axes = charts.number(found, "learning_rate", "learning rate", smooth=False)
    assert axes.get_yscale() == "linear" and axes.get_ylim() == pytest.approx((0, 1.08e-3))


def test_lines_have_few_points():
    x, y = np.arange(10_001), np.arange(10_001.0)
    y[40:80] = np.nan
    few_x, few_y = charts.thinned(x, y)
    width = 21
    assert len(few_x) == len(few_y) == -(-10_001 // width) <= charts.MOST_POINTS
    assert few_x[0] == few_y[0] == 10
    assert few_y[1] == np.mean(range(21, 40)) and np.isnan(few_y[2])
    assert few_x[-1] == few_y[-1] == np.mean(x[len(few_x) * width - width :])


def test_the_page_of_long_runs_is_small(tmp_path):
    folder = write(tmp_path / "long", [train(step, 1 + 1 / step) for step in range(1, 20_001)])
    text = page.render([of(folder)] * 1)
    assert len(text) < 400_000

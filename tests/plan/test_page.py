"""The planner's page: one HTML file with the report's figures, that loads nothing."""

import copy
import json
import pathlib
import re

import pytest
from support.html_page import LOADING, Page

from llmx.plan import __main__ as command
from llmx.plan import advice, page, pictures

ROOT = pathlib.Path(__file__).parents[2]
LLAMA = [f"--config={ROOT}/configs/llama3_8b.py", "--machine=v5p:2x2x2"]
PIPELINE = [f"--config={ROOT}/configs/llama3_70b_pipeline.py", "--machine=h100:8x8"]
ALL = ["advice", "time", "operators", "memory", "sent", "duration", "assumptions"]


def check(text):
    """The parsed page, if it is by itself and its names are unique."""
    parsed = Page(text)
    targets = {f"#{name}" for name in parsed.ids}
    assert set(parsed.references) <= targets
    assert set(re.findall(r"url\(([^)]*)\)", text)) <= targets
    assert "://" not in text and "@import" not in text
    assert not LOADING & parsed.tags
    return parsed


def planned(flags, capsys, path):
    """The report and the page of a command."""
    assert command.main([*flags, "--json", f"--html={path}"]) in (0, 1)
    return json.loads(capsys.readouterr().out), path.read_text(encoding="utf-8")


@pytest.fixture(name="report")
def make_report(capsys):
    command.main([*LLAMA, "--json"])
    return json.loads(capsys.readouterr().out)


def searched(report):
    """The report with a search of three configurations."""
    of = lambda step, share, *flags: {  # noqa: E731
        "flags": list(flags), "step": step, "memory": share * report["memory"]["limit"],
        "fits": share < 0.95,
    }  # fmt: skip
    found = [of(1.5, 0.5, "--a=<b>"), of(1.25, 0.75, "--b=1", "--c=2"), of(1.0, 1.5, "--d=1")]
    return report | {"search": {
        "candidates": 4321, "fit": 2, "seconds": 3.5, "best": 1, "configurations": found,
        "runner_up": "it waits 62 ms longer for <messages>", "what_if": ["links twice as fast"],
    }}  # fmt: skip


def test_a_step_that_was_given_is_on_the_page(tmp_path):
    path = tmp_path / "page.html"
    given = ["--config=configs/llama3_8b.py", "--machine=v5p:2x2x2", f"--html={path}"]
    for more, is_there in (["--step-seconds=5"], True), ([], False):
        assert command.main([*given, *more]) == 0
        assert ("as --step-seconds says: MFU" in path.read_text()) == is_there


def test_the_page_has_all_sections_and_the_figures_of_the_report(capsys, tmp_path):
    report, text = planned(LLAMA, capsys, tmp_path / "plan.html")
    parsed = check(text)
    assert parsed.sections == ALL
    memory, time, run = report["memory"], report["time"], report["duration"]
    words = [
        "llama3_8b on v5p:2x2x2", *(report["run"][name] for name in ("model", "mesh", "batch")),
        f"{memory['peak'] / 2**30:.2f} GiB of {memory['limit'] / 2**30:.2f} GiB", "It fits",
        f"limit {memory['limit'] / 2**30:.1f} GiB", f"{time['step']:.3f} s",
        f"{time['tokens_per_second']:,.0f} tokens/s", f"MFU {time['mfu']:.1%}", *time["parts"],
        *(f"{of / time['step']:.1%}" for of in time["parts"].values()),
        f"{run['seconds'] / 86400:.2f} days", f"{run['device_hours']:,.0f}",
        *(f"{held / 2**30:.2f} GiB" for held in memory["state"].values()), *memory["state"],
        *(name for peak in memory["peaks"].values() for name in peak), "459 TFLOP/s",
        *(message["purpose"] for message in report["messages"]), *time["assumptions"],
    ]  # fmt: skip
    for word in words:
        assert word in parsed.text, word
    # The table of operators and its last row are the time of all of them.
    rows = re.search(r'id="operators".*?</section>', text, re.DOTALL).group()
    table = rows[rows.rindex("<table>") :]
    shares = re.findall(r"<tr>.*?<td>([\d.]+)%</td>", table)
    computed = sum(one["count"] * one["seconds"] for one in time["operators"])
    assert sum(map(float, shares)) == pytest.approx(100 * computed / time["step"], abs=0.8)


def test_a_pipelines_schedule_is_drawn(capsys, tmp_path, monkeypatch):
    report, text = planned(PIPELINE, capsys, tmp_path / "plan.html")
    parsed = check(text)
    assert parsed.sections == [*ALL[:4], "schedule", *ALL[4:]]
    assert "1f1b, 4 stages, 4 microbatches" in parsed.text and "idle for" in parsed.text
    assert report["run"]["stages"] in parsed.text
    monkeypatch.setattr(pictures, "MOST_OPERATIONS", 31)  # one less than there are
    _, text = planned(PIPELINE, capsys, tmp_path / "plan.html")
    assert "too many operations for a picture" in check(text).text


def test_a_run_that_does_not_fit_says_what_is_too_much(capsys, tmp_path):
    flags = [LLAMA[0], "--machine=h100:1x8", "--config.remat=none"]
    report, text = planned(flags, capsys, tmp_path / "plan.html")
    memory, found = report["memory"], check(text).text
    over = memory["peak"] - 0.95 * memory["limit"]
    assert "It does not fit" in found and not memory["fits"]
    assert f"It takes {over / 2**30:.2f} GiB more than is admitted" in found
    assert "of the peak, are for saved activations: another --config.remat" in found
    best = min((one for one in report["remats"] if one["fits"]), key=lambda one: one["step"])
    assert f"--config.remat={best['remat']} takes {best['step']:.4g} s a step and" in found
    # What is said of another `remat` is what it takes.
    flags = [*flags[:2], f"--config.remat={best['remat']}"]
    other, text = planned(flags, capsys, tmp_path / "plan.html")
    assert other["memory"]["fits"] and other["memory"]["peak"] == best["memory"]
    assert other["time"]["step"] == best["step"]
    assert "which fits" not in check(text).text and "less, and" not in check(text).text


def test_the_same_report_gives_the_same_page(report):
    assert page.render(report) == page.render(copy.deepcopy(report))


@pytest.mark.parametrize(
    ("absent", "sections"),
    [
        (["time"], ["time", "operators"]), (["duration"], ["duration"]), (["messages"], ["sent"]),
        (["search"], ["search"]), (["run"], []),
        (["run", "time", "duration", "messages", "search", "not_counted"],
         ["time", "operators", "duration", "sent", "search"]),
    ],
)  # fmt: skip
def test_a_section_that_the_report_lacks_is_left_out(absent, sections, report):
    whole = searched(report)
    everything = check(page.render(whole)).sections
    assert everything == [*ALL[:4], "search", *ALL[4:]]
    kept = {name: of for name, of in whole.items() if name not in absent}
    assert check(page.render(kept)).sections == [one for one in everything if one not in sections]


def test_a_search_is_shown_best_first(report):
    whole = searched(report)
    parsed = check(page.render(whole))
    words = (
        "4,321 configurations; of those that may be fastest 2 fit", "1.250 s", "+20.0%",
        "--a=<b>", "it waits 62 ms longer for <messages>", "links twice as fast",
    )  # fmt: skip
    for word in words:
        assert word in parsed.text, word
    assert parsed.text.index("--b=1 --c=2 1.250 s") < parsed.text.index("--a=<b> 1.500 s")
    gain = 1 - 1.25 / report["time"]["step"]
    first = advice.of(whole)[0]
    assert f"{gain:.0%} less time, 1.25 s: --b=1 --c=2" in first
    whole["search"] |= {
        "best": None,
        "least": 3 * 2**30,
        "fit": 0,
        "configurations": whole["search"]["configurations"][2:],
    }
    assert "None of 4,321 configurations fits" in check(page.render(whole)).text


def test_names_are_text_and_not_markup(report):
    evil = "</title><script>alert('$x_1$')</script>&amp;\"'<svg onload=x>"
    report["machine"] = report["run"]["machine"] = report["run"]["config"] = evil
    report["run"]["command"] = report["time"]["operators"][0]["name"] = evil
    report["time"]["parts"]["<b>$x_1$</b>"] = report["time"].pop("step")
    report["time"]["step"] = sum(report["time"]["parts"].values())
    report["memory"]["state"][evil] = report["memory"]["limit"]
    report["messages"][0]["purpose"] = report["time"]["assumptions"][0] = evil
    whole = searched(report)
    whole["search"]["configurations"][0]["flags"] = [evil]
    whole["search"]["runner_up"] = evil
    text = page.render(whole)
    assert check(text).text.count(evil) >= 8
    picture = text[text.index('<svg class="picture"') :]
    assert "&lt;b&gt;$x_1$&lt;/b&gt;" in picture  # nor is it maths


def test_what_is_held_at_a_time_has_colors_of_its_own(report):
    held = report["memory"]
    for peak in held["peaks"].values():
        colors = [pictures.BYTES[name] for name in [*held["state"], *peak]]
        assert len(colors) == len(set(colors))
    colors = pictures.time_colors([*pictures.TIMES, "exposed: fsdp", "exposed: tensor"])
    assert len(set(colors.values())) == len(colors)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([*LLAMA, "--html={}/none/x.html"], "/none does not exist: create it"),
        ([*LLAMA, "--html={}"], "is a folder: name a file"),
        ([LLAMA[0], "--chip=v5p", "--html={}/x.html"], "--html without --machine"),
        (["--schedule=1f1b", "--html={}/x.html"], "--html without --config"),
    ],
)
def test_a_page_that_cannot_be_written_is_refused_before_anything(
    argv, words, capsys, tmp_path, monkeypatch
):
    monkeypatch.setattr("llmx.plan.run_report.count", None)  # would fail if it came to that
    assert command.main([flag.format(tmp_path) for flag in argv]) == 2
    printed = capsys.readouterr()
    assert words in printed.err and not printed.out and not list(tmp_path.iterdir())


def test_the_terminal_names_the_page(capsys, tmp_path):
    path = tmp_path / "plan.html"
    assert command.main([*LLAMA, f"--html={path}"]) == 0
    assert capsys.readouterr().out.endswith(f"page: {path}\n") and path.exists()

"""The page that compares runs: who is best, a table, curves, and what differs in the configs."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

import llmx
from llmx.report import charts
from llmx.report.runs import HELD_OUT, Run, differences
from llmx.runtime import page_html
from llmx.runtime.page_html import Markup, escaped

LONGEST_VALUE = 200  # characters of a config value that are shown
# Runs in which these differ have losses of other tokens.
OTHER_TOKENS = (
    "data.sources", "data.tokenizer", "data.train_tokenizer", "data.weights", "data.format",
    "data.held_out", "model.vocab_size",
)  # fmt: skip


def render(runs: Sequence[Run]) -> str:
    """The page."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared"
    body = [
        f"<header>\n<h1>{escaped(title)}</h1>\n</header>", _cards(runs), _summary(runs),
        _losses(runs), _numbers(runs), _differences(runs), _foot(),
    ]  # fmt: skip
    return page_html.page(title, "\n".join(part for part in body if part))


def _cards(runs: Sequence[Run]) -> str:
    """The least held-out loss, the highest throughput, and how many runs are at their end."""
    several = len(runs) > 1
    cards = []
    for question, number, text in (
        ("Lowest held-out loss" if several else "Held-out loss", lambda run: -_best(run)[0],
         lambda run: f"{_best(run)[0]:.4f}"),
        ("Most tokens a second" if several else "Tokens a second", _rate,
         lambda run: f"{_rate(run):,.0f}"),
    ):  # fmt: skip
        known = [run for run in runs if math.isfinite(number(run))]
        if known:
            best = max(known, key=number)
            cards.append(page_html.card(question, text(best), _name(runs, best)))
    finished = sum(run.state == "finished" for run in runs)
    state = f"{finished} of {len(runs)}" if several else runs[0].state
    going = sum(run.state.startswith("going on") for run in runs)
    line = f"{going} going on" if several and going else ""
    cards.append(page_html.card("Finished" if several else "State", state, line))
    return f'<div class="cards">{"".join(cards)}</div>'


def _summary(runs: Sequence[Run]) -> str:
    header = (
        "run", "state", "steps", "tokens", "training loss", "held-out loss", "lowest held-out",
        "tokens/s", "wall time", "useful", "restarts",
    )  # fmt: skip
    rows = [
        (
            _name(runs, run), run.state, f"{run.num_steps:,}", f"{run.num_tokens:,}",
            _number(charts.at_end(run.series["loss"]), "{:.4f}"),
            _number(run.series[HELD_OUT].last, "{:.4f}"), _lowest(run),
            _number(_rate(run), "{:,.0f}"), _clock(run.seconds), _number(run.useful, "{:.1%}"),
            _restarts(run),
        )
        for run in runs
    ]  # fmt: skip
    notes = [note for run in runs for note in run.notes]
    differing = [key for key in differences(runs) if key in OTHER_TOKENS]
    if differing:
        notes.append(
            f"The runs differ in {', '.join(differing)}: their losses may be of other tokens, and "
            "then say nothing about each other."
        )
    said = (
        "Losses are in nats per token; the training loss is smoothed. Tokens/s are the median of "
        "the run. Useful: the share of the wall time, over all launches, in steps that count."
    )
    return page_html.section(
        "Summary", page_html.table(header, rows, left=2), f'<p class="soft">{escaped(said)}</p>',
        page_html.bullets(notes) if notes else "",
    )  # fmt: skip


def _losses(runs: Sequence[Run]) -> str:
    pictures = [page_html.figure(charts.loss(runs, x)) for x in ("steps", "tokens")]
    said = "Line: training loss, smoothed over the faint records. Dots: held-out loss."
    return page_html.section(
        "Loss", _legend(runs), page_html.columns(*pictures), f'<p class="soft">{said}</p>'
    )


def _numbers(runs: Sequence[Run]) -> str:
    shown = [
        page_html.figure(charts.number(runs, name, label, smooth=smooth))
        for name, label, smooth in (
            ("tokens_per_second", "tokens per second", False),
            ("grad_norm", "gradient norm", True),
            ("learning_rate", "learning rate", False),
            ("data_share", "share of time waiting for data", False),
        )
        if charts.any_of(runs, name)
    ]
    if not shown:
        return ""
    return page_html.section(
        "Throughput, gradient norm, learning rate", _legend(runs), page_html.columns(*shown),
        name="numbers",
    )  # fmt: skip


def _differences(runs: Sequence[Run]) -> str:
    if len(runs) == 1:
        return ""
    rows = [(key, *map(_value, values)) for key, values in differences(runs).items()]
    title = "What differs in the configs"
    if not rows:
        return page_html.section(title, "<p>Nothing.</p>", name="config")
    header = ("key", *(_name(runs, run) for run in runs))
    return page_html.section(
        title, page_html.table(header, rows, left=len(header)), name="config", long=True
    )


def _foot() -> str:
    return f'<footer class="soft">llmx {escaped(llmx.__version__)}</footer>'


def _name(runs: Sequence[Run], run: Run) -> Markup:
    return page_html.named(run.name, charts.color(runs.index(run)))


def _legend(runs: Sequence[Run]) -> str:
    return f"<p>{' '.join(_name(runs, run) for run in runs)}</p>" if len(runs) > 1 else ""


def _rate(run: Run) -> float:
    """Median tokens per second; NaN where none is measured."""
    values = run.series["tokens_per_second"].values
    values = values[np.isfinite(values)]
    return float(np.median(values)) if len(values) else math.nan


def _best(run: Run) -> tuple[float, int]:
    """The lowest held-out loss, and the step; (NaN, 0) where there is none."""
    held_out = run.series[HELD_OUT]
    if not np.isfinite(held_out.values).any():
        return math.nan, 0
    index = int(np.nanargmin(held_out.values))
    return float(held_out.values[index]), int(held_out.steps[index])


def _lowest(run: Run) -> str:
    value, step = _best(run)
    return f"{value:.4f} at {step:,}" if math.isfinite(value) else "–"


def _number(value: float, form: str) -> str:
    return form.format(value) if math.isfinite(value) else "–"


def _restarts(run: Run) -> str:
    rollbacks = f", {run.rollbacks} rollbacks" if run.rollbacks else ""
    return f"{run.launches - 1}{rollbacks}"


def _clock(seconds: float) -> str:
    """372 -> "6 min 12 s"."""
    if not math.isfinite(seconds):
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _value(value: Any) -> str:
    text = str(value) if value != "" else "''"
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]} …"

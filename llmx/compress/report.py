"""What a compression has measured: a table, a picture, and JSON."""

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from llmx.compress.measure import Measured
from llmx.runtime import printable

PICTURE, REPORT = "compress.png", "compress.json"
WIDTH = 110  # columns of text
UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def table(rows: Sequence[Measured]) -> Any:
    """A rich table; loss beside what it was at the start."""
    from rich.table import Table
    from rich.text import Text

    made = Table(title="after each stage", title_justify="left")
    made.add_column("stage", overflow="fold")
    for name in ("on disk", "parameters", "not zero", "loss", "FLOPs/token", "tokens/s", "s"):
        made.add_column(name, justify="right", no_wrap=True)
    first = rows[0].loss
    for row in rows:
        change = "" if row is rows[0] or not first else f" ({row.loss / first - 1:+.1%})"
        made.add_row(
            Text(printable.printable(row.stage)), f"{short(row.bytes)}B", short(row.parameters),
            f"{row.nonzero:.0%}",
            f"{row.loss:.4f}{change}", short(row.flops),
            f"{row.tokens_per_second:.0f}" if row.tokens_per_second else "-", f"{row.seconds:.0f}",
        )  # fmt: skip
    return made


def short(number: float) -> str:
    """ "1.25M" of 1,250,000."""
    for size, unit in UNITS:
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def write(folder: pathlib.Path, rows: Sequence[Measured]) -> list[pathlib.Path]:
    """Writes the picture and the JSON; returns their paths."""
    report = folder / REPORT
    temporary = report.with_suffix(".tmp")
    temporary.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=2) + "\n")
    temporary.replace(report)
    picture = folder / PICTURE
    temporary = picture.with_suffix(".tmp")
    _draw(rows).savefig(temporary, format="png", dpi=150)
    temporary.replace(picture)
    return [report, picture]


def _draw(rows: Sequence[Measured]):
    """A matplotlib figure: a bar for each stage and number."""
    from matplotlib.figure import Figure

    names = [f"{number}. {row.stage.split()[0]}" for number, row in enumerate(rows)]
    numbers = {
        "MB on disk": [row.bytes / 1e6 for row in rows],
        "held-out loss": [row.loss for row in rows],
        "MFLOPs per token": [row.flops / 1e6 for row in rows],
        "tokens per second": [row.tokens_per_second for row in rows],
    }
    numbers = {title: values for title, values in numbers.items() if any(values)}
    figure = Figure(figsize=(11, 1.2 + 0.4 * len(rows)), layout="constrained")
    axes_of = figure.subplots(1, len(numbers), squeeze=False)[0]
    for axes, (title, values) in zip(axes_of, numbers.items(), strict=True):
        bars = axes.barh(names, values, color="#4c78a8")
        axes.bar_label(bars, fmt="%.3g", padding=2, fontsize="small")
        axes.set_title(title, loc="left", fontsize="medium")
        axes.invert_yaxis()
        axes.margins(x=0.25)
        if axes is not figure.axes[0]:
            axes.set_yticklabels([])
        axes.spines[["top", "right"]].set_visible(False)
    return figure

"""The charts of a comparison: one number of all runs over steps or tokens, as SVG.

Runs keep their color in all charts. Numbers that scatter are a smooth line over a faint one.
"""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from llmx.report.runs import HELD_OUT, Run, Series
from llmx.runtime.plot import smoothed
from llmx.runtime.svg import BLUE, BROWN, GRAY, GREEN, INK, LINE, ORANGE, PURPLE, RED, SKY, svg

COLORS = (BLUE, RED, GREEN, PURPLE, ORANGE, SKY, BROWN, GRAY)
DASHES = ("-", (0, (4, 1.5)), (0, (1, 1)))  # of runs that have a color again
MOST_POINTS = 500  # of a line: more than its pixels
WIDTH = 4.8  # inches: a column of the page, or a telephone
LOG_RANGE = 30.0  # largest / least from which an axis is logarithmic


def color(index: int) -> str:
    return COLORS[index % len(COLORS)]


def loss(runs: Sequence[Run], x: str) -> str:
    """Training loss, smoothed over each record, and held-out loss with dots, over "steps" or
    "tokens"."""

    def make() -> Figure:
        figure, axes = _axes(x, "loss, nats per token")
        settled = []
        largest = max(_last(getattr(run.series["loss"], x)) for run in runs)
        for index, run in enumerate(runs):
            smooth = _smooth(axes, run.series["loss"], x, index)
            settled += _settled(smooth, largest)
            held_out = _finite(run.series[HELD_OUT], x)
            if len(held_out[0]):
                axes.plot(
                    *thinned(*held_out), color=color(index), lw=1.1, ls=(0, (1.5, 1.5)), marker="o",
                    ms=3.4,
                )  # fmt: skip
                settled += _settled(held_out, largest)
        _limit(axes, settled)
        axes.set_xlim(0, 1.01 * largest)
        return figure

    return svg(f"loss-{x}", make, f"Training and held-out loss over {x}")


def number(runs: Sequence[Run], name: str, label: str, *, smooth: bool) -> str:
    """A number of the training records over steps. `smooth`: it scatters."""

    def make() -> Figure:
        figure, axes = _axes("steps", label)
        shown = []
        for index, run in enumerate(runs):
            series = run.series[name]
            if smooth:
                line = _smooth(axes, series, "steps", index)
            else:
                line = _finite(series, "steps")
                _line(axes, *line, index)
            shown += line[1].tolist()
        least, most = min(shown, default=0.0), max(shown, default=0.0)
        if smooth and least > 0 and most > LOG_RANGE * least:
            axes.set_yscale("log")
            axes.yaxis.set_minor_formatter(ticker.NullFormatter())
        else:
            axes.set_ylim(0, 1.08 * most or 1)
        axes.yaxis.set_major_formatter(_short)
        axes.set_xlim(0, 1.01 * max(run.num_steps for run in runs))
        return figure

    return svg(name.replace("_", "-"), make, f"{label} over steps")


def any_of(runs: Sequence[Run], name: str) -> bool:
    """Whether a run has the number."""
    return any(np.isfinite(run.series[name].values).any() for run in runs)


def thinned(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At most MOST_POINTS points, each the mean of as many; arrays [points]. NaN where all are."""
    width = -(-len(x) // MOST_POINTS)
    if width <= 1:
        return x, y
    starts = np.arange(0, len(x), width)
    is_there = np.isfinite(y)
    counts = np.add.reduceat(is_there.astype(float), starts)
    sums = np.add.reduceat(np.where(is_there, y, 0.0), starts)
    means = np.divide(sums, counts, out=np.full(len(starts), np.nan), where=counts > 0)
    return np.add.reduceat(x.astype(float), starts) / np.diff([*starts, len(x)]), means


def at_end(series: Series) -> float:
    """The smooth line's last value; NaN where the last record is not finite, or there is none."""
    _, values = _finite(series, "steps")
    return smoothed(values.tolist())[-1] if np.isfinite(series.last) else math.nan


def _smooth(
    axes: Axes, series: Series, x: str, index: int
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Draws a series and its smooth line, which is returned without what is not finite."""
    at, values = _finite(series, x)
    smooth = np.array(smoothed(values.tolist()))
    whole = np.full(len(series.values), np.nan)
    if len(values) >= 100:  # with fewer, smoothing leaves them as they are
        axes.plot(
            *thinned(getattr(series, x), series.values), color=color(index), lw=0.7, alpha=0.3
        )
    whole[np.isfinite(series.values)] = smooth  # gaps stay gaps
    _line(axes, getattr(series, x), whole, index)
    return at, smooth


def _line(axes: Axes, x: np.ndarray, y: np.ndarray, index: int) -> None:
    dash = DASHES[index // len(COLORS) % len(DASHES)]
    alone = dict(marker="o", ms=4) if np.isfinite(y).sum() == 1 else {}
    axes.plot(*thinned(x, y), color=color(index), lw=1.6, ls=dash, **alone)


def _finite(series: Series, x: str) -> tuple[np.ndarray, np.ndarray]:
    is_there = np.isfinite(series.values)
    return getattr(series, x)[is_there], series.values[is_there]


def _last(values: np.ndarray) -> int:
    return int(values[-1]) if len(values) else 0


def _settled(line: tuple[np.ndarray, np.ndarray], largest: float) -> list[float]:
    """Values that must be seen: those behind the steep first steps, the last one in any case."""
    x, y = line
    return [*y[x >= largest / 10].tolist(), *y[-1:].tolist()]


def _limit(axes: Axes, values: list[float]) -> None:
    if values:
        low, high = min(values), max(values)
        margin = 0.08 * (high - low) or 0.1
        axes.set_ylim(low - margin, high + margin)


def _short(value: float, _: int | None = None) -> str:
    """ "12k", "0.003"."""
    for scale, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:g}{letter}"
    return f"{value:g}"


def _axes(x: str, label: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, 0.62 * WIDTH), layout="constrained")
    axes = figure.subplots()
    axes.grid(color=LINE, lw=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel(x)
    axes.set_ylabel(label)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(nbins=6, steps=[1, 2, 5, 10], integer=True))
    axes.xaxis.set_major_formatter(_short)
    axes.tick_params(color=INK)
    return figure, axes

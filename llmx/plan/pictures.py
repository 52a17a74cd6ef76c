"""The pictures of the planner's page, as SVG for HTML: text stays text, colors follow the page.

Each takes a section of the report (`run_report.show`) and returns one <svg> element. Ink, grid and
background are CSS variables of the page, so that a picture is dark where the page is.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from llmx.pipeline import schedule
from llmx.pipeline.schedule import Table
from llmx.pipeline.simulate import Timeline
from llmx.plan import draw, page_text
from llmx.runtime.svg import (
    BLUE,
    BROWN,
    GRAY,
    GREEN,
    INK,
    LINE,
    NAVY,
    ORANGE,
    PALE_BLUE,
    PALE_ORANGE,
    PALE_PURPLE,
    PAPER,
    PURPLE,
    RED,
    SKY,
    SLATE,
    YELLOW,
    svg,
)

Report = Mapping[str, Any]

GIB = 2**30
WIDTH = 4.8  # inches: a column of the page, or a telephone
TIMES = {
    "products of layers": BLUE, "attention": GREEN, "elementwise": SKY, "head and loss": PURPLE,
    "optimizer": YELLOW, "bubble": GRAY,
}  # fmt: skip
EXPOSED = (RED, ORANGE, PALE_ORANGE, PALE_PURPLE)
BYTES = {
    "parameters": BLUE, "optimizer": SKY, "ema": PALE_BLUE, "gradients": ORANGE,
    "sums of gradients": PALE_ORANGE, "gradients of the head": YELLOW,
    "saved activations": GREEN, "kept": GREEN,
    "copies of activations": SLATE, "copies of weights and gradients": GRAY,
    "gathered weights": BROWN, "loss": RED, "a layer": PURPLE, "a layer, begun": PURPLE,
    "gradient of the head": YELLOW, "gradient of the embedding": YELLOW, "working": PURPLE,
    "a segment": PALE_PURPLE, "waiting": YELLOW, "factors": PALE_PURPLE, "versions": NAVY,
    "in flight": PALE_ORANGE, "updated parameters": NAVY, "whole matrices": BROWN,
}  # fmt: skip
MOST_OPERATIONS = 1500  # of a schedule with numbers in its boxes
NUM_NAMED = 6  # places of the roofline that have numbers
BESIDE_BYTES = 1.0  # FLOPs per byte at which operators without FLOPs are drawn


def time_colors(parts: Sequence[str]) -> dict[str, str]:
    """The color of each part of a step."""
    exposed = itertools.cycle(EXPOSED)
    return {name: TIMES.get(name) or next(exposed) for name in parts}


def memory(report: Report, admitted: float) -> str:
    """What a device holds at each peak, beside its limit.

    `report`: "memory" of the report; `admitted`: the share of the limit up to which a run fits.
    """
    state, limit = report["state"], report["limit"] / GIB
    rows = {"state": state} | {name: state | peak for name, peak in report["peaks"].items()}
    most = max(sum(row.values()) / GIB for row in rows.values())
    right = max(1.04 * limit, 1.28 * most)  # room for words behind the longest

    def make() -> Figure:
        figure, axes = _bars(len(rows))
        for index, row in enumerate(rows.values()):
            left = 0.0
            for name, held in row.items():
                color = BYTES.get(name, GRAY)
                axes.barh(index, held / GIB, 0.62, left, color=color, edgecolor=PAPER, lw=0.8)
                left += held / GIB
            axes.annotate(
                f"{left:.1f} GiB", (left, index), (5, 0), va="center", weight="bold",
                textcoords="offset points", zorder=3,
                bbox=dict(fc="none" if left > limit else PAPER, ec="none", pad=0.8),
            )  # fmt: skip
        axes.axvspan(limit, right, color=RED, alpha=0.14, lw=0, zorder=0)
        axes.axvline(limit, color=RED, lw=1.6)
        axes.axvline(admitted * limit, color=RED, lw=1.2, ls=(0, (4, 3)))
        axes.annotate(
            f"admitted {admitted * limit:.1f}, limit {limit:.1f} GiB", (limit, 1),
            (0, 4), xycoords=("data", "axes fraction"), textcoords="offset points",
            ha="right" if limit > 0.5 * right else "left",
        )  # fmt: skip
        axes.set_xlim(0, right)
        axes.set_yticks(range(len(rows)), list(rows))
        axes.set_xlabel("memory of a device, GiB")
        return figure

    return svg("memory", make, "Memory of a device at each peak, beside its limit")


def waterfall(report: Report) -> str:
    """Where the time of a step goes, part behind part. `report`: "time" of the report."""
    parts, step = report["parts"], report["step"]
    colors = time_colors(list(parts))
    scale, unit = (1.0, "s") if step >= 1 else (1e3, "ms")

    def make() -> Figure:
        figure, axes = _bars(len(parts) + 1)
        left = 0.0
        for index, (name, seconds) in enumerate(parts.items()):
            axes.barh(index, seconds * scale, 0.68, left * scale, color=colors[name])
            right = left + seconds
            axes.plot([right * scale] * 2, [index - 0.34, index + 1.34], color=LINE, lw=0.8)
            at, beside = _place(left / step, right / step)
            label = f"{page_text.duration(seconds)}, {seconds / step:.1%}"
            axes.annotate(
                label, (at * step * scale, index), textcoords="offset points", va="center",
                **beside,
            )  # fmt: skip
            left = right
        axes.barh(len(parts), step * scale, 0.68, color=INK)
        axes.annotate(
            page_text.duration(step), (step * scale / 2, len(parts)), va="center", ha="center",
            color=PAPER, weight="bold",
        )  # fmt: skip
        axes.set_xlim(0, 1.02 * step * scale)
        axes.set_yticks(range(len(parts) + 1), [*parts, "step"])
        axes.set_xlabel(f"time, {unit}")
        return figure

    return svg("waterfall", make, "Where the time of a step goes, part behind part")


def _place(left: float, right: float) -> tuple[float, dict[str, Any]]:
    """Where the words of a bar have room, by its ends as shares of the width."""
    if right < 0.66:
        return right, dict(xytext=(5, 0), ha="left")
    if left > 0.4:
        return left, dict(xytext=(-5, 0), ha="right")
    return right, dict(xytext=(-5, 0), ha="right", color="white", weight="bold")


def roofline(report: Report, numbered: int) -> str:
    """The FLOP/s that operators reach, against what chip and memory allow.

    Operators that only move bytes are drawn at 1 FLOP per byte: at their bytes/s. `report`: "time"
    of the report; `numbered`: so many of its operators, from the first, have a number.
    """
    found, peak, bandwidth = report["operators"], report["peak_flops"], report["bandwidth"]
    colors = time_colors([*TIMES, *report["parts"]])
    points = {index: _on_roofline(one) for index, one in enumerate(found)}
    points = {index: (x, y) for index, (x, y) in points.items() if x and y}
    low = min([BESIDE_BYTES, *(x for x, _ in points.values())]) / 2
    ridge = peak / bandwidth
    high = max([ridge, *(x for x, _ in points.values())]) * 3

    def make() -> Figure:
        figure = Figure(figsize=(WIDTH, 0.8 * WIDTH), layout="constrained")
        axes = figure.subplots()
        axes.plot([low, ridge, high], [low * bandwidth, peak, peak], color=INK, lw=1.6, zorder=1)
        for index, (x, y) in reversed(points.items()):  # those that come first on top
            one = found[index]
            axes.scatter(
                [x], [y], s=42, color=colors.get(one.get("part"), BLUE), edgecolor=PAPER, lw=0.7,
                marker="o" if one["flops"] else "^", zorder=3, gid=f"operator{index}",
            )  # fmt: skip
        axes.set(xscale="log", yscale="log", xlim=(low, high))
        axes.set_ylim(min([low * bandwidth, *(y for _, y in points.values())]) / 4, peak * 2.4)
        _name_roof(axes, peak, bandwidth)
        _number_points(axes, {index: at for index, at in points.items() if index < numbered})
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(ticker.EngFormatter(sep="", places=0))
            axis.set_minor_locator(ticker.NullLocator())
        axes.grid(color=LINE, lw=0.6)
        axes.set_axisbelow(True)
        axes.set_xlabel("FLOPs per byte that is read or written")
        axes.set_ylabel("FLOP/s")
        return figure

    titles = {f"operator{index}": _operator_text(one) for index, one in enumerate(found)}
    return svg("roofline", make, "Roofline: FLOP/s of operators against the chip's", titles)


def _name_roof(axes: Axes, peak: float, bandwidth: float) -> None:
    """Words above the roof, and along its slope."""
    (low, high), ridge = axes.get_xlim(), peak / bandwidth
    words = dict(textcoords="offset points", ha="center")
    flat = f"peak {page_text.rate(peak, 'FLOP/s')}"
    axes.annotate(flat, ((ridge * high) ** 0.5, peak), (0, 5), **words)
    middle, slope = (low * ridge) ** 0.5, f"memory {page_text.rate(bandwidth, 'B/s')}"
    axes.annotate(
        slope, (middle, middle * bandwidth), (-5, 5), rotation=45, rotation_mode="anchor",
        transform_rotates_text=True, **words,
    )  # fmt: skip


def _on_roofline(one: Report) -> tuple[float, float]:
    """FLOPs per byte and FLOP/s; of operators without FLOPs where their bytes/s put them."""
    if not one["flops"]:
        return BESIDE_BYTES, BESIDE_BYTES * one["bytes"] / one["seconds"]
    return one["flops"] / max(one["bytes"], 1.0), one["flops"] / one["seconds"]


def _operator_text(one: Report) -> str:
    reached = (
        f"{one['share']:.0%} of the peak" if one["flops"]
        else page_text.rate(one["bytes"] / one["seconds"], "B/s")
    )  # fmt: skip
    return f"{one['name']}: {one['count']:g} times {page_text.duration(one['seconds'])}, {reached}"


def _number_points(axes: Axes, points: Mapping[int, tuple[float, float]]) -> None:
    """Numbers of points, counted from 1: beside those of bytes alone, below the others with lines.

    Points too close to be told apart share a label.
    """
    groups: dict[tuple[float, float], list[int]] = {}
    for index, (x, y) in points.items():
        near = tuple(np.round(5 * np.log10([x, y])).tolist())
        groups.setdefault(near, []).append(index)
    words = dict(weight="bold", zorder=4)
    line = dict(arrowstyle="-", color=INK, lw=0.6, alpha=0.6, shrinkA=1, shrinkB=5)
    below = []
    for group in list(groups.values())[:NUM_NAMED]:
        if points[group[0]][0] > BESIDE_BYTES:
            below.append(group)
            continue
        axes.annotate(
            _ranges(group), points[group[0]], (7, 0), textcoords="offset points", va="center",
            **words,
        )  # fmt: skip
    for place, group in enumerate(sorted(below, key=lambda group: points[group[0]])):
        across, down = 0.4 + 0.56 * (place + 0.5) / len(below), 0.22 - 0.09 * (place % 2)
        axes.annotate(
            _ranges(group), points[group[0]], (across, down), textcoords="axes fraction",
            ha="center", va="top", arrowprops=line | dict(relpos=(0.5, 1.0)), **words,
        )  # fmt: skip


def _ranges(indices: Sequence[int], most: int = 2) -> str:
    """ "1, 4–6" of indices from 0; "…" for what is behind `most` runs."""
    runs: list[list[int]] = []
    for number in (index + 1 for index in indices):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words = [f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs[:most]]
    return ", ".join(words) + (" …" if len(runs) > most else "")


def gantt(table: Table, timeline: Timeline) -> str:
    """A pipeline's schedule: stages by time, and the activations that they hold."""

    def make() -> Figure:
        figure = draw.draw(table, schedule.check(table), timeline)
        work, held = figure.axes
        text = f"{table.name}, {table.num_stages} stages, {table.num_microbatches} microbatches"
        # On the left, where a wide picture begins.
        for axes, title in ((work, text), (held, held.get_title())):
            axes.set_title("")
            axes.set_title(title, loc="left", fontsize=9.5)
        return figure

    return svg("gantt", make, "The pipeline's schedule, stages by time")


def is_drawn(table: Table) -> bool:
    """Whether a schedule is small enough for a picture in which one sees its operations."""
    return int((table.kind != schedule.IDLE).sum()) <= MOST_OPERATIONS


def search(report: Report, limit: float, admitted: float, now: tuple[float, float] | None) -> str:
    """Configurations by memory and time of a step.

    `report`: "search" of the report; `limit`: bytes of a device; `now`: bytes and seconds of the
    run of the report, if they are known.
    """
    found, best = report["configurations"], report["best"]
    times = [one["step"] for one in found] + ([now[1]] if now else [])

    def make() -> Figure:
        figure = Figure(figsize=(WIDTH, 0.72 * WIDTH), layout="constrained")
        axes = figure.subplots()
        held = lambda some: [one["memory"] / GIB for one in some]  # noqa: E731
        for fits, style in (
            (False, dict(color=GRAY, marker="x", s=22, lw=1.1, label="does not fit")),
            (True, dict(color=BLUE, marker="o", s=24, edgecolor=PAPER, lw=0.5, label="fits")),
        ):
            some = [one for one in found if one["fits"] is fits]
            if some:
                axes.scatter(held(some), [one["step"] for one in some], **style)
        if now:
            axes.scatter(
                [now[0] / GIB], [now[1]], marker="D", s=52, color=RED, edgecolor=PAPER,
                label="this run", zorder=4,
            )  # fmt: skip
        if best is not None:
            axes.scatter(
                held([found[best]]), [found[best]["step"]], marker="*", s=190, color=ORANGE,
                edgecolor=INK, lw=0.8, label="best", zorder=5,
            )  # fmt: skip
        axes.axvline(limit / GIB, color=RED, lw=1.6)
        axes.axvline(admitted * limit / GIB, color=RED, lw=1.2, ls=(0, (4, 3)))
        if max(times) > 8 * min(times):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
            axes.yaxis.set_minor_formatter(ticker.NullFormatter())
        else:
            axes.set_ylim(bottom=0)
        most = max(*held(found), limit / GIB)
        axes.set_xlim(0, min(1.04 * most, 2.5 * limit / GIB))
        axes.grid(color=LINE, lw=0.6)
        axes.set_axisbelow(True)
        axes.set_xlabel("memory of a device, GiB")
        axes.set_ylabel("time of a step, s")
        figure.legend(loc="outside upper left", ncols=4, frameon=False, handletextpad=0.2)
        return figure

    return svg("search", make, "Configurations of the search by memory and time of a step")


def _bars(num_rows: int) -> tuple[Figure, Axes]:
    """Axes for horizontal bars, the first on top."""
    figure = Figure(figsize=(WIDTH, 0.62 + 0.36 * (num_rows + 0.4)), layout="constrained")
    axes = figure.subplots()
    axes.set_ylim(num_rows - 0.45, -0.55)
    axes.spines[["left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color=LINE, lw=0.6)
    axes.set_axisbelow(True)
    return figure, axes

"""Draws docs/pipeline.png: every schedule with four stages and eight microbatches.

    python scripts/draw_pipeline.py [--out docs/pipeline.png]

Tables are those of `llmx.pipeline`, drawn as stages that meet at every tick, where the forward, the
gradient of the input and those of the weights take equal time. All have the same scale.
"""

import argparse

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from llmx.pipeline import schedule, schedules, simulate
from llmx.plan import draw as draw_lib

STAGES, MICROBATCHES = 4, 8


def draw(out: str) -> None:
    tables = [make(STAGES, MICROBATCHES) for make in schedules.SCHEDULES.values()]
    lines = [
        simulate.simulate(table, forward=1, backward=1, weight=1, barriers=True) for table in tables
    ]
    span = max(timeline.step_time for timeline in lines)
    figure = Figure(figsize=(15, 1.55 * len(tables) + 0.9), layout="constrained")
    rows = figure.subplots(len(tables), 1, sharex=True)
    for axes, table, timeline in zip(rows, tables, lines, strict=True):
        _draw(axes, table, timeline)
    rows[-1].set_xlim(0, span)
    rows[-1].set_xlabel("time in forwards of a stage")
    figure.legend(handles=_patches(), loc="outside upper center", ncols=6, frameon=False)
    figure.savefig(out, dpi=100)


def _draw(axes: Axes, table: schedule.Table, timeline: simulate.Timeline) -> None:
    facts = schedule.check(table)
    axes.barh(range(STAGES), timeline.step_time, 0.94, color="#eeeeee")
    chunks = [table.chunks_of(stage) for stage in range(STAGES)]
    for tick, stage, (kind, microbatch, chunk) in table.operations():
        color = draw_lib.shade(
            schedule.KINDS[kind], chunks[stage].index(chunk), table.chunks_per_stage
        )
        start, end = timeline.start[tick, stage], timeline.end[tick, stage]
        axes.barh(stage, end - start, 0.94, start, color=color, edgecolor="white", linewidth=0.6)
        ink = "white" if np.dot(color, (0.3, 0.59, 0.11)) < 0.55 else "black"
        axes.text(
            (start + end) / 2, stage, str(microbatch), ha="center", va="center_baseline",
            fontsize=9, color=ink,
        )  # fmt: skip
    period = "one period, " if table.periodic else ""
    held = " ".join(f"{number / table.chunks_per_stage:g}" for number in facts.peak_stash)
    axes.set_title(
        f"{table.name}: {period}length {facts.length:g}, bubble {facts.bubble:.1%}, microbatches "
        f"held by each stage {held}",
        loc="left", fontsize=11,
    )  # fmt: skip
    axes.set_ylim(STAGES - 0.45, -0.55)
    axes.set_yticks(range(STAGES))
    axes.set_ylabel("stage")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _patches() -> list[Patch]:
    kinds = {"forward": "forward", "backward": "backward", "weight": "gradients of weights"}
    return [
        Patch(
            color=draw_lib.shade(kind, chunk, 2), label=name + ", second part of the stage" * chunk
        )
        for kind, name in kinds.items()
        for chunk in (0, 1)
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="docs/pipeline.png", help="file to write")
    draw(parser.parse_args().out)

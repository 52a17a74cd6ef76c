"""A schedule as a picture: stages by time, one box per operation."""

import numpy as np
from matplotlib import colors
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.patches import Patch

from llmx.pipeline import schedule
from llmx.pipeline.schedule import KINDS, Facts, Table
from llmx.pipeline.simulate import Timeline

COLORS = {"forward": "#0072b2", "backward": "#d55e00", "weight": "#009e73"}  # Okabe and Ito
LIGHTEST = 0.6  # of the way to white, for the last chunk of a stage
BOX_INCHES = 0.2  # of the shortest operation
STAGE_INCHES = 0.34
DIGIT_INCHES = 0.075  # at the font size of the numbers


def draw(table: Table, facts: Facts, timeline: Timeline) -> Figure:
    """The picture of a schedule: above, operations over time; below, the activations saved.

    Raises ValueError if all times are 0.
    """
    stages, span = table.num_stages, timeline.step_time
    lengths = timeline.end - timeline.start
    if not span:
        raise ValueError("all times are 0: there is nothing to draw; give one above 0")
    width = float(np.clip(2.5 + BOX_INCHES * span / lengths[lengths > 0].min(), 8, 40))
    figure = Figure(figsize=(width, 2.3 + 1.7 * STAGE_INCHES * stages), layout="constrained")
    work, memory = figure.subplots(2, 1, sharex=True, height_ratios=(1, 0.6))
    inches_per_second = (width - 2.0) / span
    _draw_operations(work, table, timeline, inches_per_second)
    _draw_stash(memory, table, timeline, inches_per_second)
    period = ", one period" if table.periodic else ""
    work.set_title(
        f"{table.name}, {stages} stages, {table.num_microbatches} microbatches{period}: length "
        f"{facts.length:g} forwards, bubble {facts.bubble:.1%}",
        fontsize=11,
    )
    unit = "microbatches" if table.chunks_per_stage == 1 else "microbatches of one chunk"
    memory.set_title(f"activations held: {unit}", fontsize=9)
    memory.set_xlabel("time, s")
    for axes in (work, memory):
        axes.set_xlim(0, span)
        axes.set_ylim(stages - 0.5, -0.5)
        axes.set_yticks(range(stages))
        axes.set_ylabel("stage")
    return figure


def _draw_operations(axes: Axes, table: Table, timeline: Timeline, scale: float) -> None:
    """A box per operation, and the legend."""
    num_chunks = table.chunks_per_stage
    chunks = [table.chunks_of(stage) for stage in range(table.num_stages)]
    for tick, stage, (kind, microbatch, chunk) in table.operations():
        color = shade(KINDS[kind], chunks[stage].index(chunk), num_chunks)
        start, end = timeline.start[tick, stage], timeline.end[tick, stage]
        _box(axes, start, end, stage, color, str(microbatch), scale)
    kinds = [KINDS[kind] for kind in np.unique(table.kind[table.kind != schedule.IDLE])]
    patches = [
        tuple(Patch(color=shade(kind, chunk, num_chunks)) for chunk in range(num_chunks))
        for kind in kinds
    ]
    axes.legend(
        patches, kinds, handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        title=f"first to last of {num_chunks} chunks" if num_chunks > 1 else None,
        loc="center left", bbox_to_anchor=(1.005, 0.5), frameon=False, fontsize=9, title_fontsize=8,
    )  # fmt: skip


def _draw_stash(axes: Axes, table: Table, timeline: Timeline, scale: float) -> None:
    """A box with the number of saved microbatches wherever it changes."""
    edges = np.append(np.nanmin(timeline.start, axis=1), timeline.step_time)
    held = schedule.stash(table)
    for stage in range(table.num_stages):
        changes = 1 + np.flatnonzero(np.diff(held[:, stage]))
        for first, last in zip([0, *changes], [*changes, table.num_ticks], strict=True):
            count = held[first, stage]
            gray = (1 - 0.8 * count / held.max(),) * 3
            _box(axes, edges[first], edges[last], stage, gray, str(count or ""), scale)


def _box(axes: Axes, start: float, end: float, stage: int, color, label: str, scale: float) -> None:
    """A box from `start` to `end` seconds, with its label if `scale` inches/s leave room for it."""
    axes.barh(stage, end - start, 0.92, start, color=color, edgecolor="white", linewidth=0.5)
    if (end - start) * scale > DIGIT_INCHES * len(label) + 0.03:
        ink = "white" if np.dot(color, (0.3, 0.59, 0.11)) < 0.55 else "black"
        middle = (start + end) / 2, stage
        axes.text(*middle, label, ha="center", va="center_baseline", fontsize=8, color=ink)


def shade(kind: str, chunk: int, chunks: int) -> tuple[float, ...]:
    """The RGB color of an operation: lighter for later ones of a stage's `chunks`."""
    mix = LIGHTEST * chunk / max(chunks - 1, 1)
    return tuple(channel + (1 - channel) * mix for channel in colors.to_rgb(COLORS[kind]))

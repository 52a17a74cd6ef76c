"""A schedule as a picture: stages by time, an operation a box."""

import typing

import numpy as np

from llmx.pipeline import schedule
from llmx.pipeline.schedule import KINDS, Facts, Table
from llmx.pipeline.simulate import Timeline

if typing.TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = {"forward": "#0072b2", "backward": "#d55e00", "weight": "#009e73"}  # Okabe and Ito
LIGHTEST = 0.6  # of the way to white, for the last part of a stage
BOX_INCHES = 0.2  # of the shortest operation
STAGE_INCHES = 0.34
DIGIT_INCHES = 0.075  # at the font size of the numbers


def draw(table: Table, facts: Facts, timeline: Timeline) -> "Figure":
    """Above, what each stage does over time; below, how much it holds."""
    from matplotlib.figure import Figure
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    stages, span = table.num_stages, timeline.step_time
    lengths = timeline.end - timeline.start
    if not span:
        raise ValueError("all times are 0: there is nothing to draw; give one above 0")
    width = float(np.clip(2.5 + BOX_INCHES * span / lengths[lengths > 0].min(), 8, 40))
    figure = Figure(figsize=(width, 2.3 + 1.7 * STAGE_INCHES * stages), layout="constrained")
    work, memory = figure.subplots(2, 1, sharex=True, height_ratios=(1, 0.6))
    inches_per_second = (width - 2.0) / span

    def box(axes, start, end, stage, color, label):
        axes.barh(stage, end - start, 0.92, start, color=color, edgecolor="white", linewidth=0.5)
        if (end - start) * inches_per_second > DIGIT_INCHES * len(label) + 0.03:
            ink = "white" if np.dot(color, (0.3, 0.59, 0.11)) < 0.55 else "black"
            middle = (start + end) / 2, stage
            axes.text(*middle, label, ha="center", va="center_baseline", fontsize=8, color=ink)

    chunks = [table.chunks_of(stage) for stage in range(stages)]
    for tick, stage, (kind, microbatch, chunk) in table.operations():
        color = shade(KINDS[kind], chunks[stage].index(chunk), table.chunks_per_stage)
        start, end = timeline.start[tick, stage], timeline.end[tick, stage]
        box(work, start, end, stage, color, str(microbatch))

    edges = np.append(np.nanmin(timeline.start, axis=1), span)
    held = schedule.stash(table)
    for stage in range(stages):
        changes = 1 + np.flatnonzero(np.diff(held[:, stage]))
        for first, last in zip([0, *changes], [*changes, table.num_ticks], strict=True):
            count = held[first, stage]
            gray = (1 - 0.8 * count / held.max(),) * 3
            box(memory, edges[first], edges[last], stage, gray, str(count or ""))

    period = ", one period" if table.periodic else ""
    work.set_title(
        f"{table.name}, {stages} stages, {table.num_microbatches} microbatches{period}: length "
        f"{facts.length:g} forwards, bubble {facts.bubble:.1%}",
        fontsize=11,
    )
    shades = range(table.chunks_per_stage)
    kinds = [KINDS[kind] for kind in np.unique(table.kind[table.kind != schedule.IDLE])]
    patches = [
        tuple(Patch(color=shade(kind, chunk, table.chunks_per_stage)) for chunk in shades)
        for kind in kinds
    ]
    work.legend(
        patches, kinds, handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        title=f"first to last of {shades.stop} chunks" if shades.stop > 1 else None,
        loc="center left", bbox_to_anchor=(1.005, 0.5), frameon=False, fontsize=9, title_fontsize=8,
    )  # fmt: skip
    unit = "microbatches" if table.chunks_per_stage == 1 else "microbatches of one chunk"
    memory.set_title(f"activations held: {unit}", fontsize=9)
    memory.set_xlabel("time, s")
    for axes in (work, memory):
        axes.set_xlim(0, span)
        axes.set_ylim(stages - 0.5, -0.5)
        axes.set_yticks(range(stages))
        axes.set_ylabel("stage")
    return figure


def shade(kind: str, chunk: int, chunks: int) -> tuple[float, ...]:
    """The color of an operation: lighter, the later the part among those of its stage."""
    from matplotlib.colors import to_rgb

    mix = LIGHTEST * chunk / max(chunks - 1, 1)
    return tuple(channel + (1 - channel) * mix for channel in to_rgb(COLORS[kind]))

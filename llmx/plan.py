"""Shows a pipeline schedule before anything runs: its bubble, its memory, its times, a picture:

    python -m llmx.plan --schedule zb_v --stages 4 --microbatches 16 --out schedule.png

A schedule of your own comes from a file (`--table`, see `pipeline.read_csv`); `--csv` writes one to
start from. Exit codes: 0, or 2 where schedule, sizes, file or times are wrong.
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.patches import Patch

from llmx import pipeline
from llmx.pipeline import KINDS, SCHEDULES, Facts, Table, Timeline

FINE, WRONG = 0, 2

# The bubble by P stages, M microbatches from P on, v parts per stage.
BUBBLES: dict[str, tuple[str, Callable[[int, int, int], float]]] = {
    "gpipe": ("(P-1) / (M+P-1)", lambda P, M, v: (P - 1) / (M + P - 1)),
    "1f1b": ("(P-1) / (M+P-1)", lambda P, M, v: (P - 1) / (M + P - 1)),
    "interleaved_1f1b": ("(P-1) / (vM+P-1)", lambda P, M, v: (P - 1) / (v * M + P - 1)),
    "zb_h1": ("(P-1) / (3M+P-1)", lambda P, M, v: (P - 1) / (3 * M + P - 1)),
    "zb_v": ("(P-1) / (6M+P-1)", lambda P, M, v: (P - 1) / (6 * M + P - 1)),
    "dual_pipe_v": ("(P-1) / (6M+P-1)", lambda P, M, v: (P - 1) / (6 * M + P - 1)),
    "pipedream_2bw": ("0", lambda P, M, v: 0.0),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Prints what a schedule costs, draws and writes it; returns the exit code."""
    args = _parser().parse_args(argv)
    try:
        table = make_table(args)
        facts = pipeline.check(table)
        seconds = {kind: getattr(args, kind) for kind in (*KINDS[1:], "transfer")}
        timeline = pipeline.simulate(table, **seconds)
        free = pipeline.simulate(table, **seconds, barriers=False)
        report = summary(table, facts, timeline, free)
        if args.table is None and table.num_microbatches >= table.num_stages:
            formula, bubble = BUBBLES[table.name]
            sizes = table.num_stages, table.num_microbatches, table.chunks
            report["closed_form"] = {"bubble": bubble(*sizes), "formula": formula}
        if args.out:
            draw(table, facts, timeline).savefig(args.out, dpi=120)
        if args.csv:
            pipeline.write_csv(table, args.csv)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return WRONG
    print(json.dumps(report) if args.json else text(report))
    return FINE


def make_table(args: argparse.Namespace) -> Table:
    """The table of the command line, from a file or by name."""
    sizes = {
        "stages": args.stages, "microbatches": args.microbatches,
        "virtual_stages": args.virtual_stages,
    }  # fmt: skip
    given = {name: size for name, size in sizes.items() if size is not None}
    if args.table is None:
        return SCHEDULES[args.schedule or "1f1b"](**({"stages": 4, "microbatches": 16} | given))
    if given:
        options = ", ".join("--" + name.replace("_", "-") for name in given)
        raise ValueError(f"{options} with --table={args.table}: the file says it; leave it out")
    return pipeline.read_csv(args.table)


def summary(table: Table, facts: Facts, timeline: Timeline, free: Timeline) -> dict[str, Any]:
    """What `main` prints, as JSON has it."""
    return {
        "name": table.name,
        "stages": table.num_stages,
        "microbatches": table.num_microbatches,
        "parts": table.num_parts,
        "ticks": table.num_ticks,
        "periodic": table.periodic,
        "length": facts.length,
        "busy": facts.busy,
        "bubble": facts.bubble,
        "peak_stash": facts.peak_stash.tolist(),
        "peak_waiting_weights": facts.peak_waiting_weights.tolist(),
        "step_time": {"barriers": timeline.step_time, "free_running": free.step_time},
    }


def text(report: dict[str, Any]) -> str:
    """The report for people."""
    closed = report.get("closed_form")
    beside = f"; closed form {closed['formula']} = {closed['bubble']:.2%}" if closed else ""
    parts = report["parts"] // report["stages"]
    unit = "microbatches" if parts == 1 else "microbatches of one part"
    peaks = report["peak_stash"], report["peak_waiting_weights"]
    stash, weights = (" ".join(map(str, peak)) for peak in peaks)
    times = report["step_time"]
    rows = {
        "length": f"{report['length']:g} forwards of a stage in {report['ticks']} ticks",
        "bubble": f"{report['bubble']:.2%}{beside}",
        "stash": f"{stash}   {unit} that each stage holds, at most",
        "weights": f"{weights}   of them between BACKWARD and WEIGHT, at most",
        "step time": f"{times['barriers']:g} s where stages meet at every tick, "
        f"{times['free_running']:g} s where they run freely",
    }
    what = "one period of " if report["periodic"] else ""
    return "\n".join(
        [
            f"{what}{report['name']}: {report['stages']} stages, "
            f"{report['microbatches']} microbatches",
            *(f"  {name:<10} {row}" for name, row in rows.items()),
        ]
    )


# ----------------------------------------------------------------------------------- the picture

COLORS = {"forward": "#0072b2", "backward": "#d55e00", "weight": "#009e73"}  # Okabe and Ito
LIGHTEST = 0.6  # of the way to white, for the last part of a stage
BOX_INCHES = 0.2  # of the shortest operation
STAGE_INCHES = 0.34
DIGIT_INCHES = 0.075  # at the font size of the numbers


def draw(table: Table, facts: Facts, timeline: Timeline) -> Figure:
    """Above, what each stage does over time; below, how much it holds."""
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

    parts = [table.parts_of(stage) for stage in range(stages)]
    for tick, stage, (kind, microbatch, part) in table.operations():
        color = shade(KINDS[kind], parts[stage].index(part), table.chunks)
        start, end = timeline.start[tick, stage], timeline.end[tick, stage]
        box(work, start, end, stage, color, str(microbatch))

    edges = np.append(np.nanmin(timeline.start, axis=1), span)
    held = pipeline.stash(table)
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
    shades = range(table.chunks)
    kinds = [KINDS[kind] for kind in np.unique(table.kind[table.kind != pipeline.IDLE])]
    patches = [
        tuple(Patch(color=shade(kind, chunk, table.chunks)) for chunk in shades) for kind in kinds
    ]
    work.legend(
        patches, kinds, handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        title=f"first to last of {table.chunks} parts" if table.chunks > 1 else None,
        loc="center left", bbox_to_anchor=(1.005, 0.5), frameon=False, fontsize=9, title_fontsize=8,
    )  # fmt: skip
    unit = "microbatches" if table.chunks == 1 else "microbatches of one part"
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
    mix = LIGHTEST * chunk / max(chunks - 1, 1)
    return tuple(channel + (1 - channel) * mix for channel in to_rgb(COLORS[kind]))


def _parser() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser(
        "llmx.plan", description="Bubble, memory, times and picture of a pipeline schedule."
    )
    which = command.add_mutually_exclusive_group()
    which.add_argument("--schedule", choices=list(SCHEDULES), help="by name (1f1b)")
    which.add_argument("--table", type=pathlib.Path, metavar="CSV", help="from a file")
    command.add_argument("--stages", type=int, metavar="P", help="pipeline stages (4)")
    command.add_argument("--microbatches", type=int, metavar="M", help="of a step (16)")
    command.add_argument("--virtual-stages", type=int, metavar="v", help="parts of a stage")
    for name, default, what in (
        ("forward", 1.0, "a stage's forward"),
        ("backward", 1.0, "the gradient of its input"),
        ("weight", 1.0, "the gradients of its weights"),
        ("transfer", 0.0, "one message between stages"),
    ):
        command.add_argument(
            f"--{name}", type=float, default=default, metavar="S", help=f"{what}, s (%(default)g)"
        )
    command.add_argument("--out", metavar="PNG", help="draw the schedule")
    command.add_argument("--csv", metavar="CSV", help="write the schedule, for --table")
    command.add_argument("--json", action="store_true", help="print one JSON object")
    return command


if __name__ == "__main__":
    sys.exit(main())

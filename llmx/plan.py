"""Shows a pipeline before anything runs: its bubble, its memory, its times, a picture:

    python -m llmx.plan --schedule zb_v --stages 4 --microbatches 16 --out schedule.png
    python -m llmx.plan --config configs/llama3_70b_pipeline.py --chip v5p

A schedule of your own comes from a file (`--table`, see `pipeline.read_csv`); `--csv` writes one to
start from. With a config, times are those of its layers, and the best cut of them into parts is
shown beside the equal one. Exit codes: 0, or 2 where config, schedule, sizes, file or times are
wrong, or nothing fits into `--memory`.
"""

import argparse
import json
import math
import pathlib
import sys
import typing
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from llmx import pipeline
from llmx.pipeline import KINDS, SCHEDULES, Facts, Table, Timeline

# What a schedule alone does not need is imported where it is used.
if typing.TYPE_CHECKING:
    from matplotlib.figure import Figure

    from llmx import config as config_lib
    from llmx import stages as stages_lib
    from llmx.partition import Layer, Partition

FINE, WRONG = 0, 2
GIB = 2**30
UTILIZATION = 0.5  # of a chip's peak FLOP/s, where nothing else is said

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
    """Prints what a schedule or a config's pipeline costs, draws and writes it; the exit code."""
    command = _parser()
    args, rest = command.parse_known_args(sys.argv[1:] if argv is None else argv)
    if args.config is None and rest:
        command.error(f"unknown arguments: {' '.join(rest)} (config values need --config)")
    try:
        if args.config is None:
            report, lines = show_schedule(args)
        else:
            report, lines = show_config(command, args, argv)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return WRONG
    print(json.dumps(report) if args.json else lines)
    return FINE


def show_schedule(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """What a schedule by itself costs, with the times of the command line."""
    if wrong := _given(args, CONFIG_ONLY):
        raise ValueError(f"{', '.join(wrong)} without --config: it belongs to a config's pipeline")
    table = make_table(args)
    facts = pipeline.check(table)
    seconds = {name: vars(args)[name] for name in TIMES}
    seconds = {name: TIMES[name] if given is None else given for name, given in seconds.items()}
    timeline = pipeline.simulate(table, **seconds)
    free = pipeline.simulate(table, **seconds, barriers=False)
    report = summary(table, facts, timeline.step_time, free.step_time, own=args.table is not None)
    lines = text(report)
    if args.out is None and not args.json:
        args.out = f"{table.name}_{table.num_stages}x{table.num_microbatches}.png"
    _write(args, table, facts, timeline)
    return report, f"{lines}\npicture: {args.out}" if args.out else lines


def _write(args: argparse.Namespace, table: Table, facts: Facts, timeline: Timeline) -> None:
    if args.out:
        draw(table, facts, timeline).savefig(args.out, dpi=120)
    if args.csv:
        pipeline.write_csv(table, args.csv)


def _given(args: argparse.Namespace, names: Sequence[str]) -> list[str]:
    """Those of some options that the command line has, as it writes them."""
    given = [name for name in names if vars(args)[name] not in (None, False)]
    return ["--" + name.replace("_", "-") for name in given]


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


def summary(
    table: Table, facts: Facts, barriers: float, free: float, *, own: bool
) -> dict[str, Any]:
    """What `main` prints of a schedule, as JSON has it: with seconds of a step, where stages meet
    at every tick and where they run freely. `own`: not one of `SCHEDULES`."""
    report = {
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
        "step_time": {"barriers": barriers, "free_running": free},
    }
    if not own and table.num_microbatches >= table.num_stages:
        formula, bubble = BUBBLES[table.name]
        sizes = table.num_stages, table.num_microbatches, table.chunks
        report["closed_form"] = {"bubble": bubble(*sizes), "formula": formula}
    return report


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


# ------------------------------------------------------------------------------ a config's pipeline


def show_config(
    command: argparse.ArgumentParser, args: argparse.Namespace, argv: Sequence[str] | None
) -> tuple[dict[str, Any], str]:
    """Where a config's layers are cut best, and how long its schedule takes then."""
    from llmx import config

    _, run, problems = config.parse(command, argv)
    problems += _apply_flags(args, run)
    run = config.resolve(run, _num_devices(args, run), problems=problems)
    if run.mesh.stage == 1 and not args.replicate:
        raise ValueError("mesh.stage=1 is no pipeline: give --stages=P, or set --config.mesh.stage")
    from llmx import stages

    bandwidth, clock, head = _machine(args, run)
    if args.replicate:
        layers = stages.chain(run, clock)
        group = run.mesh.sequence * run.mesh.tensor
        found, equal = stages.replicated(
            run, layers, args.devices // group, bandwidth=bandwidth, num_stages=args.stages,
            memory_bytes=_limit(args), versions=args.versions,
        )  # fmt: skip
        return _show_replicated(head, layers, found, equal, group)
    made = stages.pipelines(
        run, stages.profile(run, clock), bandwidth=bandwidth, memory_bytes=_limit(args),
        versions=args.versions,
    )  # fmt: skip
    table, best = made.table, made.cuts["planned"]
    facts = pipeline.check(table)
    own = bool(run.pipeline.table)
    report = summary(table, facts, best.barriers, best.free, own=own)
    _write(args, table, facts, best.timeline)
    return _show_cuts(head, report, made)


def _apply_flags(args: argparse.Namespace, run: "config_lib.Config") -> list[str]:
    """Puts the command line into the config; what is wrong with it."""
    found = [
        f"{option} with --config: times come from the layers; leave it out"
        for option in _given(args, list(TIMES))
    ]
    for name, least in (("stages", 1), ("devices", 1), ("microbatches", 1), ("versions", 1)):
        if (value := vars(args)[name]) is not None and value < least:
            found.append(f"--{name}={value} must be at least {least}")
    for name in ("memory", "bandwidth", "utilization"):
        if (value := vars(args)[name]) is not None and not value > 0:
            found.append(f"--{name}={value:g} must be above 0")
    if args.schedule is not None:
        run.pipeline.schedule = args.schedule
    if args.table is not None:
        run.pipeline.table = str(args.table)
    if args.virtual_stages is not None:
        run.pipeline.virtual_stages = args.virtual_stages
    if args.microbatches is not None:
        run.batch.accumulation = args.microbatches
    if args.replicate:
        # The planner says how often each stage is replicated: these axes and the stages are its.
        run.mesh.stage = run.mesh.data = run.mesh.fsdp = run.mesh.expert = 1
        run.pipeline.layers, run.pipeline.virtual_stages = (), 0
        for option in _given(args, ["out", "csv"]):
            found.append(f"{option} with --replicate: there is no schedule to draw or write")
        if args.devices is None:
            found.append("--replicate needs --devices=N: how many devices there are for stages")
        elif args.devices % (group := run.mesh.sequence * run.mesh.tensor):
            found.append(
                f"--devices={args.devices} is no multiple of {group} = sequence"
                f"{run.mesh.sequence} x tensor{run.mesh.tensor}, the devices of a replica"
            )
        return found
    if args.stages is not None:
        run.mesh.stage = args.stages
    return found


def _num_devices(args: argparse.Namespace, run: "config_lib.Config") -> int | None:
    """Of the mesh; an open axis is 1 where `--devices` does not say how many there are."""
    from llmx import sharding

    if args.devices is not None and not args.replicate:
        return args.devices
    sizes = [vars(run.mesh)[axis] for axis in sharding.AXES]
    if any(not isinstance(size, int) for size in sizes):
        return None
    return math.prod(1 if size == -1 else size for size in sizes)


def _limit(args: argparse.Namespace) -> int | None:
    return None if args.memory is None else int(args.memory * GIB)


def _machine(args: argparse.Namespace, run: "config_lib.Config"):
    """Bytes/s between stages, the clock of layers, and lines that say where both come from."""
    from llmx import precision, sharding, stages

    mesh = {axis: vars(run.mesh)[axis] for axis in sharding.AXES}
    chip = None if args.chip is None else stages.chip_named(args.chip)
    if chip is None and (args.bandwidth is None or not args.measure):
        raise ValueError(
            "--config needs --chip=NAME, e.g. v5p or h100; or --measure with --bandwidth=GB/S"
        )
    if args.measure:
        import jax

        clock = stages.measured(run)
        times = f"measured on this machine ({jax.devices()[0].device_kind})"
    else:
        share = UTILIZATION if args.utilization is None else args.utilization
        dtype = precision.POLICIES[run.precision].compute.name
        peak = chip.device_flops(dtype)
        clock = stages.counted(run, share * peak)
        times = (
            f"by FLOPs at {share:.0%} (--utilization) of the {peak / 1e12:g} TFLOP/s in {dtype} of "
            f"{chip.name}" + (" device" if chip.devices_per_chip > 1 else "")
        )
    if args.bandwidth is None:
        bandwidth, link = stages.bandwidth_of(chip, run)
        link = f"{link} of {chip.name}; --bandwidth"
    else:
        bandwidth, link = args.bandwidth * 1e9, "--bandwidth"
    where = f"{args.devices} devices" if args.replicate else sharding.mesh_text(mesh)
    return bandwidth, clock, [
        f"{run.model.family}, {run.model.num_layers} layers, on {where}; remat {run.remat}; "
        f"{run.batch.accumulation} microbatches of {stages.tokens_of(run):,} tokens"
        + ("" if args.replicate else " on each replica"),
        f"  times      {times}",
        f"  between    stages {bandwidth / 1e9:g} GB/s ({link})",
    ]  # fmt: skip


def _show_cuts(head: list[str], report: dict[str, Any], made: "stages_lib.Pipelines"):
    from llmx import partition

    report = report | {
        "head": head,
        "cuts": {
            name: {
                "layers": cut.layers, "barriers": cut.barriers, "free_running": cut.free,
                "memory_bytes": cut.memory_bytes,
            }
            for name, cut in made.cuts.items()
        },
    }  # fmt: skip
    best, equal = made.cuts["planned"], made.cuts["equal"]
    lines = [*head, "", text(report), ""]
    if best.planned is not None:
        lines.append("by the planner's formula, on one device of each stage:")
        lines += [partition.describe(best.planned, made.profile.blocks), ""]
    rows = [("cut", "pipeline.layers", "in lockstep", "freely", "memory of each device")]
    for name, cut in made.cuts.items():
        memory = f"{cut.memory_bytes / GIB:.2f} GiB"
        rows.append((name, str(cut.layers), _ms(cut.barriers), _ms(cut.free), memory))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines += ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    gain = equal.barriers / best.barriers
    if gain > 1 + partition.RELATIVE_TIE:
        paste = f'--config.pipeline.layers="{best.layers}"'
        lines.append(f"{paste}   {gain:.3f} x as fast as the equal cut")
    else:
        lines.append("the equal cut is as fast: leave pipeline.layers out")
    return report, "\n".join(lines)


def _show_replicated(
    head: list[str], layers: "Sequence[Layer]", found: "Partition", equal: "Partition | None",
    group: int,
):  # fmt: skip
    from llmx import partition

    def json_of(one):
        return {
            "layers": partition.to_counts(one),
            "replicas": [stage.replicas for stage in one.stages],
            "seconds": one.seconds,
            "step_time": one.step_seconds,
            "memory_bytes": [stage.memory_bytes for stage in one.stages],
        }

    report = {"head": head, "planned": json_of(found), "equal": equal and json_of(equal)}
    lines = [*head, "", partition.describe(found, layers), ""]
    if group > 1:
        lines.append(f"a replica is {group} devices, which the mesh axes inside it split")
    lines.append(
        f"blocks of each stage: {partition.to_counts(found)}, with embedding and head beside them "
        "on the first and last"
    )
    if equal is None:
        lines.append("no equal cut has as many stages and devices")
    else:
        each = equal.stages[0].replicas
        lines.append(
            f"equal stages, {partition.to_counts(equal)} on {each} each: "
            f"{_ms(equal.step_seconds)} a step, planned {_ms(found.step_seconds)}"
        )
    lines.append(
        "llmx.train does not run this plan: its stages share embedding and head and have as many "
        "devices each; without --replicate those are planned"
    )
    return report, "\n".join(lines)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f} ms"


# ----------------------------------------------------------------------------------- the picture

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
    from matplotlib.colors import to_rgb

    mix = LIGHTEST * chunk / max(chunks - 1, 1)
    return tuple(channel + (1 - channel) * mix for channel in to_rgb(COLORS[kind]))


# Seconds of a whole stage, where the command line does not say them.
TIMES = {"forward": 1.0, "backward": 1.0, "weight": 1.0, "transfer": 0.0}
CONFIG_ONLY = ("chip", "devices", "memory", "bandwidth", "utilization", "versions", "replicate",
               "measure")  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser(
        prog="python -m llmx.plan",
        description="Bubble, memory, times and picture of a pipeline schedule; with a config also "
        "where its layers are cut best.",
        epilog="With --config, any value of it is overridden by --config.SECTION.KEY=VALUE.",
        allow_abbrev=False,
    )
    command.set_defaults(workdir="")  # of a config: nothing is written there
    which = command.add_mutually_exclusive_group()
    which.add_argument("--schedule", choices=list(SCHEDULES), help="by name (1f1b)")
    which.add_argument("--table", type=pathlib.Path, metavar="CSV", help="from a file")
    command.add_argument("--stages", type=int, metavar="P", help="pipeline stages (4)")
    command.add_argument("--microbatches", type=int, metavar="M", help="of a step (16)")
    command.add_argument("--virtual-stages", type=int, metavar="v", help="parts of a stage")
    for name, what in (
        ("forward", "a stage's forward"),
        ("backward", "the gradient of its input"),
        ("weight", "the gradients of its weights"),
        ("transfer", "one message between stages"),
    ):
        command.add_argument(
            f"--{name}", type=float, metavar="S", help=f"{what}, s ({TIMES[name]:g})"
        )
    command.add_argument(
        "--out", metavar="PNG",
        help='the picture; without --config and --json SCHEDULE_PxM.png; "" = none',
    )  # fmt: skip
    command.add_argument("--csv", metavar="CSV", help="write the schedule, for --table")
    command.add_argument("--json", action="store_true", help="print one JSON object")
    ours = command.add_argument_group(
        "of a config", "schedule, stages and microbatches are the config's unless given above"
    )
    ours.add_argument("--config", help="a config file, e.g. configs/llama3_70b_pipeline.py")
    ours.add_argument("--chip", metavar="NAME", help="the devices, e.g. v5p, h100, tpu_v4")
    ours.add_argument("--devices", type=int, metavar="N", help="of all stages (those of the mesh)")
    ours.add_argument("--memory", type=float, metavar="GIB", help="of a device (no limit)")
    ours.add_argument(
        "--bandwidth", type=float, metavar="GB/S",
        help="between stages, one direction (the chip's link, or its network)",
    )  # fmt: skip
    ours.add_argument(
        "--utilization", "--utilisation", type=float, metavar="SHARE",
        help=f"of the chip's peak FLOP/s ({UTILIZATION:g})",
    )  # fmt: skip
    ours.add_argument("--measure", action="store_true", help="time layers on this machine instead")
    ours.add_argument(
        "--versions", type=int, metavar="n", help="of the weights (2 of pipedream_2bw, else 1)"
    )
    ours.add_argument(
        "--replicate", action="store_true",
        help="PipeDream's plan: replicas for each stage, in place of the mesh's",
    )  # fmt: skip
    return command


if __name__ == "__main__":
    sys.exit(main())

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
import sys
import typing
from collections.abc import Callable, Sequence
from typing import Any

from llmx.pipeline import schedule, simulate
from llmx.pipeline.schedule import Facts, Table
from llmx.pipeline.simulate import Timeline
from llmx.plan import draw, options
from llmx.plan.options import CONFIG_ONLY, GIB, TIMES

# What a schedule alone does not need is imported where it is used.
if typing.TYPE_CHECKING:
    from llmx.plan import stage_costs
    from llmx.plan.partition import Layer, Partition

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
    """Prints what a schedule or a config's pipeline costs, draws and writes it; the exit code."""
    command = options.parser()
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
    if wrong := options.given(args, CONFIG_ONLY):
        raise ValueError(f"{', '.join(wrong)} without --config: it belongs to a config's pipeline")
    table = options.make_table(args)
    facts = schedule.check(table)
    seconds = {name: vars(args)[name] for name in TIMES}
    seconds = {name: TIMES[name] if given is None else given for name, given in seconds.items()}
    timeline = simulate.simulate(table, **seconds)
    free = simulate.simulate(table, **seconds, barriers=False)
    report = summary(table, facts, timeline.step_time, free.step_time, own=args.table is not None)
    lines = text(report)
    if args.out is None and not args.json:
        args.out = f"{table.name}_{table.num_stages}x{table.num_microbatches}.png"
    _write(args, table, facts, timeline)
    return report, f"{lines}\npicture: {args.out}" if args.out else lines


def _write(args: argparse.Namespace, table: Table, facts: Facts, timeline: Timeline) -> None:
    if args.out:
        draw.draw(table, facts, timeline).savefig(args.out, dpi=120)
    if args.csv:
        schedule.write_csv(table, args.csv)


def summary(
    table: Table, facts: Facts, barriers: float, free: float, *, own: bool
) -> dict[str, Any]:
    """What `main` prints of a schedule, as JSON has it: with seconds of a step, where stages meet
    at every tick and where they run freely. `own`: not one of `SCHEDULES`."""
    report = {
        "name": table.name,
        "stages": table.num_stages,
        "microbatches": table.num_microbatches,
        "parts": table.num_chunks,
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
        sizes = table.num_stages, table.num_microbatches, table.chunks_per_stage
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
    from llmx.config import checks, flags
    from llmx.plan import stage_costs

    _, run, problems = flags.parse(command, argv)
    problems += options.apply_flags(args, run)
    run = checks.resolve(run, options.num_devices(args, run), problems=problems)
    if run.mesh.stage == 1 and not args.replicate:
        raise ValueError("mesh.stage=1 is no pipeline: give --stages=P, or set --config.mesh.stage")
    pass

    bandwidth, clock, head = options.machine(args, run)
    if args.replicate:
        layers = stage_costs.chain(run, clock)
        group = run.mesh.sequence * run.mesh.tensor
        found, equal = stage_costs.replicated(
            run, layers, args.devices // group, bandwidth=bandwidth, num_stages=args.stages,
            memory_bytes=options.limit(args), versions=args.versions,
        )  # fmt: skip
        return _show_replicated(head, layers, found, equal, group)
    made = stage_costs.pipelines(
        run, stage_costs.profile(run, clock), bandwidth=bandwidth, memory_bytes=options.limit(args),
        versions=args.versions,
    )  # fmt: skip
    table, best = made.table, made.cuts["planned"]
    facts = schedule.check(table)
    own = bool(run.pipeline.table)
    report = summary(table, facts, best.barriers, best.free, own=own)
    _write(args, table, facts, best.timeline)
    return _show_cuts(head, report, made)


def _show_cuts(head: list[str], report: dict[str, Any], made: "stage_costs.Pipelines"):
    from llmx.plan import partition

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
    from llmx.plan import partition

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


if __name__ == "__main__":
    sys.exit(main())

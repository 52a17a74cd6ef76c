"""The flags of `llmx.plan`, and the schedule that they describe."""

import argparse
import re
from collections.abc import Iterable

from llmx.pipeline import schedule
from llmx.pipeline.schedule import Table
from llmx.pipeline.schedules import SCHEDULES
from llmx.runtime import printable

# Seconds of a whole stage by default.
TIMES = {"forward": 1.0, "backward": 1.0, "weight": 1.0, "transfer": 0.0}
TIME_HELP = {
    "forward": "a stage's forward", "backward": "the gradient of its input",
    "weight": "the gradients of its weights", "transfer": "one message between stages",
}  # fmt: skip
UTILIZATION = 0.5  # of a chip's peak FLOP/s, by default
OF_PIPELINES = ("chip", "devices", "memory", "bandwidth", "utilization", "versions", "replicate",
                "measure")  # fmt: skip
OF_DURATION = ("tokens", "device_mtbf", "save_seconds", "restart_seconds", "price")
OF_MACHINES = (
    "hardware",
    "search",
    "verify",
    "step_seconds",
    *OF_DURATION,
    "html",
)  # beside the machine
CONFIG_ONLY = ("machine", *OF_PIPELINES, *OF_MACHINES)
# What the config says, or what belongs to the report on its pipeline.
NOT_OF_MACHINES = (*OF_PIPELINES, "schedule", "table", "stages", "microbatches", "virtual_stages",
                   *TIMES, "out", "csv")  # fmt: skip


def given(args: argparse.Namespace, names: Iterable[str]) -> list[str]:
    """Those of some options that the command line has, as flags."""
    absent = [name for name in names if vars(args)[name] is None or vars(args)[name] is False]
    return ["--" + name.replace("_", "-") for name in names if name not in absent]


def pasted(flags: Iterable[str]) -> str:
    """Flags as one text for a shell, tuples in quotes."""
    return " ".join(re.sub(r"=(.*[(].*)$", r'="\1"', flag) for flag in flags)


def make_table(args: argparse.Namespace) -> Table:
    """The table of the command line, from a file or by name.

    Raises ValueError for sizes that the schedule does not allow, or that are given beside a file.
    """
    names = ("stages", "microbatches", "virtual_stages")
    if args.table is None:
        sizes = {name: vars(args)[name] for name in names if vars(args)[name] is not None}
        return SCHEDULES[args.schedule or "1f1b"](**({"stages": 4, "microbatches": 16} | sizes))
    if flags := given(args, names):
        raise ValueError(
            f"{', '.join(flags)} with --table={args.table}: the file says it; leave it out"
        )
    return schedule.read_csv(args.table)


def add_machine(command: argparse.ArgumentParser) -> None:
    """The flags of a run on a machine."""
    group = command.add_argument_group(
        "of a config on a machine", "all else is the config's",
    )  # fmt: skip
    text = "as --topology of llmx.aot, e.g. v5p:4x4x8, 4@v5e:16x16, h100:4x8"
    group.add_argument("--machine", metavar="NAME", help=text)
    text = "what the chip of the machine is, in place of what llmx knows: written by `python -m "
    text += "llmx.plan calibrate`, or by hand (docs/plan.md)"
    group.add_argument("--hardware", metavar="JSON", help=text)
    text = "write the report as a page with pictures, which needs no network"
    group.add_argument("--html", metavar="FILE", help=text)
    text = "look for the fastest mesh, layout, schedule, remat and microbatches"
    group.add_argument("--search", action="store_true", help=text)
    text = "of a search: compile the K fastest, and show both"
    group.add_argument("--verify", type=int, metavar="K", help=text)
    text = "of a step, if it was measured, for the length of the run (the estimate)"
    group.add_argument("--step-seconds", type=float, metavar="S", help=text)
    text = "of the run (steps x tokens of a batch of the config)"
    group.add_argument("--tokens", type=float, metavar="D", help=text)
    text = "until a device stops the job, on average (50,700: Llama 3 405B's)"
    group.add_argument("--device-mtbf", type=float, metavar="HOURS", help=text)
    text = "that a checkpoint stops training (10)"
    group.add_argument("--save-seconds", type=float, metavar="S", help=text)
    text = "from a failure until training goes on (600)"
    group.add_argument("--restart-seconds", type=float, metavar="S", help=text)
    group.add_argument("--price", type=float, metavar="USD", help="of a chip and hour")


def parser() -> argparse.ArgumentParser:
    """The command line of `python -m llmx.plan`."""
    command = printable.Parser(
        prog="python -m llmx.plan",
        description="With a config and a machine, what a device holds and sends in a step. Else "
        "bubble, memory, times and picture of a pipeline schedule; with a config also where its "
        "layers are cut best. Exit codes: 0; 1: does not fit on the machine; 2: wrong input.",
        epilog="With --config, any value of it is overridden by --config.SECTION.KEY=VALUE.",
        allow_abbrev=False,
    )
    command.set_defaults(workdir="")  # of a config: nothing is written there
    which = command.add_mutually_exclusive_group()
    which.add_argument("--schedule", choices=list(SCHEDULES), help="by name (1f1b)")
    which.add_argument("--table", metavar="CSV", help="from a file")
    command.add_argument("--stages", type=int, metavar="P", help="pipeline stages (4)")
    command.add_argument("--microbatches", type=int, metavar="M", help="of a step (16)")
    command.add_argument("--virtual-stages", type=int, metavar="v", help="model chunks of a stage")
    for name, what in TIME_HELP.items():
        text = f"{what}, s ({TIMES[name]:g})"
        command.add_argument(f"--{name}", type=float, metavar="S", help=text)
    text = 'the picture; without --config and --json SCHEDULE_PxM.png; "" = none'
    command.add_argument("--out", metavar="PNG", help=text)
    command.add_argument("--csv", metavar="CSV", help="write the schedule, for --table")
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.add_argument("--config", help="a config file, e.g. configs/llama3_8b.py")
    add_machine(command)
    ours = command.add_argument_group(
        "of a config's pipeline",
        "schedule, stages and microbatches are the config's unless given above",
    )
    ours.add_argument("--chip", metavar="NAME", help="the devices, e.g. v5p, h100, tpu_v4")
    ours.add_argument("--devices", type=int, metavar="N", help="of all stages (those of the mesh)")
    ours.add_argument(
        "--memory", type=float, metavar="GIB", help="of a device: limits the cut too (the chip's)"
    )
    text = "between stages, one direction (the chip's link, or its network)"
    ours.add_argument("--bandwidth", type=float, metavar="GB/S", help=text)
    text = f"of the chip's peak FLOP/s ({UTILIZATION:g})"
    ours.add_argument("--utilization", "--utilisation", type=float, metavar="SHARE", help=text)
    ours.add_argument("--measure", action="store_true", help="time layers on this machine instead")
    text = "of the weights, with --replicate (2 of pipedream_2bw, else 1)"
    ours.add_argument("--versions", type=int, metavar="n", help=text)
    text = "PipeDream's plan: replicas for each stage, in place of the mesh's"
    ours.add_argument("--replicate", action="store_true", help=text)
    return command

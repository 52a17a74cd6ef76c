"""The flags of `llmx.plan`, and what they change in a config."""

import argparse
import math
import pathlib
import typing
from collections.abc import Sequence

from llmx.pipeline import schedule
from llmx.pipeline.schedule import Table
from llmx.pipeline.schedules import SCHEDULES

# What a schedule alone does not need is imported where it is used.
if typing.TYPE_CHECKING:
    from llmx import config as config_lib

GIB = 2**30
UTILIZATION = 0.5  # of a chip's peak FLOP/s, where nothing else is said


def given(args: argparse.Namespace, names: Sequence[str]) -> list[str]:
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
    return schedule.read_csv(args.table)


def apply_flags(args: argparse.Namespace, run: "config_lib.Config") -> list[str]:
    """Puts the command line into the config; what is wrong with it."""
    found = [
        f"{option} with --config: times come from the layers; leave it out"
        for option in given(args, list(TIMES))
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
        for option in given(args, ["out", "csv"]):
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


def num_devices(args: argparse.Namespace, run: "config_lib.Config") -> int | None:
    """Of the mesh; an open axis is 1 where `--devices` does not say how many there are."""
    from llmx import sharding

    if args.devices is not None and not args.replicate:
        return args.devices
    sizes = [vars(run.mesh)[axis] for axis in sharding.AXES]
    if any(not isinstance(size, int) for size in sizes):
        return None
    return math.prod(1 if size == -1 else size for size in sizes)


def limit(args: argparse.Namespace) -> int | None:
    return None if args.memory is None else int(args.memory * GIB)


def machine(args: argparse.Namespace, run: "config_lib.Config"):
    """Bytes/s between stages, the clock of layers, and lines that say where both come from."""
    from llmx import sharding
    from llmx.model import precision
    from llmx.plan import stage_costs

    mesh = {axis: vars(run.mesh)[axis] for axis in sharding.AXES}
    chip = None if args.chip is None else stage_costs.chip_named(args.chip)
    if chip is None and (args.bandwidth is None or not args.measure):
        raise ValueError(
            "--config needs --chip=NAME, e.g. v5p or h100; or --measure with --bandwidth=GB/S"
        )
    if args.measure:
        import jax

        from llmx.runtime import launch

        launch.choose_platform(run.launch)
        clock = stage_costs.measured(run)
        times = f"measured on this machine ({jax.devices()[0].device_kind})"
    else:
        share = UTILIZATION if args.utilization is None else args.utilization
        dtype = precision.POLICIES[run.precision].compute.name
        peak = chip.device_flops(dtype)
        clock = stage_costs.counted(run, share * peak)
        times = (
            f"by FLOPs at {share:.0%} (--utilization) of the {peak / 1e12:g} TFLOP/s in {dtype} of "
            f"{chip.name}" + (" device" if chip.devices_per_chip > 1 else "")
        )
    if args.bandwidth is None:
        bandwidth, link = stage_costs.bandwidth_of(chip, run)
        link = f"{link} of {chip.name}; --bandwidth"
    else:
        bandwidth, link = args.bandwidth * 1e9, "--bandwidth"
    where = f"{args.devices} devices" if args.replicate else sharding.mesh_text(mesh)
    return bandwidth, clock, [
        f"{run.model.family}, {run.model.num_layers} layers, on {where}; remat {run.remat}; "
        f"{run.batch.accumulation} microbatches of {stage_costs.tokens_of(run):,} tokens"
        + ("" if args.replicate else " on each replica"),
        f"  times      {times}",
        f"  between    stages {bandwidth / 1e9:g} GB/s ({link})",
    ]  # fmt: skip


# Seconds of a whole stage, where the command line does not say them.
TIMES = {"forward": 1.0, "backward": 1.0, "weight": 1.0, "transfer": 0.0}
CONFIG_ONLY = ("chip", "devices", "memory", "bandwidth", "utilization", "versions", "replicate",
               "measure")  # fmt: skip


def parser() -> argparse.ArgumentParser:
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

"""The report of `llmx.plan` on a config's pipeline: flags into the config, cuts, their times."""

import argparse
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from llmx import config as config_lib
from llmx import sharding
from llmx.config import Config, checks, flags, utilization
from llmx.pipeline import schedule
from llmx.plan import (
    candidates,
    layer_times,
    options,
    partition,
    recommend,
    schedule_report,
    stage_costs,
)
from llmx.plan.partition import Layer, Partition
from llmx.runtime import hardware, launch
from llmx.runtime.utilization import text

# Keys of the config that flags override.
KEYS = {
    "schedule": "pipeline.schedule", "table": "pipeline.table", "stages": "mesh.stage",
    "virtual_stages": "pipeline.virtual_stages", "microbatches": "batch.accumulation",
}  # fmt: skip

# Of flags, in their units: less or more is a slip of units.
LIMITS = {"memory": (1e-3, 1e6), "bandwidth": (1e-6, 1e6), "utilization": (1e-3, 1.0)}
# Of the arrays, layers x devices^2, in which PipeDream's plan is found.
MOST_NUMBERS = 2**27

Report = tuple[dict[str, Any], str]  # as JSON and as text
Shares = Callable[..., dict[str, float]]  # of `shares_of`

_NO_PIPELINE = (
    "give --machine NAME for what a device of this run holds, sends and takes; without it a "
    "pipeline is planned, and mesh.stage=1 is none (--stages, --config.mesh.stage)"
)


def _resolved(config: Config, args: argparse.Namespace, problems: list[str]) -> Config:
    name = config.pipeline.schedule
    if args.replicate:  # which looks for the stages: the config has none yet
        config.pipeline.schedule = type(config.pipeline)().schedule
    config = checks.resolve(config, num_devices(args, config), problems=problems)
    config.pipeline.schedule = name
    return config


def show(
    command: argparse.ArgumentParser, args: argparse.Namespace, argv: Sequence[str] | None
) -> Report:
    """Where a config's layers are cut best, and how long its schedule takes then.

    `args`: of `command`, which is `options.parser`. `argv`: the command line, with overrides of the
    config; None = `sys.argv`. Raises ValueError for a wrong config or flag, and if nothing fits
    into memory.
    """
    if wrong := options.given(args, options.OF_MACHINES):
        raise ValueError(f"{', '.join(wrong)} without --machine: name one, for example v5p:2x2x2")
    _, config, problems = flags.parse(command, argv)
    problems += apply_flags(args, config)
    config = _resolved(config, args, problems)
    if why_not := candidates.of_adapters(config) or candidates.of_latents(config):
        raise ValueError(why_not)
    if number := config.model.num_experts:
        raise ValueError(
            f"model.num_experts={number}: the cut of a pipeline does not count routed experts; run "
            "llmx.aot, which compiles the run"
        )
    if config.mesh.stage == 1 and not args.replicate:
        raise ValueError(_NO_PIPELINE)
    bandwidth, clock, head = machine(args, config)
    memory_bytes = None if args.memory is None else int(args.memory * 2**30)
    if args.replicate:
        layers = stage_costs.chain(config, clock)
        group = config.mesh.sequence * config.mesh.tensor
        most = math.isqrt(MOST_NUMBERS // len(layers))
        if (devices := args.devices // group) > most:
            raise ValueError(_too_many(args, config, most * group))
        planned, equal = stage_costs.replicated(
            config, layers, devices, bandwidth=bandwidth, num_stages=args.stages,
            memory_bytes=memory_bytes, versions=args.versions,
        )  # fmt: skip
        shares = shares_of(args, config, planned.num_devices * group)
        return _show_replicated(head, layers, planned, equal, group, shares)
    profile = stage_costs.make_profile(config, clock)
    chip = hardware.this_chip() if args.chip is None else stage_costs.chip_named(args.chip)
    device_bytes = memory_bytes or (chip and chip.device_hbm_bytes)
    usable = memory_bytes or (chip and stage_costs.usable_bytes(chip))
    on_gpu = jax.default_backend() == "gpu" if chip is None else chip.is_gpu
    on = stage_costs.Machine(bandwidth, device_bytes, on_gpu, usable)
    try:
        comparison = stage_costs.compare_cuts(config, profile, on, memory_bytes=memory_bytes)
    except ValueError as error:
        fitting = (option for option in recommend.others(config, profile, on) if option.fits)
        if (best := next(fitting, None)) is None:
            raise
        needs = schedule_report.gib(best.cut.memory.total)
        raise ValueError(f"{error}; what fits: {best.flags} ({needs})") from None
    table, best = comparison.table, comparison.cuts["planned"]
    facts = schedule.check(table)
    own = bool(config.pipeline.table)
    report = schedule_report.summary(table, facts, best.barriers, best.free, own=own)
    schedule_report.write(table, facts, best.timeline, picture=args.out, csv=args.csv)
    devices = math.prod(vars(config.mesh)[axis] for axis in sharding.AXES)
    report, lines = _show_cuts(head, report, comparison, shares_of(args, config, devices))
    advice = recommend.recommend(config, profile, on)
    return report | advice.to_json(), "\n".join([lines, "", advice.text()])


def _too_many(args: argparse.Namespace, config: Config, most: int) -> str:
    return (
        f"--devices={args.devices} with --replicate: of {config.model.num_layers} layers a plan is "
        f"found for at most {most} devices; use fewer"
    )


def shares_of(args: argparse.Namespace, config: Config, num_devices: int) -> Shares:
    """MFU and HFU by the seconds of a step, and perhaps the layers of its model chunks; none where
    `--chip` does not say what runs it."""
    if args.chip is None or args.measure:
        return lambda seconds, layers=(): {}
    tokens = config.batch.size * config.batch.sequence_length

    def shares(seconds: float, layers: tuple[int, ...] = ()) -> dict[str, float]:
        run = dataclasses.replace(
            config, pipeline=dataclasses.replace(config.pipeline, layers=layers)
        )
        reached = utilization.of(run, stage_costs.chip_named(args.chip), num_devices)
        return reached.shares(tokens / seconds)

    return shares


def apply_flags(args: argparse.Namespace, config: Config) -> list[str]:
    """Writes the command line into the config; returns its problems."""
    problems = [
        f"{option} with --config: times come from the layers; leave it out"
        for option in options.given(args, options.TIMES)
    ]
    values = {name: value for name, value in vars(args).items() if value is not None}
    for name in ("stages", "devices", "microbatches", "versions"):
        if values.get(name, 1) < 1:
            problems.append(f"--{name}={values[name]} must be at least 1")
    for name, (least, most) in LIMITS.items():
        if not least <= values.get(name, least) <= most:
            problems.append(
                f"--{name}={values[name]:g} must be at least {least:g} and at most {most:g}"
            )
    for name, key in KEYS.items():
        if name in values:
            config_lib.set_value(config, key, values[name])
    if not args.replicate:
        if args.versions is not None:
            problems.append("--versions without --replicate: the schedule says it; leave it out")
        return problems
    # The planner chooses stages and replicas in place of these axes.
    config.mesh.stage = config.mesh.data = config.mesh.fsdp = config.mesh.expert = 1
    config.pipeline.layers, config.pipeline.virtual_stages = (), 0
    for option in options.given(args, ["out", "csv"]):
        problems.append(f"{option} with --replicate: there is no schedule to draw or write")
    if args.devices is None:
        problems.append("--replicate needs --devices=N: how many devices there are for stages")
    elif args.devices % (group := config.mesh.sequence * config.mesh.tensor):
        problems.append(
            f"--devices={args.devices} is no multiple of {group} = sequence"
            f"{config.mesh.sequence} x tensor{config.mesh.tensor}, the devices of a replica"
        )
    return problems


def num_devices(args: argparse.Namespace, config: Config) -> int | None:
    """Of the mesh: an axis of -1 counts as 1 without `--devices`; None if a size is no number."""
    if args.devices is not None and not args.replicate:
        return args.devices
    sizes = [vars(config.mesh)[axis] for axis in sharding.AXES]
    if any(not isinstance(size, int) for size in sizes):
        return None
    return math.prod(1 if size == -1 else size for size in sizes)


def machine(args: argparse.Namespace, config: Config) -> tuple[float, stage_costs.Clock, list[str]]:
    """Bytes/s between stages, the times of layers, and lines of text that name their sources.

    Raises ValueError if the command line names neither a chip nor a measurement.
    """
    chip = None if args.chip is None else stage_costs.chip_named(args.chip)
    if chip is None and (args.bandwidth is None or not args.measure):
        raise ValueError(
            "--config needs --chip=NAME, e.g. v5p or h100; or --measure with --bandwidth=GB/S"
        )
    if args.measure:
        launch.choose_platform(config.launch)
        attention = dataclasses.replace(config.attention, ulysses=1)
        settings = dict(policy=config.precision, attention=attention)
        clock = functools.partial(layer_times.measured, **settings)
        times = f"measured on this machine ({jax.devices()[0].device_kind})"
    else:
        share = options.UTILIZATION if args.utilization is None else args.utilization
        peak, dtype = chip.peak(utilization.compute_dtype(config))
        clock = functools.partial(partition.layers_of, flops_per_second=share * peak)
        times = (
            f"by FLOPs at {share:.0%} (--utilization) of the {peak / 1e12:g} TFLOP/s in {dtype} of "
            f"{chip.name}" + (" device" if chip.devices_per_chip > 1 else "")
        )
    if args.bandwidth is None:
        bandwidth, link = stage_costs.bandwidth_of(chip, config)
        link = f"{link} of {chip.name}; --bandwidth"
    else:
        bandwidth, link = args.bandwidth * 1e9, "--bandwidth"
    mesh = {axis: vars(config.mesh)[axis] for axis in sharding.AXES}
    where, whose = sharding.mesh_text(mesh), " on each replica"
    if args.replicate:
        where, whose = f"{args.devices} devices", ""
    return bandwidth, clock, [
        f"{config.model.family}, {config.model.num_layers} layers, on {where}; remat "
        f"{config.remat}; {config.batch.accumulation} microbatches of "
        f"{utilization.tokens_of(config):,} tokens{whose}",
        f"  times      {times}",
        f"  between    stages {bandwidth / 1e9:g} GB/s ({link})",
    ]  # fmt: skip


def _show_cuts(
    head: list[str], report: dict[str, Any], comparison: stage_costs.Comparison, shares: Shares
) -> Report:
    cuts = comparison.cuts
    best, equal = cuts["planned"], cuts["equal"]
    lines = [*head, "", schedule_report.text(report), ""]
    if best.planned is not None:
        lines.append("by the planner's formula, on one device of each stage:")
        lines += [partition.describe(best.planned, best.blocks), ""]
    rows = [("cut", "pipeline.layers", "in lockstep", "freely", "memory of each device", "")]
    for name, cut in cuts.items():
        memory = schedule_report.gib(cut.memory.total)
        reached = text(shares(cut.barriers, cut.layers))
        rows.append((name, cut.layers, _ms(cut.barriers), _ms(cut.free), memory, reached))
    lines += schedule_report.columns(rows)
    gain = equal.barriers / best.barriers
    if gain > 1 + partition.RELATIVE_TIE:
        flag = f'--config.pipeline.layers="{best.layers}"'
        lines.append(f"{flag}   {gain:.3f} x as fast as the equal cut")
    else:
        lines.append("the equal cut is as fast: leave pipeline.layers out")
    of_cuts = {
        name: {
            "layers": cut.layers, "barriers": cut.barriers, "free_running": cut.free,
            "memory_bytes": cut.memory.total, "memory": vars(cut.memory),
            "deferred_layers": cut.deferred_layers, **shares(cut.barriers, cut.layers),
        }
        for name, cut in cuts.items()
    }  # fmt: skip
    return report | {"head": head, "cuts": of_cuts}, "\n".join(lines)


def _show_replicated(
    head: list[str], layers: Sequence[Layer], planned: Partition, equal: Partition | None,
    group: int, shares: Shares,
) -> Report:  # fmt: skip
    lines = [*head, "", partition.describe(planned, layers), ""]
    if group > 1:
        lines.append(f"a replica is {group} devices, which the mesh axes inside it split")
    lines.append(
        f"blocks of each stage: {partition.to_counts(planned)}, with embedding and head beside "
        "them on the first and last"
    )
    if equal is None:
        lines.append("no equal cut has as many stages and devices")
    else:
        lines.append(
            f"equal stages, {partition.to_counts(equal)} on {equal.stages[0].replicas} each: "
            f"{_ms(equal.step_seconds)} a step, planned {_ms(planned.step_seconds)}"
        )
    if reached := text(shares(planned.step_seconds)):
        lines.append(f"planned: {reached}")
    lines.append(
        "llmx.train does not run this plan: its stages share embedding and head and have as many "
        "devices each; without --replicate those are planned"
    )
    report = {
        "head": head, "planned": _json(planned) | shares(planned.step_seconds),
        "equal": equal and _json(equal) | shares(equal.step_seconds),
    }  # fmt: skip
    return report, "\n".join(lines)


def _json(plan: Partition) -> dict[str, Any]:
    return {
        "layers": partition.to_counts(plan), "seconds": plan.seconds,
        "step_time": plan.step_seconds, "replicas": [stage.replicas for stage in plan.stages],
        "memory_bytes": [stage.memory_bytes for stage in plan.stages],
    }  # fmt: skip


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f} ms"

"""The report of `llmx.plan` on a config and a machine: what a device holds and sends in a step."""

import argparse
import collections
import dataclasses
import functools
import pathlib
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from llmx import sharding
from llmx.aot import compiler, topologies
from llmx.aot.report import size
from llmx.aot.topologies import Topology
from llmx.config import Config, ConfigError, checks, describe, flags, utilization
from llmx.model import costs, remat
from llmx.plan import (
    advice,
    candidates,
    duration,
    exchange,
    experts,
    machines,
    memory,
    options,
    page,
    schedule_report,
    search_report,
    sizes,
    step_time,
    table_report,
    time_report,
    traffic,
    uncertain,
)
from llmx.plan.machines import Machine
from llmx.plan.memory import Memory
from llmx.plan.search import ADMITTED
from llmx.plan.traffic import Message
from llmx.runtime import output_paths
from llmx.runtime.utilization import text as utilization_text

MOST_VERIFIED = 100  # candidates that --verify compiles
REMATS = ("none", "dots", "names", "full", "part+dots", "part")  # beside the config's


def show(
    command: argparse.ArgumentParser, args: argparse.Namespace, argv: Sequence[str] | None
) -> tuple[dict[str, Any], str]:
    """The report as JSON and as text.

    `args`: of `command`, which is `options.parser`. `argv`: the command line, with overrides of the
    config; None = `sys.argv`. Raises ValueError for a wrong config, machine or flag.
    """
    if wrong := options.given(args, options.NOT_OF_MACHINES):
        raise ValueError(f"{', '.join(wrong)} with --machine: leave one of them out")
    machine = machines.parse(args.machine, args.hardware)
    topology = machine.topology
    given, config, problems = flags.parse(command, argv, auto_mesh=True)
    if config.model.recommender.name:
        return table_report.show(given, config, problems, topology)
    problems = [*problems, *output_paths.file_problems("--html", args.html or "")]
    problems += _of_verify(args, searched := args.search or given.auto_mesh, topology)
    duration.check(**_of_duration(args, *options.OF_DURATION, "step_seconds"))
    search, search_lines, run = {}, [], None
    if searched:
        _check_searched(args, config, topology, problems, auto_mesh=given.auto_mesh)
        search, search_lines, run = search_report.show(config, machine, verify=args.verify or 0)
        search["own_refusal"] = "" if given.auto_mesh else _own_refusal(config, topology)
    if run is None or (not given.auto_mesh and _is_counted(config, topology)):
        run = compiler.resolve(config, topology, problems=problems)
    if why_not := _refusal(run, topology) or ("" if searched else _too_short(args, run, topology)):
        raise ValueError(why_not)
    held, sent = count(run, topology)
    time = step_time.of(run, machine)
    of_time = time_report.to_json(time, run, machine)
    step = time.step if args.step_seconds is None else args.step_seconds
    try:
        if why_not := _too_short(args, run, topology):
            raise ValueError(why_not)
        of_duration, duration_lines = _duration(args, run, topology, step)
    except ValueError as error:  # after a search, too: what was found is not lost
        of_duration, duration_lines = None, [f"no length of the run: {error}"]
    report = {
        "run": {"config": args.config, "command": _command(argv)} | (head := _head(run, topology)),
        "machine": topology.name, "num_devices": topology.num_devices,
        "mesh": _mesh(run), "num_parameters": costs.num_parameters(run.model),
        "memory": _memory_json(held, topology), "sent": traffic.by_axes(sent),
        "messages": [vars(message) | {"sent": message.sent} for message in sent],
        "time": of_time, "duration": of_duration,
        "no_duration": "" if of_duration else duration_lines[0], "remats": _remats(run, machine),
        "not_counted": uncounted(run), "uncertain": uncertain.of(run, topology, sent, time.step),
    } | ({"search": search} if search else {}) | _phases(run, topology)  # fmt: skip
    report["advice"] = advice.of(report)
    lines = [
        *(f"{name:<12}{text}" for name, text in head.items()), "",
        *_memory_lines(held, topology), *advice.to_fit(report), "",
        *time_report.lines(time, of_time), "", *_sent_lines(sent), "", *duration_lines,
        *_last_lines(report, search_lines),
    ]  # fmt: skip
    if args.html:
        pipeline = step_time.pipeline_of(sizes.of(run), time.operators, machine)
        _write(args.html, page.render(report, pipeline))
        lines.append(f"page: {args.html}")
    return report, "\n".join(lines)


def _last_lines(report: dict[str, Any], search_lines: list[str]) -> list[str]:
    """What a search found, and what is not counted or known to be further off."""
    lines = ["", *search_lines] if search_lines else []
    if why_not := report.get("search", {}).get("own_refusal"):
        lines.append(f"as configured it is refused: {why_not}")
    lines += [f"not counted: {what}" for what in report["not_counted"]]
    return lines + [f"uncertain: {what}" for what in report["uncertain"]]


def _is_counted(config: Config, topology: Topology) -> bool:
    """Whether a config goes with the machine as it is: else what a search found is reported."""
    own = candidates.own(config, topology)
    return own is not None and not _refusal(own, topology)


def _own_refusal(config: Config, topology: Topology) -> str:
    """Why a config that is searched would not begin as it stands; "" if it would."""
    try:
        run = compiler.resolve(config, topology)
        return _refusal(run, topology) or str(memory.on(sizes.of(run), topology).refusal or "")
    except ValueError as error:
        return str(error)


def _refusal(run: Config, topology: Topology) -> str:
    """Why a run is not counted, with the remedy; "" if it is."""
    return (
        candidates.refusal(run)
        or (topology.platform == "gpu" and checks.rings_in_branches(run))
        or candidates.of_attention(run, topology)
        or experts.refusal(run, topology.device_kind)
    )


def count(run: Config, topology: Topology, *, phase: str = "") -> tuple[Memory, list[Message]]:
    """What a device of a resolved run holds, and what it sends in a step.

    `phase`: of its `sync.strategy`; "" = the mean over the run's steps.
    """
    of_run = sizes.of(run)
    return memory.on(of_run, topology), exchange.on(of_run, topology, phase=phase)


def _phases(run: Config, topology: Topology) -> dict[str, Any]:
    """What is sent in each phase of a strategy, by mesh axes, without its outer steps."""
    if run.sync.strategy == "mean":
        return {}
    names = {group.phase for group in exchange.groups_of(run)}
    sent = {name: count(run, topology, phase=name)[1] for name in sorted(names)}
    return {"phases": {name: traffic.by_axes(of) for name, of in sent.items()}}


def _write(path: str, text: str) -> None:
    try:
        pathlib.Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--html={path}: {error.strerror}: use another file") from error


def _of_verify(args: argparse.Namespace, searched: bool, topology: Topology) -> list[str]:
    if args.verify is None:
        return []
    if not searched:
        return ["--verify without --search: add --search"]
    if topology.family not in topologies.TPUS | topologies.GPUS:
        return [
            f"--verify={args.verify} on {topology.name}: no compiler is known for "
            f"{topology.family!r}; leave out --verify, or give the hardware file a base: one of "
            f"{', '.join(topologies.TPUS | topologies.GPUS)}"
        ]
    if 0 < args.verify <= MOST_VERIFIED:
        return []
    return [
        f"--verify={args.verify} must be at least 1 and at most {MOST_VERIFIED}: each is compiled, "
        "which takes a minute or more"
    ]


def _check_searched(
    args: argparse.Namespace, config: Config, topology: Topology, problems: list[str], *,
    auto_mesh: bool,
) -> None:  # fmt: skip
    """Raises ValueError, before a search, for problems, and for what would be refused behind it."""
    if problems:
        raise ConfigError(problems)
    alone = candidates.neutral(config, topology.platform)
    why_not = "" if auto_mesh else candidates.refusal(config)
    if why_not := why_not or _too_short(args, alone, topology, ("mfu",)):
        raise ValueError(why_not)


def _of_duration(args: argparse.Namespace, *names: str) -> dict[str, float]:
    """Those of some flags that are given."""
    return {name: vars(args)[name] for name in names if vars(args)[name] is not None}


def _too_short(
    args: argparse.Namespace, run: Config, topology: Topology, names: Sequence[str] = ()
) -> str:
    """Why a step cannot take `--step-seconds`; "" if it can. `names`: of shares; () = of all."""
    if args.step_seconds is None:
        return ""
    tokens, step = run.batch.size * run.batch.sequence_length, args.step_seconds
    shares = utilization.of(run, topology.chip, topology.num_devices).shares(tokens / step)
    if (most := max(shares[name] for name in names or shares)) <= 1:
        return ""
    return (
        f"--step-seconds={step:g} would be {most:.0%} of the machine's peak FLOP/s: no step is "
        f"shorter than {step * most:.3g} s; give seconds"
    )


def _mesh(run: Config) -> dict[str, int]:
    return {axis: vars(run.mesh)[axis] for axis in sharding.AXES}


def fits(held: Memory, topology: Topology) -> bool:
    return not held.refusal and held.peak <= ADMITTED * topology.hbm_bytes


def uncounted(run: Config) -> list[str]:
    """What a resolved run takes beside what is counted."""
    offload, found = run.offload, []
    if run.model.ranks and run.mesh.tensor > 1:
        found.append("sums over `tensor` of what lies between two factors")
    if offload.saves:
        found.append("what layers save in the host's memory")
    for name, what in (("optimizer", "moments"), ("parameters", "weights")):
        if vars(offload)[name]:
            found.append(f"the time in which {what} go to the host's memory and come from it")
    return found


def _remats(run: Config, machine: Machine) -> list[dict[str, Any]]:
    """What a resolved run takes with another `remat`: seconds of a step, bytes of a device."""
    kinds, found = sorted(set(run.model.layer_kinds)), []
    for text in REMATS:
        of_pipelines = remat.keeps_input(text) and run.mesh.stage == 1
        if text == run.remat or of_pipelines or remat.problems(text, run.offload, kinds):
            continue
        other = dataclasses.replace(run, remat=text)
        held, _ = count(other, machine.topology)
        found.append({
            "remat": text, "step": step_time.of(other, machine).step, "memory": held.peak,
            "fits": fits(held, machine.topology),
        })  # fmt: skip
    return found


def _duration(
    args: argparse.Namespace, run: Config, topology: Topology, step: float
) -> tuple[dict[str, Any], list[str]]:
    """Days, cost and goodput of the run, as JSON and as lines; `step`: seconds.

    Raises ValueError for a run that never gets anywhere.
    """
    per_step = run.batch.size * run.batch.sequence_length
    chip, every = topology.chip, run.checkpoint.every
    tokens = run.steps * per_step if args.tokens is None else args.tokens
    given = _of_duration(args, "device_mtbf", "save_seconds", "restart_seconds", "price")
    times = functools.partial(duration.of, tokens, per_step, step, topology.num_devices, chip)
    found, own, problem = times(**given), None, ""
    try:
        own = times(every=every, **given) if every else None
    except ValueError as error:
        problem = str(error)
    exact = costs.training_flops_per_token(run.model, sequence_length=run.batch.sequence_length)
    shares = utilization.of(run, chip, topology.num_devices).shares(per_step / step)
    flops = {"6PD": 6.0 * costs.num_active_parameters(run.model) * tokens, "exact": exact * tokens}
    cost = "" if found.dollars is None else f", {found.dollars:,.0f} dollars"
    if found.kilowatt_hours is not None:
        cost += f", {found.kilowatt_hours:,.0f} kWh of the chips"
    lines = [
        f"{tokens:.4g} tokens in {found.steps:,} steps of {step:.4g} s: "
        f"{found.seconds / 86400:,.2f} days, {found.device_hours:,.0f} device hours{cost}",
        f"  {per_step / step:,.0f} tokens/s, {utilization_text(shares)}; {flops['6PD']:.3g} FLOPs "
        f"by 6PD, {flops['exact']:.3g} with attention",
        f"  that is with a checkpoint every {found.interval:,} steps, the best interval: "
        f"{found.failures:,.1f} failures, goodput {found.goodput:.1%}",
    ]
    if own is not None:
        lines.append(
            f"  as configured, checkpoint.every={every}: goodput {own.goodput:.1%}, "
            f"{own.seconds / 86400:,.2f} days"
        )
    if problem:
        lines.append(f"  as configured, checkpoint.every={every}: {problem}")
    report = dataclasses.asdict(found) | {"flops": flops, "step_seconds": step} | shares
    return report | {"as_configured": own and dataclasses.asdict(own)}, lines


def _command(argv: Sequence[str] | None) -> str:
    """The command line of the report."""
    return shlex.join(["python", "-m", "llmx.plan", *(sys.argv[1:] if argv is None else argv)])


def _head(run: Config, topology: Topology) -> dict[str, str]:
    """What is reported on, by the name of its line."""
    stages = describe.stages_text(run)
    return {
        "model": describe.model_text(run, costs.num_parameters(run.model)),
        "machine": f"{topology.name}: {topology.text}",
        "mesh": f"{sharding.mesh_text(_mesh(run))}; layout {run.sharding.layout}",
        **({"stages": stages} if stages else {}),
        "batch": describe.batch_text(run),
    }


def _memory_json(held: Memory, topology: Topology) -> dict[str, Any]:
    return {
        "peak": held.peak, "moment": held.moment, "limit": topology.hbm_bytes,
        "admitted": ADMITTED, "fits": fits(held, topology), "state": held.state,
        "peaks": held.peaks, "host": held.host, "refusal": str(held.refusal or ""),
    }  # fmt: skip


def _memory_lines(held: Memory, topology: Topology) -> list[str]:
    share = held.peak / topology.hbm_bytes
    verdict = "fits" if fits(held, topology) else "DOES NOT FIT"
    if held.refusal and share <= ADMITTED:
        verdict = "REFUSED"
    parts = lambda of: ", ".join(f"{name} {size(num)}" for name, num in of.items())  # noqa: E731
    rows = [("state", size(sum(held.state.values())), parts(held.state))]
    rows += [(name, size(sum(of.values())), parts(of)) for name, of in held.peaks.items()]
    return [
        f"memory of a device: {size(held.peak)}, {share:.0%} of {size(topology.hbm_bytes)}: "
        f"{verdict} (up to {ADMITTED:.0%} is admitted)",
        *schedule_report.columns(rows),
        f"the peak is {held.moment}, beside the state",
        *([f"in the host's memory {size(held.host)} of the state"] if held.host else []),
        *([f"the run is refused: {held.refusal}"] if held.refusal else []),
    ]


def _sent_lines(sent: Sequence[Message]) -> list[str]:
    if not sent:
        return ["a device sends nothing"]
    groups: dict[tuple[str, str, str], list[Message]] = collections.defaultdict(list)
    for message in sent:
        groups[",".join(message.axes), message.kind, message.purpose].append(message)
    rows = [("mesh axes", "kind", "of", "times", "sent")]
    by_bytes = sorted(groups.items(), key=lambda item: -sum(one.sent for one in item[1]))
    for names, messages in by_bytes:
        times = f"{sum(one.count for one in messages):,.0f}"
        rows.append((*names, times, size(sum(one.sent for one in messages))))
    return ["sent by a device in a step", *schedule_report.columns(rows)]

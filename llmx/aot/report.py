"""What `llmx.aot` reports of a compiled train step: as values, as JSON and as text."""

import collections
import dataclasses
import functools
import json
import re
import textwrap
from collections.abc import Sequence

from llmx import config, sharding
from llmx.aot import collectives, peak_memory, step_text, step_time, topologies
from llmx.aot import program as program_lib
from llmx.aot.timeline import Timeline
from llmx.config import describe
from llmx.model import quantized

EXCHANGE = "exchange"  # in addition to the phases of `llmx.sync`: what replicas do between steps


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one device."""

    arguments: int  # state and batch
    outputs: int  # without those that reuse the memory of arguments
    temporaries: int
    peak: int  # at any moment; less than the sum if not all temporaries live at one time
    limit: int  # what a program may use
    host: int | None  # in the host's memory, for this device; None: unknown

    @property
    def headroom(self) -> int:
        """Bytes left below the limit; negative if the program does not fit."""
        return self.limit - self.peak


@dataclasses.dataclass(frozen=True, eq=False)
class Result:
    """The result of a compilation, whether the program fits or not."""

    run: config.Config  # resolved
    topology: topologies.Topology
    memory: Memory
    largest: tuple[peak_memory.Buffer, ...]  # at the peak, largest first; (): unknown
    program: program_lib.CostReport | None  # None: the compiler stopped before it had a program
    state: dict[str, int]  # bytes of one device: "parameters", "optimizer", "ema", "batch", ...
    num_parameters: int
    model_flops: float  # of a step, forward and backward, on one device
    lower_seconds: float
    compile_seconds: float
    versions: dict[str, str]  # of jax and the compiler
    unknown: tuple[str, ...]
    before: str = dataclasses.field(repr=False)  # HLO as lowered by jax; "": unknown
    after: str = dataclasses.field(repr=False)  # the compiled program; "": there is none
    phase: str = ""  # which of the programs of `sync.strategy`; "": the only one
    fused: tuple[int, tuple[int, ...]] = (0, ())  # compressed tensors, bytes of their messages
    timeline: Timeline | None = None  # the estimated time; None: there is no program
    budget: tuple[str, ...] = ()  # with remat="budget": what was chosen, and its cost

    @property
    def fits(self) -> bool:
        return self.memory.headroom >= 0

    @property
    def speed(self) -> step_time.Speed | None:
        """What the estimated time means; None for programs that are not a train step."""
        if self.timeline is None or self.phase == EXCHANGE or self.timeline.step == 0:
            return None
        flops = None if self.program is None else self.program.flops
        return step_time.speed_of(self.timeline, self.run, self.topology, flops)


@dataclasses.dataclass(frozen=True)
class Trial:
    """A variant that was compiled."""

    flags: tuple[str, ...]
    peak: int | None  # None: the compiler refused it
    fits: bool
    compile_seconds: float
    problem: str = ""  # why the compiler refused it


def to_json(result: Result, trials: Sequence[Trial] | None = None) -> dict:
    """All of a result as JSON values; docs/aot.md documents the keys."""
    topology, program = result.topology, result.program
    document = {
        "fits": result.fits,
        "topology": {
            "name": topology.name, "platform": topology.platform, "chip": topology.chip.name,
            "device_kind": topology.device_kind, "num_devices": topology.num_devices,
            "num_slices": topology.num_slices,
        },
        "num_parameters": result.num_parameters,
        "mesh": {axis: vars(result.run.mesh)[axis] for axis in sharding.AXES},
        "phase": result.phase,
        "fused": {"tensors": result.fused[0], "messages": result.fused[1]},
        "memory": dataclasses.asdict(result.memory) | {"headroom": result.memory.headroom},
        "state": result.state,
        "largest": [dataclasses.asdict(buffer) for buffer in result.largest],
        "model_flops": result.model_flops,
        "program": None if program is None else dataclasses.asdict(program),
        "timeline": _timeline_json(result),
        "seconds": {"lower": result.lower_seconds, "compile": result.compile_seconds},
        "versions": result.versions,
        "budget": list(result.budget),
        "unknown": list(result.unknown),
        "config": config.to_json(result.run),
    }  # fmt: skip
    if trials is not None:
        document["suggestions"] = [dataclasses.asdict(trial) for trial in trials]
    return json.loads(json.dumps(document))


def _timeline_json(result: Result) -> dict | None:
    """The estimated time, without the events of the trace."""
    times, speed = result.timeline, result.speed
    if times is None:
        return None
    without_events = dataclasses.asdict(dataclasses.replace(times, events=()))
    del without_events["events"]
    return without_events | {
        "hidden": times.hidden,
        "hidden_bytes": _share_of_bytes(result.program),
        "speed": None if speed is None else _speed_json(speed),
    }


def _speed_json(speed: step_time.Speed) -> dict:
    """MFU and HFU stand beside the rates."""
    document = dataclasses.asdict(speed)
    shares = document.pop("shares")
    return document | shares


def _share_of_bytes(program: program_lib.CostReport | None) -> float | None:
    if program is None:
        return None
    hidden = program_lib.hidden_bytes(program.collectives)
    arrays = program_lib.total_bytes(program.collectives)
    return None if hidden is None or arrays is None else hidden / max(arrays, 1)


WIDTH = 100
_MOST_LINES = 14  # of arrays at the peak


def text(result: Result, trials: Sequence[Trial] | None = None) -> str:
    """The report as text, at most 100 columns wide."""
    sections = [_header(result), _memory(result), _compute(result), _collectives(result)]
    unknown = result.unknown
    if result.timeline is not None:
        sections += step_text.sections(result.timeline, result.speed)
        unknown += result.timeline.unknown
    if unknown:
        sections.append(["unknown", *_grouped(unknown)])
    if trials is not None:
        sections.append(_trials(result, trials))
    wrap = functools.partial(textwrap.fill, width=WIDTH, subsequent_indent="    ")
    return "\n\n".join("\n".join(map(wrap, lines)) for lines in sections if lines)


def _grouped(notes: Sequence[str]) -> list[str]:
    """One line for all notes that differ only in the numbers of instruction names."""
    groups = collections.defaultdict(list)
    for note in notes:
        groups[re.sub(r"\.\d+(?: |$)", " ", note)].append(note)
    return [f"  {n[0]}" if len(n) == 1 else f"  {len(n)} x {text}" for text, n in groups.items()]


def size(num_bytes: float) -> str:
    """ "18.31 GiB", "4.60 MiB", "512 B"."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(num_bytes) >= 0.97 * scale:
            return f"{num_bytes / scale:,.2f} {unit}"
    return f"{num_bytes:.0f} B"


def _header(result: Result) -> list[str]:
    run = result.run
    mesh = sharding.mesh_text({axis: vars(run.mesh)[axis] for axis in sharding.AXES})
    if run.mesh.across_slices:
        mesh += f", {' and '.join(run.mesh.across_slices)} across slices"
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    products = quantized.units_text(run.products, result.topology.chip)
    (count, messages), fused = result.fused, ""
    if messages:
        fused = f"; {count} compressed tensors in {len(messages)} messages of up to "
        fused += size(max(messages))
    return [
        f"model       {describe.model_text(run, result.num_parameters)}",
        f"machine     {result.topology.name}: {result.topology.text}",
        f"mesh        {mesh}; layout {run.sharding.layout}",
        *([f"stages      {stages}"] if (stages := describe.stages_text(run)) else []),
        *([f"replicas    {sync}"] if (sync := describe.sync_text(run)) else []),
        *([f"products    {products}"] if products else []),
        *(f"budget      {line}" for line in result.budget),
        *([f"program     {result.phase}{fused}"] if result.phase else []),
        f"batch       {describe.batch_text(run)}",
        f"compiled    in {result.compile_seconds:.1f} s, traced and lowered in "
        f"{result.lower_seconds:.1f} s ({versions})",
    ]


def _memory(result: Result) -> list[str]:
    memory = result.memory
    verdict = f"fits, {size(memory.headroom)} left"
    if not result.fits:
        verdict = f"DOES NOT FIT: {size(-memory.headroom)} too much"
    host = "unknown" if memory.host is None else size(memory.host)
    parts = ", ".join(f"{name} {size(num_bytes)}" for name, num_bytes in result.state.items())
    lines = [
        f"memory of a device: peak {size(memory.peak)} of {size(memory.limit)}: {verdict}",
        f"  {'state and batch':20}{size(memory.arguments):>12}   {parts}",
        f"  {'temporaries':20}{size(memory.temporaries):>12}",
        f"  {'other outputs':20}{size(memory.outputs):>12}",
        f"  {'on the host':20}{host:>12}",
    ]
    if temporary := [buffer for buffer in result.largest if not buffer.argument]:
        num_bytes = sum(buffer.bytes for buffer in temporary)
        lines.append(f"  at the peak, without state and batch: {size(num_bytes)}")
        lines += map(_array_line, temporary[:_MOST_LINES])
    if rest := temporary[_MOST_LINES:]:
        lines.append(f"  {size(sum(buffer.bytes for buffer in rest)):>12}  {len(rest)} more")
    return lines


def _array_line(array: peak_memory.Buffer) -> str:
    shape = f"{array.count} x {array.shape}" if array.count > 1 else array.shape
    source = f"  {array.source}" if array.source else ""
    room, operation = WIDTH - 16 - 34 - len(source), array.operation
    if len(operation) > room:
        operation = "..." + operation[3 - room :]
    return f"  {size(array.bytes):>12}  {shape:32}  {operation}{source}"


def _compute(result: Result) -> list[str]:
    lines = [
        "compute of a device and step",
        f"  {'model':20}{_flops(result.model_flops):>12}   forward and backward",
    ]
    if (program := result.program) is None:
        return lines
    flops = "unknown" if program.flops is None else _flops(program.flops)
    note = "matrix products, recomputed ones included, kernels not"
    lines.append(f"  {'program':20}{flops:>12}   {note}")
    if program.bytes is not None:
        lines.append(f"  {'memory traffic':20}{size(program.bytes):>12}   read and written")
    kernels: dict[str, list[program_lib.Kernel]] = collections.defaultdict(list)
    for kernel in program.kernels:
        kernels[kernel.name].append(kernel)
    for name, calls in kernels.items():
        count = program_lib.total(call.count for call in calls)
        flops = program_lib.total(program_lib.times(call.count, call.flops) for call in calls)
        estimate = "FLOPs unknown" if flops is None else f"{_flops(flops)} by its own estimate"
        lines.append(f"  kernel {name}: {'?' if count is None else count} times; {estimate}")
    return lines


def _flops(value: float) -> str:
    for unit, scale in (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9)):
        if value >= scale:
            return f"{value / scale:,.2f} {unit}"
    return f"{value / 1e6:,.2f} MFLOP"


def _collectives(result: Result) -> list[str]:
    if result.program is None:
        return []
    if not (chosen := result.program.collectives):
        return ["collectives: none"]
    groups: dict[tuple, list[collectives.Collective]] = collections.defaultdict(list)
    for one in chosen:
        axes = "?" if one.axes is None else ",".join(one.axes)
        groups[one.kind + (" (sliced)" if one.sliced else ""), axes, one.dtype].append(one)
    columns = "  {:21}{:17}{:9}{:>7}{:>12}{:>12}{:>10}{:>9}"
    lines = [
        "collectives of a device and step; hidden beside compute, by bytes and by estimated time",
        columns.format(
            "kind", "mesh axes", "dtype", "times", "arrays", "sent", "by bytes", "by time"
        ),
    ]
    by_bytes = sorted(groups.items(), key=lambda item: -(program_lib.wire_bytes(item[1]) or 0))
    lines += [columns.format(*key, *_cells(group, result.timeline)) for key, group in by_bytes]
    if len(groups) > 1:
        lines.append(columns.format("all", "", "", *_cells(chosen, result.timeline)))
    if any(one.sliced for one in chosen):
        lines.append("  (sliced): an all-reduce of which each device keeps only its slice")
    return lines


def _cells(chosen: Sequence[collectives.Collective], times: Timeline | None) -> list[str]:
    """Executions, bytes of the arrays, bytes sent, shares that compute hides: bytes and time."""
    count = program_lib.executions(chosen)
    arrays, sent = program_lib.total_bytes(chosen), program_lib.wire_bytes(chosen)
    beside = program_lib.hidden_bytes(chosen)
    names = {one.name for one in chosen}
    timed = [] if times is None else [one for one in times.exchanges if one.name in names]
    seconds, exposed = sum(one.seconds for one in timed), sum(one.exposed for one in timed)
    return [
        "?" if count is None else f"{count:,}",
        "?" if arrays is None else size(arrays),
        "?" if sent is None else size(sent),
        "?" if beside is None or arrays is None else f"{100 * beside / max(arrays, 1):.0f}%",
        f"{100 * max(0.0, 1 - exposed / seconds):.0f}%" if seconds else "?",
    ]


def _trials(result: Result, trials: Sequence[Trial]) -> list[str]:
    title = "faster variants" if result.fits else "variants with less memory"
    lines = [f"{title}, compiled, fastest first"]
    for trial in trials:
        peak = "refused" if trial.peak is None else size(trial.peak)
        verdict = "fits" if trial.fits else "no"
        lines.append(f"  {peak:>12}  {verdict:5} {' '.join(trial.flags)}")
        if trial.problem:
            lines.append(f"  {'':20}{trial.problem}")
    if not any(trial.fits for trial in trials):
        lines.append("  no compiled variant fits" if trials else "  none: nothing is left to try")
    return lines


def sent_by_axes(told: dict) -> dict[str, float]:
    """Bytes that a device sends in a step, by mesh axes: "fsdp,tensor". `told`: of `to_json`."""
    sent: dict[str, float] = {}
    for one in told["program"]["collectives"]:
        if one["axes"] and one["count"]:
            axes = ",".join(one["axes"])
            sent[axes] = sent.get(axes, 0.0) + one["count"] * one["wire_bytes"]
    return sent

"""The bill of a compiled train step: what `llmx.aot` finds out, as values, as JSON and as text."""

import collections
import dataclasses
import json
import re
import textwrap
from collections.abc import Sequence

from llmx import config, sharding
from llmx.aot import collectives, peak_memory, program, topologies
from llmx.aot import program as program_lib
from llmx.config import describe


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one device."""

    arguments: int  # state and batch
    outputs: int  # beside those that take the place of arguments
    temporaries: int
    peak: int  # the most at any moment; less than the sum where temporaries are not all needed then
    limit: int  # what a program may use
    host: int | None  # in the host's memory, for this device; None: not told

    @property
    def headroom(self) -> int:
        """What is left; negative: how much too much."""
        return self.limit - self.peak


@dataclasses.dataclass(frozen=True, eq=False)
class Result:
    """What became of a compilation."""

    run: config.Config  # resolved
    topology: topologies.Topology
    memory: Memory
    largest: tuple[peak_memory.Buffer, ...]  # at the peak, largest first; () where it is not told
    program: program.Program | None  # None: the compiler gave up before it had one
    state: dict[str, int]  # bytes of one device: "parameters", "optimizer", "ema", "batch", ...
    num_parameters: int
    model_flops: float  # of a step, forward and backward, on one device
    lower_seconds: float
    compile_seconds: float
    versions: dict[str, str]  # of jax and the compiler
    unknown: tuple[str, ...]
    before: str = dataclasses.field(repr=False)  # HLO as it came from jax; "": not told
    after: str = dataclasses.field(repr=False)  # the compiled program; "": there is none
    phase: str = ""  # of replicas that agree in their own way, which program; "": the only one
    fused: tuple[int, tuple[int, ...]] = (0, ())  # compressed tensors, bytes of their messages

    @property
    def fits(self) -> bool:
        return self.memory.headroom >= 0


@dataclasses.dataclass(frozen=True)
class Trial:
    """A variant that was compiled."""

    flags: tuple[str, ...]
    peak: int | None  # None: the compiler refused it
    fits: bool
    compile_seconds: float
    problem: str = ""  # why the compiler refused it


# ------------------------------------------------------------------------------------------ JSON


def to_json(result: Result, trials: Sequence[Trial] | None = None) -> dict:
    """All of a result as JSON values; docs/aot.md says what is what."""
    topology, program = result.topology, result.program
    made = {
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
        "largest": [dataclasses.asdict(each) for each in result.largest],
        "model_flops": result.model_flops,
        "program": None if program is None else dataclasses.asdict(program),
        "seconds": {"lower": result.lower_seconds, "compile": result.compile_seconds},
        "versions": result.versions,
        "unknown": list(result.unknown),
        "config": config.to_json(result.run),
    }  # fmt: skip
    if trials is not None:
        made["suggestions"] = [dataclasses.asdict(trial) for trial in trials]
    return json.loads(json.dumps(made))


# ------------------------------------------------------------------------------------------ text

WIDTH = 100
_MOST_LINES = 14  # of arrays at the peak


def text(result: Result, trials: Sequence[Trial] | None = None) -> str:
    """The bill for people, at most 100 columns wide."""
    parts = [_what(result), _memory(result), _compute(result), _collectives(result)]
    if result.unknown:
        parts.append(["unknown", *_counted(result.unknown)])
    if trials is not None:
        parts.append(_trials(result, trials))
    return "\n\n".join("\n".join(map(_wrapped, part)) for part in parts if part)


def _counted(notes: Sequence[str]) -> list[str]:
    """A line for all notes that differ in the numbers of instructions' names alone."""
    alike = {}
    for note in notes:
        alike.setdefault(re.sub(r"\.\d+(?: |$)", " ", note), []).append(note)
    return [
        f"  {one[0]}" if len(one) == 1 else f"  {len(one)} x {text}" for text, one in alike.items()
    ]


def _wrapped(line: str) -> str:
    line = line.rstrip()
    return line if len(line) <= WIDTH else textwrap.fill(line, WIDTH, subsequent_indent="    ")


def size(num_bytes: float) -> str:
    """ "18.31 GiB", "4.60 MiB", "512 B"."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(num_bytes) >= 0.97 * scale:
            return f"{num_bytes / scale:,.2f} {unit}"
    return f"{num_bytes:.0f} B"


def _what(result: Result) -> list[str]:
    run = result.run
    mesh = sharding.mesh_text({axis: vars(run.mesh)[axis] for axis in sharding.AXES})
    if run.mesh.across_slices:
        mesh += f", {' and '.join(run.mesh.across_slices)} across slices"
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    return [
        f"model       {describe.model_text(run, result.num_parameters)}",
        f"machine     {result.topology.name}: {result.topology.text}",
        f"mesh        {mesh}; layout {run.sharding.layout}",
        *([f"stages      {stages}"] if (stages := describe.stages_text(run)) else []),
        *([f"replicas    {agreement}"] if (agreement := describe.sync_text(run)) else []),
        *_program(result),
        f"batch       {describe.batch_text(run)}",
        f"compiled    in {result.compile_seconds:.1f} s, traced and lowered in "
        f"{result.lower_seconds:.1f} s ({versions})",
    ]


def _program(result: Result) -> list[str]:
    """Which program of several, and what of it is fused."""
    if not result.phase:
        return []
    count, messages = result.fused
    fused = ""
    if messages:
        largest = size(max(messages))
        fused = f"; {count} compressed tensors in {len(messages)} messages of up to {largest}"
    return [f"program     {result.phase}{fused}"]


def _memory(result: Result) -> list[str]:
    memory = result.memory
    verdict = (
        f"fits, {size(memory.headroom)} left"
        if result.fits
        else f"DOES NOT FIT: {size(-memory.headroom)} too much"
    )
    host = "unknown" if memory.host is None else size(memory.host)
    parts = ", ".join(f"{name} {size(each)}" for name, each in result.state.items())
    lines = [
        f"memory of a device: peak {size(memory.peak)} of {size(memory.limit)}: {verdict}",
        f"  {'state and batch':20}{size(memory.arguments):>12}   {parts}",
        f"  {'temporaries':20}{size(memory.temporaries):>12}",
        f"  {'outputs beside them':20}{size(memory.outputs):>12}",
        f"  {'on the host':20}{host:>12}",
    ]
    temporary = [each for each in result.largest if not each.argument]
    if temporary:
        beside = size(sum(each.bytes for each in temporary))
        lines.append(f"  at the peak, beside state and batch: {beside}")
        lines += [_array_line(each) for each in temporary[:_MOST_LINES]]
        rest = temporary[_MOST_LINES:]
        if rest:
            lines.append(f"  {size(sum(each.bytes for each in rest)):>12}  {len(rest)} more")
    return lines


def _array_line(array: peak_memory.Buffer) -> str:
    times = f"{array.count} x " if array.count > 1 else ""
    shape = f"{times}{array.shape}"
    where = f"  {array.source}" if array.source else ""
    room = WIDTH - 16 - 34 - len(where)
    operation = (
        array.operation if len(array.operation) <= room else "..." + array.operation[3 - room :]
    )
    return f"  {size(array.bytes):>12}  {shape:32}  {operation}{where}"


def _compute(result: Result) -> list[str]:
    lines = [
        "compute of a device and step",
        f"  {'model':20}{_flops(result.model_flops):>12}   forward and backward",
    ]
    program = result.program
    if program is None:
        return lines
    told = "unknown" if program.flops is None else _flops(program.flops)
    lines.append(
        f"  {'program':20}{told:>12}   matrix products, kernels apart; recomputed ones too"
    )
    if program.bytes is not None:
        lines.append(f"  {'memory traffic':20}{size(program.bytes):>12}   read and written")
    kernels: dict[str, list[program_lib.Kernel]] = collections.defaultdict(list)
    for kernel in program.kernels:
        kernels[kernel.name].append(kernel)
    for name, calls in kernels.items():
        count = program_lib.total(call.count for call in calls)
        flops = program_lib.total(program_lib.times(call.count, call.flops) for call in calls)
        estimate = "FLOPs not told" if flops is None else f"{_flops(flops)} by its own estimate"
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
    groups: dict[tuple, list[collectives.Collective]] = collections.defaultdict(list)
    for each in result.program.collectives:
        axes = "?" if each.axes is None else ",".join(each.axes)
        groups[each.kind + (" (sliced)" if each.sliced else ""), axes, each.dtype].append(each)
    if not groups:
        return ["collectives: none"]
    columns = "  {:28}{:16}{:10}{:>8}{:>12}{:>12}{:>10}"
    lines = [
        "collectives of a device and step",
        columns.format("kind", "mesh axes", "dtype", "times", "arrays", "sent", "hidden"),
    ]
    rows = {key: _row(chosen) for key, chosen in groups.items()}
    for key, row in sorted(rows.items(), key=lambda pair: -(pair[1][2] or 0)):
        lines.append(columns.format(*key, *_cells(row)))
    if len(rows) > 1:
        lines.append(columns.format("all", "", "", *_cells(_row(result.program.collectives))))
    if any(each.sliced for each in result.program.collectives):
        lines.append("  (sliced): an all-reduce of which a device keeps its slice alone")
    return lines


def _row(chosen: Sequence[collectives.Collective]) -> tuple[int | None, ...]:
    """Executions, bytes of the arrays, bytes sent, executions with compute beside them."""
    return (
        program.executions(chosen),
        program.total_bytes(chosen),
        program.wire_bytes(chosen),
        program.executions(each for each in chosen if each.asynchronous and each.hidden_by),
    )


def _cells(row: tuple[int | None, ...]) -> list[str]:
    count, whole, sent, hidden = row
    return [
        "?" if count is None else f"{count:,}",
        "?" if whole is None else size(whole),
        "?" if sent is None else size(sent),
        "?" if hidden is None or count is None else f"{100 * hidden / max(count, 1):.0f}%",
    ]


def _trials(result: Result, trials: Sequence[Trial]) -> list[str]:
    title = "faster variants" if result.fits else "variants with less memory"
    lines = [f"{title}, compiled, cheapest in speed first"]
    for trial in trials:
        told = "refused" if trial.peak is None else size(trial.peak)
        verdict = "fits" if trial.fits else "no"
        lines.append(f"  {told:>12}  {verdict:5} {' '.join(trial.flags)}")
        if trial.problem:
            lines.append(f"  {'':20}{trial.problem}")
    if not any(trial.fits for trial in trials):
        lines.append("  none that was tried fits" if trials else "  none: nothing is left to try")
    return lines

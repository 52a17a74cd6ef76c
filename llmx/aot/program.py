"""The cost report of a compiled program: what one step computes, moves and waits for, per device.

`read` takes the text of a compiled program (`compiled.as_text()` for CPU, GPU or TPU; no such
device is needed). Loops are multiplied in, unlike in `compiled.cost_analysis()`. A figure that the
text does not contain is None; `CostReport.unknown` says why. `instruction_costs` defines FLOPs and
bytes, `collectives` the bytes on the wire.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Collection, Iterable, Sequence
from fractions import Fraction

from llmx.aot import collectives, hlo_text, instruction_costs
from llmx.aot.collectives import Analysis, Axes, Collective
from llmx.aot.hlo_text import Frame, Instruction, collective_kind, source_of


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A computation that the text shows as one call: Pallas, cuDNN, ..."""

    name: str
    target: str  # what is called
    count: int | None  # executions per step; None: a trip count is unknown
    flops: float | None  # per execution, as the call itself estimates; None: no estimate
    source: str  # the operation of the traced program


@dataclasses.dataclass(frozen=True)
class CostReport:
    """What some instructions cost, executed once, per device."""

    collectives: tuple[Collective, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    flops: float | None = 0.0  # of matrix products and convolutions; without kernels
    bytes: float | None = 0.0  # that operations read and write; a fusion is one operation
    estimated_cycles: float | None = 0.0  # XLA's estimate on TPU; no collectives, no kernels
    unknown: tuple[str, ...] = ()  # what the text does not contain, in words

    def select(
        self, *, kind: str | Collection[str] | None = None,
        axes: str | Collection[str] | None = None, across: str | None = None,
    ) -> tuple[Collective, ...]:  # fmt: skip
        """The collectives of a kind (or of several), over exactly `axes`, over at least `across`.

        All of them by default. Those whose axes are unknown are selected by kind only.
        """
        kinds, wanted = ({one} if isinstance(one, str) else one for one in (kind, axes))
        return tuple(
            one
            for one in self.collectives
            if (kinds is None or one.kind in kinds)
            and (wanted is None or (one.axes is not None and set(one.axes) == set(wanted)))
            and (across is None or (one.axes is not None and across in one.axes))
        )


def read(text: str, mesh: Axes, *, across_slices: Sequence[str] = ()) -> CostReport:
    """The cost report of the compiled program with this text.

    Args:
      mesh: (axis, size) of the mesh that the program was compiled for, outermost first.
      across_slices: the axes that cross TPU slices, as given to `sharding.make_mesh`; without this
        the outermost ones. A program for several slices is the text of one.

    Raises ValueError where the text is not that of a compiled program, or not of this mesh.
    """
    module = hlo_text.parse(text)
    analysis = Analysis(module, collectives.sliced_mesh(module, mesh, across_slices))
    report = _computation(analysis, Frame(module.entry))
    unknown = [*dict.fromkeys(report.unknown), *_not_visited(analysis)]
    silent = collections.Counter(one.name for one in report.kernels if one.flops is None)
    if silent:
        unknown.append(f"FLOPs of kernels without an estimate: {', '.join(silent)}")
    cycles = report.estimated_cycles if "estimated_cycles" in text else None
    report = dataclasses.replace(report, estimated_cycles=cycles, unknown=tuple(unknown))
    return _in_numbers(report)


def _in_numbers(report: CostReport) -> CostReport:
    """The same without fractions, which branches have that are taken now and then."""
    replace, known = dataclasses.replace, lambda value: None if value is None else whole(value)
    return replace(
        report, **{name: known(getattr(report, name)) for name in _NUMBERS},
        collectives=tuple(replace(one, count=known(one.count)) for one in report.collectives),
        kernels=tuple(replace(one, count=known(one.count)) for one in report.kernels),
    )  # fmt: skip


def _not_visited(analysis: Analysis) -> list[str]:
    """Collectives and products in computations that no visited instruction is known to run."""
    names = [
        one.name
        for computation in analysis.module.computations.values()
        for one in computation.instructions
        if (collective_kind(one) or instruction_costs.is_product(one))
        and one.name not in analysis.visited
    ]
    if not names:
        return []
    listed = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return [f"executions of {listed}: no instruction is known to run their computations"]


# Fields of a `CostReport` that add up.
_NUMBERS = ("flops", "bytes", "estimated_cycles")


def times(count: float | None, value: float | None) -> float | None:
    """count * value; None where one is None, but 0 times an unknown count is 0."""
    if value == 0:
        return 0
    return None if count is None or value is None else count * value


def whole(count: Fraction | float) -> int | float:
    """The same as an int if it is one, else to a hundredth."""
    return int(count) if count == int(count) else round(float(count), 2)


def total(values: Iterable[float | None]) -> float | None:
    """The sum; None where a value is None."""
    values = list(values)
    return None if None in values else sum(values)


def executions(chosen: Iterable[Collective]) -> int | None:
    """Executions of these collectives in a step."""
    return total(one.count for one in chosen)


def total_bytes(chosen: Iterable[Collective]) -> int | None:
    """Bytes in a step of the whole arrays of these collectives."""
    return total(times(one.count, one.bytes) for one in chosen)


def wire_bytes(chosen: Iterable[Collective]) -> int | None:
    """Bytes that one device sends in a step for these collectives."""
    return total(times(one.count, one.wire_bytes) for one in chosen)


def hidden_bytes(chosen: Iterable[Collective]) -> int | None:
    """Bytes in a step of the whole arrays that travel while anything is computed, however short."""
    return total_bytes(one for one in chosen if one.asynchronous and one.hidden_by)


def _sum(reports: Sequence[CostReport]) -> CostReport:
    return CostReport(
        collectives=tuple(one for report in reports for one in report.collectives),
        kernels=tuple(kernel for report in reports for kernel in report.kernels),
        unknown=tuple(note for report in reports for note in report.unknown),
        **{name: total(getattr(report, name) for report in reports) for name in _NUMBERS},
    )


def _repeated(report: CostReport, trips: int | None) -> CostReport:
    """The costs of the body of a loop; `trips` None: unknown."""
    inside = [dataclasses.replace(one, in_loop=one.in_loop + 1) for one in report.collectives]
    return _times(trips, dataclasses.replace(report, collectives=tuple(inside)))


def _times(count: float | None, report: CostReport) -> CostReport:
    """The costs of what happens `count` times, on average."""
    replace = dataclasses.replace
    return replace(
        report,
        collectives=tuple(
            replace(one, count=times(count, one.count)) for one in report.collectives
        ),
        kernels=tuple(replace(one, count=times(count, one.count)) for one in report.kernels),
        **{name: times(count, getattr(report, name)) for name in _NUMBERS},
    )


def _computation(analysis: Analysis, frame: Frame) -> CostReport:
    """The costs of a computation executed once."""
    chained, notes, firsts = collectives.read_chains(analysis, frame)
    moved = sum(instruction_costs.bytes_of(analysis.module, *first) for first in firsts)
    reports = [CostReport(collectives=tuple(chained), bytes=moved, unknown=tuple(notes))]
    for instruction in frame.computation.instructions:
        moved = instruction_costs.bytes_of(analysis.module, frame.computation, instruction)
        costs = _instruction(analysis, frame, instruction)
        reports += [CostReport(bytes=moved), _cycles(instruction), costs]
    return _sum(reports)


def _instruction(analysis: Analysis, frame: Frame, instruction: Instruction) -> CostReport:
    """The costs of one instruction, without its cycles and the bytes that it reads and writes."""
    if instruction.op == "while":
        return _loop(analysis, frame, instruction)
    if instruction.op == "conditional":
        return _branches(analysis, frame, instruction)
    if instruction.op == "call":
        return _computation(analysis, frame.enter(analysis.module, instruction))
    if instruction.op in ("call-start", "async-start"):
        return _asynchronous(analysis, frame, instruction)
    if instruction.op in ("fusion", "fusion-start"):
        return _fusion(analysis, frame, instruction)
    if instruction_costs.is_product(instruction):
        analysis.visited.add(instruction.name)
        flops = instruction_costs.flops_of(frame.computation, instruction)
        return _products(flops or 0.0, [] if flops is not None else [instruction.name])
    if instruction_costs.is_kernel(instruction):
        return _kernel(instruction)
    listed, notes = [], []
    if instruction.op == "send":
        listed, notes = collectives.read_send(analysis, frame.computation, instruction)
    elif collective_kind(instruction):
        listed, notes = collectives.read_collective(analysis, frame, instruction)
    return CostReport(collectives=tuple(listed), unknown=tuple(notes))


def _fusion(analysis: Analysis, frame: Frame, fusion: Instruction) -> CostReport:
    contents = collectives.fusion_contents(analysis, fusion)
    reports = [_products(contents.flops, contents.unread)]
    chained = contents.chains().values()
    for computation, instruction in contents.collectives:
        if (computation, instruction) in chained:
            continue  # counted where the chain begins
        inner = Frame(computation, fusion, frame)
        listed, notes = collectives.read_collective(analysis, inner, instruction, fusion=fusion)
        moved = instruction_costs.bytes_of(analysis.module, computation, instruction)
        reports.append(CostReport(collectives=tuple(listed), bytes=moved, unknown=tuple(notes)))
    return _sum(reports)


def _products(flops: float, unread: Sequence[str]) -> CostReport:
    """The costs of matrix products; `unread`: those whose dimensions cannot be parsed."""
    return CostReport(
        flops=None if unread else flops,
        unknown=tuple(f"FLOPs of {name}: its dimensions cannot be parsed" for name in unread),
    )


def _asynchronous(analysis: Analysis, frame: Frame, start: Instruction) -> CostReport:
    """The costs of a computation that runs asynchronously, often on a core of its own."""
    report = _computation(analysis, frame.enter(analysis.module, start))
    overlap = collectives.overlap_of(analysis, frame.computation, start)
    return dataclasses.replace(
        report,
        collectives=tuple(dataclasses.replace(one, **overlap) for one in report.collectives),
        estimated_cycles=0.0,  # of another core
        unknown=tuple(note for note in report.unknown if not note.startswith(_NO_CYCLES)),
    )


def _loop(analysis: Analysis, frame: Frame, loop: Instruction) -> CostReport:
    trips = hlo_text.trip_count(analysis.module, frame, loop)
    named = (analysis.module.computations[loop.attribute(name)] for name in ("body", "condition"))
    body, condition = (_computation(analysis, Frame(one, loop, frame)) for one in named)
    if trips is not None:
        notes = ()
        if hlo_text.expected_trips(loop) is not None:
            note = f"iterations of {loop.label} end on data: {trips} are counted, as expected"
            notes = (*notes, note)
        counted = _sum([_repeated(body, trips), _repeated(condition, trips + 1)])
        return dataclasses.replace(counted, unknown=(*counted.unknown, *notes))
    note = f"trip count of the loop {loop.label}: its end depends on data"
    return _sum([_repeated(body, None), _repeated(condition, None), CostReport(unknown=(note,))])


def _branches(analysis: Analysis, frame: Frame, conditional: Instruction) -> CostReport:
    """The largest costs of a conditional's branches: which one is taken depends on data. Or those
    of all branches, each as often as the program expects."""
    reports = [
        _computation(analysis, Frame(computation, conditional, frame))
        for computation in analysis.module.called(conditional)
    ]
    if expected := hlo_text.expected_branches(conditional):
        return _sum(list(map(_times, expected[0], reports)))
    wires = [wire_bytes(report.collectives) for report in reports]
    numbers = {name: [getattr(report, name) for report in reports] for name in _NUMBERS}
    calls = [len(report.kernels) for report in reports]
    unknown = [note for report in reports for note in report.unknown]
    costs = {"bytes sent": wires, "FLOPs": numbers["flops"], "kernels": calls}
    differing = [f"{_either(costs[what])} {what}" for what in costs if len(set(costs[what])) > 1]
    if differing:
        what = f"{', '.join(differing)}; the most of each is counted"
        unknown.append(f"branch that {conditional.label} takes: {what}")
    return CostReport(
        collectives=reports[wires.index(_most(wires))].collectives,
        kernels=reports[calls.index(max(calls))].kernels,
        unknown=tuple(unknown), **{name: _most(values) for name, values in numbers.items()},
    )  # fmt: skip


def _most(values: Sequence[float | None]) -> float | None:
    return max(values, key=lambda value: math.inf if value is None else value)


def _either(values: Sequence[float | None]) -> str:
    return " or ".join("?" if value is None else f"{value:,.0f}" for value in values)


# What XLA writes where it has no estimate: the largest integer of 64 bits.
_NO_ESTIMATE = 2**63 - 1
_NO_CYCLES = "cycles of "


def _cycles(instruction: Instruction) -> CostReport:
    cycles = int(instruction.configured("estimated_cycles") or 0)
    if cycles < _NO_ESTIMATE:
        return CostReport(estimated_cycles=float(cycles))
    note = f"{_NO_CYCLES}{instruction.label}: XLA has no estimate"
    return CostReport(estimated_cycles=None, unknown=(note,))


def _kernel(call: Instruction) -> CostReport:
    estimate = re.search(r'"cost_estimate":\{"flops":"(\d+)"', call.config)
    name = instruction_costs.kernel_name(call)
    flops = float(estimate.group(1)) if estimate else None
    kernel = Kernel(name, call.quoted("custom_call_target"), 1, flops, source_of(call))
    communicates = '"has_communication":true' in call.config
    unknown = (f"bytes that the kernel {name} sends to other devices",) if communicates else ()
    return CostReport(kernels=(kernel,), unknown=unknown)

"""The bill of a compiled program: what one step computes, moves and waits for, on each device.

`read` takes the text of a compiled, partitioned and scheduled XLA program (`compiled.as_text()`
for CPU, GPU or TPU; no such device is needed) and gives every collective with its kind, mesh axes,
bytes and executions per step, and FLOPs, memory traffic and kernels. Loops are multiplied in, which
`compiled.cost_analysis()` does not do. What the text does not tell is said in `Program.unknown`,
and figures that depend on it are None.

What counts as a FLOP and as a byte read or written: see `hlo_costs`; as bytes on the wire: see
`hlo_collectives`.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Collection, Iterable, Sequence

from llmx.aot import collectives, hlo_text, instruction_costs
from llmx.aot.collectives import Collective, Reading
from llmx.aot.hlo_text import Frame, Instruction, collective_kind, source_of, told


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A computation that the text shows as one call: Pallas, cuDNN, ..."""

    name: str
    target: str  # what is called
    count: int | None  # executions per step; None: a trip count is unknown
    flops: float | None  # per execution, as the call itself estimates; None: it does not
    source: str  # the operation of the traced program


@dataclasses.dataclass(frozen=True)
class Program:
    """The bill of one execution, per device."""

    collectives: tuple[Collective, ...]
    kernels: tuple[Kernel, ...]
    flops: float | None  # of matrix products and convolutions; without kernels
    bytes: float | None  # that operations read and write; a fusion is one operation
    estimated_cycles: float | None  # on TPU, by XLA's own estimate; without collectives and kernels
    unknown: tuple[str, ...]  # what the text does not tell, in words

    def select(
        self,
        *,
        kind: str | Collection[str] | None = None,
        axes: str | Collection[str] | None = None,
        across: str | None = None,
    ) -> tuple[Collective, ...]:
        """The collectives of a kind (or of several), over exactly `axes`, over at least `across`.

        All of them by default. Those whose axes are unknown are found by their kind only.
        """
        kinds = {kind} if isinstance(kind, str) else kind
        wanted = {axes} if isinstance(axes, str) else None if axes is None else set(axes)
        return tuple(
            each
            for each in self.collectives
            if (kinds is None or each.kind in kinds)
            and (wanted is None or (each.axes is not None and set(each.axes) == wanted))
            and (across is None or (each.axes is not None and across in each.axes))
        )

    def executions(
        self,
        *,
        kind: str | Collection[str] | None = None,
        axes: str | Collection[str] | None = None,
        across: str | None = None,
    ) -> int | None:
        """Executions in a step of what `select` finds; None: a trip count is unknown."""
        return executions(self.select(kind=kind, axes=axes, across=across))

    def total_bytes(
        self,
        *,
        kind: str | Collection[str] | None = None,
        axes: str | Collection[str] | None = None,
        across: str | None = None,
    ) -> int | None:
        """Bytes in a step of the whole arrays of what `select` finds; None: as above."""
        return total_bytes(self.select(kind=kind, axes=axes, across=across))

    def wire_bytes(
        self,
        *,
        kind: str | Collection[str] | None = None,
        axes: str | Collection[str] | None = None,
        across: str | None = None,
    ) -> int | None:
        """Bytes that one device sends in a step for what `select` finds; None: as above."""
        return wire_bytes(self.select(kind=kind, axes=axes, across=across))


def read(
    text: str, mesh: Sequence[tuple[str, int]], *, across_slices: Sequence[str] = ()
) -> Program:
    """The bill of a compiled program.

    Args:
      text: `compiled.as_text()`.
      mesh: (axis, size) of the mesh that the program was compiled for, outermost first.
      across_slices: the axes that cross TPU slices, as given to `sharding.make_mesh`. A program for
        several slices is the text of one; without this the outermost axes are taken to cross them.

    Raises ValueError where the text is not that of a compiled program, or not of this mesh.
    """
    module = hlo_text.parse(text)
    place = collectives.place_of(module, mesh, across_slices)
    reading = Reading(module, place, fused={}, met=set())
    bill = _walk(reading, Frame(module.entry))
    silent = collections.Counter(each.name for each in bill.kernels if each.flops is None)
    unknown = [*dict.fromkeys(bill.unknown), *_missed(reading)]
    if silent:
        unknown.append(f"FLOPs of kernels that do not say: {', '.join(silent)}")
    return Program(
        collectives=bill.collectives,
        kernels=bill.kernels,
        flops=bill.flops,
        bytes=bill.bytes,
        estimated_cycles=bill.cycles if "estimated_cycles" in text else None,
        unknown=tuple(unknown),
    )


def _missed(reading: Reading) -> list[str]:
    """What the walk did not come to: something runs it in a way that is not known here."""
    missed = [
        each.name
        for computation in reading.module.computations.values()
        for each in computation.instructions
        if (collective_kind(each) or instruction_costs.is_product(each))
        and each.name not in reading.met
    ]
    if not missed:
        return []
    names = ", ".join(missed[:8]) + (f" and {len(missed) - 8} more" if len(missed) > 8 else "")
    return [f"executions of {names}: nothing is known to run the computations that they are in"]


# ------------------------------------------------------------------- sums of what may be unknown


def times(count: float | None, value: float | None) -> float | None:
    """count * value, None where one is None; nothing remains nothing, however often."""
    if value == 0:
        return 0
    return None if count is None or value is None else count * value


def total(values: Iterable[float | None]) -> float | None:
    """The sum; None where a value is None."""
    values = list(values)
    return None if any(value is None for value in values) else sum(values)


def executions(chosen: Iterable[Collective]) -> int | None:
    """Executions of these collectives in a step."""
    return total(each.count for each in chosen)


def total_bytes(chosen: Iterable[Collective]) -> int | None:
    """Bytes in a step of the whole arrays of these collectives."""
    return total(times(each.count, each.bytes) for each in chosen)


def wire_bytes(chosen: Iterable[Collective]) -> int | None:
    """Bytes that one device sends in a step for these collectives."""
    return total(times(each.count, each.wire_bytes) for each in chosen)


# -------------------------------------------------------------------------------------------- bills


@dataclasses.dataclass(frozen=True)
class _Costs:
    """What some instructions cost, executed once."""

    collectives: tuple[Collective, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    flops: float | None = 0.0
    bytes: float | None = 0.0
    cycles: float | None = 0.0
    unknown: tuple[str, ...] = ()


def _add(bills: Iterable[_Costs]) -> _Costs:
    bills = list(bills)
    return _Costs(
        collectives=tuple(each for bill in bills for each in bill.collectives),
        kernels=tuple(each for bill in bills for each in bill.kernels),
        flops=total(bill.flops for bill in bills),
        bytes=total(bill.bytes for bill in bills),
        cycles=total(bill.cycles for bill in bills),
        unknown=tuple(each for bill in bills for each in bill.unknown),
    )


def _repeated(bill: _Costs, trips: int | None) -> _Costs:
    """The bill of what is in a loop, executed that often; None: as often as nobody knows."""
    return _Costs(
        collectives=tuple(
            dataclasses.replace(each, count=times(trips, each.count), in_loop=each.in_loop + 1)
            for each in bill.collectives
        ),
        kernels=tuple(
            dataclasses.replace(each, count=times(trips, each.count)) for each in bill.kernels
        ),
        flops=times(trips, bill.flops),
        bytes=times(trips, bill.bytes),
        cycles=times(trips, bill.cycles),
        unknown=bill.unknown,
    )


# ----------------------------------------------------------------------------------------- the walk


def _walk(reading: Reading, frame: Frame) -> _Costs:
    """The bill of a computation executed once."""
    chained, notes, firsts = collectives.read_chains(reading, frame)
    moved = sum(instruction_costs.bytes_of(reading.module, *first) for first in firsts)
    bills = [_Costs(collectives=tuple(chained), bytes=moved, unknown=tuple(notes))]
    for each in frame.computation.instructions:
        moved = instruction_costs.bytes_of(reading.module, frame.computation, each)
        bills += [_Costs(bytes=moved), _cycles(each), _costs_of(reading, frame, each)]
    return _add(bills)


def _costs_of(reading: Reading, frame: Frame, each: Instruction) -> _Costs:
    """The bill of one instruction, without its cycles and what it reads and writes itself."""
    if each.op == "while":
        return _loop(reading, frame, each)
    if each.op == "conditional":
        return _branches(reading, frame, each)
    if each.op == "call":
        (computation,) = reading.module.called(each)
        return _walk(reading, Frame(computation, each, frame))
    if each.op in ("call-start", "async-start"):
        return _beside(reading, frame, each)
    if each.op in ("fusion", "fusion-start"):
        return _fusion(reading, frame, each)
    if instruction_costs.is_product(each):
        reading.met.add(each.name)
        flops = instruction_costs.flops_of(frame.computation, each)
        return _products(flops or 0.0, [] if flops is not None else [each.name])
    if instruction_costs.is_kernel(each):
        return _kernel(each)
    found, notes = [], []
    if each.op == "send":
        found, notes = collectives.read_send(reading, frame.computation, each)
    elif collective_kind(each):
        found, notes = collectives.read_collective(reading, frame, each)
    return _Costs(collectives=tuple(found), unknown=tuple(notes))


def _fusion(reading: Reading, frame: Frame, fusion: Instruction) -> _Costs:
    fused = collectives.fused_of(reading, fusion)
    bills = [_products(fused.flops, fused.unread)]
    parts = list(fused.chains().values())
    for computation, each in fused.collectives:
        if (computation, each) in parts:
            continue  # counted where it begins
        inner = Frame(computation, fusion, frame)
        found, notes = collectives.read_collective(reading, inner, each, fusion=fusion)
        moved = instruction_costs.bytes_of(reading.module, computation, each)
        bills.append(_Costs(collectives=tuple(found), bytes=moved, unknown=tuple(notes)))
    return _add(bills)


def _products(flops: float, unread: Sequence[str]) -> _Costs:
    """A bill of matrix products; `unread` are those whose text is not understood."""
    return _Costs(
        flops=None if unread else flops,
        unknown=tuple(f"FLOPs of {name}: its dimensions are not understood" for name in unread),
    )


def _beside(reading: Reading, frame: Frame, start: Instruction) -> _Costs:
    """The bill of a computation that runs while others do, often on a core of its own."""
    (computation,) = reading.module.called(start)
    bill = _walk(reading, Frame(computation, start, frame))
    waits = collectives.waits_of(reading, frame.computation, start)
    return dataclasses.replace(
        bill,
        collectives=tuple(dataclasses.replace(each, **waits) for each in bill.collectives),
        cycles=0.0,  # of another core
        unknown=tuple(note for note in bill.unknown if not note.startswith(_NO_CYCLES)),
    )


def _loop(reading: Reading, frame: Frame, loop: Instruction) -> _Costs:
    trips = hlo_text.trip_count(reading.module, frame, loop)
    body, condition = (
        _walk(reading, Frame(reading.module.computations[loop.attribute(name)], loop, frame))
        for name in ("body", "condition")
    )
    checks = None if trips is None else trips + 1
    bill = _add([_repeated(body, trips), _repeated(condition, checks)])
    if trips is not None:
        return bill
    note = f"trip count of the loop {told(loop)}: its end depends on data"
    return dataclasses.replace(bill, unknown=(*bill.unknown, note))


def _branches(reading: Reading, frame: Frame, choice: Instruction) -> _Costs:
    """The larger bill of a conditional's branches: the text does not tell which is taken."""
    bills = [
        _walk(reading, Frame(computation, choice, frame))
        for computation in reading.module.called(choice)
    ]
    wires = [wire_bytes(bill.collectives) for bill in bills]
    flops = [bill.flops for bill in bills]
    calls = [len(bill.kernels) for bill in bills]
    unknown = [note for bill in bills for note in bill.unknown]
    differ = [
        f"{_either(values)} {what}"
        for values, what in ((wires, "bytes sent"), (flops, "FLOPs"), (calls, "kernels"))
        if len(set(values)) > 1
    ]
    if differ:
        unknown.append(
            f"branch that {told(choice)} takes: {', '.join(differ)}; the most of each is counted"
        )
    return _Costs(
        collectives=bills[wires.index(_most(wires))].collectives,
        kernels=bills[calls.index(max(calls))].kernels,
        flops=_most(flops),
        bytes=_most([bill.bytes for bill in bills]),
        cycles=_most([bill.cycles for bill in bills]),
        unknown=tuple(unknown),
    )


def _most(values: Sequence[float | None]) -> float | None:
    return max(values, key=lambda value: math.inf if value is None else value)


def _either(values: Sequence[float | None]) -> str:
    return " or ".join("?" if value is None else f"{value:,.0f}" for value in values)


# What XLA writes where it has no estimate: the largest integer of 64 bits.
_NO_ESTIMATE = 2**63 - 1
_NO_CYCLES = "cycles of "


def _cycles(each: Instruction) -> _Costs:
    cycles = int(each.configured("estimated_cycles") or 0)
    if cycles < _NO_ESTIMATE:
        return _Costs(cycles=float(cycles))
    return _Costs(cycles=None, unknown=(f"{_NO_CYCLES}{told(each)}: XLA has no estimate",))


def _kernel(call: Instruction) -> _Costs:
    estimate = re.search(r'"cost_estimate":\{"flops":"(\d+)"', call.config)
    named = re.search(r', name = "([\w.\-]+)"', call.config)  # Pallas on GPU
    name = named.group(1) if named else re.sub(r"\.\d+$", "", call.name)
    talks = '"has_communication":true' in call.config
    kernel = Kernel(
        name=name,
        target=call.quoted("custom_call_target"),
        count=1,
        flops=float(estimate.group(1)) if estimate else None,
        source=source_of(call),
    )
    return _Costs(
        kernels=(kernel,),
        unknown=(f"bytes that the kernel {name} sends to other devices",) if talks else (),
    )

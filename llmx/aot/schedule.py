"""What a compiled program does, operation by operation, as steps that `timeline` can time.

The order is that of the scheduled text. Loops and branches stay nested: their bodies are steps too.
"""

import dataclasses
from collections.abc import Callable, Sequence
from fractions import Fraction

from llmx.aot import collectives, core_times, hlo_text, instruction_costs, links
from llmx.aot.collectives import Analysis, Collective
from llmx.aot.core_times import Core
from llmx.aot.hlo_text import Frame, Instruction, collective_kind, source_of
from llmx.aot.links import Machine, Route


@dataclasses.dataclass(frozen=True, eq=False)
class Work:
    """An operation on the core."""

    name: str
    source: str
    seconds: float
    basis: str  # as in core_times.Time
    flops: float = 0.0  # of a kernel
    line: str = ""  # of the source, "dot.py:119"; "": unknown


@dataclasses.dataclass(frozen=True, eq=False)
class Transfer:
    """A collective, or a copy that runs beside the core."""

    name: str
    source: str
    route: Route
    collective: Collective | None  # None: a copy within the device
    line: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class Start:
    transfer: Transfer


@dataclasses.dataclass(frozen=True, eq=False)
class Wait:
    transfer: Transfer


@dataclasses.dataclass(frozen=True, eq=False)
class Hosted:
    """A fusion that carries transfers on while it computes, and ends some of them."""

    work: Work
    transfers: tuple[Transfer, ...]
    ends: tuple[Transfer, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Loop:
    name: str
    body: tuple["Step", ...]  # with its condition
    trips: int


@dataclasses.dataclass(frozen=True, eq=False)
class Branches:
    """A conditional in a loop, of which each branch is taken in a share of the iterations."""

    shares: tuple[Fraction, ...]  # add up to 1
    branches: tuple[tuple["Step", ...], ...]


Step = Work | Start | Wait | Hosted | Loop | Branches

# Rows of transfers that are not communication.
COPIES, STREAM = "copies", "second stream"


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """What steps are made with, and what is unknown of them."""

    analysis: Analysis
    machine: Machine
    core: Core
    line_of: Callable[[int], str] = lambda frame: ""  # by number of a stack frame
    unknown: list[str] = dataclasses.field(default_factory=list)


def steps_of(plan: Plan, frame: Frame) -> tuple[Step, ...]:
    """The steps of a computation, in the order in which they are issued."""
    computation = frame.computation
    hosts, ends = _hosts(plan, frame)
    waits: dict[str, list[Transfer]] = {}  # by the instruction that waits
    steps: list[Step] = []
    for instruction in computation.instructions:
        steps += [Wait(one) for one in waits.pop(instruction.name, ())]
        if instruction.name in hosts:
            work = _work(plan, frame, instruction)
            made = Hosted(work, hosts[instruction.name], ends[instruction.name])
            steps.append(made)
            continue
        steps += _nested(plan, frame, instruction)
        for transfer, done in _transfers(plan, frame, instruction):
            steps.append(Start(transfer))
            if done is None:
                steps.append(Wait(transfer))
            else:
                waits.setdefault(done.name, []).append(transfer)
        work = _work(plan, frame, instruction)
        if work.seconds > 0:
            steps.append(work)
    return (*steps, *(Wait(one) for late in waits.values() for one in late))


def _work(plan: Plan, frame: Frame, instruction: Instruction) -> Work:
    if collective_kind(instruction) or instruction.op.endswith(("-start", "-done", "-update")):
        return Work(instruction.name, "", 0.0, "")
    if instruction.op in ("send", "recv"):
        return Work(instruction.name, "", 0.0, "")
    time = core_times.time_of(plan.core, plan.analysis.module, frame.computation, instruction)
    source = source_of(instruction)
    line = _line(plan, instruction)
    return Work(instruction.name, source, time.seconds, time.basis, time.flops, line)


def _line(plan: Plan, instruction: Instruction) -> str:
    return plan.line_of(int(instruction.attribute("stack_frame_id") or 0))


def _nested(plan: Plan, frame: Frame, instruction: Instruction) -> Sequence[Step]:
    """The steps of the computations that an instruction runs on the core."""
    module = plan.analysis.module
    if instruction.op == "while":
        trips = hlo_text.trip_count(module, frame, instruction)
        if trips is None:
            note = f"iterations of {instruction.label} end on data: one is timed"
            plan.unknown.append(note)
        parts = (module.computations[instruction.attribute(n)] for n in ("condition", "body"))
        body = [step for one in parts for step in steps_of(plan, Frame(one, instruction, frame))]
        return [Loop(instruction.name, tuple(body), 1 if trips is None else trips)]
    if instruction.op == "conditional":
        branches = [
            steps_of(plan, Frame(one, instruction, frame)) for one in module.called(instruction)
        ]
        if expected := hlo_text.expected_branches(instruction):
            return [Branches(tuple(expected[1]), tuple(branches))]
        seconds = [serial_seconds(steps) for steps in branches]
        if max(seconds) > 1.1 * min(seconds) and max(seconds) > 1e-6:
            plan.unknown.append(f"branch that {instruction.label} takes: the longest is timed")
        return branches[seconds.index(max(seconds))]
    if instruction.op == "call":
        return steps_of(plan, frame.enter(module, instruction))
    return ()


def serial_seconds(steps: Sequence[Step], bandwidth: float = 1.0) -> float:
    """The time of steps with nothing beside anything."""
    total = 0.0
    for step in steps:
        if isinstance(step, Work):
            total += step.seconds
        elif isinstance(step, Start):
            total += step.transfer.route.duration(bandwidth)
        elif isinstance(step, Hosted):
            total += step.work.seconds
            total += sum(one.route.duration(bandwidth) for one in step.ends)
        elif isinstance(step, Loop):
            total += step.trips * serial_seconds(step.body, bandwidth)
        elif isinstance(step, Branches):
            for share, steps in zip(step.shares, step.branches, strict=True):
                total += share * serial_seconds(steps, bandwidth)
    return total


Pending = tuple[Transfer, Instruction | None]  # and the instruction that waits; None: at once


def _transfers(plan: Plan, frame: Frame, instruction: Instruction) -> list[Pending]:
    """What an instruction starts beside the core, or, if synchronous, in place of it."""
    op, computation = instruction.op, frame.computation
    if op in ("call-start", "async-start"):
        return _asynchronous(plan, frame, instruction)
    if op in ("copy-start", "slice-start", "dynamic-slice-start"):
        done = collectives.done_of(computation, instruction)
        moved = 0.0
        if done is not None:
            moved = instruction_costs.bytes_of(plan.analysis.module, computation, done)
        if "S(5)" in instruction.type:
            plan.unknown.append(f"time of {instruction.label}: a copy to or from the host's memory")
        if "S(1)" in instruction.type:
            moved /= 2  # to or from a TPU's on-chip memory: read or written once
        route = Route({COPIES: moved / (plan.core.bandwidth * plan.core.memory)})
        return [(Transfer(instruction.name, source_of(instruction), route, None), done)]
    if op == "send":
        listed, _ = collectives.read_send(plan.analysis, computation, instruction)
        done = collectives.reply_of(computation, instruction)
        return [(_sent(plan, instruction, one), done) for one in listed]
    if collective_kind(instruction):
        made = _exchange(plan, frame, instruction)
        synchronous = not op.endswith("-start") or instruction.configured("is_sync") == "true"
        done = None if synchronous else collectives.done_of(computation, instruction)
        return [(one, done) for one in made]
    if op in ("fusion-start", "custom-call-start"):
        plan.unknown.append(f"time of {instruction.label}: it runs beside the core")
    return []


def _asynchronous(plan: Plan, frame: Frame, start: Instruction) -> list[Pending]:
    """A computation on a core of its own, or a collective that is written as one."""
    done = collectives.done_of(frame.computation, start)
    made = []
    for step in steps_of(plan, frame.enter(plan.analysis.module, start)):
        if isinstance(step, Start):
            made.append((step.transfer, done))
        elif isinstance(step, Hosted):
            made += [(transfer, done) for transfer in step.ends]
        elif isinstance(step, Work | Loop):
            route = Route({STREAM: serial_seconds([step])})
            made.append((Transfer(start.name, source_of(start), route, None), done))
    return made


def _exchange(
    plan: Plan, frame: Frame, instruction: Instruction, *, fusion: Instruction | None = None
) -> list[Transfer]:
    """The transfer of a collective; none where nothing moves."""
    listed, _ = collectives.read_collective(plan.analysis, frame, instruction, fusion=fusion)
    return [_routed(plan, instruction, one) for one in listed]


def _routed(plan: Plan, instruction: Instruction, collective: Collective) -> Transfer:
    module = plan.analysis.module
    groups = None
    if module.num_replicas == 1:
        groups = hlo_text.groups_of(instruction, module.num_partitions)
    if not groups or max(max(group) for group in groups) >= module.num_partitions:
        groups = [range(module.num_partitions)]
        if collective.kind == "collective-permute":
            groups = [(0, 1)]
        plan.unknown.append(f"links of {instruction.label}: its groups cannot be parsed")
    route = plan.machine.route(collective.kind, collective.bytes, groups)
    line = _line(plan, instruction)
    return Transfer(collective.name, collective.source, route, collective, line)


def _sent(plan: Plan, send: Instruction, collective: Collective) -> Transfer:
    """What leaves a TPU slice, or a message between GPUs."""
    rates = getattr(plan.machine, "rates", None)
    if collective.kind == "send" and rates is not None:
        if rates.network is None:
            plan.unknown.append(f"time of {send.label}: the chip's network has no published figure")
        route = links.slices_route(collective.wire_bytes, rates)
        return Transfer(collective.name, collective.source, route, collective, _line(plan, send))
    pairs = collectives.pairs_of(send) or [(0, 1)]
    route = plan.machine.route("collective-permute", collective.bytes, pairs)
    return Transfer(collective.name, collective.source, route, collective, _line(plan, send))


def _hosts(plan: Plan, frame: Frame) -> tuple[dict, dict]:
    """By name of a fusion: the transfers that it carries on, and those that end with it."""
    hosts: dict[str, tuple[Transfer, ...]] = {}
    ends: dict[str, tuple[Transfer, ...]] = {}

    def carry(fusions: Sequence[Instruction], made: Sequence[Transfer]) -> None:
        for fusion in fusions:
            hosts[fusion.name] = (*hosts.get(fusion.name, ()), *made)
            ends.setdefault(fusion.name, ())
        ends[fusions[-1].name] += tuple(made)

    analysis, computation = plan.analysis, frame.computation
    for fusions, inside, part in collectives.chains_of(analysis, computation):
        first = Frame(inside, fusions[0], frame)
        made = _exchange(plan, first, part, fusion=fusions[0])
        names = {
            "name": ",".join(fusion.name for fusion in fusions),
            "line": next((line for one in (part, *fusions) if (line := _line(plan, one))), ""),
        }
        source = source_of(fusions[-1])
        carry(fusions, [
            dataclasses.replace(one, source=one.source or source, **names) for one in made
        ])  # fmt: skip
    for fusion in computation.instructions:
        if fusion.op != "fusion":
            continue
        contents = collectives.fusion_contents(analysis, fusion)
        chained = contents.chains().values()
        for inside, part in contents.collectives:
            if (inside, part) not in chained:
                carry([fusion], _exchange(plan, Frame(inside, fusion, frame), part, fusion=fusion))
    return hosts, ends

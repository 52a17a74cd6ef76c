"""The time of one step, read off the compiled program: an estimate, nothing is run.

The scheduled text is walked operation by operation. The core runs what the text issues, one after
the other; collectives and copies that have a start and an end run beside it on their links, in the
order of their starts, one at a time on each link, and the core waits at the end for what is left.
A synchronous collective stops the core. A collective that TPU fusions carry on ("async collective
fusion") advances only while one of its fusions computes, at no cost to it, and the last of them
waits for the rest; that it costs them nothing is an assumption. Bodies of loops are timed until an
iteration leaves the links as the one before did, and that one stands for all that remain.

`core_times` says how operations are timed, `links` how collectives are. Not modelled: contention
for memory between core and collectives, the cores of a GPU that a collective occupies, stragglers,
the host, and the input pipeline.
"""

import collections
import dataclasses
import math
from collections.abc import Iterable, Sequence
from fractions import Fraction

from llmx.aot import hlo_text, peak_memory, program, schedule
from llmx.aot.collectives import Analysis, Axes, sliced_mesh
from llmx.aot.core_times import Core
from llmx.aot.hlo_text import Frame
from llmx.aot.links import Machine
from llmx.aot.schedule import Branches, Hosted, Loop, Plan, Start, Step, Transfer, Wait, Work


@dataclasses.dataclass(frozen=True)
class Operation:
    """What the core spends on one instruction of the program in a step."""

    name: str
    source: str
    line: str  # of the source, "dot.py:119"; "": unknown
    seconds: float  # of all executions
    count: int
    basis: str  # "cycles" | "flops" | "bytes" | "kernel"


@dataclasses.dataclass(frozen=True)
class Exchange:
    """What one collective of the program takes in a step."""

    name: str  # as in `Collective.name`
    kind: str
    axes: tuple[str, ...] | None
    source: str
    line: str  # of the source, "dot.py:119"; "": unknown
    links: tuple[str, ...]
    seconds: float  # of all executions, from start to end on free links
    exposed: float  # seconds that the core waits for it
    bytes: float  # of all executions: whole arrays
    count: int

    @property
    def hidden(self) -> float:
        """The share of its time beside which the core computes."""
        return max(0.0, 1.0 - self.exposed / self.seconds) if self.seconds else 1.0


@dataclasses.dataclass(frozen=True)
class Event:
    """A box of the trace."""

    row: str
    name: str
    source: str
    start: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The estimated time of a step and its parts, in seconds."""

    step: float
    compute: float  # operations on the core
    copies: float  # that the core waits for copies within the device, or a second stream
    exposed: float  # that the core waits for collectives; step = compute + copies + exposed
    communication: float  # all collectives, from start to end on free links
    nothing_hidden: float  # the step with every collective stopping the core
    half_bandwidth: float  # the step with links of half the bandwidth
    infinite_bandwidth: float  # the step with latencies only
    kernel_flops: float  # of a step, in kernels that the text shows as one call
    operations: tuple[Operation, ...]  # longest first
    exchanges: tuple[Exchange, ...]  # most exposed first
    assumptions: tuple[str, ...]
    unknown: tuple[str, ...]
    events: tuple[Event, ...] = dataclasses.field(default=(), repr=False)

    @property
    def hidden(self) -> float:
        """The share of the collectives' time beside which the core computes."""
        return max(0.0, 1.0 - self.exposed / self.communication) if self.communication else 1.0


def read(
    text: str, mesh: Axes, *, machine: Machine, core: Core, across_slices: Sequence[str] = ()
) -> Timeline:
    """The timeline of the compiled program with this text.

    Args:
      mesh, across_slices: as for `program.read`.
      machine: the links between the program's logical devices.
      core: what one device computes in a second.

    Raises ValueError where the text is not that of a compiled program, or not of this mesh.
    """
    module = hlo_text.parse(text)
    analysis = Analysis(module, sliced_mesh(module, mesh, across_slices))
    plan = Plan(analysis, machine, core, peak_memory.source_lines(text))
    return of_steps(
        schedule.steps_of(plan, Frame(module.entry)),
        assumptions=core.assumptions, unknown=tuple(dict.fromkeys(plan.unknown)),
    )  # fmt: skip


def of_steps(
    steps: Sequence[Step], *, assumptions: Sequence[str] = (), unknown: Sequence[str] = ()
) -> Timeline:
    """The timeline of a program's steps."""
    run = _Run()
    run.all(steps)
    communication = sum(run.taken[one] for one in run.taken if one.collective is not None)
    return Timeline(
        step=run.now, compute=sum(seconds for seconds, _ in run.worked.values()),
        copies=sum(run.exposed[one] for one in run.exposed if one.collective is None),
        exposed=sum(run.exposed[one] for one in run.exposed if one.collective is not None),
        communication=communication,
        nothing_hidden=_seconds(steps, overlap=False), half_bandwidth=_seconds(steps, 0.5),
        infinite_bandwidth=_seconds(steps, math.inf),
        kernel_flops=sum(work.flops * float(count) for work, (_, count) in run.worked.items()),
        operations=_operations(run), exchanges=_exchanges(run),
        assumptions=tuple(assumptions), unknown=tuple(unknown), events=tuple(run.events),
    )  # fmt: skip


def _seconds(steps: Sequence[Step], bandwidth: float = 1.0, *, overlap: bool = True) -> float:
    run = _Run(bandwidth=bandwidth, overlap=overlap, keeps=False)
    run.all(steps)
    return run.now


def _operations(run: "_Run") -> tuple[Operation, ...]:
    made = [
        Operation(work.name, work.source, work.line, seconds, program.whole(count), work.basis)
        for work, (seconds, count) in run.worked.items()
    ]
    return tuple(sorted(made, key=lambda one: -one.seconds))


def _exchanges(run: "_Run") -> tuple[Exchange, ...]:
    made = []
    for transfer, seconds in run.taken.items():
        if (one := transfer.collective) is None:
            continue
        count = program.whole(run.counts[transfer])
        made.append(Exchange(
            transfer.name, one.kind, one.axes, transfer.source, transfer.line,
            tuple(transfer.route.seconds), seconds, run.exposed[transfer],
            float(one.bytes) * count, count,
        ))  # fmt: skip
    return tuple(sorted(made, key=lambda one: (-one.exposed, -one.seconds)))


# An iteration stands for the rest when it leaves the links as it found them, to this share of it.
_SAME = 1e-6
_MOST_ITERATIONS = 8  # then the last one stands for the rest
_MOST_EVENTS = 200_000


class _Run:
    """The state of a walk: what the core and the links have done so far."""

    def __init__(self, *, bandwidth: float = 1.0, overlap: bool = True, keeps: bool = True):
        self._bandwidth, self._overlap, self._keeps = bandwidth, overlap, keeps
        self.now = 0.0  # of the core
        self._free: dict[str, float] = {}  # by link: when its last transfer ends
        self._ends: dict[Transfer, float] = {}  # of those under way
        self._left: dict[Transfer, float] = {}  # seconds of those that fusions carry on
        self._weight = Fraction(1)  # iterations that the present one stands for
        self.worked: dict[Work, tuple[float, int]] = {}
        self.taken: dict[Transfer, float] = collections.defaultdict(float)
        self.exposed: dict[Transfer, float] = collections.defaultdict(float)
        self.counts: dict[Transfer, int] = collections.defaultdict(int)
        self.events: list[Event] = []

    def all(self, steps: Iterable[Step]) -> None:
        for step in steps:
            match step:
                case Work():
                    self._work(step)
                case Start(transfer):
                    self._start(transfer)
                case Wait(transfer):
                    self._wait(transfer, self._ends.pop(transfer, self.now))
                case Hosted():
                    self._hosted(step)
                case Loop():
                    self._loop(step)
                case Branches(shares, branches):
                    for share, steps in zip(shares, branches, strict=True):
                        self._branch(share, steps)

    def _work(self, work: Work) -> None:
        seconds, count = self.worked.get(work, (0.0, 0))
        self.worked[work] = seconds + float(self._weight) * work.seconds, count + self._weight
        self._event("core", work.name, work.source, self.now, work.seconds)
        self.now += work.seconds

    def _count(self, transfer: Transfer) -> float:
        """The duration of an execution that begins."""
        duration = transfer.route.duration(self._bandwidth)
        if transfer.collective is None:
            duration = transfer.route.duration()
        self.taken[transfer] += float(self._weight) * duration
        self.counts[transfer] += self._weight
        return duration

    def _start(self, transfer: Transfer) -> None:
        duration, begin = self._count(transfer), self._when_free(transfer, self.now)
        self._occupy(transfer, begin, duration)
        self._ends[transfer] = begin + duration
        if transfer.collective is not None and not self._overlap:
            self._wait(transfer, begin + duration)

    def _wait(self, transfer: Transfer, end: float) -> None:
        waited = max(0.0, end - self.now)
        self.exposed[transfer] += float(self._weight) * waited
        self._event("core", f"wait for {transfer.name}", transfer.source, self.now, waited)
        self.now += waited

    def _hosted(self, step: Hosted) -> None:
        for transfer in step.transfers:
            if transfer not in self._left:
                self._left[transfer] = self._count(transfer)
        begin = self.now
        self._work(step.work)
        for transfer in step.transfers if self._overlap else ():
            at = self._when_free(transfer, begin)
            advanced = min(self._left[transfer], max(0.0, self.now - at))
            self._left[transfer] -= advanced
            self._occupy(transfer, at, advanced)
        for transfer in step.ends:
            at, left = self._when_free(transfer, self.now), self._left.pop(transfer)
            self._occupy(transfer, at, left)
            self._wait(transfer, at + left if left else self.now)

    def _when_free(self, transfer: Transfer, earliest: float) -> float:
        """When all links of a transfer are free."""
        return max([earliest, *(self._free.get(link, 0.0) for link in transfer.route.seconds)])

    def _occupy(self, transfer: Transfer, begin: float, seconds: float) -> None:
        for link in transfer.route.seconds if seconds > 0 else ():
            self._free[link] = begin + seconds
            self._event(link, transfer.name, transfer.source, begin, seconds)

    def _loop(self, loop: Loop) -> None:
        weight, before, done = self._weight, None, 0
        earlier = set(self._ends), dict(self._free)  # that run on beside the loop
        while done < loop.trips:
            state, remaining = self._state(earlier[0]), loop.trips - done
            if before is not None and (_close(state, before) or done >= _MOST_ITERATIONS):
                self._weight = weight * remaining
            began = self.now
            self.all(loop.body)
            stands_for = round(self._weight / weight)
            done += stands_for
            skipped = (stands_for - 1) * (self.now - began)
            self._weight, before = weight, state
            if skipped:
                more = f"{remaining - 1} more iterations of {loop.name}"
                self._event("core", more, "", self.now, skipped)
                self._shift(skipped, *earlier)

    def _branch(self, share: Fraction, steps: Sequence[Step]) -> None:
        """What is done in a share of the iterations takes as large a share of its time in each."""
        if share:
            weight, began, earlier = self._weight, self.now, (set(self._ends), dict(self._free))
            shown = len(self.events)
            self._weight = weight * share
            self.all(steps)
            self._weight = weight
            self._shift((share - 1) * (self.now - began), *earlier)
            for number, event in enumerate(self.events[shown:], shown):
                start, seconds = began + share * (event.start - began), share * event.seconds
                self.events[number] = dataclasses.replace(event, start=start, seconds=seconds)

    def _state(self, earlier: set[Transfer]) -> dict:
        """What a next iteration finds, relative to now; without what began before the loop."""
        pending = {link: max(0.0, free - self.now) for link, free in self._free.items()}
        ends = {transfer: max(0.0, end - self.now) for transfer, end in self._ends.items()
                if transfer not in earlier}  # fmt: skip
        return pending | ends | {("left", one): left for one, left in self._left.items()}

    def _shift(self, seconds: float, earlier: set[Transfer], freed: dict[str, float]) -> None:
        """Skips time in which a loop goes on; transfers that began before it end when they did."""
        self.now += seconds
        for link, free in self._free.items():
            self._free[link] = free + (0.0 if freed.get(link) == free else seconds)
        for transfer, end in self._ends.items():
            self._ends[transfer] = end + (0.0 if transfer in earlier else seconds)

    def _event(self, row: str, name: str, source: str, start: float, seconds: float) -> None:
        if self._keeps and seconds > 0 and len(self.events) < _MOST_EVENTS:
            self.events.append(Event(row, name, source, start, seconds))


def _close(state: dict, other: dict) -> bool:
    """Whether two states differ by nothing that a step could notice."""
    return all(
        math.isclose(state.get(key, 0.0), other.get(key, 0.0), rel_tol=_SAME, abs_tol=1e-12)
        for key in state.keys() | other.keys()
    )


def to_trace(timeline: Timeline) -> dict:
    """A Chrome trace of the step, as Perfetto opens: one row for the core, one for each link."""
    rows = ["core", *sorted({event.row for event in timeline.events} - {"core"})]
    numbers = {row: number for number, row in enumerate(rows)}
    named = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": {"name": row}}
        for row, number in numbers.items()
    ]
    boxes = [
        {
            "ph": "X", "name": event.name, "pid": 0, "tid": numbers[event.row],
            "ts": event.start * 1e6, "dur": event.seconds * 1e6, "args": {"source": event.source},
        }
        for event in timeline.events
    ]  # fmt: skip
    title = {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "one device, estimated"}}
    return {"traceEvents": [title, *named, *boxes], "displayTimeUnit": "ms"}

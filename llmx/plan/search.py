"""The fastest configuration of a run on a machine, among all that fit into its memory.

Candidates (`candidates`) come in groups that compute the same. Groups, and in them rules of
`remat`, are looked at in the order of a lower bound of their time (`search_bounds`), and the search
ends where that bound is above the best that was found: what it leaves out is slower. What may be
faster is counted, first its memory, and if that fits its time. So the best is that of a full
enumeration, with some thousandths of its work.

The functions that count are arguments: any function of a resolved run in their place gives the best
by it, without bounds in a full enumeration.
"""

import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable
from typing import Protocol

from llmx import sharding
from llmx.config import Config
from llmx.plan import memory as memory_lib
from llmx.plan import sizes, step_time
from llmx.plan.candidates import Candidate, Group, Placement, Space, of_run
from llmx.plan.machines import Machine

ADMITTED = 0.95  # of a device's memory: what is counted has to leave room for what it misses
KEEP = 3  # of the fastest, that are surely those
MOST_SHOWN = 200
MOST_TOO_LARGE = 20  # of those that do not fit, the fastest by their bound
_ROUNDING = 1 - 1e-9  # of bounds

Progress = Callable[[float, str], None]


class Timed(Protocol):
    """Seconds of a step: what `step_time.StepTime` has."""

    parts: dict[str, float]
    step: float


class Bounds(Protocol):
    """What no candidate of a group can be below: `search_bounds.Bounds`."""

    def seconds_of_group(self, group: Group) -> float: ...

    def seconds(self, group: Group, text: str) -> float: ...

    def bytes(self, group: Group, text: str, placement: Placement | None = None) -> float: ...


def held(run: Config, machine: Machine) -> int | None:
    """Bytes of a device at the peak of a resolved run; None where it would not begin."""
    memory = memory_lib.on(sizes.of(run), machine.topology)
    return None if memory.refusal else memory.peak


@dataclasses.dataclass(frozen=True)
class Option:
    """A candidate that was counted."""

    candidate: Candidate
    memory: int  # bytes of a device
    fits: bool
    step: float  # seconds
    parts: dict[str, float]  # of the step

    @property
    def order(self) -> tuple:
        """The fastest first; of equals the one that holds least, then in a fixed order."""
        return self.step, self.memory, self.candidate


@dataclasses.dataclass(frozen=True)
class Found:
    """What a search found."""

    options: list[Option]  # that fit, the fastest first
    # A sample of those that do not fit; where nothing does, with those that hold least.
    too_large: list[Option]
    candidates: int
    counted: int  # of them, whose memory was
    fit: int  # of those
    bound: float  # seconds that no candidate is below, counted or not

    @property
    def best(self) -> Option | None:
        return self.options[0] if self.options else None

    @property
    def least(self) -> Option | None:
        """What holds least, where nothing fits; None where checks refuse every candidate."""
        return min(self.too_large, key=lambda one: one.memory, default=None)


@dataclasses.dataclass(eq=False)
class Search:
    """One config on one machine. What was counted is kept, for another search of it.

    memory, time: of a resolved run on a machine: bytes (None = it is refused), and seconds with
      their parts.
    bounds: below both; None: each candidate is counted.
    own: the run as it is configured, if it goes with the machine: it is a candidate too.
    """

    space: Space
    machine: Machine
    own: Config | None = None
    memory: Callable[[Config, Machine], int | None] = held
    time: Callable[[Config, Machine], Timed] = step_time.of
    bounds: Bounds | None = None
    _bytes: dict[Candidate, int | None] = dataclasses.field(default_factory=dict)
    _times: dict[Candidate, Timed] = dataclasses.field(default_factory=dict)

    def find(
        self, *, limit: float | None = None, keep: int = KEEP, most: int | None = None,
        progress: Progress | None = None,
    ) -> Found:  # fmt: skip
        """The fastest that fit.

        limit: bytes of a device that may be held; None: 95% of its memory. keep: of how many of the
        fastest it is certain that no other is faster. most: candidates that are counted; the search
        ends there, certain or not, once something fits; the plainest are counted beside these;
        None: as many as it takes. progress: told the share of the work
        that is done, and in words how far it is.
        """
        limit = ADMITTED * self.machine.topology.hbm_bytes if limit is None else limit
        walk = _Walk(self, limit, keep, most, progress)
        walk.run()
        options = sorted(walk.fitting, key=lambda one: one.order)
        too_large = [self.option(one, limit) for one in walk.too_large]
        total = self.space.count() + (self.own is not None)
        bound = min(walk.bound, options[0].step) if options else walk.bound
        return Found(options[:MOST_SHOWN], too_large, total, walk.counted, len(options), bound)

    def on(self, machine: Machine, bounds: Bounds | None) -> "Search":
        """The same on a machine with as much memory and other links."""
        return dataclasses.replace(self, machine=machine, bounds=bounds, _times={})

    def bytes_of(self, candidate: Candidate) -> int | None:
        """Of a device; None where a check or `memory` refuses it."""
        if candidate not in self._bytes:
            run = self.run_of(candidate)
            self._bytes[candidate] = None if run is None else self.memory(run, self.machine)
        return self._bytes[candidate]

    def option(self, candidate: Candidate, limit: float) -> Option:
        """A candidate that neither a check nor `memory` refuses, with its time."""
        if candidate not in self._times:
            self._times[candidate] = self.time(self.run_of(candidate), self.machine)
        time, size = self._times[candidate], self.bytes_of(candidate)
        return Option(candidate, size, size <= limit, time.step, dict(time.parts))

    def placed(self, candidate: Candidate, limit: float) -> Option | None:
        """`option`; None where its mesh has no place on the machine's torus."""
        try:
            return self.option(candidate, limit)
        except sharding.PlacementError:
            return None

    def run_of(self, candidate: Candidate) -> Config | None:
        if self.own is not None and candidate == of_run(self.own):
            return self.own
        return self.space.run(candidate)


def _splits_most(place: Placement) -> bool:
    """Whether the state is split over all devices."""
    return (place.layout, place.gather, place.data) == ("zero3", "layer", 1)


class _Walk:
    """One pass over the groups of a search."""

    def __init__(
        self, search: Search, limit: float, keep: int, budget: int | None, progress: Progress | None
    ):
        self.search, self.limit, self.keep = search, limit, keep
        self.budget = math.inf if budget is None else budget
        self.bound = math.inf  # of what was not looked at
        self.progress = progress or (lambda share, text: None)
        self.fitting: list[Option] = []
        self.too_large: list[Candidate] = []
        self.counted = 0
        self._skipped: list[tuple[float, int, Group, str]] = []  # bytes at least, more than fit
        self._best: list[float] = []  # the `keep` fastest, negative: a heap
        self._seen: set[Candidate] = set()

    def run(self) -> None:
        search = self.search
        if search.own is not None:
            self._count(of_run(search.own))
        if search.bounds is None:
            for candidate in search.space.all():
                self._count(candidate)
            return
        numbers, groups = itertools.count(), list(search.space.groups())
        for group in groups:
            self._count_plain(group)
        self.budget += self.counted
        heap: list[tuple[float, int, Group, str]] = [
            (search.bounds.seconds_of_group(group), next(numbers), group, "") for group in groups
        ]
        heapq.heapify(heap)
        done = 0
        while heap and heap[0][0] * _ROUNDING <= self.most:
            bound, _, group, text = heapq.heappop(heap)
            if not text:
                for text in search.space.remats_of(group):
                    item = (search.bounds.seconds(group, text), next(numbers), group, text)
                    if item[0] * _ROUNDING <= self.most:
                        heapq.heappush(heap, item)
                continue
            done += 1
            least = search.bounds.bytes(group, text)
            if least * _ROUNDING <= self.limit:
                least = self._count_group(group, text)
            if least * _ROUNDING > self.limit and not self.fitting:
                self._skipped.append((least, next(numbers), group, text))
            if done % 16 == 0:
                self._tell(bound)
            if self.counted >= self.budget and self.fitting:
                break
        if heap:
            self.bound = heap[0][0]
        if not self.fitting:
            self._count_smallest()

    def _count_smallest(self) -> None:
        """Where nothing fits, what holds least, so that it can be said how much that is."""
        counted = sorted(self.too_large, key=self.search.bytes_of)
        self.too_large = counted[: MOST_TOO_LARGE // 2]
        for _, _, group, text in sorted(self._skipped):
            self._count_group(group, text, rough=True)
            if len(self.too_large) >= MOST_TOO_LARGE:
                return

    @property
    def most(self) -> float:
        """Seconds that a candidate may take to be among the best."""
        return -self._best[0] if len(self._best) == self.keep else float("inf")

    def _count_plain(self, group: Group) -> None:
        """Before all others the plainest: no stages, the state split over all devices, and one or
        as many devices along `tensor` as along `sequence`. So a search that ends early is not
        behind them; it counts those that may be among the fastest."""
        search = self.search
        if group.stage > 1 or group.tensor != group.sequence:
            return
        for placement in filter(_splits_most, search.space.placements(group)):
            for text in sorted(
                search.space.remats_of(group), key=lambda text: search.bounds.seconds(group, text)
            ):
                least = search.bounds.bytes(group, text, placement)
                slow = search.bounds.seconds(group, text) * _ROUNDING > self.most
                if not slow and least * _ROUNDING <= self.limit:
                    self._count(search.space.candidate(group, placement, text), plain=True)

    def _count_group(self, group: Group, text: str, *, rough: bool = False) -> float:
        """All places of the state that may fit; none where the one that splits most is too large.
        But on GPUs whole parameters may take less, as gathers take copies of what is saved: with
        `rough`, where nothing may fit, they are left out there too. Returns the least bytes that
        any can take."""
        search, found = self.search, math.inf
        others = lambda place: not _splits_most(place)  # noqa: E731
        for placement in sorted(search.space.placements(group), key=others):
            least = search.bounds.bytes(group, text, placement)
            found = min(found, least)
            if least * _ROUNDING > self.limit and not rough:
                continue
            size = self._count(search.space.candidate(group, placement, text))
            too_large = size is not None and size > self.limit and not others(placement)
            if too_large and (rough or not search.machine.on_gpu):
                break
        return found

    def _count(self, candidate: Candidate, *, plain: bool = False) -> int | None:
        """Bytes of a device; None where a check or the search's `memory` refuses it. `plain`: it is
        none of the fastest that do not fit."""
        size = self.search.bytes_of(candidate)
        if candidate in self._seen:
            return size
        self._seen.add(candidate)
        self.counted += 1
        if size is None:
            return None
        if size > self.limit:
            more = len(self.too_large) < MOST_TOO_LARGE and not plain
            if more and self.search.placed(candidate, self.limit):
                self.too_large.append(candidate)
            return size
        option = self.search.placed(candidate, self.limit)
        if option is None:
            return None
        self.fitting.append(option)
        heapq.heappush(self._best, -option.step)
        if len(self._best) > self.keep:
            heapq.heappop(self._best)
        return size

    def _tell(self, bound: float) -> None:
        best = f"best {-max(self._best):.4g} s" if self._best else "nothing fits so far"
        share = min(1.0, bound / self.most) if self._best else 0.0
        self.progress(share, f"{self.counted:,} counted, {best}")

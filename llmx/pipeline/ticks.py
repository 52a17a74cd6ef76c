"""From a pipeline's table to a program for its stages: rows of operations, loops, buffer slots.

Stages run one program on arrays of one shape, so every stage has as many slots for a kind of value
as the stage that needs most. Slots and microbatches are data: int arrays over ticks and stages.
"""

import dataclasses
import functools
import itertools
import sys
from typing import Any, NamedTuple

import numpy as np

from llmx.pipeline import schedule
from llmx.pipeline.schedule import BACKWARD, FORWARD, IDLE, WEIGHT, Table
from llmx.pipeline.stages import ModelChunks

HEADLESS = -1  # beside FORWARD: see `loops_of`

# (microbatch, model chunk) -> (stage, first tick, last tick), both inclusive
Lifetimes = dict[tuple[int, int], tuple[int, int, int]]


class Row(NamedTuple):
    """Operations of ticks: int arrays [ticks, stages], or [ticks] where all stages take part.

    -1 = none. Microbatches of a periodic table's previous step are numbered after those of this
    one. Arrivals are by distance: the receiver's stage minus the sender's, modulo stages.
    """

    chunk: Any  # which of its stage's model chunks is worked on
    embedding: Any  # [ticks], the microbatch whose tokens are looked up
    is_first: Any  # 1 where the chunk is the model's first
    gradient_slot: Any  # read by BACKWARD
    gradient_arrivals: dict[int, Any]  # slot for what arrives at the end of the tick
    input_slot: Any  # read by FORWARD
    input_arrivals: dict[int, Any]
    save_slot: Any  # of saved activations, written by FORWARD
    saved_slot: Any  # read by BACKWARD
    kind: Any
    head: Any  # [ticks], the microbatch whose losses are computed
    head_gradient_slot: Any  # for the gradient that the head computes
    microbatch: Any
    deferred_slot: Any  # read by WEIGHT
    defer_slot: Any  # of deferred weight gradients, written by BACKWARD
    embedding_gradient: Any  # [ticks], the microbatch whose gradient reaches the embedding


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """What each stage does in each tick."""

    table: Table
    rows: Row
    slots: dict[str, int]  # of each buffer: inputs, gradients, saved, deferred
    loops: list[tuple[int, int, int]]  # (first tick, ticks in the body, iterations)
    # Of each chunk, whose weight gradients WEIGHT makes; BACKWARD makes those of the others.
    deferred_layers: int = sys.maxsize


def loops_of(kinds: list[frozenset[int]], head: int = 0) -> list[tuple[int, int, int]]:
    """Ticks with these kinds of operations as loops: (first, ticks in the body, iterations).

    Consecutive ticks of one kind are a loop, and so are ticks that take turns between two or three
    kinds. All ticks between the first and the last one with several kinds are one loop. `head`: the
    first tick in which losses are computed. Without ticks of several kinds, forward operations
    before and after it are told apart, so that in 1F1B all or none of a loop's have a head.
    """
    several = [tick for tick, kinds_of in enumerate(kinds) if len(kinds_of) > 1]
    if not several:
        kinds = [
            kinds_of | {HEADLESS} if kinds_of == {FORWARD} and tick < head else kinds_of
            for tick, kinds_of in enumerate(kinds)
        ]
    start, stop = (several[0], several[-1] + 1) if several else (len(kinds),) * 2

    def repeated(at, end):
        while at < end:
            loops = []
            for length in (1, 2, 3):
                pattern, times = kinds[at : at + length], 1
                while kinds[at + times * length : min(end, at + (times + 1) * length)] == pattern:
                    times += 1
                if length == 1 or times > 1:
                    loops.append((at, length, times))
            loop = max(loops, key=lambda loop: loop[1] * loop[2])
            yield loop
            at += loop[1] * loop[2]

    mixed = [(start, 1, stop - start)] if several else []
    return [*repeated(0, start), *mixed, *repeated(stop, len(kinds))]


@functools.lru_cache(maxsize=128)
def program(table: Table) -> Program:
    """Loops over the ticks of a table, and slots for all its values."""
    ticks = np.ndenumerate(schedule.operation_ticks(table))
    when = {operation: int(tick) for operation, tick in ticks if tick >= 0}
    lifetimes = _lifetimes(table, when)
    slot_of, slots = {}, {}
    for name, values in lifetimes.items():
        slot_of[name], slots[name] = _assigned(table, values)
    rows = _rows(table, when, slot_of)
    kinds = [frozenset(row) - {IDLE} for row in table.kind.tolist()]
    loops = loops_of(kinds, int(np.argmax(rows.head >= 0)))
    _fill_written(table, rows, lifetimes, slot_of, slots, loops)
    _fill_idle_microbatches(table, rows, slots["saved"])
    return Program(table, rows, slots, loops)


def _lifetimes(table: Table, when: dict[schedule.Operation, int]) -> dict[str, Lifetimes]:
    """By buffer, how long each value is needed."""
    stage_of, last = table.stage_of, table.num_chunks - 1
    lifetimes = {name: {} for name in ("inputs", "saved", "gradients", "deferred")}
    for (kind, m, k), tick in when.items():
        stage = stage_of[k]
        if kind == FORWARD:
            if k > 0:
                lifetimes["inputs"][m, k] = (stage, when[FORWARD, m, k - 1] + 1, tick)
            if (BACKWARD, m, k) in when:
                lifetimes["saved"][m, k] = (stage, tick, when[BACKWARD, m, k])
        elif kind == BACKWARD:
            came = when[FORWARD, m, k] if k == last else when[BACKWARD, m, k + 1]
            lifetimes["gradients"][m, k] = (stage, came + 1, tick)
            if (WEIGHT, m, k) in when:
                lifetimes["deferred"][m, k] = (stage, tick, when[WEIGHT, m, k])
    return lifetimes


def _assigned(table: Table, values: Lifetimes) -> tuple[dict[tuple[int, int], int], int]:
    """The slot of each value on its stage, and the number of slots of the stage with most."""
    slot_of, most = {}, 0
    for stage in range(table.num_stages):
        spans = {key: span for key, (at, *span) in values.items() if at == stage}
        if not spans:
            continue
        starts, ends = zip(*spans.values(), strict=True)
        if table.periodic:
            numbers, count = _periodic_slots(starts, ends, table.num_ticks)
        else:
            numbers, count = schedule.slots(starts, ends)
        slot_of |= dict(zip(spans, map(int, numbers), strict=True))
        most = max(most, int(count))
    return slot_of, most


def _rows(table: Table, when: dict, slot_of: dict[str, dict]) -> Row:
    """The rows of the table's operations, without what is written for `_fill_written`."""
    ticks, stages = table.kind.shape
    stage_of, last = table.stage_of, table.num_chunks - 1
    chunk_of = ModelChunks((1,) * table.num_chunks, tuple(stage_of)).local_index
    none = lambda *shape: np.full(shape, -1)  # noqa: E731
    reads = {"inputs": "input_slot", "saved": "saved_slot"}
    reads |= {"gradients": "gradient_slot", "deferred": "deferred_slot"}
    fields = {name: none(ticks, stages) for name in Row._fields}
    fields |= {name: none(ticks) for name in ("embedding", "head", "embedding_gradient")}
    fields |= {name: np.zeros((ticks, stages), int) for name in reads.values()}
    chunks = np.where(table.kind == IDLE, 0, np.array(chunk_of)[table.chunk])
    fields |= dict(chunk=chunks, is_first=(table.chunk == 0).astype(int), kind=table.kind)
    rows = Row(**fields | dict(input_arrivals={}, gradient_arrivals={}))
    arrivals = {"inputs": rows.input_arrivals, "gradients": rows.gradient_arrivals}
    microbatches = table.num_microbatches
    for tick, stage, (kind, m, k) in table.operations():
        number = m + when[kind, m, k] // ticks * microbatches
        rows.microbatch[tick, stage] = number
        for name, read in reads.items():
            getattr(rows, read)[tick, stage] = slot_of[name].get((m, k), 0)
        if kind == FORWARD and k == 0:
            rows.embedding[tick] = number
        if kind == FORWARD and k == last:
            rows.head[tick] = number
            rows.head_gradient_slot[tick, stage] = slot_of["gradients"].get((m, k), -1)
        if kind == BACKWARD and k == 0:
            rows.embedding_gradient[tick] = number
        name, to = {FORWARD: ("inputs", k + 1), BACKWARD: ("gradients", k - 1)}.get(kind, ("", -1))
        if (m, to) in slot_of.get(name, ()):
            distance = int(stage_of[to] - stage) % stages
            if distance not in arrivals[name]:
                for slots_by_distance in arrivals.values():
                    slots_by_distance[distance] = none(ticks, stages)
            arrivals[name][distance][tick, stage_of[to]] = slot_of[name][m, to]
    return rows


def _fill_written(table: Table, rows: Row, lifetimes, slot_of, slots, loops) -> None:
    """Sets the slots that operations write, in place.

    Where a loop's body has such an operation all stages write, those without one to a free slot,
    for which `slots` grows if it must.
    """
    for name, written, maker in (
        ("saved", rows.save_slot, FORWARD), ("deferred", rows.defer_slot, BACKWARD)
    ):  # fmt: skip
        if not lifetimes[name]:
            continue
        occupied = np.zeros((*table.kind.shape, slots[name] + 1), bool)  # one is always free
        for key, (stage, first, last) in lifetimes[name].items():
            during = np.arange(first, last + 1) % table.num_ticks
            occupied[during, stage, slot_of[name][key]] = True
        for first, length, times in loops:
            for body in range(length):
                ticks = range(first + body, first + length * times, length)
                makes = table.kind[ticks] == maker
                if not makes.any():
                    continue
                written[ticks] = np.argmin(occupied[ticks], axis=-1)
                for tick, stage in itertools.product(ticks, range(table.num_stages)):
                    if table.kind[tick, stage] == maker:
                        key = int(table.microbatch[tick, stage]), int(table.chunk[tick, stage])
                        written[tick, stage] = slot_of[name][key]
                slots[name] = max(slots[name], int(written[ticks].max()) + 1)


def _fill_idle_microbatches(table: Table, rows: Row, num_slots: int) -> None:
    """Sets the microbatch of idle stages, in place.

    In a tick of backward operations an idle stage differentiates what a slot holds, and needs the
    microbatch from which that was computed.
    """
    content = np.zeros((table.num_stages, num_slots + 1), int)
    for tick, stage in itertools.product(range(table.num_ticks), range(table.num_stages)):
        if table.kind[tick, stage] == IDLE:
            rows.microbatch[tick, stage] = content[stage, 0]
        if FORWARD in table.kind[tick]:
            content[stage, rows.save_slot[tick, stage]] = rows.microbatch[tick, stage]


def _periodic_slots(starts, ends, period: int) -> tuple[list[int], int]:
    """As `schedule.slots`, for values that come again every `period` ticks."""
    spans = list(zip(starts, ends, strict=True))
    alive = max(
        sum((end - tick) // period - (start - 1 - tick) // period for start, end in spans)
        for tick in range(period)
    )
    if alive > len(spans):
        raise ValueError(
            f"{alive} of {len(spans)} values are alive at a time in a period of {period} "
            "ticks: use a table with more microbatches"
        )
    # Blocks of at least as many values as are alive at a time, one block after the other.
    slots = np.empty(len(spans), int)
    blocks = np.array_split(np.argsort(starts), len(spans) // alive)
    for block in blocks:
        slots[block] = np.arange(len(block))
    return slots.tolist(), max(map(len, blocks))


def forwards(table: Table) -> Table:
    """The forward operations of a table alone, each as soon as it can be."""
    orders = [[] for _ in range(table.num_stages)]
    when = schedule.operation_ticks(table)[FORWARD]
    for microbatch, chunk in sorted(np.ndindex(when.shape), key=lambda pair: when[pair]):
        orders[table.stage_of[chunk]].append((FORWARD, microbatch, chunk))
    return schedule.schedule_asap("forward", orders)

"""From a pipeline's table to a program for stages: what each does in each tick, in which loop, and
where every value waits.

Stages run one program on arrays of one shape, so every stage has as many places for a kind of value
as the stage that needs most. Which place, and which microbatch, is data: int arrays over ticks and
stages.
"""

import dataclasses
import itertools

import numpy as np

from llmx.pipeline import schedule
from llmx.pipeline.schedule import BACKWARD, FORWARD, IDLE, WEIGHT, Table
from llmx.pipeline.stages import ModelChunks


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """What each stage does in each tick, with the places of all values: int arrays [ticks, stages],
    or [ticks] where all stages take part; -1 = none."""

    table: Table
    operation: dict[str, np.ndarray]
    arrivals: dict[int, dict[str, np.ndarray]]  # by how many stages further the receiver is
    places: dict[str, int]  # of each buffer
    loops: list[tuple[int, int, int]]  # (first tick, ticks in the body, iterations)


def runs(kinds: list[frozenset[int]]) -> list[tuple[int, int, int]]:
    """Ticks with these kinds of operations as loops: (first, ticks in the body, iterations).

    Ticks of one kind in a row are a loop, and so are ticks of one kind that alternate with those of
    another. All between the first and the last tick of several kinds are one.
    """
    several = [tick for tick, each in enumerate(kinds) if len(each) > 1]
    start, stop = (several[0], several[-1] + 1) if several else (len(kinds),) * 2
    found, at = [], 0
    while at < len(kinds):
        if at == start:
            found.append((start, 1, stop - start))
            at = stop
            continue
        end = start if at < start else len(kinds)
        covered = []
        for length in (1, 2):
            pattern, times = kinds[at : at + length], 1
            while kinds[at + times * length : min(end, at + (times + 1) * length)] == pattern:
                times += 1
            covered.append((length * times if times > 1 or length == 1 else 0, -length, times))
        _, length, times = max(covered)
        found.append((at, -length, times))
        at += -length * times
    return found


def program(table: Table) -> Program:
    """Places for all values of a table."""
    ticks, stages = table.kind.shape
    stage_of, last = table.stage_of, table.num_chunks - 1
    chunk_of = ModelChunks((1,) * table.num_chunks, tuple(stage_of)).local_index
    # (kind, microbatch, part) -> tick; of a periodic table, from the beginning of the period in
    # which the microbatch enters.
    counted = schedule.operation_ticks(table)
    when = {tuple(map(int, key)): int(counted[tuple(key)]) for key in np.argwhere(counted >= 0)}

    # Each value's stage and first and last tick, by (microbatch, part).
    lives = {name: {} for name in ("inputs", "kept", "gradients", "products")}
    for (kind, m, k), tick in when.items():
        stage = stage_of[k]
        if kind == FORWARD:
            if k > 0:
                lives["inputs"][m, k] = (stage, when[FORWARD, m, k - 1] + 1, tick)
            if (BACKWARD, m, k) in when:
                lives["kept"][m, k] = (stage, tick, when[BACKWARD, m, k])
        elif kind == BACKWARD:
            came = when[FORWARD, m, k] if k == last else when[BACKWARD, m, k + 1]
            lives["gradients"][m, k] = (stage, came + 1, tick)
            if (WEIGHT, m, k) in when:
                lives["products"][m, k] = (stage, tick, when[WEIGHT, m, k])
    place, places = {}, {}
    for name, values in lives.items():
        place[name], places[name] = {}, 0
        for stage in range(stages):
            here = {key: life[1:] for key, life in values.items() if life[0] == stage}
            if here:
                share = _shared_places if table.periodic else schedule.slots
                numbers, count = share(*zip(*here.values(), strict=True), *[ticks] * table.periodic)
                place[name] |= dict(zip(here, map(int, numbers), strict=True))
                places[name] = max(places[name], int(count))

    none = lambda *shape: np.full(shape, -1)  # noqa: E731
    kinds = [frozenset(row) - {IDLE} for row in table.kind.tolist()]
    loops = runs(kinds)
    made_in = {}  # by tick, the kinds of operations in its loop
    for first, length, times in loops:
        for at in range(length):
            ticks_of = range(first + at, first + length * times, length)
            made_in |= dict.fromkeys(ticks_of, frozenset().union(*(kinds[t] for t in ticks_of)))
    names = ("kind", "microbatch", "chunk", "first", "losing", "keeps", "puts", *lives)
    operation = {name: none(ticks, stages) for name in names}
    operation |= {name: none(ticks) for name in ("embeds", "loses", "unembeds")}
    arrivals = {}
    # In a tick of forward operations every stage keeps something: one without an operation where
    # nothing is. In a tick of backward operations it differentiates whatever was put in a place
    # last, with the microbatch that it was made from.
    taken = {
        name: [_taken(lives[name], place[name], stage, ticks) for stage in range(stages)]
        for name in ("kept", "products")
    }
    content = np.zeros((stages, places["kept"] + 1), int)
    for tick, stage in itertools.product(range(ticks), range(stages)):
        row = {name: array[tick] for name, array in operation.items()}
        kind, m, k = (int(a[tick, stage]) for a in (table.kind, table.microbatch, table.chunk))
        row["kind"][stage] = kind
        row["first"][stage] = k == 0
        if kind == IDLE:
            number, row["chunk"][stage] = content[stage, 0], 0
        else:
            row["chunk"][stage] = chunk_of[k]
            # Microbatches of the step before come after those of this one.
            age = when[kind, m, k] // ticks
            number = m + age * table.num_microbatches
        row["microbatch"][stage] = number
        for name in lives:
            row[name][stage] = place[name].get((m, k), 0)
        for name, column, maker in (("kept", "keeps", FORWARD), ("products", "puts", BACKWARD)):
            if kind == maker and (m, k) in place[name]:
                row[column][stage] = place[name][m, k]
            elif lives[name] and maker in made_in[tick]:
                there = taken[name][stage][tick]
                row[column][stage] = next(n for n in itertools.count() if n not in there)
                places[name] = max(places[name], int(row[column][stage]) + 1)
        if FORWARD in table.kind[tick]:
            content[stage, row["keeps"][stage]] = number
        if kind == FORWARD:
            if k == 0:
                operation["embeds"][tick] = number
            if k == last:
                operation["loses"][tick] = number
                row["losing"][stage] = place["gradients"].get((m, k), -1)
        if kind == BACKWARD and k == 0:
            operation["unembeds"][tick] = number
        name, to = {FORWARD: ("inputs", k + 1), BACKWARD: ("gradients", k - 1)}.get(kind, ("", -1))
        if (m, to) in place.get(name, ()):
            distance = int(stage_of[to] - stage) % stages
            came = arrivals.setdefault(
                distance, {name: none(ticks, stages) for name in ("inputs", "gradients")}
            )
            came[name][tick, stage_of[to]] = place[name][m, to]
    return Program(table, operation, arrivals, places, loops)


def _shared_places(starts, ends, period: int) -> tuple[list[int], int]:
    """As `pipeline.slots`, for values that come again every `period` ticks."""
    spans = list(zip(starts, ends, strict=True))
    alive = [
        sum((end - tick) // period - (start - 1 - tick) // period for start, end in spans)
        for tick in range(period)
    ]
    if max(alive) > len(spans):
        raise ValueError(
            f"{max(alive)} of {len(spans)} values are alive at a time in a period of {period} "
            "ticks: use a table with more microbatches"
        )
    # In blocks of at least as many as are alive at a time, one after the other.
    num_blocks = len(spans) // max(alive)
    in_turn = np.argsort(starts)
    blocks = np.array_split(in_turn, num_blocks)
    places = np.empty(len(spans), int)
    for block in blocks:
        places[block] = np.arange(len(block))
    return places.tolist(), max(map(len, blocks))


def _taken(lives: dict, place: dict, stage: int, ticks: int) -> list[set[int]]:
    """By tick, the places of a stage that are taken."""
    taken = [set() for _ in range(ticks)]
    for key, (at, first, end) in lives.items():
        if at == stage:
            for tick in range(first, end + 1):
                taken[tick % ticks].add(place[key])
    return taken


def forwards(table: Table) -> Table:
    """The forward operations of a table alone, each as soon as it can be."""
    when = schedule.operation_ticks(table)[FORWARD]
    orders = [
        sorted(
            ((FORWARD, m, k) for k in table.chunks_of(stage) for m in range(len(when))),
            key=lambda operation: when[operation[1:]],
        )
        for stage in range(table.num_stages)
    ]
    return schedule.schedule_asap("forward", orders)

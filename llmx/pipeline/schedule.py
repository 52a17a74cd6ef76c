"""Pipeline schedules as data: which stage does what in which tick, proved legal and timed.

Each stage holds one or more chunks, runs of consecutive layers of the model. A `Table` gives every
stage at most one operation per tick: the FORWARD or BACKWARD of one microbatch in one chunk, or,
in tables that split the gradients of weights off BACKWARD, its WEIGHT. Results travel at the end of
a tick. A tick lasts as long as its longest operation: FORWARD 1, BACKWARD 2 (1 where WEIGHT is
split off), WEIGHT 1, in forwards of one chunk.

Tables come from functions in `SCHEDULES`, from `schedule_asap` with an order of operations for each
stage, or from a file. `check` proves that a table is legal, `simulate` computes its times.

Letters: P stages, M microbatches, v chunks of a stage.
"""

import collections
import csv
import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Iterator, Sequence

import numpy as np

IDLE, FORWARD, BACKWARD, WEIGHT = range(4)
KINDS = ("idle", "forward", "backward", "weight")

# kind, microbatch, chunk
Operation = tuple[int, int, int]

MOST_PROBLEMS = 10  # that `check` lists


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """A pipeline schedule: one operation per tick and stage.

    `periodic`: one period of an endless run, without a flush between steps. An operation that
    stands before what it needs then belongs to the step before.
    """

    name: str
    kind: np.ndarray  # int [ticks, stages]
    microbatch: np.ndarray  # int [ticks, stages], -1 where idle
    chunk: np.ndarray  # int [ticks, stages], -1 where idle: 0..num_chunks-1, in the model's order
    periodic: bool = False

    @property
    def num_ticks(self) -> int:
        return self.kind.shape[0]

    @property
    def num_stages(self) -> int:
        return self.kind.shape[1]

    @property
    def num_microbatches(self) -> int:
        return int(self.microbatch.max()) + 1

    @property
    def num_chunks(self) -> int:
        return int(self.chunk.max()) + 1

    @property
    def chunks_per_stage(self) -> int:
        return self.num_chunks // self.num_stages

    @property
    def splits_backward(self) -> bool:
        """Whether BACKWARD makes the gradient of a chunk's input only, WEIGHT those of weights."""
        return bool((self.kind == WEIGHT).any())

    @functools.cached_property
    def num_mixed(self) -> int:
        """Ticks in which stages have operations of different kinds, and so take branches."""
        return sum(len(set(row) - {IDLE}) > 1 for row in self.kind.tolist())

    @property
    def mixes_kinds(self) -> bool:
        """Whether there are such ticks."""
        return self.num_mixed > 0

    @property
    def stage_of(self) -> np.ndarray:
        """int[num_chunks]: which stage holds each chunk."""
        found = np.full(self.num_chunks, -1)
        tick, stage = np.nonzero(self.kind)
        found[self.chunk[tick, stage]] = stage
        return found

    def chunks_of(self, stage: int) -> list[int]:
        """The chunks on a stage, in the model's order."""
        return np.flatnonzero(self.stage_of == stage).tolist()

    @property
    def costs(self) -> np.ndarray:
        """int[4]: how long an operation of each kind lasts, in forwards of one chunk."""
        return np.array([0, 1, 1 if self.splits_backward else 2, 1])

    def operations(self) -> Iterator[tuple[int, int, Operation]]:
        """Tick, stage and operation of each cell that is not idle, tick by tick."""
        for tick, stage in np.argwhere(self.kind != IDLE).tolist():
            cell = tick, stage
            operation = self.kind[cell], self.microbatch[cell], self.chunk[cell]
            yield tick, stage, tuple(map(int, operation))


def needs(operation: Operation, num_chunks: int) -> list[Operation]:
    """What must have been done in an earlier tick."""
    kind, microbatch, chunk = operation
    if kind == WEIGHT:
        return [(BACKWARD, microbatch, chunk)]
    if kind == FORWARD:
        return [(FORWARD, microbatch, chunk - 1)] if chunk else []
    later = [(BACKWARD, microbatch, chunk + 1)] if chunk + 1 < num_chunks else []
    return [(FORWARD, microbatch, chunk), *later]


# ----------------------------------------------------------------------------- making tables


def schedule_asap(
    name: str, orders: Sequence[Sequence[Operation]], *,
    turns: Sequence[Sequence[int]] = ((FORWARD, BACKWARD, WEIGHT),),
) -> Table:  # fmt: skip
    """The table in which each stage does its `orders`, every operation as soon as it can.

    `turns`: the kinds of operation that consecutive ticks may hold, in a cycle; ticks without work
    are left out. Example: docs/pipeline.md. Raises ValueError where orders wait for each other.
    """
    left = [collections.deque(order) for order in orders]
    num_chunks = 1 + max((chunk for order in orders for _, _, chunk in order), default=0)
    done, rows, empty = set(), [], 0
    for kinds in itertools.cycle(turns):
        ready = [
            bool(order) and order[0][0] in kinds and done.issuperset(needs(order[0], num_chunks))
            for order in left
        ]
        empty = 0 if any(ready) else empty + 1
        if empty > len(turns):
            break
        row = [order.popleft() if go else None for order, go in zip(left, ready, strict=True)]
        if any(row):
            done.update(filter(None, row))
            rows.append([cell or (IDLE, -1, -1) for cell in row])
    stuck = [
        f"stage {stage} waits with {text(order[0])} for "
        + " and ".join(text(need) for need in needs(order[0], num_chunks) if need not in done)
        for stage, order in enumerate(left)
        if order
    ]
    if stuck:
        raise ValueError(f"{name}: no stage can continue: {'; '.join(stuck)}")
    return Table(name, *np.moveaxis(np.array(rows, int).reshape(-1, len(orders), 3), 2, 0))


# Microbatch and chunk; None = a turn without an operation.
Pairs = list[tuple[int, int] | None]


def in_phases(
    forwards: Pairs, backwards: Pairs, phases: Sequence[tuple[str, int]]
) -> list[Operation]:
    """The order of a stage: the letters of each phase, as many times as it says.

    F is the next of `forwards`, B the next of `backwards`, W the WEIGHT of the oldest B that has
    none yet; nothing where none is left.
    """
    forwards, backwards = iter(forwards), iter(backwards)
    waiting, order = collections.deque(), []
    for letter in itertools.chain(*(letters * times for letters, times in phases)):
        if letter == "W":
            order.extend([(WEIGHT, *waiting.popleft())] if waiting else [])
        elif letter == "F":
            order.extend((FORWARD, *pair) for pair in [next(forwards, None)] if pair)
        elif pair := next(backwards, None):
            order.append((BACKWARD, *pair))
            waiting.append(pair)
    return order


def text(operation: Operation) -> str:
    """An operation in words."""
    kind, microbatch, chunk = operation
    return f"{KINDS[kind].upper()} of microbatch {microbatch} in chunk {chunk}"


# ------------------------------------------------------------------------------ what a table is


@dataclasses.dataclass(frozen=True, eq=False)
class Facts:
    """What `check` finds of a legal table. Times are in whole stages' forwards."""

    length: float  # of all ticks
    busy: float  # what a stage works of it: 3 per microbatch
    bubble: float  # fraction of the length that a stage idles, mean over stages
    # int[stages]: the most pairs of chunk and microbatch at once ...
    peak_stash: np.ndarray  # ... between FORWARD and the last use of what it saved
    peak_waiting_weights: np.ndarray  # ... between BACKWARD and WEIGHT


def check(table: Table) -> Facts:
    """Proves that a table does each operation once, after what it needs, on one stage per chunk.

    A periodic table must end each step before the end of the next period, for two versions of the
    weights to be enough. Raises ValueError with the first problems found.
    """
    for problems in (_wrong_cells(table), _wrong_counts(table), _wrong_times(table)):
        if found := list(itertools.islice(problems, MOST_PROBLEMS + 1)):
            more = found[MOST_PROBLEMS:] and ["... and more"]
            lines = "\n  ".join(found[:MOST_PROBLEMS] + more)
            raise ValueError(f"table {table.name!r} is not a legal schedule:\n  {lines}")
    work = table.costs[table.kind]
    length, busy = work.max(axis=1).sum(), work.sum(axis=0).mean()  # in forwards of one chunk
    waiting = held(table, BACKWARD, WEIGHT) if table.splits_backward else np.zeros_like(table.kind)
    return Facts(
        length=float(length / table.chunks_per_stage),
        busy=float(busy / table.chunks_per_stage),
        bubble=float(1 - busy / length),
        peak_stash=stash(table).max(axis=0),
        peak_waiting_weights=waiting.max(axis=0),
    )


def _wrong_cells(table: Table) -> Iterator[str]:
    shape = table.kind.shape
    if len(shape) != 2 or not table.kind.size or not table.kind.any():
        yield f"kind is {list(shape)}: it must be [ticks, stages], with an operation in it"
        return
    for name in ("kind", "microbatch", "chunk"):
        array = getattr(table, name)
        if array.shape != shape or not np.issubdtype(array.dtype, np.integer):
            yield f"{name} is {array.dtype}{list(array.shape)}: it must be int{list(shape)}"
            return
    wrong = (table.kind < IDLE) | (table.kind > WEIGHT)
    for array in (table.microbatch, table.chunk):
        wrong |= np.where(table.kind == IDLE, array != -1, array < 0)
    for tick, stage in np.argwhere(wrong).tolist():
        cell = tick, stage
        yield (
            f"tick {tick}, stage {stage}: kind {table.kind[cell]}, microbatch "
            f"{table.microbatch[cell]}, chunk {table.chunk[cell]}: kinds are 0 to 3, the others "
            "from 0 on, and -1 where idle"
        )
    for name, axis in (("tick", 1), ("stage", 0)):
        for index in np.flatnonzero(~table.kind.any(axis=axis)).tolist():
            yield f"{name} {index} has no operation: leave it out"


def _wrong_counts(table: Table) -> Iterator[str]:
    """Operations that appear twice or are missing, chunks on several stages."""
    stages = collections.defaultdict(collections.Counter)
    for _, stage, (*_, chunk) in table.operations():
        stages[chunk][stage] += 1
    stage_of = {chunk: count.most_common(1)[0][0] for chunk, count in stages.items()}
    seen = {}
    for tick, stage, operation in table.operations():
        where = f"tick {tick}, stage {stage}: {text(operation)}"
        if operation in seen:
            yield f"{where} is done already in {seen[operation]}"
        seen.setdefault(operation, f"tick {tick}, stage {stage}")
        if (home := stage_of[operation[2]]) != stage:
            yield f"{where}: stage {home} holds this chunk"
    kinds = [FORWARD, BACKWARD] + [WEIGHT] * table.splits_backward
    sizes = range(table.num_microbatches), range(table.num_chunks)
    for operation in itertools.product(kinds, *sizes):
        if operation not in seen:
            yield f"{text(operation)} is missing"
    counts = np.bincount(list(stage_of.values()), minlength=table.num_stages)
    if len(set(counts[counts > 0])) > 1:
        yield f"stages hold {counts.tolist()} chunks: give each stage as many"


def _wrong_times(table: Table) -> Iterator[str]:
    ticks = operation_ticks(table)
    for tick, stage, operation in table.operations():
        where = f"tick {tick}, stage {stage}: {text(operation)}"
        for need in needs(operation, table.num_chunks):
            if ticks[need] >= ticks[operation]:
                yield f"{where} needs {text(need)} in an earlier tick, and it is in {ticks[need]}"
        if table.periodic and ticks[operation] >= 2 * table.num_ticks:
            yield (
                f"{where} comes {ticks[operation] // table.num_ticks} periods after its step "
                "began, at most 1 may: it would take a third version of the weights; use more "
                "microbatches"
            )


def operation_ticks(table: Table) -> np.ndarray:
    """int[4, microbatches, chunks]: the tick of each operation by its kind, -1 where there is none.

    In a periodic table, ticks count from the start of the period in which the step starts.
    """
    ticks = np.full((len(KINDS), table.num_microbatches, table.num_chunks), -1)
    for tick, _, operation in table.operations():
        ticks[operation] = tick
    if table.periodic:
        path = [(FORWARD, chunk) for chunk in range(table.num_chunks)]
        path += [(BACKWARD, chunk) for chunk in reversed(range(table.num_chunks))]
        for (kind, chunk), (before, earlier) in zip(path[1:], path, strict=False):
            _after(ticks[kind, :, chunk], ticks[before, :, earlier], table.num_ticks)
        if table.splits_backward:
            _after(ticks[WEIGHT], ticks[BACKWARD], table.num_ticks)
    return ticks


def _after(ticks: np.ndarray, earlier: np.ndarray, period: int) -> None:
    """Moves `ticks` by whole periods to the first that are after `earlier`."""
    ticks += period * (earlier // period)
    ticks += period * (ticks <= earlier)


def held(table: Table, first: int, last: int) -> np.ndarray:
    """int[ticks, stages]: pairs of chunk and microbatch from operation `first` to `last`.

    The pair counts in both ticks, and in all between them.
    """
    ticks, stage_of = operation_ticks(table), table.stage_of
    count = np.zeros(table.kind.shape, int)
    for chunk in range(table.num_chunks):
        for start, end in zip(ticks[first, :, chunk], ticks[last, :, chunk], strict=True):
            np.add.at(count[:, stage_of[chunk]], np.arange(start, end + 1) % table.num_ticks, 1)
    return count


def stash(table: Table) -> np.ndarray:
    """int[ticks, stages]: pairs of chunk and microbatch whose activations a stage holds."""
    return held(table, FORWARD, WEIGHT if table.splits_backward else BACKWARD)


def slots(starts: Sequence[int], ends: Sequence[int]) -> tuple[np.ndarray, int]:
    """The fewest buffers for intervals [start, end], both inclusive: slot of each, their number.

    Intervals that share a slot do not overlap: each gets the first slot that is free.
    """
    slot, last_use = np.zeros(len(starts), int), {}
    for index in np.argsort(starts, kind="stable"):
        free = (number for number, end in last_use.items() if end < starts[index])
        slot[index] = number = next(free, len(last_use))
        last_use[number] = ends[index]
    return slot, len(last_use)


# ------------------------------------------------------------------------------------- its file

COLUMNS = ("tick", "stage", "operation", "microbatch", "chunk")


def write_csv(table: Table, path: str | pathlib.Path) -> None:
    """Writes one row with the COLUMNS per operation: forward, backward or weight.

    The first line is the comment `# name: ...`, the second `# periodic` if the table is.
    """
    with open(path, "w", newline="") as file:
        file.write(f"# name: {table.name}\n" + "# periodic\n" * table.periodic)
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for tick, stage, (kind, microbatch, chunk) in table.operations():
            writer.writerow((tick, stage, KINDS[kind], microbatch, chunk))


def read_csv(path: str | pathlib.Path) -> Table:
    """The table of a file as `write_csv` writes it; `check` it before use.

    Rows may come in any order, without the comments. Raises ValueError with file and line.
    """
    path = pathlib.Path(path)
    name, periodic, header, cells = path.stem, False, None, {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        row, where = [word.strip() for word in line.split(",")], f"{path}:{number}: {line!r}"
        if line.startswith("# name:"):
            name = line.removeprefix("# name:").strip()
        elif line.strip() == "# periodic":
            periodic = True
        elif not line.strip() or line.startswith("#"):
            continue
        elif header is None:
            header = tuple("chunk" if word == "part" else word for word in row)  # its older name
            if header != COLUMNS:
                raise ValueError(f"{where}: the columns are {','.join(COLUMNS)}")
        else:
            cell, operation = _read_row(row, where)
            if cell in cells:
                raise ValueError(
                    f"{where}: stage {cell[1]} has {text(cells[cell])} in tick {cell[0]} already: "
                    "one operation per tick and stage"
                )
            cells[cell] = operation
    if not cells:
        raise ValueError(f"{path}: no operation in it: write {','.join(COLUMNS)} and rows of it")
    ticks, stages = map(set, zip(*cells, strict=True))
    for column, numbers in (("tick", ticks), ("stage", stages)):
        if gaps := set(range(len(numbers))) - numbers:
            raise ValueError(
                f"{path}: {column} {min(gaps)} has no row, {max(numbers)} has: count from 0 on "
                "without gaps"
            )
    table = np.tile([IDLE, -1, -1], (len(ticks), len(stages), 1))
    for cell, operation in cells.items():
        table[cell] = operation
    return Table(name, *np.moveaxis(table, 2, 0), periodic=periodic)


def _read_row(row: list[str], where: str) -> tuple[tuple[int, int], Operation]:
    if len(row) != len(COLUMNS):
        raise ValueError(f"{where}: {len(row)} values: the columns are {','.join(COLUMNS)}")
    tick, stage, operation, microbatch, chunk = row
    if operation not in KINDS[FORWARD:]:
        raise ValueError(f"{where}: operation {operation!r}: use one of {', '.join(KINDS[1:])}")
    for column, word in zip(COLUMNS, row, strict=True):
        if column != "operation" and not (word.isascii() and word.isdigit()):
            raise ValueError(f"{where}: {column} {word!r} is no integer from 0 on")
    return (int(tick), int(stage)), (KINDS.index(operation), int(microbatch), int(chunk))

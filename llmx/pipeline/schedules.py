"""Pipeline schedules by name, as functions that make their tables, and tables from files."""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence

import numpy as np

from llmx.pipeline import schedule
from llmx.pipeline.schedule import BACKWARD, FORWARD, WEIGHT, Table
from llmx.runtime import bounds
from llmx.runtime.bounds import bounded, choice


@dataclasses.dataclass
class PipelineConfig:
    """What the stages of a mesh do; its microbatches are `batch.accumulation`."""

    # a name in schedules.SCHEDULES
    schedule: str = choice(
        "1f1b", lambda: SCHEDULES, needs={"mesh.stage": {"not": (1,)}, "pipeline.table": ("",)}
    )
    table: str = ""  # a CSV file with a schedule of your own, in place of `schedule`
    # chunks of the model on each stage; 0 = the schedule's least
    virtual_stages: int = bounded(0, at_least=0)
    layers: tuple[int, ...] = ()  # of each chunk, in the model's order; () = as equal as possible
    # pipedream_2bw: batches enter with weights predicted along the last update, and an update takes
    # all microbatches that a stage has completed, of two batches
    predict: bool = False
    # zero bubble: GiB of a device, within which the weight gradients of as many layers as fit are
    # deferred; 0 = two thirds of the chip's, nine tenths for one layer
    memory_gib: float = bounded(0.0, at_least=0)


ALTERNATING = ((FORWARD,), (BACKWARD,))


def gpipe(stages: int, microbatches: int, virtual_stages: int = 1) -> Table:
    """All forwards, then all backwards (arXiv 1811.06965). Bubble (P-1) / (M+P-1)."""
    P, M = stages, microbatches
    _refuse_sizes("gpipe", P, M, virtual_stages, takes=1)
    pairs = [[(m, stage) for m in range(M)] for stage in range(P)]
    orders = [schedule.in_phases(own, own, [("F", M), ("B", M)]) for own in pairs]
    return schedule.schedule_asap("gpipe", orders, turns=ALTERNATING)


def one_f_one_b(stages: int, microbatches: int, virtual_stages: int = 1) -> Table:
    """One forward, one backward (PipeDream-flush, arXiv 2006.09503), in ticks of one kind.

    Bubble (P-1) / (M+P-1). Stages alternate together, so stage s holds up to 2(P-1-s) + 1
    microbatches; stages that run freely would hold P-s.
    """
    _refuse_sizes("1f1b", stages, microbatches, virtual_stages, takes=1)
    return _alternating("1f1b", stages, microbatches, 1)


def interleaved_1f1b(stages: int, microbatches: int, virtual_stages: int = 2) -> Table:
    """1F1B with v chunks on a stage, chunk k on stage k % P (arXiv 2104.04473), ticks of one kind.

    Bubble (P-1) / (vM+P-1) from M = P on. Microbatches go through a stage's chunks in groups of P
    to 2P-1, so that any M is legal. With groups of up to g, stage s holds up to
    2(P-1-s) + (v-1)g + 1 pairs of chunk and microbatch.
    """
    _refuse_sizes("interleaved_1f1b", stages, microbatches, virtual_stages)
    return _alternating("interleaved_1f1b", stages, microbatches, virtual_stages)


def _alternating(name: str, P: int, M: int, v: int) -> Table:
    groups = [group.tolist() for group in np.array_split(np.arange(M), max(M // P, 1))]

    def order(stage):
        chunks = range(stage, v * P, P)
        forwards, backwards = (
            [(m, chunk) for group in groups for chunk in turn for m in group]
            for turn in (chunks, chunks[::-1])
        )
        ahead = 2 * (P - 1 - stage) + (v - 1) * max(map(len, groups)) + 1
        return schedule.in_phases(forwards, backwards, [("F", ahead), ("BF", v * M)])

    return schedule.schedule_asap(name, [order(stage) for stage in range(P)], turns=ALTERNATING)


def zb_1f1b(stages: int, microbatches: int, virtual_stages: int = 1) -> Table:
    """1F1B or interleaved 1F1B with gradients of weights in ticks of their own (ZB-1F1B).

    Ticks are of one kind, so no stage waits for another's longer operation, whatever operations
    take, and none takes a branch. A bubble is idle for FORWARD and BACKWARD but not for WEIGHT:
    (M + (P-1)/v) (F + B) + M W from M = P on, in times of a stage. Stage s holds what it holds with
    1F1B, and the factors of up to s + 1 pairs of chunk and microbatch. Zero bubble's idea
    (arXiv 2401.10241) for stages in lockstep.
    """
    P, M = stages, microbatches
    _refuse_sizes("zb_1f1b", P, M, virtual_stages, takes=None)
    plain = _alternating("zb_1f1b", P, M, virtual_stages)
    rows, waiting = [], [collections.deque() for _ in range(P)]
    for row in np.stack([plain.kind, plain.microbatch, plain.chunk], -1).tolist():
        rows.append(row)
        for queue, (kind, *pair) in zip(waiting, row, strict=True):
            queue.extend([pair] * (kind == BACKWARD))
        if all(waiting):
            rows.append([(WEIGHT, *queue.popleft()) for queue in waiting])
    return Table("zb_1f1b", *np.moveaxis(np.array(rows), 2, 0))


def zb_h1(stages: int, microbatches: int, virtual_stages: int = 1) -> Table:
    """ZB-H1 (arXiv 2401.10241): gradients of weights fill what 1F1B leaves idle.

    3M + P-1 ticks from M = P on, a third of the bubble of 1F1B; P-M more below. A stage holds up to
    P microbatches. Stage s leaves the gradients of weights of s microbatches for the end.
    """
    P, M = stages, microbatches
    _refuse_sizes("zb_h1", P, M, virtual_stages, takes=1)

    def order(stage):
        pairs = [(m, stage) for m in range(M)]
        phases = [("F", P - stage), ("BF", stage), ("BWF", M - P), ("BW", M), ("W", M)]
        return schedule.in_phases(pairs, pairs, phases)

    return schedule.schedule_asap("zb_h1", [order(stage) for stage in range(P)])


def zb_v(stages: int, microbatches: int, virtual_stages: int = 2) -> Table:
    """ZB-V (arXiv 2401.10241, 2405.15362): two chunks on a stage, down the stages and up again.

    6M + P-1 ticks of one chunk from M = 3P/2 on, of which a stage idles in P-1; below it idles in
    2(2P-1-M). A stage holds up to 2P pairs of chunk and microbatch, as much as P microbatches. The
    order is that of PyTorch's ScheduleZBVZeroBubble.
    """
    P, M = stages, microbatches
    _refuse_sizes("zb_v", P, M, virtual_stages, takes=2)
    most = max(M, 2 * P - 1)  # of fewer microbatches those that are not there are left out

    def order(stage):
        after = P - 1 - stage
        return _v_order(P, M, stage, [
            ("F0", 2 * after + 1), ("F1 F0", stage), ("F1 B1 W1", after + 1),
            ("F0 B0 W0 F1 B1 W1", most - 2 * after - 1 - stage), ("B0 W0 F1 B1 W1", after),
            ("B0 B1", stage), ("B0 W0", after + 1), ("W1", most), ("W0", most),
        ])  # fmt: skip

    return schedule.schedule_asap("zb_v", [order(stage) for stage in range(P)])


def dual_pipe_v(stages: int, microbatches: int, virtual_stages: int = 2) -> Table:
    """DualPipeV (github.com/deepseek-ai/DualPipe): chunks as in `zb_v`, DualPipe's eight phases.

    Needs M >= 2P; then a stage holds up to 2P+1 pairs of chunk and microbatch. The order is that of
    PyTorch's ScheduleDualPipeV, with a whole backward as BACKWARD and WEIGHT, and what overlaps
    there (a forward beside a backward) one after the other.
    """
    P, M = stages, microbatches
    _refuse_sizes("dual_pipe_v", P, M, virtual_stages, takes=2)
    if M < 2 * P:
        raise ValueError(
            f"dual_pipe_v with microbatches={M} on stages={P}: its phases need at least "
            f"{2 * P} microbatches; use more, or zb_v, which takes any number"
        )

    def order(stage):
        before, after = stage + 1, P - 1 - stage
        whole = "B{0} W{0}".format
        # The second half of the last backwards of both chunks leave their WEIGHT for later.
        half, odd = before // 2, stage % 2
        last = [*[f"{whole(1)} {whole(0)}"] * half, "B1 B0" if odd else f"{whole(1)} B0"]
        last = (last + ["B1 B0"] * before)[:before]
        return _v_order(P, M, stage, [
            ("F0", 2 * after), ("F0 F1", before), ("B1 W1 F1", after),
            (f"F0 {whole(1)} F1 {whole(0)}", M - 2 * P + before),
            (f"{whole(1)} F1 {whole(0)}", after), *((letters, 1) for letters in last),
            ("W B0", after), ("W", before),
        ])  # fmt: skip

    return schedule.schedule_asap("dual_pipe_v", [order(stage) for stage in range(P)])


def _v_order(
    P: int, M: int, stage: int, phases: Sequence[tuple[str, int]]
) -> list[schedule.Operation]:
    """The order of the stage with chunks `stage` and as far from the end: words of each phase.

    F0, F1: the next FORWARD of the first or second chunk; B0, B1 likewise; W0, W1: the WEIGHT of
    the oldest BACKWARD of that chunk without one; W: of any chunk. Microbatches from M on, and
    WEIGHTs that are not due, are left out.
    """
    chunks, kinds = (stage, 2 * P - 1 - stage), {"F": FORWARD, "B": BACKWARD}
    count, waiting, order = collections.Counter(), [], []
    for word in itertools.chain(*(words.split() * times for words, times in phases)):
        letter, which = word[0], word[1:]
        if letter == "W":
            due = [pair for pair in waiting if not which or pair[1] == chunks[int(which)]]
            for pair in due[:1]:
                waiting.remove(pair)
                order.append((WEIGHT, *pair))
            continue
        pair = count[word], chunks[int(which)]
        count[word] += 1
        if pair[0] < M:
            order.append((kinds[letter], *pair))
            waiting += [pair] * (letter == "B")
    return order


def pipedream_2bw(stages: int, microbatches: int, virtual_stages: int = 1) -> Table:
    """PipeDream-2BW (arXiv 2006.09503): 1F1B without a flush, one period of it. No bubble.

    Microbatch j is forward on stage s in round s+j and backward in 2(P-1)-s+j, modulo M. A step's
    update comes at the end of the next period: two versions of the weights are enough from
    M = 2P-2 on. From M = 2P-1 on the next period's activations do not replace any still in use.
    """
    P, M = stages, microbatches
    _refuse_sizes("pipedream_2bw", P, M, virtual_stages, takes=1)
    if M < 2 * P - 1:
        raise ValueError(
            f"pipedream_2bw with microbatches={M} on stages={P}: stage 0 would have "
            f"{2 * P - 1} in flight, more than a period has; use at least {2 * P - 1} microbatches"
        )
    stage = np.arange(P)
    kind, microbatch = np.empty((2, 2 * M, P), int)
    for turn, offset in enumerate((stage, 2 * (P - 1) - stage)):
        kind[turn::2] = FORWARD + turn
        microbatch[turn::2] = (np.arange(M)[:, None] - offset) % M
    chunk = np.broadcast_to(stage, kind.shape)
    return Table("pipedream_2bw", kind, microbatch, chunk, periodic=True)


def _refuse_sizes(
    name: str, stages: int, microbatches: int, virtual: int, *, takes: int | None = 0
):
    """Raises ValueError; `takes` is the one number of chunks per stage that the schedule has, 0 = 2
    or more, None = any number."""
    sizes = {"stages": stages, "microbatches": microbatches}
    sizes |= {"virtual_stages": virtual} if takes is None else {}
    for size, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} with {size}={value}: use at least 1")
    if takes and virtual != takes:
        raise ValueError(
            f"{name} with virtual_stages={virtual}: it has {takes} per stage; use {takes}, or "
            "interleaved_1f1b or zb_1f1b, which take more"
        )
    if takes == 0 and virtual < 2:
        raise ValueError(f"{name} with virtual_stages={virtual}: use at least 2, or 1f1b")


SCHEDULES: dict[str, Callable[..., Table]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved_1f1b": interleaved_1f1b,
    "zb_1f1b": zb_1f1b,
    "zb_h1": zb_h1,
    "zb_v": zb_v,
    "dual_pipe_v": dual_pipe_v,
    "pipedream_2bw": pipedream_2bw,
}


@functools.lru_cache(maxsize=128)
def _named(name: str, stages: int, microbatches: int, virtual_stages: int) -> Table:
    virtual = {"virtual_stages": virtual_stages} if virtual_stages else {}
    table = SCHEDULES[name](stages, microbatches, **virtual)
    schedule.check(table)
    return table


def table_of(config: PipelineConfig, *, stages: int, microbatches: int) -> Table:
    """The legal table that `config` names.

    Raises ValueError, naming the key, where there is none for so many stages and microbatches.
    """
    if config.table:
        where = f"pipeline.table={config.table!r}"
        try:
            table = schedule.read_csv(config.table)
        except OSError as error:
            raise ValueError(f"{where} cannot be read: {error.strerror}") from None
        have = (table.num_stages, table.num_microbatches)
        if have != (stages, microbatches):
            raise ValueError(
                f"{where} is for {have[0]} stages and {have[1]} microbatches: set "
                f"mesh.stage={have[0]} (it is {stages}) and batch.accumulation={have[1]} (it is "
                f"{microbatches})"
            )
    elif config.schedule in SCHEDULES:
        return _named(config.schedule, stages, microbatches, config.virtual_stages)
    else:
        remedy = bounds.use_one_of(config.schedule, SCHEDULES)
        raise ValueError(f"pipeline.schedule={config.schedule!r} is unknown: {remedy}")
    schedule.check(table)
    return table

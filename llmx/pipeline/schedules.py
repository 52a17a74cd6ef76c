"""Pipeline schedules by name, as functions that make their tables, and tables from files."""

import collections
import dataclasses
from collections.abc import Callable

import numpy as np

from llmx.pipeline import schedule
from llmx.pipeline.schedule import BACKWARD, FORWARD, Pairs, Table
from llmx.runtime import bounds
from llmx.runtime.bounds import bounded, choice


@dataclasses.dataclass
class PipelineConfig:
    """What the stages of a mesh do; its microbatches are `batch.accumulation`."""

    schedule: str = choice("1f1b", lambda: SCHEDULES)  # a name in schedules.SCHEDULES
    table: str = ""  # a CSV file with a schedule of your own, in place of `schedule`
    # chunks of the model on each stage; 0 = the schedule's least
    virtual_stages: int = bounded(0, at_least=0)
    layers: tuple[int, ...] = ()  # of each chunk, in the model's order; () = as equal as possible


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

    6M + P-1 ticks of one chunk from M = P on, of which a stage idles in P-1; at most 3(P-M) more
    below. A stage holds up to 2P pairs of chunk and microbatch, as much as P microbatches.
    """
    P, M = stages, microbatches
    _refuse_sizes("zb_v", P, M, virtual_stages, takes=2)

    def order(stage):
        phases = [("F", 2 * P), ("BWF", 2 * M - P - 1), ("BF", stage), ("BWF", 2 * M), ("W", P)]
        return schedule.in_phases(*_down_and_up(P, M, stage), phases)

    return schedule.schedule_asap("zb_v", [order(stage) for stage in range(P)])


def dual_pipe_v(stages: int, microbatches: int, virtual_stages: int = 2) -> Table:
    """DualPipeV (github.com/deepseek-ai/DualPipe): chunks as in `zb_v`, DualPipe's eight phases.

    Order and splits are DeepSeek's, but every backward is split here, and a forward beside a
    backward takes two ticks. Needs M >= 2P; then 6M + P-1 ticks, and a stage holds up to 2P+1 pairs
    of chunk and microbatch.
    """
    P, M = stages, microbatches
    _refuse_sizes("dual_pipe_v", P, M, virtual_stages, takes=2)
    if M < 2 * P:
        raise ValueError(
            f"dual_pipe_v with microbatches={M} on stages={P}: its phases need at least "
            f"{2 * P} microbatches; use more, or zb_v, which takes any number"
        )

    def order(stage):
        forwards, backwards = _down_and_up(P, M, stage)
        before, after = stage + 1, P - 1 - stage
        phases = [("F", 2 * after), ("FF", before), ("BWF", after), ("FBWFBW", M - 2 * P + before)]
        phases += [("BWFBW", after), ("BW", before), ("B", before), ("WB", after), ("W", before)]
        return schedule.in_phases([pair for pair in forwards if pair], backwards, phases)

    return schedule.schedule_asap("dual_pipe_v", [order(stage) for stage in range(P)])


def _down_and_up(P: int, M: int, stage: int) -> tuple[Pairs, Pairs]:
    """Forwards and backwards of the stage with chunk `stage` and the one as far from the end."""
    chunks, after = (stage, 2 * P - 1 - stage), P - 1 - stage

    def pairs(turns):
        count = collections.Counter()
        for turn in turns:
            yield (count[turn], chunks[turn]) if count[turn] < M else None
            count[turn] += 1

    forwards = [0] * 2 * after + [0, 1] * (stage + 1) + [1] * after + [0, 1] * M
    backwards = [1] * min(after, M) + [1, 0] * (M - after) + [0] * min(after, M)
    return list(pairs(forwards)), list(pairs(backwards))


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


def _refuse_sizes(name: str, stages: int, microbatches: int, virtual: int, *, takes: int = 0):
    """Raises ValueError; `takes` is the one number of chunks per stage that the schedule has."""
    for size, value in (("stages", stages), ("microbatches", microbatches)):
        if value < 1:
            raise ValueError(f"{name} with {size}={value}: use at least 1")
    if takes and virtual != takes:
        raise ValueError(
            f"{name} with virtual_stages={virtual}: it has {takes} per stage; use {takes}, or "
            "interleaved_1f1b, which takes any number from 2 on"
        )
    if not takes and virtual < 2:
        raise ValueError(f"{name} with virtual_stages={virtual}: use at least 2, or 1f1b")


SCHEDULES: dict[str, Callable[..., Table]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved_1f1b": interleaved_1f1b,
    "zb_h1": zb_h1,
    "zb_v": zb_v,
    "dual_pipe_v": dual_pipe_v,
    "pipedream_2bw": pipedream_2bw,
}


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
        virtual = {"virtual_stages": config.virtual_stages} if config.virtual_stages else {}
        table = SCHEDULES[config.schedule](stages, microbatches, **virtual)
    else:
        remedy = bounds.use_one_of(config.schedule, SCHEDULES)
        raise ValueError(f"pipeline.schedule={config.schedule!r} is unknown: {remedy}")
    schedule.check(table)
    return table

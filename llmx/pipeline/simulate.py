"""When each operation of a schedule runs, and how long the whole takes."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from llmx.pipeline import schedule
from llmx.pipeline.schedule import BACKWARD, FORWARD, IDLE, KINDS, WEIGHT, Table

WARM_PERIODS = 6  # after which stages that run freely have their lasting speed


@dataclasses.dataclass(frozen=True, eq=False)
class Timeline:
    """When each operation of a table runs."""

    start: np.ndarray  # float[ticks, stages], seconds, NaN where idle
    end: np.ndarray
    step_time: float  # seconds; of a periodic table, from one period to the next


def simulate(
    table: Table, *, forward: float | Sequence[float], backward: float | Sequence[float],
    weight: float | Sequence[float] = 0.0, transfer: float = 0.0, barriers: bool = True,
) -> Timeline:  # fmt: skip
    """Times of a legal table.

    `forward`, `backward`, `weight`: seconds of a whole stage, or of each chunk. Where the table
    does not split WEIGHT off, BACKWARD takes both times. `transfer`: of a message between stages.

    With `barriers` all stages begin a tick together: a tick takes as long as its longest operation,
    and then a message if one is sent. Without, a stage begins an operation as soon as its inputs
    are there, and sends while it works.
    """
    if not (math.isfinite(transfer) and transfer >= 0):
        raise ValueError(f"transfer={transfer}: use seconds from 0 on")
    chunks = np.ones(table.num_chunks) / table.chunks_per_stage
    times = [
        chunks * seconds if np.ndim(seconds) == 0 else np.asarray(seconds, float)
        for seconds in (0.0, forward, backward, weight)
    ]
    for name, array in zip(KINDS, times, strict=True):
        if array.shape != chunks.shape or not (np.isfinite(array) & (array >= 0)).all():
            raise ValueError(
                f"{name} is {array.tolist()}: use one number from 0 on, or {table.num_chunks} of "
                "them"
            )
    if not table.splits_backward:
        times[BACKWARD] = times[BACKWARD] + times[WEIGHT]
    seconds = np.where(table.kind == IDLE, np.nan, np.array(times)[table.kind, table.chunk])
    if barriers:
        lengths = np.nanmax(seconds, axis=1) + transfer * _sends(table).any(axis=1)
        start = np.where(table.kind == IDLE, np.nan, (np.cumsum(lengths) - lengths)[:, None])
        return Timeline(start, start + seconds, float(lengths.sum()))
    if not table.periodic:
        end = _run_freely(table, seconds, transfer, 1)
        return Timeline(end - seconds, end, float(np.nanmax(end)))
    # The first periods wait for nothing of the step before: the mean of later ones is the time.
    end = _run_freely(table, seconds, transfer, 2 * WARM_PERIODS)
    by_period = np.nanmax(end.reshape(2 * WARM_PERIODS, -1), axis=1)
    step_time = float(by_period[-1] - by_period[WARM_PERIODS - 1]) / WARM_PERIODS
    end = end[-table.num_ticks :]
    end = end - np.nanmin(end - seconds)
    return Timeline(end - seconds, end, step_time)


def _sends(table: Table) -> np.ndarray:
    """bool[ticks, stages]: whether the result of a cell goes to another stage."""
    found, stage_of = np.zeros(table.kind.shape, bool), table.stage_of
    for tick, stage, (kind, _, chunk) in table.operations():
        to = {FORWARD: chunk + 1, BACKWARD: chunk - 1, WEIGHT: -1}[kind]
        found[tick, stage] = 0 <= to < table.num_chunks and stage_of[to] != stage
    return found


def _run_freely(table: Table, seconds: np.ndarray, transfer: float, periods: int) -> np.ndarray:
    """float[periods * ticks, stages]: the end of each operation, without barriers."""
    ticks, stage_of = schedule.operation_ticks(table), table.stage_of
    end = np.full((periods * table.num_ticks, table.num_stages), np.nan)
    free = np.zeros(table.num_stages)
    for period in range(periods):
        for tick, stage, operation in table.operations():
            now = period * table.num_ticks + tick
            start = free[stage]
            for need in schedule.needs(operation, table.num_chunks):
                then, source = now - ticks[operation] + ticks[need], stage_of[need[2]]
                if then >= 0:  # else of a step before the first
                    start = max(start, end[then, source] + transfer * (source != stage))
            end[now, stage] = free[stage] = start + seconds[tick, stage]
    return end

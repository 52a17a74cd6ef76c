"""Every pipeline schedule is legal, as short and as lean as it says; broken tables are refused."""

import contextlib
import dataclasses
import io
import itertools
import pathlib
import re

import numpy as np
import pytest

from llmx import config
from llmx.config import checks
from llmx.pipeline import schedule
from llmx.pipeline.schedule import BACKWARD, FORWARD, IDLE, WEIGHT, Table, check
from llmx.pipeline.schedules import SCHEDULES
from llmx.pipeline.simulate import simulate
from llmx.plan import schedule_report

ROOT = pathlib.Path(__file__).parents[2]
STAGES = (1, 2, 3, 4, 8)
MICROBATCHES = (1, 2, 3, 4, 5, 8, 9, 16, 17)

# Sums of some hundred times of 1/3 s and the like.
TOLERANCE = 1e-9

FEWEST = {"dual_pipe_v": lambda P: 2 * P, "pipedream_2bw": lambda P: 2 * P - 1}
ONE_KIND = ("gpipe", "1f1b", "interleaved_1f1b", "zb_1f1b", "pipedream_2bw")


def tables(name, *, most_stages=8):
    """Each size and table of a schedule; those with too few microbatches are left out."""
    for P, M in itertools.product(STAGES, MICROBATCHES):
        fewest = FEWEST.get(name, lambda P: 1)(P)
        if most_stages >= P and fewest <= M:
            yield P, M, SCHEDULES[name](P, M)


def idle_ticks(name, P, M):
    """Ticks of one chunk that a stage idles, in which a forward of the stage is `chunks` ticks."""
    few = max(P - M, 0)
    return {
        "gpipe": 3 * (P - 1),
        "1f1b": 3 * (P - 1),
        "interleaved_1f1b": 3 * (P - 1 + few),
        "zb_1f1b": 2 * (P - 1),
        "zb_h1": P - 1 + few,
        "zb_v": max(P - 1, 2 * (2 * P - 1 - M)),
        "dual_pipe_v": P - 1,
        "pipedream_2bw": 0,
    }[name]


def most_held(name, P, M, stage):
    """The bound on pairs of chunk and microbatch that the schedule's docstring gives."""
    return {
        "gpipe": M,
        "1f1b": 2 * (P - 1 - stage) + 1,
        "interleaved_1f1b": 2 * (P - 1 - stage) + 2 * P,  # groups of up to 2P-1
        "zb_1f1b": 2 * P - 1 - stage,
        "zb_h1": P,
        "zb_v": 2 * P,
        "dual_pipe_v": 2 * P + 1,
        "pipedream_2bw": 2 * (P - 1 - stage) + 1,
    }[name]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_legal_and_as_short_and_lean_as_it_says(name):
    for P, M, table in tables(name):
        facts = check(table)
        assert (table.num_stages, table.num_microbatches, table.name) == (P, M, name)
        v = table.chunks_per_stage
        idle = round((facts.length - 3 * M) * v)
        assert idle == idle_ticks(name, P, M)
        assert facts.busy == pytest.approx(3 * M)
        assert facts.bubble == pytest.approx(idle / (3 * M * v + idle))
        assert table.splits_backward == name.startswith(("zb_", "dual_"))
        for stage in range(P):
            assert facts.peak_stash[stage] <= most_held(name, P, M, stage)


@pytest.mark.parametrize("name", schedule_report.BUBBLES)
def test_bubbles_are_the_closed_forms(name):
    for P, M, table in tables(name):
        if M >= P:
            closed = schedule_report.BUBBLES[name][1](P, M, table.chunks_per_stage)
            assert check(table).bubble == pytest.approx(closed, abs=TOLERANCE)


@pytest.mark.parametrize(("P", "M", "v"), [(2, 2, 3), (4, 7, 3), (4, 9, 4), (3, 17, 5), (1, 3, 4)])
def test_interleaving_divides_the_bubble_by_the_parts(P, M, v):
    table = SCHEDULES["interleaved_1f1b"](P, M, v)
    facts = check(table)
    assert facts.bubble == pytest.approx((P - 1) / (v * M + P - 1), abs=TOLERANCE)
    assert table.stage_of.tolist() == [chunk % P for chunk in range(v * P)]
    sizes = {len(group) for group in np.array_split(np.arange(M), M // P)}
    assert min(sizes) >= P and max(sizes) <= 2 * P - 1
    most = [2 * (P - 1 - s) + (v - 1) * max(sizes) + 1 for s in range(P)]
    assert (facts.peak_stash <= most).all()


@pytest.mark.parametrize("name", ONE_KIND)
def test_lockstep_schedules_have_ticks_of_one_kind(name):
    for _, _, table in tables(name):
        for row in table.kind:
            assert len({*row.tolist()} - {IDLE}) == 1


def test_1f1b_is_in_the_rounds_that_it_promises():
    P, M = 4, 6
    ticks = schedule.operation_ticks(SCHEDULES["1f1b"](P, M))
    # F F F (F B)*M B B B: forward rounds are ticks 0, 1, 2, 3, 5, 7 ..., backward ones 4, 6, ...
    first = "FFF" + "FB" * M + "BBB"
    forward = [tick for tick, kind in enumerate(first) if kind == "F"]
    backward = [tick for tick, kind in enumerate(first) if kind == "B"]
    for m, s in itertools.product(range(M), range(P)):
        assert ticks[FORWARD, m, s] == forward[s + m]
        assert ticks[BACKWARD, m, s] == backward[P - 1 - s + m]


@pytest.mark.parametrize(("P", "M", "v"), [(4, 8, 1), (4, 16, 2), (3, 5, 1), (8, 8, 3), (2, 9, 2)])
def test_ticks_of_one_kind_take_as_long_as_they_promise(P, M, v):
    """Whatever operations take: a stage that waits, waits for FORWARD and BACKWARD only."""
    table = SCHEDULES["zb_1f1b"](P, M, v)
    for forward, backward, weight in ((1, 1, 1), (1, 2, 1), (1, 3, 0.25), (2, 1, 5)):
        times = dict(forward=forward, backward=backward, weight=weight)
        wanted = (M + (P - 1) / v) * (forward + backward) + M * weight
        assert simulate(table, **times).step_time == pytest.approx(wanted)
    assert check(table).peak_waiting_weights.tolist() == list(range(1, P + 1))


def test_zb_h1_has_a_third_of_the_bubble_and_no_more_memory_than_1f1b():
    for P, M, table in tables("zb_h1"):
        facts, plain = check(table), check(SCHEDULES["1f1b"](P, M))
        if M >= P:
            assert 3 * (facts.length - facts.busy) == plain.length - plain.busy
        assert facts.peak_stash.max() <= P
        assert (facts.peak_waiting_weights <= np.arange(P) + 1).all()


@pytest.mark.parametrize("name", ["zb_v", "dual_pipe_v"])
def test_v_schedules_put_the_parts_there_and_back(name):
    table = SCHEDULES[name](3, 6)
    assert table.stage_of.tolist() == [0, 1, 2, 2, 1, 0]
    assert [table.chunks_of(stage) for stage in range(3)] == [[0, 5], [1, 4], [2, 3]]
    assert table.chunks_per_stage == 2


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "gpipe"])
def test_memory_does_not_grow_with_microbatches(name):
    for P in (2, 4):
        peaks = [check(SCHEDULES[name](P, M)).peak_stash.tolist() for M in (16, 32, 64)]
        assert peaks[0] == peaks[1] == peaks[2]


def test_a_period_has_no_idle_cell_and_each_microbatch_its_two_periods():
    for P, M, table in tables("pipedream_2bw"):
        assert table.periodic and table.num_ticks == 2 * M
        assert (table.kind != IDLE).all()
        ticks = schedule.operation_ticks(table)
        latest = ticks.max()
        assert ticks[FORWARD, :, 0].max() < 2 * M and latest < 4 * M
        # The last backward is on stage 0.
        assert latest == 2 * (2 * (P - 1) + M - 1) + 1 == ticks[BACKWARD, M - 1, 0]


def test_the_bound_of_pipedream_2bw_is_the_one_of_the_check():
    for P in (2, 3, 4, 8):
        M = 2 * P - 3
        with pytest.raises(ValueError, match=f"use at least {2 * P - 1} microbatches"):
            SCHEDULES["pipedream_2bw"](P, M)
        s = np.arange(P)
        rounds = np.arange(M)[:, None]
        microbatch = np.stack([(rounds - s) % M, (rounds - 2 * (P - 1) + s) % M], 1)
        kind = np.tile([[FORWARD], [BACKWARD]], (M, P))
        chunk = np.tile(s, (2 * M, 1))
        table = Table("short", kind, microbatch.reshape(2 * M, P), chunk, periodic=True)
        with pytest.raises(ValueError, match="third version of the weights"):
            check(table)


@pytest.mark.parametrize(
    ("name", "sizes", "words"),
    [
        ("gpipe", (0, 4), r"gpipe with stages=0: use at least 1"),
        ("1f1b", (4, 0), r"1f1b with microbatches=0: use at least 1"),
        ("1f1b", (4, 4, 2), r"virtual_stages=2: .* use 1, or interleaved_1f1b"),
        ("zb_v", (4, 4, 1), r"zb_v with virtual_stages=1: it has 2 per stage; use 2"),
        ("interleaved_1f1b", (4, 4, 1), r"virtual_stages=1: use at least 2, or 1f1b"),
        ("dual_pipe_v", (4, 7), r"microbatches=7 on stages=4: .* at least 8 .* or zb_v"),
        ("pipedream_2bw", (4, 6), r"microbatches=6 on stages=4: .* 7 in flight.* at least 7"),
    ],
)
def test_wrong_sizes_are_refused_with_limit_and_remedy(name, sizes, words):
    with pytest.raises(ValueError, match=words):
        SCHEDULES[name](*sizes)


@pytest.mark.parametrize("name", FEWEST)
def test_too_few_microbatches_are_refused_at_each_size(name):
    for P, M in itertools.product(STAGES, MICROBATCHES):
        if FEWEST[name](P) > M:
            with pytest.raises(ValueError, match=rf"microbatches={M} .* {FEWEST[name](P)} micro"):
                SCHEDULES[name](P, M)


# ------------------------------------------------------------------------ schedules of one's own

F, B = FORWARD, BACKWARD


def test_orders_of_ones_own_are_placed_as_soon_as_possible():
    first = [(F, 0, 0), (F, 1, 0), (B, 0, 0), (B, 1, 0)]
    last = [(F, 0, 1), (B, 0, 1), (F, 1, 1), (B, 1, 1)]
    table = schedule.schedule_asap("mine", [first, last])
    assert table.kind.tolist() == [[F, IDLE], [F, F], [IDLE, B], [B, F], [IDLE, B], [B, IDLE]]
    assert check(table).peak_stash.tolist() == [2, 1]


def test_orders_that_wait_for_each_other_are_refused():
    first = [(F, 0, 0), (B, 0, 0), (F, 1, 0), (B, 1, 0)]
    last = [(F, 1, 1), (B, 1, 1), (F, 0, 1), (B, 0, 1)]
    words = (
        "stage 0 waits with BACKWARD of microbatch 0 in chunk 0 for BACKWARD of microbatch 0 in "
        "chunk 1; stage 1 waits with FORWARD of microbatch 1 in chunk 1 for FORWARD of microbatch "
        "1 in chunk 0"
    )
    with pytest.raises(ValueError, match=words):
        schedule.schedule_asap("mine", [first, last])


def test_phases_write_orders():
    pairs = [(0, 5), None, (1, 5), (2, 5)]
    order = schedule.in_phases(pairs, pairs[2:], [("F", 2), ("BF", 1), ("W", 2), ("FB", 9)])
    forward = [(F, 0, 5), (F, 1, 5), (F, 2, 5)]
    assert order == [forward[0], (B, 1, 5), forward[1], (WEIGHT, 1, 5), forward[2], (B, 2, 5)]


# --------------------------------------------------------------------------------- what is refused


def swap(table, one, other):
    """`table` with two cells exchanged."""
    arrays = [table.kind.copy(), table.microbatch.copy(), table.chunk.copy()]
    for array in arrays:
        array[one], array[other] = array[other], array[one]
    return Table("broken", *arrays, periodic=table.periodic)


def put(table, cell, kind, microbatch, chunk):
    """`table` with another operation in a cell."""
    arrays = [table.kind.copy(), table.microbatch.copy(), table.chunk.copy()]
    for array, value in zip(arrays, (kind, microbatch, chunk), strict=True):
        array[cell] = value
    return Table("broken", *arrays, periodic=table.periodic)


def cell_of(table, operation):
    (cell,) = [(tick, stage) for tick, stage, found in table.operations() if found == operation]
    return cell


GPIPE, ZB_H1 = SCHEDULES["gpipe"](3, 4), SCHEDULES["zb_h1"](3, 4)
BROKEN = {
    "order of a stage": (
        swap(GPIPE, cell_of(GPIPE, (F, 0, 1)), cell_of(GPIPE, (F, 1, 1))),
        "tick 1, stage 1: FORWARD of microbatch 1 in chunk 1 needs FORWARD of microbatch 1 in "
        "chunk 0 in an earlier tick, and it is in 1",
    ),
    "backward before later chunk's": (
        swap(GPIPE, cell_of(GPIPE, (B, 0, 0)), cell_of(GPIPE, (B, 3, 0))),
        "BACKWARD of microbatch 3 in chunk 0 needs BACKWARD of microbatch 3 in chunk 1",
    ),
    "weight before backward": (
        swap(ZB_H1, cell_of(ZB_H1, (B, 0, 0)), cell_of(ZB_H1, (WEIGHT, 0, 0))),
        "WEIGHT of microbatch 0 in chunk 0 needs BACKWARD of microbatch 0 in chunk 0",
    ),
    "missing backward": (
        put(GPIPE, cell_of(GPIPE, (B, 2, 1)), IDLE, -1, -1),
        "BACKWARD of microbatch 2 in chunk 1 is missing",
    ),
    "missing weight": (
        put(ZB_H1, cell_of(ZB_H1, (WEIGHT, 2, 1)), IDLE, -1, -1),
        "WEIGHT of microbatch 2 in chunk 1 is missing",
    ),
    "twice": (
        put(GPIPE, (9, 0), F, 2, 0),
        "FORWARD of microbatch 2 in chunk 0 is done already in tick 2, stage 0",
    ),
    "chunk on two stages": (
        swap(GPIPE, cell_of(GPIPE, (F, 1, 1)), (2, 2)),
        "tick 2, stage 2: FORWARD of microbatch 1 in chunk 1: stage 1 holds this chunk",
    ),
    "number of a missing microbatch": (
        put(GPIPE, cell_of(GPIPE, (F, 3, 0)), F, 5, 0),
        "FORWARD of microbatch 4 in chunk 0 is missing",
    ),
    "unknown kind": (put(GPIPE, (0, 0), 4, 0, 0), "tick 0, stage 0: kind 4, microbatch 0"),
    "negative microbatch": (put(GPIPE, (0, 0), F, -1, 0), "microbatch -1, chunk 0: kinds are"),
    "idle with a microbatch": (put(GPIPE, (0, 2), IDLE, 3, -1), "kind 0, microbatch 3, chunk -1"),
    "empty tick": (
        dataclasses.replace(
            GPIPE,
            **{
                name: np.concatenate([getattr(GPIPE, name), np.full((1, 3), idle)])
                for name, idle in (("kind", IDLE), ("microbatch", -1), ("chunk", -1))
            },
        ),
        f"tick {GPIPE.num_ticks} has no operation: leave it out",
    ),
    "nothing": (
        Table("empty", *np.full((3, 0, 2), -1)),
        r"kind is \[0, 2\]: it must be \[ticks, stages\]",
    ),
    "shapes": (
        dataclasses.replace(GPIPE, chunk=GPIPE.chunk[:-1]),
        r"chunk is int64\[11, 3\]: it must be int\[12, 3\]",
    ),
    "floats": (
        dataclasses.replace(GPIPE, chunk=GPIPE.chunk * 1.0),
        r"chunk is float64\[12, 3\]: it must be int\[12, 3\]",
    ),
    "chunks unevenly": (
        schedule.schedule_asap(
            "uneven",
            [
                [(F, 0, 0), (F, 0, 1), (B, 0, 1), (B, 0, 0)],
                [(F, 0, 2), (B, 0, 2)],
            ],
        ),
        r"stages hold \[2, 1\] chunks: give each stage as many",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_tables_are_refused(case):
    table, words = BROKEN[case]
    with pytest.raises(ValueError, match=words):
        check(table)


def test_a_result_is_not_there_in_the_tick_that_makes_it():
    kind, microbatch = np.array([[F, F], [B, B]]), np.zeros((2, 2), int)
    table = Table("at once", kind, microbatch, np.array([[0, 1], [0, 1]]))
    with pytest.raises(
        ValueError, match=r"is in 0\n.*chunk 0 needs BACKWARD .* chunk 1 .* is in 1"
    ):
        check(table)


def test_ten_problems_are_listed_at_once():
    table = SCHEDULES["1f1b"](4, 8)
    reverse = [array[::-1] for array in (table.kind, table.microbatch, table.chunk)]
    with pytest.raises(ValueError, match="is not a legal schedule") as error:
        check(Table("reverse", *reverse))
    first, *lines = str(error.value).splitlines()
    assert "'reverse'" in first
    assert len(lines) == schedule.MOST_PROBLEMS + 1 and lines[-1].strip() == "... and more"


# ------------------------------------------------------------------------------------- memory, time


def test_slots_are_the_fewest():
    random = np.random.default_rng(0)
    for _ in range(40):
        starts = random.integers(0, 12, 7)
        ends = starts + random.integers(0, 5, 7)
        slot, number = schedule.slots(starts, ends)
        pairs = [
            (a, b)
            for a, b in itertools.combinations(range(7), 2)
            if starts[a] <= ends[b] and starts[b] <= ends[a]
        ]
        assert set(slot.tolist()) == set(range(number))
        assert all(slot[a] != slot[b] for a, b in pairs)
        fewer = itertools.product(range(number - 1), repeat=7)
        assert not any(all(way[a] != way[b] for a, b in pairs) for way in fewer)
    assert schedule.slots([], [])[1] == 0


# The intervals of a periodic table go around its period.
@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "pipedream_2bw"])
def test_slots_of_a_stage_are_its_peak(name):
    table = SCHEDULES[name](4, 16)
    ticks = schedule.operation_ticks(table)
    last = WEIGHT if table.splits_backward else BACKWARD
    for stage, peak in enumerate(check(table).peak_stash):
        chunks = table.chunks_of(stage)
        starts, ends = ticks[FORWARD][:, chunks].ravel(), ticks[last][:, chunks].ravel()
        assert schedule.slots(starts, ends)[1] == peak


@pytest.mark.parametrize("name", SCHEDULES)
def test_simulated_time_is_the_length_at_unit_costs(name):
    for _, _, table in tables(name, most_stages=4):
        length = check(table).length
        for barriers in (True, False):
            times = simulate(table, forward=1, backward=1, weight=1, barriers=barriers)
            if barriers or name != "zb_1f1b":
                assert times.step_time == pytest.approx(length, abs=TOLERANCE)
            else:  # its table waits for stages to have the same operation
                assert times.step_time <= length
            lasts = np.where(
                table.kind == IDLE, np.nan, table.costs[table.kind] / table.chunks_per_stage
            )
            np.testing.assert_allclose(times.end - times.start, lasts)


@pytest.mark.parametrize("name", SCHEDULES)
def test_stages_that_run_freely_keep_their_order_and_never_take_longer(name):
    table = SCHEDULES[name](4, 9)
    chunks = np.linspace(1, 2, table.num_chunks)
    seconds = {"forward": chunks, "backward": 1.5 * chunks, "weight": chunks / 2, "transfer": 0.25}
    bound, free = (simulate(table, **seconds, barriers=barriers) for barriers in (True, False))
    assert free.step_time <= bound.step_time
    ticks = schedule.operation_ticks(table)
    for timeline in bound, free:
        for stage in range(4):
            busy = table.kind[:, stage] != IDLE
            start, end = timeline.start[busy, stage], timeline.end[busy, stage]
            assert (start[1:] >= end[:-1] - TOLERANCE).all()
        for tick, stage, operation in table.operations():
            for need in schedule.needs(operation, table.num_chunks):
                if table.periodic and ticks[operation] - ticks[need] > tick:
                    continue  # of the period before
                source = table.stage_of[need[2]]
                then = timeline.end[tick - ticks[operation] + ticks[need], source]
                late = 0.25 * (source != stage)
                assert timeline.start[tick, stage] >= then + late - TOLERANCE


def test_a_table_that_does_not_split_takes_both_times_at_once():
    table = SCHEDULES["1f1b"](2, 2)
    one = simulate(table, forward=1, backward=1, weight=1)
    assert one.step_time == simulate(table, forward=1, backward=2).step_time == 9


def test_transfers_are_paid_at_each_tick_that_sends():
    table = SCHEDULES["gpipe"](2, 3)
    # Of the 4 + 4 ticks, the last of each kind sends nothing.
    assert simulate(table, forward=1, backward=2, transfer=0.5).step_time == 12 + 3
    alone = SCHEDULES["gpipe"](1, 3)
    assert simulate(alone, forward=1, backward=2, transfer=0.5).step_time == 9
    free = simulate(table, forward=1, backward=2, transfer=0.5, barriers=False)
    assert free.step_time == 12 + 1


def test_the_slowest_stage_sets_the_time_of_a_period():
    table = SCHEDULES["pipedream_2bw"](4, 8)
    chunks = [1, 1, 3, 1]
    free = simulate(table, forward=chunks, backward=chunks, barriers=False)
    assert free.step_time == pytest.approx(8 * (3 + 3))


def test_wrong_times_are_refused():
    table = SCHEDULES["1f1b"](2, 2)
    with pytest.raises(ValueError, match=r"forward is .*use one number from 0 on, or 2 of them"):
        simulate(table, forward=[1, 2, 3], backward=1)
    with pytest.raises(ValueError, match="weight is"):
        simulate(table, forward=1, backward=1, weight=-1)


# ------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_file_gives_the_same_table(name, tmp_path):
    for P, M, table in tables(name, most_stages=4):
        path = tmp_path / f"{P}_{M}.csv"
        schedule.write_csv(table, path)
        again = schedule.read_csv(path)
        for field in ("kind", "microbatch", "chunk"):
            np.testing.assert_array_equal(getattr(again, field), getattr(table, field))
        assert (again.name, again.periodic) == (table.name, table.periodic)


@pytest.mark.parametrize("column", ["chunk", "part"])  # its name today, and before
def test_a_file_may_be_plain_rows_in_any_order(tmp_path, column):
    path = tmp_path / "mine.csv"
    path.write_text(
        f"tick,stage,operation,microbatch,{column}\n1, 0, backward, 0, 0\n\n# a remark\n"
        "0,0,forward,0,0\n"
    )
    table = schedule.read_csv(path)
    assert (table.name, table.periodic, check(table).length) == ("mine", False, 3)


HEADER = "# name: x\ntick,stage,operation,microbatch,chunk\n"


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("", r"mine.csv: no operation in it"),
        (HEADER, r"mine.csv: no operation in it"),
        ("tick,stage\n", r"mine.csv:1: 'tick,stage': the columns are tick,stage,operation"),
        (HEADER + "0,0,foreward,0,0\n", r"mine.csv:3: .*operation 'foreward': use one of forward"),
        (HEADER + "0,0,forward,0,x\n", r"mine.csv:3: .*chunk 'x' is no integer"),
        (HEADER + "0,0,forward,-1,0\n", r"mine.csv:3: .*microbatch '-1' is no integer from 0 on"),
        (HEADER + "0,0,forward,1\n", r"mine.csv:3: .*4 values: the columns are"),
        (
            HEADER + "0,0,forward,0,0\n0,0,backward,0,0\n",
            r"mine.csv:4: .*stage 0 has FORWARD of microbatch 0 in chunk 0 in tick 0 already",
        ),
        (HEADER + "0,0,forward,0,0\n9,0,backward,0,0\n", r"tick 1 has no row, 9 has"),
        (HEADER + "0,0,forward,0,0\n1,2,forward,0,1\n", r"stage 1 has no row, 2 has"),
    ],
)
def test_wrong_files_are_refused_with_file_and_line(rows, words, tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(rows)
    with pytest.raises(ValueError, match=words):
        schedule.read_csv(path)


# -------------------------------------------------------------------------------------- the page


def test_the_example_of_the_page_is_a_schedule_that_a_config_takes(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "pipeline.md").read_text()
    blocks = r"```python\n(from llmx.pipeline import.*?)```\n\n```\n(.*?)```"
    example, printed = re.search(blocks, page, re.S).groups()
    monkeypatch.chdir(tmp_path)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(example, "docs/pipeline.md", "exec"), {})
    assert out.getvalue() == printed
    run = config.default()
    run.pipeline.table = "two_waves.csv"
    run.mesh.stage, run.batch.accumulation = 4, 8
    checks.resolve(run, 8)


def test_a_length_that_torch_has_too():
    """Eight stages, 16 microbatches, a backward pass of twice the time, run freely."""
    times = dict(forward=1, backward=2, weight=1, barriers=False)
    assert simulate(SCHEDULES["zb_v"](8, 16), **times).step_time == 71

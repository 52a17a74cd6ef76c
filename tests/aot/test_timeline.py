"""The estimated time of a step: programs whose times are known by hand, and what always holds.

In the texts here a cycle is a second, and a link carries one byte in a second.
"""

import csv
import dataclasses
import itertools
import json
import math
import pathlib
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmx import config
from llmx.aot import __main__ as command
from llmx.aot import (
    compiler,
    core_times,
    links,
    report,
    schedule,
    step_text,
    step_time,
    timeline,
    topologies,
)
from llmx.aot.collectives import Collective
from llmx.config import checks
from llmx.model import families
from llmx.runtime import hardware

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
UNIT = links.Rates(link=1.0, network=1.0, start=0.0, hop=0.0, network_hop=0.0)
CORE = core_times.Core(flops={"bf16": 100.0}, bandwidth=1e9, clock=1.0, kernels=0.5)
# Four devices on the corners of a square: 0 and 1 along y, 0 and 2 along x.
SQUARE = links.Torus(
    np.array([(x, y, 0, 0) for x, y in itertools.product(range(2), repeat=2)]), (2, 2, 1),
    (False, False, False), UNIT,
)  # fmt: skip
ALONG_X, ALONG_Y = "{{0,2},{1,3}}", "{{0,1},{2,3}}"

FUSED = """
%inner (a: f32[8]) -> f32[8] {
  %a = f32[8] parameter(0)
  ROOT %t = f32[8] tanh(%a)
}
"""


def work(name: str, seconds: int, operand: str = "p") -> str:
    config = f'backend_config={{"estimated_cycles":"{seconds}"}}'
    return f"  %{name} = f32[8] fusion(%{operand}), kind=kLoop, calls=%inner, {config}"


def permute(name: str, size: int, pairs: str = ALONG_X, suffix: str = "-start") -> str:
    """A permute of `size` bytes of the parameter %b, over `size` seconds of each link."""
    attributes = f"channel_id=1, source_target_pairs={pairs}"
    return f"  %{name} = s8[{size}] collective-permute{suffix}(%b{size}), {attributes}"


def done(name: str, size: int) -> str:
    return f"  %{name}-d = s8[{size}] collective-permute-done(%{name})"


def program(lines: list[str], *, others: str = "", sizes=(5,)) -> str:
    head = "HloModule jit_f, is_scheduled=true, num_partitions=4"
    operands = ["  %p = f32[8] parameter(0)"]
    operands += [f"  %b{size} = s8[{size}] parameter({i})" for i, size in enumerate(sizes, 1)]
    body = "\n".join([*operands, *lines])
    return f"{head}\n{FUSED}\n{others}\nENTRY %main (p: f32[8]) -> f32[8] {{\n{body}\n}}\n"


def read(text: str, core: core_times.Core = CORE, machine=SQUARE) -> timeline.Timeline:
    times = timeline.read(text, [("x", 2), ("y", 2)], machine=machine, core=core)
    holds(times)
    return times


def holds(times: timeline.Timeline) -> None:
    """What holds of every program."""
    close = {"rel": 1e-9, "abs": 1e-12}
    assert times.compute + times.copies + times.exposed == pytest.approx(times.step, **close)
    slack = 1e-9 * times.step
    assert times.infinite_bandwidth <= times.step + slack
    assert times.step <= times.half_bandwidth + slack
    assert times.step <= times.nothing_hidden + slack
    assert sum(one.seconds for one in times.operations) == pytest.approx(times.compute, **close)
    assert sum(one.exposed for one in times.exchanges) == pytest.approx(times.exposed, **close)
    well_formed(times)


def well_formed(times: timeline.Timeline) -> None:
    """Boxes of the trace's rows follow each other, and the core's fill the step."""
    trace = json.loads(json.dumps(timeline.to_trace(times)))
    names = {
        one["tid"]: one["args"]["name"]
        for one in trace["traceEvents"]
        if one["ph"] == "M" and one["name"] == "thread_name"
    }
    rows: dict[str, list] = {name: [] for name in names.values()}
    for box in (one for one in trace["traceEvents"] if one["ph"] == "X"):
        rows[names[box["tid"]]].append((box["ts"] / 1e6, box["dur"] / 1e6))
    slack = 1e-6 * times.step + 1e-12
    for boxes in rows.values():
        ordered = sorted(boxes)
        for (begin, length), (following, _) in itertools.pairwise(ordered):
            assert begin + length <= following + slack
        assert all(begin + length <= times.step + slack for begin, length in ordered)
    assert sum(length for _, length in rows["core"]) == pytest.approx(times.step, abs=slack)


# ------------------------------------------------------------------------------- times by hand


def test_a_synchronous_collective_stops_the_core():
    times = read(program([work("f", 10), permute("c", 5, suffix=""), work("g", 3)]))
    assert (times.step, times.compute, times.exposed) == (18, 13, 5)
    assert (times.half_bandwidth, times.infinite_bandwidth) == (23, 13)
    assert times.nothing_hidden == 18 and times.hidden == 0


@pytest.mark.parametrize("beside, step, hidden", [(10, 13, 1.0), (2, 8, 0.4), (5, 8, 1.0)])
def test_a_collective_is_hidden_as_far_as_what_runs_beside_it_lasts(beside, step, hidden):
    lines = [permute("c", 5), work("f", beside), done("c", 5), work("g", 3)]
    times = read(program(lines))
    assert times.step == step and times.hidden == pytest.approx(hidden)
    assert times.nothing_hidden == beside + 5 + 3
    (exchange,) = times.exchanges
    assert exchange.kind == "collective-permute" and exchange.hidden == pytest.approx(hidden)


@pytest.mark.parametrize("other, step", [(ALONG_X, 10), (ALONG_Y, 5)])
def test_collectives_on_one_link_follow_each_other_and_on_two_run_together(other, step):
    lines = [permute("c", 5), permute("d", 5, other), work("f", 4), done("c", 5), done("d", 5)]
    assert read(program(lines)).step == step


def loop(trips: int, *, inner: str, parameter: str = "s8[5]") -> str:
    known = f'backend_config={{"known_trip_count":{{"n":"{trips}"}}}}'
    return (
        f"""
%condition (s: (s32[], {parameter})) -> pred[] {{
  %s = (s32[], {parameter}) parameter(0)
  ROOT %true = pred[] constant(true)
}}

%body (s: (s32[], {parameter})) -> (s32[], {parameter}) {{
  %s = (s32[], {parameter}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %b5 = {parameter} get-tuple-element(%s), index=1
{inner}
  ROOT %next = (s32[], {parameter}) tuple(%i, %b5)
}}
""",
        f"  %w = (s32[], {parameter}) while(%state), condition=%condition, body=%body, {known}",
    )


def test_loops_are_multiplied_in():
    inner = "\n".join([permute("c", 5), work("f", 3, "b5"), done("c", 5)])
    others, line = loop(4, inner=inner)
    times = read(program(["  %state = (s32[], s8[5]) tuple(%p, %b5)", line], others=others))
    assert (times.step, times.exposed, times.communication) == (20, 8, 20)
    assert [one.count for one in times.operations] == [4]
    assert [one.count for one in times.exchanges] == [4]


def test_the_first_iteration_may_differ_from_the_others():
    """A transfer of 12 s that begins before the loop delays the first iteration's."""
    inner = "\n".join([permute("c", 5), work("f", 3, "b5"), done("c", 5)])
    others, line = loop(1_000_000, inner=inner)
    lines = [permute("e", 12), "  %state = (s32[], s8[5]) tuple(%p, %b5)", line, done("e", 12)]
    times = read(program(lines, others=others, sizes=(5, 12)))
    assert times.step == 17 + 999_999 * 5
    assert len(times.events) < 20


def test_a_loop_that_data_end_is_timed_once():
    others, line = loop(1, inner=work("f", 3, "b5"))
    line = line.partition(", backend_config")[0]
    times = read(program(["  %state = (s32[], s8[5]) tuple(%p, %b5)", line], others=others))
    assert times.step == 3 and "iterations of w end on data" in times.unknown[0]


def test_fusions_that_carry_a_collective_on_hide_it_while_they_compute():
    part = (
        "%{name} (x{name}: s8[5]) -> s8[5] {{\n  %x{name} = s8[5] parameter(0)\n"
        "  %g{name} = s8[5] collective-permute(%x{name}), channel_id=1, "
        "source_target_pairs={{{{0,2}},{{1,3}}}}, "
        'frontend_attributes={{chain_id="0"}}\n'
        '  ROOT %c{name} = s8[5] custom-call(%g{name}), custom_call_target="AsyncCollective{end}"\n'
        "}}"
    )
    names = (("begin", "Start"), ("middle", "Other"), ("end", "Done"))
    others = "\n\n".join(part.format(name=name, end=end) for name, end in names)

    def carrier(name: str, seconds: int) -> str:
        cycles = f'backend_config={{"estimated_cycles":"{seconds}"}}'
        return f"  %{name}.0 = s8[5] fusion(%b5), kind=kCustom, calls=%{name}, {cycles}"

    lines = [carrier("begin", 1), work("f", 7), carrier("middle", 2), carrier("end", 1)]
    times = read(program(lines, others=others))
    # Four of its five seconds pass in fusions that carry it; `f` does not.
    assert (times.step, times.exposed) == (12, 1)
    (exchange,) = times.exchanges
    assert exchange.name == "begin.0,middle.0,end.0" and exchange.hidden == pytest.approx(0.8)
    assert times.nothing_hidden == 16


def test_the_longest_branch_is_timed():
    branch = "%{name} ({name}p: f32[8]) -> f32[8] {{\n  %{name}p = f32[8] parameter(0)\n{line}\n}}"
    others = "\n\n".join(
        branch.format(name=name, line=work(f"{name}f", seconds, f"{name}p"))
        for name, seconds in (("short", 3), ("long", 7))
    )
    lines = [
        "  %i = s32[] constant(0)",
        "  %c = f32[8] conditional(%i, %p, %p), branch_computations={%short, %long}",
    ]
    times = read(program(lines, others=others))
    assert times.step == 7 and times.unknown == ("branch that c takes: the longest is timed",)
    # Of four iterations the longer one is what some device takes in three.
    lines[-1] += ', metadata={op_name="jit(f)/expected_branches_10_6_longest_1_3/cond"}'
    times = read(program(lines, others=others))
    assert times.step == (1 * 3 + 3 * 7) / 4 and not times.unknown
    assert {one.name: one.count for one in times.operations} == {"shortf": 0.25, "longf": 0.75}


@pytest.mark.parametrize(
    "target, name, products",
    [
        ("tpu_custom_call", "splash_mqa_fwd", 2), ("tpu_custom_call", "splash_mqa_dkv", 5),
        ("tpu_custom_call", "splash_mqa_dq", 3),
    ],
)  # fmt: skip
def test_kernels_of_attention_are_timed_by_their_shapes(target, name, products):
    lines = [
        "  %q = bf16[2,4,8,16] constant(0)", "  %k = bf16[2,8,16] constant(0)",
        f'  %{name}.1 = bf16[2,4,8,16] custom-call(%q, %k, %k), custom_call_target="{target}"',
    ]  # fmt: skip
    times = read(program(lines))
    flops = products * 2 * (2 * 4 * 8 * 16) * 8 / 2  # half of the scores
    assert times.kernel_flops == flops and times.step == pytest.approx(flops / 50)
    (kernel,) = times.operations
    assert kernel.basis == "kernel"


@pytest.mark.parametrize(
    "queries, keys, visible",
    [
        ((4, 8, 16), (8, 16), 8 * 8 / 2),  # of one key/value head
        ((2, 4, 8, 16), (2, 32, 16), 8 * 24 + 8 * 8 / 2),  # the last queries of the keys
        ((2, 4, 32, 16), (2, 8, 16), 24 * 8 + 8 * 8 / 2),  # the first keys of the queries
    ],
)
def test_scores_that_kernels_compute(queries, keys, visible):
    shape = lambda dims: f"bf16[{','.join(map(str, dims))}]"  # noqa: E731
    sums = f"f32[4,8,{queries[-2]}]"
    lines = [
        f"  %q = {shape(queries)} constant(0)", f"  %s = {sums} constant(0)",
        f"  %k = {shape(keys)} constant(0)",
        f"  %splash_mqa_dkv.1 = {shape(queries)} custom-call(%q, %s, %k, %k), "
        'custom_call_target="tpu_custom_call"',
    ]  # fmt: skip
    heads = math.prod(queries[:-2])
    assert read(program(lines)).kernel_flops == 5 * 2 * heads * visible * 16


@pytest.mark.parametrize("name, products", [("forward", 2), ("dkv", 4), ("dq", 3)])
def test_triton_kernels_have_a_share_of_their_own(name, products):
    """Their name stands in the call's options, beside their code."""
    call = (
        "  %pallas_call.{} = bf16[2,8,4,16] custom-call(%b, %q, %k, %k), "
        'custom_call_target="__gpu$xla.gpu.triton", backend_config={{grid_x = 64 : i32, '
        'ir = "ML\\EFR", name = "flash_{}", num_stages = 2 : i32}}'
    )
    lines = [
        "  %b = s32[1,4,4] constant(0)", "  %q = bf16[2,8,4,16] constant(0)",
        "  %k = bf16[2,8,2,16] constant(0)", call.format(1, name),
    ]  # fmt: skip
    if name == "dkv":  # whose queries' gradients another computes
        lines.append(call.format(2, "dq"))
    times = read(program(lines), core=dataclasses.replace(CORE, triton=0.25))
    one = 2 * (2 * 8 * 4 * 16) * 8 / 2  # half of the scores
    flops = (products + (3 if name == "dkv" else 0)) * one
    assert times.kernel_flops == flops and times.step == pytest.approx(flops / 25)
    assert {kernel.basis for kernel in times.operations} == {"kernel"}


@pytest.mark.parametrize("keys", [8, 4])
def test_steps_of_a_ring_see_all_of_unequal_queries_and_keys(keys):
    """Where devices hold positions in zigzag, later steps compute with half of one or the other."""
    lines = [
        "  %q = bf16[2,8,4,16] constant(0)", f"  %k = bf16[2,{keys},2,16] constant(0)",
        "  %flash_forward.1 = bf16[2,8,4,16] custom-call(%q, %k, %k), "
        'custom_call_target="__gpu$xla.gpu.triton", backend_config={name = "flash_forward"}',
    ]  # fmt: skip
    whole = 2 * 2 * (2 * 8 * 4 * 16) * keys
    plain, ring = (
        read(program(lines), core=dataclasses.replace(CORE, rings=rings)).kernel_flops
        for rings in (False, True)
    )
    assert ring == (whole if keys == 4 else whole / 2) and plain < whole


def test_a_permute_without_pairs_moves_nothing():
    times = read(program([permute("c", 5, "{}", suffix=""), work("f", 3)]))
    assert times.step == 3 and not times.exchanges


@pytest.mark.parametrize("beside", [(), ("y",)])
def test_a_collective_that_spans_a_loop_runs_on_beside_it(beside):
    """Also beside the iterations that one stands for."""
    long = schedule.Transfer("long", "", links.Route({"x": 50.0}), COLLECTIVE)
    short = schedule.Transfer("short", "", links.Route(dict.fromkeys(beside, 0.5)), COLLECTIVE)
    body = (schedule.Start(short), schedule.Work("w", "", 1.0, "cycles"), schedule.Wait(short))
    for trips, step in ((100, 100), (20, 50)):
        times = timeline.of_steps(
            (schedule.Start(long), schedule.Loop("l", body, trips), schedule.Wait(long))
        )
        assert (times.step, times.exposed) == (step, step - trips)


def test_copies_run_beside_the_core_and_are_no_communication():
    core = dataclasses.replace(CORE, bandwidth=16.0)
    copy = "  %k = (f32[8], f32[8], u32[]) copy-start(%p)\n{}\n  %kd = f32[8] copy-done(%k)"
    times = read(program([copy.format(work("f", 1))]), core=core)
    assert (times.step, times.copies, times.exposed) == (4, 3, 0)  # 32 bytes, read and written
    assert times.nothing_hidden == times.half_bandwidth == 4 and not times.exchanges
    into = copy.format(work("f", 1)).replace("(f32[8],", "(f32[8]{0:S(1)},", 1)  # on-chip memory
    times = read(program([into]), core=core)
    assert (times.step, times.copies) == (2, 1)


def test_without_cycles_the_longer_of_flops_and_bytes_counts():
    core = core_times.Core(
        flops={"bf16": 1e3, "f32": 100.0}, bandwidth=64.0, products=0.5, memory=0.5, launch=1.0
    )
    lines = [
        "  %a = f32[4,8] constant(0)", "  %b = f32[8,4] constant(0)",
        "  %d = f32[4,4] dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
        "  %t = f32[4,4] tanh(%d)",
    ]  # fmt: skip
    times = read(program(lines), core=core)
    product, other = times.operations
    assert (product.basis, product.seconds) == ("bytes", 1 + (128 + 128 + 64) / 32)
    assert (other.basis, other.seconds) == ("bytes", 1 + 128 / 32)
    faster = dataclasses.replace(core, bandwidth=1e9)
    (product, _) = read(program(lines), core=faster).operations
    assert (product.basis, product.seconds) == ("flops", 1 + 2 * 4 * 4 * 8 / 50)


def test_exact_products_of_fp32_take_the_peak_of_fp32():
    """The precision "highest", as `dot` writes it and as a cuBLAS call does."""
    flops = {"bf16": 1e3, "f32": 100.0, core_times.EXACT: 10.0}
    core = core_times.Core(flops=flops, bandwidth=1e9)
    factors = ["  %a = f32[4,8] constant(0)", "  %b = f32[8,4] constant(0)"]
    contracted = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    dot = f"  %d = f32[4,4] dot(%a, %b), {contracted}{{}}"
    call = (
        '  %d = (f32[4,4], s8[8]) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul", '
        'backend_config={{"gemm_backend_config":{{"dot_dimension_numbers":'
        '{{"lhs_contracting_dimensions":["1"]}},"precision_config":'
        '{{"operand_precision":["{0}","{0}"],"algorithm":"ALG_UNSET"}}}}}}'
    )
    seconds = 2 * 4 * 4 * 8 / 100
    lines = {
        dot.replace("{}", ""): seconds,
        dot.replace("{}", ", operand_precision={highest,highest}"): 10 * seconds,
        call.format("DEFAULT"): seconds, call.format("HIGHEST"): 10 * seconds,
    }  # fmt: skip
    for line, wanted in lines.items():
        assert read(program([*factors, line]), core=core).step == pytest.approx(wanted), line
    short = [one.replace("f32[4,8]", "bf16[4,8]") for one in factors]
    assert read(program([*short, list(lines)[1]]), core=core).step == pytest.approx(seconds / 10)


def test_attention_by_cudnn_is_that_of_an_h200():
    """Measured sizes (tests/golden), to which the curve was fitted; each took a copy of its queries
    besides."""
    rows = csv.DictReader((GOLDEN / "h200_attention.csv").open())
    peak, errors = hardware.CHIPS["h200"].peak("bfloat16")[0], []
    for row in rows:
        T, B, N, H = (int(row[name]) for name in ("length", "documents", "heads", "head_dim"))
        copied = 2 * 2 * B * T * N * H / 4.1e12
        forward, both = float(row["forward"]), float(row["both"])
        for backward, seconds in enumerate((forward - copied, both - forward)):
            flops = (4, 10)[backward] * B * N * H * T * (T + 1) / 2
            share = core_times.cudnn_share(T, B * N, H, backward=bool(backward))
            errors.append(flops / (peak * share) / seconds - 1)
    assert len(errors) == 40 and np.mean(np.abs(errors)) < 0.05 and np.max(np.abs(errors)) < 0.22


def test_the_room_that_cublas_works_in_is_no_traffic():
    core = core_times.Core(flops={"bf16": 1e9}, bandwidth=1.0)
    lines = [
        "  %a = f32[4,8] constant(0)", "  %b = f32[8,4] constant(0)",
        "  %d = (f32[4,4], s8[1000]) custom-call(%a, %b), "
        'custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":'
        '{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}',
    ]  # fmt: skip
    assert read(program(lines), core=core).step == 128 + 128 + 64


# ------------------------------------------------------------------------------ what always holds

COLLECTIVE = Collective(
    kind="all-gather", axes=("x",), dtype="bf16", arrays=1, count=1, bytes=8, wire_bytes=4,
    asynchronous=True, hidden_by=1, in_loop=0, sliced=False, name="c", source="",
)  # fmt: skip


def random_steps(chosen: random.Random, depth: int = 0) -> list:
    """Steps that start, wait, host and loop in some order."""
    steps, under_way, carried = [], [], []
    for _ in range(chosen.randint(1, 12)):
        names = chosen.sample(["x", "y", "z"], chosen.randint(1, 3))
        route = links.Route({name: chosen.random() for name in names}, 0.1 * chosen.random())
        what = chosen.choice(["work", "start", "wait", "host", "loop"])
        made = schedule.Transfer(f"t{chosen.random()}", "", route, COLLECTIVE)
        job = schedule.Work("w", "", chosen.random(), "cycles")
        if what == "start":
            steps.append(schedule.Start(made))
            under_way.append(made)
        elif what == "wait" and under_way:
            steps.append(schedule.Wait(under_way.pop(chosen.randrange(len(under_way)))))
        elif what == "host":
            carried = [*carried, made]
            ends = tuple(carried) if chosen.random() < 0.5 else ()
            steps.append(schedule.Hosted(job, tuple(carried), ends))
            carried = [] if ends else carried
        elif what == "loop" and depth < 2:
            body = tuple(random_steps(chosen, depth + 1))
            steps.append(schedule.Loop("l", body, chosen.choice([0, 1, 2, 15])))
        else:
            steps.append(job)
    if carried:
        steps.append(schedule.Hosted(schedule.Work("w", "", 0.1, "cycles"), (), tuple(carried)))
    return steps + [schedule.Wait(one) for one in under_way]


def unrolled(steps: list) -> list:
    flat = []
    for step in steps:
        if isinstance(step, schedule.Loop):
            flat += unrolled(step.body) * step.trips
        else:
            flat.append(step)
    return flat


@pytest.mark.parametrize("seed", range(40))
def test_bandwidth_and_overlap_order_as_physics_says_and_parts_add_up(seed):
    steps = random_steps(random.Random(seed))
    times = timeline.of_steps(steps)
    holds(times)
    # A loop that is cut short takes as long as all of its iterations, one after the other.
    whole = timeline.of_steps(unrolled(steps))
    assert times.step == pytest.approx(whole.step, rel=1e-5)
    assert times.exposed == pytest.approx(whole.exposed, rel=1e-5, abs=1e-5)
    assert times.communication == pytest.approx(whole.communication)
    for bandwidth, other in ((0.5, times.half_bandwidth), (math.inf, times.infinite_bandwidth)):
        assert schedule.serial_seconds(steps, bandwidth) >= other - 1e-9


def test_the_time_as_text():
    lines = [permute("c", 5), work("f", 2), done("c", 5), work("g", 3)]
    times = read(program(lines))
    shares = {"mfu": 0.4, "mfu_full": 0.45, "hfu": 0.5}
    speed = step_time.Speed(1234.0, 308.5, "bfloat16", shares, None)
    step, operations, exchanges = step_text.sections(times, speed)
    assert "8.000 s   1,234 tokens/s, 308 of each device" in step[1]
    assert "MFU 40.0% (full 45.0%, HFU 50.0%), of bfloat16" in step[2]
    assert "the program computes unknown" in step[3]
    assert "3.000 s   37.5% of the step; 40% of 5.000 s is hidden" in step[6]
    assert "nothing hidden 10.000 s, with half the bandwidth 13.000 s" in step[7]
    assert operations[2].split() == ["3.000", "s", "37.5%", "1", "cycles", "g"]
    assert exchanges[2].split() == ["3.000", "s", "5.000", "s", "1", "collective-permute", "x", "c"]
    empty = timeline.of_steps([])
    assert empty.step == 0 and step_text.sections(empty, None)[1:] == [[], []]


# ------------------------------------------------------------------------------------- the links


def torus(*shape: int, wraps=(False, False, False), dies: int = 1) -> links.Torus:
    padded = (*shape, 1, 1)[:3]
    every = [(*chip, die) for chip in np.ndindex(*padded) for die in range(dies)]
    return links.Torus(np.array(every), padded, wraps, UNIT)


RING = (True, True, True)


@pytest.mark.parametrize(
    "machine, kind, groups, seconds",
    [
        # A line's end has one link, a ring's every chip two; several axes add up.
        (torus(4), "all-gather", [[0, 1, 2, 3]], 6.0),
        (torus(4, wraps=RING), "all-gather", [[0, 1, 2, 3]], 3.0),
        (torus(4, wraps=RING), "all-reduce", [[0, 1, 2, 3]], 6.0),
        (torus(2, 2, 2), "reduce-scatter", [list(range(8))], 7 / 3),
        (torus(4, 4, wraps=RING), "all-gather", [list(range(16))], 7.5 / 4),
        # Two pairs side by side, and two that share the links of an axis.
        (torus(4), "all-gather", [[0, 1], [2, 3]], 4.0),
        (torus(4), "all-gather", [[0, 2], [1, 3]], 8.0),
        # Half of the bytes of two chips cross the middle of a line of four.
        (torus(4), "all-to-all", [[0, 1, 2, 3]], 8.0),
        (torus(4), "collective-permute", [(0, 1), (1, 2), (2, 3)], 8.0),
        (torus(4), "collective-permute", [(0, 1), (1, 2), (2, 3), (3, 0)], 8.0),
        (torus(4), "collective-permute", [(0, 2), (1, 3)], 16.0),
        (torus(4, wraps=RING), "collective-permute", [(3, 0)], 8.0),
        # Two dies of one chip: between them only, and one group of each die over two chips.
        (torus(1, dies=2), "all-gather", [[0, 1]], 8 / 2 / 6),
        (torus(2, dies=2), "all-gather", [[0, 2], [1, 3]], 8.0),
        (torus(2, dies=2), "all-gather", [[0, 1, 2, 3]], 4.0),
    ],
)
def test_times_on_a_torus(machine, kind, groups, seconds):
    assert machine.route(kind, 8.0, groups).duration() == pytest.approx(seconds)


def test_times_between_gpus():
    machine = links.Hosts(np.arange(8) // 4, UNIT)
    assert machine.route("all-gather", 8.0, [[0, 1, 2, 3]]).seconds == {"nvlink": 6.0}
    assert machine.route("all-reduce", 8.0, [[0, 4]]).seconds == {"network": 8.0}
    both = machine.route("all-gather", 8.0, [list(range(8))]).seconds
    assert both == {"nvlink": 6.0, "network": 1.0}
    assert machine.route("collective-permute", 8.0, [(0, 1)]).seconds == {"nvlink": 8.0}
    assert machine.route("collective-permute", 8.0, [(0, 1), (3, 4)]).seconds == {"network": 8.0}
    spread = machine.route("all-to-all", 8.0, [list(range(8))]).seconds
    assert spread == {"nvlink": 3.0, "network": 4.0}


@pytest.mark.parametrize("name", hardware.CHIPS)
def test_every_chip_has_a_core_and_links(name):
    chip = hardware.CHIPS[name]
    core, rates = core_times.core_of(chip), links.rates_of(chip)
    assert core.peak("bf16") == chip.device_flops() and core.peak("u4") == core.peak("bf16")
    assert (core.clock is None) == (not name.startswith("tpu"))
    assert 0 < rates.link <= chip.link_bandwidth * chip.num_links
    assert all(core.assumptions)


def test_windows_leave_less_of_the_scores():
    causal = families.preset("llama3")
    assert step_time.visible_share(causal, sequence_length=1000) == pytest.approx(0.5, rel=0.01)
    windows = families.preset("gemma3_1b")
    assert step_time.visible_share(windows, sequence_length=4096) < 0.25


# ----------------------------------------------------------------- machines whose hosts are slow


@pytest.mark.parametrize(
    "topology, words",
    [
        ("h100:8", "multiply to 2 and topology h100:8 has one host, without a network"),
        ("h100:4x8", "multiply to 2 and topology h100:4x8 has 4 hosts: make their sizes"),
        ("v5e:2x2", "has one host, without a network to cross: name none: --config.mesh.across"),
        ("4@v5e:2x2", "multiply to 2 and topology 4@v5e:2x2 has 4 slices"),
    ],
)
def test_what_a_topology_cannot_be_is_said_before_compiling(topology, words):
    machine = topologies.parse(topology)
    run = config.default()
    run.mesh.data, run.mesh.fsdp, run.mesh.across_slices = 2, -1, ("data",)
    run.batch.size = 2 * machine.num_devices
    with pytest.raises(checks.ConfigError, match=words):
        compiler.resolve(run, machine)


@pytest.mark.parametrize("topology", ["h100:2x8", "v6e:2x4", "2@v5e:2x2"])
def test_axes_may_cross_hosts_and_slices(topology):
    machine = topologies.parse(topology)
    run = config.default()
    run.mesh.data, run.mesh.fsdp, run.mesh.across_slices = 2, -1, ("data",)
    run.batch.size = 2 * machine.num_devices
    assert compiler.resolve(run, machine).mesh.data == 2


def small() -> config.Config:
    run = config.default()
    run.model = families.preset(
        "llama3", num_layers=2, width=256, num_heads=4, num_kv_heads=2, head_dim=128, mlp_dim=512,
        vocab_size=512, vocab_multiple=128, max_positions=1024,
    )  # fmt: skip
    run.batch.size, run.batch.sequence_length, run.remat = 16, 256, "full"
    run.sharding.layout = "hsdp"
    run.mesh.data, run.mesh.fsdp, run.mesh.across_slices = 2, -1, ("data",)
    return run


@pytest.mark.aot
@pytest.mark.parametrize("topology", ["h100:2x2", "v6e:2x4", "2@v5e:2x2"])
def test_the_time_of_a_compiled_step(topology, tmp_path):
    result = compiler.compile(small(), topology)
    times, speed = result.timeline, result.speed
    holds(times)
    shares = speed.shares
    assert 0 < shares["mfu"] < shares["mfu_full"] < 1 and shares["mfu"] < shares["hfu"] < 1
    # The program computes what is counted, and a score or three once more in its kernels.
    assert shares["hfu"] <= speed.program < 1.1 * shares["hfu"]
    assert speed.tokens_per_second == pytest.approx(16 * 256 / times.step)
    crossing = [one for one in times.exchanges if one.axes and "data" in one.axes]
    assert crossing
    if topology != "v6e:2x4":
        assert all("network" in one.links for one in crossing)
    names = {one.name for one in result.program.collectives}
    assert names == {one.name for one in times.exchanges}
    text = report.text(result)
    for words in ("time of a step, an estimate: nothing was run", "longest operations", "HFU"):
        assert words in text
    assert max(map(len, text.splitlines())) <= report.WIDTH
    document = report.to_json(result)["timeline"]
    assert document["step"] == times.step and document["speed"]["mfu"] == shares["mfu"]


@pytest.mark.aot
def test_the_trace_is_a_file(tmp_path, capsys):
    path = tmp_path / "config.py"
    path.write_text(
        "from llmx import config\n\n\ndef get_config():\n    run = config.default()\n"
        "    run.batch.size, run.batch.sequence_length = 8, 256\n    return run\n"
    )
    trace = tmp_path / "step.json"
    arguments = ["--config", str(path), "--topology", "v5e:2x2", "--trace", str(trace), "--json"]
    assert command.main(arguments) == command.FITS
    document = json.loads(capsys.readouterr().out)
    rows = json.loads(trace.read_text())["traceEvents"]
    end = max(one["ts"] + one["dur"] for one in rows if one["ph"] == "X")
    assert end == pytest.approx(1e6 * document["timeline"]["step"])


def test_the_roofline_reads_programs_of_this_cpu():
    core = core_times.Core(flops={"bf16": 1e11, "f32": 5e10}, bandwidth=1e10)
    x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    text = jax.jit(lambda a, b: jnp.tanh(a @ b)).lower(x, x).compile().as_text()
    times = timeline.read(text, [("x", 1)], machine=links.Memory(1e10, 1e-5), core=core)
    assert times.step >= 2 * 256**3 / 5e10 and times.exposed == 0
    assert any(one.basis == "flops" for one in times.operations)

"""What GPUs move between slots and layers, in a step of a pipeline."""

import pytest
from support.resolved import resolved

from llmx.config import tick_arrays, utilization
from llmx.pipeline import ticks
from llmx.plan import machines, operators, sizes, slots, step_time

STAGES = dict(
    mesh__stage=2, mesh__data=1, mesh__fsdp=4, batch__accumulation=8, batch__size=32,
    batch__sequence_length=64, sharding__layout="zero3", remat="full", pipeline__schedule="zb_h1",
    model__num_layers=8,
)  # fmt: skip


def moved(deferred=1.0, **keys):
    """Bytes."""
    counted, core = sizes.of(resolved(**STAGES | keys)), machines.parse("h100:8").core
    return sum(one.bytes for one in slots.of(counted, core, operators.GPU, deferred))


def test_ticks_with_branches_move_all_slots_of_a_microbatch():
    """Of 8 microbatches in 2 stages 21 ticks, as compiled."""
    run = resolved(**STAGES)
    program = ticks.program(utilization.table_of(run))
    assert [times for _, _, times in program.loops if times > 2] == [21]
    D, F, H, K = run.model.width, run.model.mlp_dim, run.model.head_dim, run.model.num_kv_heads
    heads = run.model.num_heads * H
    tokens = 64  # one row of a device
    factors = 4 * 2 * tokens * (7 * D + 3 * F + 2 * heads + 2 * K * H)  # four layers in bf16
    saved = 4 * 2 * tokens * D
    moved_by, microbatches = operators.GPU, 8
    of_saved = moved_by.branches * 21 + moved_by.of_slots * microbatches
    of_factors = moved_by.branches * 21 + moved_by.of_factors * microbatches
    assert moved() == pytest.approx(of_saved * saved + of_factors * factors)
    # Of the layers that are not deferred there are no factors.
    assert moved(0.25) == pytest.approx(of_saved * saved + of_factors * factors / 4)
    # Without branches each FORWARD writes a slot; `zb_1f1b` defers weight gradients as well, of
    # which it keeps a part of the factors.
    assert moved(pipeline__schedule="1f1b") == moved_by.of_slots * microbatches * saved
    assert moved(pipeline__schedule="gpipe") == moved_by.of_slots * microbatches * saved
    less = moved(pipeline__schedule="zb_1f1b") - microbatches * moved_by.of_slots * saved
    assert 0.5 < less / (microbatches * moved_by.of_factors * factors) <= 1
    assert moved(mesh__stage=1, pipeline__schedule="1f1b") == 0


@pytest.mark.parametrize("text", ["none", "dots", "names", "part+none"])
def test_layers_that_save_everything_write_it_more_often(text):
    run = resolved(**STAGES | dict(remat=text, pipeline__schedule="1f1b"))
    saved = tick_arrays.of(run, 0, on_gpu=True).saved
    passes = operators.GPU.unlike_slots if text == "none" else operators.GPU.of_slots
    assert moved(remat=text, pipeline__schedule="1f1b") == pytest.approx(passes * 8 * saved)
    if text == "none":
        assert saved == tick_arrays.kept(run, "none", (4, 4))


def test_it_takes_time_on_gpus():
    of = {}
    for name in "h100:8", "v5p:2x2x2":
        machine = machines.parse(name)
        listed = step_time.of(resolved(**STAGES), machine).operators
        of[name] = [one.seconds for one in listed if one.name == "slots"]
    assert of["v5p:2x2x2"] == []
    assert of["h100:8"] == [pytest.approx(moved() / machines.parse("h100:8").core.bandwidth)]

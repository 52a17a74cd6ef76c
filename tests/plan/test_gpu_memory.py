"""What XLA:GPU holds at a time where groups of tokens take turns, and in pipelines."""

import math

import pytest

from llmx import config
from llmx.config import checks, loss_memory, stage_memory
from llmx.plan import memory, sizes


def _run(**keys):
    run = config.default()
    run.mesh.data, run.batch.size, run.model.width, run.model.num_layers = 1, 32, 1024, 8
    for key, value in keys.items():
        config.set_value(run, key.replace("__", "."), value)
    mesh = [size for size in vars(run.mesh).values() if isinstance(size, int)]
    return checks.resolve(run, math.prod(mesh))


# ------------------------------------------------------------------------------ tokens in turns

TENSOR = dict(mesh__tensor=4, mesh__data=2, sharding__layout="zero1", remat="full")


def _peak(moment, turns, on_gpu=True, **keys):
    held = memory.of(sizes.of(_run(**TENSOR | keys)), on_gpu=on_gpu, turns=turns)
    return held.peaks[moment]


def test_where_tokens_take_turns_a_layer_is_begun_beside_the_loss():
    counted = sizes.of(_run(**TENSOR))
    gathered = 2 * counted.tokens * 1024  # bf16, whole along `tensor`
    assert _peak(memory.END_OF_FORWARD, 4)["a layer, begun"] == 2 * gathered
    assert "a layer, begun" not in _peak(memory.END_OF_FORWARD, 1)
    assert "a layer, begun" not in _peak(memory.END_OF_FORWARD, 4, on_gpu=False)
    # Where nothing is run again there is nothing to begin.
    assert "a layer, begun" not in _peak(memory.END_OF_FORWARD, 4, remat="none")


def test_of_four_turns_three_are_differentiated_at_a_time():
    run = _run(**TENSOR)
    of_mlp = 2 * sizes.of(run).tokens * run.model.mlp_dim / 4
    layer = {turns: _peak(memory.BACKWARD, turns)["a layer"] for turns in (1, 2, 3, 4)}
    assert layer[1] == layer[2] == layer[3]
    assert layer[3] - layer[4] == pytest.approx(9 * of_mlp / 4)  # of 9 arrays


def test_sums_over_chunks_are_the_gradient_only_where_they_are_as_large():
    """A head's gradient in fp32 that is split further is made of whole sums."""

    def loss(layout):
        keys = dict(mesh__data=8, loss__chunks=4, precision="bf16_fp32_reduce")
        return loss_memory.of(_run(**keys, sharding__layout=layout), on_gpu=True)

    head = sizes.of(_run(mesh__data=8)).head.numbers
    assert loss("zero2") - loss("zero1") == 4 * head


# ------------------------------------------------------------------------------------ pipelines

STAGES = dict(
    mesh__stage=2, mesh__data=4, batch__accumulation=4, sharding__layout="zero1", remat="full",
    pipeline__schedule="1f1b",
)  # fmt: skip


def _stages(on_gpu=True, **keys):
    return stage_memory.of(_run(**STAGES | keys), on_gpu=on_gpu)


def test_what_pipedream_leaves_to_the_next_step_is_state():
    run = _run(**STAGES | dict(pipeline__schedule="pipedream_2bw"))
    counted = sizes.of(run)
    held = memory.of(counted, on_gpu=True)
    gradients = sum(2 * counted.local(leaf, "gradients") for leaf in stage_memory.leaves(run.model))
    weights = held.state["parameters"]
    assert held.state["in flight"] == pytest.approx(weights + gradients, rel=1e-6)
    assert held.state["kept"] > 0 and held.state["waiting"] > 0
    assert not {"kept", "waiting", "in flight"} & held.peaks[memory.BACKWARD].keys()
    # Both steps' weights lie behind each other, where those of the batch in flight then need not.
    assert held.peaks[memory.BACKWARD]["versions"] == weights
    flushed = memory.of(sizes.of(_run(**STAGES)), on_gpu=True)
    assert not {"kept", "waiting", "in flight"} & flushed.state.keys()


def test_with_prediction_the_weights_predicted_from_are_in_flight():
    keys = dict(pipeline__schedule="pipedream_2bw", pipeline__predict=True)
    held = _stages(**keys)
    assert held.in_flight == 2 * held.parameters


def test_stages_that_gather_nothing_hold_gradients_of_a_chunk_twice():
    """On GPUs, with one layer's weights in bf16, and less of the MLP than where weights are
    gathered ahead."""
    run = _run(**STAGES)
    F, D, tokens = run.model.mlp_dim, 1024, sizes.of(run).tokens
    counted = stage_memory.Held(run)
    blocks = sum(counted.numbers(leaf, "gradients") for leaf in sizes.of(run).weights)
    outside = sum(
        4 * counted.numbers(leaf, "gradients")
        for leaf in stage_memory.leaves(run.model) if not leaf.in_blocks
    )  # fmt: skip
    gradients, one_layer = 2 * blocks, 2 * blocks / 4  # of 4 layers, bf16
    layer = 2 * tokens * (7 * F + 4 * D)
    saved = 4 * 2 * tokens * D
    held = _stages().working
    assert held == pytest.approx(saved + 2 * gradients + one_layer + layer + outside, rel=0.01)
    # Gathered ahead, or of gradients in fp32, it is another program.
    assert _stages(precision="bf16_fp32_reduce").working > held


def test_gradients_of_one_chunk_of_logits_wait_for_a_tied_table():
    keys = dict(model__vocab_size=4096, model__mlp_dim=16384, model__tied_head=True)
    one, four = (_stages(**keys, loss__chunks=num).working for num in (1, 4))
    run = _run(**STAGES | keys | dict(loss__chunks=1))
    logits = 2 * sizes.of(run).tokens * 4096 / 2  # bf16; half of the rows on each stage
    assert one - four == logits == loss_memory.gradients_of_logits(run)
    keys |= dict(model__tied_head=False)
    assert len({_stages(**keys, loss__chunks=num).working for num in (1, 4)}) == 1

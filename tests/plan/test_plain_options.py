"""What XLA holds at a time, by options that many runs have: read from a cover of their pairs."""

import dataclasses
import math

import pytest
from support.resolved import resolved

from llmx.aot import topologies
from llmx.config import (
    loss_memory,
    stage_memory,
    state_memory,
    tick_arrays,
    tick_memory,
    utilization,
)
from llmx.model import families, remat_costs
from llmx.plan import memory, sizes, traffic


def _run(**keys):
    plain = dict(mesh__data=1, batch__size=32, model__width=1024, model__num_layers=8)
    return resolved(**plain | keys)


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


def test_nothing_is_begun_where_positions_are_whole():
    whole = dict(sharding__sequence_parallel=False)
    assert "a layer, begun" not in _peak(memory.END_OF_FORWARD, 4, **whole)
    # With segments that save products layers are run again all the same.
    assert "a layer, begun" not in _peak(memory.END_OF_FORWARD, 4, remat="dots")
    assert _peak(memory.END_OF_FORWARD, 4, remat="every_2+dots")["a layer, begun"] > 0


def test_a_machine_says_how_many_take_turns():
    rows = dict(mesh__data=2, batch__size=64, batch__sequence_length=4096)
    for name, begun in (("h100:8", True), ("v5p:2x2x2", False)):
        held = memory.on(sizes.of(_run(**TENSOR | rows)), topologies.parse(name))
        assert ("a layer, begun" in held.peaks[memory.END_OF_FORWARD]) == begun


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


# ------------------------------------------------------------- gradients of tables, and the loss

WHOLE = dict(mesh__data=8, sharding__layout="ddp", loss__chunks=4, remat="full")
SUMS = WHOLE | dict(batch__accumulation=4, batch__size=128, precision="bf16_fp32_reduce")


def _parts(moment, on_gpu, **keys):
    return memory.of(sizes.of(_run(**keys)), on_gpu=on_gpu).peaks[moment]


def _gradients(**keys):
    """(of all weights, of a table), of a microbatch; norms in fp32."""
    counted = sizes.of(_run(**keys))
    table = counted.reduce_bytes * counted.local(counted.head, "gradients")
    every = sum(
        counted.local(leaf, "gradients") * (counted.reduce_bytes if leaf.is_matrix else 4)
        for leaf in state_memory.leaves(counted.run.model)
    )
    return every, table


@pytest.mark.parametrize("on_gpu", [False, True])
def test_gradients_of_tables_in_fp32_are_summed_at_once(on_gpu):
    """As both are fp32 and whole, none of them waits for those of the layers."""
    every, table = _gradients(**SUMS)
    assert _parts(memory.BACKWARD, on_gpu, **SUMS)["gradients"] == every - 2 * table
    assert _parts(memory.END_OF_FORWARD, on_gpu, **SUMS)["gradients"] == table
    # With one microbatch, in bf16, of a tied head, or of split gradients they wait.
    for keys in (
        dict(batch__accumulation=1), dict(precision="bf16"), dict(model__tied_head=True),
        dict(sharding__layout="zero2"),
    ):  # fmt: skip
        every, _ = _gradients(**SUMS | keys)
        assert _parts(memory.BACKWARD, on_gpu, **SUMS | keys)["gradients"] == math.ceil(every)


def test_of_one_chunk_tpus_add_the_gradient_of_the_head_at_once():
    keys = SUMS | dict(precision="bf16", loss__chunks=1)
    every, table = _gradients(**keys)
    held = _parts(memory.BACKWARD, False, **keys)
    assert held["gradients"] == every - table and "logits" not in held
    assert "gradients" not in _parts(memory.END_OF_FORWARD, False, **keys)
    alone = _parts(memory.BACKWARD, False, **keys | dict(batch__accumulation=1))
    assert alone["logits"] > 0 and alone["gradients"] == math.ceil(every)


def test_with_several_microbatches_tpus_make_gradients_of_layers_behind_the_loss():
    keys = WHOLE | dict(precision="bf16", batch__size=128)
    one, several = (
        _parts(memory.END_OF_FORWARD, False, **keys, batch__accumulation=n)["gradients"]
        for n in (1, 4)
    )
    every, table = _gradients(**keys)
    assert (one, several) == (every, table)


def test_a_head_that_is_whole_is_rounded_behind_the_loss():
    """On GPUs: the loss has its sum in fp32."""
    every, table = _gradients(**WHOLE)
    assert _parts(memory.END_OF_FORWARD, True, **WHOLE)["gradients"] == every - table
    split = WHOLE | dict(mesh__data=1, mesh__fsdp=8, sharding__layout="zero3")
    every, _ = _gradients(**split)
    assert _parts(memory.END_OF_FORWARD, True, **split)["gradients"] == every


def test_gradients_behind_the_loss_where_layers_save_all_products():
    """On GPUs, with several microbatches."""
    keys = WHOLE | dict(remat="dots", batch__size=128)
    one, several = (
        _parts(memory.END_OF_FORWARD, True, **keys, batch__accumulation=n).get("gradients", 0)
        for n in (1, 4)
    )
    assert one > several == 0
    keys |= dict(remat="names", batch__accumulation=4)
    assert _parts(memory.END_OF_FORWARD, True, **keys)["gradients"] > 0


def test_gradients_behind_the_loss_where_two_tables_are_split_over_tensor():
    """On GPUs, with several microbatches that gather nothing."""
    keys = dict(
        mesh__data=4, mesh__tensor=2, sharding__layout="ddp", remat="full", loss__chunks=4,
        batch__accumulation=4, batch__size=128,
    )  # fmt: skip
    assert "gradients" not in _parts(memory.END_OF_FORWARD, True, **keys)
    for other in (
        dict(model__tied_head=True), dict(batch__accumulation=1), dict(sharding__layout="zero2"),
        dict(mesh__data=1, mesh__fsdp=4, sharding__layout="zero3"),
    ):  # fmt: skip
        assert _parts(memory.END_OF_FORWARD, True, **keys | other)["gradients"] > 0


def test_lookups_of_parameters_in_bf16_are_added_up_in_fp32():
    """On several GPUs, where gradients are whole and layers are run again."""
    name, keys = "gradient of the embedding", WHOLE | dict(precision="pure_bf16")
    table = sizes.of(_run(**keys)).head.numbers
    assert _parts(memory.BACKWARD, True, **keys)[name] == 4 * table
    assert _parts(memory.END_OF_FORWARD, True, **keys)[name] == 4 * table
    # Over several microbatches both tables' are summed as they are made.
    several = keys | dict(batch__accumulation=4, batch__size=128)
    every, of_table = _gradients(**several)
    assert _parts(memory.BACKWARD, True, **several)["gradients"] == math.ceil(every - 2 * of_table)
    split = dict(mesh__data=1, mesh__fsdp=8, sharding__layout="zero3")
    for other in (dict(precision="bf16"), dict(remat="none"), split):
        assert name not in _parts(memory.BACKWARD, True, **keys | other)
    assert name not in _parts(memory.BACKWARD, False, **keys)


def test_copies_of_weights_on_gpus_are_in_the_type_of_the_parameters():
    keys = dict(mesh__fsdp=8, remat="full")
    name = "copies of weights and gradients"
    fp32, bf16 = (
        {on_gpu: _parts(memory.BACKWARD, on_gpu, **keys, precision=of)[name] for on_gpu in (0, 1)}
        for of in ("bf16", "pure_bf16")
    )
    assert fp32[1] == 2 * bf16[1] and fp32[0] == bf16[0]


def test_a_head_in_the_compute_dtype_is_read_as_it_is():
    """On TPUs whatever chunks there are; elsewhere two chunks of it are copied."""
    keys = dict(mesh__data=8, sharding__layout="ddp", model__vocab_size=32768, loss__chunks=4)
    rows = 2 * 1024 * 32768 / 4
    for on_gpu, copied in ((False, 0), (True, 2)):
        of = {
            precision: loss_memory.of(_run(**keys, precision=precision), on_gpu=on_gpu)
            for precision in ("bf16", "pure_bf16")
        }
        of_sums = on_gpu * 2 * 1024 * 32768  # the head's sum is in bf16 too
        assert of["bf16"] - of["pure_bf16"] == of_sums + (2 - copied) * rows


# ------------------------------------------------------------------------------------ pipelines

STAGES = dict(
    mesh__stage=2, mesh__data=4, batch__accumulation=4, sharding__layout="zero1", remat="full",
    pipeline__schedule="1f1b",
)  # fmt: skip


def _ticks(run, on_gpu=True):
    return tick_arrays.of(run, on_gpu=on_gpu)


def _saved(run):
    """Of a microbatch, in a slot."""
    return stage_memory.of(run, on_gpu=True).kept / _ticks(run).program.slots["saved"]


def _stages(on_gpu=True, **keys):
    return stage_memory.of(_run(**STAGES | keys), on_gpu=on_gpu)


def test_what_pipedream_leaves_to_the_next_step_is_state():
    run = _run(**STAGES | dict(pipeline__schedule="pipedream_2bw"))
    counted = sizes.of(run)
    held = memory.of(counted, on_gpu=True)
    gradients = sum(2 * counted.local(leaf, "gradients") for leaf in state_memory.leaves(run.model))
    weights = held.state["parameters"]
    assert held.state["in flight"] == pytest.approx(weights + gradients, rel=1e-6)
    assert held.state["kept"] > 0 and held.state["waiting"] > 0
    assert not {"kept", "waiting", "in flight"} & held.peaks[memory.BACKWARD].keys()
    # Both steps' weights lie behind each other, where those of the batch in flight then need not.
    assert held.peaks[memory.BACKWARD]["versions"] == weights
    flushed = memory.of(sizes.of(_run(**STAGES)), on_gpu=True)
    assert not {"kept", "waiting", "in flight"} & flushed.state.keys()


def test_beside_the_loss_of_pipedream_no_other_tick_has_begun():
    keys = dict(model__vocab_size=131072, model__mlp_dim=2048, loss__chunks=1)
    flushed, periodic = (
        _stages(**keys, pipeline__schedule=name).working for name in ("1f1b", "pipedream_2bw")
    )
    tokens = sizes.of(_run(**STAGES | keys)).tokens
    assert flushed - periodic == 6 * 2 * tokens * 2048  # arrays of the MLP


def test_with_prediction_the_weights_predicted_from_are_in_flight():
    keys = dict(pipeline__schedule="pipedream_2bw", pipeline__predict=True)
    held = _stages(**keys)
    assert held.in_flight == 2 * held.parameters


def test_stages_that_gather_nothing_hold_gradients_of_a_chunk_twice():
    """On GPUs, with one layer's weights in bf16, and less of the MLP than where weights are
    gathered ahead."""
    run = _run(**STAGES)
    F, D, tokens = run.model.mlp_dim, 1024, sizes.of(run).tokens
    counted = state_memory.Held(run)
    blocks = sum(counted.numbers(leaf, "gradients") for leaf in sizes.of(run).weights)
    outside = sum(
        4 * counted.numbers(leaf, "gradients")
        for leaf in state_memory.leaves(run.model) if not leaf.in_blocks
    )  # fmt: skip
    gradients, one_layer = 2 * blocks, 2 * blocks / 4  # of 4 layers, bf16
    layer = 2 * tokens * (7 * F + 4 * D)
    saved = 4 * 2 * tokens * D
    held = _stages().working
    assert held == pytest.approx(saved + 2 * gradients + one_layer + layer + outside, rel=0.01)
    # Where weights are gathered, or gradients are in fp32, it is another program.
    assert _stages(precision="bf16_fp32_reduce").working > held
    split = dict(mesh__data=1, mesh__fsdp=2, mesh__tensor=2, sharding__layout="zero3")
    apart = _stages(**split).working - _stages(**split | dict(model__mlp_dim=F + 256)).working
    F_bytes = 2 * sizes.of(_run(**STAGES | split)).tokens * 256 / 2
    assert -apart > 10 * F_bytes  # four arrays of the MLP, and six more


def test_gradients_of_one_chunk_of_logits_wait_for_a_tied_table():
    keys = dict(model__vocab_size=4096, model__mlp_dim=16384, model__tied_head=True)
    one, four = (_stages(**keys, loss__chunks=num).working for num in (1, 4))
    run = _run(**STAGES | keys | dict(loss__chunks=1))
    logits = 2 * sizes.of(run).tokens * 4096 / 2  # bf16; half of the rows on each stage
    assert one - four == logits == loss_memory.gradients_of_logits(run)
    keys |= dict(model__tied_head=False)
    assert len({_stages(**keys, loss__chunks=num).working for num in (1, 4)}) == 1


def _of_stage(**keys):
    """(a chunk's saved activations, gradients and gathered weights of a layer in bf16; the
    embedding's gradient in fp32; an array [tokens, F]; one [tokens, D]) of a device."""
    run = _run(**STAGES | keys)
    counted, held = sizes.of(run), state_memory.Held(run)
    layers = run.model.num_layers / run.mesh.stage
    blocks = sum(held.numbers(leaf, "gradients") for leaf in counted.weights)
    (embedding,) = (
        leaf for leaf in state_memory.leaves(run.model) if leaf.name == "embedding"
    )  # fmt: skip
    saved = layers * 2 * counted.tokens_between * run.model.width  # remat="full"
    of_mlp = 2 * counted.tokens * run.model.mlp_dim / run.mesh.tensor
    of_stream = 2 * counted.tokens * run.model.width
    return (
        saved, 2 * blocks, 2 * blocks / layers, 4 * held.numbers(embedding, "gradients"),
        of_mlp, of_stream,
    )  # fmt: skip


OVER_TENSOR = dict(
    mesh__data=1, mesh__tensor=2, model__num_heads=8, model__mlp_dim=16384,
    model__vocab_size=2**15, loss__chunks=4,
)  # fmt: skip


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_over_tensor_ticks_are_apart(schedule):
    """One layer's weights, three arrays of its MLP, and of the tables the embedding's gradient."""
    keys = OVER_TENSOR | dict(pipeline__schedule=schedule)
    saved, gradients, weights, lookups, of_mlp, of_stream = _of_stage(**keys)
    wanted = saved + gradients + weights + lookups + 3 * of_mlp + 4 * of_stream
    assert _stages(**keys).working == pytest.approx(wanted, rel=0.01)
    # In fp32 they take twice as much, and are copied where devices have other tokens.
    keys |= dict(precision="bf16_fp32_reduce")
    assert _stages(**keys).working - wanted == pytest.approx(gradients, rel=0.01)
    assert _stages(**keys | dict(mesh__data=2)).working - wanted > 3 * gradients


def test_beside_the_loss_of_layers_that_save_products_their_gradients_are_begun():
    keys = OVER_TENSOR | dict(model__vocab_size=2**17, model__mlp_dim=2048, loss__chunks=1)
    full, dots = (_stages(**keys, remat=remat).working for remat in ("full", "dots"))
    run = _run(**STAGES | keys | dict(remat="dots"))
    saved = _saved(run)
    assert dots - full == pytest.approx(saved + _of_stage(**keys)[1], rel=0.01)
    # In one loop of FORWARD and one of BACKWARD nothing is begun.
    flushed = (
        _stages(**keys, remat=remat, pipeline__schedule="gpipe").working
        for remat in ("full", "dots")
    )
    assert len(set(flushed)) == 1


def test_one_layer_has_its_weights_twice_and_a_chunk_of_the_head():
    keys = dict(model__num_layers=2, mesh__data=2, model__mlp_dim=16384)
    keys |= dict(model__vocab_size=2**16, loss__chunks=4)
    _, gradients, weights, lookups, of_mlp, of_stream = _of_stage(**keys)
    run = _run(**STAGES | keys)
    rows = loss_memory.head_of_chunk(run)
    assert rows == 2 * run.model.padded_vocab / 2 * 1024 / utilization.loss_chunks(run)
    outside = lookups * (1 if run.model.tied_head else 2)
    wanted = gradients + 2 * weights + outside + 3 * of_mlp + 4 * of_stream + rows
    assert _stages(**keys).working == pytest.approx(wanted, rel=0.01)


def test_interleaved_chunks_have_lookups_of_several_ticks_beside_the_loss():
    keys = dict(model__num_layers=4, model__vocab_size=2**17, model__mlp_dim=2048, loss__chunks=1)
    plain, interleaved = (
        _stages(**keys, pipeline__schedule=name).working for name in ("1f1b", "interleaved_1f1b")
    )
    assert interleaved - plain == pytest.approx(3 * _of_stage(**keys)[3], rel=0.05)


@pytest.mark.parametrize("remat", ["dots", "none"])
def test_beside_what_a_backward_reads_there_is_what_a_forward_saved(remat):
    """Where layers save all products; and a chunk's logits, where gradients are whole."""
    more = {}
    for layout in ("zero1", "zero2"):
        # With wide layers the peak is in a BACKWARD.
        keys = dict(remat=remat, model__vocab_size=2**14, model__mlp_dim=16384)
        run = _run(**STAGES | keys | dict(sharding__layout=layout))
        of = _ticks(run)
        plain = of.backward(1, of_mlp=7) + of.gradients + of.outside
        more[layout] = tick_memory.of(of) - plain
    saved = _saved(run)
    logits = loss_memory.logits_of_chunk(run) + loss_memory.gradients_of_logits(run)
    assert utilization.loss_chunks(run) == 1
    assert more == pytest.approx(dict(zero1=saved + logits, zero2=saved))


def test_on_one_device_a_stage_fp32_gradients_are_not_copied():
    keys = dict(pipeline__schedule="gpipe", precision="bf16_fp32_reduce", model__mlp_dim=16384)
    alone, split = dict(mesh__data=1), dict(mesh__data=4)
    saved, gradients, weights, lookups, of_mlp, of_stream = _of_stage(**keys | alone)
    wanted = saved + 2 * gradients + weights + lookups + 3 * of_mlp + 4 * of_stream
    assert _stages(**keys | alone).working == pytest.approx(wanted, rel=0.01)
    assert _stages(**keys | split).working > wanted + 2 * gradients


def test_a_conditional_saves_what_one_kind_of_layer_does():
    """Stages that begin elsewhere in the period have a conditional for each layer."""
    model = families.preset("gemma3_1b", num_layers=4)
    mixed = dataclasses.replace(model, layer_pattern=("local", "local", "local", "global"))
    alike = dataclasses.replace(model, layer_pattern=("local",))
    for text in ("none", "dots", "names", "full"):
        of = (
            remat_costs.saved_bytes_of_chunk(one, text=text, compute_bytes=2, chunks=(2, 2))
            for one in (mixed, alike)
        )
        assert len(set(of)) == 1


def test_lookups_are_whole_until_they_are_scattered():
    """On GPUs, where gradients are split and parameters are not."""
    keys = dict(model__vocab_size=2**17, model__mlp_dim=2048)
    whole, split = (_stages(**keys, sharding__layout=name).working for name in ("zero1", "zero2"))
    run = _run(**STAGES | keys | dict(sharding__layout="zero2"))
    head = [leaf for leaf in state_memory.leaves(run.model) if leaf.name == "head"]
    held = state_memory.Held(run)
    of_head = 4 * sum(
        held.numbers(leaf, "parameters") - held.numbers(leaf, "gradients") for leaf in head
    )
    blocks = sum(
        held.numbers(leaf, "parameters") - held.numbers(leaf, "gradients")
        for leaf in sizes.of(run).weights
    )
    of_blocks = 2 * 2 * blocks
    assert 0 < whole - split <= of_head + of_blocks + 1


def test_factors_that_a_branch_returns_are_selected():
    keys = OVER_TENSOR | dict(pipeline__schedule="zb_h1")
    more = _stages(**keys).working - _stages(**OVER_TENSOR).working
    run = _run(**STAGES | keys)
    saved = _of_stage(**keys)[0]  # of layers that are not run again while factors are there
    of_chunk = 4 * tick_arrays.factor_bytes(run)
    assert more == pytest.approx(1.6 * of_chunk, abs=saved + 1)
    # Not on TPUs, nor of one layer, which has none to select; nor seen where weights are gathered.
    split = dict(mesh__tensor=1, mesh__fsdp=2, sharding__layout="zero3")
    one_layer = dict(model__num_layers=2)
    for other, on_gpu in ({}, False), (one_layer, True), (split, True):
        run = _run(**STAGES | keys | other)
        num = run.model.num_layers // 2
        of = _ticks(run, on_gpu)
        assert of.selected_factors == of.factors == num * tick_arrays.factor_bytes(run)


def test_two_chunks_of_a_tied_head_have_more_logits_and_in_a_pipeline_one_gradient():
    keys = dict(model__vocab_size=2**15, mesh__data=1, mesh__fsdp=4, sharding__layout="zero3")
    for stages, more in (1, 2), (2, 1 / 2):
        tied, apart = (
            _run(**STAGES | keys | dict(loss__chunks=2, mesh__stage=stages, model__tied_head=tied))
            for tied in (True, False)
        )
        found = loss_memory.of(tied, on_gpu=True) - loss_memory.of(apart, on_gpu=True)
        assert found == more * loss_memory.logits_of_chunk(tied)


def test_of_layers_with_part_a_forward_saves_the_input_of_its_chunk_alone():
    """And a BACKWARD makes the rest again: of one layer, and of several."""
    for layers in 2, 8:
        of = {
            text: _stages(model__num_layers=layers, mesh__data=2, remat=text).working
            for text in ("part", "part+dots", "part+none")
        }
        assert of["part"] < of["part+dots"] < of["part+none"]
        for text in ("part+dots", "part+none"):
            run = _run(**STAGES | dict(model__num_layers=layers, mesh__data=2, remat=text))
            saved, inputs = (
                tick_arrays.kept(run, inside, (layers // 2,) * 2)
                for inside in (text.partition("+")[2], "full")
            )
            # Of several layers a second microbatch's are begun.
            microbatches = 1 if layers == 2 else 2
            assert of[text] - of["part"] == pytest.approx(microbatches * (saved - inputs))


def test_beside_an_interleaved_loss_are_fp32_gradients_of_a_chunk():
    keys = dict(model__num_layers=8, model__vocab_size=2**17, model__mlp_dim=4096, loss__chunks=1)
    keys |= dict(pipeline__schedule="interleaved_1f1b")
    fp32, bf16 = (
        _run(**STAGES | keys | dict(precision=name)) for name in ("bf16_fp32_reduce", "bf16")
    )
    more = stage_memory.of(fp32, on_gpu=True).working - stage_memory.of(bf16, on_gpu=True).working
    blocks = sum(
        state_memory.Held(fp32).numbers(leaf, "gradients") for leaf in sizes.of(fp32).weights
    )
    in_loss = loss_memory.of(fp32, on_gpu=True) - loss_memory.of(bf16, on_gpu=True)
    assert more == pytest.approx(4 * blocks / 2 + in_loss, rel=0.01)


@pytest.mark.parametrize("layout", ["ddp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize(
    "schedule, layers, slots", [("1f1b", 9, 12), ("interleaved_1f1b", 9, 16), ("1f1b", 5, 8)]
)
def test_empty_slots_of_stages_are_sent_and_updated(layout, schedule, layers, slots):
    """XLA has them in every array of the blocks: as compiled with 9 layers in 4 stages."""
    sent = {}
    for num in layers, slots:
        mesh = dict(mesh__stage=4, mesh__data=1, mesh__fsdp=2)
        keys = mesh | dict(sharding__layout=layout, pipeline__schedule=schedule)
        counted = sizes.of(_run(**STAGES | keys | dict(model__num_layers=num)))
        sent[num] = traffic.by_axes(traffic.of(counted, on_gpu=True))["fsdp"]
        assert counted.padding == slots / num
        stack = next(leaf for leaf in counted.weights if leaf.name.endswith("mlp/up/kernel"))
        assert counted.layers_of(stack) == slots / 4
    assert sent[layers] == pytest.approx(sent[slots], rel=1e-9)


def test_of_several_parts_the_sum_of_the_heads_gradient_is_beside_a_backward():
    """Where layers save all products and gradients are whole: a part's logits, and that."""
    keys = dict(remat="dots", model__vocab_size=2**15, model__mlp_dim=16384, loss__chunks=4)
    of = {}
    for layout in ("zero1", "zero2"):
        run = _run(**STAGES | keys | dict(sharding__layout=layout))
        held, parts = state_memory.Held(run), _ticks(run)
        of[layout] = tick_memory.of(parts) - 2 * parts.gradients - parts.outside
    (head,) = (leaf for leaf in state_memory.leaves(run.model) if leaf.name == "head")
    more = loss_memory.logits_of_chunk(run) + loss_memory.gradients_of_logits(run)
    more += 4 * held.numbers(head, "parameters")
    assert of["zero1"] - of["zero2"] == pytest.approx(more, rel=1e-9)


@pytest.mark.parametrize("layout, num_bytes", [("zero3", 4), ("ddp", 2), ("zero2", 2)])
def test_gradients_of_routers_are_summed_in_fp32_where_they_are_split(layout, num_bytes):
    """As lowered: in bf16 they are rounded first where the weight is whole on each device."""
    experts = dict(model__num_experts=4, model__experts_per_token=2, model__expert_dim=512)
    counted = sizes.of(_run(**experts, mesh__fsdp=4, sharding__layout=layout))
    router = next(leaf for leaf in counted.weights if "router" in leaf.axes)
    assert counted.summed_bytes(router) == num_bytes
    assert {counted.summed_bytes(leaf) for leaf in counted.weights if leaf != router} == {2}
    sent = [one for one in traffic.of(counted) if one.name == router.name]
    sums = [one.bytes for one in sent if one.purpose == "gradients"]
    layers = 8 if layout == "ddp" else 1  # together, or one after the other
    assert sums == [num_bytes * 1024 * 4 * layers]

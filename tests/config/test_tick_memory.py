"""What GPUs hold in a pipeline's ticks, as read in compiled programs.

How many microbatches' gradients, factors and saved activations are there at a time is given here as
it was counted in the arrays of the program; tests/golden/plain_pipelines.jsonl has the programs.
"""

import pytest
from support.resolved import resolved

from llmx.config import stage_memory, tick_arrays, tick_memory, utilization

STAGES = dict(
    mesh__stage=2, mesh__data=1, mesh__fsdp=4, batch__accumulation=8, batch__size=32,
    batch__sequence_length=64, sharding__layout="zero3", remat="full", pipeline__schedule="1f1b",
    model__num_layers=8, model__width=512, model__mlp_dim=8192, loss__chunks=1,
)  # fmt: skip
WHOLE = dict(mesh__data=4, mesh__fsdp=1, sharding__layout="zero1")
PERIODS = dict(
    model__layer_pattern=("local",) * 2 + ("global",), model__window=32, model__num_layers=12
)
OVER_TENSOR = dict(mesh__fsdp=2, mesh__tensor=2, model__num_heads=8, batch__size=16)
REPLICAS = dict(sharding__layout="zero1", mesh__fsdp=1, mesh__data=2)


def ticks_of(on_gpu=True, **keys):
    return tick_arrays.of(resolved(**STAGES | keys), on_gpu=on_gpu)


def by_hand(ticks):
    """(gradients of a layer's weights, arrays of F and of D of a microbatch, a layer's weights,
    both tables' gradients, copies of `down` and `out`) in bytes of a device, from shapes; bf16."""
    model, mesh = ticks.run.model, ticks.run.mesh
    D, F, heads = model.width, model.mlp_dim, model.num_heads * model.head_dim
    keys = model.num_kv_heads * model.head_dim
    of_layer = 3 * D * F + 2 * D * heads + 2 * D * keys
    split = mesh.fsdp * mesh.tensor
    tokens = ticks.run.batch.size / 8 / mesh.fsdp / mesh.data * ticks.run.batch.sequence_length
    tables = 2 * model.padded_vocab * D / mesh.stage / split
    layers = model.num_layers / mesh.stage
    return (
        2 * of_layer / split, 2 * tokens * F / mesh.tensor, 2 * tokens * D,
        2 * of_layer / mesh.tensor, 4 * tables, 4 * layers * D * (F + heads) / split,
    )  # fmt: skip


def test_bytes_are_those_of_shapes():
    for schedule, gradients, saved in ("1f1b", 3, 2), ("gpipe", 2, 1):
        ticks = ticks_of(pipeline__schedule=schedule, model__tied_head=False)
        of_layer, of_mlp, of_stream, weights, tables, copied = by_hand(ticks)
        wanted = tables + copied + 4 * gradients * of_layer + 4 * saved * of_stream
        wanted += 2 * weights + (4 + 6) * of_mlp + 4 * of_stream
        assert tick_memory.of(ticks) == pytest.approx(wanted, rel=0.01)
    # Four BACKWARDs leave four times three arrays of F, and of D those of attention.
    long = dict(batch__sequence_length=512, model__tied_head=False)
    ticks = ticks_of(**long, pipeline__schedule="zb_1f1b")
    of_layer, of_mlp, of_stream, weights, tables, copied = by_hand(ticks)
    heads = ticks.run.model.num_heads * ticks.run.model.head_dim
    keys = ticks.run.model.num_kv_heads * ticks.run.model.head_dim
    of_heads = of_stream / ticks.run.model.width * (2 * heads + 2 * keys)
    factors = 4 * (3 * of_mlp + 4 * of_stream + of_heads)
    wanted = tables + 3 * tables / 2 + copied + 4 * factors + 3 * 4 * of_layer
    wanted += 3 * 4 * of_stream + 2 * weights + 10 * of_mlp + 4 * of_stream
    assert tick_memory.of(ticks) == pytest.approx(wanted, rel=0.01)


@pytest.mark.parametrize(
    "keys, name",
    [
        (dict(), "_ahead"), (dict(pipeline__schedule="zb_1f1b"), "_ahead"),
        (dict(pipeline__schedule="interleaved_1f1b", model__num_layers=16), "_ahead"),
        (dict(pipeline__schedule="gpipe"), "_gpipe"), (dict(model__num_layers=4), "_two_layers"),
        (dict(model__num_layers=2), "_one_layer_or_periodic"),
        (dict(pipeline__schedule="pipedream_2bw"), "_one_layer_or_periodic"),
        (dict(pipeline__schedule="zb_h1"), "_otherwise"),
        (dict(sharding__gather="step"), "_gathered_once"),
        (dict(sharding__gather="step", pipeline__schedule="gpipe"), "_gathered_once"),
        (dict(sharding__gather="step", pipeline__schedule="zb_h1"), "_otherwise"),
        # One microbatch: nothing takes turns, and factors are there all the same.
        (dict(pipeline__schedule="zb_1f1b", batch__accumulation=1), "_ahead"),
        (OVER_TENSOR, "_otherwise"),
        (OVER_TENSOR | dict(pipeline__schedule="gpipe"), "_gpipe_in_turn"),
        (OVER_TENSOR | dict(pipeline__schedule="zb_1f1b"), "_split_in_turn"),
        (OVER_TENSOR | dict(pipeline__schedule="zb_1f1b", sharding__gather="step"),
         "_split_in_turn"),
        (OVER_TENSOR | REPLICAS, "_in_turn"),
        (OVER_TENSOR | REPLICAS | dict(pipeline__schedule="zb_1f1b"), "_split_in_turn"),
        (OVER_TENSOR | REPLICAS | dict(pipeline__schedule="zb_h1"), "_in_turn"),
        (OVER_TENSOR | REPLICAS | dict(pipeline__schedule="pipedream_2bw"), "_in_turn"),
        (WHOLE, "_whole"), (WHOLE | dict(precision="fp32"), "_whole_fp32"),
        (WHOLE | dict(pipeline__schedule="zb_1f1b"), "_whole_and_split"),
        (WHOLE | dict(pipeline__schedule="zb_h1"), "_otherwise"),
        (WHOLE | dict(pipeline__schedule="zb_h1", sharding__layout="zero2"),
         "_branches_of_split_gradients"),
        (WHOLE | dict(pipeline__schedule="pipedream_2bw"), "_whole"),
        (WHOLE | dict(pipeline__schedule="gpipe"), "_gpipe_whole"),
        (WHOLE | dict(mesh__data=1, pipeline__schedule="gpipe"), "_in_turn"),
        (WHOLE | dict(model__num_layers=2), "_of_one_layer"),
    ],
)  # fmt: skip
def test_which_program_counts(keys, name):
    assert tick_memory.program_of(ticks_of(**keys)).__name__ == name
    assert tick_memory.program_of(ticks_of(**keys, on_gpu=False)).__name__ == "_on_tpu"


@pytest.mark.parametrize("precision", ["bf16", "fp32", "pure_bf16", "fp16"])
@pytest.mark.parametrize("reduce_dtype", ["", "bf16", "fp32"])
def test_no_array_takes_less_than_nothing(precision, reduce_dtype):
    """Nor is what a wide gradient takes more counted for a narrow one."""
    keys = dict(precision=precision, reduce_dtype=reduce_dtype)
    for schedule in "gpipe", "1f1b", "zb_1f1b":
        for layers in 4, 8:
            ticks = ticks_of(**keys, pipeline__schedule=schedule, model__num_layers=layers)
            assert ticks.fp32_of_layer >= 0 and ticks.gradients > 0
            assert tick_memory.of(ticks) >= ticks.layer(2) + ticks.gradients


def test_with_part_a_forward_saves_the_input_of_its_chunk():
    """And a BACKWARD makes the rest: so `part+none` takes no more than `none`, with slots less."""
    for schedule in "gpipe", "1f1b":
        keys = dict(pipeline__schedule=schedule, model__mlp_dim=1024, model__vocab_size=2**16)
        part, none = (ticks_of(**keys, remat=text) for text in ("part+none", "none"))
        assert part.saved == none.saved == none.saved_by_forward > 4 * part.saved_by_forward
        assert tick_memory.of(part) <= tick_memory.of(none) + 2 * part.saved
        of_part, of_none = (stage_memory.of(each.run, on_gpu=True).total for each in (part, none))
        assert of_part < of_none


def test_with_part_a_backward_behind_the_loop_makes_its_own_activations():
    four = dict(mesh__stage=4, mesh__fsdp=2, batch__size=16)
    for keys, gradients, saved in (
        (dict(pipeline__schedule="gpipe"), 2, 2), (dict(), 3, 2),
        # Where several BACKWARDs follow, and layers are few, theirs from the start.
        (four | dict(model__num_layers=16), 2, 3), (four | dict(model__num_layers=20), 2, 2),
    ):  # fmt: skip
        ticks = ticks_of(**keys, remat="part+none")
        wanted = around(ticks, gradients, saved) + at_work(ticks)
        assert tick_memory.of(ticks) == pytest.approx(wanted), keys


def test_two_layers_make_again_what_part_does_not_save():
    plain, all_of_it = (ticks_of(model__num_layers=4, remat=text) for text in ("part", "part+none"))
    more = all_of_it.saved - plain.saved
    assert tick_memory.of(all_of_it) - tick_memory.of(plain) == pytest.approx(more)
    assert more > 0


def test_gradients_of_layers_that_are_not_deferred_are_those_of_backward():
    """Of eight layers one to eight."""
    run = ticks_of(pipeline__schedule="zb_1f1b", model__num_layers=16).run
    found = [tick_memory.of(tick_arrays.of(run, num, on_gpu=True)) for num in range(1, 9)]
    assert found[2:] == sorted(found[2:])
    last = tick_arrays.of(run, 1, on_gpu=True)
    # One layer is in no loop, whose factors are there once.
    wanted = (
        around(last, 7 / 8 * 4 + 1 / 8, 3) + last.factors + 3 * last.table_gradient("embedding")
    )
    assert found[0] == pytest.approx(wanted + at_work(last))


def test_weights_that_are_gathered_once_a_step_are_there_in_two_layouts():
    """And a head that is not tied, with its gradient in fp32, whole: of several chunks in three
    arrays. A tied one stays split."""
    assert ticks_of(sharding__gather="layer").gathered_for_step == 0
    for tied, chunks, heads in (True, 1, 0), (False, 1, 1), (False, 2, 3):
        keys = dict(model__tied_head=tied, loss__chunks=chunks, sharding__gather="step")
        ticks = ticks_of(**keys)
        head = 0 if tied else ticks.run.model.padded_vocab / 2 * ticks.run.model.width
        weights = by_hand(ticks)[3] * ticks.run.model.num_layers / 2 + 2 * head
        assert ticks.gathered_for_step == pytest.approx(weights, rel=0.01)
        # The BACKWARDs of a loop's last turn and behind it, and of the loop's own turn.
        wanted = ticks.outside + 2 * ticks.gathered_for_step + 4 * heads * head
        wanted += 3 * ticks.gradients + ticks.layer(0) + 2 * ticks.saved
        assert tick_memory.of(ticks) == pytest.approx(wanted)
    part = ticks_of(**keys, remat="part+full")
    again = part.layer(0) + part.more_of_mlp + part.saved  # three are made again
    assert tick_memory.of(part) - tick_memory.of(ticks) == pytest.approx(again)
    loss = ticks_of(**keys, pipeline__schedule="gpipe", model__vocab_size=2**17)
    heads = 12 * loss.run.model.padded_vocab / 2 * loss.run.model.width
    wanted = loss.outside + 2 * loss.gathered_for_step + heads
    assert tick_memory.of(loss) == pytest.approx(wanted + loss.of_loss + loss.saved_by_forward)


def test_factors_of_backward_and_weight_are_there_beside_tensor():
    """But for a quarter, which WEIGHT has freed; and the gradients of three WEIGHTs, of which one
    is in a loop. Whether weights are gathered changes what is copied."""
    long = dict(pipeline__schedule="zb_1f1b", batch__sequence_length=512)
    for keys in OVER_TENSOR, OVER_TENSOR | REPLICAS:
        ticks = ticks_of(**keys, **long)
        wanted = ticks.outside + 1.75 * ticks.factors + 3 * ticks.gradients
        wanted += ticks.copied if ticks.gathers_where_used else 0
        assert tick_memory.of(ticks) == pytest.approx(wanted)
    # In four stages as many BACKWARDs as WEIGHTs are in one turn, and none behind it.
    four = dict(mesh__stage=4, mesh__data=1, batch__size=8, model__num_layers=16)
    ticks = ticks_of(**OVER_TENSOR | REPLICAS | long | four)
    wanted = ticks.outside + ticks.factors + 2 * ticks.gradients
    assert tick_memory.of(ticks) == pytest.approx(wanted)


def test_a_body_has_two_turns_of_a_loop_with_two_backwards():
    """Without gathers, where BACKWARDs in no loop are few: of four stages none."""
    four = dict(mesh__stage=4, mesh__data=2, mesh__fsdp=1, sharding__layout="zero1", batch__size=16)
    keys = four | dict(pipeline__schedule="zb_1f1b", model__num_layers=16)
    ticks = ticks_of(**keys)
    wanted = ticks.outside + 2 * ticks.factors + 2 * ticks.gradients + ticks.saved
    assert tick_memory.of(ticks) == pytest.approx(wanted + ticks.layer(1, 7))
    # Of layers that are not deferred a gradient more: here of five of eight.
    some = tick_arrays.of(ticks_of(**keys | dict(model__num_layers=32)).run, 3, on_gpu=True)
    of_gradients = (2 * 3 / 8 + 2 * 5 / 8) * some.gradients
    wanted = some.outside + 2 * some.factors + of_gradients + some.saved + some.layer(1, 7)
    assert tick_memory.of(some) == pytest.approx(wanted)
    # With `part` what two BACKWARDs make again.
    part = ticks_of(**keys, remat="part+none")
    assert tick_memory.of(part) - tick_memory.of(ticks) == pytest.approx(
        2 * part.saved + part.saved_by_forward - ticks.saved
    )


def test_without_gathers_part_makes_two_microbatches_again():
    """In gpipe, where a loop's body has two turns; and with joined ticks, of which the second is
    begun. An fp32 gradient, which is copied, is not there twice then."""
    for keys, begun in (
        (dict(pipeline__schedule="gpipe"), 0), (dict(), 1), (dict(precision="fp32"), 1),
    ):  # fmt: skip
        of = {}
        for text in "part", "part+none":
            ticks = ticks_of(**WHOLE, **keys, remat=text)
            of[text] = tick_memory.of(ticks), ticks.saved
        (less, few), (more, all_of_it) = of.values()
        assert more - less == pytest.approx(2 * (all_of_it - few))
        full = ticks_of(**WHOLE, **keys, remat="full")
        wide = ticks.gradients * (keys.get("precision") == "fp32")
        of_full = tick_memory.of(full) - full.saved
        wanted = 2 * few + begun * ticks.more_of_mlp - wide
        assert less - of_full == pytest.approx(wanted)


def test_fewer_deferred_layers_are_counted_as_if_nothing_had_been_counted():
    """What is kept from one count to the next does not depend on them."""
    for changed in (
        dict(), WHOLE, OVER_TENSOR, WHOLE | dict(precision="fp32"), dict(sharding__gather="step"),
        dict(pipeline__schedule="zb_h1"), WHOLE | dict(pipeline__schedule="zb_v"),
    ):  # fmt: skip
        keys = dict(pipeline__schedule="zb_1f1b", model__num_layers=16, remat="names") | changed
        run = resolved(**STAGES | keys)
        chained = tick_arrays.of(run, on_gpu=True)
        for layers in (chained.layers, 3, 2, 1, 0):
            tick_memory.of(chained)
            chained = chained.deferring(layers)
            fresh = tick_arrays.of(run, layers, on_gpu=True)
            assert tick_memory.of(chained) == tick_memory.of(fresh), (keys, layers)


def test_where_gradients_are_split_branches_return_what_is_beside_the_loss():
    """Or beside a layer at work, whichever is more."""
    keys = dict(WHOLE, sharding__layout="zero2", pipeline__schedule="zb_h1")
    large, small = (ticks_of(**keys, model__vocab_size=size) for size in (2**17, 2**9))
    returned = large.saved_by_forward + large.factors + large.gradients
    assert tick_memory.of(large) == pytest.approx(returned + large.of_loss)
    assert large.of_loss > large.layer(1) > small.of_loss
    assert tick_memory.of(small) == pytest.approx(returned + small.layer(1))
    ticks = large
    whole = ticks_of(**keys | dict(sharding__layout="ddp"))
    assert whole.gradients == pytest.approx(4 * ticks.gradients, rel=0.01)


def test_an_fp32_gradient_is_copied_where_a_stage_has_one_chunk():
    for schedule, chunks in ("1f1b", 1), ("interleaved_1f1b", 2):
        keys = OVER_TENSOR | dict(pipeline__schedule=schedule, model__num_layers=16)
        narrow, wide = (ticks_of(**keys, precision=p) for p in ("bf16", "bf16_fp32_reduce"))
        copied = wide.of_fp32_gradients * (chunks == 1)
        more = tick_memory.of(wide) - tick_memory.of(narrow)
        assert more == pytest.approx(
            wide.gradients - narrow.gradients + copied + wide.outside - narrow.outside
        )


def around(ticks, gradients=0, saved=0):
    """Bytes without the layer or loss that is at work."""
    held = gradients * ticks.gradients + saved * ticks.saved
    return ticks.outside + ticks.copied + held


def at_work(ticks):
    """A layer's activations, and weights of two."""
    return ticks.layer(2) + ticks.more_of_mlp + ticks.fp32_of_layer


@pytest.mark.parametrize(
    "keys, gradients, saved",
    [
        # Of a loop its turn and the last, which is behind it, and the BACKWARD behind that.
        (dict(), 3, 2),
        # Where several BACKWARDs are behind the loop, they are a loop of their own.
        (dict(mesh__stage=4, mesh__fsdp=2, batch__size=16, model__num_layers=16), 2, 2),
        (dict(pipeline__schedule="gpipe"), 2, 1),
        # Of several chunks in a stage one microbatch is run again at a time, unless all is saved.
        (dict(pipeline__schedule="interleaved_1f1b", model__num_layers=16), 2, 1),
        (dict(pipeline__schedule="interleaved_1f1b", model__num_layers=16, remat="dots"), 2, 2),
        # Two layers are in no loop, and read from slots.
        (dict(model__num_layers=4), 1, 0),
        (dict(model__num_layers=4, pipeline__schedule="gpipe"), 1, 0),
    ],
)
def test_gradients_and_saved_activations_of_several_ticks(keys, gradients, saved):
    for precision in ("bf16", "bf16_fp32_reduce", "fp32"):
        ticks = ticks_of(**keys, precision=precision)
        wanted = around(ticks, gradients, saved) + at_work(ticks)
        assert tick_memory.of(ticks) == pytest.approx(wanted)


def test_a_tied_head_has_a_gradient_of_its_own_beside_a_backward():
    for keys in dict(), dict(pipeline__schedule="gpipe"):
        tied, apart = (ticks_of(**keys, model__tied_head=each) for each in (True, False))
        assert apart.tied == 0 < tied.tied == tied.table_gradient("embedding", "gradients")
        # That takes as much as the table of its own which it has not.
        assert tick_memory.of(tied) == pytest.approx(tick_memory.of(apart))


def test_beside_the_loss_is_what_two_forwards_saved():
    keys = dict(model__mlp_dim=512, model__vocab_size=2**17)
    for schedule in "gpipe", "1f1b":
        for layers in 4, 8:
            ticks = ticks_of(**keys, pipeline__schedule=schedule, model__num_layers=layers)
            gradients = 1 if layers == 4 else 3 * (schedule == "1f1b")
            wanted = around(ticks, gradients, 2) + ticks.of_loss
            assert tick_memory.of(ticks) == pytest.approx(wanted), (schedule, layers)
    # Of layers that save everything one, where FORWARDs have a loop of their own.
    ticks = ticks_of(**keys, pipeline__schedule="gpipe", remat="none", batch__size=512)
    wanted = around(ticks, 0, 1) + ticks.of_loss
    assert tick_memory.of(ticks) == pytest.approx(wanted)
    # So is a tied head's, of weights that are gathered where they are used.
    keys = keys | OVER_TENSOR | dict(pipeline__schedule="gpipe", model__tied_head=True)
    ticks = ticks_of(**keys)
    wanted = around(ticks, 0, 2) + ticks.of_loss + ticks.table_gradient("embedding", "gradients")
    assert tick_memory.of(ticks) == pytest.approx(wanted)


def test_where_backward_is_split_ticks_in_no_loop_have_their_results_from_the_first_on():
    """Of eight microbatches in two stages four BACKWARDs, three WEIGHTs and three FORWARDs."""
    for text in "full", "dots":
        ticks = ticks_of(pipeline__schedule="zb_1f1b", remat=text, model__vocab_size=2**17)
        wanted = around(ticks, 3, 3) + 4 * ticks.factors + 3 * ticks.table_gradient("embedding")
        assert tick_memory.of(ticks) == pytest.approx(wanted + ticks.of_loss)
    # Without gathers no turn of a loop is behind it: two WEIGHTs and a BACKWARD, and those of a
    # turn; of two layers, which are in no loop, the next turn's BACKWARD and FORWARD too.
    for layers, second in (8, 0), (4, 1):
        ticks = ticks_of(**WHOLE, pipeline__schedule="zb_1f1b", model__num_layers=layers)
        wanted = ticks.outside + second * ticks.table_gradient("embedding") + 3 * ticks.gradients
        wanted += (2 + second) * ticks.factors + (1 + second) * ticks.saved + ticks.layer(1, 7)
        assert tick_memory.of(ticks) == pytest.approx(wanted)


def test_a_part_of_the_loss_is_beside_fp32_layers_that_save_everything():
    """In 1F1B without gathers; of layers that are run again nothing."""
    for text, chunks in ("none", 1), ("none", 4), ("full", 4):
        keys = dict(WHOLE, precision="fp32", remat=text, model__vocab_size=2**15)
        ticks = ticks_of(**keys | dict(loss__chunks=chunks))
        plain = around(ticks) + ticks.backward(2) + ticks.more_of_mlp + ticks.of_fp32_gradients
        part = tick_memory.of(ticks) - plain
        logits = 2 * 4 * utilization.tokens_of(ticks.run) * 2**15 / 2 / chunks
        head = ticks.table_gradient("head") if chunks > 1 else 0
        assert part == pytest.approx(logits + head if text == "none" else 0)


def test_an_input_of_several_products_is_stored_once_where_no_branch_is_between():
    once, twice = (ticks_of(pipeline__schedule=name) for name in ("zb_1f1b", "zb_h1"))
    width = 2 * utilization.tokens_of(once.run) * once.run.model.width  # bf16
    assert twice.factors - once.factors == once.layers * 3 * width
    # Queries, keys and values have one input, and gate and up.
    assert tick_arrays.factor_bytes(once.run) * once.layers == twice.factors
    for other in (
        ticks_of(on_gpu=False, pipeline__schedule="zb_1f1b"),
        ticks_of(pipeline__schedule="zb_1f1b", **PERIODS),
    ):
        of_layer = tick_arrays.factor_bytes(other.run)
        assert (
            other.factors == other.layers * of_layer == other.layers * twice.factors / twice.layers
        )
    slots = once.program.slots["deferred"]
    assert stage_memory.of(once.run, on_gpu=True).factors == slots * once.factors


def test_of_weights_gathered_where_they_are_used_nothing_is_twice():
    """As beside `tensor`, with a loop over FORWARDs and one over BACKWARDs."""
    for precision in ("bf16", "bf16_fp32_reduce"):
        ticks = ticks_of(**OVER_TENSOR, pipeline__schedule="gpipe", precision=precision)
        wanted = around(ticks, 1, 1) + ticks.layer(1)
        assert tick_memory.of(ticks) == pytest.approx(wanted)


def test_loops_over_periods_read_and_write_their_parts_once_more():
    """And have a layer of each of two bodies, where they gather ahead."""
    for schedule, more in ("1f1b", 2), ("gpipe", 1):
        of = {}
        for pattern in PERIODS["model__layer_pattern"], ("local",):
            keys = PERIODS | dict(model__layer_pattern=pattern, pipeline__schedule=schedule)
            ticks = ticks_of(**keys)
            of[pattern] = tick_memory.of(ticks)
        several, one = of.values()
        wanted = more * ticks.saved + ticks.layer(2) + ticks.more_of_mlp
        assert several - one == pytest.approx(wanted), schedule
    # Chunks that begin at other kinds take branches, and have no periods.
    assert ticks_of(**PERIODS).has_periods
    assert not ticks_of(**PERIODS | dict(model__num_layers=10)).has_periods


def test_tables_have_gradients_of_two_turns_beside_layers_of_several_kinds():
    """On GPUs that gather no weights, where gradients are whole."""
    whole = WHOLE | dict(model__tied_head=True)
    alike, several = (
        ticks_of(**whole, **PERIODS | dict(model__layer_pattern=pattern))
        for pattern in (("local",), PERIODS["model__layer_pattern"])
    )
    assert alike.outside == pytest.approx(alike.table_gradient("embedding"), rel=0.01)  # and a norm
    assert several.outside == pytest.approx(4 * alike.outside, rel=0.01)
    split = ticks_of(**PERIODS, **whole | dict(sharding__layout="zero2"))
    assert split.outside < 2 * alike.outside

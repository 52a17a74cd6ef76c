"""What programs of XLA:TPU hold, by rules that were read from programs drawn at random."""

import pytest
from support.resolved import resolved

from llmx import config
from llmx.config import loss_memory
from llmx.model import families, remat_costs
from llmx.model.attention import splash
from llmx.plan import memory, sizes

WINDOWS = dict(layer_pattern=("local",), window=1024)
GEMMA = dict(family="gemma2", layer_pattern=("local", "global"), window=1024, num_layers=8)


def _sizes(model=None, **keys):
    run = config.default()
    run.model = families.preset(
        "llama3", num_layers=8, width=2048, num_heads=16, num_kv_heads=4, mlp_dim=4096,
        vocab_size=32768, max_positions=2**17, head_dim=128,
    )  # fmt: skip
    run.mesh.data, run.mesh.fsdp, run.batch.size = 1, 8, 8
    of_model = {f"model.{name}": of for name, of in (model or {}).items()}
    return sizes.of(resolved(run, **keys, **of_model))


def test_keys_are_taken_in_slices_of_at_most_four_blocks():
    of = {8192: 1, 16384: 2, 65536: 8}
    assert {num: splash.num_slices(num, 128, 2) for num in of} == of
    assert splash.num_slices(8192, 256, 2) == splash.num_slices(8192, 128, 4) == 2


def _part(name, moment=memory.BACKWARD, *, on_gpu=False, **keys):
    return memory.of(_sizes(**keys), on_gpu=on_gpu).peaks[moment].get(name, 0)


@pytest.mark.parametrize("num_keys", [128, 1024, 2560, 3072, 8192, 16384, 65536])
@pytest.mark.parametrize(("head_dim", "itemsize"), [(64, 2), (128, 2), (128, 4), (256, 2)])
def test_gradients_of_queries_are_those_of_the_kernel_s_blocks(num_keys, head_dim, itemsize):
    width = -(-head_dim // splash.LANES) * itemsize // 2
    size = splash._slice_of_keys(num_keys, width, "")
    found = splash.num_query_gradients(num_keys, head_dim, itemsize)
    for blocks in (splash.OTHER_BLOCKS, *splash.BLOCKS.values()):
        of_kernel = splash._block_sizes(dict, blocks, (num_keys, size), width)
        if num_keys not in (2560, 3072) or blocks is splash.OTHER_BLOCKS:
            assert found == size // of_kernel["block_kv_dkv"]


@pytest.mark.parametrize(
    ("length", "keys", "arrays"),
    [
        (2048, {}, 1), (4096, {}, 2), (8192, {}, 4),
        (16384, {}, 4 * 1.5), (32768, {}, 4 * 2.5),  # those of all slices wait
        (16384, dict(mesh__fsdp=4, mesh__sequence=2), 4),  # in a ring those of one device's keys
        (16384, dict(mesh__fsdp=4, mesh__sequence=2, attention__ulysses=2), 4 * 1.5),
        # A slice of 8,192 keys is seen by as many queries, and those of a window more.
        (32768, dict(model=WINDOWS), 4 * (3 * (8192 + 1024) + 8192) / 32768),
        (2048, dict(attention__implementation="blockwise"), 2),
        (2056, {}, 2),  # not for the kernel
    ],
)  # fmt: skip
def test_a_layer_has_as_many_gradients_of_queries(length, keys, arrays):
    keys = dict(batch__sequence_length=length, remat="full") | keys
    model = keys.pop("model", {})

    def of_queries(num_heads):
        return _part("a layer", model=model | dict(num_heads=num_heads, num_kv_heads=4), **keys)

    tokens = _sizes(**keys).tokens
    # Eight heads more, and their columns of two weights, which are gathered.
    weights = 1.2 * 2 * (2 * 8 * 128 * 2048)
    more = of_queries(16) - of_queries(8)
    assert more == pytest.approx(arrays * 2 * tokens * 8 * 128 + weights)


def test_results_of_attention_are_saved_with_positions_last():
    """Keys and values are filled up to whole lanes, and all where all is saved."""

    def of_heads(remat, model=(), **keys):
        def saved(num_heads):
            heads = dict(num_heads=num_heads, num_kv_heads=4, head_dim=64, **dict(model))
            return _part("saved activations", model=heads, remat=remat, **keys)

        length, layers = config.default().batch.sequence_length, 8
        return (saved(16) - saved(8)) / (2 * length * 8 * layers)

    # Numbers of a head: its result's; with names its queries', too.
    assert of_heads("attention") == pytest.approx(64, rel=0.05)
    assert of_heads("names") == pytest.approx(2 * 64, rel=0.05)
    assert of_heads("none") >= 2 * 128
    split = dict(mesh__fsdp=4, mesh__sequence=2)
    assert of_heads("names", **split) == pytest.approx(2 * 128, rel=0.05)
    learned = dict(model=dict(positions="learned", rope_theta=families.ModelConfig().rope_theta))
    assert of_heads("names", **learned) == pytest.approx(2 * 128, rel=0.05)


def test_the_gradient_of_logits_in_fp32_is_in_their_place():
    def more_of_logits(precision):
        held = [
            loss_memory.of(
                _sizes(precision=precision, loss__chunks=2, batch__sequence_length=length).run
            )
            for length in (16384, 32768)
        ]  # fmt: skip
        return (held[1] - held[0]) / 16384 - 4 * 2048  # of a token, without its hidden state

    rows = 32768 / 2
    assert more_of_logits("bf16") == (4 + 2) * rows
    assert more_of_logits("fp32") == 4 * rows


def test_experts_that_are_not_gathered_are_copied_with_attention():
    experts = dict(family="mixtral", num_experts=4, experts_per_token=2, expert_dim=4096)
    keys = dict(mesh__data=8, mesh__fsdp=1, sharding__layout="ddp", remat="full")
    counted = _sizes(model=experts, **keys)
    wanted = sum(
        4 * counted.local(leaf, "parameters") for leaf in counted.weights
        if "attention" in leaf.name or leaf.name.endswith("mlp/down")
    )  # fmt: skip
    assert _part("turned weights", model=experts, **keys) == wanted > 0
    assert _part("turned weights", **keys) == 0  # of a dense model


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_segment_has_weights_and_gradients_of_its_own(on_gpu):
    counted = _sizes(remat="sqrt", model=dict(num_layers=9))
    of_layer = sum(
        (4 + counted.reduce_bytes) * counted.local(leaf, "gradients") for leaf in counted.weights
    ) / 9  # fmt: skip
    size = 3
    found = _part("a segment", remat="sqrt", model=dict(num_layers=9), on_gpu=on_gpu)
    norms = 2 * 4 * 2048 * size
    inputs = 2 * counted.tokens * 2048 * size
    assert found == pytest.approx(size * of_layer + inputs, abs=norms)


def test_a_tied_table_is_copied_while_periods_are_differentiated():
    keys = dict(mesh__data=8, mesh__fsdp=1, sharding__layout="zero1", remat="full")
    tied, numbers = GEMMA | dict(tied_head=True), 32768 * 2048
    assert _part("a turned table", model=tied, **keys) == 4 * numbers
    assert _part("a turned table", model=GEMMA | dict(tied_head=False), **keys) == 0
    assert _part("a turned table", model=dict(tied_head=True), **keys) == 0
    assert _part("a turned table", model=tied, **keys | dict(precision="pure_bf16")) == 2 * numbers
    # Its gradient is not there yet, and those of layers not at the loss.
    of_layers = _part("gradients", model=tied, **keys)
    at_the_loss = _part("gradients", memory.END_OF_FORWARD, model=tied, **keys)
    whole = _part("gradients", memory.END_OF_FORWARD, model=dict(tied_head=True), **keys)
    assert at_the_loss + of_layers == pytest.approx(whole, rel=0.001)
    assert at_the_loss == pytest.approx(2 * numbers, rel=0.01)
    int8 = keys | dict(sharding__layout="ddp", sync__strategy="int8")
    assert _part("gradients", model=tied, **int8) == 0


def test_logits_are_kept_where_layers_are_run_again():
    keys = dict(loss__chunks=1, mesh__data=8, mesh__fsdp=1, sharding__layout="ddp")
    tokens = config.default().batch.sequence_length
    assert _part("logits", remat="full", **keys) == 4 * tokens * 32768
    assert _part("logits", remat="none", **keys) == 0


def test_a_head_in_one_chunk_is_not_copied_in_its_own_dtype():
    keys = dict(loss__chunks=1, mesh__data=8, mesh__fsdp=1, sharding__layout="ddp")
    keys |= dict(precision="fp32", batch__sequence_length=2048)
    tokens, numbers = 2048, 32768 * 2048
    held = loss_memory.of(_sizes(**keys).run)
    assert held == 4 * tokens * (32768 + 2048) + loss_memory.TPU.head_fp32 * numbers


def test_norms_of_heads_take_arrays_of_a_layer_on_gpus():
    def layer(qk_norm):
        return _part("a layer", on_gpu=True, remat="full", model=dict(qk_norm=qk_norm))

    heads = 2 * config.default().batch.sequence_length * (16 + 4) * 128
    assert layer(True) - layer(False) == pytest.approx(memory.GPU.normed_heads * heads, rel=0.01)


@pytest.mark.parametrize(
    ("remat", "arrays"), [("every_4+dots", "dots"), ("every_4+names", "names")]
)
def test_a_segment_saves_what_its_policy_says(remat, arrays):
    """While it is run again: of its layers, and not of all."""
    extra = _part("a segment", remat=remat) - _part("a segment", remat="every_4")
    counted = _sizes(remat=arrays)
    by_layer = remat_costs.saved_bytes_by_layer(
        counted.run.model, text=arrays, loss_chunks=2, compute_bytes=2
    )[1:-1]
    assert extra == pytest.approx(
        counted.tokens * sum(by_layer[:4]) - 4 * 2 * counted.tokens * 2048
    )
    assert extra > 0

"""costs.py: parameters equal published sizes and the real tree, FLOPs the traced products."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from llmx.model import apply, conventions
from llmx.model.attention.attend import AttentionConfig
from llmx.model.costs import (
    forward_flops_by_layer,
    forward_flops_by_part,
    forward_flops_per_token,
    keys_per_query,
    num_active_parameters,
    num_non_embedding_parameters,
    num_parameters,
    num_stored_parameters,
    parameters_by_layer,
    parameters_by_part,
    training_flops_per_token,
)
from llmx.model.execution import Execution
from llmx.model.families import FAMILIES, ModelConfig, preset
from llmx.model.precision import POLICIES
from llmx.model.remat_costs import recomputed_flops_by_layer, saved_bytes_by_layer
from llmx.sharding import AXES, Placement, make_layout, make_mesh

# The Hugging Face models' own counts, tied weights once; of Gemma 3 4B the text model.
PUBLISHED = {
    "gpt2_124m": 124_439_808,
    "gpt2_1.5b": 1_557_611_200,
    "gpt3_175b": 174_604_259_328,  # as a GPT-2 of that shape: the weights are not published
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "llama3.2_1b": 1_235_814_400,
    "llama3.2_3b": 3_212_749_824,
    "qwen3_0.6b": 596_049_920,
    "qwen3_8b": 8_190_735_360,
    "mistral_7b": 7_241_732_096,
    "qwen2.5_0.5b": 494_032_768,
    "qwen2.5_7b": 7_615_616_512,
    "olmo2_7b": 7_298_617_344,
    "phi3_mini_4k": 3_821_079_552,
    "phi4_14b": 14_659_507_200,
    "smollm3_3b": 3_075_098_624,
    "mixtral_8x7b": 46_702_792_704,
    "mixtral_8x22b": 140_630_071_296,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560,
    "olmoe_1b_7b": 6_919_161_856,
    "gpt_oss_20b": 20_914_757_184,
    "gpt_oss_120b": 116_829_156_672,
    # Without the bias by which experts are chosen, E numbers in each layer.
    "deepseek_v3_671b": 671_026_404_352,
    "moonlight_16b_a3b": 15_960_108_544,
    "gemma2_2b": 2_614_341_888,
    "gemma3_1b": 999_885_952,
    "gemma3_4b": 3_880_263_168,
}
# Without remat jax decides what is kept: 0.12 has an array of F numbers less of a GELU than 0.10.
KEPT_TOLERANCE = 0.1
# Every switch that changes a shape, each in a tiny model.
SHAPES = {
    "padded": dict(vocab_size=61, vocab_multiple=64),
    "padded_tied": dict(vocab_size=61, vocab_multiple=64, tied_head=True),
    "biased_gated": dict(bias=True),
    "biased_queries": dict(qkv_bias=True),
    "biased_plain": dict(bias=True, gated_mlp=False, norm="layer", positions="learned"),
    "post_norms_layer": dict(norm="layer", post_norms=True, qk_norm=True),
    "post_norms_alone": dict(pre_norms=False, post_norms=True, qk_norm=True, qk_norm_over="all"),
    "all_heads_normed": dict(qk_norm=True, qk_norm_over="all"),
    "sinks": dict(attention_sinks=True),
    "biased_experts": dict(bias=True, num_experts=4, experts_per_token=2, expert_dim=24),
    "biased_shared": dict(
        bias=True, num_experts=4, experts_per_token=2, expert_dim=24, shared_dim=16
    ),
    "latents": dict(num_kv_heads=4, kv_latent=6, query_latent=5, rope_dim=2, value_dim=3),
    "first_dense": dict(num_experts=3, expert_dim=8, shared_dim=4, first_dense=2, num_layers=5),
    "wide_heads": dict(head_dim=24, num_kv_heads=1, num_layers=3),
}


def tiny(**changes) -> ModelConfig:
    return ModelConfig(
        **dict(vocab_size=64, vocab_multiple=1, width=16, num_layers=2, num_heads=4, num_kv_heads=2,
               head_dim=8, mlp_dim=40, max_positions=32) | changes
    )  # fmt: skip


def test_published_sizes():
    sized = {name for name in FAMILIES if preset(name).vocab_size}
    assert {name: num_parameters(preset(name)) for name in sized} == PUBLISHED


def test_active_parameters_are_those_that_are_published():
    """In billions: of DeepSeek-V3 37 (arXiv 2412.19437), of Moonlight 2.24 of 15.29 without
    embedding and head (arXiv 2502.16982)."""
    assert int(num_active_parameters(preset("deepseek_v3_671b")) / 1e9) == 37
    moonlight = preset("moonlight_16b_a3b")
    tables = 2 * moonlight.vocab_size * moonlight.width
    assert round((num_active_parameters(moonlight) - tables) / 1e9, 2) == 2.24
    assert round((num_parameters(moonlight) - tables) / 1e9, 2) == 15.29


def tree_size(model: ModelConfig) -> int:
    shapes, _ = apply.abstract_parameters(model)
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


@pytest.mark.parametrize("name", ["gpt2_1.5b", "llama3_405b", "qwen3_0.6b", "gemma3_4b"])
def test_stored_parameters_of_presets_are_those_of_the_tree(name):
    assert num_stored_parameters(preset(name)) == tree_size(preset(name))


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_stored_parameters_are_those_of_the_tree(changes):
    assert num_stored_parameters(tiny(**changes)) == tree_size(tiny(**changes))


def test_padding_is_stored_but_not_published():
    model = tiny(vocab_size=61, vocab_multiple=64)
    assert parameters_by_part(model)["padding"] == 2 * 3 * 16
    assert num_stored_parameters(model) - num_parameters(model) == 2 * 3 * 16
    assert num_parameters(model) == num_parameters(tiny(vocab_size=61, vocab_multiple=1))


def test_non_embedding_parameters():
    # Kaplan et al. (arXiv 2001.08361), table 1: about 12 L D^2; and norms and biases exactly.
    model, D, L = preset("gpt2_124m"), 768, 12
    assert num_non_embedding_parameters(model) == 12 * L * D**2 + L * 13 * D + 2 * D
    assert num_non_embedding_parameters(model) == num_parameters(model) - (50257 + 1024) * D
    assert num_non_embedding_parameters(preset("llama3_8b")) == 8_030_261_248 - 2 * 128256 * 4096


@pytest.mark.parametrize("window", [1, 3, 8, 100])
def test_keys_per_query_counts_the_mask(window):
    T = 8
    model = tiny(num_layers=3, layer_pattern=("local", "global"), window=window)
    back = np.arange(T)[:, None] - np.arange(T)[None, :]
    local = ((back >= 0) & (back < window)).sum() / T
    everything = (back >= 0).sum() / T
    assert keys_per_query(model, sequence_length=T) == [local, everything, local]
    assert keys_per_query(model, sequence_length=T, causal=False) == [T, T, T]


def traced_flops(jaxpr) -> int:
    """2 x multiply-adds of all matrix products in a jaxpr, loops times their length."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left, out = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
            total += 2 * math.prod(out) * math.prod(left[d] for d in contracted)
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        assert equation.primitive.name not in ("while", "cond"), "this walk does not count them"
        inner = jaxprs_in_params(equation.params)
        total += times * sum(traced_flops(body) for body in inner)
    return total


def one_device() -> Placement:
    mesh = make_mesh(dict.fromkeys(AXES, 1), devices=jax.devices()[:1])
    return Placement(mesh, make_layout("ddp"))


def losses_and_batch(
    model: ModelConfig, *, batch_size: int, sequence_length: int, remat="none", loss_chunks=1,
    offloaded=(),
):  # fmt: skip
    shapes, _ = apply.abstract_parameters(model)
    place = one_device()
    plain = AttentionConfig("reference")  # all scores, which the formula counts
    execution = Execution(
        place, POLICIES["fp32"], remat=remat, attention=plain, loss_chunks=loss_chunks,
        offloaded=offloaded,
    )  # fmt: skip
    tokens = jax.ShapeDtypeStruct((batch_size, sequence_length), jnp.int32)
    batch = {name: tokens for name in ("tokens", "targets", "segment_ids", "positions")}

    def loss(params, batch):
        return apply.Apply(model).losses(params, batch, execution)[0].sum()

    return loss, shapes, batch, place


# Without the experts, whose loops this walk does not count: with latent attention.
FAMILY_NAMES = ["gpt2", "llama3", "qwen3", "gemma2", "gemma3", "olmo2", "deepseek_v3"]


# Products of two factors, and layers that a token goes through several times.
LOW = {
    "factors": dict(ranks=("attention=8", "attention/key=4", "mlp=12")),
    "factors of latents": dict(family="deepseek_v3", ranks=("attention=6", "mlp/down=12")),
    "repeated": dict(repeats=3),
}
TRACED = [*FAMILY_NAMES, *LOW]


def dense(family: str, **changes) -> ModelConfig:
    own = dict(LOW.get(family, {}))
    return preset(
        own.pop("family", family if not own else "llama3"), num_experts=0, **changes | own
    )


@pytest.mark.parametrize("family", TRACED)
def test_flops_are_those_of_the_traced_model(family):
    B, T = 2, 24
    model = dense(family, vocab_size=96, vocab_multiple=1)
    loss, shapes, batch, place = losses_and_batch(model, batch_size=B, sequence_length=T)
    with jax.set_mesh(place.mesh):
        forward = traced_flops(jax.make_jaxpr(loss)(shapes, batch).jaxpr)
        training = traced_flops(jax.make_jaxpr(jax.grad(loss))(shapes, batch).jaxpr)
    # The reference attention computes the scores that the mask hides as well.
    assert forward == B * T * forward_flops_per_token(model, sequence_length=T, causal=False)
    assert training == B * T * training_flops_per_token(model, sequence_length=T, causal=False)


def test_flops_by_hand():
    # One layer, by the letters: D=2 N=2 K=1 H=3 F=5 V=7, gated, T=4, window 2: 1+2+2+2 keys seen.
    model = tiny(
        vocab_size=7, width=2, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=3, mlp_dim=5,
        layer_pattern=("local",), window=2,
    )  # fmt: skip
    assert forward_flops_by_part(model, sequence_length=4) == {
        "projections": 2 * (2 * 3 * 4 + 2 * 3 * 2),
        "scores": 2 * 2 * (2 * 3) * 7 / 4,
        "mlp": 2 * 3 * 2 * 5,
        "head": 2 * 2 * 7,
    }


def test_padding_of_the_vocabulary_is_no_work_of_the_model():
    padded, exact = tiny(vocab_size=61, vocab_multiple=64), tiny(vocab_size=61)
    assert forward_flops_per_token(padded, sequence_length=8) == forward_flops_per_token(
        exact, sequence_length=8
    )


def test_palm_formula():
    # PaLM, appendix B: 6 N + 12 L H Q T per token of training, N without what is only looked up
    # (and here without norms, which multiply no matrix).
    model, T = preset("llama3_8b"), 8192
    parts = parameters_by_part(model)
    matrices = parts["attention"] + parts["mlp"] + parts["head"]
    palm = 6 * matrices + 12 * 32 * 32 * 128 * T
    assert training_flops_per_token(model, sequence_length=T, causal=False) == palm
    causal = training_flops_per_token(model, sequence_length=T)
    assert causal == palm - 12 * 32 * 32 * 128 * (T - 1) / 2


# ---------------------------------------------------------------------------------------- by layer


@pytest.mark.parametrize("name", [*PUBLISHED, *FAMILY_NAMES])
def test_layers_add_up_to_the_model(name):
    model = preset(name, vocab_size=preset(name).vocab_size or 96)
    parameters = parameters_by_layer(model)
    assert len(parameters) == model.num_layers + 2
    assert sum(parameters) == num_stored_parameters(model)
    for causal in (True, False):
        flops = forward_flops_by_layer(model, sequence_length=64, causal=causal)
        whole = forward_flops_per_token(model, sequence_length=64, causal=causal)
        assert len(flops) == model.num_layers + 2
        assert sum(flops) == pytest.approx(whole)


@pytest.mark.parametrize("name", ["gpt2", "llama3", "gemma3", "deepseek_v3"])
def test_layers_have_the_parameters_of_the_tree(name):
    model = preset(name, vocab_size=61)
    shapes, _ = apply.abstract_parameters(model)
    sizes = {
        part: sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))
        for part, tree in shapes.items()
    }
    first, *blocks, last = parameters_by_layer(model)
    assert first == sizes["embedding"] + sizes.get("positions", 0)
    in_front = [sizes["first"] // model.num_first] * model.num_first if "first" in sizes else []
    assert blocks == in_front + [sizes["blocks"] // model.num_blocks] * model.num_blocks
    assert last == sizes["norm"] + sizes.get("head", 0)


def test_local_blocks_have_fewer_flops():
    model = tiny(num_layers=3, layer_pattern=("local", "global"), window=2)
    _, local, everywhere, same, head = forward_flops_by_layer(model, sequence_length=8)
    assert local == same == everywhere - 4 * 4 * 8 * (36 - 15) / 8
    assert head == 2 * 16 * 64


@pytest.mark.parametrize("remat", ["none", "dots", "names", "full"])
@pytest.mark.parametrize("family", TRACED)
def test_recomputed_flops_are_those_of_the_traced_model(family, remat):
    B, T = 2, 24
    model = dense(family, vocab_size=96, vocab_multiple=1)
    loss, shapes, batch, place = losses_and_batch(
        model, batch_size=B, sequence_length=T, remat=remat, loss_chunks=2
    )
    with jax.set_mesh(place.mesh):
        traced = traced_flops(jax.make_jaxpr(jax.grad(loss))(shapes, batch).jaxpr)
    again = recomputed_flops_by_layer(
        model, sequence_length=T, text=remat, loss_chunks=2, causal=False
    )
    # The reference attention keeps no log-sum-exp, so that it makes the scores again: half of what
    # attention computes, more where values are narrower.
    scores = forward_flops_by_part(model, sequence_length=T, causal=False)["scores"]
    share = model.head_dim / (model.head_dim + model.value_width)
    again.append(share * scores if remat == "names" else 0)
    plain = training_flops_per_token(model, sequence_length=T, causal=False)
    assert traced == B * T * (plain + sum(again))


OFFLOADED = [("full", ("gate", "up")), ("full", ("query_key_value", "attention_out")),
             ("gate", ("up", "input")), ("every_2", ("up", "key")), ("dots", ("hidden",)),
             ("every_3+gate", ("input",))]  # fmt: skip


@pytest.mark.parametrize(("remat", "offloaded"), OFFLOADED)
def test_what_is_offloaded_is_not_computed_again(remat, offloaded):
    B, T = 2, 24
    model = preset("llama3", vocab_size=96, vocab_multiple=1, num_layers=4)
    loss, shapes, batch, place = losses_and_batch(
        model, batch_size=B, sequence_length=T, remat=remat, loss_chunks=2, offloaded=offloaded
    )
    with jax.set_mesh(place.mesh):
        traced = traced_flops(jax.make_jaxpr(jax.grad(loss))(shapes, batch).jaxpr)
    again = recomputed_flops_by_layer(
        model, sequence_length=T, text=remat, loss_chunks=2, causal=False, offloaded=offloaded
    )
    plain = training_flops_per_token(model, sequence_length=T, causal=False)
    assert traced == B * T * (plain + sum(again))


def test_kept_logits_are_not_made_again():
    again = recomputed_flops_by_layer(tiny(), sequence_length=8, text="none", loss_chunks=1)
    assert again == [0, 0, 0, 0]


@pytest.mark.parametrize("remat", ["none", "dots", "names", "full"])
@pytest.mark.parametrize("family", TRACED)
def test_kept_bytes_are_those_of_the_traced_block(family, remat):
    B, T = 3, 32
    model = dense(family, vocab_size=96, num_layers=1, layer_pattern=("global",))
    shapes, _ = apply.abstract_parameters(model)
    place = one_device()
    execution = Execution(
        place, POLICIES["bf16"], remat=remat, attention=AttentionConfig("blockwise"), packed=False
    )

    def pull(params, x_BTD, ids_BT):
        def blocks(params, x_BTD):
            mask = apply.self_mask(ids_BT, ids_BT, execution)
            return apply.Apply(model).apply_layers(params["blocks"], x_BTD, mask, execution)[0]

        return jax.vjp(blocks, params, x_BTD)[1]

    x_BTD = jax.ShapeDtypeStruct((B, T, model.width), jnp.bfloat16)
    with jax.set_mesh(place.mesh):
        kept = jax.eval_shape(pull, shapes, x_BTD, jax.ShapeDtypeStruct((B, T), jnp.int32))
    # Of the one layer, with rows; without the norms' statistics, and without weights.
    activations = [
        leaf for leaf in jax.tree.leaves(kept) if leaf.shape[:2] == (1, B) and leaf.shape[-1] > 1
    ]
    traced = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in activations)
    counted = saved_bytes_by_layer(model, text=remat, loss_chunks=1, compute_bytes=2)
    spare = KEPT_TOLERANCE if remat == "none" else 0
    assert (1 - spare) * counted[1] <= traced / (B * T) <= counted[1]


@pytest.mark.parametrize("loss_chunks", [1, 3])
def test_kept_bytes_of_the_head_are_those_of_the_traced_loss(loss_chunks):
    B, T = 3, 32
    model = tiny(vocab_size=96, num_layers=1)
    shapes, _ = apply.abstract_parameters(model)
    place = one_device()
    execution = Execution(place, POLICIES["bf16"], remat="full", loss_chunks=loss_chunks)

    def pull(params, batch):
        return jax.vjp(lambda p: apply.Apply(model).losses(p, batch, execution), params)[1]

    ids_BT = jax.ShapeDtypeStruct((B, T), jnp.int32)
    batch = dict.fromkeys(("tokens", "targets", "segment_ids", "positions"), ids_BT)
    with jax.set_mesh(place.mesh):
        kept = jax.eval_shape(pull, shapes, batch)
    # [B, T, ...] is behind the blocks, whose arrays have a leading dimension; ids have two.
    numbers = [
        leaf
        for leaf in jax.tree.leaves(kept)
        if leaf.shape[:2] == (B, T) and leaf.ndim == 3 and leaf.shape[-1] > 1
    ]
    traced = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in numbers)
    counted = saved_bytes_by_layer(model, text="full", loss_chunks=loss_chunks, compute_bytes=2)[-1]
    assert traced == B * T * (counted - 8)  # without log Z and the target


# ----------------------------------------------------------------------------------------- figures

# What MFU has to get right: windows, grouped queries, tied heads, gated and plain MLPs.
COUNTED = {
    "windows": dict(num_layers=5, layer_pattern=("local", "local", "global"), window=3),
    "one_kv_head": dict(num_kv_heads=1, head_dim=24),
    "tied_plain": dict(tied_head=True, gated_mlp=False),
    "long_window": dict(layer_pattern=("local",), window=100),
    "unrotated": dict(num_layers=3, layer_pattern=("local_nope", "global_nope"), window=3),
}


def walked_flops(model: ModelConfig, T: int, *, causal: bool) -> int:
    """Forward FLOPs of a sequence: every product of the tree, every pair that the mask leaves."""
    shapes, _ = apply.abstract_parameters(model)
    matrices = [leaf for leaf in jax.tree.leaves(shapes["blocks"]) if leaf.ndim > 2]  # of L layers
    head = shapes["embedding" if model.tied_head else "head"]
    weights = sum(math.prod(leaf.shape) for leaf in [*matrices, *jax.tree.leaves(head)])
    flops = 2 * T * weights
    for kind in model.layer_kinds:
        for query in range(T):
            for key in range(T):
                hidden = key > query or ("local" in kind and query - key >= model.window)
                if not (causal and hidden):
                    flops += model.num_heads * (2 * model.head_dim + 2 * model.head_dim)
    return flops


@pytest.mark.parametrize("changes", COUNTED.values(), ids=COUNTED)
def test_model_flops_are_those_of_a_walk_over_mask_and_weights(changes):
    T, model = 12, tiny(**changes)
    flops = conventions.by_figure(model, sequence_length=T, remat="none", loss_chunks=1)
    assert flops["mfu"] * T == pytest.approx(3 * walked_flops(model, T, causal=True))
    assert flops["mfu_full"] * T == pytest.approx(3 * walked_flops(model, T, causal=False))
    assert flops["hfu"] == flops["mfu"]


def test_only_hfu_reads_remat():
    sizes = dict(sequence_length=8, remat="budget")
    for name, convention in (conventions.FIGURES | conventions.PUBLISHERS).items():
        if name != "hfu":
            flops = conventions.flops_per_token(tiny(), convention, **sizes)
            assert flops == conventions.flops_per_token(tiny(), convention, sequence_length=8)
    with pytest.raises(ValueError, match="is chosen by llmx"):
        conventions.flops_per_token(tiny(), conventions.FIGURES["hfu"], **sizes)


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
@pytest.mark.parametrize("changes", COUNTED.values(), ids=COUNTED)
def test_full_attention_figures_are_those_of_the_traced_model(changes, remat):
    B, T = 2, 12
    model = tiny(**changes)
    loss, shapes, batch, place = losses_and_batch(
        model, batch_size=B, sequence_length=T, remat=remat, loss_chunks=2
    )
    with jax.set_mesh(place.mesh):
        traced = traced_flops(jax.make_jaxpr(jax.grad(loss))(shapes, batch).jaxpr)
    # The reference attention computes all scores.
    everything = conventions.Convention(causal=False, recomputed="remat")
    counted = conventions.flops_per_token(
        model, everything, sequence_length=T, remat=remat, loss_chunks=2
    )
    assert traced == pytest.approx(B * T * counted)

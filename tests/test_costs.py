"""costs.py: parameters equal published sizes and the real tree, FLOPs the traced products."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from llmx import model as decoder
from llmx.attention import AttentionConfig
from llmx.costs import (
    forward_flops_by_part,
    forward_flops_per_token,
    keys_per_query,
    num_non_embedding_parameters,
    num_parameters,
    num_stored_parameters,
    parameters_by_part,
    training_flops_per_token,
)
from llmx.families import FAMILIES, ModelConfig, preset
from llmx.precision import POLICIES
from llmx.sharding import Placement, make_layout, make_mesh

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
    "gemma2_2b": 2_614_341_888,
    "gemma3_1b": 999_885_952,
    "gemma3_4b": 3_880_263_168,
}
# Every switch that changes a shape, each in a tiny model.
SHAPES = {
    "padded": dict(vocab_size=61, vocab_multiple=64),
    "padded_tied": dict(vocab_size=61, vocab_multiple=64, tied_head=True),
    "biased_gated": dict(bias=True),
    "biased_plain": dict(bias=True, gated_mlp=False, norm="layer", positions="learned"),
    "post_norms_layer": dict(norm="layer", post_norms=True, qk_norm=True),
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


def tree_size(model: ModelConfig) -> int:
    _, shapes, _ = decoder.abstract_parameters(model)
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


def losses_and_batch(model: ModelConfig, *, batch_size: int, sequence_length: int):
    graphdef, shapes, _ = decoder.abstract_parameters(model)
    place = Placement(
        make_mesh({"data": 1, "fsdp": 1, "tensor": 1, "sequence": 1, "expert": 1, "stage": 1},
                  devices=jax.devices()[:1]),
        make_layout("ddp"),
    )  # fmt: skip
    plain = AttentionConfig("reference")  # all scores, which the formula counts
    run = decoder.Execution(place, POLICIES["fp32"], attention=plain, loss_chunks=1)
    tokens = jax.ShapeDtypeStruct((batch_size, sequence_length), jnp.int32)
    batch = {name: tokens for name in ("tokens", "targets", "segment_ids", "positions")}

    def loss(params, batch):
        return decoder.Apply(model, graphdef).losses(params, batch, run)[0].sum()

    return loss, shapes, batch, place


@pytest.mark.parametrize("family", ["gpt2", "llama3", "qwen3", "gemma2", "gemma3"])
def test_flops_are_those_of_the_traced_model(family):
    B, T = 2, 24
    model = preset(family, vocab_size=96, vocab_multiple=1)
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

"""Adapters that PEFT loads beside a model of transformers: the same logits."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import safetensors
from support import hf_models
from support.hf_models import TINY

from llmx.checkpoint import hf, peft
from llmx.model import adapters, apply
from llmx.model.adapters import AdaptersConfig
from llmx.sharding import trees

LOGITS = 5e-5  # as in test_hf.py
_OF_WIDTH = {key: value for key, value in TINY.items() if key != "head_dim"}
GPT2 = {"vocab_size": 99, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64,
        "bos_token_id": None, "eos_token_id": None}  # fmt: skip
DEEPSEEK = TINY | {
    "head_dim": 8, "num_key_value_heads": 4, "q_lora_rank": 20, "kv_lora_rank": 16,
    "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "n_routed_experts": 8,
    "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0,
    "norm_topk_prob": True, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
}  # fmt: skip
CASES = {
    "llama": ("LlamaConfig", TINY | {"head_dim": 32}, ("attention", "mlp")),
    "some": ("LlamaConfig", TINY, ("attention/query", "mlp/down")),
    # Fused by equal parts, input first; and by parts of unequal size, of which one has none.
    "gpt2": ("GPT2Config", GPT2, ("attention", "mlp")),
    "phi3": ("Phi3Config", _OF_WIDTH, ("attention/query", "attention/value", "mlp")),
    # Latents, and first layers that have a stack of their own.
    "deepseek": ("DeepseekV3Config", DEEPSEEK, ("attention",)),
}


def with_adapters(directory, products):
    """A checkpoint's model, its parameters, random adapters and what they are."""
    model, params = hf.load(directory)
    config = AdaptersConfig(rank=3, alpha=7.0, products=products)
    shapes, _ = adapters.shapes_and_axes(config, *apply.abstract_parameters(model))
    noise = np.random.default_rng(0)
    draw = lambda leaf: (0.1 * noise.normal(size=leaf.shape)).astype(np.float32)  # noqa: E731
    return model, params, jax.tree.map(draw, shapes), config


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_peft(case, transformers, run, tmp_path):
    library = pytest.importorskip("peft", reason="peft: extra `hf`")
    name, values, products = CASES[case]
    theirs = hf_models.make(transformers, name, values, tmp_path / "base")
    model, params, own, config = with_adapters(tmp_path / "base", products)
    peft.export(own, config, model, tmp_path / "adapter", base=str(tmp_path / "base"))
    tokens = hf_models.tokens_of()
    before = hf_models.their_logits(theirs, tokens)
    loaded = library.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    # Every adapter is in the model, and every module with one is ours.
    stored = {name for name, _ in loaded.named_parameters() if "lora_" in name}
    assert len(stored) == len(json_names(tmp_path / "adapter"))
    expected = hf_models.their_logits(loaded, tokens)
    assert np.abs(expected - before).max() > 0.1
    merged = jax.device_get(adapters.merged(params, own, config))
    np.testing.assert_allclose(
        hf_models.our_logits(model, merged, run, tokens)[..., :99], expected, atol=LOGITS, rtol=0
    )
    # And what is exported merged is the same model without PEFT.
    hf.export(merged, model, tmp_path / "merged")
    whole = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", attn_implementation="eager"
    ).eval()
    np.testing.assert_allclose(hf_models.their_logits(whole, tokens), expected, atol=LOGITS, rtol=0)


def json_names(directory) -> list[str]:
    with safetensors.safe_open(directory / peft.WEIGHTS, "np") as file:
        return list(file.keys())


def test_files(written, tmp_path):
    """What is in them, without PEFT."""
    model, _, own, config = with_adapters(written("gpt2"), ("attention",))
    peft.export(own, config, model, tmp_path / "adapter", base="of/some")
    found = json.loads((tmp_path / "adapter" / peft.CONFIG).read_text())
    assert (found["r"], found["lora_alpha"], found["base_model_name_or_path"]) == (
        3,
        7.0,
        "of/some",
    )
    assert found["target_modules"] == ["attn.c_attn", "attn.c_proj"] and found["fan_in_fan_out"]
    assert found["rank_pattern"] == {"attn.c_attn": 9}  # of queries, keys and values together
    names = json_names(tmp_path / "adapter")
    assert (
        f"base_model.model.transformer.h.{model.num_layers - 1}.attn.c_attn.lora_B.weight" in names
    )
    with pytest.raises(ValueError, match="is not empty"):
        peft.export(own, config, model, tmp_path / "adapter")
    assert len(trees.named(own)) == 8
    model, _, own, config = with_adapters(written("deepseek_v3"), ("attention", "mlp"))
    with pytest.raises(ValueError, match=r"for those of experts; export the merged model"):
        peft.export(own, config, model, tmp_path / "b")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("changes", [
    {"activation": "gelu"}, {"logit_softcap": 5.0}, {"repeats": 2}, {"norm_plus_one": True},
    {"layer_pattern": ("global", "global_nope")},
], ids=str)  # fmt: skip
def test_adapters_of_a_model_that_no_checkpoint_represents_are_refused(changes, written, tmp_path):
    model, _, own, config = with_adapters(written("llama3"), ("attention",))
    changed, [name, *_] = dataclasses.replace(model, **changes), changes
    with pytest.raises(ValueError, match=f"a llama checkpoint cannot .*model.{name}="):
        peft.export(own, config, changed, tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()

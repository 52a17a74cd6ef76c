"""Checkpoints of transformers against llmx: the same logits, gradients, and files back."""

import dataclasses
import json

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from support import hf_models
from support.hf_models import (
    FULL,
    LENGTH,
    LLAMA3_ROPE,
    SLIDING,
    TINY,
    YARN_ROPE,
    assert_same_gradients,
    our_apply,
    our_logits,
    their_logits,
    tokens_of,
)

from llmx.checkpoint import hf, hf_formats
from llmx.checkpoint.hf_reader import CONFIG, DTYPES, INDEX, WEIGHTS
from llmx.model import apply, families, sampling

# fp32 in both, sums in different orders: the logits are of order 1 to 10.
LOGITS = 5e-5
GENERATED = 24
_GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
_DEEPSEEK_YARN = {
    "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "beta_fast": 2.0, "beta_slow": 1.0,
    "mscale": 1.0, "mscale_all_dim": 0.8, "original_max_position_embeddings": 16,
}  # fmt: skip
_LATENT = TINY | {
    "head_dim": 8,
    "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 10, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "n_shared_experts": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.5,
    "num_nextn_predict_layers": 0,
}  # fmt: skip
# What each model is made of: class of its config, values of it.
CASES = {
    "gpt2": ("GPT2Config", {
        "vocab_size": 99, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64,
        "bos_token_id": None, "eos_token_id": None, "layer_norm_epsilon": 1e-3,
    }),
    "llama3": ("LlamaConfig", TINY | {"rope_parameters": LLAMA3_ROPE, "rms_norm_eps": 1e-3}),
    "llama3_tied": ("LlamaConfig", TINY | {"tie_word_embeddings": True, "head_dim": 32}),
    "qwen3": ("Qwen3Config", TINY | {"head_dim": 32}),
    "mixtral": ("MixtralConfig", TINY | {
        "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None,
    }),
    "qwen3_moe": ("Qwen3MoeConfig", TINY | {
        "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
        "norm_topk_prob": False,
    }),
    "qwen3_moe_renormalized": ("Qwen3MoeConfig", TINY | {
        "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    }),
    "olmoe": ("OlmoeConfig", {key: value for key, value in TINY.items() if key != "head_dim"} | {
        "num_experts": 6, "num_experts_per_tok": 3,
    }),
    "gpt_oss": ("GptOssConfig", TINY | {
        "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 8,
        "rope_parameters": YARN_ROPE, "layer_types": [SLIDING, FULL, SLIDING],
    }),
    "deepseek_v3": ("DeepseekV3Config", _LATENT | {
        "num_hidden_layers": 4, "q_lora_rank": 20, "first_k_dense_replace": 2, "n_group": 2,
        "topk_group": 1, "rope_parameters": _DEEPSEEK_YARN,
    }),
    "moonlight": ("DeepseekV3Config", _LATENT | {
        "num_hidden_layers": 2, "q_lora_rank": None, "first_k_dense_replace": 0, "n_group": 1,
        "topk_group": 1, "n_shared_experts": 2, "rope_interleave": False,
    }),
    "gemma2": ("Gemma2Config", TINY | {
        "sliding_window": 8, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
    }),
    "gemma3": ("Gemma3TextConfig", TINY | {
        "num_hidden_layers": 4, "sliding_window": 8, "query_pre_attn_scalar": 24,
        "rope_parameters": _GEMMA3_ROPE, "layer_types": [SLIDING, SLIDING, FULL, SLIDING],
    }),
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(transformers, tmp_path_factory):
    """Each case as a model of transformers and the directory that it saved itself into."""
    made = {}

    def make(case: str):
        if case not in made:
            directory = tmp_path_factory.mktemp(case)
            made[case] = hf_models.make(transformers, *CASES[case], directory), directory
        return made[case]

    return make


# ------------------------------------------------------------------- the same numbers and files


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case, saved, run):
    """Over sequences several times longer than the sliding windows, to every position."""
    theirs, directory = saved(case)
    config, params = hf.load(directory)
    tokens = tokens_of()
    if families.LOCAL in config.layer_kinds:
        assert 2 * config.window < LENGTH
    ours, expected = our_logits(config, params, run, tokens), their_logits(theirs, tokens)
    assert np.abs(expected).max() > 1
    assert ours.shape[-1] == config.padded_vocab == 128
    np.testing.assert_array_equal(ours[..., 99:], -np.inf)
    np.testing.assert_allclose(ours[..., :99], expected, atol=LOGITS, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_export_gives_the_file_back(case, saved, transformers, tmp_path):
    theirs, directory = saved(case)
    config, params = hf.load(directory)
    hf.export(params, config, tmp_path / "out")
    before = safetensors.numpy.load_file(directory / WEIGHTS)
    after = safetensors.numpy.load_file(tmp_path / "out" / WEIGHTS)
    assert after.keys() == before.keys()
    for name in before:
        np.testing.assert_array_equal(after[name], before[name], err_msg=name)
    # And transformers makes the same model of it, from keys of an older config.json.
    again, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager", output_loading_info=True
    )
    assert type(again) is type(theirs)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    tokens = tokens_of()
    np.testing.assert_array_equal(their_logits(again, tokens), their_logits(theirs, tokens))
    assert hf.load(tmp_path / "out")[0] == config


@pytest.mark.parametrize("case", ["gpt2", "gemma3"])
def test_gradients_are_those_of_transformers(case, saved, run, tmp_path):
    assert_same_gradients(*saved(case), run, tmp_path)


def test_an_untied_gpt2_and_a_bare_body_load(saved, run, tmp_path):
    """GPT-2's published file has no prefix, and carries its causal masks."""
    _, directory = saved("gpt2")
    tensors = safetensors.numpy.load_file(directory / WEIGHTS)
    bare = {name.removeprefix("transformer."): array for name, array in tensors.items()}
    bare["h.0.attn.bias"] = np.tril(np.ones((1, 1, 64, 64), np.float32))
    bare["lm_head.weight"] = bare["wte.weight"]
    safetensors.numpy.save_file(bare, tmp_path / WEIGHTS)
    (tmp_path / CONFIG).write_text((directory / CONFIG).read_text())
    _, params = hf.load(tmp_path)
    _, expected = hf.load(directory)
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    bare["lm_head.weight"] = bare["wte.weight"] + 1
    safetensors.numpy.save_file(bare, tmp_path / WEIGHTS)
    with pytest.raises(ValueError, match=r"lm_head.weight is not the embedding.*set it to false"):
        hf.load(tmp_path)
    changed = json.loads((directory / CONFIG).read_text()) | {"tie_word_embeddings": False}
    (tmp_path / CONFIG).write_text(json.dumps(changed))
    config, params = hf.load(tmp_path)
    assert not config.tied_head
    np.testing.assert_array_equal(params["head"][:99], bare["lm_head.weight"])


def test_published_experts_in_mxfp4_are_read_as_numbers(saved, transformers, run, tmp_path):
    """Files as gpt-oss's: each half byte is a number, in transformers' own reading too."""
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    _, directory = saved("gpt_oss")
    tensors = safetensors.numpy.load_file(directory / WEIGHTS)
    rng, wanted = np.random.default_rng(0), {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        *others, inward, outward = tensors.pop(name).shape
        shape = (*others, outward, inward // 32)
        blocks = rng.integers(0, 256, (*shape, 16)).astype(np.uint8)
        scales = rng.integers(118, 130, shape).astype(np.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        parts = map(torch.from_numpy, (blocks, scales))
        wanted[name] = convert_moe_packed_tensors(*parts, dtype=torch.float32).numpy()
    safetensors.numpy.save_file(tensors, tmp_path / WEIGHTS)
    written = json.loads((directory / CONFIG).read_text())
    quantized = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / CONFIG).write_text(json.dumps(written | {"quantization_config": quantized}))
    config, params = hf.load(tmp_path)
    hf.export(params, config, tmp_path / "whole")
    found = safetensors.numpy.load_file(tmp_path / "whole" / WEIGHTS)
    for name, tensor in wanted.items():
        np.testing.assert_array_equal(found[name], tensor, err_msg=name)
    lost = dict(tensors)
    lost.pop(next(name for name in lost if name.endswith("down_proj_scales")))
    safetensors.numpy.save_file(lost, tmp_path / WEIGHTS)
    with pytest.raises(ValueError, match=r"lacks .*down_proj_scales"):
        hf.load(tmp_path)
    (tmp_path / CONFIG).write_text(
        json.dumps(written | {"quantization_config": {"quant_method": "gptq"}})
    )
    with pytest.raises(ValueError, match=r"quantization_config.*gptq.*supports only None"):
        hf.load(tmp_path)


@pytest.mark.parametrize("case", ["mixtral", "olmoe", "gpt_oss", "deepseek_v3", "moonlight"])
def test_greedy_tokens_are_those_of_transformers(case, saved, run):
    """Of two prompts, beyond the windows, with a cache here and there."""
    import torch

    theirs, directory = saved(case)
    config, params = hf.load(directory)
    apply, params = our_apply(config, params, run)
    prompts = tokens_of(12)
    ours = sampling.generate(
        apply, params, run, prompts.tolist(), max_tokens=GENERATED, temperature=0
    )
    expected = theirs.generate(
        torch.from_numpy(prompts).long(), max_new_tokens=GENERATED, do_sample=False,
        attention_mask=torch.ones(prompts.shape, dtype=torch.long), pad_token_id=0,
    )  # fmt: skip
    assert ours == expected[:, prompts.shape[1] :].tolist()


# -------------------------------------------------------------------------- without transformers


def random_params(config: families.ModelConfig) -> dict:
    shapes, _ = apply.abstract_parameters(config)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), shapes)
    if config.num_experts:  # by which experts are chosen: the files have none
        params["blocks"]["mlp"]["bias"][...] = 0
    return params


SMALL = {name: families.preset(name, vocab_size=99, num_layers=3) for name in hf_formats.FORMATS}


@pytest.mark.parametrize("family", hf_formats.FORMATS)
@pytest.mark.parametrize("shard_bytes", [hf.SHARD_BYTES, 50_000])
def test_round_trip_through_files(family, shard_bytes, tmp_path):
    config = SMALL[family]
    params = random_params(config)
    hf.export(params, config, tmp_path, shard_bytes=shard_bytes)
    sharded = shard_bytes < hf.SHARD_BYTES
    assert (tmp_path / INDEX).exists() == sharded
    assert (len(list(tmp_path.glob("*.safetensors"))) > 3) == sharded
    back, read = hf.load(tmp_path, config)
    assert back is config
    for name in {"embedding", "head"} & params.keys():
        params[name][99:] = 0  # padding is not written, and read as zeros
    assert read.keys() == params.keys()
    jax.tree.map(np.testing.assert_array_equal, read, params)


@pytest.mark.parametrize(
    "name", [name for name in families.FAMILIES if name not in hf_formats.FORMATS]
)
def test_published_models_can_be_said(name):
    """Every preset, at its size: what is written reads back as a model that computes the same."""
    config = families.preset(name)
    written = json.dumps(hf_formats.model_config_to_hf(config))
    back = hf_formats.model_config_from_hf(json.loads(written))
    assert hf_formats._meaning(back) == hf_formats._meaning(config)


def test_sharded_export_loads_in_transformers(transformers, tmp_path):
    config = SMALL["llama3"]
    params = random_params(config)
    hf.export(params, config, tmp_path, shard_bytes=50_000)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    head = theirs.state_dict()["lm_head.weight"].numpy()
    np.testing.assert_array_equal(head, params["head"][:99])


def test_bfloat16_in_and_out(tmp_path):
    config = SMALL["qwen3"]
    params = random_params(config)
    rounded = jax.tree.map(lambda leaf: leaf.astype(ml_dtypes.bfloat16), params)
    hf.export(params, config, tmp_path, dtype="bfloat16")
    assert json.loads((tmp_path / CONFIG).read_text())["torch_dtype"] == "bfloat16"
    for dtype in ("bfloat16", "float32"):
        _, read = hf.load(tmp_path, dtype=dtype)
        kernel = read["blocks"]["mlp"]["up"]["kernel"]
        assert kernel.dtype == DTYPES[dtype]
        expected = rounded["blocks"]["mlp"]["up"]["kernel"].astype(kernel.dtype)
        np.testing.assert_array_equal(kernel, expected)


def test_tokenizer_goes_along(transformers, tmp_path):
    from llmx.data import tokenizers

    tokenizer = tokenizers.train([b"one two three two one " * 50], vocab_size=300)
    tokenizer.save(tmp_path / "tokenizer.json")
    config = families.preset("llama3", vocab_size=tokenizer.vocab_size, num_layers=1)
    out = tmp_path / "out"
    hf.export(
        random_params(config), config, out, tokenizer_file=tmp_path / "tokenizer.json",
        end_token=tokenizer.end_of_document,
    )  # fmt: skip
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    text = "two one\nthree ünï"
    assert theirs(text)["input_ids"] == tokenizer.encode(text).tolist()
    assert theirs.eos_token_id == tokenizer.end_of_document
    assert json.loads((out / CONFIG).read_text())["eos_token_id"] == tokenizer.end_of_document


# ----------------------------------------------------------------------------------- bad input


@pytest.fixture
def written(tmp_path):
    """A small checkpoint in files, to be spoilt."""
    hf.export(random_params(SMALL["gemma3"]), SMALL["gemma3"], tmp_path)
    return tmp_path


def change_config(directory, **changes):
    config = json.loads((directory / CONFIG).read_text()) | changes
    kept = {key: value for key, value in config.items() if value != "DELETE"}
    (directory / CONFIG).write_text(json.dumps(kept))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mamba"}, r"model_type='mamba'.*gpt2, llama, qwen3, .*gemma2, gemma3_text"),
        ({"model_type": "gemma3", "text_config": {}}, "save only the text model"),
        ({"hidden_size": "DELETE"}, "no 'hidden_size': add it"),
        ({"attention_bias": True}, "attention_bias=True.*supports only False"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ({"hidden_activation": "relu"}, "hidden_activation='relu'.*gelu_pytorch_tanh"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope.*linear"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "add .'original_max_position"),
        ({"rope_scaling": YARN_ROPE | {"attention_factor": 1.2}}, "attention_factor=1.2.*leave"),
        ({"rope_scaling": _DEEPSEEK_YARN}, r"mscale_all_dim=0.8.*only deepseek_v3"),
        ({"rope_scaling": {"rope_type": "linear"}}, "add .'factor'"),
        ({"layer_types": ["full_attention"]}, "layer_types=.* for 3 layers"),
        ({"layer_types": ["full", "full", "full"]}, "full_attention"),
        ({"intermediate_size": 100}, r"mlp.down.*has shape \(64, 192\).*\(64, 100\)"),
        ({"num_hidden_layers": 2, "layer_types": "DELETE"}, r"has model.layers.2.*and \d+ more"),
        ({"num_hidden_layers": 4, "layer_types": "DELETE"}, "lacks model.layers.3"),
        ({"num_key_value_heads": 3}, "num_kv_heads=3"),
        ({"tie_word_embeddings": False}, "lacks lm_head.weight"),
    ],
)
def test_bad_configs_are_refused(changes, words, written):
    change_config(written, **changes)
    with pytest.raises(ValueError, match=words):
        hf.load(written)


def test_bad_files_are_refused(written):
    file = written / WEIGHTS
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"model.safetensors is incomplete"):
        hf.load(written)
    file.unlink()
    with pytest.raises(ValueError, match=r"neither model.safetensors nor"):
        hf.load(written)
    (written / INDEX).write_text(json.dumps({"weight_map": {"a": "b.safetensors"}}))
    with pytest.raises(ValueError, match=r"lacks b.safetensors: download"):
        hf.load(written)
    (written / CONFIG).unlink()
    with pytest.raises(ValueError, match=r"config.json does not exist"):
        hf.load(written)


def test_another_model_is_refused(written):
    config = SMALL["gemma3"]
    hf.load(written, dataclasses.replace(config, vocab_multiple=64, max_positions=32))
    with pytest.raises(ValueError, match=r"another model than model.window=4 \(it has 16\)"):
        hf.load(written, dataclasses.replace(config, window=4))
    with pytest.raises(ValueError, match=r"model.family='llama3'"):
        hf.load(written, SMALL["llama3"])


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("llama3", {"bias": True}, r"llama .* cannot represent model.bias=True \(it has False\)"),
        ("llama3", {"layer_pattern": ("local", "global"), "window": 4}, "layer_pattern"),
        ("gemma3", {"attention_softcap": 5.0}, "attention_softcap=5.0"),
        ("gemma2", {"query_scale": 0.3}, "query_scale=0.3"),
        ("gemma3", {"rope_scaling": "linear", "rope_factor": 2.0, "rope_theta_local": 0.0},
         "rope_theta_local=0"),
        ("qwen3", {"qk_norm": False}, "qk_norm=False"),
        ("gpt2", {"mlp_dim": 100, "head_dim": 8}, "head_dim=8"),
        ("gpt2", {"positions": "rope"}, "positions='rope'"),
        ("llama3", {"num_heads": 6, "num_kv_heads": 6}, "not a multiple of num_heads=6"),
        ("llama3", {"vocab_size": 0}, "vocab_size=0"),
        ("mamba", {}, "model.family='mamba' has no Hugging Face format"),
    ],
)  # fmt: skip
def test_what_a_format_cannot_represent_is_refused(family, changes, words):
    base = SMALL["llama3"] if family == "mamba" else SMALL[family]
    config = dataclasses.replace(base, family=family, **changes)
    with pytest.raises(ValueError, match=words):
        hf_formats.model_config_to_hf(config)


def test_a_bias_by_which_experts_are_chosen_is_not_lost_silently(tmp_path):
    config = SMALL["mixtral"]
    params = random_params(config)
    params["blocks"]["mlp"]["bias"][0, 0] = 0.1
    with pytest.raises(ValueError, match=r"mlp/bias is not zero.*mixtral.*bias_rate=0"):
        hf.export(params, config, tmp_path)


def test_export_refuses(tmp_path):
    config = SMALL["llama3"]
    params = random_params(config)
    with pytest.raises(ValueError, match="missing head, unknown tail"):
        hf.export({"tail": 0} | {k: v for k, v in params.items() if k != "head"}, config, tmp_path)
    with pytest.raises(ValueError, match=r"parameter head has shape \(99, 64\).*\(128, 64\)"):
        hf.export(params | {"head": params["head"][:99]}, config, tmp_path)
    with pytest.raises(ValueError, match="dtype='int8' is unknown"):
        hf.export(params, config, tmp_path, dtype="int8")
    (tmp_path / "bytes.json").write_text('{"llmx_tokenizer": "bytes"}')
    with pytest.raises(ValueError, match="is not a tokenizer of Hugging Face"):
        hf.export(params, config, tmp_path / "x", tokenizer_file=tmp_path / "bytes.json")
    with pytest.raises(ValueError, match="not empty: export into a new directory"):
        hf.export(params, config, tmp_path)
    assert not (tmp_path / "x" / CONFIG).exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 10**9}, r"num_hidden_layers=1000000000, not a whole number of at"),
        ({"num_hidden_layers": -1}, "num_hidden_layers=-1"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers=2.5"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers='3'"),
        ({"num_hidden_layers": None}, "num_hidden_layers=None"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True"),
        ({"num_hidden_layers": [3]}, "num_hidden_layers="),
        ({"vocab_size": 10**12}, "vocab_size=1000000000000"),
        ({"vocab_size": 2**31 - 1}, r"embed_tokens.weight in .* has shape \(99, 64\)"),
        ({"hidden_size": 10**9}, r"has shape .*and config.json makes it"),
        ({"num_attention_heads": 0}, "num_attention_heads=0"),
        ({"num_attention_heads": 10**9 + 7, "num_key_value_heads": 3}, "num_kv_heads=3"),
        ({"rms_norm_eps": -0.5}, "rms_norm_eps=-0.5, not a finite number of at least 0"),
        ({"rms_norm_eps": float("nan")}, "NaN is not a JSON number"),
        ({"rms_norm_eps": 1e301}, "rms_norm_eps=1e.301"),
        ({"rope_theta": "a"}, "rope_theta='a'"),
        ({"rope_scaling": [1]}, "rope_scaling=.1., not an object"),
        ({"rope_scaling": {"rope_type": ["x"]}}, "rope_type must be one of"),
        ({"rope_scaling": {"rope_type": "linear", "factor": {}}}, "factor="),
        ({"layer_types": 3}, "layer_types=3"),
        ({"layer_types": [[], [], []]}, "layer_types="),
        ({"sliding_window_pattern": 0, "layer_types": "DELETE"}, "sliding_window_pattern=0"),
        ({"query_pre_attn_scalar": -4}, "query_pre_attn_scalar=-4"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings=1, not true or false"),
        ({"model_type": ["llama"]}, "model_type=.*not a text"),
    ],
)
def test_absurd_values_are_refused_before_anything_is_allocated(changes, words, written):
    change_config(written, **changes)
    with pytest.raises(ValueError, match=words) as caught:
        hf.load(written)
    assert str(written) in str(caught.value)


@pytest.mark.parametrize("raw", ["[]", "{", '{"a": 1, "a": 2}', "[" * 100_000, "3", '"x"', "\0"])
def test_malformed_json_names_its_file(raw, written):
    (written / WEIGHTS).rename(written / "a.safetensors")
    config = (written / CONFIG).read_text()
    for name in (CONFIG, INDEX):
        (written / CONFIG).write_text(config)
        (written / name).write_text(raw)
        with pytest.raises(ValueError, match=f"{written / name}: "):
            hf.load(written)


@pytest.mark.parametrize(
    "place", ["../a.safetensors", "/etc/passwd", "x/../../a", "..", "", 3, None, ["a"], "a\0"]
)
def test_an_index_names_files_of_its_own_folder_only(place, written):
    (written / WEIGHTS).rename(written / "a.safetensors")
    for content in ({"weight_map": {"a": place}}, {"weight_map": place}, {}):
        (written / INDEX).write_text(json.dumps(content))
        with pytest.raises(ValueError, match=r"index.json: weight_map must give each tensor"):
            hf.load(written)


def test_headers_that_lie_are_refused(written):
    file = written / WEIGHTS
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header, body = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    name = "model.embed_tokens.weight"

    def refuse(words, changed=None, claimed=None):
        text = json.dumps(changed or header).encode()
        file.write_bytes((claimed or len(text)).to_bytes(8, "little") + text + body)
        with pytest.raises(ValueError, match=words):
            hf.load(written)

    refuse(r"claims a header of 1,152,921,504,606,846,976 bytes", claimed=1 << 60)
    refuse("not safetensors", claimed=20 << 20)
    entry = header[name]
    first, last = entry["data_offsets"]
    refuse("not safetensors", header | {name: entry | {"data_offsets": [first, 1 << 50]}})
    refuse("not safetensors", header | {name: entry | {"data_offsets": [first - 4, last - 4]}})
    refuse("not safetensors", header | {name: entry | {"shape": [1 << 40, 1 << 40]}})
    refuse("has shape", header | {name: entry | {"shape": [64, 99]}})
    refuse("is of type I32: use a checkpoint in one of", header | {name: entry | {"dtype": "I32"}})

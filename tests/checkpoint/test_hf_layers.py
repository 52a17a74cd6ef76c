"""Families whose layers differ, by windows, rotation, norms and biases, against transformers."""

import json

import numpy as np
import pytest
import safetensors.numpy
from support import hf_models
from support.hf_models import FULL, LLAMA3_ROPE, SLIDING, TINY, YARN_ROPE

from llmx.checkpoint import hf, hf_formats, hf_reader
from llmx.model import families

LOGITS = 5e-5  # as in test_hf.py

_OF_WIDTH = {key: value for key, value in TINY.items() if key != "head_dim"}
_FOUR = {"num_hidden_layers": 4}
_BASE = {"rope_type": "default", "rope_theta": 100.0}
_OLMO3_ROPE = {
    FULL: YARN_ROPE | {"truncate": True, "attention_factor": 1.138629436111989},
    SLIDING: {"rope_type": "default", "rope_theta": 1000.0},
}
CASES = {
    "mistral": ("MistralConfig", TINY | {"head_dim": 32, "sliding_window": 8}),
    "mistral_no_window": ("MistralConfig", _OF_WIDTH | {
        "sliding_window": None, "tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE,
    }),
    # Six heads do not divide the width.
    "qwen2": ("Qwen2Config", TINY | {
        "head_dim": 32, "num_attention_heads": 6, "tie_word_embeddings": True,
    }),
    "qwen2_last_layers": ("Qwen2Config", _OF_WIDTH | _FOUR | {
        "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2,
    }),
    "olmo2": ("Olmo2Config", TINY | {"head_dim": 32, "rope_parameters": YARN_ROPE}),
    "olmo3": ("Olmo3Config", _OF_WIDTH | _FOUR | {
        "sliding_window": 8, "rope_parameters": _OLMO3_ROPE,
    }),
    "olmo3_types": ("Olmo3Config", TINY | {
        "sliding_window": 8, "layer_types": [FULL, SLIDING, SLIDING],
        "tie_word_embeddings": True, "rope_parameters": {FULL: _BASE, SLIDING: _BASE},
    }),
    "phi3": ("Phi3Config", _OF_WIDTH | {
        "sliding_window": 7, "rope_parameters": _BASE | {"partial_rotary_factor": 0.75},
    }),
    "phi3_no_window": ("Phi3Config", TINY | {
        "head_dim": 20, "partial_rotary_factor": 0.4, "tie_word_embeddings": True,
    }),
    "smollm3": ("SmolLM3Config", _OF_WIDTH | _FOUR),
    # Longer than the layers; those without rotation have windows.
    "smollm3_listed": ("SmolLM3Config", TINY | {
        "no_rope_layers": [0, 1, 1, 0, 1], "use_sliding_window": True, "sliding_window": 5,
        "tie_word_embeddings": False, "rope_parameters": YARN_ROPE,
    }),
    "smollm3_all_kinds": ("SmolLM3Config", TINY | _FOUR | {
        "no_rope_layers": [0, 1, 1, 0], "use_sliding_window": True, "sliding_window": 5,
        "layer_types": [SLIDING, SLIDING, FULL, FULL],
    }),
}  # fmt: skip
PATTERNS = {
    "mistral": ("local",),
    "mistral_no_window": ("global",),
    "qwen2_last_layers": ("global", "global", "local", "local"),
    "olmo3": ("local", "local", "local", "global"),
    "phi3": ("local",),
    "smollm3": ("global", "global", "global", "global_nope"),
    "smollm3_listed": ("local_nope", "global", "global"),
    "smollm3_all_kinds": ("local_nope", "local", "global", "global_nope"),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_and_files_are_those_of_transformers(case, transformers, run, tmp_path):
    """Over sequences several times longer than the windows; and back, bit for bit."""
    theirs = hf_models.make(transformers, *CASES[case], tmp_path / "theirs")
    config, params = hf.load(tmp_path / "theirs")
    assert case not in PATTERNS or config.layer_pattern == PATTERNS[case]
    tokens = hf_models.tokens_of()
    ours = hf_models.our_logits(config, params, run, tokens)
    expected = hf_models.their_logits(theirs, tokens)
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(ours[..., :99], expected, atol=LOGITS, rtol=0)
    hf.export(params, config, tmp_path / "ours")
    before, after = (
        safetensors.numpy.load_file(tmp_path / name / hf_reader.WEIGHTS)
        for name in ("theirs", "ours")
    )
    assert after.keys() == before.keys()
    for name in before:
        np.testing.assert_array_equal(after[name], before[name], err_msg=name)
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager"
    )
    np.testing.assert_array_equal(hf_models.their_logits(again, tokens), expected)
    assert hf.load(tmp_path / "ours")[0] == config


@pytest.mark.parametrize("case", ["olmo3_types", "phi3", "qwen2"])
def test_gradients_are_those_of_transformers(case, transformers, run, tmp_path):
    theirs = hf_models.make(transformers, *CASES[case], tmp_path / "theirs")
    hf_models.assert_same_gradients(theirs, tmp_path / "theirs", run, tmp_path)


# ----------------------------------------------------------------------------------- bad input


def written(family: str) -> dict:
    """The config.json of a small model of the family."""
    model = families.preset(family, vocab_size=99, num_layers=3)
    return json.loads(json.dumps(hf_formats.model_config_to_hf(model)))


_LONGROPE = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
_NO_WINDOWS = {"layer_types": [SLIDING] * 3, "use_sliding_window": False, "sliding_window": 4}


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("mistral", {"sliding_window": 0}, "window=0 must be at least 1"),
        ("mistral", {"sliding_window": -1}, "sliding_window=-1"),
        ("mistral", {"layer_types": [FULL] * 3}, "layer_types.*sliding_window=16.*every layer"),
        ("mistral", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("mistral", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5.*every dimension"),
        ("qwen2", {"use_sliding_window": 1}, "use_sliding_window=1, not true or false"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "layer_types": None,
                   "max_window_layers": "a"}, "max_window_layers='a'"),
        ("qwen2", _NO_WINDOWS, "use_sliding_window=False: set it to true"),
        ("qwen2", _NO_WINDOWS | {"use_sliding_window": True, "sliding_window": None}, "window=0"),
        ("olmo2", {"attention_bias": True}, "attention_bias=True.*supports only False"),
        ("olmo2", {"layer_types": [SLIDING] * 3}, "olmo2 does not support: use full_attention"),
        ("olmo3", {"sliding_window_pattern": 2}, "sliding_window_pattern=2"),
        ("olmo3", {"rope_parameters": _BASE}, f"given by {FULL} and {SLIDING}"),
        ("olmo3", {"rope_parameters": {FULL: _BASE, SLIDING: LLAMA3_ROPE}}, "of local layers"),
        ("olmo3", {"rope_parameters": None, "rope_theta": 100.0}, "rope_theta=100.0 and no base"),
        ("olmo3", {"rope_parameters": {FULL: YARN_ROPE, SLIDING: _BASE}}, "truncate=False"),
        ("phi3", {"rope_scaling": _LONGROPE}, "longrope.*phi3.*must be one of .'default'"),
        ("phi3", {"rope_scaling": YARN_ROPE}, "yarn.*phi3.*must be one of .'default'"),
        ("phi3", {"partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5.*at most 1"),
        ("phi3", {"partial_rotary_factor": 0.01}, "partial_rotary_factor=0.01.*16 numbers"),
        ("phi3", {"partial_rotary_factor": 0.2}, "rope_dim=3 must be even"),
        ("phi3", {"partial_rotary_factor": "a"}, "partial_rotary_factor='a'"),
        ("smollm3", {"mlp_bias": True}, "mlp_bias=True"),
        ("smollm3", {"no_rope_layers": [1, 1]}, "no_rope_layers=.* for 3 layers"),
        ("smollm3", {"no_rope_layers": [1, 1, 2]}, "no_rope_layers=.* for 3 layers"),
        ("smollm3", {"no_rope_layers": 3}, "no_rope_layers=3"),
        ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 0},
         "no_rope_layer_interval=0"),
        ("smollm3", _NO_WINDOWS, "use_sliding_window=False: set it to true"),
        ("smollm3", {"rope_parameters": YARN_ROPE, "rope_scaling": YARN_ROPE}, "leave one out"),
        ("smollm3", {"rope_scaling": YARN_ROPE, "original_max_position_embeddings": 8},
         "original_max_position_embeddings=8"),
        ("llama3", {"rope_parameters": {FULL: _BASE}}, "for all layers together"),
        ("llama3", {"rope_scaling": LLAMA3_ROPE | {"low_freq_factor": 4.0}},
         "rope_low_freq=4 is not below model.rope_high_freq=4"),
        ("llama3", {"rope_scaling": YARN_ROPE | {"beta_slow": 3.0}}, "rope_beta_slow=3 is above"),
    ],
)  # fmt: skip
def test_bad_configs_are_refused(family, changes, words):
    with pytest.raises(ValueError, match=words):
        hf_formats.model_config_from_hf(written(family) | changes)


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("mistral", {"layer_pattern": ("local", "global")}, "layer_pattern"),
        ("mistral", {"rope_dim": 4}, "rope_dim=4"),
        ("mistral", {"qkv_bias": True}, "qkv_bias=True"),
        ("qwen2", {"bias": True}, "bias=True"),
        ("qwen2", {"layer_pattern": ("global_nope",)}, "layer_pattern"),
        ("olmo2", {"pre_norms": True}, "pre_norms=True"),
        ("olmo2", {"qk_norm_over": "head"}, "qk_norm_over='head'"),
        ("olmo3", {"rope_theta_local": 0.0, "rope_scaling": "linear", "rope_factor": 2.0},
         "rope_theta_local=0"),
        ("phi3", {"rope_scaling": "yarn"}, "'default'"),
    ],
)  # fmt: skip
def test_what_a_format_cannot_represent_is_refused(family, changes, words):
    config = families.preset(family, vocab_size=99, **changes)
    with pytest.raises(ValueError, match=words):
        hf_formats.model_config_to_hf(config)


def test_tensors_of_another_model_are_named(tmp_path):
    """Without biases, and with a fused tensor for other heads."""
    model = families.preset("phi3", vocab_size=99, num_layers=1)
    shapes = hf_formats.tensor_names(model, prefix="model.")
    sizes = hf_formats.dimension_sizes(model)
    tensors = {
        name: np.zeros(hf_formats.their_shape(row, sizes), np.float32)
        for name, (row, _) in shapes.items()
    }
    assert tensors["model.layers.0.self_attn.qkv_proj.weight"].shape == ((4 + 2 + 2) * 16, 64)
    (tmp_path / hf_reader.CONFIG).write_text(json.dumps(hf_formats.model_config_to_hf(model)))

    def refused(tensors: dict, words: str):
        safetensors.numpy.save_file(tensors, tmp_path / hf_reader.WEIGHTS)
        with pytest.raises(ValueError, match=words):
            hf.load(tmp_path)

    fused = "model.layers.0.self_attn.qkv_proj"
    refused(tensors | {f"{fused}.bias": np.zeros(128, np.float32)}, f"has {fused}.bias")
    refused(tensors | {f"{fused}.weight": np.zeros((96, 64), np.float32)}, f"{fused}.*has shape")
    del tensors["model.layers.0.mlp.gate_up_proj.weight"]
    refused(tensors, r"lacks model.layers.0.mlp.gate_up_proj.weight")

"""What a config.json leaves out means what it means to transformers, and nothing of it is lost."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from support import hf_checkpoints, hf_models
from support.hf_models import FULL, LLAMA3_ROPE, SLIDING, TINY, YARN_ROPE

from llmx.checkpoint import hf, hf_files, hf_formats, hf_reader, hf_tables
from llmx.data import tokenizer_files
from llmx.model import families

LOGITS = 5e-5  # as in test_hf.py
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_OTHER_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 123.0}}
# By family, class and values of a config; windows and rotation other than by default.
CASES = {
    "gpt2": ("GPT2Config", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "llama3": ("LlamaConfig", TINY | {"rope_parameters": LLAMA3_ROPE}),
    "qwen3": ("Qwen3Config", TINY | _OTHER_ROPE),
    "mistral": ("MistralConfig", TINY | {"sliding_window": 5}),
    "qwen2": ("Qwen2Config", TINY | {"use_sliding_window": True, "max_window_layers": 1}),
    "olmo2": ("Olmo2Config", TINY | {"rope_parameters": YARN_ROPE}),
    "olmo3": ("Olmo3Config", TINY | {"layer_types": [FULL, SLIDING, FULL]}),
    "phi3": ("Phi3Config", TINY | {"partial_rotary_factor": 0.5, "sliding_window": 7}),
    "smollm3": ("SmolLM3Config", TINY | {"no_rope_layer_interval": 2} | _OTHER_ROPE),
    "mixtral": ("MixtralConfig", TINY | {"num_local_experts": 4}),
    "qwen3_moe": ("Qwen3MoeConfig", TINY | _EXPERTS | {"norm_topk_prob": True}),
    "olmoe": ("OlmoeConfig", TINY | {"num_experts": 12, "num_experts_per_tok": 3}),
    "gpt_oss": ("GptOssConfig", TINY | {"num_local_experts": 6} | _OTHER_ROPE),
    "deepseek_v3": ("DeepseekV3Config", TINY | {
        "num_hidden_layers": 5, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": None,
        "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "n_routed_experts": 16,
        "num_experts_per_tok": 3, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
        "routed_scaling_factor": 1.5, "moe_intermediate_size": 24,
    }),
    "gemma2": ("Gemma2Config", TINY | {"sliding_window": 5, "final_logit_softcapping": None}),
    "gemma3": ("Gemma3TextConfig", TINY | {"sliding_window": 5, "query_pre_attn_scalar": 24}),
}  # fmt: skip
_NOT_OF_THE_MODEL = {"model_type", "architectures", "transformers_version", "dtype"}
# Not in transformers' config classes: what transformers 4 had, and keys of other code for a family.
_OF_OTHERS = {
    "rope_theta", "rope_local_base_freq", "sliding_window_pattern", "partial_rotary_factor",
    "head_dim", "quantization_config", "attention_bias", "scoring_func", "topk_method",
    "moe_layer_freq", "rope_parameters",
}  # fmt: skip


def config_class(transformers, family: str):
    return getattr(transformers, CASES[family][0])


@pytest.mark.parametrize("family", hf_formats.FORMATS)
def test_absent_keys_mean_what_they_mean_to_transformers(family, transformers):
    """The table, key by key."""
    form = hf_formats.FORMATS[family]
    theirs = {field.name: field.default for field in dataclasses.fields(
        config_class(transformers, family))}  # fmt: skip
    names = getattr(config_class(transformers, family), "attribute_map", {})
    known = theirs.keys() | names.keys() | set(names.values())
    assert {**form.absent, **form.only}.keys() - known <= _OF_OTHERS
    compared = form.absent.keys() & theirs.keys() - {"rope_parameters"}
    assert len(compared) >= 3
    assert {key: form.absent[key] for key in compared} == {key: theirs[key] for key in compared}
    for key in form.only.keys() & theirs.keys():
        assert theirs[key] in form.only[key], key
    assert names.items() <= form.also.items() | {(key, of) for of, key in form.also.items()}
    # What depends on other keys.
    made = config_class(transformers, family)().to_dict()
    sizes = {key: made[key] for key in form.keys.values() if key not in form.absent}
    direct = hf_formats.model_config_from_hf(sizes | {"model_type": form.model_type})
    assert not hf_formats.differences(direct, hf_formats.model_config_from_hf(made))


def read_by_transformers(transformers, config: dict, folder) -> dict:
    """The config as transformers reads it, all keys written."""
    (folder / "config.json").write_text(json.dumps(config))
    made = transformers.AutoConfig.from_pretrained(folder).to_dict()
    return json.loads(json.dumps(made))


def changed(config: dict, form: hf_tables.Format) -> dict:
    """By what was done to it, the config with one key left out, null, or of another value."""
    found = {}
    for key in (config.keys() | form.absent.keys() | form.also.keys()) - _NOT_OF_THE_MODEL:
        value = config.get(key)
        found[f"no {key}"] = {name: config[name] for name in config if name != key}
        found[f"{key}=null"] = config | {key: None}
        if isinstance(value, bool):
            found[f"{key}={not value}"] = config | {key: not value}
        elif isinstance(value, int | float) or key in form.also:
            other = (value or 2) * 2
            found[f"{key}={other}"] = config | {key: other}
    return found


@pytest.mark.parametrize("family", hf_formats.FORMATS)
def test_both_readers_agree_whatever_key_is_left_out_or_changed(family, transformers, tmp_path):
    """Of a config of transformers 5 and of one of 4, which is what an export writes."""
    form, (_, values) = hf_formats.FORMATS[family], CASES[family]
    made = json.loads(json.dumps(config_class(transformers, family)(**values).to_dict()))
    model = hf_formats.model_config_from_hf(made)
    exported = json.loads(json.dumps(hf_formats.model_config_to_hf(model)))
    again = read_by_transformers(transformers, exported, tmp_path)
    assert not hf_formats.differences(hf_formats.model_config_from_hf(again), model)
    compared = 0
    for config in (made, exported):
        for what, other in changed(config, form).items():
            try:
                direct = hf_formats.model_config_from_hf(other)
            except ValueError:
                continue  # refused, and so not misread
            try:
                theirs = read_by_transformers(transformers, other, tmp_path)
            except Exception:  # of many classes: the value is not one to transformers
                continue
            through = hf_formats.model_config_from_hf(theirs)
            assert not hf_formats.differences(direct, through), what
            compared += 1
    assert compared > 50


@pytest.mark.parametrize("name", families.FAMILIES)
def test_transformers_reads_the_model_that_was_exported(name, transformers, tmp_path):
    model = families.preset(name)
    model = dataclasses.replace(model, vocab_size=model.vocab_size or 99)
    written = hf_formats.model_config_to_hf(model)
    theirs = read_by_transformers(transformers, written, tmp_path)
    assert not hf_formats.differences(model, hf_formats.model_config_from_hf(theirs))


def test_an_export_without_scaled_positions_is_that_model(transformers, run, tmp_path):
    """To transformers a gpt_oss config without rope_parameters has yarn."""
    model = families.preset(
        "gpt_oss", vocab_size=99, num_layers=2, rope_scaling="none", rope_theta=100.0
    )
    params = jax.tree.map(lambda leaf: 0.2 * leaf, hf_checkpoints.params_of(model))
    hf.export(params, model, tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager", experts_implementation="eager"
    )
    tokens = hf_models.tokens_of()
    ours = hf_models.our_logits(model, params, run, tokens)[..., :99]
    expected = hf_models.their_logits(theirs, tokens)
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(ours, expected, atol=LOGITS, rtol=0)


@pytest.mark.parametrize("family", [name for name in CASES if "head_dim" in dict(
    hf_formats.FORMATS[name].keys)])  # fmt: skip
def test_heads_that_do_not_divide_the_width(family, transformers, tmp_path):
    """Refused where transformers has that rule, and there alone."""
    model = families.preset(family, vocab_size=99, num_heads=6)
    try:
        written = hf_formats.model_config_to_hf(model)
    except ValueError as error:
        assert "not a multiple of num_heads=6" in str(error)
        config = hf_formats.model_config_to_hf(families.preset(family, vocab_size=99))
        with pytest.raises(Exception, match="not a multiple of the number of attention heads"):
            read_by_transformers(transformers, config | {"num_attention_heads": 6}, tmp_path)
    else:
        read = read_by_transformers(transformers, written, tmp_path)
        assert hf_formats.model_config_from_hf(read).num_heads == 6


@pytest.mark.parametrize(
    ("family", "other", "key"),
    [(name, *names) for name, form in hf_formats.FORMATS.items() for names in form.also.items()],
)
def test_keys_of_two_names(family, other, key):
    model = families.preset(family, vocab_size=99)
    written = hf_formats.model_config_to_hf(model)
    renamed = {other if name == key else name: value for name, value in written.items()}
    assert hf_formats.model_config_from_hf(renamed) == hf_formats.model_config_from_hf(written)
    with pytest.raises(ValueError, match=f"has {key}=.*'{other}', which names the same: leave"):
        hf_formats.model_config_from_hf(written | {other: 5})


# --------------------------------------------------------------------------- what an import keeps

_KEPT = {
    "llama3": {"pretraining_tp": 2, "attention_dropout": 0.1, "initializer_range": 0.5,
               "pad_token_id": None, "bos_token_id": 3, "a key of others": [1], "use_cache": False},
    "smollm3": {"no_rope_layer_interval": 2, "pad_token_id": None},
    "qwen2": {"sliding_window": 77, "max_window_layers": 21, "use_sliding_window": False},
    "gpt2": {"n_ctx": 64, "resid_pdrop": 0.0, "n_inner": None,
             "activation_function": "gelu_pytorch_tanh"},
    "deepseek_v3": {"num_nextn_predict_layers": 1, "ep_size": 1},
}  # fmt: skip


def exported(model, kept: dict, folder, **arguments) -> dict:
    """config.json of an export of a run that was imported with `kept`."""
    files = {tokenizer_files.IMPORTED_CONFIG: json.dumps(kept).encode()}
    params = hf_checkpoints.params_of(model)
    hf.export(params, model, folder, files=files, **arguments)
    return json.loads((folder / hf_reader.CONFIG).read_text())


@pytest.mark.parametrize("form", ["written", "of transformers 5"])
@pytest.mark.parametrize("family", _KEPT)
def test_imported_keys_come_back(family, form, transformers, tmp_path):
    model = families.preset(family, vocab_size=99, num_layers=2)
    kept = json.loads(json.dumps(hf_formats.model_config_to_hf(model))) | _KEPT[family]
    if "no_rope_layer_interval" in kept:
        del kept["no_rope_layers"]
    if form != "written":
        kept = read_by_transformers(transformers, kept, tmp_path)
    model = hf_formats.model_config_from_hf(kept)
    ids = {"pad_token_id": 5, "bos_token_id": 6}  # of the tokenizer: the checkpoint says its own
    found = exported(model, kept, tmp_path / "out", ids=ids)
    assert {key: found[key] for key in _KEPT[family]} == {key: kept[key] for key in _KEPT[family]}
    before = read_by_transformers(transformers, kept, tmp_path)
    after = read_by_transformers(transformers, found, tmp_path)
    said = {"dtype", "architectures", "eos_token_id"} | (ids.keys() - kept.keys())
    assert {key for key in before if before[key] != after.get(key)} <= said


def test_what_training_changed_wins(tmp_path):
    model = families.preset("llama3", vocab_size=99, num_layers=2, max_positions=64)
    kept = hf_formats.model_config_to_hf(model) | {
        "architectures": ["LlamaModel"], "dtype": "bfloat16", "pretraining_tp": 2,
        "quantization_config": {"quant_method": "mxfp4"}, "auto_map": {"AutoConfig": "a.B"},
    }  # fmt: skip
    trained = dataclasses.replace(
        model, vocab_size=120, num_layers=1, max_positions=256, rope_scaling="yarn",
        rope_factor=4.0, rope_old_context=64, tied_head=True,
    )  # fmt: skip
    found = exported(trained, kept, tmp_path / "out")
    back = hf_formats.model_config_from_hf(found)
    assert not hf_formats.differences(back, trained)
    assert found["pretraining_tp"] == 2 and found["architectures"] == ["LlamaForCausalLM"]
    assert found["torch_dtype"] == "float32"
    assert not found.keys() & {"dtype", "quantization_config", "auto_map", "rope_parameters"}
    # Nor does a checkpoint of another kind, or one that lent its tokenizer alone.
    for number, other in enumerate((kept | {"model_type": "qwen2"}, {"pretraining_tp": 2})):
        assert "pretraining_tp" not in exported(model, other, tmp_path / f"other{number}")
    files = {tokenizer_files.IMPORTED_CONFIG: json.dumps(kept | {"eos_token_id": 7}).encode()}
    lent = tokenizer_files.imported_config(hf_files.borrowed(files))
    assert lent == {"eos_token_id": 7}


# ------------------------------------------------------------------------------------- bad numbers


@pytest.mark.parametrize("dtype", hf_reader.DTYPES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_numbers_are_refused(value, dtype, tmp_path):
    model = families.preset("llama3", vocab_size=99, num_layers=1)
    params = hf_checkpoints.params_of(model)
    params["blocks"]["mlp"]["down"]["kernel"][0, 5, 7] = value
    hf.export(params, model, tmp_path / "out", dtype=dtype)
    with pytest.raises(ValueError, match=r"layers.0.mlp.down_proj.weight in .*NaN or infinite"):
        hf.load(tmp_path / "out")

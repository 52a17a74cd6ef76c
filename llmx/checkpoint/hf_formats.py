"""The formats of Hugging Face checkpoints as data.

`FORMATS` has a table of tensors and one of config keys per family, each used in both directions.
Source: `configuration_*.py` and `modeling_*.py` of each model in transformers
(https://github.com/huggingface/transformers).

Letters: D width, F mlp_dim, E experts, X width of an expert, N query heads, K key/value heads,
H head size, V vocabulary, T learned positions, Z the parts of a fused tensor.
"""

import dataclasses
import math
import re
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llmx.data.json_files import shown
from llmx.model import families
from llmx.model.families import GLOBAL, LOCAL, ModelConfig


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint, or one per layer, or one per layer and expert, and its place in
    our parameters."""

    ours: str  # path; under blocks/ all layers are stacked; * stands for each of `parts`
    dims: str  # dimensions there, without layer and expert
    theirs: str  # name behind the prefix; * is the layer, # the expert
    groups: str  # its dimensions in its own order; "NH" is one dimension of size N x H
    parts: tuple[str, ...] = ()  # parameters that are fused in this tensor, along Z

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(self.ours.replace("*", part) for part in self.parts) or (self.ours,)

    @property
    def stacked(self) -> bool:
        return self.ours.startswith("blocks/")

    @property
    def of_each_expert(self) -> bool:
        return "#" in self.theirs


HEAD = Tensor("head", "VD", "lm_head.weight", "V,D")

_DECODER = (
    Tensor("embedding", "VD", "embed_tokens.weight", "V,D"),
    Tensor("blocks/attention_norm/scale", "D", "layers.*.input_layernorm.weight", "D"),
    Tensor("blocks/attention/query/kernel", "DNH", "layers.*.self_attn.q_proj.weight", "NH,D"),
    Tensor("blocks/attention/key/kernel", "DKH", "layers.*.self_attn.k_proj.weight", "KH,D"),
    Tensor("blocks/attention/value/kernel", "DKH", "layers.*.self_attn.v_proj.weight", "KH,D"),
    Tensor("blocks/attention/out/kernel", "NHD", "layers.*.self_attn.o_proj.weight", "D,NH"),
    Tensor("norm/scale", "D", "norm.weight", "D"),
)
_ROTARY = (
    *_DECODER,
    Tensor("blocks/mlp/gate/kernel", "DF", "layers.*.mlp.gate_proj.weight", "F,D"),
    Tensor("blocks/mlp/up/kernel", "DF", "layers.*.mlp.up_proj.weight", "F,D"),
    Tensor("blocks/mlp/down/kernel", "FD", "layers.*.mlp.down_proj.weight", "D,F"),
)


def _experts(block: str, gate: str, up: str, down: str) -> tuple[Tensor, ...]:
    """The router and the experts of a layer, by the names of a family."""
    each = f"layers.*.{block}.experts.#"
    return (
        Tensor("blocks/mlp/router", "DE", f"layers.*.{block}.gate.weight", "E,D"),
        Tensor("blocks/mlp/gate", "DX", f"{each}.{gate}.weight", "X,D"),
        Tensor("blocks/mlp/up", "DX", f"{each}.{up}.weight", "X,D"),
        Tensor("blocks/mlp/down", "XD", f"{each}.{down}.weight", "D,X"),
    )


# gpt-oss stores all experts of a layer in one tensor, and gate and up in turn along its rows.
_GATE_UP = ("gate", "up")
_GPT_OSS = (
    Tensor("blocks/attention/query/bias", "NH", "layers.*.self_attn.q_proj.bias", "NH"),
    Tensor("blocks/attention/key/bias", "KH", "layers.*.self_attn.k_proj.bias", "KH"),
    Tensor("blocks/attention/value/bias", "KH", "layers.*.self_attn.v_proj.bias", "KH"),
    Tensor("blocks/attention/out/bias", "D", "layers.*.self_attn.o_proj.bias", "D"),
    Tensor("blocks/attention/sinks", "N", "layers.*.self_attn.sinks", "N"),
    Tensor("blocks/mlp/router", "DE", "layers.*.mlp.router.weight", "E,D"),
    Tensor("blocks/mlp/router_bias", "E", "layers.*.mlp.router.bias", "E"),
    Tensor("blocks/mlp/*", "EDX", "layers.*.mlp.experts.gate_up_proj", "E,D,XZ", _GATE_UP),
    Tensor("blocks/mlp/*_bias", "EX", "layers.*.mlp.experts.gate_up_proj_bias", "E,XZ", _GATE_UP),
    Tensor("blocks/mlp/down", "EXD", "layers.*.mlp.experts.down_proj", "E,X,D"),
    Tensor("blocks/mlp/down_bias", "ED", "layers.*.mlp.experts.down_proj_bias", "E,D"),
)
# The bias by which experts are chosen, which these families do not have: zeros.
_LOADS = "blocks/mlp/bias"
_POST_ATTENTION = "layers.*.post_attention_layernorm.weight"
_PRE_NORMS = (Tensor("blocks/mlp_norm/scale", "D", _POST_ATTENTION, "D"),)
_QK_NORMS = (
    Tensor("blocks/attention/query_norm/scale", "H", "layers.*.self_attn.q_norm.weight", "H"),
    Tensor("blocks/attention/key_norm/scale", "H", "layers.*.self_attn.k_norm.weight", "H"),
)
_QK_NORMS_OF_ALL_HEADS = (
    Tensor("blocks/attention/query_norm/scale", "NH", "layers.*.self_attn.q_norm.weight", "NH"),
    Tensor("blocks/attention/key_norm/scale", "KH", "layers.*.self_attn.k_norm.weight", "KH"),
)
_GEMMA_NORMS = (
    Tensor("blocks/attention_post_norm/scale", "D", _POST_ATTENTION, "D"),
    Tensor("blocks/mlp_norm/scale", "D", "layers.*.pre_feedforward_layernorm.weight", "D"),
    Tensor("blocks/mlp_post_norm/scale", "D", "layers.*.post_feedforward_layernorm.weight", "D"),
)
# GPT-2 stores projections input first, and fuses queries, keys and values.
_QKV = ("query", "key", "value")
_GPT2 = (
    Tensor("embedding", "VD", "wte.weight", "V,D"),
    Tensor("positions", "TD", "wpe.weight", "T,D"),
    Tensor("blocks/attention_norm/scale", "D", "h.*.ln_1.weight", "D"),
    Tensor("blocks/attention_norm/bias", "D", "h.*.ln_1.bias", "D"),
    Tensor("blocks/attention/*/kernel", "DNH", "h.*.attn.c_attn.weight", "D,ZNH", _QKV),
    Tensor("blocks/attention/*/bias", "NH", "h.*.attn.c_attn.bias", "ZNH", _QKV),
    Tensor("blocks/attention/out/kernel", "NHD", "h.*.attn.c_proj.weight", "NH,D"),
    Tensor("blocks/attention/out/bias", "D", "h.*.attn.c_proj.bias", "D"),
    Tensor("blocks/mlp_norm/scale", "D", "h.*.ln_2.weight", "D"),
    Tensor("blocks/mlp_norm/bias", "D", "h.*.ln_2.bias", "D"),
    Tensor("blocks/mlp/up/kernel", "DF", "h.*.mlp.c_fc.weight", "D,F"),
    Tensor("blocks/mlp/up/bias", "F", "h.*.mlp.c_fc.bias", "F"),
    Tensor("blocks/mlp/down/kernel", "FD", "h.*.mlp.c_proj.weight", "F,D"),
    Tensor("blocks/mlp/down/bias", "D", "h.*.mlp.c_proj.bias", "D"),
    Tensor("norm/scale", "D", "ln_f.weight", "D"),
    Tensor("norm/bias", "D", "ln_f.bias", "D"),
)


@dataclasses.dataclass(frozen=True)
class Format:
    """The checkpoints of one family."""

    model_type: str
    architecture: str
    prefix: str  # of every tensor but the head; a checkpoint of the bare body lacks it
    tensors: tuple[Tensor, ...]
    keys: Mapping[str, str]  # our field -> key of config.json
    absent: Mapping[str, Any]  # what a key that is left out means; no entry = it may not be
    only: Mapping[str, tuple]  # keys with other values than these are refused; the first is written
    mxfp4: tuple[str, ...] = ()  # rows of `tensors`, by `ours`, that files may have as MXFP4


_KEYS = {
    "vocab_size": "vocab_size", "width": "hidden_size", "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim", "mlp_dim": "intermediate_size",
    "max_positions": "max_position_embeddings", "norm_eps": "rms_norm_eps",
    "tied_head": "tie_word_embeddings",
}  # fmt: skip
_EXPERT_KEYS = {"experts_per_token": "num_experts_per_tok"}
_GEMMA_KEYS = _KEYS | {"window": "sliding_window", "logit_softcap": "final_logit_softcapping"}
_NO_BIAS = {"attention_bias": (False,), "quantization_config": (None,)}
_GEMMA_ONLY = _NO_BIAS | {
    "hidden_activation": ("gelu_pytorch_tanh",), "use_bidirectional_attention": (False, None)
}  # fmt: skip
_ROTARY_ABSENT = {
    "num_key_value_heads": None, "head_dim": None, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "rope_theta": 10_000.0,
}  # fmt: skip
_GEMMA_ABSENT = {
    "head_dim": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256, "sliding_window": 4096,
}  # fmt: skip


def _without(keys: Mapping[str, str], *names: str) -> dict[str, str]:
    """Of a family whose files do not have these fields, or derive them."""
    return {field: key for field, key in keys.items() if field not in names}


FORMATS = {
    "gpt2": Format(
        "gpt2", "GPT2LMHeadModel", "transformer.", (*_GPT2, HEAD),
        keys={
            "vocab_size": "vocab_size", "width": "n_embd", "num_layers": "n_layer",
            "num_heads": "n_head", "mlp_dim": "n_inner", "max_positions": "n_positions",
            "norm_eps": "layer_norm_epsilon", "tied_head": "tie_word_embeddings",
        },
        absent={"n_inner": None, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
        only={
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,), "quantization_config": (None,),
        },
    ),
    "llama3": Format(
        "llama", "LlamaForCausalLM", "model.", (*_ROTARY, *_PRE_NORMS, HEAD),
        keys=_KEYS, absent=_ROTARY_ABSENT,
        only=_NO_BIAS | {"mlp_bias": (False,), "hidden_act": ("silu",)},
    ),
    "qwen3": Format(
        "qwen3", "Qwen3ForCausalLM", "model.", (*_ROTARY, *_PRE_NORMS, *_QK_NORMS, HEAD),
        keys=_KEYS, absent=_ROTARY_ABSENT | {"head_dim": 128},
        only=_NO_BIAS | {"use_sliding_window": (False,), "hidden_act": ("silu",)},
    ),
    "mixtral": Format(
        "mixtral", "MixtralForCausalLM", "model.",
        (*_DECODER, *_experts("block_sparse_moe", "w1", "w3", "w2"), *_PRE_NORMS, HEAD),
        keys=_without(_KEYS, "mlp_dim") | _EXPERT_KEYS | {
            "num_experts": "num_local_experts", "expert_dim": "intermediate_size",
        },
        absent=_ROTARY_ABSENT | {
            "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0, "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        only=_NO_BIAS | {"hidden_act": ("silu",), "sliding_window": (None,)},
    ),
    "qwen3_moe": Format(
        "qwen3_moe", "Qwen3MoeForCausalLM", "model.",
        (
            *_DECODER, *_experts("mlp", "gate_proj", "up_proj", "down_proj"), *_PRE_NORMS,
            *_QK_NORMS, HEAD,
        ),
        keys=_KEYS | _EXPERT_KEYS | {
            "num_experts": "num_experts", "expert_dim": "moe_intermediate_size",
            "router_renormalize": "norm_topk_prob",
        },
        absent=_ROTARY_ABSENT | {
            "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": False,
            "moe_intermediate_size": 768,
        },
        only=_NO_BIAS | {
            "use_sliding_window": (False,), "hidden_act": ("silu",), "decoder_sparse_step": (1,),
            "mlp_only_layers": ([], None),
        },
    ),
    "olmoe": Format(
        "olmoe", "OlmoeForCausalLM", "model.",
        (
            *_DECODER, *_experts("mlp", "gate_proj", "up_proj", "down_proj"), *_PRE_NORMS,
            *_QK_NORMS_OF_ALL_HEADS, HEAD,
        ),
        keys=_without(_KEYS, "mlp_dim", "head_dim") | _EXPERT_KEYS | {
            "num_experts": "num_experts", "expert_dim": "intermediate_size",
            "router_renormalize": "norm_topk_prob",
        },
        absent=_ROTARY_ABSENT | {
            "rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8,
            "norm_topk_prob": False,
        },
        only=_NO_BIAS | {"hidden_act": ("silu",), "clip_qkv": (None,)},
    ),
    "gpt_oss": Format(
        "gpt_oss", "GptOssForCausalLM", "model.", (*_DECODER, *_PRE_NORMS, *_GPT_OSS, HEAD),
        keys=_without(_KEYS, "mlp_dim") | _EXPERT_KEYS | {
            "num_experts": "num_local_experts", "expert_dim": "intermediate_size",
            "window": "sliding_window",
        },
        absent=_ROTARY_ABSENT | {
            "rms_norm_eps": 1e-5, "rope_theta": 150_000.0, "head_dim": 64, "sliding_window": 128,
            "num_local_experts": 128, "num_experts_per_tok": 4, "sliding_window_pattern": 2,
        },
        only={
            "attention_bias": (True,), "hidden_act": ("silu",), "swiglu_limit": (7.0,),
            "swiglu_alpha": (1.702,), "quantization_config": (None,),
        },
        mxfp4=("blocks/mlp/*", "blocks/mlp/down"),
    ),
    "gemma2": Format(
        "gemma2", "Gemma2ForCausalLM", "model.", (*_ROTARY, *_GEMMA_NORMS, HEAD),
        keys=_GEMMA_KEYS | {"attention_softcap": "attn_logit_softcapping"},
        absent=_GEMMA_ABSENT | {
            "rope_theta": 10_000.0, "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0, "sliding_window_pattern": 2,
        },
        only=_GEMMA_ONLY,
    ),
    "gemma3": Format(
        "gemma3_text", "Gemma3ForCausalLM", "model.",
        (*_ROTARY, *_GEMMA_NORMS, *_QK_NORMS, HEAD),
        keys=_GEMMA_KEYS | {"rope_theta_local": "rope_local_base_freq"},
        absent=_GEMMA_ABSENT | {
            "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0,
            "final_logit_softcapping": None, "sliding_window_pattern": 6,
        },
        only=_GEMMA_ONLY | {"attn_logit_softcapping": (None,)},
    ),
}  # fmt: skip

# Constants of the computation in older files.
BUFFERS = re.compile(r"(\.attn\.(bias|masked_bias)|rotary_emb\.inv_freq)$")
_OPTIONAL = {"attention_softcap", "logit_softcap", "window"}  # 0 is written as null
_LAYER_TYPES = {LOCAL: "sliding_attention", GLOBAL: "full_attention"}
_LLAMA3_ROPE = {
    "rope_low_freq": "low_freq_factor", "rope_high_freq": "high_freq_factor",
    "rope_old_context": "original_max_position_embeddings",
}  # fmt: skip


_YARN_ROPE = {
    "rope_beta_fast": "beta_fast", "rope_beta_slow": "beta_slow", "rope_truncate": "truncate",
}  # fmt: skip
_YARN_ABSENT = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}


def model_config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """The model that a config.json describes; `vocab_multiple` is ours and keeps its default.

    Raises ValueError for an unknown model type, a missing key, and a value that the decoder does
    not support.
    """
    family = _family_of(config)
    form = FORMATS[family]
    for key, allowed in form.only.items():
        if key == "quantization_config" and form.mxfp4 and _is_mxfp4(config):
            continue
        if config.get(key, allowed[0]) not in allowed:
            raise ValueError(
                f"config.json has {key}={shown(config[key])} and family {family!r} supports only "
                f"{allowed[0]!r}: use a checkpoint with that"
            )
    values = {field: _get_field(form, config, field) for field in form.keys}
    values |= {field: values[field] or 0 for field in _OPTIONAL & values.keys()}
    _check(form.keys["num_heads"], values["num_heads"], int, above=0)
    if "mlp_dim" in form.keys:
        values["mlp_dim"] = values["mlp_dim"] or 4 * values["width"]
    else:
        values["mlp_dim"] = values["expert_dim"]
    values["head_dim"] = values.get("head_dim") or values["width"] // values["num_heads"]
    values["num_kv_heads"] = values.get("num_kv_heads") or values["num_heads"]
    if "query_pre_attn_scalar" in form.absent:
        scalar = _get(form, config, "query_pre_attn_scalar")
        _check("query_pre_attn_scalar", scalar, float, above=0)
        values["query_scale"] = 0.0 if scalar == values["head_dim"] else scalar**-0.5
    if "rope_theta" in form.absent:
        values |= _read_rope(form, config)
    values["layer_pattern"] = _read_layers(form, config, values["num_layers"])
    model = dataclasses.replace(families.preset(family), **values)
    if found := _problems(model):
        raise ValueError("config.json does not make a model:\n" + "\n".join(found))
    return model


def _is_mxfp4(config: Mapping[str, Any]) -> bool:
    return _object(config, "quantization_config").get("quant_method") == "mxfp4"


def _problems(model: ModelConfig) -> list[str]:
    """Those of `families.problems`, and a vocabulary that is left to the tokenizer."""
    empty = ["model.vocab_size=0 must be at least 1 in a checkpoint"]
    return families.problems(model) + (empty if model.vocab_size == 0 else [])


def model_config_to_hf(model: ModelConfig) -> dict[str, Any]:
    """The config.json of a model, in keys that transformers 4 and 5 read.

    Raises ValueError if the family's format cannot represent a value of `model`.
    """
    if model.family not in FORMATS:
        raise ValueError(
            f"model.family={model.family!r} has no Hugging Face format: use one of {tuple(FORMATS)}"
        )
    if found := _problems(model):
        raise ValueError("\n".join(found))
    form = FORMATS[model.family]
    config = {"architectures": [form.architecture], "model_type": form.model_type}
    config |= {field: allowed[0] for field, allowed in form.only.items() if allowed[0] is not None}
    config |= {key: vars(model)[field] for field, key in form.keys.items()}
    for field in _OPTIONAL & form.keys.keys():
        config[form.keys[field]] = vars(model)[field] or None
    if "query_pre_attn_scalar" in form.absent:
        config["query_pre_attn_scalar"] = round(model.score_scale**-2)
    if "rope_theta" in form.absent:
        config |= _write_rope(model)
    if "rope_local_base_freq" in form.absent:
        config["rope_local_base_freq"] = model.rope_theta_local or model.rope_theta
    if "sliding_window_pattern" in form.absent:
        config["layer_types"] = [_LAYER_TYPES[kind] for kind in model.layer_kinds]
    if different := differences(model, model_config_from_hf(config)):
        problem = f"a {form.model_type} checkpoint cannot represent {different}"
        raise ValueError(f"{problem}: change the model or its family")
    if model.width % model.num_heads:
        raise ValueError(
            f"model.width={model.width} is not a multiple of num_heads={model.num_heads}, which "
            "transformers requires: change one of them"
        )
    return config


def _family_of(config: Mapping[str, Any]) -> str:
    kind = config.get("model_type")
    if not isinstance(kind, str | None):
        raise ValueError(f"config.json has model_type={shown(kind)}, which is not a text")
    known = {form.model_type: family for family, form in FORMATS.items()}
    if kind in known:
        return known[kind]
    remedy = f"use one of {', '.join(known)}"
    if "text_config" in config:
        remedy += "; of a model of text and images, save only the text model"
    raise ValueError(
        f"config.json has model_type={shown(kind)}, which llmx does not have: {remedy}"
    )


# What transformers 5 writes in the place of a key.
_ALSO = {"num_experts": "num_local_experts"}


def _get(form: Format, config: Mapping[str, Any], key: str) -> Any:
    for name in (key, _ALSO.get(key)):
        if name in config:
            return config[name]
    if key in form.absent:
        return form.absent[key]
    raise ValueError(f"config.json has no {key!r}: add it, a {form.model_type} model needs it")


_SIZES = {"num_layers": families.MAX_LAYERS}
_HINTS = typing.get_type_hints(ModelConfig)


def _get_field(form: Format, config: Mapping[str, Any], field: str) -> Any:
    """The value of a key in `form.keys`, checked against the type of our field."""
    key = form.keys[field]
    value = _get(form, config, key)
    if value is None and (field in _OPTIONAL or (key in form.absent and form.absent[key] is None)):
        return None
    most = _SIZES.get(field, families.MAX_SIZE)
    _check(key, value, _HINTS[field], most=most)
    return value


def _check(key: str, value: Any, kind: type, *, above: float = -1, most: float = math.inf) -> None:
    """Raises ValueError for a value of another type, or a number out of bounds."""
    limits = f" above {above:g}" if above >= 0 else ""
    limits += f" of at most {most:,}" if most < math.inf and kind is int else ""
    wanted = {
        int: f"a whole number{limits}",
        float: f"a finite number{limits or ' of at least 0'}",
        bool: "true or false",
    }
    if kind is bool:
        fits = isinstance(value, bool)
    else:
        fits = isinstance(value, int | kind) and not isinstance(value, bool)
        fits = fits and above < value <= most and 0 <= value < 1e300
    if not fits:
        raise ValueError(f"config.json has {key}={shown(value)}, not {wanted[kind]}")


def _object(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key)
    if not isinstance(value, dict | None):
        raise ValueError(f"config.json has {key}={shown(value)}, not an object")
    return value or {}


def _read_rope(form: Format, config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary fields of a config.json of transformers 4 (top level) or 5 (`rope_parameters`)."""
    new = _object(config, "rope_parameters")
    per_kind = "full_attention" in new
    parameters = _object(new, "full_attention") if per_kind else new
    scaling = parameters or _object(config, "rope_scaling")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    llama3 = {"rope_factor": "factor"} | _LLAMA3_ROPE
    kinds = {"default": {}, "linear": {"rope_factor": "factor"}, "llama3": llama3}
    old = "rope_old_context"
    kinds["yarn"] = {"rope_factor": "factor", old: _LLAMA3_ROPE[old]} | _YARN_ROPE
    if kind == "yarn":
        given = {name: value for name, value in scaling.items() if value is not None}
        scaling = _YARN_ABSENT | given
        if found := sorted(scaling.keys() & {"attention_factor", "mscale", "mscale_all_dim"}):
            raise ValueError(
                f"config.json scales positions by {shown(dict(scaling))}: {found} must be left out"
            )
    if (
        not isinstance(kind, str)
        or kind not in kinds
        or scaling.get("partial_rotary_factor", 1) != 1
    ):
        raise ValueError(
            f"config.json scales positions by {shown(dict(scaling))}: rope_type must be one of "
            f"{tuple(kinds)} and rotate every dimension"
        )
    if missing := sorted(set(kinds[kind].values()) - scaling.keys()):
        raise ValueError(f"config.json scales positions by {shown(dict(scaling))}: add {missing}")
    values = {field: scaling[key] for field, key in kinds[kind].items()}
    for field, key in kinds[kind].items():
        above = -1 if key == "truncate" else 0
        _check(key, scaling[key], _HINTS[field], above=above, most=families.MAX_SIZE)
    values["rope_theta"] = scaling.get("rope_theta", _get(form, config, "rope_theta"))
    _check("rope_theta", values["rope_theta"], float, above=0)
    values["rope_scaling"] = "none" if kind == "default" else kind
    if "rope_local_base_freq" in form.absent:
        local = _object(new, "sliding_attention") if per_kind else {}
        if local.get("rope_type", "default") != "default":
            raise ValueError(
                f"config.json scales the positions of local layers by {shown(local)}: only those "
                "of global layers can be scaled"
            )
        default = _get(form, config, "rope_local_base_freq")
        values["rope_theta_local"] = local.get("rope_theta", default)
        _check("rope_local_base_freq", values["rope_theta_local"], float)
    return values


def _write_rope(model: ModelConfig) -> dict[str, Any]:
    scaling = None
    if model.rope_scaling != "none":
        scaling = {"rope_type": model.rope_scaling, "factor": float(model.rope_factor)}
    if model.rope_scaling == "llama3":
        scaling |= {key: vars(model)[field] for field, key in _LLAMA3_ROPE.items()}
    if model.rope_scaling == "yarn":
        old = "rope_old_context"
        scaling |= {_LLAMA3_ROPE[old]: model.rope_old_context}
        scaling |= {key: vars(model)[field] for field, key in _YARN_ROPE.items()}
    return {"rope_theta": model.rope_theta, "rope_scaling": scaling}


def _read_layers(form: Format, config: Mapping[str, Any], num_layers: int) -> tuple[str, ...]:
    """The shortest pattern that gives each layer its kind."""
    kinds = [GLOBAL] * num_layers
    if "sliding_window_pattern" in form.absent:
        period = _get(form, config, "sliding_window_pattern")
        _check("sliding_window_pattern", period, int, above=0, most=families.MAX_SIZE)
        kinds = [LOCAL if (i + 1) % period else GLOBAL for i in range(num_layers)]
    if "layer_types" in config:
        ours = {theirs: kind for kind, theirs in _LAYER_TYPES.items()}
        types = config["layer_types"]
        known = isinstance(types, list) and all(isinstance(kind, str) for kind in types)
        if not known or set(types) - ours.keys() or len(types) != num_layers:
            raise ValueError(
                f"config.json has layer_types={shown(types)} for {num_layers} layers: "
                f"give each layer one of {sorted(ours)}"
            )
        kinds = [ours[theirs] for theirs in types]
    if LOCAL in kinds and "window" not in form.keys:
        raise ValueError(
            f"config.json has sliding windows in layer_types, which {form.model_type} does not "
            "support: use full_attention"
        )
    for period in range(1, num_layers):
        if kinds[period:] == kinds[:-period]:
            return tuple(kinds[:period])
    return tuple(kinds)


def _meaning(model: ModelConfig) -> dict[str, Any]:
    """The fields of a model that change what it computes."""
    values = dict(vars(model)) | {"layer_pattern": model.layer_kinds}
    # Without the rounding error of a square root.
    values["query_scale"] = float(f"{model.score_scale:.9g}")
    unused = {"vocab_multiple"} | set(families.unused_of_experts(model))
    if LOCAL not in model.layer_kinds:
        unused |= {"window", "rope_theta_local"}
    elif model.rope_scaling == "none":
        values["rope_theta_local"] = model.rope_theta_local or model.rope_theta
    if model.rope_scaling != "yarn":
        unused |= set(families.OF_YARN)
    if model.rope_scaling != "llama3":
        unused |= _LLAMA3_ROPE.keys()
    if model.rope_scaling == "yarn":
        unused -= {"rope_old_context"}
    if model.rope_scaling == "none":
        unused |= {"rope_factor"}
    if model.positions == "learned":
        unused |= {name for name in values if name.startswith("rope_")}
    return {name: value for name, value in values.items() if name not in unused}


def differences(model: ModelConfig, other: ModelConfig, *, ignore: Sequence[str] = ()) -> str:
    """The fields in which `model` and `other` differ, as text."""
    ours, theirs = _meaning(model), _meaning(other)
    names = [n for n in vars(model) if n not in ignore and ours.get(n) != theirs.get(n)]
    return ", ".join(f"model.{n}={ours.get(n)!r} (it has {theirs.get(n)!r})" for n in names)


def dimension_sizes(model: ModelConfig) -> dict[str, int]:
    """The size of each letter but Z; the vocabulary without padding."""
    return {
        "D": model.width, "F": model.mlp_dim, "N": model.num_heads, "K": model.num_kv_heads,
        "H": model.head_dim, "V": model.vocab_size, "T": model.max_positions,
        "E": model.num_experts, "X": model.expert_dim,
    }  # fmt: skip


def rows(model: ModelConfig) -> list[Tensor]:
    """The tensors of a model's checkpoint, without a tied head."""
    tied = model.tied_head
    return [row for row in FORMATS[model.family].tensors if not (tied and row is HEAD)]


def tensor_names(model: ModelConfig, *, prefix: str) -> dict[str, tuple[Tensor, tuple[int, ...]]]:
    """Every tensor of a model's checkpoint: its name, its row of the table, its index in our
    parameter: the layer, and the expert."""
    names = {}
    for row in rows(model):
        name = row.theirs if row is HEAD else prefix + row.theirs
        counts = [model.num_layers] * row.stacked + [model.num_experts] * row.of_each_expert
        for index in np.ndindex(*counts):
            numbers = dict(zip("*#", map(str, index), strict=False))
            names[name.translate(str.maketrans(numbers))] = row, index
    return names


def unwritten(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Parameters that a family's checkpoints do not have, and their shapes: they must be zero."""
    if not model.num_experts:
        return {}
    return {_LOADS: (model.num_layers, model.num_experts)}


def their_shape(row: Tensor, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of one tensor in a file; `sizes`: see `dimension_sizes`."""
    sizes = sizes_of(row, sizes)
    return tuple(math.prod(sizes[x] for x in group) for group in row.groups.split(","))


def sizes_of(row: Tensor, sizes: Mapping[str, int]) -> dict[str, int]:
    """The size of each letter of one tensor."""
    return {**sizes, "Z": len(row.parts)}


def our_shape(row: Tensor, model: ModelConfig) -> tuple[int, ...]:
    """The shape of the stacked parameter, with the vocabulary padded."""
    sizes = dimension_sizes(model) | {"V": model.padded_vocab}
    stacked = (model.num_layers,) * row.stacked + (model.num_experts,) * row.of_each_expert
    return stacked + tuple(sizes[x] for x in row.dims)

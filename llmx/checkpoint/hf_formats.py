"""Hugging Face's config.json and names of tensors, made of a model and read as one.

`hf_tables` has what each family's checkpoints are made of; each table is used in both directions.
"""

import dataclasses
import math
import re
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llmx.checkpoint.hf_tables import FORMATS, HEAD, LOADS, Format, Tensor
from llmx.data.json_files import shown
from llmx.model import families
from llmx.model.families import GLOBAL, LOCAL, ModelConfig

# Constants of the computation in older files.
BUFFERS = re.compile(r"(\.attn\.(bias|masked_bias)|rotary_emb\.inv_freq)$")
# 0 is written as null
_OPTIONAL = {"attention_softcap", "logit_softcap", "window", "query_latent"}
_LAYER_TYPES = {LOCAL: "sliding_attention", GLOBAL: "full_attention"}
_LLAMA3_ROPE = {
    "rope_low_freq": "low_freq_factor", "rope_high_freq": "high_freq_factor",
    "rope_old_context": "original_max_position_embeddings",
}  # fmt: skip


_YARN_ROPE = {
    "rope_beta_fast": "beta_fast", "rope_beta_slow": "beta_slow", "rope_truncate": "truncate",
    "rope_mscale": "mscale", "rope_mscale_all": "mscale_all_dim",
}  # fmt: skip
_YARN_ABSENT = {
    "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True, "mscale": 0.0, "mscale_all_dim": 0.0
}  # fmt: skip


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
    if "kv_latent" in form.keys:
        names = ("qk_nope_head_dim", "n_shared_experts")
        sizes = {name: _get(form, config, name) for name in names}
        for name, size in sizes.items():
            _check(name, size, int, most=families.MAX_SIZE)
        values["head_dim"] = sizes["qk_nope_head_dim"] + values["rope_dim"]
        values["shared_dim"] = sizes["n_shared_experts"] * values["expert_dim"]
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
    if "kv_latent" in form.keys:
        config["qk_nope_head_dim"] = model.head_dim - model.rope_dim
        config["n_shared_experts"] = model.shared_dim // max(model.expert_dim, 1)
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
        if "attention_factor" in scaling:
            raise ValueError(
                f"config.json has attention_factor={shown(scaling['attention_factor'])}: it must "
                "follow from factor, mscale and mscale_all_dim; leave it out"
            )
        if scaling["mscale_all_dim"] and "kv_latent" not in form.keys:
            raise ValueError(
                f"config.json has mscale_all_dim={shown(scaling['mscale_all_dim'])}, by which "
                "only deepseek_v3 scales scores: leave it out"
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
        above = -1 if key in ("mscale", "mscale_all_dim", "truncate") else 0
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
        # Without them transformers scales by the factor alone.
        scaling = {key: value for key, value in scaling.items() if "mscale" not in key or value}
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
    unused |= set(families.unused_of_attention(model))
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
        "E": model.num_experts, "X": model.expert_dim, "S": model.shared_dim,
        "Q": model.query_latent, "R": model.kv_latent, "Y": model.kv_latent + model.rope_dim,
        "U": model.value_dim, "W": model.head_dim - model.rope_dim + model.value_dim,
    }  # fmt: skip


def rows(model: ModelConfig) -> list[Tensor]:
    """The tensors of a model's checkpoint, without a tied head and what it has no numbers for."""
    sizes, found = dimension_sizes(model), {}
    for row in FORMATS[model.family].tensors:
        tied, no_first = row is HEAD and model.tied_head, row.first and not model.num_first
        if not tied and not no_first and all(sizes[letter] for letter in row.dims):
            found.setdefault(row.ours, row)
    return list(found.values())


def tensor_names(model: ModelConfig, *, prefix: str) -> dict[str, tuple[Tensor, tuple[int, ...]]]:
    """Every tensor of a model's checkpoint: its name, its row of the table, its index in our
    parameter: the layer, and the expert."""
    names = {}
    for row in rows(model):
        name = row.theirs if row is HEAD else prefix + row.theirs
        before = 0 if row.first else model.num_first  # layers before those of the stack
        for index in np.ndindex(*_stacked(row, model)):
            layer, *expert = index or (0,)
            numbers = dict(zip("*#", map(str, (layer + before, *expert)), strict=False))
            names[name.translate(str.maketrans(numbers))] = row, index
    return names


def unwritten(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Parameters that a family's checkpoints do not have, and their shapes: they must be zero."""
    if not model.num_experts or LOADS in (row.ours for row in rows(model)):
        return {}
    return {LOADS: (model.num_layers, model.num_experts)}


def _stacked(row: Tensor, model: ModelConfig) -> tuple[int, ...]:
    """Layers, and experts of each, that a parameter has of this tensor."""
    layers = model.num_first if row.first else model.num_blocks
    return (layers,) * row.stacked + (model.num_experts,) * row.of_each_expert


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
    return _stacked(row, model) + tuple(sizes[x] for x in row.dims)

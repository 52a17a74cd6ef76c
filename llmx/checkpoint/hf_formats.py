"""Hugging Face's config.json and names of tensors, made of a model and read as one.

`hf_tables` has what each family's checkpoints are made of; each table is used in both directions.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llmx.checkpoint import hf_layers, hf_rope
from llmx.checkpoint.hf_tables import (
    EVERYWHERE,
    FORMATS,
    HEAD,
    LAST,
    LOADS,
    UNROTATED,
    Tensor,
)
from llmx.checkpoint.hf_values import OPTIONAL, check, get, get_field, get_object, renamed
from llmx.data.json_files import shown
from llmx.model import families
from llmx.model.families import LOCAL, ModelConfig

# Of an imported config.json: what an export says itself, or does not have.
_NOT_KEPT = {
    "architectures", "dtype", "torch_dtype", "rope_parameters", "quantization_config", "auto_map",
}  # fmt: skip
# Constants of the computation in older files.
BUFFERS = re.compile(r"(\.attn\.(bias|masked_bias)|rotary_emb\.inv_freq)$")


def model_config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """The model that a config.json describes; `vocab_multiple` is ours and keeps its default.

    Raises ValueError for an unknown model type, a missing key, and a value that the decoder does
    not support.
    """
    family = _family_of(config)
    form = FORMATS[family]
    config = renamed(form, config)
    for key, allowed in form.only.items():
        if key == "quantization_config" and form.mxfp4 and _is_mxfp4(config):
            continue
        if config.get(key, allowed[0]) not in allowed:
            raise ValueError(
                f"config.json has {key}={shown(config[key])} and family {family!r} supports only "
                f"{allowed[0]!r}: use a checkpoint with that"
            )
    values = {field: get_field(form, config, field) for field in form.keys}
    values["layer_pattern"] = hf_layers.read(
        form, config, values["num_layers"], values.get("window")
    )
    values |= {field: values[field] or 0 for field in OPTIONAL & values.keys()}
    has_local = any(map(families.is_local, values["layer_pattern"]))
    if not has_local and form.windows in (EVERYWHERE, LAST, UNROTATED):
        values["window"] = 0
    check(form.keys["num_heads"], values["num_heads"], int, above=0)
    if "mlp_dim" in form.keys:
        values["mlp_dim"] = values["mlp_dim"] or 4 * values["width"]
    else:
        values["mlp_dim"] = values["expert_dim"]
    if "kv_latent" in form.keys:
        names = ("qk_nope_head_dim", "n_shared_experts")
        sizes = {name: get(form, config, name) for name in names}
        for name, size in sizes.items():
            check(name, size, int, most=families.MAX_SIZE)
        values["head_dim"] = sizes["qk_nope_head_dim"] + values["rope_dim"]
        values["shared_dim"] = sizes["n_shared_experts"] * values["expert_dim"]
    values["head_dim"] = values.get("head_dim") or values["width"] // values["num_heads"]
    values["num_kv_heads"] = values.get("num_kv_heads") or values["num_heads"]
    if "query_pre_attn_scalar" in form.absent:
        scalar = get(form, config, "query_pre_attn_scalar")
        check("query_pre_attn_scalar", scalar, float, above=0)
        values["query_scale"] = 0.0 if scalar == values["head_dim"] else scalar**-0.5
    if "rope_theta" in form.absent:
        values |= hf_rope.read(form, config, head_dim=values["head_dim"], has_local=has_local)
    model = dataclasses.replace(families.preset(family), **values)
    if found := _problems(model):
        raise ValueError("config.json does not make a model:\n" + "\n".join(found))
    return model


def _is_mxfp4(config: Mapping[str, Any]) -> bool:
    return get_object(config, "quantization_config").get("quant_method") == "mxfp4"


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
    for field in OPTIONAL & form.keys.keys():
        config[form.keys[field]] = vars(model)[field] or None
    if "kv_latent" in form.keys:
        config["qk_nope_head_dim"] = model.head_dim - model.rope_dim
        config["n_shared_experts"] = model.shared_dim // max(model.expert_dim, 1)
    if "query_pre_attn_scalar" in form.absent:
        config["query_pre_attn_scalar"] = round(model.score_scale**-2)
    if "rope_theta" in form.absent:
        config |= hf_rope.write(form, model)
    config |= hf_layers.write(form, model)
    if different := differences(model, model_config_from_hf(config)):
        problem = f"a {form.model_type} checkpoint cannot represent {different}"
        raise ValueError(f"{problem}: change the model or its family")
    if form.whole_heads and model.width % model.num_heads:
        raise ValueError(
            f"model.width={model.width} is not a multiple of num_heads={model.num_heads}, which "
            f"transformers requires of a {form.model_type} model: change one of them"
        )
    return config


def with_kept(
    config: Mapping[str, Any], model: ModelConfig, kept: Mapping[str, Any]
) -> dict[str, Any]:
    """`config`, which is of `model`, with the keys and values of the config.json that the model was
    imported from, as far as they describe the same model."""
    merged = dict(config)
    if kept.get("model_type") != config["model_type"]:
        return merged
    for key in [key for key in kept if key not in _NOT_KEPT]:
        trial = merged | {key: kept[key]}
        try:
            same = not differences(model, model_config_from_hf(trial))
        except ValueError:  # it contradicts another key, or the model has no such thing
            continue
        merged = trial if same else merged
    return merged


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


def _meaning(model: ModelConfig) -> dict[str, Any]:
    """The fields of a model that change what it computes."""
    values = dict(vars(model)) | {"layer_pattern": model.layer_kinds}
    # Without the rounding error of a square root.
    values["query_scale"] = float(f"{model.score_scale:.9g}")
    unused = {"vocab_multiple"} | set(families.unused_of_experts(model))
    unused |= set(families.unused_of_attention(model))
    if not any(map(families.is_local, model.layer_kinds)):
        unused |= {"window"}
    if LOCAL not in model.layer_kinds:
        unused |= {"rope_theta_local"}
    elif model.rope_scaling == "none":
        values["rope_theta_local"] = model.rope_theta_local or model.rope_theta
    if model.rope_scaling != "yarn":
        unused |= set(families.OF_YARN)
    if model.rope_scaling != "llama3":
        unused |= hf_rope.LLAMA3.keys()
    if model.rope_scaling == "yarn":
        unused -= {"rope_old_context"}
    if model.rope_scaling == "none":
        unused |= {"rope_factor"}
    values["rope_dim"] = model.rotated_dim
    values["qkv_bias"] = model.bias or model.qkv_bias
    if model.positions == "learned" or not any(map(families.is_rotated, model.layer_kinds)):
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
        if not tied and not no_first and all(sizes[letter] for letter in row.letters):
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
    if row.joined is not None:
        shapes = [their_shape(part, sizes) for part in row.pieces]
        along = sum(shape[row.joined] for shape in shapes)
        return (*shapes[0][: row.joined], along, *shapes[0][row.joined + 1 :])
    sizes = sizes_of(row, sizes)
    return tuple(math.prod(sizes[x] for x in group) for group in row.groups.split(","))


def sizes_of(row: Tensor, sizes: Mapping[str, int]) -> dict[str, int]:
    """The size of each letter of one tensor."""
    return {**sizes, "Z": len(row.parts)}


def our_shapes(row: Tensor, model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """By path, the shapes of the stacked parameters of a tensor, with the vocabulary padded."""
    sizes = dimension_sizes(model) | {"V": model.padded_vocab}
    return {
        path: _stacked(row, model) + tuple(sizes[x] for x in dims)
        for path, dims in zip(row.paths, row.dims_of_parts, strict=True)
    }

"""Rotary positions in a config.json, of transformers 4 (`rope_theta`, `rope_scaling`) and 5
(`rope_parameters`)."""

import math
from collections.abc import Mapping
from typing import Any

from llmx.checkpoint.hf_tables import Format
from llmx.checkpoint.hf_values import HINTS, check, get, get_object
from llmx.data.json_files import shown
from llmx.model import families
from llmx.model.families import ModelConfig

FULL, SLIDING = "full_attention", "sliding_attention"
PARTIAL = "partial_rotary_factor"
_OLD_CONTEXT = "original_max_position_embeddings"
LLAMA3 = {
    "rope_low_freq": "low_freq_factor", "rope_high_freq": "high_freq_factor",
    "rope_old_context": _OLD_CONTEXT,
}  # fmt: skip
_YARN = {
    "rope_beta_fast": "beta_fast", "rope_beta_slow": "beta_slow", "rope_truncate": "truncate",
    "rope_mscale": "mscale", "rope_mscale_all": "mscale_all_dim",
}  # fmt: skip
_YARN_ABSENT = {
    "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True, "mscale": 0.0, "mscale_all_dim": 0.0
}  # fmt: skip
# The keys of each rope_type.
_KEYS = {
    "default": {},
    "linear": {"rope_factor": "factor"},
    "llama3": {"rope_factor": "factor"} | LLAMA3,
    "yarn": {"rope_factor": "factor", "rope_old_context": _OLD_CONTEXT} | _YARN,
}
_LOCAL_BASE = "rope_local_base_freq"


def read(
    form: Format, config: Mapping[str, Any], *, head_dim: int, has_local: bool
) -> dict[str, Any]:
    """The rotary fields of a model. `has_local`: whether a layer has a window.

    Raises ValueError for what the decoder, or the family, does not have.
    """
    new, old = get_object(config, "rope_parameters"), get_object(config, "rope_scaling")
    if config.get("rope_parameters") is None and not old:
        new = form.absent.get("rope_parameters", {})
    per_kind = bool(new.keys() & {FULL, SLIDING})
    if new and per_kind != form.rope_by_kind:
        wanted = f"by {FULL} and {SLIDING}" if form.rope_by_kind else "for all layers together"
        raise ValueError(
            f"config.json has rope_parameters={shown(dict(new))}: of a {form.model_type} model "
            f"they are given {wanted}"
        )
    if new and old and not per_kind and new.get("rope_type", "default") == "default":
        new = {}  # of all versions rope_scaling wins
    if new and old and not per_kind:
        raise ValueError(
            f"config.json has rope_parameters and rope_scaling={shown(dict(old))}: leave one out"
        )
    scaling = {**(get_object(new, FULL) if per_kind else new), **old}
    kind = _kind_of(form, config, scaling)
    if kind == "yarn":
        scaling = _with_defaults_of_yarn(form, scaling)
    keys = _KEYS[kind]
    if missing := sorted(set(keys.values()) - scaling.keys()):
        raise ValueError(f"config.json scales positions by {shown(scaling)}: add {missing}")
    values = {field: scaling[key] for field, key in keys.items()}
    for field, key in keys.items():
        above = -1 if key in ("mscale", "mscale_all_dim", "truncate") else 0
        check(key, scaling[key], HINTS[field], above=above, most=families.MAX_SIZE)
    if "rope_old_context" in keys and config.get(_OLD_CONTEXT) not in (None, scaling[_OLD_CONTEXT]):
        raise ValueError(
            f"config.json has {_OLD_CONTEXT}={shown(config[_OLD_CONTEXT])} and scales positions by "
            f"{shown(scaling)}: leave one out"
        )
    values["rope_theta"] = scaling.get("rope_theta", get(form, config, "rope_theta"))
    check("rope_theta", values["rope_theta"], float, above=0)
    values["rope_scaling"] = "none" if kind == "default" else kind
    if PARTIAL in form.absent:
        values["rope_dim"] = _rope_dim(_partial(config, scaling), head_dim)
    if form.rope_by_kind and (has_local or _LOCAL_BASE in form.absent):
        values["rope_theta_local"] = _local_theta(form, config, get_object(new, SLIDING))
    return values


def _kind_of(form: Format, config: Mapping[str, Any], scaling: Mapping[str, Any]) -> str:
    """The rope_type. Raises ValueError for one that the family does not have."""
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if not isinstance(kind, str) or kind not in form.rope_types:
        raise ValueError(
            f"config.json scales positions by {shown(dict(scaling))}: of a {form.model_type} model "
            f"rope_type must be one of {form.rope_types}"
        )
    if PARTIAL not in form.absent and (partial := _partial(config, scaling)) != 1:
        raise ValueError(
            f"config.json has {PARTIAL}={shown(partial)}: a {form.model_type} model must rotate "
            "every dimension"
        )
    return kind


def _partial(config: Mapping[str, Any], scaling: Mapping[str, Any]) -> Any:
    """The share of a head that is rotated."""
    partial = scaling.get(PARTIAL, config.get(PARTIAL))
    return 1.0 if partial is None else partial


def _rope_dim(partial: Any, head_dim: int) -> int:
    """Numbers of a head that are rotated, 0 = all."""
    check(PARTIAL, partial, float, above=0)
    rotated = int(head_dim * partial)
    if partial > 1 or not rotated:
        raise ValueError(
            f"config.json has {PARTIAL}={partial}, of a head's {head_dim} numbers: it must be at "
            "most 1, and leave some to rotate"
        )
    return rotated % head_dim


def _with_defaults_of_yarn(form: Format, scaling: Mapping[str, Any]) -> dict[str, Any]:
    """All keys of yarn. Raises ValueError for what the family would compute otherwise."""
    scaling = _YARN_ABSENT | {name: value for name, value in scaling.items() if value is not None}
    if scaling["mscale_all_dim"] and "kv_latent" not in form.keys:
        raise ValueError(
            f"config.json has mscale_all_dim={shown(scaling['mscale_all_dim'])}, by which "
            "only deepseek_v3 scales scores: leave it out"
        )
    if "attention_factor" in scaling:
        given, follows = scaling["attention_factor"], _attention_factor(scaling)
        check("attention_factor", given, float)
        if not math.isclose(given, follows, rel_tol=1e-7):
            raise ValueError(
                f"config.json has attention_factor={given}: it must follow from factor, mscale and "
                f"mscale_all_dim, and be {follows:.9g}; leave it out"
            )
    if form.rope_by_kind and not scaling["truncate"]:
        # Of transformers 5, `truncate` by kind of layer has no effect.
        raise ValueError(
            f"config.json has truncate={shown(scaling['truncate'])}, which versions of "
            f"transformers read differently in a {form.model_type} model: use true"
        )
    return scaling


def _attention_factor(scaling: Mapping[str, Any]) -> float:
    """What transformers makes of the other keys: `rope.amplitude`."""
    for key in ("factor", "mscale", "mscale_all_dim"):
        check(key, scaling.get(key), float)
    if scaling["mscale"] and scaling["mscale_all_dim"]:
        of, of_all = (
            families.yarn_scale(scaling["factor"], scaling[key])
            for key in ("mscale", "mscale_all_dim")
        )
        return of / of_all
    return families.yarn_scale(scaling["factor"])


def _local_theta(form: Format, config: Mapping[str, Any], local: Mapping[str, Any]) -> float:
    """The base of layers with a window.

    Raises ValueError where these are scaled, and where transformers 4 and 5 read another one.
    """
    if local.get("rope_type", "default") != "default":
        raise ValueError(
            f"config.json scales the positions of local layers by {shown(dict(local))}: only those "
            "of global layers can be scaled"
        )
    default = form.absent.get(_LOCAL_BASE, form.absent["rope_theta"])
    if "rope_theta" in local:
        theta = local["rope_theta"]
    elif _LOCAL_BASE in form.absent:
        theta = get(form, config, _LOCAL_BASE)
    elif (theta := get(form, config, "rope_theta")) != default:
        # Of transformers 4 it is the base of all layers, of 5 that of global ones.
        raise ValueError(
            f"config.json has rope_theta={shown(theta)} and no base for {SLIDING}, for which "
            f"versions of transformers take {shown(theta)} or {default:g}: add rope_parameters "
            f"with rope_theta of {FULL} and of {SLIDING}"
        )
    check(_LOCAL_BASE, theta, float)
    return theta


def write(form: Format, model: ModelConfig) -> dict[str, Any]:
    """The keys that `read` reads, as both versions do."""
    scaling = None
    if model.rope_scaling != "none":
        scaling = {"rope_type": model.rope_scaling, "factor": float(model.rope_factor)}
    if model.rope_scaling == "llama3":
        scaling |= {key: vars(model)[field] for field, key in LLAMA3.items()}
    if model.rope_scaling == "yarn":
        scaling |= {_OLD_CONTEXT: model.rope_old_context}
        scaling |= {key: vars(model)[field] for field, key in _YARN.items()}
        # Without them transformers scales by the factor alone.
        scaling = {key: value for key, value in scaling.items() if "mscale" not in key or value}
    written = {"rope_theta": model.rope_theta, "rope_scaling": scaling}
    if scaling is None and not form.rope_by_kind:
        # To transformers 5 null means what an absent key does: of gpt_oss yarn.
        written |= {"rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta}}
    local = model.rope_theta_local or model.rope_theta
    if PARTIAL in form.absent:
        share = model.rotated_dim / model.head_dim
        if int(model.head_dim * share) < model.rotated_dim:
            share = math.nextafter(share, 1)
        written |= {PARTIAL: share}
    if _LOCAL_BASE in form.absent:
        written |= {_LOCAL_BASE: local}
    elif form.rope_by_kind:
        full = (scaling or {"rope_type": "default"}) | {"rope_theta": model.rope_theta}
        sliding = {"rope_type": "default", "rope_theta": local}
        written |= {"rope_parameters": {FULL: full, SLIDING: sliding}}
    return written

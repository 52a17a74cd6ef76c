"""Values of a config.json, checked for type and size: a file from elsewhere is not trusted."""

import math
import typing
from collections.abc import Mapping
from typing import Any

from llmx.checkpoint.hf_tables import Format
from llmx.data.json_files import shown
from llmx.model import families
from llmx.model.families import ModelConfig

# 0 is written as null
OPTIONAL = {"attention_softcap", "logit_softcap", "window", "query_latent"}
HINTS = typing.get_type_hints(ModelConfig)
_SIZES = {"num_layers": families.MAX_LAYERS}
# null is as many as there are query heads, which an absent key need not be
_AS_HEADS = {"num_kv_heads"}


def renamed(form: Format, config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with each key under one name. Raises ValueError where two names disagree."""
    config = dict(config)
    for other, key in form.also.items():
        if other in config and config.setdefault(key, config[other]) != config.pop(other):
            raise ValueError(
                f"config.json has {key}={shown(config[key])} and another value at {other!r}, which "
                "names the same: leave one out"
            )
    return config


def get(form: Format, config: Mapping[str, Any], key: str) -> Any:
    """The value of a key, or what its absence means. Raises ValueError where it may not lack."""
    if key in config:
        return config[key]
    if key in form.absent:
        return form.absent[key]
    raise ValueError(f"config.json has no {key!r}: add it, a {form.model_type} model needs it")


def get_field(form: Format, config: Mapping[str, Any], field: str) -> Any:
    """The value of a key in `form.keys`, checked against the type of our field."""
    key = form.keys[field]
    value = get(form, config, key)
    optional = field in OPTIONAL | _AS_HEADS or (key in form.absent and form.absent[key] is None)
    if value is None and optional:
        return None
    check(key, value, HINTS[field], most=_SIZES.get(field, families.MAX_SIZE))
    return value


def check(key: str, value: Any, kind: type, *, above: float = -1, most: float = math.inf) -> None:
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


def get_object(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The object at a key, {} where it is null or lacks."""
    value = config.get(key)
    if not isinstance(value, dict | None):
        raise ValueError(f"config.json has {key}={shown(value)}, not an object")
    return value or {}

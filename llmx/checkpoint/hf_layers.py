"""Which layers of a Hugging Face checkpoint have windows, and which rotate queries and keys."""

from collections.abc import Mapping, Sequence
from typing import Any

from llmx.checkpoint.hf_tables import EVERYWHERE, LAST, PATTERN, UNROTATED, Format
from llmx.checkpoint.hf_values import check, get
from llmx.data.json_files import shown
from llmx.model import families
from llmx.model.families import GLOBAL, GLOBAL_NOPE, LOCAL, LOCAL_NOPE, ModelConfig

_TYPES = {True: "sliding_attention", False: "full_attention"}  # of layers with and without a window
_KINDS = {
    (False, False): GLOBAL, (True, False): LOCAL, (False, True): GLOBAL_NOPE,
    (True, True): LOCAL_NOPE,
}  # fmt: skip


def read(
    form: Format, config: Mapping[str, Any], num_layers: int, window: int | None
) -> tuple[str, ...]:
    """The shortest pattern that gives each layer its kind. `window`: None = there is none.

    Raises ValueError for what the family's layers cannot be.
    """
    unrotated = [False] * num_layers
    if form.windows == UNROTATED:
        unrotated = _unrotated(form, config, num_layers)
    local = _local(form, config, unrotated, window)
    if config.get("layer_types") is not None:
        implied, local = local, _of_types(config["layer_types"], num_layers)
        if form.windows == EVERYWHERE and local != implied:
            raise ValueError(
                f"config.json has layer_types={shown(config['layer_types'])} with sliding_window="
                f"{window}, which holds for every layer of a {form.model_type} model: leave "
                "layer_types out"
            )
    if any(local) and not form.windows:
        raise ValueError(
            f"config.json has sliding windows in layer_types, which {form.model_type} does not "
            "support: use full_attention"
        )
    if any(local) and form.windows in (LAST, UNROTATED) and not _uses_windows(form, config):
        raise ValueError(
            "config.json has sliding windows in layer_types and use_sliding_window=False: set it "
            "to true, or use full_attention"
        )
    kinds = [_KINDS[of_layer] for of_layer in zip(local, unrotated, strict=True)]
    for period in range(1, num_layers):
        if kinds[period:] == kinds[:-period]:
            return tuple(kinds[:period])
    return tuple(kinds)


def _local(
    form: Format, config: Mapping[str, Any], unrotated: Sequence[bool], window: int | None
) -> list[bool]:
    """Whether each layer has a window, by other keys than `layer_types`."""
    num_layers = len(unrotated)
    if form.windows == PATTERN:
        period = get(form, config, "sliding_window_pattern")
        check("sliding_window_pattern", period, int, above=0, most=families.MAX_SIZE)
        return [(layer + 1) % period > 0 for layer in range(num_layers)]
    if form.windows == EVERYWHERE:
        return [window is not None] * num_layers
    if form.windows in (LAST, UNROTATED) and _uses_windows(form, config) and window is not None:
        if form.windows == UNROTATED:
            return list(unrotated)
        first = get(form, config, "max_window_layers")
        check("max_window_layers", first, int, most=families.MAX_SIZE)
        return [layer >= first for layer in range(num_layers)]
    return [False] * num_layers


def _uses_windows(form: Format, config: Mapping[str, Any]) -> bool:
    uses = get(form, config, "use_sliding_window")
    check("use_sliding_window", uses, bool)
    return uses


def _of_types(types: Any, num_layers: int) -> list[bool]:
    """Whether each layer has a window, by `layer_types`."""
    known = isinstance(types, list) and all(isinstance(kind, str) for kind in types)
    if not known or set(types) - set(_TYPES.values()) or len(types) != num_layers:
        raise ValueError(
            f"config.json has layer_types={shown(types)} for {num_layers} layers: "
            f"give each layer one of {sorted(_TYPES.values())}"
        )
    return [kind == _TYPES[True] for kind in types]


def _unrotated(form: Format, config: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Whether each layer has no rotary positions."""
    given = config.get("no_rope_layers")
    if given is None:
        every = get(form, config, "no_rope_layer_interval")
        check("no_rope_layer_interval", every, int, above=0, most=families.MAX_SIZE)
        return [(layer + 1) % every == 0 for layer in range(num_layers)]
    known = isinstance(given, list) and all(rotated in (0, 1) for rotated in given)
    if not known or len(given) < num_layers:
        raise ValueError(
            f"config.json has no_rope_layers={shown(given)} for {num_layers} layers: give each "
            "layer 1, with rotary positions, or 0, without"
        )
    return [not rotated for rotated in given[:num_layers]]


def write(form: Format, model: ModelConfig) -> dict[str, Any]:
    """The keys that `read` reads."""
    kinds = model.layer_kinds
    local = [families.is_local(kind) for kind in kinds]
    of_type = {"layer_types": [_TYPES[is_local] for is_local in local]}
    if form.windows == PATTERN:
        return of_type
    window = {"sliding_window": model.window if any(local) else None}
    uses = {"use_sliding_window": any(local)}
    if form.windows == EVERYWHERE:
        return window
    if form.windows == LAST:
        first = local.index(True) if any(local) else len(local)
        return of_type | window | uses | {"max_window_layers": first}
    if form.windows == UNROTATED:
        rotated = [int(families.is_rotated(kind)) for kind in kinds]
        return of_type | window | uses | {"no_rope_layers": rotated}
    return {}

"""A model of some of another's layers: what a smaller one begins with."""

import dataclasses
from collections.abc import Sequence

from llmx.model.families import ModelConfig


def of_layers(model: ModelConfig, layers: Sequence[int]) -> ModelConfig:
    """A model of these layers of another, in this order.

    Raises ValueError where there are no such layers, or they are not all of one stack.
    """
    key = f"start_from_layers={tuple(layers)}"
    if wrong := [layer for layer in layers if not 0 <= layer < model.num_layers]:
        raise ValueError(
            f"{key}: layer {wrong[0]} is none of the {model.num_layers} layers of start_from: use "
            f"0 to {model.num_layers - 1}"
        )
    if model.num_first:
        raise ValueError(
            f"{key}: the first {model.num_first} layers of start_from are of another kind than the "
            "others, and chosen layers are of one stack: leave it out"
        )
    kinds = tuple(model.layer_kinds[layer] for layer in layers)
    changed = dataclasses.replace(model, num_layers=len(kinds))
    if kinds == changed.layer_kinds:
        return changed
    patterns = (
        dataclasses.replace(changed, layer_pattern=kinds[:size])
        for size in range(1, len(kinds) + 1)
    )
    return next(model for model in patterns if model.layer_kinds == kinds)  # the shortest

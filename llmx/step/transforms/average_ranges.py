"""Ranges of the int8 inputs of products: moving averages of their largest magnitudes.

Each step hands out the largest magnitude of each product's input (`Gradients.amax`), over all
microbatches and devices; the average of them is what the next step rounds by, and what the trained
model is evaluated with. The first step sets it; a step that is not accepted leaves it, and after
`freeze_after` steps it stays. Source: arXiv 1712.05877, section 3.1.
"""

import jax.numpy as jnp

from llmx.contract import Gradients, Transform
from llmx.model import apply, quantized
from llmx.model.families import ModelConfig
from llmx.model.quantization import AVERAGE, QuantizationConfig
from llmx.model.quantized import Averages


def transforms(config: QuantizationConfig, model: ModelConfig) -> dict[str, Transform]:
    """The transform by name; {} where ranges are not averaged."""
    if config.activations != AVERAGE:
        return {}
    _, axes = apply.abstract_parameters(model)
    return {quantized.RANGES: make(config, quantized.num_weights(axes["blocks"]), model.num_layers)}


def make(config: QuantizationConfig, num_weights: int, num_layers: int) -> Transform:
    """The transform whose state is an `Averages` of so many weights and layers."""

    def init() -> Averages:
        return Averages(
            jnp.zeros((num_weights, num_layers, 3), jnp.float32), jnp.zeros((), jnp.int32)
        )

    def after(state: Averages, found: Gradients, accepted) -> Averages:
        moved = config.decay * state.amax + (1 - config.decay) * found.amax
        moved = jnp.where(state.amax > 0, moved, found.amax)
        moves = accepted
        if config.freeze_after:
            moves = accepted & (state.steps < config.freeze_after)
        return Averages(jnp.where(moves, moved, state.amax), state.steps + accepted)

    return Transform(
        init=init, loss=lambda loss, state: loss, gradients=lambda found, state: found, after=after,
        scalars=lambda found, state: {}, resumed=lambda state: state,
    )  # fmt: skip

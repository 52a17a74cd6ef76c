"""Scales of fp8 products from the largest magnitudes of the last steps: delayed scaling.

The scale is known before the numbers are, so that nothing waits for their largest magnitude. The
gradient of a step hands out those of its own operands (`Gradients.amax`): the largest of all
microbatches and devices. They are kept as of the plain loss: where its scale grows, the ranges grow
with it. A step that is not accepted leaves the history as it was. Where there is no history yet,
scales are current.

Sources: arXiv 2209.05433, section 3; Transformer Engine's DelayedScaling, whose default is the
largest of its history, too.
"""

import jax
import jax.numpy as jnp

from llmx.contract import Gradients, Transform
from llmx.model import apply, quantized
from llmx.model.families import ModelConfig


def transforms(config: quantized.ProductsConfig, model: ModelConfig) -> dict[str, Transform]:
    """The transform by name; {} where scales are current."""
    if config.scaling != "delayed":
        return {}
    _, axes = apply.abstract_parameters(model)
    num_weights = quantized.num_weights(axes["blocks"])
    return {quantized.RANGES: make(config.history, num_weights, model.num_layers)}


def make(history: int, num_weights: int, num_layers: int) -> Transform:
    """The transform whose state is fp32 [history, num_weights, num_layers, 3], the last step
    first."""

    def after(state: jax.Array, found: Gradients, accepted: jax.Array) -> jax.Array:
        return jnp.where(accepted, jnp.concatenate([found.amax[None], state[:-1]]), state)

    return Transform(
        init=lambda: jnp.zeros((history, num_weights, num_layers, 3), jnp.float32),
        loss=lambda loss, state: loss, gradients=lambda found, state: found, after=after,
        scalars=lambda found, state: {}, resumed=lambda state: state,
    )  # fmt: skip

"""The gradient of weights that are trained as integers: see `llmx.model.quantization`."""

import jax.numpy as jnp

from llmx.contract import Gradient
from llmx.model import quantization
from llmx.model.training_loss import TrainingLoss, squared_norms


def trained(gradient: Gradient, loss: TrainingLoss) -> Gradient:
    """The gradient of what is trained by that of rounded weights, `loss.of_rounded`: parameters are
    rounded once before it is taken, and it goes back through the rounding once. As it is where
    nothing is rounded.

    Communicates, beside what `gradient` does, over axes that split numbers that share a scale.
    """
    config, compute = loss.quantization, loss.execution.policy.compute
    if not config.bits:
        return gradient

    def take(params, batch, in_flight, extra):
        weights = quantization.dequantized_params(params, config, compute)
        found, in_flight = gradient.take(weights, batch, in_flight, extra)
        if not config.learns:
            return found, in_flight
        tree = quantization.gradients(params, found.tree, config, compute, loss.gradients)
        squares = squared_norms(tree)
        norms = jnp.sqrt(squares.sum())
        return found._replace(tree=tree, squares=squares, norms=norms), in_flight

    return gradient._replace(take=take)

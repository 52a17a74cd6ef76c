"""Compressed gradients: int8, the largest (top-k), low rank (PowerSGD).

Each step every replica takes the gradient of its own rows; the compressor sums the replicas' shares
and keeps what it leaves out as error-feedback residuals. Works with every optimizer.
"""

from typing import NamedTuple

from llmx.contract import Gradients, Strategy
from llmx.sync import phases, reshard
from llmx.sync.compressors import Residuals
from llmx.sync.replicas import StrategyInputs


class Compressed(NamedTuple):
    """What is kept from step to step."""

    residuals: Residuals  # of the compressor, by parameter name


def make(inputs: StrategyInputs) -> Strategy:
    replicas = inputs.replicas
    abstract = Compressed(replicas.abstract_residuals())

    def reduce(found: Gradients, sync: Compressed) -> tuple[Gradients, Compressed]:
        sums, residuals = replicas.summed_shares(found, sync.residuals)
        return sums, Compressed(residuals)

    def resharded(saved: Compressed, layers: reshard.Layers) -> Compressed:
        return Compressed(reshard.residuals(saved.residuals, abstract.residuals, layers))

    return phases.in_steps(inputs, abstract, phases.exchanged(inputs, reduce), resharded)

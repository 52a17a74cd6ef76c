"""The mean of gradients in every step: the textbook data parallelism, with every layout."""

from llmx.contract import Strategy
from llmx.sync import phases
from llmx.sync.replicas import MEAN, StrategyInputs


def make(inputs: StrategyInputs) -> Strategy:
    return Strategy(
        abstract=(inputs.opt_state, ()),
        init=lambda params: (inputs.optimizer.whole.init(params), ()),
        phases={MEAN: phases.mean(inputs)},
        reshard=lambda saved, layers: saved,
        **phases.scheduled(inputs),
    )

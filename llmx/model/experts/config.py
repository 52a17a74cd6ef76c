"""The section `experts` of the config: how tokens reach experts, and what keeps these balanced."""

import dataclasses

from llmx.runtime.bounds import bounded, choice

DROPLESS, CAPACITY, DENSE = "dropless", "capacity", "dense"
# Of which tokens the balance loss takes the load: those of each sequence, or of all that a
# microbatch has on all devices.
SEQUENCE, BATCH, NONE = "sequence", "batch", "none"
# Of a step and a layer: the largest and the least load of an expert as a multiple of the mean, and
# how evenly tokens are spread over experts, 1 = equally. A load is the tokens that an expert takes.
LOAD_MAX, LOAD_MIN, ENTROPY = "expert_load_max", "expert_load_min", "expert_entropy"
DROPPED = "expert_dropped"  # of "capacity": the share of assignments that no expert takes


@dataclasses.dataclass
class ExpertsConfig:
    """Routed experts: how tokens reach them, and what keeps their loads equal."""

    # "dropless": each token reaches all its experts | "capacity": what is over `capacity` is
    # dropped (GShard) | "dense": each expert computes each token, the plain computation for tests
    dispatch: str = choice(DROPLESS, (DROPLESS, CAPACITY, DENSE))
    # capacity: what an expert takes of one row of tokens, as a multiple of its share
    capacity: float = bounded(1.25, above=0)
    # Over `expert`: what a device sends to each other one at a time, as a multiple of its share.
    # What does not fit is sent in further rounds: nothing is dropped.
    buffer: float = bounded(1.5, above=0)
    # "sequence" | "batch" | "none": whose loads the balance loss is of
    balance: str = choice(SEQUENCE, (SEQUENCE, BATCH, NONE))
    # of the balance loss, which is 1 where loads are equal
    balance_weight: float = bounded(0.01, at_least=0)
    z_weight: float = bounded(0.0, at_least=0)  # of the router's z-loss, log(Z)^2
    # > 0: after each step the bias by which experts are chosen moves by this much towards equal
    # loads, without a loss (DeepSeek-V3; there 0.001)
    bias_rate: float = bounded(0.0, at_least=0, at_most=1)

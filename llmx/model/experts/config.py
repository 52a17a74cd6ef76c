"""The section `experts` of the config: how tokens reach experts, and what keeps these balanced."""

import dataclasses
from typing import Any

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
    capacity: float = bounded(1.25, above=0, needs={"experts.dispatch": (CAPACITY,)})
    # Over `expert`: what a device sends to each other one at a time, as a multiple of its share.
    # What does not fit is sent in further rounds: nothing is dropped.
    buffer: float = bounded(
        1.5, above=0, needs={"experts.dispatch": {"not": (DENSE,)}, "mesh.expert": {"not": (1,)}}
    )
    # "sequence" | "batch" | "none": whose loads the balance loss is of
    balance: str = choice(SEQUENCE, (SEQUENCE, BATCH, NONE))
    # of the balance loss, which is 1 where loads are equal
    balance_weight: float = bounded(0.01, at_least=0, needs={"experts.balance": (SEQUENCE, BATCH)})
    z_weight: float = bounded(0.0, at_least=0)  # of the router's z-loss, log(Z)^2
    # > 0: after each step the bias by which experts are chosen moves by this much towards equal
    # loads, without a loss (DeepSeek-V3; there 0.001)
    bias_rate: float = bounded(0.0, at_least=0, at_most=1)


def problems_of_model(model: Any) -> list[str]:
    """All problems of the routed experts of a `ModelConfig`, each with its remedy."""
    texts, E, k = [], model.num_experts, model.experts_per_token
    groups, kept = model.router_groups, model.router_groups_kept
    if not model.expert_dim:
        texts.append(
            f"model.expert_dim={model.expert_dim} with model.num_experts={E}: set it to the width "
            "of one expert, or num_experts to 0"
        )
    if k == 1 < E and model.router_renormalize:
        texts.append(
            f"model.experts_per_token=1 with model.router_renormalize=True: the weight of the one "
            f"expert is divided by itself, so that the router of {E} learns nothing; use "
            "router_renormalize=False, or more experts_per_token"
        )
    if model.first_dense >= model.num_layers:
        texts.append(
            f"model.first_dense={model.first_dense} leaves none of model.num_layers="
            f"{model.num_layers} with experts: use at most {model.num_layers - 1}, or num_experts=0"
        )
    if model.first_dense and len(set(model.layer_kinds)) > 1:
        texts.append(
            f"model.first_dense={model.first_dense} with model.layer_pattern="
            f"{model.layer_pattern}: the first layers must be of the kind of the others; use one "
            "kind, or first_dense=0"
        )
    if groups < 1 or kept < 1:
        return texts
    if E % groups:
        texts.append(
            f"model.router_groups={groups} does not divide model.num_experts={E}: use a divisor, "
            "or 1 for no groups"
        )
    elif kept > groups:
        texts.append(
            f"model.router_groups_kept={kept} is more than model.router_groups={groups}: use at "
            f"most {groups}"
        )
    elif k > (reach := kept * E // groups):
        of = "" if groups == 1 else f" in the {kept} of {groups} groups that a token chooses"
        texts.append(
            f"model.experts_per_token={k} is more than the {reach} experts{of}: use at most {reach}"
        )
    return texts

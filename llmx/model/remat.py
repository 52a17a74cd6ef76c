"""Activation checkpointing: what the forward pass saves for the backward pass, by name.

The model names values by `jax.ad_checkpoint.checkpoint_name`; a policy says which are saved. Others
are computed again, layer by layer. Sources: arXiv 1604.06174; selective, arXiv 2205.05198.
"""

from collections.abc import Callable

import jax

# The names that the model gives, per layer, in order of appearance, each with its logical size:
#   query_key_value  B T (N+2K) H     attention  B T N H     mlp  B T F (twice if gated)
# and every product with a weight, when its sum over devices is done:
#   product          B T (N+2K) H + B T D + B T F (twice if gated) + B T D
QUERY_KEY_VALUE, ATTENTION, MLP, PRODUCT = "query_key_value", "attention", "mlp", "product"

_policies = jax.checkpoint_policies

POLICIES: dict[str, Callable | None] = {
    "none": None,  # keep everything: fastest, most memory
    "full": _policies.nothing_saveable,  # keep the input of each layer only: one more forward pass
    "dots": _policies.save_only_these_names(PRODUCT),  # keep products with weights, not scores
    # Keep what attention takes and gives; norms and MLP are recomputed.
    "names": _policies.save_only_these_names(QUERY_KEY_VALUE, ATTENTION),
}


def checkpointed(function: Callable, policy: str) -> Callable:
    """`function` that saves what `POLICIES[policy]` says; ValueError for an unknown policy."""
    if policy not in POLICIES:
        raise ValueError(f"remat {policy!r} is unknown: use one of {', '.join(POLICIES)}")
    if policy == "none":
        return function
    # Inside a scan the loop already keeps forward and backward apart: preventing CSE only costs.
    return jax.checkpoint(function, policy=POLICIES[policy], prevent_cse=False)

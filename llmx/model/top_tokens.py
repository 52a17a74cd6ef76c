"""The tokens that a model finds likeliest to follow, and how likely: what a student is taught by.

Letters: B batch, T positions, V vocabulary, K likeliest tokens.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from llmx.model.apply import Apply
from llmx.model.execution import Execution


def make(apply: Apply, execution: Execution, *, number: int) -> Callable:
    """The jitted (params, batch) -> (ids int32 [B, T, K], log-probabilities fp32 [B, T, K+1]).

    The last log-probability is that of all other tokens together, -inf where there are none. The
    vocabulary must not be split over devices. The logits of a batch exist whole. Communicates as a
    forward pass does.
    """
    place = execution.place
    rows, positions, *_ = place.activation(("batch", "sequence"))

    def local(logits_BTV):
        log_p_BTV = jax.nn.log_softmax(logits_BTV, axis=-1)
        log_p_BTK, ids_BTK = jax.lax.top_k(log_p_BTV, number)
        listed = jnp.put_along_axis(
            jnp.zeros(log_p_BTV.shape, bool), ids_BTK, True, axis=-1, inplace=False
        )
        others_BT = jax.nn.logsumexp(jnp.where(listed, -jnp.inf, log_p_BTV), axis=-1)
        return ids_BTK, jnp.concatenate([log_p_BTK, others_BT[..., None]], axis=-1)

    split = PartitionSpec(rows, positions, None)
    whole = NamedSharding(place.mesh, PartitionSpec())

    def top(params: Any, batch: dict):
        arrays = (batch[name] for name in ("tokens", "segment_ids", "positions"))
        logits_BTV = apply.logits(params, *arrays, execution)
        found = jax.shard_map(
            local, mesh=place.mesh, in_specs=split, out_specs=(split, split), check_vma=False
        )(logits_BTV)
        return tuple(jax.sharding.reshard(array, whole) for array in found)

    return functools.partial(_on_mesh, place, jax.jit(top))


def _on_mesh(place, top: Callable, params: Any, batch: dict[str, np.ndarray]) -> tuple:
    to = NamedSharding(place.mesh, place.activation(("batch", "sequence")))
    with jax.set_mesh(place.mesh):
        return jax.device_get(top(params, jax.device_put(batch, to)))

"""Ulysses: devices exchange heads for positions, so that each has whole rows of its heads.

Source: arXiv 2309.14509; nested with a ring, arXiv 2405.07719.

Letters: B batch, T positions on a device, N query heads, K key/value heads.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from llmx.model.attention.masks import Mask, Scores
from llmx.model.attention.split import Split


def ulysses(attend: Callable, *, axis: str, split: Split) -> Callable:
    """`attend` with the positions of a group's devices together, and their heads split.

    Takes and returns what `ring.ring` does. Key/value heads are repeated as often as needed to
    divide. Communicates within each group of `split.ulysses` devices along mesh axis `axis`: an
    all-to-all each of queries, keys, values, sinks and the result, and of their gradients; gathers
    of segments and positions. Raises ValueError where the size does not divide the query heads.
    """
    size = split.ulysses
    if size == 1:
        return attend
    groups = np.arange(split.ways).reshape(-1, size).tolist() if split.rings > 1 else None
    within = dict(axis_index_groups=groups, tiled=True)

    def exchange(array, *, gather: int, scatter: int):
        return jax.lax.all_to_all(array, axis, scatter, gather, **within)

    def gather_rows(rows):
        return jax.lax.all_gather(rows, axis, axis=1, **within)

    def attend_to_whole_rows(
        query_BTNH, key_BTKH, value_BTKH, mask: Mask, scores: Scores, sinks_BTN=None
    ):
        num_heads, num_kv_heads = query_BTNH.shape[2], key_BTKH.shape[2]
        if num_heads % size:
            raise ValueError(
                f"attention.ulysses={size} does not divide the {num_heads} query heads of a "
                "device: use a divisor; the other devices of `sequence` form rings"
            )
        repeats = size // math.gcd(num_kv_heads, size)
        to_heads = functools.partial(exchange, gather=1, scatter=2)
        out = attend(
            to_heads(query_BTNH),
            to_heads(jnp.repeat(key_BTKH, repeats, axis=2)),
            to_heads(jnp.repeat(value_BTKH, repeats, axis=2)),
            jax.tree.map(gather_rows, mask), scores,
            None if sinks_BTN is None else to_heads(sinks_BTN),
        )  # fmt: skip
        return exchange(out, gather=2, scatter=1)

    return attend_to_whole_rows

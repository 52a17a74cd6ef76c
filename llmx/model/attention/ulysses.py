"""Ulysses: devices exchange heads for positions, so that each has whole rows of its heads (arXiv
2309.14509).
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from llmx.model.attention import ring
from llmx.model.attention.kernel import Kernel
from llmx.model.attention.masks import Mask, Scores
from llmx.model.attention.split import Split

# ------------------------------------------------------------------------------------------ Ulysses


def ulysses(attend: Callable, *, axis: str, split: Split) -> Callable:
    """`attend` with the positions of a group's devices together, and their heads split.

    In a manual region; takes and returns what `ring` does. Key/value heads are repeated as far as
    needed to divide. Communicates, within each group, one all-to-all each of queries, keys, values
    and the result, of their gradients in the backward pass, and gathers segments.
    """
    size = split.ulysses
    if size == 1:
        return attend
    groups = np.arange(split.ways).reshape(-1, size).tolist() if split.rings > 1 else None

    def exchanged(array, *, gather: int, scatter: int):
        return jax.lax.all_to_all(
            array, axis, split_axis=scatter, concat_axis=gather, axis_index_groups=groups,
            tiled=True,
        )  # fmt: skip

    def whole(rows):
        if rows is None:
            return None
        return jax.lax.all_gather(rows, axis, axis=1, axis_index_groups=groups, tiled=True)

    def run(query_BTNH, key_BTKH, value_BTKH, mask: Mask, scores: Scores):
        num_heads, num_kv_heads = query_BTNH.shape[2], key_BTKH.shape[2]
        if num_heads % size:
            raise ValueError(
                f"attention.ulysses={size} does not divide the {num_heads} query heads of a "
                "device: use a divisor; the other devices of `sequence` form rings"
            )
        repeats = size // math.gcd(num_kv_heads, size)
        to_heads = functools.partial(exchanged, gather=1, scatter=2)
        out = attend(
            to_heads(query_BTNH),
            to_heads(jnp.repeat(key_BTKH, repeats, axis=2)),
            to_heads(jnp.repeat(value_BTKH, repeats, axis=2)),
            jax.tree.map(whole, mask), scores,
        )  # fmt: skip
        return exchanged(out, gather=2, scatter=1)

    return run


def parts(kernel: Kernel, *, axes: tuple[str, ...], device_kind: str) -> Callable:
    """Attention in a manual region of whole queries to keys that are split over `axes`, as in
    decoding: each device's part is weighed by its log-sum-exp. Communicates sums of results.
    """

    def attend(query_BTNH, key_BSKH, value_BSKH, mask: Mask, scores: Scores):
        out, lse = kernel.forward(
            query_BTNH, key_BSKH, value_BSKH, mask, scores, device_kind=device_kind
        )
        weight = jnp.exp(lse - jax.lax.pmax(lse, axes))
        share = weight / jax.lax.psum(weight, axes)
        out = jax.lax.psum(share.swapaxes(1, 2)[..., None] * out, axes)
        return out.astype(query_BTNH.dtype)

    return attend


def attention_over(
    kernel: Kernel, *, axis: str, split: Split, device_kind: str, apart: bool = False
) -> Callable[[Array, Array, Array, Mask, Scores], Array]:
    """Attention of one kernel over positions split as `split` says: in a manual region."""
    if split.rings == 1:
        attend = functools.partial(kernel, device_kind=device_kind)
    else:
        attend = ring.ring(kernel, axis=axis, split=split, device_kind=device_kind, apart=apart)
    return ulysses(attend, axis=axis, split=split)

"""Attention as it is defined: all scores at once. Every other kernel is compared with it.

Letters: B batch, T query positions, S key/value positions, N query heads, K key/value heads,
G = N/K, H head size.
"""

import jax
import jax.numpy as jnp

from llmx.model.attention.kernel import Kernel
from llmx.model.attention.masks import Mask, Scores


def _forward(query_BTNH, key_BSKH, value_BSKH, mask: Mask, scores: Scores, *, device_kind: str):
    """All scores in fp32, then the softmax (arXiv 1706.03762)."""
    B, T, N, H = query_BTNH.shape
    K = key_BSKH.shape[2]
    query_BTKGH = query_BTNH.reshape(B, T, K, N // K, H)
    scores_BKGTS = scores.capped(
        jnp.einsum("BTKGH,BSKH->BKGTS", query_BTKGH, key_BSKH, preferred_element_type=jnp.float32)
    )
    visible_B11TS = mask.visible(scores.window)[:, None, None]
    # A finite floor: a row that sees nothing (an empty cache slot) stays finite.
    scores_BKGTS = jnp.where(visible_B11TS, scores_BKGTS, jnp.finfo(jnp.float32).min)
    weights_BKGTS = jax.nn.softmax(scores_BKGTS, axis=-1).astype(value_BSKH.dtype)
    out_BTKGH = jnp.einsum("BKGTS,BSKH->BTKGH", weights_BKGTS, value_BSKH)
    lse_BKGT = jax.nn.logsumexp(scores_BKGTS, axis=-1)
    return out_BTKGH.reshape(B, T, N, -1), lse_BKGT.reshape(B, N, T)


REFERENCE = Kernel(_forward)

"""Attention sinks: a logit of each query that joins the softmax, of a key whose value is zero.

A query whose keys do not matter can so attend to nothing (gpt-oss, arXiv 2508.10925; arXiv
2309.17453). Kernels know nothing of it: a sink is one more part of a row's keys, and parts are
joined by their log-sum-exps. In the backward pass a kernel is given those of the whole row.

Letters: B batch, T query positions, N query heads, H head size.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def joined(
    out_BTNH: Float[Array, "B T N H"], lse_BNT: Float[Array, "B N T"],
    sinks_BTN: Float[Array, "B T N"] | None,
) -> tuple[Array, Array]:  # fmt: skip
    """The result of attention, and its log-sum-exp, with the sinks; None = there are none."""
    if sinks_BTN is None:
        return out_BTNH, lse_BNT
    share_BTN1 = jax.nn.sigmoid(lse_BNT.swapaxes(1, 2) - sinks_BTN)[..., None]
    out = (out_BTNH * share_BTN1).astype(out_BTNH.dtype)
    return out, jnp.logaddexp(lse_BNT, sinks_BTN.swapaxes(1, 2))


def gradient(
    sinks_BTN: Array | None, out_BTNH: Array, lse_BNT: Array, gradient_BTNH: Array
) -> Array | None:
    """Of the sinks, by `out` and `lse` that they have joined, and the gradient by `out`."""
    if sinks_BTN is None:
        return None
    delta_BTN = jnp.sum(out_BTNH.astype(jnp.float32) * gradient_BTNH, axis=-1)
    return -jnp.exp(sinks_BTN - lse_BNT.swapaxes(1, 2)) * delta_BTN

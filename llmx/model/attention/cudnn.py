"""GPU attention by cuDNN's fused kernel: causal masks and windows, no documents, no soft cap.

Sources: flash attention (arXiv 2205.14135, 2307.08691); docs.nvidia.com/deeplearning/cudnn.

Letters: B batch, T query positions, S key/value positions, N query heads, K key/value heads, H head
size.
"""

import inspect

import jax.numpy as jnp

from llmx.model.attention.kernel import of_one_width
from llmx.model.attention.masks import Mask, Scores


def refusal(
    dtype: jnp.dtype, head_dim: int, *, softcap: float, one_document: bool, device_kind: str
) -> str:
    """Why the kernel does not take rows of tokens in order, by what is known before there are
    arrays; "" = it does."""
    if not device_kind.startswith("NVIDIA"):
        return f"cuDNN runs on NVIDIA GPUs, not on {device_kind!r}"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN takes bf16 and fp16, not {dtype}"
    if softcap:
        return "cuDNN has no soft cap of scores"
    if not one_document:
        return "cuDNN does not tell packed documents apart: set data.pack=False"
    if head_dim % 8 or head_dim > 128:
        return f"head_dim={head_dim} is not a multiple of 8 up to 128"
    return ""


def _choices(query_BTNH, key_BSKH, mask: Mask, scores: Scores, device_kind: str):
    """jax's module and the kernel's static arguments; NotImplementedError for other inputs."""
    import jax._src.cudnn.fused_attention_stablehlo as fused

    T = query_BTNH.shape[1]
    if why_not := refusal(
        query_BTNH.dtype, query_BTNH.shape[-1], softcap=scores.softcap,
        one_document=mask.one_document, device_kind=device_kind,
    ):  # fmt: skip
        raise NotImplementedError(why_not)
    if mask.ahead is None:
        raise NotImplementedError("cuDNN takes rows of tokens in order only")
    kind, window = fused.MaskType.CAUSAL, None
    if mask.sees_all(scores.window):
        kind = fused.MaskType.NO_MASK
    elif mask.ahead or mask.num_keys != T:
        raise NotImplementedError("cuDNN's masks start at the first key")
    elif scores.window and scores.window < T:
        window = scores.window
    return fused, dict(scale=scores.scale, mask_type=kind, sliding_window_length=window)


def _forward(query_BTNH, key_BSKH, value_BSKH, mask: Mask, scores: Scores, *, device_kind: str):
    fused, chosen = _choices(query_BTNH, key_BSKH, mask, scores, device_kind)
    # The public function rounds the log-sum-exp to bf16, and its gradient ignores the one given.
    out, lse_BNT = fused.dot_product_attention(
        query_BTNH, key_BSKH, value_BSKH, return_residual=True, **chosen
    )
    return out, lse_BNT.astype(jnp.float32)


def _backward(
    query_BTNH, key_BSKH, value_BSKH, mask: Mask, scores: Scores, out_BTNH, lse_BNT, gradient_BTNH,
    *, device_kind: str,
):  # fmt: skip
    fused, chosen = _choices(query_BTNH, key_BSKH, mask, scores, device_kind)
    dtype = query_BTNH.dtype
    none = jnp.zeros((0,), dtype)
    # A parameter that newer versions of jax have.
    parameters = inspect.signature(fused._dot_product_attention_bwd_impl).parameters
    newer = {"score_mod": None} if "score_mod" in parameters else {}
    gradients = fused._dot_product_attention_bwd_p_wrapper.bind(
        query_BTNH, key_BSKH, value_BSKH, *(none,) * 7, lse_BNT, out_BTNH.astype(dtype),
        gradient_BTNH.astype(dtype), seed=42, dropout_rate=0.0, variadic_args=(False, False),
        layout=fused.AttentionLayout.BTNH.value, **newer, **chosen,
    )  # fmt: skip
    return tuple(gradients)


CUDNN = of_one_width(_forward, _backward)

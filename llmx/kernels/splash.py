"""TPU attention by jax's Pallas "splash" kernel: scores live in on-chip memory a block at a time.

Blocks that the causal mask or the window rules out are skipped. One key/value head and its G query
heads are one call, so keys and values are never repeated.

Sources: flash attention (arXiv 2205.14135, 2307.08691);
jax.experimental.pallas.ops.tpu.splash_attention.

Letters: B batch, T positions, N query heads, K key/value heads, G = N/K, H head size.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

LANES = 128  # a block's rows, and a head's size, are multiples of it


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Rows of a block: queries, keys fetched, keys per product; forward and backward pass."""

    query: int
    key: int
    key_compute: int
    query_backward: int
    key_backward: int
    key_backward_compute: int


# By jax's `device_kind`. Larger blocks fetch less and need more on-chip memory, of which a kernel
# gets 16 MiB (v4, v5e, v5p) or 32 MiB (v6e, 7x) by default; tests/test_splash.py compiles each. The
# gradient of queries is written once per backward block of keys: few of them save memory.
_16_MIB = Blocks(512, 1024, 512, 512, 2048, 512)
_32_MIB = Blocks(2048, 2048, 1024, 1024, 2048, 1024)
BLOCKS = {"TPU v6 lite": _32_MIB, "TPU v6e": _32_MIB, "TPU7x": _32_MIB}
OTHER_BLOCKS = _16_MIB


def splash(
    query_BTNH: Float[Array, "B T N H"],
    key_BTKH: Float[Array, "B T K H"],
    value_BTKH: Float[Array, "B T K H"],
    segments_BT: Int[Array, "B T"],
    *,
    scale: float,
    softcap: float,
    window: int,
    device_kind: str,
    residual_name: str,
) -> Float[Array, "B T N H"]:
    """Causal attention within segments, rows in order; differentiable.

    Args:
      segments_BT: a query sees keys of its own segment.
      scale: of q.k, applied to q in fp32.
      softcap: c tanh(score / c), 0 = off.
      window: positions back including itself, 0 = all.
      device_kind: chooses the blocks; "cpu" runs the kernel's interpreter, for tests.
      residual_name: `checkpoint_name` of the output and log-sum-exp that the backward pass takes.

    Raises NotImplementedError where T is not a multiple of 128.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as kernels,
    )
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    B, T, N, H = query_BTNH.shape
    K = key_BTKH.shape[2]
    if T % LANES:
        raise NotImplementedError(f"T={T} is not a multiple of {LANES}")
    blocks = BLOCKS.get(device_kind, OTHER_BLOCKS)
    visible = masks.LocalMask((T, T), (window - 1, 0), 0) if window else masks.CausalMask((T, T))
    kernel = kernels.make_splash_mqa_single_device(
        masks.MultiHeadMask([visible] * (N // K)),
        block_sizes=_block_sizes(kernels.BlockSizes, blocks, T, H),
        attn_logits_soft_cap=softcap or None,
        residual_checkpoint_name=residual_name,
        interpret=device_kind == "cpu",
    )

    def one_row(query_KGTH, key_KTH, value_KTH, segments_T):
        segments = kernels.SegmentIds(segments_T, segments_T)
        one_head = lambda q, k, v: kernel(q, k, v, segment_ids=segments)  # noqa: E731
        return jax.vmap(one_head)(query_KGTH, key_KTH, value_KTH)

    query_BTNH = (query_BTNH.astype(jnp.float32) * scale).astype(query_BTNH.dtype)
    query_BTKGH = _whole_lanes(query_BTNH).reshape(B, T, K, N // K, -1)
    out_BKGTH = jax.vmap(one_row)(
        query_BTKGH.transpose(0, 2, 3, 1, 4),
        _whole_lanes(key_BTKH).swapaxes(1, 2),
        _whole_lanes(value_BTKH).swapaxes(1, 2),
        segments_BT,
    )
    return out_BKGTH.transpose(0, 3, 1, 2, 4).reshape(B, T, N, -1)[..., :H]


def _whole_lanes(array: Array) -> Array:
    """Heads padded with zeros to a multiple of 128: they add nothing to scores or values."""
    pad = -array.shape[-1] % LANES
    return jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, pad)]) if pad else array


def _block_sizes(make, blocks: Blocks, num_rows: int, head_dim: int):
    """The chip's blocks, smaller for larger heads, cut down to divisors of the rows."""
    wide = -(-head_dim // LANES)

    def fit(size: int) -> int:
        most = max(LANES, min(size // wide, num_rows))
        return max(rows for rows in range(LANES, most + 1, LANES) if num_rows % rows == 0)

    key, key_backward = fit(blocks.key), fit(blocks.key_backward)
    return make(
        block_q=fit(blocks.query),
        block_kv=key,
        block_kv_compute=min(key, fit(blocks.key_compute)),
        block_q_dkv=fit(blocks.query_backward),
        block_kv_dkv=key_backward,
        block_kv_dkv_compute=min(key_backward, fit(blocks.key_backward_compute)),
        use_fused_bwd_kernel=True,
    )

"""TPU attention by jax's Pallas "splash" kernel: scores live in on-chip memory a block at a time.

Blocks that order or window rule out are skipped. One key/value head and its G query heads are one
call: keys and values are not repeated.

Sources: flash attention (arXiv 2205.14135, 2307.08691);
jax.experimental.pallas.ops.tpu.splash_attention.

Letters: B batch, T query positions, S key/value positions, N query heads, K key/value heads,
G = N/K, H head size.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array

from llmx.model.attention.kernel import Kernel, heads_first, heads_last
from llmx.model.attention.masks import Mask, Scores

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


# By jax's `device_kind`. Larger blocks fetch less and need more of the on-chip memory: 16 MiB (v4,
# v5e, v5p) or 32 MiB (v6e, 7x). Queries' gradients are written once per backward block of keys.
OTHER_BLOCKS = Blocks(512, 1024, 512, 512, 2048, 512)
_32_MIB = Blocks(2048, 2048, 1024, 1024, 2048, 1024)
BLOCKS = {"TPU v6 lite": _32_MIB, "TPU v6e": _32_MIB, "TPU7x": _32_MIB}
MOST_BLOCKS = 4  # of keys, in one call of the backward kernel


def _refuse(mask: Mask, device_kind: str) -> None:
    """Raises NotImplementedError for inputs that neither pass supports."""
    T, S = mask.segments_BT.shape[1], mask.num_keys
    if not device_kind.startswith(("TPU", "cpu")):
        raise NotImplementedError(f"the splash kernel runs on TPUs, not on {device_kind!r}")
    if mask.ahead is None:
        raise NotImplementedError("the splash kernel takes rows of tokens in order only")
    if not (fits_lanes(T) and fits_lanes(S)):
        raise NotImplementedError(f"{T} queries and {S} keys are not multiples of {LANES}")


def _jax_modules():
    """jax's kernels and masks; imported late, as they import Pallas for TPU."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    return kernels, masks


def _kernel(mask: Mask, scores: Scores, query_BTNH, num_kv_heads: int, device_kind: str):
    """jax's kernel for one key/value head and its group of query heads."""
    group, width = query_BTNH.shape[2] // num_kv_heads, _width_of(query_BTNH)
    kernels, masks = _jax_modules()
    shape = (mask.segments_BT.shape[1], mask.num_keys)
    if mask.sees_all(scores.window):
        visible = masks.FullMask(shape)
    elif scores.window:
        visible = masks.LocalMask(shape, (scores.window - 1, 0), mask.ahead)
    else:
        visible = masks.CausalMask(shape, mask.ahead)
    blocks = BLOCKS.get(device_kind, OTHER_BLOCKS)
    return kernels.make_splash_mqa_single_device(
        masks.MultiHeadMask([visible] * group),
        block_sizes=_block_sizes(kernels.BlockSizes, blocks, shape, width),
        attn_logits_soft_cap=scores.softcap or None, save_residuals=True,
        interpret=device_kind == "cpu",
    )  # fmt: skip


def _per_head(function, arrays, mask: Mask):
    """`function(*arrays, segments)` over batch and key/value heads, the first two dimensions.

    Segments are None where rows are one document: the kernel then reads none.
    """
    rows = (mask.segments_BT, mask.key_segments_BS)
    segments = None if mask.one_document else _jax_modules()[0].SegmentIds(*rows)
    over_heads = jax.vmap(function, in_axes=(*(0 for _ in arrays), None))
    return jax.vmap(over_heads)(*arrays, segments)


def _forward(query_BTNH, key_BSKH, value_BSKH, mask: Mask, scores: Scores, *, device_kind: str):
    """Rows in order; "cpu" runs the kernel's interpreter, for tests."""
    _refuse(mask, device_kind)
    B, T, N, _ = query_BTNH.shape
    K = key_BSKH.shape[2]
    kernel = _kernel(mask, scores, query_BTNH, K, device_kind)
    out_BKGTH, (lse_BKGT,) = _per_head(
        lambda query, key, value, segments: kernel(query, key, value, segment_ids=segments),
        _by_head(query_BTNH, key_BSKH, value_BSKH, scores), mask,
    )  # fmt: skip
    # A query that sees nothing of these keys has -inf here if none of its blocks was visited.
    lse_BNT = jnp.maximum(lse_BKGT.reshape(B, N, T), jnp.finfo(jnp.float32).min)
    return heads_last(out_BKGTH)[..., : value_BSKH.shape[-1]], lse_BNT


def _backward(
    query_BTNH, key_BSKH, value_BSKH, mask: Mask, scores: Scores, out_BTNH, lse_BNT, gradient_BTNH,
    *, device_kind: str,
):  # fmt: skip
    """A slice of keys at a time: the kernel writes a gradient of queries for each block of them."""
    _refuse(mask, device_kind)
    T, S = query_BTNH.shape[1], key_BSKH.shape[1]
    size = _slice_of_keys(S, _width_of(query_BTNH), device_kind)
    whole = functools.partial(_slice_backward, scores=scores, device_kind=device_kind)
    rows = (query_BTNH, out_BTNH, lse_BNT, gradient_BTNH)
    if size == S:
        return whole(*rows, key_BSKH, value_BSKH, mask)
    query_gradient = jnp.zeros(query_BTNH.shape, jnp.float32)
    if mask.sees_all(scores.window):
        # All queries see every slice: one kernel in a loop, its mask that of all keys.
        def one(query_gradient, first):
            take = lambda array: jax.lax.dynamic_slice_in_dim(array, first, size, 1)  # noqa: E731
            segments = take(mask.key_segments_BS)
            part = dataclasses.replace(mask, key_segments_BS=segments, key_positions_BS=None)
            gradients = whole(*rows, take(key_BSKH), take(value_BSKH), part)
            return query_gradient + gradients[0], gradients[1:]

        query_gradient, others = jax.lax.scan(one, query_gradient, jnp.arange(0, S, size))
        rows = lambda array: (*key_BSKH.shape[:-1], array.shape[-1])  # noqa: E731
        joined = lambda array: array.swapaxes(0, 1).reshape(rows(array))  # noqa: E731
        return query_gradient, *map(joined, others)
    others = []
    for first in range(0, S, size):
        keys = slice(first, first + size)
        # The queries that see any of them, in whole lanes.
        low = max(0, first - mask.ahead) // LANES * LANES
        high = first + size - 1 + scores.window - mask.ahead if scores.window else T
        seeing = slice(low, min(T, -(-high // LANES) * LANES))
        if seeing.start >= seeing.stop:
            others.append([jnp.zeros_like(array[:, keys]) for array in (key_BSKH, value_BSKH)])
            continue
        part = Mask(
            mask.segments_BT[:, seeing], None, mask.key_segments_BS[:, keys], None,
            ahead=mask.ahead + seeing.start - first, one_document=mask.one_document,
        )  # fmt: skip
        gradients = whole(
            query_BTNH[:, seeing], out_BTNH[:, seeing], lse_BNT[:, :, seeing],
            gradient_BTNH[:, seeing], key_BSKH[:, keys], value_BSKH[:, keys], part,
        )  # fmt: skip
        query_gradient = jax.lax.dynamic_update_slice_in_dim(
            query_gradient, query_gradient[:, seeing] + gradients[0], seeing.start, axis=1
        )
        others.append(gradients[1:])
    return query_gradient, *(jnp.concatenate(parts, axis=1) for parts in zip(*others, strict=True))


def _width_of(query_BTNH: Array) -> int:
    return _row_width(query_BTNH.shape[3], query_BTNH.dtype.itemsize)


def _row_width(head_dim: int, itemsize: int) -> int:
    """Bytes of a head's row, in those of 128 numbers of 16 bits."""
    return -(-head_dim // LANES) * max(1, itemsize // 2)


def _slice_of_keys(num_keys: int, row_width: int, device_kind: str) -> int:
    """Keys of one call of the backward kernel: a divisor of them, of few blocks."""
    blocks = BLOCKS.get(device_kind, OTHER_BLOCKS)
    most = MOST_BLOCKS * max(LANES, blocks.key_backward // row_width)
    return max(n for n in range(LANES, min(num_keys, most) + 1, LANES) if num_keys % n == 0)


def fits_lanes(num_rows: int) -> bool:
    """Whether the kernel takes so many queries or keys."""
    return num_rows % LANES == 0


def num_slices(num_keys: int, head_dim: int, itemsize: int) -> int:
    """Calls of the backward kernel, each of a slice of the keys that it takes."""
    return num_keys // _slice_of_keys(num_keys, _row_width(head_dim, itemsize), "")


def num_query_gradients(num_keys: int, head_dim: int, itemsize: int) -> int:
    """Gradients of all queries that such a call writes, one for each block of its keys, with
    `OTHER_BLOCKS`. For most lengths those in `BLOCKS` are as many, for others (3,072) not."""
    row_width = _row_width(head_dim, itemsize)
    size = _slice_of_keys(num_keys, row_width, "")
    compute = _fitting(OTHER_BLOCKS.key_backward_compute, size, LANES, row_width)
    return size // _fitting(OTHER_BLOCKS.key_backward, size, compute, row_width)


def _slice_backward(
    query_BTNH, out_BTNH, lse_BNT, gradient_BTNH, key_BSKH, value_BSKH, mask: Mask,
    *, scores: Scores, device_kind: str,
):  # fmt: skip
    kernels, _ = _jax_modules()
    B, T, N, H = query_BTNH.shape
    K, dtype = key_BSKH.shape[2], query_BTNH.dtype
    kernel = _kernel(mask, scores, query_BTNH, K, device_kind)
    static = kernel.kwargs

    def one_head(query, key, value, out, lse, gradient, segments):
        # The kernel's own backward pass, of any log-sum-exp: jax has no public name for it.
        masks = (kernel.dq_mask_info, kernel.dkv_mask_info)
        residuals = (query, key, value, segments, None, out, lse, *masks)
        gradients = kernels._splash_attention_bwd(
            False, static["mask_value"], True, static["block_sizes"], None, static["mask_function"],
            static["attn_logits_soft_cap"], static["interpret"], residuals, gradient,
        )  # fmt: skip
        return gradients[3:6]

    arrays = (
        *_by_head(query_BTNH, key_BSKH, value_BSKH, scores),
        _grouped(out_BTNH.astype(dtype), K), lse_BNT.reshape(B, K, N // K, T),
        _grouped(gradient_BTNH.astype(dtype), K),
    )  # fmt: skip
    query_gradient, *others = _per_head(one_head, arrays, mask)
    query_gradient = heads_last(query_gradient)[..., :H].astype(jnp.float32) * scores.scale
    widths = (H, value_BSKH.shape[-1])
    pairs = zip(others, widths, strict=True)
    return query_gradient, *(array.swapaxes(1, 2)[..., :width] for array, width in pairs)


SPLASH = Kernel(_forward, _backward)


def _by_head(query_BTNH, key_BSKH, value_BSKH, scores: Scores) -> tuple[Array, Array, Array]:
    """Scaled queries [B, K, G, T, H], keys and values [B, K, S, H], in whole lanes."""
    query_BTNH = (query_BTNH.astype(jnp.float32) * scores.scale).astype(query_BTNH.dtype)
    query_BKGTH = _grouped(query_BTNH, key_BSKH.shape[2])
    return query_BKGTH, *(_whole_lanes(a).swapaxes(1, 2) for a in (key_BSKH, value_BSKH))


def _grouped(array_BTNH: Array, num_kv_heads: int) -> Array:
    return heads_first(_whole_lanes(array_BTNH), num_kv_heads)


def _whole_lanes(array: Array) -> Array:
    """Heads padded with zeros to a multiple of 128: they add nothing to scores or values."""
    pad = -array.shape[-1] % LANES
    return jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, pad)]) if pad else array


def _fitting(size: int, num_rows: int, step: int, row_width: int) -> int:
    """Rows of a block of at most `size` rows of one width: a divisor, and a multiple of `step`."""
    most = max(step, min(size // row_width, num_rows))
    return max(rows for rows in range(step, most + 1, step) if num_rows % rows == 0)


def _block_sizes(make, blocks: Blocks, shape: tuple[int, int], row_width: int):
    """The chip's blocks, smaller for wider rows, cut down to divisors of queries and keys."""
    num_queries, num_keys = shape

    def fit(size: int, num_rows: int, step: int = LANES) -> int:
        return _fitting(size, num_rows, step, row_width)

    # Keys are fetched in whole blocks of a product.
    compute = fit(blocks.key_compute, num_keys)
    compute_backward = fit(blocks.key_backward_compute, num_keys)
    return make(
        block_q=fit(blocks.query, num_queries),
        block_kv=fit(blocks.key, num_keys, compute), block_kv_compute=compute,
        block_q_dkv=fit(blocks.query_backward, num_queries),
        block_kv_dkv=fit(blocks.key_backward, num_keys, compute_backward),
        block_kv_dkv_compute=compute_backward,
        use_fused_bwd_kernel=True,
    )  # fmt: skip

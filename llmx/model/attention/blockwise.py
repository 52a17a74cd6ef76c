"""Attention in blocks, in plain JAX: memory grows with T + S and not with T x S, on any device.

A loop goes over pairs of a query block and a key block, without those that order, window or
documents rule out. The scores of one pair exist at a time; the backward pass computes them again.

Sources: online softmax (arXiv 1805.02867), blockwise attention (arXiv 2112.05682), flash attention
(arXiv 2205.14135).

Letters: B batch, T query positions, S key/value positions, N query heads, K key/value heads,
G = N/K, H head size; in blocks: q, k their numbers.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from llmx.model.attention.kernel import NOTHING, Kernel, heads_first, heads_last
from llmx.model.attention.masks import Mask, Scores, visible

ROWS = 512  # queries of a block at most
PAIRS = 512 * 512  # scores of a block and head at most
HIDDEN = -1e38  # below every score and every log-sum-exp that counts
NO_QUERY, NO_KEY = -(2**31), -(2**31) + 1  # segments of padding

_product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """How queries and keys are cut into blocks, and the pairs of blocks with visible scores."""

    num_queries: int
    num_keys: int
    query: int  # rows of a block
    key: int
    pairs: np.ndarray  # int32 [pairs, 2]

    @classmethod
    def of(cls, mask: Mask, window: int) -> "_Blocks":
        T, S = mask.segments_BT.shape[1], mask.num_keys
        num_q = -(-T // ROWS)
        query = -(-T // num_q)
        num_k = -(-S // max(ROWS, PAIRS // query))
        key = -(-S // num_k)
        i, j = np.mgrid[:num_q, :num_k].reshape(2, -1)
        if mask.ahead is not None:
            first, last = mask.ahead + i * query, mask.ahead + np.minimum((i + 1) * query, T) - 1
            key_first, key_last = j * key, np.minimum((j + 1) * key, S) - 1
            meets = key_first <= last
            if window:
                meets &= first - key_last < window
            i, j = i[meets], j[meets]
        return cls(num_q, num_k, query, key, np.stack([i, j], axis=1).astype(np.int32))

    def queries(self, array, axis: int = 1, fill=0):
        """`array` with `axis` cut into blocks, which become its first dimension."""
        return _cut(array, self.num_queries, self.query, axis, fill)

    def keys(self, array, axis: int = 1, fill=0):
        return _cut(array, self.num_keys, self.key, axis, fill)

    def key_heads(self, array_BSKH):
        return self.keys(array_BSKH.swapaxes(1, 2), axis=2)


def num_scores(length: int, window: int = 0) -> int:
    """Scores that are computed of a causal document and head; `window`: 0 = all before."""
    rows = np.zeros((1, length), np.int32)
    blocks = _Blocks.of(Mask(rows, None, rows, None, ahead=0), window)
    return len(blocks.pairs) * blocks.query * blocks.key


def _cut(array, num: int, size: int, axis: int, fill):
    pad = [(0, 0)] * array.ndim
    pad[axis] = (0, num * size - array.shape[axis])
    array = jnp.pad(array, pad, constant_values=fill)
    shape = (*array.shape[:axis], num, size, *array.shape[axis + 1 :])
    return jnp.moveaxis(array.reshape(shape), axis, 0)


def _joined(blocks, axis: int, size: int):
    """The inverse of `_cut`."""
    array = jnp.moveaxis(blocks, 0, axis)
    shape = (*array.shape[:axis], -1, *array.shape[axis + 2 :])
    return jax.lax.slice_in_dim(array.reshape(shape), 0, size, axis=axis)


def _visible_blocks(blocks: _Blocks, mask: Mask, window: int):
    """(i, j) -> bool[B, query, key] of a pair of blocks."""
    positions, key_positions = mask.positions
    of_queries = blocks.queries(mask.segments_BT, fill=NO_QUERY), blocks.queries(positions)
    of_keys = blocks.keys(mask.key_segments_BS, fill=NO_KEY), blocks.keys(key_positions)

    def at(i, j):
        return visible(of_queries[0][i], of_keys[0][j], of_queries[1][i], of_keys[1][j], window)

    return at


def _scores(query_BKGTH, key_BKSH, visible_BTS, scores: Scores):
    """fp32 scores, `HIDDEN` where they are not seen."""
    scores_BKGTS = scores.capped(_product("BKGTH,BKSH->BKGTS", query_BKGTH, key_BKSH))
    return jnp.where(visible_BTS[:, None, None], scores_BKGTS, HIDDEN)


def _walk(blocks: _Blocks, at, step, carry):
    """`step(carry, i, j, visible)` for each pair of blocks in which some query sees some key."""

    def one(carry, pair):
        i, j = pair
        visible_BTS = at(i, j)
        work = functools.partial(step, i=i, j=j, visible_BTS=visible_BTS)
        return jax.lax.cond(visible_BTS.any(), work, lambda carry: carry, carry), None

    if len(blocks.pairs) == 1:
        return step(carry, 0, 0, at(0, 0))
    return jax.lax.scan(one, carry, blocks.pairs)[0]


def _forward(query_BTNH, key_BSKH, value_BSKH, mask: Mask, scores: Scores, *, device_kind: str):
    B, T, N, _ = query_BTNH.shape
    blocks = _Blocks.of(mask, scores.window)
    query_qBKGTH = blocks.queries(heads_first(query_BTNH, key_BSKH.shape[2]), axis=3)
    key_kBKSH, value_kBKSH = blocks.key_heads(key_BSKH), blocks.key_heads(value_BSKH)

    def step(carry, i, j, visible_BTS):
        out, top, total = carry
        scores_BKGTS = _scores(query_qBKGTH[i], key_kBKSH[j], visible_BTS, scores)
        new_top = jnp.maximum(top[i], scores_BKGTS.max(axis=-1))
        weights_BKGTS = jnp.exp(scores_BKGTS - new_top[..., None])
        shrink = jnp.exp(top[i] - new_top)
        new_out = out[i] * shrink[..., None] + _product(
            "BKGTS,BKSH->BKGTH", weights_BKGTS.astype(value_BSKH.dtype), value_kBKSH[j]
        )
        new_total = total[i] * shrink + weights_BKGTS.sum(axis=-1)
        return out.at[i].set(new_out), top.at[i].set(new_top), total.at[i].set(new_total)

    # The running maximum starts above what is hidden: a hidden score weighs nothing from the start.
    start = jnp.zeros((*query_qBKGTH.shape[:-1], value_BSKH.shape[-1]), jnp.float32)
    carry = (start, jnp.full(start.shape[:-1], NOTHING), jnp.zeros(start.shape[:-1]))
    out, top, total = _walk(blocks, _visible_blocks(blocks, mask, scores.window), step, carry)
    out = out / jnp.where(total > 0, total, 1)[..., None]
    lse = jnp.where(total > 0, top + jnp.log(jnp.where(total > 0, total, 1)), NOTHING)
    lse_BNT = _joined(lse, 3, T).reshape(B, N, T)
    return heads_last(_joined(out, 3, T)).astype(query_BTNH.dtype), lse_BNT


def _backward(
    query_BTNH, key_BSKH, value_BSKH, mask: Mask, scores: Scores, out_BTNH, lse_BNT, gradient_BTNH,
    *, device_kind: str,
):  # fmt: skip
    B, T, N, _ = query_BTNH.shape
    S, K = key_BSKH.shape[1:3]
    dtype = query_BTNH.dtype
    blocks = _Blocks.of(mask, scores.window)
    delta_BTN = _product("BTNH,BTNH->BTN", out_BTNH, gradient_BTNH)
    rows = lambda array: blocks.queries(array.reshape(B, K, N // K, T), axis=3)  # noqa: E731
    delta_qBKGT, lse_qBKGT = rows(delta_BTN.swapaxes(1, 2)), rows(lse_BNT)
    query_qBKGTH = blocks.queries(heads_first(query_BTNH, K), axis=3)
    gradient_qBKGTH = blocks.queries(heads_first(gradient_BTNH.astype(dtype), K), axis=3)
    key_kBKSH, value_kBKSH = blocks.key_heads(key_BSKH), blocks.key_heads(value_BSKH)

    def step(carry, i, j, visible_BTS):
        query_gradient, key_gradient, value_gradient = carry
        query, key, gradient = query_qBKGTH[i], key_kBKSH[j], gradient_qBKGTH[i]
        scores_BKGTS = _scores(query, key, visible_BTS, scores)
        weights_BKGTS = jnp.exp(scores_BKGTS - lse_qBKGT[i][..., None])
        of_weights = _product("BKGTH,BKSH->BKGTS", gradient, value_kBKSH[j])
        of_scores = weights_BKGTS * (of_weights - delta_qBKGT[i][..., None])
        if scores.softcap:
            slope = 1 - jnp.square(scores_BKGTS / scores.softcap)
            of_scores = jnp.where(visible_BTS[:, None, None], of_scores * slope, 0)
        of_scores = (of_scores * scores.scale).astype(dtype)
        weights_BKGTS = weights_BKGTS.astype(dtype)
        return (
            query_gradient.at[i].add(_product("BKGTS,BKSH->BKGTH", of_scores, key)),
            key_gradient.at[j].add(_product("BKGTS,BKGTH->BKSH", of_scores, query)),
            value_gradient.at[j].add(_product("BKGTS,BKGTH->BKSH", weights_BKGTS, gradient)),
        )

    arrays = (query_qBKGTH, key_kBKSH, value_kBKSH)
    carry = tuple(jnp.zeros(array.shape, jnp.float32) for array in arrays)
    at = _visible_blocks(blocks, mask, scores.window)
    query_gradient, *others = _walk(blocks, at, step, carry)
    others = (_joined(array, 2, S).swapaxes(1, 2) for array in others)
    return heads_last(_joined(query_gradient, 3, T)), *others


BLOCKWISE = Kernel(_forward, _backward)

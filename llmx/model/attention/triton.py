"""GPU attention by a Pallas kernel through Triton: packed documents, any order of rows, soft caps.

Scores live on chip, a block at a time. Blocks of keys that order, window or documents hide from a
block of queries are neither read nor computed: rows of short documents cost less than one long
document. Blocks that are seen whole are computed without a mask. Key/value heads are not repeated.

Why not another's: cuDNN's form for packed rows needs Hopper and a bound on documents per row, and
runs on a GPU only; jax's own Pallas kernel has no grouped heads, no window and no log-sum-exp from
outside, and is deprecated; tokamax cannot be compiled for GPUs that are not here.

Sources: flash attention (arXiv 2205.14135, 2307.08691).

Letters: B batch, T query positions, S key/value positions, N query heads, K key/value heads,
G = N/K, H head size; Q, J numbers of blocks of queries and of keys.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from llmx.model.attention.kernel import NOTHING, of_one_width
from llmx.model.attention.masks import Mask, Scores

HIDDEN = -1e38  # below every score and every running maximum
LOG2_E = math.log2(math.e)  # exponentials are of base 2: GPUs have an instruction for it
LEAST_ROWS = 16  # of a block, and of a head's size: what tensor cores take
MOST_HEAD = 256


@dataclasses.dataclass(frozen=True)
class Tile:
    """Rows of a block of queries and of keys, and how the kernel runs them."""

    query: int
    key: int
    warps: int
    stages: int  # blocks on their way to shared memory, the one at work included

    def within(self, num_queries: int, num_keys: int) -> "Tile":
        """With blocks that are not larger than the rows need."""
        query, key = (
            max(LEAST_ROWS, min(block, _power_of_2(rows)))
            for block, rows in ((self.query, num_queries), (self.key, num_keys))
        )
        return dataclasses.replace(self, query=query, key=key)


@dataclasses.dataclass(frozen=True)
class Tiles:
    forward: Tile
    keys_gradient: Tile  # of keys and values: their accumulators stay in registers
    query_gradient: Tile


# By the head's size up to which they hold, for numbers of 2 bytes. A block has 227 KiB of shared
# memory on Hopper and Blackwell, 163 on A100, 99 on others, and 255 registers a thread: larger ones
# of these spill. No GPU was there to time them.
_HOPPER = {
    64: Tiles(Tile(128, 128, 8, 3), Tile(64, 128, 8, 2), Tile(128, 64, 8, 2)),
    128: Tiles(Tile(128, 128, 8, 2), Tile(64, 128, 8, 2), Tile(128, 64, 8, 2)),
    256: Tiles(Tile(128, 64, 8, 2), Tile(32, 64, 8, 2), Tile(64, 64, 8, 2)),
}
_BLACKWELL = {
    64: _HOPPER[64],
    128: Tiles(Tile(128, 64, 8, 3), Tile(64, 64, 8, 2), Tile(128, 64, 8, 2)),
    256: Tiles(Tile(128, 32, 8, 2), Tile(32, 32, 8, 2), Tile(64, 64, 8, 2)),
}
_A100 = {
    64: Tiles(Tile(128, 64, 8, 3), Tile(64, 64, 8, 2), Tile(128, 64, 8, 2)),
    128: Tiles(Tile(128, 64, 8, 2), Tile(64, 64, 8, 2), Tile(128, 32, 8, 2)),
    256: Tiles(Tile(64, 32, 8, 2), Tile(32, 32, 8, 2), Tile(32, 32, 4, 2)),
}
_OTHERS = {
    64: Tiles(Tile(64, 64, 4, 2), Tile(32, 64, 4, 2), Tile(64, 32, 4, 2)),
    128: Tiles(Tile(64, 32, 4, 2), Tile(32, 64, 8, 2), Tile(64, 32, 8, 2)),
    256: Tiles(Tile(32, 32, 4, 2), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
}
# By the beginning of jax's `device_kind`. On "cpu" the kernel is interpreted, for tests.
TILES = {
    **dict.fromkeys(("NVIDIA H", "NVIDIA GH"), _HOPPER),
    # Not GB10, which has the shared memory of a small GPU.
    **dict.fromkeys(("NVIDIA B", "NVIDIA GB2", "NVIDIA GB3"), _BLACKWELL),
    "NVIDIA A100": _A100, "NVIDIA": _OTHERS,
    "cpu": {MOST_HEAD: Tiles(Tile(32, 64, 4, 1), Tile(64, 32, 4, 1), Tile(32, 32, 4, 1))},
}  # fmt: skip


def _power_of_2(number: int) -> int:
    """The smallest one that is not below `number`."""
    return 1 << (number - 1).bit_length()


def tiles_of(device_kind: str, head_dim: int, itemsize: int) -> Tiles:
    """The device's blocks; half as many rows for numbers of four bytes."""
    table = next(tiles for kind, tiles in TILES.items() if device_kind.startswith(kind))
    tiles = next(tiles for most, tiles in table.items() if head_dim <= most)
    if itemsize <= 2 or device_kind == "cpu":
        return tiles
    halved = lambda tile: dataclasses.replace(  # noqa: E731
        tile, query=max(LEAST_ROWS, tile.query // 2), key=max(LEAST_ROWS, tile.key // 2)
    )
    return Tiles(*(halved(getattr(tiles, each.name)) for each in dataclasses.fields(Tiles)))


def _refuse(query_BTNH, mask: Mask, device_kind: str) -> None:
    """Raises NotImplementedError for inputs that neither pass supports."""
    H = query_BTNH.shape[-1]
    if not device_kind.startswith(("NVIDIA", "cpu")):
        raise NotImplementedError(f"the triton kernel runs on NVIDIA GPUs, not on {device_kind!r}")
    if mask.ahead is None:
        raise NotImplementedError("the triton kernel takes rows of tokens in order only")
    if H > MOST_HEAD:
        raise NotImplementedError(f"head_dim={H} is above {MOST_HEAD}")


# ------------------------------------------------------------------- which blocks see each other


@dataclasses.dataclass(frozen=True)
class _Facts:
    """What the kernels know before they run."""

    tile: Tile
    ahead: int
    num_keys: int
    group: int
    head_dim: int
    scores: Scores
    ordered: bool  # whether order hides any key
    documents: bool  # whether segments are compared
    dtype: np.dtype

    @classmethod
    def of(cls, tile: Tile, query_BTNH, key_BSKH, mask: Mask, scores: Scores) -> "_Facts":
        (T, N, H), (S, K) = query_BTNH.shape[1:], key_BSKH.shape[1:3]
        window = scores.window if scores.window < mask.ahead + T else 0
        return cls(
            tile.within(T, S), mask.ahead, S, N // K, H, dataclasses.replace(scores, window=window),
            ordered=mask.ahead < S - 1, documents=not mask.one_document, dtype=query_BTNH.dtype,
        )  # fmt: skip

    @property
    def padded_head(self) -> int:
        return max(LEAST_ROWS, _power_of_2(self.head_dim))

    @property
    def padded_keys(self) -> bool:
        return self.num_keys % self.tile.key > 0

    @property
    def masks(self) -> bool:
        """Whether any query may not see a key of these rows."""
        return self.ordered or self.documents or self.padded_keys or self.scores.window > 0


def _pairs(facts: _Facts, mask: Mask):
    """bool[1 or B, Q, J] twice: some query of a block may see some key, and each sees each."""
    tile, window = facts.tile, facts.scores.window
    T, S = mask.segments_BT.shape[1], facts.num_keys
    i, j = np.mgrid[: -(-T // tile.query), : -(-S // tile.key)]
    first = mask.ahead + i * tile.query
    last = np.minimum(first + tile.query, mask.ahead + T) - 1
    key_first, key_last = j * tile.key, np.minimum((j + 1) * tile.key, S) - 1
    meets, whole = key_first <= last, (key_last <= first) & ((j + 1) * tile.key <= S)
    if window:
        meets, whole = meets & (first - key_last < window), whole & (last - key_first < window)
    if not facts.documents:
        return meets[None], whole[None]
    low, high = _ranges(mask.segments_BT, tile.query)
    key_low, key_high = _ranges(mask.key_segments_BS, tile.key)
    low, high, key_low, key_high = (
        low[..., None],
        high[..., None],
        key_low[:, None],
        key_high[:, None],
    )
    # Rows are packed in order, so the ranges of blocks of other documents hardly ever overlap.
    meets = meets & (low <= key_high) & (key_low <= high)
    return meets, whole & (low == high) & (key_low == key_high) & (low == key_low)


def _ranges(segments, block: int):
    """The lowest and highest segment of each block of rows, [B, blocks] each."""
    segments = _padded(segments, block, mode="edge")
    blocks = segments.reshape(segments.shape[0], -1, block)
    return blocks.min(axis=2), blocks.max(axis=2)


def _bounds(meets, whole):
    """int32[1 or B, Q, 4]: the first block of keys that a block of queries sees; the first and the
    one after the last of a run that it sees whole; the one after the last that it sees."""
    xp = np if isinstance(meets, np.ndarray) else jnp
    J = meets.shape[-1]
    first, end = xp.argmax(meets, axis=-1), J - xp.argmax(meets[..., ::-1], axis=-1)
    end = xp.where(meets.any(axis=-1), end, 0)
    first = xp.minimum(first, end)
    begin = xp.where(whole.any(axis=-1), xp.argmax(whole, axis=-1), end)
    after = ~whole & (xp.arange(J) >= begin[..., None])
    stop = xp.where(after.any(axis=-1), xp.argmax(after, axis=-1), J)
    stop = xp.maximum(begin, xp.minimum(stop, end))
    return xp.stack([first, begin, stop, end], axis=-1).astype(xp.int32)


def _padded(array, block: int, axis: int = 1, **mode):
    """`array` with `axis` in whole blocks."""
    pad = -array.shape[axis] % block
    if not pad:
        return array
    return jnp.pad(array, [(0, pad if each == axis else 0) for each in range(array.ndim)], **mode)


# ---------------------------------------------------------------------------------- the kernels


def _load(ref, index, facts: _Facts):
    """Rows of a head from memory, [rows, H up to a power of 2], zeros beyond the head's size."""
    from jax.experimental.pallas import triton as gpu

    padded = ref.shape[-1]
    if padded == facts.head_dim:
        return ref[index]
    return gpu.load(ref.at[index], mask=_in_head(padded, facts), other=0.0)


def _store(ref, array, facts: _Facts) -> None:
    from jax.experimental.pallas import triton as gpu

    array = array.astype(ref.dtype)
    if ref.shape[-1] == facts.head_dim:
        ref[...] = array
    else:
        gpu.store(ref, array, mask=_in_head(ref.shape[-1], facts))


def _in_head(padded: int, facts: _Facts):
    return (jnp.arange(padded) < facts.head_dim)[None, :]


def _dot(left, right, *, transposed: bool = False):
    """left x right, or left x right transposed, added up in fp32; of fp32, as XLA would."""
    from jax.experimental.pallas import triton as gpu

    tf32 = left.dtype == jnp.float32 and jax.config.jax_default_matmul_precision is None
    return gpu.dot(left, right, trans_b=transposed, allow_tf32=True if tf32 else None)


def _rows(index, block: int):
    from jax.experimental import pallas as pl

    return pl.ds(index * block, block)


def _scored(products, facts: _Facts):
    """Scores in units of log 2, and tanh of the soft cap, from products q.k."""
    scores = facts.scores
    if not scores.softcap:
        return products * (scores.scale * LOG2_E), None
    tanh = jnp.tanh(products * (scores.scale / scores.softcap))
    return tanh * (scores.softcap * LOG2_E), tanh


def _visible(facts: _Facts, i, j, segments, key_segments, *, keys_first: bool = False):
    """bool[query, key] of a pair of blocks, or [key, query]."""
    tile = facts.tile
    rows = facts.ahead + i * tile.query + jnp.arange(tile.query)
    keys = j * tile.key + jnp.arange(tile.key)
    of_rows, of_keys = (lambda a: a[:, None]), (lambda a: a[None, :])
    if keys_first:
        of_rows, of_keys = of_keys, of_rows
    back = of_rows(rows) - of_keys(keys)
    wanted = []
    if facts.ordered:
        wanted.append(back >= 0)
    if facts.scores.window:
        wanted.append(back < facts.scores.window)
    if facts.padded_keys:
        wanted.append(jnp.broadcast_to(of_keys(keys < facts.num_keys), back.shape))
    if facts.documents:
        wanted.append(of_rows(segments) == of_keys(key_segments))
    return functools.reduce(jnp.logical_and, wanted)


def _over_blocks(facts: _Facts, bounds, step, carry):
    """`step(j, carry, masked)` for the blocks between the bounds: masked, whole, masked."""
    first, begin, stop, end = (bounds[each] for each in range(4))
    masked = functools.partial(step, masked=True)
    if facts.masks:
        carry = jax.lax.fori_loop(first, begin, masked, carry)
    carry = jax.lax.fori_loop(begin, stop, functools.partial(step, masked=False), carry)
    return jax.lax.fori_loop(stop, end, masked, carry) if facts.masks else carry


def flash_forward(facts: _Facts, num_blocks: int, bounds, query_ref, key_ref, value_ref, *refs):
    """One block of queries of one head: all its keys. refs: segments, if documents; results."""
    from jax.experimental import pallas as pl

    *segments, out_ref, lse_ref = refs
    i = num_blocks - 1 - pl.program_id(0)
    query = _load(query_ref, slice(None), facts)
    rows = segments[0][...] if segments else None

    def step(j, carry, *, masked: bool):
        out, top, total = carry
        at = _rows(j, facts.tile.key)
        products = _dot(query, _load(key_ref, at, facts), transposed=True)
        scores, _ = _scored(products, facts)
        if masked:
            keys = segments[1][at] if segments else None
            scores = jnp.where(_visible(facts, i, j, rows, keys), scores, HIDDEN)
        new_top = jnp.maximum(top, scores.max(axis=1))
        weights, shrink = jnp.exp2(scores - new_top[:, None]), jnp.exp2(top - new_top)
        out = out * shrink[:, None]
        out += _dot(weights.astype(facts.dtype), _load(value_ref, at, facts))
        return out, new_top, total * shrink + weights.sum(axis=1)

    # The running maximum starts above what is hidden: a hidden score weighs nothing from the start.
    start = jnp.full(query.shape[:1], NOTHING * LOG2_E, jnp.float32)
    carry = (jnp.zeros(query.shape, jnp.float32), start, jnp.zeros(query.shape[:1], jnp.float32))
    out, top, total = _over_blocks(facts, bounds, step, carry)
    some = total > 0
    total = jnp.where(some, total, 1.0)
    _store(out_ref, out / total[:, None], facts)
    lse_ref[...] = jnp.where(some, top / LOG2_E + jnp.log(total), NOTHING)


def flash_dq(facts: _Facts, num_blocks: int, bounds, query_ref, key_ref, value_ref, *refs):
    """The gradient of one block of queries of one head."""
    from jax.experimental import pallas as pl

    gradient_ref, lse_ref, delta_ref, *segments, result_ref = refs
    i = num_blocks - 1 - pl.program_id(0)
    query, gradient = (_load(ref, slice(None), facts) for ref in (query_ref, gradient_ref))
    lse, delta = lse_ref[...][:, None], delta_ref[...][:, None]
    rows = segments[0][...] if segments else None

    def step(j, result, *, masked: bool):
        at = _rows(j, facts.tile.key)
        key = _load(key_ref, at, facts)
        scores, tanh = _scored(_dot(query, key, transposed=True), facts)
        weights = jnp.exp2(scores - lse)
        if masked:
            keys = segments[1][at] if segments else None
            weights = jnp.where(_visible(facts, i, j, rows, keys), weights, 0.0)
        of_weights = _dot(gradient, _load(value_ref, at, facts), transposed=True)
        of_scores = weights * (of_weights - delta)
        if tanh is not None:
            of_scores *= 1.0 - tanh * tanh
        return result + _dot(of_scores.astype(facts.dtype), key)

    result = _over_blocks(facts, bounds, step, jnp.zeros(query.shape, jnp.float32))
    _store(result_ref, result * facts.scores.scale, facts)


def flash_dkv(facts: _Facts, bounds, query_ref, key_ref, value_ref, *refs):
    """The gradients of one block of one key/value head: all queries of its group that see it.

    Scores are [key, query] here, so that both products with them take them as the left factor.
    """
    from jax.experimental import pallas as pl

    gradient_ref, lse_ref, delta_ref, *segments, of_key_ref, of_value_ref = refs
    j = pl.program_id(0)
    key, value = (_load(ref, slice(None), facts) for ref in (key_ref, value_ref))
    keys = segments[1][...] if segments else None

    def head(g, carry):
        def step(i, carry, *, masked: bool):
            of_key, of_value = carry
            at = _rows(i, facts.tile.query)
            query = _load(query_ref, (at, g, slice(None)), facts)
            scores, tanh = _scored(_dot(key, query, transposed=True), facts)
            weights = jnp.exp2(scores - lse_ref[g, at][None, :])
            if masked:
                rows = segments[0][at] if segments else None
                seen = _visible(facts, i, j, rows, keys, keys_first=True)
                weights = jnp.where(seen, weights, 0.0)
            gradient = _load(gradient_ref, (at, g, slice(None)), facts)
            of_value += _dot(weights.astype(facts.dtype), gradient)
            of_weights = _dot(value, gradient, transposed=True)
            of_scores = weights * (of_weights - delta_ref[g, at][None, :])
            if tanh is not None:
                of_scores *= 1.0 - tanh * tanh
            return of_key + _dot(of_scores.astype(facts.dtype), query), of_value

        return _over_blocks(facts, bounds, step, carry)

    zeros = jnp.zeros(key.shape, jnp.float32)
    of_key, of_value = jax.lax.fori_loop(0, facts.group, head, (zeros, zeros))
    _store(of_key_ref, of_key * facts.scores.scale, facts)
    _store(of_value_ref, of_value, facts)


# ------------------------------------------------------------------------------------ the calls


class _Specs(NamedTuple):
    """Which part of an array a program (block, b, head) gets; `head` of queries or of keys."""

    bounds: Any
    query: Any  # of [B, T, N, H]
    key: Any  # of [B, S, K, H]
    row: Any  # of [B, N, T]
    segments: list[Any]  # of queries and keys; empty if not compared

    @classmethod
    def by_query(cls, facts: _Facts, num_q: int, num_k: int) -> "_Specs":
        """A block of queries of one head, and the whole rows of its keys and values.

        The last block sees the most keys: it starts first.
        """
        from jax.experimental import pallas as pl

        query, keys, H = facts.tile.query, num_k * facts.tile.key, facts.padded_head
        last, group, every = num_q - 1, facts.group, int(facts.documents)
        return cls(
            pl.BlockSpec((None, None, 4), lambda i, b, h: (b * every, last - i, 0)),
            pl.BlockSpec((None, query, None, H), lambda i, b, h: (b, last - i, h, 0)),
            pl.BlockSpec((None, keys, None, H), lambda i, b, h: (b, 0, jax.lax.div(h, group), 0)),
            pl.BlockSpec((None, None, query), lambda i, b, h: (b, h, last - i)),
            [
                pl.BlockSpec((None, query), lambda i, b, h: (b, last - i)),
                pl.BlockSpec((None, keys), lambda i, b, h: (b, 0)),
            ][: 2 * every],
        )  # fmt: skip

    @classmethod
    def by_key(cls, facts: _Facts, num_q: int) -> "_Specs":
        """A block of keys of one head, and the whole rows of its group of queries."""
        from jax.experimental import pallas as pl

        rows, key, H = num_q * facts.tile.query, facts.tile.key, facts.padded_head
        group, every = facts.group, int(facts.documents)
        return cls(
            pl.BlockSpec((None, None, 4), lambda j, b, h: (b * every, j, 0)),
            pl.BlockSpec((None, rows, group, H), lambda j, b, h: (b, 0, h, 0)),
            pl.BlockSpec((None, key, None, H), lambda j, b, h: (b, j, h, 0)),
            pl.BlockSpec((None, group, rows), lambda j, b, h: (b, h, 0)),
            [
                pl.BlockSpec((None, rows), lambda j, b, h: (b, 0)),
                pl.BlockSpec((None, key), lambda j, b, h: (b, j)),
            ][: 2 * every],
        )  # fmt: skip


def _call(kernel, name: str, facts: _Facts, grid, inputs, outputs, device_kind: str):
    """`inputs`: (array, spec) each; `outputs`: (shape, dtype, spec) each."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as gpu

    arrays, in_specs = zip(*inputs, strict=True)
    return pl.pallas_call(
        kernel, name=name, grid=grid, in_specs=in_specs, out_specs=[spec for *_, spec in outputs],
        out_shape=[jax.ShapeDtypeStruct(shape, dtype) for shape, dtype, _ in outputs],
        compiler_params=gpu.CompilerParams(
            num_warps=facts.tile.warps, num_stages=facts.tile.stages
        ),
        interpret=device_kind == "cpu",
    )(*arrays)  # fmt: skip


def _in_blocks(facts: _Facts, queries, keys, rows, mask: Mask):
    """Arrays [B, T, N, H], [B, S, K, H], [B, N, T] and segments in whole blocks of rows.

    What is added weighs nothing: keys are masked, and queries have no gradient.
    """
    tile = facts.tile
    segments = []
    if facts.documents:
        segments = [_padded(mask.segments_BT, tile.query), _padded(mask.key_segments_BS, tile.key)]
    return (
        [_padded(array, tile.query) for array in queries],
        [_padded(array, tile.key) for array in keys],
        [_padded(array, tile.query, axis=2) for array in rows], segments,
    )  # fmt: skip


def _forward(query_BTNH, key_BSKH, value_BSKH, mask: Mask, scores: Scores, *, device_kind: str):
    """Rows in order; "cpu" runs the kernel's interpreter, for tests."""
    _refuse(query_BTNH, mask, device_kind)
    B, T, N, H = query_BTNH.shape
    tiles = tiles_of(device_kind, H, query_BTNH.dtype.itemsize)
    facts = _Facts.of(tiles.forward, query_BTNH, key_BSKH, mask, scores)
    (query,), keys, _, segments = _in_blocks(
        facts, [query_BTNH], [key_BSKH, value_BSKH], [], mask
    )  # fmt: skip
    num_q, num_k = query.shape[1] // facts.tile.query, keys[0].shape[1] // facts.tile.key
    spec = _Specs.by_query(facts, num_q, num_k)
    out_BTNH, lse_BNT = _call(
        functools.partial(flash_forward, facts, num_q), "flash_forward", facts, (num_q, B, N),
        [
            (_bounds(*_pairs(facts, mask)), spec.bounds), (query, spec.query),
            *((array, spec.key) for array in keys), *zip(segments, spec.segments, strict=True),
        ],
        [(query.shape, query.dtype, spec.query), ((B, N, query.shape[1]), jnp.float32, spec.row)],
        device_kind,
    )  # fmt: skip
    return out_BTNH[:, :T], lse_BNT[:, :, :T]


def _backward(
    query_BTNH, key_BSKH, value_BSKH, mask: Mask, scores: Scores, out_BTNH, lse_BNT, gradient_BTNH,
    *, device_kind: str,
):  # fmt: skip
    """One kernel for queries' gradients and one for those of keys and values: scores twice."""
    _refuse(query_BTNH, mask, device_kind)
    delta_BTN = jnp.einsum(
        "BTNH,BTNH->BTN", out_BTNH, gradient_BTNH, preferred_element_type=jnp.float32
    )
    rows = [lse_BNT * LOG2_E, delta_BTN.swapaxes(1, 2)]
    arrays = (query_BTNH, key_BSKH, value_BSKH, gradient_BTNH.astype(query_BTNH.dtype), rows, mask)
    return (
        _query_gradient(*arrays, scores, device_kind), *_key_gradients(*arrays, scores, device_kind)
    )  # fmt: skip


def _query_gradient(query, key, value, gradient, rows, mask: Mask, scores: Scores, device_kind):
    B, T, N, H = query.shape
    tile = tiles_of(device_kind, H, query.dtype.itemsize).query_gradient
    facts = _Facts.of(tile, query, key, mask, scores)
    (query, gradient), keys, rows, segments = _in_blocks(
        facts, [query, gradient], [key, value], rows, mask
    )  # fmt: skip
    num_q, num_k = query.shape[1] // facts.tile.query, keys[0].shape[1] // facts.tile.key
    spec = _Specs.by_query(facts, num_q, num_k)
    (result,) = _call(
        functools.partial(flash_dq, facts, num_q), "flash_dq", facts, (num_q, B, N),
        [
            (_bounds(*_pairs(facts, mask)), spec.bounds), (query, spec.query),
            *((array, spec.key) for array in keys), (gradient, spec.query),
            *((row, spec.row) for row in rows), *zip(segments, spec.segments, strict=True),
        ],
        [(query.shape, query.dtype, spec.query)], device_kind,
    )  # fmt: skip
    return result[:, :T]


def _key_gradients(query, key, value, gradient, rows, mask: Mask, scores: Scores, device_kind):
    B, num_keys, K, H = key.shape
    tile = tiles_of(device_kind, H, query.dtype.itemsize).keys_gradient
    facts = _Facts.of(tile, query, key, mask, scores)
    (query, gradient), keys, rows, segments = _in_blocks(
        facts, [query, gradient], [key, value], rows, mask
    )  # fmt: skip
    num_q, num_k = query.shape[1] // facts.tile.query, keys[0].shape[1] // facts.tile.key
    spec = _Specs.by_key(facts, num_q)
    meets, whole = _pairs(facts, mask)
    results = _call(
        functools.partial(flash_dkv, facts), "flash_dkv", facts, (num_k, B, K),
        [
            (_bounds(meets.swapaxes(1, 2), whole.swapaxes(1, 2)), spec.bounds), (query, spec.query),
            *((array, spec.key) for array in keys), (gradient, spec.query),
            *((row, spec.row) for row in rows), *zip(segments, spec.segments, strict=True),
        ],
        [(array.shape, array.dtype, spec.key) for array in keys], device_kind,
    )  # fmt: skip
    return [array[:, :num_keys] for array in results]


TRITON = of_one_width(_forward, _backward)

"""Ring attention: blocks of keys and values travel around the devices of the mesh axis `sequence`.

Each device works on the block that it has while the next one travels; each block's part of the
softmax is weighted by its log-sum-exp. Any `Kernel` serves. Which chunks see each other is known
before the program runs (`tiling`). With the zigzag placement of `Split` all devices have the same
causal work. Where neighbours exchange heads first (`ulysses`), groups form rings.

Sources: ring attention (arXiv 2310.01889), its zigzag placement (arXiv 2405.19716, 3.3, and
arXiv 2407.21783, 3.3.2).

Letters: B batch, T positions on a device, C positions of a chunk, N query heads, K key/value heads,
H head size; R groups in a ring.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from llmx.model import remat
from llmx.model.attention import sinks
from llmx.model.attention.kernel import NOTHING, Kernel
from llmx.model.attention.masks import Mask, Scores
from llmx.model.attention.split import Split

# Ring steps up to this many are written out one by one, more are a loop.
WRITTEN_OUT = 3
# But not on these: XLA:CPU orders a loop that sends and other communication differently on each
# device, and they deadlock.
NEVER_LOOPED = ("cpu",)


@dataclasses.dataclass(frozen=True)
class Tile:
    """Some chunks of a group's queries and of the keys of a block, in one call of the kernel."""

    queries: tuple[int, int]  # the first chunk, and the one after the last
    keys: tuple[int, int]
    ahead: int | None  # of the queries' first row to the keys' first; None: positions decide

    def rows(self, chunk: int) -> tuple[slice, slice]:
        """Rows of queries and of keys, where a chunk has `chunk` positions."""
        return slice(*(chunk * i for i in self.queries)), slice(*(chunk * i for i in self.keys))


@dataclasses.dataclass(frozen=True, eq=False)
class Tiling:
    """The tiles that each group computes at each step of the ring."""

    tile_lists: list[tuple[Tile, ...]]
    table: np.ndarray  # int[R groups, R steps], indices of `tile_lists`

    @property
    def steps(self) -> list[int]:
        """Those in which any group has a tile; over the others blocks are sent on in one go."""
        occupied = np.array([len(tiles) > 0 for tiles in self.tile_lists])
        return np.flatnonzero(occupied[self.table].any(axis=0)).tolist()


# How far the queries' chunk is ahead of the keys', in chunks: else one of these.
_HIDDEN, _WHOLE = -1, -2


@functools.lru_cache(maxsize=64)
def tiling(split: Split, num_positions: int, window: int) -> Tiling:
    """The tiles of causal attention over a row of `num_positions` in the order of `split`.

    `window`: positions back including itself, 0 = all.
    """
    chunks, R = split.chunks, split.rings
    size = num_positions // chunks.size
    tile_lists, table = {}, np.zeros((R, R), int)
    for group, step in np.ndindex(R, R):
        ahead = chunks[group][:, None] - chunks[(group - step) % R][None]
        hidden, whole = ahead < 0, ahead >= 1
        if window:
            hidden |= (ahead - 1) * size + 1 >= window
            whole &= (ahead + 1) * size - 1 < window
        tiles = _tiles(np.where(hidden, _HIDDEN, np.where(whole, _WHOLE, ahead)), size, window)
        table[group, step] = tile_lists.setdefault(tiles, len(tile_lists))
    return Tiling(list(tile_lists), table)


def _tiles(kinds: np.ndarray, size: int, window: int) -> tuple[Tile, ...]:
    """The pairs of chunks of one step as few tiles."""
    num = len(kinds)
    i, j = np.nonzero(kinds != _HIDDEN)
    # Without a window only order counts, and chunks are in order.
    diagonal = np.where(np.tri(num, k=-1), _WHOLE, np.where(np.eye(num), 0, _HIDDEN))
    if not window and np.array_equal(kinds, diagonal):
        return (Tile((0, num), (0, num), 0),)
    if not window and len(i):
        queries, keys = (int(i.min()), int(i.max()) + 1), (int(j.min()), int(j.max()) + 1)
        if np.all(kinds[slice(*queries), slice(*keys)] == _WHOLE):
            return (Tile(queries, keys, (keys[1] - keys[0]) * size),)
    # One chunk ahead all is seen too: the window reaches over what is further away.
    return tuple(
        Tile((a, a + 1), (b, b + 1), size * (1 if kinds[a, b] == _WHOLE else int(kinds[a, b])))
        for a, b in zip(i.tolist(), j.tolist(), strict=True)
    )


def scores_per_device(split: Split, num_positions: int, window: int = 0) -> np.ndarray:
    """float[devices]: pairs (query, key) of one head that each device computes of a row."""
    tiles_of = tiling(split, num_positions, window)
    size = num_positions // split.chunks.size

    def visible_pairs(tile: Tile) -> int:
        rows, columns = (np.arange(part.stop - part.start) for part in tile.rows(size))
        back = tile.ahead + rows[:, None] - columns[None]
        return int(((back >= 0) & (back < window if window else True)).sum())

    per_list = np.array([sum(map(visible_pairs, tiles)) for tiles in tiles_of.tile_lists])
    # The devices of a group have a share of the heads each.
    return np.repeat(per_list[tiles_of.table].sum(axis=1), split.ulysses) / split.ulysses


@dataclasses.dataclass(frozen=True)
class _Ring:
    """Static facts of one ring attention."""

    kernel: Kernel
    scores: Scores
    split: Split
    axis: str
    device_kind: str
    independent: bool

    def shifted(self, arrays, by: int):
        """From each device to the one with its index in the group `by` groups on."""
        ways, stride = self.split.ways, by * self.split.ulysses
        if stride % ways == 0:
            return arrays
        if self.independent and self.device_kind == "cpu":
            # On XLA:CPU all devices of the program wait in a permutation, other rings' too.
            source = (jax.lax.axis_index(self.axis) - stride) % ways
            gather = lambda array: jax.lax.all_gather(array, self.axis)[source]  # noqa: E731
            return jax.tree.map(gather, arrays)
        sends = [(i, (i + stride) % ways) for i in range(ways)]
        return jax.tree.map(lambda array: jax.lax.ppermute(array, self.axis, sends), arrays)

    def tiling(self, mask: Mask) -> Tiling:
        R = self.split.rings
        if mask.ahead is None:
            return Tiling([(Tile((0, 1), (0, 1), None),)], np.zeros((R, R), int))
        if mask.ahead:
            raise ValueError(f"queries are {mask.ahead} rows ahead of keys: in a ring both are one")
        return tiling(self.split, R * mask.segments_BT.shape[1], self.scores.window)


def ring(
    kernel: Kernel, *, axis: str, split: Split, device_kind: str, independent: bool = False
) -> Callable[..., Array]:
    """Attention in a manual region, queries, keys and values split over `axis` as `split` says.

    Returns a function of this device's query [B, T, N, H], key and value [B, T, K, H], mask, scores
    and sinks [B, T, N] or None. `mask.ahead` is 0 where rows are in the order of `split`; if None
    positions decide.
    `independent`: devices of other rings (pipeline stages) may be elsewhere in the program.

    Communicates: R-1 sends of keys, values and their segments in the forward pass; the same in the
    backward pass, R-1 sends of their gradients in fp32, and one in the compute dtype; with a window
    only as many as there are steps with work, less one. No send but the last waits for its step.
    """

    def attend(query_BTNH, key_BTKH, value_BTKH, mask: Mask, scores: Scores, sinks_BTN=None):
        facts = _Ring(kernel, scores, split, axis, device_kind, independent)
        return _ring(facts, query_BTNH, key_BTKH, value_BTKH, mask, sinks_BTN)

    return attend


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(facts: _Ring, query, key, value, mask: Mask, sinks_BTN):
    return _ring_forward(facts, query, key, value, mask, sinks_BTN)[0]


def _ring_forward(facts: _Ring, query, key, value, mask: Mask, sinks_BTN):
    def attend_tile(block, tile: Tile, rows: slice, columns: slice, so_far):
        out, lse = so_far
        new = facts.kernel.forward(
            query[:, rows], block.key[:, columns], block.value[:, columns],
            block.mask(mask, tile, rows, columns), facts.scores, device_kind=facts.device_kind,
        )  # fmt: skip
        new_out, new_lse = _merged((out[:, rows], lse[:, :, rows]), new)
        return _replaced(out, rows, new_out), _replaced(lse, rows, new_lse, axis=2)

    def step(so_far, block, fold, moved):
        return fold(functools.partial(attend_tile, block), so_far)

    B, T, N, _ = query.shape
    empty = jnp.zeros((B, T, N, value.shape[-1]), jnp.float32), jnp.full((B, N, T), NOTHING)
    out, lse = _around(facts, mask, step, empty, _Block.of(key, value, mask))
    out, lse = sinks.joined(out, lse, sinks_BTN)
    out, lse = checkpoint_name((out.astype(query.dtype), lse), remat.ATTENTION)
    return out, (query, key, value, mask, sinks_BTN, out, lse)


def _ring_backward(facts: _Ring, residuals, gradient):
    query, key, value, mask, sinks_BTN, out, lse = residuals
    zeros = lambda array: jnp.zeros(array.shape, jnp.float32)  # noqa: E731

    def differentiate_tile(block, tile: Tile, rows: slice, columns: slice, so_far):
        gradients = facts.kernel.gradients(
            query[:, rows], block.key[:, columns], block.value[:, columns],
            block.mask(mask, tile, rows, columns), facts.scores,
            out[:, rows], lse[:, :, rows], gradient[:, rows], device_kind=facts.device_kind,
        )  # fmt: skip
        return tuple(
            _replaced(whole, part, whole[:, part] + new)
            for whole, part, new in zip(so_far, (rows, columns, columns), gradients, strict=True)
        )

    def step(state, block, fold, moved):
        of_query, of_block = state
        # The gradient of a block follows it around.
        arriving = None if of_block is None else facts.shifted(of_block, moved)
        so_far = (of_query, zeros(block.key), zeros(block.value))
        of_query, *of_block = fold(functools.partial(differentiate_tile, block), so_far)
        if arriving is not None:
            of_block = jax.tree.map(jnp.add, arriving, of_block)
        return of_query, of_block

    start, home = (zeros(query), None), facts.split.rings - facts.tiling(mask).steps[-1]
    of_query, of_block = _around(facts, mask, step, start, _Block.of(key, value, mask))
    of_block = (of_block[0].astype(key.dtype), of_block[1].astype(value.dtype))
    of_sinks = sinks.gradient(sinks_BTN, out, lse, gradient)
    return of_query.astype(query.dtype), *facts.shifted(of_block, home), None, of_sinks


_ring.defvjp(_ring_forward, _ring_backward)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Block:
    """What travels: keys, values, and what masks need to know of them."""

    key: Array
    value: Array
    segments: Array
    positions: Array | None

    @classmethod
    def of(cls, key: Array, value: Array, mask: Mask) -> "_Block":
        positions = mask.key_positions_BS if mask.ahead is None else None
        return cls(key, value, mask.key_segments_BS, positions)

    def mask(self, mask: Mask, tile: Tile, rows: slice, columns: slice) -> Mask:
        """Of a tile; `mask` is that of all the device's queries."""
        ordered = tile.ahead is not None
        return Mask(
            mask.segments_BT[:, rows], None if ordered else mask.positions_BT[:, rows],
            self.segments[:, columns], None if ordered else self.positions[:, columns],
            ahead=tile.ahead, one_document=mask.one_document,
        )  # fmt: skip


def _around(facts: _Ring, mask: Mask, step: Callable, state, block: _Block):
    """`step(state, block, fold, moved)` for each block with work, from this group's own on.

    `fold(function, so_far)` folds `so_far` over the tiles of this group and step, by
    `function(tile, rows, columns, so_far)`. The block moved by `moved` groups since the last step.
    The loop leaves out the first step, which has the diagonal, and the last, which sends nothing.
    """
    tiles_of = facts.tiling(mask)
    strides = np.diff(tiles_of.steps).tolist()
    table = tiles_of.table[:, tiles_of.steps]
    num = len(tiles_of.steps)

    def fold(block, columns: slice, at):
        return functools.partial(
            _fold_tiles, facts, mask, tiles_of.tile_lists, block, table[:, columns], at
        )

    def step_and_send(carry, columns: slice, at, moved: int, next_stride: int):
        state, block = carry
        arriving = facts.shifted(block, next_stride)
        state = step(state, block, fold(block, columns, at), moved)
        # XLA may put several sends before the first work, which then waits for all but the last:
        # a step's sends end with the step.
        state, key, value = jax.lax.optimization_barrier((state, arriving.key, arriving.value))
        return state, dataclasses.replace(arriving, key=key, value=value)

    carry = (state, block)
    looped = num - 2 > WRITTEN_OUT and set(strides) == {1}
    if looped and facts.device_kind not in NEVER_LOOPED:
        carry = step_and_send(carry, slice(0, 1), 0, 0, 1)
        carry, _ = jax.lax.scan(
            lambda carry, at: (step_and_send(carry, slice(1, num - 1), at, 1, 1), None),
            carry, jnp.arange(num - 2),
        )  # fmt: skip
    else:
        for at, (moved, stride) in enumerate(zip([0, *strides], strides, strict=False)):
            carry = step_and_send(carry, slice(at, at + 1), 0, moved, stride)
    state, block = carry
    moved = strides[-1] if strides else 0
    state = step(state, block, fold(block, slice(num - 1, num), 0), moved)
    return jax.lax.optimization_barrier(state)


def _fold_tiles(facts, mask, tile_lists, block: _Block, columns: np.ndarray, at, function, so_far):
    """`function` for the tiles of this group, `tile_lists[columns[group, at]]`.

    Tiles in which no document of the queries meets one of the keys are skipped at run time.
    """
    num_chunks = 1 if mask.ahead is None else facts.split.chunks.shape[1]
    chunk = mask.segments_BT.shape[1] // num_chunks

    def meet(tile: Tile):
        if mask.one_document or tile.ahead == 0:
            return True
        return _documents_meet(block.mask(mask, tile, *tile.rows(chunk)))

    def fold(tiles, so_far):
        for tile in tiles:
            apply = functools.partial(function, tile, *tile.rows(chunk))
            so_far = _cond(True if len(tiles) == 1 else meet(tile), apply, so_far)
        return so_far

    chosen = np.unique(columns)
    lists = [tile_lists[index] for index in chosen]
    folds = [functools.partial(fold, tiles) for tiles in lists]
    # A conditional in a conditional would copy what it folds: a single tile is checked here.
    meets = [meet(*tiles) if len(tiles) == 1 else len(tiles) > 0 for tiles in lists]
    if len(lists) == 1:
        return _cond(meets[0], folds[0], so_far)
    group = jax.lax.axis_index(facts.axis) // facts.split.ulysses
    index = jnp.asarray(np.searchsorted(chosen, columns))[group, at]
    branch = jnp.where(jnp.stack(meets)[index], index + 1, 0)
    return jax.lax.switch(branch, [lambda so_far: so_far, *folds], so_far)


def _cond(condition, function: Callable, so_far):
    if isinstance(condition, bool):
        return function(so_far) if condition else so_far
    return jax.lax.cond(condition, function, lambda so_far: so_far, so_far)


def _replaced(array: Array, part: slice, new: Array, axis: int = 1) -> Array:
    """`array` with `new` in the slice `part`."""
    if new.shape == array.shape:
        return new
    return jax.lax.dynamic_update_slice_in_dim(array, new, part.start, axis=axis)


def _documents_meet(mask: Mask) -> Array:
    """Whether queries and keys may be of one document, by the ranges of their segments."""
    low, high = mask.segments_BT.min(axis=1), mask.segments_BT.max(axis=1)
    key_low, key_high = mask.key_segments_BS.min(axis=1), mask.key_segments_BS.max(axis=1)
    return jnp.any((low <= key_high) & (key_low <= high))


def _merged(one, two):
    """(out [B, T, N, H] fp32, log-sum-exp [B, N, T]) of two sets of keys together."""
    (out, lse), (other_out, other_lse) = one, two
    top = jnp.maximum(lse, other_lse)
    weight, other_weight = jnp.exp(lse - top), jnp.exp(other_lse - top)
    total = weight + other_weight
    share = lambda part: (part / total).swapaxes(1, 2)[..., None]  # noqa: E731
    return share(weight) * out + share(other_weight) * other_out, top + jnp.log(total)

"""Rows through their experts, block by block, on one device.

Rows lie in blocks, each of one expert; the blocks of an expert follow each other. What a block has
no rows for is zero. By `by_block` an expert is applied to one block after the other: products are
ordinary matrix products, and what is between them exists for one block only. On TPU the kernels of
`llmx.model.experts.kernels` multiply the same blocks.

Letters: R slots of rows in blocks, E experts of this device.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

# Rows of a block: at most as many as products need to be fast, and few beside an expert's share.
LARGEST, SMALLEST, BLOCKS_OF_AN_EXPERT = 512, 16, 16


class Blocks(NamedTuple):
    """How rows lie in blocks."""

    row_of_slot_R: Int[Array, " R"]  # which row is in a slot; the number of rows = none
    slot_of_row: Int[Array, " rows"]  # R = a row of no expert
    expert_of_block: Int[Array, " blocks"]  # the last expert, of blocks that are not in use
    used: Int[Array, ""]  # blocks in use, the first ones: at least one of each expert

    @property
    def size(self) -> int:
        """Rows of a block."""
        return self.row_of_slot_R.shape[0] // self.expert_of_block.shape[0]


def block_size(num_rows: int, num_experts: int) -> int:
    """Rows of a block, a power of two."""
    share = max(num_rows // (num_experts * BLOCKS_OF_AN_EXPERT), 1)
    return min(max(1 << share.bit_length() - 1, SMALLEST), LARGEST)


def num_blocks(num_rows: int, num_experts: int) -> int:
    """Blocks that hold these rows, however they are spread."""
    return -(-num_rows // block_size(num_rows, num_experts)) + num_experts


def expected_rows(num_rows: float, size: int, num_experts: int) -> float:
    """Rows that are multiplied, with the empty ones: about half a block of each expert."""
    return num_rows + num_experts * size / 2


def by_expert(expert_of_row: Int[Array, " rows"], num_experts: int) -> tuple[Array, Array, Array]:
    """Rows in the order of their experts; of each row its place among those of its expert, in their
    order (undefined for rows of no expert); and how many each expert has."""
    num_rows = expert_of_row.shape[0]
    order = jnp.argsort(expert_of_row, stable=True)
    rank = jnp.zeros(num_rows, jnp.int32).at[order].set(
        jnp.arange(num_rows, dtype=jnp.int32), unique_indices=True
    )  # fmt: skip
    counts_E = jnp.bincount(expert_of_row, length=num_experts).astype(jnp.int32)
    first_E = jnp.cumsum(counts_E) - counts_E
    return order, rank - first_E[jnp.minimum(expert_of_row, num_experts - 1)], counts_E


def blocks(expert_of_row: Int[Array, " rows"], num_experts: int) -> Blocks:
    """Blocks for rows of these experts; `num_experts` and more = of none."""
    num_rows = expert_of_row.shape[0]
    size, total = block_size(num_rows, num_experts), num_blocks(num_rows, num_experts)
    _, place, counts_E = by_expert(expert_of_row, num_experts)
    blocks_E = jnp.maximum(-(-counts_E // size), 1)
    ends_E = jnp.cumsum(blocks_E)
    first_block_E = ends_E - blocks_E
    slot = first_block_E[jnp.minimum(expert_of_row, num_experts - 1)] * size + place
    slot_of_row = jnp.where(expert_of_row < num_experts, slot, total * size).astype(jnp.int32)
    row_of_slot = jnp.full(total * size, num_rows, jnp.int32)
    row_of_slot = row_of_slot.at[slot_of_row].set(jnp.arange(num_rows), mode="drop")
    expert_of_block = jnp.searchsorted(ends_E, jnp.arange(total), side="right")
    expert_of_block = jnp.minimum(expert_of_block, num_experts - 1)
    return Blocks(row_of_slot, slot_of_row, expert_of_block, ends_E[-1])


def by_block(function: Callable, rows: Any, weights: Any, of: Blocks) -> Any:
    """`function(rows of a block, weights of its expert)` of each block: a tree of arrays [R, ...].

    rows: a tree of arrays [R, ...]; weights: a tree of arrays [E, ...].
    """

    def one(_, block):
        of_block, expert = block
        return None, function(of_block, _of_expert(weights, expert))

    _, out = jax.lax.scan(one, None, (_in_blocks(rows, of), of.expert_of_block))
    return _in_rows(out)


def by_block_with_sums(
    function: Callable, rows: Any, weights: Any, of: Blocks, dtype: jnp.dtype
) -> tuple[Any, Any]:
    """`by_block` of a function that returns (rows, terms): the rows, and the sums of the terms over
    the blocks of each expert, [E, ...].

    Terms have the shapes of one expert's weights and are added up in fp32; sums are in `dtype`.
    """

    def one(carry, block):
        totals, sums, before = carry
        of_block, expert = block
        out, terms = function(of_block, _of_expert(weights, expert))
        add = lambda total, term: jnp.where(expert == before, total, 0) + term  # noqa: E731
        totals = jax.tree.map(add, totals, terms)
        # Of each block: the last of an expert leaves its sum there.
        write = lambda sums, total: jax.lax.dynamic_update_index_in_dim(  # noqa: E731
            sums, total.astype(dtype), expert, 0
        )
        return (totals, jax.tree.map(write, sums, totals), expert), out

    totals = jax.tree.map(lambda weight: jnp.zeros(weight.shape[1:], jnp.float32), weights)
    sums = jax.tree.map(lambda weight: jnp.zeros(weight.shape, dtype), weights)
    begin = totals, sums, of.expert_of_block[0]
    (_, sums, _), out = jax.lax.scan(one, begin, (_in_blocks(rows, of), of.expert_of_block))
    return _in_rows(out), sums


def _of_expert(weights: Any, expert: Array) -> Any:
    take = lambda weight: jax.lax.dynamic_index_in_dim(weight, expert, keepdims=False)  # noqa: E731
    return jax.tree.map(take, weights)


def _in_blocks(rows: Any, of: Blocks) -> Any:
    return jax.tree.map(lambda array: array.reshape(-1, of.size, *array.shape[1:]), rows)


def _in_rows(blocks: Any) -> Any:
    return jax.tree.map(lambda array: array.reshape(-1, *array.shape[2:]), blocks)

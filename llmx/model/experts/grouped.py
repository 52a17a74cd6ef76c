"""Products of rows with the weights of their experts, on one device.

Rows lie in blocks, each of one expert; the blocks of an expert follow each other. What a block has
no rows for is zero. So a product is a loop over blocks, each an ordinary matrix product, and the
rows that it computes in vain are at most one block less one row for each expert.

Letters: R rows, D and F widths, E experts of this device.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# Rows of a block: at most as many as products need to be fast, and few beside an expert's share.
LARGEST, SMALLEST, BLOCKS_OF_AN_EXPERT = 512, 8, 16


class Blocks(NamedTuple):
    """How rows lie in blocks."""

    row_of_slot_R: Int[Array, " R"]  # which row is in a slot; the number of rows = none
    slot_of_row: Int[Array, " rows"]  # R = a row of no expert
    expert_of_block: Int[Array, " blocks"]  # the last expert, where a block has no rows

    @property
    def size(self) -> int:
        """Rows of a block."""
        return self.row_of_slot_R.shape[0] // self.expert_of_block.shape[0]


def block_size(num_rows: int, num_experts: int) -> int:
    """Rows of a block, a power of two."""
    share = max(num_rows // (num_experts * BLOCKS_OF_AN_EXPERT), 1)
    return min(max(1 << share.bit_length() - 1, SMALLEST), LARGEST)


def blocks(expert_of_row: Int[Array, " rows"], num_experts: int) -> Blocks:
    """Blocks for rows of these experts; `num_experts` and more = of none."""
    num_rows = expert_of_row.shape[0]
    size = block_size(num_rows, num_experts)
    num_blocks = -(-num_rows // size) + num_experts
    counts_E = jnp.bincount(expert_of_row, length=num_experts)
    blocks_E = -(-counts_E // size)
    ends_E = jnp.cumsum(blocks_E)
    first_row_E, first_block_E = jnp.cumsum(counts_E) - counts_E, ends_E - blocks_E
    order = jnp.argsort(expert_of_row, stable=True)
    expert = expert_of_row[order]
    of = jnp.minimum(expert, num_experts - 1)
    slot = first_block_E[of] * size + jnp.arange(num_rows) - first_row_E[of]
    slot = jnp.where(expert < num_experts, slot, num_blocks * size).astype(jnp.int32)
    row_of_slot = jnp.full(num_blocks * size, num_rows, jnp.int32)
    row_of_slot = row_of_slot.at[slot].set(order.astype(jnp.int32), mode="drop")
    slot_of_row = jnp.zeros(num_rows, jnp.int32).at[order].set(slot, unique_indices=True)
    expert_of_block = jnp.searchsorted(ends_E, jnp.arange(num_blocks), side="right")
    return Blocks(row_of_slot, slot_of_row, jnp.minimum(expert_of_block, num_experts - 1))


def product(
    x_RD: Float[Array, "R D"], weights_EDF: Float[Array, "E D F"], of: Blocks, *,
    transposed: bool = False,
) -> Float[Array, "R F"]:  # fmt: skip
    """Each row times the weights of its expert, in the dtype of x; `transposed`: of [E, F, D]."""
    contract = functools.partial(jnp.einsum, "bd,fd->bf" if transposed else "bd,df->bf")

    def one(_, block):
        x_bD, expert = block
        weight = jax.lax.dynamic_index_in_dim(weights_EDF, expert, keepdims=False)
        return None, contract(x_bD, weight, preferred_element_type=x_RD.dtype)

    x = x_RD.reshape(-1, of.size, x_RD.shape[1])
    _, out = jax.lax.scan(one, None, (x, of.expert_of_block))
    return out.reshape(x_RD.shape[0], -1)


def weight_gradient(
    x_RD: Float[Array, "R D"], gradient_RF: Float[Array, "R F"], of: Blocks, num_experts: int,
    dtype: jnp.dtype,
) -> Float[Array, "E D F"]:  # fmt: skip
    """The sum over the rows of each expert of x times gradient, added up in fp32."""
    D, F = x_RD.shape[1], gradient_RF.shape[1]

    def one(carry, block):
        total_DF, totals_EDF, before = carry
        x_bD, gradient_bF, expert = block
        term = jnp.einsum("bd,bf->df", x_bD, gradient_bF, preferred_element_type=jnp.float32)
        total_DF = jnp.where(expert == before, total_DF, 0) + term
        totals_EDF = jax.lax.dynamic_update_index_in_dim(
            totals_EDF, total_DF.astype(dtype), expert, 0
        )
        return (total_DF, totals_EDF, expert), None

    zeros = jnp.zeros((D, F), jnp.float32), jnp.zeros((num_experts, D, F), dtype)
    in_blocks = (
        x_RD.reshape(-1, of.size, D), gradient_RF.reshape(-1, of.size, F), of.expert_of_block
    )  # fmt: skip
    first = of.expert_of_block[0]
    (_, totals_EDF, _), _ = jax.lax.scan(one, (*zeros, first), in_blocks)
    return totals_EDF

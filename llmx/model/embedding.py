"""The embedding table, split over vocabulary and width, looked up without ever being gathered.

The vocabulary is split over `tensor`, and over `stage` in a pipeline. Under ZeRO-3 the width is
split over replicas (`fsdp`, `data`) that hold different rows of the batch. Instead of gathering the
table (V x D), the replicas share their token ids, each looks up its columns for all of them, and
one all-to-all brings every row's columns home: B T D numbers move in place of V D. The backward
pass runs the same way back, so the table's gradient is born split. Vocabulary-parallel lookup:
Megatron (arXiv 1909.08053).

Letters: B batch, T positions, V vocabulary, D width. All regions are fully manual.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from llmx import sharding
from llmx.model import precision
from llmx.sharding import mesh_axes


@dataclasses.dataclass(frozen=True)
class _Plan:
    mesh: Mesh
    tokens: PartitionSpec  # B T
    table: PartitionSpec  # V D
    out: PartitionSpec  # B T D
    policy: precision.Policy

    @property
    def vocab(self):
        return mesh_axes(self.table.partitions[0])

    @property
    def width(self):
        """Mesh axes that split D: replicas with other rows of the batch."""
        return mesh_axes(self.table.partitions[1])

    @property
    def scattered(self):
        """Mesh axes of the vocabulary that split the positions of the result."""
        return tuple(a for a in mesh_axes(self.out[1]) if a in self.vocab)

    @property
    def summed(self):
        """Mesh axes over which the table is whole but the tokens differ: its gradient is summed,
        unless its type says that somebody else does it."""
        varied = (*mesh_axes(self.tokens[0]), *mesh_axes(self.tokens[1]))
        return tuple(a for a in varied if a not in self.width and a not in self.table.reduced)


def embed(
    tokens_BT: Int[Array, "B T"],
    table_VD: Float[Array, "V D"],
    *,
    place: sharding.Placement,
    policy: precision.Policy,
) -> Float[Array, "B T D"]:
    """Rows of the table, in the compute dtype, with positions split as between blocks.

    Communicates: token ids and results over the mesh axes that split D; a reduce-scatter (or a sum)
    over those that split V.
    """
    table = jax.typeof(table_VD).sharding.spec
    out = place.activation(("batch", "block_sequence", "embed"))
    # Positions that a reduce-scatter over the vocabulary's axes will not split are split from the
    # start.
    tokens = sharding.without(PartitionSpec(out[0], out[1]), mesh_axes(table.partitions[0]))
    plan = _Plan(mesh=place.mesh, tokens=tokens, table=table, out=out, policy=policy)
    return _embed(plan, sharding.constrain(tokens_BT, place.mesh, tokens), table_VD)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _embed(plan, tokens_BT, table_VD):
    region = functools.partial(_look_up, plan)
    return jax.shard_map(
        region, mesh=plan.mesh, in_specs=(plan.tokens, plan.table),
        out_specs=plan.out, check_vma=False,
    )(tokens_BT, table_VD)  # fmt: skip


def _shared_tokens(plan, tokens_BT, num_local_rows):
    """Token ids of all replicas that share the table's columns, as local rows; which are local."""
    if plan.width:
        tokens_BT = jax.lax.all_gather(tokens_BT, plan.width, axis=0, tiled=True)
    first = jax.lax.axis_index(plan.vocab) * num_local_rows if plan.vocab else 0
    local_BT = tokens_BT - first
    return local_BT, (local_BT >= 0) & (local_BT < num_local_rows)


def _look_up(plan, tokens_BT, table_VD):
    local_BT, mine_BT = _shared_tokens(plan, tokens_BT, table_VD.shape[0])
    table_VD = table_VD.astype(plan.policy.compute)
    x_BTD = jnp.where(mine_BT[..., None], table_VD.at[local_BT].get(mode="clip"), 0)
    if plan.width:
        x_BTD = jax.lax.all_to_all(x_BTD, plan.width, split_axis=0, concat_axis=2, tiled=True)
    if plan.scattered:
        x_BTD = jax.lax.psum_scatter(x_BTD, plan.scattered, scatter_dimension=1, tiled=True)
    over = tuple(axis for axis in plan.vocab if axis not in plan.scattered)
    return jax.lax.psum(x_BTD, over) if over else x_BTD


def _embed_forward(plan, tokens_BT, table_VD):
    return _embed(plan, tokens_BT, table_VD), (tokens_BT, table_VD)


def _embed_backward(plan, residuals, gradient_BTD):
    tokens_BT, table_VD = residuals
    region = functools.partial(_add_up, plan)
    gradient_VD = jax.shard_map(
        region, mesh=plan.mesh, in_specs=(plan.tokens, plan.table, plan.out),
        out_specs=sharding.unreduced(plan.table, plan.table.reduced), check_vma=False,
    )(tokens_BT, table_VD, gradient_BTD)  # fmt: skip
    return None, gradient_VD


def _add_up(plan, tokens_BT, table_VD, gradient_BTD):
    local_BT, mine_BT = _shared_tokens(plan, tokens_BT, table_VD.shape[0])
    if plan.scattered:
        gradient_BTD = jax.lax.all_gather(gradient_BTD, plan.scattered, axis=1, tiled=True)
    if plan.width:
        gradient_BTD = jax.lax.all_to_all(
            gradient_BTD, plan.width, split_axis=2, concat_axis=0, tiled=True
        )
    gradient_BTD = jnp.where(mine_BT[..., None], gradient_BTD, 0).astype(jnp.float32)
    gradient_VD = jnp.zeros(table_VD.shape, jnp.float32)
    gradient_VD = gradient_VD.at[jnp.clip(local_BT, 0, table_VD.shape[0] - 1)].add(gradient_BTD)
    if plan.summed:
        gradient_VD = jax.lax.psum(gradient_VD.astype(plan.policy.reduce), plan.summed)
    return gradient_VD.astype(table_VD.dtype)


_embed.defvjp(_embed_forward, _embed_backward)

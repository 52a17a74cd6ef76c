"""The embedding table, split over vocabulary and width, looked up without ever being gathered.

The vocabulary is split over `tensor` and `stage` (Megatron, arXiv 1909.08053). Under ZeRO-3 the
width is split over replicas with different rows of the batch. These share their token ids, each
looks up its columns for all of them, and one all-to-all returns to each replica all columns of its
rows: B T D numbers move in place of V D. The backward pass is the reverse.

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
class SplitTable:
    """How a table of the vocabulary (embedding, head) and the tokens that use it are split."""

    mesh: Mesh
    table: PartitionSpec  # V D
    tokens: PartitionSpec  # B T
    policy: precision.Policy

    @property
    def vocab(self) -> tuple[str, ...]:
        """Mesh axes that split V."""
        return mesh_axes(self.table.partitions[0])

    @property
    def width(self) -> tuple[str, ...]:
        """Mesh axes that split D: replicas with other rows of the batch."""
        return mesh_axes(self.table.partitions[1])

    @property
    def summed(self) -> tuple[str, ...]:
        """Mesh axes to sum the table's gradient over: where it is `reduced`, that is done later."""
        varied = sharding.used_axes(self.tokens)
        return tuple(a for a in varied if a not in self.width and a not in self.table.reduced)

    @property
    def gradient(self) -> PartitionSpec:
        """Of the table's gradient."""
        return sharding.unreduced(self.table, self.table.reduced)

    def first_row(self, num_local_rows: int) -> Array | int:
        """The vocabulary index of this device's first row; in a manual region."""
        return jax.lax.axis_index(self.vocab) * num_local_rows if self.vocab else 0


def embed(
    tokens_BT: Int[Array, "B T"], table_VD: Float[Array, "V D"], *,
    place: sharding.Placement, policy: precision.Policy,
) -> Float[Array, "B T D"]:  # fmt: skip
    """Rows of the table, in the compute dtype, with positions split as between blocks.

    Communicates ids and results over the axes that split D; sums over those that split V.
    """
    table = jax.typeof(table_VD).sharding.spec
    out = place.activation(("batch", "block_sequence", "embed"))
    # What a reduce-scatter over the vocabulary's axes will not split is split from the start.
    tokens = sharding.without(PartitionSpec(out[0], out[1]), mesh_axes(table.partitions[0]))
    split = SplitTable(place.mesh, table, tokens, policy)
    return _embed(split, out, sharding.constrain(tokens_BT, place.mesh, tokens), table_VD)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _embed(split: SplitTable, out: PartitionSpec, tokens_BT, table_VD):
    return jax.shard_map(
        functools.partial(_look_up, split, _scattered(split, out)), mesh=split.mesh,
        in_specs=(split.tokens, split.table), out_specs=out, check_vma=False,
    )(tokens_BT, table_VD)  # fmt: skip


def _embed_backward(split: SplitTable, out: PartitionSpec, residuals, gradient_BTD):
    gradient_VD = jax.shard_map(
        functools.partial(_accumulate, split, _scattered(split, out)), mesh=split.mesh,
        in_specs=(split.tokens, split.table, out), out_specs=split.gradient, check_vma=False,
    )(*residuals, gradient_BTD)  # fmt: skip
    return None, gradient_VD


_embed.defvjp(
    lambda split, out, tokens_BT, table_VD: (
        _embed(split, out, tokens_BT, table_VD), (tokens_BT, table_VD)
    ),
    _embed_backward,
)  # fmt: skip


def _scattered(split: SplitTable, out: PartitionSpec) -> tuple[str, ...]:
    """Mesh axes of the vocabulary that split the positions of the result."""
    return tuple(axis for axis in mesh_axes(out[1]) if axis in split.vocab)


def _local_rows(split: SplitTable, tokens_BT, num_local_rows):
    """Token ids of all replicas that share the columns, as local rows; and which are local."""
    if split.width:
        tokens_BT = jax.lax.all_gather(tokens_BT, split.width, axis=0, tiled=True)
    local_BT = tokens_BT - split.first_row(num_local_rows)
    return local_BT, (local_BT >= 0) & (local_BT < num_local_rows)


def _look_up(split: SplitTable, scattered, tokens_BT, table_VD):
    local_BT, mine_BT = _local_rows(split, tokens_BT, table_VD.shape[0])
    table_VD = table_VD.astype(split.policy.compute)
    x_BTD = jnp.where(mine_BT[..., None], table_VD.at[local_BT].get(mode="clip"), 0)
    if split.width:
        x_BTD = jax.lax.all_to_all(x_BTD, split.width, split_axis=0, concat_axis=2, tiled=True)
    if scattered:
        x_BTD = sharding.psum_scatter(x_BTD, scattered, dimension=1, exchange=False)
    over = tuple(axis for axis in split.vocab if axis not in scattered)
    return jax.lax.psum(x_BTD, over) if over else x_BTD


def _accumulate(split: SplitTable, scattered, tokens_BT, table_VD, gradient_BTD):
    local_BT, mine_BT = _local_rows(split, tokens_BT, table_VD.shape[0])
    if scattered:
        gradient_BTD = jax.lax.all_gather(gradient_BTD, scattered, axis=1, tiled=True)
    if split.width:
        exchange = functools.partial(jax.lax.all_to_all, split_axis=2, concat_axis=0, tiled=True)
        gradient_BTD = exchange(gradient_BTD, split.width)
    gradient_BTD = jnp.where(mine_BT[..., None], gradient_BTD, 0).astype(jnp.float32)
    gradient_VD = jnp.zeros(table_VD.shape, jnp.float32)
    gradient_VD = gradient_VD.at[jnp.clip(local_BT, 0, table_VD.shape[0] - 1)].add(gradient_BTD)
    if split.summed:
        gradient_VD = jax.lax.psum(gradient_VD.astype(split.policy.reduce), split.summed)
    return gradient_VD.astype(table_VD.dtype)


def embed_train(
    tokens_BT: Int[Array, "B T"], cores: dict[str, Array], *,
    place: sharding.Placement, policy: precision.Policy,
) -> Float[Array, "B T D"]:  # fmt: skip
    """Rows of a table that is a train of tensors (`tensor_train`), otherwise as `embed`.

    Each device makes the rows of its own tokens from the cores, which are whole everywhere. The
    backward pass sums over the axes that split tokens and are not `reduced` in the cores' types.
    """
    out = place.activation(("batch", "block_sequence", "embed"))
    tokens = PartitionSpec(out[0], out[1])
    cores = tuple(cores[name] for name in sorted(cores))
    train = _Train(place.mesh, tokens, out, policy)
    return _embed_train(train, sharding.constrain(tokens_BT, place.mesh, tokens), cores)


@dataclasses.dataclass(frozen=True)
class _Train:
    """How the tokens that a train of tensors is looked up for, and their rows, are split."""

    mesh: Mesh
    tokens: PartitionSpec  # B T
    out: PartitionSpec  # B T D
    policy: precision.Policy


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _embed_train(train: _Train, tokens_BT, cores):
    whole = tuple(sharding.split_only(jax.typeof(core).sharding.spec) for core in cores)
    return jax.shard_map(
        functools.partial(rows_of_train, train.policy.compute), mesh=train.mesh,
        in_specs=(train.tokens, whole), out_specs=train.out, check_vma=False,
    )(tokens_BT, tuple(map(jax.sharding.reshard, cores, whole)))  # fmt: skip


def _embed_train_backward(train: _Train, residuals, gradient_BTD):
    tokens_BT, cores = residuals
    kinds = tuple(jax.typeof(core).sharding.spec for core in cores)
    whole = tuple(map(sharding.split_only, kinds))
    later = set(kinds[0].reduced)
    summed = tuple(axis for axis in sharding.used_axes(train.tokens) if axis not in later)

    def local(tokens_BT, gradient_BTD, *cores):
        look_up = functools.partial(rows_of_train, train.policy.compute, tokens_BT)
        gradients = jax.vjp(look_up, cores)[1](gradient_BTD)[0]
        if summed:
            reduce = train.policy.reduce
            total = lambda one: jax.lax.psum(one.astype(reduce), summed).astype(one.dtype)  # noqa: E731
            gradients = jax.tree.map(total, gradients)
        return gradients

    gradients = jax.shard_map(
        local, mesh=train.mesh, in_specs=(train.tokens, train.out, *whole),
        out_specs=tuple(sharding.unreduced(kind, kind.reduced) for kind in kinds), check_vma=False,
    )(tokens_BT, gradient_BTD, *map(jax.sharding.reshard, cores, whole))  # fmt: skip
    return None, gradients


_embed_train.defvjp(
    lambda train, tokens_BT, cores: (_embed_train(train, tokens_BT, cores), (tokens_BT, cores)),
    _embed_train_backward,
)


def rows_of_train(dtype: jnp.dtype, tokens_BT: Array, cores: tuple[Array, ...]) -> Array:
    """Rows [B, T, D] of the table of cores [r, v, d, s], computed in `dtype`."""
    digits, left = [], tokens_BT
    for core in reversed(cores[1:]):
        left, digit = jnp.divmod(left, core.shape[1])
        digits.append(digit)
    found = jnp.ones((*tokens_BT.shape, 1, 1), dtype)
    for core, digit_BT in zip(cores, [left, *reversed(digits)], strict=True):
        part_rBTds = jnp.take(core.astype(dtype), digit_BT, axis=1, mode="clip")
        found = jnp.einsum("BTDr,rBTds->BTDds", found, part_rBTds)
        found = found.reshape(*tokens_BT.shape, -1, core.shape[3])
    return found[..., 0]

"""Compressors: sums over replicas that send fewer bytes than the numbers themselves.

Sums run inside a manual region (`jax.shard_map`) over the mesh axis that crosses the slow network.
Each device has a shard of every tensor and its replica's term of the sum; afterwards every device
along the axis has the same sum. What compression leaves out is an error-feedback residual and is
added to the next term (arXiv 1901.09847), so that everything is sent in the end:

    sent + residuals afterwards = terms + residuals before

The two-phase sums (signs, int8) are an all-to-all, in which each device becomes the *server* of 1/n
of every tensor, and an all-gather of the servers' sums; servers compress too and have residuals of
their own (arXiv 2102.02888, figure 1). Compressed tensors travel as bytes, fused into buckets.

Letters: L rows of a tensor (its layers where they are stacked, else 1), R numbers of a row on this
device, n replicas, Q = R/n rounded up, a server's share of a row.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from llmx.sharding import mesh_axes, stacks
from llmx.sync import buckets

FP32 = 4  # bytes
BLOCK = 256  # numbers that share a scale
TOP_BLOCK = 4096  # numbers among which `top_k` chooses; positions fit into 16 bits


@dataclasses.dataclass(frozen=True)
class Tensor:
    """The shard of one tensor on a device."""

    name: str
    shape: tuple[int, ...]  # of the shard
    layered: bool  # the first dimension counts layers
    stacked: int = 0  # dimensions, from the first on, that count layers and experts
    over: tuple[str, ...] = ()  # mesh axes that split a row
    columns: int = 0  # first dimension of the columns as a matrix; 0 = not a matrix
    in_full: bool = False  # is summed in fp32 whatever the compressor; see `some_in_full`

    @property
    def rows(self) -> int:
        return self.shape[0] if self.layered else 1

    @property
    def length(self) -> int:
        return math.prod(self.shape) // self.rows

    @property
    def matrix(self) -> tuple[int, int, int] | None:
        """[layers and their experts, a, b], or None for a tensor that is not a matrix."""
        if not self.columns:
            return None
        stacked, columns, shape = self.stacked, self.columns, self.shape
        return tuple(map(math.prod, (shape[:stacked], shape[stacked:columns], shape[columns:])))


@dataclasses.dataclass(frozen=True)
class Group:
    """The replicas that sum, and the settings of `SyncConfig` that compressors read."""

    axis: str  # mesh axis
    size: int  # n
    feedback: bool = True  # keep error-feedback residuals
    bucket_bytes: int = 32 * 2**20  # of one device, per message
    fraction: float = 0.01  # top_k: share of the numbers that is sent
    rank: int = 4  # low_rank
    scale: str = "rms"  # signs: the size of a row's numbers, "rms" or "mean"


class Residuals(NamedTuple):
    """What compressors keep between sums, fp32 by tensor name; tensors without one are left out.

    `errors` and `server` are of each replica, `queries` the same on all.
    """

    errors: dict[str, jax.Array]  # not yet sent by this replica, in the tensor's shape
    server: dict[str, jax.Array]  # not yet passed on by this device as a server, [L, Q]
    # low_rank: start of the next power iteration, [L, b of a layer's matrices, rank]
    queries: dict[str, jax.Array]


# Shapes of one tensor's residuals on a device by field: [L, *row]; None = the tensor's own shape.
ResidualRows = dict[str, tuple[int, ...] | None]


class Message(NamedTuple):
    """What one collective along the group's axis moves of one tensor.

    Messages at the same position of their tensors travel together: fused into buckets, or, of
    all-reduces over the same axes, as one.
    """

    collective: str  # "all_to_all", "all_gather" or "all_reduce"
    bytes: int  # of the operand on one device
    over: tuple[str, ...] = ()  # all_reduce: further mesh axes that it sums over


class Compressor(NamedTuple):
    """One way to sum over replicas: a row of `COMPRESSORS`.

    `reduce(tensors, terms, residuals, group, live=None) -> (sums, residuals)` is the sum, for use
    in a manual region over the whole mesh. Communicates over `group.axis`; signs also over the axes
    that split a row, a scale per row.

        tensors: all that are summed, a sequence of Tensor.
        terms: by name, this replica's terms in the shape of the shard, any float dtype.
        residuals: of the sum before, or zeros; any shapes with as many numbers, which are kept.
        live: by name, bool in the shape of the shard and the same on all replicas; None = all.
            Numbers that are not live are zero in the sums and in the residuals; of signs, whose
            bits they have too, they are 1 in the sums where a replica has a number there, which
            waits in its residual.
        sums: by name, in the shape of the shard; fp32, of "mean" in the dtype of the terms.

    `state` gives the shapes of a tensor's residuals, `messages` what is sent of it, in order.
    """

    reduce: Callable[..., tuple[dict[str, jax.Array], Residuals]]
    state: Callable[[Tensor, Group], ResidualRows]
    messages: Callable[[Tensor, Group], tuple[Message, ...]]
    masks: bool = False  # numbers that are not live wait in residuals until they are


def local_tensor(
    name: str, shape: Sequence[int], axes: Sequence[str], spec: PartitionSpec,
    sizes: Mapping[str, int],
) -> Tensor:  # fmt: skip
    """The shard of a tensor of global `shape`, split by `spec` over mesh axes of these `sizes`.

    `axes`: its logical axes.
    """
    entries = [mesh_axes(entry) for entry in spec.partitions]
    entries += [()] * (len(shape) - len(entries))
    ways = [math.prod(sizes[axis] for axis in entry) for entry in entries]
    layered = bool(axes) and axes[0] == "layers"
    sides = stacks.sides(axes)
    return Tensor(
        name, tuple(dim // way for dim, way in zip(shape, ways, strict=True)), layered,
        stacks.num_stacked(axes),
        over=tuple(axis for entry in entries[int(layered) :] for axis in entry),
        columns=sides[1][0] if "embed" in axes and len(sides) == 2 else 0,
    )  # fmt: skip


# ---------------------------------------------------------------------- what compressors share


def _masked(live: Mapping[str, jax.Array] | None, name: str, array: jax.Array) -> jax.Array:
    return array if live is None else jnp.where(live[name].reshape(array.shape), array, 0)


def _plus(residuals: dict[str, jax.Array], name: str, array: jax.Array) -> jax.Array:
    return array + residuals[name].reshape(array.shape) if name in residuals else array


def _with_errors(tensors, terms, residuals: Residuals, live) -> list[jax.Array]:
    """fp32 [L, R] of each tensor: its term, and what was not sent of the terms before."""
    inputs = []
    for tensor in tensors:
        x_LR = terms[tensor.name].astype(jnp.float32).reshape(tensor.rows, tensor.length)
        x_LR = _plus(residuals.errors, tensor.name, x_LR)
        inputs.append(_masked(live, tensor.name, x_LR))
    return inputs


def _updated(old: Residuals, errors: dict, server: dict | None = None) -> Residuals:
    """New residuals of those that are kept, in the shapes of the old ones."""
    shaped = lambda new, old: {name: new[name].reshape(old[name].shape) for name in old}  # noqa: E731
    return old._replace(errors=shaped(errors, old.errors), server=shaped(server or {}, old.server))


def _exchanged(collective: str, arrays, group: Group) -> list[list[jax.Array]]:
    return buckets.exchange(collective, arrays, group.axis, group.bucket_bytes)


def _feedback(group: Group, **rows: tuple[int, ...] | None) -> ResidualRows:
    return rows if group.feedback else {}


def alone(tensors, terms, residuals: Residuals, group: Group, live=None):
    """The `Compressor.reduce` of one replica: its terms, and all that it has not sent before."""
    sums, errors, servers = {}, {}, {}
    for tensor, in_LR in zip(tensors, _with_errors(tensors, terms, residuals, None), strict=True):
        name, live_LR, x_LR = tensor.name, _live_rows(live, tensor), in_LR
        if name in residuals.server:
            server_LQ = residuals.server[name].reshape(tensor.rows, -1)
            servers[name], x_LR = server_LQ * 0, in_LR + server_LQ[:, : tensor.length]
        sums[name] = jnp.where(live_LR, x_LR, x_LR != 0).reshape(tensor.shape)
        errors[name] = jnp.where(live_LR, 0, x_LR)
    return sums, _updated(residuals, errors, servers)


def some_in_full(compressor: Compressor) -> Compressor:
    """The compressor, but tensors that are `in_full` are summed in fp32, in one all-reduce.

    Of them nothing waits but numbers that are not live, where the compressor keeps errors of terms
    that have none (signs).
    """

    def reduce(tensors, terms, residuals: Residuals, group: Group, live=None):
        full = [tensor for tensor in tensors if tensor.in_full]
        rest = [tensor for tensor in tensors if not tensor.in_full]
        names = {tensor.name for tensor in full}
        split = lambda kept, of: {k: kept[k] for k in kept if (k in names) is of}  # noqa: E731
        mine = Residuals(*(split(kept, True) for kept in residuals))
        others = Residuals(*(split(kept, False) for kept in residuals))
        sums, new = compressor.reduce(rest, terms, others, group, live) if rest else ({}, others)
        inputs = _with_errors(full, terms, mine, None)
        totals = jax.lax.psum(inputs, group.axis)
        errors = {}
        for tensor, in_LR, sum_LR in zip(full, inputs, totals, strict=True):
            live_LR = _live_rows(live, tensor)
            sums[tensor.name] = jnp.where(live_LR, sum_LR, sum_LR != 0).reshape(tensor.shape)
            errors[tensor.name] = jnp.where(live_LR, 0, in_LR)
        updated = _updated(mine, errors)
        return sums, Residuals(*({**a, **b} for a, b in zip(new, updated, strict=True)))

    def state(tensor: Tensor, group: Group) -> ResidualRows:
        if not tensor.in_full:
            return compressor.state(tensor, group)
        return _feedback(group, errors=None) if compressor.masks else {}

    def messages(tensor: Tensor, group: Group) -> tuple[Message, ...]:
        return (_mean_messages if tensor.in_full else compressor.messages)(tensor, group)

    return compressor._replace(reduce=reduce, state=state, messages=messages)


# ------------------------------------------------------------------------------------------- signs


def _share(tensor: Tensor, group: Group, multiple: int) -> int:
    """Q, a multiple of `multiple`."""
    return -(-tensor.length // (group.size * multiple)) * multiple


def _chunks(array_LR: jax.Array, size: int, q: int) -> jax.Array:
    """[L, R] as [n, L, Q], padded with zeros."""
    rows, length = array_LR.shape
    padded = jnp.pad(array_LR, ((0, 0), (0, size * q - length)))
    return padded.reshape(rows, size, q).swapaxes(0, 1)


def _rows(chunks_nLQ: jax.Array, length: int) -> jax.Array:
    """The reverse of `_chunks`: [L, R] without the padding."""
    size, rows, q = chunks_nLQ.shape
    return chunks_nLQ.swapaxes(0, 1).reshape(rows, size * q)[:, :length]


def _magnitude(tensor: Tensor, group: Group, over: Sequence[str], x_LR, live_LR) -> jax.Array:
    """The size of the live numbers of each whole row, fp32 [L]: their root mean square, or their
    mean absolute value.

    Sums over the mesh axes `over` and those that split a row.
    """
    sizes = jnp.abs(x_LR) if group.scale == "mean" else jnp.square(x_LR)
    both = jnp.stack([jnp.where(live_LR, sizes, 0).sum(1), live_LR.sum(1, dtype=jnp.float32)])
    if axes := (*over, *tensor.over):
        both = jax.lax.psum(both, axes)
    mean = both[0] / jnp.maximum(both[1], 1)
    return mean if group.scale == "mean" else jnp.sqrt(mean)


def _signs(tensors, terms, residuals: Residuals, group: Group, live=None):
    """Signs, and one scale per row: the root mean square of its numbers, which keeps the row's norm
    (arXiv 2102.02888), or their mean absolute value, which is nearest to them.

    Sends 1/8 byte per number and phase. Scales are of whole rows, however a replica splits them.
    The bit of a number that is not live says whether there is one.
    """
    n, index = group.size, jax.lax.axis_index(group.axis)
    inputs = _with_errors(tensors, terms, residuals, None)
    messages, errors, masks = [], {}, []
    for tensor, x_LR in zip(tensors, inputs, strict=True):
        live_LR = _live_rows(live, tensor)
        positive_LR = jnp.where(live_LR, x_LR >= 0, x_LR != 0)
        scale_L = _magnitude(tensor, group, (), x_LR, live_LR)
        sent_LR = jnp.where(positive_LR, scale_L[:, None], -scale_L[:, None])
        errors[tensor.name] = x_LR - jnp.where(live_LR, sent_LR, 0)
        q = _share(tensor, group, 8)
        bits = buckets.pack(_chunks(positive_LR, n, q))
        messages.append([bits, jnp.broadcast_to(scale_L, (n, tensor.rows))])
        masks.append(_chunks(live_LR, n, q)[index])
    arrived = _exchanged("all_to_all", messages, group)
    answers, scales, server = [], [], {}
    for tensor, live_LQ, (bits, scales_nL) in zip(tensors, masks, arrived, strict=True):
        signs_nLQ = buckets.unpack(bits)
        sum_LQ = jnp.sum(scales_nL[..., None] * signs_nLQ, axis=0)
        sum_LQ = jnp.where(live_LQ, _plus(residuals.server, tensor.name, sum_LQ), 0)
        scale_L = _magnitude(tensor, group, (group.axis,), sum_LQ, live_LQ)
        positive_LQ = jnp.where(live_LQ, sum_LQ >= 0, (signs_nLQ > 0).any(0))
        sent_LQ = jnp.where(positive_LQ, scale_L[:, None], -scale_L[:, None])
        server[tensor.name] = jnp.where(live_LQ, sum_LQ - sent_LQ, 0)
        answers.append([buckets.pack(positive_LQ)[None]])
        scales.append(scale_L)
    arrived, sums = _exchanged("all_gather", answers, group), {}
    for tensor, scale_L, (bits,) in zip(tensors, scales, arrived, strict=True):
        signs_LR = _rows(buckets.unpack(bits), tensor.length)
        sum_LR = jnp.where(_live_rows(live, tensor), scale_L[:, None] * signs_LR, signs_LR > 0)
        sums[tensor.name] = sum_LR.reshape(tensor.shape)
    return sums, _updated(residuals, errors, server)


def _live_rows(live: Mapping[str, jax.Array] | None, tensor: Tensor) -> jax.Array:
    shape = (tensor.rows, tensor.length)
    return jnp.ones(shape, bool) if live is None else live[tensor.name].reshape(shape)


def _signs_state(tensor: Tensor, group: Group) -> ResidualRows:
    return _feedback(group, errors=None, server=(_share(tensor, group, 8),))


def _signs_messages(tensor: Tensor, group: Group) -> tuple[Message, ...]:
    """Bits and a scale per row to the servers, the sums of their scales, bits from the servers."""
    bits = tensor.rows * _share(tensor, group, 8) // 8
    return (
        Message("all_to_all", group.size * (bits + FP32 * tensor.rows)),
        Message("all_reduce", 2 * FP32 * tensor.rows, tensor.over),
        Message("all_gather", bits),
    )


# ---------------------------------------------------------------------------------- codes of blocks


@dataclasses.dataclass(frozen=True)
class Code:
    """How numbers are sent that share a scale: the largest of them becomes `largest`."""

    largest: float
    dtype: jnp.dtype  # of a number: whole numbers, or a float8
    per_byte: int = 1
    block: int = BLOCK  # numbers that share a scale, in fp32

    def quantized(self, x: jax.Array, block: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Codes [..., Q / per_byte], scales [..., Q / block], and the numbers that they stand for
        [..., Q]."""
        blocks = x.reshape(*x.shape[:-1], -1, block)
        scale = jnp.max(jnp.abs(blocks), axis=-1) / self.largest
        steps = blocks / jnp.where(scale > 0, scale, 1)[..., None]
        if jnp.issubdtype(self.dtype, jnp.integer):
            steps = jnp.round(steps)
        codes = jnp.clip(steps, -self.largest, self.largest).astype(self.dtype)
        # Compilers leave out a rounding that is undone at once, and others would receive another
        # number.
        packed = jax.lax.optimization_barrier(self._packed(codes.reshape(x.shape)))
        return packed, scale, self.numbers(packed, scale)

    def numbers(self, packed: jax.Array, scale: jax.Array) -> jax.Array:
        """What codes stand for, fp32 [..., Q]."""
        codes = self._unpacked(packed)
        blocks = codes.reshape(*scale.shape, -1).astype(jnp.float32) * scale[..., None]
        return blocks.reshape(codes.shape)

    def _packed(self, codes: jax.Array) -> jax.Array:
        if self.per_byte == 1:
            return codes
        pairs = (codes.reshape(*codes.shape[:-1], -1, 2) & 15).astype(jnp.uint8)
        return pairs[..., 0] | pairs[..., 1] << 4

    def _unpacked(self, packed: jax.Array) -> jax.Array:
        if self.per_byte == 1:
            return packed
        pairs = jnp.stack([packed & 15, packed >> 4], axis=-1).astype(jnp.int8)
        signed = jnp.where(pairs > 7, pairs - 16, pairs)
        return signed.reshape(*packed.shape[:-1], -1)


CODES = {
    "int8": Code(127, jnp.dtype(jnp.int8)),  # arXiv 1511.04561
    "int4": Code(7, jnp.dtype(jnp.int8), per_byte=2, block=2 * BLOCK),
    "fp8": Code(448, jnp.dtype(jnp.float8_e4m3fn)),
}


def _sizes(code: Code, tensor: Tensor, group: Group) -> tuple[int, int]:
    """Numbers that share a scale, fewer where a server's share is small, and Q."""
    q = -(-tensor.length // group.size)
    block = min(code.block, max(8, 1 << (q - 1).bit_length()))
    return block, _share(tensor, group, block)


def _coded(code: Code, tensors, terms, residuals: Residuals, group: Group, live=None):
    """Numbers in codes, with a scale per block, to the servers and back.

    Sends 1 / `code.per_byte` bytes per number and phase, and a scale per block.
    """
    messages, errors = [], {}
    inputs = _with_errors(tensors, terms, residuals, live)
    for tensor, x_LR in zip(tensors, inputs, strict=True):
        block, q = _sizes(code, tensor, group)
        x_nLQ = _chunks(x_LR, group.size, q)
        codes, scale, sent = code.quantized(x_nLQ, block)
        errors[tensor.name] = _rows(x_nLQ - sent, tensor.length)
        messages.append([codes, scale])
    arrived = _exchanged("all_to_all", messages, group)
    answers, server = [], {}
    for tensor, received in zip(tensors, arrived, strict=True):
        sum_LQ = jnp.sum(code.numbers(*received), axis=0)
        sum_LQ = _plus(residuals.server, tensor.name, sum_LQ)
        codes, scale, sent = code.quantized(sum_LQ, _sizes(code, tensor, group)[0])
        server[tensor.name] = sum_LQ - sent
        answers.append([codes[None], scale[None]])
    arrived, sums = _exchanged("all_gather", answers, group), {}
    for tensor, received in zip(tensors, arrived, strict=True):
        sum_LR = _rows(code.numbers(*received), tensor.length)
        sums[tensor.name] = sum_LR.reshape(tensor.shape)
    return sums, _updated(residuals, errors, server)


def _coded_state(code: Code, tensor: Tensor, group: Group) -> ResidualRows:
    return _feedback(group, errors=None, server=(_sizes(code, tensor, group)[1],))


def _coded_messages(code: Code, tensor: Tensor, group: Group) -> tuple[Message, ...]:
    """Codes and a scale per block, to the servers and back."""
    block, q = _sizes(code, tensor, group)
    own = tensor.rows * (q // code.per_byte + FP32 * q // block)
    return Message("all_to_all", group.size * own), Message("all_gather", own)


# ------------------------------------------------------------------------------------------- top_k


def _top_sizes(tensor: Tensor, group: Group) -> tuple[int, int, int]:
    """Numbers of a block, blocks of a row, and numbers that are sent of each block."""
    block = min(TOP_BLOCK, tensor.length)
    return block, -(-tensor.length // block), max(1, round(group.fraction * block))


def _top_k(tensors, terms, residuals: Residuals, group: Group, live=None):
    """The largest numbers of each block with their positions (arXiv 1712.01887).

    Sends 6 bytes for each number that is chosen, to every other replica.
    """
    messages, errors = [], {}
    inputs = _with_errors(tensors, terms, residuals, live)
    for tensor, x_LR in zip(tensors, inputs, strict=True):
        block, num_blocks, count = _top_sizes(tensor, group)
        padded = jnp.pad(x_LR, ((0, 0), (0, num_blocks * block - tensor.length)))
        blocks = padded.reshape(-1, block)
        _, positions = jax.lax.top_k(jnp.abs(blocks), count)
        values = jnp.take_along_axis(blocks, positions, axis=1)
        left = jnp.put_along_axis(blocks, positions, 0.0, axis=1, inplace=False)
        errors[tensor.name] = left.reshape(tensor.rows, -1)[:, : tensor.length]
        messages.append([values[None], positions.astype(jnp.uint16)[None]])
    arrived, sums = _exchanged("all_gather", messages, group), {}
    for tensor, (values, positions) in zip(tensors, arrived, strict=True):

        def add(total, of_replica):
            # One replica after the other: the positions of one replica are distinct, so that all
            # devices add in the same order.
            values, positions = of_replica
            rows = jnp.arange(values.shape[0])[:, None]
            return total.at[rows, positions.astype(jnp.int32)].add(values), None

        start = jnp.zeros((values.shape[1], _top_sizes(tensor, group)[0]), jnp.float32)
        total, _ = jax.lax.scan(add, start, (values, positions))
        total = total.reshape(tensor.rows, -1)[:, : tensor.length]
        sums[tensor.name] = total.reshape(tensor.shape)
    return sums, _updated(residuals, errors)


def _top_k_messages(tensor: Tensor, group: Group) -> tuple[Message, ...]:
    """Values in fp32 and positions in 16 bits."""
    _, num_blocks, count = _top_sizes(tensor, group)
    return (Message("all_gather", tensor.rows * num_blocks * count * (FP32 + 2)),)


# ------------------------------------------------------------------------------ mean and low_rank


def _mean(tensors, terms, residuals: Residuals, group: Group, live=None):
    """Everything, in its own dtype."""
    names = [tensor.name for tensor in tensors]
    own = [_masked(live, name, terms[name]) for name in names]
    return dict(zip(names, jax.lax.psum(own, group.axis), strict=True)), residuals


def _mean_messages(tensor: Tensor, group: Group) -> tuple[Message, ...]:
    return (Message("all_reduce", FP32 * tensor.rows * tensor.length),)


def _rank(tensor: Tensor, group: Group) -> int:
    """The rank at which a tensor is sent; 0 = in full, where that is not more."""
    if tensor.matrix is None:
        return 0
    _, a, b = tensor.matrix
    return group.rank if group.rank * (a + b) < a * b else 0


def _low_rank(tensors, terms, residuals: Residuals, group: Group, live=None):
    """PowerSGD (arXiv 1905.13727): a step of the power iteration that the last sum ended with.

    Sums rank (a + b) numbers of each shard [a, b] of a matrix, and other tensors in full.
    """
    matrices = [tensor for tensor in tensors if _rank(tensor, group)]
    full = [tensor for tensor in tensors if tensor not in matrices]
    in_fp32 = {tensor.name: terms[tensor.name].astype(jnp.float32) for tensor in full}
    sums, _ = _mean(full, in_fp32, residuals, group, live)
    xs = {}
    for tensor, x_LR in zip(matrices, _with_errors(matrices, terms, residuals, live), strict=True):
        xs[tensor.name] = x_LR.reshape(tensor.matrix)
    with jax.default_matmul_precision("highest"):
        lefts = [xs[tensor.name] @ _query(tensor, residuals, group) for tensor in matrices]
        lefts = [_orthonormal(left) for left in jax.lax.psum(lefts, group.axis)]
        own = [xs[t.name].swapaxes(1, 2) @ left for t, left in zip(matrices, lefts, strict=True)]
        rights = jax.lax.psum(own, group.axis)
        errors, queries = {}, {}
        for tensor, left, mine, right in zip(matrices, lefts, own, rights, strict=True):
            name = tensor.name
            sums[name] = _masked(live, name, (left @ right.swapaxes(1, 2)).reshape(tensor.shape))
            errors[name] = xs[name] - _masked(live, name, left @ mine.swapaxes(1, 2))
            queries[name] = right.reshape(residuals.queries[name].shape)
    return sums, _updated(residuals._replace(queries=queries), errors)


def _query(tensor: Tensor, residuals: Residuals, group: Group) -> jax.Array:
    """Where the power iteration starts, [matrices, b, rank]."""
    matrices, _, b = tensor.matrix
    query = residuals.queries[tensor.name].reshape(matrices, b, -1)
    # Before the first sum there is nothing to start from, and any columns will do.
    start = jnp.cos(jnp.arange(b * group.rank, dtype=jnp.float32) ** 2).reshape(b, group.rank)
    empty = jnp.sum(jnp.abs(query), axis=(1, 2), keepdims=True) == 0
    return jnp.where(empty, start, query)


def _orthonormal(matrix: jax.Array) -> jax.Array:
    """Columns of [L, a, r] made orthonormal, one after the other (Gram-Schmidt, twice)."""
    columns: list[jax.Array] = []
    for i in range(matrix.shape[-1]):
        column = matrix[..., i]
        # Twice: after one pass nearly parallel columns keep rounding errors of each other.
        for before in columns * 2:
            column = column - jnp.sum(column * before, -1, keepdims=True) * before
        norm = jnp.sqrt(jnp.sum(jnp.square(column), -1, keepdims=True))
        columns.append(column / jnp.where(norm > 1e-30, norm, jnp.inf))
    return jnp.stack(columns, axis=-1)


def _low_rank_state(tensor: Tensor, group: Group) -> ResidualRows:
    if not (rank := _rank(tensor, group)):
        return {}
    matrices, _, b = tensor.matrix
    return _feedback(group, errors=None) | {"queries": (matrices // tensor.rows * b, rank)}


def _low_rank_messages(tensor: Tensor, group: Group) -> tuple[Message, ...]:
    """Both factors of a matrix, one after the other."""
    if not (rank := _rank(tensor, group)):
        return _mean_messages(tensor, group)
    matrices, a, b = tensor.matrix
    return tuple(Message("all_reduce", FP32 * matrices * side * rank) for side in (a, b))


COMPRESSORS: dict[str, Compressor] = {
    "mean": Compressor(_mean, lambda tensor, group: {}, _mean_messages),
    "signs": Compressor(_signs, _signs_state, _signs_messages, masks=True),
    **{
        name: Compressor(
            *(functools.partial(part, code) for part in (_coded, _coded_state, _coded_messages))
        )
        for name, code in CODES.items()
    },
    "top_k": Compressor(_top_k, lambda _, group: _feedback(group, errors=None), _top_k_messages),
    "low_rank": Compressor(_low_rank, _low_rank_state, _low_rank_messages),
}

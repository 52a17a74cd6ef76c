"""Sums over replicas that send less than the numbers: signs, int8, the largest, low rank.

For use inside manual regions (`jax.shard_map`) over the mesh axis that crosses the slow network.
Each device has a shard of every tensor, and its replica's term of the sum; every device along the
axis ends with the same sum. What compression leaves out is kept as *error* and goes in with the
next sum (error feedback, arXiv 1901.09847), so that in the long run all that came in is sent:

    sent + errors afterwards = what came in + errors before

Two-phase sums (`signs`, `int8`) are an all-to-all, in which each device becomes the *server* of
1/n of every tensor, and an all-gather of what the servers made of it; servers compress too and keep
errors of their own (arXiv 2102.02888, figure 1). What is compressed travels as bytes, the
tensors fused into buckets.

A tensor is seen as rows [L, R]: one row per layer where layers are stacked, else one row.

Letters: L rows, R numbers of a row on this device, n replicas, Q = R/n rounded up, the server's
share.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from llmx.sharding import mesh_axes

INT8_BLOCK = 256  # numbers that share a scale
TOP_BLOCK = 4096  # numbers of which the largest are taken; positions fit 16 bits


@dataclasses.dataclass(frozen=True)
class Tensor:
    """What a device has of one tensor."""

    name: str
    shape: tuple[int, ...]  # of the shard
    layered: bool  # the first dimension counts layers
    # Mesh axes that split a row, and into how many parts they do.
    over: tuple[str, ...] = ()
    ways: int = 1
    # First dimension of the columns when the tensor is multiplied as a matrix; 0 = it is none.
    columns: int = 0

    @property
    def rows(self) -> int:
        return self.shape[0] if self.layered else 1

    @property
    def length(self) -> int:
        return math.prod(self.shape) // self.rows

    @property
    def matrix(self) -> tuple[int, int, int] | None:
        """[layers, a, b]; None for what has one dimension."""
        if not self.columns:
            return None
        dims = self.shape[1:] if self.layered else self.shape
        at = self.columns - 1 if self.layered else self.columns
        return self.rows, math.prod(dims[:at]), math.prod(dims[at:])


@dataclasses.dataclass(frozen=True)
class Group:
    """The replicas that sum, and how."""

    axis: str
    size: int
    feedback: bool = True  # errors are kept
    bucket_bytes: int = 32 * 2**20  # of what one device sends in one message
    fraction: float = 0.01  # of the numbers that `top_k` sends
    rank: int = 4  # of `low_rank`


class Kept(NamedTuple):
    """What an exchange keeps for the next, by tensor name; a tensor without it is left out."""

    errors: dict[str, jax.Array]  # what this replica has not sent, in the tensor's shape
    server: dict[str, jax.Array]  # what this device has not passed on as a server, [L, Q]
    queries: dict[str, jax.Array]  # low_rank: where the next power iteration begins, [L, b, r]


def tensor(
    name: str,
    shape: Sequence[int],
    axes: Sequence[str],
    spec: jax.sharding.PartitionSpec,
    sizes: dict[str, int],
) -> Tensor:
    """The shard of a tensor of global `shape` with logical `axes`, split as `spec` over a mesh."""
    entries = [mesh_axes(entry) for entry in spec.partitions]
    entries += [()] * (len(shape) - len(entries))
    ways = [math.prod(sizes[axis] for axis in over) for over in entries]
    layered = bool(axes) and axes[0] == "layers"
    first = 1 if layered else 0
    over = tuple(axis for entry in entries[first:] for axis in entry)
    # The model's width on one side of the matrix, all else on the other.
    columns = 0
    if "embed" in axes and len(shape) - first > 1:
        columns = len(shape) - 1 if axes[-1] == "embed" else first + 1
    return Tensor(
        name=name,
        shape=tuple(dim // way for dim, way in zip(shape, ways, strict=True)),
        layered=layered,
        over=over,
        ways=math.prod(ways[first:]),
        columns=columns,
    )


# --------------------------------------------------------------------------------- numbers as bytes

_PLACES = tuple(1 << bit for bit in range(8))


def pack(positive: jax.Array) -> jax.Array:
    """bool [..., 8 k] as uint8 [..., k]."""
    bits = positive.reshape(*positive.shape[:-1], -1, 8)
    return jnp.sum(jnp.where(bits, jnp.array(_PLACES, jnp.uint8), jnp.uint8(0)), -1, jnp.uint8)


def unpack(packed: jax.Array) -> jax.Array:
    """uint8 [..., k] as +1 and -1 in fp32 [..., 8 k]."""
    bits = packed[..., None] & jnp.array(_PLACES, jnp.uint8)
    signs = jnp.where(bits > 0, jnp.float32(1), jnp.float32(-1))
    return signs.reshape(*packed.shape[:-1], -1)


def _bytes(array: jax.Array, leading: int) -> jax.Array:
    """Any array as uint8 [leading, ...]."""
    if array.dtype.itemsize > 1 or array.dtype != jnp.uint8:
        array = jax.lax.bitcast_convert_type(array, jnp.uint8)
    return array.reshape(leading, -1)


def _numbers(raw: jax.Array, dtype: jnp.dtype, shape: Sequence[int]) -> jax.Array:
    """The reverse of `_bytes`."""
    size = jnp.dtype(dtype).itemsize
    raw = raw.reshape(*shape, size) if size > 1 else raw.reshape(shape)
    return jax.lax.bitcast_convert_type(raw, dtype)


def buckets(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Which tensors travel together: neighbours, up to `limit` bytes; a larger one goes alone."""
    found: list[list[int]] = []
    room = 0
    for i, size in enumerate(sizes):
        if not found or size > room:
            found.append([])
            room = limit
        found[-1].append(i)
        room -= size
    return found


def _in_buckets(
    messages: Sequence[Sequence[jax.Array]], travel: Callable, leading: int, limit: int
) -> list[list[jax.Array]]:
    """Each tensor's arrays [leading, ...] sent by `travel`, which takes and gives uint8 [n, bytes].

    Returns the arrays [n, ...] as they arrive.
    """
    flat = [[_bytes(array, leading) for array in message] for message in messages]
    sizes = [sum(array.size for array in message) for message in flat]
    arrived: list[list[jax.Array]] = [[] for _ in messages]
    for bucket in buckets(sizes, limit):
        parts = [array for i in bucket for array in flat[i]]
        got = travel(jnp.concatenate(parts, axis=1))
        at = 0
        for i in bucket:
            for array, part in zip(messages[i], flat[i], strict=True):
                width = part.shape[1]
                shape = (got.shape[0], *array.shape[1:])
                arrived[i].append(_numbers(got[:, at : at + width], array.dtype, shape))
                at += width
    return arrived


def _to_servers(group: Group, messages):
    """[n, ...] of each tensor, of which row j goes to server j; [n, ...], row i from replica i."""
    swap = lambda raw: jax.lax.all_to_all(raw, group.axis, 0, 0, tiled=True)  # noqa: E731
    return _in_buckets(messages, swap, group.size, group.bucket_bytes)


def _from_all(group: Group, messages):
    """[1, ...] of each tensor, sent to all; [n, ...], row i from device i."""
    gather = lambda raw: jax.lax.all_gather(raw, group.axis, axis=0, tiled=True)  # noqa: E731
    return _in_buckets(messages, gather, 1, group.bucket_bytes)


# ----------------------------------------------------------------------------------- two-phase sums


def share(length: int, group_size: int, multiple: int) -> int:
    """Q: a server's numbers of a row of `length`."""
    return -(-length // (group_size * multiple)) * multiple


def _chunks(array_LR: jax.Array, size: int, q: int) -> jax.Array:
    """[L, R] as [n, L, Q], padded with zeros."""
    rows, length = array_LR.shape
    padded = jnp.pad(array_LR, ((0, 0), (0, size * q - length)))
    return padded.reshape(rows, size, q).swapaxes(0, 1)


def _rows(chunks_nLQ: jax.Array, length: int) -> jax.Array:
    size, rows, q = chunks_nLQ.shape
    return chunks_nLQ.swapaxes(0, 1).reshape(rows, size * q)[:, :length]


def _with_errors(tensors, terms, errors):
    """fp32 [L, R]: terms, and what was not sent of the ones before."""
    found = []
    for each in tensors:
        x_LR = terms[each.name].astype(jnp.float32).reshape(each.rows, each.length)
        if each.name in errors:
            x_LR = x_LR + errors[each.name].reshape(x_LR.shape)
        found.append(x_LR)
    return found


def _sum_over(over: Sequence[str], array: jax.Array) -> jax.Array:
    return jax.lax.psum(array, tuple(over)) if over else array


def _magnitude(each: Tensor, over: Sequence[str], x_LR, live_LR) -> jax.Array:
    """Mean size of the live numbers of each whole row [L]."""
    total, count = jnp.abs(x_LR).sum(1), live_LR.sum(1, dtype=jnp.float32)
    total, count = _sum_over((*over, *each.over), jnp.stack([total, count]))
    return total / jnp.maximum(count, 1)


def signs(
    tensors: Sequence[Tensor],
    terms: dict[str, jax.Array],
    kept: Kept,
    group: Group,
    live: dict[str, jax.Array] | None = None,
) -> tuple[dict[str, jax.Array], Kept]:
    """Each number as its sign, and one scale per row: the mean size of its numbers.

    `live`: bool in the shape of a tensor, the same on all replicas; numbers that are not live stay
    zero, in the sum and in the errors. Sends 1/8 byte per number and phase.

    Scales are of whole rows, whatever splits them: results do not depend on how a replica is split.
    """
    n, me = group.size, jax.lax.axis_index(group.axis)
    xs_LR = _with_errors(tensors, terms, kept.errors)
    messages, errors, masks = [], {}, []
    for each, in_LR in zip(tensors, xs_LR, strict=True):
        live_LR = jnp.ones(in_LR.shape, bool)
        if live is not None:
            live_LR = live[each.name].reshape(in_LR.shape)
        x_LR = jnp.where(live_LR, in_LR, 0)
        positive_LR = x_LR >= 0
        scale_L = _magnitude(each, (), x_LR, live_LR)
        sent_LR = jnp.where(positive_LR, scale_L[:, None], -scale_L[:, None])
        errors[each.name] = jnp.where(live_LR, x_LR - sent_LR, 0)
        q = share(each.length, n, 8)
        bits = pack(_chunks(positive_LR, n, q))
        messages.append([bits, jnp.broadcast_to(scale_L, (n, each.rows))])
        masks.append(_chunks(live_LR, n, q)[me])
    answers, server = [], {}
    for each, live_LQ, (bits, scales_nL) in zip(
        tensors, masks, _to_servers(group, messages), strict=True
    ):
        sum_LQ = jnp.sum(scales_nL[..., None] * unpack(bits), axis=0)
        if each.name in kept.server:
            sum_LQ = sum_LQ + kept.server[each.name].reshape(sum_LQ.shape)
        sum_LQ = jnp.where(live_LQ, sum_LQ, 0)
        scale_L = _magnitude(each, (group.axis,), sum_LQ, live_LQ)
        positive_LQ = sum_LQ >= 0
        sent_LQ = jnp.where(positive_LQ, scale_L[:, None], -scale_L[:, None])
        server[each.name] = jnp.where(live_LQ, sum_LQ - sent_LQ, 0)
        answers.append(([pack(positive_LQ)[None]], scale_L))
    sums = {}
    gathered = _from_all(group, [message for message, _ in answers])
    for each, (_, scale_L), (bits,) in zip(tensors, answers, gathered, strict=True):
        sum_LR = scale_L[:, None] * _rows(unpack(bits), each.length)
        if live is not None:
            sum_LR = jnp.where(live[each.name].reshape(sum_LR.shape), sum_LR, 0)
        sums[each.name] = sum_LR.reshape(each.shape)
    return sums, _kept(group, kept, errors, server)


def int8_block(length: int, group_size: int) -> int:
    """Numbers that share a scale: fewer where a server's share is small."""
    q = -(-length // group_size)
    return min(INT8_BLOCK, max(8, 1 << (q - 1).bit_length()))


def _quantized(x: jax.Array, block: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """int8 [..., Q], scales [..., Q / block], and what they stand for."""
    blocks = x.reshape(*x.shape[:-1], -1, block)
    scale = jnp.max(jnp.abs(blocks), axis=-1) / 127
    steps = blocks / jnp.where(scale > 0, scale, 1)[..., None]
    whole = jnp.round(steps).astype(jnp.int8)
    return whole.reshape(x.shape), scale, _dequantized(whole.reshape(x.shape), scale)


def _dequantized(whole: jax.Array, scale: jax.Array) -> jax.Array:
    blocks = whole.reshape(*scale.shape, -1).astype(jnp.float32) * scale[..., None]
    return blocks.reshape(whole.shape)


def int8(tensors, terms, kept: Kept, group: Group) -> tuple[dict[str, jax.Array], Kept]:
    """Each number as a multiple of 1/127 of the largest of its block (arXiv 1511.04561).

    Sends 1 byte per number and phase, and 4 per block.
    """
    n = group.size
    messages, errors = [], {}
    for each, x_LR in zip(tensors, _with_errors(tensors, terms, kept.errors), strict=True):
        block = int8_block(each.length, n)
        x_nLQ = _chunks(x_LR, n, share(each.length, n, block))
        whole, scale, sent = _quantized(x_nLQ, block)
        errors[each.name] = _rows(x_nLQ - sent, each.length)
        messages.append([whole, scale])
    answers, server = [], {}
    for each, arrived in zip(tensors, _to_servers(group, messages), strict=True):
        sum_LQ = jnp.sum(_dequantized(*arrived), axis=0)
        if each.name in kept.server:
            sum_LQ = sum_LQ + kept.server[each.name].reshape(sum_LQ.shape)
        whole, scale, sent = _quantized(sum_LQ, int8_block(each.length, n))
        server[each.name] = sum_LQ - sent
        answers.append([whole[None], scale[None]])
    sums = {}
    for each, (whole, scale) in zip(tensors, _from_all(group, answers), strict=True):
        sum_LR = _rows(_dequantized(whole, scale), each.length)
        sums[each.name] = sum_LR.reshape(each.shape)
    return sums, _kept(group, kept, errors, server)


def _kept(group: Group, before: Kept, errors: dict, server: dict) -> Kept:
    """What is kept, each in the shape in which it was."""
    if not group.feedback:
        return before
    shaped = lambda new, old: {name: new[name].reshape(old[name].shape) for name in old}  # noqa: E731
    return before._replace(
        errors=shaped(errors, before.errors), server=shaped(server, before.server)
    )


# ----------------------------------------------------------------------------------- one-phase sums


def mean(tensors, terms, kept: Kept, group: Group) -> tuple[dict[str, jax.Array], Kept]:
    """All that came in, in its own dtype."""
    names = [each.name for each in tensors]
    sums = jax.lax.psum([terms[name] for name in names], group.axis)
    return dict(zip(names, sums, strict=True)), kept


def top_block(length: int) -> int:
    """Numbers of which `top_k` takes the largest."""
    return min(TOP_BLOCK, length)


def num_top(length: int, fraction: float) -> int:
    """How many it takes of each."""
    return max(1, round(fraction * top_block(length)))


def top_k(tensors, terms, kept: Kept, group: Group) -> tuple[dict[str, jax.Array], Kept]:
    """The largest numbers of each block with their positions (arXiv 1712.01887).

    Sends 6 bytes for each number that is taken, to every other replica.
    """
    messages, errors = [], {}
    for each, x_LR in zip(tensors, _with_errors(tensors, terms, kept.errors), strict=True):
        block = top_block(each.length)
        rows = -(-each.length // block)
        padded = jnp.pad(x_LR, ((0, 0), (0, rows * block - each.length)))
        blocks = padded.reshape(-1, block)
        _, places = jax.lax.top_k(jnp.abs(blocks), num_top(each.length, group.fraction))
        values = jnp.take_along_axis(blocks, places, axis=1)
        left = jnp.put_along_axis(blocks, places, 0.0, axis=1, inplace=False)
        errors[each.name] = left.reshape(each.rows, -1)[:, : each.length]
        messages.append([values[None], places.astype(jnp.uint16)[None]])
    sums = {}
    for each, (values, places) in zip(tensors, _from_all(group, messages), strict=True):
        block = top_block(each.length)

        def add(total, taken, block=block):
            # One replica after the other: no two of its positions are the same, so that the sum is
            # taken in the same order on all devices.
            values, places = taken
            rows = jnp.arange(values.shape[0])[:, None]
            return total.at[rows, places.astype(jnp.int32)].add(values), None

        start = jnp.zeros((values.shape[1], block), jnp.float32)
        total, _ = jax.lax.scan(add, start, (values, places))
        total = total.reshape(each.rows, -1)[:, : each.length]
        sums[each.name] = total.reshape(each.shape)
    return sums, _kept(group, kept, errors, {})


def rank_of(each: Tensor, rank: int) -> int:
    """The rank at which a tensor is sent; 0 = as it is, which is not more."""
    if each.matrix is None:
        return 0
    _, a, b = each.matrix
    return rank if rank * (a + b) < a * b else 0


def low_rank(tensors, terms, kept: Kept, group: Group) -> tuple[dict[str, jax.Array], Kept]:
    """PowerSGD (arXiv 1905.13727): one step of a power iteration from where the last one ended.

    Of each shard [a, b] of a matrix r (a + b) numbers are summed; what is no matrix is summed as it
    is.
    """
    flat = [each for each in tensors if not rank_of(each, group.rank)]
    matrices = [each for each in tensors if rank_of(each, group.rank)]
    sums, _ = mean(flat, {e.name: terms[e.name].astype(jnp.float32) for e in flat}, kept, group)
    xs = {}
    for each, x_LR in zip(matrices, _with_errors(matrices, terms, kept.errors), strict=True):
        xs[each.name] = x_LR.reshape(each.matrix)
    with jax.default_matmul_precision("highest"):
        multiply = lambda each: xs[each.name] @ _query(each, kept, group)  # noqa: E731
        lefts = jax.lax.psum([multiply(each) for each in matrices], group.axis)
        lefts = [_orthonormal(left) for left in lefts]
        turn = lambda each, left: xs[each.name].swapaxes(1, 2) @ left  # noqa: E731
        own = [turn(each, left) for each, left in zip(matrices, lefts, strict=True)]
        rights = jax.lax.psum(own, group.axis)
        errors, queries = {}, {}
        for each, left, mine, right in zip(matrices, lefts, own, rights, strict=True):
            sums[each.name] = (left @ right.swapaxes(1, 2)).reshape(each.shape)
            errors[each.name] = xs[each.name] - left @ mine.swapaxes(1, 2)
            queries[each.name] = right.reshape(kept.queries[each.name].shape)
    return sums, _kept(group, kept._replace(queries=queries), errors, {})


def _query(each: Tensor, kept: Kept, group: Group) -> jax.Array:
    layers, _, b = each.matrix
    query = kept.queries[each.name].reshape(layers, b, -1)
    # Where nothing has been seen of a matrix, any columns will do.
    start = jnp.cos(jnp.arange(b * group.rank, dtype=jnp.float32) ** 2).reshape(b, group.rank)
    empty = jnp.sum(jnp.abs(query), axis=(1, 2), keepdims=True) == 0
    return jnp.where(empty, start, query)


def _orthonormal(matrix: jax.Array) -> jax.Array:
    """Columns of [L, a, r] made orthonormal, one after the other (Gram-Schmidt, twice)."""
    columns: list[jax.Array] = []
    for i in range(matrix.shape[-1]):
        column = matrix[..., i]
        # Twice: after once, columns that were nearly parallel keep a rounding of each other.
        for done in columns * 2:
            column = column - jnp.sum(column * done, -1, keepdims=True) * done
        norm = jnp.sqrt(jnp.sum(jnp.square(column), -1, keepdims=True))
        columns.append(column / jnp.where(norm > 1e-30, norm, jnp.inf))
    return jnp.stack(columns, axis=-1)


def message_bytes(exchange: str, each: Tensor, group: Group) -> int:
    """Bytes of a tensor in the first message of an exchange; 0 = it does not travel as bytes."""
    n, rows = group.size, each.rows
    if exchange == "signs":
        return n * rows * (share(each.length, n, 8) // 8 + 4)
    if exchange == "int8":
        block = int8_block(each.length, n)
        q = share(each.length, n, block)
        return n * rows * (q + 4 * (q // block))
    if exchange == "top_k":
        blocks = rows * -(-each.length // top_block(each.length))
        return 6 * blocks * num_top(each.length, group.fraction)
    return 0


EXCHANGES: dict[str, Callable] = {
    "mean": mean,
    "signs": signs,
    "int8": int8,
    "top_k": top_k,
    "low_rank": low_rank,
}

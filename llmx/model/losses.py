"""Cross-entropy against a head split over vocabulary and width, in chunks of the vocabulary.

The logits (B T V numbers in fp32) would be the largest array of a train step. They never exist
whole: each chunk of the vocabulary is gathered over the replicas that split its width, turned into
logits and folded into a running log-sum-exp. The backward pass reduce-scatters each chunk's weight
gradient at once: neither a gathered head nor its whole gradient exists.

Sources: online softmax (arXiv 1805.02867), vocabulary-parallel cross-entropy (arXiv 1909.08053),
cut cross-entropy (arXiv 2411.09009), z-loss (arXiv 2204.02311).

Letters: B batch, T positions, D width, V vocabulary, n = B T local tokens, C rows of the head in
one chunk.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from llmx import sharding
from llmx.model import dot, precision, quantized
from llmx.model.embedding import SplitTable
from llmx.runtime.bounds import bounded, choice
from llmx.sharding import mesh_axes

# Automatic chunks: local logits of a chunk stay under this many bytes and rows, or twice as many.
CHUNK_BYTES = 512 * 2**20
CHUNK_ROWS = 32 * 1024
# Rows of a chunk are a multiple of this where they can be: 16 bytes of bf16. Of an H200's products
# of other widths some took twice as long (docs/performance.md).
ALIGNED = 8
MOST_TIMES = 4  # as many parts as the limits ask for, where rows have few divisors


NATS = "nats"
# What a token adds to what training minimizes: (nats_BT, log_z_BT) -> fp32 [B, T], differentiable
# and of each token by itself. Reports and evaluations stay in nats. Config files may add rows.
# None: the nats themselves.
OF_TOKENS: dict[str, Callable[[jax.Array, jax.Array], jax.Array] | None] = {NATS: None}


@dataclasses.dataclass
class LossConfig:
    """The training loss."""

    of_tokens: str = choice(NATS, lambda: OF_TOKENS)  # what is minimized: a name in OF_TOKENS
    z_loss: float = bounded(0.0, at_least=0)  # times log(Z)^2, against drift; 1e-4 is common
    chunks: int = bounded(0, at_least=0)  # of the vocabulary, to make logits in; 0 = by their size


@dataclasses.dataclass(frozen=True)
class HeadLoss:
    """Static facts of one loss."""

    split: SplitTable  # the head and the targets
    x: PartitionSpec  # B T D
    num_chunks: int
    num_real: int
    softcap: float

    @property
    def gathered(self) -> tuple[str, ...]:
        """Mesh axes that split the positions of x but not of the targets."""
        of_targets = mesh_axes(self.split.tokens[1])
        return tuple(axis for axis in mesh_axes(self.x[1]) if axis not in of_targets)

    @property
    def logits(self) -> PartitionSpec | None:
        """Of the logits that are saved: with one chunk, as making them again would cost more."""
        if self.num_chunks > 1:
            return None
        return PartitionSpec(*self.split.tokens.partitions, self.split.table.partitions[0])


def token_losses(
    x_BTD: Float[Array, "B T D"], head_VD: Float[Array, "V D"], targets_BT: Int[Array, "B T"], *,
    num_real: int, softcap: float, chunks: int, place: sharding.Placement, policy: precision.Policy,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:  # fmt: skip
    """Per-token -log p(target), and log Z, in nats, fp32.

    Args:
      x_BTD, head_VD: the last hidden state after its norm; the head, one row per (padded) token.
      targets_BT: the token that follows, below `num_real`.
      num_real: rows of the head from here on are padding and have no probability.
      softcap: c tanh(logit / c); 0 = off.
      chunks: of the vocabulary; 0 = by size; must divide the rows of the head on a device.
      place, policy: where arrays live, and their dtypes.

    Communicates: gathers of positions that x is split by and the targets are not; per chunk, a
    gather over the mesh axes that split D; sums [n] over those that split V. In the backward pass
    also a reduce-scatter of each chunk's gradient, and a sum of the gradient of x.

    Raises ValueError where `chunks` does not divide.
    """
    settings = dict(num_real=num_real, softcap=softcap, chunks=chunks, place=place, policy=policy)
    loss = head_loss(x_BTD, head_VD, targets_BT, **settings)
    return _token_losses(loss, x_BTD, head_VD, targets_BT)


def token_scores(
    x_BTD: Float[Array, "B T D"], head_VD: Float[Array, "V D"], targets_BT: Int[Array, "B T"],
    **settings: Any,
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:  # fmt: skip
    """Per-token -log p(target) in nats, and whether no token is likelier; without a gradient.

    Arguments, communication and errors are those of `token_losses`.
    """
    loss = head_loss(x_BTD, head_VD, targets_BT, **settings)

    def local(x_BTD, head_VD, targets_BT):
        (top_n, total_n, hit_n), _ = _folded(loss, x_BTD, head_VD, targets_BT)
        nats_n, likeliest_n = top_n + jnp.log(total_n) - hit_n, hit_n >= top_n
        return nats_n.reshape(targets_BT.shape), likeliest_n.reshape(targets_BT.shape)

    split = loss.split
    return jax.shard_map(
        local, mesh=split.mesh, in_specs=(loss.x, split.table, split.tokens),
        out_specs=(split.tokens, split.tokens), check_vma=False,
    )(x_BTD, head_VD, targets_BT)  # fmt: skip


def head_loss(
    x_BTD: Array, head_VD: Array, targets_BT: Array, *, num_real: int, softcap: float, chunks: int,
    place: sharding.Placement, policy: precision.Policy,
) -> HeadLoss:  # fmt: skip
    head = jax.typeof(head_VD).sharding.spec
    tokens = place.activation(("batch", "sequence"))
    local_rows = head_VD.shape[0] // place.size(mesh_axes(head.partitions[0]))
    ways = place.size(sharding.used_axes(tokens))
    loss = HeadLoss(
        split=SplitTable(place.mesh, head, tokens, policy), x=jax.typeof(x_BTD).sharding.spec,
        num_chunks=chunks or num_chunks(targets_BT.size // ways, local_rows),
        num_real=num_real, softcap=softcap,
    )  # fmt: skip
    if local_rows % loss.num_chunks:
        raise ValueError(
            f"loss.chunks={chunks} does not divide the {local_rows} rows of the head on each "
            "device: use a divisor, or 0 to have one chosen"
        )
    return loss


def most_rows(num_tokens: int) -> int:
    """Rows of a part under the limits above."""
    return max(1, min(CHUNK_ROWS, CHUNK_BYTES // (4 * num_tokens)))


def num_chunks(num_tokens: int, num_rows: int) -> int:
    """The fewest parts of `num_rows` that keep the logits of a part under the limits above.

    If their rows are no multiple of `ALIGNED`, the nearest number of parts with such rows: up to
    twice as many, or else fewer, of up to twice the limits. Where rows have so few divisors that
    there would be more than `MOST_TIMES` as many as the limits ask for, the most of up to twice
    the limits. The same on all devices, so that a run is the same wherever it goes on.
    """
    limit = most_rows(num_tokens)
    small = [n for n in range(1, math.isqrt(num_rows) + 1) if num_rows % n == 0]
    divisors = sorted({*small, *(num_rows // n for n in small)})
    parts = [n for n in divisors if num_rows // n <= 2 * limit]
    fewest = next(n for n in parts if num_rows // n <= limit)
    if parts[0] < fewest and fewest > MOST_TIMES * -(-num_rows // limit):
        fewest = max(n for n in parts if n < fewest)
    aligned = [n for n in parts if num_rows // n % ALIGNED == 0 and n <= 2 * fewest]
    more, fewer = [n for n in aligned if n >= fewest], [n for n in aligned if n < fewest]
    return min(more, default=max(fewer, default=fewest))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _token_losses(loss: HeadLoss, x_BTD, head_VD, targets_BT):
    return _forward(loss, x_BTD, head_VD, targets_BT)[0]


def _forward(loss: HeadLoss, x_BTD, head_VD, targets_BT):
    split, arrays = loss.split, (x_BTD, head_VD, targets_BT)
    loss_BT, log_z_BT, logits_BTV = jax.shard_map(
        functools.partial(_forward_local, loss), mesh=split.mesh,
        in_specs=(loss.x, split.table, split.tokens),
        out_specs=(split.tokens, split.tokens, loss.logits), check_vma=False,
    )(*arrays)  # fmt: skip
    return (loss_BT, log_z_BT), (*arrays, log_z_BT, logits_BTV)


def _backward(loss: HeadLoss, residuals, gradients):
    split = loss.split
    gradient_x, gradient_head = jax.shard_map(
        functools.partial(_backward_local, loss), mesh=split.mesh,
        in_specs=(loss.x, split.table, *[split.tokens] * 2, loss.logits, *[split.tokens] * 2),
        out_specs=(loss.x, split.gradient), check_vma=False,
    )(*residuals, *gradients)  # fmt: skip
    return gradient_x, gradient_head, None


_token_losses.defvjp(_forward, _backward)


def whole_positions(loss: HeadLoss, x_BTD):
    """[n, D], with the positions of all devices along `loss.gathered`."""
    if loss.gathered:
        x_BTD = jax.lax.all_gather(x_BTD, loss.gathered, axis=1, tiled=True)
    return x_BTD.reshape(-1, x_BTD.shape[-1])


def chunks_of(loss: HeadLoss, head_VD):
    """The local head as (chunks, C, D) and the vocabulary index of each chunk's first row."""
    size = head_VD.shape[0] // loss.num_chunks
    first = loss.split.first_row(head_VD.shape[0])
    return head_VD.reshape(loss.num_chunks, size, -1), first + size * jnp.arange(loss.num_chunks)


def gathered_chunk(loss: HeadLoss, chunk_CD):
    """A chunk in the compute dtype, gathered over the mesh axes that split its width."""
    chunk_CD = dot.cast(chunk_CD, loss.split.policy.compute)
    if (form := loss.split.policy.numbers.head) is not None:
        return quantized.gathered_rows(chunk_CD, form, loss.split.width)
    if loss.split.width:
        chunk_CD = jax.lax.all_gather(chunk_CD, loss.split.width, axis=1, tiled=True)
    return chunk_CD


def only_chunk(loss: HeadLoss, head_VD):
    """The gathered head and the index of its first row, where there is one chunk."""
    (chunk_CD,), (first,) = chunks_of(loss, head_VD)
    return gathered_chunk(loss, chunk_CD), first


def each_chunk(loss: HeadLoss, step, start, head_VD):
    """`step(carry, gathered chunk, index of its first row)` for one chunk after the other.

    Each is gathered beside the work on the one before. At the end the first is gathered again, for
    nobody: so the loop has one body, and collectives stand in no branch.
    """
    chunks, firsts = chunks_of(loss, head_VD)
    if not loss.split.width:
        gathered = lambda carry, chunk: step(carry, gathered_chunk(loss, chunk[0]), chunk[1])  # noqa: E731
        return jax.lax.scan(gathered, start, (chunks, firsts))

    def turn(carry_and_chunk, number):
        carry, chunk_CD = carry_and_chunk
        following = jax.lax.dynamic_index_in_dim(
            chunks, (number + 1) % loss.num_chunks, keepdims=False
        )
        following_CD = gathered_chunk(loss, following)
        carry, out = step(carry, chunk_CD, firsts[number])
        return (carry, following_CD), out

    begin = (start, gathered_chunk(loss, chunks[0]))
    (carry, _), outs = jax.lax.scan(turn, begin, jnp.arange(loss.num_chunks))
    return carry, outs


def chunk_logits(loss: HeadLoss, x_nD, chunk_CD, first):
    """fp32 logits [n, C] of one gathered chunk."""
    logits_nC = jnp.einsum("nD,CD->nC", x_nD, chunk_CD, preferred_element_type=jnp.float32)
    if loss.softcap:
        logits_nC = loss.softcap * jnp.tanh(logits_nC / loss.softcap)
    padding_C = first + jnp.arange(chunk_CD.shape[0]) >= loss.num_real
    return jnp.where(padding_C, -jnp.inf, logits_nC)


def _forward_local(loss: HeadLoss, x_BTD, head_VD, targets_BT):
    (top_n, total_n, hit_n), logits_BTV = _folded(loss, x_BTD, head_VD, targets_BT)
    log_z_n = top_n + jnp.log(total_n)
    loss_BT, log_z_BT = (array.reshape(targets_BT.shape) for array in (log_z_n - hit_n, log_z_n))
    return loss_BT, log_z_BT, logits_BTV


def _folded(loss: HeadLoss, x_BTD, head_VD, targets_BT):
    """The largest logit of each token, the sum of exp(logit - largest), and the target's logit, [n]
    each; and all logits where there is one chunk, else None."""
    split, x_nD = loss.split, whole_positions(loss, x_BTD)
    targets_n = targets_BT.reshape(-1)

    def fold(carry, chunk_CD, first):
        top_n, total_n, hit_n = carry
        logits_nC = chunk_logits(loss, x_nD, chunk_CD, first)
        # A finite floor keeps a chunk of padding only from making inf - inf.
        new_top_n = jnp.maximum(top_n, logits_nC.max(axis=-1))
        total_n = total_n * jnp.exp(top_n - new_top_n)
        total_n = total_n + jnp.exp(logits_nC - new_top_n[:, None]).sum(axis=-1)
        column_n = targets_n - first
        inside_n = (column_n >= 0) & (column_n < logits_nC.shape[1])
        picked_n = jnp.take_along_axis(logits_nC, column_n[:, None], axis=1, mode="clip")[:, 0]
        return (new_top_n, total_n, hit_n + jnp.where(inside_n, picked_n, 0)), logits_nC

    floor_n = jnp.full(targets_n.shape, jnp.finfo(jnp.float32).min)
    carry = (floor_n, jnp.zeros_like(floor_n), jnp.zeros_like(floor_n))
    if loss.num_chunks == 1:
        (top_n, total_n, hit_n), logits_nV = fold(carry, *only_chunk(loss, head_VD))
        logits_BTV = logits_nV.reshape(*targets_BT.shape, -1)
    else:
        (top_n, total_n, hit_n), logits_BTV = each_chunk(
            loss, lambda *arrays: (fold(*arrays)[0], None), carry, head_VD
        )
    if split.vocab:
        all_top_n = jax.lax.pmax(top_n, split.vocab)
        total_n = jax.lax.psum(total_n * jnp.exp(top_n - all_top_n), split.vocab)
        hit_n, top_n = jax.lax.psum(hit_n, split.vocab), all_top_n
    return (top_n, total_n, hit_n), logits_BTV


def _backward_local(
    loss, x_BTD, head_VD, targets_BT, log_z_BT, logits_BTV, gradient_loss_BT, gradient_log_z_BT
):
    x_nD = whole_positions(loss, x_BTD)
    targets_n, log_z_n = targets_BT.reshape(-1), log_z_BT.reshape(-1)
    gradient_loss_n = gradient_loss_BT.reshape(-1)
    gradient_both_n = gradient_loss_n + gradient_log_z_BT.reshape(-1)

    def walk(gradient_x_nD, chunk_CD, first, logits_nC=None):
        if logits_nC is None:
            logits_nC = chunk_logits(loss, x_nD, chunk_CD, first)
        # d loss / d logit = softmax - [target], d log Z / d logit = softmax.
        gradient_nC = jnp.exp(logits_nC - log_z_n[:, None]) * gradient_both_n[:, None]
        target_nC = (targets_n[:, None] - first) == jnp.arange(logits_nC.shape[1])
        gradient_nC = gradient_nC - jnp.where(target_nC, gradient_loss_n[:, None], 0)
        gradient_nC = slope(loss, gradient_nC, logits_nC)
        return gradients_of(loss, gradient_x_nD, gradient_nC, x_nD, chunk_CD, head_VD.dtype)

    start_nD = jnp.zeros(x_nD.shape, jnp.float32)
    if logits_BTV is not None:
        logits_nV = logits_BTV.reshape(-1, logits_BTV.shape[-1])
        chunk = only_chunk(loss, head_VD)
        gradient_x_nD, gradient_head = walk(start_nD, *chunk, logits_nV)
    else:
        gradient_x_nD, gradient_head = each_chunk(loss, walk, start_nD, head_VD)
    gradient_x = gradient_of_x(loss, gradient_x_nD, x_BTD, targets_BT)
    return gradient_x, gradient_head.reshape(head_VD.shape)


def slope(loss: HeadLoss, gradient_nC, logits_nC):
    """The gradient of logits before their cap, of that of the capped ones."""
    if not loss.softcap:
        return gradient_nC
    slope_nC = 1 - jnp.square(logits_nC / loss.softcap)
    return jnp.where(jnp.isinf(logits_nC), 0, gradient_nC * slope_nC)


def gradients_of(loss: HeadLoss, gradient_x_nD, gradient_nC, x_nD, chunk_CD, dtype):
    """The gradient of x with what this chunk adds to it, fp32 [n, D], and that of the chunk, where
    it belongs, of the gradient of its logits."""
    split = loss.split
    gradient_nC = gradient_nC.astype(split.policy.compute)
    gradient_x_nD += jnp.einsum(
        "nC,CD->nD", gradient_nC, chunk_CD, preferred_element_type=jnp.float32
    )
    gradient_CD = jnp.einsum(
        "nC,nD->CD", gradient_nC, x_nD, preferred_element_type=split.policy.reduce
    )
    if split.width:
        gradient_CD = sharding.psum_scatter(gradient_CD, split.width, dimension=1)
    if split.summed:
        gradient_CD = jax.lax.psum(gradient_CD, split.summed)
    return gradient_x_nD, gradient_CD.astype(dtype)


def gradient_of_x(loss: HeadLoss, gradient_x_nD, x_BTD, targets_BT):
    """The gradient of x on this device, of the sum over its part of the vocabulary."""
    gradient_x = gradient_x_nD.reshape(*targets_BT.shape, -1).astype(x_BTD.dtype)
    if loss.gathered:
        gradient_x = sharding.psum_scatter(gradient_x, loss.gathered, dimension=1, exchange=False)
    if over := tuple(axis for axis in loss.split.vocab if axis not in loss.gathered):
        gradient_x = jax.lax.psum(gradient_x, over)
    return gradient_x

"""What a student loses against its teacher, without the logits of either: in chunks of the
vocabulary, as `losses` does.

`against_head` compares with the teacher's head, chunk by chunk: both heads are gathered, turned
into logits and folded into running sums of exp and of the difference of logits. `picked_logits`
gives the student's logits of a few tokens, to be compared with what a teacher said of these.

Sources: distillation with a temperature (arXiv 1503.02531), the divergence in the reverse direction
(arXiv 2306.08543), and `losses`.

Letters: B batch, T positions, D width of the student, E of the teacher, V vocabulary, n = B T local
tokens, C rows of a head in one chunk, K tokens that are picked.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from llmx.model import losses
from llmx.model.losses import HeadLoss


@dataclasses.dataclass(frozen=True)
class _Pair:
    """Static facts of a loss against a teacher."""

    student: HeadLoss
    teacher: HeadLoss
    temperature: float
    reverse: bool


def against_head(
    x_BTD: Float[Array, "B T D"], head_VD: Float[Array, "V D"], targets_BT: Int[Array, "B T"],
    teacher_BTE: Float[Array, "B T E"], teacher_VE: Float[Array, "V E"], *,
    temperature: float, reverse: bool, teacher_softcap: float, **settings: Any,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"], Float[Array, "B T"]]:  # fmt: skip
    """Per-token -log p(target), log Z, and the divergence of teacher and student, in nats, fp32.

    With p, q the softmax of the teacher's and the student's logits / temperature: KL(p || q), or
    with `reverse` KL(q || p). The gradient goes to x and head; the teacher has none.

    Args:
      x_BTD, head_VD, targets_BT, settings: as of `losses.token_losses`.
      teacher_BTE, teacher_VE: the same of the teacher, positions in the same order.

    Communicates as `losses.token_losses` does, and gathers the teacher's head and positions.
    Raises ValueError as that does, and where the heads are not split alike.
    """
    student = losses.head_loss(x_BTD, head_VD, targets_BT, **settings)
    own = settings | dict(chunks=student.num_chunks, softcap=teacher_softcap)
    teacher = losses.head_loss(teacher_BTE, teacher_VE, targets_BT, **own)
    rows = head_VD.shape[0], student.split.vocab
    if rows != (of_teacher := (teacher_VE.shape[0], teacher.split.vocab)):
        raise ValueError(
            f"the teacher's head has {of_teacher[0]} rows split over {of_teacher[1]}, the "
            f"student's {rows[0]} over {rows[1]}: use the same padded vocabulary"
        )
    pair = _Pair(student, teacher, temperature, reverse)
    given = map(jax.lax.stop_gradient, (teacher_BTE, teacher_VE))
    return _against_head(pair, x_BTD, head_VD, targets_BT, *given)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _against_head(pair: _Pair, *arrays):
    return _forward(pair, *arrays)[0]


def _specs(pair: _Pair) -> tuple[PartitionSpec, ...]:
    """Of x, head, targets, and of the teacher's x and head."""
    student, teacher = pair.student, pair.teacher
    own = student.x, student.split.table, student.split.tokens
    return *own, teacher.x, teacher.split.table


def _forward(pair: _Pair, *arrays):
    tokens, logits = pair.student.split.tokens, pair.student.logits
    found, log_zs, both = jax.shard_map(
        functools.partial(_forward_local, pair), mesh=pair.student.split.mesh,
        in_specs=_specs(pair), out_specs=((tokens,) * 3, (tokens,) * 2, (logits,) * 2),
        check_vma=False,
    )(*arrays)  # fmt: skip
    return found, (arrays, found, log_zs, both)


def _backward(pair: _Pair, residuals, gradients):
    arrays, (_, log_z_BT, divergence_BT), log_zs, both = residuals
    split = pair.student.split
    tokens, logits = split.tokens, pair.student.logits
    gradient_x, gradient_head = jax.shard_map(
        functools.partial(_backward_local, pair), mesh=split.mesh,
        in_specs=(_specs(pair), (tokens,) * 4, (logits,) * 2, (tokens,) * 3),
        out_specs=(pair.student.x, split.gradient), check_vma=False,
    )(arrays, (log_z_BT, divergence_BT, *log_zs), both, gradients)  # fmt: skip
    return gradient_x, gradient_head, None, None, None


_against_head.defvjp(_forward, _backward)


def _each(pair: _Pair, step, start, heads, positions):
    """`step(carry, chunk of the student's head, its logits, the teacher's, index of its first
    row)` of one chunk after the other; `positions`: x [n, D] and [n, E]."""

    def turn(carry, chunks):
        of_student, of_teacher, first = chunks
        chunk_CD = losses.gathered_chunk(pair.student, of_student)
        chunk_CE = losses.gathered_chunk(pair.teacher, of_teacher)
        pieces = ((pair.student, chunk_CD), (pair.teacher, chunk_CE))
        both = [
            losses.chunk_logits(loss, x_nD, chunk, first)
            for (loss, chunk), x_nD in zip(pieces, positions, strict=True)
        ]
        return step(carry, chunk_CD, *both, first)

    chunks, firsts = losses.chunks_of(pair.student, heads[0])
    of_teacher, _ = losses.chunks_of(pair.teacher, heads[1])
    if pair.student.num_chunks == 1:
        carry, out = turn(start, (chunks[0], of_teacher[0], firsts[0]))
        return carry, jax.tree.map(lambda leaf: leaf[None], out)
    return jax.lax.scan(turn, start, (chunks, of_teacher, firsts))


def _scaled(total_n, top_n, new_top_n, temperature: float = 1.0):
    return total_n * jnp.exp((top_n - new_top_n) / temperature)


def _forward_local(pair: _Pair, x_BTD, head_VD, targets_BT, teacher_BTE, teacher_VE):
    t = pair.temperature
    positions = (
        losses.whole_positions(pair.student, x_BTD),
        losses.whole_positions(pair.teacher, teacher_BTE),
    )
    targets_n = targets_BT.reshape(-1)

    def fold(carry, _, logits_nC, teacher_nC, first):
        (top_n, total_n, soft_n, hit_n), (teacher_top_n, teacher_n), cross_n = carry
        new_n = jnp.maximum(top_n, logits_nC.max(axis=-1))
        teacher_new_n = jnp.maximum(teacher_top_n, teacher_nC.max(axis=-1))
        exp_nC = jnp.exp((logits_nC - new_n[:, None]) / t)
        teacher_exp_nC = jnp.exp((teacher_nC - teacher_new_n[:, None]) / t)
        # Of the padding's rows both logits are -inf, and neither has probability.
        ahead_nC = jnp.where(jnp.isinf(logits_nC), 0, (teacher_nC - logits_nC) / t)
        weights_nC = -exp_nC if pair.reverse else teacher_exp_nC
        lead = (top_n, new_n) if pair.reverse else (teacher_top_n, teacher_new_n)
        cross_n = _scaled(cross_n, *lead, t) + (weights_nC * ahead_nC).sum(-1)
        soft_n = _scaled(soft_n, top_n, new_n, t) + exp_nC.sum(axis=-1)
        teacher_n = _scaled(teacher_n, teacher_top_n, teacher_new_n, t)
        teacher_n = teacher_n + teacher_exp_nC.sum(axis=-1)
        sharp_nC = exp_nC if t == 1 else jnp.exp(logits_nC - new_n[:, None])
        total_n = _scaled(total_n, top_n, new_n) + sharp_nC.sum(axis=-1)
        column_n = targets_n - first
        inside_n = (column_n >= 0) & (column_n < logits_nC.shape[1])
        picked_n = jnp.take_along_axis(logits_nC, column_n[:, None], axis=1, mode="clip")[:, 0]
        hit_n = hit_n + jnp.where(inside_n, picked_n, 0)
        saved = (logits_nC, teacher_nC) if pair.student.num_chunks == 1 else None
        return ((new_n, total_n, soft_n, hit_n), (teacher_new_n, teacher_n), cross_n), saved

    floor_n = jnp.full(targets_n.shape, jnp.finfo(jnp.float32).min)
    zero_n = jnp.zeros_like(floor_n)
    start = (floor_n, zero_n, zero_n, zero_n), (floor_n, zero_n), zero_n
    carry, saved = _each(pair, fold, start, (head_VD, teacher_VE), positions)
    found, log_zs = _finished(pair, carry)
    rows = lambda array: array.reshape(targets_BT.shape)  # noqa: E731
    if saved is not None:
        saved = tuple(one[0].reshape(*targets_BT.shape, -1) for one in saved)
    return (
        tuple(map(rows, found)),
        tuple(map(rows, log_zs)),
        saved or (None, None),
    )


def _finished(pair: _Pair, carry):
    """Of the sums over chunks, summed over devices: CE, log Z and divergence, [n] each; and log Z
    of both at the temperature."""
    t, split = pair.temperature, pair.student.split
    (top_n, total_n, soft_n, hit_n), (teacher_top_n, teacher_n), cross_n = carry
    if split.vocab:
        most = lambda top_n: jax.lax.pmax(top_n, split.vocab)  # noqa: E731
        all_n, teacher_all_n = most(top_n), most(teacher_top_n)
        lead = (top_n, all_n) if pair.reverse else (teacher_top_n, teacher_all_n)
        sums = (
            _scaled(total_n, top_n, all_n), _scaled(soft_n, top_n, all_n, t), hit_n,
            _scaled(teacher_n, teacher_top_n, teacher_all_n, t),
            _scaled(cross_n, *lead, t),
        )  # fmt: skip
        total_n, soft_n, hit_n, teacher_n, cross_n = jax.lax.psum(sums, split.vocab)
        top_n, teacher_top_n = all_n, teacher_all_n
    log_z_n = top_n + jnp.log(total_n)
    soft_log_z_n = top_n / t + jnp.log(soft_n)
    teacher_log_z_n = teacher_top_n / t + jnp.log(teacher_n)
    lead_n, between_n = (teacher_n, soft_log_z_n - teacher_log_z_n)
    if pair.reverse:
        lead_n, between_n = soft_n, -between_n
    divergence_n = cross_n / lead_n + between_n
    return (log_z_n - hit_n, log_z_n, divergence_n), (soft_log_z_n, teacher_log_z_n)


def _backward_local(pair: _Pair, arrays, sums, both, gradients):
    x_BTD, head_VD, targets_BT, teacher_BTE, teacher_VE = arrays
    t, loss, flat = pair.temperature, pair.student, lambda array: array.reshape(-1)
    targets_n = flat(targets_BT)
    log_z_n, divergence_n, soft_log_z_n, teacher_log_z_n = map(flat, sums)
    gradient_loss_n, gradient_log_z_n, gradient_divergence_n = map(flat, gradients)
    gradient_both_n = gradient_loss_n + gradient_log_z_n
    x_nD = losses.whole_positions(loss, x_BTD)

    def walk(gradient_x_nD, chunk_CD, logits_nC, teacher_nC, first):
        log_q_nC = logits_nC / t - soft_log_z_n[:, None]
        log_p_nC = teacher_nC / t - teacher_log_z_n[:, None]
        q_nC = jnp.exp(log_q_nC)
        if pair.reverse:
            ahead_nC = jnp.where(jnp.isinf(logits_nC), 0, log_q_nC - log_p_nC)
            between_nC = q_nC * (ahead_nC - divergence_n[:, None])
        else:
            between_nC = q_nC - jnp.exp(log_p_nC)
        gradient_nC = between_nC * (gradient_divergence_n / t)[:, None]
        gradient_nC += jnp.exp(logits_nC - log_z_n[:, None]) * gradient_both_n[:, None]
        target_nC = (targets_n[:, None] - first) == jnp.arange(logits_nC.shape[1])
        gradient_nC -= jnp.where(target_nC, gradient_loss_n[:, None], 0)
        gradient_nC = losses.slope(loss, gradient_nC, logits_nC)
        return losses.gradients_of(loss, gradient_x_nD, gradient_nC, x_nD, chunk_CD, head_VD.dtype)

    start_nD = jnp.zeros(x_nD.shape, jnp.float32)
    if both[0] is not None:
        flat_logits = (logits.reshape(len(targets_n), -1) for logits in both)
        chunk_CD, first = losses.only_chunk(loss, head_VD)
        gradient_x_nD, gradient_head = walk(start_nD, chunk_CD, *flat_logits, first)
    else:
        positions = x_nD, losses.whole_positions(pair.teacher, teacher_BTE)
        gradient_x_nD, gradient_head = _each(pair, walk, start_nD, (head_VD, teacher_VE), positions)
    gradient_x = losses.gradient_of_x(loss, gradient_x_nD, x_BTD, targets_BT)
    return gradient_x, gradient_head.reshape(head_VD.shape)


def picked_logits(
    x_BTD: Float[Array, "B T D"], head_VD: Float[Array, "V D"], ids_BTK: Int[Array, "B T K"],
    **settings: Any,
) -> tuple[Float[Array, "B T"], Float[Array, "B T K"]]:  # fmt: skip
    """log Z of each token, and the logits of `ids_BTK`, fp32; both with a gradient.

    `settings`, communication and errors are those of `losses.token_losses`.
    """
    loss = losses.head_loss(x_BTD, head_VD, ids_BTK[..., 0], **settings)
    return _picked_logits(loss, x_BTD, head_VD, ids_BTK)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _picked_logits(loss: HeadLoss, x_BTD, head_VD, ids_BTK):
    return _picked_forward(loss, x_BTD, head_VD, ids_BTK)[0]


def _of_picked(loss: HeadLoss) -> PartitionSpec:
    return PartitionSpec(*loss.split.tokens.partitions, None)


def _picked_forward(loss: HeadLoss, x_BTD, head_VD, ids_BTK):
    split, arrays = loss.split, (x_BTD, head_VD, ids_BTK)
    log_z_BT, picked_BTK = jax.shard_map(
        functools.partial(_picked_local, loss), mesh=split.mesh,
        in_specs=(loss.x, split.table, _of_picked(loss)),
        out_specs=(split.tokens, _of_picked(loss)), check_vma=False,
    )(*arrays)  # fmt: skip
    return (log_z_BT, picked_BTK), (*arrays, log_z_BT)


def _picked_backward(loss: HeadLoss, residuals, gradients):
    split, of_picked = loss.split, _of_picked(loss)
    gradient_x, gradient_head = jax.shard_map(
        functools.partial(_picked_gradients, loss), mesh=split.mesh,
        in_specs=(loss.x, split.table, of_picked, split.tokens, split.tokens, of_picked),
        out_specs=(loss.x, split.gradient), check_vma=False,
    )(*residuals, *gradients)  # fmt: skip
    return gradient_x, gradient_head, None


_picked_logits.defvjp(_picked_forward, _picked_backward)


def _columns(ids_nK, first, size):
    """The columns of tokens in a chunk of the vocabulary, and which of them it has."""
    columns_nK = ids_nK - first
    return columns_nK, (columns_nK >= 0) & (columns_nK < size)


def _picked_local(loss: HeadLoss, x_BTD, head_VD, ids_BTK):
    split, x_nD = loss.split, losses.whole_positions(loss, x_BTD)
    ids_nK = ids_BTK.reshape(-1, ids_BTK.shape[-1])

    def fold(carry, chunk_CD, first):
        top_n, total_n, picked_nK = carry
        logits_nC = losses.chunk_logits(loss, x_nD, chunk_CD, first)
        new_n = jnp.maximum(top_n, logits_nC.max(axis=-1))
        total_n = _scaled(total_n, top_n, new_n) + jnp.exp(logits_nC - new_n[:, None]).sum(-1)
        columns_nK, inside_nK = _columns(ids_nK, first, logits_nC.shape[1])
        found_nK = jnp.take_along_axis(logits_nC, columns_nK, axis=1, mode="clip")
        return (new_n, total_n, picked_nK + jnp.where(inside_nK, found_nK, 0)), None

    floor_n = jnp.full(len(ids_nK), jnp.finfo(jnp.float32).min)
    start = floor_n, jnp.zeros_like(floor_n), jnp.zeros(ids_nK.shape, jnp.float32)
    (top_n, total_n, picked_nK), _ = losses.each_chunk(loss, fold, start, head_VD)
    if split.vocab:
        all_n = jax.lax.pmax(top_n, split.vocab)
        sums = _scaled(total_n, top_n, all_n), picked_nK
        (total_n, picked_nK), top_n = jax.lax.psum(sums, split.vocab), all_n
    log_z_n = top_n + jnp.log(total_n)
    return log_z_n.reshape(ids_BTK.shape[:2]), picked_nK.reshape(ids_BTK.shape)


def _picked_gradients(
    loss, x_BTD, head_VD, ids_BTK, log_z_BT, gradient_log_z_BT, gradient_BTK
):  # fmt: skip
    x_nD = losses.whole_positions(loss, x_BTD)
    ids_nK, gradient_nK = (
        array.reshape(-1, ids_BTK.shape[-1]) for array in (ids_BTK, gradient_BTK)
    )
    log_z_n, gradient_log_z_n = log_z_BT.reshape(-1), gradient_log_z_BT.reshape(-1)

    def walk(gradient_x_nD, chunk_CD, first):
        logits_nC = losses.chunk_logits(loss, x_nD, chunk_CD, first)
        gradient_nC = jnp.exp(logits_nC - log_z_n[:, None]) * gradient_log_z_n[:, None]
        columns_nK, inside_nK = _columns(ids_nK, first, logits_nC.shape[1])
        rows_n1 = jnp.arange(len(ids_nK))[:, None]
        kept_nK = jnp.where(inside_nK, gradient_nK, 0)
        columns_nK = jnp.where(inside_nK, columns_nK, 0)
        gradient_nC = gradient_nC.at[rows_n1, columns_nK].add(kept_nK)
        gradient_nC = losses.slope(loss, gradient_nC, logits_nC)
        return losses.gradients_of(loss, gradient_x_nD, gradient_nC, x_nD, chunk_CD, head_VD.dtype)

    start_nD = jnp.zeros(x_nD.shape, jnp.float32)
    gradient_x_nD, gradient_head = losses.each_chunk(loss, walk, start_nD, head_VD)
    gradient_x = losses.gradient_of_x(loss, gradient_x_nD, x_BTD, ids_BTK[..., 0])
    return gradient_x, gradient_head.reshape(head_VD.shape)

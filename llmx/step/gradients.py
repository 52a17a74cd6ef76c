"""Gradients of a global batch, at once or in microbatches, or of each replica's own rows."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from llmx import sharding
from llmx.contract import Gradient, Gradients, Transform
from llmx.model import quantized
from llmx.model.training_loss import TrainingLoss, microbatches, squared_norms
from llmx.step import balance

# (add, sums before the first microbatch, microbatches [n, ...]) -> sums after the last.
Loop = Callable[[Callable[[Any, Any], Any], Any, Any], Any]


def known_length(add: Callable[[Any, Any], Any], zeros: Any, batches: Any) -> Any:
    """A loop over microbatches whose length the compiler knows."""
    return jax.lax.scan(lambda total, one: (add(total, one), None), zeros, batches)[0]


def hidden_length(add: Callable[[Any, Any], Any], zeros: Any, batches: Any) -> Any:
    """The same, but the compiler does not know its length.

    XLA:GPU makes one body of two iterations of a loop whose length it knows, as the layers' loops
    need it to gather ahead. Of two microbatches it then holds what the layers save at the same
    time, where memory is left (docs/memory.md).
    """
    number = jax.tree.leaves(batches)[0].shape[0]
    hidden = jax.lax.optimization_barrier(jnp.int32(number))
    one = lambda i: jax.tree.map(lambda leaf: leaf[i], batches)  # noqa: E731
    return jax.lax.fori_loop(0, hidden, lambda i, total: add(total, one(i)), zeros)


def whole_batch(
    loss: TrainingLoss, *, accumulation: int = 1, loop: Loop = known_length
) -> Gradient:
    """The gradient of a global batch, the same on all replicas.

    `accumulation`: microbatches per step; must divide the batch of each device. Communicates over
    `data`, `fsdp`, `expert` (gradients; parameters, as the layout says), `sequence` (keys and
    values) and `tensor` (activations).
    """
    buffer_types = loss.buffers(accumulation)

    def loss_of(buffers, params, batch, tokens, extra):
        share_BT = batch["weights"] / tokens
        batch = batch | {"share": loss.token_shares(share_BT, extra)}
        rows = batch | {"share": share_BT}
        token_losses = loss.apply.losses(params, batch, loss.execution, buffers)
        return loss.of_rows(token_losses, rows, extra)

    differentiate = jax.grad(loss_of, has_aux=True)

    def accumulated(params, batch, tokens, extra):
        """Gradients and losses of a batch, in fp32 sums over its microbatches."""
        buffers = loss.with_ranges(jax.tree.map(sharding.zeros, buffer_types), extra)
        if accumulation == 1:
            return differentiate(buffers, params, batch, tokens, extra)

        def add(total, microbatch):
            # Each is already divided by the global token count, so microbatches weigh as their
            # tokens do.
            new = differentiate(buffers, params, microbatch, tokens, extra)
            return quantized.added(total, new)

        # Our own loop: optax.microbatching compares jax's version as text, takes 0.10 for older
        # than 0.7, and so refuses explicit axes.
        none = jax.tree.map(jnp.zeros_like, extra)
        sums = loss.with_ranges(jax.tree.map(sharding.empty_sum, buffer_types), none)
        zero = jnp.zeros(())
        zeros = sums, (zero, zero, dict.fromkeys(loss.reported, zero))
        return loop(add, zeros, microbatches(batch, accumulation))

    def take(params, batch, in_flight, extra):
        num_tokens = jnp.sum(batch["weights"])
        with loss.execution.policy.products():
            tokens = jnp.maximum(num_tokens, 1.0)
            grads, (*losses, reported) = accumulated(loss.gathered(params), batch, tokens, extra)
        grads, amax = loss.without_ranges(grads, extra)
        finish = lambda leaf, buffer, to: jax.sharding.reshard(leaf.astype(buffer.dtype), to)  # noqa: E731
        tree = jax.tree.map(finish, grads, buffer_types, loss.gradients)
        squares = squared_norms(tree)
        norm = jnp.sqrt(squares.sum())
        found = Gradients(
            *losses, num_tokens, tree, squares, norm, extra=extra, amax=amax, reported=reported
        )
        return found, in_flight

    return Gradient(init=lambda params: (), take=take, loss=loss.summed)


def per_replica(
    make: Callable[[TrainingLoss], Gradient], loss: TrainingLoss, axes: tuple[str, ...]
) -> Gradient:
    """The gradients [n, ...] of replicas along the mesh axes `axes`, in fp32: each the mean over
    the replica's own tokens, with what `norms` [n] and `shares` [n] say of them.

    A replica's part of the program is the usual text on a mesh without `axes`, so that it
    communicates within the replica only. Parameters: of each replica, in its local view.
    """
    gradient = make(loss.per_replica(axes))

    def take(params, batch, in_flight, extra):
        batch = jax.tree.map(functools.partial(sharding.local_part, loss.mesh, axes), batch)
        own, in_flight = gradient.take(params, batch, in_flight, extra)
        grads = jax.tree.map(
            lambda leaf, to: jax.sharding.reshard(leaf.astype(jnp.float32), to),
            balance.without_loads(own.tree), loss.updates,
        )  # fmt: skip
        stacked = lambda leaf: sharding.from_local(loss.mesh, axes, leaf[None])  # noqa: E731
        losses, zs, tokens, tree = jax.tree.map(stacked, (own.loss, own.z_loss, own.tokens, grads))
        # A replica without any token has no share.
        shares = tokens / jnp.maximum(tokens.sum(), 1.0)
        squares, weights = _squares_of_replicas(tree, shares)
        gradients = Gradients(
            jnp.sum(losses * shares), jnp.sum(zs * shares), tokens.sum(), tree,
            (squares * weights).sum(axis=1), jnp.sqrt(squares.sum(axis=0)), shares, own.extra,
            amax=jax.tree.map(lambda leaf: stacked(leaf).max(axis=0), own.amax),
            reported=jax.tree.map(lambda leaf: jnp.sum(stacked(leaf) * shares), own.reported),
        )  # fmt: skip
        return gradients, in_flight

    return Gradient(init=gradient.init, take=take, loss=gradient.loss)


def _squares_of_replicas(tree: Any, shares: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Squared norms [leaves, n] of gradients of each replica, and the weights [n] of their mean."""
    squares = jnp.stack([
        jnp.sum(jnp.square(leaf), axis=tuple(range(1, leaf.ndim)))
        for leaf in jax.tree.leaves(tree)
    ])  # fmt: skip
    # A replica with few tokens has a long, noisy gradient, which its share makes short.
    weights = jnp.square(shares)
    weights = weights / jnp.maximum(weights.sum(), 1e-30)
    return squares, weights


def measured(found: Gradients) -> Gradients:
    """Gradients whose squares and norms are those of their tree, which has changed."""
    if not isinstance(found.shares, tuple):
        squares, weights = _squares_of_replicas(found.tree, found.shares)
        means, norms = (squares * weights).sum(axis=1), jnp.sqrt(squares.sum(axis=0))
        return found._replace(squares=means, norms=norms)
    squares = jnp.where(found.tokens != 0, squared_norms(found.tree), 0)
    return found._replace(squares=squares, norms=jnp.sqrt(squares.sum()))


def transformed(gradient: Gradient, transforms: Mapping[str, Transform]) -> Gradient:
    """`gradient`, changed by the transforms one after the other, the last one first: as the loss
    went through them. Nothing communicates."""
    if not transforms:
        return gradient

    def take(params, batch, in_flight, extra):
        found, in_flight = gradient.take(params, batch, in_flight, extra)
        for name in reversed(transforms):
            found = transforms[name].gradients(found, found.extra[name])
        return found, in_flight

    return gradient._replace(take=take)

"""Times of a model's layers on the first device of this machine, in place of estimates by FLOPs."""

import dataclasses
import statistics
import timeit
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from llmx import sharding
from llmx.model import apply, embedding, losses, precision
from llmx.model.attention.attend import AttentionConfig
from llmx.model.execution import Execution
from llmx.model.families import ModelConfig
from llmx.plan import partition
from llmx.plan.partition import Layer

RUNS = 5  # of which the median counts


def measured(
    model: ModelConfig, *, tokens: int, sequence_length: int, policy: str = "bf16",
    remat: str = "none", attention: AttentionConfig | None = None, loss_chunks: int = 0,
    number_bytes: partition.NumberBytes | None = None, chunks: Sequence[int] = (),
    offloaded: Sequence[str] = (), runs: int = RUNS,
) -> list[Layer]:  # fmt: skip
    """`partition.layers_of` with times of this machine: medians of several runs.

    One block of each kind of attention is timed, and the loss with its head but without the last
    norm. A row is one document. One block, the embedding or the head must fit on the device, with
    its gradients.

    Args:
      model, tokens, sequence_length, remat, number_bytes, chunks, offloaded: see
        `partition.layers_of`. Times are of a block that is the first of a chunk.
      policy: a name in `precision.POLICIES`.
      attention: which kernel; None = the best for the platform.
      loss_chunks: chunks of the vocabulary in the loss; 0 = by size.
      runs: of each function, after a first one that compiles it.

    Raises ValueError if `tokens` are no whole sequences, and as `partition.layers_of` does.
    """
    if tokens < 1 or tokens % sequence_length:
        raise ValueError(
            f"tokens={tokens} is no multiple of sequence_length={sequence_length}: a microbatch is "
            "whole sequences"
        )
    if model.vocab_size and not loss_chunks:
        loss_chunks = losses.num_chunks(tokens, model.padded_vocab)
    layers = partition.layers_of(
        model, tokens=tokens, sequence_length=sequence_length, flops_per_second=1.0, remat=remat,
        loss_chunks=loss_chunks, number_bytes=number_bytes, chunks=chunks, offloaded=offloaded,
    )  # fmt: skip
    mesh = sharding.make_mesh(dict.fromkeys(sharding.AXES, 1), devices=jax.devices()[:1])
    execution = Execution(
        place=sharding.Placement(mesh, sharding.make_layout("ddp")),
        policy=precision.POLICIES[policy], remat=remat, attention=attention or AttentionConfig(),
        packed=False, loss_chunks=loss_chunks, offloaded=tuple(offloaded),
    )  # fmt: skip
    shape = (tokens // sequence_length, sequence_length)
    with jax.set_mesh(mesh):
        kinds = {kind: _block(model, kind, shape, execution) for kind in set(model.layer_pattern)}
        blocks = {kind: _seconds(*block, runs) for kind, block in kinds.items()}
        first, last = (_seconds(*end, runs) for end in _ends(model, shape, execution))
    seconds = [first, *(blocks[kind] for kind in model.layer_kinds), last]
    return [
        dataclasses.replace(layer, forward=forward, backward=backward)
        for layer, (forward, backward) in zip(layers, seconds, strict=True)
    ]


def _block(model: ModelConfig, kind: str, shape: tuple[int, int], execution: Execution):
    """The function of a block with attention of that kind, and its arguments."""
    # A decoder of one block, with the smallest tables, which are not used.
    one = dataclasses.replace(
        model, num_layers=1, layer_pattern=(kind,), vocab_size=1, vocab_multiple=1, max_positions=1
    )
    blocks = jax.jit(lambda: apply.init_parameters(one, 0)["blocks"])()
    segments_BT = jnp.zeros(shape, jnp.int32)
    positions_BT = jnp.tile(jnp.arange(shape[1], dtype=jnp.int32), (shape[0], 1))

    def block(blocks, x_BTD):
        mask = apply.self_mask(segments_BT, positions_BT, execution)
        return apply.Apply(one).apply_layers(blocks, x_BTD, mask, execution)[0]

    return block, (blocks, _stream(model.width, shape, execution))


def _ends(model: ModelConfig, shape: tuple[int, int], execution: Execution):
    """The functions of the embedding and of the head with its loss, and their arguments."""
    place, policy = execution.place, execution.policy
    table_VD = jnp.zeros((model.padded_vocab, model.width), jnp.float32)
    tokens_BT = jax.random.randint(jax.random.key(0), shape, 0, model.vocab_size)

    def embed(table_VD):
        return embedding.embed(tokens_BT, table_VD, place=place, policy=policy)

    def head(x_BTD, head_VD):
        return losses.token_losses(
            x_BTD, head_VD, tokens_BT, num_real=model.vocab_size, softcap=model.logit_softcap,
            chunks=execution.loss_chunks, place=place, policy=policy,
        )  # fmt: skip

    x_BTD = _stream(model.width, shape, execution)
    return (embed, (table_VD,)), (head, (x_BTD, table_VD))


def _stream(width: int, shape: tuple[int, int], execution: Execution) -> jax.Array:
    return jax.random.normal(jax.random.key(1), (*shape, width), execution.policy.compute)


def _seconds(function: Callable, arguments: tuple, runs: int) -> tuple[float, float]:
    """Seconds of the forward pass, which saves residuals, and of the backward pass."""
    forward = jax.jit(lambda arguments: jax.vjp(function, *arguments))
    backward = jax.jit(lambda pull, gradient: pull(gradient))
    out, pull = forward(arguments)
    gradient = jax.tree.map(jnp.ones_like, out)
    return _median(forward, (arguments,), runs), _median(backward, (pull, gradient), runs)


def _median(function: Callable, arguments: tuple[Any, ...], runs: int) -> float:
    """Median seconds of a jitted function, which a first run compiles."""
    run = lambda: jax.block_until_ready(function(*arguments))  # noqa: E731
    run()
    return statistics.median(timeit.repeat(run, number=1, repeat=runs))

"""How long the layers of a model take on the first device of this machine.

What `llmx.plan.partition` otherwise estimates from FLOPs. Memory, weights and messages are counted
in either case: they need no clock.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from llmx import sharding
from llmx.model import apply, embedding, execution, losses, precision
from llmx.model.attention.attend import AttentionConfig
from llmx.model.families import ModelConfig
from llmx.plan import partition

RUNS = 5  # of which the median counts


def measured(
    model: ModelConfig,
    *,
    tokens: int,
    sequence_length: int,
    policy: str = "bf16",
    remat: str = "none",
    attention: AttentionConfig | None = None,
    loss_chunks: int = 0,
    number_bytes: partition.NumberBytes | None = None,
    runs: int = RUNS,
) -> list[partition.Layer]:
    """`partition.layers_of` with times of this machine: medians of several runs.

    One block of each kind of attention is timed, and the loss with its head but without the norm
    before it. A row is one document. The parameters of one block, of the embedding or of the head,
    and their gradients must fit on the device.

    Args:
      model: with its vocabulary.
      tokens: of a microbatch, a multiple of `sequence_length`.
      sequence_length: tokens of a sequence.
      policy: a name in `precision.POLICIES`.
      remat: a name in `remat.POLICIES`.
      attention: which kernel; None = the best for the platform.
      loss_chunks: parts of the vocabulary that the loss walks; 0 = by size.
      number_bytes: see `partition.layers_of`.
      runs: how often each function runs, after a first time that compiles it.

    Raises ValueError where `tokens` are no whole sequences, and as `partition.layers_of` does.
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
        loss_chunks=loss_chunks, number_bytes=number_bytes,
    )  # fmt: skip
    sizes = dict.fromkeys(sharding.AXES, 1)
    mesh = sharding.make_mesh(sizes, devices=jax.devices()[:1])
    run = execution.Execution(
        place=sharding.Placement(mesh, sharding.make_layout("ddp")),
        policy=precision.POLICIES[policy],
        remat=remat,
        attention=attention or AttentionConfig(),
        packed=False,
        loss_chunks=loss_chunks,
    )
    shape = (tokens // sequence_length, sequence_length)
    with jax.set_mesh(mesh):
        blocks = {kind: _block(model, kind, shape, run, runs) for kind in set(model.layer_pattern)}
        table_VD = jnp.zeros((model.padded_vocab, model.width), jnp.float32)
        seconds = [
            _embedding(table_VD, shape, run, runs),
            *(blocks[kind] for kind in model.layer_kinds),
            _head(model, table_VD, shape, run, runs),
        ]
    return [
        dataclasses.replace(layer, forward=forward, backward=backward)
        for layer, (forward, backward) in zip(layers, seconds, strict=True)
    ]


def _block(model: ModelConfig, kind: str, shape, run: execution.Execution, runs: int):
    """Forward and backward seconds of a block with attention of that kind."""
    # A decoder of one block, whose tables nobody looks at.
    one = dataclasses.replace(
        model, num_layers=1, layer_pattern=(kind,), vocab_size=1, vocab_multiple=1, max_positions=1
    )
    blocks = jax.jit(lambda: apply.init_parameters(one, 0)["blocks"])()
    segments_BT = jnp.zeros(shape, jnp.int32)
    positions_BT = jnp.tile(jnp.arange(shape[1], dtype=jnp.int32), (shape[0], 1))

    def block(blocks, x_BTD):
        mask = apply.self_mask(segments_BT, positions_BT, run)
        return apply.Apply(one).apply_layers(blocks, x_BTD, mask, run)[0]

    return _seconds(block, (blocks, _stream(model.width, shape, run)), runs)


def _embedding(table_VD, shape, run: execution.Execution, runs: int):
    tokens_BT = jax.random.randint(jax.random.key(0), shape, 0, table_VD.shape[0])

    def embed(table_VD):
        return embedding.embed(tokens_BT, table_VD, place=run.place, policy=run.policy)

    return _seconds(embed, (table_VD,), runs)


def _head(model: ModelConfig, table_VD, shape, run: execution.Execution, runs: int):
    targets_BT = jax.random.randint(jax.random.key(0), shape, 0, model.vocab_size)

    def head(x_BTD, head_VD):
        return losses.token_losses(
            x_BTD, head_VD, targets_BT, num_real=model.vocab_size, softcap=model.logit_softcap,
            chunks=run.loss_chunks, place=run.place, policy=run.policy,
        )  # fmt: skip

    return _seconds(head, (_stream(model.width, shape, run), table_VD), runs)


def _stream(width: int, shape, run: execution.Execution):
    return jax.random.normal(jax.random.key(1), (*shape, width), run.policy.compute)


def _seconds(function: Callable, arguments: tuple, runs: int) -> tuple[float, float]:
    """Of the forward pass, which keeps what the other needs, and of the backward pass."""
    forward = jax.jit(lambda arguments: jax.vjp(function, *arguments))
    backward = jax.jit(lambda pull, gradient: pull(gradient))
    out, pull = forward(arguments)
    gradient = jax.tree.map(jnp.ones_like, out)
    return _median(forward, (arguments,), runs), _median(backward, (pull, gradient), runs)


def _median(function: Callable, arguments: tuple[Any, ...], runs: int) -> float:
    """Seconds of a run of a jitted function, after the first."""
    jax.block_until_ready(function(*arguments))
    seconds = []
    for _ in range(runs):
        begun = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)

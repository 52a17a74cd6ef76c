"""One executor for every pipeline: it runs a table's operations on the mesh axis `stage`.

A tick of the table is an iteration of a loop (`tick.run_tick`, `ticks.loops_of`). In ticks of
several kinds of operations each stage takes the branch of its own. Values that wait for a later
tick have slots in buffers (`tick.Carry`).

Every stage has an equal share of the vocabulary, and all compute embedding and head of each
microbatch together (arXiv 2411.05288): stages hold and do the same, and a tied table needs no
second copy.

Mesh axes: see `llmx.pipeline.tick`. Letters: B batch, T positions, M microbatches.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from llmx import sharding
from llmx.model import dot, remat
from llmx.pipeline import saves as saves_lib
from llmx.pipeline import tick as tick_lib
from llmx.pipeline.permutation import EMPTY
from llmx.pipeline.schedule import IDLE
from llmx.pipeline.stages import ModelChunks
from llmx.pipeline.tick import STAGE, Body, Carry, Context, When, with_leading
from llmx.pipeline.ticks import Program, Row


class Sums(NamedTuple):
    """Sums over microbatches, [steps, ...]: of this step, and of the one before if there is one."""

    losses: tuple[jax.Array, ...]
    blocks: Any  # gradients in fp32, split as their buffers; the steps one after the other
    outer: Any


class Buffers(NamedTuple):
    """What is in flight between the steps of a periodic table: arrays [stages, slots, ...]."""

    inputs: jax.Array | None
    gradients: jax.Array | None
    saved: tuple[jax.Array, ...]


def run_table(
    program: Program, chunks: ModelChunks, functions: tick_lib.ModelFunctions, mesh: Mesh, *,
    params: tuple[Any, ...], batches: tuple[dict[str, jax.Array], ...], kinds: tuple,
    grad_buffers: tuple[Any, Any] | None, in_flight: Buffers | None = None,
) -> tuple[Sums, Buffers | None]:  # fmt: skip
    """Runs all operations of a table on a mesh with the axis `stage`.

    Args:
      program, chunks, functions: of the table, the layers and the model.
      mesh: with the axis `stage`.
      params: (blocks, outer): weights of the layers as staged, [slots, ...], and the other
        parameters. For a periodic table twice: of this step, and of the step before.
      batches: arrays [M, B, T], whole along `stage`; one for each of `params`.
      kinds: of the model's layers; `functions.apply_layers` takes those of a chunk's layers.
      grad_buffers: types of the gradients of blocks and outer; None = no gradients.
      in_flight: of a periodic table, what the step before returned; None = nothing.

    Returns sums over microbatches, and what a periodic table leaves in flight. Gradients are placed
    as their buffers, perhaps unreduced; `stage` is local in those of layers.
    """
    context = _context(program, chunks, functions, mesh, params, batches, kinds, grad_buffers)
    carry = _empty(context, len(params))
    if in_flight is not None:
        carry = carry._replace(**_resumed(in_flight, carry, mesh))
    for first, length, times in program.loops:
        carry = _run_loop(context, carry, first, length, times)
    blocks = jax.tree.unflatten(jax.tree.structure(context.block_buffers), carry.blocks)
    left = _left_in_flight(carry, mesh) if program.table.periodic else None
    return Sums(carry.losses, blocks, carry.outer), left


def _context(program, chunks, functions, mesh, params, batches, kinds, grad_buffers) -> Context:
    """Everything that the ticks share: see `run_table`."""
    blocks, outer = (None, None) if grad_buffers is None else grad_buffers
    stages, to_local = mesh.shape["stage"], functools.partial(sharding.to_local, mesh, STAGE)
    blocks = jax.tree.map(lambda leaf: with_leading(leaf, leaf.shape[0] // stages, of=1), blocks)
    weights = [jax.tree.map(to_local, stacked) for stacked, _ in params]
    others = [outside for _, outside in params]
    several = len(params) > 1
    joined = lambda join, trees: jax.tree.map(lambda *a: join(a), *trees) if several else trees[0]  # noqa: E731
    context = Context(
        program=program, chunks=chunks, functions=functions, links=tick_lib.Links(mesh),
        weights=joined(jnp.concatenate, weights), outer=joined(jnp.stack, others),
        batch=jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *batches),
        block_buffers=blocks, outer_buffers=outer, versions=len(params),
        kinds=_kinds(chunks, kinds, mesh),
        stage=_by_stage(range(stages), mesh)[0],
        runs=(tick_lib.Run(0, chunks.size, blocks),),
    )  # fmt: skip
    x_type = jax.eval_shape(lambda: context.embedded(None, 0))
    context = dataclasses.replace(context, x_type=x_type)
    if grad_buffers is None:
        return context
    if program.table.splits_backward:
        context = dataclasses.replace(context, runs=_runs(context))
    return dataclasses.replace(context, saves=_saves(context))


def _empty(context: Context, steps: int) -> Carry:
    """The carry of the first tick: empty slots and sums of nothing."""
    slots, saves = context.program.slots, context.saves
    losses = jax.eval_shape(
        lambda x: context.functions.losses(context.outer_of(0), None, x, context.rows(0)),
        context.x_type,
    )
    records = (record for run in context.runs for record in run.deferred)
    buffer = lambda leaf, name: sharding.zeros(with_leading(leaf, slots[name]))  # noqa: E731
    add_up = lambda leaf: sharding.empty_sum(with_leading(leaf, steps))  # noqa: E731
    return Carry(
        inputs=buffer(context.x_type, "inputs") if slots["inputs"] else None,
        gradients=buffer(context.x_type, "gradients") if slots["gradients"] else None,
        saved=() if saves is None else tuple(buffer(leaf, "saved") for leaf in saves.types),
        deferred=jax.tree.map(
            lambda leaf: buffer(leaf, "deferred"), tuple(record.types for record in records)
        ),
        blocks=tuple(
            sharding.empty_sum(with_leading(leaf, leaf.shape[0] * steps, of=1))
            for leaf in jax.tree.leaves(context.block_buffers)
        ),
        outer=jax.tree.map(add_up, context.outer_buffers),
        losses=jax.tree.map(lambda leaf: jnp.zeros((steps, *leaf.shape), leaf.dtype), losses),
        token=jnp.zeros((), jnp.int32),
    )  # fmt: skip


def _run_loop(context: Context, carry: Carry, first: int, length: int, times: int) -> Carry:
    """`times` iterations of a body with the ticks `first` to `first + length`."""
    end = first + length * times
    in_loop = lambda a: a[first:end].astype(np.int32).reshape(times, length, *a.shape[1:])  # noqa: E731
    rows = jax.tree.map(in_loop, context.program.rows)
    bodies = [body_of(jax.tree.map(lambda a: a[:, tick], rows)) for tick in range(length)]  # noqa: B023

    def ticks(carry, rows):
        for tick, body in enumerate(bodies):
            carry = tick_lib.run_tick(context, body, carry, jax.tree.map(lambda a: a[tick], rows))  # noqa: B023
        return carry, None

    return jax.lax.scan(ticks, carry, rows)[0]


def body_of(rows: Row) -> Body:
    """What these ticks have in common.

    If stages take no branches, and in some ticks a microbatch enters or leaves the embedding, all
    ticks do as if one did: that takes little beside a chunk, and a GPU would send the value of a
    condition to its host.
    """
    when = lambda array: When(bool((array >= 0).any()) + bool((array >= 0).all()))  # noqa: E731
    found, kinds = jax.tree.map(when, rows), frozenset(np.unique(rows.kind).tolist()) - {IDLE}
    for name in ("embedding", "embedding_gradient"):
        if len(kinds) == 1 and getattr(found, name) is When.SOMETIMES:
            found = found._replace(**{name: When.ALWAYS})
    return Body(kinds, found, rows)


def _saves(context: Context) -> saves_lib.Saves:
    """What is kept of one chunk and microbatch for its derivative."""
    functions, x_type = context.functions, context.x_type
    if remat.keeps_input(functions.remat):
        saves = saves_lib.input_only(context.differentiated, context.apply, x_type)
    else:
        arguments = lambda: context.arguments(0, 0)  # noqa: E731
        saves = saves_lib.residuals(context.differentiated, arguments, x_type)
    if functions.kept_bytes is not None:
        tokens = x_type.shape[0] * x_type.shape[1]
        saves_lib.check(saves, functions.kept_bytes * tokens, functions.remat)
    return saves


def _runs(context: Context) -> tuple[tick_lib.Run, ...]:
    """A chunk's layers by whether their weight gradients are deferred: the first ones are."""
    size, deferred = context.chunks.size, context.program.deferred_layers
    runs = [_deferred(context, min(deferred, size))]
    first = runs[0].size
    if first < size:
        runs.append(tick_lib.Run(first, size - first, context.block_buffers))
    return tuple(runs)


def _deferred(context: Context, size: int) -> tick_lib.Run:
    """The first `size` layers, with records of their deferred weight gradients."""
    record_or = lambda leaf, uses_dot: dot.WeightGradRecord() if uses_dot else leaf  # noqa: E731
    buffers = jax.tree.map(record_or, context.block_buffers, context.functions.uses_dot)
    run = tick_lib.Run(0, size, buffers)
    alone = dataclasses.replace(context, runs=(run,))

    def trace(x_BTD):
        arguments = alone.arguments(0, 0)
        return alone.apply(x_BTD, arguments, arguments.buffers)

    jax.eval_shape(trace, context.x_type)
    is_record = lambda leaf: isinstance(leaf, dot.WeightGradRecord)  # noqa: E731
    records = [leaf for leaf in jax.tree.leaves(buffers, is_leaf=is_record) if is_record(leaf)]
    for record in records:
        record.types = jax.tree.map(lambda leaf: with_leading(leaf, size), record.types)
    types = lambda leaf: leaf.types if is_record(leaf) else leaf  # noqa: E731
    buffers = jax.tree.map(types, buffers, is_leaf=is_record)
    return tick_lib.Run(0, size, buffers, tuple(records))


def _left_in_flight(carry: Carry, mesh: Mesh) -> Buffers:
    def one(array):
        to = sharding.split_only(jax.typeof(array).sharding.spec)
        array = jax.sharding.reshard(array, to)
        # What manual regions save is split over all axes, `stage` too.
        named = "stage" in sharding.used_axes(to)
        return array if named else sharding.from_local(mesh, STAGE, array[None])

    return jax.tree.map(one, Buffers(carry.inputs, carry.gradients, carry.saved))


def _resumed(in_flight: Buffers, carry: Carry, mesh: Mesh) -> dict[str, Any]:
    """The buffers of `carry` with what is in flight."""

    def one(array, buffer):
        to = jax.typeof(buffer).sharding.spec
        if "stage" not in sharding.used_axes(to):
            array = sharding.to_local(mesh, STAGE, array)[0]
        return jax.sharding.reshard(array, to)

    buffers = Buffers(carry.inputs, carry.gradients, carry.saved)
    return jax.tree.map(one, in_flight, buffers)._asdict()


def _by_stage(numbers: Sequence[int], mesh: Mesh) -> jax.Array:
    """Each stage's share of `numbers`."""
    to = NamedSharding(mesh, PartitionSpec("stage"))
    numbers = jnp.asarray(np.array(numbers, np.int32))
    return sharding.to_local(mesh, STAGE, jax.sharding.reshard(numbers, to))


def _kinds(chunks: ModelChunks, kinds: tuple, mesh: Mesh) -> tuple | jax.Array:
    """The kinds of every chunk's layers, or int[slots of this stage] where chunks differ."""
    at = [EMPTY if layer == EMPTY else kinds[layer] for layer in chunks.slots]
    by_chunk = {tuple(at[i : i + chunks.size]) for i in range(0, len(at), chunks.size)}
    if len(by_chunk) == 1:
        return by_chunk.pop()
    names = sorted(set(kinds))
    numbers = [EMPTY if kind == EMPTY else names.index(kind) for kind in at]
    return _by_stage(numbers, mesh)

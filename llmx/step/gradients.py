"""Gradients of a global batch, or of each replica's part of it, as the mesh, the accumulation and
the pipeline take them.

The loss is a sum over tokens divided once by the token count of the global batch. Each matrix's
gradient is summed over devices at once, behind the next layer's work; what can be summed once per
step is summed once (`_sink`).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from llmx import sharding
from llmx.model import apply as apply_lib
from llmx.model import decoder, dot
from llmx.pipeline import executor, tick, ticks
from llmx.pipeline.schedule import Table
from llmx.step.state import Batch, Setup, Stale, placed
from llmx.sync import strategy


def of_batch(setup: Setup, *, accumulation: int, z_loss: float, gather: str):
    """(params, batch, stale) -> ((loss, z-loss), tokens, gradients in their sharding, stale)."""
    sink_types = _sinks(setup, accumulation)

    def loss_of(sinks, params, batch, tokens):
        loss_BT, log_z_BT = setup.apply.losses(params, batch, setup.run, sinks)
        share_BT = batch["weights"] / tokens
        loss = jnp.sum(loss_BT * share_BT)
        z = z_loss * jnp.sum(jnp.square(log_z_BT) * share_BT)
        return loss + z, (loss, z)

    differentiate = jax.grad(loss_of, has_aux=True)

    def gradient_of(params, batch, stale=None):
        tokens = jnp.maximum(jnp.sum(batch["weights"]), 1.0)
        sinks = jax.tree.map(sharding.zeros, sink_types)
        if gather == "step":
            params = _gathered(setup, params)
        if accumulation == 1:
            grads, losses = differentiate(sinks, params, batch, tokens)
        else:

            def add(total, microbatch):
                # Each is already divided by the global token count, so microbatches weigh as their
                # tokens do.
                new = differentiate(sinks, params, microbatch, tokens)
                return jax.tree.map(lambda old, one: old + one.astype(old.dtype), total, new), None

            # Our own loop: optax.microbatching compares jax's version as text, takes 0.10 for older
            # than 0.7, and so refuses explicit axes.
            start = jax.tree.map(sharding.empty_sum, sink_types), (jnp.zeros(()), jnp.zeros(()))
            (grads, losses), _ = jax.lax.scan(add, start, _microbatches(batch, accumulation))
        finish = lambda leaf, sink, to: jax.sharding.reshard(leaf.astype(sink.dtype), to)  # noqa: E731
        return losses, tokens, jax.tree.map(finish, grads, sink_types, setup.gradients), stale

    return gradient_of


def of_batch_in_stages(setup: Setup, *, accumulation: int, z_loss: float, gather: str):
    """What `of_batch` makes, by the operations of the pipeline's table."""
    del accumulation  # the table's
    table, (types, sinks) = setup.pipeline.table, _pipeline_sinks(setup)

    def gradient_of(params, batch, stale=None):
        tokens = lambda batch: jnp.sum(batch["weights"])  # noqa: E731
        whole = lambda params: _gathered(setup, params) if gather == "step" else params  # noqa: E731
        runs = [(whole(params), batch)]
        if stale is None:
            made, _ = run_pipeline(setup, table, runs, z_loss, sinks)
            _, loss, z = (each[0] for each in made.losses)
            (grads,) = _finished(setup, types, made)
            return (loss, z), jnp.maximum(tokens(batch), 1.0), grads, None
        runs.append((whole(stale.params), stale.batch))
        made, flight = run_pipeline(setup, table, runs, z_loss, sinks, stale.flight)
        grads, before = _finished(setup, types, made)
        new = Stale(params, batch, grads, tuple(each[0] for each in made.losses), flight)
        grads = jax.tree.map(jnp.add, before, stale.gradients)
        pairs = zip(made.losses, stale.losses, strict=True)
        _, loss, z = (each[1] + old for each, old in pairs)
        return (loss, z), tokens(stale.batch), grads, new

    return gradient_of


def of_replicas(setup: Setup, *, accumulation: int, z_loss: float, gather: str):
    """(parameters, batch) -> ((loss, z-loss), tokens, gradients), all of [n, ...]: each replica's
    means over its own tokens, in fp32.

    A replica's part of the program is the text of `of_batch` on a mesh without `data`, so that it
    communicates within the replica only. Parameters: of each replica, hidden (`sharding.to_local`).
    """
    axes = (strategy.AXIS,)
    inside = dataclasses.replace(
        setup, run=dataclasses.replace(setup.run, place=setup.run.place.per_replica(axes))
    )
    make = of_batch if setup.pipeline is None else of_batch_in_stages
    gradient_of = make(inside, accumulation=accumulation, z_loss=z_loss, gather=gather)

    def gradients(params, batch):
        batch = jax.tree.map(functools.partial(sharding.local_part, setup.mesh, axes), batch)
        losses, _, grads, _ = gradient_of(params, batch)
        tokens = jnp.sum(batch["weights"])  # none at all, perhaps: such a replica has no share
        grads = jax.tree.map(
            lambda leaf, to: jax.sharding.reshard(leaf.astype(jnp.float32), to),
            grads, setup.updates,
        )  # fmt: skip
        stacked = lambda leaf: sharding.from_local(setup.mesh, axes, leaf[None])  # noqa: E731
        return jax.tree.map(stacked, (losses, tokens, grads))

    return gradients


def _pipeline_sinks(setup: Setup):
    """Types of the gradients of all parameters, and (of the layers, of the others)."""
    types = _sinks(setup, setup.pipeline.table.num_microbatches)
    return types, (types["blocks"], _outside(types))


def abstract_stale(setup: Setup) -> Stale:
    params, batch = setup.abstract.params, setup.abstract_batch(*setup.pipeline.rows)
    types, sinks = _pipeline_sinks(setup)

    def make(params, batch):
        made, flight = run_pipeline(setup, setup.pipeline.table, [(params, batch)] * 2, 0.0, sinks)
        losses = tuple(each[0] for each in made.losses)
        return Stale(params, batch, _finished(setup, types, made)[0], losses, flight)

    with jax.set_mesh(setup.mesh), setup.run.policy.products():
        shapes = jax.eval_shape(make, params, batch)
    place = lambda leaf: NamedSharding(setup.mesh, leaf.sharding.spec)  # noqa: E731
    return jax.tree.map(lambda leaf: placed(leaf, place(leaf)), shapes)


def _finished(setup: Setup, types, made: executor.Sums) -> list:
    """Gradients of this step, and of the step before if there is one, placed as gradients are."""
    ages = made.losses[0].shape[0]
    outer, blocks = _outside(setup.gradients), setup.gradients["blocks"]

    def stacked(leaf, sink, to):
        spec = PartitionSpec(None, *to.spec.partitions)
        return jax.sharding.reshard(leaf.astype(sink.dtype), NamedSharding(to.mesh, spec))

    def staged(leaf, sink, to):
        leaf = jax.sharding.reshard(leaf.astype(sink.dtype), executor.stage_sharding(to))
        return jnp.reshape(
            leaf,
            (ages, -1, *leaf.shape[1:]),
            out_sharding=PartitionSpec(None, *jax.typeof(leaf).sharding.spec.partitions),
        )

    outer = jax.tree.map(stacked, made.outer, _outside(types), outer)
    blocks = jax.tree.map(staged, made.blocks, types["blocks"], blocks)

    def of(age: int):
        outer_of, blocks_of = jax.tree.map(lambda leaf: leaf[age], (outer, blocks))
        return outer_of | {"blocks": executor.from_stages(blocks_of, setup.mesh)}

    return [of(age) for age in range(ages)]


def run_pipeline(setup: Setup, table: Table, runs: list, z_loss: float, sinks, flight=None):
    """What `executor.run_table` returns for (parameters, batch) of this step, and of the step
    before; losses are all, of the tokens, of z."""
    apply, run, parts = setup.apply, setup.run, setup.pipeline.chunks
    place = dataclasses.replace(run.place, local_axes=(*tick.STAGE, *run.place.local_axes))
    inside = dataclasses.replace(run, place=place)

    def routed(outer, sinks):
        if sinks is None:
            return outer
        return outer | run.place.with_grad_buffers({name: outer[name] for name in sinks}, sinks)

    def embed(outer, sinks, rows):
        return apply.embedded(routed(outer, sinks), rows["tokens"], rows["positions"], run)

    def beside(rows):
        mask = apply_lib.self_mask(rows["segment_ids"], rows["positions"], run)
        return mask, apply.rotations(rows["positions"])

    def part(weights, sinks, x_BTD, beside, kinds):
        mask, rotations = beside
        return apply.apply_layers(
            weights, x_BTD, mask, inside, kinds=kinds, grad_buffers=sinks, rotations=rotations
        )[0]

    def losses(outer, sinks, x_BTD, rows):
        loss_BT, log_z_BT = apply.last_losses(routed(outer, sinks), x_BTD, rows["targets"], run)
        loss = jnp.sum(loss_BT * rows["share"])
        z = z_loss * jnp.sum(jnp.square(log_z_BT) * rows["share"])
        return loss + z, loss, z

    tied, learned = setup.model.tied_head, setup.model.positions == "learned"
    pieces = tick.ModelFunctions(
        embed, beside, part, losses,
        embed_names=("embedding", *(["positions"] if learned else [])),
        losses_names=("norm", "embedding" if tied else "head"),
        uses_dot=jax.tree.map(
            lambda _, axes: "embed" in axes, setup.abstract.params["blocks"], setup.axes["blocks"]
        ),
    )  # fmt: skip

    def prepared(batch):
        tokens = jnp.maximum(jnp.sum(batch["weights"]), 1.0)
        batch = batch | {"share": batch["weights"] / tokens}
        batch = dict(zip(batch, apply.split_rows(batch.values(), run), strict=True))
        return _microbatches(batch, table.num_microbatches)

    return executor.run_table(
        ticks.program(table), parts, pieces, run.place.mesh,
        params=tuple((params["blocks"], _outside(params)) for params, _ in runs),
        batches=tuple(prepared(batch) for _, batch in runs),
        kinds=setup.model.layer_kinds, grad_buffers=sinks, in_flight=flight,
    )  # fmt: skip


def _gathered(setup: Setup, params):
    """The weights of products whole over the batch axes, in the compute dtype.

    The tables that are looked up stay split: token ids and results travel in their place.
    """

    def one(path, leaf, axes):
        if "embed" not in axes or path[0].key in decoder.LOOKED_UP:
            return leaf
        return dot.gathered(leaf, setup.run.policy.compute)

    return jax.tree_util.tree_map_with_path(one, params, setup.axes)


def gathered_bytes(setup: Setup) -> int:
    """Bytes per device of the weights that gather="step" keeps whole."""
    with jax.set_mesh(setup.mesh):
        gathered = jax.eval_shape(lambda params: _gathered(setup, params), setup.abstract.params)
    split = jax.tree.map(lambda leaf: leaf.sharding.spec, setup.abstract.params)
    leaves = zip(jax.tree.leaves(gathered), jax.tree.leaves(split), strict=True)
    return sharding.device_bytes([leaf for leaf, to in leaves if leaf.sharding.spec != to])


def _outside(tree: dict) -> dict:
    """What belongs to embedding and head, and not to the layers."""
    return {name: leaf for name, leaf in tree.items() if name != "blocks"}


def _sinks(setup: Setup, accumulation: int):
    """The types of all sinks: see `_sink`."""
    one = functools.partial(_sink, setup, accumulation)
    return jax.tree.map(one, setup.abstract.params, setup.gradients, setup.axes)


def _sink(setup: Setup, accumulation: int, leaf, to: NamedSharding, axes) -> jax.ShapeDtypeStruct:
    """The type in which a parameter's gradient leaves its layer.

    Matrices: in the reduce dtype, summed over the devices at once, behind the next layer's work;
    but over axes that do not split the gradient only after the last microbatch. Norms and biases:
    in fp32, and summed after the last layer, all layers together.
    """
    place, policy = setup.run.place, setup.run.policy
    small = "embed" not in axes
    later = [
        axis
        for axis in place.token_axes
        if axis not in sharding.used_axes(to.spec) and (small or accumulation > 1)
    ]
    return jax.ShapeDtypeStruct(
        leaf.shape,
        leaf.dtype if small else policy.reduce,
        sharding=NamedSharding(place.mesh, sharding.reduced(to.spec, later)),
    )


def _microbatches(batch: Batch, num: int) -> Batch:
    """[B, T] as [num, B/num, T], every num-th row together, so that no row leaves its device."""

    def split(array):
        rows, *rest = jax.typeof(array).sharding.spec
        shape = (array.shape[0] // num, num, *array.shape[1:])
        array = jnp.reshape(array, shape, out_sharding=PartitionSpec(rows, None, *rest))
        return jnp.swapaxes(array, 0, 1)

    return jax.tree.map(split, batch)

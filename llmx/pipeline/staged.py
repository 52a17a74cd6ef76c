"""The gradient of a batch by the operations of a pipeline's table, as a `contract.Gradient`.

A table that flushes drains the pipeline in each step, and `State.in_flight` is (). A periodic one
(PipeDream-2BW) takes in a batch with parameters W(t) and completes the one before, which entered
with W(t-1): W(t+1) = W(t) - update(gradient at W(t-1)).

With prediction neither is that late. A batch enters with what W(t+1) would be if the last update
came again, V(t) = 2 W(t) - W(t-1) (the idea of arXiv 1809.02839; here along the last update, for
any optimizer). And an update does not wait for the rest of a batch: on each stage it takes the M
microbatches whose BACKWARD the stage made in this period, E of the new batch and L = M - E of the
one before:

    W(t+1) = W(t) - update(sum of g_m(V(t)), m < E, of batch t
                           + sum of g_m(V(t-1)), m >= E, of batch t-1)

L is what is under way between periods and comes back to the stage in the next, of P stages
2 (P-1) - s on stage s. The first step updates nothing, and its E microbatches are left out.

Letters: B batch, T positions, D width, M microbatches.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from llmx import sharding
from llmx.contract import Batch, Gradient, Gradients
from llmx.model import apply as apply_lib
from llmx.model import remat_costs, training_loss
from llmx.model.training_loss import TrainingLoss
from llmx.pipeline import executor, tick, ticks
from llmx.pipeline.schedule import Table
from llmx.pipeline.stages import ModelChunks
from llmx.sharding.mesh import within


class InFlight(NamedTuple):
    """The batch that is under way between two steps of a periodic table."""

    params: Any  # with which the batch entered
    batch: Batch
    gradients: Any  # so far; with prediction (): they are applied already
    losses: tuple[jax.Array, ...]
    buffers: executor.Buffers
    extra: Any = ()  # states of the transforms with which the batch entered
    latest: Any = ()  # with prediction, the run's parameters when the batch entered


def staged(
    loss: TrainingLoss, table: Table, chunks: ModelChunks, rows: tuple[int, int] = (0, 0), *,
    predict: bool = False, deferred_layers: int | None = None,
) -> Gradient:  # fmt: skip
    """The gradient of a batch on a mesh with stages.

    Args:
      loss: of the model; its blocks' parameters are in the chunks' permutation.
      table: a legal table; its microbatches must divide the rows of each device.
      chunks: which layers each stage holds.
      rows: (B, T) of a batch, needed for a periodic table.
      predict: see above; for a periodic table.
      deferred_layers: of each chunk, whose weight gradients WEIGHT makes; None = all.

    With a periodic table, loss, tokens and gradient are of the batch of the step before: 0 in the
    first step. With prediction the gradient is of microbatches of both steps. Communicates over
    `stage`, and within a stage as the model does.
    """
    pipeline = _Pipeline(loss, table, chunks, predict, deferred_layers)
    if not table.periodic:
        return Gradient(lambda params: (), pipeline.take_flushed, pipeline.evaluate)
    types = pipeline.in_flight_types(rows)

    def init(params) -> InFlight:
        nothing = jax.tree.map(sharding.zeros, types)
        return nothing._replace(latest=jax.tree.map(jnp.copy, params)) if predict else nothing

    return Gradient(init, pipeline.take_periodic, pipeline.evaluate)


@dataclasses.dataclass(frozen=True, eq=False)
class _Pipeline:
    loss: TrainingLoss
    table: Table
    chunks: ModelChunks
    predict: bool
    deferred_layers: int | None

    @functools.cached_property
    def grad_buffers(self) -> Any:
        return self.loss.buffers(self.table.num_microbatches)

    def take_flushed(self, params, batch: Batch, in_flight: tuple, extra):
        """The gradient of `batch`, for a table that flushes."""
        with self.loss.execution.policy.products():
            sums, _ = self.run([(self.loss.gathered(params), batch, extra)])
            _, loss, z = (losses[0] for losses in sums.losses)
            (grads,) = self.placed(sums)
        return _gradients(loss, z, batch, grads, extra), in_flight

    def take_periodic(self, params, batch: Batch, old: InFlight, extra):
        """The gradient of the batch before, or of what is complete; `batch` in flight."""
        with self.loss.execution.policy.products():
            gathered, entering, latest = self.loss.gathered, params, ()
            if self.predict:
                ahead = lambda new, before: new + (new - before)  # noqa: E731
                entering, latest = jax.tree.map(ahead, params, old.latest), params
            steps = [
                (gathered(entering), batch, extra), (gathered(old.params), old.batch, old.extra)
            ]  # fmt: skip
            sums, buffers = self.run(steps, old.buffers)
            grads, before = self.placed(sums)
            losses = tuple(losses[0] for losses in sums.losses)
            later, other = ((), grads) if self.predict else (grads, old.gradients)
            new = InFlight(entering, batch, later, losses, buffers, extra, latest)
            grads = jax.tree.map(jnp.add, before, other)
            pairs = zip(sums.losses, old.losses, strict=True)
            _, loss, z = (losses[1] + begun for losses, begun in pairs)
        return _gradients(loss, z, old.batch, grads, old.extra), new

    def evaluate(self, params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """(sum of losses in nats, number of tokens) of a global batch; forward operations only."""
        table = ticks.forwards(self.table)
        with self.loss.execution.policy.products():
            sums, _ = self.run([(params, batch, ())], table=table, differentiate=False)
            loss = sums.losses[1][0] * jnp.maximum(jnp.sum(batch["weights"]), 1.0)
        return loss, jnp.sum(batch["weights"])

    def in_flight_types(self, rows: tuple[int, int]) -> InFlight:
        """Shapes and shardings of what a periodic table leaves; nothing is allocated."""

        def make(params, batch, extra):
            sums, buffers = self.run([(params, batch, extra)] * 2)
            losses = tuple(losses[0] for losses in sums.losses)
            grads, latest = ((), params) if self.predict else (self.placed(sums)[0], ())
            return InFlight(params, batch, grads, losses, buffers, extra, latest)

        mesh = self.loss.mesh
        with within(mesh), self.loss.execution.policy.products():
            types = jax.eval_shape(
                make, self.loss.params, self.loss.abstract_batch(rows), self.loss.abstract_extra
            )
        place = lambda leaf: training_loss.placed(leaf, NamedSharding(mesh, leaf.sharding.spec))  # noqa: E731
        return jax.tree.map(place, types)

    def run(self, steps, in_flight=None, *, table: Table | None = None, differentiate: bool = True):
        """What `executor.run_table` returns for (parameters, batch, states of the transforms) of
        this step, and of the step before; losses are: what is differentiated, of the tokens, the
        z-loss."""
        table, buffers, apply = table or self.table, self.grad_buffers, self.loss.apply

        def prepared(batch, extra):
            tokens = jnp.maximum(jnp.sum(batch["weights"]), 1.0)
            batch = batch | {"share": batch["weights"] / tokens}
            split = apply.split_rows(batch.values(), self.loss.execution)
            split = dict(zip(batch, split, strict=True))
            split = training_loss.microbatches(split, table.num_microbatches)
            of_each = lambda leaf: jnp.broadcast_to(leaf, (table.num_microbatches, *leaf.shape))  # noqa: E731
            return split | {"extra": jax.tree.map(of_each, extra)}

        program = ticks.program(table)
        if self.deferred_layers is not None:
            program = dataclasses.replace(program, deferred_layers=self.deferred_layers)
        return executor.run_table(
            program, self.chunks, _functions(self.loss, self.chunks), self.loss.mesh,
            params=tuple((params["blocks"], _outside(params)) for params, *_ in steps),
            batches=tuple(prepared(batch, extra) for _, batch, extra in steps),
            kinds=apply.model.block_kinds, in_flight=in_flight,
            grad_buffers=(buffers["blocks"], _outside(buffers)) if differentiate else None,
        )  # fmt: skip

    def placed(self, sums: executor.Sums) -> list:
        """Gradients of this step, and of the one before if there is one, as `loss.gradients`."""
        steps, to, buffers = len(sums.losses[0]), self.loss.gradients, self.grad_buffers

        def outside(leaf, buffer, to):
            spec = PartitionSpec(None, *to.spec.partitions)
            return jax.sharding.reshard(leaf.astype(buffer.dtype), NamedSharding(to.mesh, spec))

        def in_blocks(leaf, buffer, to):
            local = sharding.split_as(to.spec, None, *to.spec.partitions[1:])
            to = NamedSharding(to.mesh, local)
            leaf = jax.sharding.reshard(leaf.astype(buffer.dtype), to)
            spec = PartitionSpec(None, *jax.typeof(leaf).sharding.spec.partitions)
            return jnp.reshape(leaf, (steps, -1, *leaf.shape[1:]), out_sharding=spec)

        outer = jax.tree.map(outside, sums.outer, _outside(buffers), _outside(to))
        blocks = jax.tree.map(in_blocks, sums.blocks, buffers["blocks"], to["blocks"])
        from_local = functools.partial(sharding.from_local, self.loss.mesh, tick.STAGE)

        def of(step: int):
            outer_of, blocks_of = jax.tree.map(lambda leaf: leaf[step], (outer, blocks))
            return outer_of | {"blocks": jax.tree.map(from_local, blocks_of)}

        return [of(step) for step in range(steps)]


def _functions(loss: TrainingLoss, chunks: ModelChunks) -> tick.ModelFunctions:
    """The model as an executor runs it: `stage` is local in what a chunk does."""
    apply, execution, model = loss.apply, loss.execution, loss.apply.model
    place = execution.place
    local = dataclasses.replace(place, local_axes=(*tick.STAGE, *place.local_axes))
    inside = dataclasses.replace(execution, place=local)

    def with_buffers(outer, buffers):
        return outer if buffers is None else apply.with_grad_buffers(outer, buffers, execution)

    def embed(outer, buffers, rows):
        mask = apply_lib.self_mask(rows["segment_ids"], rows["positions"], execution)
        return apply.embedded(
            with_buffers(outer, buffers), rows["tokens"], mask, execution, grad_buffers=buffers,
            noise_BT=rows.get("noise"),
        )  # fmt: skip

    def side_inputs(rows, works):
        mask = apply_lib.self_mask(rows["segment_ids"], rows["positions"], execution)
        share_BT = None
        if model.num_experts:
            # Without an operation no loss of the routers is minimized.
            share_BT = loss.token_shares(jnp.where(works, rows["share"], 0), rows["extra"])
        return mask, apply.rotations(rows["positions"]), share_BT, rows.get("noise")

    def apply_layers(weights, buffers, x_BTD, side_inputs, kinds, *, row=None, first=0):
        mask, rotations, share_BT, noise_BT = side_inputs
        return apply.apply_layers(
            weights, x_BTD, mask, inside, kinds=kinds, grad_buffers=buffers, rotations=rotations,
            row=row, first=first, share_BT=share_BT, noise_BT=noise_BT,
        )[0]  # fmt: skip

    def losses(outer, buffers, x_BTD, rows):
        outer = with_buffers(outer, buffers)
        token_losses = apply.last_losses(outer, x_BTD, rows, execution)
        return loss.weighted(token_losses, rows["share"], rows["extra"])

    params, axes = loss.params["blocks"], loss.axes["blocks"]
    policies = remat_costs.policies(model, execution.remat, chunks.layers)
    recomputed = all(policy.saved is not None for policy in policies)
    return tick.ModelFunctions(
        embed, side_inputs, apply_layers, losses,
        embed_names=(
            "embedding", *("positions",) * (model.positions == "learned"),
            *("first",) * (model.num_first > 0),
        ),
        losses_names=("norm", "embedding" if model.tied_head else "head"),
        # Experts have a product of their own, which defers no gradient.
        uses_dot=jax.tree.map(
            lambda _, axes: "embed" in axes and "experts" not in axes, params, axes
        ),
        remat=execution.remat,
        kept_bytes=remat_costs.saved_bytes_of_chunk(
            model, text=execution.remat, chunks=chunks.layers,
            compute_bytes=execution.policy.compute.itemsize,
        )
        if recomputed
        else None,
    )  # fmt: skip


def _gradients(loss, z_loss, batch: Batch, tree, extra) -> Gradients:
    tokens = jnp.sum(batch["weights"])
    # In the first step with prediction there are gradients, of no complete batch. NaN tokens are
    # bad, not absent (llmx/step/guard.py).
    squares = jnp.where(tokens != 0, training_loss.squared_norms(tree), 0)
    norm = jnp.sqrt(squares.sum())
    return Gradients(loss, z_loss, tokens, tree, squares, norm, extra=extra)


def _outside(tree: dict) -> dict:
    """What belongs to embedding and head, and not to the layers."""
    return {name: leaf for name, leaf in tree.items() if name != "blocks"}

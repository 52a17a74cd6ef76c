"""The gradient of a model that looks rows up in tables: see `llmx.tables`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from llmx import sharding
from llmx.contract import Gradient, Gradients, RowGradients
from llmx.model import looked_up
from llmx.model.training_loss import TrainingLoss, scaled
from llmx.step import gradients
from llmx.step.gradients import measured
from llmx.tables import late


def trained(
    make: Callable[[TrainingLoss], Gradient], loss: TrainingLoss, batch_size: int
) -> Gradient:
    """The gradient of the parameters and, apart from them, of the rows that a batch looks up
    (`Gradients.rows`): rows are looked up once, before the microbatches. As `make` makes it where
    there are no tables.

    The norm is that of the parameters, whose gradient is clipped: rows, which devices have in
    parts, have optimizers that scale theirs. Where a row's gradient is not finite it is nan, so
    that the guard refuses the update. Communicates, beside what `make`'s does, as `Tables.take`,
    and where updates come late as `Tables.update`.
    """
    tables = loss.execution.tables
    if tables is None:
        return make(loss)
    gradient = make(loss.with_rows(tables.abstract_rows(batch_size)))
    return _of_rows(loss, gradient, to_local=lambda row: row, summed=lambda found, row: row)


def of_replicas(
    make: Callable[[TrainingLoss], Gradient], loss: TrainingLoss, batch_size: int,
    axes: tuple[str, ...],
) -> Gradient:  # fmt: skip
    """The gradients of replicas along the mesh axes `axes`, as `gradients.per_replica` takes them,
    beside the gradient of rows, which replicas share: that of the global batch, as `trained` takes
    it."""
    tables, mesh = loss.execution.tables, loss.mesh
    if tables is None:
        return gradients.per_replica(make, loss, axes)
    size = batch_size // loss.execution.place.size(axes)
    own = loss.with_rows(tables.per_replica(axes).abstract_rows(size))
    gradient = gradients.per_replica(make, own, axes)

    def summed(found: Gradients, row: jax.Array) -> jax.Array:
        """[n, U, W] of the means of each replica -> [n U, W] of the mean of all."""
        row = scaled(row, found.shares)
        return jnp.reshape(row, (-1, row.shape[-1]), out_sharding=tables.split)

    to_local = lambda row: sharding.local_part(mesh, axes, row)  # noqa: E731
    return _of_rows(loss, gradient, to_local=to_local, summed=summed)


def _of_rows(
    loss: TrainingLoss, gradient: Gradient, *, to_local: Callable[[jax.Array], jax.Array],
    summed: Callable[[Gradients, jax.Array], jax.Array],
) -> Gradient:  # fmt: skip
    """`gradient`, of a loss that has rows among its parameters, as one that looks them up.

    to_local: rows that were taken -> those that are differentiated. summed: (Gradients, gradient of
    rows in their tree) -> gradient of the rows that were taken.
    """
    look_up = _late if loss.read_ahead else _at_once

    def take(params, batch, in_flight, extra):
        batch, taken, ahead = look_up(loss, batch, extra)
        rows = jax.tree.map(to_local, taken.rows)
        own = (looked_up.TABLES, looked_up.LATE)
        others = {name: state for name, state in extra.items() if name not in own}
        found, in_flight = gradient.take(
            params | {looked_up.ROWS: rows}, batch | looked_up.of_plan(taken.plan), in_flight,
            others,
        )  # fmt: skip
        tree = {name: leaf for name, leaf in found.tree.items() if name != looked_up.ROWS}
        of_rows = jax.tree.map(lambda row: summed(found, row), found.tree[looked_up.ROWS])
        found = measured(found._replace(tree=tree, rows=RowGradients(taken, of_rows, *ahead)))
        sums = [jnp.sum(jnp.abs(leaf)) for leaf in jax.tree.leaves(of_rows)]
        finite = jnp.isfinite(jnp.stack(sums)).all()
        return found._replace(norms=jnp.where(finite, found.norms, jnp.nan)), in_flight

    return Gradient(init=lambda params: (), take=take, loss=loss.summed)


def _at_once(loss: TrainingLoss, batch: dict, extra: Any):
    """The batch, its rows, and nothing ahead."""
    tables = loss.execution.tables
    ids = loss.apply.table_ids(tables, batch)
    return batch, tables.take(extra[looked_up.TABLES], ids), ()


def _late(loss: TrainingLoss, batch: dict, extra: Any):
    """The batch alone, its rows, which are there already, and what is done beside their gradient:
    the tables with the update that comes now, and the next batch's rows in them."""
    tables, under_way = loss.execution.tables, extra[looked_up.LATE]
    batch, after = looked_up.without_next(batch)
    updated = late.arrived(tables, extra[looked_up.TABLES], under_way)
    ready = tables.take(updated, loss.apply.table_ids(tables, after))
    return batch, under_way.ready, (updated, ready)

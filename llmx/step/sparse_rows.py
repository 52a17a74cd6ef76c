"""The gradient of a model that looks rows up in tables: see `llmx.tables`."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from llmx.contract import Gradient
from llmx.model import looked_up
from llmx.model.training_loss import TrainingLoss
from llmx.step.gradients import measured


def trained(
    make: Callable[[TrainingLoss], Gradient], loss: TrainingLoss, batch_size: int
) -> Gradient:
    """The gradient of the parameters and, apart from them, of the rows that a batch looks up
    (`Gradients.rows`): rows are looked up once, before the microbatches. As `make` makes it where
    there are no tables.

    The norm is that of the parameters, whose gradient is clipped: rows, which devices have in
    parts, have optimizers that scale theirs. Where a row's gradient is not finite it is nan, so
    that the guard refuses the update. Communicates, beside what `make`'s does, as `Tables.take`.
    """
    tables = loss.execution.tables
    if tables is None:
        return make(loss)
    gradient = make(loss.with_rows(tables.abstract_rows(batch_size)))

    def take(params, batch, in_flight, extra):
        ids = loss.apply.table_ids(tables, batch)
        taken = tables.take(extra[looked_up.TABLES], ids)
        others = {name: state for name, state in extra.items() if name != looked_up.TABLES}
        found, in_flight = gradient.take(
            params | {looked_up.ROWS: taken.rows}, batch | looked_up.of_plan(taken.plan), in_flight,
            others,
        )  # fmt: skip
        tree = {name: leaf for name, leaf in found.tree.items() if name != looked_up.ROWS}
        of_rows = found.tree[looked_up.ROWS]
        found = measured(found._replace(tree=tree, rows=(taken, of_rows)))
        sums = [jnp.sum(jnp.abs(leaf)) for leaf in jax.tree.leaves(of_rows)]
        finite = jnp.isfinite(jnp.stack(sums)).all()
        return found._replace(norms=jnp.where(finite, found.norms, jnp.nan)), in_flight

    return Gradient(init=lambda params: (), take=take, loss=loss.summed)

"""A model of clicks as what a training loss takes of a model.

A record is a row of one position, T = 1: its label is the target, its numbers are "dense" and its
ids "ids". Rows of tables are among the parameters (`model.looked_up`).

Letters: B records, F numbers, I ids of all features side by side, L ids of a feature, W width of a
row.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from llmx.model import looked_up
from llmx.model.execution import Execution
from llmx.model.families import ModelConfig
from llmx.model.own import into_buffers
from llmx.model.recommender import recommender
from llmx.tables.tables import Plan, Tables

DENSE, IDS, ID_WEIGHTS = "dense", looked_up.IDS, "id_weights"  # of a batch


def _made(model: ModelConfig) -> recommender.Recommender:
    config = model.recommender
    lengths = dict(zip(config.features, config.lengths, strict=True))
    return recommender.make(config, num_dense=config.num_dense, lengths=lengths)


def abstract_parameters(model: ModelConfig) -> tuple[dict, dict]:
    """Shapes, fp32, and logical axes of the parameters, by path; nothing is allocated."""
    made = _made(model)
    return jax.eval_shape(made.init, jax.random.key(0)), dict(made.axes)


def init_parameters(model: ModelConfig, seed: int) -> dict:
    """New parameters, by path."""
    return _made(model).init(jax.random.key(seed))


@dataclasses.dataclass(frozen=True, eq=False)
class Apply:
    """A model of clicks as functions of its parameters."""

    model: ModelConfig
    id_arrays: ClassVar[tuple[str, ...]] = (IDS,)  # what `table_ids` reads of a batch

    @property
    def batch_arrays(self) -> dict[str, tuple[int, str]]:
        """What a batch has beside tokens, [B, 1, n]: by name, n and the dtype."""
        config = self.model.recommender
        arrays = {DENSE: (config.num_dense, "float32"), IDS: (config.num_ids, "int32")}
        return arrays | ({ID_WEIGHTS: (num, "float32")} if (num := sum(config.weights)) else {})

    def table_ids(self, tables: Tables, batch: dict) -> dict[str, jax.Array]:
        """What a batch looks up, int32 [B, L] by feature: ids lie in the order of the features."""
        ids_BI, found, first = batch[IDS][:, 0], {}, 0
        for feature in tables.features:
            found[feature.name] = ids_BI[:, first : first + feature.columns]
            first += feature.columns
        return found

    def losses(
        self, params: dict, batch: dict, execution: Execution, buffers: dict | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """The nats of each label, and log Z of its odds, fp32 [B, 1].

        params: with rows, or with tables, of which rows are looked up first.
        """
        if looked_up.TABLES in params:
            ids = self.table_ids(execution.tables, batch)
            params, batch = looked_up.with_rows(params, batch, execution.tables, ids)
        kept = ("targets", DENSE, ID_WEIGHTS, looked_up.PLACE, looked_up.PRESENT)
        arrays = {name: leaf for name, leaf in batch.items() if name.startswith(kept)}
        function = functools.partial(self._losses, execution)
        if buffers is None:
            return function(params, arrays)
        return into_buffers(function, params, arrays, buffers)

    def _losses(self, execution: Execution, params: dict, batch: dict):
        tables, compute = execution.tables, execution.policy.compute
        plan = looked_up.plan_of(batch, tables)
        embedded = tables.combine(params[looked_up.ROWS], plan, self._weights(batch))
        dense = {name: leaf for name, leaf in params.items() if name != looked_up.ROWS}
        there = self._present(tables, plan)
        to = execution.place.activation(("batch", "sequence"))

        def of_records(params, embedded, there, dense_B1F, targets_B1):
            cast = lambda tree: jax.tree.map(lambda leaf: leaf.astype(compute), tree)  # noqa: E731
            logit_B = _made(self.model).logits(
                cast(params), dense_B1F[:, 0].astype(compute), cast(embedded), there
            )
            label_B = targets_B1[:, 0].astype(jnp.float32)
            nats_B, log_z_B = recommender.losses(logit_B, label_B)
            return nats_B[:, None], log_z_B[:, None]

        arrays = (embedded, there, batch[DENSE], batch["targets"])
        if not execution.place.local_axes:
            return jax.sharding.auto_axes(of_records, out_sharding=(to, to))(dense, *arrays)
        # The compiler knows of no local views, and must not place what is in one.
        whole, spec_of = PartitionSpec(), lambda array: jax.typeof(array).sharding.spec
        dense = jax.tree.map(lambda leaf: jax.sharding.reshard(leaf, whole), dense)
        specs = jax.tree.map(spec_of, arrays)
        placed = execution.place.manual(
            of_records, in_specs=(jax.tree.map(lambda _: whole, dense), *specs),
            out_specs=(to, to),
        )  # fmt: skip
        return placed(dense, *arrays)

    def _weights(self, batch: dict) -> dict[str, jax.Array]:
        """Weights of ids, fp32 [B, L], of the features that have some."""
        found, first, config = {}, 0, self.model.recommender
        for name, number in zip(config.features, config.weights, strict=False):
            if number:
                found[name] = batch[ID_WEIGHTS][:, 0, first : first + number]
                first += number
        return found

    def _present(self, tables: Tables, plan: Mapping[str, Plan]) -> dict[str, jax.Array]:
        """Which ids there are, bool [B, L], of features that are not combined."""
        found = {}
        for key, group in tables.groups.items():
            first = 0
            for feature, _ in group.lookups(tables.features):
                end = first + feature.columns
                if feature.combine == "none":
                    found[feature.name] = plan[key].present_BK[:, first : end : feature.hashes]
                first = end
        return found


def logits(nats_B: Any, log_z_B: Any, label_B: Any, xp: Any) -> Any:
    """The log odds of a click, of what `Apply.losses` returns: where the label is 1, log Z - nats;
    else log(exp(log Z) - 1), of which nats = log Z."""
    return xp.where(label_B > 0, log_z_B - nats_B, log_z_B + xp.log(-xp.expm1(-log_z_B)))

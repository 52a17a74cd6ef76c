"""Sparse tables as state of a run: rows that a batch has looked up are updated after it, or in a
later step.

Their learning rate follows the schedule of the run: `tables.learning_rate` at its peak.
"""

import functools
from collections.abc import Mapping
from typing import Any

import optax

from llmx.contract import Batch, Constraint, Gradients, State
from llmx.model.looked_up import LATE, TABLES
from llmx.model.training_loss import TrainingLoss
from llmx.tables import late
from llmx.tables.late import Late
from llmx.tables.tables import Tables, TablesState

SETTLED = "settled"  # the program that makes the updates that are under way


def constraints(
    loss: TrainingLoss, schedule: optax.Schedule, peak: float, seed: int, *, total_steps: int,
    batch_size: int,
) -> Mapping[str, Constraint]:  # fmt: skip
    """The constraints by name; {} where there are no tables. `schedule`: of the run's learning
    rate, whose peak is `peak`."""
    tables = loss.execution.tables
    if tables is None:
        return {}

    def rate_of(state: State):
        return tables.config.learning_rate * schedule(state.step) / peak

    def at_once(state: TablesState, before: State, found: Gradients, accepted) -> TablesState:
        rows = found.rows
        return tables.update(
            state, rows.taken, rows.tree, rate=rate_of(before), accepted=accepted
        )  # fmt: skip

    def came(state: TablesState, before: State, found: Gradients, accepted) -> TablesState:
        return found.rows.tables

    def sent(state: Late, before: State, found: Gradients, accepted) -> Late:
        rows = found.rows
        return late.sent(state, rows.ready, rows.tree, rate=rate_of(before), accepted=accepted)

    were = functools.partial(_were, tables)
    moving = dict(is_moved=lambda meta: tables.is_moved(*were(meta)))
    own = {
        TABLES: Constraint(
            abstract=tables.abstract, init=lambda params: tables.new(seed),
            after=came if loss.read_ahead else at_once,
            relaid=lambda saved, meta: tables.relaid(saved, *were(meta)), **moving,
            saved=_decay_only if tables.virtual else None, **_PASSIVE,
        )
    }  # fmt: skip
    if not loss.read_ahead:
        return own

    def begin(state: State, batch: Batch) -> Late:
        ids = loss.apply.table_ids(tables, batch)
        return state.extra[LATE]._replace(ready=tables.take(state.extra[TABLES], ids))

    of_late = _PASSIVE | dict(
        programs={SETTLED: lambda state: _settled(tables, state)},
        due_after=lambda step: (SETTLED,) if step == total_steps - 1 else (),
    )
    return own | {
        LATE: Constraint(
            abstract=late.abstract(tables, batch_size),
            init=lambda params: late.new(tables, batch_size), after=sent, begin=begin,
            relaid=lambda saved, meta: late.relaid(tables, saved, *were(meta)), **moving, **of_late,
        )
    }  # fmt: skip


def _were(tables: Tables, meta: Mapping[str, Any]) -> tuple[Mapping[str, int], str]:
    """Sizes of the mesh that rows were saved on, and how they were split."""
    section = meta.get("config", {}).get("tables", {})
    return meta.get("mesh", {}), section.get("split", tables.config.split)


def _decay_only(state: TablesState) -> TablesState:
    """The rows of a cache are those of the host, which has files of its own."""
    return state._replace(rows={}, slots={})


def _settled(tables: Tables, state: State) -> State:
    """The state of which no update of tables is under way."""
    own = late.settled(tables, state.extra[TABLES], state.extra[LATE])
    return state._replace(extra=dict(state.extra) | dict(zip((TABLES, LATE), own, strict=True)))


# What a constraint is that changes neither gradients nor parameters.
_PASSIVE: Mapping[str, Any] = dict(
    gradients=lambda found, state: found, hold=lambda state: state,
    refreshed=lambda state: state, programs={}, due_after=lambda step: (),
    scalars=lambda state: {}, reads=True,
)  # fmt: skip

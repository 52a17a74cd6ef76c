"""Sparse tables as state of a run: rows that a batch has looked up are updated after it.

Their learning rate follows the schedule of the run: `tables.learning_rate` at its peak.
"""

from collections.abc import Mapping
from typing import Any

import optax

from llmx.contract import Constraint, Gradients, State
from llmx.model.looked_up import TABLES
from llmx.tables.tables import Tables, TablesState


def constraints(
    tables: Tables | None, schedule: optax.Schedule, peak: float, seed: int
) -> Mapping[str, Constraint]:
    """The constraint by name; {} where there are no tables. `schedule`: of the run's learning rate,
    whose peak is `peak`."""
    if tables is None:
        return {}

    def after(state: TablesState, before: State, found: Gradients, accepted) -> TablesState:
        rate = tables.config.learning_rate * schedule(before.step) / peak
        taken, gradients = found.rows
        return tables.update(state, taken, gradients, rate=rate, accepted=accepted)

    def relaid(saved: Any, sizes: Mapping[str, int]) -> TablesState:
        return tables.relaid(saved, sizes)

    def decay_only(state: TablesState) -> TablesState:
        """The rows of a cache are those of the host, which has files of its own."""
        return state._replace(rows={}, slots={})

    saved = decay_only if tables.virtual else None

    return {
        TABLES: Constraint(
            abstract=tables.abstract, init=lambda params: tables.new(seed),
            gradients=lambda found, state: found, after=after, hold=lambda state: state,
            refreshed=lambda state: state, programs={}, due_after=lambda step: (),
            scalars=lambda state: {}, reads=True, relaid=relaid,
            saved=saved,
        )
    }  # fmt: skip

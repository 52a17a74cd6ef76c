"""What pipelines on GPUs move between slots and layers, beside what layers themselves do.

Ticks that take branches read and write the slots of saved activations and of factors whichever
branch is taken, and so does what a branch returns. And layers that save everything write it in
other layouts than slots have it in. Other programs update slots in place, in what computes them.
"""

import functools

from llmx.config import utilization
from llmx.config.tick_arrays import Ticks
from llmx.pipeline import ticks
from llmx.pipeline.schedule import Table
from llmx.plan.sizes import Sizes

# Passes over bytes of a microbatch, fitted to tests/golden/plain_pipelines.jsonl: in each tick with
# branches, and in each FORWARD (with its BACKWARD) whose layers save all.
OF_BRANCHES, OF_SAVES = 4.5, 6.0


def moved_bytes(counted: Sizes, deferred: float) -> float:
    """In a step of a resolved run. `deferred`: the share of layers whose weight gradients are."""
    run = counted.run
    if run.mesh.stage == 1:
        return 0.0
    table = utilization.table_of(run)
    layers = round(deferred * max(utilization.chunks_of(run)))
    held = Ticks(run, ticks.program(table), layers, True)
    found = OF_BRANCHES * _with_branches(table) * (held.saved_by_forward + held.factors)
    if held.saves_all:
        passes = run.batch.accumulation * table.chunks_per_stage
        found += OF_SAVES * passes * held.saved
    return found


@functools.lru_cache(maxsize=512)
def _with_branches(table: Table) -> int:
    """Ticks in which stages do different things."""
    if not table.mixes_kinds:
        return 0
    return sum(len({kind for kind in row if kind}) > 1 for row in table.kind.tolist())

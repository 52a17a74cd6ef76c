"""What pipelines move between slots and layers, beside what layers themselves do.

Ticks that take branches read and write the slots of saved activations and of factors whichever
branch is taken, and so does what a branch returns. And layers that save everything write it in
other layouts than slots have it in. Other programs update slots in place, in what computes them.
Counted in programs of GPUs alone.
"""

from llmx.config import tick_arrays, utilization
from llmx.plan.gemm import Core
from llmx.plan.operators import ENDS, MOVES, Moved, Operator
from llmx.plan.sizes import Sizes


def of(counted: Sizes, core: Core, moved: Moved, deferred: float) -> list[Operator]:
    """The operator of a resolved run's step, if there is one. `deferred`: the share of layers whose
    weight gradients are deferred."""
    run = counted.run
    if run.mesh.stage == 1 or not (moved.branches or moved.unlike_slots):
        return []
    layers = round(deferred * max(utilization.chunks_of(run)))
    held = tick_arrays.of(run, layers, on_gpu=core.chip.is_gpu)
    table = held.program.table
    found = moved.branches * table.num_mixed * (held.saved_by_forward + held.factors)
    if held.saves_all:
        passes = run.batch.accumulation * table.chunks_per_stage
        found += moved.unlike_slots * passes * held.saved
    seconds = found / core.bandwidth
    return [Operator("slots", MOVES, ENDS, seconds, bytes=found)] if found else []

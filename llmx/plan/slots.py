"""What pipelines move between slots and layers, beside what layers themselves do.

What a layer has saved when it is differentiated was written to a slot, or is made of what was, and
is read from there; so are the factors of deferred weight gradients. Layers that save everything
write it in other layouts than slots have it in. And ticks that take branches read and write the
slots whichever branch is taken, and so does what a branch returns. Counted in programs of GPUs
alone.
"""

from llmx.config import tick_arrays, utilization
from llmx.plan.gemm import Core
from llmx.plan.operators import ENDS, MOVES, Moved, Operator
from llmx.plan.sizes import Sizes


def of(counted: Sizes, core: Core, moved: Moved, deferred: float) -> list[Operator]:
    """The operator of a resolved run's step, if there is one. `deferred`: the share of layers whose
    weight gradients are deferred."""
    run = counted.run
    if run.mesh.stage == 1 or not moved.of_slots:
        return []
    layers = round(deferred * max(utilization.chunks_of(run)))
    held = tick_arrays.of(run, layers, on_gpu=core.chip.is_gpu)
    table = held.program.table
    found = moved.branches * table.num_mixed * (held.saved_by_forward + held.factors)
    of_saved = moved.unlike_slots if held.saves_all else moved.of_slots
    passes = run.batch.accumulation * table.chunks_per_stage
    found += passes * (of_saved * held.saved + moved.of_factors * held.factors)
    seconds = found / core.bandwidth
    return [Operator("slots", MOVES, ENDS, seconds, bytes=found)]

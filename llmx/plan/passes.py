"""How often a device gathers, computes and sends in a step: passes over layers, lookups, heads.

Of a pipeline as `llmx.pipeline` runs its schedule, in loops over ticks.
"""

import collections
import dataclasses
import functools

import jax

from llmx.config import Config, utilization
from llmx.config.axes import WRITTEN_OUT
from llmx.model import remat, remat_costs
from llmx.pipeline import executor, ticks
from llmx.pipeline.schedule import BACKWARD, FORWARD, WEIGHT, Table
from llmx.pipeline.tick import When


@dataclasses.dataclass(frozen=True)
class Passes:
    """How often a device does what in a step. A pass is over `layers` layers of one microbatch."""

    forward: float  # on average over stages
    backward: float
    layers: int  # of a pass: empty slots of a pipeline are computed too
    lookups: int  # of a microbatch's tokens
    lookup_gradients: int
    heads: int
    sends: int  # to another stage
    unread: int = 0  # of these in the last iterations of loops, where no stage stores what arrives
    alike: int = 0  # passes forward and backward in ticks in which all stages do the same
    first: int = 0  # of `layers`, the dense first ones
    steps: int = 1  # whose gradients are added up over replicas together
    shared: int = 0  # passes of one layer, forward and backward, that gather its weights together
    idle: int = 0  # lookups of nothing in the last iterations of loops, which XLA:GPU leaves out
    weight: float = 0  # passes that make deferred weight gradients

    @property
    def blocks(self) -> int:
        return self.layers - self.first


def of(run: Config) -> Passes:
    """Of a resolved run. In ticks of one kind stages with nothing to do compute as the others."""
    microbatches = run.batch.accumulation
    if run.mesh.stage == 1:
        return Passes(
            microbatches, microbatches, run.model.num_layers, *[microbatches] * 3, 0,
            first=run.model.num_first,
        )  # fmt: skip
    table = utilization.table_of(run)
    counts = _of_schedule(table)
    chunks = utilization.chunks_of(run)
    # A loop over one layer is written out; with one chunk of each stage all passes read the same
    # weights, and where nothing is run again those of the backward pass are not kept apart.
    alone = max(chunks) == 1 and len(chunks) == run.mesh.stage
    # Of a lookup of nothing XLA:GPU sees that it is not used where a chunk is one layer; as
    # compiled once, where a stage's chunks take branches; and where weights are gathered once a
    # step, but for a tied head and a loop over layers, or layers that are run again with `part`.
    again = max(chunks) > WRITTEN_OUT or remat.keeps_input(run.remat)
    keeps_lookups = run.model.tied_head and again
    unused = max(chunks) == 1 or (run.sharding.gather == "step" and not keeps_lookups) or (
        len(chunks) > run.mesh.stage and remat_costs.branches(run.model, chunks)
    )  # fmt: skip
    joined = 0
    if alone and remat_costs.saves_all(run.model, run.remat):
        joined = counts["joined"]
    return Passes(
        counts[FORWARD], counts[BACKWARD], max(chunks),
        *(counts[name] for name in _ENDS), counts["send"], counts["unread"], counts["alike"],
        steps=2 if table.periodic else 1, shared=joined,
        idle=counts["idle"] * unused, weight=counts[WEIGHT],
    )  # fmt: skip


@functools.lru_cache(maxsize=512)
def _of_schedule(table: Table) -> collections.Counter:
    """What happens in all ticks of a schedule, as often as a device does it."""
    program = ticks.program(table)
    counts = collections.Counter()
    for first, length, times in program.loops:
        body = collections.Counter()
        for tick in range(length):
            at = slice(first + tick, first + length * times, length)
            rows = jax.tree.map(lambda a: a[at], program.rows)  # noqa: B023
            counts += _counted(rows, times)
            body[executor.body_of(rows).kinds] += 1
        counts["joined"] += times * min(body[frozenset({kind})] for kind in (FORWARD, BACKWARD))
    return counts


_ENDS = ("embedding", "embedding_gradient", "head")


def _counted(rows: ticks.Row, times: int) -> collections.Counter:
    """What happens in the ticks of a loop at one place of its body, each of `times`."""
    kinds, when, _ = executor.body_of(rows)
    counts = collections.Counter()
    if len(kinds) == 1:  # all stages compute, whether their results are used or not
        counts.update(dict.fromkeys(kinds, times))
        counts["alike"] = times * len(kinds & {FORWARD, BACKWARD})
    else:
        stages = rows.kind.shape[1]
        counts.update({kind: (rows.kind == kind).sum() / stages for kind in kinds})
    if len(kinds) == 1 and when.embedding is When.ALWAYS:
        counts["idle"] = int(rows.embedding[-1] < 0)
    for name in _ENDS:
        always = getattr(when, name) is When.ALWAYS
        counts[name] = times if always else int((getattr(rows, name) >= 0).sum())
    arrivals = (when.input_arrivals.items(), when.gradient_arrivals.items())
    distances = {at for entries in arrivals for at, of in entries if at and of is not When.NEVER}
    counts["send"] = times * len(distances)
    arrived = (rows.input_arrivals, rows.gradient_arrivals)
    last = {at for entries in arrived for at, slots in entries.items() if (slots[-1] >= 0).any()}
    if len(kinds) == 1:  # loops with branches are left as they are
        counts["unread"] = len(distances - last)
    return counts

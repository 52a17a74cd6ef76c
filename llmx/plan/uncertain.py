"""Where the count of a run is known to be further off than elsewhere, in words for the report.

Found by comparing programs that nobody chose (`scripts/draw_programs.py`); docs/plan.md has them.
"""

from collections.abc import Iterator, Sequence

from llmx.aot.report import size
from llmx.aot.topologies import Topology
from llmx.config import Config, state_memory, utilization
from llmx.config.axes import gathers_once, is_one_device
from llmx.model import remat
from llmx.model.attention import splash
from llmx.plan import sizes, traffic
from llmx.plan.sizes import Sizes
from llmx.plan.traffic import Message

SHORT = 0.05  # seconds of a step
SMALL = 2.5e8  # parameters: vocabulary and loss are most of what a device holds
# Tokens of a device below which, and devices that split the weights above which, what is gathered
# decides.
FEW_TOKENS, MANY_WAYS = 512, 64
FEW = 12  # layers; those of the mixtures that were compared are 32 and more
# Of the steps that are compared in docs/plan.md; their times were off by 13%.
_STRATEGIES = ("top_k", "diloco", "zero_one")


def of(run: Config, topology: Topology, sent: Sequence[Message], step: float) -> list[str]:
    """Of a resolved run. `sent`: its messages; `step`: seconds."""
    counted = sizes.of(run)
    found = [*_of_head(counted, topology, sent), *_of_attention(counted, topology, sent)]
    if run.mesh.stage > 1:
        found += _of_stages(run, topology)
    elif gathers_once(run) and run.model.tied_head:
        found.append("weights gathered once a step beside a tied head: memory a sixth more or less")
    if run.model.num_experts and run.model.num_layers < FEW:
        found.append(
            "a mixture of few layers, of which experts are most: memory an eighth more or less, "
            "time a fifth more or less"
        )
    if run.products.format == "fp8" and topology.platform == "gpu":
        found.append(
            "memory with fp8 on GPUs: results of a layer's products, which are fp32 at first, are "
            "left out"
        )
    ways = counted.size(counted.axes_of("embed", "parameters"))
    few = counted.tokens_between < FEW_TOKENS
    if topology.platform == "gpu" and ways > 1 and (few or ways > MANY_WAYS):
        found.append(
            "few tokens beside the weights that a GPU gathers, or weights over many GPUs: memory a "
            "fifth more or less, time up to twice as long"
        )
    if topology.platform == "tpu" and is_one_device(run):
        found.append("the time on one TPU: a fifth more or less, in fp32 half as much")
    if topology.platform == "tpu" and run.pipeline.schedule.startswith("zb"):
        found.append("the time of a zero-bubble schedule on TPUs: once half as long again")
    if of_attention := _not_by_kernel(run, topology):
        found.append(of_attention)
    if run.model.ngram_tables:
        found.append("memory, traffic and time of the tables of n-grams: they are not counted")
    numbers = sum(leaf.numbers for leaf in state_memory.leaves(run.model))
    if numbers < SMALL and run.model.num_layers < FEW:
        found.append("memory of a model this small: a quarter more or less")
    if step < SHORT:
        found.append("the time of a step this short: often a fifth more, once two thirds")
    if run.sync.strategy in _STRATEGIES:
        found.append(f"the time of sync.strategy={run.sync.strategy}: 13% more or less")
    return found


def _not_by_kernel(run: Config, topology: Topology) -> str:
    """Of attention whose scores go through memory: asked for, or as no kernel of a TPU takes the
    sequence."""
    name, length = run.attention.implementation, run.batch.sequence_length
    if name == "auto" and topology.platform == "tpu" and not splash.fits_lanes(length):
        name = f"blockwise (batch.sequence_length={length} is no multiple of 128)"
    elif name not in ("blockwise", "reference"):
        return ""
    return f"attention by {name}: counted is a kernel; memory up to four times as much, time twice"


def _of_head(counted: Sizes, topology: Topology, sent: Sequence[Message]) -> Iterator[str]:
    """Reduce-scatters of which XLA:TPU makes all-reduces."""
    if topology.platform != "tpu":
        return
    more = sum(
        one.sent for one in sent
        if one.kind == "reduce-scatter" and one.name == counted.head.name
    )  # fmt: skip
    less = sum(
        one.sent / 2 for one in sent
        if one.kind == "all-reduce" and one.name == counted.head.name
        and traffic.sums_whole(counted, one.size)
    )  # fmt: skip
    if less:
        yield (
            f"the gradient of the head: in some shapes XLA:TPU scatters it where it is counted as "
            f"summed on every device, {size(less)} less"
        )
    if more:
        axes = ",".join(counted.axes_of("embed", "gradients"))
        yield (
            f"the gradient of the head: in some shapes XLA:TPU sums all of it on every device, "
            f"{size(more)} more along {axes}"
        )


def _of_attention(counted: Sizes, topology: Topology, sent: Sequence[Message]) -> Iterator[str]:
    """The same of attention's weights: as compiled with 120, 200 and 376 columns, some of them."""
    axes = counted.axes_of("embed", "gradients")
    columns = counted.run.model.width // counted.size(axes)
    if topology.platform != "tpu" or columns % (2 * traffic.ROWS) != traffic.ROWS:
        return
    more = sum(
        one.sent for one in sent if one.kind == "reduce-scatter" and "/attention/" in one.name
    )
    if more and counted.run.model.width % traffic.LANES:
        yield (
            f"gradients of attention in {columns} columns: XLA:TPU sums some of them on every "
            f"device, up to {size(more)} more along {','.join(axes)}"
        )


def _of_stages(run: Config, topology: Topology) -> Iterator[str]:
    if max(utilization.chunks_of(run)) == 1:
        yield "stages of one layer: memory a tenth more or less, time up to a seventh more"
    if topology.platform == "gpu":
        yield "a pipeline on GPUs: memory a tenth more or less, time a seventh"
        if run.pipeline.schedule == "dual_pipe_v":
            yield "dual_pipe_v on GPUs: memory up to a seventh less"
        table = utilization.table_of(run)
        again = remat.keeps_input(run.remat)
        if gathers_once(run) and (again or table.mixes_kinds or table.periodic):
            yield (
                "weights gathered once a step with part, with branches or with PipeDream-2BW, on "
                "GPUs: memory up to a fifth more"
            )
        if run.pipeline.schedule.startswith("zb") and remat.inside(run.remat) == "none":
            yield "the time of a zero-bubble schedule whose layers save all: a quarter more or less"

"""Where a pipeline is cut and how many replicas each stage has, so that the slowest is fastest.

A stage is a run of layers on m devices (replicas) of its own. Among all partitions that fit into
memory `partition` finds the one whose slowest stage or link takes the least time, by dynamic
programming: PipeDream (SOSP 2019, section 3.1; an earlier form in arXiv 1806.03377), with the
memory of PipeDream-2BW (arXiv 2006.09503).

The cost of a microbatch in a full pipeline, for a stage with layers i..j-1 and m replicas, each of
which takes 1/m of the rows; replicas reduce their gradients after the M microbatches of a step:

    compute   = sum(forward + backward) / m
    exchange  = 2 (m - 1) / m * sum(weight_bytes) / bandwidth / M      ring all-reduce, once a step
    stage     = max(compute, exchange)
    link      = 2 output_bytes of layer j-1 / bandwidth       activations forward, gradients back
    slowest   = max(stages, links)

The exchange overlaps with the computation of the same stage, a link with both of its stages. M = 1
is PipeDream's formula. As there, a link costs the same for any number of replicas at its ends, an
overestimate where several share it.

The memory of each replica, n microbatches in flight on the stage and v versions of its weights:

    memory    = sum(state_bytes) + (v - 1) sum(version_bytes) + n sum(stash_bytes) / m

n depends on the number of later stages (`IN_FLIGHT`), so the search goes from the last stage to the
first. Layers i.. in n stages on at most d devices take

    best[n][i, d] = min over j, m of max(stage(i, j, m), link(j), best[n-1][j, d-m])

where stage(i, j, m) is infinite if it needs too much memory with n - 1 stages behind it.

`llmx.pipeline.executor` splits embedding and head over all stages: the chain is then the blocks
alone, with `Pipeline.per_stage` from `spread` added to every stage.

Temporaries (the backward pass of one layer, weights in the compute dtype, workspaces) are not
counted: set the limit lower than the memory of a device.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from llmx.model import costs, remat_costs
from llmx.model.families import ModelConfig
from llmx.plan.schedule_report import columns, gib

RELATIVE_TIE = 1e-9  # costs within this are equal: sums of floats in another order

# Microbatches in flight on a stage by the number of later stages and M, the microbatches of a step.
# In lockstep a microbatch comes back to a stage after 2 `later` ticks. PipeDream-2BW in lockstep is
# "1f1b_unflushed" with versions=2; PipeDream is "asynchronous" with versions=None and M = 1.
IN_FLIGHT: dict[str, Callable[[int, int], int]] = {
    "gpipe": lambda later, M: M,
    "1f1b": lambda later, M: min(2 * later + 1, M),  # in lockstep, flushed after each step
    "1f1b_unflushed": lambda later, M: 2 * later + 1,  # in lockstep, steps follow without a gap
    "asynchronous": lambda later, M: later + 1,  # PipeDream's 1F1B: stages do not wait for a tick
}
FLUSHED = ("gpipe", "1f1b")  # these drain before the optimizer's update, and fill again


@dataclasses.dataclass(frozen=True)
class Layer:
    """One profiled layer, all figures per microbatch on one device."""

    name: str
    forward: float  # seconds
    backward: float  # seconds: gradients of input and weights, and what remat computes again
    weight_bytes: int  # gradients in the reduce dtype, which replicas all-reduce
    state_bytes: int  # parameters, optimizer state, gradients: whole on each replica
    version_bytes: int  # of every version of the weights beyond the first
    output_bytes: int  # activations sent to the next layer
    stash_bytes: int  # saved from the forward to the backward pass

    @property
    def seconds(self) -> float:
        return self.forward + self.backward


NOTHING = Layer("nothing", 0.0, 0.0, 0, 0, 0, 0, 0)


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """What all partitions of a chain have in common."""

    bandwidth: float  # bytes/s in one direction, between stages and between replicas
    microbatches: int  # of a step, after which replicas reduce their gradients
    in_flight: str = "1f1b"  # a name in IN_FLIGHT
    # Of the weights on every stage: 1, with PipeDream-2BW 2; None = one for each microbatch in
    # flight, PipeDream's weight stashing.
    versions: int | None = 1
    per_stage: Layer = NOTHING  # of every stage, besides its layers; output and stash are ignored


@dataclasses.dataclass(frozen=True)
class Stage:
    """Layers first..stop-1 of the chain."""

    first: int
    stop: int
    replicas: int
    seconds: float  # per microbatch: the longer of computation and exchange of gradients
    memory_bytes: int  # of each replica

    @property
    def num_layers(self) -> int:
        return self.stop - self.first


@dataclasses.dataclass(frozen=True)
class Partition:
    """Stages from the first to the last."""

    stages: tuple[Stage, ...]
    links: tuple[float, ...]  # seconds per microbatch between neighbors, one fewer than stages
    pipeline: Pipeline

    @property
    def seconds(self) -> float:
        """Per microbatch, of the slowest stage or link."""
        return max(*(stage.seconds for stage in self.stages), *self.links, 0.0)

    @property
    def num_devices(self) -> int:
        return sum(stage.replicas for stage in self.stages)

    @property
    def num_ticks(self) -> int:
        """Length of a step in units of `seconds`, with the ticks in which the pipeline fills."""
        filling = len(self.stages) - 1 if self.pipeline.in_flight in FLUSHED else 0
        return self.pipeline.microbatches + filling

    @property
    def step_seconds(self) -> float:
        return self.num_ticks * self.seconds


def partition(
    layers: Sequence[Layer], num_devices: int, pipeline: Pipeline, *,
    memory_bytes: int | None = None, num_stages: int | None = None, replicate: bool = True,
) -> Partition:  # fmt: skip
    """The partition whose slowest stage or link is fastest.

    Among equals: fewest stages, then fewest devices, then the most even stages (the least sum of
    squares of their seconds), then the earliest boundaries and fewest replicas, from the first on.

    Args:
      layers: the chain, e.g. from `layers_of`.
      num_devices: an upper limit; more devices are not always faster.
      pipeline: schedule and links.
      memory_bytes: of a device; None = no limit.
      num_stages: exactly so many; None = as many as are best.
      replicate: False gives every stage one device.

    Raises ValueError for arguments that do not go together, and if nothing fits into memory.
    """
    _check(layers, num_devices, num_stages, pipeline)
    tables = _tables(layers, num_devices if replicate else 1, pipeline)
    most = min(num_devices, len(layers))
    counts = range(1, most + 1) if num_stages is None else range(num_stages, num_stages + 1)

    def fitting(later: int) -> np.ndarray:
        if memory_bytes is None:
            return tables.seconds
        return np.where(tables.memory(later) <= memory_bytes, tables.seconds, math.inf)

    def memory(later: int) -> np.ndarray:
        return np.where(np.isinf(tables.seconds), math.inf, tables.memory(later))

    cuts = _least_maximum(fitting, tables.links, num_devices, counts)
    if cuts is None:
        # The same search with memory in place of time finds the least that any partition needs.
        cuts = _least_maximum(memory, np.zeros_like(tables.links), num_devices, counts)
        least = tables.partition(cuts)
        raise ValueError(_too_little(least, layers, memory_bytes, num_devices, num_stages))
    return tables.partition(cuts)


def priced(
    layers: Sequence[Layer], counts: Sequence[int], pipeline: Pipeline, *, replicas: int = 1
) -> Partition:
    """The partition of a chain into stages of `counts` layers, with its times and memory.

    `replicas`: of every stage. Raises ValueError if the counts do not add up to the chain.
    """
    _check(layers, replicas * len(counts), len(counts) or None, pipeline)
    if min(counts, default=0) < 1 or sum(counts) != len(layers):
        raise ValueError(
            f"counts={tuple(counts)} must be numbers of at least 1 that add up to {len(layers)} "
            f"layers: their sum is {sum(counts)}"
        )
    stops = itertools.accumulate(counts)
    cuts = [(stop - count, stop, replicas) for count, stop in zip(counts, stops, strict=True)]
    return _tables(layers, replicas, pipeline).partition(cuts)


def _check(layers: Sequence[Layer], num_devices: int, num_stages: int | None, pipeline: Pipeline):
    """Raises ValueError for arguments that do not go together."""
    numbers = dict(num_devices=num_devices, microbatches=pipeline.microbatches)
    numbers |= dict(versions=pipeline.versions, num_stages=num_stages)
    problems = [
        f"{name}={value} must be at least 1"
        for name, value in numbers.items()
        if value is not None and value < 1
    ]
    if not layers:
        problems.append("there are no layers to place")
    if not pipeline.bandwidth > 0:
        problems.append(f"bandwidth={pipeline.bandwidth} must be positive, in bytes per second")
    if pipeline.in_flight not in IN_FLIGHT:
        names = ", ".join(IN_FLIGHT)
        problems.append(f"in_flight={pipeline.in_flight!r} is unknown: use one of {names}")
    limits = [(len(layers), f"the {len(layers)} layers", "layer")]
    limits += [(num_devices, f"num_devices={num_devices}", "device of its own")]
    for most, there, one in limits:
        if most and num_stages is not None and num_stages > most:
            problems.append(
                f"num_stages={num_stages} is more than {there}: a stage has at least one {one}, "
                f"use num_stages up to {most}"
            )
    for layer in layers:
        negative = [name for name, value in vars(layer).items() if name != "name" and value < 0]
        if negative:
            problems.append(f"layer {layer.name!r}: {', '.join(negative)} must not be negative")
    if problems:
        raise ValueError("; ".join(problems))


# ------------------------------------------------------------------------------------- the tables


@dataclasses.dataclass(frozen=True, eq=False)
class _Tables:
    """Costs of all stages: [i, j, m-1] is layers i..j-1 on m replicas."""

    pipeline: Pipeline
    seconds: np.ndarray  # infinite where j <= i
    links: np.ndarray  # [j]: seconds between layers j-1 and j; at both ends 0
    memory: Callable[[int], np.ndarray]  # bytes, by how many stages are behind

    def partition(self, cuts: Sequence[tuple[int, int, int]]) -> Partition:
        """The partition with stages (first, stop, replicas)."""
        stages = []
        for later, (first, stop, replicas) in zip(reversed(range(len(cuts))), cuts, strict=True):
            index = (first, stop, replicas - 1)
            seconds, memory = float(self.seconds[index]), int(self.memory(later)[index])
            stages.append(Stage(first, stop, replicas, seconds, memory))
        links = tuple(float(self.links[stage.stop]) for stage in stages[:-1])
        return Partition(tuple(stages), links, self.pipeline)


def _tables(layers: Sequence[Layer], most_replicas: int, pipeline: Pipeline) -> _Tables:
    M, bandwidth, per_stage = pipeline.microbatches, pipeline.bandwidth, pipeline.per_stage
    m = np.arange(1, most_replicas + 1)

    def sums(name: str) -> np.ndarray:
        """[i, j, 1]: of layers i..j-1, added up in order, so that equal runs have equal sums."""
        values = np.array([getattr(layer, name) for layer in layers])
        runs = [np.pad(np.cumsum(values[i:]), (i + 1, 0)) for i in range(len(values) + 1)]
        return np.stack(runs)[:, :, None]

    compute = (sums("seconds") + per_stage.seconds) / m
    weights = sums("weight_bytes") + float(per_stage.weight_bytes)
    seconds = np.maximum(compute, weights * (2 * (m - 1) / m / M / bandwidth))
    seconds[np.tri(len(layers) + 1, dtype=bool)] = math.inf
    state = sums("state_bytes") + per_stage.state_bytes
    version = sums("version_bytes") + per_stage.version_bytes
    stash = sums("stash_bytes")

    def memory(later: int) -> np.ndarray:
        in_flight = IN_FLIGHT[pipeline.in_flight](later, M)
        more = (in_flight if pipeline.versions is None else pipeline.versions) - 1
        return state + more * version - (-in_flight * stash // m)

    links = [0.0, *(2 * layer.output_bytes / bandwidth for layer in layers[:-1]), 0.0]
    return _Tables(pipeline, seconds, np.array(links), memory)


# ------------------------------------------------------------------------------------- the search


def _least_maximum(
    cost: Callable[[int], np.ndarray], links: np.ndarray, num_devices: int, counts: range
) -> list[tuple[int, int, int]] | None:
    """Stages (first, stop, replicas) with the least maximum of their costs and of the links.

    Among equals the first as `partition` orders them. None if all partitions cost infinitely much.
    `cost`: [i, j, m-1] by the number of later stages, infinite where there must be no such stage.
    `links`: [j], of a boundary before layer j. `counts`: how many stages there may be.
    """
    best = _best(cost, links, num_devices, counts.stop - 1, np.maximum)
    least = min(best[count][0, num_devices] for count in counts)
    if math.isinf(least):
        return None
    bound = least * (1 + RELATIVE_TIE)
    count = next(count for count in counts if best[count][0, num_devices] <= bound)
    devices = int(np.argmax(best[count][0] <= bound))

    # The most even of them: the same search with sums of squares of the costs under the bound.
    def square(later: int) -> np.ndarray:
        table = cost(later)
        return np.where(table <= bound, table, math.inf) ** 2

    passable = np.where(links <= bound, 0.0, math.inf)
    squares = _best(square, passable, devices, count, np.add)
    left = squares[count][0, devices] * (1 + RELATIVE_TIE)
    cuts, first = [], 0
    for later in reversed(range(count)):
        table = square(later)[first]
        rest = _following(passable[:, None] + squares[later], table.shape[1])[:, :, devices]
        # The earliest stop, and with it the fewest replicas, that leave enough for the rest.
        fits = table + rest <= left
        stop, index = map(int, np.unravel_index(np.argmax(fits), fits.shape))
        cuts.append((first, stop, index + 1))
        left, devices, first = left - table[stop, index], devices - index - 1, stop
    return cuts


def _best(
    cost: Callable[[int], np.ndarray], links: np.ndarray, num_devices: int, most_stages: int,
    combine: np.ufunc,
) -> list[np.ndarray]:  # fmt: skip
    """[n][i, d]: the least that layers i.. cost in n stages on at most d devices.

    `combine` adds up the costs of stages and links: np.maximum or np.add.
    """
    num_layers = len(links) - 1
    nothing = np.full((num_layers + 1, num_devices + 1), math.inf)
    nothing[-1] = 0.0
    best = [nothing]
    for later in range(most_stages):
        table = cost(later)
        rest = _following(combine(links[:, None], best[-1]), table.shape[2])
        new = np.full_like(nothing, math.inf)
        for i in range(num_layers - later):
            stops = slice(i + 1, num_layers - later + 1)
            new[i] = combine(table[i, stops, :, None], rest[stops]).min(axis=(0, 1))
        best.append(new)
    return best


def _following(best: np.ndarray, most_replicas: int) -> np.ndarray:
    """[j, m-1, d]: `best` [j, d] of the devices that are left when a stage uses m of d."""
    left = np.full((len(best), most_replicas, best.shape[1]), math.inf)
    for m in range(1, min(most_replicas + 1, best.shape[1])):
        left[:, m - 1, m:] = best[:, :-m]
    return left


def _too_little(
    least: Partition, layers: Sequence[Layer], limit: int, num_devices: int, num_stages: int | None
) -> str:
    number, stage = max(enumerate(least.stages), key=lambda pair: pair[1].memory_bytes)
    remedies = ["more devices"]
    if num_stages is not None and num_stages < min(num_devices, len(layers)):
        remedies.append(f"more stages than {num_stages}")
    remedies += ["remat", "fewer tokens per microbatch", "a schedule with fewer in flight"]
    return (
        f"memory_bytes={limit} ({gib(limit)}) is too little for {len(layers)} layers on "
        f"{num_devices} devices: even the partition that needs least has {stage.memory_bytes} "
        f"bytes ({gib(stage.memory_bytes)}) on stage {number} of {len(least.stages)} "
        f"({_names(stage, layers)}, replicas={stage.replicas}); use {', '.join(remedies[:-1])} or "
        f"{remedies[-1]}"
    )


# ------------------------------------------------------------------------------------ the profiles


@dataclasses.dataclass(frozen=True)
class NumberBytes:
    """Bytes of one number."""

    compute: int = 2  # activations, and gradients of them
    reduce: int = 2  # gradients of weights as replicas exchange them
    state: int = 16  # a parameter's, Adam's two moments' and an accumulated gradient's, in fp32
    version: int = 8  # another parameter's and another accumulated gradient's


def layers_of(
    model: ModelConfig, *, tokens: int, sequence_length: int, flops_per_second: float,
    remat: str = "none", loss_chunks: int = 1, number_bytes: NumberBytes | None = None,
    chunks: Sequence[int] = (), offloaded: Sequence[str] = (),
) -> list[Layer]:  # fmt: skip
    """The chain of a model by `llmx.model.costs`: embedding, L blocks, last norm with head.

    Time is FLOPs over FLOP/s: none for the embedding, a lookup; for the backward pass twice that of
    the forward pass, and what remat computes again. A tied table counts with the embedding and with
    the head, which may be on different stages.

    Args:
      model: with its vocabulary.
      tokens: of a microbatch, on all replicas of a stage.
      sequence_length: tokens of a sequence.
      flops_per_second: that a device reaches, not its peak.
      remat: as in the config.
      loss_chunks: chunks of the vocabulary in the loss (`losses.num_chunks`).
      number_bytes: None = bf16 with a state in fp32.
      chunks, offloaded: of a pipeline, and in the host's memory: see `llmx.model.remat_costs`.

    Raises ValueError for a model without a vocabulary, and for a wrong remat or remat="budget".
    """
    if not model.vocab_size:
        raise ValueError("model.vocab_size=0 follows the tokenizer: resolve the config first")
    size = number_bytes or NumberBytes()
    remat_of = dict(text=remat, loss_chunks=loss_chunks, chunks=chunks, offloaded=offloaded)
    forward = costs.forward_flops_by_layer(model, sequence_length=sequence_length)
    again = remat_costs.recomputed_flops_by_layer(
        model, sequence_length=sequence_length, **remat_of
    )
    saved = remat_costs.saved_bytes_by_layer(model, compute_bytes=size.compute, **remat_of)
    parameters = costs.parameters_by_layer(model)
    if model.tied_head:
        parameters[-1] += model.padded_vocab * model.width
    names = ["embedding", *(f"block {n}" for n in range(model.num_layers)), "head"]
    backward_passes = costs.TRAINING_PASSES - 1
    return [
        Layer(
            name=name,
            forward=tokens * forward[n] / flops_per_second,
            backward=tokens * (backward_passes * forward[n] + again[n]) / flops_per_second,
            weight_bytes=size.reduce * parameters[n],
            state_bytes=size.state * parameters[n],
            version_bytes=size.version * parameters[n],
            output_bytes=0 if name == "head" else size.compute * tokens * model.width,
            stash_bytes=tokens * saved[n],
        )
        for n, name in enumerate(names)
    ]


def spread(
    layers: Sequence[Layer], model: ModelConfig, *, num_stages: int
) -> tuple[list[Layer], Layer]:
    """The blocks of a chain from `layers_of`, and each stage's share of its embedding and head.

    A tied table, which the chain has at both ends, is counted once. Losses are differentiated as
    soon as they are computed, so that nothing is saved for them.
    """
    first, *blocks, last = layers
    fraction = 1.0
    if model.tied_head:
        norm = costs.parameters_by_layer(model)[-1]
        fraction = norm / (norm + model.padded_vocab * model.width)
    weight, state, version = (
        math.ceil((vars(first)[name] + fraction * vars(last)[name]) / num_stages)
        for name in ("weight_bytes", "state_bytes", "version_bytes")
    )
    forward = (first.forward + last.forward) / num_stages
    backward = (first.backward + last.backward) / num_stages
    name = f"1/{num_stages} of embedding and head"
    return blocks, Layer(name, forward, backward, weight, state, version, 0, 0)


def to_counts(partition: Partition) -> tuple[int, ...]:
    """Blocks on each stage of a chain from `layers_of`, not counting embedding and head."""
    stop = partition.stages[-1].stop
    return tuple(
        stage.num_layers - (stage.first == 0) - (stage.stop == stop) for stage in partition.stages
    )


# ---------------------------------------------------------------------------------------- the text


def describe(partition: Partition, layers: Sequence[Layer]) -> str:
    """The stages as a table, which of them is slowest, and how much of the devices' time is used.

    Efficiency is the fraction of the devices' time in which they compute: the fraction of ticks in
    which the pipeline is full, times how evenly the work is spread then.
    """
    rows = [("stage", "layers", "replicas", "ms", "memory")]
    for number, stage in enumerate(partition.stages):
        costs_of = f"{1e3 * stage.seconds:.3f}", gib(stage.memory_bytes)
        rows.append((number, _names(stage, layers), stage.replicas, *costs_of))
    lines = columns(rows, right=3)
    per_stage = partition.pipeline.per_stage
    if per_stage != NOTHING:
        lines.append(
            f"everywhere  {per_stage.name}: {1e3 * per_stage.seconds:.3f} ms of each stage's time"
        )
    work = sum(layer.seconds for layer in layers) + len(partition.stages) * per_stage.seconds
    devices, ticks = partition.num_devices, partition.num_ticks
    even = work / (devices * partition.seconds) if partition.seconds else 1.0
    full = partition.pipeline.microbatches / ticks
    return "\n".join([
        *lines,
        f"slowest     {_slowest(partition, layers)}: {1e3 * partition.seconds:.3f} ms per "
        "microbatch",
        f"step        {partition.pipeline.microbatches} microbatches in {ticks} ticks: "
        f"{1e3 * partition.step_seconds:.3f} ms on {devices} devices",
        f"efficiency  {even * full:.1%}: the pipeline is full in {full:.1%} of the ticks, devices "
        f"are then busy {even:.1%}",
    ])  # fmt: skip


def _slowest(partition: Partition, layers: Sequence[Layer]) -> str:
    number, stage = max(enumerate(partition.stages), key=lambda pair: (pair[1].seconds, -pair[0]))
    if max(partition.links, default=0.0) > stage.seconds:
        link = partition.links.index(partition.seconds)
        return f"the link from stage {link} to {link + 1}"
    work = sum(layer.seconds for layer in layers[stage.first : stage.stop])
    compute = (work + partition.pipeline.per_stage.seconds) / stage.replicas
    exchanges = stage.seconds > compute * (1 + RELATIVE_TIE)
    return f"stage {number}, {'exchange of gradients' if exchanges else 'computation'}"


def _names(stage: Stage, layers: Sequence[Layer]) -> str:
    names = [layers[stage.first].name, layers[stage.stop - 1].name]
    return names[0] if stage.num_layers == 1 else " to ".join(names)

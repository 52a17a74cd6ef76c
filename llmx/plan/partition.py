"""Where a pipeline is cut and how often each stage is replicated, so that the slowest is fastest.

The layers of a model are a chain of L; a stage is a run of neighbours on m devices (replicas) of
its own. `partition` finds the stages with the least time of the slowest stage or link among all
whose memory suffices, by dynamic programming: PipeDream (SOSP 2019, section 3.1; an earlier form in
arXiv 1806.03377), with the memory of PipeDream-2BW (arXiv 2006.09503).

The cost of a microbatch, once the pipeline is full. Stage s = 0..P-1 has layers i..j-1 and m
replicas, each of which takes 1/m of every microbatch's rows; a step has M microbatches, after which
the replicas agree on a gradient:

    compute   = sum(forward + backward) / m
    exchange  = 2 (m - 1) / m * sum(weight_bytes) / bandwidth / M      ring all-reduce, once a step
    stage     = max(compute, exchange)
    link      = 2 output_bytes of layer j-1 / bandwidth       activations forward, gradients back
    slowest   = max(stages, links)

Everything overlaps with everything: the exchange with the computation of the same stage, a link
with both of its stages. M = 1 is PipeDream's formula, which exchanges with every microbatch. A link
costs the same whatever the replicas at its ends, as there; where both ends have several, which
share it, that is more than they need.

The memory of each replica, n microbatches being in flight on the stage and v versions of its
weights being kept:

    memory    = sum(state_bytes) + (v - 1) sum(version_bytes) + n sum(stash_bytes) / m

n depends on the number of stages behind this one (`IN_FLIGHT`), so stages are placed from the last
to the first. Layers i.. in n stages on d devices at most take

    best[n][i, d] = min over j, m of max(stage(i, j, m), link(j), best[n-1][j, d-m])

where stage(i, j, m) is infinite if it needs too much memory with n - 1 stages behind it.

What every stage has and does whatever its layers are (`beside`) is added to each: with `spread` a
share of embedding and head, which `llmx.pipeline.executor` cuts over all stages. The chain is then
the blocks alone, so that every stage has at least one.

Temporaries are not in it (one layer's backward pass, weights in the compute dtype, workspaces): set
the limit lower than a device's memory.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from llmx.model import costs
from llmx.model.families import ModelConfig

# Of equally good partitions the first in a fixed order is taken; sums of floats are equal to this.
RELATIVE_TIE = 1e-9

# Microbatches in flight on a stage by the number of stages behind it and M, the microbatches of a
# step. In lockstep a microbatch comes back to a stage after 2 `later` ticks. PipeDream-2BW in
# lockstep is "1f1b_unflushed" with versions=2; PipeDream is "asynchronous" with versions=None and
# M = 1.
IN_FLIGHT: dict[str, Callable[[int, int], int]] = {
    "gpipe": lambda later, M: M,
    "1f1b": lambda later, M: min(2 * later + 1, M),  # in lockstep, flushed after each step
    "1f1b_unflushed": lambda later, M: 2 * later + 1,  # in lockstep, steps follow without a gap
    "asynchronous": lambda later, M: later + 1,  # PipeDream's 1F1B: stages do not wait for a tick
}
# Those that drain before the optimizer's update, and fill again.
FLUSHED = ("gpipe", "1f1b")

REMATS = ("none", "full", "dots", "names")  # of `llmx.model.remat`, which imports jax


@dataclasses.dataclass(frozen=True)
class Layer:
    """One profiled layer, all figures per microbatch on one device."""

    name: str
    forward: float  # seconds
    backward: float  # seconds: gradients of input and weights, and what remat computes again
    weight_bytes: int  # what replicas exchange to agree: gradients in the reduce dtype
    state_bytes: int  # parameters, optimizer state, gradients: on each replica whole
    version_bytes: int  # what every version of the weights beyond the first takes
    output_bytes: int  # activations sent to the next layer
    stash_bytes: int  # kept from the forward to the backward pass


NOTHING = Layer("nothing", 0.0, 0.0, 0, 0, 0, 0, 0)


@dataclasses.dataclass(frozen=True)
class Stage:
    """Layers first..stop-1 of the chain."""

    first: int
    stop: int
    replicas: int
    seconds: float  # per microbatch: the longer of computation and exchange of gradients
    memory_bytes: int  # of each replica


@dataclasses.dataclass(frozen=True)
class Partition:
    """Stages from the first to the last."""

    stages: tuple[Stage, ...]
    links: tuple[float, ...]  # seconds per microbatch between neighbours, one fewer than stages
    microbatches: int  # of a step
    in_flight: str  # a name in IN_FLIGHT
    beside: Layer | None = None  # what every stage has and does beside its layers

    @property
    def seconds(self) -> float:
        """Per microbatch, of the slowest stage or link."""
        return max(*(stage.seconds for stage in self.stages), *self.links, 0.0)

    @property
    def num_devices(self) -> int:
        return sum(stage.replicas for stage in self.stages)

    @property
    def num_ticks(self) -> int:
        """How many times `seconds` a step takes: those in which the pipeline fills count too."""
        filling = len(self.stages) - 1 if self.in_flight in FLUSHED else 0
        return self.microbatches + filling

    @property
    def step_seconds(self) -> float:
        return self.num_ticks * self.seconds


def partition(
    layers: Sequence[Layer],
    num_devices: int,
    *,
    bandwidth: float,
    microbatches: int,
    memory_bytes: int | None = None,
    num_stages: int | None = None,
    replicate: bool = True,
    versions: int | None = 1,
    in_flight: str = "1f1b",
    room: int | None = None,
    beside: Layer | None = None,
) -> Partition:
    """The partition whose slowest stage or link is fastest.

    Among equals: fewest stages, then fewest devices, then the most even stages (the least sum of
    squares of their seconds), then the earliest boundaries and fewest replicas, from the first on.

    Args:
      layers: the chain, e.g. from `layers_of`.
      num_devices: at most so many are used: more would not always be faster.
      bandwidth: bytes per second in one direction, between stages and between replicas.
      microbatches: of a step, at the end of which replicas exchange gradients.
      memory_bytes: of a device; None = no limit.
      num_stages: exactly so many; None = as many as are best.
      replicate: False leaves every stage one device.
      versions: of the weights kept by every stage: 1, with PipeDream-2BW 2; None = one for each
        microbatch in flight, PipeDream's weight stashing.
      in_flight: a name in IN_FLIGHT.
      room: microbatches that every stage has room for, in place of those that it has in flight.
      beside: what every stage has and does beside its layers, e.g. from `spread`; its output and
        what it keeps are not looked at.

    Raises ValueError for arguments that do not go together, and where nothing fits into memory.
    """
    _check(layers, num_devices, bandwidth, microbatches, num_stages, versions, in_flight)
    most_replicas = num_devices if replicate else 1
    tables = _tables(
        layers, most_replicas, bandwidth=bandwidth, microbatches=microbatches, versions=versions,
        in_flight=in_flight, room=room, beside=beside,
    )  # fmt: skip
    if num_stages is None:
        counts = range(1, min(num_devices, len(layers)) + 1)
    else:
        counts = range(num_stages, num_stages + 1)

    def fitting(later: int) -> np.ndarray:
        if memory_bytes is None:
            return tables.seconds
        return np.where(tables.memory(later) <= memory_bytes, tables.seconds, math.inf)

    cuts = _least_maximum(fitting, tables.links, num_devices, counts)
    if cuts is None:
        # With memory for time, and no limit: what is the least that any partition needs?
        free = np.zeros_like(tables.links)
        cuts = _least_maximum(
            lambda later: np.where(np.isinf(tables.seconds), math.inf, tables.memory(later)),
            free, num_devices, counts,
        )  # fmt: skip
        least = _made(cuts, tables, microbatches, in_flight, beside)
        raise ValueError(_too_little(least, layers, memory_bytes, num_devices, num_stages))
    return _made(cuts, tables, microbatches, in_flight, beside)


def priced(
    layers: Sequence[Layer],
    counts: Sequence[int],
    *,
    bandwidth: float,
    microbatches: int,
    replicas: int = 1,
    versions: int | None = 1,
    in_flight: str = "1f1b",
    room: int | None = None,
    beside: Layer | None = None,
) -> Partition:
    """A given partition with its times and memory: `counts` layers on each stage, from the first.

    `replicas` are those of every stage; the other arguments are those of `partition`.

    Raises ValueError where the counts do not fill the chain.
    """
    num_devices = replicas * len(counts)
    _check(layers, num_devices, bandwidth, microbatches, len(counts) or None, versions, in_flight)
    if min(counts, default=0) < 1 or sum(counts) != len(layers):
        raise ValueError(
            f"counts={tuple(counts)} must be numbers of at least 1 that add up to {len(layers)} "
            f"layers: their sum is {sum(counts)}"
        )
    tables = _tables(
        layers, replicas, bandwidth=bandwidth, microbatches=microbatches, versions=versions,
        in_flight=in_flight, room=room, beside=beside,
    )  # fmt: skip
    stops = itertools.accumulate(counts)
    cuts = [(stop - count, stop, replicas) for count, stop in zip(counts, stops, strict=True)]
    return _made(cuts, tables, microbatches, in_flight, beside)


def _check(layers, num_devices, bandwidth, microbatches, num_stages, versions, in_flight) -> None:
    found = []
    if not layers:
        found.append("there are no layers to place")
    for name, value in (
        ("num_devices", num_devices), ("microbatches", microbatches), ("versions", versions),
        ("num_stages", num_stages),
    ):  # fmt: skip
        if value is not None and value < 1:
            found.append(f"{name}={value} must be at least 1")
    if not bandwidth > 0:
        found.append(f"bandwidth={bandwidth} must be positive, in bytes per second")
    if in_flight not in IN_FLIGHT:
        found.append(f"in_flight={in_flight!r} is unknown: use one of {', '.join(IN_FLIGHT)}")
    if num_stages is not None and layers and num_stages > len(layers):
        found.append(
            f"num_stages={num_stages} is more than the {len(layers)} layers: a stage has at least "
            f"one, use num_stages up to {len(layers)}"
        )
    if num_stages is not None and num_stages > num_devices:
        found.append(
            f"num_stages={num_stages} is more than num_devices={num_devices}: a stage has at least "
            f"one device of its own, use num_stages up to {num_devices}"
        )
    for layer in layers:
        negative = [name for name, value in vars(layer).items() if name != "name" and value < 0]
        if negative:
            found.append(f"layer {layer.name!r}: {', '.join(negative)} must not be negative")
    if found:
        raise ValueError("; ".join(found))


# ------------------------------------------------------------------------------------- the tables


@dataclasses.dataclass(frozen=True, eq=False)
class _Tables:
    """Costs of all stages: [i, j, m-1] is layers i..j-1 on m replicas."""

    seconds: np.ndarray  # infinite where j <= i
    links: np.ndarray  # [j]: seconds between layers j-1 and j; at both ends 0
    memory: Callable[[int], np.ndarray]  # bytes, by how many stages are behind


def _tables(
    layers: Sequence[Layer], most_replicas: int, *, bandwidth, microbatches, versions, in_flight,
    room, beside,
) -> _Tables:  # fmt: skip
    beside = beside or NOTHING
    m = np.arange(1, most_replicas + 1)
    compute = _sums([layer.forward + layer.backward for layer in layers])[:, :, None]
    compute = (compute + (beside.forward + beside.backward)) / m
    weights = _sums([float(layer.weight_bytes) for layer in layers])[:, :, None]
    weights = weights + beside.weight_bytes
    exchange = weights * (2 * (m - 1) / m / microbatches / bandwidth)
    seconds = np.maximum(compute, exchange)
    seconds[np.tri(len(layers) + 1, dtype=bool)] = math.inf
    state = _sums([layer.state_bytes for layer in layers]) + beside.state_bytes
    version = _sums([layer.version_bytes for layer in layers]) + beside.version_bytes
    stash = _sums([layer.stash_bytes for layer in layers])

    def memory(later: int) -> np.ndarray:
        flying = IN_FLIGHT[in_flight](later, microbatches) if room is None else room
        more = (flying if versions is None else versions) - 1
        return (state + more * version)[:, :, None] - (-flying * stash[:, :, None] // m)

    links = [0.0, *(2 * layer.output_bytes / bandwidth for layer in layers[:-1]), 0.0]
    return _Tables(seconds, np.array(links), memory)


def _sums(values: list) -> np.ndarray:
    """[i, j]: the sum of values[i:j], added up in order, so that equal runs have equal sums."""
    sums = np.zeros((len(values) + 1, len(values) + 1), np.array(values).dtype)
    for i in range(len(values)):
        sums[i, i + 1 :] = np.cumsum(values[i:])
    return sums


# --------------------------------------------------------------------------------- the programming


def _least_maximum(
    cost: Callable[[int], np.ndarray], links: np.ndarray, num_devices: int, counts: range
) -> list[tuple[int, int, int]] | None:
    """Stages (first, stop, replicas) with the least maximum of their costs and of the links.

    Among equals the first as `partition` orders them. None where every partition costs infinitely
    much.

    Args:
      cost: [i, j, m-1] by how many stages are behind, infinite where there must be no such stage.
      links: [j], the cost of a boundary before layer j.
      num_devices: for all stages together.
      counts: how many stages there may be.
    """
    best = _best(cost, links, num_devices, counts.stop - 1, np.maximum)
    values = [best[count][0, num_devices] for count in counts]
    if math.isinf(min(values)):
        return None
    bound = min(values) * (1 + RELATIVE_TIE)
    count = next(n for n, value in zip(counts, values, strict=True) if value <= bound)
    devices = int(np.argmax(best[count][0] <= bound))

    # Which of them is most even: the same again, with sums of squares of what is under the bound.
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
    cost: Callable[[int], np.ndarray],
    links: np.ndarray,
    num_devices: int,
    most_stages: int,
    combine: np.ufunc,
) -> list[np.ndarray]:
    """[n][i, d]: the least that layers i.. cost in n stages on at most d devices.

    `combine` (np.maximum, np.add) puts the costs of stages and links together.
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
    """[j, m-1, d]: what `best` [j, d] has on the devices that are left where m of d are taken."""
    num_stops, num_devices = best.shape[0], best.shape[1] - 1
    left = np.full((num_stops, most_replicas, num_devices + 1), math.inf)
    for m in range(1, min(most_replicas, num_devices) + 1):
        left[:, m - 1, m:] = best[:, : num_devices + 1 - m]
    return left


def _made(cuts, tables: _Tables, microbatches: int, in_flight: str, beside) -> Partition:
    stages = []
    for later, (first, stop, replicas) in enumerate(reversed(cuts)):
        at = (first, stop, replicas - 1)
        stages.append(
            Stage(*cuts[-1 - later], float(tables.seconds[at]), int(tables.memory(later)[at]))
        )
    links = tuple(float(tables.links[stop]) for _, stop, _ in cuts[:-1])
    return Partition(tuple(reversed(stages)), links, microbatches, in_flight, beside)


def _too_little(
    least: Partition, layers: Sequence[Layer], limit: int, num_devices: int, num_stages: int | None
) -> str:
    number, stage = max(enumerate(least.stages), key=lambda each: each[1].memory_bytes)
    remedies = ["more devices"]
    if num_stages is not None and num_stages < min(num_devices, len(layers)):
        remedies.append(f"more stages than {num_stages}")
    remedies += ["remat", "fewer tokens per microbatch", "a schedule with fewer in flight"]
    return (
        f"memory_bytes={limit} ({_gib(limit)}) is too little for {len(layers)} layers on "
        f"{num_devices} devices: even the partition that needs least has {stage.memory_bytes} "
        f"bytes ({_gib(stage.memory_bytes)}) on stage {number} of {len(least.stages)} "
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
    model: ModelConfig,
    *,
    tokens: int,
    sequence_length: int,
    flops_per_second: float,
    remat: str = "none",
    loss_chunks: int = 1,
    number_bytes: NumberBytes | None = None,
) -> list[Layer]:
    """The profile that `llmx.model.costs` counts: embedding, L blocks, and last norm with head.

    Time is FLOPs over FLOP/s: nothing for the embedding, whose lookup has none, and twice the
    forward pass for the backward pass, with what it computes again. A tied head's table counts with
    the embedding and with the head, which has it wherever the two are on different stages.

    Args:
      model: with its vocabulary.
      tokens: of a microbatch, on all replicas of a stage together.
      sequence_length: tokens of a sequence.
      flops_per_second: that a device reaches, rather than its peak.
      remat: a name in `remat.POLICIES`.
      loss_chunks: parts of the vocabulary that the loss walks (`losses.num_chunks`).
      number_bytes: of one number; None = bf16 with a state in fp32.

    Raises ValueError for a model without a vocabulary, and an unknown remat.
    """
    if not model.vocab_size:
        raise ValueError("model.vocab_size=0 follows the tokenizer: resolve the config first")
    if remat not in REMATS:
        raise ValueError(f"remat {remat!r} is unknown: use one of {', '.join(REMATS)}")
    each = number_bytes or NumberBytes()
    forward = costs.forward_flops_by_layer(model, sequence_length=sequence_length)
    again = costs.recomputed_flops_by_layer(
        model, sequence_length=sequence_length, remat=remat, loss_chunks=loss_chunks
    )
    kept = costs.kept_bytes_by_layer(
        model, remat=remat, loss_chunks=loss_chunks, compute_bytes=each.compute
    )
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
            weight_bytes=each.reduce * parameters[n],
            state_bytes=each.state * parameters[n],
            version_bytes=each.version * parameters[n],
            output_bytes=0 if name == "head" else each.compute * tokens * model.width,
            stash_bytes=tokens * kept[n],
        )
        for n, name in enumerate(names)
    ]


def spread(
    layers: Sequence[Layer], model: ModelConfig, *, num_stages: int
) -> tuple[list[Layer], Layer]:
    """The blocks of a chain from `layers_of`, and each stage's share of its embedding and head.

    A tied table, which the chain has at both ends, is there once. Losses are differentiated as soon
    as they are computed: nothing of them is kept.
    """
    first, *blocks, last = layers
    share = 1.0
    if model.tied_head:
        norm = costs.parameters_by_layer(model)[-1]
        share = norm / (norm + model.padded_vocab * model.width)

    def of_each(name: str) -> int:
        return math.ceil((vars(first)[name] + share * vars(last)[name]) / num_stages)

    return blocks, Layer(
        name=f"1/{num_stages} of embedding and head",
        forward=(first.forward + last.forward) / num_stages,
        backward=(first.backward + last.backward) / num_stages,
        weight_bytes=of_each("weight_bytes"),
        state_bytes=of_each("state_bytes"),
        version_bytes=of_each("version_bytes"),
        output_bytes=0,
        stash_bytes=0,
    )


def to_counts(found: Partition) -> tuple[int, ...]:
    """How many blocks each stage has, of a partition of `layers_of`.

    0 where a stage is the embedding or the head alone.
    """
    num_layers = found.stages[-1].stop
    return tuple(
        stage.stop - stage.first - (stage.first == 0) - (stage.stop == num_layers)
        for stage in found.stages
    )


# ---------------------------------------------------------------------------------------- the text


def describe(found: Partition, layers: Sequence[Layer]) -> str:
    """The stages as a table, which of them is slowest, and how much of the devices' time is used.

    Efficiency is the share of all devices' time in a step in which they compute: the share of ticks
    in which the pipeline is full, times how evenly the work is spread then.
    """
    rows = [("stage", "layers", "replicas", "ms", "memory")]
    for number, stage in enumerate(found.stages):
        rows.append((
            str(number), _names(stage, layers), str(stage.replicas), f"{1e3 * stage.seconds:.3f}",
            _gib(stage.memory_bytes),
        ))  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for number, names, *figures in rows:
        right = [text.rjust(width) for text, width in zip(figures, widths[2:], strict=True)]
        lines.append("  ".join([number.ljust(widths[0]), names.ljust(widths[1]), *right]))
    beside = found.beside or NOTHING
    work = sum(layer.forward + layer.backward for layer in layers)
    work += len(found.stages) * (beside.forward + beside.backward)
    devices, ticks = found.num_devices, found.num_ticks
    even = work / (devices * found.seconds) if found.seconds else 1.0
    full = found.microbatches / ticks
    return "\n".join([
        *lines,
        *_beside(beside),
        f"slowest     {_slowest(found, layers)}: {1e3 * found.seconds:.3f} ms per microbatch",
        f"step        {found.microbatches} microbatches in {ticks} ticks: "
        f"{1e3 * found.step_seconds:.3f} ms on {devices} devices",
        f"efficiency  {even * full:.1%}: the pipeline is full in {full:.1%} of the ticks, devices "
        f"are then busy {even:.1%}",
    ])  # fmt: skip


def _beside(layer: Layer) -> list[str]:
    if layer == NOTHING:
        return []
    seconds, size = layer.forward + layer.backward, _gib(layer.state_bytes)
    return [f"everywhere  {layer.name}: {1e3 * seconds:.3f} ms and {size} of each stage's"]


def _slowest(found: Partition, layers: Sequence[Layer]) -> str:
    for number, seconds in enumerate(found.links):
        if seconds > max(stage.seconds for stage in found.stages) and seconds == found.seconds:
            return f"the link from stage {number} to {number + 1}"
    number, stage = max(enumerate(found.stages), key=lambda each: (each[1].seconds, -each[0]))
    chain = layers[stage.first : stage.stop]
    chain = [*chain, found.beside or NOTHING]
    compute = sum(layer.forward + layer.backward for layer in chain) / stage.replicas
    exchanges = stage.seconds > compute * (1 + RELATIVE_TIE)
    return f"stage {number}, {'exchange of gradients' if exchanges else 'computation'}"


def _names(stage: Stage, layers: Sequence[Layer]) -> str:
    names = [layers[stage.first].name, layers[stage.stop - 1].name]
    return names[0] if stage.stop - stage.first == 1 else " to ".join(names)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"

"""What replicas send over `data`, in bytes, and how long a step takes with it.

Bytes follow from the tensors that a device exchanges, one by one, padding and scales included;
times from a simple model, whose assumptions are the fields of `Link`. Bytes that one device sends:

    all-reduce of b bytes, ring    2 (n-1)/n b    each device passes on n-1 pieces, twice
    all-to-all of b bytes          (n-1)/n b      of n equal pieces one stays
    all-gather of b bytes each     (n-1) b        in a ring, or directly to n-1 others

Not counted: numbers that do not grow with the model (losses, token counts, norms), and what a
layout exchanges within a replica. Groups of replicas that are runs of their own exchange files
(`of_round`). The mean counts what a device has of the gradients while they are
updated, which is all of it where a layout splits gradients as the optimizer's state, as "ddp",
"zero2", "zero3" and "hsdp" do. Letters: n replicas.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from jax.sharding import AbstractMesh

from llmx import sharding
from llmx.contract import Timetable
from llmx.model import apply, costs
from llmx.model.families import ModelConfig
from llmx.runtime import hardware
from llmx.sync import buckets, local
from llmx.sync import replicas as replicas_lib
from llmx.sync.compressors import FP32, Tensor
from llmx.sync.config import SyncConfig
from llmx.sync.replicas import MEAN, Replicas
from llmx.sync.strategy import STRATEGIES, compressor_of


class Sent(NamedTuple):
    """What one device sends over `data`."""

    bytes: float = 0.0
    hops: float = 0.0  # messages that wait for each other

    def times(self, factor: float) -> "Sent":
        return Sent(self.bytes * factor, self.hops * factor)


def in_sequence(messages: Iterable[Sent]) -> Sent:
    """All messages, one after the other."""
    return Sent(*map(sum, zip(*messages, strict=True)))


def all_reduce(num_bytes: float, n: int) -> Sent:
    """A ring all-reduce of `num_bytes` on each device."""
    return Sent(2 * (n - 1) / n * num_bytes, 2 * (n - 1)) if num_bytes else Sent()


# By `compressors.Message.collective`: of the bytes on each device and the number of devices.
COLLECTIVES: dict[str, Callable[[float, int], Sent]] = {
    "all_reduce": all_reduce,
    "all_to_all": lambda num_bytes, n: Sent((n - 1) / n * num_bytes, n - 1),
    "all_gather": lambda num_bytes, n: Sent((n - 1) * num_bytes, n - 1),
}


def of_exchange(replicas: Replicas, program: str | tuple[int, ...]) -> Sent:
    """What the strategy sends in a phase, or in an outer step of these fragments."""
    tensors, compressor = STRATEGIES[replicas.config.strategy].sends(replicas, program)
    group = replicas.group
    sizes: dict[tuple, list[int]] = {}
    for tensor in tensors:
        for phase, message in enumerate(compressor.messages(tensor, group)):
            sizes.setdefault((phase, message.collective, message.over), []).append(message.bytes)
    messages = []
    for (_, collective, _), of_tensors in sorted(sizes.items()):
        fused = [range(len(of_tensors))]  # all-reduces over the same axes: one message at best
        if collective != "all_reduce":
            fused = buckets.fuse(of_tensors, group.bucket_bytes)
        fused_bytes = (sum(of_tensors[i] for i in bucket) for bucket in fused)
        messages += [COLLECTIVES[collective](size, group.size) for size in fused_bytes]
    return in_sequence(messages)


def in_full(tensors: Iterable[Tensor], number_bytes: int, n: int) -> Sent:
    """An all-reduce of all numbers of some tensors."""
    return all_reduce(number_bytes * sum(tensor.rows * tensor.length for tensor in tensors), n)


def of_step(replicas: Replicas, phase: str, *, reduce_bytes: int = 2) -> Sent:
    """A train step in `phase`, without the outer step after it.

    `reduce_bytes`: of a number of a matrix's gradient in the mean (`precision.Policy.reduce`).
    Gradients of vectors, and those that replicas take on their own, are summed in fp32.
    """
    tensors, n = replicas.tensors.values(), replicas.size
    if phase != MEAN:
        return of_exchange(replicas, phase)
    large = in_full([tensor for tensor in tensors if tensor.matrix], reduce_bytes, n)
    small = in_full([tensor for tensor in tensors if not tensor.matrix], FP32, n)
    return in_sequence([large, small._replace(hops=0)])  # sent at the same time


class Files(NamedTuple):
    """Bytes that a group writes and reads in a round."""

    written: float
    read: float


def of_round(num_parameters: int, groups: int, *, momentum: bool) -> Files:
    """A round of groups that are runs of their own (`sync.groups`): each writes what it has moved,
    in fp32, and reads that of all. One of them writes besides what all share then, parameters and
    with `momentum` (diloco) that of the outer optimizer: here a share of it."""
    own = FP32 * num_parameters
    return Files(own * (1 + (1 + momentum) / groups), own * groups)


class StepGroup(NamedTuple):
    """Steps of a run that send the same."""

    phase: str
    fragments: tuple[int, ...]  # that the outer step exchanges
    steps: int
    step: Sent  # in the train step
    outer: Sent  # in the outer step after it


def of_run(
    replicas: Replicas, timetable: Timetable, *, reduce_bytes: int = 2, freeze_step: int = -1
) -> list[StepGroup]:
    """All steps of a run, in groups.

    `freeze_step`: with warmup_steps = -1, the step that finds the variance settled.
    """
    counts = collections.Counter(
        (timetable.phase_of(step, freeze_step), timetable.fragments_after(step))
        for step in range(timetable.total_steps)
    )
    groups = []
    for (phase, fragments), steps in counts.items():
        outer = of_exchange(replicas, fragments) if fragments else Sent()
        step = of_step(replicas, phase, reduce_bytes=reduce_bytes)
        groups.append(StepGroup(phase, fragments, steps, step, outer))
    return groups


def per_step(groups: Sequence[StepGroup]) -> Sent:
    """The mean over all steps."""
    total = in_sequence(in_sequence([of.step, of.outer]).times(of.steps) for of in groups)
    return total.times(1 / sum(group.steps for group in groups))


@dataclasses.dataclass(frozen=True)
class Link:
    """The slow network between replicas, as one device sees it."""

    bandwidth: float  # bytes/s that a device sends; of a host's link, its share
    latency: float = 50e-6  # seconds of a message without bytes
    # Fraction of a step's computation that overlaps with the mean: without accumulation, gradients
    # of a layer are summed during the backward pass of the next. Other exchanges begin after it.
    overlap: float = 0.5

    def seconds(self, sent: Sent) -> float:
        """The time of these messages without overlap."""
        return sent.bytes / self.bandwidth + sent.hops * self.latency


def compute_seconds(
    config: ModelConfig, *, tokens: int, sequence_length: int, chip: hardware.Chip,
    utilization: float,
) -> float:  # fmt: skip
    """A device's computation in a step with `tokens` of its own, at a fraction of its peak FLOP/s.

    About 6 N FLOPs per token, N parameters, and those of attention's scores.
    """
    flops = costs.training_flops_per_token(config, sequence_length=sequence_length)
    return flops * tokens / (chip.device_flops() * utilization)


def step_seconds(groups: Sequence[StepGroup], link: Link, compute: float) -> float:
    """The mean time of a step of a run: `compute`, and messages that do not overlap with it. What a
    step does not wait for (`sync.overlap`) hides behind all of its computation."""
    total = 0.0
    for group in groups:
        overlap = link.overlap * compute if group.phase == MEAN else 0.0
        overlap = compute if group.phase.startswith(local.SENDING) else overlap
        exposed = max(0.0, link.seconds(group.step) - overlap) + link.seconds(group.outer)
        total += group.steps * (compute + exposed)
    return total / sum(group.steps for group in groups)


def late_seconds(sent: Sent, link: Link, compute: float, staleness: int) -> float:
    """The least time of a step whose gradients may arrive `staleness` steps late.

    s + 1 steps are time for one computation and exchange, in the background. A bound for other
    programs: strategy "stale" makes gradients late, and sums them in the step.
    """
    travel = link.seconds(sent)
    return max(compute, travel if staleness else 0.0, (compute + travel) / (staleness + 1))


def replicas_of(
    chosen: SyncConfig, config: ModelConfig, sizes: Mapping[str, int], layout: str = "hsdp"
) -> Replicas:
    """The replicas of a model on an abstract mesh.

    `chosen`: the strategy. `config`: the model, with its vocabulary. `sizes`: of mesh axes, `data`
    among them, without `stage`. `layout`: a name in `sharding.LAYOUTS`.
    """
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    shapes, axes = apply.abstract_parameters(config)
    inside = sharding.LAYOUTS[layout].without((replicas_lib.AXIS,), "optimizer")
    updates = sharding.shardings(shapes, mesh, inside, rules=axes, table="optimizer")
    compressor = compressor_of(chosen)
    return replicas_lib.make(chosen, mesh, compressor, shapes=shapes, axes=axes, updates=updates)

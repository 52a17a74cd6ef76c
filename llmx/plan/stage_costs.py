"""Time and memory of a config's pipeline stages, and which layers each stage should have.

A profile has the times of layers on the devices of a stage. `llmx.plan.partition` finds the cut
whose slowest stage is fastest, `pipeline.simulate` how long the config's schedule takes with it.

Stages are those of `llmx.pipeline.executor`: embedding and head are split over all of them, each
has the same number of devices, and each device has room for the longest model chunk and for the
most microbatches that any stage saves (`config.stage_memory`). `chain` is PipeDream's problem
instead: the embedding is on the first stage, the head on the last, and the number of replicas
differs between stages.

Inside a stage the axes `sequence` and `tensor` split a replica, `data`, `fsdp` and `expert` the
rows. Communication inside a stage takes no time here.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

from llmx import sharding
from llmx.aot import topologies
from llmx.config import Config, stage_memory, utilization
from llmx.config.stage_memory import StageMemory
from llmx.model import costs, precision, remat_costs
from llmx.pipeline import simulate, stages
from llmx.pipeline.schedule import Table
from llmx.pipeline.simulate import Timeline
from llmx.plan import hardware_file, partition, schedule_report
from llmx.plan.partition import Layer, Partition, Pipeline
from llmx.runtime import hardware
from llmx.step import moments

# Schedules that the planner has a formula for, with their names in partition.IN_FLIGHT.
PLANNED = {"gpipe": "gpipe", "1f1b": "1f1b", "pipedream_2bw": "1f1b_unflushed"}
VERSIONS = {"pipedream_2bw": 2}  # of the weights; others have 1

# Slots of a chunk beyond those of the equal cut, with which a cut is searched.
MORE_SLOTS = 8

# partition.layers_of or layer_times.measured, with what only one of them takes.
Clock = Callable[..., list[Layer]]


def chip_named(name: str) -> hardware.Chip:
    """The chip of a name in `hardware.CHIPS`, or of a topology in `llmx.aot.topologies`.

    Raises ValueError for other names.
    """
    short = topologies.OTHER_NAMES.get(name, name)
    families = {key: of.chip for key, of in (topologies.TPUS | topologies.GPUS).items()}
    key = name if name in hardware.CHIPS else families.get(short)
    if key is None:
        raise ValueError(
            f"--chip={name} is unknown: use one of {', '.join(families)}, or of "
            f"{', '.join(hardware.CHIPS)}"
        )
    return hardware.CHIPS[key]


def usable_bytes(chip: hardware.Chip) -> int:
    """Of a device, that a program may use: as `--machine` has it, where it has the chip."""
    for machine in (topologies.TPUS | topologies.GPUS).values():
        if hardware.CHIPS[machine.chip] is chip:
            return int(machine.hbm_bytes)
    return int(hardware_file.USABLE * chip.device_hbm_bytes)


def bandwidth_of(chip: hardware.Chip, config: Config) -> tuple[float, str]:
    """Bytes/s in one direction between devices of neighboring stages, and the name of the link.

    Raises ValueError if the bandwidth is not published.
    """
    num_devices = math.prod(vars(config.mesh)[axis] for axis in sharding.AXES)
    switched = chip.topology == "switch"
    all_linked = not switched or num_devices <= chip.max_domain
    if "stage" not in config.mesh.across_slices and all_linked:
        links, name = (chip.num_links, f"{chip.num_links} links") if switched else (1, "one link")
        return links * chip.link_bandwidth / chip.devices_per_chip, name
    if chip.network_bandwidth is None:
        raise ValueError(
            f"{chip.name} has no published bandwidth of the network between its slices or hosts: "
            "give --bandwidth"
        )
    return chip.network_bandwidth / chip.devices_per_chip, "the network"


@dataclasses.dataclass(frozen=True, eq=False)
class Profile:
    """A microbatch on one device of each stage, with the layers in these model chunks."""

    remat: str
    chunks: tuple[int, ...]  # the layers of each, in the order of the model
    blocks: list[Layer]
    per_stage: Layer  # each stage's share of embedding and head
    weight_seconds: list[float]  # WEIGHT's part of the backward pass of each block


def _number_bytes(config: Config) -> partition.NumberBytes:
    policy = precision.policy_of(config.precision, config.reduce_dtype)
    return partition.NumberBytes(compute=policy.compute.itemsize, reduce=policy.reduce.itemsize)


def chain(config: Config, clock: Clock) -> list[Layer]:
    """Embedding, blocks and head: a microbatch on one device of a replica.

    A replica is the devices that `sequence` and `tensor` split it over. `remat` is counted in the
    config's model chunks, with mesh.stage=1 in the whole model. What is kept in the host's memory
    has no bytes. Raises ValueError for remat="budget".
    """
    mesh, model = config.mesh, config.model
    number = _number_bytes(config)
    layers = clock(
        model, tokens=utilization.tokens_of(config), remat=config.remat,
        sequence_length=config.batch.sequence_length, number_bytes=number,
        loss_chunks=utilization.loss_chunks(config), chunks=utilization.chunks_of(config),
        offloaded=config.offload.saves,
    )  # fmt: skip
    tables = vars(sharding.LAYOUTS[config.sharding.layout])
    # Bytes of a matrix's number, as the layout splits it on a stage; two moments, as Adam's.
    param = precision.POLICIES[config.precision].param
    of_moments = 2 * moments.number_bytes(config.optimizer.moments, param)
    if config.offload.optimizer:
        of_moments = 0.0  # but for those of the last norm
    sizes = {"parameters": param.itemsize, "gradients": 4, "optimizer": of_moments}
    parameters, gradients, optimizer = (
        num_bytes / math.prod(vars(mesh)[axis] for axis in tables[table]["embed"])
        for table, num_bytes in sizes.items()
    )
    version, state = parameters + gradients, parameters + gradients + optimizer
    devices = mesh.sequence * mesh.tensor
    return [
        dataclasses.replace(
            layer,
            forward=layer.forward / devices,
            backward=layer.backward / devices,
            weight_bytes=math.ceil(layer.weight_bytes / mesh.tensor),
            state_bytes=math.ceil(layer.state_bytes / number.state * state / mesh.tensor),
            version_bytes=math.ceil(layer.version_bytes / number.version * version / mesh.tensor),
            output_bytes=math.ceil(layer.output_bytes / _tokens_ways(config)),
            stash_bytes=math.ceil(layer.stash_bytes / _tokens_ways(config)),
        )
        for layer in layers
    ]


def _tokens_ways(config: Config) -> int:
    """Over how many devices tokens between products are split."""
    return config.mesh.sequence * (config.mesh.tensor if config.sharding.sequence_parallel else 1)


def make_profile(config: Config, clock: Clock) -> Profile:
    """The blocks, and each stage's share of embedding and head, in the config's model chunks.

    Their bytes are 0: `config.stage_memory` counts what a device of a pipeline holds.
    """
    model = config.model
    blocks, per_stage = partition.spread(chain(config, clock), model, num_stages=config.mesh.stage)
    nothing = dict(weight_bytes=0, state_bytes=0, version_bytes=0, stash_bytes=0)
    blocks = [dataclasses.replace(block, **nothing) for block in blocks]
    length = config.batch.sequence_length
    flops = costs.forward_flops_by_layer(model, sequence_length=length)
    chunks = utilization.chunks_of(config)
    again = _recomputed(config, chunks)
    by_part = costs.forward_flops_by_part(model, sequence_length=length)
    # Attention scores have no weights.
    products = (by_part["projections"] + by_part["mlp"]) / model.num_layers
    weights = [
        block.backward * products / ((costs.TRAINING_PASSES - 1) * forward + more)
        for block, forward, more in zip(blocks, flops[1:-1], again, strict=True)
    ]
    per_stage = dataclasses.replace(per_stage, **nothing)
    return Profile(config.remat, chunks, blocks, per_stage, weights)


def adapted(config: Config, profile: Profile, chunks: tuple[int, ...]) -> Profile:
    """The profile with the config's `remat` and the layers in these model chunks, in place of its
    own. Times of backward passes change as their FLOPs, of which remat repeats others."""
    if (config.remat, chunks) == (profile.remat, profile.chunks):
        return profile
    forward = costs.forward_flops_by_layer(
        config.model, sequence_length=config.batch.sequence_length
    )[1:-1]
    once = [(costs.TRAINING_PASSES - 1) * flops for flops in forward]
    before = _recomputed(dataclasses.replace(config, remat=profile.remat), profile.chunks)
    after = _recomputed(config, chunks)
    blocks = [
        dataclasses.replace(block, backward=block.backward * (flops + new) / (flops + old))
        for block, flops, old, new in zip(profile.blocks, once, before, after, strict=True)
    ]
    return dataclasses.replace(profile, remat=config.remat, chunks=chunks, blocks=blocks)


def _recomputed(config: Config, chunks: tuple[int, ...]) -> list[float]:
    """FLOPs per token that the backward pass of each block repeats, in these model chunks."""
    return remat_costs.recomputed_flops_by_layer(
        config.model, sequence_length=config.batch.sequence_length, text=config.remat,
        loss_chunks=1, chunks=chunks, offloaded=config.offload.saves,
    )[1:-1]  # fmt: skip


@dataclasses.dataclass(frozen=True, eq=False)
class Cut:
    """A pipeline with given numbers of layers in its model chunks."""

    layers: tuple[int, ...]
    planned: Partition | None  # None if the planner has no formula for the schedule
    blocks: list[Layer]  # that `planned` cuts: those of the model, and empty slots
    timeline: Timeline  # of the layers alone, stages in lockstep
    barriers: float  # seconds of a step, stages in lockstep
    free: float  # seconds of a step, stages running freely
    busy: float  # seconds of a step that a stage computes, mean over stages
    memory: StageMemory  # of each device
    deferred_layers: int | None  # of each chunk, by their weight gradients; None = all

    @property
    def bubble(self) -> float:
        """The share of a step, stages in lockstep, in which a stage idles."""
        return 1 - self.busy / self.barriers if self.barriers else 0.0


@dataclasses.dataclass(frozen=True, eq=False)
class Comparison:
    """The best cut, and others to compare it with."""

    table: Table
    cuts: dict[str, Cut]  # by "planned", "equal", and, if the config has one, "config"


@dataclasses.dataclass(frozen=True)
class Machine:
    """What a pipeline runs on."""

    bandwidth: float  # bytes/s between devices of neighboring stages
    # Of a device; None = unknown: all weight gradients of zero bubble are then deferred.
    device_bytes: int | None = None
    is_gpu: bool = False
    usable_bytes: int | None = None  # of a device, by a program; None = `device_bytes`


def compare_cuts(
    config: Config, profile: Profile, machine: Machine, *, memory_bytes: int | None = None
) -> Comparison:
    """The best cut of a resolved config with stages, beside the equal one and its own.

    It is searched with the costs that layers have in the profile's model chunks. Each cut is then
    priced with those of its own, in which `remat` counts. `memory_bytes`: of a device; None = no
    limit. Raises ValueError if nothing fits into memory.
    """
    table = utilization.table_of(config)
    layers = {
        "planned": _fastest(config, profile, table, machine, memory_bytes or machine.device_bytes),
        "equal": stages.cut(config.model.num_layers, table.stage_of).layers,
    }
    if config.pipeline.layers:
        layers["config"] = tuple(config.pipeline.layers)
    cuts = {name: priced(config, profile, table, machine, of) for name, of in layers.items()}
    needed = cuts["planned"].memory.total
    if memory_bytes is not None and needed > memory_bytes:
        raise ValueError(
            f"--memory={memory_bytes / 2**30:g} GiB is too little: the model chunks of "
            f"{table.name} {layers['planned']} take {schedule_report.gib(needed)} of each device; "
            "use more stages, remat, fewer tokens per microbatch or a schedule with fewer in flight"
        )
    return Comparison(table, cuts)


def _pipeline(config: Config, profile: Profile, table: Table, machine: Machine) -> Pipeline:
    return Pipeline(
        machine.bandwidth, config.batch.accumulation,
        in_flight=PLANNED.get(table.name, "1f1b"), per_stage=profile.per_stage,
    )  # fmt: skip


def _fastest(
    config: Config, profile: Profile, table: Table, machine: Machine, memory_bytes: int | None
) -> tuple[int, ...]:
    """The layers of each chunk by the planner; the fastest of those that fit, if any does.

    Every chunk has the slots of the longest, and computes the empty ones too: with s slots a chunk
    takes s empty ones and what its layers take more.
    """
    equal = stages.cut(config.model.num_layers, table.stage_of).layers
    empty = _empty_slot(profile)
    more = [
        dataclasses.replace(
            block, forward=block.forward - empty.forward, backward=block.backward - empty.backward,
            state_bytes=1,
        )
        for block in profile.blocks
    ]  # fmt: skip
    pipeline = _pipeline(config, profile, table, machine)
    best, least = equal, partition.priced(more, equal, pipeline).seconds
    for slots in range(max(equal), max(equal) + MORE_SLOTS + 1):
        # The planner does not add up the chunks of a stage: they are cut as so many stages.
        found = partition.partition(
            more, table.num_chunks, pipeline, num_stages=table.num_chunks, replicate=False,
            memory_bytes=slots,
        )  # fmt: skip
        layers = tuple(stage.num_layers for stage in found.stages)
        seconds = found.seconds + (slots - max(equal)) * empty.seconds
        faster = seconds < least * (1 - partition.RELATIVE_TIE)
        if faster and _fits(config, layers, machine, memory_bytes):
            best, least = layers, seconds
    return best


def _empty_slot(profile: Profile) -> Layer:
    """What a slot without a layer takes: it computes the kind of layer that takes least."""
    forward, backward = (
        min(vars(block)[name] for block in profile.blocks) for name in ("forward", "backward")
    )
    return dataclasses.replace(profile.blocks[0], forward=forward, backward=backward)


def _fits(
    config: Config, layers: tuple[int, ...], machine: Machine, memory_bytes: int | None
) -> bool:
    if memory_bytes is None:
        return True
    try:
        return _memory(config, layers, machine)[0].total <= memory_bytes
    except ValueError:  # not one layer's factors
        return False


def _memory(
    config: Config, layers: tuple[int, ...], machine: Machine
) -> tuple[StageMemory, int | None]:
    """What a device holds with these model chunks, and how many layers of each are deferred."""
    pipeline = dataclasses.replace(config.pipeline, layers=layers)
    run = dataclasses.replace(config, pipeline=pipeline)
    on_gpu = machine.is_gpu
    deferred = stage_memory.deferred_layers(run, machine.device_bytes, on_gpu=on_gpu)
    return stage_memory.of(run, deferred_layers=deferred, on_gpu=on_gpu), deferred


def priced(
    config: Config, profile: Profile, table: Table, machine: Machine, layers: tuple[int, ...]
) -> Cut:
    """Times and memory of a pipeline with these numbers of layers in its model chunks.

    Raises ValueError where zero bubble has no room for the factors of one layer.
    """
    profile = adapted(config, profile, layers)
    pipeline = _pipeline(config, profile, table, machine)
    memory, deferred = _memory(config, layers, machine)
    blocks, weights = _padded(profile, layers)
    slots = max(layers)
    spans = [slice(first, first + slots) for first in range(0, len(blocks), slots)]
    total = lambda name, span: sum(vars(block)[name] for block in blocks[span])  # noqa: E731
    weight = [sum(weights[span][:deferred]) for span in spans]
    forward, backward = ([total(name, span) for span in spans] for name in ("forward", "backward"))
    seconds = dict(
        forward=forward, weight=weight,
        backward=[whole - later for whole, later in zip(backward, weight, strict=True)],
        transfer=blocks[0].output_bytes / pipeline.bandwidth,
    )  # fmt: skip
    timeline = simulate.simulate(table, **seconds)
    free = simulate.simulate(table, **seconds, barriers=False)
    # All stages do their share of a microbatch's embedding and head at the same time.
    shared = table.num_microbatches * profile.per_stage.seconds
    work = sum(block.seconds for block in profile.blocks)
    work *= table.num_microbatches / table.num_stages
    planned = None
    if table.name in PLANNED:
        held = dataclasses.replace(profile.per_stage, state_bytes=memory.total)
        pipeline = dataclasses.replace(pipeline, per_stage=held)
        planned = partition.priced(blocks, [slots] * len(layers), pipeline)
    return Cut(
        layers, planned, blocks, timeline, barriers=timeline.step_time + shared,
        free=free.step_time + shared, busy=work + shared, memory=memory, deferred_layers=deferred,
    )  # fmt: skip


def _padded(profile: Profile, layers: tuple[int, ...]) -> tuple[list[Layer], list[float]]:
    """The blocks and their weight gradients' seconds, with empty slots behind those of a chunk."""
    empty = _empty_slot(profile)
    of_weights = min(profile.weight_seconds)
    blocks, weights, first = [], [], 0
    for num in layers:
        missing, own = max(layers) - num, profile.blocks[first : first + num]
        blocks += [*own, *[dataclasses.replace(empty, name=own[-1].name)] * missing]
        weights += [*profile.weight_seconds[first : first + num], *[of_weights] * missing]
        first += num
    return blocks, weights


def replicated(
    config: Config, layers: Sequence[Layer], num_devices: int, *, bandwidth: float,
    num_stages: int | None = None, memory_bytes: int | None = None, versions: int | None = None,
) -> tuple[Partition, Partition | None]:  # fmt: skip
    """PipeDream's partition of a `chain`, and one with as many stages and devices, equal stages.

    The latter is None if they do not divide. Arguments: see `compare_cuts`, `partition.partition`.
    Raises ValueError for a schedule without a formula, and if nothing fits into memory.
    """
    name = config.pipeline.schedule
    if name not in PLANNED or config.pipeline.table:
        raise ValueError(
            f"--replicate with schedule {config.pipeline.table or name!r}: the planner knows "
            f"{', '.join(PLANNED)}; use --schedule with one of them"
        )
    pipeline = Pipeline(
        bandwidth, config.batch.accumulation, PLANNED[name], versions or VERSIONS.get(name, 1)
    )
    planned = partition.partition(
        layers, num_devices, pipeline, num_stages=num_stages, memory_bytes=memory_bytes
    )
    count = len(planned.stages)
    if planned.num_devices % count or count > len(layers) - 2:
        return planned, None
    counts = list(stages.cut(len(layers) - 2, range(count)).layers)
    counts[0] += 1
    counts[-1] += 1
    replicas = planned.num_devices // count
    return planned, partition.priced(layers, counts, pipeline, replicas=replicas)

"""Time and memory of a config's pipeline stages, and which layers each stage should have.

A profile has the times of layers on the devices of a stage. `llmx.plan.partition` finds the cut
whose slowest stage is fastest, `pipeline.simulate` how long the config's schedule takes with it.

Stages are those of `llmx.pipeline.executor`: embedding and head are split over all of them, each
has the same number of devices, and each device has room for the longest model chunk and for the
most microbatches that any stage saves. `chain` is PipeDream's problem instead: the embedding is on
the first stage, the head on the last, and the number of replicas differs between stages.

Inside a stage the axes `sequence` and `tensor` split a replica, `data`, `fsdp` and `expert` the
rows. Communication inside a stage takes no time here.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

from llmx import sharding
from llmx.aot import topologies
from llmx.config import Config, stage_memory, utilization
from llmx.model import costs, precision, remat_costs
from llmx.pipeline import schedule, schedules, simulate, stages
from llmx.pipeline.schedule import BACKWARD, FORWARD, Table
from llmx.pipeline.simulate import Timeline
from llmx.plan import partition, schedule_report
from llmx.plan.partition import Layer, Partition, Pipeline
from llmx.runtime import hardware
from llmx.step import moments

# Schedules that the planner has a formula for, with their names in partition.IN_FLIGHT.
PLANNED = {"gpipe": "gpipe", "1f1b": "1f1b", "pipedream_2bw": "1f1b_unflushed"}
VERSIONS = {"pipedream_2bw": 2}  # of the weights; others have 1

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

    chunks: tuple[int, ...]  # the layers of each, in the order of the model
    blocks: list[Layer]
    per_stage: Layer  # each stage's share of embedding and head
    weight_seconds: list[float]  # WEIGHT's part of the backward pass of each block
    factor_bytes: int  # per block, saved between BACKWARD and WEIGHT: factors of weight gradients


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
    """The blocks, and each stage's share of embedding and head, in the config's model chunks."""
    model = config.model
    blocks, per_stage = partition.spread(chain(config, clock), model, num_stages=config.mesh.stage)
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
    return Profile(chunks, blocks, per_stage, weights, stage_memory.factor_bytes(config))


def in_chunks(config: Config, profile: Profile, chunks: tuple[int, ...]) -> Profile:
    """The profile with the layers in other model chunks, in which `remat` repeats and saves other
    things. Times of backward passes change as their FLOPs."""
    if chunks == profile.chunks:
        return profile
    forward = costs.forward_flops_by_layer(
        config.model, sequence_length=config.batch.sequence_length
    )[1:-1]
    once = [(costs.TRAINING_PASSES - 1) * flops for flops in forward]
    before, after = (_recomputed(config, layers) for layers in (profile.chunks, chunks))
    saved = remat_costs.saved_bytes_by_layer(
        config.model, text=config.remat, loss_chunks=1, chunks=chunks,
        compute_bytes=_number_bytes(config).compute, offloaded=config.offload.saves,
    )[1:-1]  # fmt: skip
    tokens = utilization.tokens_of(config)
    blocks = [
        dataclasses.replace(
            block,
            backward=block.backward * (flops + new) / (flops + old),
            stash_bytes=math.ceil(tokens * num_bytes / _tokens_ways(config)),
        )
        for block, flops, old, new, num_bytes in zip(
            profile.blocks, once, before, after, saved, strict=True
        )
    ]
    return dataclasses.replace(profile, chunks=chunks, blocks=blocks)


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
    timeline: Timeline  # of the layers alone, stages in lockstep
    barriers: float  # seconds of a step, stages in lockstep
    free: float  # seconds of a step, stages running freely
    memory_bytes: int  # of each device: state, and what is saved for the backward pass


@dataclasses.dataclass(frozen=True, eq=False)
class Comparison:
    """The best cut, and others to compare it with."""

    table: Table
    profile: Profile  # in the best cut, with all that a device saves
    cuts: dict[str, Cut]  # by "planned", "equal", and, if the config has one, "config"


def compare_cuts(
    config: Config, profile: Profile, *, bandwidth: float, memory_bytes: int | None = None,
    versions: int | None = None,
) -> Comparison:  # fmt: skip
    """The best cut of a resolved config with stages, beside the equal one and its own.

    It is searched with the costs that layers have in the profile's model chunks. Each cut is then
    priced with those of its own, in which `remat` counts. `bandwidth`: bytes/s between devices of
    neighboring stages. `memory_bytes`: of a device; None = no limit. `versions`: of the weights;
    None = those of the schedule. Raises ValueError if nothing fits into memory.
    """
    M = config.batch.accumulation
    table = schedules.table_of(config.pipeline, stages=config.mesh.stage, microbatches=M)
    # All that a device saves, as if it were of one microbatch.
    saved = int(schedule.held(table, FORWARD, BACKWARD).max())
    waiting = int(schedule.check(table).peak_waiting_weights.max())

    def held(profile: Profile) -> Profile:
        blocks = [
            dataclasses.replace(
                block, stash_bytes=saved * block.stash_bytes + waiting * profile.factor_bytes
            )
            for block in profile.blocks
        ]
        return dataclasses.replace(profile, blocks=blocks)

    pipeline = Pipeline(
        bandwidth, M, in_flight=PLANNED.get(table.name, "1f1b"), room=1,
        versions=versions or VERSIONS.get(table.name, 1), per_stage=profile.per_stage,
    )  # fmt: skip
    # The planner does not add up the chunks of a stage: their memory is checked afterwards.
    planned = partition.partition(
        held(profile).blocks, table.num_chunks, pipeline, num_stages=table.num_chunks,
        replicate=False,
        memory_bytes=memory_bytes if table.chunks_per_stage == 1 else None,
    )  # fmt: skip
    layers = {
        "planned": tuple(stage.num_layers for stage in planned.stages),
        "equal": stages.cut(config.model.num_layers, table.stage_of).layers,
    }
    if config.pipeline.layers:
        layers["config"] = tuple(config.pipeline.layers)
    profiles = {name: held(in_chunks(config, profile, of_cut)) for name, of_cut in layers.items()}
    cuts = {name: _cut(table, profiles[name], pipeline, layers[name]) for name in layers}
    if memory_bytes is not None and (needed := cuts["planned"].memory_bytes) > memory_bytes:
        raise ValueError(
            f"--memory={memory_bytes / 2**30:g} GiB is too little: the model chunks of "
            f"{table.name} {layers['planned']} take {schedule_report.gib(needed)} of each device; "
            "use more stages, remat, fewer tokens per microbatch or a schedule with fewer in flight"
        )
    return Comparison(table, profiles["planned"], cuts)


def _cut(table: Table, profile: Profile, pipeline: Pipeline, layers: tuple[int, ...]) -> Cut:
    blocks, per_stage = profile.blocks, profile.per_stage
    planned = partition.priced(blocks, layers, pipeline) if table.name in PLANNED else None
    stops = itertools.accumulate(layers)
    spans = [slice(stop - num, stop) for num, stop in zip(layers, stops, strict=True)]
    total = lambda name, span: sum(vars(block)[name] for block in blocks[span])  # noqa: E731
    weight = [sum(profile.weight_seconds[span]) for span in spans]
    seconds = dict(
        forward=[total("forward", span) for span in spans], weight=weight,
        backward=[total("backward", s) - later for s, later in zip(spans, weight, strict=True)],
        transfer=blocks[0].output_bytes / pipeline.bandwidth,
    )  # fmt: skip
    timeline = simulate.simulate(table, **seconds)
    free = simulate.simulate(table, **seconds, barriers=False)
    # All stages do their share of a microbatch's embedding and head at the same time.
    shared = table.num_microbatches * per_stage.seconds
    longest = [span for num, span in zip(layers, spans, strict=True) if num == max(layers)]
    state, version, stash = (
        max(total(name, span) for span in longest)
        for name in ("state_bytes", "version_bytes", "stash_bytes")
    )
    state += (pipeline.versions - 1) * version
    beside = per_stage.state_bytes + (pipeline.versions - 1) * per_stage.version_bytes
    return Cut(
        layers, planned, timeline, barriers=timeline.step_time + shared,
        free=free.step_time + shared,
        memory_bytes=table.chunks_per_stage * state + stash + beside,
    )  # fmt: skip


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

"""What the stages of a config's pipeline do and hold, and which layers each should have.

A profile says how long each layer takes on the devices of a stage: by FLOPs and a chip's data sheet
(`counted`), or by this machine's clock (`measured`). `llmx.plan.partition` finds the cut with the
fastest slowest part, `pipeline.simulate` says how long the config's schedule takes with it.

Stages are those of `llmx.pipeline.executor`: embedding and head are spread over all of them, each
has the same devices, and each device has room for the longest part and for the most microbatches
that any stage holds. `chain` is PipeDream's problem instead, where the embedding is on the first
stage, the head on the last, and a stage has replicas of its own.

Inside a stage the config's mesh and layout split the work: `sequence` and `tensor` that of a
replica, `data`, `fsdp` and `expert` the rows. What devices of one stage exchange takes no time
here.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

from llmx import config, sharding
from llmx.aot import topologies
from llmx.model import costs, losses, precision
from llmx.pipeline import schedule, schedules, simulate, stages
from llmx.pipeline.schedule import BACKWARD, FORWARD, Table
from llmx.pipeline.simulate import Timeline
from llmx.plan import layer_times, partition
from llmx.plan.partition import Layer, Partition
from llmx.runtime import hardware

# Schedules of which the planner has a formula, by its name in partition.IN_FLIGHT.
PLANNED = {"gpipe": "gpipe", "1f1b": "1f1b", "pipedream_2bw": "1f1b_unflushed"}
VERSIONS = {"pipedream_2bw": 2}  # of the weights; others have 1

# (model, tokens of a microbatch, parts of the vocabulary in the loss) -> layers on one device
Clock = Callable[..., list[Layer]]


# ------------------------------------------------------------------------------------- the machine


def chip_named(name: str) -> hardware.Chip:
    """The chip of a name in `hardware.CHIPS` or of a topology. ValueError for others."""
    short = topologies.OTHER_NAMES.get(name, name)
    families = {key: each.chip for key, each in (topologies.TPUS | topologies.GPUS).items()}
    key = name if name in hardware.CHIPS else families.get(short)
    if key is None:
        raise ValueError(
            f"--chip={name} is unknown: use one of {', '.join(families)}, or of "
            f"{', '.join(hardware.CHIPS)}"
        )
    return hardware.CHIPS[key]


def bandwidth_of(chip: hardware.Chip, run: config.Config) -> tuple[float, str]:
    """Bytes/s between devices of neighboring stages, and what that is.

    ValueError where it is not published.
    """
    num_devices = math.prod(vars(run.mesh)[axis] for axis in sharding.AXES)
    all_linked = chip.topology != "switch" or num_devices <= chip.max_domain
    if "stage" not in run.mesh.across_slices and all_linked:
        if chip.topology == "switch":
            links = chip.num_links
            return links * chip.link_bandwidth / chip.devices_per_chip, f"{links} links"
        return chip.link_bandwidth / chip.devices_per_chip, "one link"
    if chip.network_bandwidth is None:
        raise ValueError(
            f"{chip.name} has no published bandwidth of the network between its slices or hosts: "
            "give --bandwidth"
        )
    return chip.network_bandwidth / chip.devices_per_chip, "the network"


# ------------------------------------------------------------------------------------- the profile


@dataclasses.dataclass(frozen=True, eq=False)
class Profile:
    """A microbatch on one device of each stage."""

    blocks: list[Layer]
    beside: Layer  # share of embedding and head
    weight_seconds: list[float]  # of each block's backward pass, those of WEIGHT
    factor_bytes: int  # of a block between BACKWARD and WEIGHT: what weight gradients are made of


def counted(run: config.Config, flops_per_second: float) -> Clock:
    """Layers by their FLOPs, on a device that reaches so many in a second."""

    def layers(model, tokens, loss_chunks):
        return partition.layers_of(
            model, tokens=tokens, sequence_length=run.batch.sequence_length,
            flops_per_second=flops_per_second, remat=run.remat, loss_chunks=loss_chunks,
            number_bytes=_number_bytes(run),
        )  # fmt: skip

    return layers


def measured(run: config.Config) -> Clock:
    """Layers as the first device of this machine runs them."""

    def layers(model, tokens, loss_chunks):
        return layer_times.measured(
            model, tokens=tokens, sequence_length=run.batch.sequence_length, policy=run.precision,
            remat=run.remat, attention=dataclasses.replace(run.attention, ulysses=1),
            loss_chunks=loss_chunks, number_bytes=_number_bytes(run),
        )  # fmt: skip

    return layers


def _number_bytes(run: config.Config) -> partition.NumberBytes:
    policy = precision.POLICIES[run.precision]
    return partition.NumberBytes(compute=policy.compute.itemsize, reduce=policy.reduce.itemsize)


def tokens_of(run: config.Config) -> int:
    """Of one replica's microbatch."""
    replicas = math.prod(vars(run.mesh)[axis] for axis in sharding.BATCH_AXES)
    rows = run.batch.size // (replicas * run.batch.accumulation)
    return rows * run.batch.sequence_length


def chain(run: config.Config, clock: Clock) -> list[Layer]:
    """Embedding, blocks and head of a microbatch, on one device of a replica.

    A replica is what `sequence` and `tensor` split.
    """
    mesh, model = run.mesh, run.model
    rows = model.padded_vocab // (mesh.stage * mesh.tensor)
    tokens = tokens_of(run)
    chunks = run.loss.chunks or losses.num_chunks(tokens // mesh.sequence, rows)
    layers = clock(model, tokens, chunks)
    state, version = (
        sum(count / _ways(run, table) for table, count in counts.items())
        for counts in (
            {"parameters": 4, "gradients": 4, "optimizer": 8}, {"parameters": 4, "gradients": 4},
        )
    )  # fmt: skip
    each = _number_bytes(run)
    tokens_ways = mesh.sequence * (mesh.tensor if run.sharding.sequence_parallel else 1)
    return [
        dataclasses.replace(
            layer,
            forward=layer.forward / (mesh.sequence * mesh.tensor),
            backward=layer.backward / (mesh.sequence * mesh.tensor),
            weight_bytes=math.ceil(layer.weight_bytes / mesh.tensor),
            state_bytes=math.ceil(layer.state_bytes / each.state * state / mesh.tensor),
            version_bytes=math.ceil(layer.version_bytes / each.version * version / mesh.tensor),
            output_bytes=math.ceil(layer.output_bytes / tokens_ways),
            stash_bytes=math.ceil(layer.stash_bytes / tokens_ways),
        )
        for layer in layers
    ]


def _ways(run: config.Config, table: str) -> int:
    """Over how many devices of a stage a layout's table splits a matrix, `tensor` apart."""
    axes = vars(sharding.LAYOUTS[run.sharding.layout])[table]["embed"]
    return math.prod(vars(run.mesh)[axis] for axis in axes)


def profile(run: config.Config, clock: Clock) -> Profile:
    """The blocks, and each stage's share of embedding and head."""
    model = run.model
    blocks, beside = partition.spread(chain(run, clock), model, num_stages=run.mesh.stage)
    length = run.batch.sequence_length
    flops = costs.forward_flops_by_layer(model, sequence_length=length)[1:-1]
    again = costs.recomputed_flops_by_layer(
        model, sequence_length=length, remat=run.remat, loss_chunks=1
    )[1:-1]
    by_part = costs.forward_flops_by_part(model, sequence_length=length)
    # Scores have no weights.
    products = (by_part["projections"] + by_part["mlp"]) / model.num_layers
    backwards = zip(blocks, flops, again, strict=True)
    weights = [
        block.backward * products / ((costs.TRAINING_PASSES - 1) * forward + more)
        for block, forward, more in backwards
    ]
    return Profile(blocks, beside, weights, _factor_bytes(run))


def _factor_bytes(run: config.Config) -> int:
    """Of each product with a weight, what it took and the gradient of what it gave."""
    mesh, model = run.mesh, run.model
    D, F, H, N, K = model.width, model.mlp_dim, model.head_dim, model.num_heads, model.num_kv_heads
    inward = 2 if model.gated_mlp else 1
    whole = (3 + 1 + inward + 1) * D  # into queries, keys, values and MLP, out of both halves
    split = (N + 2 * K) * H + N * H + inward * F + F  # over `tensor`
    tokens = tokens_of(run) // mesh.sequence
    return math.ceil(_number_bytes(run).compute * tokens * (whole + split / mesh.tensor))


# ---------------------------------------------------------------------------------------- the cuts


@dataclasses.dataclass(frozen=True, eq=False)
class Cut:
    """A pipeline whose parts have so many layers."""

    layers: tuple[int, ...]
    planned: Partition | None  # None where the planner has no formula for the schedule
    timeline: Timeline  # of the layers alone, stages meeting at every tick
    barriers: float  # seconds of a step, stages meeting at every tick
    free: float  # seconds of a step, stages running freely
    memory_bytes: int  # of each device: state and what is kept for the backward pass


@dataclasses.dataclass(frozen=True, eq=False)
class Pipelines:
    """The best cut, and others to compare it with."""

    table: Table
    profile: Profile
    cuts: dict[str, Cut]  # by "planned", "equal", and, where the config has one, "config"


def pipelines(
    run: config.Config,
    found: Profile,
    *,
    bandwidth: float,
    memory_bytes: int | None = None,
    versions: int | None = None,
) -> Pipelines:
    """Cuts of a resolved config with stages.

    Args:
      run: the config.
      found: its profile.
      bandwidth: bytes/s between devices of neighboring stages.
      memory_bytes: of a device; None = no limit.
      versions: of the weights; None = those of the schedule.

    Raises ValueError where nothing fits into memory.
    """
    M = run.batch.accumulation
    table = schedules.table_of(run.pipeline, stages=run.mesh.stage, microbatches=M)
    versions = versions or VERSIONS.get(table.name, 1)
    # All that a device has room for, as if it were of one microbatch.
    kept = int(schedule.held(table, FORWARD, BACKWARD).max())
    waiting = int(schedule.check(table).peak_waiting_weights.max())
    blocks = [
        dataclasses.replace(
            block, stash_bytes=kept * block.stash_bytes + waiting * found.factor_bytes
        )
        for block in found.blocks
    ]
    found = dataclasses.replace(found, blocks=blocks)
    settings = dict(
        bandwidth=bandwidth, microbatches=M, versions=versions, room=1, beside=found.beside,
        in_flight=PLANNED.get(table.name, "1f1b"),
    )  # fmt: skip

    def cut(layers: Sequence[int]) -> Cut:
        return _cut(table, found, tuple(layers), settings)

    # The memory of several parts on a stage is not the planner's: it is looked at afterwards.
    planned = partition.partition(
        found.blocks, table.num_chunks, num_stages=table.num_chunks, replicate=False,
        memory_bytes=memory_bytes if table.chunks_per_stage == 1 else None, **settings,
    )  # fmt: skip
    cuts = {
        "planned": cut([stage.stop - stage.first for stage in planned.stages]),
        "equal": cut(stages.cut(run.model.num_layers, table.stage_of).layers),
    }
    if run.pipeline.layers:
        cuts["config"] = cut(run.pipeline.layers)
    if memory_bytes is not None and (needed := cuts["planned"].memory_bytes) > memory_bytes:
        raise ValueError(
            f"--memory={memory_bytes / 2**30:g} GiB is too little: the parts of {table.name} "
            f"{cuts['planned'].layers} take {needed / 2**30:.2f} GiB of each device; use more "
            "stages, remat, fewer tokens per microbatch or a schedule with fewer in flight"
        )
    return Pipelines(table, found, cuts)


def _cut(table: Table, found: Profile, layers: tuple[int, ...], settings: dict) -> Cut:
    planned = None
    if table.name in PLANNED:
        planned = partition.priced(found.blocks, layers, **settings)
    stops = [sum(layers[: part + 1]) for part in range(len(layers))]
    spans = [slice(stop - num, stop) for num, stop in zip(layers, stops, strict=True)]
    forward = [sum(layer.forward for layer in found.blocks[span]) for span in spans]
    weight = [sum(found.weight_seconds[span]) for span in spans]
    both = [sum(layer.backward for layer in found.blocks[span]) for span in spans]
    seconds = dict(
        forward=forward, weight=weight,
        backward=[total - part for total, part in zip(both, weight, strict=True)],
        transfer=found.blocks[0].output_bytes / settings["bandwidth"],
    )  # fmt: skip
    timeline = simulate.simulate(table, **seconds)
    free = simulate.simulate(table, **seconds, barriers=False)
    # All stages do their share of a microbatch's embedding and head at one time.
    beside = found.beside
    together = table.num_microbatches * (beside.forward + beside.backward)
    longest = [found.blocks[span] for span in spans if span.stop - span.start == max(layers)]
    state, version, stash = (
        max(sum(vars(layer)[name] for layer in part) for part in longest)
        for name in ("state_bytes", "version_bytes", "stash_bytes")
    )
    more = settings["versions"] - 1
    return Cut(
        layers=layers,
        planned=planned,
        timeline=timeline,
        barriers=timeline.step_time + together,
        free=free.step_time + together,
        memory_bytes=table.chunks_per_stage * (state + more * version) + stash
        + beside.state_bytes + more * beside.version_bytes,
    )  # fmt: skip


def replicated(
    run: config.Config,
    layers: Sequence[Layer],
    num_devices: int,
    *,
    bandwidth: float,
    num_stages: int | None = None,
    memory_bytes: int | None = None,
    versions: int | None = None,
) -> tuple[Partition, Partition | None]:
    """PipeDream's partition of a `chain`, and one with equal stages to compare it with.

    The latter has as many stages and devices; None where that does not divide. Raises ValueError
    for a schedule that the planner has no formula for, and where nothing fits into memory.
    """
    name = run.pipeline.schedule
    if name not in PLANNED or run.pipeline.table:
        raise ValueError(
            f"--replicate with schedule {run.pipeline.table or name!r}: the planner knows "
            f"{', '.join(PLANNED)}; use --schedule with one of them"
        )
    settings = dict(
        bandwidth=bandwidth, microbatches=run.batch.accumulation, in_flight=PLANNED[name],
        versions=versions or VERSIONS.get(name, 1),
    )  # fmt: skip
    found = partition.partition(
        layers, num_devices, num_stages=num_stages, memory_bytes=memory_bytes, **settings
    )
    count = len(found.stages)
    if found.num_devices % count or count > len(layers) - 2:
        return found, None
    counts = list(stages.cut(len(layers) - 2, range(count)).layers)
    counts[0] += 1
    counts[-1] += 1
    replicas = found.num_devices // count
    return found, partition.priced(layers, counts, replicas=replicas, **settings)

"""Every cross-check of a config: all problems at once, before anything is allocated."""

import copy
import dataclasses
import math
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from llmx import config as config_lib
from llmx import sharding
from llmx.checkpoint import checkpointer, mirror
from llmx.config import (
    Config,
    ConfigError,
    adapter_checks,
    distillation_checks,
    effects,
    expert_checks,
    family_checks,
    head_checks,
    own_checks,
    packed_checks,
    preference_checks,
    pruning_checks,
    quantization_checks,
    stage_memory,
    starting,
    state_memory,
    table_checks,
    utilization,
    value_types,
)  # fmt: skip
from llmx.config.axes import layout_of, replica_axes
from llmx.data import choices, objects, remote, shards, sources, tokenizers, transient
from llmx.data import config as data_config
from llmx.model import families, losses, own, precision, preference, quantized, remat, remat_costs
from llmx.model.adapters import AdaptersConfig
from llmx.model.attention import split as split_lib
from llmx.model.attention.splash import LANES
from llmx.model.distillation import DistillationConfig
from llmx.model.preference import PreferenceConfig
from llmx.model.quantization import QuantizationConfig
from llmx.pipeline import schedule, schedules
from llmx.pipeline import stages as stages_lib
from llmx.pipeline.schedules import PipelineConfig
from llmx.runtime import bounds, divergence, launch
from llmx.step import optimizers
from llmx.step.transforms import loss_scale
from llmx.step.transforms.masks import PruningConfig
from llmx.sync import strategy


def resolve(
    config: Config, num_devices: int | None = None, *, problems: Sequence[str] = ()
) -> Config:
    """A copy of the config with nothing left open: mesh sizes filled in, the vocabulary known.

    Args:
      num_devices: devices of the run; None = not known yet, and not checked.
      problems: what is already known to be wrong, reported with the rest.

    Raises ConfigError listing all problems, each with its remedy.
    """
    config = copy.deepcopy(config)
    found = [*problems, *_unknown_keys(config)]
    if wrong := list(value_types.wrong_types(config)):
        raise ConfigError(found + wrong)  # values of a wrong type cannot be compared with others
    try:
        config = starting.adopted(config)
    except (ValueError, OSError) as error:
        if isinstance(error, OSError) and transient.is_transient(error):
            raise
        text = f"start_from: {error.strerror}" if isinstance(error, OSError) else str(error)
        raise ConfigError([*found, text]) from error
    found += _sections(config)
    no_blocks = config.model.is_decoder and config.model.num_first >= config.model.num_layers
    if no_blocks or list(bounds.problems(config.model, "model.")):
        raise ConfigError(found)  # no parameters have such shapes
    found += [*_mesh(config, num_devices), *_start(config)]
    of_decoder = (adapter_checks, pruning_checks, quantization_checks, packed_checks,
                  distillation_checks, family_checks)  # fmt: skip
    for checks in of_decoder if config.model.is_decoder else (own_checks,):
        found += checks.problems(config)
    found += [*table_checks.problems(config), *preference_checks.problems(config)]
    found += effects.problems(config, found)
    if found or (found := list(state_memory.unplaced(config))):
        raise ConfigError(found)
    return config


def can_launch(config: Config) -> bool:
    """Whether the section `launch` is right by itself, before the whole config is checked."""
    return not any(value_types.wrong_types(config)) and not launch.problems(config.launch)


def for_inference(run: Config, *, tensor: int = 1, fsdp: int = 1) -> Config:
    """A copy of a resolved run that computes forward on a mesh of its own, by ZeRO-3.

    Raises ConfigError as `resolve` does, where the model does not divide over the mesh.
    """
    run = copy.deepcopy(run)
    run.mesh = sharding.MeshConfig(data=1, fsdp=fsdp, tensor=tensor)  # and no stages
    kv_heads = run.model.num_kv_heads
    replicate_kv = kv_heads % tensor > 0 and tensor % kv_heads == 0
    run.sharding = sharding.ShardingConfig(layout="zero3", replicate_kv=replicate_kv)
    forget_training(run)
    sizes = {axis: vars(run.mesh)[axis] for axis in sharding.AXES}
    if run.model.is_decoder and (found := [*_tensor(run, sizes), *_width(run, sizes)]):
        raise ConfigError(found)
    return run


def forget_training(run: Config) -> None:
    """Leaves out, in place, what concerns backward passes, updates and stages.

    Optimizer and loss may be some that a config file has added to their tables, and are not here.
    """
    run.pipeline, run.offload = PipelineConfig(), remat.OffloadConfig()
    run.optimizer = optimizers.OptimizerConfig(ema_decay=run.optimizer.ema_decay)
    run.loss.of_tokens = losses.NATS
    run.remat, run.memory_budget = "full" if run.model.is_decoder else "none", 0.0
    run.adapters = AdaptersConfig()  # they are merged
    run.pruning = PruningConfig()  # what is pruned is zero
    # Weights are rounded where they are restored; what they are multiplied with, in each product.
    run.quantization = QuantizationConfig(activations=run.quantization.activations)
    run.preference = PreferenceConfig(loss=preference.NONE)
    run.distillation, run.start_from_layers = DistillationConfig(), ()
    run.evaluation.choices = ()  # which may be gone


def rings_in_branches(run: Config) -> str:
    """Why GPUs cannot run this schedule with rings of attention; "" where they can.

    XLA:GPU joins all devices of a process in the clique of a collective-permute, so that one inside
    a branch waits for stages that took another.
    """
    mesh = run.mesh
    if mesh.stage == 1 or mesh.sequence // run.attention.ulysses <= 1:
        return ""
    table = utilization.table_of(run)
    chunks = utilization.chunks_of(run)
    if table.mixes_kinds:
        chosen, why = f"schedule={table.name!r}", "in its ticks stages take different branches"
        remedy = "zb_1f1b, 1f1b or interleaved_1f1b, whose stages do the same,"
    elif remat_costs.branches(run.model, chunks):
        chosen, why = f"layers={chunks}", "its chunks have layers of different kinds"
        remedy = "pipeline.layers that give all chunks the same kinds in the same order,"
    else:
        return ""
    return (
        f"pipeline.{chosen} with mesh.sequence={mesh.sequence} and "
        f"attention.ulysses={run.attention.ulysses}: {why}, and on GPUs a ring inside a branch "
        f"waits for all stages forever; use {remedy} or attention.ulysses={mesh.sequence}"
    )


def _start(config: Config) -> Iterator[str]:
    """Where the run begins and writes, before any file but directories is looked at."""
    yield from filter(None, [
        *mirror.problems("workdir=", config.workdir),
        remote.refusal("data.cache_dir=", config.data.cache_dir),
    ])  # fmt: skip
    if problem := starting.problem(config):
        yield problem
    fields = {field.name for field in dataclasses.fields(families.ModelConfig)}
    for name in config.start_changes:
        if name not in fields:
            yield f"start_changes: {bounds.use_one_of(name, sorted(fields))}, not {name!r}"


def _unknown_keys(section: Any, prefix: str = "") -> Iterator[str]:
    """Attributes that a config file set and no section has."""
    hints = typing.get_type_hints(type(section))
    for name, value in vars(section).items():
        if name not in hints:
            yield config_lib.unknown_key(prefix + name, config_lib.leaf_types(Config))
        elif dataclasses.is_dataclass(hints[name]) and dataclasses.is_dataclass(value):
            yield from _unknown_keys(value, f"{prefix}{name}.")


def _sections(config: Config) -> list[str]:
    """Each section by itself: the bounds of its values, and how they fit each other."""
    found = bounds.problems(config, "")
    # Sections whose values must also fit each other; of the others only the bounds are checked.
    checked = {
        "data": _data(config), "model": families.problems(config.model),
        "evaluation": [
            *bounds.problems(config.evaluation, "evaluation."),
            *choices.problems(config.evaluation.choices),
        ],
        "sync": strategy.conflicts(config), "launch": launch.problems(config.launch),
        "checkpoint": checkpointer.problems(config.checkpoint),
        "rollback": divergence.problems(config.rollback),
        "optimizer": optimizers.problems(config.optimizer),
        "products": quantized.problems(config.products),
        "loss_scale": loss_scale.problems(config.loss_scale),
    }  # fmt: skip
    for name, section in vars(config).items():
        if dataclasses.is_dataclass(section):
            found += checked[name] if name in checked else bounds.problems(section, f"{name}.")
    if not checked["model"]:
        kinds = sorted(set(config.model.layer_kinds))
        found += remat.problems(config.remat, config.offload, kinds)
    if config.memory_budget and config.remat != remat.BUDGET:
        found.append(
            f"memory_budget={config.memory_budget} has no effect with remat={config.remat!r}: set "
            f"remat={remat.BUDGET!r}, or leave it out"
        )
    if 0 < config.memory_budget < 2.0**-10:
        found.append(
            f"memory_budget={config.memory_budget} is in GiB, and so less than a MiB: use a larger "
            "one, or 0 for nearly all that a device has"
        )
    known = (
        config.precision in precision.POLICIES and config.reduce_dtype in precision.REDUCE_DTYPES
    )
    platform = config.launch.platform
    if known and (why_not := precision.refusal(config.precision, config.reduce_dtype, platform)):
        found.append(why_not)
    if config.batch.sequence_length > config.model.max_positions and config.model.is_decoder:
        found.append(
            f"batch.sequence_length={config.batch.sequence_length} is longer than "
            f"model.max_positions={config.model.max_positions}: use shorter sequences, or raise "
            "max_positions (a trained model then meets positions that it never saw)"
        )
    return found


def _data(config: Config) -> list[str]:
    """The data section; fills in the vocabulary from the tokenizer."""
    found = bounds.problems(config.data, "data.")
    found += bounds.problems(config.data.records, "data.records.")
    if found := [*found, *data_config.problems(config.data)]:
        return found
    try:
        num_tokens = _vocab_size(config.data)
    except ValueError as error:
        return [transient.stated("data", error)]
    if config.data.format == data_config.RECORDS or config.model.recommender.name:
        found += table_checks.filled_in(config)
    if not config.model.vocab_size:
        config.model.vocab_size = num_tokens
    elif 1 <= config.model.vocab_size < num_tokens:
        found.append(
            f"model.vocab_size={config.model.vocab_size} is less than the {num_tokens} tokens "
            "of the tokenizer: set it to at least that, or to 0 to follow the tokenizer"
        )
    return found


def _vocab_size(data: data_config.DataConfig) -> int:
    """Tokens of the tokenizer that the data section names, read from its file."""
    prefix = sources.SHARDS_PREFIX
    written = [name.removeprefix(prefix) for name in data.sources if name.startswith(prefix)]
    if data.train_tokenizer:
        return data.train_tokenizer
    if data.format == data_config.RECORDS:
        written = []  # shards of records have no tokenizer
    if data.sources[0].startswith(objects.PREFIX):
        return objects.tokenizer_of(data.sources[0]).vocab_size
    if data.tokenizer == "auto" and written:
        return shards.read_index(written[0])["vocab_size"]
    return tokenizers.load("bytes" if data.tokenizer == "auto" else data.tokenizer).vocab_size


def _mesh(config: Config, num_devices: int | None) -> list[str]:
    """Sizes against mesh axes; fills in the open mesh axis."""
    sizes = {axis: vars(config.mesh)[axis] for axis in sharding.AXES}
    if bad := {axis: size for axis, size in sizes.items() if size < 1 and size != -1}:
        return [f"mesh: mesh sizes {bad} must be at least 1, or -1 for all that remain"]
    if num_devices is not None:
        try:
            sizes = sharding.resolve_sizes(sizes, num_devices)
        except ValueError as error:
            return [f"mesh: {error}"]
    elif -1 in sizes.values():
        return []
    vars(config.mesh).update(sizes)
    if config.sharding.layout not in sharding.LAYOUTS:
        return []
    unknown = [axis for axis in config.mesh.across_slices if axis not in sizes]
    of_decoder = () if not config.model.is_decoder else (
        *_tensor(config, sizes), *expert_checks.problems(config, sizes), *_context(config, sizes),
        *_products(config, sizes), *_offloaded_parameters(config, sizes["stage"]),
    )  # fmt: skip
    twice = {axis for axis in sizes if config.mesh.across_slices.count(axis) > 1}
    return [
        *(f"mesh.across_slices names {a!r} twice" for a in twice),
        *(f"mesh.across_slices: {a!r} is unknown: {bounds.use_one_of(a, sizes)}" for a in unknown),
        *stage_problems(config, sizes["stage"]),
        *_batch(config, sizes),
        *of_decoder,
    ]


def mesh_problems(config: Config) -> list[str]:
    """What is wrong with a config whose mesh is complete and whose sections are right: all that a
    choice of mesh, layout, schedule and microbatches can break."""
    return _mesh(config, None)


def stage_problems(config: Config, stages: int) -> Iterator[str]:
    """What is wrong with the pipeline of a config, each with its remedy."""
    if stages == 1 and remat.keeps_input(config.remat):
        yield (
            f"remat={config.remat!r} with mesh.stage=1: it keeps the input of a stage's chunk of "
            f"the model, and there are no stages; use {remat.inside(config.remat)!r}, or 'sqrt' to "
            "save less"
        )
    if stages == 1:
        why = "with mesh.stage=1: leave it out, or set mesh.stage to the number of stages"
        keys = ("table", "layers", "virtual_stages", "predict", "memory_gib")
        yield from bounds.without_effect(config.pipeline, "pipeline.", dict.fromkeys(keys, why))
        return
    if config.offload.saves:
        yield (
            f"offload.saves={config.offload.saves} with mesh.stage={stages}: stages keep what "
            "layers save in buffers on the device; leave offload.saves out, or save less, for "
            "example with remat='sqrt'"
        )
    if config.pipeline.schedule not in schedules.SCHEDULES:
        return
    microbatches = config.batch.accumulation
    try:
        table = utilization.table_of(config)
        # Raises ValueError for layers that do not fit.
        stages_lib.cut(config.model.num_blocks, table.stage_of, config.pipeline.layers)
        yield from _deferred(config, table)
        yield from _predicted(config, table)
        if config.sharding.turns > 1 and table.splits_backward:
            yield (
                f"sharding.turns={config.sharding.turns} with pipeline.schedule="
                f"{config.pipeline.schedule!r}, which leaves the weight gradient of each product "
                "for later: use sharding.turns=1, 0 = automatic, or another schedule"
            )
        if config.model.repeats > 1 and table.splits_backward:
            yield (
                f"model.repeats={config.model.repeats} with pipeline.schedule="
                f"{config.pipeline.schedule!r}, which leaves the weight gradient of each product "
                "for later, and a layer has one of each pass: use repeats=1 or another schedule"
            )
    except ValueError as error:
        yield f"mesh.stage={stages}, batch.accumulation={microbatches}: {error}"


def _predicted(config: Config, table: schedule.Table) -> Iterator[str]:
    """What an update with the microbatches of two batches needs."""
    if not config.pipeline.predict:
        return
    if not table.periodic:
        yield (
            f"pipeline.predict with pipeline.schedule={table.name!r}, whose gradients are of the "
            "newest weights: leave it out, or use pipedream_2bw"
        )
    if any(bounds.problems(config, "")):
        return
    policy = precision.policy_of(config.precision, config.reduce_dtype)
    if loss_scale.kind_of(config.loss_scale, policy) == "dynamic":
        yield (
            "pipeline.predict with a dynamic loss scale: an update adds gradients of two batches, "
            "whose scales may differ; use loss_scale.kind='fixed', or leave pipeline.predict out"
        )


def _deferred(config: Config, table: schedule.Table) -> Iterator[str]:
    """What a schedule that splits the backward pass may keep of it."""
    gib, name = config.pipeline.memory_gib, table.name
    if gib and not table.splits_backward:
        yield (
            f"pipeline.memory_gib={gib:g} with pipeline.schedule={name!r}, which defers no weight "
            "gradients: leave it out, or use zb_1f1b or another zb_ schedule"
        )
    elif gib and config.remat != remat.BUDGET and not _uncountable(config):
        yield from filter(None, [stage_memory.refusal(config, config.launch.platform)])


def _uncountable(config: Config) -> bool:
    """Whether a value is wrong, as others tell, without which memory cannot be counted."""
    kinds = sorted(set(config.model.layer_kinds))
    return any((
        *bounds.problems(config, ""), *bounds.problems(config.optimizer, ""),
        *bounds.problems(config.pipeline, ""),
        *remat.problems(config.remat, config.offload, kinds),
    ))  # fmt: skip


def _tensor(config: Config, sizes: dict[str, int]) -> Iterator[str]:
    """What tensor parallelism splits; the vocabulary is split over stages too."""
    model, tensor, shards = config.model, sizes["tensor"], sizes["stage"] * sizes["tensor"]
    split_by_key = {"num_heads": "query heads", "mlp_dim": "the MLP"}
    if model.num_experts:
        if not model.first_dense:
            del split_by_key["mlp_dim"]
        split_by_key |= {"expert_dim": "each expert", "shared_dim": "the shared expert"}
    for key, split in split_by_key.items():
        if (value := vars(model)[key]) % tensor:
            yield (
                f"model.{key}={value} does not divide over tensor={tensor}, which splits {split}: "
                f"use tensor in {bounds.divisors(value, tensor)} or another {key}"
            )
    kv_heads, shared = model.num_kv_heads, config.sharding.replicate_kv
    if kv_heads % tensor and (tensor % kv_heads or not shared):
        remedy = ""
        if tensor % kv_heads == 0:
            remedy = ", or sharding.replicate_kv=True, which keeps all K/V heads on each shard"
        elif shared:
            remedy = (
                ": with sharding.replicate_kv tensor may be a multiple of the K/V heads, so that "
                "the query heads of a shard share one"
            )
        good = [n for n in bounds.divisors(kv_heads, kv_heads) if model.num_heads % n == 0]
        yield (
            f"model.num_kv_heads={kv_heads} does not divide over tensor={tensor}: use tensor in "
            f"{good}{remedy}"
        )
    if model.vocab_multiple < 1:
        return
    over = sharding.mesh_text({axis: sizes[axis] for axis in ("stage", "tensor")})
    rows, rest = divmod(model.padded_vocab, shards)
    if rest:
        yield (
            f"the padded vocabulary of {model.padded_vocab} (vocab_size={model.vocab_size}) does "
            f"not divide over {shards} = {over}: set model.vocab_multiple to a multiple of {shards}"
        )
    elif rows:
        yield from head_checks.chunks(config, sizes, rows, over)


def _turns(config: Config, sizes: dict[str, int], rows: int) -> Iterator[str]:
    """Groups of the rows that a device has of a microbatch, or of the positions of its rows."""
    turns, length = config.sharding.turns, config.batch.sequence_length
    kernel = config.attention.implementation
    pieces = turns * (sizes["tensor"] if config.sharding.sequence_parallel else 1)
    if kernel == "splash":
        pieces = math.lcm(pieces, turns * LANES)
    if turns < 1 or rows % turns == 0:
        return
    good = " or ".join(str(n) for n in bounds.divisors(rows, min(rows, 8)))
    if sizes["sequence"] > 1 or length % pieces:
        yield (
            f"sharding.turns={turns} divides neither the {rows} rows that a device has of a "
            f"microbatch nor their positions (mesh.sequence=1 and batch.sequence_length, {length}, "
            f"a multiple of {pieces}): use {good}, or 0 = automatic"
        )
    elif kernel == "cudnn":
        yield (
            f"sharding.turns={turns} does not divide the {rows} rows that a device has of a "
            "microbatch, and with attention.implementation='cudnn' their positions cannot take "
            f"turns: use {good}, or attention.implementation='auto'"
        )


def _batch(config: Config, sizes: dict[str, int]) -> Iterator[str]:
    """What data parallelism splits: sequences, and the width of parameters or their state."""
    batch, layout = config.batch, config.sharding.layout
    over = {axis: sizes[axis] for axis in sharding.BATCH_AXES}
    ways = math.prod(over.values()) * batch.accumulation
    if ways >= 1 and batch.size % ways:
        accumulated = f" times accumulation={batch.accumulation}" if batch.accumulation > 1 else ""
        low = batch.size // ways * ways
        yield (
            f"batch.size={batch.size} does not divide over {ways} = {sharding.mesh_text(over)}"
            f"{accumulated}: use {' or '.join(str(n) for n in (low, low + ways) if n > 0)}"
        )
    elif ways >= 1:
        yield from _turns(config, sizes, batch.size // ways)
    if config.sharding.gather == "step" and not replica_axes(config, "parameters"):
        yield (
            f"sharding.gather='step' gathers nothing with layout {layout!r}, whose parameters are "
            "whole: use 'layer', or layout 'zero3' or 'hsdp'"
        )
    yield from _width(config, sizes)


def _width(config: Config, sizes: dict[str, int]) -> Iterator[str]:
    """What the layout splits the width over."""
    width, layout = config.model.width, config.sharding.layout
    over = {axis: sizes[axis] for axis in replica_axes(config, "optimizer")}
    ways, of_clicks = math.prod(over.values()), config.model.recommender.name
    if of_clicks and not config.model.recommender.features:
        return  # what is wrong with it has been said
    if ways == 1:
        return
    of_model = f"a layer of {of_clicks!r}" if of_clicks else f"model.width={width}"
    text = f"does not divide over {ways} = {sharding.mesh_text(over)}, over which layout {layout!r}"
    found = f"{of_model} {text} splits it"
    remedy = f"use a multiple of {ways}, a smaller fsdp axis, or layout 'ddp'"
    products = config.products
    if width % ways and not of_clicks and (products.gather or products.granularity == "block"):
        yield (
            f"{found}, and what products.gather={products.gather!r} and products.granularity="
            f"{products.granularity!r} round together must not be split otherwise: {remedy}"
        )
        return
    if families.problems(config.model) or (config.model.own and own.problems(config.model.own)):
        return  # no parameters have such shapes
    table = layout_of(config).optimizer
    for leaf in (*state_memory.leaves(config.model), *state_memory.of_adapters(config)):
        if leaf.is_matrix and state_memory.unsplit(leaf, table, sizes):
            if (size := leaf.shape[leaf.axes.index("embed")]) != width and not of_clicks:
                found = f"the rank {size} of {leaf.name} {text} splits it"
            yield (
                f"{found}, and no other dimensions of {leaf.name}, {leaf.shape} of {leaf.axes}, "
                f"do: {remedy}; or two axes, as mesh.data and mesh.fsdp, of which the one divides "
                "the width and the other another dimension"
            )
            return


def _products(config: Config, sizes: dict[str, int]) -> Iterator[str]:
    """What has one scale is on one device, and what is gathered as codes is split."""
    products, model, layout = config.products, config.model, config.sharding.layout
    if products.gather and not replica_axes(config, "parameters"):
        yield (
            f"products.gather={products.gather!r} gathers nothing with layout {layout!r}, whose "
            "parameters are whole: use products.gather='', or layout 'zero3' or 'hsdp'"
        )
    if products.scaling == "delayed" and sizes["stage"] > 1:
        yield (
            f"products.scaling='delayed' with mesh.stage={sizes['stage']}: the stages of a "
            "pipeline hand out no ranges; use products.scaling='current'"
        )
    if products.granularity != "block" or products.block < 1:
        return
    over = {axis: sizes[axis] for axis in replica_axes(config, "parameters")}
    length, turns = config.batch.sequence_length, max(config.sharding.turns, 1)
    for key, size, ways in (
        ("model.width", model.width, math.prod(over.values()) if products.gather else 1),
        ("model.mlp_dim", model.mlp_dim, sizes["tensor"]),
        ("model.head_dim", model.head_dim, 1),
        ("batch.sequence_length", length, sizes["sequence"] * turns),
    ):
        share, block = size // ways, min(products.block, size)
        if size % ways == 0 and share % block:
            yield (
                f"products.block={products.block} does not divide {key}={size}"
                + (f" over {ways} devices or turns, {share} on each" if ways > 1 else "")
                + f": use a block of {math.gcd(share, block)}, or granularity 'tensor'"
            )


def _offloaded_parameters(config: Config, stages: int) -> Iterator[str]:
    """What fetches weights layer by layer, and leaves them where they are between updates."""
    if not config.offload.parameters:
        return
    leave_out = "leave offload.parameters out, or use"
    layout, strategy = config.sharding.layout, config.sync.strategy
    if stages > 1:
        yield (
            f"offload.parameters with mesh.stage={stages}: a stage takes its weights from a buffer "
            f"on the device; {leave_out} mesh.stage=1"
        )
    if strategy != "mean":
        yield (
            f"offload.parameters with sync.strategy={strategy!r}, which takes the gradient of each "
            f"replica by itself: {leave_out} strategy 'mean'"
        )
    if config.sharding.gather == "step":
        yield (
            "offload.parameters with sharding.gather='step', which keeps all weights whole on the "
            f"device: {leave_out} 'layer'"
        )
    if replica_axes(config, "parameters") != replica_axes(config, "optimizer"):
        yield (
            f"offload.parameters with layout {layout!r}, which gathers all parameters after the "
            f"update: {leave_out} layout 'zero3' or 'hsdp'"
        )


def _context(config: Config, sizes: dict[str, int]) -> Iterator[str]:
    """What context parallelism splits: positions, and in attention heads."""
    ways, tensor = sizes["sequence"], sizes["tensor"]
    length, chosen = config.batch.sequence_length, config.attention
    tokens = ways * (tensor if config.sharding.sequence_parallel else 1)
    if length % tokens:
        yield (
            f"batch.sequence_length={length} does not divide over {tokens} = sequence{ways} x "
            f"tensor{tensor}: use a multiple of {tokens}"
            + (", or sharding.sequence_parallel=False" if tensor > 1 else "")
        )
    if ways == 1:
        return
    try:
        split = split_lib.Split(ways, chosen.ulysses, chosen.zigzag)
    except ValueError as error:
        yield str(error)
        return
    if length % ways == 0:
        try:
            split.order(length)
        except ValueError as error:
            yield f"batch.sequence_length: {error}"
    heads = config.model.num_heads // tensor
    if heads % chosen.ulysses:
        yield (
            f"attention.ulysses={chosen.ulysses} does not divide the {heads} query heads of a "
            f"device (model.num_heads={config.model.num_heads} over tensor={tensor}): use a "
            "divisor; the other devices of `sequence` form rings"
        )

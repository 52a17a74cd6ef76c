"""A run in lines of text."""

import glob
import math
import os
from collections.abc import Iterator

import jax

from llmx import sharding
from llmx.checkpoint import identity, writer
from llmx.config import Config, preference_checks, starting, utilization
from llmx.data import transient
from llmx.model import adapters, apply, costs, precision, quantization, quantized, ranks
from llmx.pipeline import schedule
from llmx.pipeline import stages as stages_lib
from llmx.runtime import hardware
from llmx.sharding import trees
from llmx.step.transforms import loss_scale, masks


def run_text(config: Config, mesh: jax.sharding.Mesh) -> str:
    """What is about to be trained, on what."""
    processes = f", {jax.process_count()} processes" if jax.process_count() > 1 else ""
    device = mesh.devices.flat[0].device_kind
    tokens = config.batch.size * config.batch.sequence_length * config.steps
    stages, sync = stages_text(config), sync_text(config)
    products = quantized.units_text(config.products, hardware.chip_of(device))
    rounded = quantization.text(config.quantization, ranks.of(config.model))
    return "\n".join([
        f"model: {model_text(config, costs.num_parameters(config.model))}",
        *([f"adapters: {adapters_text(config)}"] if config.adapters.rank else []),
        *([f"teacher: {teacher_text(config)}"] if config.distillation.is_on else []),
        f"mesh:  {sharding.mesh_text(mesh.shape)} ({device}{processes}), "
        f"layout {config.sharding.layout}",
        *([f"stages: {stages}"] if stages else []),
        *([f"warning: {late}"] if (late := delay_text(config)) else []),
        *([f"sync:  {sync}"] if sync else []),
        *([f"products: {products}"] if products else []),
        *([f"quantization: {rounded}"] if rounded else []),
        *([f"pruned: {pruning_text(config)}"] if config.pruning.method != masks.NONE else []),
        f"batch: {batch_text(config)}; {config.steps:,} steps = {tokens:,} tokens",
        *(f"warning: {text}" for text in oddities(config)),
    ])  # fmt: skip


def teacher_text(config: Config) -> str:
    """What is learned from, on a line."""
    section = config.distillation
    if (teacher := starting.teacher_of(config)) is None:
        what = f"{section.top_k} likeliest tokens, read beside the shards"
    else:
        what = f"{section.teacher}, {teacher.family}, {costs.num_parameters(teacher):,} parameters"
    return (
        f"{what}; {section.weight:g} of the loss, temperature {section.temperature:g}, "
        f"{section.divergence} divergence"
    )


def oddities(config: Config) -> Iterator[str]:
    """What is allowed and probably not meant, with its values."""
    warmup, rate = config.optimizer.warmup_steps, config.optimizer.learning_rate
    if warmup >= config.steps > 1:
        yield (
            f"optimizer.warmup_steps={warmup} is not below steps={config.steps}: the learning rate "
            f"never reaches {rate:g}"
        )
    if config.adapters.rank and not config.start_from:
        yield (
            f"adapters.rank={config.adapters.rank} and no start_from: the parameters beside the "
            "adapters are frozen as they are drawn, unless the workdir has a model already"
        )
    if preference_checks.is_on(config) and not config.start_from:
        yield (
            "data.format='preference' and no start_from: the reference is the model as it is "
            "drawn, unless the workdir has a model already"
        )


def failure_text(config: Config, error: OSError) -> str:
    """Why a file or folder of a run cannot be used, what to do, and which key names it."""
    cause, remedy = writer.reason(error)
    if transient.is_transient(error):
        remedy = "run again"
    paths = [path for path in (error.filename, error.filename2) if isinstance(path, str)]
    keys = [key for path in paths if (key := _key_of(config, path))]
    other = f", or name another {keys[0]}" if keys else ""
    return f"{cause}: {remedy}{other}"


def failure(config: Config | None, error: ValueError | OSError) -> tuple[Exception | str, int]:
    """Why a run does not begin, for people, and its exit code. None = not even with a config."""
    known = isinstance(error, ValueError) or config is None
    text = error if known else failure_text(config, error)
    return text, transient.exit_code(error)


def _key_of(config: Config, path: str) -> str:
    """The key of the innermost file or folder of the config that is or holds `path`, or ""."""
    path, found = os.path.abspath(path), {}
    sources = [source.removeprefix("shards:") for source in config.data.sources]
    places = [
        ("--workdir", config.workdir), ("data.tokenizer", config.data.tokenizer),
        ("data.cache_dir", config.data.cache_dir or "~/.cache/llmx/data"),
        ("checkpoint.local_directory", config.checkpoint.local_directory),
        ("start_from", identity.origin(config.start_from)[0]),
        *(("data.sources", source) for source in sources),
    ]  # fmt: skip
    for key, place in places:
        folder = os.path.abspath(os.path.expanduser(place))
        while glob.has_magic(folder):
            folder = os.path.dirname(folder)
        if place and os.path.commonpath([path, folder]) == folder:
            found[len(folder)] = key
    return found[max(found)] if found else ""


def model_text(config: Config, num_parameters: int) -> str:
    """What is trained, on a line."""
    if not config.model.is_decoder:
        total = sum(leaf.size for leaf in apply.abstract_parameters(config.model)[0].values())
        name = config.model.own or config.model.recommender.name
        return f"{name}, {total:,} parameters; {precision_text(config)}"
    return (
        f"{config.model.family}, {num_parameters:,} parameters, {config.model.num_layers} layers; "
        f"{precision_text(config)}, remat {config.remat}"
    )


def adapters_text(config: Config) -> str:
    """What is trained beside the frozen parameters, on a line."""
    section, (shapes, _) = config.adapters, apply.abstract_parameters(config.model)
    of_model = trees.named(shapes)
    found = dict(adapters.named(section, of_model, lambda leaf: leaf.shape, section.rank))
    trained, total = sum(map(math.prod, found.values())), costs.num_parameters(config.model)
    share = f"{trained:,} parameters are trained, {trained / total:.2%} of the model's"
    return f"rank {section.rank}, alpha {section.alpha:g}, of {len(found) // 2} products; {share}"


def pruning_text(config: Config) -> str:
    """What is pruned, and when, on a line."""
    section, products = config.pruning, ", ".join(config.pruning.products)
    if section.method == masks.FIXED:
        origin = section.masks_from or f"the zeros of {config.start_from}"
        return f"{products}, with the masks of {origin}"
    least = f"{section.pattern} of" if section.method == masks.N_M else f"{section.sparsity:.0%} of"
    by = "magnitude" if section.method == masks.N_M else section.method
    times = masks.times(section, config.steps)
    back = f", then back to step {section.rewind_to}" if section.rewind_to >= 0 else ""
    return (
        f"{least} {products} by {by}, {len(times)} times from step {times[0]} to {times[-1]}{back}"
    )


def precision_text(config: Config) -> str:
    """The dtypes, and the loss scale if there is one."""
    policy = precision.policy_of(config.precision, config.reduce_dtype)
    sums = f", gradients summed in {config.reduce_dtype}" if config.reduce_dtype else ""
    scale, kind = config.loss_scale, loss_scale.kind_of(config.loss_scale, policy)
    first = {"dynamic": "dynamic loss scale from", "fixed": "loss scale"}.get(kind)
    return f"{config.precision}{sums}" + (f", {first} {scale.initial:g}" if first else "")


def batch_text(config: Config) -> str:
    """The batch of a step, on a line."""
    batch = config.batch
    splits = f" in {batch.accumulation} microbatches" if batch.accumulation > 1 else ""
    tokens = batch.size * batch.sequence_length
    return f"{batch.size} x {batch.sequence_length} = {tokens:,} tokens per step{splits}"


def stages_text(config: Config) -> str:
    """What the stages of the mesh do, on a line; "" without stages."""
    stages = config.mesh.stage
    if stages == 1:
        return ""
    table = utilization.table_of(config)
    layers = stages_lib.cut(config.model.num_blocks, table.stage_of, config.pipeline.layers).layers
    per_chunk = f"{min(layers)} to {max(layers)}" if len(set(layers)) > 1 else str(layers[0])
    return (
        f"{table.name} on {stages} stages, {per_chunk} layers in each of {table.num_chunks} model "
        f"chunks; bubble {schedule.check(table).bubble:.1%}"
    )


# At this learning rate the loss of PipeDream-2BW with AdamW is a third higher: docs/pipeline.md.
LATE_RATE = 2e-3


def delay_text(config: Config) -> str:
    """Why the gradients of PipeDream-2BW are too late for the optimizer; "" where they are not."""
    stages, pipeline, optimizer = config.mesh.stage, config.pipeline, config.optimizer
    if stages == 1 or pipeline.predict or optimizer.name != "adamw":
        return ""
    table = utilization.table_of(config)
    if not table.periodic or optimizer.learning_rate < LATE_RATE:
        return ""
    return (
        f"pipeline.schedule={table.name!r} with AdamW at learning rate "
        f"{optimizer.learning_rate:g}: gradients are one step late, which costs much of the "
        "progress; use pipeline.predict=True, optimizer.name='muon', or a lower rate"
    )


def sync_text(config: Config) -> str:
    """How replicas synchronise, on a line; "" where they average their gradients each step."""
    strategy, warmup = config.sync.strategy, config.sync.warmup_steps
    if strategy == "mean":
        return ""
    until = ", after steps of 'mean' until the variance settles"
    first = {-1: until, 0: ""}.get(warmup, f", after {warmup} steps of 'mean'")
    replicas = f"{config.mesh.data} replicas"
    if (groups := config.sync.groups) > 1:
        group, place = config.sync.group, config.sync.exchange
        replicas = f"{groups} groups that meet in {place}, of which this is {group}, of {replicas}"
    return f"{strategy} between {replicas}{first}"

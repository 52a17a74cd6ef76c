"""A run in lines of text."""

import jax

from llmx import sharding
from llmx.config import Config
from llmx.model import costs
from llmx.pipeline import schedule, schedules
from llmx.pipeline import stages as stages_lib


def run_text(config: Config, mesh: jax.sharding.Mesh) -> str:
    """What is about to be trained, on what."""
    processes = f", {jax.process_count()} processes" if jax.process_count() > 1 else ""
    device = mesh.devices.flat[0].device_kind
    tokens = config.batch.size * config.batch.sequence_length * config.steps
    stages, sync = stages_text(config), sync_text(config)
    return "\n".join([
        f"model: {model_text(config, costs.num_parameters(config.model))}",
        f"mesh:  {sharding.mesh_text(mesh.shape)} ({device}{processes}), "
        f"layout {config.sharding.layout}",
        *([f"stages: {stages}"] if stages else []),
        *([f"sync:  {sync}"] if sync else []),
        f"batch: {batch_text(config)}; {config.steps:,} steps = {tokens:,} tokens",
    ])  # fmt: skip


def model_text(config: Config, num_parameters: int) -> str:
    """What is trained, on a line."""
    return (
        f"{config.model.family}, {num_parameters:,} parameters, {config.model.num_layers} layers; "
        f"{config.precision}, remat {config.remat}"
    )


def batch_text(config: Config) -> str:
    """The batch of a step, on a line."""
    batch = config.batch
    splits = f" in {batch.accumulation} microbatches" if batch.accumulation > 1 else ""
    tokens = batch.size * batch.sequence_length
    return f"{batch.size} x {batch.sequence_length} = {tokens:,} tokens per step{splits}"


def stages_text(config: Config) -> str:
    """What the stages of the mesh do, on a line; "" without stages."""
    stages, microbatches = config.mesh.stage, config.batch.accumulation
    if stages == 1:
        return ""
    table = schedules.table_of(config.pipeline, stages=stages, microbatches=microbatches)
    layers = stages_lib.cut(config.model.num_layers, table.stage_of, config.pipeline.layers).layers
    per_chunk = f"{min(layers)} to {max(layers)}" if len(set(layers)) > 1 else str(layers[0])
    return (
        f"{table.name} on {stages} stages, {per_chunk} layers in each of {table.num_chunks} model "
        f"chunks; bubble {schedule.check(table).bubble:.1%}"
    )


def sync_text(config: Config) -> str:
    """How replicas synchronise, on a line; "" where they average their gradients each step."""
    strategy, warmup = config.sync.strategy, config.sync.warmup_steps
    if strategy == "mean":
        return ""
    until = ", after steps of 'mean' until the variance settles"
    first = {-1: until, 0: ""}.get(warmup, f", after {warmup} steps of 'mean'")
    return f"{strategy} between {config.mesh.data} replicas{first}"

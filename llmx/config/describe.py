"""A run in lines of text."""

from llmx.config import Config
from llmx.pipeline import schedule, schedules
from llmx.pipeline import stages as stages_lib


def model_text(config: Config, num_parameters: int) -> str:
    """What is trained, on a line."""
    return (
        f"{config.model.family}, {num_parameters:,} parameters, {config.model.num_layers} layers; "
        f"{config.precision}, remat {config.remat}"
    )


def batch_text(config: Config) -> str:
    """What a step takes, on a line."""
    batch = config.batch
    splits = f" in {batch.accumulation} microbatches" if batch.accumulation > 1 else ""
    tokens = batch.size * batch.sequence_length
    return f"{batch.size} x {batch.sequence_length} = {tokens:,} tokens per step{splits}"


def stages_text(config: Config) -> str:
    """What the stages of the mesh do, on a line; "" without stages."""
    stages = config.mesh.stage
    if stages == 1:
        return ""
    table = schedules.table_of(
        config.pipeline, stages=stages, microbatches=config.batch.accumulation
    )
    layers = stages_lib.cut(config.model.num_layers, table.stage_of, config.pipeline.layers).layers
    each = f"{min(layers)} to {max(layers)}" if len(set(layers)) > 1 else str(layers[0])
    return (
        f"{table.name} on {stages} stages, {each} layers in each of {table.num_chunks} model "
        f"chunks; bubble {schedule.check(table).bubble:.1%}"
    )


def sync_text(config: Config) -> str:
    """How replicas agree, on a line; "" where they sum their gradients as usual."""
    chosen = config.sync
    if chosen.strategy == "mean":
        return ""
    first = {
        -1: ", after steps of 'mean' until the variance has settled", 0: "",
    }.get(chosen.warmup_steps, f", after {chosen.warmup_steps} steps of 'mean'")  # fmt: skip
    return f"{chosen.strategy} between {config.mesh.data} replicas{first}"

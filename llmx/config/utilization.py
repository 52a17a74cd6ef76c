"""MFU and HFU of a config: FLOPs of its tokens, over the peak of what its products take."""

import math

from llmx import sharding
from llmx.config import Config, starting
from llmx.model import conventions, costs, losses, precision, quantized
from llmx.pipeline import schedules, stages
from llmx.pipeline.schedule import Table
from llmx.runtime.hardware import Chip
from llmx.runtime.utilization import Utilization


def of(config: Config, chip: Chip, num_devices: int) -> Utilization:
    """For a resolved config on `num_devices` jax devices of a chip.

    HFU counts what `remat` repeats in each model chunk of a pipeline, and not what `offload.saves`
    keeps. What stages compute in empty ticks is not counted. With adapters the frozen weights have
    no gradient; the adapters' own products are left out. Of a teacher there is its forward pass.
    Raises ValueError where `remat` is "budget": choose first, by `llmx.aot.budget`.
    """
    flops = conventions.by_figure(
        config.model, sequence_length=config.batch.sequence_length, remat=config.remat,
        loss_chunks=loss_chunks(config), chunks=chunks_of(config), offloaded=config.offload.saves,
    )  # fmt: skip
    if config.adapters.rank:
        parts = costs.forward_flops_by_part(
            config.model, sequence_length=config.batch.sequence_length, causal=True
        )
        weights = sum(parts.values()) - parts["scores"]
        flops = {name: found - weights for name, found in flops.items()}
    if (teacher := starting.teacher_of(config)) is not None:
        forward = costs.forward_flops_by_part(
            teacher, sequence_length=config.batch.sequence_length, causal=True
        )
        flops = {name: found + sum(forward.values()) for name, found in flops.items()}
    return Utilization(flops, chip, compute_dtype(config), num_devices)


def table_of(config: Config) -> Table:
    """The schedule of a config with stages. ValueError for sizes that it does not allow."""
    return schedules.table_of(
        config.pipeline, stages=config.mesh.stage, microbatches=config.batch.accumulation
    )


def chunks_of(config: Config) -> tuple[int, ...]:
    """The layers of each model chunk of a resolved config, in the order of the model; without a
    pipeline ()."""
    if config.mesh.stage == 1:
        return ()
    table = table_of(config)
    return stages.cut(config.model.num_blocks, table.stage_of, config.pipeline.layers).layers


def compute_dtype(config: Config) -> str:
    """Numpy's name of the type in which a layer's weights are multiplied in the forward pass: what
    the peak is of. Numbers with scales by block are turned back into the compute dtype first."""
    products = config.products
    rounded = quantized.FORMATS[products.format].x
    if rounded is None or products.granularity == "block":
        return precision.POLICIES[config.precision].compute.name
    return rounded.dtype.name


def loss_chunks(config: Config) -> int:
    """The parts of the vocabulary that a resolved config's loss goes through."""
    mesh = config.mesh
    rows = config.model.padded_vocab // (mesh.stage * mesh.tensor)
    return config.loss.chunks or losses.num_chunks(tokens_of(config) // mesh.sequence, rows)


def tokens_of(config: Config) -> int:
    """Tokens of a microbatch on one replica."""
    replicas = math.prod(vars(config.mesh)[axis] for axis in sharding.BATCH_AXES)
    rows = config.batch.size // (replicas * config.batch.accumulation)
    return rows * config.batch.sequence_length

"""From a resolved config to a model on a mesh: what train, evaluate, generate and compilation
ahead of time share."""

from collections.abc import Callable, Sequence

import jax

from llmx import config, sharding
from llmx.model import execution as execution_lib
from llmx.model import precision
from llmx.pipeline import schedules
from llmx.pipeline import stages as stages_lib
from llmx.runtime import launch
from llmx.step import step
from llmx.step.state import Pipeline, Setup
from llmx.sync import strategy


def make_setup(run: config.Config, *, devices: Sequence[jax.Device] | None = None) -> Setup:
    """Shapes, shardings and functions of a run's state on its mesh; nothing is allocated.

    Args:
      run: a resolved config.
      devices: of the mesh; None = all.
    """
    sizes = {axis: vars(run.mesh)[axis] for axis in sharding.AXES}
    mesh = sharding.make_mesh(sizes, devices=devices, across_slices=run.mesh.across_slices)
    layout = sharding.make_layout(
        run.sharding.layout,
        sequence_parallel=run.sharding.sequence_parallel,
        replicate_kv=run.sharding.replicate_kv,
    )
    execution = execution_lib.Execution(
        place=sharding.Placement(mesh, layout),
        policy=precision.POLICIES[run.precision],
        remat=run.remat,
        attention=run.attention,
        packed=run.data.pack,
        loss_chunks=run.loss.chunks,
    )
    stages = None
    if mesh.shape["stage"] > 1:
        table = schedules.table_of(
            run.pipeline, stages=mesh.shape["stage"], microbatches=run.batch.accumulation
        )
        cut = stages_lib.cut(run.model.num_layers, table.stage_of, run.pipeline.layers)
        rows = (run.batch.size, run.batch.sequence_length)
        stages = Pipeline(table, cut, rows)
    return step.make_setup(
        run.model, execution, run.optimizer, total_steps=run.steps, pipeline=stages,
        sync_config=run.sync,
    )  # fmt: skip


def make_train_step(run: config.Config, setup: Setup, *, phase: str = strategy.MEAN) -> Callable:
    """The jitted (State, Batch) -> (State, Report) of a run, in one of its phases."""
    return step.make_train_step(
        setup,
        phase=phase,
        accumulation=run.batch.accumulation,
        z_loss=run.loss.z_loss,
        clip_norm=run.optimizer.clip_norm,
        guard=run.guard,
        gather=run.sharding.gather,
        compiler_options=launch.compiler_options(run.launch),
    )

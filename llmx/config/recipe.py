"""From a resolved config to the program of its train step: the only place that turns one into the
other. Train, evaluate, generate and ahead-of-time compilation share it."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

from llmx import config as config_lib
from llmx import sharding
from llmx.checkpoint import identity
from llmx.config import (
    checks,
    preference_checks,
    stage_memory,
    starting,
    table_checks,
    utilization,
)
from llmx.config.axes import layout_of
from llmx.contract import Gradient, Transform
from llmx.data import pairs
from llmx.model import distillation, losses, precision, quantization, quantized, training_loss
from llmx.model.attention import attend
from llmx.model.attention.splash import LANES
from llmx.model.execution import Execution
from llmx.model.families import ModelConfig
from llmx.model.training_loss import TrainingLoss
from llmx.pipeline import staged
from llmx.pipeline import stages as stages_lib
from llmx.pipeline.permutation import IDENTITY, LayerPermutation
from llmx.runtime import compiler_options, divergence, hardware
from llmx.sharding import trees
from llmx.sharding.mesh import kind_of
from llmx.step import gradients, guard, offload, optimizers, quantized_weights, sparse_rows
from llmx.step.step import Recipe, holding, make_update
from llmx.step.transforms import (
    average_ranges,
    delayed_scaling,
    expert_loads,
    loss_scale,
    masks,
    sparse_tables,
)
from llmx.sync import replicas as replicas_lib
from llmx.sync.strategy import STRATEGIES, compressor_of
from llmx.tables import cached
from llmx.tables import tables as tables_lib


def make_recipe(
    config: config_lib.Config, *, devices: Sequence[jax.Device] | AbstractDevice | None = None
) -> Recipe:
    """Shapes, shardings and functions of a run on its mesh; nothing is allocated.

    Args:
      config: resolved, see `checks.resolve`.
      devices: of the mesh; None = all. A kind of device: there are none, and the recipe is for its
        shapes and shardings only.

    Raises ValueError, naming the parameter, where the layout does not fit the model and mesh.
    """
    teacher = starting.teacher_of(config)
    execution = make_execution(config, devices, teacher=teacher)
    mesh = execution.place.mesh
    of_rounded, chunks = _gradient_maker(config, kind_of(mesh))
    of_whole = lambda loss: quantized_weights.trained(of_rounded(loss.of_rounded), loss)  # noqa: E731
    order = IDENTITY if chunks is None else chunks.permutation
    loss = training_loss.make(
        config.model, execution, arrange=order.apply,
        z_loss=config.loss.z_loss, gather=config.sharding.gather,
        of_tokens=losses.OF_TOKENS[config.loss.of_tokens],
        in_host_memory=config.offload.parameters, adapters=config.adapters,
        preferred=config.preference if preference_checks.is_on(config) else None,
        quantized_as=config.quantization, packed=config.packed, teacher=teacher, seed=config.seed,
        transforms=_transforms(config, execution.policy, order),
    )  # fmt: skip
    gradient = sparse_rows.trained(of_whole, loss, config.batch.size)
    gradient = gradients.transformed(gradient, loss.transforms)
    strategy = _make_strategy(config, loss, gradient, of_whole)
    schedule = optimizers.make_schedule(
        config.optimizer, total_steps=config.steps, factors=divergence.boundaries(config.rollback)
    )
    constraints = masks.constraints(
        config.pruning, loss, order, total_steps=config.steps, new_optimizer=strategy.init
    ) | sparse_tables.constraints(
        loss,
        schedule,
        config.optimizer.learning_rate,
        config.seed,
        total_steps=config.steps,
        batch_size=config.batch.size,
    )
    return Recipe(
        model=config.model, loss=loss, gradient=gradient,
        strategy=holding(strategy, constraints), constraints=constraints,
        schedule=schedule, guard=config.guard, clip_norm=config.optimizer.clip_norm,
        ema_decay=config.optimizer.ema_decay,
        batch_shape=(config.batch.size, config.batch.sequence_length),
        accumulation=config.batch.accumulation,
        compiler_options=functools.cache(
            lambda: compiler_options.options(
                config.launch, tuple(mesh.devices.flat), mesh.shape
            )
        ),
        order=order,
    )  # fmt: skip


def _transforms(
    config: config_lib.Config, policy: precision.Policy, order: LayerPermutation
) -> Mapping[str, Transform]:
    """What changes the loss and its gradient, by name."""
    found = dict(loss_scale.transforms(config.loss_scale, policy))
    found |= delayed_scaling.transforms(config.products, config.model)
    found |= average_ranges.transforms(config.quantization, config.model)
    if config.adapters.rank:  # of frozen routers no gradient
        return found
    return found | expert_loads.transforms(
        config.model, config.experts, config.sync.strategy, in_order=order.inverse,
        delayed=config.pipeline.schedule == "pipedream_2bw",
    )  # fmt: skip


def make_execution(
    config: config_lib.Config, devices: Sequence[jax.Device] | AbstractDevice | None = None, *,
    teacher: ModelConfig | None = None,
) -> Execution:  # fmt: skip
    """Where and how a run's model is computed, beside the model of a teacher."""
    mesh = _mesh(config, devices)
    kind = kind_of(mesh)
    # Given devices may be others than those that compute, as for an export or a plan.
    if found := _problems_of_device(config, kind.platform, computes=devices is None):
        raise config_lib.ConfigError(found)
    return Execution(
        place=sharding.Placement(mesh, layout_of(config)), policy=policy_of(config),
        remat=config.remat, offloaded=config.offload.saves, attention=config.attention,
        experts=config.experts,
        # A row of pairs holds two texts.
        packed=config.data.pack or config.data.format == pairs.FORMAT,
        loss_chunks=config.loss.chunks, kv_cache=config.sample.kv_cache,
        tables=_tables(config, mesh), turns=turns_of(config, kind.device_kind),
        distilled=distillation.of(config.distillation, student=config.model, teacher=teacher),
    )  # fmt: skip


def _problems_of_device(
    config: config_lib.Config, platform: str, *, computes: bool
) -> list[str]:  # fmt: skip
    """What devices of a platform do not have. `computes`: whether they also run the step."""
    found = [precision.refusal(config.precision, config.reduce_dtype, platform)]
    if computes:
        found.append(attend.refusal(config.attention.implementation, platform))
    if platform not in ("cpu", "tpu"):
        found.append(checks.rings_in_branches(config))
    return list(filter(None, found))


def _tables(config: config_lib.Config, mesh: Mesh | AbstractMesh) -> tables_lib.Tables | None:
    """Where a batch looks rows up."""
    listed = table_checks.tables_of(config)
    if not listed:
        return None
    features, axes = table_checks.features_of(config), sharding.BATCH_AXES
    if config.tables.cache_rows:
        return cached.make(listed, features, config.tables, mesh, axes=axes, seed=config.seed)
    return tables_lib.make(listed, features, config.tables, mesh, axes=axes)


def policy_of(config: config_lib.Config) -> precision.Policy:
    """In which dtype each number is kept, computed and summed, and what is rounded further."""
    numbers = quantized.make(config.products)
    if inputs := config.quantization.activations:
        numbers = quantized.of_inputs(averaged=inputs == quantization.AVERAGE)
    policy = precision.policy_of(config.precision, config.reduce_dtype)
    return dataclasses.replace(policy, numbers=numbers)


def _mesh(
    config: config_lib.Config, devices: Sequence[jax.Device] | AbstractDevice | None
) -> Mesh | AbstractMesh:
    sizes = {axis: vars(config.mesh)[axis] for axis in sharding.AXES}
    if not isinstance(devices, AbstractDevice):
        return sharding.make_mesh(sizes, devices=devices, across_slices=config.mesh.across_slices)
    types = (AxisType.Explicit,) * len(sizes)
    return AbstractMesh(
        tuple(sizes.values()), tuple(sizes), axis_types=types, abstract_device=devices
    )


# The most groups that `sharding.turns=0` takes, by key of `hardware.CHIPS`, where compiled programs
# show that turns take less time (docs/performance.md). Four on TPU would gain 2% more than two, and
# take twice as long to compile.
MOST_TURNS = dict.fromkeys(("tpu_v4", "tpu_v5e", "tpu_v5p", "tpu_v6e", "tpu7x"), 2) | {
    "h100_sxm": 4, "h200": 4
}  # fmt: skip
# Products of fewer tokens may take longer than what their turns hide.
TOKENS_OF_A_TURN = 4096
# With `tensor` of this size groups of positions gain on TPU; of 4 they lose: keys are read twice.
TENSOR_FOR_POSITIONS = 8


def turns_of(config: config_lib.Config, device_kind: str) -> int:
    """The groups of a resolved config; 0 = as many as take less time on this chip."""
    mesh, batch = config.mesh, config.batch
    chip = hardware.DEVICE_KINDS.get(device_kind, "")
    if config.distillation.of_layers:  # what layers hand out is of all tokens
        return 1
    if config.sharding.turns or mesh.tensor == 1 or chip not in MOST_TURNS:
        return config.sharding.turns or 1
    if config.model.num_experts or config.adapters.dropout:  # loads, noise: of all tokens
        return 1
    if mesh.stage > 1:
        table = utilization.table_of(config)
        if table.splits_backward:  # weight gradients are left for later, one for each product
            return 1
    ways = math.prod(vars(mesh)[axis] for axis in sharding.BATCH_AXES) * batch.accumulation
    rows = batch.size // ways
    tokens = rows * batch.sequence_length // mesh.sequence
    for groups in range(MOST_TURNS[chip], 1, -1):
        if rows % groups == 0 and tokens >= groups * TOKENS_OF_A_TURN:
            return groups
    by_positions = (
        chip.startswith("tpu") and mesh.sequence == 1 and mesh.tensor >= TENSOR_FOR_POSITIONS
        and batch.sequence_length % (2 * math.lcm(mesh.tensor, LANES)) == 0
    )  # fmt: skip
    return 2 if by_positions and tokens >= 2 * TOKENS_OF_A_TURN else 1


def _gradient_maker(
    config: config_lib.Config, device: AbstractDevice
) -> tuple[Callable[[TrainingLoss], Gradient], stages_lib.ModelChunks | None]:
    """How the gradient of a loss is taken, and the layers' chunks on stages, if there are any."""
    on_gpu = device.platform not in ("cpu", "tpu")
    if config.mesh.stage == 1:
        make = functools.partial(
            gradients.whole_batch, accumulation=config.batch.accumulation,
            loop=gradients.hidden_length if on_gpu else gradients.known_length,
        )  # fmt: skip
        return make, None
    table = utilization.table_of(config)
    chunks = stages_lib.cut(config.model.num_blocks, table.stage_of, config.pipeline.layers)
    rows = (config.batch.size, config.batch.sequence_length)
    chip = hardware.chip_of(device.device_kind)
    memory = chip and chip.device_hbm_bytes
    make = functools.partial(
        staged.staged, table=table, chunks=chunks, rows=rows, predict=config.pipeline.predict,
        deferred_layers=stage_memory.deferred_layers(config, memory, on_gpu=on_gpu),
    )  # fmt: skip
    return make, chunks


def updates_by_layer(config: config_lib.Config, *, on_cpu: bool = False) -> bool:
    """Whether an update goes through the layers one after the other.

    On CPU always: so offload, which does nothing there, changes no bit. Eight-bit moments of
    several layers would be in fp32 at one time.
    """
    wanted = config.offload.optimizer or config.offload.parameters or on_cpu
    wanted |= config.optimizer.moments == "int8"
    # Layers of a decoder are stacked.
    return wanted and config.model.is_decoder and STRATEGIES[config.sync.strategy].shared_update


def _make_strategy(
    config: config_lib.Config, loss: TrainingLoss, gradient: Gradient,
    make_gradient: Callable[[TrainingLoss], Gradient],
):  # fmt: skip
    technique = STRATEGIES[config.sync.strategy]
    replicas = replica_gradient = None
    if config.sync.strategy != "mean":
        replicas = replicas_lib.make(
            config.sync, loss.mesh, compressor=compressor_of(config.sync), shapes=loss.params,
            axes=loss.axes, updates=loss.updates,
        )  # fmt: skip
        replica_gradient = gradients.transformed(
            sparse_rows.of_replicas(make_gradient, loss, config.batch.size, replicas_lib.AXES),
            loss.transforms,
        )

    placed_state = in_parts = lambda whole: whole
    if config.offload.optimizer:
        placed_state = functools.partial(offload.in_host_memory, params=loss.params)
    if updates_by_layer(config, on_cpu=kind_of(loss.mesh).platform == "cpu"):
        in_parts = functools.partial(offload.layer_by_layer, stages=config.mesh.stage)

    def inputs_with(head: Any) -> replicas_lib.StrategyInputs:
        optimizer = optimizers.make(
            config.optimizer, axes=loss.axes, splits=loss.updates, total_steps=config.steps,
            head=head, factors=divergence.boundaries(config.rollback),
            param=loss.execution.policy.param, bias_rate=config.experts.bias_rate,
        )  # fmt: skip
        rates = jax.vmap(optimizer.schedule)(jnp.arange(config.steps))
        return replicas_lib.StrategyInputs(
            config=config.sync, replicas=replicas, loss=loss, gradient=gradient,
            replica_gradient=replica_gradient, optimizer=optimizer, with_head=inputs_with,
            optimizer_config=config.optimizer, timetable=technique.timetable(config.sync, rates),
            opt_state=placed_state(
                optimizers.abstract_state(optimizer.whole, loss.params, loss.updates)
            ),
            update=make_update(loss, config.optimizer.ema_decay, in_parts),
            decays=trees.named(optimizers.decay_mask(loss.axes)),
            forget_norms=lambda state: state._replace(guard=guard.forgotten(state.guard)),
            agreed=agreed(config) if config.sync.groups > 1 else {},
        )  # fmt: skip

    return technique.make(inputs_with(None))


# In what groups of replicas that are runs of their own may differ: where and how each computes,
# what it writes, its own text and when it stops. All else must be equal.
_OWN = (
    "workdir", "resume_step", "remat", "memory_budget", "offload.", "batch.accumulation", "data.",
    "mesh.", "sharding.", "attention.", "experts.buffer", "sync.group", "sync.exchange",
    "sync.round_seconds", "guard.", "rollback.", "checkpoint.", "evaluation.", "metrics.",
    "sample.", "profile.", "launch.", "watchdog.",
)  # fmt: skip
_COMMON = ("mesh.stage", "data.format")  # of these sections what must be equal all the same


def agreed(config: config_lib.Config) -> dict[str, Any]:
    """The keys in which groups of replicas, each a run of its own, must be equal."""
    values = identity.flat(config_lib.to_json(config))

    def is_own(key: str) -> bool:
        within = any(key == own or (own[-1] == "." and key.startswith(own)) for own in _OWN)
        return within and key not in _COMMON

    return {key: value for key, value in values.items() if not is_own(key)}

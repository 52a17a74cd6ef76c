"""The train step: one text for every mesh, layout, precision, remat policy and accumulation.

    setup = make_setup(model, execution, optimizer, ...)    shapes, shardings; nothing is allocated
    state = setup.init(seed)                                born split
    step = make_train_step(setup, ...)                      (State, Batch) -> (State, Report)

Train loop, ahead-of-time compilation, planner checks and tests all build the step here. The loss is
a sum over tokens divided once by the token count of the *global* batch, so that unequal documents,
padding, accumulation and splits of any kind give one number. Gradients are clipped by their global
norm; an update with a gradient that is not finite, or that is a spike, is not applied, and the
report names the leaf.

Where replicas agree otherwise than by the mean of their gradients (`llmx.sync`), the step has a
program for each phase of the run.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from llmx import sharding
from llmx.model import apply, execution, families
from llmx.pipeline import ticks
from llmx.step import gradients, guard, optimizers, replicas
from llmx.step import guard as guard_lib
from llmx.step.state import Batch, Pipeline, Report, Setup, Stale, State, placed
from llmx.sync import strategy
from llmx.sync.strategy import Sync


def make_setup(
    config: families.ModelConfig,
    run: execution.Execution,
    optimizer_config: optimizers.OptimizerConfig,
    *,
    total_steps: int,
    pipeline: Pipeline | None = None,
    sync_config: strategy.SyncConfig | None = None,
) -> Setup:
    """Shapes and shardings of a run's state. Nothing is allocated.

    `pipeline`: for a mesh with stages. `sync_config`: how replicas along `data` agree; None = by
    the mean of gradients.

    Raises ValueError, naming the parameter, where the layout does not fit the model and mesh.
    """
    shapes, axes = apply.abstract_parameters(config)
    apart = sync_config is not None and sync_config.strategy != "mean"
    if apart:
        # Replicas are whole, each split over the other axes only.
        layout = run.place.layout.without((strategy.AXIS,), "parameters", "gradients", "optimizer")
        run = dataclasses.replace(run, place=dataclasses.replace(run.place, layout=layout))
    place = run.place
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, run.policy.param), shapes)
    if pipeline is not None:
        shapes["blocks"] = jax.eval_shape(pipeline.chunks.permutation.apply, shapes["blocks"])
    of = {
        table: sharding.shardings(shapes, place.mesh, place.layout, rules=axes, table=table)
        for table in ("parameters", "gradients", "optimizer")
    }
    optimizer = optimizers.make(optimizer_config, axes=axes, total_steps=total_steps)
    whole = NamedSharding(place.mesh, PartitionSpec())
    scalars = jax.eval_shape(lambda: (jnp.zeros((), jnp.int32), guard_lib.init()))
    step, guard = jax.tree.map(lambda leaf: placed(leaf, whole), scalars)
    opt_shapes = jax.eval_shape(optimizer.init, shapes)
    opt_shardings = optimizers.state_shardings(optimizer, shapes, of["optimizer"])
    abstract = State(
        step=step,
        params=jax.tree.map(placed, shapes, of["parameters"]),
        opt_state=jax.tree.map(placed, opt_shapes, opt_shardings),
        ema=jax.tree.map(placed, shapes, of["optimizer"]) if optimizer_config.ema_decay else None,
        guard=guard,
    )
    setup = Setup(
        model=config,
        apply=apply.Apply(config),
        run=run,
        optimizer=optimizer,
        schedule=optimizers.make_schedule(optimizer_config, total_steps=total_steps),
        axes=axes,
        abstract=abstract,
        gradients=of["gradients"],
        updates=of["optimizer"],
        optimizer_config=optimizer_config,
        pipeline=pipeline,
    )
    if apart:
        setup = _with_replicas(setup, sync_config, shapes, total_steps)
    if pipeline is None or not pipeline.table.periodic:
        return setup
    abstract = abstract._replace(stale=gradients.abstract_stale(setup))
    return dataclasses.replace(setup, abstract=abstract)


def _with_replicas(
    setup: Setup, config: strategy.SyncConfig, shapes: Any, total_steps: int
) -> Setup:
    """The setup of a run whose replicas agree in their own way."""
    group = strategy.replicas(
        config, setup.mesh, shapes=shapes, axes=setup.axes, updates=setup.updates
    )
    optimizer, tail, frozen = setup.optimizer, None, None
    of, abstract = setup.optimizer_config, setup.abstract
    if config.strategy == "zero_one":
        optimizer = optimizers.make_zero_one(of, axes=setup.axes, total_steps=total_steps)
        opt_shapes = jax.eval_shape(optimizer.init, shapes)
        to = optimizers.state_shardings(optimizer, shapes, setup.updates)
        abstract = abstract._replace(opt_state=jax.tree.map(placed, opt_shapes, to))
    if group.strategy.agrees_on == strategy.MOMENTUM:
        frozen = optimizers.frozen_adam(of.b1, of.b2, of.eps)
        tail = optimizers.make_tail(of, axes=setup.axes, total_steps=total_steps)
    abstract = abstract._replace(sync=group.abstract(abstract.params, abstract.opt_state))
    if group.strategy.agrees_on == strategy.PARAMETERS:
        abstract = abstract._replace(opt_state=None)
    rates = jax.vmap(setup.schedule)(jnp.arange(total_steps))
    return dataclasses.replace(
        setup, optimizer=optimizer, abstract=abstract, replicas=group, tail=tail, frozen=frozen,
        timetable=strategy.timetable(config, total_steps=total_steps, rates=rates),
    )  # fmt: skip


def make_train_step(
    setup: Setup,
    *,
    phase: str = strategy.MEAN,
    accumulation: int = 1,
    z_loss: float = 0.0,
    clip_norm: float = 0.0,
    guard: guard.GuardConfig | None = None,
    gather: str = "layer",
    compiler_options: Mapping[str, str | bool | int] | None = None,
) -> Callable[[State, Batch], tuple[State, Report]]:
    """The jitted train step; it donates its state.

    Args:
      setup: the model on its mesh.
      phase: one of `setup.timetable.phases`, of replicas that do not agree by the mean.
      accumulation: microbatches per step; must divide the batch of each device. With stages: those
        of the pipeline's table.
      z_loss: factor of log(Z)^2.
      clip_norm: global norm that gradients are scaled down to; 0 = off.
      guard: what to do with bad steps.
      gather: one of `sharding.GATHERS`.
      compiler_options: XLA's, by name.

    Communicates over `data`, `fsdp`, `expert` (gradients; parameters, as the layout says),
    `sequence` (keys and values) and `tensor` (activations).
    """
    guard = guard or guard_lib.GuardConfig()
    options = dict(accumulation=accumulation, z_loss=z_loss, gather=gather)
    take = (_mean_gradient if phase == strategy.MEAN else _own_gradients)(setup, phase, **options)

    def train_step(state: State, batch: Batch) -> tuple[State, Report]:
        with setup.run.policy.products():
            taken = take(state, batch)
        before = state.guard
        if taken.other_norms:
            # What was usual of the mean's norm is not so of the replicas' own.
            first = state.sync.taken == 0
            before = jax.tree.map(
                lambda new, old: jnp.where(first, new, old), guard_lib.forgotten(before), before
            )
        bad_leaf, new_guard = guard_lib.judge(guard, before, taken.squares, taken.norm, taken.loss)
        good, tokens, stale = bad_leaf < 0, taken.tokens, taken.stale
        if stale is not None:
            # A periodic pipeline's first step brings no batch to its end.
            took = functools.partial(jnp.where, tokens > 0)
            good, new_guard = good & (tokens > 0), jax.tree.map(took, new_guard, state.guard)
        accepted = good & ~new_guard.stopped
        new = _advanced(setup, state, taken.clipped(clip_norm), accepted, phase)
        # A stopped run stays at the step that stopped it: resuming takes that batch again, unless
        # it is under way already.
        advance = jnp.where(new_guard.stopped & (stale is None), 0, 1).astype(state.step.dtype)
        after = new.sync
        if after is not None and phase != strategy.MEAN:
            after = after._replace(taken=after.taken + advance)
        report = Report(
            loss=taken.loss,
            z_loss=taken.z,
            tokens=tokens,
            grad_norm=taken.norm,
            learning_rate=jnp.asarray(setup.schedule(state.step), jnp.float32),
            bad_leaf=bad_leaf,
            num_bad=new_guard.num_bad,
            settled_at=jnp.full((), -1, jnp.int32) if after is None else after.settled_at,
        )
        new = new._replace(step=state.step + advance, guard=new_guard, stale=stale, sync=after)
        return new, report

    options = dict(compiler_options) if compiler_options else None
    return jax.jit(train_step, donate_argnums=0, compiler_options=options)


def make_meetings(setup: Setup) -> dict[tuple[int, ...], Callable[[State], State]]:
    """The exchanges of replicas that go on alone, by the fragments that they exchange; see
    `sync.Timetable.fragments_after`."""
    if not setup.alone:
        return {}
    num = setup.timetable.num_fragments
    wanted = {tuple(range(num)), *((f,) for f in range(num))}
    return {each: replicas.make_meeting(setup, each) for each in sorted(wanted)}


def make_eval_step(setup: Setup) -> Callable[[Any, Batch], tuple[jax.Array, jax.Array]]:
    """Jitted (params, batch) -> (sum of losses in nats, number of tokens) of the global batch.

    Stages take the batch in the microbatches of their table.
    """

    def eval_step(params, batch):
        with setup.run.policy.products():
            if setup.pipeline is None:
                loss_BT, _ = setup.apply.losses(params, batch, setup.run)
                loss = jnp.sum(loss_BT * batch["weights"])
            else:
                table = ticks.forwards(setup.pipeline.table)
                made, _ = gradients.run_pipeline(setup, table, [(params, batch)], 0.0, None)
                loss = made.losses[1][0] * jnp.maximum(jnp.sum(batch["weights"]), 1.0)
        return loss, jnp.sum(batch["weights"])

    return jax.jit(eval_step)


class _Taken(NamedTuple):
    """What a step has before its update."""

    loss: jax.Array
    z: jax.Array
    tokens: jax.Array
    gradients: Any  # agreed ones, or of each replica [n, ...]
    squares: jax.Array  # squared norms by leaf
    norm: jax.Array
    norms: jax.Array | None = None  # of replicas that clip their own gradients, [n]
    stale: Stale | None = None
    sync: Sync | None = None  # after an exchange of gradients
    shares: jax.Array | None = None  # of the batch's tokens, which each replica has [n]
    other_norms: bool = False  # norms are of replicas' own gradients

    def clipped(self, clip_norm: float) -> "_Taken":
        """With gradients scaled down to the norm, if they are longer; 0 = as they are."""
        if not clip_norm:
            return self
        if self.norms is not None:
            factors = clip_norm / jnp.maximum(self.norms, clip_norm)
            return self._replace(gradients=replicas.scaled(self.gradients, factors))
        scale = clip_norm / jnp.maximum(self.norm, clip_norm)
        return self._replace(gradients=jax.tree.map(lambda leaf: leaf * scale, self.gradients))


def _mean_gradient(setup: Setup, phase: str, **options) -> Callable[[State, Batch], _Taken]:
    """The gradient of the global batch, the same on all replicas."""
    del phase
    make = gradients.of_batch if setup.pipeline is None else gradients.of_batch_in_stages
    gradient_of = make(setup, **options)

    def take(state: State, batch: Batch) -> _Taken:
        (loss, z), tokens, grads, stale = gradient_of(state.params, batch, state.stale)
        squares = _squares(grads)
        norm = jnp.sqrt(squares.sum())
        return _Taken(loss, z, tokens, grads, squares, norm, stale=stale, sync=state.sync)

    return take


def _own_gradients(setup: Setup, phase: str, **options) -> Callable[[State, Batch], _Taken]:
    """The gradients of replicas that do not sum them, or have exchanged them in their own way."""
    gradients_of = gradients.of_replicas(setup, **options)
    agrees_on = setup.replicas.strategy.agrees_on

    def take(state: State, batch: Batch) -> _Taken:
        params = replicas.own_parameters(setup, state) if setup.alone else state.params
        (losses, zs), tokens, grads = gradients_of(params, batch)
        total = jnp.maximum(tokens.sum(), 1.0)
        shares = tokens / total
        squares, norms = replicas.norms(grads)
        taken = _Taken(
            loss=jnp.sum(losses * shares), z=jnp.sum(zs * shares), tokens=total,
            gradients=grads, squares=squares, norm=jnp.sqrt(squares.sum()), norms=norms,
            sync=state.sync, shares=shares, other_norms=True,
        )  # fmt: skip
        if agrees_on == strategy.PARAMETERS:
            return taken
        grads = replicas.scaled(grads, shares)
        if agrees_on == strategy.MOMENTUM:
            return taken._replace(gradients=grads, norms=None)
        grads, after = replicas.exchanged(setup, grads, state.sync)
        norm = jnp.sqrt(_squares(grads).sum())
        return taken._replace(gradients=grads, norm=norm, norms=None, sync=after, other_norms=False)

    return take


def _squares(tree: Any) -> jax.Array:
    return jnp.stack([
        jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)
    ])  # fmt: skip


def _advanced(setup: Setup, state: State, taken: _Taken, accepted: jax.Array, phase: str) -> State:
    """The state after the update of a phase, or as it was if that is not accepted."""
    keep = lambda new, old: jax.tree.map(  # noqa: E731
        lambda new, old: jnp.where(accepted, new, old), new, old
    )
    grads, before = taken.gradients, state.sync
    if setup.alone:
        agreed = None
        if phase == strategy.MEAN:
            grads = agreed = replicas.for_all(setup, grads)
        elif phase == strategy.VARIANCE:
            agreed = replicas.for_all(
                setup, replicas.summed(setup, replicas.scaled(grads, taken.shares))
            )
        after = replicas.advanced(setup, before, grads, accepted, agreed=agreed, phase=phase)
        state = state._replace(sync=after)
        if phase == strategy.MEAN:
            state = state._replace(params=replicas.own_parameters(setup, state))
        return state
    if phase == strategy.COMPRESSED and setup.frozen is not None:
        before = replicas.frozen(before, state.opt_state[0])
        grads, head, after, extra = replicas.frozen_direction(
            setup, grads, state.opt_state[0], before
        )
        head = keep(head, state.opt_state[0])
        rest = state._replace(opt_state=state.opt_state[1:])
        params, tail, ema = _update(setup, rest, grads, accepted, setup.tail, **extra)
        opt_state = (head, *tail)
    else:
        params, opt_state, ema = _update(setup, state, grads, accepted, setup.optimizer)
        after = taken.sync
    if before is not None:
        after = keep(after, before)
        if phase == strategy.MEAN and setup.replicas.config.warmup_steps < 0:
            after = replicas.settled(setup, state.step, opt_state[0].nu, after)
    return state._replace(params=params, opt_state=opt_state, ema=ema, sync=after)


def _update(setup: Setup, state: State, grads, accepted, optimizer, **extra):
    """Parameters, optimizer state and average after one update, or as they were without it.

    Each device updates the share that the optimizer table gives it: taking the share is free, and
    giving the result back is an all-gather where parameters are kept whole (ZeRO-1 and 2).
    """
    shares = jax.tree.map(jax.sharding.reshard, (grads, state.params), (setup.updates,) * 2)
    to = lambda tree: jax.tree.map(lambda leaf: jax.typeof(leaf).sharding, tree)  # noqa: E731
    decay = setup.optimizer_config.ema_decay

    def update(accepted, grads, params, opt_state, ema, extra):
        keep = lambda new, old: jnp.where(accepted, new, old)  # noqa: E731
        updates, new_opt_state = optimizer.update(grads, opt_state, params, **extra)
        new_params = optax.apply_updates(params, updates)
        new_ema = ema
        if decay:
            new_ema = jax.tree.map(lambda a, p: decay * a + (1 - decay) * p, ema, new_params)
        new = (new_params, new_opt_state, new_ema)
        return jax.tree.map(keep, new, (params, opt_state, ema))

    # The optimizer is plain optax: the compiler places what is inside, we say where it begins and
    # ends.
    params, opt_state, ema = jax.sharding.auto_axes(
        update, out_sharding=(setup.updates, to(state.opt_state), to(state.ema))
    )(accepted, *shares, state.opt_state, state.ema, extra)
    whole = jax.tree.map(lambda leaf: leaf.sharding, setup.abstract.params)
    return jax.tree.map(jax.sharding.reshard, params, whole), opt_state, ema

"""The train step: gradient -> reduce -> check -> update. One text; each technique is a part of
`Recipe`.

    recipe = make_recipe(config)          shapes, shardings, functions; nothing is allocated
    state = recipe.init(seed)             every array born with its sharding
    step = make_train_step(recipe)        (State, Batch) -> (State, Report)

Train loop, ahead-of-time compilation, planner checks and tests all build the step here. The loss is
a sum over tokens divided once by the token count of the *global* batch, so that unequal documents,
padding, accumulation and splits of any kind give one number. Gradients are clipped by their global
norm; an update with a gradient that is not finite, or that is a spike, is not applied, and the
report names the leaf.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from llmx.contract import BY_LAYER, Batch, Constraint, Gradient, State, Strategy, at_step
from llmx.model import adapters, hidden_states, quantization
from llmx.model import apply as apply_lib
from llmx.model.families import ModelConfig
from llmx.model.hidden_states import PROJECTION
from llmx.model.training_loss import TrainingLoss, placed, scaled
from llmx.pipeline.permutation import IDENTITY, LayerPermutation
from llmx.sharding import trees
from llmx.sharding.mesh import within
from llmx.step import guard as guards
from llmx.step import rounding

EVENTS = ("overflowed", "freeze_step")  # in `Report.scalars`


class Report(NamedTuple):
    """Scalars of one step, on the device."""

    loss: jax.Array  # nats per token over the global batch
    z_loss: jax.Array  # what the z-loss adds
    tokens: jax.Array  # predicted tokens in the global batch
    grad_norm: jax.Array  # before clipping
    learning_rate: jax.Array
    bad_leaf: jax.Array  # index of the leaf that made the step bad, -1 = the step is good
    num_bad: jax.Array  # bad steps in a row
    scalars: dict[str, jax.Array]  # what the strategy and the transforms report

    def numbers(self, *, z_loss: bool) -> tuple[dict[str, float], dict[str, list[float]]]:
        """What is shown and recorded of a report on the host: numbers, and numbers of each layer.

        A step that completes no batch (see `pipeline.staged`) has neither a loss nor numbers of
        layers. `z_loss`: whether there is one. Events are left out: they are told when they happen.
        """
        names = ("loss", "grad_norm", "learning_rate") if self.tokens else ("learning_rate",)
        found = {name: float(getattr(self, name)) for name in names}
        found |= {"z_loss": float(self.z_loss)} if z_loss else {}
        of_layers = {
            name.removesuffix(BY_LAYER): values.tolist()
            for name, values in self.scalars.items() if name.endswith(BY_LAYER)
        }  # fmt: skip
        for name, value in self.scalars.items():
            left_out = name.endswith(BY_LAYER) or (name in of_layers and not self.tokens)
            if name not in EVENTS and not left_out:
                found[name] = float(value)
        return found, of_layers if self.tokens else {}


@dataclasses.dataclass(frozen=True, eq=False)
class Recipe:
    """All that a train step is made of; `llmx.config.recipe` makes it from a config."""

    model: ModelConfig
    loss: TrainingLoss  # the model on its mesh
    gradient: Gradient
    strategy: Strategy
    schedule: optax.Schedule  # learning rate by step, from 0
    guard: guards.GuardConfig
    clip_norm: float  # global norm that gradients are scaled down to; 0 = off
    ema_decay: float  # of the average of parameters; 0 = no average
    batch_shape: tuple[int, int]  # (sequences, tokens) of a global batch
    accumulation: int  # microbatches of a step
    compiler_options: Callable[[], Mapping[str, Any]]  # of XLA, by name; tries them on TPU
    order: LayerPermutation = IDENTITY  # in which the state, and so its checkpoints, has the layers
    constraints: Mapping[str, Constraint] = dataclasses.field(default_factory=dict)

    @property
    def mesh(self) -> Mesh:
        return self.loss.mesh

    @functools.cached_property
    def abstract(self) -> State:
        """Shapes with shardings of the state."""
        whole = NamedSharding(self.mesh, PartitionSpec())
        scalars = jax.eval_shape(lambda: (jnp.zeros((), jnp.int32), guards.init()))
        step, guard = jax.tree.map(lambda leaf: placed(leaf, whole), scalars)
        opt_state, sync = self.strategy.abstract
        # An average moves by less than bf16 can tell.
        fp32 = lambda leaf, to: jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=to)  # noqa: E731
        average = jax.tree.map(fp32, self.loss.params, self.loss.updates)
        with within(self.mesh):
            whole_params = self.loss.joined(self.loss.params, self.loss.frozen)
            in_flight = jax.eval_shape(self.gradient.init, whole_params)
        in_flight = jax.tree.map(
            lambda leaf: placed(leaf, NamedSharding(self.mesh, leaf.sharding.spec)), in_flight
        )
        return State(
            step, self.loss.params, opt_state, average if self.ema_decay else (), guard, sync,
            in_flight, self.abstract_extra, self.loss.frozen,
        )  # fmt: skip

    def saved(self, state: State) -> State:
        """What a checkpoint holds of a state: all but a teacher, which is read where it is, and
        what constraints keep elsewhere."""
        state = self._without_teacher(state)
        own = {
            name: each.saved(state.extra[name])
            for name, each in self.constraints.items() if each.saved
        }  # fmt: skip
        return state._replace(extra=dict(state.extra) | own) if own else state

    def _without_teacher(self, state: State) -> State:
        return state if self.loss.teacher is None else state._replace(frozen=())

    @property
    def abstract_extra(self) -> Mapping[str, Any] | tuple:
        """Shapes with shardings of the states of transforms and constraints, by name."""
        own = {name: each.abstract for name, each in self.constraints.items()}
        return dict(self.loss.abstract_extra) | own or ()

    @property
    def abstract_batch(self) -> Batch:
        """Shapes with shardings of a global batch."""
        return self.loss.abstract_batch(self.batch_shape)

    @property
    def leaf_names(self) -> list[str]:
        """Parameter paths in the order of `Report.bad_leaf`."""
        return list(trees.named(self.loss.params))

    def init(self, seed: int) -> State:
        """A new state, every array born with its sharding; without a teacher, see `saved`."""
        abstract = self._without_teacher(self.abstract)

        def make() -> State:
            params = apply_lib.init_parameters(self.model, seed)
            if "blocks" in params:
                params["blocks"] = self.order.apply(params["blocks"])
            if PROJECTION in self.loss.params:
                params[PROJECTION] = hidden_states.init(self.loss.params[PROJECTION], seed)
            params, frozen = self._trained_and_frozen(params, seed)
            opt_state, sync = self.strategy.init(params)
            average = in_dtypes_of(abstract.ema, params) if self.ema_decay else ()
            return State(
                jnp.zeros((), jnp.int32), params, opt_state, average, guards.init(), sync, (),
                dict(self.loss.init_extra()) | self._init_constraints(params) or (), frozen,
            )  # fmt: skip

        to = jax.tree.map(lambda leaf: leaf.sharding, abstract._replace(in_flight=()))
        # Auto axes: the compiler splits the random numbers as the results are split.
        with jax.set_mesh(self.mesh):
            state = jax.jit(jax.sharding.auto_axes(make, out_sharding=to), out_shardings=to)()
        return state._replace(in_flight=self.init_in_flight(state))

    def _trained_and_frozen(self, params: Any, seed: int) -> tuple[Any, Any]:
        """Of new parameters of the model: (what is trained, what is not), in their dtypes."""
        has_own = self.loss.frozen and self.loss.teacher is None
        frozen = in_dtypes_of(self.loss.frozen, params) if has_own else ()
        if not self.loss.adapters.rank:
            trained = quantization.init_steps(self.loss.quantization, params)
            return in_dtypes_of(self.loss.params, trained), frozen
        new = adapters.init(self.loss.adapters, *apply_lib.abstract_parameters(self.model), seed)
        if "blocks" in new:
            new["blocks"] = self.order.apply(new["blocks"])
        return in_dtypes_of(self.loss.params, new), frozen

    def _init_constraints(self, params: Any) -> dict[str, Any]:
        return {name: each.init(params) for name, each in self.constraints.items()}

    def init_constraints(self, state: State) -> State:
        """The state with new constraints, which hold of it."""
        if not self.constraints:
            return state
        to = {name: each.abstract for name, each in self.constraints.items()}
        to = jax.tree.map(lambda leaf: leaf.sharding, to)
        with jax.set_mesh(self.mesh):
            init = jax.sharding.auto_axes(self._init_constraints, out_sharding=to)
            own = jax.jit(init, out_shardings=to)(state.params)
            state = state._replace(extra=dict(state.extra) | own)
            return jax.jit(self.held, donate_argnums=0)(state)

    def begun(self, state: State, batch: Batch) -> State:
        """The state with which a run, new or resumed, takes this batch first; donates it."""
        begin = {name: each.begin for name, each in self.constraints.items() if each.begin}
        if not begin:
            return state

        def of_batch(state: State, batch: Batch) -> State:
            own = {name: each(state, batch) for name, each in begin.items()}
            return state._replace(extra=dict(state.extra) | own)

        with jax.set_mesh(self.mesh):
            return jax.jit(of_batch, donate_argnums=0)(state, batch)

    def refreshed(self, state: State) -> State:
        """The state, whose constraints were changed from outside; they hold of it."""
        own = {name: each.refreshed(state.extra[name]) for name, each in self.constraints.items()}
        return self.held(state._replace(extra=dict(state.extra) | own))

    def held(self, state: State) -> State:
        """The state of which all constraints hold."""
        return _held(self.constraints, state)

    @functools.cached_property
    def between(self) -> Mapping[str, Callable[[State], State]]:
        """Jitted programs of the constraints, by name; each donates its state."""
        return {
            f"{name}/{program}": jax.jit(function, donate_argnums=0)
            for name, each in self.constraints.items()
            for program, function in each.programs.items()
        }

    def between_after(self, step: int) -> tuple[str, ...]:
        """The programs of `between` that run after step number `step`, in their order."""
        return tuple(
            f"{name}/{program}"
            for name, each in self.constraints.items()
            for program in each.due_after(step)
        )

    def init_in_flight(self, state: State) -> Any:
        """What is in flight before the first batch."""
        with jax.set_mesh(self.mesh):
            return jax.jit(self.gradient.init)(self.loss.joined(state.params, state.frozen))

    def trained(self, params: Any) -> Any:
        """Of parameters of the model what is trained: with new scales, where these are learned."""
        to = jax.tree.map(lambda leaf: leaf.sharding, self.loss.params)
        with jax.set_mesh(self.mesh):
            init = functools.partial(quantization.init_steps, self.loss.quantization)
            return jax.jit(jax.sharding.auto_axes(init, out_sharding=to), out_shardings=to)(params)

    def init_sync(self, params: Any) -> tuple[Any, Any]:
        """New (opt_state, sync) of these parameters."""
        to = jax.tree.map(lambda leaf: leaf.sharding, self.strategy.abstract)
        with jax.set_mesh(self.mesh):
            init = jax.sharding.auto_axes(self.strategy.init, out_sharding=to)
            return jax.jit(init, out_shardings=to)(params)


def holding(strategy: Strategy, constraints: Mapping[str, Constraint]) -> Strategy:
    """The strategy with outer steps after which the constraints hold, and, where it takes over what
    other programs share, with a beginning after which they do."""
    if not constraints:
        return strategy

    hold = functools.partial(_held, constraints)

    def held(outer: Callable[[State], State]) -> Callable[[State], State]:
        if strategy.waits:  # it is no program of its own
            after = jax.jit(hold, donate_argnums=0)
            return lambda state: after(outer(state))
        return jax.jit(lambda state: hold(outer(state)), donate_argnums=0)

    def begin(state: State, peers: Any) -> State:
        return jax.jit(hold, donate_argnums=0)(strategy.begin(state, peers))

    outer = {name: held(outer) for name, outer in strategy.outer.items()}
    return strategy._replace(outer=outer, begin=begin if strategy.waits else strategy.begin)


def _held(constraints: Mapping[str, Constraint], state: State) -> State:
    for each in constraints.values():
        state = each.hold(state)
    return state


def in_dtypes_of(like: Any, tree: Any) -> Any:
    """`tree` in the dtypes of `like`, rounded to nearest."""
    return jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), tree, like)


def make_train_step(
    recipe: Recipe, phase: str = "mean"
) -> Callable[[State, Batch], tuple[State, Report]]:
    """The jitted train step of one of `recipe.strategy.phases`; it donates its state.

    Communicates over `data`, `fsdp`, `expert` (gradients; parameters, as the layout says),
    `sequence` (keys and values), `tensor` (activations) and `stage` (activations).
    """
    params_of, gradient, reduce, update = recipe.strategy.phases[phase]
    transforms, constraints = recipe.loss.transforms, recipe.constraints
    read = [name for name, each in constraints.items() if each.reads]

    def train_step(state: State, batch: Batch) -> tuple[State, Report]:
        params = recipe.loss.joined(params_of(state), state.frozen, training=True)
        batch = recipe.loss.prepared(
            batch, state.frozen, step=state.step, accumulation=recipe.accumulation
        )
        of_batch = {name: state.extra[name] for name in (*transforms, *read)} or ()
        found, in_flight = gradient.take(params, batch, state.in_flight, of_batch)
        for name, each in constraints.items():
            found = each.gradients(found, state.extra[name])
        found, sync = reduce(found, state.sync)
        verdict, guard = guards.check(recipe.guard, state.guard, found)
        to_clip = found._replace(factors=clip_factors(found.norms, recipe.clip_norm))
        new = update(to_clip, state, sync, verdict.accepted)
        extra = {
            name: each.after(state.extra[name], found, verdict.accepted)
            for name, each in transforms.items()
        } | {
            name: each.after(state.extra[name], state, found, verdict.accepted)
            for name, each in constraints.items()
        }
        # A stopped run stays at the step that stopped it: resuming takes that batch again, unless
        # it is in flight already.
        stays = guard.stopped & (not jax.tree.leaves(in_flight))
        advance = jnp.where(stays, 0, 1).astype(state.step.dtype)
        scalars = recipe.strategy.scalars(new) | dict(found.reported)
        for name, each in transforms.items():
            scalars = scalars | each.scalars(found, extra[name])
        for name, each in constraints.items():
            scalars = scalars | each.scalars(extra[name])
        report = Report(
            loss=found.loss, z_loss=found.z_loss, tokens=found.tokens, grad_norm=verdict.norm,
            learning_rate=jnp.asarray(recipe.schedule(state.step), jnp.float32),
            bad_leaf=verdict.bad_leaf, num_bad=guard.num_bad, scalars=scalars,
        )  # fmt: skip
        new = new._replace(step=state.step + advance, guard=guard, in_flight=in_flight)
        return recipe.held(new._replace(extra=extra or ())), report

    options = dict(recipe.compiler_options()) or None
    return jax.jit(train_step, donate_argnums=0, compiler_options=options)


def clip_factors(norms: jax.Array, clip_norm: float) -> jax.Array | None:
    """What gradients of these norms are multiplied by, to be no longer than `clip_norm`; None
    where that is 0."""
    return clip_norm / jnp.maximum(norms, clip_norm) if clip_norm else None


def make_update(
    loss: TrainingLoss, ema_decay: float, in_parts: Callable[[Callable], Callable] = lambda f: f
) -> Callable[..., State]:
    """(gradients, State, accepted, optax transformation, factors=None, **extra) -> State after one
    update of parameters, optimizer state and average, or as it was if the update is not accepted.

    Each device updates the share that the optimizer table gives it: taking the share is free, and
    giving the result back is an all-gather where parameters are kept whole (ZeRO-1 and 2).
    Gradients are read up to fp32 and multiplied by `factors`, fp32 [], part by part. `in_parts`:
    from the update of a part, (accepted, gradients, (parameters, optimizer state, average),
    layers=None) -> the three, to that of all: `offload.layer_by_layer`, or as it is.
    """
    stored = rounding.of(loss.execution.policy.param)
    average = lambda a, p: ema_decay * a + (1 - ema_decay) * p.astype(a.dtype)  # noqa: E731

    def update(gradients, state: State, accepted, transformation, factors=None, **extra) -> State:
        gradients, params = jax.tree.map(split_as, (gradients, state.params), (loss.updates,) * 2)
        seed = stored.seed(state.step)
        to = lambda tree: jax.tree.map(lambda leaf: jax.typeof(leaf).sharding, tree)  # noqa: E731

        def apply(accepted, gradients, old, factors, extra, seed, step):
            def one_part(accepted, gradients, old, layers=None):
                params, opt_state, ema = old
                gradients = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), gradients)
                gradients = gradients if factors is None else scaled(gradients, factors)
                updates, new_opt_state = transformation.update(
                    gradients, at_step(opt_state, step), params, layers=layers, **extra
                )
                new_params = stored.add(params, updates, seed, layers)
                new_ema = jax.tree.map(average, ema, new_params) if ema_decay else ema
                new = (new_params, new_opt_state, new_ema)
                return jax.tree.map(lambda new, old: jnp.where(accepted, new, old), new, old)

            return in_parts(one_part)(accepted, gradients, old)

        # The optimizer is plain optax, but for Muon's exchange of matrices: the compiler places
        # what is inside, we say where it begins and ends.
        params, opt_state, ema = jax.sharding.auto_axes(
            apply, out_sharding=(to(params), to(state.opt_state), to(state.ema))
        )(
            accepted,
            gradients,
            (params, state.opt_state, state.ema),
            factors,
            extra,
            seed,
            state.step,
        )
        kept = jax.tree.map(lambda leaf: leaf.sharding, loss.params)
        params = jax.tree.map(split_as, params, kept)
        return state._replace(params=params, opt_state=opt_state, ema=ema)

    return update


def split_as(array: jax.Array, to: NamedSharding) -> jax.Array:
    """An array split as `to`, in the memory in which it is."""
    same = jax.typeof(array).sharding.spec == to.spec
    return array if same else jax.sharding.reshard(array, to)

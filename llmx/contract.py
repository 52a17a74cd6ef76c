"""The types that rooms hand each other: the state of a run, gradients, and what a technique is.

A technique is a value of one of these types, made by the file that it lives in. The train step
(`llmx.step.step`) composes them and asks for none by name. What a technique keeps from step to step
is a NamedTuple of its own inside `State`; `()` means that it keeps nothing.

Letters: B batch, T positions, n replicas along the mesh axis `data`.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

PyTree = Any
BY_LAYER = "_by_layer"  # at the end of a report's name: not a number but one of each layer, [L]
Batch = dict[str, jax.Array]  # tokens, targets, segment_ids, positions int32 [B, T]; weights fp32


class State(NamedTuple):
    """All that a run is: what a checkpoint holds."""

    step: jax.Array  # batches taken, int32 []
    params: PyTree  # nested dict, master dtype
    opt_state: PyTree
    ema: PyTree  # average of params, or ()
    guard: PyTree  # `step.guard.GuardState`
    sync: PyTree  # of the strategy
    in_flight: PyTree  # of the gradient
    extra: PyTree = ()  # of the transforms and constraints, by name; () = there are none
    # parameters that are not trained, weights of products in the compute dtype: those beside
    # adapters, of the reference of preferences, or of a teacher, which no checkpoint holds
    # (`Recipe.saved`); () = there are none
    frozen: PyTree = ()

    @property
    def averaged(self) -> PyTree:
        """What is trained, to evaluate and sample with: its average where the run keeps one."""
        return self.params if self.ema == () else self.ema


class Gradients(NamedTuple):
    """Gradients of one batch, with what the guard, clipping and the report look at."""

    loss: jax.Array  # fp32 [], nats per token of the global batch
    z_loss: jax.Array  # fp32 [], what the z-loss adds
    tokens: jax.Array  # fp32 [], predicted tokens of the global batch; 0: there is no gradient yet
    tree: PyTree  # as the parameters, in the gradient shardings; [n, ...] if one per replica
    # fp32 [leaves], squared norm of each leaf; of replicas the mean, weighted with their squared
    # shares of the tokens
    squares: jax.Array
    norms: jax.Array  # fp32 [], the global norm; [n] where each replica clips its own gradient
    shares: PyTree = ()  # fp32 [n], each replica's share of the tokens, if there is one per replica
    extra: PyTree = ()  # states of the transforms with which the batch was taken
    amax: PyTree = ()  # of the products' operands, `model.quantized.with_ranges`; () = not kept
    # bool []: a transform withdraws the gradient, which then says nothing of the run; None = no
    # transform does so
    dropped: jax.Array | None = None
    # fp32 [], or [n] where each replica clips its own: the update multiplies the tree by them to
    # clip it, in the loop that reads it; None = it is not clipped
    factors: jax.Array | None = None
    reported: PyTree = ()  # what else is reported of the batch, {"accuracy": fp32 []}
    rows: "RowGradients | tuple" = ()  # () = there are no tables


class RowGradients(NamedTuple):
    """Gradients of the rows of sparse tables that a batch has looked up."""

    taken: PyTree  # `tables.tables.Taken`
    tree: PyTree  # by width, fp32, as `taken.rows`
    # Where updates come late: the tables with one that came in this step
    tables: PyTree = ()
    ready: PyTree = ()  # and the rows of the next batch in them, as `taken`


class Gradient(NamedTuple):
    """How a batch's gradient is taken: `step.gradients.whole_batch`, `pipeline.staged.staged`."""

    init: Callable  # params -> in_flight: what is under way before the first batch
    take: Callable  # (params, batch, in_flight, extra) -> (Gradients, in_flight)
    loss: Callable  # (params, batch) -> (sum of nats, number of tokens), for evaluation


class Transform(NamedTuple):
    """A change of what is minimized and of its gradient: `llmx.step.transforms`.

    Its state is in `State.extra` under its name, and so in checkpoints. A batch keeps the state
    with which it was taken, however many steps it is under way.
    """

    init: Callable  # () -> its state: small arrays, whole on all devices
    loss: Callable  # (what is minimized, state) -> what is differentiated, fp32 []
    gradients: Callable  # (Gradients, state with which the batch was taken) -> Gradients
    after: Callable  # (state, Gradients, accepted) -> state of the next step
    # (Gradients, state of the next step) -> {"loss_scale": ...} for the report: fp32 [], or [L] of
    # names that end with BY_LAYER, NaN for layers that have no such number
    scalars: Callable
    resumed: Callable  # state of a checkpoint -> state; its options may have changed since


class Constraint(NamedTuple):
    """What holds of the parameters between steps, as that pruned weights are zero:
    `llmx.step.transforms.masks`.

    Its state is in `State.extra` under its name, and so in checkpoints. Unlike a transform's it may
    be as large as the parameters and split as they are, and no batch carries it.
    """

    abstract: PyTree  # shapes with shardings of its state
    init: Callable  # params -> its state
    gradients: Callable  # (Gradients before replicas reduce them, its state) -> Gradients
    # (its state, State before the update, reduced Gradients, accepted) -> its state
    after: Callable
    hold: Callable  # State -> State of which it holds; after each update and outer step
    refreshed: Callable  # its state, changed from outside -> its state, what it sums up anew
    # By name State -> State between steps, programs of their own, and the names of those that run
    # after a step, which is counted from 0
    programs: Mapping[str, Callable]
    due_after: Callable
    scalars: Callable  # its state -> {"sparsity": ...} for the report, fp32 []
    reads: bool = False  # the gradient of a batch reads its state, beside those of the transforms
    # Where it depends on the devices: the state that was saved, or its arrays by path, and the meta
    # of the checkpoint -> its state, the same object where nothing has to change
    relaid: Callable | None = None
    is_moved: Callable = lambda meta: False  # that meta -> whether numbers are elsewhere here
    # (State, batch) -> its state, before the first batch that a run takes; None = as it is. Where
    # it has something of the batch, as rows that a step before would have looked up
    begin: Callable | None = None
    # Its state -> what a checkpoint holds of it, where the rest is kept elsewhere; `relaid` makes
    # it whole again
    saved: Callable | None = None


class Optimizer(NamedTuple):
    """An optax optimizer. Adam and LAMB are a head, Adam's direction, and a tail behind it."""

    whole: optax.GradientTransformation
    tail: optax.GradientTransformationExtraArgs | None  # None: it has no such parts
    schedule: optax.Schedule  # learning rate by step, from 0


def at_step(opt_state: PyTree, step: jax.Array) -> PyTree:
    """The optimizer's state with its schedules at `step`.

    A schedule goes by steps, those without an update included, so that it ends with the run and its
    rate is the one that is reported. Counters of Adam's bias count updates and stay as they are.
    """
    is_schedule = lambda node: isinstance(node, optax.ScaleByScheduleState)  # noqa: E731

    def one(node):
        if not is_schedule(node):
            return node
        return node._replace(count=jnp.broadcast_to(step, node.count.shape).astype(jnp.int32))

    return jax.tree.map(one, opt_state, is_leaf=is_schedule)


class Phase(NamedTuple):
    """One compiled train step. A strategy has one to three, and one for each step of a ramp."""

    params: Callable  # State -> the parameters to differentiate at
    gradient: Gradient
    reduce: Callable  # (Gradients, sync) -> (Gradients, sync); communicates over `data`
    update: Callable  # (Gradients, State, sync, accepted) -> State


class Timetable(NamedTuple):
    """What runs when; steps are counted from 0.

    phase_of: (step, freeze_step) -> the step's phase. `freeze_step` is -1 until a step has found
      that the variance has settled; it counts from the second step after it, since the report of a
      step is known when the next has begun.
    fragments_after: step -> the model fragments that replicas synchronize after it; () = none.
    """

    total_steps: int
    phase_of: Callable[[int, int], str]
    fragments_after: Callable[[int], tuple[int, ...]] = lambda step: ()
    num_fragments: int = 1

    def phases_from(self, first: int, freeze_step: int = -1) -> tuple[str, ...]:
        """The phases that steps from number `first` on can be in, in the order of their steps."""
        known = (freeze_step, max(freeze_step, first - 2, 0))
        steps = range(first, self.total_steps)
        return tuple(dict.fromkeys(self.phase_of(step, at) for at in known for step in steps))

    @property
    def fragments(self) -> set[tuple[int, ...]]:
        """All that is synchronized together at some step."""
        return {self.fragments_after(step) for step in range(self.total_steps)} - {()}


class Strategy(NamedTuple):
    """How replicas along `data` synchronize: `llmx.sync.strategy.STRATEGIES`."""

    abstract: tuple[PyTree, PyTree]  # shapes with shardings of (State.opt_state, State.sync)
    init: Callable  # params -> (opt_state, sync)
    phases: Mapping[str, Phase]
    timetable: Timetable
    enter: Callable  # (State, previous phase, phase) -> State; on the host, at a change of phase
    outer: Mapping[tuple, Callable]  # model fragments -> (State -> State) between steps; {} = none
    scalars: Callable  # State -> {"freeze_step": ..., "masked": ...} for the report
    reshard: Callable  # (saved sync, how its layers lay) -> sync of these replicas
    # Tensors that are compressed, and bytes of each message of one device that they are fused into.
    messages: tuple[int, tuple[int, ...]] = (0, ())
    # (State, `runtime.agreement.Peers`) -> State; on the host, once, before the first step
    begin: Callable = lambda state, peers: state
    # `outer` is done on the host: it waits for other programs, and may go on from a later step
    waits: bool = False

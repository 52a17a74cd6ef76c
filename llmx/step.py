"""The train step: one text for every mesh, layout, precision, remat policy and accumulation.

    setup = make_setup(model, execution, optimizer, ...)    shapes, shardings; nothing is allocated
    state = setup.init(seed)                                born split
    step = make_train_step(setup, ...)                      (State, Batch) -> (State, Report)

Train loop, ahead-of-time compilation, planner checks and tests all build the step here. The loss is
a sum over tokens divided once by the token count of the *global* batch, so that unequal documents,
padding, accumulation and splits of any kind give one number. Gradients are clipped by their global
norm; an update with a gradient that is not finite, or that is a spike, is not applied, and the
report names the leaf.

Letters: B batch, T positions.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from llmx import dot, executor, families, model, optim, sharding, ticks
from llmx import guard as guard_lib
from llmx.orders import Order
from llmx.parts import Parts
from llmx.pipeline import Table

Batch = dict[str, jax.Array]  # tokens, targets, segment_ids, positions int32 [B, T]; weights fp32

TOKEN_AXES = ("batch", "sequence")  # logical axes of every array of a batch
BATCH_DTYPES = {
    "tokens": "int32",
    "targets": "int32",
    "segment_ids": "int32",
    "positions": "int32",
    "weights": "float32",
}


class State(NamedTuple):
    """All that a run is: what a checkpoint holds."""

    step: jax.Array  # batches taken, int32
    params: Any  # nested dict, master dtype
    opt_state: Any
    ema: Any  # average of params, or None
    guard: guard_lib.Guard
    stale: "Stale | None" = None


class Stale(NamedTuple):
    """What a periodic pipeline leaves of a step for the next: a batch that is still under way.

    A step takes a batch in with the parameters W(t) that it begins with, and brings the one before
    to its end, which went in with W(t-1): W(t+1) = W(t) - update(gradient at W(t-1)).
    """

    params: Any  # with which the batch went in
    batch: dict[str, jax.Array]
    gradients: Any  # so far
    losses: tuple[jax.Array, ...]
    flight: executor.Flight


class Report(NamedTuple):
    """Scalars of one step, on the device."""

    loss: jax.Array  # nats per token over the global batch
    z_loss: jax.Array  # what the z-loss adds
    tokens: jax.Array  # predicted tokens in the global batch
    grad_norm: jax.Array  # before clipping
    learning_rate: jax.Array
    bad_leaf: jax.Array  # index of the leaf that made the step bad, -1 = the step is good
    num_bad: jax.Array  # bad steps in a row


@dataclasses.dataclass(frozen=True, eq=False)
class Pipeline:
    """What the stages of a mesh do: a legal table, and which of its parts has which layers.

    `rows`: (sequences, tokens) of a batch, needed for a periodic table.
    """

    table: Table
    parts: Parts
    rows: tuple[int, int] = (0, 0)


@dataclasses.dataclass(frozen=True, eq=False)
class Setup:
    """A model on a mesh: shapes, shardings and the functions to make and run it."""

    model: families.ModelConfig
    apply: model.Apply
    run: model.Execution
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    axes: Any  # logical axes of the parameters
    abstract: State  # shapes with shardings
    gradients: Any  # shardings of gradients
    updates: Any  # shardings of parameters while they are updated
    ema_decay: float
    pipeline: "Pipeline | None" = None

    @property
    def mesh(self) -> jax.sharding.Mesh:
        return self.run.place.mesh

    @property
    def leaf_names(self) -> list[str]:
        """Parameter paths in the order of `Report.bad_leaf`."""
        paths = jax.tree_util.tree_leaves_with_path(self.abstract.params)
        return [sharding.path_name(path) for path, _ in paths]

    @property
    def order(self) -> Order:
        """In which order the state has the layers: what its checkpoints need to know."""
        if self.pipeline is None or self.pipeline.parts.in_order:
            return ()
        return tuple(self.pipeline.parts.order.tolist())

    @property
    def batch_sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh, self.run.place.activation(TOKEN_AXES))

    def abstract_batch(self, batch_size: int, sequence_length: int) -> Batch:
        """Shapes of a global batch."""
        shape = (batch_size, sequence_length)
        return {
            name: jax.ShapeDtypeStruct(shape, dtype, sharding=self.batch_sharding)
            for name, dtype in BATCH_DTYPES.items()
        }

    def init(self, seed: int) -> State:
        """A new state, every array born with its sharding."""

        def make() -> State:
            params = model.init_parameters(self.model, seed)
            if self.pipeline is not None:
                params["blocks"] = self.pipeline.parts.staged(params["blocks"])
            return State(
                step=jnp.zeros((), jnp.int32),
                params=params,
                opt_state=self.optimizer.init(params),
                ema=params if self.ema_decay else None,
                guard=guard_lib.init(),
            )

        to = jax.tree.map(lambda leaf: leaf.sharding, self.abstract._replace(stale=None))
        # Auto axes: the compiler splits the random numbers as the results are split.
        with jax.set_mesh(self.mesh):
            state = jax.jit(jax.sharding.auto_axes(make, out_sharding=to))()
        return state._replace(stale=self.nothing_under_way())

    def nothing_under_way(self) -> "Stale | None":
        """`State.stale` of a batch without tokens, whose parameters do not matter."""
        if self.abstract.stale is None:
            return None
        with jax.set_mesh(self.mesh):
            return jax.jit(lambda: jax.tree.map(sharding.zeros, self.abstract.stale))()


def make_setup(
    config: families.ModelConfig,
    run: model.Execution,
    optimizer_config: optim.OptimizerConfig,
    *,
    total_steps: int,
    pipeline: Pipeline | None = None,
) -> Setup:
    """Shapes and shardings of a run's state. Nothing is allocated.

    `pipeline`: for a mesh with stages.

    Raises ValueError, naming the parameter, where the layout does not fit the model and mesh.
    """
    shapes, axes = model.abstract_parameters(config)
    place = run.place
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, run.policy.param), shapes)
    if pipeline is not None:
        shapes["blocks"] = jax.eval_shape(pipeline.parts.staged, shapes["blocks"])
    of = {
        table: sharding.shardings(shapes, place.mesh, place.layout, rules=axes, table=table)
        for table in ("parameters", "gradients", "optimizer")
    }
    optimizer = optim.make(optimizer_config, axes=axes, total_steps=total_steps)
    whole = NamedSharding(place.mesh, PartitionSpec())
    scalars = jax.eval_shape(lambda: (jnp.zeros((), jnp.int32), guard_lib.init()))
    step, guard = jax.tree.map(lambda leaf: _placed(leaf, whole), scalars)
    opt_shapes = jax.eval_shape(optimizer.init, shapes)
    opt_shardings = optim.state_shardings(optimizer, shapes, of["optimizer"])
    abstract = State(
        step=step,
        params=jax.tree.map(_placed, shapes, of["parameters"]),
        opt_state=jax.tree.map(_placed, opt_shapes, opt_shardings),
        ema=jax.tree.map(_placed, shapes, of["optimizer"]) if optimizer_config.ema_decay else None,
        guard=guard,
    )
    setup = Setup(
        model=config,
        apply=model.Apply(config),
        run=run,
        optimizer=optimizer,
        schedule=optim.make_schedule(optimizer_config, total_steps=total_steps),
        axes=axes,
        abstract=abstract,
        gradients=of["gradients"],
        updates=of["optimizer"],
        ema_decay=optimizer_config.ema_decay,
        pipeline=pipeline,
    )
    if pipeline is None or not pipeline.table.periodic:
        return setup
    abstract = abstract._replace(stale=_abstract_stale(setup))
    return dataclasses.replace(setup, abstract=abstract)


def make_train_step(
    setup: Setup,
    *,
    accumulation: int = 1,
    z_loss: float = 0.0,
    clip_norm: float = 0.0,
    guard: guard_lib.GuardConfig | None = None,
    gather: str = "layer",
    compiler_options: Mapping[str, str | bool | int] | None = None,
) -> Callable[[State, Batch], tuple[State, Report]]:
    """The jitted train step; it donates its state.

    Args:
      setup: the model on its mesh.
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
    make = _make_gradient if setup.pipeline is None else _make_pipeline_gradient
    gradient_of = make(setup, accumulation=accumulation, z_loss=z_loss, gather=gather)

    def train_step(state: State, batch: Batch) -> tuple[State, Report]:
        with setup.run.policy.products():
            (loss, z), tokens, grads, stale = gradient_of(state, batch)
        squares = jnp.stack([_sum_of_squares(leaf) for leaf in jax.tree.leaves(grads)])
        norm = jnp.sqrt(squares.sum())
        bad_leaf, new_guard = guard_lib.judge(guard, state.guard, squares, norm, loss)
        good = bad_leaf < 0
        if stale is not None:
            # A periodic pipeline's first step brings no batch to its end.
            took = functools.partial(jnp.where, tokens > 0)
            good, new_guard = good & (tokens > 0), jax.tree.map(took, new_guard, state.guard)
        if clip_norm:
            scale = clip_norm / jnp.maximum(norm, clip_norm)
            grads = jax.tree.map(lambda leaf: leaf * scale, grads)
        params, opt_state, ema = _update(setup, state, grads, good & ~new_guard.stopped)
        report = Report(
            loss=loss,
            z_loss=z,
            tokens=tokens,
            grad_norm=norm,
            learning_rate=jnp.asarray(setup.schedule(state.step), jnp.float32),
            bad_leaf=bad_leaf,
            num_bad=new_guard.num_bad,
        )
        # A stopped run stays at the step that stopped it: resuming takes that batch again, unless
        # it is under way already.
        advance = jnp.where(new_guard.stopped & (stale is None), 0, 1).astype(state.step.dtype)
        return State(state.step + advance, params, opt_state, ema, new_guard, stale), report

    options = dict(compiler_options) if compiler_options else None
    return jax.jit(train_step, donate_argnums=0, compiler_options=options)


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
                made, _ = _run_pipeline(setup, table, [(params, batch)], 0.0, None)
                loss = made.losses[1][0] * jnp.maximum(jnp.sum(batch["weights"]), 1.0)
        return loss, jnp.sum(batch["weights"])

    return jax.jit(eval_step)


def _placed(leaf, to: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=to)


def _make_gradient(setup: Setup, *, accumulation: int, z_loss: float, gather: str):
    """(state, batch) -> ((loss, z-loss), tokens, gradients in their sharding, `State.stale`)."""
    sink_types = _sinks(setup, accumulation)

    def loss_of(sinks, params, batch, tokens):
        loss_BT, log_z_BT = setup.apply.losses(params, batch, setup.run, sinks)
        share_BT = batch["weights"] / tokens
        loss = jnp.sum(loss_BT * share_BT)
        z = z_loss * jnp.sum(jnp.square(log_z_BT) * share_BT)
        return loss + z, (loss, z)

    differentiate = jax.grad(loss_of, has_aux=True)

    def gradient_of(state, batch):
        params = state.params
        tokens = jnp.maximum(jnp.sum(batch["weights"]), 1.0)
        sinks = jax.tree.map(sharding.zeros, sink_types)
        if gather == "step":
            params = _gathered(setup, params)
        if accumulation == 1:
            grads, losses = differentiate(sinks, params, batch, tokens)
        else:

            def add(total, microbatch):
                # Each is already divided by the global token count, so microbatches weigh as their
                # tokens do.
                new = differentiate(sinks, params, microbatch, tokens)
                return jax.tree.map(lambda old, one: old + one.astype(old.dtype), total, new), None

            # Our own loop: optax.microbatching compares jax's version as text, takes 0.10 for older
            # than 0.7, and so refuses explicit axes.
            start = jax.tree.map(sharding.empty_sum, sink_types), (jnp.zeros(()), jnp.zeros(()))
            (grads, losses), _ = jax.lax.scan(add, start, _microbatches(batch, accumulation))
        finish = lambda leaf, sink, to: jax.sharding.reshard(leaf.astype(sink.dtype), to)  # noqa: E731
        return losses, tokens, jax.tree.map(finish, grads, sink_types, setup.gradients), None

    return gradient_of


def _make_pipeline_gradient(setup: Setup, *, accumulation: int, z_loss: float, gather: str):
    """What `_make_gradient` makes, by the operations of the pipeline's table."""
    del accumulation  # the table's
    table, (types, sinks) = setup.pipeline.table, _pipeline_sinks(setup)

    def gradient_of(state, batch):
        tokens = lambda batch: jnp.sum(batch["weights"])  # noqa: E731
        whole = lambda params: _gathered(setup, params) if gather == "step" else params  # noqa: E731
        runs, stale = [(whole(state.params), batch)], state.stale
        if stale is None:
            made, _ = _run_pipeline(setup, table, runs, z_loss, sinks)
            _, loss, z = (each[0] for each in made.losses)
            (grads,) = _finished(setup, types, made)
            return (loss, z), jnp.maximum(tokens(batch), 1.0), grads, None
        runs.append((whole(stale.params), stale.batch))
        made, flight = _run_pipeline(setup, table, runs, z_loss, sinks, stale.flight)
        grads, before = _finished(setup, types, made)
        new = Stale(state.params, batch, grads, tuple(each[0] for each in made.losses), flight)
        grads = jax.tree.map(jnp.add, before, stale.gradients)
        pairs = zip(made.losses, stale.losses, strict=True)
        _, loss, z = (each[1] + old for each, old in pairs)
        return (loss, z), tokens(stale.batch), grads, new

    return gradient_of


def _pipeline_sinks(setup: Setup):
    """Types of the gradients of all parameters, and (of the layers, of the others)."""
    types = _sinks(setup, setup.pipeline.table.num_microbatches)
    return types, (types["blocks"], _outside(types))


def _abstract_stale(setup: Setup) -> Stale:
    params, batch = setup.abstract.params, setup.abstract_batch(*setup.pipeline.rows)
    types, sinks = _pipeline_sinks(setup)

    def make(params, batch):
        made, flight = _run_pipeline(
            setup, setup.pipeline.table, [(params, batch)] * 2, 0.0, sinks, executor.Flight
        )
        losses = tuple(each[0] for each in made.losses)
        return Stale(params, batch, _finished(setup, types, made)[0], losses, flight)

    with jax.set_mesh(setup.mesh), setup.run.policy.products():
        shapes = jax.eval_shape(make, params, batch)
    place = lambda leaf: NamedSharding(setup.mesh, leaf.sharding.spec)  # noqa: E731
    return jax.tree.map(lambda leaf: _placed(leaf, place(leaf)), shapes)


def _finished(setup: Setup, types, made: executor.Gradient) -> list:
    """Gradients of this step, and of the step before if there is one, placed as gradients are."""
    ages = made.losses[0].shape[0]
    outer, blocks = _outside(setup.gradients), setup.gradients["blocks"]

    def stacked(leaf, sink, to):
        spec = PartitionSpec(None, *to.spec.partitions)
        return jax.sharding.reshard(leaf.astype(sink.dtype), NamedSharding(to.mesh, spec))

    def staged(leaf, sink, to):
        leaf = jax.sharding.reshard(leaf.astype(sink.dtype), executor.of_stage(to))
        return jnp.reshape(
            leaf,
            (ages, -1, *leaf.shape[1:]),
            out_sharding=PartitionSpec(None, *jax.typeof(leaf).sharding.spec.partitions),
        )

    outer = jax.tree.map(stacked, made.outer, _outside(types), outer)
    blocks = jax.tree.map(staged, made.blocks, types["blocks"], blocks)

    def of(age: int):
        outer_of, blocks_of = jax.tree.map(lambda leaf: leaf[age], (outer, blocks))
        return outer_of | {"blocks": executor.revealed(blocks_of, setup.mesh)}

    return [of(age) for age in range(ages)]


def _run_pipeline(setup: Setup, table: Table, runs: list, z_loss: float, sinks, flight=None):
    """What `executor.run_table` returns for (parameters, batch) of this step, and of the step
    before; losses are all, of the tokens, of z."""
    apply, run, parts = setup.apply, setup.run, setup.pipeline.parts
    inside = dataclasses.replace(run, place=dataclasses.replace(run.place, hidden=executor.STAGE))

    def routed(outer, sinks):
        if sinks is None:
            return outer
        return outer | run.place.routed({name: outer[name] for name in sinks}, sinks)

    def embed(outer, sinks, rows):
        return apply.embedded(routed(outer, sinks), rows["tokens"], rows["positions"], run)

    def beside(rows):
        mask = model.self_mask(rows["segment_ids"], rows["positions"], run)
        return mask, apply.rotations(rows["positions"])

    def part(weights, sinks, x_BTD, beside, kinds):
        mask, rotations = beside
        return apply.through(
            weights, x_BTD, mask, inside, kinds=kinds, sinks=sinks, rotations=rotations
        )[0]

    def losses(outer, sinks, x_BTD, rows):
        loss_BT, log_z_BT = apply.last_losses(routed(outer, sinks), x_BTD, rows["targets"], run)
        loss = jnp.sum(loss_BT * rows["share"])
        z = z_loss * jnp.sum(jnp.square(log_z_BT) * rows["share"])
        return loss + z, loss, z

    tied, learned = setup.model.tied_head, setup.model.positions == "learned"
    pieces = executor.Pieces(
        embed, beside, part, losses,
        embed_names=("embedding", *(["positions"] if learned else [])),
        losses_names=("norm", "embedding" if tied else "head"),
        products=jax.tree.map(
            lambda _, axes: "embed" in axes, setup.abstract.params["blocks"], setup.axes["blocks"]
        ),
    )  # fmt: skip

    def prepared(batch):
        tokens = jnp.maximum(jnp.sum(batch["weights"]), 1.0)
        batch = batch | {"share": batch["weights"] / tokens}
        batch = dict(zip(batch, apply.split_rows(batch.values(), run), strict=True))
        return _microbatches(batch, table.num_microbatches)

    return executor.run_table(
        ticks.program(table), parts, pieces, run.place,
        params=tuple((params["blocks"], _outside(params)) for params, _ in runs),
        batches=tuple(prepared(batch) for _, batch in runs),
        kinds=setup.model.layer_kinds, sinks=sinks, flight=flight,
    )  # fmt: skip


def _gathered(setup: Setup, params):
    """The weights of products whole over the batch axes, in the compute dtype.

    The tables that are looked up stay split: token ids and results travel in their place.
    """

    def one(path, leaf, axes):
        if "embed" not in axes or path[0].key in model.LOOKED_UP:
            return leaf
        return dot.gathered(leaf, setup.run.policy.compute)

    return jax.tree_util.tree_map_with_path(one, params, setup.axes)


def gathered_bytes(setup: Setup) -> int:
    """Bytes per device of the weights that gather="step" keeps whole."""
    with jax.set_mesh(setup.mesh):
        gathered = jax.eval_shape(lambda params: _gathered(setup, params), setup.abstract.params)
    split = jax.tree.map(lambda leaf: leaf.sharding.spec, setup.abstract.params)
    leaves = zip(jax.tree.leaves(gathered), jax.tree.leaves(split), strict=True)
    return sharding.device_bytes([leaf for leaf, to in leaves if leaf.sharding.spec != to])


def _outside(tree: dict) -> dict:
    """What belongs to embedding and head, and not to the layers."""
    return {name: leaf for name, leaf in tree.items() if name != "blocks"}


def _sinks(setup: Setup, accumulation: int):
    """The types of all sinks: see `_sink`."""
    one = functools.partial(_sink, setup, accumulation)
    return jax.tree.map(one, setup.abstract.params, setup.gradients, setup.axes)


def _sink(setup: Setup, accumulation: int, leaf, to: NamedSharding, axes) -> jax.ShapeDtypeStruct:
    """The type in which a parameter's gradient leaves its layer.

    Matrices: in the reduce dtype, summed over the devices at once, behind the next layer's work;
    but over axes that do not split the gradient only after the last microbatch. Norms and biases:
    in fp32, and summed after the last layer, all layers together.
    """
    place, policy = setup.run.place, setup.run.policy
    small = "embed" not in axes
    later = [
        axis
        for axis in sharding.token_axes(place.mesh)
        if axis not in sharding.used_axes(to.spec) and (small or accumulation > 1)
    ]
    return jax.ShapeDtypeStruct(
        leaf.shape,
        leaf.dtype if small else policy.reduce,
        sharding=NamedSharding(place.mesh, sharding.reduced(to.spec, later)),
    )


def _sum_of_squares(leaf: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(leaf.astype(jnp.float32)))


def _microbatches(batch: Batch, num: int) -> Batch:
    """[B, T] as [num, B/num, T], every num-th row together, so that no row leaves its device."""

    def split(array):
        rows, *rest = jax.typeof(array).sharding.spec
        shape = (array.shape[0] // num, num, *array.shape[1:])
        array = jnp.reshape(array, shape, out_sharding=PartitionSpec(rows, None, *rest))
        return jnp.swapaxes(array, 0, 1)

    return jax.tree.map(split, batch)


def _update(setup: Setup, state: State, grads, accepted):
    """Parameters, optimizer state and average after one update, or as they were without it.

    Each device updates the share that the optimizer table gives it: taking the share is free, and
    giving the result back is an all-gather where parameters are kept whole (ZeRO-1 and 2).
    """
    shares = jax.tree.map(jax.sharding.reshard, (grads, state.params), (setup.updates,) * 2)
    opt_to = jax.tree.map(lambda leaf: leaf.sharding, setup.abstract.opt_state)
    ema_to = jax.tree.map(lambda leaf: leaf.sharding, setup.abstract.ema)

    def update(accepted, grads, params, opt_state, ema):
        keep = lambda new, old: jnp.where(accepted, new, old)  # noqa: E731
        updates, new_opt_state = setup.optimizer.update(grads, opt_state, params)
        new_params = optax.apply_updates(params, updates)
        new_ema = ema
        if setup.ema_decay:
            decay = setup.ema_decay
            new_ema = jax.tree.map(lambda a, p: decay * a + (1 - decay) * p, ema, new_params)
        new = (new_params, new_opt_state, new_ema)
        return jax.tree.map(keep, new, (params, opt_state, ema))

    # The optimizer is plain optax: the compiler places what is inside, we say where it begins and
    # ends.
    params, opt_state, ema = jax.sharding.auto_axes(
        update, out_sharding=(setup.updates, opt_to, ema_to)
    )(accepted, *shares, state.opt_state, state.ema)
    to = jax.tree.map(lambda leaf: leaf.sharding, setup.abstract.params)
    return jax.tree.map(jax.sharding.reshard, params, to), opt_state, ema

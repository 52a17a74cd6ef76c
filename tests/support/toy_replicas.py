"""Strategies of `llmx.sync` on a sum of squares in the place of a model: steps in milliseconds."""

import types

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from support.replica_oracle import Problem, Settings

from llmx import sharding
from llmx.contract import Gradient, Gradients, State
from llmx.model.training_loss import scaled, squared_norms
from llmx.runtime.agreement import Peers
from llmx.sharding import trees
from llmx.step import guard, optimizers
from llmx.step.step import clip_factors, make_update
from llmx.sync import replicas as replicas_lib
from llmx.sync.config import SyncConfig
from llmx.sync.replicas import AXES, AXIS
from llmx.sync.strategy import STRATEGIES, compressor_of

# Odd sizes; rows of the matrix are as of tokens: one is seen late, and one never.
SHAPES = {
    "blocks/w": ((3, 5, 7), ("layers", "embed", "mlp")),
    "matrix": ((9, 11), ("vocab", "embed")),
    "norm": ((13,), ("norm",)),
}
LATE, NEVER, SEEN_AT = 7, 8, 20


def problem_of(n: int, seed: int, steps: int) -> Problem:
    random = np.random.default_rng(seed)
    shapes = {name: shape for name, (shape, _) in SHAPES.items()}
    start = {k: 0.1 * random.normal(size=shape) for k, shape in shapes.items()}
    curvature = {k: np.exp(random.normal(size=shape)) for k, shape in shapes.items()}
    away = {k: random.normal(size=shape) for k, shape in shapes.items()}
    noise = lambda shape: random.normal(size=(n, *shape))  # noqa: E731
    centers = [{k: away[k] + noise(shape) for k, shape in shapes.items()} for _ in range(steps)]
    active = [{k: np.ones(shape) for k, shape in shapes.items()} for _ in range(steps)]
    for step, each in enumerate(active):
        each["matrix"][NEVER] = 0
        each["matrix"][LATE] = step >= SEEN_AT
    in_fp32 = lambda tree: {k: np.float32(x).astype("f8") for k, x in tree.items()}  # noqa: E731
    tokens = random.integers(1, 200, size=(steps, n)).astype("f8")
    tokens[:, -1] = 1  # one token of hundreds
    decays = {"blocks/w": True, "matrix": True, "norm": False}
    centers = [in_fp32(each) for each in centers]
    return Problem(in_fp32(start), in_fp32(curvature), centers, active, tokens, decays)


def trained(name: str, problem: Problem, s: Settings, optimizer: str = "adamw", **values):
    """(Parameters after each step, the strategy): what llmx makes of a problem."""
    run = Run(name, problem, s, optimizer, **values)
    found = []
    while run.steps < s.steps:
        run.advance()
        found.append(run.params())
    return found, run.strategy


class Run:
    """A strategy's steps on a problem, of which any number may run side by side in threads.

    first: of the devices. state: on the host, to go on from; None = a new one.
    """

    def __init__(
        self, name: str, problem: Problem, s: Settings, optimizer: str = "adamw", *,
        first: int = 0, state: State | None = None, **values,
    ):  # fmt: skip
        self._problem, self._previous = problem, None
        devices = jax.devices()[first : first + problem.n]
        self._mesh = mesh = sharding.make_mesh({"data": problem.n}, devices=devices)
        config = optimizers.OptimizerConfig(
            name=optimizer, learning_rate=s.rate, schedule="linear", warmup_steps=s.rate_warmup,
            final_fraction=0.1, b1=s.b1, b2=s.b2, eps=s.eps, weight_decay=s.decay, clip_norm=s.clip,
        )  # fmt: skip
        values = (
            dict(warmup_steps=s.warmup, every=s.every, scale=s.scale, fraction=s.fraction) | values
        )
        made = _strategy(name, problem, mesh, config, SyncConfig(name, **values), s.steps)
        self.strategy = made
        whole = NamedSharding(mesh, PartitionSpec())
        params = trees.unnamed({k: jnp.float32(x) for k, x in problem.start.items()}, _like(mesh))
        with jax.set_mesh(mesh):
            to = jax.tree.map(lambda leaf: leaf.sharding, made.abstract)
            params = jax.device_put(params, whole)
            init = jax.sharding.auto_axes(made.init, out_sharding=to)
            opt_state, sync = jax.jit(init, out_shardings=to)(params)
            new = State(jnp.int32(0), params, opt_state, (), guard.init(), sync, ())
            new = new._replace(
                step=jax.device_put(new.step, whole), guard=jax.device_put(new.guard, whole)
            )
            if state is not None:
                new = jax.device_put(state, jax.tree.map(lambda leaf: leaf.sharding, new))
            self.state = made.begin(new, Peers())
        self._steps = {phase: jax.jit(_step(each, config)) for phase, each in made.phases.items()}

    @property
    def steps(self) -> int:
        """That the state has taken."""
        return int(jax.device_get(self.state.step))

    def advance(self):
        number, made = self.steps, self.strategy
        phase = made.timetable.phase_of(number, -1)
        with jax.set_mesh(self._mesh):
            if self._previous not in (None, phase):
                self.state = made.enter(self.state, self._previous, phase)
            batch = _batch(self._problem, number, self._mesh)
            self.state, self._previous = self._steps[phase](self.state, batch), phase
            if fragments := made.timetable.fragments_after(number):
                with jax.transfer_guard("disallow"):  # as in training
                    self.state = made.outer[fragments](self.state)

    def params(self) -> dict:
        return {k: np.asarray(x) for k, x in trees.named(self.state.params).items()}


def _like(mesh) -> dict:
    leaf = lambda shape: jax.ShapeDtypeStruct(  # noqa: E731
        shape, "float32", sharding=NamedSharding(mesh, PartitionSpec(*[None] * len(shape)))
    )
    return {
        "blocks": {"w": leaf(SHAPES["blocks/w"][0])},
        "matrix": leaf(SHAPES["matrix"][0]), "norm": leaf(SHAPES["norm"][0]),
    }  # fmt: skip


def _strategy(name, problem, mesh, config, sync, steps):
    like, technique = _like(mesh), STRATEGIES[name]
    axes = trees.unnamed({k: names for k, (_, names) in SHAPES.items()}, like)
    updates = jax.tree.map(lambda leaf: leaf.sharding, like)
    loss = types.SimpleNamespace(
        params=like, mesh=mesh, updates=updates, axes=axes,
        execution=types.SimpleNamespace(policy=types.SimpleNamespace(param=jnp.dtype("float32"))),
    )  # fmt: skip
    replicas = replicas_lib.make(
        sync, mesh, compressor_of(sync), shapes=like, axes=axes, updates=updates
    )

    def inputs_with(head):
        optimizer = optimizers.make(config, axes=axes, total_steps=steps, head=head)
        rates = jax.vmap(optimizer.schedule)(jnp.arange(steps))
        return replicas_lib.StrategyInputs(
            config=sync, replicas=replicas, loss=loss, gradient=_whole(problem, mesh),
            replica_gradient=_of_replicas(problem, mesh), optimizer=optimizer,
            optimizer_config=config, with_head=inputs_with,
            opt_state=optimizers.abstract_state(optimizer.whole, like, updates),
            update=make_update(loss, 0.0), decays=problem.decays,
            forget_norms=lambda state: state, timetable=technique.timetable(sync, rates),
        )  # fmt: skip

    return technique.make(inputs_with(None))


def _batch(problem: Problem, step: int, mesh) -> dict:
    split = lambda x: jax.device_put(  # noqa: E731
        np.float32(x), NamedSharding(mesh, PartitionSpec(AXIS, *[None] * (np.ndim(x) - 1)))
    )
    tree = trees.unnamed(problem.centers[step], _like(mesh))
    active = trees.unnamed(problem.active[step], _like(mesh))
    active = jax.device_put(jax.tree.map(np.float32, active), NamedSharding(mesh, PartitionSpec()))
    numbers = {"shares": split(problem.shares(step)), "tokens": split(problem.tokens[step])}
    return {"c": jax.tree.map(split, tree), "a": active} | numbers


def _stacked(problem: Problem, mesh, params, batch):
    """Gradients of all replicas, [n, ...]."""
    curvature = trees.unnamed({k: jnp.float32(x) for k, x in problem.curvature.items()}, params)
    stack = lambda leaf: sharding.from_local(mesh, AXES, leaf[None])  # noqa: E731
    one = lambda x, h, c, a: a * h * (stack(x) - c)  # noqa: E731
    return jax.tree.map(one, params, curvature, batch["c"], batch["a"])


def _of_replicas(problem: Problem, mesh) -> Gradient:
    def take(params, batch, in_flight, extra):
        tree, shares = _stacked(problem, mesh, params, batch), batch["shares"]
        squares = [jnp.square(leaf).sum(range(1, leaf.ndim)) for leaf in jax.tree.leaves(tree)]
        norms, zero = jnp.sqrt(sum(squares)), jnp.zeros(())
        return Gradients(zero, zero, batch["tokens"].sum(), tree, zero, norms, shares), in_flight

    return Gradient(lambda params: (), take, None)


def _whole(problem: Problem, mesh) -> Gradient:
    def take(params, batch, in_flight, extra):
        stacked = _stacked(problem, mesh, params, batch)
        tree = jax.tree.map(lambda g: scaled(g, batch["shares"]).sum(0), stacked)
        norm, zero = jnp.sqrt(squared_norms(tree).sum()), jnp.zeros(())
        return Gradients(zero, zero, zero + 1, tree, zero, norm), in_flight

    return Gradient(lambda params: (), take, None)


def _step(phase, config):
    def step(state: State, batch: dict) -> State:
        found, _ = phase.gradient.take(phase.params(state), batch, (), ())
        found, sync = phase.reduce(found, state.sync)
        found = found._replace(factors=clip_factors(found.norms, config.clip_norm))
        new = phase.update(found, state, sync, jnp.bool_(True))
        return new._replace(step=state.step + 1)

    return step

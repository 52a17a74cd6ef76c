"""Local steps: every replica has parameters and an optimizer of its own, and updates itself.

local_sgd (arXiv 1805.09767): every `every` steps all replicas continue from their mean. diloco
(arXiv 2311.08105, 2501.18512): an outer optimizer, SGD with Nesterov momentum, takes the mean of
what the replicas have moved as its gradient; fragments of the model do so at different steps. A
round that the run's end cuts short is averaged, without the outer optimizer: its momentum is sized
for whole rounds.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from llmx import sharding
from llmx.contract import Gradients, Phase, State, Strategy, Timetable, at_step
from llmx.sharding import trees
from llmx.sync import phases, reshard
from llmx.sync.compressors import Compressor, Tensor
from llmx.sync.config import SyncConfig
from llmx.sync.replicas import AXES, AXIS, LOCAL, MEAN, WHOLE, Replicas, StrategyInputs


class Local(NamedTuple):
    """What is kept from step to step."""

    params: Any  # of each replica, [n, ...]
    opt_state: Any  # of each replica, [n, ...]
    outer: dict[str, jax.Array]  # diloco: momentum of the outer optimizer, by parameter name


def make(inputs: StrategyInputs) -> Strategy:
    replicas, config = inputs.replicas, inputs.config
    abstract = Local(
        *of_all_replicas(inputs), replicas.like_parameters() if config.strategy == "diloco" else {}
    )

    def init(params):
        return (), Local(*copies(inputs, params), reshard.zeros(abstract.outer))

    def update(found: Gradients, state: State, sync: Local, accepted: jax.Array) -> State:
        params, opt_state, _ = advanced(inputs, state, phases.clipped(found).tree, accepted)
        return state._replace(sync=sync._replace(params=params, opt_state=opt_state))

    def resharded(saved: Local, layers: reshard.Layers) -> Local:
        return Local(
            reshard.averaged(saved.params, abstract.params, layers),
            reshard.averaged(saved.opt_state, abstract.opt_state, layers),
            reshard.placed(saved.outer, layers),
        )

    return Strategy(
        abstract=((), abstract), init=init, timetable=inputs.timetable,
        phases={MEAN: mean(inputs, update), LOCAL: own_phase(inputs, update)},
        enter=forget_after_mean(inputs),
        outer={each: make_outer_step(inputs, each) for each in sorted(inputs.timetable.fragments)},
        scalars=lambda sync: {}, reshard=resharded,
    )  # fmt: skip


def timetable(config: SyncConfig, rates: Sequence[float]) -> Timetable:
    """Outer steps every `every` steps, of one fragment after the other, and of all at the end."""
    total_steps = len(rates)
    num = num_fragments(config)

    def fragments_after(step: int) -> tuple[int, ...]:
        if step < config.warmup_steps:
            return ()
        if step == total_steps - 1:
            return tuple(range(num))  # the trained model is the one that all share
        apart, done = config.every // num, step + 1 - config.warmup_steps
        return () if done % apart else (done // apart % num,)

    return phases.after_warmup(LOCAL)(config, rates)._replace(
        fragments_after=fragments_after, num_fragments=num
    )


def sends(replicas: Replicas, program: str | tuple[int, ...]) -> tuple[list[Tensor], Compressor]:
    """Nothing in a local step; in an outer step the rows that belong to its fragments."""
    tensors, num = [], num_fragments(replicas.config)
    for tensor in replicas.tensors.values() if isinstance(program, tuple) else ():
        slices = _rows_of(tensor, program, num).values()
        if not tensor.layered:
            tensors += [tensor] * len(slices)
        elif rows := sum(len(range(tensor.rows)[part]) for part in slices):
            tensors.append(dataclasses.replace(tensor, shape=(rows, *tensor.shape[1:])))
    return tensors, replicas.compressor


def num_fragments(config: SyncConfig) -> int:
    return config.fragments if config.strategy == "diloco" else 1


def conflicts(config: Any) -> list[str]:
    """What local steps cannot go with."""
    sync, problems = config.sync, []
    if config.optimizer.ema_decay:
        problems.append(
            f"optimizer.ema_decay={config.optimizer.ema_decay} with sync.strategy="
            f"{sync.strategy!r}: the parameters that all replicas share change only now and then, "
            "and have no average by steps; set it to 0"
        )
    if sync.strategy == "diloco" and sync.every % sync.fragments:
        problems.append(
            f"sync.fragments={sync.fragments} does not divide sync.every={sync.every}: each "
            "fragment is exchanged once in that many steps; use a divisor"
        )
    return [*phases.conflicts(config), *problems]


# -------------------------------------------------------------- replicas with their own parameters


def of_all_replicas(inputs: StrategyInputs) -> tuple[Any, Any]:
    """Shapes with shardings of all replicas' parameters and optimizer states, [n, ...]."""
    return jax.tree.map(inputs.replicas.of_all, (inputs.loss.params, inputs.opt_state))


def copies(inputs: StrategyInputs, params: Any) -> tuple[Any, Any]:
    """Parameters and a new optimizer state for each replica."""
    size = inputs.replicas.size
    own = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (size, *leaf.shape)), params)
    return own, jax.vmap(inputs.optimizer.whole.init)(own)


def own_params(inputs: StrategyInputs) -> Callable[[State], Any]:
    """Each replica's parameters, in its local view."""
    take = lambda leaf: sharding.to_local(inputs.loss.mesh, AXES, leaf)[0]  # noqa: E731
    return lambda state: jax.tree.map(take, state.sync.params)


def for_all(inputs: StrategyInputs, tree: Any) -> Any:
    """[n, ...] of what is the same for all replicas; nothing is sent."""
    copy = lambda leaf: sharding.from_local(inputs.loss.mesh, AXES, leaf[None])  # noqa: E731
    return jax.tree.map(copy, tree)


def own_phase(inputs: StrategyInputs, update: Callable) -> Phase:
    """Each replica updates its own parameters by its own gradient."""
    return Phase(own_params(inputs), inputs.replica_gradient, phases.already_reduced, update)


def mean(inputs: StrategyInputs, update: Callable) -> Phase:
    """Replicas average their gradients, and each updates itself by the mean: all stay equal."""
    own = own_params(inputs)

    def update_all(found: Gradients, state: State, sync: Any, accepted: jax.Array) -> State:
        found = found._replace(tree=for_all(inputs, found.tree))
        state = update(found, state, sync, accepted)
        return state._replace(params=own(state))

    return Phase(phases.shared_params, inputs.gradient, phases.already_reduced, update_all)


def forget_after_mean(inputs: StrategyInputs) -> Callable[[State, str, str], State]:
    """Norms of the mean say nothing of the norms of replicas' own gradients."""
    forget = jax.jit(inputs.forget_norms, donate_argnums=0)
    return lambda state, previous, phase: forget(state) if previous == MEAN else state


def advanced(
    inputs: StrategyInputs, state: State, gradients: Any, accepted: jax.Array, **extra: Any
) -> tuple[Any, Any, Any]:
    """All replicas' parameters and optimizer states after an update by gradients [n, ...], and what
    of minus the updates was rounded off, split as updates are.

    `extra`: arguments of the optimizer's update, [n, ...] too.
    """
    stack = lambda to: to.update(spec=PartitionSpec(AXIS, *to.spec.partitions))  # noqa: E731
    shares = jax.tree.map(stack, inputs.loss.updates)
    abstract_params, abstract_opt_state = of_all_replicas(inputs)
    to = lambda tree: jax.tree.map(lambda leaf: leaf.sharding, tree)  # noqa: E731

    def update(accepted, gradients, params, opt_state, extra, step):
        def one(gradient, params, opt_state, extra):
            opt_state = at_step(opt_state, step)
            updates, new = inputs.optimizer.whole.update(gradient, opt_state, params, **extra)
            after = optax.apply_updates(params, updates)
            lost = jax.tree.map(lambda old, new, u: (new - old) - u, params, after, updates)
            return after, new, lost

        new = jax.vmap(one)(gradients, params, opt_state, extra)
        return phases.keep(accepted, new, (params, opt_state, jax.tree.map(jnp.zeros_like, params)))

    sync = state.sync
    params = jax.tree.map(jax.sharding.reshard, sync.params, shares)
    params, opt_state, lost = jax.sharding.auto_axes(
        update, out_sharding=(shares, to(abstract_opt_state), shares)
    )(accepted, gradients, params, sync.opt_state, extra, state.step)
    return jax.tree.map(jax.sharding.reshard, params, to(abstract_params)), opt_state, lost


# ------------------------------------------------------------------------------------ outer steps


def outer_step(synchronize: Callable[[State], State]) -> Callable[[State], State]:
    """The jitted program between steps, which donates its state; a stopped run stays as it is."""

    @functools.partial(jax.jit, donate_argnums=0)
    def outer_step(state: State) -> State:
        new = synchronize(state)
        keep = lambda new, old: jnp.where(state.guard.stopped, old, new)  # noqa: E731
        params, sync = jax.tree.map(keep, (new.params, new.sync), (state.params, state.sync))
        return state._replace(params=params, sync=sync)

    return outer_step


def as_updated(inputs: StrategyInputs, params: Any, own: Any) -> tuple[dict, dict]:
    """Shared and own parameters by name, split as updates are."""
    stack = lambda to: to.update(spec=PartitionSpec(AXIS, *to.spec.partitions))  # noqa: E731
    updates = inputs.loss.updates
    params = jax.tree.map(jax.sharding.reshard, params, updates)
    own = jax.tree.map(jax.sharding.reshard, own, jax.tree.map(stack, updates))
    return trees.named(params), trees.named(own)


def as_kept(inputs: StrategyInputs, params: dict, own: dict) -> tuple[Any, Any]:
    """The reverse of `as_updated`."""
    like = inputs.loss.params

    def to(tree: Any, wanted: Any) -> Any:
        return jax.tree.map(lambda a, leaf: jax.sharding.reshard(a, leaf.sharding), tree, wanted)

    own_like, _ = of_all_replicas(inputs)
    return to(trees.unnamed(params, like), like), to(trees.unnamed(own, like), own_like)


def make_outer_step(inputs: StrategyInputs, fragments: Sequence[int]) -> Callable[[State], State]:
    """Synchronizes the fragments of all replicas. Communicates over `data`."""
    replicas = inputs.replicas

    def synchronize(state: State) -> State:
        def region(params, own, outer, due):
            own = {name: leaf[0] for name, leaf in own.items()}
            return _averaged(inputs, fragments, params, own, outer, due)

        outer_specs = {name: replicas.specs[name] for name in state.sync.outer}
        specs = (replicas.specs, replicas.stacked_specs, outer_specs)
        params, own = as_updated(inputs, state.params, state.sync.params)
        params, own, outer = replicas.region(region, in_specs=(*specs, WHOLE), out_specs=specs)(
            params, own, state.sync.outer, due_fragment(replicas.config, state.step)
        )
        params, own = as_kept(inputs, params, own)
        return state._replace(params=params, sync=state.sync._replace(params=own, outer=outer))

    return outer_step(synchronize)


def due_fragment(config: SyncConfig, steps: Any) -> Any:
    """The fragment whose round is complete after so many steps; -1 = none."""
    num = num_fragments(config)
    apart, done = config.every // num, steps - config.warmup_steps
    fragment = done // apart % num
    return jnp.where(done % apart == 0, fragment, -1)


def _averaged(inputs, fragments, params, own, outer, due):
    """One device's arrays after the outer step, by name."""
    replicas, config = inputs.replicas, inputs.config
    num = inputs.timetable.num_fragments
    pieces = [
        (name, f, rows)
        for name, tensor in replicas.tensors.items()
        for f, rows in _rows_of(tensor, fragments, num).items()
    ]
    terms = [
        (params[name][rows] - own[name][rows]).astype(jnp.float32) / replicas.size
        for name, _, rows in pieces
    ]
    params, own, outer = dict(params), dict(own), dict(outer)
    for (name, f, rows), moved in zip(pieces, jax.lax.psum(terms, AXIS), strict=True):
        step = moved
        if name in outer:
            nesterov = optax.trace(config.outer_momentum, nesterov=True)
            before = outer[name][rows]
            step, trace = nesterov.update(moved, optax.TraceState(before))
            outer[name] = outer[name].at[rows].set(jnp.where(due == f, trace.trace, before))
            step = jnp.where(due == f, config.outer_learning_rate * step, moved)
        new = (params[name][rows] - step).astype(params[name].dtype)
        params[name] = params[name].at[rows].set(new)
        own[name] = own[name].at[rows].set(new)
    return params, {name: leaf[None] for name, leaf in own.items()}, outer


def _rows_of(tensor: Tensor, fragments: Sequence[int], num: int) -> dict[int, slice]:
    """By fragment, the rows of a shard that belong to it, as a slice of its first dimension.

    Fragment f has every num-th layer from f on (arXiv 2501.18512, strided); the first fragment has
    what is outside the layers.
    """
    if not tensor.layered:
        return {0: slice(None)} if 0 in fragments else {}
    return {f: slice(f, None, num) for f in fragments if f < tensor.rows}

"""Bounded staleness (stale synchronous parallel, Ho et al. 2013), simulated within the step.

Gradients of replicas arrive up to `staleness` steps late. Nothing is hidden or saved by it: it
shows what late gradients do to training. A replica reads its own writes: it takes its gradient
where its gradients that are on their way would move the parameters.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from llmx import sharding
from llmx.contract import Gradients, Phase, State, Strategy, at_step
from llmx.sharding import trees
from llmx.sync import phases, reshard
from llmx.sync import replicas as replicas_lib
from llmx.sync.config import SyncConfig
from llmx.sync.replicas import AXES, AXIS, COMPRESSED, WHOLE, StrategyInputs

# Simulated replicas: log-normal factors of their time for a step, constant ones and of each step.
_SPREAD_OF_REPLICAS, _SPREAD_OF_STEPS = 0.1, 0.3


class Late(NamedTuple):
    """What is kept from step to step."""

    num_steps: jax.Array  # accepted steps since the warm-up, int32 []
    lateness: jax.Array  # by how many steps each replica is behind, fp32 [n]
    late: dict[str, jax.Array]  # shares that arrive 1, 2, ... steps later, [n, s, ...]


def make(inputs: StrategyInputs) -> Strategy:
    replicas, config = inputs.replicas, inputs.config
    late = {
        name: replicas.placed(
            (replicas.size, config.staleness, *replicas.shape(name)),
            PartitionSpec(AXIS, None, *replicas.specs[name].partitions),
        )
        for name in (replicas.tensors if config.staleness else ())
    }
    abstract = Late(
        replicas.placed((), WHOLE, jnp.int32), replicas.placed((replicas.size,), WHOLE), late
    )
    late_specs = jax.tree.map(lambda leaf: leaf.sharding.spec, late)

    def reduce(found: Gradients, sync: Late) -> tuple[Gradients, Late]:
        delay, lateness = delays(config, sync.lateness, sync.num_steps)

        def region(shares, late, delay):
            own = {name: share[0] for name, share in shares.items()}
            if late:
                mine = delay[jax.lax.axis_index(AXIS)]
                own, late = delayed(own, {name: a[0] for name, a in late.items()}, mine)
                late = {name: array[None] for name, array in late.items()}
            return replicas.exchange(own, None)[0], late

        sums, late = replicas.region(
            region, in_specs=(replicas.stacked_specs, late_specs, WHOLE),
            out_specs=(replicas.specs, late_specs),
        )(replicas.shares(found), sync.late, delay)  # fmt: skip
        return replicas_lib.with_sums(found, sums), Late(sync.num_steps + 1, lateness, late)

    def resharded(saved: Late, layers: reshard.Layers) -> Late:
        """The sum of what is late is kept, and split evenly among the new replicas."""

        def waiting(name, like):
            totals = jax.vmap(lambda total: layers.ordered(name, total))(saved.late[name].sum(0))
            # Another staleness: what would come later than that comes at the latest step.
            steps, last = like.shape[1], min(like.shape[1], len(totals)) - 1
            totals = jnp.concatenate([totals[:last], totals[last:].sum(0, keepdims=True)])
            totals = jnp.pad(totals, [(0, steps - last - 1), *[(0, 0)] * (totals.ndim - 1)])
            return jnp.broadcast_to(totals / like.shape[0], like.shape).astype(like.dtype)

        late = {name: waiting(name, like) for name, like in abstract.late.items()}
        return Late(saved.num_steps, jnp.zeros(abstract.lateness.shape), late)

    params = own_views(inputs) if config.staleness else phases.shared_params
    update = phases.updated(inputs)
    own_phases = {COMPRESSED: Phase(params, inputs.replica_gradient, reduce, update)}
    return phases.in_steps(inputs, abstract, own_phases, resharded)


def own_views(inputs: StrategyInputs) -> Callable[[State], Any]:
    """Each replica's parameters as it sees them, in its local view: moved by what the optimizer
    would make of its own gradients that are on their way, beyond what it makes of none. Nothing is
    sent."""
    replicas, updates = inputs.replicas, inputs.loss.updates
    kept = jax.tree.map(lambda leaf: leaf.sharding, inputs.loss.params)
    stack = lambda to: to.update(spec=PartitionSpec(AXIS, *to.spec.partitions))  # noqa: E731

    def moved(waiting, params, opt_state, step):
        opt_state = at_step(opt_state, step)

        def update(gradient):
            return inputs.optimizer.whole.update(gradient, opt_state, params)[0]

        none = update(jax.tree.map(jnp.zeros_like, params))

        def one(own):
            seen = lambda p, u, zero: p + u - zero  # noqa: E731
            return jax.tree.map(seen, params, update(own), none)

        of_replicas = jax.tree.map(lambda leaf: leaf.sum(1), waiting)
        return jax.vmap(one, spmd_axis_name=AXES)(of_replicas)

    def params(state: State) -> Any:
        waiting = trees.unnamed(state.sync.late, state.params)
        split = jax.tree.map(jax.sharding.reshard, state.params, updates)
        own = jax.sharding.auto_axes(moved, out_sharding=jax.tree.map(stack, updates))(
            waiting, split, state.opt_state, state.step
        )
        own = jax.tree.map(lambda a, to: jax.sharding.reshard(a, stack(to)), own, kept)
        mesh = replicas.mesh
        return jax.tree.map(lambda leaf: sharding.to_local(mesh, AXES, leaf)[0], own)

    return params


def delays(config: SyncConfig, lateness: jax.Array, num_steps: jax.Array):
    """By how many steps each replica's gradient comes late, int32 [n], and its lateness after it.

    Replica i takes tau_i(t) times as long for a step as a usual one; its lateness is what has come
    together, never below 0. With a bound s all others wait for a replica that would be more than s
    steps late; asynchronous ones do not wait, and lateness is cut at s, a window that stands for no
    bound. Speeds are a function of replica and step, the same in any run.
    """
    num, key = lateness.shape[0], jax.random.key(20130)
    speed = _SPREAD_OF_REPLICAS * jax.random.normal(jax.random.fold_in(key, 0), (num,))
    now = jax.random.normal(jax.random.fold_in(key, 1 + num_steps), (num,))
    took = jnp.exp(speed + _SPREAD_OF_STEPS * now)
    new = jnp.maximum(lateness + took - 1, 0)
    most = config.staleness + 1 - 1e-3
    if not config.asynchronous:
        new = jnp.maximum(new - jnp.maximum(new.max() - most, 0), 0)
    new = jnp.minimum(new, most)
    return jnp.floor(new).astype(jnp.int32), new


def delayed(shares: dict[str, jax.Array], late: dict[str, jax.Array], delay: jax.Array):
    """What arrives now, and what is left for later, [s, ...]; `delay` is of this replica's shares.

    What arrives, summed over all steps, and what is still on its way is all that was sent.
    """
    arrived, left = {}, {}
    for name, any_share in shares.items():
        share, waiting = any_share.astype(jnp.float32), late[name]
        slots = jnp.arange(waiting.shape[0] + 1).reshape(-1, *(1,) * share.ndim)
        all_ = jnp.concatenate([waiting, jnp.zeros_like(share)[None]])
        all_ = all_ + jnp.where(slots == delay, share, 0)
        arrived[name], left[name] = all_[0], all_[1:]
    return arrived, left

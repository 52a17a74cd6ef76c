"""What the replicas along `data` exchange: in a step, in the place of a sum of gradients, or after
it, when they have gone on alone.

All of it runs in manual regions over the whole mesh, on what each device has of every tensor;
`llmx.sync` says which strategy exchanges what, `llmx.sync.compressors` how.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from llmx import sharding
from llmx.sharding.trees import named, unnamed
from llmx.step import optimizers
from llmx.step.state import Setup, State
from llmx.sync import compressors, strategy
from llmx.sync.strategy import Sync

_WHOLE = PartitionSpec()
_AXES = (strategy.AXIS,)


def norms(gradients: Any) -> tuple[jax.Array, jax.Array]:
    """Of gradients [n, ...]: the mean over replicas of each leaf's squared norm [leaves], and the
    global norm of each replica [n]."""
    squares = jnp.stack([
        jnp.sum(jnp.square(leaf), axis=tuple(range(1, leaf.ndim)))
        for leaf in jax.tree.leaves(gradients)
    ])  # fmt: skip
    return squares.mean(axis=1), jnp.sqrt(squares.sum(axis=0))


def scaled(gradients: Any, factors_n: jax.Array) -> Any:
    """Gradients [n, ...], each replica's times its factor."""

    def one(leaf):
        to = PartitionSpec(strategy.AXIS, *(None,) * (leaf.ndim - 1))
        factors = jnp.reshape(factors_n, (-1, *(1,) * (leaf.ndim - 1)), out_sharding=to)
        return leaf * factors

    return jax.tree.map(one, gradients)


def exchanged(setup: Setup, shares: Any, before: Sync) -> tuple[Any, Sync]:
    """The sum of all replicas' shares of the gradient [n, ...], as the strategy makes it.

    Communicates over `data`, and over the axes that split a replica the sizes of compressed rows.
    """
    replicas, delay, lateness = setup.replicas, jnp.zeros((1,), jnp.int32), None
    if before.lateness is not None:
        delay, lateness = strategy.delays(replicas.config, before.lateness, before.taken)

    def region(shares, kept, late, delay):
        own = {name: share[0] for name, share in shares.items()}
        if late:
            mine = delay[jax.lax.axis_index(strategy.AXIS)]
            own, late = strategy.delayed(own, {name: a[0] for name, a in late.items()}, mine)
            late = {name: array[None] for name, array in late.items()}
        sums, kept = replicas.exchange(own, kept)
        return sums, kept, late

    stacked = {name: replicas.stacked(name) for name in replicas.tensors}
    late_specs = jax.tree.map(lambda leaf: leaf.sharding.spec, setup.abstract.sync.late)
    kept_specs = replicas.kept_specs()
    sums, kept, late = replicas.region(
        region, in_specs=(stacked, kept_specs, late_specs, _WHOLE),
        out_specs=(replicas.specs, kept_specs, late_specs),
    )(named(shares), before.kept, before.late, delay)  # fmt: skip
    return unnamed(sums, shares), before._replace(kept=kept, late=late, lateness=lateness)


def summed(setup: Setup, terms: Any) -> Any:
    """The sum over replicas of terms [n, ...], in full."""
    replicas = setup.replicas
    region = lambda terms: jax.lax.psum({n: a[0] for n, a in terms.items()}, strategy.AXIS)  # noqa: E731
    stacked = {name: replicas.stacked(name) for name in replicas.tensors}
    sums = replicas.region(region, in_specs=(stacked,), out_specs=replicas.specs)(named(terms))
    return unnamed(sums, terms)


def frozen(before: Sync, head: optax.ScaleByAdamState) -> Sync:
    """Of a variance that is frozen: what it has seen, noted in the first step without it, whether
    the update of that step is accepted or not."""
    first = before.taken == 0
    nu = named(head.nu)
    return before._replace(
        updates=jnp.where(first, head.count, before.updates),
        fresh={name: jnp.where(first, nu[name], old) for name, old in before.fresh.items()},
    )


def frozen_direction(
    setup: Setup, shares: Any, head: optax.ScaleByAdamState, before: Sync
) -> tuple[Any, optax.ScaleByAdamState, Sync, dict[str, Any]]:
    """Adam's direction after an exchange of momentum, Adam's state, the strategy's state, and what
    the optimizer's tail wants to know of it.

    `before`: with what `frozen` notes. Communicates as `exchanged` does.
    """
    replicas, config = setup.replicas, setup.optimizer_config

    def region(shares, head, kept, updates):
        own, after = {name: share[0] for name, share in shares.items()}, []

        def agree(terms, live):
            sums, new = replicas.exchange(terms, kept, live)
            after.append(new)
            return sums

        direction, head = setup.frozen.update(
            own, head, agree=agree, frozen_at=updates, num_replicas=replicas.size
        )
        return direction, head, after[0]

    stacked = {name: replicas.stacked(name) for name in replicas.tensors}
    kept_specs = replicas.kept_specs()
    of_head = optax.ScaleByAdamState(_WHOLE, replicas.specs, replicas.specs)
    flat = head._replace(mu=named(head.mu), nu=named(head.nu))
    direction, new, kept = replicas.region(
        region, in_specs=(stacked, of_head, kept_specs, _WHOLE),
        out_specs=(replicas.specs, of_head, kept_specs),
    )(named(shares), flat, before.kept, before.updates)  # fmt: skip
    after, extra = before._replace(kept=kept), {}
    if before.fresh:
        fresh, extra["freshness"] = _freshness(config, flat, new, before)
        extra["freshness"] = unnamed(extra["freshness"], shares)
        after = after._replace(fresh=fresh)
    whole = new._replace(mu=unnamed(new.mu, shares), nu=head.nu)
    return unnamed(direction, shares), whole, after, extra


def _freshness(config: optimizers.OptimizerConfig, old, new, before: Sync):
    """The variance that the exchanged momentum shows, and per layer the largest ratio of the frozen
    standard deviation to it (arXiv 2104.06069, algorithm 1)."""
    b1, b2, eps = config.b1, config.b2, config.eps

    def moved(m, m_before, fresh):
        gradient = (m - b1 * m_before) / (1 - b1)
        return b2 * fresh + (1 - b2) * jnp.square(gradient)

    fresh = {name: moved(new.mu[name], old.mu[name], was) for name, was in before.fresh.items()}

    def ratio(name):
        nu = old.nu[name]
        then = optimizers.denominator(nu, before.updates, b2=b2, eps=eps)
        now = optimizers.denominator(fresh[name], new.count, b2=b2, eps=eps)
        first = 1 if name.startswith("blocks/") else 0
        live = jnp.where(nu > 0, then / now, 0)
        largest = jnp.max(live, axis=tuple(range(first, nu.ndim)))
        return jnp.where(largest > 0, largest, 1.0)

    return fresh, {name: ratio(name) for name in fresh}


def settled(setup: Setup, step: jax.Array, nu: Any, before: Sync) -> Sync:
    """Whether the variance has settled: every 1 / (1 - b2) steps its L1 norm is compared with what
    it was, and is to be within 4% (arXiv 2102.02888, section 7.1), after the learning rate's
    warm-up."""
    config = setup.optimizer_config
    every = max(1, round(1 / (1 - config.b2)))
    norm = sum(jnp.sum(jnp.abs(leaf)) for leaf in jax.tree.leaves(nu))
    due = (step + 1) % every == 0
    ratio = jnp.minimum(norm, before.variance) / jnp.maximum(norm, before.variance)
    found = due & (ratio >= SETTLED) & (step >= config.warmup_steps) & (before.settled_at < 0)
    return before._replace(
        settled_at=jnp.where(found, step, before.settled_at),
        variance=jnp.where(due, norm, before.variance),
    )


SETTLED = 0.96


# ---------------------------------------------------------------------------- replicas on their own


def own_parameters(setup: Setup, state: State) -> Any:
    """Each replica's parameters, hidden."""
    take = lambda leaf: sharding.to_local(setup.mesh, _AXES, leaf)[0]  # noqa: E731
    return jax.tree.map(take, state.sync.params)


def for_all(setup: Setup, tree: Any) -> Any:
    """[n, ...] of what is the same for all replicas; nothing is sent."""
    copy = lambda leaf: sharding.from_local(setup.mesh, _AXES, leaf[None])  # noqa: E731
    return jax.tree.map(copy, tree)


def advanced(
    setup: Setup, before: Sync, gradients: Any, accepted: jax.Array, *, agreed: Any, phase: str
) -> Sync:
    """Every replica after an update by its own gradient [n, ...].

    `agreed`: of zero_one, the gradient [n, ...] that all agree on, which moves the second moment;
    None = it stays.
    """
    stack = lambda to: to.update(spec=PartitionSpec(strategy.AXIS, *to.spec.partitions))  # noqa: E731
    shares = jax.tree.map(stack, setup.updates)
    of = lambda tree: jax.tree.map(lambda leaf: leaf.sharding, tree)  # noqa: E731
    zero_one = setup.replicas.config.strategy == "zero_one"

    def update(accepted, gradients, agreed, params, opt_state):
        def one(gradient, agreed, params, opt_state):
            extra = {"agreed": agreed} if zero_one else {}
            updates, new = setup.optimizer.update(gradient, opt_state, params, **extra)
            return optax.apply_updates(params, updates), new

        new = jax.vmap(one)(gradients, agreed, params, opt_state)
        keep = lambda new, old: jnp.where(accepted, new, old)  # noqa: E731
        return jax.tree.map(keep, new, (params, opt_state))

    params = jax.tree.map(jax.sharding.reshard, before.params, shares)
    params, opt_state = jax.sharding.auto_axes(
        update, out_sharding=(shares, of(setup.abstract.sync.opt_state))
    )(accepted, gradients, agreed, params, before.opt_state)
    params = jax.tree.map(jax.sharding.reshard, params, of(setup.abstract.sync.params))
    after = before._replace(params=params, opt_state=opt_state)
    if zero_one:
        rate = jnp.asarray(setup.schedule(before.updates), jnp.float32)
        count = before.updates + 1
        corrected = 1 - setup.optimizer_config.b1 ** count.astype(jnp.float32)
        rates = before.rates + jnp.stack([rate, rate / corrected])
        # Replicas that agree on every gradient are never apart.
        rates = rates * 0 if phase == strategy.MEAN else rates
        after = after._replace(
            updates=jnp.where(accepted, count, before.updates),
            rates=jnp.where(accepted, rates, before.rates),
        )
    return after


def make_meeting(setup: Setup, fragments: Sequence[int]) -> Callable[[State], State]:
    """The jitted exchange of parameters of replicas that went on alone; it donates its state.

    local_sgd: all replicas go on from their mean. diloco: an outer optimizer, SGD with Nesterov
    momentum, takes the mean of what the replicas have moved as its gradient. zero_one: all go on
    from the sum of what they have moved, exchanged in signs, and with the momentum that this stands
    for. Where the guard has stopped the run nothing changes.

    `fragments`: which parts of the model, see `_rows_of`. Communicates over `data`.
    """
    replicas, config = setup.replicas, setup.replicas.config
    zero_one = config.strategy == "zero_one"
    decays = named(optimizers.decay_mask(setup.axes))
    agree = _zero_one_meeting if zero_one else _mean_meeting

    def meeting(state: State) -> State:
        before = state.sync
        moments = None
        if zero_one:
            head = before.opt_state[0]
            moments = (head.moments, named(head.mu), named(head.nu))

        def region(params, own, outer, kept, moments, rates):
            own = {name: leaf[0] for name, leaf in own.items()}
            return agree(
                setup, fragments, decays, params, own, outer, kept, moments, rates
            )  # fmt: skip

        stacked = {name: replicas.stacked(name) for name in replicas.tensors}
        of_outer = {name: replicas.specs[name] for name in before.outer}
        of_moments = None if moments is None else (PartitionSpec(strategy.AXIS), stacked, stacked)
        kept_specs = replicas.kept_specs()
        shares = lambda tree, tos: jax.tree.map(jax.sharding.reshard, tree, tos)  # noqa: E731
        own_to = jax.tree.map(
            lambda to: to.update(spec=PartitionSpec(strategy.AXIS, *to.spec.partitions)),
            setup.updates,
        )
        params, own, outer, kept, mu = replicas.region(
            region,
            in_specs=(replicas.specs, stacked, of_outer, kept_specs, of_moments, _WHOLE),
            out_specs=(
                replicas.specs, stacked, of_outer, kept_specs,
                None if moments is None else stacked,
            ),
        )(
            named(shares(state.params, setup.updates)), named(shares(before.params, own_to)),
            before.outer, before.kept, moments, before.rates,
        )  # fmt: skip
        after = before._replace(
            outer=outer, kept=kept, rates=before.rates * 0,
            params=_as(unnamed(own, state.params), setup.abstract.sync.params),
        )  # fmt: skip
        if zero_one:
            head = before.opt_state[0]._replace(mu=unnamed(mu, state.params))
            after = after._replace(opt_state=(head, *before.opt_state[1:]))
        new = (_as(unnamed(params, state.params), setup.abstract.params), after)
        keep = lambda new, old: jnp.where(state.guard.stopped, old, new)  # noqa: E731
        params, after = jax.tree.map(keep, new, (state.params, before))
        return state._replace(params=params, sync=after)

    return jax.jit(meeting, donate_argnums=0)


def _as(tree: Any, abstract: Any) -> Any:
    return jax.tree.map(lambda a, like: jax.sharding.reshard(a, like.sharding), tree, abstract)


def _rows_of(each: compressors.Tensor, fragments: Sequence[int], num: int) -> list[slice]:
    """The rows of a shard that belong to these fragments, as slices of its first dimension.

    Fragment f has every num-th layer from f on (arXiv 2501.18512, strided); the first fragment has
    what is outside the layers.
    """
    if not each.layered:
        return [slice(None)] if 0 in fragments else []
    if len(fragments) == num:
        return [slice(None)]
    return [slice(f, None, num) for f in fragments if f < each.rows]


def _mean_meeting(setup, fragments, decays, params, own, outer, kept, moments, rates):
    del decays, moments, rates
    replicas, config = setup.replicas, setup.replicas.config
    diloco = config.strategy == "diloco"
    pieces = {
        (name, i): rows
        for name, each in replicas.tensors.items()
        for i, rows in enumerate(_rows_of(each, fragments, setup.timetable.num_fragments))
    }
    terms = {
        key: (params[key[0]][rows] - own[key[0]][rows]).astype(jnp.float32) / replicas.size
        for key, rows in pieces.items()
    }
    moved = jax.lax.psum(terms, strategy.AXIS)
    params, own, outer = dict(params), dict(own), dict(outer)
    for key, rows in pieces.items():
        name, step = key[0], moved[key]
        if diloco:
            nesterov = optax.trace(config.outer_momentum, nesterov=True)
            step, trace = nesterov.update(step, optax.TraceState(outer[name][rows]))
            outer[name] = outer[name].at[rows].set(trace.trace)
            step = config.outer_learning_rate * step
        new = (params[name][rows] - step).astype(params[name].dtype)
        params[name] = params[name].at[rows].set(new)
        own[name] = own[name].at[rows].set(new)
    return params, _stacked(own), outer, kept, None


def _zero_one_meeting(setup, fragments, decays, params, own, outer, kept, moments, rates):
    del fragments
    replicas, config = setup.replicas, setup.optimizer_config
    count, mu, nu = moments
    live = {name: leaf[0] > 0 for name, leaf in nu.items()}
    # Decay moves all replicas alike: it does not travel.
    bare = {
        name: leaf * (1 - config.weight_decay * rates[0]) if decays[name] else leaf
        for name, leaf in params.items()
    }
    terms = {name: (bare[name] - own[name]) / replicas.size for name in bare}
    moved, kept = replicas.exchange(terms, kept, live)
    new = {
        name: jnp.where(live[name], bare[name] - moved[name], own[name]).astype(leaf.dtype)
        for name, leaf in params.items()
    }

    def momentum(name):
        size = optimizers.denominator(nu[name][0], count[0], b2=config.b2, eps=config.eps)
        agreed = moved[name] * size / jnp.maximum(rates[1], 1e-30)
        # Where no update was accepted since the last exchange, only errors have moved.
        return jnp.where(live[name] & (rates[1] > 0), agreed, mu[name][0])

    return new, _stacked(new), outer, kept, _stacked({name: momentum(name) for name in mu})


def _stacked(tree: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: leaf[None] for name, leaf in tree.items()}

"""1-bit Adam (arXiv 2102.02888) and 1-bit LAMB (arXiv 2104.06069).

After a warm-up of usual steps the variance of Adam is frozen; from then on replicas exchange signs
of the momentum, with error feedback.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from llmx.contract import Gradients, Phase, State, Strategy
from llmx.sharding import trees
from llmx.sync import phases, reshard, sketch
from llmx.sync.compressors import Residuals
from llmx.sync.replicas import COMPRESSED, MEAN, WHOLE, StrategyInputs

SETTLED = 0.96  # ratio of the variance's norms, of two looks, from which on it has settled
# The least that a frozen variance lets Adam divide by, of the root mean square of its row.
_LEAST = 0.1


class OneBit(NamedTuple):
    """What is kept from step to step."""

    freeze_step: jax.Array  # the step that found the variance settled, int32 []; -1 = none yet
    variance: jax.Array  # L1 norm of the second moment when it was last looked at, fp32 []
    num_updates: jax.Array  # updates that the frozen variance has seen, int32 []
    fresh: dict[str, jax.Array]  # LAMB: the variance, as the exchanged momentum shows it
    residuals: Residuals


def make(inputs: StrategyInputs) -> Strategy:
    replicas, config = inputs.replicas, inputs.config
    scalar = lambda dtype: replicas.placed((), WHOLE, dtype)  # noqa: E731
    abstract = OneBit(
        scalar(jnp.int32), scalar(jnp.float32), scalar(jnp.int32),
        replicas.like_parameters() if config.strategy == "one_bit_lamb" else {},
        replicas.abstract_residuals(),
    )  # fmt: skip

    def init(params):
        sync = reshard.zeros(abstract)._replace(freeze_step=jnp.full((), -1, jnp.int32))
        return inputs.optimizer.whole.init(params), sync

    @functools.partial(jax.jit, donate_argnums=0)
    def freeze(state: State) -> State:
        """What the variance has seen is noted before the first step that does not update it."""
        head, sync = state.opt_state[0], state.sync
        nu = trees.named(head.nu)
        fresh = {name: nu[name] + 0 for name in sync.fresh}
        sync = sync._replace(num_updates=head.count + 0, fresh=fresh)
        return state._replace(sync=sync)

    def resharded(saved: OneBit, layers: reshard.Layers) -> OneBit:
        return saved._replace(
            fresh=reshard.placed(saved.fresh, layers),
            residuals=reshard.residuals(saved.residuals, abstract.residuals, layers),
        )

    mean = _watched(inputs) if config.warmup_steps < 0 else phases.mean_phase(inputs)
    shares, update = functools.partial(_shares, inputs), functools.partial(_update, inputs)
    compressed = Phase(phases.shared_params, inputs.replica_gradient, shares, update)
    return Strategy(
        abstract=(inputs.opt_state, abstract), init=init,
        phases={MEAN: mean, COMPRESSED: compressed}, timetable=inputs.timetable,
        enter=lambda state, previous, phase: freeze(state), outer={},
        scalars=lambda state: {
            "freeze_step": state.sync.freeze_step, "masked": masked(state.opt_state[0].nu),
        },
        reshard=resharded, messages=replicas.messages(),
    )  # fmt: skip


def _watched(inputs: StrategyInputs) -> Phase:
    """Usual steps, each of which looks whether the variance has settled."""
    mean = phases.mean_phase(inputs)

    def update(found: Gradients, state: State, sync: OneBit, accepted: jax.Array) -> State:
        new = mean.update(found, state, sync, accepted)
        watched = with_freeze_step(inputs, state.step, new.opt_state[0].nu, new.sync)
        return new._replace(sync=phases.keep(accepted, watched, new.sync))

    return mean._replace(update=update)


def _shares(inputs: StrategyInputs, found: Gradients, sync: OneBit) -> tuple[Gradients, OneBit]:
    """Shares of the gradient; the momentum that they make is exchanged in the update.

    The norm is an estimate of that of their sum, which no device has: one `optimizer.clip_norm`
    serves all strategies and any number of replicas.
    """
    shares = inputs.replicas.shares(found)
    norm = sketch.norm_of_sum(inputs.replicas, shares)
    return found._replace(tree=trees.unnamed(shares, found.tree), norms=norm), sync


def _update(inputs: StrategyInputs, found: Gradients, state: State, sync: OneBit, accepted):
    """The update by an exchange of momentum."""
    head, *tail = state.opt_state
    direction, new_head, new_sync, extra = _exchanged_direction(
        inputs, phases.clipped(found).tree, head, sync
    )
    old = state._replace(opt_state=tuple(tail))
    new = inputs.update(direction, old, accepted, inputs.optimizer.tail, **extra)
    opt_state = (phases.keep(accepted, new_head, head), *new.opt_state)
    return new._replace(opt_state=opt_state, sync=phases.keep(accepted, new_sync, sync))


def conflicts(config: Any) -> list[str]:
    """What these strategies cannot go with."""
    lamb = config.sync.strategy == "one_bit_lamb"
    problems = phases.needs_optimizer(config, "lamb" if lamb else "adamw")
    if config.sync.warmup_steps == 0:
        problems.append(
            f"sync.warmup_steps=0 leaves {config.sync.strategy!r} without a variance to freeze: "
            "use about 15% of the steps, or -1 = until the variance has settled"
        )
    return [*phases.conflicts_of_all(config), *problems]


def denominator(nu, count: jax.Array, *, b2: float, eps: float, least: Any = 0.0) -> jax.Array:
    """What Adam divides by: sqrt(nu / (1 - b2^count)) + eps, the root at least `least`."""
    corrected = nu / (1 - b2 ** jnp.maximum(count, 1).astype(jnp.float32))
    return jnp.maximum(jnp.sqrt(corrected), least) + eps


def least_sizes(nu: dict[str, jax.Array], stacked: dict[str, int], count, b2: float) -> dict:
    """By name, the least root of a second moment that does not move any more: a tenth of the root
    mean square of its layer's and expert's, [L, 1, ...] or [1, ...].

    A token that was seen once in the warm-up has a variance that has all but faded, and one that
    was not seen has none. Where the variance is frozen, it would never grow: the first would move
    by hundreds of learning rates when it comes again, the second not at all. A layer without any
    has the mean of all layers.
    """
    of_rows, everything = {}, jnp.zeros(2)
    for name, each in nu.items():
        inner = tuple(range(stacked[name], each.ndim))
        both = [each.sum(inner, keepdims=True), (each > 0).sum(inner, keepdims=True, dtype="f4")]
        of_rows[name] = both
        everything = everything + jnp.stack([array.sum() for array in both])
    usual = everything[0] / jnp.maximum(everything[1], 1)
    usual = jnp.where(usual > 0, usual, 1.0)
    bias = 1 - b2 ** jnp.maximum(count, 1).astype(jnp.float32)
    mean = lambda total, num: jnp.where(total > 0, total / jnp.maximum(num, 1), usual)  # noqa: E731
    return {name: _LEAST * jnp.sqrt(mean(*both) / bias) for name, both in of_rows.items()}


def masked(nu: Any) -> jax.Array:
    """How many numbers have had no gradient, fp32 []."""
    return sum(jnp.sum(leaf == 0, dtype=jnp.float32) for leaf in jax.tree.leaves(nu))


def frozen_adam(b1: float, b2: float, eps: float) -> optax.GradientTransformationExtraArgs:
    """Adam's direction after its variance was frozen, by an exchange of momentum (1-bit Adam).

    Its state is that of `optax.scale_by_adam`, in which `nu` moves only where it is 0. `update` is
    one replica's, for use in a manual region: it takes the replica's term of the gradient and

      exchange: {terms of the momentum's sum over replicas, coordinates that live} -> the sum;
        of those that do not live, 1 where a replica has a term
      frozen_at: the number of updates that `nu` has seen
      least: see `least_sizes`
      num_replicas: how many there are

    Momentum travels in units of the update, m / (sqrt(nu) + eps): as nu is frozen that is Adam
    with a fixed scale per coordinate, and a compressor that knows one size for many numbers does
    not give those with a small variance the momentum of their neighbours. Coordinates that never
    had a gradient (nu = 0: unused positions, padded vocabulary) have no sign: their momentum stays
    zero until the first gradient comes, with which they get the least variance and live. Bias: nu
    keeps the correction that it had when it was frozen, momentum continues with its own.

    Source: arXiv 2102.02888, algorithm 1.
    """

    def update(terms, state, params=None, *, exchange, frozen_at, least, num_replicas, **extra):
        count = optax.safe_increment(state.count)
        bias = 1 - b2 ** jnp.maximum(frozen_at, 1).astype(jnp.float32)
        size = lambda nu, least: denominator(nu, frozen_at, b2=b2, eps=eps, least=least)  # noqa: E731
        live = jax.tree.map(lambda nu: nu > 0, state.nu)

        def term(g, mu, nu, least):
            return (b1 * mu / num_replicas + (1 - b1) * g.astype(jnp.float32)) / size(nu, least)

        sums = exchange(jax.tree.map(term, terms, state.mu, state.nu, least), live)
        first = lambda u, live, nu, least: jnp.where(~live & (u > 0), bias * least**2, nu)  # noqa: E731
        nu = jax.tree.map(first, sums, live, state.nu, least)
        direction = jax.tree.map(lambda u, live: jnp.where(live, u, 0), sums, live)
        mu = jax.tree.map(lambda u, nu, least: u * size(nu, least), direction, nu, least)
        corrected = 1 - b1 ** count.astype(jnp.float32)
        updates = jax.tree.map(lambda u: u / corrected, direction)
        return updates, state._replace(count=count, mu=mu, nu=nu)

    init = optax.scale_by_adam(b1=b1, b2=b2, eps=eps).init
    return optax.GradientTransformationExtraArgs(init, update)


def _exchanged_direction(
    inputs: StrategyInputs, shares: Any, head: optax.ScaleByAdamState, sync: OneBit
) -> tuple[Any, optax.ScaleByAdamState, OneBit, dict[str, Any]]:
    """Adam's direction after an exchange of momentum, Adam's state, the strategy's state, and what
    the optimizer's tail wants to know of it.

    Communicates over `data`, and over the axes that split a replica the sizes of compressed rows.
    """
    replicas, config = inputs.replicas, inputs.optimizer_config
    adam = frozen_adam(config.b1, config.beta2, config.eps)

    def region(shares, head, residuals, frozen_at, least):
        own, after = {name: share[0] for name, share in shares.items()}, []

        def exchange(terms, live):
            sums, new = replicas.exchange(terms, residuals, live)
            after.append(new)
            return sums

        direction, head = adam.update(
            own, head, exchange=exchange, frozen_at=frozen_at, least=least,
            num_replicas=replicas.size,
        )  # fmt: skip
        return direction, head, after[0]

    specs = replicas.residual_specs()
    head_specs = optax.ScaleByAdamState(WHOLE, replicas.specs, replicas.specs)
    flat = head._replace(mu=trees.named(head.mu), nu=trees.named(head.nu))
    least = least_sizes(flat.nu, replicas.stacked, sync.num_updates, config.beta2)
    direction, new, residuals = replicas.region(
        region,
        in_specs=(replicas.stacked_specs, head_specs, specs, WHOLE, replicas.own_specs),
        out_specs=(replicas.specs, head_specs, specs),
    )(trees.named(shares), flat, sync.residuals, sync.num_updates, least)
    after, extra = sync._replace(residuals=residuals), {}
    if sync.fresh:
        fresh, freshness = _freshness(config, flat, new, sync, least, replicas.stacked)
        extra["freshness"] = trees.unnamed(freshness, shares)
        extra["frozen_at"] = sync.num_updates
        after = after._replace(fresh=fresh)
    whole = new._replace(mu=trees.unnamed(new.mu, shares), nu=trees.unnamed(new.nu, shares))
    return trees.unnamed(direction, shares), whole, after, extra


def _freshness(config: Any, old, new, sync: OneBit, least: dict, stacked: dict[str, int]):
    """The variance that the exchanged momentum shows, and per layer and expert the mean ratio of
    the frozen standard deviation to it.

    The paper takes the largest ratio (arXiv 2104.06069, algorithm 1), with b2 = 0.999. At 0.95 a
    variance is that of 20 steps, in some number of thousands it is always a small part of the
    frozen one, and the factor stays at its limit.
    """
    b1, b2, eps = config.b1, config.beta2, config.eps
    fresh, freshness = {}, {}
    for name, before in sync.fresh.items():
        gradient = (new.mu[name] - b1 * old.mu[name]) / (1 - b1)
        fresh[name] = b2 * before + (1 - b2) * jnp.square(gradient)
        size = functools.partial(denominator, b2=b2, eps=eps, least=least[name])
        then, now = size(old.nu[name], sync.num_updates), size(fresh[name], new.count)
        ratio = jnp.where(old.nu[name] > 0, then / now, 0)
        inner = tuple(range(stacked[name], ratio.ndim))
        mean = ratio.sum(inner) / jnp.maximum((old.nu[name] > 0).sum(inner), 1)
        freshness[name] = jnp.where(mean > 0, mean, 1.0)
    return fresh, freshness


def with_freeze_step(inputs: StrategyInputs, step: jax.Array, nu: Any, sync: OneBit) -> OneBit:
    """Whether the variance has settled: every 1 / (1 - b2) steps its L1 norm is compared with what
    it was, and is to be within 4% (arXiv 2102.02888, section 7.1), after the learning rate's
    warm-up."""
    config = inputs.optimizer_config
    every = max(1, round(1 / (1 - config.beta2)))
    norm = sum(jnp.sum(jnp.abs(leaf)) for leaf in jax.tree.leaves(nu))
    due = (step + 1) % every == 0
    ratio = jnp.minimum(norm, sync.variance) / jnp.maximum(norm, sync.variance)
    found = due & (ratio >= SETTLED) & (step >= config.warmup_steps) & (sync.freeze_step < 0)
    return sync._replace(
        freeze_step=jnp.where(found, step, sync.freeze_step),
        variance=jnp.where(due, norm, sync.variance),
    )

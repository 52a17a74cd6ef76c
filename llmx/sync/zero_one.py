"""0/1 Adam (arXiv 2202.06009): local steps, whose sums are exchanged in signs.

Between exchanges each replica updates itself; an exchange sums what the replicas have moved, in
signs with error feedback, and gives all the momentum that this stands for. The second moment is
updated by gradients that are summed in full, ever more seldom.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from llmx import sharding
from llmx.contract import Gradients, State, Strategy, Timetable
from llmx.sharding import trees
from llmx.sync import local, phases, reshard
from llmx.sync.compressors import COMPRESSORS, Compressor, Residuals, Tensor
from llmx.sync.config import SyncConfig
from llmx.sync.one_bit import denominator, least_sizes, masked
from llmx.sync.replicas import AXES, AXIS, LOCAL, MEAN, VARIANCE, WHOLE, Replicas, StrategyInputs

# Updates of the second moment before the interval between them doubles (arXiv 2202.06009, 6).
_VARIANCE_UPDATES = 16


class ZeroOne(NamedTuple):
    """What is kept from step to step."""

    params: Any  # of each replica, [n, ...]
    opt_state: Any  # of each replica, [n, ...]
    num_updates: jax.Array  # int32 []
    # Sums since the last exchange of learning rates, and of those with the correction of momentum's
    # bias, fp32 [2].
    rates: jax.Array
    residuals: Residuals


def make(inputs: StrategyInputs) -> Strategy:
    replicas, config = inputs.replicas, inputs.optimizer_config
    head = zero_one_adam(config.b1, config.beta2, config.eps, replicas.stacked)
    inputs = inputs.with_head(head)
    abstract = ZeroOne(
        *local.of_all_replicas(inputs), replicas.placed((), WHOLE, jnp.int32),
        replicas.placed((2,), WHOLE), replicas.abstract_residuals(),
    )  # fmt: skip

    def init(params):
        params, opt_state = local.copies(inputs, params)
        return (), reshard.zeros(abstract)._replace(params=params, opt_state=opt_state)

    def resharded(saved: ZeroOne, layers: reshard.Layers) -> ZeroOne:
        return saved._replace(
            params=reshard.averaged(saved.params, abstract.params, layers),
            opt_state=reshard.averaged(saved.opt_state, abstract.opt_state, layers),
            residuals=reshard.residuals(saved.residuals, abstract.residuals, layers),
        )

    makers = {MEAN: local.mean, VARIANCE: local.own_phase, LOCAL: local.own_phase}
    return Strategy(
        abstract=((), abstract), init=init, timetable=inputs.timetable,
        phases={
            phase: make_phase(inputs, functools.partial(_update, inputs, phase))
            for phase, make_phase in makers.items()
        },
        enter=local.forget_after_mean(inputs), outer={(0,): make_exchange(inputs)},
        scalars=lambda state: {"masked": masked(state.sync.opt_state[0].nu) / replicas.size},
        reshard=resharded, messages=replicas.messages(),
    )  # fmt: skip


def timetable(config: SyncConfig, rates: Sequence[float]) -> Timetable:
    """Exchanges in every step until the learning rate `rates` is at its peak, then ever fewer."""
    exchanges, moments = intervals(config, np.asarray(rates, np.float64))
    total_steps = len(rates)

    def phase_of(step: int, freeze_step: int = -1) -> str:
        if step < config.warmup_steps:
            return MEAN
        return VARIANCE if moments[min(step, total_steps - 1)] else LOCAL

    def fragments_after(step: int) -> tuple[int, ...]:
        due = step == total_steps - 1 or exchanges[min(step, total_steps - 1)]
        return (0,) if due and step >= config.warmup_steps else ()

    return Timetable(total_steps, phase_of, fragments_after)


def intervals(config: SyncConfig, rates: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The steps with an exchange, and with an update of the second moment, as bool [steps].

    Every step until the learning rate is at its peak; then the interval doubles whenever the rate
    has halved. The interval between updates of the second moment doubles after every 16, and they
    end with the first step that has no exchange.
    """
    exchanges, moments = np.zeros(len(rates), bool), np.zeros(len(rates), bool)
    peak = int(rates.argmax())
    halvings = np.floor(np.log2(rates[peak] / np.maximum(rates, 1e-30)) + 1e-9)
    intervals = np.minimum(2.0 ** np.minimum(halvings, 30), config.every).astype(int)
    intervals[: peak + 1] = 1
    intervals = np.maximum.accumulate(np.maximum(intervals, 1))
    begun = max(config.warmup_steps, 0)
    last, next_moment, num_moments = begun - 1, begun, 0
    for step in range(begun, len(rates)):
        if step - last < intervals[step]:
            continue
        last, exchanges[step] = step, True
        if intervals[step] == 1 and step >= next_moment:
            moments[step] = True
            num_moments += 1
            next_moment = step + 2 ** (num_moments // _VARIANCE_UPDATES)
    return exchanges, moments


def sends(replicas: Replicas, program: str | tuple[int, ...]) -> tuple[list[Tensor], Compressor]:
    """Gradients in full for the second moment, signs in an outer step, else nothing."""
    if program == LOCAL:
        return [], replicas.compressor
    compressor = COMPRESSORS["mean"] if program == VARIANCE else replicas.compressor
    return list(replicas.tensors.values()), compressor


def conflicts(config: Any) -> list[str]:
    """What this strategy cannot go with."""
    return [*local.conflicts(config), *phases.needs_optimizer(config, "adamw")]


class ZeroOneState(NamedTuple):
    """Adam's state, but the second moment is not updated by every update."""

    count: jax.Array  # updates
    moments: jax.Array  # updates of nu
    mu: Any
    nu: Any


def zero_one_adam(
    b1: float, b2: float, eps: float, stacked: dict[str, int]
) -> optax.GradientTransformationExtraArgs:
    """Adam's direction in local steps (0/1 Adam).

    `update` takes `shared`, the gradient that all replicas have in common, or None: the second
    moment then stays as it is. `alone`, bool []: replicas go on by themselves, and second moments
    are at least those of `one_bit.least_sizes`: coordinates that had no shared gradient yet move by
    their own.

    Source: arXiv 2202.06009, algorithm 1.
    """

    def init(params):
        zeros = lambda: jax.tree.map(lambda p: jnp.zeros_like(p, dtype=jnp.float32), params)  # noqa: E731
        zero = jnp.zeros((), jnp.int32)
        return ZeroOneState(zero, zero, zeros(), zeros())

    def update(grads, state, params=None, *, shared, alone, **extra):
        count, moments, nu = optax.safe_increment(state.count), state.moments, state.nu
        if shared is not None:
            moments = optax.safe_increment(moments)
            nu = jax.tree.map(lambda g, v: (1 - b2) * g * g + b2 * v, shared, nu)
        mu = jax.tree.map(lambda g, m: (1 - b1) * g + b1 * m, grads, state.mu)
        corrected = 1 - b1 ** count.astype(jnp.float32)

        least = trees.unnamed(least_sizes(trees.named(nu), stacked, moments, b2), nu)

        def direction(m, v, least):
            least = jnp.where(alone, least, 0)
            return m / corrected / denominator(v, moments, b2=b2, eps=eps, least=least)

        updates = jax.tree.map(direction, mu, nu, least)
        return updates, ZeroOneState(count, moments, mu, nu)

    return optax.GradientTransformationExtraArgs(init, update)


def _update(inputs: StrategyInputs, phase: str, found: Gradients, state, sync: ZeroOne, accepted):
    """The update of every replica by its own gradient [n, ...]; the second moment moves by the
    gradient that all share."""
    found, shared = phases.clipped(found), None
    if phase == MEAN:
        shared = found.tree
    elif phase == VARIANCE:
        shared = local.for_all(inputs, inputs.replicas.summed(found))
    rate = jnp.asarray(inputs.optimizer.schedule(state.step), jnp.float32)
    count = sync.num_updates + 1
    corrected = 1 - inputs.optimizer_config.b1 ** count.astype(jnp.float32)
    rates = sync.rates + jnp.stack([rate, rate / corrected])
    # Replicas that share every gradient are never apart.
    rates = rates * 0 if phase == MEAN else rates
    alone = local.for_all(inputs, jnp.bool_(phase != MEAN))
    params, opt_state, lost = local.advanced(
        inputs, state, found.tree, accepted, shared=shared, alone=alone
    )
    residuals = sync.residuals
    if phase != MEAN:
        size, nu = inputs.replicas.size, trees.named(opt_state[0].nu)
        lost = {
            name: jnp.where(nu[name] > 0, each / size, 0)
            for name, each in trees.named(lost).items()
        }
        residuals = with_lost(residuals, lost)
    sync = sync._replace(
        params=params, opt_state=opt_state,
        num_updates=jnp.where(accepted, count, sync.num_updates),
        rates=jnp.where(accepted, rates, sync.rates), residuals=residuals,
    )  # fmt: skip
    return state._replace(sync=sync)


def make_exchange(inputs: StrategyInputs) -> Callable[[State], State]:
    """All replicas continue from the sum of what they have moved, exchanged in signs, and with the
    momentum that it stands for. Communicates over `data`."""
    replicas = inputs.replicas

    def synchronize(state: State) -> State:
        sync, head = state.sync, state.sync.opt_state[0]

        def region(params, residuals, moments, rates, least, *trees):
            own, mu, nu = ({name: a[0] for name, a in tree.items()} for tree in trees)
            return _exchanged(inputs, params, residuals, (moments[0], rates, least), own, mu, nu)

        stacked, specs = replicas.stacked_specs, replicas.residual_specs()
        params, own = local.as_updated(inputs, state.params, sync.params)
        mu, nu = trees.named(head.mu), trees.named(head.nu)
        first = jax.tree.map(lambda leaf: sharding.to_local(inputs.loss.mesh, AXES, leaf)[0], nu)
        least = least_sizes(
            first, replicas.stacked, jnp.max(head.moments), inputs.optimizer_config.beta2
        )
        params, own, residuals, mu, nu = replicas.region(
            region,
            in_specs=(
                replicas.specs, specs, PartitionSpec(AXIS), WHOLE, replicas.own_specs,
                stacked, stacked, stacked,
            ),
            out_specs=(replicas.specs, stacked, specs, stacked, stacked),
        )(params, sync.residuals, head.moments, sync.rates, least, own, mu, nu)  # fmt: skip
        params, own = local.as_kept(inputs, params, own)
        head = head._replace(mu=trees.unnamed(mu, state.params), nu=trees.unnamed(nu, state.params))
        sync = sync._replace(
            params=own, opt_state=(head, *sync.opt_state[1:]), rates=sync.rates * 0,
            residuals=residuals,
        )  # fmt: skip
        return state._replace(params=params, sync=sync)

    return local.outer_step(synchronize)


def _exchanged(inputs, params, residuals, sizes, own, mu, nu):
    """One device's arrays after the exchange, by name. `sizes`: updates of the second moment, sums
    of rates, the least second moments."""
    replicas, config, (count, rates, least) = inputs.replicas, inputs.optimizer_config, sizes
    live = {name: leaf > 0 for name, leaf in nu.items()}
    # Decay moves all replicas alike: it does not travel.
    bare = {
        name: leaf * (1 - config.weight_decay * rates[0]) if inputs.decays[name] else leaf
        for name, leaf in params.items()
    }
    # Where no gradient was there is no momentum, and what differs is rounding of the decay.
    terms = {
        name: jnp.where(live[name] | (mu[name] != 0), (bare[name] - own[name]) / replicas.size, 0)
        for name in bare
    }
    sums, residuals = replicas.exchange(terms, residuals, live)
    moved = {name: jnp.where(live[name], sums[name], 0) for name in sums}
    new = {name: (bare[name] - moved[name]).astype(leaf.dtype) for name, leaf in params.items()}
    # What rounding leaves out of the parameters is moved the next time.
    lost = {name: (moved[name] - (bare[name] - new[name])) / replicas.size for name in new}
    residuals = with_lost(residuals, lost)
    bias = 1 - config.beta2 ** jnp.maximum(count, 1).astype(jnp.float32)

    def momentum(name):
        size = denominator(
            nu[name], count, b2=config.beta2, eps=config.eps, least=least[name]
        )  # fmt: skip
        shared = moved[name] * size / jnp.maximum(rates[1], 1e-30)
        # Where no update was accepted since the last exchange, only errors have moved.
        return jnp.where(live[name] & (rates[1] > 0), shared, mu[name])[None]

    def variance(name):
        there = ~live[name] & (sums[name] > 0)
        return jnp.where(there, bias * least[name] ** 2, nu[name])[None]

    stacked = {name: leaf[None] for name, leaf in new.items()}
    return (
        new, stacked, residuals, {name: momentum(name) for name in mu},
        {name: variance(name) for name in nu},
    )  # fmt: skip


def with_lost(residuals: Residuals, lost: dict[str, jax.Array]) -> Residuals:
    """With what rounding left out of what a replica has moved, half a unit of its parameters' last
    place at most: where the learning rate is small, that is all of a step."""
    errors = {
        name: error + lost[name].reshape(error.shape) for name, error in residuals.errors.items()
    }
    return residuals._replace(errors=errors)

"""Updates that would do harm are not applied: gradients that are not finite, and spikes.

A pair of pure functions of a small state that lives with the run's, so that a resumed run judges as
an undisturbed one.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from llmx.contract import Gradients
from llmx.runtime.bounds import bounded, choice

# The running mean of gradient norms: trusted from the first number on, and halved at the second.
_FEWEST, _MOST = 10, 100


@dataclasses.dataclass
class GuardConfig:
    """What happens to an update that would do harm."""

    # "stop" | "skip", when a gradient is not finite or a spike
    on_bad_step: str = choice("stop", ("stop", "skip"))
    # a spike: gradient norm above this times its running mean; 0 = off
    spike_factor: float = bounded(0.0, above=1, unless=0, remedy="0 to switch it off")
    # with "skip": stop after this many skipped steps in a row
    patience: int = bounded(20, at_least=1, needs={"guard.on_bad_step": ("skip",)})


class GuardState(NamedTuple):
    """What the step remembers to tell a spike, and to stay where it stopped."""

    sum_norms: jax.Array  # of recent good steps, fp32
    num_norms: jax.Array  # how many are in it, int32
    num_bad: jax.Array  # bad steps in a row, int32
    stopped: jax.Array  # bool: no update is applied any more


def init() -> GuardState:
    """Nothing seen yet."""
    zero = jnp.zeros((), jnp.int32)
    return GuardState(jnp.zeros((), jnp.float32), zero, zero, jnp.zeros((), bool))


class Verdict(NamedTuple):
    """What the guard says of one step."""

    accepted: jax.Array  # bool: the update is applied
    bad_leaf: jax.Array  # int32: the leaf that makes the step bad; -1 = the step is good
    norm: jax.Array  # fp32: the gradient norm that was looked at


def check(config: GuardConfig, state: GuardState, found: Gradients) -> tuple[Verdict, GuardState]:
    """Judges the gradients of a step.

    The leaf that makes a step bad is the first that is not finite, or the largest one in a spike.
    Gradients of no tokens, and those that a transform withdraws, are not applied, and leave the
    state as it was.
    """
    # Of replicas with a norm each: the root of the mean square, weighted with their squared shares
    # of the tokens, as in the squared norm of a sum of independent terms.
    norm = jnp.sqrt(found.squares.sum()) if found.norms.ndim else found.norms
    finite = jnp.isfinite(found.squares)
    broken = ~(finite.all() & jnp.isfinite(found.loss))
    bad = broken
    if config.spike_factor:
        usual = state.sum_norms / jnp.maximum(state.num_norms, 1)
        bad |= (state.num_norms >= _FEWEST) & (norm > config.spike_factor * usual)
    if found.dropped is not None:
        bad &= ~found.dropped
    culprit = jnp.where(broken, jnp.argmin(finite), jnp.argmax(found.squares)).astype(jnp.int32)
    num_bad = jnp.where(bad, state.num_bad + 1, 0)
    limit = 1 if config.on_bad_step == "stop" else config.patience
    # The mean forgets: when full, its past counts half.
    full = state.num_norms >= _MOST
    sum_norms = jnp.where(full, state.sum_norms / 2, state.sum_norms) + norm
    num_norms = jnp.where(full, state.num_norms // 2, state.num_norms) + 1
    new = GuardState(
        sum_norms=jnp.where(bad, state.sum_norms, sum_norms),
        num_norms=jnp.where(bad, state.num_norms, num_norms),
        num_bad=num_bad,
        stopped=state.stopped | (num_bad >= limit),
    )
    there = found.tokens != 0  # NaN is bad, not absent
    if found.dropped is not None:
        there &= ~found.dropped
    new = jax.tree.map(lambda new, old: jnp.where(there, new, old), new, state)
    accepted = there & ~bad & ~new.stopped
    return Verdict(accepted, jnp.where(bad, culprit, -1), norm), new


def forgotten(state: GuardState) -> GuardState:
    """The state that no longer knows which norms are usual."""
    return state._replace(sum_norms=state.sum_norms * 0, num_norms=state.num_norms * 0)


def released(state: GuardState) -> GuardState:
    """The state with which a stopped run continues; it still knows which norms are usual."""
    return state._replace(num_bad=state.num_bad * 0, stopped=state.stopped & False)

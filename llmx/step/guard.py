"""Updates that would do harm are not applied: gradients that are not finite, and spikes.

A pair of pure functions of a small state that lives with the run's, so that a resumed run judges as
an undisturbed one.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

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
    patience: int = bounded(20, at_least=1)


class Guard(NamedTuple):
    """What the step remembers to tell a spike, and to stay where it stopped."""

    sum_norms: jax.Array  # of recent good steps, fp32
    num_norms: jax.Array  # how many are in it, int32
    num_bad: jax.Array  # bad steps in a row, int32
    stopped: jax.Array  # bool: no update is applied any more


def init() -> Guard:
    """Nothing seen yet."""
    zero = jnp.zeros((), jnp.int32)
    return Guard(jnp.zeros((), jnp.float32), zero, zero, jnp.zeros((), bool))


def judge(
    config: GuardConfig, guard: Guard, squares: jax.Array, norm: jax.Array, loss: jax.Array
) -> tuple[jax.Array, Guard]:
    """The leaf that makes this step bad, and what is remembered of it.

    Args:
      config: the policy.
      guard: the state.
      squares: squared norm of each gradient leaf, fp32 [leaves].
      norm: the global gradient norm.
      loss: the step's loss.

    Returns (index of the first leaf that is not finite, or of the largest one in a spike; -1 if the
    step is good, the new state).
    """
    finite = jnp.isfinite(squares)
    broken = ~(finite.all() & jnp.isfinite(loss))
    bad = broken
    if config.spike_factor:
        usual = guard.sum_norms / jnp.maximum(guard.num_norms, 1)
        bad |= (guard.num_norms >= _FEWEST) & (norm > config.spike_factor * usual)
    culprit = jnp.where(broken, jnp.argmin(finite), jnp.argmax(squares)).astype(jnp.int32)
    num_bad = jnp.where(bad, guard.num_bad + 1, 0)
    limit = 1 if config.on_bad_step == "stop" else config.patience
    # The mean forgets: when full, its past counts half.
    full = guard.num_norms >= _MOST
    sum_norms = jnp.where(full, guard.sum_norms / 2, guard.sum_norms) + norm
    num_norms = jnp.where(full, guard.num_norms // 2, guard.num_norms) + 1
    new_guard = Guard(
        sum_norms=jnp.where(bad, guard.sum_norms, sum_norms),
        num_norms=jnp.where(bad, guard.num_norms, num_norms),
        num_bad=num_bad,
        stopped=guard.stopped | (num_bad >= limit),
    )
    return jnp.where(bad, culprit, -1), new_guard


def forgotten(guard: Guard) -> Guard:
    """The state that no longer knows which norms are usual."""
    return guard._replace(sum_norms=guard.sum_norms * 0, num_norms=guard.num_norms * 0)


def released(guard: Guard) -> Guard:
    """The state with which a stopped run goes on: what is usual stays known."""
    return guard._replace(num_bad=guard.num_bad * 0, stopped=guard.stopped & False)

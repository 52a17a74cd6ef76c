"""The loss is multiplied by a scale before its gradient is taken, and the gradient divided by it.

fp16 has no number below 6e-8 and none above 65504, and gradients of activations are small: without
a scale they round to zero in the backward pass. Gradients are divided in fp32, after their sums and
before anything looks at them, so that the guard, clipping, replicas and reports do not see a scale.

A dynamic scale is doubled after a number of clean steps. A gradient that overflows is withdrawn
(`Gradients.dropped`), and the scale is halved: the batch changes nothing else. At its minimum, and
with a fixed scale, a gradient that is not finite is the guard's business. Scales that are powers of
two change no bit of a gradient that neither overflows nor underflows.

Sources: mixed precision training (arXiv 1710.03740, section 3.2), Apex and PyTorch's GradScaler.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from llmx.contract import Gradients, Transform
from llmx.model.precision import Policy
from llmx.model.training_loss import scaled
from llmx.runtime import bounds
from llmx.runtime.bounds import bounded, choice

NAME = "loss_scale"  # in `State.extra`
_LARGEST = 2.0**60  # squared norms are divided by its square, in fp32
_SMALLEST = 2.0**-60  # and multiplied by that of a small one


_DYNAMIC = {"a dynamic loss scale": True}


@dataclasses.dataclass
class LossScaleConfig:
    """What the loss is multiplied by while its gradient is taken, so that fp16 can hold it."""

    # "auto" | "dynamic" | "fixed" | "none"; auto = dynamic where anything is in fp16, else none
    kind: str = choice("auto", ("auto", "dynamic", "fixed", "none"))
    # of a new run; or the fixed one
    initial: float = bounded(
        2.0**16, at_least=_SMALLEST, at_most=_LARGEST, needs={"a loss scale": True}
    )
    # clean steps after which the scale grows
    growth_interval: int = bounded(2000, at_least=1, needs=_DYNAMIC)
    # by which it grows then
    growth_factor: float = bounded(2.0, at_least=1, at_most=2.0**16, needs=_DYNAMIC)
    # by which it falls on overflow
    backoff_factor: float = bounded(0.5, above=0, below=1, needs=_DYNAMIC)
    # the scale falls no lower; a gradient that is not finite there is refused by the guard
    minimum: float = bounded(1.0, at_least=_SMALLEST, at_most=_LARGEST, needs=_DYNAMIC)
    # the scale grows no higher; the loss is a mean over tokens, so larger batches need more
    maximum: float = bounded(2.0**32, at_least=_SMALLEST, at_most=_LARGEST, needs=_DYNAMIC)


class LossScale(NamedTuple):
    """What is kept from step to step."""

    scale: jax.Array  # fp32 []
    clean_steps: jax.Array  # accepted since the scale last changed, int32 []
    skipped: jax.Array  # steps of the run whose gradient overflowed, int32 []


def kind_of(config: LossScaleConfig, policy: Policy) -> str:
    """ "dynamic", "fixed" or "none"."""
    if config.kind != "auto":
        return config.kind
    return "dynamic" if jnp.float16 in (policy.compute, policy.reduce) else "none"


def transforms(config: LossScaleConfig, policy: Policy) -> dict[str, Transform]:
    """The transform by name; {} where the loss is not scaled."""
    kind = kind_of(config, policy)
    if kind == "none":
        return {}
    if kind == "fixed":
        config = dataclasses.replace(config, minimum=config.initial, maximum=config.initial)
    return {NAME: make(config)}


def make(config: LossScaleConfig) -> Transform:
    """The transform of a scale between `config.minimum` and `config.maximum`."""

    def init() -> LossScale:
        zero = lambda: jnp.zeros((), jnp.int32)  # noqa: E731 (the step donates each)
        return LossScale(jnp.full((), config.initial, jnp.float32), zero(), zero())

    def gradients(found: Gradients, state: LossScale) -> Gradients:
        # 0: nothing is in flight yet, and the gradient is zero.
        inverse = jnp.where(state.scale > 0, 1 / state.scale, 0)
        return found._replace(
            tree=scaled(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), found.tree), inverse),
            squares=found.squares * jnp.square(inverse), norms=found.norms * inverse,
            rows=found.rows and found.rows._replace(
                tree=jax.tree.map(lambda leaf: leaf * inverse, found.rows.tree)
            ),
            dropped=_overflowed(found) & (state.scale > config.minimum),
        )  # fmt: skip

    def after(state: LossScale, found: Gradients, accepted: jax.Array) -> LossScale:
        # A batch that was taken with the scale before the last change lowers it no further.
        used, overflowed = found.extra[NAME].scale, _overflowed(found)
        lower = jnp.maximum(used * config.backoff_factor, config.minimum)
        clean_steps = state.clean_steps + accepted
        grows = clean_steps >= config.growth_interval
        higher = jnp.minimum(state.scale * config.growth_factor, config.maximum)
        return LossScale(
            scale=jnp.where(
                overflowed, jnp.minimum(state.scale, lower), jnp.where(grows, higher, state.scale)
            ),
            clean_steps=jnp.where(overflowed | grows, 0, clean_steps),
            skipped=state.skipped + found.dropped,
        )

    def resumed(state: LossScale) -> LossScale:
        scale = np.clip(np.asarray(state.scale), config.minimum, config.maximum)
        return state._replace(scale=scale.astype(np.float32))

    return Transform(
        init=init, loss=lambda loss, state: loss * state.scale, gradients=gradients, after=after,
        scalars=lambda found, state: {
            "loss_scale": found.extra[NAME].scale, "skipped_steps": state.skipped,
            "overflowed": found.dropped,
        },
        resumed=resumed,
    )  # fmt: skip


def _overflowed(found: Gradients) -> jax.Array:
    """bool []: a gradient or the loss is not finite. Replicas look at the same sums."""
    return ~(jnp.isfinite(found.squares).all() & jnp.isfinite(found.loss))


def problems(config: LossScaleConfig) -> list[str]:
    """All that is wrong with the section, each with its remedy."""
    if found := bounds.problems(config, f"{NAME}."):
        return found
    low, first, high = config.minimum, config.initial, config.maximum
    if config.kind in ("auto", "dynamic") and not low <= first <= high:
        return [
            f"loss_scale.initial={first} is not between loss_scale.minimum={low} and "
            f"loss_scale.maximum={high}: use powers of two between them"
        ]
    return []

"""LAMB's trust ratio: a learning rate for each layer, and for each of its experts."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from llmx.sharding import stacks

# 1-bit LAMB: arXiv 2104.06069, algorithm 1, and the constants of its section 5.
_AVERAGE, _LOWEST, _HIGHEST = 0.9, 0.01, 10.0
_LEAST_FACTOR, _MOST_FACTOR, _FACTOR_STEP = 0.5, 4.0, 0.1


class TrustState(NamedTuple):
    """One number per layer of a parameter, [L], of experts [L, E]; [] where none are stacked."""

    average: Any  # of the trust ratios so far, from 0 on: to be divided by 1 - 0.9^updates
    factor: Any  # that the average was last multiplied with, once the variance is frozen


def scale_by_trust_ratio(
    axes: Any, decays: Any, weight_decay: float
) -> optax.GradientTransformationExtraArgs:
    """LAMB's layerwise learning rate: |parameters| / |update| of each layer (arXiv 1904.00962).

    Layers and experts that are stacked have a ratio each, that of optax for their arrays alone.
    With `freshness` in `update`, a tree of (frozen / fresh standard deviation) of as many numbers,
    and `frozen_at`, the number of updates before the freeze, the ratio is the average of bounded
    ones until then times that factor, which is bounded and changes by at most a tenth a step
    (arXiv 2104.06069). Decay does not age: where it makes up most of an update, the factor is
    nearer to 1.

    Args:
      axes: tree of logical axis names.
      decays: tree of bool, whose updates have `weight_decay` times the parameter in them.
      weight_decay: see there.
    """

    def over_layers(function, *trees):
        return jax.tree.map(function, axes, *trees, is_leaf=lambda leaf: isinstance(leaf, tuple))

    def share(names, decays, update, param):
        """Of an update's norm, what is not decay's."""
        if not decays:
            return jnp.ones(_shape(names, update))
        bare, whole = _norm(names, update - weight_decay * param), _norm(names, update)
        return jnp.minimum(bare / jnp.where(whole > 0, whole, 1), 1)

    def init(params):
        ones = over_layers(lambda names, p: jnp.ones(_shape(names, p)), params)
        return TrustState(jax.tree.map(jnp.zeros_like, ones), ones)

    def update(updates, state, params, *, freshness=None, frozen_at=None, **extra):
        if freshness is None:
            ratios = over_layers(_ratio, updates, params)

            def mix(average, ratio):
                return _AVERAGE * average + (1 - _AVERAGE) * jnp.clip(ratio, _LOWEST, _HIGHEST)

            state = state._replace(average=jax.tree.map(mix, state.average, ratios))
        else:
            shares = over_layers(share, decays, updates, params)
            state = state._replace(factor=jax.tree.map(_moved, freshness, state.factor, shares))
            bias = 1 - _AVERAGE ** jnp.maximum(frozen_at, 1).astype(jnp.float32)
            ratios = jax.tree.map(lambda a, f: a / bias * f, state.average, state.factor)
        like = lambda r, u: r.reshape(*r.shape, *(1,) * (u.ndim - r.ndim))  # noqa: E731
        return jax.tree.map(lambda u, r: u * like(r, u), updates, ratios), state

    return optax.GradientTransformationExtraArgs(init, update)


def _shape(names: tuple[str, ...], array: jax.Array) -> tuple[int, ...]:
    """Of one number per layer and expert."""
    return array.shape[: stacks.num_stacked(names)]


def _norm(names: tuple[str, ...], array: jax.Array) -> jax.Array:
    """Of each layer and expert."""
    inner = tuple(range(stacks.num_stacked(names), array.ndim))
    return jnp.sqrt(jnp.sum(jnp.square(array.astype(jnp.float32)), axis=inner))


def _ratio(names: tuple[str, ...], update: jax.Array, param: jax.Array) -> jax.Array:
    of_param, of_update = _norm(names, param), _norm(names, update)
    return jnp.where((of_param > 0) & (of_update > 0), of_param / of_update, 1.0)


def _moved(fresh: jax.Array, factor: jax.Array, share: jax.Array) -> jax.Array:
    """The factor after a step."""
    wanted = jnp.clip(share * fresh + 1 - share, _LEAST_FACTOR, _MOST_FACTOR)
    return jnp.clip(wanted, factor * (1 - _FACTOR_STEP), factor * (1 + _FACTOR_STEP))

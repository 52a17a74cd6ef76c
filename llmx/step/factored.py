"""Adafactor's second moments (arXiv 1804.04235, algorithm 4): of a matrix the means of the squared
gradient along its rows and along its columns.

optax's transformation takes the two largest dimensions of an array for rows and columns. Here they
are those of each layer's and each expert's matrix, however large they are beside the number of
layers, or of heads (T5X has such rules too). Of one matrix [rows, columns] by itself both are the
same.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from llmx.sharding import stacks

# Rows and columns that a matrix has at least to be factored, as in optax and T5X. Of smaller ones,
# and of vectors, all squares are kept.
LEAST = 128
_DECAY = 0.8  # update t counts t^-0.8
_EPSILON = 1e-30  # added to squares


def scale_by_factored_rms(axes: Any) -> optax.GradientTransformation:
    """`optax.scale_by_factored_rms` of each layer's and each expert's own array.

    What is averaged over has size 1 in the state, so that means are split as their parameter is,
    and add no dimension to it. Where there is none of a kind, the state has zeros [1].

    Args:
      axes: tree of logical axis names.
    """
    names = jax.tree.leaves(axes, is_leaf=lambda leaf: isinstance(leaf, tuple))

    def init(params):
        leaves, structure = jax.tree.flatten(params)
        found = [_zeros(*both) for both in zip(names, leaves, strict=True)]
        moments = (jax.tree.unflatten(structure, each) for each in zip(*found, strict=True))
        return optax.FactoredState(jnp.zeros((), jnp.int32), *moments)

    def update(updates, state, params=None):
        del params
        kept = 1 - (state.count + 1.0) ** -_DECAY
        leaves, structure = jax.tree.flatten(updates)
        moments = map(jax.tree.leaves, (state.v_row, state.v_col, state.v))
        found = [_scaled(kept, *each) for each in zip(names, leaves, *moments, strict=True)]
        new, *moments = (jax.tree.unflatten(structure, each) for each in zip(*found, strict=True))
        return new, optax.FactoredState(optax.safe_increment(state.count), *moments)

    return optax.GradientTransformation(init, update)


def _factored(
    axes: tuple[str | None, ...], shape: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The dimensions of the shorter and of the longer side of an array's matrices; None where they
    are not factored. Of arrays with more than two sides, which only a program's own model has, the
    two largest, as in optax."""
    size = lambda dims: math.prod(shape[dim] for dim in dims)  # noqa: E731
    *_, shorter, longer = ((), (), *sorted(stacks.sides(axes), key=size))
    return (shorter, longer) if shorter and size(shorter) >= LEAST else None


def _zeros(axes: tuple[str | None, ...], param: jax.Array) -> tuple[jax.Array, ...]:
    nothing = jnp.zeros((1,), param.dtype)
    if (found := _factored(axes, param.shape)) is None:
        return nothing, nothing, jnp.zeros_like(param)
    shorter, longer = found
    means = (jax.eval_shape(lambda x, of=of: _mean(x, of), param) for of in (longer, shorter))
    return *map(jnp.zeros_like, means), nothing


def _mean(x: jax.Array, dims: tuple[int, ...]) -> jax.Array:
    return jnp.mean(x, axis=dims, keepdims=True)


def _scaled(kept, axes, gradient, v_row, v_col, v) -> tuple[jax.Array, ...]:
    """The gradient over the root of its second moment, and the moments (v_row, v_col, v)."""
    squares = jnp.square(gradient) + _EPSILON
    mixed = lambda old, new: (kept * old + (1 - kept) * new).astype(old.dtype)  # noqa: E731
    if (found := _factored(axes, gradient.shape)) is None:
        v = mixed(v, squares)
        return gradient * v**-0.5, v_row, v_col, v
    shorter, longer = found
    v_row, v_col = mixed(v_row, _mean(squares, longer)), mixed(v_col, _mean(squares, shorter))
    of_row = (v_row / _mean(v_row, shorter)) ** -0.5
    return gradient * of_row * v_col**-0.5, v_row, v_col, v

"""Muon on a mesh: matrices are orthogonalised whole, each by the device that has it.

Newton-Schulz multiplies a matrix with itself again and again, so split matrices would be gathered
for each product. Layers are stacked, [L, ...], and their matrices do not depend on each other. So
devices exchange their parts of L layers for L / n whole matrices, orthogonalise these, and exchange
them back: what a device sends is twice its share, and the products are divided among devices too.

Sources: Muon, kellerjordan.github.io/posts/muon; its updates of the size of AdamW's and its layout
over data-parallel devices, arXiv 2502.16982. The iteration itself is optax's.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding
from jaxtyping import Array
from optax import contrib

from llmx import sharding

STEPS = 5  # of Newton-Schulz
SIZE = 0.2  # root mean square of an update (2502.16982)


def scale_by_orthogonalized_momentum(
    arrays: Sequence[tuple[contrib.MuonDimensionNumbers, NamedSharding | None]], *, beta: float
) -> optax.GradientTransformation:
    """`optax.contrib.scale_by_muon` with Nesterov's momentum, scaled to a root mean square of
    `SIZE`; each matrix is orthogonalised where it is whole.

    Args:
      arrays: of the arrays [L, ...] of a tree, in its order: which dimensions are a matrix's rows
        and columns, all but the first, and how an update of it is split; None = the compiler
        decides.
      beta: of the momentum.

    Communicates over the mesh axes that split a matrix.
    """
    iteration = contrib.scale_by_muon(beta=beta)  # for its state

    def update(updates, state, params=None):
        del params
        count = optax.safe_increment(state.count)
        mu = optax.tree.update_moment(updates, state.mu, beta, 1)
        ahead = optax.tree.bias_correction(mu, beta, optax.safe_increment(count))
        now = optax.tree.bias_correction(updates, beta, count)
        leaves, structure = jax.tree.flatten(
            jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, ahead, now)
        )
        new = []
        for leaf, (dimensions, split) in zip(leaves, arrays, strict=True):
            # One after the other: each takes several arrays of whole matrices.
            given, new[-1:] = lax.optimization_barrier((leaf, new[-1:]))
            orthogonalized = functools.partial(_orthogonalized, dimensions)
            new.append(whole_matrices(orthogonalized, given, split))
        return jax.tree.unflatten(structure, new), state._replace(count=count, mu=mu)

    return optax.GradientTransformation(iteration.init, update)


def _orthogonalized(dimensions: contrib.MuonDimensionNumbers, x: Array) -> Array:
    """Of matrices [L, ...], scaled. Without momentum optax's transformation is its iteration."""
    iteration = contrib.scale_by_muon(
        beta=0.0, nesterov=False, ns_steps=STEPS, weight_dimension_numbers=dimensions
    )
    found, _ = iteration.update(x, iteration.init(x))
    rows, columns = (
        math.prod(x.shape[i] for i in of)
        for of in (dimensions.reduction_axis, dimensions.output_axis)
    )
    return SIZE * math.sqrt(max(rows, columns)) * found


def whole_matrices(
    function: Callable[[Array], Array], x: Array, split: NamedSharding | None
) -> Array:
    """`function`, of matrices [l, ...] to as many, of `x` [L, ...] that is split as `split`.

    Each device gets some of the L whole; of one layer, all devices get it. Communicates over the
    mesh axes that split a matrix.
    """
    moved = [
        (dim, sharding.mesh_axes(axes))
        for dim, axes in enumerate(split.spec if split else ())
        if dim and sharding.ways(split.mesh, axes) > 1
    ]
    if not moved:
        return function(x)
    context = jax.sharding.get_abstract_mesh()
    ways = math.prod(sharding.ways(split.mesh, axes) for _, axes in moved)

    def local(x: Array) -> Array:
        layers = x.shape[0]
        if layers == 1:
            return _of_one(function, x, moved)
        x = jnp.pad(x, [(0, -layers % ways)] + [(0, 0)] * (x.ndim - 1))
        for dim, axes in moved:
            x = lax.all_to_all(x, axes, 0, dim, tiled=True)
        x = function(x)
        for dim, axes in reversed(moved):
            x = lax.all_to_all(x, axes, dim, 0, tiled=True)
        return x[:layers]

    return jax.shard_map(
        local, mesh=split.mesh if context.empty else context, in_specs=split.spec,
        out_specs=split.spec, check_vma=False,
    )(x)  # fmt: skip


def _of_one(
    function: Callable[[Array], Array], x: Array, moved: Sequence[tuple[int, Any]]
) -> Array:
    """Of one layer [1, ...], gathered; a device keeps its part of the result."""
    parts = [(dim, axes, x.shape[dim]) for dim, axes in moved]
    for dim, axes in moved:
        x = lax.all_gather(x, axes, axis=dim, tiled=True)
    x = function(x)
    for dim, axes, size in parts:
        x = lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * size, size, dim)
    return x

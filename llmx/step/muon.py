"""Muon on a mesh: matrices are orthogonalised whole, each by the device that has it.

Newton-Schulz multiplies a matrix with itself again and again, so split matrices would be gathered
for each product. Layers are stacked, [L, ...], and their matrices do not depend on each other. So
devices exchange their parts of L layers for L / n whole matrices, orthogonalise these, and exchange
them back. For each dimension of a matrix that is split a device sends its share twice, and the
products are divided among devices too. The experts of a layer have matrices of their own, which
stay where they are.

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

ITERATIONS = 5  # of Newton-Schulz
RMS = 0.2  # root mean square of an update (2502.16982)


def scale_by_orthogonalized_momentum(
    arrays: Sequence[tuple[contrib.MuonDimensionNumbers, NamedSharding | None]],
    *,
    beta: float,
    eps: float,
) -> optax.GradientTransformation:
    """`optax.contrib.scale_by_muon` with Nesterov's momentum, scaled to a root mean square of
    `RMS`; each matrix is orthogonalised where it is whole.

    Args:
      arrays: of the arrays [L, ...] or [L, E, ...] of a tree, in its order: which dimensions are a
        matrix's rows and columns, all but those of layers and experts, and how an update of it is
        split; None = the compiler decides.
      beta: of the momentum.
      eps: added to the norm that a matrix is divided by.

    Communicates over the mesh axes that split a matrix.
    """
    state_of = contrib.scale_by_muon(beta=beta).init

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
            given = leaf
            if new:  # waits for the stack before it: each takes several arrays of whole matrices
                given, new[-1] = lax.optimization_barrier((leaf, new[-1]))
            orthogonalized = functools.partial(_orthogonalized, dimensions, eps)
            dims = (*dimensions.reduction_axis, *dimensions.output_axis)
            new.append(on_whole_matrices(orthogonalized, given, split, dims))
        return jax.tree.unflatten(structure, new), state._replace(count=count, mu=mu)

    return optax.GradientTransformation(state_of, update)


def _orthogonalized(dimensions: contrib.MuonDimensionNumbers, eps: float, x: Array) -> Array:
    """Of an array's matrices, scaled. Without momentum optax's transformation is its iteration."""
    iteration = contrib.scale_by_muon(
        beta=0.0, nesterov=False, eps=eps, ns_steps=ITERATIONS, weight_dimension_numbers=dimensions
    )
    found, _ = iteration.update(x, iteration.init(x))
    rows, columns = (
        math.prod(x.shape[i] for i in of)
        for of in (dimensions.reduction_axis, dimensions.output_axis)
    )
    return RMS * math.sqrt(max(rows, columns)) * found


def on_whole_matrices(
    function: Callable[[Array], Array], x: Array, split: NamedSharding | None, dims: Sequence[int]
) -> Array:
    """`function`, of matrices [l, ...] to as many, of `x` [L, ...] that is split as `split`.

    Each device gets those of some of its L layers whole; of one layer, all devices get them.
    Communicates over the mesh axes that split a matrix, whose dimensions are `dims`.
    """
    found = enumerate(split.spec if split else ())
    split_by = [(dim, axes) for dim, axes in found if sharding.ways(split.mesh, axes) > 1]
    if not split_by:
        return function(x)
    moved = [(dim, sharding.mesh_axes(axes)) for dim, axes in split_by if dim in dims]
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

    # `check_vma` cannot know that what is exchanged twice is where it was.
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

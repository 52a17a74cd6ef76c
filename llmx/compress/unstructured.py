"""Pruning of a trained model without training: single weights, or N of M neighbours.

    magnitude    the least |w|, of all layers together or of each weight (arXiv 1710.01878)
    wanda        the least |w| |x| of each output, |x| the norm of the input that w multiplies, over
                 calibration text (arXiv 2306.11695)
    sparse_gpt   weight by weight the ones whose loss the others make up for best, by which they are
                 changed: the inverse of the inputs' X^T X says how (arXiv 2301.00774)

`of_layer` prunes one layer of `calibration.layer_by_layer`, so that each layer is calibrated with
what the pruned ones before it give; `by_magnitude` prunes a whole model, without text.

Letters: I numbers that a product contracts, O those that it makes, b columns of a block.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from llmx.compress.calibration import Layer
from llmx.model import adapters, sparsity
from llmx.model import apply as apply_lib
from llmx.model.families import ModelConfig
from llmx.model.ranks import is_within
from llmx.runtime import bounds
from llmx.runtime.bounds import bounded, choice
from llmx.sharding import trees
from llmx.step.transforms import masks

MAGNITUDE, WANDA, SPARSE_GPT = "magnitude", "wanda", "sparse_gpt"
BLOCK = 128  # columns after which SparseGPT changes those that follow
DAMPING = 0.01  # of the mean of X^T X's diagonal, added to it


@dataclasses.dataclass
class PruneOptions:
    """Which weights become zero."""

    method: str = choice(MAGNITUDE, (MAGNITUDE, WANDA, SPARSE_GPT))
    sparsity: float = bounded(0.5, at_least=0, below=1)  # share that is pruned
    pattern: str = ""  # "2:4" = at most 2 of 4 neighbours are not zero; "" = sparsity counts
    # magnitude without a pattern: the least of all layers together, or of each weight
    scope: str = choice(masks.GLOBAL, (masks.GLOBAL, masks.LAYER))
    products: tuple[str, ...] = adapters.MODULES  # as `pruning.products`

    @property
    def calibrates(self) -> bool:
        """Whether it needs statistics of inputs."""
        return self.method != MAGNITUDE


def problems(options: PruneOptions, model: ModelConfig) -> Iterator[str]:
    """All that is wrong with them for this model, each with its remedy."""
    yield from bounds.problems(options, "")
    shapes, axes = apply_lib.abstract_parameters(model)
    of_model = masks.prunable(axes)
    products = {masks.product_of(name) for name in of_model}
    for name in options.products:
        if not any(is_within(product, (name,)) for product in products):
            yield (
                f"products names {name!r}, which the model does not have: use some of "
                f"{', '.join(sorted(products))}"
            )
    if options.calibrates and model.num_experts:
        yield (
            f"method={options.method!r} with model.num_experts={model.num_experts}: statistics of "
            "experts' inputs are not kept; use method='magnitude'"
        )
    if not options.pattern:
        return
    try:
        _, size = masks.parse(options.pattern)
    except ValueError:
        yield f"pattern={options.pattern!r} must be 'N:M' with 0 < N < M <= 64, as '2:4'"
        return
    sizes = {name: leaf.shape for name, leaf in trees.named(shapes).items()}
    for name, of in _chosen(options, axes).items():
        if (dim := sizes[name][sparsity.contracted_dim(of)]) % size:
            yield f"pattern={options.pattern!r}: {name} sums over {dim} numbers; leave it out"


def by_magnitude(model: ModelConfig, params: Any, options: PruneOptions) -> Any:
    """The parameters of a whole model, layers in its order, with zeros."""
    _, axes = apply_lib.abstract_parameters(model)
    named, chosen = trees.named(params), _chosen(options, axes)
    found = _kept_by_magnitude({name: named[name] for name in chosen}, options, chosen)
    new = {name: jnp.where(mask, named[name], 0) for name, mask in found.items()}
    return trees.unnamed(named | new, params)


def of_layer(options: PruneOptions) -> Callable[[Layer], dict[str, Any]]:
    """The change of one layer for `calibration.layer_by_layer`, by wanda or sparse_gpt."""

    def change(layer: Layer) -> dict[str, Any]:
        return {
            name: _of_weight(
                layer.weights[name], one.gram_II, options, adapters.contracted(f"blocks/{name}")
            )
            for name, one in layer.statistics.items()
            if is_within(name.removesuffix("/kernel"), options.products)
        }

    return change


def _chosen(options: PruneOptions, axes: Any) -> dict[str, tuple[str, ...]]:
    return masks.chosen(masks.PruningConfig(products=options.products), axes)


def _kept_by_magnitude(weights: dict, options: PruneOptions, axes: Mapping[str, tuple]) -> dict:
    if options.pattern:
        kept, size = masks.parse(options.pattern)
        dims = {name: sparsity.contracted_dim(of) for name, of in axes.items()}
        one = functools.partial(sparsity.largest_of_groups, kept=kept, size=size)
        return {n: one(sparsity.magnitude_keys(leaf), dims[n]) for n, leaf in weights.items()}
    keys = {n: functools.partial(sparsity.magnitude_keys, leaf) for n, leaf in weights.items()}
    filled = {name: np.ones(len(leaf), bool) for name, leaf in weights.items()}
    sizes = {name: math.prod(leaf.shape[1:]) for name, leaf in weights.items()}
    if options.scope == masks.LAYER:
        goals = {n: jnp.uint32(math.floor(size * options.sparsity)) for n, size in sizes.items()}
        return sparsity.smallest_of_each(keys, filled, goals)
    total = sum(size * len(weights[name]) for name, size in sizes.items())
    goal = sparsity.goal(math.floor(total * options.sparsity))
    return sparsity.smallest_of_all(keys, filled, sparsity.Goal(*map(jnp.uint32, goal)))


def _of_weight(weight: Any, gram_II: Any, options: PruneOptions, contracted: int) -> jax.Array:
    """One weight of one layer, in its shape and dtype."""
    shape, weight = weight.shape, jnp.asarray(weight)
    flat_IO = weight.reshape(math.prod(shape[:contracted]), -1).astype(jnp.float32)
    if options.method == WANDA:
        scores_IO = wanda_scores(flat_IO, jnp.diagonal(gram_II))
        new_IO = jnp.where(kept_of_outputs(scores_IO, options), flat_IO, 0)
    else:
        new_IO = sparse_gpt(flat_IO, gram_II, options)
    return new_IO.reshape(shape).astype(weight.dtype)


def wanda_scores(
    weight_IO: Float[Array, "I O"], squares_I: Float[Array, " I"]
) -> Float[Array, "I O"]:
    """|w| |x|; `squares_I`: sums of x^2 over tokens."""
    return jnp.abs(weight_IO) * jnp.sqrt(squares_I)[:, None]


def kept_of_outputs(scores_IO: Float[Array, "I O"], options: PruneOptions) -> Bool[Array, "I O"]:
    """The mask without the least scores of each output, or of each group of it; of equal ones the
    first are pruned."""
    if options.pattern:
        kept, size = masks.parse(options.pattern)
        return sparsity.largest_of_groups(sparsity.signed_keys(scores_IO), 0, kept, size)
    rank_IO = jnp.argsort(jnp.argsort(scores_IO, axis=0, stable=True), axis=0)
    return rank_IO >= math.floor(scores_IO.shape[0] * options.sparsity)


def sparse_gpt(
    weight_IO: Float[Array, "I O"], gram_II: Any, options: PruneOptions, *, block: int = BLOCK
) -> Float[Array, "I O"]:
    """The weight with zeros, the others changed so that the product of the same inputs stays near.

    `gram_II`: X^T X of the inputs. Its inverse is factored on the host in fp64, the sweep over
    columns is in fp32. In each block of columns the share `sparsity` of the weights is pruned; with
    a pattern, of each group of each output, when its first column is reached.
    """
    gram = np.asarray(gram_II, np.float64)
    dead = np.diagonal(gram) == 0  # inputs that are always zero: their weights do nothing
    upper_II = jnp.asarray(inverse_factor(gram), jnp.float32)
    left_OI = jnp.where(dead, 0, weight_IO.T)
    kept, size = masks.parse(options.pattern) if options.pattern else (0, 1)
    block, done = max(block // size, 1) * size, []
    for start in range(0, left_OI.shape[1], block):
        end = min(start + block, left_OI.shape[1])
        sweep = _sweep_groups if options.pattern else _sweep_block
        count = kept if options.pattern else math.floor(
            (end - start) * left_OI.shape[0] * options.sparsity
        )  # fmt: skip
        new_Ob, errors_Ob = sweep(
            left_OI[:, start:end], upper_II[start:end, start:end], count, size
        )
        left_OI = left_OI.at[:, end:].add(-errors_Ob @ upper_II[start:end, end:])
        done.append(new_Ob)
    return jnp.concatenate(done, axis=1).T


def inverse_factor(gram: np.ndarray, damping: float = DAMPING) -> np.ndarray:
    """Upper triangular U, fp64 [I, I], with U^T U the inverse of the damped X^T X."""
    gram = gram.copy()
    dead = np.diagonal(gram) == 0
    gram[dead, dead] = 1
    gram[np.diag_indices_from(gram)] += damping * np.mean(np.diagonal(gram))
    inverse = np.linalg.inv(gram)
    return np.linalg.cholesky((inverse + inverse.T) / 2).T


@functools.partial(jax.jit, static_argnums=(2, 3))
def _sweep_block(left_Ob, upper_bb, count: int, size: int):
    """A block of columns with `count` zeros where the loss is least, and the errors to make up."""
    scores = jnp.square(left_Ob / jnp.diagonal(upper_bb))
    order = jnp.argsort(scores.reshape(-1), stable=True)
    pruned = jnp.zeros(scores.size, bool).at[order[:count]].set(True).reshape(scores.shape)
    return _sweep(left_Ob, upper_bb, lambda i, left, pruned: pruned, pruned)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _sweep_groups(left_Ob, upper_bb, kept: int, size: int):
    """A block of columns with `size - kept` zeros in each group of an output."""
    diagonal_b = jnp.diagonal(upper_bb)

    def choose(i, left_Ob, pruned_Ob):
        first = i // size * size
        group = jax.lax.dynamic_slice_in_dim(left_Ob / diagonal_b, first, size, axis=1)
        rank = jnp.argsort(jnp.argsort(jnp.square(group), axis=1, stable=True), axis=1)
        new = jax.lax.dynamic_update_slice_in_dim(pruned_Ob, rank < size - kept, first, axis=1)
        return jnp.where(i == first, new, pruned_Ob)

    return _sweep(left_Ob, upper_bb, choose, jnp.zeros(left_Ob.shape, bool))


def _sweep(left_Ob, upper_bb, choose: Callable, pruned_Ob):
    """Column by column: what is pruned becomes zero, and those behind make up for it."""

    def column(i, carry):
        left, errors, pruned = carry
        pruned = choose(i, left, pruned)
        old, new = left[:, i], jnp.where(pruned[:, i], 0, left[:, i])
        error = (old - new) / upper_bb[i, i]
        left = left - error[:, None] * upper_bb[i]  # zero before the diagonal
        return left.at[:, i].set(new), errors.at[:, i].set(error), pruned

    carry = (left_Ob, jnp.zeros_like(left_Ob), pruned_Ob)
    left, errors, _ = jax.lax.fori_loop(0, left_Ob.shape[1], column, carry)
    return left, errors

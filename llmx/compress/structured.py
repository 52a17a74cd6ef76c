"""Structured pruning: a smaller model of the heads, MLP columns and layers that matter most.

What is removed is removed: the result has a `ModelConfig` and parameters of its own, and trains,
evaluates, generates and exports as any other model. Its config gives all layers the same sizes, so
each layer loses as many heads and columns as the others, those with its own least scores. Heads go
in whole groups that share keys and values, or as many of each group.

Scores of a unit (a group of heads, a head, a column, a layer), from all weights that belong to it:

    magnitude    the sum of their squares
    taylor       over batches of calibration text, the sum of (sum of w g)^2: the first-order change
                 of the loss where the unit is removed (arXiv 1906.10771, 2305.11627)

Letters: L layers, K groups of heads, G heads of a group, F columns of the MLP.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from llmx.model import apply as apply_lib
from llmx.model.families import ModelConfig
from llmx.runtime.bounds import bounded
from llmx.sharding import trees


@dataclasses.dataclass
class StructuredOptions:
    """The sizes of the smaller model; 0 = as they are."""

    num_kv_heads: int = bounded(0, at_least=0)  # groups of heads that stay in each layer
    heads_of_group: int = bounded(0, at_least=0)  # query heads that stay of each group
    mlp_dim: int = bounded(0, at_least=0)  # columns of the MLP that stay in each layer
    num_layers: int = bounded(0, at_least=0)  # layers that stay


class Scores(NamedTuple):
    """Of the units of a model, fp32; the larger stay."""

    groups_LK: Any
    heads_LKG: Any
    columns_LF: Any
    layers_L: Any


def problems(options: StructuredOptions, model: ModelConfig) -> Iterator[str]:
    """All that is wrong with them for this model, each with its remedy."""
    if model.num_experts:
        yield (
            f"model.num_experts={model.num_experts}: experts are no columns of one MLP; structured "
            "pruning is for dense models"
        )
        return
    sizes = {
        "num_kv_heads": model.num_kv_heads, "mlp_dim": model.mlp_dim,
        "heads_of_group": model.num_heads // model.num_kv_heads, "num_layers": model.num_layers,
    }  # fmt: skip
    for name, most in sizes.items():
        if not 0 <= (value := vars(options)[name]) <= most:
            yield f"{name}={value} must be at least 1 and at most the model's {most}, or 0 = {most}"
    if options.heads_of_group and model.kv_latent:
        yield (
            f"heads_of_group={options.heads_of_group} with latent attention, whose groups are of "
            "one head: use num_kv_heads"
        )
    if not any(vars(options).values()):
        yield "nothing is smaller: set num_kv_heads, heads_of_group, mlp_dim or num_layers"


def magnitude_scores(model: ModelConfig, params: Any) -> Scores:
    """By the sum of the squares of a unit's weights."""
    square = lambda leaf: jnp.square(leaf.astype(jnp.float32))  # noqa: E731
    return _summed(model, jax.tree.map(square, params["blocks"]))


def taylor_scores(
    model: ModelConfig, params: Any, gradient: Callable[[Any], Any], batches: Iterable[Any]
) -> Scores:
    """By the first-order change of the loss of each batch. `gradient`: batch -> that of the loss at
    these parameters, a tree like them."""

    @jax.jit
    def of(grads):
        product = lambda w, g: w.astype(jnp.float32) * g.astype(jnp.float32)  # noqa: E731
        sums = _summed(model, jax.tree.map(product, params["blocks"], grads["blocks"]))
        return jax.tree.map(jnp.square, sums)

    found = [of(gradient(batch)) for batch in batches]
    return jax.tree.map(lambda *each: sum(each), *found)


def pruned(
    model: ModelConfig, params: Any, options: StructuredOptions, scores: Scores
) -> tuple[ModelConfig, Any, dict[str, Any]]:
    """The smaller model, its parameters, and what of each layer stays, by name.

    `params`: layers in the model's order. Raises ValueError, see `problems`.
    """
    if found := list(problems(options, model)):
        raise ValueError("\n".join(found))
    L, K, N = model.num_layers, model.num_kv_heads, model.num_heads
    G = N // K
    groups_Lk = _largest(scores.groups_LK, options.num_kv_heads or K)
    heads_LKg = _largest(scores.heads_LKG, options.heads_of_group or G)
    columns_Lf = _largest(scores.columns_LF, options.mlp_dim or model.mlp_dim)
    layers_l = _largest(np.asarray(scores.layers_L)[None], options.num_layers or L)[0]
    of_kept = np.take_along_axis(heads_LKg, groups_Lk[..., None], axis=1)
    heads_Ln = (groups_Lk[..., None] * G + of_kept).reshape(L, -1)
    kept = {"heads": heads_Ln, "kv_heads": groups_Lk, "mlp": columns_Lf}
    blocks = _taken(model, params["blocks"], kept, layers_l)
    smaller = smaller_model(model, options, [int(layer) for layer in layers_l])
    return smaller, params | {"blocks": blocks}, kept | {"layers": layers_l}


def smaller_model(
    model: ModelConfig, options: StructuredOptions, layers: Sequence[int] | None = None
) -> ModelConfig:
    """Of these sizes; `layers`: those that stay, None = the first."""
    K, num = options.num_kv_heads or model.num_kv_heads, options.num_layers or model.num_layers
    G = options.heads_of_group or model.num_heads // model.num_kv_heads
    kinds = [model.layer_kinds[layer] for layer in layers or range(num)]
    return dataclasses.replace(
        model, num_layers=num, num_kv_heads=K, num_heads=K * G,
        mlp_dim=options.mlp_dim or model.mlp_dim, layer_pattern=_period(kinds),
    )  # fmt: skip


def _axes(model: ModelConfig) -> Mapping[str, tuple[str, ...]]:
    """Logical axes of the layers' parameters, by name."""
    shapes, axes = apply_lib.abstract_parameters(model)
    names = jax.tree.leaves(axes["blocks"], is_leaf=lambda leaf: isinstance(leaf, tuple))
    return dict(zip(trees.named(shapes["blocks"]), names, strict=True))


def _summed(model: ModelConfig, terms: Any) -> Scores:
    """Sums of terms of all weights, [L, ...], over each unit."""
    L, K, F = model.num_layers, model.num_kv_heads, model.mlp_dim
    G = model.num_heads // K
    groups_LK, heads_LKG = jnp.zeros((L, K)), jnp.zeros((L, K, G))
    columns_LF, layers_L = jnp.zeros((L, F)), jnp.zeros(L)
    axes = _axes(model)
    for name, term in trees.named(terms).items():
        of = axes[name]
        others = lambda *kept, of=of: tuple(i for i, n in enumerate(of) if n not in kept)  # noqa: E731
        layers_L += term.sum(others("layers"))
        if "heads" in of:
            heads_LKG += term.sum(others("layers", "heads")).reshape(L, K, G)
        elif "kv_heads" in of:
            groups_LK += term.sum(others("layers", "kv_heads"))
        elif "mlp" in of:
            columns_LF += term.sum(others("layers", "mlp"))
    return Scores(groups_LK + heads_LKG.sum(-1), heads_LKG, columns_LF, layers_L)


def _largest(scores: Any, number: int) -> np.ndarray:
    """Indices [..., number] of the largest along the last dimension, ascending; of equal ones the
    first."""
    order = np.argsort(-np.asarray(scores, np.float64), axis=-1, kind="stable")
    return np.sort(order[..., :number], axis=-1)


def _taken(model: ModelConfig, blocks: Any, kept: Mapping[str, np.ndarray], layers_l) -> Any:
    axes, layers = _axes(model), np.asarray(layers_l)

    def one(leaf, of):
        for dim, axis in enumerate(of):
            if axis in kept:
                take = lambda layer, at, dim=dim: jnp.take(layer, at, axis=dim - 1)  # noqa: E731
                leaf = jax.vmap(take)(leaf, kept[axis])
        return leaf[layers]

    new = {name: one(leaf, axes[name]) for name, leaf in trees.named(blocks).items()}
    return trees.unnamed(new, blocks)


def _period(kinds: list[str]) -> tuple[str, ...]:
    """The shortest pattern that repeats as these kinds."""
    for size in range(1, len(kinds) + 1):
        if all(kind == kinds[i % size] for i, kind in enumerate(kinds)):
            return tuple(kinds[:size])
    raise AssertionError(kinds)

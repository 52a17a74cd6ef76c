"""Calibration: layers of a trained model, one after another, with what their products take.

Text goes through one layer at a time. Each layer is observed, changed, and computed again as
changed, so that the layers behind it are calibrated with what they will really get (GPTQ, arXiv
2210.17323). In memory are the activations between two layers, of all batches, and the statistics
of one layer. A model whose layers stay as they are gives the statistics of the model itself.

Letters: B batch, T positions, D width.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from llmx.contract import Batch
from llmx.model import adapters, observed
from llmx.model.apply import Apply, self_mask
from llmx.model.execution import Execution
from llmx.model.observed import Observed, Statistics
from llmx.sharding import trees


class Layer(NamedTuple):
    """One layer of a model, and what its products take. Arrays are whole, on one device."""

    stack: str  # "blocks", or "first": dense layers before routed ones
    index: int  # in its stack
    weights: dict[str, Any]  # by name, "attention/query/kernel"
    statistics: dict[str, Statistics]  # of the products that `products` names


def products(names: Iterable[str]) -> list[str]:
    """Of the names of a layer's weights those that are calibrated: products of attention and MLP.
    Routers and experts are none of them."""
    return [name for name in names if adapters.is_product(f"blocks/{name}")]


def problems(apply: Apply) -> list[str]:
    """Why the layers of a model cannot be calibrated, with remedies."""
    found = []
    if apply.model.num_experts:
        found.append(
            f"model.num_experts={apply.model.num_experts}: experts take tokens of their own, whose "
            "statistics are not kept: use a technique without calibration text, or a dense model"
        )
    if apply.model.repeats > 1:
        found.append(
            f"model.repeats={apply.model.repeats}: a layer that is gone through several times "
            "takes other inputs each time: use a technique without calibration text"
        )
    return found


def layer_by_layer(
    apply: Apply, params: dict, batches: Sequence[Batch], execution: Execution,
    change: Callable[[Layer], Mapping[str, Any]],
) -> dict:  # fmt: skip
    """The parameters with all layers changed, in the order of depth.

    Args:
      params: of the model, on the mesh of `execution`, which has no stages.
      batches: of text, as a dataset's rows are on the mesh; all their positions count. () = none:
        for changes that need no statistics, of which there are none then.
      change: returns those of the layer's weights that change, by name: any leaves that a layer
        computes with, of equal shapes in all layers. All processes call it with the same arrays,
        and it must return the same. Arrays of the old shape are split as the old one, others whole.

    Communicates as forward passes do. Raises ValueError for text and a model of `problems`.
    """
    if batches and (found := problems(apply)):
        raise ValueError("\n".join(found))
    plain = dataclasses.replace(execution, remat="none", offloaded=(), turns=1)
    with jax.set_mesh(execution.place.mesh):
        begin = jax.jit(functools.partial(_begun, apply, plain))
        stream = [_done(begin(params, batch)) for batch in batches]
    new, stacks = dict(params), {"first": apply.first_layers} if apply.model.num_first else {}
    for stack, model in (stacks | {"blocks": apply}).items():
        passes, layers = {}, []
        kinds = model.model.block_kinds[: jax.tree.leaves(params[stack])[0].shape[0]]
        for index, kind in enumerate(kinds):
            of_kind = passes.setdefault(kind, _Pass.of(model, kind, plain))
            with jax.set_mesh(execution.place.mesh):
                weights = jax.tree.map(
                    lambda leaf, at=index: _done(leaf[at : at + 1]), params[stack]
                )
            layer, stream = _changed(stack, index, of_kind, weights, stream, change)
            layers.append(layer)
        with jax.set_mesh(execution.place.mesh):
            new[stack] = jax.tree.map(lambda *each: _done(jnp.concatenate(each)), *layers)
    return new


def statistics(
    apply: Apply, params: dict, batches: Sequence[Batch], execution: Execution
) -> dict[str, Statistics]:
    """Of all products of a model, by the path of their weight, "blocks/mlp/up/kernel", stacked.

    Args, communication and errors: see `layer_by_layer`.
    """
    found: dict[str, list[Statistics]] = {}

    def keep(layer: Layer) -> dict:
        for name, one in layer.statistics.items():
            found.setdefault(f"{layer.stack}/{name}", []).append(one)
        return {}

    layer_by_layer(apply, params, batches, execution, keep)
    return {
        name: jax.tree.map(lambda *each: jnp.stack(each), *layers)
        for name, layers in found.items()
    }  # fmt: skip


def by_name(weights: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """{"attention/query/kernel": leaf} of a nested dict; leaves may be trees of other types."""
    named = {}
    for name, leaf in weights.items():
        below = f"{path}{name}"
        named |= by_name(leaf, f"{below}/") if isinstance(leaf, Mapping) else {below: leaf}
    return named


def _begun(apply: Apply, execution: Execution, params: dict, batch: Batch) -> tuple:
    """The input of the first layer [B, T, D], and the segments and positions of its rows."""
    names = ("tokens", "segment_ids", "positions")
    tokens_BT, *rows = apply.split_rows([batch[name] for name in names], execution)
    return apply.looked_up(params, tokens_BT, rows[-1], execution), tuple(rows)


def _done(arrays: Any) -> Any:
    """Arrays that are there. Programs of several CPU devices that run at one time may wait for each
    other's collectives for ever."""
    return jax.block_until_ready(arrays)


class _Pass(NamedTuple):
    """Jitted functions of a layer of one kind, and of text in front of it."""

    plain: Callable  # (weights [1, ...], x, rows) -> x behind the layer
    observed: Callable  # (..., statistics) -> x, and the statistics with those of these x added
    mesh: Mesh

    @classmethod
    def of(cls, apply: Apply, kind: str, execution: Execution) -> "_Pass":
        def plain(weights, x_BTD, rows):
            mask = self_mask(*rows, execution)
            return apply.apply_layers(weights, x_BTD, mask, execution, kinds=(kind,))[0]

        def observing(weights, x_BTD, rows, total):
            def of(statistics):
                seen = by_name(weights)
                for name, one in statistics.items():
                    seen[name] = Observed(seen[name], jax.tree.map(lambda leaf: leaf[None], one))
                return plain(trees.nest(seen), x_BTD, rows)

            out_BTD, pull = jax.vjp(of, jax.tree.map(jnp.zeros_like, total))
            [found] = pull(jnp.zeros_like(out_BTD))
            return out_BTD, {name: observed.added(total[name], found[name]) for name in found}

        return cls(jax.jit(plain), jax.jit(observing, donate_argnums=3), execution.place.mesh)


def _changed(
    stack: str, index: int, of_layer: _Pass, weights: dict, stream: Sequence[tuple],
    change: Callable[[Layer], Mapping[str, Any]],
) -> tuple[dict, list[tuple]]:  # fmt: skip
    """A layer's new weights [1, ...], and what comes out of it with them."""
    named, behind, mesh = by_name(weights), [], of_layer.mesh
    with jax.set_mesh(mesh):
        found = {
            name: observed.empty(math.prod(named[name].shape[1:][: adapters.contracted(name)]))
            for name in (products(named) if stream else ())
        }
        for x_BTD, rows in stream:
            out_BTD, found = _done(of_layer.observed(weights, x_BTD, rows, found))
            behind.append((out_BTD, rows))
        own = jax.tree.map(lambda leaf: _done(leaf[0]), named)
    layer = Layer(stack, index, *(jax.tree.map(_on_one_device, tree) for tree in (own, found)))
    changes = change(layer)
    if not changes:
        return weights, behind
    for name, leaf in changes.items():
        named[name] = _on_mesh(leaf, named[name], mesh)
    weights = trees.nest(named)
    with jax.set_mesh(mesh):
        return weights, [(_done(of_layer.plain(weights, *each)), each[1]) for each in stream]


def _on_one_device(leaf: jax.Array) -> jax.Array:
    """All of it. Communicates over the axes that split it."""
    whole = NamedSharding(leaf.sharding.mesh, PartitionSpec())
    return _done(jax.device_put(leaf, whole)).addressable_data(0)


def _on_mesh(leaf: Any, old: Any, mesh: Mesh) -> Any:
    """A weight of a layer [...] as one of a stack [1, ...], split as `old` if it has its shape."""

    def one(array):
        like = getattr(old, "shape", None) == (1, *array.shape)
        to = old.sharding if like else NamedSharding(mesh, PartitionSpec())
        return jax.device_put(array[None], to)

    return jax.tree.map(one, leaf)

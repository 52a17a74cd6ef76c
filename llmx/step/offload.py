"""Optimizer state in the memory of the host: fetched, updated and sent back layer by layer.

The moments of a layer are on the device only while the layer is updated (the placement of
ZeRO-Offload, arXiv 2101.06840, with the update itself on the device). The transfers of one array
run beside those of another and beside updates. Matrices outside the layers, embedding and head, are
updated whole, each by itself. Where memory kinds do nothing, as on CPU, the same program runs.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from llmx.model.remat import HOST_MEMORY
from llmx.sharding import trees
from llmx.step import moments

_LAYERS, _SMALL = "blocks/", ""  # parts of a tree; the others are matrices outside the layers


def in_host_memory(state: Any, params: Any) -> Any:
    """Shapes with shardings of an optimizer's state, the moments of matrices on the host.

    `params`: of which it is the state. Counters, vectors outside the blocks and what has one number
    per layer stay on the device.
    """
    names = set(trees.named(params))

    def one(path, leaf):
        if not _is_of_a_matrix(path, leaf, names):
            return leaf
        to = leaf.sharding.with_memory_kind(HOST_MEMORY)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=to)

    return jax.tree_util.tree_map_with_path(one, state)


def arrays_of_matrices(state: Any, params: Any) -> list[Any]:
    """The arrays of an optimizer's state that `in_host_memory` places there."""
    names, found = set(trees.named(params)), jax.tree_util.tree_leaves_with_path(state)
    return [leaf for path, leaf in found if _is_of_a_matrix(path, leaf, names)]


def _is_of_a_matrix(path: Any, leaf: Any, names: set[str]) -> bool:
    return leaf.ndim >= 2 and moments.owner_of(path, names) is not None


def layer_by_layer(apply: Callable, stages: int) -> Callable:
    """(accepted, gradients, (parameters, optimizer state, average)) -> the three: `apply` done for
    one layer after the other, and for each matrix outside the layers by itself.

    Args:
      apply: (accepted, gradients, (parameters, optimizer state, average), layers) -> the three,
        updated where bool [] `accepted`; `layers`, int32 [n], are the rows of blocks [L, ...] that
        it gets.
      stages: of a pipeline, each of which updates one of its layers at a time.
    """

    def update(accepted, gradients, old):
        params = trees.named(gradients)
        reads = _Arrays.of(gradients, params, stages)
        writes = _Arrays.of(old, params, stages)
        per_stage = reads.take(_LAYERS)[0].shape[1]

        def changed(part, number, mine):
            """The arrays of a part with the layer `number` of each stage updated, or without
            layers. What `apply` gives for other parts the compiler leaves out."""
            rows = number + per_stage * jnp.arange(stages, dtype=jnp.int32)
            given = reads.layer(number), writes.replaced(part, mine).layer(number)
            new = _Arrays(jax.tree.leaves(apply(accepted, *given, rows)), *writes[1:]).take(part)
            put = functools.partial(_put, number=number) if part == _LAYERS else _where
            return [put(old, leaf) for old, leaf in zip(mine, new, strict=True)]

        new = writes
        for part in dict.fromkeys(writes.parts):
            change = functools.partial(changed, part)
            if part == _LAYERS:
                mine = jax.lax.fori_loop(0, per_stage, change, writes.take(part))
            elif part == _SMALL:
                mine = change(0, writes.take(part))
            else:
                mine = _once_if(accepted, functools.partial(change, 0), writes.take(part))
            new = new.replaced(part, mine)
        return new.tree()

    return update


def _once_if(wanted: jax.Array, function: Callable, arrays: list) -> list:
    """`function(arrays)` if bool [] `wanted`, otherwise `arrays`.

    As a loop: what it fetches, the compiler does not fetch before `wanted` is known. Outside of one
    it would at the start of the step, and hold it beside the activations.
    """
    loop = jax.lax.while_loop(
        lambda state: state[0], lambda state: (False, function(state[1])), (wanted, arrays)
    )
    return loop[1]


class _Arrays(NamedTuple):
    """A tree, its arrays with a dimension of layers [L, ...] as [stages, L / stages, ...]."""

    leaves: list[jax.Array]
    parts: list[str]  # of each: `_LAYERS`, the name of a matrix outside them, or `_SMALL`
    structure: Any

    @classmethod
    def of(cls, tree: Any, params: dict, stages: int) -> "_Arrays":
        """`params`: those of which the tree has arrays, by name."""
        pairs, structure = jax.tree_util.tree_flatten_with_path(tree)

        def part_of(path, leaf):
            owner = moments.owner_of(path, params)
            if owner is None:
                return _SMALL
            if owner.startswith(_LAYERS):
                return _LAYERS if leaf.shape[:1] == params[owner].shape[:1] else _SMALL
            return owner if params[owner].ndim >= 2 else _SMALL

        parts = [part_of(path, leaf) for path, leaf in pairs]
        leaves = [
            leaf.reshape(stages, -1, *leaf.shape[1:]) if part == _LAYERS else leaf
            for (_, leaf), part in zip(pairs, parts, strict=True)
        ]
        return cls(leaves, parts, structure)

    def take(self, part: str) -> list[jax.Array]:
        """The arrays of a part."""
        return [leaf for leaf, of in zip(self.leaves, self.parts, strict=True) if of == part]

    def replaced(self, part: str, leaves: list[jax.Array]) -> "_Arrays":
        """With other arrays of a part."""
        new = iter(leaves)
        pairs = zip(self.leaves, self.parts, strict=True)
        return self._replace(leaves=[next(new) if of == part else leaf for leaf, of in pairs])

    def layer(self, number: jax.Array) -> Any:
        """The tree with one layer of each stage, [stages, ...], on the device."""

        def one(leaf, part):
            if part == _LAYERS:
                leaf = jax.lax.dynamic_index_in_dim(leaf, number, axis=1, keepdims=False)
            return jax.device_put(leaf, jax.memory.Space.Device)

        return self.structure.unflatten(map(one, self.leaves, self.parts))

    def tree(self) -> Any:
        """The tree with all layers."""
        return self.structure.unflatten(
            leaf.reshape(-1, *leaf.shape[2:]) if part == _LAYERS else leaf
            for leaf, part in zip(self.leaves, self.parts, strict=True)
        )


def _put(stack: jax.Array, new: jax.Array, number: jax.Array) -> jax.Array:
    """A stack [stages, layers, ...] with the layer `number` of each stage, in its memory."""
    return jax.lax.dynamic_update_slice_in_dim(stack, _where(stack, new[:, None]), number, axis=1)


def _where(old: jax.Array, new: jax.Array) -> jax.Array:
    """`new` in the memory of `old`."""
    return jax.device_put(new, jax.typeof(old).memory_space)

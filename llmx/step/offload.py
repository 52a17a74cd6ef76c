"""Optimizer state in the memory of the host: fetched, updated and sent back layer by layer.

The moments of a layer are on the device only while the layer is updated (the placement of
ZeRO-Offload, arXiv 2101.06840, with the update itself on the device). The transfers of one array
run beside those of another and beside updates. Embedding and head are updated whole, before the
layers. Where memory kinds do nothing, as on CPU, the same program runs.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from llmx.sharding import trees
from llmx.step import moments

KIND = "pinned_host"


def in_host_memory(state: Any, params: Any) -> Any:
    """Shapes with shardings of an optimizer's state, the moments of matrices on the host.

    `params`: of which it is the state. Counters, vectors outside the blocks and what has one number
    per layer stay on the device.
    """
    names = set(trees.named(params))

    def one(path, leaf):
        if leaf.ndim < 2 or moments.owner_of(path, names) is None:
            return leaf
        to = leaf.sharding.with_memory_kind(KIND)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=to)

    return jax.tree_util.tree_map_with_path(one, state)


def layer_by_layer(apply: Callable, stages: int) -> Callable:
    """(gradients, (parameters, optimizer state, average)) -> the three, updated: `apply` done for
    what is outside the blocks and then for one layer after the other.

    Args:
      apply: (gradients, (parameters, optimizer state, average), layers) -> the three, updated;
        `layers`, int32 [n], are the rows of blocks [L, ...] that it gets.
      stages: devices that share the layers, each of which updates one of its own at a time.
    """

    def update(gradients, old):
        params = trees.named(gradients)
        reads = _Layers.of(gradients, params, stages)
        writes = _Layers.of(old, params, stages)

        def new(number, stacks):
            """Of one layer of each stage, and of all that is outside: what is not used of it, the
            compiler leaves out."""
            rows = number + reads.per_stage * jnp.arange(stages, dtype=jnp.int32)
            given = reads.row(number, reads.stacks), writes.row(number, stacks)
            return apply(*given, rows)

        def body(number, stacks):
            return writes.put(stacks, new(number, stacks), number)

        outside = new(0, writes.stacks)
        stacks = jax.lax.fori_loop(0, reads.per_stage, body, writes.stacks)
        return writes.joined(stacks, outside)

    return update


class _Layers(NamedTuple):
    """A tree, of which some arrays are stacked by layers [L, ...]."""

    leaves: list
    structure: Any
    stacked: list[bool]
    stages: int

    @classmethod
    def of(cls, tree: Any, params: dict, stages: int) -> "_Layers":
        pairs, structure = jax.tree_util.tree_flatten_with_path(tree)

        def is_stacked(path, leaf):
            owner = moments.owner_of(path, params) or ""
            return owner.startswith("blocks/") and leaf.shape[:1] == params[owner].shape[:1]

        stacked = [is_stacked(path, leaf) for path, leaf in pairs]
        return cls([leaf for _, leaf in pairs], structure, stacked, stages)

    @property
    def stacks(self) -> list[jax.Array]:
        """The stacked arrays, [stages, L / stages, ...] each."""
        found = itertools.compress(self.leaves, self.stacked)
        return [leaf.reshape(self.stages, -1, *leaf.shape[1:]) for leaf in found]

    @property
    def per_stage(self) -> int:
        return self.stacks[0].shape[1]

    def row(self, number: jax.Array, stacks: list[jax.Array]) -> Any:
        """The tree with one layer of each stage, [stages, ...], on the device."""
        rows = iter(stacks)

        def one(leaf, stacked):
            if stacked:
                leaf = jax.lax.dynamic_index_in_dim(next(rows), number, axis=1, keepdims=False)
            return jax.device_put(leaf, jax.memory.Space.Device)

        return self.structure.unflatten(map(one, self.leaves, self.stacked))

    def put(self, stacks: list[jax.Array], row: Any, number: jax.Array) -> list[jax.Array]:
        """`stacks` with the layer `number` of a tree."""
        rows = itertools.compress(jax.tree.leaves(row), self.stacked)

        def one(stack, row):
            row = _where(stack, row[:, None])
            return jax.lax.dynamic_update_slice_in_dim(stack, row, number, axis=1)

        return [one(stack, row) for stack, row in zip(stacks, rows, strict=True)]

    def joined(self, stacks: list[jax.Array], outside: Any) -> Any:
        """The tree of these layers, and of what is outside."""
        whole = iter(stacks)
        pairs = zip(self.leaves, jax.tree.leaves(outside), self.stacked, strict=True)
        return self.structure.unflatten(
            next(whole).reshape(leaf.shape) if stacked else _where(leaf, other)
            for leaf, other, stacked in pairs
        )


def _where(old: jax.Array, new: jax.Array) -> jax.Array:
    """`new` in the memory of `old`."""
    return jax.device_put(new, jax.typeof(old).memory_space)

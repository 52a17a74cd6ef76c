"""NamedShardings of any pytree, from the logical axes of its leaves and a layout's table."""

import functools
import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from llmx.sharding import layouts, trees
from llmx.sharding.layouts import Layout

# A key under which Flax variables carry their axis names: llmx's own, then the ones of Flax NNX.
_METADATA_KEYS = ("axes", "out_sharding", "sharding_names", "sharding")


def logical_axes(tree: Any, rules: Any = None) -> Any:
    """The logical axes of every leaf of `tree`, as a tree of tuples in the same structure.

    `rules` is one of
      None: read Flax metadata, of NNX variables (metadata "axes", "out_sharding", "sharding_names"
        or "sharding") or of Linen boxes (`names`). A leaf without any is not split.
      a tree of tuples of names, in the structure of `tree`.
      a sequence of (regular expression, names): the first whose expression is found in the leaf's
        path ("decoder/0/kernel") gives its axes.

    Raises ValueError for a leaf that no rule matches, or where neither Flax nor `rules` name axes.
    """
    if rules is None:
        if not any(map(_is_boxed, jax.tree.leaves(tree, is_leaf=_is_boxed))):
            raise ValueError(
                "no leaf carries logical axes in Flax metadata: give rules=, a tree of tuples "
                "of names or (path regex, names) rules"
            )
        return jax.tree.map(_axes_from_metadata, tree, is_leaf=_is_boxed)
    tree = jax.tree.map(_unboxed, tree, is_leaf=_is_boxed)
    if _is_rule_list(rules):
        return jax.tree_util.tree_map_with_path(functools.partial(_axes_from_rules, rules), tree)
    return jax.tree.map(lambda _, axes: tuple(axes), tree, rules)


def shardings(
    abstract_tree: Any, mesh: Mesh, layout: Layout, *, rules: Any = None, table: str = "parameters"
) -> Any:
    """NamedShardings for every leaf of a tree of arrays or ShapeDtypeStructs.

    Args:
      abstract_tree: any pytree; boxed leaves (Flax NNX variables, Linen boxes) count as one leaf.
      mesh, layout: one of `LAYOUTS`, or your own `Layout`.
      rules: where the logical axes come from: see `logical_axes`.
      table: of the layout: "parameters", "gradients", "optimizer" or "activations".

    Raises ValueError, naming the leaf, for whatever `spec` refuses.
    """

    def one(path, leaf, names):
        names = names or (None,) * len(leaf.shape)  # scalars, counters: not split
        try:
            to = layouts.spec(names, vars(layout)[table], mesh, shape=leaf.shape)
        except ValueError as error:
            raise ValueError(f"{trees.path_name(path)}: {error}") from None
        return NamedSharding(mesh, to)

    axes = logical_axes(abstract_tree, rules)
    tree = jax.tree.map(_unboxed, abstract_tree, is_leaf=_is_boxed)
    return jax.tree_util.tree_map_with_path(one, tree, axes)


def _is_boxed(leaf: Any) -> bool:
    """Whether `leaf` has the methods of an NNX variable or a Linen box; Flax is not imported."""
    return hasattr(leaf, "get_metadata") or (hasattr(leaf, "names") and hasattr(leaf, "unbox"))


def _unboxed(leaf: Any) -> Any:
    if not _is_boxed(leaf):
        return leaf
    return leaf.unbox() if hasattr(leaf, "unbox") else leaf.get_value()


def _axes_from_metadata(leaf: Any) -> tuple[str | None, ...]:
    if hasattr(leaf, "get_metadata"):
        metadata = leaf.get_metadata()
        return tuple(next((metadata[key] for key in _METADATA_KEYS if metadata.get(key)), ()))
    return tuple(leaf.names) if hasattr(leaf, "names") else ()


def _is_rule_list(rules: Any) -> bool:
    return isinstance(rules, Sequence) and all(
        isinstance(rule, tuple) and list(map(type, rule)) == [str, tuple] for rule in rules
    )


def _axes_from_rules(rules: Sequence[tuple[str, tuple]], path: Sequence[Any], leaf: Any) -> tuple:
    name = trees.path_name(path)
    for pattern, axes in rules:
        if re.search(pattern, name):
            return tuple(axes)
    raise ValueError(
        f"no rule matches {name} of shape {tuple(leaf.shape)}: add one, or end the rules with "
        '(".*", ()) to leave the rest whole'
    )

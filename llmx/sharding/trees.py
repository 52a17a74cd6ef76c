"""Trees of arrays as flat dicts from path to leaf, and back: the form of checkpoints on disk."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax


def named(tree: Any) -> dict[str, Any]:
    """{"params/layers/w": leaf}: every leaf by its path; ValueError where two have the same."""
    leaves = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = path_name(path) or "value"
        if name in leaves:
            raise ValueError(f"two leaves of the state have the path {name!r}: rename one of them")
        leaves[name] = leaf
    return leaves


def nest(leaves: Mapping[str, Any]) -> dict:
    """{"a/b": x} as {"a": {"b": x}}: so Orbax names the arrays on disk.

    Raises ValueError where a path is also the beginning of another.
    """
    tree: dict = {}
    for name, leaf in leaves.items():
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise ValueError(f"{name!r} lies under another leaf: rename one of them")
        if last in node:
            raise ValueError(f"{name!r} lies over another leaf of the state: rename one of them")
        node[last] = leaf
    return tree


def unnamed(values: Mapping[str, Any], like: Any) -> Any:
    """The reverse of `named`: the leaves of `values` in the structure of `like`."""
    return jax.tree.unflatten(jax.tree.structure(like), [values[name] for name in named(like)])


def path_name(path: Sequence[Any]) -> str:
    """A pytree path as text: "blocks/attention/query"."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")

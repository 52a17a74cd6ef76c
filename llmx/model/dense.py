"""The plain model that computes the same: factors multiplied, layers repeated, tables made whole.

For formats that know one weight a product and one set of weights a layer.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from llmx.model import ranks
from llmx.model.families import ModelConfig


def is_dense(model: ModelConfig) -> bool:
    """Whether a model is plain already."""
    return not model.ranks and model.repeats == 1 and not model.embedding_rank


def dense_model(model: ModelConfig) -> ModelConfig:
    """The plain model: with as many layers as a token goes through."""
    pattern = tuple(kind for kind in model.layer_pattern for _ in range(model.repeats))
    return dataclasses.replace(
        model, ranks=(), repeats=1, embedding_rank=0,
        embedding_cores=ModelConfig().embedding_cores, num_layers=model.num_layers * model.repeats,
        first_dense=model.num_first * model.repeats, layer_pattern=pattern,
    )  # fmt: skip


def dense_params(params: Mapping[str, Any], model: ModelConfig) -> dict[str, Any]:
    """The plain model's parameters, on the host, fp32 where they are made."""
    found = {}
    for name, tree in params.items():
        if name == "embedding" and model.embedding_rank:
            found[name] = table_of_train([tree[core] for core in sorted(tree)], model)
        elif name in ("blocks", "first"):
            found[name] = _repeated(_multiplied(tree), model.repeats)
        else:
            found[name] = tree
    return found


def _multiplied(tree: Any) -> Any:
    if not isinstance(tree, Mapping):
        return jax.tree.map(np.asarray, tree)  # packed weights have parts
    if set(tree) == {ranks.DOWN, ranks.UP} and not isinstance(tree[ranks.UP], Mapping):
        down, up = (np.asarray(tree[name], np.float32) for name in (ranks.DOWN, ranks.UP))
        return np.stack([np.tensordot(a, b, axes=1) for a, b in zip(down, up, strict=True)])
    return {name: _multiplied(leaf) for name, leaf in tree.items()}


def _repeated(tree: Any, repeats: int) -> Any:
    if isinstance(tree, Mapping):
        return {name: _repeated(leaf, repeats) for name, leaf in tree.items()}
    return jax.tree.map(lambda leaf: np.repeat(leaf, repeats, axis=0), tree)


def table_of_train(cores: list[Any], model: ModelConfig) -> np.ndarray:
    """The table [V, D] of a train of tensors, padding of the vocabulary included."""
    whole = np.asarray(cores[0], np.float32)
    for core in cores[1:]:
        whole = np.einsum("avdr,rwes->avwdes", whole, np.asarray(core, np.float32))
        _, v, w, d, e, s = whole.shape
        whole = whole.reshape(1, v * w, d * e, s)
    return whole[0, : model.padded_vocab, :, 0]

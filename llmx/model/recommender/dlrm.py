"""DLRM: products of all pairs of rows, beside a network over the numbers (arXiv 1906.00091).

Letters: B records, F numbers, N vectors of a record, D width of a row.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from llmx.model.recommender import layers
from llmx.model.recommender.config import RecommenderConfig


def make(
    config: RecommenderConfig, *, num_dense: int, lengths: Mapping[str, int]
) -> tuple[Callable, Callable]:
    """(init, logits); see `recommender.Recommender`."""
    num_vectors = len(lengths) + bool(num_dense)
    lower = np.tril_indices(num_vectors, -1)
    num_products = num_vectors * (num_vectors - 1) // 2
    bottom = (num_dense, *config.bottom)
    top = (config.width * bool(num_dense) + num_products, *config.top)

    def init(key: Array) -> dict[str, Array]:
        keys = jax.random.split(key, 3)
        return {
            **(layers.init_layers(keys[0], "bottom", bottom) if num_dense else {}),
            **layers.init_layers(keys[1], "top", top),
            **layers.init_linear(keys[2], "logit", top[-1], 1),
        }

    def logits(params: dict, dense_BF: Array, embedded: dict, present: Mapping = {}) -> Array:
        vectors = [embedded[name] for name in lengths]
        whole = []
        if num_dense:
            of_numbers_BD = layers.layers(
                params, "bottom", dense_BF, len(config.bottom), layers.with_relu
            )
            vectors, whole = [of_numbers_BD, *vectors], [of_numbers_BD]
        vectors_BND = jnp.stack(vectors, axis=1)
        products_BNN = jnp.einsum("BND,BMD->BNM", vectors_BND, vectors_BND)
        both = jnp.concatenate([*whole, products_BNN[:, *lower]], axis=1)
        hidden = layers.layers(params, "top", both, len(config.top), layers.with_relu)
        return layers.linear(params, "logit", hidden)[:, 0]

    return init, logits

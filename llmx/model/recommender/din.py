"""DIN: the rows of a history, each weighed by how it goes with the candidate (arXiv 1706.06978).

The weight of a row h for the candidate c is a small network's of (c, h, c - h, c * h). Weights are
not normalised: they say how strong an interest is. Layers have PReLU, of the paper's two, in the
top; its other one, Dice, makes a record's output depend on the others of its batch.

Letters: B records, F numbers, L ids of a history, D width of a row.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array

from llmx.model.recommender import config as config_lib
from llmx.model.recommender import layers
from llmx.model.recommender.config import RecommenderConfig


def make(
    config: RecommenderConfig, *, num_dense: int, lengths: Mapping[str, int]
) -> tuple[Callable, Callable]:
    """(init, logits); see `recommender.Recommender`."""
    candidates = config_lib.pairs(config)
    bottom = (num_dense, *config.bottom)
    top = (len(lengths) * config.width + bottom[-1], *config.top)
    attention = (4 * config.width, *config.attention)

    def init(key: Array) -> dict[str, Array]:
        keys = jax.random.split(key, 3 + len(candidates))
        params = layers.init_layers(keys[0], "bottom", bottom)
        params |= layers.init_layers(keys[1], "top", top, slopes=True)
        params |= layers.init_linear(keys[2], "logit", top[-1], 1)
        for one, history in zip(keys[3:], candidates, strict=True):
            first, second = jax.random.split(one)
            params |= layers.init_layers(first, f"attention.{history}", attention)
            params |= layers.init_linear(second, f"attention.{history}.last", attention[-1], 1)
        return params

    def interest(params: dict, name: str, rows_BLD: Array, candidate_BD: Array, there_BL: Array):
        """The weighted sum of a history's rows, [B, D]."""
        candidate_BLD = jnp.broadcast_to(candidate_BD[:, None], rows_BLD.shape)
        parts = (candidate_BLD, rows_BLD, candidate_BLD - rows_BLD, candidate_BLD * rows_BLD)
        hidden = layers.layers(
            params, f"attention.{name}", jnp.concatenate(parts, axis=-1), len(config.attention),
            layers.with_sigmoid,
        )  # fmt: skip
        weights_BL = layers.linear(params, f"attention.{name}.last", hidden)[..., 0]
        weights_BL = jnp.where(there_BL, weights_BL, 0)
        return jnp.einsum("BL,BLD->BD", weights_BL, rows_BLD)

    def logits(params: dict, dense_BF: Array, embedded: dict, present: Mapping) -> Array:
        vectors = [
            interest(params, name, embedded[name], embedded[candidates[name]], present[name])
            if name in candidates else embedded[name]
            for name in lengths
        ]  # fmt: skip
        numbers = layers.layers(params, "bottom", dense_BF, len(config.bottom), layers.with_relu)
        x = jnp.concatenate([numbers, *vectors], axis=1)
        hidden = layers.layers(params, "top", x, len(config.top), layers.with_prelu)
        return layers.linear(params, "logit", hidden)[:, 0]

    return init, logits

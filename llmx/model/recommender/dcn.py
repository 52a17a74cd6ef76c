"""DCN-v2: layers that multiply what they get by the input, feature by feature (arXiv 2008.13535).

A cross layer is x <- x0 * (W x + b) + x, of x0 = the rows and the numbers side by side. Of a low
rank, W = U V. "stacked", the top takes what the cross layers return; "parallel", it takes x0, and
the logit is of both.

Letters: B records, F numbers, X width of x0, R rank.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array

from llmx.model.recommender import layers
from llmx.model.recommender.config import RecommenderConfig


def make(
    config: RecommenderConfig, *, num_dense: int, lengths: Mapping[str, int]
) -> tuple[Callable, Callable]:
    """(init, logits); see `recommender.Recommender`."""
    bottom = (num_dense, *config.bottom)
    width, rank = len(lengths) * config.width + bottom[-1], config.cross_rank
    top = (width, *config.top)
    last = top[-1] + (width if config.structure == "parallel" else 0)

    def init_cross(key: Array, name: str) -> dict[str, Array]:
        if not rank:
            return layers.init_linear(key, name, width, width)
        first, second = jax.random.split(key)
        down = layers.init_linear(first, name, width, rank)[f"{name}.weight"]
        return {f"{name}.down": down, **layers.init_linear(second, name, rank, width)}

    def init(key: Array) -> dict[str, Array]:
        keys = jax.random.split(key, 3 + config.cross_layers)
        params = layers.init_layers(keys[0], "bottom", bottom)
        params |= layers.init_layers(keys[1], "top", top)
        params |= layers.init_linear(keys[2], "logit", last, 1)
        for at in range(config.cross_layers):
            params |= init_cross(keys[3 + at], f"cross.{at}")
        return params

    def crossed(params: dict, x0_BX: Array) -> Array:
        x_BX = x0_BX
        for at in range(config.cross_layers):
            y_BR = x_BX @ params[f"cross.{at}.down"] if rank else x_BX
            x_BX = x0_BX * layers.linear(params, f"cross.{at}", y_BR) + x_BX
        return x_BX

    def logits(params: dict, dense_BF: Array, embedded: dict, present: Mapping = {}) -> Array:
        numbers = layers.layers(params, "bottom", dense_BF, len(config.bottom), layers.with_relu)
        x0_BX = jnp.concatenate([numbers, *(embedded[name] for name in lengths)], axis=1)
        crossed_BX = crossed(params, x0_BX)
        stacked = config.structure == "stacked"
        hidden = layers.layers(
            params, "top", crossed_BX if stacked else x0_BX, len(config.top), layers.with_relu
        )
        if not stacked:
            hidden = jnp.concatenate([crossed_BX, hidden], axis=1)
        return layers.linear(params, "logit", hidden)[:, 0]

    return init, logits

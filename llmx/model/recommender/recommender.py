"""A model of clicks as functions of its parameters, by the name in the config.

Letters: B records, F numbers, L ids of a history, D width of a row.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from llmx.model.recommender import config as config_lib
from llmx.model.recommender import dcn, din, dlrm, layers
from llmx.model.recommender.config import RecommenderConfig


class Recommender(NamedTuple):
    """A model made of functions; parameters are a flat dict by path."""

    init: Callable  # key -> parameters, fp32
    axes: Mapping[str, tuple[str | None, ...]]  # logical axes of each parameter
    # (params, dense_BF, {feature: rows [B, D] or [B, L, D]}, {history: bool [B, L]}) -> log odds of
    # a click [B]. The last dict says which ids of a history there are.
    logits: Callable


_MAKERS = {"dlrm": dlrm.make, "dcn": dcn.make, "din": din.make}


def make(config: RecommenderConfig, *, num_dense: int, lengths: Mapping[str, int]) -> Recommender:
    """The model of the config.

    Args:
      num_dense: numbers of a record, F.
      lengths: of each feature, in the order in which the model takes them, 0 where its rows are
        combined to one, else its number of ids, L.

    Raises ValueError for a config that does not fit.
    """
    wrong = list(config_lib.problems(config, num_dense=num_dense, lengths=lengths))
    if config.name not in _MAKERS:
        wrong.append(f"recommender.name={config.name!r} is no model: use {', '.join(_MAKERS)}")
    if wrong:
        raise ValueError("\n".join(wrong))
    init, logits = _MAKERS[config.name](config, num_dense=num_dense, lengths=lengths)
    shapes = jax.eval_shape(init, jax.random.key(0))
    return Recommender(init, layers.axes_of(shapes), logits)


def losses(
    logit_B: Float[Array, " B"], label_B: Float[Array, " B"]
) -> tuple[Float[Array, " B"], Float[Array, " B"]]:
    """The cross-entropy of each label, 0 or 1, in nats, and log Z of the odds (1, e^logit)."""
    logit_B = logit_B.astype(jnp.float32)
    log_z_B = jax.nn.softplus(logit_B)
    return log_z_B - label_B * logit_B, log_z_B

"""Losses of pairs of answers, of which one is preferred to the other.

A row of a batch holds a pair: the chosen text is segment 1, the rejected one segment 2. With r the
log-likelihood of a text's learned tokens, less that by the reference model,

    DPO  -log sigmoid(beta (r_chosen - r_rejected))        arXiv 2305.18290, equation 7
    IPO  (r_chosen - r_rejected - 1 / (2 beta))^2           arXiv 2310.12036, equation 17

The reference is the model as it was when the run began, `State.frozen`; beside adapters that is
what they are trained beside. Letters: B rows, T positions.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from llmx.data import pairs
from llmx.data.pairs import CHOSEN_SEGMENT as CHOSEN
from llmx.data.pairs import REJECTED_SEGMENT as REJECTED
from llmx.runtime.bounds import bounded, choice

NONE = "none"
REFERENCE, PAIR = "reference", "pair"  # in a batch, fp32 [B, T]
REPORTED = ("accuracy", "margin")


@dataclasses.dataclass
class PreferenceConfig:
    """What is minimized where data.format="preference"."""

    # "dpo" | "ipo" | "none": the nats of both texts, as of conversations
    loss: str = choice("dpo", lambda: (*LOSSES, NONE))
    beta: float = bounded(0.1, above=0)  # how much a difference from the reference costs
    # dpo: the share of pairs that are taken to be labelled the wrong way round (arXiv 2305.18290,
    # cDPO)
    label_smoothing: float = bounded(0.0, at_least=0, at_most=0.5)
    # beside it: of the chosen text's loss in nats per token, so that it stays likely (2404.19733)
    chosen_weight: float = bounded(0.0, at_least=0)


def is_minimized(data_format: str, loss: str) -> bool:
    """Whether a run with these `data.format` and `preference.loss` minimizes a loss of pairs."""
    return data_format == pairs.FORMAT and loss != NONE


def _dpo(config: PreferenceConfig, margin_B: Array) -> Array:
    scaled_B, smoothing = config.beta * margin_B, config.label_smoothing
    wrong_B = jax.nn.softplus(scaled_B) * smoothing
    return jax.nn.softplus(-scaled_B) * (1 - smoothing) + wrong_B


def _ipo(config: PreferenceConfig, margin_B: Array) -> Array:
    return jnp.square(margin_B - 1 / (2 * config.beta))


LOSSES = {"dpo": _dpo, "ipo": _ipo}


def has_pair(batch: Mapping[str, Array]) -> Float[Array, " B"]:
    """1 for rows in which both texts have learned tokens, else 0: padding."""
    learned_BT = batch["weights"] > 0
    of = lambda segment: jnp.any(learned_BT & (batch["segment_ids"] == segment), axis=1)  # noqa: E731
    return (of(CHOSEN) & of(REJECTED)).astype(jnp.float32)


def with_reference(batch: Mapping[str, Array], nats_BT: Array) -> dict[str, Any]:
    """A batch with the reference's losses, and in each row the share of its pair: 1 / (number of
    pairs of the batch), or 0."""
    pair_B = has_pair(batch)
    share_B = pair_B / jnp.maximum(pair_B.sum(), 1.0)
    share_BT = share_B[:, None] * jnp.ones_like(batch["weights"])
    return {**batch, REFERENCE: jax.lax.stop_gradient(nats_BT), PAIR: share_BT}


def margins(batch: Mapping[str, Array], nats_BT: Array) -> Float[Array, " B"]:
    """r_chosen - r_rejected of each row, from the losses of its tokens in nats."""
    segments_BT = batch["segment_ids"]
    sign_BT = jnp.where(segments_BT == CHOSEN, 1.0, jnp.where(segments_BT == REJECTED, -1.0, 0.0))
    gained_BT = batch[REFERENCE] - nats_BT
    return jnp.sum(sign_BT * batch["weights"] * gained_BT, axis=1)


def shares(batch: Mapping[str, Array]) -> Float[Array, " B"]:
    """Of each row's pair, see `with_reference`."""
    return batch[PAIR].max(axis=1)


def losses(
    config: PreferenceConfig, batch: Mapping[str, Array], nats_BT: Array
) -> tuple[Array, dict[str, Array]]:  # fmt: skip
    """The mean loss of the batch's pairs, fp32 [], or the part of it that these rows add; and what
    is reported: how often the chosen text gained more than the rejected one, and beta (r_chosen -
    r_rejected), `margin`."""
    margin_B, share_B = margins(batch, nats_BT), shares(batch)
    mean = lambda values_B: jnp.sum(share_B * values_B)  # noqa: E731
    reported = {
        "accuracy": mean((margin_B > 0).astype(jnp.float32)),
        "margin": mean(config.beta * margin_B),
    }
    loss_B = LOSSES[config.loss](config, margin_B)
    if config.chosen_weight:
        chosen_BT = jnp.where(batch["segment_ids"] == CHOSEN, batch["weights"], 0)
        tokens_B = jnp.maximum(chosen_BT.sum(axis=1), 1)
        loss_B += config.chosen_weight * jnp.sum(chosen_BT * nats_BT, axis=1) / tokens_B
    return mean(loss_B), jax.lax.stop_gradient(reported)

"""Which experts a token goes to, with which weights, and what keeps the loads of experts equal.

A token's scores of E experts are the softmax or the sigmoid of its logits. It goes to the k with
the largest sums of score and bias, and the results of these are added up, weighted by their scores
alone. `renormalize` divides these k by their sum: of softmax scores they are then the softmax over
the chosen. With groups, a token first chooses groups of neighboring experts, by their best score
(softmax) or the sum of their best two (sigmoid), and its experts among theirs.

The balance loss of a token is sum_e f_e p_e, where p are its scores (their sum is 1) and f_e is the
load of expert e in its sequence or in the whole batch, as a multiple of an equal share. Averaged
over these tokens it is the loss of the Switch Transformer (arXiv 2101.03961, times E) and of
DeepSeek (arXiv 2412.19437, equation 17): 1 where loads are equal. It is a loss of each token, so
it is summed over tokens as the loss is, however they are split over devices and microbatches.

The bias has no gradient. Its gradient buffer carries the loads of a batch, and the optimizer moves
it against them (`llmx.step.balance`).

Letters: B batch, T positions, D width, E experts, k experts of a token.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from llmx import sharding
from llmx.model import dot, remat
from llmx.model.experts import config as experts_config
from llmx.model.experts.config import ExpertsConfig
from llmx.model.families import SIGMOID, ModelConfig

_TINY = 1e-20  # added to the sum that weights are divided by: sigmoids may all be 0


def is_loads(path: tuple) -> bool:
    """Whether a leaf of a tree like the parameters is the bias by which experts are chosen, whose
    gradient is their loads. `path`: its keys."""
    return [getattr(key, "key", None) for key in path[-2:]] == ["mlp", "bias"]


class Routing(NamedTuple):
    """Where each token goes."""

    experts_BTk: Int[Array, "B T k"]  # numbers of experts
    weights_BTk: Float[Array, "B T k"]  # fp32


def route(
    model: ModelConfig, logits_BTE: Float[Array, "B T E"], bias_E: Float[Array, " E"]
) -> tuple[Routing, Float[Array, "B T E"]]:
    """The routing of each token, and its scores, fp32, whose sum is 1."""
    if model.router == SIGMOID:
        scores_BTE = jax.nn.sigmoid(logits_BTE)
        shares_BTE = scores_BTE / (scores_BTE.sum(axis=-1, keepdims=True) + _TINY)
    else:
        scores_BTE = shares_BTE = jax.nn.softmax(logits_BTE, axis=-1)
    chosen_by_BTE = jax.lax.stop_gradient(dot.shifted(scores_BTE, bias_E))
    experts_BTk = choose(model, chosen_by_BTE)
    # Not chosen again where layers are run again: another rounding could choose otherwise.
    experts_BTk = _saved(experts_BTk)
    weights_BTk = _taken(scores_BTE, experts_BTk)
    if model.router_renormalize:
        weights_BTk = weights_BTk / (weights_BTk.sum(axis=-1, keepdims=True) + _TINY)
    return Routing(experts_BTk, model.router_scale * weights_BTk), shares_BTE


def _saved(experts_BTk: Array) -> Array:
    """The same, saved under every policy: as [B, T k], since TPUs fill up rows of k numbers to
    128."""
    B, T, k = experts_BTk.shape
    to = sharding.split_only(jax.typeof(experts_BTk).sharding.spec)
    flat = jnp.reshape(experts_BTk, (B, T * k), out_sharding=PartitionSpec(*to.partitions[:2]))
    return jnp.reshape(checkpoint_name(flat, remat.ROUTING), (B, T, k), out_sharding=to)


def choose(model: ModelConfig, scores_BTE: Array) -> Int[Array, "B T k"]:
    """The numbers of each token's experts, by these scores."""
    groups, E = model.router_groups, model.num_experts
    if groups > 1:
        to = sharding.split_only(jax.typeof(scores_BTE).sharding.spec)
        in_groups = (*scores_BTE.shape[:2], groups, E // groups)
        spec = sharding.split_as(to, *to.partitions, None)
        scores_BTGe = jnp.reshape(scores_BTE, in_groups, out_sharding=spec)
        best = 2 if model.router == SIGMOID else 1  # DeepSeek-V3, and V2
        best_BTG = jax.lax.top_k(scores_BTGe, min(best, E // groups))[0].sum(axis=-1)
        kept_BTg = jax.lax.top_k(best_BTG, model.router_groups_kept)[1]
        is_kept_BTG = (kept_BTg[..., None] == jnp.arange(groups)).any(axis=-2)
        masked = jnp.where(is_kept_BTG[..., None], scores_BTGe, -jnp.inf)
        scores_BTE = jnp.reshape(masked, scores_BTE.shape, out_sharding=to)
    return jax.lax.top_k(scores_BTE, model.experts_per_token)[1].astype(jnp.int32)


def _taken(scores_BTE: Array, experts_BTk: Array) -> Array:
    """The scores of the chosen experts, without a scatter in the backward pass."""
    chosen_BTkE = experts_BTk[..., None] == jnp.arange(scores_BTE.shape[-1])
    return jnp.sum(jnp.where(chosen_BTkE, scores_BTE[..., None, :], 0), axis=-1)


def loads(experts_BTk: Array, counted_BT: Array, num_experts: int) -> Float[Array, "B T E"]:
    """By token and expert, 1 where the token counts and goes there, fp32."""
    chosen_BTE = (experts_BTk[..., None] == jnp.arange(num_experts)).any(axis=-2)
    return jnp.where(counted_BT[..., None], chosen_BTE, False).astype(jnp.float32)


def router_losses(
    config: ExpertsConfig, logits_BTE: Array, shares_BTE: Array, loads_BTE: Array,
    experts_per_token: int,
) -> Float[Array, "B T"]:  # fmt: skip
    """What the balance loss and the router's z-loss add to the loss of each token, fp32.

    Communicates over the axes that split the positions, or with "batch" also over those that split
    rows: loads of experts.
    """
    losses_BT = jnp.zeros_like(logits_BTE[..., 0])
    if config.balance != experts_config.NONE and config.balance_weight:
        rows = (1,) if config.balance == experts_config.SEQUENCE else (0, 1)
        loads_B1E = jax.lax.stop_gradient(loads_BTE.sum(axis=rows, keepdims=True))
        tokens_B11 = loads_B1E.sum(axis=-1, keepdims=True) / experts_per_token
        share = experts_per_token / logits_BTE.shape[-1]
        fractions_B1E = loads_B1E / (share * jnp.maximum(tokens_B11, 1))
        losses_BT += config.balance_weight * jnp.sum(fractions_B1E * shares_BTE, axis=-1)
    if config.z_weight:
        losses_BT += config.z_weight * jnp.square(jax.nn.logsumexp(logits_BTE, axis=-1))
    return losses_BT


@jax.custom_vjp
def attach(
    y_BTD: Array, losses_BT: Array, share_BT: Array, bias_E: Array, experts_BTk: Array
) -> Array:
    """y, with which losses of tokens are minimized and loads are handed out.

    As if `sum(losses * share)` were added to what is differentiated; the gradient of the bias is
    the number of tokens, of those with a share, that go to each expert. So neither goes through
    layers, stages and loops.

    The backward pass communicates as that of `dot.shifted` does.
    """
    return y_BTD


def _attached(residuals, gradient_BTD):
    share_BT, bias_E, experts_BTk = residuals
    loads_BTE = loads(experts_BTk, share_BT > 0, bias_E.shape[0])
    return gradient_BTD, share_BT, None, dot.summed_rows(loads_BTE, bias_E), None


attach.defvjp(lambda y_BTD, _, *kept: (y_BTD, kept), _attached)

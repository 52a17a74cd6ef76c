"""The decoder's modules: every family is values of one `ModelConfig`.

Flax NNX defines the modules and makes their parameters; from there on a model is a dict of arrays
and functions of it (`llmx.model.apply`). Layers with equal parameters are stacked along a leading
dimension: all, or the dense first ones of a mixture and the others. The model names logical axes
and knows no mesh axis and no layout.

Letters: B batch, T positions, S cache positions, D width, F mlp_dim, N query heads, K key/value
heads, H head size, V vocabulary, L layers; E experts, k of a token; of latent attention R a latent,
P rotated numbers of a head, V those of its value, W = R + P.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from llmx.model import dot, families, packed, ranks, remat, rope, tensor_train
from llmx.model.activations import hidden
from llmx.model.attention import attend
from llmx.model.attention.cache import read_slots, write_slots
from llmx.model.attention.masks import Scores
from llmx.model.execution import Execution
from llmx.model.experts import experts, router
from llmx.model.experts.config import CAPACITY, DENSE
from llmx.model.quantized import UNROUNDED

# Activations between blocks, and inside them, in logical axes.
BLOCK = ("batch", "block_sequence", "embed")
INSIDE = ("batch", "sequence", "embed")
HIDDEN = ("batch", "sequence", "mlp")
LATENT, LATENT_INSIDE = ("batch", "block_sequence", "latent"), ("batch", "sequence", "latent")
LOGITS = ("batch", "block_sequence", "router")
# Tables of which rows are looked up: products never take them whole, unless one is the head too.
LOOKED_UP = ("embedding", "positions")


def _weight(rngs: nnx.Rngs, shape: tuple, axes: tuple, std: float) -> nnx.Param:
    value = std * jax.random.truncated_normal(rngs.params(), -3, 3, shape, jnp.float32)
    return nnx.Param(value, axes=axes)


def _constant(value: float, shape: tuple, axes: tuple) -> nnx.Param:
    return nnx.Param(jnp.full(shape, value, jnp.float32), axes=axes)


class Norm(nnx.Module):
    """RMSNorm (arXiv 1910.07467) or LayerNorm (arXiv 1607.06450), last dimensions, in fp32.

    Communicates over the mesh axes that split these: sums of squares.
    """

    def __init__(
        self, model: families.ModelConfig, shape: tuple[int, ...], axes: tuple[str, ...] = ("norm",)
    ):
        self.eps, self.centered = model.norm_eps, model.norm == "layer"
        self.plus_one = model.norm_plus_one
        self.over = tuple(range(-len(shape), 0))
        self.scale = _constant(0.0 if self.plus_one else 1.0, shape, axes)
        self.bias = _constant(0.0, shape, axes) if self.centered else None

    def __call__(self, x: Array) -> Array:
        y = x.astype(jnp.float32)
        if self.centered:
            y = y - y.mean(axis=self.over, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.square(y).mean(axis=self.over, keepdims=True) + self.eps)
        # y (1 + scale) is y + y scale.
        scaled = dot.scaled(y, self.scale[...])
        y = y + scaled if self.plus_one else scaled
        if self.bias is not None:
            y = dot.shifted(y, self.bias[...])
        return y.astype(x.dtype)


class Factors(nnx.Module):
    """A weight of low rank: A [in, rank] and B [rank, out], of the variance that it would have.

    Of each factor one dimension is split over replicas, as the width is: the width itself, or where
    a factor has none, the rank.
    """

    def __init__(self, rngs, shape, axes, std: float, *, contracted: int, rank: int):
        into, out = axes[:contracted], axes[contracted:]
        name = lambda axes: "rank" if "embed" in axes else "embed"  # noqa: E731
        self.down = _weight(rngs, (*shape[:contracted], rank), (*into, name(into)), std)
        up = (rank, *shape[contracted:]), (name(out), *out)
        self.up = _weight(rngs, *up, 1 / math.sqrt(rank))


class Projection(nnx.Module):
    """One weight, and a bias where the family has them; multiplied by `dot.dot`."""

    def __init__(
        self, rngs, save: str, shape, axes, *, bias: bool, contracted: int = 1, scale: float = 1.0,
        rank: int | None = None,
    ):  # fmt: skip
        self.save = save  # the name of the product in `remat.SAVES`
        std = scale / math.sqrt(math.prod(shape[:contracted]))
        self.kernel = (
            _weight(rngs, shape, axes, std) if not rank
            else Factors(rngs, shape, axes, std, contracted=contracted, rank=rank)
        )  # fmt: skip
        # A bias along the width is small and stays whole, as norms do.
        axes = tuple("norm" if axis == "embed" else axis for axis in axes[contracted:])
        self.bias = _constant(0.0, shape[contracted:], axes) if bias else None

    def __call__(
        self, expression: str, x: Array, out: tuple, execution: Execution, *,
        fixed_from: int | None = None,
    ) -> Array:  # fmt: skip
        """`fixed_from`: the first number of the last dimension whose bias has no gradient."""
        to = execution.place.activation(out)
        y = dot.dot(
            expression, x, self._weight(), out=to, policy=execution.policy,
            recomputed=execution.recomputed,
        )  # fmt: skip
        y = checkpoint_name(y, self.save)
        if self.bias is None:
            return y
        if fixed_from is None or fixed_from == y.shape[-1]:
            return dot.shifted(y, self.bias[...])
        fixed = dot.shifted(y, jax.lax.stop_gradient(self.bias[...]))
        if not fixed_from:
            return fixed
        learned = dot.shifted(y, self.bias[...])
        return jnp.concatenate([learned[..., :fixed_from], fixed[..., fixed_from:]], axis=-1)

    def _weight(self):
        if not isinstance(self.kernel, Factors):
            return self.kernel.get_value()
        return dot.Factored(self.kernel.down.get_value(), self.kernel.up.get_value())


class Attention(nnx.Module):
    """Grouped-query attention (arXiv 2305.13245) with rotary or learned positions, or none."""

    def __init__(self, model: families.ModelConfig, rngs: nnx.Rngs):
        D, N, K, H = model.width, model.num_heads, model.num_kv_heads, model.head_dim
        biased = model.bias or model.qkv_bias
        project = functools.partial(Projection, rngs, bias=biased)
        kv_heads = ("embed", "kv_heads", "head_dim")
        rank = _ranks(model, "attention")
        heads = ("embed", "heads", "head_dim")
        self.query = project(remat.QUERY, (D, N, H), heads, rank=rank("query"))
        self.key = project(remat.KEY, (D, K, H), kv_heads, rank=rank("key"))
        self.value = project(remat.VALUE, (D, K, H), kv_heads, rank=rank("value"))
        self.out = project(
            remat.ATTENTION_OUT,
            (N, H, D),
            ("heads", "head_dim", "embed"),
            bias=model.bias,
            contracted=2,
            scale=_out_scale(model),
            rank=rank("out"),
        )
        # RMSNorm in every family that normalises them.
        rms = dataclasses.replace(model, norm="rms")
        all_heads = model.qk_norm_over == families.ALL_HEADS
        over_heads = lambda num, axis: (  # noqa: E731
            Norm(rms, (num, H), (axis, "head_dim")) if all_heads else Norm(rms, (H,))
        )
        self.query_norm = over_heads(N, "heads") if model.qk_norm else None
        self.key_norm = over_heads(K, "kv_heads") if model.qk_norm else None
        self.sinks = _constant(0.0, (N,), ("heads",)) if model.attention_sinks else None
        self.scale, self.softcap = model.score_scale, model.attention_softcap
        self.interleaved = model.rope_interleaved
        # A bias on numbers of keys that are not rotated adds the same to all scores of a query,
        # which the softmax ignores. Its gradient is exactly zero; Adam's division would magnify its
        # rounding errors.
        linear = not (self.softcap or model.qk_norm or model.attention_sinks)
        self.constant_key_bias = biased and linear

    def __call__(self, x_BTD, rotation, mask, window, execution: Execution, cache, now):
        """The output [B, T, D], and the cache: keys and values.

        Args:
          cache: with `now`, all slots [B, S, K, H], of which T are written from slot `now` on.
            Without it, the keys and values of earlier positions [B, S - T, K, H], or () before
            these: those of x are appended. None: attention within x, and no cache; with
            `execution.hands_out` its queries, keys and values in the place of one.
        """
        x_BTD = execution.place.constrain(x_BTD, INSIDE, multiplied_into=("heads",))
        x_BTD = checkpoint_name(x_BTD, remat.ATTENTION_NORM)
        query_BTNH = self.query("BTD,DNH->BTNH", x_BTD, attend.QUERY, execution)
        rotated = 0 if rotation is None else rope.rotated_numbers(rotation)
        key_BTKH = self.key(
            "BTD,DKH->BTKH", x_BTD, attend.KEY, execution,
            fixed_from=rotated if self.constant_key_bias else None,
        )  # fmt: skip
        value_BTKH = self.value("BTD,DKH->BTKH", x_BTD, attend.KEY, execution)
        if self.query_norm is not None:
            query_BTNH, key_BTKH = self.query_norm(query_BTNH), self.key_norm(key_BTKH)
        if rotation is not None:
            rotate = functools.partial(rope.rotate, interleaved=self.interleaved)
            query_BTNH, key_BTKH = (rotate(x, rotation) for x in (query_BTNH, key_BTKH))
        query_BTNH, key_BTKH, value_BTKH = received = checkpoint_name(
            (query_BTNH, key_BTKH, value_BTKH), remat.QUERY_KEY_VALUE
        )
        if cache is not None:
            if now is not None:
                write = functools.partial(write_slots, start=now, place=execution.place)
                cache = tuple(map(write, cache, (key_BTKH, value_BTKH)))
            elif cache:
                pairs = zip(cache, (key_BTKH, value_BTKH), strict=True)
                cache = tuple(jnp.concatenate(pair, axis=1) for pair in pairs)
            else:
                cache = (key_BTKH, value_BTKH)
            key_BTKH, value_BTKH = (read_slots(kept, x_BTD.dtype) for kept in cache)
        sinks_BTN = None
        if self.sinks is not None:
            zeros_BTN = jnp.zeros(query_BTNH.shape[:3], jnp.float32)
            zeros_BTN = execution.place.constrain(zeros_BTN, attend.QUERY[:3])
            sinks_BTN = dot.shifted(zeros_BTN, self.sinks[...])
        out_BTNH = attend.attend(
            query_BTNH, key_BTKH, value_BTKH, mask,
            Scores(self.scale, self.softcap, window),
            config=execution.attention, place=execution.place,
            keys="sequence" if now is None else "cache", sinks_BTN=sinks_BTN,
        )  # fmt: skip
        out_BTD = self.out("BTNH,NHD->BTD", out_BTNH, BLOCK, execution)
        return out_BTD, received if execution.hands_out else cache


class LatentAttention(nnx.Module):
    """Multi-head latent attention (arXiv 2405.04434, section 2.1).

    Keys and values of all heads are made of a normalised latent of a token, queries of another or
    of x itself. Of a head's H numbers the last P are rotated; of the key these are one for all
    heads, and are not made of the latent. `cache` and `now`: see `Attention`, but that slots have
    latents [B, S, R] and rotated keys [B, S, P] in the place of keys and values; there queries and
    results go through the matrices that make keys and values (the absorbed form), so that nothing
    is made of the latents again.

    Latents are made from positions split as between blocks, and are gathered, not x.
    """

    def __init__(self, model: families.ModelConfig, rngs: nnx.Rngs):
        D, N, H, V = model.width, model.num_heads, model.head_dim, model.value_dim
        R, Q, P = model.kv_latent, model.query_latent, model.rope_dim
        self.plain = H - P  # numbers of a head that are not rotated
        self.interleaved, self.score = model.rope_interleaved, model.score_scale
        self.softcap = model.attention_softcap
        project = functools.partial(Projection, rngs, bias=False)
        norm = functools.partial(Norm, model)
        down = ("embed", "latent")
        rank = _ranks(model, "attention")
        of_down = functools.partial(project, axes=down)
        self.query_down = (
            of_down(remat.QUERY_LATENT, (D, Q), rank=rank("query_down")) if Q else None
        )
        self.query_norm = norm((Q,)) if Q else None
        heads = ("embed", "heads", "head_dim")
        self.query = project(remat.QUERY, (Q or D, N, H), heads, rank=rank("query"))
        self.down = of_down(remat.LATENT, (D, R + P), rank=rank("down"))
        self.norm = norm((R,))
        self.up = project(remat.KEY, (R, N, H - P + V), ("embed", "kv_heads", "head_dim"))
        self.out = project(
            remat.ATTENTION_OUT,
            (N, V, D),
            ("heads", "head_dim", "embed"),
            contracted=2,
            scale=_out_scale(model),
            rank=rank("out"),
        )

    def __call__(self, x_BTD, rotation, mask, window, execution: Execution, cache, now):
        """The output [B, T, D], and the cache."""
        place, rotate = execution.place, functools.partial(rope.rotate, rotation=rotation)
        rotate = functools.partial(rotate, interleaved=self.interleaved)
        attend_to = functools.partial(
            attend.attend, scores=Scores(self.score, self.softcap, window), mask=mask,
            config=execution.attention, place=place,
        )  # fmt: skip
        x_BTD = checkpoint_name(x_BTD, remat.ATTENTION_NORM)
        plain_BTNH, turned_BTNP = self._queries(x_BTD, execution)
        turned_BTNP = rotate(turned_BTNP)
        latent_BTR = self.down("BTD,DR->BTR", x_BTD, LATENT, execution)
        latent_BTR, key_BTP = jnp.split(latent_BTR, [self.norm.scale.shape[0]], axis=-1)
        latent_BTR = place.constrain(
            self.norm(latent_BTR), LATENT_INSIDE, multiplied_into=("heads",)
        )
        key_BTP = rotate(place.constrain(key_BTP, LATENT_INSIDE)[:, :, None])[:, :, 0]
        if now is not None:
            write = functools.partial(write_slots, start=now, place=place)
            cache = tuple(map(write, cache, (latent_BTR, key_BTP)))
            kept = (read_slots(kept, x_BTD.dtype) for kept in cache)
            out_BTNV = self._absorbed(plain_BTNH, turned_BTNP, *kept, attend_to, execution)
            return self.out("BTNV,NVD->BTD", out_BTNV, BLOCK, execution), cache
        made_BTNW = self.up("BTR,RNW->BTNW", latent_BTR, attend.KEY, execution)
        key_BTNH, value_BTNV = jnp.split(made_BTNW, [self.plain], axis=-1)
        shared_BTNP = jnp.broadcast_to(
            key_BTP[:, :, None], (*key_BTNH.shape[:3], key_BTP.shape[-1]),
            out_sharding=place.activation(attend.KEY),
        )  # fmt: skip
        key_BTNH = jnp.concatenate([key_BTNH, shared_BTNP], axis=-1)
        query_BTNH = jnp.concatenate([plain_BTNH, turned_BTNP], axis=-1)
        query_BTNH, key_BTNH, value_BTNV = received = checkpoint_name(
            (query_BTNH, key_BTNH, value_BTNV), remat.QUERY_KEY_VALUE
        )
        if cache is not None:
            new = (key_BTNH, value_BTNV)
            pairs = zip(cache, new, strict=True)
            cache = tuple(jnp.concatenate(pair, axis=1) for pair in pairs) if cache else new
            key_BTNH, value_BTNV = cache
        out_BTNV = attend_to(query_BTNH, key_BTNH, value_BTNV)
        out_BTD = self.out("BTNV,NVD->BTD", out_BTNV, BLOCK, execution)
        return out_BTD, received if execution.hands_out else cache

    def _queries(self, x_BTD, execution: Execution):
        """Of all heads, what is not rotated and what is to be."""
        place = execution.place
        if self.query_down is None:
            x_BTD = place.constrain(x_BTD, INSIDE, multiplied_into=("heads",))
            query_BTNH = self.query("BTD,DNH->BTNH", x_BTD, attend.QUERY, execution)
        else:
            latent_BTR = self.query_norm(
                self.query_down("BTD,DR->BTR", x_BTD, LATENT, execution)
            )  # fmt: skip
            latent_BTR = place.constrain(latent_BTR, LATENT_INSIDE, multiplied_into=("heads",))
            query_BTNH = self.query("BTR,RNH->BTNH", latent_BTR, attend.QUERY, execution)
        return jnp.split(query_BTNH, [self.plain], axis=-1)

    def _absorbed(self, plain_BTNH, turned_BTNP, latent_BSR, key_BSP, attend_to, execution):
        """Results of attention [B, T, N, V] to slots, whose latents are keys and values of one
        head. Only decoding does this: it has no gradient."""
        to_keys_RNH, to_values_RNV = jnp.split(
            packed.plain(self.up.kernel.get_value(), latent_BSR.dtype), [self.plain], axis=-1
        )
        to_heads = functools.partial(
            dot.dot, out=execution.place.activation(attend.QUERY), policy=execution.policy
        )
        query_BTNR = to_heads("BTNH,RNH->BTNR", plain_BTNH, to_keys_RNH)
        query_BTNW = jnp.concatenate([query_BTNR, turned_BTNP], axis=-1)
        key_BSW = jnp.concatenate([latent_BSR, key_BSP], axis=-1)
        out_BTNR = attend_to(
            query_BTNW, key_BSW[:, :, None], latent_BSR[:, :, None], keys="cache", kv_heads=None
        )
        return to_heads("BTNR,RNV->BTNV", out_BTNR, to_values_RNV)


class Mlp(nnx.Module):
    """Feed-forward: plain, or gated (SwiGLU and GeGLU, arXiv 2002.05202)."""

    def __init__(self, model: families.ModelConfig, rngs: nnx.Rngs, *, name: str = "mlp"):
        D, F = model.width, model.mlp_dim
        project = functools.partial(Projection, rngs, bias=model.bias)
        axes, rank = ("embed", "mlp"), _ranks(model, name)
        gated = model.gated_mlp
        self.gate = project(remat.GATE, (D, F), axes, rank=rank("gate")) if gated else None
        self.up = project(remat.UP, (D, F), axes, rank=rank("up"))
        scale = _out_scale(model)
        self.down = project(remat.MLP_OUT, (F, D), axes[::-1], scale=scale, rank=rank("down"))
        self.activation = model.activation

    def __call__(self, x_BTD, execution: Execution, share_BT=None):
        x_BTD = execution.place.constrain(x_BTD, INSIDE, multiplied_into=("mlp",))
        x_BTD = checkpoint_name(x_BTD, remat.MLP_NORM)
        products = [self.up("BTD,DF->BTF", x_BTD, HIDDEN, execution)]
        if self.gate is not None:
            products.insert(0, self.gate("BTD,DF->BTF", x_BTD, HIDDEN, execution))
        hidden_BTF = checkpoint_name(hidden(self.activation, *products), remat.HIDDEN)
        return self.down("BTF,FD->BTD", hidden_BTF, BLOCK, execution)


class Experts(nnx.Module):
    """Routed experts in the place of an MLP (arXiv 1701.06538), with a shared one beside them."""

    def __init__(self, model: families.ModelConfig, rngs: nnx.Rngs):
        D, E, F = model.width, model.num_experts, model.expert_dim
        self.model = model
        self.router = _weight(rngs, (D, E), ("embed", "router"), 1 / math.sqrt(D))
        # By which experts are chosen beside their scores; its gradient is their loads.
        self.bias = _constant(0.0, (E,), ("loads",))
        axes, std = ("experts", "embed", "mlp"), 1 / math.sqrt(D)
        self.gate = _weight(rngs, (E, D, F), axes, std) if model.gated_mlp else None
        self.up = _weight(rngs, (E, D, F), axes, std)
        std = _out_scale(model) / math.sqrt(F)
        self.down = _weight(rngs, (E, F, D), ("experts", "mlp", "embed"), std)
        zeros = lambda shape, *axes: _constant(0.0, shape, axes) if model.bias else None  # noqa: E731
        self.router_bias = zeros((E,), "router")
        self.gate_bias = zeros((E, F), "experts", "mlp") if model.gated_mlp else None
        self.up_bias = zeros((E, F), "experts", "mlp")
        self.down_bias = zeros((E, D), "experts", "norm")
        shared = dataclasses.replace(model, mlp_dim=model.shared_dim)
        self.shared = Mlp(shared, rngs, name="mlp/shared") if model.shared_dim else None

    def __call__(self, x_BTD, execution: Execution, share_BT=None):
        """Their sum [B, T, D]; `share_BT`: see `Apply.losses`."""
        model, place, config = self.model, execution.place, execution.experts
        exact = dataclasses.replace(execution.policy, numbers=UNROUNDED)
        # Also its gradient is a product of fp32 numbers. GPUs leave none of these in bf16, so it is
        # rounded behind the product.
        in_fp32 = dataclasses.replace(exact, reduce=jnp.dtype(jnp.float32))
        logits_BTE = dot.dot(
            "BTD,DE->BTE", x_BTD.astype(jnp.float32), self.router.get_value(),
            out=place.activation(LOGITS), policy=in_fp32, recomputed=execution.recomputed,
        )  # fmt: skip
        if self.router_bias is not None:
            logits_BTE = dot.shifted(logits_BTE, self.router_bias.get_value())
        routing, shares_BTE = router.route(model, logits_BTE, self.bias.get_value())
        chosen_BTk = routing.experts_BTk
        if config.dispatch == CAPACITY:
            kept = experts.within_capacity(chosen_BTk, model.num_experts, config.capacity, place)
            routing = routing._replace(experts_BTk=kept)
        leaves = (getattr(self, name) for name in experts.Weights._fields)
        weights = experts.Weights(*(None if leaf is None else leaf.get_value() for leaf in leaves))
        compute = experts.dense if config.dispatch == DENSE else experts.experts
        y_BTD = compute(
            x_BTD, routing, weights, activation=model.activation, config=config, place=place,
            policy=exact, out=place.activation(BLOCK),
        )  # fmt: skip
        if self.shared is not None:
            y_BTD += self.shared(x_BTD, execution)
        if share_BT is None:
            return y_BTD
        loads_BTE = router.loads(chosen_BTk, share_BT > 0, model.num_experts)
        losses_BT = router.router_losses(
            config, logits_BTE, shares_BTE, loads_BTE, model.experts_per_token
        )
        return router.attach(y_BTD, losses_BT, share_BT, self.bias.get_value(), routing.experts_BTk)


class Block(nnx.Module):
    """Attention and MLP, each added to the stream [B, T, D]; what they take is normalised, or what
    they return, or both.

    `routed`: with experts in the place of an MLP. `window`: positions back including itself, 0 =
    all. `cache` and `now`: see `Apply.apply_layers`; without `now`, `cache` has the keys and values
    of the positions before x, or is (), and those of x are appended. `share_BT`: of each token in
    what is minimized, for losses of routed experts.
    """

    def __init__(self, model: families.ModelConfig, rngs: nnx.Rngs, *, routed: bool):
        norm = functools.partial(Norm, model, (model.width,))
        self.attention_norm = norm() if model.pre_norms else None
        self.mlp_norm = norm() if model.pre_norms else None
        self.attention = (LatentAttention if model.kv_latent else Attention)(model, rngs)
        self.mlp = (Experts if routed else Mlp)(model, rngs)
        self.attention_post_norm = norm() if model.post_norms else None
        self.mlp_post_norm = norm() if model.post_norms else None

    def __call__(
        self, x_BTD, rotation, mask, window, execution: Execution, cache=None, now=None,
        share_BT=None,
    ):  # fmt: skip
        # Between blocks positions are split over `tensor` too; inside, each device needs them all.
        y_BTD = x_BTD if self.attention_norm is None else self.attention_norm(x_BTD)
        y_BTD, cache = self.attention(y_BTD, rotation, mask, window, execution, cache, now)
        if self.attention_post_norm is not None:
            y_BTD = self.attention_post_norm(y_BTD)
        x_BTD = x_BTD + y_BTD
        y_BTD = x_BTD if self.mlp_norm is None else self.mlp_norm(x_BTD)
        y_BTD = self.mlp(y_BTD, execution, share_BT)
        if self.mlp_post_norm is not None:
            y_BTD = self.mlp_post_norm(y_BTD)
        return x_BTD + y_BTD, cache


class TensorTrain(nnx.Module):
    """An embedding table as a train of tensors: see `tensor_train`. Small, and whole everywhere."""

    def __init__(self, model: families.ModelConfig, rngs: nnx.Rngs, std: float):
        shapes = tensor_train.shapes(model)
        # A number of the table is a sum of rank ** (cores - 1) products of one number of each.
        terms = model.embedding_rank ** (len(shapes) - 1)
        each = (std / math.sqrt(terms)) ** (1 / len(shapes))
        for name, shape in shapes.items():
            setattr(self, name, _weight(rngs, shape, tensor_train.AXES, each))


class Decoder(nnx.Module):
    """Embedding, L blocks stacked along a leading dimension, a last norm and a head.

    First layers of a mixture that are dense have other parameters, and so a stack of their own.
    """

    def __init__(self, model: families.ModelConfig, rngs: nnx.Rngs):
        V, D, std = model.padded_vocab, model.width, 1 / math.sqrt(model.width)
        learned, shape = model.positions == "learned", (model.max_positions, D)
        trained = model.embedding_rank > 0
        self.embedding = (
            TensorTrain(model, rngs, std) if trained
            else _weight(rngs, (V, D), ("vocab", "embed"), std)
        )  # fmt: skip
        self.positions = _weight(rngs, shape, ("positions", "embed"), std) if learned else None
        routed = model.num_experts > 0
        self.blocks = _stack(model, rngs, model.num_blocks, routed=routed)
        first = model.num_first
        self.first = _stack(model, rngs, first, routed=False) if first else None
        self.norm = Norm(model, (D,))
        self.head = None if model.tied_head else _weight(rngs, (V, D), ("vocab", "embed"), std)


def _stack(model: families.ModelConfig, rngs: nnx.Rngs, num: int, *, routed: bool):
    stack = nnx.vmap(lambda rngs: Block(model, rngs, routed=routed), in_axes=0, out_axes=0)
    return nnx.split_rngs(splits=num)(stack)(rngs)


def _ranks(model: families.ModelConfig, module: str):
    """The rank of a product of a module, by its name; None where it is one weight."""
    known = ranks.of(model)
    return lambda name: known.get(f"{module}/{name}")


def _out_scale(model: families.ModelConfig) -> float:
    """Of the initial weights that write to the stream (GPT-2)."""
    return 1 / math.sqrt(2 * model.num_layers * model.repeats)

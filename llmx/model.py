"""The decoder: GPT-2, Llama, Qwen and Gemma are values of one `ModelConfig`. Only it imports Flax.

Flax NNX defines the modules and makes their parameters; from there on a model is a pure dict of
arrays and functions of it. Every layer has the same parameters, stacked along a leading `layers`
dimension and scanned, so that trace and compile time do not grow with depth; layers of different
kinds (sliding window, global) alternate inside the scan's body. The model names logical axes and
knows no mesh axis and no layout.

Letters: B batch, T positions, S cache positions, D width, F mlp_dim, N query heads, K key/value
heads, H head size, V vocabulary, L layers.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from llmx import attention, context, dot, embedding, families, losses, precision, remat, sharding
from llmx.attention import AttentionConfig
from llmx.masks import Mask, Scores

# Activations between blocks, and inside them, in logical axes.
BLOCK = ("batch", "block_sequence", "embed")
INSIDE = ("batch", "sequence", "embed")
QUERY = ("batch", "sequence", "heads", "head_dim")
KEY = ("batch", "sequence", "kv_heads", "head_dim")
HIDDEN = ("batch", "sequence", "mlp")
# Tables of which rows are looked up: products never take them whole, unless one is the head too.
LOOKED_UP = ("embedding", "positions")
CACHE = ("layers", "batch", "cache", "kv_heads", "head_dim")


@dataclasses.dataclass(frozen=True, eq=False)
class Execution:
    """How a decoder is run: what a config resolves to, and no part of its parameters."""

    place: sharding.Placement
    policy: precision.Policy
    remat: str = "none"
    attention: AttentionConfig = dataclasses.field(default_factory=AttentionConfig)
    packed: bool = True  # rows may hold several documents
    loss_chunks: int = 0

    @property
    def split(self) -> context.Split:
        """Which device holds which positions of a row."""
        return attention.split_of(self.attention, self.place)


# --------------------------------------------------------------------------------------- parameters


def _weight(rngs: nnx.Rngs, shape: tuple, axes: tuple, std: float) -> nnx.Param:
    value = std * jax.random.truncated_normal(rngs.params(), -3, 3, shape, jnp.float32)
    return nnx.Param(value, axes=axes)


def _constant(value: float, shape: tuple, axes: tuple) -> nnx.Param:
    return nnx.Param(jnp.full(shape, value, jnp.float32), axes=axes)


class Norm(nnx.Module):
    """RMSNorm (arXiv 1910.07467) or LayerNorm (arXiv 1607.06450), last dimension, in fp32."""

    def __init__(self, model: families.ModelConfig, size: int):
        self.eps, self.centered = model.norm_eps, model.norm == "layer"
        self.plus_one = model.norm_plus_one
        self.scale = _constant(0.0 if self.plus_one else 1.0, (size,), ("norm",))
        self.bias = _constant(0.0, (size,), ("norm",)) if self.centered else None

    def __call__(self, x: Array) -> Array:
        y = x.astype(jnp.float32)
        if self.centered:
            y = y - y.mean(axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.square(y).mean(axis=-1, keepdims=True) + self.eps)
        # y (1 + scale) is y + y scale.
        y = y + dot.scaled(y, self.scale[...]) if self.plus_one else dot.scaled(y, self.scale[...])
        if self.bias is not None:
            y = dot.shifted(y, self.bias[...])
        return y.astype(x.dtype)


class Projection(nnx.Module):
    """One weight, and a bias where the family has them; multiplied by `dot.dot`."""

    def __init__(self, rngs, shape, axes, *, contracted: int, bias: bool, scale: float = 1.0):
        std = scale / math.sqrt(math.prod(shape[:contracted]))
        self.kernel = _weight(rngs, shape, axes, std)
        # A bias along the width is small and stays whole, as norms do.
        axes = tuple("norm" if axis == "embed" else axis for axis in axes[contracted:])
        self.bias = _constant(0.0, shape[contracted:], axes) if bias else None

    def __call__(self, expression: str, x: Array, out: tuple, run: Execution) -> Array:
        to = run.place.activation(out)
        y = dot.dot(
            expression, x, self.kernel.get_value(), out=to, policy=run.policy,
            recomputed=run.remat != "none",
        )  # fmt: skip
        return y if self.bias is None else dot.shifted(y, self.bias[...])


class Attention(nnx.Module):
    """Grouped-query attention (arXiv 2305.13245) with rotary or learned positions."""

    def __init__(self, model: families.ModelConfig, rngs: nnx.Rngs):
        D, N, K, H = model.width, model.num_heads, model.num_kv_heads, model.head_dim
        bias = model.bias
        heads, kv_heads = ("embed", "heads", "head_dim"), ("embed", "kv_heads", "head_dim")
        self.query = Projection(rngs, (D, N, H), heads, contracted=1, bias=bias)
        self.key = Projection(rngs, (D, K, H), kv_heads, contracted=1, bias=bias)
        self.value = Projection(rngs, (D, K, H), kv_heads, contracted=1, bias=bias)
        self.out = Projection(
            rngs, (N, H, D), ("heads", "head_dim", "embed"), contracted=2, bias=bias,
            scale=1 / math.sqrt(2 * model.num_layers),
        )  # fmt: skip
        self.query_norm = Norm(_rms(model), H) if model.qk_norm else None
        self.key_norm = Norm(_rms(model), H) if model.qk_norm else None
        self.scale, self.softcap = model.score_scale, model.attention_softcap
        # Without rotation a bias on keys adds the same to all scores of a query, which the softmax
        # ignores. Its gradient is exactly zero; what rounding makes of it would be blown up by
        # Adam's division.
        self.constant_key_bias = bias and model.positions == "learned" and not self.softcap

    def __call__(self, x_BTD, rotation, mask, window, run: Execution, cache, now):
        query_BTNH = self.query("BTD,DNH->BTNH", x_BTD, QUERY, run)
        if self.constant_key_bias:
            self.key.bias[...] = jax.lax.stop_gradient(self.key.bias[...])
        key_BTKH = self.key("BTD,DKH->BTKH", x_BTD, KEY, run)
        value_BTKH = self.value("BTD,DKH->BTKH", x_BTD, KEY, run)
        if self.query_norm is not None:
            query_BTNH, key_BTKH = self.query_norm(query_BTNH), self.key_norm(key_BTKH)
        if rotation is not None:
            query_BTNH, key_BTKH = rotate(query_BTNH, rotation), rotate(key_BTKH, rotation)
        query_BTNH = checkpoint_name(query_BTNH, remat.QUERY_KEY_VALUE)
        key_BTKH = checkpoint_name(key_BTKH, remat.QUERY_KEY_VALUE)
        value_BTKH = checkpoint_name(value_BTKH, remat.QUERY_KEY_VALUE)
        if cache is not None:
            cache = tuple(
                attention.written(old, new, now, place=run.place)
                for old, new in zip(cache, (key_BTKH, value_BTKH), strict=True)
            )
            key_BTKH, value_BTKH = cache
        out_BTNH = attention.attend(
            query_BTNH, key_BTKH, value_BTKH, mask,
            Scores(scale=self.scale, softcap=self.softcap, window=window),
            config=run.attention, place=run.place, keys="sequence" if cache is None else "cache",
        )  # fmt: skip
        return self.out("BTNH,NHD->BTD", out_BTNH, BLOCK, run), cache


class Mlp(nnx.Module):
    """Feed-forward: plain, or gated (SwiGLU and GeGLU, arXiv 2002.05202)."""

    def __init__(self, model: families.ModelConfig, rngs: nnx.Rngs):
        D, F, bias = model.width, model.mlp_dim, model.bias
        wide = dict(contracted=1, bias=bias)
        self.gate = Projection(rngs, (D, F), ("embed", "mlp"), **wide) if model.gated_mlp else None
        self.up = Projection(rngs, (D, F), ("embed", "mlp"), **wide)
        self.down = Projection(
            rngs, (F, D), ("mlp", "embed"), contracted=1, bias=bias,
            scale=1 / math.sqrt(2 * model.num_layers),
        )  # fmt: skip
        self.activation = {"silu": jax.nn.silu, "gelu": jax.nn.gelu}[model.activation]

    def __call__(self, x_BTD, run: Execution):
        up_BTF = checkpoint_name(self.up("BTD,DF->BTF", x_BTD, HIDDEN, run), remat.MLP)
        if self.gate is None:
            hidden_BTF = self.activation(up_BTF)
        else:
            gate_BTF = checkpoint_name(self.gate("BTD,DF->BTF", x_BTD, HIDDEN, run), remat.MLP)
            hidden_BTF = self.activation(gate_BTF) * up_BTF
        return self.down("BTF,FD->BTD", hidden_BTF, BLOCK, run)


class Block(nnx.Module):
    """Attention and MLP, each on a normalised input and added to the stream."""

    def __init__(self, model: families.ModelConfig, rngs: nnx.Rngs):
        self.attention_norm, self.mlp_norm = Norm(model, model.width), Norm(model, model.width)
        self.attention, self.mlp = Attention(model, rngs), Mlp(model, rngs)
        post = model.post_norms
        self.attention_post_norm = Norm(model, model.width) if post else None
        self.mlp_post_norm = Norm(model, model.width) if post else None

    def __call__(self, x_BTD, rotation, mask, window, run: Execution, cache=None, now=None):
        # Between blocks positions are split over `tensor` too; inside, every shard needs them all.
        y_BTD = self.attention_norm(x_BTD)
        y_BTD = run.place.constrain(y_BTD, INSIDE, multiplied_into=("heads",))
        y_BTD, cache = self.attention(y_BTD, rotation, mask, window, run, cache, now)
        if self.attention_post_norm is not None:
            y_BTD = self.attention_post_norm(y_BTD)
        x_BTD = x_BTD + y_BTD
        y_BTD = run.place.constrain(self.mlp_norm(x_BTD), INSIDE, multiplied_into=("mlp",))
        y_BTD = self.mlp(y_BTD, run)
        if self.mlp_post_norm is not None:
            y_BTD = self.mlp_post_norm(y_BTD)
        return x_BTD + y_BTD, cache


class Decoder(nnx.Module):
    """Embedding, L blocks stacked along a leading dimension, a last norm and a head."""

    def __init__(self, model: families.ModelConfig, rngs: nnx.Rngs):
        V, D, std = model.padded_vocab, model.width, 1 / math.sqrt(model.width)
        self.embedding = _weight(rngs, (V, D), ("vocab", "embed"), std)
        self.positions = (
            _weight(rngs, (model.max_positions, D), ("positions", "embed"), std)
            if model.positions == "learned"
            else None
        )
        stack = nnx.split_rngs(splits=model.num_layers)(
            nnx.vmap(lambda rngs: Block(model, rngs), in_axes=0, out_axes=0)
        )
        self.blocks = stack(rngs)
        self.norm = Norm(model, D)
        self.head = None if model.tied_head else _weight(rngs, (V, D), ("vocab", "embed"), std)


def _rms(model: families.ModelConfig) -> families.ModelConfig:
    """The norm of queries and keys is RMSNorm in every family that has one."""
    return dataclasses.replace(model, norm="rms")


# --------------------------------------------------------------------------------- rotary positions


def rope_frequencies(model: families.ModelConfig, kind: str) -> np.ndarray:
    """Radians per position of each of the H/2 pairs (arXiv 2104.09864), stretched by the family.

    Llama 3's rule keeps high frequencies, divides low ones by `rope_factor`, and blends between;
    "linear" divides all (arXiv 2306.15595). Local layers with their own base are not stretched.
    """
    local = kind == families.LOCAL and model.rope_theta_local
    theta = model.rope_theta_local if local else model.rope_theta
    pairs = np.arange(0, model.head_dim, 2, dtype=np.float64) / model.head_dim
    frequencies = theta**-pairs
    if local or model.rope_scaling == "none":
        return frequencies.astype(np.float32)
    if model.rope_scaling == "linear":
        return (frequencies / model.rope_factor).astype(np.float32)
    turns = model.rope_old_context * frequencies / (2 * np.pi)
    keep = (turns - model.rope_low_freq) / (model.rope_high_freq - model.rope_low_freq)
    keep = np.clip(keep, 0, 1)
    return (frequencies * (keep + (1 - keep) / model.rope_factor)).astype(np.float32)


def rotation_of(positions_BT: Int[Array, "B T"], frequencies: np.ndarray):
    """cos and sin, each [B, T, 1, H/2], fp32."""
    angles_BT1P = positions_BT[:, :, None, None].astype(jnp.float32) * frequencies
    return jnp.cos(angles_BT1P), jnp.sin(angles_BT1P)


def rotate(x_BTNH: Array, rotation: tuple[Array, Array]) -> Array:
    """Turns the pairs (i, i + H/2) of every head by their angles."""
    cos, sin = rotation
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BTNH.dtype)


# -------------------------------------------------------------------------- functions of parameters


def abstract_parameters(model: families.ModelConfig) -> tuple[dict, dict]:
    """The parameters' shapes and logical axes; nothing is allocated.

    Returns (tree of ShapeDtypeStruct, tree of tuples of names), both nested dicts.
    """
    state = nnx.state(nnx.eval_shape(lambda: Decoder(model, nnx.Rngs(0))))
    axes = sharding.logical_axes(state)
    shapes = nnx.to_pure_dict(state)
    axes = nnx.to_pure_dict(axes)
    axes["blocks"] = jax.tree.map(
        lambda names: ("layers", *names), axes["blocks"], is_leaf=lambda x: isinstance(x, tuple)
    )
    return shapes, axes


def init_parameters(model: families.ModelConfig, seed: int) -> dict:
    """Parameters as a nested dict of fp32 arrays; under jit with out_shardings they are born split.

    Weights are normal with variance 1/fan_in; the projections that write to the stream are smaller
    by sqrt(2L) (GPT-2); norms are one, biases zero.
    """
    return nnx.to_pure_dict(nnx.state(Decoder(model, nnx.Rngs(seed))))


@dataclasses.dataclass(frozen=True, eq=False)
class Apply:
    """A decoder as functions of its parameter dict."""

    model: families.ModelConfig

    def losses(self, params: dict, batch: dict, run: Execution, sinks: dict | None = None):
        """Per-token loss and log Z, [B, T] fp32, of tokens, targets, segment_ids and positions.

        `sinks`: where gradients go when they are split otherwise than `params`: see
        `route_gradient`.
        """
        if sinks is not None:
            # The blocks' gradients are routed inside the scan, so that each leaves as its layer is
            # done.
            top = {name: leaf for name, leaf in params.items() if name != "blocks"}
            top_sinks = {name: sinks[name] for name in top}
            params = run.place.routed(top, top_sinks) | {"blocks": params["blocks"]}
        names = ("tokens", "targets", "segment_ids", "positions")
        tokens_BT, targets_BT, *rows = self.split_rows([batch[name] for name in names], run)
        blocks_sinks = None if sinks is None else sinks["blocks"]
        mask = self_mask(*rows, run)
        x_BTD = self.embedded(params, tokens_BT, mask.positions_BT, run)
        x_BTD, _ = self.through(params["blocks"], x_BTD, mask, run, sinks=blocks_sinks)
        found = self.last_losses(params, x_BTD, targets_BT, run)
        return tuple(self.split_rows(found, run, back=True))

    def last_losses(self, params: dict, x_BTD, targets_BT, run: Execution):
        """Loss and log Z, [B, T] fp32, of what the last layer gives; rows as `run.split` says."""
        return losses.token_losses(
            self._normed(params, x_BTD), self._head_weight(params), targets_BT,
            num_real=self.model.vocab_size, softcap=self.model.logit_softcap,
            chunks=run.loss_chunks, place=run.place, policy=run.policy,
        )  # fmt: skip

    def logits(
        self, params: dict, tokens_BT, segments_BT, positions_BT, run: Execution
    ) -> Float[Array, "B T V"]:
        """fp32 logits; those of padding are -inf. For tests and sampling: they exist whole."""
        tokens_BT, *rows = self.split_rows((tokens_BT, segments_BT, positions_BT), run)
        x_BTD, _ = self._hidden(params, tokens_BT, self_mask(*rows, run), run)
        return self.split_rows([self._head(params, x_BTD, run)], run, back=True)[0]

    def split_rows(self, arrays, run: Execution, *, back: bool = False) -> list[Array]:
        """Arrays [B, T, ...] from the order of their rows to that of `run.split`, or back."""
        return [context.reorder(array, run.split, run.place.mesh, back=back) for array in arrays]

    def empty_cache(self, batch: int, length: int, run: Execution) -> dict:
        """A cache of at least `length` slots in which nothing is visible (segment -1)."""
        model, place = self.model, run.place
        ways = place.size(sharding.mesh_axes(place.activation(("cache",))[0]))
        length = -(-length // ways) * ways
        shape = (model.num_layers, batch, length, model.num_kv_heads, model.head_dim)
        zeros = place.constrain(jnp.zeros(shape, run.policy.compute), CACHE)
        unseen_BS = jnp.full((batch, length), -1, jnp.int32)
        return {
            "key": zeros,
            "value": zeros,
            "segments": place.constrain(unseen_BS, ("batch", "cache")),
            "positions": place.constrain(jnp.zeros_like(unseen_BS), ("batch", "cache")),
        }

    def decode(self, params: dict, cache: dict, tokens_BT, segments_BT, positions_BT, now, run):
        """Logits of T more tokens written into the cache at slots now..now+T, and the new cache.

        `run.place` must not split positions, as one token cannot be. It may split the cache.
        """
        tokens_BT, segments_BT, positions_BT = (
            run.place.constrain(array, ("batch", "sequence"))
            for array in (tokens_BT, segments_BT, positions_BT)
        )
        segments_BS = attention.written(cache["segments"], segments_BT, now, place=run.place)
        positions_BS = attention.written(cache["positions"], positions_BT, now, place=run.place)
        mask = Mask(segments_BT, positions_BT, segments_BS, positions_BS)
        past = (cache["key"], cache["value"])
        x_BTD, past = self._hidden(params, tokens_BT, mask, run, cache=past, now=now)
        cache = dict(zip(("key", "value"), past, strict=True))
        cache |= {"segments": segments_BS, "positions": positions_BS}
        return self._head(params, x_BTD, run), cache

    @functools.cached_property
    def _definitions(self) -> tuple[nnx.GraphDef, nnx.GraphDef]:
        """Of a block, and of the last norm."""
        model = self.model
        parts = (lambda: Block(model, nnx.Rngs(0)), lambda: Norm(model, model.width))
        return tuple(nnx.split(nnx.eval_shape(part))[0] for part in parts)

    def _normed(self, params: dict, x_BTD):
        return nnx.merge(self._definitions[1], params["norm"])(x_BTD)

    def _head_weight(self, params: dict) -> Float[Array, "V D"]:
        return params["embedding" if self.model.tied_head else "head"]

    def _head(self, params: dict, x_BTD, run: Execution) -> Float[Array, "B T V"]:
        model, head_VD = self.model, self._head_weight(params)
        x_BTD = run.place.constrain(x_BTD, INSIDE)
        to = run.place.activation(("batch", "sequence", "vocab"))
        with run.policy.products():
            logits_BTV = dot.dot("BTD,VD->BTV", x_BTD, head_VD, out=to, policy=run.policy)
        logits_BTV = logits_BTV.astype(jnp.float32)
        if model.logit_softcap:
            logits_BTV = model.logit_softcap * jnp.tanh(logits_BTV / model.logit_softcap)
        real_V = np.arange(model.padded_vocab) < model.vocab_size
        return jnp.where(real_V, logits_BTV, -jnp.inf)

    def _hidden(self, params, tokens_BT, mask, run: Execution, cache=None, now=None):
        x_BTD = self.embedded(params, tokens_BT, mask.positions_BT, run)
        x_BTD, cache = self.through(params["blocks"], x_BTD, mask, run, cache=cache, now=now)
        return self._normed(params, x_BTD), cache

    def embedded(self, params: dict, tokens_BT, positions_BT, run: Execution):
        """What the first layer takes, [B, T, D]."""
        model = self.model
        look_up = functools.partial(embedding.embed, place=run.place, policy=run.policy)
        x_BTD = look_up(tokens_BT, params["embedding"])
        if model.embedding_scale:
            x_BTD = x_BTD * jnp.asarray(math.sqrt(model.width), x_BTD.dtype)
        if model.positions == "learned":
            x_BTD += look_up(positions_BT, params["positions"])
        return x_BTD

    def rotations(self, positions_BT) -> dict:
        """By kind of layer, what `rotate` takes; {} where positions are learned."""
        if self.model.positions != "rope":
            return {}
        kinds = sorted(set(self.model.layer_kinds))
        return {k: rotation_of(positions_BT, rope_frequencies(self.model, k)) for k in kinds}

    def through(
        self, blocks: dict, x_BTD, mask: Mask, run: Execution, *, kinds=None, sinks=None,
        rotations=None, cache=None, now=None,
    ):  # fmt: skip
        """x after layers with these stacked weights, and their cache.

        The layers are scanned in the shortest periods of their kinds; then what is left of a
        period. Inside a period neighbours of one kind are a scan too: the program holds each run of
        equal layers once.

        Args:
          kinds: of the layers, by default those of the model; or an int array of indices into
            `kind_names`, if they are known at run time only: -1 is no layer.
          sinks: where the gradients of `blocks` go: see `route_gradient`.
          rotations: of `mask.positions_BT`, by default made here.
        """
        model, definition = self.model, self._definitions[0]
        kinds = model.layer_kinds if kinds is None else kinds
        rotations = self.rotations(mask.positions_BT) if rotations is None else rotations

        def layer(kind: str) -> Callable:
            def apply(x_BTD, weights_sinks_cache):
                weights, sinks, cache = weights_sinks_cache
                if sinks is not None:
                    weights = dot.routed(run.place, weights, sinks)
                window = model.window if kind == families.LOCAL else 0
                block = nnx.merge(definition, weights)
                return block(x_BTD, rotations.get(kind), mask, window, run, cache, now)

            return remat.checkpointed(apply, run.remat)

        layers = {kind: layer(kind) for kind in self.kind_names}

        def walk(x_BTD, stacked, kinds):
            """Layers of these kinds, one after the other."""
            caches, first = [], 0
            for kind, equal in itertools.groupby(kinds):
                end = first + len(list(equal))
                part = jax.tree.map(lambda array: array[first:end], stacked)  # noqa: B023
                x_BTD, new = jax.lax.scan(layers[kind], x_BTD, part)
                caches.append(new)
                first = end
            return x_BTD, jax.tree.map(lambda *each: jnp.concatenate(each), *caches)

        stacked = (blocks, sinks, cache)
        with run.policy.products():
            if not isinstance(kinds, tuple):
                # A stage has layers of other kinds at the same places, or none, than the next.
                branches = [lambda x_BTD, _: (x_BTD, None), *layers.values()]
                one = lambda x_BTD, each: jax.lax.switch(each[0] + 1, branches, x_BTD, each[1])  # noqa: E731
                return jax.lax.scan(one, x_BTD, (kinds, stacked))
            size = _period(kinds)
            if size == 1:
                return jax.lax.scan(layers[kinds[0]], x_BTD, stacked)
            whole = len(kinds) // size * size
            groups = jax.tree.map(lambda array: sharding.regrouped(array[:whole], size), stacked)
            each = lambda x_BTD, group: walk(x_BTD, group, kinds[:size])  # noqa: E731
            x_BTD, new = jax.lax.scan(each, x_BTD, groups)
            new = jax.tree.map(lambda array: array.reshape(-1, *array.shape[2:]), new)
            if whole < len(kinds):
                rest = jax.tree.map(lambda array: array[whole:], stacked)
                x_BTD, last = walk(x_BTD, rest, kinds[whole:])
                new = jax.tree.map(lambda *each: jnp.concatenate(each), new, last)
            return x_BTD, new

    @property
    def kind_names(self) -> tuple[str, ...]:
        """The kinds of the model's layers."""
        return tuple(sorted(set(self.model.layer_kinds)))


def _period(kinds: tuple[str, ...]) -> int:
    """Of how many layers the shortest pattern is that `kinds` repeats."""
    return next(
        n for n in range(1, len(kinds) + 1) if kinds == (kinds[:n] * len(kinds))[: len(kinds)]
    )


def self_mask(segments_BT, positions_BT, run: Execution) -> Mask:
    """Of rows of tokens, in the order of `run.split`."""
    return Mask(
        segments_BT, positions_BT, segments_BT, positions_BT, ahead=0, one_document=not run.packed
    )

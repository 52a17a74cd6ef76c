"""A decoder's parameters, and the functions of them: losses, blocks, decoding."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from llmx import sharding
from llmx.model import dot, embedding, families, losses, remat, rope
from llmx.model.attention import attend, split
from llmx.model.attention.masks import Mask
from llmx.model.decoder import CACHE, INSIDE, Block, Decoder, Norm
from llmx.model.execution import Execution

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

    def losses(
        self, params: dict, batch: dict, execution: Execution, grad_buffers: dict | None = None
    ):
        """Per-token loss and log Z, [B, T] fp32, of tokens, targets, segment_ids and positions.

        `grad_buffers`: where gradients go when they are split otherwise than `params`: see
        `sharding.accumulate_into`.
        """
        if grad_buffers is not None:
            # The blocks' gradients are routed inside the scan, so that each leaves as its layer is
            # done.
            top = {name: leaf for name, leaf in params.items() if name != "blocks"}
            top_buffers = {name: grad_buffers[name] for name in top}
            params = execution.place.with_grad_buffers(top, top_buffers) | {
                "blocks": params["blocks"]
            }
        names = ("tokens", "targets", "segment_ids", "positions")
        tokens_BT, targets_BT, *rows = self.split_rows([batch[name] for name in names], execution)
        block_buffers = None if grad_buffers is None else grad_buffers["blocks"]
        mask = self_mask(*rows, execution)
        x_BTD = self.embedded(params, tokens_BT, mask.positions_BT, execution)
        x_BTD, _ = self.apply_layers(
            params["blocks"], x_BTD, mask, execution, grad_buffers=block_buffers
        )
        found = self.last_losses(params, x_BTD, targets_BT, execution)
        return tuple(self.split_rows(found, execution, back=True))

    def last_losses(self, params: dict, x_BTD, targets_BT, execution: Execution):
        """Loss and log Z, [B, T] fp32, of the last layer's output; rows as in `execution.split`."""
        return losses.token_losses(
            self._normed(params, x_BTD), self._head_weight(params), targets_BT,
            num_real=self.model.vocab_size, softcap=self.model.logit_softcap,
            chunks=execution.loss_chunks, place=execution.place, policy=execution.policy,
        )  # fmt: skip

    def logits(
        self, params: dict, tokens_BT, segments_BT, positions_BT, execution: Execution
    ) -> Float[Array, "B T V"]:
        """fp32 logits; those of padding are -inf. For tests and sampling: they exist whole."""
        tokens_BT, *rows = self.split_rows((tokens_BT, segments_BT, positions_BT), execution)
        x_BTD, _ = self._hidden(params, tokens_BT, self_mask(*rows, execution), execution)
        return self.split_rows([self._head(params, x_BTD, execution)], execution, back=True)[0]

    def split_rows(self, arrays, execution: Execution, *, back: bool = False) -> list[Array]:
        """Arrays [B, T, ...] from the order of their rows to that of `execution.split`, or back."""
        return [
            split.reorder(array, execution.split, execution.place.mesh, back=back)
            for array in arrays
        ]

    def empty_cache(self, batch: int, length: int, execution: Execution) -> dict:
        """A cache of at least `length` slots in which nothing is visible (segment -1)."""
        model, place = self.model, execution.place
        ways = place.size(sharding.mesh_axes(place.activation(("cache",))[0]))
        length = -(-length // ways) * ways
        shape = (model.num_layers, batch, length, model.num_kv_heads, model.head_dim)
        zeros = place.constrain(jnp.zeros(shape, execution.policy.compute), CACHE)
        unseen_BS = jnp.full((batch, length), -1, jnp.int32)
        return {
            "key": zeros,
            "value": zeros,
            "segments": place.constrain(unseen_BS, ("batch", "cache")),
            "positions": place.constrain(jnp.zeros_like(unseen_BS), ("batch", "cache")),
        }

    def decode(
        self, params: dict, cache: dict, tokens_BT, segments_BT, positions_BT, now, execution
    ):
        """Logits of T more tokens written into the cache at slots now..now+T, and the new cache.

        `execution.place` must not split positions, as one token cannot be. It may split the cache.
        """
        tokens_BT, segments_BT, positions_BT = (
            execution.place.constrain(array, ("batch", "sequence"))
            for array in (tokens_BT, segments_BT, positions_BT)
        )
        segments_BS = attend.written(cache["segments"], segments_BT, now, place=execution.place)
        positions_BS = attend.written(cache["positions"], positions_BT, now, place=execution.place)
        mask = Mask(segments_BT, positions_BT, segments_BS, positions_BS)
        past = (cache["key"], cache["value"])
        x_BTD, past = self._hidden(params, tokens_BT, mask, execution, cache=past, now=now)
        cache = dict(zip(("key", "value"), past, strict=True))
        cache |= {"segments": segments_BS, "positions": positions_BS}
        return self._head(params, x_BTD, execution), cache

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

    def _head(self, params: dict, x_BTD, execution: Execution) -> Float[Array, "B T V"]:
        model, head_VD = self.model, self._head_weight(params)
        x_BTD = execution.place.constrain(x_BTD, INSIDE)
        to = execution.place.activation(("batch", "sequence", "vocab"))
        with execution.policy.products():
            logits_BTV = dot.dot("BTD,VD->BTV", x_BTD, head_VD, out=to, policy=execution.policy)
        logits_BTV = logits_BTV.astype(jnp.float32)
        if model.logit_softcap:
            logits_BTV = model.logit_softcap * jnp.tanh(logits_BTV / model.logit_softcap)
        real_V = np.arange(model.padded_vocab) < model.vocab_size
        return jnp.where(real_V, logits_BTV, -jnp.inf)

    def _hidden(self, params, tokens_BT, mask, execution: Execution, cache=None, now=None):
        x_BTD = self.embedded(params, tokens_BT, mask.positions_BT, execution)
        x_BTD, cache = self.apply_layers(
            params["blocks"], x_BTD, mask, execution, cache=cache, now=now
        )
        return self._normed(params, x_BTD), cache

    def embedded(self, params: dict, tokens_BT, positions_BT, execution: Execution):
        """What the first layer takes, [B, T, D]."""
        model = self.model
        look_up = functools.partial(embedding.embed, place=execution.place, policy=execution.policy)
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
        return {
            k: rope.rotation_of(positions_BT, rope.rope_frequencies(self.model, k)) for k in kinds
        }

    def apply_layers(
        self, blocks: dict, x_BTD, mask: Mask, execution: Execution, *, kinds=None,
        grad_buffers=None, rotations=None, cache=None, now=None,
    ):  # fmt: skip
        """x after layers with these stacked weights, and their cache.

        The layers are scanned in the shortest periods of their kinds; then what is left of a
        period. Inside a period neighbours of one kind are a scan too: the program holds each run of
        equal layers once.

        Args:
          kinds: of the layers, by default those of the model; or an int array of indices into
            `kind_names`, if they are known at run time only: -1 is no layer.
          grad_buffers: where the gradients of `blocks` go: see `sharding.accumulate_into`.
          rotations: of `mask.positions_BT`, by default made here.
        """
        model, definition = self.model, self._definitions[0]
        kinds = model.layer_kinds if kinds is None else kinds
        rotations = self.rotations(mask.positions_BT) if rotations is None else rotations

        def layer(kind: str) -> Callable:
            def apply(x_BTD, layer_arrays):
                weights, grad_buffers, cache = layer_arrays
                if grad_buffers is not None:
                    weights = dot.with_grad_buffers(execution.place, weights, grad_buffers)
                window = model.window if kind == families.LOCAL else 0
                block = nnx.merge(definition, weights)
                return block(x_BTD, rotations.get(kind), mask, window, execution, cache, now)

            return remat.checkpointed(apply, execution.remat)

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

        stacked = (blocks, grad_buffers, cache)
        with execution.policy.products():
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


def self_mask(segments_BT, positions_BT, execution: Execution) -> Mask:
    """Of rows of tokens, in the order of `execution.split`."""
    return Mask(
        segments_BT,
        positions_BT,
        segments_BT,
        positions_BT,
        ahead=0,
        one_document=not execution.packed,
    )

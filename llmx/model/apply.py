"""A decoder's parameters, and the functions of them: losses, layers, decoding.

Letters: B batch, T positions, S cache slots, D width, K key/value heads, H head size, V vocabulary,
L layers.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from llmx import sharding
from llmx.model import (
    adapters,
    distillation,
    dot,
    embedding,
    families,
    layers,
    looked_up,
    losses,
    own,
    remat,
    rope,
    turns,
)
from llmx.model.attention import split
from llmx.model.attention.cache import CACHE, arrays_of, empty_slots, slot_axes, write_slots
from llmx.model.attention.masks import Mask
from llmx.model.decoder import INSIDE, Block, Decoder, Norm
from llmx.model.execution import Execution
from llmx.model.recommender import apply as clicks
from llmx.tables.tables import Tables


def abstract_parameters(model: families.ModelConfig) -> tuple[dict, dict]:
    """The parameters' shapes and logical axes, as nested dicts; nothing is allocated."""
    if model.own:
        return own.abstract_parameters(model)
    if model.recommender.name:
        return clicks.abstract_parameters(model)
    state = nnx.state(nnx.eval_shape(lambda: Decoder(model, nnx.Rngs(0))))
    shapes, axes = nnx.to_pure_dict(state), nnx.to_pure_dict(sharding.logical_axes(state))
    for stack, name in (("blocks", "layers"), ("first", "first")):
        if stack in axes:
            axes[stack] = jax.tree.map(
                lambda names, name=name: (name, *names), axes[stack],
                is_leaf=lambda x: isinstance(x, tuple),
            )  # fmt: skip
    return shapes, axes


def init_parameters(model: families.ModelConfig, seed: int) -> dict:
    """Parameters as a nested dict of fp32 arrays; jit with out_shardings makes them split.

    Weights are normal with variance 1/fan_in, smaller by sqrt(2L) if they write to the stream
    (GPT-2); norms are one, biases zero.
    """
    if model.own:
        return own.init_parameters(model, seed)
    if model.recommender.name:
        return clicks.init_parameters(model, seed)
    return nnx.to_pure_dict(nnx.state(Decoder(model, nnx.Rngs(seed))))


@dataclasses.dataclass(frozen=True, eq=False)
class Apply:
    """A decoder as functions of its parameter dict, whose blocks [L, ...] are stacked.

    Arrays are global. What communicates: see `dot`, `embedding`, `losses`, `attention.attend`.
    """

    model: families.ModelConfig
    # what `table_ids` reads of a batch
    id_arrays: ClassVar[tuple[str, ...]] = ("tokens", "positions")

    @property
    def batch_arrays(self) -> dict[str, tuple[int, str]]:
        """What a batch has beside tokens, [B, T, n]: by name, n and the dtype."""
        return {}

    def losses(
        self, params: dict, batch: dict, execution: Execution, grad_buffers: dict | None = None
    ) -> tuple[Float[Array, "B T"], ...]:
        """Loss of each token, and log Z, in nats, fp32; and the divergence from a teacher, where
        the batch has what one says.

        `batch` has tokens, targets, segment_ids and positions, each int32 [B, T], and for routed
        experts "share", fp32 [B, T]: what a nat of each token's loss adds to what is minimized;
        where adapters drop inputs "noise", see `adapters.noise_of_rows`.
        `grad_buffers` is a tree like `params`, without what is frozen: see
        `sharding.accumulate_into`.
        """
        block_buffers = None
        if grad_buffers is not None:
            # The blocks have theirs inside the scan, so that each gradient is done with its layer.
            block_buffers = grad_buffers["blocks"]
            params = self.with_grad_buffers(params, grad_buffers, execution)
        names = ["tokens", "targets", "segment_ids", "positions"]
        names += ["share"] * (self.model.num_experts > 0 and "share" in batch)
        names += [name for name in ("noise", *distillation.OF_TEACHER) if name in batch]
        split = self.split_rows([batch[name] for name in names], execution)
        rows = dict(zip(names, split, strict=True))
        mask = self_mask(rows["segment_ids"], rows["positions"], execution)
        x_BTD = self.embedded(
            params, rows["tokens"], mask, execution, grad_buffers=grad_buffers,
            noise_BT=rows.get("noise"), taken=batch,
        )  # fmt: skip
        known = distillation.OF_LAYERS.items()
        with_outputs = tuple(output for output, of_teacher in known if of_teacher in rows)
        x_BTD, outputs = self.apply_layers(
            params["blocks"], x_BTD, mask, execution, grad_buffers=block_buffers,
            share_BT=rows.get("share"), noise_BT=rows.get("noise"), with_outputs=with_outputs,
        )  # fmt: skip
        found = self.last_losses(params, x_BTD, rows, execution)
        if with_outputs:
            settings = dict(place=execution.place, policy=execution.policy)
            of_layers = execution.distilled.layer_losses(outputs, rows, params, mask, **settings)
            found = *found, *of_layers
        return tuple(self.split_rows(found, execution, back=True))

    def table_ids(self, tables: Tables, batch: dict) -> dict[str, Array]:
        """What a batch looks up, int32 [B, T] by feature."""
        if tables.virtual:
            return looked_up.slots_by_feature(tables, batch)
        orders, rows = self.model.ngram_tables, self.model.ngram_rows
        return looked_up.ngrams(orders, rows, batch["tokens"], batch["positions"])

    def _with_ngrams(self, x_BTD: Array, params: dict, batch: dict, execution: Execution) -> Array:
        """Embedded tokens with the rows of the n-grams that end there added.

        Where `batch` has more tokens than are embedded, the first ones are those before them.
        """
        tables, (B, T, _) = execution.tables, x_BTD.shape
        num_added = -B % tables.devices
        if looked_up.TABLES in params:
            tables = tables.of_length(batch["tokens"].shape[1])
            # Each device looks as many rows of the batch up; nobody reads those that are added.
            batch = {
                name: jax.sharding.reshard(_with_rows(batch[name], num_added), tables.split)
                for name in (*self.id_arrays, looked_up.IDS) if name in batch
            }  # fmt: skip
        params, batch = looked_up.with_rows(params, batch, tables, self.table_ids(tables, batch))
        embedded = tables.combine(params[looked_up.ROWS], looked_up.plan_of(batch, tables))
        to = jax.typeof(x_BTD).sharding.spec
        for rows_BTD in embedded.values():
            own_BTD = rows_BTD[:, -T:].astype(x_BTD.dtype)
            if num_added:
                own_BTD = jax.sharding.reshard(own_BTD, jax.P())[:B]
            x_BTD += jax.sharding.reshard(own_BTD, to)
        return x_BTD

    def last_hidden(
        self, params: dict, batch: dict, execution: Execution, outputs: Mapping[str, Sequence[int]]
    ) -> list[Array]:
        """What the head multiplies, [B, T, D], of a batch as for `losses`; and for each of
        `outputs` (see `apply_layers`) that of P layers, [B, T, P, ...]."""
        names = ("tokens", "segment_ids", "positions")
        tokens_BT, *rows = self.split_rows([batch[name] for name in names], execution)
        mask = self_mask(*rows, execution)
        x_BTD = self.embedded(params, tokens_BT, mask, execution)
        x_BTD, of_layers = self.apply_layers(
            params["blocks"], x_BTD, mask, execution, with_outputs=tuple(outputs)
        )
        found = [self._normed(params, x_BTD)]
        for name, chosen in outputs.items():
            found.append(jnp.stack([of_layers[name][layer] for layer in chosen], axis=2))
        return self.split_rows(found, execution, back=True)

    def scores(
        self, params: dict, batch: dict, execution: Execution
    ) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
        """Loss of each token in nats, fp32, and whether the model finds no token likelier. Of a
        batch as for `losses`; without a gradient."""
        names = ("tokens", "targets", "segment_ids", "positions")
        tokens_BT, targets_BT, *rows = self.split_rows([batch[name] for name in names], execution)
        mask = self_mask(*rows, execution)
        x_BTD = self.embedded(params, tokens_BT, mask, execution)
        x_BTD, _ = self.apply_layers(params["blocks"], x_BTD, mask, execution)
        with execution.policy.products():
            found = losses.token_scores(
                *self._of_head(params, x_BTD), targets_BT, **self._head_settings(execution)
            )
        return tuple(self.split_rows(found, execution, back=True))

    def with_grad_buffers(self, params: dict, buffers: dict, execution: Execution) -> dict:
        """`params`, with buffers for the gradients of those outside layers that `buffers` has."""
        names = [name for name in buffers if name not in ("blocks", "first")]
        outside = ({name: tree[name] for name in names} for tree in (params, buffers))
        return params | dot.with_grad_buffers(execution.place, *outside)

    def last_losses(self, params: dict, x_BTD, rows: dict, execution: Execution):
        """What `losses` returns, [B, T] fp32, of the last layer's output; rows of a batch, and the
        result, are in the order of `execution.split`."""
        head, targets_BT = self._of_head(params, x_BTD), rows["targets"]
        settings = self._head_settings(execution)
        if execution.distilled is None:
            return losses.token_losses(*head, targets_BT, **settings)
        return execution.distilled.token_losses(head, targets_BT, rows, params, **settings)

    def _of_head(self, params: dict, x_BTD) -> tuple[Array, Array]:
        """What the head multiplies, and its weight."""
        return self._normed(params, x_BTD), self.head_weight(params)

    def _head_settings(self, execution: Execution) -> dict[str, Any]:
        return dict(
            num_real=self.model.vocab_size, softcap=self.model.logit_softcap,
            chunks=execution.loss_chunks, place=execution.place, policy=execution.policy,
        )  # fmt: skip

    def logits(
        self, params: dict, tokens_BT, segments_BT, positions_BT, execution: Execution
    ) -> Float[Array, "B T V"]:
        """fp32 logits; those of padding are -inf. For tests and sampling: they exist whole."""
        tokens_BT, *rows = self.split_rows((tokens_BT, segments_BT, positions_BT), execution)
        mask = self_mask(*rows, execution)
        x_BTD = self.embedded(params, tokens_BT, mask, execution)
        x_BTD, _ = self.apply_layers(params["blocks"], x_BTD, mask, execution)
        return self.split_rows([self._head(params, x_BTD, execution)], execution, back=True)[0]

    def split_rows(self, arrays, execution: Execution, *, back: bool = False) -> list[Array]:
        """Arrays [B, T, ...] from the order of their rows to that of `execution.split`, or back."""
        to, mesh = execution.split, execution.place.mesh
        return [split.reorder(array, to, mesh, back=back) for array in arrays]

    def empty_cache(self, batch: int, length: int, execution: Execution) -> dict:
        """A cache of S >= `length` slots in which nothing is visible (segment -1).

        "blocks", and "first" where there are such layers: two arrays [L, B, S, ...] of each pass
        through a layer, compute dtype or as `execution.kv_cache` says, keys and values [.., K, H]
        or what `cache.arrays_of` says; "segments" and "positions": int32 [B, S]; with tables of
        n-grams the last tokens of each row, as many as an n-gram may begin with.
        """
        model, place = self.model, execution.place
        ways = place.size(slot_axes(place))
        length = -(-length // ways) * ways

        def empty(layers: int) -> tuple:
            layers *= model.repeats
            return tuple(
                empty_slots(
                    axes, (layers, batch, length, *sizes), kind=execution.kv_cache,
                    dtype=execution.policy.compute, place=place,
                )
                for axes, sizes in arrays_of(model)
            )  # fmt: skip

        layers = {"blocks": empty(model.num_blocks)}
        layers |= {"first": empty(model.num_first)} if model.num_first else {}
        unseen_BS = place.constrain(jnp.full((batch, length), -1, jnp.int32), CACHE[1:3])
        positions_BS = place.constrain(jnp.zeros((batch, length), jnp.int32), CACHE[1:3])
        empty_cache = layers | dict(segments=unseen_BS, positions=positions_BS)
        if execution.tables is not None:
            num_before = max(model.ngram_tables) - 1
            before_BN = jnp.zeros((batch, num_before), jnp.int32)
            empty_cache[looked_up.BEFORE] = place.constrain(before_BN, (CACHE[1], None))
        return empty_cache

    def decode(
        self, params: dict, cache: dict, tokens_BT: Int[Array, "B T"], segments_BT, positions_BT,
        now: Array | int, execution: Execution,
    ) -> tuple[Float[Array, "B T V"], dict]:  # fmt: skip
        """fp32 logits of T more tokens of each row, and the cache with their keys and values.

        `cache` is from `empty_cache` or the call before; `now`, int32 [], the first token's slot.
        Tokens see slots of their own segment only; positions in a text are 0, 1, ... The layout of
        `execution` does not split positions, but may split slots over `sequence`.
        """
        place, rows = execution.place, (tokens_BT, segments_BT, positions_BT)
        rows = [place.constrain(array, ("batch", "sequence")) for array in rows]
        tokens_BT, segments_BT, positions_BT = rows
        segments_BS = write_slots(cache["segments"], segments_BT, now, place=place)
        positions_BS = write_slots(cache["positions"], positions_BT, now, place=place)
        mask = Mask(segments_BT, positions_BT, segments_BS, positions_BS)
        x_BTD, new = self.looked_up(params, tokens_BT, positions_BT, execution), {}
        if execution.tables is not None:
            batch, new[looked_up.BEFORE] = looked_up.continued(
                cache[looked_up.BEFORE], tokens_BT, positions_BT, is_text_BT=segments_BT >= 0
            )
            x_BTD = self._with_ngrams(x_BTD, params, batch, execution)
        stacks = {"first": self.first_layers} if self.model.num_first else {}
        for name, apply in (stacks | {"blocks": self}).items():
            x_BTD, new[name] = apply.apply_layers(
                params[name], x_BTD, mask, execution, cache=cache[name], now=now
            )
        new |= dict(segments=segments_BS, positions=positions_BS)
        return self._head(params, x_BTD, execution), new

    @functools.cached_property
    def _axes(self) -> dict:
        return abstract_parameters(self.model)[1]

    @functools.cached_property
    def _definitions(self) -> tuple[nnx.GraphDef, nnx.GraphDef]:
        """Of a block, and of the last norm."""
        model = self.model
        block = lambda: Block(model, nnx.Rngs(0), routed=model.num_experts > 0)  # noqa: E731
        modules = (block, lambda: Norm(model, (model.width,)))
        return tuple(nnx.split(nnx.eval_shape(module))[0] for module in modules)

    def _normed(self, params: dict, x_BTD):
        return nnx.merge(self._definitions[1], params["norm"])(x_BTD)

    def head_weight(self, params: dict) -> Float[Array, "V D"]:
        return params["embedding" if self.model.tied_head else "head"]

    def _head(self, params: dict, x_BTD, execution: Execution) -> Float[Array, "B T V"]:
        """Logits of the last layer's output."""
        model, head_VD = self.model, self.head_weight(params)
        x_BTD = execution.place.constrain(self._normed(params, x_BTD), INSIDE)
        to = execution.place.activation(("batch", "sequence", "vocab"))
        policy = dataclasses.replace(execution.policy, numbers=execution.policy.numbers.of_head)
        with policy.products():
            logits_BTV = dot.dot("BTD,VD->BTV", x_BTD, head_VD, out=to, policy=policy)
        logits_BTV = logits_BTV.astype(jnp.float32)
        if model.logit_softcap:
            logits_BTV = model.logit_softcap * jnp.tanh(logits_BTV / model.logit_softcap)
        real_V = np.arange(model.padded_vocab) < model.vocab_size
        return jnp.where(real_V, logits_BTV, -jnp.inf)

    @functools.cached_property
    def first_layers(self) -> "Apply":
        """The functions of first layers that have a stack of their own: `params["first"]`."""
        return Apply(families.first_layers(self.model))

    def embedded(
        self, params: dict, tokens_BT, mask: Mask, execution: Execution, *,
        grad_buffers: dict | None = None, noise_BT: Array | None = None,
        taken: dict | None = None,
    ) -> Float[Array, "B T D"]:  # fmt: skip
        """The input of the first of the blocks, in the compute dtype: of tokens looked up, and gone
        through first layers, if there are any, whose `grad_buffers` and noise are as in `losses`.

        taken: the batch, where rows of tables are among the parameters; else they are looked up.
        """
        x_BTD = self.looked_up(params, tokens_BT, mask.positions_BT, execution)
        if execution.tables is not None:
            own = dict(tokens=tokens_BT, positions=mask.positions_BT)
            x_BTD = self._with_ngrams(x_BTD, params, taken or own, execution)
        if not self.model.num_first:
            return x_BTD
        return self.first_layers.apply_layers(
            params["first"], x_BTD, mask, execution,
            grad_buffers=None if grad_buffers is None else grad_buffers.get("first"),
            noise_BT=noise_BT,
        )[0]  # fmt: skip

    def looked_up(
        self, params: dict, tokens_BT, positions_BT, execution: Execution
    ) -> Float[Array, "B T D"]:
        """The input of the first layer, in the compute dtype; rows as in `execution.split`."""
        model = self.model
        look_up = functools.partial(embedding.embed, place=execution.place, policy=execution.policy)
        if model.embedding_rank:
            x_BTD = embedding.embed_train(
                tokens_BT, params["embedding"], place=execution.place, policy=execution.policy
            )
        else:
            x_BTD = look_up(tokens_BT, params["embedding"])
        if model.embedding_scale:
            x_BTD = x_BTD * jnp.asarray(math.sqrt(model.width), x_BTD.dtype)
        if model.positions == "learned":
            x_BTD += look_up(positions_BT, params["positions"])
        return x_BTD

    def rotations(self, positions_BT: Int[Array, "B T"]) -> dict:
        """By kind of layer, the argument of `rope.rotate`: of kinds that are rotated."""
        model = self.model
        kinds = filter(families.is_rotated, self.kind_names) if model.positions == "rope" else ()

        def of(kind: str):
            frequencies = rope.rope_frequencies(model, kind)
            return rope.rotation_of(positions_BT, frequencies, rope.amplitude(model, kind))

        return {kind: of(kind) for kind in kinds}

    def apply_layers(
        self, blocks: dict, x_BTD: Float[Array, "B T D"], mask: Mask, execution: Execution, *,
        kinds: tuple[str, ...] | Array | None = None, grad_buffers: dict | None = None,
        rotations: dict | None = None, cache: tuple[Array, Array] | None = None,
        now: Array | int | None = None, row: Array | None = None, first: int = 0,
        share_BT: Array | None = None, noise_BT: Array | None = None,
        with_outputs: tuple[str, ...] = (),
    ) -> tuple[Float[Array, "B T D"], tuple[Array, Array] | dict[str, Array] | None]:  # fmt: skip
        """The output of layers with these stacked weights, and their cache.

        Args:
          blocks: weights of l layers, [l, ...] each; or of more, if `row` is that of the first.
          x_BTD: input of the first, in the order of `split_rows`, split as between blocks.
          kinds: of the l layers, by default those of the model; or int32 [l], indices into
            `kind_names`, if they are known at run time only: -1 is no layer.
          grad_buffers: [l, ...] each, like the weights: see `losses`.
          rotations: of `mask.positions_BT`, by default made here.
          cache: two arrays [l, B, S, ...] of `empty_cache`, into which those of x are written;
            None = none.
          now: the slot of the first position of x.
          row: int32 [], see `blocks`.
          first: the number of the first layer, by which the rules of `execution.remat` count.
          share_BT: see `losses`; None = losses of routed experts are left out.
          noise_BT: see `losses`; None = adapters drop nothing.
          with_outputs: some of `distillation.OF_LAYERS`; return those of all layers, [l, B, T, ...]
            by name, in the place of a cache; tokens then are in one group.
        """
        kinds = self.model.block_kinds if kinds is None else kinds
        rules = remat.parse(execution.remat, self.kind_names)
        rotations = self.rotations(mask.positions_BT) if rotations is None else rotations
        place, groups = execution.place, turns.Groups()
        if with_outputs:
            assert execution.turns == 1 and cache is None
            execution = dataclasses.replace(execution, hands_out=True)
        # Weight gradients that are left for later are of one product each.
        if execution.turns > 1 and cache is None and not dot.deferred(grad_buffers):
            groups = turns.groups_of(execution.turns, x_BTD, mask, place)
        masks = groups.split_masks(mask, rotations)
        if share_BT is not None:
            share_BT = place.constrain(share_BT, ("batch", "block_sequence"))
        layer_of = functools.partial(
            self._layer, masks, groups, execution, now, row, share_BT, noise_BT
        )
        layer_of = _with_outputs(with_outputs, layer_of) if with_outputs else layer_of
        is_layer = None if isinstance(kinds, tuple) else kinds >= 0
        if cache is not None and self.model.repeats > 1:
            cache = jax.tree.map(lambda slots: sharding.regrouped(slots, self.model.repeats), cache)
        others = (grad_buffers, cache, is_layer)
        with execution.policy.products():
            x, cache = layers.scan_layers(
                layer_of, kinds, groups.split_x(x_BTD, place), blocks, others,
                names=self.kind_names, rules=rules, offloaded=execution.offloaded, row=row,
                first=first, around=functools.partial(_repeated, self.model.repeats),
            )  # fmt: skip
        if self.model.repeats > 1 and with_outputs:
            cache = jax.tree.map(lambda outputs: outputs[:, -1], cache)  # of the last time
        elif self.model.repeats > 1 and cache is not None:
            cache = jax.tree.map(lambda slots: slots.reshape(-1, *slots.shape[2:]), cache)
        return groups.join_x(x, place), cache

    def _layer(
        self, masks: list, groups: turns.Groups, execution: Execution, now, row: Array | None,
        share_BT: Array | None, noise_BT: Array | None, kind: str, *, recomputed: bool,
        stack: dict | None,
    ) -> Callable:  # fmt: skip
        """(x, (weights, (gradient buffers, cache, is_layer)) of one layer) -> (x, its cache).

        `is_layer`: bool [], whether the layer is one and not an empty slot; None = it is.

        With a `stack`, [l, ...] each, the layer's index stands in the place of its weights, counted
        from `row` if the stack is of more layers. x is a list with one array for each group,
        [B/n, T, D] or [B, T/n, D], and `masks` has the mask and rotations of each. Of groups of
        positions the cache is None.
        """
        window = self.model.window if families.is_local(kind) else 0
        several, by_positions = groups.number > 1, groups.of == turns.POSITIONS
        execution = dataclasses.replace(execution, recomputed=recomputed)

        def layer(x, arrays):
            own, (grad_buffers, cache, is_layer) = arrays  # its weights, or its index
            weights, share = own, share_BT
            if share is not None and is_layer is not None:
                share = jnp.where(is_layer, share, 0)
            if stack is not None:
                index = own if row is None else row + own
                weights = jax.tree.map(lambda leaf: _row(leaf, index), stack)
            weights = jax.tree.map(_on_device, weights)
            if noise_BT is not None:
                weights = adapters.with_noise(weights, noise_BT)
            if several and execution.recomputed:
                weights = self._gathered(weights, execution)
            out, keys_and_values = [], () if by_positions else cache
            for group, (mask, rotations), buffers in zip(
                x, masks, turns.shared(grad_buffers, len(masks)), strict=True
            ):
                layer_weights = weights
                if buffers is not None:
                    layer_weights = dot.with_grad_buffers(execution.place, weights, buffers)
                block = nnx.merge(self._definitions[0], layer_weights)
                x_BTD, keys_and_values = block(
                    group, rotations.get(kind), mask, window, execution, keys_and_values, now,
                    share,
                )  # fmt: skip
                out.append(x_BTD)
            return out, None if by_positions else keys_and_values

        return layer

    def _gathered(self, weights: dict, execution: Execution) -> dict:
        """The weights of a layer, those that products take gathered: once for all groups."""
        policy = execution.policy

        def one(weight, axes):
            if "embed" not in axes:
                return weight
            gather = lambda weight: dot.whole(weight, policy.compute, policy.numbers, axes[1:])  # noqa: E731
            return adapters.on_base(gather, weight)  # of one layer

        axes = self._axes["blocks"]
        return jax.tree.map(one, weights, axes, is_leaf=dot.is_weight)

    @property
    def kind_names(self) -> tuple[str, ...]:
        """The kinds of the model's layers."""
        return tuple(sorted(set(self.model.layer_kinds)))


def of(model: families.ModelConfig) -> "Apply | own.Apply | clicks.Apply":
    """The functions of a model: of the decoder, of one that a program gives, or of clicks."""
    if model.recommender.name:
        return clicks.Apply(model)
    return own.Apply(model) if model.own else Apply(model)


def _repeated(repeats: int, layer: Callable) -> Callable:
    """A layer that x goes through `repeats` times, each time with a cache of its own. What each
    time puts into its gradient buffers is added up."""
    if repeats == 1:
        return layer

    def passes(x, arrays):
        weights, (grad_buffers, cache, is_layer) = arrays
        assert not dot.deferred(grad_buffers)  # the operands of one product (config/checks.py)
        caches = []
        for number, buffers in enumerate(turns.shared(grad_buffers, repeats)):
            of_pass = jax.tree.map(lambda slots, number=number: slots[number], cache)
            x, of_pass = layer(x, (weights, (buffers, of_pass, is_layer)))
            caches.append(of_pass)
        return x, jax.tree.map(lambda *slots: jnp.stack(slots), *caches)

    return passes


def _with_outputs(names: tuple[str, ...], layer_of: Callable) -> Callable:
    """Of layers of one group of tokens: these of their outputs are their second result."""

    def of(*given, **options):
        layer = layer_of(*given, **options)

        def with_outputs(x, arrays):
            (x_BTD,), received = layer(x, arrays)
            found = dict(zip(distillation.OF_LAYERS, (x_BTD, *received), strict=True))
            return [x_BTD], {name: found[name] for name in names}

        return with_outputs

    return of


def _row(stack: Array, index: Array) -> Array:
    return jax.lax.dynamic_index_in_dim(stack, index, keepdims=False)


def _on_device(weight: Array) -> Array:
    """A layer's weight, fetched if it is in the memory of the host."""
    if jax.typeof(weight).memory_space == jax.memory.Space.Device:
        return weight
    return jax.device_put(weight, jax.memory.Space.Device)


def _with_rows(array: Array, number: int) -> Array:
    """So many rows of zeros behind those that are there."""
    return jnp.pad(array, ((0, number), *[(0, 0)] * (array.ndim - 1))) if number else array


def self_mask(segments_BT, positions_BT, execution: Execution) -> Mask:
    """The mask of rows of tokens that attend to themselves, in the order of `execution.split`."""
    rows = (segments_BT, positions_BT)
    return Mask(*rows, *rows, ahead=0, one_document=not execution.packed)

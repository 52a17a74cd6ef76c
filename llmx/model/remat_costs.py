"""What rematerialization saves and what it computes again, per layer and token.

Three arguments are the same everywhere:

- `text`: the config's `remat`. ValueError where it is wrong, and where it is "budget", which is no
  policy yet.
- `chunks`: the layers of each model chunk of a pipeline, in the order of the model, which add up to
  L; () = one chunk. Rules and segments are those of each chunk, whose layers count from 0. All
  chunks have the slots of the longest: a shorter one has its segments, without the end. Dense first
  layers of a mixture are a chunk of their own, which `chunks` does not name, and a pipeline keeps
  nothing of them: it runs them again for their gradient, as the embedding.
- `offloaded`: names of `remat.SAVES` that are saved in the host's memory, whether `text` saves them
  or not. They are not computed again, and take no bytes of the device.

Letters: as in `llmx.model.costs`. Functions that end in `by_layer` give numbers of L + 2 layers:
embedding, L blocks, final norm and head.
"""

import functools
import itertools
from collections.abc import Sequence

from llmx.model import costs, remat
from llmx.model.families import ModelConfig
from llmx.model.remat import Policy


def policies(model: ModelConfig, text: str, chunks: Sequence[int] = ()) -> list[Policy]:
    """What each of the L layers saves, by the config's `remat`.

    `chunks`: see above. Raises ValueError where `text` is wrong or "budget".
    """
    if model.num_first:
        of_stacks = [policies(stack, text, of) for stack, of in _of_stacks(model, chunks)]
        return list(itertools.chain(*of_stacks))
    return list(_policies(tuple(model.layer_kinds), text, tuple(chunks)))


def _of_stacks(
    model: ModelConfig, chunks: Sequence[int]
) -> list[tuple[ModelConfig, Sequence[int]]]:
    """The dense first layers and the others as models, with the chunks of each."""
    first, blocks = costs.stacks(model)
    return [(first, ()), (blocks, chunks)]


@functools.lru_cache(maxsize=1024)
def _policies(kinds: tuple[str, ...], text: str, chunks: tuple[int, ...]) -> tuple[Policy, ...]:
    names, parts = sorted(set(kinds)), _parts(kinds, chunks)
    rules = remat.parse(text, names)
    if not _alike(parts):
        # Kinds are known at run time only.
        any_kind = lambda layer: [remat.policy_of(rules, layer, kind) for kind in names]  # noqa: E731
        return tuple(remat.union(any_kind(layer)) for part in parts for layer in range(len(part)))
    return tuple(
        remat.policy_of(rules, layer, kind) for part in parts for layer, kind in enumerate(part)
    )


def segments(model: ModelConfig, text: str, chunks: Sequence[int] = ()) -> list[tuple[int, int]]:
    """(first layer, end) of the segments of layers that are run again together.

    Layers count from the first of the model; no segment crosses the end of a chunk. `chunks`: see
    above. Raises ValueError where `text` is wrong or "budget".
    """
    if model.num_first:
        first, blocks = (segments(stack, text, of) for stack, of in _of_stacks(model, chunks))
        return first + [(start + model.num_first, end + model.num_first) for start, end in blocks]
    return list(_segments(tuple(model.layer_kinds), text, tuple(chunks)))


def saves_all(model: ModelConfig, text: str) -> bool:
    """Whether all layers save everything."""
    return all(policy.saved is None for policy in policies(model, text))


def saves_all_products(model: ModelConfig, text: str) -> bool:
    """Whether each layer saves all products with weights, and not everything: `remat="dots"`."""
    saved = [policy.saved for policy in policies(model, text)]
    return not segments(model, text) and all(
        names is not None and names >= set(remat.PRODUCTS) for names in saved
    )


def policies_apart(model: ModelConfig, text: str, chunks: Sequence[int] = ()) -> list[Policy]:
    """Those of `policies` whose layers are in no segment: what these save is kept from the forward
    pass."""
    inside = {n for first, end in segments(model, text, chunks) for n in range(first, end)}
    return [of for n, of in enumerate(policies(model, text, chunks)) if n not in inside]


@functools.lru_cache(maxsize=1024)
def _segments(
    kinds: tuple[str, ...], text: str, chunks: tuple[int, ...]
) -> tuple[tuple[int, int], ...]:
    found, kind, parts = [], kinds[0], _parts(kinds, chunks)
    rules = remat.parse(text, sorted(set(kinds)))
    start, slots = 0, max(map(len, parts))
    for part in parts:
        for first, end, policy_of in remat.series(rules, slots):
            period = remat.period_of(part[first:end]) if _alike(parts) else 1
            size = remat.segment_size(policy_of(kind), end - first, period)
            stop = min(end, len(part))
            if size > 1:
                found += [
                    (start + layer, start + min(layer + size, stop))
                    for layer in range(first, stop, size)
                ]
        start += len(part)
    return tuple(found)


def _parts(kinds: Sequence[str], chunks: Sequence[int]) -> list[tuple[str, ...]]:
    """The kinds of the layers of each chunk."""
    chunks = chunks or (len(kinds),)
    if sum(chunks) != len(kinds):
        raise ValueError(
            f"chunks={tuple(chunks)} are {sum(chunks)} layers and the model has {len(kinds)}: give "
            "the layers of each model chunk, or () for a model in one"
        )
    stops = itertools.accumulate(chunks)
    return [tuple(kinds[end - num : end]) for num, end in zip(chunks, stops, strict=True)]


def branches(model: ModelConfig, chunks: Sequence[int]) -> bool:
    """Whether the kinds of a chunk's layers are known at run time only: stages then take branches.

    `chunks`: see above.
    """
    return len(set(model.layer_kinds)) > 1 and not _alike(_parts(model.block_kinds, chunks))


def _alike(parts: Sequence[tuple[str, ...]]) -> bool:
    """Whether the layers at one place of all chunks are of one kind; else an array says which."""
    return len(set(parts)) == 1


def recomputed_flops_by_layer(
    model: ModelConfig, *, sequence_length: int, text: str, loss_chunks: int, causal: bool = True,
    chunks: Sequence[int] = (), offloaded: Sequence[str] = (),
) -> list[float]:  # fmt: skip
    """FLOPs per token of the forward pass that the backward pass repeats, by layer.

    Only what gradients need: a block's last product is repeated where a norm follows it; the layers
    of a segment are run once more, whole, and all layers are with "part". What an attention kernel
    repeats by itself is left out.
    With several `loss_chunks`, parts of the vocabulary in the loss, logits are not saved. `text`,
    `chunks`, `offloaded`: see above. Raises ValueError where `text` is wrong or "budget".
    """
    if model.num_first:
        sizes = dict(
            sequence_length=sequence_length, text=text, loss_chunks=loss_chunks, causal=causal,
            offloaded=offloaded,
        )  # fmt: skip
        first, blocks = (
            recomputed_flops_by_layer(stack, chunks=of, **sizes)
            for stack, of in _of_stacks(model, chunks)
        )
        if chunks:
            forward = costs.forward_flops_by_layer(
                model, sequence_length=sequence_length, causal=causal
            )
            first = [again + flops for again, flops in zip(first, forward, strict=False)]
        return [0.0, *first[1 : model.num_first + 1], *blocks[1:]]
    chosen = policies(model, text, chunks)
    scores = costs.scores_by_block(model, sequence_length, causal)
    forward = costs.forward_flops_by_layer(model, sequence_length=sequence_length, causal=causal)
    times, pairs = model.repeats, list(zip(chosen, scores, strict=True))
    of_block = {  # a deep model has few different layers
        pair: times * recomputed_flops(model, pair[0], pair[1] / times, offloaded)
        for pair in set(pairs)
    }
    blocks = [of_block[pair] for pair in pairs]
    again = segments(model, text, chunks)
    again += [(0, model.num_layers)] * remat.keeps_input(text)
    for first, end in again:
        for layer in range(first, end):
            blocks[layer] += forward[layer + 1]
    head = 2.0 * model.width * model.vocab_size if loss_chunks > 1 else 0.0
    return [0.0, *blocks, head]


def recomputed_flops(
    model: ModelConfig, policy: Policy, scores: float, offloaded: Sequence[str] = ()
) -> float:
    """FLOPs per token that the backward pass of one block repeats of one pass forward.

    `scores`: of attention in the forward pass. `offloaded`: see above.
    """
    D, sizes = model.width, costs.products_of_attention(model) | costs.products_of_mlp(model)
    again = recomputed(model, policy, offloaded)
    products = sum(2.0 * sizes.get(name, 0) for name in again)
    products += _repeated_by_experts(model)
    if policy.saved is not None:
        products += 2.0 * D * model.num_experts  # the router
        # What lies between two factors is made again, also where their result is not.
        between = costs.between_factors(model)
        products += sum(
            2.0 * inputs * rank for name, (inputs, rank) in between.items() if name not in again
        )
    return products + (scores if remat.ATTENTION in again else 0.0)


def mlp_dim(model: ModelConfig) -> int:
    """F of the MLP that every token goes through, 0 = there is none."""
    return model.shared_dim if model.num_experts else model.mlp_dim


def _repeated_by_experts(model: ModelConfig) -> float:
    """FLOPs per token that the gradient of routed experts repeats of their forward pass, under any
    policy: the products with gate and up."""
    if not model.num_experts:
        return 0.0
    inward = costs.matrices_of_mlp(model) - 1
    return 2.0 * inward * model.width * model.experts_per_token * model.expert_dim


def recomputed(model: ModelConfig, policy: Policy, offloaded: Sequence[str] = ()) -> set[str]:
    """What the backward pass of one block computes again: results of products, and of attention,
    by their names in `remat.SAVES`. `offloaded`: see above."""
    if policy.saved is None:
        return set()
    saved = policy.saved | set(offloaded)
    # Norms of queries and keys are differentiated at what they take.
    rotated, latent = remat.QUERY_KEY_VALUE in saved, model.kv_latent > 0
    needed = {
        remat.QUERY: model.qk_norm or not rotated, remat.KEY: model.qk_norm or not rotated,
        remat.VALUE: not rotated, remat.QUERY_LATENT: model.query_latent > 0 and latent,
        remat.LATENT: latent, remat.ATTENTION: True, remat.ATTENTION_OUT: True,
        remat.GATE: model.gated_mlp, remat.UP: True, remat.MLP_OUT: model.post_norms,
    }  # fmt: skip
    return {name for name, is_needed in needed.items() if is_needed and name not in saved}


def bytes_of_saves(model: ModelConfig, compute_bytes: int) -> dict[str, int]:
    """Bytes per token of each of `remat.SAVES` in one layer."""
    D, F, H, N, K = model.width, mlp_dim(model), model.head_dim, model.num_heads, model.num_kv_heads
    V, R, P = model.value_width, model.kv_latent, model.rotated_dim
    sizes = {
        remat.INPUT: D, remat.ATTENTION_NORM: D, remat.QUERY: N * H,
        remat.KEY: N * (H - P + V) if R else K * H, remat.VALUE: 0 if R else K * H,
        remat.QUERY_LATENT: model.query_latent * (R > 0), remat.LATENT: R + P if R else 0,
        remat.QUERY_KEY_VALUE: N * H + K * (H + V), remat.ATTENTION: N * V,
        remat.ATTENTION_OUT: D, remat.MLP_NORM: D, remat.GATE: F * model.gated_mlp, remat.UP: F,
        remat.HIDDEN: F, remat.MLP_OUT: D,
    }  # fmt: skip
    # And the log-sum-exp of scores, in fp32. Without norms before it attention takes the input of
    # the layer, which then takes room of its own only where it is gathered.
    return {
        name: compute_bytes * size + 4 * N * (name == remat.ATTENTION)
        for name, size in sizes.items()
    }


def saved_bytes_by_layer(
    model: ModelConfig, *, text: str, loss_chunks: int, compute_bytes: int,
    chunks: Sequence[int] = (), offloaded: Sequence[str] = (),
) -> list[int]:  # fmt: skip
    """Bytes of the device per token of the activations that each layer saves for its backward pass.

    As jax traces it, with an attention kernel that saves no scores, and without the statistics of
    norms; a compiler may save less. Layers in segments have only the segment's input and the
    routing of experts, and not what they save when the segment is run again; with "part" chunks
    have their input alone. `text`, `chunks`,
    `offloaded`: see above. `loss_chunks`: see `recomputed_flops_by_layer`. `compute_bytes`: of a
    number in the compute dtype; norms, logits, log-sum-exps are in fp32. Raises ValueError where
    `text` is wrong or "budget".
    """
    if model.num_first:
        sizes = dict(
            text=text, loss_chunks=loss_chunks, compute_bytes=compute_bytes, offloaded=offloaded
        )
        first, blocks = (
            saved_bytes_by_layer(stack, chunks=of, **sizes)
            for stack, of in _of_stacks(model, chunks)
        )
        first = first[1:-1] if not chunks else [0] * model.num_first
        return [4, *first, *blocks[1:]]
    chosen = policies(model, text, chunks)
    by_policy = {
        policy: saved_bytes(model, policy, compute_bytes, offloaded) for policy in set(chosen)
    }
    blocks = [model.repeats * by_policy[policy] for policy in chosen]
    of_input = 0 if remat.INPUT in offloaded else compute_bytes * model.width
    for first, end in segments(model, text, chunks):
        routing = model.repeats * _routing_bytes(model)
        blocks[first:end] = [of_input + routing, *[routing] * (end - first - 1)]
    if remat.keeps_input(text):
        stops = itertools.accumulate(chunks or (model.num_layers,))
        firsts = {0, *stops}
        blocks = [of_input * (layer in firsts) for layer in range(model.num_layers)]
    logits = model.padded_vocab if loss_chunks == 1 else 0
    # Token ids; and into the head, the last norm's arrays, log Z and the target.
    head = compute_bytes * model.width + 4 * (3 * model.width + logits + 2)
    return [4, *blocks, head]


def saved_bytes_of_chunk(
    model: ModelConfig, *, text: str, compute_bytes: int, chunks: Sequence[int],
    offloaded: Sequence[str] = (),
) -> int:  # fmt: skip
    """Bytes of the device per token that the blocks of the chunk with most save.

    Arguments and errors: see `saved_bytes_by_layer`.
    """
    _, *by_layer, _ = saved_bytes_by_layer(
        costs.stacks(model)[-1], text=text, loss_chunks=1, compute_bytes=compute_bytes,
        chunks=chunks, offloaded=offloaded,
    )  # fmt: skip
    stops = itertools.accumulate(chunks, initial=0)
    return max(sum(by_layer[first:end]) for first, end in itertools.pairwise(stops))


def saved_bytes(
    model: ModelConfig, policy: Policy, compute_bytes: int, offloaded: Sequence[str] = ()
) -> int:
    """Bytes of the device per token that one layer saves. `offloaded`: see above."""
    if policy.saved is None:
        return _all_bytes(model, compute_bytes)
    sizes = bytes_of_saves(model, compute_bytes)
    saved = {*policy.saved, *offloaded, remat.INPUT}
    if not model.post_norms:
        saved -= {remat.MLP_OUT}  # no gradient needs it
    if remat.QUERY_KEY_VALUE in saved:
        saved -= {remat.VALUE} if model.qk_norm else {remat.QUERY, remat.KEY, remat.VALUE}
    return sum(sizes[name] for name in saved.difference(offloaded)) + _routing_bytes(model)


def _routing_bytes(model: ModelConfig) -> int:
    """Of the numbers of a token's experts."""
    return 4 * model.experts_per_token if model.num_experts else 0


def _all_bytes(model: ModelConfig, compute_bytes: int) -> int:
    D, F, H, N, K = model.width, mlp_dim(model), model.head_dim, model.num_heads, model.num_kv_heads
    num_norms = costs.norms_of_block(model)
    # Input, inputs and output of attention, inputs of the MLP's activation. A norm saves its input,
    # in fp32 where it takes the mean from it, and in fp32 normalised and scaled.
    activation = (6 if model.activation == "gelu" else 4) * F + (2 * F if model.gated_mlp else 0)
    normed = num_norms * D + ((N + K) * H if model.qk_norm else 0)
    in_compute_dtype = 2 * D + N * H + K * (H + model.value_width) + N * model.value_width
    latents = model.kv_latent + model.query_latent if model.kv_latent else 0
    normed, in_compute_dtype = normed + latents, in_compute_dtype + latents + activation
    in_compute_dtype += sum(rank for _, rank in costs.between_factors(model).values())
    of_input = 4 if model.norm == "layer" else compute_bytes
    return compute_bytes * in_compute_dtype + (of_input + 8) * normed + 4 * N

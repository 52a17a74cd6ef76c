"""What rematerialization saves and what it computes again, per layer and token.

Letters: as in `llmx.model.costs`. Functions that end in `by_layer` give numbers of L + 2 layers:
embedding, L blocks, final norm and head.
"""

from llmx.model import costs, remat
from llmx.model.families import ModelConfig
from llmx.model.remat import Policy


def policies(model: ModelConfig, text: str) -> list[Policy]:
    """What each of the L layers saves, by the config's `remat`. ValueError where it is wrong."""
    kinds = model.layer_kinds
    rules = remat.parse(text, sorted(set(kinds)))
    return [remat.policy_of(rules, layer, kind) for layer, kind in enumerate(kinds)]


def segments(model: ModelConfig, text: str) -> list[tuple[int, int]]:
    """(first layer, end) of the segments of layers that are run again together."""
    found, kinds = [], model.layer_kinds
    rules = remat.parse(text, sorted(set(kinds)))
    for first, end, policy_of in remat.series(rules, len(kinds)):
        part = kinds[first:end]
        size = remat.segment_size(policy_of(part[0]), len(part), remat.period_of(part))
        if size > 1:
            found += [(start, min(start + size, end)) for start in range(first, end, size)]
    return found


def recomputed_flops_by_layer(
    model: ModelConfig, *, sequence_length: int, remat: str, loss_chunks: int, causal: bool = True
) -> list[float]:
    """FLOPs per token of the forward pass that the backward pass repeats, by layer.

    Only what gradients need: a block's last product is repeated where a norm follows it; the layers
    of a segment are run once more, whole. What an attention kernel repeats by itself is left out.
    `remat`: the config's. With several `loss_chunks` logits are not saved.
    """
    chosen = policies(model, remat)
    scores = costs.scores_by_block(model, sequence_length, causal)
    forward = costs.forward_flops_by_layer(model, sequence_length=sequence_length, causal=causal)
    blocks = [
        recomputed_flops(model, policy, of_scores)
        for policy, of_scores in zip(chosen, scores, strict=True)
    ]
    for first, end in segments(model, remat):
        for layer in range(first, end):
            blocks[layer] += forward[layer + 1]
    head = 2.0 * model.width * model.vocab_size if loss_chunks > 1 else 0.0
    return [0.0, *blocks, head]


def recomputed_flops(model: ModelConfig, policy: Policy, scores: float) -> float:
    """FLOPs per token that the backward pass of one block repeats of its forward pass.

    `scores`: of attention in the forward pass.
    """
    D, H, N, K, F = model.width, model.head_dim, model.num_heads, model.num_kv_heads, model.mlp_dim
    if (saved := policy.saved) is None:
        return 0.0
    # Norms of queries and keys are differentiated at what they take.
    rotated = remat.QUERY_KEY_VALUE in saved
    products = {
        remat.QUERY: D * N * H * (model.qk_norm or not rotated),
        remat.KEY: D * K * H * (model.qk_norm or not rotated),
        remat.VALUE: D * K * H * (not rotated),
        remat.ATTENTION_OUT: N * H * D,
        remat.GATE: D * F * model.gated_mlp,
        remat.UP: D * F,
        remat.MLP_OUT: F * D * model.post_norms,
    }
    again = sum(2.0 * size for name, size in products.items() if name not in saved)
    return again + (0.0 if remat.ATTENTION in saved else scores)


def bytes_of_saves(model: ModelConfig, compute_bytes: int) -> dict[str, int]:
    """Bytes per token of each of `remat.SAVES` in one layer."""
    D, F, H, N, K = model.width, model.mlp_dim, model.head_dim, model.num_heads, model.num_kv_heads
    sizes = {
        remat.INPUT: D, remat.ATTENTION_NORM: D, remat.QUERY: N * H, remat.KEY: K * H,
        remat.VALUE: K * H, remat.QUERY_KEY_VALUE: (N + 2 * K) * H, remat.ATTENTION: N * H,
        remat.ATTENTION_OUT: D, remat.MLP_NORM: D, remat.GATE: F * model.gated_mlp, remat.UP: F,
        remat.HIDDEN: F, remat.MLP_OUT: D,
    }  # fmt: skip
    # And the log-sum-exp of scores, in fp32.
    return {
        name: compute_bytes * size + 4 * N * (name == remat.ATTENTION)
        for name, size in sizes.items()
    }


def saved_bytes_by_layer(
    model: ModelConfig, *, remat: str, loss_chunks: int, compute_bytes: int
) -> list[int]:
    """Bytes per token of the activations that each layer saves for its backward pass.

    As jax traces it, with an attention kernel that saves no scores, and without the statistics of
    norms; a compiler may save less. Layers in segments have only the segment's input, and not what
    they save when the segment is run again. `remat` and `loss_chunks`: see
    `recomputed_flops_by_layer`. `compute_bytes`: of a number in the compute dtype; norms, logits,
    log-sum-exps are in fp32.
    """
    chosen = policies(model, remat)
    blocks = [saved_bytes(model, policy, compute_bytes) for policy in chosen]
    for first, end in segments(model, remat):
        blocks[first:end] = [compute_bytes * model.width, *[0] * (end - first - 1)]
    logits = model.padded_vocab if loss_chunks == 1 else 0
    # Token ids; and into the head, the last norm's arrays, log Z and the target.
    head = compute_bytes * model.width + 4 * (3 * model.width + logits + 2)
    return [4, *blocks, head]


def saved_bytes(model: ModelConfig, policy: Policy, compute_bytes: int) -> int:
    """Bytes per token that one layer saves."""
    if policy.saved is None:
        return _all_bytes(model, compute_bytes)
    saved, sizes = set(policy.saved) | {remat.INPUT}, bytes_of_saves(model, compute_bytes)
    if not model.post_norms:
        saved -= {remat.MLP_OUT}  # no gradient needs it
    if remat.QUERY_KEY_VALUE in saved and not model.qk_norm:
        saved -= {remat.QUERY, remat.KEY, remat.VALUE}
    return sum(sizes[name] for name in saved)


def _all_bytes(model: ModelConfig, compute_bytes: int) -> int:
    D, F, H, N, K = model.width, model.mlp_dim, model.head_dim, model.num_heads, model.num_kv_heads
    num_norms = 4 if model.post_norms else 2
    # Input, inputs and output of attention, inputs of the MLP's activation; a norm saves its input,
    # normalised and scaled.
    activation = (6 if model.activation == "gelu" else 4) * F + (2 * F if model.gated_mlp else 0)
    normed = num_norms * D + ((N + K) * H if model.qk_norm else 0)
    in_compute_dtype = 2 * D + (N + 2 * K) * H + N * H + activation
    return compute_bytes * in_compute_dtype + 4 * (3 * normed + N)

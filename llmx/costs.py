"""What a model costs: parameters and FLOPs of a `ModelConfig`, counted in this one place.

Letters: B batch, T positions, D width, F mlp_dim, N num_heads, K num_kv_heads, H head_dim,
V vocab_size, L num_layers; W window; g = 3 matrices in a gated MLP, else 2.

Parameters, without biases:

    V D                                     embedding; positions T_max D where they are learned
    L [ D H (N + 2K) + N H D                attention: queries, keys, values, output
        + g D F                             MLP
        + (2 | 4) D  (+ 2 H) ]              norms of the block, of queries and keys
    + D                                     final norm
    + V D                                   head, unless it is the embedding table

A LayerNorm has a bias beside its scale. `bias` gives each projection of attention and MLP one.

Forward FLOPs per token, a multiply-add counted as 2:

    2 [ D H (N + 2K) + N H D + g D F ] L    weights of the layers
    + 4 N H S L                             scores q.k and their sums over v
    + 2 D V                                 head, tied or not; the embedding lookup is none

S is the mean number of keys that a query sees: (T + 1) / 2 in a causal layer, fewer behind a window
W. The backward pass costs twice the forward: one product for the gradient of each of two factors.
Norms, activations, softmax and the optimizer are left out, as is what remat computes again: these
are the FLOPs of the model and not those of a program, as in PaLM (arXiv 2204.02311, appendix B)
and the scaling book (jax-ml.github.io/scaling-book/transformers). PaLM has S = T (`causal=False`).
"""

from llmx.families import LOCAL, ModelConfig

TRAINING_PASSES = 3  # forward, gradient by the input, gradient by the weights


def parameters_by_part(model: ModelConfig) -> dict[str, int]:
    """Parameters of embedding, positions, attention, mlp, norms, head, and of vocabulary padding.

    "padding" is what `vocab_multiple` adds to the embedding table and to the head.
    """
    D, F, L, H = model.width, model.mlp_dim, model.num_layers, model.head_dim
    N, K, V = model.num_heads, model.num_kv_heads, model.vocab_size
    num_matrices = 3 if model.gated_mlp else 2

    attention = D * H * (N + 2 * K) + N * H * D
    mlp = num_matrices * D * F
    if model.bias:
        attention += H * (N + 2 * K) + D
        mlp += (num_matrices - 1) * F + D
    norm = 2 * D if model.norm == "layer" else D
    block_norms = (4 if model.post_norms else 2) * norm + (2 * H if model.qk_norm else 0)
    num_tables = 1 if model.tied_head else 2
    return {
        "embedding": V * D,
        "positions": model.max_positions * D if model.positions == "learned" else 0,
        "attention": L * attention,
        "mlp": L * mlp,
        "norms": L * block_norms + norm,
        "head": 0 if model.tied_head else V * D,
        "padding": num_tables * (model.padded_vocab - V) * D,
    }


def num_parameters(model: ModelConfig) -> int:
    """Parameters as published: without the rows that pad the vocabulary."""
    return num_stored_parameters(model) - parameters_by_part(model)["padding"]


def num_stored_parameters(model: ModelConfig) -> int:
    """Parameters of the initialised tree, rows that pad the vocabulary included: for memory."""
    return sum(parameters_by_part(model).values())


def num_non_embedding_parameters(model: ModelConfig) -> int:
    """Parameters without token and position tables and without a head of its own: scaling laws."""
    parts = parameters_by_part(model)
    return parts["attention"] + parts["mlp"] + parts["norms"]


def keys_per_query(model: ModelConfig, *, sequence_length: int, causal: bool = True) -> list[float]:
    """S of each of the L layers: keys that a query sees, averaged over the sequence's positions.

    causal=False counts every key, also those that the masks hide: what attention without a kernel
    that skips them computes. Boundaries of packed documents are not taken off in either case.
    """
    T, W = sequence_length, min(model.window, sequence_length)
    seen = {kind: (T + 1) / 2 if causal else float(T) for kind in model.layer_kinds}
    if LOCAL in seen and causal:
        # Position t = 1..T sees min(t, W) keys.
        seen[LOCAL] = (W * (W + 1) / 2 + (T - W) * W) / T
    return [seen[kind] for kind in model.layer_kinds]


def forward_flops_by_part(
    model: ModelConfig, *, sequence_length: int, causal: bool = True
) -> dict[str, float]:
    """Forward FLOPs per token of the attention projections, the scores, the MLP and the head."""
    D, F, L, H = model.width, model.mlp_dim, model.num_layers, model.head_dim
    N, K, V = model.num_heads, model.num_kv_heads, model.vocab_size
    seen = keys_per_query(model, sequence_length=sequence_length, causal=causal)
    return {
        "projections": 2.0 * L * (D * H * (N + 2 * K) + N * H * D),
        "scores": 4.0 * N * H * sum(seen),
        "mlp": 2.0 * L * (3 if model.gated_mlp else 2) * D * F,
        "head": 2.0 * D * V,
    }


def forward_flops_per_token(
    model: ModelConfig, *, sequence_length: int, causal: bool = True
) -> float:
    """FLOPs of the forward pass per token of a sequence."""
    return sum(
        forward_flops_by_part(model, sequence_length=sequence_length, causal=causal).values()
    )


def training_flops_per_token(
    model: ModelConfig, *, sequence_length: int, causal: bool = True
) -> float:
    """FLOPs of forward and backward pass per token: what MFU is measured by."""
    return TRAINING_PASSES * forward_flops_per_token(
        model, sequence_length=sequence_length, causal=causal
    )

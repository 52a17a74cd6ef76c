"""What a model costs: parameters and FLOPs of a `ModelConfig`, counted in this one place.

Letters: B batch, T positions, D width, F mlp_dim, N num_heads, K num_kv_heads, H head_dim,
V vocab_size, L num_layers; W window; g = 3 matrices in a gated MLP, else 2.

Parameters, without biases:

    V D                                     embedding; positions T_max D where they are learned
    L [ D H (N + 2K) + N H D                attention: queries, keys, values, output
        + g D F                             MLP
        + (2 | 4) D  (+ 2 H | (N + K) H)    norms of the block, of queries and keys
        (+ N) ]                             sinks
    + D                                     final norm
    + V D                                   head, unless it is the embedding table

A LayerNorm has a bias beside its scale. `bias` gives each projection of attention and MLP one,
`qkv_bias` those of queries, keys and values.
Latent attention (of R numbers, Q for queries, P of a head's H rotated, V_h of a value) has in the
place of D H (N + 2K) + N H D

    D Q + Q N H  (D N H without Q)          queries
    + D (R + P) + R N (H - P + V_h)         keys and values
    + N V_h D                               output

and norms of R and Q numbers; its scores take 2 N (H + V_h) S. Generation does not make keys and
values of the latents, and takes other FLOPs.

A product of two factors of rank r (`ranks`) has r (inputs + outputs) in the place of inputs times
outputs. A layer that a token goes through n times (`repeats`) counts once in parameters, n times in
FLOPs. An embedding that is a train of tensors counts its cores (`tensor_train`).

With routed experts the MLP's g D F is E g D F_e + g D F_s + D E, of E experts of width F_e, a
shared one of width F_s and the router; of a token's k experts it is k g D F_e + g D F_s + D E,
which is what is active, and what FLOPs are counted by. The bias by which experts are chosen, E in
each layer, is kept beside the parameters ("loads").

Forward FLOPs per token, a multiply-add counted as 2:

    2 [ D H (N + 2K) + N H D + g D F ] L    weights of the layers
    + 4 N H S L                             scores q.k and their sums over v
    + 2 D V                                 head, tied or not; the embedding lookup is none

S is the mean number of keys that a query sees: (T + 1) / 2 in a causal layer, fewer behind a window
W. The backward pass costs twice the forward. Norms, activations, softmax, the optimizer and what
remat computes again are left out, as in PaLM (arXiv 2204.02311, appendix B; its S is T:
`causal=False`) and the scaling book (jax-ml.github.io/scaling-book/transformers).

Functions that end in `by_layer` give numbers of L + 2 layers: embedding, L blocks, final norm and
head.
"""

from collections.abc import Sequence

from llmx.model import families, ranks, tensor_train
from llmx.model.families import ALL_HEADS, ModelConfig

# The names of `remat.SAVES` of products, without and with latents.
ATTENTION_PRODUCTS = (
    {
        "attention/query": "query", "attention/key": "key", "attention/value": "value",
        "attention/out": "attention_out",
    },
    {
        "attention/query_down": "query_latent", "attention/query": "query",
        "attention/down": "latent", "attention/out": "attention_out",
    },
)  # fmt: skip
MLP_PRODUCTS = {"gate": "gate", "up": "up", "down": "mlp_out"}

TRAINING_PASSES = 3  # forward, gradient by the input, gradient by the weights


def parameters_by_part(model: ModelConfig) -> dict[str, int]:
    """Parameters by part; "padding" is what `vocab_multiple` adds to both tables of tokens, and
    "loads" the bias of routed experts: neither is published."""
    D, V = model.width, model.vocab_size
    norm = 2 * D if model.norm == "layer" else D
    attention, mlp, norms = map(sum, zip(*map(_of_stack, stacks(model)), strict=True))
    train = tensor_train.num_parameters(model)
    num_tables = (0 if train else 1) + (0 if model.tied_head else 1)
    return {
        "embedding": train or V * D,
        "positions": model.max_positions * D if model.positions == "learned" else 0,
        "attention": attention,
        "mlp": mlp,
        "norms": norms + norm,
        "head": 0 if model.tied_head else V * D,
        "loads": model.num_blocks * model.num_experts,
        "padding": num_tables * (model.padded_vocab - V) * D,
    }


def stacks(model: ModelConfig) -> list[ModelConfig]:
    """Models of equal layers, one after the other: dense first layers, if there are any, and the
    others."""
    first = [families.first_layers(model)] if model.num_first else []
    return [*first, families.blocks(model)]


def _of_stack(model: ModelConfig) -> tuple[int, int, int]:
    """Parameters of attention, MLP and norms of equal layers."""
    D, H = model.width, model.head_dim
    attention, mlp = weights_of_block(model)
    if model.bias or model.qkv_bias:
        attention += H * (model.num_heads + 2 * model.num_kv_heads)
    if model.bias:
        attention += D
        mlp += biases_of_mlp(model)
    attention += model.num_heads if model.attention_sinks else 0
    norm = 2 if model.norm == "layer" else 1
    norms = norms_of_block(model) * norm * D + _scales_of_heads(model)
    if model.kv_latent:
        norms += norm * (model.kv_latent + model.query_latent)
    return model.num_layers * attention, model.num_layers * mlp, model.num_layers * norms


def norms_of_block(model: ModelConfig) -> int:
    """Norms over the width in one block."""
    return 2 * (model.pre_norms + model.post_norms)


def products_of_attention(model: ModelConfig) -> dict[str, int]:
    """Parameters of the projections of attention in one block, by the names of `remat.SAVES`."""
    sizes, of = ranks.sizes_of_products(model), ranks.of(model)
    found = {
        saved: ranks.num_parameters(sizes[product], of.get(product))
        for product, saved in ATTENTION_PRODUCTS[model.kv_latent > 0].items() if product in sizes
    }  # fmt: skip
    if model.kv_latent:
        numbers = model.head_dim - model.rope_dim + model.value_dim
        found["key"] = model.kv_latent * model.num_heads * numbers
    return found


def products_of_mlp(model: ModelConfig) -> dict[str, int]:
    """Parameters of the matrices of the MLP that every token goes through, by the names of
    `remat.SAVES`; {} = there is none."""
    sizes, of = ranks.sizes_of_products(model), ranks.of(model)
    name = "mlp/shared" if model.num_experts else "mlp"
    found = {saved: f"{name}/{product}" for product, saved in MLP_PRODUCTS.items()}
    return {
        saved: ranks.num_parameters(sizes[product], of.get(product))
        for saved, product in found.items() if product in sizes
    }  # fmt: skip


def between_factors(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """(inputs, rank) of the products of two factors in one block, by the names of `remat.SAVES`."""
    sizes, of = ranks.sizes_of_products(model), ranks.of(model)
    mlp = "mlp/shared" if model.num_experts else "mlp"
    names = ATTENTION_PRODUCTS[model.kv_latent > 0] | {
        f"{mlp}/{product}": saved for product, saved in MLP_PRODUCTS.items()
    }
    return {names[name]: (sizes[name][0], rank) for name, rank in of.items() if name in names}


def weights_of_block(model: ModelConfig, *, active: bool = False) -> tuple[int, int]:
    """Parameters of the projections of attention, and of the MLP or the experts, in one block that
    is not a dense first one; `active`: of those experts only that one token goes through."""
    D, E = model.width, model.num_experts
    experts = model.experts_per_token if active else E
    routed = matrices_of_mlp(model) * D * experts * model.expert_dim + D * E
    mlp = sum(products_of_mlp(model).values()) + (routed if E else 0)
    return sum(products_of_attention(model).values()), mlp


def biases_of_mlp(model: ModelConfig, *, active: bool = False) -> int:
    """Parameters of the biases of the MLP, or of the experts and their router, in one block."""
    D, inward = model.width, matrices_of_mlp(model) - 1
    if not model.num_experts:
        return inward * model.mlp_dim + D
    experts = model.experts_per_token if active else model.num_experts
    shared = inward * model.shared_dim + D if model.shared_dim else 0
    return experts * (inward * model.expert_dim + D) + shared + model.num_experts


def _scales_of_heads(model: ModelConfig) -> int:
    """Parameters of the norms of queries and keys in one block."""
    if not model.qk_norm:
        return 0
    all_heads = model.qk_norm_over == ALL_HEADS
    return model.head_dim * (model.num_heads + model.num_kv_heads if all_heads else 2)


def matrices_of_mlp(model: ModelConfig) -> int:
    """Matrices of an MLP, or of an expert."""
    return 3 if model.gated_mlp else 2


def num_parameters(model: ModelConfig) -> int:
    """Parameters as published: without the rows that pad the vocabulary."""
    parts = parameters_by_part(model)
    return sum(parts.values()) - parts["padding"] - parts["loads"]


def num_active_parameters(model: ModelConfig) -> int:
    """Of the parameters as published, those that one token goes through."""
    all_of_block, active = (weights_of_block(model, active=active)[1] for active in (False, True))
    if model.bias and model.num_experts:
        all_of_block += biases_of_mlp(model)
        active += biases_of_mlp(model, active=True)
    return num_parameters(model) - model.num_blocks * (all_of_block - active)


def num_stored_parameters(model: ModelConfig) -> int:
    """Parameters of the initialised tree, rows that pad the vocabulary included: for memory."""
    return sum(parameters_by_part(model).values())


def num_non_embedding_parameters(model: ModelConfig) -> int:
    """Parameters without token and position tables and without a head of its own: scaling laws."""
    parts = parameters_by_part(model)
    return parts["attention"] + parts["mlp"] + parts["norms"]


def keys_per_query(model: ModelConfig, *, sequence_length: int, causal: bool = True) -> list[float]:
    """S of each of the L layers: keys that a query sees, averaged over the sequence's positions.

    causal=False counts hidden keys too. Boundaries of packed documents are never taken off.
    """
    T, W = sequence_length, min(model.window, sequence_length)
    everything = (T + 1) / 2 if causal else float(T)
    # Position t = 1..T sees min(t, W) keys.
    in_window = (W * (W + 1) / 2 + (T - W) * W) / T if causal else float(T)
    local = map(families.is_local, model.layer_kinds)
    return [in_window if is_local else everything for is_local in local]


def forward_flops_by_part(
    model: ModelConfig, *, sequence_length: int, causal: bool = True
) -> dict[str, float]:
    """Forward FLOPs per token of the attention projections, the scores, the MLP and the head."""
    products = _products_by_block(model)
    return {
        "projections": sum(projections for projections, _ in products),
        "scores": sum(scores_by_block(model, sequence_length, causal)),
        "mlp": sum(mlp for _, mlp in products),
        "head": 2.0 * model.width * model.vocab_size,
    }


def _products_by_block(model: ModelConfig) -> Sequence[tuple[float, float]]:
    """Forward FLOPs per token of the projections of attention, and of the MLP, of each layer."""
    times = 2.0 * model.repeats
    each = lambda stack: tuple(times * of for of in weights_of_block(stack, active=True))  # noqa: E731
    of_stacks = [(stack.num_layers, each(stack)) for stack in stacks(model)]
    return [products for num, products in of_stacks for _ in range(num)]


def forward_flops_per_token(
    model: ModelConfig, *, sequence_length: int, causal: bool = True
) -> float:
    """FLOPs of the forward pass per token of a sequence."""
    parts = forward_flops_by_part(model, sequence_length=sequence_length, causal=causal)
    return sum(parts.values())


def training_flops_per_token(
    model: ModelConfig, *, sequence_length: int, causal: bool = True
) -> float:
    """FLOPs of forward and backward pass per token: what MFU is measured by."""
    forward = forward_flops_per_token(model, sequence_length=sequence_length, causal=causal)
    return TRAINING_PASSES * forward


def parameters_by_layer(model: ModelConfig) -> list[int]:
    """Stored parameters of each layer: a tied head has only those of its norm."""
    parts = parameters_by_part(model)
    last_norm = 2 * model.width if model.norm == "layer" else model.width
    of_stacks = [
        (stack, sum(_of_stack(stack)) // stack.num_layers + stack.num_experts)
        for stack in stacks(model)
    ]
    table = model.padded_vocab * model.width
    return [
        (tensor_train.num_parameters(model) or table) + parts["positions"],
        *(of_layer for stack, of_layer in of_stacks for _ in range(stack.num_layers)),
        last_norm + (0 if model.tied_head else table),
    ]


def forward_flops_by_layer(
    model: ModelConfig, *, sequence_length: int, causal: bool = True
) -> list[float]:
    """FLOPs of the forward pass per token of each layer. The embedding, a lookup, has none."""
    scores = scores_by_block(model, sequence_length, causal)
    blocks = zip(_products_by_block(model), scores, strict=True)
    head = forward_flops_by_part(model, sequence_length=sequence_length, causal=causal)["head"]
    return [0.0, *(sum(products) + flops for products, flops in blocks), head]


def scores_by_block(model: ModelConfig, sequence_length: int, causal: bool) -> list[float]:
    """FLOPs of scores and their sums over values, forward, per token of each of the L layers."""
    keys = keys_per_query(model, sequence_length=sequence_length, causal=causal)
    return [scores_per_key(model) * num * model.repeats for num in keys]


def scores_per_key(model: ModelConfig) -> float:
    """FLOPs of one query's scores of one key, and of the sums over its values, in all heads."""
    return 2.0 * model.num_heads * (model.head_dim + model.value_width)

"""The tensors and config keys of Hugging Face checkpoints, family by family, as data.

Source: `configuration_*.py` and `modeling_*.py` of each model in transformers
(https://github.com/huggingface/transformers).

Letters: D width, F mlp_dim, E experts, X width of an expert, S of a shared one, N query heads,
K key/value heads, H head size, V vocabulary, T learned positions, Z the parts of a fused tensor.
Of latent attention: Q latent of queries, R of keys and values, Y = R and the rotated numbers of the
key, U numbers of a head's value, W = U and those of its key that are not rotated.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint, or one per layer, or one per layer and expert, and its place in
    our parameters."""

    # path; under blocks/ all layers are stacked, or under first/ those that come before; * stands
    # for each of `parts`
    ours: str
    dims: str  # dimensions there, without layer and expert; of each part, with + between
    theirs: str  # name behind the prefix; * is the layer, # the expert
    # its dimensions in its own order; "NH" is one dimension of size N x H, "NH+KH" one with the
    # first N x H of one part and the others of the next
    groups: str
    # parameters that are fused in this tensor: along Z, or one behind the other
    parts: tuple[str, ...] = ()

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(self.ours.replace("*", part) for part in self.parts) or (self.ours,)

    @property
    def letters(self) -> set[str]:
        """Of all its dimensions."""
        return set(self.dims) - {"+"}

    @property
    def dims_of_parts(self) -> list[str]:
        """`dims` of each of `paths`."""
        dims = self.dims.split("+")
        return dims if len(dims) == len(self.paths) else dims * len(self.paths)

    @property
    def joined(self) -> int | None:
        """The dimension of the tensor along which parts lie one behind the other, if they do."""
        along = [dim for dim, group in enumerate(self.groups.split(",")) if "+" in group]
        return along[0] if along else None

    @property
    def pieces(self) -> "list[Tensor]":
        """The parts that lie one behind the other, as tensors."""
        groups = [group.split("+") for group in self.groups.split(",")]
        of_part = lambda n: ",".join(group[n if len(group) > 1 else 0] for group in groups)  # noqa: E731
        parts = enumerate(zip(self.paths, self.dims_of_parts, strict=True))
        return [Tensor(path, dims, self.theirs, of_part(n)) for n, (path, dims) in parts]

    @property
    def stacked(self) -> bool:
        return self.ours.startswith(("blocks/", "first/"))

    @property
    def first(self) -> bool:
        return self.ours.startswith("first/")

    @property
    def of_each_expert(self) -> bool:
        return "#" in self.theirs


HEAD = Tensor("head", "VD", "lm_head.weight", "V,D")

_INPUT_NORM = Tensor("blocks/attention_norm/scale", "D", "layers.*.input_layernorm.weight", "D")
_OUT = Tensor("blocks/attention/out/kernel", "NHD", "layers.*.self_attn.o_proj.weight", "D,NH")
_ATTENTION = (
    Tensor("blocks/attention/query/kernel", "DNH", "layers.*.self_attn.q_proj.weight", "NH,D"),
    Tensor("blocks/attention/key/kernel", "DKH", "layers.*.self_attn.k_proj.weight", "KH,D"),
    Tensor("blocks/attention/value/kernel", "DKH", "layers.*.self_attn.v_proj.weight", "KH,D"),
    _OUT,
)
_ENDS = (
    Tensor("embedding", "VD", "embed_tokens.weight", "V,D"),
    Tensor("norm/scale", "D", "norm.weight", "D"),
)
_DECODER = (*_ENDS, _INPUT_NORM, *_ATTENTION)
_DOWN = Tensor("blocks/mlp/down/kernel", "FD", "layers.*.mlp.down_proj.weight", "D,F")
_MLP = (
    Tensor("blocks/mlp/gate/kernel", "DF", "layers.*.mlp.gate_proj.weight", "F,D"),
    Tensor("blocks/mlp/up/kernel", "DF", "layers.*.mlp.up_proj.weight", "F,D"),
    _DOWN,
)
_ROTARY = (*_DECODER, *_MLP)


def _experts(block: str, gate: str, up: str, down: str) -> tuple[Tensor, ...]:
    """The router and the experts of a layer, by the names of a family."""
    each = f"layers.*.{block}.experts.#"
    return (
        Tensor("blocks/mlp/router", "DE", f"layers.*.{block}.gate.weight", "E,D"),
        Tensor("blocks/mlp/gate", "DX", f"{each}.{gate}.weight", "X,D"),
        Tensor("blocks/mlp/up", "DX", f"{each}.{up}.weight", "X,D"),
        Tensor("blocks/mlp/down", "XD", f"{each}.{down}.weight", "D,X"),
    )


_QKV_BIASES = (
    Tensor("blocks/attention/query/bias", "NH", "layers.*.self_attn.q_proj.bias", "NH"),
    Tensor("blocks/attention/key/bias", "KH", "layers.*.self_attn.k_proj.bias", "KH"),
    Tensor("blocks/attention/value/bias", "KH", "layers.*.self_attn.v_proj.bias", "KH"),
)
# gpt-oss stores all experts of a layer in one tensor, and gate and up in turn along its rows.
_GATE_UP = ("gate", "up")
_GPT_OSS = (
    *_QKV_BIASES,
    Tensor("blocks/attention/out/bias", "D", "layers.*.self_attn.o_proj.bias", "D"),
    Tensor("blocks/attention/sinks", "N", "layers.*.self_attn.sinks", "N"),
    Tensor("blocks/mlp/router", "DE", "layers.*.mlp.router.weight", "E,D"),
    Tensor("blocks/mlp/router_bias", "E", "layers.*.mlp.router.bias", "E"),
    Tensor("blocks/mlp/*", "EDX", "layers.*.mlp.experts.gate_up_proj", "E,D,XZ", _GATE_UP),
    Tensor("blocks/mlp/*_bias", "EX", "layers.*.mlp.experts.gate_up_proj_bias", "E,XZ", _GATE_UP),
    Tensor("blocks/mlp/down", "EXD", "layers.*.mlp.experts.down_proj", "E,X,D"),
    Tensor("blocks/mlp/down_bias", "ED", "layers.*.mlp.experts.down_proj_bias", "E,D"),
)
# The bias by which experts are chosen, which these families do not have: zeros.
LOADS = "blocks/mlp/bias"
_POST_ATTENTION = "layers.*.post_attention_layernorm.weight"
_PRE_NORMS = (Tensor("blocks/mlp_norm/scale", "D", _POST_ATTENTION, "D"),)
# Of rows for one parameter, the first that the model has.
_LATENT = (
    Tensor("blocks/attention_norm/scale", "D", "layers.*.input_layernorm.weight", "D"),
    Tensor("blocks/attention/query_down/kernel", "DQ", "layers.*.self_attn.q_a_proj.weight", "Q,D"),
    Tensor(
        "blocks/attention/query_norm/scale", "Q", "layers.*.self_attn.q_a_layernorm.weight", "Q"
    ),
    Tensor("blocks/attention/query/kernel", "QNH", "layers.*.self_attn.q_b_proj.weight", "NH,Q"),
    Tensor("blocks/attention/query/kernel", "DNH", "layers.*.self_attn.q_proj.weight", "NH,D"),
    Tensor(
        "blocks/attention/down/kernel", "DY", "layers.*.self_attn.kv_a_proj_with_mqa.weight", "Y,D"
    ),
    Tensor("blocks/attention/norm/scale", "R", "layers.*.self_attn.kv_a_layernorm.weight", "R"),
    Tensor("blocks/attention/up/kernel", "RNW", "layers.*.self_attn.kv_b_proj.weight", "NW,R"),
    Tensor("blocks/attention/out/kernel", "NUD", "layers.*.self_attn.o_proj.weight", "D,NU"),
    *_PRE_NORMS,
)
_SHARED = (
    *(
        dataclasses.replace(
            row, ours=row.ours.replace("mlp/", "mlp/shared/"), dims=row.dims.replace("F", "S"),
            theirs=row.theirs.replace("mlp.", "mlp.shared_experts."),
            groups=row.groups.replace("F", "S"),
        )
        for row in _MLP
    ),
)  # fmt: skip


def _in_first_layers(rows: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The same tensors of first layers that have a stack of their own."""
    return tuple(
        dataclasses.replace(row, ours=row.ours.replace("blocks/", "first/", 1)) for row in rows
    )


_QK_NORMS = (
    Tensor("blocks/attention/query_norm/scale", "H", "layers.*.self_attn.q_norm.weight", "H"),
    Tensor("blocks/attention/key_norm/scale", "H", "layers.*.self_attn.k_norm.weight", "H"),
)
_QK_NORMS_OF_ALL_HEADS = (
    Tensor("blocks/attention/query_norm/scale", "NH", "layers.*.self_attn.q_norm.weight", "NH"),
    Tensor("blocks/attention/key_norm/scale", "KH", "layers.*.self_attn.k_norm.weight", "KH"),
)
_POST_NORMS = (
    Tensor("blocks/attention_post_norm/scale", "D", _POST_ATTENTION, "D"),
    Tensor("blocks/mlp_post_norm/scale", "D", "layers.*.post_feedforward_layernorm.weight", "D"),
)
_GEMMA_NORMS = (
    *_POST_NORMS,
    Tensor("blocks/mlp_norm/scale", "D", "layers.*.pre_feedforward_layernorm.weight", "D"),
)
_OLMO = (*_ENDS, *_ATTENTION, *_MLP, *_POST_NORMS, *_QK_NORMS_OF_ALL_HEADS)
QKV = ("query", "key", "value")
# Phi-3 fuses these one behind the other: of grouped heads keys and values are fewer.
_PHI3 = (
    *_ENDS,
    _INPUT_NORM,
    Tensor(
        "blocks/attention/*/kernel", "DNH+DKH+DKH", "layers.*.self_attn.qkv_proj.weight",
        "NH+KH+KH,D", QKV,
    ),
    _OUT,
    Tensor("blocks/mlp/*/kernel", "DF+DF", "layers.*.mlp.gate_up_proj.weight", "F+F,D", _GATE_UP),
    _DOWN,
)  # fmt: skip
# GPT-2 stores projections input first, and fuses queries, keys and values.
_GPT2 = (
    Tensor("embedding", "VD", "wte.weight", "V,D"),
    Tensor("positions", "TD", "wpe.weight", "T,D"),
    Tensor("blocks/attention_norm/scale", "D", "h.*.ln_1.weight", "D"),
    Tensor("blocks/attention_norm/bias", "D", "h.*.ln_1.bias", "D"),
    Tensor("blocks/attention/*/kernel", "DNH", "h.*.attn.c_attn.weight", "D,ZNH", QKV),
    Tensor("blocks/attention/*/bias", "NH", "h.*.attn.c_attn.bias", "ZNH", QKV),
    Tensor("blocks/attention/out/kernel", "NHD", "h.*.attn.c_proj.weight", "NH,D"),
    Tensor("blocks/attention/out/bias", "D", "h.*.attn.c_proj.bias", "D"),
    Tensor("blocks/mlp_norm/scale", "D", "h.*.ln_2.weight", "D"),
    Tensor("blocks/mlp_norm/bias", "D", "h.*.ln_2.bias", "D"),
    Tensor("blocks/mlp/up/kernel", "DF", "h.*.mlp.c_fc.weight", "D,F"),
    Tensor("blocks/mlp/up/bias", "F", "h.*.mlp.c_fc.bias", "F"),
    Tensor("blocks/mlp/down/kernel", "FD", "h.*.mlp.c_proj.weight", "F,D"),
    Tensor("blocks/mlp/down/bias", "D", "h.*.mlp.c_proj.bias", "D"),
    Tensor("norm/scale", "D", "ln_f.weight", "D"),
    Tensor("norm/bias", "D", "ln_f.bias", "D"),
)


# Which layers have windows, beside what `layer_types` says of each:
PATTERN = "pattern"  # all but every so many-th, `sliding_window_pattern`
EVERYWHERE = "everywhere"  # all, where `sliding_window` is not null
LAST = "last"  # with `use_sliding_window` those from `max_window_layers` on
UNROTATED = "unrotated"  # with `use_sliding_window` those without rotary positions


@dataclasses.dataclass(frozen=True)
class Format:
    """The checkpoints of one family."""

    model_type: str
    architecture: str
    prefix: str  # of every tensor but the head; a checkpoint of the bare body lacks it
    tensors: tuple[Tensor, ...]
    keys: Mapping[str, str]  # our field -> key of config.json
    # What a key that is left out means, by the defaults of transformers' config of the model type;
    # no entry = it may not be
    absent: Mapping[str, Any]
    only: Mapping[str, tuple]  # keys with other values than these are refused; the first is written
    mxfp4: tuple[str, ...] = ()  # rows of `tensors`, by `ours`, that files may have as MXFP4
    windows: str = ""  # which layers have windows: see above; "" = none
    rope_by_kind: bool = False  # layers with a window have a base of their own, and no scaling
    rope_types: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    also: Mapping[str, str] = dataclasses.field(default_factory=dict)  # other name -> key
    whole_heads: bool = False  # transformers requires that heads divide the width


_KEYS = {
    "vocab_size": "vocab_size", "width": "hidden_size", "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim", "mlp_dim": "intermediate_size",
    "max_positions": "max_position_embeddings", "norm_eps": "rms_norm_eps",
    "tied_head": "tie_word_embeddings",
}  # fmt: skip
_EXPERT_KEYS = {"experts_per_token": "num_experts_per_tok"}
_GEMMA_KEYS = _KEYS | {"window": "sliding_window", "logit_softcap": "final_logit_softcapping"}
_NO_BIAS = {"attention_bias": (False,), "quantization_config": (None,)}
_GEMMA_ONLY = _NO_BIAS | {
    "hidden_activation": ("gelu_pytorch_tanh",), "use_bidirectional_attention": (False, None)
}  # fmt: skip
_ROTARY_ABSENT = {
    "num_key_value_heads": None, "head_dim": None, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "rope_theta": 10_000.0,
}  # fmt: skip
_GEMMA_ABSENT = {
    "num_key_value_heads": 4, "head_dim": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256, "sliding_window": 4096,
}  # fmt: skip
_WINDOW = {"window": "sliding_window"}
_SILU = {"hidden_act": ("silu",), "quantization_config": (None,)}


def _without(keys: Mapping[str, str], *names: str) -> dict[str, str]:
    """Of a family whose files do not have these fields, or derive them."""
    return {field: key for field, key in keys.items() if field not in names}


FORMATS = {
    "gpt2": Format(
        "gpt2", "GPT2LMHeadModel", "transformer.", (*_GPT2, HEAD),
        keys={
            "vocab_size": "vocab_size", "width": "n_embd", "num_layers": "n_layer",
            "num_heads": "n_head", "mlp_dim": "n_inner", "max_positions": "n_positions",
            "norm_eps": "layer_norm_epsilon", "tied_head": "tie_word_embeddings",
        },
        absent={"n_inner": None, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
        only={
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,), "quantization_config": (None,),
        },
        also={
            "hidden_size": "n_embd", "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head", "max_position_embeddings": "n_positions",
        },
        whole_heads=True,
    ),
    "llama3": Format(
        "llama", "LlamaForCausalLM", "model.", (*_ROTARY, *_PRE_NORMS, HEAD),
        keys=_KEYS, absent=_ROTARY_ABSENT,
        only=_NO_BIAS | {"mlp_bias": (False,), "hidden_act": ("silu",)}, whole_heads=True,
    ),
    "qwen3": Format(
        "qwen3", "Qwen3ForCausalLM", "model.", (*_ROTARY, *_PRE_NORMS, *_QK_NORMS, HEAD),
        keys=_KEYS, absent=_ROTARY_ABSENT | {"num_key_value_heads": 32, "head_dim": 128},
        only=_NO_BIAS | {"use_sliding_window": (False,), "hidden_act": ("silu",)},
    ),
    "mistral": Format(
        "mistral", "MistralForCausalLM", "model.", (*_ROTARY, *_PRE_NORMS, HEAD),
        keys=_KEYS | _WINDOW, only=_NO_BIAS | _SILU, windows=EVERYWHERE,
        absent=_ROTARY_ABSENT | {"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "qwen2": Format(
        "qwen2", "Qwen2ForCausalLM", "model.", (*_ROTARY, *_PRE_NORMS, *_QKV_BIASES, HEAD),
        keys=_KEYS | _WINDOW, only=_SILU, windows=LAST,
        absent=_ROTARY_ABSENT | {
            "num_key_value_heads": 32, "sliding_window": 4096, "use_sliding_window": False,
            "max_window_layers": 28,
        },
    ),
    "olmo2": Format(
        "olmo2", "Olmo2ForCausalLM", "model.", (*_OLMO, HEAD),
        keys=_KEYS, absent=_ROTARY_ABSENT | {"rms_norm_eps": 1e-5}, only=_NO_BIAS | _SILU,
    ),
    "olmo3": Format(
        "olmo3", "Olmo3ForCausalLM", "model.", (*_OLMO, HEAD),
        keys=_KEYS | _WINDOW,
        absent=_ROTARY_ABSENT | {
            "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
        only=_NO_BIAS | _SILU | {"sliding_window_pattern": (None, 4)},
        windows=PATTERN, rope_by_kind=True,
    ),
    "phi3": Format(
        "phi3", "Phi3ForCausalLM", "model.", (*_PHI3, *_PRE_NORMS, HEAD),
        keys=_KEYS | _WINDOW, only=_NO_BIAS | _SILU, windows=EVERYWHERE, rope_types=("default",),
        absent=_ROTARY_ABSENT | {
            "rms_norm_eps": 1e-5, "sliding_window": None, "partial_rotary_factor": 1.0,
        },
    ),
    "smollm3": Format(
        "smollm3", "SmolLM3ForCausalLM", "model.", (*_ROTARY, *_PRE_NORMS, HEAD),
        keys=_KEYS | _WINDOW, only=_NO_BIAS | _SILU | {"mlp_bias": (False,)}, windows=UNROTATED,
        absent=_ROTARY_ABSENT | {
            "num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 2_000_000.0,
            "sliding_window": None, "use_sliding_window": False, "no_rope_layer_interval": 4,
        },
    ),
    "mixtral": Format(
        "mixtral", "MixtralForCausalLM", "model.",
        (*_DECODER, *_experts("block_sparse_moe", "w1", "w3", "w2"), *_PRE_NORMS, HEAD),
        keys=_without(_KEYS, "mlp_dim") | _EXPERT_KEYS | {
            "num_experts": "num_local_experts", "expert_dim": "intermediate_size",
        },
        absent=_ROTARY_ABSENT | {
            "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0,
            "num_local_experts": 8, "num_experts_per_tok": 2,
        },
        only=_NO_BIAS | {"hidden_act": ("silu",), "sliding_window": (None,)},
        also={"num_experts": "num_local_experts"},
    ),
    "qwen3_moe": Format(
        "qwen3_moe", "Qwen3MoeForCausalLM", "model.",
        (
            *_DECODER, *_experts("mlp", "gate_proj", "up_proj", "down_proj"), *_PRE_NORMS,
            *_QK_NORMS, HEAD,
        ),
        keys=_KEYS | _EXPERT_KEYS | {
            "num_experts": "num_experts", "expert_dim": "moe_intermediate_size",
            "router_renormalize": "norm_topk_prob",
        },
        absent=_ROTARY_ABSENT | {
            "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
            "norm_topk_prob": False, "moe_intermediate_size": 768,
        },
        only=_NO_BIAS | {
            "use_sliding_window": (False,), "hidden_act": ("silu",), "decoder_sparse_step": (1,),
            "mlp_only_layers": ([], None),
        },
        also={"num_local_experts": "num_experts"},
    ),
    "olmoe": Format(
        "olmoe", "OlmoeForCausalLM", "model.",
        (
            *_DECODER, *_experts("mlp", "gate_proj", "up_proj", "down_proj"), *_PRE_NORMS,
            *_QK_NORMS_OF_ALL_HEADS, HEAD,
        ),
        keys=_without(_KEYS, "mlp_dim", "head_dim") | _EXPERT_KEYS | {
            "num_experts": "num_experts", "expert_dim": "intermediate_size",
            "router_renormalize": "norm_topk_prob",
        },
        absent=_ROTARY_ABSENT | {
            "rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8,
            "norm_topk_prob": False,
        },
        only=_NO_BIAS | {"hidden_act": ("silu",), "clip_qkv": (None,)},
        also={"num_local_experts": "num_experts"}, whole_heads=True,
    ),
    "gpt_oss": Format(
        "gpt_oss", "GptOssForCausalLM", "model.", (*_DECODER, *_PRE_NORMS, *_GPT_OSS, HEAD),
        keys=_without(_KEYS, "mlp_dim") | _EXPERT_KEYS | {
            "num_experts": "num_local_experts", "expert_dim": "intermediate_size",
            "window": "sliding_window",
        },
        absent=_ROTARY_ABSENT | {
            "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 150_000.0,
            "rope_parameters": {
                "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                "truncate": False, "original_max_position_embeddings": 4096,
            },
            "head_dim": 64, "sliding_window": 128, "num_local_experts": 128,
            "num_experts_per_tok": 4, "sliding_window_pattern": 2,
        },
        windows=PATTERN, also={"num_experts": "num_local_experts"},
        only={
            "attention_bias": (True,), "hidden_act": ("silu",), "swiglu_limit": (7.0,),
            "swiglu_alpha": (1.702,), "quantization_config": (None,),
        },
        mxfp4=("blocks/mlp/*", "blocks/mlp/down"),
    ),
    "deepseek_v3": Format(
        "deepseek_v3", "DeepseekV3ForCausalLM", "model.",
        (
            Tensor("embedding", "VD", "embed_tokens.weight", "V,D"),
            *_in_first_layers((*_LATENT, *_MLP)), *_LATENT,
            *_experts("mlp", "gate_proj", "up_proj", "down_proj"), *_SHARED,
            Tensor(LOADS, "E", "layers.*.mlp.gate.e_score_correction_bias", "E"),
            Tensor("norm/scale", "D", "norm.weight", "D"), HEAD,
        ),
        keys=_without(_KEYS, "head_dim") | _EXPERT_KEYS | {
            "num_experts": "n_routed_experts", "expert_dim": "moe_intermediate_size",
            "first_dense": "first_k_dense_replace", "router_groups": "n_group",
            "router_groups_kept": "topk_group", "router_scale": "routed_scaling_factor",
            "router_renormalize": "norm_topk_prob", "kv_latent": "kv_lora_rank",
            "query_latent": "q_lora_rank", "rope_dim": "qk_rope_head_dim",
            "value_dim": "v_head_dim", "rope_interleaved": "rope_interleave",
        },
        absent=_ROTARY_ABSENT | {
            "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
            "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
            "n_shared_experts": 1, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4,
            "routed_scaling_factor": 2.5, "norm_topk_prob": True, "rope_interleave": True,
        },
        only=_NO_BIAS | {
            "hidden_act": ("silu",), "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",),
            "moe_layer_freq": (1,),
            # transformers says 1 with and without such layers: files with them have more tensors.
            "num_nextn_predict_layers": (0, 1, None),
        },
        also={
            "num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers",
        },
    ),
    "gemma2": Format(
        "gemma2", "Gemma2ForCausalLM", "model.", (*_ROTARY, *_GEMMA_NORMS, HEAD),
        keys=_GEMMA_KEYS | {"attention_softcap": "attn_logit_softcapping"},
        absent=_GEMMA_ABSENT | {
            "rope_theta": 10_000.0, "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0, "sliding_window_pattern": 2,
        },
        only=_GEMMA_ONLY, windows=PATTERN, whole_heads=True,
    ),
    "gemma3": Format(
        "gemma3_text", "Gemma3ForCausalLM", "model.",
        (*_ROTARY, *_GEMMA_NORMS, *_QK_NORMS, HEAD),
        keys=_GEMMA_KEYS | {"rope_theta_local": "rope_local_base_freq"},
        absent=_GEMMA_ABSENT | {
            "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0,
            "final_logit_softcapping": None, "sliding_window_pattern": 6,
        },
        only=_GEMMA_ONLY | {"attn_logit_softcapping": (None,)}, windows=PATTERN, rope_by_kind=True,
        whole_heads=True,
    ),
}  # fmt: skip

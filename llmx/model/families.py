"""What a decoder is made of: `ModelConfig`, and the published models as data over one decoder.

Pure data, no jax. A family is a set of values for the fields of `ModelConfig`; a preset is a family
at a published size. The model reads the fields and knows no family by name.

Letters: D width, F mlp_dim, N num_heads, K num_kv_heads, H head_dim, V vocab_size, L num_layers.
"""

import dataclasses
import itertools
import math
from typing import Any

from llmx.model import ranks, scaled_rope, tensor_train
from llmx.model.experts import config as experts_config
from llmx.model.recommender.config import RecommenderConfig
from llmx.runtime import bounds
from llmx.runtime.bounds import RUN, bounded, choice, plain, section_of

# Attention kinds of layers: all that precedes a token, or a sliding window; and both without rotary
# positions (NoPE, arXiv 2305.19466).
GLOBAL, LOCAL = "global", "local"
GLOBAL_NOPE, LOCAL_NOPE = "global_nope", "local_nope"
KINDS = (GLOBAL, LOCAL, GLOBAL_NOPE, LOCAL_NOPE)
# What queries and keys are normalised over.
EACH_HEAD, ALL_HEADS = "head", "all"
# What a router makes of its logits.
SOFTMAX, SIGMOID = "softmax", "sigmoid"
MAX_LAYERS, MAX_SIZE = 10_000, 2**31 - 1


# What keys need that are about some models only.
_ROPE, _EXPERTS = {"model.positions": ("rope",)}, {"model.num_experts": {"not": (0,)}}
_LATENT = {"model.kv_latent": {"not": (0,)}}
_LOCAL_LAYERS = {"model.layer_pattern": {"has": (LOCAL, LOCAL_NOPE)}}


def _scaled(*kinds: str) -> dict[str, tuple[str, ...]]:
    return _ROPE | {"model.rope_scaling": kinds}


@dataclasses.dataclass
class ModelConfig:
    """One decoder-only transformer. `problems()` says what does not fit together."""

    family: str = "llama3"  # where the values come from; the model itself never asks
    # "object:NAME": a program's own model in the place of the decoder (docs/library.md)
    own: str = ""
    # a model of clicks in the place of the decoder (docs/tables.md)
    recommender: RecommenderConfig = section_of(
        RecommenderConfig, of=RUN, needs={"model.recommender.name": {"not": ("",)}}
    )
    # V, real tokens; 0 = the tokenizer's
    vocab_size: int = bounded(0, at_least=0, at_most=MAX_SIZE, remedy="0 follows the tokenizer")
    # sparse tables of the last 2, 3, ... tokens, (2, 3), whose rows are added to the embedding
    ngram_tables: tuple[int, ...] = ()
    ngram_rows: int = bounded(65536, at_least=1, at_most=MAX_SIZE)  # of each, to which they hash
    # V is padded to it, without probability
    vocab_multiple: int = bounded(128, at_least=1, at_most=MAX_SIZE)
    width: int = bounded(256, at_least=1, at_most=MAX_SIZE)  # D
    num_layers: int = bounded(4, at_least=1, at_most=MAX_LAYERS)  # L
    num_heads: int = bounded(4, at_least=1, at_most=MAX_SIZE)  # N
    # K; N is multi-head, less is grouped-query
    num_kv_heads: int = bounded(4, at_least=1, at_most=MAX_SIZE)
    head_dim: int = bounded(64, at_least=1, at_most=MAX_SIZE)  # H
    mlp_dim: int = bounded(1024, at_least=1, at_most=MAX_SIZE)  # F
    # of a sequence, and of a learned table of them
    max_positions: int = bounded(8192, at_least=1, at_most=MAX_SIZE)
    positions: str = choice("rope", ("rope", "learned"))  # "rope" | "learned"
    # base of the rotary frequencies (global layers)
    rope_theta: float = bounded(10_000.0, above=0, needs=_ROPE)
    # base in local layers; 0 = the same
    rope_theta_local: float = bounded(0.0, at_least=0, needs=_ROPE | _LOCAL_LAYERS)
    # numbers 2i, 2i + 1 of a head turn together (deepseek_v3)
    rope_interleaved: bool = plain(False, needs=_ROPE)
    # "none" | "llama3" | "linear" | "yarn" (global layers only)
    rope_scaling: str = choice("none", ("none", "llama3", "linear", "yarn"), needs=_ROPE)
    # by how much the context was stretched
    rope_factor: float = bounded(1.0, above=0, needs=_scaled("llama3", "linear", "yarn"))
    # llama3: fewer turns than this in the old context stretch fully
    rope_low_freq: float = bounded(1.0, above=0, needs=_scaled("llama3"))
    # llama3: above this many turns, do not stretch
    rope_high_freq: float = plain(4.0, needs=_scaled("llama3"))
    # llama3 and yarn: context before stretching
    rope_old_context: int = bounded(8192, at_least=1, needs=_scaled("llama3", "yarn"))
    # yarn: above this many turns in the old context, do not stretch
    rope_beta_fast: float = bounded(32.0, above=0, needs=_scaled("yarn"))
    # yarn: with fewer turns, stretch fully
    rope_beta_slow: float = bounded(1.0, above=0, needs=_scaled("yarn"))
    # yarn: pairs between are counted in whole numbers
    rope_truncate: bool = plain(True, needs=_scaled("yarn"))
    # yarn: see `rope.amplitude`; 0 = not given
    rope_mscale: float = bounded(0.0, at_least=0, needs=_scaled("yarn"))
    # yarn: also scales scores; 0 = not given
    rope_mscale_all: float = bounded(0.0, at_least=0, needs=_scaled("yarn"))
    norm: str = choice("rms", ("rms", "layer"))  # "rms" | "layer"
    norm_eps: float = bounded(1e-5, above=0)  # epsilon inside the square root
    norm_plus_one: bool = False  # the scale is 1 + parameter (gemma)
    pre_norms: bool = True  # normalise what attention and MLP take (all but olmo2, olmo3)
    post_norms: bool = False  # normalise what attention and MLP return (gemma, olmo2, olmo3)
    qk_norm: bool = False  # RMS-normalise queries and keys (qwen3, gemma3, olmoe, olmo2)
    # over each "head", or over "all" heads together (olmoe, olmo2)
    qk_norm_over: str = choice(EACH_HEAD, (EACH_HEAD, ALL_HEADS), needs={"model.qk_norm": (True,)})
    # Latent attention: keys and values of all heads are made of so many numbers; 0 = each of x
    kv_latent: int = bounded(0, at_least=0, at_most=MAX_SIZE)
    # queries too; 0 = of x
    query_latent: int = bounded(0, at_least=0, at_most=MAX_SIZE, needs=_LATENT)
    # Numbers of a head that are rotated: the first of H, 0 = all (phi3). Of latent attention the
    # last, and all heads share those of the key
    rope_dim: int = bounded(0, at_least=0, at_most=MAX_SIZE, needs=_ROPE)
    # of latent attention: numbers of a head's value
    value_dim: int = bounded(0, at_least=0, at_most=MAX_SIZE, needs=_LATENT)
    # "silu" | "gelu" (tanh form) | "clamped_silu" (gpt-oss: `activations.hidden`)
    activation: str = choice("silu", ("silu", "gelu", "clamped_silu"))
    gated_mlp: bool = True  # act(x Wg) * (x Wu) instead of act(x Wu)
    # E, routed experts in the place of the MLP; 0 = none
    num_experts: int = bounded(0, at_least=0, at_most=65536)
    # first layers with an MLP of width `mlp_dim` in the place of experts
    first_dense: int = bounded(0, at_least=0, at_most=MAX_LAYERS, needs=_EXPERTS)
    experts_per_token: int = bounded(1, at_least=1, at_most=1024, needs=_EXPERTS)  # k
    # F of a routed expert
    expert_dim: int = bounded(0, at_least=0, at_most=MAX_SIZE, needs=_EXPERTS)
    # F of an MLP beside the routed experts, which every token goes through; 0 = none
    shared_dim: int = bounded(0, at_least=0, at_most=MAX_SIZE, needs=_EXPERTS)
    # scores of experts from logits
    router: str = choice(SOFTMAX, (SOFTMAX, SIGMOID), needs=_EXPERTS)
    # weights of a token's experts are divided by their sum
    router_renormalize: bool = plain(True, needs=_EXPERTS)
    # weights are multiplied by it
    router_scale: float = bounded(1.0, above=0, needs=_EXPERTS)
    # groups of experts, of which a token chooses some
    router_groups: int = bounded(1, at_least=1, needs=_EXPERTS)
    router_groups_kept: int = bounded(1, at_least=1, needs=_EXPERTS)  # as many
    bias: bool = False  # biases in every projection, router and experts too (gpt2, gpt-oss)
    # biases of queries, keys and values, where `bias` is off (qwen2)
    qkv_bias: bool = plain(False, needs={"model.bias": (False,)})
    tied_head: bool = False  # the output head is the embedding table
    embedding_scale: bool = False  # multiply embeddings by sqrt(D) (gemma)
    query_scale: float = bounded(0.0, at_least=0)  # multiplies q.k; 0 = 1/sqrt(H)
    # attention kinds, repeated along the depth: "global", "local", and without rotary positions
    # "global_nope", "local_nope" (smollm3)
    layer_pattern: tuple[str, ...] = (GLOBAL,)
    # local layers: positions back, the token itself counted
    window: int = bounded(0, at_least=0, needs=_LOCAL_LAYERS)
    # a learned logit of each head that joins the softmax, with nothing to attend to (gpt-oss)
    attention_sinks: bool = False
    attention_softcap: float = bounded(0.0, at_least=0)  # c*tanh(score/c); 0 = off (gemma2)
    logit_softcap: float = bounded(0.0, at_least=0)  # c*tanh(logit/c) on the output; 0 = off
    # products that are two factors, with their ranks: "attention/query=16", "mlp=32"; see `ranks`
    ranks: tuple[str, ...] = ()
    # how often a token goes through each layer, one time after the other: the weights are shared
    repeats: int = bounded(1, at_least=1, at_most=MAX_LAYERS)
    # the embedding table is a train of tensors of this rank; 0 = it is a table
    embedding_rank: int = bounded(0, at_least=0, at_most=MAX_SIZE)
    # tensors in the train
    embedding_cores: int = bounded(
        3, at_least=2, at_most=3, needs={"model.embedding_rank": {"not": (0,)}}
    )

    @property
    def padded_vocab(self) -> int:
        """V rounded up to `vocab_multiple`: the rows of the embedding table and of the head."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def score_scale(self) -> float:
        """What q.k is multiplied by: with yarn's `rope_mscale_all`, more (arXiv 2309.00071)."""
        scale = self.query_scale or 1 / math.sqrt(self.head_dim)
        if self.rope_scaling == "yarn" and self.rope_mscale_all:
            scale *= yarn_scale(self.rope_factor, self.rope_mscale_all) ** 2
        return scale

    @property
    def block_kinds(self) -> tuple[str, ...]:
        """Those of the layers of the stack."""
        return self.layer_kinds[self.num_first :]

    @property
    def value_width(self) -> int:
        """Numbers of a head's value, and of its result."""
        return self.value_dim if self.kv_latent else self.head_dim

    @property
    def is_decoder(self) -> bool:
        """Whether all that is said of layers, heads and tokens is said of it."""
        return not (self.own or self.recommender.name)

    @property
    def rotated_dim(self) -> int:
        """Numbers of a head that positions rotate."""
        return self.rope_dim or self.head_dim

    @property
    def num_first(self) -> int:
        """First layers that are not in the stack of the others: dense ones of a mixture."""
        return self.first_dense if self.num_experts else 0

    @property
    def num_blocks(self) -> int:
        """Layers of the stack that is scanned, and that stages divide."""
        return self.num_layers - self.num_first

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """The attention kind of each of the L layers."""
        return tuple(itertools.islice(itertools.cycle(self.layer_pattern), self.num_layers))


def is_local(kind: str) -> bool:
    """Whether layers of this attention kind see a window."""
    return kind in (LOCAL, LOCAL_NOPE)


def is_rotated(kind: str) -> bool:
    """Whether layers of this attention kind rotate queries and keys, where positions are rotary."""
    return kind in (GLOBAL, LOCAL)


def yarn_scale(factor: float, mscale: float = 1.0) -> float:
    """By how much yarn scales queries and keys of a context stretched by `factor`."""
    return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0


def first_layers(model: ModelConfig) -> ModelConfig:
    """The first layers as a model: dense."""
    return dataclasses.replace(model, num_layers=model.num_first, num_experts=0)


def blocks(model: ModelConfig) -> ModelConfig:
    """The other layers as a model."""
    return dataclasses.replace(model, num_layers=model.num_blocks, first_dense=0)


def _gpt2(**values) -> dict:
    """GPT-2 (Radford et al. 2019) and GPT-3 (Brown et al. 2020, here with all layers dense)."""
    width, heads = values["width"], values["num_heads"]
    return dict(
        family="gpt2", num_kv_heads=heads, head_dim=width // heads, mlp_dim=4 * width,
        positions="learned", norm="layer", norm_eps=1e-5, activation="gelu", gated_mlp=False,
        bias=True, tied_head=True, **{"vocab_size": 50257, "max_positions": 1024, **values},
    )  # fmt: skip


# fmt: off
# Llama 3 (arXiv 2407.21783).
_LLAMA3 = dict(family="llama3", vocab_size=128256, num_kv_heads=8, head_dim=128,
               rope_theta=500_000.0, norm_eps=1e-5, max_positions=8192)
# Qwen3 (arXiv 2505.09388): Llama's shape with normalised queries and keys.
_QWEN3 = dict(family="qwen3", vocab_size=151936, num_kv_heads=8, head_dim=128,
              rope_theta=1_000_000.0, norm_eps=1e-6, max_positions=40960, qk_norm=True)
_GEMMA = dict(head_dim=256, norm_eps=1e-6, norm_plus_one=True, post_norms=True, activation="gelu",
              tied_head=True, embedding_scale=True)
# Gemma 2 (arXiv 2408.00118): local, global layers in turn, soft-capped scores and logits.
_GEMMA2 = dict(_GEMMA, family="gemma2", vocab_size=256000, rope_theta=10_000.0, max_positions=8192,
               layer_pattern=(LOCAL, GLOBAL), window=4096, attention_softcap=50.0,
               logit_softcap=30.0)
# Gemma 3 (arXiv 2503.19786): five local layers to one global, q/k norm, no soft caps.
_GEMMA3 = dict(_GEMMA, family="gemma3", vocab_size=262144, rope_theta=1_000_000.0,
               rope_theta_local=10_000.0, max_positions=32768, qk_norm=True,
               layer_pattern=(LOCAL,) * 5 + (GLOBAL,), window=512, query_scale=256**-0.5)
# Mistral (arXiv 2310.06825): Llama's shape, a sliding window in every layer.
_MISTRAL = dict(family="mistral", vocab_size=32000, num_kv_heads=8, head_dim=128, norm_eps=1e-5,
                rope_theta=10_000.0, max_positions=32768, layer_pattern=(LOCAL,), window=4096)
# Qwen2.5 (arXiv 2412.15115): Llama's shape, biases on queries, keys and values.
_QWEN2 = dict(family="qwen2", norm_eps=1e-6, rope_theta=1_000_000.0, qkv_bias=True)
# OLMo 2 (arXiv 2501.00656): norms behind attention and MLP only, and of queries and keys.
_OLMO2 = dict(family="olmo2", vocab_size=100352, norm_eps=1e-6, rope_theta=500_000.0,
              pre_norms=False, post_norms=True, qk_norm=True, qk_norm_over=ALL_HEADS,
              max_positions=4096)
# OLMo 3 (Ai2, 2025): three local layers to one global, which alone are stretched.
_OLMO3 = dict(_OLMO2, family="olmo3", rope_theta_local=500_000.0,
              layer_pattern=(LOCAL,) * 3 + (GLOBAL,), window=4096)
# Phi-3 (arXiv 2404.14219) and Phi-4 (arXiv 2412.08905): Llama's shape.
_PHI3 = dict(family="phi3", norm_eps=1e-5)
# SmolLM3 (huggingface.co/blog/smollm3): every fourth layer without rotary positions.
_SMOLLM3 = dict(family="smollm3", vocab_size=128256, norm_eps=1e-6, rope_theta=5_000_000.0,
                max_positions=65536, tied_head=True, layer_pattern=(GLOBAL,) * 3 + (GLOBAL_NOPE,))
# Mixtral (arXiv 2401.04088): two of eight experts.
_MIXTRAL = dict(family="mixtral", vocab_size=32000, num_kv_heads=8, head_dim=128, norm_eps=1e-5,
                rope_theta=1_000_000.0, max_positions=32768, num_experts=8, experts_per_token=2)
# Qwen3's mixtures: eight of 128 experts.
_QWEN3_MOE = dict(_QWEN3, family="qwen3_moe", num_kv_heads=4, num_experts=128, experts_per_token=8)
# OLMoE (arXiv 2409.02060): eight of 64 experts, queries and keys normalised over all heads.
_OLMOE = dict(family="olmoe", vocab_size=50304, norm_eps=1e-5, rope_theta=10_000.0, qk_norm=True,
              qk_norm_over=ALL_HEADS, max_positions=4096, num_experts=64, experts_per_token=8,
              router_renormalize=False)
# gpt-oss (arXiv 2508.10925): sinks, local and global layers in turn, biases everywhere.
_GPT_OSS = dict(family="gpt_oss", vocab_size=201088, num_kv_heads=8, head_dim=64, norm_eps=1e-5,
                rope_theta=150_000.0, rope_scaling="yarn", rope_factor=32.0, rope_old_context=4096,
                rope_truncate=False, max_positions=131072, activation="clamped_silu", bias=True,
                attention_sinks=True, layer_pattern=(LOCAL, GLOBAL), window=128,
                experts_per_token=4)
# DeepSeek-V3 (arXiv 2412.19437): latent attention; the first layers are dense.
_DEEPSEEK_V3 = dict(family="deepseek_v3", norm_eps=1e-6, rope_interleaved=True, router="sigmoid")
_LATENT = dict(kv_latent=512, head_dim=192, rope_dim=64, value_dim=128)
# fmt: on

# A family's own name gives its smallest useful shape, for tests and small runs.
_TINY = dict(vocab_size=0, width=64, num_layers=3, num_heads=4, max_positions=256)
_TINY_HEADS = dict(num_kv_heads=2, head_dim=16, mlp_dim=192)
_LLAMA32 = dict(tied_head=True, max_positions=131072, rope_scaling="llama3", rope_factor=32.0)

FAMILIES = {
    "gpt2": _gpt2(**_TINY),
    "llama3": dict(_LLAMA3, **_TINY, **_TINY_HEADS),
    "qwen3": dict(_QWEN3, **_TINY, **_TINY_HEADS),
    "gemma2": dict(_GEMMA2, **_TINY, **_TINY_HEADS, window=16),
    "gemma3": dict(
        _GEMMA3, **_TINY | dict(num_layers=4), **_TINY_HEADS, window=16, query_scale=0.0,
        layer_pattern=(LOCAL, LOCAL, GLOBAL)),
    "mistral": dict(_MISTRAL | _TINY | _TINY_HEADS, window=16),
    "qwen2": dict(_QWEN2 | _TINY | _TINY_HEADS),
    "olmo2": dict(_OLMO2 | _TINY | _TINY_HEADS),
    "olmo3": dict(_OLMO3 | _TINY | _TINY_HEADS, num_layers=4, window=16),
    "phi3": dict(_PHI3 | _TINY | _TINY_HEADS),
    "smollm3": dict(_SMOLLM3 | _TINY | _TINY_HEADS, layer_pattern=(GLOBAL, GLOBAL_NOPE)),
    "mixtral": dict(_MIXTRAL, **_TINY, **_TINY_HEADS, expert_dim=96),
    "qwen3_moe": dict(
        _QWEN3_MOE, **_TINY, **_TINY_HEADS | dict(num_kv_heads=2), num_experts=8,
        experts_per_token=2, expert_dim=48),
    "olmoe": dict(
        _OLMOE, **_TINY, num_kv_heads=4, head_dim=16, num_experts=8, experts_per_token=3,
        mlp_dim=48, expert_dim=48),
    "gpt_oss": dict(
        _GPT_OSS, **_TINY, **_TINY_HEADS, window=16, num_experts=8, experts_per_token=2,
        expert_dim=48),
    "deepseek_v3": dict(
        _DEEPSEEK_V3, **_TINY, num_kv_heads=4, mlp_dim=192, kv_latent=32, query_latent=24,
        head_dim=24, rope_dim=8, value_dim=16, num_experts=8, experts_per_token=2, expert_dim=48,
        shared_dim=48, first_dense=1, router_groups=4, router_groups_kept=2, router_scale=2.5),
    "gpt2_124m": _gpt2(width=768, num_layers=12, num_heads=12),
    "gpt2_1.5b": _gpt2(width=1600, num_layers=48, num_heads=25),
    "gpt3_175b": _gpt2(width=12288, num_layers=96, num_heads=96, max_positions=2048),
    "llama3_8b": dict(_LLAMA3, width=4096, num_layers=32, num_heads=32, mlp_dim=14336),
    "llama3_70b": dict(_LLAMA3, width=8192, num_layers=80, num_heads=64, mlp_dim=28672),
    "llama3_405b": dict(
        _LLAMA3, width=16384, num_layers=126, num_heads=128, mlp_dim=53248, max_positions=131072,
        rope_scaling="llama3", rope_factor=8.0),
    "llama3.2_1b": dict(
        _LLAMA3, width=2048, num_layers=16, num_heads=32, head_dim=64, mlp_dim=8192, **_LLAMA32),
    "llama3.2_3b": dict(
        _LLAMA3, width=3072, num_layers=28, num_heads=24, head_dim=128, mlp_dim=8192, **_LLAMA32),
    "qwen3_0.6b": dict(
        _QWEN3, width=1024, num_layers=28, num_heads=16, mlp_dim=3072, tied_head=True),
    "qwen3_8b": dict(_QWEN3, width=4096, num_layers=36, num_heads=32, mlp_dim=12288),
    "mistral_7b": dict(_MISTRAL, width=4096, num_layers=32, num_heads=32, mlp_dim=14336),
    "qwen2.5_0.5b": dict(
        _QWEN2, vocab_size=151936, width=896, num_layers=24, num_heads=14, num_kv_heads=2,
        head_dim=64, mlp_dim=4864, max_positions=32768, tied_head=True),
    "qwen2.5_7b": dict(
        _QWEN2, vocab_size=152064, width=3584, num_layers=28, num_heads=28, num_kv_heads=4,
        head_dim=128, mlp_dim=18944, max_positions=131072),
    "olmo2_7b": dict(
        _OLMO2, width=4096, num_layers=32, num_heads=32, num_kv_heads=32, head_dim=128,
        mlp_dim=11008),
    "phi3_mini_4k": dict(
        _PHI3, vocab_size=32064, width=3072, num_layers=32, num_heads=32, num_kv_heads=32,
        head_dim=96, mlp_dim=8192, max_positions=4096, layer_pattern=(LOCAL,), window=2047),
    "phi4_14b": dict(
        _PHI3, vocab_size=100352, width=5120, num_layers=40, num_heads=40, num_kv_heads=10,
        head_dim=128, mlp_dim=17920, max_positions=16384, rope_theta=250_000.0),
    "smollm3_3b": dict(
        _SMOLLM3, width=2048, num_layers=36, num_heads=16, num_kv_heads=4, head_dim=128,
        mlp_dim=11008),
    "mixtral_8x7b": dict(
        _MIXTRAL, width=4096, num_layers=32, num_heads=32, mlp_dim=14336, expert_dim=14336),
    "mixtral_8x22b": dict(
        _MIXTRAL, width=6144, num_layers=56, num_heads=48, mlp_dim=16384, expert_dim=16384,
        vocab_size=32768, max_positions=65536),
    "qwen3_30b_a3b": dict(
        _QWEN3_MOE, width=2048, num_layers=48, num_heads=32, mlp_dim=6144, expert_dim=768),
    "qwen3_235b_a22b": dict(
        _QWEN3_MOE, width=4096, num_layers=94, num_heads=64, mlp_dim=12288, expert_dim=1536),
    "olmoe_1b_7b": dict(
        _OLMOE, width=2048, num_layers=16, num_heads=16, num_kv_heads=16, head_dim=128,
        mlp_dim=1024, expert_dim=1024),
    "gpt_oss_20b": dict(
        _GPT_OSS, width=2880, num_layers=24, num_heads=64, mlp_dim=2880, num_experts=32,
        expert_dim=2880),
    "gpt_oss_120b": dict(
        _GPT_OSS, width=2880, num_layers=36, num_heads=64, mlp_dim=2880, num_experts=128,
        expert_dim=2880),
    "deepseek_v3_671b": dict(
        _DEEPSEEK_V3, **_LATENT, vocab_size=129280, width=7168, num_layers=61, num_heads=128,
        num_kv_heads=128, mlp_dim=18432, query_latent=1536, first_dense=3, num_experts=256,
        experts_per_token=8, expert_dim=2048, shared_dim=2048, router_groups=8,
        router_groups_kept=4, router_scale=2.5, max_positions=163840, rope_theta=10_000.0,
        rope_scaling="yarn", rope_factor=40.0, rope_old_context=4096, rope_mscale=1.0,
        rope_mscale_all=1.0),
    # Moonlight (arXiv 2502.16982): DeepSeek-V3's shape, small.
    "moonlight_16b_a3b": dict(
        _DEEPSEEK_V3, **_LATENT, vocab_size=163840, width=2048, num_layers=27, num_heads=16,
        num_kv_heads=16, mlp_dim=11264, first_dense=1, num_experts=64, experts_per_token=6,
        expert_dim=1408, shared_dim=2816, router_scale=2.446, norm_eps=1e-5, rope_theta=50_000.0,
        max_positions=8192),
    "gemma2_2b": dict(
        _GEMMA2, width=2304, num_layers=26, num_heads=8, num_kv_heads=4, mlp_dim=9216),
    "gemma3_1b": dict(
        _GEMMA3, width=1152, num_layers=26, num_heads=4, num_kv_heads=1, mlp_dim=6912),
    "gemma3_4b": dict(
        _GEMMA3, width=2560, num_layers=34, num_heads=8, num_kv_heads=4, mlp_dim=10240, window=1024,
        vocab_size=262208, max_positions=131072, rope_scaling="linear", rope_factor=8.0),
}  # fmt: skip


def preset(name: str, **changes) -> ModelConfig:
    """`FAMILIES[name]` with `changes`. Raises ValueError for an unknown name or field."""
    if name not in FAMILIES:
        raise ValueError(f"model {name!r} is unknown: use one of {', '.join(sorted(FAMILIES))}")
    known = {field.name for field in dataclasses.fields(ModelConfig)}
    if unknown := sorted(set(changes) - known):
        raise ValueError(f"ModelConfig has no field {unknown}: the fields are {sorted(known)}")
    return ModelConfig(**FAMILIES[name] | changes)


# Fields without effect under other scalings of rotary positions.
OF_YARN = (
    "rope_beta_fast", "rope_beta_slow", "rope_truncate", "rope_mscale", "rope_mscale_all"
)  # fmt: skip
# Fields without effect where there are no experts.
_OF_EXPERTS = (
    "first_dense", "experts_per_token", "expert_dim", "shared_dim", "router",
    "router_renormalize", "router_scale", "router_groups", "router_groups_kept",
)  # fmt: skip


def unused_of_experts(model: ModelConfig) -> tuple[str, ...]:
    """Fields of the feed-forward part that have no effect on what a model computes."""
    if not model.num_experts:
        return _OF_EXPERTS
    # A token that keeps all groups chooses among all experts.
    all_kept = model.router_groups == model.router_groups_kept
    of_dense = ("mlp_dim",) * (not model.first_dense)
    return (*of_dense, *("router_groups", "router_groups_kept") * all_kept)


def unused_of_attention(model: ModelConfig) -> tuple[str, ...]:
    """Fields of latent attention, or of the other, that have no effect on what a model computes."""
    return () if model.kv_latent else ("query_latent", "value_dim")


def identity(model: ModelConfig) -> dict[str, Any]:
    """By field, what the function that a model computes depends on; None where a field has no
    effect beside the others.

    Two models with the same parameters compute the same function if and only if these are equal.
    """
    kinds = set(model.layer_kinds)
    rope = model.positions == "rope" and any(map(is_rotated, kinds))
    # Local layers have a base of their own, or share that of global layers and its stretching.
    shared = rope and (GLOBAL in kinds or not model.rope_theta_local)
    stretched = shared and model.rope_scaling != "none" and model.rope_factor != 1
    blended = stretched and model.rope_scaling == "llama3"
    yarn = stretched and model.rope_scaling == "yarn"
    own = model.rope_theta_local
    local = (own or model.rope_theta, stretched and not own)
    depends = {
        "family": None,
        "vocab_multiple": None,  # padding has no probability
        "ngram_rows": model.ngram_rows if model.ngram_tables else None,
        "max_positions": model.max_positions if model.positions == "learned" else None,
        "rope_theta": model.rope_theta if shared else None,
        "rope_theta_local": local if rope and LOCAL in kinds else None,
        "rope_scaling": model.rope_scaling if stretched else None,
        "rope_factor": model.rope_factor if stretched else None,
        "rope_low_freq": model.rope_low_freq if blended else None,
        "rope_high_freq": model.rope_high_freq if blended else None,
        "rope_old_context": model.rope_old_context if blended or yarn else None,
        "rope_interleaved": model.rope_interleaved if rope else None,
        "rope_dim": model.rotated_dim if rope else None,
        "query_scale": model.score_scale,
        "qk_norm_over": model.qk_norm_over if model.qk_norm else None,
        "layer_pattern": model.layer_kinds,
        "window": model.window if any(map(is_local, kinds)) else None,
        "qkv_bias": None if model.bias else model.qkv_bias,
        "ranks": ranks.of(model),
        "embedding_cores": model.embedding_cores if model.embedding_rank else None,
    }
    depends |= {name: vars(model)[name] if yarn else None for name in OF_YARN}
    depends |= dict.fromkeys((*unused_of_experts(model), *unused_of_attention(model)))
    return vars(model) | depends


def problems(model: ModelConfig) -> list[str]:
    """All problems of a model by itself, each with its remedy."""
    texts = bounds.problems(model, "model.")
    if texts:  # what is out of bounds cannot be compared with the rest
        return texts
    if model.num_heads % model.num_kv_heads:
        divisors = [d for d in range(1, min(model.num_heads, 4096) + 1) if model.num_heads % d == 0]
        texts.append(
            f"model.num_heads={model.num_heads} is not a multiple of "
            f"model.num_kv_heads={model.num_kv_heads}: every K/V head serves the same number of "
            f"query heads; use num_kv_heads in {divisors}"
        )
    if model.activation == "clamped_silu" and not model.gated_mlp:
        texts.append(
            "model.activation='clamped_silu' is of gate and up: use gated_mlp=True, or 'silu'"
        )
    if not model.pre_norms and not model.post_norms:
        texts.append(
            "model.pre_norms=False with model.post_norms=False: layers without any norm do not "
            "train; use one of them"
        )
    texts += _problems_of_latents(model) if model.kv_latent else _problems_of_rotation(model)
    texts += [*scaled_rope.problems(model), *_problems_of_kinds(model)]
    texts += [*ranks.problems(model), *tensor_train.problems(model)]
    return texts + (experts_config.problems_of_model(model) if model.num_experts > 0 else [])


def _problems_of_rotation(model: ModelConfig) -> list[str]:
    """All problems of rotary positions but those of latent attention, each with its remedy."""
    H, P = model.head_dim, model.rope_dim
    if model.positions != "rope" or not any(map(is_rotated, model.layer_pattern)):
        return []
    if P > H or P % 2:
        return [
            f"model.rope_dim={P} must be even and at most model.head_dim={H}: of a head's numbers "
            "the first ones are rotated, in pairs; 0 = all"
        ]
    if H % 2 and not P:
        return [f"model.head_dim={H} must be even: rotary positions turn pairs of numbers"]
    return []


def _problems_of_kinds(model: ModelConfig) -> list[str]:
    """All problems of the attention kinds of layers, each with its remedy."""
    texts, kinds = [], set(model.layer_pattern)
    if not kinds or kinds - set(KINDS):
        texts.append(
            f"model.layer_pattern={model.layer_pattern} must be a non-empty tuple of "
            f"{', '.join(map(repr, KINDS))}"
        )
    if (local := sorted(filter(is_local, kinds))) and model.window == 0:
        texts.append(
            f"model.window={model.window} must be at least 1 where layer_pattern has {local[0]!r}"
        )
    if unrotated := sorted(kinds & {GLOBAL_NOPE, LOCAL_NOPE}):
        why = ""
        if model.positions != "rope":
            why = f"model.positions={model.positions!r}, where no layer rotates"
        elif model.kv_latent:
            why = f"model.kv_latent={model.kv_latent}: latent attention rotates in every layer"
        if why:
            texts.append(
                f"model.layer_pattern has {unrotated[0]!r} with {why}; use "
                f"{unrotated[0].removesuffix('_nope')!r}"
            )
    return texts


# What latent attention has.
OF_LATENTS = (
    ("positions", "rope"),
    ("qk_norm", False),
    ("bias", False),
    ("qkv_bias", False),
    ("attention_sinks", False),
)


def _problems_of_latents(model: ModelConfig) -> list[str]:
    """All problems of latent attention, each with its remedy."""
    texts, H, P = [], model.head_dim, model.rope_dim
    if not 0 < P < H or P % 2:
        texts.append(
            f"model.rope_dim={P} must be even, above 0 and below model.head_dim={H}: of a head's "
            "numbers the last ones are rotated, in pairs"
        )
    if not model.value_dim:
        texts.append(
            f"model.value_dim={model.value_dim} with model.kv_latent={model.kv_latent}: set it to "
            "the width of a head's value, or kv_latent to 0"
        )
    if model.num_kv_heads != model.num_heads:
        texts.append(
            f"model.num_kv_heads={model.num_kv_heads} with model.kv_latent={model.kv_latent}: each "
            f"head has keys of its own, made of the latent; use num_kv_heads={model.num_heads}"
        )
    for name, wanted in OF_LATENTS:
        if vars(model)[name] != wanted:
            texts.append(
                f"model.{name}={vars(model)[name]!r} with model.kv_latent={model.kv_latent}: "
                f"latent attention has only {name}={wanted!r}; use that, or kv_latent=0"
            )
    return texts

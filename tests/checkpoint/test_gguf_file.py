"""GGUF files: read by the library, by transformers and by llama.cpp, the same numbers; and models
that such a file cannot say."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import tokenizers
from support import hf_models, llama_cpp, packed_models
from support.hf_models import TINY
from support.packed_models import execution

from llmx.checkpoint import gguf_file, hf_formats
from llmx.model import apply, families, sampling
from llmx.model.apply import Apply
from llmx.model.families import ModelConfig
from llmx.model.packed import PackedConfig
from llmx.model.recommender.config import RecommenderConfig

GENERATED, GREEDY = 24, 4
# Log-probabilities of llama.cpp, in fp32 throughout, and with weights that are rounded to fp16.
LOGPROBS = {"float32": 1e-4, "float16": 2e-2}
MODELS = {
    "llama": ("LlamaConfig", TINY | {"num_key_value_heads": 4}),
    # Of Qwen3 transformers takes this size of heads, whatever the file says.
    "qwen3": ("Qwen3Config", TINY | {"head_dim": 128, "tie_word_embeddings": False}),
}
# A tokenizer of as many tokens as the models have.
TOKENIZER = {
    "model": {"type": "BPE", "vocab": {chr(65 + n): n for n in range(98)}, "merges": [["A", "B"]]},
    "added_tokens": [{"id": 98, "content": "<end>", "special": True}],
}


@pytest.mark.parametrize(
    ("name", "config"),
    [("llama", PackedConfig("int4", 32)), ("qwen3", PackedConfig("int8", 0))],
    ids=["llama Q4_0", "qwen3 Q8_0"],
)
def test_transformers_generates_the_same(name, config, tmp_path):
    pytest.importorskip("gguf")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model, params = packed_models.quantized(tmp_path, *MODELS[name], config)
    file = tmp_path / "model.gguf"
    gguf_file.export(params, model, file, tokenizer=TOKENIZER, end_token=98)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", torch_dtype=torch.float32
    ).eval()
    prompt = hf_models.tokens_of()[0, :5].tolist()
    [ours] = sampling.generate(
        Apply(model), params, execution(), [prompt], max_tokens=GENERATED, temperature=0.0
    )
    with torch.no_grad():
        found = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=GENERATED, do_sample=False, pad_token_id=0,
            eos_token_id=None,
        )  # fmt: skip
    assert ours == found[0, 5:].tolist()


@pytest.mark.parametrize("form", ["int4", "int8"])
def test_the_library_turns_blocks_into_the_same_numbers(form):
    quants = pytest.importorskip("gguf.quants")
    config = PackedConfig(form, 64)
    random = np.random.default_rng(0)
    codes = random.integers(0, config.levels, (6, 128))
    scales = np.repeat(np.asarray(random.uniform(0.01, 1, (6, 2)), jax.numpy.bfloat16), 64, axis=1)
    scales = scales.astype(np.float32)
    blocks = gguf_file.blocks_of(codes, scales, config.bits)
    kind = quants.GGMLQuantizationType.Q4_0 if form == "int4" else quants.GGMLQuantizationType.Q8_0
    found = quants.dequantize(blocks, kind)
    np.testing.assert_array_equal(found, (codes - config.middle) * scales)


def test_files_that_cannot_be_are_refused(tmp_path):
    model, params = packed_models.quantized(tmp_path, *MODELS["qwen3"], PackedConfig("int8", 16))
    assert "a group that is a multiple of 32" in "\n".join(gguf_file.problems(model, params))
    model, params = packed_models.quantized(
        tmp_path / "b", *MODELS["qwen3"], PackedConfig("int4", 0, False)
    )
    assert "has zero points" in "\n".join(gguf_file.problems(model, params))


def small(family: str, **changes) -> ModelConfig:
    return families.preset(family, **{
        "width": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16,
        "mlp_dim": 96, "vocab_size": 258, "max_positions": 64, **changes,
    })  # fmt: skip


def random_params(model: ModelConfig):
    """Every part matters: scales around 1, other weights and biases around 0. The two tokens that
    end a text are unlikely."""
    random = np.random.default_rng(0)

    def draw(path, leaf):
        scale = jax.tree_util.keystr(path).endswith("['scale']")
        drawn = (scale + 0.2 * random.standard_normal(leaf.shape)).astype(np.float32)
        if leaf.shape[0] == model.padded_vocab:
            drawn[256:] = 0
        return drawn

    return jax.tree_util.tree_map_with_path(draw, apply.abstract_parameters(model)[0])


def byte_tokenizer() -> tokenizers.Tokenizer:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: number for number, text in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<first>", "<second>"])
    return tokenizer


NO_WINDOW = {"layer_pattern": ("global",), "window": 0}
WRITTEN = {
    "llama": ("llama3", {"head_dim": 32}), "tied": ("llama3", {"tied_head": True}),
    "qwen2": ("qwen2", {}), "qwen3": ("qwen3", {}), "mistral": ("mistral", NO_WINDOW),
}  # fmt: skip
PROMPT = hf_models.tokens_of(20)[0].tolist()


def test_llama_cpp_computes_and_generates_the_same(tmp_path):
    pytest.importorskip("gguf", reason="what writes the files: extra `quant`")
    pytest.importorskip("xllamacpp", reason="llama.cpp: extra `quant`")
    tokenizer, asked, files = byte_tokenizer(), {}, {}
    content = json.loads(tokenizer.to_str())
    for name, (family, changes) in WRITTEN.items():
        model = small(family, **changes)
        params = random_params(model)
        for dtype in LOGPROBS:
            file = str(tmp_path / f"{name} {dtype}.gguf")
            gguf_file.export(
                params, model, file, tokenizer=content, end_token=[256, 257], dtype=dtype
            )
            asked[file] = {"prompts": [PROMPT, PROMPT[:3]], "generate": GREEDY}
            files[file] = model, params, dtype
    answers, logits = llama_cpp.ask(asked), {}
    for file, (model, params, dtype) in files.items():
        followed = answers[file]["ids"][0]
        key = str(model), tuple(followed)
        if key not in logits:
            tokens = np.array([PROMPT + followed], np.int32)
            [logits[key]] = hf_models.our_logits(model, params, packed_models.execution(), tokens)
        ours = np.asarray(jax.nn.log_softmax(logits[key][:, : model.vocab_size], axis=-1))
        last = len(PROMPT) - 1
        np.testing.assert_allclose(
            answers[file]["logprobs"], ours[[last, 2]], atol=LOGPROBS[dtype], rtol=0, err_msg=file
        )
        assert ours.argmax(-1)[last:-1].tolist() == followed, file
        assert len(followed) == GREEDY
        assert answers[file]["text"][0] == tokenizer.decode(followed), file


def test_llama_cpp_stops_at_each_end(tmp_path):
    pytest.importorskip("gguf", reason="what writes the files: extra `quant`")
    pytest.importorskip("xllamacpp", reason="llama.cpp: extra `quant`")
    model = small("llama3", tied_head=True)
    params = random_params(model)
    content = json.loads(byte_tokenizer().to_str())

    def generated(*ends: int) -> list[int]:
        file = tmp_path / f"{len(ends)}.gguf"
        gguf_file.export(params, model, file, tokenizer=content, end_token=ends)
        answer = llama_cpp.ask({str(file): {"prompts": [PROMPT], "generate": 6}})[str(file)]
        return answer["ids"][0]

    free = generated(256)
    assert len(free) == 6
    last = free[3]  # a token that is not special, and now ends a text
    assert generated(256, last) == free[: free.index(last) + 1]


# --------------------------------------------------------------------- what a file cannot represent

# Another value of each field, which alone makes a model of another function, or needs others.
OTHER = {
    "own": "object:Mine", "recommender": RecommenderConfig(name="dlrm"), "ngram_tables": (2,),
    "positions": "learned", "rope_scaling": "linear", "norm": "layer", "qk_norm_over": "all",
    "activation": "gelu", "router": "sigmoid", "layer_pattern": ("global", "global_nope"),
    "ranks": ("mlp=4",), "family": "olmo2", "rope_dim": 8, "rope_theta": 1e39, "norm_eps": 1e-50,
}  # fmt: skip
CHANGED = {
    **{field.name: {} for field in dataclasses.fields(ModelConfig)},
    "window": {"layer_pattern": ("local",)}, "rope_theta_local": {"layer_pattern": ("local",)},
    "rope_factor": {"rope_scaling": "yarn"}, "experts_per_token": {"num_experts": 4},
}  # fmt: skip


def other(model: ModelConfig, name: str) -> ModelConfig:
    value = vars(model)[name]
    plain = (lambda: not value) if isinstance(value, bool) else (lambda: value + 1)
    value = OTHER[name] if name in OTHER else plain()
    return dataclasses.replace(model, **CHANGED[name] | {name: value})


@pytest.mark.parametrize("family", gguf_file.COMPUTED_AS.values())
@pytest.mark.parametrize("name", CHANGED)
def test_models_that_compute_different_things_have_different_files_or_none(name, family):
    """For each field: it is in the file, has no effect, or the model is refused with its name."""
    before = small(family)
    after = other(before, name)
    files = [(gguf_file._metadata(one), hf_formats.rows(one)) for one in (before, after)]
    refused = "\n".join(gguf_file.problems(after, {}))
    computes_the_same = families.identity(before) == families.identity(after)
    assert not gguf_file.problems(before, {})
    assert computes_the_same or files[0] != files[1] or f"model.{name}=" in refused
    # And what is written is what would be read.
    if not refused:
        read = families.identity(gguf_file.read_back(after))
        assert read == families.identity(after)


@pytest.mark.parametrize(("family", "changes", "words"), [
    ("llama3", {"activation": "gelu"}, "model.activation='gelu' (it has 'silu')"),
    ("llama3", {"logit_softcap": 5.0}, "model.logit_softcap=5.0 (it has 0.0)"),
    ("llama3", {"attention_softcap": 5.0}, "model.attention_softcap=5.0"),
    ("llama3", {"query_scale": 0.5}, "model.query_scale=0.5 (it has 0.25)"),
    ("llama3", {"norm_plus_one": True}, "model.norm_plus_one=True"),
    ("llama3", {"embedding_scale": True}, "model.embedding_scale=True"),
    ("llama3", {"rope_dim": 8}, "model.rope_dim=8 (it has 16)"),
    ("llama3", {"rope_scaling": "llama3", "rope_factor": 8.0}, "model.rope_scaling='llama3'"),
    ("llama3", {"qk_norm": True}, "model.qk_norm=True"),
    ("llama3", {"qkv_bias": True}, "model.qkv_bias=True"),
    ("llama3", {"rope_theta": 1e39}, "model.rope_theta=1e+39 (it has inf)"),
    ("qwen2", {"qkv_bias": False}, "model.qkv_bias=False (it has True)"),
    ("qwen2", {"head_dim": 8}, "model.head_dim=8 (it has 16)"),
    ("qwen3", {"qk_norm": False}, "model.qk_norm=False (it has True)"),
    ("mistral", {"window": 4}, "model.layer_pattern=('local', 'local') (it has ('global',"),
    ("qwen2", {"layer_pattern": ("global", "local"), "window": 4}, "model.window=4"),
    ("gemma2", {}, "model.family='gemma2' is not written as GGUF"),
])  # fmt: skip
def test_what_a_file_cannot_represent_is_refused(family, changes, words, tmp_path):
    pytest.importorskip("gguf", reason="what writes the files: extra `quant`")
    model = small(family, **changes)
    with pytest.raises(ValueError) as caught:
        gguf_file.export({}, model, tmp_path / "model.gguf")
    assert words in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_whole_numbers_of_float_fields_are_floats(tmp_path):
    """As a config.json may have them."""
    gguf = pytest.importorskip("gguf", reason="what writes the files: extra `quant`")
    model = small("llama3", rope_theta=10_000)
    gguf_file.export(random_params(model), model, tmp_path / "model.gguf")
    field = gguf.GGUFReader(tmp_path / "model.gguf").fields["llama.rope.freq_base"]
    assert field.types == [gguf.GGUFValueType.FLOAT32]


def test_dtypes_of_matrices(tmp_path):
    gguf = pytest.importorskip("gguf", reason="what writes the files: extra `quant`")
    from gguf.quants import dequantize

    model = small("llama3")
    params = random_params(model)
    for dtype, kind in (("float32", "F32"), ("float16", "F16"), ("bfloat16", "BF16")):
        gguf_file.export(params, model, tmp_path / dtype, dtype=dtype)
        tensors = {one.name: one for one in gguf.GGUFReader(tmp_path / dtype).tensors}
        kinds = {name: one.tensor_type.name for name, one in tensors.items()}
        assert kinds["output_norm.weight"] == "F32"
        assert {kinds["output.weight"], kinds["blk.1.ffn_up.weight"]} == {kind}
        found = dequantize(tensors["output.weight"].data, tensors["output.weight"].tensor_type)
        expected = params["head"][: model.vocab_size].astype(dtype).astype(np.float32)
        np.testing.assert_array_equal(found, expected)
    params["blocks"]["mlp"]["up"]["kernel"][0, 0, 0] = 1e5
    with pytest.raises(ValueError, match=r"blk.0.ffn_up.weight has numbers up to 100000, beyond"):
        gguf_file.export(params, model, tmp_path / "more", dtype="float16")
    assert not (tmp_path / "more").exists()

"""GGUF files of packed runs: read by the library and by transformers, the same numbers."""

import jax
import numpy as np
import pytest
from support import hf_models, packed_models
from support.hf_models import TINY
from support.packed_models import execution

from llmx.checkpoint import gguf_file
from llmx.model import sampling
from llmx.model.apply import Apply
from llmx.model.packed import PackedConfig

GENERATED = 24
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

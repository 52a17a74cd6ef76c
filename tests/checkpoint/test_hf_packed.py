"""Packed models in transformers: the same logits and the same likeliest tokens as in llmx."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import hf_models, packed_models
from support.hf_models import TINY
from support.packed_models import execution

from llmx.checkpoint import hf, hf_formats, hf_packed
from llmx.compress import quantize
from llmx.compress.quantize import QuantizeConfig
from llmx.model import packed, sampling
from llmx.model.apply import Apply
from llmx.model.packed import PackedConfig

# fp32 in both, sums in different orders.
LOGITS = 5e-5
GENERATED = 24
CONFIGS = {
    "int4": PackedConfig("int4", 32, True), "int4 with zeros": PackedConfig("int4", 16, False),
    "int8": PackedConfig("int8", 0, True), "int8 with zeros": PackedConfig("int8", 32, False),
}  # fmt: skip
MODELS = {
    "llama": ("LlamaConfig", TINY),
    "fused": ("Phi3Config", TINY | {"num_key_value_heads": 4, "tie_word_embeddings": False}),
}


@pytest.mark.parametrize(
    ("name", "form"),
    [("llama", "int4"), ("llama", "int8"), ("fused", "int4 with zeros")],
)
def test_transformers_computes_the_same(name, form, tmp_path):
    pytest.importorskip("compressed_tensors")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model, params = packed_models.quantized(tmp_path, *MODELS[name], CONFIGS[form])
    hf.export(params, model, tmp_path / "packed")
    # With zero points transformers 5 makes modules of another shape than its library packs, unless
    # it turns weights back when it loads them.
    how = transformers.CompressedTensorsConfig(dequantize=True) if "zeros" in form else None
    load = functools.partial(transformers.AutoModelForCausalLM.from_pretrained, tmp_path / "packed")
    theirs = (load(quantization_config=how) if how else load()).eval()
    tokens, run = hf_models.tokens_of(16), execution()
    positions = np.broadcast_to(np.arange(16, dtype=np.int32), tokens.shape)
    with jax.set_mesh(run.place.mesh):
        ours = jax.jit(
            lambda params, tokens: Apply(model).logits(
                params, tokens, jnp.zeros_like(tokens), positions, run
            )
        )(params, tokens)[..., :99]  # fmt: skip
    expected = hf_models.their_logits(theirs, tokens)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(ours / scale, expected / scale, atol=LOGITS)
    prompt = tokens[0, :5].tolist()
    [ours] = sampling.generate(
        Apply(model), params, run, [prompt], max_tokens=GENERATED, temperature=0.0
    )
    with torch.no_grad():
        found = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=GENERATED, do_sample=False, pad_token_id=0
        )
    assert ours == found[0, 5:].tolist()


def test_files_are_as_small_as_the_codes(tmp_path):
    model, params = packed_models.quantized(tmp_path, *MODELS["llama"], CONFIGS["int4"])
    hf.export(params, model, tmp_path / "packed")
    whole, small = (
        (tmp_path / name / "model.safetensors").stat().st_size for name in ("theirs", "packed")
    )
    leaves = [leaf for leaf in packed.named(params).values() if packed.is_packed(leaf)]
    numbers = sum(int(np.prod(packed.shape_of(leaf))) for leaf in leaves)
    # Half a byte in the place of four, and scales in fp32; names take a few kB.
    saved = 3.5 * numbers - 4 * sum(leaf.scale.size for leaf in leaves)
    assert abs(whole - small - saved) < 8000, (whole, small, saved)
    said = json.loads((tmp_path / "packed" / "config.json").read_text())
    assert said["quantization_config"]["ignore"] == ["lm_head"]


def test_words_are_those_of_the_library():
    torch = pytest.importorskip("torch")
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    for bits in (4, 8):
        codes = np.random.default_rng(0).integers(0, 2**bits, (6, 20))
        signed = torch.tensor(codes - 2 ** (bits - 1), dtype=torch.int8)
        expected = helpers.pack_to_int32(signed, bits).numpy()
        np.testing.assert_array_equal(hf_packed.words_of(codes, bits), expected)


def test_weights_of_other_modules_are_refused(tmp_path):
    transformers = pytest.importorskip("transformers")
    values = {"vocab_size": 99, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
    hf_models.make(transformers, "GPT2Config", values, tmp_path / "theirs")
    model, params = hf.load(tmp_path / "theirs")
    params = jax.device_put(params, jax.NamedSharding(execution().place.mesh, jax.P()))
    params = quantize.quantized(
        Apply(model), params, (), execution(), CONFIGS["int8"], QuantizeConfig(method="nearest")
    )
    with pytest.raises(ValueError, match=r"c_attn.*\[in, out\]"):
        hf.export(params, model, tmp_path / "packed")
    assert not (tmp_path / "packed").exists() or not any((tmp_path / "packed").iterdir())


@pytest.mark.parametrize(
    ("path", "config"),
    [
        ("blocks/mlp/down/kernel", PackedConfig("int8", 32)),
        ("blocks/mlp/down/kernel", PackedConfig("int4", 16)),
        ("blocks/mlp/down/kernel", PackedConfig("int4", 32, False)),
        # What config.json always calls unpacked.
        ("head", PackedConfig("int4", 32)),
    ],
)
def test_weights_that_one_rule_does_not_describe_are_refused(path, config, tmp_path):
    model, params = packed_models.quantized(tmp_path, *MODELS["llama"], PackedConfig("int4", 32))
    names = hf_formats.tensor_names(model, prefix="model.")
    arrays = packed.named(params)
    assert hf_packed.quantization_config(names, arrays)
    _, other = packed_models.quantized(tmp_path / "b", *MODELS["llama"], config)
    arrays[path] = packed.named(other)["blocks/mlp/down/kernel"]
    name = "lm_head" if path == "head" else "down_proj"
    with pytest.raises(ValueError, match=f"{name}.weight is .* one rule for all"):
        hf_packed.quantization_config(names, arrays)

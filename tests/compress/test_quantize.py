"""Quantized models: scaling changes nothing by itself, and codes say what was asked for."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compress.test_calibration import batches_of, random_params, recipe_of
from support.runs import make_config, make_recipe, put_batch

from llmx.compress import calibration, quantize, rounding, saved, scaling
from llmx.compress.quantize import QuantizeConfig
from llmx.model import packed, quantization
from llmx.model.packed import PackedConfig
from llmx.model.quantization import QuantizationConfig
from llmx.sharding import trees

# fp32 with numbers multiplied and divided by factors of up to a hundred.
SAME = dict(rtol=1e-4, atol=1e-4)


def logits(recipe, params, batch, policy=None):
    loss = recipe.loss
    execution = loss.execution if policy is None else dataclasses.replace(
        loss.execution, policy=policy
    )  # fmt: skip
    rows = [batch[name] for name in ("tokens", "segment_ids", "positions")]
    with jax.set_mesh(recipe.mesh):
        run = jax.jit(lambda params, *rows: loss.apply.logits(params, *rows, execution))
        return np.asarray(run(params, *rows))[..., :257]


def run_of(family: str, mesh: tuple = ()):
    recipe = recipe_of(family, mesh)
    batches = [put_batch(recipe, batch) for batch in batches_of(257)]
    return recipe, random_params(recipe), batches


@pytest.mark.parametrize(("family", "technique"), [("gemma2", "awq"), ("gpt2", "smooth")])
def test_scaled_inputs_change_nothing(family, technique):
    recipe, params, batches = run_of(family)
    loss, touched = recipe.loss, set()

    def change(layer):
        model = loss.apply.model
        if technique == "awq":
            config = PackedConfig("int4", 8)
            new, found = scaling.awq(model, layer.weights, layer.statistics, config)
        else:
            new, found = scaling.smoothed(model, layer.weights, layer.statistics)
        for name, weight in new.items():
            if not np.array_equal(weight, layer.weights[name]):
                touched.add(name)
        for name in layer.statistics:
            assert found[name].tokens == layer.statistics[name].tokens
        return new

    scaled = calibration.layer_by_layer(loss.apply, params, batches, loss.execution, change)
    before, after = (logits(recipe, each, batches[0]) for each in (params, scaled))
    np.testing.assert_allclose(after, before, **SAME)
    expected = {"attention_norm/scale", "mlp_norm/scale", "mlp/up/kernel", "attention/key/kernel"}
    if technique == "awq":
        expected |= {"attention/value/kernel", "attention/out/kernel"}
    assert expected <= touched


def test_statistics_of_scaled_inputs_are_those_of_the_scaled_model():
    recipe, params, batches = run_of("llama3")
    loss, told = recipe.loss, []

    def change(layer):
        new, found = scaling.smoothed(loss.apply.model, layer.weights, layer.statistics)
        told.append(found)
        return new

    scaled = calibration.layer_by_layer(loss.apply, params, batches, loss.execution, change)
    found = calibration.statistics(loss.apply, scaled, batches, loss.execution)
    for name in ("mlp/up/kernel", "attention/query/kernel", "mlp/down/kernel"):
        for told_one, one in zip(told[1][name], found[f"blocks/{name}"], strict=True):
            scale = np.abs(one[1]).max()
            np.testing.assert_allclose(told_one / scale, one[1] / scale, **SAME)


def test_smoothing_is_that_of_the_paper():
    recipe, params, batches = run_of("gpt2")
    loss, checked = recipe.loss, []

    def change(layer):
        new, found = scaling.smoothed(
            loss.apply.model, layer.weights, layer.statistics, strength=0.75
        )
        before = layer.statistics["mlp/up/kernel"].amax_I
        factors = before**0.75 / np.abs(layer.weights["mlp/up/kernel"]).max(1) ** 0.25
        np.testing.assert_allclose(found["mlp/up/kernel"].amax_I, before / factors, rtol=1e-5)
        np.testing.assert_allclose(
            new["mlp/up/kernel"], layer.weights["mlp/up/kernel"] * factors[:, None], rtol=1e-5
        )
        checked.append(layer.index)
        return new

    calibration.layer_by_layer(loss.apply, params, batches, loss.execution, change)
    assert checked == [0, 1]


def test_a_quantized_model_computes_with_the_numbers_of_its_codes():
    """Nearest codes: the same as the model whose weights are those numbers."""
    recipe, params, batches = run_of("mixed", (("fsdp", 2), ("tensor", 2)))
    loss, config = recipe.loss, PackedConfig("int4", 8)
    how = QuantizeConfig(method="nearest")
    found = quantize.quantized(loss.apply, params, (), loss.execution, config, how)
    dense = trees.named(params)
    for name, leaf in calibration.by_name(found["blocks"]).items():
        if not packed.is_packed(leaf):
            np.testing.assert_array_equal(leaf, dense[f"blocks/{name}"])
            continue
        whole, layers = jax.device_get(leaf), []
        for index in range(3):
            one = jax.tree.map(lambda array, at=index: array[at], whole)
            codes, scale, zero = packed.codes_of(one)
            rounded = rounding.Rounded(jnp.asarray(codes), jnp.asarray(scale), zero)
            layers.append(rounding.numbers(rounded, config))
        old = dense[f"blocks/{name}"]
        new = np.stack(layers).reshape(old.shape).astype(np.float32)
        assert 0 < np.abs(new - np.asarray(old)).max() < 0.52 * np.asarray(whole.scale).max()
        dense[f"blocks/{name}"] = jax.device_put(new, old.sharding)
    expected = logits(recipe, trees.unnamed(dense, params), batches[0])
    np.testing.assert_allclose(logits(recipe, found, batches[0]), expected, **SAME)


def test_gptq_behind_rounded_layers_is_nearer_to_the_model_than_nearest_codes():
    recipe, params, batches = run_of("llama3")
    loss, config = recipe.loss, PackedConfig("int4", 8)
    expected, errors = logits(recipe, params, batches[0]), {}
    for name, how in {
        "nearest": QuantizeConfig("nearest"), "awq": QuantizeConfig("nearest", "awq"),
        "gptq": QuantizeConfig("gptq"),
    }.items():  # fmt: skip
        found = quantize.quantized(loss.apply, params, batches, loss.execution, config, how)
        errors[name] = np.square(logits(recipe, found, batches[0]) - expected).mean()
    assert errors["gptq"] < 0.8 * errors["nearest"], errors
    assert errors["awq"] < errors["nearest"], errors


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("form", ["int4", "int8"])
def test_packed_weights_are_counted_as_numbers(form, symmetric):
    """By the numbers that they stand for, also where the zero point is no code of the middle."""
    config = PackedConfig(form, 8, symmetric)
    weight_LIO = np.random.default_rng(0).standard_normal((2, 16, 12)).astype(np.float32) + 0.5
    weight_LIO[:, ::2] = 0
    layers = [rounding.nearest(weight_IO, config=config) for weight_IO in weight_LIO]
    parts = jax.tree.map(lambda *each: jnp.stack(each), *layers)
    params = {"up": packed.pack(*parts, config, weight_LIO.shape, 1), "scale": np.ones(5)}
    expected = sum(np.count_nonzero(rounding.numbers(one, config)) for one in layers)
    assert 0.4 * weight_LIO.size < expected <= weight_LIO.size // 2
    assert saved.nonzero(params) == (expected + 5, weight_LIO.size + 5)


@pytest.mark.parametrize(("scales", "method"), [("largest", "gptq"), ("learned", "nearest")])
def test_a_model_that_was_trained_as_integers_keeps_its_codes(scales, method):
    recipe, params, batches = run_of("llama3")
    loss, trained = recipe.loss, QuantizationConfig(bits=4, group=8, scales=scales)
    with jax.set_mesh(recipe.mesh):
        own = jax.jit(lambda params: quantization.init_steps(trained, params))(params)
        codes = jax.jit(
            lambda own: quantization.quantized_weights(own, trained, jnp.dtype("float32"))
        )(own)  # fmt: skip
    plain = quantization.dequantized_on_mesh(own, trained, jnp.dtype("float32"))
    config, how = PackedConfig("int4", 8), QuantizeConfig(method)
    found = quantize.quantized(loss.apply, plain, batches[:1], loss.execution, config, how)
    leaves = packed.named(jax.device_get(found))
    assert len(codes) == 7
    for name, wanted in codes.items():
        for layer in range(2):
            one = jax.tree.map(lambda array, at=layer: array[at], leaves[name])
            got, scale, _ = packed.codes_of(one)
            of_layer = np.asarray(wanted.codes[layer]).reshape(got.shape)
            np.testing.assert_array_equal(got - config.middle, of_layer)
            np.testing.assert_allclose(
                scale, np.asarray(wanted.scale[layer]).reshape(scale.shape), rtol=2.0**-8
            )


def test_what_cannot_be_quantized_is_refused():
    recipe, params, batches = run_of("llama3")
    loss = recipe.loss

    def refusal(config, how, batches=batches):
        with pytest.raises(ValueError) as caught:
            quantize.quantized(loss.apply, params, batches, loss.execution, config, how)
        return str(caught.value)

    assert "packed.group=5 does not divide" in refusal(PackedConfig("int4", 5), QuantizeConfig())
    assert "packs nothing" in refusal(PackedConfig(), QuantizeConfig())
    assert "no calibration text" in refusal(PackedConfig("int4"), QuantizeConfig(), batches=())
    routed = make_recipe(make_config("mixtral", batch__size=8, batch__sequence_length=16))
    found = quantize.problems(
        routed.loss.apply, routed.loss.params, PackedConfig("int8"), QuantizeConfig(), 1
    )
    assert any("model.num_experts" in one for one in found)

"""What calibration finds is what products take, on every mesh; layers are changed in turn."""

import functools

import jax
import numpy as np
import pytest
from support import hf_models
from support.mixed_model import MIXED
from support.runs import make_config, make_recipe, put_batch

from llmx import sharding
from llmx.checkpoint import hf
from llmx.compress import calibration
from llmx.model import apply, observed, precision
from llmx.model.execution import Execution
from llmx.sharding import trees

# fp32 sums in another order.
SAME = dict(rtol=2e-5, atol=2e-5)
ROWS, LENGTH = 8, 16


def batches_of(vocab_size: int, num: int = 2) -> list[dict]:
    """Rows of two documents each."""
    random = np.random.default_rng(0)
    segments = np.repeat([[0] * 6 + [1] * (LENGTH - 6)], ROWS, axis=0).astype(np.int32)
    positions = np.concatenate([np.arange(6), np.arange(LENGTH - 6)]).astype(np.int32)
    return [
        {
            "tokens": random.integers(0, vocab_size, (ROWS, LENGTH)).astype(np.int32),
            "segment_ids": segments,
            "positions": np.broadcast_to(positions, segments.shape),
        }
        for _ in range(num)
    ]


@functools.cache
def recipe_of(family: str, mesh: tuple = ()):
    changes = dict(MIXED, num_layers=3) if family == "mixed" else dict(num_layers=2)
    model = dict(width=16, mlp_dim=24, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=260)
    if family == "gpt2":
        model["num_kv_heads"] = 4
    config = make_config(
        "llama3" if family == "mixed" else family, model=model | changes, mesh=dict(mesh),
        batch__size=ROWS, batch__sequence_length=LENGTH,
    )  # fmt: skip
    return make_recipe(config)


def random_params(recipe) -> dict:
    noise = np.random.default_rng(1)
    shapes = trees.named(recipe.loss.params)
    params = {name: 0.3 * noise.standard_normal(leaf.shape) for name, leaf in shapes.items()}
    params = {name: array.astype(np.float32) for name, array in params.items()}
    return jax.device_put(
        trees.unnamed(params, recipe.loss.params),
        jax.tree.map(lambda leaf: leaf.sharding, recipe.loss.params),
    )


def found_in(recipe, num: int = 2) -> dict:
    batches = [put_batch(recipe, batch) for batch in batches_of(257, num)]
    loss = recipe.loss
    found = calibration.statistics(loss.apply, random_params(recipe), batches, loss.execution)
    return jax.device_get(found)


def test_statistics_are_those_of_the_inputs_in_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    theirs = hf_models.make(transformers, "LlamaConfig", hf_models.TINY, tmp_path)
    inputs, names = {}, {
        "self_attn.q_proj": "attention/query", "self_attn.k_proj": "attention/key",
        "self_attn.v_proj": "attention/value", "self_attn.o_proj": "attention/out",
        "mlp.gate_proj": "mlp/gate", "mlp.up_proj": "mlp/up", "mlp.down_proj": "mlp/down",
    }  # fmt: skip
    for index, layer in enumerate(theirs.model.layers):
        for their, our in names.items():
            keep = lambda _, given, key=(our, index): inputs.update({key: given[0].numpy()})  # noqa: E731
            layer.get_submodule(their).register_forward_pre_hook(keep)
    tokens = hf_models.tokens_of()
    with torch.no_grad():
        theirs(torch.from_numpy(tokens).long())

    config, params = hf.load(tmp_path)
    mesh = sharding.make_mesh(dict.fromkeys(sharding.AXES, 1), devices=jax.devices()[:1])
    place = sharding.Placement(mesh, sharding.make_layout("ddp"))
    params = jax.device_put(params, jax.NamedSharding(mesh, jax.P()))
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    batch = {"tokens": tokens, "segment_ids": np.zeros_like(tokens), "positions": positions}
    execution = Execution(place, precision.POLICIES["fp32"])
    found = calibration.statistics(apply.Apply(config), params, [batch], execution)
    assert {name for name, _ in inputs} == {name.removeprefix("blocks/").removesuffix("/kernel")
                                            for name in found}  # fmt: skip
    for (name, layer), array in inputs.items():
        x = array.reshape(-1, array.shape[-1]).astype(np.float64)
        ours = jax.tree.map(lambda leaf, at=layer: leaf[at], found[f"blocks/{name}/kernel"])
        scale = np.abs(x.T @ x).max()
        np.testing.assert_allclose(ours.gram_II / scale, x.T @ x / scale, **SAME)
        np.testing.assert_allclose(ours.squares_I, (x**2).sum(0), rtol=1e-4)
        np.testing.assert_allclose(ours.mean_magnitude_I, np.abs(x).mean(0), rtol=1e-4)
        np.testing.assert_allclose(ours.amax_I, np.abs(x).max(0), rtol=1e-4)
        assert ours.tokens == len(x)


def test_statistics_are_the_same_on_a_mesh():
    mesh = (("fsdp", 2), ("sequence", 2), ("tensor", 2))
    expected, found = found_in(recipe_of("mixed")), found_in(recipe_of("mixed", mesh))
    assert len(found) == 7
    for name, one in found.items():
        for ours, whole in zip(one, expected[name], strict=True):
            scale = max(np.abs(whole).max(), 1)
            np.testing.assert_allclose(ours / scale, whole / scale, **SAME, err_msg=name)
    assert found["blocks/mlp/down/kernel"].gram_II.shape == (3, 24, 24)
    assert found["blocks/attention/out/kernel"].gram_II.shape == (3, 32, 32)


def test_statistics_of_batches_add_up():
    recipe = recipe_of("gpt2")
    once, twice = found_in(recipe, 1), found_in(recipe, 2)
    for name, one in once.items():
        assert (twice[name].tokens == 2 * one.tokens).all()
        assert (twice[name].amax_I >= one.amax_I).all()
        assert (twice[name].squares_I > one.squares_I).all()


def test_a_layer_is_calibrated_behind_layers_that_are_changed():
    recipe = recipe_of("mixed", (("fsdp", 2), ("tensor", 2)))
    loss, params = recipe.loss, random_params(recipe)
    batches = [put_batch(recipe, batch) for batch in batches_of(257)]
    run = functools.partial(
        calibration.layer_by_layer, loss.apply, batches=batches, execution=loss.execution
    )
    seen = []

    def halved(layer):
        seen.append(layer)
        return {name: 0.5 * leaf for name, leaf in layer.weights.items()}

    changed = run(params, change=halved)
    assert [layer.index for layer in seen] == [0, 1, 2]
    half = jax.tree.map(lambda leaf: 0.5 * leaf, params["blocks"])
    for name, leaf in trees.named(changed["blocks"]).items():
        np.testing.assert_array_equal(leaf, trees.named(half)[name], err_msg=name)
    assert jax.tree.map(lambda leaf: leaf.sharding.spec, changed) == jax.tree.map(
        lambda leaf: leaf.sharding.spec, params
    )
    # The last layer takes what a model takes there whose layers have all been halved before.
    expected = calibration.statistics(
        loss.apply, params | {"blocks": half}, batches, loss.execution
    )["blocks/attention/query/kernel"]
    ours = seen[2].statistics["attention/query/kernel"]
    scale = np.abs(expected.gram_II[2]).max()
    np.testing.assert_allclose(ours.gram_II / scale, expected.gram_II[2] / scale, **SAME)


def test_of_the_backward_pass_the_sums_are_left():
    """A layer that is observed takes no more products than itself and the Gram matrices."""
    recipe = recipe_of("llama3")
    apply, execution = recipe.loss.apply, recipe.loss.execution
    params = random_params(recipe)
    of_layer = calibration._Pass.of(apply, "global", execution)
    with jax.set_mesh(recipe.mesh):
        begin = jax.jit(functools.partial(calibration._begun, apply, execution))
        x_BTD, rows = begin(params, put_batch(recipe, batches_of(257)[0]))
        weights = jax.tree.map(lambda leaf: leaf[:1], params["blocks"])
        named = calibration.by_name(weights)
        sizes = {name: 32 if "out" in name else 24 if "down" in name else 16
                 for name in calibration.products(named)}  # fmt: skip
        empty = {name: observed.empty(size) for name, size in sizes.items()}
        plain = of_layer.plain.lower(weights, x_BTD, rows).compile()
        both = of_layer.observed.lower(weights, x_BTD, rows, empty).compile()
        grams = sum(2 * ROWS * LENGTH * size**2 for size in sizes.values())
    alone, with_sums = (one.as_text().count(" dot(") for one in (plain, both))
    assert 0 < alone < with_sums <= alone + len(sizes)
    alone, with_sums = (one.cost_analysis()["flops"] for one in (plain, both))
    assert alone + 0.9 * grams < with_sums < 1.05 * (alone + grams)  # and what is elementwise


def test_experts_are_refused():
    recipe = make_recipe(make_config("mixtral", batch__size=8, batch__sequence_length=16))
    with pytest.raises(ValueError, match=r"model\.num_experts=.*dense model"):
        calibration.statistics(recipe.loss.apply, {}, [{}], recipe.loss.execution)

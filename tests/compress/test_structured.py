"""A smaller model computes what the larger one does without the units that were removed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import runs

from llmx.compress import structured
from llmx.compress.structured import StructuredOptions
from llmx.model import apply, costs, families
from llmx.sharding import trees

SAME = 1e-5  # of fp32 logits: sums have fewer terms
SIZES = dict(
    vocab_size=260, vocab_multiple=4, width=16, num_layers=3, num_heads=4, num_kv_heads=2,
    head_dim=8, mlp_dim=24,
)  # fmt: skip
# By family: what is changed of it.
FAMILIES = {
    "llama3": {}, "gpt2": dict(num_kv_heads=4, max_positions=32), "qwen3": {}, "gemma2": {},
}  # fmt: skip


def model_of(family: str) -> families.ModelConfig:
    return families.preset(family, **SIZES | FAMILIES[family])


@functools.cache
def made_params(family: str):
    generator = np.random.default_rng(3)
    shapes, _ = apply.abstract_parameters(model_of(family))
    draw = lambda leaf: (0.3 * generator.standard_normal(leaf.shape)).astype(np.float32)  # noqa: E731
    return jax.tree.map(draw, shapes)


def logits(model, params):
    recipe = runs.make_recipe(
        runs.make_config(model, batch__size=2, batch__sequence_length=16)
    )  # fmt: skip
    generator = np.random.default_rng(0)
    batch = dict(
        tokens=generator.integers(0, 64, (2, 16)).astype(np.int32),
        segment_ids=np.zeros((2, 16), np.int32),
        positions=np.tile(np.arange(16, dtype=np.int32), (2, 1)),
    )
    with jax.set_mesh(recipe.mesh):
        params = jax.device_put(params, jax.tree.map(lambda a: a.sharding, recipe.loss.params))
        return np.asarray(jax.jit(functools.partial(runs.logits, recipe))(params, batch))


def without_effect(model, params, *, groups, columns, layer):
    """Parameters with units whose weights are all zero: of each layer a group of heads and MLP
    columns, and a layer that adds nothing."""
    axes = structured._axes(model)
    G, named = model.num_heads // model.num_kv_heads, dict(trees.named(params["blocks"]))
    named = {name: leaf.copy() for name, leaf in named.items()}
    for name, leaf in named.items():
        for row in range(model.num_layers):
            for dim, axis in enumerate(axes[name]):
                at = {
                    "kv_heads": [groups[row]], "mlp": columns[row],
                    "heads": range(groups[row] * G, groups[row] * G + G),
                }.get(axis)  # fmt: skip
                if at is not None:
                    index = [row] + [slice(None)] * (leaf.ndim - 1)
                    index[dim] = list(at)
                    leaf[tuple(index)] = 0
        last = name.rsplit("/", 2)[-2:]
        if last[0] in ("out", "down"):  # kernel and bias
            leaf[layer] = 0
    return params | {"blocks": trees.unnamed(named, params["blocks"])}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_has_no_effect_is_removed(family):
    model = model_of(family)
    columns = [(0, 5, 23), (7, 8, 9), (1, 2, 20)]
    params = without_effect(
        model, made_params(family), groups=[1, 0, 1], columns=columns, layer=1
    )  # fmt: skip
    scores = structured.magnitude_scores(model, params)
    # Its norms' scales keep a layer that adds nothing from having the least.
    scores = scores._replace(layers_L=jnp.array([3.0, 1.0, 2.0]))
    options = StructuredOptions(
        num_kv_heads=model.num_kv_heads - 1, mlp_dim=model.mlp_dim - 3, num_layers=2
    )
    smaller, new, kept = structured.pruned(model, params, options, scores)
    for row in (0, 2):
        assert set(range(24)) - set(kept["mlp"][row]) == set(columns[row])
    assert list(kept["layers"]) == [0, 2]
    assert smaller.num_kv_heads == model.num_kv_heads - 1 and smaller.num_layers == 2
    assert smaller.layer_kinds == (model.layer_kinds[0], model.layer_kinds[2])
    shapes, _ = apply.abstract_parameters(smaller)
    assert jax.tree.map(lambda a: a.shape, shapes) == jax.tree.map(lambda a: a.shape, new)
    wanted, found = logits(model, params), logits(smaller, new)
    assert np.abs(found - wanted).max() <= SAME * np.abs(wanted).max()
    flops = [costs.training_flops_per_token(m, sequence_length=16) for m in (smaller, model)]
    assert flops[0] < 0.8 * flops[1]


def test_heads_of_each_group():
    model = model_of("llama3")
    params = made_params("llama3")
    scores = structured.magnitude_scores(model, params)
    smaller, new, kept = structured.pruned(
        model, params, StructuredOptions(heads_of_group=1), scores
    )  # fmt: skip
    assert (smaller.num_heads, smaller.num_kv_heads) == (2, 2)
    query, out = (params["blocks"]["attention"][name]["kernel"] for name in ("query", "out"))
    for layer in range(3):
        sizes = np.square(query[layer]).sum((0, 2)) + np.square(out[layer]).sum((1, 2))
        wanted = [group * 2 + sizes[group * 2 : group * 2 + 2].argmax() for group in range(2)]
        assert list(kept["heads"][layer]) == wanted
        of_new = new["blocks"]["attention"]["query"]["kernel"][layer]
        np.testing.assert_array_equal(of_new, query[layer][:, wanted])


def test_taylor_scores():
    """Of each batch (sum of w g)^2 over a unit's weights, by plain loops."""
    model, params = model_of("llama3"), made_params("llama3")
    generator = np.random.default_rng(5)
    draw = lambda leaf: generator.standard_normal(leaf.shape).astype(np.float32)  # noqa: E731
    gradients = [jax.tree.map(draw, params) for _ in range(2)]
    scores = structured.taylor_scores(model, params, lambda i: gradients[i], range(2))
    columns, groups, layers = np.zeros((3, 24)), np.zeros((3, 2)), np.zeros(3)
    for gradient in gradients:
        for layer in range(3):
            w, g = (jax.tree.map(lambda a: a[layer].astype("f8"), t["blocks"])  # noqa: B023
                    for t in (params, gradient))  # fmt: skip
            both = jax.tree.map(np.multiply, w, g)
            mlp, attention = both["mlp"], both["attention"]
            for f in range(24):
                term = sum(mlp[name]["kernel"][:, f].sum() for name in ("gate", "up"))
                columns[layer, f] += (term + mlp["down"]["kernel"][f].sum()) ** 2
            for k in range(2):
                term = sum(attention[name]["kernel"][:, k].sum() for name in ("key", "value"))
                heads = slice(2 * k, 2 * k + 2)
                term += attention["query"]["kernel"][:, heads].sum()
                groups[layer, k] += (term + attention["out"]["kernel"][heads].sum()) ** 2
            layers[layer] += sum(leaf.sum() for leaf in jax.tree.leaves(both)) ** 2
    np.testing.assert_allclose(scores.columns_LF, columns, rtol=1e-3)
    np.testing.assert_allclose(scores.groups_LK, groups, rtol=1e-3)
    np.testing.assert_allclose(scores.layers_L, layers, rtol=1e-3)


def test_problems():
    model = model_of("llama3")
    of = lambda **keys: list(structured.problems(StructuredOptions(**keys), model))  # noqa: E731
    assert of(mlp_dim=12) == of(num_layers=3) == []
    assert "nothing is smaller" in of()[0]
    assert of(mlp_dim=25) == ["mlp_dim=25 must be at least 1 and at most the model's 24, or 0 = 24"]
    assert "dense models" in next(structured.problems(
        StructuredOptions(mlp_dim=1), families.preset("mixtral", vocab_size=64)))  # fmt: skip
    with pytest.raises(ValueError, match="num_kv_heads=3 must be"):
        structured.pruned(model, {}, StructuredOptions(num_kv_heads=3), None)

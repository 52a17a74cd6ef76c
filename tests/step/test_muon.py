"""Muon on meshes: each matrix is orthogonalised whole, and layers are divided among devices."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from optax import contrib
from support import runs

from llmx import sharding
from llmx.step import muon, optimizers

AXES = {
    "blocks": {
        "up": ("layers", "embed", "mlp"),
        "out": ("layers", "heads", "head_dim", "embed"),
        "gate": ("layers", "experts", "embed", "mlp"),
        "scale": ("layers", "norm"),
    },
    "embedding": ("vocab", "embed"),
}
MESHES = {
    "fsdp": ({"fsdp": 4}, {"up": (None, "fsdp"), "out": (None, None, None, "fsdp")}),
    "tensor": (
        {"fsdp": 2, "tensor": 4},
        {"up": (None, "fsdp", "tensor"), "out": (None, "tensor", None, "fsdp")},
    ),
    "replicas": (
        {"data": 2, "fsdp": 2, "tensor": 2},
        {"up": (None, ("data", "fsdp"), "tensor"), "out": (None, "tensor", None, ("data", "fsdp"))},
    ),
    "stages": (
        {"stage": 2, "fsdp": 4},
        {"up": ("stage", "fsdp"), "out": ("stage", None, None, "fsdp")},
    ),
    "experts": (
        {"fsdp": 2, "expert": 4},
        {
            "up": (None, ("fsdp", "expert")),
            "out": (None, None, None, ("fsdp", "expert")),
            "gate": (None, "expert", "fsdp"),
        },
    ),
    "experts alone": ({"expert": 4}, {"up": (), "out": (), "gate": (None, "expert")}),
    "whole": ({"data": 4}, {"up": (), "out": ()}),
}


def parameters(layers: int, seed: int = 0) -> dict:
    keys = iter(jax.random.split(jax.random.key(seed), 5))
    normal = lambda *shape: jax.random.normal(next(keys), shape)  # noqa: E731
    blocks = {
        "up": normal(layers, 16, 24), "out": normal(layers, 4, 6, 16),
        "gate": normal(layers, 4, 16, 8),
    }  # fmt: skip
    return {
        "blocks": blocks | {"scale": normal(layers, 16)},
        "embedding": normal(40, 16),
    }


def splits_of(name: str) -> dict:
    sizes, specs = MESHES[name]
    devices = jax.devices()[: math.prod(sizes.values())]
    mesh = sharding.make_mesh(sizes, devices=devices, axis_type=AxisType.Auto)
    to = lambda *spec: NamedSharding(mesh, PartitionSpec(*spec))  # noqa: E731
    blocks = {"gate": to()} | {leaf: to(*spec) for leaf, spec in specs.items()}
    return {"blocks": blocks | {"scale": to()}, "embedding": to()}


def optimizer_of(splits=None):
    config = optimizers.OptimizerConfig(
        name="muon", learning_rate=0.1, schedule="constant", warmup_steps=0, weight_decay=0.5
    )
    return optimizers.make(config, axes=AXES, total_steps=10, splits=splits).whole


def trained(optimizer, params, layers: int, to=None):
    """After three updates, with the text of the compiled update."""

    def update(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    place = functools.partial(jax.device_put, device=to) if to else lambda tree: tree
    step = jax.jit(update, out_shardings=(to, None) if to else None)
    params, state = place(params), optimizer.init(place(params))
    for seed in range(1, 4):
        params, state = step(params, state, place(parameters(layers, seed)))
    text = step.lower(params, state, place(parameters(layers, 9))).compile().as_text()
    return params, state, text


@pytest.mark.parametrize("layers", [2, 6, 8])
@pytest.mark.parametrize("name", MESHES)
def test_split_matrices_are_updated_as_whole_ones(name, layers):
    """By optax's Muon, on one device; and nothing is gathered."""
    plain = contrib.muon(
        optax.constant_schedule(0.1), beta=0.95, weight_decay=0.5, adam_b1=0.9, adam_b2=0.95,
        adam_weight_decay=0.0,
        muon_weight_dimension_numbers={
            "blocks": {
                "up": contrib.MuonDimensionNumbers((1,), (2,)),
                "out": contrib.MuonDimensionNumbers((1, 2), (3,)), "scale": None,
                "gate": contrib.MuonDimensionNumbers((2,), (3,)),
            },
            "embedding": None,
        }, consistent_rms=0.2,
    )  # fmt: skip
    want, of_plain, _ = trained(plain, parameters(layers), layers)
    splits = splits_of(name)
    got, state, text = trained(optimizer_of(splits), parameters(layers), layers, splits)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), got, want)
    # Checkpoints of optax's Muon are checkpoints of ours.
    assert jax.tree.structure(state) == jax.tree.structure(of_plain)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), state, of_plain)
    one_each = name == "stages" and layers == 2
    split = name not in ("whole", "experts alone")
    assert ("all-to-all" in text) == (split and not one_each)
    assert ("all-gather" in text) == one_each
    assert "all-reduce" not in text


@pytest.mark.parametrize("layers", [1, 2, 3, 5, 8, 9])
def test_a_device_has_whole_matrices_of_its_own(layers):
    """As many as it takes to give every device the same number, of zeros if there are too few."""
    splits = splits_of("tensor")["blocks"]["up"]
    seen = []

    def function(x):
        seen.append(x.shape)
        return x + jnp.sum(x * x, axis=(1, 2), keepdims=True)

    x = parameters(layers)["blocks"]["up"]
    found = jax.jit(lambda x: muon.on_whole_matrices(function, x, splits, (1, 2)))(
        jax.device_put(x, splits)
    )
    want = x + jnp.sum(x * x, axis=(1, 2), keepdims=True)
    np.testing.assert_allclose(found, want, rtol=1e-6)
    assert seen == [(1 if layers == 1 else -(-layers // 8), 16, 24)]


def test_what_is_not_split_is_left_to_the_compiler():
    x = parameters(3)["blocks"]["up"]
    whole = splits_of("whole")["blocks"]["up"]
    for split in (None, whole):
        program = functools.partial(
            muon.on_whole_matrices, jnp.sin, split=split, dims=(1, 2)
        )  # fmt: skip
        assert not re.search("manual|shard_map", jax.jit(program).lower(x).as_text())


def test_the_step_exchanges_matrices():
    """The update as accelerators have it, of a recipe, under explicit axes."""
    for mesh in ({"fsdp": 4}, {"fsdp": 2, "tensor": 2}):
        config = runs.make_config(mesh=mesh, optimizer__name="muon", sharding__layout="zero3")
        recipe = runs.make_recipe(config)
        with jax.set_mesh(recipe.mesh):
            state = recipe.init(0)
            gradients = jax.tree.map(
                jnp.ones_like, jax.device_put(state.params, recipe.loss.updates)
            )
            text = runs.make_update(recipe, config).lower(state, gradients).compile().as_text()
        assert "all-to-all" in text
        assert text.count("all-gather") == 0

"""A remat policy keeps for the backward pass what its name says, and changes no number."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from llmx import sharding
from llmx.model import apply as apply_lib
from llmx.model import families, precision, remat
from llmx.model.execution import Execution

# The same operations, fused by the compiler in another order.
TOLERANCE = 1e-5

# Sizes that tell each intermediate value by its shape alone.
INPUT, QUERY, ATTENTION, MLP, OUT = 3, 5, 7, 11, 13


def toy_layer(x, weights):
    """Products of every name, each followed by something that needs its result to differentiate."""
    product = lambda x, name: checkpoint_name(x @ weights[name], remat.PRODUCT)  # noqa: E731
    query = checkpoint_name(product(x, "query"), remat.QUERY_KEY_VALUE)
    scores = jnp.einsum("bq,bk->bqk", jnp.sin(query), query)
    attended = jnp.einsum("bqk,ka->ba", jnp.exp(scores), weights["attention"])
    attended = checkpoint_name(attended, remat.PRODUCT)
    attended = checkpoint_name(jnp.sin(attended), remat.ATTENTION)
    hidden = checkpoint_name(product(jnp.cos(attended), "mlp"), remat.MLP)
    return jnp.sin(product(jnp.tanh(hidden), "out"))


def toy_arrays():
    keys = iter(jax.random.split(jax.random.key(0), 5))
    sizes = dict(query=(INPUT, QUERY), attention=(QUERY, ATTENTION), mlp=(ATTENTION, MLP))
    sizes["out"] = (MLP, OUT)
    weights = {name: jax.random.normal(next(keys), shape) for name, shape in sizes.items()}
    return jax.random.normal(next(keys), (2, INPUT)), weights


def kept(policy: str) -> set[tuple[int, ...]]:
    """Shapes of the intermediate values that the backward pass of the toy layer takes."""
    x, weights = toy_arrays()
    _, backward = jax.vjp(remat.checkpointed(toy_layer, policy), x, weights)
    inputs = {array.shape for array in jax.tree.leaves((x, weights))}
    return {array.shape for array in jax.tree.leaves(backward)} - inputs


def test_full_keeps_inputs_only():
    assert kept("full") == set()


def test_names_keeps_what_attention_takes_and_gives():
    assert kept("names") == {(2, QUERY), (2, ATTENTION)}


def test_dots_keeps_products_with_weights_but_no_scores():
    assert kept("dots") == {(2, QUERY), (2, ATTENTION), (2, MLP), (2, OUT)}


def test_none_keeps_everything():
    everything = {(2, QUERY), (2, QUERY, QUERY), (2, ATTENTION), (2, MLP), (2, OUT)}
    assert kept("none") == everything


@pytest.mark.parametrize("policy", remat.POLICIES)
def test_toy_gradients_are_the_same(policy):
    x, weights = toy_arrays()
    loss = lambda function, weights: function(x, weights).sum()  # noqa: E731
    got = jax.grad(functools.partial(loss, remat.checkpointed(toy_layer, policy)))(weights)
    want = jax.grad(functools.partial(loss, toy_layer))(weights)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=TOLERANCE), got, want)


def test_unknown_policy():
    with pytest.raises(ValueError, match=r"remat 'some' is unknown: use one of none, full, dots"):
        remat.checkpointed(toy_layer, "some")


# What a decoder keeps per layer, by shape: L = 2 layers, B = 3, T = 5, N = 4, K = 2, H = 6, F = 17.
L, B, T, N, K, H, D, F = 2, 3, 5, 4, 2, 6, 24, 17
QUERIES, KEYS, HIDDEN, STREAM = (N, H), (K, H), (F,), (D,)
EXPECTED = {
    "full": {STREAM: 1},  # the input of each layer
    "names": {STREAM: 1, QUERIES: 2, KEYS: 2},  # and query and attention, key and value
    "dots": {STREAM: 2, QUERIES: 1, KEYS: 2, HIDDEN: 2},  # what a weight gave and is needed again
}


def decoder_residuals(policy: str) -> list[tuple[int, ...]]:
    """Shapes, per layer and token, of what the scan over layers keeps for the backward pass."""
    config = families.preset(
        "llama3", vocab_size=32, vocab_multiple=32, width=D, num_layers=L, num_heads=N,
        num_kv_heads=K, head_dim=H, mlp_dim=F,
    )  # fmt: skip
    mesh = sharding.make_mesh({"data": 1}, devices=jax.devices()[:1])
    place = sharding.Placement(mesh, sharding.make_layout("ddp"))
    execution = Execution(place=place, policy=precision.POLICIES["fp32"], remat=policy)
    shapes, _ = apply_lib.abstract_parameters(config)
    apply = apply_lib.Apply(config)
    tokens = jax.ShapeDtypeStruct((B, T), jnp.int32)
    batch = dict.fromkeys(("tokens", "targets", "segment_ids", "positions"), tokens)

    def backward(params, batch):
        return jax.vjp(lambda params: apply.losses(params, batch, execution), params)[1]

    with jax.set_mesh(mesh):
        leaves = jax.tree.leaves(jax.eval_shape(backward, shapes, batch))
    return [leaf.shape[3:] for leaf in leaves if leaf.shape[:3] == (L, B, T)]


@pytest.mark.parametrize("policy", EXPECTED)
def test_the_decoder_keeps_what_the_policy_names(policy):
    found = decoder_residuals(policy)
    assert {shape: found.count(shape) for shape in set(found)} == EXPECTED[policy]


def test_the_policies_are_ordered_by_what_they_keep():
    size = {
        policy: sum(int(np.prod(shape)) for shape in decoder_residuals(policy))
        for policy in remat.POLICIES
    }
    assert size["full"] < size["names"] < size["none"]
    assert size["full"] < size["dots"] < size["none"]

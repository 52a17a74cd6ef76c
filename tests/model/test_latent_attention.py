"""Latent attention equals loops in float64, in value and gradient, with and without query latents;
a config that it cannot be is refused."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import runs

from llmx import sharding
from llmx.config import ConfigError
from llmx.model import apply, decoder, families, precision, rope
from llmx.model.execution import Execution

# fp32 against float64: sums of up to 32 products of numbers near 1; of the largest number.
VALUE, GRADIENT = 3e-6, 1e-5
B, T, D, N, H, P, V, R, Q = 2, 9, 16, 3, 10, 4, 6, 8, 5

SHAPE = dict(
    vocab_size=61, width=D, num_heads=N, num_kv_heads=N, head_dim=H, rope_dim=P, value_dim=V,
    kv_latent=R, query_latent=Q, rope_scaling="yarn", rope_factor=4.0, rope_old_context=4,
    rope_mscale=1.0, rope_mscale_all=0.5,
)  # fmt: skip
MODELS = {
    "latent": families.preset("deepseek_v3", **SHAPE),
    "without_query_latent": families.preset("deepseek_v3", **SHAPE | dict(query_latent=0)),
    "halves": families.preset("deepseek_v3", **SHAPE | dict(rope_interleaved=False)),
}
SEGMENTS = np.array([[0] * 4 + [1] * 5, [0] * T], np.int32)
POSITIONS = np.array([[*range(4), *range(5)], [*range(T)]], np.int32)


@functools.cache
def arrays(name: str):
    """x, the attention's parameters, and a gradient of its output; float64."""
    rng = np.random.default_rng(0)
    shapes = apply.abstract_parameters(MODELS[name])[0]["blocks"]["attention"]
    params = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape[1:]) / 2, shapes)
    return rng.standard_normal((B, T, D)), params, rng.standard_normal((B, T, D))


def looped(model: families.ModelConfig, x_BTD, params) -> np.ndarray:
    """Token by token and head by head, in float64, from the paper's equations."""

    def normed(latent, scale):
        return latent / np.sqrt((latent**2).mean() + model.norm_eps) * scale

    def turned(pairs, position):
        """P numbers, as complex ones."""
        frequencies = rope.rope_frequencies(model, families.GLOBAL).astype(np.float64)
        if model.rope_interleaved:
            complex_numbers = pairs[0::2] + 1j * pairs[1::2]
        else:
            complex_numbers = pairs[: P // 2] + 1j * pairs[P // 2 :]
        amplitude = (0.1 * 1.0 * math.log(4) + 1) / (0.1 * 0.5 * math.log(4) + 1)
        return amplitude * complex_numbers * np.exp(1j * np.float32(position) * frequencies)

    def of_token(x_D, position):
        source = x_D
        if model.query_latent:
            source = normed(x_D @ params["query_down"]["kernel"], params["query_norm"]["scale"])
        down = x_D @ params["down"]["kernel"]
        latent = normed(down[:R], params["norm"]["scale"])
        shared = turned(down[R:], position)
        heads = []
        for n in range(N):
            query = source @ params["query"]["kernel"][:, n]
            key_and_value = latent @ params["up"]["kernel"][:, n]
            heads.append(
                (query[: H - P], turned(query[H - P :], position), key_and_value[: H - P], shared,
                 key_and_value[H - P :])
            )  # fmt: skip
        return heads

    scale = (0.1 * 0.5 * math.log(4) + 1) ** 2 / math.sqrt(H)
    out = np.zeros((B, T, D))
    for b in range(B):
        tokens = [of_token(x_BTD[b, t], POSITIONS[b, t]) for t in range(T)]
        for t in range(T):
            seen = [s for s in range(t + 1) if SEGMENTS[b, s] == SEGMENTS[b, t]]
            for n in range(N):
                query, query_turned, *_ = tokens[t][n]
                scores = []
                for s in seen:
                    _, _, key, key_turned, _ = tokens[s][n]
                    scores.append(query @ key + (query_turned * key_turned.conj()).sum().real)
                weights = np.exp(scale * (np.array(scores) - max(scores)))
                mixed = sum(w * tokens[s][n][4] for w, s in zip(weights, seen, strict=True))
                out[b, t] += mixed / weights.sum() @ params["out"]["kernel"][n]
    return out


@functools.cache
def found(name: str):
    """(output, gradients of x and parameters) of the module."""
    model = MODELS[name]
    mesh = sharding.make_mesh(dict.fromkeys(sharding.AXES, 1), devices=jax.devices()[:1])
    place = sharding.Placement(mesh, sharding.make_layout("ddp"))
    execution = Execution(place, precision.POLICIES["fp32"])
    definition, _ = nnx.split(nnx.eval_shape(lambda: decoder.LatentAttention(model, nnx.Rngs(0))))
    x_BTD, params, gradient = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), arrays(name))

    def attention(x_BTD, params):
        mask = apply.self_mask(jnp.asarray(SEGMENTS), jnp.asarray(POSITIONS), execution)
        rotation = apply.Apply(model).rotations(jnp.asarray(POSITIONS))[families.GLOBAL]
        module = nnx.merge(definition, params)
        return module(x_BTD, rotation, mask, 0, execution, None, None)[0]

    def value(x_BTD, params):
        out_BTD = attention(x_BTD, params)
        return jnp.sum(out_BTD * gradient), out_BTD

    with jax.set_mesh(mesh):
        gradients, out = jax.jit(jax.grad(value, argnums=(0, 1), has_aux=True))(x_BTD, params)
    return np.asarray(out), jax.device_get(gradients)


@pytest.mark.parametrize("name", MODELS)
def test_value_is_that_of_loops(name):
    x_BTD, params, _ = arrays(name)
    wanted = looped(MODELS[name], x_BTD, params)
    np.testing.assert_allclose(found(name)[0], wanted, rtol=0, atol=VALUE * np.abs(wanted).max())


@pytest.mark.parametrize("name", MODELS)
def test_gradient_is_that_of_loops(name):
    """Of x and of each parameter, along one random direction: central differences in float64."""
    x_BTD, params, gradient = arrays(name)
    rng, step = np.random.default_rng(1), 1e-5
    leaves, tree = jax.tree.flatten((x_BTD, params))
    value = lambda leaves: np.sum(  # noqa: E731
        looped(MODELS[name], *jax.tree.unflatten(tree, leaves)) * gradient
    )
    for number, got in enumerate(jax.tree.leaves(found(name)[1])):
        direction = rng.standard_normal(got.shape)
        moved = [
            [leaf + sign * step * direction if n == number else leaf
             for n, leaf in enumerate(leaves)]
            for sign in (1, -1)
        ]  # fmt: skip
        wanted = (value(moved[0]) - value(moved[1])) / (2 * step)
        size = np.linalg.norm(got) * np.linalg.norm(direction)
        assert abs(np.sum(got * direction) - wanted) < GRADIENT * size, number


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(rope_dim=3), r"rope_dim=3 must be even, above 0 and below model.head_dim=24"),
        (dict(rope_dim=24), r"rope_dim=24 must be even"),
        (dict(value_dim=0), r"value_dim=0 with model.kv_latent=32: set it to the width"),
        (dict(num_kv_heads=2), r"num_kv_heads=2 with model.kv_latent=32.*use num_kv_heads=4"),
        (dict(qk_norm=True), r"qk_norm=True with model.kv_latent=32"),
        (dict(first_dense=3), r"first_dense=3 leaves none of model.num_layers=3.*at most 2"),
        (
            dict(first_dense=1, layer_pattern=("local", "global"), window=4),
            r"first_dense=1 with model.layer_pattern.*use one kind",
        ),
    ],
)
def test_what_cannot_be_is_refused(changes, words):
    model = families.preset("deepseek_v3", vocab_size=61, **changes)
    with pytest.raises(ConfigError, match=words):
        runs.make_config(model)


def test_yarn_frequencies_of_deepseek_v3():
    """Kept from 32 turns in 4,096 positions on, divided by 40 below one, blended between by number:
    pairs 10 and 23 of 32, by DeepSeek's own rule (arXiv 2309.00071)."""
    model = families.preset("deepseek_v3_671b")
    plain = dataclasses.replace(model, rope_scaling="none")
    got, whole = (rope.rope_frequencies(m, families.GLOBAL) for m in (model, plain))
    ratio = got / whole
    np.testing.assert_allclose(ratio[:11], 1, rtol=1e-6)
    np.testing.assert_allclose(ratio[23:], 1 / 40, rtol=1e-6)
    share = 1 - (15 - 10) / (23 - 10)
    np.testing.assert_allclose(ratio[15], share + (1 - share) / 40, rtol=1e-6)
    assert rope.amplitude(model, families.GLOBAL) == 1
    assert model.score_scale == pytest.approx((0.1 * math.log(40) + 1) ** 2 / math.sqrt(192))

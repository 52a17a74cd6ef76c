"""Packed weights multiply as the numbers that they stand for, on every mesh."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import products

from llmx import sharding
from llmx.model import dot, packed, precision
from llmx.model.packed import Packed, PackedConfig

# Sums of the same products in another order, in fp32.
SAME = dict(rtol=1e-5, atol=2e-5)
B, T, D, N, H, F = 8, 4, 32, 4, 8, 64
PRODUCTS = products.table(B=B, T=T, D=D, N=N, H=H, F=F)
CONFIGS = [
    PackedConfig("int4", 16, True),
    PackedConfig("int8", 0, True),
    PackedConfig("int4", 4, False),
    PackedConfig("int8", 16, False),
]
MESHES = {"fsdp2 x tensor2": {"fsdp": 2, "tensor": 2}, "one": {}}


def a_weight(shape, outputs: int, config: PackedConfig):
    """The weight packed, and the numbers that it stands for, by plain NumPy."""
    random = np.random.default_rng(0)
    lead, made = math.prod(shape[: len(shape) - outputs]), shape[len(shape) - outputs :]
    O = math.prod(made)  # noqa: E741
    group = config.group or lead
    codes = random.integers(0, config.levels, (lead, O))
    scale = jnp.asarray(random.uniform(0.5, 2, (lead // group, O)), packed.SCALE)
    zero = random.integers(0, config.levels, scale.shape)
    taken = config.middle if config.symmetric else np.repeat(zero, group, axis=0)
    numbers = (codes - taken) * np.repeat(np.asarray(scale, np.float32), group, axis=0)
    zero = None if config.symmetric else jnp.asarray(zero)
    weight = packed.pack(jnp.asarray(codes), scale, zero, config, shape, outputs)
    for one, other in zip(packed.codes_of(weight), (codes, scale, zero), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            np.testing.assert_array_equal(one, np.asarray(other, one.dtype))
    return weight, numbers.reshape(shape).astype(np.float32)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("expression", PRODUCTS)
def test_products_are_those_of_the_numbers(expression, config, mesh):
    (x_shape, x_axes), (shape, axes), out_axes = PRODUCTS[expression]
    outputs = len(shape) - (2 if expression.startswith("BTNH") else 1)
    if config.group == 16 and H < 16 and expression.startswith("BTNH"):
        assert packed._groups((N, H), 16) == (2, 1)  # a group has two heads
    weight, numbers = a_weight(shape, outputs, config)
    layout = sharding.make_layout("zero3")
    sizes = MESHES[mesh]
    devices = jax.devices()[: math.prod(sizes.values())]
    place = sharding.Placement(sharding.make_mesh(sizes or {"fsdp": 1}, devices=devices), layout)

    def put(array, axes, table):
        to = sharding.layouts.spec(axes, table, place.mesh, shape=array.shape)
        return jax.device_put(array, jax.NamedSharding(place.mesh, to))

    of_scale = (*[None] * (len(shape) - outputs), *axes[len(shape) - outputs :])
    on_mesh = Packed(
        put(weight.codes, axes, layout.parameters), put(weight.scale, of_scale, layout.parameters),
        None if config.symmetric else put(weight.zero, of_scale, layout.parameters), outputs,
    )  # fmt: skip
    random = np.random.default_rng(1)
    x = random.standard_normal(x_shape).astype(np.float32)
    left, right = expression.split(",")
    right, out = right.split("->")
    expected = np.einsum(expression, x, numbers)
    gradient = random.standard_normal(expected.shape).astype(np.float32)

    def product(x, weight):
        to = place.activation(out_axes)
        return dot.dot(expression, x, weight, out=to, policy=precision.POLICIES["fp32"])

    def both(x, weight, gradient):
        y, pull = jax.vjp(lambda x: product(x, weight), x)
        return y, pull(gradient)[0]

    with jax.set_mesh(place.mesh):
        y, of_x = jax.jit(both)(
            put(x, x_axes, layout.activations), on_mesh,
            put(gradient, out_axes, layout.activations),
        )  # fmt: skip
    scale = np.abs(expected).max()
    np.testing.assert_allclose(y / scale, expected / scale, **SAME)
    expected = np.einsum(f"{out},{right}->{left}", gradient, numbers)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(of_x / scale, expected / scale, **SAME)


def test_bytes_are_those_of_the_bits():
    for config, share in (
        (PackedConfig("int8", 0, True), 1 / 4),
        (PackedConfig("int4", 16, True), 1 / 8 + 2 / (4 * 16)),
    ):
        weight, numbers = a_weight((64, 4, 8), 2, config)
        size = weight.codes.nbytes + (weight.scale.nbytes if config.group else 0)
        assert size == share * numbers.nbytes


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            PackedConfig("int8", 48),
            "packed.group=48 does not divide the inputs of blocks/.*: use a",
        ),
        (
            PackedConfig("int4", 0),
            "packed.format='int4' stores pairs, and blocks/mlp/down/kernel has 33",
        ),
    ],
)
def test_what_does_not_divide_is_refused(config, words):
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)  # noqa: E731
    shapes = {"blocks": {"attention": {"out": {"kernel": shape(2, 4, 8, 32)}},
                         "mlp": {"down": {"kernel": shape(2, 33, 32)}}}}  # fmt: skip
    found = packed.problems(config, shapes)
    assert found
    assert re.search(words, "\n".join(found)), found

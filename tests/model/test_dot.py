"""`dot.dot` equals an einsum, and communicates in the dtypes and the order that it promises."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from support import products

from llmx import sharding
from llmx.model import dot, precision

# Sums of the same products in another order, in fp32.
FP32_TOLERANCE = 1e-5
# The same in bf16, which has 8 bits: relative to the largest element.
BF16_TOLERANCE = 2e-2

B, T, D, N, H, F = 8, 4, 16, 4, 4, 24
# By expression: shapes and logical axes of x, of the weight, and axes of the result.
PRODUCTS = products.table(B=B, T=T, D=D, N=N, H=H, F=F) | {
    "BTD,VD->BTV": (
        ((B, T, D), (*products.BATCH, "embed")),
        ((F, D), ("vocab", "embed")),
        (*products.BATCH, "vocab"),
    ),
}
PLACES = {
    "ddp, data 8": ("ddp", {"data": 8}),
    "zero3, data 8": ("zero3", {"data": 8}),
    "zero3, fsdp 4 x tensor 2": ("zero3", {"fsdp": 4, "tensor": 2}),
    "hsdp, data 2 x fsdp 2 x sequence 2": ("hsdp", {"data": 2, "fsdp": 2, "sequence": 2}),
}


def make_place(name: str) -> sharding.Placement:
    layout, sizes = PLACES[name]
    return sharding.Placement(sharding.make_mesh(sizes), sharding.make_layout(layout))


def place_arrays(place, expression, dtype):
    """x, weight and a weighting of the result, as numpy arrays and as arrays on the mesh."""
    (x_shape, x_axes), (w_shape, w_axes), out_axes = PRODUCTS[expression]
    generator = np.random.default_rng(0)
    x = generator.normal(size=x_shape).astype(np.float32)
    weight = generator.normal(size=w_shape).astype(np.float32)
    out_shape = np.einsum(expression, x, weight).shape
    pull = generator.normal(size=out_shape).astype(np.float32)
    put = lambda array, to: jax.device_put(array, NamedSharding(place.mesh, to))  # noqa: E731
    parameters = place.layout.parameters
    placed = (
        put(x.astype(dtype), place.activation(x_axes)),
        put(weight, sharding.spec(w_axes, parameters, place.mesh, shape=w_shape)),
        put(pull, place.activation(out_axes)),
    )
    return (x, weight, pull), placed


def gradient_function(place, expression, policy):
    """(x, weight, pull) -> the product and the gradients of x and weight for `pull`."""
    out = place.activation(PRODUCTS[expression][2])

    def product_and_gradients(x, weight, pull):
        def pulled(x, weight):
            y = dot.dot(expression, x, weight, out=out, policy=policy)
            return jnp.sum(y.astype(jnp.float32) * pull), y

        gradients, y = jax.grad(pulled, argnums=(0, 1), has_aux=True)(x, weight)
        return y, *gradients

    return jax.jit(product_and_gradients)


def plain(expression, x, weight, pull):
    inputs, out = expression.split("->")
    of_x, of_weight = inputs.split(",")
    return (
        np.einsum(expression, x, weight),
        np.einsum(f"{out},{of_weight}->{of_x}", pull, weight),
        np.einsum(f"{of_x},{out}->{of_weight}", x, pull),
    )


def assert_near(got, want, tolerance):
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    assert np.max(np.abs(got - want)) <= tolerance * np.max(np.abs(want))


@pytest.mark.parametrize("place_name", PLACES)
@pytest.mark.parametrize("expression", PRODUCTS)
def test_equals_einsum_in_value_and_gradients(expression, place_name):
    place = make_place(place_name)
    arrays, placed = place_arrays(place, expression, jnp.float32)
    with jax.set_mesh(place.mesh):
        results = gradient_function(place, expression, precision.POLICIES["fp32"])(*placed)
    for got, want in zip(results, plain(expression, *arrays), strict=True):
        assert_near(got, want, FP32_TOLERANCE)


@pytest.mark.parametrize("policy_name", ["bf16", "bf16_fp32_reduce", "fp16"])
def test_16_bits_are_near_and_gradients_are_in_the_master_dtype(policy_name):
    expression = "BTD,DNH->BTNH"
    place = make_place("zero3, fsdp 4 x tensor 2")
    policy = precision.POLICIES[policy_name]
    arrays, placed = place_arrays(place, expression, policy.compute)
    with jax.set_mesh(place.mesh):
        results = gradient_function(place, expression, policy)(*placed)
    assert [array.dtype for array in results] == [policy.compute, policy.compute, jnp.float32]
    for got, want in zip(results, plain(expression, *arrays), strict=True):
        assert_near(got, want, BF16_TOLERANCE)


def test_gradients_have_the_shardings_of_their_primals():
    expression = "BTD,DNH->BTNH"
    place = make_place("zero3, fsdp 4 x tensor 2")
    _, placed = place_arrays(place, expression, jnp.float32)
    with jax.set_mesh(place.mesh):
        results = gradient_function(place, expression, precision.POLICIES["fp32"])(*placed)
    y, gradient_x, gradient_weight = results
    assert gradient_x.sharding.spec == placed[0].sharding.spec
    split = PartitionSpec("fsdp", "tensor", None)
    assert gradient_weight.sharding.spec == placed[1].sharding.spec == split
    assert y.sharding.spec == placed[2].sharding.spec


def collectives(function, arguments, folder) -> list[tuple[str, str, tuple[int, ...]]]:
    """(kind, dtype, shape) of each collective as partitioned.

    Read before the passes of the CPU backend, which has no bf16 collectives and widens them.
    """
    options = {"xla_dump_to": str(folder), "xla_dump_hlo_pass_re": "spmd-partitioning"}
    function.lower(*arguments).compile(compiler_options=options)
    (path,) = folder.glob("*after_spmd-partitioning*")
    found = re.findall(
        r"= (\w+)\[([\d,]*)\]\S* (all-gather|all-reduce|reduce-scatter)\(", path.read_text()
    )
    return [(kind, dtype, tuple(map(int, shape.split(",")))) for dtype, shape, kind in found]


@pytest.mark.parametrize(
    ("policy_name", "reduce_dtype", "gather", "reduce"),
    [
        ("fp32", "", "f32", "f32"),
        ("bf16", "", "bf16", "bf16"),
        ("bf16_fp32_reduce", "", "bf16", "f32"),
        ("bf16", "fp32", "bf16", "f32"),
        ("fp16", "", "f16", "f32"),
        ("fp16", "fp16", "f16", "f16"),
        ("fp32", "bf16", "f32", "bf16"),
    ],
)
def test_collectives_have_the_dtypes_of_the_policy(
    policy_name, reduce_dtype, gather, reduce, tmp_path
):
    expression, policy = "BTD,DNH->BTNH", precision.policy_of(policy_name, reduce_dtype)
    place = make_place("zero3, data 8")
    _, placed = place_arrays(place, expression, policy.compute)
    with jax.set_mesh(place.mesh):
        function = gradient_function(place, expression, policy)
        found = collectives(function, placed, tmp_path)
    gathers = {dtype for kind, dtype, _ in found if kind == "all-gather"}
    sums = {dtype for kind, dtype, _ in found if kind in ("all-reduce", "reduce-scatter")}
    assert gathers == {gather}
    assert sums == {reduce}
    assert {shape for _, _, shape in found} <= {(D, N, H), (D // 8, N, H)}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_cast_rounds_as_a_plain_one(dtype):
    """Normal numbers bit for bit; the smaller ones of fp16 by less than their step."""
    to = jnp.finfo(dtype)
    exponents = np.linspace(to.minexp, to.maxexp - 2, 2000)
    numbers = np.random.default_rng(0).choice([-1, 1], 2000) * 2.0**exponents
    numbers = numbers.astype(np.float32)
    rounded = jax.jit(lambda x: dot.cast(x, dtype))
    np.testing.assert_array_equal(rounded(numbers), numbers.astype(dtype))
    if dtype == jnp.float16:
        step = 2.0 ** (to.minexp - to.nmant)
        small = np.linspace(0, float(to.tiny), 999, dtype=np.float32)
        assert np.abs(np.float32(rounded(small)) - small).max() < step
        assert np.isinf(rounded(np.float32(65520)))


def test_only_the_split_weight_is_kept_for_the_backward_pass():
    expression, policy = "BTD,DNH->BTNH", precision.POLICIES["bf16"]
    place = make_place("zero3, data 8")
    _, (x, weight, pull) = place_arrays(place, expression, policy.compute)
    out = place.activation(PRODUCTS[expression][2])

    def pulled(x, weight):
        y = dot.dot(expression, x, weight, out=out, policy=policy)
        return jnp.sum(y.astype(jnp.float32) * pull)

    with jax.set_mesh(place.mesh):
        _, backward = jax.vjp(pulled, x, weight)
    # The backward function is a pytree whose leaves are what it keeps.
    kept = [array for array in jax.tree.leaves(backward) if array.shape == weight.shape]
    assert [array.dtype for array in kept] == [jnp.float32]
    assert kept[0].sharding.spec == PartitionSpec("data", None, None)

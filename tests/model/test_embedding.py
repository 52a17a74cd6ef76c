"""`embedding.embed` equals taking rows, in value and gradient, however the arrays are split."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from llmx import sharding
from llmx.model import embedding, precision

# Rows that appear several times are added up in another order, in fp32.
FP32_TOLERANCE = 1e-6
# Gradients that are summed over devices in bf16, relative to the largest element.
BF16_TOLERANCE = 2e-2

B, T, V, D = 8, 8, 32, 16

PLACES = {
    "ddp, data 8": ("ddp", {"data": 8}, True),
    "zero3, data 8": ("zero3", {"data": 8}, True),
    "zero3, tensor 8": ("zero3", {"tensor": 8}, True),
    "zero2, data 2 x tensor 4": ("zero2", {"data": 2, "tensor": 4}, True),
    "zero3, fsdp 4 x tensor 2": ("zero3", {"fsdp": 4, "tensor": 2}, True),
    "zero3, fsdp 4 x tensor 2, whole norms": ("zero3", {"fsdp": 4, "tensor": 2}, False),
    "zero3, data 2 x fsdp 2 x tensor 2": ("zero3", {"data": 2, "fsdp": 2, "tensor": 2}, True),
    "hsdp, data 2 x fsdp 2 x tensor 2": ("hsdp", {"data": 2, "fsdp": 2, "tensor": 2}, True),
    "zero3, fsdp 2 x sequence 2 x tensor 2": (
        "zero3", {"fsdp": 2, "sequence": 2, "tensor": 2}, True,
    ),
    "zero3, expert 2 x fsdp 2 x sequence 2": (
        "zero3", {"expert": 2, "fsdp": 2, "sequence": 2}, True,
    ),
}  # fmt: skip


def make_place(name: str) -> sharding.Placement:
    layout, sizes, sequence_parallel = PLACES[name]
    layout = sharding.make_layout(layout, sequence_parallel=sequence_parallel)
    return sharding.Placement(sharding.make_mesh(sizes), layout)


def lookup_and_gradient(place: sharding.Placement, policy_name: str):
    """The rows, the table's gradient, and the placed table, with what they should be."""
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, V, (B, T)).astype(np.int32)
    tokens[0] = [0, V - 1, V // 2, V // 2 - 1, 0, 0, 0, V - 1]  # borders of shards, and repeats
    table = generator.normal(size=(V, D)).astype(np.float32)
    pull = generator.normal(size=(B, T, D)).astype(np.float32)
    names = ("vocab", "embed")
    to = sharding.spec(names, place.layout.parameters, place.mesh, shape=table.shape)
    placed = jax.device_put(table, NamedSharding(place.mesh, to))
    out = place.activation(("batch", "block_sequence", "embed"))
    placed_pull = jax.device_put(pull, NamedSharding(place.mesh, out))
    placed_tokens = jax.device_put(
        tokens, NamedSharding(place.mesh, place.activation(("batch", "sequence")))
    )
    policy = precision.POLICIES[policy_name]

    def pulled(table, tokens, pull):
        rows = embedding.embed(tokens, table, place=place, policy=policy)
        return jnp.sum(rows.astype(jnp.float32) * pull), rows

    with jax.set_mesh(place.mesh):
        gradient, rows = jax.jit(jax.grad(pulled, has_aux=True))(placed, placed_tokens, placed_pull)
    want = np.zeros_like(table)
    np.add.at(want, tokens, pull)
    return rows, gradient, placed, table[tokens], want


@pytest.mark.parametrize("place_name", PLACES)
def test_equals_taking_rows_in_value_and_gradient(place_name):
    place = make_place(place_name)
    rows, gradient, placed, want_rows, want_gradient = lookup_and_gradient(place, "fp32")
    np.testing.assert_array_equal(rows, want_rows)
    np.testing.assert_allclose(gradient, want_gradient, rtol=FP32_TOLERANCE, atol=FP32_TOLERANCE)
    assert gradient.sharding.spec == placed.sharding.spec
    assert rows.sharding.spec == place.activation(("batch", "block_sequence", "embed"))


@pytest.mark.parametrize("policy_name", ["bf16", "bf16_fp32_reduce"])
def test_bf16_rows_and_fp32_gradient(policy_name):
    place = make_place("hsdp, data 2 x fsdp 2 x tensor 2")
    rows, gradient, _, want_rows, want_gradient = lookup_and_gradient(place, policy_name)
    assert (rows.dtype, gradient.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_array_equal(rows, want_rows.astype(jnp.bfloat16))
    error = np.max(np.abs(np.asarray(gradient) - want_gradient))
    assert error <= BF16_TOLERANCE * np.max(np.abs(want_gradient))


def test_sequence_parallel_splits_positions_over_tensor():
    split = make_place("zero3, fsdp 4 x tensor 2")
    whole = make_place("zero3, fsdp 4 x tensor 2, whole norms")
    rows, *_ = lookup_and_gradient(split, "fp32")
    assert rows.addressable_shards[0].data.shape == (B // 4, T // 2, D)
    rows, *_ = lookup_and_gradient(whole, "fp32")
    assert rows.addressable_shards[0].data.shape == (B // 4, T, D)


def test_the_table_is_never_gathered():
    """Under ZeRO-3 no device ever holds an array of the whole table, in either pass."""
    place = make_place("zero3, data 8")
    rows_of_table = 4096  # more than any other dimension, so that its shape is unmistakable
    to = NamedSharding(place.mesh, place.activation(("batch", None)))
    table_to = NamedSharding(place.mesh, jax.sharding.PartitionSpec(None, "data"))
    table = jax.ShapeDtypeStruct((rows_of_table, D), jnp.float32, sharding=table_to)
    tokens = jax.ShapeDtypeStruct((B, T), jnp.int32, sharding=to)

    def total(table, tokens):
        policy = precision.POLICIES["fp32"]
        return embedding.embed(tokens, table, place=place, policy=policy).sum()

    with jax.set_mesh(place.mesh):
        text = jax.jit(jax.grad(total)).lower(table, tokens).compile().as_text()
    assert f"[{rows_of_table},{D // 8}]" in text
    assert f"[{rows_of_table},{D}]" not in text

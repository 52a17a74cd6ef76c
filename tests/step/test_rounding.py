"""Stochastic rounding: right on average, and the same random bits wherever a number lives."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from llmx import sharding
from llmx.step import rounding

SIGMAS = 5  # a mean of independent numbers lies within these but for one in two million


def bits_of(shape, step=0, name="w"):
    draw = lambda step: rounding.random_bits(shape, step=step, name=name)  # noqa: E731
    return jax.jit(draw)(jnp.int32(step))


@jax.jit
def rounded(x, step):
    random = rounding.random_bits(x.shape, step=step, name="w")
    return rounding.to_bf16(x, random).astype(jnp.float32)


def neighbours(x):
    """The bf16 numbers below and above, toward zero and away from it, as float64."""
    bits = x.view(np.uint32)
    return (
        word.view(np.float32).astype("f8")
        for word in (bits & 0xFFFF0000, bits + 0xFFFF & 0xFFFF0000)
    )


# ---------------------------------------------------------------------------------------- rounding


def test_the_mean_of_many_roundings_is_the_number():
    generator = np.random.default_rng(0)
    x = (generator.normal(size=512) * 10.0 ** generator.integers(-30, 30, 512)).astype(np.float32)
    times = 400
    found = np.asarray(jax.jit(jax.vmap(rounded, (None, 0)))(x, jnp.arange(times)), "f8")
    below, above = neighbours(x)
    assert ((found == below) | (found == above)).all()
    ulp, share = above - below, (x - below) / (above - below)
    deviation = np.abs(ulp) * np.sqrt(share * (1 - share) / times)
    assert (np.abs(found.mean(0) - x) <= SIGMAS * deviation + 1e-3 * np.abs(ulp)).all()
    # All together, where an error of each is less than its noise.
    scaled = (found.mean(0) - x) / ulp
    assert abs(scaled.mean()) < SIGMAS * 0.5 / np.sqrt(times * x.size)


def test_what_bf16_holds_stays():
    every = np.arange(2**16, dtype=np.uint16).view(jnp.bfloat16.dtype)
    every = every[~np.isnan(every.astype(np.float32))]
    found = jax.jit(
        lambda x: rounding.to_bf16(x, rounding.random_bits(x.shape, step=jnp.int32(0), name="w"))
    )(every.astype(np.float32))
    np.testing.assert_array_equal(np.asarray(found), every)


def test_infinity_and_nan_stay_and_no_finite_number_becomes_infinite():
    largest = np.finfo(np.float32).max
    payload = np.array([0x7F800001, 0xFF800001], np.uint32).view(np.float32)  # NaN in the low bits
    x = jnp.array([np.inf, -np.inf, np.nan, *payload, largest, -largest], jnp.float32)
    for word in (0, 0xFFFF, 0xFFFFFFFF):
        found = rounding.to_bf16(x, jnp.full(x.shape, word, jnp.uint32)).astype(jnp.float32)
        assert found[0] == np.inf and found[1] == -np.inf and np.isnan(found[2:5]).all()
        assert np.isfinite(found[5:]).all() and (np.abs(found[5:]) > 0.99 * largest).all()


def test_updates_below_half_a_unit_add_up_as_in_fp32():
    """From 1, by 2^-12 at a time: bf16 next to 1 has steps of 2^-7."""
    count, update = 2048, {"w": jnp.full(1024, 2.0**-12)}

    def run(params, how):
        def step(params, number):
            return how.add(params, update, how.seed(number)), None

        return jax.jit(lambda params: jax.lax.scan(step, params, jnp.arange(count))[0])(params)

    start = lambda dtype: {"w": jnp.ones(1024, dtype)}  # noqa: E731
    exact = run(start(jnp.float32), rounding.of(jnp.dtype("float32")))["w"]
    assert (exact == 1.5).all()
    nearest = run(start(jnp.bfloat16), rounding.NEAREST)["w"]
    assert (nearest == 1).all()
    found = run(start(jnp.bfloat16), rounding.of(jnp.dtype("bfloat16")))["w"].astype(jnp.float32)
    # Each step is 2^-7 with a chance of 2^-5.
    deviation = 2.0**-7 * np.sqrt(count * 2.0**-5 * (1 - 2.0**-5))
    assert abs(found.mean() - 1.5) < SIGMAS * deviation / np.sqrt(found.size)
    assert found.std() == pytest.approx(deviation, rel=0.15)


def test_fp32_parameters_are_added_to_as_by_optax():
    params, updates = {"w": jnp.ones(3)}, {"w": jnp.full(3, 1e-3)}
    how = rounding.of(jnp.dtype("float32"))
    assert how.seed(jnp.int32(3)) == ()
    traced = jax.make_jaxpr(lambda *trees: how.add(*trees, ()))(params, updates)
    assert str(traced) == str(jax.make_jaxpr(optax.apply_updates)(params, updates))


# ------------------------------------------------------------------------------------- random bits


def test_bits_are_uniform_and_independent():
    bits = np.asarray(bits_of((512, 512)))
    size = bits.size
    ones = np.unpackbits(bits.view(np.uint8)).reshape(size, 32).mean(0)
    assert (np.abs(ones - 0.5) < SIGMAS * 0.5 / np.sqrt(size)).all()
    for word in (bits & 0xFF, bits >> 24):
        counts = np.bincount(word.ravel(), minlength=256)
        assert abs((np.square(counts - size / 256) / (size / 256)).sum() - 255) < SIGMAS * 23
    u = bits / 2.0**32 - 0.5
    others = (
        bits_of((512, 512), step=1), bits_of((512, 512), step=2**30), bits_of((512, 512), name="v"),
        np.roll(bits, 1, 0), np.roll(bits, 1, 1), np.roll(bits, 7, 1), bits.T,
    )  # fmt: skip
    for other in others:
        v = np.asarray(other) / 2.0**32 - 0.5
        assert abs((u * v).mean()) < SIGMAS / 12 / np.sqrt(size / 2)


@pytest.mark.parametrize("spec", [("fsdp", "tensor"), (None, "fsdp"), (("tensor", "fsdp"), None)])
def test_bits_are_the_same_on_every_mesh_and_nothing_communicates(spec):
    mesh = sharding.make_mesh({"fsdp": 4, "tensor": 2}, axis_type=AxisType.Auto)
    to = NamedSharding(mesh, PartitionSpec(*spec))
    draw = lambda step: rounding.random_bits((16, 24), step=step, name="w")  # noqa: E731
    compiled = jax.jit(draw, out_shardings=to).lower(jnp.int32(5)).compile()
    text = compiled.as_text()
    assert not any(word in text for word in ("all-gather", "all-reduce", "permute", "all-to-all"))
    np.testing.assert_array_equal(compiled(jnp.int32(5)), bits_of((16, 24), step=5))


@pytest.mark.parametrize("shape", [(), (7,), (3, 1, 5)])
def test_bits_of_any_rank(shape):
    assert bits_of(shape).shape == shape and bits_of(shape).dtype == jnp.uint32


def test_a_slice_of_rows_has_the_bits_of_the_whole():
    whole = bits_of((6, 4, 5))
    part = jax.jit(
        lambda first: rounding.random_bits(
            (2, 4, 5), step=jnp.int32(0), name="w", rows=first + jnp.arange(2)
        )
    )(jnp.int32(3))
    np.testing.assert_array_equal(part, whole[3:5])

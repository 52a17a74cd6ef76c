"""Chunked, vocabulary-parallel cross-entropy equals log-softmax, and whole logits never exist."""

import dataclasses
import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding

from llmx import sharding
from llmx.model import losses, precision, quantized

# fp32 sums in another order; values are of size 1 to 10.
TOLERANCE = 2e-5
# Logits and their gradients from bf16 products, relative to the largest element.
BF16_TOLERANCE = 3e-2

# The padded vocabulary divides over 8 devices and 3 chunks; the last 5 rows are padding.
B, T, D, V, NUM_REAL = 8, 4, 16, 48, 43

PLACES = {
    "one device": ("zero3", {"data": 1}, True),
    "ddp, data 8": ("ddp", {"data": 8}, True),
    "zero3, data 8": ("zero3", {"data": 8}, True),
    "zero1, data 2 x tensor 4": ("zero1", {"data": 2, "tensor": 4}, True),
    "zero3, fsdp 4 x tensor 2": ("zero3", {"fsdp": 4, "tensor": 2}, True),
    "zero3, fsdp 4 x tensor 2, whole norms": ("zero3", {"fsdp": 4, "tensor": 2}, False),
    "hsdp, data 2 x fsdp 2 x tensor 2": ("hsdp", {"data": 2, "fsdp": 2, "tensor": 2}, True),
    "zero3, expert 2 x sequence 2 x tensor 2": (
        "zero3", {"expert": 2, "sequence": 2, "tensor": 2}, True,
    ),
}  # fmt: skip


def make_place(name: str) -> sharding.Placement:
    layout, sizes, sequence_parallel = PLACES[name]
    num_devices = math.prod(sizes.values())
    mesh = sharding.make_mesh(sizes, devices=jax.devices()[:num_devices])
    layout = sharding.make_layout(layout, sequence_parallel=sequence_parallel)
    return sharding.Placement(mesh, layout)


def make_arrays(scale: float = 1.0) -> dict[str, np.ndarray]:
    """x, head, targets, and the weights of each token's loss and log Z."""
    generator = np.random.default_rng(0)
    targets = generator.integers(0, NUM_REAL, (B, T))
    # First and last rows of shards and chunks, of the vocabulary, and of what is no padding.
    targets[:2] = [[0, NUM_REAL - 1, 23, 24], [11, 12, 15, 16]]
    return {
        "x": (scale * generator.normal(size=(B, T, D))).astype(np.float32),
        "head": generator.normal(size=(V, D)).astype(np.float32),
        "targets": targets.astype(np.int32),
        "loss_weights": generator.uniform(size=(B, T)).astype(np.float32),
        "z_weights": generator.uniform(size=(B, T)).astype(np.float32),
    }


def put(arrays, place, dtype):
    tokens = place.activation(("batch", "sequence"))
    head = sharding.spec(("vocab", "embed"), place.layout.parameters, place.mesh, shape=(V, D))
    to = {
        "x": place.activation(("batch", "block_sequence", "embed")), "head": head,
        "targets": tokens, "loss_weights": tokens, "z_weights": tokens,
    }  # fmt: skip
    arrays = arrays | {"x": arrays["x"].astype(dtype)}
    return {
        name: jax.device_put(array, NamedSharding(place.mesh, to[name]))
        for name, array in arrays.items()
    }


def with_gradients(token_losses):
    """token_losses(x, head, targets) as (arrays) -> (losses, log Zs, d x, d head)."""

    def run(arrays):
        def weighted(x, head):
            loss_BT, log_z_BT = token_losses(x, head, arrays["targets"])
            # A squared log Z, as in the z-loss.
            total = loss_BT * arrays["loss_weights"] + jnp.square(log_z_BT) * arrays["z_weights"]
            return total.sum(), (loss_BT, log_z_BT)

        gradients, values = jax.grad(weighted, argnums=(0, 1), has_aux=True)(
            arrays["x"], arrays["head"]
        )
        return *values, *gradients

    return jax.jit(run)


@functools.cache
def plain(softcap: float):
    """The formula: all logits, soft-capped, without the padding's columns."""

    def token_losses(x_BTD, head_VD, targets_BT):
        logits_BTV = jnp.einsum("BTD,VD->BTV", x_BTD, head_VD[:NUM_REAL], precision="highest")
        if softcap:
            logits_BTV = softcap * jnp.tanh(logits_BTV / softcap)
        log_z_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
        hit_BT = jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1)[..., 0]
        return log_z_BT - hit_BT, log_z_BT

    return with_gradients(token_losses)


def chunked(
    place, *, softcap: float = 0.0, chunks: int = 0, policy: str = "fp32",
    numbers: quantized.Numbers = quantized.UNROUNDED,
):  # fmt: skip
    def token_losses(x_BTD, head_VD, targets_BT):
        return losses.token_losses(
            x_BTD, head_VD, targets_BT, num_real=NUM_REAL, softcap=softcap, chunks=chunks,
            place=place, policy=dataclasses.replace(precision.POLICIES[policy], numbers=numbers),
        )  # fmt: skip

    return with_gradients(token_losses)


@pytest.mark.parametrize(
    ("place_name", "chunks", "softcap"),
    [(name, chunks, 5.0) for name in PLACES for chunks in (1, 3)]
    + [(name, chunks, 0.0) for name in list(PLACES)[4:6] for chunks in (0, 1, 2)],
)
def test_equals_the_formula_in_value_and_gradients(place_name, chunks, softcap):
    place, arrays = make_place(place_name), make_arrays()
    placed = put(arrays, place, jnp.float32)
    with jax.set_mesh(place.mesh):
        results = chunked(place, softcap=softcap, chunks=chunks)(placed)
    for got, want in zip(results, plain(softcap)(arrays), strict=True):
        np.testing.assert_allclose(got, want, rtol=TOLERANCE, atol=TOLERANCE)
    assert results[2].sharding.spec == placed["x"].sharding.spec
    assert results[3].sharding.spec == placed["head"].sharding.spec


def in_e4m3(head_VD: np.ndarray) -> np.ndarray:
    """Each row rounded to e4m3, in units of the least power of two for which it fits."""
    amax_V1 = np.abs(head_VD).max(axis=1, keepdims=True)
    scale_V1 = 2.0 ** np.ceil(np.log2(amax_V1 / 448.0))
    codes = (head_VD / scale_V1).astype(ml_dtypes.float8_e4m3fn)
    return (codes.astype(np.float64) * scale_V1).astype(np.float32)


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("place_name", list(PLACES))
def test_a_head_gathered_in_fp8_is_that_of_rounded_rows(place_name, chunks):
    """On every mesh, in values and in gradients, which pass straight through the rounding."""
    place, arrays = make_place(place_name), make_arrays()
    arrays["head"][3] *= 1e-3  # rows have scales of their own
    numbers = quantized.make(quantized.ProductsConfig(gather="fp8"))
    with jax.set_mesh(place.mesh):
        results = chunked(place, chunks=chunks, numbers=numbers)(put(arrays, place, jnp.float32))
    rounded = arrays | {"head": in_e4m3(arrays["head"])}
    assert 1e-3 < np.abs(rounded["head"] - arrays["head"]).max() < 0.2
    for got, want in zip(results, plain(0.0)(rounded), strict=True):
        np.testing.assert_allclose(got, want, rtol=TOLERANCE, atol=TOLERANCE)


def test_a_head_with_a_number_that_is_not_finite_gives_no_finite_loss():
    place, arrays = make_place("zero3, fsdp 4 x tensor 2"), make_arrays()
    arrays["head"][5, 3] = np.nan
    numbers = quantized.make(quantized.ProductsConfig(gather="fp8"))
    with jax.set_mesh(place.mesh):
        loss_BT, *_ = chunked(place, numbers=numbers)(put(arrays, place, jnp.float32))
    assert not np.isfinite(loss_BT).any()


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("policy", ["bf16", "bf16_fp32_reduce"])
def test_bf16_products_give_fp32_losses(policy, chunks):
    place, arrays = make_place("zero3, fsdp 4 x tensor 2"), make_arrays()
    with jax.set_mesh(place.mesh):
        results = chunked(place, chunks=chunks, policy=policy)(put(arrays, place, jnp.bfloat16))
    dtypes = [array.dtype for array in results]
    assert dtypes == [jnp.float32, jnp.float32, jnp.bfloat16, jnp.float32]
    for got, want in zip(results, plain(0.0)(arrays), strict=True):
        error = np.max(np.abs(np.asarray(got, np.float32) - want))
        assert error <= BF16_TOLERANCE * np.max(np.abs(want))


@pytest.mark.parametrize("chunks", [1, 3])
def test_padding_has_no_probability_and_no_gradient(chunks):
    place, arrays = make_place("zero3, fsdp 4 x tensor 2"), make_arrays()
    arrays["head"][NUM_REAL:] = 1e3  # these would win every softmax
    with jax.set_mesh(place.mesh):
        results = chunked(place, chunks=chunks)(put(arrays, place, jnp.float32))
    np.testing.assert_allclose(
        results[0], plain(0.0)(arrays)[0], rtol=TOLERANCE, atol=TOLERANCE
    )  # fmt: skip
    np.testing.assert_array_equal(np.asarray(results[3])[NUM_REAL:], 0)


def test_a_chunk_of_padding_only_is_finite():
    place, arrays = make_place("zero3, fsdp 4 x tensor 2"), make_arrays()
    real = 20  # of 48 rows: the second device of `tensor` holds padding only
    arrays["targets"] %= real

    def token_losses(x_BTD, head_VD, targets_BT):
        return losses.token_losses(
            x_BTD, head_VD, targets_BT, num_real=real, softcap=5.0, chunks=2, place=place,
            policy=precision.POLICIES["fp32"],
        )  # fmt: skip

    with jax.set_mesh(place.mesh):
        results = with_gradients(token_losses)(put(arrays, place, jnp.float32))
    assert all(np.isfinite(array).all() for array in results)
    np.testing.assert_array_equal(np.asarray(results[3])[real:], 0)


@pytest.mark.parametrize("softcap", [0.0, 30.0])
@pytest.mark.parametrize("chunks", [1, 3])
def test_extreme_logits_stay_finite(chunks, softcap):
    place, arrays = make_place("zero3, fsdp 4 x tensor 2"), make_arrays(scale=1e5)
    with jax.set_mesh(place.mesh):
        results = chunked(place, softcap=softcap, chunks=chunks)(put(arrays, place, jnp.float32))
    wants = plain(softcap)(arrays)
    assert np.max(wants[1]) > (1e5 if not softcap else 29)
    for got, want in zip(results[:2], wants[:2], strict=True):
        np.testing.assert_allclose(got, want, rtol=TOLERANCE, atol=TOLERANCE)
    assert all(np.isfinite(array).all() for array in results)


def test_tokens_of_weight_zero_have_no_influence_on_gradients():
    place, arrays = make_place("zero3, data 8"), make_arrays()
    unused = np.random.default_rng(1).uniform(size=(B, T)) < 0.5
    arrays["loss_weights"][unused] = arrays["z_weights"][unused] = 0
    other = arrays | {"x": np.where(unused[..., None], -arrays["x"], arrays["x"])}
    run = chunked(place, chunks=3)
    with jax.set_mesh(place.mesh):
        results = run(put(arrays, place, jnp.float32))
        others = run(put(other, place, jnp.float32))
    assert unused.any() and not unused.all()
    assert np.abs(results[2]).max() > 0
    np.testing.assert_array_equal(np.asarray(results[2])[unused], 0)
    np.testing.assert_array_equal(results[3], others[3])


def test_chunks_must_divide_the_local_rows():
    place = make_place("zero1, data 2 x tensor 4")  # 12 rows on each device
    with (
        jax.set_mesh(place.mesh),
        pytest.raises(ValueError, match=r"loss\.chunks=5 does not divide the 12 rows.*a divisor"),
    ):
        chunked(place, chunks=5)(put(make_arrays(), place, jnp.float32))


def test_num_chunks_is_the_fewest_under_both_limits():
    rows, limit = 128256, losses.CHUNK_BYTES
    assert losses.num_chunks(1, 32 * 1024) == 1  # at the limit of rows
    assert losses.num_chunks(1, rows) == 4  # 32064 rows each: 3 would have 42752
    tokens = 8192  # 16384 rows of logits fill the bytes
    num = losses.num_chunks(tokens, rows)
    assert rows % num == 0 and 4 * tokens * (rows // num) <= limit
    fewer = [n for n in range(1, num) if rows % n == 0]
    assert all(4 * tokens * (rows // n) > limit or rows // n > losses.CHUNK_ROWS for n in fewer)
    assert losses.num_chunks(10**12, 7) == 7  # never more parts than rows


@pytest.mark.parametrize(
    ("tokens", "rows", "parts"),
    [
        (8192, 151936, 16),  # 9,496 rows each, under the limit of 16,384
        (16384, 151936, 16),  # at most 8,192 rows: 32 parts have 4,748, 64 have 2,374
        (32768, 151936, 64),  # 9,496 rows would be more than twice the limit of 4,096
        (65536, 50304, 48),  # at most 2,048 rows: 32 parts have 1,572, 48 have 1,048
        (16384, 128256, 16),
        (131072, 75968, 64),  # 1,187 rows, for a limit of 1,024: the next divisor leaves 64
    ],
)
def test_rows_of_a_chunk_are_whole_vectors_where_they_can_be(tokens, rows, parts):
    assert losses.num_chunks(tokens, rows) == parts


def test_num_chunks_of_any_rows():
    """Against the definition: the fewest parts under the limit, or the nearest aligned ones."""
    some_rows = (*range(1, 700), 32000, 50304, 151936, 152064, 201088, 262272)
    for rows, tokens in itertools.product(some_rows, (1, 100, 4096, 10**5, 10**6, 10**9)):
        limit = max(1, min(losses.CHUNK_ROWS, losses.CHUNK_BYTES // (4 * tokens)))
        parts = [n for n in range(1, rows + 1) if rows % n == 0]
        fewest = min(n for n in parts if rows // n <= limit)
        large = [n for n in parts if n < fewest and rows // n <= 2 * limit]
        if large and fewest > 4 * -(-rows // limit):
            fewest = large[-1]
        more = [n for n in parts if fewest <= n <= 2 * fewest and rows // n % 8 == 0]
        fewer = [n for n in parts if n < fewest and rows // n <= 2 * limit and rows // n % 8 == 0]
        wanted = more[0] if more else fewer[-1] if fewer else fewest
        assert losses.num_chunks(tokens, rows) == wanted


def largest_array(text: str) -> int:
    """Elements of the largest array in a compiled program's text."""
    shapes = re.findall(r"\b(?:f32|bf16|s32|pred|u32)\[([\d,]+)\]", text)
    return max(math.prod(map(int, shape.split(","))) for shape in shapes)


@pytest.mark.parametrize("place_name", ["zero3, data 8", "zero3, fsdp 4 x tensor 2"])
def test_logits_of_a_large_vocabulary_never_exist(place_name):
    """In the compiled loss and its gradients the largest array is one chunk of logits."""
    place = make_place(place_name)
    vocabulary, sequence = 128256, 64

    def compiled_text(chunks: int) -> str:
        def total(x_BTD, head_VD, targets_BT):
            loss_BT, log_z_BT = losses.token_losses(
                x_BTD, head_VD, targets_BT, num_real=vocabulary, softcap=0.0, chunks=chunks,
                place=place, policy=precision.POLICIES["fp32"],
            )  # fmt: skip
            return loss_BT.sum() + log_z_BT.sum()

        x = ((B, sequence, D), place.activation(("batch", "block_sequence", "embed")))
        head = sharding.spec(("vocab", "embed"), place.layout.parameters, place.mesh)
        arguments = [
            jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(place.mesh, to))
            for shape, to, dtype in (
                (*x, jnp.float32),
                ((vocabulary, D), head, jnp.float32),
                ((B, sequence), place.activation(("batch", "sequence")), jnp.int32),
            )
        ]
        with jax.set_mesh(place.mesh):
            return jax.jit(jax.grad(total, argnums=(0, 1))).lower(*arguments).compile().as_text()

    ways = place.size(sharding.BATCH_AXES[:1]) if "data 8" in place_name else 4
    tokens, rows = B * sequence // ways, vocabulary // place.mesh.shape.get("tensor", 1)
    chunk_rows = rows // losses.num_chunks(tokens, rows)
    assert chunk_rows < rows
    assert largest_array(compiled_text(0)) == tokens * chunk_rows
    assert largest_array(compiled_text(1)) == tokens * rows  # what the chunks avoid

"""Rounding equals plain NumPy and qwix; GPTQ keeps products better than the nearest codes do."""

import jax.numpy as jnp
import numpy as np
import pytest

from llmx.compress import rounding
from llmx.model.packed import PackedConfig

I, O = 64, 24  # noqa: E741
CONFIGS = [
    PackedConfig(form, group, symmetric)
    for form in ("int4", "int8")
    for group in (0, 32)
    for symmetric in (True, False)
]


def a_matrix(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((I, O)).astype(np.float32)


def a_gram(seed: int = 1) -> np.ndarray:
    """Of correlated inputs, some of them much larger than others."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((400, I)) @ random.standard_normal((I, I))
    x *= np.exp(random.standard_normal(I))
    return (x.T @ x).astype(np.float32)


def plain_grid(weight: np.ndarray, config: PackedConfig):
    """Scale and zero point of each output of one group [g, O]."""
    levels = 2**config.bits
    if config.symmetric:
        scale = np.abs(weight).max(0) / (levels / 2 - 0.5)
        return scale, np.full(len(scale), levels // 2)
    low, high = np.minimum(weight.min(0), 0), np.maximum(weight.max(0), 0)
    scale = (high - low) / (levels - 1)
    return scale, np.clip(np.round(-low / scale), 0, levels - 1)


def plain_codes(weight, scale, zero, config):
    return np.clip(np.round(weight / scale) + zero, 0, 2**config.bits - 1)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_nearest_codes_are_those_of_numpy(config):
    weight, size = a_matrix(), config.group or I
    found = rounding.nearest(weight, config=config, scale_dtype=jnp.float32)
    for group in range(I // size):
        rows = slice(group * size, (group + 1) * size)
        scale, zero = plain_grid(weight[rows], config)
        np.testing.assert_allclose(found.scale_GO[group], scale, rtol=1e-6)
        # The largest of a symmetric group is halfway between two codes.
        steps = np.abs(weight[rows] / scale)
        clear = np.abs(steps - np.floor(steps) - 0.5) > 1e-4
        expected = plain_codes(weight[rows], scale, zero, config)
        np.testing.assert_array_equal(np.asarray(found.codes_IO[rows])[clear], expected[clear])
        assert clear.mean() > 0.9
        if not config.symmetric:
            np.testing.assert_array_equal(found.zero_GO[group], zero)
    assert (found.zero_GO is None) == config.symmetric
    error = np.abs(np.asarray(rounding.numbers(found, config)) - weight).max()
    assert error <= 0.51 * np.asarray(found.scale_GO).max()


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_nearest_codes_are_those_of_qwix(config):
    qarray = pytest.importorskip("qwix._src.core.qarray")
    weight = a_matrix()
    how = qarray.HowToQuantize(
        qtype={4: jnp.int4, 8: jnp.int8}[config.bits], channelwise_axes=(1,),
        tiled_axes={0: config.group} if config.group else {},
        calibration_method="absmax" if config.symmetric else "minmax",
    )  # fmt: skip
    theirs = qarray.quantize(jnp.asarray(weight), how)
    found = rounding.nearest(weight, config=config, scale_dtype=jnp.float32)
    np.testing.assert_allclose(found.scale_GO, theirs.scale, rtol=1e-6)
    ours = np.asarray(found.codes_IO) - config.middle
    np.testing.assert_array_equal(ours, np.asarray(theirs.qvalue.astype(jnp.int32)))


def test_scales_fit_into_bf16_and_a_group_of_zeros_stays_zero():
    weight = a_matrix()
    weight[:, 3] = 0
    config = PackedConfig("int4", 32, False)
    found = rounding.nearest(weight, config=config)
    scale = np.asarray(found.scale_GO)
    np.testing.assert_array_equal(scale, scale.astype(jnp.bfloat16).astype(np.float32))
    assert not np.asarray(rounding.numbers(found, config))[:, 3].any()


def plain_gptq(weight, gram, config, *, by_importance: bool, damping=0.01):
    """Algorithm 1 of arXiv 2210.17323 in float64, without its blocks."""
    weight, gram, size = weight.astype(np.float64), gram.astype(np.float64), config.group or I
    zeros = weight == 0
    squares = np.diag(gram).copy()
    gram = gram + np.diag((squares == 0) + damping * squares.mean())
    weight[squares == 0] = 0
    order = np.argsort(-squares, kind="stable") if by_importance else np.arange(I)
    grids = [plain_grid(weight[n : n + size], config) for n in range(0, I, size)]
    inverse = np.linalg.inv(gram[np.ix_(order, order)])
    upper = np.linalg.cholesky(inverse).T
    weight, codes = weight[order], np.zeros((I, O), int)
    for row, number in enumerate(order):
        if config.group and not by_importance and row % size == 0:
            rows = slice(row, row + size)
            grids[row // size] = plain_grid(np.where(zeros[rows], 0, weight[rows]), config)
        scale, zero = grids[number // size]
        codes[number] = np.where(
            zeros[number], zero, plain_codes(weight[row], scale, zero, config)
        )  # fmt: skip
        error = (weight[row] - (codes[number] - zero) * scale) / upper[row, row]
        weight[row + 1 :] -= np.outer(upper[row, row + 1 :], error)
    return codes, np.stack([scale for scale, _ in grids])


@pytest.mark.parametrize("by_importance", [False, True])
@pytest.mark.parametrize("config", CONFIGS[:4], ids=str)
def test_gptq_is_that_of_numpy(config, by_importance):
    weight, gram = a_matrix(), a_gram()
    gram[5], gram[:, 5] = 0, 0
    expected, scale = plain_gptq(weight, gram, config, by_importance=by_importance)
    found = rounding.gptq(
        weight, gram, config=config, by_importance=by_importance, scale_dtype=jnp.float32
    )
    np.testing.assert_allclose(found.scale_GO, scale, rtol=1e-4)
    # The largest of a symmetric group is halfway between two codes: in fp32 it may go to the other,
    # and what is behind it in that output then differs.
    same_O = (np.asarray(found.codes_IO) == expected).all(0)
    assert same_O.mean() > 0.85, same_O
    zero = config.middle if found.zero_GO is None else np.repeat(found.zero_GO, I // len(scale), 0)
    assert (np.broadcast_to(found.codes_IO - zero, (I, O))[5] == 0).all()


@pytest.mark.parametrize("by_importance", [False, True])
@pytest.mark.parametrize("config", CONFIGS[:4], ids=str)
def test_gptq_keeps_zeros(config, by_importance):
    """Pruned weights stay zero, and the others make up for them as in NumPy."""
    weight, gram = a_matrix(), a_gram()
    weight[np.random.default_rng(5).random((I, O)) < 0.5] = 0
    expected, scale = plain_gptq(weight, gram, config, by_importance=by_importance)
    how = dict(config=config, by_importance=by_importance, scale_dtype=jnp.float32)
    found = rounding.gptq(weight, gram, **how)
    np.testing.assert_allclose(found.scale_GO, scale, rtol=1e-4)
    assert (np.asarray(found.codes_IO) == expected).all(0).mean() > 0.85
    numbers = np.asarray(rounding.numbers(found, config))
    assert not numbers[weight == 0].any() and np.count_nonzero(numbers) > 0.3 * numbers.size
    nearest = rounding.numbers(rounding.nearest(weight, config=config), config)
    errors = [rounding.output_error(weight, one, gram) for one in (nearest, numbers)]
    assert errors[1] < 0.9 * errors[0], errors


@pytest.mark.parametrize("compute", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize(("bits", "config"), [
    (4, PackedConfig("int4", 32)), (4, PackedConfig("int4", 0)), (3, PackedConfig("int4", 32)),
    (4, PackedConfig("int8", 32)), (8, PackedConfig("int8", 32)),
])  # fmt: skip
def test_weights_that_are_codes_keep_them(bits, config, compute):
    """With scales that no packed format has, largest codes that are not always the last ones, and
    a group in which all are zero."""
    random = np.random.default_rng(bits)
    codes = np.round(random.standard_normal((I, O)) * 2 ** (bits - 1) / 3)
    codes = np.clip(codes, -(2 ** (bits - 1)), 2 ** (bits - 1) - 1).astype(np.int32)
    codes[:32, 5] = 0
    codes[0], codes[33] = np.where(codes[0], codes[0], 1), 1  # no common divisor
    codes[0, 5], codes[3, 17] = 0, 1
    scale = np.exp(random.standard_normal((I // (config.group or I), O))).astype(np.float32)
    rows = np.repeat(scale, config.group or I, 0)
    weight = np.asarray((codes * rows).astype(compute), np.float32)
    found = rounding.own_codes(jnp.asarray(weight), config=config)
    np.testing.assert_array_equal(np.asarray(found.codes_IO) - config.middle, codes)
    used = np.abs(codes.reshape(len(scale), -1, O)).max(1) > 0
    near = 2.0**-8 if compute == np.float32 else 2.0**-7
    np.testing.assert_allclose(np.asarray(found.scale_GO)[used], scale[used], rtol=near)
    if bits == config.bits:  # so that no finer codes have it: one number between two of them
        weight[3, 17] += 0.5 * rows[3, 17]
        assert rounding.own_codes(jnp.asarray(weight), config=config) is None


def test_other_weights_have_no_codes_of_their_own():
    for config in CONFIGS:
        assert rounding.own_codes(jnp.asarray(a_matrix()), config=config) is None
    codes = jnp.asarray(np.random.default_rng(0).integers(-7, 8, (I, O)), jnp.float32)
    assert rounding.own_codes(codes, config=PackedConfig("int4", 32, symmetric=False)) is None


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_gptq_keeps_products_better_than_the_nearest_codes(config):
    weight, gram = a_matrix(), a_gram()
    errors = [
        rounding.output_error(weight, rounding.numbers(rounded, config), gram)
        for rounded in (
            rounding.nearest(weight, config=config),
            rounding.gptq(weight, gram, config=config),
            rounding.gptq(weight, gram, config=config, by_importance=True),
        )
    ]
    assert errors[1] < 0.7 * errors[0] and errors[2] < 0.5 * errors[0], errors


def test_the_error_of_outputs_is_that_of_the_products():
    random = np.random.default_rng(3)
    x = random.standard_normal((50, I))
    before, after = a_matrix(), a_matrix(4)
    expected = np.square(x @ before - x @ after).sum()
    gram = jnp.asarray(x.T @ x, jnp.float32)
    np.testing.assert_allclose(rounding.output_error(before, after, gram), expected, rtol=1e-5)

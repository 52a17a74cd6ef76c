"""fp8 and int8 products equal NumPy's of the same rounded numbers, on every mesh."""

import functools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from support import packed, runs, tiers

from llmx import sharding
from llmx.config import ConfigError
from llmx.contract import Gradients
from llmx.model import dot, precision, quantized
from llmx.model.quantized import E4M3, E5M2, INT8
from llmx.runtime import hardware
from llmx.step.transforms import delayed_scaling

# Sums of the same products in another order, in fp32, relative to the largest.
FP32_TOLERANCE = 1e-5
# Losses and norms of two steps: the same, after a rounding of numbers that differ by 1e-7.
FP8_STEPS_TOLERANCE = 1e-5
# A code of int8 is 1/127 of the largest number, and more are next to the middle between two.
INT8_STEPS_TOLERANCE = 5e-5

B, T, D, N, H, F = 8, 4, 16, 4, 4, 24
TOKENS = ("batch", "sequence")

# expression: shapes and logical axes of x, of the weight, and axes of the result.
PRODUCTS = {
    "BTD,DNH->BTNH": (
        ((B, T, D), (*TOKENS, "embed")),
        ((D, N, H), ("embed", "heads", "head_dim")),
        (*TOKENS, "heads", "head_dim"),
    ),
    "BTNH,NHD->BTD": (
        ((B, T, N, H), (*TOKENS, "heads", "head_dim")),
        ((N, H, D), ("heads", "head_dim", "embed")),
        ("batch", "block_sequence", "embed"),
    ),
    "BTF,FD->BTD": (
        ((B, T, F), (*TOKENS, "mlp")),
        ((F, D), ("mlp", "embed")),
        ("batch", "block_sequence", "embed"),
    ),
}
PLACES = {
    "one device": {"fsdp": 1},
    "fsdp 2": {"fsdp": 2},
    "tensor 2": {"tensor": 2},
    "fsdp 4 x tensor 2": {"fsdp": 4, "tensor": 2},
    "data 2 x fsdp 2 x sequence 2": {"data": 2, "fsdp": 2, "sequence": 2},
}
BLOCK = 2
CASES = {
    "fp8": dict(format="fp8"),
    "fp8 gathered": dict(format="fp8", gather="fp8"),
    "fp8 blocks": dict(format="fp8", granularity="block", block=BLOCK, gather="fp8"),
    "only gathered": dict(gather="fp8"),
    "only gathered blocks": dict(gather="fp8", granularity="block", block=BLOCK),
    "int8": dict(format="int8"),
    "int8 channels": dict(format="int8", granularity="channel"),
}


# --------------------------------------------------------------------------------- NumPy's rounding


def numpy_scale(amax, largest: float, power_of_two: bool):
    exact = amax / largest
    scale = np.exp2(np.ceil(np.log2(exact))) if power_of_two else exact.astype(np.float32)
    return np.where(amax > 0, scale, 1.0)


def numpy_rounded(array, dtype, blocks: dict[int, int]):
    """The numbers that `array` is rounded to; `blocks`: {dimension: numbers that share a scale}."""
    array = np.asarray(array, np.float64)
    pairs, odd = [], []
    for n, size in enumerate(array.shape):
        share = blocks[n]
        odd.append(len(pairs) + 1)
        pairs += [size // share, share]
    split = array.reshape(pairs)
    amax = np.abs(split).max(axis=tuple(odd), keepdims=True)
    if dtype == np.int8:
        scale = numpy_scale(amax, 127, power_of_two=False)
        codes = np.rint((split / scale).astype(np.float32))
    else:
        scale = numpy_scale(amax, float(ml_dtypes.finfo(dtype).max), power_of_two=True)
        codes = (split / scale).astype(dtype).astype(np.float64)
    return (codes * scale).reshape(array.shape)


def numpy_blocks(letters: str, contracted: str, granularity: str, *, weight: bool) -> dict:
    """How many numbers of each dimension share a scale."""
    sizes = dict(B=B, T=T, D=D, N=N, H=H, F=F)
    whole = {n: sizes[letter] for n, letter in enumerate(letters)}
    if granularity == "tensor":
        return whole
    if granularity == "channel":
        return {n: whole[n] if letter in contracted else 1 for n, letter in enumerate(letters)}
    last = {max(n for n, letter in enumerate(letters) if letter in contracted)}
    if weight:
        last.add(max(n for n, letter in enumerate(letters) if letter not in contracted))
    return {n: BLOCK if n in last else 1 for n in whole}


def numpy_product_and_gradients(expression, case: dict, x, weight, pull):
    """The product and the gradients of x and weight for `pull`."""
    inputs, out = expression.split("->")
    of_x, of_weight = inputs.split(",")
    granularity = case.get("granularity", "tensor")
    forward = {"fp8": ml_dtypes.float8_e4m3fn, "int8": np.int8, "": None}[case.get("format", "")]
    backward = {"fp8": ml_dtypes.float8_e5m2}.get(case.get("format", ""))
    rounds_weight = forward or (ml_dtypes.float8_e4m3fn if case.get("gather") else None)

    def rounded(array, dtype, letters, contracted, *, weight=False):
        if dtype is None:
            return np.asarray(array, np.float64)
        blocks = numpy_blocks(letters, contracted, granularity, weight=weight)
        return numpy_rounded(array, dtype, blocks)

    weight = rounded(weight, rounds_weight, of_weight, of_x, weight=True)
    forward_x = rounded(x, forward, of_x, of_weight)
    # The rounding of x for its own gradient's product: int8 is rounded as in the forward pass.
    late_x = rounded(x, forward, of_x, out if backward else of_weight)
    to_x, to_weight = (rounded(pull, backward, out, other) for other in (of_weight, of_x))
    return (
        np.einsum(expression, forward_x, weight),
        np.einsum(f"{out},{of_weight}->{of_x}", to_x, weight),
        np.einsum(f"{of_x},{out}->{of_weight}", late_x, to_weight),
    )


# ----------------------------------------------------------------------------------------- products


def make_place(name: str) -> sharding.Placement:
    devices = jax.devices()[: math.prod(PLACES[name].values())]
    mesh = sharding.make_mesh(PLACES[name], devices=devices)
    return sharding.Placement(mesh, sharding.make_layout("zero3"))


@functools.cache
def arrays(expression: str):
    """x, weight and a weighting of the result, of different sizes."""
    generator = np.random.default_rng(0)
    shapes = (PRODUCTS[expression][0][0], PRODUCTS[expression][1][0])
    x, weight = (generator.normal(size=shape).astype(np.float32) for shape in shapes)
    pull = generator.normal(size=np.einsum(expression, x, weight).shape)
    return x * 3, weight / 7, (pull * 1e-5).astype(np.float32)


def product_and_gradients(
    expression, place, case: dict, values, *, policy="fp32", ranges=None, **options
):
    """(The product and the gradients of x, weight and ranges, if any), by `dot.dot` on a mesh."""
    (_, x_axes), (shape, axes), out_axes = PRODUCTS[expression]
    out = place.activation(out_axes)
    policy = precision.POLICIES[policy]
    numbers = quantized.make(quantized.ProductsConfig(**case))
    policy = precision.Policy(policy.param, policy.compute, policy.reduce, numbers)
    specs = (
        place.activation(x_axes),
        sharding.spec(axes, place.layout.parameters, place.mesh, shape=shape),
        out,
    )

    def function(x, weight, pull):
        def pulled(x, weight, *ranges):
            if ranges:
                weight = quantized.WithRanges(weight, quantized.Ranges(*ranges))
            y = dot.dot(expression, x, weight, out=out, policy=policy, **options)
            return jnp.sum(y.astype(jnp.float32) * pull), y

        known = tuple(map(jnp.float32, ranges or ()))
        numbers = tuple(range(2 + len(known)))
        gradients, y = jax.grad(pulled, argnums=numbers, has_aux=True)(x, weight, *known)
        return y, *gradients[:2], *([jnp.stack(gradients[2:])] if known else [])

    with jax.set_mesh(place.mesh), policy.products():
        x, weight, pull = (
            jax.device_put(value, NamedSharding(place.mesh, to))
            for value, to in zip(values, specs, strict=True)
        )
        return jax.jit(function)(x.astype(policy.compute), weight, pull)


def assert_near(got, want, tolerance):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert np.max(np.abs(got - want)) <= tolerance * np.max(np.abs(want))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("expression", PRODUCTS)
def test_equals_numpy_in_value_and_gradients(expression, place, case):
    values = arrays(expression)
    results = product_and_gradients(expression, make_place(place), CASES[case], values)
    wanted = numpy_product_and_gradients(expression, CASES[case], *values)
    exact = numpy_product_and_gradients(expression, {}, *values)
    for got, want, unrounded in zip(results, wanted, exact, strict=True):
        assert_near(got, want, FP32_TOLERANCE)
        assert np.abs(want - unrounded).max() <= 0.1 * np.abs(unrounded).max()
    assert np.abs(wanted[0] - exact[0]).max() > 1e-3 * np.abs(exact[0]).max()


def test_a_gathered_weight_kept_for_the_backward_pass_gives_the_same_gradients():
    expression, case = "BTF,FD->BTD", CASES["fp8 blocks"]
    place, values = make_place("fsdp 4 x tensor 2"), arrays(expression)
    wanted = product_and_gradients(expression, place, case, values)
    got = product_and_gradients(expression, place, case, values, recomputed=True)
    for one, other in zip(got, wanted, strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("case", ["fp8", "fp8 blocks"])
def test_the_gather_changes_no_bit_of_bf16_training(case):
    """A weight is rounded to the compute dtype first, whether it travels as codes or not."""
    expression, place = "BTD,DNH->BTNH", make_place("fsdp 2")
    results = [
        product_and_gradients(expression, place, section, arrays(expression), policy="bf16")
        for section in (CASES[case] | dict(gather=""), CASES[case] | dict(gather="fp8"))
    ]
    for one, other in zip(*results, strict=True):
        assert one.dtype == other.dtype
        assert np.array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


@pytest.mark.parametrize("case", ["fp8", "fp8 blocks", "int8", "int8 channels"])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_what_is_not_finite_stays_so(where, bad, case):
    """The guard sees it: no rounding hides an infinity or a NaN on any device."""
    expression, place = "BTD,DNH->BTNH", make_place("fsdp 4 x tensor 2")
    values = [array.copy() for array in arrays(expression)]
    values[where].reshape(-1)[-3] = bad
    y, gradient_x, gradient_weight = product_and_gradients(expression, place, CASES[case], values)
    seen = {0: (y, gradient_weight), 1: (y, gradient_x), 2: (gradient_x, gradient_weight)}[where]
    for array in seen:
        assert not np.isfinite(array).all()


@pytest.mark.parametrize("case", CASES)
def test_zeros_stay_zero(case):
    expression = "BTD,DNH->BTNH"
    values = [np.zeros_like(array) for array in arrays(expression)]
    for array in product_and_gradients(expression, make_place("fsdp 2"), CASES[case], values):
        assert not np.asarray(array).any()


@pytest.mark.parametrize("case", ["fp8", "int8"])
@pytest.mark.parametrize(("up", "down"), [(2.0**80, 2.0**-80), (2.0**-90, 2.0**90)])
def test_huge_and_tiny_numbers_are_scaled(case, up, down):
    """Powers of two change no code."""
    expression, place = "BTF,FD->BTD", make_place("one device")
    x, weight, pull = arrays(expression)
    usual = product_and_gradients(expression, place, CASES[case], (x, weight, pull))
    scaled = product_and_gradients(expression, place, CASES[case], (x * up, weight * down, pull))
    for one, other, factor in zip(usual, scaled, (up * down, down, up), strict=True):
        assert_near(np.asarray(other, np.float64) / factor, one, FP32_TOLERANCE)


def test_scales_and_codes_at_the_edges():
    amax = jnp.array([448.0, 448.0 * 2**-20, 449.0, 0.0, 3e38, 1e-40, jnp.inf, jnp.nan])
    scale = np.asarray(E4M3.scale(amax))
    assert scale[:4].tolist() == [1.0, 2.0**-20, 2.0, 1.0]
    assert np.isfinite(scale[:6]).all() and (1 / scale[:6] < np.inf).all()
    assert np.isnan(scale[6:]).all()
    steps = jnp.array([1e6, -1e6, 464.0, 0.4, jnp.nan])
    assert np.asarray(E4M3.codes(steps), np.float32)[:3].tolist() == [448, -448, 448]
    assert np.isnan(np.asarray(E4M3.codes(steps), np.float32)[4])
    assert np.asarray(E5M2.codes(steps * 1e6), np.float32)[:2].tolist() == [57344, -57344]
    assert np.asarray(INT8.codes(steps[:4])).tolist() == [127, -127, 127, 0]


def test_blocks_do_not_cross_devices():
    expression, place = "BTD,DNH->BTNH", make_place("fsdp 4 x tensor 2")
    with pytest.raises(ValueError, match=r"products.block=8 does not divide the 4 numbers"):
        case = dict(CASES["fp8 blocks"], block=8)
        product_and_gradients(expression, place, case, arrays(expression))


def test_ranges_set_the_scales_and_their_gradients_are_those_of_the_operands():
    """Larger numbers are clipped; what is not finite is not; a range of 0 is not known yet."""
    expression, place = "BTF,FD->BTD", make_place("fsdp 4 x tensor 2")
    x, weight, pull = arrays(expression)
    x_range = np.abs(x).max() / 8

    def results(ranges, x=x):
        section = CASES["fp8 gathered"]
        return product_and_gradients(expression, place, section, (x, weight, pull), ranges=ranges)

    y, gradient_x, gradient_weight, found = results((x_range, 0.0, 0.0))
    clipped = np.clip(x, *(numpy_scale(x_range, 448, True) * np.array([-448, 448])))
    wanted = numpy_product_and_gradients(expression, CASES["fp8"], clipped, weight, pull)
    for got, want in zip((y, gradient_x, gradient_weight), wanted, strict=True):
        assert_near(got, want, FP32_TOLERANCE)
    np.testing.assert_array_equal(found, [np.abs(array).max() for array in (x, weight, pull)])
    x = x.copy()
    x[1, 2, 3] = np.inf
    y, _, gradient_weight, found = results((x_range, 0.0, 0.0), x)
    assert not np.isfinite(y).all() and not np.isfinite(gradient_weight).all()
    assert np.isinf(found[0])


def test_qwix_gives_the_same():
    """Scales of qwix are not powers of two, and those of its int8 use half a step more: so the
    largest numbers are chosen such that the scales are the same."""
    qt = pytest.importorskip("qwix._src.core.dot_general_qt")
    expression, place = "BTF,FD->BTD", make_place("one device")
    x, weight, pull = (array.copy() for array in arrays(expression))
    for values, largest in ((x, 448 / 16), (weight, 448 / 512), (pull, 57344 * 2.0**-28)):
        values[...] *= largest / np.abs(values).max()
        values.reshape(-1)[np.abs(values).argmax()] = largest

    def of_qwix(config):
        dims = (((2,), (0,)), ((), ()))
        y, backward = jax.vjp(lambda x, w: qt.dot_general_qt(x, w, dims, config), x, weight)
        return y, *backward(jnp.asarray(pull))

    per_tensor = {
        f"{name}_disable_channelwise_axes": True
        for name in ("lhs", "rhs", "dlhs_grad", "drhs_grad")
    }
    fp8 = qt.DotGeneralQtConfig(
        lhs_qtype=jnp.float8_e4m3fn, rhs_qtype=jnp.float8_e4m3fn,
        dlhs_grad_qtype=jnp.float8_e5m2, drhs_grad_qtype=jnp.float8_e5m2, **per_tensor,
    )  # fmt: skip
    results = product_and_gradients(expression, place, CASES["fp8"], (x, weight, pull))
    for got, want in zip(results, of_qwix(fp8), strict=True):
        assert_near(got, want, FP32_TOLERANCE)
    ranges = [float(np.abs(array).max()) * 127.5 / 127 for array in (x, weight)]
    int8 = qt.DotGeneralQtConfig(
        lhs_qtype=jnp.int8, rhs_qtype=jnp.int8, disable_gradient_clipping=True,
        lhs_calibration_method=f"fixed,{-ranges[0]},{ranges[0]}",
        rhs_calibration_method=f"fixed,{-ranges[1]},{ranges[1]}", **per_tensor,
    )  # fmt: skip
    results = product_and_gradients(expression, place, CASES["int8"], (x, weight, pull))
    for got, want in zip(results, of_qwix(int8), strict=True):
        assert_near(got, want, FP32_TOLERANCE)


# -------------------------------------------------------------------------------------------- steps

MODEL = dict(
    vocab_size=257, width=64, mlp_dim=128, num_heads=8, num_kv_heads=4, head_dim=8, num_layers=2
)
ROWS, LENGTH = 8, 16
STEPS = {
    "fp8": dict(products__format="fp8", products__gather="fp8"),
    "blocks": dict(
        products__format="fp8", products__gather="fp8", products__granularity="block",
        products__block=8,
    ),
    "gathered": dict(products__gather="fp8"),
    "int8": dict(products__format="int8", products__granularity="channel"),
    "delayed": dict(
        products__format="fp8", products__gather="fp8", products__scaling="delayed",
        products__history=2,
    ),
}  # fmt: skip


def make_config(products: str, mesh=(), **keys):
    return runs.make_config(
        "llama3", model=MODEL, mesh=dict(mesh), batch__size=ROWS, batch__sequence_length=LENGTH,
        **runs.PARITY_OPTIMIZER | STEPS[products] | keys,
    )  # fmt: skip


def trained(products: str, mesh=(), **keys):
    recipe = runs.make_recipe(make_config(products, mesh, **keys))
    batches = packed.batches(2, rows=ROWS, length=LENGTH, vocab=257)
    losses, norms, _ = runs.train(recipe, batches, recipe.init(0))
    return np.array([losses, norms])


@functools.cache
def one_device(products: str):
    return trained(products)


@pytest.mark.parametrize(
    ("products", "mesh", "keys"),
    [
        ("fp8", dict(fsdp=2, tensor=2), dict(remat="names")),
        ("fp8", dict(fsdp=2), dict(sharding__gather="step", batch__accumulation=2)),
        tiers.full_grid("fp8", dict(fsdp=2, tensor=2), dict(sharding__turns=2, remat="full")),
        tiers.full_grid("fp8", dict(stage=2, fsdp=2, tensor=2), dict(batch__accumulation=2)),
        (
            "fp8", dict(stage=2, fsdp=2),
            dict(batch__accumulation=2, pipeline__schedule="zb_h1", remat="full"),
        ),
        tiers.full_grid("fp8", dict(data=2, fsdp=2), dict(sharding__layout="hsdp")),
        tiers.full_grid("blocks", dict(fsdp=2, tensor=2), {}),
        ("blocks", dict(fsdp=2, sequence=2), dict(sharding__gather="step")),
        ("gathered", dict(fsdp=4, tensor=2), dict(remat="full")),
        tiers.full_grid("gathered", dict(fsdp=2), dict(sharding__gather="step")),
        ("int8", dict(fsdp=2, tensor=2), dict(remat="dots")),
        tiers.full_grid("int8", dict(stage=2, fsdp=2), dict(batch__accumulation=2)),
        ("delayed", dict(fsdp=2, tensor=2), dict(remat="names", sharding__turns=2)),
        tiers.full_grid(
            "delayed", dict(fsdp=2), dict(batch__accumulation=2, sharding__gather="step")
        ),
        ("delayed", dict(data=2, fsdp=2), dict(sync__strategy="int8")),
    ],
)  # fmt: skip
def test_trains_as_one_device_does(products, mesh, keys):
    tolerance = INT8_STEPS_TOLERANCE if products == "int8" else FP8_STEPS_TOLERANCE
    np.testing.assert_allclose(trained(products, mesh, **keys), one_device(products), tolerance)


def test_rounding_shows_in_the_losses():
    """And is small, as are the losses of a model with random weights."""
    plain = trained("gathered", products__gather="")
    for products in sorted(STEPS):
        difference = np.abs(one_device(products) / plain - 1)
        assert 1e-5 < difference.max() < 2e-2


def delayed_steps(num: int, mesh=(), **keys):
    """(recipe, the states before and after each of these steps, their reports)."""
    recipe = runs.make_recipe(make_config("delayed", mesh, **keys))
    states, reports = [jax.device_get(recipe.init(0))], []
    for batch in packed.batches(num, rows=ROWS, length=LENGTH, vocab=257):
        state, report = one_step(recipe, states[-1], batch)
        states.append(state)
        reports.append(report)
    return recipe, states, reports


def one_step(recipe, state, batch):
    """The state and the report after a step, on the host."""
    with jax.set_mesh(recipe.mesh):
        step = runs.make_train_step(recipe)
        after = step(runs.put_state(recipe, state), runs.put_batch(recipe, batch))
    return jax.device_get(after)


def test_the_history_has_the_largest_magnitudes_of_the_last_steps():
    keys = dict(batch__accumulation=2, products__history=3)
    _, states, _ = delayed_steps(4, dict(fsdp=2), **keys)
    histories = [np.asarray(state.extra[quantized.RANGES]) for state in states]
    weights = 7  # query, key, value, out; gate, up, down
    assert histories[0].shape == (3, weights, MODEL["num_layers"], 3) and not histories[0].any()
    for step in range(1, 5):
        steps = min(step, 3)
        assert (histories[step][:steps] > 0).all() and not histories[step][steps:].any()
        np.testing.assert_array_equal(histories[step][1:], histories[step - 1][:-1])
        matrices = [leaf for leaf in jax.tree.leaves(states[step - 1].params["blocks"])
                    if leaf.ndim > 2]  # fmt: skip
        largest = [np.abs(leaf).reshape(leaf.shape[0], -1).max(axis=1) for leaf in matrices]
        np.testing.assert_array_equal(histories[step][0, :, :, 1], largest)


def test_scales_are_of_the_history():
    """With ranges that are far too small, numbers are clipped."""
    recipe, states, reports = delayed_steps(2)
    wrong = np.full_like(states[1].extra[quantized.RANGES], 1e-3)
    batch = packed.batches(2, rows=ROWS, length=LENGTH, vocab=257)[1]
    _, report = one_step(recipe, states[1]._replace(extra={quantized.RANGES: wrong}), batch)
    assert abs(float(report.loss) / float(reports[1].loss) - 1) > 1e-3


def test_a_refused_step_leaves_the_history():
    transform = delayed_scaling.make(2, 1, 1)
    found = Gradients(*[None] * 6, amax=jnp.full((1, 1, 3), 5.0))
    state = transform.after(transform.init(), found, jnp.bool_(True))
    assert state[:, 0, 0].tolist() == [[5, 5, 5], [0, 0, 0]]
    bad = found._replace(amax=jnp.full((1, 1, 3), jnp.inf))
    assert np.array_equal(transform.after(state, bad, jnp.bool_(False)), state)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (dict(products__format="fp9"), "products.format='fp9' is unknown"),
        (dict(products__block=0), "products.block=0 must be at least 1"),
        (
            dict(products__format="int8", products__granularity="tensor"),
            "products.gather='fp8' with products.format='int8'",
        ),
        (dict(products__granularity="channel"), "use 'tensor', 'block' with 'fp8'"),
        (
            dict(products__format="", products__gather="", products__granularity="block"),
            "products.granularity='block' has no effect",
        ),
        (
            dict(products__format="", products__scaling="delayed"),
            "products.scaling='delayed' with products.format=''",
        ),
        (
            dict(products__scaling="delayed", mesh__stage=2, mesh__fsdp=1, batch__accumulation=2),
            "products.scaling='delayed' with mesh.stage=2",
        ),
        (dict(sharding__layout="zero2"), "products.gather='fp8' gathers nothing with layout"),
        (
            dict(products__granularity="block", products__block=48),
            "products.block=48 does not divide model.width=64 over 2 devices or turns, 32 on each: "
            "use a block of 16",
        ),
    ],
)  # fmt: skip
def test_bad_sections_name_the_remedy(keys, said):
    with pytest.raises(ConfigError) as caught:
        make_config("fp8", dict(fsdp=2), **keys)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("chip", "section", "said"),
    [
        ("h100_sxm", dict(format="fp8"), "fp8, e4m3 forward and e5m2 gradients"),
        ("tpu_v5e", dict(format="int8", granularity="channel"), "int8 forward per channel"),
        ("tpu_v5e", dict(gather="fp8"), "weights gathered in e4m3"),
        ("h100_sxm", {}, ""),
    ],
)
def test_a_chip_with_units_is_said_to_have_them(chip, section, said):
    assert quantized.units_text(quantized.ProductsConfig(**section), hardware.CHIPS[chip]) == said


@pytest.mark.parametrize("chip", ["a100_80gb", "tpu_v4", "tpu_v5e", "tpu_v5p", "tpu_v6e"])
def test_a_chip_without_units_is_named(chip):
    text = quantized.units_text(quantized.ProductsConfig(format="fp8"), hardware.CHIPS[chip])
    assert f"{hardware.CHIPS[chip].name} multiplies fp8 no faster than bfloat16" in text
    assert "products.gather='fp8' alone saves traffic" in text


def test_codes_are_gathered_as_bytes():
    """The forward and the backward pass gather one byte for each number of the weight."""
    place = make_place("fsdp 2")
    numbers = quantized.make(quantized.ProductsConfig(**CASES["fp8 gathered"]))
    weight = jax.ShapeDtypeStruct(
        (D, N, H), jnp.float32, sharding=NamedSharding(place.mesh, PartitionSpec("fsdp"))
    )
    gather = lambda weight: dot.gathered(  # noqa: E731
        weight, jnp.bfloat16, numbers=numbers, sides=(True, False, False)
    )
    with jax.set_mesh(place.mesh):
        text = jax.jit(gather).lower(weight).compile().as_text()
    gathers = [line for line in text.splitlines() if " all-gather(" in line]
    assert len(gathers) == 1 and f"u8[{D},{N},{H}]" in gathers[0].replace("{2,1,0}", "")


def test_the_head_is_gathered_in_fp8_unless_only_the_layers_are():
    make = lambda gather: quantized.make(quantized.ProductsConfig(gather=gather))  # noqa: E731
    assert make("fp8").of_head.weight == quantized.E4M3 and make("fp8").of_head.gathers_codes
    assert make("fp8_layers").of_head == quantized.UNROUNDED == make("").of_head
    assert make("fp8_layers").weight == quantized.E4M3 and make("fp8_layers").gathers_codes

"""Formats of moments: what a code stands for, updates beside fp32's, and where the state lives."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from support.compare import assert_same

from llmx import sharding
from llmx.model import apply, families
from llmx.runtime import bounds
from llmx.sharding import trees
from llmx.step import moments, optimizers, rounding

SIGMAS = 5  # of a mean of independent numbers
LARGEST_STEP = 1 / 8  # of a code, relative to the number: three bits of mantissa
OCTAVES = {True: 16, False: 32}  # by whether there is a sign


@pytest.fixture(scope="module")
def encode():
    def encoded(x, step, signed, dim):
        random = rounding.random_bits(x.shape, step=step, name="m")
        return moments.encode_8bit(x, random, signed=signed, dim=dim)

    return jax.jit(encoded, static_argnums=(2, 3))


def numbers(shape, signed, seed=0, spread=2.0):
    generator = np.random.default_rng(seed)
    x = generator.normal(size=shape) * np.exp(spread * generator.normal(size=shape))
    return (x if signed else np.square(x)).astype(np.float32)


def neighbours(x, signed):
    """By the definition, in float64: the codes' numbers around |x| [D, ...], and the smallest of
    each block of 32 along D."""
    size = np.abs(x.astype("f8"))
    exponent = np.floor(np.log2(np.where(size > 0, size, 1)))
    step = 2.0 ** (exponent - 3)
    below = np.floor(size / step) * step
    above = np.where(below == size, size, below + step)
    D, *rest = x.shape
    rows = -(-D // 32) * 32 if D > 32 else D
    block = min(32, D)
    padded = np.zeros((rows, *rest))
    padded[:D] = above
    largest = padded.reshape(-1, block, *rest).max(1)
    top = np.floor(np.log2(np.where(largest > 0, largest, 1))) + 1  # above the last code
    codes = 8 * OCTAVES[signed] - 1
    upper = 8 * top - codes  # of the smallest code: octave and eighth
    smallest = 2.0 ** np.floor(upper / 8) * (1 + (upper % 8) / 8)
    return below, above, np.repeat(smallest, block, 0)[:D]


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("shape", [(64, 40), (40, 8), (8, 16), (96,)])
def test_a_number_becomes_a_neighbouring_code(encode, shape, signed):
    x = numbers(shape, signed)
    found = np.asarray(moments.decode_8bit(encode(x, 0, signed, 0)), "f8")
    below, above, smallest = neighbours(x, signed)
    inside = np.abs(x) >= smallest
    assert inside.mean() > 0.98
    size = np.abs(found)
    assert ((size == below) | (size == above))[inside].all()
    assert (np.abs(found - x) <= LARGEST_STEP * np.abs(x))[inside].all()
    assert (np.sign(found) == np.sign(x))[inside].all()


@pytest.mark.parametrize("signed", [True, False])
def test_the_mean_of_many_is_the_number(encode, signed):
    x, times = numbers((64, 64), signed, spread=0.5), 400
    x = np.where(np.abs(x) > 0.01, x, 0.01)  # none below the smallest code
    found = sum(
        np.asarray(moments.decode_8bit(encode(x, i, signed, 0)), "f8") for i in range(times)
    )
    below, above, smallest = neighbours(x, signed)
    assert (np.abs(x) >= smallest).all()
    error = (found / times - x) / np.maximum(above - below, 1e-30)
    assert np.abs(error).max() < (SIGMAS * 0.5 + 1) / np.sqrt(times)
    assert abs(error.mean()) < SIGMAS * 0.5 / np.sqrt(times * x.size)


def test_below_the_smallest_code(encode):
    """A first moment is it or zero, right on average; a second moment is never zero."""
    x = np.full((32, 2048), 2.0**-17, np.float32)
    x[0] = 1.0
    found = np.asarray(moments.decode_8bit(encode(x, 0, True, 0)))[1:]
    (zero, smallest) = np.unique(found)
    assert zero == 0 and smallest == neighbours(x, True)[2][1, 0]
    share = 2.0**-17 / smallest
    deviation = np.sqrt(share * (1 - share) / found.size)
    assert abs((found > 0).mean() - share) < SIGMAS * deviation
    x = np.full((32, 64), 1e-15, np.float32)
    x[0] = 1.0
    found = np.asarray(moments.decode_8bit(encode(x, 0, False, 0)))[1:]
    assert (found == neighbours(x, False)[2][1, 0]).all() and found[0, 0] > 0


@pytest.mark.parametrize("signed", [True, False])
def test_zeros_stay_zero_and_codes_stay_what_they_are(encode, signed):
    x = numbers((64, 64), signed)
    x[:, 5], x[7] = 0, 0
    once = encode(x, 0, signed, 0)
    value = np.asarray(moments.decode_8bit(once))
    assert (value[:, 5] == 0).all() and (value[7] == 0).all()
    assert not np.asarray(encode(x * 0, 0, signed, 0).codes).any()
    np.testing.assert_array_equal(moments.decode_8bit(encode(value, 1, signed, 0)), value)


@pytest.mark.parametrize("signed", [True, False])
def test_what_is_not_finite_is_seen_and_the_largest_numbers_stay_finite(encode, signed):
    x = numbers((64, 8), signed)
    x[3, 0], x[40, 1] = np.inf, np.nan
    x[:, 2] = np.finfo(np.float32).max
    found = np.asarray(moments.decode_8bit(encode(x, 0, signed, 0)))
    assert np.isinf(found[3, 0]) and np.isinf(found[40, 1])
    assert np.isfinite(found[:, 2:]).all() and (found[:, 2] > 0.9 * x[:, 2]).all()


# ----------------------------------------------------------------------------------------- updates

AXES = {
    "blocks": {
        "query": ("layers", "embed", "heads", "head_dim"),
        "out": ("layers", "heads", "head_dim", "embed"),
        "scale": ("layers", "norm"),
    },
    "embedding": ("vocab", "embed"),
}
SHAPES = {
    "blocks": {"query": (2, 64, 4, 8), "out": (2, 4, 8, 64), "scale": (2, 64)},
    "embedding": (128, 64),
}


def draw(seed: int):
    generator = np.random.default_rng(seed)
    one = lambda shape: generator.normal(size=shape).astype(np.float32)  # noqa: E731
    return jax.tree.map(one, SHAPES, is_leaf=lambda shape: isinstance(shape, tuple))


def make(name: str, kept: str, param=None, **changes):
    values = dict(name=name, moments=kept, schedule="constant", warmup_steps=0) | changes
    config = optimizers.OptimizerConfig(**values)
    return optimizers.make(config, axes=AXES, total_steps=100, param=param).whole


def updated(optimizer, num: int = 8, dtype=jnp.float32):
    """Updates and state after gradients that have a mean and noise."""
    cast = lambda tree: jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), tree)  # noqa: E731
    params, mean = cast(draw(0)), draw(1)
    update, state = jax.jit(optimizer.update), optimizer.init(params)
    for seed in range(num):
        grads = jax.tree.map(lambda m, noise: m + 0.5 * noise, mean, draw(2 + seed))
        updates, state = update(cast(grads), state, params)
    return updates, state


@pytest.mark.parametrize(("kept", "bound"), [("bf16", 0.02), ("int8", 0.12)])
@pytest.mark.parametrize("name", ["adamw", "lamb", "muon"])
def test_updates_are_fp32s_within_the_steps_of_a_format(name, kept, bound):
    exact, _ = updated(make(name, "fp32", learning_rate=1.0))
    found, state = updated(make(name, kept, learning_rate=1.0))
    errors = {
        path: float(np.linalg.norm(a - b) / np.linalg.norm(b))
        for (path, a), b in zip(trees.named(found).items(), jax.tree.leaves(exact), strict=True)
    }
    assert all(error < bound for error in errors.values()), errors
    assert errors["blocks/query"] > 1e-5  # they are not the same
    small = [leaf for path, leaf in trees.named(state).items() if path.endswith("scale")]
    assert {str(leaf.dtype) for leaf in small if leaf.ndim == 2} == {
        "bf16": {"bfloat16"}, "int8": {"float32"}
    }[kept]  # fmt: skip


@pytest.mark.parametrize("kept", ["bf16", "int8"])
def test_signs_of_lion_are_mostly_fp32s(kept):
    exact, _ = updated(make("lion", "fp32", learning_rate=1.0, weight_decay=0.0))
    found, _ = updated(make("lion", kept, learning_rate=1.0, weight_decay=0.0))
    same = [(a == b).mean() for a, b in zip(*map(jax.tree.leaves, (found, exact)), strict=True)]
    assert min(same) > 0.97


@pytest.mark.parametrize("kept", ["bf16", "int8"])
def test_a_second_moment_falls_with_its_gradients(kept):
    """By a thousandth at a time, which rounding to nearest loses (b2 = 0.999)."""
    shape, first, rest = (32, 512), 10.0, 4000
    axes = {"w": ("embed", "mlp")}
    adam = optax.scale_by_adam(b1=0.9, b2=0.999)
    optimizer = moments.kept_as(kept, adam, axes)
    params = {"w": jnp.zeros(shape)}

    def run(init, update):
        def step(state, number):
            size = jnp.where(number == 0, first, 1.0)
            return update({"w": jnp.full(shape, size)}, state)[1], None

        return jax.jit(lambda: jax.lax.scan(step, init, jnp.arange(rest))[0])()

    def nearest(grads, state):
        updates, new = adam.update(grads, moments.decoded(state))
        return updates, jax.tree.map(
            lambda leaf: leaf.astype(jnp.bfloat16) if leaf.dtype == jnp.float32 else leaf, new
        )

    start = jax.tree.map(
        lambda leaf: leaf.astype(jnp.bfloat16) if leaf.dtype == jnp.float32 else leaf,
        adam.init(params),
    )
    exact = run(adam.init(params), adam.update).nu["w"]
    lost = run(start, nearest).nu["w"].astype(jnp.float32)
    found = run(optimizer.init(params), lambda g, s: optimizer.update(g, s, params)).inner
    found = moments.decoded(found).nu["w"]
    assert abs(found.mean() / exact.mean() - 1) < 0.02
    assert abs(lost.mean() / exact.mean() - 1) > 0.1


def test_bf16_parameters_and_gradients_are_updated_in_fp32():
    """With moments in fp32, the updates are those of the same numbers in fp32."""
    found, state = updated(make("adamw", "fp32", jnp.bfloat16), dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype("float32")}
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(state)} == {"float32", "int32"}
    plain = make("adamw", "auto")
    rounded = lambda tree: jax.tree.map(  # noqa: E731
        lambda leaf: jnp.asarray(leaf, jnp.bfloat16).astype(jnp.float32), tree
    )
    params, mean, state = rounded(draw(0)), draw(1), plain.init(rounded(draw(0)))
    for seed in range(8):
        grads = jax.tree.map(lambda m, noise: m + 0.5 * noise, mean, draw(2 + seed))
        wanted, state = jax.jit(plain.update)(rounded(grads), state, params)
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_without_a_format_the_optimizer_is_optaxs_own():
    for auto in ("auto", "fp32"):
        state = make("adamw", auto).init(draw(0))
        assert isinstance(state[0], optax.ScaleByAdamState)


@pytest.mark.parametrize(("precision", "kept"), [("float32", "fp32"), ("bfloat16", "bf16")])
def test_auto_is_the_format_of_the_parameters(precision, kept):
    assert moments.resolved("auto", jnp.dtype(precision)) == kept
    assert moments.resolved("int8", jnp.dtype(precision)) == "int8"


# --------------------------------------------------------------------------------- state on meshes


@pytest.mark.parametrize("kept", ["bf16", "int8"])
@pytest.mark.parametrize("layout", ["zero1", "zero3", "hsdp"])
def test_codes_are_split_as_their_parameters(layout, kept):
    config = families.preset(
        "llama3", vocab_size=64, vocab_multiple=64, width=128, num_layers=2, num_heads=4,
        head_dim=64, num_kv_heads=2, mlp_dim=256,
    )  # fmt: skip
    shapes, axes = apply.abstract_parameters(config)
    mesh = sharding.make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    to = sharding.shardings(
        shapes, mesh, sharding.make_layout(layout), rules=axes, table="optimizer"
    )
    optimizer = optimizers.make(
        optimizers.OptimizerConfig(moments=kept), axes=axes, total_steps=10
    ).whole
    state = trees.named(optimizers.abstract_state(optimizer, shapes, to))
    like = trees.named(jax.eval_shape(optimizer.init, shapes))
    assert {name: (leaf.shape, leaf.dtype) for name, leaf in state.items()} == {
        name: (leaf.shape, leaf.dtype) for name, leaf in like.items()
    }
    num_codes = 0
    for owner, of in trees.named(to).items():
        for moment in ("mu", "nu"):
            name = f"inner/0/{moment}/{owner}"
            if name in state:
                assert state[name].sharding == of
                continue
            codes, scales = state[f"{name}/codes"], state[f"{name}/scales"]
            num_codes += 1
            assert codes.sharding == of and codes.dtype == {"mu": jnp.int8, "nu": jnp.uint8}[moment]
            assert codes.size == 32 * scales.size and scales.shape[0] in (2, codes.shape[0] // 32)
            shards = scales.sharding.shard_shape(scales.shape)
            ways = codes.size // np.prod(codes.sharding.shard_shape(codes.shape))
            # Blocks of heads cross shards (4 in one), those of all other parameters do not.
            whole = scales.size // np.prod(shards)
            assert whole == ways or "value" in name or "key" in name or "embedding" in name, name
    assert num_codes == (0 if kept == "bf16" else 2 * 9)


@pytest.mark.parametrize("kept", ["bf16", "int8"])
@pytest.mark.parametrize("param", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", [dict(fsdp=4, tensor=2), dict(fsdp=8), dict(data=2, fsdp=4)])
def test_eight_devices_update_as_one_bit_for_bit(kept, param, sizes):
    """With equal gradients. Blocks cross shards of `embed` on eight devices."""
    dtype = jnp.dtype(param)
    optimizer, how = make("adamw", kept, dtype, learning_rate=0.01), rounding.of(dtype)

    def train(mesh):
        to = sharding.shardings(
            draw(0), mesh, sharding.make_layout("zero3"), rules=AXES, table="optimizer"
        )
        put = lambda tree: jax.tree.map(  # noqa: E731
            lambda leaf, to: jax.device_put(jnp.asarray(leaf, dtype), to), tree, to
        )
        params = put(draw(0))
        abstract = optimizers.abstract_state(optimizer, params, to)
        state_to = jax.tree.map(lambda leaf: leaf.sharding, abstract)
        state = jax.jit(optimizer.init, out_shardings=state_to)(params)

        def step(params, state, grads, number):
            updates, state = optimizer.update(grads, state, params)
            return how.add(params, updates, how.seed(number)), state

        step = jax.jit(step, out_shardings=(to, state_to))
        for seed in range(1, 4):
            params, state = step(params, state, put(draw(seed)), jnp.int32(seed))
        return jax.device_get((params, state)), step.lower(
            params, state, put(draw(1)), jnp.int32(0)
        )

    split, lowered = train(sharding.make_mesh(sizes, axis_type=AxisType.Auto))
    one, _ = train(
        sharding.make_mesh({"data": 1}, devices=jax.devices()[:1], axis_type=AxisType.Auto)
    )
    assert_same(split, one)
    # What is sent is scales and maxima of blocks that cross shards: nothing as large as a moment.
    sent = re.findall(
        r"= (\w+)\[([\d,]*)\]\S* (?:all-gather|all-reduce|all-to-all)\(",
        lowered.compile().as_text(),
    )
    sizes = [int(np.prod([int(n) for n in dims.split(",") if n])) for _, dims in sent]
    assert max(sizes, default=0) <= 2 * 64 * 64 // 32, sent
    if kept == "bf16":
        assert not sent


def test_the_planners_bytes_are_those_of_the_state():
    params = {"w": jnp.zeros((64, 64))}
    for kept in ("fp32", "bf16", "int8"):
        state = moments.kept_as(kept, optax.scale_by_adam(), {"w": ("embed", "mlp")}).init(params)
        num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state) if leaf.ndim)
        assert num_bytes == 2 * 64 * 64 * moments.number_bytes(kept, jnp.float32)


# ---------------------------------------------------------------------------------------- problems


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(moments="int4"), ["optimizer.moments='int4'", "auto, fp32, bf16, int8"]),
        (
            dict(moments="int8", name="adafactor"),
            ["optimizer.moments='int8'", "'adafactor'", "rows and columns", "'auto'"],
        ),
    ],
)
def test_problems_name_value_limit_and_remedy(changes, words):
    (problem,) = optimizers.problems(optimizers.OptimizerConfig(**changes))
    assert all(word in problem for word in words), problem
    assert bounds.problems(optimizers.OptimizerConfig(), "optimizer.") == []

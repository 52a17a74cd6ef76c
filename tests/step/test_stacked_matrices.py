"""Rules of one matrix hold for each layer's and each expert's own: what optax does to an unstacked
dict of 2-D matrices is what is done to stacked arrays, however they are split."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from optax import contrib

from llmx import sharding
from llmx.checkpoint.manifest import Mismatch, describe
from llmx.pipeline.permutation import IDENTITY
from llmx.sharding import stacks, trees
from llmx.step import factored, moments, offload, optimizers

TOLERANCE = 1e-5  # fp32 means in another order; parameters are of size 1
MUON_TOLERANCE = 1e-4  # see tests/step/test_optimizers.py
RATE, DECAY = 0.1, 0.5

# Heads below and above 128 numbers, and what is no matrix though two of its dimensions are large.
AXES = {
    "blocks": {
        "up": ("layers", "embed", "mlp"),
        "key": ("layers", "embed", "kv_heads", "head_dim"),
        "query": ("layers", "embed", "heads", "head_dim"),
        "out": ("layers", "heads", "head_dim", "embed"),
        "query_bias": ("layers", "heads", "head_dim"),
        "scale": ("layers", "norm"),
        "router": ("layers", "embed", "router"),
        "experts": ("layers", "experts", "embed", "mlp"),
        "expert_bias": ("layers", "experts", "mlp"),
        "adapter": ("layers", "rank", "heads", "head_dim"),
    },
    "first": {
        "latent": ("first", "embed", "latent"),
        "up": ("first", "embed", "kv_heads", "head_dim"),
    },
    "embedding": ("vocab", "embed"),
    "positions": ("positions", "embed"),
    "norm": ("norm",),
}  # fmt: skip
D = 128


def shapes_of(layers: int, heads: int, size: int, experts: int = 2) -> dict:
    return {
        "blocks": {
            "up": (layers, D, 136), "key": (layers, D, 2, size), "query": (layers, D, heads, size),
            "out": (layers, heads, size, D), "query_bias": (layers, heads, size),
            "scale": (layers, D), "router": (layers, D, experts),
            "experts": (layers, experts, D, 144), "expert_bias": (layers, experts, 144),
            "adapter": (layers, 4, heads, size),
        },
        "first": {"latent": (2, D, 40), "up": (2, D, 4, 40)},
        "embedding": (136, D), "positions": (160, D), "norm": (D,),
    }  # fmt: skip


SHAPES = {
    "heads under 128": shapes_of(layers=4, heads=4, size=40),
    "heads of 128": shapes_of(layers=2, heads=2, size=128),
    "more layers than rows": shapes_of(layers=132, heads=2, size=64),
    "more experts than rows": shapes_of(layers=2, heads=2, size=64, experts=130),
}
IS_SHAPE = lambda leaf: isinstance(leaf, tuple)  # noqa: E731


def drawn(shapes, seed: int, size: float = 1.0) -> dict:
    """Of another size in each layer, so that a mean over layers is seen."""
    random = np.random.default_rng(seed)

    def one(shape):
        sizes = np.exp(0.5 * random.normal(size=(shape[0], *[1] * (len(shape) - 1))))
        return (size * random.normal(size=shape) * sizes).astype(np.float32)

    return jax.tree.map(one, shapes, is_leaf=IS_SHAPE)


def made(name: str):
    config = optimizers.OptimizerConfig(
        name=name, learning_rate=RATE, schedule="constant", warmup_steps=0, weight_decay=DECAY,
        eps=1e-3,
    )  # fmt: skip
    return optimizers.make(config, axes=AXES, total_steps=100).whole


# What is stacked, and where the rows of a matrix end, written out: not by the code under test.
STACKED = {name: 1 for name in AXES["blocks"]} | {"experts": 2, "expert_bias": 2}
ROWS = {"up": 1, "key": 1, "query": 1, "out": 2, "router": 1, "experts": 1, "adapter": 1}


def apart(tree) -> dict:
    """{"blocks/up 0": matrix, ...}: each layer's and expert's own matrix [rows, columns], or
    vector."""
    found = {}
    for path, array in trees.named(tree).items():
        stack, _, name = path.rpartition("/")
        num, rows = (STACKED[name], ROWS.get(name, 0)) if stack == "blocks" else (bool(stack), 1)
        if path == "norm":
            rows = 0
        stacked = array.shape[:num]
        for at in np.ndindex(stacked):
            one = np.asarray(array[at])
            matrix = (math.prod(one.shape[:rows]), -1) if rows else (-1,)
            found[" ".join([path, *map(str, at)])] = one.reshape(matrix)
    return found


def decays(key: str) -> bool:
    return not any(word in key for word in ("bias", "scale", "norm", "positions"))


@functools.cache
def plain(name: str, decay: float):
    """The same optimizer by optax, of one matrix or vector."""
    tail = optax.add_decayed_weights(decay), optax.scale_by_learning_rate(RATE)
    if name == "adafactor":
        return optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0), *tail)
    adam = optax.scale_by_adam(b1=0.9, b2=0.95, eps=1e-3)
    return optax.chain(adam, tail[0], optax.scale_by_trust_ratio(), tail[1])


@functools.cache
def stepped(optimizer):
    @jax.jit
    def update(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return update


def train(update, params, state, shapes):
    for seed in range(1, 4):
        params, state = update(params, state, drawn(shapes, seed))
    return params


@functools.cache
def wanted(name: str, case: str, size: float) -> dict:
    params, *grads = (apart(drawn(SHAPES[case], seed, 1.0 if seed else size)) for seed in range(4))
    for key in params:
        one = plain(name, DECAY if decays(key) else 0.0)
        state = one.init(params[key])
        for grad in grads:
            params[key], state = stepped(one)(params[key], state, grad[key])
    return params


def assert_as_apart(found, name: str, case: str, size: float = 1.0):
    want, got = wanted(name, case, size), apart(jax.device_get(found))
    assert set(got) == set(want)
    for key, array in want.items():
        np.testing.assert_allclose(got[key], array, rtol=TOLERANCE, atol=TOLERANCE, err_msg=key)


@pytest.mark.parametrize("case", SHAPES)
def test_adafactor_of_a_stack_is_optaxs_of_each_matrix(case):
    optimizer, params = made("adafactor"), drawn(SHAPES[case], 0)
    found = train(stepped(optimizer), params, optimizer.init(params), SHAPES[case])
    assert_as_apart(found, "adafactor", case)


@pytest.mark.parametrize("size", [1e-4, 1.0, 100.0])
def test_lamb_of_a_stack_is_optaxs_of_each_matrix(size):
    """Of dense first layers and of experts too, however far weights and updates are apart."""
    case = "heads under 128"
    optimizer, params = made("lamb"), drawn(SHAPES[case], 0, size)
    found = train(stepped(optimizer), params, optimizer.init(params), SHAPES[case])
    assert_as_apart(found, "lamb", case, size)


@pytest.mark.parametrize("name", ["adafactor", "lamb"])
def test_layer_by_layer_is_the_same(name):
    case, optimizer = "heads under 128", made(name)
    params = drawn(SHAPES[case], 0)

    def apply(accepted, grads, old, layers=None):
        params, state = old
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    @jax.jit
    def update(params, state, grads):
        by_layer = offload.layer_by_layer(apply, stages=2)
        return by_layer(jnp.array(True), grads, (params, state))

    found = train(update, params, optimizer.init(params), SHAPES[case])
    assert_as_apart(found, name, case)


@pytest.mark.parametrize("layout", ["zero1", "zero3"])
@pytest.mark.parametrize("name", ["adafactor", "lamb"])
def test_on_a_mesh_it_is_the_same(name, layout):
    case, optimizer = "heads under 128", made(name)
    mesh = sharding.make_mesh({"fsdp": 2, "expert": 2, "tensor": 2}, axis_type=AxisType.Auto)
    shapes = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), SHAPES[case], is_leaf=IS_SHAPE
    )
    to = sharding.shardings(
        shapes, mesh, sharding.make_layout(layout), rules=AXES, table="optimizer"
    )
    abstract = optimizers.abstract_state(optimizer, shapes, to)
    state_to = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    params = jax.device_put(drawn(SHAPES[case], 0), to)
    state = jax.jit(optimizer.init, out_shardings=state_to)(params)
    step = jax.jit(stepped(optimizer), out_shardings=(to, state_to))
    update = lambda params, state, grads: step(params, state, jax.device_put(grads, to))  # noqa: E731
    assert_as_apart(train(update, params, state, SHAPES[case]), name, case)


def test_adafactor_keeps_means_of_whole_matrices():
    """Rows and columns of the matrix have at least 128 numbers, whatever its heads have."""
    shapes = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), SHAPES["heads under 128"],
        is_leaf=IS_SHAPE,
    )  # fmt: skip
    state = jax.eval_shape(made("adafactor").init, shapes)[0]
    row, col, v = (trees.named(tree) for tree in (state.v_row, state.v_col, state.v))
    for name, (of_row, of_col) in {
        "blocks/query": ((4, 128, 1, 1), (4, 1, 4, 40)),
        "blocks/out": ((4, 1, 1, 128), (4, 4, 40, 1)),
        "blocks/up": ((4, 128, 1), (4, 1, 136)),
        "blocks/experts": ((4, 2, 128, 1), (4, 2, 1, 144)),
        "first/up": ((2, 128, 1, 1), (2, 1, 4, 40)),
        "embedding": ((1, 128), (136, 1)),
    }.items():
        assert (row[name].shape, col[name].shape, v[name].shape) == (of_row, of_col, (1,)), name
    for name in ("blocks/key", "blocks/query_bias", "blocks/router", "blocks/expert_bias", "norm"):
        whole = trees.named(shapes)[name].shape  # 80 columns, vectors, and few experts
        assert (row[name].shape, col[name].shape, v[name].shape) == ((1,), (1,), whole), name
    assert factored.LEAST == 128


def test_a_state_that_was_factored_otherwise_is_refused():
    """Also that of a matrix whose means were the same, so that no shape is taken for another."""
    params = {"w": jnp.zeros((130, 128, 2, 128)), "up": jnp.zeros((2, 128, 256))}
    axes = {"w": ("layers", "embed", "kv_heads", "head_dim"), "up": ("layers", "embed", "mlp")}
    _, document = describe(3, optax.scale_by_factored_rms().init(params), {}, IDENTITY)
    wanted = jax.eval_shape(factored.scale_by_factored_rms(axes).init, params)
    with pytest.raises(Mismatch) as error:
        document.wanted(wanted, prefix="", order=IDENTITY)
    for part in (
        "v_row/w: saved float32[128, 2, 128], wanted float32[130, 128, 1, 1]",
        "v_row/up: saved float32[2, 128], wanted float32[2, 128, 1]",
        "start_from",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize("stack", ["layers", "first"])
def test_muon_orthogonalises_both_factors_of_an_adapter_and_no_scales(stack):
    """B [rank, heads, size] has no width, and scales of groups along it are no matrix."""
    axes = {
        "down": (stack, "embed", "rank"), "up": (stack, "rank", "heads", "head_dim"),
        "experts": (stack, "experts", "embed", "mlp"), "scales": (stack, "groups", "mlp"),
    }  # fmt: skip
    shapes = {"down": (2, 16, 4), "up": (2, 4, 3, 8), "experts": (2, 3, 16, 8), "scales": (2, 2, 8)}
    params, grads = drawn(shapes, 0), drawn(shapes, 1)
    config = optimizers.OptimizerConfig(
        name="muon", learning_rate=RATE, schedule="constant", warmup_steps=0, weight_decay=DECAY
    )
    optimizer = optimizers.make(config, axes=axes, total_steps=10).whole
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    one = contrib.muon(RATE, beta=0.95, weight_decay=DECAY, consistent_rms=0.2)
    for name, stacked, matrix in (
        ("down", 1, (16, 4)), ("up", 1, (4, 24)), ("experts", 2, (16, 8))
    ):  # fmt: skip
        for at in np.ndindex(shapes[name][:stacked]):
            param, grad = (jnp.asarray(t[name][at].reshape(matrix)) for t in (params, grads))
            want, _ = one.update({"w": grad}, one.init({"w": param}), {"w": param})
            np.testing.assert_allclose(
                updates[name][at].reshape(matrix), want["w"], atol=MUON_TOLERANCE
            )
    adam = optax.nadam(RATE, b1=0.9, b2=0.95)
    want, _ = adam.update(grads["scales"], adam.init(params["scales"]))
    np.testing.assert_allclose(updates["scales"], want, rtol=TOLERANCE)


@pytest.mark.parametrize(
    ("axes", "num", "sides"),
    [
        (("layers", "embed", "heads", "head_dim"), 1, ((1,), (2, 3))),
        (("first", "heads", "head_dim", "embed"), 1, ((1, 2), (3,))),
        (("layers", "experts", "mlp", "embed"), 2, ((2,), (3,))),
        (("layers", "experts", "norm"), 2, ((2,),)),
        (("layers", "heads", "head_dim"), 1, ((1, 2),)),
        (("layers", "groups", "groups", "norm"), 1, ((1, 2), (3,))),
        (("vocab", "embed"), 0, ((0,), (1,))),
        (("embed", None, None), 0, ((0,), (1, 2))),  # of a program's own model
        ((None, None, "embed"), 0, ((0, 1), (2,))),
        (("norm",), 0, ((0,),)),
        ((), 0, ()),
    ],
)
def test_sides_of_a_matrix(axes, num, sides):
    assert (stacks.num_stacked(axes), stacks.sides(axes)) == (num, sides)


def test_blocks_of_eight_bits_lie_in_one_expert():
    assert moments.block_dim((2, 256, 64, 32), ("layers", "experts", "embed", "mlp")) == 2
    assert moments.block_dim((256, 64, 32), ("first", "embed", "mlp")) == 1

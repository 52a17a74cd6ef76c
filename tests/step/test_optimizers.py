"""Which parameters an optimizer treats how, the schedules' key steps, and where its state lives."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec
from optax import contrib

from llmx import sharding
from llmx.model import apply, families
from llmx.runtime import bounds
from llmx.sharding import trees
from llmx.step import optimizers

# fp32 updates computed in another order; parameters are of size 0.1 to 1.
TOLERANCE = 1e-5
# Five iterations of Muon's orthogonalisation enlarge what rounding makes different.
MUON_TOLERANCE = 1e-4

TINY = dict(vocab_size=64, vocab_multiple=64, width=16, num_layers=2, num_heads=4, head_dim=8)
FAMILIES = {
    "gpt2": dict(num_kv_heads=4, mlp_dim=32),
    "llama3": dict(num_kv_heads=2, mlp_dim=32),
    "qwen3": dict(num_kv_heads=2, mlp_dim=32),
    "gemma2": dict(num_kv_heads=2, mlp_dim=32),
    "gemma3": dict(num_kv_heads=2, mlp_dim=32),
    "deepseek_v3": dict(mlp_dim=32, rope_dim=4),
    "gpt_oss": dict(num_kv_heads=2, num_experts=2, expert_dim=16),
}
OF_EXPERTS = [f"blocks/mlp/{name}" for name in ("router", "gate", "up", "down")]


def parameters_of(family: str):
    """Shapes and logical axes of a small decoder."""
    config = families.preset(family, **TINY, **FAMILIES[family])
    shapes, axes = apply.abstract_parameters(config)
    return shapes, axes


# ------------------------------------------------------------------------------------------- masks


@pytest.mark.parametrize("family", FAMILIES)
def test_matrices_decay_and_norms_biases_positions_do_not(family):
    _, axes = parameters_of(family)
    for name, decays in trees.named(optimizers.decay_mask(axes)).items():
        matrix = name.endswith("kernel") or name in ("embedding", "head", *OF_EXPERTS)
        assert decays == matrix, name


@pytest.mark.parametrize("name", ["adamw", "lion", "adafactor"])
def test_masked_parameters_do_not_shrink(name):
    """With gradients of zero only decay moves a parameter, by learning rate x decay."""
    shapes, axes = parameters_of("gpt2")
    config = optimizers.OptimizerConfig(
        name=name, learning_rate=0.1, schedule="constant", warmup_steps=0, weight_decay=0.5
    )
    optimizer = optimizers.make(config, axes=axes, total_steps=10).whole
    params = jax.tree.map(lambda leaf: jnp.ones(leaf.shape), shapes)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    mask = trees.named(optimizers.decay_mask(axes))
    for path, update in trees.named(updates).items():
        np.testing.assert_allclose(update, -0.05 if mask[path] else 0, rtol=TOLERANCE, err_msg=path)


def test_adafactor_clips_each_matrix_by_itself():
    """A layer with gradients 30 times as long as before moves no other: its update has a root mean
    square of 1, and the others are as without it."""
    config = optimizers.OptimizerConfig(
        name="adafactor", learning_rate=1.0, schedule="constant", warmup_steps=0, weight_decay=0.0
    )
    axes = {"w": ("layers", "embed", "mlp"), "e": ("layers", "experts", "embed", "mlp")}
    random = np.random.default_rng(0)
    usual = {"w": random.normal(size=(3, 16, 24)), "e": random.normal(size=(2, 3, 16, 24))}
    usual = {name: array.astype("f4") for name, array in usual.items()}
    spike = {"w": usual["w"] * np.float32([30, 1, 1])[:, None, None], "e": usual["e"].copy()}
    spike["e"][1, 2] *= 30

    optimizer = optimizers.make(config, axes=axes, total_steps=10).whole
    zeros = jax.tree.map(jnp.zeros_like, usual)
    _, state = optimizer.update(usual, optimizer.init(zeros), zeros)
    found, wanted = (optimizer.update(grads, state, zeros)[0] for grads in (spike, usual))

    def rms(array):
        return np.sqrt(np.mean(np.square(array), axis=(-2, -1)))

    np.testing.assert_allclose(rms(found["w"])[0], 1, rtol=TOLERANCE)
    np.testing.assert_allclose(rms(found["e"])[1, 2], 1, rtol=TOLERANCE)
    for name, others in (("w", np.s_[1:]), ("e", np.s_[0]), ("e", np.s_[1, :2])):
        np.testing.assert_allclose(found[name][others], wanted[name][others], rtol=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "b2", "wanted"),
    [("lion", 0, 0.99), ("adamw", 0, 0.95), ("lion", 0.9, 0.9), ("lamb", 0.999, 0.999)],
)
def test_the_second_momentum_is_the_optimizers_own(name, b2, wanted):
    assert optimizers.OptimizerConfig(name=name, b2=b2).beta2 == wanted


# --------------------------------------------------------------------------------------- schedules

PEAK, WARMUP, STEPS = 2.0, 10, 110


def rates(schedule: str, updates, **changes) -> list[float]:
    """Learning rates of these updates, counted from 1."""
    config = optimizers.OptimizerConfig(
        schedule=schedule, learning_rate=PEAK, warmup_steps=WARMUP, final_fraction=0.1, **changes
    )
    function = optimizers.make_schedule(config, total_steps=STEPS)
    return [float(function(update - 1)) for update in updates]


@pytest.mark.parametrize("schedule", optimizers.SCHEDULES)
def test_warmup_is_linear_to_the_peak_and_the_first_update_moves(schedule):
    assert rates(schedule, [1, 5, 10]) == pytest.approx([0.2, 1, PEAK])


@pytest.mark.parametrize(
    ("schedule", "updates", "expected"),
    [
        ("constant", [60, 110, 10**6], [PEAK, PEAK, PEAK]),
        ("cosine", [35, 60, 110, 200], [0.2 + 1.8 * (2 + 2**0.5) / 4, 1.1, 0.2, 0.2]),
        ("linear", [60, 110, 200], [1.1, 0.2, 0.2]),
        # The last fifth of 110 updates decays: 22, from 88 on.
        ("wsd", [11, 87, 88, 99, 110, 200], [PEAK, PEAK, PEAK, 1.1, 0.2, 0.2]),
    ],
)
def test_schedules_at_key_updates(schedule, updates, expected):
    assert rates(schedule, updates) == pytest.approx(expected)


def test_wsd_decay_can_be_given_and_never_starts_before_the_peak():
    assert rates("wsd", [99, 100, 105, 110], decay_steps=10) == pytest.approx(
        [PEAK, PEAK, 1.1, 0.2]
    )
    assert rates("wsd", [10, 60, 110], decay_steps=10**6) == pytest.approx([PEAK, 1.1, 0.2])


@pytest.mark.parametrize("schedule", optimizers.SCHEDULES)
def test_no_warmup_starts_at_the_peak(schedule):
    config = optimizers.OptimizerConfig(schedule=schedule, learning_rate=PEAK, warmup_steps=0)
    first = float(optimizers.make_schedule(config, total_steps=STEPS)(0))
    assert 0.98 * PEAK < first <= PEAK  # a decay may have taken its first step of 110


# -------------------------------------------------------------------------------------- optimizers

TOY_AXES = {
    "blocks": {
        "query": ("layers", "embed", "heads", "head_dim"),
        "out": ("layers", "heads", "head_dim", "embed"),
        "scale": ("layers", "norm"),
    },
    "embedding": ("vocab", "embed"),
}
LAYERS, WIDTH, HEADS, SIZE, VOCAB = 2, 16, 4, 8, 24


def toy_parameters(seed: int = 0):
    shapes = {
        "blocks": {
            "query": (LAYERS, WIDTH, HEADS, SIZE),
            "out": (LAYERS, HEADS, SIZE, WIDTH),
            "scale": (LAYERS, WIDTH),
        },
        "embedding": (VOCAB, WIDTH),
    }
    generator = np.random.default_rng(seed)
    draw = lambda shape: generator.normal(size=shape).astype(np.float32)  # noqa: E731
    return jax.tree.map(draw, shapes, is_leaf=lambda shape: isinstance(shape, tuple))


def toy_optimizer(name: str, **changes):
    config = optimizers.OptimizerConfig(name=name, schedule="constant", warmup_steps=0, **changes)
    return optimizers.make(config, axes=TOY_AXES, total_steps=100).whole


@pytest.mark.parametrize("name", optimizers.OPTIMIZERS)
def test_every_optimizer_decreases_a_loss(name):
    target = toy_parameters(1)
    optimizer = toy_optimizer(name, learning_rate=0.05, weight_decay=0.0)

    def loss_of(params):
        squares = jax.tree.map(lambda a, b: jnp.mean(jnp.square(a - b)), params, target)
        return sum(jax.tree.leaves(squares))

    @jax.jit
    def step(params, state):
        updates, state = optimizer.update(jax.grad(loss_of)(params), state, params)
        return optax.apply_updates(params, updates), state

    params = toy_parameters(0)
    state, start = optimizer.init(params), loss_of(params)
    for _ in range(30):
        params, state = step(params, state)
    assert loss_of(params) < 0.5 * start


def test_lamb_of_a_stack_is_optaxs_of_each_layer():
    """Whose trust ratios are within the bounds of ours."""
    values = dict(learning_rate=0.1, weight_decay=0.5, eps=1e-3)
    optimizer, params = toy_optimizer("lamb", **values), toy_parameters(0)
    state, apart, apart_states = optimizer.init(params), {}, {}
    plain = optax.lamb(0.1, b1=0.9, b2=0.95, eps=1e-3, weight_decay=0.5)
    bare = optax.lamb(0.1, b1=0.9, b2=0.95, eps=1e-3)  # norms do not decay

    def layers(tree):
        for name, leaf in tree["blocks"].items():
            for i in range(LAYERS):
                yield (name, i), leaf[i]
        yield ("embedding",), tree["embedding"]

    for key, leaf in layers(params):
        apart[key] = leaf
        apart_states[key] = (bare if "scale" in key else plain).init(leaf)
    for seed in range(1, 4):
        grads = toy_parameters(seed)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        for key, grad in layers(grads):
            one = bare if "scale" in key else plain
            update, apart_states[key] = one.update(grad, apart_states[key], apart[key])
            apart[key] = apart[key] + update
    for key, leaf in layers(params):
        np.testing.assert_allclose(leaf, apart[key], rtol=1e-5, atol=1e-6)


def test_muon_of_a_stack_is_muon_of_each_layers_matrix():
    params, grads = toy_parameters(0), toy_parameters(1)
    optimizer = toy_optimizer("muon", learning_rate=0.1, weight_decay=0.5)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    plain = contrib.muon(0.1, beta=0.95, weight_decay=0.5, consistent_rms=0.2)
    matrices = {"query": (WIDTH, HEADS * SIZE), "out": (HEADS * SIZE, WIDTH)}
    for name, shape in matrices.items():
        for layer in range(LAYERS):
            matrix, grad = (tree["blocks"][name][layer].reshape(shape) for tree in (params, grads))
            state = plain.init({"w": jnp.asarray(matrix)})
            want, _ = plain.update({"w": jnp.asarray(grad)}, state, {"w": jnp.asarray(matrix)})
            np.testing.assert_allclose(
                updates["blocks"][name][layer].reshape(shape), want["w"], atol=MUON_TOLERANCE
            )


def test_muon_leaves_embedding_and_norms_to_adam():
    params, grads = toy_parameters(0), toy_parameters(1)
    optimizer = toy_optimizer("muon", learning_rate=0.1, weight_decay=0.0)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    adam = optax.nadam(0.1, b1=0.9, b2=0.95)
    want, _ = adam.update(grads, adam.init(params), params)
    for got, expected in (
        (updates["embedding"], want["embedding"]),
        (updates["blocks"]["scale"], want["blocks"]["scale"]),
    ):
        np.testing.assert_allclose(got, expected, rtol=TOLERANCE)


# --------------------------------------------------------------------------------- state on meshes


def abstract_state(name: str, layout_name: str, shapes, axes, mesh):
    layout = sharding.make_layout(layout_name)
    config = optimizers.OptimizerConfig(name=name)
    optimizer = optimizers.make(config, axes=axes, total_steps=10).whole
    to = sharding.shardings(shapes, mesh, layout, rules=axes, table="optimizer")
    state = trees.named(optimizers.abstract_state(optimizer, shapes, to))
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state) == {
        path: (leaf.shape, leaf.dtype)
        for path, leaf in trees.named(jax.eval_shape(optimizer.init, shapes)).items()
    }
    return state, {path: leaf.sharding for path, leaf in state.items()}, trees.named(to)


@pytest.mark.parametrize("layout", sharding.LAYOUTS)
@pytest.mark.parametrize("name", ["adamw", "lion", "muon"])
def test_moments_are_split_as_the_optimizer_table_says(name, layout):
    shapes, axes = parameters_of("llama3")
    mesh = sharding.make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    state, found, parameters = abstract_state(name, layout, shapes, axes, mesh)
    num_moments = 0
    for path, leaf in state.items():
        owners = [owner for owner in parameters if path.endswith("/" + owner)]
        if not owners:
            assert leaf.size <= 3 and found[path].spec == PartitionSpec(), path  # counters
            continue
        num_moments += 1
        assert found[path] == parameters[max(owners, key=len)], path
    moments = {"adamw": 2, "lion": 1}
    matrices = sum("blocks" in path and path.endswith("kernel") for path in parameters)
    expected = moments[name] * len(parameters) if name in moments else (
        2 * len(parameters) - matrices  # Muon has one moment, the rest Adam's two
    )  # fmt: skip
    assert num_moments == expected


def test_adafactors_means_are_split_as_the_dimensions_that_they_have():
    config = families.preset("llama3", **TINY | dict(width=128), num_kv_heads=2, mlp_dim=256)
    shapes, axes = apply.abstract_parameters(config)
    mesh = sharding.make_mesh({"data": 4, "tensor": 2})
    state, found, parameters = abstract_state("adafactor", "zero3", shapes, axes, mesh)
    owner = "blocks/mlp/up/kernel"
    assert parameters[owner].spec == PartitionSpec(None, "data", "tensor")
    factored = {state[path].shape: found[path].spec for path in state if path.endswith(owner)}
    assert factored == {
        (2, 128, 1): PartitionSpec(None, "data", None),
        (2, 1, 256): PartitionSpec(None, None, "tensor"),
        (1,): PartitionSpec(),
    }


@pytest.mark.parametrize("name", optimizers.OPTIMIZERS)
def test_eight_devices_update_as_one(name):
    optimizer = toy_optimizer(name, learning_rate=0.1)

    def train(mesh):
        layout = sharding.make_layout("zero3")
        shapes = jax.eval_shape(toy_parameters)
        to = sharding.shardings(shapes, mesh, layout, rules=TOY_AXES)
        abstract = optimizers.abstract_state(optimizer, shapes, to)
        state_to = jax.tree.map(lambda leaf: leaf.sharding, abstract)

        def update(params, state, grads):
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        step = jax.jit(update, out_shardings=(to, state_to))
        params = jax.device_put(toy_parameters(0), to)
        state = jax.jit(optimizer.init, out_shardings=state_to)(params)
        for seed in range(1, 4):
            params, state = step(params, state, jax.device_put(toy_parameters(seed), to))
        return params

    split = train(sharding.make_mesh({"fsdp": 4, "tensor": 2}, axis_type=AxisType.Auto))
    one = sharding.make_mesh({"data": 1}, devices=jax.devices()[:1], axis_type=AxisType.Auto)
    assert split["embedding"].addressable_shards[0].data.shape == (VOCAB // 2, WIDTH // 4)
    tolerance = MUON_TOLERANCE if name == "muon" else TOLERANCE
    for got, want in zip(jax.tree.leaves(split), jax.tree.leaves(train(one)), strict=True):
        np.testing.assert_allclose(got, want, atol=tolerance)


# ---------------------------------------------------------------------------------------- problems


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(name="adam"), ["optimizer.name='adam'", "adamw, adafactor, lion, muon"]),
        (dict(schedule="step"), ["optimizer.schedule='step'", "constant, cosine, linear, wsd"]),
        (dict(learning_rate=-1.0), ["optimizer.learning_rate=-1.0", "at least 0"]),
        (dict(b2=1.0), ["optimizer.b2=1.0", "below 1"]),
        (dict(ema_decay=1.0), ["optimizer.ema_decay=1.0", "below 1"]),
        (dict(warmup_steps=-1), ["optimizer.warmup_steps=-1", "at least 0"]),
        (dict(decay_steps=-1), ["optimizer.decay_steps=-1", "0 = a fifth"]),
    ],
)
def test_problems_name_value_limit_and_remedy(changes, words):
    (problem,) = bounds.problems(optimizers.OptimizerConfig(**changes), "optimizer.")
    assert all(word in problem for word in words), problem


def test_the_defaults_have_no_problems():
    assert bounds.problems(optimizers.OptimizerConfig(), "optimizer.") == []

"""The train step: one loss per global batch, clipping, accumulation, averages, guards, memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import runs

from llmx import sharding
from llmx.contract import Gradients
from llmx.model import decoder
from llmx.runtime import bounds
from llmx.step import gradients, guard, optimizers

# fp32 with sums in another order.
TOLERANCE = 1e-5

BATCH, LENGTH, VOCAB, DECAY = 8, 8, 300, 0.9
MODEL = dict(
    vocab_size=VOCAB, vocab_multiple=64, width=16, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, mlp_dim=32,
)  # fmt: skip
# A large epsilon: Adam's first steps divide rounding noise by its own size where gradients vanish.
OPTIMIZER = dict(
    optimizer__learning_rate=0.01, optimizer__schedule="constant", optimizer__warmup_steps=0,
    optimizer__eps=1e-3, optimizer__ema_decay=DECAY, optimizer__clip_norm=0.0,
)  # fmt: skip
B1 = 0.9  # Adam's, the config's default
MESHES = {"one": {}, "data 8": {"data": 8}, "fsdp 4 x tensor 2": {"fsdp": 4, "tensor": 2},
          "fsdp 4": {"fsdp": 4}}  # fmt: skip
DOWN = "blocks/mlp/down/kernel"


@functools.cache
def make_recipe(mesh_name: str, layout: str = "zero3", **keys):
    if keys.get("guard__on_bad_step") == "skip":
        keys = dict(guard__patience=3) | keys
    if keys.get("optimizer__name") == "lion":  # which has no epsilon
        keys = dict(optimizer__eps=optimizers.OptimizerConfig().eps) | keys
    return runs.make_recipe(
        runs.make_config(
            "llama3", model=MODEL, mesh=MESHES[mesh_name], batch__size=BATCH,
            batch__sequence_length=LENGTH, sharding__layout=layout,
            **dict(steps=100) | OPTIMIZER | keys,
        )
    )  # fmt: skip


_first_states = {}


def first_state(recipe):
    """The state of seed 0, made once for all recipes that lay it out alike."""
    key = tuple((leaf.shape, leaf.sharding) for leaf in jax.tree.leaves(recipe.abstract))
    if key not in _first_states:
        _first_states[key] = recipe.init(0)
    return _first_states[key]


def new_state(recipe):
    """A copy of the first state, to be donated."""
    return jax.tree.map(jnp.copy, first_state(recipe))


make_step = functools.cache(runs.make_train_step)


def numpy_batch(seed: int = 0) -> dict[str, np.ndarray]:
    """Random tokens of two documents a row, with very unequal weights; some rows have none."""
    generator = np.random.default_rng(seed)
    shape = (BATCH, LENGTH)
    segments = np.broadcast_to(np.arange(LENGTH) >= 5, shape).astype(np.int32)
    positions = np.broadcast_to([0, 1, 2, 3, 4, 0, 1, 2], shape).astype(np.int32)
    weights = generator.uniform(size=shape) * np.linspace(0, 2, BATCH)[:, None]
    weights[generator.uniform(size=shape) < 0.3] = 0
    return {
        "tokens": generator.integers(0, VOCAB, shape).astype(np.int32),
        "targets": generator.integers(0, VOCAB, shape).astype(np.int32),
        "segment_ids": segments,
        "positions": positions,
        "weights": weights.astype(np.float32),
    }


def place_batch(recipe, batch):
    return jax.device_put(batch, recipe.loss.batch_sharding)


def run_steps(recipe, one_step, num: int, state=None):
    """The state and the reports of `num` steps from seed 0."""
    with jax.set_mesh(recipe.mesh):
        state, reports = state or new_state(recipe), []
        for seed in range(num):
            state, report = one_step(state, place_batch(recipe, numpy_batch(seed)))
            reports.append(jax.device_get(report))
    return state, reports


def copied(tree):
    """Host copies: the step donates its state."""
    return jax.tree.map(np.array, tree)


def global_norm(tree) -> float:
    return float(
        np.sqrt(sum(np.sum(np.square(np.asarray(leaf))) for leaf in jax.tree.leaves(tree)))
    )


def assert_near(got, want, tolerance=TOLERANCE):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


# -------------------------------------------------------------------------------- loss and updates


@functools.cache
def naive_loss_and_gradients():
    """The formula for the first batch, from whole logits on one device."""
    recipe, batch = make_recipe("one"), numpy_batch(0)

    def loss_of(params):
        logits_BTV = runs.logits(recipe, params, batch)
        log_p_BTV = jax.nn.log_softmax(logits_BTV[..., :VOCAB])
        hit_BT = jnp.take_along_axis(log_p_BTV, batch["targets"][..., None], axis=-1)[..., 0]
        return -(hit_BT * batch["weights"]).sum() / batch["weights"].sum()

    with jax.set_mesh(recipe.mesh):
        return jax.jit(jax.value_and_grad(loss_of))(first_state(recipe).params)


@pytest.mark.parametrize("mesh_name", MESHES)
def test_loss_is_normalised_over_the_global_batch(mesh_name):
    batch = numpy_batch(0)
    assert len({float(row.sum()) for row in batch["weights"]}) == BATCH  # devices differ
    loss, gradients = naive_loss_and_gradients()
    recipe = make_recipe(mesh_name)
    _, (report,) = run_steps(recipe, make_step(recipe), 1)
    np.testing.assert_allclose(report.loss, loss, rtol=TOLERANCE)
    np.testing.assert_allclose(report.grad_norm, global_norm(gradients), rtol=TOLERANCE)
    np.testing.assert_allclose(report.tokens, batch["weights"].sum(), rtol=TOLERANCE)
    assert (report.bad_leaf, report.num_bad) == (-1, 0)


def test_z_loss_is_added_to_the_gradient_and_reported_apart():
    recipe, with_z = make_recipe("one"), make_recipe("one", loss__z_loss=0.1)
    _, (report,) = run_steps(with_z, make_step(with_z), 1)
    _, (without,) = run_steps(recipe, make_step(recipe), 1)
    batch = numpy_batch(0)
    with jax.set_mesh(recipe.mesh):
        losses = jax.jit(lambda params: runs.losses(recipe, params, batch))
        _, log_z_BT = losses(first_state(recipe).params)
    weights = batch["weights"] / batch["weights"].sum()
    np.testing.assert_allclose(
        report.z_loss, 0.1 * np.sum(np.square(log_z_BT) * weights), rtol=TOLERANCE
    )
    np.testing.assert_allclose(report.loss, without.loss, rtol=TOLERANCE)
    assert abs(report.grad_norm - without.grad_norm) > 1e-3
    assert without.z_loss == 0


@pytest.mark.parametrize(("mesh_name", "accumulation"), [("one", 4), ("fsdp 4 x tensor 2", 2)])
def test_accumulation_changes_nothing(mesh_name, accumulation):
    """Losses, norms and parameters; token counts differ from microbatch to microbatch."""
    weights = numpy_batch(0)["weights"]
    counts = [weights[i::accumulation].sum() for i in range(accumulation)]
    assert max(counts) > 1.05 * min(counts)
    recipe = make_recipe(mesh_name, batch__accumulation=accumulation)
    state, reports = run_steps(recipe, make_step(recipe), 2)
    one = make_recipe("one")
    whole, whole_reports = run_steps(one, make_step(one), 2)
    assert_near(state.params, whole.params)
    for report, expected in zip(reports, whole_reports, strict=True):
        assert_near(report, expected)


def test_a_loop_of_hidden_length_gives_the_same(monkeypatch):
    """As on GPUs, but for the order of sums that a compiler fuses."""
    plain = make_recipe("fsdp 4", batch__accumulation=2)
    make, asked = gradients.whole_batch, []

    def whole_batch(loss, **keys):
        asked.append(keys)
        return make(loss, **keys | {"loop": gradients.hidden_length})

    monkeypatch.setattr(gradients, "whole_batch", whole_batch)
    hidden_length = make_recipe.__wrapped__("fsdp 4", batch__accumulation=2)
    assert [keys["loop"] for keys in asked] == [gradients.known_length]  # on CPUs
    (first, of_first), (second, of_second) = (
        run_steps(one, make_step(one), 2) for one in (plain, hidden_length)
    )
    assert_near(first.params, second.params)
    assert_near(of_first, of_second)

    def barriers(recipe):
        with jax.set_mesh(recipe.mesh):
            arguments = new_state(recipe), place_batch(recipe, numpy_batch())
            return make_step(recipe).lower(*arguments).as_text().count("optimization_barrier")

    assert barriers(hidden_length) == barriers(plain) + 1


@pytest.mark.parametrize("layout", ["ddp", "zero2", "zero3"])
def test_clipping_scales_the_global_norm_down_to_its_limit(layout):
    """Read from Adam's first moment, which after one step is a tenth of the gradient."""
    limit = 0.25
    recipe = make_recipe("data 8", layout, optimizer__clip_norm=limit)
    state, (report,) = run_steps(recipe, make_step(recipe), 1)
    assert report.grad_norm > 2 * limit  # reported before clipping
    clipped = global_norm(state.opt_state[0].mu) / (1 - B1)
    np.testing.assert_allclose(clipped, limit, rtol=TOLERANCE)


def test_gradients_below_the_limit_are_left_alone():
    recipe = make_recipe("one", optimizer__clip_norm=1e3)
    state, (report,) = run_steps(recipe, make_step(recipe), 1)
    unclipped = global_norm(state.opt_state[0].mu) / (1 - B1)
    np.testing.assert_allclose(unclipped, report.grad_norm, rtol=TOLERANCE)


def test_ema_follows_the_parameters():
    recipe = make_recipe("data 8")
    with jax.set_mesh(recipe.mesh):
        state = new_state(recipe)
        want = copied(state.params)
        for seed in range(3):
            state, _ = make_step(recipe)(state, place_batch(recipe, numpy_batch(seed)))
            now = copied(state.params)
            want = jax.tree.map(lambda a, p: DECAY * a + (1 - DECAY) * p, want, now)
    assert_near(state.ema, want)
    assert global_norm(state.ema) != pytest.approx(global_norm(now), rel=1e-4)


def test_evaluation_sums_losses_and_tokens():
    recipe, batch = make_recipe("fsdp 4 x tensor 2"), numpy_batch(0)
    with jax.set_mesh(recipe.mesh):
        params = first_state(recipe).params
        total, tokens = runs.make_evaluation(recipe)(params, place_batch(recipe, batch))
    loss, _ = naive_loss_and_gradients()
    np.testing.assert_allclose(total / tokens, loss, rtol=TOLERANCE)
    np.testing.assert_allclose(tokens, batch["weights"].sum(), rtol=TOLERANCE)


# ------------------------------------------------------------------------------------------- guard


def bad_batch(recipe):
    batch = numpy_batch(0)
    batch["weights"][0, 0] = np.inf
    return place_batch(recipe, batch)


def assert_same(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


def test_stop_keeps_everything_and_stays_stopped():
    recipe = make_recipe("data 8")
    one_step = make_step(recipe)
    state, _ = run_steps(recipe, one_step, 1)
    kept = (state.params, state.opt_state, state.ema)
    before = copied(kept)
    with jax.set_mesh(recipe.mesh):
        state, report = one_step(state, bad_batch(recipe))
        assert report.bad_leaf >= 0 and report.num_bad == 1 and state.guard.stopped
        for seed in range(2):  # good batches do not wake it
            assert state.step == 1
            assert_same((state.params, state.opt_state, state.ema), before)
            state, report = one_step(state, place_batch(recipe, numpy_batch(seed)))
        assert state.guard.stopped and report.bad_leaf == -1
        # Released, it goes on from where it stopped.
        state = state._replace(guard=guard.released(state.guard))
        state, _ = one_step(state, place_batch(recipe, numpy_batch(1)))
    assert state.step == 2
    expected, _ = run_steps(recipe, one_step, 2)
    assert_same(state.params, expected.params)


def test_skip_goes_on_and_recovers():
    recipe = make_recipe("data 8", guard__on_bad_step="skip")
    one_step = make_step(recipe)
    state, _ = run_steps(recipe, one_step, 1)
    before = copied((state.params, state.opt_state, state.ema))
    with jax.set_mesh(recipe.mesh):
        for num_bad in (1, 2):
            state, report = one_step(state, bad_batch(recipe))
            assert (report.num_bad, state.step) == (num_bad, 1 + num_bad)
            assert report.bad_leaf >= 0 and not state.guard.stopped
            assert_same((state.params, state.opt_state, state.ema), before)
        state, report = one_step(state, place_batch(recipe, numpy_batch(1)))
    assert (report.num_bad, report.bad_leaf, state.step) == (0, -1, 4)
    expected, _ = run_steps(recipe, one_step, 2)
    assert_same(state.params, expected.params)


@pytest.mark.parametrize("name", ["adamw", "lion", "adafactor"])
def test_the_rate_in_the_report_is_the_one_of_the_update(name):
    """After skipped steps too, and it ends where the schedule ends: the decay of rows that pad the
    vocabulary shows it."""
    values = dict(
        optimizer__name=name, optimizer__schedule="linear", optimizer__final_fraction=0.5,
        optimizer__weight_decay=1.0, optimizer__warmup_steps=0, steps=4,
    )  # fmt: skip
    recipe = make_recipe("data 8", guard__on_bad_step="skip", **values)
    one_step = make_step(recipe)
    with jax.set_mesh(recipe.mesh):
        state = new_state(recipe)
        for number in range(4):
            before = unused(state)
            if number in (0, 2):
                state, report = one_step(state, bad_batch(recipe))
                np.testing.assert_array_equal(unused(state), before)
                continue
            state, report = one_step(state, place_batch(recipe, numpy_batch(number)))
            used = 1 - unused(state).sum() / before.sum()
            assert used == pytest.approx(float(report.learning_rate), rel=1e-3)
    assert float(report.learning_rate) == pytest.approx(0.01 * 0.5)


def unused(state) -> np.ndarray:
    """Weights that decay and have no gradient."""
    return np.array(state.params["embedding"][VOCAB:])


def test_skip_stops_when_patience_ends():
    recipe = make_recipe("data 8", guard__on_bad_step="skip")
    one_step = make_step(recipe)  # patience 3
    with jax.set_mesh(recipe.mesh):
        state = new_state(recipe)
        stopped = []
        for _ in range(3):
            state, _ = one_step(state, bad_batch(recipe))
            stopped.append(bool(state.guard.stopped))
    assert stopped == [False, False, True]
    assert state.step == 2  # the step that stopped it is not counted


@pytest.mark.parametrize("mesh_name", ["one", "fsdp 4 x tensor 2"])
def test_the_leaf_that_is_not_finite_is_named(mesh_name):
    """Hidden values of 1e22 behind a weight of zero: only that weight's gradient overflows."""
    recipe = make_recipe(mesh_name)
    with jax.set_mesh(recipe.mesh):
        state = new_state(recipe)
        mlp = state.params["blocks"]["mlp"]
        mlp["down"]["kernel"] = mlp["down"]["kernel"] * 0
        mlp["gate"]["kernel"] = mlp["gate"]["kernel"] * 1e22
        state, report = make_step(recipe)(state, place_batch(recipe, numpy_batch(0)))
    assert np.isfinite(report.loss)
    assert recipe.leaf_names[int(report.bad_leaf)] == DOWN


def test_nan_in_a_parameter_is_caught():
    recipe = make_recipe("data 8")
    with jax.set_mesh(recipe.mesh):
        state = new_state(recipe)
        state.params["norm"]["scale"] = state.params["norm"]["scale"] * jnp.nan
        state, report = make_step(recipe)(state, place_batch(recipe, numpy_batch(0)))
    assert np.isnan(report.loss) and report.bad_leaf >= 0 and state.guard.stopped


def test_a_spike_is_not_applied_and_its_largest_leaf_named():
    recipe = make_recipe("one", guard__on_bad_step="skip", guard__spike_factor=2.0)
    one_step = make_step(recipe)
    with jax.set_mesh(recipe.mesh):
        state = new_state(recipe)
        _, gradients = naive_loss_and_gradients()
        # As after ten steps of a tenth of this one's norm.
        usual = state.guard._replace(
            sum_norms=jnp.float32(global_norm(gradients)), num_norms=jnp.int32(10)
        )
        before = copied(state.params)
        spiked = state._replace(guard=usual)
        state, report = one_step(spiked, place_batch(recipe, numpy_batch(0)))
    squares = [float(jnp.sum(jnp.square(leaf))) for leaf in jax.tree.leaves(gradients)]
    assert report.bad_leaf == np.argmax(squares)
    assert_same(state.params, before)
    assert state.guard.num_norms == 10  # a spike does not become usual


def judged(config, norms):
    """Which of these gradient norms in a row are bad."""
    state, found = guard.init(), []
    check = jax.jit(functools.partial(guard.check, config))
    for norm in map(jnp.float32, norms):
        one = jnp.float32(1)
        gradients = Gradients(norm, one, one, (), jnp.square(norm)[None], norm)
        verdict, state = check(state, gradients)
        found.append(int(verdict.bad_leaf) >= 0)
        assert bool(verdict.accepted) != found[-1] and verdict.norm == norm
    return found, state


def test_spikes_are_told_by_the_running_mean():
    config = guard.GuardConfig(on_bad_step="skip", spike_factor=3.0)
    calm = [1.0] * 10
    assert judged(config, [9.0, *calm])[0] == [False] * 11  # nothing is usual yet
    found, state = judged(config, [*calm, 2.9, 4.0, 1.0])
    assert found == [False] * 11 + [True, False]
    assert state.num_norms == 12
    found, state = judged(config, [1.0] * 300)
    assert not any(found) and state.num_norms <= 100  # the mean forgets
    off = guard.GuardConfig(on_bad_step="skip")
    assert not any(judged(off, [*calm, 1e6])[0])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(on_bad_step="warn"), ["guard.on_bad_step='warn'", "stop", "skip"]),
        (dict(spike_factor=0.5), ["guard.spike_factor=0.5", "above 1", "0 to switch it off"]),
        (dict(patience=0), ["guard.patience=0", "at least 1"]),
    ],
)
def test_guard_problems(changes, words):
    (problem,) = bounds.problems(guard.GuardConfig(**changes), "guard.")
    assert all(word in problem for word in words)
    assert bounds.problems(guard.GuardConfig(), "guard.") == []


# ------------------------------------------------------------------------------ memory and transfer


@pytest.mark.parametrize("layout", sharding.LAYOUTS)
def test_state_is_born_split(layout):
    recipe = make_recipe("data 8", layout)
    state = first_state(recipe)
    for leaf, abstract in zip(
        jax.tree.leaves(state), jax.tree.leaves(recipe.abstract), strict=True
    ):  # fmt: skip
        assert leaf.sharding.is_equivalent_to(abstract.sharding, leaf.ndim)
        assert leaf.shape == abstract.shape and leaf.dtype == abstract.dtype
    ways = {
        "ddp": (1, 1), "zero1": (1, 8), "zero2": (1, 8), "zero3": (8, 8), "hsdp": (1, 1),
    }[layout]  # fmt: skip
    for tree, expected in ((state.params, ways[0]), (state.opt_state[0].mu, ways[1]),
                           (state.opt_state[0].nu, ways[1]), (state.ema, ways[1])):  # fmt: skip
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            matrix = not sharding.path_name(path).endswith("scale")
            held = {shard.data.size for shard in leaf.addressable_shards}
            assert held == {leaf.size // (expected if matrix else 1)}, path


def test_gathered_bytes_are_those_of_whole_weights_in_the_compute_dtype():
    recipe = make_recipe("data 8", sharding__gather="step")
    matrices = [
        leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(recipe.abstract.params)
        if leaf.ndim > 1 and path[0].key not in decoder.LOOKED_UP and "norm" not in str(path)
    ]
    assert recipe.loss.gathered_bytes() == sum(4 * leaf.size for leaf in matrices)


def test_seeds_give_the_same_parameters_on_every_mesh():
    one, split = make_recipe("one").init(3), make_recipe("fsdp 4 x tensor 2").init(3)
    assert_near(split.params, one.params, 1e-6)
    other = make_recipe("one").init(4)
    assert global_norm(other.params) != global_norm(one.params)


def test_the_state_is_donated_and_the_loop_transfers_nothing():
    recipe = make_recipe("data 8")
    one_step = make_step(recipe)
    state, _ = run_steps(recipe, one_step, 1)  # compiles
    batch = place_batch(recipe, numpy_batch(1))
    old = jax.tree.leaves(state)
    with jax.set_mesh(recipe.mesh), jax.transfer_guard("disallow"):
        state, report = one_step(state, batch)
        jax.block_until_ready(state)
    assert all(leaf.is_deleted() for leaf in old)
    assert one_step._cache_size() == 1  # the new state is laid out as the old one was
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((state, report, batch)))


def test_recipe_names_the_parameter_that_does_not_divide():
    config = runs.make_config(model=MODEL, mesh={"tensor": 4}, sharding__replicate_kv=True)
    config.mesh.tensor = 8  # which `resolve` would refuse
    with pytest.raises(ValueError, match=r"^blocks/attention/.*'heads'.*4 is not a multiple of 8"):
        runs.make_recipe(config)

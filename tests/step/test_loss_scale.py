"""The scaled loss: what an overflow changes, when the scale moves, and what fp16 needs it for."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import compare, runs, tiers

from llmx.model import precision
from llmx.step.transforms import loss_scale

BATCH, LENGTH, VOCAB = 8, 8, 300
MODEL = dict(
    vocab_size=VOCAB, vocab_multiple=64, width=16, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, mlp_dim=32,
)  # fmt: skip
STEPS, BAD = 6, 3  # the batch of step BAD overflows
FIRST = 2.0**16  # the scale of the config's defaults
FP16_GRADIENT = 0.02  # of a leaf's norm: 11 bits of each number, through two layers
POWER_OF_TWO = 1e-6  # the compiler fuses other sums
ONE = {}


def make_recipe(mesh=None, *, kind="dynamic", **keys):
    return _make_recipe(tuple((mesh or {}).items()), tuple(sorted((keys | {"kind": kind}).items())))


@functools.cache
def _make_recipe(mesh, keys):
    keys = dict(keys)
    keys["loss_scale__kind"] = keys.pop("kind")
    options = dict(
        batch__size=BATCH, batch__sequence_length=LENGTH, steps=20, optimizer__warmup_steps=1,
        optimizer__learning_rate=0.01, optimizer__ema_decay=0.9,
    )  # fmt: skip
    return runs.make_recipe(
        runs.make_config("llama3", model=MODEL, mesh=dict(mesh), **options | keys)
    )


make_programs = functools.cache(runs.make_programs)


def batch_of(number: int, *, rows: int = BATCH, length: int = LENGTH, weights=None) -> dict:
    generator, shape = np.random.default_rng(number), (rows, length)
    tokens = lambda: generator.integers(0, VOCAB, shape).astype(np.int32)  # noqa: E731
    batch = dict(tokens=tokens(), targets=tokens())
    batch["segment_ids"] = np.zeros(shape, np.int32)
    batch["positions"] = np.broadcast_to(np.arange(length, dtype=np.int32), shape)
    batch["weights"] = generator.uniform(0.5, 1.5, shape).astype(np.float32)
    if weights is not None:
        batch["weights"] = np.full(shape, weights, np.float32)
    return batch


def broken(batch: dict) -> dict:
    """The batch with a token whose weight is NaN: its count, its loss and all gradients are."""
    weights = batch["weights"].copy()
    weights[0, 1] = np.nan
    return batch | {"weights": weights}


def walk(recipe, state, batches: dict[int, dict], changes=None):
    """The state after the steps {number: batch}, reports by number, and the states before each,
    on the host. `changes`: {number: function of the state before the step}."""
    programs, reports, before = make_programs(recipe), {}, {}
    with jax.set_mesh(recipe.mesh):
        for number, batch in batches.items():
            if changes and number in changes:
                state = changes[number](state)
            before[number] = host(state)
            state, report = programs(number, state, runs.put_batch(recipe, batch))
            reports[number] = jax.device_get(report)
    return state, reports, before


def host(tree):
    """A copy that donation leaves alone."""
    return jax.tree.map(np.array, tree)


def with_scale(recipe, **values):
    """A function of states: with other numbers in the loss scale's state."""

    def change(state):
        old = state.extra[loss_scale.NAME]
        new = {name: np.asarray(value, getattr(old, name).dtype) for name, value in values.items()}
        to = recipe.abstract.step.sharding
        new = {name: jax.device_put(value, to) for name, value in new.items()}
        return state._replace(extra={loss_scale.NAME: old._replace(**new)})

    return change


def scale_of(state) -> float:
    return float(state.extra[loss_scale.NAME].scale)


def without(state, *names):
    return state._replace(**dict.fromkeys(names, ()))


# ------------------------------------------------------------------------------------ an overflow

DATA2 = {"data": 2}


def synced(strategy: str, warmup: int = 1, **keys):
    return DATA2, dict(sync__strategy=strategy, sync__warmup_steps=warmup, **keys)


CASES = {
    "plain": (ONE, {}),
    "accumulation": (ONE, dict(batch__accumulation=4)),
    "zero3": ({"fsdp": 4}, dict(batch__accumulation=2)),
    "1f1b": ({"stage": 2, "data": 2}, dict(batch__accumulation=4)),
    "zb_h1": ({"stage": 2}, dict(batch__accumulation=4, pipeline__schedule="zb_h1")),
    "int8": synced("int8"),
    "stale": synced("stale"),
    "one_bit": synced("one_bit", 2),
    "zero_one": synced("zero_one", 2),
    "diloco": synced("diloco", sync__every=4, sync__fragments=2),
}
SLOW_CASES = {
    "zero1": ({"data": 2, "tensor": 2}, dict(sharding__layout="zero1")),
    "power_sgd": synced("power_sgd"),
    "one_bit_mean": synced("one_bit", 5),
    "one_bit_stages": (
        {"stage": 2, "data": 2},
        dict(sync__strategy="one_bit", sync__warmup_steps=2, batch__accumulation=2),
    ),
    "one_bit_lamb": synced("one_bit_lamb", 2, optimizer__name="lamb"),
    "local_sgd": synced("local_sgd", sync__every=4),
}
LOCAL = ("zero_one", "local_sgd", "diloco")


# Each has another that takes the same way through the step; they run with --full-grid.
FULL = {"accumulation", "1f1b", "int8", "stale", "zero_one", "zero1", "power_sgd", "one_bit_mean",
        "local_sgd"}  # fmt: skip


@pytest.mark.parametrize("case", tiers.by_tier(CASES | SLOW_CASES, slow=SLOW_CASES, full=FULL))
def test_an_overflow_changes_nothing_but_the_scale(case):
    """State before and after, and what follows: bit for bit a run that skipped the batch."""
    mesh, keys = (CASES | SLOW_CASES)[case]
    if case in LOCAL:
        keys = keys | dict(optimizer__ema_decay=0.0)
    recipe = make_recipe(mesh, guard__on_bad_step="stop", **keys)
    batches = {number: batch_of(number) for number in range(STEPS)}
    bad = batches | {BAD: broken(batches[BAD])}
    end, reports, states = walk(recipe, recipe.init(0), bad)
    report, before = reports[BAD], states[BAD]
    assert report.scalars["overflowed"] and report.bad_leaf == -1 and report.num_bad == 0
    assert not np.isfinite(report.grad_norm)
    # The step alone: what replicas exchange after it is due by its number, not by its batch.
    step = make_programs(recipe).steps[runs.phase(recipe, BAD)]
    with jax.set_mesh(recipe.mesh):
        after, _ = step(runs.put_state(recipe, before), runs.put_batch(recipe, bad[BAD]))
    compare.assert_same(without(host(after), "step", "extra"), without(before, "step", "extra"))
    assert after.step == before.step + 1
    assert (scale_of(before), scale_of(after)) == (FIRST, FIRST / 2)
    assert after.extra[loss_scale.NAME].skipped == 1

    def skip(state):
        if fragments := runs.outer_after(recipe, BAD):
            state = make_programs(recipe).outer[fragments](state)
        state = state._replace(step=state.step + 1)  # the learning rate goes by steps
        return with_scale(recipe, scale=FIRST / 2, clean_steps=0)(state)

    del batches[BAD]
    wanted, others, _ = walk(recipe, recipe.init(0), batches, {BAD + 1: skip})
    for number, other in others.items():
        assert reports[number].loss == other.loss and reports[number].grad_norm == other.grad_norm
        assert not other.scalars["overflowed"]
    last = end.extra[loss_scale.NAME]
    assert int(last.clean_steps) == STEPS - BAD - 1
    compare.assert_same(host(without(end, "step", "extra")), host(without(wanted, "step", "extra")))


def test_a_batch_in_flight_keeps_the_scale_that_it_was_taken_with():
    """PipeDream-2BW: the step after completes the batch. A batch without tokens stands for the one
    that is skipped: it takes its place in the pipeline and changes nothing."""
    recipe = make_recipe(
        {"stage": 2}, batch__accumulation=4, pipeline__schedule="pipedream_2bw",
        loss_scale__growth_interval=1,
    )  # fmt: skip
    batches = {number: batch_of(number) for number in range(STEPS)}
    bad = batches | {BAD: broken(batches[BAD])}
    end, reports, states = walk(recipe, recipe.init(0), bad)
    # Nothing is complete in the first step; then each doubles the scale, but the one after BAD.
    used = [float(reports[number].scalars["loss_scale"]) for number in range(STEPS)]
    assert used == [0, FIRST, FIRST, 2 * FIRST, 4 * FIRST, 8 * FIRST]
    assert [bool(reports[n].scalars["overflowed"]) for n in range(STEPS)] == [
        number == BAD + 1 for number in range(STEPS)
    ]
    before, after = states[BAD + 1], states[BAD + 2]
    kept = ("step", "extra", "in_flight")
    compare.assert_same(without(after, *kept), without(before, *kept))
    assert (scale_of(before), scale_of(after)) == (8 * FIRST, 2 * FIRST)

    empty = batches | {BAD: batch_of(BAD, weights=0)}
    lowered = {BAD + 2: with_scale(recipe, scale=2 * FIRST, skipped=1)}
    wanted, others, _ = walk(recipe, recipe.init(0), empty, lowered)
    for number in set(range(STEPS)) - {BAD + 1}:
        assert reports[number].loss == others[number].loss
    compare.assert_same(host(end), host(wanted))


def test_batches_behind_an_overflow_in_flight_lower_the_scale_once():
    recipe = make_recipe({"stage": 2}, batch__accumulation=4, pipeline__schedule="pipedream_2bw")
    batches = {n: broken(batch_of(n)) if n in (1, 2) else batch_of(n) for n in range(4)}
    end, reports, _ = walk(recipe, recipe.init(0), batches)
    assert [bool(reports[n].scalars["overflowed"]) for n in range(4)] == [False] * 2 + [True] * 2
    assert scale_of(end) == FIRST / 2


def test_fp16_overflows_until_the_scale_fits():
    recipe = make_recipe(precision="fp16", kind="auto", loss_scale__initial=2.0**32)
    start = recipe.init(0)
    params = host(start.params)
    state, reports, states = walk(recipe, start, {n: batch_of(0) for n in range(24)})
    skipped = [bool(report.scalars["overflowed"]) for report in reports.values()]
    num = sum(skipped)
    assert skipped == [True] * num + [False] * (24 - num), "no scale that fits overflows again"
    assert 8 < num < 20
    assert scale_of(state) == 2.0 ** (32 - num)
    compare.assert_same(states[num].params, params)
    assert int(states[num].opt_state[0].count) == 0
    assert reports[23].loss < 0.9 * reports[num].loss


# ----------------------------------------------------------------------------- when the scale moves


def test_the_scale_grows_after_clean_steps_up_to_its_maximum():
    recipe = make_recipe(loss_scale__growth_interval=2, loss_scale__maximum=4 * FIRST)
    batches = {number: batch_of(number) for number in range(10)}
    batches[3] = broken(batches[3])
    batches[6] = batch_of(6, weights=0)  # no tokens: neither clean nor an overflow
    state, reports, _ = walk(recipe, recipe.init(0), batches)
    used = [float(report.scalars["loss_scale"]) / FIRST for report in reports.values()]
    assert used == [1, 1, 2, 2, 1, 1, 2, 2, 2, 4]
    state, _, _ = walk(recipe, state, {n: batch_of(n) for n in range(4)})
    assert scale_of(state) == 4 * FIRST


@pytest.mark.parametrize("kind", ["dynamic", "fixed"])
def test_at_the_minimum_a_gradient_that_is_not_finite_is_the_guards_business(kind):
    keys = dict(loss_scale__minimum=FIRST) if kind == "dynamic" else {}
    batches = {0: batch_of(0), 1: broken(batch_of(1)), 2: batch_of(2)}
    recipe = make_recipe(kind=kind, guard__on_bad_step="skip", guard__patience=3, **keys)
    state, reports, states = walk(recipe, recipe.init(0), batches)
    assert reports[1].bad_leaf >= 0 and reports[1].num_bad == 1 and reports[2].num_bad == 0
    assert not reports[1].scalars["overflowed"]
    assert (scale_of(state), int(state.extra[loss_scale.NAME].skipped)) == (FIRST, 0)
    compare.assert_same(states[2].params, states[1].params)

    recipe = make_recipe(kind=kind, guard__on_bad_step="stop", **keys)
    state, reports, _ = walk(recipe, recipe.init(0), batches)
    assert bool(state.guard.stopped) and int(state.step) == 1


def test_overflows_use_up_no_patience_and_no_norm():
    recipe = make_recipe(guard__on_bad_step="skip", guard__patience=2, guard__spike_factor=5.0)
    batches = {n: broken(batch_of(n)) for n in range(5)}
    state, _, _ = walk(recipe, recipe.init(0), batches)
    assert not bool(state.guard.stopped) and int(state.guard.num_norms) == 0
    assert scale_of(state) == FIRST / 2**5


def test_without_a_scale_there_is_no_state_and_no_scalar():
    recipe = make_recipe(kind="none")
    assert recipe.abstract.extra == () and recipe.loss.transforms == {}
    assert make_recipe(kind="auto").loss.transforms == {}
    _, reports, _ = walk(recipe, recipe.init(0), {0: batch_of(0)})
    assert reports[0].scalars == {}


@pytest.mark.parametrize(
    "name, reduce_dtype, scaled",
    [("fp16", "", True), ("bf16", "", False), ("bf16", "fp16", True), ("fp32", "bf16", False)],
)
def test_auto_scales_where_anything_is_in_fp16(name, reduce_dtype, scaled):
    policy = precision.policy_of(name, reduce_dtype)
    assert bool(loss_scale.transforms(loss_scale.LossScaleConfig(), policy)) == scaled


# ---------------------------------------------------------------------------------------- gradients


def gradients(recipe, params, batch):
    """Loss and gradients of a batch as the guard sees them."""

    def take(params, batch):
        found, _ = recipe.gradient.take(params, batch, (), recipe.loss.init_extra())
        return found

    with jax.set_mesh(recipe.mesh):
        return jax.device_get(jax.jit(take)(params, runs.put_batch(recipe, batch)))


def plain_gradient(recipe, params, batch):
    """From whole logits, in fp32."""
    fp32 = make_recipe(kind="none", attention__implementation="reference")

    def loss_of(params):
        log_p_BTV = jax.nn.log_softmax(runs.logits(fp32, params, batch)[..., :VOCAB])
        hit_BT = jnp.take_along_axis(log_p_BTV, batch["targets"][..., None], axis=-1)[..., 0]
        return -(hit_BT * batch["weights"]).sum() / batch["weights"].sum()

    with jax.set_mesh(fp32.mesh):
        return jax.device_get(jax.jit(jax.value_and_grad(loss_of))(params))


@pytest.mark.parametrize("scale", [2.0**7, 2.0**40])
def test_a_power_of_two_changes_no_gradient_of_fp32(scale):
    plain, scaled = make_recipe(kind="none"), make_recipe(kind="fixed", loss_scale__initial=scale)
    params = plain.init(0).params
    wanted, got = (gradients(recipe, params, batch_of(0)) for recipe in (plain, scaled))
    assert got.loss == wanted.loss
    compare.assert_close(got.tree, wanted.tree, POWER_OF_TWO)
    np.testing.assert_allclose(got.squares, wanted.squares, rtol=POWER_OF_TWO)
    np.testing.assert_allclose(got.norms, wanted.norms, rtol=POWER_OF_TWO)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        dict(batch__accumulation=4),
        dict(reduce_dtype="fp16", loss_scale__initial=2.0**10),
        dict(remat="full", attention__implementation="reference"),
    ],
)
def test_fp16_gradients_are_those_of_plain_jax(keys):
    recipe = make_recipe(kind="auto", precision="fp16", **keys)
    params, batch = make_recipe(kind="none").init(0).params, batch_of(0)
    loss, wanted = plain_gradient(recipe, params, batch)
    found = gradients(recipe, params, batch)
    np.testing.assert_allclose(found.loss, loss, rtol=1e-3)
    assert {leaf.dtype for leaf in jax.tree.leaves(found.tree)} == {np.dtype("float32")}
    compare.assert_close(found.tree, wanted, FP16_GRADIENT)


def test_small_gradients_vanish_in_fp16_without_a_scale_and_not_with_it():
    """Many tokens make the share of each in the loss small, a large residual stream the gradient of
    its norm, and small weights of the head that of the norm's result."""
    shape = dict(batch__size=16, batch__sequence_length=128)
    scales = dict(none={}, auto=dict(loss_scale__initial=2.0**22))
    batch, params = batch_of(0, rows=16, length=128), make_recipe(kind="none").init(0).params
    params["embedding"], params["head"] = 2e4 * params["embedding"], params["head"] / 32
    _, wanted = plain_gradient(None, params, batch)
    found = {
        kind: gradients(make_recipe(kind=kind, precision="fp16", **shape, **scale), params, batch)
        for kind, scale in scales.items()
    }
    assert all(leaf.any() for leaf in jax.tree.leaves(wanted))
    vanished = [found["none"].tree[name] for name in ("blocks", "embedding")]
    assert not any(leaf.any() for leaf in jax.tree.leaves(vanished))
    assert found["none"].tree["head"].any(), "only what goes through fp16 activations vanishes"
    compare.assert_close(found["auto"].tree, wanted, FP16_GRADIENT)


@pytest.mark.parametrize("accumulation", [tiers.full_grid(1), 2])
def test_ranges_of_delayed_scaling_grow_with_the_scale(accumulation):
    """Otherwise gradients would be cut at the range that the scale before had."""
    keys = dict(
        precision="fp16", products__format="fp8", products__scaling="delayed",
        batch__accumulation=accumulation, loss_scale__initial=2.0**8,
    )  # fmt: skip

    def norms(**scale):
        recipe = make_recipe(**keys | scale)
        batches = {number: batch_of(number) for number in range(4)}
        _, reports, _ = walk(recipe, recipe.init(0), batches)
        return [float(report.grad_norm) for report in reports.values()]

    grows = dict(loss_scale__growth_interval=2, loss_scale__growth_factor=16.0)
    np.testing.assert_allclose(norms(**grows), norms(kind="fixed"), rtol=FP16_GRADIENT / 4)

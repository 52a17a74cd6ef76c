"""Replicas that agree in their own way train as a plain loop over one device's gradients does.

The loops (`plain_replicas`) take each replica's gradient by itself, on one device, and do with
NumPy and optax what the strategy's paper says. However a replica is split inside, it is the same.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import plain_replicas, runs
from support.compare import assert_close
from support.plain_replicas import (
    AXES,
    LAMB,
    OPTIMIZER,
    STEPS,
    UNUSED,
    WARMUP,
    ZERO_ONE,
    added,
    batches,
    chosen,
    clipped,
    learning_rate,
    loss_of,
    make_recipe,
    mean_of,
    minus,
    plain_mean,
    plain_one_bit,
    plain_zero_one,
    replica,
    seen_by,
    shares_of,
    times,
    updater,
)

from llmx.contract import State
from llmx.sharding import trees
from llmx.step import optimizers
from llmx.sync import late, reshard
from llmx.sync.config import SyncConfig
from llmx.sync.replicas import COMPRESSED, LOCAL, MEAN, VARIANCE

TOLERANCE = 1e-5  # relative; the parity contract of docs/architecture.md
SAME = 1e-6  # relative: the same numbers in another program, in fp32


class Trained:
    """A recipe on its way through the batches; programs are compiled once."""

    def __init__(self, recipe):
        self.recipe = recipe
        self.losses, self.norms, self.phases, self.seen = [], [], [], []
        self._programs = runs.make_programs(recipe)

    def __call__(self, state: State, given: list[dict], first: int = 0) -> State:
        with jax.set_mesh(self.recipe.mesh):
            for number, batch in enumerate(given, first):
                state, report = self._programs(number, state, runs.put_batch(self.recipe, batch))
                self.losses.append(float(report.loss))
                self.norms.append(float(report.grad_norm))
                self.phases.append(self._programs.phase(number))
                self.seen.append(seen_by(state))
        return state


def begun(recipe, params, opt_state=None, step: int = 0) -> State:
    """A new state at these parameters, and behind a warm-up at this optimizer state and step."""
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), recipe.abstract)
    params = runs.in_stages(recipe, params)
    state = runs.put_state(recipe, zeros._replace(params=params))
    new_opt_state, sync = recipe.init_sync(state.params)
    if opt_state is None:
        opt_state = new_opt_state
    state = state._replace(opt_state=opt_state, sync=sync, step=np.int32(step))
    return runs.put_state(recipe, state)


# --------------------------------------------------------------------------- against plain loops


@pytest.fixture(scope="module")
def plain() -> plain_replicas.Plain:
    return plain_replicas.make()


@pytest.mark.parametrize(
    ("strategy", "num"),
    [pytest.param("local_sgd", 1, marks=pytest.mark.slow), ("diloco", 1), ("diloco", 2)],
)
def test_replicas_that_go_on_alone_and_meet(plain, strategy, num):
    """local_sgd: at the mean; diloco: at what SGD with Nesterov momentum makes of it, in fragments
    one after the other, and all of them at the end, where a round that is cut short is averaged."""
    optimizer, update = updater("adamw")
    anchor, own = plain.params, [plain.params] * 4
    states, losses = [optimizer.init(plain.params) for _ in own], []
    outer = optax.sgd(0.7, 0.9, nesterov=True) if strategy == "diloco" else optax.sgd(1.0)
    trace = outer.init(anchor)
    for number, batch in enumerate(batches()):
        made = plain.of_rows(own, batch, 4)
        losses.append(loss_of(made))
        for i, (_, _, grads) in enumerate(made):
            own[i], states[i] = update(clipped(grads), states[i], own[i])
        fragments = (0,) if num == 1 else ((number + 1) % 2,)
        if number == STEPS - 1:
            fragments = tuple(range(num))
        if number % 2 or num == 2:
            updates, new_trace = outer.update(minus(anchor, mean_of(own)), trace)
            new = jax.device_get(optax.apply_updates(anchor, updates))
            due = ((number + 1) % 2,) if num == 2 else (0,)
            new = chosen(due, num, new, mean_of(own))
            anchor = chosen(fragments, num, new, anchor)
            own = [chosen(fragments, num, anchor, mine) for mine in own]
            if strategy == "diloco":
                kept = chosen(due, num, new_trace[0].trace, trace[0].trace)
                trace = (optax.TraceState(kept), *trace[1:])
    recipe = make_recipe(strategy, sync=dict(every=2, fragments=num))
    trained = Trained(recipe)
    state = trained(begun(recipe, plain.params), batches())
    np.testing.assert_allclose(trained.losses, losses, rtol=TOLERANCE)
    assert_close(state.params, anchor, TOLERANCE)
    for i, each in enumerate(states):
        assert_close(replica(state.sync.opt_state[0].mu, i), each[0].mu, TOLERANCE)


@pytest.mark.parametrize("steps, whole", [(STEPS, True), (STEPS - 1, False)])
def test_a_round_that_is_cut_short_is_averaged(plain, steps, whole):
    """DiLoCo's momentum is of whole rounds of three steps: after two more steps, the last exchange
    moves to the mean of the replicas."""
    recipe = make_recipe("diloco", sync=dict(every=3))
    trained = Trained(recipe)
    state = trained(begun(recipe, plain.params), batches()[:3])
    outer = jax.device_get(state.sync.outer)
    programs = runs.make_programs(recipe)
    with jax.set_mesh(recipe.mesh):
        for number in range(3, steps):
            phase = programs.steps[programs.phase(number)]
            state, _ = phase(state, runs.put_batch(recipe, batches()[number]))
        own = [replica(state.sync.params, i) for i in range(4)]
        state = programs.outer[0,](state)
    alike = jax.tree.map(lambda a, b: np.allclose(a, b, atol=1e-7), state.params, mean_of(own))
    same = jax.tree.map(np.array_equal, outer, jax.device_get(state.sync.outer))
    assert all(jax.tree.leaves(alike)) == all(jax.tree.leaves(same)) == (not whole)


def test_gradients_that_come_late(plain):
    """`late.delays` says by how much; the rest is a list of what comes when, and from whom."""
    optimizer, update = updater("adamw")
    params, state, losses = plain.params, optimizer.init(plain.params), []
    recipe = make_recipe("stale", sync=dict(staleness=2))
    config, lateness = SyncConfig("stale", staleness=2), np.zeros(4, "f4")
    nothing = times(plain.params, 0)
    coming = [[nothing] * 4 for _ in range(STEPS + 2)]  # by step and replica
    seen = set()
    for number, batch in enumerate(batches()):
        # Its own that is on its way, a replica sees: as if it were the optimizer's next gradient.
        none, _ = update(nothing, state, params)
        waiting = [added([of[i] for of in coming[number:]]) for i in range(4)]
        views = [added([params, minus(update(w, state, params)[0], none)]) for w in waiting]
        made = plain.of_rows(views, batch, 4)
        losses.append(loss_of(made))
        delays, lateness = late.delays(config, lateness, jnp.int32(number))
        seen |= set(delays.tolist())
        for i, (delay, share) in enumerate(zip(delays.tolist(), shares_of(made), strict=True)):
            there = coming[number + delay]
            coming[number + delay] = [*there[:i], added([there[i], share]), *there[i + 1 :]]
        params, state = update(clipped(added(coming[number])), state, params)
    assert len(seen) > 1
    trained = Trained(recipe)
    got = trained(begun(recipe, plain.params), batches())
    np.testing.assert_allclose(trained.losses, losses, rtol=TOLERANCE)
    assert_close(got.params, params, TOLERANCE)
    np.testing.assert_allclose(got.sync.lateness, lateness, rtol=TOLERANCE)


def test_the_largest_of_momentum_with_a_ramp(plain):
    """Deep Gradient Compression: replicas exchange the largest of their own momentum, which begins
    anew where it was sent; the fraction falls by quarters."""
    config = dataclasses.replace(OPTIMIZER, b1=0.0)
    values = dict(momentum=0.5, ramp_steps=3, fraction=0.05)
    trained = Trained(make_recipe("top_k", optimizer=config, sync=values))
    optimizer = optimizers.make(config, axes=AXES, total_steps=STEPS).whole
    params, state = plain.params, optimizer.init(plain.params)
    own = [times(plain.params, 0)] * 4
    waiting, losses = list(own), []
    fractions = [0.25, 0.25, 0.0625, 0.05, 0.05, 0.05]

    def sent(x, fraction, layered):
        rows = np.asarray(x).reshape(len(x) if layered else 1, -1)
        found = np.zeros_like(rows)
        for i, row in enumerate(rows):
            for at in range(0, row.size, 4096):
                block = row[at : at + 4096]
                size = min(4096, row.size)
                top = np.argsort(-np.abs(np.pad(block, (0, size - block.size))), kind="stable")
                top = top[: max(1, round(fraction * size))]
                top = top[top < block.size]
                found[i, at + top] = block[top]
        return found.reshape(np.shape(x))

    for fraction, batch in zip(fractions, batches(), strict=True):
        made = plain.of_rows(params, batch, 4)
        losses.append(loss_of(made))
        chosen_ones = []
        for i, share in enumerate(shares_of(made)):
            own[i] = added([times(own[i], 0.5), times(share, 0.5)])
            x = added([waiting[i], own[i]])
            top = jax.tree_util.tree_map_with_path(
                lambda path, x: sent(x, fraction, path[0].key == "blocks"),  # noqa: B023
                x,
            )
            waiting[i] = minus(x, top)
            own[i] = jax.tree.map(lambda m, w: np.where(w == 0, 0, m), own[i], waiting[i])
            chosen_ones.append(top)
        updates, state = optimizer.update(clipped(added(chosen_ones)), state, params)
        params = jax.device_get(optax.apply_updates(params, updates))
    got = trained(begun(trained.recipe, plain.params), batches())
    assert trained.phases == ["ramp_1"] * 2 + ["ramp_2"] + [COMPRESSED] * 3
    np.testing.assert_allclose(trained.losses, losses, rtol=TOLERANCE)
    assert_close(got.params, params, TOLERANCE)
    for i, each in enumerate(own):
        assert_close(
            {name: leaf[i] for name, leaf in jax.device_get(got.sync.momentum).items()},
            trees.named(each), TOLERANCE,
        )  # fmt: skip


@pytest.fixture(scope="module")
def one_bit(plain):
    """1-bit Adam on four replicas: two steps of warm-up, four compressed."""
    trained = Trained(make_recipe("one_bit", sync=dict(warmup_steps=WARMUP)))
    return trained, trained(begun(trained.recipe, plain.params), batches())


def assert_one_bit(trained: Trained, state: State, wanted, first: int = 0):
    losses, params, mu, signs = wanted
    num = STEPS - first
    assert trained.phases[:num] == ([MEAN] * WARMUP + [COMPRESSED] * STEPS)[first:STEPS]
    np.testing.assert_allclose(trained.losses[:num], losses[first:], rtol=TOLERANCE)
    assert_close(state.params, params, TOLERANCE)
    assert_close(state.opt_state[0].mu, mu, TOLERANCE)
    assert_close(state.sync.residuals.errors, signs.errors, TOLERANCE)
    assert_close(seen_by(state)[1], signs.server, TOLERANCE)


def test_one_bit_adam(plain, one_bit):
    trained, state = one_bit
    since = slice(WARMUP, STEPS)
    wanted = plain_one_bit(plain, OPTIMIZER, trained.norms[since], trained.seen[since])
    assert_one_bit(trained, state, wanted)


def test_the_variance_is_frozen_when_it_has_settled(plain):
    """The rule of the paper, on the norms that a run has: with b2 = 0.5 every second step is
    compared with the one two steps before. One batch again and again, so that it does settle."""
    config = dataclasses.replace(OPTIMIZER, b2=0.5, warmup_steps=3, learning_rate=1e-4)
    recipe = make_recipe("one_bit", optimizer=config, sync=dict(warmup_steps=-1))
    state, norms, found = begun(recipe, plain.params), {}, -1
    with jax.set_mesh(recipe.mesh):
        programs, batch = runs.make_programs(recipe), runs.put_batch(recipe, batches()[0])
        for number in range(12):
            state, report = programs(number, state, batch)
            norms[number] = sum(
                float(jnp.abs(v).sum()) for v in jax.tree.leaves(state.opt_state[0].nu)
            )
            if number % 2 and number >= 3 and found < 0:
                low, high = sorted((norms[number], norms[number - 2]))
                found = number if low / high >= 0.96 else -1
            assert int(report.scalars["freeze_step"]) == found
        assert 3 <= found < 12
        assert runs.phase(recipe, found + 1, found) == MEAN
        assert runs.phase(recipe, found + 2, found) == COMPRESSED
        frozen = jax.device_get(state.opt_state[0].nu)
        programs.freeze_step = 10  # as if the step before the last had found it
        assert [programs.phase(number) for number in (11, 12)] == [MEAN, COMPRESSED]
        state, report = programs(12, state, batch)
    assert_close(state.opt_state[0].nu, frozen, 0)
    assert int(state.sync.num_updates) == 12 and np.isfinite(report.loss)


@pytest.fixture(scope="module")
def one_bit_lamb(plain):
    """1-bit LAMB on four replicas from the end of its warm-up on, which is the mean's."""
    recipe = make_recipe("one_bit_lamb", optimizer=LAMB, sync=dict(warmup_steps=WARMUP))
    trained = Trained(recipe)
    state = begun(trained.recipe, *plain_mean(plain, WARMUP, "lamb")[1:], step=WARMUP)
    return trained, trained(state, batches()[WARMUP:], WARMUP)


def test_one_bit_lamb(plain, one_bit_lamb):
    trained, state = one_bit_lamb
    num = STEPS - WARMUP
    wanted = plain_one_bit(plain, LAMB, trained.norms[:num], trained.seen[:num])
    assert_one_bit(trained, state, wanted, WARMUP)


@pytest.fixture(scope="module")
def zero_one(plain):
    trained = Trained(make_recipe("zero_one", optimizer=ZERO_ONE))
    return trained, trained(begun(trained.recipe, plain.params), batches())


def test_zero_one_adam(plain, zero_one):
    trained, state = zero_one
    assert trained.phases[:STEPS] == [VARIANCE] * 3 + [LOCAL] * 3
    losses, params, mus = plain_zero_one(plain, trained.recipe, trained.seen)
    np.testing.assert_allclose(trained.losses[:STEPS], losses, rtol=TOLERANCE)
    assert_close(state.params, params, TOLERANCE)
    for i, mu in enumerate(mus):
        assert_close(replica(state.sync.opt_state[0].mu, i), mu, TOLERANCE)


# ------------------------------------------------------------------------- compression switched off

OFF = [
    ("top_k", dict(fraction=1.0), ()),
    ("power_sgd", dict(rank=64), pytest.mark.slow),
    ("one_bit", dict(warmup_steps=STEPS), pytest.mark.slow),
    ("diloco", dict(warmup_steps=STEPS), pytest.mark.slow),
    ("one_bit_lamb", dict(warmup_steps=STEPS), pytest.mark.slow),
    ("stale", dict(staleness=0), pytest.mark.slow),
    ("int8", dict(warmup_steps=STEPS), pytest.mark.slow),
    ("top_k", dict(warmup_steps=STEPS), pytest.mark.full_grid),
    ("power_sgd", dict(warmup_steps=STEPS), pytest.mark.full_grid),
    ("stale", dict(warmup_steps=STEPS + 5), pytest.mark.full_grid),
    ("zero_one", dict(warmup_steps=STEPS), pytest.mark.slow),
    ("local_sgd", dict(warmup_steps=STEPS), pytest.mark.full_grid),
]


@pytest.fixture(scope="module")
def mean(plain):
    """What replicas do that agree by the mean, by optimizer."""

    @functools.cache
    def of(name: str):
        optimizer = LAMB if name == "lamb" else OPTIMIZER
        trained = Trained(make_recipe("mean", optimizer=optimizer))
        return trained, trained(begun(trained.recipe, plain.params), batches()[:4])

    return of


@pytest.mark.parametrize(
    "strategy, values", [pytest.param(*cell, marks=marks) for *cell, marks in OFF], ids=str
)
def test_without_compression_it_is_the_mean(plain, mean, strategy, values):
    name = "lamb" if strategy == "one_bit_lamb" else "adamw"
    reference, wanted = mean(name)
    optimizer = LAMB if name == "lamb" else OPTIMIZER
    trained = Trained(make_recipe(strategy, optimizer=optimizer, sync=values))
    state = trained(begun(trained.recipe, plain.params), batches()[:4])
    np.testing.assert_allclose(trained.losses, reference.losses, rtol=SAME)
    assert_close(state.params, wanted.params, SAME)


def test_the_mean_is_that_of_a_plain_loop(plain, mean):
    trained, state = mean("adamw")
    losses, params, _ = plain_mean(plain, 4)
    np.testing.assert_allclose(trained.losses, losses, rtol=TOLERANCE)
    assert_close(state.params, params, TOLERANCE)


# --------------------------------------------------------------------- however a replica is split

# Of each strategy one or two without --full-grid.
S, F = pytest.mark.slow, pytest.mark.full_grid
STAGED = dict(batch__accumulation=2)
CELLS = [
    ({"data": 2, "fsdp": 2}, "zero3", dict(batch__accumulation=2), F),
    ({"data": 2, "stage": 2}, "zero1", STAGED | dict(pipeline__schedule="zb_h1"), F),
    ({"data": 2, "fsdp": 2}, "ddp", dict(batch__accumulation=2), F),
    ({"data": 2, "fsdp": 2}, "hsdp", dict(remat="full"), F),
    ({"data": 2, "fsdp": 2, "tensor": 2}, "zero1", {}, F),
    ({"data": 2, "fsdp": 2, "sequence": 2}, "zero2", {}, F),
    ({"data": 2, "sequence": 2, "tensor": 2}, "zero2", {}, F),
    ({"data": 2, "fsdp": 2, "tensor": 2}, "zero3", {}, S),
    ({"data": 2, "stage": 2}, "ddp", STAGED, F),
    ({"data": 2, "stage": 2, "fsdp": 2}, "zero3", dict(batch__accumulation=4), F),
]
OTHERS = [
    ("zero_one", {"data": 2, "fsdp": 2}, "zero3", {}, S),
    ("zero_one", {"data": 2, "stage": 2}, "zero1", STAGED | dict(pipeline__schedule="zb_h1"), F),
    ("diloco", {"data": 2, "fsdp": 2}, "zero3", {}, S),
    ("diloco", {"data": 2, "tensor": 2}, "zero1", {}, S),
]
VALUES = {
    "one_bit": dict(sync=dict(warmup_steps=WARMUP)),
    "zero_one": dict(optimizer=ZERO_ONE),
    "diloco": dict(sync=dict(every=2)),
}


def shown(value) -> str:
    if isinstance(value, dict):
        return "-".join(f"{name}{size}" for name, size in value.items())
    return str(value)


@pytest.fixture(scope="module")
def whole_replicas(plain):
    """Two replicas of a device each, by strategy; 1-bit Adam from the end of its warm-up on."""

    @functools.cache
    def of(strategy: str):
        first = WARMUP if strategy == "one_bit" else 0
        _, params, opt_state = plain_mean(plain, first)
        opt_state = opt_state if first else None
        trained = Trained(make_recipe(strategy, {"data": 2}, **VALUES[strategy]))
        state = begun(trained.recipe, params, opt_state)
        return trained, (first, params, opt_state), trained(state, batches()[first:], first)

    return of


@pytest.mark.parametrize(
    "strategy, mesh, layout, options",
    [
        *(pytest.param("one_bit", *cell, marks=marks) for *cell, marks in CELLS),
        *(pytest.param(*cell, marks=marks) for *cell, marks in OTHERS),
    ],
    ids=shown,
)
def test_however_a_replica_is_split_it_is_the_same(whole_replicas, strategy, mesh, layout, options):
    whole, (first, params, opt_state), wanted = whole_replicas(strategy)
    recipe = make_recipe(strategy, mesh, layout, **options, **VALUES[strategy])
    trained = Trained(recipe)
    state = trained(begun(recipe, params, opt_state), batches()[first:], first)
    np.testing.assert_allclose(trained.losses, whole.losses, rtol=TOLERANCE)
    np.testing.assert_allclose(trained.norms, whole.norms, rtol=TOLERANCE)
    got = runs.in_order(recipe, state.params)
    assert_close(got, wanted.params, TOLERANCE)
    if strategy == "diloco":
        return
    shapes = {name: leaf.shape for name, leaf in trees.named(got).items()}
    kept = [jax.device_get(each.sync.residuals) for each in (state, wanted)]
    assert_close(kept[0].errors, kept[1].errors, TOLERANCE)
    servers = [{k: reshard.whole(a, shapes[k]) for k, a in each.server.items()} for each in kept]
    assert_close(*servers, TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["one_bit", "zero_one", "diloco"])
def test_bf16_runs(plain, strategy):
    recipe = make_recipe(
        strategy, {"data": 2, "fsdp": 2}, "zero3", precision="bf16", remat="full",
        **VALUES[strategy],
    )  # fmt: skip
    trained = Trained(recipe)
    state = trained(begun(recipe, plain.params), batches())
    assert np.all(np.isfinite(trained.losses))
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(state.params))


# --------------------------------------------------------------------------- what does not move


def test_coordinates_without_a_gradient_do_not_move(plain, one_bit):
    """Rows of tokens that never occur: they decay and nothing else."""
    _, state = one_bit
    rates = [learning_rate(OPTIMIZER, number) for number in range(STEPS)]
    factor = np.prod([1 - OPTIMIZER.weight_decay * rate for rate in rates])
    got = np.asarray(state.params["embedding"])[UNUSED:]
    np.testing.assert_allclose(got, factor * plain.params["embedding"][UNUSED:], rtol=SAME)
    assert not np.any(np.asarray(state.opt_state[0].mu["embedding"])[UNUSED:])
    kept = jax.device_get(state.sync.residuals)
    assert not np.any(kept.errors["embedding"][:, UNUSED:])
    server = reshard.whole(kept.server["embedding"], state.params["embedding"].shape)
    assert not np.any(server[UNUSED:]) and np.any(server[:UNUSED])


def spoilt(batch: dict) -> dict:
    weights = batch["weights"].copy()
    weights[5, 3] = np.nan  # of one replica's rows
    return batch | {"weights": weights}


@pytest.mark.parametrize("strategy", ["one_bit", "zero_one", "diloco", "int8"])
def test_the_rate_in_the_report_is_the_one_of_the_update(plain, strategy):
    """After skipped steps too: the decay of rows without a gradient shows it."""
    values = dict(sync=dict(warmup_steps=2)) if strategy == "one_bit" else {}
    config = dataclasses.replace(OPTIMIZER, weight_decay=100.0)
    recipe = make_recipe(strategy, optimizer=config, **values)
    state = begun(recipe, plain.params)

    def seen(state):
        own = state.sync.params if strategy in ("zero_one", "diloco") else state.params
        rows = np.asarray(own["embedding"], "f8").reshape(-1, *plain.params["embedding"].shape)
        return np.abs(rows[0, UNUSED:]).sum()

    programs = runs.make_programs(recipe)
    with jax.set_mesh(recipe.mesh):
        for number, good in enumerate(batches()[:-1]):  # an outer step follows the last one
            before, bad = seen(state), number in (0, 3)
            given = runs.put_batch(recipe, spoilt(good) if bad else good)
            state, report = programs(number, state, given)
            rate = 0.0 if bad else float(report.learning_rate)
            used = (1 - seen(state) / before) / config.weight_decay
            assert used == pytest.approx(rate, rel=1e-3, abs=1e-7)
            assert float(report.learning_rate) == pytest.approx(learning_rate(config, number))


def unchanged(state: State):
    """All but the counters that go on."""
    state = jax.device_get(state)
    return state.params, state.opt_state, state.sync._replace(num_updates=None)


def at(state: State, step: int) -> State:
    """At another step, and so at another learning rate."""
    return state._replace(step=jax.device_put(np.int32(step), state.step.sharding))


@pytest.mark.parametrize("strategy", ["one_bit", "one_bit_lamb"])
def test_a_bad_batch_leaves_all_as_it_was(plain, request, strategy):
    """The first compressed batch is bad, and one in the middle: as if they had not been."""
    trained, _ = request.getfixturevalue(strategy)
    name = "lamb" if strategy == "one_bit_lamb" else "adamw"
    _, params, opt_state = plain_mean(plain, WARMUP, name)
    good = batches()[WARMUP:]
    start = lambda: begun(trained.recipe, params, opt_state)  # noqa: E731
    wanted = trained(at(start(), 1), good[:1], WARMUP)
    wanted = trained(at(wanted, 3), good[1:2], WARMUP + 1)  # of two batches at these rates
    state, before = start(), jax.device_get(start())
    state = trained(state, [spoilt(good[0])], WARMUP)
    for got, was in zip(
        jax.tree.leaves((state.params, state.opt_state, state.sync.residuals)),
        jax.tree.leaves((before.params, before.opt_state, before.sync.residuals)), strict=True,
    ):  # fmt: skip
        np.testing.assert_array_equal(got, was)
    assert (int(state.guard.num_bad), int(state.step)) == (1, 1)
    assert int(state.sync.num_updates) == WARMUP
    state = trained(state, [good[0], spoilt(good[1]), good[1]], WARMUP)
    for got, was in zip(
        jax.tree.leaves(unchanged(state)), jax.tree.leaves(unchanged(wanted)), strict=True
    ):
        np.testing.assert_array_equal(got, was)


def test_a_run_that_was_stopped_stays_where_it_is(plain, one_bit):
    """In the first compressed step too, which begins to learn anew what norms are usual."""
    trained, _ = one_bit
    start = begun(trained.recipe, plain.params)
    stopped = jax.device_put(np.array(True), start.guard.stopped.sharding)
    start = start._replace(guard=start.guard._replace(stopped=stopped))
    before = jax.device_get(start)
    after = jax.device_get(trained(start, batches()[:1], WARMUP))
    assert bool(after.guard.stopped) and int(after.step) == 0
    for got, was in zip(
        jax.tree.leaves(unchanged(after)), jax.tree.leaves(unchanged(before)), strict=True
    ):
        np.testing.assert_array_equal(got, was)


def test_a_bad_batch_of_replicas_that_go_on_alone(plain, zero_one):
    """Nothing moves but what was left over from before, and momentum stays."""
    trained, _ = zero_one
    state = trained(begun(trained.recipe, plain.params), batches()[:2])
    mu = jax.device_get(state.sync.opt_state[0].mu)
    state = trained(state, [spoilt(batches()[2])], 2)
    got = jax.device_get(state.sync.opt_state[0].mu)
    jax.tree.map(np.testing.assert_array_equal, got, mu)
    state = trained(state, batches()[3:], 3)
    assert np.all(np.isfinite(trained.losses[-3:]))
    assert max(trained.losses[-3:]) < 1.1 * max(trained.losses[:2])

"""Replicas that agree in their own way train as a plain loop over one device's gradients does.

The loops below take each replica's gradient by itself, on one device, and do with NumPy and optax
what the strategy's paper says. However a replica is split inside, it is the same replica.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import packed
import plain_signs
import pytest

from llmx import (
    families,
    gradients,
    guard,
    model,
    optim,
    parts,
    pipeline,
    precision,
    sharding,
    step,
    sync,
    trees,
)
from llmx.state import Pipeline, Setup, State
from llmx.sync import ALONE, COMPRESSED, MEAN, VARIANCE

TOLERANCE = 1e-5  # relative; the parity contract of docs/architecture.md
SAME = 1e-6  # relative: the same numbers in another program, in fp32
BATCH, LENGTH, VOCAB, STEPS, WARMUP = 16, 16, 90, 6, 2
UNUSED = 80  # tokens from here on never occur: their rows have no gradient
CLIP = 0.5  # gradients are longer, so that it matters who clips what

# Learning rates that halve within the six steps; see tests/test_parity.py for eps.
OPTIMIZER = optim.OptimizerConfig(learning_rate=1e-3, warmup_steps=1, eps=1e-3)
# 0/1 Adam takes the signs of differences of parameters: steps are to be long against a rounding of
# these, and to be zero where there is no gradient.
ZERO_ONE = dataclasses.replace(OPTIMIZER, learning_rate=3e-2, weight_decay=0.0)
LAMB = dataclasses.replace(OPTIMIZER, name="lamb", learning_rate=1e-2)


def batches() -> list[dict]:
    return packed.batches(STEPS, rows=BATCH, length=LENGTH, vocab=UNUSED)


def setup_of(
    strategy: str | None, mesh: dict | None = None, layout: str = "ddp", *, schedule: str = "",
    accumulation: int = 1, remat: str = "none", policy: str = "fp32",
    optimizer: optim.OptimizerConfig = OPTIMIZER, **values,
) -> Setup:  # fmt: skip
    config = families.preset(
        "llama3", vocab_size=VOCAB, vocab_multiple=8, width=32, num_layers=2, num_heads=4,
        num_kv_heads=2, head_dim=8, mlp_dim=64,
    )  # fmt: skip
    mesh = {"data": 4} if mesh is None else mesh
    devices = jax.devices()[: int(np.prod(list(mesh.values())))]
    run = model.Execution(
        place=sharding.Placement(
            sharding.make_mesh(mesh, devices=devices), sharding.make_layout(layout)
        ),
        policy=precision.POLICIES[policy],
        remat=remat,
    )
    stages = None
    if schedule:
        table = pipeline.SCHEDULES[schedule](mesh["stage"], accumulation)
        stages = Pipeline(table, parts.cut(config.num_layers, table.stage_of), (BATCH, LENGTH))
    chosen = None if strategy is None else sync.SyncConfig(strategy, **values)
    return step.make_setup(
        config, run, optimizer, total_steps=STEPS, pipeline=stages, sync_config=chosen
    )


SKIP = guard.GuardConfig(on_bad_step="skip")


class Trained:
    """A setup on its way through the batches; programs are compiled once."""

    def __init__(self, setup: Setup, accumulation: int = 1):
        self.setup = setup
        self.losses, self.norms, self.phases = [], [], []
        self._step = functools.cache(
            lambda phase: step.make_train_step(
                setup, phase=phase, clip_norm=CLIP, guard=SKIP, accumulation=accumulation
            )
        )
        self._meetings = step.make_meetings(setup)

    def __call__(self, state: State, given: list[dict], first: int = 0) -> State:
        table = self.setup.timetable
        with jax.set_mesh(self.setup.mesh):
            for number, batch in enumerate(given, first):
                phase = MEAN if table is None else table.phase(number)
                placed = jax.device_put(batch, self.setup.batch_sharding)
                state, report = self._step(phase)(state, placed)
                if table is not None and (due := table.fragments_after(number)):
                    state = self._meetings[due](state)
                self.losses.append(float(report.loss))
                self.norms.append(float(report.grad_norm))
                self.phases.append(phase)
        return state


def begun(setup: Setup, params, opt_state=None) -> State:
    """A new state at these parameters, and behind a warm-up at this optimizer state."""
    zeros = lambda tree: jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), tree)  # noqa: E731
    state = zeros(setup.abstract)
    if setup.pipeline is not None:
        params = params | {"blocks": setup.pipeline.parts.staged(params["blocks"])}
    state = state._replace(params=params)
    if state.opt_state is not None:
        opt_state = setup.optimizer.init(params) if opt_state is None else opt_state
        state = state._replace(opt_state=opt_state)
    if state.sync is not None and state.sync.params is not None:
        stack = lambda leaf: np.broadcast_to(leaf, (setup.replicas.size, *np.shape(leaf)))  # noqa: E731
        state = state._replace(sync=state.sync._replace(params=jax.tree.map(stack, params)))
    if state.sync is not None:
        state = state._replace(sync=state.sync._replace(settled_at=np.int32(-1)))
    return jax.device_put(state, jax.tree.map(lambda leaf: leaf.sharding, setup.abstract))


def assert_near(got, wanted, tolerance: float):
    got, wanted = jax.device_get((got, wanted))
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for (path, leaf), found in zip(
        jax.tree_util.tree_leaves_with_path(wanted), jax.tree.leaves(got), strict=True
    ):
        distance = np.linalg.norm(np.asarray(found - leaf, "f8"))
        assert distance <= tolerance * np.linalg.norm(leaf), sharding.path_name(path)


# --------------------------------------------------------------------------------------- the plain


@dataclasses.dataclass(frozen=True)
class Plain:
    """One device: parameters to begin with, and gradients of any rows."""

    setup: Setup
    params: dict  # on the host
    gradient: object  # (params, batch) -> (loss, tokens, gradients) on the host

    def of_rows(self, params, batch: dict, num: int) -> list[tuple]:
        """What each of `num` replicas has: (loss, share of the tokens, gradient of its mean).

        Parameters: the same for all, or a list.
        """
        rows = BATCH // num
        parts = [{k: a[i * rows : (i + 1) * rows] for k, a in batch.items()} for i in range(num)]
        params = params if isinstance(params, list) else [params] * num
        made = [self.gradient(p, part) for p, part in zip(params, parts, strict=True)]
        total = sum(tokens for _, tokens, _ in made)
        return [(loss, tokens / total, grads) for loss, tokens, grads in made]


@pytest.fixture(scope="module")
def plain() -> Plain:
    setup = setup_of(None, {"data": 1})
    take = jax.jit(gradients.of_batch(setup, accumulation=1, z_loss=0.0, gather="layer"))

    def gradient(params, batch):
        with jax.set_mesh(setup.mesh):
            to = jax.tree.map(lambda leaf: leaf.sharding, setup.abstract.params)
            batch = jax.device_put(batch, setup.batch_sharding)
            (loss, _), tokens, grads, _ = take(jax.device_put(params, to), batch)
        return float(loss), float(tokens), jax.device_get(grads)

    return Plain(setup, jax.device_get(setup.init(0).params), gradient)


def times(tree, factor):
    return jax.tree.map(lambda leaf: np.float32(factor) * leaf, tree)


def added(trees):
    return jax.tree.map(lambda *leaves: np.sum(leaves, axis=0, dtype="f4"), *trees)


def minus(tree, other, factor=1.0):
    """tree - factor * other."""
    return jax.tree.map(lambda a, b: a - np.float32(factor) * b, tree, other)


def replica(tree, i: int):
    """Of arrays [n, ...] replica i's."""
    return jax.tree.map(lambda leaf: leaf[i], jax.device_get(tree))


def mean_of(trees):
    return times(added(trees), 1 / len(trees))


def norm_of(tree) -> float:
    return float(optax.tree.norm(tree))


def clipped(grads):
    return times(grads, CLIP / max(norm_of(grads), CLIP))


def shares_of(made):
    return [times(grads, share) for _, share, grads in made]


def loss_of(made) -> float:
    return sum(loss * share for loss, share, _ in made)


@functools.cache
def updater(name: str, total: int = STEPS):
    """A jitted (gradient, optimizer state, parameters) -> (parameters, state)."""
    config = {"adamw": OPTIMIZER, "lamb": LAMB}[name]
    optimizer = optim.make(config, axes=AXES, total_steps=total)

    def update(grads, state, params):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return optimizer, jax.jit(update)


_, AXES = model.abstract_parameters(setup_of(None, {"data": 1}).model)
NAMES = {
    sharding.path_name(path): axes
    for path, axes in jax.tree_util.tree_leaves_with_path(
        AXES, is_leaf=lambda leaf: isinstance(leaf, tuple)
    )
}


def plain_mean(plain: Plain, steps: int, name: str = "adamw"):
    """(losses, parameters, optimizer state) of replicas that sum their gradients."""
    optimizer, update = updater(name)
    params, state, losses = plain.params, optimizer.init(plain.params), []
    for batch in batches()[:steps]:
        made = plain.of_rows(params, batch, 4)
        losses.append(loss_of(made))
        params, state = update(clipped(added(shares_of(made))), state, params)
    return losses, jax.device_get(params), jax.device_get(state)


# --------------------------------------------------------------------------- against plain loops


def chosen(fragments, num: int, new, old):
    """`new` in these of `num` fragments of the parameters, `old` elsewhere."""

    def one(path, new, old):
        layered = path[0].key == "blocks"
        rows = [row % num in fragments for row in range(len(new))] if layered else 0 in fragments
        there = np.reshape(rows, (-1, *(1,) * (np.ndim(new) - 1))) if layered else rows
        return np.where(there, new, old)

    return jax.tree_util.tree_map_with_path(one, new, old)


@pytest.mark.parametrize(
    ("strategy", "num"),
    [pytest.param("local_sgd", 1, marks=pytest.mark.slow), ("diloco", 1), ("diloco", 2)],
)
def test_replicas_that_go_on_alone_and_meet(plain, strategy, num):
    """local_sgd: at the mean; diloco: at what SGD with Nesterov momentum makes of it, in fragments
    one after the other, and all of them at the end."""
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
            anchor = chosen(fragments, num, new, anchor)
            own = [chosen(fragments, num, anchor, mine) for mine in own]
            if strategy == "diloco":
                kept = chosen(fragments, num, new_trace[0].trace, trace[0].trace)
                trace = (optax.TraceState(kept), *trace[1:])
    setup = setup_of(strategy, every=2, fragments=num)
    trained = Trained(setup)
    state = trained(begun(setup, plain.params), batches())
    np.testing.assert_allclose(trained.losses, losses, rtol=TOLERANCE)
    assert_near(state.params, anchor, TOLERANCE)
    for i, each in enumerate(states):
        assert_near(replica(state.sync.opt_state[0].mu, i), each[0].mu, TOLERANCE)


def test_gradients_that_come_late(plain):
    """`sync.delays` says by how much; the rest is a list of what comes when."""
    optimizer, update = updater("adamw")
    params, state, losses = plain.params, optimizer.init(plain.params), []
    setup = setup_of("stale", staleness=2)
    lateness = np.zeros(4, "f4")
    coming = [times(plain.params, 0) for _ in range(STEPS + 2)]
    seen = set()
    for number, batch in enumerate(batches()):
        made = plain.of_rows(params, batch, 4)
        losses.append(loss_of(made))
        delays, lateness = sync.delays(setup.replicas.config, lateness, jnp.int32(number))
        seen |= set(delays.tolist())
        for delay, share in zip(delays.tolist(), shares_of(made), strict=True):
            coming[number + delay] = added([coming[number + delay], share])
        params, state = update(clipped(coming[number]), state, params)
    assert len(seen) > 1
    trained = Trained(setup)
    got = trained(begun(setup, plain.params), batches())
    np.testing.assert_allclose(trained.losses, losses, rtol=TOLERANCE)
    assert_near(got.params, params, TOLERANCE)
    np.testing.assert_allclose(got.sync.lateness, lateness, rtol=TOLERANCE)


class PlainSigns:
    """Exchanges of trees in signs, with the errors of four replicas and their servers."""

    def __init__(self, like):
        like = trees.named(like)
        self.errors = {name: np.zeros((4, *leaf.shape), "f4") for name, leaf in like.items()}
        self.server = {name: np.zeros(leaf.shape, "f4") for name, leaf in like.items()}

    def __call__(self, terms: list[dict], live: dict) -> dict:
        sums = {}
        for name, axes in NAMES.items():
            stacked = np.stack([np.asarray(trees.named(term)[name], "f4") for term in terms])
            sums[name], self.errors[name], self.server[name] = plain_signs.exchanged(
                stacked, self.errors[name], self.server[name], trees.named(live)[name], axes
            )
        return trees.unnamed(sums, live)


def size_of(nu, count: int):
    """What Adam divides by."""
    b2 = OPTIMIZER.b2
    return jax.tree.map(lambda v: np.sqrt(v / np.float32(1 - b2**count)) + np.float32(1e-3), nu)


def learning_rate(config: optim.OptimizerConfig, count: int) -> float:
    return float(optim.make_schedule(config, total_steps=STEPS)(count))


def decayed(update, params, config: optim.OptimizerConfig = OPTIMIZER):
    decay = lambda u, p, on: u + np.float32(config.weight_decay) * p if on else u  # noqa: E731
    return jax.tree.map(decay, update, params, optim.decay_mask(AXES))


def plain_one_bit(plain: Plain, config: optim.OptimizerConfig):
    """1-bit Adam or LAMB: (losses, parameters, momentum, the exchange)."""
    b1, b2 = np.float32(config.b1), np.float32(config.b2)
    losses, params, state = plain_mean(plain, WARMUP, config.name)
    mu, nu = state[0].mu, state[0].nu
    fresh, signs = nu, PlainSigns(plain.params)
    live, size = jax.tree.map(lambda v: v > 0, nu), size_of(nu, WARMUP)
    # LAMB: the average of trust ratios so far, and the factors on it since.
    average = trees.named(state[2].average) if config.name == "lamb" else {}
    factor = {name: np.ones_like(ratio) for name, ratio in average.items()}
    for number, batch in list(enumerate(batches()))[WARMUP:]:
        made = plain.of_rows(params, batch, 4)
        losses.append(loss_of(made))
        norm = np.sqrt(np.mean([norm_of(grads) ** 2 for _, _, grads in made]))
        terms = []
        for share in shares_of(made):
            g = times(share, CLIP / max(norm, CLIP))
            m = jax.tree.map(lambda g, m: b1 * m / 4 + (1 - b1) * g, g, mu)
            terms.append(jax.tree.map(np.divide, m, size))
        direction = signs(terms, live)
        before, mu = mu, jax.tree.map(np.multiply, direction, size)
        update = decayed(times(direction, 1 / (1 - b1 ** (number + 1))), params)
        if average:
            shown = jax.tree.map(lambda m, old: (m - b1 * old) / (1 - b1), mu, before)
            fresh = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, fresh, shown)
            ratios = trees.named(jax.tree.map(np.divide, size, size_of(fresh, number + 1)))
            scaled = {}
            for name, u in trees.named(update).items():
                inner = tuple(range(average[name].ndim, u.ndim))
                lives = trees.named(live)[name]
                most = np.max(np.where(lives, ratios[name], 0), axis=inner).clip(0.5, 4)
                factor[name] = np.clip(most, 0.9 * factor[name], 1.1 * factor[name])
                scale = average[name] * factor[name]
                scaled[name] = u * scale.reshape(*scale.shape, *(1,) * len(inner))
            update = trees.unnamed(scaled, update)
        params = minus(params, update, learning_rate(config, number))
    return losses, params, mu, signs


@pytest.fixture(scope="module")
def one_bit(plain):
    """1-bit Adam on four replicas: two steps of warm-up, four compressed."""
    trained = Trained(setup_of("one_bit", warmup_steps=WARMUP))
    return trained, trained(begun(trained.setup, plain.params), batches())


def assert_one_bit(trained: Trained, state: State, wanted, first: int = 0):
    losses, params, mu, signs = wanted
    num = STEPS - first
    assert trained.phases[:num] == ([MEAN] * WARMUP + [COMPRESSED] * STEPS)[first:STEPS]
    np.testing.assert_allclose(trained.losses[:num], losses[first:], rtol=TOLERANCE)
    assert_near(state.params, params, TOLERANCE)
    assert_near(state.opt_state[0].mu, mu, TOLERANCE)
    assert_near(state.sync.kept.errors, signs.errors, TOLERANCE)
    shapes = {name: leaf.shape for name, leaf in trees.named(params).items()}
    servers = {
        name: sync.whole(array, shapes[name])
        for name, array in jax.device_get(state.sync.kept.server).items()
    }
    assert_near(servers, signs.server, TOLERANCE)


def test_one_bit_adam(plain, one_bit):
    assert_one_bit(*one_bit, plain_one_bit(plain, OPTIMIZER))


def test_the_variance_is_frozen_when_it_has_settled(plain):
    """The rule of the paper, on the norms that a run has: with b2 = 0.5 every second step is
    compared with the one two steps before. One batch again and again, so that it does settle."""
    config = dataclasses.replace(OPTIMIZER, b2=0.5, warmup_steps=3, learning_rate=1e-4)
    setup = setup_of("one_bit", optimizer=config, warmup_steps=-1)
    make = lambda phase: step.make_train_step(setup, phase=phase, clip_norm=CLIP)  # noqa: E731
    state, norms, found = begun(setup, plain.params), {}, -1
    with jax.set_mesh(setup.mesh):
        mean, batch = make(MEAN), jax.device_put(batches()[0], setup.batch_sharding)
        for number in range(12):
            state, report = mean(state, batch)
            norms[number] = sum(
                float(jnp.abs(v).sum()) for v in jax.tree.leaves(state.opt_state[0].nu)
            )
            if number % 2 and number >= 3 and found < 0:
                low, high = sorted((norms[number], norms[number - 2]))
                found = number if low / high >= 0.96 else -1
            assert int(report.settled_at) == found
        assert 3 <= found < 12
        assert setup.timetable.phase(found + 1, found) == MEAN
        assert setup.timetable.phase(found + 2, found) == COMPRESSED
        frozen = jax.device_get(state.opt_state[0].nu)
        state, report = make(COMPRESSED)(state, batch)
    assert_near(state.opt_state[0].nu, frozen, 0)
    assert int(state.sync.updates) == 12 and np.isfinite(report.loss)


@pytest.fixture(scope="module")
def one_bit_lamb(plain):
    """1-bit LAMB on four replicas from the end of its warm-up on, which is the mean's."""
    trained = Trained(setup_of("one_bit_lamb", warmup_steps=WARMUP, optimizer=LAMB))
    state = begun(trained.setup, *plain_mean(plain, WARMUP, "lamb")[1:])
    return trained, trained(state, batches()[WARMUP:], WARMUP)


def test_one_bit_lamb(plain, one_bit_lamb):
    assert_one_bit(*one_bit_lamb, plain_one_bit(plain, LAMB), WARMUP)


def plain_zero_one(plain: Plain, table: sync.Timetable):
    """0/1 Adam: (losses, parameters, each replica's momentum)."""
    b1, b2 = np.float32(OPTIMIZER.b1), np.float32(OPTIMIZER.b2)
    zeros = times(plain.params, 0)
    anchor, own, mus, nu = plain.params, [plain.params] * 4, [zeros] * 4, zeros
    signs, losses, moments, sums = PlainSigns(plain.params), [], 0, np.zeros(2)
    for number, batch in enumerate(batches()):
        made = plain.of_rows(own, batch, 4)
        losses.append(loss_of(made))
        grads = [clipped(grads) for _, _, grads in made]
        if table.phase(number) == VARIANCE:
            agreed = added([times(g, made[i][1]) for i, g in enumerate(grads)])
            nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, nu, agreed)
            moments += 1
        live, size = jax.tree.map(lambda v: v > 0, nu), size_of(nu, moments)
        rate, corrected = learning_rate(ZERO_ONE, number), 1 - OPTIMIZER.b1 ** (number + 1)
        direction = lambda m, size, on: np.where(on, m / size, np.float32(0))  # noqa: E731
        for i, g in enumerate(grads):
            mus[i] = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, mus[i], g)
            update = jax.tree.map(direction, times(mus[i], 1 / corrected), size, live)
            own[i] = minus(own[i], decayed(update, own[i], ZERO_ONE), rate)
        sums += rate, rate / corrected
        if table.fragments_after(number):
            bare = minus(anchor, decayed(zeros, anchor, ZERO_ONE), sums[0])
            moved = signs([times(minus(bare, each), 1 / 4) for each in own], live)
            where = lambda on, new, old: jax.tree.map(np.where, on, new, old)  # noqa: E731
            anchor = where(live, minus(bare, moved), own[0])
            own = [anchor] * 4
            momentum = times(jax.tree.map(np.multiply, moved, size), 1 / sums[1])
            mus = [where(live, momentum, mu) for mu in mus]
            sums = np.zeros(2)
    return losses, anchor, mus


@pytest.fixture(scope="module")
def zero_one(plain):
    trained = Trained(setup_of("zero_one", optimizer=ZERO_ONE))
    return trained, trained(begun(trained.setup, plain.params), batches())


def test_zero_one_adam(plain, zero_one):
    trained, state = zero_one
    assert trained.phases[:STEPS] == [VARIANCE] * 3 + [ALONE] * 3
    losses, params, mus = plain_zero_one(plain, trained.setup.timetable)
    np.testing.assert_allclose(trained.losses[:STEPS], losses, rtol=TOLERANCE)
    assert_near(state.params, params, TOLERANCE)
    for i, mu in enumerate(mus):
        assert_near(replica(state.sync.opt_state[0].mu, i), mu, TOLERANCE)


# ------------------------------------------------------------------------- compression switched off

OFF = [
    ("top_k", dict(fraction=1.0), ()),
    ("power_sgd", dict(rank=64), pytest.mark.slow),
    ("one_bit", dict(warmup_steps=STEPS), pytest.mark.slow),
    ("diloco", dict(warmup_steps=STEPS), pytest.mark.slow),
    ("one_bit_lamb", dict(warmup_steps=STEPS), pytest.mark.slow),
    ("stale", dict(staleness=0), pytest.mark.slow),
    ("int8", dict(warmup_steps=STEPS), pytest.mark.slow),
    ("top_k", dict(warmup_steps=STEPS), pytest.mark.slow),
    ("power_sgd", dict(warmup_steps=STEPS), pytest.mark.slow),
    ("stale", dict(warmup_steps=STEPS + 5), pytest.mark.slow),
    ("zero_one", dict(warmup_steps=STEPS), pytest.mark.slow),
    ("local_sgd", dict(warmup_steps=STEPS), pytest.mark.slow),
]


@pytest.fixture(scope="module")
def mean(plain):
    """What replicas do that agree by the mean, by optimizer."""

    @functools.cache
    def of(name: str):
        optimizer = LAMB if name == "lamb" else OPTIMIZER
        trained = Trained(setup_of("mean", optimizer=optimizer))
        return trained, trained(begun(trained.setup, plain.params), batches()[:4])

    return of


@pytest.mark.parametrize(
    "strategy, values", [pytest.param(*cell, marks=marks) for *cell, marks in OFF], ids=str
)
def test_without_compression_it_is_the_mean(plain, mean, strategy, values):
    name = "lamb" if strategy == "one_bit_lamb" else "adamw"
    reference, wanted = mean(name)
    trained = Trained(setup_of(strategy, optimizer=LAMB if name == "lamb" else OPTIMIZER, **values))
    state = trained(begun(trained.setup, plain.params), batches()[:4])
    np.testing.assert_allclose(trained.losses, reference.losses, rtol=SAME)
    assert_near(state.params, wanted.params, SAME)


def test_the_mean_is_that_of_a_plain_loop(plain, mean):
    trained, state = mean("adamw")
    losses, params, _ = plain_mean(plain, 4)
    np.testing.assert_allclose(trained.losses, losses, rtol=TOLERANCE)
    assert_near(state.params, params, TOLERANCE)


# --------------------------------------------------------------------- however a replica is split

Q, S = (), pytest.mark.slow
CELLS = [
    ({"data": 2, "fsdp": 2}, "zero3", dict(accumulation=2), Q),
    ({"data": 2, "stage": 2}, "zero1", dict(schedule="zb_h1", accumulation=2), S),
    ({"data": 2}, "ddp", dict(accumulation=2), S),
    ({"data": 2, "fsdp": 2}, "ddp", {}, S),
    ({"data": 2, "fsdp": 2}, "zero1", {}, S),
    ({"data": 2, "fsdp": 2}, "zero2", {}, S),
    ({"data": 2, "fsdp": 2}, "zero3", dict(remat="full"), S),
    ({"data": 2, "fsdp": 2}, "hsdp", {}, S),
    ({"data": 2, "tensor": 2}, "zero1", {}, S),
    ({"data": 2, "sequence": 2}, "zero2", {}, S),
    ({"data": 2, "sequence": 2, "tensor": 2}, "zero2", {}, S),
    ({"data": 2, "fsdp": 2, "tensor": 2}, "zero3", {}, S),
    ({"data": 2, "stage": 2}, "ddp", dict(schedule="1f1b", accumulation=2), S),
    ({"data": 2, "stage": 2, "fsdp": 2}, "zero3", dict(schedule="1f1b", accumulation=4), S),
]
OTHERS = [
    ("zero_one", {"data": 2, "fsdp": 2}, "zero3", {}, S),
    ("zero_one", {"data": 2, "stage": 2}, "zero1", dict(schedule="zb_h1", accumulation=2), S),
    ("diloco", {"data": 2, "fsdp": 2}, "zero3", {}, S),
    ("diloco", {"data": 2, "tensor": 2}, "zero1", {}, S),
]
VALUES = {
    "one_bit": dict(warmup_steps=WARMUP),
    "zero_one": dict(optimizer=ZERO_ONE),
    "diloco": dict(every=2),
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
        trained = Trained(setup_of(strategy, {"data": 2}, **VALUES[strategy]))
        state = begun(trained.setup, params, opt_state)
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
    setup = setup_of(strategy, mesh, layout, **options, **VALUES[strategy])
    trained = Trained(setup, options.get("accumulation", 1))
    state = trained(begun(setup, params, opt_state), batches()[first:], first)
    np.testing.assert_allclose(trained.losses, whole.losses, rtol=TOLERANCE)
    np.testing.assert_allclose(trained.norms, whole.norms, rtol=TOLERANCE)
    got = jax.device_get(state.params)
    if setup.pipeline is not None:
        got = got | {"blocks": setup.pipeline.parts.unstaged(got["blocks"])}
    assert_near(got, wanted.params, TOLERANCE)
    if strategy == "diloco":
        return
    shapes = {name: leaf.shape for name, leaf in trees.named(got).items()}
    kept = [jax.device_get(each.sync.kept) for each in (state, wanted)]
    assert_near(kept[0].errors, kept[1].errors, TOLERANCE)
    servers = [{k: sync.whole(a, shapes[k]) for k, a in each.server.items()} for each in kept]
    assert_near(*servers, TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["one_bit", "zero_one", "diloco"])
def test_bf16_runs(plain, strategy):
    setup = setup_of(
        strategy, {"data": 2, "fsdp": 2}, "zero3", policy="bf16", remat="full", **VALUES[strategy]
    )
    trained = Trained(setup)
    state = trained(begun(setup, plain.params), batches())
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
    kept = jax.device_get(state.sync.kept)
    assert not np.any(kept.errors["embedding"][:, UNUSED:])
    server = sync.whole(kept.server["embedding"], state.params["embedding"].shape)
    assert not np.any(server[UNUSED:]) and np.any(server[:UNUSED])


def spoilt(batch: dict) -> dict:
    weights = batch["weights"].copy()
    weights[5, 3] = np.nan  # of one replica's rows
    return batch | {"weights": weights}


def unchanged(state: State):
    """All but the counters that go on."""
    state = jax.device_get(state)
    kept = state.sync._replace(taken=None, updates=None)
    return state.params, state.opt_state, kept


@pytest.mark.parametrize("strategy", ["one_bit", "one_bit_lamb"])
def test_a_bad_batch_leaves_all_as_it_was(plain, request, strategy):
    """The first compressed batch is bad, and one in the middle: as if they had not been."""
    trained, _ = request.getfixturevalue(strategy)
    name = trained.setup.optimizer_config.name
    _, params, opt_state = plain_mean(plain, WARMUP, name)
    good = batches()[WARMUP:]
    start = lambda: begun(trained.setup, params, opt_state)  # noqa: E731
    wanted = trained(start(), good[:2], WARMUP)
    state, before = start(), jax.device_get(start())
    state = trained(state, [spoilt(good[0])], WARMUP)
    for got, was in zip(
        jax.tree.leaves((state.params, state.opt_state, state.sync.kept)),
        jax.tree.leaves((before.params, before.opt_state, before.sync.kept)), strict=True,
    ):  # fmt: skip
        np.testing.assert_array_equal(got, was)
    assert (int(state.guard.num_bad), int(state.step), int(state.sync.taken)) == (1, 1, 1)
    state = trained(state, [good[0], spoilt(good[1]), good[1]], WARMUP)
    for got, was in zip(
        jax.tree.leaves(unchanged(state)), jax.tree.leaves(unchanged(wanted)), strict=True
    ):
        np.testing.assert_array_equal(got, was)


def test_a_run_that_was_stopped_stays_where_it_is(plain, one_bit):
    """In the first compressed step too, which begins to learn anew what norms are usual."""
    trained, _ = one_bit
    start = begun(trained.setup, plain.params)
    stopped = jax.device_put(np.array(True), start.guard.stopped.sharding)
    start = start._replace(guard=start.guard._replace(stopped=stopped))
    before = jax.device_get(start)
    after = jax.device_get(trained(start, batches()[:1], WARMUP))
    assert bool(after.guard.stopped) and int(after.step) == int(after.sync.taken) == 0
    for got, was in zip(
        jax.tree.leaves(unchanged(after)), jax.tree.leaves(unchanged(before)), strict=True
    ):
        np.testing.assert_array_equal(got, was)


def test_a_bad_batch_of_replicas_that_go_on_alone(plain, zero_one):
    """Nothing moves but what was left over from before, and momentum stays."""
    trained, _ = zero_one
    state = trained(begun(trained.setup, plain.params), batches()[:2])
    mu = jax.device_get(state.sync.opt_state[0].mu)
    state = trained(state, [spoilt(batches()[2])], 2)
    got = jax.device_get(state.sync.opt_state[0].mu)
    jax.tree.map(np.testing.assert_array_equal, got, mu)
    state = trained(state, batches()[3:], 3)
    assert np.all(np.isfinite(trained.losses[-3:]))
    assert max(trained.losses[-3:]) < 1.1 * max(trained.losses[:2])

"""The trainer with updates of rows that come late, and with replicas that synchronize in their own
ways, equals plain loops over dense tables."""

import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import runs
from support.tiers import by_tier
from tables import test_training
from tables.test_training import EPS, PARITY, STEPS, batches, made

from llmx import library
from llmx.checkpoint import relaid
from llmx.model import looked_up
from llmx.model.recommender import apply as clicks
from llmx.model.recommender import recommender

REFUSED = 2  # the number of the step whose update is refused, where one is


def with_next(recipe, listed: list[dict]) -> list[dict]:
    """Batches as a loader gives them; the last has itself behind it."""
    after = [*listed[1:], listed[-1]]
    ahead = recipe.loss.read_ahead
    return [
        own | {here: one[there] for there, here in ahead.items()}
        for own, one in zip(listed, after, strict=True)
    ]


def train(config, listed, *, seen=None):
    """(losses, parameters, tables by name, the last state); `seen` is called with the recipe, the
    step and the state before each step."""
    recipe = runs.make_recipe(config)
    programs, losses = runs.make_programs(recipe), []
    listed = with_next(recipe, listed)
    with jax.set_mesh(recipe.mesh):
        state = recipe.begun(recipe.init(0), runs.put_batch(recipe, listed[0]))
        for number, batch in enumerate(listed):
            if seen is not None:
                seen(recipe, number, state)
            state, report = programs(number, state, runs.put_batch(recipe, batch))
            losses.append(float(report.loss))
    return losses, jax.device_get(state.params), tables_of(recipe, state), state


def tables_of(recipe, state) -> dict[str, np.ndarray]:
    tables = recipe.loss.execution.tables
    return {t.name: tables.table(state.extra[looked_up.TABLES], t.name) for t in tables.tables}


def loss_of(network, params, batch):
    """Dense lookups; the mean over records that count."""
    net_params, dense = params
    ids, first, embedded = batch["ids"][:, 0], 0, {}
    for name, length in (("C1", 1), ("C2", 3), ("C3", 1)):
        own = ids[:, first : first + length]
        first += length
        rows = dense[name][jnp.maximum(own, 0)] * (own >= 0)[..., None]
        embedded[name] = rows.sum(axis=1) / jnp.maximum((own >= 0).sum(axis=1), 1)[:, None]
    logit = network.logits(net_params, batch["dense"][:, 0], embedded, {})
    nats = recommender.losses(logit, batch["targets"][:, 0].astype(jnp.float32))[0]
    return jnp.sum(nats * batch["weights"][:, 0]) / batch["weights"].sum()


def start_of(config):
    recipe = runs.make_recipe(config)
    with jax.set_mesh(recipe.mesh):
        state = recipe.init(0)
    dense = {name: jnp.asarray(rows) for name, rows in tables_of(recipe, state).items()}
    return recipe, jax.device_get(state.params), dense


def rows_updated(dense, sums, update):
    """Adagrad; None: a refused update."""
    if update is None:
        return dense, sums
    gradients, rate = update
    sums = jax.tree.map(lambda s, g: s + g**2, sums, gradients)
    dense = jax.tree.map(lambda w, g, s: w - rate * g / (jnp.sqrt(s) + EPS), dense, gradients, sums)
    return dense, sums


def plain(config, listed):
    """(losses, parameters, tables), written without llmx's tables and step: the network by Adam at
    once, whole tables by Adagrad late, with a list of what waits."""
    recipe, net_params, dense = start_of(config)
    network = clicks._made(config.model)
    net = optax.chain(
        optax.clip_by_global_norm(config.optimizer.clip_norm),
        optax.scale_by_adam(
            b1=config.optimizer.b1, b2=config.optimizer.beta2, eps=config.optimizer.eps
        ),
    )  # fmt: skip
    sums = jax.tree.map(lambda w: jnp.full_like(w, config.tables.initial_square), dense)
    opt_state, losses, waiting = net.init(net_params), [], [None] * config.tables.staleness
    take = jax.jit(jax.value_and_grad(functools.partial(loss_of, network)))
    for number, batch in enumerate(listed):
        loss, (of_net, of_rows) = take((net_params, dense), batch)
        losses.append(float(loss))
        rate = float(recipe.schedule(number))
        update = None
        if np.isfinite(loss):
            updates, opt_state = net.update(of_net, opt_state)
            net_params = jax.tree.map(lambda p, u, rate=rate: p - rate * u, net_params, updates)
            update = of_rows, 0.05 * rate / config.optimizer.learning_rate
        waiting.append(update)
        dense, sums = rows_updated(dense, sums, waiting.pop(0))
    for update in waiting:  # after the last step
        dense, sums = rows_updated(dense, sums, update)
    return losses, net_params, dense


LATE = {
    "one": dict(tables__staleness=1),
    "data2_accumulation2": dict(
        tables__staleness=2, mesh={"data": 2}, batch__accumulation=2, tables__split="whole"
    ),
    "data2_fsdp2": dict(tables__staleness=3, mesh={"data": 2, "fsdp": 2}),
    "columns": dict(tables__staleness=1, mesh={"data": 4}, tables__split="columns"),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", by_tier(LATE, slow=("data2_accumulation2",), full=("columns", "data2_fsdp2"))
)
def test_late_rows_equal_a_plain_loop(name):
    """On any mesh, with microbatches, a refused update and rates that change; at the end of the
    run nothing waits."""
    number = STEPS + 2
    config = made(
        "dlrm", guard__on_bad_step="skip", optimizer__weight_decay=0.0, steps=number, **LATE[name]
    )
    listed = batches("dlrm", number)
    listed[REFUSED]["weights"][3] = np.inf
    wanted, found = plain(config, listed), train(config, listed)
    np.testing.assert_allclose(found[0], wanted[0], **PARITY)
    close = functools.partial(np.testing.assert_allclose, **PARITY)
    jax.tree.map(close, found[1], wanted[1])
    jax.tree.map(close, found[2], jax.device_get(wanted[2]))
    waiting = found[3].extra[looked_up.LATE].waiting
    assert not waiting.accepted.any() and len(waiting.accepted) == config.tables.staleness


@pytest.mark.slow
def test_late_ngrams_read_the_tokens_of_the_next_batch():
    """On four devices as on one."""
    keys = dict(tables__staleness=2, steps=STEPS)
    mesh = dict(mesh={"data": 2, "fsdp": 2}, tables__split="whole")
    one, other = (train(made("ngrams", **keys, **own), batches("ngrams")) for own in ({}, mesh))
    np.testing.assert_allclose(one[0], other[0], **PARITY)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, **PARITY), one[1:3], other[1:3]
    )  # fmt: skip


# Of replicas; which of them see parameters of their own.
STRATEGIES = {
    "int8": dict(sync__strategy="int8"),
    "top_k": dict(sync__strategy="top_k", sync__fraction=0.1),
    "power_sgd": dict(sync__strategy="power_sgd", sync__rank=1),
    "stale": dict(sync__strategy="stale", sync__staleness=2),
    "one_bit": dict(sync__strategy="one_bit", sync__warmup_steps=1),
    "zero_one": dict(sync__strategy="zero_one", sync__warmup_steps=1),
    "local_sgd": dict(sync__strategy="local_sgd", sync__every=2),
    "diloco": dict(sync__strategy="diloco", sync__every=2),
    "late int8": dict(sync__strategy="int8", tables__staleness=2),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    by_tier(
        STRATEGIES, slow=("local_sgd",),
        full=STRATEGIES.keys() - {"int8", "local_sgd"},
    ),
)  # fmt: skip
def test_rows_beside_replicas_equal_a_plain_loop(name):
    """Whatever replicas do with the network, a row's gradient is that of the global batch: the
    shares of the replicas, each at the parameters that it sees. One has fewer records."""
    config = made("dlrm", mesh={"data": 2}, steps=STEPS, **STRATEGIES[name])
    listed = batches("dlrm")
    listed[1]["weights"][2:9] = 0
    _, _, dense = start_of(config)
    new, sums = dense, jax.tree.map(lambda w: jnp.full_like(w, config.tables.initial_square), dense)
    take = jax.jit(jax.grad(functools.partial(loss_of, clicks._made(config.model)), argnums=0))
    waiting = [None] * config.tables.staleness

    def seen(recipe, number, state):
        """One plain step, with the parameters that each replica sees in the run."""
        nonlocal dense, sums
        phase = recipe.strategy.phases[runs.phase(recipe, number)]
        params = jax.jit(phase.params)(state)
        batch, total = listed[number], jax.tree.map(jnp.zeros_like, dense)
        for replica in range(2):
            own = jax.tree.map(lambda leaf, r=replica: leaf.addressable_shards[r].data, params)
            part = {name: np.split(array, 2)[replica] for name, array in batch.items()}
            share = part["weights"].sum() / batch["weights"].sum()
            _, gradient = take((jax.device_get(own), dense), part)
            total = jax.tree.map(lambda t, g, share=share: t + share * g, total, gradient)
        rate = 0.05 * float(recipe.schedule(number)) / config.optimizer.learning_rate
        waiting.append((total, rate))
        dense, sums = rows_updated(dense, sums, waiting.pop(0))

    found = train(config, listed, seen=seen)[2]
    for update in waiting:
        dense, sums = rows_updated(dense, sums, update)
    for one, rows in found.items():
        np.testing.assert_allclose(rows, dense[one], **PARITY)
        assert np.abs(rows - new[one]).max() > 1e-3


# Compression that leaves nothing out.
NOTHING_LEFT_OUT = {
    "top_k": dict(sync__strategy="top_k", sync__fraction=1.0),
    "int8": dict(sync__strategy="int8", sync__uncompressed=("*",)),
    "stale": dict(sync__strategy="stale", sync__staleness=0),
}  # fmt: skip


@pytest.mark.parametrize("name", by_tier(NOTHING_LEFT_OUT, slow=("top_k",), full=("int8", "stale")))
def test_compression_that_leaves_nothing_out_is_the_mean(name):
    listed, mesh = batches("dlrm"), dict(mesh={"data": 2, "fsdp": 2}, steps=STEPS)
    listed[1]["weights"][2:9] = 0
    found = train(made("dlrm", **mesh, **NOTHING_LEFT_OUT[name]), listed)
    wanted = train(made("dlrm", **mesh), listed)
    np.testing.assert_allclose(found[0], wanted[0], **PARITY)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, **PARITY), found[1:3], wanted[1:3]
    )  # fmt: skip


@pytest.mark.slow
def test_a_loss_scale_is_taken_off_the_gradients_of_rows():
    """Powers of two, with which fp16 rounds the same but near zero."""
    keys = dict(precision="fp16", tables__optimizer="sgd", tables__learning_rate=1.0, steps=2)
    found = [
        train(made("dlrm", loss_scale__initial=scale, **keys), batches("dlrm", 2))[2]
        for scale in (2.0**4, 2.0**8)
    ]
    for name, rows in found[0].items():
        np.testing.assert_allclose(rows, found[1][name], rtol=1e-3, atol=1e-4)


def test_tables_move_to_other_devices_where_shapes_are_the_same():
    """40 rows are as many on two devices as on four, at other places."""
    two, four = (
        runs.make_recipe(made("dlrm", mesh={"data": n}, tables__staleness=1)) for n in (2, 4)
    )
    with jax.set_mesh(two.mesh):
        state = two.init(0)
    shapes = [jax.tree.map(lambda leaf: leaf.shape, r.abstract.extra) for r in (two, four)]
    assert shapes[0][looked_up.TABLES] == shapes[1][looked_up.TABLES]
    name = looked_up.TABLES
    own = relaid.onto_devices(four, name, state.extra[name], {"mesh": {"data": 2}}, print)
    found, wanted = (
        {t.name: r.loss.execution.tables.table(s, t.name) for t in r.loss.execution.tables.tables}
        for r, s in ((four, own), (two, state.extra[name]))
    )
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.slow
def test_a_late_run_goes_on_bit_for_bit_and_on_other_devices(tmp_path):
    """What waits is in checkpoints. Other devices look the same rows up."""
    mesh = dict(mesh__data=2, mesh__fsdp=4, tables__staleness=2)
    made_run = test_training.dlrm_run
    whole = library.fit(made_run(tmp_path / "a", **mesh))
    assert whole.done
    wanted = test_training.tables_of(whole)

    def stop(record):
        if record["kind"] == "train" and record["step"] == 3:
            raise KeyboardInterrupt

    stopped = library.fit(made_run(tmp_path / "b", **mesh), callbacks=[stop])
    assert not stopped.done and stopped.step < 6
    shutil.copytree(tmp_path / "b", tmp_path / "c")
    for folder, sizes in ("b", mesh), ("c", mesh | dict(mesh__fsdp=2, mesh__tensor=2)):
        again = library.fit(made_run(tmp_path / folder, **sizes))
        assert again.done
        found = test_training.tables_of(again)
        for name, rows in wanted.items():
            if folder == "b":
                np.testing.assert_array_equal(found[name], rows)
            np.testing.assert_allclose(found[name], rows, **PARITY)
    with pytest.raises(ValueError, match="updates of 2 steps wait for their tables"):
        library.fit(made_run(tmp_path / "b", **mesh | dict(tables__staleness=1, resume_step=3)))

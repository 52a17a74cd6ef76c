"""Models with sparse tables train by the same step: on any mesh, with microbatches, after refused
updates, and from checkpoints of other meshes; rows equal those of a dense table and optax."""

import functools
import pathlib
import re
import shutil
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import runs

from llmx import config as config_lib
from llmx import library
from llmx.config import recipe as recipe_lib
from llmx.model import families, looked_up
from llmx.model.recommender import apply as clicks
from llmx.model.recommender import recommender
from llmx.model.recommender.config import RecommenderConfig

# fp32, sums over devices and microbatches in another order.
PARITY = dict(rtol=2e-5, atol=2e-6)
STEPS, B = 4, 24
# As `runs.PARITY_OPTIMIZER` says: Adagrad too divides its first gradient by itself.
EPS = 1e-3
FEATURES = ("C1", "C2:3", "C3")
DLRM = RecommenderConfig(name="dlrm", width=8, bottom=(16, 8), top=(16,))


def model(name: str) -> families.ModelConfig:
    if name == "dlrm":
        return families.ModelConfig(recommender=DLRM)
    return families.preset(
        "llama3", width=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=64,
        max_positions=64, vocab_multiple=8, ngram_tables=(2, 3), ngram_rows=97,
    )  # fmt: skip


@functools.cache
def no_records() -> str:
    """A file that is there, and is not read."""
    path = pathlib.Path(tempfile.mkdtemp()) / "records.parquet"
    path.touch()
    return str(path)


def made(name: str, *, mesh=None, **keys):
    """A config, and batches of random records or tokens."""
    shape = (B, 1 if name == "dlrm" else 16)
    own = dict(
        batch__size=B, batch__sequence_length=shape[1], tables__optimizer="adagrad",
        tables__learning_rate=0.05, tables__scale=0.1, tables__eps=EPS, **runs.PARITY_OPTIMIZER,
    )  # fmt: skip
    if name == "dlrm":
        own |= dict(
            data__format="records", data__sources=(no_records(),), data__records__dense=("a", "b"),
            data__records__features=FEATURES, data__records__rows=40, sharding__layout="zero1",
        )  # fmt: skip
    return runs.make_config(model(name), mesh=mesh, **own | keys)


def batches(name: str, number: int = STEPS, *, weighed: bool = False) -> list[dict]:
    rng = np.random.default_rng(0)
    shape = (B, 1 if name == "dlrm" else 16)
    found = []
    for _ in range(number):
        batch = {
            "tokens": rng.integers(0, 50, shape).astype(np.int32),
            "targets": rng.integers(0, 2 if name == "dlrm" else 50, shape).astype(np.int32),
            "segment_ids": np.ones(shape, np.int32), "weights": np.ones(shape, np.float32),
            "positions": np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape).copy(),
        }  # fmt: skip
        if name == "dlrm":
            batch["dense"] = rng.standard_normal((B, 1, 2)).astype(np.float32)
            batch["ids"] = rng.integers(-1, 40, (B, 1, 5)).astype(np.int32)
            if weighed:
                batch["id_weights"] = rng.uniform(size=(B, 1, 3)).astype(np.float32)
        found.append(batch)
    return found


def train(config, listed):
    """(losses, parameters, tables by name, the last state and the recipe)."""
    recipe = runs.make_recipe(config)
    step, losses = runs.make_train_step(recipe), []
    with jax.set_mesh(recipe.mesh):
        state = recipe.init(0)
        for batch in listed:
            state, report = step(state, runs.put_batch(recipe, batch))
            losses.append(float(report.loss))
    tables = recipe.loss.execution.tables
    rows = {t.name: tables.table(state.extra[looked_up.TABLES], t.name) for t in tables.tables}
    return losses, jax.device_get(state.params), rows, state, recipe


MESHES = {
    "data2": dict(mesh={"data": 2}), "fsdp4": dict(mesh={"fsdp": 4}),
    "data2_fsdp2": dict(mesh={"data": 2, "fsdp": 2}),
    "accumulation3": dict(batch__accumulation=3),
    "data2_whole": dict(mesh={"data": 2}, batch__accumulation=2, tables__split="whole"),
    "columns": dict(mesh={"data": 4}, tables__split="columns"),
}  # fmt: skip


@pytest.fixture(scope="module")
def alone():
    """One device, by model."""
    return {name: train(made(name), batches(name))[:3] for name in ("dlrm", "ngrams")}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", ["dlrm", "ngrams"])
def test_any_mesh_equals_one_device(name, mesh, alone):
    losses, params, rows, *_ = train(made(name, **MESHES[mesh]), batches(name))
    wanted = alone[name]
    np.testing.assert_allclose(losses, wanted[0], **PARITY)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **PARITY), params, wanted[1])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **PARITY), rows, wanted[2])


@pytest.mark.parametrize("mesh", [None, pytest.param({"fsdp": 2}, marks=pytest.mark.slow)], ids=str)
def test_rows_go_with_weights_that_are_gathered_once_a_step(mesh, alone):
    losses, params, rows, *_ = train(
        made("ngrams", mesh=mesh, sharding__gather="step"), batches("ngrams")
    )
    np.testing.assert_allclose(losses, alone["ngrams"][0], **PARITY)
    for got, wanted in zip((params, rows), alone["ngrams"][1:], strict=True):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **PARITY), got, wanted)


@pytest.mark.parametrize("weighed", [False, True])
def test_a_dlrm_equals_dense_tables_and_optax(weighed):
    """Written without llmx's tables and step: whole tables, of which a gradient is taken. Also on
    two devices, where ids have weights."""
    features = ("C1", "C2:3*seconds", "C3") if weighed else FEATURES
    config = made(
        "dlrm", optimizer__weight_decay=0.0, data__records__features=features,
        mesh={"data": 2} if weighed else None,
    )  # fmt: skip
    listed = batches("dlrm", weighed=weighed)
    recipe = runs.make_recipe(config)
    with jax.set_mesh(recipe.mesh):
        state = recipe.init(0)
    tables = recipe.loss.execution.tables
    dense = {
        t.name: jnp.asarray(tables.table(state.extra["tables"], t.name)) for t in tables.tables
    }
    params = (jax.device_get(state.params), dense)
    network = clicks._made(config.model)
    net = optax.chain(
        optax.clip_by_global_norm(config.optimizer.clip_norm),
        optax.adamw(
            recipe.schedule, b1=config.optimizer.b1, b2=config.optimizer.beta2,
            eps=config.optimizer.eps, weight_decay=0.0,
        ),
    )  # fmt: skip
    sums = jax.tree.map(lambda w: jnp.full_like(w, config.tables.initial_square), dense)
    opt_state, losses = net.init(params[0]), []

    def loss_of(params, batch):
        net_params, dense = params
        ids, first, embedded = batch["ids"][:, 0], 0, {}
        for name, length in (("C1", 1), ("C2", 3), ("C3", 1)):
            own = ids[:, first : first + length]
            first += length
            weights = (own >= 0).astype(jnp.float32)
            if weighed and length == 3:
                weights = weights * batch["id_weights"][:, 0]
            rows = dense[name][jnp.maximum(own, 0)] * weights[..., None]
            total = weights.sum(axis=1)
            embedded[name] = rows.sum(axis=1) / jnp.where(total, total, 1)[:, None]
        logit = network.logits(net_params, batch["dense"][:, 0], embedded, {})
        return recommender.losses(logit, batch["targets"][:, 0].astype(jnp.float32))[0].mean()

    for number, batch in enumerate(listed):
        loss, (of_net, of_rows) = jax.value_and_grad(loss_of)(params, batch)
        losses.append(float(loss))
        updates, opt_state = net.update(of_net, opt_state, params[0])
        sums = jax.tree.map(lambda s, g: s + g**2, sums, of_rows)
        rate = 0.05 * recipe.schedule(number) / config.optimizer.learning_rate
        new = jax.tree.map(
            lambda w, g, s, rate=rate: w - rate * g / (jnp.sqrt(s) + EPS),
            params[1], of_rows, sums,
        )  # fmt: skip
        params = optax.apply_updates(params[0], updates), new
    found, net_params, rows, *_ = train(config, listed)
    np.testing.assert_allclose(found, losses, **PARITY)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **PARITY), net_params, params[0])
    for name in rows:
        np.testing.assert_allclose(rows[name], params[1][name], **PARITY)


@pytest.mark.parametrize("name", ["dlrm", "ngrams"])
def test_a_refused_update_leaves_every_row(name):
    config = made(name, guard__on_bad_step="skip")
    recipe = runs.make_recipe(config)
    step, [batch] = runs.make_train_step(recipe), batches(name, 1)
    batch["weights"][3] = np.inf
    with jax.set_mesh(recipe.mesh):
        state = recipe.init(0)
        before = jax.device_get(state)
        state, report = step(state, runs.put_batch(recipe, batch))
    assert report.bad_leaf >= 0
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.extra), before.extra)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), before.params)


def dlrm_run(folder, **keys):
    run = config_lib.default()
    run.model, run.precision = model("dlrm"), "fp32"
    run.data.format, run.data.sources = "records", ("generated:2000",)
    run.data.cache_dir, run.data.num_threads = str(folder.parent / "cache"), 0
    run.batch.size, run.batch.sequence_length, run.steps = B, 1, 6
    run.workdir, run.checkpoint.every, run.launch.compile_cache = str(folder / "run"), 3, ""
    run.metrics.progress, run.metrics.tensorboard, run.metrics.log_every = "plain", False, 1
    run.sharding.layout = "zero1"
    run.tables.optimizer, run.optimizer.warmup_steps = "adagrad", 1
    for key, value in keys.items():
        config_lib.set_value(run, key.replace("__", "."), value)
    return run


def tables_of(found) -> dict[str, np.ndarray]:
    recipe = recipe_lib.make_recipe(found.config)
    tables = recipe.loss.execution.tables
    state = jax.device_get(found.state.extra[looked_up.TABLES])
    return {table.name: tables.table(state, table.name) for table in tables.tables[:6]}


@pytest.mark.slow
def test_a_run_goes_on_bit_for_bit_and_on_other_devices(tmp_path):
    mesh = dict(mesh__data=2, mesh__fsdp=4)
    whole = library.fit(dlrm_run(tmp_path / "a", **mesh))
    assert whole.done
    wanted = tables_of(whole)
    result = [line for line in whole.history if line["kind"] == "eval"][-1]
    assert 0 <= result["auc"] <= 1 and result["calibration"] > 0

    with pytest.raises(ValueError, match="a run with sparse tables"):
        config_lib.load_run(whole.config.workdir)
    assert config_lib.load_run_with_tables(whole.config.workdir).model.recommender.name == "dlrm"

    def stop(record):
        if record["kind"] == "train" and record["step"] == 3:
            raise KeyboardInterrupt

    stopped = library.fit(dlrm_run(tmp_path / "b", **mesh), callbacks=[stop])
    assert not stopped.done and stopped.step < 6
    shutil.copytree(tmp_path / "b", tmp_path / "c")
    for folder, sizes in ("b", mesh), ("c", dict(mesh__data=2, mesh__fsdp=2, mesh__tensor=2)):
        again = library.fit(dlrm_run(tmp_path / folder, **sizes))
        assert again.done
        found = tables_of(again)
        for name, rows in wanted.items():
            if folder == "b":
                np.testing.assert_array_equal(found[name], rows)
            np.testing.assert_allclose(found[name], rows, **PARITY)


@pytest.mark.parametrize(
    "name, keys, part",
    [
        ("dlrm", dict(data__format="text", data__sources=("stdlib",)), "set data.format='records'"),
        ("ngrams", dict(data__format="records", data__sources=("generated:9",)), "is a decoder"),
        ("dlrm", dict(batch__sequence_length=2), "set batch.sequence_length=1"),
        ("dlrm", dict(optimizer__ema_decay=0.9), "rows have no average"),
        ("ngrams", dict(mesh={"stage": 2}, batch__accumulation=2), "mesh.stage=2"),
        (
            "ngrams",
            dict(mesh={"data": 2}, sync__strategy="diloco", sync__groups=2, sync__exchange="there"),
            "sync.groups=2 with",
        ),
        ("dlrm", dict(tables__staleness=65), "tables.staleness=65"),
        ("dlrm", dict(sample__prompt="a"), "generation is the decoder's"),
        ("dlrm", dict(loss__z_loss=0.1), "loss.z_loss=0.1 has no effect with model.recommender"),
        ("ngrams", dict(tables__optimizer="adagrad2"), "adagrad2"),
        ("dlrm", dict(tables__optimizer="row_adagrad", tables__split="columns"), "row_adagrad"),
        (
            "dlrm",
            dict(tables__l1=0.1),
            "tables.l1=0.1 has no effect with tables.optimizer='adagrad'",
        ),
        ("dlrm", dict(tables__optimizer="sgd", tables__b1=0.5), "or choose 'adam'"),
    ],
)
def test_what_does_not_go_together_is_an_error(name, keys, part):
    with pytest.raises(config_lib.ConfigError, match=re.escape(part)) as error:
        made(name, **keys)
    assert str(error.value).count(part) == 1  # also where several look at a section


def test_options_of_tables_need_tables():
    with pytest.raises(config_lib.ConfigError, match=r"tables\.learning_rate=0\.3 has no"):
        runs.make_config("llama3", tables__learning_rate=0.3)

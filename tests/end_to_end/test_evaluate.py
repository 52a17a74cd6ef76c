"""The held-out loss counts every token once, whatever the batches."""

import math

import jax
import numpy as np

from llmx import config, evaluate
from llmx.config import checks, recipe
from llmx.data import dataset as data_lib
from llmx.model import families
from llmx.step import step


def opened(tmp_path, **data):
    folder = tmp_path / "text"
    folder.mkdir()
    random = np.random.default_rng(0)
    for number in range(12):
        (folder / f"{number}.txt").write_text(" ".join(random.choice(["a", "bc", "def"], 90)))
    run = config.default()
    run.model = families.preset("llama3", num_layers=1, width=32, mlp_dim=32)
    run.precision, run.data.sources = "fp32", (str(folder),)
    run.data.held_out = 0.3
    for name, value in data.items():
        setattr(run.data, name, value)
    run.batch.sequence_length = 32
    run = checks.resolve(run, 8)
    dataset = data_lib.open_dataset(
        run.data, sequence_length=32, seed=0, cache_dir=tmp_path, log=lambda text: None
    )
    return run, dataset


def test_batches_do_not_matter(tmp_path):
    run, dataset = opened(tmp_path)
    setup = recipe.make_setup(run)
    state, eval_step = setup.init(0), step.make_eval_step(setup)
    with jax.set_mesh(setup.mesh):
        whole = evaluate.held_out_loss(setup, eval_step, state.params, dataset, batch_size=64)
        parts = evaluate.held_out_loss(setup, eval_step, state.params, dataset, batch_size=8)
        first = evaluate.held_out_loss(
            setup, eval_step, state.params, dataset, batch_size=8, batches=1
        )
    rows = dataset.held_out_rows(0, range(64), 64)
    assert dataset.num_held_out_windows < 64 and dataset.num_held_out_windows % 8
    assert whole["num_tokens"] == parts["num_tokens"] == rows["weights"].sum()
    assert math.isclose(whole["loss"], parts["loss"], rel_tol=1e-6)
    assert math.isclose(whole["perplexity"], math.exp(whole["loss"]))
    assert first["num_tokens"] < whole["num_tokens"]
    # Plain: mean of -log p over the tokens that count.
    with jax.set_mesh(setup.mesh):
        batch = jax.device_put(rows, setup.batch_sharding)
        logits = jax.jit(setup.apply.logits, static_argnums=4)(
            state.params, batch["tokens"], batch["segment_ids"], batch["positions"], setup.run
        )
    log_p = jax.nn.log_softmax(np.asarray(logits))
    picked = np.take_along_axis(np.asarray(log_p), rows["targets"][..., None], axis=-1)[..., 0]
    plain = -(picked * rows["weights"]).sum() / rows["weights"].sum()
    assert math.isclose(whole["loss"], plain, rel_tol=1e-5)


def test_split_rows_do_not_matter(tmp_path):
    run, dataset = opened(tmp_path)
    losses = []
    for sequence, ulysses in ((1, 1), (4, 2)):
        run.mesh.sequence, run.attention.ulysses = sequence, ulysses
        run.mesh.data, run.mesh.fsdp = 1, 2
        setup = recipe.make_setup(run, devices=jax.devices()[: 2 * sequence])
        state, eval_step = setup.init(0), step.make_eval_step(setup)
        with jax.set_mesh(setup.mesh):
            found = evaluate.held_out_loss(setup, eval_step, state.params, dataset, batch_size=16)
        losses.append(found["loss"])
    assert math.isclose(*losses, rel_tol=1e-6)


def test_stages_do_not_matter(tmp_path):
    run, dataset = opened(tmp_path)
    losses = []
    run.batch.size, run.batch.accumulation = 16, 4
    for stage, schedule in ((1, "1f1b"), (2, "1f1b"), (2, "zb_v")):
        run.mesh.stage, run.mesh.data, run.mesh.fsdp = stage, 1, 2
        run.pipeline.schedule = schedule
        run.model.num_layers = 5
        setup = recipe.make_setup(run, devices=jax.devices()[: 2 * stage])
        state, eval_step = setup.init(0), step.make_eval_step(setup)
        size = evaluate.batch_size(run)
        assert size == (4 if stage == 1 else 16)
        with jax.set_mesh(setup.mesh):
            found = evaluate.held_out_loss(setup, eval_step, state.params, dataset, batch_size=size)
        losses.append(found["loss"])
    assert math.isclose(losses[0], losses[1], rel_tol=1e-6)
    assert math.isclose(losses[0], losses[2], rel_tol=1e-6)


def test_nothing_held_out(tmp_path):
    run, dataset = opened(tmp_path, held_out=0.0)
    setup = recipe.make_setup(run)
    result = evaluate.held_out_loss(setup, lambda *_: None, None, dataset, batch_size=8)
    assert math.isnan(result["loss"]) and result["num_tokens"] == 0

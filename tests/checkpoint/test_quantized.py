"""Runs with weights as integers: begun from a model, resumed elsewhere, read by other commands."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import compare, packed, runs
from support.resumes import DATA, opened

from llmx import config
from llmx.checkpoint import model_params, resume, streamed
from llmx.model import quantization
from llmx.model.quantized import RANGES
from llmx.sharding import trees

MODEL = dict(num_layers=2, width=16, mlp_dim=32, num_heads=4, num_kv_heads=2, head_dim=8,
             vocab_size=261, vocab_multiple=2)  # fmt: skip
INT4 = dict(quantization__bits=4, quantization__scales="learned", quantization__group=8)
OF_INPUTS = dict(quantization__activations="average")


def run_of(workdir, *, mesh=None, **values):
    values = dict(batch__size=8, batch__sequence_length=16, steps=9) | INT4 | values
    run = runs.make_config(
        "llama3", model=MODEL, mesh=mesh or dict(fsdp=2, tensor=2), workdir=str(workdir), **values
    )
    return run, runs.make_recipe(run)


def begun(run, recipe):
    said: list[str] = []
    with opened(pathlib.Path(run.workdir), said.append) as checkpoints:
        found = resume.restore_or_init(run, recipe, checkpoints, DATA, said.append)
    return found, "\n".join(said)


def saved(run, recipe, state, step=4):
    meta = {"fingerprint": DATA.fingerprint, "batch_size": 8, "config": config.to_json(run)}
    with opened(pathlib.Path(run.workdir)) as checkpoints:
        checkpoints.save(step, state, meta=meta, order=recipe.order)
    config.save_run(run)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(config, recipe, state) of a run after two steps, saved."""
    workdir = tmp_path_factory.mktemp("trained")
    run, recipe = run_of(workdir, optimizer__ema_decay=0.5, **OF_INPUTS)
    state, step = recipe.init(0), runs.make_train_step(recipe)
    with jax.set_mesh(recipe.mesh):
        for batch in packed.batches(2, rows=8, length=16, vocab=261):
            state, _ = step(state, runs.put_batch(recipe, batch))
    saved(run, recipe, state)
    return run, recipe, state


def test_resumed_on_another_mesh(trained):
    run, recipe, state = trained
    values = dict(optimizer__ema_decay=0.5, **OF_INPUTS)
    _, again = run_of(run.workdir, mesh=dict(data=2), **values)
    found, said = begun(run_of(run.workdir, mesh=dict(data=2), **values)[0], again)
    assert "resumed from checkpoint 4" in said
    for part in ("params", "opt_state", "ema", "extra"):
        compare.assert_same(getattr(found.state, part), getattr(state, part))
    batch = packed.batches(3, rows=8, length=16, vocab=261)[2]
    reports = []
    copy = jax.tree.map(jnp.copy, state)  # a step donates its state
    for one, at in ((recipe, copy), (again, found.state)):
        with jax.set_mesh(one.mesh):
            reports.append(runs.make_train_step(one)(at, runs.put_batch(one, batch))[1])
    np.testing.assert_allclose(reports[1].loss, reports[0].loss, rtol=1e-5)
    np.testing.assert_allclose(reports[1].grad_norm, reports[0].grad_norm, rtol=1e-4)


def test_other_commands_have_the_rounded_average(trained):
    """Also part by part from files; and the ranges of inputs, to evaluate with."""
    run, recipe, state = trained
    wanted = recipe.loss.rounded(state.averaged)
    names = trees.named(wanted)
    assert not any(name.endswith(quantization.LOG_STEP) for name in names)
    kernel = np.asarray(names["blocks/mlp/up/kernel"])
    assert all(len(np.unique(kernel[0, :8, column])) <= 16 for column in range(32))
    like = recipe.loss.model_params
    found = model_params.restore_params(run.workdir, like, ema=True, log=print)
    compare.assert_same(found.state, wanted)
    by_files = model_params.restore_params(
        run.workdir, like, ema=True, log=print, reader=streamed.FROM_FILES
    )
    for name, stored in trees.named(by_files.state).items():
        numbers = np.asarray(names[name])
        np.testing.assert_array_equal(stored[...], numbers)
        np.testing.assert_array_equal(stored[1:2], numbers[1:2])
        np.testing.assert_array_equal(stored[1], numbers[1])
    evaluated = model_params.restore_evaluated(run.workdir, recipe, ema=True, log=print)
    compare.assert_same(evaluated.state, recipe.loss.rounded(state.averaged, state.extra))
    weight = evaluated.state["blocks"]["mlp"]["down"]["kernel"]
    assert (np.asarray(weight.ranges.x) > 0).all() and RANGES in state.extra


def test_begun_from_a_model_without_scales(tmp_path):
    plain = {name: type(value)() for name, value in INT4.items()}
    plain["quantization__scales"] = "largest"
    run, recipe = run_of(tmp_path / "plain", **plain)
    state = recipe.init(3)
    saved(run, recipe, state)
    run, recipe = run_of(tmp_path / "int4", start_from=str(tmp_path / "plain"))
    found, _ = begun(run, recipe)
    compare.assert_same(quantization.without_steps(found.state.params), state.params)
    weight = np.asarray(state.params["blocks"]["mlp"]["up"]["kernel"])
    groups = np.abs(weight).reshape(2, 2, 8, 32)
    scale = np.minimum(2 * groups.mean(axis=2) / np.sqrt(7), groups.max(axis=2) / 6.75)
    step = found.state.params["blocks"]["mlp"]["up"]["log_step"]
    np.testing.assert_allclose(np.exp(step), scale, rtol=1e-5)


@pytest.mark.parametrize(("values", "said"), [
    (dict(quantization__bits=3), "quantization.bits=4, .* and the config gives .*bits=3"),
    (dict(quantization__group=4), "quantization.group=8, .* and the config gives .*group=4"),
    (dict(quantization__activations=""), "activations='average', and the config gives"),
])  # fmt: skip
def test_other_integers_are_refused(trained, values, said):
    run, _, _ = trained
    again, recipe = run_of(run.workdir, optimizer__ema_decay=0.5, **(OF_INPUTS | values))
    with pytest.raises(ValueError, match=said):
        begun(again, recipe)

"""Runs whose parameters or moments are kept in few bits: resumed, moved, and started from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import packed, runs
from support.compare import assert_same
from support.resumes import DATA, opened, resumed, run_of, save

from llmx import config
from llmx.checkpoint import model_params

INT8 = dict(optimizer__moments="int8")
PURE = dict(precision="pure_bf16")
BOTH = PURE | INT8
FORMATS = {"int8": INT8, "pure_bf16": PURE, "both": BOTH}


def continued(recipe, state, numbers):
    """The state after these batches."""
    step = runs.make_train_step(recipe)
    rows = packed.batches(4, rows=8, length=16, vocab=recipe.model.vocab_size)
    with jax.set_mesh(recipe.mesh):
        for number in numbers:
            state, _ = step(state, runs.put_batch(recipe, rows[number]))
    return state


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "both")) for name in FORMATS]
)
def test_resuming_equals_never_stopping(tmp_path, name):
    values = FORMATS[name]
    run, recipe = run_of(tmp_path, 2, **values)
    state = continued(recipe, recipe.init(0), (0, 1))
    with opened(tmp_path) as checkpoints:
        meta = dict(fingerprint=DATA.fingerprint, batch_size=8, config=config.to_json(run))
        checkpoints.save(2, state, meta=meta, order=recipe.order)
    wanted = jax.device_get(continued(recipe, state, (2, 3)))
    _, found, first, _ = resumed(tmp_path, 2, **values)
    assert first == 2
    assert_same(jax.device_get(continued(recipe, found, (2, 3))), wanted)


@pytest.mark.parametrize("values", FORMATS.values(), ids=FORMATS)
def test_restored_onto_other_devices_and_stages(tmp_path, values):
    wanted = save(tmp_path, 1, 2, **values)
    _, state, first, _ = resumed(tmp_path, 4, **values)
    assert first == 1
    assert_same((state.params, state.opt_state), (wanted.params, wanted.opt_state))
    staged = dict(mesh__stage=2, batch__accumulation=4, pipeline__schedule="1f1b")
    _, state, first, _ = resumed(tmp_path, 2, **values, **staged)
    assert first == 1  # two stages of one layer each: in the same order
    assert_same((state.params, state.opt_state), (wanted.params, wanted.opt_state))


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (dict(), INT8, ["optimizer.moments='auto'", "moments in fp32", "float32 and int8"]),
        (dict(), PURE, ["precision='fp32'", "parameters in float32", "bfloat16 and bf16"]),
        (PURE, dict(), ["precision='pure_bf16'", "parameters in bfloat16", "float32 and fp32"]),
        (PURE, BOTH, ["moments in bf16", "bfloat16 and int8"]),
    ],
)
def test_another_format_is_refused_with_the_remedy(tmp_path, before, after, words):
    save(tmp_path, 1, 2, **before)
    with pytest.raises(ValueError, match="start_from") as error:
        resumed(tmp_path, 2, **after)
    assert all(word in str(error.value) for word in words), error.value
    assert (tmp_path / "checkpoints" / "1").exists()


def test_the_same_formats_by_other_names_are_resumed(tmp_path):
    wanted = save(tmp_path, 1, 2, **PURE)
    _, state, first, _ = resumed(tmp_path, 2, **PURE, optimizer__moments="bf16")
    assert first == 1
    assert_same(state.opt_state, wanted.opt_state)


@pytest.mark.parametrize(("before", "after"), [(dict(), PURE), (PURE, dict()), (PURE, BOTH)])
def test_a_run_starts_from_parameters_in_another_dtype(tmp_path, before, after):
    old = save(tmp_path / "old", 3, 2, **before)
    recipe, state, first, _ = resumed(
        tmp_path / "new", 2, start_from=str(tmp_path / "old"), **after
    )
    assert first == 0
    dtype = recipe.loss.execution.policy.param
    assert_same(state.params, jax.tree.map(lambda leaf: leaf.astype(dtype), old.params))
    # The average begins with what was saved, not with what bf16 holds of it.
    assert_same(state.ema, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), old.params))
    wanted, found = (
        jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), tree)
        for tree in (recipe.abstract, state)
    )
    assert found == wanted
    after_one = continued(recipe, state, (0,))
    assert np.isfinite(np.asarray(after_one.params["embedding"], np.float32)).all()


@pytest.mark.parametrize("ema", [False, True])
def test_parameters_are_read_in_the_dtype_that_they_were_saved_in(tmp_path, ema):
    """As evaluation, generation and export do, which know no dtype of the average."""
    old = save(tmp_path, 3, 2, **PURE)
    _, recipe = run_of(tmp_path, 1, **PURE)
    found = model_params.restore_params(str(tmp_path), recipe.loss.params, ema=ema, log=print)
    assert_same(found.state, old.ema if ema else old.params)
    dtypes = {str(leaf.dtype) for leaf in jax.tree.leaves(found.state)}
    assert dtypes == {"float32" if ema else "bfloat16"}
    rows = packed.batches(1, rows=8, length=16, vocab=recipe.model.vocab_size)
    with jax.set_mesh(recipe.mesh):
        nats, tokens = runs.make_evaluation(recipe)(found.state, runs.put_batch(recipe, rows[0]))
    assert 0 < float(nats / tokens) < 10

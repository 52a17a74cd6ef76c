"""Runs with adapters: begun from a model, resumed elsewhere, merged for other commands."""

import dataclasses
import pathlib
import re

import jax
import numpy as np
import pytest
import safetensors.numpy
from support import packed, runs
from support.resumes import DATA, opened

from llmx import config, convert
from llmx.checkpoint import hf, model_params, peft, resume
from llmx.config import checks
from llmx.data import tokenizers
from llmx.model import adapters, families
from llmx.sharding import trees

LIKE = adapters.AdaptersConfig(rank=2, alpha=6.0)
LORA = dict(adapters__rank=2, adapters__alpha=6.0, optimizer__ema_decay=0.5)


def run_of(workdir, start_from="", *, mesh=None, **values):
    values = dict(batch__size=8, batch__sequence_length=16, steps=9) | LORA | values
    run = runs.make_config(
        families.ModelConfig(), mesh=mesh or dict(fsdp=2, tensor=2), workdir=str(workdir),
        start_from=str(start_from), **values,
    )  # fmt: skip
    return run, runs.make_recipe(run)


def begun(run, recipe):
    said: list[str] = []
    with opened(workdir_of(run), said.append) as checkpoints:
        found = resume.restore_or_init(run, recipe, checkpoints, DATA, said.append)
    return found, "\n".join(said)


def workdir_of(run):
    return pathlib.Path(run.workdir)


def saved(run, recipe, state, step=4):
    meta = {"fingerprint": DATA.fingerprint, "batch_size": 8, "config": config.to_json(run)}
    with opened(workdir_of(run)) as checkpoints:
        checkpoints.save(step, state, meta=meta, order=recipe.order)
    config.save_run(run)


@pytest.fixture
def tuned(written, tmp_path):
    """(config, recipe, state) of a run that was fine-tuned and saved, from a bf16 checkpoint."""
    directory = written("llama3", "bfloat16")
    coder = tokenizers.ByteTokenizer()
    coder.save(directory / "tokenizer.json")
    run, recipe = run_of(tmp_path / "run", directory, precision="bf16")
    found, said = begun(run, recipe)
    assert f"starting with the parameters of {directory}" in said
    noise = np.random.default_rng(3)
    draw = lambda leaf: (0.1 * noise.normal(size=leaf.shape)).astype(np.float32)  # noqa: E731
    own, ema = ({n: draw(leaf) for n, leaf in trees.named(part).items()}
                for part in (found.state.params, found.state.ema))  # fmt: skip
    put = lambda values, like: jax.device_put(  # noqa: E731
        trees.unnamed(values, like), jax.tree.map(lambda leaf: leaf.sharding, like)
    )
    state = found.state._replace(params=put(own, found.state.params), ema=put(ema, found.state.ema))
    saved(run, recipe, state)
    coder.save(tmp_path / "run" / "tokenizer.json")
    return run, recipe, jax.device_get(state)


def plain_model(run, **values):
    """The run as other commands have it: the model without adapters."""
    whole = dataclasses.replace(config.load_run(run.workdir), **values)
    checks.forget_training(whole)
    return dataclasses.replace(whole, mesh=dataclasses.replace(run.mesh))


def test_the_frozen_parameters_are_those_of_the_checkpoint(tuned, written):
    _, recipe, state = tuned
    _, whole = hf.load(written("llama3", "bfloat16"))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, np.asarray(b, a.dtype)),
                 state.frozen, whole)  # fmt: skip
    assert state.frozen["embedding"].dtype == "bfloat16"
    # And each device holds its part.
    shapes = [leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(recipe.loss.frozen)]
    held = sum(map(np.prod, shapes))
    assert held < 0.4 * sum(leaf.size for leaf in jax.tree.leaves(state.frozen))


@pytest.mark.parametrize("mesh", [dict(data=2), dict(stage=2, fsdp=2)], ids=["data2", "stages"])
def test_resumed_on_another_mesh(tuned, mesh):
    run, _, state = tuned
    layers = dict(batch__accumulation=2) if "stage" in mesh else {}
    again, recipe = run_of(run.workdir, run.start_from, mesh=mesh, precision="bf16", **layers)
    found, said = begun(again, recipe)
    assert "resumed from checkpoint 4" in said and found.step == 4
    for part in ("params", "ema", "frozen"):
        got = runs.in_order(recipe, getattr(found.state, part))
        jax.tree.map(np.testing.assert_array_equal, got, getattr(state, part))


@pytest.mark.parametrize(("values", "said"), [
    (dict(adapters__alpha=8.0), r"adapters.alpha=6.0, .* and the config gives .*alpha=8.0"),
    (dict(adapters__rank=4), r"adapters.rank=2, .* and the config gives adapters.rank=4"),
    (dict(adapters__products=("mlp",)), "adapters.products=.*and the config gives"),
    (dict(adapters__rank=0, adapters__alpha=16.0), "and the config gives adapters.rank=0: restore"),
])  # fmt: skip
def test_other_adapters_are_refused(tuned, values, said):
    run, _, _ = tuned
    again, recipe = run_of(run.workdir, run.start_from, precision="bf16", **values)
    with pytest.raises(ValueError, match=said):
        begun(again, recipe)


def test_another_dropout_goes_on(tuned):
    run, _, _ = tuned
    again, recipe = run_of(
        run.workdir, run.start_from, precision="bf16", adapters__dropout=0.3,
    )  # fmt: skip
    assert begun(again, recipe)[0].step == 4


def test_a_reference_that_was_not_kept_is_said(tmp_path):
    """And one that is not wanted any more."""
    pairs = dict(data__format="preference", data__pack=False)
    plain = dict(adapters__rank=0, adapters__alpha=16.0, model__vocab_size=257)
    for first, then, said in (
        (plain, plain | pairs, "keeps no reference"), (plain | pairs, plain, "keeps a reference"),
    ):  # fmt: skip
        workdir = tmp_path / said.split()[1]
        run, recipe = run_of(workdir, **first)
        saved(run, recipe, recipe.init(0))
        with pytest.raises(ValueError, match=f"{said} of preferences, and the .*preference.loss"):
            begun(*run_of(workdir, **then))


def test_other_commands_get_the_merged_model(tuned):
    run, _, state = tuned
    plain = runs.make_recipe(plain_model(run))
    for ema, own in ((False, state.params), (True, state.ema)):
        restored = model_params.restore_params(run.workdir, plain.loss.params, ema=ema, log=print)
        assert restored.step == 4
        wanted = jax.device_get(adapters.merged(state.frozen, own, LIKE))
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(np.asarray(a, "f4"), b, rtol=1e-6, atol=1e-6),
            restored.state, wanted,
        )  # fmt: skip


def test_evaluation_in_training_is_that_of_the_merged_model(tuned, tmp_path):
    """To fp32's rounding, where both compute in it."""
    run, _, state = tuned
    _, recipe = run_of(tmp_path / "fp32", run.start_from)
    merged = adapters.merged(state.frozen, state.params, LIKE)
    plain = runs.make_recipe(plain_model(run, precision="fp32"))
    put = lambda tree, like: jax.tree.map(  # noqa: E731
        lambda a, b: jax.device_put(np.asarray(a, b.dtype), b.sharding), tree, like
    )
    with jax.set_mesh(recipe.mesh):
        batch = runs.put_batch(recipe, packed.batches(1, rows=8, length=16, vocab=257)[0])
        own, frozen = put((state.params, state.frozen), (recipe.loss.params, recipe.loss.frozen))
        nats, _ = runs.make_evaluation(recipe)(recipe.loss.joined(own, frozen), batch)
        wanted, _ = runs.make_evaluation(plain)(put(merged, plain.loss.params), batch)
        whole, _ = runs.make_evaluation(plain)(put(frozen, plain.loss.params), batch)
    np.testing.assert_allclose(nats, wanted, rtol=1e-5)
    assert abs(float(nats - whole)) > 1e-3 * float(nats)


def test_exports(tuned, tmp_path, capsys):
    run, _, state = tuned
    command = ["--workdir", run.workdir]
    assert convert.main([*command, "--to-hf", f"{tmp_path}/merged", "--dtype", "float32"]) == 0
    _, read = hf.load(tmp_path / "merged")
    wanted = jax.device_get(adapters.merged(state.frozen, state.ema, LIKE))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), read, wanted)
    assert convert.main([*command, "--to-peft", f"{tmp_path}/adapter", "--no-ema"]) == 0
    assert "the adapters of step 4" in "".join(capsys.readouterr())
    arrays = safetensors.numpy.load_file(tmp_path / "adapter" / peft.WEIGHTS)
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_"
    query = state.params["blocks"]["attention"]["query"]["kernel"]
    np.testing.assert_array_equal(arrays[f"{name}A.weight"], query["down"][1].T)
    np.testing.assert_array_equal(arrays[f"{name}B.weight"], query["up"][1].reshape(2, -1).T)
    # Twice, with a dtype, and of a run without adapters.
    assert convert.main([*command, "--to-peft", f"{tmp_path}/adapter"]) == 2
    assert "is not empty" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        convert.main([*command, "--to-peft", f"{tmp_path}/b", "--dtype", "float16"])
    assert convert.main(["--workdir", f"{tmp_path}/back", "--from-hf", f"{tmp_path}/merged"]) == 0
    assert convert.main(["--workdir", f"{tmp_path}/back", "--to-peft", f"{tmp_path}/b"]) == 2
    assert "has no adapters" in capsys.readouterr().err


def test_a_run_starts_from_one_with_adapters(tuned, tmp_path):
    """With its merged model, whole or under adapters of its own."""
    run, _, state = tuned
    wanted = jax.device_get(adapters.merged(state.frozen, state.params, LIKE))
    whole = dict(adapters__rank=0, adapters__alpha=16.0)
    for place, values in (("whole", whole), ("more", dict(adapters__rank=4))):
        next_run, recipe = run_of(tmp_path / place, run.workdir, **values)
        found, said = begun(next_run, recipe)
        assert re.search("starting with the parameters of .*/run, step 4", said)
        model = found.state.frozen or found.state.params
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6),
                     jax.device_get(model), wanted)  # fmt: skip

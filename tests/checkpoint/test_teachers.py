"""Where a student's teacher comes from, and models of chosen layers of others."""

import dataclasses
import pathlib
import shutil
import types

import jax
import numpy as np
import pytest
from support import hf_checkpoints, runs
from support.resumes import DATA, opened

from llmx import config
from llmx.checkpoint import chosen_layers as chosen
from llmx.checkpoint import hf, resume
from llmx.config import ConfigError, starting
from llmx.data import tokenizers
from llmx.model import families
from llmx.model.chosen_layers import of_layers
from llmx.sharding import trees

# The byte tokenizer has 257 tokens, and the head of both the same padding.
SMALL = dict(vocab_size=257, vocab_multiple=32)
OF_STUDENT = SMALL | dict(num_layers=2, width=16, mlp_dim=24, num_heads=4, num_kv_heads=2,
                          head_dim=4)  # fmt: skip
BYTES = tokenizers.ByteTokenizer()
WITH_BYTES = types.SimpleNamespace(**vars(DATA), tokenizer=BYTES)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """(directory of Hugging Face, model, parameters)."""
    model, params = hf_checkpoints.random_params("llama3", **SMALL)
    folder = tmp_path_factory.mktemp("teacher") / "hf"
    hf.export(params, model, folder, dtype="float32", shard_bytes=30_000)
    BYTES.save(folder / tokenizers.FILE_NAME)
    return folder, model, params


def run_of(workdir, mesh=None, model=OF_STUDENT, **values):
    values = dict(batch__size=8, batch__sequence_length=16, steps=9) | values
    run = runs.make_config("llama3", model=model, mesh=mesh, workdir=str(workdir), **values)
    return run, runs.make_recipe(run)


def begun(run, recipe, data=WITH_BYTES):
    said: list[str] = []
    with opened(pathlib.Path(run.workdir), said.append) as checkpoints:
        found = resume.restore_or_init(run, recipe, checkpoints, data, said.append)
    return found, "\n".join(said)


def saved(run, recipe, restored, step=4):
    """As `train.save` does."""
    meta = {"fingerprint": DATA.fingerprint, "batch_size": 8, "config": config.to_json(run)}
    meta |= {name: value for name, value in restored.meta.items() if name == "teacher"}
    with opened(pathlib.Path(run.workdir)) as checkpoints:
        checkpoints.save(step, recipe.saved(restored.state), meta=meta, order=recipe.order)
    config.save_run(run)
    BYTES.save(pathlib.Path(run.workdir, tokenizers.FILE_NAME))


def leaves_of(workdir, step):
    with opened(pathlib.Path(workdir)) as checkpoints:
        return set(checkpoints.document(step).leaves)


def assert_is(params, wanted):
    named = trees.named(jax.device_get(params))
    assert named.keys() == trees.named(wanted).keys()
    for name, leaf in trees.named(wanted).items():
        np.testing.assert_array_equal(named[name], np.asarray(leaf, named[name].dtype), name)


def test_a_teacher_is_read_again_on_other_meshes_and_in_no_checkpoint(teacher, tmp_path):
    folder, _, params = teacher
    key = dict(distillation__teacher=str(folder))
    run, recipe = run_of(tmp_path / "run", dict(fsdp=2, tensor=2), precision="bf16", **key)
    found, said = begun(run, recipe)
    assert f"teacher: {folder}" in said
    assert_is(found.state.frozen, params)
    assert found.state.frozen["embedding"].dtype == "bfloat16"
    held = [leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(recipe.loss.frozen)]
    whole = sum(leaf.size for leaf in jax.tree.leaves(recipe.loss.frozen))
    assert sum(map(np.prod, held)) < 0.4 * whole  # each device has its part
    saved(run, recipe, found)
    assert not any(name.startswith("frozen") for name in leaves_of(run.workdir, 4))
    for mesh in (dict(data=2), dict(stage=2, fsdp=2)):
        again, other = run_of(
            run.workdir, mesh, precision="bf16", batch__accumulation=mesh.get("stage", 1), **key
        )
        resumed, said = begun(again, other)
        assert "resumed from checkpoint 4" in said and resumed.step == 4
        assert_is(resumed.state.frozen, params)
        assert_is(runs.in_order(other, resumed.state.params), jax.device_get(found.state.params))


def test_a_teacher_that_trains_on_is_the_one_of_the_first_start(tmp_path):
    """The checkpoint knows the step of a run that was named without one."""
    own, of_own = run_of(tmp_path / "teacher", optimizer__ema_decay=0.5)
    first = resume.Restored(of_own.init(3), {}, 0)
    ema = jax.tree.map(lambda leaf: leaf + 1, first.state.ema)
    first = first._replace(state=first.state._replace(ema=ema))
    saved(own, of_own, first, step=4)
    key = dict(distillation__teacher=own.workdir)
    run, recipe = run_of(tmp_path / "run", **key)
    found, said = begun(run, recipe)
    assert "step 4" in said
    assert_is(found.state.frozen, jax.device_get(ema))  # of a run that keeps one, the average
    saved(run, recipe, found)
    later = first._replace(state=of_own.init(4))
    saved(own, of_own, later, step=6)
    resumed, said = begun(run, recipe)
    assert "step 4" in said.splitlines()[-1]
    assert_is(resumed.state.frozen, jax.device_get(ema))
    other, recipe = run_of(tmp_path / "run", distillation__teacher=f"{own.workdir}@6")
    resumed, said = begun(other, recipe)
    assert "step 6" in said.splitlines()[-1]
    assert_is(resumed.state.frozen, jax.device_get(later.state.ema))


def test_a_student_of_a_teacher_that_is_gone_evaluates(teacher, tmp_path):
    """But is trained no further: the config says so, before anything is read."""
    folder, _, _ = teacher
    moved = tmp_path / "teacher"
    shutil.copytree(folder, moved)
    key = dict(distillation__teacher=str(moved))
    run, recipe = run_of(tmp_path / "run", **key)
    saved(run, recipe, begun(run, recipe)[0])
    shutil.rmtree(moved)
    with pytest.raises(ConfigError, match=r"holds no checkpoints: .* whenever it is started"):
        run_of(tmp_path / "run", **key)
    from llmx.evaluate import saved_run

    alone = saved_run.config_of(config.load_run(run.workdir), run.workdir)
    found = saved_run.params_of(alone, runs.make_recipe(alone), run.workdir)
    assert found.step == 4


def test_another_tokenizer_is_refused(teacher, tmp_path):
    folder, _, _ = teacher
    run, recipe = run_of(tmp_path / "run", distillation__teacher=str(folder))
    other = types.SimpleNamespace(fingerprint="other", name="bpe", vocab_size=257)
    data = types.SimpleNamespace(fingerprint=DATA.fingerprint, tokenizer=other)
    with pytest.raises(ValueError, match=r"another tokenizer \(.*set data.tokenizer="):
        begun(run, recipe, data)
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare)
    (bare / tokenizers.FILE_NAME).unlink()
    run, recipe = run_of(tmp_path / "run", distillation__teacher=str(bare))
    with pytest.raises(ValueError, match=r"has no tokenizer.json, so that"):
        begun(run, recipe)


# ------------------------------------------------------------------------------- chosen layers


def cut(params, layers):
    return params | {"blocks": jax.tree.map(lambda leaf: leaf[list(layers)], params["blocks"])}


@pytest.mark.parametrize("mesh", [
    dict(fsdp=2, tensor=2), dict(stage=2, fsdp=2),
], ids=["fsdp2-tensor2", "stage2-fsdp2"])  # fmt: skip
def test_chosen_layers_of_a_checkpoint(teacher, tmp_path, mesh):
    """Of a Hugging Face checkpoint, and of a run that was saved on stages; the model follows."""
    folder, model, params = teacher
    layers = (3, 0)
    key = dict(batch__accumulation=mesh.get("stage", 1), start_from_layers=layers)
    run, recipe = of_default(tmp_path / "run", mesh, start_from=str(folder), **key)
    assert run.model == dataclasses.replace(model, num_layers=2, vocab_multiple=128)
    found, said = begun(run, recipe)
    assert "layers (3, 0)" in said
    got = runs.in_order(recipe, found.state.params)
    rows = slice(0, 257)
    wanted = cut(params, layers)
    np.testing.assert_array_equal(got["embedding"][rows], wanted["embedding"][rows])
    assert_is(got["blocks"], wanted["blocks"])
    saved(run, recipe, found)
    one, recipe = of_default(
        tmp_path / "one", dict(data=2), start_from=run.workdir, start_from_layers=(1,)
    )
    found, said = begun(one, recipe)
    assert "step 4, layers (1,)" in said and one.model.num_layers == 1
    assert_is(found.state.params["blocks"], cut(params, (0,))["blocks"])


def of_default(workdir, mesh=None, **values):
    """A run without a model of its own."""
    values = dict(batch__size=8, batch__sequence_length=16, steps=9) | values
    run = runs.make_config(families.ModelConfig(), mesh=mesh, workdir=str(workdir), **values)
    return run, runs.make_recipe(run)


def test_chosen_layers_keep_their_kinds():
    model = families.preset("gemma3", num_layers=12)
    assert model.layer_kinds[5] == "global"
    small = of_layers(model, (0, 5, 6, 11))
    assert small.layer_kinds == ("local", "global", "local", "global")
    assert small.layer_pattern == ("local", "global")
    same = of_layers(model, range(12))
    assert same == model


@pytest.mark.parametrize(("layers", "said"), [
    ((0, 4), "layer 4 is none of the 4 layers"),
    ((-1,), "layer -1 is none"),
])  # fmt: skip
def test_layers_that_are_not_there(teacher, tmp_path, layers, said):
    with pytest.raises(ConfigError, match=said):
        of_default(tmp_path, start_from=str(teacher[0]), start_from_layers=layers)


def test_layers_of_two_stacks_are_refused():
    model = families.preset("deepseek_v3", **hf_checkpoints.SMALL)
    with pytest.raises(ValueError, match="are of another kind"):
        of_layers(model, (0, 1))


def test_a_model_of_other_layers_is_refused(teacher, tmp_path):
    """The model that is given must be that of the chosen layers."""
    folder, model, _ = teacher
    run, recipe = run_of(
        tmp_path, model=dict(vars(model), num_layers=3), start_from=str(folder),
        start_from_layers=(0, 2),
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"model.num_layers: saved 2, given 3"):
        begun(run, recipe)


def test_parts_of_chosen_layers_are_read_alone():
    """Rows of the stack in their order, whatever part of it a device holds."""
    stack = np.arange(24.0).reshape(4, 2, 3)
    source = chosen.Saved(pathlib.Path(), {"blocks/a": stack, "norm": stack[0]})
    of = chosen.Chosen(source, (2, 0, 3))
    assert of.shapes == {"blocks/a": (3, 2, 3), "norm": (2, 3)}
    part = of.part("blocks/a", (slice(1, 3), slice(0, 1), slice(None)), np.float32)
    np.testing.assert_array_equal(part, stack[[0, 3], :1])
    np.testing.assert_array_equal(of.part("norm", (slice(1, 2), slice(None)), "f4"), stack[0][1:])


def test_a_teacher_s_padding_is_that_of_its_student(teacher, tmp_path):
    """Files of Hugging Face have no padding, so that its head takes any."""
    model = OF_STUDENT | dict(vocab_multiple=128)
    run, _ = run_of(tmp_path, model=model, distillation__teacher=str(teacher[0]))
    assert starting.teacher_of(run).padded_vocab == run.model.padded_vocab == 384

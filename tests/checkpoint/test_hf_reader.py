"""Hugging Face checkpoints read part by part: the numbers of the whole, on every mesh."""

import json
import re
import shutil
import types

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from support import hf_checkpoints, runs
from support.hf_checkpoints import FAMILIES, SMALL
from support.resumes import opened

from llmx import config, convert
from llmx.checkpoint import hf, hf_reader, model_params, resume, streamed
from llmx.config import checks
from llmx.data import tokenizers
from llmx.model import families
from llmx.runtime import exits
from llmx.sharding import trees

DATA = types.SimpleNamespace(fingerprint="of the data")
MESHES = {
    "fsdp2_tensor2": dict(mesh=dict(fsdp=2, tensor=2), batch__accumulation=1),
    "stage2_data2": dict(mesh=dict(stage=2, data=2), batch__accumulation=4),
}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_each_device_gets_its_part_of_the_whole(family, mesh, written, monkeypatch):
    """And the host holds no more than that of one parameter at a time."""
    directory = written(family)
    model, whole = hf_checkpoints.random_params(family)
    run = runs.make_config(
        model, model=None, batch__size=8, batch__sequence_length=16, **MESHES[mesh]
    )
    recipe = runs.make_recipe(run)
    wanted = trees.named(recipe.loss.params)
    largest = max(np.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in wanted.values())
    held, part = [], hf_reader.Source.part

    def counted(*args):
        array = part(*args)
        held.append(array.size)
        return array

    monkeypatch.setattr(hf_reader.Source, "part", counted)
    source = hf_reader.open_checkpoint(directory, model)
    got = hf_reader.to_shards(source, wanted, order=recipe.order)
    assert max(held) <= largest
    expected = trees.named(runs.in_stages(recipe, whole) if run.mesh.stage > 1 else whole)
    assert got.keys() == expected.keys()
    for name, array in got.items():
        assert array.sharding == wanted[name].sharding
        np.testing.assert_array_equal(array, expected[name], err_msg=name)


def test_files_are_closed_again_and_again(written, monkeypatch):
    """What is mapped of them stays in memory until then."""
    directory = written("llama3")
    _, whole = hf.load(directory)
    openings, opened_file = [], hf_reader.opened
    monkeypatch.setattr(
        hf_reader, "opened", lambda path: (openings.append(path), opened_file(path))[1]
    )
    monkeypatch.setattr(hf_reader, "_MAPPED_BYTES", 1)
    model, again = hf.load(directory)
    assert len(openings) > len({*openings}) + model.num_layers
    jax.tree.map(np.testing.assert_array_equal, again, whole)


def run_from(directory, tmp_path, **values):
    values = dict(mesh=dict(fsdp=2), batch__size=4, batch__sequence_length=16) | values
    model = values.pop("model", families.ModelConfig())
    run = runs.make_config(
        model, workdir=str(tmp_path / "run"), start_from=str(directory), **values
    )
    return run, runs.make_recipe(run)


def begun(directory, tmp_path, **values):
    run, recipe = run_from(directory, tmp_path, **values)
    said: list[str] = []
    with opened(tmp_path / "run", said.append) as checkpoints:
        found = resume.restore_or_init(run, recipe, checkpoints, DATA, said.append)
    return run, recipe, found.state, "\n".join(said)


def test_a_run_starts_from_a_directory_of_hugging_face(written, tmp_path):
    """With the model from there, in the dtype of the run, the average too."""
    directory = written("llama3", "bfloat16")
    tokenizers.ByteTokenizer().save(directory / "tokenizer.json")
    run, recipe, state, said = begun(directory, tmp_path, optimizer__ema_decay=0.9)
    assert f"starting with the parameters of {directory}" in said
    model, whole = hf.load(directory)
    assert run.model == model and model.family == "llama3"
    assert run.data.tokenizer == str(directory / "tokenizer.json")
    for tree in (state.params, state.ema):
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(tree), whole)
    assert (
        jax.tree.leaves(state.params)[0].sharding == jax.tree.leaves(recipe.loss.params)[0].sharding
    )
    # The padding of the vocabulary may be another.
    other = families.preset("llama3", **SMALL | FAMILIES["llama3"] | dict(vocab_multiple=8))
    (tmp_path / "b").mkdir()
    _, _, padded, _ = begun(directory, tmp_path / "b", model=other)
    assert padded.params["embedding"].shape == (264, 32)
    np.testing.assert_array_equal(padded.params["embedding"][:259], whole["embedding"][:259])


def test_what_cannot_be_started_from_is_said(written, tmp_path):
    directory = written("gpt2")
    (directory / "tokenizer.json").unlink(missing_ok=True)
    with pytest.raises(ValueError, match=r"has no tokenizer\.json.*set data\.tokenizer"):
        run_from(directory, tmp_path)
    with pytest.raises(ValueError, match="holds no checkpoints"):
        run_from(tmp_path, tmp_path)
    with pytest.raises(ValueError, match="names a step of a Hugging Face checkpoint"):
        run_from(f"{directory}@12", tmp_path)
    other = families.preset("llama3", **SMALL | FAMILIES["llama3"])
    bytes_ = dict(data__tokenizer="bytes")
    with pytest.raises(
        ValueError, match=r"(?s)another function .*norm: saved 'layer', given 'rms'"
    ):
        begun(directory, tmp_path, model=other, **bytes_)
    # A change that is named, and does not fit the tensors.
    wider = families.preset("gpt2", **SMALL | FAMILIES["gpt2"] | dict(mlp_dim=128))
    with pytest.raises(
        ValueError, match=r"holds other parameters .*\(4, 32, 64\), wanted \(4, 32, 128\)"
    ):
        begun(directory, tmp_path, model=wider, start_changes=("mlp_dim",), **bytes_)
    # A change that fits them.
    eps = families.preset("gpt2", **SMALL | FAMILIES["gpt2"] | dict(norm_eps=0.1))
    _, _, state, _ = begun(directory, tmp_path, model=eps, start_changes=("norm_eps",), **bytes_)
    whole = hf.load(directory)[1]["embedding"]
    np.testing.assert_array_equal(state.params["embedding"][:259], whole[:259])


def test_a_run_gives_its_model_and_tokenizer_to_the_next(written, tmp_path):
    """`start_from` a work directory, where the config names no model."""
    model = families.preset("llama3", **SMALL | FAMILIES["llama3"])
    (tmp_path / "old" / "checkpoints").mkdir(parents=True)
    tokenizers.ByteTokenizer().save(tmp_path / "old" / "tokenizer.json")
    saved = runs.make_config(model, workdir=str(tmp_path / "old"))
    config.save_run(saved)
    run, _ = run_from(tmp_path / "old", tmp_path)
    assert run.model == model and run.data.tokenizer.endswith("old/tokenizer.json")
    (tmp_path / "old" / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is damaged"):
        run_from(tmp_path / "old", tmp_path)
    config.save_run(saved)
    given = families.preset("llama3", **SMALL | FAMILIES["llama3"] | dict(norm_eps=0.5))
    run, _ = run_from(tmp_path / "old", tmp_path, model=given)
    assert run.model.norm_eps == 0.5  # it is compared when the parameters are read
    assert checks.resolve(run, 2).model == run.model


def test_half_precision_is_read_exactly(written):
    """And no wider than it is asked for."""
    directory = written("llama3", "bfloat16")
    source = hf_reader.open_checkpoint(directory)
    assert source.dtype("embedding") == source.dtype("norm/scale") == ml_dtypes.bfloat16
    index = (slice(3, 5), slice(0, 32))
    got = source.part("embedding", index, source.dtype("embedding"))
    names = json.loads((directory / hf_reader.INDEX).read_text())["weight_map"]
    file = safetensors.numpy.load_file(directory / names["model.embed_tokens.weight"])
    np.testing.assert_array_equal(got, file["model.embed_tokens.weight"][3:5])


def test_an_import_keeps_every_dtype_and_bit(written, tmp_path, monkeypatch):
    """Of a checkpoint in which tensors differ: the run's checkpoint has each as it was, in chunks
    that need not be layers."""
    directory = tmp_path / "mixed"
    shutil.copytree(written("deepseek_v3", "bfloat16"), directory)
    names = json.loads((directory / hf_reader.INDEX).read_text())["weight_map"]
    biases = [name for name in names if name.endswith("e_score_correction_bias")]
    assert biases
    for name in biases:  # as published: fp32, among bf16
        file = directory / names[name]
        tensors = safetensors.numpy.load_file(file)
        tensors[name] = tensors[name].astype(np.float32) * np.float32(1.2345678)
        safetensors.numpy.save_file(tensors, file)
    monkeypatch.setattr(streamed, "CHUNK_BYTES", 4000)
    convert.from_hf(str(directory), str(tmp_path / "run"))
    run = config.load_run(str(tmp_path / "run"))
    recipe = runs.make_recipe(
        runs.make_config(run.model, mesh=dict(fsdp=2), batch__size=2, batch__sequence_length=16)
    )
    restored = model_params.restore_params(str(tmp_path / "run"), recipe.loss.params, log=print)
    got = trees.named(restored.state)
    _, whole = hf.load(directory)
    assert got["blocks/mlp/bias"].dtype == np.float32
    assert got["blocks/mlp/gate"].dtype == ml_dtypes.bfloat16
    for name, array in trees.named(whole).items():
        np.testing.assert_array_equal(np.asarray(got[name], np.float32), array, err_msg=name)


def test_an_import_that_cannot_be_written_leaves_nothing(written, tmp_path, monkeypatch, capsys):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(streamed, "_chunks", full)
    command = ["--workdir", str(tmp_path / "run"), "--from-hf", str(written("llama3"))]
    assert convert.main(command) == exits.UNSAVED
    assert re.search("the disk is full .*: free space on it", capsys.readouterr().err)
    monkeypatch.undo()
    assert convert.main(command) == 0  # again


def test_a_file_that_cannot_be_read_is_no_full_disk(written, tmp_path, monkeypatch):
    def unread(*args, dtype):
        raise ValueError("model.safetensors cannot be read: download it again")

    monkeypatch.setattr(hf_reader.Source, "part", unread)
    with pytest.raises(ValueError, match="cannot be read: download it again"):
        convert.from_hf(str(written("llama3")), str(tmp_path / "run"))
    assert not (tmp_path / "run" / "checkpoints").exists()

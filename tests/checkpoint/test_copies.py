"""Runs that start from an object store: the parameters of the local folder, and what is refused."""

import json
import pathlib
import shutil
import types

import jax
import numpy as np
import pytest
from support import memory_store, runs
from support.resumes import opened, resumed, save

from llmx import config, convert
from llmx.checkpoint import checkpointer, copies, directory, hf, hf_reader, resume
from llmx.config import checks
from llmx.data import remote, tokenizers
from llmx.model import families

URL = "memory://bucket/model"
DATA = types.SimpleNamespace(fingerprint="of the data")


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with memory_store.emptied() as files:
        yield files


def put(store, folder, *, but=(), url=URL):
    remote.upload_folder(pathlib.Path(folder), url)
    for name in but:
        store.rm_file(f"{url}/{name}")


def begun(start_from, tmp_path, **values):
    values = dict(mesh=dict(fsdp=2), batch__size=4, batch__sequence_length=16) | values
    run = runs.make_config(
        families.ModelConfig(), workdir=str(tmp_path / "run"), start_from=start_from, **values
    )
    said: list[str] = []
    with opened(tmp_path / "run", said.append) as checkpoints:
        recipe = runs.make_recipe(run)
        found = resume.restore_or_init(run, recipe, checkpoints, DATA, said.append)
    return run, found.state, "\n".join(said)


def copied_names(url=URL):
    folder = remote.local_place(url, copies.FOLDER)
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_run_starts_from_a_hugging_face_folder_in_a_store(store, written, tmp_path):
    """What it reads of the folder is copied, what else is there is not."""
    folder = tmp_path / "hf"
    shutil.copytree(written("llama3"), folder)
    tokenizers.ByteTokenizer().save(folder / "tokenizer.json")
    put(store, folder)
    for other in ("original/consolidated.00.pth", "pytorch_model.bin", "other.safetensors"):
        store.pipe_file(f"{URL}/{other}", b"x" * 1000)
    run, state, said = begun(f"{URL}/", tmp_path)
    assert f"starting with the parameters of {URL}" in said and f"copying {URL} (0.00 GiB)" in said
    model, whole = hf.load(folder)
    assert run.model == model and run.start_from == f"{URL}/"
    assert run.data.tokenizer == f"{remote.local_place(URL, copies.FOLDER)}/tokenizer.json"
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), whole)
    assert copied_names() == {path.name for path in folder.iterdir()}
    convert.from_hf(URL, str(tmp_path / "imported"))
    assert checkpointer.is_import(f"{tmp_path}/imported/checkpoints", 0)


def test_what_has_not_changed_is_not_copied_again(store, written, tmp_path, monkeypatch):
    put(store, written("llama3"))
    bytes_ = dict(data__tokenizer="bytes")
    _, before, _ = begun(URL, tmp_path / "a", **bytes_)
    got, get_file = [], type(store).get_file
    monkeypatch.setattr(
        type(store), "get_file",
        lambda self, source, *rest, **more: (got.append(source), get_file(self, source, *rest))[1],
    )  # fmt: skip
    _, again, _ = begun(URL, tmp_path / "b", **bytes_)
    assert got == []
    jax.tree.map(np.testing.assert_array_equal, before.params, again.params)
    model, params = hf.load(written("llama3"))
    params["norm"]["scale"] = params["norm"]["scale"] + 1
    other = hf.export(params, model, tmp_path / "other", shard_bytes=30_000)
    put(store, other)
    _, changed, _ = begun(URL, tmp_path / "c", **bytes_)
    np.testing.assert_array_equal(changed.params["norm"]["scale"], params["norm"]["scale"])
    assert got


def test_a_run_starts_from_a_work_directory_in_a_store(store, tmp_path):
    """From its newest complete checkpoint, or the step that is named; no other is copied."""
    old = tmp_path / "old"
    states = {step: save(old, step, 1) for step in (1, 2)}
    config.save_run(runs.make_config("llama3", workdir=str(old)))
    put(store, old)
    store.pipe_file(f"{URL}/checkpoints/3/state/d/array", b"half")  # without its marker
    for place, step in ((URL, 2), (f"{URL}@1", 1)):
        shutil.rmtree(tmp_path / "home", ignore_errors=True)
        _, state, first, said = resumed(tmp_path / f"new{step}", 1, start_from=place)
        assert first == 0 and f"starting with the parameters of {URL}, step {step}" in said
        jax.tree.map(np.testing.assert_array_equal, state.params, states[step].params)
        found = {name.split("/")[1] for name in copied_names() if name.startswith("checkpoints/")}
        assert found == {str(step)}


def test_the_model_is_that_of_the_work_directory(store, tmp_path):
    saved = runs.make_config("llama3", model=dict(num_layers=2), workdir=str(tmp_path / "old"))
    config.save_run(saved)
    tokenizers.ByteTokenizer().save(tmp_path / "old" / "tokenizer.json")
    put(store, tmp_path / "old")
    store.pipe_file(f"{URL}/checkpoints/4/{directory.MARKER}", b"")
    run = runs.make_config(families.ModelConfig(), workdir="unused", start_from=URL)
    assert run.model == saved.model
    assert run.data.tokenizer == f"{remote.local_place(URL, copies.FOLDER)}/tokenizer.json"
    assert copied_names() == {"config.json", "tokenizer.json"}


@pytest.mark.parametrize("missing", [hf_reader.INDEX, hf_reader.CONFIG])
def test_half_a_folder_is_refused_before_anything_is_copied(store, written, missing):
    put(store, written("llama3"), but=[missing])
    assert "holds no checkpoints: name the workdir of a run, or" in refusal(URL)
    assert copied_names() == set()


def refusal(start_from):
    run = config.default()
    run.workdir, run.start_from = "unused", start_from
    with pytest.raises(ValueError, match="start_from") as error:
        checks.resolve(run, 1)
    (line,) = [line for line in str(error.value).splitlines() if "start_from" in line]
    return line


def test_safetensors_that_are_missing_are_named_before_others_are_copied(store, written, tmp_path):
    folder = written("llama3")
    names = json.loads((folder / hf_reader.INDEX).read_text())["weight_map"]
    lost = sorted(names.values())[-1]
    put(store, folder, but=[lost])
    with pytest.raises(ValueError, match=f"start_from={URL} lacks {lost}, which its .* names"):
        begun(URL, tmp_path, data__tokenizer="bytes")
    assert not any(name.endswith(".safetensors") for name in copied_names())


def test_what_cannot_be_started_from(store, written, tmp_path, monkeypatch):
    assert "does not exist" in refusal(URL)
    assert "nonsense is no kind of store" in refusal("nonsense://bucket/model")
    store.pipe_file(f"{URL}/checkpoints/3/state/d/array", b"half")
    assert "has no complete checkpoint" in refusal(URL)
    store.pipe_file(f"{URL}/checkpoints/2/{directory.MARKER}", b"")
    assert "no checkpoint of that step is there: there are [2]" in refusal(f"{URL}@3")
    store.store.clear()
    put(store, written("llama3"))
    assert "names a step of a Hugging Face checkpoint, which has none" in refusal(f"{URL}@3")

    def forbidden(*args, **more):
        raise PermissionError("Access Denied")

    monkeypatch.setattr(type(store), "find", forbidden)
    said = refusal(URL)
    assert "cannot be listed (Access Denied (memory:" in said and "the credentials" in said


def test_a_copy_that_does_not_fit_on_the_disk_is_not_begun(store, written, tmp_path, monkeypatch):
    put(store, written("llama3"))
    monkeypatch.setattr(
        remote.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=20_000)
    )
    with pytest.raises(ValueError, match=r"cannot be copied .* are to be copied, and the disk of"):
        begun(URL, tmp_path, data__tokenizer="bytes")
    assert not any(name.endswith(".safetensors") for name in copied_names())


def test_names_on_the_hub():
    assert copies.name_on_hub("hf://owner/model") == "owner/model"
    for other in ("hf://datasets/name", "hf://owner/model@main", "s3://owner/model", "owner/model"):
        assert copies.name_on_hub(other) == ""

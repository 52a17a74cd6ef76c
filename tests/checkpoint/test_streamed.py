"""Checkpoints read from their files part by part are those that are restored as a whole."""

import dataclasses

import jax
import numpy as np
import pytest
from support import resumes, runs

from llmx import config, convert
from llmx.checkpoint import checkpointer, hf, model_params, streamed
from llmx.data import tokenizers
from llmx.sharding import trees

STAGES = dict(mesh__stage=2, pipeline__schedule="1f1b", batch__accumulation=2)


def params_of(workdir, reader=None, step=None, said=print):
    """Of a run in `workdir`, by path."""
    _, recipe = resumes.run_of(workdir, 1)
    restored = model_params.restore_params(
        str(workdir), recipe.loss.params, step=step, log=said, reader=reader
    )
    return restored.step, trees.named(restored.state)


@pytest.mark.parametrize("values", [{}, STAGES], ids=["fsdp", "stages"])
def test_any_index_reads_what_a_restore_gives(values, tmp_path):
    """Of a checkpoint of several devices, whose layers may be in another order."""
    state = resumes.save(tmp_path, 3, 2, **values)
    step, found = params_of(tmp_path, streamed.FROM_FILES)
    _, whole = params_of(tmp_path)
    assert step == 3 and found.keys() == whole.keys()
    for name, array in found.items():
        wanted = np.asarray(whole[name])
        assert array.shape == wanted.shape and array.dtype == wanted.dtype
        for layer in range(len(wanted)):
            np.testing.assert_array_equal(array[layer], wanted[layer], err_msg=name)
        if wanted.ndim > 1:
            np.testing.assert_array_equal(array[1, 1:2], wanted[1, 1:2])
    table = np.asarray(state.params["embedding"])
    np.testing.assert_array_equal(found["embedding"][3:9], table[3:9])
    np.testing.assert_array_equal(found["norm/scale"][...], state.params["norm"]["scale"])


def test_layers_in_another_order_are_found_by_any_index(tmp_path):
    resumes.save(tmp_path, 1, 1)
    _, found = params_of(tmp_path, streamed.FROM_FILES)
    array = found["blocks/mlp/gate/kernel"]
    turned, whole = dataclasses.replace(array, rows=(1, 0)), array[...]
    np.testing.assert_array_equal(turned[...], whole[::-1])
    np.testing.assert_array_equal(turned[0:1, 3:5], whole[1:2, 3:5])
    np.testing.assert_array_equal(turned[np.int64(1), 2], whole[0, 2])


def test_what_may_not_be_read_is_not_taken_for_damage(tmp_path, monkeypatch):
    """An older checkpoint would take its place."""
    import tensorstore

    for step in (1, 2):
        resumes.save(tmp_path, step, 1)

    def denied(*args, **kwargs):
        raise ValueError("PERMISSION_DENIED: no")

    monkeypatch.setattr(tensorstore, "open", denied)
    with pytest.raises(ValueError, match="permit this user to read it"):
        params_of(tmp_path, streamed.FROM_FILES)


def test_odd_names_of_folders(tmp_path):
    for name in ("a#b", "a?b", "p%20q"):
        resumes.save(tmp_path / name, 1, 1)
        assert params_of(tmp_path / name, streamed.FROM_FILES)[0] == 1


def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path):
    for step in (2, 5):
        resumes.save(tmp_path, step, 1)
    said: list[str] = []
    assert params_of(tmp_path, streamed.FROM_FILES, said=said.append)[0] == 5 and not said
    for path in (tmp_path / "checkpoints/5/state").rglob("*"):
        if path.is_file() and len(content := bytearray(path.read_bytes())) > 4096:
            content[len(content) // 4 : -len(content) // 4] = bytes(len(content) // 2)
            path.write_bytes(content)
    assert params_of(tmp_path, streamed.FROM_FILES, said=said.append)[0] == 2
    assert "checkpoint 5 is corrupt" in said[0]
    with pytest.raises(ValueError, match="no good checkpoint"):
        params_of(tmp_path, streamed.FROM_FILES, step=5)


def test_numbers_that_changed_on_disk_are_noticed(tmp_path):
    """The sums over chunks are those that were saved, and see a changed number."""
    resumes.save(tmp_path, 1, 1)
    root = checkpointer.directories.root_of(str(tmp_path / "checkpoints"))
    document = checkpointer.restore.read_document(root, 1)
    _, arrays = params_of(tmp_path, streamed.FROM_FILES)
    sums = {name: document.leaves[f"params/{name}"]["checksum"] for name in arrays}
    assert streamed.FROM_FILES.differences(arrays, sums) == ""
    sums["embedding"] += 1
    found = streamed.FROM_FILES.differences(arrays, sums)
    assert found == "checksum differs in leaf embedding"


def test_exports_of_stages_are_in_the_models_order(tmp_path):
    state = resumes.save(tmp_path / "run", 1, 2, **STAGES)
    run, recipe = resumes.run_of(tmp_path / "run", 2, **STAGES)
    run.model.vocab_size = 257
    config.save_run(run)
    tokenizers.ByteTokenizer().save(tmp_path / "run" / "tokenizer.json")
    convert.to_hf(str(tmp_path / "run"), str(tmp_path / "out"), ema=False)
    _, read = hf.load(tmp_path / "out", run.model)
    wanted = trees.named(runs.in_order(recipe, jax.device_get(state.params)))
    for name, array in trees.named(read).items():
        rows = slice(257) if name in ("embedding", "head") else slice(None)
        np.testing.assert_array_equal(array[rows], wanted[name][rows], err_msg=name)

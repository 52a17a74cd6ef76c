"""A run of packed weights is a run as any other: on every mesh, in every command but training."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import runs

from llmx import config as config_lib
from llmx import convert, generate, library, sharding
from llmx.checkpoint import model_params
from llmx.compress import quantize_stage, recipe, saved, stages
from llmx.compress.quantize_stage import Quantize
from llmx.config import checks, starting
from llmx.evaluate import held_out
from llmx.model import packed

# One run serves several tests: they belong on one worker.
pytestmark = pytest.mark.xdist_group("quantized")
# fp32 sums in another order.
LOSS = 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("quantized")


@pytest.fixture(scope="module")
def trained(folder):
    """The work directory of a run of two steps."""
    return runs.trained_workdir(
        folder, width=32, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=16, mlp_dim=64
    )  # fmt: skip


@pytest.fixture(scope="module")
def quantized(folder, trained):
    """The run in 4 bits, by GPTQ."""
    options = Quantize("int4", 32, calibration_batches=1)
    quantize_stage.run(stages.Job(trained, folder / "int4", options))
    return str(folder / "int4")


def loss_on(workdir: str, sizes: dict) -> tuple[float, dict]:
    """Held-out loss of one batch on a mesh, and the parameters."""
    run = config_lib.load_run(workdir)
    run.mesh = dataclasses.replace(sharding.MeshConfig(), data=1, **sizes)
    num = int(np.prod(list(sizes.values()) or [1]))
    if sizes.get("stage"):
        run.batch.accumulation = 2
        run.pipeline.schedule = "1f1b"
    made = runs.make_recipe(checks.resolve(run, num))
    restored = model_params.restore_params(
        workdir, made.loss.model_params, order=made.order, log=lambda text: None
    )
    with jax.set_mesh(made.mesh):
        found = held_out.losses(
            made, held_out.make_step(made), restored.state, saved.dataset_of(run),
            batch_size=8, batches=1,
        )  # fmt: skip
    return found["loss"], restored.state


def test_codes_are_restored_on_every_mesh(quantized):
    expected, params = loss_on(quantized, {})
    leaves = packed.named(params)
    codes = leaves["blocks/mlp/down/kernel"].codes
    assert codes.dtype == jnp.uint8 and codes.shape == (2, 32, 32)
    assert leaves["blocks/mlp/down/kernel"].scale.shape == (2, 2, 32)
    for sizes in ({"fsdp": 2, "tensor": 2}, {"stage": 2}):
        loss, on_mesh = loss_on(quantized, sizes)
        np.testing.assert_allclose(loss, expected, rtol=LOSS)
        split = packed.named(on_mesh)["blocks/mlp/down/kernel"]
        np.testing.assert_array_equal(jax.device_get(split.codes), codes)
        assert split.codes.addressable_shards[0].data.size * 2 <= codes.size
    text = (pathlib.Path(quantized, "checkpoints", "0", "meta", "metadata")).read_text()
    assert "blocks/mlp/down/kernel/codes" in text and '"uint8"' in text


def test_it_generates_the_same_on_every_mesh(quantized, capsys):
    texts = []
    for flags in ([], ["--tensor=2", "--fsdp=2"]):
        command = [f"--workdir={quantized}", "--prompt=the", "--max-tokens=12", "--temperature=0"]
        assert generate.main([*command, *flags]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and len(texts[0]) > 12


def test_it_is_exported(quantized, folder):
    files = pytest.importorskip("safetensors.numpy")
    assert convert.to_hf(quantized, str(folder / "hf")) == 0
    tensors = files.load_file(folder / "hf" / "model.safetensors")
    assert tensors["model.layers.1.mlp.down_proj.weight_packed"].shape == (32, 8)
    reader = pytest.importorskip("gguf").GGUFReader
    assert convert.to_gguf(quantized, str(folder / "model.gguf")) == 0
    kinds = {one.name: one.tensor_type.name for one in reader(folder / "model.gguf").tensors}
    assert kinds["blk.1.ffn_down.weight"] == "Q4_0" and kinds["output_norm.weight"] == "F32"
    with pytest.raises(ValueError, match="exists: name a new file"):
        convert.to_gguf(quantized, str(folder / "model.gguf"))


def test_it_is_not_trained_nor_compressed_further(quantized, trained, capsys):
    run = config_lib.load_run(quantized)
    with pytest.raises(config_lib.ConfigError, match="packed weights are whole codes"):
        library.fit(run)
    assert any("has packed weights" in text for text in saved.problems_of_source(quantized))
    found = starting.place_problem("start_from", quantized)
    assert "packed.format='int4'" in found and not starting.place_problem("start_from", trained)
    given = recipe.Recipe(stages=(("quantize", dict(group=32)), ("train", dict(steps=2))))
    with pytest.raises(ValueError, match="make it last"):
        recipe.checked(given, saved.model_of(trained))
    given = recipe.Recipe(stages=(("quantize", dict(group=24)),))
    with pytest.raises(ValueError, match=r"group=24 does not divide the inputs of blocks/"):
        recipe.checked(given, saved.model_of(trained))

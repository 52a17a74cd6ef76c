"""config/utilization.py: a run's figures are of the loss, the tokens and the type that it has."""

import jax
import pytest
from support import runs

from llmx.config import utilization
from llmx.model import costs, losses, remat_costs
from llmx.runtime.hardware import CHIPS

VOCAB = dict(vocab_size=500, vocab_multiple=128)
MESHES = {
    "one device": dict(),
    "replicas": dict(data=2, fsdp=2),
    "inside": dict(sequence=2, tensor=2),
    "stages": dict(stage=2, tensor=2),
}


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_the_loss_is_in_as_many_chunks_as_the_program_has(mesh, monkeypatch):
    run = runs.make_config(
        model=VOCAB, mesh=mesh, batch__size=16, batch__sequence_length=64, batch__accumulation=2
    )
    # Some hundred rows of the head at a time.
    monkeypatch.setattr(losses, "CHUNK_ROWS", 64)
    asked, number = [], losses.num_chunks
    monkeypatch.setattr(losses, "num_chunks", lambda *sizes: asked.append(sizes) or number(*sizes))
    recipe = runs.make_recipe(run)
    with jax.set_mesh(recipe.mesh):
        runs.make_train_step(recipe).trace(recipe.abstract, recipe.abstract_batch)
    of_program = set(asked)
    assert utilization.loss_chunks(run) == number(*of_program.pop()) > 1
    assert not of_program  # all have the same sizes


def test_chunks_that_the_config_names():
    run = runs.make_config(model=VOCAB, loss__chunks=4)
    assert utilization.loss_chunks(run) == 4


def test_figures_of_a_run():
    run = runs.make_config(
        "gemma3", model=VOCAB, mesh=dict(fsdp=4), batch__size=8, batch__sequence_length=64,
        precision="bf16", remat="full", loss__chunks=2,
    )  # fmt: skip
    reached = utilization.of(run, CHIPS["tpu_v5p"], 4)
    sizes = dict(sequence_length=64)
    causal = costs.training_flops_per_token(run.model, **sizes)
    again = sum(
        remat_costs.recomputed_flops_by_layer(run.model, text="full", loss_chunks=2, **sizes)
    )
    wanted = {
        "mfu": causal, "hfu": causal + again,
        "mfu_full": costs.training_flops_per_token(run.model, causal=False, **sizes),
    }  # fmt: skip
    shares = reached.shares(1e6)
    assert shares == pytest.approx({k: 1e6 * v / 4 / 459e12 for k, v in wanted.items()})
    assert shares["mfu"] < shares["mfu_full"] and shares["mfu"] < shares["hfu"]
    run.precision = "fp32"  # computed exactly, not in tf32
    slower = utilization.of(run, CHIPS["h100_sxm"], 4).shares(1e6)
    assert slower["mfu"] == pytest.approx(1e6 * causal / 4 / 67e12)


BLOCKS = dict(products__format="fp8", products__granularity="block", products__block=64)


@pytest.mark.parametrize(
    ("products", "dtype", "h100", "tpu_v5p", "tpu_v5e"),
    [
        (dict(), "bfloat16", 989.5, 459, 197),
        (dict(products__format="fp8"), "float8_e4m3fn", 1979, 459, 197),
        (dict(products__format="int8"), "int8", 1979, 918, 393),
        # Turned back before the product.
        (BLOCKS, "bfloat16", 989.5, 459, 197),
        # Rounded for the wire only.
        (dict(products__gather="fp8"), "bfloat16", 989.5, 459, 197),
    ],
)  # fmt: skip
def test_the_peak_is_of_what_products_take(products, dtype, h100, tpu_v5p, tpu_v5e):
    run = runs.make_config("llama3", model=VOCAB, precision="bf16", **products)
    assert utilization.compute_dtype(run) == dtype
    for name, peak in dict(h100_sxm=h100, tpu_v5p=tpu_v5p, tpu_v5e=tpu_v5e).items():
        reached = utilization.of(run, CHIPS[name], 1)
        shares = reached.shares(1e6)
        assert shares["mfu"] == pytest.approx(1e6 * reached.flops_per_token["mfu"] / peak / 1e12)
        assert ("mfu_of_bfloat16" in shares) == (peak > CHIPS[name].device_flops() / 1e12)

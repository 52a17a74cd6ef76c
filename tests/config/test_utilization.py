"""config/utilization.py: a run's figures are of the loss, the tokens and the type that it has."""

import math

import jax
import pytest
from support import runs

from llmx.config import utilization
from llmx.model import costs, losses, remat_costs
from llmx.pipeline import executor
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


CHUNKS = [
    ((), (2, 2), ":2=full,none", "full"),
    ((3, 1), (3, 1), ":3=full,none", "full"),
    (dict(virtual_stages=2, schedule="interleaved_1f1b"), (1,) * 4, "1:=none,dots", "dots"),
    ((), (2, 2), "every_4", "every_2"),
]


@pytest.mark.parametrize(("cut", "chunks", "text", "alike"), CHUNKS)
def test_figures_of_a_pipeline_are_of_its_chunks(cut, chunks, text, alike):
    keys = cut if isinstance(cut, dict) else dict(layers=cut)

    def figures(remat):
        run = runs.make_config(
            "llama3", model=VOCAB | dict(num_layers=4), mesh=dict(stage=2), batch__size=8,
            batch__accumulation=4, batch__sequence_length=64, remat=remat,
            **{f"pipeline__{key}": value for key, value in keys.items()},
        )  # fmt: skip
        assert utilization.chunks_of(run) == chunks
        return utilization.of(run, CHIPS["tpu_v5p"], 2).flops_per_token

    found = figures(text)
    assert found == figures(alike) and found["hfu"] > found["mfu"]


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        (":2=full,dots", ()),
        (":2=full,dots", (3, 1)),
        ("every_3", ()),
        ("sqrt", (4, 2)),
        ("full", (3, 1)),
        ("part", (3, 1)),
        ("part+dots", ()),
    ],
)
def test_a_stage_saves_what_is_counted_of_a_chunk(text, layers, monkeypatch):
    """What the executor keeps of a microbatch of two rows of 24 tokens, in fp32."""
    run = runs.make_config(
        "llama3", model=VOCAB | dict(num_layers=sum(layers) or 6), mesh=dict(stage=2),
        batch__size=8, batch__accumulation=4, batch__sequence_length=24, remat=text,
        pipeline__layers=layers,
    )  # fmt: skip
    found, saves = [], executor._saves
    monkeypatch.setattr(executor, "_saves", lambda of: found.append(saves(of)) or found[-1])
    recipe = runs.make_recipe(run)
    with jax.set_mesh(recipe.mesh):
        runs.make_train_step(recipe).trace(recipe.abstract, recipe.abstract_batch)
    # Beside activations, the rows of layers.
    of_rows = [kept.shape for kept in found[0].types if kept.dtype == "float32"]
    beside = [kept.shape for kept in found[0].types if kept.dtype == "int32"]
    assert len(of_rows) + len(beside) == len(found[0].types)
    assert sum(map(math.prod, beside)) <= run.model.num_layers
    _, *counted, _ = remat_costs.saved_bytes_by_layer(
        run.model, text=text, loss_chunks=1, compute_bytes=4, chunks=utilization.chunks_of(run)
    )
    chunk = utilization.chunks_of(run)[0]  # as long as any
    assert 4 * sum(map(math.prod, of_rows)) == 2 * 24 * sum(counted[:chunk])


def test_figures_of_a_run_with_offload():
    """HFU leaves out products whose results come back from the host."""

    def figures(**keys):
        run = runs.make_config("llama3", model=VOCAB, batch__sequence_length=64, **keys)
        return utilization.of(run, CHIPS["tpu_v5p"], 1).flops_per_token

    offloaded = figures(remat="full", offload__saves=("gate", "up"))
    assert offloaded == figures(remat="gate+up")
    assert offloaded["hfu"] < figures(remat="full")["hfu"]


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

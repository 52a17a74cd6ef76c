"""The held-out loss counts every token once, whatever the batches."""

import functools
import math

import jax
import numpy as np
import pytest
from support import runs

from llmx import evaluate
from llmx.data import dataset as data_lib


@pytest.fixture
def text(tmp_path) -> str:
    """A folder with twelve small files."""
    folder = tmp_path / "text"
    folder.mkdir()
    random = np.random.default_rng(0)
    for number in range(12):
        (folder / f"{number}.txt").write_text(" ".join(random.choice(["a", "bc", "def"], 90)))
    return str(folder)


def opened(text: str, mesh: dict | None = None, num_layers: int = 1, **keys):
    """A config, its recipe and its data."""
    config = runs.make_config(
        "llama3",
        model=dict(num_layers=num_layers, width=32, mlp_dim=32),
        mesh={"data": 8} if mesh is None else mesh,
        batch__sequence_length=32,
        data__sources=(text,),
        **dict(data__held_out=0.3) | keys,
    )
    dataset = data_lib.open_dataset(
        config.data, sequence_length=32, seed=0, cache_dir=text + "-cache", log=lambda text: None
    )
    return config, runs.make_recipe(config), dataset


def held_out(recipe, dataset, params, batch_size: int, **options) -> dict:
    evaluation = runs.make_evaluation(recipe)
    with jax.set_mesh(recipe.mesh):
        return evaluate.held_out_loss(
            recipe, evaluation, params, dataset, batch_size=batch_size, **options
        )


def test_batches_do_not_matter(text):
    _, recipe, dataset = opened(text)
    params = recipe.init(0).params
    whole, parts = (held_out(recipe, dataset, params, size) for size in (64, 8))
    first = held_out(recipe, dataset, params, 8, batches=1)
    rows = dataset.held_out_rows(0, range(64), 64)
    assert dataset.num_held_out_windows < 64 and dataset.num_held_out_windows % 8
    assert whole["num_tokens"] == parts["num_tokens"] == rows["weights"].sum()
    assert math.isclose(whole["loss"], parts["loss"], rel_tol=1e-6)
    assert math.isclose(whole["perplexity"], math.exp(whole["loss"]))
    assert first["num_tokens"] < whole["num_tokens"]
    # Plain: mean of -log p over the tokens that count.
    with jax.set_mesh(recipe.mesh):
        logits = jax.jit(functools.partial(runs.logits, recipe))
        log_p = np.asarray(jax.nn.log_softmax(logits(params, runs.put_batch(recipe, rows))))
    picked = np.take_along_axis(log_p, rows["targets"][..., None], axis=-1)[..., 0]
    plain = -(picked * rows["weights"]).sum() / rows["weights"].sum()
    assert math.isclose(whole["loss"], plain, rel_tol=1e-5)


def test_split_rows_do_not_matter(text):
    losses = []
    for sequence, ulysses in ((1, 1), (4, 2)):
        mesh = {"fsdp": 2, "sequence": sequence}
        _, recipe, dataset = opened(text, mesh, attention__ulysses=ulysses)
        losses.append(held_out(recipe, dataset, recipe.init(0).params, 16)["loss"])
    assert math.isclose(*losses, rel_tol=1e-6)


def test_stages_do_not_matter(text):
    losses = []
    for stage, schedule in ((1, "1f1b"), (2, "1f1b"), (2, "zb_v")):
        config, recipe, dataset = opened(
            text, {"stage": stage, "fsdp": 2}, num_layers=5, pipeline__schedule=schedule,
            batch__size=16, batch__accumulation=4,
        )  # fmt: skip
        size = evaluate.batch_size(config)
        assert size == (4 if stage == 1 else 16)
        losses.append(held_out(recipe, dataset, recipe.init(0).params, size)["loss"])
    assert math.isclose(losses[0], losses[1], rel_tol=1e-6)
    assert math.isclose(losses[0], losses[2], rel_tol=1e-6)


def test_nothing_held_out(text):
    _, recipe, dataset = opened(text, data__held_out=0.0)
    result = held_out(recipe, dataset, None, 8)
    assert math.isnan(result["loss"]) and result["num_tokens"] == 0

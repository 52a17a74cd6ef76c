"""The held-out loss counts every token once, whatever the batches."""

import functools
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import runs

from llmx.data import choices, packing
from llmx.data import dataset as data_lib
from llmx.evaluate import held_out as held_out_lib
from llmx.evaluate import multiple_choice


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
    step = held_out_lib.make_step(recipe)
    with jax.set_mesh(recipe.mesh):
        return held_out_lib.losses(recipe, step, params, dataset, batch_size=batch_size, **options)


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


def test_all_of_other_text_is_evaluated(text):
    """With nothing left to train on, each token but a document's first is predicted once."""
    _, _, dataset = opened(text)
    config, recipe, _ = opened(text)
    config.data.held_out = 1.0
    whole = data_lib.open_dataset(
        config.data, sequence_length=32, seed=0, cache_dir=text + "-cache", log=lambda text: None
    )
    assert whole.num_train_windows == 0 < dataset.num_train_windows
    result = held_out(recipe, whole, recipe.init(0).params, 8)
    size = sum(path.stat().st_size for path in pathlib.Path(text).iterdir())
    # Bytes, and an end of each of twelve documents; their first bytes follow nothing.
    assert result["num_tokens"] == size
    batches = result["batches"]
    assert held_out_lib.num_text_bytes(whole, batch_size=8, batches=batches) == size - 12


MESHES = [{"data": 8}, {"fsdp": 2, "sequence": 2, "tensor": 2}, {"data": 3}]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_continuations_have_the_scores_of_their_tokens(text, mesh):
    """On any mesh, several in a row, what each would have alone."""
    _, recipe, _ = opened(text, mesh, batch__size=24, sharding__layout="ddp")
    params, noise = jax.tree.map(lambda leaf: 3 * leaf, recipe.init(0).params), random_of(0)
    several = [
        choices.Continuation(noise.integers(0, 256, before), noise.integers(0, 256, after), 1)
        for before, after in noise.integers(1, 9, (50, 2))
    ]
    # Rows that the mesh does not divide, and one that the model itself would write.
    scorer = multiple_choice.Scorer(
        recipe.loss.apply, recipe.loss.execution, batch_size=7, length=32, filler=256
    )
    with jax.set_mesh(recipe.mesh):
        logits = jax.jit(functools.partial(runs.logits, recipe))

        def log_p_of(ids) -> np.ndarray:
            batch = packing.empty_batch(24, 32, 256)
            batch["tokens"][0, : len(ids)], batch["segment_ids"][0, : len(ids)] = ids, 1
            batch["positions"][0, : len(ids)] = np.arange(len(ids))
            row_TV = jnp.asarray(jax.device_get(logits(params, runs.put_batch(recipe, batch)))[0])
            return np.asarray(jax.nn.log_softmax(row_TV))

        own = several[2].prompt
        for _ in range(2):
            own = np.append(own, log_p_of(own)[len(own) - 1].argmax())
        several[2] = choices.Continuation(own[:-2], own[-2:], 1)
        # The next, but for its last token.
        several[3] = choices.Continuation(own[:-2], (own[-2:] + np.array([0, 1])) % 256, 1)
        found = scorer(params, several)
        for number, one in enumerate(several[:6]):
            ids = np.concatenate([one.prompt, one.ids])
            follow = np.arange(len(one.prompt) - 1, len(ids) - 1)
            log_p = log_p_of(ids)[follow]
            plain = -log_p[np.arange(len(follow)), one.ids].sum()
            assert math.isclose(found.nats[number], plain, rel_tol=1e-5)
            assert found.greedy[number] == (log_p.argmax(axis=1) == one.ids).all() == (number == 2)
    assert len(found.nats) == len(found.greedy) == 50


def test_rows_with_several_documents_are_told_so(text):
    """Also in runs that train on one in a row, whose kernel may know no more of them."""
    config, recipe, _ = opened(
        text, data__pack=False, attention__implementation="cudnn", data__held_out=0.3
    )
    execution = recipe.loss.execution
    assert not execution.packed and execution.attention.implementation == "cudnn"
    scorer = multiple_choice.scorer_of(config, recipe, execution, 256)
    assert scorer.execution.packed and scorer.execution.attention.implementation == "auto"


def random_of(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


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
        size = held_out_lib.batch_size(config)
        assert size == (4 if stage == 1 else 16)
        losses.append(held_out(recipe, dataset, recipe.init(0).params, size)["loss"])
    assert math.isclose(losses[0], losses[1], rel_tol=1e-6)
    assert math.isclose(losses[0], losses[2], rel_tol=1e-6)


def test_nothing_held_out(text):
    _, recipe, dataset = opened(text, data__held_out=0.0)
    result = held_out(recipe, dataset, None, 8)
    assert math.isnan(result["loss"]) and result["num_tokens"] == 0

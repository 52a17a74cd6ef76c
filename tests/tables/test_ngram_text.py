"""Text of a decoder with tables of n-grams: what it generates, and how it scores answers."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import runs
from tables import test_training

from llmx.model import sampling

CLOSE = dict(rtol=1e-4, atol=1e-4)
PROMPTS = [[3], [7, 7, 7, 7, 1, 9], [5, 4, 3, 2, 1, 0, 8, 9, 11]]  # no mesh divides three rows
NUM_NEW = 9

MESHES = {
    "alone": {}, "fsdp2_tensor2": dict(mesh={"fsdp": 2, "tensor": 2}),
    "columns": dict(mesh={"data": 4}, tables__split="columns"),
}  # fmt: skip


@pytest.fixture(scope="module", params=MESHES)
def trained(request):
    """The recipe and the parameters, of a large rate, so that rows say much."""
    config = test_training.made("ngrams", tables__learning_rate=0.5, **MESHES[request.param])
    *_, state, recipe = test_training.train(config, test_training.batches("ngrams"))
    with jax.set_mesh(recipe.mesh):
        return recipe, recipe.loss.merged(state.averaged, state.frozen, state.extra)


def logits_of(recipe, params, tokens: list[int]) -> np.ndarray:
    """Of each position of a text, all tokens read at once: fp32 [T, V]."""
    ways, number = recipe.mesh.size, len(tokens)
    tokens = [*tokens, *[0] * (-number % ways)]  # which those before them do not see
    tokens_BT = np.tile(np.array(tokens, np.int32), (ways, 1))
    positions_BT = np.broadcast_to(np.arange(len(tokens), dtype=np.int32), tokens_BT.shape)
    with jax.set_mesh(recipe.mesh):
        arrays = (tokens_BT, np.ones_like(tokens_BT), positions_BT)
        arrays = jax.device_put(arrays, recipe.loss.batch_sharding)
        logits = jax.jit(recipe.loss.apply.logits, static_argnums=4)(
            params, *arrays, recipe.loss.execution
        )
        return jax.device_get(logits)[0, :number, : recipe.model.vocab_size]


def test_generated_text_is_that_of_whole_rows(trained):
    """Each token is the likeliest of a model that reads all tokens before it anew."""
    recipe, params = trained
    settings = dict(max_tokens=NUM_NEW, temperature=0.0)
    found = sampling.generate(recipe.loss.apply, params, recipe.loss.execution, PROMPTS, **settings)
    for prompt, added in zip(PROMPTS, found, strict=True):
        logits_TV = logits_of(recipe, params, prompt + added)
        wanted_T = logits_TV[len(prompt) - 1 : -1].argmax(axis=-1)
        assert added == wanted_T.tolist()
    streamed = sampling.stream(
        recipe.loss.apply, params, recipe.loss.execution, PROMPTS, **settings
    )
    parts = list(streamed)
    assert [[*itertools.chain(*(part[row] for part in parts))] for row in range(3)] == found
    without = dict(params) | {"tables": jax.tree.map(jnp.zeros_like, params["tables"])}
    assert found != sampling.generate(
        recipe.loss.apply, without, recipe.loss.execution, PROMPTS, **settings
    )


def test_losses_logits_and_scores_agree(trained):
    recipe, params = trained
    [batch] = test_training.batches("ngrams", 1)
    apply, execution = recipe.loss.apply, recipe.loss.execution
    with jax.set_mesh(recipe.mesh):
        placed = runs.put_batch(recipe, batch)
        nats_BT, *_ = jax.jit(apply.losses, static_argnums=2)(params, placed, execution)
        scores_BT, _ = jax.jit(apply.scores, static_argnums=2)(params, placed, execution)
    np.testing.assert_allclose(jax.device_get(scores_BT), jax.device_get(nats_BT), **CLOSE)
    logits_TV = logits_of(recipe, params, batch["tokens"][0].tolist())
    log_odds = jax.nn.log_softmax(logits_TV)
    wanted_T = -np.take_along_axis(log_odds, batch["targets"][0][:, None], axis=1)[:, 0]
    np.testing.assert_allclose(jax.device_get(nats_BT)[0], wanted_T, **CLOSE)

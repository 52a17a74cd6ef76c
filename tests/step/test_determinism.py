"""determinism.py: a step twice, bit for bit; the state stays, and what differs is named."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import runs

from llmx.checkpoint import checksums
from llmx.sharding import trees
from llmx.step import determinism

MODEL = dict(
    vocab_size=300, vocab_multiple=64, width=16, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, mlp_dim=32,
)  # fmt: skip
CASES = {
    "mean": dict(mesh={"fsdp": 2}, optimizer__ema_decay=0.9),
    # Replicas of their own, and an outer step in the same call.
    "local_sgd": dict(mesh={"data": 2}, sync__strategy="local_sgd", sync__every=1),
    # Weights and gradients of another batch are in flight.
    "2bw": dict(mesh={"stage": 2}, pipeline__schedule="pipedream_2bw", batch__accumulation=4),
}


def batch_of(recipe):
    generator = np.random.default_rng(0)
    shape = recipe.batch_shape
    batch = {name: np.zeros(shape, np.int32) for name in ("tokens", "targets", "segment_ids")}
    batch["tokens"], batch["targets"] = generator.integers(0, 300, (2, *shape), dtype=np.int32)
    batch["positions"] = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    return runs.put_batch(recipe, batch | {"weights": np.ones(shape, np.float32)})


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_step_is_deterministic_and_the_state_unharmed(case):
    config = runs.make_config(
        "llama3", model=MODEL, batch__size=4, batch__sequence_length=8, **CASES[case]
    )
    recipe = runs.make_recipe(config)
    step = functools.partial(runs.make_programs(recipe), 0)
    with jax.set_mesh(recipe.mesh):
        state, batch = recipe.init(0), batch_of(recipe)
        before = checksums.fingerprints(trees.named(state))
        layout = jax.tree.map(lambda leaf: leaf.sharding, state)
        checked, count = determinism.check(step, state, batch, fingerprints=checksums.fingerprints)
        assert count > len(before)  # the report too
        assert checksums.fingerprints(trees.named(checked)) == before
        assert jax.tree.map(lambda leaf: leaf.sharding, checked) == layout
        # And it can be trained on: the first step gives what it gives without the check.
        after, _ = step(checked, batch)
        expected, _ = step(recipe.init(0), batch)
        names = checksums.fingerprints(trees.named(expected))
        assert checksums.fingerprints(trees.named(after)) == names


@pytest.mark.parametrize(
    "change, said",
    [
        # A bit of 3 elements, which one comparison of numbers would miss: 0.0 and -0.0.
        (lambda x, n: x.at[2:5].set(jnp.float32(0.0) * (1 - 2 * (n % 2))), "in 3 of 8 elements"),
        (lambda x, n: x.at[7].add(n), "in 1 of 8 elements"),
    ],
)  # fmt: skip
def test_the_first_leaf_that_differs_is_named(change, said):
    calls = []

    def step(state, batch):
        calls.append(batch)
        state["w"]["moved"] = change(state["w"]["moved"], len(calls))
        return state, {"loss": state["w"]["kept"].sum() + len(calls)}

    state = {"w": {"kept": jnp.arange(3.0), "moved": jnp.arange(8.0)}}
    with pytest.raises(determinism.NotDeterministic) as caught:
        determinism.check(step, state, None, fingerprints=checksums.fingerprints)
    assert f"2 of 3 arrays differ, first w/moved, {said}" in str(caught.value)


def test_what_differs_once_is_told():
    results = iter([1.0, 2.0, 1.0, 1.0])

    def step(state, batch):
        return {"w": state["w"] + next(results)}, ()

    with pytest.raises(determinism.NotDeterministic, match="first w, in some tries, not in all"):
        determinism.check(step, {"w": jnp.ones(2)}, None, fingerprints=checksums.fingerprints)


def test_a_host_copy_is_no_view():
    array = jnp.arange(1024.0)
    copy = determinism.to_host(array)
    back = determinism.from_host(copy)
    doubled = jax.jit(lambda x: x * 2, donate_argnums=0)(back)
    jax.jit(lambda x: x * 3, donate_argnums=0)(array).block_until_ready()
    doubled.block_until_ready()
    assert determinism.from_host(copy).tolist() == list(range(1024))

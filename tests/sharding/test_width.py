"""Widths that do not divide over the replicas that split them: other dimensions are split too."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from support import compare, packed, runs

from llmx import sharding
from llmx.checkpoint import checkpointer
from llmx.config import ConfigError

TOLERANCE = 1e-5  # as in tests/parity
VOCAB = 257
SIZES = dict(vocab_size=VOCAB, width=12, num_layers=2, num_heads=8, head_dim=8, mlp_dim=32)
FAMILIES = {
    "llama3": dict(num_kv_heads=2),
    "gpt_oss": dict(num_kv_heads=2, window=5, num_experts=2, expert_dim=16),
    # Queries and keys are normalised over all heads, which `tensor` splits.
    "olmoe": dict(num_kv_heads=2, num_experts=2, experts_per_token=2, expert_dim=16),
}
ZERO3 = sharding.LAYOUTS["zero3"].parameters


@pytest.mark.parametrize(
    ("axes", "shape", "mesh", "wanted"),
    [
        # 2,880 is 64 times 45: of 128 devices, 64 split the width, and two something else.
        (("embed", "mlp"), (2880, 2880), dict(data=2, fsdp=64), ("fsdp", "data")),
        (("mlp", "embed"), (2880, 2880), dict(data=2, fsdp=64), ("data", "fsdp")),
        (("embed", "heads", "head_dim"), (2880, 64, 64), dict(data=64, fsdp=2),
         ("data", "fsdp", None)),
        (("embed", "mlp"), (12, 32), dict(fsdp=8, tensor=2), (None, ("tensor", "fsdp"))),
        # Two dimensions beside the width.
        (("embed", "kv_heads", "head_dim"), (10, 2, 4), dict(data=2, fsdp=4),
         ("data", None, "fsdp")),
        (("embed", "kv_heads", "head_dim"), (9, 2, 4), dict(data=2, fsdp=4),
         (None, "data", "fsdp")),
        # Tables are split over fewer devices.
        (("vocab", "embed"), (201088, 2880), dict(data=2, fsdp=64), (None, "fsdp")),
        (("embed", "mlp"), (16, 32), dict(data=2, fsdp=4), (("data", "fsdp"), None)),
    ],
    ids=str,
)  # fmt: skip
def test_other_dimensions_are_split(axes, shape, mesh, wanted):
    sizes = dataclasses.make_dataclass("Mesh", ["shape"])(mesh)
    assert sharding.spec(axes, ZERO3, sizes, shape=shape) == PartitionSpec(*wanted)


@functools.cache
def batches() -> list[dict]:
    return packed.batches(2, rows=16, length=16, vocab=VOCAB)


def recipe_of(family: str, mesh: dict, layout: str, **keys):
    config = runs.make_config(
        family, model=SIZES | FAMILIES[family], mesh=mesh, batch__size=16,
        batch__sequence_length=16, sharding__layout=layout, **runs.PARITY_OPTIMIZER | keys,
    )  # fmt: skip
    return runs.make_recipe(config)


@functools.cache
def of_one_device(family: str):
    recipe = recipe_of(family, {}, "ddp")
    state = recipe.init(0)
    return jax.device_get(state), runs.train(recipe, batches(), state)


@pytest.mark.parametrize(
    ("family", "layout", "mesh", "keys"),
    [
        ("llama3", "zero1", dict(fsdp=8), {}),
        ("llama3", "zero3", dict(fsdp=8), dict(remat="full")),
        pytest.param("llama3", "zero2", dict(data=2, fsdp=4), dict(batch__accumulation=2),
                     marks=pytest.mark.slow),
        pytest.param("gpt_oss", "zero3", dict(data=2, fsdp=2, sequence=2), {},
                     marks=pytest.mark.slow),
        ("gpt_oss", "hsdp", dict(fsdp=8), {}),
        ("olmoe", "zero3", dict(fsdp=4, tensor=2), {}),
    ],
    ids=str,
)  # fmt: skip
def test_training_is_that_of_one_device(family, layout, mesh, keys):
    initial, wanted = of_one_device(family)
    recipe = recipe_of(family, mesh, layout, **keys)
    found = runs.train(recipe, batches(), runs.put_state(recipe, initial))
    compare.assert_trained_alike(found, wanted, TOLERANCE)


def test_nothing_is_whole_but_tables_and_what_is_small():
    """Of the moments; a device has as many numbers as if the width had divided."""
    recipe = recipe_of("llama3", dict(data=2, fsdp=4), "zero1")
    mesh = dict(recipe.mesh.shape)
    for path, leaf in jax.tree_util.tree_leaves_with_path(recipe.loss.updates["blocks"]["mlp"]):
        ways = np.prod([mesh[axis] for axis in sharding.used_axes(leaf.spec)])
        assert ways == 8, (path, leaf.spec)


def test_replicas_that_meet_now_and_then():
    """Local SGD of two replicas, each split over four devices, is that of two devices."""
    keys = dict(sync__strategy="local_sgd", sync__every=2)

    def trained(mesh: dict, state=None):
        recipe = recipe_of("llama3", dict(data=2) | mesh, "zero3", model__width=10, **keys)
        state = recipe.init(0) if state is None else runs.put_state(recipe, state)
        programs, before = runs.make_programs(recipe), jax.device_get(state)
        with jax.set_mesh(recipe.mesh):
            for number, batch in enumerate(batches()):
                state, _ = programs(number, state, runs.put_batch(recipe, batch))
        return before, jax.device_get(state.params)

    initial, wanted = trained({})
    _, found = trained(dict(fsdp=4), initial)
    compare.assert_close(found, wanted, TOLERANCE)


def test_checkpoints_move_between_meshes_that_split_other_dimensions(tmp_path):
    """Bit for bit, from a mesh where the width does not divide to others and back."""
    source = recipe_of("llama3", dict(fsdp=8), "zero3")
    saved = source.init(0)
    wanted = jax.device_get(saved)
    for step, (mesh, layout) in enumerate(
        [(dict(data=2, fsdp=4), "zero1"), (dict(fsdp=2, tensor=2), "zero3"), (dict(fsdp=8), "hsdp")]
    ):
        target = recipe_of("llama3", mesh, layout)
        keep = checkpointer.CheckpointConfig(keep_last=100)
        with checkpointer.Checkpointer(str(tmp_path / str(step)), keep, log=print) as checkpoints:
            checkpoints.save(1, saved, meta={}, order=source.order)
            saved = checkpoints.restore(target.abstract, order=target.order).state
        source = target
        compare.assert_same(jax.device_get(saved), wanted)


def test_what_nothing_divides_is_refused():
    keys = dict(model__num_heads=3, model__num_kv_heads=3, model__head_dim=6)
    with pytest.raises(ConfigError, match=r"width=12 does not divide over 8 = fsdp8.*attention/"
                       r".*two axes, as mesh.data and mesh.fsdp"):  # fmt: skip
        recipe_of("llama3", dict(fsdp=8), "zero3", **keys)
    with pytest.raises(ConfigError, match=r"width=12 does not divide.*products.gather='fp8'"):
        recipe_of("llama3", dict(fsdp=8), "zero3", products__format="fp8", products__gather="fp8",
                  precision="bf16")  # fmt: skip

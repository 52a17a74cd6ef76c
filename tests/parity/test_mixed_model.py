"""Layers without rotation, heads rotated in part, biases of queries, keys and values, norms behind
alone: on every kind of mesh as on one device, of packed documents."""

import functools

import jax
import pytest
from support import compare, parity_grid, runs
from support.mixed_model import MIXED

TOLERANCE = 1e-5  # as in test_parity.py
MODEL = MIXED | dict(num_layers=3)
MESHES = {
    "fsdp2-tensor2": dict(fsdp=2, tensor=2),
    "sequence4-tensor2": dict(sequence=4, tensor=2, remat="names"),
    # Stages whose layers are of other kinds; weight gradients are left for later.
    "stage2-fsdp2": dict(stage=2, fsdp=2, schedule="zb_h1", accumulation=4, remat="full"),
    "ddp-data2": dict(data=2, layout="ddp", accumulation=2, gather="layer", remat="sqrt"),
}


@functools.cache
def reference():
    """The initial state, and what one device makes of it in three steps."""
    row = parity_grid.PLAIN
    recipe = parity_grid.make_recipe(row, model=MODEL, **parity_grid.REFERENCE)
    state = recipe.init(0)
    return jax.device_get(state), runs.train(recipe, parity_grid.batches(), state)


@pytest.mark.parametrize("mesh", MESHES)
def test_trains_as_on_one_device(mesh):
    row = parity_grid.PLAIN | MESHES[mesh]
    initial, wanted = reference()
    recipe = parity_grid.make_recipe(row, model=MODEL)
    state = recipe.init(0) if row["stage"] > 1 else runs.put_state(recipe, initial)
    compare.assert_trained_alike(
        runs.train(recipe, parity_grid.batches(), state), wanted, TOLERANCE
    )

"""The parity contract of Adafactor, which takes means over rows and columns: a mesh trains as one
device does, whatever splits matrices, layers and experts, and stages with empty slots too."""

import functools

import pytest
from support import compare, packed, runs

TOLERANCE = 1e-5  # relative: as in test_parity.py
STEPS, ROWS, LENGTH, VOCAB = 3, 8, 16, 257
# Some of its matrices have 128 rows and columns, and the heads of one have them together.
MODEL = dict(
    vocab_size=VOCAB, width=128, num_heads=4, num_kv_heads=2, head_dim=40, num_layers=3,
    num_experts=4, experts_per_token=2, expert_dim=128,
)  # fmt: skip
MESHES = {
    "experts": dict(mesh=dict(fsdp=2, expert=2, tensor=2)),
    "unequal stages": dict(
        mesh=dict(stage=2, fsdp=2), pipeline__layers=(1, 2), batch__accumulation=2
    ),
}


@functools.cache
def trained(mesh: str):
    keys = runs.PARITY_OPTIMIZER | dict(batch__size=ROWS, batch__sequence_length=LENGTH)
    del keys["optimizer__eps"]  # of optimizers that divide by it
    config = runs.make_config(
        "mixtral", model=MODEL, optimizer__name="adafactor", experts__balance="none", **keys,
        **(MESHES[mesh] if mesh else {}),
    )  # fmt: skip
    batches = packed.batches(STEPS, rows=ROWS, length=LENGTH, vocab=VOCAB)
    return runs.train(runs.make_recipe(config), batches)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_a_mesh_trains_as_one_device(mesh):
    compare.assert_trained_alike(trained(mesh), trained(""), TOLERANCE)

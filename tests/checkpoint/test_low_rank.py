"""Runs of factors, of layers that are gone through several times and of tensor-train tables go on
on other meshes with the numbers that they were saved with; as another model they are refused."""

import jax
import numpy as np
import pytest
from support import resumes

from llmx.sharding import trees

KEYS = dict(
    model__vocab_size=261, model__ranks=("attention=4", "mlp=8"), model__repeats=2,
    model__embedding_rank=4,
)  # fmt: skip
STAGES = dict(mesh__stage=2, mesh__fsdp=2, batch__accumulation=2)


def numbers(recipe, tree):
    tree = dict(jax.device_get(tree))
    return trees.named(tree | {"blocks": jax.device_get(recipe.order.inverse(tree["blocks"]))})


@pytest.mark.parametrize("elsewhere", [dict(mesh__fsdp=2, mesh__tensor=2), STAGES],
                         ids=["fsdp-tensor", "stages"])  # fmt: skip
def test_it_goes_on_on_another_mesh(tmp_path, elsewhere):
    saved = resumes.save(tmp_path, 3, 1, **KEYS)
    recipe, state, step, _ = resumes.resumed(tmp_path, 1, **KEYS, **elsewhere)
    assert step == 3
    wanted = trees.named(jax.device_get(saved.params))
    got = numbers(recipe, state.params)
    assert {"blocks/mlp/up/kernel/down", "embedding/core3"} < wanted.keys() == got.keys()
    for name, leaf in wanted.items():
        np.testing.assert_array_equal(got[name], leaf, err_msg=name)
    down = trees.named(state.params)["blocks/attention/out/kernel/down"]
    split = down.sharding.shard_shape(down.shape)
    # Over replicas along the rank, since it has no width; over `tensor` by heads.
    layers, heads, size, rank = down.shape
    stages, tensor = (elsewhere.get(f"mesh__{axis}", 1) for axis in ("stage", "tensor"))
    assert split == (layers // stages, heads // tensor, size, rank // 2)


@pytest.mark.parametrize(("other", "said"), [
    (dict(model__repeats=3), "model.repeats: saved 2, given 3"),
    (dict(model__ranks=("attention=4", "mlp=6")), "model.ranks: saved"),
    (dict(model__embedding_cores=2), "model.embedding_cores: saved 3, given 2"),
])  # fmt: skip
def test_as_another_model_it_is_refused(tmp_path, other, said):
    resumes.save(tmp_path, 3, 1, **KEYS)
    with pytest.raises(ValueError, match=said):
        resumes.resumed(tmp_path, 1, **KEYS | other)

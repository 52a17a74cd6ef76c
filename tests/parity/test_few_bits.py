"""The parity contract where numbers are kept in few bits: a mesh trains as one device does with the
same format.

Random bits depend on step, name and index only, so that gradients which differ by fp32's rounding
are rounded alike, but for the few numbers that lie next to where up turns into down.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import compare, packed, runs

from llmx.model import precision

TOLERANCE = 1e-5  # relative: losses and gradient norms of three steps, as in test_parity.py
# A moment that is rounded the other way is off by 2^-8 or 1/8, and moves its parameter by as much
# of the learning rate, 1e-3; seen: 2e-6 and 4e-5 of a leaf's norm.
OF_PARAMETERS = {"bf16": 2e-5, "int8": 2e-4}
# Of bf16 parameters this share may be a unit apart (2^-8); gradients differ by about 1e-7.
APART = 1e-3

STEPS, ROWS, LENGTH, VOCAB = 3, 16, 16, 257
MODEL = dict(
    vocab_size=VOCAB, width=64, mlp_dim=128, num_heads=4, num_kv_heads=4, head_dim=16, num_layers=2
)
# Each mesh axis, layout and way to take a gradient at least once.
MESHES = {
    "fsdp8": dict(mesh=dict(fsdp=8)),
    "zero1": dict(mesh=dict(data=2, fsdp=2), sharding__layout="zero1", batch__accumulation=2),
    "stages": dict(mesh=dict(stage=2, fsdp=2), pipeline__schedule="1f1b", batch__accumulation=4),
    "hsdp": dict(mesh=dict(data=2, fsdp=2, tensor=2), sharding__layout="hsdp", remat="full"),
    "zero2-sequence": dict(mesh=dict(fsdp=2, sequence=2, expert=2), sharding__layout="zero2"),
    "ddp-tensor": dict(mesh=dict(data=2, tensor=4), sharding__layout="ddp"),
}
FORMATS = {
    "bf16": dict(optimizer__moments="bf16"),
    "int8": dict(optimizer__moments="int8"),
    "bf16_parameters": dict(precision="bf16_parameters"),
    "bf16_parameters-bf16": dict(precision="bf16_parameters", optimizer__moments="bf16"),
    "bf16_parameters-int8": dict(precision="bf16_parameters", optimizer__moments="int8"),
}
QUICK = {
    ("fsdp8", "bf16_parameters"), ("stages", "int8"), ("zero1", "bf16_parameters-int8"),
    ("hsdp", "bf16"),
}  # fmt: skip
# Every mesh with moments in bf16, with moments in int8 and with parameters in bf16: in one of these
# pairs of formats, in turn. Parameters in bf16 beside moments in fp32 are in one quick row.
PAIRS = (("int8", "bf16_parameters-bf16"), ("bf16", "bf16_parameters-int8"))
COVER = [(mesh, kept) for number, mesh in enumerate(MESHES) for kept in PAIRS[number % 2]]
COVER.append(("fsdp8", "bf16_parameters"))


@pytest.fixture(autouse=True)
def _exact_products(monkeypatch):
    """Parameters in bf16, all else in fp32: what differs between meshes is fp32's rounding."""
    fp32, bf16 = jnp.dtype("float32"), jnp.dtype("bfloat16")
    policy = precision.Policy(bf16, fp32, fp32)
    monkeypatch.setitem(precision.POLICIES, "bf16_parameters", policy)


@functools.cache
def batches():
    return packed.batches(STEPS, rows=ROWS, length=LENGTH, vocab=VOCAB)


@functools.cache
def trained(mesh: str, kept: str):
    values = runs.PARITY_OPTIMIZER | dict(batch__size=ROWS, batch__sequence_length=LENGTH)
    config = runs.make_config(
        "llama3", model=MODEL, **values, **(MESHES[mesh] if mesh else {}), **FORMATS[kept]
    )
    recipe = runs.make_recipe(config)
    return runs.train(recipe, batches())


@pytest.mark.parametrize(
    ("mesh", "kept"),
    [
        pytest.param(mesh, kept, marks=() if (mesh, kept) in QUICK else pytest.mark.slow)
        for mesh, kept in COVER
    ],
)
def test_a_mesh_trains_as_one_device(mesh, kept):
    got, wanted = trained(mesh, kept), trained("", kept)
    np.testing.assert_allclose(got.losses, wanted.losses, rtol=TOLERANCE)
    np.testing.assert_allclose(got.norms, wanted.norms, rtol=TOLERANCE)
    if not kept.startswith("bf16_parameters"):
        compare.assert_close(got.params, wanted.params, OF_PARAMETERS[kept])
        return
    leaves = zip(jax.tree.leaves(got.params), jax.tree.leaves(wanted.params), strict=True)
    different = total = 0
    for found, leaf in leaves:
        assert found.dtype == leaf.dtype == jnp.bfloat16
        a, b = np.asarray(found, "f8"), np.asarray(leaf, "f8")
        different, total = different + (a != b).sum(), total + a.size
        assert (np.abs(a - b) <= 2.0**-6 * np.maximum(np.abs(b), 1e-3)).all()
    assert different <= APART * total


def test_pure_bf16_is_pure():
    """6 bytes of state a parameter: itself and two moments."""
    config = runs.make_config("llama3", model=MODEL, precision="pure_bf16")
    recipe = runs.make_recipe(config)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(recipe.abstract.params)} == {"bfloat16"}
    state = recipe.abstract.opt_state
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(state)} == {"bfloat16", "int32"}
    size = lambda tree: sum(leaf.size for leaf in jax.tree.leaves(tree) if leaf.ndim)  # noqa: E731
    assert size(state) == 2 * size(recipe.abstract.params)


def test_the_average_of_bf16_parameters_is_in_fp32():
    """It moves by a hundredth of what bf16 can tell."""
    values = runs.PARITY_OPTIMIZER | dict(batch__size=ROWS, batch__sequence_length=LENGTH)
    config = runs.make_config(
        "llama3", model=MODEL, precision="pure_bf16", optimizer__ema_decay=0.99, **values
    )
    recipe = runs.make_recipe(config)
    step = runs.make_train_step(recipe)
    with jax.set_mesh(recipe.mesh):
        state = recipe.init(0)
        wanted = jax.tree.map(lambda leaf: np.asarray(leaf, "f8"), state.params)
        for batch in batches():
            state, _ = step(state, runs.put_batch(recipe, batch))
            new = jax.tree.map(lambda leaf: np.asarray(leaf, "f8"), state.params)
            wanted = jax.tree.map(lambda a, p: 0.99 * a + 0.01 * p, wanted, new)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(state.ema)} == {"float32"}
    compare.assert_close(state.ema, wanted, 1e-6)

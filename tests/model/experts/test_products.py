"""The kernels of grouped products, interpreted, and products in parts of an expert's width: equal
to those block by block, and to each token through its experts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import compare

from llmx.model.experts import grouped, kernels, products

from .test_experts import TOLERANCE, computed, wanted

ON_CPU = dict(device_kind="cpu", rows=1.0)


def in_blocks(counts, columns, seed=0):
    """Blocks of experts with so many rows, and rows in them."""
    rng = np.random.default_rng(seed)
    expert = rng.permutation(np.repeat(np.arange(len(counts)), counts))
    of = grouped.blocks(jnp.asarray(expert, jnp.int32), len(counts))
    rows = [rng.normal(size=(len(expert), n)).astype(np.float32) for n in columns]
    taken = [jnp.asarray(r).at[of.row_of_slot_R].get(mode="fill", fill_value=0) for r in rows]
    return expert, of, rows, taken


# Empty experts at the beginning, between and at the end, one expert, one that has all.
COUNTS = [(0, 40, 0, 3, 0), (7,), (0, 100), (16, 32, 48)]


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_product_of_blocks(counts, transposed):
    """Also columns that do not divide into tiles, and onto what is there already."""
    expert, of, (x, onto), (x_RK, onto_RN) = in_blocks(counts, (24, 200))
    weights = np.random.default_rng(1).normal(size=(len(counts), 24, 200)).astype(np.float32)
    given = jnp.asarray(weights.swapaxes(1, 2) if transposed else weights)
    compute = functools.partial(
        kernels.product, x_RK, given, of, dtype=jnp.float32, transposed=transposed, **ON_CPU
    )
    want = np.einsum("rk,rkn->rn", x, weights[expert])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "MOST_COLUMNS", 128)  # tiles of 128 and 72 columns
        np.testing.assert_allclose(compute()[of.slot_of_row], want, rtol=1e-5, atol=1e-5)
        found = compute(onto=onto_RN)
    np.testing.assert_allclose(found[of.slot_of_row], want + onto, rtol=1e-5, atol=1e-5)
    empty = np.asarray(of.row_of_slot_R) == len(expert)
    assert not np.asarray(found)[empty].any()


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_sums_over_the_rows_of_an_expert(counts):
    """Zero for an expert without rows."""
    expert, of, (x, y), (x_RK, y_RN) = in_blocks(counts, (136, 24))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "MOST_COLUMNS", 128)
        found = kernels.sums(x_RK, y_RN, of, num_experts=len(counts), dtype=jnp.float32, **ON_CPU)
    for number in range(len(counts)):
        mine = expert == number
        np.testing.assert_allclose(found[number], x[mine].T @ y[mine], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    "mesh, routing, by_kernels, biases",
    [({}, "unbalanced", True, True), (dict(expert=3, fsdp=2), "random", False, True)],
    ids=str,
)  # fmt: skip
def test_each_token_through_its_experts(mesh, routing, by_kernels, biases, monkeypatch):
    """Value and gradients, by the kernels and in parts of the width."""
    monkeypatch.setattr(products, "has_kernels", lambda device_kind: by_kernels)
    cut = lambda width: (slice(0, 2), slice(2, 4), slice(4, width))  # noqa: E731
    monkeypatch.setattr(products, "parts", cut)
    jax.clear_caches()
    found = computed(mesh, routing, buffer=0.7, biases=biases)
    compare.assert_close(found, wanted(routing, biases=biases)[0], TOLERANCE)


def test_parts_of_the_width():
    """In whole lanes and equal, of 2048 columns or more; else one part."""
    widths = {14336: 4, 2048: 1, 4096: 2, 2880: 1, 6144: 3, 12: 1}
    for width, number in widths.items():
        of = products.parts(width)
        assert len(of) == number
        assert [i for part in of for i in range(width)[part]] == list(range(width))

"""Factors of low rank are the best of their kind: by numpy's eigenvalues, on inputs too."""

import numpy as np
import pytest

from llmx.compress import low_rank, tensor_train_stage
from llmx.model import families, tensor_train

RANDOM = np.random.default_rng(0)
WEIGHT = RANDOM.normal(size=(12, 20))
# Inputs that are far from white: some directions hardly occur.
INPUTS = (
    RANDOM.normal(size=(300, 12)) @ np.diag(2.0 ** -np.arange(12)) @ RANDOM.normal(size=(12, 12))
)
GRAM = INPUTS.T @ INPUTS


def error(down, up, inputs=None):
    """Of y = x W, over the inputs; of the weight itself without any."""
    change = WEIGHT - down @ up
    return np.sum(np.square(change if inputs is None else inputs @ change))


@pytest.mark.parametrize("rank", [1, 5, 12])
def test_plain_factors_are_nearest_to_the_weight(rank):
    """What is left is the sum of the smallest eigenvalues of W W^T (Eckart and Young)."""
    down, up = low_rank.factors(low_rank.spectrum(WEIGHT), rank)
    assert (down.shape, up.shape) == ((12, rank), (rank, 20))
    left = np.sort(np.linalg.eigvalsh(WEIGHT @ WEIGHT.T))[: 12 - rank].sum()
    np.testing.assert_allclose(error(down, up), left, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(down.T @ down, up @ up.T, rtol=1e-9, atol=1e-9)  # equal halves


@pytest.mark.parametrize("rank", [1, 5, 11])
def test_whitened_factors_are_the_best_for_the_inputs(rank):
    """The least squares of all matrices of this rank: eigenvalues of (X W)^T (X W)."""
    side = low_rank.Whitening.of_gram(GRAM)
    found = low_rank.spectrum(WEIGHT, side)
    down, up = low_rank.factors(found, rank)
    outputs = INPUTS @ WEIGHT
    least = np.sort(np.linalg.eigvalsh(outputs.T @ outputs))[: 20 - rank].sum()
    scale = np.sum(np.square(outputs))
    got = error(down, up, INPUTS)
    assert least - 1e-9 * scale <= got < least + 1e-5 * scale  # damping is all that is between
    plain = low_rank.factors(low_rank.spectrum(WEIGHT), rank)
    assert got < 0.7 * error(*plain, INPUTS)
    assert error(*plain) < error(down, up)


def test_scaled_factors_are_between_for_inputs_of_different_sizes():
    inputs = RANDOM.normal(size=(300, 12)) * 4.0 ** -np.arange(12)
    scaled = low_rank.Whitening.of_magnitudes(np.abs(inputs).mean(0))
    best = low_rank.Whitening.of_gram(inputs.T @ inputs)
    errors = [
        error(*low_rank.factors(low_rank.spectrum(WEIGHT, side), 4), inputs)
        for side in (best, scaled, None)
    ]
    assert errors[0] < errors[1] < errors[2]


def test_inputs_that_never_were_do_no_harm():
    gram = GRAM.copy()
    gram[3], gram[:, 3] = 0, 0
    gram[3, 3] = -1e-4 * gram.max()  # as sums in fp32 may leave it
    down, up = low_rank.factors(
        low_rank.spectrum(WEIGHT, low_rank.Whitening.of_gram(gram)), 12
    )  # fmt: skip
    np.testing.assert_allclose(down @ up, WEIGHT, rtol=1e-5, atol=1e-5)


def test_ranks_by_energy_share_and_number():
    values = np.array([3.0, 2.0, 1.0, 0.0])  # squares 9, 4, 1, 0: shares 9/14, 13/14, 1
    got = [low_rank.rank_of_energy(values, share) for share in (0.1, 9 / 14, 0.65, 13 / 14, 0.95)]
    assert got == [1, 1, 2, 2, 3]
    assert low_rank.rank_of_energy(values, 1.0) == 3
    assert low_rank.rank_of_share((100, 300), 0.5) == 37  # 37 * 400 <= 15000 < 38 * 400
    assert low_rank.rank_of_share((4, 4), 0.1) == 1
    assert low_rank.saves((100, 300), 74) and not low_rank.saves((100, 300), 75)
    spectra = [low_rank.Spectrum(None, np.array(v), None) for v in ([3.0, 2, 1], [1.0, 1, 1])]
    by_energy = low_rank.rank_of((3, 3), spectra, rank=0, share=0.0, energy=0.6)
    assert by_energy == 2  # of the layer that needs most
    assert low_rank.rank_of((3, 3), spectra, rank=7, share=0.0, energy=0.0) == 3


def test_leaves_of_stacked_layers():
    """[l, heads, size, D] contracts two dimensions."""
    leaf = RANDOM.normal(size=(2, 3, 4, 10))
    spectra = [low_rank.spectrum(layer.reshape(12, 10)) for layer in leaf]
    found = low_rank.factored_leaves(leaf, 2, spectra, 10)
    assert found["down"].shape == (2, 3, 4, 10) and found["up"].shape == (2, 10, 10)
    made = np.einsum("lnhr,lrd->lnhd", found["down"], found["up"])
    np.testing.assert_allclose(made, leaf, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cores", [2, 3])
def test_trains_of_full_rank_are_the_table_and_others_near_it(cores):
    model = families.preset(
        "llama3", width=12, vocab_size=29, vocab_multiple=1, embedding_rank=400,
        embedding_cores=cores,
    )  # fmt: skip
    table = RANDOM.normal(size=(29, 12))
    # Of low rank in the first cut, that between the digits of rows and columns.
    shapes = list(tensor_train.shapes(model).values())

    def made(shapes):
        whole = np.float64(tensor_train_stage.cores_of_table(table, shapes)[0])
        for core in tensor_train_stage.cores_of_table(table, shapes)[1:]:
            whole = np.einsum("avdr,rwes->avwdes", whole, np.float64(core))
            _, v, w, d, e, s = whole.shape
            whole = whole.reshape(1, v * w, d * e, s)
        return whole[0, :29, :, 0]

    np.testing.assert_allclose(made(shapes), table, rtol=1e-4, atol=1e-5)
    smaller = [(min(a, 6), v, d, min(s, 6)) for a, v, d, s in shapes]
    fewer = [(min(a, 2), v, d, min(s, 2)) for a, v, d, s in shapes]
    errors = [np.sum(np.square(made(each) - table)) for each in (smaller, fewer)]
    assert errors[0] < errors[1] < np.sum(np.square(table))

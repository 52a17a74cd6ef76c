"""Layers keep what they are in every permutation, and stacked arrays are told from others."""

import itertools

import numpy as np
import pytest

from llmx.pipeline import stages
from llmx.pipeline.permutation import EMPTY, IDENTITY, LayerPermutation

LAYERS = 7
PERMUTATIONS = [
    IDENTITY,
    stages.cut(LAYERS, (0, 1)).permutation,  # the last chunk is shorter
    stages.cut(LAYERS, (0, 1, 1, 0)).permutation,
    stages.cut(LAYERS, (0, 1, 0, 1), (1, 1, 1, 4)).permutation,
]
STACKED = {"w": np.arange(1.0, 1 + 2 * LAYERS).reshape(LAYERS, 2), "b": np.arange(1, 1 + LAYERS)}


def test_slots_are_by_stage_and_chunk():
    assert stages.cut(4, (0, 1)).permutation == IDENTITY
    assert stages.cut(4, (0, 1, 1, 0)).permutation.slots == (0, 3, 1, 2)
    assert stages.cut(3, (0, 1)).permutation.slots == (0, 1, 2, EMPTY)


@pytest.mark.parametrize(("old", "new"), list(itertools.product(PERMUTATIONS, repeat=2)))
def test_layers_are_the_same_in_every_permutation(old, new):
    staged = old.apply(STACKED)
    moved = old.convert(staged, new)
    for name, array in new.apply(STACKED).items():
        np.testing.assert_array_equal(moved[name], array)
        assert old.shape(staged[name].shape, new) == array.shape
        assert new.plain_shape(f"blocks/{name}", array.shape) == list(STACKED[name].shape)
    for name, array in new.inverse(moved).items():
        np.testing.assert_array_equal(array, STACKED[name])


def test_empty_slots_are_zero():
    (staged,) = LayerPermutation((2, EMPTY, 0, 1)).apply([np.array([1, 2, 3])])
    assert staged.tolist() == [3, 0, 1, 2]


@pytest.mark.parametrize(
    ("name", "shape", "moves"),
    [
        ("params/blocks/mlp", (8, 3), True),
        ("params/embedding", (8, 3), False),  # eight rows, but not of layers
        ("opt_state/blocks/row", (1,), False),  # a factored moment without a row per layer
        ("opt_state/blocks/count", (), False),
        ("sync/blocks/error", (8, 3), False),  # the strategy's own
    ],
)
def test_what_is_stacked_over_layers(name, shape, moves):
    permutation = stages.cut(LAYERS, (0, 1)).permutation
    assert permutation.moves(name, shape, IDENTITY) == moves
    assert not permutation.moves(name, shape, permutation)

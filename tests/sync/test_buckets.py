"""Numbers as bytes, and which tensors share a message."""

import jax.numpy as jnp
import numpy as np
import pytest

from llmx.sync import buckets


def test_eight_signs_to_a_byte_and_back():
    positive = np.random.default_rng(0).random((3, 5, 16)) < 0.5
    packed = buckets.pack(jnp.asarray(positive))
    assert packed.shape == (3, 5, 2) and packed.dtype == jnp.uint8
    np.testing.assert_array_equal(packed, np.packbits(positive, axis=-1, bitorder="little"))
    np.testing.assert_array_equal(buckets.unpack(packed), np.where(positive, 1, -1))


@pytest.mark.parametrize(
    "sizes, limit, wanted",
    [
        ([], 10, []),
        ([3, 3, 3], 10, [[0, 1, 2]]),
        ([3, 3, 3], 9, [[0, 1, 2]]),
        ([3, 3, 3], 8, [[0, 1], [2]]),
        ([4, 20, 4, 4], 8, [[0], [1], [2, 3]]),
        ([20, 20], 8, [[0], [1]]),
        ([1, 2, 3], 0, [[0], [1], [2]]),
    ],
)
def test_neighbours_share_a_bucket_up_to_its_limit(sizes, limit, wanted):
    assert buckets.fuse(sizes, limit) == wanted

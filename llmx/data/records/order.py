"""A pseudo-random permutation of the numbers below n, computed for any of them by itself.

A Feistel network over the smallest even number of bits that holds n, walked until the result is
below n (cycle walking; Black and Rogaway, CT-RSA 2002). Nothing of size n is kept, and many numbers
are permuted at once.
"""

import hashlib

import numpy as np

_ROUNDS = 6
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # of splitmix64


def permuted(numbers: np.ndarray, n: int, *, key: str) -> np.ndarray:
    """Where the permutation that `key` names puts each of these numbers, int64, below n."""
    assert n >= 1
    half = max(1, -(-(n - 1).bit_length() // 2))
    digest = hashlib.blake2b(key.encode(), digest_size=8 * _ROUNDS).digest()
    keys = np.frombuffer(digest, "<u8")
    found = np.asarray(numbers, np.int64).astype(np.uint64)
    outside = np.arange(found.size)
    while outside.size:
        found[outside] = _network(found[outside], half, keys)
        outside = outside[found[outside] >= np.uint64(n)]
    return found.astype(np.int64)


def _network(numbers: np.ndarray, half: int, keys: np.ndarray) -> np.ndarray:
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = numbers >> bits, numbers & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right, key) & mask)
    return left << bits | right


def _mixed(numbers: np.ndarray, key: np.uint64) -> np.ndarray:
    with np.errstate(over="ignore"):  # arithmetic modulo 2^64
        mixed = numbers + key
        for multiplier, shift in zip(_MULTIPLIERS, (30, 27), strict=True):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(multiplier)
    return mixed ^ (mixed >> np.uint64(31))

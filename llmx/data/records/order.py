"""A pseudo-random permutation of the numbers below n, computed for any of them by itself.

A Feistel network over the bits of n - 1, of two or more, walked until the result is
below n (cycle walking; Black and Rogaway, CT-RSA 2002). Nothing of size n is kept, and many numbers
are permuted at once.
"""

import hashlib

import numpy as np

_ROUNDS = 6  # even
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # of splitmix64


def permuted(numbers: np.ndarray, n: int, *, key: str) -> np.ndarray:
    """Where the permutation that `key` names puts each of these numbers, int64, below n."""
    assert n >= 1
    bits = max(2, (n - 1).bit_length())
    digest = hashlib.blake2b(key.encode(), digest_size=8 * _ROUNDS).digest()
    keys = np.frombuffer(digest, "<u8")
    found = np.asarray(numbers, np.int64).astype(np.uint64)
    outside = np.arange(found.size)
    while outside.size:
        found[outside] = _network(found[outside], bits, keys)
        outside = outside[found[outside] >= np.uint64(n)]
    return found.astype(np.int64)


def _network(numbers: np.ndarray, bits: int, keys: np.ndarray) -> np.ndarray:
    """The halves, which differ by a bit where `bits` is odd, change places in each of the even
    number of rounds."""
    low, high = np.uint64(bits // 2), np.uint64(bits - bits // 2)
    widths = (high, low)
    left, right = numbers >> low, numbers & _ones(low)
    for at, key in enumerate(keys):
        left, right = right, left ^ (_mixed(right, key) & _ones(widths[at % 2]))
    return left << low | right


def _ones(width: np.uint64) -> np.uint64:
    return (np.uint64(1) << width) - np.uint64(1)


def _mixed(numbers: np.ndarray, key: np.uint64) -> np.ndarray:
    with np.errstate(over="ignore"):  # arithmetic modulo 2^64
        mixed = numbers + key
        for multiplier, shift in zip(_MULTIPLIERS, (30, 27), strict=True):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(multiplier)
    return mixed ^ (mixed >> np.uint64(31))

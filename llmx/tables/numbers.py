"""Random numbers of a row that depend on its id alone: however tables are split, and whenever a row
is first made, it has the same numbers.

A counter-based hash of 32 bits (the finalizer of MurmurHash3, twice) of seed, table, id and column.
With jax.numpy or numpy, bit for bit the same.
"""

from typing import Any

import numpy as np

_GOLDEN = 0x9E3779B9


def mixed(x: Any, xp: Any) -> Any:
    """A hash of uint32, each bit of which depends on all bits of `x`."""
    for _ in range(2):
        x = (x ^ (x >> xp.uint32(16))) * xp.uint32(0x85EBCA6B)
        x = (x ^ (x >> xp.uint32(13))) * xp.uint32(0xC2B2AE35)
        x = x ^ (x >> xp.uint32(16))
    return x


def uniform(seed: Any, table: Any, ids_R: Any, columns_W: Any, xp: Any = np) -> Any:
    """Numbers in [-1, 1), fp32 [R, W], of rows and columns of a table (its number, or one of each
    row). `seed`: of 32 bits. Ids of 64 bits need NumPy; two of them may have the same numbers."""
    start = xp.asarray(seed, xp.uint32) + xp.asarray(table, xp.uint32)
    start = mixed(xp.atleast_1d(start), xp)
    ids_R = xp.asarray(ids_R)
    rows_R = mixed(ids_R.astype(xp.uint32) * xp.uint32(_GOLDEN) + start, xp)
    if ids_R.dtype.itemsize > 4:
        high_R = (ids_R >> ids_R.dtype.type(32)).astype(xp.uint32)
        rows_R = xp.where(high_R == 0, rows_R, mixed(rows_R ^ high_R * xp.uint32(_GOLDEN), xp))
    columns_W = xp.asarray(columns_W).astype(xp.uint32) + xp.uint32(1)
    bits_RW = mixed(rows_R[:, None] ^ (columns_W * xp.uint32(_GOLDEN))[None, :], xp)
    # 24 bits are what a number of fp32 holds.
    return (bits_RW >> xp.uint32(8)).astype(xp.float32) * xp.float32(2.0**-23) - xp.float32(1.0)

"""From the text of a category to a row of its feature's table, by hash.

The hash is FNV-1a of 64 bits (http://www.isthe.com/chongo/tech/comp/fnv) of the table's name and
the text, mixed by MurmurHash3's finalizer: a row depends on nothing else, so that files may be read
in parts and later ones get the rows of earlier ones. Different texts can get the same row.
"""

from typing import Any

import numpy as np

_OFFSET, _PRIME = 0xCBF29CE484222325, 0x100000001B3
_MASK = (1 << 64) - 1
MAX_BYTES = 256  # of a category's text


def rows_of(texts: Any, name: str, rows: int) -> np.ndarray:
    """The row of each text, int32 from 0 to rows - 1.

    Args:
      texts: array of numpy's bytes type, [n]; a NUL byte cannot be at a text's end.
      name: of the table, so that equal texts of two tables are independent.
    """
    texts = np.ascontiguousarray(texts)
    start = np.uint64(_fnv(name.encode() + b"\0"))
    hashes = np.full(len(texts), start, np.uint64)
    width = texts.dtype.itemsize
    if len(texts) and width:
        bytes_nw = texts.view(np.uint8).reshape(len(texts), width)
        lengths = np.char.str_len(texts)
        for at in range(width):
            mixed = (hashes ^ bytes_nw[:, at]) * np.uint64(_PRIME)
            hashes = np.where(at < lengths, mixed, hashes)
    return (_finish(hashes) % np.uint64(rows)).astype(np.int32)


def _fnv(text: bytes) -> int:
    value = _OFFSET
    for byte in text:
        value = (value ^ byte) * _PRIME & _MASK
    return value


def _finish(hashes: np.ndarray) -> np.ndarray:
    for multiplier in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        hashes = (hashes ^ (hashes >> np.uint64(33))) * np.uint64(multiplier)
    return hashes ^ (hashes >> np.uint64(33))

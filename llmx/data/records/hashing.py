"""From a category, a text or a whole number, to rows of its feature's table, by hash.

The hash is FNV-1a of 64 bits (http://www.isthe.com/chongo/tech/comp/fnv) of the table's name and
the text, mixed by MurmurHash3's finalizer: a row depends on nothing else, so that files may be read
in parts and later ones get the rows of earlier ones. Different texts can get the same row. With two
rows of each, by two hashes, they still differ in one of them (arXiv 1709.03933): both are the same
for one pair in rows^2.
"""

from typing import Any

import numpy as np

from llmx.data.records.schema import Feature

_OFFSET, _PRIME = 0xCBF29CE484222325, 0x100000001B3
_MASK, _GOLDEN = (1 << 64) - 1, 0x9E3779B97F4A7C15
MAX_BYTES = 256  # of a category's text


def of_texts(texts: Any, feature: Feature) -> np.ndarray:
    """The ids of texts, [n, hashes]."""
    return _ids(hashes_of(texts, feature.table_name), feature)


def of_numbers(values: np.ndarray, feature: Feature) -> np.ndarray:
    """The rows of whole numbers of 64 bits by two hashes, int32 [n, 2]."""
    start = np.uint64(_fnv(feature.table_name.encode() + b"\0"))
    return _ids(_finish(values.astype(np.uint64) ^ start), feature)


def _ids(hashes: np.ndarray, feature: Feature) -> np.ndarray:
    if not feature.rows:
        return (hashes >> np.uint64(1)).astype(np.int64)[:, None]  # 63 bits: ids are not negative
    found = [hashes]
    for _ in range(feature.hashes - 1):
        found.append(_finish(found[-1] + np.uint64(_GOLDEN)))
    return (np.stack(found, axis=1) % np.uint64(feature.rows)).astype(np.int32)


def hashes_of(texts: Any, name: str) -> np.ndarray:
    """A hash of each text, uint64.

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
    return _finish(hashes)


def _fnv(text: bytes) -> int:
    value = _OFFSET
    for byte in text:
        value = (value ^ byte) * _PRIME & _MASK
    return value


def _finish(hashes: np.ndarray) -> np.ndarray:
    for multiplier in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        hashes = (hashes ^ (hashes >> np.uint64(33))) * np.uint64(multiplier)
    return hashes ^ (hashes >> np.uint64(33))

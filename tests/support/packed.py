"""Batches for tests: packed documents of unequal lengths, with unequal weights."""

import numpy as np


def batches(num: int, *, rows: int, length: int, vocab: int) -> list[dict]:
    """Arrays [rows, length] of `num` batches, always the same."""
    random = np.random.default_rng(0)
    made = []
    for _ in range(num):
        tokens = random.integers(0, vocab, (rows, length + 1), dtype=np.int32)
        cut = random.integers(2, length - 2, (rows, 1))
        index = np.arange(length)[None]
        made.append({
            "tokens": tokens[:, :-1],
            "targets": tokens[:, 1:],
            "segment_ids": np.where(index < cut, 1, 2).astype(np.int32),
            "positions": np.where(index < cut, index, index - cut).astype(np.int32),
            "weights": (random.random((rows, length)) < random.random((rows, 1))).astype("f4"),
        })  # fmt: skip
    return made

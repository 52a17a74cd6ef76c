"""A sum of signs in NumPy: whole tensors as rows [L, R], no bytes, buckets, parts or devices."""

import numpy as np


def rows_of(array: np.ndarray, axes) -> np.ndarray:
    return array.reshape(array.shape[0] if axes[0] == "layers" else 1, -1)


def signs_of(x_LR: np.ndarray, live_LR: np.ndarray):
    """What is sent of rows, and what is left."""
    x_LR = np.where(live_LR, x_LR, np.float32(0))
    count = live_LR.sum(1).clip(1).astype("f4")
    scale_L = np.abs(x_LR).sum(1, dtype="f4") / count
    sent_LR = np.where(x_LR >= 0, scale_L[:, None], -scale_L[:, None])
    sent_LR = np.where(live_LR, sent_LR, np.float32(0))
    return sent_LR, x_LR - sent_LR


def exchanged(terms_n, errors_n, server, live, axes):
    """The sum, each replica's error, the servers' error: of one tensor."""
    shape, live_LR = terms_n.shape[1:], rows_of(live, axes)
    both = [
        signs_of(rows_of(x, axes) + rows_of(e, axes), live_LR)
        for x, e in zip(terms_n, errors_n, strict=True)
    ]
    total = np.sum([sent for sent, _ in both], axis=0, dtype="f4") + rows_of(server, axes)
    agreed, left = signs_of(total, live_LR)
    return agreed.reshape(shape), np.stack([e.reshape(shape) for _, e in both]), left.reshape(shape)

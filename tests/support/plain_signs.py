"""A sum of signs in NumPy: whole tensors as rows [L, R], no bytes, buckets, parts or devices."""

import numpy as np


def rows_of(array: np.ndarray, axes) -> np.ndarray:
    return array.reshape(array.shape[0] if axes[0] == "layers" else 1, -1)


def signs_of(x_LR: np.ndarray, live_LR: np.ndarray, scale: str):
    """What is sent of rows, and what is left."""
    count = live_LR.sum(1).clip(1).astype("f4")
    lives = np.where(live_LR, x_LR, np.float32(0))
    if scale == "rms":
        scale_L = np.sqrt(np.square(lives).sum(1, dtype="f4") / count)
    else:
        scale_L = np.abs(lives).sum(1, dtype="f4") / count
    sent_LR = np.where(x_LR >= 0, scale_L[:, None], -scale_L[:, None])
    sent_LR = np.where(live_LR, sent_LR, np.float32(0))
    return sent_LR, x_LR - sent_LR


def exchanged(terms_n, errors_n, server, live, axes, scale: str = "rms"):
    """The sum, each replica's error, the servers' error: of one tensor.

    Of what does not live the sum is 1 where a replica has a number.
    """
    shape, live_LR = terms_n.shape[1:], rows_of(live, axes)
    xs = [rows_of(x, axes) + rows_of(e, axes) for x, e in zip(terms_n, errors_n, strict=True)]
    both = [signs_of(x_LR, live_LR, scale) for x_LR in xs]
    total = np.sum([sent for sent, _ in both], axis=0, dtype="f4") + rows_of(server, axes)
    agreed, left = signs_of(np.where(live_LR, total, np.float32(0)), live_LR, scale)
    there = np.any([x_LR != 0 for x_LR in xs], axis=0)
    agreed = np.where(live_LR, agreed, there.astype("f4"))
    return agreed.reshape(shape), np.stack([e.reshape(shape) for _, e in both]), left.reshape(shape)

"""A sum of signs in NumPy: whole tensors as rows [L, R], no bytes, buckets, parts or devices."""

import numpy as np

# In units of a scale. A number so near to zero is nothing but rounding: of its sign, the last bits
# of a sum decide, and either is right.
MIDDLE = 1e-5


def rows_of(array: np.ndarray, axes) -> np.ndarray:
    return array.reshape(array.shape[0] if axes[0] == "layers" else 1, -1)


def signs_of(x_LR: np.ndarray, live_LR: np.ndarray, scale: str, seen_LR=None):
    """What is sent of rows, and what is left.

    `seen_LR`: what was left in the program that is compared. It says which sign that took.
    """
    count = live_LR.sum(1).clip(1).astype("f4")
    lives = np.where(live_LR, x_LR, np.float32(0))
    if scale == "rms":
        scale_L = np.sqrt(np.square(lives).sum(1, dtype="f4") / count)
    else:
        scale_L = np.abs(lives).sum(1, dtype="f4") / count
    up_LR = x_LR >= 0
    if seen_LR is not None:
        middle_LR = (x_LR != 0) & (np.abs(x_LR) < MIDDLE * scale_L[:, None])
        assert middle_LR.mean() < 1e-3
        up_LR = np.where(middle_LR, seen_LR < 0, up_LR)
    sent_LR = np.where(up_LR, scale_L[:, None], -scale_L[:, None])
    sent_LR = np.where(live_LR, sent_LR, np.float32(0))
    return sent_LR, x_LR - sent_LR


def exchanged(terms_n, errors_n, server, live, axes, scale: str = "rms", seen=None):
    """The sum, each replica's error, the servers' error: of one tensor.

    Of what does not live the sum is 1 where a replica has a number. `seen`: the errors and the
    servers' error after this exchange in the program that is compared (`MIDDLE`).
    """
    shape, live_LR = terms_n.shape[1:], rows_of(live, axes)
    xs = [rows_of(x, axes) + rows_of(e, axes) for x, e in zip(terms_n, errors_n, strict=True)]
    seen_n = [None] * len(xs) if seen is None else [rows_of(e, axes) for e in seen[0]]
    both = [signs_of(x, live_LR, scale, own) for x, own in zip(xs, seen_n, strict=True)]
    total = np.sum([sent for sent, _ in both], axis=0, dtype="f4") + rows_of(server, axes)
    seen_LR = None if seen is None else rows_of(seen[1], axes)
    agreed, left = signs_of(np.where(live_LR, total, np.float32(0)), live_LR, scale, seen_LR)
    there = np.any([x_LR != 0 for x_LR in xs], axis=0)
    agreed = np.where(live_LR, agreed, there.astype("f4"))
    return agreed.reshape(shape), np.stack([e.reshape(shape) for _, e in both]), left.reshape(shape)

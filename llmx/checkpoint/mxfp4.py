"""MXFP4 tensors of checkpoints, read as numbers: 4 bits each, and a scale of 8 for every 32.

A number is one of the 16 of E2M1, two in a byte with the first in its lower half; a scale is a
power of two (E8M0). Source: OCP Microscaling Formats (MX) 1.0, sections 5.2.1 and 5.4.
gpt-oss is published so: of a matrix [..., in, out] there are "_blocks" [..., out, in / 32, 16] and
"_scales" [..., out, in / 32], uint8.
"""

import numpy as np

BLOCKS, SCALES = "_blocks", "_scales"
BLOCK = 32  # numbers that share a scale
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.array([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], np.float32)
_BIAS = 127


def packed_shapes(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The two tensors in which a matrix [..., in, out] is stored.

    Raises ValueError if no whole number of blocks makes it.
    """
    *others, inward, outward = shape
    if inward % BLOCK:
        raise ValueError(
            f"{name} of shape {shape} has no whole number of blocks of {BLOCK}: it cannot be MXFP4"
        )
    scales = (*others, outward, inward // BLOCK)
    return {name + BLOCKS: (*scales, BLOCK // 2), name + SCALES: scales}


def dequantized(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """fp32 [..., in, out] of blocks and scales. Exact: each value fits bf16 too."""
    pairs = np.stack([_VALUES[blocks & 15], _VALUES[blocks >> 4]], axis=-1)
    values = pairs.reshape(*scales.shape, BLOCK)
    values = np.ldexp(values, scales.astype(np.int32)[..., None] - _BIAS)
    return values.reshape(*scales.shape[:-1], -1).swapaxes(-1, -2)

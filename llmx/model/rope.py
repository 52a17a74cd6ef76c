"""Rotary positions (arXiv 2104.09864), with the scalings of Llama 3, Gemma 3 and YaRN.

Letters: B batch, T positions, N heads, H numbers of a head, P pairs of those that are rotated.
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from llmx.model import families


def rope_frequencies(model: families.ModelConfig, kind: str) -> np.ndarray:
    """fp32 [P]: radians per position of each pair, in layers of this kind.

    `rope_scaling` stretches them: "llama3" keeps high frequencies, divides low ones by
    `rope_factor`, and blends between; "linear" divides all (arXiv 2306.15595); "yarn" blends by
    the number of a pair (arXiv 2309.00071). Local layers with their own base are not stretched.
    """
    local = kind == families.LOCAL and model.rope_theta_local
    theta = model.rope_theta_local if local else model.rope_theta
    size = model.rotated_dim
    frequencies = theta ** -(np.arange(0, size, 2, dtype=np.float64) / size)
    if not local and model.rope_scaling == "linear":
        frequencies = frequencies / model.rope_factor
    elif not local and model.rope_scaling == "llama3":
        turns = model.rope_old_context * frequencies / (2 * np.pi)
        keep = (turns - model.rope_low_freq) / (model.rope_high_freq - model.rope_low_freq)
        keep = np.clip(keep, 0, 1)
        frequencies = frequencies * (keep + (1 - keep) / model.rope_factor)
    elif not local and model.rope_scaling == "yarn":
        keep = 1 - _yarn_ramp(model, size, theta)
        frequencies = frequencies * (keep + (1 - keep) / model.rope_factor)
    return frequencies.astype(np.float32)


def _yarn_ramp(model: families.ModelConfig, size: int, theta: float) -> np.ndarray:
    """[P]: 0 for pairs that are not stretched, 1 for those that are fully."""
    # The pair that makes so many turns in the old context.
    pair = lambda turns: (  # noqa: E731
        size * math.log(model.rope_old_context / (turns * 2 * math.pi)) / (2 * math.log(theta))
    )
    low, high = pair(model.rope_beta_fast), pair(model.rope_beta_slow)
    if model.rope_truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    width = high - low or 0.001
    return np.clip((np.arange(size // 2) - low) / width, 0, 1)


def amplitude(model: families.ModelConfig, kind: str) -> float:
    """What yarn multiplies rotated queries and keys by, in layers of this kind; 1 = nothing.

    By the square of this scores grow; `score_scale` has what all numbers of a head are scaled by.
    """
    local = kind == families.LOCAL and model.rope_theta_local
    if local or model.rope_scaling != "yarn":
        return 1.0
    if model.rope_mscale and model.rope_mscale_all:
        both = (model.rope_mscale, model.rope_mscale_all)
        of, of_all = (families.yarn_scale(model.rope_factor, mscale) for mscale in both)
        return of / of_all
    return families.yarn_scale(model.rope_factor)


def rotation_of(positions_BT: Int[Array, "B T"], frequencies: np.ndarray, amplitude: float = 1.0):
    """cos and sin, each [B, T, 1, P], fp32, times `amplitude`."""
    angles_BT1P = positions_BT[:, :, None, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles_BT1P), jnp.sin(angles_BT1P)
    return (cos, sin) if amplitude == 1 else (cos * amplitude, sin * amplitude)


def rotated_numbers(rotation: tuple[Array, Array]) -> int:
    """Numbers of a head that a rotation turns."""
    return 2 * rotation[0].shape[-1]


def rotate(x_BTNH: Array, rotation: tuple[Array, Array], *, interleaved: bool = False) -> Array:
    """[B, T, N, H] with the pairs (i, i + P) of the first 2P numbers of each head rotated, in the
    dtype of x.

    `interleaved`: the pairs are (2i, 2i + 1), and lie at (i, i + P) of the result: scores of
    queries and keys do not depend on where.
    """
    size = rotated_numbers(rotation)
    if size < x_BTNH.shape[-1]:
        turned = rotate(x_BTNH[..., :size], rotation, interleaved=interleaved)
        return jnp.concatenate([turned, x_BTNH[..., size:]], axis=-1)
    (cos, sin), dtype = rotation, x_BTNH.dtype
    x_BTNH = x_BTNH.astype(jnp.float32)
    if interleaved:
        first, second = x_BTNH[..., ::2], x_BTNH[..., 1::2]
    else:
        first, second = jnp.split(x_BTNH, 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(dtype)

"""Weights rounded to a few bits: to the nearest code, or one input after another (GPTQ).

Functions of matrices [I, O] on one device, in fp32: `packed.PackedConfig` says the bits, and how
many inputs of an output share a scale.

Letters: I inputs, O outputs, G groups of g inputs.

Sources: GPTQ, arXiv 2210.17323; scales as of the largest magnitude and half a step, so that all
codes are used, as in its code.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from llmx.model import packed
from llmx.model.packed import PackedConfig

MOST_ROWS = 128  # inputs that GPTQ rounds before it corrects all others
FEW_OUTPUTS = 8  # in which weights are looked at for codes of their own before all are
# Of a number, how far rounding to bf16 and a scale that is found from such numbers may move it;
# less than EXACT is what fp32 leaves.
ROUNDED, EXACT = 1.5 * 2.0**-8, 1e-6


class Rounded(NamedTuple):
    """A matrix as codes from 0 on: weight = (code - zero) * scale."""

    codes_IO: Int[Array, "I O"]  # int32
    scale_GO: Float[Array, "G O"]
    zero_GO: Int[Array, "G O"] | None  # None = the middle code


def grid_of(weight_GgO: Array, config: PackedConfig, scale_dtype: jnp.dtype) -> tuple[Array, Array]:
    """Scales, numbers of `scale_dtype` in fp32, and zero points [G, O] of groups.

    A group of zeros has the scale 1.
    """
    if config.symmetric:
        scale_GO = jnp.abs(weight_GgO).max(1) / (config.middle - 0.5)
    else:
        low_GO = jnp.minimum(weight_GgO.min(1), 0)
        scale_GO = (jnp.maximum(weight_GgO.max(1), 0) - low_GO) / (config.levels - 1)
    scale_GO = scale_GO.astype(scale_dtype).astype(jnp.float32)
    scale_GO = jnp.where(scale_GO > 0, scale_GO, 1.0)
    if config.symmetric:
        return scale_GO, jnp.full(scale_GO.shape, config.middle, jnp.int32)
    zero_GO = jnp.clip(jnp.round(-low_GO / scale_GO), 0, config.levels - 1)
    return scale_GO, zero_GO.astype(jnp.int32)


def _codes(weight: Array, scale: Array, zero: Array, config: PackedConfig) -> Array:
    return jnp.clip(jnp.round(weight / scale) + zero, 0, config.levels - 1).astype(jnp.int32)


@functools.partial(jax.jit, static_argnames=("config", "scale_dtype"))
def nearest(
    weight_IO: Float[Array, "I O"], *, config: PackedConfig, scale_dtype: jnp.dtype = packed.SCALE
) -> Rounded:  # fmt: skip
    """Each number rounded to the nearest code of its group."""
    weight_GgO = _grouped(weight_IO, config)
    scale_GO, zero_GO = grid_of(weight_GgO, config, scale_dtype)
    codes_GgO = _codes(weight_GgO, scale_GO[:, None], zero_GO[:, None], config)
    return Rounded(
        codes_GgO.reshape(weight_IO.shape), scale_GO, None if config.symmetric else zero_GO
    )


def own_codes(
    weight_IO: Float[Array, "I O"], *, config: PackedConfig, scale_dtype: jnp.dtype = packed.SCALE
) -> Rounded | None:  # fmt: skip
    """The codes of a weight whose numbers are codes of its groups already, times scales of their
    own, but for rounding to bf16; None where they are not.

    Weights that were trained as integers are (`llmx.model.quantization`), also where fewer bits or
    larger groups shared a scale. Then codes stay as they are, and scales are rounded to
    `scale_dtype`. Without zero points only.
    """
    if not config.symmetric:
        return None
    *_, fits = _codes_of_own(weight_IO[:, :FEW_OUTPUTS], config=config)
    if not fits.all():  # of nearly all weights: at once
        return None
    codes_GgO, scale_GO, fits_GO = _codes_of_own(weight_IO, config=config)
    if not fits_GO.all():
        return None
    scale_GO = scale_GO.astype(scale_dtype).astype(jnp.float32)
    return Rounded(codes_GgO.reshape(weight_IO.shape) + config.middle, scale_GO, None)


@functools.partial(jax.jit, static_argnames="config")
def _codes_of_own(weight_IO: Array, *, config: PackedConfig) -> tuple[Array, Array, Array]:
    """Codes [G, g, O] around zero and scales [G, O] that are nearest to the numbers, and whether
    they give them [G, O]. Of scales that do as well the largest."""
    weight_GgO = _grouped(weight_IO, config)
    size_GgO = jnp.abs(weight_GgO)
    most_GO = jnp.where(size_GgO.max(1) > 0, size_GgO.max(1), 1.0)

    def codes_by(scale_GO):
        codes_GgO = jnp.round(weight_GgO / scale_GO[:, None])
        return jnp.clip(codes_GgO, -config.middle, config.middle - 1)

    def where_largest_has(code, best):
        """`best`, or what is nearer, where the largest magnitude has this code."""
        off_GO, scale_GO, codes_GgO = best
        own_GO = most_GO / code
        for _ in range(2):  # the largest was rounded as well: by least squares over all
            codes = codes_by(own_GO)
            fitted_GO = (codes * weight_GgO).sum(1) / jnp.maximum(jnp.square(codes).sum(1), 1.0)
            own_GO = jnp.where(fitted_GO > 0, fitted_GO, own_GO)
        codes = codes_by(own_GO)
        change_GgO = jnp.abs(codes * own_GO[:, None] - weight_GgO)
        own_off_GO = (change_GgO / jnp.where(size_GgO > 0, size_GgO, 1.0)).max(1)
        own_off_GO = jnp.maximum(own_off_GO, EXACT)
        nearer_GO = own_off_GO < 0.9 * off_GO
        return (
            jnp.where(nearer_GO, own_off_GO, off_GO), jnp.where(nearer_GO, own_GO, scale_GO),
            jnp.where(nearer_GO[:, None], codes, codes_GgO),
        )  # fmt: skip

    begin = jnp.full(most_GO.shape, jnp.inf), jnp.ones_like(most_GO), jnp.zeros_like(weight_GgO)
    off_GO, scale_GO, codes_GgO = jax.lax.fori_loop(
        1, config.middle + 1, where_largest_has, begin
    )  # fmt: skip
    return codes_GgO.astype(jnp.int32), scale_GO, off_GO <= ROUNDED


def numbers(rounded: Rounded, config: PackedConfig) -> Float[Array, "I O"]:
    """The matrix that codes stand for."""
    codes_IO, scale_GO, zero_GO = rounded
    codes_GgO = codes_IO.reshape(scale_GO.shape[0], -1, scale_GO.shape[1])
    zero = config.middle if zero_GO is None else zero_GO[:, None]
    return ((codes_GgO - zero) * scale_GO[:, None]).reshape(codes_IO.shape)


@functools.partial(
    jax.jit, static_argnames=("config", "by_importance", "damping", "scale_dtype")
)  # fmt: skip
def gptq(
    weight_IO: Float[Array, "I O"], gram_II: Float[Array, "I I"], *, config: PackedConfig,
    by_importance: bool = False, damping: float = 0.01, scale_dtype: jnp.dtype = packed.SCALE,
) -> Rounded:  # fmt: skip
    """Codes that keep the product with inputs of this Gram matrix: inputs are rounded one after
    another, and those that are not yet make up for the error of those that are.

    Args:
      gram_II: sum over tokens of x x^T.
      by_importance: inputs with the largest squares first ("act-order"); scales are then of the
        weights as they were, so that groups stay neighbors. Otherwise those of a group are made
        when its first input is rounded.
      damping: this share of the mean of the diagonal is added to it.

    Inputs that no token has are rounded to zero. Weights that are zero, as pruned ones, stay zero,
    and those behind make up for what they would have got. Source: arXiv 2210.17323, algorithm 1.
    """
    I, O = weight_IO.shape  # noqa: E741
    squares_I = gram_II.diagonal()
    unused_I = squares_I == 0
    gram_II = gram_II + jnp.diag(unused_I + damping * squares_I.mean())
    weight_IO = jnp.where(unused_I[:, None], 0.0, weight_IO)
    order_I = jnp.argsort(-squares_I) if by_importance else jnp.arange(I)
    zeros_IO = (weight_IO == 0)[order_I]
    group = config.group or I
    at_once = by_importance or not config.group
    rows = _divisor(I) if at_once else group
    scale_GO, zero_GO = grid_of(_grouped(weight_IO, config), config, scale_dtype)
    factor_II = _inverse_factor(gram_II[order_I][:, order_I])
    of_row_I = order_I // group

    def block(weight_IO, start):
        """Rounds `rows` inputs from `start` on, and corrects those behind them."""
        weight_RO = jax.lax.dynamic_slice_in_dim(weight_IO, start, rows)
        factor_RI = jax.lax.dynamic_slice_in_dim(factor_II, start, rows)
        factor_RR = jax.lax.dynamic_slice_in_dim(factor_RI, start, rows, axis=1)
        zeros_RO = jax.lax.dynamic_slice_in_dim(zeros_IO, start, rows)
        if at_once:
            of_row_R = jax.lax.dynamic_slice_in_dim(of_row_I, start, rows)
            scale_RO, zero_RO = scale_GO[of_row_R], zero_GO[of_row_R]
            own = ()
        else:
            own = grid_of(jnp.where(zeros_RO, 0.0, weight_RO)[None], config, scale_dtype)
            scale_RO, zero_RO = (jnp.broadcast_to(part, (rows, O)) for part in own)

        grid = scale_RO, zero_RO
        codes_RO, errors_RO = _in_turn(weight_RO, zeros_RO, factor_RR, grid, config)
        behind_RI = jnp.where(jnp.arange(I) >= start + rows, factor_RI, 0.0)
        return weight_IO - _exact(behind_RI.T, errors_RO), (codes_RO, own)

    _, (codes, own) = jax.lax.scan(block, weight_IO[order_I], jnp.arange(0, I, rows))
    codes_IO = jnp.zeros((I, O), jnp.int32).at[order_I].set(codes.reshape(I, O))
    if not at_once:
        scale_GO, zero_GO = (part.reshape(-1, O) for part in own)
    return Rounded(codes_IO, scale_GO, None if config.symmetric else zero_GO)


def _in_turn(
    weight_RO: Array, zeros_RO: Array, factor_RR: Array, grid: tuple[Array, Array],
    config: PackedConfig,
) -> tuple[Array, Array]:  # fmt: skip
    """Codes of R inputs, each rounded behind the ones before it, and what each leaves to those
    behind, by their factor. `zeros_RO`: weights that become zero; `grid`: scales, zero points."""
    rows_R, (scale_RO, zero_RO) = jnp.arange(len(weight_RO)), grid

    def one(row, carried):
        weight_RO, codes_RO, errors_RO = carried
        rounded_O = jnp.where(zeros_RO[row], 0.0, weight_RO[row])
        code_O = _codes(rounded_O, scale_RO[row], zero_RO[row], config)
        error_O = weight_RO[row] - (code_O - zero_RO[row]) * scale_RO[row]
        error_O /= factor_RR[row, row]
        behind_R = jnp.where(rows_R > row, factor_RR[row], 0.0)
        weight_RO -= behind_R[:, None] * error_O
        return weight_RO, codes_RO.at[row].set(code_O), errors_RO.at[row].set(error_O)

    nothing_RO = jnp.zeros_like(weight_RO)
    begin = weight_RO, nothing_RO.astype(jnp.int32), nothing_RO
    _, codes_RO, errors_RO = jax.lax.fori_loop(0, len(weight_RO), one, begin)
    return codes_RO, errors_RO


def output_error(before_IO: Array, after_IO: Array, gram_II: Array) -> Float[Array, ""]:
    """The squared change of a product's outputs, summed over the tokens of a Gram matrix."""
    change_IO = after_IO - before_IO
    return jnp.sum(change_IO * _exact(gram_II, change_IO))


_exact = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


def _inverse_factor(gram_II: Array) -> Array:
    """Upper U with U^T U = gram^-1: the inverse of the upper R with R R^T = gram."""
    lower_II = jnp.linalg.cholesky(gram_II[::-1, ::-1])
    upper_II = lower_II[::-1, ::-1]
    return jax.scipy.linalg.solve_triangular(upper_II, jnp.eye(len(gram_II)), lower=False)


def _grouped(weight_IO: Array, config: PackedConfig) -> Array:
    return weight_IO.reshape(-1, config.group or weight_IO.shape[0], weight_IO.shape[1])


def _divisor(size: int) -> int:
    """The largest divisor that is at most `MOST_ROWS`."""
    return max(n for n in range(1, min(size, MOST_ROWS) + 1) if size % n == 0)

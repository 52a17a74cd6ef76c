"""Products as two factors of low rank, by the singular values of their weights.

With nothing known of inputs, A B is the best approximation of W (Eckart and Young). With the sum
H = X^T X over inputs X of calibration text, what is minimized is |X W - X A B|^2 (SVD-LLM, arXiv
2403.07378): with H = S^T S, S A B is the best approximation of S W, whichever root S is. ASVD
(arXiv 2312.05821) scales inputs by a power of the mean of |x| in the place of S.

All in numpy, float64. Letters: l layers, I inputs, O outputs, r the rank; W [I, O], y = x W.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

PLAIN, WHITENED, SCALED = "plain", "whitened", "scaled"
DAMPING = 1e-6  # of the mean eigenvalue of H: inputs that never were keep a row of their own


class Spectrum(NamedTuple):
    """One weight of one layer: U, singular values, V, of the weight as seen by its inputs."""

    left_II: np.ndarray  # S^-1 U: what is multiplied with the root of the singular values
    values_r: np.ndarray
    right_rO: np.ndarray


def spectrum(weight_IO: np.ndarray, side: "Whitening | None" = None) -> Spectrum:
    """The singular value decomposition of a weight, or of S W for the inputs' S."""
    weight_IO = np.asarray(weight_IO, np.float64)
    if side is None:
        return Spectrum(*np.linalg.svd(weight_IO, full_matrices=False))
    left, values, right = np.linalg.svd(side.apply(weight_IO), full_matrices=False)
    return Spectrum(side.undo(left), values, right)


class Whitening(NamedTuple):
    """S of a product's inputs, S^T S = H, and its inverse."""

    matrix_II: np.ndarray
    inverse_II: np.ndarray

    @classmethod
    def of_gram(cls, gram_II: np.ndarray) -> "Whitening":
        """Of H = X^T X, by its eigenvalues: sums in fp32 of inputs that are nearly dependent may
        have negative ones, and then no Cholesky factor."""
        values_I, vectors_II = np.linalg.eigh(np.asarray(gram_II, np.float64))
        least = DAMPING * max(values_I.mean(), np.finfo(np.float64).tiny)
        root_I = np.sqrt(np.maximum(values_I, least))
        return cls(root_I[:, None] * vectors_II.T, vectors_II / root_I)

    @classmethod
    def of_magnitudes(cls, magnitude_I: np.ndarray, power: float = 0.5) -> "Whitening":
        """Of the means of |x|, to the power that ASVD found best."""
        magnitude_I = np.asarray(magnitude_I, np.float64)
        least = DAMPING * max(magnitude_I.mean(), np.finfo(np.float64).tiny)
        scale_I = np.maximum(magnitude_I, least) ** power
        return cls(np.diag(scale_I), np.diag(1 / scale_I))

    def apply(self, weight_IO: np.ndarray) -> np.ndarray:
        """S W."""
        return self.matrix_II @ weight_IO

    def undo(self, array: np.ndarray) -> np.ndarray:
        """S^-1 of an array [I, ...]."""
        return self.inverse_II @ array


def factors(found: Spectrum, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """A [I, r] and B [r, O], each with the root of the singular values."""
    root_r = np.sqrt(found.values_r[:rank])
    return found.left_II[:, :rank] * root_r, root_r[:, None] * found.right_rO[:rank]


def rank_of_energy(values_r: np.ndarray, energy: float) -> int:
    """The fewest singular values whose squares are this share of all squares."""
    shares = np.cumsum(np.square(values_r)) / max(np.sum(np.square(values_r)), 1e-300)
    # Rounding may leave the last share just below 1.
    return min(int(np.searchsorted(shares, energy * (1 - 1e-12))) + 1, len(values_r))


def rank_of_share(sizes: tuple[int, int], share: float) -> int:
    """The largest rank whose factors have at most this share of a weight's parameters, or 1."""
    inputs, outputs = sizes
    return max(int(share * inputs * outputs / (inputs + outputs)), 1)


def saves(sizes: tuple[int, int], rank: int) -> bool:
    """Whether factors of this rank are smaller than the weight."""
    return rank * sum(sizes) < sizes[0] * sizes[1]


def rank_of(
    sizes: tuple[int, int], spectra: Sequence[Spectrum], *, rank: int, share: float, energy: float
) -> int:
    """One rank for all layers of a product, of the one that is given."""
    if rank:
        return min(rank, *sizes)
    if share:
        return rank_of_share(sizes, share)
    return max(rank_of_energy(one.values_r, energy) for one in spectra)


def sides_of(statistics: Any, how: str) -> list[Whitening] | None:
    """S of a product's inputs in each layer, of `observed.Statistics` [l, ...]; None = no S."""
    if how == PLAIN:
        return None
    if how == SCALED:
        magnitudes = np.asarray(statistics.magnitude_I) / np.asarray(statistics.tokens)[..., None]
        return [Whitening.of_magnitudes(one) for one in magnitudes]
    return [Whitening.of_gram(one) for one in np.asarray(statistics.gram_II)]


def factored_leaves(
    leaf: np.ndarray, contracted: int, spectra: Sequence[Spectrum], rank: int
) -> Mapping[str, np.ndarray]:
    """{"down": [l, *inputs, r], "up": [l, r, *outputs]}, fp32, of a weight of stacked layers whose
    first `contracted` dimensions after the layers are its inputs."""
    inputs, outputs = leaf.shape[1 : 1 + contracted], leaf.shape[1 + contracted :]
    pairs = [factors(one, rank) for one in spectra]
    down = np.stack([a for a, _ in pairs]).reshape(len(pairs), *inputs, rank)
    up = np.stack([b for _, b in pairs]).reshape(len(pairs), rank, *outputs)
    return {"down": np.float32(down), "up": np.float32(up)}

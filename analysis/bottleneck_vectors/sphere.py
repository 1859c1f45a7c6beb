"""Tests of uniformity on the unit sphere.

Letters in shape comments: N vectors, V dimensions.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from scipy.special import betaln
from scipy.stats import chi2

from common.errors import UserError


@dataclasses.dataclass(frozen=True)
class Uniformity:
    """Statistics of vectors on the sphere, beside their values for uniform vectors.

    Attributes:
        num_vectors: N.
        mean_norm: length of the mean vector: 1 if all are equal.
        uniform_mean_norm: root of its mean square for uniform ones, 1 / sqrt(N).
        effective_dimensions: 1 / tr(S²) of the matrix of second moments S; V if all directions are
            equally frequent, 1 if all lie on one axis.
        uniform_effective_dimensions: the inverse of the mean of tr(S²) for so many uniform ones.
        rayleigh, rayleigh_p: statistic and p-value of Rayleigh's test, that the mean is 0.
        bingham, bingham_p: the same of Bingham's test, that S is I / V.
    """

    num_vectors: int
    mean_norm: float
    uniform_mean_norm: float
    effective_dimensions: float
    uniform_effective_dimensions: float
    rayleigh: float
    rayleigh_p: float
    bingham: float
    bingham_p: float


def unit_vectors(vectors: np.ndarray) -> np.ndarray:
    """Vectors divided by their lengths, float64 (N, V).

    Raises:
        UserError: if one of them has no direction.
    """
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
    if not (lengths > 0).all():
        raise UserError(f"bottleneck vector number {int((lengths == 0).argmax())} is 0 and has no "
                        "direction; record the samples again")
    return vectors / lengths


def uniformity(vectors: np.ndarray) -> Uniformity:
    """Test whether vectors (N, V) come from the uniform distribution on the sphere.

    With n vectors in d dimensions, n d |mean|² (Rayleigh) is for large n distributed like chi² with
    d degrees of freedom, and n d (d + 2) / 2 (tr(S²) - 1 / d) (Bingham 1974) like chi² with
    (d - 1)(d + 2) / 2; at any n the mean is the same and the variance (n - 1) / n times as large.
    See Mardia and Jupp, Directional Statistics, 10.4.

    Raises:
        UserError: see ``unit_vectors``.
    """
    x = unit_vectors(vectors)
    n, d = x.shape
    square_of_mean = float((x.mean(axis=0) ** 2).sum())
    square_of_moments = float(((x.T @ x / n) ** 2).sum())
    rayleigh = n * d * square_of_mean
    bingham = n * d * (d + 2) / 2 * (square_of_moments - 1 / d)
    return Uniformity(
        num_vectors=n, mean_norm=square_of_mean ** 0.5, uniform_mean_norm=n ** -0.5,
        effective_dimensions=1 / square_of_moments,
        uniform_effective_dimensions=1 / (1 / n + (1 - 1 / n) / d),
        rayleigh=rayleigh, rayleigh_p=float(chi2.sf(rayleigh, d)),
        bingham=bingham, bingham_p=float(chi2.sf(bingham, (d - 1) * (d + 2) / 2)))


def pairwise_cosines(vectors: np.ndarray, most_vectors: int) -> np.ndarray:
    """Cosines between all pairs of the first ``most_vectors``, float32 (pairs,)."""
    x = unit_vectors(vectors[:most_vectors])
    return (x @ x.T)[np.triu_indices(len(x), 1)].astype(np.float32)


def uniform_cosine_density(cosines: np.ndarray, dimensions: int) -> np.ndarray:
    """Density of the cosine between two uniform vectors in so many dimensions, at these values."""
    exponent = (dimensions - 3) / 2
    # (1 - c²)^exponent, whose integral is the beta function B(1/2, (V - 1) / 2).
    logs = exponent * np.log1p(-cosines ** 2) - betaln(0.5, (dimensions - 1) / 2)
    return np.exp(logs)

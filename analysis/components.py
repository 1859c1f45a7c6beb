"""Standardising, principal components and independent components.

Letters in shape comments: N states, D units, P principal components, k independent ones.
"""

from __future__ import annotations

import dataclasses
import warnings

import numpy as np
from sklearn.decomposition import PCA, FastICA
from sklearn.exceptions import ConvergenceWarning

from common.errors import UserError


@dataclasses.dataclass(frozen=True)
class Scale:
    """Mean and standard deviation of each unit.

    Attributes:
        mean: (D,).
        std: (D,); 1 for a unit that does not vary.
        constant: units that do not vary.
    """

    mean: np.ndarray
    std: np.ndarray
    constant: tuple[int, ...]

    def standardise(self, states: np.ndarray) -> np.ndarray:
        """(states - mean) / std, float32 (N, D)."""
        standardised = states - self.mean
        standardised /= self.std
        return standardised


def scale_of(states: np.ndarray) -> Scale:
    """The scale of states, float32 (N, D)."""
    constant = states.min(axis=0) == states.max(axis=0)
    std = states.std(axis=0, dtype=np.float64)
    std[constant] = 1
    mean = states.mean(axis=0, dtype=np.float64)
    return Scale(mean.astype(np.float32), std.astype(np.float32),
                 tuple(np.flatnonzero(constant).tolist()))


@dataclasses.dataclass(frozen=True)
class PrincipalComponents:
    """Directions of largest variance.

    Attributes:
        components: orthonormal rows (P, D).
        variances: of the coordinates, descending (P,).
        singular_values: of the centred states (P,).
        total_variance: of all directions, also those left out.
    """

    components: np.ndarray
    variances: np.ndarray
    singular_values: np.ndarray
    total_variance: float

    def coordinates(self, states: np.ndarray) -> np.ndarray:
        """Standardised states (N, D) to float32 (N, P); their mean is not subtracted."""
        return states @ self.components.T

    def number_for(self, share: float) -> int:
        """How many components hold this share of the variance; all, if they hold less."""
        held = np.cumsum(self.variances, dtype=np.float64) / self.total_variance
        return min(int((held < share).sum()) + 1, len(self.variances))


def principal_components(states: np.ndarray, number: int) -> PrincipalComponents:
    """Fit to standardised states (N, D).

    Raises:
        UserError: if more components are asked for than there are units or states.
    """
    most = min(states.shape)
    if number > most:
        raise UserError(f"n_components_pca is {number}, but {states.shape[0]} states of "
                        f"{states.shape[1]} units have at most {most} principal components")
    model = PCA(number, svd_solver="covariance_eigh").fit(states.astype(np.float64))
    return PrincipalComponents(
        model.components_.astype(np.float32), model.explained_variance_.astype(np.float32),
        model.singular_values_.astype(np.float32),
        float(model.explained_variance_.sum() / model.explained_variance_ratio_.sum()))


@dataclasses.dataclass(frozen=True)
class IndependentComponents:
    """Directions along which states are least normally distributed.

    Attributes:
        unmixing: W (k, k).
        mixing: its inverse (k, k).
        iterations: that the fit took.
        converged: whether it ended before the largest number of iterations.
    """

    unmixing: np.ndarray
    mixing: np.ndarray
    iterations: int
    converged: bool


def independent_components(principal: np.ndarray, variances: np.ndarray, max_iter: int, tol: float,
                           seed: int) -> IndependentComponents:
    """FastICA (Hyvärinen and Oja 2000, parallel, logcosh) on whitened principal coordinates.

    Args:
        principal: the first k principal coordinates of the states to fit (N, k).
        variances: of these (k,).
        max_iter: largest number of iterations.
        tol: smallest change of direction that counts as one.

    Raises:
        UserError: if one of the coordinates does not vary.
    """
    varying = int((variances > 1e-6 * variances[0]).sum())
    if varying < len(variances):
        raise UserError(f"n_components_ica is {len(variances)}, but only {varying} principal "
                        "components of these states vary")
    whitened = whiten(principal, variances)
    whitened -= whitened.mean(axis=0, dtype=np.float64).astype(np.float32)
    model = FastICA(whiten=False, max_iter=max_iter, tol=tol, random_state=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # `converged` says it
        model.fit(whitened)
    unmixing = model.components_.astype(np.float64)
    return IndependentComponents(unmixing.astype(np.float32),
                                 np.linalg.inv(unmixing).astype(np.float32), model.n_iter_,
                                 model.n_iter_ < max_iter)


def whiten(principal: np.ndarray, variances: np.ndarray) -> np.ndarray:
    """Coordinates (N, k) divided by their standard deviations."""
    return principal / np.sqrt(variances)


def source_signals(principal: np.ndarray, variances: np.ndarray,
                   unmixing: np.ndarray) -> np.ndarray:
    """Independent coordinates s = (p / std(p)) W^T (N, k), as ``Projector`` defines them."""
    return whiten(principal, variances) @ unmixing.T

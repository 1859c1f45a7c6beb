"""Scale, principal components, independent components and non-negative factors of states.

Letters in shape comments: N states, D units, P principal components, k independent ones, F factors.
"""

from __future__ import annotations

import dataclasses
import warnings

import numpy as np
from sklearn.decomposition import NMF, PCA, FastICA
from sklearn.exceptions import ConvergenceWarning

from common.errors import UserError

WIDE = 2_000  # units beyond which principal components are found by a randomised decomposition
PIECE_ROWS = 20_000


@dataclasses.dataclass(frozen=True)
class Standardizer:
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


def standardizer_of(states: np.ndarray) -> Standardizer:
    """The scale of states, float32 (N, D)."""
    constant = states.min(axis=0) == states.max(axis=0)
    std = states.std(axis=0, dtype=np.float64)
    std[constant] = 1
    mean = states.mean(axis=0, dtype=np.float64)
    return Standardizer(mean.astype(np.float32), std.astype(np.float32),
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
        """Number of components that hold this share of the variance; all, if they hold less."""
        held = np.cumsum(self.variances, dtype=np.float64) / self.total_variance
        return min(int((held < share).sum()) + 1, len(self.variances))


def principal_components(states: np.ndarray, number: int, seed: int = 0) -> PrincipalComponents:
    """Fit to standardised states, float32 (N, D).

    Up to WIDE units the components are eigenvectors of the covariance, added up in double precision
    piece by piece, so that no second copy of many states is needed (scikit-learn's solver for this
    adds up in the states' own precision, and loses small variances). Beyond, they are found by a
    randomised decomposition (Halko et al. 2011), in time and memory that grow with N times D.

    Args:
        seed: of that decomposition.

    Raises:
        UserError: if more components are asked for than there are units or states, or no unit
            varies.
    """
    most = min(states.shape)
    if number > most:
        raise UserError(f"n_components_pca is {number}, but {states.shape[0]} states of "
                        f"{states.shape[1]} units have at most {most} principal components")
    if states.shape[1] > WIDE:
        model = PCA(number, svd_solver="randomized", random_state=seed).fit(states)
        components, variances = model.components_, model.explained_variance_
        total = variances.sum() / model.explained_variance_ratio_.sum()
    else:
        covariance = _covariance(states)
        total = np.trace(covariance)
        variances, vectors = np.linalg.eigh(covariance)
        variances = np.maximum(variances[::-1][:number], 0)
        components = vectors[:, ::-1][:, :number].T
        largest = components[np.arange(number), np.abs(components).argmax(axis=1)]
        components = components * np.sign(largest)[:, None]  # eigenvectors have no sign
    if not total > 0:
        raise UserError(f"none of the {states.shape[1]} units varies over {len(states)} states, "
                        "so they have no principal components")
    return PrincipalComponents(
        components.astype(np.float32), variances.astype(np.float32),
        np.sqrt(variances * (len(states) - 1)).astype(np.float32), float(total))


def _covariance(states: np.ndarray) -> np.ndarray:
    """Of the units, float64 (D, D)."""
    mean = states.mean(axis=0, dtype=np.float64)
    products = np.zeros((states.shape[1], states.shape[1]))
    for begin in range(0, len(states), PIECE_ROWS):
        centred = states[begin:begin + PIECE_ROWS] - mean
        products += centred.T @ centred
    return products / max(len(states) - 1, 1)


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


@dataclasses.dataclass(frozen=True)
class Factorisation:
    """States as ``weights @ factors + minimum``, weights and factors not negative.

    Attributes:
        weights: float32 (N, F).
        factors: float32 (F, D).
        minimum: of each unit, which is subtracted before (D,).
        relative_error: norm of what is left over, by that of the shifted states.
        iterations: that the fit took.
        converged: whether it ended before the largest number of iterations.
    """

    weights: np.ndarray
    factors: np.ndarray
    minimum: np.ndarray
    relative_error: float
    iterations: int
    converged: bool


def factorise(states: np.ndarray, number: int, max_iter: int, tol: float,
              seed: int) -> Factorisation:
    """Fit ``number`` factors to states (N, D) by coordinate descent (Lee and Seung 1999; Cichocki
    and Phan 2009), started from their singular vectors.

    Raises:
        UserError: if more factors are asked for than there are units or states, or no unit
            varies.
    """
    if number > min(states.shape):
        raise UserError(f"n_components_nmf is {number}, but {states.shape[0]} states of "
                        f"{states.shape[1]} units have at most {min(states.shape)} factors")
    minimum = states.min(axis=0)
    shifted = states - minimum
    norm = float(np.linalg.norm(shifted))
    if norm == 0:
        raise UserError("no hidden unit varies, so that there is nothing to factorise")
    model = NMF(number, init="nndsvda", max_iter=max_iter, tol=tol, random_state=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # `converged` says it
        weights = model.fit_transform(shifted)
    return Factorisation(weights.astype(np.float32), model.components_.astype(np.float32), minimum,
                         float(model.reconstruction_err_) / norm, model.n_iter_,
                         model.n_iter_ < max_iter)

"""Standardisation, PCA, ICA and non-negative matrix factorisation of states.

Letters in shape comments: D units, k independent components, F factors.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from sklearn.decomposition import NMF, PCA, FastICA

from common.errors import UserError
from common.step_results import StepResult

WIDE = 2_000  # number of units above which principal components are found by a randomised SVD
PIECE_ROWS = 20_000


@dataclasses.dataclass(frozen=True)
class Standardizer:
    """Mean and standard deviation of each unit.

    Attributes:
        mean: mean of each unit (D,).
        std: standard deviation of each unit, 1 for a unit that does not vary (D,).
        constant: indices of the units that do not vary.
    """

    mean: np.ndarray
    std: np.ndarray
    constant: tuple[int, ...]

    def standardise(self, states: np.ndarray) -> np.ndarray:
        """Compute (states - mean) / std for states (N, D), float32 (N, D)."""
        standardised = states - self.mean
        standardised /= self.std
        return standardised


def standardizer_of(states: np.ndarray) -> Standardizer:
    """Compute the mean and standard deviation of each unit over states, float32 (N, D)."""
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
        components: directions as orthonormal rows (P, D).
        variances: variances of the coordinates, in descending order (P,).
        singular_values: singular values of the centred states (P,).
        total_variance: total variance of the states, including omitted components.
    """

    components: np.ndarray
    variances: np.ndarray
    singular_values: np.ndarray
    total_variance: float

    def coordinates(self, states: np.ndarray) -> np.ndarray:
        """Project standardised states (N, D) on the components, float32 (N, P).

        The mean of the states is not subtracted.
        """
        return states @ self.components.T

    def number_for(self, share: float) -> int:
        """Return the number of leading components that explain at least a share of the total
        variance, or the number of all components if all together explain less."""
        cumulative = np.cumsum(self.variances, dtype=np.float64) / self.total_variance
        return min(int((cumulative < share).sum()) + 1, len(self.variances))


def principal_components(states: np.ndarray, number: int, seed: int = 0) -> PrincipalComponents:
    """Compute the principal components of standardised states.

    Up to WIDE units, the components are eigenvectors of the covariance matrix, which is accumulated
    in double precision block by block to avoid a second copy of the states. (scikit-learn's
    covariance solver accumulates in the precision of the states and loses small variances.) Above
    WIDE units, they are found by a randomised SVD (Halko et al. 2011), whose time and memory grow
    with N times D.

    Args:
        states: standardised states, float32 (N, D).

    Raises:
        UserError: if ``number`` exceeds the number of units or states, or if no unit varies.
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
        components = components * np.sign(largest)[:, None]  # the sign of eigenvectors is arbitrary
    if not total > 0:
        raise UserError(f"none of the {states.shape[1]} units varies over {len(states)} states, "
                        "so they have no principal components")
    return PrincipalComponents(
        components.astype(np.float32), variances.astype(np.float32),
        np.sqrt(variances * (len(states) - 1)).astype(np.float32), float(total))


def _covariance(states: np.ndarray) -> np.ndarray:
    """Compute the covariance matrix of the units, float64 (D, D)."""
    mean = states.mean(axis=0, dtype=np.float64)
    products = np.zeros((states.shape[1], states.shape[1]))
    for begin in range(0, len(states), PIECE_ROWS):
        centred = states[begin:begin + PIECE_ROWS] - mean
        products += centred.T @ centred
    return products / max(len(states) - 1, 1)


def independent_components(principal: np.ndarray, kept: np.ndarray, variances: np.ndarray,
                           max_iter: int, tol: float, seed: int) -> StepResult:
    """Fit FastICA (Hyvärinen and Oja 2000; parallel, logcosh) to whitened principal coordinates.

    scikit-learn warns if the fit has not converged.

    Args:
        principal: first k principal coordinates of all states (N, k).
        kept: whether each state is used in the fit, bool (N,).
        variances: variances of these coordinates (k,).
        max_iter: maximum number of iterations.
        tol: change of the directions below which the fit has converged.

    Returns:
        Arrays, and facts about the fit, by name:

        - ``unmixing``: matrix W (k, k). A state with principal coordinates p has the independent
          coordinates (p / std(p)) W^T, see ``interventions.projector.Projector``.
        - ``mixing``: inverse of W (k, k)
        - ``sources``: independent coordinates (N, k)
        - ``iterations``, ``converged``: number of iterations, and whether the fit converged

    Raises:
        UserError: if one of the coordinates does not vary.
    """
    varying = int((variances > 1e-6 * variances[0]).sum())
    if varying < len(variances):
        raise UserError(f"n_components_ica is {len(variances)}, but only {varying} principal "
                        "components of these states vary")
    whitened = principal / np.sqrt(variances)
    fitted = whitened[kept]
    fitted -= fitted.mean(axis=0, dtype=np.float64).astype(np.float32)
    model = FastICA(whiten=False, max_iter=max_iter, tol=tol, random_state=seed).fit(fitted)
    unmixing = model.components_.astype(np.float64)
    arrays = {"unmixing": unmixing.astype(np.float32),
              "mixing": np.linalg.inv(unmixing).astype(np.float32)}
    return ({**arrays, "sources": whitened @ arrays["unmixing"].T},
            {"iterations": model.n_iter_, "converged": model.n_iter_ < max_iter})


def factorise(states: np.ndarray, number: int, max_iter: int, tol: float,
              seed: int) -> StepResult:
    """Fit a non-negative matrix factorisation (Lee and Seung 1999) by coordinate descent (Cichocki
    and Phan 2009), initialised by SVD. ``nmf @ nmf_components + nmf_min`` approximates the states.

    scikit-learn warns if the fit has not converged.

    Args:
        states: states as recorded (N, D).
        number: number of factors F.
        max_iter: maximum number of iterations.
        tol: tolerance below which the fit has converged.

    Returns:
        Arrays, float32, and facts about the fit, by name:

        - ``nmf``: non-negative weight of each factor in each state (N, F)
        - ``nmf_components``: non-negative factors (F, D)
        - ``nmf_min``: minimum of each unit, which is subtracted before the fit (D,)
        - ``iterations``, ``converged``: number of iterations, and whether the fit converged
        - ``relative_error``: norm of the residual divided by the norm of the states after the
          subtraction

    Raises:
        UserError: if ``number`` exceeds the number of units or states, or if no unit varies.
    """
    if number > min(states.shape):
        raise UserError(f"n_components_nmf is {number}, but {states.shape[0]} states of "
                        f"{states.shape[1]} units have at most {min(states.shape)} factors")
    minimum = states.min(axis=0)
    shifted = states - minimum
    norm = float(np.linalg.norm(shifted))
    if norm == 0:
        raise UserError("no hidden unit varies over these states, so they cannot be factorised")
    model = NMF(number, init="nndsvda", max_iter=max_iter, tol=tol, random_state=seed)
    weights = model.fit_transform(shifted)
    return ({"nmf": weights.astype(np.float32),
             "nmf_components": model.components_.astype(np.float32), "nmf_min": minimum},
            {"iterations": model.n_iter_, "converged": model.n_iter_ < max_iter,
             "relative_error": float(model.reconstruction_err_) / norm})

"""Non-negative matrix factorisation of states."""

from __future__ import annotations

import dataclasses
import warnings

import numpy as np
from sklearn.decomposition import NMF
from sklearn.exceptions import ConvergenceWarning

from common.errors import UserError


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

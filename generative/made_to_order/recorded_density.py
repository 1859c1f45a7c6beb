"""Where the start vectors of recorded windows lie on the sphere: a kernel density.

The encoder gives one vector a window, so the aggregate posterior of the starts (Hoffman and
Johnson 2016; Tomczak and Welling 2018) is a set of points on the unit sphere. The density is the
mean of von Mises-Fisher kernels around those points, which are to the sphere what Gaussians are to
the plane; their concentration is the one under which episodes that were left out are likeliest. A
Gaussian with the vectors' mean and covariance would call likely what lies between clusters, where
no recorded start is. Preferred inputs that are searched in the code of a generator need such a
bound: without one they leave the codes that the generator knows (Nguyen et al. 2016, 2017).

Letters in shape comments: N recorded vectors, B vectors, V bottleneck vector.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from scipy.special import ive, logsumexp
from torch import Tensor

from common.errors import UserError

CONCENTRATIONS = tuple(2.0 ** np.arange(16))
TYPICAL_SHARE = 0.05  # of the recorded starts that are less likely than what counts as typical
MIN_EPISODES = 2


@dataclasses.dataclass(frozen=True)
class RecordedDensity:
    """Density of recorded start vectors.

    Attributes:
        vectors: of length 1 (N, V).
        concentration: of the kernels.
        log_density: of each recorded vector, from the kernels of other episodes, up to a constant,
            float64 (N,).
        typical: log-density that all but ``TYPICAL_SHARE`` of the recorded vectors have.
        spread: from there to their median; above 0.
    """

    vectors: Tensor
    concentration: float
    log_density: np.ndarray
    typical: float
    spread: float

    @classmethod
    def fit(cls, vectors: np.ndarray, episodes: np.ndarray) -> RecordedDensity:
        """Choose the concentration and the bound of what is typical.

        Args:
            vectors: of recorded windows (N, V).
            episodes: that they come from (N,). Windows of an episode resemble each other, so none
                of its kernels counts for its own windows.

        Raises:
            UserError: if all vectors are of one episode.
        """
        if len(np.unique(episodes)) < MIN_EPISODES:
            raise UserError("the recorded starts are of one episode only, which does not say where "
                            "starts lie; record more episodes or raise --num_recorded")
        exact = vectors.astype(np.float64)
        cosines = exact @ exact.T  # (N, N)
        others = episodes[:, None] != episodes  # (N, N)
        best, chosen = -np.inf, None
        for concentration in CONCENTRATIONS:
            log_density = logsumexp(concentration * cosines, b=others, axis=1) - np.log(
                others.sum(axis=1))
            likelihood = log_density.mean() + log_normaliser(concentration, vectors.shape[1])
            if likelihood > best:
                best, chosen = likelihood, (concentration, log_density)
        concentration, log_density = chosen
        typical, median = np.quantile(log_density, (TYPICAL_SHARE, 0.5))
        return cls(torch.from_numpy(vectors), concentration, log_density, float(typical),
                   max(float(median - typical), 1e-6))

    def of(self, vectors: Tensor) -> Tensor:
        """Log-density, up to the same constant, of vectors (B, V): (B,)."""
        similar = self.concentration * vectors @ self.vectors.T.to(vectors)  # (B, N)
        return similar.logsumexp(dim=-1) - np.log(len(self.vectors))

    def excess(self, vectors: Tensor) -> Tensor:
        """How far vectors (B, V) lie below what is typical, in units of ``spread``: (B,).

        0 where recorded vectors typically lie.
        """
        return torch.relu(self.typical - self.of(vectors)) / self.spread

    def nearest(self, vectors: Tensor, number: int) -> tuple[np.ndarray, np.ndarray]:
        """The recorded vectors that are nearest to vectors (B, V), nearest first.

        Returns:
            Their rows, int64 (B, number), and cosines, float32 (B, number).
        """
        cosines, rows = (vectors @ self.vectors.T.to(vectors)).topk(number, dim=-1)
        return rows.numpy(), cosines.numpy()


def log_normaliser(concentration: float, dimensions: int) -> float:
    """Logarithm of the von Mises-Fisher density's constant (Mardia and Jupp 2000, section 9.3.2).

    Args:
        dimensions: V of the space that the sphere is in.
    """
    order = dimensions / 2 - 1
    return (order * np.log(concentration) - dimensions / 2 * np.log(2 * np.pi)
            - np.log(ive(order, concentration)) - concentration)

"""Parameters of the analyses: sections of ``analysis`` in ``hyperparams/interpreting_configs.yml``.

The meaning and unit of each value is in the YAML beside it.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from common.errors import UserError
from common.parameters import one_of, positive, tail_fraction
from generative.config import SAMPLE_STARTS

CLUSTERINGS = ("agglomerative", "hdbscan", "kmeans")


def map_dimensions(number: int) -> None:
    """Check the dimensions of a t-SNE map.

    Raises:
        UserError: if such a map cannot be drawn.
    """
    if number not in (2, 3):
        raise UserError(f"n_components_tsne must be 2 or 3, not {number}")


@dataclasses.dataclass(frozen=True)
class AgentHiddenConfig:
    """Analysis of the agent's hidden states."""

    section: ClassVar[str] = "analysis.agent_h"

    informed_or_random_init: str
    num_episodes: int
    num_generated_samples: int
    num_epi_paths: int
    n_components_pca: int
    n_components_tsne: int
    n_components_nmf: int
    n_components_ica: int
    n_clusters: int
    clustering: str
    nmf_max_iter: int
    nmf_tol: float
    ica_max_iter: int
    ica_tol: float
    outlier_max_k: int

    def __post_init__(self):
        positive(self, *(field.name for field in dataclasses.fields(self)
                         if field.type in ("int", "float")))
        one_of("informed_or_random_init", self.informed_or_random_init, SAMPLE_STARTS)
        one_of("clustering", self.clustering, CLUSTERINGS)
        if self.n_components_ica > self.n_components_pca:
            raise UserError(f"n_components_ica is {self.n_components_ica}, more than the "
                            f"{self.n_components_pca} of n_components_pca")
        map_dimensions(self.n_components_tsne)
        if self.outlier_max_k < 6:
            raise UserError(f"outlier_max_k must be at least 6, not {self.outlier_max_k}, because "
                            "the smallest number of neighbours below it is 5")


@dataclasses.dataclass(frozen=True)
class MapConfig:
    """Parameters that the analyses of simulated samples share: principal components, clusters and
    a t-SNE map.

    Attributes:
        num_samples: simulated samples.
    """

    num_samples: int
    n_components_pca: int
    n_components_tsne: int
    n_clusters: int
    clustering: str

    def __post_init__(self):
        positive(self, "num_samples", "n_clusters")
        one_of("clustering", self.clustering, CLUSTERINGS)
        map_dimensions(self.n_components_tsne)
        if self.n_components_pca < 2:
            raise UserError(f"n_components_pca must be at least 2, not {self.n_components_pca}")


@dataclasses.dataclass(frozen=True)
class EnvHiddenConfig(MapConfig):
    """Analysis of the environment's states."""

    section: ClassVar[str] = "analysis.env_h"

    num_epi_paths: int

    def __post_init__(self):
        super().__post_init__()
        positive(self, "num_epi_paths")


@dataclasses.dataclass(frozen=True)
class BottleneckConfig(MapConfig):
    """Analysis of the bottleneck vectors."""

    section: ClassVar[str] = "analysis.bottleneck"


@dataclasses.dataclass(frozen=True)
class BehavioursConfig(MapConfig):
    """Analysis of behaviours: the agent's and the environment's states together."""

    section: ClassVar[str] = "analysis.combined_agent_env_hx"

    n_components_env: int
    timestep_differences: tuple[int, ...]

    def __post_init__(self):
        super().__post_init__()
        positive(self, "n_components_env")
        if min(self.timestep_differences, default=1) < 1:
            raise UserError("timestep_differences must be above 0, but holds "
                            f"{min(self.timestep_differences)}")


@dataclasses.dataclass(frozen=True)
class JacobianConfig(MapConfig):
    """Analysis of the gradients of independent components."""

    section: ClassVar[str] = "analysis.jacobian"

    grad_timestep: int

    def __post_init__(self):
        super().__post_init__()
        if self.grad_timestep < 0:
            raise UserError(f"grad_timestep must not be negative, but is {self.grad_timestep}")


@dataclasses.dataclass(frozen=True)
class XplotsConfig:
    """Cross-causation among samples in which an independent component is extreme."""

    section: ClassVar[str] = "analysis.xplots"

    extrema_threshold: float

    def __post_init__(self):
        tail_fraction(self, "extrema_threshold")


@dataclasses.dataclass(frozen=True)
class TsneConfig:
    """Parameters of all t-SNE maps."""

    section: ClassVar[str] = "analysis"

    tsne_seed: int

"""Parameters of the analyses, read from the sections below ``analysis`` of a parameter set in
``hyperparams/interpreting_configs.yml``.

Comments in the YAML file describe the meaning and unit of each field of the classes below, in the
section that the class attribute ``section`` names. This module also declares the options that
several scripts share.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import ClassVar

from common.cli import OneText, count, seed
from common.errors import UserError
from common.options import LogOptions, SaveDirOptions, option
from common.parameters import one_of, positive, tail_fraction
from generative.config import SAMPLE_STARTS
from generative.flags import DataOptions, SamplesOptions
from interventions.flags import DirectionFolderOptions, DirectionOptions

CLUSTERINGS = ("agglomerative", "hdbscan", "kmeans")


def map_dimensions(number: int) -> None:
    """Check the number of dimensions of a t-SNE map.

    Raises:
        UserError: if it is neither 2 nor 3.
    """
    if number not in (2, 3):
        raise UserError(f"n_components_tsne must be 2 or 3, not {number}")


@dataclasses.dataclass(frozen=True)
class AgentHiddenConfig:
    """Parameters of the analysis of the agent's hidden states.

    Attributes:
        informed_or_random_init: folder of the simulated samples: ``informed_init`` for start
            vectors computed by the encoder, ``rand_init`` for random ones.
        num_episodes: number of recorded episodes.
        num_generated_samples: number of simulated samples.
        num_epi_paths: number of episodes whose trajectories are drawn.
        n_components_pca, n_components_ica, n_components_nmf: number of principal components, of
            independent components, and of NMF factors.
        n_components_tsne: number of dimensions of the t-SNE map.
        n_clusters: number of clusters.
        clustering: clustering method, one of CLUSTERINGS.
        nmf_max_iter, ica_max_iter: maximum number of iterations.
        nmf_tol, ica_tol: tolerance below which a fit has converged.
        outlier_max_k: exclusive upper bound of the number of neighbours in the vote of
            ``clustering.find_outliers``.
    """

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
    """Parameters shared by the analyses of simulated samples: principal components, clusters and
    t-SNE map.

    Attributes:
        num_samples: number of simulated samples.
        n_components_pca: number of principal components.
        n_components_tsne: number of dimensions of the t-SNE map.
        n_clusters: number of clusters.
        clustering: clustering method, one of CLUSTERINGS.
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
    """Parameters of the analysis of the environment's states.

    Attributes:
        num_epi_paths: number of samples whose trajectories are drawn.
    """

    section: ClassVar[str] = "analysis.env_h"

    num_epi_paths: int

    def __post_init__(self):
        super().__post_init__()
        positive(self, "num_epi_paths")


@dataclasses.dataclass(frozen=True)
class BottleneckConfig(MapConfig):
    """Parameters of the analysis of the bottleneck vectors."""

    section: ClassVar[str] = "analysis.bottleneck"


@dataclasses.dataclass(frozen=True)
class BehavioursConfig(MapConfig):
    """Parameters of the analysis of behaviours, from the agent's and the environment's states.

    Attributes:
        n_components_env: number of principal coordinates of the environment's state to use.
        timestep_differences: time differences k, in steps; the features of a step include the
            change of the state over the last k steps.
    """

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
    """Parameters of the analysis of the gradients of independent components.

    Attributes:
        grad_timestep: step of the states with respect to which gradients are taken, from 0.
    """

    section: ClassVar[str] = "analysis.jacobian"

    grad_timestep: int

    def __post_init__(self):
        super().__post_init__()
        if self.grad_timestep < 0:
            raise UserError(f"grad_timestep must not be negative, but is {self.grad_timestep}")


@dataclasses.dataclass(frozen=True)
class XplotsConfig:
    """Parameters of figures that show cross-causation (mean gradients between independent
    components) over samples in which one component is extreme.

    Attributes:
        extrema_threshold: share of the samples that counts as extreme at each end of the range of a
            component.
    """

    section: ClassVar[str] = "analysis.xplots"

    extrema_threshold: float

    def __post_init__(self):
        tail_fraction(self, "extrema_threshold")


@dataclasses.dataclass(frozen=True)
class TsneConfig:
    """Parameters of all t-SNE maps.

    Attributes:
        tsne_seed: seed of t-SNE.
    """

    section: ClassVar[str] = "analysis"

    tsne_seed: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnalysisOptions(SaveDirOptions, LogOptions):
    """Options of all analyses."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HiddenAnalysisOptions(DataOptions, DirectionFolderOptions, AnalysisOptions):
    """Options of the two scripts that analyse the agent's hidden states."""

    section: ClassVar[str] = AgentHiddenConfig.section

    num_episodes: int | None = option(None, "number of recorded episodes", type=count,
                                      key=".num_episodes")
    num_generated_samples: int | None = option(None, "number of simulated samples", type=count,
                                               key=".num_generated_samples")
    generated_samples: bool = option(True, "use only the recorded states")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChosenSamplesOptions(SamplesOptions, AnalysisOptions):
    """Options that select the folder and the number of simulated samples."""

    num_samples: int | None = option(None, "number of simulated samples", type=count,
                                     key=".num_samples")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleAnalysisOptions(ChosenSamplesOptions):
    """Options of the scripts of an analysis of simulated samples."""

    precomp_dir: Path | None = option(None, "folder of the precomputed arrays; if not given, that "
                                            "of the analysis in <save_dir>")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrecomputeOptions(AnalysisOptions):
    """Options of the scripts that precompute an analysis."""

    n_clusters: int | None = option(None, "number of clusters", type=count, key=".n_clusters")
    clustering: str | None = option(
        None, "clustering method; hdbscan determines the number of clusters itself",
        choices=CLUSTERINGS, key=".clustering")
    seed: int = option(0, "seed of all random choices except those of t-SNE", type=seed)
    overwrite: bool = option(False, "replace the results for this number of episodes or samples")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlottingOptions(AnalysisOptions):
    """Options of the scripts that draw the results of an analysis."""

    output_dir: Path | None = option(None, "folder to write to; if not given, that of the figures "
                                           "of the analysis in <save_dir>")
    seed: int = option(0, "seed of the order in which points are drawn and of all random "
                          "selections", type=seed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InfluenceOptions(DirectionOptions, ChosenSamplesOptions):
    """Options of the scripts that analyse influences between components."""

    section: ClassVar[str] = BehavioursConfig.section

    sample_ids: str | None = option(
        None, "numbers of the samples to use, or a range: 0 to 100 ends before 100",
        key="analysis.saliency.sample_ids", nargs="+", action=OneText, metavar="ID")
    common_timesteps: tuple[int, ...] | None = option(
        None, "simulated step at which the saliency functions were evaluated, counted from 0; "
              "exactly one step", key="analysis.saliency.common_timesteps", metavar="STEP")
    behaviours_dir: Path | None = option(
        None, "folder of the behaviours found in --num_samples samples; "
              "<save_dir>/combined_agent_env_hx_analysis_precomp if not given")
    behaviours: bool = option(True, "analyse only all samples together, not each behaviour")

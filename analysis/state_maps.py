"""Steps shared by the analyses of states: standardisation, PCA, clusters and a t-SNE map.

Letters in shape comments: N states, D units, P principal components.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import logging
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from analysis.clustering import cluster_means, embed, find_clusters
from analysis.decomposition import (
    PrincipalComponents,
    Standardizer,
    principal_components,
    standardizer_of,
)
from analysis.parameters import AgentHiddenConfig, MapConfig, TsneConfig
from analysis.state_plots import Drawing
from analysis.steps import SimulatedSteps, choose_samples, read_simulated_steps
from common.cli import Parser
from common.palette import DPI
from common.progress import with_progress
from common.results import ResultStore
from common.schemas import Entry, File, Schema
from common.step_results import StepResult, StepResults
from generative.flags import samples_of
from generative.sample_files import SampleFolder

CLUSTERED_SHARE = 0.95  # share of the variance held by the PCs that are clustered and mapped
MAX_NAMED_UNITS = 10  # largest number of units named in a warning

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class StateMap:
    """Computes the shared steps of an analysis and stores their results.

    Attributes:
        config: parameters: numbers of components, clusters and dimensions of the map.
        seed: seed of all random choices except those of t-SNE.
        tsne_seed: seed of t-SNE.
        results: started results to write to; steps that are already stored are not recomputed.
    """

    config: MapConfig | AgentHiddenConfig
    seed: int
    tsne_seed: int
    results: StepResults

    def scale(self, states: np.ndarray, unit: str) -> Standardizer:
        """Compute mean and standard deviation of each unit, with a warning about constant units.

        Args:
            states: states, float32 (N, D).
            unit: word for a unit in the warning, such as "hidden unit".
        """
        def compute() -> StepResult:
            scale = standardizer_of(states)
            if scale.constant:
                names = ", ".join(map(str, scale.constant[:MAX_NAMED_UNITS]))
                more = len(scale.constant) - MAX_NAMED_UNITS
                logger.warning("%s %s%s does not vary over these states; its standard deviation "
                               "counts as 1", unit, names,
                               f" (and {more} more)" if more > 0 else "")
            return {"mean": scale.mean, "std": scale.std}, {"constant_units": scale.constant}

        arrays = self.results.step("scale", compute)
        return Standardizer(arrays["mean"], arrays["std"], ())

    def principal(self, states: np.ndarray,
                  scale: Standardizer) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Compute the principal components of states.

        Args:
            states: states, float32 (N, D).
            scale: mean and standard deviation of each unit.

        Returns:
            Coordinates (N, P); components (P, D); and the first p coordinates (N, p), where p is
            the number that holds 95 % of the variance, but at least the dimensions of the map.
        """
        def compute() -> StepResult:
            standardised = scale.standardise(states)
            return pca_result(principal_components(
                standardised, self.config.n_components_pca, self.seed), standardised)

        arrays = self.results.step("pca", compute)
        number = max(self.results.facts["pca"]["components_for_95_percent"],
                     self.config.n_components_tsne)
        coordinates = arrays["principal"]
        return (coordinates, arrays["components"],
                np.ascontiguousarray(coordinates[:, :number]))

    def clusters(self, rows: np.ndarray, coordinates: np.ndarray | None = None,
                 copy: str = "") -> np.ndarray:
        """Cluster rows with ``find_clusters``.

        Args:
            rows: rows to cluster (N, d).
            coordinates: coordinates of the same states (N, P) whose cluster means are stored;
                ``rows`` if None.
            copy: name of a second entry to store the labels in; empty for none.

        Returns:
            Cluster of each row (N,).
        """
        def compute() -> StepResult:
            fit = find_clusters(rows, self.config.clustering, self.config.n_clusters, self.seed)
            means = fit.means if coordinates is None else cluster_means(coordinates, fit.labels)
            arrays = {"clusters": fit.labels, "cluster_means": means}
            return arrays | ({copy: fit.labels} if copy else {}), {
                "method": self.config.clustering, "clusters": len(fit.means),
                "states_in_none": int((fit.labels < 0).sum()), "fitted_states": fit.fitted_rows}

        return self.results.step("clusters", compute)["clusters"]

    def tsne(self, rows: np.ndarray) -> np.ndarray:
        """Compute the t-SNE map of rows (N, d) with ``embed``; returns coordinates (N, c)."""
        def compute() -> StepResult:
            fit = embed(rows, self.config.n_components_tsne, self.tsne_seed)
            return {"tsne": fit.places}, {"fitted_states": fit.fitted_rows}

        return self.results.step("tsne", compute)["tsne"]


def pca_result(fit: PrincipalComponents, standardised: np.ndarray) -> StepResult:
    """Return components, variances and coordinates of standardised states (N, D), as a step."""
    return ({"components": fit.components, "variances": fit.variances,
             "principal": fit.coordinates(standardised)},
            {"total_variance": fit.total_variance,
             "components_for_95_percent": fit.number_for(CLUSTERED_SHARE)})


class SampleAnalysis:
    """An analysis of simulated samples, configured by the flags of its script.

    Args:
        parser: flag parser of a precomputing or plotting script.
        argv: command-line arguments; those of the process if None.
        config: class of the parameters.
        schema: schema of the results.
        folder: attribute of ``AnalysisFolders`` that holds the folder of the results.
    """

    def __init__(self, parser: Parser, argv: list[str] | None, config: type, schema: Schema,
                 folder: str):
        self.args: argparse.Namespace
        self.args, _, self.parameters = parser.read(argv)
        self.config: Any = self.parameters.get(config)
        self.results = StepResults(
            self.args.precomp_dir or getattr(self.parameters.folders, folder), schema,
            self.config.num_samples)

    @functools.cached_property
    def samples(self) -> SampleFolder:
        return samples_of(self.args, self.parameters)

    @functools.cached_property
    def numbers(self) -> list[int]:
        """Numbers of the analysed samples.

        Raises:
            UserError: if the folder holds too few samples.
        """
        return choose_samples(self.samples, self.config.num_samples)

    def read_steps(self) -> SimulatedSteps:
        """Read rewards, values, actions and terminals at each step of the analysed samples."""
        return read_simulated_steps(self.samples, self.numbers)

    def start(self, **more: Any) -> StateMap:
        """Start or resume the results with the settings of the analysis.

        Args:
            more: additional settings.

        Returns:
            The object that computes the shared steps of the analysis.
        """
        tsne_seed = self.parameters.get(TsneConfig).tsne_seed
        self.results.start({
            "parameters": dataclasses.asdict(self.config), "seed": self.args.seed,
            "tsne_seed": tsne_seed, "samples": str(self.samples.path),
            "samples_made_by": self.samples.description(), "sample_numbers": self.numbers, **more})
        return StateMap(self.config, self.args.seed, tsne_seed, self.results)

    def output(self, schema: Schema, folder: str) -> ResultStore:
        """Open the folder for the figures and check that it can be replaced.

        Args:
            schema: schema of the figures.
            folder: attribute of ``AnalysisFolders`` that holds the default folder.
        """
        store = ResultStore(self.args.output_dir or getattr(self.parameters.folders, folder),
                            schema)
        store.check_replaceable()
        return store


def figure_schema(script: str) -> Schema:
    """Return the schema of a folder with the figures drawn by a script."""
    return Schema(f"figures of {Path(script).name}", script, replaced=True, results={
        "figures": Entry("{}.png", File()), "rotations": Entry("{}.gif", File())})


def save_figures(folder: Path, figures: Iterable[tuple[str, Drawing]]) -> int:
    """Write each figure as soon as it is drawn; returns the number of figures."""
    number = 0
    for name, figure in with_progress(figures, None, "figure"):
        figure.savefig(folder / name, dpi=DPI)
        number += 1
    return number


def replace_figures(store: ResultStore, figures: Iterable[tuple[str, Drawing]],
                    results: StepResults, settings: dict) -> None:
    """Draw figures, replace the previous ones, and print the number of figures and the time.

    Args:
        store: folder for the figures.
        figures: pairs of file name and figure.
        results: precomputed results that are drawn.
        settings: other settings that the figures depend on.
    """
    begin = time.perf_counter()
    with store.replace({"precomp_dir": str(results.path), "number": results.number, **settings,
                        "precomputed": results.settings()}) as temporary:
        number = save_figures(temporary, figures)
    print(f"wrote {number} figures to {store.path} in {time.perf_counter() - begin:.0f} s")

"""Steps shared by the analyses of states (standardisation, PCA, clustering and t-SNE), and by the
scripts that analyse simulated samples.

Letters in shape comments: D units; P principal components, d coordinates that are clustered or
mapped, c dimensions of a t-SNE map.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterable, Iterator
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
from common.palette import DPI
from common.progress import with_progress
from common.results import ResultStore
from common.schemas import Entry, File, Schema
from common.step_results import StepResult, StepResults
from generative.sample_files import SampleFolder

CLUSTERED_SHARE = 0.95  # share of the variance explained by the PCs that are clustered and mapped

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class StateMap:
    """Standardisation, PCA, clusters and t-SNE map of an analysis, computed once and stored.

    Attributes:
        tsne_seed: seed of t-SNE.
        results: folder of the results, opened for writing. Computations whose results are stored
            are not repeated.
    """

    config: MapConfig | AgentHiddenConfig
    seed: int
    tsne_seed: int
    results: StepResults

    def scale(self, states: np.ndarray, unit: str) -> Standardizer:
        """Compute mean and standard deviation of each unit, and log a warning about constant units.

        Args:
            states: states, float32 (N, D).
            unit: word for a unit in the warning, such as "hidden unit".

        Returns:
            Mean and standard deviation of each unit; the field ``constant`` is left empty.
        """
        def compute() -> StepResult:
            scale = standardizer_of(states)
            if scale.constant:
                logger.warning("%s %s does not vary over these states; its standard deviation is "
                               "set to 1", unit, ", ".join(map(str, scale.constant)))
            return {"mean": scale.mean, "std": scale.std}, {"constant_units": scale.constant}

        arrays = self.results.step("scale", compute)
        return Standardizer(arrays["mean"], arrays["std"], ())

    def principal(self, states: np.ndarray,
                  scale: Standardizer) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Standardise states and compute their principal components.

        Args:
            states: states, float32 (N, D).
            scale: mean and standard deviation of each unit.

        Returns:
            Coordinates (N, P); components (P, D); and the ``leading`` coordinates (N, d).
        """
        def compute() -> StepResult:
            standardised = scale.standardise(states)
            return pca_result(principal_components(
                standardised, self.config.n_components_pca, self.seed), standardised)

        arrays = self.results.step("pca", compute)
        coordinates = arrays["principal"]
        return coordinates, arrays["components"], self.leading(coordinates)

    def leading(self, coordinates: np.ndarray) -> np.ndarray:
        """Return the first d principal coordinates (N, d) of (N, P).

        Here, d is the smallest number of components that explain 95 % of the variance, or the
        number of dimensions of the t-SNE map if that is larger. The step "pca" must be stored.
        """
        number = max(self.results.facts["pca"]["components_for_95_percent"],
                     self.config.n_components_tsne)
        return np.ascontiguousarray(coordinates[:, :number])

    def clusters(self, rows: np.ndarray, coordinates: np.ndarray | None = None,
                 copy: str = "") -> np.ndarray:
        """Cluster rows with ``find_clusters``, and store the labels and the means of the clusters.

        Args:
            rows: rows to cluster (N, d).
            coordinates: coordinates of the same states (N, P) whose cluster means are stored;
                ``rows`` if None.
            copy: name of a second entry to store the labels in; empty for none.

        Returns:
            Cluster of each row, NO_CLUSTER for none, int64 (N,).
        """
        def compute() -> StepResult:
            labels, num_fitted = find_clusters(rows, self.config.clustering,
                                               self.config.n_clusters, self.seed)
            means = cluster_means(rows if coordinates is None else coordinates, labels)
            arrays = {"clusters": labels, "cluster_means": means}
            return arrays | ({copy: labels} if copy else {}), {
                "method": self.config.clustering, "clusters": len(means),
                "states_in_none": int((labels < 0).sum()), "fitted_states": num_fitted}

        return self.results.step("clusters", compute)["clusters"]

    def tsne(self, rows: np.ndarray) -> np.ndarray:
        """Compute the t-SNE map of rows (N, d) with ``embed``; return coordinates on it (N, c)."""
        def compute() -> StepResult:
            places, num_fitted = embed(rows, self.config.n_components_tsne, self.tsne_seed)
            return {"tsne": places}, {"fitted_states": num_fitted}

        return self.results.step("tsne", compute)["tsne"]


def pca_result(fit: PrincipalComponents, standardised: np.ndarray) -> StepResult:
    """Return the results of a PCA of standardised states (N, D): the arrays with components,
    variances and coordinates, and facts about the explained variance."""
    return ({"components": fit.components, "variances": fit.variances,
             "principal": fit.coordinates(standardised)},
            {"total_variance": fit.total_variance,
             "components_for_95_percent": fit.number_for(CLUSTERED_SHARE)})


class SampleRun:
    """One run of a script that analyses simulated samples.

    Args:
        config, schema, folder: see ``SampleAnalysis``.
        options: options of the script, ``SampleAnalysisOptions`` and those of the analysis.
        to_read: whether the run reads the results. If the number of samples was not given, it is
            then that of the only results in the folder.

    Attributes:
        samples: folder of the samples.
        results: results of the analysis, to read or to write.
    """

    def __init__(self, config: Any, schema: Schema, folder: str, options: Any,
                 to_read: bool = False):
        self.options, parameters = options, options.parameters
        self.config: Any = parameters.get(config)
        self.samples = options.samples
        path = options.precomp_dir or getattr(parameters.folders, folder)
        self.results = StepResults(path, schema, self.config.num_samples)
        if to_read:
            self.results = StepResults.open(
                path, schema, self.config.num_samples, "--num_samples",
                parameters.is_given(config, "num_samples"))
            self.config = dataclasses.replace(self.config, num_samples=self.results.number)

    @functools.cached_property
    def numbers(self) -> list[int]:
        """Numbers of the analysed samples.

        Raises:
            UserError: if the folder holds fewer than ``config.num_samples`` samples.
        """
        return choose_samples(self.samples, self.config.num_samples)

    def start(self, **more: Any) -> StateMap:
        """Open the results folder with the settings of the analysis. Steps of an unfinished run are
        kept if its settings are the same, and deleted otherwise.

        Args:
            more: additional settings to store, by name.

        Returns:
            The object that computes and stores the steps of the analysis.
        """
        tsne_seed, seed = self.options.parameters.get(TsneConfig).tsne_seed, self.options.seed
        self.results.start({
            "parameters": dataclasses.asdict(self.config), "seed": seed,
            "tsne_seed": tsne_seed, "samples": str(self.samples.path),
            "samples_made_by": self.samples.description(), "sample_numbers": self.numbers, **more})
        return StateMap(self.config, seed, tsne_seed, self.results)


Draw = Callable[[StepResults, SampleFolder, SimulatedSteps, Any, int],
                Iterator[tuple[str, Drawing]]]
"""Function that draws the figures of an analysis from its results, the folder of the samples, their
steps, the parameters and a seed; yields pairs of file name and figure."""


@dataclasses.dataclass(frozen=True)
class SampleAnalysis:
    """Description of an analysis of simulated samples. One script computes its results, another
    draws them.

    Attributes:
        config: class of the parameters, a subclass of ``MapConfig``.
        folder: name of the attribute of ``AnalysisFolders`` that holds the folder of the results.
        plots: name of the attribute of ``AnalysisFolders`` that holds the folder of the figures.
        compute: function that reads the inputs of a run, calls the run's ``start``, and computes
            and stores the results.
        draw: function that draws all figures.
    """

    config: Any
    schema: Schema
    folder: str
    plots: str
    compute: Callable[[SampleRun], None]
    draw: Draw

    def precompute(self, options: Any) -> StepResults:
        """Compute and store the analysis, and return its results.

        Args:
            options: ``SampleAnalysisOptions``, ``PrecomputeOptions``, and those of the analysis.
        """
        run = SampleRun(self.config, self.schema, self.folder, options)
        run.results.check_new(options.overwrite)
        self.compute(run)
        run.results.finish()
        return run.results

    def plot(self, options: Any) -> Path:
        """Draw all figures, and return their folder.

        Args:
            options: ``SampleAnalysisOptions`` and ``PlottingOptions``.
        """
        run = SampleRun(self.config, self.schema, self.folder, options, to_read=True)
        store = ResultStore(
            options.output_dir or getattr(options.parameters.folders, self.plots),
            figure_schema(self.schema.script.replace("precompute", "plotting")))
        store.check_replaceable()
        steps = read_simulated_steps(run.samples, run.numbers)
        replace_figures(store, self.draw(run.results, run.samples, steps, run.config,
                                         options.seed),
                        run.results, {"samples": str(run.samples.path), "seed": options.seed,
                                      "parameters": dataclasses.asdict(run.config)})
        return store.path


def figure_schema(script: str) -> Schema:
    """Return the schema of a folder with the figures drawn by a script."""
    return Schema(f"figures of {Path(script).name}", script, replaced=True, results={
        "figures": Entry("{}.png", File()), "rotations": Entry("{}.gif", File())})


def save_figures(folder: Path, figures: Iterable[tuple[str, Drawing]]) -> int:
    """Write each figure into a folder as soon as it is drawn, and return the number of figures."""
    number = 0
    for name, figure in with_progress(figures, None, "figure"):
        figure.savefig(folder / name, dpi=DPI)
        number += 1
    return number


def replace_figures(store: ResultStore, figures: Iterable[tuple[str, Drawing]],
                    results: StepResults, settings: dict) -> None:
    """Draw figures, replace the previous ones, and print the number of figures and the time.

    Args:
        results: precomputed results from which the figures are drawn.
        settings: other settings that the figures depend on; stored with them.
    """
    begin = time.perf_counter()
    with store.replace({"precomp_dir": str(results.path), "number": results.number, **settings,
                        "precomputed": results.settings()}) as temporary:
        number = save_figures(temporary, figures)
    print(f"wrote {number} figures to {store.path} in {time.perf_counter() - begin:.0f} s")

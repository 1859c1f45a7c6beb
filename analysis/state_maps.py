"""Steps that the analyses of states share: scale, principal components, clusters and a t-SNE map.

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

CLUSTERED_SHARE = 0.95  # of the variance, in the PCs that are clustered and mapped
MAX_NAMED_UNITS = 10  # in a warning

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class StateMap:
    """Computes the shared steps of an analysis into its results.

    Attributes:
        config: numbers of components, clusters and dimensions of the map.
        seed: seed of every random choice except those of t-SNE.
        tsne_seed: seed of t-SNE.
        results: receives the results, which have been started; steps that they hold already are
            not computed again.
    """

    config: MapConfig | AgentHiddenConfig
    seed: int
    tsne_seed: int
    results: StepResults

    def scale(self, states: np.ndarray, unit: str) -> Standardizer:
        """Compute mean and standard deviation of each unit.

        Args:
            states: float32 (N, D).
            unit: name of a unit, such as "hidden unit". Constant units are reported in a warning.
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
        """Find the principal components of states, float32 (N, D).

        Returns:
            Coordinates (N, P); components (P, D); and the first coordinates (N, p), which hold
            95 % of the variance and are at least as many as the map has dimensions.
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
        """Cluster rows (N, d), see ``find_clusters``; returns the cluster of each row (N,).

        Args:
            coordinates: coordinates of the same states (N, P), of which the means are stored; of
                ``rows`` if None.
            copy: another entry that the labels are stored in.
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
        """Map rows (N, d) to the dimensions of the t-SNE map, see ``embed``."""
        def compute() -> StepResult:
            fit = embed(rows, self.config.n_components_tsne, self.tsne_seed)
            return {"tsne": fit.places}, {"fitted_states": fit.fitted_rows}

        return self.results.step("tsne", compute)["tsne"]


def pca_result(fit: PrincipalComponents, standardised: np.ndarray) -> StepResult:
    """Components, their variances, and the coordinates of all states (N, D)."""
    return ({"components": fit.components, "variances": fit.variances,
             "principal": fit.coordinates(standardised)},
            {"total_variance": fit.total_variance,
             "components_for_95_percent": fit.number_for(CLUSTERED_SHARE)})


class SampleAnalysis:
    """An analysis of simulated samples as the flags of its scripts describe it.

    Args:
        parser: flags of a precomputing or a plotting script.
        argv: arguments of the script.
        config: class of the parameters.
        schema: files of the results.
        folder: attribute of ``AnalysisFolders`` with the folder of the results.
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
            UserError: if there are too few.
        """
        return choose_samples(self.samples, self.config.num_samples)

    def read_steps(self) -> SimulatedSteps:
        """Read what happens in each step of the analysed samples."""
        return read_simulated_steps(self.samples, self.numbers)

    def start(self, **more: Any) -> StateMap:
        """Start the results.

        Args:
            more: further settings.

        Returns:
            The shared steps of the analysis.
        """
        tsne_seed = self.parameters.get(TsneConfig).tsne_seed
        self.results.start({
            "parameters": dataclasses.asdict(self.config), "seed": self.args.seed,
            "tsne_seed": tsne_seed, "samples": str(self.samples.path),
            "samples_made_by": self.samples.description(), "sample_numbers": self.numbers, **more})
        return StateMap(self.config, self.args.seed, tsne_seed, self.results)

    def output(self, schema: Schema, folder: str) -> ResultStore:
        """Open the folder of the figures and check that it can be replaced.

        Args:
            folder: attribute of ``AnalysisFolders`` with the folder of the figures.
        """
        store = ResultStore(self.args.output_dir or getattr(self.parameters.folders, folder),
                            schema)
        store.check_replaceable()
        return store


def figure_schema(script: str) -> Schema:
    """Return the schema of a folder of figures that a script draws."""
    return Schema(f"figures of {Path(script).name}", script, replaced=True, results={
        "figures": Entry("{}.png", File()), "rotations": Entry("{}.gif", File())})


def save_figures(folder: Path, figures: Iterable[tuple[str, Drawing]]) -> int:
    """Write figures under their names as they are drawn; returns how many there are."""
    number = 0
    for name, figure in with_progress(figures, None, "figure"):
        figure.savefig(folder / name, dpi=DPI)
        number += 1
    return number


def replace_figures(store: ResultStore, figures: Iterable[tuple[str, Drawing]],
                    results: StepResults, settings: dict) -> None:
    """Draw figures in place of an earlier drawing and print how many.

    Args:
        results: precomputed results that are drawn.
        settings: everything else that the drawing depends on.
    """
    begin = time.perf_counter()
    with store.replace({"precomp_dir": str(results.path), "number": results.number, **settings,
                        "precomputed": results.settings()}) as temporary:
        number = save_figures(temporary, figures)
    print(f"wrote {number} figures to {store.path} in {time.perf_counter() - begin:.0f} s")

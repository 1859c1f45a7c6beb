"""Steps that several analyses do, as results for their writers."""

from __future__ import annotations

import dataclasses
import logging

import numpy as np

from analysis.methods.clustering import cluster_means, find_clusters
from analysis.methods.components import (
    PrincipalComponents,
    Standardizer,
    principal_components,
    standardizer_of,
)
from analysis.methods.embedding import embed
from analysis.parameters.config import MapConfig
from common.step_results import StepResult, StepResults

CLUSTERED_SHARE = 0.95  # of the variance, in the PCs that are clustered and mapped
NAMED_UNITS = 10  # that a warning lists

logger = logging.getLogger(__name__)



@dataclasses.dataclass(frozen=True)
class PrincipalStep:
    """Result of the step of principal components.

    Attributes:
        coordinates: of the states (N, P).
        components: (P, D).
        holding: the first coordinates, which hold 95 % of the variance, at least as many as the
            map has dimensions (N, p).
    """

    coordinates: np.ndarray
    components: np.ndarray
    holding: np.ndarray


def map_states(states: np.ndarray, what: str, config: MapConfig, seed: int, tsne_seed: int,
               results: StepResults) -> None:
    """Standardise states, find their principal components, and cluster and map the principal
    coordinates that hold 95 % of the variance.

    Args:
        states: float32 (N, D).
        what: name of a unit, such as "hidden unit".
        seed: of every random choice but those of t-SNE.
        results: gets the results; steps that it has are not computed again.

    Raises:
        UserError: if there are too few states for what is asked for.
    """
    found = results.step("scale", lambda: scale_result(states, what))
    principal = principal_step(states, scale_from(found), config, seed, results)
    results.step("clusters", lambda: clusters_result(
        principal.holding, config.clustering, config.n_clusters, seed, principal.coordinates))
    results.step("tsne", lambda: tsne_result(principal.holding, config.n_components_tsne,
                                             tsne_seed))


def principal_step(states: np.ndarray, scale: Standardizer, config: MapConfig, seed: int,
                   results: StepResults) -> PrincipalStep:
    """Find the principal components of states, float32 (N, D)."""

    def compute() -> StepResult:
        standardised = scale.standardise(states)
        return pca_result(principal_components(standardised, config.n_components_pca, seed),
                          standardised)

    found = results.step("pca", compute)
    held = max(results.facts["pca"]["components_for_95_percent"], config.n_components_tsne)
    return PrincipalStep(found["principal"], found["components"],
                         np.ascontiguousarray(found["principal"][:, :held]))


def scale_result(states: np.ndarray, what: str) -> StepResult:
    """Mean and standard deviation of the units of states (N, D).

    Args:
        what: is warned about if it does not vary: "hidden unit".
    """
    scale = standardizer_of(states)
    if scale.constant:
        named = ", ".join(map(str, scale.constant[:NAMED_UNITS]))
        more = len(scale.constant) - NAMED_UNITS
        logger.warning("%s %s%s does not vary over these states; its standard deviation counts as "
                       "1", what, named, f" (and {more} more)" if more > 0 else "")
    return {"mean": scale.mean, "std": scale.std}, {"constant_units": scale.constant}


def scale_from(found: dict[str, np.ndarray]) -> Standardizer:
    """The scale that a step stored."""
    return Standardizer(found["mean"], found["std"], ())


def pca_result(fit: PrincipalComponents, standardised: np.ndarray) -> StepResult:
    """Components, their variances, and the coordinates of all states (N, D)."""
    return ({"components": fit.components, "variances": fit.variances,
             "principal": fit.coordinates(standardised)},
            {"total_variance": fit.total_variance,
             "components_for_95_percent": fit.number_for(CLUSTERED_SHARE)})


def clusters_result(rows: np.ndarray, method: str, num_clusters: int, seed: int,
                    places: np.ndarray | None = None) -> StepResult:
    """Clusters of rows (N, d); see ``find_clusters``.

    Args:
        places: of the same rows (N, P), whose means are stored; those of ``rows`` without them.
    """
    fit = find_clusters(rows, method, num_clusters, seed)
    means = fit.means if places is None else cluster_means(places, fit.labels)
    return ({"clusters": fit.labels, "cluster_means": means},
            {"method": method, "clusters": len(fit.means),
             "states_in_none": int((fit.labels < 0).sum()),
             "fitted_states": fit.fitted_rows})


def tsne_result(rows: np.ndarray, num_components: int, seed: int) -> StepResult:
    """A map of rows (N, d); see ``embed``."""
    fit = embed(rows, num_components, seed)
    return {"tsne": fit.places}, {"fitted_states": fit.fitted_rows}

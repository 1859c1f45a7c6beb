"""The analysis of the agent's hidden states, step by step, into a folder."""

from __future__ import annotations

import logging

import numpy as np

from analysis.clustering import find_clusters
from analysis.components import (
    Scale,
    independent_components,
    principal_components,
    scale_of,
    source_signals,
)
from analysis.embedding import embed
from analysis.factorisation import factorise
from analysis.outliers import find_outliers
from analysis.result_files import Result, ResultWriter
from generative.config import AgentHiddenConfig

CLUSTERED_SHARE = 0.95  # of the variance, in the PCs that are clustered and mapped

logger = logging.getLogger(__name__)


def analyse(states: np.ndarray, simulated: np.ndarray | None, config: AgentHiddenConfig, seed: int,
            tsne_seed: int, writer: ResultWriter) -> None:
    """Do all steps and store what they give.

    PCA and ICA are fitted without outliers; every state is projected. Clusters and t-SNE are of
    the principal coordinates that hold 95 % of the variance, not divided by their standard
    deviations; NMF is of the states as recorded, not standardised.

    Args:
        states: recorded, float32 (N, D).
        simulated: float32 (M, D), projected with the same map; None for none.
        seed: of every random choice but those of t-SNE.
        writer: gets the results; steps that it has are not computed again.

    Raises:
        UserError: if there are too few states for what is asked for.
    """
    found = writer.step("scale", lambda: _scale(states))
    scale = Scale(found["mean"], found["std"], ())
    standardised = scale.standardise(states)
    found = writer.step("outliers", lambda: _outliers(standardised, config, seed))
    kept = ~found["outliers"]
    found = writer.step("pca", lambda: _pca(standardised, kept, scale, simulated, config))
    principal, variances = found["principal"], found["variances"]
    held = writer.facts["pca"]["components_for_95_percent"]
    clustered = np.ascontiguousarray(principal[:, :held])
    writer.step("ica", lambda: _ica(principal, kept, variances, config, seed))
    writer.step("clusters", lambda: _clusters(clustered, config, seed))
    writer.step("tsne", lambda: _tsne(clustered, config, tsne_seed))
    writer.step("nmf", lambda: _nmf(states, config, seed))


def _scale(states: np.ndarray) -> Result:
    scale = scale_of(states)
    if scale.constant:
        logger.warning("hidden unit %s does not vary over these states; its standard deviation "
                       "counts as 1", ", ".join(map(str, scale.constant)))
    return Result({"mean": scale.mean, "std": scale.std}, {"constant_units": scale.constant})


def _outliers(standardised: np.ndarray, config: AgentHiddenConfig, seed: int) -> Result:
    found = find_outliers(standardised, config.outlier_max_k, seed)
    retention = 1 - found.mask.mean()
    return Result({"outliers": found.mask, "retention": np.array(retention)},
                  {"neighbours": found.ks, "outliers": int(found.mask.sum()),
                   "retained": float(retention)})


def _pca(standardised: np.ndarray, kept: np.ndarray, scale: Scale, simulated: np.ndarray | None,
         config: AgentHiddenConfig) -> Result:
    fit = principal_components(standardised[kept], config.n_components_pca)
    arrays = {"components": fit.components, "variances": fit.variances,
              "singular_values": fit.singular_values, "principal": fit.coordinates(standardised)}
    if simulated is not None:
        arrays["generated"] = fit.coordinates(scale.standardise(simulated))
    return Result(arrays, {"total_variance": fit.total_variance,
                           "components_for_95_percent": fit.number_for(CLUSTERED_SHARE)})


def _ica(principal: np.ndarray, kept: np.ndarray, variances: np.ndarray,
         config: AgentHiddenConfig, seed: int) -> Result:
    k = config.n_components_ica
    fit = independent_components(principal[kept, :k], variances[:k], config.ica_max_iter,
                                 config.ica_tol, seed)
    _warn_unless_converged("ICA", fit.converged, fit.iterations, "ica_max_iter", "ica_tol")
    return Result({"unmixing": fit.unmixing, "mixing": fit.mixing,
                   "sources": source_signals(principal[:, :k], variances[:k], fit.unmixing)},
                  {"iterations": fit.iterations, "converged": fit.converged})


def _clusters(principal: np.ndarray, config: AgentHiddenConfig, seed: int) -> Result:
    fit = find_clusters(principal, config.clustering, config.n_clusters, seed)
    return Result({"clusters": fit.labels, "cluster_means": fit.means},
                  {"method": config.clustering, "clusters": len(fit.means),
                   "states_in_none": int((fit.labels < 0).sum()),
                   "fitted_states": fit.fitted_rows})


def _tsne(principal: np.ndarray, config: AgentHiddenConfig, seed: int) -> Result:
    fit = embed(principal, config.n_components_tsne, seed)
    return Result({"tsne": fit.places}, {"fitted_states": fit.fitted_rows})


def _nmf(states: np.ndarray, config: AgentHiddenConfig, seed: int) -> Result:
    fit = factorise(states, config.n_components_nmf, config.nmf_max_iter, config.nmf_tol, seed)
    _warn_unless_converged("NMF", fit.converged, fit.iterations, "nmf_max_iter", "nmf_tol")
    return Result({"nmf": fit.weights, "nmf_components": fit.factors, "nmf_min": fit.minimum},
                  {"iterations": fit.iterations, "converged": fit.converged,
                   "relative_error": fit.relative_error})


def _warn_unless_converged(what: str, converged: bool, iterations: int, most: str,
                           tolerance: str) -> None:
    if not converged:
        logger.warning("%s has not converged in %d iterations; raise %s or %s", what, iterations,
                       most, tolerance)

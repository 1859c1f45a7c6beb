"""The analysis of the agent's hidden states, step by step, into a folder."""

from __future__ import annotations

import logging

import numpy as np

from analysis.methods.components import (
    Standardizer,
    independent_components,
    principal_components,
    source_signals,
)
from analysis.methods.factorisation import factorise
from analysis.methods.outliers import find_outliers
from analysis.parameters.config import AgentHiddenConfig
from analysis.results.steps import (
    clusters_result,
    pca_result,
    scale_from,
    scale_result,
    tsne_result,
)
from common.step_results import StepResult, StepResults

logger = logging.getLogger(__name__)


def analyse(states: np.ndarray, simulated: np.ndarray | None, config: AgentHiddenConfig, seed: int,
            tsne_seed: int, results: StepResults) -> None:
    """Do all steps and store what they give.

    PCA and ICA are fitted without outliers; every state is projected. Clusters and t-SNE are of
    the principal coordinates that hold 95 % of the variance, not divided by their standard
    deviations; NMF is of the states as recorded, not standardised.

    Args:
        states: recorded, float32 (N, D).
        simulated: float32 (M, D), projected with the same map; None for none.
        seed: of every random choice but those of t-SNE.
        results: gets the results; steps that it has are not computed again.

    Raises:
        UserError: if there are too few states for what is asked for.
    """
    found = results.step("scale", lambda: scale_result(states, "hidden unit"))
    scale = scale_from(found)
    standardised = scale.standardise(states)
    kept = results.step("kept", lambda: _kept(standardised, config, seed))["kept"]
    found = results.step("pca", lambda: _pca(standardised, kept, scale, simulated, config, seed))
    principal, variances = found["principal"], found["variances"]
    held = results.facts["pca"]["components_for_95_percent"]
    clustered = np.ascontiguousarray(principal[:, :held])
    results.step("ica", lambda: _ica(principal, kept, variances, config, seed))
    results.step("clusters", lambda: clusters_result(clustered, config.clustering,
                                                    config.n_clusters, seed, principal))
    results.step("tsne", lambda: tsne_result(clustered, config.n_components_tsne, tsne_seed))
    results.step("nmf", lambda: _nmf(states, config, seed))


def _kept(standardised: np.ndarray, config: AgentHiddenConfig, seed: int) -> StepResult:
    found = find_outliers(standardised, config.outlier_max_k, seed)
    retention = 1 - found.mask.mean()
    return ({"kept": ~found.mask, "retention": np.array(retention)},
            {"neighbours": found.ks, "outliers": int(found.mask.sum()),
             "retained": float(retention)})


def _pca(standardised: np.ndarray, kept: np.ndarray, scale: Standardizer,
         simulated: np.ndarray | None, config: AgentHiddenConfig, seed: int) -> StepResult:
    fit = principal_components(standardised[kept], config.n_components_pca, seed)
    arrays, facts = pca_result(fit, standardised)
    arrays["singular_values"] = fit.singular_values
    if simulated is not None:
        arrays["generated"] = fit.coordinates(scale.standardise(simulated))
    return arrays, facts


def _ica(principal: np.ndarray, kept: np.ndarray, variances: np.ndarray,
         config: AgentHiddenConfig, seed: int) -> StepResult:
    k = config.n_components_ica
    fit = independent_components(principal[kept, :k], variances[:k], config.ica_max_iter,
                                 config.ica_tol, seed)
    _warn_unless_converged("ICA", fit.converged, fit.iterations, "ica_max_iter", "ica_tol")
    return ({"unmixing": fit.unmixing, "mixing": fit.mixing,
             "sources": source_signals(principal[:, :k], variances[:k], fit.unmixing)},
            {"iterations": fit.iterations, "converged": fit.converged})


def _nmf(states: np.ndarray, config: AgentHiddenConfig, seed: int) -> StepResult:
    fit = factorise(states, config.n_components_nmf, config.nmf_max_iter, config.nmf_tol, seed)
    _warn_unless_converged("NMF", fit.converged, fit.iterations, "nmf_max_iter", "nmf_tol")
    return ({"nmf": fit.weights, "nmf_components": fit.factors, "nmf_min": fit.minimum},
            {"iterations": fit.iterations, "converged": fit.converged,
             "relative_error": fit.relative_error})


def _warn_unless_converged(what: str, converged: bool, iterations: int, most: str,
                           tolerance: str) -> None:
    if not converged:
        logger.warning("%s has not converged in %d iterations; raise %s or %s", what, iterations,
                       most, tolerance)

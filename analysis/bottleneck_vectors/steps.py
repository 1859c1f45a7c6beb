"""The analysis of bottleneck vectors, step by step.

Letters in shape comments: N vectors of each kind, V dimensions, P principal components.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd

from analysis.bottleneck_vectors.sphere import pairwise_cosines, uniformity
from analysis.methods.clustering import NO_CLUSTER
from analysis.methods.components import Standardizer
from analysis.methods.embedding import embed
from analysis.parameters.config import BottleneckConfig
from analysis.results.simulated_steps import ENDED, SimulatedSteps
from analysis.results.steps import clusters_result, principal_step
from common.step_results import StepResult, StepResults
from generative.config import SAMPLE_STARTS

COSINE_VECTORS = 1_400  # whose pairs are stored: just under a million


def analyse(informed: np.ndarray, random: np.ndarray, steps: tuple[SimulatedSteps, SimulatedSteps],
            config: BottleneckConfig, seed: int, tsne_seed: int, results: StepResults) -> None:
    """Find the principal components of informed vectors, project random ones on them, cluster the
    informed ones, map both, and measure how far both are from uniform on the sphere.

    The vectors are centred, but not divided by standard deviations: their variances are the
    result. Clusters are of the principal coordinates that hold 95 % of the variance of the informed
    vectors, the map of all coordinates, among which are those in which the random ones vary.

    Args:
        informed, random: float32 (N, V).
        steps: of the samples that begin with them.
        seed: of every random choice but those of t-SNE.
        results: gets the results; steps that it has are not computed again.

    Raises:
        UserError: if there are too few vectors for what is asked for, or one is 0.
    """
    results.step("uniformity", lambda: _uniformity(informed, random))
    mean = results.step("mean", lambda: ({"mean": informed.mean(axis=0)}, {}))["mean"]
    scale = Standardizer(mean, np.ones_like(mean), ())
    principal = principal_step(informed, scale, config, seed, results)
    projected = results.step("random", lambda: (
        {"random": scale.standardise(random) @ principal.components.T}, {}))["random"]
    labels = results.step("clusters", lambda: clusters_result(
        principal.holding, config.clustering, config.n_clusters, seed,
        principal.coordinates))["clusters"]
    results.step("tsne", lambda: _tsne(principal.coordinates, projected, config.n_components_tsne,
                                       tsne_seed))
    table = outcomes(steps, labels)
    results.step("table", lambda: ({"table": table}, {}))
    results.step("published", lambda: (
        {"published_principal": principal.coordinates, "published_random": projected,
         "published_table": table[table["start"] == SAMPLE_STARTS[0]]}, {}))


def outcomes(steps: tuple[SimulatedSteps, SimulatedSteps], labels: np.ndarray) -> pd.DataFrame:
    """Outcomes of each vector: the auxiliary table.

    Args:
        steps: of the informed and of the random samples.
        labels: clusters of the informed vectors (N,).
    """
    return pd.concat([sample_outcomes(of_start).assign(
        start=start, cluster=labels if start == SAMPLE_STARTS[0] else NO_CLUSTER)
        for start, of_start in zip(SAMPLE_STARTS, steps)], ignore_index=True)


def sample_outcomes(steps: SimulatedSteps) -> pd.DataFrame:
    """Outcomes of samples, one row each: sample, sum_of_reward, ends, mean_value."""
    return pd.DataFrame({
        "sample": steps.by_sample(steps.sample)[:, 0],
        "sum_of_reward": steps.by_sample(steps.reward).sum(axis=1),
        "ends": (steps.by_sample(steps.terminal) > ENDED).any(axis=1).astype(int),
        "mean_value": steps.by_sample(steps.value).mean(axis=1)})


def _uniformity(informed: np.ndarray, random: np.ndarray) -> StepResult:
    return ({"cosines": pairwise_cosines(informed, COSINE_VECTORS),
             "random_cosines": pairwise_cosines(random, COSINE_VECTORS)},
            {start: dataclasses.asdict(uniformity(vectors))
             for start, vectors in zip(SAMPLE_STARTS, (informed, random))})


def _tsne(informed: np.ndarray, random: np.ndarray, num_components: int, seed: int) -> StepResult:
    fit = embed(np.concatenate([informed, random]), num_components, seed)
    return ({"tsne": fit.places[:len(informed)], "random_tsne": fit.places[len(informed):]},
            {"fitted_states": fit.fitted_rows})

"""Behaviours: clusters of the agent's and the environment's states and of their changes.

Letters in shape comments: M samples, T steps of each, F features of a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from analysis.methods.clustering import NO_CLUSTER
from analysis.parameters.config import BehavioursConfig
from analysis.results.steps import (
    clusters_result,
    principal_step,
    scale_from,
    scale_result,
    tsne_result,
)
from common.step_results import StepResult, StepResults

VOTING_STEPS = 5  # a sample's behaviour is the most common cluster over so many first steps


def behaviour_features(agent: np.ndarray, env: np.ndarray,
                       differences: Sequence[int]) -> np.ndarray:
    """Features of every step: the states of agent and environment, then their changes.

    The change over k steps is the state minus that k steps before. A step from which a sample does
    not go back so far gets the change over the sample's first k steps, in which it lies: zeros
    there would put all first steps into clusters of their own.

    Args:
        agent: the agent's states (M, T, D).
        env: the environment's (M, T, P).
        differences: numbers of steps k.

    Returns:
        Float32 (M * T, F), with F = (D + P) * (1 + len(differences)).
    """
    states = np.concatenate([agent, env], axis=2).astype(np.float32)
    steps = np.arange(states.shape[1])
    parts = [states]
    for k in differences:
        begin = np.maximum(steps - k, 0)
        parts.append(states[:, np.minimum(begin + k, len(steps) - 1)] - states[:, begin])
    features = np.concatenate(parts, axis=2)
    return features.reshape(-1, features.shape[2])


def most_common(labels: np.ndarray) -> np.ndarray:
    """The cluster that most of the first VOTING_STEPS steps of each sample are in.

    Steps in no cluster do not vote, unless all are in none. Of several equally common clusters it
    is the one that comes first in the sample.

    Args:
        labels: of all steps, NO_CLUSTER for none (M, T).

    Returns:
        int64 (M,).
    """
    found = np.full(len(labels), NO_CLUSTER, dtype=np.int64)
    for sample, votes in enumerate(labels[:, :VOTING_STEPS]):
        votes = votes[votes != NO_CLUSTER]
        if len(votes):
            clusters, first, counts = np.unique(votes, return_index=True, return_counts=True)
            most = counts == counts.max()
            found[sample] = clusters[most][first[most].argmin()]
    return found


def analyse(features: np.ndarray, num_samples: int, config: BehavioursConfig, seed: int,
            tsne_seed: int, results: StepResults) -> None:
    """Find the behaviours: PCA of the standardised features, t-SNE of the principal coordinates
    that hold 95 % of the variance, clusters on that map, and a vote in each sample.

    Args:
        features: of ``behaviour_features`` (M * T, F).
        seed: of every random choice but those of t-SNE.
        results: gets the results; steps that it has are not computed again.

    Raises:
        UserError: if there are too few steps for what is asked for.
    """
    found = results.step("scale", lambda: scale_result(features, "feature"))
    mapped = principal_step(features, scale_from(found), config, seed, results).holding
    places = results.step("tsne", lambda: tsne_result(mapped, config.n_components_tsne,
                                                     tsne_seed))["tsne"]
    labels = results.step("clusters", lambda: clusters_result(
        places, config.clustering, config.n_clusters, seed))["clusters"]
    results.step("per_sample", lambda: _per_sample(labels.reshape(num_samples, -1)))


def _per_sample(labels: np.ndarray) -> StepResult:
    behaviours = most_common(labels)
    return ({"per_sample": behaviours},
            {"voting_steps": min(VOTING_STEPS, labels.shape[1]),
             "behaviours_of_samples": len(np.unique(behaviours[behaviours >= 0])),
             "samples_in_none": int((behaviours == NO_CLUSTER).sum())})

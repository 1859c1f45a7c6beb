"""Analysis of the agent's hidden states: results and figures.

``interventions.hidden_states_folder`` declares the files.

Letters in shape comments: M simulated states.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pandas as pd

from agents.rollout_files import POSITION_COLUMNS
from analysis.clustering import find_outliers
from analysis.decomposition import factorise, independent_components, principal_components
from analysis.figures import (
    TSNE_NAMES,
    Colourings,
    Figures,
    Variances,
    colour_by_cluster,
    describe_members,
    draw_clusters,
    draw_paths,
    draw_planes,
    draw_space,
    read_clusters,
)
from analysis.parameters import AgentHiddenConfig
from analysis.state_maps import StateMap, pca_result
from analysis.state_plots import Category, Plane, Quantity
from common.step_results import StepResult, StepResults


def analyse(states: np.ndarray, simulated: np.ndarray | None, config: AgentHiddenConfig,
            state_map: StateMap) -> None:
    """Compute outliers, PCA, ICA, clusters, t-SNE and NMF of hidden states, and store the results.

    PCA and ICA are fitted without outliers; every state is projected. Clusters and t-SNE use the
    leading principal coordinates that explain 95 % of the variance (at least as many as the t-SNE
    map has dimensions), not divided by their standard deviations. NMF uses the states as recorded,
    not standardised.

    Args:
        states: recorded states, float32 (N, D).
        simulated: simulated states to project onto the same components, float32 (M, D), or None.
        state_map: computes standardisation, clusters and t-SNE, and stores all results.

    Raises:
        UserError: if there are too few states for one of these computations.
    """
    results, seed = state_map.results, state_map.seed
    scale = state_map.scale(states, "hidden unit")
    standardised = scale.standardise(states)

    def find_kept() -> StepResult:
        outliers, neighbours = find_outliers(standardised, config.outlier_max_k, seed)
        retention = 1 - outliers.mean()
        return ({"kept": ~outliers, "retention": np.array(retention)},
                {"neighbours": neighbours, "outliers": int(outliers.sum()),
                 "retained": float(retention)})

    kept = results.step("kept", find_kept)["kept"]

    def find_components() -> StepResult:
        fit = principal_components(standardised[kept], config.n_components_pca, seed)
        arrays, facts = pca_result(fit, standardised)
        arrays["singular_values"] = fit.singular_values
        if simulated is not None:
            arrays["generated"] = fit.coordinates(scale.standardise(simulated))
        return arrays, facts

    arrays = results.step("pca", find_components)
    principal = arrays["principal"]
    leading = state_map.leading(principal)
    k = config.n_components_ica
    results.step("ica", lambda: independent_components(
        principal[:, :k], kept, arrays["variances"][:k], config.ica_max_iter, config.ica_tol, seed))
    state_map.clusters(leading, principal)
    state_map.tsne(leading)
    results.step("nmf", lambda: factorise(states, config.n_components_nmf, config.nmf_max_iter,
                                          config.nmf_tol, seed))


def draw_figures(results: StepResults, steps: pd.DataFrame, action_labels: Sequence[str],
                 num_paths: int, seed: int) -> Figures:
    """Draw the figures of the hidden states: trajectories, projections and clusters.

    Args:
        results: precomputed results; simulated states are drawn if there are any.
        steps: steps of the episodes that the results cover, from ``read_recorded_steps``.
        action_labels: names of the actions in the game.
        num_paths: number of episodes whose trajectories are drawn.

    Raises:
        UserError: if a file is missing or damaged, or belongs to other episodes.
    """
    num_states = len(steps)
    episodes = steps["episode"].to_numpy()
    principal = results.read("principal", num_states)  # (N, P)
    variances = Variances(results, principal)
    labels, num_clusters = read_clusters(results, num_states)
    title = f"{num_states} hidden states of {results.number} episodes"
    space = Plane(principal[:, :3], variances.axis_names, title)
    if results.other_number is not None:
        simulated = results.read("generated")
        space = dataclasses.replace(
            space, others=simulated[:, :3], others_name="simulated",
            title=f"{title}, {len(simulated)} simulated ones of {results.other_number} samples in "
                  "black")
    plane = space.dimensions(2)
    recorded = dataclasses.replace(plane, others=None, title=title)
    tsne = Plane(results.read("tsne", num_states)[:, :2], TSNE_NAMES[:2], title)
    colourings = colour_recorded_steps(results, steps, action_labels, labels, num_clusters)

    def describe_episode(episode: int) -> str:
        rewarded = steps["rewarded"][episodes == episode]
        return f"{len(rewarded)} steps, {'rewarded' if rewarded.any() else 'no reward'}"

    yield from draw_paths(recorded, episodes, "episode", num_paths, describe_episode, seed)
    yield from draw_planes({"pca": plane, "tsne": tsne}, colourings, seed)
    yield from draw_space(space, colourings, ("cluster", "value"), seed)
    yield from variances.draw(title)
    yield from draw_clusters(
        (recorded, tsne), labels, num_clusters, lambda cluster: describe_members(
            labels == cluster, episodes, "episode", steps["value"].to_numpy(),
            steps["action"].to_numpy(), action_labels),
        most=num_clusters)


def colour_recorded_steps(results: StepResults, steps: pd.DataFrame, action_labels: Sequence[str],
                          labels: np.ndarray, num_clusters: int) -> Colourings:
    """Return colourings of recorded states by the data of their step (such as value and action),
    cluster, strongest NMF factor and strongest IC.

    The strongest factor has the largest product of weight and norm; the strongest IC has the
    coordinate with the largest absolute value.

    Args:
        results: precomputed results.
        steps: recorded steps, from ``read_recorded_steps``.
        labels: cluster of each state, -1 for none (N,).
    """
    num_states = len(labels)
    of = {name: values.to_numpy() for name, values in steps.items()}
    weights = (results.read("nmf", num_states)
               * np.linalg.norm(results.read("nmf_components"), axis=1))
    sources = np.abs(results.read("sources", num_states))
    return {
        "entropy": Quantity(of["entropy"], "entropy of the policy (nats)"),
        "likeliest_action": Category(of["likeliest_action"], "most likely action",
                                     tuple(action_labels)),
        "action": Category(of["action"], "action taken", tuple(action_labels)),
        "cluster": colour_by_cluster(labels, num_clusters),
        "nmf_factor": Category(weights.argmax(axis=1), "strongest NMF factor",
                               tuple(f"factor {i}" for i in range(weights.shape[1])),
                               numbered=True),
        "ic_factor": Category(sources.argmax(axis=1), "strongest IC",
                              tuple(f"IC {i}" for i in range(sources.shape[1])),
                              numbered=True),
        "episode_length": Quantity(of["length"], "length of the episode (steps)"),
        "part_of_episode": Quantity(of["part"], "part of the episode (0 first, 1 last step)"),
        "done": Category(of["done"].astype(int), "last step", ("before it", "last step")),
        "value": Quantity(of["value"], "value estimate"),
        "episode_rewarded": Category(of["rewarded"].astype(int), "reward in the episode",
                                     ("none", "some")),
        "reward": Quantity(of["reward"], "reward of the step"),
        **{name: Quantity(of[name], f"{name[-1]} of the player (cells)")
           for name in POSITION_COLUMNS if name in of},
    }

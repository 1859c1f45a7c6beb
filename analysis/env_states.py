"""Analysis of the simulated environment's states: files and figures.

Layout of ``analysis/env_analysis_precomp/``, as published except for the files marked *; N is the
number of simulated samples, and rows are the steps of sample 0, then of sample 1, and so on::

    pca_data_env_N                  principal coordinates (rows, P)
    pcomponents_env_N               principal components (P, E)
    clusters_env_N                  cluster of each row, -1 for none (rows,)
    cluster_means_env_N             mean principal coordinates of each cluster (C, P)
    tsne_env_N                      coordinates on the t-SNE map (rows, 2)
    mu_env_N *, std_env_N *         mean and standard deviation of each unit (E,)
    pc_variances_env_N *            variances along the principal components (P,)

All are ``.npy`` files; ``settings_N.json`` * holds the settings and facts about each step.

Letters in shape comments: E units of the environment's state, C clusters.
"""

from __future__ import annotations

import numpy as np

from analysis.figures import (
    TSNE_NAMES,
    Figures,
    Variances,
    central_frames,
    colour_by_cluster,
    colour_steps,
    describe_members,
    draw_clusters,
    draw_paths,
    draw_planes,
    draw_space,
    read_clusters,
)
from analysis.parameters import EnvHiddenConfig
from analysis.state_maps import SampleAnalysis, SampleRun
from analysis.state_plots import Plane
from analysis.steps import ENDED, SimulatedSteps, read_simulated_states
from common.schemas import Array, Entry, Npy, Schema
from common.step_results import STEP_SETTINGS, StepResults
from generative.sample_files import SampleFolder

ENV_STATE_FILES = Schema(
    "results for {} samples", "analysis/env_h_analysis_precompute.py", items={
        "principal": Entry("pca_data_env_{}.npy", Npy(Array(np.floating, "N P"))),
        "components": Entry("pcomponents_env_{}.npy", Npy(Array(np.floating, "P E"))),
        "clusters": Entry("clusters_env_{}.npy", Npy(Array(np.integer, "N"))),
        "cluster_means": Entry("cluster_means_env_{}.npy", Npy(Array(np.floating, "C P"))),
        "tsne": Entry("tsne_env_{}.npy", Npy(Array(np.floating, "N T"))),
        "mean": Entry("mu_env_{}.npy", Npy(Array(np.floating, "E"))),
        "std": Entry("std_env_{}.npy", Npy(Array(np.floating, "E"))),
        "variances": Entry("pc_variances_env_{}.npy", Npy(Array(np.floating, "P")))},
    settings_name="settings_{}.json", flag="--precomp_dir", setting_types=STEP_SETTINGS)


def compute(run: SampleRun) -> None:
    """Standardise the states of all steps and find their principal components. Cluster the
    principal coordinates that explain 95 % of the variance, and compute their t-SNE map.

    Raises:
        UserError: if samples are missing, damaged or too few.
    """
    states = read_simulated_states(run.samples, "env_h", run.numbers)  # (rows, E)
    print(f"{len(states)} states of {len(run.numbers)} samples", flush=True)
    state_map = run.start()
    scale = state_map.scale(states, "unit of the environment's state")
    coordinates, _, leading = state_map.principal(states, scale)
    state_map.clusters(leading, coordinates)
    state_map.tsne(leading)


def draw_figures(results: StepResults, samples: SampleFolder, steps: SimulatedSteps,
                 config: EnvHiddenConfig, seed: int) -> Figures:
    """Draw the figures of the environment's states: trajectories, projections and clusters.

    Args:
        results: precomputed results.
        samples: folder of the samples.
        config: parameters; only ``num_epi_paths``, the number of trajectories, is used.

    Raises:
        UserError: if a file is missing or damaged, or belongs to other samples.
    """
    num_states = len(steps.sample)
    principal = results.read("principal", num_states)  # (rows, P)
    labels, num_clusters = read_clusters(results, num_states)
    means = results.read("cluster_means")
    variances = Variances(results, principal)
    title = (f"{num_states} states of the environment in {steps.num_samples} simulated samples of "
             f"{steps.num_steps} steps")
    space = Plane(principal[:, :3], variances.axis_names, title)
    plane = space.dimensions(2)
    tsne = Plane(results.read("tsne", num_states)[:, :2], TSNE_NAMES[:2], title)
    colourings = colour_steps(steps)
    colourings["cluster"] = colour_by_cluster(labels, num_clusters)

    def describe_sample(sample: int) -> str:
        rows = steps.sample == sample
        return (f"reward {steps.reward[rows].sum():.1f}, "
                f"{'ends' if steps.terminal[rows].max() > ENDED else 'continues'}")

    yield from draw_paths(plane, steps.sample, "sample", config.num_epi_paths, describe_sample,
                          seed)
    yield from draw_planes({"pca": plane, "tsne": tsne}, colourings, seed)
    yield from draw_space(space, colourings, ("cluster", "value"), seed)
    yield from variances.draw(title)
    yield from draw_clusters(
        (plane, tsne), labels, num_clusters,
        lambda cluster: describe_members(labels == cluster, steps.sample, "sample", steps.value,
                                         steps.action, steps.action_labels),
        lambda cluster: central_frames(samples, labels == cluster, principal, means[cluster],
                                       steps.sample, steps.step))


ENV_STATES = SampleAnalysis(EnvHiddenConfig, ENV_STATE_FILES, "env_states", "env_state_plots",
                            compute, draw_figures)

"""Behaviours: clusters of the agent's and the environment's states and of their changes.

A behaviour is a cluster of steps. The behaviour of a sample is the most common cluster among the
first VOTING_STEPS steps of the sample.

Layout of ``analysis/combined_agent_env_hx_analysis_precomp/``, as published except for the files
marked *; N is the number of simulated samples, and rows are the steps of sample 0, then of sample
1, and so on::

    clusters_combined_agent_env_hx_N        cluster of each step, -1 for none (rows,)
    cluster_means_combined_agent_env_hx_N   mean position of each of C clusters on the t-SNE map
                                            (C, 3)
    tsne_combined_agent_env_hx_N            coordinates on the t-SNE map (rows, 3)
    clusters_per_sample_N                   behaviour of each sample, -1 for none (N,)
    pcomponents_combined_agent_env_hx_N *, pc_variances_combined_agent_env_hx_N *,
    pca_data_combined_agent_env_hx_N *      principal components (P, F), variances (P,),
                                            principal coordinates (rows, P)
    mu_combined_agent_env_hx_N *,
    std_combined_agent_env_hx_N *           mean and standard deviation of the features (F,)

All are ``.npy`` files; ``settings_N.json`` * holds the settings and facts about each step.

Letters in shape comments: F features per step, B behaviours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase, SubFigure

from analysis.clustering import NO_CLUSTER
from analysis.env_states import ENV_STATE_FILES
from analysis.figures import (
    TSNE_NAMES,
    Colourings,
    Figures,
    Variances,
    can_draw,
    colour_by_cluster,
    colour_steps,
    draw_planes,
    draw_space,
    read_clusters,
)
from analysis.parameters import BehavioursConfig, EnvHiddenConfig, SampleAnalysisOptions
from analysis.state_maps import SampleAnalysis, SampleRun, StateMap
from analysis.state_plots import COLOUR_MAP, NO_CATEGORY_COLOUR, ClusterPlots, Plane
from analysis.steps import ENDED, SimulatedSteps
from common.cli import count
from common.errors import UserError
from common.files import sha256
from common.game_constants import NUM_ACTIONS
from common.options import option
from common.palette import SKY_BLUE, VERMILION
from common.schemas import Array, Entry, Npy, Schema
from common.step_results import STEP_SETTINGS, StepResult, StepResults
from common.tables import with_minus
from common.video import enlarge, mark_action
from generative.sample_files import SampleFolder

VOTING_STEPS = 5  # number of first steps whose most common cluster is the sample's behaviour
NUM_STRIPS = 4  # number of samples per behaviour whose frames are shown
BEHAVIOUR_FILES = Schema(
    "results for {} samples", "analysis/combined_agent_env_hx_analysis_precompute.py", items={
        "clusters": Entry("clusters_combined_agent_env_hx_{}.npy", Npy(Array(np.integer, "N"))),
        "cluster_means": Entry("cluster_means_combined_agent_env_hx_{}.npy",
                               Npy(Array(np.floating, "C T"))),
        "tsne": Entry("tsne_combined_agent_env_hx_{}.npy", Npy(Array(np.floating, "N T"))),
        "per_sample": Entry("clusters_per_sample_{}.npy", Npy(Array(np.integer, "M"))),
        "components": Entry("pcomponents_combined_agent_env_hx_{}.npy",
                            Npy(Array(np.floating, "P D"))),
        "variances": Entry("pc_variances_combined_agent_env_hx_{}.npy",
                           Npy(Array(np.floating, "P"))),
        "principal": Entry("pca_data_combined_agent_env_hx_{}.npy", Npy(Array(np.floating, "N P"))),
        "mean": Entry("mu_combined_agent_env_hx_{}.npy", Npy(Array(np.floating, "D"))),
        "std": Entry("std_combined_agent_env_hx_{}.npy", Npy(Array(np.floating, "D")))},
    settings_name="settings_{}.json", flag="--precomp_dir", setting_types=STEP_SETTINGS)


def behaviour_features(agent: np.ndarray, env: np.ndarray,
                       differences: Sequence[int]) -> np.ndarray:
    """Compute the features of every step: the states of agent and environment, then the changes
    of these states.

    The change over k steps is the state minus the state k steps earlier. Steps before step k of a
    sample get the change from step 0 to step k, because zeros would put the first steps of all
    samples into separate clusters.

    Args:
        agent: hidden states of the agent (M, T, D).
        env: principal coordinates of the environment's states (M, T, P).
        differences: time differences k, in steps.

    Returns:
        Features, float32 (M * T, F), with F = (D + P) * (1 + len(differences)).
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
    """Find the most common cluster among the first VOTING_STEPS steps of each sample.

    Steps without a cluster do not vote. If several clusters are equally common, the one that occurs
    first in the sample wins.

    Args:
        labels: cluster of each step, NO_CLUSTER for none (M, T).

    Returns:
        Cluster of each sample, NO_CLUSTER if none of its first steps has one, int64 (M,).
    """
    behaviours = np.full(len(labels), NO_CLUSTER, dtype=np.int64)
    for sample, votes in enumerate(labels[:, :VOTING_STEPS]):
        votes = votes[votes != NO_CLUSTER]
        if len(votes):
            clusters, first, counts = np.unique(votes, return_index=True, return_counts=True)
            most = counts == counts.max()
            behaviours[sample] = clusters[most][first[most].argmin()]
    return behaviours


def compute(run: SampleRun) -> None:
    """Find the behaviours of the samples of a run, and store them; see ``analyse``.

    Raises:
        UserError: see ``read_features`` and ``analyse``.
    """
    features, settings = read_features(run)
    analyse(features, len(run.numbers), run.start(**settings))


def analyse(features: np.ndarray, num_samples: int, state_map: StateMap) -> None:
    """Find and store the behaviours of samples, as clusters on a t-SNE map of the principal
    coordinates. The behaviour of a sample is found by a vote of the sample's first steps.

    Args:
        features: result of ``behaviour_features`` (M * T, F).
        num_samples: number of samples, M.
        state_map: computes and stores PCA, t-SNE and clusters.

    Raises:
        UserError: if there are too few steps for PCA, t-SNE or the clusters.
    """
    _, _, leading = state_map.principal(features, state_map.scale(features, "feature"))
    labels = state_map.clusters(state_map.tsne(leading)).reshape(num_samples, -1)

    def vote() -> StepResult:
        behaviours = most_common(labels)
        return ({"per_sample": behaviours},
                {"voting_steps": min(VOTING_STEPS, labels.shape[1]),
                 "behaviours_of_samples": len(np.unique(behaviours[behaviours >= 0])),
                 "samples_in_none": int((behaviours == NO_CLUSTER).sum())})

    state_map.results.step("per_sample", vote)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvCoordinatesOptions(SampleAnalysisOptions):
    """Options that select the samples, and the file with the environment's principal
    coordinates."""

    env_precomp_dir: Path | None = option(
        None, f"folder of the environment's principal coordinates, from {ENV_STATE_FILES.script}; "
              "<save_dir>/env_analysis_precomp if not given")
    num_env_samples: int | None = option(
        None, "number of samples from which the environment's coordinates were computed; it is "
              "part of their file names", type=count, key="analysis.env_h.num_samples")


def read_features(run: SampleRun) -> tuple[np.ndarray, dict[str, str]]:
    """Compute the features of all steps in the samples of a run, and print the numbers of steps,
    samples and features.

    Returns:
        Features (M * T, F), and the path and checksum of the file with the environment's
        coordinates, as settings of the results.

    Raises:
        UserError: if samples or coordinates are missing, damaged or too few, or if the coordinates
            belong to other samples.
    """
    parameters = run.options.parameters
    agent = run.samples.stacked_field("hidden_states", run.numbers)
    env_results = StepResults.open(
        run.options.env_precomp_dir or parameters.folders.env_states, ENV_STATE_FILES,
        parameters.get(EnvHiddenConfig).num_samples, "--num_env_samples",
        parameters.is_given(EnvHiddenConfig, "num_samples"))
    env = read_env_coordinates(env_results, run.samples, run.numbers, agent.shape[1],
                               run.config.n_components_env)
    features = behaviour_features(agent, env, run.config.timestep_differences)
    print(f"{len(features)} steps of {len(run.numbers)} samples, {features.shape[1]} features",
          flush=True)
    file = env_results.file("principal")
    return features, {"env_coordinates": str(file), "env_coordinates_sha256": sha256(file)}


def read_env_coordinates(results: StepResults, samples: SampleFolder, numbers: list[int],
                         num_steps: int, num_components: int) -> np.ndarray:
    """Read the first principal coordinates of the environment's states.

    Args:
        results: results of env_h_analysis_precompute.py.
        samples: folder of the samples.
        numbers: numbers of the M samples.
        num_steps: number of steps per sample, T.
        num_components: number of principal components to read, P.

    Returns:
        Principal coordinates (M, T, P).

    Raises:
        UserError: if the file is missing or damaged, has too few samples or components, or belongs
            to other samples.
    """
    path, script = results.file("principal"), ENV_STATE_FILES.script
    rows = results.read("principal", results.number * num_steps)
    if results.number < len(numbers) or rows.shape[1] < num_components:
        raise UserError(f"{path} has {rows.shape[1]} principal components of the states in "
                        f"{results.number} samples, but n_components_env is {num_components} and "
                        f"num_samples is {len(numbers)}; run {script} with more")
    settings = results.settings("samples", "sample_numbers", "samples_made_by")
    if settings and (settings["sample_numbers"][:len(numbers)] != numbers
                     or settings["samples_made_by"] != samples.description()):
        raise UserError(f"{path} was computed from {settings['samples']}, which does not hold the "
                        f"samples of {samples.path}; run {script} on these samples")
    return rows[:len(numbers) * num_steps, :num_components].reshape(len(numbers), num_steps, -1)


FRAME_FACTOR = 2  # frames are enlarged to make the action's arrow readable


def action_shares(actions: np.ndarray) -> np.ndarray:
    """Compute the frequency of each action, as a share of all known actions (A,).

    Args:
        actions: actions, -1 where unknown, of any shape.
    """
    known = actions[actions >= 0]
    return np.bincount(known, minlength=NUM_ACTIONS) / max(len(known), 1)


def plot_behaviour(behaviour: int, note: str, clusters: ClusterPlots, members: np.ndarray,
                   values: np.ndarray, actions: np.ndarray, action_labels: Sequence[str]
                   ) -> tuple[Figure, SubFigure]:
    """Draw one behaviour: the positions of its steps, and the actions and values of its samples.

    Args:
        note: text after the number in the title.
        members: whether each sample shows the behaviour, bool (M,); if no sample does, the panels
            show only the values and actions of all samples.
        values: value estimates of the agent (M, T).
        actions: action that led to each step, -1 if unknown (M, T).
        action_labels: names of the actions in the game.

    Returns:
        The figure, and its empty lower subfigure, which has room for the frames of NUM_STRIPS
        samples, see ``draw_strips``.
    """
    heights = (4.6, (13 / values.shape[1] + 0.15) * NUM_STRIPS + 0.6)
    figure = Figure(figsize=(15, sum(heights)), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=heights)
    left, right = above.subfigures(1, 2, width_ratios=(1, 2))
    clusters.draw(left, behaviour, "behaviour")
    frequency_axes, value_axes = right.subplots(1, 2)
    _draw_actions(frequency_axes, action_shares(actions[members]), action_shares(actions),
                  action_labels)
    for rows, colour, label in ((values, "#777777", f"all {len(values)} samples"),
                                (values[members], VERMILION, f"{members.sum()} of the behaviour")):
        if len(rows):
            low, middle, high = np.quantile(rows, (0.25, 0.5, 0.75), axis=0)
            value_axes.fill_between(range(len(middle)), low, high, color=colour, alpha=0.25,
                                    linewidth=0)
            value_axes.plot(middle, color=colour, marker=".", label=label)
    value_axes.set(xlabel="step of the sample", ylabel="value estimate",
                   title="value: median and quartiles of the samples")
    value_axes.grid(alpha=0.3)
    right.legend(loc="outside lower center", ncols=2, fontsize=9)
    figure.suptitle(with_minus(f"Behaviour {behaviour}: {note}"), fontsize=11)
    return figure, below


def plot_overview(sizes: np.ndarray, in_none: int, labels: np.ndarray, shares: np.ndarray,
                  action_labels: Sequence[str], title: str) -> Figure:
    """Draw, for each behaviour, the number of samples that show it, the number of samples in its
    cluster at each step, and the frequencies of actions in the samples that show it.

    Args:
        sizes: number of samples of each behaviour (B,).
        in_none: number of samples without a behaviour.
        labels: cluster of each step (M, T).
        shares: share of each action in the samples of each behaviour (B, A); NaN for a behaviour
            without samples.
        action_labels: names of the actions in the game.
    """
    numbers = np.arange(len(sizes))
    steps = np.stack([(labels == number).sum(axis=0) for number in numbers])  # (B, T)
    taken = np.flatnonzero(np.nansum(shares, axis=0) > 0)
    figure = Figure(figsize=(11, 2 + 0.3 * max(len(sizes), 8)), layout="constrained")
    bars, times, actions = figure.subplots(1, 3)
    bars.barh(numbers, sizes, color=SKY_BLUE, height=0.7)
    for number, size in zip(numbers, sizes):
        bars.annotate(f" {size}", (size, number), va="center", fontsize=8)
    bars.margins(x=0.15)
    bars.set(xlabel="samples", ylabel="behaviour", title=f"samples ({in_none} without behaviour)")
    image = times.imshow(steps, aspect="auto", cmap=COLOUR_MAP, interpolation="nearest", vmin=0)
    times.set(xlabel="step of the sample", ylabel="behaviour", title="steps in the cluster")
    figure.colorbar(image, ax=times, label="samples")
    image = actions.imshow(np.ma.masked_invalid(shares[:, taken]), aspect="auto", cmap=COLOUR_MAP,
                           vmin=0, vmax=1, interpolation="nearest")
    actions.set(ylabel="behaviour", title="actions (white: no samples)")
    actions.set_xticks(range(len(taken)), [action_labels[number] for number in taken], rotation=45,
                       ha="right")
    figure.colorbar(image, ax=actions, label="share of the actions")
    bars.set_ylim(len(sizes) - 0.5, -0.5)
    for axes in (bars, times, actions):
        axes.set_yticks(numbers)
        axes.tick_params(labelsize=8)
    figure.suptitle(title, fontsize=11)
    return figure


def _draw_actions(axes: Axes, shares: np.ndarray, of_all: np.ndarray,
                  action_labels: Sequence[str]) -> None:
    taken = np.flatnonzero((shares > 0) | (of_all > 0))
    places = np.arange(len(taken))
    axes.barh(places - 0.2, shares[taken], height=0.38, color=VERMILION)
    axes.barh(places + 0.2, of_all[taken], height=0.38, color=NO_CATEGORY_COLOUR)
    axes.set_yticks(places, [action_labels[number] for number in taken])
    axes.invert_yaxis()
    axes.set(xlabel="share of the actions that led to the steps", title="actions", xlim=(0, 1))


def draw_strips(figure: FigureBase, samples: SampleFolder, numbers: Sequence[int],
                actions: np.ndarray, voting: np.ndarray) -> None:
    """Draw the frames of samples, one sample per row. Each frame is marked with the action
    that led to it.

    Args:
        samples: folder of the samples.
        actions: action that led to each step, -1 if unknown (n, T).
        voting: whether each step is in the cluster of the behaviour; such frames get a coloured
            border, bool (n, T).
    """
    panels = figure.subplots(len(numbers), actions.shape[1], squeeze=False)
    for sample, frames in enumerate(samples.stacked_field("frames", numbers)):
        for step, axes in enumerate(panels[sample]):
            frame = enlarge(frames[step], FRAME_FACTOR)
            if actions[sample, step] >= 0:
                frame = mark_action(frame, int(actions[sample, step]))
            axes.imshow(frame)
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set(color=VERMILION if voting[sample, step] else "white", linewidth=3)
            if sample == 0:
                axes.set_title(f"step {step}", fontsize=8)
        panels[sample, 0].set_ylabel(f"sample\n{numbers[sample]}", fontsize=8, rotation=0,
                                     ha="right", va="center")


def draw_figures(results: StepResults, samples: SampleFolder, steps: SimulatedSteps,
                 config: BehavioursConfig, seed: int) -> Figures:
    """Draw the figures of the principal components, the t-SNE map, and the behaviours.

    Args:
        results: precomputed results.
        samples: folder of the samples.
        config: ignored; the figures of all analyses are drawn with the same arguments.

    Raises:
        UserError: if a file is missing or damaged, or belongs to other samples.
    """
    num_states = len(steps.sample)
    title = (f"{num_states} steps of {steps.num_samples} simulated samples: states of agent and "
             "environment, and their changes")
    is_published = not results.settings_file.exists()
    coordinates = results.read("tsne", None if is_published else num_states)
    tsne = Plane(coordinates, TSNE_NAMES[:coordinates.shape[1]], title)
    if is_published and len(coordinates) != num_states:
        # Published results omit the first steps of each sample, and do not store how many.
        print("can draw only the clusters on the map: "
              f"{results.file('tsne')} has {len(coordinates)} rows for {num_states} steps",
              flush=True)
        clusters: Colourings = {
            "cluster": colour_by_cluster(*read_clusters(results, len(coordinates)))}
        yield from draw_planes({"tsne": tsne.dimensions(2)}, clusters, seed)
        yield from draw_space(tsne, clusters, clusters, seed)
        return
    labels, number = read_clusters(results, num_states)
    per_sample = results.read("per_sample", steps.num_samples)
    planes = {}
    if can_draw("figures of principal components", results, "principal"):
        principal = results.read("principal", num_states)
        variances = Variances(results, principal)
        planes["pca"] = Plane(principal[:, :2], variances.axis_names[:2], title)
        yield from variances.draw(title)
    planes["tsne"] = tsne.dimensions(2)
    colourings = colour_steps(steps)
    colourings["cluster"] = colour_by_cluster(labels, number)
    colourings["behaviour"] = colour_by_cluster(np.repeat(per_sample, steps.num_steps), number,
                                                "behaviour", "behaviour of the sample")
    yield from draw_planes(planes, colourings, seed)
    yield from draw_space(tsne, colourings, ("cluster", "value"), seed)
    yield from _draw_behaviours(samples, steps, labels, per_sample, number, tsne.dimensions(2))


def _draw_behaviours(samples: SampleFolder, steps: SimulatedSteps, labels: np.ndarray,
                     per_sample: np.ndarray, number: int, plane: Plane) -> Figures:
    """Draw an overview of the behaviours and one figure per behaviour.

    Args:
        samples: folder of the samples.
        labels: cluster of each step, -1 for none (M * T,).
        per_sample: behaviour of each sample, -1 for none (M,).
        plane: t-SNE map of all steps.
    """
    plots, labels = ClusterPlots([plane], labels), steps.by_sample(labels)  # (M, T)
    values, actions = steps.by_sample(steps.value), steps.by_sample(steps.action)
    ends = (steps.by_sample(steps.terminal) > ENDED).any(axis=1)
    sizes = np.bincount(per_sample[per_sample >= 0], minlength=number)
    shares = np.stack([action_shares(actions[per_sample == i]) for i in range(number)])
    shares[sizes == 0] = np.nan
    yield "behaviours_overview.png", plot_overview(
        sizes, int((per_sample < 0).sum()), labels, shares, steps.action_labels,
        f"{number} behaviours in {len(per_sample)} simulated samples; a sample shows the most "
        f"common cluster of its first {VOTING_STEPS} steps")
    for behaviour in range(number):
        members = per_sample == behaviour
        inside = labels == behaviour  # (M, T)
        note = (f"{members.sum()} of {len(members)} samples; {inside.sum()} of {inside.size} steps "
                f"are in the cluster")
        if members.any():
            note += (f"; mean value {values[members].mean():.2f} (all samples "
                     f"{values.mean():.2f}), {100 * ends[members].mean():.0f} % "
                     f"end (all {100 * ends.mean():.0f} %)")
        candidates = np.flatnonzero(members if members.any() else inside.any(axis=1))
        most_steps = np.argsort(-inside[candidates, :VOTING_STEPS].sum(axis=1), kind="stable")
        rows = candidates[most_steps[:NUM_STRIPS]]
        figure, below = plot_behaviour(behaviour, note, plots, members, values, actions,
                                       steps.action_labels)
        draw_strips(below, samples, steps.by_sample(steps.sample)[rows, 0].tolist(), actions[rows],
                    inside[rows])
        whose = ("samples of the behaviour" if members.any() else
                 "samples that pass through the cluster")
        below.suptitle(f"{len(rows)} of {whose}, with the action that led to the step; framed: "
                       "steps in the cluster", fontsize=10)
        yield f"behaviour_{behaviour:02d}.png", figure


BEHAVIOURS = SampleAnalysis(BehavioursConfig, BEHAVIOUR_FILES, "behaviours", "behaviour_plots",
                            compute, draw_figures)

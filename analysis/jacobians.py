"""Jacobians: gradients of the agent's independent components with respect to earlier states.

Layout of ``analysis/jacob_analysis_precomp/``, as published except for the files marked *; N is the
number of simulated samples, with one row per sample::

    clusters_jacob_N                cluster of each sample, -1 for none (N,)
    cluster_means_jacob_N           mean principal coordinates of each of C clusters (C, P)
    tsne_jacob_N                    coordinates on the t-SNE map (N, 2)
    clusters_per_sample_N           copy of clusters_jacob_N, for scripts that read it under this
                                    name
    pca_data_jacob_N *              principal coordinates (N, P)
    pcomponents_jacob_N *           principal components (P, F)
    mu_jacob_N *                    mean of the features (F,), see ``features_of``
    pc_variances_jacob_N *          variances along the principal components (P,)
    sizes_jacob_N *                 root mean square of the gradient of each component with respect
                                    to the agent's and to the environment's state (N, 2, k)

All are ``.npy`` files; ``settings_N.json`` * holds the settings and facts about each step.

Letters in shape comments: k independent components, E units of the environment's state, F = k (D +
E) features.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from analysis.decomposition import Standardizer
from analysis.figures import (
    TSNE_NAMES,
    Colourings,
    Figures,
    Variances,
    can_draw,
    central_frames,
    colour_by_cluster,
    draw_clusters,
    draw_planes,
    draw_space,
    read_clusters,
)
from analysis.parameters import JacobianConfig, SampleAnalysisOptions
from analysis.state_maps import SampleAnalysis, SampleRun
from analysis.state_plots import COLOUR_MAP, Category, Plane, Quantity
from analysis.steps import ENDED, SimulatedSteps
from common.errors import UserError
from common.options import option, redefine
from common.progress import with_progress
from common.schemas import Array, Entry, Npy, Schema
from common.step_results import STEP_SETTINGS, StepResults
from generative.saliency.files import SaliencyFolder
from generative.saliency.gradients import DIRECTION, WITHOUT_ENV_GRADS, saliency_functions
from generative.sample_files import SampleFolder
from interventions.config import DirectionsConfig
from interventions.flags import DirectionIdsOptions

JACOBIAN_FILES = Schema(
    "results for {} samples", "analysis/jacobian_analysis_precompute.py", items={
        "clusters": Entry("clusters_jacob_{}.npy", Npy(Array(np.integer, "N"))),
        "cluster_means": Entry("cluster_means_jacob_{}.npy", Npy(Array(np.floating, "C P"))),
        "tsne": Entry("tsne_jacob_{}.npy", Npy(Array(np.floating, "N T"))),
        "per_sample": Entry("clusters_per_sample_{}.npy", Npy(Array(np.integer, "N"))),
        "principal": Entry("pca_data_jacob_{}.npy", Npy(Array(np.floating, "N P"))),
        "components": Entry("pcomponents_jacob_{}.npy", Npy(Array(np.floating, "P F"))),
        "mean": Entry("mu_jacob_{}.npy", Npy(Array(np.floating, "F"))),
        "variances": Entry("pc_variances_jacob_{}.npy", Npy(Array(np.floating, "P"))),
        "sizes": Entry("sizes_jacob_{}.npy", Npy(Array(np.floating, "N 2 K")))},
    settings_name="settings_{}.json", flag="--precomp_dir", setting_types={
        **STEP_SETTINGS, "parameters": {"grad_timestep": int}, "functions": tuple[str, ...],
        "saliency_made_by": {"common_timesteps": tuple[int, ...]}})


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientOptions(DirectionIdsOptions, SampleAnalysisOptions):
    """Options that select the gradients to analyse."""

    grad_timestep: int | None = option(
        None, "step, counted from 0, of the states with respect to which gradients are taken",
        key=".grad_timestep")
    direction_ids: str | None = redefine(
        DirectionIdsOptions, "direction_ids",
        help="numbers of the components, or a range: 0 to 16 ends before 16")
    without_env_grads: bool = option(False, "use the gradients without paths through the action "
                                            "that enters the environment")


def root_mean_square(gradients: np.ndarray, axis: int | tuple[int, ...] = -1) -> np.ndarray:
    """Compute the root mean square of gradients over one or several axes, float64."""
    return np.sqrt((gradients.astype(np.float64) ** 2).mean(axis=axis))


def features_of(agent: np.ndarray, env: np.ndarray) -> np.ndarray:
    """Normalise the gradients of each sample and flatten them to one row.

    The gradients with respect to each of the two states are divided by their root mean square over
    all components and units of the sample.

    Some samples have gradients a hundred times larger than most; without normalisation, these few
    would dominate the principal components. ``sizes_jacob_N`` keeps the magnitudes.

    Args:
        agent: gradients with respect to the agent's state (M, k, D).
        env: gradients with respect to the environment's state (M, k, E).

    Returns:
        Normalised gradients, those with respect to the agent's state first, float32 (M, F).
    """
    parts = []
    for part in (agent, env):
        size = root_mean_square(part, (1, 2))
        rows = part.reshape(len(part), -1) / np.where(size > 0, size, 1)[:, None]
        parts.append(rows.astype(np.float32))
    return np.concatenate(parts, axis=1)


def read_jacobians(folder: SaliencyFolder, numbers: Sequence[int], functions: Sequence[str],
                   step: int) -> tuple[np.ndarray, np.ndarray]:
    """Read the gradients of components with respect to the states at one step.

    Args:
        folder: folder with the saliency of the samples.
        numbers: numbers of the M samples.
        functions: names of the saliency functions of the k components.
        step: step of the states with respect to which gradients are taken, from 0.

    Returns:
        Gradients with respect to the agent's state (M, k, D) and to the environment's (M, k, E),
        float32.

    Raises:
        UserError: if a file is missing, damaged or too short or contains NaN (the message names
            it), or if all gradients are 0, as they are after the step at which the components are
            read.
    """
    parts: dict[str, list[np.ndarray]] = {"hidden_states": [], "env_h": []}
    for function in with_progress(functions, len(functions), "component"):
        for field, of_field in parts.items():
            gradients = folder.stacked_field(field, function, numbers)  # (M, T, units)
            example = folder.file_of(field, numbers[0], function)
            if gradients.shape[1] <= step:
                raise UserError(f"grad_timestep is {step}, but {example} has only "
                                f"{gradients.shape[1]} steps, counted from 0")
            of_field.append(gradients[:, step])
    agent, env = (np.stack(of_field, axis=1) for of_field in parts.values())
    if not agent.any() and not env.any():
        read_at = folder.description(numbers[0], functions[0]).get("common_timesteps")
        where = f", because they are read at step {max(read_at)}" if read_at else ""
        raise UserError(f"all gradients with respect to the states at grad_timestep {step} are 0: "
                        f"the components do not depend on these{where}; choose an earlier step")
    return agent, env


def compute(run: SampleRun) -> None:
    """Find the principal components of the samples' Jacobians. Cluster the principal coordinates
    that explain 95 % of the variance, and compute their t-SNE map.

    The features are centred but not divided by their standard deviations, because differences in
    influence between units are part of the result.

    Raises:
        UserError: if no components are chosen, or if samples or gradients are missing, damaged or
            too few.
    """
    directions = run.options.parameters.get(DirectionsConfig)
    functions = [function.name + (WITHOUT_ENV_GRADS if run.options.without_env_grads else "")
                 for function in saliency_functions([DIRECTION], directions.ids(),
                                                    directions.direction_type)]
    if not functions:
        raise UserError("no components are chosen; give their numbers as --direction_ids")
    folder = SaliencyFolder(run.samples.path)
    agent, env = read_jacobians(folder, run.numbers, functions, run.config.grad_timestep)
    print(f"gradients of {len(functions)} components in {len(run.numbers)} samples", flush=True)
    state_map = run.start(
        functions=functions, saliency_made_by=folder.description(run.numbers[0], functions[0]))
    features = features_of(agent, env)
    sizes = np.stack([root_mean_square(agent), root_mean_square(env)], axis=1)  # (M, 2, k)
    mean = features.mean(axis=0)
    run.results.step("sizes", lambda: ({"sizes": sizes.astype(np.float32), "mean": mean}, {}))
    coordinates, _, leading = state_map.principal(
        features, Standardizer(mean, np.ones_like(mean), ()))
    state_map.clusters(leading, coordinates, copy="per_sample")
    state_map.tsne(leading)


def draw_figures(results: StepResults, samples: SampleFolder, steps: SimulatedSteps,
                 config: JacobianConfig, seed: int) -> Figures:
    """Draw the figures of the Jacobians: magnitudes by cluster, projections and clusters.

    Args:
        results: precomputed results.
        samples: folder of the samples.
        config: parameters; only ``grad_timestep`` is used, and only if the results do not store it
            (published results do not).

    Raises:
        UserError: if a file is missing or damaged, or belongs to other samples.
    """
    number = steps.num_samples
    labels, num_clusters = read_clusters(results, number)
    means = results.read("cluster_means")
    settings = results.settings("parameters", "saliency_made_by", "functions")
    step = config.grad_timestep
    names: list[str] = []
    what = "components of the agent's state"
    if settings:
        step = settings["parameters"]["grad_timestep"]
        read_at = settings["saliency_made_by"]["common_timesteps"]
        names = [function.direction_name for function in
                 saliency_functions(settings["functions"], direction_ids=(), direction_type="ica")]
        what = f"{len(names)} {what} at step {', '.join(map(str, read_at))}"
    title = (f"{number} samples: gradients of {what}\nwith respect to the states of agent and "
             f"environment at step {step}")
    value, action = (steps.by_sample(quantity)[:, step]
                     for quantity in (steps.value, steps.action))
    ends = (steps.by_sample(steps.terminal) > ENDED).any(axis=1)
    colourings: Colourings = {
        "value": Quantity(value, f"value estimate at step {step}"),
        "sum_of_reward": Quantity(steps.by_sample(steps.reward).sum(axis=1),
                                  "sum of reward of the sample"),
        "ends": Category(ends.astype(int), "end of the sample", ("continues", "ends")),
        "action": Category(action, f"action that led to step {step}", steps.action_labels),
        "cluster": colour_by_cluster(labels, num_clusters)}
    planes: dict[str, Plane] = {}
    principal: np.ndarray | None = None
    if can_draw("the sizes of the gradients", results, "sizes"):
        sizes = results.read("sizes", number)  # (M, 2, k)
        colourings["size"] = Quantity(np.log10(root_mean_square(sizes, (1, 2)) + 1e-12),
                                      "log10 of the root mean square of all gradients")
        colourings["strongest"] = Category(root_mean_square(sizes, 1).argmax(axis=1),
                                           "component with the largest gradients", tuple(names))
        yield "gradients_by_cluster.png", _plot_sizes(sizes, labels, num_clusters, names, title)
    if can_draw("figures of principal components and the most central samples", results,
                "principal"):
        principal = results.read("principal", number)  # (M, P)
        variances = Variances(results, principal)
        space = Plane(principal[:, :3], variances.axis_names, title, unit="samples")
        planes["pca"] = space.dimensions(2)
        yield from draw_space(space, colourings, ("cluster",), seed)
        yield from variances.draw(title)
    planes["tsne"] = Plane(results.read("tsne", number)[:, :2], TSNE_NAMES[:2], title,
                           unit="samples")

    def note(cluster: int) -> str:
        members = labels == cluster
        return (f"{members.sum()} of {number} samples ({100 * members.mean():.1f} %); mean value "
                f"at step {step} {value[members].mean():.2f}, {100 * ends[members].mean():.0f} % "
                "end")

    yield from draw_planes(planes, colourings, seed)
    yield from draw_clusters(
        tuple(planes.values()), labels, num_clusters, note,
        lambda cluster: None if principal is None else central_frames(
            samples, labels == cluster, principal, means[cluster],
            steps.by_sample(steps.sample)[:, 0], np.full(number, step)))


def _plot_sizes(sizes: np.ndarray, labels: np.ndarray, num_clusters: int, names: list[str],
                title: str) -> Figure:
    """Draw the root mean square of each component's gradients in each cluster.

    Args:
        sizes: root mean square of the gradients with respect to the agent's and to the
            environment's state (M, 2, k).
        labels: cluster of each sample, -1 for none (M,).
        num_clusters: number of clusters, C.
    """
    of_clusters = np.stack([root_mean_square(sizes[labels == cluster], 0)
                            for cluster in range(num_clusters)])  # (C, 2, k)
    low = of_clusters[of_clusters > 0].min()
    norm = LogNorm(low, max(of_clusters.max(), low * 1.01))
    figure = Figure(figsize=(6 + 0.5 * len(names), 2.6 + 0.24 * num_clusters),
                    layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, part, what in zip(panels, of_clusters.swapaxes(0, 1), ("agent's", "environment's")):
        image = axes.imshow(np.ma.masked_equal(part, 0), aspect="auto", cmap=COLOUR_MAP, norm=norm,
                            interpolation="nearest")
        axes.set_xticks(range(len(names)), names, rotation=90, fontsize=8)
        axes.set(xlabel="component", title=f"with respect to the {what} state")
    counts = np.bincount(labels[labels >= 0], minlength=num_clusters)
    panels[0].set_yticks(range(num_clusters), [f"{i} ({n})" for i, n in enumerate(counts)],
                         fontsize=8)
    panels[0].set_ylabel("cluster (samples)")
    figure.colorbar(image, ax=panels, label="root mean square of the gradients")
    cluster, part, component = np.unravel_index(of_clusters.argmax(), of_clusters.shape)
    state = ("agent's", "environment's")[part]
    figure.suptitle(f"Largest gradients: cluster {cluster}, {names[component]}, with respect to "
                    f"the {state} state\n{title}", fontsize=10)
    return figure


JACOBIANS = SampleAnalysis(JacobianConfig, JACOBIAN_FILES, "jacobians", "jacobian_plots",
                           compute, draw_figures)

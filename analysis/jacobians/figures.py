"""The figures of the Jacobians, one by one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from analysis.plotting.jobs import (
    TSNE_NAMES,
    Variances,
    can_draw,
    cluster_category,
    cluster_jobs,
    largest_clusters,
    most_central,
    pictures_of,
    plane_jobs,
    read_clusters,
    space_jobs,
)
from analysis.plotting.states import COLOUR_MAP, Category, Pictures, Plane, Quantity, save
from analysis.results.output import Job
from analysis.results.simulated_steps import ENDED, SimulatedSteps
from common.game_constants import ACTION_LABELS
from common.step_results import StepResults
from generative.saliency.gradients import saliency_functions
from generative.sample_files import SampleFolder


def figures(folder: StepResults, samples: SampleFolder, steps: SimulatedSteps,
            grad_timestep: int, seed: int) -> list[Job]:
    """All figures of one analysis.

    Args:
        folder: what was precomputed.
        samples: where the frames are.
        steps: of the same samples.
        grad_timestep: step with respect to whose states the gradients are in a folder that, as a
            published one, does not say it.
        seed: of what is drawn on top.

    Raises:
        UserError: if a file is missing or damaged, or is not of these samples.
    """
    number = steps.num_samples
    labels, num_clusters = read_clusters(folder, number)
    means = folder.read("cluster_means")
    settings, names, what = folder.settings(), [], "components of the agent's state"
    step = settings["parameters"]["grad_timestep"] if settings else grad_timestep
    if settings:
        read_at = settings["saliency_made_by"].get("common_timesteps", ["?"])
        names = [function.direction_name for function in
                 saliency_functions(settings["functions"], direction_ids=(), direction_type="ica")]
        what = f"{len(names)} {what} at step {', '.join(map(str, read_at))}"
    title = (f"{number} samples: gradients of {what}\nwith respect to the states of agent and "
             f"environment at step {step}")
    ids = steps.by_sample(steps.sample)[:, 0]
    value, action = (steps.by_sample(of_step)[:, step] for of_step in (steps.value, steps.action))
    ends = (steps.by_sample(steps.terminal) > ENDED).any(axis=1)
    colourings = {
        "value": Quantity(value, f"value estimate at step {step}"),
        "sum_of_reward": Quantity(steps.by_sample(steps.reward).sum(axis=1),
                                  "sum of reward of the sample"),
        "ends": Category(ends.astype(int), "end of the sample", ("goes on", "ends")),
        "action": Category(action, f"action that entered step {step}", ACTION_LABELS),
        "cluster": cluster_category(labels, num_clusters)}
    jobs, planes, principal = [], {}, None
    if can_draw("the sizes of the gradients", folder, "sizes"):
        sizes = folder.read("sizes", number)  # (M, 2, k)
        squares = sizes.astype(np.float64) ** 2
        colourings["size"] = Quantity(np.log10(np.sqrt(squares.mean(axis=(1, 2))) + 1e-12),
                                      "log10 of the root mean square of all gradients")
        colourings["strongest"] = Category(np.sqrt(squares.mean(axis=1)).argmax(axis=1),
                                           "component with the largest gradients", tuple(names))
        jobs.append(("gradients_by_cluster.png", lambda path: _plot_sizes(
            path, sizes, labels, num_clusters, names, title)))
    if can_draw("figures of principal components and the most central samples", folder,
                "principal"):
        principal = folder.read("principal", number)  # (M, P)
        variances = Variances(folder, principal)
        space = Plane(principal[:, :3], variances.axis_names, title, unit="samples")
        planes["pca"] = space.dimensions(2)
        jobs += [*space_jobs(space, {"cluster": colourings["cluster"]}, seed),
                 variances.job(title)]
    planes["tsne"] = Plane(folder.read("tsne", number)[:, :2], TSNE_NAMES[:2], title,
                           unit="samples")
    drawn, some = largest_clusters(labels, num_clusters)

    def note(cluster: int) -> str:
        members = labels == cluster
        return (f"{members.sum()} of {number} samples ({100 * members.mean():.1f} %); mean value "
                f"at step {step} {value[members].mean():.2f}, {100 * ends[members].mean():.0f} % "
                f"end{some}")

    def pictures(cluster: int) -> Pictures | None:
        if principal is None:
            return None
        members = np.flatnonzero(labels == cluster)
        rows = members[most_central(principal[members, :means.shape[1]], means[cluster], members)]
        return pictures_of(samples, ids[rows], np.full(len(rows), step))

    return [*plane_jobs(planes, colourings, seed), *jobs,
            *cluster_jobs(tuple(planes.values()), labels, drawn, note, pictures)]


def _plot_sizes(path: Path, sizes: np.ndarray, labels: np.ndarray, num_clusters: int,
                names: list[str], title: str) -> None:
    """Figure of the sizes of each component's gradients in each cluster."""
    squares = sizes.astype(np.float64) ** 2
    of_clusters = np.sqrt(np.stack([squares[labels == cluster].mean(axis=0)
                                    for cluster in range(num_clusters)]))  # (C, 2, k)
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
    figure.suptitle(title, fontsize=10)
    save(figure, path)

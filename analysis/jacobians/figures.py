"""The figures of the Jacobians, one by one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from analysis.jacobians.files import JacobiansFolder
from analysis.plotting.jobs import (
    TSNE_NAMES,
    Variances,
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
from common.env import ACTION_LABELS
from common.errors import UserError
from generative.saliency.gradients import saliency_functions
from generative.sample_files import SampleFolder


def figures(folder: JacobiansFolder, samples: SampleFolder, steps: SimulatedSteps,
            seed: int) -> list[Job]:
    """All figures of one analysis.

    Args:
        folder: what was precomputed.
        samples: where the frames are.
        steps: of the same samples.
        seed: of what is drawn on top.

    Raises:
        UserError: if a file is missing or damaged, or is not of these samples.
    """
    number = steps.num_samples
    principal = folder.read_finite("principal", number)  # (M, P)
    labels, num_clusters = read_clusters(folder, number)
    means = folder.read_finite("cluster_means")
    sizes = folder.read_finite("sizes", number)  # (M, 2, k)
    variances = Variances(folder)
    settings = folder.settings()
    if not settings:
        raise UserError(f"there is no file {folder.settings_file}, which says which gradients "
                        f"{folder.script} took")
    step = settings["parameters"]["grad_timestep"]
    read_at = settings["saliency_made_by"].get("common_timesteps", ["?"])
    names = [function.direction_name for function in
             saliency_functions(settings["functions"], direction_ids=(), direction_type="ica")]
    title = (f"{number} samples: gradients of {len(names)} components of the agent's state at step "
             f"{', '.join(map(str, read_at))}\nwith respect to the states of agent and environment "
             f"at step {step}")
    ids = steps.by_sample(steps.sample)[:, 0]
    value, action = (steps.by_sample(of_step)[:, step] for of_step in (steps.value, steps.action))
    ends = (steps.by_sample(steps.terminal) > ENDED).any(axis=1)
    strongest = np.sqrt((sizes.astype(np.float64) ** 2).mean(axis=1)).argmax(axis=1)
    colourings = {
        "value": Quantity(value, f"value estimate at step {step}"),
        "sum_of_reward": Quantity(steps.by_sample(steps.reward).sum(axis=1),
                                  "sum of reward of the sample"),
        "ends": Category(ends.astype(int), "end of the sample", ("goes on", "ends")),
        "action": Category(action, f"action that entered step {step}", ACTION_LABELS),
        "size": Quantity(np.log10(np.sqrt((sizes.astype(np.float64) ** 2).mean(axis=(1, 2)))
                                  + 1e-12),
                         "log10 of the root mean square of all gradients"),
        "strongest": Category(strongest, "component with the largest gradients", tuple(names)),
        "cluster": cluster_category(labels, num_clusters)}
    space = Plane(principal[:, :3], variances.axis_names, title, unit="samples")
    tsne = Plane(folder.read_finite("tsne", number)[:, :2], TSNE_NAMES[:2], title, unit="samples")
    drawn, some = largest_clusters(labels, num_clusters)

    def note(cluster: int) -> str:
        members = labels == cluster
        return (f"{members.sum()} of {number} samples ({100 * members.mean():.1f} %); mean value "
                f"at step {step} {value[members].mean():.2f}, {100 * ends[members].mean():.0f} % "
                f"end{some}")

    def pictures(cluster: int) -> Pictures:
        members = np.flatnonzero(labels == cluster)
        rows = members[most_central(principal[members, :means.shape[1]], means[cluster], members)]
        return pictures_of(samples, ids[rows], np.full(len(rows), step))

    return [
        *plane_jobs({"pca": space.dimensions(2), "tsne": tsne}, colourings, seed),
        *space_jobs(space, {"cluster": colourings["cluster"]}, seed),
        variances.job(title),
        ("gradients_by_cluster.png",
         lambda path: _plot_sizes(path, sizes, labels, num_clusters, names, title)),
        *cluster_jobs((space.dimensions(2), tsne), labels, drawn, note, pictures)]


def _plot_sizes(path: Path, sizes: np.ndarray, labels: np.ndarray, num_clusters: int,
                names: list[str], title: str) -> None:
    """How large the gradients of each component are in each cluster."""
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

"""The figures of the bottleneck vectors, one by one."""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.bottleneck_vectors.sphere_plots import plot_cosines, plot_spectrum
from analysis.bottleneck_vectors.steps import sample_outcomes
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
from analysis.plotting.states import Category, Pictures, Plane, Quantity
from analysis.results.output import Job
from analysis.results.simulated_steps import chosen_samples, simulated_steps
from common.errors import UserError
from common.step_results import StepResults
from generative.config import SAMPLE_STARTS
from generative.sample_files import SampleFolder


def figures(folder: StepResults, samples: SampleFolder, seed: int) -> list[Job]:
    """All figures of one analysis.

    Args:
        folder: what was precomputed.
        samples: where the frames of the informed samples are.
        seed: of what is drawn on top.

    Raises:
        UserError: if a file is missing or damaged.
    """
    number = folder.number
    principal = folder.read("principal", number)  # (N, P)
    random = folder.read("random", number)
    table = _outcomes(folder, samples)
    variances = Variances(folder, principal)
    what = f"{number} informed bottleneck vectors"
    title = f"{what}, {number} random ones in black"
    space = Plane(principal[:, :3], variances.axis_names, title, random[:, :3], "random",
                  others_in_view=True, unit="vectors")
    planes = {"pca": space.dimensions(2)}
    if can_draw("the t-SNE map", folder, "tsne", "random_tsne"):
        planes["tsne"] = Plane(
            folder.read("tsne", number)[:, :2], TSNE_NAMES[:2], title,
            folder.read("random_tsne", number)[:, :2], "random", others_in_view=True,
            unit="vectors")
    colourings = {
        "sum_of_reward": Quantity(table["sum_of_reward"].to_numpy(), "sum of reward of the sample"),
        "ends": Category(table["ends"].to_numpy(), "end of the sample", ("goes on", "ends")),
        "mean_value": Quantity(table["mean_value"].to_numpy(), "mean value of the sample")}
    jobs = [variances.job(what)]
    if can_draw("the figures of how far the vectors are from uniform", folder, "cosines",
                "random_cosines"):
        found = folder.settings()["steps"]["uniformity"]
        dimensions = folder.read("components").shape[1]
        jobs += [("variance_spectrum.png", lambda path: plot_spectrum(
                     path, principal, random, dimensions, found)),
                 ("cosines.png", lambda path: plot_cosines(
                     path, folder.read("cosines"), folder.read("random_cosines"),
                     dimensions, found))]
    if can_draw("the clusters", folder, "clusters", "cluster_means"):
        labels, num_clusters = read_clusters(folder, number)
        colourings["cluster"] = cluster_category(labels, num_clusters)
        jobs += space_jobs(space, {"cluster": colourings["cluster"]}, seed)
        jobs += _cluster_jobs(folder, samples, tuple(planes.values()), principal, table, labels,
                              num_clusters)
    return [*plane_jobs(planes, colourings, seed), *jobs]


def _outcomes(folder: StepResults, samples: SampleFolder) -> pd.DataFrame:
    """Outcomes of the informed vectors: as stored, or, of published results, from the samples."""
    if not folder.has("table"):
        return sample_outcomes(simulated_steps(samples, chosen_samples(samples, folder.number)))
    table = folder.read("table")
    table = table[table["start"] == SAMPLE_STARTS[0]].reset_index(drop=True)
    if len(table) != folder.number:
        raise UserError(f"{folder.file('table')} has {len(table)} informed samples, not "
                        f"{folder.number}; write it again")
    return table


def _cluster_jobs(folder: StepResults, samples: SampleFolder, planes: tuple[Plane, ...],
                  principal: np.ndarray, table: pd.DataFrame, labels: np.ndarray,
                  num_clusters: int) -> list[Job]:
    means = folder.read("cluster_means")
    drawn, some = largest_clusters(labels, num_clusters)

    def pictures(cluster: int) -> Pictures:
        members = np.flatnonzero(labels == cluster)
        rows = members[most_central(principal[members, :means.shape[1]], means[cluster], members)]
        return pictures_of(samples, table["sample"].to_numpy()[rows], np.zeros(len(rows), int))

    return cluster_jobs(planes, labels, drawn, lambda cluster: _note(
        table[labels == cluster], folder.number) + some, pictures)


def _note(members: pd.DataFrame, number: int) -> str:
    return (f"{len(members)} of {number} informed vectors ({100 * len(members) / number:.1f} %); "
            f"mean value {members['mean_value'].mean():.2f}, mean sum of reward "
            f"{members['sum_of_reward'].mean():.2f}, {100 * members['ends'].mean():.0f} % end")

"""The figures of the environment's states, one by one."""

from __future__ import annotations

import numpy as np

from analysis.plotting.jobs import (
    TSNE_NAMES,
    Variances,
    cluster_category,
    cluster_jobs,
    largest_clusters,
    most_central,
    note_on_members,
    paths_job,
    pictures_of,
    plane_jobs,
    read_clusters,
    space_jobs,
    step_colourings,
)
from analysis.plotting.states import Pictures, Plane
from analysis.results.output import Job
from analysis.results.simulated_steps import ENDED, SimulatedSteps
from common.step_results import StepResults
from generative.sample_files import SampleFolder


def figures(folder: StepResults, samples: SampleFolder, steps: SimulatedSteps, num_paths: int,
            seed: int) -> list[Job]:
    """All figures of one analysis.

    Args:
        folder: what was precomputed.
        samples: where the frames are.
        steps: of the same samples.
        num_paths: samples whose ways are drawn.
        seed: of what is drawn on top, and of these samples.

    Raises:
        UserError: if a file is missing or damaged, or is not of these samples.
    """
    num_states = len(steps.sample)
    principal = folder.read("principal", num_states)  # (N, P)
    labels, num_clusters = read_clusters(folder, num_states)
    means = folder.read("cluster_means")
    variances = Variances(folder, principal)
    title = (f"{num_states} states of the environment in {steps.num_samples} simulated samples of "
             f"{steps.num_steps} steps")
    space = Plane(principal[:, :3], variances.axis_names, title)
    plane = space.dimensions(2)
    tsne = Plane(folder.read("tsne", num_states)[:, :2], TSNE_NAMES[:2], title)
    colourings = step_colourings(steps)
    colourings["cluster"] = cluster_category(labels, num_clusters)

    drawn, some = largest_clusters(labels, num_clusters)

    def note(number: int) -> str:
        return note_on_members(labels == number, steps.sample, "sample", steps.value,
                               steps.action) + some

    def pictures(number: int) -> Pictures:
        members = np.flatnonzero(labels == number)
        rows = members[most_central(principal[members, :means.shape[1]], means[number],
                                    steps.sample[members])]
        return pictures_of(samples, steps.sample[rows], steps.step[rows])

    return [
        *plane_jobs({"pca": plane, "tsne": tsne}, colourings, seed),
        *space_jobs(space, {what: colourings[what] for what in ("cluster", "value")}, seed),
        variances.job(title),
        paths_job(plane, steps.sample, "sample", num_paths,
                  lambda sample: note_on_sample(steps, sample), seed),
        *cluster_jobs((plane, tsne), labels, drawn, note, pictures)]


def note_on_sample(steps: SimulatedSteps, sample: int) -> str:
    """Sum of the rewards of a sample, and whether it ends, as text."""
    rows = steps.sample == sample
    return (f"reward {steps.reward[rows].sum():.1f}, "
            f"{'ends' if steps.terminal[rows].max() > ENDED else 'goes on'}")

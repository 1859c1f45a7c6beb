"""The figures of the behaviours, one by one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from analysis.behaviours.plots import Members, Strip, plot_behaviour, plot_overview
from analysis.behaviours.steps import VOTING_STEPS
from analysis.plotting.jobs import (
    TSNE_NAMES,
    Variances,
    can_draw,
    cluster_category,
    plane_jobs,
    read_clusters,
    space_jobs,
    step_colourings,
)
from analysis.plotting.states import ClusterPlots, Plane
from analysis.results.output import Job
from analysis.results.simulated_steps import ENDED, SimulatedSteps
from common.step_results import StepResults
from generative.sample_files import SampleFolder

STRIPS = 4  # samples of a behaviour whose frames are shown


def figures(folder: StepResults, samples: SampleFolder, steps: SimulatedSteps,
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
    num_states = len(steps.sample)
    title = (f"{num_states} steps of {steps.num_samples} simulated samples: states of agent and "
             "environment, and their changes")
    places = folder.read("tsne")
    tsne = Plane(places, TSNE_NAMES[:places.shape[1]], title)
    if len(places) != num_states and not folder.settings_file.exists():
        return _of_other_rows(folder, tsne, num_states, seed)
    places = folder.read("tsne", num_states)
    labels, number = read_clusters(folder, num_states)
    per_sample = folder.read("per_sample", steps.num_samples)
    planes, variances = {}, []
    if can_draw("figures of principal components", folder, "principal"):
        principal = folder.read("principal", num_states)
        of_principal = Variances(folder, principal)
        planes["pca"] = Plane(principal[:, :2], of_principal.axis_names[:2], title)
        variances.append(of_principal.job(title))
    planes["tsne"] = tsne.dimensions(2)
    colourings = step_colourings(steps)
    colourings["cluster"] = cluster_category(labels, number)
    colourings["behaviour"] = cluster_category(np.repeat(per_sample, steps.num_steps), number,
                                               "behaviour", "behaviour of the sample")
    behaviours = _Behaviours(samples, steps, labels, per_sample, number, tsne.dimensions(2))
    return [
        *plane_jobs(planes, colourings, seed),
        *space_jobs(tsne, {what: colourings[what] for what in ("cluster", "value")}, seed),
        *variances,
        ("behaviours_overview.png", behaviours.plot_overview),
        *((f"behaviour_{i:02d}.png", lambda path, i=i: behaviours.plot(path, i))
          for i in range(number))]


def _of_other_rows(folder: StepResults, tsne: Plane, num_states: int, seed: int) -> list[Job]:
    """The clusters on the map: published folders do not have a row for every step."""
    rows = len(tsne.places)
    print(f"left out all figures but the clusters on the map: {folder.file('tsne')} has {rows} "
          f"rows for {num_states} steps, and does not say which", flush=True)
    tsne = dataclasses.replace(tsne, title=f"{rows} places of states of agent and environment")
    clusters = {"cluster": cluster_category(*read_clusters(folder, rows))}
    return [*plane_jobs({"tsne": tsne.dimensions(2)}, clusters, seed),
            *space_jobs(tsne, clusters, seed)]


class _Behaviours:
    """Draws behaviours."""

    def __init__(self, samples: SampleFolder, steps: SimulatedSteps, labels: np.ndarray,
                 per_sample: np.ndarray, number: int, plane: Plane):
        self.samples, self.steps, self.per_sample, self.number = samples, steps, per_sample, number
        self.labels = steps.by_sample(labels)  # (M, T)
        self.everyone = Members(steps.by_sample(steps.value), steps.by_sample(steps.action))
        self.ends = (steps.by_sample(steps.terminal) > ENDED).any(axis=1)
        self.clusters = ClusterPlots([plane], labels)

    def plot_overview(self, path: Path) -> None:
        sizes = np.bincount(self.per_sample[self.per_sample >= 0], minlength=self.number)
        shares = np.stack([
            self.everyone.of(self.per_sample == i).action_shares() if sizes[i]
            else np.full(len(self.everyone.action_shares()), np.nan) for i in range(self.number)])
        plot_overview(path, sizes, int((self.per_sample < 0).sum()), self.labels, shares,
                      f"{self.number} behaviours in {len(self.per_sample)} simulated samples; a "
                      f"sample shows the cluster that most of its first {VOTING_STEPS} steps are "
                      "in")

    def plot(self, path: Path, behaviour: int) -> None:
        members = self.per_sample == behaviour
        inside = self.labels == behaviour  # (M, T)
        note = (f"{members.sum()} of {len(members)} samples; {inside.sum()} of {inside.size} steps "
                f"are in its cluster")
        if members.any():
            note += (f"; mean value {self.everyone.values[members].mean():.2f} (all samples "
                     f"{self.everyone.values.mean():.2f}), {100 * self.ends[members].mean():.0f} % "
                     f"end (all {100 * self.ends.mean():.0f} %)")
        candidates = np.flatnonzero(members if members.any() else inside.any(axis=1))
        most = np.argsort(-inside[candidates, :VOTING_STEPS].sum(axis=1), kind="stable")
        chosen = candidates[most[:STRIPS]]
        numbers = self.steps.by_sample(self.steps.sample)[chosen, 0].tolist()
        frames = self.samples.stacked_field("frames", numbers)
        strips = [Strip(number, frames[i], self.everyone.actions[row], inside[row])
                  for i, (number, row) in enumerate(zip(numbers, chosen))]
        whose = "its samples" if members.any() else "samples that pass through it"
        plot_behaviour(path, behaviour, note, self.clusters, self.everyone.of(members),
                       self.everyone, strips,
                       f"{len(strips)} of {whose}, with the action that entered the step; framed: "
                       "steps in its cluster")

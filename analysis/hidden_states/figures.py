"""The figures of the agent's hidden states, one by one."""

from __future__ import annotations

import dataclasses

import numpy as np

from analysis.hidden_states.recorded import RecordedSteps
from analysis.plotting.jobs import (
    TSNE_NAMES,
    Colourings,
    Variances,
    cluster_category,
    cluster_jobs,
    note_on_members,
    paths_job,
    plane_jobs,
    read_clusters,
    space_jobs,
)
from analysis.plotting.states import Category, Plane, Quantity
from analysis.results.output import Job
from common.game_constants import ACTION_LABELS
from common.step_results import StepResults


def figures(folder: StepResults, steps: RecordedSteps, num_paths: int,
            seed: int) -> list[Job]:
    """All figures of one analysis.

    Args:
        folder: what was precomputed; simulated samples are drawn if it has them.
        steps: of the same episodes.
        num_paths: episodes whose ways are drawn.
        seed: of what is drawn on top, and of these episodes.

    Raises:
        UserError: if a file is missing or damaged, or is not of these episodes.
    """
    num_states = len(steps.action)
    principal = folder.read("principal", num_states)  # (N, P)
    simulated = None if folder.other_number is None else folder.read("generated")
    variances = Variances(folder, principal)
    labels, num_clusters = read_clusters(folder, num_states)
    title = f"{num_states} hidden states of {folder.number} episodes"
    space = Plane(principal[:, :3], variances.axis_names, title)
    if simulated is not None:
        space = dataclasses.replace(
            space, others=simulated[:, :3], others_name="simulated",
            title=f"{title}, {len(simulated)} simulated ones of {folder.other_number} samples in "
                  "black")
    plane = space.dimensions(2)
    recorded = dataclasses.replace(plane, others=None, title=title)
    tsne = Plane(folder.read("tsne", num_states)[:, :2], TSNE_NAMES[:2], title)
    colourings = _colourings(folder, steps, labels, num_clusters)
    return [
        *plane_jobs({"pca": plane, "tsne": tsne}, colourings, seed),
        *space_jobs(space, {what: colourings[what] for what in ("cluster", "value")}, seed),
        variances.job(title),
        paths_job(recorded, steps.episode, "episode", num_paths,
                  lambda episode: _note_on_episode(steps, episode), seed),
        *cluster_jobs((recorded, tsne), labels, range(num_clusters), lambda number: note_on_members(
            labels == number, steps.episode, "episode", steps.value, steps.action))]


def _colourings(folder: StepResults, steps: RecordedSteps, labels: np.ndarray,
                num_clusters: int) -> Colourings:
    num_states = len(labels)
    weights = (folder.read("nmf", num_states)
               * np.linalg.norm(folder.read("nmf_components"), axis=1))
    sources = np.abs(folder.read("sources", num_states))
    return {
        "entropy": Quantity(steps.entropy, "entropy of the policy (nats)"),
        "likeliest_action": Category(steps.likeliest_action, "most likely action", ACTION_LABELS),
        "action": Category(steps.action, "action taken", ACTION_LABELS),
        "cluster": cluster_category(labels, num_clusters),
        "nmf_factor": Category(weights.argmax(axis=1), "strongest NMF factor",
                               tuple(f"factor {i}" for i in range(weights.shape[1])),
                               numbered=True),
        "ic_factor": Category(sources.argmax(axis=1), "strongest IC",
                              tuple(f"IC {i}" for i in range(sources.shape[1])),
                              numbered=True),
        "episode_length": Quantity(steps.length, "length of the episode (steps)"),
        "part_of_episode": Quantity(steps.part, "part of the episode (0 first, 1 last step)"),
        "done": Category(steps.done.astype(int), "last step", ("before it", "last step")),
        "value": Quantity(steps.value, "value estimate"),
        "episode_rewarded": Category(steps.rewarded.astype(int), "reward in the episode",
                                     ("none", "some")),
        "reward": Quantity(steps.reward, "reward of the step"),
        **{name: Quantity(values, f"{name[-1]} of the player (cells)")
           for name, values in steps.positions.items()},
    }


def _note_on_episode(steps: RecordedSteps, episode: int) -> str:
    rows = steps.episode == episode
    return f"{rows.sum()} steps, {'rewarded' if steps.rewarded[rows].any() else 'no reward'}"

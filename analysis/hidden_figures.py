"""The figures of the agent's hidden states, one by one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from analysis.hidden_files import HiddenStatesFolder
from analysis.hidden_states import RecordedSteps
from analysis.state_plots import (
    Category,
    ClusterPlots,
    Plane,
    Quantity,
    plot_paths,
    plot_plane,
    plot_space,
    plot_variance,
)
from common.env import ACTION_NAMES, NUM_ACTIONS
from common.errors import UserError
from common.progress import with_progress

ACTIONS = (*ACTION_NAMES, *(f"special {i}" for i in range(len(ACTION_NAMES), NUM_ACTIONS)))


class Figures:
    """All figures of one analysis.

    Args:
        folder: what was precomputed; simulated samples are drawn if it has them.
        steps: of the same episodes.
        seed: of what is drawn on top, and of the episodes whose paths are drawn.

    Raises:
        UserError: if a file is missing or damaged, or is not of these episodes.
    """

    def __init__(self, folder: HiddenStatesFolder, steps: RecordedSteps, seed: int):
        self.folder, self.steps, self.seed = folder, steps, seed
        principal = self._rows("principal")  # (N, P)
        simulated = None if folder.num_samples is None else folder.read("generated")
        self.variances = folder.read("variances")
        facts = folder.settings().get("steps", {}).get("pca", {})  # published ones do not say
        self.total_variance = facts.get("total_variance", float(self.variances.sum()))
        self.labels = self._rows("clusters")
        self.num_clusters = len(folder.read("cluster_means"))
        self.title = f"{len(principal)} hidden states of {folder.num_episodes} episodes"
        with_simulated = self.title
        if simulated is not None:
            with_simulated = (f"{self.title}, {len(simulated)} simulated ones of "
                              f"{folder.num_samples} samples in black")
        shares = 100 * self.variances / self.total_variance
        names = tuple(f"PC {i + 1} ({share:.1f} % of the variance)"
                      for i, share in enumerate(shares[:3]))
        self.principal = Plane(principal[:, :2], _first(simulated, 2), names[:2],
                               with_simulated)
        self.recorded = dataclasses.replace(self.principal, simulated=None, title=self.title)
        self.space = Plane(principal[:, :3], _first(simulated, 3), names,
                           with_simulated)
        tsne = self._rows("tsne")
        self.tsne = Plane(tsne[:, :2], None, ("t-SNE 1", "t-SNE 2"), self.title)

    def draw(self, output: Path, num_paths: int) -> list[str]:
        """Write all figures; returns their names."""
        colourings = self.colourings()
        jobs = [(f"{name}_{what}.png", lambda path, plane=plane, colouring=colouring:
                 plot_plane(path, plane, colouring, self.seed))
                for name, plane in (("pca", self.principal), ("tsne", self.tsne))
                for what, colouring in colourings.items()]
        jobs += [(f"rotating_{what}.gif", lambda path, colouring=colourings[what]:
                  plot_space(path, self.space, colouring, self.seed))
                 for what in ("cluster", "value") if self.space.places.shape[1] == 3]
        jobs += [("variance_explained.png", self._plot_variance),
                 ("paths.png", lambda path: self._plot_paths(path, num_paths))]
        clusters = ClusterPlots((self.recorded, self.tsne), self.labels)
        jobs += [(f"cluster_{number:02d}.png", lambda path, number=number:
                  clusters.plot(path, number, self.note_on_cluster(number)))
                 for number in range(self.num_clusters)]
        for name, job in with_progress(jobs, len(jobs), "figure"):
            job(output / name)
        return [name for name, _ in jobs]

    def colourings(self) -> dict[str, Quantity | Category]:
        """By the end of the file's name."""
        steps = self.steps
        weights = self._rows("nmf") * np.linalg.norm(self.folder.read("nmf_components"), axis=1)
        sources = np.abs(self._rows("sources"))
        clusters = tuple(f"cluster {i}" for i in range(self.num_clusters))
        return {
            "entropy": Quantity(steps.entropy, "entropy of the policy (nats)"),
            "likeliest_action": Category(steps.likeliest_action, "most likely action", ACTIONS),
            "action": Category(steps.action, "action taken", ACTIONS),
            "cluster": Category(self.labels, "cluster", clusters, numbered=True),
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
        }

    def note_on_cluster(self, number: int) -> str:
        """How large it is, where its states come from and what the agent does there."""
        members = self.labels == number
        num_members = int(members.sum())
        if not num_members:
            return "no states"
        episodes = len(np.unique(self.steps.episode[members]))
        actions = np.bincount(self.steps.action[members], minlength=NUM_ACTIONS)
        most = int(actions.argmax())
        return (f"{num_members} of {len(members)} states "
                f"({100 * num_members / len(members):.1f} %), from {episodes} of "
                f"{self.folder.num_episodes} episodes; mean value "
                f"{self.steps.value[members].mean():.2f}; most frequent action {ACTIONS[most]} "
                f"({100 * actions[most] / num_members:.0f} %)")

    def _rows(self, name: str) -> np.ndarray:
        """An array with a row for each state."""
        array = self.folder.read(name)
        if len(array) != len(self.steps.action):
            raise UserError(f"{self.folder.file(name)} has {len(array)} rows, but the "
                            f"{self.folder.num_episodes} episodes have {len(self.steps.action)} "
                            "steps; give the --data_dir that was analysed")
        if not np.isfinite(array).all():
            raise UserError(f"{self.folder.file(name)} holds NaN or infinity; write it again")
        return array

    def _plot_variance(self, path: Path) -> None:
        held = np.cumsum(self.variances) / self.total_variance
        enough = int((held < 0.95).sum()) + 1
        plot_variance(path, self.variances, self.total_variance,
                      f"{self.title}: {min(enough, len(held))} of {len(held)} principal components "
                      "hold 95 % of the variance")

    def _plot_paths(self, path: Path, num_paths: int) -> None:
        rng = np.random.default_rng(self.seed)
        chosen = np.sort(rng.choice(self.folder.num_episodes, num_paths, replace=False)).tolist()
        plot_paths(path, self.recorded, self.steps.episode, chosen,
                   [_note_on_episode(self.steps, episode) for episode in chosen])


def _note_on_episode(steps: RecordedSteps, episode: int) -> str:
    rows = steps.episode == episode
    return f"{rows.sum()} steps, {'rewarded' if steps.rewarded[rows].any() else 'no reward'}"


def _first(places: np.ndarray | None, number: int) -> np.ndarray | None:
    return None if places is None else places[:, :number]

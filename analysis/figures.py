"""Figures shared by several analyses, as pairs of a file name and a figure.

Letters in shape comments: P principal components, d coordinates; n samples of T frames.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from analysis.state_plots import (
    Category,
    ClusterPlots,
    Drawing,
    Pictures,
    Plane,
    Quantity,
    plot_paths,
    plot_plane,
    plot_space,
    plot_variance,
)
from analysis.steps import SimulatedSteps
from common.config import check_entries
from common.errors import UserError
from common.game_constants import NUM_ACTIONS
from common.step_results import StepResults
from generative.sample_files import SampleFolder

MAX_CLUSTERS = 32  # largest number of clusters that get their own figure
FRAMES_PER_CLUSTER = 8  # largest number of example frames in the figure of a cluster
TSNE_NAMES = ("t-SNE 1", "t-SNE 2", "t-SNE 3")
Colourings = dict[str, Quantity | Category]
"""Colourings by name, which is the suffix of a figure's file name."""
Figures = Iterator[tuple[str, Drawing]]
"""Pairs of a file name and a figure; each figure is drawn when the iterator reaches it."""


def read_clusters(results: StepResults, num_rows: int) -> tuple[np.ndarray, int]:
    """Read the cluster of each row (N,), -1 for none, and the number of clusters.

    Raises:
        UserError: if a file is missing, is damaged or has another number of rows, or if a label
            is not below the number of clusters.
    """
    labels, number = results.read("clusters", num_rows), len(results.read("cluster_means"))
    if labels.max() >= number:
        raise UserError(f"{results.file('clusters')} contains cluster {labels.max()}, but "
                        f"{results.file('cluster_means')} has only {number} clusters; compute both "
                        "again")
    return labels, number


def can_draw(figures: str, results: StepResults, *entries: str) -> bool:
    """Return whether the results contain all given entries, and print the missing ones.

    Args:
        results: precomputed results.
        entries: names of the entries that the figures need.
    """
    missing = [results.file(entry).name for entry in entries if not results.has(entry)]
    if missing:
        print(f"cannot draw {figures}: {results.path} has no {', '.join(missing)}", flush=True)
    return not missing


class Variances:
    """Variances of principal components, for axis labels and a figure.

    Args:
        results: precomputed results. Published ones store neither the variances nor the total
            variance; the variances of the coordinates and their sum are used instead.
        principal: principal coordinates (N, P).
    """

    def __init__(self, results: StepResults, principal: np.ndarray):
        self.variances = (results.read("variances") if results.has("variances") else
                          principal.var(axis=0, ddof=1, dtype=np.float64))
        facts = results.settings().get("steps", {}).get("pca", {})
        self.total = check_entries(facts, {"total_variance": float}, results.settings_file).get(
            "total_variance", float(self.variances.sum()))

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Axis labels of the first three components, with their shares of the variance."""
        return tuple(f"PC {i + 1} ({100 * variance / self.total:.1f} % of the variance)"
                     for i, variance in enumerate(self.variances[:3]))

    def draw(self, title: str) -> Figures:
        """Draw the share of the variance that each component explains.

        Args:
            title: description and number of the states, for the title of the figure.
        """
        cumulative = np.cumsum(self.variances) / self.total
        number = int((cumulative < 0.95).sum()) + 1
        note = (f"{number} of {len(cumulative)} principal components explain 95 % of the variance"
                if number <= len(cumulative) else
                f"{len(cumulative)} principal components explain {100 * cumulative[-1]:.0f} % of "
                "the variance")
        yield "variance_explained.png", plot_variance(self.variances, self.total,
                                                      f"{title}:\n{note}")


def draw_planes(planes: Mapping[str, Plane], colourings: Colourings, seed: int) -> Figures:
    """Draw one figure for each plane and colouring.

    Args:
        planes: planes by the prefix of their file names.
        colourings: colourings by the suffix of the file names.
    """
    for name, plane in planes.items():
        for what, colouring in colourings.items():
            yield f"{name}_{what}.png", plot_plane(plane, colouring, seed)


def draw_space(space: Plane, colourings: Colourings, names: Iterable[str], seed: int) -> Figures:
    """Draw one rotating figure per name; none if the projection has two dimensions."""
    if space.places.shape[1] >= 3:
        for name in names:
            yield f"rotating_{name}.gif", plot_space(space, colourings[name], seed)


def draw_paths(plane: Plane, sequences: np.ndarray, what: str, num_paths: int,
               note: Callable[[int], str], seed: int) -> Figures:
    """Draw trajectories of randomly chosen sequences of states.

    Args:
        sequences: index of each state's sequence (N,).
        what: kind of sequence, such as "episode".
        note: returns the text above the panel of a sequence.

    Raises:
        UserError: if there are fewer than ``num_paths`` sequences.
    """
    numbers = np.unique(sequences)
    if num_paths > len(numbers):
        raise UserError(f"num_epi_paths is {num_paths}, more than the {len(numbers)} {what}s")
    rng = np.random.default_rng(seed)
    chosen = np.sort(rng.choice(numbers, num_paths, replace=False)).tolist()
    yield "paths.png", plot_paths(plane, sequences, what, chosen, [note(i) for i in chosen])


def draw_clusters(planes: Sequence[Plane], labels: np.ndarray, num_clusters: int,
                  note: Callable[[int], str],
                  frames: Callable[[int], Pictures | None] = lambda cluster: None,
                  most: int = MAX_CLUSTERS) -> Figures:
    """Draw one figure for each of the ``most`` largest clusters.

    Args:
        labels: cluster of each state (N,).
        note: returns the text above the figure of a cluster.
        frames: returns the frames to show below the figure of a cluster, or None.
        most: largest number of figures.
    """
    plots = ClusterPlots(planes, labels)
    sizes = np.bincount(labels[labels >= 0], minlength=num_clusters)
    some = f" (one of the {most} largest of {num_clusters})" if num_clusters > most else ""
    for cluster in np.sort(np.argsort(-sizes, kind="stable")[:most]).tolist():
        yield f"cluster_{cluster:02d}.png", plots.plot(cluster, note(cluster) + some,
                                                       frames(cluster))


def most_central(coordinates: np.ndarray, mean: np.ndarray, sequences: np.ndarray) -> np.ndarray:
    """Find the rows that are nearest to a mean, nearest first, at most one per sequence.

    Args:
        coordinates: coordinates of the rows (N, d).
        mean: the mean (d,).
        sequences: index of each row's sequence (N,).

    Returns:
        Indices of at most FRAMES_PER_CLUSTER rows.
    """
    nearest = np.argsort(((coordinates - mean) ** 2).sum(axis=1), kind="stable")
    _, first = np.unique(sequences[nearest], return_index=True)
    return nearest[np.sort(first)[:FRAMES_PER_CLUSTER]]


def central_frames(samples: SampleFolder, members: np.ndarray, principal: np.ndarray,
                   mean: np.ndarray, numbers: np.ndarray, steps: np.ndarray) -> Pictures:
    """Read the frames of the members of a cluster that are nearest to its mean, one per sample.

    Args:
        samples: folder of the samples.
        members: whether each state is in the cluster, bool (N,).
        principal: principal coordinates of all states (N, P).
        mean: mean of the cluster (p,), where p <= P.
        numbers, steps: number of the sample and step of each state (N,).
    """
    rows = np.flatnonzero(members)
    rows = rows[most_central(principal[rows, :len(mean)], mean, numbers[rows])]
    frames = samples.stacked_field("frames", numbers[rows].tolist())  # (n, T, H, W, C)
    return Pictures(frames[np.arange(len(rows)), steps[rows]],
                    [f"sample {numbers[row]}, step {steps[row]}" for row in rows],
                    f"the {len(rows)} states nearest to its mean, at most one per sample")


def colour_by_cluster(labels: np.ndarray, num_clusters: int, what: str = "cluster",
                      label: str | None = None) -> Category:
    """Return the colouring of states by cluster.

    Args:
        labels: cluster of each state, -1 for none (N,).
        what: word for a cluster in the legend, such as "behaviour".
        label: meaning of the colours; ``what`` if None.
    """
    return Category(labels, label or what, tuple(f"{what} {i}" for i in range(num_clusters)),
                    numbered=True)


def colour_steps(steps: SimulatedSteps) -> Colourings:
    """Return colourings of simulated steps by value, time step, reward, terminal probability and
    action."""
    return {
        "value": Quantity(steps.value, "value estimate"),
        "time_step": Quantity(steps.step, "step of the sample"),
        "reward": Quantity(steps.reward, "reward of the step"),
        "terminal": Quantity(steps.terminal, "probability that the episode ends"),
        "action": Category(steps.action, "action that led to the step", steps.action_labels)}


def describe_members(members: np.ndarray, sequences: np.ndarray, what: str, values: np.ndarray,
                     actions: np.ndarray, action_labels: Sequence[str]) -> str:
    """Describe a cluster: number of states and sequences, mean value, and most frequent action.

    Args:
        members: whether each state is in the cluster, bool (N,).
        sequences: index of each state's sequence (N,).
        what: kind of sequence, such as "episode".
        values: value estimates of the agent (N,).
        actions: actions of the agent, -1 if unknown (N,).
        action_labels: names of the actions in the game.
    """
    number = int(members.sum())
    if not number:
        return "no states"
    known = actions[members & (actions >= 0)]
    counts = np.bincount(known, minlength=NUM_ACTIONS)
    most = int(counts.argmax())
    action = (f"; most frequent action {action_labels[most]} "
              f"({100 * counts[most] / len(known):.0f} %)" if len(known) else "")
    return (f"{number} of {len(members)} states ({100 * number / len(members):.1f} %), from "
            f"{len(np.unique(sequences[members]))} of {len(np.unique(sequences))} {what}s; mean "
            f"value {values[members].mean():.2f}{action}")

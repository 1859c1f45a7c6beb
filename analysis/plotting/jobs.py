"""Figures that several analyses have, as jobs for ``analysis.results.output.draw``.

Letters in shape comments: N states, P principal components.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from analysis.plotting.states import (
    Category,
    ClusterPlots,
    Pictures,
    Plane,
    Quantity,
    plot_paths,
    plot_plane,
    plot_space,
    plot_variance,
)
from analysis.results.output import Job
from analysis.results.simulated_steps import SimulatedSteps
from common.errors import UserError
from common.game_constants import ACTION_LABELS, NUM_ACTIONS
from common.step_results import StepResults
from generative.sample_files import SampleFolder

MOST_CLUSTERS = 32  # that have a figure of their own
PICTURES = 8  # of a cluster
TSNE_NAMES = ("t-SNE 1", "t-SNE 2", "t-SNE 3")
Colourings = dict[str, Quantity | Category]
"""By the end of the name of a figure's file."""


def read_clusters(folder: StepResults, num_rows: int) -> tuple[np.ndarray, int]:
    """The cluster of each row (N,), -1 for none, and how many clusters there are.

    Raises:
        UserError: if a file is missing, damaged, of other data, or the two do not fit.
    """
    labels, number = folder.read("clusters", num_rows), len(folder.read("cluster_means"))
    if labels.max() >= number:
        raise UserError(f"{folder.file('clusters')} names cluster {labels.max()}, but "
                        f"{folder.file('cluster_means')} has only {number}; write both again")
    return labels, number


def can_draw(figures: str, folder: StepResults, *arrays: str) -> bool:
    """Whether a folder has the arrays that some figures need; if not, it says what is left out."""
    missing = [folder.file(array).name for array in arrays if not folder.has(array)]
    if missing:
        print(f"left out {figures}: {folder.path} has no {', '.join(missing)}", flush=True)
    return not missing


class Variances:
    """The variances of principal components, for axes and for a figure of their own.

    Args:
        folder: what was precomputed; published results do not store the total variance; the
            sum of the stored variances is used instead.
        principal: coordinates (N, P), whose variances are used if the folder has none.
    """

    def __init__(self, folder: StepResults, principal: np.ndarray):
        self.variances = (folder.read("variances") if folder.has("variances") else
                          principal.var(axis=0, ddof=1, dtype=np.float64))
        facts = folder.settings().get("steps", {}).get("pca", {})
        self.total = facts.get("total_variance", float(self.variances.sum()))

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Of the first three components."""
        return tuple(f"PC {i + 1} ({100 * variance / self.total:.1f} % of the variance)"
                     for i, variance in enumerate(self.variances[:3]))

    def job(self, title: str) -> Job:
        """The share of the variance that each component holds.

        Args:
            title: what the states are and how many.
        """
        held = np.cumsum(self.variances) / self.total
        enough = int((held < 0.95).sum()) + 1
        hold = (f"{enough} of {len(held)} principal components hold 95 % of the variance"
                if enough <= len(held) else
                f"{len(held)} principal components hold {100 * held[-1]:.0f} % of the variance")
        return ("variance_explained.png",
                lambda path: plot_variance(path, self.variances, self.total, f"{title}:\n{hold}"))


def plane_jobs(planes: dict[str, Plane], colourings: Colourings, seed: int) -> list[Job]:
    """Every plane, by the beginning of its files' names, in every colouring."""
    return [(f"{name}_{what}.png", lambda path, plane=plane, colouring=colouring:
             plot_plane(path, plane, colouring, seed))
            for name, plane in planes.items() for what, colouring in colourings.items()]


def space_jobs(space: Plane, colourings: Colourings, seed: int) -> list[Job]:
    """Rotating figures, if there are three dimensions."""
    if space.places.shape[1] < 3:
        return []
    return [(f"rotating_{what}.gif", lambda path, colouring=colouring:
             plot_space(path, space, colouring, seed)) for what, colouring in colourings.items()]


def paths_job(plane: Plane, sequences: np.ndarray, what: str, num_paths: int,
              note: Callable[[int], str], seed: int) -> Job:
    """The ways of some sequences of states, drawn by the seed.

    Args:
        sequences: number of each state's sequence (N,).
        what: name of a sequence, such as "episode".
        note: what to write above the panel of a sequence.
    """
    rng = np.random.default_rng(seed)
    chosen = np.sort(rng.choice(np.unique(sequences), num_paths, replace=False)).tolist()
    return "paths.png", lambda path: plot_paths(path, plane, sequences, what, chosen,
                                                [note(sequence) for sequence in chosen])


def cluster_jobs(planes: Sequence[Plane], labels: np.ndarray, numbers: Iterable[int],
                 note: Callable[[int], str],
                 pictures: Callable[[int], Pictures | None] = lambda number: None) -> list[Job]:
    """A figure for each of these clusters.

    Args:
        labels: cluster of each state (N,).
        note: what to write above the figure of a cluster.
        pictures: of a cluster, drawn below it; None for none.
    """
    plots = ClusterPlots(planes, labels)
    return [(f"cluster_{number:02d}.png", lambda path, number=number:
             plots.plot(path, number, note(number), pictures(number))) for number in numbers]


def largest_clusters(labels: np.ndarray, num_clusters: int) -> tuple[list[int], str]:
    """Numbers of all clusters, or of the MOST_CLUSTERS with most members, in ascending order; and
    a note that says so where it is not all."""
    sizes = np.bincount(labels[labels >= 0], minlength=num_clusters)
    numbers = np.sort(np.argsort(-sizes, kind="stable")[:MOST_CLUSTERS]).tolist()
    some = f" (one of the {MOST_CLUSTERS} largest of {num_clusters})"
    return numbers, some if len(numbers) < num_clusters else ""


def most_central(places: np.ndarray, mean: np.ndarray, sequences: np.ndarray) -> np.ndarray:
    """At most PICTURES rows of the places (N, d) nearest to their mean, nearest first, one of each
    sequence.

    Args:
        sequences: number of each row's sequence (N,).
    """
    nearest = np.argsort(((places - mean) ** 2).sum(axis=1), kind="stable")
    _, first = np.unique(sequences[nearest], return_index=True)
    return nearest[np.sort(first)[:PICTURES]]


def pictures_of(samples: SampleFolder, numbers: np.ndarray, steps: np.ndarray) -> Pictures:
    """Simulated frames of these samples (n,) at these steps (n,)."""
    frames = samples.stacked_field("frames", numbers.tolist())  # (n, T, H, W, C)
    return Pictures([of_sample[step] for of_sample, step in zip(frames, steps)],
                    [f"sample {number}, step {step}" for number, step in zip(numbers, steps)],
                    f"its most central states, one of each sample ({len(numbers)})")


def cluster_category(labels: np.ndarray, num_clusters: int, what: str = "cluster",
                     label: str | None = None) -> Category:
    """The colouring by clusters (N,).

    Args:
        what: name of one of them, such as "cluster".
        label: what the colours mean, if that is not ``what``.
    """
    return Category(labels, label or what, tuple(f"{what} {i}" for i in range(num_clusters)),
                    numbered=True)


def step_colourings(steps: SimulatedSteps) -> Colourings:
    """The colourings of steps of simulated samples."""
    return {
        "value": Quantity(steps.value, "value estimate"),
        "time_step": Quantity(steps.step, "step of the sample"),
        "reward": Quantity(steps.reward, "reward of the step"),
        "terminal": Quantity(steps.terminal, "probability that the episode ends"),
        "action": Category(steps.action, "action that entered the step", ACTION_LABELS)}


def note_on_members(members: np.ndarray, sequences: np.ndarray, what: str, values: np.ndarray,
                    actions: np.ndarray) -> str:
    """Text on a cluster: number of states, their sequences, and the agent's actions there.

    Args:
        members: bool (N,).
        sequences: number of each state's sequence (N,).
        what: name of a sequence, such as "episode".
        values: the agent's (N,).
        actions: (N,), -1 where it is not known.
    """
    number = int(members.sum())
    if not number:
        return "no states"
    there = len(np.unique(sequences[members]))
    known = actions[members & (actions >= 0)]
    counts = np.bincount(known, minlength=NUM_ACTIONS)
    most = int(counts.argmax())
    action = (f"; most frequent action {ACTION_LABELS[most]} "
              f"({100 * counts[most] / len(known):.0f} %)" if len(known) else "")
    return (f"{number} of {len(members)} states ({100 * number / len(members):.1f} %), from "
            f"{there} of {len(np.unique(sequences))} {what}s; mean value "
            f"{values[members].mean():.2f}{action}")

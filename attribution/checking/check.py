"""Base class of the checks of attributions, and shared helpers: the checked frames, and outputs at
changed activations of a layer.

A check computes and stores numbers per frame for each attributed layer and output, and turns them
into a table, a figure and a one-sentence verdict.

Letters in shape comments: N frames, B a batch, H W a layer's grid, F features, C channels, R
changed frames.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from agents.outputs import Output
from agents.replay import recorded_game
from attribution.context import AttributionContext
from attribution.integrated_gradients import (
    RIEMANN_RIGHT,
    Integration,
    LayerIntegratedGradients,
    PrefixActivations,
)
from attribution.layers import Bottleneck
from attribution.recordings import batches
from attribution.results import AttributionStore, LayerFeatures
from common.progress import Progress
from common.results import Array
from envs.objects import GameObject, objects_of

Arrays = dict[str, np.ndarray]
Name = tuple[str, str]  # names of a layer and an output
GRADIENT = Integration(1, RIEMANN_RIGHT, None)  # one node, at the frame: gradient times activation
PANEL_WIDTH = 4.2
_FRAMES_PER_BATCH = 128  # frames with changed activations


@dataclasses.dataclass(frozen=True)
class CheckedFrames:
    """Frames of trajectories in which attributions are checked, in the order of the trajectories.

    Attributes:
        trajectory: number of the trajectory of each frame (N,).
        step: step of each frame in its trajectory (N,).
        places: episode and row of each frame in the recording, int32 (N, 2); rows of an episode are
            adjacent and ascending.
    """

    trajectory: np.ndarray
    step: np.ndarray
    places: np.ndarray

    @classmethod
    def draw(cls, attributions: AttributionStore, number: int, seed: int) -> CheckedFrames:
        """Draw at most ``number`` random frames from all trajectories."""
        steps = attributions.trajectories()
        rows = np.sort(np.random.default_rng(seed).permutation(len(steps))[:number])
        trajectory = steps.trajectory[rows]
        return cls(trajectory, rows - steps.bounds[trajectory], steps.frame_ids[rows])

    @property
    def episodes(self) -> np.ndarray:
        """Episode of each frame (N,)."""
        return self.places[:, 0]

    def subset(self, number: int) -> CheckedFrames:
        """Return at most ``number`` evenly spaced frames."""
        rows = np.unique(np.linspace(0, len(self.step) - 1, min(number, len(self.step))).round()
                         ).astype(int)
        return CheckedFrames(self.trajectory[rows], self.step[rows], self.places[rows])


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
    """An output and the layer, with cells, to whose features it is attributed."""

    bottleneck: Bottleneck
    features: LayerFeatures
    output: Output

    @property
    def name(self) -> Name:
        """Short name of the layer, and name of the output."""
        return self.bottleneck.name, self.output.name


@dataclasses.dataclass(frozen=True)
class CheckContext:
    """Agent, attributions and frames that all checks share.

    Attributes:
        agent: the agent and its recording.
        attributions: attributions of the agent.
        frames: frames in which the attributions are checked.
        seed: seed of all random draws.
    """

    agent: AttributionContext
    attributions: AttributionStore
    frames: CheckedFrames
    seed: int

    @functools.cached_property
    def kinds(self) -> tuple[GameObject, ...]:
        """Kinds of object in the recorded game; empty if the game has no table of objects."""
        return objects_of(recorded_game(self.agent.recording.folder).env_name)

    def attributed(self, subject: Subject, array: str) -> np.ndarray:
        """Read the stored attributions of a subject in the checked frames.

        Args:
            subject: layer and output.
            array: "cells" for attributions per cell, or "totals" for their sums over cells.

        Returns:
            float32 (N, H, W, F + 1) or (N, F + 1); the last entry is the residual.

        Raises:
            UserError: if a file is missing or damaged.
        """
        frames = self.frames
        return np.concatenate([
            self.attributions.read("attributions", *subject.name, int(number))[array][
                frames.step[frames.trajectory == number]].astype(np.float32)
            for number in np.unique(frames.trajectory)])

    def cells(self, subject: Subject) -> np.ndarray:
        """Return the attributions to each cell, summed over features and residual, float32
        (N, H, W)."""
        return self.attributed(subject, "cells").sum(axis=-1)


@dataclasses.dataclass(frozen=True)
class Batch:
    """A batch of frames with the activations of a layer.

    Attributes:
        rows: positions of the batch among all checked frames.
        prefix: activations (B, C, …) and the other inputs of the rest of the network.
        actions: actions taken (B,).
    """

    rows: slice
    prefix: PrefixActivations
    actions: np.ndarray


class CheckedLayer:
    """A layer and an output of an agent; computes the output at changed activations.

    Args:
        agent: the agent and its recording.
        subject: layer and output.
        integration: quadrature of attributions computed by ``attributor``.
    """

    def __init__(self, agent: AttributionContext, subject: Subject,
                 integration: Integration = GRADIENT):
        self.subject, self._agent = subject, agent
        baseline = subject.features.baseline
        self.attributor = LayerIntegratedGradients(
            agent.policy, agent.compute, subject.bottleneck, [subject.output], integration,
            baseline)
        self.baseline = (torch.zeros(subject.bottleneck.shape) if baseline is None
                         else torch.from_numpy(baseline))

    def compute(self, frames: CheckedFrames, unit: str,
                function: Callable[[Batch], np.ndarray]) -> np.ndarray:
        """Compute numbers per frame batch by batch, with a progress bar.

        Args:
            frames: the frames.
            unit: unit of the progress bar.
            function: returns the numbers for a batch (B, …).

        Returns:
            Numbers of all frames (N, …).
        """
        numbers = []
        with Progress(len(frames.step), unit) as progress:
            for places in batches(frames.places):
                recorded = self._agent.recording.read(places)
                rows = slice(progress.done, progress.done + len(places))
                numbers.append(function(Batch(
                    rows, self.attributor.run_prefix(recorded.frames, recorded.entering),
                    recorded.actions)))
                progress.update(rows.stop)
        return np.concatenate(numbers)

    def outputs(self, batch: Batch, changed: Tensor, frame: np.ndarray) -> np.ndarray:
        """Compute the output at changed activations.

        Args:
            batch: the unchanged frames.
            changed: changed activations (R, C, H, W).
            frame: position in the batch of the frame of each changed activation (R,).

        Returns:
            Outputs, float64 (R,).
        """
        outputs = []
        for begin in range(0, len(changed), _FRAMES_PER_BATCH):
            part = slice(begin, begin + _FRAMES_PER_BATCH)
            which = torch.from_numpy(frame[part])
            outputs.append(self.attributor.outputs_at(
                PrefixActivations(changed[part], tuple(
                    state[which] for state in batch.prefix.also_read)),
                batch.actions[frame[part]])[0])
        return np.concatenate(outputs)


class Check(abc.ABC):
    """A check of attributions by experiment.

    Attributes:
        name: name of the check in files and flags.
        title: question that the check answers.
        method: description of the method and of the criterion, for the report.
        columns: headings in the report by column of the table.
        arrays: stored arrays of numbers per frame; empty if none are stored.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    method: ClassVar[str]
    columns: ClassVar[dict[str, str]]
    arrays: ClassVar[dict[str, Array]] = {}

    def key(self, subject: Subject) -> tuple[str, ...]:
        """Return the parts of the file path under which the numbers per frame are stored."""
        return subject.name

    def owner(self, context: CheckContext, subject: Subject) -> str:
        """Return the checksum of the features or agent to which the stored numbers belong."""
        return subject.features.checksum

    def compute(self, context: CheckContext, subject: Subject) -> Arrays:
        """Compute the numbers per frame of one subject."""
        raise NotImplementedError

    def compute_all(self, context: CheckContext, subjects: Sequence[Subject]
                    ) -> Iterator[tuple[Subject, Arrays]]:
        """Yield each subject with its numbers per frame."""
        for subject in subjects:
            yield subject, self.compute(context, subject)

    def rows(self, context: CheckContext, subject: Subject, arrays: Arrays) -> pd.DataFrame:
        """Return the rows of the table for one subject."""
        raise NotImplementedError

    def table(self, context: CheckContext, stored: Mapping[Subject, Arrays]) -> pd.DataFrame:
        """Return the table of all subjects, with the columns ``layer`` and ``output``."""
        return pd.concat({subject.name: self.rows(context, subject, arrays)
                          for subject, arrays in stored.items()}, names=["layer", "output"]
                         ).reset_index(["layer", "output"]).reset_index(drop=True)

    @abc.abstractmethod
    def plot(self, table: pd.DataFrame, arrays: Mapping[Name, Arrays]) -> Figure:
        """Draw the figure from the table and from the numbers per frame of each subject."""

    @abc.abstractmethod
    def verdict(self, table: pd.DataFrame) -> str:
        """Return the answer in a sentence that names the exceptions."""


def summarise(met: pd.Series, table: pd.DataFrame, statement: str, *more: str) -> str:
    """Return a sentence on how many rows satisfy a statement, naming the rows that do not.

    Args:
        met: whether each row satisfies the statement.
        table: the rows, with the columns ``layer`` and ``output``.
        statement: the statement.
        more: further columns that identify a row in the sentence.
    """
    holds = met.to_numpy(bool)
    if not len(holds):
        return f"{statement}: nothing to tell."
    names = table[["layer", "output", *more]].agg(", ".join, axis=1)
    if holds.all():
        return f"{statement}: yes, in all {len(holds)} cases."
    return (f"{statement}: in {holds.sum()} of {len(holds)} cases; not so for "
            + "; ".join(names[~holds]) + ".")


def panels(rows: int, columns: int) -> tuple[Figure, np.ndarray]:
    """Create a figure with a grid of axes (rows, columns)."""
    figure = Figure(figsize=(PANEL_WIDTH * columns, 3.4 * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def by_name(table: pd.DataFrame) -> list[tuple[Name, pd.DataFrame]]:
    """Group the rows of a table by layer and output, in the order of the table."""
    return list(table.groupby(["layer", "output"], sort=False))

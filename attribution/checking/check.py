"""Base class of the checks of attributions, and evaluation of outputs at changed activations of a
layer.

A check computes per-frame results of each attributed layer and output, and summarises them in a
table, a figure and a one-sentence verdict. All checks use the same frames.

Letters in shape comments: N frames, B frames of a batch, C H W channels and grid of a layer,
F features, R changed copies of the activations of single frames.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from agents.networks import Policy
from agents.outputs import Output
from agents.replay import recorded_game
from attribution.context import AttributionContext
from attribution.integrated_gradients import (
    GRADIENT_ACTIVATION,
    Integration,
    LayerIntegratedGradients,
)
from attribution.layers import Bottleneck
from attribution.recordings import RecordedFrames, batches
from attribution.results import AttributionStore, LayerFeatures
from common.devices import Compute
from common.progress import with_progress
from common.results import Array
from envs.objects import GameObject, objects_of
from interventions.partial_forward import Prefix

Arrays = dict[str, np.ndarray]
Name = tuple[str, str]  # names of a layer and an output


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
    """An output, and a layer to whose features it is attributed.

    Attributes:
        bottleneck: the layer, which has a spatial map.
        features: features of the layer.
        output: the output.
    """

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
        steps: indices of the checked frames among the steps of all trajectories, ascending (N,).
        places: episode and row of each checked frame in the recording, int32 (N, 2); rows of an
            episode are adjacent and ascending.
        seed: seed of all random draws.
    """

    agent: AttributionContext
    attributions: AttributionStore
    steps: np.ndarray
    places: np.ndarray
    seed: int

    @property
    def episodes(self) -> np.ndarray:
        """Episode of each frame (N,)."""
        return self.places[:, 0]

    @functools.cached_property
    def kinds(self) -> tuple[GameObject, ...]:
        """Kinds of object in the recorded game; empty if the game has no table of objects."""
        return objects_of(recorded_game(self.agent.recording.folder).env_name)

    def subset(self, number: int) -> CheckContext:
        """Return the context with at most ``number`` evenly spaced frames."""
        chosen = np.unique(np.linspace(0, len(self.steps) - 1, min(number, len(self.steps))).round()
                           ).astype(int)
        return dataclasses.replace(self, steps=self.steps[chosen], places=self.places[chosen])

    def attributed(self, subject: Subject, array: str) -> np.ndarray:
        """Read the stored attributions of an output to a layer in the checked frames.

        Args:
            subject: layer and output.
            array: "cells" for attributions per cell, or "totals" for their sums over cells.

        Returns:
            Attributions to the features and, last, the residual: float32 (N, H, W, F + 1) or
            (N, F + 1).

        Raises:
            UserError: if a file is missing or damaged.
        """
        return self.attributions.read_all("attributions", *subject.name, name=array)[
            self.steps].astype(np.float32)

    def cells(self, subject: Subject) -> np.ndarray:
        """Return the attributions to each cell, summed over features and residual, float32
        (N, H, W)."""
        return self.attributed(subject, "cells").sum(axis=-1)


@dataclasses.dataclass(frozen=True)
class Batch:
    """A batch of frames with the activations of a layer.

    Attributes:
        rows: indices of the batch's frames among all checked frames (B,).
        prefix: activations of the layer, and the other inputs of the part of the network after it.
        actions: actions taken (B,).
    """

    rows: np.ndarray
    prefix: Prefix
    actions: np.ndarray


class CheckedLayer(LayerIntegratedGradients):
    """Computes an output of an agent at changed activations of a layer.

    Args:
        agent: the agent and its recording.
        subject: layer and output.
        integration: settings of the numerical integration.

    Attributes:
        start: baseline of the activations (C, H, W).
    """

    def __init__(self, agent: AttributionContext, subject: Subject,
                 integration: Integration = GRADIENT_ACTIVATION):
        baseline = subject.features.baseline
        super().__init__(agent.policy, agent.compute, subject.bottleneck, [subject.output],
                         integration, baseline)
        self._recording = agent.recording
        self.start = (torch.zeros(subject.bottleneck.shape) if baseline is None
                      else torch.from_numpy(baseline))

    def read(self, context: CheckContext, unit: str) -> Iterator[Batch]:
        """Yield the checked frames batch by batch, with a progress bar.

        Args:
            context: the checked frames.
            unit: word for a batch in the progress bar.
        """
        rows_of = list(batches(np.arange(len(context.places))))
        for rows in with_progress(rows_of, len(rows_of), unit):
            recorded = self._recording.read(context.places[rows])
            yield Batch(rows, self.run_prefix(recorded.frames, recorded.entering), recorded.actions)

    def changed_outputs(self, batch: Batch, changed: Tensor, frame: np.ndarray) -> np.ndarray:
        """Compute the output at changed activations of the layer.

        Args:
            batch: the unchanged frames.
            changed: changed activations (R, C, H, W).
            frame: index in the batch of the frame of each changed copy (R,).

        Returns:
            Outputs, float64 (R,).
        """
        return self.outputs_at(dataclasses.replace(
            batch.prefix, activations=changed,
            also_read=tuple(state[torch.from_numpy(frame)] for state in batch.prefix.also_read)),
            batch.actions[frame])[0]


def cell_attributions(policy: Policy, compute: Compute, bottleneck: Bottleneck, output: Output,
                      recorded: RecordedFrames, integration: Integration,
                      baseline: np.ndarray | None = None) -> np.ndarray:
    """Attribute an output to the cells of a layer by integrated gradients.

    Args:
        policy: the agent.
        compute: device and precision.
        bottleneck: the layer.
        output: the output.
        recorded: N recorded frames.
        integration: settings of the numerical integration.
        baseline: baseline activations (C, H, W); None for zero.

    Returns:
        Attributions summed over channels, float64 (N, H, W).
    """
    attributor = LayerIntegratedGradients(policy, compute, bottleneck, [output], integration,
                                          baseline)
    return np.concatenate([
        attributor.attribute(attributor.run_prefix(frames, entering), actions, np.zeros(1)
                             ).values[0].sum(axis=1, dtype=np.float64)
        for frames, entering, actions in zip(*map(batches, vars(recorded).values()))])


class Check(abc.ABC):
    """A check of attributions by experiment.

    Attributes:
        title: question that the check answers.
        method: description of the method and of the criterion, for the report.
        columns: column headings in the report, by the name of the column in the table.
        arrays: stored arrays with per-frame results, by name; empty if none are stored.
    """

    title: ClassVar[str]
    method: ClassVar[str]
    columns: ClassVar[dict[str, str]]
    arrays: ClassVar[dict[str, Array]] = {}

    def place(self, context: CheckContext, subject: Subject) -> tuple[tuple[str, ...], str]:
        """Return the key under which the results for a layer and an output are stored, and the
        checksum of the features or agent from which these results were computed.

        By default, the key consists of the names of layer and output.
        """
        return subject.name, subject.features.checksum

    def compute(self, context: CheckContext, subject: Subject) -> Arrays:
        """Compute the per-frame results of a layer and an output, as declared in ``arrays``."""
        raise NotImplementedError

    def compute_all(self, context: CheckContext, subjects: Sequence[Subject]
                    ) -> Iterator[tuple[Subject, Arrays]]:
        """Compute the per-frame results of several layers and outputs. Yield each subject with its
        results; results that are the same for all layers are yielded with one subject only."""
        for subject in subjects:
            yield subject, self.compute(context, subject)

    def rows(self, context: CheckContext, subject: Subject, arrays: Arrays) -> pd.DataFrame:
        """Summarise the per-frame results of a layer and an output as rows of the table."""
        raise NotImplementedError

    def table(self, context: CheckContext, stored: Mapping[Subject, Arrays]) -> pd.DataFrame:
        """Return the table for all layers and outputs with stored results. Its first columns are
        ``layer`` and ``output``."""
        return pd.concat({subject.name: self.rows(context, subject, arrays)
                          for subject, arrays in stored.items()}, names=["layer", "output"]
                         ).reset_index(["layer", "output"]).reset_index(drop=True)

    @abc.abstractmethod
    def plot(self, table: pd.DataFrame, arrays: Mapping[Name, Arrays]) -> Figure:
        """Draw the figure of the check.

        Args:
            table: the check's table.
            arrays: per-frame results, by the names of layer and output.
        """

    @abc.abstractmethod
    def verdict(self, table: pd.DataFrame) -> str:
        """Return a sentence that answers ``title`` and names any exceptions."""


def summarise(met: pd.Series, table: pd.DataFrame, statement: str, *more: str) -> str:
    """Return a sentence on how many rows satisfy a statement, naming the rows that do not.

    Args:
        met: whether each row satisfies the statement.
        table: the rows, with the columns ``layer`` and ``output``.
        statement: the statement.
        more: columns that identify a row in the sentence, in addition to layer and output.
    """
    holds = met.to_numpy(bool)
    if not len(holds):
        return f"{statement}: no cases."
    names = table[["layer", "output", *more]].agg(", ".join, axis=1)[~holds]
    return f"{statement}: " + (f"yes, in all {len(holds)} cases." if holds.all() else (
        f"in {holds.sum()} of {len(holds)} cases; exceptions: {'; '.join(names)}."))


def panels(rows: int, columns: int) -> tuple[Figure, np.ndarray]:
    """Create a figure with a grid of axes, (rows, columns)."""
    figure = Figure(figsize=(4.2 * columns, 3.4 * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def format_rows(table: pd.DataFrame) -> list[list[str]]:
    """Format the cells of a table for a report: floats with three significant digits, and a dash if
    they are not finite."""
    return [[(f"{value:.3g}" if np.isfinite(value) else "–") if isinstance(value, float)
             else str(value) for value in row] for row in table.itertuples(index=False)]

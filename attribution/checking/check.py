"""Base class of the checks of attributions, and what they share.

A check computes numbers per frame for each attributed layer and output, which are stored, and turns
them into a table, a figure and a sentence.

Letters in shape comments: N frames, H W a layer's grid, F features.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from agents.outputs import Output
from agents.replay import recorded_game
from attribution.checking.frames import (
    GRADIENT,
    CheckedFrames,
    CheckedLayer,
    read_attributions,
)
from attribution.context import AttributionContext
from attribution.integrated_gradients import Integration
from attribution.layers import Bottleneck
from attribution.results import AttributionStore, LayerFeatures
from common.results import Array
from envs.objects import GameObject, objects_of

Arrays = dict[str, np.ndarray]
Name = tuple[str, str]  # of a layer and an output
PANEL_WIDTH = 4.2


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
    """An output that is attributed to the features of a layer with cells."""

    bottleneck: Bottleneck
    features: LayerFeatures
    output: Output

    @property
    def name(self) -> Name:
        """Short name of the layer, and name of the output."""
        return self.bottleneck.name, self.output.name


@dataclasses.dataclass(frozen=True)
class CheckContext:
    """Everything that checks share.

    Attributes:
        agent: the agent and its recording.
        attributions: its attributions.
        frames: frames in which they are checked.
        seed: seed of all random draws.
    """

    agent: AttributionContext
    attributions: AttributionStore
    frames: CheckedFrames
    seed: int

    @functools.cached_property
    def kinds(self) -> tuple[GameObject, ...]:
        """Kinds of object of the recorded game; empty if the game has no table of objects."""
        return objects_of(recorded_game(self.agent.recording.folder).env_name)

    def layer(self, subject: Subject, integration: Integration = GRADIENT) -> CheckedLayer:
        """Return the layer of a subject for interventions on its activations."""
        return CheckedLayer(self.agent, subject.bottleneck, subject.features, subject.output,
                            integration)

    def cells(self, subject: Subject) -> np.ndarray:
        """Return the attributions to each cell, summed over features, float32 (N, H, W)."""
        return read_attributions(self.attributions, *subject.name, self.frames,
                                 "cells").sum(axis=-1)


class Check(abc.ABC):
    """A check of attributions by experiment.

    Attributes:
        name: name in files and flags.
        title: question that the check answers.
        method: how it is answered, and when the answer is yes.
        columns: headings of the table's columns in the report.
        arrays: stored numbers per frame; empty if none are stored.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    method: ClassVar[str]
    columns: ClassVar[dict[str, str]]
    arrays: ClassVar[dict[str, Array]] = {}

    def key(self, subject: Subject) -> tuple[str, ...]:
        """Return the names in the path of the stored numbers."""
        return subject.name

    def owner(self, context: CheckContext, subject: Subject) -> str:
        """Return the checksum of what the stored numbers belong to."""
        return subject.features.checksum

    def compute(self, context: CheckContext, subject: Subject) -> Arrays:
        """Compute the numbers per frame of one subject."""
        raise NotImplementedError

    def compute_all(self, context: CheckContext, subjects: Sequence[Subject]
                    ) -> Iterator[tuple[Subject, Arrays]]:
        """Compute the numbers per frame of several subjects, one after the other."""
        for subject in subjects:
            yield subject, self.compute(context, subject)

    def rows(self, context: CheckContext, subject: Subject, arrays: Arrays) -> pd.DataFrame:
        """Return the rows of one subject in the table."""
        raise NotImplementedError

    def table(self, context: CheckContext, stored: Mapping[Subject, Arrays]) -> pd.DataFrame:
        """Return the table of all subjects, with the columns ``layer`` and ``output``."""
        return pd.concat({subject.name: self.rows(context, subject, arrays)
                          for subject, arrays in stored.items()}, names=["layer", "output"]
                         ).reset_index(["layer", "output"]).reset_index(drop=True)

    @abc.abstractmethod
    def plot(self, table: pd.DataFrame, arrays: Mapping[Name, Arrays]) -> Figure:
        """Draw the figure from the table, and from the numbers by layer and output."""

    @abc.abstractmethod
    def verdict(self, table: pd.DataFrame) -> str:
        """Return the answer in a sentence, which names the exceptions."""


def summarise(met: pd.Series, table: pd.DataFrame, statement: str, *more: str) -> str:
    """Return in how many rows of a table a statement holds, and name the others.

    Args:
        met: whether it holds, per row.
        more: columns that tell rows apart, in addition to the layer and the output.
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
    """Return a figure with a grid of axes."""
    figure = Figure(figsize=(PANEL_WIDTH * columns, 3.4 * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def by_name(table: pd.DataFrame) -> list[tuple[Name, pd.DataFrame]]:
    """Return the rows of each layer and output, in the order of the table."""
    return list(table.groupby(["layer", "output"], sort=False))

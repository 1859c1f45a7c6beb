"""All checks of an agent's attributions: numbers by frame, then tables and figures of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pandas as pd

from agents.outputs import Output
from agents.replay import recorded_game
from attribution.checking import check_figures
from attribution.checking.check_files import (
    COMPLETENESS,
    DELETION,
    FIDELITY,
    INTERVENTIONS,
    OBJECTS,
    RANDOMISATION,
    ChecksFolder,
)
from attribution.checking.check_report import HIGH_BAR, MEDIAN_BAR
from attribution.checking.checked_frames import (
    CheckedFrames,
    CheckedLayer,
    attributed_cells,
    attributed_totals,
)
from attribution.checking.deletion import Curves, deletion_curves, deletion_table
from attribution.checking.fidelity import fidelity_of
from attribution.checking.object_files import packed, unpacked
from attribution.checking.object_removal import objects_table, removals
from attribution.checking.randomisation import (
    randomisation_correlations,
    randomisation_table,
    stages_of,
)
from attribution.checking.taken_out import changes_without_features, features_table
from attribution.context import AttributionContext
from attribution.integrated_gradients import Integration
from attribution.layers import Bottleneck
from attribution.results import AttributionFolder, LayerFeatures
from envs.objects import GameObject, objects_of

# Frames of the checks whose attributions are computed many times over.
RANDOMISATION_FRAMES, FIDELITY_FRAMES = 64, 32


@dataclasses.dataclass(frozen=True)
class Subject:
    """One output attributed to one layer.

    Attributes:
        bottleneck: a layer with cells.
        features: of the layer.
        output: that is attributed.
    """

    bottleneck: Bottleneck
    features: LayerFeatures
    output: Output

    @property
    def name(self) -> tuple[str, str]:
        """Short name of the layer, and of the output."""
        return self.bottleneck.name, self.output.name


class AgentChecks:
    """Checks of attributions of an agent.

    Args:
        context: the agent and its recording.
        attributions: of the agent.
        subjects: all that can be checked.
        frames: in which.
        folder: opened.
        seed: of all that is drawn.
    """

    def __init__(self, context: AttributionContext, attributions: AttributionFolder,
                 subjects: Sequence[Subject], frames: CheckedFrames, folder: ChecksFolder,
                 seed: int):
        self._opened, self._attributions = context, attributions
        self._subjects, self._frames = subjects, frames
        self._folder, self._seed = folder, seed
        settings = attributions.settings()
        self._integration = Integration(settings["steps"], settings["rule"], None)

    @functools.cached_property
    def _kinds(self) -> tuple[GameObject, ...]:
        """Kinds of object of the recorded game, none if there is no table of it."""
        return objects_of(recorded_game(self._opened.recording.folder).env_name)

    def make(self, checks: Sequence[str], asked: Sequence[Subject]) -> None:
        """Compute what is not there yet of some checks of some subjects, layer by layer.

        Raises:
            UserError: if objects are among them and the recording cannot be played again.
        """
        makers: dict[str, Callable[[Subject], dict[str, np.ndarray]]] = {
            DELETION: self._deletion, RANDOMISATION: self._randomisation,
            INTERVENTIONS: self._interventions, FIDELITY: self._fidelity}
        for check in checks:
            if check == OBJECTS and self._kinds:
                self._remove_objects(asked)
            elif check in makers:
                for subject in asked:
                    if self._raw(check, subject) is None:
                        path = self._folder.raw_file(check, subject.output.name,
                                                     subject.bottleneck.name)
                        self._folder.add_raw(path, subject.features.checksum,
                                             **makers[check](subject))

    def write(self) -> dict[str, pd.DataFrame]:
        """Tables and figures of all checks that are there; returns the tables."""
        tables = {COMPLETENESS: self._completeness()}
        drawn = {check: [(subject, raw) for subject in self._subjects
                         if (raw := self._raw(check, subject)) is not None]
                 for check in (DELETION, RANDOMISATION, INTERVENTIONS, OBJECTS, FIDELITY)}
        rows = {DELETION: self._deletion_rows, RANDOMISATION: self._randomisation_rows,
                INTERVENTIONS: self._interventions_rows, OBJECTS: self._objects_rows,
                FIDELITY: self._fidelity_rows}
        for check, found in drawn.items():
            if found:
                tables[check] = pd.concat(
                    [_named(subject, rows[check](subject, raw)) for subject, raw in found],
                    ignore_index=True)
        for check, table in tables.items():
            self._folder.add_table(check, table)
        self._plot(tables, drawn)
        return tables

    def _plot(self, tables: dict[str, pd.DataFrame], drawn: dict[str, list]) -> None:
        raw = {check: {subject.name: each for subject, each in found}
               for check, found in drawn.items()}
        with self._folder.figure(COMPLETENESS) as path:
            check_figures.plot_completeness(path, tables[COMPLETENESS])
        plots = {
            DELETION: lambda path: check_figures.plot_deletion(path, {
                name: each["values"].mean(axis=0) for name, each in raw[DELETION].items()}),
            RANDOMISATION: lambda path: check_figures.plot_randomisation(
                path, tables[RANDOMISATION]),
            INTERVENTIONS: lambda path: check_figures.plot_interventions(path, {
                name: (-each["totals"], each["changes"])
                for name, each in raw[INTERVENTIONS].items()}),
            OBJECTS: lambda path: check_figures.plot_objects(path, tables[OBJECTS]),
            FIDELITY: lambda path: check_figures.plot_fidelity(path, {
                name: each["values"] for name, each in raw[FIDELITY].items()})}
        for check, plot in plots.items():
            if check in tables:
                with self._folder.figure(check) as path:
                    plot(path)

    def _raw(self, check: str, subject: Subject) -> dict[str, np.ndarray] | None:
        """Numbers by frame of a check, or None."""
        if check == OBJECTS:
            return self._folder.raw(self._folder.raw_file(OBJECTS, subject.output.name),
                                    self._opened.provenance["agent_sha256"])
        return self._folder.raw(
            self._folder.raw_file(check, subject.output.name, subject.bottleneck.name),
            subject.features.checksum)

    def _layer(self, subject: Subject, *integration: Integration) -> CheckedLayer:
        return CheckedLayer(self._opened, subject.bottleneck, subject.features, subject.output,
                            *integration)

    def _cells(self, subject: Subject) -> np.ndarray:
        """Attributions of the subject to features, (N, H, W, F + 1)."""
        return attributed_cells(self._attributions, *subject.name, self._frames)

    # Numbers by frame.

    def _deletion(self, subject: Subject) -> dict[str, np.ndarray]:
        cells = self._cells(subject).sum(axis=-1)
        return {"values": deletion_curves(self._layer(subject), self._frames, cells,
                                          self._seed).values}

    def _randomisation(self, subject: Subject) -> dict[str, np.ndarray]:
        rows = self._opened.recording.read(self._frames.some(RANDOMISATION_FRAMES).places)
        mean = subject.features.mean_activations
        return {"correlations": randomisation_correlations(
            self._opened.policy, self._opened.compute, subject.bottleneck, subject.output, rows,
            mean if subject.features.settings["baseline"] == "mean" else None, self._seed)}

    def _interventions(self, subject: Subject) -> dict[str, np.ndarray]:
        return {"changes": changes_without_features(self._layer(subject), self._frames),
                "totals": attributed_totals(self._attributions, *subject.name,
                                            self._frames)[:, :-1]}

    def _fidelity(self, subject: Subject) -> dict[str, np.ndarray]:
        return {"values": fidelity_of(self._layer(subject, self._integration),
                                      self._frames.some(FIDELITY_FRAMES), self._seed)}

    def _remove_objects(self, asked: Sequence[Subject]) -> None:
        outputs = [output for output in dict.fromkeys(each.output for each in asked)
                   if not self._folder.raw_file(OBJECTS, output.name).exists()]
        if not outputs:
            return
        found = removals(self._opened, self._frames, self._kinds, outputs)
        masks = packed(found.masks)
        for output, changes in zip(outputs, found.changes):
            self._folder.add_raw(self._folder.raw_file(OBJECTS, output.name),
                                 self._opened.provenance["agent_sha256"], masks=masks,
                                 changes=changes)

    # Rows of tables.

    def _completeness(self) -> pd.DataFrame:
        """Gaps of all frames, layers and outputs that were attributed."""
        numbers = range(len(self._attributions.trajectories().bounds) - 1)
        rows = []
        for layer, output in self._attributed():
            gaps = np.concatenate([self._attributions.attributed(layer, output, number).gap
                                   for number in numbers])
            median, high = float(np.median(gaps)), float(np.quantile(gaps, 0.99))
            rows.append((layer, output, len(gaps), median, high, float(gaps.max()),
                         self._attributions.summary(layer, output)["above"],
                         median <= MEDIAN_BAR and high <= HIGH_BAR))
        return pd.DataFrame(rows, columns=["layer", "output", "frames", "median", "high",
                                           "largest", "above", "met"])

    def _attributed(self) -> Iterator[tuple[str, str]]:
        for layer in self._attributions.layers():
            for output in self._attributions.outputs(layer):
                yield layer, output

    def _deletion_rows(self, subject: Subject, raw: dict[str, np.ndarray]) -> pd.DataFrame:
        deviation = self._attributions.summary(*subject.name)["deviation"]
        return deletion_table(Curves(raw["values"]), self._frames.episodes, deviation or 1.0,
                              self._seed)

    def _randomisation_rows(self, subject: Subject, raw: dict[str, np.ndarray]) -> pd.DataFrame:
        return randomisation_table(
            raw["correlations"], [name for name, _ in stages_of(self._opened.policy)],
            self._frames.some(RANDOMISATION_FRAMES).episodes, self._seed)

    def _interventions_rows(self, subject: Subject, raw: dict[str, np.ndarray]) -> pd.DataFrame:
        return features_table(raw["changes"], raw["totals"], self._frames.episodes, self._seed)

    def _objects_rows(self, subject: Subject, raw: dict[str, np.ndarray]) -> pd.DataFrame:
        return objects_table(
            unpacked(raw["masks"]), raw["changes"], self._cells(subject).sum(axis=-1),
            subject.bottleneck,
            [kind.name for kind in self._kinds], self._frames.episodes, self._seed)

    def _fidelity_rows(self, subject: Subject, raw: dict[str, np.ndarray]) -> pd.DataFrame:
        infidelity, sensitivity = np.nanmedian(raw["values"], axis=0)
        return pd.DataFrame([(len(raw["values"]), infidelity, sensitivity)],
                            columns=["frames", "infidelity", "sensitivity"])


def _named(subject: Subject, table: pd.DataFrame) -> pd.DataFrame:
    table.insert(0, "output", subject.output.name)
    table.insert(0, "layer", subject.bottleneck.name)
    return table

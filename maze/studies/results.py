"""The folders of all studies of one agent, by name, and readers of the tables that they hold."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from common.description import read_description
from common.errors import UserError
from common.tables import read_table
from maze.studies.channel_sets import NOTHING_NAME
from maze.studies.multiplied import EFFECT_COLUMNS
from maze.studies.probing import COLUMNS as PROBES
from maze.studies.steering_files import SteeringFolder
from maze.studies.tracks import COLUMNS as TRACKS

EVALUATED = "evaluated"
PLACES = REGION, ANYWHERE, CORNER = "region", "anywhere", "corner"  # of the cheese
BEHAVIOUR, CHANNELS, RETARGETING, SCRUBBING = "behaviour", "channels", "retargeting", "scrubbing"
STEERING, FIELDS, SOURCES = "steering", "steering_fields", "steering_sources"
LAYERS, ALL_LAYERS = "steering_layers", "steering_all_layers"
TOP_RIGHT, BOTH = "steering_top_right", "steering_both"
ALL_RETARGETING = "retargeting_all"  # all chosen channels, where RETARGETING has the strongest
STUDIES = (BEHAVIOUR, STEERING, FIELDS, SOURCES, LAYERS, ALL_LAYERS, TOP_RIGHT, BOTH, CHANNELS,
           RETARGETING, ALL_RETARGETING, SCRUBBING)
# Of each study the file that it writes last, or instead.
_LAST = {**dict.fromkeys(STUDIES, ("report.md",)), CHANNELS: ("channels.csv",),
         **dict.fromkeys((RETARGETING, ALL_RETARGETING), ("*/targets.csv", NOTHING_NAME)),
         SCRUBBING: ("scrubbing.csv", NOTHING_NAME)}
_NUMBERS = ("effect", "low_95", "high_95")
_PARTS = {"by": str, "part": str, "outcome": str, "levels": int, "targets": int,
          **dict.fromkeys(("unpatched", "patched", *_NUMBERS, "ratio", "share_larger"), float)}
_JUDGED = {"arm": str, "control": bool, "outcome": str, **dict.fromkeys(
    ("unaltered", "altered", *_NUMBERS, "p", "p_holm", "p_control"), float)}
_CONDITIONS = {"channels": str, "feature": str, "outcome": str,
               **dict.fromkeys(("mean", "low_95", "high_95"), float)}


class StudiesFolder:
    """The studies of one agent.

    Args:
        path: the folder that holds a folder for each.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        if not self.path.is_dir():
            raise UserError(f"there is no folder {self.path} of studies of an agent")

    def has(self, study: str) -> bool:
        """Whether a study is finished."""
        return any(any((self.path / study).glob(name)) for name in _LAST[study])

    def settings(self, study: str) -> dict:
        """Description of the run that made a study."""
        return read_description(self.path / study / "settings.json")

    def evaluation(self, cheese: str) -> dict:
        """The result of evaluate.py with the cheese in REGION, ANYWHERE or in the CORNER; empty
        if it has not been run."""
        return read_description(self.path / EVALUATED / f"{cheese}.json")

    def steered(self, study: str, fields: bool = False) -> pd.DataFrame:
        """Effects of vectors at decision squares, or over fields, of which there may be none."""
        folder = SteeringFolder(self.path / study)
        if fields and not folder.field_effects_file.exists():
            return folder.effects().iloc[:0]
        return folder.effects(fields)

    def tracks(self) -> pd.DataFrame:
        """Tracking scores of channels, and which were chosen."""
        return self._read(CHANNELS, "channels.csv", {**TRACKS, "chosen": bool})

    def multiplied(self) -> pd.DataFrame:
        """Effects of multiplied channels; empty if none was chosen."""
        if not (self.path / CHANNELS / "effects.csv").exists():
            return pd.DataFrame(columns=list(EFFECT_COLUMNS))
        return self._read(CHANNELS, "effects.csv", EFFECT_COLUMNS)

    def probes(self) -> pd.DataFrame:
        """Scores of the probes."""
        return self._read(CHANNELS, "probes.csv", PROBES)

    def retargeted(self, study: str) -> dict[str, pd.DataFrame]:
        """Means over targets, by arm."""
        return {path.parent.name: read_table(path, _PARTS, ("ratio",)) for path in sorted(
            (self.path / study).glob("*/parts.csv"))}

    def retargeting_effects(self, study: str, arm: str) -> pd.DataFrame:
        """Effects against controls; empty if none were tried."""
        path = self.path / study / arm / "effects.csv"
        return read_table(path, _JUDGED) if path.exists() else pd.DataFrame(columns=list(_JUDGED))

    def scrubbed(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Means of the conditions, and the double contrasts; empty if no channel was chosen."""
        if not (self.path / SCRUBBING / "scrubbing.csv").exists():
            return (pd.DataFrame(columns=list(_CONDITIONS)),
                    pd.DataFrame(columns=[*_JUDGED, "supported"], dtype=object))
        return (self._read(SCRUBBING, "conditions.csv", _CONDITIONS),
                self._read(SCRUBBING, "contrasts.csv", {**_JUDGED, "supported": bool}))

    def _read(self, study: str, name: str, columns: dict[str, type]) -> pd.DataFrame:
        gaps = [column for column, kind in columns.items() if kind is float]
        return read_table(self.path / study / name, columns, gaps, f"python -m maze.{study}")

"""The studies of one agent that the article's table is made from, and readers of their tables."""

from __future__ import annotations

import functools
from pathlib import Path

import pandas as pd

from clarity.attributing.clarity_files import AttributionFolder, FeaturesFolder, LayerFeatures
from clarity.checking.check_files import OBJECTS, ChecksFolder
from clarity.checking.check_files import SCRIPT as CHECKS_SCRIPT
from clarity.checking.object_files import ObjectsFolder
from clarity.failing.files import SCRIPT as CAUSES_SCRIPT
from clarity.failing.files import CausesFolder
from common.errors import UserError
from common.tables import read_table

_OBJECTS = {"layer": str, "output": str, "kind": str, "frames": int, **dict.fromkeys(
    ("density", "density_low_95", "density_high_95", "attribution_sign"), float)}
_RATES = ("rate", "low_95", "high_95")
_CAUSES = {"arm": str, "cause": str, "levels": int, **dict.fromkeys(_RATES, float)}
_EFFECTS = {"label": str, "outcome": str, "control": bool, "claimed": bool, **dict.fromkeys(
    ("unaltered", "altered", "effect", "low_95", "high_95", "p", "p_holm", "p_control"), float)}
_BLINDNESS = {"label": str, "hazard": str, **dict.fromkeys(
    ("blindness", "low_95", "high_95"), float)}


class AgentStudies:
    """The folders of an agent's studies.

    Args:
        path: the folder that holds ``attribution``, ``features``, ``objects``, ``checks`` and
            ``causes``, as far as they have been made.

    Raises:
        UserError: if it holds no attributions.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        self.attributions = AttributionFolder(self.path / "attribution")
        self.attributions.settings()
        self.objects = ObjectsFolder(self.path / "objects")
        self.layers = [layer for layer in self.attributions.layers()
                       if (self.path / "features" / layer).is_dir()]
        if not self.layers:
            raise UserError(f"{self.path} has attributions, but features of none of their layers")

    def features(self, layer: str) -> LayerFeatures:
        """The features of a layer."""
        return FeaturesFolder(self.path / "features", layer).read()

    def density(self, layer: str, output: str) -> pd.DataFrame:
        """Attributions on objects, a row a kind; empty if they have not been checked."""
        return self._chosen(ChecksFolder(self.path / "checks").table_file(OBJECTS), _OBJECTS,
                            CHECKS_SCRIPT, layer=layer, output=output)

    def causes(self) -> pd.DataFrame:
        """Failures by arm and cause; empty if they have not been counted."""
        return self._chosen(self._causes.causes_file, _CAUSES, CAUSES_SCRIPT)

    def effects(self) -> pd.DataFrame:
        """Effects of arms on failures by cause; empty likewise."""
        return self._chosen(self._causes.effects_file, _EFFECTS, CAUSES_SCRIPT)

    def blindness(self) -> pd.DataFrame:
        """By edit and invisible hazard; empty likewise."""
        return self._chosen(self._causes.blindness_file, _BLINDNESS, CAUSES_SCRIPT)

    @functools.cached_property
    def _causes(self) -> CausesFolder:
        game = str(self.attributions.settings().get("game"))
        return CausesFolder(self.path / "causes", game)

    def _chosen(self, path: Path, kinds: dict[str, type], script: str, **where: str
                ) -> pd.DataFrame:
        if not path.exists():
            return pd.DataFrame(columns=list(kinds))
        gaps = [name for name, kind in kinds.items() if kind is float]
        table = read_table(path, kinds, gaps, script)
        for name, value in where.items():
            table = table[table[name] == value]
        return table

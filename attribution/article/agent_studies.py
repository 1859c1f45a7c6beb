"""The studies of one agent that the article's table is made from, and readers of their tables."""

from __future__ import annotations

import functools
from pathlib import Path

import pandas as pd

from attribution.checking.agent_checks import CHECK_FILES
from attribution.checking.object_files import OBJECT_FILES
from attribution.failures.results import FAILURES
from attribution.results import (
    AttributionStore,
    LayerFeatures,
    read_features,
)
from common.errors import UserError
from common.results import ResultStore


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
        self.attributions = AttributionStore(self.path / "attribution")
        self.attributions.settings()
        self.objects = ResultStore(self.path / "objects", OBJECT_FILES)
        self.causes = ResultStore(self.path / "causes", FAILURES)
        self.layers = [layer for layer in self.attributions.layers()
                       if (self.path / "features" / layer).is_dir()]
        if not self.layers:
            raise UserError(f"{self.path} has attributions, but features of none of their layers")

    @functools.cached_property
    def features(self) -> dict[str, LayerFeatures]:
        """The features of each layer, by its name."""
        return {layer: read_features(self.path / "features", layer)
                for layer in self.layers}

    def densities(self, layer: str, output: str) -> pd.DataFrame:
        """Attributions on objects, a row a kind; empty if they have not been checked."""
        store = ResultStore(self.path / "checks", CHECK_FILES)
        if not store.has("objects_table"):
            return pd.DataFrame()
        table = store.read("objects_table")
        return table[(table["layer"] == layer) & (table["output"] == output)]

"""Files of the studies of maze agents: the schema of each study, and the folder of all studies.

``analysis/maze/`` has a folder per study. Steering, with groups of arms and numbers of forks::

    decisions/<group>/<number>.npz    outcomes of some forks at their decision squares
    fields/<group>/<number>.npz       the same over the fields of forks
    choosing/<group>/<number>.npz     outcomes of the forks on which layer and coefficient are
                                      chosen; see ``steering.Measured`` for the arrays
    vectors/<name>.npz                steering vectors
    decisions.csv                     a row per arm and fork
    effects.csv, field_effects.csv    a row per arm and outcome

Channels: ``steps/<set>.csv``, ``effects.csv``, ``probes.csv`` and ``channels.csv``. Retargeting,
per arm: ``levels/<seed>.csv``, ``controls/<seed>.csv``, ``parts.csv``, ``effects.csv`` and
``targets.csv``. Scrubbing: ``sets.csv``, ``levels/<number>_<seed>.csv``, ``conditions.csv``,
``contrasts.csv`` and ``scrubbing.csv``. Each has ``settings.json``, a report and figures.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from common.errors import UserError
from common.files import read_description
from common.results import Array, Entry, File, Npz, ResultStore, Schema, Table, Text
from maze.studies.channel_sets import NOTHING_NAME
from maze.studies.multiplied import EFFECT_COLUMNS
from maze.studies.probing import COLUMNS as PROBES
from maze.studies.retargets import COLUMNS as TARGETS
from maze.studies.retargets import CONTROL_COLUMNS
from maze.studies.scrubs import OUTCOMES as SCRUBBED
from maze.studies.steering import SIZES
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


def _exact(columns: dict[str, type]) -> Table:
    """A table that is computed part by part and read again to the last bit."""
    return Table(columns, exact=True, whole=True)


_PARTS = {"by": str, "part": str, "outcome": str, "levels": int, "targets": int,
          **dict.fromkeys(("unpatched", "patched", *_NUMBERS, "ratio", "share_larger"), float)}
_JUDGED = {"arm": str, "control": bool, "outcome": str, **dict.fromkeys(
    ("unaltered", "altered", *_NUMBERS, "p", "p_holm", "p_control"), float)}
_CONDITIONS = {"channels": str, "feature": str, "outcome": str,
               **dict.fromkeys(("mean", "low_95", "high_95"), float)}
_EFFECTS = {"arm": str, "label": str, "control": bool, "outcome": str,
            **dict.fromkeys(("unaltered", "altered", "effect", "low_95", "high_95", "p", "p_holm",
                             "p_control"), float), "claimed": bool, **dict.fromkeys(
                ("median_unaltered", "median_altered"), float), "verdict": str}
_OUTCOMES = Npz({"before": Array(np.float64, "N K", finite=False),
                 "after": Array(np.float64, "D A N K", finite=False),
                 "sizes": Array(np.float64, f"D A N {len(SIZES)}", finite=False)})
_MEDIANS = ("median_unaltered", "median_altered")
_REPORT, _FIGURE = Entry("report.md", Text()), File()
_NOTHING = Entry(NOTHING_NAME, Text())

DECISIONS_OF, FIELDS_OF, CHOOSING_OF = "decisions", "fields", "choosing"
STEERING_FILES = Schema(
    "effects of steering vectors", "python -m maze.steering", items={
        **{name: Entry(f"{name}/{{}}/{{}}.npz", _OUTCOMES)
           for name in (DECISIONS_OF, FIELDS_OF, CHOOSING_OF)},
        "vectors": Entry("vectors/{}.npz", File())},
    results={
        "table": Entry("decisions.csv", Table()),
        "effects": Entry("effects.csv", Table(_EFFECTS, _MEDIANS)),
        "field_effects": Entry("field_effects.csv", Table(_EFFECTS, _MEDIANS), optional=True),
        "figure": Entry("effects.png", _FIGURE), "report": _REPORT,
        "field_figure": Entry("field_effects.png", _FIGURE, optional=True),
        "curves": Entry("coefficients.png", _FIGURE, optional=True)})
CHANNEL_FILES = Schema(
    "tracking scores", "python -m maze.channels", items={
        "scores": Entry("steps/{}.csv", _exact(TRACKS)),
        "effects": Entry("effects.csv", _exact(EFFECT_COLUMNS)),
        "probes": Entry("probes.csv", _exact(PROBES))},
    results={"report": _REPORT, "figure": Entry("channels.png", _FIGURE),
             "channels": Entry("channels.csv", Table({**TRACKS, "chosen": bool}, exact=True))})
RETARGETING_FILES = Schema(  # tables and figures of an arm stay while another one is run
    "retargeted mazes", "python -m maze.retargeting", items={
        "levels": Entry("{}/levels/{}.csv", _exact(TARGETS)),
        "controls": Entry("{}/controls/{}.csv", _exact(CONTROL_COLUMNS)),
        "parts": Entry("{}/parts.csv", Table(_PARTS, ("ratio",), exact=True)),
        "effects": Entry("{}/effects.csv", Table(_JUDGED, (), exact=True)),
        "report": Entry("{}/report.md", Text()), "figure": Entry("{}/retargeting.png", _FIGURE),
        "targets": Entry("{}/targets.csv", _exact(TARGETS)), "nothing": _NOTHING})
SCRUBBING_FILES = Schema(
    "scrubbed levels", "python -m maze.scrubbing", items={
        "sets": Entry("sets.csv", _exact(
            {"set": str, "channels": str, "moved": float, "matched": bool})),
        "levels": Entry("levels/{}_{}.csv", _exact(
            {"seed": int, "set": str, "channels": str, "feature": str,
             **dict.fromkeys(SCRUBBED, float)}))},
    results={"conditions": Entry("conditions.csv", Table(_CONDITIONS, exact=True)),
             "contrasts": Entry("contrasts.csv", Table({**_JUDGED, "supported": bool}, exact=True)),
             "report": _REPORT, "figure": Entry("scrubbing.png", _FIGURE),
             "table": Entry("scrubbing.csv", Table(exact=True)),
             "nothing": Entry(NOTHING_NAME, Text(), optional=True)})


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
        store = ResultStore(self.path / study, STEERING_FILES)
        if fields and not store.has("field_effects"):
            return store.read("effects").iloc[:0]
        return store.read("field_effects" if fields else "effects")

    def tracks(self) -> pd.DataFrame:
        """Tracking scores of channels, and which were chosen."""
        return self._channels().read("channels")

    def multiplied(self) -> pd.DataFrame:
        """Effects of multiplied channels; empty if none was chosen."""
        if not self._channels().has("effects"):
            return pd.DataFrame(columns=list(EFFECT_COLUMNS))
        return self._channels().read("effects")

    def probes(self) -> pd.DataFrame:
        """Scores of the probes."""
        return self._channels().read("probes")

    def retargeted(self, study: str) -> dict[str, pd.DataFrame]:
        """Means over targets, by arm."""
        store = ResultStore(self.path / study, RETARGETING_FILES)
        return {arm: store.read("parts", arm) for arm in store.keys("parts")}

    def retargeting_effects(self, study: str, arm: str) -> pd.DataFrame:
        """Effects against controls; empty if none were tried."""
        store = ResultStore(self.path / study, RETARGETING_FILES)
        if not store.has("effects", arm):
            return pd.DataFrame(columns=list(_JUDGED))
        return store.read("effects", arm)

    def scrubbed(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Means of the conditions, and the double contrasts; empty if no channel was chosen."""
        store = ResultStore(self.path / SCRUBBING, SCRUBBING_FILES)
        if not store.has("table"):
            return (pd.DataFrame(columns=list(_CONDITIONS)),
                    pd.DataFrame(columns=[*_JUDGED, "supported"], dtype=object))
        return store.read("conditions"), store.read("contrasts")

    def _channels(self) -> ResultStore:
        return ResultStore(self.path / CHANNELS, CHANNEL_FILES)

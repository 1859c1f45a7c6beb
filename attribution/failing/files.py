"""Causes of failure on disk: writer and reader of ``analysis/attribution/causes/``.

Layout::

    settings.json          what made it, and under "arms" what makes each arm
    episodes/<arm>.csv     a row for each level, in the order of their numbers: level (number),
                           level_seed, cause (one of causes.causes_of, or "solved"), length (steps),
                           return (sum of rewards), and for each hazard in_view_<hazard>: steps at
                           which it was in view, as of playing.Fate
    causes.csv             a row for each arm and cause, and one for "any": arm, label, pattern,
                           control, cause, levels, failures, rate, low_95, high_95 (Wilson); of
                           hazards also steps_in_view and failures per 1 000 of these, per_1000,
                           per_1000_low_95, per_1000_high_95
    effects.csv            a row for each arm but the original, and cause: the columns of
                           interventions.comparison.compare, outcomes being failures by a cause;
                           those of p_holm, controls and claims are empty for arms without controls
    blindness.csv          a row for each edited arm and invisible hazard: label, hazard,
                           blindness, low_95, high_95
    report.md, causes.png
    failures.png           the last frames of some of the original's failures, if it has any
    films/<arm>_level_<seed>.mp4    levels that only one of the original and this arm fails

Arms are called ``original``, ``edited_<label>``, ``invisible_<hazard>`` and
``control_<number>_<label>``. Episodes of an arm that is being played are in a file of their own;
a killed run continues after the last of them. Arms can be divided among shards, see
``common.shards``: settings, tables, report and films follow when they are joined.
"""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pandas as pd

from attribution.failing.playing import Fate
from common.description import read_description
from common.errors import UserError
from common.files import TEMPORARY_SUFFIX, append_or_nothing
from common.shards import WHOLE, Shard, SharedFolder
from common.tables import read_table, write_table
from envs.objects import hazards_of

ORIGINAL = "original"
SOLVED = "solved"
SCRIPT = "python -m attribution.failure_causes"
_PARTS = f".parts{TEMPORARY_SUFFIX}"
_IN_VIEW = "in_view_"
_RATES = {"arm": str, "label": str, "control": bool, "cause": str, "levels": int, "failures": int,
          "rate": float, "low_95": float, "high_95": float}
_EFFECTS = {"label": str, "outcome": str, "control": bool, "claimed": bool, **dict.fromkeys(
    ("unaltered", "altered", "effect", "low_95", "high_95", "p", "p_holm", "p_control"), float)}
_BLINDNESS = {"label": str, "hazard": str, **dict.fromkeys(
    ("blindness", "low_95", "high_95"), float)}


class CausesFolder:
    """Names, writer and reader.

    Args:
        path: the folder.
        game: name of the game; not needed for tables.
    """

    def __init__(self, path: Path, game: str = ""):
        self.path = Path(path)
        self.settings_file = self.path / "settings.json"
        self.causes_file = self.path / "causes.csv"
        self.effects_file = self.path / "effects.csv"
        self.blindness_file = self.path / "blindness.csv"
        self.report_file = self.path / "report.md"
        self.figure_file = self.path / "causes.png"
        self.failures_file = self.path / "failures.png"
        self._hazards = [kind.name for kind in hazards_of(game)]
        self._kinds = {"level": int, "level_seed": int, "cause": str, "length": int,
                       "return": float, **{f"{_IN_VIEW}{name}": int for name in self._hazards}}
        self._shared: SharedFolder | None = None

    def episodes_file(self, arm: str) -> Path:
        return self.path / "episodes" / f"{arm}.csv"

    def film(self, arm: str, level_seed: int) -> Path:
        return self.path / "films" / f"{arm}_level_{level_seed}.mp4"

    def open(self, description: dict, overwrite: bool, shard: Shard = WHOLE,
             join: bool = False) -> None:
        """Make the folder, or go on with the arms it holds; old results are removed.

        Args:
            description: what makes the episodes of an arm, whichever arms there are, and under
                "arms" what makes each of them.
            shard, join: see ``SharedFolder``; shards divide the arms.

        Raises:
            UserError: see ``SharedFolder``; or if the folder holds an arm of the same
                name that was made otherwise.
        """
        known = {} if overwrite else read_description(self.settings_file).get("arms", {})
        for name, made in description["arms"].items():
            if known.get(name, made) != json.loads(json.dumps(made)):
                raise UserError(f"{self.path} holds the arm {name}, but made otherwise (another "
                                "file or other controls); choose another --output_dir, or give "
                                "--overwrite to throw it away")
        results = (self.causes_file, self.effects_file, self.blindness_file, self.report_file,
                   self.figure_file)
        arms = list(description["arms"])
        self._shared = SharedFolder(
            self.settings_file, {**description, "arms": {**known, **description["arms"]}},
            ("settings.json", "episodes/*.csv", "films/*.mp4", "failures.png", f"{_PARTS}/*",
             *(path.name for path in results)), "causes of failure", "--output_dir", overwrite,
            ("versions", "arms"), shard, {"arms": arms},
            lambda: known.keys() == set(arms) and all(path.exists() for path in results), join)
        if self._shared.is_open:
            for path in results:
                path.unlink(missing_ok=True)
        if join:  # shards leave it to others that may be about to write there
            with contextlib.suppress(OSError):
                (self.path / _PARTS).rmdir()

    def has(self, arm: str) -> bool:
        """Whether all episodes of an arm are there."""
        return self.episodes_file(arm).exists()

    def begun(self, arm: str) -> set[int]:
        """Numbers of the episodes that are there of an arm that is being played."""
        part = self._part(arm)
        if not part.exists():
            return set()
        text = part.read_text()
        whole = text[:text.rfind("\n") + 1]
        if whole != text:  # a line that a killed run left
            part.write_text(whole)
        return {int(line.partition(",")[0]) for line in whole.splitlines()}

    def add(self, arm: str, fate: Fate) -> None:
        """Store an episode of an arm that is being played."""
        self._shared.check()
        part = self._part(arm)
        if not part.exists():
            part.parent.mkdir(exist_ok=True)
            part.touch()
        cells = (fate.number, fate.level_seed, fate.cause or SOLVED, fate.length,
                 fate.total_reward, *fate.in_view)
        append_or_nothing(part, ",".join(map(str, cells)) + "\n")

    def finish(self, arm: str) -> None:
        """Say that all episodes of an arm are there."""
        self._shared.check()
        table = pd.read_csv(io.StringIO(self._part(arm).read_text()), header=None,
                            names=list(self._kinds), dtype={"cause": str})
        self.episodes_file(arm).parent.mkdir(exist_ok=True)
        write_table(self.episodes_file(arm), table.sort_values("level"), exact=True)
        self._part(arm).unlink()
        if self._shared.through is None and not any(self._part(arm).parent.iterdir()):
            self._part(arm).parent.rmdir()

    def finish_shard(self) -> None:
        """Note that all arms of this process are there."""
        self._shared.finish()

    def episodes(self, arm: str) -> pd.DataFrame:
        """The episodes of an arm, as of the module.

        Raises:
            UserError: if the file is missing or damaged.
        """
        return read_table(self.episodes_file(arm), self._kinds, written_by=SCRIPT)

    def rates(self) -> pd.DataFrame:
        """Failures of each arm by cause: the first columns of ``causes.csv``.

        Raises:
            UserError: if the file is missing or damaged.
        """
        return read_table(self.causes_file, _RATES, written_by=SCRIPT)

    def in_view(self, episodes: pd.DataFrame) -> pd.DataFrame:
        """Steps at which each hazard was in view, by its name."""
        return episodes[[f"{_IN_VIEW}{name}" for name in self._hazards]].set_axis(
            self._hazards, axis=1)

    def effects(self) -> pd.DataFrame:
        """Some columns of ``effects.csv``.

        Raises:
            UserError: if the file is missing or damaged.
        """
        return read_table(self.effects_file, _EFFECTS, ("p_holm", "p_control"), SCRIPT)

    def blindness(self) -> pd.DataFrame:
        """``blindness.csv``.

        Raises:
            UserError: if the file is missing or damaged.
        """
        return read_table(self.blindness_file, _BLINDNESS, ("blindness", "low_95", "high_95"),
                          SCRIPT)

    def _part(self, arm: str) -> Path:
        return self.path / _PARTS / f"{arm}.csv"

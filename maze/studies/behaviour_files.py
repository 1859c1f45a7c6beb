"""Files of ``analysis/maze/behaviour/``: the behaviour of an agent on mazes.

Layout::

    settings.json        settings of the run
    levels.jsonl         a line per level, in the order in which they were done; the tables are
                         made from it
    episodes.csv         a row per level
    paths.npz            squares of the mouse
    regressions.csv      see prediction.py; only with --regress
    report.md, *.png

``paths.npz`` has the inner row and column of the mouse in each frame of an episode, and the
cheese's where the mouse got it. Episodes are concatenated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from common.errors import UserError
from common.results import Array, Entry, File, Journal, Npz, ResultStore, Schema, Table, Text
from maze.field.outcomes import AT_DECISION, EXACT
from maze.level.grid import FEATURES
from maze.studies import prediction

OUTCOMES = (*AT_DECISION, *EXACT)  # of fields; NaN where a level or a run has none
COLUMNS = {"seed": int, "maze_dim": int, "kind": str, "cheese_row": int, "cheese_column": int,
           "cheese_in_region": bool, "got_cheese": bool, "steps": int, "first": str,
           **dict.fromkeys((*OUTCOMES, *FEATURES), float)}
BEHAVIOUR_FILES = Schema(
    "behaviour", "python -m maze.behaviour", items={
        "levels": Entry("levels.jsonl", Journal({
            "number": int, "seed": int, "level": str, "got_cheese": bool, "path": list,
            "outcomes": dict}))},
    results={
        "episodes": Entry("episodes.csv", Table(COLUMNS, (*OUTCOMES, *FEATURES), whole=True)),
        "paths": Entry("paths.npz", Npz({
            "seeds": Array(np.int64, "N"), "lengths": Array(np.int64, "N"),
            "squares": Array(np.int16, "S 2")})),
        "regressions": Entry("regressions.csv", Table(prediction.COLUMNS), optional=True),
        "report": Entry("report.md", Text()), "episodes_figure": Entry("episodes.png", File()),
        "regressions_figure": Entry("regressions.png", File(), optional=True)},
    informative=("versions", "agent_file", "levels"))  # each line has the checksum of its level


@dataclasses.dataclass(frozen=True)
class PlayedLevel:
    """A level that was played and looked at.

    Attributes:
        number: its place among the levels.
        seed: of the level.
        level: checksum of cells, mouse and facing.
        got_cheese: the game's own flag.
        path: inner row and column of the mouse in each frame, and of the cheese if it was got.
        outcomes: by OUTCOMES.
    """

    number: int
    seed: int
    level: str
    got_cheese: bool
    path: list[list[int]]
    outcomes: Mapping[str, float]

    def row(self) -> dict[str, Any]:
        """The level as a row of the journal, with None for NaN."""
        return {**dataclasses.asdict(self), "outcomes": {
            name: float(value) if np.isfinite(value) else None
            for name, value in self.outcomes.items()}}


def read_levels(store: ResultStore) -> dict[int, PlayedLevel]:
    """Return the levels that the open folder holds, by number.

    Raises:
        UserError: if the journal is damaged.
    """
    played = {}
    for row in store.rows("levels"):
        try:
            outcomes = {name: np.nan if row["outcomes"][name] is None
                        else float(row["outcomes"][name]) for name in OUTCOMES}
            if np.array(row["path"], np.int16).shape[1:] != (2,):
                raise ValueError("path")
        except (ValueError, KeyError, TypeError, OverflowError):
            raise UserError(f"{store.file_of('levels')} is damaged in the row of level "
                            f"{row['seed']}; give --overwrite to begin again") from None
        played[row["number"]] = PlayedLevel(**{**row, "outcomes": outcomes})
    return played


def paths_of(levels: Sequence[PlayedLevel]) -> dict[str, np.ndarray]:
    """Return the arrays of ``paths.npz``."""
    return {"seeds": np.array([level.seed for level in levels]),
            "lengths": np.array([len(level.path) for level in levels]),
            "squares": np.concatenate([np.array(level.path, np.int16) for level in levels])}

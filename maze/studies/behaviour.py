"""Behaviour of an agent in mazes: complete episodes, and the agent's field on each level.

A result folder contains::

    settings.json        settings of the run
    levels.jsonl         a line per level, in the order of play; the tables are computed from it
    episodes.csv         a row per level
    paths.npz            squares of the mouse
    regressions.csv      see prediction.py; only with --regress
    report.md, *.png     report and figures

``paths.npz`` contains the inner row and column of the mouse in each frame of an episode, followed
by those of the cheese if the mouse got it. Episodes are concatenated.

Rows 1 to 5 of the table of claims are computed from such folders. Row 3, on agents trained with
other regions, consists of rows 1 and 2 of each of these agents.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from agents.episodes import Episode, PlayOptions, play_episodes
from agents.networks import Policy
from common.devices import Compute
from common.errors import UserError
from common.results import Array, Entry, File, Journal, Npz, ResultStore, Schema, Table, Text
from maze.field.fields import vector_field
from maze.field.outcomes import AT_DECISION, EXACT, outcomes
from maze.level.grid import FEATURES, FORK, KINDS, Grid, Square, fork_features, kind_of
from maze.level.state import MazeState, game_of
from maze.studies import prediction
from maze.studies.prediction import SET, SINGLE
from stats.bootstrap import ClusterBootstrap
from stats.claims import Finding
from stats.significance import share

EPISODES_AT_A_TIME = 64
CHEESE, REGION, NEITHER = "cheese", "region", "neither"  # reached first
GOT, EXACT_CHEESE = "got_cheese", "exact_cheese"  # targets, and columns of the table of episodes
SUCCESS, EXACT_LABEL, PLAYED_LABEL = "gets the cheese", "exact probability", "got the cheese"
FORKS_OUTSIDE = "forks, cheese outside the region"
TARGET_LABELS = {GOT: PLAYED_LABEL, EXACT_CHEESE: EXACT_LABEL}
OUTCOMES = (*AT_DECISION, *EXACT)  # of fields; NaN if undefined or not computed
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


# ------------------------------------------------------------------------------------------ levels


@dataclasses.dataclass(frozen=True)
class PlayedLevel:
    """A level with its episode and the outcomes of its field.

    Attributes:
        number: index of the level in the run.
        seed: seed of the level.
        level: checksum of cells, mouse and facing.
        got_cheese: whether the mouse got the cheese, the game's own flag.
        path: inner row and column of the mouse in each frame, then of the cheese if it was reached.
        outcomes: outcomes of the field by name, see OUTCOMES.
    """

    number: int
    seed: int
    level: str
    got_cheese: bool
    path: list[list[int]]
    outcomes: Mapping[str, float]

    def row(self) -> dict[str, Any]:
        """Return the level as a row of the journal, with None instead of NaN."""
        return {**dataclasses.asdict(self), "outcomes": {
            name: float(value) if np.isfinite(value) else None
            for name, value in self.outcomes.items()}}


def read_levels(store: ResultStore, states: Sequence[MazeState]) -> dict[int, PlayedLevel]:
    """Return the levels in the open folder by number.

    Args:
        states: all levels of this run.

    Raises:
        UserError: if the journal is damaged or contains other levels.
    """
    played = {}
    for row in store.rows("levels"):
        try:
            values = {name: np.nan if row["outcomes"][name] is None
                      else float(row["outcomes"][name]) for name in OUTCOMES}
            if np.array(row["path"], np.int16).shape[1:] != (2,):
                raise ValueError("path")
        except (ValueError, KeyError, TypeError, OverflowError):
            raise UserError(f"{store.file_of('levels')} is damaged in the row of level "
                            f"{row['seed']}; give --overwrite to begin again") from None
        played[row["number"]] = PlayedLevel(**{**row, "outcomes": values})
    for number, state in enumerate(states):
        level = played.get(number)
        if level and (level.seed, level.level) != (state.level_seed, checksum(state.grid)):
            raise UserError(f"level {state.level_seed} is not the one that an earlier run played "
                            "as its number; choose another --output_dir, or give --overwrite")
    return played


def playable(states: Sequence[MazeState]) -> list[MazeState]:
    """Return the levels with exactly one cheese in which cheese and corner can be reached.

    Raises:
        UserError: if no level remains, or two levels have the same seed.
    """
    levels: dict[int, MazeState] = {}
    for state in states:
        if kind_of(state.grid) not in KINDS:
            continue
        if state.level_seed in levels:
            raise UserError(f"two levels have the seed {state.level_seed}; episodes go by the "
                            "seed, so give them one after the other")
        levels[state.level_seed] = state
    if not levels:
        raise UserError(f"none of {len(states)} levels has one cheese that can be reached; take "
                        "other levels")
    return list(levels.values())


def checksum(grid: Grid) -> str:
    """Return a checksum of the properties of a level that an episode depends on."""
    content = f"{grid.maze_dim} {grid.facing} {' '.join(grid.to_rows())}"
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def play_levels(policy: Policy, compute: Compute, states: Sequence[MazeState],
                numbers: Sequence[int], seed: int, exact: bool, region: int
                ) -> Iterator[PlayedLevel]:
    """Play levels and measure their fields; yield each level when its episode ends.

    Args:
        states: all levels, from :func:`playable`.
        numbers: indices of the levels to play.
        seed: seed of the sampled actions, combined with the level's index.
        exact: whether to compute exact probabilities, which need an agent without memory.
        region: rows and columns of the top right region.
    """
    by_seed = {state.level_seed: state.to_bytes() for state in states}
    episodes = play_episodes(
        policy, compute, game_of(states), [(number, states[number].level_seed)
                                           for number in numbers],
        seed, EPISODES_AT_A_TIME,
        PlayOptions(edit=lambda data: by_seed[MazeState.parse(data).level_seed],
                    keep_frames=False, keep_positions=True))
    for episode in episodes:
        state = states[episode.number]
        sides = [vector_field(policy, compute, state, facing=facing)
                 for facing in ((0, 1) if exact else (0,))]
        values = outcomes(sides[0], None, sides[1] if exact else None,
                          min(region, state.grid.world_dim), state.timeout - state.time)
        yield PlayedLevel(
            episode.number, state.level_seed, checksum(state.grid), episode.level_complete,
            _path(episode, state.grid).tolist(), {name: values[name] for name in OUTCOMES})


def _path(episode: Episode, grid: Grid) -> np.ndarray:
    """Return the inner rows and columns of the mouse, one per frame, int64 (frames, 2).

    If the mouse got the cheese, the cheese's square is appended.
    """
    squares = np.floor(episode.positions[:-1, ::-1]).astype(np.int64)
    if episode.level_complete:
        squares = np.concatenate([squares, [grid.cheese]])
    return squares - grid.margin


# ------------------------------------------------------------------------------------------ tables


def episodes_table(levels: Sequence[PlayedLevel], states: Sequence[MazeState],
                   region: int) -> pd.DataFrame:
    """Return a row per level, with COLUMNS. Squares are in world coordinates.

    ``first`` is CHEESE if the mouse reached the cheese before any other square of the region,
    REGION if it reached another square of the region first, and NEITHER otherwise. A start inside
    the region counts.
    """
    rows = []
    for level, state in zip(levels, states, strict=True):
        grid = state.grid
        inside = grid.region(min(region, grid.world_dim))
        visited = [grid.world(*square) for square in level.path]
        rows.append({
            "seed": level.seed, "maze_dim": grid.maze_dim, "kind": grid.kind(),
            "cheese_row": grid.cheese.row, "cheese_column": grid.cheese.column,
            "cheese_in_region": bool(inside[grid.cheese]), "got_cheese": level.got_cheese,
            "steps": len(visited) - level.got_cheese, "first": first_of(visited, grid, inside),
            **level.outcomes, **(fork_features(grid) if grid.kind() == FORK else {})})
    return pd.DataFrame(rows, columns=list(COLUMNS)).astype(
        dict.fromkeys((*OUTCOMES, *FEATURES), float))


def first_of(visited: Sequence[Square], grid: Grid, inside: np.ndarray) -> str:
    """Return CHEESE, REGION or NEITHER, see :func:`episodes_table`.

    Args:
        visited: squares of the mouse, in order.
        inside: mask of the region, bool (W, W).
    """
    for square in visited:
        if square == grid.cheese:
            return CHEESE
        if inside[square]:
            return REGION
    return NEITHER


def paths_of(levels: Sequence[PlayedLevel]) -> dict[str, np.ndarray]:
    """Return the arrays of ``paths.npz``."""
    return {"seeds": np.array([level.seed for level in levels]),
            "lengths": np.array([len(level.path) for level in levels]),
            "squares": np.concatenate([np.array(level.path, np.int16) for level in levels])}


def mean_interval(values: pd.Series, seed: int) -> tuple[float, float, float]:
    """Return a mean over levels and its bootstrap 95 % interval, NaN for fewer than two levels."""
    numbers = values.to_numpy(np.float64)[None]
    low, high = ClusterBootstrap(np.arange(len(values)), seed).interval(numbers)
    return float(numbers.mean()), float(low[0]), float(high[0])


def group_levels(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Group the table of episodes by place of the cheese and by kind of level.

    The first group contains all levels; the last one, forks with the cheese outside the region.
    Empty groups, and further groups with all levels, are left out.
    """
    inside = table["cheese_in_region"]
    groups = {"cheese in the region": table[inside],
              "cheese outside the region": table[~inside],
              **{f"kind: {kind}": table[table["kind"] == kind] for kind in KINDS},
              FORKS_OUTSIDE: table[(table["kind"] == FORK) & ~inside]}
    return {"all levels": table, **{name: rows for name, rows in groups.items()
                                    if 0 < len(rows) < len(table)}}


# ---------------------------------------------------------------------------------------- findings


def read_findings(path: Path) -> list[Finding]:
    """Return the findings of a folder for rows 1, 2, 4 and 5 of the table of claims.

    Raises:
        UserError: if a file of the folder is missing or damaged.
    """
    store = ResultStore(path, BEHAVIOUR_FILES)
    settings, table = store.settings(), store.read("episodes")
    regressions = store.read("regressions") if store.has("regressions") else None
    return make_findings(table, regressions, settings)


def make_findings(table: pd.DataFrame, regressions: pd.DataFrame | None,
                  settings: Mapping[str, Any]) -> list[Finding]:
    """Compute the findings from the tables of a folder.

    A run with confined cheese fills row 1; a run with the cheese anywhere fills row 2 and, with
    ``--regress``, rows 4 and 5. Scores of row 4 are sorted from best to worst.
    """
    seed, region = int(settings.get("seed", 0)), int(settings.get("cheese_region", 0))
    findings: list[Finding] = []

    def add(row: int, levels: str, rows: pd.DataFrame, measure: str,
            number: Callable[[pd.DataFrame], tuple[float, float, float]]) -> None:
        findings.append(Finding(levels, measure, *number(rows), len(rows), row=row))

    def share_of(column: str, value: Any = True):
        return lambda rows: share((rows[column] == value).sum(), len(rows))

    def mean_of(column: str):
        return lambda rows: mean_interval(rows[column], seed)

    if region:
        add(1, f"cheese in the last {region} rows and columns", table, SUCCESS, share_of(GOT))
        return findings
    is_filtered = settings.get("levels") or any(settings.get("filters", {}).values())
    groups = {} if is_filtered else {"cheese anywhere": table}  # filters bias the sample
    forks = table[(table["kind"] == FORK) & ~table["cheese_in_region"]]
    if len(forks):
        groups[FORKS_OUTSIDE] = forks
    for levels, rows in groups.items():
        add(2, levels, rows, SUCCESS, share_of(GOT))
        exact = rows[rows[EXACT_CHEESE].notna()]
        if len(exact):
            add(2, levels, exact, EXACT_LABEL, mean_of(EXACT_CHEESE))
        for name in (CHEESE, REGION, NEITHER) if rows is forks else ():
            add(2, levels, rows, f"first is {name}", share_of("first", name))
        deciding = rows[rows["p_cheese"].notna()]
        if len(deciding):
            add(2, levels, deciding, "P(cheese) at the decision square", mean_of("p_cheese"))
    if regressions is not None:
        findings += _regression_findings(regressions, int((table["kind"] == FORK).sum()))
    return findings


def _regression_findings(table: pd.DataFrame, num_levels: int) -> list[Finding]:
    """Return the findings for rows 4 and 5 from the table of regressions."""
    scores, sets = [], []
    gains = table[table["quantity"].str.endswith("_gain")].set_index(
        ["target", "model", "features", "quantity"])
    for line in table.itertuples():
        target, p_holm = f"target: {TARGET_LABELS[line.target]}", np.nan
        is_score = line.quantity in ("accuracy", "log_loss")
        if is_score:
            p_holm = gains.loc[(line.target, line.model, line.features,
                                f"{line.quantity}_gain"), "p_holm"]
        number = (line.value, line.low_95, line.high_95, num_levels, line.base, p_holm)
        if line.model == SINGLE and is_score:
            scores.append(Finding(target, f"{line.quantity} {line.features}", *number, row=4))
        elif line.model == SET and (is_score or line.quantity in ("coefficient", "intercept")):
            name = "" if line.feature == "-" else f" {line.feature}"
            sets.append(Finding(target, f"{line.features}: {line.quantity}{name}", *number, row=5))
    scores.sort(key=lambda score: (
        score.levels, score.measure.split()[0],
        score.value if score.measure.startswith("log_loss") else -score.value))
    return scores + sets

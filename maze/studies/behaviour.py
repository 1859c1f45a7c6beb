"""Behaviour of an agent in mazes: complete episodes, and the agent's field on each level.

A result folder contains::

    settings.json        settings of the run
    levels.jsonl         a line per level, in the order in which the episodes ended; the tables are
                         computed from this file
    episodes.csv         a row per level, with COLUMNS
    paths.npz            squares of the mouse
    regressions.csv      see prediction.py; only with --regress
    report.md, *.png     report and figures

``paths.npz`` contains the ``seeds`` of N levels, int64 (N,), the ``lengths`` of their paths, int64
(N,), and the concatenated paths, ``squares``, int16 (S, 2). A path consists of the row and column
of the mouse in each frame of an episode, followed by those of the cheese if the mouse got it. Rows
and columns are counted from the bottom left square inside the walls around the maze. S is the sum
of the lengths.

Claims 2, 4 and 5 of the table of claims are computed from such folders.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from agents.episodes import PlayOptions
from agents.networks import Policy
from agents.testbed import Testbed
from common.devices import Compute
from common.errors import UserError
from common.results import Array, Entry, File, Journal, Npz, ResultStore, Schema, Table, Text
from envs.maze.grid import FEATURES, FORK, KINDS, Grid, Square, fork_features
from envs.maze.levels import digest
from envs.maze.state import MazeState, as_played, game_of
from maze.field.fields import vector_field
from maze.field.outcomes import AT_DECISION, EXACT, outcomes
from maze.studies import prediction
from maze.studies.prediction import SCORES, SET, SINGLE
from stats.bootstrap import ClusterBootstrap
from stats.claims import Finding
from stats.significance import share

EPISODES_AT_A_TIME = 64  # played in parallel
CHEESE, REGION, NEITHER = "cheese", "region", "neither"  # reached first
GOT, EXACT_CHEESE = "got_cheese", "exact_cheese"  # targets, and columns of the table of episodes
SUCCESS, EXACT_LABEL, PLAYED_LABEL = "gets the cheese", "exact probability", "got the cheese"
FORKS_OUTSIDE = "forks, cheese outside the region"
TARGET_LABELS = {GOT: PLAYED_LABEL, EXACT_CHEESE: EXACT_LABEL}
_NUM_FEATURES_SHOWN = 3  # best single features in the table of claims
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
    informative=("versions", "agent_file", "levels"),  # each line has the checksum of its level
    setting_types={"cheese_region": int | None, "filters": dict | None})


# ------------------------------------------------------------------------------------------ levels


def read_levels(store: ResultStore, states: Sequence[MazeState]) -> dict[int, dict[str, Any]]:
    """Read the journal of a result folder.

    Args:
        store: the open folder.
        states: all levels of this run.

    Returns:
        Rows of the journal (see :func:`play_levels`) by the number of the level.

    Raises:
        UserError: if the journal is damaged or contains other levels.
    """
    played = {row["number"]: row for row in store.rows("levels")}
    for number, state in enumerate(states):
        row = played.get(number)
        if row and (row["seed"], row["level"]) != (state.level_seed, digest([state])):
            raise UserError(f"level {state.level_seed} differs from the level that an earlier run "
                            f"played as number {number}; choose another --output_dir, or give "
                            "--overwrite")
    return played


def play_levels(policy: Policy, compute: Compute, states: Sequence[MazeState],
                numbers: Sequence[int], seed: int, exact: bool, region: int
                ) -> Iterator[dict[str, Any]]:
    """Play levels and compute their fields; yield a row of the journal as each episode ends.

    Args:
        policy: the agent.
        compute: device and precision.
        states: all levels, with different seeds, one cheese each, and reachable cheese and corner.
        numbers: indices of the levels to play, in ``states``.
        seed: seed of the sampled actions, combined with the level's index.
        exact: whether to compute exact probabilities, which need an agent without memory.
        region: number of rows and columns of the top right region.

    Yields:
        A row of the journal, with the keys

        - ``number``, ``seed``, ``level``: index, seed and digest of the level;
        - ``got_cheese``: the game's own flag;
        - ``path``: inner row and column of the mouse in each frame, then of the cheese if the mouse
          reached it;
        - ``outcomes``: outcomes of the field by name, see OUTCOMES, with None instead of NaN.
    """
    testbed = Testbed(
        policy, compute, game_of(states), [state.level_seed for state in states], seed,
        EPISODES_AT_A_TIME, functools.partial(as_played, states),
        options=PlayOptions(keep_frames=False, keep_positions=True))
    for episode in testbed.episodes(numbers=numbers):
        state = states[episode.number]
        sides = [vector_field(policy, compute, state, facing=facing)
                 for facing in ((0, 1) if exact else (0,))]
        values = outcomes(sides[0], None, sides[1] if exact else None, region,
                          state.timeout - state.time)
        squares = np.floor(episode.positions[:-1, ::-1]).astype(np.int64)
        if episode.level_complete:
            squares = np.concatenate([squares, [state.grid.cheese]])
        yield {"number": episode.number, "seed": state.level_seed, "level": digest([state]),
               "got_cheese": bool(episode.level_complete),
               "path": (squares - state.grid.margin).tolist(),
               "outcomes": {name: float(values[name]) if np.isfinite(values[name]) else None
                            for name in OUTCOMES}}


# ------------------------------------------------------------------------------------------ tables


def episodes_table(levels: Sequence[Mapping[str, Any]], states: Sequence[MazeState],
                   region: int) -> pd.DataFrame:
    """Return the table ``episodes.csv``, with a row per level and COLUMNS.

    Squares are in world coordinates. ``first`` is CHEESE if the mouse reached the cheese before any
    other square of the region, REGION if it reached another square of the region first, and NEITHER
    otherwise. The start counts as reached: ``first`` is REGION if the mouse starts in the region.

    Args:
        levels: rows of the journal, see :func:`play_levels`.
        states: the same levels.
        region: number of rows and columns of the top right region.
    """
    rows = []
    for level, state in zip(levels, states, strict=True):
        grid = state.grid
        inside = grid.region(region)
        visited = [grid.world(*square) for square in level["path"]]
        rows.append({
            "seed": level["seed"], "maze_dim": grid.maze_dim, "kind": grid.kind(),
            "cheese_row": grid.cheese.row, "cheese_column": grid.cheese.column,
            "cheese_in_region": bool(inside[grid.cheese]), "got_cheese": level["got_cheese"],
            "steps": len(visited) - level["got_cheese"], "first": first_of(visited, grid, inside),
            **level["outcomes"], **(fork_features(grid) if grid.kind() == FORK else {})})
    return pd.DataFrame(rows, columns=list(COLUMNS)).astype(
        dict.fromkeys((*OUTCOMES, *FEATURES), float))


def first_of(visited: Sequence[Square], grid: Grid, inside: np.ndarray) -> str:
    """Return what the mouse reached first: CHEESE, REGION or NEITHER; see :func:`episodes_table`.

    Args:
        visited: squares of the mouse, in order.
        grid: the level.
        inside: mask of the region, bool, of the shape of the grid's cells.
    """
    first = next((square for square in visited if square == grid.cheese or inside[square]), None)
    return NEITHER if first is None else CHEESE if first == grid.cheese else REGION


def paths_of(levels: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """Return the arrays of ``paths.npz`` from the rows of the journal; see the module docstring."""
    return {"seeds": np.array([level["seed"] for level in levels]),
            "lengths": np.array([len(level["path"]) for level in levels]),
            "squares": np.concatenate([np.array(level["path"]) for level in levels])}


def mean_interval(values: pd.Series, seed: int) -> tuple[float, float, float]:
    """Return a mean over levels and the ends of its bootstrap 95 % interval, which are NaN for
    fewer than two levels."""
    numbers = values.to_numpy(np.float64)[None]
    low, high = ClusterBootstrap(np.arange(len(values)), seed).interval(numbers)
    return float(numbers.mean()), float(low[0]), float(high[0])


def group_levels(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Group the table of episodes by place of the cheese and by kind of level.

    The first group contains all levels; the last one, forks with the cheese outside the region.
    Empty groups, and other groups that would contain all levels, are left out.
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

    A run with confined cheese fills row 1; a run with the cheese anywhere fills row 2 and, with
    ``--regress``, rows 4 and 5. For each target and score, row 4 is sorted from best to worst.
    ``shown`` is False for findings that ``table.md`` leaves out, such as P(cheese) and, in row 4,
    all but the three features of highest accuracy.

    Raises:
        UserError: if a file of the folder is missing or damaged.
    """
    store = ResultStore(path, BEHAVIOUR_FILES)
    settings, table = store.settings(), store.read("episodes")
    seed, region = settings.get("seed") or 0, settings.get("cheese_region") or 0
    findings: list[Finding] = []

    def add(row: int, levels: str, measure: str, rows: pd.DataFrame, column: str,
            value: Any = None, shown: bool = True) -> None:
        """Add the share of rows with a value in a column, or the mean of the column."""
        if len(rows):
            interval = (mean_interval(rows[column], seed) if value is None
                        else share((rows[column] == value).sum(), len(rows)))
            findings.append(Finding(levels, measure, *interval, len(rows), shown=shown, row=row))

    if region:
        add(1, f"cheese in the last {region} rows and columns", SUCCESS, table, GOT, True)
        return findings
    is_filtered = settings.get("levels") or any((settings.get("filters") or {}).values())
    groups = {} if is_filtered else {"cheese anywhere": table}  # filters bias the sample
    groups[FORKS_OUTSIDE] = table[(table["kind"] == FORK) & ~table["cheese_in_region"]]
    for levels, rows in groups.items():
        add(2, levels, SUCCESS, rows, GOT, True)
        add(2, levels, EXACT_LABEL, rows[rows[EXACT_CHEESE].notna()], EXACT_CHEESE)
        for name in (CHEESE, REGION, NEITHER) if levels == FORKS_OUTSIDE else ():
            add(2, levels, f"first reached: {name}", rows, "first", name, name != NEITHER)
        add(2, levels, "P(cheese) at the decision square", rows[rows["p_cheese"].notna()],
            "p_cheese", shown=False)
    if store.has("regressions"):
        findings += _regression_findings(store.read("regressions"),
                                         int((table["kind"] == FORK).sum()))
    return findings


def _regression_findings(table: pd.DataFrame, num_levels: int) -> list[Finding]:
    """Return the findings for rows 4 and 5 from the table of regressions."""
    scores, sets = [], []
    keys = ["target", "model", "features", "quantity"]
    p_holm = table.drop_duplicates(keys).set_index(keys)["p_holm"]
    played = table[(table["target"] == GOT) & (table["quantity"] == "accuracy")]
    best = played[played["model"] == SINGLE].nlargest(_NUM_FEATURES_SHOWN, "value")["features"]
    for line in table[table["quantity"].isin((*SCORES, "coefficient", "intercept"))].itertuples():
        is_score = line.quantity in SCORES
        finding = Finding(
            f"target: {TARGET_LABELS[line.target]}", line.quantity, line.value, line.low_95,
            line.high_95, num_levels, line.base, p_holm=p_holm[
                line.target, line.model, line.features, f"{line.quantity}_gain"]
            if is_score else np.nan, shown=line.target == GOT and line.quantity != "log_loss")
        if line.model == SINGLE and is_score:
            scores.append(dataclasses.replace(
                finding, measure=f"{line.quantity} {line.features}", row=4,
                shown=finding.shown and line.features in set(best)))
        elif line.model == SET:
            name = line.quantity + ("" if line.feature == "-" else f" {line.feature}")
            is_published = line.features == "three"
            sets.append(dataclasses.replace(
                finding, measure=name if is_published else f"{line.features}: {name}", row=5,
                shown=finding.shown and is_published))
    scores.sort(key=lambda score: (
        score.levels, score.measure.split()[0],
        score.value if score.measure.startswith("log_loss") else -score.value))
    return scores + sets

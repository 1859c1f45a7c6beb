"""Levels of maze played to their end by an agent, and its field on each of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pandas as pd

from agents.episodes import Episode, PlayOptions, play_episodes
from agents.networks import Policy
from common.devices import Compute
from common.errors import UserError
from maze.field.fields import vector_field
from maze.field.outcomes import outcomes
from maze.level.grid import FEATURES, FORK, Grid, Square, fork_features
from maze.level.state import MazeState, game_of
from maze.studies.behaviour_files import COLUMNS, OUTCOMES, PlayedLevel

EPISODES_AT_A_TIME = 64
CHEESE, REGION, NEITHER = "cheese", "region", "neither"  # of which is first


def playable(states: Sequence[MazeState]) -> list[MazeState]:
    """The levels with one cheese to which, as to the corner, a way leads.

    Raises:
        UserError: if there is none, or two are of the same seed.
    """
    found: dict[int, MazeState] = {}
    for state in states:
        try:
            state.grid.kind()
        except UserError:
            continue
        if state.level_seed in found:
            raise UserError(f"two levels have the seed {state.level_seed}; episodes go by the "
                            "seed, so give them one after the other")
        found[state.level_seed] = state
    if not found:
        raise UserError(f"none of {len(states)} levels has one cheese that can be reached; take "
                        "other levels")
    return list(found.values())


def checksum(grid: Grid) -> str:
    """Of all that an episode depends on."""
    content = f"{grid.maze_dim} {grid.facing} {' '.join(grid.to_rows())}"
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def check_entries(entries: Mapping[int, PlayedLevel], states: Sequence[MazeState]) -> None:
    """Check that what is done is of these levels.

    Raises:
        UserError: if it is not.
    """
    for number, state in enumerate(states):
        entry = entries.get(number)
        if entry and (entry.seed, entry.level) != (state.level_seed, checksum(state.grid)):
            raise UserError(f"level {state.level_seed} is not the one that an earlier run played "
                            "as its number; choose another --output_dir, or give --overwrite")


def entries_of(policy: Policy, compute: Compute, states: Sequence[MazeState],
               numbers: Sequence[int], seed: int, exact: bool, region: int
               ) -> Iterator[PlayedLevel]:
    """Play some levels and look at their fields; entries in the order in which episodes end.

    Args:
        states: all levels, from :func:`playable`.
        numbers: of those wanted. With ``seed``, a level's number decides its episode's actions.
        exact: whether to compute exact probabilities, which need an agent without memory.
        region: rows and columns of the top right region.
    """
    by_seed = {state.level_seed: state.to_bytes() for state in states}

    def chosen(data: bytes) -> bytes:
        return by_seed[MazeState.parse(data).level_seed]

    episodes = play_episodes(
        policy, compute, game_of(states), [(number, states[number].level_seed)
                                           for number in numbers],
        seed, EPISODES_AT_A_TIME,
        PlayOptions(edit=chosen, keep_frames=False, keep_positions=True))
    for episode in episodes:
        state = states[episode.number]
        grid = state.grid
        sides = [vector_field(policy, compute, state, facing=facing)
                 for facing in ((0, 1) if exact else (0,))]
        found = outcomes(sides[0], None, sides[1] if exact else None,
                         min(region, grid.world_dim), state.timeout - state.time)
        yield PlayedLevel(
            episode.number, state.level_seed, checksum(grid), episode.level_complete,
            path_of(episode, grid).tolist(), {name: found[name] for name in OUTCOMES})


def path_of(episode: Episode, grid: Grid) -> np.ndarray:
    """Inner row and column of the mouse in each frame, and of the cheese if it was got, int64
    (frames, 2)."""
    places = np.floor(episode.positions[:-1, ::-1]).astype(np.int64)
    if episode.level_complete:
        places = np.concatenate([places, [grid.cheese]])
    return places - grid.margin


def table_of(entries: Sequence[PlayedLevel], states: Sequence[MazeState],
             region: int) -> pd.DataFrame:
    """A row a level, with COLUMNS. Rows and columns of squares are those of the world.

    ``first`` is CHEESE if the mouse got it before it was on another square of the region, REGION if
    it was there before, NEITHER if it got to none of both. A start in the region counts.
    """
    rows = []
    for entry, state in zip(entries, states, strict=True):
        grid = state.grid
        inside = grid.region(min(region, grid.world_dim))
        visited = [grid.world(*place) for place in entry.path]
        rows.append({
            "seed": entry.seed, "maze_dim": grid.maze_dim, "kind": grid.kind(),
            "cheese_row": grid.cheese.row, "cheese_column": grid.cheese.column,
            "cheese_in_region": bool(inside[grid.cheese]), "got_cheese": entry.got_cheese,
            "steps": len(visited) - entry.got_cheese, "first": first_of(visited, grid, inside),
            **entry.outcomes, **(fork_features(grid) if grid.kind() == FORK else {})})
    return pd.DataFrame(rows, columns=list(COLUMNS)).astype(
        dict.fromkeys((*OUTCOMES, *FEATURES), float))


def first_of(visited: Sequence[Square], grid: Grid, inside: np.ndarray) -> str:
    """CHEESE, REGION or NEITHER; ``inside`` is bool (W, W)."""
    for square in visited:
        if square == grid.cheese:
            return CHEESE
        if inside[square]:
            return REGION
    return NEITHER

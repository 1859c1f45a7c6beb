"""Patch options for mazes: squares, the path to the cheese, and the facing of the mouse.

    square=12.20/13.20    patch the cells of a map that show these squares: by default the published
                          mapping; with mapping=centred, cells with the nearest receptive field
    squares=12.20/13.20   active while the mouse is on one of these squares
    at=decision_square    active while the mouse is on the decision square; at=path, at=off_path:
                          on the shortest path from the start to the cheese, or off it
    facing=0              active while the mouse has this facing, 0 or 1
    condition=same_cheese for resample: sources are other levels with the cheese moved to the same
                          square; other_cheese: levels whose cheese is on another square

Squares are written row.column in world coordinates, row 0 at the bottom. In a level without a
decision square at=decision_square is never active; without a path to exactly one cheese at=path is
never and at=off_path always active.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from agents.layers import layers_named
from agents.patch import BatchInfo, Patch
from common.errors import UserError, nearest
from envs.procgen_env import MAX_LEVEL, EnvConfig
from interventions.patch_text import Opening, register_option
from interventions.patches import Resample
from maze.level.grid import CHEESE, FREE, Grid, Square
from maze.level.state import GAME, WORLD_DIMS, MazeState, draw, stock_state

MAPPINGS = ("published", "centred")
PLACES = ("decision_square", "path", "off_path")
CONDITIONS = ("same_cheese", "other_cheese")
MAX_TRIES = 1000


def register_maze_words() -> None:
    """Register the patch options of this module."""
    for name, open_word in (("square", _square), ("mapping", _mapping), ("squares", _squares),
                            ("at", _at), ("facing", _facing), ("condition", _condition)):
        register_option(name, functools.partial(open_word, name))


def marked_squares(patches: Sequence[Patch]) -> list[Square]:
    """Return the squares in the ``square`` options of patches, to be marked in figures."""
    return [Square(*map(int, square.split("."))) for patch in patches
            for word, value in patch.words if word == "square" for square in value.split("/")]


def _env(word: str, opening: Opening) -> EnvConfig:
    if opening.env is None or opening.env.env_name != GAME:
        where = "in the simulator" if opening.env is None else f"in {opening.env.env_name}"
        raise UserError(f"'{word}' is a word for the game {GAME}, and has no meaning {where}; "
                        "leave it out")
    return opening.env


def _chosen(word: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UserError(f"{word}={value} means nothing{nearest(value, choices)}")


def _squares_of(word: str, value: str, opening: Opening) -> list[Square]:
    dim = WORLD_DIMS[_mode(_env(word, opening))]
    if not re.fullmatch(r"\d{1,3}\.\d{1,3}(/\d{1,3}\.\d{1,3})*", value):
        raise UserError(f"{word}={value} is not row.column of a square, such as 12.20, or several, "
                        "12.20/13.20")
    squares = [Square(*map(int, part.split("."))) for part in value.split("/")]
    for square in squares:
        if max(square) >= dim:
            raise UserError(f"{word}={value} lies outside of the world: rows and columns go from 0 "
                            f"to {dim - 1}")
    return squares


def _square(word: str, patch: Patch, value: str, opening: Opening) -> Patch:
    squares = _squares_of(word, value, opening)
    if patch.cells is not None:
        raise UserError(f"the patch of {patch.layer} has cells and squares; leave one out")
    mapping: Any = dict(patch.words).get("mapping", MAPPINGS[0])
    _chosen("mapping", mapping, MAPPINGS)
    dim = WORLD_DIMS[_mode(_env(word, opening))]
    layer, *more = layers_named(opening.policy, patch.layer)
    if more:
        raise UserError(f"{word}={value} needs one layer, not {patch.layer}, whose maps differ")
    cells = dict.fromkeys(layer.cell(*square, dim, mapping) for square in squares)
    return dataclasses.replace(patch, cells=tuple(cells))


def _mapping(word: str, patch: Patch, value: str, opening: Opening) -> Patch:
    if "square" not in dict(patch.words):
        raise UserError(f"{word}={value} says which cell a square has, so it needs square=")
    return patch


def _with_condition(patch: Patch, condition) -> Patch:
    return dataclasses.replace(patch, conditions=(*patch.conditions, condition))


def _squares(word: str, patch: Patch, value: str, opening: Opening) -> Patch:
    squares = np.array(_squares_of(word, value, opening))  # (n, 2)
    return _with_condition(patch, lambda rows: _is_on(rows, squares))


def _facing(word: str, patch: Patch, value: str, opening: Opening) -> Patch:
    _env(word, opening)
    _chosen(word, value, ("0", "1"))

    def faces(rows: BatchInfo) -> np.ndarray:
        _check_squares(rows)
        return np.asarray(rows.facing) == int(value)
    return _with_condition(patch, faces)


def _at(word: str, patch: Patch, value: str, opening: Opening) -> Patch:
    _env(word, opening)
    _chosen(word, value, PLACES)

    @functools.cache
    def squares_of(level: int) -> np.ndarray:
        """Return the decision square or the squares of the path of a level, int64 (n, 2)."""
        grid = _grid(opening, level)
        try:
            squares = ([grid.decision_square()] if value == "decision_square"
                       else grid.path(grid.start, grid.cheese))
        except UserError:  # not a fork, or no path to exactly one cheese
            squares = []
        return np.array(squares, dtype=np.int64).reshape(-1, 2)

    def holds(rows: BatchInfo) -> np.ndarray:
        _check_squares(rows)
        on = np.array([_is_on(rows[row:row + 1], squares_of(int(level)))[0]
                       for row, level in enumerate(rows.level)])
        return ~on if value == "off_path" else on
    return _with_condition(patch, holds)


def _condition(word: str, patch: Patch, value: str, opening: Opening) -> Patch:
    env = _env(word, opening)
    _chosen(word, value, CONDITIONS)
    if not isinstance(patch, Resample):
        raise UserError(f"{word}={value} says what the sources of resample have in common, and "
                        f"{patch.kind} has none")

    def draw_sources(level: int, number: int, seed: int) -> np.ndarray:
        cheese, rng = _grid(opening, level).cheese, np.random.default_rng([seed, level])
        sources: list[MazeState] = []
        for _ in range(MAX_TRIES):
            if len(sources) == number:
                return draw(sources)
            state = stock_state(_mode(env), int(rng.integers(MAX_LEVEL)), env.use_backgrounds)
            if value == "same_cheese" and state.grid.cells[cheese] in (FREE, CHEESE):
                state = state.with_cheese(cheese)
            elif value == "same_cheese" or state.grid.cheese == cheese:
                continue
            free = state.grid.squares(without_cheese=True)
            mouse = free[rng.integers(len(free))]
            sources.append(state if mouse == state.grid.mouse else state.with_mouse(mouse))
        raise UserError(f"{word}={value}: of {MAX_TRIES} levels {len(sources)} have their cheese "
                        f"where level {level} asks for it, and {number} are needed")
    return dataclasses.replace(patch, sources=draw_sources)


def _mode(env: EnvConfig) -> str:
    return "hard" if env.distribution_mode == "exploration" else env.distribution_mode


def _grid(opening: Opening, level: int) -> Grid:
    """Return the maze of a level as it is played, at the start of the episode."""
    env = _env("level", opening)
    state = stock_state(_mode(env), level, env.use_backgrounds)
    if opening.edit is not None:
        state = MazeState.parse(opening.edit(state.to_bytes()))
    return state.grid


def _check_squares(rows: BatchInfo) -> None:
    if rows.square is None or rows.facing is None:
        raise UserError("a patch depends on where the mouse is, but the pass does not say so; play "
                        "with squares, or leave the word out")


def _is_on(rows: BatchInfo, squares: np.ndarray) -> np.ndarray:
    """Return whether the mouse is on one of the squares (n, 2), bool (B,)."""
    _check_squares(rows)
    return np.equal(np.asarray(rows.square)[:, None], squares).all(axis=2).any(axis=1)

"""Patch options for mazes: squares, the path to the cheese, and the facing of the mouse.

    square=12.20/13.20    patch the cells of the layer that show these squares, in the published
                          mapping of ``agents.layers.Layer.cell``; with mapping=centred, cells
                          whose receptive fields have their centres nearest to the centres of
                          the squares
    squares=12.20/13.20   active while the mouse is on one of these squares
    at=decision_square    active while the mouse is on the decision square; at=path, at=off_path:
                          on the shortest path from the start to the cheese, or off it
    facing=0              active while the mouse faces left (0), or right (1)
    condition=same_cheese for resample: sources are random levels, with the mouse on a random free
                          square and the cheese moved to the square of the patched level's cheese;
                          other_cheese: their cheese stays, on another square

Squares are written row.column in world coordinates, row 0 at the bottom. A patch with
at=decision_square is never active in a level without a decision square. In a level without a path
to exactly one cheese, at=path is never active and at=off_path is always active.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from agents.layers import layers_named
from agents.patch import BatchInfo, Patch
from common.errors import UserError, nearest
from envs.maze.grid import CHEESE, FREE, Grid, Square
from envs.maze.levels import after_edit
from envs.maze.state import GAME, WORLD_DIMS, MazeState, draw, stock_state
from envs.procgen_env import MAX_LEVEL, EnvConfig
from interventions.patches import Opening, OpenOption, Resample
from interventions.resampling import draw_sources

# Allowed values of the options that accept only a few.
CHOICES = {"mapping": ("published", "centred"), "facing": ("0", "1"),
           "at": ("decision_square", "path", "off_path"),
           "condition": ("same_cheese", "other_cheese")}
MAX_TRIES = 1000  # levels tried to find the sources of a resampling


def _open(name: str, open_word: Callable[[Patch, str, Opening, EnvConfig], Patch], patch: Patch,
          value: str, opening: Opening) -> Patch:
    """Apply an option to a patch, after checking the game and the value.

    Args:
        open_word: function of this module that applies the option.
        value: value of the option.
        opening: agent, environment and level edit for which patches are opened.
    """
    if opening.env is None or opening.env.env_name != GAME:
        where = "in the simulator" if opening.env is None else f"in {opening.env.env_name}"
        raise UserError(f"the patch option '{name}' works only in {GAME}, not {where}; leave it "
                        "out")
    choices = CHOICES.get(name, (value,))
    if value not in choices:
        raise UserError(f"{name}={value} is not a valid option{nearest(value, choices)}")
    mode = "hard" if opening.env.distribution_mode == "exploration" else (
        opening.env.distribution_mode)
    return open_word(patch, value, opening, dataclasses.replace(opening.env,
                                                                distribution_mode=mode))


def marked_squares(patches: Sequence[Patch]) -> list[Square]:
    """Return the squares in the ``square`` options of patches, to be marked in figures."""
    return [Square(*map(int, square.split("."))) for patch in patches
            for word, value in patch.words if word == "square" for square in value.split("/")]


def _parse_squares(word: str, value: str, env: EnvConfig) -> list[Square]:
    dim = WORLD_DIMS[env.distribution_mode]
    if not re.fullmatch(r"\d{1,3}\.\d{1,3}(/\d{1,3}\.\d{1,3})*", value):
        raise UserError(f"{word}={value} is not row.column of a square, such as 12.20, or several, "
                        "12.20/13.20")
    squares = [Square(*map(int, part.split("."))) for part in value.split("/")]
    if max(map(max, squares)) >= dim:
        raise UserError(f"{word}={value} lies outside the world: rows and columns go from 0 to "
                        f"{dim - 1}")
    return squares


def _square(patch: Patch, value: str, opening: Opening, env: EnvConfig) -> Patch:
    squares = _parse_squares("square", value, env)
    if patch.cells is not None:
        raise UserError(f"the patch of {patch.layer} has cells and squares; leave one out")
    mapping: Any = dict(patch.words).get("mapping", "published")
    layer, *more = layers_named(opening.policy, patch.layer)
    if more:
        raise UserError(f"square={value} needs one layer, not {patch.layer}, whose maps differ")
    cells = dict.fromkeys(layer.cell(*square, WORLD_DIMS[env.distribution_mode], mapping)
                          for square in squares)
    return dataclasses.replace(patch, cells=tuple(cells))


def _mapping(patch: Patch, value: str, opening: Opening, env: EnvConfig) -> Patch:
    if "square" not in dict(patch.words):
        raise UserError(f"mapping={value} selects the cell of a square, so it needs square=")
    return patch


def _squares(patch: Patch, value: str, opening: Opening, env: EnvConfig) -> Patch:
    squares = np.array(_parse_squares("squares", value, env))  # (n, 2)
    return dataclasses.replace(patch, conditions=(
        *patch.conditions, lambda rows: _is_on(rows, squares)))


def _facing(patch: Patch, value: str, opening: Opening, env: EnvConfig) -> Patch:
    def faces(rows: BatchInfo) -> np.ndarray:
        _check_squares(rows)
        return np.asarray(rows.facing) == int(value)
    return dataclasses.replace(patch, conditions=(*patch.conditions, faces))


def _at(patch: Patch, value: str, opening: Opening, env: EnvConfig) -> Patch:
    @functools.cache
    def squares_of(level: int) -> np.ndarray:
        """Return the decision square or the squares of the path of a level, int64 (n, 2)."""
        grid = _grid(opening, env, level)
        try:
            squares = ([grid.decision_square()] if value == "decision_square"
                       else grid.path(grid.start, grid.cheese))
        except UserError:  # not a fork, or no path to exactly one cheese
            squares = []
        return np.array(squares, dtype=np.int64).reshape(-1, 2)

    def holds(rows: BatchInfo) -> np.ndarray:
        on = np.array([_is_on(rows[row:row + 1], squares_of(int(level)))[0]
                       for row, level in enumerate(rows.level)])
        return ~on if value == "off_path" else on
    return dataclasses.replace(patch, conditions=(*patch.conditions, holds))


def _condition(patch: Patch, value: str, opening: Opening, env: EnvConfig) -> Patch:
    if not isinstance(patch, Resample):
        raise UserError(f"condition={value} selects the sources of resample, but {patch.kind} has "
                        "none")

    def sources(level: int, number: int, seed: int) -> np.ndarray:
        cheese = _grid(opening, env, level).cheese

        def propose(rng: np.random.Generator) -> tuple[Square, MazeState] | None:
            state = stock_state(env.distribution_mode, int(rng.integers(MAX_LEVEL)),
                                env.use_backgrounds)
            if value == "same_cheese" and state.grid.cells[cheese] in (FREE, CHEESE):
                state = state.with_cheese(cheese)
            elif value == "same_cheese" or state.grid.cheese == cheese:
                return None
            free = state.grid.squares(without_cheese=True)
            mouse = free[rng.integers(len(free))]
            return state.grid.cheese, (state if mouse == state.grid.mouse
                                       else state.with_mouse(mouse))

        return draw(draw_sources(propose, cheese, value == "same_cheese", number, MAX_TRIES,
                                 np.random.default_rng([seed, level])))
    return dataclasses.replace(patch, sources=sources)


def _grid(opening: Opening, env: EnvConfig, level: int) -> Grid:
    """Return the maze of a level as it is played, at the start of the episode."""
    state = stock_state(env.distribution_mode, level, env.use_backgrounds)
    return after_edit(state, opening.edit).grid


def _check_squares(rows: BatchInfo) -> None:
    if rows.square is None or rows.facing is None:
        raise UserError("a patch depends on the mouse's square or facing, which are unknown in "
                        "this forward pass; leave out the option of the patch")


def _is_on(rows: BatchInfo, squares: np.ndarray) -> np.ndarray:
    """Return for each frame of a batch whether the mouse is on one of the given squares.

    Args:
        rows: metadata of the B frames.
        squares: world (row, column) of n squares (n, 2).

    Returns:
        bool (B,).
    """
    _check_squares(rows)
    return np.equal(np.asarray(rows.square)[:, None], squares).all(axis=2).any(axis=1)


MAZE_WORDS: dict[str, OpenOption] = {
    name: functools.partial(_open, name, open_word) for name, open_word in (
        ("square", _square), ("mapping", _mapping), ("squares", _squares), ("at", _at),
        ("facing", _facing), ("condition", _condition))}
"""Functions that apply the options of this module, by name."""

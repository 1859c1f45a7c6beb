"""Words of patches that mazes have: where a patch acts, by the mouse or by a square.

``square=12.20``       the cell of the layer that shows this square, as the patch's only cell
``squares=4.4+4.5``    in force while the mouse is on one of these squares
``facing=1``           in force while the mouse faces so, 1 as after an action to the right
``at=decision_square`` in force while the mouse is there; likewise ``at=path``, a square of the path
                       from the start to the cheese, and ``at=off_path``, any other

Squares are in world coordinates, row.column, row 0 at the bottom. In a level that has no decision
square, or no way to one cheese, the mouse is never there, and always off the path.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence

import numpy as np

from common.env import EnvConfig
from common.errors import UserError, nearest
from interventions.layers import layers_named
from interventions.patch import Condition, Patch, Rows
from interventions.patch_text import Opening, register_word
from maze.level.environment import stock_state
from maze.level.grid import Grid, Square
from maze.level.state import GAME, WORLD_DIMS

GridOf = Callable[[int], Grid]
"""A level seed to the level that is played."""

_PLACES = ("decision_square", "path", "off_path")


def register_maze_words(grid_of: GridOf | None = None) -> None:
    """Let patches take the words of mazes.

    Args:
        grid_of: the levels that are played, where they are edited; those that Procgen generates if
            not given.
    """
    register_word("square", _square)
    register_word("squares", _squares)
    register_word("facing", _facing)
    register_word("at", functools.partial(_at, grid_of))


def marked_squares(patches: Sequence[Patch]) -> list[Square]:
    """The squares that patches name with ``square``, to be marked in pictures."""
    return [Square(*map(int, value.split("."))) for patch in patches
            for word, value in patch.words if word == "square"]


def _mode(opening: Opening, word: str) -> EnvConfig:
    if opening.env is None or opening.env.env_name != GAME:
        what = "the simulator" if opening.env is None else opening.env.env_name
        raise UserError(f"the word '{word}' of a patch is for the game {GAME}, not for {what}")
    return opening.env


def _read_square(text: str, opening: Opening, word: str) -> Square:
    side = WORLD_DIMS[_mode(opening, word).distribution_mode]
    match = re.fullmatch(r"\s*(\d{1,4})\.(\d{1,4})\s*", text)
    if match is None:
        raise UserError(f"{word}={text} is no square; write row.column, as in 12.20")
    square = Square(int(match[1]), int(match[2]))
    if max(square) >= side:
        raise UserError(f"{word}={text} is outside the world: its rows and columns are 0 to "
                        f"{side - 1}")
    return square


def _square(patch: Patch, text: str, opening: Opening) -> Patch:
    square = _read_square(text, opening, "square")
    if patch.cells is not None:
        raise UserError(f"the patch at {patch.layer} has a cell and a square; leave one out")
    layers = layers_named(opening.policy, patch.layer)
    if len(layers) != 1:
        raise UserError(f"square={text} needs one layer, not {patch.layer}, whose maps differ")
    cell = layers[0].cell(*square, WORLD_DIMS[opening.env.distribution_mode])
    return dataclasses.replace(patch, cells=(cell,))


def _squares(patch: Patch, text: str, opening: Opening) -> Patch:
    chosen = {_read_square(part, opening, "squares") for part in text.split("+")}
    return _where(patch, lambda rows: [square in chosen for square in _mouse(rows)])


def _facing(patch: Patch, text: str, opening: Opening) -> Patch:
    _mode(opening, "facing")
    if text not in ("0", "1"):
        raise UserError(f"facing={text} of a patch must be 0 or 1")

    def faces(rows: Rows) -> np.ndarray:
        if rows.facing is None:
            raise UserError("facing= of a patch needs passes that say how the mouse faces")
        return rows.facing == int(text)

    return _where(patch, faces)


def _at(grid_of: GridOf | None, patch: Patch, text: str, opening: Opening) -> Patch:
    env = _mode(opening, "at")
    if text not in _PLACES:
        raise UserError(f"at={text} of a patch is no place{nearest(text, _PLACES)}")

    @functools.cache
    def places(level: int) -> frozenset[Square]:
        grid = grid_of(level) if grid_of else stock_state(
            env.distribution_mode, level, env.use_backgrounds).grid
        try:
            if text == "decision_square":
                return frozenset([grid.decision_square()])
            return frozenset(grid.path(grid.start, grid.cheese))
        except UserError:  # it has none
            return frozenset()

    return _where(patch, lambda rows: [
        (square in places(int(level))) != (text == "off_path")
        for square, level in zip(_mouse(rows), rows.level)])


def _mouse(rows: Rows) -> list[Square]:
    if rows.square is None:
        raise UserError("squares= and at= of a patch need passes that say where the mouse is")
    return [Square(*square) for square in rows.square.tolist()]


def _where(patch: Patch, condition: Callable[[Rows], list[bool] | np.ndarray]) -> Patch:
    """The patch with one condition more."""
    whole: Condition = lambda rows: np.asarray(condition(rows), bool)  # noqa: E731
    return dataclasses.replace(patch, conditions=(*patch.conditions, whole))

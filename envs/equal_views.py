"""Contents of levels beyond equal views: the distribution that a generator should reproduce.

Levels whose start frames show the same squares and entities share a key; themes are ignored. The
frequency of an object beyond the view, among the other levels with the same key, is the best
forecast that the view allows (*oracle*). A level takes 1.2 to 1.6 ms, so 55 000 levels take one to
two minutes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np

from common.errors import UserError
from common.game_constants import CAMERA_FOLLOWS
from envs.level_state import LevelState
from envs.objects import objects_of
from envs.procgen_env import EnvConfig, LevelSlots

# Contents by game, with the kinds of ``hyperparams/game_objects.yml`` that they consist of. A pit
# counts only if it holds lava; pits with saws or enemies count as these.
CONTENTS = {"coinrun": {"pit": ("lava",), "saw": ("saw",), "enemy": ("enemy_left", "enemy_right"),
                        "crate": ("box",)}}
NEAR_SQUARES = 13  # width of CoinRun's view
_LEAST_OVERLAP = 0.05  # squares, a quarter of a pixel; squares with less in view are not compared
_INVISIBLE = 100  # key of cells that are not drawn, such as empty cells and enemies' barriers


def layout_key(state: LevelState) -> bytes:
    """Return a key of the squares and entities in view; equal layouts have equal keys.

    The key contains the visible cells of all squares that overlap the view, and the type and square
    of the entities whose centre is in one of these squares. Images, themes and directions of motion
    are not compared. Use it for start states, in which entities stand at the centres of squares.
    """
    (left, right), (bottom, top) = _view(state)
    drawn = [cell for kind in objects_of(state.game) for cell in kind.cells]
    cells = state.grid[max(bottom, 0):max(top, 0), max(left, 0):max(right, 0)]
    cells = np.where(np.isin(cells, drawn), cells, _INVISIBLE).astype("<i2")
    x, y = (np.floor(state.entities[axis]).astype(int) for axis in "xy")
    inside = (x >= left) & (x < right) & (y >= bottom) & (y < top)
    entities = np.stack([state.entities["type"], x - left, y - bottom], axis=1)[inside]
    entities = entities[np.lexsort(entities.T)].astype("<i2")
    frame = np.array([left, right, bottom, top], "<i2")
    return b"".join((frame.tobytes(), cells.tobytes(), entities.tobytes()))


def contents_beyond(state: LevelState, squares: int = NEAR_SQUARES) -> dict[str, bool]:
    """Return which contents lie to the right of the view, at any height.

    Args:
        state: start state of a level.
        squares: number of columns to search, from the first column that does not overlap the view.

    Returns:
        Whether each of ``CONTENTS`` of the game has a cell, or the centre of an entity, there.

    Raises:
        UserError: if the game has no such list.
    """
    first = _view(state)[0][1]
    cells = np.unique(state.grid[:, first:first + squares])
    x = state.entities["x"]
    entities = state.entities["type"][(x >= first) & (x < first + squares)]
    kinds = {kind.name: kind for kind in objects_of(state.game)}
    return {content: any(np.isin(kinds[name].cells, cells).any()
                         or np.isin(kinds[name].entity_types, entities).any() for name in names)
            for content, names in _contents_of(state.game).items()}


def start_layouts(config: EnvConfig, levels: Sequence[int], squares: int = NEAR_SQUARES,
                  ) -> tuple[list[bytes], dict[str, np.ndarray]]:
    """Generate levels, and return the layout of their start and the contents beyond it.

    Args:
        config: the game; its camera must follow the player.
        levels: seeds of N levels.
        squares: see ``contents_beyond``.

    Returns:
        Keys of the layouts, a list of N, see ``layout_key``; and bool arrays (N,) by content.

    Raises:
        UserError: if the contents of the game are not listed, or its camera does not follow.
    """
    contents = _contents_of(config.env_name)
    keys, found = [], []
    with contextlib.closing(LevelSlots(config, 1)) as slots:
        for level in levels:
            slots.start(0, level)
            state = LevelState.parse(slots.state(0) or b"", config.env_name)
            keys.append(layout_key(state))
            found.append(contents_beyond(state, squares))
    return keys, {content: np.array([level[content] for level in found], bool)
                  for content in contents}


def oracle_probabilities(keys: Sequence[bytes], contents: dict[str, np.ndarray],
                         ) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Compute how often each content occurs in the other levels with the same key.

    Args:
        keys: keys of N levels.
        contents: bool arrays (N,) by content.

    Returns:
        Frequencies (N,) by content, NaN for levels whose key no other level has; and the number of
        other levels with the same key (N,). Leaving the level itself out makes the forecasts
        honest, but those from few others are noisy; ``generative.realism.relative_skill`` corrects
        for their number.

    Raises:
        UserError: if the lengths differ.
    """
    wrong = {name: len(values) for name, values in contents.items() if len(values) != len(keys)}
    if wrong:
        raise UserError(f"there are {len(keys)} keys, but numbers of contents are {wrong}")
    places: dict[bytes, int] = {}
    layout = np.array([places.setdefault(key, len(places)) for key in keys], int)
    others = np.bincount(layout)[layout] - 1
    frequencies = {}
    for name, values in contents.items():
        total = np.bincount(layout, values)[layout] - values
        frequencies[name] = np.divide(total, others, out=np.full(len(keys), np.nan),
                                      where=others > 0)
    return frequencies, others


def _view(state: LevelState) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the columns and rows that overlap the view, as begin and end; they may lie outside the
    level."""
    half = float(state.world["view_dim"]) / 2 - _LEAST_OVERLAP
    columns, rows = ((int(np.floor(centre - half)), int(np.ceil(centre + half))) for centre in (
        float(state.drawing["center_x"]), float(state.drawing["center_y"])))
    return columns, rows


def _contents_of(game: str) -> dict[str, tuple[str, ...]]:
    if game not in CONTENTS or game not in CAMERA_FOLLOWS:
        raise UserError(f"the contents beyond the views of {game} are not listed; such games are "
                        f"{', '.join(CONTENTS)}")
    return CONTENTS[game]

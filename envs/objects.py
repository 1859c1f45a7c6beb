"""Kinds of object of a game, told apart in its state: found, made invisible, taken away.

The one reader of ``hyperparams/game_objects.yml``. All functions take a ``LevelState`` and give
another that Procgen can play on from.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import numpy as np

from common.config import read_yaml, typed
from common.errors import UserError
from envs.level_state import LevelState

GAME_OBJECTS_FILE = Path(__file__).parent.parent / "hyperparams" / "game_objects.yml"
LEFT, RIGHT = "left", "right"
_EMPTY = 100  # cell of every game
_PLAYER = 0  # type of entity
_FAR_AWAY = -1000.0  # in cells, outside of every level


@dataclasses.dataclass(frozen=True)
class GameObject:
    """A kind of object of a game.

    Attributes:
        name: such as ``saw``.
        entity_types: of its entities.
        moving: ``left`` for those of them alone that move to the left or not at all, ``right`` for
            those that move to the right, None for all.
        cells: of the grid.
        hazard: whether it can end an episode.
        trails: types of the entities that are drawn behind its own. One belongs to the nearest
            entity of ``entity_types``, wherever that moves.
        mobile: whether it changes its place in the level; so do all kinds with ``moving``.
    """

    name: str
    entity_types: tuple[int, ...] = ()
    moving: str | None = None
    cells: tuple[int, ...] = ()
    hazard: bool = False
    trails: tuple[int, ...] = ()
    mobile: bool = False

    def __post_init__(self):
        where = f"{GAME_OBJECTS_FILE.name}: '{self.name}'"
        if self.moving not in (None, LEFT, RIGHT):
            raise UserError(f"{where}: moving must be {LEFT} or {RIGHT}, not {self.moving!r}")
        if not (self.entity_types or self.cells):
            raise UserError(f"{where} has neither entity_types nor cells")
        if self.mobile and self.cells:
            raise UserError(f"{where} has cells, which cannot move; leave out 'mobile'")

    @property
    def changes_place(self) -> bool:
        """Whether it moves through the level."""
        return self.mobile or self.moving is not None


@functools.cache
def objects_of(game: str) -> tuple[GameObject, ...]:
    """The kinds of object of a game, none if there is no table of it.

    Raises:
        UserError: if the table is damaged; the entry is named.
    """
    kinds = read_yaml(GAME_OBJECTS_FILE).get(game, {})
    where = f"{GAME_OBJECTS_FILE.name}: {game}"
    if not isinstance(kinds, dict) or not all(isinstance(kind, dict) for kind in kinds.values()):
        raise UserError(f"{where} must hold a mapping of names to kinds of object")
    return tuple(typed(GameObject, {**kind, "name": name}, f"{where}: {name}")
                 for name, kind in kinds.items())


def hazards_of(game: str) -> tuple[GameObject, ...]:
    """The kinds that can end an episode, see ``objects_of``."""
    return tuple(kind for kind in objects_of(game) if kind.hazard)


def invisible(state: LevelState, kind: GameObject) -> LevelState:
    """The state with the entities of a kind drawn no more; they still act.

    They stay invisible from then on, but what moves with a trail draws a new piece of it in every
    step, which a new call hides.

    Raises:
        UserError: if the kind is made of cells, which act as they are drawn.
    """
    if kind.cells:
        raise UserError(f"{kind.name} of {state.game} is drawn from cells, which cannot be "
                        "invisible and act")
    return _with_entities(state, _entities_of(state, kind, trails=True), {"alpha": 0.0})


def undrawn(state: LevelState, kind: GameObject) -> LevelState:
    """The state with a kind drawn no more: entities invisible, cells empty. For a picture alone,
    as its cells act no more."""
    state = _without_cells(state, kind, None)
    return _with_entities(state, _entities_of(state, kind, trails=True), {"alpha": 0.0})


def removed(state: LevelState, kind: GameObject, within: float | None = None) -> LevelState:
    """The state with a kind taken away: entities far outside of the level, cells empty.

    Args:
        within: only what is at most so many cells away from the player's centre, from its nearest
            edge and in the direction, of x and y, in which it is farther.

    Raises:
        UserError: if the kind is the player, without which there is no level.
    """
    if _PLAYER in kind.entity_types:
        raise UserError(f"{kind.name} is the player of {state.game}, which cannot be taken away")
    far = {"x": _FAR_AWAY, "y": _FAR_AWAY}
    if within is None:
        state = _without_cells(state, kind, None)
        return _with_entities(state, _entities_of(state, kind, trails=True), far)
    player = state.player
    near = _reaches(state.entities, player["x"], player["y"], within)
    rows = _owners_in(state, kind, _entities_of(state, kind) & near)
    cells = _cells_reach(state, player["x"], player["y"], within)
    return _with_entities(_without_cells(state, kind, cells), rows, far)


def in_view(state: LevelState, kind: GameObject) -> bool:
    """Whether any of a kind, or its trail, lies in the square that the last frame showed, hidden
    by others or not."""
    view = (state.drawing["center_x"], state.drawing["center_y"], state.world["view_dim"] / 2)
    seen = _entities_of(state, kind, trails=True) & _reaches(state.entities, *view)
    cells = np.isin(state.grid, kind.cells) & _cells_reach(state, *view)
    return bool(seen.any() or cells.any())


def _entities_of(state: LevelState, kind: GameObject, trails: bool = False) -> np.ndarray:
    """Which entities are of a kind, bool (entities,); with their trails if asked for."""
    chosen = np.isin(state.entities["type"], kind.entity_types)
    if kind.moving is not None:
        chosen &= (state.entities["vx"] > 0) == (kind.moving == RIGHT)
    return _owners_in(state, kind, chosen) if trails else chosen


def _owners_in(state: LevelState, kind: GameObject, chosen: np.ndarray) -> np.ndarray:
    """``chosen`` entities (entities,) and the trails that belong to them."""
    entities = state.entities
    owners = np.flatnonzero(np.isin(entities["type"], kind.entity_types))
    trails = np.flatnonzero(np.isin(entities["type"], kind.trails))
    if not (len(owners) and len(trails)):
        return chosen
    away = np.hypot(*(entities[axis][trails, None] - entities[axis][owners] for axis in "xy"))
    chosen = chosen.copy()
    chosen[trails] = chosen[owners[away.argmin(axis=1)]]
    return chosen


def _reaches(entities: np.ndarray, x: float, y: float, distance: float) -> np.ndarray:
    """Which entities reach into a square of side 2 ``distance`` around a place, bool."""
    gap = np.maximum(abs(entities["x"] - x) - entities["rx"],
                     abs(entities["y"] - y) - entities["ry"])
    return gap <= distance


def _cells_reach(state: LevelState, x: float, y: float, distance: float) -> np.ndarray:
    """The same of the cells of the grid, bool (h, w)."""
    rows, columns = (np.arange(size) + 0.5 for size in state.grid.shape)
    gap = np.maximum(abs(rows - y)[:, None], abs(columns - x)) - 0.5
    return gap <= distance


def _with_entities(state: LevelState, rows: np.ndarray, values: dict[str, float]) -> LevelState:
    """The state with fields of some entities set."""
    if not rows.any():
        return state
    entities = state.entities.copy()
    for name, value in values.items():
        entities[name][rows] = value
    entities.flags.writeable = False
    return dataclasses.replace(state, entities=entities)


def _without_cells(state: LevelState, kind: GameObject, within: np.ndarray | None) -> LevelState:
    """The state with the cells of a kind empty, those alone that ``within`` (h, w) marks, if given.
    Without it also what is drawn around the grid."""
    if not kind.cells:
        return state
    gone = np.isin(state.grid, kind.cells)
    world = state.world
    if within is not None:
        gone &= within
    elif world["out_of_bounds_object"] in kind.cells:
        world = world.copy()
        world["out_of_bounds_object"] = _EMPTY
    grid = np.where(gone, _EMPTY, state.grid)
    grid.flags.writeable = False
    return dataclasses.replace(state, grid=grid, world=world)

"""Find kinds of object in a level state, make them invisible, or remove them.

This is the only module that reads ``hyperparams/game_objects.yml``. Functions that change a
``LevelState`` return a state from which Procgen can continue.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path

import numpy as np
from scipy import ndimage

from common.config import read_yaml, typed
from common.errors import UserError, nearest
from common.game_constants import ACTION_NAMES, NUM_ACTIONS
from envs.level_state import LevelState, MovingObject

GAME_OBJECTS_FILE = Path(__file__).parent.parent / "hyperparams" / "game_objects.yml"
LEFT, RIGHT = "left", "right"
_KEYS = "keys"  # entry of a game that names actions, not a kind of object
_EMPTY = 100  # value of an empty cell in every game
_PLAYER = 0  # entity type of the player
_FAR_AWAY = -1000.0  # coordinate in cells, outside all levels


@dataclasses.dataclass(frozen=True)
class GameObject:
    """Kind of object in a game.

    Attributes:
        name: name such as ``saw``.
        moving: direction of motion of the entities of this kind: ``left`` for entities that move to
            the left or stand still, ``right`` for entities that move to the right, None for all.
        cells: values of the cells of this kind in the grid.
        hazard: whether the kind can end an episode.
        trails: types of entities that entities of this kind leave behind. A trail belongs to the
            nearest entity of ``entity_types``, regardless of that entity's direction.
        mobile: whether ``game_objects.yml`` marks the kind as moving through the level. Kinds with
            ``moving`` need no mark, see ``changes_place``.
        animated: whether the kind stands still, but changes its look.
    """

    name: str
    entity_types: tuple[int, ...] = ()
    moving: str | None = None
    cells: tuple[int, ...] = ()
    hazard: bool = False
    trails: tuple[int, ...] = ()
    mobile: bool = False
    animated: bool = False

    def __post_init__(self):
        if self.moving not in (None, LEFT, RIGHT):
            raise UserError(f"{GAME_OBJECTS_FILE.name}: '{self.name}': moving must be {LEFT} or "
                            f"{RIGHT}, not {self.moving!r}")

    @property
    def is_player(self) -> bool:
        return _PLAYER in self.entity_types

    @property
    def changes_place(self) -> bool:
        """Whether objects of this kind move through the level (``mobile`` or ``moving``)."""
        return self.mobile or self.moving is not None

    @property
    def is_static(self) -> bool:
        """Whether objects of this kind neither move nor change their look."""
        return not (self.changes_place or self.animated)


@functools.cache
def objects_of(game: str) -> tuple[GameObject, ...]:
    """Return the kinds of object in a game; empty if ``game_objects.yml`` lacks the game.

    Raises:
        UserError: if the file is invalid; the message names the entry.

    Example::

        >>> kinds = objects_of("coinrun")
        >>> names = [kind.name for kind in kinds]
        >>> assert "saw" in names and "coin" in names
    """
    kinds = read_yaml(GAME_OBJECTS_FILE).get(game, {})
    return tuple(typed(GameObject, {**kind, "name": name},
                       f"{GAME_OBJECTS_FILE.name}: {game}: {name}")
                 for name, kind in kinds.items() if name != _KEYS)


@functools.cache
def action_labels(game: str) -> tuple[str, ...]:
    """Return the names of Procgen's actions in a game; "" stands for an unknown game.

    Raises:
        UserError: if ``game_objects.yml`` names another action than 9 to 14.

    Example::

        >>> action_labels("starpilot")[9:11], action_labels("coinrun")[9]
        (('fire', 'fire backwards'), 'no effect (9)')
    """
    games = read_yaml(GAME_OBJECTS_FILE)
    keys = games.get(game, {}).get(_KEYS, {})
    if not set(keys) <= set(range(len(ACTION_NAMES), NUM_ACTIONS)):
        raise UserError(f"{GAME_OBJECTS_FILE.name}: {game}: the keys are the actions 9 to 14")
    unnamed = "no effect ({})" if game in games else "action {}"
    return (*ACTION_NAMES, *(str(keys.get(number, unnamed.format(number)))
                             for number in range(len(ACTION_NAMES), NUM_ACTIONS)))


def kind_label(name: str) -> str:
    """Return the name of a kind of object, or of a cause of failure, in words."""
    return re.sub(r"_(left|right)$", r" moving \1", name).replace("_", " ")


def hazards_of(game: str) -> tuple[GameObject, ...]:
    """Return the kinds of object that can end an episode, see ``objects_of``."""
    return tuple(kind for kind in objects_of(game) if kind.hazard)


def invisible(state: LevelState, kind: GameObject) -> LevelState:
    """Make the entities of a kind and their trails invisible; they still affect the game.

    The change is permanent, but moving entities add a visible piece to their trail at every step;
    call the function again to hide these pieces.

    Raises:
        UserError: if the kind consists of cells, which would lose their effect if made invisible.
    """
    if kind.cells:
        raise UserError(f"{kind.name} of {state.game} consists of cells, which would lose their "
                        "effect if made invisible")
    return _with_entities(state, entities_of(state, kind, trails=True), {"alpha": 0.0})


def undrawn(state: LevelState, kind: GameObject) -> LevelState:
    """Make the entities of a kind invisible and empty its cells. Use the result only for rendering,
    because emptied cells no longer affect the game.

    Example::

        >>> [(_, state)] = level_states(recording, episode=0, rows=[0])
        >>> [coin] = [kind for kind in objects_of("coinrun") if kind.name == "coin"]
        >>> frame = StateView(EnvConfig("coinrun", "hard")).draw(undrawn(state, coin))
    """
    state = _without_cells(state, kind, None)
    return _with_entities(state, entities_of(state, kind, trails=True), {"alpha": 0.0})


def removed(state: LevelState, kind: GameObject | str, within: float | None = None) -> LevelState:
    """Remove the objects of a kind: move entities far outside the level, and empty cells.

    Args:
        kind: the kind, or its name.
        within: remove only objects whose nearest edge is at most this many cells from the
            player's centre in x and y (maximum norm). Trails are removed with their entity.

    Raises:
        UserError: if the kind is the player, which every level needs, or the game has no kind of
            this name.

    Example::

        >>> [(_, state)] = level_states(recording, episode=0, rows=[0])
        >>> without = removed(state, "saw")  # from which the game can continue
        >>> frame = StateView(EnvConfig("coinrun", "hard")).draw(without)
    """
    if isinstance(kind, str):
        kinds = {kind.name: kind for kind in objects_of(state.game)}
        if kind not in kinds:
            raise UserError(f"{state.game} has no objects called '{kind}'{nearest(kind, kinds)}")
        kind = kinds[kind]
    if kind.is_player:
        raise UserError(f"{kind.name} is the player of {state.game}, which cannot be removed")
    far = {"x": _FAR_AWAY, "y": _FAR_AWAY}
    if within is None:
        state = _without_cells(state, kind, None)
        return _with_entities(state, entities_of(state, kind, trails=True), far)
    player = state.player
    near = _reaches(state.entities, player["x"], player["y"], within)
    rows = _owners_in(state, kind, entities_of(state, kind) & near)
    cells = _cells_reach(state, player["x"], player["y"], within)
    return _with_entities(_without_cells(state, kind, cells), rows, far)


def in_view(state: LevelState, kind: GameObject) -> bool:
    """Return whether an object of a kind, or its trail, overlaps the view of the last frame, even
    if it is occluded.

    Example::

        >>> [(_, state)] = level_states(recording, episode=0, rows=[0])
        >>> [player] = [kind for kind in objects_of("coinrun") if kind.is_player]
        >>> assert in_view(state, player)
    """
    view = _view(state)
    seen = entities_of(state, kind, trails=True) & _reaches(state.entities, *view)
    cells = np.isin(state.grid, kind.cells) & _cells_reach(state, *view)
    return bool(seen.any() or cells.any())


def places_in_view(state: LevelState, kind: GameObject) -> np.ndarray:
    """Return the centres of the objects of a kind that overlap the view of the last frame.

    Occluded objects are included, trails are not.

    Returns:
        Centres x and y in cells, float (objects, 2).
    """
    view = _view(state)
    seen = state.entities[entities_of(state, kind) & _reaches(state.entities, *view)]
    rows, columns = np.nonzero(np.isin(state.grid, kind.cells) & _cells_reach(state, *view))
    return np.concatenate([np.stack([seen["x"], seen["y"]], axis=1),
                           np.stack([columns, rows], axis=1) + 0.5])


@dataclasses.dataclass(frozen=True, eq=False)
class SingleObject:
    """A single object: an entity with its trails, or adjacent cells of a kind.

    Procgen keeps the order of entities, so an entity is identified by its rank among the entities
    of its kind's types. Cells are assumed to stay where they are.

    Attributes:
        rank: rank of the entity; -1 if the object consists of cells.
        num_entities: number of entities of the kind's types. If another state has another number,
            the object cannot be found there.
        cells: mask of the object's cells, bool (h, w).
    """

    kind: GameObject
    rank: int
    num_entities: int
    cells: np.ndarray

    def is_known_in(self, state: LevelState) -> bool:
        """Return whether the object can be found in another state of the level."""
        return self.rank < 0 or self.num_entities == np.isin(
            state.entities["type"], self.kind.entity_types).sum()

    def _rows(self, state: LevelState) -> np.ndarray:
        """Return a mask of the object's entity and its trails, bool (entities,)."""
        rows = np.zeros(len(state.entities), bool)
        if self.rank < 0:
            return rows
        rows[np.flatnonzero(np.isin(state.entities["type"], self.kind.entity_types))[
            self.rank]] = True
        return _owners_in(state, self.kind, rows)

    def undrawn_in(self, state: LevelState) -> LevelState:
        """Make the object and its trails invisible. Use the result only for rendering."""
        state = _with_entities(state, self._rows(state), {"alpha": 0.0})
        return _without_cells(state, self.kind, self.cells)

    def removed_from(self, state: LevelState) -> LevelState:
        """Remove the object and its trails for good."""
        state = _with_entities(state, self._rows(state), {"x": _FAR_AWAY, "y": _FAR_AWAY})
        return _without_cells(state, self.kind, self.cells)


def single_objects(state: LevelState, kind: GameObject) -> list[SingleObject]:
    """Return the objects of a kind that overlap the view of the last frame, even if occluded.

    Cells of a kind that touch at an edge form one object, such as a pool of lava, with all of its
    cells, including those out of view. Trails alone do not bring an object into view.

    Example::

        >>> [(_, state)] = level_states(recording, episode=0, rows=[0])
        >>> [player] = [kind for kind in objects_of("coinrun") if kind.is_player]
        >>> [single] = single_objects(state, player)  # can be removed or hidden by itself
    """
    view, none = _view(state), np.zeros(state.grid.shape, bool)
    ranked = np.flatnonzero(np.isin(state.entities["type"], kind.entity_types))
    seen = entities_of(state, kind) & _reaches(state.entities, *view)
    groups, number = ndimage.label(np.isin(state.grid, kind.cells))
    cells_in_view = _cells_reach(state, *view)
    return [*(SingleObject(kind, rank, len(ranked), none) for rank in np.flatnonzero(seen[ranked])),
            *(SingleObject(kind, -1, len(ranked), groups == group)
              for group in range(1, number + 1) if (cells_in_view & (groups == group)).any())]


def moving_objects(state: LevelState) -> list[MovingObject]:
    """Return all moving and animated objects of a state except the player and trails."""
    return [MovingObject(kind.name, float(entity["x"]), float(entity["y"]), float(entity["vx"]),
                         float(entity["vy"]), int(entity["image_type"]), int(entity["image_theme"]))
            for kind in objects_of(state.game) if not (kind.is_static or kind.is_player)
            for entity in state.entities[entities_of(state, kind)]]


@functools.cache
def object_groups(game: str) -> tuple[tuple[str, ...], ...]:
    """Return the names of the moving and animated kinds, without the player, in groups that consist
    of the same entities, such as enemies that walk to the left and to the right."""
    groups: dict[tuple[int, ...], list[str]] = {}
    for kind in objects_of(game):
        if not (kind.is_static or kind.is_player):
            groups.setdefault(kind.entity_types, []).append(kind.name)
    return tuple(map(tuple, groups.values()))


def moving_rows(state: LevelState) -> np.ndarray:
    """Return a mask, bool (entities,), of the player, other moving or animated objects, and their
    trails."""
    rows = state.entities["type"] == _PLAYER
    for kind in objects_of(state.game):
        if not kind.is_static:
            rows = rows | entities_of(state, kind, trails=True)
    return rows


def with_player_moved(state: LevelState, right: float, up: float) -> LevelState:
    """Move the player, and thus the camera, by a number of squares, and make the player invisible.

    Use the result only for rendering.
    """
    player = np.zeros(len(state.entities), bool)
    player[np.flatnonzero(state.entities["type"] == _PLAYER)[-1]] = True
    x, y = (float(state.player[axis]) for axis in "xy")
    return _with_entities(state, player, {"x": x + right, "y": y + up, "alpha": 0.0})


def _view(state: LevelState) -> tuple[float, float, float]:
    """Return the centre (x, y) of the view, and half of its side, in cells."""
    return state.drawing["center_x"], state.drawing["center_y"], state.world["view_dim"] / 2


def entities_of(state: LevelState, kind: GameObject, trails: bool = False) -> np.ndarray:
    """Return a mask of the entities of a kind, bool (entities,), optionally with their trails."""
    chosen = np.isin(state.entities["type"], kind.entity_types)
    if kind.moving is not None:
        chosen &= (state.entities["vx"] > 0) == (kind.moving == RIGHT)
    return _owners_in(state, kind, chosen) if trails else chosen


def _owners_in(state: LevelState, kind: GameObject, chosen: np.ndarray) -> np.ndarray:
    """Extend a mask of entities of a kind by their trails.

    A trail belongs to the nearest entity of ``kind.entity_types``, and is marked if this entity is
    marked.

    Args:
        kind: kind of object, with the entity types of objects and trails.
        chosen: mask, bool (entities,).
    """
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
    """Return a mask, bool (entities,), of the entities that overlap a square of side 2 ``distance``
    centred at (x, y), in cells."""
    gap = np.maximum(abs(entities["x"] - x) - entities["rx"],
                     abs(entities["y"] - y) - entities["ry"])
    return gap <= distance


def _cells_reach(state: LevelState, x: float, y: float, distance: float) -> np.ndarray:
    """Return a mask, bool (h, w), of the cells that overlap a square of side 2 ``distance`` centred
    at (x, y), in cells."""
    rows, columns = (np.arange(size) + 0.5 for size in state.grid.shape)
    gap = np.maximum(abs(rows - y)[:, None], abs(columns - x)) - 0.5
    return gap <= distance


def _with_entities(state: LevelState, rows: np.ndarray, values: dict[str, float]) -> LevelState:
    """Return a state in which fields of some entities are changed.

    Args:
        rows: mask of the entities to change, bool (entities,).
        values: new values by name of the field.
    """
    if not rows.any():
        return state
    entities = state.entities.copy()
    for name, value in values.items():
        entities[name][rows] = value
    entities.flags.writeable = False
    return dataclasses.replace(state, entities=entities)


def _without_cells(state: LevelState, kind: GameObject, within: np.ndarray | None) -> LevelState:
    """Empty the cells of a kind.

    Args:
        within: mask of the cells that may be emptied, bool (h, w). If None, all cells of the kind
            are emptied, including the cell value that Procgen draws outside the grid.
    """
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

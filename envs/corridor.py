"""Flat corridors of CoinRun with a single object, built by editing the state of a level.

The ground, its theme and the player's look are those of the level; the themes of enemies and crates
are drawn by the level seed. The coin lies in front of the wall at the end, too far behind the
object to be in view before the player has passed it.

An object is an entity with a *nature*, its type, which decides what happens on contact, and a
*look*, its image, which Procgen draws. The state stores both, so they can differ. Procgen resets
the images of saws and enemies at every step, so an edit that changes a look must be repeated.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from envs.coin import COIN, EMPTY, GAME, GROUND
from envs.level_state import LevelState

SAW, ENEMY, CRATE, PIT, NOTHING = KINDS = ("saw", "enemy", "crate", "pit", "nothing")
INVISIBLE = "invisible"
COIN_LOOK = "coin"
COLUMN = 24  # first column of the object
FLOOR = 4  # row in which the player walks, on ground of this height, as deep as pits in levels are
BEYOND = 8  # columns between the object and the coin
REACH = 0.5, 0.5787  # half of the player's width and height
SPEED = 0.5  # largest speed of a walking player, in squares per step
ENEMY_SPEED = 0.15  # of an enemy, towards the player
PHASES = 0.5  # the player's distance to the object varies by up to this many squares

_ROCK, _SURFACE, _LAVA = *GROUND, 18
_TYPES = {SAW: 2, ENEMY: 5, CRATE: 20}
_IMAGES = {SAW: 2, ENEMY: 6, CRATE: 20, COIN_LOOK: 1}
_NUM_THEMES = {SAW: 1, ENEMY: 9, CRATE: 4, COIN_LOOK: 1}


@dataclasses.dataclass(frozen=True)
class Corridor:
    """``LevelEdit`` that replaces a level by a corridor; it depends on the level alone. After the
    first step of the level, it only restores the look of the object.

    Attributes:
        kind: nature of the object, one of KINDS.
        look: look of the object if it is an entity: SAW, ENEMY, CRATE, COIN_LOOK or INVISIBLE; by
            default that of its kind. A look of another kind always has the first theme, because
            Procgen would crash on a saw with another theme.
        number: number of crates on top of each other, or width of the pit in squares.
        size: width and height of an entity in squares.
        above: height of an entity above the ground in squares.
        gap: squares between the player's front and the near edge of the object, at the start; the
            level seed adds up to PHASES.
        speed: the player's speed at the start.

    Example::

        >>> [(state, _)] = first_states(EnvConfig("coinrun", "hard"), [3])
        >>> frame = StateView(EnvConfig("coinrun", "hard")).draw(Corridor(SAW, gap=2)(state))
    """

    kind: str = NOTHING
    look: str | None = None
    number: int = 1
    size: float = 1.0
    above: float = 0.0
    gap: float = 8.0
    speed: float = 0.0

    @property
    def width(self) -> float:
        """Width of the object in squares."""
        return self.number if self.kind == PIT else self.size

    @property
    def repeated(self) -> bool:
        """Whether the edit must be repeated at every step."""
        return self.look not in (None, INVISIBLE)

    def __call__(self, data: bytes) -> bytes:
        """Return the state bytes of the corridor.

        Args:
            data: state bytes of a level.

        Raises:
            UserError: if the bytes are not a state of CoinRun.
        """
        state = LevelState.parse(data, GAME)
        if state.step["cur_time"]:
            return self._with_look(state).to_bytes()
        level = int(state.step["current_level_seed"])
        player = np.array([state.player])
        player["x"] = COLUMN - REACH[0] - self.gap - phase_of(level)
        player["y"], player["vx"], player["vy"] = FLOOR + REACH[1], self.speed, 0
        drawing = state.drawing.copy()
        drawing["center_x"], drawing["center_y"] = player["x"][0], player["y"][0]
        tail = np.frombuffer(state.tail, "<i4").copy()
        tail[:1].view("<f4")[0] = player["y"][0]  # height in the last step
        tail[2] = 1  # the player stands on the ground
        entities = [player]
        if self.kind in _TYPES:
            entities += [self._entity(player, level, place) for place in range(self.number)]
        return dataclasses.replace(
            state, grid=self._grid(state.grid), entities=np.concatenate(entities), drawing=drawing,
            tail=tail.tobytes()).to_bytes()

    def _grid(self, stock: np.ndarray) -> np.ndarray:
        grid = np.full_like(stock, EMPTY)
        grid[:FLOOR], grid[FLOOR - 1], grid[:, 0] = _ROCK, _SURFACE, _ROCK
        end = COLUMN + int(np.ceil(self.width)) + BEYOND
        if self.kind == PIT:
            columns = slice(COLUMN, COLUMN + self.number)
            grid[0, columns], grid[1, columns], grid[2:FLOOR, columns] = _SURFACE, _LAVA, EMPTY
        grid[FLOOR, end], grid[:, end + 1:] = COIN, _ROCK
        return grid

    def _with_look(self, state: LevelState) -> LevelState:
        entities = state.entities.copy()
        rows = entities["type"] == _TYPES.get(self.kind, -1)
        time = int(state.step["cur_time"])
        entities["image_type"][rows] = _image_of(self.look or self.kind, time)
        return dataclasses.replace(state, entities=entities)

    def _entity(self, player: np.ndarray, level: int, place: int) -> np.ndarray:
        """Return the entity at a place of the pile, (1,), with the fields that Procgen gives it."""
        look, entity = self.look or self.kind, player.copy()
        theme = theme_of(look, level) if look == self.kind else 0
        radius = self.size / 2
        for name, value in {
                "x": COLUMN + radius, "y": FLOOR + self.above + radius + place * self.size,
                "vx": -ENEMY_SPEED if self.kind == ENEMY else 0, "vy": 0, "rx": radius,
                "ry": radius, "type": _TYPES[self.kind], "image_type": _image_of(look, 0),
                "image_theme": theme, "alpha": float(look != INVISIBLE),
                "render_z": self.kind == ENEMY, "smart_step": self.kind == ENEMY}.items():
            entity[name] = value
        return entity


def _image_of(look: str, time: int) -> int:
    """Return Procgen's number of an image at a step: a saw's changes every step, an enemy's every
    five."""
    return _IMAGES.get(look, _IMAGES[SAW]) + {SAW: time % 2, ENEMY: time // 5 % 2}.get(look, 0)


def phase_of(level: int) -> float:
    """Return the squares that a level adds to the player's distance, in [0, PHASES)."""
    return PHASES * np.random.default_rng([level, 1]).random()


def theme_of(look: str, level: int) -> int:
    """Return the theme of an object's image in a level."""
    return int(np.random.default_rng([level, 2]).integers(_NUM_THEMES[look]))


def ground_theme(data: bytes) -> int:
    """Return the number of the ground's theme in a level of CoinRun, 0 to 5."""
    return int(np.frombuffer(LevelState.parse(data, GAME).tail, "<i4")[1])

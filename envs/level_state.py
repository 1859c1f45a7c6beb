"""Read and write the serialised state of a Procgen level; keep game-specific fields as bytes.

``get_state`` of an environment returns little-endian ``bytes`` without padding. Integers and
booleans are int32, other numbers are float32, and a string is its int32 length followed by its
characters. The order is::

    head                version (0), name of the game
    options             options of rendering and level generation
    levels              range of level seeds
    level_generator     generator of level seeds: whether it is seeded, and C++'s mt19937 as text
    game_generator      generator of random events in the game
    step                reward, end of the episode, time and other values of the step
    grid_size
    entities            number of entities, then 31 fields per entity
    drawing             background, physics of the player
    picture_generator   generator of random images
    world               sizes and view
    grid                width, height, their product, then the cells
    tail                fields of the individual game, then the end mark 0xCAFECAFE

Strings vary in length, so offsets are not fixed. A state that Procgen cannot read or render crashes
the whole process without an exception, so only states that :meth:`LevelState.parse` accepts are
passed to ``set_state``.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from common.errors import UserError

_INT, _FLOAT = np.dtype("<i4"), np.dtype("<f4")


def _record(*parts: tuple[np.dtype, str]) -> np.dtype:
    """Return the dtype of a packed record. Each part is a type and the names of its fields."""
    return np.dtype([(name, dtype) for dtype, names in parts for name in names.split()])


OPTIONS = _record((_INT, """paint_vel_info use_generated_assets use_monochrome_assets
    restrict_themes use_backgrounds center_agent debug_mode distribution_mode
    use_sequential_levels use_easy_jump plain_assets physics_mode"""))
LEVELS = _record((_INT, "grid_step level_seed_low level_seed_high game_type game_n"))
STEP = _record(
    (_FLOAT, "reward"),
    (_INT, """done level_complete action timeout current_level_seed prev_level_seed
        episodes_remaining episode_done last_reward_timer"""),
    (_FLOAT, "last_reward"),
    (_INT, "default_action fixed_asset_seed cur_time is_waiting_for_step"))
ENTITY = _record(
    (_FLOAT, "x y vx vy rx ry"),
    (_INT, "type image_type image_theme render_z will_erase collides_with_entities"),
    (_FLOAT, "collision_margin rotation vrot"),
    (_INT, "is_reflected fire_time spawn_time life_time expire_time use_abs_coords"),
    (_FLOAT, "friction"),
    (_INT, "smart_step avoids_collisions auto_erase"),
    (_FLOAT, "alpha health theta grow_rate alpha_decay climber_spawn_x"))
DRAWING = _record(
    (_INT, "use_procgen_background background_index"),
    (_FLOAT, "bg_tile_ratio bg_pct_x char_dim"),
    (_INT, "last_move_action move_action special_action"),
    (_FLOAT, """mixrate maxspeed max_jump action_vx action_vy action_vrot center_x center_y"""),
    (_INT, "random_agent_start has_useful_vel_info step_rand_int"))
WORLD = _record(
    (_INT, "main_width main_height out_of_bounds_object"),
    (_FLOAT, "unit view_dim x_off y_off visibility min_visibility"))

# Tails by game: numbers of 4-byte words, and lists of words or entities preceded by their lengths.
_LIST, _ENTITIES = "list", "entities"
_TAILS = {
    "bigfish": (2,), "bossfight": (_LIST, 23), "caveflyer": (), "chaser": (_LIST, _LIST, 7),
    "climber": (7,), "coinrun": (7,), "dodgeball": (7,), "fruitbot": (3,), "heist": (2, _LIST),
    "jumper": (7,), "leaper": (1, _LIST, 1, _LIST, 1), "maze": (2,), "miner": (1,), "ninja": (8,),
    "plunder": (1, _LIST, _LIST, _LIST, _LIST, 9), "starpilot": (_ENTITIES,)}
_END = (0xCAFECAFE).to_bytes(4, "little")
_GENERATOR_SIZE = 624  # numbers in the state of mt19937, which precede its position
_FORK_OPTIONS = 5  # additional options in the fork of Langosco et al. (2022)
_DISTRIBUTION_MODES = (0, 1, 2, 10)  # easy, hard, extreme, memory; exploration is 1
# Limits of Procgen 0.10.7, tested for every game: values beyond them crash the process.
_MAX_DRAWN = 100  # largest absolute value of cells and image types
_OWN_CELLS = {"chaser": (1002,)}
_MAX_THEMES = 10
_THEMES = {"maze": 1}  # games in which every image has fewer than _MAX_THEMES themes
_MAX_TILES = 100  # largest number of background tiles in the view
# Limits of entities: radius in cells, and growth per step. Procgen hangs above them.
_MAX_RADIUS, _MAX_GROWTH = 1000, 10
_BACKGROUNDS = {
    "bigfish": 7, "bossfight": 13, "caveflyer": 13, "chaser": 1, "climber": 62, "coinrun": 62,
    "dodgeball": 9, "fruitbot": 9, "heist": 9, "jumper": 62, "leaper": 9, "maze": 9, "miner": 62,
    "ninja": 62, "plunder": 4, "starpilot": 13}


@dataclasses.dataclass(frozen=True)
class LevelState:
    """Parsed state of a level. All arrays are read-only.

    To edit a state, replace bytes at an :meth:`offset`, or use ``dataclasses.replace`` with a part
    of the same size; in both cases the other bytes stay the same.

    Attributes:
        options, levels, step, drawing, world: records with the fields of ``OPTIONS``, ``LEVELS``,
            ``STEP``, ``DRAWING`` and ``WORLD``.
        level_generator, game_generator, picture_generator: serialised random generators.
        grid_size: number of cells, h w.
        entities: array with the fields of ``ENTITY``; x to the right and y upwards, in cells.
        grid: cells in h rows and w columns, int32 (h, w); row 0 is the bottom of the level.
        tail: fields of the individual game, and the end mark.

    Example::

        >>> [(_, state)] = level_states(recording, episode=0, rows=[0])
        >>> x, y = state.player["x"], state.player["y"]  # in squares
        >>> same = LevelState.parse(state.to_bytes())
    """

    game: str
    options: np.void
    levels: np.void
    level_generator: bytes
    game_generator: bytes
    step: np.void
    grid_size: int
    entities: np.ndarray
    drawing: np.void
    picture_generator: bytes
    world: np.void
    grid: np.ndarray
    tail: bytes

    @classmethod
    def parse(cls, data: bytes, game: str | None = None, checked: bool = True) -> LevelState:
        """Parse a state.

        Args:
            data: state of one environment, from Procgen's ``get_state``.
            game: expected game, if given.
            checked: check for values that would crash Procgen, which takes half of the time and is
                needless for a state that Procgen has just returned.

        Raises:
            UserError: if the state belongs to another game or would crash Procgen; the message
                gives the reason. In games other than maze, two things are not checked: whether the
                theme of an entity exists (most images have fewer than ten themes), and the meaning
                of the numbers in the tail.
        """
        walk = _Walk(data)
        version, name_bytes = walk.integer("version"), walk.text("name of the game")
        if version != 0:
            raise walk.error(f"it has version {version}, but only version 0 is supported")
        name = name_bytes.decode("ascii", "replace")
        if name not in _TAILS:
            raise walk.error(f"there is no game {name[:40]!r}")
        if game not in (None, name):
            raise walk.error(f"its game is {name}, not {game}")
        state = cls(
            name, walk.records(OPTIONS, "options")[0], walk.records(LEVELS, "levels")[0],
            walk.generator("level_generator"), walk.generator("game_generator"),
            walk.records(STEP, "step")[0], walk.integer("grid_size"),
            walk.records(ENTITY, "entities", walk.integer("number of entities")),
            walk.records(DRAWING, "drawing")[0], walk.generator("picture_generator", needed=False),
            walk.records(WORLD, "world")[0], walk.grid(), walk.tail(name))
        if checked:
            state._check(walk)
        return state

    def to_bytes(self) -> bytes:
        """Serialise the state in Procgen's format."""
        height, width = self.grid.shape
        return b"".join((
            self._head, self.options.tobytes(), self.levels.tobytes(), self.level_generator,
            self.game_generator, self.step.tobytes(), _integers(self.grid_size,
                                                                len(self.entities)),
            self.entities.tobytes(), self.drawing.tobytes(), self.picture_generator,
            self.world.tobytes(), _integers(width, height, width * height),
            self.grid.astype(_INT, copy=False).tobytes(), self.tail))

    def offset(self, name: str) -> int:
        """Return the byte offset of a field of a record, or of the first byte of a record, a
        generator, ``entities``, the cells of ``grid``, or ``tail``. Values of a fixed size can be
        replaced there.

        Raises:
            KeyError: if there is no such field.
        """
        at = len(self._head)
        for block in ("options", "levels", "level_generator", "game_generator", "step", "entities",
                      "drawing", "picture_generator", "world", "grid", "tail"):
            at += {"entities": 2, "grid": 3}.get(block, 0) * _INT.itemsize
            value = getattr(self, block)
            if block == name:
                return at
            fields = value.dtype.fields if isinstance(value, np.void) else None
            if fields and name in fields:
                return at + fields[name][1]
            at += len(value) if isinstance(value, bytes) else value.nbytes
        raise KeyError(name)

    def fields(self) -> dict[str, object]:
        """Return all fields by name, in the order of the bytes.

        Values are numbers; the name of the game and the states of random generators are strings.
        The tail, which holds the fields of the individual game, is left out. The cells of the grid
        are a list of rows, the lowest first.
        """
        fields: dict[str, object] = {"version": 0, "game": self.game}
        for block in ("options", "levels", "level_generator", "game_generator", "step",
                      "grid_size", "entities", "drawing", "picture_generator", "world"):
            value = getattr(self, block)
            if isinstance(value, bytes):
                seeded, length = np.frombuffer(value, _INT, 2).tolist()
                fields |= {f"{block}.is_seeded": seeded,
                          f"{block}.text": value[-length:].decode("ascii") if length else ""}
            elif block == "entities":
                fields["entities.count"] = len(value)
                for number, entity in enumerate(value):
                    fields |= {f"entities[{number}].{name}": entity[name].item()
                              for name in ENTITY.names or ()}
            elif isinstance(value, np.void):
                fields |= {f"{block}.{name}": value[name].item()
                           for name in value.dtype.names or ()}
            else:
                fields[block] = value
        height, width = self.grid.shape
        return {**fields, "grid.width": width, "grid.height": height, "grid.count": self.grid.size,
                "grid.cells": self.grid.tolist()}

    @property
    def player(self) -> np.void:
        """Record of the player, which is the last entity of type 0, as in Procgen."""
        return self.entities[self.entities["type"] == 0][-1]

    @property
    def _head(self) -> bytes:
        return _integers(0, len(self.game)) + self.game.encode("ascii")

    def _check(self, walk: _Walk) -> None:
        """Raise UserError if a well-formed state would crash or hang Procgen.

        Args:
            walk: reader of the serialised state, which creates the errors.
        """
        height, width = self.grid.shape
        if not (self.entities["type"] == 0).any():
            raise walk.error("it has no player")
        for record, name, allowed in (
                (self.options, "use_generated_assets", (0,)),
                (self.options, "distribution_mode", _DISTRIBUTION_MODES),
                (self.step, "is_waiting_for_step", (0,)),
                (self.world, "main_width", (width,)), (self.world, "main_height", (height,)),
                (self.drawing, "background_index", range(_BACKGROUNDS[self.game]))):
            if record[name] not in allowed:
                raise walk.error(f"{name} is {record[name]}")
        if self.grid_size != self.grid.size:
            raise walk.error(f"grid_size is {self.grid_size}, but the grid has {self.grid.size} "
                             "cells")
        if self.levels["level_seed_low"] >= self.levels["level_seed_high"]:
            raise walk.error("its range of levels is empty")
        if not 0 < self.world["visibility"] <= max(width, height):
            raise walk.error(f"visibility is {self.world['visibility']}")
        ratio = abs(float(self.drawing["bg_tile_ratio"]))
        if not (ratio == 0 or 1 / _MAX_TILES <= ratio <= _MAX_TILES):
            raise walk.error(f"bg_tile_ratio is {self.drawing['bg_tile_ratio']}")
        for name, most in (("rx", _MAX_RADIUS), ("ry", _MAX_RADIUS), ("grow_rate", _MAX_GROWTH)):
            values = self.entities[name]
            if not ((values >= 0) & (values <= most)).all():
                raise walk.error(f"an entity has a {name} of {values.min()} to {values.max()}")
        themes = self.entities["image_theme"]
        if (themes < 0).any() or (themes >= _THEMES.get(self.game, _MAX_THEMES)).any():
            raise walk.error("an entity has an image_theme that Procgen cannot draw")
        for name, values in (("cell", self.grid), ("image_type", self.entities["image_type"]),
                             ("out_of_bounds_object", self.world["out_of_bounds_object"])):
            if values.min() >= -_MAX_DRAWN and values.max() <= _MAX_DRAWN:
                continue
            unknown = np.setdiff1d(values[(values < -_MAX_DRAWN) | (values > _MAX_DRAWN)],
                                   _OWN_CELLS.get(self.game, ()))
            if unknown.size:
                raise walk.error(f"{self.game} cannot draw the {name} {unknown[0]}")


@dataclasses.dataclass(frozen=True)
class MovingObject:
    """An object that moves through the level.

    Attributes:
        x, y: its centre in squares, from the lower left corner of the level.
        vx, vy: its velocity in squares per step.
        image_type, image_theme: Procgen's numbers of its image.
    """

    kind: str
    x: float
    y: float
    vx: float
    vy: float
    image_type: int
    image_theme: int


class _Walk:
    """Sequential reader of a serialised state; each method reads the next part.

    In messages, the argument ``what`` names the part that is read.
    """

    def __init__(self, data: bytes):
        self.data, self.at = data, 0

    @staticmethod
    def error(reason: str) -> UserError:
        return UserError(f"not a Procgen state: {reason}")

    def take(self, size: int, what: str) -> int:
        """Skip ``size`` bytes, and return the offset of the first skipped byte.

        Raises:
            UserError: if the size is negative, or fewer bytes are left.
        """
        begin = self.at
        if size < 0:
            raise self.error(f"a negative length of {what} at byte {begin}")
        if begin + size > len(self.data):
            raise self.error(f"it has {len(self.data)} bytes and ends within {what}, which begins "
                             f"at byte {begin}")
        self.at = begin + size
        return begin

    def integer(self, what: str) -> int:
        begin = self.take(_INT.itemsize, what)
        return int.from_bytes(self.data[begin:self.at], "little", signed=True)

    def text(self, what: str) -> bytes:
        begin = self.take(self.integer(f"length of {what}"), what)
        return self.data[begin:self.at]

    def records(self, dtype: np.dtype, what: str, count: int = 1) -> np.ndarray:
        begin = self.take(count * dtype.itemsize, what)
        return np.frombuffer(self.data, dtype, count, begin)

    def generator(self, what: str, needed: bool = True) -> bytes:
        begin = self.at
        end = self._end_of_generator(begin)
        if end is None:
            if self._end_of_generator(begin + _FORK_OPTIONS * _INT.itemsize):
                raise self.error(f"it has {_FORK_OPTIONS} additional options, as in the fork of "
                                 "Langosco et al.")
            raise self.error(f"it has no {what} at byte {begin}")
        if self.integer(what) not in ((1,) if needed else (0, 1)):
            raise self.error(f"the {what} is not seeded")
        self.at = end
        return self.data[begin:end]

    def _end_of_generator(self, begin: int) -> int | None:
        """Return the end of the generator that starts at ``begin``; None if none starts there."""
        text_begin = begin + 2 * _INT.itemsize
        length = int.from_bytes(self.data[begin + _INT.itemsize:text_begin], "little")
        text = self.data[text_begin:text_begin + length]
        position, digits = text.rpartition(b" ")[2], text.replace(b" ", b"")
        if (len(text) < length or len(text) - len(digits) != _GENERATOR_SIZE or len(position) > 3
                or not digits.isdigit() or int(position or -1) > _GENERATOR_SIZE):
            return None
        return text_begin + length

    def grid(self) -> np.ndarray:
        width, height, count = (self.integer(f"{what} of the grid")
                                for what in ("width", "height", "size"))
        if min(width, height) < 1 or count != width * height:
            raise self.error(f"a grid of {width} x {height} cells has {count} entries")
        return self.records(_INT, "grid", count).reshape(height, width)

    def tail(self, game: str) -> bytes:
        begin = self.at
        for part in _TAILS[game]:
            count = part if isinstance(part, int) else self.integer(f"number in the tail of {game}")
            self.records(ENTITY if part == _ENTITIES else _INT, f"tail of {game}", count)
        end = self.take(len(_END), "end mark")
        if self.data[end:self.at] != _END:
            raise self.error(f"there is no end mark at byte {end}")
        if self.at != len(self.data):
            raise self.error(f"it has {len(self.data) - self.at} bytes after its end mark")
        return self.data[begin:self.at]


def _integers(*values: int) -> bytes:
    return np.array(values, _INT).tobytes()

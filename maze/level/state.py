"""Levels of the game maze as Procgen makes, plays and draws them: state bytes and their edits.

:mod:`envs.level_state` reads the part of the bytes that all games share. This module reads the two
numbers that maze adds, checks that Procgen can play a state, and edits it.

Letters in shape comments: N states.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from common.errors import UserError
from envs.level_state import ENTITY, LevelState
from envs.procgen_env import EnvConfig, ProcgenVectorEnv, StateView
from maze.level.grid import CHEESE, FREE, WALL, Grid, Square

GAME = "maze"
WORLD_DIMS = {"easy": 15, "hard": 25, "memory": 31}
_MODES = {0: "easy", 1: "hard", 10: "memory"}
_TAIL = np.dtype([("maze_dim", "<i4"), ("world_dim", "<i4")])
# Fields of the mouse that are no 0, and those that vary, in every level that Procgen generates.
# Others, as growth without bounds, would keep it busy for ever.
_MOUSE = np.zeros(1, ENTITY)
for _name, _value in {"rx": 0.5, "ry": 0.5, "render_z": 1, "fire_time": -1, "spawn_time": -1,
                      "expire_time": -1, "friction": 1, "smart_step": 1, "auto_erase": 1,
                      "alpha": 1, "health": 1, "theta": -100, "grow_rate": 1,
                      "alpha_decay": 1}.items():
    _MOUSE[_name] = _value
_FIXED = ~np.isin(list(ENTITY.names or ()), ("x", "y", "vx", "vy", "is_reflected", "life_time"))


@dataclasses.dataclass(frozen=True, eq=False)
class MazeState:
    """State of a level of maze. Edits give new states, whose other bytes are the same.

    Attributes:
        level: the state as read; every field is in it.

    Raises:
        UserError: if Procgen could not play it, or it is no maze; what is wrong is named.
    """

    level: LevelState

    def __post_init__(self):
        level = self.level
        if level.game != GAME:
            raise _error(f"it is one of {level.game}, not of {GAME}")
        mode = int(level.options["distribution_mode"])
        if mode not in _MODES:
            raise _error(f"distribution_mode is {mode}; mazes are easy (0), hard (1) or memory "
                         "(10)")
        tail = self._tail
        if len(level.entities) != 1:
            raise _error(f"it has {len(level.entities)} entities; a maze has one, the mouse")
        height, width = level.grid.shape
        if not width == height == tail["world_dim"] == WORLD_DIMS[_MODES[mode]]:
            raise _error(f"its grid has {height} x {width} cells and its world_dim is "
                         f"{tail['world_dim']}; {_MODES[mode]} mazes have "
                         f"{WORLD_DIMS[_MODES[mode]]}")
        other = _FIXED & (level.entities.view("<i4") != _MOUSE.view("<i4"))
        if other.any():
            name = (ENTITY.names or ())[other.argmax()]
            raise _error(f"{name} of the mouse is {level.entities[name][0]}, not "
                         f"{_MOUSE[name][0]}")
        for name in ("vx", "vy", "x", "y"):
            value = float(level.entities[name][0])
            if name in ("vx", "vy") and not abs(value) <= 1:
                raise _error(f"{name} of the mouse is {value}")
            if name in ("x", "y") and not (0 < value < width and value % 1 == 0.5):
                raise _error(f"{name} of the mouse is {value}, which is no middle of a square")
        if not 0 <= level.step["cur_time"] < level.step["timeout"]:
            raise _error(f"cur_time is {level.step['cur_time']} of {level.step['timeout']} steps")
        self.grid  # noqa: B018  is checked as it is made

    @classmethod
    def parse(cls, data: bytes) -> MazeState:
        """Read the state of one environment, from Procgen's ``get_state``.

        Raises:
            UserError: as the class.
        """
        return cls(LevelState.parse(data, GAME))

    def to_bytes(self) -> bytes:
        """The state as Procgen reads it."""
        return self.level.to_bytes()

    @functools.cached_property
    def grid(self) -> Grid:
        """Cells, mouse and facing."""
        mouse = self.level.entities[0]
        return Grid(self.level.grid, int(self._tail["maze_dim"]),
                    Square(int(mouse["y"]), int(mouse["x"])), int(mouse["is_reflected"]))

    @property
    def level_seed(self) -> int:
        return int(self.level.step["current_level_seed"])

    @property
    def distribution_mode(self) -> str:
        """``easy``, ``hard`` or ``memory``."""
        return _MODES[int(self.level.options["distribution_mode"])]

    @property
    def use_backgrounds(self) -> bool:
        return bool(self.level.options["use_backgrounds"])

    @property
    def time(self) -> int:
        """Steps since the episode began."""
        return int(self.level.step["cur_time"])

    @property
    def timeout(self) -> int:
        """Steps at which the episode ends."""
        return int(self.level.step["timeout"])

    def fields(self) -> dict[str, object]:
        """Every field by its name, in the order of the bytes."""
        fields = self.level.fields()
        return {**fields, **{name: int(self._tail[name]) for name in _TAIL.names or ()}}

    def with_cheese(self, square: Square | None, several: bool = False) -> MazeState:
        """Move the cheese, or take it away.

        Args:
            square: where it will be, a free square; None: nowhere.
            several: whether to leave what cheese there is and add one.

        Raises:
            UserError: if the square is no free one, or the mouse is there.
        """
        cells = self.grid.cells.copy()
        if not several or square is None:
            cells[cells == CHEESE] = FREE
        if square is not None:
            self.grid.check_free(square, "the cheese")
            cells[square] = CHEESE
        return self.with_grid(dataclasses.replace(self.grid, cells=cells))

    def with_mouse(self, square: Square) -> MazeState:
        """Put the mouse on a free square without cheese, at rest.

        Raises:
            UserError: if it is none.
        """
        return self.with_grid(dataclasses.replace(self.grid, mouse=square))

    def with_facing(self, facing: int) -> MazeState:
        """Mirror the mouse (1), or not (0).

        Raises:
            UserError: if it is something else.
        """
        return self.with_grid(dataclasses.replace(self.grid, facing=facing))

    def with_cells(self, cells: Mapping[Square, int]) -> MazeState:
        """Make squares walls or free ones.

        Args:
            cells: WALL or FREE by square. Cheese and mouse are moved by other edits.

        Raises:
            UserError: if a square is outside the world, or one of the cheese or the mouse.
        """
        changed = self.grid.cells.copy()
        for square, cell in cells.items():
            if cell not in (WALL, FREE):
                raise UserError(f"a square can be made a wall ({WALL}) or free ({FREE}), not "
                                f"{cell}")
            self.grid.check_inside(square, "a wall" if cell == WALL else "a free square")
            if square in self.grid.cheeses:
                raise UserError(f"the cheese is at {Square(*square)}; move it away first")
            changed[square] = cell
        return self.with_grid(dataclasses.replace(self.grid, cells=changed))

    def with_grid(self, grid: Grid) -> MazeState:
        """Replace cells, mouse and facing; what is the same leaves its bytes as they are.

        Raises:
            UserError: if the grid is of another size.
        """
        old = self.grid
        if (grid.world_dim, grid.maze_dim) != (old.world_dim, old.maze_dim):
            raise UserError(f"a maze of {grid.maze_dim} x {grid.maze_dim} squares in a world of "
                            f"{grid.world_dim} is another level than one of {old.maze_dim} in "
                            f"{old.world_dim}; choose a level seed of its size")
        entities = self.level.entities.copy()
        if grid.mouse != old.mouse:
            entities["x"], entities["y"] = grid.mouse.column + 0.5, grid.mouse.row + 0.5
            entities["vx"] = entities["vy"] = 0
        entities["is_reflected"] = grid.facing
        return MazeState(dataclasses.replace(self.level, grid=grid.cells, entities=entities))

    def with_time(self, cur_time: int, timeout: int | None = None) -> MazeState:
        """Set how many steps have passed, and at how many the episode ends.

        Args:
            timeout: as it is, if not given.

        Raises:
            UserError: unless 0 <= cur_time < timeout.
        """
        step = self.level.step.copy()
        step["cur_time"] = cur_time
        step["timeout"] = self.timeout if timeout is None else timeout
        return MazeState(dataclasses.replace(self.level, step=step))

    def with_top_right_path(self) -> MazeState:
        """Open a corridor from the maze's corner up to the world's top row and along it to the
        world's corner.

        Raises:
            UserError: if the maze fills the world.
        """
        grid = self.grid
        if grid.margin == 0:
            raise UserError(f"level {self.level_seed} has no room for a path to the top right: its "
                            "maze fills the world")
        last, corner = grid.world_dim - 1, grid.corner
        path = [*(Square(row, corner.column) for row in range(corner.row + 1, last + 1)),
                *(Square(last, column) for column in range(corner.column + 1, last + 1))]
        return self.with_cells({square: FREE for square in path if square not in grid.cheeses})

    @property
    def _tail(self) -> np.void:
        return np.frombuffer(self.level.tail, _TAIL, 1)[0]


def _error(reason: str) -> UserError:
    return UserError(f"not a Procgen state of a maze that can be played: {reason}")


def stock_state(distribution_mode: str, level_seed: int, use_backgrounds: bool = False
                ) -> MazeState:
    """The state of a level at its start, as Procgen generates it.

    Raises:
        UserError: if mazes have no such mode, or there is no such seed.
    """
    config = EnvConfig(GAME, distribution_mode, level_seed, 1, use_backgrounds)
    with contextlib.closing(ProcgenVectorEnv(config, 1, level_seed, num_threads=0)) as env:
        return MazeState.parse(env.get_state()[0])


def draw(states: Sequence[MazeState], person_view: bool = False) -> np.ndarray:
    """Frames of states, as the agent sees them, without a step: uint8 (N, 64, 64, 3).

    Args:
        person_view: whether to draw the view for people instead, uint8 (N, 512, 512, 3).
    """
    config = EnvConfig(GAME, "easy")  # a state brings its own options with it
    with contextlib.closing(StateView(config, person_view)) as view:
        return np.stack([view.draw(state.to_bytes()) for state in states])


def game_of(states: Collection[MazeState]) -> EnvConfig:
    """The game that the levels are of.

    Raises:
        UserError: if they are of several modes, or some have backgrounds.
    """
    games = {EnvConfig(GAME, state.distribution_mode, use_backgrounds=state.use_backgrounds)
             for state in states}
    if len(games) > 1:
        raise UserError("the levels are of several distribution modes, or only some have "
                        "backgrounds; ask for those of one kind at a time")
    return games.pop()


def as_played(states: Collection[MazeState], data: bytes) -> bytes:
    """The edit that makes one of the levels out of its stock state.

    Raises:
        UserError: if there are several of that seed.
    """
    seed = MazeState.parse(data).level_seed
    played = [state for state in states if state.level_seed == seed]
    if len(played) > 1:
        raise UserError(f"there are {len(played)} levels of the seed {seed}, which a patch cannot "
                        "tell apart; ask for one at a time")
    return played[0].to_bytes()

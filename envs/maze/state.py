"""States of maze levels: parsing, editing and rendering of Procgen's state bytes.

:mod:`envs.level_state` parses the part of the bytes that all games share. This module parses the
two numbers that maze adds, checks that Procgen can play a state, and edits it.

Symbol in shapes: N states.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from common.errors import UserError
from common.game_constants import WORLD_DIMS
from envs.level_state import ENTITY, LevelState
from envs.maze.grid import CHEESE, FREE, WALL, Grid, Square
from envs.procgen_env import EnvConfig, ProcgenVectorEnv, StateView

GAME = "maze"
_MODES = {0: "easy", 1: "hard", 10: "memory"}
_TAIL = np.dtype([("maze_dim", "<i4"), ("world_dim", "<i4")])
# Fields of the mouse in generated levels; fields not listed here are 0. Other values, such as
# unlimited growth, would make Procgen hang, so only the fields excluded from _FIXED may vary.
_MOUSE = np.zeros(1, ENTITY)
for _name, _value in {"rx": 0.5, "ry": 0.5, "render_z": 1, "fire_time": -1, "spawn_time": -1,
                      "expire_time": -1, "friction": 1, "smart_step": 1, "auto_erase": 1,
                      "alpha": 1, "health": 1, "theta": -100, "grow_rate": 1,
                      "alpha_decay": 1}.items():
    _MOUSE[_name] = _value
_FIXED = ~np.isin(list(ENTITY.names or ()), ("x", "y", "vx", "vy", "is_reflected", "life_time"))


@dataclasses.dataclass(frozen=True, eq=False)
class MazeState:
    """State of a maze level. Edits return new states and leave all other bytes unchanged.

    Attributes:
        level: the parsed state, with every field.

    Raises:
        UserError: if the state is not a maze, or Procgen could not play it; the message names the
            reason.
    """

    level: LevelState

    def __post_init__(self):
        level = self.level
        if level.game != GAME:
            raise _error(f"it is a state of {level.game}, not of {GAME}")
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
                raise _error(f"{name} of the mouse is {value}, which is not the centre of a square")
        if not 0 <= level.step["cur_time"] < level.step["timeout"]:
            raise _error(f"cur_time is {level.step['cur_time']} of {level.step['timeout']} steps")
        self.grid  # noqa: B018  checked on construction

    @classmethod
    def parse(cls, data: bytes) -> MazeState:
        """Parse the state bytes of one environment, from Procgen's ``get_state``.

        Raises:
            UserError: if the bytes are not a maze state that Procgen can play.
        """
        return cls(LevelState.parse(data, GAME))

    def to_bytes(self) -> bytes:
        """Return the state bytes for Procgen's ``set_state``."""
        return self.level.to_bytes()

    @functools.cached_property
    def grid(self) -> Grid:
        """Cells, mouse and facing of the level."""
        mouse = self.level.entities[0]
        return Grid(self.level.grid, int(self._tail["maze_dim"]),
                    Square(int(mouse["y"]), int(mouse["x"])), int(mouse["is_reflected"]))

    @property
    def level_seed(self) -> int:
        return int(self.level.step["current_level_seed"])

    @property
    def distribution_mode(self) -> str:
        """Distribution mode: ``easy``, ``hard`` or ``memory``."""
        return _MODES[int(self.level.options["distribution_mode"])]

    @property
    def use_backgrounds(self) -> bool:
        return bool(self.level.options["use_backgrounds"])

    @property
    def time(self) -> int:
        """Number of steps since the start of the episode."""
        return int(self.level.step["cur_time"])

    @property
    def timeout(self) -> int:
        """Number of steps after which the episode ends."""
        return int(self.level.step["timeout"])

    def fields(self) -> dict[str, object]:
        """Return every field by name, in the order of the bytes."""
        fields = self.level.fields()
        return {**fields, **{name: int(self._tail[name]) for name in _TAIL.names or ()}}

    def with_cheese(self, square: Square | None, several: bool = False) -> MazeState:
        """Return a state in which cheese is moved, added or removed.

        Args:
            square: free square for the cheese; None removes all cheese.
            several: whether to add a cheese and keep existing ones.

        Raises:
            UserError: if the square is not free, or the mouse is on it.
        """
        cells = self.grid.cells.copy()
        if not several or square is None:
            cells[cells == CHEESE] = FREE
        if square is not None:
            self.grid.check_free(square, "the cheese")
            cells[square] = CHEESE
        return self.with_grid(dataclasses.replace(self.grid, cells=cells))

    def with_mouse(self, square: Square) -> MazeState:
        """Return a state with the mouse on another free square without cheese, at rest.

        Raises:
            UserError: if the square is not free or holds cheese.
        """
        return self.with_grid(dataclasses.replace(self.grid, mouse=square))

    def with_facing(self, facing: int) -> MazeState:
        """Return a state with another facing of the mouse: 0 for left, 1 for right.

        Raises:
            UserError: if ``facing`` is neither 0 nor 1.
        """
        return self.with_grid(dataclasses.replace(self.grid, facing=facing))

    def with_cells(self, cells: Mapping[Square, int]) -> MazeState:
        """Return a state in which some squares are turned into walls or free squares.

        Args:
            cells: WALL or FREE by square. Other methods move cheese and mouse.

        Raises:
            UserError: if a value is neither WALL nor FREE, or a square is outside the world, holds
                cheese, or would become a wall under the mouse.
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
        """Return a state with other cells, mouse and facing; unchanged parts keep their bytes.

        Raises:
            UserError: if the maze or the world has another size.
        """
        old = self.grid
        if (grid.world_dim, grid.maze_dim) != (old.world_dim, old.maze_dim):
            raise UserError(f"a maze of {grid.maze_dim} x {grid.maze_dim} squares in a world of "
                            f"{grid.world_dim} cannot replace one of {old.maze_dim} in "
                            f"{old.world_dim}; choose a level seed whose maze has the same size")
        entities = self.level.entities.copy()
        if grid.mouse != old.mouse:
            entities["x"], entities["y"] = grid.mouse.column + 0.5, grid.mouse.row + 0.5
            entities["vx"] = entities["vy"] = 0
        entities["is_reflected"] = grid.facing
        return MazeState(dataclasses.replace(self.level, grid=grid.cells, entities=entities))

    def with_time(self, cur_time: int, timeout: int | None = None) -> MazeState:
        """Return a state with other elapsed steps and, optionally, another timeout.

        Args:
            cur_time: number of steps since the start of the episode.
            timeout: number of steps after which the episode ends; by default unchanged.

        Raises:
            UserError: unless 0 <= cur_time < timeout.
        """
        step = self.level.step.copy()
        step["cur_time"] = cur_time
        step["timeout"] = self.timeout if timeout is None else timeout
        return MazeState(dataclasses.replace(self.level, step=step))

    def with_top_right_path(self) -> MazeState:
        """Return a state with a corridor from the maze's corner up to the world's top row and along
        it to the world's corner.

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
    """Return the state of a level at its start, as Procgen generates it.

    Raises:
        UserError: if mazes do not have the mode, or the seed is out of range.
    """
    config = EnvConfig(GAME, distribution_mode, level_seed, 1, use_backgrounds)
    with contextlib.closing(ProcgenVectorEnv(config, 1, level_seed, num_threads=0)) as env:
        return MazeState.parse(env.get_state()[0])


def draw(states: Sequence[MazeState], person_view: bool = False) -> np.ndarray:
    """Render states without taking a step.

    Args:
        person_view: whether to render person views, the large images that people play with,
            instead of the agent's frames.

    Returns:
        Frames, uint8 (N, 64, 64, 3), or person views, uint8 (N, 512, 512, 3).
    """
    config = EnvConfig(GAME, "easy")  # every state includes its own options
    with contextlib.closing(StateView(config, person_view)) as view:
        return np.stack([view.draw(state.to_bytes()) for state in states])


def game_of(states: Collection[MazeState]) -> EnvConfig:
    """Return the environment configuration with the mode and backgrounds of all levels.

    Raises:
        UserError: if the levels have different modes, or only some have backgrounds.
    """
    games = {EnvConfig(GAME, state.distribution_mode, use_backgrounds=state.use_backgrounds)
             for state in states}
    if len(games) > 1:
        raise UserError("the levels have different distribution modes, or only some have "
                        "backgrounds; give each kind of level to a separate run")
    return games.pop()


def check_seeds(states: Collection[MazeState]) -> None:
    """Raise UserError if two levels have the same seed, because results are named after seeds."""
    if len({state.level_seed for state in states}) < len(states):
        raise UserError("two of the levels have the same seed; give them to separate runs")


def as_played(states: Collection[MazeState], data: bytes) -> bytes:
    """Return the state bytes of the level that is played instead of a stock level with the same
    seed.

    Args:
        states: levels that are played; one of them must have the seed of the stock level.
        data: state bytes of the stock level.

    Raises:
        UserError: if several of the levels have this seed.
    """
    seed = MazeState.parse(data).level_seed
    played = [state for state in states if state.level_seed == seed]
    if len(played) > 1:
        raise UserError(f"there are {len(played)} levels with the seed {seed}, which a patch "
                        "cannot distinguish; give them to separate runs")
    return played[0].to_bytes()

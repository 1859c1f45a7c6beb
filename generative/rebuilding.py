"""Imagined worlds, rebuilt as levels of the real game.

``envs.rebuild`` builds squares and objects into a level. Here, the classes of a simulator get their
meaning: each class is the square that looks most like it in the game's own levels, whatever the
theme, and an object is the entity of its class with the theme of its look.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

import numpy as np

from common.errors import UserError
from common.game_constants import CAMERA_FOLLOWS, FRAME_SIZE, square_size
from envs.level_state import LevelState
from envs.objects import object_groups
from envs.procgen_env import EnvConfig
from envs.rebuild import Parts, WorldObject, keys_of, rebuild, viewpoints
from envs.wide_view import WorldView
from generative.simulator import Simulator
from generative.squares import World
from generative.template_fit import TemplateFit
from generative.world_contents import certain_classes

LEVELS = tuple(range(500, 560))  # levels whose parts are used
ALIKE = 20.0  # root mean squared difference, of 255, up to which a class is recognised
TOUCHES = 0.9  # squares between centres up to which an object touches the player
FEWEST = 0.9  # share of the squares of a world that must be recognised


@dataclasses.dataclass(frozen=True)
class Rebuilt:
    """A world as a level of the real game.

    Attributes:
        state: state of the level.
        recognised: share of the squares whose class looks like a square of the game.
        left_out: number of objects that could not be built.
    """

    state: LevelState
    recognised: float
    left_out: int


class Rebuilder:
    """Builder of the imagined worlds of a simulator into levels of its game.

    Args:
        config: the game.
        levels: levels whose parts are used.

    Raises:
        UserError: if the simulator has no worlds, or its squares are not those of the game.
    """

    def __init__(self, simulator: Simulator, config: EnvConfig, levels: Sequence[int] = LEVELS):
        squares, num = simulator.squares, simulator.config.world_squares
        size = square_size(config.env_name, config.distribution_mode)
        if squares is None or num is None:
            raise UserError("this simulator has no worlds, so nothing can be rebuilt")
        if size is None or abs(size - squares.pixels_per_square) > 1e-3:
            raise UserError(f"the simulator's squares have {squares.pixels_per_square:.2f} pixels, "
                            f"unlike those of {config.env_name}, {config.distribution_mode}")
        self._squares = squares
        self.parts, self._groups = Parts.of(config, levels), object_groups(config.env_name)
        fit = TemplateFit(size, num)
        with contextlib.closing(WorldView(config)) as view:
            for number, state in enumerate(self.parts.states):
                for seen in viewpoints(state):
                    x, y = ((num / 2, num / 2) if simulator.config.pixels_per_square is None
                            else (float(seen.player["x"]), float(seen.player["y"])))
                    fit.add(number, view.draw(seen), keys_of(seen, num), x, y)
        self._keys, self.differences = fit.nearest_keys(squares)

    def objects(self, world: World) -> list[WorldObject]:
        """Return the moving and animated objects of one world (1 row) that are more likely there
        than not."""
        sprites = self._squares.sprites
        if sprites is None:
            return []
        states = sprites.states(world.squares, world.places, world.velocities, world.looks,
                                world.clock)
        first = (sprites.counts.cumsum(0) - sprites.counts).cpu()
        found = []
        for row in (states.weights[0] > 0.5).nonzero()[:, 0].tolist():
            group = int(states.groups[0, row])
            found.append(WorldObject(
                self._groups[group], int(states.rows[0, row]), float(states.columns[0, row]),
                float(states.velocities[0, row]), int(states.looks[0, row] - first[group])))
        return found

    def build(self, world: World, state: LevelState, touching: bool = False) -> Rebuilt:
        """Build one world (1 row) into a level.

        Args:
            state: level that the middle of the world's view shows, for example the recorded one;
                its clock should be that of the world.
            touching: also build objects that touch the player at the start. The simulator reads
                some players as an enemy, which would kill the agent at once.

        Raises:
            UserError: if too few squares look like squares of the game.
        """
        world = self._aligned(world, state)
        classes = certain_classes(world)[0]
        static = classes < len(self._squares.templates) - len(self._squares.looks)
        recognised = float((self.differences[classes[static]] <= ALIKE).mean())
        if recognised < FEWEST:
            raise UserError(f"only {100 * recognised:.0f} % of the squares of this world look like "
                            f"squares of {state.game}, so it cannot be rebuilt")
        objects = self.objects(world)
        if not touching:
            middle = classes.shape[0] // 2
            x, y = middle + float(state.player["x"]) % 1, middle + float(-state.player["y"]) % 1
            objects = [thing for thing in objects
                       if max(abs(thing.x - x), abs(thing.row + 0.5 - y)) >= TOUCHES]
        built, left_out = rebuild(state, self.parts, self._keys[classes], objects)
        return Rebuilt(built, recognised, left_out)

    def _aligned(self, world: World, state: LevelState) -> World:
        """Shift a world (1 row) by a whole square where the simulator believes that the player is
        on the other side of a border between squares, so that its middle square contains the
        player."""
        if state.game not in CAMERA_FOLLOWS:
            return world
        believed = (FRAME_SIZE / 2 - world.corner[0].cpu().numpy()
                    ) / self._squares.pixels_per_square - world.squares.shape[1] // 2
        true = np.array([state.player["x"], -state.player["y"]], float)  # to the right and down
        error = (believed - true + 0.5) % 1 - 0.5
        shift = (np.floor(true + error) - np.floor(true)).astype(int)
        return dataclasses.replace(world, **{
            name: getattr(world, name).roll((shift[1], shift[0]), dims=(1, 2))
            for name in ("squares", "places", "velocities", "looks")})

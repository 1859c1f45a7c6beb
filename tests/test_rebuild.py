"""Worlds that are rebuilt as levels of the real game."""

import contextlib
import copy

import numpy as np
import pytest
import torch
from conftest import FLOAT32, ROOT

from agents.frames import as_images
from common.errors import UserError
from envs.level_state import LevelState
from envs.objects import moving_objects
from envs.procgen_env import EnvConfig, LevelSlots, StateView
from envs.rebuild import WorldObject, keys_of, rebuild
from envs.squares import cells_of
from envs.wide_view import WorldView
from generative.config import SimulatorConfig
from generative.rebuilding import Rebuilder
from generative.rendered_worlds import RenderedWorlds, world_of_images
from generative.runs import open_simulator
from generative.world_contents import draw_worlds

GAMES = {"coinrun": (EnvConfig("coinrun", "hard"), "coinrun_hard"),
         "maze": (EnvConfig("maze", "easy"), "maze_confined")}
TEST_LEVELS = range(900, 906)
STEPS = 20
RIGHT, JUMP_RIGHT, NOTHING = 7, 8, 4
EMPTY, WALL = 100, 16  # cells


@pytest.fixture(scope="module", params=GAMES)
def rebuilt(request):
    """Rebuilder, and tuples of a state of the game after a few steps, its world in the simulator,
    and the world rebuilt."""
    config, name = GAMES[request.param]
    folder = ROOT / "pretrained"
    simulator = open_simulator(folder / f"{name}_simulator" / "model.pt",
                               folder / name / "model.pth", SimulatorConfig(), FLOAT32)
    rebuilder = Rebuilder(simulator, config, range(500, 516))
    cases = []
    with contextlib.closing(LevelSlots(config, 1)) as slots, \
            contextlib.closing(WorldView(config)) as view:
        for level in TEST_LEVELS:
            slots.start(0, level)
            frames = [slots.frames[0].copy()]
            for step in range(STEPS):
                slots.step(0, RIGHT if step % 3 else JUMP_RIGHT)
                frames.append(slots.frames[0].copy())
            state = LevelState.parse(slots.state(0), config.env_name)
            images = as_images(np.stack(frames[-3:]), 1)[:, None]
            world = world_of_images(
                simulator, simulator.encode(images),
                RenderedWorlds.of_states(view, [state], [int(state.step["cur_time"])]),
                config.env_name, torch.tensor([level]))
            cases.append((state, world, rebuilder.build(world, state)))
    return rebuilder, config, simulator, cases


def near(state, num):
    """Objects within the world, at their place relative to the player."""
    x, y = float(state.player["x"]), float(state.player["y"])
    return sorted((thing.kind, round(thing.x - x, 1), round(thing.y - y, 1),
                   round(thing.vx, 2), thing.image_theme)
                  for thing in moving_objects(state)
                  if max(abs(np.floor(thing.x) - np.floor(x)),
                         abs(np.floor(thing.y) - np.floor(y))) <= num // 2)


def test_a_rendered_world_is_rebuilt_as_it_was(rebuilt):
    _, config, simulator, cases = rebuilt
    num, view = simulator.config.world_squares, StateView(config)
    same = [keys_of(state, num) == keys_of(built.state, num) for state, _, built in cases]
    assert np.mean(same) > 0.99
    found = [near(built.state, num) for _, _, built in cases]
    assert found == [near(state, num) for state, _, _ in cases]
    assert any(found) == (config.env_name == "coinrun")
    errors = []
    for state, world, built in cases:
        assert built.recognised > 0.95 and built.left_out == 0
        for field in ("vx", "vy"):
            assert built.state.player[field] == state.player[field]
        frames = [view.draw(each) for each in (state, built.state)]
        assert (frames[0] != frames[1]).any(axis=-1).mean() < 0.02
        imagined = draw_worlds(simulator.squares, world, 64)[0].astype(float)
        errors.append([np.square(imagined - frame).mean() for frame in frames])
    recorded, again = np.median(errors, axis=0)
    assert again < 1.2 * recorded + 1


def test_the_rebuilt_game_goes_on_like_the_recorded_one(rebuilt):
    _, config, _, cases = rebuilt
    for state, _, built in cases[:4]:
        frames = []
        for start in (state, built.state):
            slots = LevelSlots(config, 1)
            slots.restore(0, start.to_bytes())
            shown = []
            for step in range(8):
                if slots.step(0, RIGHT if step % 4 else JUMP_RIGHT)[1]:
                    break
                shown.append(slots.frames[0].copy())
            frames.append(shown)
            slots.close()
        assert len(frames[0]) == len(frames[1])
        assert all((first != second).any(axis=-1).mean() < 0.05
                   for first, second in zip(*frames))


@pytest.mark.parametrize("rebuilt", ["coinrun"], indirect=True)
def test_walking_enemies_stay_on_their_ground(rebuilt):
    rebuilder, config, _, cases = rebuilt
    keys = np.full((39, 39), key_of(cases, EMPTY))
    keys[25, 22:27] = keys[25, 10:21] = key_of(cases, WALL)  # five squares, and the player's ground
    enemy = WorldObject(("enemy_left", "enemy_right"), 24, 24.5, 0.15, 3)
    state, left_out = rebuild(cases[0][0], rebuilder.parts, keys, [enemy])
    slots, walked = LevelSlots(config, 1), []
    slots.restore(0, state.to_bytes())
    for _ in range(60):
        assert not slots.step(0, NOTHING)[1]
        [thing] = moving_objects(LevelState.parse(slots.state(0), "coinrun"))
        walked.append(thing.x - 13)  # of the world, whose left edge is column 13 of the level
    assert left_out == 0 and thing.image_theme == 3
    assert min(walked) > 22 and max(walked) < 27
    assert np.ptp(walked) > 3  # it walks to and fro


def key_of(cases, cell):
    keys = np.concatenate([keys_of(state, 39).ravel() for state, _, _ in cases])
    return keys[cells_of(keys) == cell].min()


def test_worlds_that_look_unlike_the_game_are_refused(rebuilt):
    rebuilder, _, _, cases = rebuilt
    state, world, _ = cases[0]
    unlike = copy.copy(rebuilder)
    unlike.differences = np.full_like(rebuilder.differences, 99.0)
    with pytest.raises(UserError, match="only 0 % of the squares"):
        unlike.build(world, state)

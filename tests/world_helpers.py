"""Helpers of the tests of worlds."""

import math

import numpy as np
import torch

from common.game_constants import FRAME_SIZE, pixels_per_square
from envs.procgen_env import EnvConfig
from generative.squares import world_corner
from generative.world_data import NUM_SQUARES

PLAYER, SAW, ENEMY, TRAIL = 0, 2, 5, 59  # entity types in CoinRun
HARD = EnvConfig("coinrun", "hard")
PIXELS = pixels_per_square("coinrun", "hard")  # per square


def near(state, types):
    """Return a mask (64, 64) of the pixels of a view near entities of these types."""
    scale = FRAME_SIZE / float(state.world["view_dim"])
    pixels = np.arange(FRAME_SIZE) + 0.5 - FRAME_SIZE / 2
    mask = np.zeros((FRAME_SIZE, FRAME_SIZE), bool)
    for entity in state.entities[np.isin(state.entities["type"], types)]:
        right, down = entity["x"] - state.player["x"], state.player["y"] - entity["y"]
        across = abs(pixels - scale * right) <= scale * entity["rx"] + 1.5
        along = abs(pixels - scale * down) <= scale * entity["ry"] + 1.5
        mask |= along[:, None] & across
    return mask


def corner_at(positions, num_squares=NUM_SQUARES):
    """Return the corner (N, 2) of worlds around positions (N, 2) of the player."""
    angle = 2 * math.pi * torch.from_numpy(positions) * torch.tensor([1, -1])
    phase = torch.stack([angle.cos(), angle.sin()], dim=-1).flatten(1).float()
    return world_corner(phase, num_squares, PIXELS)


def psnr(first, second):
    return float(-10 * (first - second).square().mean().log10())


def slope(function, inputs, number, direction, step):
    """Return the central difference of a function along a direction of one of its inputs."""
    values = []
    for sign in (1, -1):
        moved = [x.detach() for x in inputs]
        moved[number] = moved[number] + sign * step * direction
        with torch.no_grad():
            values.append(float(function(*moved)))
    return (values[0] - values[1]) / (2 * step)

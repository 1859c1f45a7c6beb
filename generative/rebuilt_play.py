"""The agent in rebuilt worlds: what it does there, and whether an imagined effect occurs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from agents.networks import to_images
from common.devices import Compute
from common.game_constants import ACTION_DIRECTIONS, FRAME_SIZE
from envs.level_state import LevelState
from envs.procgen_env import EnvConfig, LevelSlots
from generative.frozen_agent import FrozenAgent
from generative.squares import World
from generative.surroundings import DEATH, OCCURS, TURN, TURN_STEPS, Rollouts, View, effects

_TOUCHES = 0.9  # squares between centres up to which an object touches the player


def play(agent: FrozenAgent, compute: Compute, config: EnvConfig, states: Sequence[LevelState],
         hidden: np.ndarray, num_steps: int) -> tuple[Rollouts, np.ndarray]:
    """Play the agent's most likely actions in level states.

    Args:
        states: level states (B), whose frame is step 0.
        hidden: hidden state that enters the agent there (D,).
        num_steps: number of actions.

    Returns:
        What the agent does, with its position in squares, y up, as ``moved``, which is NaN after
        the end; and the frames, uint8 (T, B, H, W, C), black after the end.
    """
    directions = np.array([right for right, _ in ACTION_DIRECTIONS], float)
    shape = num_steps + 1, len(states)
    values, right, moved = np.zeros(shape), np.zeros(shape), np.full((*shape, 2), np.nan)
    alive, death = np.ones(shape), np.zeros(shape)
    state, frames = torch.from_numpy(hidden).to(compute.device).expand(len(states), -1), []
    with contextlib.closing(LevelSlots(config, len(states))) as slots, torch.no_grad():
        for slot, level in enumerate(states):
            slots.restore(slot, level.to_bytes())
        for t in range(num_steps + 1):
            frames.append(slots.frames.copy())
            images = to_images(torch.from_numpy(frames[-1]).to(compute.device),
                               compute.channels_last)
            with compute.autocast():
                output = agent.step(images, state)
            state, log_probs = output.hidden_states, output.log_probs.float().cpu().numpy()
            values[t] = output.values.float().cpu().numpy()
            right[t] = np.exp(log_probs[:, :len(directions)]) @ directions
            for slot in np.flatnonzero(alive[t]):
                player = slots.player(slot)
                assert player is not None
                moved[t, slot] = player["x"], player["y"]
                if t < num_steps:
                    reward, ended = slots.step(slot, int(log_probs[slot].argmax()))
                    alive[t + 1:, slot] = not ended
                    death[t + 1:, slot] = ended and reward <= 0
    return Rollouts(values, right, alive, death, moved), np.stack(frames)


def occurs(imagined: float, real: float) -> float:
    """Return 1.0 if a real effect has the sign and at least half the size of an imagined one, and
    otherwise, or if it is NaN, 0.0."""
    return float(real * np.sign(imagined) >= OCCURS * abs(imagined))


def effect_at(aim: str, step: int, changed: Rollouts, plausible: Rollouts) -> np.ndarray:
    """Return the effects (B,) that ``effects`` would return if they were largest at a step."""
    if aim == DEATH:
        return effects(aim, changed, plausible)[0]
    last = step + (TURN_STEPS if aim == TURN else 1)
    return effects(aim, *(Rollouts(*(array[step:last] for array in vars(found).values()))
                          for found in (changed, plausible)))[0]


def aligned(world: World, state: LevelState, pixels_per_square: float) -> World:
    """Shift a world (1 row) by a whole square where the simulator believes that the player is on
    the other side of a border between squares, so that its middle square contains the player."""
    num = world.squares.shape[1]
    believed = (FRAME_SIZE / 2 - world.corner[0].cpu().numpy()) / pixels_per_square - num // 2
    true = np.array([state.player["x"], -state.player["y"]], float)  # to the right and down
    error = (believed - true + 0.5) % 1 - 0.5
    shift = (np.floor(true + error) - np.floor(true)).astype(int)
    return dataclasses.replace(world, **{
        name: getattr(world, name).roll((shift[1], shift[0]), dims=(1, 2))
        for name in ("squares", "places", "velocities", "looks")})


def without_touching(view: View, world: World, state: LevelState) -> World:
    """Remove objects that would touch the player from a world (1 row) of ``aligned``.

    The simulator reads some players as an enemy, which would kill the agent at once.
    """
    squares = view.simulator.squares
    assert squares is not None
    middle = world.squares.shape[1] // 2
    objects = view.objects(world)[0]
    moves = np.zeros(objects.shape, bool)
    if squares.sprites is not None:
        group = world.squares[0].cpu() - squares.sprites.first_class
        moves = objects & (squares.sprites.speed.cpu()[group.clamp(min=0)] > 0).numpy()
    places = np.where(moves, world.places[0].cpu().numpy(), 0.5)
    rows, columns = np.indices(objects.shape)
    right = columns + places - middle - float(state.player["x"]) % 1
    down = rows + 0.5 - middle - float(-state.player["y"]) % 1
    touching = torch.from_numpy(objects & (abs(right) < _TOUCHES) & (abs(down) < _TOUCHES))
    return dataclasses.replace(world, squares=torch.where(
        touching.to(world.squares.device), squares.empty_class, world.squares))

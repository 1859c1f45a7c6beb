"""The agent in rebuilt worlds: what it does there, and whether an imagined effect occurs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agents.episodes import EpisodeState, PlayOptions, Run, play_episodes
from common.devices import Compute
from common.game_constants import ACTION_DIRECTIONS, FRAME_SIZE
from envs.level_state import LevelState
from envs.procgen_env import EnvConfig
from generative.frozen_agent import FrozenAgent
from generative.surroundings import DEATH, OCCURS, TURN, TURN_STEPS, Rollouts, effects


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
    values, right, alive, death = np.zeros((4, *shape))
    moved = np.full((*shape, 2), np.nan)
    frames = np.zeros((*shape, FRAME_SIZE, FRAME_SIZE, 3), np.uint8)
    runs = [Run(number, EpisodeState(int(state.step["current_level_seed"]),
                                     int(state.step["cur_time"]), state.to_bytes(), hidden))
            for number, state in enumerate(states)]
    for episode in play_episodes(
            agent.policy, compute, config, runs, 0, len(runs),
            PlayOptions(greedy=True, max_steps=num_steps, keep_positions=True)):
        rows = slice(len(episode.values) - episode.dones[-1]), episode.number  # before the end
        before = rows[0]
        values[rows], alive[rows] = episode.values[before], 1
        right[rows] = np.exp(episode.log_probs[before, :len(directions)]) @ directions
        moved[rows], frames[rows] = episode.positions[before], episode.frames[before]
        death[episode.length:, episode.number] = episode.dones[-1] and episode.rewards[-1] <= 0
    return Rollouts(values, right, alive, death, moved), frames


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

"""Films of an agent's arms side by side, on the same level and with the same random numbers.

Letters in shape comments: T steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from agents.episodes import Episode, play_episodes
from common.devices import Compute
from common.env import EnvConfig, LevelEdit
from common.files import save_json
from common.networks import Policy
from common.video import mark_action, side_by_side, write_video
from interventions.patch import Patch
from interventions.scopes import patched
from maze.level.state import MazeState

SIDE = 256  # pixels of an arm's film


@dataclasses.dataclass(frozen=True)
class Reel:
    """Settings of films.

    Attributes:
        policy, compute, env: as in ``play_episodes``.
        edit: of every level before it is played.
        seed: of the actions.
        max_steps: that are shown.
        fps: steps a second.
    """

    policy: Policy
    compute: Compute
    env: EnvConfig
    edit: LevelEdit
    seed: int
    max_steps: int
    fps: int

    def shoot(self, film: Path, facts: Path, number: int, state: MazeState,
              arms: Mapping[str, Sequence[Patch]]) -> None:
        """Play a level with each arm, and write the film, then what happened.

        Args:
            number: of the level; with the seed, it decides the random numbers.
            arms: patches by the arm's name, none without any.
        """
        films, rows = {}, []
        for name, patches in arms.items():
            with patched(self.policy, patches):
                [episode] = play_episodes(
                    self.policy, self.compute, self.env, [(number, state.level_seed)], self.seed,
                    num_slots=1, person_view=True, edit=self.edit, with_squares=True,
                    keep_positions=True)
            films[name] = small_film(episode, self.max_steps)
            rows.append({"level": state.level_seed, "arm": name,
                         "cheese": bool(episode.level_complete), "steps": episode.length,
                         "return": episode.total_reward,
                         "squares": len(np.unique(episode.positions[:-1], axis=0))})
        longest = max(map(len, films.values()))
        # An episode that is over stays as it was, but darker.
        columns = {name: np.concatenate([frames, np.repeat(frames[-1:] // 2, longest - len(frames),
                                                           axis=0)])[:, None]
                   for name, frames in films.items()}
        write_video(film, side_by_side(columns, 1), self.fps)
        save_json(facts, rows)


def small_film(episode: Episode, max_steps: int) -> np.ndarray:
    """The view for people with the actions that were taken, uint8 (T, SIDE, SIDE, 3)."""
    return np.stack([mark_action(np.asarray(Image.fromarray(view).resize(
        (SIDE, SIDE), Image.Resampling.BOX)), action)
        for view, action in zip(episode.person_views[:-1][:max_steps], episode.actions)])

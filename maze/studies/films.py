"""Films of an agent's arms side by side, on the same level and with the same random numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from agents.episodes import PlayOptions, beside, play_episodes, small_film, write_beside
from agents.hooks import patched
from agents.networks import Policy
from agents.patch import Patch
from common.devices import Compute
from common.files import save_json
from common.video import write_gif
from envs.procgen_env import EnvConfig, LevelEdit
from maze.level.state import MazeState


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
              arms: Mapping[str, Sequence[Patch]], gif: Path | None = None) -> None:
        """Play a level with each arm, and write the film, then what happened.

        Args:
            gif: where the film is written as an animated picture, too.
            number: of the level; with the seed, it decides the random numbers.
            arms: patches by the arm's name, none without any.
        """
        films, rows = {}, []
        for name, patches in arms.items():
            with patched(self.policy, patches):
                [episode] = play_episodes(
                    self.policy, self.compute, self.env, [(number, state.level_seed)], self.seed,
                    1, PlayOptions(edit=self.edit, keep_person_views=True, keep_positions=True))
            films[name] = small_film(episode, self.max_steps)
            rows.append({"level": state.level_seed, "arm": name,
                         "cheese": bool(episode.level_complete), "steps": episode.length,
                         "return": episode.total_reward,
                         "squares": len(np.unique(episode.positions[:-1], axis=0))})
        write_beside(film, films, self.fps)
        if gif:
            write_gif(gif, beside(films), self.fps)
        save_json(facts, rows)


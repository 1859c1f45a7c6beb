"""Films of levels that only one of two arms fails, both beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from agents.episodes import play_episodes
from agents.films import last_steps, write_beside
from clarity.failing.arms import FailureArm
from clarity.failing.files import SOLVED
from common.devices import Compute
from common.env import EnvConfig
from common.video import FRAMES_PER_SECOND

LAST_STEPS = 150  # of an episode, at most


def told_apart(original: pd.DataFrame, other: pd.DataFrame, number: int) -> list[int]:
    """Numbers of levels that only one of two arms fails: first those that the other one fails.

    Args:
        original, other: episodes of both arms, in the order of the levels.
    """
    fails, failed = ((table["cause"] != SOLVED).to_numpy() for table in (other, original))
    levels = original["level"].to_numpy()
    return [*levels[fails & ~failed], *levels[failed & ~fails]][:number]


def shoot(path: Path, arms: Sequence[FailureArm], causes: Sequence[str], compute: Compute,
          config: EnvConfig, level: tuple[int, int], seed: int, num_slots: int) -> None:
    """Play a level with each arm once more, and write the film.

    Args:
        causes: of the episodes, for the titles.
        level, seed, num_slots: as the arms were played.
    """
    films = {}
    for each, cause in zip(arms, causes):
        [episode] = play_episodes(each.policy(), compute, config, [level], seed, num_slots,
                                  keep_frames=False, edit=each.level_edit,
                                  edit_every_step=each.every_step)
        films[f"{each.arm.label}: {cause}"] = last_steps(
            config, level[1], episode.actions[:-1].tolist(), LAST_STEPS, each.level_edit,
            each.every_step)
    path.parent.mkdir(exist_ok=True)
    write_beside(path, films, FRAMES_PER_SECOND)

"""Films of levels that only one of two arms fails, both beside each other; and the last frames of
an agent's failures."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from agents.episodes import PlayOptions, last_steps, play_episodes, write_beside
from attribution.failing.arms import FailureArm
from attribution.failing.files import SOLVED
from common.devices import Compute
from common.files import atomic_path
from common.palette import DPI
from common.video import FRAMES_PER_SECOND, mark_action
from envs.procgen_env import EnvConfig

LAST_STEPS = 150  # of an episode, at most
FAILURES, FRAMES = 4, 8  # that are drawn, and of each of them


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
                                  PlayOptions(edit=each.level_edit, keep_frames=False,
                                              edit_every_step=each.every_step))
        films[f"{each.arm.label}: {cause}"] = last_steps(
            config, level[1], episode.actions[:-1].tolist(), LAST_STEPS, each.level_edit,
            each.every_step)
    path.parent.mkdir(exist_ok=True)
    write_beside(path, films, FRAMES_PER_SECOND)


def first_failures(episodes: pd.DataFrame, number: int = FAILURES) -> pd.DataFrame:
    """Failed episodes of an arm: the first by each cause, then the others, in the order of the
    levels."""
    failed = episodes[episodes["cause"] != SOLVED]
    again = failed.duplicated("cause").to_numpy()
    return pd.concat([failed[~again], failed[again]])[:number]


@dataclasses.dataclass(frozen=True)
class Ending:
    """The last frames of a failed episode.

    Attributes:
        title: cause, level and steps.
        frames: with the marks of the actions, uint8 (T, 64, 64, 3); the last action ended it.
        values: float32 (T,).
    """

    title: str
    frames: np.ndarray
    values: np.ndarray


def endings(arm: FailureArm, failed: pd.DataFrame, compute: Compute, config: EnvConfig, seed: int,
            num_slots: int) -> list[Ending]:
    """Play failed episodes once more, and keep the frames in which each ended.

    Args:
        failed: rows of the arm's episodes.
        seed, num_slots: as they were played.
    """
    levels = list(zip(failed["level"].tolist(), failed["level_seed"].tolist()))
    played = {episode.number: episode for episode in play_episodes(
        arm.policy(), compute, config, levels, seed, num_slots,
        PlayOptions(edit=arm.level_edit, edit_every_step=arm.every_step))}
    found = []
    for (number, level), cause in zip(levels, failed["cause"]):
        episode = played[number]
        end = len(episode.actions) - 1  # a black frame
        begin = max(0, end - FRAMES)
        found.append(Ending(
            f"{cause}: level {level}, steps {begin} to {end - 1}",
            np.stack([mark_action(episode.frames[step], episode.actions[step])
                      for step in range(begin, end)]), episode.values[begin:end]))
    return found


def draw(path: Path, shown: Sequence[Ending]) -> None:
    """Draw endings, a row each."""
    figure = Figure(figsize=(1.3 * FRAMES, 1.9 * len(shown)), layout="constrained")
    for part, ending in zip(figure.subfigures(len(shown), squeeze=False).flat, shown):
        part.suptitle(ending.title, x=0.01, ha="left", fontsize=9)
        panels = part.subplots(1, FRAMES)
        for panel in panels:
            panel.axis("off")
        for panel, frame, value in zip(panels, ending.frames, ending.values):
            panel.imshow(frame, interpolation="nearest")
            panel.set_title(f"V {value:.1f}", fontsize=8)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=DPI)

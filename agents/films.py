"""Films of whole episodes, beside each other.

Letters in shape comments: T steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from agents.episodes import Episode
from common.video import mark_action, side_by_side, write_video
from envs.procgen_env import EnvConfig, LevelEdit, LevelSlots

SIDE = 256  # pixels of a film


def small_film(episode: Episode, max_steps: int) -> np.ndarray:
    """The view for people with the actions that were taken, uint8 (T, SIDE, SIDE, 3)."""
    return np.stack([small_picture(view, action) for view, action in zip(
        episode.person_views[:-1][:max_steps], episode.actions)])


def small_picture(view: np.ndarray, action: int) -> np.ndarray:
    """A view for people with the action that is taken, uint8 (SIDE, SIDE, 3)."""
    return mark_action(np.asarray(Image.fromarray(view).resize((SIDE, SIDE),
                                                               Image.Resampling.BOX)), action)


def last_steps(config: EnvConfig, level: int, actions: Sequence[int], number: int,
               edit: LevelEdit | None = None, edit_every_step: bool = False) -> np.ndarray:
    """Film of the last steps of an episode, uint8 (T, SIDE, SIDE, 3).

    Args:
        level: seed of the level.
        actions: of the whole episode.
        number: of steps, at most.
        edit, edit_every_step: of the level, as in ``LevelSlots``.
    """
    film = []
    with contextlib.closing(LevelSlots(config, 1, True, edit, edit_every_step)) as slots:
        slots.start(0, level)
        for step, action in enumerate(actions):
            if step >= len(actions) - number:
                film.append(small_picture(slots.person_view(0), action))
            slots.step(0, action)
    return np.stack(film)


def write_beside(path: Path, films: Mapping[str, np.ndarray], fps: int) -> None:
    """Write films beside each other, see ``beside``."""
    write_video(path, beside(films), fps)


def beside(films: Mapping[str, np.ndarray]) -> Iterator[np.ndarray]:
    """Frames of films by title, uint8 (T, SIDE, SIDE, 3), beside each other. An episode that is
    over stays as it was, but darker."""
    longest = max(map(len, films.values()))
    columns = {name: np.concatenate([frames, np.repeat(frames[-1:] // 2, longest - len(frames),
                                                       axis=0)])[:, None]
               for name, frames in films.items()}
    return side_by_side(columns, 1)

"""Films of whole episodes, beside each other.

Letters in shape comments: T steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image

from agents.episodes import Episode
from common.video import mark_action, side_by_side, write_video

SIDE = 256  # pixels of a film


def small_film(episode: Episode, max_steps: int) -> np.ndarray:
    """The view for people with the actions that were taken, uint8 (T, SIDE, SIDE, 3)."""
    return np.stack([mark_action(np.asarray(Image.fromarray(view).resize(
        (SIDE, SIDE), Image.Resampling.BOX)), action)
        for view, action in zip(episode.person_views[:-1][:max_steps], episode.actions)])


def write_beside(path: Path, films: Mapping[str, np.ndarray], fps: int) -> None:
    """Write films by title, uint8 (T, SIDE, SIDE, 3), beside each other. An episode that is over
    stays as it was, but darker."""
    longest = max(map(len, films.values()))
    columns = {name: np.concatenate([frames, np.repeat(frames[-1:] // 2, longest - len(frames),
                                                       axis=0)])[:, None]
               for name, frames in films.items()}
    write_video(path, side_by_side(columns, 1), fps)

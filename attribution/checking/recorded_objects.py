"""Objects in frames of a recording: the game drawn without each kind, frame by frame."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np

from agents.object_masks import ObjectPainter, ObjectPictures
from agents.replay import recorded_game, replayed
from agents.rollout_files import RolloutFolder
from common.errors import UserError
from common.progress import Progress
from envs.objects import GAME_OBJECTS_FILE, GameObject, objects_of
from envs.procgen_env import EnvConfig


def kinds_in(config: EnvConfig) -> tuple[GameObject, ...]:
    """The kinds of object of a game.

    Raises:
        UserError: if there is no table of it.
    """
    kinds = objects_of(config.env_name)
    if not kinds:
        raise UserError(f"{GAME_OBJECTS_FILE.name} has no objects of {config.env_name}; add them "
                        "there")
    return kinds


def painted(folder: RolloutFolder, places: np.ndarray, kinds: Sequence[GameObject]
            ) -> Iterator[ObjectPictures]:
    """The pictures of rows of a recording with and without each kind, in their order.

    Args:
        places: episode and row of each (O, 2); rows of an episode lie together, ascending.

    Raises:
        UserError: see ``agents.replay.replayed``.
    """
    with (contextlib.closing(ObjectPainter(recorded_game(folder), kinds)) as painter,
          Progress(len(places), "frame with masks") as progress):
        borders = np.flatnonzero(np.diff(places[:, 0])) + 1
        for some in np.split(places, borders):
            for _, state in replayed(folder, int(some[0, 0]), some[:, 1].tolist()):
                yield painter.draw(state)
                progress.update(progress.done + 1)

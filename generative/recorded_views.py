"""Recorded frames from which counterfactual worlds begin."""

from __future__ import annotations

import dataclasses

import numpy as np

from common.errors import UserError
from generative.dataset import RolloutDataset, WindowPlace
from generative.dream_life import TIME_LIMIT

NEAR_END = range(4, 17)  # actions between a view and the recorded end, in one half of the views
_STREAM = 11  # random stream; part of the seed


@dataclasses.dataclass(frozen=True)
class RecordedView(WindowPlace):
    """A recorded frame beyond whose edge is searched.

    Attributes:
        near_end: whether it was chosen because the recorded episode ends soon.
    """

    near_end: bool


def choose_views(dataset: RolloutDataset, number: int, seed: int) -> list[RecordedView]:
    """Draw recorded frames, at most one per episode.

    Every other frame is 4 to 16 actions before a death and before a coin, in turn (without ends by
    the time limit), as far as the recording has enough of them; the others are any frames that are
    at least 4 actions before the end of their episode.

    Raises:
        UserError: if the recording has too few episodes.
    """
    rng, first = np.random.default_rng([seed, _STREAM]), dataset.num_init_steps - 1
    deaths: list[tuple[RecordedView, RecordedView]] = []  # near the end, anywhere
    coins: list[tuple[RecordedView, RecordedView]] = []
    others: list[tuple[RecordedView, RecordedView]] = []
    for episode in rng.permutation(np.unique(dataset.episodes)).tolist():
        steps = dataset.folder.steps(episode)
        last = dataset.folder.array_files(episode).frames.shape[0] - 1  # terminal row
        if last - NEAR_END[0] < first:
            continue
        away = rng.integers(NEAR_END[0], min(NEAR_END[-1], last - first) + 1)
        frame = int(rng.integers(first, last - NEAR_END[0] + 1))
        found = (RecordedView(episode, int(last - away), True), RecordedView(episode, frame, False))
        is_coin = steps["reward"].max() > 0
        (others if last >= TIME_LIMIT else coins if is_coin else deaths).append(found)
    views: list[RecordedView] = []
    while len(views) < number:
        near = len(views) % 2 == 0
        queues = [deaths, coins] if len(views) % 4 == 0 else [coins, deaths]
        if not near:
            queues.sort(key=len, reverse=True)
        queue = next((queue for queue in queues if queue), others)
        if not queue:
            raise UserError(f"{dataset.folder.path} has episodes for only {len(views)} views; "
                            "lower --num_views or record more episodes")
        views.append(queue.pop(0)[0 if near and queue is not others else 1])
    return views

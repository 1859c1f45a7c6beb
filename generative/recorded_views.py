"""Recorded frames from which counterfactual worlds begin."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from agents.replay import recorded_game
from common.cli import count, whole
from common.errors import UserError
from common.files import versions
from common.options import option
from envs.procgen_env import EnvConfig
from generative.dataset import RolloutDataset, WindowPlace
from generative.dream_life import TIME_LIMIT
from generative.flags import SimulatorOptions
from generative.runs import leakage_reason
from generative.simulator import Simulator
from generative.start_worlds import check_prior, world_seeds
from generative.surroundings import View
from generative.world_contents import name_classes, recorded_worlds

DEATH, COIN, TIME = "death", "reward", "time limit"  # ends of episodes
NEAR_END = range(4, 17)  # actions between a view and the recorded end, in one half of the views
_STREAM = 11  # random stream; part of the seed


@dataclasses.dataclass(frozen=True)
class RecordedView(WindowPlace):
    """A recorded frame beyond whose edge is searched.

    Attributes:
        near_end: whether it was chosen because the recorded episode ends soon.
    """

    near_end: bool


def end_of(dataset: RolloutDataset, episode: int) -> tuple[int, str]:
    """Return the last row of a recorded episode, whose frame shows no level, and how it ended."""
    last = dataset.folder.array_files(episode).frames.shape[0] - 1
    is_coin = dataset.folder.steps(episode)["reward"].max() > 0
    return last, TIME if last >= TIME_LIMIT else COIN if is_coin else DEATH


def choose_views(dataset: RolloutDataset, number: int, seed: int) -> list[RecordedView]:
    """Draw recorded frames, at most one per episode.

    Every other frame is 4 to 16 actions before a death and before a coin, in turn (without ends by
    the time limit), as far as the recording has enough of them; the others are any frames that are
    at least 4 actions before the end of their episode.

    Raises:
        UserError: if the recording has too few episodes.
    """
    rng, first = np.random.default_rng([seed, _STREAM]), dataset.num_init_steps - 1
    ends: dict[str, list[tuple[RecordedView, RecordedView]]] = {  # near the end, anywhere
        DEATH: [], COIN: [], TIME: []}
    for episode in rng.permutation(np.unique(dataset.episodes)).tolist():
        last, end = end_of(dataset, episode)
        if last - NEAR_END[0] < first:
            continue
        away = rng.integers(NEAR_END[0], min(NEAR_END[-1], last - first) + 1)
        frame = int(rng.integers(first, last - NEAR_END[0] + 1))
        ends[end].append((RecordedView(episode, int(last - away), True),
                          RecordedView(episode, frame, False)))
    deaths, coins, others = ends.values()
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


@dataclasses.dataclass(frozen=True)
class RecordedViews:
    """Recorded frames, and the simulator that plays on from them.

    Attributes:
        places: the frames.
        windows: numbers of the windows of their episodes.
        options: the options with which they were opened.
    """

    simulator: Simulator
    dataset: RolloutDataset
    places: list[RecordedView]
    windows: np.ndarray
    options: ViewOptions

    @property
    def game(self) -> EnvConfig:
        return recorded_game(self.dataset.folder)

    @property
    def settings(self) -> dict:
        """Settings of a study of these views."""
        options = self.options
        return {
            **options.origin, "data_dir": options.parameters.common.data_dir,
            "recording_sha256": self.dataset.folder.sha256(options.check_contents),
            "why_perhaps_trained_on": leakage_reason(
                options.model_file, self.dataset, self.windows, assured=options.unseen),
            "views": [dataclasses.asdict(place) for place in self.places],
            "num_steps": options.num_steps, "batch_size": options.batch_size,
            "seed": options.seed, "precision": options.compute.precision, "versions": versions()}

    def classes(self) -> dict[str, np.ndarray]:
        """Return the numbers of the classes of each kind of object."""
        assert self.simulator.squares is not None
        return name_classes(self.dataset, recorded_worlds(
            self.simulator, self.dataset, self.windows), self.simulator.squares)

    def view(self, number: int, stream: int) -> View:
        """Open a view; what lies beyond its worlds is drawn from a random stream."""
        options = self.options
        (seed,) = world_seeds([(options.seed, stream, number)]).tolist()
        return View.recorded(self.simulator, options.compute, self.dataset.folder,
                             self.places[number], seed, options.num_steps, options.batch_size)

    def origin(self, number: int) -> dict:
        """Return the columns of a table of results that tell where a view comes from."""
        place = self.places[number]
        level = int(self.dataset.folder.steps(place.episode)["level_seed"].iloc[0])
        return {"view": number, "level_seed": level, **dataclasses.asdict(place)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViewOptions(SimulatorOptions):
    """Options of a study that begins in recorded views."""

    num_views: int = option(34, "recorded views, each of another episode", type=count)
    num_steps: int = option(16, "actions within which the effect must occur", type=whole(4, 64))
    unseen: bool = option(False, "state that the simulator was not trained on these levels, if "
                                 "this is unknown")
    overwrite: bool = option(False, "delete the previous contents of the folder")

    def places(self, dataset: RolloutDataset) -> list[RecordedView]:
        """Choose recorded frames, see ``choose_views``."""
        return choose_views(dataset, self.num_views, self.seed)

    def open_views(self) -> RecordedViews:
        """Choose the views.

        Raises:
            UserError: if simulator, agent and recording do not fit together.
        """
        simulator = self.open_simulator()
        if simulator.squares is None:
            raise UserError("this simulator has no worlds, so nothing lies beyond its views, and "
                            "nothing in them can be replaced")
        check_prior(simulator)
        dataset = RolloutDataset(Path(self.parameters.common.data_dir),
                                 simulator.config.num_init_steps, self.num_steps)
        dataset.check_agent(self.agent_file, simulator.agent.policy)
        places = self.places(dataset)
        episodes = [place.episode for place in places]
        windows = np.flatnonzero(np.isin(dataset.episodes_of(np.arange(len(dataset))), episodes))
        return RecordedViews(simulator, dataset, places, windows, self)

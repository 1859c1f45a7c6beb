"""Starts of the dream page: recorded frames, starts that the prior samples, and optimised starts.

Letters in shape comments: B starts, I initial frames, T recorded steps, n squares per side of a
world, D hidden state.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from agents.frames import to_frames
from agents.provenance import check_agent
from common.errors import UserError
from common.files import sha256
from common.game_constants import FRAME_SIZE
from common.results import ResultStore
from common.schemas import Table
from generative.dataset import RolloutDataset
from generative.dream_programs import is_surrounded
from generative.filling import initial_displacements, initial_images
from generative.imagining import random_starts
from generative.networks import LatentSampler
from generative.recorded_views import NEAR_END, RecordedView, choose_views, end_of
from generative.sample_files import SampleFolder
from generative.simulator import Simulator, Start
from generative.spatial import split_state
from generative.squares import World
from generative.start_optimisation.search import OPTIMISED_STARTS
from generative.start_worlds import read_places, recorded_starts, rounded, world_seeds

_MODE = LatentSampler("mode")
_BATCH = 16  # starts whose worlds are sampled at once
# Titles by pattern of the names in ``objectives.targets_named`` and of sparse features.
_TITLES = {
    "value": "the value", r"log_prob_(\w+)": r"the log-probability of \1",
    r"hx_direction_(\d+)_pca": r"PC \1", r"hx_direction_(\d+)(?:_ica)?": r"IC \1",
    r"from_(\w+)_to_(\w+)": r"the change of action from \1 to \2",
    r"feature_(\d+)": r"sparse feature \1", r"(.+):(\d+)": r"unit \2 of \1"}


@dataclasses.dataclass(frozen=True)
class Truth:
    """How the game went on from a recorded start.

    Attributes:
        episode, frame, level: number of the episode, frame of the start, and seed of the level.
        frames: frames from the start on, uint8 (T, 64, 64, 3).
        actions: the agent's actions in these frames, with action noise if it was recorded with it,
            int64 (T,).
        values: the agent's values of these frames, float (T,).
        end: how the episode ends after the last frame; None if it goes on.
    """

    episode: int
    frame: int
    level: int
    frames: np.ndarray
    actions: np.ndarray
    values: np.ndarray
    end: str | None


@dataclasses.dataclass(frozen=True)
class Aim:
    """Objective for which a start was optimised.

    Attributes:
        aim: "maximise" or "minimise".
        target: title of the target, see ``target_title``.
        step: simulated step of the target, from 0.
    """

    aim: str
    target: str
    step: int


@dataclasses.dataclass(frozen=True)
class PageStart:
    """A start of dreams.

    Attributes:
        start: start (1 row).
        seed: seed of its world.
        known: squares that other worlds of this start keep, bool (n, n); None without a world.
        truth: None for a start that is not recorded.
        aim: None for a start that is not optimised.
        frames: initial frames, uint8 (I, 3, 64, 64); None if squares cannot be sampled.
        displacements: displacements of the camera in them, relative to the last one, in pixels to
            the right and down (I, 2).
    """

    start: Start
    seed: int
    known: np.ndarray | None
    truth: Truth | None = None
    aim: Aim | None = None
    frames: np.ndarray | None = None
    displacements: np.ndarray | None = None


def sampled_page_starts(simulator: Simulator, number: int, seed: int) -> list[PageStart]:
    """Sample starts, see ``generative.random_starts``; none if the prior is not trained."""
    if number == 0 or (simulator.squares is not None and not simulator.prior.is_trained):
        return []
    starts = random_starts(simulator, number, seed=seed)
    seeds = world_seeds([(seed, i) for i in range(number)]).tolist()
    return [_with_frames(simulator, PageStart(row, seeds[i], _kept(simulator, row.world, None)))
            for i, row in enumerate(_rows(starts))]


@torch.no_grad()
def _with_frames(simulator: Simulator, start: PageStart) -> PageStart:
    """Draw the initial frames of a start that is not recorded."""
    if not is_surrounded(simulator):
        return start
    image = simulator.imagine(start.start, _MODE, 1)[0].images
    frames = initial_images(simulator, image, start.start)[:, 0]
    velocity = split_state(start.start.env_h, simulator.config).camera.velocity.numpy()
    return dataclasses.replace(
        start, frames=np.moveaxis(to_frames(frames), -1, 1),
        displacements=np.arange(1 - len(frames), 1, dtype=np.float32)[:, None] * velocity)


def target_title(name: str) -> str:
    """Return the title of a target of ``optimise_start``, such as "the value" or "IC 3"."""
    for pattern, title in _TITLES.items():
        if match := re.fullmatch(pattern, name):
            return match.expand(title).replace("_", " ")
    return name


@torch.no_grad()
def optimised_page_starts(simulator: Simulator, folder: Path, number: int, agent_file: Path,
                          model_file: Path) -> list[PageStart]:
    """Read the best start of each objective, for the first penalty.

    Args:
        folder: output folder of ``generative.optimise_start``.
        number: largest number of starts.

    Raises:
        UserError: if they were optimised through another simulator, or for another agent.
    """
    store = ResultStore(folder, OPTIMISED_STARTS)
    settings = store.settings("step", "model_sha256")
    check_agent(settings.get("agent_sha256"), agent_file,
                f"the starts in {folder} were optimised",
                "run python -m generative.optimise_start with this one")
    if settings["model_sha256"] != sha256(model_file):
        raise UserError(f"the starts in {folder} were optimised through another simulator than "
                        f"{model_file}; run {OPTIMISED_STARTS.script} with this one")
    table = store.read("starts", form=Table({
        "penalty": float, "order": int, "aim": str, "target": str, "sample": int, "best": bool}))
    table = table[table["best"] & (table["penalty"] == table["penalty"].iloc[0])]
    table = table.sort_values("order").head(number)
    samples = SampleFolder(folder / f"penalty_{table['penalty'].iloc[0]:g}")
    numbers = table["sample"].tolist()
    vectors = torch.from_numpy(samples.stacked_field("bottleneck_vec", numbers))
    starts = simulator.start_from(vectors, _MODE, world=samples.worlds(numbers))
    seeds = [samples.origin(sample).world_seed or 0 for sample in numbers]
    return [_with_frames(simulator, PageStart(
        row, seed, _kept(simulator, row.world, None),
        aim=Aim(objective.aim, target_title(objective.target), settings["step"])))
            for row, seed, objective in zip(_rows(starts), seeds, table.itertuples())]


def recorded_page_starts(simulator: Simulator, dataset: RolloutDataset, number: int,
                         num_steps: int, seed: int) -> list[PageStart]:
    """Choose recorded frames, of different episodes, see ``recorded_views.choose_views``.

    Args:
        number: largest number of starts.
        num_steps: largest number T of recorded steps that are kept.

    Raises:
        UserError: if the simulator has worlds, but its prior is not trained.
    """
    first = dataset.num_init_steps - 1
    lengths = [dataset.folder.array_files(episode).frames.shape[0]
               for episode in np.unique(dataset.episodes)]
    enough = sum(length - 1 - NEAR_END[0] >= first for length in lengths)
    places = choose_views(dataset, min(number, enough), seed)
    found = []
    for begin in range(0, len(places), _BATCH):
        found += _recorded(simulator, dataset, places[begin:begin + _BATCH], begin, num_steps, seed)
    return found


@torch.no_grad()
def _recorded(simulator: Simulator, dataset: RolloutDataset, places: Sequence[RecordedView],
              first: int, num_steps: int, seed: int) -> list[PageStart]:
    """Open a batch of recorded starts; ``first`` is the number of the first one."""
    frames, hidden, actions = read_places(dataset.folder, places, dataset.num_init_steps)
    images = frames.float() / 255
    seeds = world_seeds([(seed, first + i) for i in range(len(places))])
    start = recorded_starts(simulator, simulator.encode(images), images[-1], hidden,
                            actions, seeds)
    known, displacements = None, None
    if start.world is not None:
        assert simulator.squares is not None
        _, known = simulator.squares.read(images[-1], start.world.corner,
                                          start.world.squares.shape[1])
        world = rounded(start.world)
        start = dataclasses.replace(start, world=world)
        if is_surrounded(simulator):
            displacements = initial_displacements(simulator, images, world).numpy()
    return [PageStart(row, int(seeds[i]), _kept(simulator, row.world, None if known is None
                                                else known[i].numpy()),
                      _truth(dataset, place, num_steps),
                      frames=None if displacements is None else frames[:, i].numpy(),
                      displacements=None if displacements is None else displacements[:, i])
            for i, (row, place) in enumerate(zip(_rows(start), places))]


def _rows(start: Start) -> list[Start]:
    """Divide a batch of starts."""
    tensors = {name: value for name, value in vars(start).items() if name != "world"}
    return [Start(**{name: tensor[[i]] for name, tensor in tensors.items()},
                  world=None if start.world is None else start.world[[i]])
            for i in range(len(start.env_h))]


def _kept(simulator: Simulator, world: World | None, known: np.ndarray | None
          ) -> np.ndarray | None:
    """Return the squares (n, n) that are known, or at least partly in view."""
    if world is None:
        return None
    assert simulator.squares is not None
    num, size = world.squares.shape[1], simulator.squares.pixels_per_square
    near = world.corner[0, :, None].numpy() + size * np.arange(num)  # left and upper edges (2, n)
    seen = (near < FRAME_SIZE) & (near + size > 0)
    in_view = seen[1][:, None] & seen[0]
    return in_view if known is None else in_view | known


def _truth(dataset: RolloutDataset, place: RecordedView, num_steps: int) -> Truth:
    """Read how the game went on. The last recorded frame of an episode shows no level."""
    steps = dataset.folder.steps(place.episode)
    frames = dataset.folder.array_files(place.episode).frames
    last, kind = end_of(dataset, place.episode)
    end = min(place.frame + num_steps, last)
    rows = slice(place.frame, end)
    return Truth(place.episode, place.frame, int(steps["level_seed"].iloc[0]),
                 np.moveaxis(frames.rows(place.frame, end), 1, -1),
                 steps["action"].to_numpy(np.int64)[rows], steps["value"].to_numpy(float)[rows],
                 kind if end == last else None)

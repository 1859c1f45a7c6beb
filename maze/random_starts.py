"""Count how many of a simulator's random starts, and of its completions, are mazes.

    python -m maze.random_starts --agent_file <agent> --model_file <simulator with worlds> \\
        --data_dir <recording with --worlds that was not used for training> --output_dir <folder>

Random starts are compared with recorded starts, and with squares that are drawn independently, each
from its frequencies at this place in the recording. For completions, a block of squares is hidden
in each recorded maze, and generated given the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from scipy.ndimage import label
from torch import Tensor
from torch.nn import functional

from agents.frames import to_frames
from agents.replay import recorded_levels
from agents.rollout_files import RolloutFolder
from common.cli import count, seed
from common.errors import UserError
from common.files import save_json
from common.game_constants import CHEESE, FRAME_SIZE, WALL
from common.options import ComputeOptions, command, option
from common.results import Entry, File, Json, ResultStore, Schema
from common.video import strip
from envs.level_state import LevelState
from generative.batches import in_batches
from generative.config import SimulatorConfig
from generative.networks import LatentSampler
from generative.prior import static_globals
from generative.prior_networks import NUM_GLOBALS
from generative.runs import open_simulator
from generative.simulator import Simulator
from generative.squares import World
from generative.start_worlds import check_prior, world_seeds
from generative.world_data import fit_worlds
from stats.report import format_interval
from stats.significance import share

STARTS = Schema("random starts of mazes", "python -m maze.random_starts", replaced=True, results={
    "shares": Entry("random_starts.json", Json()), "figure": Entry("random_starts.png", File())})
_MOUSE_BLUE = 150  # level of blue that only pixels of the mouse exceed
_NEIGHBOURS = np.ones((3, 3), bool)
_BATCH_SIZE = 50
_SHOWN, _THUMB = 16, 128

Counts = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomStartsOptions(ComputeOptions):
    """Count how many of a simulator's random starts, and of its completions, are mazes."""

    agent_file: Path = option(help="agent inside the simulator")
    model_file: Path = option(help="simulator of mazes with worlds and a trained prior")
    data_dir: Path = option(help="recording of mazes, from record.py --worlds")
    num_starts: int = option(1000, "number of random starts", type=count)
    hidden_squares: int = option(5, "squares per side of the hidden block", type=count)
    seed: int = option(0, "seed of every random choice", type=seed)
    output_dir: Path = option(Path("analysis") / "maze" / "starts", "folder to write to")


def maze_properties(cells: np.ndarray) -> Counts:
    """Check properties of mazes.

    Args:
        cells: cells of each maze, WALL, FREE or CHEESE (N, n, n).

    Returns:
        ``one_cheese``; ``connected``: there are free squares, and paths between all of them; and
        ``perfect``: connected by exactly one path each; bool (N,) each.
    """
    free = cells != WALL
    parts = np.array([label(maze)[1] for maze in free])
    joints = (free[:, 1:] & free[:, :-1]).sum((1, 2)) + (free[:, :, 1:] & free[:, :, :-1]).sum(
        (1, 2))
    return {"one_cheese": (cells == CHEESE).sum((1, 2)) == 1, "connected": parts == 1,
            "perfect": (parts == 1) & (joints == free.sum((1, 2)) - 1)}


def start_properties(cells: np.ndarray, frames: np.ndarray) -> Counts:
    """Check properties of mazes with a mouse.

    Args:
        cells: see ``maze_properties``.
        frames: frames that show the mouse, uint8 (N, 64, 64, 3).

    Returns:
        The properties of ``maze_properties``; ``one_mouse``: there is one mouse, on a free square;
        ``reachable``: a path leads from one mouse to one cheese; and ``valid``: all of these.
    """
    found = maze_properties(cells)
    one_mouse, reachable = np.zeros((2, len(cells)), bool)
    for i, (maze, frame) in enumerate(zip(cells, frames)):
        mice, number = label(frame[..., 2] > _MOUSE_BLUE, _NEIGHBOURS)
        if number != 1:
            continue
        parts = label(maze != WALL)[0]
        middle = np.argwhere(mice).mean(axis=0) + 0.5
        part = parts[tuple((middle * len(maze) / FRAME_SIZE).astype(int))]
        one_mouse[i] = part > 0
        reachable[i] = part > 0 and found["one_cheese"][i] and part == parts[maze == CHEESE][0]
    return {**found, "one_mouse": one_mouse, "reachable": reachable,
            "valid": found["perfect"] & one_mouse & reachable}


def independent_mazes(cells: np.ndarray, number: int, rng: np.random.Generator) -> np.ndarray:
    """Draw mazes whose squares are independent, with the frequencies of ``cells`` at each place."""
    rows, columns = np.indices(cells.shape[1:])
    return cells[rng.integers(len(cells), size=(number, *cells.shape[1:])), rows, columns]


def hidden_blocks(cells: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """Draw a mask of hidden squares for each maze (N, n, n): a block around a free square."""
    hidden = np.zeros(cells.shape, bool)
    last = cells.shape[1] - size
    for maze, mask in zip(cells, hidden):
        row, column = (rng.choice(np.argwhere(maze != WALL)) - size // 2).clip(0, last)
        mask[row:row + size, column:column + size] = True
    return hidden


class RecordedMazes:
    """The mazes of a recording, one per episode, and their starts.

    Args:
        folder: recording of ``record.py --worlds``.

    Attributes:
        cell_types: cell of each class of squares (K,).
        classes: classes of the squares of each maze (N, n, n).
        frames: first frame of each episode, uint8 (N, 64, 64, 3).
    """

    def __init__(self, folder: RolloutFolder, simulator: Simulator):
        game, levels = recorded_levels(folder)
        if game.env_name != "maze" or simulator.config.pixels_per_square:
            raise UserError(f"{folder.path} must be a recording of mazes, and the simulator one of "
                            "mazes")
        assert simulator.squares is not None and simulator.config.world_squares
        numbers = folder.finished()
        _, worlds = fit_worlds(folder, numbers, simulator.config.world_squares, simulator.squares)
        first = worlds.rows == 0
        self.classes = worlds.squares[first].astype(np.int64)
        episodes = worlds.episodes[first].tolist()
        self.frames = np.stack([folder.episode(number).frames[0] for number in episodes])
        votes = np.zeros((len(simulator.squares.templates), 256), np.int64)
        with contextlib.closing(levels) as slots:
            for number, classes in zip(episodes, self.classes):
                slots.start(0, int(folder.steps(number)["level_seed"].iloc[0]))
                cells = LevelState.parse(slots.state(0) or b"", game.env_name).grid[::-1]
                np.add.at(votes, (classes, cells), 1)
        self.cell_types = votes.argmax(axis=1)

    @property
    def cells(self) -> np.ndarray:
        """Cells of the mazes (N, n, n)."""
        return self.cell_types[self.classes]


@torch.no_grad()
def random_starts(simulator: Simulator, number: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Generate starts, and return the classes of their squares (N, n, n), and their first frames,
    uint8 (N, 64, 64, 3)."""
    classes, frames = [], []
    for part in in_batches(np.arange(number), _BATCH_SIZE):
        seeds = world_seeds([(seed, int(i)) for i in part])
        vectors, world = simulator.sample_starts(simulator.prior.noise(seeds), seeds)
        draw = LatentSampler("mode")
        (step,) = simulator.imagine(simulator.start_from(vectors, draw, world=world), draw, 1)
        classes.append(world.squares.argmax(dim=-1).cpu().numpy())
        frames.append(to_frames(step.images))
    return np.concatenate(classes), np.concatenate(frames)


@torch.no_grad()
def completed(simulator: Simulator, classes: np.ndarray, hidden: np.ndarray, seed: int
              ) -> np.ndarray:
    """Return the classes of mazes (N, n, n) whose hidden squares the prior has generated."""
    assert simulator.squares is not None
    results = []
    for part in in_batches(np.arange(len(classes)), _BATCH_SIZE):
        squares = functional.one_hot(torch.from_numpy(classes[part]),
                                     len(simulator.squares.templates)).float()
        world = World.of(squares, torch.zeros(len(part), 2),
                         seeds=world_seeds([(seed, int(i)) for i in part]))
        known = torch.from_numpy(~hidden[part])
        camera = static_globals(torch.empty(len(part), NUM_GLOBALS))
        results.append(simulator.prior.completed(world, known, camera).squares.argmax(dim=-1))
    return torch.cat(results).numpy()


def shares(counts: Counts) -> dict[str, tuple[float, float, float]]:
    """Return the share of each property, with Wilson's 95 % interval."""
    return {name: share(int(values.sum()), len(values)) for name, values in counts.items()}


def text_of(tables: dict[str, dict]) -> str:
    """Return tables as text, with one line per row and property."""
    return "\n".join(f"{row}, {name}: {format_interval(value, low, high, '.3f')}"
                     for row, table in tables.items()
                     for name, (value, low, high) in table.items())


def drawn(simulator: Simulator, classes: np.ndarray) -> np.ndarray:
    """Draw mazes without mouse, uint8 (N, 64, 64, 3)."""
    assert simulator.squares is not None
    nowhere = torch.zeros(len(classes), 2)
    world = World.of(torch.from_numpy(classes), nowhere)
    view: Tensor = simulator.squares.crop(world, nowhere, FRAME_SIZE)
    return to_frames(view)


def figure(simulator: Simulator, frames: np.ndarray, classes: np.ndarray, hidden: np.ndarray,
           completions: np.ndarray) -> Image.Image:
    """Draw random starts in two rows; and below them mazes, the same mazes with their hidden block
    in grey, and their completions."""
    half = _SHOWN // 2
    mazes = drawn(simulator, classes[:half])
    place = np.arange(FRAME_SIZE) * hidden.shape[1] // FRAME_SIZE
    masks = hidden[:half][:, place][:, :, place]
    return strip([list(frames[:half]), list(frames[half:_SHOWN]), list(mazes),
                  list(np.where(masks[..., None], np.uint8(128), mazes)),
                  list(drawn(simulator, completions[:half]))], _THUMB)


def count_mazes(options: RandomStartsOptions) -> dict[str, dict]:
    """Count mazes, write the counts and a figure to ``options.output_dir``, and return the counts
    by row and property."""
    store = ResultStore(options.output_dir, STARTS)
    store.check_replaceable()
    simulator = open_simulator(options.model_file, options.agent_file, SimulatorConfig(),
                               options.compute)
    if simulator.squares is None:
        raise UserError(f"{options.model_file} has no worlds; train a simulator with worlds first")
    check_prior(simulator)
    mazes = RecordedMazes(RolloutFolder(options.data_dir), simulator)
    rng = np.random.default_rng(options.seed)
    classes, frames = random_starts(simulator, options.num_starts, options.seed)
    cells = mazes.cell_types[classes]
    independent = independent_mazes(mazes.cells, options.num_starts, rng)
    hidden = hidden_blocks(mazes.cells, options.hidden_squares, rng)
    completions = completed(simulator, mazes.classes, hidden, options.seed)
    filled = mazes.cell_types[completions]
    marginal = np.where(hidden, independent_mazes(mazes.cells, len(hidden), rng), mazes.cells)
    known = {maze.tobytes() for maze in mazes.cells}
    tables = {
        "recorded starts": shares(start_properties(mazes.cells, mazes.frames)),
        "random starts": shares({**start_properties(cells, frames), "in_recording": np.array(
            [maze.tobytes() in known for maze in cells])}),
        "independent squares": shares(maze_properties(independent)),
        "completions": shares({
            **maze_properties(filled), "original": (filled == mazes.cells).all((1, 2)),
            "known_squares_kept": ((completions == mazes.classes) | hidden).all((1, 2))}),
        "independent completions": shares(maze_properties(marginal))}
    settings = {
        "model_file": str(options.model_file), "data_dir": str(options.data_dir),
        "seed": options.seed, "num_starts": options.num_starts, "num_mazes": len(mazes.classes),
        "hidden_squares": options.hidden_squares}
    shares_path, figure_path = map(store.file_of, STARTS.results)
    with store.replace(settings) as temporary:
        save_json(temporary / shares_path.name, {**settings, "shares": tables})
        figure(simulator, frames, mazes.classes, hidden, completions).save(
            temporary / figure_path.name)
    print(text_of(tables))
    print(f"wrote {shares_path} and {figure_path.name} next to it")
    return tables


main = command(RandomStartsOptions, count_mazes)

if __name__ == "__main__":
    raise SystemExit(main())

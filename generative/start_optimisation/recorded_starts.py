"""Recorded starts: what targets are worth in them, simulated and as recorded.

Letters in shape comments: N recorded starts, G targets, V bottleneck vector.


Where the start vectors of recorded windows lie on the sphere: a kernel density.

The encoder gives one vector a window, so the aggregate posterior of the starts (Hoffman and
Johnson 2016; Tomczak and Welling 2018) is a set of points on the unit sphere. The density is the
mean of von Mises-Fisher kernels around those points, which are to the sphere what Gaussians are to
the plane; their concentration is the one under which episodes that were left out are likeliest. A
Gaussian with the vectors' mean and covariance would call likely what lies between clusters, where
no recorded start is. Preferred inputs that are searched in the code of a generator need such a
bound: without one they leave the codes that the generator knows (Nguyen et al. 2016, 2017).

Letters in shape comments: N recorded vectors, B vectors, V bottleneck vector.


Starts made to order on disk: names, writer and reader of one folder.

Layout::

    made_to_order.json        what made them
    recorded.npz              recorded starts, see RecordedStarts, with the names of the targets
    penalty_<p>/              a folder of samples, as of record_gen_samples.py, for each penalty:
                              order i has the samples from i * (starts of an order) on. Its videos
                              show each rollout beside the recorded start that is nearest to it,
                              simulated and as recorded
    pictures/order_<i>.png    the best start of order i with each penalty, and the recorded frames
                              nearest to it, one start a row
    starts.csv                a row for each penalty, order and start
    effects.csv               a row for each arm and outcome, see counting
    report.md, targets.png
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from scipy.special import ive, logsumexp
from torch import Tensor

from agents.hooks import cached
from common.description import open_described_folder
from common.devices import Compute
from common.errors import UserError
from common.files import atomic_path, read_arrays
from common.progress import with_progress
from generative.batches import AlignedBatch, align
from generative.dataset import RolloutDataset
from generative.frozen_agent import FrozenAgent
from generative.simulator import Simulator
from generative.start_optimisation.objectives import Answers, Target, rollout

CONCENTRATIONS = tuple(2.0 ** np.arange(16))
TYPICAL_SHARE = 0.05  # of the recorded starts that are less likely than what counts as typical
MIN_EPISODES = 2


@dataclasses.dataclass(frozen=True)
class RecordedDensity:
    """Density of recorded start vectors.

    Attributes:
        vectors: of length 1 (N, V).
        concentration: of the kernels.
        log_density: of each recorded vector, from the kernels of other episodes, up to a constant,
            float64 (N,).
        typical: log-density that all but ``TYPICAL_SHARE`` of the recorded vectors have.
        spread: from there to their median; above 0.
    """

    vectors: Tensor
    concentration: float
    log_density: np.ndarray
    typical: float
    spread: float

    @classmethod
    def fit(cls, vectors: np.ndarray, episodes: np.ndarray) -> RecordedDensity:
        """Choose the concentration and the bound of what is typical.

        Args:
            vectors: of recorded windows (N, V).
            episodes: that they come from (N,). Windows of an episode resemble each other, so none
                of its kernels counts for its own windows.

        Raises:
            UserError: if all vectors are of one episode.
        """
        if len(np.unique(episodes)) < MIN_EPISODES:
            raise UserError("the recorded starts are of one episode only, which does not say where "
                            "starts lie; record more episodes or raise --num_recorded")
        exact = vectors.astype(np.float64)
        cosines = exact @ exact.T  # (N, N)
        others = episodes[:, None] != episodes  # (N, N)
        best, chosen = -np.inf, None
        for concentration in CONCENTRATIONS:
            log_density = logsumexp(concentration * cosines, b=others, axis=1) - np.log(
                others.sum(axis=1))
            likelihood = log_density.mean() + log_normaliser(concentration, vectors.shape[1])
            if likelihood > best:
                best, chosen = likelihood, (concentration, log_density)
        concentration, log_density = chosen
        typical, median = np.quantile(log_density, (TYPICAL_SHARE, 0.5))
        return cls(torch.from_numpy(vectors), concentration, log_density, float(typical),
                   max(float(median - typical), 1e-6))

    def of(self, vectors: Tensor) -> Tensor:
        """Log-density, up to the same constant, of vectors (B, V): (B,)."""
        similar = self.concentration * vectors @ self.vectors.T.to(vectors)  # (B, N)
        return similar.logsumexp(dim=-1) - np.log(len(self.vectors))

    def excess(self, vectors: Tensor) -> Tensor:
        """How far vectors (B, V) lie below what is typical, in units of ``spread``: (B,).

        0 where recorded vectors typically lie.
        """
        return torch.relu(self.typical - self.of(vectors)) / self.spread

    def nearest(self, vectors: Tensor, number: int) -> tuple[np.ndarray, np.ndarray]:
        """The recorded vectors that are nearest to vectors (B, V), nearest first.

        Returns:
            Their rows, int64 (B, number), and cosines, float32 (B, number).
        """
        cosines, rows = (vectors @ self.vectors.T.to(vectors)).topk(number, dim=-1)
        return rows.numpy(), cosines.numpy()


def log_normaliser(concentration: float, dimensions: int) -> float:
    """Logarithm of the von Mises-Fisher density's constant (Mardia and Jupp 2000, section 9.3.2).

    Args:
        dimensions: V of the space that the sphere is in.
    """
    order = dimensions / 2 - 1
    return (order * np.log(concentration) - dimensions / 2 * np.log(2 * np.pi)
            - np.log(ive(order, concentration)) - concentration)


_DRAWN = 1  # stream of random numbers, beside the seed


@dataclasses.dataclass(frozen=True)
class RecordedStarts:
    """Recorded starts, in a random order.

    Attributes:
        windows: of the recorded data, int64 (N,).
        episodes, frames: that the first simulated step shows, int64 (N,).
        vectors: float32 (N, V).
        simulated: of each target, in a rollout from the vector, float32 (N, G).
        real: of each target, when the agent sees the recorded frames, float32 (N, G).
    """

    windows: np.ndarray
    episodes: np.ndarray
    frames: np.ndarray
    vectors: np.ndarray
    simulated: np.ndarray
    real: np.ndarray


def drawn_windows(dataset: RolloutDataset, number: int, step: int, seed: int) -> np.ndarray:
    """Windows drawn evenly from those with initial frames of one episode that has not ended at the
    step: int64, at most ``number``.

    Raises:
        UserError: if there is none.
    """
    index = dataset.folder.index()
    lengths = index.groupby("episode").size()
    places = [dataset.place(window) for window in range(len(dataset))]
    going = [window for window, place in enumerate(places)
             if place.frame >= dataset.num_init_steps - 1
             and place.frame + step < lengths[place.episode] - 1]  # the last row is black
    if not going:
        raise UserError(f"no episode in {dataset.folder.path} is long enough for "
                        f"{dataset.num_init_steps} initial frames and the step {step}; see --step")
    return np.random.default_rng([seed, _DRAWN]).permutation(going)[:number]


def recorded_starts(simulator: Simulator, compute: Compute, dataset: RolloutDataset,
                    windows: np.ndarray, targets: Sequence[Target], step: int,
                    batch_size: int) -> RecordedStarts:
    """Simulate recorded starts, and read the targets there and on the recorded frames."""
    sizes = dataclasses.replace(
        simulator.config, num_init_steps=dataset.num_init_steps,
        num_sim_steps=dataset.window_length - dataset.num_init_steps + 1)
    layers = layers_of(targets)
    batches = [windows[begin:begin + batch_size] for begin in range(0, len(windows), batch_size)]
    vectors, simulated, real = [], [], []
    for numbers in with_progress(iter(batches), len(batches), "batch"):
        batch = align(dataset.batch(numbers).to(compute.device), sizes)
        with torch.no_grad():
            with compute.autocast():
                found = simulator.encode(batch.initial_images)
            _, answers = rollout(simulator, compute, found, step + 1, layers)
            seen = _on_recorded_frames(simulator.agent, compute, batch, step, layers)
        vectors.append(found.cpu().numpy())
        for rows, of in ((simulated, answers), (real, seen)):
            rows.append(read(targets, of, len(of.values) - 1))
    places = [dataset.place(int(window)) for window in windows]
    return RecordedStarts(
        windows.astype(np.int64), np.array([place.episode for place in places]),
        np.array([place.frame for place in places]), *map(np.concatenate,
                                                          (vectors, simulated, real)))


def layers_of(targets: Sequence[Target]) -> tuple[str, ...]:
    """The layers whose units targets read."""
    return tuple(dict.fromkeys(layer for target in targets for layer in target.layers))


def read(targets: Sequence[Target], answers: Answers, step: int) -> np.ndarray:
    """Targets at a step, float32 (B, G)."""
    return torch.stack([target(answers, step) for target in targets],
                       dim=1).detach().float().cpu().numpy()


def _on_recorded_frames(agent: FrozenAgent, compute: Compute, batch: AlignedBatch, step: int,
                        layers: tuple[str, ...]) -> Answers:
    """Answers at the step and the one before, with the recorded states entering."""
    outputs = []
    with compute.autocast(), cached(agent.policy, layers, graph=True) as activations:
        for t in range(max(step - 1, 0), step + 1):
            hidden: Tensor = batch.hidden_states[t - 1] if t else batch.first_hidden
            outputs.append(agent.step(batch.images[t], hidden))
    return Answers.of(outputs, activations, agent.policy)


_PATTERNS = ("made_to_order.json", "recorded.npz", "penalty_*/*", "penalty_*/*/*",
             "pictures/order_*.png", "starts.csv", "effects.csv", "report.md", "targets.png")
_TARGETS = "targets"


def picture_name(order: int) -> str:
    """The picture of an order's best start, below the folder."""
    return f"pictures/order_{order:03d}.png"


class MadeToOrderFolder:
    """Names in a folder of starts made to order; opened for writing.

    Args:
        path: made if missing.
        description: of what makes the recorded starts. If the folder holds others, they must be
            the same.
        overwrite: throw away what the folder holds.

    Raises:
        UserError: see ``open_described_folder``.
    """

    def __init__(self, path: Path, description: dict, overwrite: bool = False):
        self.path = Path(path)
        self._lock = open_described_folder(
            self.path / "made_to_order.json", description, _PATTERNS, "starts made to order",
            "--output_dir", overwrite,
            informative=("versions", "data_dir", "agent_file", "model_file"))

    starts_file = property(lambda self: self.path / "starts.csv")
    effects_file = property(lambda self: self.path / "effects.csv")
    report_file = property(lambda self: self.path / "report.md")
    figure_file = property(lambda self: self.path / "targets.png")
    recorded_file = property(lambda self: self.path / "recorded.npz")

    def samples(self, penalty: float) -> Path:
        """The folder of samples that were searched with a penalty."""
        return self.path / f"penalty_{penalty:g}"

    def picture_file(self, order: int) -> Path:
        return self.path / picture_name(order)

    def save_recorded(self, starts: RecordedStarts, targets: Sequence[str]) -> None:
        """Write the recorded starts, with the names of the targets."""
        self._lock.check()
        with atomic_path(self.recorded_file) as temporary, open(temporary, "wb") as file:
            np.savez(file, **{field.name: getattr(starts, field.name)
                              for field in dataclasses.fields(starts)},
                     **{_TARGETS: np.array(targets)})

    def recorded(self, targets: Sequence[str]) -> RecordedStarts | None:
        """The recorded starts, if they are there already.

        Raises:
            UserError: if the file is damaged or has other targets.
        """
        if not self.recorded_file.exists():
            return None
        arrays = read_arrays(self.recorded_file, "file of recorded starts")
        names = [field.name for field in dataclasses.fields(RecordedStarts)]
        if set(arrays) != {*names, _TARGETS} or arrays[_TARGETS].tolist() != list(targets) or len(
                {len(arrays[name]) for name in names}) != 1:
            raise UserError(f"{self.recorded_file} is damaged; give --overwrite to make it again")
        return RecordedStarts(**{name: arrays[name] for name in names})

"""Recorded starts: their vectors and densities, the targets read in them, and the files.

The encoder gives one vector per window, so the aggregate posterior of the starts (Hoffman and
Johnson 2016; Tomczak and Welling 2018) is a set of points on the unit sphere. Its density is
estimated by the mean of von Mises-Fisher kernels around those points, the analogue of Gaussians on
the sphere; their concentration maximises the likelihood of episodes that are left out. A Gaussian
with the vectors' mean and covariance would give a high density to the space between clusters, where
no recorded start lies. Preferred inputs that are searched in the code of a generator need such a
bound: without one they leave the codes that the generator knows (Nguyen et al. 2016, 2017).

Layout of the output folder::

    made_to_order.json        settings
    recorded.npz              recorded starts, see RecordedStarts, with the names of the targets
    penalty_<p>/              a folder of samples, as of record_gen_samples.py, for each penalty:
                              objective i has the samples from i * (number of starts) on. Its videos
                              show each rollout next to the nearest recorded start, simulated and
                              as recorded
    pictures/order_<i>.png    the best start of objective i with each penalty, and the recorded
                              frames nearest to it, one start per row
    starts.csv                a row for each penalty, objective and start
    effects.csv               a row for each arm and outcome, see ``evaluation``
    report.md, targets.png

Letters in shape comments: N recorded starts, B vectors, G targets, V bottleneck vector.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from scipy.special import ive, logsumexp
from torch import Tensor

from agents.hooks import cached
from common.devices import Compute
from common.errors import UserError
from common.progress import with_progress
from common.schemas import Array, Entry, File, Npz, Schema, Table, Text
from generative.batches import AlignedBatch, align
from generative.dataset import RolloutDataset
from generative.frozen_agent import FrozenAgent
from generative.simulator import Simulator
from generative.start_optimisation.objectives import Rollouts, Target, rollout

CONCENTRATIONS = tuple(2.0 ** np.arange(16))
TYPICAL_SHARE = 0.05  # share of the recorded starts that are less likely than a typical one
MIN_EPISODES = 2
_WINDOWS = 1  # stream of random numbers, in addition to the seed

OPTIMISED_STARTS = Schema(
    "starts made to order", "python -m generative.optimise_start", items={
        "recorded": Entry("recorded.npz", Npz({
            "windows": Array(np.int64, "N"), "episodes": Array(np.int64, "N"),
            "frames": Array(np.int64, "N"), "vectors": Array(np.float32, "N V"),
            "simulated": Array(np.float32, "N G"), "real": Array(np.float32, "N G"),
            "targets": Array(np.str_, "G")})),
        "sample_settings": Entry("penalty_{}/recording.json", File()),
        "sample_lock": Entry("penalty_{}/.{}", File()),  # after a kill
        "sample_files": Entry("penalty_{}/sample_{}/{}", File()),
        "videos": Entry("penalty_{}/videos/{}", File())},
    results={
        "starts": Entry("starts.csv", Table()), "effects": Entry("effects.csv", Table(), True),
        "picture": Entry("pictures/order_{}.png", File()),
        "report": Entry("report.md", Text()), "figure": Entry("targets.png", File())},
    informative=("versions", "data_dir", "agent_file", "model_file"),
    settings_name="made_to_order.json")


@dataclasses.dataclass(frozen=True)
class RecordedStarts:
    """Recorded starts, in a random order.

    Attributes:
        windows: windows of the recorded data, int64 (N,).
        episodes, frames: what the first simulated step shows, int64 (N,).
        vectors: float32 (N, V).
        simulated: targets in a rollout from the vector, float32 (N, G).
        real: targets when the agent sees the recorded frames, float32 (N, G).
    """

    windows: np.ndarray
    episodes: np.ndarray
    frames: np.ndarray
    vectors: np.ndarray
    simulated: np.ndarray
    real: np.ndarray


def drawn_windows(dataset: RolloutDataset, number: int, step: int, seed: int) -> np.ndarray:
    """Draw windows whose initial frames are of one episode that has not ended at the step.

    Returns:
        At most ``number`` windows, int64.

    Raises:
        UserError: if there is none.
    """
    lengths = dataset.folder.index().groupby("episode").size()
    places = [dataset.place(window) for window in range(len(dataset))]
    windows = [window for window, place in enumerate(places)
               if place.frame >= dataset.num_init_steps - 1
               and place.frame + step < lengths[place.episode] - 1]  # the last row is black
    if not windows:
        raise UserError(f"no episode in {dataset.folder.path} is long enough for "
                        f"{dataset.num_init_steps} initial frames and the step {step}; see --step")
    return np.random.default_rng([seed, _WINDOWS]).permutation(windows)[:number]


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
                batch_vectors = simulator.encode(batch.initial_images)  # (B, V)
            _, rollouts = rollout(simulator, compute, batch_vectors, step + 1, layers)
            seen = _on_recorded_frames(simulator.agent, compute, batch, step, layers)
        vectors.append(batch_vectors.cpu().numpy())
        simulated.append(read(targets, rollouts, len(rollouts.values) - 1))
        real.append(read(targets, seen, len(seen.values) - 1))
    places = [dataset.place(int(window)) for window in windows]
    return RecordedStarts(
        windows.astype(np.int64), np.array([place.episode for place in places]),
        np.array([place.frame for place in places]),
        *map(np.concatenate, (vectors, simulated, real)))


def layers_of(targets: Sequence[Target]) -> tuple[str, ...]:
    """Layers whose units the targets read."""
    return tuple(dict.fromkeys(layer for target in targets for layer in target.layers))


def read(targets: Sequence[Target], rollouts: Rollouts, step: int) -> np.ndarray:
    """Read targets at a step, float32 (B, G)."""
    return torch.stack([target(rollouts, step) for target in targets],
                       dim=1).detach().float().cpu().numpy()


def _on_recorded_frames(agent: FrozenAgent, compute: Compute, batch: AlignedBatch, step: int,
                        layers: tuple[str, ...]) -> Rollouts:
    """Outputs at the step and the one before, with the recorded states entering."""
    outputs = []
    with compute.autocast(), cached(agent.policy, layers, graph=True) as activations:
        for t in range(max(step - 1, 0), step + 1):
            hidden: Tensor = batch.hidden_states[t - 1] if t else batch.first_hidden  # (B, D)
            outputs.append(agent.step(batch.images[t], hidden))
    return Rollouts.of(outputs, activations, agent.policy)


@dataclasses.dataclass(frozen=True)
class RecordedDensity:
    """Density of recorded start vectors.

    Attributes:
        vectors: unit vectors (N, V).
        concentration: concentration of the kernels.
        log_density: log-density of each recorded vector under the kernels of other episodes, up to
            a constant, float64 (N,).
        typical: log-density that all but ``TYPICAL_SHARE`` of the recorded vectors exceed.
        spread: difference of their median from ``typical``; above 0.
    """

    vectors: Tensor
    concentration: float
    log_density: np.ndarray
    typical: float
    spread: float

    @classmethod
    def fit(cls, vectors: np.ndarray, episodes: np.ndarray) -> RecordedDensity:
        """Choose the concentration and the bound of typical vectors.

        Args:
            vectors: vectors of recorded windows (N, V).
            episodes: their episodes (N,). Windows of an episode resemble each other, so its kernels
                do not count for its own windows.

        Raises:
            UserError: if all vectors are of one episode.
        """
        if len(np.unique(episodes)) < MIN_EPISODES:
            raise UserError("the recorded starts are of one episode only, which does not say where "
                            "starts lie; record more episodes or raise --num_recorded")
        exact = vectors.astype(np.float64)
        cosines = exact @ exact.T  # (N, N)
        others = episodes[:, None] != episodes  # (N, N)
        log_densities = [
            logsumexp(concentration * cosines, b=others, axis=1) - np.log(others.sum(axis=1))
            for concentration in CONCENTRATIONS]
        likelihoods = [log_density.mean() + log_normaliser(concentration, vectors.shape[1])
                       for concentration, log_density in zip(CONCENTRATIONS, log_densities)]
        best = int(np.argmax(likelihoods))
        typical, median = np.quantile(log_densities[best], (TYPICAL_SHARE, 0.5))
        return cls(torch.from_numpy(vectors), CONCENTRATIONS[best], log_densities[best],
                   float(typical), max(float(median - typical), 1e-6))

    def of(self, vectors: Tensor) -> Tensor:
        """Log-density of vectors (B, V), up to the same constant (B,)."""
        similarity = self.concentration * vectors @ self.vectors.T.to(vectors)  # (B, N)
        return similarity.logsumexp(dim=-1) - np.log(len(self.vectors))

    def excess(self, vectors: Tensor) -> Tensor:
        """How far the density of vectors (B, V) lies below the typical one, in units of ``spread``.

        Returns:
            (B,); 0 where recorded vectors typically lie.
        """
        return torch.relu(self.typical - self.of(vectors)) / self.spread

    def nearest(self, vectors: Tensor, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Find the recorded vectors that are nearest to vectors (B, V), nearest first.

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

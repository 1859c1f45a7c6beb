"""Recorded starts: vectors, density, target values and files.

The encoder gives one vector per window, so the aggregate posterior of the starts (Hoffman and
Johnson 2016; Tomczak and Welling 2018) is a set of points on the unit sphere. Its density is
estimated by the mean of von Mises-Fisher kernels around those points, the analogue of Gaussians on
the sphere; their concentration maximises the likelihood of left-out episodes. A Gaussian with the
vectors' mean and covariance would assign a high density to the space between clusters, where no
recorded start lies. Activation maximisation in the latent space of a generator needs such a bound:
without one, it leaves the region that the generator was trained on (Nguyen et al. 2016, 2017).

Layout of the output folder::

    made_to_order.json        settings
    recorded.npz              recorded starts, see RecordedStarts, with the names of the targets
    penalty_<p>/              sample folder in the layout of record_gen_samples.py, for each
                              penalty; the samples of objective i are numbered from
                              i * (number of starts). Videos show each rollout next to the nearest
                              recorded start, simulated and as recorded
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
TYPICAL_SHARE = 0.05  # share of the recorded starts whose density is too low to be typical
MIN_EPISODES = 2
_WINDOWS = 1  # random stream; part of the generator's seed

OPTIMISED_STARTS = Schema(
    "starts made to order", "python -m generative.optimise_start", items={
        "recorded": Entry("recorded.npz", Npz({
            "windows": Array(np.int64, "N"), "episodes": Array(np.int64, "N"),
            "frames": Array(np.int64, "N"), "vectors": Array(np.float32, "N V"),
            "simulated": Array(np.float32, "N G"), "real": Array(np.float32, "N G"),
            "targets": Array(np.str_, "G")})),
        "sample_settings": Entry("penalty_{}/recording.json", File()),
        "sample_lock": Entry("penalty_{}/.{}", File()),  # left over after a kill
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
        windows: numbers of the recorded windows, int64 (N,).
        episodes, frames: episode and frame that the first simulated step shows, int64 (N,).
        vectors: bottleneck vectors, float32 (N, V).
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
    """Draw windows whose initial frames belong to one episode that has not ended by the step.

    Returns:
        Numbers of at most ``number`` windows, int64 (N,).

    Raises:
        UserError: if there is no such window.
    """
    lengths = dataset.folder.index().groupby("episode").size()
    places = [dataset.place(window) for window in range(len(dataset))]
    windows = [window for window, place in enumerate(places)
               if place.frame >= dataset.num_init_steps - 1
               and place.frame + step < lengths[place.episode] - 1]  # the last row's frame is black
    if not windows:
        raise UserError(f"no episode in {dataset.folder.path} is long enough for "
                        f"{dataset.num_init_steps} initial frames and the step {step}; see --step")
    return np.random.default_rng([seed, _WINDOWS]).permutation(windows)[:number]


def recorded_starts(simulator: Simulator, compute: Compute, dataset: RolloutDataset,
                    windows: np.ndarray, targets: Sequence[Target], step: int,
                    batch_size: int) -> RecordedStarts:
    """Simulate recorded starts, and read the targets on the simulated and the recorded frames.

    Args:
        windows: numbers of the recorded windows (N,).
        step: step at which the targets are read.
    """
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
    """Names of the layers whose units the targets read."""
    return tuple(dict.fromkeys(layer for target in targets for layer in target.layers))


def read(targets: Sequence[Target], rollouts: Rollouts, step: int) -> np.ndarray:
    """Read targets at a step, float32 (B, G)."""
    return torch.stack([target(rollouts, step) for target in targets],
                       dim=1).detach().float().cpu().numpy()


def _on_recorded_frames(agent: FrozenAgent, compute: Compute, batch: AlignedBatch, step: int,
                        layers: tuple[str, ...]) -> Rollouts:
    """Run the agent at the step and the step before, from the recorded hidden states."""
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
        vectors: recorded unit vectors (N, V).
        concentration: concentration of the kernels.
        log_density: log-density of each recorded vector under the kernels of other episodes, up to
            a constant, float64 (N,).
        typical: log-density that all but ``TYPICAL_SHARE`` of the recorded vectors exceed.
        spread: median log-density of the recorded vectors minus ``typical``; above 0.
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
            episodes: episodes of the windows (N,). Windows of an episode resemble each other, so
                the density at a window excludes the kernels of its own episode.

        Raises:
            UserError: if all vectors belong to one episode.
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
        """Log-density (B,) of vectors (B, V), up to the constant of ``log_density``."""
        similarity = self.concentration * vectors @ self.vectors.T.to(vectors)  # (B, N)
        return similarity.logsumexp(dim=-1) - np.log(len(self.vectors))

    def excess(self, vectors: Tensor) -> Tensor:
        """Compute how far the log-density of vectors (B, V) is below ``typical``.

        Returns:
            Excess in units of ``spread`` (B,); 0 for typical vectors.
        """
        return torch.relu(self.typical - self.of(vectors)) / self.spread

    def nearest(self, vectors: Tensor, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Find the ``number`` recorded vectors nearest to each of the vectors (B, V).

        Returns:
            Rows of the recorded vectors, int64 (B, number), and cosine similarities, float32
            (B, number), nearest first.
        """
        cosines, rows = (vectors @ self.vectors.T.to(vectors)).topk(number, dim=-1)
        return rows.numpy(), cosines.numpy()


def log_normaliser(concentration: float, dimensions: int) -> float:
    """Logarithm of the von Mises-Fisher density's constant (Mardia and Jupp 2000, section 9.3.2).

    Args:
        dimensions: V, the dimension of the space that contains the sphere.
    """
    order = dimensions / 2 - 1
    return (order * np.log(concentration) - dimensions / 2 * np.log(2 * np.pi)
            - np.log(ive(order, concentration)) - concentration)

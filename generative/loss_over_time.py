"""Loss against simulated step: how long imagination stays close to what was recorded.

The simulator imagines windows from their initial frames with the recorded actions, z from the
prior. It is compared with three predictors that any simulator must beat:

- ``last_frame``: the last initial frame at every step;
- ``mean_frame``: the mean frame of the training episodes at every step;
- ``shuffled_actions``: the simulator itself, with the recorded actions of another window.

A step counts up to and including the first terminal one of its window. What follows is black and
trivial to predict; averaged in, it would make every later step look easier.

Letters in shape comments: T simulated steps, N windows, B windows of a batch, C H W a frame.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.nn import functional

from common.bootstrap import ClusterBootstrap
from common.devices import Compute
from common.errors import UserError
from common.progress import with_progress
from generative.alignment import AlignedBatch, align, as_frames
from generative.dataset import FRAME_SHAPE, RolloutDataset
from generative.losses import balanced_kl, until_first_terminal
from generative.simulator import Simulation, Simulator
from generative.straight_through import LatentSampler

SIMULATOR, SHUFFLED_ACTIONS, LAST_FRAME, MEAN_FRAME = PREDICTORS = (
    "simulator", "shuffled_actions", "last_frame", "mean_frame")
KINDS = ("image", "reward", "terminal", "agent_state", "kl")
IMAGE_MSE = "image_mse"  # a kind of the table only: the image loss per colour value of a pixel

PLOT_NAME = "loss_over_time_plot.png"
TABLE_NAME = "loss_over_time.csv"
SHOWN_COLUMNS = {"step": int, "predictor": str, "kind": str, "mean": float}  # read for a report
SETTINGS_NAME = "settings.json"

COMPARED_STEPS = range(2, 11)
MEAN_FRAME_EPISODES = 1000


def loss_name(kind: str, predictor: str) -> str:
    """File of a predictor's losses of one kind, float32 (T, N), NaN where a step does not count.

    Its columns are the windows in the order of the settings file.
    """
    return f"loss_{kind}.npy" if predictor == SIMULATOR else f"loss_{kind}_{predictor}.npy"


def strip_name(window: int) -> str:
    """File of a window's recorded frames above the imagined ones."""
    return f"truth_above_imagination_{window:06d}.png"


@dataclasses.dataclass(frozen=True)
class LossOverTime:
    """Losses of windows at every simulated step.

    Attributes:
        windows: numbers of the windows (N,).
        action_windows: whose actions ``shuffled_actions`` was given (N,).
        episodes: numbers of the episodes that the windows show (N,).
        counted: whether a step counts, bool (T, N).
        losses: by predictor and kind, float32 (T, N), NaN where a step does not count. The two
            predictors that are frames have the kind ``image`` only. The kinds: 0.5 times the sum
            of squared errors of the image after its clamp, 0.5 times the squared error of the
            reward, cross-entropy of the terminal, 0.5 times the sum of squared errors of the
            state with which the agent leaves the step, and the divergence of the posterior, with
            the true frame at the imagined h, from the prior (nats, without its weight).
    """

    windows: np.ndarray
    action_windows: np.ndarray
    episodes: np.ndarray
    counted: np.ndarray
    losses: dict[tuple[str, str], np.ndarray]

    def save(self, folder: Path) -> None:
        """Write a file for each predictor and kind."""
        for (predictor, kind), loss in self.losses.items():
            np.save(folder / loss_name(kind, predictor), loss)


def choose_windows(held_out: np.ndarray, most: int, seed: int) -> np.ndarray:
    """Draw at most ``most`` of the held-out windows, without repetition.

    Raises:
        UserError: if there are no two, so that there are no actions of another window.
    """
    chosen = np.random.default_rng(seed).permutation(held_out)[:most]
    if len(chosen) < 2:
        raise UserError(f"loss over time needs at least 2 held-out windows, but there are only "
                        f"{len(chosen)}; record more episodes, hold out more of them, or raise "
                        "the batch size or the number of batches")
    return chosen


def mean_frame(dataset: RolloutDataset, windows: np.ndarray, seed: int) -> Tensor:
    """The mean frame of the episodes that these windows show, float32 (C, H, W) in [0, 1].

    All frames of at most MEAN_FRAME_EPISODES of them, drawn by the seed, have the same weight.
    """
    episodes = np.random.default_rng(seed).permutation(np.unique(dataset.episodes_of(windows)))
    episodes = episodes[:MEAN_FRAME_EPISODES].tolist()
    total, num_frames = np.zeros(FRAME_SHAPE), 0
    for number in with_progress(episodes, len(episodes), "episode"):
        file = dataset.folder.array_files(number).frames
        frames = file.rows(0, file.shape[0])  # (L, C, H, W)
        total += frames.sum(axis=0, dtype=np.int64)
        num_frames += len(frames)
    return torch.from_numpy(total / num_frames / 255).float()


@torch.no_grad()
def loss_over_time(simulator: Simulator, dataset: RolloutDataset, windows: np.ndarray,
                   batch_size: int, mean: Tensor, draw: LatentSampler,
                   compute: Compute) -> LossOverTime:
    """Losses of all predictors on recorded windows.

    Args:
        dataset: its windows have as many steps as are to be simulated.
        windows: numbers of at least two windows in random order (N,). For ``shuffled_actions``
            each is given the actions of the one after it, the last those of the first.
        mean: the mean frame (C, H, W).
        draw: how z is chosen from the prior.

    Raises:
        UserError: if a loss is not finite.
    """
    num_steps = dataset.window_length - dataset.num_init_steps + 1
    config = dataclasses.replace(simulator.config, num_sim_steps=num_steps)
    action_windows = np.roll(windows, -1)
    counted, losses = [], []
    begins = range(0, len(windows), batch_size)
    for begin in with_progress(begins, len(begins), "batch"):
        part = slice(begin, begin + batch_size)
        batch, other = (align(dataset.batch(numbers[part]).to(compute.device), config)
                        for numbers in (windows, action_windows))
        counted.append(until_first_terminal(batch.terminals).bool().cpu().numpy())
        losses.append({key: loss.cpu().numpy() for key, loss in _batch_losses(
            simulator, batch, other.actions, mean.to(compute.device), draw, compute).items()})
    counts = np.concatenate(counted, axis=1)  # (T, N)
    joined = {key: np.concatenate([each[key] for each in losses], axis=1) for key in losses[0]}
    for (predictor, kind), loss in joined.items():
        if not np.isfinite(loss[counts]).all():
            raise UserError(f"the {kind} loss of the predictor '{predictor}' is not finite; the "
                            "simulator has diverged, so use an earlier model file")
        loss[~counts] = np.nan
    return LossOverTime(windows, action_windows, dataset.episodes_of(windows), counts, joined)


@torch.no_grad()
def truth_and_imagination(simulator: Simulator, dataset: RolloutDataset, windows: np.ndarray,
                          draw: LatentSampler, compute: Compute) -> tuple[np.ndarray, np.ndarray]:
    """Recorded frames and the frames imagined instead, uint8 (N, T, H, W, C) each."""
    num_steps = dataset.window_length - dataset.num_init_steps + 1
    config = dataclasses.replace(simulator.config, num_sim_steps=num_steps)
    batch = align(dataset.batch(windows).to(compute.device), config)
    with compute.autocast():
        imagined = _imagine(simulator, batch, batch.actions, draw)
    return tuple(as_frames(images).swapaxes(0, 1) for images in (batch.images, imagined.images))


def _imagine(simulator: Simulator, batch: AlignedBatch, actions: Tensor,
             draw: LatentSampler) -> Simulation:
    start = simulator.start_from(simulator.encode(batch.initial_images), draw)
    return simulator.imagine(start, draw, len(actions), true_actions=actions).stacked()


def _batch_losses(simulator: Simulator, batch: AlignedBatch, other_actions: Tensor, mean: Tensor,
                  draw: LatentSampler, compute: Compute) -> dict[tuple[str, str], Tensor]:
    """By predictor and kind, at all steps (T, B)."""
    losses = {}
    for predictor, actions in ((SIMULATOR, batch.actions), (SHUFFLED_ACTIONS, other_actions)):
        with compute.autocast():
            imagined = _imagine(simulator, batch, actions, draw)
            embeddings = simulator.frame_embedding(batch.images.flatten(0, 1))  # (T*B, E)
            posterior = simulator.cell.posterior_logits(
                imagined.env_h,
                simulator.cell.embedding_input(embeddings).unflatten(0, actions.shape))
        found = _imagination_losses(imagined, posterior, batch, simulator.config.kl_balance)
        losses.update({(predictor, kind): loss for kind, loss in found.items()})
    for predictor, frame in ((LAST_FRAME, batch.initial_images[-1]), (MEAN_FRAME, mean)):
        losses[predictor, "image"] = image_loss(frame.expand_as(batch.images), batch.images)
    return losses


def _imagination_losses(imagined: Simulation, posterior: Tensor, batch: AlignedBatch,
                        kl_balance: float) -> dict[str, Tensor]:
    """By kind (T, B); ``posterior`` (T, B, S, K)."""
    state_errors = imagined.hidden_states - batch.hidden_states
    return {"image": image_loss(imagined.images, batch.images),
            "reward": 0.5 * (imagined.rewards - batch.rewards).square(),
            "terminal": functional.binary_cross_entropy_with_logits(
                imagined.terminal_logits, batch.terminals, reduction="none"),
            "agent_state": 0.5 * state_errors.square().sum(dim=-1),
            "kl": balanced_kl(posterior, imagined.prior_logits, kl_balance)}


def image_loss(images: Tensor, labels: Tensor) -> Tensor:
    """0.5 times the sum of squared errors over a frame; (T, B, C, H, W) to (T, B)."""
    return 0.5 * (images - labels).square().flatten(2).sum(dim=-1)


def table_of(result: LossOverTime, seed: int) -> pd.DataFrame:
    """A row for each step that a window reaches, predictor and kind.

    Returns:
        The columns ``step`` (counted from 0, whose label is the last initial frame),
        ``predictor``, ``kind``, ``windows`` that reach the step, ``mean`` over them,
        ``standard_deviation`` between them, and the ends ``low_95`` and ``high_95`` of the
        mean's interval.
    """
    bootstrap = ClusterBootstrap(result.episodes, seed)
    num_windows = result.counted.sum(axis=1)  # (T,)
    steps = np.flatnonzero(num_windows)
    rows = []
    for (predictor, kind), loss in _with_pixel_errors(result).items():
        low, high = bootstrap.interval(loss, result.counted)
        for step in steps.tolist():
            values = loss[step, result.counted[step]].astype(np.float64)
            spread = values.std(ddof=1) if len(values) > 1 else np.nan
            rows.append((step, predictor, kind, num_windows[step], values.mean(), spread,
                         low[step], high[step]))
    return pd.DataFrame(rows, columns=["step", "predictor", "kind", "windows", "mean",
                                       "standard_deviation", "low_95", "high_95"])


def _with_pixel_errors(result: LossOverTime) -> dict[tuple[str, str], np.ndarray]:
    pixel_errors = {(predictor, IMAGE_MSE): loss * 2 / np.prod(FRAME_SHAPE)
                    for (predictor, kind), loss in result.losses.items() if kind == "image"}
    return {**result.losses, **pixel_errors}


@dataclasses.dataclass(frozen=True)
class BaselineComparison:
    """Whether the simulator's images are better than another predictor's.

    Attributes:
        predictor: the other one.
        steps: those of COMPARED_STEPS that windows reach.
        better: at how many of them the simulator's mean image loss is lower.
        clearly: at how many the 95 % interval of the difference, window by window, lies on the
            simulator's side.
    """

    predictor: str
    steps: tuple[int, ...]
    better: int
    clearly: int


def comparisons(result: LossOverTime, seed: int) -> list[BaselineComparison]:
    """Compare the simulator's image loss with that of each other predictor."""
    bootstrap = ClusterBootstrap(result.episodes, seed)
    steps = [step for step in COMPARED_STEPS
             if step < len(result.counted) and result.counted[step].any()]
    found = []
    for predictor in PREDICTORS[1:]:
        gain = result.losses[predictor, "image"] - result.losses[SIMULATOR, "image"]  # (T, N)
        better = sum(np.nanmean(gain[step]) > 0 for step in steps)
        clearly = (bootstrap.interval(gain, result.counted)[0, steps] > 0).sum()
        found.append(BaselineComparison(predictor, tuple(steps), int(better), int(clearly)))
    return found

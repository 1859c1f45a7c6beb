"""Loss against simulated step: how long imagination stays close to what was recorded.

The simulator imagines windows from their initial frames with the recorded actions, z from the
prior. It is compared with three predictors that any simulator must beat:

- ``last_frame``: the last initial frame at every step;
- ``mean_frame``: the mean frame of the training episodes at every step;
- ``shuffled_actions``: the simulator itself, with the recorded actions of another window.

A step counts up to and including the first terminal one of its window. What follows is black and
trivial to predict; averaged in, it would make every later step look easier.

Beside the losses are measures of what matters to the agent. It is shown the frames of each
predictor and the recorded ones, from the same recorded state on: do its policy, its values and its
states agree? And of each kind of object, on the pixels that it takes up in the recorded frame: how
large is the error there, and is the object shown, that is, is the frame nearer to the recorded one
than to the same frame without the object (less than half of that one's squared error)?

A fidelity card (``generative.fidelity``) adds measures that other world models report, too, and
these predictors:

- ``shifted_actions``: the simulator with the recorded actions one step late;
- ``noop_actions``: the simulator without any action;
- ``other_simulator``: a second simulator, if there is one.

The card excludes the terminal frame, all after it, and windows whose initial frames lie outside of
the episode.

Letters in shape comments: T simulated steps, N windows, B windows of a batch, C H W a frame, K
kinds of object.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.nn import functional

from common.devices import Compute
from common.errors import UserError
from common.game_constants import ACTION_NAMES
from common.progress import with_progress
from generative.batches import AlignedBatch, align, as_frames
from generative.dataset import FRAME_SHAPE, RolloutDataset
from generative.fidelity import (
    MSE,
    OTHER_POLICY_KL,
    OTHER_STATE_COSINE,
    OTHER_VALUE_CORRELATION,
    PSNR,
    PSNR_MARGIN,
    PSNR_OF_MEAN_ERROR,
    REMEMBERED_SHARE,
    FidelityCard,
    Regions,
    compare_agents,
    measure_frames,
    measure_kept_objects,
    psnr,
)
from generative.frozen_agent import FrozenAgent
from generative.losses import balanced_kl, until_first_terminal
from generative.networks import LatentSampler
from generative.simulator import Simulation, Simulator, stack
from stats.association import correlation
from stats.bootstrap import ClusterBootstrap

SIMULATOR, SHUFFLED_ACTIONS, LAST_FRAME, MEAN_FRAME = PREDICTORS = (
    "simulator", "shuffled_actions", "last_frame", "mean_frame")
SHIFTED_ACTIONS, NOOP_ACTIONS = ACTION_CONTROLS = ("shifted_actions", "noop_actions")
OTHER_SIMULATOR = "other_simulator"
NOOP = ACTION_NAMES.index("null")
RECORDED = "recorded"  # frames that no predictor made
KINDS = ("image", "reward", "terminal", "agent_state", "kl")
POLICY_KL, VALUE_CORRELATION, STATE_COSINE = AGENT_MEASURES = (
    "policy_kl", "value_correlation", "hidden_state_cosine")
_CONSTANT = 1e-6  # range of values that do not vary
OBJECT_ERROR, OBJECT_SHOWN = "object_", "shown_"  # followed by the kind of object
IMAGE_MSE = "image_mse"  # a kind of the table only: the image loss per colour value of a pixel

PLOT_NAME = "loss_over_time_plot.png"
OBJECTS_PLOT_NAME = "objects_over_time_plot.png"
CARD_NAME, CARD_ARRAYS_NAME = "fidelity_card.png", "fidelity.npz"
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


def values_name(shown: str) -> str:
    """File of the agent's values, float32 (T, N), on a predictor's frames or the RECORDED ones."""
    return f"agent_values_{shown}.npy"


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
            the true frame at the imagined h, from the prior (nats, without its weight). Of all
            predictors: the divergence of the agent's policy on their frames from that on the
            recorded ones (nats), the cosine of its states, and, where objects are measured, for
            each kind the mean squared error on its pixels and whether it is shown (1 or 0), NaN
            where it is not in view.
        values: the agent's, by predictor and on the RECORDED frames, like the losses.
        fidelity: measures of the fidelity card by predictor and kind, float32 (T, N), NaN where
            they are not defined or the card excludes the frame.
        other_values: ``values`` of an agent that took no part in training, NaN where the card
            excludes the frame.
    """

    windows: np.ndarray
    action_windows: np.ndarray
    episodes: np.ndarray
    counted: np.ndarray
    losses: dict[tuple[str, str], np.ndarray]
    values: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    fidelity: dict[tuple[str, str], np.ndarray] = dataclasses.field(default_factory=dict)
    other_values: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)

    @property
    def objects(self) -> tuple[str, ...]:
        """The kinds of object that were measured."""
        return tuple(kind.removeprefix(OBJECT_SHOWN) for predictor, kind in self.losses
                     if predictor == SIMULATOR and kind.startswith(OBJECT_SHOWN))

    def save(self, folder: Path) -> None:
        """Write a file for each predictor and kind, and one for the measures of the card, whose
        arrays are called ``<kind>/<predictor>``."""
        for (predictor, kind), loss in self.losses.items():
            np.save(folder / loss_name(kind, predictor), loss)
        for shown, values in self.values.items():
            np.save(folder / values_name(shown), values)
        if self.fidelity:
            np.savez(folder / CARD_ARRAYS_NAME,
                     **{f"{kind}/{predictor}": measure
                        for (predictor, kind), measure in self.fidelity.items()},
                     **{f"{_OTHER_VALUES}/{shown}": values
                        for shown, values in self.other_values.items()})


@dataclasses.dataclass(frozen=True)
class ObjectFrames:
    """Frames from which objects were taken.

    Attributes:
        kinds: names of K kinds of object.
        of: numbers of windows (B,) to the label frames of the simulated steps, each without one
            kind of object, uint8 (T, B, K, C, H, W); from the terminal step on as recorded.
        moving: which of the kinds move through the level.
    """

    kinds: tuple[str, ...]
    of: Callable[[np.ndarray], np.ndarray]
    moving: tuple[bool, ...] = ()


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
                   batch_size: int, mean: Tensor, draw: LatentSampler, compute: Compute,
                   objects: ObjectFrames | None = None,
                   card: FidelityCard | None = None) -> LossOverTime:
    """Losses of all predictors on recorded windows.

    Args:
        dataset: its windows have as many steps as are to be simulated.
        windows: numbers of at least two windows in random order (N,). For ``shuffled_actions``
            each is given the actions of the one after it, the last those of the first.
        mean: the mean frame (C, H, W).
        draw: how z is chosen from the prior.
        objects: to measure; None for none.
        card: what to measure for the fidelity card; None for nothing.

    Raises:
        UserError: if a loss is not finite, or ``card`` has a simulator with another number of
            initial frames.
    """
    num_steps = dataset.window_length - dataset.num_init_steps + 1
    config = dataclasses.replace(simulator.config, num_sim_steps=num_steps)
    action_windows = np.roll(windows, -1)
    if card and card.other_simulator:
        _check_initial_frames(card.other_simulator, config.num_init_steps)
    counted, found, fidelity = [], [], []
    begins = range(0, len(windows), batch_size)
    for begin in with_progress(begins, len(begins), "batch"):
        part = slice(begin, begin + batch_size)
        batch, other = (align(dataset.batch(numbers[part]).to(compute.device), config)
                        for numbers in (windows, action_windows))
        counted.append(until_first_terminal(batch.terminals).bool().cpu().numpy())
        predictions = _predictions(simulator, batch, other.actions, mean.to(compute.device), draw,
                                   compute, card)
        losses = _prediction_losses(simulator, batch, predictions, compute)
        losses |= _agent_measures(simulator.agent, batch, predictions, compute)
        without = None
        if objects:
            without = torch.from_numpy(objects.of(windows[part])).to(compute.device)
            losses |= _object_measures(objects.kinds, batch.images, without, predictions)
        if card:
            fidelity.append(_to_numpy(_fidelity(card, dataset, windows[part], batch, predictions,
                                              objects, without)))
        found.append(_to_numpy(losses))
    counts = np.concatenate(counted, axis=1)  # (T, N)
    joined, measures = _concatenate(found), _concatenate(fidelity)
    for (predictor, kind), loss in joined.items():
        measured = counts & ~np.isnan(loss) if kind.startswith((OBJECT_ERROR, OBJECT_SHOWN)
                                                               ) else counts
        if not np.isfinite(loss[measured]).all():
            raise UserError(f"the {kind} loss of the predictor '{predictor}' is not finite; the "
                            "simulator has diverged, so use an earlier model file")
        loss[~counts] = np.nan
    included = measures.pop((RECORDED, _INCLUDED), 1) == 1
    for (predictor, kind), measure in measures.items():
        if kind == PSNR and not np.isfinite(measure[included]).all():
            raise UserError(f"the frames of the predictor '{predictor}' are not finite; its "
                            "simulator has diverged, so use an earlier model file")
        measure[~included] = np.nan
    values, other_values = (
        {shown: numbers.pop((shown, kind)) for shown, each in list(numbers) if each == kind}
        for numbers, kind in ((joined, _VALUES), (measures, _OTHER_VALUES)))
    return LossOverTime(windows, action_windows, dataset.episodes_of(windows), counts, joined,
                        values, measures, other_values)


def _to_numpy(measures: dict[tuple[str, str], Tensor]) -> dict[tuple[str, str], np.ndarray]:
    return {key: measure.float().cpu().numpy() for key, measure in measures.items()}


def _concatenate(batches: list[dict[tuple[str, str], np.ndarray]]
                 ) -> dict[tuple[str, str], np.ndarray]:
    """Concatenate the windows of all batches."""
    return {key: np.concatenate([each[key] for each in batches], axis=1)
            for key in (batches[0] if batches else ())}


def _check_initial_frames(simulator: Simulator, num_init_steps: int) -> None:
    if simulator.config.num_init_steps != num_init_steps:
        raise UserError(f"the simulator to compare with starts from "
                        f"{simulator.config.num_init_steps} initial frames, but this one from "
                        f"{num_init_steps}, so they cannot be given the same windows")


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
    return stack(start, simulator.imagine(start, draw, len(actions), true_actions=actions))


@dataclasses.dataclass(frozen=True)
class _Predictions:
    """Simulations and frames of the predictors for a batch.

    Attributes:
        imagined: by the two predictors that are simulations.
        frames: by the two that show one frame at every step (B, C, H, W).
        others: images of a second simulator, if there is one (T, B, C, H, W).
        controls: images of the predictors that only the fidelity card has (T, B, C, H, W).
    """

    imagined: dict[str, Simulation]
    frames: dict[str, Tensor]
    others: dict[str, Tensor]
    controls: dict[str, Tensor]

    def simulated(self) -> dict[str, Tensor]:
        """The images of both simulators, and with another window's actions (T, B, C, H, W)."""
        return {**{name: each.images for name, each in self.imagined.items()}, **self.others}

    def images(self, like: Tensor) -> dict[str, Tensor]:
        """The images of all predictors but the controls (T, B, C, H, W)."""
        return {**self.simulated(),
                **{name: frame.expand_as(like) for name, frame in self.frames.items()}}


def _predictions(simulator: Simulator, batch: AlignedBatch, other_actions: Tensor, mean: Tensor,
                 draw: LatentSampler, compute: Compute, card: FidelityCard | None) -> _Predictions:
    others, controls = {}, {}
    with compute.autocast():
        imagined = {name: _imagine(simulator, batch, actions, draw) for name, actions in (
            (SIMULATOR, batch.actions), (SHUFFLED_ACTIONS, other_actions))}
        if card:
            controls = {name: _imagine(simulator, batch, actions, draw).images
                        for name, actions in control_actions(batch.actions).items()}
        if card and card.other_simulator:
            others[OTHER_SIMULATOR] = _imagine(card.other_simulator, batch, batch.actions,
                                               draw).images
    last = batch.initial_images[-1]
    return _Predictions(imagined, {LAST_FRAME: last, MEAN_FRAME: mean.expand_as(last)}, others,
                        controls)


def control_actions(actions: Tensor) -> dict[str, Tensor]:
    """Actions of the ``ACTION_CONTROLS``, from the recorded ones (T, B).

    ``shifted_actions`` are one step late; the first step keeps its own action, because the frame
    that it leads to is an initial one.
    """
    return {SHIFTED_ACTIONS: torch.cat([actions[:1], actions[:-1]]),
            NOOP_ACTIONS: torch.full_like(actions, NOOP)}


def _prediction_losses(simulator: Simulator, batch: AlignedBatch, predictions: _Predictions,
                       compute: Compute) -> dict[tuple[str, str], Tensor]:
    """By predictor and kind, at all steps (T, B)."""
    losses = {}
    for predictor, imagined in predictions.imagined.items():
        with compute.autocast():
            embeddings = simulator.frame_embedding(batch.images.flatten(0, 1))  # (T*B, E)
            posterior = simulator.cell.posterior_logits(
                imagined.env_h, simulator.cell.embedding_input(embeddings).unflatten(
                    0, batch.actions.shape))
        found = _imagination_losses(imagined, posterior, batch, simulator.config.kl_balance)
        losses.update({(predictor, kind): loss for kind, loss in found.items()})
    for predictor, images in predictions.images(batch.images).items():
        if predictor not in predictions.imagined:
            losses[predictor, "image"] = image_loss(images, batch.images)
    return losses


_VALUES = "values"  # of the agent, among the losses of a batch
_OTHER_VALUES = "other_agent_values"  # likewise, of an agent that is not inside
_INCLUDED = "included"  # 1 where the fidelity card includes a frame


def _agent_measures(agent: FrozenAgent, batch: AlignedBatch, predictions: _Predictions,
                    compute: Compute) -> dict[tuple[str, str], Tensor]:
    """The agent on the frames of each predictor beside itself on the recorded ones, each (T, B)."""
    num_steps, hidden = len(batch.images), batch.first_hidden
    with compute.autocast():
        recorded = agent.sequence(batch.images, hidden)
        shown = {**{name: agent.sequence(images, hidden)
                    for name, images in predictions.simulated().items()},
                 **{name: agent.unmoved(frame, num_steps, hidden)
                    for name, frame in predictions.frames.items()}}
    measures = {(RECORDED, _VALUES): recorded.values}
    for name, output in shown.items():
        measures[name, POLICY_KL], measures[name, STATE_COSINE] = compare_agents(recorded, output)
        measures[name, _VALUES] = output.values
    return measures


def _fidelity(card: FidelityCard, dataset: RolloutDataset, windows: np.ndarray,
              batch: AlignedBatch, predictions: _Predictions, objects: ObjectFrames | None,
              without: Tensor | None) -> dict[tuple[str, str], Tensor]:
    """The measures of the card by predictor and kind, (T, B) each.

    Args:
        windows: numbers of the windows (B,).
        without: recorded frames without each kind of object, uint8 (T, B, K, C, H, W).
    """
    truth, num_init_steps = batch.images, len(batch.initial_images)
    whole = torch.tensor([dataset.place(number).frame >= num_init_steps - 1
                          for number in windows.tolist()], device=truth.device)
    included = (batch.terminals.cumsum(dim=0) == 0) & whole  # (T, B)
    in_memory, moving = card.in_memory(windows, truth, num_init_steps), None
    if without is not None:
        without = without.to(truth.dtype) / 255
        movers = [number for number, moves in enumerate(objects.moving) if moves]
        moving = (without[:, :, movers] != truth.unsqueeze(2)).any(dim=3).any(dim=2)
    regions = Regions(in_memory, moving)
    measures = {(RECORDED, _INCLUDED): included}
    if (share := regions.remembered_share()) is not None:
        measures[RECORDED, REMEMBERED_SHARE] = share
    images = {**predictions.images(truth), **predictions.controls}
    for predictor, predicted in images.items():
        found = measure_frames(predicted, truth, regions)
        if without is not None:
            found |= measure_kept_objects(objects.kinds, predicted, truth, without, in_memory)
        measures |= {(predictor, kind): measure for kind, measure in found.items()}
    if card.other_agent:
        entering = card.other_agent.states_entering(windows)
        recorded = card.other_agent.sequence(truth, entering)
        measures[RECORDED, _OTHER_VALUES] = recorded.values
        for predictor, predicted in images.items():
            shown = card.other_agent.sequence(predicted, entering)
            measures[predictor, OTHER_POLICY_KL], measures[predictor, OTHER_STATE_COSINE] = (
                compare_agents(recorded, shown))
            measures[predictor, _OTHER_VALUES] = shown.values
    return measures


def _object_measures(kinds: tuple[str, ...], truth: Tensor, without: Tensor,
                     predictions: _Predictions) -> dict[tuple[str, str], Tensor]:
    """Errors on the pixels of each kind of object, and whether it is shown, each (T, B).

    Args:
        truth: recorded images (T, B, C, H, W).
        without: the same without each kind, uint8 (T, B, K, C, H, W).
    """
    without = without.to(truth.dtype) / 255
    errors_without = (without - truth.unsqueeze(2)).square().sum(dim=3)  # (T, B, K, H, W)
    masks = errors_without > 0
    sizes = masks.sum(dim=(-2, -1))  # (T, B, K)
    limits = errors_without.sum(dim=(-2, -1)) / 2
    measures = {}
    for predictor, images in predictions.images(truth).items():
        errors = (images - truth).square().sum(dim=2)  # (T, B, H, W)
        on_object = (errors.unsqueeze(2) * masks).sum(dim=(-2, -1))  # (T, B, K)
        for number, kind in enumerate(kinds):
            hidden = sizes[..., number] == 0
            mean = on_object[..., number] / (sizes[..., number] * truth.shape[2])
            shown = (on_object[..., number] < limits[..., number]).to(truth)
            measures[predictor, OBJECT_ERROR + kind] = mean.masked_fill(hidden, math.nan)
            measures[predictor, OBJECT_SHOWN + kind] = shown.masked_fill(hidden, math.nan)
    return measures


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
        ``predictor``, ``kind``, ``windows`` that reach the step (and show the object), ``mean``
        over them, ``standard_deviation`` between them, and the ends ``low_95`` and ``high_95`` of
        the mean's interval. Of the kinds ``value_correlation`` and ``other_value_correlation`` the
        mean is Pearson's correlation over the windows; where one of the values is constant there
        is no row. Of the kind ``psnr_of_mean_error`` it is the PSNR in dB of the mean squared
        error, and of ``psnr_margin`` the PSNR of the simulator with the recorded actions above
        that of the predictor, window by window.
    """
    bootstrap = ClusterBootstrap(result.episodes, seed)
    rows = []
    for (predictor, kind), loss in {**_with_pixel_errors(result), **result.fidelity,
                                    **_margins(result)}.items():
        measured = np.isfinite(loss)
        num_windows = measured.sum(axis=1)  # (T,)
        low, high = bootstrap.interval(loss, measured)
        for step in np.flatnonzero(num_windows).tolist():
            values = loss[step, measured[step]].astype(np.float64)
            spread = values.std(ddof=1) if len(values) > 1 else np.nan
            rows.append((step, predictor, kind, num_windows[step], values.mean(), spread,
                         low[step], high[step]))
            if kind == MSE:  # a monotonic function of a mean has the interval's ends as its own
                rows.append((step, predictor, PSNR_OF_MEAN_ERROR, num_windows[step],
                             psnr(values.mean()), np.nan, psnr(high[step]), psnr(low[step])))
    for kind, values, counted in (
            (VALUE_CORRELATION, result.values, result.counted),
            (OTHER_VALUE_CORRELATION, result.other_values,
             np.isfinite(result.other_values.get(RECORDED, np.empty((0, 0)))))):
        rows += _value_correlations(kind, values, counted, result.episodes, seed)
    return pd.DataFrame(rows, columns=["step", "predictor", "kind", "windows", "mean",
                                       "standard_deviation", "low_95", "high_95"])


def _value_correlations(kind: str, values: dict[str, np.ndarray], counted: np.ndarray,
                        episodes: np.ndarray, seed: int) -> list[tuple]:
    """Rows of the table: correlation of an agent's values with those on the recorded frames."""
    rows = []
    for predictor in (shown for shown in values if shown != RECORDED):
        for step in np.flatnonzero(counted.any(axis=1)).tolist():
            at = counted[step]
            pair = [values[shown][step, at] for shown in (RECORDED, predictor)]
            if min(map(np.ptp, pair)) > _CONSTANT:
                found = correlation(*pair, episodes[at], ClusterBootstrap(episodes[at], seed))
                rows.append((step, predictor, kind, at.sum(), found.value, np.nan, found.low,
                             found.high))
    return rows


def _margins(result: LossOverTime) -> dict[tuple[str, str], np.ndarray]:
    """PSNR with the recorded actions above that with others, in dB, by predictor (T, N)."""
    return {(predictor, PSNR_MARGIN): result.fidelity[SIMULATOR, PSNR]
            - result.fidelity[predictor, PSNR]
            for predictor in (SHUFFLED_ACTIONS, *ACTION_CONTROLS)
            if (predictor, PSNR) in result.fidelity}


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

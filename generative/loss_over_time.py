"""Loss over simulated steps: how long imagination stays close to the recording.

The simulator imagines windows from their initial frames with the recorded actions and latent
variables z from the prior. It is compared with three predictors that any simulator must beat:

- ``last_frame``: the last initial frame at every step;
- ``mean_frame``: the mean frame of the training episodes at every step;
- ``shuffled_actions``: the simulator itself, with the recorded actions of another window.

Two baselines have no frames; they are compared with the agent's outputs on the recorded frames:

- ``constant_policy``: the agent's mean policy in the training episodes at every step;
- ``persistence``: the agent's policy, value and hidden state at step 0, which shows the last
  initial frame, at every step.

A simulator with worlds simulates each window in a sampled world, whose seed is the window's number,
or in the recorded world, if worlds were attached to the dataset.

Only steps up to and including the first terminal step of a window count. The black frames after it
are trivial to predict; including them would make every later step look easier.

Further measures compare the agent's policy, values and hidden states on the frames of each
predictor with those on the recorded frames, starting from the same recorded hidden state. For each
kind of object, the squared error is measured on the pixels that the object covers in the recorded
frame. The object counts as shown if this error is less than half the error of the recorded frame
without the object.

A fidelity card (``generative.fidelity``) adds measures that are reported for other world models,
and these predictors:

- ``shifted_actions``: the simulator with the recorded actions one step late;
- ``noop_actions``: the simulator with the action "null" in every step;
- ``other_simulator``: a second simulator, if there is one.

The card excludes terminal frames, all frames after them, and windows in which an initial frame lies
outside the episode.

Letters in shape comments: K kinds of object (after S: classes of a latent variable), S latent
variables, E frame embedding.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from agents.frames import to_frames
from agents.networks import Policy
from common.devices import Compute
from common.errors import UserError
from common.game_constants import ACTION_NAMES
from common.progress import with_progress
from common.results import ResultStore
from common.schemas import Array, Entry, File, Json, Npy, Schema, Table, save_arrays
from generative.batches import AlignedBatch, align, in_batches
from generative.dataset import FRAME_SHAPE, RolloutDataset
from generative.fidelity import (
    OBJECT_ERROR,
    OBJECT_SHOWN,
    OTHER_POLICY_KL,
    OTHER_STATE_COSINE,
    PSNR,
    PSNR_REMEMBERED,
    REMEMBERED_SHARE,
    FidelityCard,
    measure_frames,
    measure_kept_objects,
    measure_objects,
    region_masks,
)
from generative.frozen_agent import FrozenAgent
from generative.losses import balanced_kl, until_first_terminal
from generative.networks import Draw, LatentSampler
from generative.simulator import Simulation, Simulator, Start, stack

SIMULATOR, SHUFFLED_ACTIONS, LAST_FRAME, MEAN_FRAME = PREDICTORS = (
    "simulator", "shuffled_actions", "last_frame", "mean_frame")
SHIFTED_ACTIONS, NOOP_ACTIONS = ACTION_CONTROLS = ("shifted_actions", "noop_actions")
OTHER_SIMULATOR = "other_simulator"
CONSTANT_POLICY, PERSISTENCE = AGENT_BASELINES = ("constant_policy", "persistence")
NOOP = ACTION_NAMES.index("null")
RECORDED = "recorded"  # the recorded frames, in place of a predictor
KINDS = ("image", "reward", "terminal", "agent_state", "kl")
POLICY_KL, VALUE_CORRELATION, STATE_COSINE = (
    "policy_kl", "value_correlation", "hidden_state_cosine")
VALUES, OTHER_VALUES = "agent_values", "other_agent_values"  # kinds: an agent's values
IMAGE_MSE = "image_mse"  # only in the table: mean squared error per colour value
COMPARED_STEPS = range(2, 11)
MEAN_EPISODES = 1000  # at most, per fold

_BY_WINDOW = Npy(Array(np.float32, "T N", finite=False))  # NaN where a step does not count
LOSS_OVER_TIME = Schema(
    "losses over time", "loss_over_time_experiment.py", replaced=True, results={
        "table": Entry("loss_over_time.csv", Table(
            {"step": int, "predictor": str, "kind": str, "mean": float, "low_95": float,
             "high_95": float})),
        "loss": Entry("loss_{}.npy", _BY_WINDOW),  # see ``LossOverTime.save``
        "values": Entry("agent_values_{}.npy", _BY_WINDOW),
        "card": Entry("fidelity.npz", File(), optional=True),
        "plot": Entry("loss_over_time_plot.png", File()),
        "objects_plot": Entry("objects_over_time_plot.png", File(), optional=True),
        "card_plot": Entry("fidelity_card.png", File()),
        "strip": Entry("truth_above_imagination_{}.png", File()),
        "lives": Entry("life.csv", Table(), optional=True),
        "lives_summary": Entry("life.json", Json(), optional=True),
        "worlds": Entry("worlds.json", Json(), optional=True),
        "world_samples": Entry("world_samples.png", File(), optional=True)})

Measures = dict[tuple[str, str], Tensor]
"""Measures by predictor and kind, (T, B) each."""


@dataclasses.dataclass(frozen=True)
class LossOverTime:
    """Losses of windows at every simulated step.

    Attributes:
        windows: numbers of the windows (N,).
        action_windows: for each window, number of the window whose actions the predictor
            ``shuffled_actions`` uses (N,).
        episodes: numbers of the episodes that the windows show (N,).
        counted: whether the step is not after the window's first terminal step, bool (T, N).
        losses: losses and measures by predictor and kind, float32 (T, N), NaN where a step does not
            count. See below.
        fidelity: measures of the fidelity card by predictor and kind, float32 (T, N), NaN where
            they are not defined or the card excludes the frame. The kind OTHER_VALUES holds the
            values of an agent with which the simulator was not trained, also for RECORDED frames.

    The kinds in ``losses`` are:

    - ``image``: 0.5 times the sum of squared errors of the clamped image.
    - ``reward``: 0.5 times the squared error of the reward. This kind and the next three are
      computed for SIMULATOR and SHUFFLED_ACTIONS only.
    - ``terminal``: cross-entropy of the terminal.
    - ``agent_state``: 0.5 times the sum of squared errors of the agent's hidden state after the
      step.
    - ``kl``: unweighted KL(posterior ‖ prior) in nats, where the posterior is given the true frame
      and the imagined deterministic state.
    - POLICY_KL: KL(policy on recorded frames ‖ policy on predicted frames) in nats; also for
      ``AGENT_BASELINES``.
    - STATE_COSINE: cosine similarity of the agent's hidden states on recorded and on predicted
      frames; also for PERSISTENCE.
    - VALUES: the agent's values, also for RECORDED frames and PERSISTENCE.
    - If objects are measured, for each kind of object: the mean squared error on its pixels, and
      whether it is shown (1 or 0). Both are NaN where no such object is in view.
    """

    windows: np.ndarray
    action_windows: np.ndarray
    episodes: np.ndarray
    counted: np.ndarray
    losses: dict[tuple[str, str], np.ndarray]
    fidelity: dict[tuple[str, str], np.ndarray] = dataclasses.field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Write the losses to a folder.

        The files are ``loss_<kind>_<predictor>.npy`` (``loss_<kind>.npy`` for the simulator),
        ``agent_values_<predictor>.npy`` and, with the arrays ``<kind>/<predictor>`` of the fidelity
        card, ``fidelity.npz``.
        """
        store = ResultStore(folder, LOSS_OVER_TIME)
        for (predictor, kind), loss in self.losses.items():
            if kind == VALUES:
                store.write("values", predictor, value=loss)
            else:
                store.write("loss", kind if predictor == SIMULATOR else f"{kind}_{predictor}",
                            value=loss)
        if self.fidelity:
            with store.file("card") as path:
                save_arrays(path, {f"{kind}/{predictor}": measure
                                   for (predictor, kind), measure in self.fidelity.items()})


def choose_windows(held_out: np.ndarray, most: int, seed: int) -> np.ndarray:
    """Draw ``most`` of the held-out windows (N,) at random, or all if there are fewer.

    Raises:
        UserError: if there are fewer than two windows, so that windows cannot exchange actions.
    """
    chosen = np.random.default_rng(seed).permutation(held_out)[:most]
    if len(chosen) < 2:
        raise UserError(f"loss over time needs at least 2 held-out windows, but there are only "
                        f"{len(chosen)}; record more episodes, hold out more of them, or raise "
                        "the batch size or the number of batches")
    return chosen


@dataclasses.dataclass(frozen=True)
class Means:
    """Mean frames and mean policies of one or more folds of recorded episodes.

    Attributes:
        frames: mean frames, float32 (folds, C, H, W) in [0, 1].
        policies: the agent's mean probabilities of actions (folds, A).
        folds: index of the fold whose means predict an episode, by number of the episode; 0 for
            episodes that are not listed.
    """

    frames: Tensor
    policies: Tensor
    folds: dict[int, int] = dataclasses.field(default_factory=dict)

    def of(self, episodes: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the mean frame (B, C, H, W) and mean policy (B, A) that predict episodes (B,)."""
        chosen = [self.folds.get(episode, 0) for episode in episodes.tolist()]
        return self.frames[chosen].to(device), self.policies[chosen].to(device)


def fit_means(dataset: RolloutDataset, windows: np.ndarray, policy: Policy, seed: int,
              crossed: bool = False) -> Means:
    """Compute the mean frame and the mean policy of the episodes of windows (N,).

    At most MEAN_EPISODES randomly drawn episodes are read; all their frames have the same weight.
    The policy is computed from the recorded hidden states, so it has no action noise.

    Args:
        policy: the agent that was recorded.
        crossed: divide the episodes into two folds, each of which is predicted by the means of the
            other, so that no window is predicted by its own episode.

    Raises:
        UserError: if ``crossed`` and there is only one episode.
    """
    episodes = np.random.default_rng(seed).permutation(np.unique(dataset.episodes_of(windows)))
    if not crossed:
        frame, mean_policy = _mean_of(dataset, episodes, policy)
        return Means(frame[None], mean_policy[None])
    if len(episodes) < 2:
        raise UserError("the mean frame needs an episode that is not evaluated; record more "
                        "episodes, or give --train_data_dir")
    halves = np.array_split(episodes, 2)
    frames, policies = zip(*(_mean_of(dataset, half, policy) for half in halves[::-1]))
    return Means(torch.stack(frames), torch.stack(policies),
                 {episode: fold for fold, half in enumerate(halves) for episode in half.tolist()})


@torch.no_grad()
def _mean_of(dataset: RolloutDataset, episodes: np.ndarray, policy: Policy
             ) -> tuple[Tensor, Tensor]:
    """Return the mean frame (C, H, W) and the agent's mean policy (A,) in episodes."""
    episodes = episodes[:MEAN_EPISODES]
    total, num_frames = np.zeros(FRAME_SHAPE), 0
    probabilities, num_states = torch.zeros(policy.fc_policy.out_features), 0
    for number in with_progress(episodes.tolist(), len(episodes), "episode"):
        files = dataset.folder.array_files(number)
        frames = files.frames.rows(0, files.frames.shape[0])  # (L, C, H, W)
        total += frames.sum(axis=0, dtype=np.int64)
        num_frames += len(frames)
        # Row i + 1 is the state after frame i; the terminal frame is left out.
        states = torch.from_numpy(files.hidden_states.rows(1, len(frames))).to(policy.device)
        probabilities += policy.fc_policy(states).softmax(dim=-1).sum(dim=0).cpu()
        num_states += len(states)
    return (torch.from_numpy(total / num_frames / 255).float(), probabilities / max(num_states, 1))


@torch.no_grad()
def loss_over_time(simulator: Simulator, dataset: RolloutDataset, windows: np.ndarray,
                   batch_size: int, means: Means, draw: LatentSampler, compute: Compute,
                   card: FidelityCard | None = None) -> LossOverTime:
    """Compute the losses of all predictors on recorded windows.

    Args:
        dataset: recorded rollouts; their window length determines the number of simulated steps.
            If worlds are attached, windows are simulated in them.
        windows: numbers of at least two windows in random order (N,). The predictor
            ``shuffled_actions`` uses, for each window, the actions of the next one, and for the
            last window the actions of the first.
        batch_size: windows per batch.
        means: mean frame and mean policy of other episodes.
        draw: sampler of z.
        card: settings of the fidelity card; None for no card.

    Raises:
        UserError: if a loss is not finite, or the simulator of ``card`` has another number of
            initial frames.
    """
    num_init_steps = dataset.num_init_steps
    config = dataclasses.replace(simulator.config,
                                 num_sim_steps=dataset.window_length - num_init_steps + 1)
    action_windows = np.roll(windows, -1)
    other = card and card.other_simulator
    if other and other.config.num_init_steps != num_init_steps:
        raise UserError(f"the simulator to compare with starts from {other.config.num_init_steps} "
                        f"initial frames, but this one from {num_init_steps}, so they cannot be "
                        "given the same windows")
    batches: list[list[dict]] = []
    for pairs in in_batches(np.stack([windows, action_windows], axis=1), batch_size):
        batch, other_batch = (align(dataset.batch(rows).to(compute.device), config)
                              for rows in pairs.T)
        numbers = pairs[:, 0]
        seeds = torch.from_numpy(numbers).to(compute.device)
        frame, policy = means.of(dataset.episodes_of(numbers), compute.device)
        with compute.autocast():
            start = window_start(simulator, batch, draw, seeds)
            simulations = {name: _imagine(simulator, start, actions, draw) for name, actions in (
                (SIMULATOR, batch.actions), (SHUFFLED_ACTIONS, other_batch.actions))}
            controls = {name: _imagine(simulator, start, actions, draw).images
                        for name, actions in control_actions(batch.actions).items()} if card else {}
            images = {name: simulation.images for name, simulation in simulations.items()}
            if other:
                images[OTHER_SIMULATOR] = _imagine(other, window_start(other, batch, draw, seeds),
                                                   batch.actions, draw).images
        images |= {LAST_FRAME: batch.initial_images[-1].expand_as(batch.images),
                   MEAN_FRAME: frame.expand_as(batch.images)}
        losses = _prediction_losses(simulator, batch, simulations, images, compute)
        losses |= _agent_measures(simulator.agent, compute, batch.images, batch.first_hidden,
                                  images, (POLICY_KL, STATE_COSINE, VALUES), policy.log())
        without: Tensor | None = None
        fidelity: Measures = {}
        inside = torch.ones(len(numbers), dtype=torch.bool)  # (B,)
        if card and card.objects:
            without = torch.from_numpy(card.objects.of(numbers)).to(compute.device).to(
                batch.images.dtype) / 255  # (T, B, K, C, H, W)
            losses |= {(predictor, kind): measure for predictor, predicted in images.items()
                       for kind, measure in measure_objects(
                           card.objects.kinds, predicted, batch.images, without).items()}
        if card:
            fidelity = _fidelity(card, compute, numbers, batch, {**images, **controls},
                                 without)
            inside = torch.tensor([dataset.place(number).frame >= num_init_steps - 1
                                   for number in numbers.tolist()])
        included = (batch.terminals.cumsum(dim=0) == 0) & inside.to(compute.device)  # (T, B)
        batches.append([
            {key: measure.float().cpu().numpy() for key, measure in measures.items()}
            for measures in ({"counted": until_first_terminal(batch.terminals),
                              "included": included}, losses, fidelity)])
    rows, all_losses, card_measures = (
        {key: np.concatenate([part[key] for part in parts], axis=1) for key in parts[0]}
        for parts in zip(*batches))
    counted, included = rows["counted"] == 1, rows["included"] == 1  # (T, N)
    for (predictor, kind), loss in all_losses.items():
        may_miss = kind.startswith((OBJECT_ERROR, OBJECT_SHOWN)) & np.isnan(loss)
        if not np.isfinite(loss[counted & ~may_miss]).all():
            raise UserError(f"the {kind} loss of the predictor '{predictor}' is not finite; the "
                            "simulator has diverged, so use an earlier model file")
        loss[~counted] = np.nan
    for (predictor, kind), measure in card_measures.items():
        if kind == PSNR and not np.isfinite(measure[included]).all():
            raise UserError(f"the frames of the predictor '{predictor}' are not finite; its "
                            "simulator has diverged, so use an earlier model file")
        measure[~included] = np.nan
    return LossOverTime(windows, action_windows, dataset.episodes_of(windows), counted, all_losses,
                        card_measures)


@torch.no_grad()
def truth_and_imagination(simulator: Simulator, dataset: RolloutDataset, windows: np.ndarray,
                          draw: LatentSampler, compute: Compute) -> tuple[np.ndarray, np.ndarray]:
    """Return recorded frames of windows (N,), and frames imagined with the recorded actions.

    Returns:
        Recorded and imagined frames, uint8 (N, T, H, W, C) each.
    """
    num_steps = dataset.window_length - dataset.num_init_steps + 1
    config = dataclasses.replace(simulator.config, num_sim_steps=num_steps)
    batch = align(dataset.batch(windows).to(compute.device), config)
    with compute.autocast():
        start = window_start(simulator, batch, draw,
                             torch.from_numpy(windows).to(compute.device))
        imagined = _imagine(simulator, start, batch.actions, draw).images
    return to_frames(batch.images).swapaxes(0, 1), to_frames(imagined).swapaxes(0, 1)


def window_start(simulator: Simulator, batch: AlignedBatch, draw: Draw, seeds: Tensor) -> Start:
    """Encode the initial frames of windows, in their worlds if the simulator has worlds.

    Args:
        seeds: seeds of sampled worlds, int64 (B,), if the batch has no recorded worlds.
    """
    world = batch.world if simulator.squares is not None else None
    return simulator.start_from(simulator.encode(batch.initial_images), draw, world=world,
                                images=batch.initial_images[-1], seeds=seeds)


def _imagine(simulator: Simulator, start: Start, actions: Tensor, draw: Draw) -> Simulation:
    return stack(start, simulator.imagine(start, draw, len(actions), true_actions=actions))


def control_actions(actions: Tensor) -> dict[str, Tensor]:
    """Return the actions (T, B) of the predictors ``shifted_actions`` and ``noop_actions``.

    ``shifted_actions`` are one step late; the first step keeps its own action, because its label is
    an initial frame.

    Args:
        actions: recorded actions (T, B).
    """
    return {SHIFTED_ACTIONS: torch.cat([actions[:1], actions[:-1]]),
            NOOP_ACTIONS: torch.full_like(actions, NOOP)}


def _prediction_losses(simulator: Simulator, batch: AlignedBatch,
                       simulations: dict[str, Simulation], images: dict[str, Tensor],
                       compute: Compute) -> Measures:
    """Compute the image loss of all predictors, and all ``KINDS`` of losses of the simulations.

    Args:
        images: images by predictor, including those of the simulations (T, B, C, H, W).
    """
    losses: Measures = {}
    for predictor, predicted in images.items():
        squared = (predicted - batch.images).square()  # (T, B, C, H, W)
        losses[predictor, "image"] = 0.5 * squared.flatten(2).sum(dim=-1)
        if predictor not in simulations:
            continue
        simulation = simulations[predictor]
        with compute.autocast():
            embeddings = simulator.frame_embedding(batch.images.flatten(0, 1))  # (T*B, E)
            posterior = simulator.cell.posterior_logits(
                simulation.env_h, simulator.cell.embedding_input(embeddings).unflatten(
                    0, batch.actions.shape))  # (T, B, S, K)
        state_errors = simulation.hidden_states - batch.hidden_states  # (T, B, D)
        losses |= {
            (predictor, "reward"): 0.5 * (simulation.rewards - batch.rewards).square(),
            (predictor, "terminal"): functional.binary_cross_entropy_with_logits(
                simulation.terminal_logits, batch.terminals, reduction="none"),
            (predictor, "agent_state"): 0.5 * state_errors.square().sum(dim=-1),
            (predictor, "kl"): balanced_kl(posterior, simulation.prior_logits,
                                           simulator.config.kl_balance)}
    return losses


def _agent_measures(agent: FrozenAgent, compute: Compute, truth: Tensor, entering: Tensor,
                    images: dict[str, Tensor], names: tuple[str, str, str],
                    constant: Tensor | None = None) -> Measures:
    """Compare an agent's outputs on predicted images with its outputs on recorded images.

    Args:
        truth: recorded images (T, B, C, H, W).
        entering: the agent's hidden state before the first step (B, D).
        images: predicted images by predictor (T, B, C, H, W).
        names: kinds under which three measures are returned: KL(policy on recorded images ‖ policy
            on predicted images) in nats; the cosine similarity of the hidden states; and the
            values.
        constant: log-probabilities of the constant policy (B, A); None to leave it out.
    """
    kl, cosine, value = names
    measures: Measures = {}
    with compute.autocast():
        recorded = agent.sequence(truth, entering)
        shown = {predictor: agent.sequence(predicted, entering)
                 for predictor, predicted in images.items()}

    def divergence(log_probs: Tensor) -> Tensor:
        return (recorded.log_probs.exp() * (recorded.log_probs - log_probs)).sum(dim=-1)  # (T, B)

    outputs = {predictor: (output.log_probs, output.hidden_states, output.values)
               for predictor, output in shown.items()}
    outputs[PERSISTENCE] = (recorded.log_probs[:1], recorded.hidden_states[:1].expand_as(
        recorded.hidden_states), recorded.values[:1].expand_as(recorded.values))
    for predictor, (log_probs, states, values) in outputs.items():
        measures |= {(predictor, kl): divergence(log_probs),
                     (predictor, cosine): functional.cosine_similarity(
                         recorded.hidden_states, states, dim=-1), (predictor, value): values}
    if constant is not None:
        measures[CONSTANT_POLICY, kl] = divergence(constant)
    return measures | {(RECORDED, value): recorded.values}


def _fidelity(card: FidelityCard, compute: Compute, windows: np.ndarray, batch: AlignedBatch,
              images: dict[str, Tensor], without: Tensor | None) -> Measures:
    """Compute the measures of the fidelity card.

    Args:
        windows: numbers of the windows (B,).
        images: predicted images by predictor (T, B, C, H, W).
        without: recorded images without each kind of object (T, B, K, C, H, W).
    """
    truth = batch.images
    in_memory, moving = card.in_memory(windows, truth, len(batch.initial_images)), None
    if without is not None and card.objects is not None:
        movers = [number for number, moves in enumerate(card.objects.moving) if moves]
        moving = (without[:, :, movers] != truth.unsqueeze(2)).any(dim=3).any(dim=2)
    masks = region_masks(in_memory, moving)
    measures: Measures = {}
    if PSNR_REMEMBERED in masks:
        measures[RECORDED, REMEMBERED_SHARE] = masks[PSNR_REMEMBERED].float().mean(dim=(-2, -1))
    for predictor, predicted in images.items():
        by_kind = measure_frames(predicted, truth, masks)
        if without is not None and card.objects is not None:
            by_kind |= measure_kept_objects(card.objects.kinds, predicted, truth, without,
                                            in_memory)
        measures |= {(predictor, kind): measure for kind, measure in by_kind.items()}
    if card.other_agent is not None:
        measures |= _agent_measures(
            card.other_agent, compute, truth, card.other_agent.states_entering(windows), images,
            (OTHER_POLICY_KL, OTHER_STATE_COSINE, OTHER_VALUES))
    return measures

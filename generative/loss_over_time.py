"""Loss over simulated steps: how long imagination stays close to the recording.

The simulator imagines windows from their initial frames with the recorded actions and z from the
prior. It is compared with three predictors that any simulator must beat:

- ``last_frame``: the last initial frame at every step;
- ``mean_frame``: the mean frame of the training episodes at every step;
- ``shuffled_actions``: the simulator itself, with the recorded actions of another window.

Steps count up to and including the first terminal step of their window. The black frames after it
are trivial to predict; including them would make every later step look easier.

Further measures compare the agent's policy, values and hidden states on the frames of each
predictor with those on the recorded frames, starting from the same recorded hidden state. For each
kind of object, on the pixels that it covers in the recorded frame, they report the squared error
and whether the object is shown, that is, whether the squared error is less than half of the error
of the recorded frame without the object.

A fidelity card (``generative.fidelity``) adds measures that are reported for other world models,
and these predictors:

- ``shifted_actions``: the simulator with the recorded actions one step late;
- ``noop_actions``: the simulator without any action;
- ``other_simulator``: a second simulator, if there is one.

The card excludes terminal frames, all frames after them, and windows whose initial frames lie
outside the episode.

Letters in shape comments: T simulated steps, N windows, B windows of a batch, C H W a frame, K
kinds of object.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from agents.networks import PolicyOutput
from common.devices import Compute
from common.errors import UserError
from common.game_constants import ACTION_NAMES
from common.progress import with_progress
from common.results import ResultStore
from common.schemas import Array, Entry, File, Json, Npy, Schema, Table
from generative.batches import AlignedBatch, align, as_frames
from generative.dataset import FRAME_SHAPE, RolloutDataset
from generative.fidelity import (
    OBJECT_SHOWN,
    OTHER_POLICY_KL,
    OTHER_STATE_COSINE,
    PSNR,
    REMEMBERED_SHARE,
    FidelityCard,
    Regions,
    compare_agents,
    measure_frames,
    measure_kept_objects,
    measure_objects,
)
from generative.losses import balanced_kl, until_first_terminal
from generative.networks import LatentSampler
from generative.simulator import Simulation, Simulator, stack

SIMULATOR, SHUFFLED_ACTIONS, LAST_FRAME, MEAN_FRAME = PREDICTORS = (
    "simulator", "shuffled_actions", "last_frame", "mean_frame")
SHIFTED_ACTIONS, NOOP_ACTIONS = ACTION_CONTROLS = ("shifted_actions", "noop_actions")
OTHER_SIMULATOR = "other_simulator"
NOOP = ACTION_NAMES.index("null")
RECORDED = "recorded"  # the recorded frames, in place of a predictor
KINDS = ("image", "reward", "terminal", "agent_state", "kl")
POLICY_KL, VALUE_CORRELATION, STATE_COSINE = AGENT_MEASURES = (
    "policy_kl", "value_correlation", "hidden_state_cosine")
MEAN_FRAME_EPISODES = 1000

_BY_WINDOW = Npy(Array(np.float32, "T N", finite=False))  # NaN where a step does not count
LOSS_OVER_TIME = Schema(
    "losses over time", "loss_over_time_experiment.py", replaced=True, results={
        "table": Entry("loss_over_time.csv", Table(
            {"step": int, "predictor": str, "kind": str, "mean": float})),
        "loss": Entry("loss_{}.npy", _BY_WINDOW),  # see ``LossOverTime.save``
        "values": Entry("agent_values_{}.npy", _BY_WINDOW),
        "card": Entry("fidelity.npz", File(), optional=True),
        "plot": Entry("loss_over_time_plot.png", File()),
        "objects_plot": Entry("objects_over_time_plot.png", File(), optional=True),
        "card_plot": Entry("fidelity_card.png", File()),
        "strip": Entry("truth_above_imagination_{}.png", File()),
        "lives": Entry("life.csv", Table(), optional=True),
        "lives_summary": Entry("life.json", Json(), optional=True)})

Measures = dict[tuple[str, str], Tensor]
"""Measures by predictor and kind, (T, B) each."""


@dataclasses.dataclass(frozen=True)
class LossOverTime:
    """Losses of windows at every simulated step.

    Attributes:
        windows: numbers of the windows (N,).
        action_windows: windows whose actions ``shuffled_actions`` was given (N,).
        episodes: numbers of the episodes that the windows show (N,).
        counted: whether a step counts, bool (T, N).
        losses: losses and measures by predictor and kind, float32 (T, N), NaN where a step does not
            count. Simulations by this simulator have all ``KINDS``, others only ``image``: 0.5
            times the sum of squared errors of the clamped image, 0.5 times the squared error of the
            reward, cross-entropy of the terminal, 0.5 times the sum of squared errors of the
            agent's hidden state after the step, and KL divergence of posterior (given the true
            frame and the imagined h) and prior, unweighted, in nats. All predictors have the KL
            divergence between the agent's policies on recorded and predicted frames (nats), the
            cosine similarity of its hidden states and, if objects are measured, for each kind the
            mean squared error on its pixels and whether it is shown (1 or 0), NaN where it is not
            in view.
        values: the agent's values by predictor, and on the RECORDED frames, float32 (T, N), NaN
            where a step does not count.
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
        """Kinds of object that were measured."""
        return tuple(kind.removeprefix(OBJECT_SHOWN) for predictor, kind in self.losses
                     if predictor == SIMULATOR and kind.startswith(OBJECT_SHOWN))

    def save(self, folder: Path) -> None:
        """Write one file per kind and predictor (the simulator's files omit its name), and one file
        for the card, with arrays named ``<kind>/<predictor>``."""
        store = ResultStore(folder, LOSS_OVER_TIME)
        for (predictor, kind), loss in self.losses.items():
            key = kind if predictor == SIMULATOR else f"{kind}_{predictor}"
            store.write("loss", key, value=loss)
        for predictor, values in self.values.items():
            store.write("values", predictor, value=values)
        if self.fidelity:
            arrays = {f"{kind}/{predictor}": measure
                      for (predictor, kind), measure in self.fidelity.items()}
            arrays |= {f"other_agent_values/{predictor}": values
                       for predictor, values in self.other_values.items()}
            with store.file("card") as path:
                np.savez(path, **arrays)


def choose_windows(held_out: np.ndarray, most: int, seed: int) -> np.ndarray:
    """Draw at most ``most`` of the held-out windows, without replacement.

    Raises:
        UserError: if there are fewer than two windows, so that no window can be given the actions
            of another.
    """
    chosen = np.random.default_rng(seed).permutation(held_out)[:most]
    if len(chosen) < 2:
        raise UserError(f"loss over time needs at least 2 held-out windows, but there are only "
                        f"{len(chosen)}; record more episodes, hold out more of them, or raise "
                        "the batch size or the number of batches")
    return chosen


def mean_frame(dataset: RolloutDataset, windows: np.ndarray, seed: int) -> Tensor:
    """Mean frame of the episodes that windows (N,) show, float32 (C, H, W) in [0, 1].

    All frames of at most MEAN_FRAME_EPISODES randomly drawn episodes have the same weight.
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
                   card: FidelityCard | None = None) -> LossOverTime:
    """Compute the losses of all predictors on recorded windows.

    Args:
        dataset: recorded rollouts, with windows of as many steps as are simulated.
        windows: numbers of at least two windows in random order (N,). ``shuffled_actions`` gives
            each window the actions of the next, and the last window the actions of the first.
        mean: mean frame (C, H, W).
        draw: sampler of z.
        card: settings of the fidelity card; None for no card.

    Raises:
        UserError: if a loss is not finite, or ``card`` has a simulator with another number of
            initial frames.
    """
    num_steps = dataset.window_length - dataset.num_init_steps + 1
    config = dataclasses.replace(simulator.config, num_sim_steps=num_steps)
    action_windows = np.roll(windows, -1)
    if card and card.other_simulator:
        _check_initial_frames(card.other_simulator, config.num_init_steps)
    batches = []
    begins = range(0, len(windows), batch_size)
    for begin in with_progress(begins, len(begins), "batch"):
        numbers = windows[begin:begin + batch_size]
        batch, other = (align(dataset.batch(rows).to(compute.device), config)
                        for rows in (numbers, action_windows[begin:begin + batch_size]))
        simulations, images, controls = _predict(
            simulator, batch, other.actions, mean.to(compute.device), draw, compute, card)
        losses = _prediction_losses(simulator, batch, simulations, images, compute)
        measures, values = _agent_measures(
            compute.autocast()(simulator.agent.sequence), batch.images, batch.first_hidden,
            images, POLICY_KL, STATE_COSINE)
        losses |= measures
        without: Tensor | None = None
        fidelity: Measures = {}
        other_values: dict[str, Tensor] = {}
        if card and card.objects:
            without = torch.from_numpy(card.objects.of(numbers)).to(compute.device).to(
                batch.images.dtype) / 255  # (T, B, K, C, H, W)
            losses |= {(predictor, kind): measure for predictor, predicted in images.items()
                       for kind, measure in measure_objects(
                           card.objects.kinds, predicted, batch.images, without).items()}
        inside = torch.ones(len(numbers), dtype=torch.bool)  # (B,)
        if card:
            fidelity, other_values = _fidelity(card, numbers, batch, {**images, **controls},
                                               without)
            inside = torch.tensor([dataset.place(number).frame >= dataset.num_init_steps - 1
                                   for number in numbers.tolist()])
        included = (batch.terminals.cumsum(dim=0) == 0) & inside.to(compute.device)  # (T, B)
        batches.append([_to_numpy(each) for each in (
            {"counted": until_first_terminal(batch.terminals), "included": included},
            losses, values, fidelity, other_values)])
    rows, all_losses, all_values, card_measures, card_values = map(_concatenate, zip(*batches))
    counted, included = rows["counted"] == 1, rows["included"] == 1  # (T, N)
    for (predictor, kind), loss in (*all_losses.items(), *(
            ((predictor, "values"), loss) for predictor, loss in all_values.items())):
        measured = counted & ~np.isnan(loss) if kind.startswith(("object_", OBJECT_SHOWN)
                                                                ) else counted
        if not np.isfinite(loss[measured]).all():
            raise UserError(f"the {kind} loss of the predictor '{predictor}' is not finite; the "
                            "simulator has diverged, so use an earlier model file")
        loss[~counted] = np.nan
    for (predictor, kind), measure in card_measures.items():
        if kind == PSNR and not np.isfinite(measure[included]).all():
            raise UserError(f"the frames of the predictor '{predictor}' are not finite; its "
                            "simulator has diverged, so use an earlier model file")
    for measure in (*card_measures.values(), *card_values.values()):
        measure[~included] = np.nan
    return LossOverTime(windows, action_windows, dataset.episodes_of(windows), counted, all_losses,
                        all_values, card_measures, card_values)


def _to_numpy(measures: Mapping) -> dict:
    return {key: measure.float().cpu().numpy() for key, measure in measures.items()}


def _concatenate(batches: Sequence[dict]) -> dict:
    """Concatenate the windows of all batches."""
    return {key: np.concatenate([batch[key] for batch in batches], axis=1) for key in batches[0]}


def _check_initial_frames(simulator: Simulator, num_init_steps: int) -> None:
    if simulator.config.num_init_steps != num_init_steps:
        raise UserError(f"the simulator to compare with starts from "
                        f"{simulator.config.num_init_steps} initial frames, but this one from "
                        f"{num_init_steps}, so they cannot be given the same windows")


@torch.no_grad()
def truth_and_imagination(simulator: Simulator, dataset: RolloutDataset, windows: np.ndarray,
                          draw: LatentSampler, compute: Compute) -> tuple[np.ndarray, np.ndarray]:
    """Return the recorded and the imagined frames of windows, uint8 (N, T, H, W, C) each."""
    num_steps = dataset.window_length - dataset.num_init_steps + 1
    config = dataclasses.replace(simulator.config, num_sim_steps=num_steps)
    batch = align(dataset.batch(windows).to(compute.device), config)
    with compute.autocast():
        imagined = _imagine(simulator, batch, batch.actions, draw).images
    return as_frames(batch.images).swapaxes(0, 1), as_frames(imagined).swapaxes(0, 1)


def _imagine(simulator: Simulator, batch: AlignedBatch, actions: Tensor,
             draw: LatentSampler) -> Simulation:
    start = simulator.start_from(simulator.encode(batch.initial_images), draw)
    return stack(start, simulator.imagine(start, draw, len(actions), true_actions=actions))


def _predict(simulator: Simulator, batch: AlignedBatch, other_actions: Tensor, mean: Tensor,
             draw: LatentSampler, compute: Compute, card: FidelityCard | None,
             ) -> tuple[dict[str, Simulation], dict[str, Tensor], dict[str, Tensor]]:
    """Run the predictors on a batch.

    Returns:
        The simulations for which all losses are computed; the images of all predictors; and the
        images of the predictors used only by the fidelity card, (T, B, C, H, W) each.
    """
    other, controls = {}, {}
    with compute.autocast():
        simulations = {name: _imagine(simulator, batch, actions, draw) for name, actions in (
            (SIMULATOR, batch.actions), (SHUFFLED_ACTIONS, other_actions))}
        if card:
            controls = {name: _imagine(simulator, batch, actions, draw).images
                        for name, actions in control_actions(batch.actions).items()}
        if card and card.other_simulator:
            other[OTHER_SIMULATOR] = _imagine(card.other_simulator, batch, batch.actions,
                                              draw).images
    images = {**{name: simulation.images for name, simulation in simulations.items()}, **other,
              LAST_FRAME: batch.initial_images[-1].expand_as(batch.images),
              MEAN_FRAME: mean.expand_as(batch.images)}
    return simulations, images, controls


def control_actions(actions: Tensor) -> dict[str, Tensor]:
    """Actions of the ``ACTION_CONTROLS`` (T, B), from the recorded actions (T, B).

    ``shifted_actions`` are one step late; the first step keeps its own action, because its label is
    an initial frame.
    """
    return {SHIFTED_ACTIONS: torch.cat([actions[:1], actions[:-1]]),
            NOOP_ACTIONS: torch.full_like(actions, NOOP)}


def _prediction_losses(simulator: Simulator, batch: AlignedBatch,
                       simulations: dict[str, Simulation], images: dict[str, Tensor],
                       compute: Compute) -> Measures:
    """Compute all losses of the simulations, and the image losses of the other predictors."""
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


def _agent_measures(sequence: Callable[[Tensor, Tensor], PolicyOutput], truth: Tensor,
                    entering: Tensor, images: dict[str, Tensor], kl: str, cosine: str,
                    ) -> tuple[Measures, dict[str, Tensor]]:
    """Compare an agent's outputs on predicted images with its outputs on recorded images.

    Args:
        sequence: function that runs the agent, see ``FrozenAgent.sequence``.
        truth: recorded images (T, B, C, H, W).
        entering: the agent's hidden state before the first step (B, D).
        kl, cosine: names of the two measures.

    Returns:
        The measures, and the agent's values by predictor and on the RECORDED images, (T, B) each.
    """
    recorded = sequence(truth, entering)
    measures, values = {}, {RECORDED: recorded.values}
    for predictor, predicted in images.items():
        output = sequence(predicted, entering)
        measures[predictor, kl], measures[predictor, cosine] = compare_agents(recorded, output)
        values[predictor] = output.values
    return measures, values


def _fidelity(card: FidelityCard, windows: np.ndarray, batch: AlignedBatch,
              images: dict[str, Tensor], without: Tensor | None,
              ) -> tuple[Measures, dict[str, Tensor]]:
    """Compute the measures of the card, and the values of the other agent by predictor.

    Args:
        windows: numbers of the windows (B,).
        without: recorded images without each kind of object (T, B, K, C, H, W).
    """
    truth = batch.images
    in_memory, moving = card.in_memory(windows, truth, len(batch.initial_images)), None
    if without is not None and card.objects is not None:
        movers = [number for number, moves in enumerate(card.objects.moving) if moves]
        moving = (without[:, :, movers] != truth.unsqueeze(2)).any(dim=3).any(dim=2)
    regions = Regions(in_memory, moving)
    measures: Measures = {}
    if (share := regions.remembered_share()) is not None:
        measures[RECORDED, REMEMBERED_SHARE] = share
    for predictor, predicted in images.items():
        by_kind = measure_frames(predicted, truth, regions)
        if without is not None and card.objects is not None:
            by_kind |= measure_kept_objects(card.objects.kinds, predicted, truth, without,
                                            in_memory)
        measures |= {(predictor, kind): measure for kind, measure in by_kind.items()}
    if card.other_agent is None:
        return measures, {}
    compared, values = _agent_measures(
        card.other_agent.sequence, truth, card.other_agent.states_entering(windows), images,
        OTHER_POLICY_KL, OTHER_STATE_COSINE)
    return {**measures, **compared}, values

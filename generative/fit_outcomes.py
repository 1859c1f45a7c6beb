r"""Training of the outcomes, see ``FitOutcomesOptions``.

The head that predicts deaths, coins and rewards takes a small part of a simulator's computations,
and deaths are rare. This script first runs the simulator on windows in their recorded worlds, half
of them windows that end, and stores the inputs of the head in each step. Then it trains the head on
the stored inputs; all other networks stay unchanged. Windows are weighted by the inverse of the
share that is used, so that probabilities stay calibrated.

    python -m generative.fit_outcomes --agent_file <agent> --model_file <simulator> \
        --data_dir <recording>/data --output <folder>/model.pt
"""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.nn import functional

from common.cli import count, output_file, seed
from common.devices import Compute
from common.errors import UserError
from common.options import ComputeOptions, OutputFileOptions, command, option
from common.progress import with_progress
from generative.batches import EnvState, align, in_batches
from generative.dataset import RolloutDataset
from generative.losses import until_first_terminal
from generative.networks import LatentSampler
from generative.runs import open_for_export, save_changed_copy
from generative.simulator import Simulator
from generative.spatial_decoder import OutcomeHead, SpatialDecoder
from generative.world_data import WORLDS_NAME, attach_worlds

_AT_A_TIME = 64  # windows per batch while the inputs are computed
_BATCH_SIZE = 1024  # steps per batch of the training
_HELD_OUT = 1500  # windows, half of them with an end, that choose the number of batches
_CHECKS = 20  # times that the head is measured on them
SURVIVES, DIES, WINS = range(3)


@dataclasses.dataclass(frozen=True)
class OutcomeExamples:
    """Inputs and labels of the head in N steps.

    Attributes:
        features: features of the decoder, float16 (N, F).
        crops: pixels around the player, uint8 (N, C, CROP, CROP).
        outcomes: SURVIVES, DIES or WINS, int64 (N,).
        rewards: recorded rewards (N,).
        weights: weights (N,) of the steps.
    """

    features: Tensor
    crops: Tensor
    outcomes: Tensor
    rewards: Tensor
    weights: Tensor

    def rows(self, rows: Tensor) -> OutcomeExamples:
        """Select steps by their rows (B,)."""
        return OutcomeExamples(*(tensor[rows] for tensor in vars(self).values()))

    def judged(self, head: OutcomeHead) -> Tensor:
        """Return the outputs of ``OutcomeHead.judge`` (N, 3)."""
        return head.judge(self.features.float(), self.crops.float() / 255)


def draw_windows(dataset: RolloutDataset, numbers: np.ndarray, most: int,
                 order: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw windows, half of them with an end if there are enough.

    Args:
        numbers: numbers of the windows to draw from.
        most: largest number of windows.

    Returns:
        Numbers of the windows (N,), and the inverse of the share of their kind that is drawn (N,).
    """
    ends = dataset.end_inside[numbers]
    drawn, weights = [], []
    for kind, number in ((numbers[ends], most // 2), (numbers[~ends], most - most // 2)):
        chosen = order.permutation(kind)[:number]
        drawn.append(chosen)
        weights.append(np.full(len(chosen), len(kind) / max(len(chosen), 1)))
    windows, of_window = np.concatenate(drawn), np.concatenate(weights)
    rows = windows.argsort()
    return windows[rows], of_window[rows]


@torch.no_grad()
def examples(simulator: Simulator, compute: Compute, dataset: RolloutDataset,
             windows: np.ndarray, weights: np.ndarray) -> OutcomeExamples:
    """Simulate windows (W,) with the recorded actions in their recorded worlds, and return the
    inputs of the head in all steps until their end.

    Args:
        weights: weights of the windows (W,).
    """
    decoder, draw = simulator.decoder, LatentSampler("mode")
    assert isinstance(decoder, SpatialDecoder) and isinstance(decoder.outcome, OutcomeHead)
    seen: list[tuple[Tensor, Tensor]] = []
    hook = decoder.outcome.register_forward_pre_hook(lambda head, inputs: seen.append(
        (inputs[0].half(), (255 * head.crop(inputs[1]).float()).round().byte())))
    parts = []
    try:
        for rows in with_progress(list(in_batches(np.arange(len(windows)), _AT_A_TIME)),
                                  -(-len(windows) // _AT_A_TIME), "batch"):
            batch = align(dataset.batch(windows[rows]).to(compute.device), simulator.config)
            with compute.autocast():
                start = simulator.start_from(simulator.encode(batch.initial_images), draw,
                                             world=batch.world)
                state = EnvState(start.env_h, start.z, start.world)
                seen.clear()
                for action in simulator.one_hot_actions(batch.actions):
                    state, _ = simulator.advance(state, action, draw)
            alive = until_first_terminal(batch.terminals) > 0  # (T, B)
            outcome = torch.where(batch.terminals > 0,
                                  torch.where(batch.rewards > 0, WINS, DIES), SURVIVES)
            weight = torch.as_tensor(weights[rows], dtype=torch.float32).to(compute.device)
            parts.append([torch.stack(tensors)[alive] for tensors in zip(*seen)]
                         + [outcome[alive], batch.rewards[alive],
                            weight.expand(alive.shape)[alive]])
    finally:
        hook.remove()
    return OutcomeExamples(*(torch.cat(tensors) for tensors in zip(*parts)))


def loss(head: OutcomeHead, batch: OutcomeExamples) -> Tensor:
    """Compute the weighted mean of the outcome's cross-entropy and half the squared error of the
    reward."""
    reward, *logits = batch.judged(head).unbind(dim=-1)
    entropy = functional.cross_entropy(
        torch.stack([torch.zeros_like(reward), *logits], dim=-1), batch.outcomes, reduction="none")
    losses = entropy + (reward - batch.rewards).square() / 2
    return (batch.weights * losses).sum() / batch.weights.sum()


@torch.no_grad()
def measure(head: OutcomeHead, held_out: OutcomeExamples) -> tuple[float, float]:
    """Return the loss, and the weighted AUC of a death, in held-out steps."""
    parts = [held_out.rows(rows) for rows in torch.arange(len(held_out.outcomes)).split(4096)]
    weights = torch.stack([part.weights.sum() for part in parts])
    losses = torch.stack([loss(head, part) for part in parts])
    deaths = torch.cat([part.judged(head)[:, 1] for part in parts]).cpu().numpy()
    return (float((weights * losses).sum() / weights.sum()),
            roc_auc_score((held_out.outcomes == DIES).cpu().numpy(), deaths,
                          sample_weight=held_out.weights.cpu().numpy()))


def train(head: OutcomeHead, train_on: OutcomeExamples, held_out: OutcomeExamples,
          num_batches: int, lr: float, generator: torch.Generator) -> list[tuple[float, float]]:
    """Train with AdamW, while the learning rate falls linearly to 0, and keep the weights with the
    smallest loss in held-out steps.

    Returns:
        Results of ``measure``, before the training and after each of its parts.
    """
    head.requires_grad_(True).train()
    optimizer = torch.optim.AdamW(head.parameters(), lr, betas=(0.9, 0.99), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 1 - done / num_batches)
    measured, best = [measure(head, held_out)], copy.deepcopy(head.state_dict())
    for number in with_progress(range(1, num_batches + 1), num_batches, "batch"):
        rows = torch.randint(len(train_on.outcomes), (_BATCH_SIZE,), generator=generator)
        batch = train_on.rows(rows)
        optimizer.zero_grad()
        loss(head, batch).backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if number % max(num_batches // _CHECKS, 1) == 0:
            measured.append(measure(head, held_out))
            if measured[-1] <= min(measured):
                best = copy.deepcopy(head.state_dict())
    head.load_state_dict(best)
    head.requires_grad_(False).eval()
    return measured


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitOutcomesOptions(OutputFileOptions, ComputeOptions):
    """Train only the head of a simulator with worlds that predicts deaths, coins and rewards, much
    faster than with all networks.
    """

    agent_file: Path = option(help="agent inside the simulator")
    model_file: Path = option(help="simulator with worlds")
    data_dir: Path = option(help="recording with worlds (record.py --worlds)")
    num_windows: int = option(
        12000, "maximum number of training windows, about 35 kB of memory each", type=count)
    num_batches: int = option(6000, f"batches of {_BATCH_SIZE} steps", type=count)
    lr: float = option(1e-3, "initial learning rate")
    seed: int = option(0, "seed of every random choice", type=seed)
    output: Path = option(help="simulator file to write", type=output_file)


def fit_outcomes(options: FitOutcomesOptions) -> Path:
    """Train the head of the outcomes, and return the file of the simulator with it."""
    options.check_output()
    run, simulator = open_for_export(options.model_file, options.agent_file, options.output,
                                     options.compute)
    config, decoder = simulator.config, simulator.decoder
    if not (isinstance(decoder, SpatialDecoder) and isinstance(decoder.outcome, OutcomeHead)
            and config.world_squares):
        raise UserError("only a simulator with worlds has a head of outcomes to train")
    dataset = RolloutDataset(options.data_dir, config.num_init_steps, config.num_sim_steps)
    split = dataset.split(run.training.held_out_fraction, run.seed)
    _, numbers = attach_worlds(options.output.parent / WORLDS_NAME, dataset,
                               config.world_squares, simulator.squares)
    split, order = split.among(numbers), np.random.default_rng(options.seed)
    held_out, train_on = (
        examples(simulator, options.compute, dataset, *draw_windows(dataset, part, most, order))
        for part, most in ((split.held_out, _HELD_OUT), (split.train, options.num_windows)))
    for name, part in (("training", train_on), ("held-out", held_out)):
        counts = torch.bincount(part.outcomes, minlength=3).tolist()
        print(f"{len(part.outcomes)} {name} steps, {counts[DIES]} deaths, {counts[WINS]} coins",
              flush=True)
        if not all(counts):
            raise UserError(f"the {name} windows of {options.data_dir} do not show deaths, coins "
                            "and steps without an end; record more episodes")
    measured = train(decoder.outcome, train_on, held_out, options.num_batches, options.lr,
                     torch.Generator().manual_seed(options.seed))
    for name, (entropy, auc) in (("before", measured[0]), ("after", min(measured))):
        print(f"{name}: held-out loss {entropy:.4f}, AUC of a death {auc:.4f}")
    return save_changed_copy(simulator, options.model_file, options.output)


main = command(FitOutcomesOptions, fit_outcomes)

if __name__ == "__main__":
    raise SystemExit(main())

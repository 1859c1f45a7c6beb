"""Losses of the simulator, and the weights of pixels in the image loss.

Letters in shape comments: T simulated steps, B batch, C H W an image (elsewhere, H is the
deterministic state), S latent variables, K classes of each, D agent hidden state, V bottleneck
vector.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from common.errors import UserError
from common.progress import with_progress
from generative.batches import AlignedBatch, true_phase
from generative.config import SimulatorConfig
from generative.dataset import RolloutDataset
from generative.simulator import ALL_WINDOWS, Simulation, Start
from generative.spatial import split_state

CAMERA_KNEE = 0.1  # error in pixels where the camera's loss turns from quadratic to linear


@dataclasses.dataclass(frozen=True)
class LossScales:
    """Weights of the losses, named after the published flags.

    Attributes:
        obs: weight of the image loss.
        hx: weight of the loss of the agent's hidden state.
        done: weight of the terminal loss.
        kl: weight of the KL loss, applied in addition to ``SimulatorConfig.kl_weight``.

    Raises:
        UserError: if a weight is negative or not finite.
    """

    obs: float = 1.0
    hx: float = 1.0
    reward: float = 1.0
    done: float = 1.0
    kl: float = 1.0

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if not 0 <= getattr(self, field.name) < math.inf:
                raise UserError(f"loss_scale_{field.name} must be a number from 0 up, not "
                                f"{getattr(self, field.name)}")


UNSCALED = LossScales()


@dataclasses.dataclass(frozen=True)
class SimulatorLosses:
    """Terms of the loss, each multiplied by its weight, and their total.

    Attributes:
        image: 0.5 times the sum of squared errors of the image (T, B), which is clamped to [0, 1]
            in the spatial architecture, and unclamped in the vector architecture.
        reward: 0.5 times the squared error of the reward (T, B).
        terminal: binary cross-entropy of the terminal (T, B).
        agent_state: 0.5 times the sum of squared errors of the agent's hidden state (T, B); 0 after
            the first terminal step, and in windows in which the agent does not act.
        kl: balanced KL divergence of posterior and prior (T, B).
        update: norm of the change of the environment's deterministic state in a step (T, B).
        bottleneck: crowding of the batch's vectors on the sphere, see ``vector_crowding`` ().
        first_hidden: sum of squared errors of the agent's hidden state before the first step (B,).
        first_action: cross-entropy of the first step's input action (B,).
        camera: smooth L1 error of the camera's displacement, 0 from the first terminal step on
            (T, B). The first step has the error of the velocity instead, plus the squared error of
            the phase. None in the vector architecture.
    """

    image: Tensor
    reward: Tensor
    terminal: Tensor
    agent_state: Tensor
    kl: Tensor
    update: Tensor
    bottleneck: Tensor
    first_hidden: Tensor
    first_action: Tensor
    camera: Tensor | None = None

    @property
    def per_step(self) -> Tensor:
        """Sum of all per-step terms (T, B)."""
        total = (self.image + self.reward + self.terminal + self.agent_state + self.kl
                 + self.update)
        return total if self.camera is None else total + self.camera

    def until_end(self, terminals: Tensor) -> SimulatorLosses:
        """Return losses whose image loss is 0 from the first terminal step on, and whose reward and
        terminal losses are 0 after it.

        Args:
            terminals: terminal labels, 0 or 1 (T, B).
        """
        alive = until_first_terminal(terminals)  # (T, B)
        return dataclasses.replace(self, image=self.image * (alive * (1 - terminals)),
                                   reward=self.reward * alive, terminal=self.terminal * alive)

    def means(self) -> dict[str, Tensor]:
        """Return the weighted terms by name, summed over time and averaged over the batch, () each.
        """
        return {name: (term.sum(dim=0) if term.ndim == 2 else term).mean()
                for name, term in vars(self).items() if term is not None}

    @property
    def total(self) -> Tensor:
        """Total loss (): summed over time, averaged over the batch."""
        start = (self.first_hidden + self.first_action).mean()
        return self.per_step.sum(dim=0).mean() + self.bottleneck + start

    def share_of_total(self, share: float) -> Tensor:
        """Return the loss () of a part of a batch.

        The gradients of all parts sum to the gradient of the whole batch's ``total``. The
        bottleneck term covers the whole batch, so it is not scaled.

        Args:
            share: share of the batch's windows in this part.
        """
        start = (self.first_hidden + self.first_action).mean()
        return share * (self.per_step.sum(dim=0).mean() + start) + self.bottleneck


def simulator_losses(simulation: Simulation, batch: AlignedBatch, config: SimulatorConfig,
                     scales: LossScales = UNSCALED, pixel_weights: Tensor | None = None,
                     all_vectors: Tensor | None = None, true_camera: Tensor | None = None,
                     agent_windows: slice = ALL_WINDOWS) -> SimulatorLosses:
    """Compute the losses of a training pass against its labels.

    Args:
        simulation: output of the training pass, ``Simulator.forward``.
        config: settings of the simulator, among them the weights of the KL, update, bottleneck and
            camera losses.
        scales: further weights of the losses.
        pixel_weights: weights of the squared errors of the images (T, B, H, W); None for 1.
        all_vectors: bottleneck vectors of the whole batch (B_all, V) if the simulation covers only
            some of its windows; None if it covers all windows.
        true_camera: velocity and displacement of the camera, see ``batches.true_camera``
            (T, B, 4); None for no camera loss.
        agent_windows: slice of the windows in which the agent acted, which is every n-th window of
            the whole batch. The agent-state loss is divided by the share of these windows, so that
            its batch mean estimates the mean over all windows.

    Raises:
        ValueError: if the simulation has no posterior, or no camera although ``true_camera`` is
            given.
    """
    if simulation.posterior_logits is None:
        raise ValueError("the KL loss needs a pass with true images")
    start, alive = simulation.start, until_first_terminal(batch.terminals)  # alive: (T, B)
    vectors = start.bottleneck_vec if all_vectors is None else all_vectors  # (B_all, V)

    # Clamped images may be exactly black; the published loss is that of the unclamped image.
    images = simulation.images if config.is_spatial else simulation.raw_images
    squared_images = (images - batch.images).square()  # (T, B, C, H, W)
    if pixel_weights is not None:
        squared_images = squared_images * pixel_weights.unsqueeze(2)
    squared_states = (simulation.hidden_states - batch.hidden_states[:, agent_windows]).square()
    num, interval = len(vectors), agent_windows.step or 1
    agent_state = torch.zeros_like(alive)
    agent_state[:, agent_windows] = (scales.hx * 0.5 * squared_states.sum(dim=-1)
                                     * alive[:, agent_windows]) / (-(-num // interval) / num)
    camera = None if simulation.camera is None else torch.zeros_like(alive)
    if true_camera is not None:
        if simulation.camera is None:
            raise ValueError("the camera's loss needs a training pass of the spatial architecture")
        errors = camera_errors(simulation.camera, true_camera)
        camera = config.camera_loss_weight * errors * alive * (1 - batch.terminals)
        phase, label = split_state(start.env_h, config).camera.phase, true_phase(batch)  # (B, 4)
        label = torch.where(label.isnan(), phase.detach(), label)
        phase_errors = (phase - label).square().sum(dim=-1)
        camera = torch.cat([camera[:1] + config.camera_loss_weight * phase_errors, camera[1:]])
    terminal = functional.binary_cross_entropy_with_logits(
        simulation.terminal_logits, batch.terminals, reduction="none")
    reward = (simulation.rewards - batch.rewards).square()
    if simulation.death_logits is not None:
        terminal = outcome_entropy(simulation, batch)
        if batch.outcome_weights is not None:
            terminal, reward = (term * batch.outcome_weights for term in (terminal, reward))
    return SimulatorLosses(
        image=scales.obs * 0.5 * squared_images.flatten(2).sum(dim=-1),
        reward=scales.reward * 0.5 * reward,
        terminal=scales.done * terminal,
        agent_state=agent_state,
        kl=scales.kl * config.kl_weight * balanced_kl(
            simulation.posterior_logits, simulation.prior_logits, config.kl_balance),
        update=config.env_update_penalty_weight * _update_norms(start, simulation.env_h),
        bottleneck=config.bottleneck_loss_weight * vector_crowding(vectors),
        first_hidden=(start.agent_hidden - batch.first_hidden).square().sum(dim=-1),
        first_action=functional.cross_entropy(start.action_logits, batch.actions[0],
                                              reduction="none"),
        camera=camera)


def outcome_entropy(simulation: Simulation, batch: AlignedBatch) -> Tensor:
    """Compute the cross-entropy of the outcome of each step (T, B): no end, a death, or an end with
    a reward."""
    assert simulation.death_logits is not None
    # Log-probabilities of an end and of a death follow from their logits.
    survives = functional.logsigmoid(-simulation.terminal_logits)
    dies = functional.logsigmoid(simulation.death_logits)
    # Logit of the coin: an end that is not a death.
    ends = functional.logsigmoid(simulation.terminal_logits)
    coin = ends + torch.log1p(-(dies - ends).exp().clamp(max=1 - 1e-6))
    died = batch.terminals * (batch.rewards <= 0)
    return -torch.where(died > 0, dies, torch.where(batch.terminals > 0, coin, survives))


def camera_errors(predicted: Tensor, recorded: Tensor) -> Tensor:
    """Compute smooth L1 errors of the camera's motion (T, B), summed over both directions.

    The first step, in which the displacement is always 0, has the error of the velocity; all later
    steps have the error of the displacement.

    Args:
        predicted: velocity and displacement to the right and down, in pixels (T, B, 4).
        recorded: velocity and displacement to the right and down, in pixels (T, B, 4).
    """
    inputs, targets = (torch.cat([motion[:1, :, :2], motion[1:, :, 2:]])
                       for motion in (predicted, recorded))
    return functional.smooth_l1_loss(inputs, targets, reduction="none",
                                     beta=CAMERA_KNEE).sum(dim=-1)


def until_first_terminal(terminals: Tensor) -> Tensor:
    """Return a mask (T, B): 1 up to and including the first terminal step, 0 after it.

    Args:
        terminals: terminal labels, 0 or 1 (T, B).
    """
    ended_before = terminals.cumsum(dim=0) - terminals
    return (ended_before == 0).to(terminals)


def balanced_kl(posterior_logits: Tensor, prior_logits: Tensor, balance: float) -> Tensor:
    """Compute the balanced KL divergence of posterior and prior, summed over latent variables.

    (1 - balance)·KL(post ‖ sg(prior)) + balance·KL(sg(post) ‖ prior), where sg is stop-gradient:
    the two terms have the same value but train one distribution each (Hafner et al. 2021,
    "Mastering Atari with discrete world models", algorithm 2).

    Args:
        posterior_logits: logits of the posterior (T, B, S, K).
        prior_logits: logits of the prior (T, B, S, K).
        balance: share of the loss that trains the prior.

    Returns:
        Divergence in nats (T, B).
    """
    to_posterior = _kl(posterior_logits, prior_logits.detach())
    to_prior = _kl(posterior_logits.detach(), prior_logits)
    return (1 - balance) * to_posterior + balance * to_prior


def _kl(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    log_p, log_q = torch.log_softmax(p_logits, dim=-1), torch.log_softmax(q_logits, dim=-1)
    return (log_p.exp() * (log_p - log_q)).sum(dim=(-2, -1))  # (T, B)


def measure(simulation: Simulation, losses: SimulatorLosses, vectors: Tensor) -> dict[str, Tensor]:
    """Compute the logged metrics of a batch, named as in ``runs.measures_of``, each ().

    Losses are weighted, summed over time and averaged over the batch. Entropies and ``kl_nats`` are
    in nats per step, summed over the latent variables. ``vector_distance`` is the mean distance
    between two bottleneck vectors of the batch: 0 if all are equal, about 1.41 if they are spread
    over the sphere.

    Args:
        vectors: bottleneck vectors of the whole batch (B_all, V); the simulation may cover only
            some of its windows.

    Raises:
        ValueError: if the simulation has no posterior.
    """
    if simulation.posterior_logits is None:
        raise ValueError("the KL divergence needs a pass with true images")
    posterior, prior = simulation.posterior_logits.detach(), simulation.prior_logits.detach()
    measures = {"loss": losses.total,
                **{f"loss_{name}": term for name, term in losses.means().items()},
                "kl_nats": balanced_kl(posterior, prior, 0.5).mean(),
                "posterior_entropy": _entropy(posterior), "prior_entropy": _entropy(prior),
                "vector_distance": torch.pdist(vectors).mean()}
    return {name: value.detach() for name, value in measures.items()}


def _entropy(logits: Tensor) -> Tensor:
    log_probs = torch.log_softmax(logits, dim=-1)  # (T, B, S, K)
    return -(log_probs.exp() * log_probs).sum(dim=(-2, -1)).mean()


def vector_crowding(vectors: Tensor) -> Tensor:
    """Compute the crowding, a scalar, of vectors (B, V) on the unit sphere.

    It is a uniformity loss similar to that of Wang and Isola (2020, "Understanding contrastive
    representation learning"). The crowding is log Σᵢⱼ exp(mᵢⱼ), where mᵢⱼ = 2·cos(vᵢ, vⱼ) − 2 if i
    ≠ j, and mᵢᵢ = 1. It is smallest when the vectors are spread over the whole sphere.
    """
    unit = functional.normalize(vectors, dim=-1)
    closeness = 2 * unit @ unit.T - 2  # (B, B)
    diagonal = torch.eye(len(vectors), dtype=torch.bool, device=vectors.device)
    return closeness.masked_fill(diagonal, 1.0).flatten().logsumexp(dim=0)


def _update_norms(start: Start, env_h: Tensor) -> Tensor:
    before = torch.cat([start.env_h.unsqueeze(0), env_h[:-1]])  # (T, B, H)
    return torch.linalg.vector_norm(env_h - before, dim=-1)  # (T, B)


_LEVELS = 8  # bins per colour channel, so that there are 512 colours
_FRAMES = 2000  # number of frames in which colours are counted
_LARGEST = 30.0  # upper limit of a weight before scaling: very rare colours are noise


class PixelWeights:
    """Weights of pixels by the rarity of their colour; weighted by ``shares``, their mean is 1.

    Small objects can matter to an agent: a coin is 20 of 4 096 pixels. Their share of the squared
    error is just as small, so a simulator can ignore them. If there are few colours, as in Procgen
    without backgrounds, weighting by the rarity of colours increases this share (following the
    rebalancing of colours in Zhang, Isola and Efros 2016, "Colorful image colorization", section
    2.2).

    Args:
        shares: share of each colour among the pixels (512,), on the device of the images.
        rarity: exponent; 0 weights all pixels equally, 1 weights all colours equally.
    """

    def __init__(self, shares: Tensor, rarity: float):
        typical = shares.square().sum()  # mean share of a pixel's colour
        weights = (shares.clamp(min=1e-12) / typical).pow(-rarity).clamp(max=_LARGEST)
        self._weights = (weights / (weights * shares).sum()).float()

    def __call__(self, images: Tensor) -> Tensor:
        """Return the weights (…, H, W) of images (…, 3, H, W) in [0, 1]."""
        return self._weights[_colours((images * 255).round().long())]


def count_colours(dataset: RolloutDataset, windows: np.ndarray, seed: int) -> Tensor:
    """Measure the share of each colour (512,) in the last initial frames of random windows.

    Args:
        windows: numbers of the windows to choose from; at most 2 000 of them are drawn.
    """
    chosen = np.random.default_rng(seed).permutation(windows)[:_FRAMES]
    total = torch.zeros(_LEVELS ** 3, dtype=torch.float64)
    for begin in with_progress(range(0, len(chosen), 100), -(-len(chosen) // 100), "batch"):
        frames = dataset.batch(chosen[begin:begin + 100]).frames[dataset.num_init_steps - 1]
        total += torch.bincount(_colours(frames.long()).flatten(), minlength=len(total))
    return total / total.sum()


def _colours(values: Tensor) -> Tensor:
    """Return the colour of each pixel, from 0 to 511.

    Args:
        values: images (…, 3, H, W) with values from 0 to 255.

    Returns:
        Colours (…, H, W).
    """
    red, green, blue = (values * _LEVELS // 256).unbind(dim=-3)
    return (red * _LEVELS + green) * _LEVELS + blue

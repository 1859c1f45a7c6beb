"""Objectives of a search: targets, their values in recorded starts, and the starts' density.

A target is a scalar that is read from the agent's outputs, hidden state or layers at a step of a
rollout. Its values in recorded starts give
the scale on which optimised starts are scored.

The encoder gives one vector per window, so the aggregate posterior of the starts (Hoffman and
Johnson 2016; Tomczak and Welling 2018) is a set of points on the unit sphere. Its density is
estimated by the mean of von Mises-Fisher kernels, the analogue of Gaussians on the sphere, around
these points. The concentration of the kernels maximises the likelihood of left-out episodes. A
Gaussian with the vectors' mean and covariance would assign a high density to the space between
clusters, where no recorded start lies. Searches are penalised where the density is low, because
unconstrained activation maximisation in the latent space of a generator leaves the region that the
generator was trained on (Nguyen et al. 2016, 2017).

Letters in shape comments: U units of a layer, N recorded starts, G targets.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Sequence

import numpy as np
import torch
from scipy.special import ive, logsumexp
from torch import Tensor

from agents.hooks import ActivationCache, cached
from agents.layers import STATE, Layer, find_layer
from agents.networks import Policy, PolicyOutput
from agents.outputs import POLICY, TAKEN, VALUE, Output, output_names, outputs_named
from common.devices import Compute
from common.errors import UserError, nearest
from common.game_constants import ACTION_LABELS, action_number
from generative.batches import align, in_batches
from generative.dataset import RolloutDataset
from generative.networks import LatentSampler
from generative.saliency.gradients import DIRECTION, checked_directions, saliency_functions
from generative.simulator import Simulator, Step
from generative.squares import World
from generative.start_worlds import on, sampled_world
from interventions.projector import DirectionType, Projector

MAXIMISE, MINIMISE = "maximise", "minimise"
AIMS = {MAXIMISE: 1.0, MINIMISE: -1.0}  # sign of the target in the objective
CONCENTRATIONS = tuple(2.0 ** np.arange(16))
LARGE_ORDER = 50  # order of the Bessel function from which its uniform expansion is used
TYPICAL_SHARE = 0.05  # share of the recorded starts whose density is too low to be typical
_WINDOWS = 1  # random stream; part of the generator's seed
_NO_OUTPUTS = ("logit_", TAKEN)  # prefixes of outputs that a simulated step does not have
_MOVE = re.compile(r"from_(\w+)_to_(\w+)")


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """The agent's outputs at the steps of simulated or real rollouts.

    Attributes:
        values: the agent's values (T, B).
        log_probs: log-probabilities of the agent's actions (T, B, A).
        hidden_states: the agent's hidden states after each step (T, B, D).
        units: units (T, B, U) by name of the layer; for a feature map, the spatial mean of each
            channel.
    """

    values: Tensor
    log_probs: Tensor
    hidden_states: Tensor
    units: dict[str, Tensor]

    @classmethod
    def of(cls, steps: Sequence[Step | PolicyOutput], activations: ActivationCache,
           policy: Policy) -> Rollouts:
        """Stack the agent's outputs at simulated or real steps.

        Args:
            steps: the agent's outputs at each step.
            activations: cached outputs of layers in the same steps.
        """
        units = {}
        for name in activations:
            shape = find_layer(policy, name).shape
            units[name] = torch.stack([output.float().reshape(-1, shape[0], math.prod(shape[1:]))
                                       .mean(dim=-1) for output in activations.calls(name)])
        return cls(units=units, **{
            name: torch.stack([getattr(step, name) for step in steps]).float()
            for name in ("values", "log_probs", "hidden_states")})


def rollout(simulator: Simulator, compute: Compute, vectors: Tensor, num_steps: int,
            layers: tuple[str, ...] = (), world: World | None = None,
            ) -> tuple[list[Step], Rollouts]:
    """Simulate from bottleneck vectors with the most likely latents.

    All outputs have gradients with respect to the vectors.

    Args:
        simulator: simulator on the device of ``compute``.
        vectors: bottleneck vectors (B, V).
        num_steps: T, number of steps.
        layers: names of the layers whose units are read.
        world: worlds of the rollouts; None without worlds.

    Returns:
        The simulated steps, and the agent's outputs.
    """
    draw, policy = LatentSampler("mode"), simulator.agent.policy
    with compute.autocast(), cached(policy, layers, graph=True) as activations:
        start = simulator.start_from(vectors, draw, detached=False, world=on(world, compute))
        steps = simulator.imagine(start, draw, num_steps)
    return steps, Rollouts.of(steps, activations, policy)


@dataclasses.dataclass(frozen=True)
class Target:
    """A scalar that is read from the agent at one step of a rollout.

    Attributes:
        read: function that maps rollouts and a step to the values of the target (B,).
        layers: names of the layers whose units ``read`` needs.
        first_step: first step at which the target is defined.
        group: name shared by targets that depend on each other, see ``paired``; "" if the target
            is a group of its own.
    """

    name: str
    read: Callable[[Rollouts, int], Tensor]
    layers: tuple[str, ...] = ()
    first_step: int = 0
    group: str = ""


@dataclasses.dataclass(frozen=True)
class Objective:
    """A target that is maximised or minimised.

    Attributes:
        aim: MAXIMISE or MINIMISE.
    """

    target: Target
    aim: str

    @property
    def name(self) -> str:
        return f"{self.aim} {self.target.name}"


def targets_named(names: Sequence[str], policy: Policy, direction_ids: Sequence[int],
                  direction_type: str,
                  projector: Projector | None,
                  action_labels: Sequence[str] = ACTION_LABELS) -> tuple[Target, ...]:
    """Parse the names of targets; duplicates are dropped.

    Args:
        names: outputs (``value``, ``log_prob_up``, ``policy`` for all log-probabilities);
            directions as in ``saliency_functions`` (``hx_direction`` for all ``direction_ids``);
            units as <layer>:<number>, or the name of a layer for all of its units;
            ``from_<action>_to_<action>``, with the actions of the step before and of the step.
        direction_ids: numbers of the directions that ``hx_direction`` stands for.
        direction_type: type of these directions: "ica" or "pca".
        projector: projector onto the directions; None if no target is a direction.
        action_labels: names of Procgen's actions in the game.

    Raises:
        UserError: if a target is unknown; the message suggests the nearest name.
    """
    outputs = tuple(name for name in output_names() if not name.startswith(_NO_OUTPUTS))
    targets: list[Target] = []
    for name in names:
        layer, colon, unit = name.partition(":")
        if projector is not None and name.startswith(DIRECTION):
            functions = saliency_functions([name], direction_ids, direction_type)
            targets += [_direction_target(number, kind, projector)
                        for number, kind in checked_directions(functions, projector)]
        elif move := _MOVE.fullmatch(name):
            targets.append(_move_target(
                name, *(action_number(action, action_labels) for action in move.groups())))
        elif name == POLICY or name in outputs:
            targets += map(_output_target, outputs_named([name]))
        elif colon or "." in name or name in (STATE, "gru"):
            targets += _unit_targets(find_layer(policy, layer), unit if colon else None)
        else:
            known = (*outputs, POLICY, f"{DIRECTION}_0", f"{STATE}:0", "from_left_to_right")
            raise UserError(f"there is no target '{name}'{nearest(name, known)}")
    return tuple({target.name: target for target in targets}.values())


def _output_target(output: Output) -> Target:
    """Return the target that is an output of the agent's heads."""
    def read(rollouts: Rollouts, step: int) -> Tensor:
        # Log-probabilities are valid logits: log-softmax does not change them.
        at = PolicyOutput(rollouts.log_probs[step], rollouts.values[step],
                          rollouts.hidden_states[step])
        return output(at, at.logits.argmax(dim=-1))
    return Target(output.name, read, group="" if output.name == VALUE else POLICY)


def _direction_target(number: int, kind: DirectionType, projector: Projector) -> Target:
    """Return the target that is the coordinate of the hidden state along a direction."""
    return Target(f"{DIRECTION}_{number}_{kind}", lambda rollouts, step: projector.coordinates(
        rollouts.hidden_states[step], kind)[..., number])


def linear_target(name: str, weights: Tensor, bias: Tensor, centre: Tensor) -> Target:
    """Return the target that is a linear function of the hidden state.

    Args:
        weights: weights of the units (D,).
        bias: value at ``centre``, ().
        centre: state that is subtracted first (D,).
    """
    return Target(name, lambda rollouts, step: (
        (rollouts.hidden_states[step] - centre) @ weights + bias))


def _move_target(name: str, before: int, after: int) -> Target:
    """Return the target that is the log-probability of two consecutive actions.

    Args:
        before: action at the previous step.
        after: action at the step of the target.
    """
    return Target(name, lambda rollouts, step: (rollouts.log_probs[step - 1, :, before]
                                                + rollouts.log_probs[step, :, after]),
                  first_step=1, group=POLICY)


def _unit_targets(layer: Layer, unit: str | None) -> list[Target]:
    """Return the targets that are units of a layer, or spatial means of channels of a feature map.

    Args:
        unit: number of the unit or channel; None for all.
    """
    units = range(layer.shape[0])
    if unit is not None:
        if unit not in map(str, units):
            raise UserError(f"the target '{layer.name}:{unit}' does not exist: the "
                            f"{'channels' if layer.is_map else 'units'} of {layer.name} are "
                            f"numbered 0 to {layer.shape[0] - 1}")
        units = range(int(unit), int(unit) + 1)
    return [Target(f"{layer.name}:{number}", functools.partial(_read_unit, layer.name, number),
                   (layer.name,)) for number in units]


def _read_unit(layer: str, number: int, rollouts: Rollouts, step: int) -> Tensor:
    return rollouts.units[layer][step, :, number]


@dataclasses.dataclass(frozen=True)
class RecordedStarts:
    """Recorded starts, in a random order, and the values of the targets for each start.

    Attributes:
        windows: numbers of the recorded windows, int64 (N,).
        episodes, frames: episode and frame that the first simulated step shows, int64 (N,).
        vectors: bottleneck vectors, float32 (N, V).
        simulated: values of the targets in a rollout from the vector, float32 (N, G).
        real: values of the targets when the agent sees the recorded frames, float32 (N, G).
    """

    windows: np.ndarray
    episodes: np.ndarray
    frames: np.ndarray
    vectors: np.ndarray
    simulated: np.ndarray
    real: np.ndarray


def drawn_windows(dataset: RolloutDataset, number: int, step: int, seed: int) -> np.ndarray:
    """Draw windows whose initial frames lie in one episode that has not ended at a given step.

    Returns:
        Numbers of the windows, int64 (N,).

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
        simulator: simulator on the device of ``compute``.
        windows: numbers of the windows (N,).
        step: step at which the targets are read.
        batch_size: number of windows per batch.
    """
    sizes = dataclasses.replace(
        simulator.config, num_init_steps=dataset.num_init_steps,
        num_sim_steps=dataset.window_length - dataset.num_init_steps + 1)
    layers, agent = layers_of(targets), simulator.agent
    columns = []
    for numbers in in_batches(windows, batch_size):
        batch = align(dataset.batch(numbers).to(compute.device), sizes)
        with torch.no_grad():
            with compute.autocast():
                vectors = simulator.encode(batch.initial_images)  # (B, V)
            world = recorded_worlds(simulator, dataset, numbers, vectors)
            _, rollouts = rollout(simulator, compute, vectors, step + 1, layers, world)
            entering = [batch.first_hidden, *batch.hidden_states]  # before each step (B, D)
            with compute.autocast(), cached(agent.policy, layers, graph=True) as activations:
                outputs = [agent.step(batch.images[t], entering[t])
                           for t in range(max(step - 1, 0), step + 1)]
            seen = Rollouts.of(outputs, activations, agent.policy)
        columns.append((vectors.cpu().numpy(), read(targets, rollouts, step),
                        read(targets, seen, len(outputs) - 1)))
    places = [dataset.place(int(window)) for window in windows]
    return RecordedStarts(
        windows.astype(np.int64), np.array([place.episode for place in places]),
        np.array([place.frame for place in places]), *map(np.concatenate, zip(*columns)))


def recorded_worlds(simulator: Simulator, dataset: RolloutDataset, windows: np.ndarray,
                    vectors: Tensor) -> World | None:
    """Sample the worlds of recorded starts; the seed is the number of the window.

    Args:
        windows: numbers of the windows (B,).
        vectors: bottleneck vectors of the windows, on the simulator's device (B, V).

    Returns:
        The worlds; None if the simulator has none.

    Raises:
        UserError: if the simulator's prior is not trained.
    """
    if simulator.squares is None:
        return None
    frames = dataset.batch(windows).frames[dataset.num_init_steps - 1]
    return sampled_world(simulator, vectors, frames.to(vectors.device).float() / 255,
                         torch.from_numpy(np.asarray(windows, np.int64)))


def layers_of(targets: Sequence[Target]) -> tuple[str, ...]:
    """Return the names of the layers whose units the targets read."""
    return tuple(dict.fromkeys(layer for target in targets for layer in target.layers))


def read(targets: Sequence[Target], rollouts: Rollouts, step: int) -> np.ndarray:
    """Return the values of targets at a step, float32 (B, G)."""
    return torch.stack([target.read(rollouts, step) for target in targets],
                       dim=1).detach().float().cpu().numpy()


@dataclasses.dataclass(frozen=True)
class RecordedDensity:
    """Density of recorded start vectors.

    Attributes:
        vectors: recorded unit vectors (N, V).
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
        """Fit the concentration, and the log-density above which a vector is typical.

        Args:
            vectors: vectors of recorded windows (N, V).
            episodes: episodes of the windows (N,). Windows of an episode resemble each other, so
                the density at a window excludes the kernels of its own episode.

        Raises:
            UserError: if all vectors belong to one episode.
        """
        if len(np.unique(episodes)) < 2:
            raise UserError("the recorded starts belong to a single episode, from which their "
                            "density cannot be estimated; record more episodes or raise "
                            "--num_recorded")
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

    def excess(self, vectors: Tensor) -> Tensor:
        """Compute how far the log-density of vectors (B, V) is below ``typical``.

        Returns:
            Excess in units of ``spread`` (B,); 0 for typical vectors.
        """
        similarity = self.concentration * vectors @ self.vectors.T.to(vectors)  # (B, N)
        log_density = similarity.logsumexp(dim=-1) - np.log(len(self.vectors))
        return torch.relu(self.typical - log_density) / self.spread

    def nearest(self, vectors: Tensor, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Find the ``number`` recorded vectors nearest to each of the vectors (B, V).

        Returns:
            Rows of the recorded vectors, int64 (B, number), and cosine similarities, float32
            (B, number), nearest first.
        """
        cosines, rows = (vectors @ self.vectors.T.to(vectors)).topk(number, dim=-1)
        return rows.numpy(), cosines.numpy()


def log_normaliser(concentration: float, dimensions: int) -> float:
    """Compute the logarithm of the von Mises-Fisher density's normalising constant (Mardia and Jupp
    2000, section 9.3.2).

    Args:
        concentration: concentration of the density, above 0.
        dimensions: V, dimension of the space that contains the sphere.
    """
    order = dimensions / 2 - 1
    if order < LARGE_ORDER:
        log_bessel = np.log(ive(order, concentration)) + concentration
    else:  # ``ive`` underflows; the first two terms of DLMF 10.41.3
        ratio = concentration / order
        root = math.hypot(1, ratio)
        log_bessel = (order * (root + math.log(ratio / (1 + root)))
                      - 0.5 * math.log(2 * math.pi * order * root)
                      + math.log1p((3 / root - 5 / root**3) / (24 * order)))
    return order * np.log(concentration) - dimensions / 2 * np.log(2 * np.pi) - log_bessel

"""Saliency: gradients of the agent's value, actions and hidden state, through the simulator.

A sample is simulated again from its bottleneck vector and from perturbed copies of it, in its world
if it has one, with the agent's own actions and the most likely latents. The gradients of a scalar
with respect to the images and states of every step are averaged over the copies (SmoothGrad over
the start vector). As published, the scalar is also divided by the number of copies, so that
gradients computed with different numbers of copies have different scales.

Letters in shape comments: G samples in a batch, N copies of each, E deterministic state of the
environment.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import numpy as np
import torch
from scipy.ndimage import gaussian_filter
from torch import Tensor

from agents.outputs import ANSWERS
from common.devices import Compute
from common.errors import UserError, nearest
from common.game_constants import ACTION_LABELS, action_name, action_number
from common.video import enlarge, mark_action, side_by_side
from generative.camera import PATCH, shift
from generative.config import SimulatorConfig
from generative.networks import LatentSampler, on_unit_sphere
from generative.simulator import Simulator, Step
from generative.spatial import split_state
from generative.spatial_layers import BLOCK
from generative.squares import World
from generative.start_worlds import on
from interventions.projector import DirectionType, Projector

Coordinates = Callable[[Tensor, DirectionType], Tensor]
"""Maps hidden states (…, D) to coordinates along the directions of a type."""

VALUE_DELTA, DIRECTION, END = "value_delta", "hx_direction", "end"
# Suffixes of functions in file names.
SUFFIXES = WITHOUT_ENV_GRADS, COUNTERFACTUAL = "_without_env_grads", "_counterfactual"
SUFFIX_TITLES = {WITHOUT_ENV_GRADS: ", without environment gradients",
                 COUNTERFACTUAL: ", counterfactual"}
FUNCTIONS = (*ANSWERS, VALUE_DELTA, DIRECTION, END)
_COPIES = 1  # random stream; part of the generator's seed


@dataclasses.dataclass(frozen=True)
class SaliencyFunction:
    """A scalar function of a simulation, whose gradients are computed.

    Attributes:
        what: one of ``FUNCTIONS``, or the name of an action in the game.
        direction: number of a direction of the hidden state, or None.
        direction_type: type of the direction, or None.
        action: number of the action whose log-probability is the function, or None; ``what`` is
            then the action's name.
    """

    what: str
    direction: int | None = None
    direction_type: DirectionType | None = None
    action: int | None = None

    @property
    def name(self) -> str:
        """Name of the function, such as "value" or "hx_direction_3_ica"."""
        if self.direction is None:
            return self.what
        return f"{self.what}_{self.direction}_{self.direction_type}"

    @property
    def direction_name(self) -> str:
        """Name of the direction in figures, such as IC 3 or PC 0."""
        return f"{'IC' if self.direction_type == 'ica' else 'PC'} {self.direction}"

    def num_steps(self, common_timesteps: Sequence[int], num_steps: int) -> int:
        """Return the number of steps that must be simulated to compute the function.

        Args:
            common_timesteps: steps at which functions are evaluated.
        """
        return num_steps if self.what == VALUE_DELTA else max(common_timesteps) + 1

    def __call__(self, steps: Sequence[Step], common_timesteps: Sequence[int],
                 coordinates: Coordinates | None) -> Tensor:
        """Compute the scalar of each row of the batch (G*N,).

        It is the mean of the function over ``common_timesteps``, or for ``value_delta`` the mean
        change of the value from one step to the next over all steps.

        Args:
            common_timesteps: steps at which the function is evaluated; not used by ``value_delta``.
            coordinates: maps hidden states to coordinates along directions; None if the function is
                not a direction.
        """
        if self.what == VALUE_DELTA:
            return torch.stack([after.values - before.values
                                for before, after in itertools.pairwise(steps)]).mean(dim=0)
        chosen = [steps[t] for t in common_timesteps]
        if self.what == END:  # probability that the episode has ended
            return torch.stack([step.terminal_logits for step in chosen]).sigmoid().mean(dim=0)
        if self.action is not None:
            return torch.stack([step.log_probs[..., self.action] for step in chosen]).mean(dim=0)
        if self.direction is None or self.direction_type is None or coordinates is None:
            return torch.stack([ANSWERS[self.what](step.values, step.log_probs)
                                for step in chosen]).mean(dim=0)
        hidden_states = torch.stack([step.hidden_states for step in chosen])
        return coordinates(hidden_states, self.direction_type)[..., self.direction].mean(dim=0)


def saliency_functions(names: Sequence[str], direction_ids: Sequence[int],
                       direction_type: str, action_labels: Sequence[str] = ACTION_LABELS,
                       ) -> tuple[SaliencyFunction, ...]:
    """Parse the names of functions; duplicates are dropped.

    Args:
        names: names in ``FUNCTIONS``, where ``hx_direction`` stands for all ``direction_ids``; or
            single directions, ``hx_direction_3`` or ``hx_direction_3_pca``; or actions of the game,
            see ``common.game_constants.action_number``.
        direction_ids: numbers of the directions that ``hx_direction`` stands for.
        direction_type: type of directions named without one, "ica" or "pca".
        action_labels: names of Procgen's actions in the game.

    Raises:
        UserError: if a function is unknown; the message suggests the nearest name.
    """
    functions = []
    for name in names:
        match = re.fullmatch(rf"{DIRECTION}_(\d+)(?:_(ica|pca))?", name)
        numbers = [int(match[1])] if match else direction_ids
        if match or name == DIRECTION:
            kind = cast(DirectionType, (match and match[2]) or direction_type)
            functions += [SaliencyFunction(DIRECTION, number, kind) for number in numbers]
        elif name in FUNCTIONS:
            functions.append(SaliencyFunction(name))
        else:
            labels = [action_name(label) for label in action_labels]
            try:
                action = action_number(name, action_labels)
            except UserError:
                known = (*FUNCTIONS, f"{DIRECTION}_0", *labels)
                raise UserError(f"unknown --saliency_func_type '{name}'"
                                f"{nearest(name, known)}") from None
            functions.append(SaliencyFunction(labels[action], action=action))
    return tuple(dict.fromkeys(functions))


def checked_directions(functions: Sequence[SaliencyFunction],
                       projector: Projector) -> list[tuple[int, DirectionType]]:
    """Return the number and the type of each direction among the functions.

    Raises:
        UserError: if the projector does not have one of the directions.
    """
    directions = [(function.direction, function.direction_type) for function in functions
                  if function.direction is not None and function.direction_type is not None]
    for number, kind in directions:
        count = len(projector.directions(kind))
        if number >= count:
            raise UserError(f"there is no {kind} direction {number}: they are numbered 0 to "
                            f"{count - 1}")
    return directions


def suffix_of(name: str) -> str:
    """Return the suffix of a function's name in file names, which may be empty."""
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix)), "")


def title_of(name: str) -> str:
    """Return the title of a function from its name in file names, such as "IC 3, counterfactual".
    """
    suffix = suffix_of(name)
    words = re.sub(r"hx_direction_(\d+)_([ip]c)a", lambda match: f"{match[2].upper()} {match[1]}",
                   name.removesuffix(suffix))
    return words.replace("_", " ") + SUFFIX_TITLES.get(suffix, "")


@dataclasses.dataclass(frozen=True)
class Gradients:
    """Gradients of a saliency function with respect to images and states, averaged over the N
    copies of each sample and, as published, divided by N once more.

    Attributes:
        images: gradient with respect to the clamped images, float32 (G, T, C, H, W).
        hidden_states: gradient with respect to the agent's hidden states after each step, float32
            (G, T, D).
        env_h: gradient with respect to the environment's deterministic states, float32 (G, T, E).
    """

    images: Tensor
    hidden_states: Tensor
    env_h: Tensor


def smoothgrad_starts(vector: Tensor, num_copies: int, scale: float, seed: int,
                     number: int) -> Tensor:
    """Return N copies of a bottleneck vector, all perturbed except the first.

    Args:
        vector: bottleneck vector (V,).
        num_copies: N, including the unperturbed vector.
        scale: standard deviation of the noise on every entry of the perturbed copies.
        seed, number: seed of the noise, and number of the sample.

    Returns:
        Unit vectors (N, V).
    """
    shape = (num_copies - 1, len(vector))
    noise = np.random.default_rng([seed, _COPIES, number]).standard_normal(shape, np.float32)
    copies = vector.repeat(num_copies, 1)
    copies[1:] += scale * torch.from_numpy(noise).to(vector.device)
    return on_unit_sphere(copies)


def combined_vector(vectors: Tensor) -> Tensor:
    """Return the normalised mean (V,) of bottleneck vectors (number, V)."""
    return on_unit_sphere(vectors.mean(dim=0))


class SaliencyPass:
    """One forward pass, shared by all functions.

    Several samples share a batch. The rows of the batch do not interact, so a backward pass from
    the sum of a function's values over the rows gives the gradients in each row. The simulation
    ends at the last step that a function needs; later steps have zero gradients.

    Args:
        simulator: simulator on the device of ``compute``; its weights need no gradients.
        copies: bottleneck vectors of the samples' copies (G, N, V), or a pair of these and the
            samples' worlds (G rows), which are the same for all copies.
        functions: functions whose gradients will be computed.
        common_timesteps: steps at which the functions are evaluated.
        num_steps: T, number of steps of the samples.
        without_env_grads: detach the action before it enters the environment.
        coordinates: function that maps hidden states to coordinates along directions; None if no
            function needs it.
    """

    def __init__(self, simulator: Simulator, compute: Compute,
                 copies: Tensor | tuple[Tensor, World | None],
                 functions: Sequence[SaliencyFunction], common_timesteps: Sequence[int],
                 num_steps: int, without_env_grads: bool = False,
                 coordinates: Coordinates | None = None):
        copies, world = copies if isinstance(copies, tuple) else (copies, None)
        self._shape, self._num_steps = copies.shape[:2], num_steps
        self._common_timesteps, self._coordinates = common_timesteps, coordinates
        draw = LatentSampler("mode")
        simulated = max(function.num_steps(common_timesteps, num_steps) for function in functions)
        if world is not None:
            world = world.each(lambda tensor: tensor.repeat_interleave(copies.shape[1], dim=0))
        with compute.autocast(), torch.enable_grad():
            with torch.no_grad():
                start = simulator.start_from(copies.flatten(0, 1).to(compute.device), draw,
                                             world=on(world, compute))
            # Without a leaf that requires a gradient there would be no graph.
            leaf = start.env_h.detach().clone().requires_grad_()
            self._steps = simulator.imagine(dataclasses.replace(start, env_h=leaf), draw,
                                            simulated, without_env_grads=without_env_grads)

    def unperturbed_images(self) -> Tensor:
        """Return the images of each sample's first copy at the T' simulated steps
        (G, T', C, H, W)."""
        images = torch.stack([step.images.detach() for step in self._steps])  # (T', G*N, …)
        return images.unflatten(1, self._shape)[:, :, 0].transpose(0, 1).float().cpu()

    def gradients(self, function: SaliencyFunction) -> Gradients:
        """Compute the gradients of a function in each sample, averaged over its copies and, as
        published, divided by their number once more."""
        with torch.enable_grad():
            scalars = function(self._steps, self._common_timesteps, self._coordinates)  # (G*N,)
            total = scalars.unflatten(0, self._shape).mean(dim=1).sum()
        names = [field.name for field in dataclasses.fields(Gradients)]
        of_steps = iter(torch.autograd.grad(
            total, [getattr(step, name) for name in names for step in self._steps],
            retain_graph=True, materialize_grads=True))  # (G*N, …) each
        averages = {}
        for name in names:
            means = [next(of_steps).float().unflatten(0, self._shape).mean(dim=1)
                     for _ in self._steps]
            later = [torch.zeros_like(means[0])] * (self._num_steps - len(means))
            averages[name] = torch.stack([*means, *later], dim=1).cpu()
        return Gradients(**averages)


PICTURE_SCALE = 4
FRAMES_PER_SECOND = 5
FULL_COLOUR_QUANTILE = 0.995
FRAME_SHARE = 0.35  # opacity of the frame below the colours, on white
POSITIVE, NEGATIVE = (20, 60, 255), (255, 40, 20)
UNSIGNED = (150, 0, 170)  # colour of a gradient's norm
STATE_MAPS = ("canvas and scene", "memory")  # parts of a spatial simulator's state, one map each


def saliency_maps(gradients: np.ndarray, kernel_size: int, sigma: float) -> np.ndarray:
    """Sum gradients with respect to images over their channels and smooth them.

    Args:
        gradients: gradients with respect to the images, float32 (T, C, H, W).
        kernel_size: size of the Gaussian kernel in pixels, odd.
        sigma: standard deviation of the kernel, in pixels; the borders are padded by reflection.

    Returns:
        Saliency maps, float32 (T, H, W).
    """
    return gaussian_filter(gradients.sum(axis=1), sigma, radius=kernel_size // 2, mode="mirror",
                           axes=(1, 2))


def state_maps(gradients: np.ndarray, states: np.ndarray, config: SimulatorConfig) -> np.ndarray:
    """Compute the gradient norm of each cell of a spatial simulator's states, as maps of the view.

    ``generative.spatial`` defines the parts of a state. Canvas and scene have coordinates of the
    last initial frame, so their common map is shifted by the displacement of the camera. Cells out
    of view are not drawn. Memory and fine memory share another map, because gradients with respect
    to the canvas are several times as large.

    Args:
        gradients: gradients with respect to the environment's deterministic states, float32 (T, E).
        states: these states, float32 (T, E).

    Returns:
        A map for each of ``STATE_MAPS``, float32 (2, T, H, W).
    """
    gradient, state = (split_state(torch.from_numpy(array), config)
                       for array in (gradients, states))

    def pixels(cells: Tensor, size: int = PATCH) -> Tensor:  # norms over channels (T, 1, H, W)
        norms = cells.norm(dim=1, keepdim=True)
        return norms.repeat_interleave(size, dim=2).repeat_interleave(size, dim=3)

    world, inside = shift(pixels(torch.cat([gradient.canvas, gradient.scene], dim=1)),
                          state.camera.displacement)
    memory = torch.hypot(pixels(gradient.memory), pixels(gradient.fine, BLOCK))
    return torch.stack([world * inside, memory])[:, :, 0].numpy()


def specificity(gradients: np.ndarray) -> np.ndarray:
    """Compute the mean absolute Pearson correlation between the gradients of different functions.

    The correlation is taken over pixels and colours, and the mean over pairs of functions. The
    result is printed as "map similarity" and stored as "specificity". At 1, all functions have the
    same map, up to sign and scale. Maps are specific to their functions only if the map similarity
    is well below 1.

    Args:
        gradients: gradients of F functions with respect to the images (F, T, C, H, W).

    Returns:
        Map similarity at each step, float64 (T,); NaN where fewer than two functions depend on the
        images.
    """
    correlations = np.full(gradients.shape[1], np.nan)
    for step, pixels in enumerate(np.moveaxis(gradients, 1, 0).reshape(gradients.shape[1],
                                                                       len(gradients), -1)):
        pixels = pixels[pixels.std(axis=1) > 0].astype(np.float64)
        if len(pixels) > 1:
            pairs = np.triu_indices(len(pixels), 1)
            correlations[step] = np.abs(np.corrcoef(pixels)[pairs]).mean()
    return correlations


def full_colour(*maps: np.ndarray) -> float:
    """Return the absolute saliency that is drawn in full colour, the same for all steps.

    One pixel in 200 has a larger saliency; steps without any saliency are excluded.

    Args:
        maps: saliency maps, (T, H, W) each.
    """
    steps = [step for saliency in maps for step in saliency if step.any()]
    full = float(np.quantile(np.abs(steps), FULL_COLOUR_QUANTILE)) if steps else 0.0
    return full or 1.0


def coloured(maps: np.ndarray, frames: np.ndarray, full: float,
             positive: tuple[int, int, int] = POSITIVE) -> np.ndarray:
    """Draw saliency over faint frames: blue pixels raise the function, red pixels lower it.

    Args:
        maps: saliency maps (T, H, W).
        frames: frames of the sample, uint8 (T, H, W, C).
        full: absolute saliency that is drawn in full colour.
        positive: colour of positive values, blue unless the maps have no sign.

    Returns:
        Renderings, uint8 (T, H, W, C).
    """
    strength = np.clip(maps / full, -1, 1)[..., None]  # (T, H, W, 1)
    faint = 255 - FRAME_SHARE * (255 - frames.astype(np.float32))
    colour = np.where(strength >= 0, np.array(positive, np.float32),
                      np.array(NEGATIVE, np.float32))
    opacity = np.abs(strength)
    return (faint * (1 - opacity) + colour * opacity).round().astype(np.uint8)


def film(number: int, frames: np.ndarray, actions: np.ndarray,
         renderings: dict[str, np.ndarray], last_step: int) -> Iterator[np.ndarray]:
    """Yield the frames of a sample next to its renderings, each below a title, up to the last step
    at which the functions are evaluated.

    Args:
        frames: frames of the sample, uint8 (T, H, W, C).
        actions: input actions of the steps, drawn on the frames; -1 where unknown (T,).
        renderings: renderings of the sample's saliency by title, uint8 (T, H, W, C) each.
        last_step: the last step to show.
    """
    large = np.stack([enlarge(frame, PICTURE_SCALE) if action < 0
                      else mark_action(enlarge(frame, PICTURE_SCALE), action)
                      for frame, action in zip(frames[:last_step + 1], actions)])
    columns = {title: np.stack([enlarge(frame, PICTURE_SCALE)
                                for frame in rendering[:last_step + 1]])[:, None]
               for title, rendering in renderings.items()}
    return side_by_side({f"sample {number}": large[:, None], **columns}, 1)

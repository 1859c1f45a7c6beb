"""Fidelity of predicted frames, for comparison with other world models: PSNR and SSIM per frame.

``docs/fidelity.md`` defines the protocol. *Remembered* pixels show a place of the level that was in
view in one of the initial frames; *newly revealed* pixels show other places. Pixels of moving
objects belong to neither and are measured separately.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from agents.acting import embed_frames
from agents.networks import Policy
from common.devices import Compute
from generative.dataset import RolloutDataset
from generative.frozen_agent import FrozenAgent
from generative.simulator import Simulator

MSE, PSNR, SSIM, PSNR_REMEMBERED, PSNR_REVEALED, SSIM_REMEMBERED, PSNR_MOVING = FRAME_KINDS = (
    "mse", "psnr", "ssim", "psnr_remembered", "psnr_revealed", "ssim_remembered", "psnr_moving")
PSNR_OF_MEAN_ERROR, PSNR_MARGIN = "psnr_of_mean_error", "psnr_margin"  # only in the table
REMEMBERED_SHARE = "remembered_share"
# Prefixes of the measures of objects; the name of the kind of object follows.
OBJECT_ERROR, OBJECT_SHOWN, KEPT = "object_", "shown_", "kept_"
OTHER_POLICY_KL, OTHER_VALUE_CORRELATION, OTHER_STATE_COSINE = (
    "other_policy_kl", "other_value_correlation", "other_hidden_state_cosine")

MIN_SQUARED_ERROR = 1e-5  # lower limit, so that PSNR is at most 50 dB
_SSIM_SIGMA, _SSIM_RADIUS = 1.5, 5  # pixels; the window has 11 x 11
_SSIM_CONSTANTS = 0.01**2, 0.03**2  # for values from 0 to 1


def to_8_bits(images: Tensor) -> Tensor:
    """Clamp images to [0, 1] and round them to multiples of 1/255; float32."""
    return (images.float().clamp(0, 1) * 255).round() / 255


def psnr(squared_error):
    """Compute the peak signal-to-noise ratio, in dB, of images in [0, 1].

    Args:
        squared_error: mean squared errors, array or tensor; smaller values than
            ``MIN_SQUARED_ERROR`` are replaced by it.
    """
    floored = squared_error.clip(min=MIN_SQUARED_ERROR)
    return -10 * (floored.log10() if isinstance(floored, Tensor) else np.log10(floored))


def ssim_map(images: Tensor, labels: Tensor) -> Tensor:
    """Compute the map of structural similarity (SSIM), averaged over the channels.

    Uses a Gaussian window of 11 x 11 pixels (sigma 1.5), without Bessel's correction; only windows
    inside the frame count (Wang et al. 2004, "Image quality assessment", equation 13).

    Args:
        images, labels: images to compare (…, C, H, W) in [0, 1].

    Returns:
        SSIM, float64 (…, H - 10, W - 10), of the pixels at least 5 from the frame's edge.
    """
    x, y = images.double(), labels.double()
    down, across = (_gaussian_rows(size).to(x.device) for size in x.shape[-2:])

    def local_mean(values: Tensor) -> Tensor:
        return down @ values @ across.T

    mean_x, mean_y = local_mean(x), local_mean(y)
    variance_x = local_mean(x * x) - mean_x**2
    variance_y = local_mean(y * y) - mean_y**2
    covariance = local_mean(x * y) - mean_x * mean_y
    c1, c2 = _SSIM_CONSTANTS
    similarity = ((2 * mean_x * mean_y + c1) * (2 * covariance + c2)
                  / ((mean_x**2 + mean_y**2 + c1) * (variance_x + variance_y + c2)))
    return similarity.mean(dim=-3)


def _gaussian_rows(size: int) -> Tensor:
    """Return a matrix (size - 10, size) that averages with the Gaussian window along one axis."""
    offsets = torch.arange(-_SSIM_RADIUS, _SSIM_RADIUS + 1, dtype=torch.float64)
    weights = torch.exp(-offsets**2 / (2 * _SSIM_SIGMA**2))
    rows = torch.zeros(size - 2 * _SSIM_RADIUS, size, dtype=torch.float64)
    for row in range(len(rows)):
        rows[row, row:row + len(weights)] = weights / weights.sum()
    return rows


def remembered_mask(initial: Tensor, later: Tensor, scale: float, size: int) -> Tensor:
    """Return a mask of the pixels that show a place that was in view in any initial frame.

    Pixel (u, v) of a frame shows the place (u, v) + (x, -y) · scale of the level. The mask is
    eroded by one pixel; the frame's own edge does not erode it.

    Args:
        initial: positions of the player in squares, x to the right and y up, at the initial frames
            (I, B, 2).
        later: positions of the player at the simulated steps (T, B, 2).
        scale: pixels per square, see ``common.game_constants.pixels_per_square``; above 0.
        size: height and width of a frame, H = W.

    Returns:
        Mask, bool (T, B, H, W); False at steps whose position is NaN. Initial frames whose position
        is NaN are ignored.
    """
    moved = (later[:, None] - initial[None]) * later.new_tensor([scale, -scale])  # (T, I, B, 2)
    pixels = torch.arange(size, device=later.device)
    places = pixels + moved.unsqueeze(-1)  # (T, I, B, 2, size)
    inside = (places >= 0) & (places <= size - 1)
    columns, rows = inside.unbind(dim=3)  # (T, I, B, size)
    in_view = (rows.unsqueeze(-1) & columns.unsqueeze(-2)).any(dim=1)  # (T, B, H, W)
    revealed = functional.max_pool2d((~in_view).float(), kernel_size=3, stride=1, padding=1)
    return revealed == 0


def region_masks(in_memory: Tensor | None, moving: Tensor | None) -> dict[str, Tensor]:
    """Return masks of remembered pixels, newly revealed pixels, and moving objects.

    Args:
        in_memory: pixels of places in view in the initial frames, see ``remembered_mask``, bool
            (T, B, H, W); None if the camera's motion is not known.
        moving: pixels of moving objects, bool (T, B, H, W); None if objects are not measured.

    Returns:
        Masks (T, B, H, W), by the name of the PSNR that is computed on the mask.
    """
    masks = {}
    if in_memory is not None:
        still = torch.ones_like(in_memory) if moving is None else ~moving
        masks[PSNR_REMEMBERED] = in_memory & still
        masks[PSNR_REVEALED] = ~in_memory & still
    if moving is not None:
        masks[PSNR_MOVING] = moving
    return masks


def measure_frames(images: Tensor, labels: Tensor, masks: dict[str, Tensor]) -> dict[str, Tensor]:
    """Compute the measures of ``FRAME_KINDS``; measures of a region only if its mask is given.

    Args:
        images: predicted images (T, B, C, H, W); they are rounded to 8 bits.
        labels: recorded images (T, B, C, H, W) in [0, 1].
        masks: masks of regions, see ``region_masks``.

    Returns:
        Measures by kind, (T, B) each: mean squared error of values from 0 to 1, PSNR in dB, or
        SSIM; NaN where a region is empty.
    """
    images, labels = to_8_bits(images), to_8_bits(labels)
    errors = (images - labels).square().mean(dim=-3)  # (T, B, H, W)
    similarity = torch.stack([ssim_map(*step) for step in zip(images, labels)])
    measures = {MSE: errors.mean(dim=(-2, -1)), SSIM: similarity.mean(dim=(-2, -1))}
    measures[PSNR] = psnr(measures[MSE])
    measures |= {kind: psnr(_masked_mean(errors, mask)) for kind, mask in masks.items()}
    if PSNR_REMEMBERED in masks:
        inner = slice(_SSIM_RADIUS, -_SSIM_RADIUS)
        measures[SSIM_REMEMBERED] = _masked_mean(similarity,
                                                 masks[PSNR_REMEMBERED][..., inner, inner])
    return measures


def _masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Compute the mean over the marked pixels, (T, B, H, W) to (T, B); NaN where none is marked."""
    return (values * mask).sum(dim=(-2, -1)) / mask.sum(dim=(-2, -1))


def _compare_objects(images: Tensor, labels: Tensor, without: Tensor, region: Tensor | None = None,
                     ) -> tuple[Tensor, Tensor, Tensor]:
    """Compare predicted with recorded images on the pixels of each kind of object.

    An object is shown if, on its pixels, the squared error of the image is less than half of the
    squared error of the recorded frame without the object.

    Args:
        images, labels: predicted and recorded images (T, B, C, H, W).
        without: recorded frames without each kind, in [0, 1] (T, B, K, C, H, W).
        region: pixels that count, bool (T, B, H, W); None for all.

    Returns:
        Sum of squared errors, number of pixels, and whether the object is shown, (T, B, K) each.
    """
    limits = (without - labels.unsqueeze(2)).square().sum(dim=3)  # (T, B, K, H, W)
    masks = limits > 0
    if region is not None:
        masks = masks & region.unsqueeze(2)
    errors = (images - labels).square().sum(dim=2)  # (T, B, H, W)
    on_object = (errors.unsqueeze(2) * masks).sum(dim=(-2, -1))  # (T, B, K)
    shown = on_object < (limits * masks).sum(dim=(-2, -1)) / 2  # (T, B, K)
    return on_object, masks.sum(dim=(-2, -1)), shown.to(labels)


def measure_objects(kinds: Sequence[str], images: Tensor, labels: Tensor,
                    without: Tensor) -> dict[str, Tensor]:
    """Measure the mean squared error on the pixels of each kind of object, and whether it is shown.

    Args:
        kinds: names of K kinds.
        images, labels, without: see ``measure_kept_objects``.

    Returns:
        Tensors (T, B): the error under the key ``OBJECT_ERROR`` + kind, and 1 (shown) or 0 under
        the key ``OBJECT_SHOWN`` + kind; NaN where no object of the kind is in view.
    """
    errors, sizes, shown = _compare_objects(images, labels, without)
    means = errors / (sizes * labels.shape[2])  # NaN for an object without pixels
    return {prefix + kind: measure[..., number].masked_fill(sizes[..., number] == 0, math.nan)
            for number, kind in enumerate(kinds)
            for prefix, measure in ((OBJECT_ERROR, means), (OBJECT_SHOWN, shown))}


def measure_kept_objects(kinds: Sequence[str], images: Tensor, labels: Tensor, without: Tensor,
                         in_memory: Tensor | None) -> dict[str, Tensor]:
    """Measure whether each kind of object that was in view at the start is still shown.

    Args:
        kinds: names of K kinds.
        images, labels: predicted and recorded images (T, B, C, H, W).
        without: recorded frames without each kind, in [0, 1] (T, B, K, C, H, W).
        in_memory: see ``region_masks``; parts of objects outside this region are excluded. None to
            exclude nothing.

    Returns:
        1 (shown) or 0 by ``KEPT`` + kind, (T, B) each; NaN where the kind of object was not in view
        at the first step, or no part of it is in view now.
    """
    _, sizes, shown = _compare_objects(to_8_bits(images), labels, without, in_memory)
    at_start = (without[0] != labels[0].unsqueeze(1)).flatten(2).any(dim=-1)  # (B, K)
    kept = shown.masked_fill((sizes == 0) | ~at_start, math.nan)  # (T, B, K)
    return {KEPT + kind: kept[..., number] for number, kind in enumerate(kinds)}


class OtherAgent(FrozenAgent):
    """An agent that is not part of the simulator, with its own hidden states on recorded episodes.

    Args:
        policy: the agent; it is frozen in place.
    """

    def __init__(self, policy: Policy, dataset: RolloutDataset, compute: Compute):
        super().__init__(policy, policy.hidden_state_size, policy.fc_policy.out_features)
        self._dataset, self._compute = dataset, compute
        self._entering: dict[int, Tensor] = {}  # (L, D) by episode

    @torch.no_grad()
    def states_entering(self, windows: np.ndarray) -> Tensor:
        """Compute the agent's hidden states (B, D) before the first simulated step of windows (B,).

        The agent has then seen all earlier frames of the episodes.
        """
        entering = []
        for place in map(self._dataset.place, windows.tolist()):
            if place.episode not in self._entering:
                self._entering[place.episode] = self._states_of(place.episode)
            entering.append(self._entering[place.episode][place.frame])
        return torch.stack(entering)

    def _states_of(self, episode: int) -> Tensor:
        """Compute the agent's hidden states before each frame of an episode (L, D)."""
        file = self._dataset.folder.array_files(episode).frames
        frames = torch.from_numpy(np.moveaxis(file.rows(0, file.shape[0]), 1, -1).copy())
        embeddings = embed_frames(self.policy, frames.to(self._compute.device), self._compute)
        initial = self.policy.initial_states(1)
        leaving = self.policy.sequence(embeddings.unsqueeze(1), initial, masks=None).hidden_states
        return torch.cat([initial, leaving[:-1, 0]])


@dataclasses.dataclass(frozen=True)
class ObjectFrames:
    """Recorded frames in which objects were not rendered.

    Attributes:
        kinds: names of K kinds of object.
        of: function that maps window indices (B,) to the recorded frames of the simulated steps,
            each rendered without one kind of object, uint8 (T, B, K, C, H, W). From the terminal
            step on, the frames are unchanged.
        moving: whether each kind moves through the level.
    """

    kinds: tuple[str, ...]
    of: Callable[[np.ndarray], np.ndarray]
    moving: tuple[bool, ...] = ()


@dataclasses.dataclass(frozen=True)
class FidelityCard:
    """Settings of the fidelity card, the measures of docs/fidelity.md.

    Attributes:
        scale: pixels per square, see ``common.game_constants.pixels_per_square``; None if unknown.
        positions: function that maps window indices (B,) to the player's positions in squares
            at all frames of the windows (I + T - 1, B, 2), NaN where unknown; needed if the camera
            moves.
        other_simulator: second simulator, run on the same windows; None to leave it out.
        other_agent: agent with which the simulator was not trained; None to leave it out.
        objects: recorded frames without objects, which locate the objects; None if objects are not
            measured.
    """

    scale: float | None = None
    positions: Callable[[np.ndarray], Tensor | None] | None = None
    other_simulator: Simulator | None = None
    other_agent: OtherAgent | None = None
    objects: ObjectFrames | None = None

    def in_memory(self, windows: np.ndarray, labels: Tensor, num_init_steps: int) -> Tensor | None:
        """Return the mask of remembered pixels in windows, see ``remembered_mask``.

        Args:
            windows: numbers of the windows (B,).
            labels: label frames (T, B, C, H, W).
            num_init_steps: number of initial frames I.

        Returns:
            Mask, bool (T, B, H, W); None if the camera's motion is not known.
        """
        if self.scale == 0:
            return torch.ones_like(labels[:, :, 0], dtype=torch.bool)
        positions = None if self.positions is None else self.positions(windows)
        if self.scale is None or positions is None:
            return None
        positions = positions.to(labels.device)
        return remembered_mask(positions[:num_init_steps], positions[num_init_steps - 1:],
                               self.scale, labels.shape[-1])

"""Losses of the prior, and the masks of given squares on which it is trained.

Letters in shape comments: B batch, n squares per side, V start vector.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from generative.prior import StartPrior, WorldPrior

VIEW_SQUARES = 13  # squares per side of a view
_TIME_SHIFT = 0.0  # mean of the logit of the time
_START_TIME, _VIEW_START_TIME = (0.0, 1.0), (-1.2, 1.4)  # mean and deviation of its logit
_GLOBALS_WEIGHT = 0.5
_LEAST_LEFT = 0.1  # least remaining time by which errors of start vectors are divided
# Shares of the kinds of mask; the rest has no given squares.
_VIEW, _STRIP, _HOLE = 0.4, 0.2, 0.1
_SMALLEST_HOLE, _LARGEST_HOLE = 1, 6
_BLOCK = 0.6  # share of masks with a block of squares that are not given, if the world is the view


def draw_masks(num: int, num_squares: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw masks of given squares.

    The kinds are: the squares of a view, with some occluded ones; all squares except a strip at one
    or two sides, as when the world moves on; all except a hole in the view; none.

    Returns:
        Masks, 1 for given squares (num, 1, n, n); and whether the camera is given (num, 1).
    """
    masks, camera = torch.zeros(num, 1, num_squares, num_squares), torch.ones(num, 1)
    kinds = torch.rand(num, generator=generator).tolist()

    def whole(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    middle, reach = num_squares // 2, VIEW_SQUARES // 2
    for i, kind in enumerate(kinds):
        mask = masks[i, 0]
        if kind < _VIEW:
            # Depending on the phase, squares at the borders are recognised or not.
            rows, columns = (slice(middle - reach - whole(-1, 1), middle + reach + whole(0, 2))
                             for _ in range(2))
            mask[rows, columns] = 1
            player = [slice(middle - whole(0, 1), middle + whole(1, 2)) for _ in range(2)]
            mask[player[0], player[1]] = 0
            for _ in range(whole(0, 3)):
                y, x = (middle + whole(-reach, reach) for _ in range(2))
                mask[y - whole(0, 1):y + 1, x - whole(0, 1):x + 1] = 0
        elif kind < _VIEW + _STRIP:
            mask[:] = 1
            for _ in range(whole(1, 2)):
                width, side = whole(4, 14), whole(0, 3)
                across = mask if side % 2 else mask.T  # a view, unlike the result of torch.rot90
                across[slice(width) if side < 2 else slice(-width, None)] = 0
        elif kind < _VIEW + _STRIP + _HOLE:
            mask[:] = 1
            height, width = (whole(_SMALLEST_HOLE, _LARGEST_HOLE) for _ in range(2))
            y, x = (middle + whole(-reach, reach - size + 1) for size in (height, width))
            mask[y:y + height, x:x + width] = 0
        else:
            camera[i] = 0
    return masks, camera


def draw_block_masks(num: int, num_squares: int, generator: torch.Generator
                     ) -> tuple[Tensor, Tensor]:
    """Draw masks of given squares of worlds that are the view of a static camera: all squares
    except a block of any size, or none. See ``draw_masks``; the camera is always given."""
    size, place = torch.rand(2, 2, num, 1, generator=generator)
    size = 1 + (size * num_squares).floor()  # (2, num, 1), rows and columns
    first = (place * (num_squares + 1 - size)).floor()
    at = torch.arange(num_squares)
    rows, columns = (at >= first) & (at < first + size)  # (num, n) each
    given = ~(rows[:, :, None] & columns[:, None]) & (
        torch.rand(num, 1, 1, generator=generator) < _BLOCK)
    return given[:, None].float(), torch.ones(num, 1)


def world_loss(prior: WorldPrior, squares: Tensor, camera: Tensor, generator: torch.Generator,
               is_view: bool = False) -> tuple[Tensor, Tensor]:
    """Compute the loss of a world prior at random times and masks.

    Args:
        squares: classes, int64 (B, n, n).
        camera: phase and velocity (B, NUM_GLOBALS).
        generator: source of the random numbers, on the CPU.
        is_view: whether worlds are the view of a static camera, which selects the masks.

    Returns:
        Mean cross-entropy of the squares that are not given, and the weighted squared error of
        phase and velocity, which is 0 where they are given, averaged over all rows, each ().
    """
    num = len(squares)
    known, camera_known = (part.to(squares.device)
                           for part in (draw_block_masks if is_view else draw_masks)(
                               num, prior.num_squares, generator))
    clean = prior.embed(squares)
    noise = torch.randn(clean.shape, generator=generator).to(clean)
    camera_noise = torch.randn(camera.shape, generator=generator).to(camera)
    time = torch.sigmoid(torch.randn(num, generator=generator) + _TIME_SHIFT).to(clean)
    share = time[:, None, None, None]
    x = torch.where(known > 0, clean, noise + share * (clean - noise))
    state = torch.where(camera_known > 0, camera,
                        camera_noise + time[:, None] * (camera - camera_noise))
    logits, predicted = prior(x, known, state, camera_known, time)
    unknown = 1 - known[:, 0]
    entropy = functional.cross_entropy(logits.permute(0, 3, 1, 2), squares, reduction="none")
    squared = (predicted - camera).square() * (1 - camera_known)
    return ((entropy * unknown).sum() / unknown.sum(),
            _GLOBALS_WEIGHT * squared.mean())


def start_loss(prior: StartPrior, codes: Tensor, view: Tensor, camera: Tensor,
               generator: torch.Generator, is_view: bool = False) -> Tensor:
    """Compute the flow-matching loss () of a start prior at random times.

    Args:
        codes: standardised codes (B, V / 64, 8, 8).
        view, camera: see ``StartPrior.forward``.
        generator: source of the random numbers, on the CPU.
        is_view: whether worlds are the view of a static camera. Times are then earlier, because the
            place of the player, which is anywhere, is decided early.
    """
    noise = torch.randn(codes.shape, generator=generator).to(codes)
    mean, deviation = _VIEW_START_TIME if is_view else _START_TIME
    time = torch.sigmoid(mean + deviation * torch.randn(len(codes), generator=generator)).to(codes)
    share = time[:, None, None, None]
    predicted = prior(noise + share * (codes - noise), view, camera, time)
    left = (1 - share).clamp(min=_LEAST_LEFT)
    return ((predicted - codes) / left).square().mean()

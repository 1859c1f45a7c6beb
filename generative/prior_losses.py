"""Losses of the prior, and the masks of given squares on which it is trained."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from generative.prior_networks import PLAYER_CHANNELS, PlayerPrior, StartPrior, WorldPrior

VIEW_SQUARES = 13  # squares per side of a view
_TIME_SHIFT = 0.0  # mean of the logit of the time
_GLOBALS_WEIGHT = 0.5
_UNMARKED = 0.15  # share of views in training without the mark of the player
_LEAST_LEFT = 0.1  # least remaining time by which errors of start vectors are divided
# Shares of the kinds of mask; the rest has no given squares.
_VIEW, _STRIP, _HOLE = 0.4, 0.2, 0.1
_SMALLEST_HOLE, _LARGEST_HOLE = 1, 6
_MOST_OCCLUDED = 3  # most places in a view where squares are occluded
_BLOCK = 0.6  # share of masks with a block of squares that are not given, if the world is the view


def draw_masks(num: int, num_squares: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw masks of given squares, on the device of the generator.

    The kinds are: the squares of a view, with some occluded ones; all squares except a strip at one
    or two sides, as when the world moves on; all except a hole in the view; none.

    Returns:
        Masks, 1 for given squares (num, 1, n, n); and whether the camera is given (num, 1).
    """
    device = generator.device
    at = torch.arange(num_squares, device=device)
    middle, reach = num_squares // 2, VIEW_SQUARES // 2

    def whole(low: int, high: int) -> Tensor:
        return torch.randint(low, high + 1, (num,), device=device, generator=generator)

    def between(first: Tensor, last: Tensor) -> Tensor:
        return (at >= first[:, None]) & (at < last[:, None])

    def rectangle(rows: Tensor, columns: Tensor) -> Tensor:
        return rows[:, :, None] & columns[:, None]

    # Depending on the phase, squares at the borders are recognised or not.
    view = rectangle(*(between(middle - reach - whole(-1, 1), middle + reach + whole(0, 2))
                       for _ in range(2)))
    hidden = rectangle(*(between(middle - whole(0, 1), middle + whole(1, 2)) for _ in range(2)))
    num_occluded = whole(0, _MOST_OCCLUDED)
    for i in range(_MOST_OCCLUDED):
        last = [middle + whole(-reach, reach) for _ in range(2)]
        occluded = rectangle(*(between(end - whole(0, 1), end + 1) for end in last))
        hidden = hidden | (occluded & (i < num_occluded)[:, None, None])
    strips, num_strips = torch.zeros_like(view), whole(1, 2)
    for i in range(2):
        width, side = whole(4, 14), whole(0, 3)
        first = torch.where(side < 2, 0, num_squares - width)
        across = between(first, first + width)
        strip = torch.where((side % 2 == 1)[:, None, None], across[:, :, None], across[:, None])
        strips = strips | (strip & (i < num_strips)[:, None, None])
    hole = []
    for _ in range(2):
        size = whole(_SMALLEST_HOLE, _LARGEST_HOLE)
        place = torch.rand(num, device=device, generator=generator) * (2 * reach + 2 - size)
        hole.append(between(middle - reach + place.long(), middle - reach + place.long() + size))
    kind = torch.rand(num, device=device, generator=generator)
    camera = (kind < _VIEW + _STRIP + _HOLE)[:, None]
    rest = torch.where((kind < _VIEW + _STRIP)[:, None, None], ~strips,
                       ~rectangle(*hole) & camera[:, None])
    masks = torch.where((kind < _VIEW)[:, None, None], view & ~hidden, rest)
    return masks[:, None].float(), camera.float()


def draw_block_masks(num: int, num_squares: int, generator: torch.Generator
                     ) -> tuple[Tensor, Tensor]:
    """Draw masks of given squares of worlds that are the view of a static camera: all squares
    except a block of any size, or none. See ``draw_masks``; the camera is always given."""
    device = generator.device
    size, place = torch.rand(2, 2, num, 1, device=device, generator=generator)
    size = 1 + (size * num_squares).floor()  # (2, num, 1), rows and columns
    first = (place * (num_squares + 1 - size)).floor()
    at = torch.arange(num_squares, device=device)
    rows, columns = (at >= first) & (at < first + size)  # (num, n) each
    given = ~(rows[:, :, None] & columns[:, None]) & (
        torch.rand(num, 1, 1, device=device, generator=generator) < _BLOCK)
    return given[:, None].float(), torch.ones(num, 1, device=device)


def world_loss(prior: WorldPrior, squares: Tensor, camera: Tensor, generator: torch.Generator,
               is_view: bool = False) -> tuple[Tensor, Tensor]:
    """Compute the loss of a world prior at random times and masks.

    Args:
        squares: classes, int64 (B, n, n).
        camera: phase and velocity (B, NUM_GLOBALS).
        generator: source of the random numbers, on the same device.
        is_view: whether worlds are the view of a static camera, which selects the masks.

    Returns:
        Mean cross-entropy of the squares that are not given, and the weighted squared error of
        phase and velocity, which is 0 where they are given, averaged over all rows, each ().
    """
    num, device = len(squares), squares.device
    known, camera_known = (draw_block_masks if is_view else draw_masks)(
        num, prior.num_squares, generator)
    clean = prior.embed(squares)
    noise = torch.randn(clean.shape, device=device, generator=generator)
    camera_noise = torch.randn(camera.shape, device=device, generator=generator)
    time = torch.sigmoid(torch.randn(num, device=device, generator=generator) + _TIME_SHIFT)
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
               generator: torch.Generator) -> Tensor:
    """Compute the flow-matching loss () of a start prior at random times.

    Args:
        codes: standardised codes (B, V / 64, 8, 8).
        view, camera: see ``StartPrior.forward``.
        generator: source of the random numbers, on the same device.
    """
    device = codes.device
    noise = torch.randn(codes.shape, device=device, generator=generator)
    time = torch.sigmoid(torch.randn(len(codes), device=device, generator=generator))
    share = time[:, None, None, None]
    predicted = prior(noise + share * (codes - noise), view, camera, time)
    left = (1 - share).clamp(min=_LEAST_LEFT)
    return ((predicted - codes) / left).square().mean()


def without_some_players(view: Tensor, generator: torch.Generator) -> Tensor:
    """Remove the mark of the player's square from a share of the views of ``with_player``, so that
    the start prior also learns the distribution of starts whose square is unknown (as in
    classifier-free guidance; Ho and Salimans 2022)."""
    is_kept = torch.rand(len(view), 1, 1, 1, device=view.device, generator=generator) >= _UNMARKED
    marks = view[:, -PLAYER_CHANNELS:] * is_kept
    return torch.cat([view[:, :-PLAYER_CHANNELS], marks], dim=1)


def player_loss(prior: PlayerPrior, squares: Tensor, players: Tensor) -> Tensor:
    """Compute the mean cross-entropy () of the player's square.

    Args:
        squares: classes, integers (B, n, n).
        players: numbers of the squares, int64 (B,).
    """
    classes = functional.one_hot(squares.long(), prior.num_classes).float()
    return functional.cross_entropy(prior(classes), players)

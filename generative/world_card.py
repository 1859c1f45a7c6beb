"""The card of generated worlds: realism of starts, calibration of events, and unseen contents.

Every table states its baseline: recorded frames that the simulator encodes and decodes, the game
from the same starts, the constant rate, or the game's own distribution of levels.

Letters in shape comments: M worlds per start.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from PIL import Image

import generative.realism as realism
from agents.frames import to_frames
from agents.replay import recorded_game
from common.errors import UserError
from common.game_constants import FRAME_SIZE, WORLD_SIZE
from common.video import strip
from envs.equal_views import CONTENTS, oracle_probabilities, start_layouts
from generative.batches import in_batches
from generative.loss_over_time import window_start
from generative.squares import World, world_corner
from generative.world_contents import (
    draw_continuations,
    draw_worlds,
    have_any,
    name_classes,
    recorded_worlds,
    squares_beyond,
    squares_in_view,
    start_frames,
)
from generative.world_events import choose_starts, long_rollouts, own_actions, recorded_actions
from generative.world_simulations import Simulations, first_step
from generative.world_tables import Table, ratio_of_means

_SHOWN_STARTS, _SHOWN_VIEWS = 64, 8
_THUMB, _GAP = 114, 16  # pixels of a world in the figure, and between the parts of the figure

Named = tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True)
class GeneratedWorlds:
    """Result of ``measure``.

    Attributes:
        samples: random starts, and worlds that continue recorded views; None without them.
    """

    tables: Table
    samples: Image.Image | None = None


@torch.no_grad()
def measure(card: Simulations, num_random: int, num_events: int, num_worlds: int,
            num_levels: int) -> GeneratedWorlds | None:
    """Compute the tables and the figure.

    Args:
        num_random: number of random starts; 0 to leave them out.
        num_events: number of starts whose events and contents are measured; 0 to leave these
            tables out.
        num_worlds: M, worlds per start. Recorded worlds, and simulators without worlds, have one
            per start.
        num_levels: levels from which contents beyond equal views are counted; 0 for none.

    Returns:
        The result; None if nothing is to be measured.

    Raises:
        UserError: if the recording has too few windows, or its levels cannot be replayed.
    """
    if not num_random and not num_events:
        return None
    has_worlds = card.simulator.squares is not None
    sampled = has_worlds and card.worlds is None
    tables: Table = {"worlds": "sampled" if sampled else "recorded" if has_worlds else "none"}
    named = _named_classes(card)
    if num_random:
        tables["random_starts"] = random_starts(card, num_random, named)
    if num_events:
        starts, near_end = choose_starts(card.dataset, card.windows, num_events, card.seed)
        tables["own_actions"] = own_actions(card, starts, near_end, num_worlds if sampled else 1)
        tables["recorded_actions"] = recorded_actions(card)
        tables["long_rollouts"] = long_rollouts(card, starts[~near_end])
        if sampled and num_levels and named:
            tables["beyond_equal_views"] = beyond_equal_views(card, num_levels, num_events,
                                                              num_worlds, named[0])
    drawn = has_worlds and card.simulator.prior.is_trained
    return GeneratedWorlds(tables, samples(card) if drawn else None)


def random_starts(card: Simulations, number: int, named: Named | None) -> Table:
    """Compare random starts with recorded starts that the simulator encodes and decodes.

    Args:
        number: number of random starts, and of recorded ones, see ``Simulations.spaced``; fewer if
            the recording has fewer.
        named: see ``_named_classes``.
    """
    chosen = np.random.default_rng(card.seed).permutation(card.spaced(0))[:number]
    if min(len(chosen), number) < realism.FEWEST_FRAMES:
        raise UserError(f"random starts are compared with at least {realism.FEWEST_FRAMES} "
                        f"recorded ones, but {min(len(chosen), number)} were asked for or "
                        "recorded; raise --random_starts, or record more episodes")
    chosen.sort()  # frames of an episode are adjacent
    decoded, generated, worlds = [], [], []
    for part in in_batches(chosen, card.batch_size):
        batch = card.batch(card.dataset, part)
        (step,) = card.simulate(card.recorded_start(batch, torch.from_numpy(part)), 1)
        decoded.append((to_frames(batch.initial_images[-1]), *first_step(step)))
    for part in in_batches(np.arange(number), card.batch_size):
        start = card.random_start(part)
        (step,) = card.simulate(start, 1)
        generated.append(first_step(step))
        if start.world is not None:
            worlds.append(squares_in_view(start.world, card.scale))
    real, own, own_ends, own_values = map(np.concatenate, zip(*decoded))
    frames, ends, values = map(np.concatenate, zip(*generated))
    episodes = card.dataset.episodes_of(chosen)
    others = -1 - np.arange(number)  # clusters of the generated starts
    half = len(real) // 2

    def compared(first: np.ndarray, second: np.ndarray, clusters: np.ndarray) -> Table:
        return {"random": card.mean(first, others), "decoded": card.mean(second, clusters),
                "ratio": ratio_of_means(first, others, second, clusters, card.seed)}

    table: Table = {
        "starts": number, "recorded_starts": len(chosen),
        "auc_against_decoded": realism.classifier_auc(own, frames, card.seed),
        "auc_against_real": realism.classifier_auc(real, frames, card.seed),
        "auc_of_decoded_against_real": realism.classifier_auc(real, own, card.seed),
        "known_colours": compared(realism.known_colours(frames, real[half:]),
                                  realism.known_colours(own[:half], real[half:]),
                                  episodes[:half]),
        "neighbour_difference": compared(realism.neighbour_difference(frames),
                                         realism.neighbour_difference(own), episodes),
        "ends_at_step_0": compared(ends >= 0.5, own_ends >= 0.5, episodes),
        "value_at_step_0": compared(values, own_values, episodes)}
    table["neighbour_difference"]["real"] = card.mean(realism.neighbour_difference(real), episodes)
    if named is not None:
        classes, real_squares, real_episodes = named
        squares = np.concatenate(worlds)
        table["in_view"] = {}
        names: dict[tuple[int, ...], list[str]] = {}  # kinds by their classes, which may be shared
        for name, numbers in classes.items():
            names.setdefault(tuple(numbers), []).append(name)
        for shared, kinds in names.items():
            shown, seen = (have_any(part, shared) for part in (squares, real_squares))
            table["in_view"][" or ".join(kinds)] = {
                "random": card.mean(shown, others), "real": card.mean(seen, real_episodes),
                "ratio": ratio_of_means(shown, others, seen, real_episodes, card.seed)}
    return table


def beyond_equal_views(card: Simulations, num_levels: int, number: int, num_worlds: int,
                       classes: dict[str, np.ndarray]) -> Table:
    """Compare what sampled worlds contain to the right of start frames with the game's levels.

    Args:
        number: number of levels whose worlds are sampled.
        num_worlds: M.
        classes: see ``_named_classes``.
    """
    config = recorded_game(card.dataset.folder)
    levels = config.draw_levels(num_levels, card.seed)
    keys, contents = start_layouts(config, levels)
    oracle, others = oracle_probabilities(keys, contents)
    chosen = np.flatnonzero(others >= 2)[:number]
    seeds = np.arange(len(chosen) * num_worlds)
    squares = []
    for part in in_batches(seeds, card.batch_size):
        rows = chosen[part // num_worlds].tolist()
        frames = start_frames(config, [levels[row] for row in rows])
        squares.append(squares_beyond(_world_of_level(card, frames, part), card.scale))
    found = np.concatenate(squares).reshape(len(chosen), num_worlds, -1)
    table: Table = {"levels": len(chosen), "levels_of_the_oracle": num_levels,
                    "layouts": len(set(keys))}
    for name, kinds in CONTENTS[config.env_name].items():
        if set(kinds) <= set(classes):
            numbers = np.concatenate([classes[kind] for kind in kinds])
            frequency = have_any(found, numbers).mean(axis=1)
            occurs = contents[name][chosen]
            table[name] = {
                "sampled": card.mean(frequency, chosen), "game": card.mean(occurs, chosen),
                **realism.relative_skill(frequency, occurs, chosen, num_worlds, (
                    oracle[name][chosen], others[chosen]), card.seed)}
    return table


def _world_of_level(card: Simulations, frames: np.ndarray, numbers: np.ndarray) -> World:
    """Sample worlds with these numbers around first frames of levels, uint8 (B, H, W, C), before
    which the simulator sees black frames."""
    last = torch.from_numpy(frames).to(card.compute.device).permute(0, 3, 1, 2).float() / 255
    images = torch.zeros(card.simulator.config.num_init_steps, *last.shape, device=last.device)
    images[-1] = last
    seeds = torch.from_numpy(numbers + card.first_seed).to(last.device)
    with card.compute.autocast():
        world = card.simulator.start_from(card.simulator.encode(images), card.draw, images=last,
                                          seeds=seeds).world
    assert world is not None
    return world


def _named_classes(card: Simulations) -> Named | None:
    """Return the classes of each kind of static object, and the squares in recorded views.

    Returns:
        Class numbers by name of the kind, see ``name_classes``; the squares in the views of
        recorded worlds, see ``squares_in_view``; and their episodes. None without worlds.
    """
    if card.simulator.squares is None:
        return None
    try:
        worlds = card.worlds or recorded_worlds(card.simulator, card.dataset, card.windows)
    except UserError as error:
        print(f"contents of worlds are not measured: {error}", flush=True)
        return None
    shown = np.isin(worlds.episodes, card.dataset.episodes_of(card.windows))
    angle = 2 * np.pi * torch.from_numpy(worlds.positions[shown] * [1, -1])
    phase = torch.stack([angle.cos(), angle.sin()], dim=-1).flatten(1)
    corner = world_corner(phase, worlds.squares.shape[-1], card.scale)
    world = World.of(torch.from_numpy(worlds.squares[shown]).long(), corner)
    return (name_classes(card.dataset, worlds, card.squares),
            squares_in_view(world, card.scale), worlds.episodes[shown])


def samples(card: Simulations) -> Image.Image:
    """Draw 64 random starts, and below them 8 recorded views with 8 continuations each."""
    frames = [list(first_step(card.simulate(card.random_start(rows), 1)[0])[0])
              for rows in np.array_split(np.arange(_SHOWN_STARTS), 4)]
    places = np.linspace(0, len(card.windows) - 1, _SHOWN_VIEWS).astype(int)
    batch = card.batch(card.dataset, np.repeat(card.windows[places], _SHOWN_VIEWS))
    seeds = torch.arange(len(batch.first_hidden), device=card.compute.device)
    with card.compute.autocast():
        world = window_start(card.simulator, dataclasses.replace(batch, world=None), card.draw,
                             seeds).world
    assert world is not None
    worlds = draw_worlds(card.squares, world, WORLD_SIZE)
    views = to_frames(batch.initial_images[-1])[::_SHOWN_VIEWS]
    parts = (strip(frames, FRAME_SIZE), draw_continuations(
        views, worlds.reshape(_SHOWN_VIEWS, -1, *worlds.shape[1:]), _THUMB))
    whole = Image.new("RGB", (max(part.width for part in parts),
                              parts[0].height + _GAP + parts[1].height), "white")
    whole.paste(parts[0], (0, 0))
    whole.paste(parts[1], (0, parts[0].height + _GAP))
    return whole

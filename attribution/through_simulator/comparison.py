"""Which kind of map is right more often about the real game?

Three measures in the same frames, for every kind of map: deletion and insertion of blocks of the
frame; rank correlation with the maps of an agent whose weights are drawn again; and objects hidden
in the real game, whose effect on the output should have the sign opposite to that of the map in
their pixels. Of the last one also, over all kinds of object together, the share of hidden objects
whose sign a map gets right, frame by frame, by the statistics of ``stats.effects``: each
map against a half, and saliency through the simulator against attributions of the same frames.
Controls are the maps of other frames, shifted in a circle.

Letters in shape comments: N frames, K kinds of object, M maps, H W a grid, P points of a curve.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from attribution.checking.object_scores import cells_of
from attribution.through_simulator.maps import Map
from stats.bootstrap import ClusterBootstrap
from stats.effects import Condition, Outcome, compare_conditions

NUM_SHIFTS = 20
AGREEMENT = Outcome("agreement", "share of hidden objects whose sign is right", probability=True)
KINDS = ("deletion", "insertion")
CHANCE = "chance"


def agreements(one: Map, masks: np.ndarray, changes: np.ndarray, shift: int = 0) -> np.ndarray:
    """Share of the objects of each frame whose effect has the sign that the map says, (N,); NaN
    where nothing changes.

    Args:
        masks: bool (N, K, 64, 64).
        changes: at the map's lag (N, K).
        shift: frames by which the maps are shifted.
    """
    cells = cells_of(masks, one.bottleneck)  # (N, K, H, W)
    said = -(np.roll(one.values, shift, axis=0)[:, None] * cells).sum(axis=(2, 3))
    counted = changes != 0
    right = ((np.sign(said) == np.sign(changes)) & counted).sum(axis=1)
    number = counted.sum(axis=1)
    return np.divide(right, number, out=np.full(len(right), np.nan), where=number > 0)


def compared(maps: Sequence[Map], masks: np.ndarray, changes: dict[int, np.ndarray],
             episodes: np.ndarray, seed: int) -> pd.DataFrame:
    """Agreement of each map less a half, and of each saliency map less each attribution.

    Args:
        changes: by lag (N, K). An attribution is of the frame's own output; it is compared at
            every lag.
        episodes: of each frame (N,).

    Returns:
        The table of ``stats.effects.compare_conditions``, all comparisons one family, with the
        columns ``map``, ``compared_with``, ``lag``, and the shares ``right`` and ``other``.
        ``altered`` is the difference, and ``unaltered`` 0. A control is the same difference with
        the maps of other frames, on both sides.
    """
    shifts = (0, *np.unique(np.linspace(0, len(episodes), NUM_SHIFTS + 2)[1:-1].astype(int)))
    counted = np.all([(change != 0).any(axis=1) for change in changes.values()], axis=0)
    arms, after, facts = [], [], []
    for lag, change in changes.items():
        found = {one.name: np.stack([agreements(one, masks, change, shift)[counted]
                                     for shift in shifts])
                 for one in maps if one.lag == lag or _is_layer(one)}
        others = {CHANCE: np.full((len(shifts), counted.sum()), 0.5),
                  **{one.name: found[one.name] for one in maps if _is_layer(one)}}
        for other, against in others.items():
            for one in maps:
                if one.name not in found or (other != CHANCE and _is_layer(one)):
                    continue
                pair = f"{one.name} against {other} at {lag}"
                for number, difference in enumerate(found[one.name] - against):
                    name = f"{pair}, control {number}" if number else pair
                    arms.append(Condition(name, pair, pair, number > 0))
                    after.append(difference[:, None])
                    facts.append((one.name, other, lag, found[one.name][number].mean(),
                                  against[number].mean()))
    table = compare_conditions(arms, [AGREEMENT], np.zeros((counted.sum(), 1)), np.stack(after),
                               seed, episodes[counted])
    named = pd.DataFrame(facts, columns=["map", "compared_with", "lag", "right", "other"])
    return pd.concat([named, table.drop(columns=["label", "pattern"])], axis=1)


def _is_layer(one: Map) -> bool:
    return one.bottleneck.layer.stride > 1


def deletion_table(names: Sequence[str], curves: np.ndarray, num_maps: int, episodes: np.ndarray,
                   seed: int) -> pd.DataFrame:
    """How much better each map's order is than random ones.

    Args:
        names: of the maps (M,).
        curves: float64 (N, orders, 2, P): of the maps, then of random orders.
        num_maps: M.

    Returns:
        Columns ``map``, ``kind``, ``area`` and ``random_area`` (mean heights, in deviations of the
        output over the frames), ``better`` (smaller in deletion, larger in insertion), ``low_95``,
        ``high_95`` by bootstrap over episodes, ``above`` (whether the interval is above 0).
    """
    deviation = max(float(curves[:, 0, 0, 0].std()), 1e-9)
    areas = (curves[..., 1:] + curves[..., :-1]).mean(axis=-1) / 2 / deviation  # (N, orders, 2)
    random = areas[:, num_maps:].mean(axis=1)
    bootstrap, rows = ClusterBootstrap(episodes, seed), []
    for place, name in enumerate(names):
        for number, kind in enumerate(KINDS):
            better = (areas[:, place, number] - random[:, number]) * (1 if number else -1)
            low, high = bootstrap.interval(better[None])[:, 0]
            rows.append((name, kind, areas[:, place, number].mean(), random[:, number].mean(),
                         better.mean(), low, high, bool(low > 0)))
    return pd.DataFrame(rows, columns=["map", "kind", "area", "random_area", "better", "low_95",
                                       "high_95", "above"])

"""Objects taken out of the real game in single frames: does the output change by what was
attributed to the cells in which they lie?

Atrey, Clary and Jensen (2020), "Exploratory not explanatory: counterfactual analysis of saliency
maps for deep reinforcement learning". The frame is drawn once more without one kind of object, and
the agent, with the same memory, sees this one.

Letters in shape comments: N frames, K kinds of object, J outputs, H W cells of a layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch

from agents.acting import run_policy
from agents.outputs import Output
from attribution.checking.checked_frames import CheckedFrames
from attribution.checking.object_scores import cells_of
from attribution.checking.recorded_objects import painted
from attribution.context import AttributionContext
from attribution.layers import Bottleneck
from envs.objects import GameObject
from stats.association import rank_correlation, ratio
from stats.bootstrap import ClusterBootstrap

MIN_FRAMES = 10  # with a kind, for its numbers


@dataclasses.dataclass(frozen=True)
class Removals:
    """Frames without single kinds of object.

    Attributes:
        masks: pixels of each kind, bool (N, K, 64, 64).
        changes: of each output when a kind is taken out, float64 (J, N, K); 0 where it is not seen.
    """

    masks: np.ndarray
    changes: np.ndarray


def removals(context: AttributionContext, frames: CheckedFrames, kinds: Sequence[GameObject],
             outputs: Sequence[Output]) -> Removals:
    """Take each kind of object out of each frame.

    Raises:
        UserError: if the recording cannot be played again.
    """
    masks, changes = [], []
    pictures = painted(context.recording.folder, frames.places, kinds)
    for place, each in zip(frames.places, pictures):
        rows = context.recording.read(place[None])
        seen = each.masks.any(axis=(1, 2))
        shown = np.concatenate([each.frame[None], each.without[seen]])
        entering = torch.from_numpy(rows.entering).expand(len(shown), -1)
        found = run_policy(context.policy, context.compute, shown,
                           entering.to(context.compute.device))
        actions = torch.from_numpy(rows.actions).expand(len(shown)).to(context.compute.device)
        scalars = torch.stack([output(found, actions) for output in outputs]).double().cpu().numpy()
        change = np.zeros((len(outputs), len(kinds)))
        change[:, seen] = scalars[:, 1:] - scalars[:, :1]
        masks.append(each.masks)
        changes.append(change)
    return Removals(np.stack(masks), np.stack(changes, axis=1))


def objects_table(masks: np.ndarray, changes: np.ndarray, attributions: np.ndarray,
                  bottleneck: Bottleneck,
                  kinds: Sequence[str], episodes: np.ndarray, seed: int) -> pd.DataFrame:
    """How changes of an output go with its attributions to the cells of a layer that objects touch.

    Chance is the attribution to the cells that the kind touches in another frame: the masks are
    shifted by half of the frames that have the kind, in a circle.

    Args:
        masks: bool (N, K, 64, 64).
        changes: (N, K).
        attributions: of each cell (N, H, W).
        kinds: names (K,).
        episodes: of each frame (N,).
        seed: of the bootstrap over episodes.

    Returns:
        A row a kind: ``kind``, ``frames`` and ``episodes`` in which it is seen; ``change`` (mean
        change of the output without it), ``expected`` (mean of minus the attribution to its
        cells); ``agreement`` (share of frames in which both have the same sign; 0 agrees with
        nothing) with ``low_95`` and ``high_95``, and that of ``chance`` with ``above_low_95``, the
        lower end of the interval of the difference; ``above_chance`` (whether the interval of the
        agreement lies above 0.5 and that of the difference above 0); ``rank_correlation`` with
        ``rank_low_95`` and ``rank_high_95``; ``share`` of |attribution| in its cells, their
        ``area`` as a share of the grid, ``density`` (share by area) with ``density_low_95`` and
        ``density_high_95``; ``attribution_sign``, the mean sign of the attribution to its cells.
        NaN where too few frames have it.
    """
    touched = cells_of(masks, bottleneck)  # (N, K, H, W)
    whole = np.abs(attributions).sum(axis=(1, 2))
    rows = []
    for number, name in enumerate(kinds):
        seen = touched[:, number].any(axis=(1, 2))
        where = episodes[seen]
        facts = {"kind": name, "frames": int(seen.sum()), "episodes": len(np.unique(where))}
        if facts["frames"] < MIN_FRAMES or facts["episodes"] < 2:
            rows.append(facts)
            continue
        cells, held = touched[seen, number], attributions[seen]
        change, inside = changes[seen, number], (held * cells).sum(axis=(1, 2))
        shifted = (held * np.roll(cells, len(cells) // 2, axis=0)).sum(axis=(1, 2))
        agrees, by_chance = (np.sign(change) * np.sign(-each) > 0 for each in (inside, shifted))
        bootstrap = ClusterBootstrap(where, seed)
        low, high = bootstrap.interval(np.stack([agrees, agrees.astype(float) - by_chance]))
        ranks = rank_correlation(-inside, change, where, bootstrap)
        share = (np.abs(held) * cells).sum(axis=(1, 2)) / np.maximum(
            whole[seen], np.finfo(np.float32).tiny)
        area = cells.mean(axis=(1, 2))
        density = ratio(share, area, where, bootstrap)
        rows.append({
            **facts, "change": change.mean(), "expected": -inside.mean(),
            "agreement": agrees.mean(), "low_95": low[0], "high_95": high[0],
            "chance": by_chance.mean(), "above_low_95": low[1],
            "above_chance": bool(low[0] > 0.5 and low[1] > 0),
            "rank_correlation": ranks.value, "rank_low_95": ranks.low,
            "rank_high_95": ranks.high, "share": share.mean(), "area": area.mean(),
            "density": density.value, "density_low_95": density.low,
            "density_high_95": density.high,
            "attribution_sign": np.sign(inside).mean()})
    return pd.DataFrame(rows, columns=[
        "kind", "frames", "episodes", "change", "expected", "agreement", "low_95", "high_95",
        "chance", "above_low_95", "above_chance", "rank_correlation", "rank_low_95",
        "rank_high_95", "share", "area", "density", "density_low_95", "density_high_95",
        "attribution_sign"])


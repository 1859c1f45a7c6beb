"""Removal of objects from single frames: does the output change by the amount attributed to the
objects' cells?

The real game renders the frame again without one kind of object. The agent sees the new frame with
the same hidden state (Atrey, Clary and Jensen 2020, "Exploratory not explanatory: counterfactual
analysis of saliency maps for deep reinforcement learning").

Letters in shape comments: N frames, K kinds of object, J outputs, R renderings of a frame, H W
cells of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure

from agents.acting import run_policy
from agents.rollout_files import RolloutFolder
from attribution.checking.check import (
    Arrays,
    Check,
    CheckContext,
    Name,
    Subject,
    panels,
    summarise,
)
from attribution.checking.object_scores import cells_of, packed, rendered_without, unpacked
from attribution.layers import Bottleneck
from common.game_constants import FRAME_SIZE
from common.palette import BLUE, DARK_GREY
from common.results import Array
from envs.level_state import LevelState
from envs.objects import GameObject, kind_label
from stats.association import rank_correlation, ratio
from stats.bootstrap import ClusterBootstrap

MIN_FRAMES = 10  # minimum number of frames with a kind of object to compute its statistics
OBJECTS_AT_STAKE = ("coin", "saw")  # kinds that reward the agent or end the episode


class ObjectRemoval(Check):
    """Changes of the output when single kinds of object are not rendered.

    Stored arrays: ``masks``, packed into bits, uint8 (N, K, 512); ``changes``, changes of the
    output, float64 (N, K), 0 where a kind is not in view. Both are the same for all layers.
    """

    title = "Does the output change as attributed when an object is removed from the game?"
    method = (
        "The real game renders each frame again without one kind of object, and the agent sees "
        "the new frame with the same memory. Expected change: minus the sum of the attributions "
        "in the cells that the object's exact mask touches. Agreement: share of frames in which "
        "the output changes in the expected direction. By chance: agreement with the mask of the "
        "kind in another frame. Density: share of |attribution| in the touched cells, divided by "
        "their share of the grid. Criterion for coin and saw: the interval of the agreement lies "
        "above 0.5, and that of agreement minus chance above 0.")
    columns: ClassVar = {"kind": "object", "frames": "frames", "change": "change",
        "expected": "expected", "agreement": "agreement", "low_95": "low", "high_95": "high",
        "chance": "by chance", "rank_correlation": "rank correlation", "density": "density",
        "density_low_95": "low", "density_high_95": "high",
        "attribution_sign": "mean sign of the attribution"}
    arrays: ClassVar = {"masks": Array(np.uint8, f"N K {FRAME_SIZE**2 // 8}"),
                        "changes": Array(np.float64, "N K")}

    def place(self, context: CheckContext, subject: Subject) -> tuple[tuple[str, ...], str]:
        return (subject.output.name,), context.agent.provenance["agent_sha256"]

    def compute_all(self, context: CheckContext, subjects: Sequence[Subject]
                    ) -> Iterator[tuple[Subject, Arrays]]:
        agent, places = context.agent, context.places
        first = {subject.output: subject for subject in reversed(subjects)}  # by output

        def run(number: int, _: LevelState, frames: np.ndarray) -> np.ndarray:
            recorded = agent.recording.read(places[number:number + 1])
            entering, actions = (
                torch.from_numpy(array).expand(len(frames), *array.shape[1:]).to(
                    agent.compute.device) for array in (recorded.entering, recorded.actions))
            result = run_policy(agent.policy, agent.compute, frames, entering)
            return torch.stack([output(result, actions) for output in first]).double().cpu().numpy()

        if first and context.kinds:
            masks, changes = changes_without(agent.recording.folder, places, context.kinds, run)
            for subject, change in zip(first.values(), changes):
                yield subject, {"masks": packed(masks), "changes": change}

    def rows(self, context: CheckContext, subject: Subject, arrays: Arrays) -> pd.DataFrame:
        return objects_table(
            unpacked(arrays["masks"]), arrays["changes"], context.cells(subject),
            subject.bottleneck, [kind.name for kind in context.kinds], context.episodes,
            context.seed)

    def plot(self, table: pd.DataFrame, arrays: Mapping[Name, Arrays]) -> Figure:
        """Plot the agreement of signs and its chance level by kind of object."""
        named = table.groupby(["layer", "output"], sort=False)
        figure, axes_of = panels(1, len(named))
        for axes, (name, rows) in zip(axes_of[0], named):
            rows = rows.dropna(subset=["agreement"])
            places = np.arange(len(rows))
            axes.axvline(0.5, color=DARK_GREY, linewidth=0.8, linestyle="--")
            axes.hlines(places, rows["low_95"], rows["high_95"], color=BLUE)
            axes.plot(rows["agreement"], places, "o", color=BLUE, label="mask of the frame")
            axes.plot(rows["chance"], places, "x", color=DARK_GREY, label="mask of another frame")
            axes.set_yticks(places, rows["kind"].map(kind_label))
            axes.set(title=", ".join(name), xlabel="share of frames with the expected sign",
                     xlim=(0, 1))
            axes.invert_yaxis()
        axes_of[0, 0].legend(fontsize=8)
        return figure

    def verdict(self, table: pd.DataFrame) -> str:
        stake = table[table["kind"].isin(OBJECTS_AT_STAKE)]
        known = stake.dropna(subset=["agreement"])
        missing = sorted({*OBJECTS_AT_STAKE} - {*known["kind"]})
        return summarise(known["above_chance"].astype(bool), known.assign(
            kind=known["kind"].map(kind_label)),
            "The sign is right more often than by chance", "kind") + (
            f" Too few frames show: {', '.join(map(kind_label, missing))}." if missing else "")


def changes_without(folder: RolloutFolder, places: np.ndarray, kinds: Sequence[GameObject],
                    run: Callable[[int, LevelState, np.ndarray], np.ndarray]
                    ) -> tuple[np.ndarray, np.ndarray]:
    """Compute how outputs change if a kind of object is not rendered in recorded frames.

    Args:
        folder: the recording.
        places: episode and row of each frame (N, 2); rows of an episode are adjacent and ascending.
        kinds: kinds of object (K,).
        run: function that returns J outputs for each of R renderings of a frame (J, R). Its
            arguments are the frame's index, the level state and the renderings, uint8
            (R, 64, 64, 3), of which the first is the unchanged frame.

    Returns:
        Masks of the kinds, bool (N, K, 64, 64), and the change of each output, float64 (J, N, K), 0
        where a kind is not in view.

    Raises:
        UserError: if the recording cannot be replayed.
    """
    masks, changes = [], []
    for number, (state, pictures) in enumerate(rendered_without(folder, places, kinds)):
        seen = pictures.masks.any(axis=(1, 2))
        values = run(number, state,
                     np.concatenate([pictures.frame[None], pictures.without[seen]]))
        change = np.zeros((len(values), len(kinds)))
        change[:, seen] = values[:, 1:] - values[:, :1]
        masks.append(pictures.masks)
        changes.append(change)
    return np.stack(masks), np.stack(changes, axis=1)


def objects_table(masks: np.ndarray, changes: np.ndarray, attributions: np.ndarray,
                  bottleneck: Bottleneck, kinds: Sequence[str], episodes: np.ndarray,
                  seed: int) -> pd.DataFrame:
    """Compare changes of an output with its attributions to the cells that objects touch.

    The chance level uses the cells that the kind touches in another frame: among the frames that
    show the kind, masks are cyclically shifted by half the number of these frames.

    Args:
        masks: masks of the kinds of object, bool (N, K, 64, 64).
        changes: change of the output when each kind is not rendered (N, K).
        attributions: attribution to each cell (N, H, W).
        bottleneck: the layer.
        kinds: names of the kinds (K,).
        episodes: episode of each frame (N,).
        seed: seed of the bootstrap over episodes.

    Returns:
        A table with one row per kind, NaN where too few frames or only one episode show the kind.
        The cells of a kind are the cells that its mask touches in a frame.

        - ``kind``; ``frames`` and ``episodes``, numbers of frames and episodes with such cells
        - ``change``: mean change of the output without the kind
        - ``expected``: mean expected change, which is minus the attribution to the kind's cells
        - ``agreement``: share of frames in which actual and expected change have the same sign (a
          zero never agrees), with ``low_95`` and ``high_95``
        - ``chance``: agreement with shifted masks
        - ``above_low_95``: lower end of the interval of agreement minus chance
        - ``above_chance``: whether the interval of the agreement lies above 0.5, and that of
          agreement minus chance above 0
        - ``rank_correlation`` of the actual with the expected change, with ``rank_low_95`` and
          ``rank_high_95``
        - ``share``, ``area``: share of |attribution| in the kind's cells, and the share of the grid
          that these cells cover
        - ``density``, ``density_low_95``, ``density_high_95``: share divided by area, and its
          interval
        - ``attribution_sign``: mean sign of the attribution to the kind's cells
    """
    touched = cells_of(masks, bottleneck)  # (N, K, H, W)
    whole = np.abs(attributions).sum(axis=(1, 2))
    rows = []
    for number, name in enumerate(kinds):
        seen = touched[:, number].any(axis=(1, 2))
        where = episodes[seen]
        facts: dict[str, object] = {
            "kind": name, "frames": int(seen.sum()), "episodes": len(np.unique(where))}
        rows.append(facts)
        if seen.sum() < MIN_FRAMES or facts["episodes"] == 1:
            continue
        cells, attributed = touched[seen, number], attributions[seen]
        change, inside = changes[seen, number], (attributed * cells).sum(axis=(1, 2))
        shifted = (attributed * np.roll(cells, len(cells) // 2, axis=0)).sum(axis=(1, 2))
        agrees, by_chance = (np.sign(change) * np.sign(-attribution) > 0
                             for attribution in (inside, shifted))
        bootstrap = ClusterBootstrap(where, seed)
        low, high = bootstrap.interval(np.stack([agrees, agrees.astype(float) - by_chance]))
        ranks = rank_correlation(-inside, change, where, bootstrap)
        share = (np.abs(attributed) * cells).sum(axis=(1, 2)) / np.maximum(
            whole[seen], np.finfo(np.float32).tiny)
        area = cells.mean(axis=(1, 2))
        density = ratio(share, area, where, bootstrap)
        facts |= {
            "change": change.mean(), "expected": -inside.mean(),
            "agreement": agrees.mean(), "low_95": low[0], "high_95": high[0],
            "chance": by_chance.mean(), "above_low_95": low[1],
            "above_chance": bool(low[0] > 0.5 and low[1] > 0),
            "rank_correlation": ranks.value, "rank_low_95": ranks.low,
            "rank_high_95": ranks.high, "share": share.mean(), "area": area.mean(),
            "density": density.value, "density_low_95": density.low,
            "density_high_95": density.high,
            "attribution_sign": np.sign(inside).mean()}
    return pd.DataFrame(rows, columns=[
        "kind", "frames", "episodes", "change", "expected", "agreement", "low_95", "high_95",
        "chance", "above_low_95", "above_chance", "rank_correlation", "rank_low_95",
        "rank_high_95", "share", "area", "density", "density_low_95", "density_high_95",
        "attribution_sign"])

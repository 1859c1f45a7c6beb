"""Causal scrubbing (Chan et al. 2022): does a set of channels matter only through a feature?

The hypothesis says that at one layer the channels K matter only through a feature f of the
picture. The pass of a target goes on with a[K] of a source whose feature is the same, or another.
If the hypothesis holds, sources of the same feature change nothing and sources of another do; and
if K is what carries f, they do so more than in random sets of channels of equal number and size
of change.

Four conditions are paired in the level: {same f, other f} x {K, random sets}. The claim is the
double contrast (other - same)_K - (other - same)_random above 0, for outcomes that grow with the
change, such as the mean total variation; same_K with its interval says how much is lost although
the hypothesis says nothing is.

Letters in shape comments: L targets, B pictures of a target, k sources, C H W the maps of a layer,
K channels of a set, S random sets, M outcomes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypeVar

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from common.errors import UserError
from stats.bootstrap import ClusterBootstrap
from stats.effects import Condition, Outcome, compare_conditions

MIN_SOURCES = 5
NUM_SETS = 19
SAME, OTHER = "same", "other"

Source = TypeVar("Source")


def draw_sources(propose: Callable[[np.random.Generator], tuple[object, Source] | None],
                 feature: object, same: bool, num: int, tries: int,
                 rng: np.random.Generator) -> list[Source]:
    """Draw sources that have a feature, or do not have it.

    Args:
        propose: draws a source and returns its feature and the source; None if this draw gives no
            source, such as a level in which the square is a wall.
        feature: feature of the target, compared by ``==``.
        same: whether the features of the sources must equal it.
        num: number of sources.
        tries: number of draws before giving up.

    Raises:
        UserError: if too few sources were found within the tries.
    """
    sources = []
    for _ in range(tries):
        proposed = propose(rng)
        if proposed is not None and (proposed[0] == feature) == same:
            sources.append(proposed[1])
            if len(sources) == num:
                return sources
    which = "the same feature" if same else "another feature"
    raise UserError(f"only {len(sources)} of {num} sources with {which} as the target ({feature}) "
                    f"were found in {tries} tries; allow more tries, or take fewer sources")


@dataclasses.dataclass(frozen=True)
class Target:
    """A level whose channels are resampled.

    Attributes:
        level: its seed.
        activations: of its pictures at the layer (B, C, H, W).
        same: of the sources with its feature (k, C, H, W), or (k, B, C, H, W) if each picture has
            sources of its own.
        other: of those with another, as many.
        measure: activations to go on with (k, B, C, H, W) to the level's outcomes with each
            source (k, M), such as by ``Prefix.run_from``.
    """

    level: int
    activations: Tensor
    same: Tensor
    other: Tensor
    measure: Callable[[Tensor], np.ndarray]


def resampled(activations: Tensor, sources: Tensor, channels: Sequence[int],
              draw: Literal["joint", "channel"], rng: np.random.Generator) -> Tensor:
    """A target's activations with channels taken from k sources.

    Args:
        activations: (B, C, H, W); not written to.
        sources: (k, C, H, W) or (k, B, C, H, W).
        channels: K.
        draw: "joint": in draw i all channels are those of source i; "channel": each channel
            meets the sources in a random order of its own.

    Returns:
        (k, B, C, H, W).
    """
    num = len(sources)
    order = np.tile(np.arange(num)[:, None], len(channels))  # (k, K)
    if draw == "channel":
        order = rng.permuted(order, axis=0)
    taken = activations.repeat(num, 1, 1, 1, 1)
    for channel, of_channel in zip(channels, torch.as_tensor(order).T):
        given = sources[of_channel].select(-3, channel)  # (k, H, W), or (k, B, H, W)
        taken[:, :, channel] = given if given.ndim == 4 else given[:, None]
    return taken


def channel_changes(targets: Iterable[Target], std: Tensor | np.ndarray) -> np.ndarray:
    """Squared size of the change of each channel by each source, in standard deviations.

    Args:
        std: of the units over a reference set (C, H, W); units that do not vary are left out.

    Returns:
        float64 (sources of all targets, C): sums over cells, means over pictures.
    """
    std = torch.as_tensor(std)
    weight = torch.where(std > 0, 1 / std.clamp(min=torch.finfo(std.dtype).tiny), 0)
    rows = []
    for target in targets:
        for sources in (target.same, target.other):
            for source in sources:
                change = (source - target.activations) * weight  # (B, C, H, W)
                rows.append(change.square().sum(dim=(-2, -1)).mean(dim=0).double().cpu().numpy())
    return np.stack(rows)


def sizes_moved(changes: np.ndarray, sets: Sequence[Sequence[int]]) -> np.ndarray:
    """Size of the change that each set of channels makes, see ``Scrubbing.moved``.

    Args:
        changes: from :func:`channel_changes`.
    """
    return np.array([np.sqrt(changes[:, list(one)].sum(axis=1)).mean() for one in sets])


@dataclasses.dataclass(frozen=True)
class Scrubbing:
    """Outcomes of a hypothesis' four conditions.

    Attributes:
        outcomes: names, M of them.
        levels: seeds (L,).
        chosen: of the channels K, by condition ``SAME`` and ``OTHER``, float64 (L, M) each.
        random: of the random sets, by condition, float64 (S, L, M) each.
        sets: which they are; the first one is K.
        moved: size of the change that each set makes (1 + S,): Euclidean norm in the units'
            standard deviations, root mean square over a target's pictures, mean over sources.
        matched: whether the random sets' sizes are within a quarter of that of K, bool (S,).
    """

    outcomes: tuple[str, ...]
    levels: np.ndarray
    chosen: dict[str, np.ndarray]
    random: dict[str, np.ndarray]
    sets: Sequence[tuple[int, ...]]
    moved: np.ndarray
    matched: np.ndarray

    def conditions(self, seed: int) -> pd.DataFrame:
        """Means of the four conditions with intervals over levels: ``channels`` ("hypothesis" or
        "random"), ``feature``, ``outcome``, ``mean``, ``low_95``, ``high_95``."""
        bootstrap, rows = ClusterBootstrap(self.levels, seed), []
        for channels, of in (("hypothesis", self.chosen),
                             ("random", {name: values.mean(axis=0)
                                         for name, values in self.random.items()})):
            for feature, values in of.items():
                ends = bootstrap.interval(values.T)
                rows += [(channels, feature, *row)
                         for row in zip(self.outcomes, values.mean(axis=0), *ends)]
        return pd.DataFrame(rows, columns=["channels", "feature", "outcome", "mean", "low_95",
                                           "high_95"])

    def contrasts(self, seed: int) -> pd.DataFrame:
        """The double contrast of each outcome, judged as an effect is.

        Returns:
            The table of ``stats.effects.compare_conditions`` with the set of the hypothesis
            as the arm and the random ones as its controls: ``unaltered`` is (other - same) of the
            random sets, ``altered`` that of the hypothesis, ``effect`` the double contrast. A
            random set is compared with the mean of the others. ``supported`` says whether the
            double contrast is claimed and above 0.
        """
        contrast = self.chosen[OTHER] - self.chosen[SAME]  # (L, M)
        randoms = self.random[OTHER] - self.random[SAME]  # (S, L, M)
        mean, num = randoms.mean(axis=0), len(randoms)
        # A set less the mean of the others is num / (num - 1) times it less the mean of all.
        controls = mean + (randoms - mean) * num / max(num - 1, 1)
        names = ["hypothesis", *(f"random_{number:02d}" for number in range(num))]
        arms: list[Condition] = [
            Condition(name, "channels " + ",".join(map(str, one)), "scrubbing", number > 0)
            for number, (name, one) in enumerate(zip(names, self.sets))]
        outcomes = [Outcome(name, name) for name in self.outcomes]
        table = compare_conditions(arms, outcomes, mean, np.stack([contrast, *controls]), seed,
                                   self.levels, dict(zip(names, self.moved.tolist())),
                                   verdicts=False)
        table["supported"] = table["claimed"] & (table["effect"] > 0)
        return table


def scrub_target(target: Target, sets: Sequence[Sequence[int]], seed: Sequence[int],
                 draw: Literal["joint", "channel"] = "joint") -> np.ndarray:
    """Outcomes of one target, means over its sources: float64 (2, sets, M), of the sources with its
    feature and of those with another.

    Args:
        sets: of channels.
        seed: numbers that decide the order of sources channel by channel.
        draw: see ``resampled``.
    """
    return np.stack([[
        target.measure(resampled(target.activations, sources, one, draw,
                                 np.random.default_rng([*seed, number]))).mean(axis=0)
        for number, one in enumerate(sets)] for sources in (target.same, target.other)])


def collect_scrubbing(levels: Sequence[int], values: np.ndarray, outcomes: Sequence[str],
                      sets: Sequence[tuple[int, ...]], moved: np.ndarray,
                      matched: np.ndarray) -> Scrubbing:
    """Collect the outcomes of all targets.

    Args:
        levels: level of each target (L,).
        values: outcomes from :func:`scrub_target` (L, 2, sets, M).
        outcomes: names, M of them.
        sets: sets of channels; the first one is the hypothesis.
        moved: from :func:`sizes_moved`.
        matched: whether each random set is matched, see ``interventions.controls.matched_sets``.
    """
    by_feature = dict(zip((SAME, OTHER), values.transpose(1, 2, 0, 3)))  # (sets, L, M) each
    return Scrubbing(tuple(outcomes), np.array(levels),
                     {feature: values[0] for feature, values in by_feature.items()},
                     {feature: values[1:] for feature, values in by_feature.items()}, sets, moved,
                     matched)

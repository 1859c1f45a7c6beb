"""Causal scrubbing (Chan et al. 2022): does a set of channels matter only through a feature?

The hypothesis is that, at one layer, the channels K matter only through a feature f of the frame.
The forward pass of a target frame is resumed with the activations a[K] of a source frame, in which
f has the same value or another one. If the hypothesis holds, sources with the same value have no
effect, and sources with another value do. If K carries f, the effect of sources with another value
is larger for K than for random sets of the same number of channels and the same size of change.

Four conditions are paired by level: {same f, other f} x {K, random sets}. The claim is a double
contrast (other - same)_K - (other - same)_random above 0, for outcomes that grow with the change,
such as the mean total variation. The mean of same_K, with its interval, measures the effect that
the hypothesis predicts to be zero.

Letters in shape comments: L targets, B frames of a target, k sources, C H W the maps of a layer,
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
    """Draw sources whose feature has the same value as in a target, or another value.

    Args:
        propose: function that draws a source, and returns the value of its feature and the source;
            or None if the draw gives no source, such as a level in which the square is a wall.
        feature: value of the feature in the target, compared by ``==``.
        same: whether the sources must have the same value, rather than another one.
        num: number of sources.
        tries: maximum number of draws.
        rng: random number generator, passed to ``propose``.

    Raises:
        UserError: if too few sources are found within the tries.
    """
    sources = []
    for _ in range(tries):
        proposed = propose(rng)
        if proposed is not None and (proposed[0] == feature) == same:
            sources.append(proposed[1])
            if len(sources) == num:
                return sources
    raise UserError(f"only {len(sources)} of {num} sources with "
                    f"{'the same feature' if same else 'another feature'} as the target ({feature})"
                    f" were drawn in {tries} tries; allow more tries, or use fewer sources")


@dataclasses.dataclass(frozen=True)
class Target:
    """A level in whose frames the channels of a layer are resampled.

    Attributes:
        level: seed of the level.
        activations: activations of the layer in the frames of the level (B, C, H, W).
        same: activations of the sources whose feature has the same value (k, C, H, W), or
            (k, B, C, H, W) if each frame has its own sources.
        other: activations of the sources whose feature has another value, of the same shape.
        measure: function that maps resampled activations (k, B, C, H, W) to the level's outcomes
            with each source (k, M), for example with ``Prefix.run_from``.
    """

    level: int
    activations: Tensor
    same: Tensor
    other: Tensor
    measure: Callable[[Tensor], np.ndarray]


def resampled(activations: Tensor, sources: Tensor, channels: Sequence[int],
              draw: Literal["joint", "channel"], rng: np.random.Generator) -> Tensor:
    """Replace channels of a target's activations by the same channels of k sources.

    Args:
        activations: activations of the target (B, C, H, W); not modified.
        sources: activations of the sources (k, C, H, W) or (k, B, C, H, W).
        channels: channels K to replace.
        draw: "joint": in row i of the result, all channels come from source i; "channel": the
            sources of each channel are permuted separately.
        rng: random number generator of the permutations.

    Returns:
        Resampled activations (k, B, C, H, W).
    """
    num = len(sources)
    order = np.tile(np.arange(num)[:, None], len(channels))  # (k, K)
    if draw == "channel":
        order = rng.permuted(order, axis=0)
    sources = sources if sources.ndim == 5 else sources[:, None]
    result = activations.repeat(num, 1, 1, 1, 1)
    for channel, rows in zip(channels, torch.as_tensor(order).T):
        result[:, :, channel] = sources[rows, :, channel]
    return result


def channel_changes(targets: Iterable[Target], std: Tensor | np.ndarray) -> np.ndarray:
    """Compute the squared norm of the change of each channel by each source.

    Args:
        targets: targets with their sources.
        std: standard deviations of the units over a reference set (C, H, W); constant units are
            ignored.

    Returns:
        Squared norms in standard deviations, summed over cells and averaged over frames, float64
        (sources of all targets, C).
    """
    std = torch.as_tensor(std)
    weight = torch.where(std > 0, 1 / std.clamp(min=torch.finfo(std.dtype).tiny), 0)
    rows = []
    for target in targets:
        for source in (*target.same, *target.other):
            change = (source - target.activations) * weight  # (B, C, H, W)
            rows.append(change.square().sum(dim=(-2, -1)).mean(dim=0).double().cpu().numpy())
    return np.stack(rows)


def sizes_moved(changes: np.ndarray, sets: Sequence[Sequence[int]]) -> np.ndarray:
    """Compute the size of the change for each set of channels, see ``Scrubbing.moved``.

    Args:
        changes: result of :func:`channel_changes`.
        sets: sets of channels.
    """
    return np.array([np.sqrt(changes[:, list(channels)].sum(axis=1)).mean() for channels in sets])


@dataclasses.dataclass(frozen=True)
class Scrubbing:
    """Outcomes of causal scrubbing under four conditions.

    Either the channels of the hypothesis or random sets of channels are resampled, from sources
    whose feature has the same value as in the target or another one.

    Attributes:
        outcomes: names of the M outcomes.
        levels: seed of the level of each target (L,).
        chosen: outcomes with the channels of the hypothesis resampled, by ``SAME`` and ``OTHER``
            value of the feature in the sources, float64 (L, M) each.
        random: outcomes with the random sets resampled, by ``SAME`` and ``OTHER``, float64
            (S, L, M) each.
        sets: sets of channels, first the hypothesis, then the random sets.
        moved: size of the change for each set (1 + S,): Euclidean norm in standard deviations of
            the units, root mean square over a target's frames, mean over sources.
        matched: whether the size of each random set's change differs by at most a quarter from that
            of the hypothesis, bool (S,).
    """

    outcomes: tuple[str, ...]
    levels: np.ndarray
    chosen: dict[str, np.ndarray]
    random: dict[str, np.ndarray]
    sets: Sequence[tuple[int, ...]]
    moved: np.ndarray
    matched: np.ndarray

    def conditions(self, seed: int) -> pd.DataFrame:
        """Compute the means of the four conditions, with bootstrap intervals over levels.

        Args:
            seed: seed of the bootstrap.

        Returns:
            One row per condition and outcome: ``channels`` ("hypothesis" or "random"),
            ``feature`` (SAME or OTHER), ``outcome``, ``mean``, ``low_95``, ``high_95``.
        """
        bootstrap, rows = ClusterBootstrap(self.levels, seed), []
        for channels, by_feature in (("hypothesis", self.chosen),
                                     ("random", {name: values.mean(axis=0)
                                                 for name, values in self.random.items()})):
            for feature, values in by_feature.items():
                ends = bootstrap.interval(values.T)
                rows += [(channels, feature, *row)
                         for row in zip(self.outcomes, values.mean(axis=0), *ends)]
        return pd.DataFrame(rows, columns=["channels", "feature", "outcome", "mean", "low_95",
                                           "high_95"])

    def contrasts(self, seed: int) -> pd.DataFrame:
        """Test the double contrast of each outcome with the statistics of ``stats.effects``.

        Args:
            seed: seed of the bootstrap and the sign flips.

        Returns:
            The table of ``stats.effects.compare_conditions``, with the set of the hypothesis as
            the condition and the random sets as its controls. ``unaltered`` is (other - same) for
            the random sets, ``altered`` is (other - same) for the hypothesis, and ``effect`` is the
            double contrast. As a control, each random set is compared with the mean of the others.
            The additional column ``supported`` states whether the double contrast is claimed and
            above 0.
        """
        contrast = self.chosen[OTHER] - self.chosen[SAME]  # (L, M)
        randoms = self.random[OTHER] - self.random[SAME]  # (S, L, M)
        mean, num = randoms.mean(axis=0), len(randoms)
        # x - mean of the others = num / (num - 1) * (x - mean of all)
        controls = mean + (randoms - mean) * num / max(num - 1, 1)
        names = ["hypothesis", *(f"random_{number:02d}" for number in range(num))]
        compared: list[Condition] = [
            Condition(name, "channels " + ",".join(map(str, channels)), "scrubbing", number > 0)
            for number, (name, channels) in enumerate(zip(names, self.sets))]
        outcomes = [Outcome(name, name) for name in self.outcomes]
        table = compare_conditions(compared, outcomes, mean, np.stack([contrast, *controls]),
                                   seed, self.levels, dict(zip(names, self.moved.tolist())),
                                   verdicts=False)
        table["supported"] = table["claimed"] & (table["effect"] > 0)
        return table


def scrub_target(target: Target, sets: Sequence[Sequence[int]], seed: Sequence[int],
                 draw: Literal["joint", "channel"] = "joint") -> np.ndarray:
    """Measure the outcomes of a target after resampling each set of channels, averaged over its
    sources.

    Args:
        target: target with its sources.
        sets: sets of channels.
        seed: seed of the permutations of sources for the draw "channel".
        draw: see ``resampled``.

    Returns:
        Outcomes with sources whose feature has the same value, then with sources whose feature has
        another value, float64 (2, sets, M).
    """
    return np.stack([[
        target.measure(resampled(target.activations, sources, channels, draw,
                                 np.random.default_rng([*seed, number]))).mean(axis=0)
        for number, channels in enumerate(sets)] for sources in (target.same, target.other)])


def collect_scrubbing(levels: Sequence[int], values: np.ndarray, outcomes: Sequence[str],
                      sets: Sequence[tuple[int, ...]], moved: np.ndarray,
                      matched: np.ndarray) -> Scrubbing:
    """Collect the outcomes of all targets.

    Args:
        levels: level of each target (L,).
        values: outcomes from :func:`scrub_target` (L, 2, sets, M).
        outcomes: names of the M outcomes.
        sets: sets of channels; the first one is the hypothesis.
        moved: sizes of change from :func:`sizes_moved` (sets,).
        matched: whether each random set is matched, bool (S,); see
            ``interventions.controls.matched_sets``.
    """
    by_feature = dict(zip((SAME, OTHER), values.transpose(1, 2, 0, 3)))  # (sets, L, M) each
    return Scrubbing(tuple(outcomes), np.array(levels),
                     {feature: values[0] for feature, values in by_feature.items()},
                     {feature: values[1:] for feature, values in by_feature.items()}, sets, moved,
                     matched)

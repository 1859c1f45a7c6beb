"""Paired effects of conditions on outcomes, matched controls, and the rule for claims.

The same levels or starts are measured without any intervention and under several conditions, with
the same random draws. Some conditions are interventions of interest; each kind of intervention has
controls, which apply random changes of equal size in the same way. A run gives one number for each
outcome. The effect of a condition is the mean over starts of the difference between the altered and
the unaltered run.

- Interval: 95 % bootstrap interval over starts, with the same draws for all conditions.
- ``p``: two-sided sign-flip test of the paired differences (Fisher 1935), exact if altered and
  unaltered runs are exchangeable. ``p_holm``: ``p`` corrected by Holm's method (1979) over all
  interventions and outcomes.
- ``p_control``: (1 + number of controls whose effect is at least as large in absolute value) /
  (1 + number of controls). It is not corrected for the number of comparisons.

An effect is claimed if its interval excludes 0, ``p_holm`` <= 0.05 and ``p_control`` <= 0.05, which
requires at least 19 controls. Applying the rule to each control, with the other controls for
comparison, shows how often the effect of a random intervention is claimed.

A large p does not show that there is no effect. The verdict on an effect that is not claimed is
"nothing" if its interval lies within a margin around 0 (two one-sided tests; Schuirmann 1987): 0.05
for probabilities, and 5 % of the unaltered value otherwise.

Outcomes may be any real numbers. If several runs belong to one level, they are resampled together,
and the signs of their differences are flipped together.

Letters in shape comments: A conditions, K outcomes, C comparisons (A * K).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import pandas as pd
from scipy.stats import norm

from common.errors import UserError
from common.tables import format_count
from stats.bootstrap import ClusterBootstrap, by_episode
from stats.significance import LEVEL, holm, sign_flip_p

MARGIN = 0.05  # margin around 0 for the verdict NOTHING
POWER = 0.8  # power that defines the smallest detectable effect
CLAIMED, NOTHING, UNDECIDED = "claimed", "nothing", "undecided"  # verdicts
MIN_STARTS = 10
MIN_CONTROLS_TO_CLAIM = round(1 / LEVEL) - 1
MIN_FLIPS, FLIPS_PER_COMPARISON = 10_000, 100  # the smallest p is 1 / flips, far below LEVEL / C

DIVERGENCE = "divergence"  # name of an outcome, see ``interventions.comparison.divergence``

Value = TypeVar("Value")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A quantity that is measured in each run.

    Attributes:
        simulated: whether the quantity can be measured in the simulator.
        real: whether the quantity can be measured in the real environment.
        probability: whether the quantity is a probability or a share.
    """

    name: str
    label: str
    simulated: bool = True
    real: bool = True
    probability: bool = False


@dataclasses.dataclass(frozen=True)
class Condition(Generic[Value]):
    """An intervention or a control, under which outcomes are measured.

    Attributes:
        name: name in tables; also the name of the condition's file or folder.
        pattern: kind of intervention. Interventions are compared with the controls of the same
            pattern.
        value: definition of the intervention, which only the study interprets.
        settings: settings of the condition, which a result folder stores.
        matched: for a control, whether its change is about as large as the intervention's.
    """

    name: str
    label: str
    pattern: str
    control: bool = False
    value: Value | None = dataclasses.field(default=None, repr=False, compare=False)
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False,
                                                    compare=False)
    matched: bool = dataclasses.field(default=True, repr=False, compare=False)


def compare_conditions(conditions: Sequence[Condition], outcomes: Sequence[Outcome],
                       before: np.ndarray, after: np.ndarray, seed: int,
                       levels: np.ndarray | None = None, moved: Mapping[str, float] | None = None,
                       verdicts: bool = True) -> pd.DataFrame:
    """Compute the effect of each condition on each outcome, and whether it is claimed.

    Args:
        conditions, outcomes, before, after, seed, levels, moved: see ``paired_effects``.
        verdicts: whether to add the columns of ``with_verdicts``.

    Returns:
        A row per condition and outcome, with the columns ``condition`` (name of the condition);
        ``label``, ``pattern`` and ``control`` (attributes of ``Condition``); ``moved``;
        ``outcome``; ``unaltered`` and ``altered`` (means); ``effect``, ``low_95``, ``high_95``,
        ``p``, ``p_holm``; ``control_low`` and ``control_high`` (smallest and largest effect of the
        controls with the same pattern, without the row's own condition); ``num_controls``,
        ``p_control`` and ``claimed``.

    Raises:
        UserError: see ``paired_effects``; or if a kind of intervention (``Condition.pattern``) has
            fewer than two controls.
    """
    table = with_claims(paired_effects(conditions, outcomes, before, after, seed, levels, moved))
    return (with_verdicts(table, outcomes, before, after, seed, levels) if verdicts else table)


def paired_effects(conditions: Sequence[Condition], outcomes: Sequence[Outcome],
                   before: np.ndarray, after: np.ndarray, seed: int,
                   levels: np.ndarray | None = None, moved: Mapping[str, float] | None = None,
                   test: Callable[[np.ndarray], np.ndarray] | None = None) -> pd.DataFrame:
    """Compute the effect of each condition on each outcome, with its interval and p-value.

    Args:
        outcomes: outcomes along the last axis of ``before`` and ``after``.
        before: outcomes of the unaltered runs (N, K).
        after: outcomes under each condition (A, N, K).
        levels: level of each start (N,); starts on the same level are resampled together, and their
            signs are flipped together. By default, each start is its own level.
        moved: size of the change that a condition makes, by name of the condition; if None, the
            table has no column ``moved``.
        test: maps the sums of paired differences per level (levels, C) to p-values (C,); by default
            the sign-flip test.

    Returns:
        The columns of ``compare_conditions`` up to ``p``.

    Raises:
        UserError: if an outcome is NaN or infinite, or there are fewer than MIN_STARTS levels.
    """
    names = [outcome.name for outcome in outcomes]
    levels = np.arange(len(before)) if levels is None else levels
    check_starts(len(np.unique(levels)))
    for name, values in (("unaltered", before),
                         *zip((condition.name for condition in conditions), after)):
        bad = ~np.isfinite(values).all(axis=0)
        if bad.any():
            raise UserError(f"the outcome {names[int(bad.argmax())]} of the condition {name} is "
                            "NaN or infinite on some levels; exclude these levels from all "
                            "conditions")
    differences = _differences(before, after)  # (N, C)
    low, high = ClusterBootstrap(levels, seed).interval(differences.T)
    num_flips = max(MIN_FLIPS, FLIPS_PER_COMPARISON * differences.shape[1])
    table = pd.DataFrame([(condition.name, condition.label, condition.pattern, condition.control)
                          for condition in conditions for _ in names],
                         columns=["condition", "label", "pattern", "control"])
    if moved is not None:
        table["moved"] = [moved[name] for name in table["condition"]]
    table["outcome"] = np.tile(names, len(conditions))
    table["unaltered"] = np.tile(before.mean(axis=0), len(conditions))
    table["altered"] = after.mean(axis=1).ravel()
    table["effect"] = differences.mean(axis=0)
    table["low_95"], table["high_95"] = low, high
    sums = by_episode(levels, differences.T)
    table["p"] = sign_flip_p(sums, num_flips, seed) if test is None else test(sums)
    return table


def with_verdicts(table: pd.DataFrame, outcomes: Sequence[Outcome], before: np.ndarray,
                  after: np.ndarray, seed: int, levels: np.ndarray | None = None) -> pd.DataFrame:
    """Add medians, verdicts and smallest detectable effects.

    Args:
        table: table from ``with_claims``.
        outcomes, before, after, seed, levels: see ``paired_effects``.

    Returns:
        A copy of the table with further columns. ``median_unaltered``, ``median_altered``,
        ``median_effect`` (their difference), ``median_low_95`` and ``median_high_95`` are NaN for
        controls. ``verdict`` is CLAIMED if the effect is claimed; otherwise NOTHING if its interval
        lies within ``margin`` around 0, else UNDECIDED. ``smallest_effect`` is the effect that a
        single comparison over the same number of levels detects at p <= 0.05 with power 0.8,
        estimated from the spread of the differences.
    """
    levels = np.arange(len(before)) if levels is None else levels
    table = table.copy()
    directions = ~table["control"].to_numpy()
    values = after.transpose(0, 2, 1).reshape(-1, len(before))[directions]  # (C, N)
    unaltered = np.tile(before.T, (len(after), 1))[directions]
    middle, base = np.median(values, axis=1), np.median(unaltered, axis=1)
    low, high = ClusterBootstrap(levels, seed).interval_of_medians(values, unaltered)
    table.loc[directions, ["median_unaltered", "median_altered", "median_effect", "median_low_95",
                           "median_high_95"]] = np.stack([base, middle, middle - base, low, high],
                                                         axis=1)
    shares = {outcome.name for outcome in outcomes if outcome.probability}
    table["margin"] = np.where(table["outcome"].isin(shares), MARGIN,
                               MARGIN * table["unaltered"].abs())
    within = (table["low_95"] >= -table["margin"]) & (table["high_95"] <= table["margin"])
    table["verdict"] = np.select([table["claimed"], within], [CLAIMED, NOTHING], UNDECIDED)
    differences = _differences(before, after)
    sums = by_episode(levels, (differences - differences.mean(axis=0)).T)  # (levels, C)
    error = np.sqrt((sums ** 2).sum(axis=0) * len(sums) / (len(sums) - 1)) / len(before)
    table["smallest_effect"] = (norm.ppf(1 - LEVEL / 2) + norm.ppf(POWER)) * error
    return table


def _differences(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Return altered minus unaltered outcomes (N, C)."""
    return (after - before).transpose(1, 0, 2).reshape(len(before), -1)


def with_claims(table: pd.DataFrame) -> pd.DataFrame:
    """Add corrected p-values, the comparison with controls, and whether each effect is claimed.

    P-values are corrected over all interventions, and separately over the controls of each kind of
    intervention (``Condition.pattern``).

    Args:
        table: table from ``paired_effects``, which is modified in place.

    Returns:
        The table with the further columns of ``compare_conditions``.

    Raises:
        UserError: if a kind of intervention has fewer than two controls.
    """
    table["p_holm"] = table.groupby(["control", table["pattern"].where(table["control"], "")]
                                    )["p"].transform(holm)
    controls = {key: (rows["condition"].to_numpy(), rows["effect"].to_numpy()) for key, rows
                in table[table["control"]].groupby(["pattern", "outcome"])}
    columns = []
    for row in table.itertuples():
        names, others = controls.get((row.pattern, row.outcome), (np.array([]), np.array([])))
        others = others[names != row.condition]
        if not len(others):
            raise UserError(f"{row.label} has no other control to be compared with; use "
                            "--num_controls 2 or more")
        rank = (1 + (np.abs(others) >= abs(row.effect)).sum()) / (1 + len(others))
        columns.append((others.min(), others.max(), len(others), rank))
    table[["control_low", "control_high", "num_controls", "p_control"]] = columns
    table["num_controls"] = table["num_controls"].astype(int)
    table["claimed"] = (((table["low_95"] > 0) | (table["high_95"] < 0))
                        & (table["p_holm"] <= LEVEL) & (table["p_control"] <= LEVEL))
    return table


def claims_summary(table: pd.DataFrame) -> str:
    """Summarise how many effects of interventions are tested and claimed.

    Args:
        table: table from ``compare_conditions``. Effects with fewer than MIN_CONTROLS_TO_CLAIM
            controls cannot be claimed and do not count as tested.
    """
    effects = table[~table["control"]]
    tested = effects[effects["num_controls"] >= MIN_CONTROLS_TO_CLAIM]
    if tested.empty:
        return (f"none of {format_count(len(effects), 'effects')} can be claimed, because a claim "
                f"needs at least {MIN_CONTROLS_TO_CLAIM} controls")
    return (f"{tested['claimed'].sum()} of {format_count(len(tested), 'tested effects')} "
            f"({format_count(tested['label'].nunique(), 'alterations')}, "
            f"{format_count(tested['outcome'].nunique(), 'outcomes')}) are claimed")


def check_starts(num_starts: int, flag: str = "", halves: bool = False) -> None:
    """Check that there are enough levels or starts for an interval.

    Args:
        flag: command-line flag that sets their number, for the message.
        halves: whether each half of them is measured by itself.

    Raises:
        UserError: if there are fewer than MIN_STARTS, or fewer in a half.
    """
    least, each = (2 * MIN_STARTS, f", {MIN_STARTS} in each half") if halves else (MIN_STARTS, "")
    if num_starts < least:
        raise UserError(f"a comparison needs at least {least} levels or starts{each}, not "
                        f"{num_starts}" + (f"; increase {flag}" if flag else ""))

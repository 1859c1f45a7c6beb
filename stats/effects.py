"""Effects of altered directions of the agent's hidden state on its behaviour.

Runs come in arms that share their starts and random draws: one arm is unaltered, some alter
directions of interest, and for each kind of alteration there are controls, which do the same in
random directions of equal size (``Projector.turned``). A run gives one number for each outcome,
and the effect of an arm on it is the mean over starts of the difference between the altered and
the unaltered run.

- Interval: 95 %, bootstrap over starts, the same draws for all arms.
- ``p``: two-sided sign-flip test of the paired differences (Fisher 1935), exact if altered and
  unaltered runs are exchangeable. ``p_holm``: after Holm (1979), over all directions and outcomes.
- ``p_control``: with K controls, (1 + number of controls whose effect is at least as large in
  absolute value) / (K + 1). It is not corrected for the number of comparisons.

An effect is claimed if its interval leaves 0 out, ``p_holm`` <= 0.05 and ``p_control`` <= 0.05,
which takes at least 19 controls. The same rule, with each control in the place of a direction
and the others as its controls, says how many claims the rule makes of random directions.

A large p does not say that there is no effect. An alteration "does nothing" where the interval lies
within a margin around 0 (two one-sided tests; Schuirmann 1987): 0.05 for probabilities, and 5 % of
the unaltered value otherwise.

The statistics take any outcomes, also those of decisions and fields, and runs of which several
belong to a level: these are drawn and flipped together.

Letters in shape comments: N starts, K outcomes, C comparisons (arms times outcomes), T steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd
from scipy.stats import norm

from common.errors import UserError
from stats.bootstrap import ClusterBootstrap
from stats.significance import LEVEL, holm, sign_flip_p

MARGIN = 0.05  # around 0, of what does nothing
POWER = 0.8  # at which the smallest effect is found
CLAIMED, NOTHING, UNDECIDED = "claimed", "nothing", "undecided"  # verdicts
MIN_STARTS = 10
MIN_CONTROLS_TO_CLAIM = round(1 / LEVEL) - 1
MIN_FLIPS, FLIPS_A_COMPARISON = 10_000, 100  # the smallest p is 1 / flips, far below LEVEL / C

DIVERGENCE = "divergence"  # outcome of runs, see ``interventions.outcomes.divergence``


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A number that each run gives.

    Attributes:
        name: in the tables.
        label: with its unit, for the figure.
        simulated: whether the simulator can tell, too.
        real: whether the real environment can.
        probability: whether it is a probability or a share.
    """

    name: str
    label: str
    simulated: bool = True
    real: bool = True
    probability: bool = False


@dataclasses.dataclass(frozen=True)
class Arm:
    """Runs with one alteration.

    Attributes:
        name: of its folder.
        label: for the figure and the report.
        pattern: arms and controls that alter in the same way share it.
        control: whether its directions are random.
    """

    name: str
    label: str
    pattern: str
    control: bool


def compare_outcomes(arms: Sequence[Arm], moved: Mapping[str, float], outcomes: Sequence[Outcome],
                     before: np.ndarray, after: np.ndarray, seed: int,
                     levels: np.ndarray | None = None) -> pd.DataFrame:
    """The effect of each arm on each of any outcomes, and which of them are claimed.

    Args:
        arms, moved, outcomes, before, after, seed, levels: as in ``paired_effects``.

    Returns:
        A row for each arm and outcome, with the columns ``arm``, ``label``, ``pattern``,
        ``control``, ``moved`` (size of the change), ``outcome``, ``unaltered`` and ``altered``
        (means), ``effect``, ``low_95``, ``high_95``, ``p``, ``p_holm``, ``control_low`` and
        ``control_high`` (smallest and largest effect of the controls it is compared with),
        ``num_controls``, ``p_control``, ``claimed``.

    Raises:
        UserError: see ``paired_effects``; or if a pattern has fewer than two controls.
    """
    return judged(paired_effects(arms, moved, outcomes, before, after, seed, levels))


def paired_effects(arms: Sequence[Arm], moved: Mapping[str, float], outcomes: Sequence[Outcome],
                   before: np.ndarray, after: np.ndarray, seed: int,
                   levels: np.ndarray | None = None,
                   test: Callable[[np.ndarray], np.ndarray] | None = None) -> pd.DataFrame:
    """The effect of each arm on each of any outcomes, with its interval and p.

    Args:
        arms: alterations of interest and controls.
        moved: size of the change that each arm makes, by its name.
        outcomes: what the last axes hold.
        before: without alteration (N, K).
        after: with that of each arm (arms, N, K).
        seed: of the bootstrap and the sign flips.
        levels: of each row (N,); rows of a level are drawn and flipped together. If not given,
            each row is a level of its own.
        test: sums of paired differences by level (levels, C) to p-values (C,); by default the
            sign-flip test.

    Returns:
        The columns of the table that ``compare_outcomes`` describes up to ``p``.

    Raises:
        UserError: if an outcome is NaN or infinite, or there are fewer than MIN_STARTS levels.
    """
    names = [outcome.name for outcome in outcomes]
    levels = _levels(levels, len(before))
    check_starts(levels.max(initial=-1) + 1)
    for arm, values in (("unaltered", before), *zip((arm.name for arm in arms), after)):
        bad = ~np.isfinite(values).all(axis=0)
        if bad.any():
            raise UserError(f"the outcome {names[int(bad.argmax())]} of the arm {arm} is NaN or "
                            "infinite on some level; leave these levels out of all arms")
    differences = _differences(before, after)  # (N, C)
    low, high = ClusterBootstrap(levels, seed).interval(differences.T)
    num_flips = max(MIN_FLIPS, FLIPS_A_COMPARISON * differences.shape[1])
    rows = [(arm.name, arm.label, arm.pattern, arm.control, moved[arm.name], name)
            for arm in arms for name in names]
    table = pd.DataFrame(rows, columns=["arm", "label", "pattern", "control", "moved", "outcome"])
    table["unaltered"] = np.tile(before.mean(axis=0), len(arms))
    table["altered"] = after.mean(axis=1).ravel()
    table["effect"] = differences.mean(axis=0)
    table["low_95"], table["high_95"] = low, high
    sums = _sums_by_level(differences, levels)
    table["p"] = sign_flip_p(sums, num_flips, seed) if test is None else test(sums)
    return table


def with_verdicts(table: pd.DataFrame, outcomes: Sequence[Outcome], before: np.ndarray,
                  after: np.ndarray, seed: int, levels: np.ndarray | None = None) -> pd.DataFrame:
    """The table with medians, and with what can be said where no effect is claimed.

    Args:
        table: from ``compare_outcomes``.
        outcomes, before, after, seed, levels: as there.

    Returns:
        The table with further columns: ``median_unaltered``, ``median_altered``,
        ``median_effect`` (the difference of the two), ``median_low_95`` and ``median_high_95``,
        empty for controls; ``margin``; ``verdict``: CLAIMED, NOTHING if the interval of the
        effect lies within the margin around 0, else UNDECIDED; ``smallest_effect``: that a single
        comparison of so many levels finds at p <= 0.05 in four of five runs, from the spread of
        the differences.
    """
    levels = _levels(levels, len(before))
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
    sums = _sums_by_level(differences - differences.mean(axis=0), levels)  # (levels, C)
    error = np.sqrt((sums ** 2).sum(axis=0) * len(sums) / (len(sums) - 1)) / len(before)
    table["smallest_effect"] = (norm.ppf(1 - LEVEL / 2) + norm.ppf(POWER)) * error
    return table


def _levels(levels: np.ndarray | None, num_rows: int) -> np.ndarray:
    """Levels numbered from 0, of each row."""
    if levels is None:
        return np.arange(num_rows)
    return np.unique(levels, return_inverse=True)[1]


def _differences(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Altered minus unaltered (N, C)."""
    return (after - before).transpose(1, 0, 2).reshape(len(before), -1)


def _sums_by_level(differences: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Sums (levels, C) over the rows (N, C) of each level."""
    sums = np.zeros((levels.max() + 1, differences.shape[1]))
    np.add.at(sums, levels, differences)
    return sums


def judged(table: pd.DataFrame) -> pd.DataFrame:
    """Add the corrected p, p and range of the controls, and whether an effect is claimed.

    Directions are one family of the correction; the controls of each pattern are another.

    Args:
        table: with the columns that ``compare_outcomes`` describes, up to ``p``.

    Raises:
        UserError: if a pattern has no control, or only one that has no other.
    """
    table["p_holm"] = table.groupby(["control", table["pattern"].where(table["control"], "")]
                                    )["p"].transform(holm)
    controls = {key: (rows["arm"].to_numpy(), rows["effect"].to_numpy()) for key, rows
                in table[table["control"]].groupby(["pattern", "outcome"])}
    found = []
    for row in table.itertuples():
        arms, others = controls.get((row.pattern, row.outcome), (np.array([]), np.array([])))
        others = others[arms != row.arm]
        if not len(others):
            raise UserError(f"{row.label} has no other control to be compared with; take at least "
                            "2 of --num_controls")
        as_large = int((np.abs(others) >= abs(row.effect)).sum())
        found.append((others.min(), others.max(), len(others),
                      (1 + as_large) / (1 + len(others))))
    table[["control_low", "control_high", "num_controls", "p_control"]] = found
    table["num_controls"] = table["num_controls"].astype(int)
    table["claimed"] = (((table["low_95"] > 0) | (table["high_95"] < 0))
                        & (table["p_holm"] <= LEVEL) & (table["p_control"] <= LEVEL))
    return table


def claims_summary(table: pd.DataFrame) -> str:
    """Count tested and claimed effects of alterations; effects of controls are left out.

    Args:
        table: see ``compare_outcomes``. Effects with fewer than MIN_CONTROLS_TO_CLAIM controls
            cannot be claimed and do not count as tested.
    """
    effects = table[~table["control"]]
    tested = effects[effects["num_controls"] >= MIN_CONTROLS_TO_CLAIM]
    untested = len(effects) - len(tested)
    if tested.empty:
        return (f"none of {untested} effects can be claimed, because that takes at least "
                f"{MIN_CONTROLS_TO_CLAIM} controls")
    summary = (f"{tested['claimed'].sum()} of {len(tested)} tested effects "
               f"({tested['label'].nunique()} alterations, {tested['outcome'].nunique()} outcomes) "
               "are claimed")
    return summary + (f"; {untested} effects with fewer than {MIN_CONTROLS_TO_CLAIM} controls "
                      "cannot be claimed" if untested else "")


def check_starts(num_starts: int, flag: str = "") -> None:
    """Check that there are enough starts for an interval.

    Args:
        flag: that asks for more, for the message.

    Raises:
        UserError: if there are not.
    """
    if num_starts < MIN_STARTS:
        raise UserError(f"a comparison needs at least {MIN_STARTS} levels or starts, not "
                        f"{num_starts}" + (f"; ask for more with {flag}" if flag else ""))

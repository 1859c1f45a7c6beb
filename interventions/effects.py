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
from scipy.stats import binom, norm

from common.bootstrap import ClusterBootstrap
from common.errors import UserError
from common.game_constants import ACTION_DIRECTIONS, ACTION_NAMES
from interventions.files import ArmRuns

LEVEL = 0.05  # of claims
MARGIN = 0.05  # around 0, of what does nothing
POWER = 0.8  # at which the smallest effect is found
CLAIMED, NOTHING, UNDECIDED = "claimed", "nothing", "undecided"  # verdicts
MIN_STARTS = 10
MIN_CONTROLS_TO_CLAIM = round(1 / LEVEL) - 1
MIN_FLIPS, FLIPS_A_COMPARISON = 10_000, 100  # the smallest p is 1 / flips, far below LEVEL / C
_FLIPS_AT_A_TIME = 2_000
_JUMPS = [action for action, (_, up) in enumerate(ACTION_DIRECTIONS) if up > 0]

DIVERGENCE = "divergence"


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


OUTCOMES = (
    Outcome("success", "success rate", simulated=False, probability=True),
    Outcome("end", "largest predicted probability of the end", real=False, probability=True),
    Outcome("return", "return (sum of rewards)"),
    Outcome("length", "episode length (steps)", simulated=False),
    Outcome("value", "mean value estimate (return)"),
    Outcome("first_jump", "step of the first jump"),
    Outcome(DIVERGENCE, "share of steps with another action", probability=True),
    *(Outcome(f"share_{name}", f"share of action '{name}'", probability=True)
      for name in ACTION_NAMES),
    Outcome("share_other", "share of the other six actions", probability=True),
)


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


def chosen_outcomes(simulated: bool) -> tuple[Outcome, ...]:
    """The outcomes that can be told."""
    return tuple(outcome for outcome in OUTCOMES
                 if (outcome.simulated if simulated else outcome.real))


def outcomes_of(runs: ArmRuns, unaltered: ArmRuns, simulated: bool) -> np.ndarray:
    """The outcomes of each run, in the order of ``chosen_outcomes``, float64 (N, outcomes).

    The step of the first jump is counted from 0, and is the run's length where it never jumps.
    ``divergence`` compares with the unaltered run from the same start, see ``divergence``.
    """
    num_runs = len(runs.starts)
    run = np.repeat(np.arange(num_runs), runs.lengths)  # (S,)

    def mean(values: np.ndarray) -> np.ndarray:
        return np.bincount(run, values, num_runs) / runs.lengths

    first_jump = runs.lengths.copy()
    jumped = np.isin(runs.actions, _JUMPS)
    np.minimum.at(first_jump, run[jumped], _steps_of(runs)[jumped])
    differs, counted = divergence(runs, unaltered)
    found = {"success": runs.ends, "end": runs.ends,
             "return": np.bincount(run, runs.rewards, num_runs), "length": runs.lengths,
             "value": mean(runs.values), "first_jump": first_jump,
             DIVERGENCE: differs.sum(axis=1) / counted.sum(axis=1),
             "share_other": mean(runs.actions >= len(ACTION_NAMES)),
             **{f"share_{name}": mean(runs.actions == action)
                for action, name in enumerate(ACTION_NAMES)}}
    return np.stack([found[outcome.name] for outcome in chosen_outcomes(simulated)],
                    axis=1).astype(np.float64)


def divergence(runs: ArmRuns, unaltered: ArmRuns) -> tuple[np.ndarray, np.ndarray]:
    """Where two arms act differently.

    A step counts while at least one run of the pair is going, and the pair differs at it if the
    actions do, or if only one of the two is still going. Runs from the same start draw their
    actions with the same random numbers, so a pair without alteration never differs.

    Returns:
        Whether a pair differs and whether the step counts, bool (N, T) each.
    """
    num_steps = max(runs.lengths.max(), unaltered.lengths.max())
    a, b = (_padded_actions(each, num_steps) for each in (runs, unaltered))
    return a != b, (a >= 0) | (b >= 0)


def _steps_of(runs: ArmRuns) -> np.ndarray:
    """Number of each step in its run (S,)."""
    begins = np.cumsum(runs.lengths) - runs.lengths
    return np.arange(runs.lengths.sum()) - np.repeat(begins, runs.lengths)


def _padded_actions(runs: ArmRuns, num_steps: int) -> np.ndarray:
    """(N, T), -1 behind the end of a run."""
    padded = np.full((len(runs.starts), num_steps), -1)
    padded[np.repeat(np.arange(len(runs.starts)), runs.lengths), _steps_of(runs)] = runs.actions
    return padded


def compare(arms: Sequence[Arm], runs: Mapping[str, ArmRuns], unaltered: ArmRuns, simulated: bool,
            seed: int) -> pd.DataFrame:
    """The effect of each arm on each outcome.

    Args:
        arms: directions and controls.
        runs: of each arm, by its name.
        simulated: whether these are simulations.
        seed: of the bootstrap and the sign flips.

    Returns:
        A row for each arm and outcome, with the columns ``arm``, ``label``, ``pattern``,
        ``control``, ``moved`` (see ``ArmRuns``), ``outcome``, ``unaltered`` and ``altered``
        (means), ``effect``, ``low_95``, ``high_95``, ``p``, ``p_holm``, ``control_low`` and
        ``control_high`` (smallest and largest effect of the controls it is compared with),
        ``num_controls``, ``p_control``, ``claimed``.

    Raises:
        UserError: if arms have other starts than the unaltered one, there are fewer than
            MIN_STARTS, or a pattern has fewer than two controls.
    """
    check_starts(len(unaltered.starts))
    for arm in arms:
        if not np.array_equal(runs[arm.name].starts, unaltered.starts):
            raise UserError(f"the runs of {arm.name} do not have the starts of the unaltered ones "
                            f"({len(runs[arm.name].starts)} and {len(unaltered.starts)} runs)")
    before, after = outcomes_of_arms(arms, runs, unaltered, simulated)
    return compare_outcomes(arms, {arm.name: float(runs[arm.name].moved) for arm in arms},
                            chosen_outcomes(simulated), before, after, seed)


def outcomes_of_arms(arms: Sequence[Arm], runs: Mapping[str, ArmRuns], unaltered: ArmRuns,
                     simulated: bool) -> tuple[np.ndarray, np.ndarray]:
    """The outcomes of the unaltered runs (N, K) and of those of each arm (arms, N, K)."""
    return outcomes_of(unaltered, unaltered, simulated), np.stack(
        [outcomes_of(runs[arm.name], unaltered, simulated) for arm in arms])


def compare_outcomes(arms: Sequence[Arm], moved: Mapping[str, float], outcomes: Sequence[Outcome],
                     before: np.ndarray, after: np.ndarray, seed: int,
                     levels: np.ndarray | None = None) -> pd.DataFrame:
    """The effect of each arm on each of any outcomes, and which of them are claimed.

    Args:
        arms, moved, outcomes, before, after, seed, levels: as in ``paired_effects``.

    Returns:
        The table that ``compare`` describes.

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
        The columns of the table that ``compare`` describes up to ``p``.

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
    low, high = ClusterBootstrap(levels, seed).interval(
        differences.T, np.ones(differences.T.shape, dtype=bool))
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
        table: from ``compare_outcomes`` or ``compare``.
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
        table: with the columns that ``compare`` describes, up to ``p``.

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
        table: see ``compare``. Effects with fewer than MIN_CONTROLS_TO_CLAIM controls cannot be
            claimed and do not count as tested.
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


def sign_flip_p(differences: np.ndarray, num_flips: int, seed: int) -> np.ndarray:
    """Two-sided p-values of a sign-flip test on paired differences.

    Args:
        differences: altered minus unaltered (N, C).
        num_flips: random assignments of signs, each to all comparisons.

    Returns:
        (C,), at least 1 / (num_flips + 1).
    """
    observed = np.abs(differences.sum(axis=0))
    observed -= 1e-9 * np.abs(differences).sum(axis=0)  # sums that are equal but for rounding
    rng = np.random.default_rng(seed)
    reached = np.zeros(differences.shape[1], dtype=np.int64)
    for begin in range(0, num_flips, _FLIPS_AT_A_TIME):
        shape = min(_FLIPS_AT_A_TIME, num_flips - begin), len(differences)
        signs = 2.0 * rng.integers(0, 2, shape) - 1
        reached += (np.abs(signs @ differences) >= observed).sum(axis=0)
    return (1 + reached) / (1 + num_flips)


def mcnemar_p(differences: np.ndarray) -> np.ndarray:
    """Two-sided p-values of McNemar's exact test (1947) on paired differences of yes and no.

    Args:
        differences: altered minus unaltered, -1, 0 or 1 (N, C).

    Returns:
        (C,); 1 where no pair differs.
    """
    up, down = (differences > 0).sum(axis=0), (differences < 0).sum(axis=0)
    return np.minimum(1, 2 * binom.cdf(np.minimum(up, down), up + down, 0.5))


def holm(p: np.ndarray) -> np.ndarray:
    """p-values after Holm's correction (1979), in their order."""
    p = np.asarray(p)
    order = np.argsort(p, kind="stable")
    stepped = np.maximum.accumulate((len(p) - np.arange(len(p))) * p[order])
    corrected = np.empty(len(p))
    corrected[order] = np.minimum(stepped, 1)
    return corrected


def divergence_over_time(arms: Sequence[Arm], runs: Mapping[str, ArmRuns],
                         unaltered: ArmRuns) -> pd.DataFrame:
    """The share of pairs that differ at each step, see ``divergence``.

    Returns:
        The columns ``arm``, ``label``, ``control``, ``step``, ``pairs`` of which at least one
        run is going, ``unaltered_going``, and the ``share`` of the pairs that differ.
    """
    tables = []
    for arm in arms:
        differs, counted = divergence(runs[arm.name], unaltered)
        pairs = counted.sum(axis=0)
        tables.append(pd.DataFrame({
            "arm": arm.name, "label": arm.label, "control": arm.control,
            "step": np.arange(len(pairs)), "pairs": pairs,
            "unaltered_going": (unaltered.lengths[:, None] > np.arange(len(pairs))).sum(axis=0),
            "share": differs.sum(axis=0) / pairs}))
    return pd.concat(tables, ignore_index=True)

"""Failures by cause: rates, paired differences between arms, and blindness.

Arms share levels and random draws, so the datum is a level: failed by a cause in an arm or not,
minus the same in the original. Intervals are 95 %: Wilson's for rates, bootstrap over levels for
differences; p is McNemar's exact one, corrected after Holm over edits and causes. What is claimed
follows the rule of ``stats.effects``.

Letters in shape comments: N levels, K causes, V hazards, R resamplings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from stats.bootstrap import ClusterBootstrap
from stats.effects import Condition, Outcome, paired_effects, with_claims
from stats.significance import mcnemar_p, share

ANY = "any"  # cause
PER = 1000  # steps
_RATES = ("arm", "label", "pattern", "control", "cause", "levels", "failures", "rate", "low_95",
          "high_95", "steps_in_view", "per_1000", "per_1000_low_95", "per_1000_high_95")
_PAIRED = ("arm", "label", "pattern", "control", "moved", "outcome", "unaltered", "altered",
           "effect", "low_95", "high_95", "p")
_JUDGED = ("p_holm", "control_low", "control_high", "num_controls", "p_control", "claimed")


@dataclasses.dataclass(frozen=True)
class Failures:
    """Episodes of an arm, in the order of the levels.

    Attributes:
        by_cause: whether each level was failed by each cause, bool (N, K).
        in_view: steps at which each hazard was in view, (N, V); hazards are the first causes.
    """

    by_cause: np.ndarray
    in_view: np.ndarray

    @classmethod
    def of(cls, causes_found: pd.Series, in_view: pd.DataFrame,
           causes: Sequence[str]) -> Failures:
        """Of a table of episodes."""
        return cls(causes_found.to_numpy()[:, None] == np.array(causes), in_view.to_numpy())


def rates(arms: Sequence[Condition], found: Mapping[str, Failures], causes: Sequence[str],
          seed: int) -> pd.DataFrame:
    """Failures of each arm by cause, and per steps at which the hazard was in view.

    Returns:
        The columns of ``causes.csv``.
    """
    rows = []
    bootstrap = None
    for arm in arms:
        failures = found[arm.name]
        num_levels = len(failures.by_cause)
        bootstrap = bootstrap or ClusterBootstrap(np.arange(num_levels), seed)
        columns = {**dict(zip(causes, failures.by_cause.T)),
                   ANY: failures.by_cause.any(axis=1)}
        for place, (cause, failed) in enumerate(columns.items()):
            rate, low, high = share(failed.sum(), num_levels)
            row = {"arm": arm.name, "label": arm.label, "pattern": arm.pattern,
                   "control": arm.control, "cause": cause, "levels": num_levels,
                   "failures": int(failed.sum()), "rate": rate, "low_95": low,
                   "high_95": high}
            if place < failures.in_view.shape[1]:
                steps = failures.in_view[:, place]
                row["steps_in_view"] = int(steps.sum())
                if steps.any():
                    row["per_1000"] = PER * failed.sum() / steps.sum()
                    if not arm.control:
                        row["per_1000_low_95"], row["per_1000_high_95"] = (
                            PER * _interval(bootstrap, failed, steps))
            rows.append(row)
    return pd.DataFrame(rows, columns=_RATES)


def effects(arms: Sequence[Condition], moved: Mapping[str, float], found: Mapping[str, Failures],
            original: str, causes: Sequence[str], seed: int) -> pd.DataFrame:
    """Paired differences of each arm from the original.

    Edited arms whose pattern has controls are judged, all together; so are, by themselves, other
    arms that share such a pattern: those in which a hazard is invisible, a planted effect that the
    rule must find.

    Args:
        arms: all but the original.
        moved: size of each edit; NaN for what is none.
        original: name of that arm.

    Returns:
        The columns of ``effects.csv``.
    """
    if not arms:
        return pd.DataFrame({name: [] for name in (*_PAIRED, *_JUDGED)}).astype(
            {"claimed": bool, "control": bool})
    outcomes = [Outcome(cause, cause, probability=True) for cause in causes]
    before = found[original].by_cause.astype(float)
    after = np.stack([found[arm.name].by_cause.astype(float) for arm in arms])
    table = paired_effects(arms, outcomes, before, after, seed, moved=moved, test=mcnemar_p)
    controlled = set(table.loc[table["control"], "pattern"])
    edited = table["moved"].notna()
    judged_rows = table["pattern"].isin(controlled)
    parts = [with_claims(table[judged_rows & edited].copy())] if controlled else []
    planted = judged_rows & ~edited
    if planted.any():
        with_controls = with_claims(table[planted | table["control"]].copy())
        parts.append(with_controls[~with_controls["control"]])
    parts.append(table[~judged_rows])
    table = pd.concat([part for part in parts if len(part)], ignore_index=True)
    for name in _JUDGED:
        if name not in table:
            table[name] = np.nan
    table["claimed"] = table["claimed"].eq(True)
    return table


def blindness(edited: Sequence[Condition], hidden: Mapping[str, str], found: Mapping[str, Failures],
              original: str, causes: Sequence[str], seed: int) -> pd.DataFrame:
    """How far an edit goes towards what the agent does when a hazard is invisible:
    (edited - original) / (invisible - original), of the rate of failures by that hazard.

    Args:
        hidden: names of arms by the hazard that is invisible in them.

    Returns:
        The columns of ``blindness.csv``; nothing where no arm is invisible.
    """
    rows = []
    for hazard, invisible in hidden.items():
        place = list(causes).index(hazard)
        base, bound = (found[name].by_cause[:, place].astype(float)
                       for name in (original, invisible))
        bootstrap = ClusterBootstrap(np.arange(len(base)), seed)
        for arm in edited:
            up = found[arm.name].by_cause[:, place] - base
            low, high = _interval(bootstrap, up, bound - base)
            total = float((bound - base).sum())
            rows.append({"label": arm.label, "hazard": hazard,
                         "blindness": up.sum() / total if total else np.nan,
                         "low_95": low, "high_95": high})
    return pd.DataFrame(rows, columns=["label", "hazard", "blindness", "low_95", "high_95"])


def _interval(bootstrap: ClusterBootstrap, above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """Lower and upper end (2,) of a ratio of sums over levels (N,) each."""
    def ratio(drawn: np.ndarray) -> np.ndarray:  # (R,)
        sums = drawn @ below
        return np.divide(drawn @ above, sums, out=np.full(len(drawn), np.nan), where=sums != 0)

    return bootstrap.interval_of(ratio)

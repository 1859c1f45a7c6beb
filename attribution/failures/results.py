"""Failures by cause: files of ``analysis/attribution/causes/``, rates, paired differences and
blindness.

Layout::

    settings.json          settings; "arms" holds the settings of each condition
    episodes/<arm>.csv     one row per level, ordered by number: level (number), level_seed, cause
                           (one of causes_of, or "solved"), length (steps), return (sum of
                           rewards), and for each hazard in_view_<hazard>: number of steps with the
                           hazard in view, see EpisodeOutcome
    episodes/<arm>.jsonl   the same while the condition is being played, one line per episode
    causes.csv             one row per condition and cause, and one for "any": arm, label, pattern,
                           control, cause, levels, failures, rate, low_95, high_95 (Wilson); for
                           hazards also steps_in_view, and failures per 1 000 of these steps:
                           per_1000, per_1000_low_95, per_1000_high_95
    effects.csv            one row per condition (except the original) and cause: the columns of
                           stats.effects.compare_conditions, with failures by each cause as
                           outcomes; p_holm and the columns of controls and claims are empty for
                           conditions without controls
    blindness.csv          one row per edited agent and invisible hazard: label, hazard, blindness,
                           low_95, high_95
    report.md, causes.png  report, and figure of the failure rates
    failures.png           the last frames of some of the original's failures, if it has any
    films/<arm>_level_<seed>.mp4    a level failed under either the original or this condition, but
                           not both

Conditions are called ``original``, ``edited_<label>``, ``invisible_<hazard>`` and
``control_<number>_<label>``. They can be divided among shards.

Conditions share levels and random draws, so differences are paired by level: the indicator of a
failure by a cause under a condition, minus the indicator for the original. Intervals are 95 %:
Wilson intervals for rates, bootstrap over levels for differences. p-values are from McNemar's exact
test, with Holm's correction over edits and causes. Claims follow the rule of ``stats.effects``.

Letters in shape comments: N levels, K causes, V hazards, R resamplings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from common.results import Entry, File, Journal, Schema, Table, Text
from envs.objects import hazards_of
from stats.bootstrap import ClusterBootstrap
from stats.effects import Condition, Outcome, paired_effects, with_claims
from stats.significance import mcnemar_p, share

ORIGINAL = "original"  # name of a condition
SOLVED = "solved"
ANY = "any"  # failures by any cause
PER = 1000  # failures are reported per this many steps in view
_IN_VIEW = "in_view_"
_EPISODES = {"level": int, "level_seed": int, "cause": str, "length": int, "return": float}
_INTERVAL = {"low_95": float, "high_95": float}
_RATES = {"arm": str, "label": str, "pattern": str, "control": bool, "cause": str, "levels": int,
          "failures": int, "rate": float, **_INTERVAL}
_RATES_IN_VIEW = ("steps_in_view", "per_1000", "per_1000_low_95", "per_1000_high_95")
_PAIRED = ("arm", "label", "pattern", "control", "moved", "outcome", "unaltered", "altered",
           "effect", "low_95", "high_95", "p")
_JUDGED = ("p_holm", "control_low", "control_high", "num_controls", "p_control", "claimed")


def failure_files(game: str = "") -> Schema:
    """Return the schema of the results.

    Args:
        game: name of the game; if empty, tables of episodes are read without the columns
            ``in_view_<hazard>``.
    """
    in_view = {f"{_IN_VIEW}{kind.name}": int for kind in hazards_of(game)} if game else {}
    return Schema(
        "causes of failure", "python -m attribution.failure_causes", items={
            "episodes": Entry("episodes/{}.csv", Table({**_EPISODES, **in_view}, exact=True)),
            "played": Entry("episodes/{}.jsonl", Journal({**_EPISODES, "in_view": list})),
            "last_frames": Entry("failures.png", File()),
            "film": Entry("films/{}_level_{}.mp4", File())},
        results={
            "rates": Entry("causes.csv", Table({name: kind for name, kind in _RATES.items()
                                                if name != "pattern"}, gaps=())),
            "effects": Entry("effects.csv", Table({
                "label": str, "outcome": str, "control": bool, "claimed": bool, **dict.fromkeys(
                    ("unaltered", "altered", "effect", "low_95", "high_95", "p", "p_holm",
                     "p_control"), float)}, gaps=("p_holm", "p_control"))),
            "blindness": Entry("blindness.csv", Table({
                "label": str, "hazard": str, "blindness": float, **_INTERVAL})),
            "report": Entry("report.md", Text()), "figure": Entry("causes.png", File())},
        growing="arms", growing_items=("episodes", "played"))


FAILURES = failure_files()


def episodes_table(played: Sequence[Mapping], game: str) -> pd.DataFrame:
    """Return the table of the episodes of a condition.

    Args:
        played: rows of the journal of episodes.
        game: name of the game.
    """
    in_view = [f"{_IN_VIEW}{kind.name}" for kind in hazards_of(game)]
    rows = [(*(row[name] for name in _EPISODES), *row["in_view"]) for row in played]
    return pd.DataFrame(rows, columns=[*_EPISODES, *in_view]).sort_values("level")


@dataclasses.dataclass(frozen=True)
class Failures:
    """Failures under a condition, in the order of the levels.

    Attributes:
        by_cause: whether each level was failed by each cause, bool (N, K).
        in_view: number of steps with each hazard in view (N, V); hazards are the first causes.
    """

    by_cause: np.ndarray
    in_view: np.ndarray

    @classmethod
    def of(cls, episodes: pd.DataFrame, causes: Sequence[str]) -> Failures:
        """Extract the failures by each cause from a table of episodes."""
        in_view = [name for name in episodes if name.startswith(_IN_VIEW)]
        return cls(episodes["cause"].to_numpy()[:, None] == np.array(causes),
                   episodes[in_view].to_numpy())


def rates(conditions: Sequence[Condition], failures: Mapping[str, Failures],
          causes: Sequence[str], seed: int) -> pd.DataFrame:
    """Compute failure rates of each condition by cause, and per steps with the hazard in view.

    Args:
        conditions: the conditions.
        failures: failures by the name of the condition.
        causes: names of the causes (K,).
        seed: seed of the bootstrap over levels.

    Returns:
        A table with the columns of ``causes.csv``.
    """
    rows = []
    bootstrap = ClusterBootstrap(np.arange(len(failures[ORIGINAL].by_cause)), seed)
    for condition in conditions:
        by_cause, in_view = vars(failures[condition.name]).values()
        columns = {**dict(zip(causes, by_cause.T)), ANY: by_cause.any(axis=1)}
        for place, (cause, failed) in enumerate(columns.items()):
            row = dict(zip(_RATES, (
                condition.name, condition.label, condition.pattern, condition.control, cause,
                len(failed), int(failed.sum()), *share(failed.sum(), len(failed)))))
            if place < in_view.shape[1]:
                steps = in_view[:, place]
                row["steps_in_view"] = int(steps.sum())
                if steps.any():
                    row["per_1000"] = PER * failed.sum() / steps.sum()
                    if not condition.control:
                        row["per_1000_low_95"], row["per_1000_high_95"] = (
                            PER * _interval_of_ratio(bootstrap, failed, steps))
            rows.append(row)
    return pd.DataFrame(rows, columns=[*_RATES, *_RATES_IN_VIEW])


def effects(conditions: Sequence[Condition], moved: Mapping[str, float],
            failures: Mapping[str, Failures], causes: Sequence[str], seed: int) -> pd.DataFrame:
    """Compute paired differences of each condition from the original.

    Claims are made for two families of tests: edited agents whose pattern has controls, and
    conditions with an invisible hazard and such a pattern. The latter are a planted effect that the
    rule must find.

    Args:
        conditions: all conditions except the original.
        moved: size of the edit, by the name of the condition; NaN without edits.
        failures: failures by the name of the condition.
        causes: names of the causes (K,).
        seed: seed of the bootstrap over levels.

    Returns:
        A table with the columns of ``effects.csv``.
    """
    if not conditions:
        return pd.DataFrame({name: [] for name in (*_PAIRED, *_JUDGED)}).astype(
            {"claimed": bool, "control": bool})
    before, *after = (failures[name].by_cause.astype(float)
                      for name in (ORIGINAL, *(condition.name for condition in conditions)))
    table = paired_effects(
        conditions, [Outcome(cause, cause, probability=True) for cause in causes], before,
        np.stack(after), seed, moved=moved, test=mcnemar_p)
    controlled = table["pattern"].isin(table.loc[table["control"], "pattern"])
    edited = table["moved"].notna()
    planted = controlled & ~edited
    parts = [table[~controlled]]
    if planted.any():
        judged = with_claims(table[planted | table["control"]].copy())
        parts.insert(0, judged[~judged["control"]])
    if controlled.any():
        parts.insert(0, with_claims(table[controlled & edited].copy()))
    table = pd.concat([part for part in parts if len(part)], ignore_index=True)
    table = table.reindex(columns=[*table, *(name for name in _JUDGED if name not in table)])
    table["claimed"] = table["claimed"].eq(True)
    return table


def blindness(edited: Sequence[Condition], hidden: Mapping[str, str],
              failures: Mapping[str, Failures], causes: Sequence[str], seed: int) -> pd.DataFrame:
    """Compute blindness: how close an edit comes to making a hazard invisible.

    Blindness is (edited - original) / (invisible - original), in rates of failures by the hazard.

    Args:
        edited: conditions of the edited agents.
        hidden: name of the condition in which each hazard is invisible, by hazard.
        failures: failures by the name of the condition.
        causes: names of the causes (K,).
        seed: seed of the bootstrap over levels.

    Returns:
        A table with the columns of ``blindness.csv``; it is empty if ``hidden`` is.
    """
    rows = []
    for hazard, invisible in hidden.items():
        place = list(causes).index(hazard)
        original, bound = (failures[name].by_cause[:, place].astype(float)
                           for name in (ORIGINAL, invisible))
        bootstrap = ClusterBootstrap(np.arange(len(original)), seed)
        for condition in edited:
            rise = failures[condition.name].by_cause[:, place] - original
            total = float((bound - original).sum())
            rows.append((condition.label, hazard, rise.sum() / total if total else np.nan,
                         *_interval_of_ratio(bootstrap, rise, bound - original)))
    return pd.DataFrame(rows, columns=["label", "hazard", "blindness", "low_95", "high_95"])


def _interval_of_ratio(bootstrap: ClusterBootstrap, above: np.ndarray, below: np.ndarray
                       ) -> np.ndarray:
    """Compute the interval (2,) of the ratio between the sums of two arrays over levels (N,)."""
    def ratio(draws: np.ndarray) -> np.ndarray:  # (R,)
        sums = draws @ below
        return np.divide(draws @ above, sums, out=np.full(len(draws), np.nan), where=sums != 0)

    return bootstrap.interval_of(ratio)

"""Failures by cause: files of ``analysis/attribution/causes/``, rates, paired differences and
blindness.

Layout::

    settings.json          settings; "conditions" holds the settings of each condition
    episodes/<condition>.csv
                           one row per level, ordered by number: level (number), level_seed, cause
                           (one of causes_of, or "solved"), length (steps), return (sum of
                           rewards), and for each hazard in_view_<hazard>: estimated number of steps
                           with the hazard in view, see agents.failures.StateSampler
    episodes/<condition>.jsonl
                           journal of finished episodes while the condition is being played
    causes.csv             one row per condition and cause, and one for "any": condition, label,
                           pattern, control, cause, levels, failures, rate, low_95, high_95
                           (Wilson); for hazards also steps_in_view, and failures per 1 000 of these
                           steps: per_1000, per_1000_low_95, per_1000_high_95
    effects.csv            one row per condition (except the original) and cause: the columns of
                           stats.effects.compare_conditions, with failures by each cause as
                           outcomes; for conditions without controls, p_holm and the columns of
                           controls are empty, and claimed is False
    blindness.csv          one row per edited agent and invisible hazard: label, hazard, blindness
                           (see ``blindness``), low_95, high_95
    report.md, causes.png  report, and figure of the failure rates
    failures.png           the last frames of some of the original's failures, if there are any
    films/<condition>_level_<seed>.mp4
                           a level that is failed under exactly one of two conditions: the
                           original and this one

The names of conditions, ``<condition>``, are ``original``, ``edited_<label>``,
``invisible_<hazard>`` and ``control_<number>_<label>``. Conditions can be divided among shards.

Conditions share levels and random draws, so differences are paired by level: the indicator of a
failure by a cause under a condition, minus the indicator for the original. Intervals are 95 %:
Wilson intervals for rates, bootstrap over levels for differences. p-values are from McNemar's exact
test, with Holm's correction over edits and causes. Claims follow the rule of ``stats.effects``.

Letters in shape comments: N levels, K causes, R resamplings.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from agents.episodes import SOLVED
from common.palette import BLUE, VERMILION
from common.results import Entry, File, Journal, Schema, Table, Text
from common.tables import markdown_escaped, markdown_table
from envs.objects import hazards_of, kind_label
from stats.association import ratio
from stats.bootstrap import ClusterBootstrap
from stats.effects import Condition, Outcome, paired_effects, with_claims
from stats.forest_plot import forest_plot
from stats.report import (
    bold,
    format_interval,
    format_p,
    format_range,
    warn_of_few_controls,
)
from stats.significance import LEVEL, mcnemar_p, share

ORIGINAL = "original"  # name of a condition
ANY = "any"  # failures by any cause
PER = 1000  # failures are reported per this many steps in view
_IN_VIEW = "in_view_"
_EPISODES = {"level": int, "level_seed": int, "cause": str, "length": int, "return": float}
_INTERVAL = {"low_95": float, "high_95": float}
_RATES = {"condition": str, "label": str, "pattern": str, "control": bool, "cause": str,
          "levels": int, "failures": int, "rate": float, **_INTERVAL}
_RATES_IN_VIEW = ("steps_in_view", "per_1000", "per_1000_low_95", "per_1000_high_95")
_PAIRED = ("condition", "label", "pattern", "control", "moved", "outcome", "unaltered", "altered",
           "effect", "low_95", "high_95", "p")
_JUDGED = ("p_holm", "control_low", "control_high", "num_controls", "p_control", "claimed")


def failure_files(game: str = "") -> Schema:
    """Return the schema of the folder with failures by cause.

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
        growing="conditions", growing_items=("episodes", "played"))


FAILURES = failure_files()


def episodes_table(played: Sequence[Mapping], game: str) -> pd.DataFrame:
    """Return the table of the episodes of a condition, see the module docstring.

    Args:
        played: rows of the journal of episodes, in any order.
        game: name of the game.
    """
    in_view = [f"{_IN_VIEW}{kind.name}" for kind in hazards_of(game)]
    rows = [(*(row[name] for name in _EPISODES), *row["in_view"]) for row in played]
    return pd.DataFrame(rows, columns=[*_EPISODES, *in_view]).sort_values("level")


def by_cause(episodes: pd.DataFrame, causes: Sequence[str]) -> np.ndarray:
    """Return 1 for each level and cause if the level was failed because of this cause, otherwise 0,
    float64 (N, K)."""
    return (episodes["cause"].to_numpy()[:, None] == np.array(causes)).astype(float)


def rates(conditions: Sequence[Condition], episodes: Mapping[str, pd.DataFrame],
          causes: Sequence[str], seed: int) -> pd.DataFrame:
    """Compute failure rates by condition and cause, per level and per step with the hazard in view.

    Args:
        conditions: the conditions.
        episodes: table of episodes by the name of the condition.
        causes: names of the causes (K,).
        seed: seed of the bootstrap over levels.

    Returns:
        A table with the columns of ``causes.csv``.
    """
    rows, levels = [], np.arange(len(episodes[ORIGINAL]))
    bootstrap = ClusterBootstrap(levels, seed)
    for condition in conditions:
        table = episodes[condition.name]
        for cause in (*causes, ANY):
            failed = (table["cause"] != SOLVED if cause == ANY else table["cause"] == cause
                      ).to_numpy()
            row = dict(zip(_RATES, (
                condition.name, condition.label, condition.pattern, condition.control, cause,
                len(failed), int(failed.sum()), *share(failed.sum(), len(failed)))))
            if _IN_VIEW + cause in table:
                steps = table[_IN_VIEW + cause].to_numpy()
                per_step = [*vars(ratio(failed, steps, levels, bootstrap)).values()]
                row |= dict(zip(_RATES_IN_VIEW, (steps.sum(), *(
                    PER * number for number in per_step[:1 if condition.control else 3]))))
            rows.append(row)
    return pd.DataFrame(rows, columns=[*_RATES, *_RATES_IN_VIEW])


def effects(conditions: Sequence[Condition], moved: Mapping[str, float],
            episodes: Mapping[str, pd.DataFrame], causes: Sequence[str], seed: int
            ) -> pd.DataFrame:
    """Compute paired differences of each condition from the original.

    Claims are made only for patterns that have controls. P-values are corrected separately in two
    families of tests: edited agents, and conditions with an invisible hazard. An invisible hazard
    is a planted effect, which the rule must find.

    Args:
        conditions: all conditions except the original.
        moved: size of the edit, by the name of the condition; NaN without edits.
        episodes: table of episodes by the name of the condition.
        causes: names of the causes (K,).
        seed: seed of the bootstrap over levels.

    Returns:
        A table with the columns of ``effects.csv``.
    """
    if not conditions:
        return pd.DataFrame({name: [] for name in (*_PAIRED, *_JUDGED)}).astype(
            {"claimed": bool, "control": bool})
    before, *after = (by_cause(episodes[name], causes)
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
              episodes: Mapping[str, pd.DataFrame], seed: int) -> pd.DataFrame:
    """Compute blindness: how close an edit comes to making a hazard invisible.

    Blindness is (edited - original) / (invisible - original), in rates of failures caused by the
    hazard.

    Args:
        edited: conditions of the edited agents.
        hidden: name of the condition in which each hazard is invisible, by hazard.
        episodes: table of episodes by the name of the condition.
        seed: seed of the bootstrap over levels.

    Returns:
        A table with the columns of ``blindness.csv``; it is empty if ``hidden`` is. Blindness is
        NaN if the hazard causes as many failures of the original when it is invisible as when it is
        visible.
    """
    rows = []
    bootstrap = ClusterBootstrap(np.arange(len(episodes[ORIGINAL])), seed)
    for hazard, invisible in hidden.items():
        original, bound = (by_cause(episodes[name], [hazard])[:, 0]
                           for name in (ORIGINAL, invisible))
        for condition in edited:
            rise = by_cause(episodes[condition.name], [hazard])[:, 0] - original

            def ratio_of(draws: np.ndarray, rise=rise, most=bound - original) -> np.ndarray:  # (R,)
                total = draws @ most
                return np.divide(draws @ rise, total, out=np.full(len(draws), np.nan),
                                 where=total != 0)

            rows.append((condition.label, hazard, ratio_of(np.ones((1, len(rise))))[0],
                         *bootstrap.interval_of(ratio_of)))
    return pd.DataFrame(rows, columns=["label", "hazard", "blindness", "low_95", "high_95"])


def label_words(label: str) -> str:
    """Return the label of an agent in words, such as "without feature 0 of block3" for an edited
    agent's file ``without_block3_0``."""
    return re.sub(r"^without_(\w+)_(\d+)$", r"without feature \2 of \1", label).replace("_", " ")


NUM_FAILURES = 4  # failures in the figure of the original's failures


def report(rates: pd.DataFrame, effects: pd.DataFrame, blindness: pd.DataFrame,
           films: Sequence[str], last_frames: str, description: str, controls: str) -> str:
    """Format the report of failures by cause as Markdown.

    Args:
        rates, effects, blindness: tables as in ``causes.csv``, ``effects.csv`` and
            ``blindness.csv``.
        films: paths of films, relative to the report.
        last_frames: path of the figure of the original's failures; empty without failures.
        description: sentences that describe the agents and levels.
        controls: sentences that describe the controls; empty without controls.
    """
    causes = list(dict.fromkeys(rates["cause"]))
    shown, controlled = rates[~rates["control"]], rates[rates["control"]]
    claimed = set(effects.loc[effects["claimed"], ["condition", "outcome"]].itertuples(
        index=False, name=None))
    rows = [(label, *(bold(_percentages(row.rate, row), (name, row.cause) in claimed)
                      for row in part.itertuples())) for label, name, part in _by_condition(shown)]
    for pattern, part in controlled.groupby("pattern", sort=False):
        spread = part.groupby("cause")["rate"].agg(["min", "max"])
        rows.append((f"{part['condition'].nunique()} random edits like {label_words(pattern)}, "
                     "lowest to highest",
                     *(" to ".join(map(_percent, spread.loc[cause])) for cause in causes)))
    lines = [
        "# Causes of failure", "", markdown_escaped(description), "",
        "Each failed episode has one cause. Its last step is repeated in a copy of the real game "
        "without the nearby hazards of one kind; if the episode then continues, this kind is the "
        "cause. *Multiple*: the episode continues only without all nearby hazards. *Timeout*: the "
        "time limit was reached. *Other*: the episode ends even without nearby hazards.", "",
        "## Failures by cause, % of levels (95 %, Wilson)", "",
        "Bold: claimed as different from the original.", "",
        *markdown_table(("condition", *map(kind_label, causes)), rows),
        *_differences(effects, controls)]
    hazards = shown.dropna(subset="steps_in_view")
    if len(hazards):
        lines += [f"## Failures per {PER:,} steps with that hazard in view (95 %, bootstrap)", "",
                  "An agent that dies early meets fewer hazards.", "", *markdown_table(
                      ("condition", *map(kind_label, dict.fromkeys(hazards["cause"]))),
                      [(label, *map(_per_steps, part.itertuples()))
                       for label, _, part in _by_condition(hazards)])]
    if len(blindness):
        lines += ["## Blindness", "",
                  "(edited - original) / (invisible - original), in rates of failures by the "
                  "hazard: 1 if the edit has the same effect as making the hazard invisible.", "",
                  *markdown_table(
                      ("agent", "hazard", "blindness (95 %, bootstrap)"),
                      [(markdown_escaped(label_words(row.label)), kind_label(row.hazard),
                        "not defined" if np.isnan(row.blindness) else
                        format_interval(row.blindness, row.low_95, row.high_95, ".2f"))
                       for row in blindness.itertuples()])]
    if last_frames:
        lines += ["## The original's failures", "",
                  "The last frames of the first failure by each cause. V: value. The mark in a "
                  "frame is the action taken; the last action ended the episode.", "",
                  f"![The original's failures]({last_frames})", ""]
    if films:
        lines += ["## Levels that only one condition fails", "",
                  "Both conditions, side by side; an episode that has ended is darkened.", "",
                  *(f"- [{film}]({film})" for film in films), ""]
    return "\n".join(lines)


def _differences(effects: pd.DataFrame, controls: str) -> list[str]:
    """Return the report's section on paired differences, as lines of Markdown."""
    shown, controlled = effects[~effects["control"]], effects[effects["control"]]
    if not len(shown):
        return []
    fewest = shown["num_controls"].min()
    lines = [
        "## Differences from the original on the same levels", "",
        "Percentage points (95 % bootstrap over levels). p: McNemar's exact test; p (Holm): "
        "corrected over edits and causes; p (controls): (1 + number of controls with at least as "
        "large a difference) / (1 + number of controls). **Claimed**: the interval excludes 0 and "
        "both p (Holm) and p (controls) "
        f"are <= {LEVEL}. An invisible hazard is a planted effect, which the same rule must find; "
        "it is not an edit, and is corrected separately.", "",
        *([controls, ""] if controls else []),
        *(["Nothing is claimed about conditions without controls. Agents whose weights differ from "
           "the original's have none.", ""] if np.isnan(fewest) else []),
        *warn_of_few_controls(fewest),
        *markdown_table(
            ("condition", "cause", "original", "altered", "difference", "p", "p (Holm)",
             "controls' differences", "p (controls)"),
            [(markdown_escaped(label_words(row.label)), kind_label(row.outcome),
              _percent(row.unaltered), _percent(row.altered),
              bold(_percentages(row.effect, row, "+.2f"), row.claimed),
              format_p(row.p), format_p(row.p_holm),
              format_range(100 * row.control_low, 100 * row.control_high, "+.2f"),
              format_p(row.p_control)) for row in shown.itertuples()])]
    if len(controlled):
        lines += [f"The same rule claims {int(controlled['claimed'].sum())} of {len(controlled)} "
                  "differences of the controls, each compared with all other controls.", ""]
    return lines


def _by_condition(rates: pd.DataFrame) -> list[tuple[str, str, pd.DataFrame]]:
    """Group a table of rates by condition; return label, name and rows of each."""
    return [(markdown_escaped(label_words(part["label"].iloc[0])), name, part)
            for name, part in rates.groupby("condition", sort=False)]


def _percent(rate: float) -> str:
    return f"{100 * rate:.2f}"


def _percentages(rate: float, row, form: str = ".2f") -> str:
    """Format a rate, and the interval ``low_95`` to ``high_95`` of its row, as percentages."""
    return format_interval(100 * rate, 100 * row.low_95, 100 * row.high_95, form)


def _per_steps(row) -> str:
    interval = format_interval(row.per_1000, row.per_1000_low_95, row.per_1000_high_95, ".2f")
    return f"{interval}, {int(row.steps_in_view)} steps" if row.steps_in_view else "never in view"


def plot_rates(rates: pd.DataFrame, title: str) -> Figure:
    """Plot failure rates of the conditions and the range of their controls, one panel per cause of
    any failure.

    Args:
        rates: table as in ``causes.csv``.
        title: title of the figure.
    """
    failing = set(rates["cause"][rates["failures"] > 0]) | {ANY}
    causes = [cause for cause in dict.fromkeys(rates["cause"]) if cause in failing]
    never = [kind_label(cause) for cause in dict.fromkeys(rates["cause"]) if cause not in failing]
    controls = rates[rates["control"]].groupby(["pattern", "cause"])["rate"]
    shown = rates[~rates["control"]].join(
        controls.agg(control_low="min", control_high="max"), on=["pattern", "cause"])
    numbers = ["rate", "low_95", "high_95", "control_low", "control_high"]
    shown = shown.assign(**{name: 100 * shown[name] for name in numbers})
    labels = [label_words(label) for label in dict.fromkeys(shown["label"])]
    columns = min(len(causes), 3)
    height = -(-len(causes) // columns)
    figure = Figure(figsize=(3.3 * columns + 1.5, height * (1.2 + 0.25 * len(labels)) + 0.6),
                    layout="constrained")
    panels = figure.subplots(height, columns, squeeze=False)
    for axes, cause in zip(panels.flat, causes):
        rows = shown[shown["cause"] == cause]
        forest_plot(axes, rows, labels if axes in panels[:, 0] else [""] * len(labels), [
            {"color": BLUE if name == ORIGINAL else VERMILION} for name in rows["condition"]],
            "rate")
        axes.axvline(rows["rate"].iloc[0], color=BLUE, linewidth=0.6, linestyle=":")
        axes.set(xlim=(0, None), title="any cause" if cause == ANY else kind_label(cause),
                 xlabel="failed levels (%)")
    for axes in panels.flat[len(causes):]:
        axes.axis("off")
    grey = "; grey: range of the random edits" if rates["control"].any() else ""
    title = textwrap.fill(title, int(12 * figure.get_figwidth()))
    none = f"\nno failures: {', '.join(never)}" if never else ""
    own = rates[(rates["condition"] == ORIGINAL) & (rates["cause"] == ANY)].iloc[0]
    answer = f"The agent fails {own['failures']} of {own['levels']} levels"
    figure.suptitle(f"{answer}\n{title}\nbars: 95 % (Wilson){grey}{none}", fontsize=11)
    return figure


def discordant_levels(original: pd.DataFrame, other: pd.DataFrame, number: int) -> list[int]:
    """Find levels that are failed under exactly one of two conditions.

    Args:
        original, other: tables of episodes of both conditions, in the order of the levels.
        number: maximum number of levels.

    Returns:
        Numbers of the levels; levels that are solved in the table ``original`` come first.
    """
    fails, failed = ((table["cause"] != SOLVED).to_numpy() for table in (other, original))
    levels = original["level"].to_numpy()
    return [*levels[fails & ~failed], *levels[failed & ~fails]][:number]


def first_failures(episodes: pd.DataFrame, number: int = NUM_FAILURES) -> pd.DataFrame:
    """Select at most ``number`` failed episodes: the first failure by each cause, then further
    failures, both in the order of the levels.

    Args:
        episodes: table of episodes of a condition.
        number: maximum number of episodes.

    Returns:
        Rows of the table.
    """
    failed = episodes[episodes["cause"] != SOLVED]
    again = failed.duplicated("cause").to_numpy()
    return pd.concat([failed[~again], failed[again]])[:number]

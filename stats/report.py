"""Markdown reports of studies: description, claims, and all effects.

``report`` formats the report of a study of several outcomes. Studies with their own report layout
use only the functions that format numbers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import pandas as pd

from common.tables import format_count, markdown_escaped, markdown_table
from stats.effects import (
    CLAIMED,
    DIVERGENCE,
    MARGIN,
    MIN_CONTROLS_TO_CLAIM,
    NOTHING,
    UNDECIDED,
    Outcome,
)
from stats.significance import LEVEL, share

_COLUMNS_PER_TABLE = 6


@dataclasses.dataclass(frozen=True)
class Wording:
    """Terms for interventions and controls in a report and a figure.

    Attributes:
        controls: plural name of the controls, such as "random directions".
        alike: phrase for interventions without an effect beyond the controls, such as "directions
            that are no better than random ones".
        equal: phrase that follows ``controls`` at their first mention, such as " of equal size".
        size: definition of the size of a change (column ``moved``), such as "How far a state is
            moved in a step".
        measure: how this size is measured, with its unit.
        axis: the same as a short label of an axis.
    """

    title: str
    controls: str = "controls"
    alike: str = "alterations that are no better than controls"
    equal: str = ""
    size: str = "Size of the change"
    measure: str = "mean Euclidean norm, in standard deviations of its units"
    axis: str = "change per step (standard deviations)"


DIRECTIONS = Wording(
    "Altered directions of the agent's hidden state", "random directions",
    "directions that are no better than random ones", " of equal size",
    "How far a state is moved in a step")
PATCHES = Wording("Patched layers of the agent", equal=" of the same kind",
                  size="How far the changed outputs are moved in a step")
MIXED = dataclasses.replace(
    PATCHES, title="Altered directions of the agent's hidden state, and patches of its layers")


def format_number(value: float, form: str = ".3g") -> str:
    """Format a number with the format specification ``form``; NaN gives "none"."""
    return "none" if math.isnan(value) else f"{value:{form}}"


def format_interval(value: float | None, low: float | None, high: float | None, form: str = ".3g",
                    undefined: str = "none") -> str:
    """Format a number with the ends of its interval, such as "+0.5 (0.1 to 0.9)".

    Args:
        value: the number; None and NaN give ``undefined``.
        low, high: ends of the interval, which is left out if they are None or NaN.
        form: format of all three numbers; a sign, as in "+.3g" for effects, applies to ``value``
            only.
    """
    if pd.isna(value):
        return undefined
    end = form.removeprefix("+")
    return f"{value:{form}}" + ("" if pd.isna(low) else f" ({low:{end}} to {high:{end}})")


def format_share(are_hits: pd.Series) -> str:
    """Format the share of true values with Wilson's 95 % interval (1927), in per cent."""
    hits, number = int(are_hits.astype(bool).sum()), len(are_hits)
    value, low, high = (100 * end for end in share(hits, number))
    return f"{value:.0f} % ({low:.0f} to {high:.0f}; {hits} of {number})"


def format_range(low: float, high: float, form: str = ".3g") -> str:
    """Format a range, such as "0.1 to 0.9", with the format specification ``form``; NaN gives
    "none"."""
    return "none" if math.isnan(low) else f"{low:{form}} to {high:{form}}"


def format_p(p: float) -> str:
    """Format a p-value; NaN gives "none"."""
    return format_number(p, ".2g")


def bold(text: str, is_bold: bool = True) -> str:
    """Format text as bold Markdown if ``is_bold``; otherwise return it unchanged."""
    return f"**{text}**" if is_bold else text


def warn_of_few_controls(num_controls: float, controls: str = "controls") -> list[str]:
    """Return the lines of a warning about too few controls for claims; empty if there are enough.

    Args:
        num_controls: smallest number of controls of any condition; NaN if there is no condition,
            which gives no warning.
    """
    if num_controls >= MIN_CONTROLS_TO_CLAIM or math.isnan(num_controls):
        return []
    return [f"Nothing can be claimed with fewer than {MIN_CONTROLS_TO_CLAIM} {controls}.", ""]


def report(table: pd.DataFrame, outcomes: Sequence[Outcome], wording: Wording,
           description: str) -> str:
    """Format the report of a study as Markdown.

    Args:
        table: table from ``stats.effects.compare_conditions``, with or without verdicts. Optional
            columns ``norm`` and ``relative`` are further sizes of the changes.
        description: sentence that describes the runs.
    """
    table = table.assign(label=table["label"].map(markdown_escaped))
    directions, controls = table[~table["control"]], table[table["control"]]
    num_controls = directions["num_controls"].min()
    lines = [
        f"# {wording.title}", "", markdown_escaped(description), "",
        "An effect is the mean difference between altered and unaltered runs, with a 95 % "
        f"bootstrap interval. p: paired sign-flip test; p (Holm): corrected for {len(directions)} "
        "comparisons. p (controls): (1 + number of controls with at least as large an effect in "
        "absolute value) / (1 + number of controls), with "
        f"{num_controls} {wording.controls}{wording.equal}. An effect is "
        "**claimed** if its interval excludes 0 and both p (Holm) and p (controls) are at most "
        f"{LEVEL}.",
        "", "## What may be claimed", "", *_summary(directions, controls, wording), ""]
    lines += warn_of_few_controls(num_controls)
    claimed = directions[directions["claimed"]]
    if len(claimed):
        labels = {outcome.name: outcome.label for outcome in outcomes}
        lines += markdown_table(
            ("alteration", "outcome", "unaltered", "altered", "change (95 %)", "p (Holm)",
             "controls' changes", "p (controls)"),
            [(row.label, labels[row.outcome], format_number(row.unaltered),
              format_number(row.altered), _starred(row), format_p(row.p_holm),
              format_range(row.control_low, row.control_high), format_p(row.p_control))
             for row in claimed.itertuples()])
    lines += ["## All effects", "", "Bold: claimed. One star: p (Holm) <= "
              f"{LEVEL}, but not claimed.", ""]
    for begin in range(0, len(outcomes), _COLUMNS_PER_TABLE):
        lines += _effects(table, outcomes[begin:begin + _COLUMNS_PER_TABLE], wording)
    if "verdict" in table:
        lines += _verdicts(directions, outcomes)
    if "moved" in table:
        lines += _sizes(directions, controls, wording)
    return "\n".join(lines)


def _sizes(directions: pd.DataFrame, controls: pd.DataFrame, wording: Wording) -> list[str]:
    """Format the size of each change, and the range of sizes of its controls.

    Args:
        directions, controls: rows of the interventions and of the controls in the effects table.
    """
    sizes = controls.drop_duplicates("condition").groupby("pattern")["moved"]
    columns = {"norm": "norm", "relative": "as a share of the output's norm"}
    columns = {name: label for name, label in columns.items() if name in directions}
    return [
        "## Size of the alterations", "", f"{wording.size}: {wording.measure}.", "",
        *markdown_table(
            ("alteration", "moved", "controls: lowest, median, highest", *columns.values()),
            [(row.label, format_number(row.moved),
              ", ".join(map(format_number, sizes.get_group(row.pattern).quantile([0, 0.5, 1]))),
              *(format_number(getattr(row, name)) for name in columns))
             for row in directions.drop_duplicates("condition").itertuples()])]


def _verdicts(directions: pd.DataFrame, outcomes: Sequence[Outcome]) -> list[str]:
    """Format verdicts (claimed, nothing, undecided), margins and medians.

    Args:
        directions: rows of the interventions in the effects table.
    """
    labels = {outcome.name: outcome.label for outcome in outcomes}
    counts = directions["verdict"].value_counts()
    return [
        "## What does nothing, and what is undecided", "",
        f"**{NOTHING.capitalize()}**: the interval lies within the margin around 0, which is "
        f"{MARGIN} for probabilities and shares, and {100 * MARGIN:.0f} % of the unaltered value "
        f"otherwise. **{UNDECIDED.capitalize()}**: neither claimed nor within the margin. Counts: "
        + ", ".join(f"{counts.get(verdict, 0)} {verdict}"
                    for verdict in (CLAIMED, NOTHING, UNDECIDED))
        + ". Smallest effect: the effect that a single comparison over the same number of levels "
        "detects in four of five studies, without correction for multiple tests. The change of the "
        "median has its own bootstrap interval.", "",
        *markdown_table(
            ("alteration", "outcome", "verdict", "change (95 %)", "margin", "smallest effect",
             "median unaltered", "median altered", "change of the median (95 %)"),
            [(row.label, labels[row.outcome], row.verdict, _starred(row),
              format_number(row.margin), format_number(row.smallest_effect),
              format_number(row.median_unaltered), format_number(row.median_altered),
              format_interval(row.median_effect, row.median_low_95, row.median_high_95, "+.3g"))
             for row in directions.itertuples()])]


def _summary(directions: pd.DataFrame, controls: pd.DataFrame, wording: Wording) -> list[str]:
    """Report how many effects are claimed for the interventions and, for comparison, the controls.

    Args:
        directions, controls: rows of the interventions and of the controls in the effects table.
    """
    num_ranks = 1 + directions["num_controls"].min()
    by_chance = len(directions) * int(LEVEL * num_ranks) / num_ranks
    diverging = directions[directions["outcome"] == DIVERGENCE]
    effects = format_count(len(directions), "effects")
    lines = [
        f"- {directions['claimed'].sum()} of {effects} are claimed. They belong to "
        f"{directions[directions['claimed']]['condition'].nunique()} of "
        f"{format_count(directions['condition'].nunique(), 'alterations')}, with at most "
        f"{format_count(_most_claims(directions), 'claims')} for a single alteration.",
        f"- The same rule claims {controls['claimed'].sum()} of "
        f"{format_count(len(controls), 'effects')} of the "
        f"{wording.controls}, each of which is compared with the others; it makes at most "
        f"{format_count(_most_claims(controls), 'claims')} for a single control. p (controls) is "
        f"not corrected for multiple tests: of {effects} of {wording.alike}, about "
        f"{by_chance:.0f} would be larger than the controls' effects by chance.",
        f"- {(directions['p_holm'] <= LEVEL).sum()} effects differ from 0 after the correction; "
        f"{(directions['p_control'] <= LEVEL).sum()} are larger than the controls' effects."]
    if len(diverging):
        lines.append(
            f"- The share of steps with another action is {diverging['altered'].min():.2f} to "
            f"{diverging['altered'].max():.2f}. Any alteration makes it larger than 0, so only "
            "the comparison with the controls is informative.")
    return lines


def _most_claims(rows: pd.DataFrame) -> int:
    return rows.groupby("condition")["claimed"].sum().max()


def _effects(table: pd.DataFrame, outcomes: Sequence[Outcome], wording: Wording) -> list[str]:
    """Format the effects of the interventions, and the range over the controls of each kind
    (``Condition.pattern``).

    Args:
        outcomes: outcomes, one per column of the result.
    """
    directions, names = table[~table["control"]], [outcome.name for outcome in outcomes]
    unaltered = directions.drop_duplicates("outcome").set_index("outcome")["unaltered"]
    rows = [("unaltered", *map(format_number, unaltered[names]))]
    for label, effects in directions.groupby("label", sort=False):
        texts = {row.outcome: _starred(row) for row in effects.itertuples()}
        rows.append((label, *(texts[name] for name in names)))
    for pattern, controls in table[table["control"]].groupby("pattern"):
        spread = controls.groupby("outcome")["effect"].agg(["min", "max"])
        rows.append((f"{controls['condition'].nunique()} {wording.controls} "
                     f"({pattern.replace('_', ' ')})",
                     *(format_range(*spread.loc[name]) for name in names)))
    return markdown_table(("alteration", *(outcome.label for outcome in outcomes)), rows)


def _starred(row) -> str:
    """Format an effect with its interval: bold if claimed; otherwise with a star if p (Holm) is at
    most LEVEL."""
    text = format_interval(row.effect, row.low_95, row.high_95, "+.3g")
    return bold(text) if row.claimed else f"{text} *" if row.p_holm <= LEVEL else text

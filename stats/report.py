"""The table of altered directions as Markdown: what was done, what may be claimed, all effects."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pandas as pd

from common.tables import markdown_escaped, markdown_table
from stats.effects import (
    CLAIMED,
    DIVERGENCE,
    MARGIN,
    MIN_CONTROLS_TO_CLAIM,
    NOTHING,
    UNDECIDED,
    Outcome,
)
from stats.significance import LEVEL

_COLUMNS_A_TABLE = 6


@dataclasses.dataclass(frozen=True)
class Wording:
    """Words for alterations and their controls in report and figure.

    Attributes:
        title: of the page.
        controls: many of them, in the middle of a sentence.
        alike: such as those that are compared with them, if nothing sets them apart.
        equal: behind ``controls`` where they come first.
        size: what the size of an alteration is.
    """

    title: str
    controls: str
    alike: str
    equal: str
    size: str


DIRECTIONS = Wording(
    "Altered directions of the agent's hidden state", "random directions",
    "directions that are no better than random ones", " of equal size",
    "How far a state is moved in a step")
PATCHES = Wording(
    "Patched layers of the agent", "controls", "alterations that are no better than controls",
    " of the same kind", "How far the changed outputs are moved in a step")
MIXED = dataclasses.replace(
    PATCHES, title="Altered directions of the agent's hidden state, and patches of its layers")


def report(table: pd.DataFrame, outcomes: Sequence[Outcome], wording: Wording, what: str) -> str:
    """The report.

    Args:
        table: from ``compare``, or also from ``with_verdicts``.
        what: a sentence on what was run.
    """
    table = table.assign(label=table["label"].map(markdown_escaped))
    directions, controls = table[~table["control"]], table[table["control"]]
    num_controls = directions["num_controls"].min()
    lines = [
        f"# {wording.title}", "", markdown_escaped(what), "",
        "An effect is the mean over starts of altered minus unaltered run, with a 95 % bootstrap "
        f"interval. p: paired sign-flip test; p (Holm): corrected for all {len(directions)} "
        "comparisons. p (controls): (1 + controls with an effect as large in absolute value) / "
        f"(1 + controls), with {num_controls} {wording.controls}{wording.equal}. **Claimed** is "
        f"what leaves 0 out of its interval and has both p (Holm) and p (controls) <= {LEVEL}.",
        "", "## What may be claimed", "", *_summary(directions, controls, wording), ""]
    if num_controls < MIN_CONTROLS_TO_CLAIM:
        lines += [f"Nothing can be claimed with fewer than {MIN_CONTROLS_TO_CLAIM} controls.", ""]
    claimed = directions[directions["claimed"]]
    if len(claimed):
        labels = {outcome.name: outcome.label for outcome in outcomes}
        lines += markdown_table(
            ("alteration", "outcome", "unaltered", "altered", "change (95 %)", "p (Holm)",
             "controls' changes", "p (controls)"),
            [(row.label, labels[row.outcome], _number(row.unaltered), _number(row.altered),
              _effect(row), f"{row.p_holm:.2g}",
              f"{_number(row.control_low)} to {_number(row.control_high)}",
              f"{row.p_control:.2g}") for row in claimed.itertuples()])
    lines += ["## All effects", "", "Bold: claimed. One star: p (Holm) <= "
              f"{LEVEL}, but not beyond the controls.", ""]
    for begin in range(0, len(outcomes), _COLUMNS_A_TABLE):
        lines += _effects(table, outcomes[begin:begin + _COLUMNS_A_TABLE], wording)
    if "verdict" in table:
        lines += _verdicts(directions, outcomes)
    lines += ["## Size of the alterations", "", f"{wording.size}: mean "
              "Euclidean norm, in standard deviations of its units.", ""]
    sizes = controls.drop_duplicates("arm").groupby("pattern")["moved"]
    more = {"norm": "norm", "relative": "as a share of the output's norm"}
    more = {name: label for name, label in more.items() if name in table}
    lines += markdown_table(("alteration", "moved", "controls: lowest, median, highest",
                        *more.values()), [
        (row.label, _number(row.moved), ", ".join(
            _number(value) for value in sizes.get_group(row.pattern).quantile([0, 0.5, 1])),
         *(_number(getattr(row, name)) for name in more))
        for row in directions.drop_duplicates("arm").itertuples()])
    return "\n".join(lines)


def _verdicts(directions: pd.DataFrame, outcomes: Sequence[Outcome]) -> list[str]:
    """A table of verdicts (claimed, nothing, undecided), margins and medians."""
    labels = {outcome.name: outcome.label for outcome in outcomes}
    counts = directions["verdict"].value_counts()
    return [
        "## What does nothing, and what is undecided", "",
        f"**{NOTHING.capitalize()}**: the interval lies within the margin around 0, which is "
        f"{MARGIN} for probabilities and shares, and {100 * MARGIN:.0f} % of the unaltered value "
        f"otherwise. **{UNDECIDED.capitalize()}** is all that is neither this nor claimed: "
        + ", ".join(f"{counts.get(each, 0)} {each}" for each in (CLAIMED, NOTHING, UNDECIDED))
        + ". Smallest effect: that a single comparison of so many levels finds in four of five "
        "runs, before the correction. The change of the median has a bootstrap interval of its "
        "own.", "",
        *markdown_table(
            ("alteration", "outcome", "verdict", "change (95 %)", "margin", "smallest effect",
             "median unaltered", "median altered", "change of the median (95 %)"),
            [(row.label, labels[row.outcome], row.verdict, _effect(row), _number(row.margin),
              _number(row.smallest_effect), _number(row.median_unaltered),
              _number(row.median_altered), f"{row.median_effect:+.3g} "
              f"({_number(row.median_low_95)} to {_number(row.median_high_95)})")
             for row in directions.itertuples()])]


def _summary(directions: pd.DataFrame, controls: pd.DataFrame, wording: Wording) -> list[str]:
    """Number of claims, and of those that the same rule makes of controls."""
    num_ranks = 1 + directions["num_controls"].min()
    by_chance = len(directions) * int(LEVEL * num_ranks) / num_ranks
    diverging = directions[directions["outcome"] == DIVERGENCE]
    lines = [
        f"- {directions['claimed'].sum()} of {len(directions)} effects are claimed, of "
        f"{directions[directions['claimed']]['arm'].nunique()} of "
        f"{directions['arm'].nunique()} alterations; at most {_most_claims(directions)} of the "
        "same one.",
        f"- The same rule claims {controls['claimed'].sum()} of {len(controls)} effects of the "
        f"{wording.controls}, each compared with the others; at most "
        f"{_most_claims(controls)} of the same one. p (controls) is not corrected: of "
        f"{len(directions)} effects of {wording.alike}, "
        f"{by_chance:.0f} would lie beyond the controls.",
        f"- {(directions['p_holm'] <= LEVEL).sum()} effects beat 0 after the correction; "
        f"{(directions['p_control'] <= LEVEL).sum()} lie beyond the controls."]
    if len(diverging):
        lines.append(
            f"- The share of steps with another action is {diverging['altered'].min():.2f} to "
            f"{diverging['altered'].max():.2f}; any alteration makes it larger than 0, so only "
            "the comparison with the controls says something.")
    return lines


def _most_claims(rows: pd.DataFrame) -> int:
    return rows.groupby("arm")["claimed"].sum().max()


def _effects(table: pd.DataFrame, outcomes: Sequence[Outcome], wording: Wording) -> list[str]:
    """A row for each direction, then the range of the controls of each pattern."""
    directions = table[~table["control"]].set_index(["label", "outcome"])
    labels = directions.index.get_level_values("label").unique()
    first = directions.loc[labels[0]]
    rows = [("unaltered", *(_number(first.loc[each.name, "unaltered"]) for each in outcomes))]
    for label in labels:
        rows.append((label, *(_effect(directions.loc[(label, each.name)]) for each in outcomes)))
    for pattern, controls in table[table["control"]].groupby("pattern"):
        spread = controls.groupby("outcome")["effect"].agg(["min", "max"])
        rows.append((f"{controls['arm'].nunique()} {wording.controls} "
                     f"({pattern.replace('_', ' ')})",
                     *(f"{_number(spread.loc[each.name, 'min'])} to "
                       f"{_number(spread.loc[each.name, 'max'])}" for each in outcomes)))
    return markdown_table(("alteration", *(each.label for each in outcomes)), rows)


def _effect(row) -> str:
    """``row``: of the table, by position or name."""
    text = f"{row.effect:+.3g} ({_number(row.low_95)} to {_number(row.high_95)})"
    if row.claimed:
        return f"**{text}**"
    return f"{text} *" if row.p_holm <= LEVEL else text


def _number(value: float) -> str:
    return f"{value:.3g}"

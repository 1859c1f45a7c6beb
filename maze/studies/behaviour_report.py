"""Report and figures of the behaviour of an agent in mazes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from common.files import atomic_path
from common.palette import BLUE, COLOURS, DPI, VERMILION
from common.tables import markdown_escaped, markdown_table
from maze.level.grid import FEATURES
from maze.studies.behaviour_rows import (
    EXACT,
    EXACT_LABEL,
    GOT,
    PLAYED_LABEL,
    TARGET_LABELS,
    groups_of,
    mean,
)
from maze.studies.episodes import CHEESE, NEITHER, REGION
from maze.studies.prediction import ALL, FOLDS, NUM_SUBSETS, RESAMPLINGS, SET, SETS, SINGLE
from stats.claims import Finding
from stats.significance import LEVEL, share

_BINS = 10  # of exact probabilities


def report(table: pd.DataFrame, regressions: pd.DataFrame | None, rows: Sequence[Finding],
           what: str, notes: Sequence[str], region: int, seed: int) -> str:
    """The report as Markdown.

    Args:
        table: from ``table_of``.
        regressions: from ``prediction.regressions``, None without.
        rows: from ``behaviour_rows``.
        what: a sentence on what was run.
        notes: sentences on what was left out.
        region: rows and columns of the top right region.
    """
    lines = ["# Behaviour of the agent in mazes", "", markdown_escaped(what), "",
             *(f"{note}\n" for note in notes), "## How often it gets the cheese", "",
             "An episode is played to its end, at most 500 steps; whether it got the cheese is the "
             f"game's own flag. The region is the last {region} rows and columns. First: whether "
             "the mouse was at the cheese or on another square of the region first. Shares have "
             "Wilson's 95 % interval; means over levels have a bootstrap interval.", ""]
    lines += markdown_table(
        ("levels", "episodes", PLAYED_LABEL, EXACT_LABEL, "cheese first", "region first", "neither",
         "P(cheese) at the decision square", "steps"),
        [(name, str(len(group)), _with_ends(*share(group[GOT].sum(), len(group))),
          _mean(group[EXACT], seed),
          *(f"{(group['first'] == first).mean():.3f}" for first in (CHEESE, REGION, NEITHER)),
          _mean(group["p_cheese"], seed), f"{group['steps'].mean():.1f}")
         for name, group in groups_of(table).items()])
    if regressions is not None:
        lines += _regression_lines(regressions)
    lines += ["## Rows of the table of findings", "", "Filled by this run:", ""] if rows else []
    lines += markdown_table(
        ("row", "levels or target", "measure", "ours (95 %)", "base", "p (Holm)", "levels"),
        [(str(row.row), row.levels, row.measure, _with_ends(row.value, row.low_95, row.high_95),
          _number(row.base), _number(row.p_holm), str(row.num_levels)) for row in rows]
    ) if rows else []
    return "\n".join(lines)


def _regression_lines(table: pd.DataFrame) -> list[str]:
    lines = [
        "## Which features predict it", "",
        f"Logistic regression on one feature alone. Scores by {FOLDS}-fold cross-validation over "
        "levels, standardised by the folds that are fitted; beside them what the base rate "
        "scores on the same levels. Gains are paired, with a bootstrap interval over levels and "
        "a sign-flip p after Holm's correction for all gains here. **Bold**: the interval lies "
        f"above 0 and p (Holm) <= {LEVEL}. The second target is the exact probability, so its "
        "scores are those expected of episodes, without the noise of playing them.", ""]
    for target, found in table.groupby("target", sort=False):
        single = found[found["model"] == SINGLE]
        order = single[single["quantity"] == "log_loss_gain"].sort_values(
            "value", ascending=False)["features"]
        lines += [f"Target: {TARGET_LABELS[target]}. Base rate: accuracy "
                  f"{_base(single, 'accuracy'):.3f}, log-loss {_base(single, 'log_loss'):.3f}.", ""]
        lines += markdown_table(
            ("feature", "accuracy", "gain", "log-loss", "gain", "coefficient"),
            [(name, *_score_cells(single[single["features"] == name]),
              _number(_one(single[single["features"] == name], "coefficient").value))
             for name in order])
    lines += ["## Sets of features", "",
              "L1 logistic regression (penalty of weight 1) on standardised features; intervals of "
              f"coefficients from fits to {RESAMPLINGS} draws of levels. VIF: variance inflation "
              "factor. Sets: " + "; ".join(f"{name}: {', '.join(members)}"
                                           for name, members in SETS.items()) + ".", ""]
    for target, found in table[table["model"] == SET].groupby("target", sort=False):
        lines += [f"Target: {TARGET_LABELS[target]}.", ""]
        rows = []
        for name, part in found.groupby("features", sort=False):
            rows.append((name, "-", *_score_cells(part), _interval(_one(part, "intercept")), ""))
            for row in part[part["quantity"] == "coefficient"].itertuples():
                vif = part[(part["quantity"] == "vif") & (part["feature"] == row.feature)]
                rows.append((name, row.feature, "", "", "", "", _interval(row),
                             _inflation(vif["value"].iloc[0])))
        lines += markdown_table(("set", "feature", "accuracy", "gain", "log-loss", "gain",
                            "coefficient, or intercept (95 %)", "VIF"), rows)
    lines += ["## Signs over subsets of the features", "",
              f"Of {NUM_SUBSETS} random subsets of all {len(FEATURES)} features, those with a "
              "feature: share that gives it a positive and a negative coefficient (the rest: 0). "
              "VIF among all features.", ""]
    for target, found in table[table["model"] == ALL].groupby("target", sort=False):
        wide = found.pivot(index="feature", columns="quantity", values="value")
        lines += [f"Target: {TARGET_LABELS[target]}.", ""]
        lines += markdown_table(("feature", "positive", "negative", "VIF"), [
            (name, f"{wide.loc[name, 'share_positive']:.2f}",
             f"{wide.loc[name, 'share_negative']:.2f}", _inflation(wide.loc[name, "vif"]))
            for name in found["feature"].drop_duplicates()])
    return lines


def draw_episodes(path: Path, table: pd.DataFrame, title: str) -> None:
    """Shares with Wilson's intervals by what levels are and by size; played against exact."""
    figure = Figure(figsize=(15, 4.6), layout="constrained")
    by_group, by_size, by_exact = figure.subplots(1, 3)
    groups = groups_of(table)
    _shares(by_group, list(groups.values()))
    by_group.set_yticks(range(len(groups)), [f"{name} ({len(rows)})"
                                             for name, rows in groups.items()], fontsize=8)
    by_group.invert_yaxis()
    sizes = dict(list(table.groupby("maze_dim")))
    _shares(by_size, list(sizes.values()))
    by_size.set_yticks(range(len(sizes)), [f"{size} rows ({len(rows)})"
                                           for size, rows in sizes.items()], fontsize=8)
    for axes in (by_group, by_size):
        axes.set_xlabel(f"share of episodes that {PLAYED_LABEL} (95 % interval)")
        axes.set_xlim(0, 1.02)
        axes.grid(axis="x", alpha=0.3)
    exact = table[table[EXACT].notna()]
    by_exact.plot([0, 1], [0, 1], color="black", linewidth=0.8)
    bins = np.minimum((exact[EXACT] * _BINS).astype(int), _BINS - 1)
    for _, rows in exact.groupby(bins):
        value, low, high = share(rows[GOT].sum(), len(rows))
        by_exact.plot([rows[EXACT].mean()] * 2, [low, high], color=BLUE, linewidth=1.4)
        by_exact.plot(rows[EXACT].mean(), value, "o", color=BLUE, markersize=5)
    by_exact.set_xlabel(f"{EXACT_LABEL}, in {_BINS} bins" if len(exact) else
                        "no exact probabilities were asked for")
    by_exact.set_ylabel(f"share that {PLAYED_LABEL}")
    figure.suptitle(title)
    _save(path, figure)


def draw_regressions(path: Path, table: pd.DataFrame, title: str) -> None:
    """Gains of single features over the base rate and coefficients of sets, a row a target."""
    targets = list(table["target"].unique())
    figure = Figure(figsize=(17, 5.2 * len(targets)), layout="constrained")
    for panels, target in zip(figure.subplots(len(targets), 3, squeeze=False), targets):
        found = table[table["target"] == target]
        single = found[found["model"] == SINGLE]
        for axes, quantity in zip(panels, ("accuracy_gain", "log_loss_gain")):
            rows = single[single["quantity"] == quantity].sort_values("value", ascending=False)
            for place, row in enumerate(rows.itertuples()):
                colour = VERMILION if _beats(row) else BLUE
                axes.plot([row.low_95, row.high_95], [place] * 2, color=colour, linewidth=1.4)
                axes.plot(row.value, place, "o", color=colour, markersize=5)
            axes.set_yticks(range(len(rows)), rows["features"], fontsize=8)
            axes.set_xlabel(f"{quantity.removesuffix('_gain').replace('_', '-')}: gain over the "
                            "base rate (red: beats it after Holm)")
            axes.set_title(f"{TARGET_LABELS[target]}: one feature alone", fontsize=10)
        rows = found[(found["model"] == SET) & (found["quantity"] == "coefficient")]
        colours = dict(zip(rows["features"].unique(), COLOURS))
        for place, row in enumerate(rows.itertuples()):
            panels[2].plot([row.low_95, row.high_95], [place] * 2, color=colours[row.features],
                           linewidth=1.4)
            panels[2].plot(row.value, place, "o", color=colours[row.features], markersize=5)
        panels[2].set_yticks(range(len(rows)), rows["features"] + ": " + rows["feature"],
                             fontsize=8)
        panels[2].set_xlabel("coefficient, features standardised (95 % interval)")
        panels[2].set_title(f"{TARGET_LABELS[target]}: sets, L1", fontsize=10)
        for axes in panels:
            axes.axvline(0, color="black", linewidth=0.8)
            axes.grid(axis="x", alpha=0.3)
            axes.invert_yaxis()
    figure.suptitle(title)
    _save(path, figure)


def _shares(axes: Axes, groups: Sequence[pd.DataFrame]) -> None:
    """The share of each group that got the cheese, with its interval, from top to bottom."""
    for place, rows in enumerate(groups):
        value, low, high = share(rows[GOT].sum(), len(rows))
        axes.plot([low, high], [place] * 2, color=BLUE, linewidth=1.4)
        axes.plot(value, place, "o", color=BLUE, markersize=5)


def _save(path: Path, figure: Figure) -> None:
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=DPI)


def _beats(row) -> bool:
    """Whether a gain is claimed; ``row``: of the table of regressions."""
    return row.low_95 > 0 and row.p_holm <= LEVEL


def _one(part: pd.DataFrame, quantity: str):
    """The only row of a quantity."""
    return next(part[part["quantity"] == quantity].itertuples())


def _base(part: pd.DataFrame, quantity: str) -> float:
    return part.loc[part["quantity"] == quantity, "base"].iloc[0]


def _score_cells(part: pd.DataFrame) -> list[str]:
    """Accuracy, its gain, log-loss, its gain."""
    cells = []
    for name in ("accuracy", "log_loss"):
        gain = _one(part, f"{name}_gain")
        text = f"{gain.value:+.3f} ({gain.low_95:+.3f} to {gain.high_95:+.3f})"
        cells += [f"{_one(part, name).value:.3f}", f"**{text}**" if _beats(gain) else text]
    return cells


def _interval(row) -> str:
    return _with_ends(row.value, row.low_95, row.high_95)


def _with_ends(value: float, low: float, high: float) -> str:
    ends = "" if np.isnan(low) else f" ({low:.3f} to {high:.3f})"
    return f"{value:.3f}{ends}"


def _mean(values: pd.Series, seed: int) -> str:
    known = values.dropna()
    return _with_ends(*mean(known, seed)) if len(known) else "-"


def _number(value: float) -> str:
    return "-" if np.isnan(value) else f"{value:.3g}"


def _inflation(value: float) -> str:
    return "given away by the others" if np.isnan(value) else f"{value:.3g}"

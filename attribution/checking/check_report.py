"""The report on checks of attributions: what was asked, whether it is so, and the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from attribution.checking.check_files import (
    COMPLETENESS,
    DELETION,
    FIDELITY,
    INTERVENTIONS,
    OBJECTS,
    RANDOMISATION,
)
from attribution.checking.deletion import KINDS as CURVES
from attribution.checking.deletion import RANDOM
from common.tables import markdown_escaped, markdown_table

MEDIAN_BAR, HIGH_BAR = 0.005, 0.01  # of gaps: their median and 99 % quantile
CORRELATION_BAR = 0.5  # of maps of a network that is random throughout
OBJECTS_AT_STAKE = ("coin", "saw")

_TITLES = {
    COMPLETENESS: "Do the attributions add up?",
    DELETION: "Do the cells with the largest attributions matter most?",
    RANDOMISATION: "Do the maps tell of what the network learned?",
    INTERVENTIONS: "Does the output change as attributed when a feature is taken out?",
    OBJECTS: "Does the output change as attributed when an object is taken out of the game?",
    FIDELITY: "Infidelity and sensitivity"}
_ASKED = {
    COMPLETENESS: "Gap: |sum of the attributions - (output - output at the baseline)|, as a share "
                  "of that difference, or of a tenth of the output's deviation where this is "
                  f"larger. Bar: median at most {MEDIAN_BAR:.1%}, 99 % of all frames at most "
                  f"{HIGH_BAR:.0%}.",
    DELETION: "Cells of the layer go to the baseline (deletion) or come from it (insertion), those "
              "with the largest attribution first. Areas under the curves are in deviations of the "
              "output. Better: by how much the area is smaller than that of the other order in "
              "deletion, and larger in insertion. Bar: the 95 % interval against random orders "
              "lies above 0.",
    RANDOMISATION: "Rank correlation of |attribution| over the cells of a frame with that of the "
                   "same agent whose weights are drawn again, the heads first, then one part "
                   f"more from the top in every row. Bar: below {CORRELATION_BAR} when all is "
                   "random.",
    INTERVENTIONS: "Each feature's direction is projected out of every cell of a frame. Expected "
                   "is minus the sum of the feature's attribution; slope: of the change on what is "
                   "expected, 1 if attributions are right and features act apart from each other.",
    OBJECTS: "Each kind of object is taken out of the real game in that frame, and the agent, with "
             "the same memory, sees the new picture. Expected is minus the sum of the attributions "
             "in the cells that the object's exact mask touches. Agreement: share of frames in "
             "which the output changes in the expected direction. By chance: with the mask of that "
             "kind in another frame. Density: share of |attribution| in those cells, divided by "
             "their share of the grid. The agent is drawn no more, but plays on. Bar, for coin and "
             "saw: the interval of the agreement lies above 0.5, and above chance.",
    FIDELITY: "By captum, after Yeh et al. (2019), with small random changes of the activations. "
              "Infidelity: mean squared error of what attributions say of them, as a share of the "
              "mean square of what they do; 1 is as good as no attributions. Sensitivity: the "
              "largest relative change of the attributions."}
_COLUMNS = {
    COMPLETENESS: {"frames": "frames", "median": "median", "high": "99 %", "largest": "largest",
                   "above": "frames above the tolerance", "met": "met"},
    DELETION: {"kind": "curve", "other": "against", "area": "area", "other_area": "other's area",
               "better": "better", "low_95": "low", "high_95": "high"},
    RANDOMISATION: {"drawn_again": "drawn again", "correlation": "rank correlation",
                    "low_95": "low", "high_95": "high"},
    INTERVENTIONS: {"feature": "feature", "change": "change", "expected": "expected",
                    "slope": "slope", "low_95": "low", "high_95": "high", "r2": "R²",
                    "rank_correlation": "rank correlation"},
    OBJECTS: {"kind": "object", "frames": "frames", "change": "change", "expected": "expected",
              "agreement": "agreement", "low_95": "low", "high_95": "high", "chance": "by chance",
              "rank_correlation": "rank correlation", "density": "density",
              "density_low_95": "low", "density_high_95": "high",
              "attribution_sign": "mean sign of the attribution"},
    FIDELITY: {"frames": "frames", "infidelity": "infidelity (median)",
               "sensitivity": "sensitivity (median)"}}


def report(tables: Mapping[str, pd.DataFrame], what: str) -> str:
    """The report.

    Args:
        tables: of the checks that were made, in order, each with the columns ``layer`` and
            ``output``.
        what: a sentence on what was checked.
    """
    lines = ["# Checks of the attributions", "", markdown_escaped(what), "",
             "Intervals: 95 %, bootstrap over episodes.", ""]
    for check, table in tables.items():
        lines += [f"- [{_TITLES[check]}](#{check}) {verdict(check, table)}"]
    for check, table in tables.items():
        lines += ["", f'<a id="{check}"></a>', "", f"## {_TITLES[check]}", "", _ASKED[check], "",
                  f"**{verdict(check, table)}**", "", f"![{_TITLES[check]}]({check}.png)", "",
                  *_markdown(table, _COLUMNS[check])]
    return "\n".join(lines)


def verdict(check: str, table: pd.DataFrame) -> str:
    """Whether it is so, in a sentence, with what is not."""
    match check:
        case "completeness":
            return _so(table["met"], table, "Gaps are within the bar")
        case "deletion":
            random = table[table["other"] == RANDOM]
            return " ".join(_so(part["above"], part, f"{curve.capitalize()} is better than random "
                                "order") for curve in CURVES
                            if len(part := random[random["kind"] == curve]))
        case "randomisation":
            last = table.groupby(["layer", "output"], sort=False).tail(1)
            return _so(last["correlation"] < CORRELATION_BAR, last,
                       "Maps of a random network are others")
        case "interventions":
            known = table.dropna(subset=["slope"])
            within = (known["low_95"] <= 1) & (known["high_95"] >= 1)
            return (f"Slopes: median {known['slope'].median():.2f}, R² median "
                    f"{known['r2'].median():.2f}; {within.sum()} of {len(known)} intervals hold 1."
                    if len(known) else "No feature has any attribution.")
        case "objects":
            stake = table[table["kind"].isin(OBJECTS_AT_STAKE)]
            known = stake.dropna(subset=["agreement"])
            missing = sorted({*OBJECTS_AT_STAKE} - {*known["kind"]})
            text = _so(known["above_chance"].astype(bool), known,
                       "The sign is right more often than by chance", ("kind",))
            return text + (f" Too few frames show: {', '.join(missing)}." if missing else "")
        case _:
            return (f"Infidelity: median {table['infidelity'].median():.2f}; sensitivity: median "
                    f"{table['sensitivity'].median():.2f}.")


def _so(met: pd.Series, table: pd.DataFrame, what: str, more: tuple[str, ...] = ()) -> str:
    """Where a bar is met and where not."""
    met = met.to_numpy(bool)
    if not len(met):
        return f"{what}: nothing to tell."
    names = table[["layer", "output", *more]].agg(", ".join, axis=1)
    if met.all():
        return f"{what}: yes, in all {len(met)} cases."
    return (f"{what}: in {met.sum()} of {len(met)} cases; not so for "
            + "; ".join(names[~met]) + ".")


def _markdown(table: pd.DataFrame, columns: Mapping[str, str]) -> list[str]:
    header = ("layer", "output", *columns.values())
    rows = [[_text(value) for value in row]
            for row in table[["layer", "output", *columns]].itertuples(index=False)]
    return markdown_table(header, rows)


def _text(value: object) -> str:
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    if isinstance(value, float | np.floating):
        return "–" if not np.isfinite(value) else f"{value:.3g}"
    return str(value)


def layers_of(table: pd.DataFrame) -> Sequence[tuple[str, str]]:
    """Layers and outputs of a table, in their order."""
    return list(dict.fromkeys(table[["layer", "output"]].itertuples(index=False, name=None)))

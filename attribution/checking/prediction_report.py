"""Report and figure of the study of predicted effects; see ``attribution.saliency_checks``.

Letters in shape comments: N pairs, M predictors, J outputs, L lags, X draws of random weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from agents.outputs import TAKEN, VALUE
from attribution.checking.effect_predictions import PIXELS, SIMULATOR_METHODS
from attribution.checking.object_effects import DIRECT, MIN_PIXELS, TOTAL
from attribution.checking.prediction_scores import (
    ALL,
    BASELINES,
    MEASURES,
    MIN_EFFECT,
    MIN_OBJECTS,
    NEAR,
    SAME_PLACE,
    Effects,
)
from common.palette import COLOURS, DARK_GREY, VERMILION
from common.tables import markdown_escaped, markdown_table
from stats.bootstrap import ClusterBootstrap
from stats.report import bold
from stats.significance import LEVEL

LABELS = {VALUE: "value", TAKEN: "log-probability of the recorded action"}
_TITLES = {"sign": "Share of correct signs", "auc": "AUC", "rank": "Rank correlation"}
_RANDOMISED_LAGS = (0, 4)  # shown in the report
_SUBSETS = {(TOTAL, ALL): "total effect", (DIRECT, ALL): "direct effect",
            (TOTAL, SAME_PLACE): f"total effect, player within {NEAR} squares of its place"}


def randomisation_table(data: Effects, randomised: np.ndarray, seed: int) -> pd.DataFrame:
    """Compare predictions of agents with random weights with those of the agent, and with effects.

    Args:
        data: measured and predicted effects, of which the total effect is used.
        randomised: predictions with random weights for the first R pairs (X, M, J, L, R).
        seed: seed of the bootstrap over levels.

    Returns:
        Table with columns ``predictor``, ``output``, ``lag``, ``pairs``; ``same_sign``, the share
        of predictions with the sign of the agent's prediction; ``sign_random``, the share of
        correct signs with random weights, with ``low_95`` and ``high_95``; and ``sign``, the share
        with the agent's own weights in the same pairs.
    """
    columns = ["predictor", "output", "lag", "pairs", "same_sign", "sign_random", "low_95",
               "high_95", "sign"]
    number, rows = randomised.shape[-1], []
    if not randomised.size:
        return pd.DataFrame(columns=columns)
    bootstrap = ClusterBootstrap(data.levels[:number], seed)
    for (name, own), others in zip(data.predictions.items(), randomised.swapaxes(0, 1)):
        for (place, output), (step, lag) in itertools.product(enumerate(data.outputs),
                                                              enumerate(data.lags)):
            effects, signs = data.effects[0, place, step, :number], np.sign(own[place, step])
            counted = np.isfinite(effects) & (np.abs(effects) > MIN_EFFECT)
            random = np.sign(others[:, place, step])  # (X, R)
            right = ((1 + random * np.sign(effects)) / 2).mean(axis=0)
            same = ((1 + random * signs[:number]) / 2).mean(axis=0)
            own_right = (1 + signs[:number] * np.sign(effects)) / 2
            if counted.any():
                low, high = bootstrap.interval(right[None], counted[None])[:, 0]
                rows.append((name, output, lag, counted.sum(), same[counted].mean(),
                             right[counted].mean(), low, high, own_right[counted].mean()))
    return pd.DataFrame(rows, columns=columns)


def report(description: str, tables: Mapping[str, pd.DataFrame], outputs: Sequence[str]) -> str:
    """Format the report as Markdown.

    Args:
        description: sentences that describe pairs, agent and simulator.
        tables: the tables ``pairs``, ``scores``, ``differences`` and ``randomisation``.
        outputs: names of the outputs.
    """
    scores, differences = tables["scores"], tables["differences"]
    lines = [
        "# Which map predicts the game?", "", markdown_escaped(description), "",
        "A pair is a recorded frame and an object in view (walls and the player apart). An effect "
        "is the change of an output, some steps (the lag) after the frame, if the object is "
        "removed. *Total effect*: the object is removed from the real game for good; recorded "
        "actions and random numbers stay the same. *Direct effect*: the recorded frames are "
        "rendered without the object, and the game stays as recorded. A prediction from a map is "
        "minus its sum over the object's pixels; maps are not smoothed. Baselines: *constant sign "
        "per kind*, the mean sign of the kind's effects in the other half of the levels; *lag 0 "
        "carried forward*, the effect that the real game shows at lag 0. Ranges in brackets: "
        "95 %, bootstrap over levels. Objects that show fewer than "
        f"{MIN_PIXELS} pixels are left out, and pairs whose effect is at most {MIN_EFFECT:g} count "
        "in no score.", "",
        "## Pairs that are left", "", "Pairs (levels) until either episode ends.", ""]
    for key, title in _SUBSETS.items():
        lines += [f"{title.capitalize()}:", "", *_counts(_chosen(tables["pairs"], key))]
    for output in outputs:
        for key, title in _SUBSETS.items():
            part = _chosen(scores, key, output, ALL)
            if part.empty:
                continue
            lines += [f"## {_label(output)}: {title}", ""]
            for measure in MEASURES:
                lines += [f"{_TITLES[measure]}, all kinds:", "", *_by_lag(part, measure)]
            if key == (TOTAL, ALL):
                lines += [
                    "Differences of shares of correct signs, all kinds, between the simulator and "
                    "the agent alone or a baseline. Bold: p <= 0.05 after Holm's correction over "
                    "all rows of differences.csv with this effect, output and measure.", "",
                    *_differences(_chosen(differences, key, output, ALL))]
    lines += [f"## By kind of object (at least {MIN_OBJECTS} pairs)", ""]
    for output in outputs:
        for kind in dict.fromkeys(scores["kind"]):
            part = _chosen(scores, (TOTAL, ALL), output, kind)
            if kind != ALL and len(part):
                lines += [f"{_label(output)}, {kind}, total effect, share of correct signs:",
                          "", *_by_lag(part, "sign")]
    lines += ["## Random weights", "",
              "The same predictions by agents whose weights are all drawn again (Adebayo et al. "
              "2018), in the simulator as well. Same sign: share of predictions with the sign of "
              "the agent's own prediction; 0.5 is expected of maps that depend on what was "
              "learned.", "", *_randomised(tables["randomisation"])]
    return "\n".join(lines)


def _label(output: str) -> str:
    label = LABELS.get(output, output)
    return label[:1].upper() + label[1:]


def _chosen(table: pd.DataFrame, key: tuple[str, str], output: str | None = None,
            kind: str | None = None) -> pd.DataFrame:
    """Select rows by effect and subset, and optionally by output and kind."""
    rows = (table["effect"] == key[0]) & (table["subset"] == key[1])
    for name, value in (("output", output), ("kind", kind)):
        if value is not None:
            rows &= table[name] == value
    return table[rows]


def _counts(table: pd.DataFrame) -> list[str]:
    lags = sorted(table["lag"].unique())
    rows = [[kind, *(f"{row.pairs} ({row.levels})" for row in part.sort_values("lag").itertuples())]
            for kind, part in table.groupby("kind", sort=False)]
    return markdown_table(["kind", *(f"lag {lag}" for lag in lags)], rows)


def _by_lag(table: pd.DataFrame, measure: str) -> list[str]:
    """Format a measure of each predictor at each lag."""
    lags, rows = sorted(table["lag"].unique()), []
    for name, part in table.groupby("predictor", sort=False):
        cells = {row["lag"]: f"{row[measure]:.2f} ({row[f'{measure}_low_95']:.2f} to "
                             f"{row[f'{measure}_high_95']:.2f})"
                 for row in part.to_dict("records") if np.isfinite(row[measure])}
        rows.append([str(name), *(cells.get(lag, "–") for lag in lags)])
    return markdown_table(["predictor", *(f"lag {lag}" for lag in lags)], rows)


def _differences(table: pd.DataFrame) -> list[str]:
    """Format how the shares of correct signs of the simulator's methods differ from others."""
    part = table[(table["measure"] == "sign") & table["predictor"].isin(SIMULATOR_METHODS)
                 & (table["reference"].str.startswith(PIXELS)
                    | table["reference"].isin(BASELINES))]
    lags, rows = sorted(part["lag"].unique()), []
    for (name, other), differences in part.groupby(["predictor", "reference"], sort=False):
        cells = {row.lag: bold(f"{row.difference:+.2f} ({row.low_95:+.2f} to {row.high_95:+.2f})",
                               row.p_holm <= LEVEL) for row in differences.itertuples()}
        rows.append([name, other, *(cells.get(lag, "–") for lag in lags)])
    return markdown_table(["predictor", "compared with", *(f"lag {lag}" for lag in lags)], rows)


def _randomised(table: pd.DataFrame) -> list[str]:
    table = table[table["lag"].isin(_RANDOMISED_LAGS)]
    if table.empty:
        return ["Not computed.", ""]
    return markdown_table(
        ["predictor", "output", "lag", "pairs", "same sign", "correct signs, random weights",
         "correct signs, the agent's weights"],
        [[row.predictor, row.output, str(row.lag), str(row.pairs), f"{row.same_sign:.2f}",
          f"{row.sign_random:.2f} ({row.low_95:.2f} to {row.high_95:.2f})", f"{row.sign:.2f}"]
         for row in table.itertuples()])


def plot(scores: pd.DataFrame, outputs: Sequence[str], alone: Sequence[str]) -> Figure:
    """Plot the share of correct signs over the lag, for all kinds together.

    Args:
        scores: the table ``scores``.
        outputs: names of the outputs, one row of panels each.
        alone: names of the predictors of the agent alone.
    """
    groups = {
        "agent alone: pixels": [name for name in alone if name.startswith(PIXELS)],
        "agent alone: layers": [name for name in alone if not name.startswith(PIXELS)],
        "simulator: gradients": [name for name in SIMULATOR_METHODS if "difference" not in name],
        "simulator: finite differences": [name for name in SIMULATOR_METHODS
                                          if "difference" in name]}
    figure = Figure(figsize=(17, 4.2 * len(outputs) + 1.2), layout="constrained")
    grid = figure.subplots(len(outputs), len(groups), squeeze=False, sharey=True)
    colours = [VERMILION, *(colour for colour in COLOURS if colour != VERMILION)]
    for axes_of, output in zip(grid, outputs):
        table = _chosen(scores, (TOTAL, ALL), output, ALL)
        lags = sorted(table["lag"].unique())
        for axes, (title, names) in zip(axes_of, groups.items()):
            axes.axhline(0.5, color=DARK_GREY, linewidth=0.8)
            drawn = [(name, line, DARK_GREY) for name, line in zip(BASELINES, ("--", ":"))]
            drawn += [(name, "-", colour) for name, colour in zip(names, colours)]
            for number, (name, line, colour) in enumerate(drawn):
                part = table[table["predictor"] == name].sort_values("lag")
                places = np.array([lags.index(lag) for lag in part["lag"]])
                axes.errorbar(
                    places + 0.07 * (number - (len(drawn) - 1) / 2), part["sign"], fmt="o" + line,
                    color=colour, markersize=4, linewidth=1.2, elinewidth=0.8,
                    label=name.partition(": ")[2] or name,
                    yerr=np.abs(part[["sign_low_95", "sign_high_95"]].to_numpy().T
                                - part["sign"].to_numpy()))
            axes.set_xticks(range(len(lags)), map(str, lags))
            axes.set_title(f"{LABELS.get(output, output)}\n{title}", fontsize=10)
            axes.grid(axis="y", alpha=0.3)
        axes_of[0].set_ylabel("share of correct signs (total effect)")
    for axes in grid[-1]:
        axes.set_xlabel("lag (steps after the frame)")
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    return figure

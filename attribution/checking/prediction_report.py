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
from attribution.checking.counterfactual_predictions import FILLINGS
from attribution.checking.effect_predictions import (
    DIFFERENCE,
    FRAMES_DIFFERENCE,
    PIXELS,
    REPEATED,
    SIMULATOR_METHODS,
)
from attribution.checking.object_effects import DIRECT, MIN_PIXELS, TOTAL
from attribution.checking.prediction_scores import (
    ALL,
    CARRIED,
    CONSTANT,
    LARGE,
    LARGE_EFFECT,
    MEASURES,
    MIN_EFFECT,
    MIN_OBJECTS,
    NEAR,
    SAME_PLACE,
    Effects,
)
from common.palette import BLUE, DARK_GREY, GREEN, ORANGE, PURPLE, SKY_BLUE, VERMILION
from common.tables import markdown_escaped, markdown_table
from stats.bootstrap import ClusterBootstrap
from stats.report import bold, format_interval
from stats.significance import LEVEL

LABELS = {VALUE: "value", TAKEN: "log-probability of the recorded action"}
_TITLES = {"sign": "share of correct signs", "auc": "AUC", "rank": "rank correlation"}
# Predictors of the short version and of the figure, with their colours.
HEADLINE = {
    f"{PIXELS}: integrated gradients": PURPLE, REPEATED: SKY_BLUE,
    "simulator: gradient x input": GREEN, "simulator: gradient x removal": BLUE,
    FRAMES_DIFFERENCE: ORANGE, DIFFERENCE: VERMILION, CONSTANT: DARK_GREY, CARRIED: DARK_GREY}
_LINES = {CONSTANT: "--", CARRIED: ":"}
REFERENCES = (REPEATED, CARRIED)  # with which the short version compares the simulator
_RANDOMISED_LAGS = (0, 4)  # shown in the report
_SUBSETS = {(TOTAL, ALL): "total effect", (DIRECT, ALL): "direct effect",
            (TOTAL, LARGE): f"total effect of at least {LARGE_EFFECT}",
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
    """Format the report as Markdown, beginning with a short version.

    Args:
        description: sentences that describe pairs, agent and simulator.
        tables: the tables ``pairs``, ``scores``, ``differences`` and ``randomisation``.
        outputs: names of the outputs.
    """
    scores, differences, pairs = tables["scores"], tables["differences"], tables["pairs"]
    lines = [
        "# Which map predicts the game?", "", markdown_escaped(description), "",
        "A pair is a recorded frame and an object in view (walls and the player apart). The object "
        "is removed from the real game for good; recorded actions and random numbers stay the "
        "same. Its effect is the change of an output of the agent some steps (the lag) after the "
        "frame. The tables show the share of pairs whose effect has the predicted sign, with 95 % "
        "intervals (bootstrap over levels). By chance, it is 0.5.", ""]
    for output in outputs:
        part = _chosen(scores, (TOTAL, ALL), output, ALL)
        part = part[part["predictor"].isin(HEADLINE)]
        lines += [f"## {_label(output)}: short version", "", *_by_lag(part, "sign"),
                  *_differences(_chosen(differences, (TOTAL, ALL), output, ALL))]
    lines += [
        "## What is compared?", "",
        "- *agent alone*: maps of the agent at the frame, without an environment. They explain the "
        "output at the frame, for the action recorded there; only *frame repeated* reads the "
        "output, and the recorded action, at the lag. A prediction from a map is minus its sum "
        "over the object's pixels; maps are not smoothed.",
        "- *simulator*: the simulation starts from the recorded frames, the agent's recorded "
        "hidden state and, if the simulator has worlds, the game's level state at the frame, which "
        "includes objects out of view. From then on it sees nothing but the recorded actions. "
        "*Finite difference (frames)* removes the object from the initial frames alone; *finite "
        "difference* also removes it from the world.",
        "- *counterfactual*: the blocks of cells that the box around the object touches are filled "
        f"{FILLINGS} times each by the simulator's prior, in world and frames; the prediction is "
        "the mean change. *Emptied*: the same blocks without anything. *Sampled world*: nothing is "
        "taken from the level state; squares in view are read off the last frame. *In black*: the "
        "agent alone sees these blocks in black.",
        "- *constant sign per kind*: the mean sign of the kind's effects in the other half of the "
        "levels. *Lag 0 carried forward*: the effect that the real game shows at lag 0.",
        "- *total effect*: as above. *Direct effect*: the recorded frames are rendered without the "
        "object, and the game stays as recorded.", "",
        "## Pairs", "",
        f"Objects that show fewer than {MIN_PIXELS} pixels are left out. Pairs remain until either "
        f"episode ends. Effects of at most {MIN_EFFECT:g} have no sign; these pairs count in no "
        "score. A prediction of zero counts as half right.", ""]
    for key, title in _SUBSETS.items():
        part = _chosen(pairs, key)
        if part.empty:  # it differs between outputs
            continue
        lines += [f"{title.capitalize()}:", "",
                  *_counts(part if key == (TOTAL, ALL) else part[part["kind"] == ALL], outputs)]
    for output in outputs:
        for key, title in _SUBSETS.items():
            part = _chosen(scores, key, output, ALL)
            is_main = key == (TOTAL, ALL)
            if key not in ((TOTAL, ALL), (TOTAL, LARGE)):
                part = part[part["predictor"].isin(HEADLINE)]
            for measure in MEASURES if is_main else MEASURES[:1]:
                if part.empty:
                    continue
                lines += [f"## {_label(output)}: {title}, {_TITLES[measure]}", "",
                          *_by_lag(part, measure)]
    lines += [f"## By kind of object (at least {MIN_OBJECTS} pairs)", ""]
    for output in outputs:
        for kind in dict.fromkeys(scores["kind"]):
            part = _chosen(scores, (TOTAL, ALL), output, kind)
            part = part[part["predictor"].isin(HEADLINE)]
            if kind != ALL and len(part):
                lines += [f"{_label(output)}, {kind}, total effect, {_TITLES['sign']}:",
                          "", *_by_lag(part, "sign")]
    lines += ["## Random weights", "",
              "The same predictions by agents whose weights are all drawn again (Adebayo et al. "
              "2018), in the simulator as well. Same sign: share of predictions with the sign of "
              "the agent's own prediction; 0.5 is expected of maps that depend on what was "
              "learned.", "", *_randomised(tables["randomisation"])]
    return "\n".join(lines)


def _label(output: str, at_start: bool = True) -> str:
    label = LABELS.get(output, output)
    return label[:1].upper() + label[1:] if at_start else label


def _chosen(table: pd.DataFrame, key: tuple[str, str], output: str | None = None,
            kind: str | None = None) -> pd.DataFrame:
    """Select rows by effect and subset, and optionally by output and kind."""
    rows = (table["effect"] == key[0]) & (table["subset"] == key[1])
    for name, value in (("output", output), ("kind", kind)):
        if value is not None:
            rows &= table[name] == value
    return table[rows]


def _counts(table: pd.DataFrame, outputs: Sequence[str]) -> list[str]:
    """Format the numbers of pairs and levels of each kind, and those of pairs without an effect."""
    lags = sorted(table["lag"].unique())
    rows = [[f"{kind}: pairs (levels)", *(f"{row.pairs} ({row.levels})"
                                          for row in part.sort_values("lag").itertuples())]
            for kind, part in table.groupby("kind", sort=False)]
    every = table[table["kind"] == ALL].sort_values("lag")
    for output in outputs:
        rows.append([f"{ALL}: no effect on the {_label(output, False)}",
                     *map(str, every[f"no_effect_{output}"])])
        rows.append([f"{ALL}: direct effect on the {_label(output, False)} equals the total one",
                     *map(str, every[f"as_direct_{output}"])])
    return markdown_table(["", *(f"lag {lag}" for lag in lags)], rows)


def _by_lag(table: pd.DataFrame, measure: str) -> list[str]:
    """Format a measure of each predictor at each lag."""
    lags, rows = sorted(table["lag"].unique()), []
    for name, part in table.groupby("predictor", sort=False):
        cells = {row["lag"]: format_interval(row[measure], row[f"{measure}_low_95"],
                                             row[f"{measure}_high_95"], ".2f")
                 for row in part.to_dict("records") if np.isfinite(row[measure])}
        rows.append([str(name), *(cells.get(lag, "–") for lag in lags)])
    return markdown_table(["predictor", *(f"lag {lag}" for lag in lags)], rows)


def _differences(table: pd.DataFrame) -> list[str]:
    """Format how the simulator's shares of correct signs differ from those of REFERENCES."""
    part = table[(table["measure"] == "sign") & table["reference"].isin(REFERENCES)
                 & table["predictor"].isin(SIMULATOR_METHODS) & table["predictor"].isin(HEADLINE)]
    lags, rows = sorted(part["lag"].unique()), []
    for (name, other), differences in part.groupby(["predictor", "reference"], sort=False):
        cells = {row.lag: bold(f"{row.difference:+.2f} ({row.low_95:+.2f} to {row.high_95:+.2f})",
                               row.p_holm <= LEVEL) for row in differences.itertuples()}
        rows.append([name, other, *(cells.get(lag, "–") for lag in lags)])
    if not rows:
        return []
    return ["Differences. Bold: p <= 0.05 after Holm's correction over all comparisons of this "
            "output at all lags (differences.csv).", "",
            *markdown_table(["", "compared with", *(f"lag {lag}" for lag in lags)], rows)]


def _randomised(table: pd.DataFrame) -> list[str]:
    table = table[table["lag"].isin(_RANDOMISED_LAGS) & table["predictor"].isin(HEADLINE)]
    if table.empty:
        return ["Not computed.", ""]
    return markdown_table(
        ["predictor", "output", "lag", "pairs", "same sign", "correct signs, random weights",
         "correct signs, the agent's weights"],
        [[row.predictor, row.output, str(row.lag), str(row.pairs), f"{row.same_sign:.2f}",
          format_interval(row.sign_random, row.low_95, row.high_95, ".2f"), f"{row.sign:.2f}"]
         for row in table.itertuples()])


def plot(scores: pd.DataFrame, outputs: Sequence[str]) -> Figure:
    """Plot the shares of correct signs of the HEADLINE predictors over the lag, all kinds together.

    Args:
        scores: the table ``scores``.
        outputs: names of the outputs, one panel each.
    """
    figure = Figure(figsize=(4.6 * len(outputs) + 0.8, 5.6), layout="constrained")
    (row,) = figure.subplots(1, len(outputs), squeeze=False, sharey=True)
    for axes, output in zip(row, outputs):
        table = _chosen(scores, (TOTAL, ALL), output, ALL)
        lags = sorted(table["lag"].unique())
        axes.axhline(0.5, color=DARK_GREY, linewidth=0.8)
        for number, (name, colour) in enumerate(HEADLINE.items()):
            part = table[table["predictor"] == name].sort_values("lag")
            places = np.array([lags.index(lag) for lag in part["lag"]])
            axes.errorbar(
                places + 0.08 * (number - (len(HEADLINE) - 1) / 2), part["sign"],
                fmt="o" + _LINES.get(name, "-"), color=colour, markersize=4, linewidth=1.2,
                elinewidth=0.8,
                label=name.replace(" x ", " × ").replace(PIXELS, "agent alone"),
                yerr=np.abs(part[["sign_low_95", "sign_high_95"]].to_numpy().T
                            - part["sign"].to_numpy()))
        axes.set_xticks(range(len(lags)), map(str, lags))
        axes.set_title(_label(output), fontsize=11)
        axes.set_xlabel("lag (steps after the frame)")
        axes.grid(axis="y", alpha=0.3)
    row[0].set_ylabel("share of correct signs (total effect)")
    first = scores[(scores["lag"] == scores["lag"].min()) & scores["predictor"].isin(HEADLINE)]
    best = _chosen(first, (TOTAL, ALL), outputs[0], ALL).sort_values("sign").iloc[-1]
    sign = format_interval(best["sign"], best["sign_low_95"], best["sign_high_95"], ".2f")
    figure.suptitle(f"{best['predictor'].replace(' x ', ' × ')} predicts most signs of changes of "
                    f"the {_label(outputs[0], False)} at lag {best['lag']}:\n{sign}; chance: 0.5",
                    fontsize=11)
    figure.legend(*row[0].get_legend_handles_labels(), loc="outside lower center", ncols=2,
                  fontsize=9, frameon=False)
    return figure

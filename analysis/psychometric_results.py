"""Conditions, result folder, psychometric functions and report of ``analysis/psychometrics.py``.

Layout of the folder::

    walks/<condition>.csv   P(jump) and value at each distance, see ``Players.walks``
    plays/<condition>.csv   success from each distance, see ``Players.plays``
    thresholds.csv          psychometric functions, see ``thresholds``
    success.csv             shares of levels solved from each distance
    effects.csv             paired comparisons, see ``effects``
    report.md, psychometrics.png

The psychometric function of the gap g to an object is
p(g) = far + (near - far) / (1 + exp((g - m) / s)). It is fitted to the probabilities themselves by
the Bernoulli quasi-likelihood (Papke and Wooldridge 1996); 1 - near is the lapse rate. The
threshold is the gap at which p(g) = 0.5.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.optimize import minimize
from scipy.special import expit

from common.palette import BLUE, DARK_GREY, GREEN, ORANGE, PURPLE, SKY_BLUE, VERMILION
from common.results import Entry, File, Schema, Table, Text
from common.tables import markdown_table
from envs.corridor import COIN_LOOK, CRATE, ENEMY, INVISIBLE, NOTHING, PIT, SAW, SPEED, Corridor
from stats.bootstrap import ClusterBootstrap
from stats.effects import Condition, Outcome, paired_effects
from stats.forest_plot import name_rows
from stats.report import bold, format_interval, format_p
from stats.significance import LEVEL, holm, share

WALK, PLAY = "walk", "play"
INTACT, RESET_ALWAYS, MOVED, EDITED, BLIND, SCRIPT = (
    "intact", "reset", "moved", "edited", "blind", "script")
STANDS = "stands"
PLAYER_LABELS = {INTACT: "", RESET_ALWAYS: ", memory reset at every step",
              MOVED: ", memory moved at random", EDITED: ", edited agent",
              BLIND: ", blind player", SCRIPT: ", script jumps", STANDS: ", standing"}

SCENES = {
    NOTHING: Corridor(), SAW: Corridor(SAW), ENEMY: Corridor(ENEMY), CRATE: Corridor(CRATE),
    "crates_2": Corridor(CRATE, number=2), "crates_3": Corridor(CRATE, number=3),
    "pit_2": Corridor(PIT, number=2), "pit_4": Corridor(PIT, number=4),
    "pit_6": Corridor(PIT, number=6), "saw_like_crate": Corridor(SAW, CRATE),
    "saw_like_enemy": Corridor(SAW, ENEMY), "saw_like_coin": Corridor(SAW, COIN_LOOK),
    "saw_invisible": Corridor(SAW, INVISIBLE), "crate_like_saw": Corridor(CRATE, SAW),
    "saw_small": Corridor(SAW, size=0.5), "saw_large": Corridor(SAW, size=1.5),
    "saw_up_1": Corridor(SAW, above=1), "saw_up_2": Corridor(SAW, above=2)}
SCENES = {name: dataclasses.replace(scene, speed=SPEED) for name, scene in SCENES.items()}
SCENE_LABELS = {
    NOTHING: "empty corridor", "crates_2": "2 crates", "crates_3": "3 crates",
    "pit_2": "pit 2 wide", "pit_4": "pit 4 wide", "pit_6": "pit 6 wide",
    "saw_like_crate": "saw that looks like a crate", "saw_like_enemy": "saw, looks like an enemy",
    "saw_like_coin": "saw that looks like a coin", "saw_invisible": "invisible saw",
    "crate_like_saw": "crate that looks like a saw", "saw_small": "saw of half the size",
    "saw_large": "saw of 1.5 times the size", "saw_up_1": "saw 1 square above the ground",
    "saw_up_2": "saw 2 squares above the ground"}
_BASIC = (NOTHING, SAW, ENEMY, CRATE, "pit_4")
_PLAYED = (*_BASIC, "crates_3", "pit_6", "saw_like_crate", "crate_like_saw", "saw_invisible")
_CUES = ("crate_like_saw", "saw_like_crate")
LESIONED = tuple(SCENES[name] for name in _BASIC)


@dataclasses.dataclass(frozen=True)
class Setting:
    """An agent or player, and the corridor in which it walks or stands.

    Attributes:
        player: INTACT; RESET_ALWAYS: its hidden state is reset at every step; MOVED: random changes
            of the hidden state of equal size; EDITED: another agent; BLIND: runs to the right and
            jumps with probability 1/2; or SCRIPT: jumps once and runs on.
    """

    player: str
    scene: Corridor
    stands: bool = False

    @property
    def releases(self) -> bool:
        """Whether the player goes on by itself from several distances, not only from the first."""
        return self.player == SCRIPT or (self.player == INTACT and self.scene in LESIONED)


def _settings(players: dict[str, tuple[str, ...]]) -> dict[str, Setting]:
    return {f"{player}_{name}": Setting(INTACT if player == STANDS else player, SCENES[name],
                                        player == STANDS)
            for player, names in players.items() for name in names}


WALKS = _settings({INTACT: tuple(SCENES), STANDS: _BASIC, RESET_ALWAYS: _BASIC, MOVED: _BASIC,
                   EDITED: _BASIC, BLIND: (NOTHING, SAW)})
PLAYS = _settings({INTACT: _PLAYED, SCRIPT: _PLAYED, RESET_ALWAYS: _BASIC, MOVED: _BASIC,
                   EDITED: _BASIC, BLIND: _BASIC})

WALKED = {"number": int, "level_seed": int, "ground": int, "step": int, "gap": float, "jump": float,
          "value": float}
PLAYED = {"number": int, "level_seed": int, "step": int, "gap": float, "success": int, "died": int,
          "takeoff": float}
PSYCHOMETRICS = Schema(
    "conditions", "analysis/psychometrics.py", items={
        WALK: Entry("walks/{}.csv", Table(WALKED, exact=True)),
        PLAY: Entry("plays/{}.csv", Table(PLAYED, exact=True))},
    results={"thresholds": Entry("thresholds.csv", Table({"condition": str, "threshold": float})),
             "success": Entry("success.csv", Table({"condition": str, "share": float})),
             "effects": Entry("effects.csv", Table({"condition": str, "effect": float})),
             "report": Entry("report.md", Text()),
             "figure": Entry("psychometrics.png", File())})

IN_VIEW = 6.0  # gap from which on the near edge of an object is in view
NEAR = 2.0  # outcomes of comparisons are means over the steps with a gap of less than this
OUTCOMES = {outcome.name: outcome for outcome in (
    Outcome("jump", f"P(jump) within {NEAR:g} squares", probability=True),
    Outcome("value", f"value within {NEAR:g} squares"),
    Outcome("success", "success from 8 squares on", probability=True),
    Outcome("died", "death from 8 squares on", probability=True))}
MIN_RISE = 0.2  # a curve that rises less from far to near has no threshold
MIN_GROUND = 5  # levels with a ground from which on there is a threshold for it
RESAMPLINGS = 400
BIN = 0.25  # width of the bins of figures and misfits, in squares
_MIN_PROBABILITY, _SCALES = 1e-4, (0.02, 5.0)
_SEEN = 0.95  # share of the resamplings with a threshold from which on there is one


def label_of(name: str) -> str:
    """Return the label of a condition, such as "saw, standing"."""
    player, _, scene = name.partition("_")
    return SCENE_LABELS.get(scene, scene) + PLAYER_LABELS[player]


def _intact(scenes: Iterable[str], measured: Collection[str]) -> list[str]:
    """Return the names of the conditions of the intact agent that are among those measured."""
    return [name for name in (f"{INTACT}_{scene}" for scene in scenes) if name in measured]


def curve(gap: np.ndarray, parameters: np.ndarray) -> np.ndarray:
    """Return the psychometric function at some gaps, for parameters (m, log s, far, near)."""
    middle, log_scale, far, near = parameters
    return far + (near - far) * expit((middle - gap) / np.exp(log_scale))


def fit_curve(gap: np.ndarray, jump: np.ndarray, weights: np.ndarray | None = None,
              start: np.ndarray | None = None) -> np.ndarray:
    """Fit a psychometric function by quasi-likelihood, and return (m, log s, far, near).

    Args:
        gap, jump: gap and P(jump) at each step (N,).
        weights: weight of each step (N,).
        start: start of the search; by default, the best of several.
    """
    weights = np.ones_like(gap) if weights is None else weights

    def loss(parameters: np.ndarray) -> tuple[float, np.ndarray]:
        middle, log_scale, far, near = parameters
        z = (middle - gap) / np.exp(log_scale)
        q = expit(z)
        p = far + (near - far) * q
        value = -(weights * (jump * np.log(p) + (1 - jump) * np.log1p(-p))).sum()
        by_p = weights * (p - jump) / (p * (1 - p))
        by_z = by_p * (near - far) * q * (1 - q)
        gradient = np.array([by_z.sum() / np.exp(log_scale), -(by_z * z).sum(),
                             (by_p * (1 - q)).sum(), (by_p * q).sum()])
        return value / weights.sum(), gradient / weights.sum()

    ends = _MIN_PROBABILITY, 1 - _MIN_PROBABILITY
    is_near = gap < NEAR
    levels = [np.clip(jump[part].mean(), *ends) if part.any() else 0.5
              for part in (~is_near, is_near)]
    starts = [start] if start is not None else [
        np.array([middle, np.log(0.2), *levels]) for middle in (-0.5, 0.25, 1.0, 2.5, 5.0)]
    fits = [minimize(loss, begin, jac=True, method="L-BFGS-B", bounds=(
        (gap.min(), gap.max()), np.log(_SCALES), ends, ends)) for begin in starts]
    return min(fits, key=lambda found: found.fun).x


def threshold_of(parameters: np.ndarray, gap: np.ndarray) -> tuple[float, float]:
    """Return the gap at which a curve crosses 0.5, and its fall per square there; NaN if it does
    not rise by MIN_RISE towards the object, or does not cross 0.5 at a measured gap."""
    middle, log_scale, far, near = parameters
    scale = np.exp(log_scale)
    if near - far < MIN_RISE or not far < 0.5 < near:
        return np.nan, np.nan
    q = (0.5 - far) / (near - far)
    threshold = middle - scale * np.log(q / (1 - q))
    if not gap.min() <= threshold <= gap.max():
        return np.nan, np.nan
    return threshold, (near - far) * q * (1 - q) / scale


def thresholds(walks: dict[str, pd.DataFrame], seed: int) -> pd.DataFrame:
    """Fit the psychometric function of each condition to the steps at which the near edge is in
    view, with a bootstrap over levels.

    Returns:
        A row per condition with the columns ``condition``; ``threshold`` (squares) and ``slope``
        (fall of P(jump) per square at the threshold), with the ends of their 95 % intervals
        ``low_95``, ``high_95``, ``slope_low`` and ``slope_high``; ``defined``: share of the
        resamplings with a threshold, 0 if the fit to all levels has none; if it is less than 95 %,
        the former columns are NaN; ``far``, ``near`` and ``lapse``: ends of the curve; ``misfit``:
        largest difference between a mean in a bin of 0.25 squares and the mean of the curve; and
        ``num_levels``. Rows by theme of the ground have names such as "intact_saw, ground 0".
    """
    parts = dict(walks)
    for name in _intact((SAW, CRATE), walks):
        parts |= {f"{name}, ground {ground}": table
                  for ground, table in walks[name].groupby("ground")
                  if table["number"].nunique() >= MIN_GROUND}
    return pd.DataFrame([_threshold_row(name, table, seed) for name, table in parts.items()],
                        columns=None if walks else ["condition", "threshold"])


def _threshold_row(name: str, table: pd.DataFrame, seed: int) -> dict:
    table = table[table["gap"] < IN_VIEW]
    gap, jump = table["gap"].to_numpy(), table["jump"].to_numpy()
    found = fit_curve(gap, jump)
    bootstrap = ClusterBootstrap(table["number"].to_numpy(), seed, RESAMPLINGS)
    place = np.unique(table["number"], return_inverse=True)[1]
    ends, values = np.full((2, 2), np.nan), threshold_of(found, gap)
    defined = 0.0
    if np.isfinite(values[0]):
        drawn = np.array([threshold_of(fit_curve(gap, jump, draw[place].astype(float), found), gap)
                          for draw in bootstrap.draws])  # (R, 2)
        defined = np.isfinite(drawn[:, 0]).mean()
        ends = np.nanquantile(drawn, (0.025, 0.975), axis=0)
    if defined < _SEEN:
        ends, values = np.full((2, 2), np.nan), (np.nan, np.nan)
    error = table.assign(error=jump - curve(gap, found)).groupby(_bin(gap))["error"]
    misfit = error.mean()[error.size() >= max(5, bootstrap.num_episodes // 4)].abs().max()
    return {"condition": name, "threshold": values[0], "low_95": ends[0, 0], "high_95": ends[1, 0],
            "slope": values[1], "slope_low": ends[0, 1], "slope_high": ends[1, 1],
            "defined": defined, "far": found[2], "near": found[3], "lapse": 1 - found[3],
            "misfit": misfit, "num_levels": bootstrap.num_episodes}


def _bin(gap: np.ndarray) -> np.ndarray:
    """Return the middle of each gap's bin."""
    return (np.floor(gap / BIN) + 0.5) * BIN


def successes(plays: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """Return the shares of levels solved, and in which the player dies, after each number of steps
    walked, with 95 % Wilson intervals; the median gap at this step; and quartiles of the gap at
    take-off."""
    rows = []
    for name, table in plays.items():
        for step, part in table.groupby("step"):
            taken = part["takeoff"].dropna()
            quartiles = taken.quantile([0.25, 0.5, 0.75]) if len(taken) else [np.nan] * 3
            rows.append((name, step, part["gap"].median(),
                         *share(int(part["success"].sum()), len(part)),
                         *share(int(part["died"].sum()), len(part)), *quartiles, len(part)))
    return pd.DataFrame(rows, columns=[
        "condition", "step", "gap", "share", "low_95", "high_95", "died", "died_low", "died_high",
        "takeoff_25", "takeoff", "takeoff_75", "num_levels"])


def comparisons(names: set[str]) -> list[tuple[str, str]]:
    """Return the pairs of conditions to compare, before and after, among those with these names."""
    pairs = [(f"{INTACT}_{NOTHING}", f"{INTACT}_{scene}") for scene in SCENES if scene != NOTHING]
    pairs += [(f"{INTACT}_{SAW}", f"{INTACT}_{scene}") for scene in SCENES
              if scene.startswith("saw_")]
    pairs += [(f"{INTACT}_{CRATE}", f"{INTACT}_{scene}")
              for scene in _CUES]
    pairs += [(f"{STANDS}_{NOTHING}", f"{STANDS}_{scene}") for scene in _BASIC[1:]]
    pairs += [(f"{INTACT}_{scene}", f"{player}_{scene}")
              for player in (STANDS, RESET_ALWAYS, MOVED, EDITED, BLIND) for scene in _BASIC]
    return [pair for pair in pairs if names.issuperset(pair)]


def effects(walks: dict[str, pd.DataFrame], plays: dict[str, pd.DataFrame], seed: int
            ) -> pd.DataFrame:
    """Compare conditions on the same levels.

    An effect is claimed if its interval over levels excludes 0 and p, corrected by Holm's method
    over all rows, is at most LEVEL.

    Returns:
        Rows of ``stats.effects.paired_effects``, with the pair of compared conditions as
        ``condition``, and ``num_levels``, ``p_holm`` and ``claimed``.
    """
    near = {name: table[(table["gap"] >= 0) & (table["gap"] < NEAR)].groupby("number")[
        ["jump", "value"]].mean() for name, table in walks.items()}
    solved = {name: table[table["step"] == 0].set_index("number")[["success", "died"]]
              for name, table in plays.items()}
    tables = []
    for measured in (near, solved):
        for before, after in comparisons(set(measured)):
            pair = measured[before].join(measured[after], how="inner", lsuffix="_before")
            columns = list(measured[after])
            first, second = (pair[[name + suffix for name in columns]].to_numpy(float)
                             for suffix in ("_before", ""))
            label = f"{label_of(after)} - {label_of(before)}"
            condition: Condition = Condition(f"{before}:{after}", label, "")
            tables.append(paired_effects([condition], [OUTCOMES[name] for name in columns], first,
                                         second[None], seed).assign(num_levels=len(pair)))
    if not tables:
        return pd.DataFrame(columns=["condition", "outcome", "effect", "claimed"])
    table = pd.concat(tables, ignore_index=True)
    table["p_holm"] = holm(table["p"])
    table["claimed"] = ((table["low_95"] > 0) | (table["high_95"] < 0)) & (
        table["p_holm"] <= LEVEL)
    return table


def headline(table: pd.DataFrame, success: pd.DataFrame, differences: pd.DataFrame) -> str:
    """Return the answer in one sentence, with what would be right, as far as it was measured."""
    rows, parts = table.set_index("condition"), []
    found = [f"{_threshold(rows.loc[name])} ({label_of(name)})"
             for name in _intact((*_BASIC[1:], *_CUES), rows.index)]
    if found:
        parts.append("the walking agent jumps with probability 0.5 at a gap, in squares, of "
                     + ", ".join(found))
    script = success[success["condition"] == f"{SCRIPT}_{SAW}"]
    passes = script[script["share"] > 0.5]["gap"]
    if len(script):
        parts.append(f"a single jump passes the saw from {passes.min():.1f} to {passes.max():.1f}"
                     if len(passes) else "no jump passes the saw")
    first = success[success["step"] == 0].set_index("condition")
    deaths = [f"{label_of(name)} {_deaths(first.loc[name])}"
              for name in _intact((SAW, "saw_like_crate", "saw_invisible"), first.index)]
    if deaths:
        compared = differences[(differences["outcome"] == "died") & (
            differences["condition"] == f"{INTACT}_{SAW}:{INTACT}_saw_like_crate")]
        few = "" if compared["claimed"].all() else " (too few levels to tell)"
        parts.append(f"deaths from 8 squares on: {', '.join(deaths)}{few}")
    answer = "; ".join(parts) or "see the table"
    return f"{answer[:1].upper()}{answer[1:]}."


def _deaths(row: pd.Series) -> str:
    share, low, high = 100 * row[["died", "died_low", "died_high"]].to_numpy(float)
    return f"{share:.0f} % ({low:.0f} to {high:.0f})"


def _threshold(row: pd.Series, form: str = ".2f") -> str:
    return format_interval(row["threshold"], row["low_95"], row["high_95"], form)


def report_of(table: pd.DataFrame, success: pd.DataFrame, differences: pd.DataFrame,
              description: str) -> str:
    """Return the report in Markdown."""
    labels = {key: outcome.label for key, outcome in OUTCOMES.items()}
    return "\n".join([
        "# At what distance does it see?", "", f"{description}.", "",
        headline(table, success, differences), "",
        "Psychometric functions: threshold (gap in squares at which P(jump) is 0.5) and slope "
        "(fall of P(jump) per square there) with 95 % bootstrap intervals over levels; "
        '"none" if fewer than 95 % of the resamplings have a threshold.', "",
        *markdown_table(("condition", "threshold", "slope", "P far", "P near", "misfit",
                         "levels"), [
            (label_of(row["condition"]), _threshold(row),
             format_interval(row["slope"], row["slope_low"], row["slope_high"], ".2g"),
             f"{row['far']:.2f}", f"{row['near']:.2f}", f"{row['misfit']:.2f}",
             str(row["num_levels"])) for _, row in table.iterrows()]),
        "Levels solved, and with a death, in % with 95 % Wilson intervals, after walking up to a "
        "gap; and the gap at take-off (quartiles). The rest runs out of time.", "",
        *markdown_table(("condition", "gap", "solved", "died", "take-off"), [
            (label_of(row.condition), f"{row.gap:.2f}",
             format_interval(100 * row.share, 100 * row.low_95, 100 * row.high_95, ".0f"),
             format_interval(100 * row.died, 100 * row.died_low, 100 * row.died_high, ".0f"),
             format_interval(row.takeoff, row.takeoff_25, row.takeoff_75, ".2f"))
            for row in success.itertuples()]),
        f"Paired differences, with 95 % bootstrap intervals over levels. **Bold**: claimed, i.e. "
        f"the interval excludes 0 and p (sign-flip test, Holm over {len(differences)} rows) is at "
        f"most {LEVEL}.", "",
        *markdown_table(("comparison", "outcome", "before", "after", "difference", "p (Holm)"), [
            (row.label, labels[row.outcome], f"{row.unaltered:.2f}", f"{row.altered:.2f}",
             bold(format_interval(row.effect, row.low_95, row.high_95, "+.2f"), row.claimed),
             format_p(row.p_holm)) for row in differences.itertuples()])])


_STYLES = ((DARK_GREY, "-"), (VERMILION, "-"), (PURPLE, "--"), (ORANGE, "-"), (BLUE, "--"),
           (GREEN, "-"), (SKY_BLUE, "--"))


_PANELS = (  # column, title, farthest gap, conditions of the intact agent and of others
    ("jump", "objects", 6.5, _intact(_BASIC, WALKS)),
    ("jump", "which cue? look and place of a saw or crate", 2.5, _intact(
        (NOTHING, SAW, "crate_like_saw", CRATE, "saw_like_crate", "saw_like_coin", "saw_up_2"),
        WALKS)),
    ("jump", "height of crates, width of pits", 2.5, _intact(
        (NOTHING, CRATE, "crates_2", "crates_3", "pit_2", "pit_4", "pit_6"), WALKS)),
    ("value", "value of the same frames", 6.5, _intact(_BASIC, WALKS)),
    ("jump", "a saw: lesions, and standing still", 2.5, [
        f"{player}_{SAW}" for player in (BLIND, INTACT, STANDS, RESET_ALWAYS, MOVED, EDITED)]))


def plot(walks: dict[str, pd.DataFrame], plays: dict[str, pd.DataFrame], table: pd.DataFrame,
         title: str, seed: int) -> Figure:
    """Draw psychometric functions of objects, cues and lesions; values; and survival, or deaths if
    no script played. A panel whose measured conditions are in earlier panels is left out."""
    panels: list[tuple[str, str, float, list[str]]] = []
    shown: set[tuple[str, str]] = set()
    for panel in _PANELS:
        curves = {(panel[0], name) for name in panel[3] if name in walks}
        if not curves <= shown:
            panels.append(panel)
        shown |= curves
    scripted = [name for name in (SAW, ENEMY, "pit_4")
                if {f"{INTACT}_{name}", f"{SCRIPT}_{name}"} <= set(plays)]
    number = len(panels) + bool(plays)
    num_rows = 1 if number <= 3 else 2
    num_columns = max(1, math.ceil(number / num_rows))
    figure = Figure(figsize=(14 / 3 * num_columns, 4 * num_rows), layout="constrained")
    axes = figure.subplots(num_rows, num_columns, squeeze=False).ravel()
    for unused in axes[number:]:
        unused.set_axis_off()
    for place, (column, heading, farthest, names) in zip(axes, panels):
        for (colour, style), name in zip(_STYLES, names):
            if name in walks:
                _draw_curve(place, walks[name], column, label_of(name), colour, style, seed)
        place.set(xlim=(farthest, -1 if any("pit" in name for name in names if name in walks)
                        else -0.05),
                  xlabel="squares of free ground in front of the player",
                  ylabel="value (return)" if column == "value" else "P(jump)")
        place.set_title(heading, fontsize=10)
        place.legend(fontsize=8, loc="best" if column == "value" else "upper left")
        if column == "jump":
            place.set_ylim(-0.03, 1.03)
    if scripted:
        _draw_survival(axes[number - 1], plays, scripted)
    elif plays:
        _draw_deaths(axes[number - 1], successes(plays))
    rows = table.set_index("condition")
    figure.suptitle(f"{title}: squares of free ground at which P(jump) is 0.5\n" + "; ".join(
        f"{label_of(name)} {_threshold(rows.loc[name])}"
        for name in _intact(_BASIC[1:], rows.index)), fontsize=12)
    return figure


def _draw_survival(axes: Axes, plays: dict[str, pd.DataFrame], scenes: Iterable[str]) -> None:
    """Draw the survival of the agent and of the script from each distance."""
    colours = {SAW: VERMILION, ENEMY: PURPLE, "pit_4": BLUE}
    for name in scenes:
        for player, style, text in ((INTACT, "-", "agent plays on"),
                                    (SCRIPT, "--", "jump at once")):
            part = successes({name: plays[f"{player}_{name}"]})
            axes.errorbar(
                part["gap"], 1 - part["died"], yerr=np.maximum(
                    0, [part["died_high"] - part["died"], part["died"] - part["died_low"]]),
                fmt="o" + style, color=colours[name], markersize=3, linewidth=1.2,
                label=f"{label_of(f'{INTACT}_{name}')}: {text}")
    axes.set(xlim=(8.6, -0.4), ylim=(-0.03, 1.03), ylabel="share of levels survived",
             xlabel="squares of free ground from which the player goes on")
    axes.set_title("what would have been right? survival from each distance", fontsize=10)
    axes.legend(fontsize=8, loc="lower right")


def _draw_deaths(axes: Axes, success: pd.DataFrame) -> None:
    """Draw the share of levels in which the player dies from 8 squares on."""
    part = success[success["step"] == 0]
    ends = np.maximum(0, [part["died"] - part["died_low"], part["died_high"] - part["died"]])
    axes.errorbar(part["died"], range(len(part)), xerr=ends, fmt="o", color=VERMILION, capsize=3)
    name_rows(axes, [label_of(name) for name in part["condition"]])
    axes.set(xlim=(-0.03, 1.03), xlabel="share of levels")
    axes.set_title("deaths from 8 squares on", fontsize=10)


def _draw_curve(axes: Axes, table: pd.DataFrame, column: str, label: str, colour: str,
                style: str, seed: int) -> None:
    """Draw means in bins with 95 % intervals over levels, and the fitted function of P(jump)."""
    pivot = table.assign(bin=_bin(table["gap"].to_numpy())).pivot_table(
        index="bin", columns="number", values=column)
    pivot = pivot[pivot.notna().sum(axis=1) >= max(5, pivot.shape[1] // 4)]
    values = pivot.to_numpy()
    low, high = ClusterBootstrap(np.arange(values.shape[1]), seed, RESAMPLINGS).interval(
        np.nan_to_num(values), np.isfinite(values))
    means = np.nanmean(values, axis=1)
    axes.errorbar(pivot.index, means, yerr=np.abs([low - means, high - means]), color=colour,
                  markersize=3.5, markerfacecolor=colour if style == "-" else "white", linewidth=1,
                  fmt="o" + (style if column == "value" else ""),
                  label=label if column == "value" else None)
    if column == "jump":
        table = table[table["gap"] < IN_VIEW]
        gap = np.linspace(table["gap"].min(), IN_VIEW, 200)
        axes.plot(gap, curve(gap, fit_curve(table["gap"].to_numpy(), table["jump"].to_numpy())),
                  style, color=colour, linewidth=1.2 if style == "--" else 2, label=label)

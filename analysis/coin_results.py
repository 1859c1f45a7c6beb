"""Conditions, result folder, comparisons and report of the study ``analysis/coin_or_wall.py``.

Layout of the folder::

    episodes/<condition>.csv   a row per level, see ``play``
    sights/<condition>.csv     value and policy at the sights of a condition without a coin
    rates.csv                  shares of levels by condition, with Wilson intervals
    effects.csv                paired effects of the comparisons, see ``effects``
    report.md, coin_or_wall.png
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from common.palette import BLUE, DARK_GREY, ORANGE, VERMILION
from common.results import Entry, File, Schema, Table, Text
from common.tables import markdown_table
from envs.coin import ANYWHERE, NONE, START
from stats.effects import MIN_STARTS, Condition, Outcome, paired_effects
from stats.forest_plot import forest_plot, name_rows
from stats.report import bold, format_interval, format_p
from stats.significance import LEVEL, holm, share

ORDINARY, BEHIND, NOT_BEHIND = "ordinary", "behind", "not_behind"
AGENT, RANDOM, RIGHTWARD = "agent", "random", "rightward"
SIGHT_END, SIGHT_MIDDLE, SIGHT_BEHIND = "end", "middle", "behind"
WITHOUT, WITH, OPEN, OPEN_WITH = "no coin", "coin", "no wall, no coin", "no wall, coin"

SHARES = {"taken": "takes the coin", "passed": "touches the coin's square before the end",
          "ended": "reaches the end first", "reached": "reaches the end", "died": "dies"}
OUTCOMES = {outcome.name: outcome for outcome in (
    *(Outcome(name, label, probability=True) for name, label in SHARES.items()),
    Outcome("right", "P(right)", probability=True))}
SIGHT_OUTCOMES = {outcome.name: outcome for outcome in (
    Outcome("value", "value"), Outcome("right", "P(right)", probability=True),
    Outcome("left", "P(left)", probability=True))}
EPISODE = {"number": int, "level_seed": int, "length": int, "taken": int, "passed": int,
           "ended": int, "reached": int, "died": int, "right": float}
SIGHT = {"number": int, "sight": str, "variant": str, "value": float, "right": float,
         "left": float}
COIN_OR_WALL = Schema(
    "conditions", "analysis/coin_or_wall.py", items={
        "episodes": Entry("episodes/{}.csv", Table(EPISODE, exact=True)),
        "sights": Entry("sights/{}.csv", Table(SIGHT, exact=True))},
    results={"rates": Entry("rates.csv", Table({"condition": str, "share": float})),
             "effects": Entry("effects.csv", Table({"condition": str, "effect": float})),
             "report": Entry("report.md", Text()),
             "figure": Entry("coin_or_wall.png", File())})


@dataclasses.dataclass(frozen=True)
class Setting:
    """A player, and the places of the coin in the levels that it plays.

    Attributes:
        player: AGENT; RANDOM, which draws all actions with equal probability; or RIGHTWARD, which
            runs to the right and jumps with probability 1/2.
        places: places of the coin, applied in this order.
        marked: place whose coin square is watched, with or without a coin on it; the square at the
            end if empty.
    """

    player: str
    places: tuple[str, ...]
    marked: tuple[str, ...]


SETTINGS = {name if player == AGENT else f"{player}_{name}": Setting(player, places, marked)
            for player in (AGENT, RANDOM, RIGHTWARD)
            for name, places, marked in (
                (ORDINARY, (), ()), (ANYWHERE, (ANYWHERE,), (ANYWHERE,)),
                (NONE, (NONE,), (ANYWHERE,)), (BEHIND, (START,), (START,)),
                (NOT_BEHIND, (START, NONE), (START,)))
            if player == AGENT or name in (ANYWHERE, BEHIND)}
LABELS = {ORDINARY: "coin at the end (ordinary)", ANYWHERE: "coin anywhere", NONE: "no coin",
          BEHIND: "coin behind", NOT_BEHIND: "same start, no coin"}
# Comparisons of conditions (name, label, outcomes, before, after), and of the variants of sights.
TOUCHES = ("passed", "ended", "right")
CONTRASTS = (
    ("anywhere_ordinary", "coin anywhere - ordinary", ("taken", "right"), ORDINARY, ANYWHERE),
    ("none_ordinary", "no coin - ordinary", ("reached", "right"), ORDINARY, NONE),
    ("behind_ordinary", "coin behind - ordinary", ("taken", "right"), ORDINARY, BEHIND),
    ("anywhere_none", "coin anywhere - no coin", TOUCHES, NONE, ANYWHERE),
    ("behind_not", "coin behind - same start, no coin", TOUCHES, NOT_BEHIND, BEHIND))
SIGHT_CONTRASTS = (
    ("coin_middle", "coin comes into view, end does not", SIGHT_MIDDLE, WITHOUT, WITH),
    ("coin_end", "coin at the end, in front of the wall", SIGHT_END, WITHOUT, WITH),
    ("coin_open", "coin at the end, wall replaced by ground", SIGHT_END, OPEN, OPEN_WITH),
    ("wall", "wall at the end instead of ground, no coin", SIGHT_END, OPEN, WITHOUT),
    ("coin_behind", "coin behind the player, first frame", SIGHT_BEHIND, WITHOUT, WITH))


def effects(episodes: dict[str, pd.DataFrame], sights: dict[str, pd.DataFrame], seed: int
            ) -> pd.DataFrame:
    """Compare conditions on the same levels, and variants of the same frames.

    There are no random controls here, so an effect is claimed if its interval over levels excludes
    0 and p, corrected by Holm's method over all rows, is at most LEVEL.

    Args:
        episodes, sights: tables of the items, by condition.
        seed: seed of the bootstrap and of the sign flips.

    Returns:
        Rows of ``stats.effects.paired_effects``, and ``num_levels``, ``p_holm`` and ``claimed``.
    """
    tables = []
    for name, label, outcomes, before, after in CONTRASTS:
        values = [episodes[condition][list(outcomes)].to_numpy(float)
                  for condition in (before, after)]
        tables.append(_compare(Condition(name, label, name), [OUTCOMES[key] for key in outcomes],
                               values, seed))
    seen = dict(list(pd.concat(sights.values()).groupby(["sight", "variant"])))
    for name, label, sight, first, second in SIGHT_CONTRASTS:
        values = [seen[sight, variant][list(SIGHT_OUTCOMES)].to_numpy(float)
                  for variant in (first, second) if (sight, variant) in seen]
        if values and len(values[0]) >= MIN_STARTS:
            tables.append(_compare(Condition(name, label, name), [*SIGHT_OUTCOMES.values()],
                                   values, seed))
    table = pd.concat(tables, ignore_index=True)
    table["p_holm"] = holm(table["p"])
    table["claimed"] = ((table["low_95"] > 0) | (table["high_95"] < 0)) & (
        table["p_holm"] <= LEVEL)
    return table


def _compare(condition: Condition, outcomes: list[Outcome], values: list[np.ndarray], seed: int
             ) -> pd.DataFrame:
    before, after = values
    table = paired_effects([condition], outcomes, before, after[None], seed)
    return table.assign(num_levels=len(before))


def rates(episodes: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """Return the shares of levels with each of SHARES, with 95 % Wilson intervals, and the mean
    P(right), by condition."""
    rows = []
    for name, table in episodes.items():
        for column, label in SHARES.items():
            rows.append((name, label, *share(int(table[column].sum()), len(table)), len(table)))
        rows.append((name, OUTCOMES["right"].label, table["right"].mean(), np.nan, np.nan,
                     len(table)))
    return pd.DataFrame(rows, columns=["condition", "outcome", "share", "low_95", "high_95",
                                       "num_levels"])


def headline(table: pd.DataFrame, shares: pd.DataFrame) -> str:
    """Return the answer in one sentence, with its baseline."""
    rows = table.set_index(["condition", "outcome"])
    at = shares.set_index(["condition", "outcome"])
    coin = rows.loc["anywhere_none", "passed"]
    return (
        f"With the coin elsewhere on the way, the agent takes it before the end in "
        f"{100 * coin.altered:.0f} % of the levels, and touches the same squares in "
        f"{100 * coin.unaltered:.0f} % when they are empty (difference {_percent(coin)} points); "
        f"it reaches the end without the coin in {_share(at.loc[ANYWHERE, SHARES['ended']])} %, "
        f"and takes a coin behind its start in {_share(at.loc[BEHIND, SHARES['taken']])} %.")


def _share(row: pd.Series) -> str:
    return format_interval(100 * row["share"], 100 * row["low_95"], 100 * row["high_95"], ".0f")


def _percent(row: pd.Series) -> str:
    effect, low, high = (100 * row[name] for name in ("effect", "low_95", "high_95"))
    return format_interval(effect, low, high, "+.0f")


def report_of(table: pd.DataFrame, shares: pd.DataFrame, description: str) -> str:
    """Return the report in Markdown."""
    at = shares.set_index(["condition", "outcome"])
    labels = {key: outcome.label for key, outcome in {**OUTCOMES, **SIGHT_OUTCOMES}.items()}
    columns = [*SHARES.values(), OUTCOMES["right"].label]
    return "\n".join([
        "# Coin or wall?", "", f"{description}.", "", headline(table, shares), "",
        "Levels by condition, in % with 95 % Wilson intervals. A condition without a coin watches "
        "the square on which its twin has the coin. P(right) is averaged over the steps until the "
        "end is reached.", "",
        *markdown_table(("condition", *columns), [
            (label_of(name), *(_share(at.loc[name, column]) for column in SHARES.values()),
             f"{at.loc[name, columns[-1]]['share']:.2f}") for name in SETTINGS]),
        f"Paired differences, with 95 % bootstrap intervals over levels. **Bold**: claimed, i.e. "
        f"the interval excludes 0 and p (sign-flip test, Holm over {len(table)} rows) is at most "
        f"{LEVEL}.", "",
        *markdown_table(("comparison", "outcome", "levels", "before", "after", "difference",
                         "p (Holm)"), [
            (row.label, labels[row.outcome], str(row.num_levels), f"{row.unaltered:.2f}",
             f"{row.altered:.2f}",
             bold(format_interval(row.effect, row.low_95, row.high_95, "+.2f"), row.claimed),
             format_p(row.p_holm)) for row in table.itertuples()])])


def label_of(name: str) -> str:
    """Return the label of a condition, such as "coin anywhere, random actions"."""
    setting = SETTINGS[name]
    player = {AGENT: "", RANDOM: ", random actions", RIGHTWARD: ", runs right and jumps"}
    return LABELS[name.removeprefix(f"{setting.player}_")] + player[setting.player]


def plot(table: pd.DataFrame, episodes: dict[str, pd.DataFrame], title: str, max_steps: int
         ) -> Figure:
    """Draw how episodes end in each condition, and the effects of coin and wall on the value."""
    figure = Figure(figsize=(13, 5.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.2, 1))
    _draw_ends(left, episodes, max_steps)
    values = table[(table["outcome"] == "value")]
    forest_plot(right, values, [f"{row.label}\n({row.num_levels} levels)"
                                for row in values.itertuples()])
    right.axvline(0, color=DARK_GREY, linewidth=0.8)
    right.set_title("change of the value of the same frame", fontsize=10)
    right.set_xlabel("value (return), 95 % interval; diamond: claimed", fontsize=9)
    rows = table.set_index(["condition", "outcome"])
    coin, behind = rows.loc["anywhere_none", "passed"], rows.loc["behind_ordinary", "taken"]
    figure.suptitle(
        f"{title} takes a coin on its way in {100 * coin.altered:.0f} % of the levels, and touches "
        f"the same squares in {100 * coin.unaltered:.0f} % without a coin,\nand takes a coin just "
        f"behind its start in {100 * behind.altered:.0f} %", fontsize=12)
    return figure


def _draw_ends(axes: Axes, episodes: dict[str, pd.DataFrame], max_steps: int) -> None:
    """Draw a stacked bar per condition, and the share that touches the marked square."""
    for place, table in enumerate(episodes.values()):
        taken, reached, died = (table[name].to_numpy(bool)
                                for name in ("taken", "reached", "died"))
        begin = 0.0
        for label, colour, mask in (
                ("takes the coin", ORANGE, taken),
                ("reaches the end without a coin", BLUE, ~taken & reached),
                ("dies before the end", VERMILION, ~taken & ~reached & died),
                (f"none of these within {max_steps} steps", "lightgrey",
                 ~taken & ~reached & ~died)):
            axes.barh(place, mask.mean(), left=begin, color=colour, height=0.7,
                      label=label if place == 0 else None)
            begin += mask.mean()
        axes.plot(table["passed"].mean(), place, "|", color="black", markersize=20,
                  markeredgewidth=2, label="touches the coin's square before the end, coin or not"
                  if place == 0 else None)
    name_rows(axes, [label_of(name) for name in episodes])
    axes.set(xlim=(0, 1), xlabel="share of levels")
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.4, -0.12), ncols=2)

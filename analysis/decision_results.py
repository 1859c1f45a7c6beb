"""Result folder, classes of decisions, tables and report of the study ``analysis/decisions.py``.

Layout of the folder::

    cases/<group>.json                 the episodes
    states/<group>_<number>.csv        a row per measured state and distinct action
    films/failures_<number>.mp4        the last steps of each failure, with a bar per action
    decisions.csv                      a row per episode, see ``decide``
    shares.csv                         shares of classes by hazard, with Wilson intervals
    summary.csv                        means over episodes, with bootstrap intervals
    curves.csv                         means by number of steps before the end
    report.md, decisions.png
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from agents.episodes import SOLVED, Episode
from agents.failures import MULTIPLE, OTHER
from common.palette import BLUE, DARK_GREY, GREEN, ORANGE, PURPLE, SKY_BLUE, VERMILION
from common.results import Entry, File, Json, Schema, Table, Text
from common.tables import markdown_table
from stats.bootstrap import ClusterBootstrap
from stats.forest_plot import name_rows
from stats.report import format_interval, format_number
from stats.significance import LEVEL, mcnemar_p, share

GROUPS = FAILURES, CONTROL, RANDOM_FAILURES = "failures", "solved", "random"
GROUP_LABELS = {FAILURES: "failures", CONTROL: "solved episodes (control)",
                RANDOM_FAILURES: "failures of random actions (control)"}
UNAVOIDABLE, BLIND, UNLUCKY, WRONG, DIVIDED, NO_DECISION = CLASSES = (
    "unavoidable", "blind", "unlucky", "wrong", "divided", "none")
MEANINGS = {
    UNAVOIDABLE: "no measured state is savable",
    BLIND: "the hazard is not in view at the point of no return",
    UNLUCKY: "the policy gives the fatal action a probability below 0.25",
    WRONG: "the fatal action is the policy's most likely one",
    DIVIDED: "the rest",
    NO_DECISION: "the last state of a window of a solved episode is savable"}
STRIDE = 4  # distance of the states that are measured first
SAVABLE = 0.5  # rate of saved continuations from which a state counts as savable
UNLIKELY = 0.25  # probability below which a fatal action is bad luck
OUTCOMES = "-+"  # lost, saved
NOT_MEASURED = "none"
UNKNOWN = -1
HAZARDS = {"saw": ("saw",), "enemy": ("enemy_left", "enemy_right"), "lava": ("lava",),
           "several or other": (MULTIPLE, OTHER)}
ALL = "all"
STATE = {"step": int, "action": int, "actions": str, "probability": float, "value": float,
         "hazard_in_view": int, "taken": int, "best": int, "tried": str, "fresh": str,
         "removed": str}
DECISION = {"group": str, "number": int, "level_seed": int, "cause": str, "class": str,
            "before_end": float, "best_rate": float, "taken_rate": float}
DECISIONS = Schema(
    "decisions", "analysis/decisions.py", items={
        "cases": Entry("cases/{}.json", Json(list)),
        "states": Entry("states/{}.csv", Table(STATE, exact=True)),
        "films": Entry("films/{}.mp4", File())},
    results={"decisions": Entry("decisions.csv", Table(DECISION)),
             "shares": Entry("shares.csv", Table({"group": str, "class": str, "share": float})),
             "summary": Entry("summary.csv", Table({"group": str, "mean": float})),
             "curves": Entry("curves.csv", Table({"group": str, "mean": float})),
             "report": Entry("report.md", Text()),
             "figure": Entry("decisions.png", File())})


@dataclasses.dataclass(frozen=True)
class Case:
    """A finished episode.

    Attributes:
        number, level_seed: number of the episode, and seed of its level.
        cause: kind of hazard, see ``agents.failures.causes_of``, or ``SOLVED``.
        last: last step of the window: that of the fatal blow in a failure.
        actions: all actions.
    """

    number: int
    level_seed: int
    cause: str
    last: int
    actions: list[int]

    @classmethod
    def of(cls, episode: Episode) -> Case:
        """Return a finished episode with a window at its end."""
        return cls(episode.number, episode.level_seed, episode.cause or SOLVED, episode.length - 1,
                   episode.actions[:-1].tolist())


def rate(outcomes: str) -> float:
    """Return the share of saved continuations; NaN if not measured."""
    return np.nan if outcomes == NOT_MEASURED else outcomes.count(OUTCOMES[1]) / len(outcomes)


def differences(row: pd.Series, other: pd.Series) -> np.ndarray:
    """Return the differences of the fresh outcomes of two actions, -1, 0 or 1 (N,)."""
    first, second = (np.array(list(outcomes)) == OUTCOMES[1]
                     for outcomes in (row["fresh"], other["fresh"]))
    return first.astype(int) - second


def state_rates(table: pd.DataFrame) -> pd.DataFrame:
    """Return a row per measured state of an episode.

    Args:
        table: a row per state and distinct action.

    Returns:
        Table by ``step`` with the columns ``best`` and ``taken``: rates of saved continuations of
        the best action and of the action taken, on fresh continuations; ``regret``, their
        difference; ``v``: rate if the agent draws the action (expectation over its policy of the
        rates of all actions on the first continuations), NaN if not all were tried; and
        ``v_error``, an upper bound of the standard error of ``v`` (as if the outcomes of all
        actions were perfectly correlated).
    """
    rows = []
    for step, state in table.groupby("step"):
        best, taken = (rate(state.loc[state[name] == 1, "fresh"].iloc[0])
                       for name in ("best", "taken"))
        tried, number = state["tried"].map(rate), state["tried"].map(len)
        smooth = (number * tried + 1) / (number + 2)
        errors = np.sqrt(smooth * (1 - smooth) / number)
        rows.append((step, best, taken, best - taken,
                     *((state["probability"] * values).sum(skipna=False)
                       for values in (tried, errors))))
    return pd.DataFrame(rows, columns=["step", "best", "taken", "regret", "v", "v_error"]
                        ).set_index("step")


def point_of_no_return(table: pd.DataFrame) -> int:
    """Return the step of the last savable state, or -1 if no state is savable."""
    best = state_rates(table)["best"]
    savable = best.index[best >= SAVABLE]
    return int(savable.max()) if len(savable) else -1


def decide(table: pd.DataFrame, case: Case) -> dict[str, object]:
    """Return the row of an episode in the table ``decisions``.

    Returns:
        ``number``, ``level_seed`` and ``cause`` of the episode; ``class``, one of CLASSES; and, for
        its point of no return (NaN without one), ``before_end``: steps from there to the last step
        of the window; ``action``, the fatal one; ``best_action``; ``best_rate`` and ``taken_rate``
        with their Wilson intervals; ``v`` and ``v_error``; ``p``: exact McNemar test of both
        actions on the same random draws; ``probability`` of the fatal action and its equivalents;
        ``likeliest``: whether the fatal action is the policy's most likely one; ``value`` of the
        agent; ``hazard_in_view``; and ``removed_rate``: rate after the fatal action if all hazards
        of the kind that is the cause are removed. ``likeliest_share``: share of measured states in
        which the action taken is the most likely one. ``reversals``: number of earlier states that
        were not savable, and ``sure_reversals``: of those whose interval lies below SAVABLE.
    """
    rates = state_rates(table)
    step = point_of_no_return(table)
    row: dict[str, object] = {"number": case.number, "level_seed": case.level_seed,
                              "cause": case.cause}
    earlier = table[(table["step"] < step) & (table["best"] == 1)]
    highs = np.array([share(fresh.count(OUTCOMES[1]), len(fresh))[2] for fresh in earlier["fresh"]])
    row |= {"reversals": int((earlier["fresh"].map(rate) < SAVABLE).sum()),
            "sure_reversals": int((highs < SAVABLE).sum()), "num_states": len(rates),
            "num_lost": int((rates["best"] < SAVABLE).sum()),
            "mean_regret": rates["regret"].mean(),
            "likeliest_share": _is_likeliest(table)[table["taken"] == 1].mean(),
            "class": UNAVOIDABLE}
    if step < 0:
        return row
    state = table[table["step"] == step]
    best, taken = (state[state[name] == 1].iloc[0] for name in ("best", "taken"))
    ends: dict[str, float] = {}
    for name, chosen in (("best", best), ("taken", taken)):
        fresh = chosen["fresh"]
        ends |= dict(zip((f"{name}_rate", f"{name}_low", f"{name}_high"),
                         share(fresh.count(OUTCOMES[1]), len(fresh))))
    row |= {"before_end": case.last - step, "action": taken["action"],
            "best_action": best["action"], **ends, "regret": rates.loc[step, "regret"],
            "v": rates.loc[step, "v"], "v_error": rates.loc[step, "v_error"],
            "p": mcnemar_p(differences(best, taken)[:, None])[0],
            "probability": taken["probability"], "value": taken["value"],
            "likeliest": int(_is_likeliest(state)[taken.name]),
            "hazard_in_view": taken["hazard_in_view"], "removed_rate": rate(taken["removed"])}
    if case.cause == SOLVED and step == case.last:
        row["class"] = NO_DECISION
    elif taken["hazard_in_view"] == 0:
        row["class"] = BLIND
    elif taken["probability"] < UNLIKELY:
        row["class"] = UNLUCKY
    else:
        row["class"] = WRONG if row["likeliest"] else DIVIDED
    return row


def _is_likeliest(table: pd.DataFrame) -> pd.Series:
    """Return whether each action is the policy's most likely one in its state."""
    return table["probability"] == table.groupby("step")["probability"].transform("max")


def halved(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of states with the first half of the fresh continuations only."""
    return table.assign(fresh=table["fresh"].map(
        lambda fresh: fresh if fresh == NOT_MEASURED else fresh[:(len(fresh) + 1) // 2]))


def shares(table: pd.DataFrame) -> pd.DataFrame:
    """Return the share of each class by group and hazard, with 95 % Wilson intervals over levels.

    Args:
        table: table of decisions.
    """
    rows = []
    for group, episodes in table.groupby("group", sort=False):
        for hazard, causes in {ALL: None, **HAZARDS}.items():
            part = episodes if causes is None else episodes[episodes["cause"].isin(causes)]
            for name in CLASSES:
                if len(part):
                    hits = int((part["class"] == name).sum())
                    rows.append((group, hazard, name, hits, len(part), *share(hits, len(part))))
    return pd.DataFrame(rows, columns=["group", "hazard", "class", "count", "num_levels", "share",
                                       "low_95", "high_95"])


def curves(states: Mapping[tuple[str, int], pd.DataFrame], cases: Mapping[str, Sequence[Case]],
           seed: int) -> pd.DataFrame:
    """Return means over episodes by number of steps before the end of the window, at the steps that
    are measured whatever the outcome, with 95 % bootstrap intervals over levels.

    Args:
        states: rows of states by group and number of the episode.
    """
    rows = []
    for group, found in cases.items():
        if len(found) < 2:
            continue
        rates = {case.number: state_rates(states[group, case.number]) for case in found}
        wide = {name: pd.DataFrame({case.number: rates[case.number][name].rename(
            lambda step, last=case.last: last - step) for case in found}) for name in (
            "best", "taken", "v", "regret")}
        bootstrap = ClusterBootstrap(np.arange(len(found)), seed)
        for name, values in wide.items():
            values = values[values.index % STRIDE == 0].sort_index()
            known = values.notna().to_numpy()
            low, high = bootstrap.interval(values.fillna(0).to_numpy(), known)
            rows += [(group, name, before, mean, *ends, number) for before, mean, *ends, number in
                     zip(values.index, values.mean(axis=1), low, high, known.sum(axis=1))]
    return pd.DataFrame(rows, columns=["group", "quantity", "before_end", "mean", "low_95",
                                       "high_95", "num_levels"])


def headline(table: pd.DataFrame) -> str:
    """Return the answer in one sentence, with its baseline."""
    failures, control = (table[table["group"] == group] for group in (FAILURES, CONTROL))
    found = failures[failures["before_end"].notna()]
    if found.empty:
        return f"None of the {len(failures)} failures has a point of no return."
    parts = ", ".join(f"{_count(failures['class'] == name)} {name}" for name in CLASSES
                      if (failures["class"] == name).any())
    text = (
        f"Of {len(failures)} failures, {parts}. The point of no return lies "
        f"{found['before_end'].median():.0f} steps before the last step (median; quartiles "
        f"{found['before_end'].quantile(0.25):.0f} and {found['before_end'].quantile(0.75):.0f}); "
        f"there, {100 * found['best_rate'].mean():.0f} % of the continuations are saved after the "
        f"best action and {100 * found['taken_rate'].mean():.0f} % after the action taken")
    lost = control["class"] != NO_DECISION
    return text + ("." if control.empty else f"; {_count(lost)} of the windows of solved episodes "
                                             "have a state from which there is no return.")


def _count(hits: pd.Series) -> str:
    value, low, high = (100 * end for end in share(int(hits.sum()), len(hits)))
    return f"{format_interval(value, low, high, '.0f')} %"


def _share(row: pd.Series, name: str, factor: float, form: str) -> str:
    value, low, high = (factor * float(row[column]) for column in (name, "low_95", "high_95"))
    return format_interval(value, low, high, form)


def summary(table: pd.DataFrame, seed: int = 0) -> pd.DataFrame:
    """Return means over the episodes of each group, with 95 % bootstrap intervals over levels."""
    rows = []
    found = table["before_end"].notna()
    clear = (table["p"] <= LEVEL) & (table["regret"] > 0)
    columns = {
        "share of measured states that are not savable": table["num_lost"] / table["num_states"],
        "regret of the actions taken, all measured states": table["mean_regret"],
        "rate of the best action at the point of no return": table["best_rate"],
        "rate of the action taken there": table["taken_rate"],
        "regret there": table["regret"],
        f"share with p <= {LEVEL} (McNemar) there": clear.where(found).astype(float),
        "rate if the agent draws the action there, V(s)": table["v"],
        "the action taken is the most likely one there": table["likeliest"],
        "the same, all measured states": table["likeliest_share"],
        "rate after the action taken, hazard removed there": table["removed_rate"],
        "class is the same with half of the fresh continuations":
            (table["class"] == table["class_of_half"]).astype(float),
        "share with an earlier state that is surely not savable":
            (table["sure_reversals"] > 0).where(found).astype(float)}
    for group, episodes in table.groupby("group", sort=False):
        for name, values in columns.items():
            known = values.loc[episodes.index].dropna().to_numpy()
            if len(known) > 1:
                low, high = ClusterBootstrap(np.arange(len(known)), seed).interval(known[None])
                rows.append((group, name, known.mean(), low[0], high[0], len(known)))
    return pd.DataFrame(rows, columns=["group", "quantity", "mean", "low_95", "high_95",
                                       "num_levels"])


def report_of(table: pd.DataFrame, classes: pd.DataFrame, means: pd.DataFrame, description: str,
              num_tried: int, num_fresh: int) -> str:
    """Return the report in Markdown."""
    groups = [group for group in GROUPS if (table["group"] == group).any()]
    lines = ["# Which decision caused the failure?", "", f"{description}.", "", headline(table), "",
             f"The best action is chosen on {num_tried} continuations; its rate, and that of the "
             f"action taken, are measured on {num_fresh} fresh ones. Classes, of which the first "
             "that applies counts:", "",
             *(f"- *{name}*: {meaning}." for name, meaning in MEANINGS.items()), "",
             "Shares in % with 95 % Wilson intervals over levels.", ""]
    cells = classes.set_index(["group", "hazard", "class"])
    hazards = [(group, hazard, int(part["num_levels"].iloc[0]))
               for (group, hazard), part in classes.groupby(["group", "hazard"], sort=False)]
    lines += markdown_table(("episodes", "hazard", "levels", *CLASSES), [
        (GROUP_LABELS[group], hazard, str(number), *(_share(
            cells.loc[(group, hazard, name)], "share", 100, ".0f")
            for name in CLASSES)) for group, hazard, number in hazards])
    lines += ["Means over levels with 95 % bootstrap intervals.", ""]
    rows = means.set_index(["quantity", "group"])
    lines += markdown_table(("", *(GROUP_LABELS[group] for group in groups)), [
        (name, *(_share(rows.loc[(name, group)], "mean", 1, ".2f")
                 if (name, group) in rows.index else "none" for group in groups))
        for name in means["quantity"].unique()])
    return "\n".join(lines)


MIN_DRAWN = 5  # levels from which the figure shows a kind of hazard
COLOURS = dict(zip(CLASSES, (DARK_GREY, PURPLE, SKY_BLUE, VERMILION, ORANGE, "lightgrey")))


def plot(table: pd.DataFrame, classes: pd.DataFrame, over_time: pd.DataFrame, title: str) -> Figure:
    """Draw the classes by hazard, the rates before the end, and the decisions that were fatal."""
    figure = Figure(figsize=(14, 5.1), layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=(1.25, 1, 0.9))
    _draw_classes(left, classes)
    for group, quantity, colour, style, label in (
            (FAILURES, "best", BLUE, "-", "failures: best action"),
            (FAILURES, "taken", VERMILION, "-", "failures: action taken"),
            (CONTROL, "taken", GREEN, "--", "solved: action taken"),
            (RANDOM_FAILURES, "best", DARK_GREY, ":", "random actions: best action")):
        rows = over_time[(over_time["group"] == group) & (over_time["quantity"] == quantity)]
        if len(rows):
            middle.plot(-rows["before_end"], rows["mean"], style, color=colour, label=label)
            middle.fill_between(-rows["before_end"], rows["low_95"], rows["high_95"],
                                color=colour, alpha=0.15, linewidth=0)
    middle.axhline(SAVABLE, color=DARK_GREY, linewidth=0.6)
    middle.set(ylim=(-0.02, 1.02), xlabel="step, counted from the last one",
               ylabel="share of continuations saved")
    middle.set_title("rate of saved continuations", fontsize=10)
    middle.legend(fontsize=8, loc="lower left")
    _draw_decisions(right, table[table["group"] == FAILURES])
    figure.suptitle(f"{title}: {_title(table)}", fontsize=12)
    return figure


def _title(table: pd.DataFrame) -> str:
    failures = table[table["group"] == FAILURES]
    before, best, taken = (failures[name] for name in ("before_end", "best_rate", "taken_rate"))
    return (f"in {len(failures)} failures, the last savable state lies "
            f"{format_number(before.median(), '.0f')} steps before the end (median);\nthere, the "
            f"best action saves {format_number(100 * best.mean(), '.0f')} % of the continuations, "
            f"and the action taken {format_number(100 * taken.mean(), '.0f')} %")


def _draw_classes(axes: Axes, classes: pd.DataFrame) -> None:
    """Draw the shares of the classes, with intervals, one group of bars per hazard."""
    rows = [(group, hazard) for (group, hazard), part in classes.groupby(
        ["group", "hazard"], sort=False) if hazard == ALL or (
            group == FAILURES and part["num_levels"].iloc[0] >= MIN_DRAWN)]
    used = [name for name in CLASSES if classes.loc[classes["class"] == name, "count"].any()]
    cells = classes.set_index(["group", "hazard", "class"])
    height = 0.8 / len(used)
    labels = []
    for place, (group, hazard) in enumerate(rows):
        for number, name in enumerate(used):
            cell = cells.loc[(group, hazard, name)]
            y = place - 0.4 + (number + 0.5) * height
            axes.barh(y, cell["share"], height, color=COLOURS[name],
                      label=name.replace(NO_DECISION, "no decision") if place == 0 else None)
            axes.plot([cell["low_95"], cell["high_95"]], [y, y], linewidth=0.8,
                      color="black" if cell["count"] else "silver")
        what = GROUP_LABELS[group].replace(" (control)", "") + (
            "" if group != FAILURES or hazard == ALL else f": {hazard}")
        labels.append(f"{what}\n({int(cell['num_levels'])} levels)")
    name_rows(axes, labels)
    axes.set(xlim=(0, 1), xlabel="share of levels, with 95 % intervals")
    axes.set_title("class of the decision", fontsize=10)
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.4, -0.12), ncols=len(used))


def _draw_decisions(axes: Axes, failures: pd.DataFrame) -> None:
    """Draw each point of no return: steps before the end against the regret."""
    rng = np.random.default_rng(0)
    for name in CLASSES:
        part = failures[(failures["class"] == name) & failures["before_end"].notna()]
        if len(part):
            axes.plot(-part["before_end"] + rng.uniform(-0.25, 0.25, len(part)), part["regret"],
                      "o", color=COLOURS[name], markersize=5, alpha=0.8, label=name)
    axes.axhline(0, color=DARK_GREY, linewidth=0.6)
    axes.set(xlabel="step of the point of no return",
             ylabel="rate of best action - rate of action taken")
    axes.set_title("regret of the fatal action, by failure", fontsize=10)
    axes.legend(fontsize=8)

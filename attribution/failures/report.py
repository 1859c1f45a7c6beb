"""Report, figures and films of failures by cause.

Letters in shape comments: T steps.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from agents.episodes import last_steps, write_beside
from attribution.failures.conditions import Levels, Run, run_of
from attribution.failures.results import ANY, ORIGINAL, PER, SOLVED
from common.palette import BLUE, VERMILION
from common.tables import markdown_escaped, markdown_table
from common.video import FRAMES_PER_SECOND, mark_action
from stats.effects import Condition
from stats.forest_plot import forest_plot
from stats.report import (
    bold,
    format_interval,
    format_p,
    format_range,
    warn_of_few_controls,
)
from stats.significance import LEVEL

LAST_STEPS = 150  # number of last steps of an episode shown in a film
CHARACTERS_PER_INCH = 12  # characters of a title per inch
NUM_FAILURES, NUM_FRAMES = 4, 8  # failures and frames per failure in the original's figure


def report(rates: pd.DataFrame, effects: pd.DataFrame, blindness: pd.DataFrame,
           films: Sequence[str], last_frames: str, description: str, controls: str) -> str:
    """Return the report as Markdown.

    Args:
        rates, effects, blindness: tables as in ``causes.csv``, ``effects.csv`` and
            ``blindness.csv``.
        films: paths of films, relative to the report.
        last_frames: path of the figure of the original's failures; empty if there are none.
        description: a sentence that describes the agents and levels.
        controls: a sentence that describes the controls; empty if there are none.
    """
    causes = list(dict.fromkeys(rates["cause"]))
    shown, controlled = rates[~rates["control"]], rates[rates["control"]]
    claimed = set(effects.loc[effects["claimed"], ["arm", "outcome"]].itertuples(
        index=False, name=None))
    rows = [(label, *(bold(_percentages(row.rate, row), (name, row.cause) in claimed)
                      for row in part.itertuples())) for label, name, part in _by_arm(shown)]
    for pattern, part in controlled.groupby("pattern", sort=False):
        spread = part.groupby("cause")["rate"].agg(["min", "max"])
        rows.append((f"{part['arm'].nunique()} random edits like {pattern}, lowest to highest",
                     *(" to ".join(map(_percent, spread.loc[cause])) for cause in causes)))
    lines = [
        "# Causes of failure", "", markdown_escaped(description), "",
        "Each failed episode has one cause: the hazard without which its last step, repeated in a "
        "copy of the real game, does not end it; *multiple* if only all hazards together are, "
        "*timeout* at the time limit, *other* if none is.", "",
        "## Failures by cause, % of levels (95 %, Wilson)", "",
        "Bold: claimed as different from the original.", "",
        *markdown_table(("arm", *causes), rows), *_differences(effects, controls)]
    hazards = shown.dropna(subset="steps_in_view")
    if len(hazards):
        lines += [f"## Failures per {PER:,} steps with that hazard in view (95 %, bootstrap)", "",
                  "An agent that dies early meets fewer hazards.", "", *markdown_table(
                      ("arm", *dict.fromkeys(hazards["cause"])),
                      [(label, *map(_per_steps, part.itertuples()))
                       for label, _, part in _by_arm(hazards)])]
    if len(blindness):
        lines += ["## Blindness", "",
                  "(edited - original) / (invisible - original), of the rate of failures by the "
                  "hazard that is invisible: 1 is an agent to which the edit does what taking the "
                  "hazard out of all frames does.", "", *markdown_table(
                      ("agent", "hazard", "blindness (95 %, bootstrap)"),
                      [(markdown_escaped(row.label), row.hazard,
                        "not defined" if np.isnan(row.blindness) else
                        format_interval(row.blindness, row.low_95, row.high_95, ".2f"))
                       for row in blindness.itertuples()])]
    if last_frames:
        lines += ["## The original's failures", "",
                  "The first by each cause, in their last frames. V: value; the mark is the action "
                  "that was taken, the last of which ended the episode.", "",
                  f"![The original's failures]({last_frames})", ""]
    if films:
        lines += ["## Levels that only one arm fails", "",
                  "Both arms, side by side; one that is over stays, darker.", "",
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
        "Points of % (95 % bootstrap over levels); p: McNemar's exact test; p (Holm): corrected "
        "over edits and causes; p (controls): (1 + controls with a difference as large) / (1 + "
        f"controls). **Claimed**: the interval leaves 0 out and both p (Holm) and p (controls) "
        f"are <= {LEVEL}. An invisible hazard is a planted effect, which the same rule must find; "
        "it is no edit, and corrected by itself.", "",
        *([controls, ""] if controls else []),
        *(["Nothing is claimed of arms without controls: agents whose weights differ have none.",
           ""] if np.isnan(fewest) else []),
        *warn_of_few_controls(fewest),
        *markdown_table(
            ("arm", "cause", "original", "altered", "difference", "p", "p (Holm)",
             "controls' differences", "p (controls)"),
            [(markdown_escaped(row.label), row.outcome, _percent(row.unaltered),
              _percent(row.altered), bold(_percentages(row.effect, row, "+.2f"), row.claimed),
              format_p(row.p), format_p(row.p_holm),
              format_range(100 * row.control_low, 100 * row.control_high, "+.2f"),
              format_p(row.p_control)) for row in shown.itertuples()])]
    if len(controlled):
        lines += [f"The same rule claims {int(controlled['claimed'].sum())} of {len(controlled)} "
                  "differences of the controls, each compared with the others.", ""]
    return lines


def _by_arm(rates: pd.DataFrame) -> list[tuple[str, str, pd.DataFrame]]:
    """Group a table of rates by condition; return label, name and rows of each."""
    return [(markdown_escaped(part["label"].iloc[0]), name, part)
            for name, part in rates.groupby("arm", sort=False)]


def _percent(rate: float) -> str:
    return f"{100 * rate:.2f}"


def _percentages(rate: float, row, form: str = ".2f") -> str:
    """Format a rate and the interval of its row as percentages."""
    return format_interval(100 * rate, 100 * row.low_95, 100 * row.high_95, form)


def _per_steps(row) -> str:
    if not row.steps_in_view:
        return "never in view"
    return (format_interval(row.per_1000, row.per_1000_low_95, row.per_1000_high_95, ".2f")
            + f", {int(row.steps_in_view)} steps")


def plot_rates(rates: pd.DataFrame, title: str) -> Figure:
    """Plot failure rates of the conditions and the range of their controls, one panel per cause.

    Args:
        rates: table as in ``causes.csv``.
        title: title of the figure.
    """
    causes = list(dict.fromkeys(rates["cause"]))
    controls = rates[rates["control"]].groupby(["pattern", "cause"])["rate"]
    shown = rates[~rates["control"]].join(
        controls.agg(control_low="min", control_high="max"), on=["pattern", "cause"])
    numbers = ["rate", "low_95", "high_95", "control_low", "control_high"]
    shown = shown.assign(**{name: 100 * shown[name] for name in numbers})
    labels = list(dict.fromkeys(shown["label"]))
    columns = min(len(causes), 4)
    height = -(-len(causes) // columns)
    figure = Figure(figsize=(3.3 * columns + 1.5, height * (1.2 + 0.25 * len(labels)) + 0.6),
                    layout="constrained")
    panels = figure.subplots(height, columns, squeeze=False)
    for axes, cause in zip(panels.flat, causes):
        rows = shown[shown["cause"] == cause]
        forest_plot(axes, rows, labels if axes in panels[:, 0] else [""] * len(labels), [
            {"color": BLUE if name == ORIGINAL else VERMILION} for name in rows["arm"]], "rate")
        axes.axvline(rows["rate"].iloc[0], color=BLUE, linewidth=0.6, linestyle=":")
        axes.set_xlim(left=0)
        axes.set_title("any cause" if cause == ANY else cause, fontsize=10)
        axes.set_xlabel("failed levels (%)", fontsize=9)
    for axes in panels.flat[len(causes):]:
        axes.axis("off")
    grey = "; grey: range of the random edits" if rates["control"].any() else ""
    width = int(CHARACTERS_PER_INCH * figure.get_figwidth())
    figure.suptitle(f"{textwrap.fill(title, width)}\nbars: 95 % (Wilson){grey}", fontsize=11)
    return figure


def discordant_levels(original: pd.DataFrame, other: pd.DataFrame, number: int) -> list[int]:
    """Find levels that are failed under exactly one of two conditions.

    Args:
        original, other: tables of episodes of both conditions, in the order of the levels.
        number: maximum number of levels.

    Returns:
        Numbers of the levels; levels that the original solves come first.
    """
    fails, failed = ((table["cause"] != SOLVED).to_numpy() for table in (other, original))
    levels = original["level"].to_numpy()
    return [*levels[fails & ~failed], *levels[failed & ~fails]][:number]


def write_film(path: Path, conditions: Sequence[Condition[Run]], causes: Sequence[str],
               levels: Levels, level: tuple[int, int]) -> None:
    """Replay a level under each condition, and write a film of all of them side by side.

    Args:
        path: video file to write.
        conditions: the conditions.
        causes: cause of failure under each condition, for the titles.
        levels: settings for playing levels.
        level: number and seed of the level.
    """
    films = {}
    for condition, cause in zip(conditions, causes):
        run = run_of(condition)
        [episode] = levels.play(condition, [level])()
        films[f"{condition.label}: {cause}"] = last_steps(
            levels.config, level[1], episode.actions[:-1].tolist(), LAST_STEPS, run.edit,
            run.edit_every_step)
    write_beside(path, films, FRAMES_PER_SECOND)


def first_failures(episodes: pd.DataFrame, number: int = NUM_FAILURES) -> pd.DataFrame:
    """Return the first failed episode of each cause, then the other failed ones, in the order of
    the levels; at most ``number`` in total."""
    failed = episodes[episodes["cause"] != SOLVED]
    again = failed.duplicated("cause").to_numpy()
    return pd.concat([failed[~again], failed[again]])[:number]


def last_frames_of(condition: Condition[Run], failed: pd.DataFrame, levels: Levels
                   ) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """Replay failed episodes, and return their last frames.

    Args:
        condition: the condition under which the episodes failed.
        failed: rows of the condition's table of episodes.
        levels: settings for playing levels.

    Returns:
        For each episode: a title; its last frames, uint8 (T, 64, 64, 3), each marked with the
        action taken in it; and the value estimates, float32 (T,).
    """
    again = list(zip(failed["level"].tolist(), failed["level_seed"].tolist()))
    episodes = {episode.number: episode
                for episode in levels.play(condition, again, keep_frames=True)()}
    endings = []
    for (number, level), cause in zip(again, failed["cause"]):
        episode = episodes[number]
        end = len(episode.actions) - 1  # the terminal frame, which is black
        begin = max(0, end - NUM_FRAMES)
        endings.append((
            f"{cause}: level {level}, steps {begin} to {end - 1}",
            np.stack([mark_action(episode.frames[step], episode.actions[step])
                      for step in range(begin, end)]), episode.values[begin:end]))
    return endings


def plot_last_frames(endings: Sequence[tuple[str, np.ndarray, np.ndarray]]) -> Figure:
    """Plot the last frames of episodes from ``last_frames_of``, one row per episode."""
    figure = Figure(figsize=(1.3 * NUM_FRAMES, 1.9 * len(endings)), layout="constrained")
    for part, (title, frames, values) in zip(
            figure.subfigures(len(endings), squeeze=False).flat, endings):
        part.suptitle(title, x=0.01, ha="left", fontsize=9)
        panels = part.subplots(1, NUM_FRAMES)
        for panel in panels:
            panel.axis("off")
        for panel, frame, value in zip(panels, frames, values):
            panel.imshow(frame, interpolation="nearest")
            panel.set_title(f"V {value:.1f}", fontsize=8)
    return figure

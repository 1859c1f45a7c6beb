"""Summary, report, figures and films of ``generative.beyond``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from common.game_constants import FRAME_SIZE, WORLD_SIZE
from common.palette import DPI, VERMILION, YELLOW
from common.tables import markdown_table, with_minus
from common.video import enlarge, mark_action, mark_terminal, side_by_side, write_video
from generative.beyond_results import LEAST, QUANTITIES, TITLES, with_measures
from generative.squares import World
from generative.surroundings import AIMS, DEATH, TURN, VALUE, View
from generative.world_contents import draw_worlds
from stats.report import format_interval

UNITS = {DEATH: "probability", TURN: "direction, -2 to 2", VALUE: "return"}
_SHARE = "{:.0%}"
_FRAMES = 9  # simulated frames in a figure
_SCALE = 4
_FEW_VIEWS = 10
_FRAMES_PER_SECOND = 4


def report(table: pd.DataFrame, summary: pd.DataFrame, settings: dict) -> str:
    """Format the report."""
    found = with_measures(table)
    lines = ["# What must lie beyond the edge of the view?", "",
             f"{found['view'].nunique()} recorded views of {found['level_seed'].nunique()} levels, "
             f"{int(found.groupby('view')['near_end'].first().sum())} of them 4 to 16 actions "
             "before a death or a coin. Squares that are not in view are searched; the agent then "
             f"plays {settings['num_steps']} actions in the simulator. A search for an aim "
             f"evaluates {settings['num_evaluations']} worlds, and so does its baseline, the best "
             "of random worlds. Effects are relative to the most plausible world, generated from "
             "noise of zeros. Means with 95 % intervals over levels.", "", answer(found)]
    if settings["why_perhaps_trained_on"]:
        lines += ["", f"The simulator may have been trained on these levels: "
                      f"{settings['why_perhaps_trained_on']}."]
    for aim in AIMS:
        rows = summary[summary["aim"] == aim].set_index("quantity")
        lines += ["", f"## The agent {TITLES[aim]}", "", _headline(aim, rows), "", *markdown_table(
            ("quantity", "mean", "median", "views"), [
                (QUANTITIES[name], format_interval(row["mean"], row["low_95"], row["high_95"]),
                 f"{row['median']:.3g}", str(row["views"])) for name, row in rows.iterrows()])]
    least = ", ".join(f"{size:g} ({TITLES[aim]})" for aim, size in LEAST.items())
    lines += ["", "## Counterfactuals", "", f"Effects of at least {least} count: 5 % of the "
              "output's range (of a coin's reward for the value).", "",
              *markdown_table(
                  ("view", "aim", "effect", "squares", "changes", "distance", "percentile",
                   "persists", "at random"),
                  [(f"[{row.view}](pictures/view_{row.view:05d}.png) "
                    f"([film](films/view_{row.view:05d}.mp4))", TITLES[row.aim],
                    f"{row.effect:+.2f}", str(row.num_squares), row.kinds, f"{row.distance:.1f}",
                    f"{row.percentile:.0f}", _SHARE.format(row.persists),
                    _SHARE.format(row.occurs_at_random))
                   for row in found[found["is_effect"]].itertuples()]), ""]
    return "\n".join(lines)


def answer(found: pd.DataFrame) -> str:
    """Return the answer in a sentence, from the table of ``with_measures``."""
    few = " (too few views to tell)" if found["view"].nunique() < _FEW_VIEWS else ""
    return (f"In {int(found['is_effect'].sum())} of {len(found)} searches, the agent dies, turns "
            "or changes its value enough to count; the search is better than the best of as many "
            f"random worlds in {_SHARE.format(found['beats'].mean())} of them{few}.")


def _headline(aim: str, rows: pd.DataFrame) -> str:
    """Return the headline of an aim."""
    def interval(name: str, form: str = ".2f") -> str:
        if name not in rows.index:
            return "none"
        row = rows.loc[name]
        return format_interval(row["mean"], row["low_95"], row["high_95"], form)

    gain = rows.loc["gain"]
    verdict = ("finds larger effects than random worlds do" if gain["low_95"] > 0 else
               "finds smaller effects than random worlds do" if gain["high_95"] < 0 else
               "does not find larger effects than random worlds do")
    return (f"**The search {verdict}**: {interval('searched')} against {interval('random')} "
            f"({UNITS[aim]}; difference {interval('gain', '+.2f')}); it is better in "
            f"{interval('beats')} of the views. The smallest change has "
            f"{interval('num_squares', '.1f')} squares; if all others are redrawn, the effect "
            f"persists in {interval('persists')} of worlds, and occurs in "
            f"{interval('occurs_at_random')} of random ones.")


@torch.no_grad()
def draw_view(path: Path, view: View, worlds: World, table: pd.DataFrame) -> None:
    """Draw the most plausible world and those of the aims, and the simulated frames in them.

    Args:
        worlds: the most plausible world, and one for each aim.
        table: counterfactuals of the view.
    """
    frames, actions, ended = view.films(worlds)
    chosen = np.linspace(0, len(frames) - 1, min(_FRAMES, len(frames))).round().astype(int)
    different = view.differences(worlds, worlds[:1])
    rows, columns = len(worlds.seeds), len(chosen)
    figure = Figure(figsize=(13, 5.2 + 1.5 * rows), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(3.6, 1.5 * rows))
    panels = above.subplots(1, rows)
    effects = {"": "", **{row.aim: f" ({row.effect:+.2f})" for row in table.itertuples()}}
    assert view.simulator.squares is not None
    images = draw_worlds(view.simulator.squares, worlds, WORLD_SIZE)
    for axes, image, aim, changed in zip(panels, images, ("", *AIMS), different):
        axes.imshow(image)
        axes.set_title(TITLES[aim] + with_minus(effects[aim]), fontsize=11)
        _outline(axes, view, changed)
        axes.axis("off")
    strips = below.subplots(rows, columns, squeeze=False)
    for row, aim in enumerate(("", *AIMS)):
        for axes, step in zip(strips[row], chosen):
            axes.imshow(mark_terminal(mark_action(enlarge(frames[step, row], _SCALE),
                                                  actions[step, row]), ended[step, row]))
            axes.set(xticks=[], yticks=[])
            if row == 0:
                axes.set_title(f"step {step}", fontsize=10)
        strips[row][0].set_ylabel(TITLES[aim], fontsize=10)
    figure.savefig(path, dpi=DPI)


def _outline(axes: Axes, view: View, changed: np.ndarray) -> None:
    """Outline the view and the changed squares, bool (n, n), in an image of ``draw_worlds``."""
    axes.add_patch(Rectangle((FRAME_SIZE - 0.5, FRAME_SIZE - 0.5), FRAME_SIZE, FRAME_SIZE,
                             fill=False, edgecolor=YELLOW, linewidth=1.2))
    size, (right, down) = view.pixels_per_square, view.world.corner[0].tolist()
    for row, column in np.argwhere(changed).tolist():
        axes.add_patch(Rectangle((FRAME_SIZE + right + size * column - 0.5,
                                  FRAME_SIZE + down + size * row - 0.5), size, size, fill=False,
                                 edgecolor=VERMILION, linewidth=1.2))


@torch.no_grad()
def film_view(path: Path, view: View, worlds: World) -> None:
    """Write a film of the simulations in the worlds of ``draw_view``, next to each other."""
    frames, actions, ended = view.films(worlds)
    columns = {}
    for row, aim in enumerate(("", *AIMS)):
        columns[TITLES[aim]] = np.stack([
            mark_terminal(mark_action(enlarge(frame, _SCALE), action), probability)[None]
            for frame, action, probability in zip(frames[:, row], actions[:, row], ended[:, row])])
    write_video(path, side_by_side(columns, 1), _FRAMES_PER_SECOND)

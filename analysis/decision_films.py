"""Films of failures: the last steps, a bar per action, and the point of no return."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from agents.episodes import FILM_SIZE, last_steps
from analysis.decision_results import (
    NOT_MEASURED,
    SAVABLE,
    Case,
    point_of_no_return,
    rate,
    state_rates,
)
from common.palette import BLUE, DARK_GREY, SKY_BLUE, VERMILION
from envs.coin import GAME
from envs.objects import action_labels
from envs.procgen_env import EnvConfig

_DPI, _BORDER, _RED = 100, 8, (200, 30, 30)
_PLAIN = (4, 1, 7, 5, 2, 8, 3, 0, 6)  # moves, in the order in which one names a group of them


def plain_action(actions: str) -> int:
    """Return the plainest of several actions with the same effect, such as 7 (right) of "6 7 8"."""
    moves = [int(action) for action in actions.split()]
    return next((move for move in _PLAIN if move in moves), moves[0])


def action_label(actions: str) -> str:
    """Return a name for actions with the same effect, such as "right" for "6 7 8"."""
    name = action_labels(GAME)[plain_action(actions)]
    return "no action" if name == "null" else name


def film(config: EnvConfig, case: Case, table: pd.DataFrame) -> Iterator[np.ndarray]:
    """Yield the frames of a failure's window, uint8 (FILM_SIZE, 3 FILM_SIZE, 3).

    Next to the game are the rates of the actions in the last measured state, and the rates of all
    measured states. A red border marks the point of no return. Two frames of the end follow the
    last step.

    Args:
        table: rows of the measured states.
    """
    last = point_of_no_return(table)
    measured, first = sorted(table["step"].unique()), int(table["step"].min())
    pictures = last_steps(config, case.level_seed, case.actions[:case.last + 1],
                          case.last + 1 - first)
    panels = {step: _panels(table, step, case) for step in measured}
    for step, picture in enumerate(pictures, first):
        if step == last:
            picture = framed(picture)
        shown = max(other for other in measured if other <= step)
        yield np.hstack([picture, panels[shown]])
    for _ in range(2):
        yield np.hstack([pictures[-1] // 2, panels[measured[-1]]])


def framed(picture: np.ndarray) -> np.ndarray:
    """Return a picture with a red border."""
    result = np.empty_like(picture)
    result[:] = _RED
    result[_BORDER:-_BORDER, _BORDER:-_BORDER] = picture[_BORDER:-_BORDER, _BORDER:-_BORDER]
    return result


def _panels(table: pd.DataFrame, step: int, case: Case) -> np.ndarray:
    """Draw both panels for a state, uint8 (FILM_SIZE, 2 FILM_SIZE, 3)."""
    size = FILM_SIZE / _DPI
    figure = Figure(figsize=(2 * size, size), dpi=_DPI, layout="constrained")
    bars, curve = figure.subplots(1, 2)
    _draw_actions(bars, table[table["step"] == step], case.last - step)
    _draw_rates(curve, table, step, case)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def _draw_actions(axes: Axes, state: pd.DataFrame, before_end: int) -> None:
    """Draw the rate and the policy's probability of each distinct action."""
    rates = state["fresh"].where(state["fresh"] != NOT_MEASURED, state["tried"]).map(rate)
    colours = [BLUE if best else VERMILION if taken else SKY_BLUE
               for best, taken in state[["best", "taken"]].values]
    places = np.arange(len(state))
    axes.barh(places, rates, color=colours, height=0.7)
    axes.plot(state["probability"], places, "|", color="black", markersize=9, markeredgewidth=1.5)
    labels = [action_label(actions) + ("\n(taken)" if taken else "")
              for actions, taken in zip(state["actions"], state["taken"])]
    axes.set_yticks(places, labels, fontsize=6)
    axes.set(xlim=(0, 1.02), ylim=(len(state) - 0.5, -0.5))
    axes.set_title(f"{before_end} steps before the end", fontsize=7)
    axes.set_xlabel("share saved (line: probability)", fontsize=6)
    axes.tick_params(axis="x", labelsize=6)


def _draw_rates(axes: Axes, table: pd.DataFrame, step: int, case: Case) -> None:
    """Draw the rates of all measured states, and mark the state and the point of no return."""
    rates = state_rates(table)
    before = rates.index - case.last
    axes.plot(before, rates["best"], "o-", color=BLUE, markersize=3, linewidth=1, label="best")
    axes.plot(before, rates["taken"], "o-", color=VERMILION, markersize=3, linewidth=1,
              label="taken")
    axes.axhline(SAVABLE, color=DARK_GREY, linewidth=0.5)
    axes.axvline(step - case.last, color="black", linewidth=1)
    last = point_of_no_return(table)
    if last >= 0:
        axes.axvline(last - case.last, color=DARK_GREY, linewidth=4, alpha=0.3)
    axes.set(ylim=(-0.02, 1.02))
    axes.set_title("no return after " + (f"step {last - case.last}" if last >= 0 else "(none)"),
                   fontsize=7)
    axes.set_xlabel("step, from the last one", fontsize=6)
    axes.tick_params(labelsize=6)
    axes.legend(fontsize=6, loc="lower left")

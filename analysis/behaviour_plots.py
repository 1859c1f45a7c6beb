"""Figures of single behaviours, and of all of them beside each other.

Letters in shape comments: M samples, T steps of each, B behaviours.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase

from analysis.state_plots import COLOUR_MAP, NO_CATEGORY_COLOUR, ClusterPlots
from common.game_constants import ACTION_LABELS
from common.palette import SKY_BLUE, VERMILION
from common.video import enlarge, mark_action

FRAME_FACTOR = 2  # frames are enlarged, for the arrow of the action to be readable


@dataclasses.dataclass(frozen=True)
class Members:
    """Values and actions of a set of samples.

    Attributes:
        values: the agent's (M, T).
        actions: that entered the steps, -1 where not known (M, T).
    """

    values: np.ndarray
    actions: np.ndarray

    def of(self, chosen: np.ndarray) -> Members:
        """Some of them, by bool (M,)."""
        return Members(self.values[chosen], self.actions[chosen])

    def action_shares(self) -> np.ndarray:
        """Share of each action among the known ones (A,)."""
        known = self.actions[self.actions >= 0]
        return np.bincount(known, minlength=len(ACTION_LABELS)) / max(len(known), 1)


@dataclasses.dataclass(frozen=True)
class Strip:
    """Frames of a sample from its first step to its last.

    Attributes:
        sample: its number.
        frames: uint8 (T, H, W, C).
        actions: that entered the steps (T,).
        voting: bool (T,), whether the step is in the sample's behaviour.
    """

    sample: int
    frames: np.ndarray
    actions: np.ndarray
    voting: np.ndarray


def plot_behaviour(behaviour: int, note: str, clusters: ClusterPlots, members: Members,
                   everyone: Members, strips: list[Strip], strips_title: str) -> Figure:
    """Draw one behaviour: where its steps are, actions and values of its samples, and
    frames of some of them.

    Args:
        clusters: of all steps.
        members: the samples that show it; if there are none, these panels show all samples alone.
        strips: of these samples, or of any that have steps in it.
    """
    num_steps = everyone.values.shape[1]
    frame_height = 13 / num_steps + 0.15
    heights = (4.6, frame_height * len(strips) + 0.6)
    figure = Figure(figsize=(15, sum(heights)), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=heights)
    left, right = above.subfigures(1, 2, width_ratios=(1, 2))
    clusters.draw(left, behaviour, "behaviour")
    frequencies, values = right.subplots(1, 2)
    _draw_actions(frequencies, members, everyone)
    _draw_values(values, members, everyone)
    right.legend(*values.get_legend_handles_labels(), loc="outside lower center", ncols=2,
                 fontsize=9)
    _draw_strips(below, strips, strips_title)
    figure.suptitle(f"Behaviour {behaviour}: {note}", fontsize=11)
    return figure


def plot_overview(sizes: np.ndarray, in_none: int, labels: np.ndarray, shares: np.ndarray,
                  title: str) -> Figure:
    """Draw all behaviours: how many samples show each, in which steps its cluster lies, and which
    actions its samples take.

    Args:
        sizes: samples of each behaviour (B,).
        in_none: samples without one.
        labels: cluster of each step (M, T).
        shares: of the actions in each behaviour's samples (B, A), NaN where it has none.
    """
    numbers = np.arange(len(sizes))
    steps = np.stack([(labels == number).sum(axis=0) for number in numbers])  # (B, T)
    taken = np.flatnonzero(np.nansum(shares, axis=0) > 0)
    figure = Figure(figsize=(16, 2.4 + 0.3 * max(len(sizes), 8)), layout="constrained")
    bars, times, actions = figure.subplots(1, 3)
    bars.barh(numbers, sizes, color=SKY_BLUE, height=0.7)
    for number, size in zip(numbers, sizes):
        bars.annotate(f" {size}", (size, number), va="center", fontsize=8)
    bars.margins(x=0.15)
    bars.set(xlabel="samples", ylabel="behaviour", title=f"samples that show it ({in_none} none)")
    image = times.imshow(steps, aspect="auto", cmap=COLOUR_MAP, interpolation="nearest")
    times.set(xlabel="step of the sample", ylabel="behaviour", title="steps in its cluster")
    figure.colorbar(image, ax=times, label="samples")
    image = actions.imshow(np.ma.masked_invalid(shares[:, taken]), aspect="auto", cmap=COLOUR_MAP,
                           vmin=0, vmax=1, interpolation="nearest")
    actions.set(ylabel="behaviour", title="actions of its samples (white: no samples)")
    actions.set_xticks(range(len(taken)), [ACTION_LABELS[number] for number in taken], rotation=45,
                       ha="right")
    figure.colorbar(image, ax=actions, label="share of the actions")
    bars.set_ylim(len(sizes) - 0.5, -0.5)
    for axes in (bars, times, actions):
        axes.set_yticks(numbers)
        axes.tick_params(labelsize=8)
    figure.suptitle(title, fontsize=11)
    return figure


def _draw_actions(axes: Axes, members: Members, everyone: Members) -> None:
    shares, of_all = members.action_shares(), everyone.action_shares()
    taken = np.flatnonzero((shares > 0) | (of_all > 0))
    places = np.arange(len(taken))
    axes.barh(places - 0.2, shares[taken], height=0.38, color=VERMILION)
    axes.barh(places + 0.2, of_all[taken], height=0.38, color=NO_CATEGORY_COLOUR)
    axes.set_yticks(places, [ACTION_LABELS[number] for number in taken])
    axes.invert_yaxis()
    axes.set(xlabel="share of the actions that entered the steps", title="actions", xlim=(0, 1))
    if not len(taken):
        axes.annotate("the samples do not say", (0.5, 0.5), xycoords="axes fraction", ha="center")


def _draw_values(axes: Axes, members: Members, everyone: Members) -> None:
    steps = np.arange(everyone.values.shape[1])
    for who, colour, label in ((everyone, "#777777", f"all {len(everyone.values)} samples"),
                               (members, VERMILION, f"its {len(members.values)} samples")):
        if len(who.values):
            low, middle, high = np.quantile(who.values, (0.25, 0.5, 0.75), axis=0)
            axes.fill_between(steps, low, high, color=colour, alpha=0.25, linewidth=0)
            axes.plot(steps, middle, color=colour, marker=".", label=label)
    axes.set(xlabel="step of the sample", ylabel="value estimate",
             title="value: median, and half of the samples")
    axes.grid(alpha=0.3)


def _draw_strips(figure: FigureBase, strips: list[Strip], title: str) -> None:
    panels = figure.subplots(len(strips), len(strips[0].frames), squeeze=False)
    for row, strip in zip(panels, strips):
        for step, axes in enumerate(row):
            frame = enlarge(strip.frames[step], FRAME_FACTOR)
            if strip.actions[step] >= 0:
                frame = mark_action(frame, int(strip.actions[step]))
            axes.imshow(frame)
            axes.set(xticks=[], yticks=[])
            for side in axes.spines.values():
                side.set(color=VERMILION if strip.voting[step] else "white", linewidth=3)
        row[0].set_ylabel(f"sample\n{strip.sample}", fontsize=8, rotation=0, ha="right",
                          va="center")
    for step, axes in enumerate(panels[0]):
        axes.set_title(f"step {step}", fontsize=8)
    figure.suptitle(title, fontsize=10)

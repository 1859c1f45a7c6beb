"""Readout weights of policy and value in IC coordinates: the change of logits and value for one
unit of an independent component (IC), a standard deviation over the recorded states.

Letters in shape comments: A actions, I ICs, D hidden units.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure

from agents.networks import Policy
from analysis.heatmaps import Heatmap, Names, plot_matrices, signed_scale
from analysis.influences.gradients import ic_name
from common.game_constants import ACTION_LABELS
from common.palette import BLUE, VERMILION
from interventions.projector import Projector

VALUE_ROW = "value"


@dataclasses.dataclass(frozen=True)
class Readout:
    """Readout weights of policy and value in IC coordinates.

    Attributes:
        policy: weights of the logits (A, I).
        value: weights of the value estimate (I,).
    """

    policy: np.ndarray
    value: np.ndarray

    @property
    def preferences(self) -> np.ndarray:
        """``policy`` less its mean over the actions (A, I): what is added to all logits alike
        changes no probability."""
        return self.policy - self.policy.mean(axis=0)

    def table(self, action_names: tuple[str, ...]) -> pd.DataFrame:
        """A row for each action, and one for the value; columns ``output``, ``kind`` (logit,
        preference or value), then the ICs."""
        ics = [ic_name(i) for i in range(len(self.value))]
        rows = [[name, kind, *weights] for kind, matrix in (
            ("logit", self.policy), ("preference", self.preferences))
            for name, weights in zip(action_names, matrix)]
        rows.append([VALUE_ROW, "value", *self.value])
        return pd.DataFrame(rows, columns=["output", "kind", *ics])


@torch.no_grad()
def readout(policy: Policy, projector: Projector) -> Readout:
    """The weights of both heads times the change of the hidden units for a unit of each IC.

    These are the columns of the inverse map from hidden units to ICs, not rows of the map: to raise
    one IC and leave the others as they are, the state has to move along such a column.
    """
    return Readout(projector.gradient(policy.fc_policy.weight, "ica").numpy(),
                   projector.gradient(policy.fc_value.weight, "ica")[0].numpy())


UNIT = "per standard deviation of the component"


def plot_actions(weights: Readout, title: str) -> Figure:
    """Heat map of all actions and components."""
    return plot_matrices([Heatmap(weights.preferences, "logit less the mean of all logits")],
                  Names(ACTION_LABELS, _numbers(weights), "action", "IC"),
                  signed_scale([weights.preferences], f"nats {UNIT}", square=False), 1,
                  f"Read-out weights of the policy\n{title}")


def plot_action_bars(weights: Readout, title: str) -> Figure:
    """A panel for each component, a bar for each action."""
    preferences = weights.preferences
    num_ics = len(weights.value)
    columns = min(num_ics, 4)
    rows = -(-num_ics // columns)
    figure = Figure(figsize=(3.6 * columns, 1.9 * rows + 1.2), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for component, axes in enumerate(panels.flat):
        if component >= num_ics:
            axes.axis("off")
            continue
        _draw_bars(axes, preferences[:, component])
        axes.set_title(f"IC {component}", fontsize=9)
        axes.set_xticks(range(len(ACTION_LABELS)), ACTION_LABELS, rotation=90, fontsize=6)
        axes.tick_params(axis="x", labelbottom=component + columns >= num_ics)
    figure.supxlabel("action", fontsize=9)
    figure.supylabel(f"nats {UNIT}", fontsize=9)
    figure.suptitle("Read-out weights of the policy: logits less the mean of all logits; blue "
                    f"raises, orange lowers\n{title}", fontsize=10)
    return figure


def plot_value(weights: Readout, title: str) -> Figure:
    """A bar for each component."""
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    _draw_bars(axes, weights.value)
    axes.set_xticks(range(len(weights.value)), _numbers(weights))
    axes.set(xlabel="IC", ylabel=f"value (discounted, scaled rewards)\n{UNIT}")
    axes.set_title(f"Read-out weights of the value; blue raises, orange lowers\n{title}",
                   fontsize=10)
    return figure


def _draw_bars(axes, values: np.ndarray) -> None:
    axes.bar(range(len(values)), values,
             color=[BLUE if value >= 0 else VERMILION for value in values])
    axes.axhline(0, color="black", linewidth=0.8)
    axes.grid(axis="y", alpha=0.3)


def _numbers(weights: Readout) -> list[str]:
    return [str(i) for i in range(len(weights.value))]

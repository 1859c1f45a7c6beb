"""Plot the agent's readout weights, see ``WeightOptions``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from agents.agent_file import load_agent, read_origin
from agents.networks import Policy
from agents.provenance import agent_sha256
from analysis.heatmaps import Heatmap, Names, plot_matrices, signed_scale
from analysis.state_maps import save_figures
from common.options import command, option
from common.palette import BLUE, VERMILION
from common.results import Entry, File, ResultStore, Schema, Table
from common.tables import with_minus
from envs.objects import action_labels
from generative.flags import TRAINING_FLAGS, TrainSimulatorOptions
from interventions.flags import DirectionOptions
from interventions.projector import Projector

TABLE_NAME = "read_out_weights.csv"
FIGURES = Schema("figures of plot_value_and_action_weights.py", "plot_value_and_action_weights.py",
                 results={"figures": Entry("{}.png", File()), "table": Entry(TABLE_NAME, Table())},
                 replaced=True)
UNIT = "per standard deviation of the component"


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightOptions(TrainSimulatorOptions, DirectionOptions):
    """Plot the agent's readout weights in the space of its independent components: the effect of
    each component on the value and on the logits of the actions.
    """

    hidden: ClassVar = (*TRAINING_FLAGS, "model_file", "check_contents", "batch_size",
                        "num_sim_steps", "num_initializing_steps", "seed", "device", "gpu_device",
                        "precision")

    output_dir: Path | None = option(
        None, "output folder; <save_dir>/value_and_action_weights if not given")


def plot_weights(options: WeightOptions) -> pd.DataFrame:
    """Plot readout weights, and return the table of the weights."""
    output = options.output_dir or options.parameters.folders.readout
    store = ResultStore(output, FIGURES)
    store.check_replaceable()
    policy = load_agent(options.agent_file)
    num_episodes = options.direction_episodes
    projector, matrices = options.load_projector(policy, options.agent_file)
    logits, value = readout(policy, projector)
    labels = action_labels(read_origin(options.agent_file).env_name or "")
    preferences = logits - logits.mean(axis=0)
    title = (f"{options.agent_file.name}: {len(value)} independent components of the states in "
             f"{num_episodes} episodes")
    table = pd.DataFrame(
        [*((name, kind, *weights) for kind, matrix in (("logit", logits),
                                                       ("preference", preferences))
           for name, weights in zip(labels, matrix)), ("value", "value", *value)],
        columns=["output", "kind", *(f"IC {i}" for i in range(len(value)))])
    with store.replace({
            "agent_file": str(options.agent_file),
            "agent_sha256": agent_sha256(options.agent_file),
            "precomp_dir": str(options.directions_folder), "num_episodes": num_episodes,
            "matrices_sha256": matrices}) as temporary:
        table.to_csv(temporary / TABLE_NAME, index=False, float_format="%.6g")
        save_figures(temporary, (
            ("action_weights.png", plot_actions(preferences, labels, title)),
            ("action_weights_by_ic.png", plot_action_bars(preferences, labels, title)),
            ("value_weights.png", plot_value(value, title))))
    strongest = int(np.abs(value).argmax())
    print(f"wrote 3 figures and {TABLE_NAME} to {output}; IC {strongest} moves the value most, by "
          f"{value[strongest]:+.3g} {UNIT}")
    return table


@torch.no_grad()
def readout(policy: Policy, projector: Projector) -> tuple[np.ndarray, np.ndarray]:
    """Compute the readout weights of both heads in coordinates of the independent components (ICs).

    The readout weight of an IC is the change of a head's output per unit of the IC, which is one
    standard deviation over the recorded states. It is the product of the head's weights and the
    change of the hidden units when this IC changes and all other ICs stay constant. That change is
    a column of the inverse of the map from hidden units to ICs, not a row of the map.

    Returns:
        Weights of the logits (A, I) and of the value (I,), for A actions and I components. Adding a
        constant to all logits does not change the probabilities, so the figures show the logits
        minus their mean.
    """
    return (projector.gradient(policy.fc_policy.weight, "ica").numpy(),
            projector.gradient(policy.fc_value.weight, "ica")[0].numpy())


def plot_actions(preferences: np.ndarray, labels: Sequence[str], title: str) -> Figure:
    """Draw a heat map of the policy's weights: one row per action, one column per component.

    Args:
        preferences: weights of the logits minus their mean over actions, (A actions, I components).
        labels: names of the actions.
        title: second line of the title.
    """
    ics = [str(i) for i in range(preferences.shape[1])]
    return plot_matrices([Heatmap(preferences, "logit minus the mean of all logits")],
                         Names(labels, ics, "action", "IC"),
                         [signed_scale([preferences], f"nats {UNIT}", square=False)], 1,
                         f"{_strongest(preferences, labels)}\n{title}")


def _strongest(preferences: np.ndarray, labels: Sequence[str]) -> str:
    action, component = np.unravel_index(np.abs(preferences).argmax(), preferences.shape)
    return with_minus(f"IC {component} moves the policy most: \"{labels[action]}\" by "
                      f"{preferences[action, component]:+.2g} nats")


def plot_action_bars(preferences: np.ndarray, labels: Sequence[str], title: str) -> Figure:
    """Draw the policy's weights as bars: one panel per component, one bar per action.

    Args:
        preferences: weights of the logits minus their mean over actions, (A actions, I components).
        labels: names of the actions.
        title: second line of the title.
    """
    num_ics = preferences.shape[1]
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
        axes.set_xticks(range(len(labels)), labels, rotation=90, fontsize=6)
        axes.tick_params(axis="x", labelbottom=component + columns >= num_ics)
    figure.supxlabel("action", fontsize=9)
    figure.supylabel(f"nats {UNIT}", fontsize=9)
    figure.suptitle(f"{_strongest(preferences, labels)}; blue raises, orange lowers\n{title}",
                    fontsize=10)
    return figure


def plot_value(value: np.ndarray, title: str) -> Figure:
    """Draw the readout weights of the value (I components,) as bars, one per component."""
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    _draw_bars(axes, value)
    axes.set(xlabel="IC", ylabel=f"value (discounted, scaled rewards)\n{UNIT}",
             xticks=range(len(value)))
    strongest = int(np.abs(value).argmax())
    axes.set_title(with_minus(f"IC {strongest} moves the value most, by {value[strongest]:+.2g}; "
                              "blue raises, orange lowers\n") + title, fontsize=10)
    return figure


def _draw_bars(axes: Axes, values: np.ndarray) -> None:
    axes.bar(range(len(values)), values, color=np.where(values >= 0, BLUE, VERMILION))
    axes.axhline(0, color="black", linewidth=0.8)
    axes.grid(axis="y", alpha=0.3)


main = command(WeightOptions, plot_weights)

if __name__ == "__main__":
    raise SystemExit(main())

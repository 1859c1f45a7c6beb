"""Checks of attributions by random changes of the agent's weights and of a layer's activations.

*Randomisation*: the weights of the agent are randomised step by step, from the heads downwards, and
the attributions are computed again (Adebayo et al. 2018, "Sanity checks for saliency maps"). A map
that does not change with the weights does not depend on what the network learned.

*Fidelity*: infidelity and sensitivity, computed with Captum, both from Yeh et al. (2019), "On the
(in)fidelity and sensitivity of explanations". Each activation moves towards the baseline or away
from it, by a random share of its distance to the baseline. Infidelity uses normally distributed
shares with standard deviation NOISE. It is the mean squared difference between the predicted and
the actual change of the output, divided by the mean square of the actual change, so that
attributions of zero have infidelity 1. Sensitivity uses shares of at most NOISE. It is the largest
relative change of the attributions (Euclidean norm).

Letters in shape comments: N frames, B frames of a batch, S stages, H W cells.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import numpy as np
import pandas as pd
import torch
from captum.metrics import infidelity, sensitivity_max
from matplotlib.figure import Figure
from torch import Tensor, nn

from agents.networks import Policy
from attribution.checking.check import (
    Arrays,
    Batch,
    Check,
    CheckContext,
    CheckedLayer,
    Name,
    Subject,
    cell_attributions,
    panels,
    summarise,
)
from attribution.integrated_gradients import Integration
from common.palette import COLOURS, DARK_GREY
from common.results import Array
from stats.association import rank_correlations
from stats.bootstrap import ClusterBootstrap

NUM_FRAMES = 64  # small, because each frame is attributed for many agents
DRAWS = 2  # random draws of the weights
INTEGRATION = Integration(8, tolerance=None)  # coarse, because only ranks are compared
HEADS, MEMORY = "heads", "memory"
CORRELATION_BAR = 0.5  # limit on the correlation with maps of a fully random network


class Randomisation(Check):
    """Rank correlations of the agent's |attribution| with the |attribution| of copies whose weights
    are increasingly randomised.

    Stored array: ``correlations``, float64 (S, N), averaged over DRAWS random draws of the weights,
    in at most NUM_FRAMES evenly spaced frames.
    """

    title = "Do the maps depend on what the network learned?"
    method = (
        "Rank correlation over the cells of a frame between |attribution| of the agent and of a "
        "copy with randomised weights. The first row randomises the heads, and each further row "
        "also the next part below. Criterion: the correlation is below "
        f"{CORRELATION_BAR} when all weights are random.")
    columns: ClassVar = {"drawn_again": "randomised down to", "correlation": "rank correlation",
        "low_95": "low", "high_95": "high"}
    arrays: ClassVar = {"correlations": Array(np.float64, "S N")}

    def compute(self, context: CheckContext, subject: Subject) -> Arrays:
        agent = context.agent
        recorded = agent.recording.read(context.subset(NUM_FRAMES).places)

        def maps_of(policy: Policy) -> np.ndarray:  # (N, H, W)
            return np.abs(cell_attributions(policy, agent.compute, subject.bottleneck,
                                            subject.output, recorded, INTEGRATION,
                                            subject.features.baseline))

        maps = maps_of(agent.policy)
        return {"correlations": np.mean([
            [correlate_maps(maps, maps_of(policy))
             for policy in cascade(agent.policy, context.seed + 1000 * draw)]
            for draw in range(DRAWS)], axis=0)}

    def rows(self, context: CheckContext, subject: Subject, arrays: Arrays) -> pd.DataFrame:
        stages = [name for name, _ in stages_of(context.agent.policy)]
        return randomisation_table(arrays["correlations"], stages,
                                   context.subset(NUM_FRAMES).episodes, context.seed)

    def plot(self, table: pd.DataFrame, arrays: Mapping[Name, Arrays]) -> Figure:
        figure, [[axes]] = panels(1, 1)
        for number, (name, rows) in enumerate(table.groupby(["layer", "output"], sort=False)):
            colour = COLOURS[number % len(COLOURS)]
            axes.plot(rows["drawn_again"], rows["correlation"], "o-", color=colour,
                      label=", ".join(name))
            axes.fill_between(rows["drawn_again"], rows["low_95"], rows["high_95"], color=colour,
                              alpha=0.2, linewidth=0)
        axes.axhline(CORRELATION_BAR, color=DARK_GREY, linewidth=0.8, linestyle="--")
        axes.set(xlabel="randomised part, in addition to all to its left",
                 ylabel="rank correlation of |attribution|")
        axes.legend(fontsize=8)
        return figure

    def verdict(self, table: pd.DataFrame) -> str:
        last = table.groupby(["layer", "output"], sort=False).tail(1)
        return summarise(last["correlation"] < CORRELATION_BAR, last,
                         "Maps of a random network differ")


def stages_of(policy: Policy) -> list[tuple[str, list[str]]]:
    """Return the stages of the randomisation, from the heads downwards: pairs of a name and the
    paths of the modules that the stage adds."""
    stages = [(HEADS, ["fc_policy", "fc_value"])]
    if policy.recurrent:
        stages.append((MEMORY, [policy.memory.name]))
    parts = [name for name, module in policy.embedder.named_children()
             if any(True for _ in module.parameters())]
    return [*stages, *((name, [f"embedder.{name}"]) for name in reversed(parts))]


def randomise(policy: Policy, paths: Sequence[str], seed: int) -> Policy:
    """Return a copy of an agent with some modules re-initialised by PyTorch's defaults.

    Args:
        policy: the agent.
        paths: paths of the modules.
        seed: seed of the new weights.
    """
    randomised = copy.deepcopy(policy)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for path in paths:
            for module in randomised.get_submodule(path).modules():
                if isinstance(module, nn.Conv2d | nn.Linear | nn.GRU | nn.LSTMCell):
                    module.reset_parameters()
    return randomised


def cascade(policy: Policy, seed: int) -> Iterator[Policy]:
    """Yield one agent per stage of ``stages_of``, in which this stage and all earlier ones are
    randomised. In the last agent, the heads, the memory and the whole embedder are random."""
    for number, (_, paths) in enumerate(stages_of(policy)):
        policy = randomise(policy, paths, seed + number)
        yield policy


def correlate_maps(maps: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Compute Spearman's rank correlation of the two maps of each frame, over the cells.

    Args:
        maps, others: first and second map of each frame (N, H, W).

    Returns:
        Correlation per frame (N,); 0 where a map is constant.
    """
    return np.nan_to_num(rank_correlations(*(values.reshape(len(values), -1)
                                             for values in (maps, others))))


def randomisation_table(correlations: np.ndarray, stages: Sequence[str], episodes: np.ndarray,
                        seed: int) -> pd.DataFrame:
    """Average rank correlations over frames.

    Args:
        correlations: rank correlation of each stage and frame (S, N).
        stages: names of the stages (S,).
        episodes: episode of each frame (N,).
        seed: seed of the bootstrap over episodes.

    Returns:
        A row per stage:

        - ``drawn_again``: name of the last randomised stage; all earlier stages are randomised, too
        - ``correlation``, ``low_95``, ``high_95``: mean over frames, with its interval by bootstrap
          over episodes
    """
    low, high = ClusterBootstrap(episodes, seed).interval(correlations)
    return pd.DataFrame({"drawn_again": list(stages), "correlation": correlations.mean(axis=1),
                         "low_95": low, "high_95": high})


FIDELITY_FRAMES = 32  # small, because each frame is attributed at many changed activations
NOISE = 0.1
CHANGES = 10  # random changes per frame
_FRAMES_PER_BATCH = 8


class Fidelity(Check):
    """Infidelity and sensitivity.

    Stored array: ``values``, infidelity and sensitivity per frame, float64 (N, 2), in at most
    FIDELITY_FRAMES evenly spaced frames; infidelity is NaN where the output does not change.
    """

    title = "Infidelity and sensitivity"
    method = (
        "Computed by Captum, after Yeh et al. (2019), with small random changes of the "
        "activations. Infidelity: mean squared error of the predicted change of the output, as a "
        "share of the mean square of the actual change; 1 is as good as attributions of zero. "
        "Sensitivity: the largest relative change of the attributions.")
    columns: ClassVar = {"frames": "frames", "infidelity": "infidelity (median)",
        "sensitivity": "sensitivity (median)"}
    arrays: ClassVar = {"values": Array(np.float64, "N 2", finite=False)}

    def compute(self, context: CheckContext, subject: Subject) -> Arrays:
        settings = context.attributions.settings("steps", "rule")
        layer = CheckedLayer(context.agent, subject,
                             Integration(settings["steps"], settings["rule"], None))

        with torch.random.fork_rng():
            return {"values": np.concatenate([
                _fidelity(layer, batch, rows, context.seed)
                for batch in layer.read(context.subset(FIDELITY_FRAMES), "fidelity batch")
                for rows in torch.arange(len(batch.rows)).split(_FRAMES_PER_BATCH)])}

    def rows(self, context: CheckContext, subject: Subject, arrays: Arrays) -> pd.DataFrame:
        values = arrays["values"]
        return pd.DataFrame([(len(values), *np.nanmedian(values, axis=0))],
                            columns=["frames", "infidelity", "sensitivity"])

    def plot(self, table: pd.DataFrame, arrays: Mapping[Name, Arrays]) -> Figure:
        figure, axes_of = panels(1, 2)
        names = [", ".join(name) for name in arrays]
        for number, (axes, title) in enumerate(zip(axes_of[0], ("infidelity", "sensitivity"))):
            columns = [stored["values"][:, number] for stored in arrays.values()]
            axes.boxplot([column[np.isfinite(column)] for column in columns],
                         orientation="horizontal")
            axes.set_yticks(np.arange(1, len(names) + 1), names, fontsize=8)
            axes.set(xlabel=title)
        return figure

    def verdict(self, table: pd.DataFrame) -> str:
        return (f"Infidelity: median {table['infidelity'].median():.2f}; sensitivity: median "
                f"{table['sensitivity'].median():.2f}.")


def _fidelity(layer: CheckedLayer, batch: Batch, rows: Tensor, seed: int) -> np.ndarray:
    """Compute infidelity and sensitivity in n frames of a batch.

    Args:
        layer: layer and output.
        batch: the batch.
        rows: positions of the n frames in the batch (n,).
        seed: seed of the random changes.

    Returns:
        Infidelity and sensitivity of each frame, float64 (n, 2).
    """
    activations = batch.prefix.activations[rows].cpu().contiguous()
    base = layer.start.expand_as(activations)

    def output(changed: Tensor, frame: Tensor) -> Tensor:
        return torch.from_numpy(layer.changed_outputs(batch, changed, frame.numpy()))

    def attribute(changed: tuple[Tensor, ...],
                  additional_forward_args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        [frame] = additional_forward_args
        prefix = dataclasses.replace(
            batch.prefix, activations=changed[0].detach(),
            also_read=tuple(state[frame] for state in batch.prefix.also_read))
        with torch.enable_grad():  # Captum disables gradients
            values = layer.attribute(prefix, batch.actions[frame.numpy()], np.zeros(1)).values
        return (torch.from_numpy(values[0]).reshape(changed[0].shape),)

    def move(inputs: Tensor, baselines: Tensor) -> tuple[Tensor, Tensor]:
        shares = NOISE * torch.randn(inputs.shape)
        return shares, inputs - shares * (inputs - baselines)

    def move_slightly(inputs: Tensor, radius: float) -> tuple[Tensor, ...]:
        starts = base.repeat_interleave(len(inputs) // len(base), dim=0)
        return (inputs + radius * (2 * torch.rand(inputs.shape) - 1) * (inputs - starts),)

    [attributed] = attribute((activations,), (rows,))
    errors = []
    for attributions in (attributed, torch.zeros_like(attributed)):
        torch.manual_seed(seed)
        errors.append(infidelity(output, move, activations, attributions, base.contiguous(),
                                 rows, n_perturb_samples=CHANGES))
    torch.manual_seed(seed)
    sensitivity = sensitivity_max(attribute, activations, move_slightly, NOISE, CHANGES,
                                  additional_forward_args=(rows,))
    ratio = torch.where(errors[1] > 0, errors[0] / errors[1], torch.nan)
    return torch.stack([ratio.double(), sensitivity.double()], dim=1).cpu().numpy()

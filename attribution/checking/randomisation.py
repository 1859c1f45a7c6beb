"""Attributions of an agent whose weights are randomised step by step, from the heads downwards.

Cascading randomisation after Adebayo et al. (2018), "Sanity checks for saliency maps": a map that
does not change with the weights does not depend on what the network learned.

Letters in shape comments: N frames, S stages, H W cells.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from scipy.stats import rankdata
from torch import nn

from agents.networks import Policy
from attribution.checking.check import (
    Arrays,
    Check,
    CheckContext,
    Name,
    Subject,
    by_name,
    summarise,
)
from attribution.integrated_gradients import Integration, LayerIntegratedGradients
from common.palette import COLOURS, DARK_GREY
from common.results import Array
from stats.bootstrap import ClusterBootstrap

NUM_FRAMES = 64  # small, because each frame is attributed for many agents
DRAWS = 2  # random draws of the weights
INTEGRATION = Integration(8, tolerance=None)
HEADS, MEMORY = "heads", "memory"
CORRELATION_BAR = 0.5  # limit on the correlation with maps of a fully random network


class Randomisation(Check):
    """Rank correlations with the maps of increasingly random agents.

    Stored: ``correlations`` float64 (S, N), averaged over DRAWS random draws of the weights.
    """

    name = "randomisation"
    title = "Do the maps tell of what the network learned?"
    method = (
        "Rank correlation of |attribution| over the cells of a frame with that of the "
        "same agent whose weights are drawn again, the heads first, then one part "
        f"more from the top in every row. Bar: below {CORRELATION_BAR} when all is "
        "random.")
    columns: ClassVar = {"drawn_again": "drawn again", "correlation": "rank correlation",
        "low_95": "low", "high_95": "high"}
    arrays: ClassVar = {"correlations": Array(np.float64, "S N")}

    def compute(self, context: CheckContext, subject: Subject) -> Arrays:
        agent = context.agent
        recorded = agent.recording.read(context.frames.subset(NUM_FRAMES).places)

        def maps_of(policy: Policy) -> np.ndarray:  # (N, H, W)
            attributor = LayerIntegratedGradients(
                policy, agent.compute, subject.bottleneck, [subject.output], INTEGRATION,
                subject.features.baseline)
            values = attributor.attribute(attributor.run_prefix(recorded.frames, recorded.entering),
                                          recorded.actions, np.zeros(1)).values[0]
            return np.abs(values.sum(axis=1, dtype=np.float64))

        maps = maps_of(agent.policy)
        return {"correlations": np.mean([
            [rank_correlations(maps, maps_of(policy))
             for policy in cascade(agent.policy, context.seed + 1000 * draw)]
            for draw in range(DRAWS)], axis=0)}

    def rows(self, context: CheckContext, subject: Subject, arrays: Arrays) -> pd.DataFrame:
        stages = [name for name, _ in stages_of(context.agent.policy)]
        return randomisation_table(arrays["correlations"], stages,
                                   context.frames.subset(NUM_FRAMES).episodes, context.seed)

    def plot(self, table: pd.DataFrame, arrays: Mapping[Name, Arrays]) -> Figure:
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        for number, (name, rows) in enumerate(by_name(table)):
            colour = COLOURS[number % len(COLOURS)]
            axes.plot(rows["drawn_again"], rows["correlation"], "o-", color=colour,
                      label=", ".join(name))
            axes.fill_between(rows["drawn_again"], rows["low_95"], rows["high_95"], color=colour,
                              alpha=0.2, linewidth=0)
        axes.axhline(CORRELATION_BAR, color=DARK_GREY, linewidth=0.8, linestyle="--")
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set(xlabel="drawn again, with all to the left",
                 ylabel="rank correlation of |attribution|")
        axes.legend(fontsize=8)
        return figure

    def verdict(self, table: pd.DataFrame) -> str:
        last = table.groupby(["layer", "output"], sort=False).tail(1)
        return summarise(last["correlation"] < CORRELATION_BAR, last,
                         "Maps of a random network are others")


def stages_of(policy: Policy) -> list[tuple[str, list[str]]]:
    """Return the stages from the heads downwards: name, and paths of the modules to randomise."""
    stages = [(HEADS, ["fc_policy", "fc_value"])]
    if policy.recurrent:
        stages.append((MEMORY, ["gru"]))
    parts = [name for name, module in policy.embedder.named_children()
             if any(True for _ in module.parameters())]
    return [*stages, *((name, [f"embedder.{name}"]) for name in reversed(parts))]


def randomise(policy: Policy, paths: Sequence[str], seed: int) -> Policy:
    """Return a copy of an agent with some modules re-initialised by PyTorch's defaults."""
    randomised = copy.deepcopy(policy)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for path in paths:
            for module in randomised.get_submodule(path).modules():
                if isinstance(module, nn.Conv2d | nn.Linear | nn.GRU):
                    module.reset_parameters()
    return randomised


def cascade(policy: Policy, seed: int) -> Iterator[Policy]:
    """Yield agents with one more randomised stage each time, down to a fully random agent."""
    for number, (_, paths) in enumerate(stages_of(policy)):
        policy = randomise(policy, paths, seed + number)
        yield policy


def rank_correlations(maps: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Compute Spearman's rank correlation over the cells of each frame.

    Args:
        maps, others: maps to compare (N, H, W).

    Returns:
        Correlation per frame (N,); 0 where a map is constant.
    """
    ranks = [rankdata(each.reshape(len(each), -1), axis=1) for each in (maps, others)]
    ranks = [each - each.mean(axis=1, keepdims=True) for each in ranks]
    size = np.sqrt(np.prod([(each**2).sum(axis=1) for each in ranks], axis=0))
    return np.divide((ranks[0] * ranks[1]).sum(axis=1), size, out=np.zeros(len(maps)),
                     where=size > 0)


def randomisation_table(correlations: np.ndarray, stages: Sequence[str], episodes: np.ndarray,
                        seed: int) -> pd.DataFrame:
    """Average rank correlations over frames.

    Args:
        correlations: rank correlation of each stage and frame (S, N).
        stages: names of the stages (S,).
        episodes: episode of each frame (N,).
        seed: seed of the bootstrap over episodes.

    Returns:
        A row per stage: ``drawn_again`` (the lowest randomised part), ``correlation`` (mean over
        frames), ``low_95`` and ``high_95`` by bootstrap over episodes.
    """
    low, high = ClusterBootstrap(episodes, seed).interval(correlations)
    return pd.DataFrame({"drawn_again": list(stages), "correlation": correlations.mean(axis=1),
                         "low_95": low, "high_95": high})

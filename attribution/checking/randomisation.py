"""Maps of attribution of an agent whose weights are drawn again, from the heads downwards.

Adebayo et al. (2018), "Sanity checks for saliency maps", cascading randomisation: a map that does
not change with the weights says nothing of what the network learned.

Letters in shape comments: N frames, S stages, R draws, H W cells.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd
import torch
from scipy.stats import rankdata
from torch import nn

from agents.networks import Policy
from agents.outputs import Output
from attribution.integrated_gradients import Integration, LayerIntegratedGradients
from attribution.layers import Bottleneck
from attribution.recordings import RecordedFrames
from common.devices import Compute
from stats.bootstrap import ClusterBootstrap

DRAWS = 2
INTEGRATION = Integration(8, tolerance=None)
HEADS, MEMORY = "heads", "memory"


def stages_of(policy: Policy) -> list[tuple[str, list[str]]]:
    """Names of stages, from the top, and the paths of the modules that each draws again."""
    stages = [(HEADS, ["fc_policy", "fc_value"])]
    if policy.recurrent:
        stages.append((MEMORY, ["gru"]))
    parts = [name for name, module in policy.embedder.named_children()
             if any(True for _ in module.parameters())]
    return [*stages, *((name, [f"embedder.{name}"]) for name in reversed(parts))]


def drawn_again(policy: Policy, paths: Sequence[str], seed: int) -> Policy:
    """A copy of an agent in which modules have new random weights, as PyTorch draws them."""
    changed = copy.deepcopy(policy)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for path in paths:
            for module in changed.get_submodule(path).modules():
                if isinstance(module, nn.Conv2d | nn.Linear | nn.GRU):
                    module.reset_parameters()
    return changed


def cascade(policy: Policy, seed: int) -> Iterator[Policy]:
    """Agents of which more and more is random, stage by stage."""
    for number, (_, paths) in enumerate(stages_of(policy)):
        policy = drawn_again(policy, paths, seed + number)
        yield policy


def maps_of(policy: Policy, compute: Compute, bottleneck: Bottleneck, output: Output,
            rows: RecordedFrames,
            baseline: np.ndarray | None) -> np.ndarray:
    """|Attribution| of each cell in frames, float64 (N, H, W).

    Args:
        baseline: mean activations (C, H, W); None for zero.
    """
    attributor = LayerIntegratedGradients(policy, compute, bottleneck, [output], INTEGRATION,
                                          baseline)
    found = attributor.attribute(attributor.run_prefix(rows.frames, rows.entering), rows.actions,
                                 np.zeros(1))
    return np.abs(found.values[0].sum(axis=1, dtype=np.float64))


def rank_correlations(maps: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Spearman's correlation over the cells of each frame (N, H, W): (N,); 0 where a map is the
    same everywhere."""
    ranks = [rankdata(each.reshape(len(each), -1), axis=1) for each in (maps, others)]
    ranks = [each - each.mean(axis=1, keepdims=True) for each in ranks]
    size = np.sqrt(np.prod([(each**2).sum(axis=1) for each in ranks], axis=0))
    return np.divide((ranks[0] * ranks[1]).sum(axis=1), size, out=np.zeros(len(maps)),
                     where=size > 0)


def randomisation_correlations(policy: Policy, compute: Compute, bottleneck: Bottleneck,
                               output: Output,
                               rows: RecordedFrames, baseline: np.ndarray | None,
                               seed: int) -> np.ndarray:
    """Correlations of maps with those of agents of which more and more is random (S, N), mean over
    DRAWS draws."""
    own = maps_of(policy, compute, bottleneck, output, rows, baseline)
    return np.mean([[rank_correlations(own, maps_of(changed, compute, bottleneck, output, rows,
                                                    baseline))
                     for changed in cascade(policy, seed + 1000 * draw)]
                    for draw in range(DRAWS)], axis=0)


def randomisation_table(correlations: np.ndarray, stages: Sequence[str], episodes: np.ndarray,
                        seed: int) -> pd.DataFrame:
    """A row a stage: ``drawn_again`` (the lowest part that is random), ``correlation`` (mean over
    frames), ``low_95`` and ``high_95`` by bootstrap over episodes.

    Args:
        correlations: (S, N).
        episodes: of each frame (N,).
    """
    low, high = ClusterBootstrap(episodes, seed).interval(correlations)
    return pd.DataFrame({"drawn_again": list(stages), "correlation": correlations.mean(axis=1),
                         "low_95": low, "high_95": high})

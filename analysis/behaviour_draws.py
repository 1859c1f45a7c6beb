"""Stability of behaviours: find them in random subsets (draws) of the samples with each clustering
method, and compare the subsets (Ben-Hur, Elisseeff and Guyon 2002).

Letters in shape comments: M samples, T steps per sample, F features per step, K methods.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import pandas as pd
from sklearn.metrics import adjusted_rand_score

from analysis.behaviours import most_common
from analysis.clustering import NO_CLUSTER, embed, find_clusters
from analysis.decomposition import principal_components, standardizer_of
from analysis.parameters import CLUSTERINGS, BehavioursConfig
from analysis.state_maps import CLUSTERED_SHARE
from common.schemas import Array, Entry, Npy, Schema, Table, Text

NOT_DRAWN = NO_CLUSTER - 1
SAMPLES, CONTROL = "samples", "control"
DATA = (SAMPLES, CONTROL)


def stability_schema(num_draws: int) -> Schema:
    """Return the schema of the behaviours found in draws from N samples.

    Layout::

        behaviours_samples_D_N.npy, behaviours_control_D_N.npy
                                     behaviour of each sample in draw D for each method of
                                     CLUSTERINGS; NO_CLUSTER if it shows none, NOT_DRAWN if it is
                                     not in the draw (K, N)
        behaviour_agreement_N.csv    one row per method and pair of draws, see ``agreements``
        behaviour_draws_N.csv        one row per method and draw, see ``counts``
        behaviour_stability_N.md     report with one table that summarises the two CSV files
    """
    return Schema(
        "results for {} samples", "analysis/behaviour_stability.py", items={
            **{f"{data}_{draw}": Entry(f"behaviours_{data}_{draw}_{{}}.npy",
                                       Npy(Array(np.integer, "K N")))
               for data in DATA for draw in range(num_draws)},
            "agreement": Entry("behaviour_agreement_{}.csv", Table()),
            "draws": Entry("behaviour_draws_{}.csv", Table()),
            "report": Entry("behaviour_stability_{}.md", Text())},
        settings_name="settings_{}.json", flag="--precomp_dir")


def draws_of(num_samples: int, share: float, number: int, seed: int) -> list[np.ndarray]:
    """Draw ``number`` random subsets of the samples, each without replacement and sorted."""
    rng = np.random.default_rng(seed)
    size = max(round(share * num_samples), 1)
    return [np.sort(rng.choice(num_samples, size, replace=False)) for _ in range(number)]


def without_behaviours(features: np.ndarray, config: BehavioursConfig, seed: int) -> np.ndarray:
    """Create a control without behaviours: permute the time courses of each principal coordinate
    among the samples, independently of the other coordinates.

    The control keeps the variance along each component, so its clusters reflect only the overall
    shape of the point cloud.

    Args:
        features: features of all steps (M, T, F).

    Returns:
        Features of the control, float32 (M, T, F).
    """
    rows = features.reshape(-1, features.shape[2])
    scale = standardizer_of(rows)
    fit = principal_components(scale.standardise(rows), config.n_components_pca, seed)
    coordinates = fit.coordinates(scale.standardise(rows)).reshape(*features.shape[:2], -1)
    rng = np.random.default_rng(seed)
    for each in range(coordinates.shape[2]):
        coordinates[:, :, each] = coordinates[rng.permutation(len(features)), :, each]
    return (coordinates @ fit.components * scale.std + scale.mean).astype(np.float32)


def behaviours_of(features: np.ndarray, config: BehavioursConfig, seed: int,
                  tsne_seed: int) -> np.ndarray:
    """Find the behaviour of each sample with each method of CLUSTERINGS, as
    ``analysis.behaviours.analyse`` does; all methods use the same t-SNE map.

    Args:
        features: features of all steps (M, T, F).

    Returns:
        Behaviour of each sample for each method, int64 (K, M).
    """
    rows = features.reshape(-1, features.shape[2])
    standardised = standardizer_of(rows).standardise(rows)
    fit = principal_components(standardised, config.n_components_pca, seed)
    held = max(fit.number_for(CLUSTERED_SHARE), config.n_components_tsne)
    places = embed(np.ascontiguousarray(fit.coordinates(standardised)[:, :held]),
                   config.n_components_tsne, tsne_seed).places
    labels = [find_clusters(places, method, config.n_clusters, seed).labels
              for method in CLUSTERINGS]
    return np.stack([most_common(each.reshape(len(features), -1)) for each in labels])


def labels_of_draw(features: np.ndarray, draw: np.ndarray, config: BehavioursConfig, seed: int,
                   tsne_seed: int) -> np.ndarray:
    """Find the behaviours of the samples in a draw.

    Returns:
        Behaviour of each sample for each method, NOT_DRAWN for the other samples, int64 (K, M).
    """
    found = np.full((len(CLUSTERINGS), len(features)), NOT_DRAWN)
    found[:, draw] = behaviours_of(features[draw], config, seed, tsne_seed)
    return found


@dataclasses.dataclass(frozen=True)
class Agreement:
    """Agreement of two draws on the samples that both contain.

    Attributes:
        adjusted_rand: adjusted Rand index (Hubert and Arabie 1985): 1 for identical groupings, 0
            on average for random ones. Samples without a behaviour form a group of their own.
    """

    data: str
    method: str
    draw: int
    other_draw: int
    shared_samples: int
    adjusted_rand: float


def agreements(data: str, labels: Sequence[np.ndarray]) -> list[Agreement]:
    """Compare all pairs of draws with each method.

    Args:
        data: name of the data, SAMPLES or CONTROL.
        labels: results of ``labels_of_draw``, one (K, M) array per draw.
    """
    found = []
    for (one, first), (two, second) in itertools.combinations(enumerate(labels), 2):
        shared = (first[0] != NOT_DRAWN) & (second[0] != NOT_DRAWN)
        found += [Agreement(data, method, one, two, int(shared.sum()),
                            float(adjusted_rand_score(a[shared], b[shared])))
                  for method, a, b in zip(CLUSTERINGS, first, second, strict=True)]
    return found


def counts(data: str, labels: Sequence[np.ndarray]) -> pd.DataFrame:
    """Count the behaviours found in each draw, and compute the share of samples without one."""
    return pd.DataFrame([
        {"data": data, "method": method, "draw": draw,
         "behaviours": len(np.unique(row[row > NO_CLUSTER])),
         "in_none": float((row[row != NOT_DRAWN] == NO_CLUSTER).mean())}
        for draw, found in enumerate(labels)
        for method, row in zip(CLUSTERINGS, found, strict=True)])


def report(agreement: pd.DataFrame, draws: pd.DataFrame, config: BehavioursConfig,
           share: float) -> str:
    """Format a Markdown report of the number of behaviours and the agreement for each method."""
    number = draws["draw"].nunique()
    lines = ["# Are behaviours the same in other samples?", "",
             f"{number} draws of {share:.0%} of {config.num_samples} samples; behaviours were "
             "found in each from the beginning. Agreement: adjusted Rand index between two draws, "
             "over the samples in both (mean of all pairs, smallest to largest); 0 is chance, 1 "
             "the same. Control: samples whose principal coordinates were exchanged, so that "
             "there are no behaviours to find; how far draws agree there is what the shape of the "
             "cloud of states does alone.", "",
             "| method | behaviours | samples in none | agreement | control |",
             "| --- | --- | --- | --- | --- |"]
    for method in CLUSTERINGS:
        of_samples = draws.query("data == @SAMPLES and method == @method")
        lines.append("| " + " | ".join([
            method, f"{of_samples['behaviours'].min()} to {of_samples['behaviours'].max()}",
            f"{of_samples['in_none'].min():.0%} to {of_samples['in_none'].max():.0%}",
            *(_agreement(agreement, data, method) for data in DATA)]) + " |")
    return "\n".join(lines) + "\n"


def _agreement(table: pd.DataFrame, data: str, method: str) -> str:
    found = table.query("data == @data and method == @method")["adjusted_rand"]
    return f"{found.mean():.2f} ({found.min():.2f} to {found.max():.2f})"

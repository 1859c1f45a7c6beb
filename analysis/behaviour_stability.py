"""Stability of behaviours across samples.

Writes the number of behaviours in each draw and the agreement of every pair of draws (adjusted Rand
index), for the samples and for a control without behaviours. Pass the method with the highest
agreement to combined_agent_env_hx_analysis_precompute.py as --clustering.
"""

# Reference: Ben-Hur, Elisseeff and Guyon 2002. Letters in shape comments: M samples, T steps per
# sample, F features per step, K clustering methods, in the order of CLUSTERINGS.

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import pandas as pd
from sklearn.metrics import adjusted_rand_score

from analysis.behaviours import EnvCoordinatesOptions, most_common, read_features
from analysis.clustering import NO_CLUSTER, embed, find_clusters
from analysis.decomposition import principal_components, standardizer_of
from analysis.parameters import CLUSTERINGS, BehavioursConfig, PrecomputeOptions
from analysis.state_maps import CLUSTERED_SHARE, SampleRun
from common.cli import count, seed
from common.errors import UserError
from common.options import command, option, redefine
from common.results import ResultStore
from common.schemas import Array, Entry, Npy, Schema, Table, Text
from common.step_results import StepResult

NOT_DRAWN = NO_CLUSTER - 1  # label of a sample that is not in a draw
SAMPLES, CONTROL = "samples", "control"
DATA = (SAMPLES, CONTROL)


def stability_schema(num_draws: int) -> Schema:
    """Return the schema of a folder with the behaviours found in draws from N samples.

    Layout, where D is the number of a draw, from 0 to ``num_draws`` - 1::

        behaviours_samples_D_N.npy, behaviours_control_D_N.npy
                                     behaviour of each sample in draw D, one row per method of
                                     CLUSTERINGS (K, N); NO_CLUSTER for a sample without a
                                     behaviour, NOT_DRAWN for a sample outside the draw
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
    """Draw random subsets of samples, each without replacement. Any two of them overlap, because
    each has more than half of the samples.

    Args:
        share: size of a subset, as a share of the samples.

    Returns:
        Ascending indices of the samples in each subset.
    """
    rng = np.random.default_rng(seed)
    size = max(round(share * num_samples), num_samples // 2 + 1)
    return [np.sort(rng.choice(num_samples, size, replace=False)) for _ in range(number)]


def without_behaviours(features: np.ndarray, config: BehavioursConfig, seed: int) -> np.ndarray:
    """Create features of a control without behaviours. The time courses of each principal
    coordinate are permuted among the samples, independently of the other coordinates.

    The control keeps the variance along each component, so its clusters reflect only the overall
    shape of the point cloud.

    Args:
        features: features of all steps (M, T, F).
        config: parameters; only the number of principal components is used.

    Returns:
        Features of the control, float32 (M, T, F).
    """
    rows = features.reshape(-1, features.shape[2])
    scale = standardizer_of(rows)
    fit = principal_components(scale.standardise(rows), config.n_components_pca, seed)
    coordinates = fit.coordinates(scale.standardise(rows)).reshape(*features.shape[:2], -1)
    rng = np.random.default_rng(seed)
    for component in range(coordinates.shape[2]):
        order = rng.permutation(len(features))
        coordinates[:, :, component] = coordinates[order, :, component]
    return (coordinates @ fit.components * scale.std + scale.mean).astype(np.float32)


def behaviours_of(features: np.ndarray, draw: np.ndarray, config: BehavioursConfig, seed: int,
                  tsne_seed: int) -> np.ndarray:
    """Find the behaviours of the samples in a draw with each method of CLUSTERINGS, as
    ``analysis.behaviours.analyse`` does. All methods cluster the same t-SNE map.

    Args:
        features: features of all steps (M, T, F).
        draw: indices of the n samples in the draw (n,).
        tsne_seed: seed of t-SNE.

    Returns:
        Behaviour of each sample for each method, NOT_DRAWN for samples outside the draw, int64
        (K, M).
    """
    rows = features[draw].reshape(-1, features.shape[2])
    standardised = standardizer_of(rows).standardise(rows)
    fit = principal_components(standardised, config.n_components_pca, seed)
    number = max(fit.number_for(CLUSTERED_SHARE), config.n_components_tsne)
    places, _ = embed(np.ascontiguousarray(fit.coordinates(standardised)[:, :number]),
                      config.n_components_tsne, tsne_seed)
    behaviours = np.full((len(CLUSTERINGS), len(features)), NOT_DRAWN)
    for i, method in enumerate(CLUSTERINGS):
        labels, _ = find_clusters(places, method, config.n_clusters, seed)
        behaviours[i, draw] = most_common(labels.reshape(len(draw), -1))
    return behaviours


def agreements(data: str, labels: Sequence[np.ndarray]) -> pd.DataFrame:
    """Compute the agreement of the behaviours in every pair of draws, for each method.

    The agreement of two draws on the samples that both contain is the adjusted Rand index (Hubert
    and Arabie 1985): 1 for identical groupings, 0 on average for random ones. Samples without a
    behaviour form a group of their own.

    Args:
        data: name of the data, SAMPLES or CONTROL.
        labels: results of ``behaviours_of``, one (K, M) array per draw.

    Returns:
        A table with one row per method and pair of draws: ``data``, ``method``, the numbers
        ``draw`` and ``other_draw`` of the draws, ``shared_samples`` (number of samples in both),
        and ``adjusted_rand``.
    """
    rows = []
    for (one, first), (two, second) in itertools.combinations(enumerate(labels), 2):
        shared = (first[0] != NOT_DRAWN) & (second[0] != NOT_DRAWN)
        rows += [{"data": data, "method": method, "draw": one, "other_draw": two,
                  "shared_samples": int(shared.sum()),
                  "adjusted_rand": adjusted_rand_score(a[shared], b[shared])}
                 for method, a, b in zip(CLUSTERINGS, first, second, strict=True)]
    return pd.DataFrame(rows)


def counts(data: str, labels: Sequence[np.ndarray]) -> pd.DataFrame:
    """Count the behaviours in each draw, and compute the share of samples without one.

    Args:
        data: name of the data, SAMPLES or CONTROL.
        labels: results of ``behaviours_of``, one (K, M) array per draw.

    Returns:
        A table with one row per method and draw: ``data``, ``method``, the number ``draw`` of the
        draw, ``behaviours`` (the number of behaviours), and ``in_none`` (the share of the drawn
        samples that show no behaviour).
    """
    return pd.DataFrame([
        {"data": data, "method": method, "draw": draw,
         "behaviours": len(np.unique(row[row > NO_CLUSTER])),
         "in_none": float((row[row != NOT_DRAWN] == NO_CLUSTER).mean())}
        for draw, of_draw in enumerate(labels)
        for method, row in zip(CLUSTERINGS, of_draw, strict=True)])


def report(agreement: pd.DataFrame, draws: pd.DataFrame, num_samples: int, share: float) -> str:
    """Format a Markdown report of the number of behaviours and the agreement for each method.

    Args:
        agreement: concatenated results of ``agreements`` for SAMPLES and CONTROL.
        draws: concatenated results of ``counts`` for SAMPLES and CONTROL.
        num_samples: number of samples that the draws were taken from.
        share: share of the samples in each draw.
    """
    lines = ["# Are behaviours the same in other samples?", "",
             f"{draws['draw'].nunique()} draws of {share:.0%} of {num_samples} samples; all steps "
             "of the analysis were repeated in each draw. Agreement: adjusted Rand index between "
             "two draws, over the samples in both (mean of all pairs, smallest to largest); 0 is "
             "chance, 1 means identical groups. Control: each principal coordinate was permuted "
             "among the samples, which destroys any behaviours. The remaining agreement is due to "
             "the shape of the cloud of states alone.", "",
             "| method | behaviours | samples without one | agreement | control |",
             "| --- | --- | --- | --- | --- |"]
    ranges = draws[draws["data"] == SAMPLES].groupby("method")[["behaviours", "in_none"]].agg(
        ["min", "max"])
    index = agreement.groupby(["method", "data"])["adjusted_rand"].agg(["mean", "min", "max"])
    for method in CLUSTERINGS:
        fewest, most, lowest, highest = ranges.loc[method]
        lines.append(f"| {method} | {fewest:.0f} to {most:.0f} | {lowest:.0%} to {highest:.0%} | "
                     + " | ".join("{:.2f} ({:.2f} to {:.2f})".format(*index.loc[method, data])
                                  for data in DATA) + " |")
    return "\n".join(lines) + "\n"


@dataclasses.dataclass(frozen=True, kw_only=True)
class BehaviourStabilityOptions(EnvCoordinatesOptions):
    """Test whether behaviours are stable across samples. Each clustering method is applied to
    several random subsets of the samples, called draws, and the behaviours found in the draws are
    compared."""

    section: ClassVar[str] = BehavioursConfig.section

    n_clusters: int | None = redefine(PrecomputeOptions, "n_clusters")
    num_draws: int = option(10, "number of draws, at least 2", type=count)
    share: float = option(0.8, "share of the samples in each draw, between 0.5 and 1")
    seed: int = option(0, "seed of all random choices except those of t-SNE", type=seed)
    overwrite: bool = option(False, "replace the results for this number of samples")


def compare_draws(options: BehaviourStabilityOptions) -> pd.DataFrame:
    """Write draws, tables and report, and return the table of agreements."""
    if options.num_draws < 2 or not 0.5 < options.share < 1:
        raise UserError("--num_draws must be at least 2 and --share between 0.5 and 1, not "
                        f"{options.num_draws} and {options.share}")
    run = SampleRun(BehavioursConfig, stability_schema(options.num_draws), "behaviour_stability",
                    options)
    results = run.results
    results.check_new(options.overwrite)
    rows, settings = read_features(run)
    num_samples = len(run.numbers)
    features = rows.reshape(num_samples, -1, rows.shape[1])
    tsne_seed = run.start(**settings, num_draws=options.num_draws, share=options.share).tsne_seed
    draws = draws_of(num_samples, options.share, options.num_draws, options.seed)
    states_of = {SAMPLES: features,
                 CONTROL: without_behaviours(features, run.config, options.seed)}
    labels: dict[str, list[np.ndarray]] = {data: [] for data in DATA}
    for data, number in itertools.product(DATA, range(options.num_draws)):
        def cluster(data: str = data, number: int = number) -> StepResult:
            return {f"{data}_{number}": behaviours_of(states_of[data], draws[number], run.config,
                                                      options.seed, tsne_seed)}, {}

        labels[data] += results.step(f"{data}_{number}", cluster).values()
    agreement = pd.concat([agreements(data, labels[data]) for data in DATA])
    numbers = pd.concat([counts(data, labels[data]) for data in DATA])
    text = report(agreement, numbers, num_samples, options.share)
    store = ResultStore(results.path, results.schema)
    for name, value in (("agreement", agreement), ("draws", numbers), ("report", text)):
        store.write(name, results.number, value=value)
    results.finish()  # last, so that a folder that contains settings is complete
    print(text)
    return agreement


main = command(BehaviourStabilityOptions, compare_draws)

if __name__ == "__main__":
    raise SystemExit(main())

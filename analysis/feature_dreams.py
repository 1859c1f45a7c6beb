"""Dreams of sparse features, see ``FeatureDreamsOptions``.

The features come from analysis/sparse_features.py. The objective is the pre-TopK activation of the
feature, a linear function of the hidden state. The episode simulated from the optimised start is
the *dream* of the feature. For the test, the recording is replayed in the real game up to the
recorded start nearest to the optimised one; then the agent continues up to the step of the
objective. The controls are the starts of the other features. For comparison, the report also shows
the best of the recorded starts from which no search began. The same command resumes a killed run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from agents.provenance import check_agent
from analysis.memory.dictionaries import Dictionary
from analysis.memory.sparse_report import FEATURE_DREAMS
from common.cli import count
from common.devices import Compute
from common.files import sha256
from common.options import command, option, redefine
from common.results import ResultStore
from common.schemas import Table
from common.tables import markdown_table
from generative.dream_life import play_from
from generative.simulator import Simulator
from generative.start_optimisation.objectives import (
    Target,
    linear_target,
    rollout,
)
from generative.start_optimisation.run import FinishedSearch, SearchOptions, run_search
from generative.start_optimisation.search import SearchContext
from interventions.direction_folders import SPARSE_FEATURES, signed_label
from stats.report import bold, format_share


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureDreamsOptions(SearchOptions):
    """For each of the strongest sparse features, optimise a start through the simulator that
    activates the feature, and test in the real game whether the feature is active near that start.
    """

    penalty: tuple[float, ...] = redefine(SearchOptions, "penalty", default=(1.0,))
    features_dir: Path = option(Path("analysis/memory/sparse_features"),
                                "output folder of analysis/sparse_features.py")
    num_features: int = option(20, "number of features, the strongest first", type=count)
    output_dir: Path = option(Path("analysis/memory/feature_dreams"), "folder to write to")


def optimise_dreams(options: FeatureDreamsOptions) -> pd.DataFrame:
    """Optimise a start per feature, and return the table of ``dreams_table``."""
    features = ResultStore(options.features_dir, SPARSE_FEATURES)
    check_agent(features.settings().get("agent_sha256"), options.agent_file,
                f"the features in {options.features_dir} were found",
                "run analysis/sparse_features.py with this one")
    sae = Dictionary.of_arrays(features.read("sae"))
    table = features.read("features")
    table = table[table["rank"].notna()].sort_values("rank").head(options.num_features)

    def choose(simulator: Simulator, compute: Compute) -> tuple[list[Target], dict]:
        on_device = sae.on(compute.device)
        assert on_device.encoder is not None and on_device.bias is not None
        targets = [linear_target(f"feature_{feature}", on_device.encoder[feature],
                                 on_device.bias[feature], on_device.centre)
                   for feature in table["feature"]]
        return targets, {"features_dir": str(options.features_dir),
                         "sae_sha256": sha256(features.file_of("sae"))}

    search = run_search(options, options.output_dir, FEATURE_DREAMS, choose)
    dreams = dreams_table(search, sae.on(search.context.compute.device), table)
    search.store.write("dreams", value=dreams)
    text = dreams_report(dreams, search.context.plan.step)
    search.store.write("dreams_report", value=text)
    print(text)
    return dreams


def dreams_table(search: FinishedSearch, sae: Dictionary, features: pd.DataFrame) -> pd.DataFrame:
    """Test whether each feature is active in its dream, and in the real game after the recorded
    start nearest to the start of the dream.

    Args:
        search: finished search, one objective per feature.
        sae: the dictionary, on the search's device.
        features: rows of the features in ``features.csv``, in the order of the objectives.

    Returns:
        A row per feature. The start of a feature is the optimised start with the largest score
        minus penalty, for the first weight of ``--penalty``. In addition to columns of
        ``features`` and of the table of starts, the columns are:

        - ``dreamed``, ``dream_activation``: whether the feature is active in the simulated rollout
          at the step of the objective, and its activation there

        and, if the real game was played:

        - ``active``, ``activation``: whether the feature is active in the real game near the start
          (1 or 0), and its activation there
        - ``recorded_active``: whether it is active after the best recorded start (1 or 0)
        - ``others_active``: share of the other features' starts near which it is active
    """
    context = search.context
    starts = search.store.read("starts", form=Table(_START_COLUMNS))
    penalty = next(iter(search.folders))
    best = starts[starts["best"] & (starts["penalty"] == penalty)].sort_values("order")
    folder, samples = search.folders[penalty], best["sample"].tolist()
    vectors = torch.from_numpy(folder.stacked_field("bottleneck_vec", samples))
    ids = features["feature"].to_numpy()
    with torch.no_grad():
        _, rollouts = rollout(context.simulator, context.compute,
                              vectors.to(context.compute.device), context.plan.step + 1,
                              world=folder.worlds(samples))
        dreamed = sae.encode(rollouts.hidden_states[context.plan.step]).cpu().numpy()[:, ids]
    table = features[["feature", "rank", "label", "auc", "named", "frequency"]].reset_index(
        drop=True)
    table["rank"] = table["rank"].astype(int)
    for column in ("sample", "score", "recorded_score", "typical", "nearest_episode",
                   "nearest_frame", "nearest_cosine"):
        table[column] = best[column].to_numpy()
    own = np.diag_indices(len(ids))
    table["dreamed"], table["dream_activation"] = dreamed[own] > 0, dreamed[own]
    if search.recording is None:
        return table
    near = pd.Index(context.starts.windows).get_indexer(best["nearest_window"])
    recorded = context.recorded_scores[context.pool:].argmax(axis=0) + context.pool
    real, of_recorded = (active_in_game(context, search, sae, rows)[:, ids]
                         for rows in (near, recorded))
    active = real > 0
    table["active"], table["activation"] = active[own].astype(float), real[own]
    table["others_active"] = (active.sum(axis=0) - active[own]) / max(len(ids) - 1, 1)
    table["recorded_active"] = (of_recorded[own] > 0).astype(float)
    return table


_START_COLUMNS: dict[str, type] = {
    "penalty": float, "order": int, "best": bool, "sample": int, "score": float,
    "recorded_score": float, "typical": bool, "nearest_window": int, "nearest_episode": int,
    "nearest_frame": int, "nearest_cosine": float}


def active_in_game(context: SearchContext, search: FinishedSearch, sae: Dictionary,
                   rows: np.ndarray) -> np.ndarray:
    """Compute the activations of all features in the real game after recorded starts.

    The recording is replayed up to each start, and the agent continues up to the step of the
    objective.

    Args:
        rows: indices of the recorded starts in ``context.starts.windows`` (starts,).

    Returns:
        Activations at the step of the objective (starts, features).
    """
    assert search.recording is not None
    unique, place = np.unique(rows, return_inverse=True)
    places = [context.dataset.place(int(window)) for window in context.starts.windows[unique]]
    outputs, _, _ = play_from(context.simulator.agent, context.compute, search.recording, places,
                              context.plan.step)
    with torch.no_grad():
        return sae.encode(outputs[-1].hidden_states.float()).cpu().numpy()[place]


def dreams_report(dreams: pd.DataFrame, step: int) -> str:
    """Format the report as Markdown.

    Args:
        dreams: result of ``dreams_table``.
        step: step at which features are read.
    """

    lines = ["# Dreams of sparse features", "",
             "One start per feature was optimised through the simulator; a feature is read at step "
             f"{step} after the start. Intervals of shares are Wilson's 95 % intervals. Details: "
             "[report.md](report.md).", "",
             f"- active in the dream: {format_share(dreams['dreamed'])};"]
    rows: list[tuple[str, Callable]] = [
        ("feature", lambda row: f"[{row.feature}](pictures/order_{row.rank - 1:03d}.png)"),
        ("label", lambda row: bold(signed_label(row.label, row.auc), row.named)),
        ("score", lambda row: f"{row.score:.2f}"),
        ("best recorded", lambda row: f"{row.recorded_score:.2f}"),
        ("in the dream", lambda row: "active" if row.dreamed else "not active")]
    if "active" in dreams:
        others = dreams["others_active"].mean()
        lines += [
            f"- active in the real game near the start: {format_share(dreams['active'])};",
            f"- active near the starts of other features: {100 * others:.0f} %, and in "
            f"{100 * dreams['frequency'].mean():.0f} % of all recorded states (means over "
            "features);",
            f"- active in the best recorded start: {format_share(dreams['recorded_active'])}."]
        rows += [
            ("in the real game", lambda row: "**active**" if row.active else "not active"),
            ("near other starts", lambda row: f"{100 * row.others_active:.0f} %"),
            ("best recorded start",
             lambda row: "active" if row.recorded_active else "not active")]
    return "\n".join([*lines, "", *markdown_table(
        [title for title, _ in rows],
        [[text(row) for _, text in rows] for row in dreams.itertuples()])])


main = command(FeatureDreamsOptions, optimise_dreams)

if __name__ == "__main__":
    raise SystemExit(main())

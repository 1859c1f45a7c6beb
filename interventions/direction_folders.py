"""Folders with further directions of the hidden state: sparse features and linear probes.

``analysis/sparse_features.py`` and ``analysis/probe_atlas.py`` write them; the layouts are in
``analysis/memory/sparse_report.py`` and ``analysis/memory/probe_atlas.py``. Letters in shape
comments: D hidden units.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from agents.provenance import check_agent
from common.errors import UserError
from common.results import ResultStore
from common.schemas import Array, Entry, File, Npz, Schema, Table, Text
from interventions.comparison import COMPARISON

_DICTIONARY = Npz({
    "atoms": Array(np.float32, "F D"), "centre": Array(np.float32, "D"),
    "num_active": Array(np.int64), "encoder": Array(np.float32, "F D", optional=True),
    "bias": Array(np.float32, "F", optional=True), "signed": Array(np.bool_)})
_NAMES: dict[str, type] = {
    "dictionary": str, "feature": int, "frequency": float, "mean_activation": float, "label": str,
    "auc": float, "low_95": float, "high_95": float, "p": float, "p_holm": float, "base": float,
    "precision": float, "named": bool, "named_shuffled": bool}
SPARSE_FEATURES = Schema(
    "sparse features", "analysis/sparse_features.py", items={
        "dictionary": Entry("dictionaries/{}.npz", _DICTIONARY),
        "names": Entry("names/{}.csv", Table(_NAMES, exact=True)),
        "condition": COMPARISON.items["condition"]},
    results={
        "dictionaries": Entry("dictionaries.csv", Table({
            "dictionary": str, "variance_explained": float, "kl": float, "success": float})),
        "features": Entry("features.csv", Table({**_NAMES, "rank": float, "kl": float})),
        "sae": Entry("sae.npz", _DICTIONARY), "effects": Entry("effects.csv", Table()),
        "effects_report": Entry("effects.md", Text()), "effects_figure": Entry("effects.png",
                                                                              File()),
        "examples": Entry("examples/feature_{:0>3}.png", File()),
        "report": Entry("report.md", Text()), "figure": Entry("dictionaries.png", File())},
    informative=("versions", "agent_file", "data_dir", "labels_dir"))
SCORES = {"label": str, "group": str, "representation": str, "probe": str, "metric": str,
          "score": float, "low_95": float, "high_95": float, "base": float, "shuffled": float,
          "held_out": float, "num_examples": int, "num_levels": int}
_BEYOND = {"label": str, "group": str, "metric": str, "probe": str, "hidden_state": float,
           "low_95_hidden": float, "high_95_hidden": float, "baseline": str, "baseline_probe": str,
           "baseline_score": float, "difference": float, "low_95": float, "high_95": float,
           "p": float, "num_examples": int, "num_levels": int}
PROBE_ATLAS = Schema(
    "a probe atlas", "analysis/probe_atlas.py", items={
        "scores": Entry("scores/{}.csv", Table(SCORES, exact=True)),
        "beyond": Entry("beyond/{}.csv", Table(_BEYOND, exact=True)),
        "weights": Entry("weights/{}.npz", Npz({
            "weights": Array(np.float32, "D"), "train": Array(np.int64, "T"),
            "penalty": Array(np.int64, "V"), "test": Array(np.int64, "E")}))},
    results={
        "atlas": Entry("atlas.csv", Table(SCORES)),
        "comparison": Entry("beyond.csv", Table({**_BEYOND, "p_holm": float, "claimed": bool})),
        "skipped": Entry("skipped.csv", Table({"label": str, "reason": str})),
        "report": Entry("report.md", Text()),
        "actions_figure": Entry("actions_ahead.png", File()),
        "beyond_figure": Entry("beyond_the_frame.png", File())})
_MOTION_AND_TIME = ("velocity_x", "velocity_y", "steps_to_end")


def signed_label(label: str, auc: float) -> str:
    """Return a feature's label, preceded by "not" if the AUC is below 0.5."""
    return f"not {label}" if auc < 0.5 else label


def feature_directions(folder: Path, agent_file: Path, number: int) -> dict[str, np.ndarray]:
    """Return the decoder directions (D,) of the strongest sparse features, by title.

    Args:
        number: largest number of features.

    Raises:
        UserError: if the features were found in another agent.
    """
    store = ResultStore(folder, SPARSE_FEATURES)
    check_agent(store.settings().get("agent_sha256"), agent_file,
                f"the features in {folder} were found",
                "choose another --features_dir, or run analysis/sparse_features.py with this one")
    table, atoms = store.read("features"), store.read("sae")["atoms"]
    table = table[table["rank"].notna()].sort_values("rank").head(number)
    return {f"feature {row.feature}" + (
        f": {signed_label(row.label.replace('_', ' '), row.auc)}" if row.named else ""):
        atoms[row.feature] for row in table.itertuples()}


def probe_directions(folder: Path, agent_file: Path, labels: Sequence[str] | None = None
                     ) -> dict[str, np.ndarray]:
    """Return the weights (D,) of linear probes of the hidden state, by title.

    Args:
        labels: labels of the probes; None for each kind of object ahead of the player, the
            velocities, and the steps to the end, as far as the atlas has them.

    Raises:
        UserError: if the probes were trained on another agent, or a label has no probe.
    """
    store = ResultStore(folder, PROBE_ATLAS)
    check_agent(store.settings().get("agent_sha256"), agent_file,
                f"the probes in {folder} were trained",
                "choose another --atlas_dir, or run analysis/probe_atlas.py with this one")
    known = store.keys("weights")
    if labels is None:
        labels = [name for name in known if name.endswith("_ahead")]
        labels += [name for name in _MOTION_AND_TIME if name in known]
    if unknown := [name for name in labels if name not in known]:
        raise UserError(f"{folder} has no direction for label '{unknown[0]}'; available: "
                        f"{', '.join(known)}")
    return {name.replace("_", " "): store.read("weights", name)["weights"] for name in labels}

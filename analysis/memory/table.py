"""Claims about the memory of agents, some of them from the literature, and the findings on each.

Claims are numbered M1, M2, and so on. Sources: Taufeeque et al. 2024, "Planning in a recurrent
neural network that plays Sokoban", arXiv 2407.15421 (M2); pull request 8 of
Metta-AI/NeuralMMO-interpretability, 2026 (M5); the statistics of nicholaschenai/mech_interp_eureka
(M6); the thesis summarised at LessWrong, XWmqSTX89rgqeqyfv (M7).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from analysis.memory.lesion_results import LESIONS
from analysis.memory.probe_atlas import NETWORK, STEPS_AHEAD, STEPS_SINCE_VIEW, UNTRAINED
from analysis.memory.probe_interventions import METHODS, MORE, PROBE, PROBE_INTERVENTIONS
from analysis.memory.sparse_report import FEATURE_DREAMS
from common.results import ResultStore, Table
from interventions.direction_folders import PROBE_ATLAS, SPARSE_FEATURES
from stats.claims import Claim, ClaimsTable, Finding
from stats.significance import share

CLAIMS = ClaimsTable({
    1: Claim("A reset of the memory at every step breaks the agent: expected of a recurrent agent",
             "success rate on the same unseen levels, with the hidden state reset to the initial "
             "state at every step; the other lesions are shown as well"),
    2: Claim("The hidden state predicts the agent's actions far ahead: about 50 steps in Sokoban",
             "accuracy of a probe of the hidden state that predicts the action some steps ahead, "
             "minus that of the best probe of the frame, last action and position"),
    3: Claim("The memory holds what is out of view: expected of a memory",
             "AUC of a probe of the hidden state that predicts whether a kind of object was in "
             "view some steps ago and no longer is, minus that of the best probe of the frame, "
             "last action and position"),
    4: Claim("The memory holds motion, which a single frame does not show: expected of a memory",
             "R² of a probe of the hidden state minus that of the best probe of the frame, last "
             "action and position; and R² for an untrained agent's state on the same frames"),
    5: Claim("A push towards a hazard ahead, along the weights of its probe, changes the "
             "probability of a jump: pushes along other probe directions have 14 to 94 times the "
             "effect of random pushes, and less than 1 % of the effect of a full swap of the state",
             "change of the probability of a jump in recorded states when the state is pushed "
             "towards a hazard ahead, along the weights of the linear probe (tested) or the "
             "covariance of state and label; and this change relative to that of random pushes and "
             "of a swap with states that have the hazard ahead"),
    6: Claim("Many features of sparse autoencoders are dead: 85, 21 and 3 % in Eureka agents",
             "share of features that are never active in held-out states; the rows below show how "
             "well the features reconstruct the state", tested=False),
    7: Claim("Sparse autoencoders find no features of entities: none in maze agents",
             "share of live features that predict a label of the level on held-out levels; the "
             "reference is the share with labels shuffled between levels", is_null=True,
             tested=False),
    8: Claim("Starts optimised in the simulator activate their feature in the real game: no "
             "published number",
             "share of features that are active in the real game near the start optimised for "
             "them; the reference is the share near starts optimised for other features"),
}, "python -m analysis.memory_table", (
    "Ranges in brackets and in the columns *interval* are 95 % intervals: Wilson's for shares of "
    "features, otherwise a bootstrap over levels. A number with a sign is a change; *reference* is "
    "the number without the change, or the control.",
    "M1 and M5 *hold* if the change is claimed: its interval excludes 0, and p (Holm's correction "
    "over both rows) and the share of random changes with as large an effect are at most 0.05. "
    "M2, M3 and M4 hold if the difference is positive, its interval excludes 0 and p (Holm's "
    "correction over all labels) is at most 0.05. M8 holds if the interval lies above the "
    "reference."),
    letter="M")
SCRIPTS = {1: "memory_lesions", 2: "probe_atlas", 3: "probe_atlas", 4: "probe_atlas",
           5: "probe_interventions", 6: "sparse_features", 7: "sparse_features",
           8: "feature_dreams"}
_SCHEMAS = {"lesions": LESIONS, "probe_atlas": PROBE_ATLAS,
            "probe_interventions": PROBE_INTERVENTIONS, "sparse_features": SPARSE_FEATURES,
            "feature_dreams": FEATURE_DREAMS}
_BEYOND = {
    "label": str, "metric": str, "num_levels": int, "claimed": bool,
    **dict.fromkeys(("hidden_state", "baseline_score", "difference", "low_95", "high_95", "p",
                     "p_holm"), float)}
_EFFECT = {"condition": str, "label": str, "outcome": str, "control": bool,
           **dict.fromkeys(("unaltered", "altered", "effect", "low_95", "high_95", "p", "p_holm",
                            "p_control"), float)}


class MemoryTables:
    """Result tables of the studies of one agent.

    Args:
        path: folder with the subfolders ``lesions``, ``probe_atlas``, ``probe_interventions``,
            ``sparse_features`` and ``feature_dreams``, any of which may be missing.
    """

    def __init__(self, path: Path):
        self._path = path

    def read(self, study: str, entry: str, columns: dict[str, type]) -> pd.DataFrame | None:
        """Read columns of a table of a study; return None if the table does not exist.

        Args:
            study: subfolder of the study.
            entry: name of the table in the schema of the study.
            columns: type of each column to read.
        """
        store = ResultStore(self._path / study, _SCHEMAS[study])
        return store.read(entry, form=Table(columns)) if store.has(entry) else None


def _lesions(tables: MemoryTables) -> Iterator[Finding]:
    effects = tables.read("lesions", "effects", _EFFECT)
    if effects is None:
        return
    rows = effects[~effects["control"] & (effects["outcome"] == "success")]
    for row in rows.itertuples():
        yield Finding.of_effect("unseen levels", f"{row.label}: success rate", row,
                                primary=row.condition == "reset_always", shown=True)


def _beyond(tables: MemoryTables, names: list[str], judged: str) -> Iterator[Finding]:
    """Yield the difference between the hidden state and the best baseline for each of the named
    labels. Only the finding for the label ``judged`` decides the claim."""
    table = tables.read("probe_atlas", "comparison", _BEYOND)
    for row in [] if table is None else table[table["label"].isin(names)].itertuples():
        yield Finding(
            "held-out levels", f"{row.label.replace('_', ' ')}: {row.metric}", row.difference,
            row.low_95, row.high_95, row.num_levels, row.baseline_score, row.p_holm,
            row.hidden_state, row.p, shown=True,
            holds=row.claimed and row.difference > 0 if row.label == judged else None)


def _ahead(tables: MemoryTables) -> Iterator[Finding]:
    names = [f"action_ahead_{steps}" for steps in STEPS_AHEAD]
    yield from _beyond(tables, names, names[-1])


def _out_of_view(tables: MemoryTables) -> Iterator[Finding]:
    table = tables.read("probe_atlas", "comparison", {"label": str})
    if table is None:
        return
    names = [name for name in table["label"] if "_left_view_" in name]
    middle = [name for name in names if name.endswith(f"_{STEPS_SINCE_VIEW[1]}")]
    yield from _beyond(tables, names, middle[0] if middle else "")


def _motion(tables: MemoryTables) -> Iterator[Finding]:
    names = ["velocity_y", "velocity_x", "steps_since_jump"]
    yield from _beyond(tables, names, names[0])
    atlas = tables.read("probe_atlas", "atlas", {
        "label": str, "representation": str, "probe": str, "metric": str, "score": float,
        "low_95": float, "high_95": float})
    for row in [] if atlas is None else atlas[
            atlas["label"].isin(names) & (atlas["representation"] == UNTRAINED)
            & (atlas["probe"] == NETWORK)].itertuples():
        yield Finding("held-out levels", f"{row.label.replace('_', ' ')}: {row.metric}, untrained "
                      "agent", row.score, row.low_95, row.high_95, 0, shown=True)


def _pushes(tables: MemoryTables) -> Iterator[Finding]:
    table = tables.read("probe_interventions", "open_loop", {
        **_EFFECT, "ratio_to_random": float, "ratio_to_swap": float})
    if table is None:
        return
    jumps = table[(table["outcome"] == "jump") & ~table["control"]]
    names = jumps["condition"].str.extract(
        rf"^{MORE}_(?P<about>.+)_(?P<method>{'|'.join(METHODS)})$")
    rows = jumps.join(names).dropna(subset=["about"])
    ahead = rows[rows["about"].str.endswith("_ahead")]
    rows = ahead if len(ahead) else rows
    for row in rows.itertuples():
        label = f"{row.about.replace('_', ' ')} ({row.method})"
        yield Finding.of_effect(
            "recorded states", f"pushed towards {label}: P(jump)", row, shown=True,
            primary=row.method == PROBE and row.about == rows["about"].iloc[0])
        for name, reference in (("random", "random pushes"), ("swap", "a full swap")):
            yield Finding("recorded states", f"{label}: relative to {reference}",
                          getattr(row, f"ratio_to_{name}"), np.nan, np.nan, 0, shown=True)


def _dead(tables: MemoryTables) -> Iterator[Finding]:
    table = tables.read("sparse_features", "dictionaries", {
        "dictionary": str, **dict.fromkeys((
            "dead", "variance_explained", "variance_low", "variance_high", "success",
            "success_unaltered"), float)})
    for row in [] if table is None else table.itertuples():
        if row.dictionary.startswith("sae"):
            yield Finding("held-out states", f"{row.dictionary}: share of dead features",
                          row.dead, np.nan, np.nan, 0, shown=True)
        yield Finding("held-out states", f"{row.dictionary}: variance explained",
                      row.variance_explained, row.variance_low, row.variance_high, 0, shown=True)
        yield Finding("unseen levels", f"{row.dictionary}: success with it spliced in",
                      row.success, np.nan, np.nan, 0, row.success_unaltered, shown=True)


def _named(tables: MemoryTables) -> Iterator[Finding]:
    table = tables.read("sparse_features", "features", {
        "dictionary": str, "frequency": float, "named": bool, "named_shuffled": bool})
    if table is None:
        return
    for name, rows in table.groupby("dictionary", sort=False):
        live = rows[rows["frequency"] > 0]
        yield Finding("held-out levels", f"{name}: share of named features",
                      *share(int(live["named"].sum()), len(live)), len(live),
                      float(live["named_shuffled"].mean()), shown=True)


def _dreams(tables: MemoryTables) -> Iterator[Finding]:
    table = tables.read("feature_dreams", "dreams", dict.fromkeys(
        ("active", "others_active", "recorded_active"), float))
    if table is None:
        return
    value, low, high = share(int(table["active"].sum()), len(table))
    others = float(table["others_active"].mean())
    yield Finding("real game", "features active near their starts", value, low, high, len(table),
                  others, shown=True, holds=low > others)
    recorded = share(int(table["recorded_active"].sum()), len(table))
    yield Finding("real game", "features active after the best recorded start", *recorded,
                  len(table), others, shown=True)


READERS: dict[int, Callable[[MemoryTables], Iterator[Finding]]] = {
    1: _lesions, 2: _ahead, 3: _out_of_view, 4: _motion, 5: _pushes, 6: _dead, 7: _named,
    8: _dreams}

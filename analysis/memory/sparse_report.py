"""Schema, report and figure of ``analysis/sparse_features.py``, and schema of
``analysis/feature_dreams.py``.

Layout of the output folder of ``analysis/sparse_features.py``::

    settings.json
    dictionaries/<name>.npz    a dictionary, see ``Dictionary``; for example sae_256 or pca
    names/<dictionary>.csv     a row per feature: columns of ``name_features``, and named_shuffled
    conditions/<condition>/    runs in the real game, see
                               ``interventions.comparison.ConditionRuns``: unaltered,
                               splice_<dictionary>, feature_<number>, control_<number>
    dictionaries.csv           a row per dictionary: columns of ``score_dictionary``; named,
                               named_shuffled (shares of the features); success rate without and
                               with the reconstruction spliced in, and its change
    features.csv               names of the features of all dictionaries; for the strongest features
                               also the columns of ``score_ablations``
    sae.npz                    the sparse autoencoder whose features are ablated
    effects.csv, effects.md, effects.png
                               ablation of the strongest features in the real game
    examples/feature_012.png   frames of held-out levels in which a strong feature is most active
    report.md, dictionaries.png
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis.memory.dictionaries import FIXED
from analysis.memory.sparse_features import NAME_MARGIN, NUM_DIRECTIONS
from common.palette import BLUE, DARK_GREY, DPI, ORANGE
from common.schemas import Entry, Schema, Table, Text
from common.tables import markdown_table
from generative.start_optimisation.search import OPTIMISED_STARTS
from interventions.direction_folders import signed_label
from stats.effects import claims_summary
from stats.forest_plot import name_rows
from stats.report import Wording, bold, format_interval, format_number, format_p

EXAMPLE_SIZE = 128  # pixels per frame in examples/
FEATURE_DREAMS = Schema(
    "starts that drive sparse features", "analysis/feature_dreams.py",
    items=OPTIMISED_STARTS.items,
    results={**OPTIMISED_STARTS.results, "dreams": Entry("dreams.csv", Table({
        "feature": int, "rank": int, "label": str, "dreamed": bool, "score": float})),
        "dreams_report": Entry("dreams.md", Text())},
    informative=(*OPTIMISED_STARTS.informative, "features_dir"),
    settings_name=OPTIMISED_STARTS.settings_name)
ABLATIONS = Wording(
    "Ablated sparse features of the hidden state", "random directions",
    "features with no larger effect than random directions",
    ", scaled by the activation of the feature with the largest mean activation",
    "How far a state is moved in a step")


def describe_dictionary(name: str) -> str:
    """Return the description of a dictionary by its name: "units of the state" for ``units``."""
    kind, _, size = name.partition("_")
    if kind == "sae":
        size, _, pursuit = size.partition("_")
        return (f"atoms of sae_{size}, matching pursuit" if pursuit else
                f"TopK sparse autoencoder, {size} features")
    return FIXED[kind] + (f", {size}" if size else "")


def report(dictionaries: pd.DataFrame, features: pd.DataFrame, effects: pd.DataFrame,
           main: str, description: str) -> str:
    """Format the report as Markdown.

    Args:
        dictionaries, features, effects: tables ``dictionaries.csv``, ``features.csv`` and
            ``effects.csv``.
        main: name of the dictionary whose features are ablated.
        description: sentences about the recording and the sizes of the study.
    """
    return "\n".join([
        "# Sparse features of the hidden state", "", description, "",
        "## Dictionaries", "",
        "All numbers are from held-out levels, with 95 % bootstrap intervals over levels. KL: "
        "divergence of the policy, in nats, if its heads read the reconstruction; random error: "
        "the same with errors of equal norm in random directions; recovered: 1 - KL / (KL with the "
        "mean state). Success: share of levels solved in the real game with the reconstruction "
        f"spliced in at every step ({dictionaries['success_unaltered'].iloc[0]:.3g} without). "
        "Named: share of the features with a name (shuffled: with labels shuffled between "
        "levels).", "",
        *markdown_table(
            ("dictionary", "", "variance explained", "L0", "dead", "KL", "random error",
             "recovered", "success", "change", "p (Holm)", "named", "shuffled"),
            [(row.dictionary, describe_dictionary(row.dictionary),
              format_interval(row.variance_explained, row.variance_low, row.variance_high),
              f"{row.l0:.1f}", f"{100 * row.dead:.0f} %",
              format_interval(row.kl, row.kl_low, row.kl_high), format_number(row.kl_random),
              f"{100 * row.kl_recovered:.0f} %", format_number(row.success),
              format_interval(row.success_change, row.success_low, row.success_high, "+.3g"),
              format_p(row.success_p_holm), f"{100 * row.named:.0f} %",
              f"{100 * row.named_shuffled:.0f} %") for row in dictionaries.itertuples()]),
        f"## Strongest features of {main}", "",
        "Features are ranked by the policy's KL divergence when they are ablated, on levels that "
        "are not used for the numbers below. Label: the label that the activation predicts best; "
        f"bold: named (AUC at least {NAME_MARGIN} from 0.5, and significant after Holm's "
        "correction). Precision: share of the states with the label among states in which the "
        f"feature is active. Control: median KL of {NUM_DIRECTIONS} random directions moved by the "
        f"same amounts; p (Holm): rank among them, corrected for all features of this table.", "",
        *_strongest(features[features["dictionary"] == main]),
        "## Ablation in the real game", "",
        f"{claims_summary(effects).capitalize()}; see [effects.md](effects.md).", ""])


def _strongest(features: pd.DataFrame) -> list[str]:
    rows = features[features["rank"].notna()].sort_values("rank")
    return markdown_table(
        ("feature", "active", "label", "AUC", "precision (base)", "KL", "control", "p (Holm)"),
        [(f"[{row.feature}](examples/feature_{row.feature:03d}.png)",
          f"{100 * row.frequency:.1f} %", bold(signed_label(row.label, row.auc), row.named),
          format_interval(row.auc, row.low_95, row.high_95) if row.named else
          format_number(row.auc),
          f"{format_number(row.precision, '.2f')} ({format_number(row.base, '.2f')})",
          format_interval(row.kl, row.kl_low, row.kl_high),
          format_number(row.kl_control), format_p(row.p_kl_holm)) for row in rows.itertuples()])


def plot_dictionaries(path: Path, table: pd.DataFrame) -> None:
    """Plot variance explained, KL and change of the success rate per dictionary, with intervals.

    Args:
        path: figure to write.
        table: table ``dictionaries.csv``.
    """
    panels = (("variance_explained", "variance_low", "variance_high", "variance explained"),
              ("kl", "kl_low", "kl_high", "KL of the policy (nats; grey: random error)"),
              ("success_change", "success_low", "success_high", "change of the success rate"))
    figure = Figure(figsize=(13, 1.4 + 0.3 * len(table)), layout="constrained")
    places = np.arange(len(table))
    names = table["dictionary"].str.replace(r"^sae_(\d+)$", r"sparse autoencoder, \1 features",
                                            regex=True)
    colours = [ORANGE if name.startswith("sae") else BLUE for name in table["dictionary"]]
    for axes, (value, low, high, label) in zip(figure.subplots(1, 3, sharey=True), panels):
        axes.barh(places, table[value], color=colours, height=0.7)
        axes.hlines(places, table[low], table[high], color="black", linewidth=1)
        axes.set_xlabel(label)
        if value == "kl":
            axes.plot(table["kl_random"], places, "|", color=DARK_GREY, markersize=10)
        name_rows(axes, names.tolist())
    best = table.assign(dictionary=names).loc[table["kl"].idxmin()]
    figure.suptitle(f"The agent acts most as before with {best['dictionary']}: KL {best['kl']:.2g} "
                    f"nats, {100 * best['variance_explained']:.0f} % of the variance", fontsize=11)
    figure.savefig(path, dpi=DPI)

"""Claims of "Understanding RL Vision", and the findings on each of them in the studies of an agent.

Source: Hilton, Cammarata, Carter, Goh and Olah (2020), "Understanding RL Vision", Distill,
doi 10.23915/distill.00029. The article studies one agent for CoinRun in detail, and 14 more.

Letters in shape comments: T steps of one trajectory, N steps of several trajectories together, H W
a layer's grid, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from agents.outputs import VALUE
from attribution.checking.agent_checks import CHECK_FILES
from attribution.checking.object_removal import OBJECTS_AT_STAKE
from attribution.checking.object_scores import OBJECT_FILES, RATES, read_names
from attribution.failures.results import ANY, FAILURES, ORIGINAL, label_words
from attribution.results import AttributionStore, read_features
from attribution.training_levels import LEVEL_SERIES, level_findings
from attribution.trajectories import AdvantageSettings, Trajectories, advantages_of, value_spikes
from common.config import typed
from common.errors import UserError
from common.results import ResultStore, Table
from envs.objects import kind_label
from stats.association import explained, rank_correlations
from stats.bootstrap import ClusterBootstrap
from stats.claims import Claim, ClaimsTable, Finding

CLAIMS = ClaimsTable({
    1: Claim("The value's attribution lies on objects: coins raise the value, enemies and saws "
             "lower it (these signs are not tested)",
             "density (share of |attribution| in the cells that objects of a kind touch, divided "
             "by the share of these cells in the grid) and mean sign of the attribution in these "
             "cells; only the densities of coins and saws are tested"),
    2: Claim("Attribution is sparse: in one chosen frame, 10 pairs of cell and feature hold more "
             "than 80 % of the attribution",
             "share of |attribution| in the 10 largest pairs of cell and feature, median and "
             "quartiles over frames"),
    3: Claim("Directions of features are nearly one-hot, and more salient than those found in "
             "activations",
             "largest entry of a feature's direction divided by the sum of the direction's "
             "entries, mean over features; object score (see R11) minus the object score of "
             "features found in activations"),
    4: Claim("With a layer at zero, the value is about as large as the mean value: 8.9 and 9.56, "
             "where a coin is worth 10",
             "mean of G(0), which is the value with the layer at zero, and mean of the value V"),
    5: Claim("The agent fails for visible reasons: about 1 of 200 levels",
             "share of levels failed, by cause; causes are found by counterfactual replay"),
    6: Claim("The agent hallucinates: the value jumps by 0.03 and 0.09 for one step",
             "value spike |V(t) - (V(t-1) + V(t+1)) / 2|, in standard deviations of V; number of "
             "frames per 1 000 in which, in some cell away from the feature's object, the "
             "activation exceeds the feature's 99 % quantile over all cells and frames"),
    7: Claim("Edits are targeted: failures by saw, enemy moving left, enemy moving right and "
             "other causes, in % of 10 000 levels: 0.37, 0.16, 0.12, 0.08 (original); 12.76, "
             "0.16, 0.08, 0.05 (blind to saws); 0.36, 4.69, 0.97, 0.07 (blind to enemies moving "
             "left). Tested here: only the rise of failures by the hazard",
             "change of the share of levels failed, by cause, from the original to the edited "
             "agent on the same levels; only failures caused by the hazard are tested"),
    8: Claim("Edited agents are not entirely blind: with saws invisible, the agent fails 32.20 % "
             "of levels because of saws (blindness 0.39)",
             "blindness, (edited - original) / (invisible - original). Each term is a share of "
             "levels failed because of the hazard; *invisible* is the original agent's "
             "share with the hazard invisible"),
    9: Claim("Interpretable features appear with many training levels: Spearman correlation 0.91 "
             "over 14 models",
             "Spearman's rank correlation of the number of training levels with the object score "
             "(see R11) and with other measures, over agents trained on different numbers of "
             "levels; the column's own agent is not among them. The claim is not tested, because "
             "features of an untrained agent have high object scores too"),
    10: Claim("In an agent trained on 100 levels, the value is a clock, and features look at the "
              "background",
              "share of V's variance explained by the number of steps left in the level; share "
              "of |attribution| that the features leave as a residual"),
    11: Claim("The third of five convolutions is the most interpretable",
              "object score of each layer, mean over its features. A feature's score is the area "
              "under the ROC curve (AUC) of its activation in a cell as a predictor of whether the "
              "cell shows an object of the feature's best kind. Reference: the same with masks of "
              "other frames"),
    12: Claim("Unusual frames have a large residual",
              "Spearman correlation, over frames, of |advantage| with the residual's share of "
              "|attribution|"),
}, "python -m attribution.table", (
    "Ranges in brackets and in the columns *interval* are 95 % intervals: Wilson's for shares of "
    "levels, otherwise a bootstrap over episodes or levels. The exceptions are R2 (quartiles), R4 "
    "(one standard deviation to either side), R6 (range over features) and R9 (Bonett and Wright, "
    "over agents). In R7, numbers are changes caused by an edit or by invisible hazards. "
    "*Reference* is the number of the original agent, or chance level.",
    "R1 *holds* if the interval of the density lies above 1, which is chance; the signs of "
    "attribution are not tested. R7 *holds* if the change is claimed: its interval excludes 0, and "
    "both p (McNemar's test, Holm's correction over edits and causes) and (1 + n) / (K + 1) are at "
    "most 0.05, where n of the K random edits cause at least as large a change. The other rows are "
    "not tested."),
    letter="R")
NOT_RUN = {1: "python -m attribution.checks has not been run",
           5: "python -m attribution.failure_causes has not been run",
           7: "failure_causes has not been run with an edited agent",
           8: "failure_causes has not been run with an edited agent and --invisible",
           9: "no agents with this network and different numbers of training levels have been "
              "compared (python -m attribution.series)",
           11: "python -m attribution.objects has not been run",
           12: "the settings of the attributions lack the unit of rewards; run python -m "
               "attribution.attribute again with the same flags to add it"}
PAIRS = 10  # number of pairs of cell and feature in row 2
SHOWN_OBJECTS = (*OBJECTS_AT_STAKE, "enemy_left", "enemy_right")
_TINY = np.finfo(np.float32).tiny
_NO_INTERVAL = (np.nan, np.nan)


class AgentStudies:
    """Results of all studies of one agent.

    Args:
        path: folder with the subfolders ``attribution``, ``features``, ``objects``, ``checks``,
            ``causes`` and ``levels`` (a series; see ``attribution.training_levels``); the last four
            may be missing.

    Attributes:
        attributions, checks, objects, causes, levels: stores of the results.
        features: features of the attributed layers, by short name of the layer; layers without a
            folder of features are left out.

    Raises:
        UserError: if the folder has no attributions, or no features of the attributed layers.
    """

    def __init__(self, path: Path):
        self.attributions = AttributionStore(path / "attribution")
        self.attributions.settings()  # raises if there are no attributions
        self.checks = ResultStore(path / "checks", CHECK_FILES)
        self.objects = ResultStore(path / "objects", OBJECT_FILES)
        self.causes = ResultStore(path / "causes", FAILURES)
        self.levels = ResultStore(path / "levels", LEVEL_SERIES)
        self.features = {layer: read_features(path / "features", layer)
                         for layer in self.attributions.layers()
                         if (path / "features" / layer).is_dir()}
        if not self.features:
            raise UserError(f"{path} has attributions, but no features of the attributed layers")

    def value_cells(self, layer: str) -> Iterator[np.ndarray]:
        """Yield the attributions of the value to the features of a layer, one array per trajectory,
        float32 (T, H, W, F + 1); the last of the F + 1 entries is the residual."""
        for number in range(self.attributions.trajectories().num_trajectories):
            yield self.attributions.read("attributions", layer, VALUE, number)["cells"].astype(
                np.float32)


def _table(store: ResultStore, name: str) -> pd.DataFrame:
    """Read the declared columns of a table; return an empty table if it has not been written."""
    form = store.schema.entry(name).format
    assert isinstance(form, Table)
    return store.read(name) if store.has(name) else pd.DataFrame(columns=list(form.columns))


def _on_objects(studies: AgentStudies, layer: str, seed: int) -> Iterator[Finding]:
    table = _table(studies.checks, "objects_table")
    table = table[(table["output"] == VALUE) & table["density"].notna()]
    rows = [row for name in studies.features for row in table[table["layer"] == name].itertuples()]
    for row in rows:
        shown = row.layer == layer and row.kind in SHOWN_OBJECTS
        yield Finding("frames", f"{row.kind}, {row.layer}: density", row.density,
                      row.density_low_95, row.density_high_95, row.frames, shown=shown,
                      holds=(bool(row.density_low_95 > 1)
                             if shown and row.kind in OBJECTS_AT_STAKE else None))
        yield Finding("frames", f"{row.kind}, {row.layer}: mean sign", row.attribution_sign,
                      *_NO_INTERVAL, row.frames, shown=shown)


def _sparse(studies: AgentStudies, layer: str, seed: int) -> Iterator[Finding]:
    for name in studies.features:
        sizes = np.concatenate([np.abs(cells[..., :-1]).reshape(len(cells), -1)
                                for cells in studies.value_cells(name)])  # (N, H W F)
        number = min(PAIRS, sizes.shape[1])
        largest = np.partition(sizes, -number, axis=1)[:, -number:].sum(axis=1)
        shares = largest / np.maximum(sizes.sum(axis=1), _TINY)
        low, middle, high = np.quantile(shares, (0.25, 0.5, 0.75))
        yield Finding("frames", f"share of the {PAIRS} largest pairs, {name}", middle, low, high,
                      len(shares), shown=name == layer)


def _directions(studies: AgentStudies, layer: str, seed: int) -> Iterator[Finding]:
    for name, features in studies.features.items():
        entries = np.array(features.facts["largest_entry"])
        yield Finding("features", f"largest entry, {name}", entries.mean(), *_NO_INTERVAL,
                      len(entries), shown=name == layer)
        compared = (studies.objects.read("compared", name)
                    if studies.objects.has("compared", name) else {})
        if compared.get("difference") is not None:
            yield Finding("observations", f"object score minus that of features of activations, "
                          f"{name}", compared["difference"], compared["low_95"],
                          compared["high_95"], 0, shown=name == layer)


def _baseline(studies: AgentStudies, layer: str, seed: int) -> Iterator[Finding]:
    for name, features in studies.features.items():
        for fact, measure in (("baseline", f"mean of G(0), {name}"),
                              *([("value", "mean of V")] if name == layer else [])):
            mean, deviation = features.facts[f"{fact}_mean"], features.facts[f"{fact}_deviation"]
            yield Finding("observations", f"{measure} (± one standard deviation)", mean,
                          mean - deviation, mean + deviation, features.facts["observations"],
                          shown=name == layer)


def _failures(studies: AgentStudies, layer: str, seed: int) -> Iterator[Finding]:
    table = _table(studies.causes, "rates")
    for row in table[table["condition"] == ORIGINAL].itertuples():
        measure = "all failures" if row.cause == ANY else f"failures by {kind_label(row.cause)}"
        yield Finding("levels", measure, row.rate, row.low_95, row.high_95, row.levels, shown=True)


def _jumps(studies: AgentStudies, layer: str, seed: int) -> Iterator[Finding]:
    steps = studies.attributions.trajectories()
    sizes = value_spikes(steps) / max(steps.value.std(), _TINY)
    for measure, size in (("value spike, 99 % quantile", np.quantile(sizes, 0.99)),
                          ("largest value spike", sizes.max())):
        yield Finding("steps", measure, size, *_NO_INTERVAL, len(sizes), shown=True)
    away = "frames per 1 000 with strong activation away from its object"
    for name in studies.objects.keys("names"):
        rates = []
        for number, feature in enumerate(read_names(studies.objects, name)["features"], start=1):
            rate, low, high = (feature.get(key) for key in RATES)
            if rate is not None:
                rates.append(rate)
                yield Finding("observations", f"{name}, feature {number} ({feature['name']}): "
                              f"{away}", rate, low, high, 0)
        if rates:
            yield Finding("features", f"{name}: {away}, median over features",
                          np.median(rates), min(rates), max(rates), len(rates),
                          shown=name == layer)


def _edited(studies: AgentStudies, layer: str, seed: int) -> Iterator[Finding]:
    table = _table(studies.causes, "effects")
    for row in table[~table["control"].astype(bool)].itertuples():
        tested = np.isfinite(row.p_holm)  # conditions without controls are not shown
        measure = f"{label_words(row.label)}: failures by {kind_label(row.outcome)}"
        yield Finding.of_effect("levels", measure, row,
                                shown=tested and max(row.unaltered, row.altered) > 0,
                                holds=True if row.claimed else None)


def _blind(studies: AgentStudies, layer: str, seed: int) -> Iterator[Finding]:
    for row in _table(studies.causes, "blindness").itertuples():
        measure = f"{label_words(row.label)}: blindness for {kind_label(row.hazard)}"
        yield Finding("levels", measure, row.blindness, row.low_95, row.high_95, 0, shown=True)


def _clock(studies: AgentStudies, layer: str, seed: int) -> Iterator[Finding]:
    value, episode, left = _steps_left(studies.attributions.trajectories())
    if len(value) > 2:
        share = explained(left, value, episode, ClusterBootstrap(episode, seed))
        yield Finding("steps of episodes that end", "share of V's variance explained by steps left",
                      share.value, share.low, share.high, len(value), shown=True)
    for name, features in studies.features.items():
        yield Finding("observations", f"residual share of |attribution|, {name}",
                      features.facts["residual_share"], *_NO_INTERVAL,
                      features.facts["observations"], shown=name == layer)


def _steps_left(steps: Trajectories) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return value, index of the episode and number of steps until the end of the episode, (N,)
    each, for the N steps of all episodes that end within their trajectory."""
    index, groups = np.arange(len(steps)), [steps.trajectory, steps.episode]
    ends = pd.Series(np.where(steps.ended, index, -1)).groupby(groups, sort=False)
    last = ends.transform("max").to_numpy()
    known = last >= 0
    return (steps.value[known].astype(np.float64), ends.ngroup().to_numpy()[known],
            (last - index)[known].astype(np.float64))


def _object_scores(studies: AgentStudies, layer: str, seed: int) -> Iterator[Finding]:
    for name in studies.objects.keys("names"):
        names = read_names(studies.objects, name)
        if names["score"] is not None:
            yield Finding("observations", f"object score, {name}", names["score"],
                          names["score_low_95"], names["score_high_95"], 0, names["score_chance"],
                          shown=True)


def _odd_frames(studies: AgentStudies, layer: str, seed: int) -> Iterator[Finding]:
    unit = studies.attributions.settings().get("unit")
    if not unit:
        return
    settings = typed(AdvantageSettings, unit, f"{studies.attributions.settings_file}, 'unit'")
    sizes = np.abs(advantages_of(studies.attributions.trajectories(), settings.reward_scale,
                                 settings.gamma, settings.lmbda))
    for name in studies.features:
        totals = np.concatenate([np.abs(cells).sum(axis=(1, 2))
                                 for cells in studies.value_cells(name)])  # (N, F + 1)
        shares = totals[:, -1] / np.maximum(totals.sum(axis=1), _TINY)
        yield Finding("steps", f"Spearman correlation, {name}",
                      float(rank_correlations(shares, sizes)), *_NO_INTERVAL, len(shares),
                      shown=name == layer)


def _by_levels(studies: AgentStudies, layer: str, seed: int) -> Iterator[Finding]:
    if studies.levels.settings_file.exists():
        yield from level_findings(studies.levels.path, layer)


# By row of the table, the function that yields the findings of one agent, given the layer to show
# and the seed of the bootstraps.
READERS: dict[int, Callable[[AgentStudies, str, int], Iterator[Finding]]] = {
    1: _on_objects, 2: _sparse, 3: _directions, 4: _baseline, 5: _failures, 6: _jumps, 7: _edited,
    8: _blind, 9: _by_levels, 10: _clock, 11: _object_scores, 12: _odd_frames}

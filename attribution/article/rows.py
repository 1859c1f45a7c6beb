"""The findings on an agent for each row of the article's table.

Letters in shape comments: T steps of a trajectory, H W a layer's grid, F features, N steps of all
trajectories.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from scipy.stats import spearmanr

from agents.outputs import VALUE
from attribution.advantages import AdvantageSettings, advantages_of
from attribution.article.agent_studies import AgentStudies
from attribution.checking.object_files import RATES, read_names
from attribution.failures.results import ANY, ORIGINAL
from attribution.results import AttributionStore
from attribution.trajectories import Trajectories, value_spikes
from stats.association import explained
from stats.bootstrap import ClusterBootstrap
from stats.claims import Finding, read_rows

PAIRS = 10  # of cell and feature, of row 2
AT_STAKE = ("coin", "saw")  # of row 1
SHOWN = (*AT_STAKE, "enemy_left", "enemy_right")
NOT_RUN = {1: "python -m attribution.checks has not been run",
           5: "python -m attribution.failure_causes has not been run",
           7: "failure_causes has not been run with an edited agent",
           8: "failure_causes has not been run with an edited agent and --invisible",
           9: "fewer than six agents have been trained on different numbers of levels",
           11: "python -m attribution.objects has not been run",
           12: "the attributions do not say the unit of rewards; run python -m "
                "attribution.attribute again with the same flags, which adds it"}
_NO_ENDS = (np.nan, np.nan)  # of an interval


def findings_of(studies: AgentStudies, layer: str, seed: int
                ) -> tuple[list[Finding], dict[int, str]]:
    """All findings of an agent, and for rows without any the reason.

    Args:
        layer: whose numbers the table shows, where each layer has its own.
        seed: of the bootstraps.

    Raises:
        UserError: if a file is missing or damaged.
    """
    found = read_rows(_ROWS.items(), studies, layer, seed)
    there = {each.row for each in found}
    return found, {row: reason for row, reason in NOT_RUN.items() if row not in there}


def _on_objects(studies: AgentStudies, layer: str, seed: int) -> Iterator[Finding]:
    for each in studies.layers:
        for row in studies.densities(each, VALUE).itertuples():
            if np.isnan(row.density):
                continue
            shown = each == layer and row.kind in SHOWN
            yield Finding("frames", f"{row.kind}, {each}: density", row.density,
                          row.density_low_95, row.density_high_95, row.frames, shown=shown,
                          holds=(bool(row.density_low_95 > 1) if shown and row.kind in AT_STAKE
                                 else None))
            yield Finding("frames", f"{row.kind}, {each}: mean sign", row.attribution_sign,
                          *_NO_ENDS, row.frames, shown=shown)


def _sparse(studies: AgentStudies, layer: str, seed: int) -> Iterator[Finding]:
    for each in studies.layers:
        shares = np.concatenate([_largest_pairs(cells) for cells in _cells(studies, each)])
        yield Finding("frames", f"share of the {PAIRS} largest pairs, {each}",
                      np.median(shares), *np.quantile(shares, (0.25, 0.75)), len(shares),
                      shown=each == layer)


def _cells(studies: AgentStudies, layer: str) -> Iterator[np.ndarray]:
    """Attributions of the value to the features of a layer, a trajectory at a time, the residual
    last: float32 (T, H, W, F + 1)."""
    folder: AttributionStore = studies.attributions
    for number in range(folder.trajectories().num_trajectories):
        yield folder.read("attributions", layer, VALUE, number)["cells"].astype(np.float32)


def _largest_pairs(cells: np.ndarray) -> np.ndarray:
    """Share of the largest pairs in the |attribution| to all features (T,)."""
    sizes = np.abs(cells[..., :-1]).reshape(len(cells), -1)
    some = min(PAIRS, sizes.shape[1])
    largest = np.partition(sizes, -some, axis=1)[:, -some:].sum(axis=1)
    return largest / np.maximum(sizes.sum(axis=1), np.finfo(np.float32).tiny)


def _directions(studies: AgentStudies, layer: str, seed: int) -> Iterator[Finding]:
    for each in studies.layers:
        entries = np.array(studies.features[each].facts["largest_entry"])
        yield Finding("features", f"largest entry, {each}", entries.mean(), *_NO_ENDS,
                      len(entries), shown=each == layer)
        compared = (studies.objects.read("compared", each)
                    if studies.objects.has("compared", each) else {})
        if compared.get("difference") is not None:
            yield Finding("observations", f"object score minus that of features of activations, "
                          f"{each}", *(compared[name] for name in (
                              "difference", "low_95", "high_95")), 0, shown=each == layer)


def _baseline(studies: AgentStudies, layer: str, seed: int) -> Iterator[Finding]:
    for each in studies.layers:
        features = studies.features[each]
        for name, what in (("baseline", f"mean of G(0), {each}"), ("value", "mean of V")):
            if name == "value" and each != layer:
                continue
            mean, deviation = (features.facts[f"{name}_{number}"] for number in (
                "mean", "deviation"))
            yield Finding("observations", f"{what} (one deviation to either side)", mean,
                          mean - deviation, mean + deviation, features.facts["observations"],
                          shown=each == layer)


def _failures(studies: AgentStudies, layer: str, seed: int) -> Iterator[Finding]:
    if not studies.causes.has("rates"):
        return
    table = studies.causes.read("rates")
    for row in table[table["arm"] == ORIGINAL].itertuples():
        what = "fails" if row.cause == ANY else f"fails by {row.cause}"
        yield Finding("levels", what, row.rate, row.low_95, row.high_95, row.levels, shown=True)


def _jumps(studies: AgentStudies, layer: str, seed: int) -> Iterator[Finding]:
    steps = studies.attributions.trajectories()
    sizes = value_spikes(steps) / max(steps.value.std(), np.finfo(np.float32).tiny)
    yield Finding("steps", "99 % quantile", np.quantile(sizes, 0.99), *_NO_ENDS, len(sizes),
                  shown=True)
    yield Finding("steps", "largest", sizes.max(), *_NO_ENDS, len(sizes), shown=True)
    for each in studies.objects.keys("names"):
        rates = []
        for number, feature in enumerate(read_names(studies.objects, each)["features"], start=1):
            rate, low, high = (feature.get(name) for name in RATES)
            if rate is not None:
                rates.append(rate)
                yield Finding("observations", f"{each}, feature {number} ({feature['name']}): "
                              "frames in 1 000 with it strongly active away from one", rate, low,
                              high, 0)
        if rates:
            yield Finding("features", f"{each}: frames in 1 000 with a feature strongly active "
                          "away from its object, median of the features (lowest to highest)",
                          np.median(rates), min(rates), max(rates), len(rates),
                          shown=each == layer)


def _edited(studies: AgentStudies, layer: str, seed: int) -> Iterator[Finding]:
    if not studies.causes.has("effects"):
        return
    table = studies.causes.read("effects")
    for row in table[~table["control"].astype(bool)].itertuples():
        judged = np.isfinite(row.p_holm)  # arms without controls are none of the row
        yield Finding.of_effect("levels", f"{row.label}: fails by {row.outcome}", row,
                                shown=judged and max(row.unaltered, row.altered) > 0,
                                holds=True if row.claimed else None)


def _blind(studies: AgentStudies, layer: str, seed: int) -> Iterator[Finding]:
    if not studies.causes.has("blindness"):
        return
    for row in studies.causes.read("blindness").itertuples():
        yield Finding("levels", f"{row.label}: blindness for {row.hazard}", row.blindness,
                      row.low_95, row.high_95, 0, shown=True)


def _clock(studies: AgentStudies, layer: str, seed: int) -> Iterator[Finding]:
    steps = studies.attributions.trajectories()
    value, episode, left = _steps_left(steps)
    if len(value) > 2:
        found = explained(left, value, episode, ClusterBootstrap(episode, seed))
        yield Finding("steps of episodes that end", "share of V's variance by the steps left",
                      *vars(found).values(), len(value), shown=True)
    for each in studies.layers:
        features = studies.features[each]
        yield Finding("observations", f"share of the residual, {each}",
                      features.facts["residual_share"], *_NO_ENDS, features.facts["observations"],
                      shown=each == layer)


def _steps_left(steps: Trajectories) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of the steps of episodes whose end is there: value, number of the episode, and steps until
    it ends."""
    number = np.cumsum((np.diff(steps.episode, prepend=-1) != 0)
                       | (np.diff(steps.trajectory, prepend=-1) != 0))
    last = np.full(number.max(initial=0) + 1, -1)
    last[number[steps.ended]] = np.flatnonzero(steps.ended)
    known = last[number] >= 0
    left = (last[number] - np.arange(len(number)))[known]
    return steps.value[known].astype(np.float64), number[known], left.astype(np.float64)


def _object_scores(studies: AgentStudies, layer: str, seed: int) -> Iterator[Finding]:
    for each in studies.objects.keys("names"):
        found = read_names(studies.objects, each)
        if found["score"] is not None:
            yield Finding("observations", f"object score, {each}", found["score"],
                          found["score_low_95"], found["score_high_95"], 0, found["score_chance"],
                          shown=True)


def _odd_frames(studies: AgentStudies, layer: str, seed: int) -> Iterator[Finding]:
    steps = studies.attributions.trajectories()
    found = studies.attributions.settings().get("unit")
    if not found:
        return
    unit = AdvantageSettings(**found)
    sizes = np.abs(advantages_of(steps, unit.reward_scale, unit.gamma, unit.lmbda))
    for each in studies.layers:
        shares = np.concatenate([_residual_shares(cells) for cells in _cells(studies, each)])
        yield Finding("steps", f"rank correlation, {each}",
                      float(spearmanr(shares, sizes).statistic), *_NO_ENDS, len(shares),
                      shown=each == layer)


def _residual_shares(cells: np.ndarray) -> np.ndarray:
    """Share of the residual in all |attribution| of a frame (T,)."""
    sizes = np.abs(cells).sum(axis=(1, 2))
    return sizes[:, -1] / np.maximum(sizes.sum(axis=1), np.finfo(np.float32).tiny)


_ROWS: dict[int, Callable[[AgentStudies, str, int], Iterator[Finding]]] = {
    1: _on_objects, 2: _sparse, 3: _directions, 4: _baseline, 5: _failures, 6: _jumps, 7: _edited,
    8: _blind, 10: _clock, 11: _object_scores, 12: _odd_frames}

"""The findings of all studies of an agent, by row of the table.

Rows 2, 4 and 5 are of ``behaviour_rows``. Of every row with a test, one number is primary: these
are corrected together over the whole table.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator

import pandas as pd

from maze.studies import behaviour_rows, results
from maze.studies.episodes import CHEESE, REGION
from maze.studies.probing import GOT
from maze.studies.results import StudiesFolder
from maze.studies.retarget_report import ALL
from maze.studies.retargets import MOVED_CHEESE
from maze.studies.tracks import REPORTING
from stats.claims import Finding

P_CHEESE, P_CORNER, P_OTHER = "p_cheese", "p_corner", "p_other"
LABELS = {P_CHEESE: "P(cheese)", P_CORNER: "P(corner)", P_OTHER: "P(other)",
          "log_odds": "log-odds of cheese against corner"}
NOT_TRAINED = "no agents with other regions have been trained yet"
_SHOWN_FEATURES = 3
_NO_ENDS = (math.nan, math.nan)  # of an interval


def findings_of(folder: StudiesFolder) -> tuple[list[Finding], dict[int, str]]:
    """All findings of an agent, and for rows without any the reason.

    Raises:
        UserError: if a table is damaged.
    """
    found, reasons = [*_evaluated(folder)], {3: NOT_TRAINED}
    for study, rows in _ROWS.items():
        for row, read in rows.items():
            if not folder.has(study):
                reasons.setdefault(row, f"{study} has not been run to its end")
                continue
            numbers = [dataclasses.replace(each, row=row) for each in read(folder)]
            found += numbers
            if not numbers:
                reasons.setdefault(row, _NOTHING.get(row, f"{study} gives none"))
    if not any(each.row == 1 for each in found):
        reasons[1] = "it has not been evaluated"
    return sorted(found, key=lambda each: each.row), reasons


_NOTHING = dict.fromkeys((15, 16, 17),
                         "no channel of the layer was chosen as following the cheese")


def _evaluated(folder: StudiesFolder) -> Iterator[Finding]:
    """Row 1."""
    for place, levels in ((results.REGION, "cheese in the region"),
                          (results.ANYWHERE, "cheese anywhere"),
                          (results.CORNER, "cheese in the corner")):
        found = folder.evaluation(place)
        if found:
            yield Finding(levels, f"success, {levels}", found["success_rate"],
                          *found["success_interval"], found["num_episodes"], shown=True, row=1)


def _behaviour(row: int) -> Callable[[StudiesFolder], Iterator[Finding]]:
    """A row that ``behaviour_rows`` fills; those of its numbers are shown that the article has."""
    def read(folder: StudiesFolder) -> Iterator[Finding]:
        found = [each for each in behaviour_rows.findings(folder.path / results.BEHAVIOUR)
                 if each.row == row]
        best = itertools.islice(
            (each.measure for each in found if each.measure.startswith("accuracy ")
             and each.levels == _PLAYED), _SHOWN_FEATURES)
        shown = {2: {behaviour_rows.SUCCESS, behaviour_rows.EXACT_LABEL, f"first is {CHEESE}",
                     f"first is {REGION}"}, 4: set(best)}.get(row, set())
        for each in found:
            three = each.measure.startswith("three: ") and not each.measure.endswith("log_loss")
            played = row == 2 or each.levels == _PLAYED
            yield dataclasses.replace(
                each, measure=each.measure.replace("three: ", ""),
                shown=played and (each.measure in shown or (row == 5 and three)))

    return read


_PLAYED = f"target: {behaviour_rows.PLAYED_LABEL}"


def _effect(table: pd.DataFrame, label: str, outcome: str, measure: str, num_levels: int = 0,
            primary: bool = False, shown: bool = True, levels: str = "forks") -> Iterator[Finding]:
    """The effect of an arm on an outcome, if the table has it."""
    column = "label" if "label" in table else "arm"
    rows = table[(table[column] == label) & (table["outcome"] == outcome) & ~table["control"]]
    for row in rows.itertuples():
        yield Finding(levels, measure, row.effect, row.low_95, row.high_95, num_levels,
                      row.unaltered, row.p_holm, row.altered, row.p, row.p_control, primary,
                      shown or primary)


def _num_levels(folder: StudiesFolder, study: str) -> int:
    levels = folder.settings(study).get("levels")
    return len(levels) if isinstance(levels, list) else 0


def _medians(table: pd.DataFrame, label: str, outcome: str, num_levels: int) -> Iterator[Finding]:
    rows = table[(table["label"] == label) & (table["outcome"] == outcome) & ~table["control"]]
    for row in rows.itertuples():
        change = row.median_altered - row.median_unaltered
        yield Finding("forks", f"median {LABELS[outcome]}", change, *_NO_ENDS, num_levels,
                      row.median_unaltered, altered=row.median_altered, shown=True)


def _own(coefficient: str, primary: str, *others: str
         ) -> Callable[[StudiesFolder], Iterator[Finding]]:
    """Rows 6 and 7."""
    def read(folder: StudiesFolder) -> Iterator[Finding]:
        table, num = folder.steered(results.STEERING), _num_levels(folder, results.STEERING)
        label = f"own {coefficient}"
        yield from _medians(table, label, P_CHEESE, num)
        for outcome in (primary, *others):
            yield from _effect(table, label, outcome, LABELS[outcome], num, outcome == primary)

    return read


def _random_vectors(folder: StudiesFolder) -> Iterator[Finding]:
    """Row 8: means over the draws of Gaussian vectors, with the range of the draws."""
    table, num = (folder.steered(results.FIELDS, fields=True),
                  _num_levels(folder, results.FIELDS))
    for outcome, measure in (("mean_total_variation", "mean total variation"),
                             ("into_walls", "moves into walls"), ("stay", "stays")):
        draws = table[table["label"].str.startswith("own -1, gaussian")
                      & (table["outcome"] == outcome)]
        if len(draws):
            effect = draws["effect"]
            yield Finding(f"{len(draws)} Gaussian vectors", f"{measure}, Gaussian vectors",
                          effect.mean(), effect.min(), effect.max(), num,
                          draws["unaltered"].mean(), altered=draws["altered"].mean(), shown=True)
        yield from _effect(table, "own -1", outcome, f"{measure}, the cheese vector", num,
                           outcome == "mean_total_variation")


def _sources(folder: StudiesFolder) -> Iterator[Finding]:
    """Row 9."""
    table, num = (folder.steered(results.SOURCES), _num_levels(folder, results.SOURCES))
    names = table.loc[~table["control"], "label"].drop_duplicates()
    for label in names:
        source = label.removesuffix(" -1")
        words = {"own": "its own", "same_square": "cheese at the same square",
                 "other": "cheese anywhere else", "mean": "mean of other levels"}.get(
            source, source.replace("offset_", "cheese ") + " squares off")
        yield from _effect(table, label, P_CHEESE, f"P(cheese), {words}", num,
                           source == "same_square")


def _without_cheese(folder: StudiesFolder) -> Iterator[Finding]:
    """Row 10."""
    yield from _effect(folder.steered(results.FIELDS, fields=True), "own -1",
                       "distance_to_other_level",
                       "mean total variation from the level without cheese",
                       _num_levels(folder, results.FIELDS), primary=True)


def _layers(folder: StudiesFolder) -> Iterator[Finding]:
    """Row 11, each layer by itself: how many act, and the strongest."""
    table, num = (folder.steered(results.LAYERS), _num_levels(folder, results.LAYERS))
    table = table[~table["control"] & (table["outcome"] == P_CHEESE)]
    if len(table):
        yield Finding("layers", "layers at which P(cheese) falls, claimed, of "
                      f"{len(table)}", float((table["claimed"] & (table["effect"] < 0)).sum()),
                      *_NO_ENDS, num, shown=True)
    for place, row in enumerate(table.sort_values("effect").itertuples()):
        layer = row.label.partition(" at ")[2]
        yield from _effect(table, row.label, P_CHEESE, f"P(cheese), {layer}", num,
                           shown=place == 0)


def _all_layers(folder: StudiesFolder) -> Iterator[Finding]:
    """Row 11, all layers at once."""
    table = folder.steered(results.ALL_LAYERS)
    yield from _effect(table, table["label"].iloc[0], P_CHEESE,
                       f"P(cheese), all layers at {table['label'].iloc[0].split()[1]}",
                       _num_levels(folder, results.ALL_LAYERS), primary=True)


def _corner(folder: StudiesFolder) -> Iterator[Finding]:
    """Row 12."""
    table, num = (folder.steered(results.TOP_RIGHT), _num_levels(folder, results.TOP_RIGHT))
    for label in table.loc[~table["control"], "label"].drop_duplicates():
        yield from _effect(table, label, P_CORNER, f"P(corner) at {label.removeprefix('own ')}",
                           num, label == "own +1")
    fields = folder.steered(results.TOP_RIGHT, fields=True)
    yield from _effect(fields, "own +1", "exact_region_first",
                       "exact P(region before cheese) at +1", shown=True)


def _both(folder: StudiesFolder) -> Iterator[Finding]:
    """Row 13."""
    table, num = (folder.steered(results.BOTH), _num_levels(folder, results.BOTH))
    for label in ("cheese -1", "top right +1", "both"):
        yield from _effect(table, label, P_CORNER, f"P(corner), {label}", num)
    for row in table[(table["label"] == "interaction") & (table["outcome"] == "log_odds")
                     & ~table["control"]].itertuples():
        yield Finding("forks", "interaction in log-odds", row.effect, row.low_95, row.high_95,
                      num, p_holm=row.p_holm, p=row.p, p_control=row.p_control, primary=True,
                      shown=True)


def _tracks(folder: StudiesFolder) -> Iterator[Finding]:
    """Row 14: at the layer that the other studies look at, and by layer."""
    table, layer = folder.tracks(), str(folder.settings(results.CHANNELS).get("layer"))
    seen = table[(table["thing"] == CHEESE) & (table["mapping"] == "published")]
    for name, rows in seen[seen["set"] == REPORTING].groupby("layer", sort=False):
        chosen = rows[rows["chosen"]]
        kept, num = chosen[chosen["tracks"]], int(rows["num_levels"].iloc[0])
        numbers = ", ".join(map(str, kept.sort_values("contrast", ascending=False)["channel"]))
        yield Finding(name, f"of {len(chosen)} chosen of {len(rows)} channels, those that "
                      f"follow the cheese{f' ({numbers})' if numbers else ''}",
                      float(len(kept)), *_NO_ENDS, num, shown=name == layer)
        for channel in kept.itertuples() if name == layer else ():
            yield Finding(name, f"channel {channel.channel}, mean elsewhere and at the cheese",
                          channel.at - channel.elsewhere, *_NO_ENDS, num, channel.elsewhere,
                          altered=channel.at, shown=channel.contrast == kept["contrast"].max())


def _multiplied(folder: StudiesFolder) -> Iterator[Finding]:
    """Row 15: the channel with the best score, and the chosen ones together."""
    table = folder.multiplied()
    first = table["label"].iloc[0].partition(" times ")[0] if len(table) else ""
    num = int(folder.settings(results.CHANNELS).get("num_forks") or 0)
    for label in table.loc[~table["control"].astype(bool), "label"].drop_duplicates():
        yield from _effect(table, label, P_CHEESE, f"P(cheese), {label}", num,
                           label == f"{first} times -1", label.startswith(f"{first} times"))


def _retargeted(study: str, what: str) -> Callable[[StudiesFolder], Iterator[Finding]]:
    """Row 16: the strongest channel, whose test is the row's, or all chosen channels."""
    first = study == results.RETARGETING

    def read(folder: StudiesFolder) -> Iterator[Finding]:
        for arm, parts in folder.retargeted(study).items():
            name = "moved cheese" if arm == MOVED_CHEESE else what
            for row in parts.itertuples():
                where = "" if row.by == ALL else f", {row.by} {row.part}"
                yield Finding(f"{row.targets} targets", f"{row.outcome} probability, {name}{where}",
                    row.effect, row.low_95, row.high_95, row.levels, row.unpatched,
                    altered=row.patched, shown=row.outcome == "path" and (
                        row.by == ALL or (first and row.by.startswith("off")
                                          and arm != MOVED_CHEESE)))
            tested = folder.retargeting_effects(study, arm)
            tested = tested[~tested["control"].astype(bool)]
            if len(tested):  # against each kind of control: the weaker evidence counts
                row = tested.sort_values("p_control").iloc[-1]
                yield Finding("targets with controls", f"path probability, {name}, tested",
                    row["effect"], row["low_95"], row["high_95"], int(parts["levels"].max()),
                    row["unaltered"], row["p_holm"], row["altered"], row["p"], row["p_control"],
                    primary=first, shown=True)

    return read


def _scrubbed(folder: StudiesFolder) -> Iterator[Finding]:
    """Row 17."""
    conditions, contrasts = folder.scrubbed()
    num = _num_levels(folder, results.SCRUBBING)
    for row in conditions[conditions["outcome"].isin(("total_variation",
                                                      "published_size"))].itertuples():
        which = "these channels" if row.channels == "hypothesis" else "random channels"
        what = "total variation" if row.outcome == "total_variation" else "published norm"
        yield Finding("forks", f"{what}, {which}, cheese at "
                      f"{'the same' if row.feature == 'same' else 'another'} square", row.mean,
                      row.low_95, row.high_95, num, shown=row.outcome == "total_variation")
    rows = contrasts[~contrasts["control"].astype(bool)
                     & (contrasts["outcome"] == "total_variation")]
    for row in rows.itertuples():
        yield Finding("forks", "(another - same square) of these less of random channels",
                      row.effect, row.low_95, row.high_95, num, p_holm=row.p_holm, p=row.p,
                      p_control=row.p_control, primary=True, shown=True)


def _probes(folder: StudiesFolder) -> Iterator[Finding]:
    """Row 18: every layer; shown is the best of each target."""
    table = folder.probes()
    metrics = table["metric"].isin(("auc", "r2")) | (
        (table["target"] == GOT) & (table["metric"] == "accuracy"))
    table = table[metrics]
    best = table.groupby(["target", "metric"], sort=False)["score"].idxmax()
    for row in table.itertuples():
        yield Finding(row.layer, f"{row.target}, {row.metric}, {row.layer}, shuffled labels "
                      f"{row.shuffled:.3f}",
                      row.score, row.low_95, row.high_95, row.num_levels, row.base,
                      shown=row.Index in set(best))


_ROWS: dict[str, dict[int, Callable[[StudiesFolder], Iterator[Finding]]]] = {
    results.BEHAVIOUR: {row: _behaviour(row) for row in (2, 4, 5)},
    results.STEERING: {6: _own("-1", P_CHEESE, P_CORNER, P_OTHER),
                       7: _own("+1", "log_odds", P_CHEESE)},
    results.FIELDS: {8: _random_vectors, 10: _without_cheese},
    results.SOURCES: {9: _sources}, results.LAYERS: {11: _layers},
    results.ALL_LAYERS: {11: _all_layers}, results.TOP_RIGHT: {12: _corner},
    results.BOTH: {13: _both},
    results.CHANNELS: {14: _tracks, 15: _multiplied, 18: _probes},
    results.RETARGETING: {16: _retargeted(results.RETARGETING, "cell set")},
    results.ALL_RETARGETING: {16: _retargeted(results.ALL_RETARGETING, "all channels' cell set")},
    results.SCRUBBING: {17: _scrubbed},
}

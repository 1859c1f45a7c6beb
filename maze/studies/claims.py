"""Published claims on maze agents, and the findings of an agent's studies on each of them.

``analysis/maze/<agent>/`` contains a folder per study. Every tested claim has one primary number
per agent. The p-values of an agent's primary numbers are corrected together by Holm's method. Rows
are those of the table of claims, numbered from 1.

Sources: "Understanding and controlling a maze-solving policy network" (2023, arXiv
2310.08043), "Add a top-right vector" (2023), "Behavioural statistics for a maze-solving agent"
(2023).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pandas as pd

from agents.episodes import read_evaluation
from common.errors import UserError
from common.files import read_description
from common.results import ResultStore, Schema
from maze.studies import behaviour, series
from maze.studies.channels import (
    CHANNEL_FILES,
    CHEESE,
    EFFECT_COLUMNS,
    GOT_CHEESE,
    NOTHING_NAME,
    PUBLISHED,
    REPORTING,
)
from maze.studies.retargeting import ALL, MOVED_CHEESE, RETARGETING_FILES
from maze.studies.scrubbing import CONDITION_COLUMNS, CONTRAST_COLUMNS, SCRUBBING_FILES
from maze.studies.steering import STEERING_FILES
from maze.studies.vectors import LAYER
from stats.claims import Claim, ClaimsTable, Finding, read_rows

EVALUATED = "evaluated"
PLACES = REGION, ANYWHERE, CORNER = "region", "anywhere", "corner"  # places of the cheese
BEHAVIOUR, CHANNELS, RETARGETING, SCRUBBING = "behaviour", "channels", "retargeting", "scrubbing"
SERIES = "regions"  # series of agents trained with this agent's recipe; not part of the preset
STEERING, FIELDS, SOURCES = "steering", "steering_fields", "steering_sources"
LAYERS, ALL_LAYERS = "steering_layers", "steering_all_layers"
TOP_RIGHT, BOTH = "steering_top_right", "steering_both"
ALL_RETARGETING = "retargeting_all"  # all chosen channels; RETARGETING uses the strongest
STUDIES = (BEHAVIOUR, STEERING, FIELDS, SOURCES, LAYERS, ALL_LAYERS, TOP_RIGHT, BOTH, CHANNELS,
           RETARGETING, ALL_RETARGETING, SCRUBBING)
# Files that each study writes last, or instead of its results.
_LAST = {**dict.fromkeys(STUDIES, ("report.md",)), CHANNELS: ("channels.csv",),
         **dict.fromkeys((RETARGETING, ALL_RETARGETING), ("*/targets.csv", NOTHING_NAME)),
         SCRUBBING: ("scrubbing.csv", NOTHING_NAME), SERIES: ("report.md",)}
P_CHEESE, P_CORNER, P_OTHER = "p_cheese", "p_corner", "p_other"
LABELS = {P_CHEESE: "P(cheese)", P_CORNER: "P(corner)", P_OTHER: "P(other)",
          "log_odds": "log-odds of cheese against corner"}
_NO_ENDS = (math.nan, math.nan)  # ends of a missing interval

CLAIMS = ClaimsTable({
    1: Claim("A trained agent reaches cheese in its training region in nearly every episode: "
             "shown by a training curve",
             "success rate on unseen levels, by place of the cheese"),
    2: Claim("With the cheese anywhere, the agent often reaches it: 69.1 % of 2 000 levels; "
             "71.4 % of 5 239 forks with the cheese outside the region; 84.8 % of 1 000 levels "
             "if trained with R = 7",
             "share of episodes that reach the cheese, mean exact probability of reaching it, "
             "and shares of episodes in which the cheese or the region is reached first; all on "
             "forks with the cheese outside the region"),
    3: Claim("Agents trained with a larger region R take detours to the cheese: never with R = "
             "1, rarely with R = 2, and with every larger R; 15 agents, no frequencies",
             "rank correlation of R with the share of episodes that reach the cheese (outside the "
             "regions of all agents) and with other measures, over agents trained with different "
             "R; and the numbers of claim 2 for each R. An agent's name stands for a series of "
             "agents trained with different R"),
    4: Claim("One feature of a level predicts whether the cheese is reached: accuracy with "
             "Euclidean distances from the cheese to the region (C-5x5) 0.775, to the corner (C-T) "
             "0.773, and to the decision square (C-D) 0.761; with path lengths C-D 0.754, C-5x5 "
             "0.735, C-T 0.732; base rate 0.714; 5 239 forks",
             "accuracy of logistic regression on each of 16 features, in 10-fold "
             "cross-validation over levels; the three best features are shown, with the base "
             "rate as reference. 15 of the features are distances; their names give the measure "
             "(euc: Euclidean, taxi: city block, steps: along the path) and the two ends (cheese "
             "C, decision square D, corner T, region 5x5). The 16th, cheese_norm, is the "
             "Euclidean distance of the cheese from the world's bottom left square (row 0, column "
             "0)"),
    5: Claim("Three features together predict the same: coefficients -1.405 (C-T, Euclidean), "
             "-0.516 (C-D, Euclidean), -0.577 (C-D, path), intercept 1.355, accuracy 0.824; "
             "10 000 runs",
             "cross-validated accuracy and coefficients of an L1 logistic regression on the "
             "standardised features, which are named as in claim 4"),
    6: Claim("Subtracting a level's own cheese vector makes the agent ignore the cheese: median "
             "P(cheese) falls from 0.81 to 0.03, P(corner) rises, P(other) is unchanged; 52 forks",
             "changes of probabilities at the decision square when the vector is subtracted "
             "(coefficient -1); controls: vectors with permuted cells, and Gaussian vectors of "
             "the same norm"),
    7: Claim("Adding the cheese vector changes little",
             "the changes of claim 6 with coefficient +1; the change of the log-odds is tested",
             is_null=True),
    8: Claim("A random vector ruins the field: figures, no numbers",
             "changes of the whole field by the cheese vector (subtracted), and by 20 Gaussian "
             "vectors of the same norm (mean and range of the 20 means)", tested=False),
    9: Claim("The vector of another level works if that level's cheese is on the same square: "
             "the vector often works up to 2 squares away, but not farther; the mean vector "
             "of 100 levels does nothing; figures, no numbers",
             "change of P(cheese), as in claim 6, when the vector of another level is subtracted; "
             "results are grouped by the distance between the cheeses of the two levels (the "
             "larger of the distances in rows and in columns)"),
    10: Claim("With the vector subtracted, the field is often nearly that without cheese: "
              "figures, no numbers",
              "mean total variation between the field of the level and that of the same level "
              "without cheese: its change when the vector is subtracted"),
    11: Claim("Subtracting the cheese vector works in every agent: subtraction also works at all "
              "layers at once with coefficient -0.05; results differ in the last layers",
              "change of P(cheese), as in claim 6, when the vector is subtracted at one layer (the "
              "layer with the largest change is shown) or at all layers at once"),
    12: Claim("The vector to the corner draws the mouse there: P(corner) rises a little at "
              "coefficient 0.5, strongly at 1 and 5, less at 10; at 20 the field makes no sense; "
              "the effect is smaller in small mazes; figures, no numbers",
              "change of P(corner) at the decision square, by coefficient; *P(region before "
              "cheese)*: exact probability of reaching the region first, measured on fewer forks"),
    13: Claim("Both vectors act together: figures, no numbers",
              "changes of P(corner) with the cheese vector at -1, with the vector to the corner "
              "at +1, and with both; interaction: change of the log-odds with both, minus the "
              "sum of the two single changes", tested=False),
    14: Claim("Some channels follow the cheese: 11 of 128 channels; the activation of one is "
              "+0.6 at the cheese and -0.2 elsewhere (by eye)",
              "number of channels chosen on 100 levels that also follow the cheese on 100 "
              "others; mean activation of the best channel at the cheese minus its mean "
              "elsewhere; the reference is its mean elsewhere"),
    15: Claim("Scaling the best channel changes P(cheese): P(cheese) rises slightly for factors "
              "above 1 and falls slightly for 0; below -1 the mouse avoids the cheese; figures, "
              "no numbers",
              "change of P(cheese) at the decision square when the best channel of claim 14 is "
              "multiplied by -3, -1, 0 or 2 (-1 is tested); controls: random channels, multiplied "
              "by the same factor"),
    16: Claim("One cell set to 5.5 draws the mouse to its square: success is about 0.9 for "
              "squares on the path to the corner, below 0.3 for squares 25 steps off this path, "
              "and 0.2 at 50 steps; moving the cheese to the square succeeds more often than "
              "setting cells",
              "change of the path probability when the cell of the target (any free square) is "
              "set, in mazes without cheese, by number of steps off the path to the corner. "
              "*With controls*: targets that were also run with other channels and other cells. "
              "*All channels*: the cell is set to 1 in all chosen channels. *Moved cheese*: the "
              "cheese is put on the target instead"),
    17: Claim("The channels encode the square of the cheese: resampling the channels changes the "
              "field by 0.88 if the source has the cheese on the same square, otherwise by 1.26; "
              "random channels by 0.60 and 0.54 (published norm, %, 30 seeds)",
              "mean total variation between the fields before and after resampling channels "
              "(causal scrubbing), from sources with the cheese on the same or on another "
              "square. Tested: the difference between these two kinds of sources for the chosen "
              "channels, minus the same difference for random channels. findings.csv also has the "
              "*published norm*, which procgen-tools prints: the Euclidean norm of the changes of "
              "all squares' four movement probabilities, divided by twice the number of squares. "
              "It is smaller in larger mazes"),
    18: Claim("Probes find squares, cheese and mouse well, and predict whether the cheese is "
              "reached: accuracy 0.78 to 0.85 at a base rate of 0.68; 1 000 forks",
              "score of each linear probe on held-out levels, at the layer with the highest "
              "score. The score is the area under the ROC curve (auc), R² (r2) or accuracy; the "
              "reference is the score without features"),
}, "python -m maze.table", (
    "A level's *cheese vector* is a layer's output with the cheese minus the output without the "
    "cheese. The *vector to the corner* is the output with a path from the maze's corner to the "
    "corner of the world (the grid around the maze) minus the output without this path. "
    f"The layer is `{LAYER}` unless a row names another one. "
    "R is the side of the region at the top right in which the cheese lay in training. P(cheese), "
    "P(corner) and P(other) are the probabilities, at the decision square, of the first step "
    "towards the cheese, of the first step towards the corner, and of all other moves.",
    "Ranges in brackets and in the columns *interval* are 95 % intervals: Wilson's for shares of "
    "episodes, otherwise a bootstrap over levels. The exceptions are the rank correlations in "
    "claim 3 (Bonett and Wright, over agents) and the range over Gaussian vectors in claim 8. In "
    "claims 6 to 13, 15 and 16, a number with a sign is a change caused by the intervention. "
    "*Reference* is the number without intervention, or the base rate, unless the claim's section "
    "defines it. An effect is *claimed* if its interval excludes 0, and both *p* and *controls* "
    "are at most 0.05. *p* is the p-value of paired sign flips, after Holm's correction over the "
    "agent's column. *controls* is (1 + n) / (K + 1), where n of K controls have an effect at "
    "least as large. A tested claim *holds* if its effect is claimed. Claim 7 predicts no effect, "
    "so it does not hold if an effect is claimed.",
    "Agents with a common teacher are not independent; the model cards report how similar the "
    "shipped agents are to their teacher."))


class StudiesFolder:
    """Folder with the studies of one agent.

    Args:
        path: folder with a subfolder per study.

    Raises:
        UserError: if the folder does not exist.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        if not self.path.is_dir():
            raise UserError(f"there is no folder {self.path} of studies of an agent")

    def has(self, study: str) -> bool:
        """Return whether a study, one of STUDIES or SERIES, is finished."""
        return any(any((self.path / study).glob(name)) for name in _LAST[study])

    def settings(self, study: str) -> dict:
        """Return the settings of a study; empty if they are missing."""
        return read_description(self.path / study / "settings.json")

    def table(self, study: str, schema: Schema, name: str, columns: Iterable[str] = ()
              ) -> tuple[pd.DataFrame, int]:
        """Read a table of a study.

        Args:
            name: entry of the table in the schema.
            columns: columns of the empty table that is returned if the study has no such table;
                without columns, a missing table is an error.

        Returns:
            The table, and the number of levels; 0 if the settings do not list them.
        """
        store, levels = ResultStore(self.path / study, schema), self.settings(study).get("levels")
        table = store.read(name) if store.has(name) or not columns else pd.DataFrame(
            columns=list(columns))
        return table, len(levels) if isinstance(levels, list) else 0

    def steering(self, study: str, name: str = "effects") -> tuple[pd.DataFrame, int]:
        """Return a table of effects of a steering study, and the number of forks.

        Args:
            name: "effects" or "field_effects".
        """
        return self.table(study, STEERING_FILES, name, EFFECT_COLUMNS)


def findings_of(folder: StudiesFolder) -> tuple[list[Finding], dict[int, str]]:
    """Collect all findings of an agent, sorted by row, and the reasons for missing findings by row.

    Raises:
        UserError: if a table is damaged.
    """
    findings = read_rows([(1, _evaluated)], folder)
    reasons = {3: "no agents that differ only in R were measured"}
    if not findings:
        reasons[1] = "it has not been evaluated"
    for study, rows in _ROWS.items():
        for row, read in rows.items():
            if not folder.has(study):
                reasons.setdefault(row, f"{study} has not been run to its end")
                continue
            numbers = read_rows([(row, read)], folder)
            findings += numbers
            if not numbers:
                reasons.setdefault(row, "no channel of the layer was chosen as following the cheese"
                                   if row in (15, 16, 17) else f"{study} gives none")
    return sorted(findings, key=lambda finding: finding.row), reasons


def _evaluated(folder: StudiesFolder) -> Iterator[Finding]:
    """Yield the findings of row 1: success rates from evaluate.py."""
    for place, levels in zip(PLACES, ("cheese in the region", "cheese anywhere",
                                      "cheese in the corner")):
        result = read_evaluation(folder.path / EVALUATED / f"{place}.json")
        if result:
            low, high = result["success_interval"]
            yield Finding(levels, f"success, {levels}", result["success_rate"], low, high,
                          result["num_episodes"], shown=True)


def _behaviour(row: int, folder: StudiesFolder) -> Iterator[Finding]:
    """Yield the findings of rows 2, 4 and 5."""
    return (finding for finding in behaviour.read_findings(folder.path / BEHAVIOUR)
            if finding.row == row)


def _own_rows(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of a table of effects that do not belong to controls."""
    return table[~table["control"].astype(bool)]


def _effect(table: pd.DataFrame, label: str, outcome: str, measure: str, num_levels: int = 0,
            primary: bool = False, shown: bool = True) -> Iterator[Finding]:
    """Yield the effect of the condition ``label`` on an outcome, if the table has it."""
    own = _own_rows(table)
    for row in own[(own["label"] == label) & (own["outcome"] == outcome)].itertuples():
        yield Finding.of_effect("forks", measure, row, num_levels, primary=primary,
                                shown=shown or primary)


def _own(coefficient: str, outcomes: tuple[str, ...], folder: StudiesFolder) -> Iterator[Finding]:
    """Yield the findings of rows 6 and 7, effects of vectors computed from the same level.

    Args:
        coefficient: coefficient of the vector, as text.
        outcomes: outcomes; the first one is primary.
        folder: studies of the agent.
    """
    table, num = folder.steering(STEERING)
    medians = table.assign(effect=table["median_altered"] - table["median_unaltered"],
                           unaltered=table["median_unaltered"], altered=table["median_altered"],
                           **dict.fromkeys(("low_95", "high_95", "p", "p_holm", "p_control"),
                                           math.nan))
    label = f"own {coefficient}"
    yield from _effect(medians, label, P_CHEESE, f"median {LABELS[P_CHEESE]}", num)
    for outcome in outcomes:
        yield from _effect(table, label, outcome, LABELS[outcome], num, outcome == outcomes[0])


def _random_vectors(folder: StudiesFolder) -> Iterator[Finding]:
    """Yield the findings of row 8: means over Gaussian vectors, with the range over vectors."""
    table, num = folder.steering(FIELDS, "field_effects")
    gaussian = table[table["label"].str.startswith("own -1, gaussian")]
    for outcome, measure in (("mean_total_variation", "mean total variation"),
                             ("into_walls", "moves into walls"), ("stay", "stays")):
        draws = gaussian[gaussian["outcome"] == outcome]
        if len(draws):
            yield Finding(f"{len(draws)} Gaussian vectors", f"{measure}, Gaussian vectors",
                          draws["effect"].mean(), draws["effect"].min(), draws["effect"].max(),
                          num, draws["unaltered"].mean(), altered=draws["altered"].mean(),
                          shown=True)
        yield from _effect(table, "own -1", outcome, f"{measure}, the cheese vector", num,
                           outcome == "mean_total_variation")


def _sources(folder: StudiesFolder) -> Iterator[Finding]:
    """Yield the findings of row 9: vectors of other levels."""
    table, num = folder.steering(SOURCES)
    for label in _own_rows(table)["label"].unique():
        source = label.removesuffix(" -1")
        words = {"own": "own vector", "same_square": "cheese at the same square",
                 "other": "cheese anywhere else", "mean": "mean vector of other levels"}.get(
            source, source.replace("offset_", "cheese at distance "))
        yield from _effect(table, label, P_CHEESE, f"P(cheese), {words}", num,
                           source == "same_square")


def _without_cheese(folder: StudiesFolder) -> Iterator[Finding]:
    """Yield the finding of row 10: distance from the field of the level without cheese."""
    table, num = folder.steering(FIELDS, "field_effects")
    return _effect(table, "own -1", "distance_to_other_level",
                   "mean total variation from the level without cheese", num, primary=True)


def _layers(folder: StudiesFolder) -> Iterator[Finding]:
    """Yield the findings of row 11 for single layers.

    The findings are the number of layers with a claimed decrease of P(cheese), and the effect at
    each layer; only the strongest effect is shown in the table.
    """
    table, num = folder.steering(LAYERS)
    own = _own_rows(table)
    own = own[own["outcome"] == P_CHEESE]
    yield Finding("layers", f"layers of {len(own)} with a claimed fall of P(cheese)",
                  float((own["claimed"] & (own["effect"] < 0)).sum()), *_NO_ENDS, num, shown=True)
    for place, label in enumerate(own.sort_values("effect")["label"]):
        yield from _effect(own, label, P_CHEESE, f"P(cheese), {label.partition(' at ')[2]}", num,
                           shown=place == 0)


def _all_layers(folder: StudiesFolder) -> Iterator[Finding]:
    """Yield the finding of row 11 for all layers at once."""
    table, num = folder.steering(ALL_LAYERS)
    label = table["label"].iloc[0]
    return _effect(table, label, P_CHEESE, f"P(cheese), all layers at {label.split()[1]}", num,
                   primary=True)


def _corner(folder: StudiesFolder) -> Iterator[Finding]:
    """Yield the findings of row 12: the top right vector."""
    table, num = folder.steering(TOP_RIGHT)
    for label in _own_rows(table)["label"].unique():
        yield from _effect(table, label, P_CORNER, f"P(corner) at {label.removeprefix('own ')}",
                           num, label == "own +1")
    yield from _effect(folder.steering(TOP_RIGHT, "field_effects")[0], "own +1",
                       "exact_region_first", "exact P(region before cheese) at +1")


def _both(folder: StudiesFolder) -> Iterator[Finding]:
    """Yield the findings of row 13: cheese and top right vector together."""
    table, num = folder.steering(BOTH)
    for label in ("cheese -1", "top right +1", "both"):
        yield from _effect(table, label, P_CORNER, f"P(corner), {label}", num)
    for finding in _effect(table, "interaction", "log_odds", "interaction in log-odds", num,
                           primary=True):
        # An interaction has no reference value.
        yield dataclasses.replace(finding, base=math.nan, altered=math.nan)


def _tracking(folder: StudiesFolder) -> Iterator[Finding]:
    """Yield the findings of row 14 by layer; only those of the study's main layer are shown."""
    table, _ = folder.table(CHANNELS, CHANNEL_FILES, "channels")
    main_layer = str(folder.settings(CHANNELS).get("layer"))
    table = table[(table["thing"] == CHEESE) & (table["mapping"] == PUBLISHED)
                  & (table["set"] == REPORTING)]
    for layer, rows in table.groupby("layer", sort=False):
        chosen = rows[rows["chosen"]]
        kept, num = chosen[chosen["tracks"]], int(rows["num_levels"].iloc[0])
        numbers = ", ".join(map(str, kept.sort_values("contrast", ascending=False)["channel"]))
        yield Finding(layer, f"channels that follow the cheese, of {len(chosen)} chosen among "
                      f"{len(rows)}{f' ({numbers})' if numbers else ''}",
                      float(len(kept)), *_NO_ENDS, num, shown=layer == main_layer)
        for channel in kept.itertuples() if layer == main_layer else ():
            yield Finding(layer, f"channel {channel.channel}, mean at the cheese minus elsewhere",
                          channel.at - channel.elsewhere, *_NO_ENDS, num, channel.elsewhere,
                          altered=channel.at, shown=channel.contrast == kept["contrast"].max())


def _multiplied(folder: StudiesFolder) -> Iterator[Finding]:
    """Yield the findings of row 15: the best channel, and all chosen channels together."""
    table, _ = folder.table(CHANNELS, CHANNEL_FILES, "effects", EFFECT_COLUMNS)
    labels, num = _own_rows(table)["label"].unique(), int(folder.settings(CHANNELS)["num_forks"])
    for label in labels:
        first = labels[0].partition(" times ")[0]
        yield from _effect(table, label, P_CHEESE, f"P(cheese), {label}", num,
                           label == f"{first} times -1", label.startswith(f"{first} times"))


def _retargeted(study: str, patch: str, folder: StudiesFolder) -> Iterator[Finding]:
    """Yield the findings of row 16: the strongest channel (primary), or all chosen channels."""
    store, is_primary = ResultStore(folder.path / study, RETARGETING_FILES), study == RETARGETING
    for condition in store.keys("parts"):
        parts = store.read("parts", condition)
        name = "moved cheese" if condition == MOVED_CHEESE else patch
        for row in parts.itertuples():
            where = "" if row.by == ALL else (
                f", {row.part} steps off" if row.by.startswith("off") else f", {row.by} {row.part}")
            yield Finding(
                f"{row.targets} targets",
                f"{'' if row.outcome == 'path' else 'exact probability, '}{name}{where}",
                row.effect, row.low_95, row.high_95, row.levels, row.unpatched,
                altered=row.patched, shown=row.outcome == "path" and (
                    row.by == ALL or (is_primary and row.by.startswith("off")
                                      and condition != MOVED_CHEESE)))
        if store.has("effects", condition):  # the kind of controls with the larger p-value counts
            yield Finding.of_effect(
                "targets with controls", f"path probability, {name}, with controls",
                _own_rows(store.read("effects", condition)).sort_values("p_control").iloc[-1],
                int(parts["levels"].max()), primary=is_primary, shown=True)


def _scrubbed(folder: StudiesFolder) -> Iterator[Finding]:
    """Yield the findings of row 17: causal scrubbing."""
    conditions, num = folder.table(SCRUBBING, SCRUBBING_FILES, "conditions", CONDITION_COLUMNS)
    contrasts, _ = folder.table(SCRUBBING, SCRUBBING_FILES, "contrasts", CONTRAST_COLUMNS)
    sizes = {"total_variation": "", "published_size": "published norm, "}
    for row in conditions[conditions["outcome"].isin(sizes)].itertuples():
        channels = "chosen channels" if row.channels == "hypothesis" else "random channels"
        yield Finding("forks", f"{sizes[row.outcome]}{channels}, cheese at "
                      f"{'the same' if row.feature == 'same' else 'another'} square", row.mean,
                      row.low_95, row.high_95, num, shown=row.outcome == "total_variation")
    own = _own_rows(contrasts)
    for row in own[own["outcome"] == "total_variation"].itertuples():
        yield dataclasses.replace(Finding.of_effect(
            "forks", "total variation, another - same square, chosen - random channels", row, num,
            primary=True, shown=True), base=math.nan, altered=math.nan)  # no reference value


def _probes(folder: StudiesFolder) -> Iterator[Finding]:
    """Yield the findings of row 18: probes of every layer; the best per target are shown."""
    table, _ = folder.table(CHANNELS, CHANNEL_FILES, "probes")
    table = table[table["metric"].isin(("auc", "r2")) | (
        (table["target"] == GOT_CHEESE) & (table["metric"] == "accuracy"))]
    best = set(table.groupby(["target", "metric"], sort=False)["score"].idxmax())
    for row in table.itertuples():
        yield Finding(row.layer, f"{row.target}, {row.metric}, {row.layer} (shuffled labels "
                      f"{row.shuffled:.3f})", row.score, row.low_95, row.high_95, row.num_levels,
                      row.base, shown=row.Index in best)


# Functions that yield the findings of a row of the table, by study and row.
_ROWS: dict[str, dict[int, Callable[[StudiesFolder], Iterator[Finding]]]] = {
    SERIES: {3: lambda folder: iter(series.read_findings(folder.path / SERIES))},
    BEHAVIOUR: {row: functools.partial(_behaviour, row) for row in (2, 4, 5)},
    STEERING: {6: functools.partial(_own, "-1", (P_CHEESE, P_CORNER, P_OTHER)),
               7: functools.partial(_own, "+1", ("log_odds", P_CHEESE))},
    FIELDS: {8: _random_vectors, 10: _without_cheese},
    SOURCES: {9: _sources}, LAYERS: {11: _layers}, ALL_LAYERS: {11: _all_layers},
    TOP_RIGHT: {12: _corner}, BOTH: {13: _both},
    CHANNELS: {14: _tracking, 15: _multiplied, 18: _probes},
    RETARGETING: {16: functools.partial(_retargeted, RETARGETING, "cell set")},
    ALL_RETARGETING: {16: functools.partial(_retargeted, ALL_RETARGETING,
                                            "all channels' cell set")},
    SCRUBBING: {17: _scrubbed}}

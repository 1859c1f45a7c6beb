"""Measures of agents that were trained on different numbers of levels.

An agent's folder holds ``training.json`` and ``unseen.json``, from ``evaluate.py`` with
``--training_levels`` and with ``--new_first_frames``, and the folders ``objects`` and, optionally,
``checks`` of its studies. ``stats.series`` describes the files of a series. Row R9 of the table of
claims (``attribution.claims``) is computed from a series.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from agents.episodes import read_evaluation
from agents.outputs import VALUE
from attribution.checking.agent_checks import CHECK_FILES
from attribution.checking.deletion import RANDOM
from attribution.checking.object_scores import OBJECT_FILES, read_names
from common.errors import UserError
from common.results import ResultStore
from stats.claims import Finding
from stats.series import correlation_findings, series_of, series_schema, with_correlations

AXIS = "number of training levels"
TRAINING, UNSEEN, GAP = ("success on training levels", "success on unseen levels",
                         "generalisation gap")
SCORE, KINDS, DELETION = "object score", "kinds of object named", "area gained by deletion"
LEVEL_SERIES = series_schema("python -m attribution.series")


def level_series(folders: Sequence[Path], seen_first_frames: bool = False) -> pd.DataFrame:
    """Return the table ``series.csv`` of a series of agents.

    Args:
        folders: folder of each agent.
        seen_first_frames: whether unseen levels may start with the first frame of a training level.

    Raises:
        UserError: if an evaluation or the object scores of an agent are missing or damaged, or
            agents differ in their layers or checks.
    """
    agents = series_of(row for folder in folders for row in _measures(folder, seen_first_frames))
    for measure, rows in agents.groupby("measure", sort=False):
        missing = {folder.name for folder in folders} - set(rows["agent"])
        if missing:
            raise UserError(f"{', '.join(sorted(missing))}: no number for '{measure}', which other "
                            "agents have")
    return with_correlations(agents)


def _measures(folder: Path, seen_first_frames: bool) -> Iterator[tuple]:
    """Yield the rows of one agent in ``series.csv``; see ``level_series``."""
    training, unseen = (_evaluation(folder / name) for name in ("training.json", "unseen.json"))
    number = training["env"]["num_levels"]
    if not number or unseen["env"]["num_levels"] == number:
        raise UserError(f"{folder}: training.json must be of the training levels "
                        "(--training_levels) and unseen.json of others")
    if not (unseen.get("new_first_frames") or seen_first_frames):
        raise UserError(f"{folder / 'unseen.json'}: unseen levels may start with the first frame "
                        "of a training level; evaluate with --new_first_frames, or compare with "
                        "--seen_first_frames")
    agent = number, folder.name
    shares = [(result["success_rate"], *result["success_interval"])
              for result in (training, unseen)]
    for measure, ends, result in zip((TRAINING, UNSEEN), shares, (training, unseen)):
        yield *agent, measure, *ends, result["num_episodes"]
    yield *agent, GAP, *newcombe_difference(*shares), unseen["num_episodes"]
    objects = ResultStore(folder / "objects", OBJECT_FILES)
    for layer in objects.keys("names"):
        names = read_names(objects, layer)
        if names["score"] is None:
            raise UserError(f"{objects.path}: a feature of the layer '{layer}' has no object "
                            "score; record more episodes")
        yield (*agent, f"{SCORE}, {layer}", names["score"], names["score_low_95"],
               names["score_high_95"], objects.settings("num_observations")["num_observations"])
        # The number of unique detectors of Bau et al. (2017), "Network Dissection".
        kinds = {feature["name"] for feature in names["features"]} - {None}
        yield *agent, f"{KINDS}, {layer}", len(kinds), np.nan, np.nan, len(names["features"])
    checks = ResultStore(folder / "checks", CHECK_FILES)
    if checks.has("deletion_table"):
        table = checks.read("deletion_table")
        for check in table[(table["kind"] == "deletion") & (table["other"] == RANDOM)
                           & (table["output"] == VALUE)].itertuples():
            yield (*agent, f"{DELETION}, {check.layer}", check.better, check.low_95,
                   check.high_95, checks.settings("num_frames")["num_frames"])


def _evaluation(path: Path) -> dict:
    """Read a file of ``evaluate.py --output``."""
    if result := read_evaluation(path, {"env": {"num_levels": int}}):
        return result
    raise UserError(f"{path} is missing; write it with evaluate.py --output")


def newcombe_difference(first: tuple[float, float, float], second: tuple[float, float, float]
                        ) -> tuple[float, float, float]:
    """Return the difference of two independent shares and the ends of its 95 % interval by Newcombe
    (1998), method 10.

    Args:
        first, second: shares with the lower and upper ends of their Wilson intervals. The second is
            subtracted from the first.
    """
    difference = first[0] - second[0]
    below = np.hypot(first[0] - first[1], second[2] - second[0])
    above = np.hypot(first[2] - first[0], second[0] - second[1])
    return difference, float(difference - below), float(difference + above)


def level_findings(path: Path, layer: str) -> list[Finding]:
    """Return the findings of a series for row R9 of the table of claims.

    The claim is not judged, because an untrained agent's features have high object scores too.

    Args:
        path: folder of the series.
        layer: short name of the layer whose object score comes first.
    """
    findings = correlation_findings(ResultStore(path, LEVEL_SERIES).read("series"),
                                    "training levels")
    return sorted(findings, key=lambda finding: f"{SCORE}, {layer}," not in finding.measure)

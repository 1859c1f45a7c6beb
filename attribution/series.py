"""Compare agents that were trained on different numbers of levels, see ``SeriesOptions``.

Each agent has a folder with training.json (evaluate.py --training_levels --output), unseen.json
(evaluate.py --new_first_frames --output), and the folders objects and, optionally, checks of the
studies.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pandas as pd

from attribution.config import ANALYSES
from attribution.training_levels import (
    AXIS,
    DELETION,
    GAP,
    KINDS,
    LEVEL_SERIES,
    SCORE,
    TRAINING,
    UNSEEN,
    level_series,
)
from common.options import Options, command, option
from common.results import ResultStore
from stats.series import correlation_findings, write_series


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeriesOptions(Options):
    """Compare agents that were trained on different numbers of levels: success on training levels
    and on unseen levels, object scores of features, and a check of attributions."""

    studies: tuple[Path, ...] = option(help="folder of each agent", metavar="FOLDER")
    seen_first_frames: bool = option(
        False, "accept unseen levels that start with the first frame of a training level")
    output_dir: Path = option(
        ANALYSES / "levels", "folder to write to; attribution.table shows the folder 'levels' of "
                             "an agent's studies in row R9")


def compare_agents(options: SeriesOptions) -> pd.DataFrame:
    """Write the comparison, and return its table (see ``level_series``)."""
    table = level_series(options.studies, options.seen_first_frames)
    measures = list(dict.fromkeys(table["measure"]))
    panels = {"success": [TRAINING, UNSEEN, GAP], **{
        kind: [name for name in measures if name.startswith(f"{kind}, ")]
        for kind in (SCORE, KINDS, DELETION)}}
    panels = {title: names for title, names in panels.items() if names}
    notes = ("Ranges in brackets are 95 % intervals: Wilson's for shares of levels, Newcombe's for "
             "the generalisation gap (success on training levels minus success on unseen levels), "
             "and a bootstrap over episodes for object scores and deletion. The area gained by "
             "deletion is in standard deviations of the value, compared with a random order of "
             "the cells. Intervals of rank correlations cover the variation between agents.")
    write_series(ResultStore(options.output_dir, LEVEL_SERIES), {
        "studies": [str(folder) for folder in options.studies]}, table, AXIS, panels, notes,
        logarithmic=True)
    for finding in correlation_findings(table, AXIS):
        print(f"{finding.measure}: {finding.value:.2f}")
    print(f"wrote report.md, series.png and series.csv to {options.output_dir}")
    return table


main = command(SeriesOptions, compare_agents)

if __name__ == "__main__":
    raise SystemExit(main())

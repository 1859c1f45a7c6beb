"""Maze agents that differ in the cheese region of their training, or in training steps.

All agents must have played the same levels with maze.behaviour, in <folder>/behaviour. If an agent
also has a study of maze.steering in <folder>/steering, the effect of the cheese vector is added.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pandas as pd

from common.errors import UserError
from common.options import Options, command, option
from common.results import ResultStore
from maze.studies.series import (
    AXES,
    MEASURES,
    REGION,
    SERIES_FILES,
    STEPS,
    read_levels,
    series_table,
)
from stats.series import correlation_findings, write_series


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeriesOptions(Options):
    """Compare maze agents that differ in the cheese region of their training, or in training
    steps."""

    studies: tuple[Path, ...] = option(help="folders of studies, one per agent", metavar="FOLDER")
    numbers: tuple[float, ...] = option(
        help="cheese region or training steps of each agent, in the order of --studies",
        metavar="N")
    by: str = option(REGION, "quantity that --numbers gives", choices=tuple(AXES))
    output_dir: Path = option(Path("analysis") / "maze" / "series", "folder to write to")


def compare_agents(options: SeriesOptions) -> pd.DataFrame:
    """Write table, figure and report to ``options.output_dir``, and return the table, with rows as
    in ``series_table``."""
    if len(options.numbers) != len(options.studies) or len(set(options.numbers)) < 2:
        raise UserError("--numbers needs a number for each folder of --studies, and at least two "
                        "different ones")
    levels = read_levels(options.studies)
    table = series_table(options.numbers, options.studies, levels)
    notes = (f"All agents played the same {len(levels[0])} levels, in which the cheese lies "
             "outside the region of maze.behaviour. Shares have Wilson's 95 % interval; means have "
             "a bootstrap interval over levels. Intervals of rank correlations cover the "
             "variation between agents.")
    write_series(ResultStore(options.output_dir, SERIES_FILES), {
        "by": options.by, "numbers": options.numbers,
        "studies": [str(folder) for folder in options.studies]}, table, AXES[options.by],
        {"": MEASURES}, notes, logarithmic=options.by == STEPS)
    for finding in correlation_findings(table, AXES[options.by]):
        print(f"{finding.measure}: {finding.value:.2f}")
    print(f"wrote report.md, series.png and series.csv to {options.output_dir}")
    return table


main = command(SeriesOptions, compare_agents)

if __name__ == "__main__":
    raise SystemExit(main())

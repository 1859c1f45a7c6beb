"""Compare agents that were trained on different numbers of levels: success on training levels and
on unseen levels, object scores of features, and a check of attributions.

Each agent has a folder with training.json (evaluate.py --training_levels --output), unseen.json
(evaluate.py --new_first_frames --output), and the folders objects and, optionally, checks of the
studies.
"""

from __future__ import annotations

from pathlib import Path

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
from common.cli import Parser
from common.errors import script_main
from common.results import ResultStore
from stats.series import correlation_findings, write_series


def parser() -> Parser:
    flags = Parser(__doc__)
    flags.add_argument("--studies", type=Path, nargs="+", required=True, metavar="FOLDER",
                       help="folder of each agent")
    flags.add_argument("--seen_first_frames", action="store_true",
                       help="accept unseen levels that start with the first frame of a training "
                            "level")
    flags.add_argument("--output_dir", type=Path, default=Path("analysis/attribution/levels"),
                       help="folder to write to; attribution.table shows the folder 'levels' of an "
                            "agent's studies in row R9")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    table = level_series(args.studies, args.seen_first_frames)
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
    write_series(ResultStore(args.output_dir, LEVEL_SERIES), {
        "studies": [str(folder) for folder in args.studies]}, table, AXIS, panels, notes,
        logarithmic=True)
    for finding in correlation_findings(table, AXIS):
        print(f"{finding.measure}: {finding.value:.2f}")
    print(f"wrote report.md, series.png and series.csv to {args.output_dir}")


if __name__ == "__main__":
    raise SystemExit(main())

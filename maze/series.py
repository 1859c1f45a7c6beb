"""Compare maze agents that differ in the cheese region of their training, or in training steps.

All agents must have played the same levels with maze.behaviour, in <folder>/behaviour. If an agent
also has a study of maze.steering in <folder>/steering, the effect of the cheese vector is added.
"""

from __future__ import annotations

from pathlib import Path

from common.cli import Parser
from common.errors import UserError, script_main
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


def parser() -> Parser:
    flags = Parser(__doc__)
    flags.add_argument("--studies", type=Path, nargs="+", required=True, metavar="FOLDER",
                       help="folders of studies, one per agent")
    flags.add_argument("--numbers", type=float, nargs="+", required=True, metavar="N",
                       help="cheese region or training steps of each agent, in the order of "
                            "--studies")
    flags.add_argument("--by", choices=tuple(AXES), default=REGION,
                       help="quantity that --numbers gives")
    flags.add_argument("--output_dir", type=Path, default=Path("analysis") / "maze" / "series",
                       help="folder to write to")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    if len(args.numbers) != len(args.studies) or len(set(args.numbers)) < 2:
        raise UserError("--numbers needs a number for each folder of --studies, and at least two "
                        "different ones")
    levels = read_levels(args.studies)
    table = series_table(args.numbers, args.studies, levels)
    notes = (f"All agents played the same {len(levels[0])} levels, in which the cheese lies "
             "outside the region of maze.behaviour. Shares have Wilson's 95 % interval; means have "
             "a bootstrap interval over levels. Intervals of rank correlations cover the "
             "variation between agents.")
    write_series(ResultStore(args.output_dir, SERIES_FILES), {
        "by": args.by, "numbers": args.numbers,
        "studies": [str(folder) for folder in args.studies]}, table, AXES[args.by],
        {"": MEASURES}, notes, logarithmic=args.by == STEPS)
    for finding in correlation_findings(table, AXES[args.by]):
        print(f"{finding.measure}: {finding.value:.2f}")
    print(f"wrote report.md, series.png and series.csv to {args.output_dir}")


if __name__ == "__main__":
    raise SystemExit(main())

"""Write a table that compares published claims about maze agents with the results of the studies
of one or more agents.

Each tested claim has one test per agent; the p-values of an agent's tests are corrected together
by Holm's method.
"""

from __future__ import annotations

from pathlib import Path

from common.cli import Parser
from common.errors import UserError, script_main
from maze.studies.claims import CLAIMS, StudiesFolder, findings_of
from stats.claims import FINDINGS_NAME, TABLE_NAME


def parser() -> Parser:
    flags = Parser(__doc__)
    flags.add_argument("--studies", type=Path, nargs="+", required=True, metavar="FOLDER",
                       help="folders with the studies of one agent each, named after the agent; "
                            "run_pipeline.py --preset maze writes them to analysis/maze/<agent>")
    flags.add_argument("--output_dir", type=Path, default=Path("analysis") / "maze" / "table",
                       help="folder to write to")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    store = CLAIMS.store(args.output_dir)
    names = [folder.resolve().name for folder in args.studies]
    if len(set(names)) < len(names):
        raise UserError("the folders of --studies must have different names, which become the "
                        f"table's columns, not {', '.join(names)}")
    findings, reasons = {}, {}
    for name, folder in zip(names, args.studies):
        findings[name], reasons[name] = findings_of(StudiesFolder(folder))
    if not any(findings.values()):
        raise UserError(f"none of the folders holds a study: {', '.join(map(str, args.studies))}")
    CLAIMS.write(store, {"studies": dict(zip(names, map(str, args.studies)))}, findings,
                 reasons)
    rows = {name: {finding.row for finding in numbers} for name, numbers in findings.items()}
    print(*(f"{name}: numbers in {len(numbered)} of {len(CLAIMS.claims)} rows"
            for name, numbered in rows.items()), sep="\n")
    print(f"wrote {args.output_dir / TABLE_NAME} and {FINDINGS_NAME} next to it: "
          f"{CLAIMS.summary(args.output_dir)}")


if __name__ == "__main__":
    raise SystemExit(main())

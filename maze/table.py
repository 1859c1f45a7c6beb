"""Table of published claims about maze agents.

Each tested claim has one test per agent; the p-values of an agent's tests are corrected together
by Holm's method.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from common.errors import UserError
from common.options import Options, command, option
from maze.studies.claims import CLAIMS, StudiesFolder, findings_of
from stats.claims import FINDINGS_NAME, TABLE_NAME


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableOptions(Options):
    """Write a table that compares published claims about maze agents with the results of the
    studies of one or more agents."""

    studies: tuple[Path, ...] = option(
        help="folders with the studies of one agent each, named after the agent; run_pipeline.py "
             "--preset maze writes them to analysis/maze/<agent>", metavar="FOLDER")
    output_dir: Path = option(Path("analysis") / "maze" / "table", "folder to write to")


def compare_claims(options: TableOptions) -> Path:
    """Write the table to ``options.output_dir``, and return its path."""
    store = CLAIMS.store(options.output_dir)
    names = [folder.resolve().name for folder in options.studies]
    if len(set(names)) < len(names):
        raise UserError("the folders of --studies must have different names, which become the "
                        f"table's columns, not {', '.join(names)}")
    findings, reasons = {}, {}
    for name, folder in zip(names, options.studies):
        findings[name], reasons[name] = findings_of(StudiesFolder(folder))
    if not any(findings.values()):
        raise UserError("none of the folders holds a study: "
                        f"{', '.join(map(str, options.studies))}")
    CLAIMS.write(store, {"studies": dict(zip(names, map(str, options.studies)))}, findings,
                 reasons)
    rows = {name: {finding.row for finding in numbers} for name, numbers in findings.items()}
    print(*(f"{name}: numbers in {len(numbered)} of {len(CLAIMS.claims)} rows"
            for name, numbered in rows.items()), sep="\n")
    path = options.output_dir / TABLE_NAME
    print(f"wrote {path} and {FINDINGS_NAME} next to it: {CLAIMS.summary(options.output_dir)}")
    return path


main = command(TableOptions, compare_claims)

if __name__ == "__main__":
    raise SystemExit(main())

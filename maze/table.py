"""The table of findings on maze agents: what was published, and what the studies of one or several
agents show, with intervals, and one test a row corrected over the table."""

from __future__ import annotations

from pathlib import Path

from common.cli import Parser
from common.errors import UserError, script_main
from maze.studies.claims import CLAIMS, SCRIPT
from maze.studies.results import StudiesFolder
from maze.studies.study_rows import findings_of
from stats.claims import FindingsFolder

NOTES = (
    "Brackets: 95 % intervals; shares Wilson's, others by bootstrap over levels. An effect is "
    "given as the number without and with the patch, and its change. **Bold**: the one number of a "
    "row that is tested: p of a paired sign-flip test after Holm's correction over the agent's "
    "column, and the share of matched controls with as large an effect. Claimed: both are at most "
    "0.05 and the interval leaves 0 out.",
    "Agents that one teacher taught share what they have of it: where they agree, that is partly "
    "inheritance. Their model cards say how close they stayed.",
    "Row 17: the published numbers are a norm that shrinks with a maze's size, which findings.csv "
    "also has.")


def parser() -> Parser:
    flags = Parser(__doc__)
    flags.add_argument("--studies", type=Path, nargs="+", required=True, metavar="FOLDER",
                       help="folders of the studies of an agent each, with the name of the agent, "
                            "as run_pipeline.py --preset maze writes them to analysis/maze/<agent>")
    flags.add_argument("--output_dir", type=Path, default=Path("analysis") / "maze" / "table",
                       help="folder to write to")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    names = [folder.resolve().name for folder in args.studies]
    if len(set(names)) < len(names):
        raise UserError(f"two of --studies have the same name; they are columns of the table: "
                        f"{', '.join(names)}")
    found, reasons = {}, {}
    for name, folder in zip(names, args.studies):
        found[name], reasons[name] = findings_of(StudiesFolder(folder))
    if not any(found.values()):
        raise UserError(f"none of the folders holds a study: {', '.join(map(str, args.studies))}")
    output = FindingsFolder(args.output_dir, CLAIMS, SCRIPT)
    output.save(found, reasons, NOTES)
    for name, numbers in found.items():
        rows = {each.row for each in numbers}
        print(f"{name}: numbers in {len(rows)} of {len(CLAIMS)} rows")
    print(f"wrote {output.table_file} and {output.findings_file.name} beside it: {output.result()}")


if __name__ == "__main__":
    raise SystemExit(main())

"""Write a table that compares claims of the literature about the memory of agents with the findings
in the studies of one or more agents."""

from __future__ import annotations

from pathlib import Path

from analysis.memory.table import CLAIMS, READERS, SCRIPTS, MemoryTables
from common.cli import Parser
from common.errors import UserError, script_main
from stats.claims import TABLE_NAME, agent_names, read_rows


def parser() -> Parser:
    flags = Parser(__doc__)
    flags.add_argument("--studies", type=Path, nargs="+", required=True, metavar="FOLDER",
                       help="one folder of studies per agent, such as analysis/memory, with the "
                            "subfolders lesions/, probe_atlas/, probe_interventions/, "
                            "sparse_features/ and feature_dreams/; studies may be missing")
    flags.add_argument("--labels", nargs="+", metavar="NAME",
                       help="names of the agents; if not given, the names of the folders")
    flags.add_argument("--output_dir", type=Path, default=Path("analysis/memory/table"),
                       help="folder to write to")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    store = CLAIMS.store(args.output_dir)
    names = agent_names(args.studies, args.labels)
    findings, reasons = {}, {}
    for name, folder in zip(names, args.studies):
        findings[name] = read_rows(READERS.items(), MemoryTables(folder))
        rows = {finding.row for finding in findings[name]}
        if not rows:
            raise UserError(f"{folder} contains no study of the memory; run "
                            "analysis/memory_lesions.py first")
        reasons[name] = {row: f"analysis/{script}.py has not been run"
                         for row, script in SCRIPTS.items() if row not in rows}
        print(f"{name}: numbers in {len(rows)} of {len(CLAIMS.claims)} rows")
    CLAIMS.write(store, {"studies": dict(zip(names, map(str, args.studies)))}, findings,
                 reasons)
    print(f"wrote {args.output_dir / TABLE_NAME}: {CLAIMS.summary(args.output_dir)}")


if __name__ == "__main__":
    raise SystemExit(main())

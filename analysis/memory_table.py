"""Table of claims about the memory of agents, with findings."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from analysis.memory.table import CLAIMS, READERS, SCRIPTS, MemoryTables
from common.errors import UserError
from common.options import Options, command, option
from stats.claims import TABLE_NAME, agent_names, read_rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryTableOptions(Options):
    """Write a table that compares claims of the literature about the memory of agents with the
    findings in the studies of one or more agents."""

    studies: tuple[Path, ...] = option(
        help="one folder of studies per agent, such as analysis/memory, with the subfolders "
             "lesions/, probe_atlas/, probe_interventions/, sparse_features/ and feature_dreams/; "
             "studies may be missing", metavar="FOLDER")
    labels: tuple[str, ...] | None = option(
        None, "names of the agents; if not given, the names of the folders", metavar="NAME")
    output_dir: Path = option(Path("analysis/memory/table"), "folder to write to")


def write_table(options: MemoryTableOptions) -> Path:
    """Write the table, and return its path."""
    store = CLAIMS.store(options.output_dir)
    names = agent_names(options.studies, options.labels)
    findings, reasons = {}, {}
    for name, folder in zip(names, options.studies):
        findings[name] = read_rows(READERS.items(), MemoryTables(folder))
        rows = {finding.row for finding in findings[name]}
        if not rows:
            raise UserError(f"{folder} contains no study of the memory; run "
                            "analysis/memory_lesions.py first")
        reasons[name] = {row: f"analysis/{script}.py has not been run"
                         for row, script in SCRIPTS.items() if row not in rows}
        print(f"{name}: numbers in {len(rows)} of {len(CLAIMS.claims)} rows")
    CLAIMS.write(store, {"studies": dict(zip(names, map(str, options.studies)))}, findings,
                 reasons)
    path = options.output_dir / TABLE_NAME
    print(f"wrote {path}: {CLAIMS.summary(options.output_dir)}")
    return path


main = command(MemoryTableOptions, write_table)

if __name__ == "__main__":
    raise SystemExit(main())

"""Compare the claims of "Understanding RL Vision" with findings, see ``TableOptions``."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from attribution.claims import CLAIMS, NOT_RUN, READERS, AgentStudies
from attribution.config import ANALYSES
from common.cli import seed
from common.errors import UserError, nearest
from common.options import Options, command, option
from stats.claims import FINDINGS_NAME, TABLE_NAME, agent_names, read_rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableOptions(Options):
    """Write a table that compares the claims of "Understanding RL Vision" about CoinRun agents with
    the findings in the studies of one or more agents. Most findings have confidence intervals."""

    studies: tuple[Path, ...] = option(
        help="one folder of studies per agent, such as analysis/attribution, with the subfolders "
             "attribution/, features/, objects/, checks/, causes/ and levels/", metavar="FOLDER")
    labels: tuple[str, ...] | None = option(
        None, "names of the agents; if not given, the names of the folders", metavar="NAME")
    layers: tuple[str, ...] | None = option(
        None, "layer to show for findings that exist per layer: one per agent, or one for all "
              "agents; the middle layer if not given", metavar="LAYER")
    seed: int = option(0, "seed of the bootstraps", type=seed)
    output_dir: Path = option(ANALYSES / "table", "folder to write to")


def compare_claims(options: TableOptions) -> Path:
    """Write the table, and return its file."""
    store = CLAIMS.store(options.output_dir)
    names = agent_names(options.studies, options.labels)
    shown = options.layers or (None,)
    if len(shown) not in (1, len(names)):
        raise UserError(f"--layers names {len(shown)} layers for {len(names)} agents; give one, or "
                        "one for each")
    findings, reasons = {}, {}
    for name, folder, layer in zip(names, options.studies, shown * (len(names) // len(shown))):
        studies = AgentStudies(folder)
        layer = layer or [*studies.features][len(studies.features) // 2]
        if layer not in studies.features:
            raise UserError(f"{folder} has no attributions to a layer '{layer}'"
                            f"{nearest(layer, studies.features)}")
        findings[name] = read_rows(READERS.items(), studies, layer, options.seed)
        rows = {finding.row for finding in findings[name]}
        reasons[name] = {row: reason for row, reason in NOT_RUN.items() if row not in rows}
        print(f"{name}, layer {layer}: numbers in {len(rows)} of {len(CLAIMS.claims)} rows")
    CLAIMS.write(store, {"studies": dict(zip(names, map(str, options.studies))),
                         "layers": options.layers, "seed": options.seed}, findings, reasons)
    table = options.output_dir / TABLE_NAME
    print(f"wrote {table} and {FINDINGS_NAME} next to it: {CLAIMS.summary(options.output_dir)}")
    return table


main = command(TableOptions, compare_claims)

if __name__ == "__main__":
    raise SystemExit(main())

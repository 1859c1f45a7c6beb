"""Write a table that compares the claims of "Understanding RL Vision" about CoinRun agents with the
findings in the studies of one or more agents. Most findings have confidence intervals."""

from __future__ import annotations

from pathlib import Path

from attribution.claims import _ROWS, CLAIMS, NOT_RUN, AgentStudies
from common.cli import Parser, seed
from common.errors import UserError, nearest, script_main
from stats.claims import FINDINGS_NAME, TABLE_NAME, agent_names, read_rows


def parser() -> Parser:
    flags = Parser(__doc__)
    flags.add_argument("--studies", type=Path, nargs="+", required=True, metavar="FOLDER",
                       help="one folder of studies per agent, such as analysis/attribution, with "
                            "the subfolders attribution/, features/, objects/, checks/, "
                            "causes/ and levels/")
    flags.add_argument("--labels", nargs="+", metavar="NAME",
                       help="names of the agents; if not given, the names of the folders")
    flags.add_argument("--layers", nargs="+", metavar="LAYER",
                       help="layer to show for findings that exist per layer: one per agent, or "
                            "one for all agents; the middle layer if not given")
    flags.add_argument("--seed", type=seed, default=0, help="seed of the bootstraps")
    flags.add_argument("--output_dir", type=Path, default=Path("analysis/attribution/table"),
                       help="folder to write to")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    store = CLAIMS.store(args.output_dir)
    names = agent_names(args.studies, args.labels)
    shown = args.layers or [None]
    if len(shown) not in (1, len(names)):
        raise UserError(f"--layers names {len(shown)} layers for {len(names)} agents; give one, or "
                        "one for each")
    findings, reasons = {}, {}
    for name, folder, layer in zip(names, args.studies, shown * (len(names) // len(shown))):
        studies = AgentStudies(folder)
        layer = layer or [*studies.features][len(studies.features) // 2]
        if layer not in studies.features:
            raise UserError(f"{folder} has no attributions to a layer '{layer}'"
                            f"{nearest(layer, studies.features)}")
        findings[name] = read_rows(_ROWS.items(), studies, layer, args.seed)
        rows = {finding.row for finding in findings[name]}
        reasons[name] = {row: reason for row, reason in NOT_RUN.items() if row not in rows}
        print(f"{name}, layer {layer}: numbers in {len(rows)} of {len(CLAIMS.claims)} rows")
    CLAIMS.write(store, {"studies": dict(zip(names, map(str, args.studies))),
                         "layers": args.layers, "seed": args.seed}, findings, reasons)
    print(f"wrote {args.output_dir / TABLE_NAME} and {FINDINGS_NAME} next to it: "
          f"{CLAIMS.summary(args.output_dir)}")


if __name__ == "__main__":
    raise SystemExit(main())

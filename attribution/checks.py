"""Check an agent's attributions by experiment: do they add up, do the cells matter that they say,
do they tell of what the network learned, and do outputs change as attributed when a feature is
taken out of a layer, or an object out of the real game?

A killed run continues after the last layer; more checks, layers and outputs can be added later.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from agents.outputs import VALUE, outputs_named
from attribution.checking.check_files import CHECKS, ChecksFolder
from attribution.checking.check_report import report, verdict
from attribution.checking.checked_frames import draw_frames
from attribution.checking.checks_of_agent import AgentChecks, Subject
from attribution.checking.sources import check_attributions
from attribution.context import AttributionContext, add_agent_flags, add_output_flags
from attribution.layers import find_bottlenecks
from attribution.results import AttributionFolder
from common.cli import Parser, count, set_up_logging
from common.errors import UserError, script_main
from common.files import sha256, versions

ANALYSES = Path("analysis") / "attribution"


def parser() -> Parser:
    flags = Parser(__doc__)
    add_agent_flags(flags)
    flags.add_argument("--features_dir", type=Path, default=ANALYSES / "features",
                       help="folder of python -m attribution.features")
    flags.add_argument("--attribution_dir", type=Path, default=ANALYSES / "attribution",
                       help="folder of python -m attribution.attribute; its layers with cells if "
                            "--layers is not given")
    flags.add_argument("--checks", nargs="+", choices=CHECKS, default=list(CHECKS),
                       metavar="CHECK", help=f"what to check: {', '.join(CHECKS)}; completeness is "
                                             "always in the report")
    flags.add_argument("--outputs", nargs="+", metavar="OUTPUT", default=[VALUE],
                       help="outputs whose attributions are checked")
    flags.add_argument("--num_frames", type=count, default=1000,
                       help="frames, drawn from all trajectories")
    add_output_flags(flags, "checks")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    set_up_logging(args.log_level)
    attributions = AttributionFolder(args.attribution_dir)
    # Checks that were made before stay in the report, so every layer is opened.
    everything = argparse.Namespace(**{**vars(args), "layers": None, "allow_partial": True})
    context = AttributionContext(everything, attributions.layers())
    check_attributions(attributions, context)
    subjects = subjects_of(args.features_dir, context, attributions)
    asked = asked_of(args, context, subjects)
    frames = draw_frames(attributions, args.num_frames, args.seed)
    what = (f"{len(frames.step)} frames of {len(set(frames.episodes))} episodes of "
            f"{args.agent_file.name}; "
            + ", ".join(f"{output} at {layer}" for layer, output in (
                subject.name for subject in asked)))
    if args.dry_run:
        print(f"{what}; checks: {', '.join(args.checks)}")
        return
    folder = ChecksFolder(args.output_dir)
    folder.open({**context.provenance, "attributions": attributions.settings(),
                 "trajectories_sha256": sha256(attributions.trajectories_file),
                 "num_frames": args.num_frames, "seed": args.seed, "versions": versions()},
                args.overwrite)
    checks = AgentChecks(context, attributions, subjects, frames, folder, args.seed)
    checks.make(args.checks, asked)
    tables = checks.write()
    folder.add_report(report(tables, f"{len(frames.step)} frames of {len(set(frames.episodes))} "
                                     f"episodes of {args.agent_file.name}."))
    for check, table in tables.items():
        print(f"{check}: {verdict(check, table)}")
    print(f"wrote {folder.report_file}")


def subjects_of(features_dir: Path, context: AttributionContext,
                attributions: AttributionFolder) -> list[Subject]:
    """All that is attributed to layers with cells.

    Raises:
        UserError: if a layer is attributed to other features than those given.
    """
    found = []
    for bottleneck in context.bottlenecks:
        if not bottleneck.layer.is_map:
            continue
        features = context.features(features_dir, bottleneck)
        if attributions.layer_settings(bottleneck.name).get("features_sha256") != features.checksum:
            raise UserError(f"the attributions in {attributions.path} to {bottleneck.name} are of "
                            f"other features than those in {features_dir}; name the right "
                            "--features_dir, or make the attributions again")
        found += [Subject(bottleneck, features, output)
                  for output in outputs_named(attributions.outputs(bottleneck.name))]
    return found


def asked_of(args: argparse.Namespace, context: AttributionContext,
             subjects: Sequence[Subject]) -> list[Subject]:
    """Subjects that the flags ask for.

    Raises:
        UserError: if it is not attributed.
    """
    outputs = [output.name for output in outputs_named(args.outputs)]
    layers = [bottleneck.name for bottleneck in find_bottlenecks(
        context.policy, args.layers, allow_bypassed=True)
              ] if args.layers else [subject.bottleneck.name for subject in subjects]
    found = [subject for subject in subjects
             if subject.output.name in outputs and subject.bottleneck.name in layers]
    if not found:
        where = ", ".join(dict.fromkeys(layers)) or "a layer with cells"
        raise UserError(f"{args.attribution_dir} holds no attributions of "
                        f"{', '.join(args.outputs)} to {where}; python -m attribution.attribute "
                        "makes them")
    return found


if __name__ == "__main__":
    raise SystemExit(main())

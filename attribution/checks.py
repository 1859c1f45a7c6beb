"""Check an agent's attributions by experiment. Do they sum to the change of the output? Do cells
with large attributions matter? Do attributions depend on what the network learned? Do outputs
change as attributed when a feature is ablated in a layer, or an object is not rendered?

A killed run resumes after the last layer; more checks, layers and outputs can be added later.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from agents.outputs import VALUE, outputs_named
from attribution.checking.agent_checks import CHECK_FILES, CHECKS, report, run_checks
from attribution.checking.check import (
    CheckContext,
    Subject,
)
from attribution.context import AttributionContext, add_agent_flags, add_output_flags
from attribution.results import AttributionStore
from common.cli import Parser, count, set_up_logging
from common.errors import UserError, script_main
from common.files import sha256, versions
from common.results import ResultStore

ANALYSES = Path("analysis") / "attribution"


def parser() -> Parser:
    flags = Parser(__doc__)
    add_agent_flags(flags)
    flags.add_argument("--features_dir", type=Path, default=ANALYSES / "features",
                       help="output folder of python -m attribution.features")
    flags.add_argument("--attribution_dir", type=Path, default=ANALYSES / "attribution",
                       help="output folder of python -m attribution.attribute; without --layers, "
                            "all of its layers with a spatial map are checked")
    flags.add_argument("--checks", nargs="+", choices=tuple(CHECKS), default=list(CHECKS),
                       metavar="CHECK", help=f"checks to run: {', '.join(CHECKS)}; completeness is "
                                             "always reported")
    flags.add_argument("--outputs", nargs="+", metavar="OUTPUT", default=[VALUE],
                       help="outputs whose attributions are checked")
    flags.add_argument("--num_frames", type=count, default=1000,
                       help="maximum number of frames, drawn from all trajectories")
    add_output_flags(flags, "checks")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    set_up_logging(args.log_level)
    attributions = AttributionStore(args.attribution_dir)
    # Earlier checks stay in the report, so every layer is opened.
    context = AttributionContext(
        argparse.Namespace(**{**vars(args), "layers": None, "allow_partial": True}),
        attributions.layers())
    attributions.check_source(context.agents, context.recording.sha256)
    subjects = attributed_subjects(args.features_dir, context, attributions)
    outputs = [output.name for output in outputs_named(args.outputs)]
    chosen = [subject for subject in subjects if subject.output.name in outputs and (
        not args.layers
        or {subject.bottleneck.name, subject.bottleneck.layer.name} & set(args.layers))]
    if not chosen:
        raise UserError(f"{args.attribution_dir} holds no attributions of "
                        f"{', '.join(args.outputs)} to {', '.join(args.layers or ('any layer',))} "
                        "with a spatial map; compute them with python -m attribution.attribute")
    steps = attributions.trajectories()
    rows = np.sort(np.random.default_rng(args.seed).permutation(len(steps))[:args.num_frames])
    checked = CheckContext(context, attributions, rows, steps.frame_ids[rows], args.seed)
    what = (f"{len(rows)} frames of {len(set(checked.episodes))} episodes of "
            f"{args.agent_file.name}")
    if args.dry_run:
        print(f"{what}; {', '.join(' at '.join(subject.name[::-1]) for subject in chosen)}; "
              f"checks: {', '.join(args.checks)}")
        return
    store = ResultStore(args.output_dir, CHECK_FILES)
    store.open({**context.provenance, "attributions": attributions.settings(),
                "trajectories_sha256": sha256(attributions.file_of("trajectories")),
                "num_frames": args.num_frames, "seed": args.seed, "versions": versions()},
               args.overwrite)
    tables = run_checks(store, checked, args.checks, chosen, subjects)
    store.write("report", value=report(tables, f"{what}."))
    for name, table in tables.items():
        print(f"{name}: {CHECKS[name].verdict(table)}")
    print(f"wrote {store.file_of('report')}")


def attributed_subjects(features_dir: Path, context: AttributionContext,
                        attributions: AttributionStore) -> list[Subject]:
    """Return one subject for each layer with a spatial map and each output attributed to it.

    Args:
        features_dir: folder of the features of all layers.
        context: the agent, its recording and its layers.
        attributions: attributions of the agent.

    Raises:
        UserError: if the features of a layer are missing, damaged or belong to another agent, or
            the attributions to it use other features.
    """
    subjects = []
    for layer in (layer for layer in context.bottlenecks if layer.layer.is_map):
        features = context.features(features_dir, layer)
        attributions.check_features(features)
        subjects += [Subject(layer, features, output)
                     for output in outputs_named(attributions.outputs(layer.name))]
    return subjects


if __name__ == "__main__":
    raise SystemExit(main())

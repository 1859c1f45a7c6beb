"""Check an agent's attributions by experiment, see ``ChecksOptions``.

A killed run resumes after the last layer; more checks, layers and outputs can be added later.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from agents.outputs import VALUE, outputs_named
from attribution.checking.agent_checks import CHECK_FILES, CHECKS, report, run_checks
from attribution.checking.check import CheckContext, Subject
from attribution.config import ANALYSES
from attribution.context import AttributionContext, AttributionOptions
from attribution.results import AttributionStore
from common.cli import count
from common.errors import UserError
from common.files import sha256, versions
from common.options import command, option
from common.results import ResultStore


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChecksOptions(AttributionOptions):
    """Check an agent's attributions by experiment. Do they sum to the change of the output? Do
    cells with large attributions matter? Do attributions depend on what the network learned? Do
    outputs change as attributed when a feature is ablated in a layer, or an object is not
    rendered?"""

    features_dir: Path = option(ANALYSES / "features",
                                "output folder of python -m attribution.features")
    attribution_dir: Path = option(
        ANALYSES / "attribution", "output folder of python -m attribution.attribute; without "
                                  "--layers, all of its layers with a spatial map are checked")
    checks: tuple[str, ...] = option(
        tuple(CHECKS), f"checks to run: {', '.join(CHECKS)}; completeness is always reported",
        choices=tuple(CHECKS), metavar="CHECK")
    outputs: tuple[str, ...] = option((VALUE,), "outputs whose attributions are checked",
                                      metavar="OUTPUT")
    num_frames: int = option(1000, "maximum number of frames, drawn from all trajectories",
                             type=count)
    output_dir: Path = option(ANALYSES / "checks", "folder to write to")

    def chosen(self, subjects: Sequence[Subject]) -> list[Subject]:
        """Return the subjects to check.

        Raises:
            UserError: if there are none.
        """
        outputs = [output.name for output in outputs_named(self.outputs)]
        chosen = [subject for subject in subjects if subject.output.name in outputs and (
            not self.layers or {subject.bottleneck.name, subject.bottleneck.layer.name}
            & set(self.layers))]
        if not chosen:
            raise UserError(
                f"{self.attribution_dir} holds no attributions of {', '.join(self.outputs)} to "
                f"{', '.join(self.layers or ('any layer',))} with a spatial map; compute them with "
                "python -m attribution.attribute")
        return chosen


def check_attributions(options: ChecksOptions) -> dict[str, pd.DataFrame]:
    """Run the checks, and return the tables of all checks in the folder by name."""
    attributions = AttributionStore(options.attribution_dir)
    context = AttributionContext(  # earlier checks stay in the report, so every layer is opened
        options.agent_file, options.data_dir, options.compute, attributions.layers(),
        allow_partial=True, check_contents=options.check_contents)
    attributions.check_source(context.agents, context.recording.sha256)
    subjects = attributed_subjects(options.features_dir, context, attributions)
    chosen = options.chosen(subjects)
    steps = attributions.trajectories()
    rows = np.sort(np.random.default_rng(options.seed).permutation(len(steps))[
        :options.num_frames])
    checked = CheckContext(context, attributions, rows, steps.frame_ids[rows], options.seed)
    what = (f"{len(rows)} frames of {len(set(checked.episodes))} episodes of "
            f"{options.agent_file.name}")
    if options.dry_run:
        print(f"{what}; {', '.join(' at '.join(subject.name[::-1]) for subject in chosen)}; "
              f"checks: {', '.join(options.checks)}")
        return {}
    store = ResultStore(options.output_dir, CHECK_FILES)
    store.open({**context.provenance, "attributions": attributions.settings(),
                "trajectories_sha256": sha256(attributions.file_of("trajectories")),
                "num_frames": options.num_frames, "seed": options.seed, "versions": versions()},
               options.overwrite)
    tables = run_checks(store, checked, options.checks, chosen, subjects)
    store.write("report", value=report(tables, f"{what}."))
    for name, table in tables.items():
        print(f"{name}: {CHECKS[name].verdict(table)}")
    print(f"wrote {store.file_of('report')}")
    return tables


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


main = command(ChecksOptions, check_attributions)

if __name__ == "__main__":
    raise SystemExit(main())

"""Decode labels of recorded steps from the agent's hidden state: objects in view or no longer in
view, the player's motion, time, the end of the episode, and own actions up to 50 steps ahead.
Compare the scores with those of probes of the current frame, of the last action and position, and
of the hidden state of an untrained agent.

A killed run resumes after the last finished label.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from agents.agent_file import load_agent
from agents.provenance import agent_sha256
from analysis.memory.atlas_report import plot_actions_ahead, plot_beyond, report
from analysis.memory.labels import add_recording_flags, read_examples
from analysis.memory.probe_atlas import (
    PROBE_ATLAS,
    checked_labels,
    labels_of,
    probe_label,
    representations_of,
    split_of,
    with_claims,
)
from common.cli import Parser, add_compute_flags, count, from_zero, seed, set_up_logging
from common.devices import resolve_compute
from common.errors import UserError, script_main
from common.files import versions
from common.palette import DPI
from common.results import ResultStore
from interventions.probes import split_levels


def parser() -> Parser:
    flags = Parser(__doc__)
    add_recording_flags(flags)
    flags.add_argument("--num_examples", type=count, default=12_000,
                       help="maximum number of randomly drawn steps that are probed")
    flags.add_argument("--hidden_units", type=count, default=64,
                       help="number of hidden units of the probes with one hidden layer")
    flags.add_argument("--num_shuffles", type=from_zero, default=1,
                       help="number of shuffles of the labels per probe, for the control")
    flags.add_argument("--seed", type=seed, default=0,
                       help="seed of the drawn steps, the split of the levels, the untrained "
                            "agent, the probes and the bootstrap")
    flags.add_argument("--output_dir", type=Path, default=Path("analysis/memory/probe_atlas"),
                       help="folder to write to")
    flags.add_argument("--overwrite", action="store_true",
                       help="delete the previous contents of the folder")
    add_compute_flags(flags)
    flags.set_defaults(precision="float32")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    set_up_logging(args.log_level)
    compute = resolve_compute(args.device, args.gpu_device, args.precision)
    examples = read_examples(args.data_dir, args.labels_dir, args.agent_file)
    store = ResultStore(args.output_dir, PROBE_ATLAS)
    store.open({"agent_file": args.agent_file.name, "agent_sha256": agent_sha256(args.agent_file),
                "recording_sha256": examples.folder.sha256(), "num_examples": args.num_examples,
                "hidden_units": args.hidden_units, "num_shuffles": args.num_shuffles,
                "seed": args.seed, "versions": versions()}, args.overwrite)
    rows = np.sort(np.random.default_rng(args.seed).permutation(len(examples))[:args.num_examples])
    levels = examples.level[rows]
    parts = split_levels(levels, args.seed)
    labels, skipped = checked_labels(list(labels_of(examples, rows)), levels, parts)
    if not labels:
        raise UserError(f"{args.data_dir} has no label with enough levels; record more episodes")
    missing = [label for label in labels if not store.has("beyond", label.name)]
    if missing:
        representations = representations_of(load_agent(args.agent_file, compute.device), examples,
                                             rows, parts.train, args.seed)
    for number, label in enumerate(missing, 1):
        scores, beyond, weights = probe_label(label, representations, levels, parts, args.seed,
                                              args.hidden_units, args.num_shuffles)
        store.write("scores", label.name, value=scores)
        if weights is not None:
            store.write("weights", label.name, value={"weights": weights,
                                                      **split_of(levels, parts)})
        store.write("beyond", label.name, value=beyond)  # last: it marks the label as finished
        row = beyond.iloc[0]
        print(f"{label.name} ({number} of {len(missing)}): {row['metric']} of the hidden state "
              f"{row['hidden_state']:.3f}, of {row['baseline']} {row['baseline_score']:.3f}",
              flush=True)
    atlas, beyond = (pd.concat([store.read(name, label.name) for label in labels],
                               ignore_index=True) for name in ("scores", "beyond"))
    beyond = with_claims(beyond)
    description = (f"{args.agent_file.name}: {len(rows)} steps of {len(np.unique(levels))} levels, "
                   f"{len(np.unique(levels[parts.test]))} of them for testing")
    for name, table in (("atlas", atlas), ("comparison", beyond), ("skipped", skipped)):
        store.write(name, value=table)
    for name, figure in (("actions_figure", plot_actions_ahead(atlas, description)),
                         ("beyond_figure", plot_beyond(beyond, description))):
        with store.file(name) as path:
            figure.savefig(path, dpi=DPI)
    store.write("report", value=report(atlas, beyond, skipped, description))
    print(f"{beyond['claimed'].sum()} of {len(beyond)} labels are decoded better from the hidden "
          f"state than from the best baseline; wrote {store.file_of('report')}")


if __name__ == "__main__":
    raise SystemExit(main())

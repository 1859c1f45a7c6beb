"""Atlas of what linear and non-linear probes decode from the agent's hidden state.

A killed run resumes after the last finished label.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from agents.agent_file import load_agent
from agents.provenance import agent_sha256
from analysis.memory.atlas_report import plot_actions_ahead, plot_beyond, report
from analysis.memory.labels import LabelledRecordingOptions
from analysis.memory.probe_atlas import (
    Label,
    checked_labels,
    labels_of,
    probe_label,
    representations_of,
    split_of,
    with_claims,
)
from common.cli import count, from_zero, seed
from common.errors import UserError
from common.files import versions
from common.options import ComputeOptions, command, option, redefine
from common.palette import DPI
from common.results import ResultStore
from interventions.direction_folders import PROBE_ATLAS
from interventions.probes import split_levels


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbeAtlasOptions(LabelledRecordingOptions):
    """Decode labels of recorded steps from the agent's hidden state: objects in view or no longer
    in view, the player's motion, time, the end of the episode, and own actions up to 50 steps
    ahead. Compare the scores with those of probes of the current frame, of the last action and
    position, and of the hidden state of an untrained agent."""

    num_examples: int = option(12_000, "maximum number of randomly drawn steps that are probed",
                               type=count)
    hidden_units: int = option(64, "number of hidden units of the probes with one hidden layer",
                               type=count)
    num_shuffles: int = option(1, "number of shuffles of the labels per probe, for the control",
                               type=from_zero)
    seed: int = option(0, "seed of the drawn steps, the split of the levels, the untrained agent, "
                          "the probes and the bootstrap", type=seed)
    output_dir: Path = option(Path("analysis/memory/probe_atlas"), "folder to write to")
    precision: str = redefine(ComputeOptions, "precision", default="float32")


def write_atlas(options: ProbeAtlasOptions) -> pd.DataFrame:
    """Write the atlas, and return its table that compares each label with the best baseline."""
    examples, device = options.examples, options.compute.device
    store = ResultStore(options.output_dir, PROBE_ATLAS)
    store.open({"agent_file": options.agent_file.name,
                "agent_sha256": agent_sha256(options.agent_file),
                "recording_sha256": examples.folder.sha256(),
                "num_examples": options.num_examples, "hidden_units": options.hidden_units,
                "num_shuffles": options.num_shuffles, "seed": options.seed,
                "versions": versions()}, options.overwrite)
    rng = np.random.default_rng(options.seed)
    rows = np.sort(rng.permutation(len(examples))[:options.num_examples])
    levels = examples.level[rows]
    parts = split_levels(levels, options.seed)
    labels, skipped = checked_labels(list(labels_of(examples, rows)), levels, parts)
    if not labels:
        raise UserError(f"{options.data_dir} has no label with enough levels; record more "
                        "episodes")
    missing = [label for label in labels if not store.has("beyond", label.name)]
    if missing:
        representations = representations_of(load_agent(options.agent_file, device), examples,
                                             rows, parts.train, options.seed)
    for number, label in enumerate(missing, 1):
        scores, beyond, weights = probe_label(label, representations, levels, parts, options.seed,
                                              options.hidden_units, options.num_shuffles)
        store.write("scores", label.name, value=scores)
        if weights is not None:
            store.write("weights", label.name, value={"weights": weights,
                                                      **split_of(levels, parts)})
        store.write("beyond", label.name, value=beyond)  # last: it marks the label as finished
        row = beyond.iloc[0]
        print(f"{label.name} ({number} of {len(missing)}): {row['metric']} of the hidden state "
              f"{row['hidden_state']:.3f}, of {row['baseline']} {row['baseline_score']:.3f}",
              flush=True)
    return write_tables(store, labels, skipped, (
        f"{options.agent_file.name}: {len(rows)} steps of {len(np.unique(levels))} levels, "
        f"{len(np.unique(levels[parts.test]))} of them for testing"))


def write_tables(store: ResultStore, labels: Sequence[Label], skipped: pd.DataFrame,
                 description: str) -> pd.DataFrame:
    """Write tables, figures and report of all labels; return the table ``comparison``."""
    atlas, beyond = (pd.concat([store.read(name, label.name) for label in labels],
                               ignore_index=True) for name in ("scores", "beyond"))
    beyond = with_claims(beyond)
    for name, table in (("atlas", atlas), ("comparison", beyond), ("skipped", skipped)):
        store.write(name, value=table)
    for name, figure in (("actions_figure", plot_actions_ahead(atlas, description)),
                         ("beyond_figure", plot_beyond(beyond, description))):
        with store.file(name) as path:
            figure.savefig(path, dpi=DPI)
    store.write("report", value=report(atlas, beyond, skipped, description))
    print(f"{beyond['claimed'].sum()} of {len(beyond)} labels are decoded better from the hidden "
          f"state than from the best baseline; wrote {store.file_of('report')}")
    return beyond


main = command(ProbeAtlasOptions, write_atlas)

if __name__ == "__main__":
    raise SystemExit(main())

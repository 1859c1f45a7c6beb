"""Labels of the steps of a recording, computed by replaying it in the real game.

A killed run resumes after the last finished episode. Each shard labels a disjoint subset of the
episodes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from agents.replay import recorded_game
from agents.rollout_files import RolloutFolder
from analysis.memory.labels import LEVEL_LABELS, describe_labels, label_episodes
from common.files import versions
from common.options import ShardOptions, command, option
from common.progress import Progress
from common.results import ResultStore
from common.shards import WHOLE


@dataclasses.dataclass(frozen=True, kw_only=True)
class LevelLabelsOptions(ShardOptions):
    """Label every step of a recording with the state of the level (objects in view, velocity,
    contact with the ground), and every episode with the cause of its failure. The recording is
    replayed in the real game; a frame that differs from the recorded one is an error."""

    data_dir: Path = option(help="data folder of the recording, from record.py --no_action_noise")
    output_dir: Path = option(Path("analysis/memory/level_labels"), "folder to write to")
    overwrite: bool = option(False, "delete the previous contents of the folder")


def label_recording(options: LevelLabelsOptions) -> ResultStore:
    """Write the labels of all episodes, or of those of the shard, and return their folder."""
    folder = RolloutFolder(options.data_dir)
    config = recorded_game(folder)
    index = folder.index()
    episodes = index["episode"].unique().tolist()
    store = ResultStore(options.output_dir, LEVEL_LABELS)
    store.open({"recording_sha256": folder.sha256(), "env": vars(config),
                "agent_sha256": folder.description().get("agent_sha256"),
                "num_episodes": len(episodes), "versions": versions()},
               options.overwrite, options.shard, join=options.join)
    if not store.is_open:
        return store
    missing = [episode for episode in options.shard.of(episodes)
               if not store.has("labels", episode)]
    with Progress(len(missing), "episode") as progress:
        for episode, labels in label_episodes(folder, missing):
            store.write("labels", episode, value=labels)
            progress.update(progress.done + 1)
    store.finish()
    if options.shard == WHOLE:
        write_tables(store, folder, episodes)
    return store


def write_tables(store: ResultStore, folder: RolloutFolder, episodes: Sequence[int]) -> None:
    """Write and print the causes of failures and the distribution of each label."""
    items = [store.read("labels", episode) for episode in episodes]
    steps = folder.all_steps(episodes).drop_duplicates("episode")
    table = pd.DataFrame({
        "episode": episodes, "level_seed": steps["level_seed"].to_numpy(),
        "length": [len(item["labels"]) for item in items],
        "cause": [str(item["cause"]) for item in items]})
    distribution = describe_labels(pd.DataFrame(
        np.concatenate([item["labels"] for item in items]), columns=items[0]["names"]))
    store.write("episodes", value=table)
    store.write("distribution", value=distribution)
    print(distribution.round(3).to_string(index=False))
    print(table["cause"].value_counts().to_string())
    print(f"wrote labels for {table['length'].sum()} steps to {store.path}")


main = command(LevelLabelsOptions, label_recording)

if __name__ == "__main__":
    raise SystemExit(main())

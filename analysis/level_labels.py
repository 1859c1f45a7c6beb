"""Label every step of a recording with the state of the level (objects in view, velocity, contact
with the ground), and every episode with the cause of its failure. The recording is replayed in the
real game; a frame that differs from the recorded one is an error.

A killed run resumes after the last finished episode. Each shard labels a disjoint subset of the
episodes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from agents.replay import recorded_game
from agents.rollout_files import RolloutFolder
from analysis.memory.labels import LEVEL_LABELS, describe_labels, label_episodes
from common.cli import Parser
from common.errors import script_main
from common.files import versions
from common.progress import Progress
from common.results import ResultStore
from common.shards import WHOLE, add_shard_flags


def parser() -> Parser:
    flags = Parser(__doc__)
    flags.add_argument("--data_dir", type=Path, required=True,
                       help="data folder of the recording, from record.py --no_action_noise")
    flags.add_argument("--output_dir", type=Path, default=Path("analysis/memory/level_labels"),
                       help="folder to write to")
    flags.add_argument("--overwrite", action="store_true",
                       help="delete the previous contents of the folder")
    add_shard_flags(flags, "the episodes")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    folder = RolloutFolder(args.data_dir)
    config = recorded_game(folder)
    index = folder.index()
    episodes = index["episode"].unique().tolist()
    store = ResultStore(args.output_dir, LEVEL_LABELS)
    store.open({"recording_sha256": folder.sha256(), "env": vars(config),
                "agent_sha256": folder.description().get("agent_sha256"),
                "num_episodes": len(episodes), "versions": versions()},
               args.overwrite, args.shard, join=args.join)
    if not store.is_open:
        return
    missing = [episode for episode in args.shard.of(episodes)
               if not store.has("labels", episode)]
    with Progress(len(missing), "episode") as progress:
        for episode, labels in label_episodes(folder, missing):
            store.write("labels", episode, value=labels)
            progress.update(progress.done + 1)
    store.finish()
    if args.shard != WHOLE:
        return
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


if __name__ == "__main__":
    raise SystemExit(main())

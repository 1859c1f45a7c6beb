"""Cost of writing, joining and opening recordings of many short episodes, and of reading windows.

The episodes are random and have three frames each, so that the fixed cost per episode is measured.
They are written by the recording code, in four shards one after the other.
``python -m benchmarks.recordings --num_episodes 100000 --output_dir /tmp/recordings`` takes 4 GB.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd

from agents.rollout_files import EpisodeArrays, RolloutFolder, RolloutWriter, join_recording
from benchmarks.harness import cost_apart, say
from common.game_constants import FRAME_SIZE, NUM_ACTIONS
from common.shards import Shard
from generative.dataset import RolloutDataset

LENGTH, NUM_UNITS = 3, 256
NUM_SHARDS = 4
NUM_WINDOWS = 512


def random_episode(number: int) -> EpisodeArrays:
    """Return a random episode of LENGTH frames; ``number`` is its seed."""
    rng = np.random.default_rng(number)
    steps = pd.DataFrame({
        "level_seed": number, "episode_step": np.arange(LENGTH), "reward": 0.0,
        "done": np.arange(LENGTH) == LENGTH - 1,
        "value": rng.normal(size=LENGTH).astype(np.float32),
        "action": rng.integers(0, NUM_ACTIONS, LENGTH)}).astype({"done": int})
    return EpisodeArrays(
        rng.integers(0, 256, (LENGTH, FRAME_SIZE, FRAME_SIZE, 3), dtype=np.uint8),
        rng.normal(size=(LENGTH + 1, NUM_UNITS)).astype(np.float32),
        rng.normal(size=(LENGTH, NUM_ACTIONS)).astype(np.float32), steps)


def write(path: Path, shard: Shard, num_episodes: int) -> None:
    """Write the random episodes of a shard."""
    writer = RolloutWriter(path, {"kind": "benchmark"}, shard=shard, num_episodes=num_episodes)
    for number in shard.of(range(num_episodes)):
        writer.add(number, random_episode(number))
    writer.finish()


def read_index(path: Path) -> None:
    RolloutFolder(path).index()


def read_windows(path: Path) -> None:
    """Open the recording as the simulator's training does, and read random windows."""
    dataset = RolloutDataset(path, 1, 2)
    numbers = np.random.default_rng(0).permutation(len(dataset))[:NUM_WINDOWS]
    for batch in np.array_split(numbers, NUM_WINDOWS // 32):
        dataset.batch(batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num_episodes", type=int, default=100_000,
                        help="number of episodes to write")
    parser.add_argument("--output_dir", type=Path, required=True, help="new output folder")
    args = parser.parse_args()
    data = args.output_dir / "data"
    for part in range(1, NUM_SHARDS + 1):
        shard = Shard(part, NUM_SHARDS)
        say(f"write {shard}: {cost_apart(write, data, shard, args.num_episodes)}")
    for name, work in (("join", join_recording), ("index", read_index),
                       ("windows", read_windows)):
        say(f"{name}: {cost_apart(work, data)}")


if __name__ == "__main__":
    main()

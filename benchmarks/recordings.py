"""Cost of writing, joining and opening recordings of many short episodes, and of reading windows.

The episodes are random and have three frames each, so that the fixed cost per episode is measured.
They are written by the recording code, divided among shards.
``python -m benchmarks.recordings --num_episodes 100000 --output_dir /tmp/recordings`` takes 4 GB.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from agents.rollout_files import EpisodeArrays, RolloutFolder, RolloutWriter, join_recording
from benchmarks.harness import cost_apart, cost_of, say
from common.cli import Parser, count
from common.errors import UserError, script_main
from common.game_constants import FRAME_SIZE, NUM_ACTIONS
from common.shards import Shard
from generative.dataset import RolloutDataset

LENGTH, NUM_UNITS = 3, 256
NUM_SHARDS = 4
NUM_WINDOWS = 512


def parser() -> Parser:
    flags = Parser(__doc__)
    flags.add_argument("--num_episodes", type=count, default=100_000,
                       help="number of episodes to write")
    flags.add_argument("--output_dir", type=Path, required=True, help="new output folder")
    return flags


def random_episode(rng: np.random.Generator, number: int) -> EpisodeArrays:
    """Return a random episode of LENGTH steps."""
    steps = pd.DataFrame({
        "level_seed": number, "episode_step": np.arange(LENGTH), "done": 0, "reward": 0.0,
        "value": rng.normal(size=LENGTH).astype(np.float32),
        "action": rng.integers(0, NUM_ACTIONS, LENGTH)})
    steps.loc[LENGTH - 1, "done"] = 1
    return EpisodeArrays(
        rng.integers(0, 256, (LENGTH, FRAME_SIZE, FRAME_SIZE, 3), dtype=np.uint8),
        rng.normal(size=(LENGTH + 1, NUM_UNITS)).astype(np.float32),
        rng.normal(size=(LENGTH, NUM_ACTIONS)).astype(np.float32), steps)


def write(path: Path, shard: Shard, num_episodes: int) -> None:
    """Write the random episodes of a shard."""
    writer = RolloutWriter(path, {"kind": "benchmark"}, shard=shard, num_episodes=num_episodes)
    for number in shard.of(range(num_episodes)):
        writer.add(number, random_episode(np.random.default_rng(number), number))
    writer.finish()


def read_index(path: Path) -> None:
    RolloutFolder(path).index()


def read_windows(path: Path) -> None:
    """Open the recording as the simulator's training does, and read random windows."""
    datasets: list[RolloutDataset] = []
    opening = cost_of(lambda: datasets.append(RolloutDataset(path, 1, 2)))
    (dataset,) = datasets
    numbers = np.random.default_rng(0).permutation(len(dataset))[:NUM_WINDOWS]

    def read() -> None:
        for batch in np.array_split(numbers, NUM_WINDOWS // 32):
            dataset.batch(batch)

    say(f"opened in {opening.seconds:.1f} s; {NUM_WINDOWS} windows of {dataset.window_length} "
        f"frames in {cost_of(read).seconds:.2f} s")


@script_main
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    data = args.output_dir / "data"
    if data.exists():
        raise UserError(f"{data} is there already; give a new --output_dir")
    shards = [Shard(part + 1, NUM_SHARDS) for part in range(NUM_SHARDS)]
    for shard in shards:
        say(f"write {shard}: {cost_apart(write, data, shard, args.num_episodes)}")
    for name, work in (("join", join_recording), ("index", read_index), ("windows", read_windows)):
        say(f"{name}: {cost_apart(work, data)}")


if __name__ == "__main__":
    raise SystemExit(main())

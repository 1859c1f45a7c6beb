"""Speed of counterfactual maps: all fillings of one recorded frame, simulated to lag 8.

    python -m benchmarks.counterfactual      about three minutes on one core

CPU time is reported next to wall time, because it depends less on what else runs on the machine.
"""

from __future__ import annotations

import time

import torch

from agents.rollout_files import RolloutFolder
from benchmarks.harness import AGENT, recorded, say
from generative.counterfactual import blocks_of_cells, filled_starts
from generative.imagining import load_simulator
from generative.networks import LatentSampler
from generative.simulator import Simulator, Start
from generative.start_worlds import sampled_world, world_seeds

MODEL = AGENT.parent.parent / "coinrun_hard_simulator" / "model.pt"
LAST_LAG = 8
FRAME = 12
SIZES = {"16 blocks of 2 x 2 cells, 4 fillings": (2, 4), "64 cells, 8 fillings": (1, 8)}
ROWS_PER_BATCH = 64
_MODE = LatentSampler("mode")


@torch.no_grad()
def simulate_map(simulator: Simulator, images: torch.Tensor, start: Start, size: int,
                 num_fillings: int) -> None:
    """Simulate all fillings of a start (1 row) with initial frames (I, 1, C, H, W)."""
    blocks = blocks_of_cells(size)
    numbers = torch.arange(len(blocks)).repeat_interleave(num_fillings)
    for rows in torch.arange(len(numbers)).split(ROWS_PER_BATCH):
        filled = filled_starts(simulator, images, start, torch.zeros_like(rows),
                               blocks[numbers[rows]], world_seeds([(row,) for row in
                                                                   rows.tolist()]))
        simulator.imagine(filled, _MODE, LAST_LAG + 1)


def main() -> None:
    torch.set_num_threads(1)
    simulator = load_simulator(MODEL, AGENT)
    with recorded(1, "--seed", "9") as folder:
        frames = RolloutFolder(folder / "data").array_files(0).frames.rows(FRAME - 2, FRAME + 1)
        images = torch.from_numpy(frames)[:, None].float() / 255
    with torch.no_grad():
        vectors = simulator.encode(images)
        world = sampled_world(simulator, vectors, images[-1], world_seeds([(0,)]))
        start = simulator.start_from(vectors, _MODE, world=world)
    simulate_map(simulator, images, start, 4, 1)  # prepares memory
    for name, sizes in SIZES.items():
        wall, processor = time.perf_counter(), time.process_time()
        simulate_map(simulator, images, start, *sizes)
        say(f"{name}: {time.perf_counter() - wall:.1f} s, "
            f"{time.process_time() - processor:.1f} s of CPU time")


if __name__ == "__main__":
    main()

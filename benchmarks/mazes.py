"""Speed of rendering maze frames and of computing vector fields, on levels of hard mode.

    python -m benchmarks.mazes    about a minute on two cores
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from agents.networks import build_policy
from benchmarks.harness import say, seconds_of
from common.devices import resolve_compute
from envs.maze.state import MazeState, stock_state
from maze.field.fields import FrameSource, drawn_frames, stamp_frames, vector_field

NUM_LEVELS = 100
NUM_DRAWN = 10  # levels whose frames are also rendered through set_state


def frames_of(states: list[MazeState], source: Callable[[MazeState], FrameSource]) -> np.ndarray:
    """Return one frame for each free square of each level, with the mouse on this square. The
    cheese's square is left out.

    Args:
        source: returns the frame source of a level.
    """
    squares = [np.array(state.grid.squares(without_cheese=True)) for state in states]
    return np.concatenate([source(state)(positions, np.zeros(len(positions), np.int64))
                           for state, positions in zip(states, squares)])


def main() -> None:
    states = [stock_state("hard", seed) for seed in range(NUM_LEVELS)]
    some = states[:NUM_DRAWN]
    stamped = frames_of(some, stamp_frames)  # also reads or renders the stamps
    assert np.array_equal(stamped, frames_of(some, drawn_frames))
    stamps, drawn = (seconds_of(frames_of, some, source, repeats=3) / len(stamped)
                     for source in (stamp_frames, drawn_frames))
    say(f"frames: {1e6 * stamps:.1f} us each from stamps, {1e6 * drawn:.0f} us through "
        f"set_state, {drawn / stamps:.0f} times as long")
    compute = resolve_compute("cpu", precision="float32")
    torch.manual_seed(0)
    policy = build_policy("impala", 64, False, True)
    seconds = seconds_of(lambda: [vector_field(policy, compute, state) for state in states])
    num = sum(len(state.grid.squares(without_cheese=True)) for state in states)
    say(f"fields: {seconds:.1f} s for {NUM_LEVELS} hard levels from stamps, {num} frames, "
        f"{num / seconds:.0f} frames/s")


if __name__ == "__main__":
    main()

"""Speed of maze states, frames and vector fields, on 100 levels of hard mode with an untrained
agent.

    python -m benchmarks.mazes           everything, about a minute on two cores
    python -m benchmarks.mazes frames    one part: states, frames or fields
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import numpy as np
import torch

from agents.networks import build_policy
from benchmarks.harness import cost_of, run_parts, say, seconds_of
from common.devices import resolve_compute
from maze.field.fields import FrameSource, both_facings, drawn_frames, stamp_frames, vector_field
from maze.field.outcomes import reaching
from maze.level.state import MazeState, stock_state

NUM_LEVELS = 100
NUM_DRAWN = 10  # levels whose frames are also rendered through set_state
REGION = 5


def measure_states(states: list[MazeState]) -> None:
    data = [state.to_bytes() for state in states]
    work = {"read": lambda: [MazeState.parse(each) for each in data],
            "written": lambda: [state.to_bytes() for state in states],
            "edited": lambda: [state.with_cheese(state.grid.corner) for state in states]}
    say("states: " + ", ".join(f"{name} in {1e3 * seconds_of(function) / len(states):.3f} ms"
                               for name, function in work.items()))


def frames_of(states: list[MazeState],
              source: Callable[[MazeState], FrameSource]) -> list[np.ndarray]:
    """Return a frame for every square except that of the cheese, one array per level.

    Args:
        source: returns the frame source of a level.
    """
    found = []
    for state in states:
        squares = np.array(state.grid.squares(without_cheese=True))
        found.append(source(state)(squares, np.zeros(len(squares), np.int64)))
    return found


def measure_frames(states: list[MazeState]) -> None:
    some = states[:NUM_DRAWN]
    stamped = frames_of(some, stamp_frames)  # also reads or renders the stamps
    assert all(map(np.array_equal, stamped, frames_of(some, drawn_frames)))
    num = sum(map(len, stamped))
    stamps, drawn = (seconds_of(functools.partial(frames_of, some, source)) / num
                     for source in (stamp_frames, drawn_frames))
    say(f"frames: {1e6 * stamps:.1f} us each from stamps, {1e6 * drawn:.0f} us through "
          f"set_state, {drawn / stamps:.0f} times as long")


def measure_fields(states: list[MazeState]) -> None:
    compute = resolve_compute("cpu", precision="float32")
    torch.manual_seed(0)
    policy = build_policy("impala", 64, False, True)
    sizes: list[int] = []
    seconds = cost_of(lambda: sizes.extend(
        len(vector_field(policy, compute, state).squares) for state in states)).seconds
    num = sum(sizes)
    say(f"fields: {seconds:.1f} s for {len(states)} hard levels from stamps, {num} frames, "
          f"{num / seconds:.0f} frames/s")
    fields = both_facings(policy, compute, states[0])
    seconds = seconds_of(lambda: reaching(fields, REGION))
    say(f"exact probabilities: {1e3 * seconds:.0f} ms for the level 0, "
          f"{len(fields[0].squares)} squares")


PARTS = {"states": measure_states, "frames": measure_frames, "fields": measure_fields}


if __name__ == "__main__":
    run_parts(__doc__, PARTS, contextlib.nullcontext(
        ([stock_state("hard", seed) for seed in range(NUM_LEVELS)],)))

"""Speed of states, frames and fields of mazes.

    python -m benchmarks.maze           everything, about a minute on two cores
    python -m benchmarks.maze frames    one part: states, frames or fields

Frames and fields are those of the first 100 levels of hard mode; the agent is untrained, of the
narrow network.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import numpy as np
import torch

from benchmarks.measuring import best_of
from common.devices import resolve_compute
from common.networks import build_policy
from maze.field.decisions import outcomes
from maze.field.fields import both_facings, drawn_frames, stamp_frames, vector_field
from maze.level.environment import stock_state
from maze.level.state import MazeState

MODE = "hard"
NUM_LEVELS = 100
NUM_DRAWN = 20  # levels whose frames are drawn through set_state, too


def measure_states(states: list[MazeState]) -> None:
    """Print how long a state takes to be read, edited and written."""
    data = [state.to_bytes() for state in states]
    read = best_of(lambda: [MazeState.parse(each) for each in data]) / len(data)
    written = best_of(lambda: [state.to_bytes() for state in states]) / len(data)
    edited = best_of(lambda: [state.with_cheese(state.grid.corner).to_bytes()
                              for state in states]) / len(data)
    print(f"states: read in {1e3 * read:.3f} ms, written in {1e3 * written:.3f} ms, cheese moved "
          f"and written in {1e3 * edited:.3f} ms", flush=True)


def measure_frames(states: list[MazeState]) -> None:
    """Print how long frames take from stamps and through ``set_state``, which are equal."""
    seconds = {}
    for name, source in (("stamps", stamp_frames), ("set_state", drawn_frames)):
        source(states[0])  # stamps are read or rendered
        drawn = [(source(state), np.array(state.grid.squares(without_cheese=True)))
                 for state in states[:NUM_DRAWN]]
        seconds[name] = best_of(lambda drawn=drawn: [
            frames(squares, np.zeros(len(squares), int)) for frames, squares in drawn])
        frames = [frames(squares, np.zeros(len(squares), int)) for frames, squares in drawn]
        seen = seen if name == "set_state" else frames  # noqa: F821
        assert all(map(np.array_equal, frames, seen))
    num = sum(map(len, seen))
    print(f"frames: {1e6 * seconds['stamps'] / num:.1f} us each from stamps, "
          f"{1e6 * seconds['set_state'] / num:.0f} us through set_state, "
          f"{seconds['set_state'] / seconds['stamps']:.0f} times as long", flush=True)

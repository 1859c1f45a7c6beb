"""Duration and peak memory of each step of the analysis of hidden states.

The states are synthetic, with 64 units, 40 groups of unequal size and a few outliers. Each number
of states is analysed in a separate process, so that its peak memory is measured separately. The
column "growth" is the exponent with which a step's duration grows with the number of states.

    python -m benchmarks.hidden_state_analysis                     10 000 and 100 000 states
    python -m benchmarks.hidden_state_analysis --sizes 1000000     a million states
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.hidden_states import analyse
from analysis.parameters import AgentHiddenConfig
from analysis.state_maps import StateMap
from benchmarks.harness import peak_memory, say, separate_process
from common.parameters import ParameterSet
from common.step_results import StepResult, StepResults
from interventions.hidden_states_folder import HIDDEN_STATE_FILES

UNITS, GROUPS, FAR_SHARE = 64, 40, 0.002
SIZES = (10_000, 100_000)


def synthetic_states(number: int) -> np.ndarray:
    """Draw synthetic states in (-1, 1), like those of a GRU, float32 (number, UNITS)."""
    rng = np.random.default_rng(0)
    shares = rng.dirichlet(np.full(GROUPS, 2.0))
    group = rng.choice(GROUPS, number, p=shares)
    centres = rng.normal(size=(GROUPS, UNITS)).astype(np.float32)
    mixing = rng.normal(size=(16, UNITS)).astype(np.float32) / 8
    states = centres[group]
    states += rng.laplace(size=(number, 16)).astype(np.float32) @ mixing
    states += 0.1 * rng.standard_normal((number, UNITS), dtype=np.float32)
    far = rng.random(number) < FAR_SHARE
    states[far] += 3 * rng.standard_normal((far.sum(), UNITS), dtype=np.float32)
    return np.tanh(states, out=states)


class MeasuredResults(StepResults):
    """Results that also store the duration and peak memory of each step.

    Attributes:
        costs: for each step, its duration in seconds and the peak memory of the process so far in
            GB; the caller sets it to an empty mapping.
    """

    costs: dict[str, tuple[float, float]]

    def step(self, name: str, compute: Callable[[], StepResult]) -> dict[str, Any]:
        begin = time.perf_counter()
        values = super().step(name, compute)
        self.costs[name] = time.perf_counter() - begin, peak_memory()
        return values


def measure(number: int) -> dict[str, tuple[float, float]]:
    """Analyse ``number`` synthetic states, and return ``MeasuredResults.costs``."""
    config = ParameterSet("defaults").get(AgentHiddenConfig)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        results = MeasuredResults(Path(folder), HIDDEN_STATE_FILES, 1)
        results.costs = {}
        results.start({})
        analyse(synthetic_states(number), None, config, StateMap(config, 0, 42, results))
    return results.costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers of states")
    sizes = parser.parse_args().sizes
    tables = {}
    for size in sizes:
        with separate_process(functools.partial, measure) as call:
            tables[size] = pd.DataFrame(call(size).result(), index=["seconds", "GB"]).T
    table = pd.concat(tables, axis="columns")
    seconds = table.xs("seconds", axis="columns", level=1)
    if len(sizes) > 1:  # exponent of the growth with the number of states
        table["growth"] = np.log(seconds[sizes[-1]] / seconds[sizes[0]]) / np.log(
            sizes[-1] / sizes[0])
    say(table.round(2).to_string())
    for size, total in seconds.sum().items():
        say(f"{size} states: {total:.0f} s, {table[size, 'GB'].max():.2f} GB at the peak")


if __name__ == "__main__":
    main()

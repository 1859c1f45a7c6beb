"""Duration and peak memory of each step of the analysis of hidden states, and their growth.

The states are synthetic, with 64 units, 40 groups of unequal size and a few outliers. Each number
of states runs in a separate process, so that peak memory is measured separately.

    python -m benchmarks.hidden_state_analysis                  10 000 and 100 000 states
    python -m benchmarks.hidden_state_analysis --million        also 1 000 000 states
    python -m benchmarks.hidden_state_analysis --sizes 10000    10 000 states
    python -m benchmarks.hidden_state_analysis --agreement      compare fast with exact methods
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import math
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.manifold import TSNE, trustworthiness
from sklearn.metrics import adjusted_rand_score

from analysis.clustering import PERPLEXITY, embed, find_clusters, nearest_neighbours
from analysis.decomposition import principal_components, standardizer_of
from analysis.hidden_states import analyse
from analysis.parameters import AgentHiddenConfig
from analysis.state_maps import StateMap
from benchmarks.harness import Candidate, peak_memory, say
from common.parameters import ParameterSet
from common.step_results import StepResult, StepResults
from interventions.hidden_states_folder import HIDDEN_STATE_FILES

UNITS, GROUPS, FAR_SHARE = 64, 40, 0.002
SIZES, MILLION = (10_000, 100_000), 1_000_000
TIME_LIMIT = {100_000: 600, MILLION: 1200}  # seconds
MEMORY_LIMIT = 6  # GB
AGREEMENT_STATES, AGREEMENT_NEIGHBOURS = 3_000, 15


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


def measure(number: int, clustering: str) -> dict[str, dict]:
    """Analyse ``number`` synthetic states.

    Returns:
        Duration ("seconds") and peak memory so far ("peak", in GB) by step, and facts of the
        analysis under "facts".
    """
    config = dataclasses.replace(ParameterSet("defaults").get(AgentHiddenConfig),
                                 clustering=clustering)
    states = synthetic_states(number)
    costs: dict[str, dict] = {"states": {"seconds": 0.0, "peak": peak_memory()}}

    class MeasuredResults(StepResults):
        """Results that also store the duration and peak memory of each step."""

        def step(self, name: str, compute: Callable[[], StepResult]) -> dict[str, Any]:
            begin = time.perf_counter()
            values = super().step(name, compute)
            seconds = round(time.perf_counter() - begin, 2)
            costs[name] = {"seconds": seconds, "peak": peak_memory()}
            return values

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        results = MeasuredResults(Path(folder), HIDDEN_STATE_FILES, 1)
        results.start({})
        analyse(states, None, config, StateMap(config, 0, 42, results))
        costs["facts"] = results.facts
    return costs


def measure_agreement() -> None:
    """Print the agreement of the methods for many states with exact methods, on few states."""
    states = synthetic_states(AGREEMENT_STATES)
    standardised = standardizer_of(states).standardise(states)
    rows = principal_components(standardised, 32).coordinates(standardised)
    exact, _ = nearest_neighbours(rows, AGREEMENT_NEIGHBOURS, 0)
    fast, _ = nearest_neighbours(rows, AGREEMENT_NEIGHBOURS, 0, exact_rows=0)
    recall = np.mean([len(np.intersect1d(*pair)) / AGREEMENT_NEIGHBOURS
                      for pair in zip(exact, fast)])
    say(f"{len(rows)} states: descent finds {100 * recall:.1f} % of the {AGREEMENT_NEIGHBOURS} "
          "nearest neighbours")
    maps = {"exact t-SNE": TSNE(2, perplexity=PERPLEXITY, method="exact", init="pca",
                                random_state=0).fit_transform(rows),
            "ours": embed(rows, 2, 0)[0],
            "ours, fitted to a third": embed(rows, 2, 0, len(rows) // 3)[0]}
    print("trustworthiness of the map (12 neighbours): " + ", ".join(
        f"{name} {trustworthiness(rows, places, n_neighbors=12):.3f}"
        for name, places in maps.items()))
    for method, data in (("agglomerative", rows), ("hdbscan", maps["ours"])):
        whole, part = (find_clusters(data, method, GROUPS, 0, fit_rows)[0]
                       for fit_rows in (len(data), len(data) // 3))
        print(f"{method}: adjusted Rand index {adjusted_rand_score(whole, part):.3f} between a fit "
              "to all and to a third of them")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--million", action="store_true", help="also analyse 1 000 000 states")
    parser.add_argument("--clustering", default="agglomerative")
    parser.add_argument("--agreement", action="store_true",
                        help="compare fast with exact methods instead")
    args = parser.parse_args()
    if args.agreement:
        measure_agreement()
        return
    results = {}
    for size in [*args.sizes, *([MILLION] if args.million else [])]:
        candidate = Candidate(functools.partial, measure)
        results[size] = candidate(size, args.clustering)
        candidate.close()
    print_table(results)


def print_table(results: dict[int, dict]) -> None:
    """Print duration, peak memory, and the exponent of the growth of duration with size."""
    for size, costs in results.items():
        facts = costs.pop("facts")
        total = sum(step["seconds"] for step in costs.values())
        peak = max(step["peak"] for step in costs.values())
        limit = TIME_LIMIT.get(size)
        print(f"{size} states: {total:.0f} s{f' (limit {limit} s)' if limit else ''}, "
              f"{peak:.2f} GB (limit {MEMORY_LIMIT} GB); ICA {facts['ica']['iterations']} and NMF "
              f"{facts['nmf']['iterations']} iterations, {facts['kept']['outliers']} outliers")
    sizes = list(results)
    print("step".ljust(10) + "".join(f"{size:>12} s     GB" for size in sizes) + "   growth")
    for step in results[sizes[0]]:
        figures = [results[size][step] for size in sizes]
        growth = ""
        if len(sizes) > 1 and figures[0]["seconds"] > 0:
            times = max(figures[-1]["seconds"], 0.01) / figures[0]["seconds"]
            growth = f"n^{math.log(times) / math.log(sizes[-1] / sizes[0]):.2f}"
        print(step.ljust(10) + "".join(f"{each['seconds']:12.1f} s {each['peak']:6.2f}"
                                       for each in figures) + f"   {growth}")


if __name__ == "__main__":
    main()

"""Cost of scopes: forward passes inside them, compared with passes outside.

    python -m benchmarks.scopes      about a minute on two cores

Passes are taken in turns, because machines drift, and medians of the processor time on one thread
are compared.
"""

from __future__ import annotations

import contextlib
import time
from statistics import median

import numpy as np
import torch

from agents.acting import run_policy
from agents.hooks import batch_info, patched
from agents.layers import all_layers
from agents.networks import Policy, build_policy
from agents.patch import BatchInfo
from common.devices import Compute
from interventions.patches import Zero

FRAMES_A_PASS = 16  # as where episodes are played
REPEATS = 150
COMPUTE = Compute(torch.device("cpu"), bfloat16=False)


def scopes(policy: Policy) -> dict[str, contextlib.AbstractContextManager]:
    """The scopes to compare, by name; passes run inside them."""
    layers = [layer.name for layer in all_layers(policy)]
    channel = Zero("embedder.block2.res1.resadd", channels=(5,))
    return {
        "no scope": contextlib.nullcontext(),
        "a scope without patches": patched(policy, []),
        "one patch, not in force": patched(
            policy, [Zero("embedder.block2.res1.resadd", steps=(1000, None))]),
        "a patch on every layer, none in force": patched(
            policy, [Zero(layer, steps=(1000, None)) for layer in layers]),
        "one channel patched": patched(policy, [channel])}


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    policy = build_policy("impala", 256, recurrent=True, learned_initial_state=True)
    frames = np.random.default_rng(0).integers(0, 256, (FRAMES_A_PASS, 64, 64, 3), dtype=np.uint8)
    hidden = policy.initial_states(FRAMES_A_PASS)
    numbers = np.arange(FRAMES_A_PASS)
    rows = BatchInfo(numbers, 0 * numbers, numbers)
    times: dict[str, list[float]] = {}
    for repeat in range(REPEATS):
        for name, scope in scopes(policy).items():
            with scope, batch_info(policy, rows):
                started = time.process_time()
                run_policy(policy, COMPUTE, frames, hidden)
                if repeat:
                    times.setdefault(name, []).append(time.process_time() - started)
    plain = median(times["no scope"])
    for name, of_scope in times.items():
        ratios = [a / b - 1 for a, b in zip(of_scope, times["no scope"])]
        print(f"{name}: {1000 * median(of_scope):.2f} ms for {FRAMES_A_PASS} frames, "
              f"{100 * median(ratios):+.1f} % of a pass outside ({1000 * plain:.2f} ms)")


if __name__ == "__main__":
    main()

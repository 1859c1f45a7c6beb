"""Speed of an effect scan: four layers of 32 channels, 100 pictures, the narrow IMPALA network.

    python -m benchmarks.scan

A scan of full passes, which computes what lies before the patched layer again and again, is
measured beside it on one layer.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from agents.hooks import patched
from agents.networks import Policy, build_policy, to_images
from common.devices import Compute
from interventions.patches import Zero
from interventions.scan import Part, Pictures, parts_of, scan, value

FLOAT32 = Compute(torch.device("cpu"), bfloat16=False)
NUM_PICTURES = 100
LAYERS = ("embedder.block2.res1.resadd", "embedder.block2.res2.resadd",
          "embedder.block3.res1.resadd", "embedder.block3.res2.resadd")


def full_passes(policy: Policy, parts: list[Part], frames: np.ndarray) -> None:
    """The plain scan: a whole pass a part, inside a scope."""
    images, hidden = to_images(torch.from_numpy(frames)), policy.initial_states(len(frames))
    with torch.no_grad():
        for part in parts:
            with patched(policy, [Zero(part.layer, channels=(part.channel,))]):
                policy.step(policy.embed(images), hidden)


def main() -> None:
    torch.manual_seed(0)
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    policy = build_policy("impala", 256, False, False)
    policy.to(memory_format=torch.channels_last)
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 256, (NUM_PICTURES, 64, 64, 3), dtype=np.uint8)
    pictures = Pictures(frames, np.arange(NUM_PICTURES), value)
    scan(policy, FLOAT32, parts_of(policy, LAYERS[:1], "layer"), pictures)  # kernels are prepared
    total = 0.0
    for layer in LAYERS:
        parts = parts_of(policy, [layer], "channel")
        start, cpu = time.perf_counter(), time.process_time()
        scan(policy, FLOAT32, parts, pictures)
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        total += seconds
        print(f"{layer}: {len(parts) * NUM_PICTURES} patched passes in {seconds:.2f} s "
              f"({cpu:.2f} s of processor time)")
    print(f"all four layers: {total:.2f} s")
    parts = parts_of(policy, LAYERS[:1], "channel")
    start, cpu = time.perf_counter(), time.process_time()
    full_passes(policy, parts, frames)
    print(f"{LAYERS[0]}, full passes: {time.perf_counter() - start:.2f} s "
          f"({time.process_time() - cpu:.2f} s of processor time)")


if __name__ == "__main__":
    main()

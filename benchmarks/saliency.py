"""Speed of saliency maps, compared with a plain variant that computes one function at a time.

The plain variant is a direct transcription of the definition: for every function a forward pass
over all steps and the gradients of its scalar. The agreement of both variants is checked first. A
map belongs to one function and one sample, with 9 copies and 10 steps at the published sizes.
Variants are measured alternately in one process, because the speed of a machine drifts.

    python -m benchmarks.saliency      about a minute on two cores
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from agents.networks import build_policy
from benchmarks.harness import cost_of, measure_in_turns, peak_memory, say
from common.devices import Compute, keep_freed_memory, resolve_compute
from common.parameters import ParameterSet
from generative.config import SaliencyConfig, SimulatorConfig
from generative.networks import LatentSampler
from generative.saliency.files import SaliencyFolder
from generative.saliency.gradients import (
    Coordinates,
    Gradients,
    SaliencyFunction,
    SaliencyPass,
    saliency_functions,
    smoothgrad_starts,
)
from generative.saliency.run import SaliencyPlan, SampleSaliency, write_saliency
from generative.sample_files import SampleOrigin, open_samples
from generative.sampling import imagined_from
from generative.simulator import Simulator

NUM_SAMPLES = (1, 4)  # per pass
REPEATS = 2
PLAIN_FUNCTIONS = 3  # functions measured, out of 18 with equal costs


def published_simulator(compute: Compute) -> Simulator:
    """Build a simulator of the published size with random weights, including a random agent."""
    torch.manual_seed(0)
    policy = build_policy("impala", 64, recurrent=True, learned_initial_state=True)
    simulator = Simulator(ParameterSet("defaults").get(SimulatorConfig), policy)
    compute.place(simulator)
    return simulator.requires_grad_(False)


def some_directions() -> Coordinates:
    matrix = torch.from_numpy(np.linalg.qr(np.random.default_rng(0).standard_normal(
        (64, 64)))[0].astype(np.float32))
    return lambda hidden_states, _: hidden_states @ matrix


def one_function(simulator: Simulator, copies: Tensor, function: SaliencyFunction,
                 settings: SaliencyConfig, coordinates: Coordinates) -> Gradients:
    """Compute the gradients of one function in one sample from a separate forward pass.

    Args:
        copies: perturbed start vectors (N, V) of the sample.
    """
    draw = LatentSampler("mode")
    start = simulator.start_from(copies.clone().requires_grad_(), draw)
    steps = simulator.imagine(start, draw, settings.num_sim_steps)
    scalar = function(steps, settings.common_timesteps, coordinates).mean()
    names = [field.name for field in dataclasses.fields(Gradients)]
    found = torch.autograd.grad(scalar, [getattr(step, name) for name in names for step in steps],
                                materialize_grads=True)
    return Gradients(*(torch.stack(found[begin:begin + len(steps)]).mean(dim=1)
                       for begin in range(0, len(found), len(steps))))


def whole_run(simulator: Simulator, compute: Compute, settings: SaliencyConfig,
              functions: tuple[SaliencyFunction, ...], vectors: Tensor,
              coordinates: Coordinates) -> float:
    """Return the seconds per map, including writing all files, images and videos."""
    plan = SaliencyPlan(functions, settings.common_timesteps, settings.batch_size,
                        settings.perturbation_scale, settings.gaussian_kernel_size,
                        settings.sigma, False, 0)
    with tempfile.TemporaryDirectory() as folder:
        samples = open_samples(Path(folder) / "samples", {})
        for number, arrays in enumerate(imagined_from(simulator, compute, vectors,
                                                      settings.num_sim_steps)):
            samples.add(number, arrays, SampleOrigin(number))
        saliency = SampleSaliency(simulator, compute, plan, samples, {}, {}, coordinates)
        numbers, output = samples.numbers(), SaliencyFolder(samples.path)
        cost = cost_of(lambda: write_saliency(saliency, output, numbers, len(numbers),
                                              with_videos=True, overwrite=False))
    return cost.seconds / len(numbers) / len(functions)


def main() -> None:
    keep_freed_memory()  # speeds up both variants
    compute = resolve_compute("cpu", precision="float32")
    say(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    settings = ParameterSet("defaults").get(SaliencyConfig)
    functions = saliency_functions(settings.func_type, settings.ids("direction_ids"),
                                   settings.direction_type)
    simulator, coordinates = published_simulator(compute), some_directions()
    vectors = simulator.random_vectors(max(NUM_SAMPLES), torch.Generator().manual_seed(0))
    copies = torch.stack([smoothgrad_starts(vector, settings.batch_size,
                                           settings.perturbation_scale, 0, number)
                          for number, vector in enumerate(vectors)])

    def ours(num_samples: int) -> list[Gradients]:
        one_pass = SaliencyPass(simulator, compute, copies[:num_samples], functions,
                                settings.common_timesteps, settings.num_sim_steps,
                                coordinates=coordinates)
        return [one_pass.gradients(function) for function in functions]

    def plain() -> list[Gradients]:
        return [one_function(simulator, copies[0], function, settings, coordinates)
                for function in functions[:PLAIN_FUNCTIONS]]

    for function, mine, theirs in zip(functions, ours(1), plain()):
        for name in vars(mine):
            a, b = getattr(mine, name)[0], getattr(theirs, name)
            if (a - b).norm() > 0.01 * b.norm():
                raise SystemExit(f"the variants differ in {name} of {function.name}")
    say(f"both variants agree in {PLAIN_FUNCTIONS} functions")
    candidates = {"plain": lambda: cost_of(plain).seconds / PLAIN_FUNCTIONS} | {
        str(number): lambda number=number: cost_of(ours, number).seconds / number / len(functions)
        for number in NUM_SAMPLES}
    slow, *fast = map(min, measure_in_turns(candidates, REPEATS, warmup=0).values())
    for number, seconds in zip(NUM_SAMPLES, fast):
        say(f"{len(functions)} functions, {number} samples per pass: {seconds:.3f} s per map, one "
            f"function at a time {slow:.3f} s, ratio {slow / seconds:.1f}")
    whole = whole_run(simulator, compute, settings, functions, vectors, coordinates)
    say(f"with pictures, videos and files, {len(vectors)} samples per pass: {whole:.3f} s per map, "
        f"{peak_memory():.2f} GB of memory at its peak")


if __name__ == "__main__":
    main()

"""Speed of saliency maps, compared with a plain variant that computes one function at a time.

The plain variant is a direct transcription of the definition. For every function, it runs a forward
pass over all steps and computes the gradients of the function's scalar. The agreement of both
variants is checked first. Durations are per map, where a map belongs to one function and one
sample; at the published sizes, a map takes 9 perturbed copies of the sample and 10 steps. Variants
are measured alternately in one process, because the speed of a machine drifts.

    python -m benchmarks.saliency      about a minute on two cores
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from agents.networks import build_policy
from benchmarks.harness import cost_of, measure_in_turns, say
from common.devices import keep_freed_memory, resolve_compute
from common.parameters import ParameterSet
from generative.config import SaliencyConfig, SimulatorConfig
from generative.networks import LatentSampler
from generative.saliency.gradients import (
    Gradients,
    SaliencyFunction,
    SaliencyPass,
    saliency_functions,
    smoothgrad_starts,
)
from generative.simulator import Simulator

NUM_SAMPLES = (1, 4)  # per pass
REPEATS = 2
PLAIN_FUNCTIONS = 3  # functions measured, out of 18 with equal costs
SETTINGS = ParameterSet("defaults").get(SaliencyConfig)


def published_simulator() -> Simulator:
    """Build a simulator of the published size with random weights, including a random agent."""
    torch.manual_seed(0)
    policy = build_policy("impala", 64, recurrent=True, learned_initial_state=True)
    return Simulator(ParameterSet("defaults").get(SimulatorConfig), policy).requires_grad_(False)


def coordinates(hidden_states: Tensor, direction_type: str) -> Tensor:
    """Return coordinates (…, 64) of hidden states (…, 64) along random orthogonal directions;
    ``direction_type`` is ignored."""
    directions, _ = np.linalg.qr(np.random.default_rng(0).standard_normal((64, 64)))
    return hidden_states @ torch.from_numpy(directions.astype(np.float32))


def one_function(simulator: Simulator, copies: Tensor, function: SaliencyFunction) -> Gradients:
    """Compute the gradients of one function in one sample from a separate forward pass.

    Args:
        copies: N perturbed copies of the sample's start vector of V elements (N, V).
    """
    draw = LatentSampler("mode")
    start = simulator.start_from(copies.clone().requires_grad_(), draw)
    steps = simulator.imagine(start, draw, SETTINGS.num_sim_steps)
    scalar = function(steps, SETTINGS.common_timesteps, coordinates).mean()
    names = [field.name for field in dataclasses.fields(Gradients)]
    gradients = torch.autograd.grad(
        scalar, [getattr(step, name) for name in names for step in steps], materialize_grads=True)
    return Gradients(*(torch.stack(gradients[begin:begin + len(steps)]).mean(dim=1)
                       for begin in range(0, len(gradients), len(steps))))


def main() -> None:
    keep_freed_memory()  # speeds up both variants
    compute = resolve_compute("cpu", precision="float32")
    say(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    functions = saliency_functions(SETTINGS.func_type, SETTINGS.ids("direction_ids"),
                                   SETTINGS.direction_type)
    simulator = compute.place(published_simulator())
    vectors = simulator.random_vectors(max(NUM_SAMPLES), torch.Generator().manual_seed(0))
    copies = torch.stack([smoothgrad_starts(vector, SETTINGS.batch_size,
                                            SETTINGS.perturbation_scale, 0, number)
                          for number, vector in enumerate(vectors)])

    def ours(num_samples: int) -> list[Gradients]:
        one_pass = SaliencyPass(simulator, compute, copies[:num_samples], functions,
                                SETTINGS.common_timesteps, SETTINGS.num_sim_steps,
                                coordinates=coordinates)
        return [one_pass.gradients(function) for function in functions]

    def plain() -> list[Gradients]:
        return [one_function(simulator, copies[0], function)
                for function in functions[:PLAIN_FUNCTIONS]]

    for function, fast_gradients, plain_gradients in zip(functions, ours(1), plain()):
        for name in vars(fast_gradients):
            a, b = getattr(fast_gradients, name)[0], getattr(plain_gradients, name)
            assert (a - b).norm() <= 0.01 * b.norm(), f"{name} of {function.name}"
    say(f"both variants agree in {PLAIN_FUNCTIONS} functions")
    slow, *fast = measure_in_turns(
        {"plain": lambda: cost_of(plain).seconds / PLAIN_FUNCTIONS} | {
            str(number): lambda number=number: cost_of(ours, number).seconds / number
            / len(functions) for number in NUM_SAMPLES}, REPEATS, warmup=0).values()
    for number, seconds in zip(NUM_SAMPLES, fast):
        say(f"{len(functions)} functions, {number} samples per pass: {seconds:.3f} s per map, one "
            f"function at a time {slow:.3f} s, ratio {slow / seconds:.1f}")


if __name__ == "__main__":
    main()

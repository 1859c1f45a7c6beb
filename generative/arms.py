"""The runs of an arm of a comparison in the simulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from agents.hooks import Patch
from agents.scopes import Scope, patched
from common.devices import Compute
from common.progress import with_progress
from generative.dataset import RolloutDataset
from generative.sampling import Sampler, SamplingPlan
from generative.simulator import Simulator
from interventions.alterations import Runner
from interventions.files import ArmRuns
from interventions.patch_text import warn_of_unused


def simulated_starts(simulator: Simulator, compute: Compute, plan: SamplingPlan,
                     dataset: RolloutDataset | None, num_starts: int, batch_size: int) -> Runner:
    """Simulates the same starts in every arm, with the agent's most likely actions and the most
    likely latents.

    Args:
        dataset: whose frames simulations start from, None for random starts.
        batch_size: simulations at a time.

    Raises:
        UserError: if there are fewer starts.
    """
    sampler = Sampler(simulator, compute, plan, dataset)
    sampler.check(num_starts)

    def run(patches: Sequence[Patch], std: Mapping[str, Tensor]) -> ArmRuns:
        with patched(simulator.agent.policy, patches, std) as scope:
            runs = simulated(sampler, num_starts, batch_size, scope)
        warn_of_unused(scope)
        return runs
    return run


def simulated(sampler: Sampler, num_starts: int, batch_size: int, scope: Scope) -> ArmRuns:
    """The runs of one arm in the simulator."""
    begins = range(0, num_starts, batch_size)
    samples = [sample.arrays for begin in with_progress(begins, len(begins), "batch")
               for sample in sampler.simulate(range(begin, min(begin + batch_size, num_starts)))]
    return ArmRuns(
        np.arange(num_starts),
        np.array([len(sample.values) for sample in samples]),
        np.array([sample.terminals.max() for sample in samples]),
        np.concatenate([sample.log_probs.argmax(axis=-1) for sample in samples]),
        np.concatenate([sample.values for sample in samples]),
        np.concatenate([sample.rewards for sample in samples]),
        *map(np.array, scope.total_moved()))

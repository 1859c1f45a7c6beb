"""Counterfactual maps: how functions change if blocks of cells show what could be there instead.

The maps have the files of saliency maps. Each block of cells of a sample's first frame is filled in
several ways, see ``generative.counterfactual``, and the sample's actions are repeated. The map at
step k shows, in each block, the function at step k minus its mean over the fillings, so positive
blocks raise the function, as in saliency maps. It is shifted with the camera, so that a block stays
where it is in the level. Gradients with respect to states are zero.

Letters in shape comments: G samples in a batch, T steps of a sample, T' steps of the simulation,
M blocks, K fillings of each, R rows: all fillings of some samples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from common.errors import UserError
from generative.batches import divide
from generative.camera import PATCH, shift
from generative.config import GRID
from generative.counterfactual import blocks_of_cells, filled_starts, variance_shares
from generative.filling import check_worlds, initial_images
from generative.networks import LatentSampler
from generative.saliency.files import SaliencyArrays, SaliencyFolder
from generative.saliency.gradients import (
    COUNTERFACTUAL,
    VALUE_DELTA,
    Gradients,
    SaliencyFunction,
)
from generative.saliency.run import SampleSaliency
from generative.sample_files import SampleArrays
from generative.simulator import Start, Step
from generative.spatial import split_state
from generative.start_worlds import on, world_seeds

_MODE = LatentSampler("mode")
_FILLINGS = 2  # random stream; part of the seeds
_ROWS_PER_BATCH = 64


@dataclasses.dataclass(frozen=True)
class CounterfactualGradients(Gradients):
    """Counterfactual maps in the form of gradients.

    Attributes:
        effects: the function in each filling minus the function in the sample, float32
            (G, T', M, K).
    """

    effects: Tensor


class CounterfactualMaps(SampleSaliency):
    """Computation of counterfactual maps of simulated samples; see ``SampleSaliency``.

    Raises:
        UserError: if the simulator cannot fill holes, or a function compares steps.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        check_worlds(self._simulator)
        if VALUE_DELTA in [function.what for function in self.plan.functions]:
            raise UserError(f"counterfactual maps show functions at single steps, so there is none "
                            f"of {VALUE_DELTA}; leave it out of --saliency_func_type")

    def gradients(self, numbers: Sequence[int], samples: SampleArrays,
                  functions: Sequence[SaliencyFunction], without_env_grads: bool,
                  ) -> Iterator[tuple[SaliencyFunction, Gradients]]:
        """Yield the maps of functions in samples; see ``SampleSaliency.gradients``."""
        simulator, plan, device = self._simulator, self.plan, self._compute.device
        vectors = torch.from_numpy(samples.bottleneck_vec).to(device)
        actions = torch.from_numpy(samples.actions).T.to(device)  # (T, G)
        with torch.no_grad(), self._compute.autocast():
            start = simulator.start_from(vectors, _MODE, world=on(
                self.samples.worlds(numbers), self._compute))
            recorded = self._simulate(start, actions)
            images = initial_images(simulator, recorded[0].images.float(), start)
        self._compare(numbers, torch.stack([step.images for step in recorded], dim=1).float(
            ).cpu().numpy(), samples.frames)
        before = self._values(functions, recorded)  # (F, T', G)
        blocks = blocks_of_cells(plan.block_size).to(device)
        filled = torch.cat([
            self._fillings(functions, start, images, actions, torch.tensor(part, device=device),
                           blocks, numbers)
            for part in divide(list(np.ndindex(len(numbers), len(blocks), plan.num_fillings)),
                               _ROWS_PER_BATCH)], dim=2)
        effects = filled.unflatten(2, (len(numbers), len(blocks), -1)) - before[..., None, None]
        effects = effects.transpose(1, 2).float()  # (F, G, T', M, K)
        moved = torch.stack([split_state(step.env_h, simulator.config).camera.displacement
                             for step in recorded], dim=1).float()  # (G, T', 2)
        for function, of_function in zip(functions, effects):
            if not of_function.isfinite().all():
                raise UserError(f"the counterfactual map of {function.name} in one of the samples "
                                f"{min(numbers)} to {max(numbers)} holds NaN or infinity")
            yield function, self._as_gradients(of_function, moved, samples)

    def _fillings(self, functions: Sequence[SaliencyFunction], start: Start, images: Tensor,
                  actions: Tensor, rows: Tensor, blocks: Tensor, numbers: Sequence[int]) -> Tensor:
        """Return the functions in simulations with filled blocks (F, T', R).

        Args:
            rows: index of the sample, of the block and of the filling (R, 3).
        """
        of_sample, block, _ = rows.T
        seeds = world_seeds([(self.plan.seed, _FILLINGS, numbers[sample], *others)
                             for sample, *others in rows.tolist()]).to(rows.device)
        with torch.no_grad(), self._compute.autocast():
            filled = filled_starts(self._simulator, images, start, of_sample, blocks[block], seeds)
            return self._values(functions, self._simulate(filled, actions[:, of_sample]))

    def _simulate(self, start: Start, actions: Tensor) -> list[Step]:
        """Simulate to the last common step, with given actions (T, R)."""
        return self._simulator.imagine(start, _MODE, max(self.plan.common_timesteps) + 1,
                                       true_actions=actions)

    def _values(self, functions: Sequence[SaliencyFunction], steps: Sequence[Step]) -> Tensor:
        """Return the functions at each step (F, T', R)."""
        return torch.stack([torch.stack([
            function(steps, (step,), self._coordinates) for step in range(len(steps))])
            for function in functions]).float()

    def _as_gradients(self, effects: Tensor, moved: Tensor, samples: SampleArrays) -> Gradients:
        """Draw maps of effects (G, T', M, K), shifted by the camera's displacement (G, T', 2)."""
        number, length, _, height, width = np.moveaxis(samples.frames, -1, 2).shape
        side = GRID // self.plan.block_size
        maps = -effects.mean(dim=3).unflatten(2, (side, side))
        size = PATCH * self.plan.block_size
        maps = maps.repeat_interleave(size, dim=2).repeat_interleave(size, dim=3)
        view, inside = shift(maps.flatten(0, 1)[:, None], moved.flatten(0, 1))
        view = (view * inside).unflatten(0, maps.shape[:2])  # (G, T', 1, H, W)
        colours = samples.frames.shape[-1]
        images = view.new_zeros(number, length, colours, height, width)
        images[:, :maps.shape[1]] = view / colours  # maps are sums over colours
        return CounterfactualGradients(images.cpu(), torch.zeros(samples.hidden_states.shape),
                                       torch.zeros(samples.env_h.shape), effects.cpu())

    def maps(self, gradients: Gradients, row: int) -> np.ndarray:
        """Return the maps (T, H, W) of one sample. They are not smoothed."""
        return gradients.images[row].sum(dim=1).numpy()

    def arrays(self, gradients: Gradients, row: int, sample: SampleArrays,
               processed: np.ndarray) -> SaliencyArrays:
        """Return the arrays to store for one sample; see ``SampleSaliency.arrays``."""
        return SaliencyArrays(processed=processed, **{
            name: gradient[row].numpy() for name, gradient in vars(gradients).items()})


def effect_sizes(folder: SaliencyFolder, numbers: Sequence[int], function: str
                 ) -> tuple[float, float, float]:
    """Measure how much the filled blocks of samples change a function at the last step.

    Args:
        function: name of the function.

    Returns:
        The mean absolute effect of a block, the mean standard deviation over its fillings, and the
        share of the variance in a sample that is due to the filling rather than the block.
    """
    effects = torch.from_numpy(np.stack([
        folder.read("effects", number, function + COUNTERFACTUAL) for number in numbers]))[:, -1]
    shares = variance_shares(effects.movedim(0, -1))  # effects (samples, M, K)
    return (float(effects.mean(dim=2).abs().mean()),
            float(effects.std(dim=2, correction=0).mean()), float(shares[shares.isfinite()].mean()))


def report_effects(folder: SaliencyFolder, numbers: Sequence[int],
                   functions: Sequence[SaliencyFunction]) -> None:
    """Print ``effect_sizes`` of functions."""
    for function in functions:
        size, spread, share = effect_sizes(folder, numbers, function.name)
        print(f"{function.name}: blocks change it by {size:.3g} on average, with a standard "
              f"deviation of {spread:.3g} over fillings; {share:.0%} of the variance in a sample "
              "is due to the filling rather than the block")

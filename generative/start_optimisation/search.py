"""Optimise start vectors for all objectives by gradient ascent through the simulated rollout.

Several starts of an objective share a batch. For each start, the search maximises::

    score - penalty * (excess + end),  score = sign * (target - mean) / deviation

where mean and deviation of the target are taken over recorded starts, excess is defined by
``RecordedDensity``, and end is the surprisal, in nats, that the episode has not ended by the step:
the sum of -log(1 - P(end)). Without this term, the search finds the black frames after an episode's
end. For all starts together, diversity * ``vector_crowding`` is subtracted, the term that spreads
the simulator's vectors in training. Nothing is sampled: latents take their most likely class, the
agent takes its most likely actions, and both pass straight-through gradients. These are biased, so
the vector with the best forward pass is kept, not the last vector.

Objectives are optimised separately and their starts have fixed places in a batch, so results do not
depend on other objectives, nor on which files existed when the search was started.

Letters in shape comments: K starts of an objective, N recorded starts, T simulated steps, B
samples, V bottleneck vector.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from common.devices import Compute
from common.errors import UserError
from common.progress import Progress
from common.signals import deferred_signals
from common.video import enlarge, mark_action, side_by_side, write_strip, write_video
from generative.dataset import RolloutDataset, Windows
from generative.losses import vector_crowding
from generative.networks import on_unit_sphere
from generative.sample_files import SampleArrays, SampleFolder, SampleOrigin
from generative.sampling import FRAMES_PER_SECOND, VIDEO_SCALE, film, imagined_from
from generative.simulator import Simulator
from generative.start_optimisation.objectives import Objective, rollout
from generative.start_optimisation.recorded_starts import RecordedDensity, RecordedStarts

STRIP_SIZE = 96  # pixels per frame of a strip
NEAREST_IN_STRIP = 3


@dataclasses.dataclass(frozen=True)
class SearchPlan:
    """Settings of a search.

    Attributes:
        step: step of the rollout, from 0, at which the target is read.
        iterations: number of Adam steps.
        learning_rate: learning rate of Adam, for the entries of the vectors.
        diversity: weight of the crowding penalty.
    """

    step: int
    iterations: int
    learning_rate: float
    diversity: float

    def __post_init__(self):
        if not 0 < self.learning_rate < float("inf"):
            raise UserError(f"--learning_rate must be above 0, not {self.learning_rate}")
        if not 0 <= self.diversity < float("inf"):
            raise UserError(f"--diversity must be a number from 0 up, not {self.diversity}")


@dataclasses.dataclass(frozen=True)
class Scale:
    """Mean and standard deviation of a target over recorded starts."""

    mean: float
    deviation: float

    def score(self, values, sign: float):
        """Convert values of the target to deviations from the mean, signed so that larger is
        better."""
        return sign * (values - self.mean) / self.deviation


def search(simulator: Simulator, compute: Compute, objective: Objective, begin: Tensor,
           scale: Scale, density: RecordedDensity, penalty: float, plan: SearchPlan) -> Tensor:
    """Return the best vector found from each initial vector (K, V).

    Args:
        begin: initial vectors (K, V).
        penalty: weight of the excess and end terms.

    Raises:
        UserError: if the target or its gradient is not finite.
    """
    free = begin.clone().to(compute.device).requires_grad_()
    adam = torch.optim.Adam([free], lr=plan.learning_rate)
    kept = on_unit_sphere(begin.to(compute.device))  # (K, V)
    best = torch.full((len(begin),), -float("inf"), device=compute.device)
    for iteration in range(plan.iterations + 1):
        vectors = on_unit_sphere(free)  # (K, V)
        with torch.set_grad_enabled(iteration < plan.iterations):
            steps, rollouts = rollout(simulator, compute, vectors, plan.step + 1,
                                      objective.target.layers)
            score = scale.score(objective.target(rollouts, plan.step), objective.sign)  # (K,)
            ends = torch.stack([functional.softplus(step.terminal_logits.float())
                                for step in steps]).sum(dim=0)  # (K,)
            worth = score - penalty * (density.excess(vectors) + ends)  # (K,)
        better = worth.detach() > best
        kept = torch.where(better.unsqueeze(-1), vectors.detach(), kept)
        best = torch.where(better, worth.detach(), best)
        if iteration == plan.iterations:
            break
        adam.zero_grad()
        (plan.diversity * vector_crowding(vectors) - worth.sum()).backward()
        if free.grad is None or not (torch.isfinite(worth).all()
                                     and torch.isfinite(free.grad).all()):
            raise UserError(f"{objective.name}: the target or its gradient holds NaN or infinity "
                            f"after {iteration} iterations; a smaller --learning_rate may help")
        adam.step()
        with torch.no_grad():
            free.copy_(on_unit_sphere(free))
    return kept


@dataclasses.dataclass(frozen=True)
class SearchContext:
    """Inputs shared by all searches.

    Attributes:
        dataset: recorded rollouts, with windows as long as the stored rollouts.
        starts: recorded starts.
        best_of: number of recorded starts, the last in ``starts``, that optimised starts are
            compared with; searches begin from the others.
        density: density of all recorded starts.
        objectives: objectives to optimise.
        columns: column of each objective's target in ``starts``.
        plan: settings of the search.
        num_starts: K, number of starts per objective.
        num_steps: number of steps of the stored rollouts.
    """

    simulator: Simulator
    compute: Compute
    dataset: RolloutDataset
    starts: RecordedStarts
    best_of: int
    density: RecordedDensity
    objectives: tuple[Objective, ...]
    columns: tuple[int, ...]
    plan: SearchPlan
    num_starts: int
    num_steps: int

    def scale(self, number: int) -> Scale:
        """Scale of an objective's simulated target over all recorded starts."""
        values = self.starts.simulated[:, self.columns[number]].astype(np.float64)
        return Scale(float(values.mean()), max(float(values.std()), 1e-9))

    def score(self, number: int, values: np.ndarray) -> np.ndarray:
        """Convert values of an objective's target to scores."""
        return self.scale(number).score(values.astype(np.float64), self.objectives[number].sign)

    def scores(self, number: int) -> np.ndarray:
        """Simulated scores (N,) of the recorded starts for an objective."""
        return self.score(number, self.starts.simulated[:, self.columns[number]])

    def begins(self, number: int) -> np.ndarray:
        """Rows of the recorded starts from which the searches of an objective begin (K,).

        They are the best recorded starts that are not used for comparison, from different episodes
        if possible.
        """
        pool = len(self.starts.windows) - self.best_of
        ranked = np.argsort(-self.scores(number)[:pool], kind="stable")
        _, first = np.unique(self.starts.episodes[ranked], return_index=True)
        apart = np.sort(first)  # the best of each episode, best first
        others = np.setdiff1d(np.arange(pool), apart)
        return ranked[np.concatenate([apart, others])[:self.num_starts]]

    def numbers(self, number: int) -> range:
        """Numbers of the samples of an objective."""
        return range(number * self.num_starts, (number + 1) * self.num_starts)


def write_starts(context: SearchContext, folder: SampleFolder, penalty: float,
                 with_videos: bool) -> int:
    """Optimise start vectors and write the missing samples until done, or until a signal to stop.

    Returns:
        0 when everything is written, 128 + the signal's number after a signal.
    """
    total = len(context.objectives)
    missing = [number for number in range(total) if not all(
        folder.has("sample", sample) for sample in context.numbers(number))]
    with (deferred_signals("order") as received,
          Progress(total, "order", total - len(missing)) as progress):
        for done, number in enumerate(missing, total - len(missing) + 1):
            if received:
                return 128 + received[0]
            begin = torch.from_numpy(context.starts.vectors[context.begins(number)])
            vectors = search(context.simulator, context.compute, context.objectives[number], begin,
                             context.scale(number), context.density, penalty, context.plan)
            samples = imagined_from(context.simulator, context.compute, vectors, context.num_steps)
            for sample, arrays in zip(context.numbers(number), samples):
                if not folder.has("sample", sample):
                    folder.add(sample, arrays, SampleOrigin(sample))
            progress.update(done)
        if with_videos:
            for number in range(total):
                if received:
                    return 128 + received[0]
                _write_videos(context, folder, context.numbers(number))
    return 0


def _write_videos(context: SearchContext, folder: SampleFolder, numbers: Sequence[int]) -> None:
    missing = [number for number in numbers if not folder.has("video", number)]
    if not missing:
        return
    samples = folder.stacked(missing)
    rows = context.density.nearest(torch.from_numpy(samples.bottleneck_vec), 1)[0][:, 0]
    nearest = imagined_from(context.simulator, context.compute,
                            torch.from_numpy(context.starts.vectors[rows]), context.num_steps)
    windows = context.dataset.batch(context.starts.windows[rows])
    for row, number in enumerate(missing):
        films = {"made to order": film(samples[row]), "nearest, simulated": film(nearest[row]),
                 "nearest, as recorded": _recorded_film(context, windows, row)}
        columns = {title: np.stack(list(frames))[:, None] for title, frames in films.items()}
        write_video(folder.file_of("video", number), side_by_side(columns, 1), FRAMES_PER_SECOND)


def _recorded_film(context: SearchContext, windows: Windows, row: int) -> Iterator[np.ndarray]:
    """Yield the recorded frames of the simulated steps, enlarged, with the input actions."""
    first = context.dataset.num_init_steps - 1
    frames = windows.frames[first:, row].movedim(1, -1).numpy()  # (T, H, W, C)
    for frame, action in zip(frames, windows.actions[first - 1:, row].tolist()):
        yield mark_action(enlarge(frame, VIDEO_SCALE), action)


def write_best_starts(context: SearchContext, path: Path, samples: Sequence[SampleArrays]) -> None:
    """Write an image strip of an objective's best start for each penalty and of the recorded starts
    nearest to the first of them."""
    (rows,), _ = context.density.nearest(torch.from_numpy(samples[0].bottleneck_vec[None]),
                                         min(NEAREST_IN_STRIP, len(context.starts.windows)))
    windows = context.dataset.batch(context.starts.windows[rows])
    first = context.dataset.num_init_steps - 1
    recorded = windows.frames[first:].movedim(2, -1).numpy()  # (T, B, H, W, C)
    write_strip(path, [*(list(sample.frames) for sample in samples),
                       *(list(recorded[:, row]) for row in range(len(rows)))], STRIP_SIZE)

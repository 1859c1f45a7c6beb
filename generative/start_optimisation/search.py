"""Gradient ascent on the start vector, through the simulated rollout.

Several starts of an order share a batch. What is maximised, of each start::

    score - penalty * (excess + end),  score = sign * (target - mean) / deviation

with mean and deviation of the target over recorded starts, the excess of ``RecordedDensity``, and
the surprise, in nats, at an episode that has not ended by the step: the sum of -log(1 - P(end)).
Without it the search finds the black frames behind an episode's end. For all starts together less
diversity * ``vector_crowding``, which the simulator was trained with to spread its vectors.
Nothing is drawn: latents take their most likely class, actions are the agent's likeliest, and both
pass straight-through gradients. These are biased, so the vector that was best in the forward pass
is kept, not the last one.

Letters in shape comments: K starts, B rollouts, V bottleneck vector.


Searching the starts of all orders and writing them as samples, as far as they are not there.

An order is searched by itself and its starts have their place in one batch, so what it gets does
not depend on other orders, nor on what was there already when the command was given.

Letters in shape comments: K starts of an order, N recorded starts, T simulated steps, B samples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from common.devices import Compute
from common.errors import UserError
from common.progress import Progress
from common.signals import deferred_signals
from common.video import enlarge, mark_action, side_by_side, write_strip
from generative.dataset import RolloutDataset, Windows
from generative.losses import vector_crowding
from generative.networks import on_unit_sphere
from generative.sample_files import SampleFolder, SampleOrigin, SampleWriter
from generative.sampling import FRAMES_PER_SECOND, VIDEO_SCALE, film, imagined_from
from generative.simulator import Simulator
from generative.start_optimisation.objectives import Objective, rollout
from generative.start_optimisation.recorded_starts import (
    MadeToOrderFolder,
    RecordedDensity,
    RecordedStarts,
)


@dataclasses.dataclass(frozen=True)
class SearchPlan:
    """Settings of a search.

    Attributes:
        step: of the rollout, from 0, at which the target is read.
        iterations: steps of Adam.
        learning_rate: of Adam, for the entries of the vectors.
        diversity: factor of the crowding.
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
    """Mean and deviation of a target over recorded starts."""

    mean: float
    deviation: float

    def score(self, values, sign: float):
        """Values of the target in deviations from the mean, the better the larger."""
        return sign * (values - self.mean) / self.deviation


def search(simulator: Simulator, compute: Compute, order: Objective, begin: Tensor, scale: Scale,
           density: RecordedDensity, penalty: float, plan: SearchPlan) -> Tensor:
    """The best vector on each start's way (K, V).

    Args:
        begin: vectors to begin from (K, V).
        penalty: factor of excess and end.

    Raises:
        UserError: if the target or its gradient is not finite.
    """
    free = begin.clone().to(compute.device).requires_grad_()
    adam = torch.optim.Adam([free], lr=plan.learning_rate)
    kept = on_unit_sphere(begin.to(compute.device))
    best = torch.full((len(begin),), -float("inf"), device=compute.device)
    for iteration in range(plan.iterations + 1):
        vectors = on_unit_sphere(free)
        with torch.set_grad_enabled(iteration < plan.iterations):
            imagination, answers = rollout(simulator, compute, vectors, plan.step + 1,
                                           order.target.layers)
            score = scale.score(order.target(answers, plan.step), order.sign)  # (K,)
            ends = torch.stack([functional.softplus(step.terminal_logits.float())
                                for step in imagination.steps]).sum(dim=0)  # (K,)
            worth = score - penalty * (density.excess(vectors) + ends)
        better = worth.detach() > best
        kept = torch.where(better.unsqueeze(-1), vectors.detach(), kept)
        best = torch.where(better, worth.detach(), best)
        if iteration == plan.iterations:
            break
        adam.zero_grad()
        (plan.diversity * vector_crowding(vectors) - worth.sum()).backward()
        if not (torch.isfinite(worth).all() and torch.isfinite(free.grad).all()):
            raise UserError(f"{order.name}: the target or its gradient holds NaN or infinity after "
                            f"{iteration} iterations; a smaller --learning_rate may help")
        adam.step()
        with torch.no_grad():
            free.copy_(on_unit_sphere(free))
    return kept


STRIP_SIZE = 96  # pixels of a frame in a picture
NEAREST_IN_PICTURE = 3


@dataclasses.dataclass(frozen=True)
class SearchContext:
    """All that a search needs beside its order.

    Attributes:
        dataset: recorded rollouts, with windows as long as the rollouts that are shown.
        starts: recorded ones.
        best_of: the last so many of them are those that found starts are compared with; searches
            begin from the others.
        density: of all recorded starts.
        num_starts: K.
        num_steps: of the rollouts that are stored.
    """

    simulator: Simulator
    compute: Compute
    dataset: RolloutDataset
    starts: RecordedStarts
    best_of: int
    density: RecordedDensity
    orders: tuple[Objective, ...]
    columns: tuple[int, ...]
    plan: SearchPlan
    num_starts: int
    num_steps: int

    def scale(self, order: int) -> Scale:
        """Of an order's target over all recorded starts, simulated."""
        values = self.starts.simulated[:, self.columns[order]].astype(np.float64)
        return Scale(float(values.mean()), max(float(values.std()), 1e-9))

    def scores(self, order: int) -> np.ndarray:
        """Of the recorded starts, simulated (N,)."""
        values = self.starts.simulated[:, self.columns[order]].astype(np.float64)
        return self.scale(order).score(values, self.orders[order].sign)

    def begins(self, order: int) -> np.ndarray:
        """Recorded starts that the searches of an order begin from: the best of those that found
        ones are not compared with, each of another episode as far as there are so many. (K,)"""
        pool = len(self.starts.windows) - self.best_of
        ranked = np.argsort(-self.scores(order)[:pool], kind="stable")
        _, first = np.unique(self.starts.episodes[ranked], return_index=True)
        apart = np.sort(first)  # the best of each episode, best first
        rest = np.setdiff1d(np.arange(pool), apart)
        return ranked[np.concatenate([apart, rest])[:self.num_starts]]

    def numbers(self, order: int) -> range:
        """The samples of an order."""
        return range(order * self.num_starts, (order + 1) * self.num_starts)


def make(ctx: SearchContext, writer: SampleWriter, penalty: float, with_videos: bool) -> int:
    """Search and write what is not on disk yet, until the end or a signal to stop.

    Returns:
        0 when all is written, 128 + the signal's number when it was stopped.
    """
    waiting = [number for number in range(len(ctx.orders))
               if not all(map(writer.has, ctx.numbers(number)))]
    done = len(ctx.orders) - len(waiting)
    with (deferred_signals("order") as received,
          Progress(len(ctx.orders), "order", done) as progress):
        for number in waiting:
            if received:
                return 128 + received[0]
            begin = torch.from_numpy(ctx.starts.vectors[ctx.begins(number)])
            found = search(ctx.simulator, ctx.compute, ctx.orders[number], begin,
                           ctx.scale(number), ctx.density, penalty, ctx.plan)
            arrays = imagined_from(ctx.simulator, ctx.compute, found, ctx.num_steps)
            for sample, each in zip(ctx.numbers(number), arrays):
                if not writer.has(sample):
                    writer.add(sample, each, SampleOrigin(sample, None, None, None, None))
            done += 1
            progress.update(done)
        if with_videos:
            for number in range(len(ctx.orders)):
                if received:
                    return 128 + received[0]
                _write_videos(ctx, writer, ctx.numbers(number))
    return 0


def _write_videos(ctx: SearchContext, writer: SampleWriter, numbers: Sequence[int]) -> None:
    missing = [number for number in numbers if not writer.folder.video_file(number).exists()]
    if not missing:
        return
    samples = writer.folder.stacked(missing)
    rows = ctx.density.nearest(torch.from_numpy(samples.bottleneck_vec), 1)[0][:, 0]
    near = imagined_from(ctx.simulator, ctx.compute,
                         torch.from_numpy(ctx.starts.vectors[rows]), ctx.num_steps)
    windows = ctx.dataset.batch(ctx.starts.windows[rows])
    for place, number in enumerate(missing):
        columns = {"made to order": np.stack(list(film(writer.folder.sample(number)))),
                   "nearest, simulated": np.stack(list(film(near[place]))),
                   "nearest, as recorded": np.stack(list(_as_recorded(ctx, windows, place)))}
        frames = side_by_side({title: each[:, None] for title, each in columns.items()}, 1)
        writer.add_video(number, frames, FRAMES_PER_SECOND)


def _as_recorded(ctx: SearchContext, windows: Windows, row: int) -> Iterator[np.ndarray]:
    """The recorded frames of the simulated steps, enlarged, with the action that entered each."""
    first = ctx.dataset.num_init_steps - 1
    frames = windows.frames[first:, row].movedim(1, -1).numpy()  # (T, H, W, C)
    for frame, action in zip(frames, windows.actions[first - 1:, row].tolist()):
        yield mark_action(enlarge(frame, VIDEO_SCALE), action)


def write_picture(ctx: SearchContext, folder: MadeToOrderFolder, order: int,
                  best: dict[float, int]) -> None:
    """A strip of the best start of an order with each penalty, and those of the recorded starts
    that are nearest to the first of them.

    Args:
        best: sample by penalty.
    """
    samples = [SampleFolder(folder.samples(penalty)).sample(number)
               for penalty, number in best.items()]
    (rows,), _ = ctx.density.nearest(torch.from_numpy(samples[0].bottleneck_vec[None]),
                                      min(NEAREST_IN_PICTURE, len(ctx.starts.windows)))
    windows = ctx.dataset.batch(ctx.starts.windows[rows])
    shown = windows.frames[ctx.dataset.num_init_steps - 1:].movedim(2, -1).numpy()  # (T, B, …)
    write_strip(folder.picture_file(order), [*(list(sample.frames) for sample in samples), *(
        list(shown[:, row]) for row in range(len(rows)))], STRIP_SIZE)

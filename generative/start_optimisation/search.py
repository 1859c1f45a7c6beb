"""Optimise start vectors for all objectives by gradient ascent through the simulated rollout.

Several starts of an objective share a batch. For each start, the search maximises::

    score - penalty * (excess + end),  score = sign * (target - mean) / deviation

Mean and deviation of the target are taken over recorded starts, and excess is defined by
``RecordedDensity``. The term end is the negative log-probability, in nats, that the episode has not
ended by the step, which is the sum of -log(1 - P(end)) over the steps. Without this term, the
search finds the black frames after an episode's end. The term diversity * ``vector_crowding``,
which also spreads the simulator's vectors in training, is subtracted from the sum of this function
over the starts of a batch, not from each start's value. Nothing is sampled: latents take their most
likely class, the agent takes its most likely actions, and both pass straight-through gradients.
These gradients are biased, so the vector with the best score minus penalty is kept, not the last
vector.

In simulators with worlds, a start stays in the world in which its search begins: the sampled
surroundings of the recorded start.

Objectives are optimised separately, and their starts have fixed places in a batch. Results
therefore depend neither on other objectives nor on the files that existed when the search was
started.

Layout of the output folder::

    made_to_order.json        settings
    recorded.npz              recorded starts, see RecordedStarts, with the names of the targets
    penalty_<p>/              sample folder in the layout of record_gen_samples.py, for each
                              penalty; the samples of objective i are numbered from
                              i * (number of starts). Videos show each rollout next to the nearest
                              recorded start, simulated and as recorded
    pictures/order_<i>.png    the best start of objective i with each penalty, and the recorded
                              frames nearest to it, one start per row
    starts.csv                a row for each penalty, objective and start
    effects.csv               a row for each arm and outcome, see ``evaluation``
    report.md, targets.png

Letters in shape comments: O objectives, K starts of each, N recorded starts, G targets, T simulated
steps, B samples, H W C a frame, V bottleneck vector.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from common.devices import Compute
from common.errors import UserError
from common.parameters import positive
from common.progress import Progress
from common.schemas import Array, Entry, File, Npz, Schema, Table, Text
from common.signals import deferred_signals
from common.video import enlarge, mark_action, side_by_side, write_strip, write_video
from generative.dataset import RolloutDataset
from generative.losses import vector_crowding
from generative.networks import on_unit_sphere
from generative.sample_files import SampleArrays, SampleFolder, SampleOrigin
from generative.sampling import FRAMES_PER_SECOND, VIDEO_SCALE, film, imagined_from
from generative.simulator import Simulator
from generative.squares import World
from generative.start_optimisation.objectives import (
    AIMS,
    Objective,
    RecordedDensity,
    RecordedStarts,
    Target,
    recorded_worlds,
    rollout,
)

STRIP_SIZE = 96  # pixels per frame of a strip
NEAREST_IN_STRIP = 3
OPTIMISED_STARTS = Schema(
    "starts made to order", "python -m generative.optimise_start", items={
        "recorded": Entry("recorded.npz", Npz({
            "windows": Array(np.int64, "N"), "episodes": Array(np.int64, "N"),
            "frames": Array(np.int64, "N"), "vectors": Array(np.float32, "N V"),
            "simulated": Array(np.float32, "N G"), "real": Array(np.float32, "N G"),
            "targets": Array(np.str_, "G")})),
        "sample_settings": Entry("penalty_{}/recording.json", File()),
        "sample_lock": Entry("penalty_{}/.{}", File()),  # left over after a kill
        "sample_files": Entry("penalty_{}/sample_{}/{}", File()),
        "videos": Entry("penalty_{}/videos/{}", File())},
    results={
        "starts": Entry("starts.csv", Table()), "effects": Entry("effects.csv", Table(), True),
        "picture": Entry("pictures/order_{}.png", File()),
        "report": Entry("report.md", Text()), "figure": Entry("targets.png", File())},
    informative=("versions", "data_dir", "agent_file", "model_file"),
    settings_name="made_to_order.json")


@dataclasses.dataclass(frozen=True)
class SearchPlan:
    """Settings of a search.

    Attributes:
        step: step of the rollout, from 0, at which the target is evaluated.
        iterations: number of Adam steps.
        learning_rate: learning rate of Adam, for the entries of the vectors.
        diversity: weight of the crowding penalty.
    """

    step: int
    iterations: int
    learning_rate: float
    diversity: float

    def __post_init__(self):
        positive(self, "learning_rate")


def search(simulator: Simulator, compute: Compute, objective: Objective,
           begin: Tensor | tuple[Tensor, World | None], scale: Sequence[float],
           density: RecordedDensity, penalty: float, plan: SearchPlan) -> Tensor:
    """Optimise start vectors for one objective by gradient ascent.

    Args:
        simulator: simulator on the device of ``compute``.
        compute: device and precision.
        objective: objective to optimise.
        begin: initial vectors (K, V), or a pair of these and their worlds (K rows), which stay the
            same.
        scale: mean and standard deviation of the target over recorded starts.
        density: density of recorded start vectors, which defines the excess term.
        penalty: weight of the excess and end terms.
        plan: settings of the search.

    Returns:
        For each initial vector, the best vector of its search (K, V).

    Raises:
        UserError: if the target or its gradient is not finite.
    """
    begin, world = begin if isinstance(begin, tuple) else (begin, None)
    free = begin.clone().to(compute.device).requires_grad_()
    adam = torch.optim.Adam([free], lr=plan.learning_rate)
    kept = on_unit_sphere(begin.to(compute.device))  # (K, V)
    best = torch.full((len(begin),), -float("inf"), device=compute.device)
    for iteration in range(plan.iterations + 1):
        vectors = on_unit_sphere(free)  # (K, V)
        with torch.set_grad_enabled(iteration < plan.iterations):
            steps, rollouts = rollout(simulator, compute, vectors, plan.step + 1,
                                      objective.target.layers, world)
            values = objective.target.read(rollouts, plan.step)
            score = AIMS[objective.aim] * (values - scale[0]) / scale[1]  # (K,)
            ends = torch.stack([functional.softplus(step.terminal_logits.float())
                                for step in steps]).sum(dim=0)  # (K,)
            goal = score - penalty * (density.excess(vectors) + ends)  # (K,)
        better = goal.detach() > best
        kept = torch.where(better.unsqueeze(-1), vectors.detach(), kept)
        best = torch.where(better, goal.detach(), best)
        if iteration == plan.iterations:
            break
        adam.zero_grad()
        (plan.diversity * vector_crowding(vectors) - goal.sum()).backward()
        if free.grad is None or not (torch.isfinite(goal).all()
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
        simulator: simulator on the device of ``compute``.
        compute: device and precision.
        dataset: recorded rollouts, with windows of ``num_steps`` simulated steps.
        starts: recorded starts.
        best_of: number of recorded starts, the last in ``starts``, that optimised starts are
            compared with; searches begin from the remaining ones.
        density: density of all recorded starts.
        objectives: objectives to optimise: all targets with the first aim, then all targets with
            the second aim, if any.
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
    plan: SearchPlan
    num_starts: int
    num_steps: int

    @property
    def columns(self) -> np.ndarray:
        """Column of each objective's target in ``starts`` (O,)."""
        return np.arange(len(self.objectives)) % self.starts.simulated.shape[1]

    @property
    def targets(self) -> list[Target]:
        """Targets in the order of the columns of ``starts``."""
        return [objective.target for objective
                in self.objectives[:self.starts.simulated.shape[1]]]

    @functools.cached_property
    def scales(self) -> np.ndarray:
        """Mean and standard deviation (2, G) of the simulated targets over all recorded starts."""
        simulated = self.starts.simulated.T.astype(np.float64, order="C")
        return np.stack([simulated.mean(axis=1), simulated.std(axis=1).clip(min=1e-9)])

    def scores(self, values: np.ndarray) -> np.ndarray:
        """Convert values of the targets (…, G) to scores for the objectives (…, O)."""
        signs = np.array([AIMS[objective.aim] for objective in self.objectives])
        mean, deviation = self.scales[:, self.columns]  # (O,)
        return signs * (values.astype(np.float64)[..., self.columns] - mean) / deviation

    @functools.cached_property
    def recorded_scores(self) -> np.ndarray:
        """Scores (N, O) of the rollouts simulated from the recorded starts."""
        return self.scores(self.starts.simulated)

    def begins(self, number: int) -> np.ndarray:
        """Choose the recorded starts from which the searches of an objective begin.

        They are the best recorded starts that are not used for comparison, from different episodes
        if possible.

        Args:
            number: number of the objective.

        Returns:
            Rows of the recorded starts (K,).
        """
        pool = len(self.starts.windows) - self.best_of
        ranked = np.argsort(-self.recorded_scores[:pool, number], kind="stable")
        _, first = np.unique(self.starts.episodes[ranked], return_index=True)
        apart = np.sort(first)  # the best of each episode, best first
        remaining = np.setdiff1d(np.arange(pool), apart)
        return ranked[np.concatenate([apart, remaining])[:self.num_starts]]

    def worlds(self, rows: np.ndarray) -> World | None:
        """Return the worlds of recorded starts, the same in each call; None without worlds.

        Args:
            rows: rows of the recorded starts (B,).
        """
        return recorded_worlds(self.simulator, self.dataset, self.starts.windows[rows],
                               torch.from_numpy(self.starts.vectors[rows]).to(self.compute.device))

    def numbers(self, number: int) -> range:
        """Return the numbers of the samples that belong to the ``number``-th objective."""
        return range(number * self.num_starts, (number + 1) * self.num_starts)


def write_starts(context: SearchContext, folder: SampleFolder, penalty: float,
                 with_videos: bool) -> int:
    """Optimise start vectors for all objectives, and write the missing samples.

    The search stops early after a stop signal.

    Args:
        context: inputs of the searches.
        folder: sample folder for this penalty.
        penalty: weight of the excess and end terms.
        with_videos: write the missing videos as well.

    Returns:
        0 when everything is written, 128 + the signal's number after a signal.
    """
    with (deferred_signals("objective") as received,
          Progress(len(context.objectives), "objective") as progress):
        for number, objective in enumerate(context.objectives):
            if received:
                return 128 + received[0]
            numbers = context.numbers(number)
            if not all(folder.has("sample", sample) for sample in numbers):
                rows = context.begins(number)
                begin, world = torch.from_numpy(context.starts.vectors[rows]), context.worlds(rows)
                vectors = search(context.simulator, context.compute, objective, (begin, world),
                                 context.scales[:, context.columns[number]].tolist(),
                                 context.density, penalty, context.plan)
                samples = imagined_from(context.simulator, context.compute, vectors,
                                        context.num_steps, world)
                for row, (sample, arrays) in enumerate(zip(numbers, samples)):
                    if not folder.has("sample", sample):
                        folder.add(sample, arrays, SampleOrigin(sample),
                                   None if world is None else world[row])
            if with_videos:
                _write_videos(context, folder, numbers)
            progress.update(number + 1)
    return 0


def _write_videos(context: SearchContext, folder: SampleFolder, numbers: Sequence[int]) -> None:
    missing = [number for number in numbers if not folder.has("video", number)]
    if not missing:
        return
    samples = folder.stacked(missing)
    rows = context.density.nearest(torch.from_numpy(samples.bottleneck_vec), 1)[0][:, 0]
    nearest = imagined_from(context.simulator, context.compute,
                            torch.from_numpy(context.starts.vectors[rows]), context.num_steps,
                            context.worlds(rows))
    recorded, actions = _recorded_frames(context, rows)
    for row, number in enumerate(missing):
        films = {"optimised": film(samples[row]), "nearest, simulated": film(nearest[row]),
                 "nearest, as recorded": [
                     mark_action(enlarge(frame, VIDEO_SCALE), action)
                     for frame, action in zip(recorded[:, row], actions[:, row])]}
        columns = {title: np.stack(list(frames))[:, None] for title, frames in films.items()}
        write_video(folder.file_of("video", number), side_by_side(columns, 1), FRAMES_PER_SECOND)


def _recorded_frames(context: SearchContext, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the recorded frames and input actions of the simulated steps.

    Args:
        rows: rows of the recorded starts (B,).

    Returns:
        Frames (T, B, H, W, C) and actions (T, B).
    """
    windows, first = (context.dataset.batch(context.starts.windows[rows]),
                      context.dataset.num_init_steps - 1)
    return windows.frames[first:].movedim(2, -1).numpy(), windows.actions[first - 1:-1].numpy()


def write_best_starts(context: SearchContext, path: Path, samples: Sequence[SampleArrays]) -> None:
    """Write an image strip with one start per row.

    The rows show the best start of an objective for each penalty, then the recorded starts nearest
    to the first of these best starts.

    Args:
        path: image to write.
        samples: samples of the best starts.
    """
    (rows,), _ = context.density.nearest(torch.from_numpy(samples[0].bottleneck_vec[None]),
                                         min(NEAREST_IN_STRIP, len(context.starts.windows)))
    recorded, _ = _recorded_frames(context, rows)
    write_strip(path, [*(list(sample.frames) for sample in samples),
                       *(list(recorded[:, row]) for row in range(len(rows)))], STRIP_SIZE)

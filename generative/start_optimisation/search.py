"""Optimise starts for all objectives by gradient ascent through the simulated rollout.

There are two search spaces. A search over *vectors* varies the bottleneck vector and keeps the
world of the recorded start from which it begins. A search in *noise* varies the noise of the prior,
which determines both vector and world, and begins from random samples of the prior. Both keep the
norm of each start's variables, so vectors stay on the unit sphere, and noise keeps the norm that is
typical of a Gaussian. The first uses Adam. The second uses gradient ascent with adaptive steps:
each step varies one of the tensors of noise, begins at the best noise so far, and has a length that
grows after success and shrinks after failure. Adam is unsuitable: worlds depend steeply on the
noise of their squares, whose gradients hold for steps of a thousandth of the norm only, and those
of the other tensors for a tenth. Several starts of an objective share a batch. For each start, the
search maximises::

    score - penalty * (excess + end),  score = sign * (target - mean) / deviation

Mean and deviation of the target are taken over recorded starts, and excess is defined by
``RecordedDensity``; in a search in noise, it is 0. The term end is the negative log-probability, in
nats, that the episode has not ended by the step, which is the sum of -log(1 - P(end)) over the
steps. Without this term, the search finds the black frames after an episode's end. The term
diversity * ``vector_crowding``, which also spreads the simulator's vectors in training, is
subtracted from the sum of this function over the starts of a batch, not from each start's value; in
noise, it is left out. Nothing is sampled: latents take their most likely class, the agent takes its
most likely actions, and both pass straight-through gradients. These gradients are biased, so the
start with the best score minus penalty is kept, not the last one.

Objectives are optimised separately, and their starts have fixed places in a batch. Results
therefore depend neither on other objectives nor on the files that existed when the search was
started.

Layout of the output folder::

    made_to_order.json        settings
    recorded.npz              recorded starts, see RecordedStarts, with the names of the targets
    prior.npz                 random samples of the prior, see PriorStarts; only if it is trained
    penalty_<p>/              sample folder in the layout of record_gen_samples.py, for each
                              penalty; the samples of objective i are numbered from
                              i * (number of starts). Videos show each rollout next to the nearest
                              recorded start, simulated and as recorded
    pictures/order_<i>.png    the best start of objective i with each penalty, and the recorded
                              frames nearest to it, one start per row
    starts.csv                a row for each penalty, objective and start
    effects.csv               a row for each condition and outcome, see ``evaluation``
    pairs.csv                 a row for each paired test over groups of targets, see ``paired``
    report.md, targets.png

Letters in shape comments: O objectives, K starts of each, N recorded starts, G targets, P samples
of the prior.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from common.devices import Compute
from common.errors import UserError
from common.locks import LOCK_NAME
from common.parameters import positive
from common.progress import Progress
from common.schemas import Array, Entry, File, Npz, Schema, Table, Text
from common.signals import deferred_signals
from common.video import enlarge, mark_action, side_by_side, write_strip, write_video
from generative.dataset import RolloutDataset
from generative.losses import vector_crowding
from generative.prior_networks import PriorNoise
from generative.sample_files import SAMPLES, SampleArrays, SampleFolder, SampleOrigin
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
from generative.start_optimisation.prior_starts import PriorStarts
from generative.start_worlds import rounded

STRIP_SIZE = 96  # pixels per frame of a strip
NEAREST_IN_STRIP = 3
NOISE, VECTOR = "noise", "vector"  # search spaces
LEARNING_RATES = {NOISE: 0.03, VECTOR: 0.02}  # defaults
_LONGER, _SHORTER = 2.0, 0.25  # factors of a step's length after success and failure
OPTIMISED_STARTS = Schema(
    "starts made to order", "python -m generative.optimise_start", items={
        "recorded": Entry("recorded.npz", Npz({
            "windows": Array(np.int64, "N"), "episodes": Array(np.int64, "N"),
            "frames": Array(np.int64, "N"), "vectors": Array(np.float32, "N V"),
            "simulated": Array(np.float32, "N G"), "real": Array(np.float32, "N G"),
            "targets": Array(np.str_, "G")})),
        "prior": Entry("prior.npz", Npz({
            "seeds": Array(np.int64, "P"), "simulated": Array(np.float32, "P G"),
            "loss": Array(np.float32, "P")})),
        "sample_settings": Entry("penalty_{}/recording.json", File()),
        # The lock may be left over after a kill.
        "sample_lock": Entry("penalty_{}/{}", File(), choices=(LOCK_NAME,)),
        "sample_files": Entry("penalty_{}/sample_{:0>5}/{}", File(),
                              choices=SAMPLES.entry("sample").format.file_names()),
        "videos": Entry("penalty_{}/videos/sample_{:0>5}.mp4", File())},
    results={
        "starts": Entry("starts.csv", Table()), "effects": Entry("effects.csv", Table(), True),
        "pairs": Entry("pairs.csv", Table()),
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
        learning_rate: learning rate of Adam for the entries of vectors; in noise, length of the
            first steps relative to the norm of the noise.
        diversity: weight of the crowding penalty in searches over vectors.
    """

    step: int
    iterations: int
    learning_rate: float
    diversity: float

    def __post_init__(self):
        positive(self, "learning_rate")


@dataclasses.dataclass(frozen=True)
class Beginnings:
    """Beginnings of the searches for one objective.

    Attributes:
        variables: variables of the search, each with a row per start (K, …).
        starts: differentiable function that maps variables to bottleneck vectors (K, V), and to
            their worlds, or None without worlds.
        adaptive: search with adaptive steps instead of Adam.
    """

    variables: tuple[Tensor, ...]
    starts: Callable[..., tuple[Tensor, World | None]]
    adaptive: bool = False


def in_vectors(vectors: Tensor, world: World | None = None) -> Beginnings:
    """Return beginnings of a search over vectors (K, V), whose worlds stay the same."""
    return Beginnings((vectors,), lambda vectors: (vectors, world))


def in_noise(simulator: Simulator, seeds: Tensor) -> Beginnings:
    """Return beginnings of a search in noise.

    Args:
        seeds: seeds of the noise, and of what lies beyond the worlds, int64 (K,).
    """
    return Beginnings(
        tuple(vars(simulator.prior.noise(seeds)).values()),
        lambda *noise: simulator.sample_starts(PriorNoise(*noise), seeds.to(noise[0].device)), True)


def search(simulator: Simulator, compute: Compute, objective: Objective, begin: Beginnings,
           scale: Sequence[float], density: RecordedDensity | None, penalty: float,
           plan: SearchPlan) -> tuple[Tensor, ...]:
    """Optimise the variables of starts for one objective by gradient ascent.

    Args:
        simulator: simulator on the device of ``compute``.
        begin: beginnings of K searches.
        scale: mean and standard deviation of the target over recorded starts.
        density: density of recorded start vectors, which defines the excess term; None for no
            excess term.
        penalty: weight of the excess and end terms.

    Returns:
        For each beginning, the best variables of its search, in the form of ``begin.variables``.

    Raises:
        UserError: if the target or its gradient is not finite.
    """
    first = [tensor.to(compute.device) for tensor in begin.variables]
    norms = [tensor.flatten(1).norm(dim=1) for tensor in first]  # (K,)
    free = [tensor.clone().requires_grad_() for tensor in first]
    adam = torch.optim.Adam(free, lr=plan.learning_rate)
    lengths = [torch.full_like(norm, plan.learning_rate) for norm in norms]  # (K,)
    slopes = list(map(torch.zeros_like, first))  # at ``kept``
    kept, block = first, None
    best = torch.full((len(first[0]),), -float("inf"), device=compute.device)
    for iteration in range(plan.iterations + 1):
        with torch.set_grad_enabled(iteration < plan.iterations):
            variables = list(map(_rescaled, free, norms))
            vectors, world = begin.starts(*variables)  # (K, V)
            steps, rollouts = rollout(simulator, compute, vectors, plan.step + 1,
                                      objective.target.layers, world)
            values = objective.target.read(rollouts, plan.step)
            score = AIMS[objective.aim] * (values - scale[0]) / scale[1]  # (K,)
            ends = torch.stack([functional.softplus(step.terminal_logits.float())
                                for step in steps]).sum(dim=0)  # (K,)
            excess = 0 if density is None else density.excess(vectors)  # (K,)
            goal = score - penalty * (excess + ends)  # (K,)
        better = goal.detach() > best
        kept = [torch.where(_rows(better, tensor), tensor.detach(), before)
                for tensor, before in zip(variables, kept)]
        best = torch.where(better, goal.detach(), best)
        if iteration == plan.iterations:
            break
        crowding = 0 if begin.adaptive else plan.diversity * vector_crowding(vectors)
        gradients = torch.autograd.grad(crowding - goal.sum(), free, materialize_grads=True)
        if not all(torch.isfinite(tensor).all() for tensor in (goal, *gradients)):
            raise UserError(f"{objective.name}: the target or its gradient holds NaN or infinity "
                            f"after {iteration} iterations; a smaller --learning_rate may help")
        with torch.no_grad():
            if begin.adaptive:
                slopes = [torch.where(_rows(better, slope), -gradient, slope)
                          for gradient, slope in zip(gradients, slopes)]
                if block is not None:
                    lengths[block] *= torch.where(better, _LONGER, _SHORTER)
                block = iteration % len(free)
                for tensor, before in zip(free, kept):
                    tensor.copy_(before)
                free[block] += _rescaled(slopes[block], lengths[block] * norms[block])
            else:
                for tensor, gradient in zip(free, gradients):
                    tensor.grad = gradient
                adam.step()
            for tensor, norm in zip(free, norms):
                tensor.copy_(_rescaled(tensor, norm))
    return tuple(kept)


def _rows(values: Tensor, tensor: Tensor) -> Tensor:
    """Reshape values (K,) so that they broadcast over the rows of a tensor (K, …)."""
    return values.view(-1, *[1] * (tensor.ndim - 1))


def _rescaled(tensor: Tensor, norms: Tensor) -> Tensor:
    """Rescale the rows of a tensor (K, …) to norms (K,)."""
    return tensor * _rows(norms / tensor.flatten(1).norm(dim=1).clamp(min=1e-30), tensor)


@dataclasses.dataclass(frozen=True)
class SearchContext:
    """Inputs shared by all searches.

    Attributes:
        simulator: simulator on the device of ``compute``.
        dataset: recorded rollouts, with windows of ``num_steps`` simulated steps.
        best_of: number of recorded starts, the last in ``starts``, that optimised starts are
            compared with; searches begin from the remaining ones.
        density: density of all recorded starts.
        objectives: objectives to optimise: all targets with the first aim, then all targets with
            the second aim, if any.
        num_starts: K, number of starts per objective.
        space: search space, NOISE or VECTOR.
        prior: random samples of the prior; None without a trained prior. A search in noise begins
            from the first ``pool`` samples.
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
    space: str = VECTOR
    prior: PriorStarts | None = None

    @property
    def pool(self) -> int:
        """Number of recorded starts, the first in ``starts``, from which searches may begin."""
        return len(self.starts.windows) - self.best_of

    @property
    def num_evaluated(self) -> int:
        """Number of starts that the searches for an objective evaluate, including the candidates
        from which they may begin."""
        return self.pool + self.num_starts * self.plan.iterations

    @property
    def columns(self) -> np.ndarray:
        """Column of each objective's target in ``starts`` (O,)."""
        return np.arange(len(self.objectives)) % self.starts.simulated.shape[1]

    @property
    def groups(self) -> np.ndarray:
        """Number of the group of dependent targets that each objective belongs to (O,)."""
        names = [objective.target.group or objective.target.name for objective in self.objectives]
        return np.unique(names, return_inverse=True)[1]

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

    @functools.cached_property
    def prior_scores(self) -> np.ndarray | None:
        """Scores (P, O) of the rollouts simulated from the samples of the prior."""
        return None if self.prior is None else self.scores(self.prior.simulated)

    def begins(self, number: int) -> np.ndarray:
        """Choose the starts from which the searches of an objective begin.

        In noise, they are the best of the first ``pool`` samples of the prior. Otherwise, they are
        the best recorded starts that are not used for comparison, from different episodes if
        possible.

        Returns:
            Rows of the samples of the prior, or of the recorded starts, best first (K,).
        """
        if self.space == NOISE:
            assert self.prior_scores is not None
            return np.argsort(-self.prior_scores[:self.pool, number],
                              kind="stable")[:self.num_starts]
        ranked = np.argsort(-self.recorded_scores[:self.pool, number], kind="stable")
        _, first = np.unique(self.starts.episodes[ranked], return_index=True)
        apart = np.sort(first)  # the best of each episode, best first
        remaining = np.setdiff1d(np.arange(self.pool), apart)
        return ranked[np.concatenate([apart, remaining])[:self.num_starts]]

    def begin_scores(self, number: int) -> np.ndarray:
        """Return the scores (K,) of the starts from which the searches of an objective begin."""
        scores = self.prior_scores if self.space == NOISE else self.recorded_scores
        assert scores is not None
        return scores[self.begins(number), number]

    def beginnings(self, number: int) -> Beginnings:
        """Return the beginnings of the searches of an objective."""
        rows = self.begins(number)
        if self.space == NOISE:
            assert self.prior is not None
            return in_noise(self.simulator, torch.from_numpy(self.prior.seeds[rows]))
        return in_vectors(torch.from_numpy(self.starts.vectors[rows]), self.worlds(rows))

    @functools.cached_property
    @torch.no_grad()
    def begin_starts(self) -> list[tuple[Tensor, World | None]]:
        """Vectors (K, V), and in noise rounded worlds, of the beginnings of each objective."""
        numbers = range(len(self.objectives))
        if self.space == VECTOR:
            return [(torch.from_numpy(self.starts.vectors[self.begins(number)]), None)
                    for number in numbers]
        starts = [begin.starts(*(tensor.to(self.compute.device) for tensor in begin.variables))
                  for begin in map(self.beginnings, numbers)]
        return [(vectors, None if world is None else rounded(world)) for vectors, world in starts]

    def nearest(self, vectors: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Find the recorded starts nearest to vectors (B, V), see ``RecordedDensity.nearest``.

        In a search over vectors, recorded starts from which searches may begin are excluded.
        """
        first = 0 if self.space == NOISE else self.pool
        among = dataclasses.replace(self.density, vectors=self.density.vectors[first:])
        rows, cosines = among.nearest(torch.from_numpy(vectors), number)
        return rows + first, cosines

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
    """Optimise starts for all objectives, and write the missing samples.

    The search stops early after a stop signal.

    Args:
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
                begin = context.beginnings(number)
                found = search(context.simulator, context.compute, objective, begin,
                               context.scales[:, context.columns[number]].tolist(),
                               None if context.space == NOISE else context.density, penalty,
                               context.plan)
                with torch.no_grad():
                    vectors, world = begin.starts(*found)
                world = None if world is None else rounded(world)
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
    rows = context.nearest(samples.bottleneck_vec, 1)[0][:, 0]
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
    """
    (rows,), _ = context.nearest(samples[0].bottleneck_vec[None],
                                 min(NEAREST_IN_STRIP, context.best_of))
    recorded, _ = _recorded_frames(context, rows)
    write_strip(path, [*(list(sample.frames) for sample in samples),
                       *(list(recorded[:, row]) for row in range(len(rows)))], STRIP_SIZE)

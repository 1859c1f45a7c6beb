"""Simulate rollouts that are stored as samples or compared between interventions.

Every random choice depends only on the seed and the number of the start, so a sample depends
neither on the number of samples nor, beyond rounding, on the batch in which it is simulated. The
starts are always divided into the same batches, so a resumed recording is bit-identical to an
uninterrupted one.

Letters in shape comments: T simulated steps, B samples of a batch, H W C a frame, V bottleneck
vector.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agents.hooks import patched
from agents.patch import NO_LEVEL, Array, BatchInfo, Patch
from agents.reference_set import recorded_reference
from agents.rollout_files import RolloutFolder
from common.devices import Compute
from common.errors import UserError
from common.game_constants import ACTION_NAMES
from common.parameters import one_of
from common.progress import Progress
from common.signals import deferred_signals
from common.video import (
    by_direction,
    enlarge,
    mark_action,
    mark_reward,
    mark_terminal,
    write_video,
)
from generative.batches import AlignedBatch, align, as_frames, divide, in_batches
from generative.dataset import RolloutDataset
from generative.networks import Draw, LatentSampler, PresetDraw
from generative.sample_files import SampleArrays, SampleFolder, SampleOrigin
from generative.simulator import Simulation, Simulator, stack
from interventions.comparison import ArmRuns, Testbed
from interventions.patch_text import warn_of_unused

ALL_ACTIONS = "pattern"  # stands for all nine manual actions
OTHER_NAMES = {"jump": "up", "jumpleft": "upleft", "jumpright": "upright"}  # synonyms
FRAMES_PER_SECOND = 5
VIDEO_SCALE = 3
# Random streams; a generator's seed consists of seed, stream and number of the start.
_VECTORS, _LATENTS = 1, 2


@dataclasses.dataclass(frozen=True)
class SamplingPlan:
    """Settings of a folder of simulated samples.

    Attributes:
        random_start: start from random vectors instead of recorded frames.
        recorded_actions: force the recorded actions; after an episode's end, the action is 0.
        manual_actions: force one of these actions at every step, with one sample per action. If no
            actions are forced, the agent acts, and the simulator predicts the first input action.
        num_steps: T, number of simulated steps.
        num_init_steps: number of recorded frames that a simulation starts from.
        sample_latents: draw z instead of taking its most likely class.
        seed: seed of every random choice.

    Raises:
        UserError: if the settings contradict each other.
    """

    random_start: bool
    recorded_actions: bool
    manual_actions: tuple[str, ...]
    num_steps: int
    num_init_steps: int
    sample_latents: bool
    seed: int

    def __post_init__(self):
        if self.recorded_actions and self.random_start:
            raise UserError("a random start has no recorded actions; leave --use_recorded_actions "
                            "or --recording_rand_init (record.rand_init) out")
        if self.recorded_actions and self.manual_actions:
            raise UserError("--use_recorded_actions and --manual_action exclude each other")

    @property
    def samples_per_start(self) -> int:
        return max(len(self.manual_actions), 1)

    @property
    def folder_name(self) -> str:
        """Name of the folder for the samples."""
        start = "rand_init" if self.random_start else "informed_init"
        if self.manual_actions:
            return "manual_actions_rand_init" if self.random_start else "manual_actions"
        return "recorded_actions" if self.recorded_actions else start


def manual_actions(names: Sequence[str]) -> tuple[str, ...]:
    """Parse action names, or synonyms in ``OTHER_NAMES``, from the command line.

    Raises:
        UserError: if an action is unknown (the message suggests the nearest name) or given twice,
            or ``pattern``, which stands for all nine actions, is combined with other actions.
    """
    names = [OTHER_NAMES.get(name, name) for name in names]
    for name in names:
        one_of("--manual_action", name, (*ACTION_NAMES, ALL_ACTIONS))
        if names.count(name) > 1 or (name == ALL_ACTIONS and len(names) > 1):
            raise UserError(f"--manual_action: give '{name}' only once, and '{ALL_ACTIONS}' "
                            "without other actions")
    return ACTION_NAMES if names == [ALL_ACTIONS] else tuple(names)


class Sampler:
    """Simulates the samples of a plan.

    The samples of start i, one per manual action, are numbered from ``i * plan.samples_per_start``.

    Args:
        simulator: simulator on the device of ``compute``.
        compute: device and precision.
        plan: settings of the samples.
        dataset: recorded rollouts, with windows of ``plan.num_steps`` steps; not used for random
            starts.
        num_starts: number of starts.

    Attributes:
        episodes: numbers on disk of the episodes of the starts; empty for random starts.

    Raises:
        UserError: if the dataset has fewer than ``num_starts`` windows.
    """

    def __init__(self, simulator: Simulator, compute: Compute, plan: SamplingPlan,
                 dataset: RolloutDataset | None, num_starts: int):
        self._simulator, self._compute, self.plan = simulator, compute, plan
        self._dataset = None if plan.random_start else dataset
        self.episodes: set[int] = set()
        if self._dataset is not None:
            if num_starts > len(self._dataset):
                raise UserError(f"{self._dataset.folder.path} has {len(self._dataset)} windows to "
                                f"start from, fewer than the {num_starts} of --num_samples")
            self._order = np.random.default_rng(plan.seed).permutation(len(self._dataset))
            self.episodes = set(self._dataset.episodes_of(self._order[:num_starts]).tolist())

    @torch.no_grad()
    def simulate(self, starts: Sequence[int]) -> list[tuple[int, SampleArrays, SampleOrigin]]:
        """Simulate all samples of some starts in one batch.

        Returns:
            Number, arrays and origin of each sample.
        """
        plan, simulator = self.plan, self._simulator
        draw = self._draw(starts)
        # Metadata of the samples, with the start in place of the episode.
        numbers = np.repeat(np.array(starts, np.int64), plan.samples_per_start)  # (B,)
        rows = BatchInfo(numbers, np.zeros_like(numbers), np.full_like(numbers, NO_LEVEL))
        batch = None if self._dataset is None else align(
            self._dataset.batch(self._order[list(starts)]).to(self._compute.device),
            dataclasses.replace(simulator.config, num_init_steps=plan.num_init_steps,
                                num_sim_steps=plan.num_steps))
        with self._compute.autocast():
            vectors = (self._random_vectors(starts) if batch is None
                       else simulator.encode(batch.initial_images))
            vectors = vectors.repeat_interleave(plan.samples_per_start, dim=0)  # (B, V)
            start = simulator.start_from(vectors, draw)
            steps = simulator.imagine(start, draw, plan.num_steps, rows=rows,
                                      true_actions=self._given_actions(len(starts), batch))
        places = [(number, position) for number in starts
                  for position in range(plan.samples_per_start)]
        return [(number * plan.samples_per_start + position, arrays,
                 self._origin(number, position))
                for (number, position), arrays in zip(places, _split(stack(start, steps)))]

    def _random_vectors(self, starts: Sequence[int]) -> Tensor:
        vectors = []
        for start in starts:
            seed = np.random.SeedSequence([self.plan.seed, _VECTORS, start])
            generator = torch.Generator().manual_seed(int(seed.generate_state(1, np.uint64)[0]))
            vectors.append(self._simulator.random_vectors(1, generator))
        return torch.cat(vectors)

    def _draw(self, starts: Sequence[int]) -> Draw:
        """Return a latent sampler with the same random numbers for all samples of a start."""
        plan = self.plan
        if not plan.sample_latents:
            return LatentSampler("mode")
        shape = (plan.num_steps + 1, self._simulator.config.stoch_dim)
        uniform = [np.random.default_rng([plan.seed, _LATENTS, start]).random(shape, np.float32)
                   for start in starts]
        uniform = np.stack(uniform, axis=1).repeat(plan.samples_per_start, axis=1)
        return PresetDraw(torch.from_numpy(uniform).to(self._compute.device))

    def _given_actions(self, num_starts: int, batch: AlignedBatch | None) -> Tensor | None:
        """Return the forced actions (T, B), or None if the agent acts.

        Args:
            batch: recorded windows of the starts; None for random starts.
        """
        if batch is not None and self.plan.recorded_actions:
            return batch.actions
        if not self.plan.manual_actions:
            return None
        actions = torch.tensor([ACTION_NAMES.index(name) for name in self.plan.manual_actions],
                               device=self._compute.device)
        return actions.repeat(self.plan.num_steps, num_starts)

    def _origin(self, start: int, position: int) -> SampleOrigin:
        action = self.plan.manual_actions[position] if self.plan.manual_actions else None
        if self._dataset is None:
            return SampleOrigin(start, manual_action=action)
        window = int(self._order[start])
        place = self._dataset.place(window)
        return SampleOrigin(start, window, place.episode, place.frame, action)


@torch.no_grad()
def imagined_from(simulator: Simulator, compute: Compute, vectors: Tensor,
                  num_steps: int) -> list[SampleArrays]:
    """Simulate rollouts with the agent's actions and the most likely latents.

    Args:
        simulator: simulator on the device of ``compute``.
        compute: device and precision.
        vectors: bottleneck vectors (B, V).
        num_steps: T, number of steps.

    Returns:
        One sample per vector.
    """
    draw = LatentSampler("mode")
    with compute.autocast():
        start = simulator.start_from(vectors.to(compute.device), draw)
        steps = simulator.imagine(start, draw, num_steps)
    return _split(stack(start, steps))


def _split(simulation: Simulation) -> list[SampleArrays]:
    """Split a batch of simulations into samples."""
    fields = {name: getattr(simulation, name).transpose(0, 1).float().cpu().numpy() for name in (
        "rewards", "terminals", "values", "hidden_states", "log_probs", "env_h")}  # (B, T, …)
    batch = SampleArrays(
        frames=as_frames(simulation.images.transpose(0, 1)),  # (B, T, H, W, C)
        actions=simulation.actions.argmax(dim=-1).T.cpu().numpy(),  # (B, T)
        bottleneck_vec=simulation.start.bottleneck_vec.float().cpu().numpy(),  # (B, V)
        **fields)
    return [batch[row] for row in range(len(batch.frames))]


def record_samples(sampler: Sampler, folder: SampleFolder, starts: Sequence[int], batch_size: int,
                   with_videos: bool) -> int:
    """Simulate and write the missing samples; stop early after a stop signal.

    Args:
        sampler: sampler that simulates the samples.
        folder: folder opened for writing.
        starts: numbers of the starts.
        batch_size: number of starts per batch.
        with_videos: write the missing videos as well.

    Returns:
        0 when all samples are written, 128 + the signal's number after a signal.
    """
    per_start = sampler.plan.samples_per_start
    numbers = {start: range(start * per_start, (start + 1) * per_start) for start in starts}
    missing = {start for start in starts
               if not all(folder.has("sample", number) for number in numbers[start])}
    with (deferred_signals("batch") as received,
          Progress(len(starts), "start", len(starts) - len(missing)) as progress):
        for batch in divide(starts, batch_size):
            if received:
                return 128 + received[0]
            if not missing.isdisjoint(batch):
                for number, arrays, origin in sampler.simulate(batch):
                    if not folder.has("sample", number):
                        folder.add(number, arrays, origin)
            if with_videos:
                for start in batch:
                    _write_videos(folder, start, numbers[start], sampler.plan)
            missing -= set(batch)
            progress.update(len(starts) - len(missing))
    folder.finish()
    return 0


def _write_videos(folder: SampleFolder, start: int, numbers: Sequence[int],
                  plan: SamplingPlan) -> None:
    """Write the missing videos of the samples from one start.

    If there is a sample for each of the nine actions, one more video shows all of them.
    """
    for number in numbers:
        if not folder.has("video", number):
            write_video(folder.file_of("video", number), film(folder.sample(number)),
                        FRAMES_PER_SECOND)
    if plan.manual_actions == ACTION_NAMES and not folder.has("start_video", start):
        films = [film(folder.sample(number)) for number in numbers]
        write_video(folder.file_of("start_video", start), map(by_direction, zip(*films)),
                    FRAMES_PER_SECOND)


def film(sample: SampleArrays) -> Iterator[np.ndarray]:
    """Yield the frames of a sample, enlarged and marked with the action, the probability that the
    episode ends, and the reward."""
    for frame, action, probability, reward in zip(sample.frames, sample.actions, sample.terminals,
                                                  sample.rewards):
        marked = mark_action(enlarge(frame, VIDEO_SCALE), action)
        yield mark_reward(mark_terminal(marked, probability), reward)


def simulated_starts(simulator: Simulator, compute: Compute, plan: SamplingPlan,
                     dataset: RolloutDataset | None, num_starts: int, batch_size: int,
                     recording: RolloutFolder, settings: Mapping[str, Any]) -> Testbed:
    """Return a testbed that simulates the same starts under each condition of a comparison.

    Args:
        simulator, compute: see ``Sampler``.
        plan: settings of the simulations, without forced actions or drawn latents: the agent takes
            its most likely actions, and latents take their most likely class.
        dataset: recorded rollouts to start from; None for random starts.
        num_starts: number of starts.
        batch_size: number of starts per batch.
        recording: rollouts from which reference frames are drawn, except from the episodes of the
            starts.
        settings: further settings of the runs, saved in the folder.

    Raises:
        UserError: if the dataset has fewer than ``num_starts`` windows.
    """
    sampler = Sampler(simulator, compute, plan, dataset, num_starts)

    def run(patches: Sequence[Patch], std: Mapping[str, Array]) -> ArmRuns:
        with patched(simulator.agent.policy, patches, std) as scope:
            samples = [arrays for starts in in_batches(range(num_starts), batch_size)
                       for _, arrays, _ in sampler.simulate(starts)]
        warn_of_unused(scope)
        return ArmRuns(
            np.arange(num_starts),
            np.array([len(arrays.values) for arrays in samples]),
            np.array([arrays.terminals.max() for arrays in samples]),
            np.concatenate([arrays.log_probs.argmax(axis=-1) for arrays in samples]),
            np.concatenate([arrays.values for arrays in samples]),
            np.concatenate([arrays.rewards for arrays in samples]),
            *map(np.array, scope.total_change()))

    return Testbed(
        run, {"where": "the simulator", **dataclasses.asdict(plan), **settings},
        ("simulated starts", f"{plan.num_steps} steps of most likely actions"),
        simulator.agent.policy, None, [],
        lambda size, seed: recorded_reference(recording, sampler.episodes, size, seed))

"""Simulate rollouts that are stored as samples, and starts of simulated games.

Every random choice depends only on the seed and the number of the start, so a sample depends
neither on the number of samples nor, beyond rounding, on the batch in which it is simulated. The
starts are always divided into the same batches, so a resumed recording is bit-identical to an
uninterrupted one.

Letters in shape comments: T simulated steps, B samples of a batch, H W C a frame, V bottleneck
vector.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from agents.frames import to_frames
from agents.patch import NO_LEVEL, BatchInfo
from common.devices import Compute
from common.errors import UserError
from common.game_constants import ACTION_LABELS, ACTION_NAMES, action_number
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
from generative.batches import AlignedBatch, align, divide
from generative.dataset import RolloutDataset
from generative.networks import Draw, LatentSampler, PresetDraw
from generative.rendered_worlds import check_rendering, rendered_world
from generative.sample_files import SampleArrays, SampleFolder, SampleOrigin
from generative.simulator import Simulation, Simulator, Start, stack
from generative.squares import World
from generative.start_worlds import check_prior, on, rounded, sampled_world, world_seeds

ALL_ACTIONS = "pattern"  # stands for all nine manual actions
FRAMES_PER_SECOND = 5
VIDEO_SCALE = 3
# Random streams; a generator's seed consists of seed, stream and number of the start, and for the
# last three the number of the world.
_VECTORS, _LATENTS, _WORLDS, _ENDS, _ACTIONS = 1, 2, 3, 4, 5
# Fields of SamplingPlan that apply to simulators with worlds only.
_WORLD_FIELDS = ("num_worlds", "rendered_worlds", "sample_ends", "sample_actions")


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
        num_worlds: number of samples per recorded start that differ in their sampled surroundings.
            This and the fields below apply to simulators with worlds only.
        rendered_worlds: take surroundings from the game instead of sampling them.
        sample_ends: draw the end of the episode from its probability at each step.
        sample_actions: let the agent sample its actions instead of taking the most likely ones.

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
    num_worlds: int = 1
    rendered_worlds: bool = False
    sample_ends: bool = False
    sample_actions: bool = False

    def __post_init__(self):
        if self.recorded_actions and self.random_start:
            raise UserError("a random start has no recorded actions; leave --use_recorded_actions "
                            "or --recording_rand_init (record.rand_init) out")
        if self.recorded_actions and self.manual_actions:
            raise UserError("--use_recorded_actions and --manual_action exclude each other")
        if self.sample_actions and (self.recorded_actions or self.manual_actions):
            raise UserError("--sample_actions samples the agent's own actions; leave "
                            "--use_recorded_actions and --manual_action out")
        if self.random_start and (self.rendered_worlds or self.num_worlds > 1):
            flag = "--rendered_worlds" if self.rendered_worlds else "--num_worlds"
            raise UserError(f"a random start comes with a world of its own; leave {flag} or "
                            "--recording_rand_init (record.rand_init) out")
        if self.rendered_worlds and self.num_worlds > 1:
            raise UserError("a recorded start has only one rendered world; leave --num_worlds or "
                            "--rendered_worlds out")

    @property
    def samples_per_world(self) -> int:
        return max(len(self.manual_actions), 1)

    @property
    def samples_per_start(self) -> int:
        return self.num_worlds * self.samples_per_world

    def settings(self, simulator: Simulator) -> dict:
        """Return the settings by name, without those of worlds if the simulator has none."""
        settings = dataclasses.asdict(self)
        if simulator.squares is None:
            for name in _WORLD_FIELDS:
                del settings[name]
        return settings

    @property
    def folder_name(self) -> str:
        """Name of the folder for the samples."""
        start = "rand_init" if self.random_start else "informed_init"
        if self.manual_actions:
            return "manual_actions_rand_init" if self.random_start else "manual_actions"
        return "recorded_actions" if self.recorded_actions else start


def manual_actions(names: Sequence[str],
                   labels: Sequence[str] = ACTION_LABELS) -> tuple[str, ...]:
    """Parse actions from the command line, see ``common.game_constants.action_number``.

    Returns:
        The names in ``ACTION_LABELS``.

    Raises:
        UserError: if an action is unknown (the message suggests the nearest name) or given twice,
            or ``pattern``, which stands for all nine actions, is combined with other actions.
    """
    names = [name if name == ALL_ACTIONS else
             ACTION_LABELS[action_number(name, labels, "--manual_action")] for name in names]
    for name in names:
        if names.count(name) > 1 or (name == ALL_ACTIONS and len(names) > 1):
            raise UserError(f"--manual_action: give '{name}' only once, and '{ALL_ACTIONS}' "
                            "without other actions")
    return ACTION_NAMES if names == [ALL_ACTIONS] else tuple(names)


class Sampler:
    """Simulates the samples of a plan.

    The samples of start i, one per world and manual action, are numbered from
    ``i * plan.samples_per_start``; those in the same world have consecutive numbers.

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
        UserError: if the dataset has fewer than ``num_starts`` windows, or the simulator or the
            recording does not have what the plan needs.
    """

    def __init__(self, simulator: Simulator, compute: Compute, plan: SamplingPlan,
                 dataset: RolloutDataset | None, num_starts: int):
        self._simulator, self._compute, self.plan = simulator, compute, plan
        self._dataset = None if plan.random_start else dataset
        self._check_worlds()
        self.episodes: set[int] = set()
        if self._dataset is not None:
            if num_starts > len(self._dataset):
                raise UserError(f"{self._dataset.folder.path} has {len(self._dataset)} windows to "
                                f"start from, fewer than the {num_starts} of --num_samples")
            self._order = np.random.default_rng(plan.seed).permutation(len(self._dataset))
            self.episodes = set(self._dataset.episodes_of(self._order[:num_starts]).tolist())

    def _check_worlds(self) -> None:
        """Raise UserError if the plan needs worlds that simulator or recording cannot provide."""
        plan, simulator = self.plan, self._simulator
        if simulator.squares is None:
            for field in dataclasses.fields(plan):
                if field.name in _WORLD_FIELDS and getattr(plan, field.name) != field.default:
                    raise UserError(f"--{field.name} needs a simulator with worlds, but this one "
                                    "was trained without (world_squares is null)")
        elif not plan.rendered_worlds:
            check_prior(simulator, "" if plan.random_start else ", or give --rendered_worlds")
        elif self._dataset is not None:
            check_rendering(simulator, self._dataset.folder)

    @torch.no_grad()
    def simulate(self, starts: Sequence[int],
                 ) -> list[tuple[int, SampleArrays, SampleOrigin, World | None]]:
        """Simulate all samples of some starts in one batch.

        Returns:
            Number, arrays, origin and world of each sample.
        """
        plan, draw = self.plan, self._draw(starts)
        # Metadata of the samples, with the start in place of the episode.
        numbers = np.repeat(np.array(starts, np.int64), plan.samples_per_start)  # (B,)
        rows = BatchInfo(numbers, np.zeros_like(numbers), np.full_like(numbers, NO_LEVEL))
        start, batch = self._start(starts, draw)
        with self._compute.autocast():
            steps = self._simulator.imagine(start, draw, plan.num_steps, rows=rows,
                                            true_actions=self._given_actions(len(starts), batch),
                                            choose=self._choose(starts))
        samples = sample_arrays(stack(start, steps))
        places = [(number, position) for number in starts
                  for position in range(plan.samples_per_start)]
        return [(number * plan.samples_per_start + position, samples[row],
                 self._origin(number, position, samples.terminals[row]),
                 None if start.world is None else start.world[row])
                for row, (number, position) in enumerate(places)]

    def begin(self, starts: Sequence[int]) -> Start:
        """Return the beginnings of the simulations from some starts, for ``SimulatedGame``."""
        return self._start(starts, self._draw(starts))[0]

    @torch.no_grad()
    def _start(self, starts: Sequence[int], draw: Draw) -> tuple[Start, AlignedBatch | None]:
        """Return the beginnings of all samples, and the recorded windows, None for random starts.
        """
        batch = None if self._dataset is None else align(
            self._dataset.batch(self._order[list(starts)]).to(self._compute.device),
            dataclasses.replace(self._simulator.config, num_init_steps=self.plan.num_init_steps,
                                num_sim_steps=self.plan.num_steps))
        vectors, world = self._starts(starts, batch)
        with self._compute.autocast():
            return self._simulator.start_from(vectors, draw, world=world), batch

    def _starts(self, starts: Sequence[int],
                batch: AlignedBatch | None) -> tuple[Tensor, World | None]:
        """Return bottleneck vectors (B, V) and worlds of all samples.

        Args:
            batch: recorded windows of the starts; None for random starts.
        """
        plan, simulator = self.plan, self._simulator
        seeds = world_seeds([(plan.seed, _WORLDS, start, number) for start in starts
                             for number in range(plan.num_worlds)]).to(self._compute.device)
        world = None
        if batch is not None:
            with self._compute.autocast():
                vectors = simulator.encode(batch.initial_images)
            vectors = vectors.repeat_interleave(plan.num_worlds, dim=0)
        elif simulator.squares is not None:
            vectors, world = simulator.sample_starts(simulator.prior.noise(seeds), seeds)
            world = rounded(world)
        else:
            vectors = self._random_vectors(starts)
        if simulator.squares is not None and batch is not None:
            if plan.rendered_worlds:
                assert self._dataset is not None
                places = [self._dataset.place(int(self._order[start])) for start in starts]
                world = rendered_world(simulator, vectors, self._dataset.folder, places, seeds)
            else:
                images = batch.initial_images[-1].repeat_interleave(plan.num_worlds, dim=0)
                world = sampled_world(simulator, vectors, images, seeds)
        rows = torch.arange(len(vectors), device=vectors.device).repeat_interleave(
            plan.samples_per_world)
        return vectors[rows], None if world is None else world[rows]

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

    def _choose(self, starts: Sequence[int]) -> Callable[[Tensor], Tensor] | None:
        """Return a sampler of the agent's actions; None if it takes the most likely ones."""
        if not self.plan.sample_actions:
            return None
        uniform = np.stack([self._uniform(_ACTIONS, start, number) for start in starts
                            for number in range(self.plan.num_worlds)], axis=1)  # (T, B)
        draw = PresetDraw(torch.from_numpy(uniform[:, :, None]).to(self._compute.device))
        return lambda log_probs: draw(log_probs[:, None])[:, 0]

    def _uniform(self, stream: int, start: int, world: int) -> np.ndarray:
        """Draw a random number from 0 to 1 for each step, float32 (T,)."""
        return np.random.default_rng([self.plan.seed, stream, start, world]).random(
            self.plan.num_steps, np.float32)

    def _given_actions(self, num_starts: int, batch: AlignedBatch | None) -> Tensor | None:
        """Return the forced actions (T, B), or None if the agent acts.

        Args:
            batch: recorded windows of the starts; None for random starts.
        """
        if batch is not None and self.plan.recorded_actions:
            return batch.actions.repeat_interleave(self.plan.num_worlds, dim=1)
        if not self.plan.manual_actions:
            return None
        actions = torch.tensor([ACTION_LABELS.index(name) for name in self.plan.manual_actions],
                               device=self._compute.device)
        return actions.repeat(self.plan.num_steps, num_starts * self.plan.num_worlds)

    def _origin(self, start: int, position: int, terminals: np.ndarray) -> SampleOrigin:
        """Return the origin of a sample, without the seed of its world.

        Args:
            position: number of the sample among those of the start.
            terminals: probability that the episode ends at each step (T,).
        """
        plan = self.plan
        world, number = divmod(position, plan.samples_per_world)
        origin = SampleOrigin(start, manual_action=plan.manual_actions[number]
                              if plan.manual_actions else None)
        if self._dataset is not None:
            window = int(self._order[start])
            place = self._dataset.place(window)
            origin = dataclasses.replace(origin, window=window, episode=place.episode,
                                         frame=place.frame)
        if self._simulator.squares is None:
            return origin
        ends = np.flatnonzero(self._uniform(_ENDS, start, world) < terminals)
        return dataclasses.replace(
            origin, world=world, ended_at=int(ends[0]) if plan.sample_ends and len(ends) else None)


@torch.no_grad()
def imagined_from(simulator: Simulator, compute: Compute, vectors: Tensor, num_steps: int,
                  world: World | None = None) -> list[SampleArrays]:
    """Simulate rollouts with the agent's actions and the most likely latents.

    Args:
        simulator: simulator on the device of ``compute``.
        compute: device and precision.
        vectors: bottleneck vectors (B, V).
        num_steps: T, number of steps.
        world: worlds of the rollouts; None without worlds.

    Returns:
        One sample per vector.
    """
    draw = LatentSampler("mode")
    with compute.autocast():
        start = simulator.start_from(vectors.to(compute.device), draw, world=on(world, compute))
        steps = simulator.imagine(start, draw, num_steps)
    samples = sample_arrays(stack(start, steps))
    return [samples[row] for row in range(len(samples.frames))]


def sample_arrays(simulation: Simulation) -> SampleArrays:
    """Return the samples of a batch of simulations (B, …)."""
    fields = {name: getattr(simulation, name).transpose(0, 1).float().cpu().numpy() for name in (
        "rewards", "terminals", "values", "hidden_states", "log_probs", "env_h")}  # (B, T, …)
    return SampleArrays(
        frames=to_frames(simulation.images.transpose(0, 1)),  # (B, T, H, W, C)
        actions=simulation.actions.argmax(dim=-1).T.cpu().numpy(),  # (B, T)
        bottleneck_vec=simulation.start.bottleneck_vec.float().cpu().numpy(),  # (B, V)
        **fields)


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
                for number, arrays, origin, world in sampler.simulate(batch):
                    if not folder.has("sample", number):
                        folder.add(number, arrays, origin, world)
            if with_videos:
                for start in batch:
                    for world_numbers in divide(numbers[start], sampler.plan.samples_per_world):
                        _write_videos(folder, world_numbers, sampler.plan)
            missing -= set(batch)
            progress.update(len(starts) - len(missing))
    folder.finish()
    return 0


def _write_videos(folder: SampleFolder, numbers: Sequence[int], plan: SamplingPlan) -> None:
    """Write the missing videos of the samples from one start in one world.

    If there is a sample for each of the nine actions, one more video shows all of them.
    """
    for number in numbers:
        if not folder.has("video", number):
            write_video(folder.file_of("video", number), film(folder.sample(number)),
                        FRAMES_PER_SECOND)
    start_video = "start_video", numbers[0] // len(numbers)
    if plan.manual_actions == ACTION_NAMES and not folder.has(*start_video):
        films = [film(folder.sample(number)) for number in numbers]
        write_video(folder.file_of(*start_video), map(by_direction, zip(*films)),
                    FRAMES_PER_SECOND)


def film(sample: SampleArrays) -> Iterator[np.ndarray]:
    """Yield the frames of a sample, enlarged and marked with the action, the probability that the
    episode ends, and the reward."""
    for frame, action, probability, reward in zip(sample.frames, sample.actions, sample.terminals,
                                                  sample.rewards):
        marked = mark_action(enlarge(frame, VIDEO_SCALE), action)
        yield mark_reward(mark_terminal(marked, probability), reward)

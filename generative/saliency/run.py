"""Compute and store the saliency of many samples.

The saliency of a sample depends only on the seed, the sample's number, its bottleneck vector and
its world. Only rounding depends on the other samples of the batch. Runs can therefore be resumed,
and divided among shards. The requested samples are always divided into the same batches, so a
resumed run is bit-identical to an uninterrupted one.

Letters in shape comments: G samples in a batch.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from agents.outputs import VALUE
from common.devices import Compute
from common.errors import UserError
from common.progress import Progress, with_progress
from common.signals import deferred_signals
from common.video import write_video
from generative.batches import divide
from generative.prior_networks import PriorNoise
from generative.saliency.files import SaliencyArrays, SaliencyFolder, Specificity
from generative.saliency.gradients import (
    COUNTERFACTUAL,
    FRAMES_PER_SECOND,
    STATE_MAPS,
    UNSIGNED,
    VALUE_DELTA,
    WITHOUT_ENV_GRADS,
    Coordinates,
    Gradients,
    SaliencyFunction,
    SaliencyPass,
    coloured,
    combined_vector,
    film,
    full_colour,
    saliency_maps,
    smoothgrad_starts,
    specificity,
    state_maps,
    suffix_of,
    title_of,
)
from generative.sample_files import SampleArrays, SampleFolder, SampleOrigin, open_samples
from generative.sampling import imagined_from
from generative.simulator import Simulator
from generative.squares import World
from generative.start_worlds import rounded

DIFFERENCE = "value_difference"  # name of the demonstration in its folder
# Mean difference of two frames (0 to 255) above which they are reported to differ.
NOTICEABLE = 8
_KINDS = {"": "with gradients through the environment",
          WITHOUT_ENV_GRADS: "without gradients through the environment",
          COUNTERFACTUAL: "counterfactual"}


@dataclasses.dataclass(frozen=True)
class SaliencyPlan:
    """Settings of a saliency run.

    Attributes:
        functions: functions whose gradients are computed.
        common_timesteps: steps at which the functions are evaluated.
        num_copies: number of copies of a sample; the first copy is the sample itself.
        perturbation_scale: standard deviation of the noise that is added to the start vectors of
            all copies but the first.
        gaussian_kernel_size: size of the smoothing kernel, in pixels.
        sigma: standard deviation of the smoothing kernel, in pixels.
        without_env_grads: stop gradients at the action that enters the environment.
        num_fillings: number of fillings of each block of a counterfactual map; 0 for gradients.
        block_size: size of these blocks in cells.
    """

    functions: tuple[SaliencyFunction, ...]
    common_timesteps: tuple[int, ...]
    num_copies: int
    perturbation_scale: float
    gaussian_kernel_size: int
    sigma: float
    without_env_grads: bool
    seed: int
    num_fillings: int = 0
    block_size: int = 0

    @property
    def suffix(self) -> str:
        """Suffix of functions in file names."""
        return (COUNTERFACTUAL if self.num_fillings else
                WITHOUT_ENV_GRADS if self.without_env_grads else "")

    @property
    def settings(self) -> dict:
        """Settings that all functions share. Those of gradients have no fillings."""
        settings = dataclasses.asdict(self)
        unused = ("num_copies", "perturbation_scale", "gaussian_kernel_size", "sigma",
                  "without_env_grads") if self.num_fillings else ("num_fillings", "block_size")
        return {name: value for name, value in settings.items()
                if name not in ("functions", *unused)}

    def file_name(self, function: SaliencyFunction) -> str:
        """Return the name of a function in file names."""
        return function.name + self.suffix


class SampleSaliency:
    """Computation of the saliency of simulated samples.

    Args:
        simulator: simulator on the device of ``compute``.
        samples: folder of the simulated samples.
        description: settings of simulator and agent, for the description files.
        matrices: checksums of the matrices that define the directions, by file name; None if no
            function needs them.
        coordinates: see ``SaliencyPass``.

    Attributes:
        diverging: numbers of the samples whose stored frames the simulator does not reproduce.
    """

    def __init__(self, simulator: Simulator, compute: Compute, plan: SaliencyPlan,
                 samples: SampleFolder, description: dict, matrices: dict | None = None,
                 coordinates: Coordinates | None = None):
        self._simulator, self._compute, self.plan = simulator, compute, plan
        self.samples, self._coordinates = samples, coordinates
        self._description, self._matrices = description, matrices
        self.diverging: set[int] = set()

    def description(self, function: SaliencyFunction) -> dict:
        """Return the settings to store with the files of a function."""
        return {"function": function.name, **self.plan.settings, **self._description,
                "matrices_sha256": None if function.direction is None else self._matrices}

    def read(self, numbers: Sequence[int]) -> SampleArrays:
        """Read and stack samples.

        Raises:
            UserError: if a sample is damaged, does not fit the simulator, or is too short for the
                plan.
        """
        samples = self.samples.stacked(numbers)
        size, num_steps = samples.bottleneck_vec.shape[1], samples.frames.shape[1]
        expected, last = self._simulator.config.bottleneck_vec_size, max(self.plan.common_timesteps)
        has_delta = VALUE_DELTA in [function.what for function in self.plan.functions]
        where = f"sample {numbers[0]} in {self.samples.path} has"
        if size != expected:
            raise UserError(f"{where} a bottleneck vector of size {size}, but the simulator needs "
                            f"size {expected}")
        if num_steps <= last:
            raise UserError(f"{where} {num_steps} steps, too few for step {last} of "
                            "common_timesteps, which counts from 0")
        if num_steps < 2 and has_delta:
            raise UserError(f"{where} one step, but {VALUE_DELTA} needs two")
        return samples

    def gradients(self, numbers: Sequence[int], samples: SampleArrays,
                  functions: Sequence[SaliencyFunction], without_env_grads: bool,
                  ) -> Iterator[tuple[SaliencyFunction, Gradients]]:
        """Yield the gradients of functions in samples, from one forward pass.

        Args:
            samples: the samples, stacked.
            without_env_grads: stop gradients at the action that enters the environment.

        Raises:
            UserError: if a gradient is not finite; the message names function and sample.
        """
        plan = self.plan
        copies = torch.stack([
            smoothgrad_starts(torch.from_numpy(vector), plan.num_copies, plan.perturbation_scale,
                              plan.seed, number)
            for number, vector in zip(numbers, samples.bottleneck_vec)])
        forward_pass = SaliencyPass(
            self._simulator, self._compute, (copies, self.samples.worlds(numbers)), functions,
            plan.common_timesteps, samples.frames.shape[1], without_env_grads, self._coordinates)
        self._compare(numbers, forward_pass.unperturbed_images().numpy(), samples.frames)
        for function in functions:
            gradients = forward_pass.gradients(function)
            for name, gradient in vars(gradients).items():
                for number, of_sample in zip(numbers, gradient):
                    if not of_sample.isfinite().all():
                        raise UserError(f"the gradient of {function.name} with respect to "
                                        f"{name} in sample {number} holds NaN or infinity")
            yield function, gradients

    def maps(self, gradients: Gradients, row: int) -> np.ndarray:
        """Compute the smoothed saliency maps (T, H, W) of one sample.

        Args:
            row: row of the sample in the batch.
        """
        return saliency_maps(gradients.images[row].numpy(), self.plan.gaussian_kernel_size,
                             self.plan.sigma)

    def arrays(self, gradients: Gradients, row: int, sample: SampleArrays,
               processed: np.ndarray) -> SaliencyArrays:
        """Return the arrays to store for one sample.

        Args:
            gradients: gradients of a function in a batch.
            row: row of the sample in the batch.
            processed: rendering of the sample's saliency (T, H, W, C).
        """
        of_sample = {name: gradient[row].numpy() for name, gradient in vars(gradients).items()}
        config, states = self._simulator.config, None
        if config.is_spatial:
            states = np.stack([
                coloured(maps, sample.frames, full_colour(maps), UNSIGNED)
                for maps in state_maps(of_sample["env_h"], sample.env_h, config)])
        return SaliencyArrays(**of_sample, processed=processed, processed_states=states)

    def _compare(self, numbers: Sequence[int], images: np.ndarray, frames: np.ndarray) -> None:
        """Compare simulated with stored frames, and add the differing samples to ``diverging``.

        Args:
            images: images of the T' simulated steps (G, T', C, H, W).
            frames: stored frames of the samples (G, T, H, W, C).
        """
        simulated = np.moveaxis(images, 2, -1) * 255
        differences = np.abs(simulated - frames[:, :simulated.shape[1]]).mean(axis=(2, 3, 4))
        self.diverging |= {number for number, largest in zip(numbers, differences.max(axis=1))
                           if not largest < NOTICEABLE}


Missing = dict[int, dict[str, dict]]
"""Saliency to compute: descriptions by sample number and name of the function in file names."""


def write_saliency(saliency: SampleSaliency, folder: SaliencyFolder, numbers: Sequence[int],
                   batch_size: int, with_videos: bool, overwrite: bool) -> int:
    """Compute and write the missing saliency; stop early after a stop signal.

    Args:
        saliency: computation of the saliency of samples.
        folder: folder that the files are written to.
        batch_size: number of samples per forward pass.
        with_videos: write videos as well; saliency without a video is computed again.
        overwrite: compute everything again.

    Returns:
        0 when everything is written, 128 + the signal's number after a signal.

    Raises:
        UserError: see ``SampleSaliency`` and ``SaliencyFolder.is_finished``.
    """
    plan = saliency.plan
    descriptions = {plan.file_name(function): saliency.description(function)
                    for function in plan.functions}

    def write_batch(batch: Sequence[int], missing: Missing) -> Iterator[tuple[int, str]]:
        samples = saliency.read(batch)
        functions = [function for function in plan.functions
                     if any(plan.file_name(function) in missing[number] for number in batch)]
        for function, gradients in saliency.gradients(batch, samples, functions,
                                                      plan.without_env_grads):
            name = plan.file_name(function)
            for row, number in enumerate(batch):
                if name not in missing[number]:
                    continue
                sample, maps = samples[row], saliency.maps(gradients, row)
                full = full_colour(maps)
                arrays = saliency.arrays(gradients, row, sample, coloured(
                    maps, sample.frames, full))
                folder.add(number, name, arrays)
                if with_videos:
                    title = f"{title_of(name)} ±{full:.2g}: blue raises, red lowers"
                    images = {title: arrays.processed}
                    if arrays.processed_states is not None:
                        images |= zip(STATE_MAPS, arrays.processed_states)
                    frames = film(number, sample.frames, sample.actions, images,
                                  max(plan.common_timesteps))
                    write_video(folder.video_file(number, name), frames, FRAMES_PER_SECOND)
                yield number, name

    return _write_missing(folder, dict.fromkeys(numbers, descriptions), batch_size, with_videos,
                          overwrite, write_batch)


def _write_missing(folder: SaliencyFolder, descriptions: Missing, batch_size: int,
                   with_videos: bool, overwrite: bool,
                   write_batch: Callable[[Sequence[int], Missing], Iterator[tuple[int, str]]]
                   ) -> int:
    """Write the missing saliency in a folder, see ``write_saliency``.

    Args:
        descriptions: descriptions of all saliency that the folder should contain.
        write_batch: function that writes the missing saliency of the samples of a batch. It yields
            sample number and function name as soon as the files of a function are written.
    """
    if overwrite:
        for number, of_sample in descriptions.items():
            for name in of_sample:
                folder.forget(number, name)
    missing = {number: {
        name: description for name, description in of_sample.items()
        if not folder.is_finished(number, name, description)
        or (with_videos and not folder.video_file(number, name).exists())}
        for number, of_sample in descriptions.items()}
    total = sum(map(len, descriptions.values()))
    with (deferred_signals("saliency map") as received,
          Progress(total, "saliency map", total - sum(map(len, missing.values()))) as progress):
        for batch in divide(list(missing), batch_size):
            if not any(missing[number] for number in batch):
                continue
            for number, name in write_batch(batch, missing):
                folder.write("description", number, name, value=missing[number].pop(name))
                progress.update(total - sum(map(len, missing.values())))
                if received:
                    return 128 + received[0] if any(missing.values()) else 0
    return 0


def measure_specificity(folder: SaliencyFolder, numbers: Sequence[int],
                        suffix: str = "") -> None:
    """Measure, store and print the map similarity of different functions.

    It is stored with the maps of each sample as "specificity".

    Args:
        numbers: numbers of the samples. All their finished maps with this suffix are compared.
        suffix: suffix of the functions in file names, see ``SaliencyPlan``.

    Raises:
        UserError: if a map is missing or damaged.
    """
    measured = []
    for number, finished in with_progress(folder.finished(numbers).items(), len(numbers),
                                          "sample"):
        names = tuple(name for name in finished if name != DIFFERENCE
                      and suffix_of(name) == suffix)
        key = "specificity", number, suffix
        stored = folder.read(*key) if folder.has(*key) else None
        if stored is None or stored.functions != names:
            if len(names) < 2:
                continue
            correlations = specificity(np.stack([folder.read("images", number, name)
                                                 for name in names]))
            stored = Specificity(names, tuple(None if np.isnan(value) else float(value)
                                              for value in correlations))
            folder.write(*key, value=stored)
        measured.append(stored)
    steps = np.array([sample.correlations for sample in measured], float)  # (samples, T)
    reached = np.flatnonzero(np.isfinite(steps).any(axis=0))
    if len(reached):
        means = np.nanmean(steps[:, reached], axis=0)
        by_step = ", ".join(f"{step}: {mean:.2f}" for step, mean in zip(reached, means))
        print(f"map similarity, {_KINDS[suffix]}: the maps of {len(measured[0].functions)} "
              f"functions have a mean |r| of {means.mean():.2f} (by step: {by_step}); 1: the same "
              "map for all functions")


def write_demonstration(saliency: SampleSaliency, folder: SaliencyFolder, numbers: Sequence[int],
                        batch_size: int, with_videos: bool, overwrite: bool) -> int:
    """Compare the value's saliency with and without gradients through the environment.

    The images that are written show the frames, both saliencies and their difference on one colour
    scale. The arguments, the result and the errors are those of ``write_saliency``.
    """
    value = SaliencyFunction(VALUE)
    # The samples are in another folder, so checksums identify their vectors and worlds.
    descriptions = {number: {DIFFERENCE: {
        **saliency.description(value), "bottleneck_vec_sha256": hashlib.sha256(
            saliency.samples.stacked_field("bottleneck_vec", [number]).tobytes()).hexdigest(),
        **_world_digest(saliency.samples, number)}}
        for number in numbers}

    def write_batch(batch: Sequence[int], missing: Missing) -> Iterator[tuple[int, str]]:
        samples = saliency.read(batch)
        ((_, with_grads),) = saliency.gradients(batch, samples, [value], False)
        ((_, without_grads),) = saliency.gradients(batch, samples, [value], True)
        for row, number in enumerate(batch):
            if not missing[number]:
                continue
            sample = samples[row]
            maps = saliency.maps(with_grads, row), saliency.maps(without_grads, row)
            full = full_colour(*maps)
            images = {title: coloured(values, sample.frames, full) for title, values in (
                (f"{value.name} ±{full:.2g}: blue raises", maps[0]),
                ("without environment gradients", maps[1]),
                ("difference", maps[0] - maps[1]))}
            for name, gradients, processed in zip(
                    (value.name, value.name + WITHOUT_ENV_GRADS), (with_grads, without_grads),
                    images.values()):
                folder.add(number, name, saliency.arrays(gradients, row, sample, processed))
            frames = list(film(number, sample.frames, sample.actions, images,
                               len(sample.frames) - 1))
            for step, frame in enumerate(frames):
                with folder.file("difference", number, step) as temporary:
                    Image.fromarray(frame).save(temporary)
            if with_videos:
                write_video(folder.video_file(number, DIFFERENCE),
                            frames[:max(saliency.plan.common_timesteps) + 1], FRAMES_PER_SECOND)
            yield number, DIFFERENCE

    return _write_missing(folder, descriptions, batch_size, with_videos, overwrite, write_batch)


def _world_digest(samples: SampleFolder, number: int) -> dict[str, str]:
    """Return a checksum of a sample's world, as ``world_sha256``; {} without a world."""
    world = samples.worlds([number])
    if world is None:
        return {}
    return {"world_sha256": hashlib.sha256(b"".join(
        tensor.numpy().tobytes() for tensor in vars(world).values())).hexdigest()}


def combine_samples(simulator: Simulator, compute: Compute, samples: SampleFolder,
                    numbers: Sequence[int], description: dict, overwrite: bool) -> SampleFolder:
    """Simulate one sample from the mean of several samples.

    For samples of the prior (random starts in worlds), the noise is averaged, and the new sample
    has the world that the prior generates from it. Otherwise, the bottleneck vectors are averaged.
    Worlds cannot be averaged, so the new sample then takes place in the world of the first sample.

    Args:
        samples: folder of the samples.
        description: further settings that the new sample depends on.

    Returns:
        Folder next to ``samples`` that contains the new sample as number 0.

    Raises:
        UserError: if a sample is damaged, or the folder was written with other settings.
    """
    vector = combined_vector(torch.from_numpy(samples.stacked_field("bottleneck_vec", numbers)))
    num_steps = len(samples.sample(numbers[0]).frames)
    worlds = samples.worlds(numbers)
    world = None if worlds is None else worlds[:1]
    from_prior = world is not None and bool(samples.description().get("random_start"))
    first, last = min(numbers), max(numbers)
    if len(numbers) > 1 and sorted(numbers) == list(range(first, last + 1)):
        chosen = f"{first}_to_{last}"
    else:
        chosen = "_".join(map(str, numbers[:10])) + (
            f"_and_{len(numbers) - 10}_more" if len(numbers) > 10 else "")
    name = f"{samples.path.name}_mean_of_{chosen}"
    folder = open_samples(samples.path.parent / name, {
        **description, "num_steps": num_steps, "combined_from": samples.description(),
        "combined_samples": list(numbers),
        **({} if world is None or from_prior else {"world_of_sample": numbers[0]})}, overwrite)
    if not folder.has("sample", 0):
        vectors = vector.unsqueeze(0)
        if worlds is not None and from_prior:
            vectors, world = _start_of_mean_noise(simulator, worlds.seeds)
        (arrays,) = imagined_from(simulator, compute, vectors, num_steps, world)
        folder.add(0, arrays, SampleOrigin(0), None if world is None else world[0])
    return folder


@torch.no_grad()
def _start_of_mean_noise(simulator: Simulator, seeds: Tensor) -> tuple[Tensor, World]:
    """Generate a start (1, V) and its world from the mean noise of samples of the prior.

    The mean is rescaled to unit variance. Samples with the same seed, as with several manual
    actions, have the same noise.

    Args:
        seeds: seeds of the samples (G,).
    """
    different, counts = seeds.unique(return_counts=True)
    weights = counts / counts.float().norm()
    noise = PriorNoise(*(torch.einsum("g,g...->...", weights.to(tensor), tensor)[None]
                         for tensor in vars(simulator.prior.noise(different)).values()))
    vectors, world = simulator.sample_starts(noise, seeds[:1].to(noise.squares.device))
    return vectors, rounded(world)

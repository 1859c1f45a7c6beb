"""Computing the saliency of many samples and storing it, as far as it is not stored yet.

What a sample gets depends on the seed, its number and its bottleneck vector alone, beyond the
rounding that depends on the batch it is in; so runs can be stopped, split and repeated. Batches are
a fixed division of the numbers that are asked for, whatever is done already, so a run that was
stopped ends with the very numbers of one that was not.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from agents.outputs import VALUE
from common.devices import Compute
from common.errors import UserError
from common.progress import Progress, with_progress
from common.signals import deferred_signals
from generative.saliency.files import SaliencyArrays, SaliencyWriter, Specificity
from generative.saliency.gradients import (
    FRAMES_PER_SECOND,
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
)
from generative.sample_files import SampleArrays, SampleFolder, SampleOrigin, SampleWriter
from generative.sampling import batches_with, imagined_from
from generative.simulator import Simulator

DIFFERENCE = "value_difference"  # the name of the demonstration in its folder
# Mean difference of the shades (0 to 255) of two frames above which they show different things.
NOTICEABLE = 8


@dataclasses.dataclass(frozen=True)
class SaliencyPlan:
    """Settings of a saliency run.

    Attributes:
        functions: whose gradients are taken.
        common_timesteps: steps at which they are read.
        num_copies: of a sample; the first is the sample itself.
        perturbation_scale: standard deviation of what is added to the others' vectors.
        gaussian_kernel_size: of the pictures' smoothing, in pixels.
        sigma: of the same.
        without_env_grads: let no gradients through the action that enters the environment.
        seed: of the copies.
    """

    functions: tuple[SaliencyFunction, ...]
    common_timesteps: tuple[int, ...]
    num_copies: int
    perturbation_scale: float
    gaussian_kernel_size: int
    sigma: float
    without_env_grads: bool
    seed: int

    def file_name(self, function: SaliencyFunction) -> str:
        """The function's name in the names of its files."""
        return function.name + (WITHOUT_ENV_GRADS if self.without_env_grads else "")


class SaliencyMaker:
    """Computes the saliency of samples.

    Args:
        simulator: where ``compute`` says.
        samples: recorded samples.
        description: of simulator and agent, for the files.
        matrices: checksums of the matrices that define the directions, by name of the file;
            None where no function needs them.
        coordinates: see ``SaliencyPass``.
    """

    def __init__(self, simulator: Simulator, compute: Compute, plan: SaliencyPlan,
                 samples: SampleFolder, description: dict, matrices: dict | None = None,
                 coordinates: Coordinates | None = None):
        self._simulator, self._compute, self.plan = simulator, compute, plan
        self.samples, self._coordinates = samples, coordinates
        self._description, self._matrices = description, matrices
        self.diverging: set[int] = set()  # samples that the simulator does not repeat

    def description(self, function: SaliencyFunction) -> dict:
        """Settings that make the files of a function."""
        settings = dataclasses.asdict(self.plan)
        del settings["functions"]
        return {"function": function.name, **settings, **self._description,
                "matrices_sha256": None if function.direction is None else self._matrices}

    def read(self, numbers: Sequence[int]) -> SampleArrays:
        """Samples from the disk, stacked.

        Raises:
            UserError: if one is damaged, or too short for what is asked for.
        """
        samples = self.samples.stacked(numbers)
        if samples.bottleneck_vec.shape[1] != self._simulator.config.bottleneck_vec_size:
            raise UserError(f"the bottleneck vectors in {self.samples.path} have "
                            f"{samples.bottleneck_vec.shape[1]} numbers, but the simulator's have "
                            f"{self._simulator.config.bottleneck_vec_size}")
        num_steps, last = samples.frames.shape[1], max(self.plan.common_timesteps)
        if num_steps <= last:
            raise UserError(f"sample {numbers[0]} in {self.samples.path} has {num_steps} steps, "
                            f"too few for step {last} of common_timesteps, which counts from 0")
        if num_steps < 2 and VALUE_DELTA in [function.what for function in self.plan.functions]:
            raise UserError(f"sample {numbers[0]} in {self.samples.path} has one step, but "
                            f"{VALUE_DELTA} needs two")
        return samples

    def gradients(self, numbers: Sequence[int], samples: SampleArrays,
                  functions: Sequence[SaliencyFunction], without_env_grads: bool,
                  ) -> Iterator[tuple[SaliencyFunction, Gradients]]:
        """The gradients of functions in samples, from one forward pass.

        Raises:
            UserError: if one is not finite, naming function and sample.
        """
        plan = self.plan
        copies = torch.stack([
            smoothgrad_starts(torch.from_numpy(vector), plan.num_copies, plan.perturbation_scale,
                             plan.seed, number)
            for number, vector in zip(numbers, samples.bottleneck_vec)])
        one_pass = SaliencyPass(self._simulator, self._compute, copies, functions,
                                plan.common_timesteps, samples.frames.shape[1], without_env_grads,
                                self._coordinates)
        self._compare(numbers, one_pass.unmoved_images().numpy(), samples.frames)
        for function in functions:
            gradients = one_pass.gradients(function)
            for field in dataclasses.fields(Gradients):
                finite = getattr(gradients, field.name).flatten(1).isfinite().all(dim=1)
                if not finite.all():
                    number = numbers[int((~finite).nonzero()[0])]
                    raise UserError(f"the gradient of {function.name} with respect to "
                                    f"{field.name} in sample {number} holds NaN or infinity")
            yield function, gradients

    def maps(self, gradients: Gradients, row: int) -> np.ndarray:
        """The smoothed saliency of one sample's images (T, H, W)."""
        return saliency_maps(gradients.images[row].numpy(), self.plan.gaussian_kernel_size,
                             self.plan.sigma)

    def _compare(self, numbers: Sequence[int], images: np.ndarray, frames: np.ndarray) -> None:
        """Note the samples whose frames (G, T, H, W, C) differ from images (G, T', C, H, W)."""
        shown = np.moveaxis(images, 2, -1) * 255
        differences = np.abs(shown - frames[:, :shown.shape[1]]).mean(axis=(2, 3, 4))  # (G, T')
        self.diverging |= {number for number, largest in zip(numbers, differences.max(axis=1))
                           if not largest < NOTICEABLE}


def saliency_arrays(gradients: Gradients, row: int, processed: np.ndarray) -> SaliencyArrays:
    """Arrays to store for one sample, with its pictures (T, H, W, C)."""
    return SaliencyArrays(gradients.images[row].numpy(), gradients.hidden_states[row].numpy(),
                          gradients.env_h[row].numpy(), processed)


def write_saliency(maker: SaliencyMaker, writer: SaliencyWriter, numbers: Sequence[int],
                   batch_size: int, with_videos: bool, overwrite: bool) -> int:
    """Compute and write what is not on disk yet, until the end or a signal to stop.

    Args:
        numbers: of the samples.
        batch_size: samples that share a forward pass.
        with_videos: write videos too, also of what is on disk without.
        overwrite: forget what is on disk.

    Returns:
        0 when all is written, 128 + the signal's number when it was stopped.

    Raises:
        UserError: see ``SaliencyMaker`` and ``SaliencyWriter.has``.
    """
    functions = maker.plan.functions
    descriptions = {function: maker.description(function) for function in functions}
    if overwrite:
        for number in numbers:
            for function in functions:
                writer.forget(number, maker.plan.file_name(function))
    missing = {number: [function for function in functions
                        if not writer.has(number, maker.plan.file_name(function),
                                          descriptions[function])] for number in numbers}
    done = len(numbers) * len(functions) - sum(map(len, missing.values()))
    with (deferred_signals("function") as received,
          Progress(len(numbers) * len(functions), "saliency map", done) as progress):
        if with_videos:
            _write_missing_videos(maker, writer, missing, received)
        for batch in batches_with(numbers, batch_size, lambda number: missing[number]):
            if received:
                break
            samples = maker.read(batch)
            asked = [function for function in functions
                     if any(function in missing[number] for number in batch)]
            for function, gradients in maker.gradients(batch, samples, asked,
                                                       maker.plan.without_env_grads):
                for row, number in enumerate(batch):
                    if function in missing[number]:
                        sample, name = _row(samples, row), maker.plan.file_name(function)
                        arrays = saliency_arrays(gradients, row, _pictures(
                            maker, gradients, row, sample.frames))
                        writer.add(number, name, arrays)
                        if with_videos:
                            _write_video(writer, number, name, sample, arrays)
                        writer.finish(number, name, descriptions[function])
                        missing[number].remove(function)
                        done += 1
                progress.update(done)
                if received:
                    break
    return 128 + received[0] if any(missing.values()) else 0


def measure_specificity(writer: SaliencyWriter, numbers: Sequence[int],
                        without_env_grads: bool) -> Iterator[str]:
    """Measure how alike the maps of different functions are, store it with each sample's maps, and
    yield sentences that say it.

    Args:
        numbers: of the samples. All of their finished maps of this kind of gradient count, whenever
            they were made.

    Raises:
        UserError: if a map is missing or damaged.
    """
    folder, found = writer.folder, []
    for number, finished in with_progress(folder.finished(numbers).items(), len(numbers),
                                          "sample"):
        names = tuple(name for name in finished if name != DIFFERENCE
                      and name.endswith(WITHOUT_ENV_GRADS) == without_env_grads)
        stored = folder.specificity(number, without_env_grads)
        if stored is None or stored.functions != names:
            if len(names) < 2:
                continue
            correlations = specificity(np.stack([folder.gradients_of_images(number, name)
                                                 for name in names]))
            stored = Specificity(names, tuple(None if np.isnan(each) else float(each)
                                              for each in correlations))
            writer.add_specificity(number, without_env_grads, stored)
        found.append(stored)
    if not found:
        return
    steps = np.array([each.correlations for each in found], float)  # (samples, T)
    reached = np.flatnonzero(np.isfinite(steps).any(axis=0))
    if not len(reached):
        return
    means = np.nanmean(steps[:, reached], axis=0)
    yield (f"specificity, {'without' if without_env_grads else 'with'} gradients through the "
           f"environment: the maps of {len(found[0].functions)} functions have a mean |r| of "
           f"{means.mean():.2f} (by step: " + ", ".join(
               f"{step}: {mean:.2f}" for step, mean in zip(reached, means))
           + "); 1 is one map for all functions")


def _pictures(maker: SaliencyMaker, gradients: Gradients, row: int,
              frames: np.ndarray) -> np.ndarray:
    maps = maker.maps(gradients, row)
    return coloured(maps, frames, full_colour(maps))


def _row(samples: SampleArrays, row: int) -> SampleArrays:
    """One of several samples."""
    return SampleArrays(*(getattr(samples, field.name)[row]
                          for field in dataclasses.fields(SampleArrays)))


def _write_video(writer: SaliencyWriter, number: int, name: str, sample: SampleArrays,
                 arrays: SaliencyArrays) -> None:
    writer.add_video(number, name, film(number, sample.frames, sample.actions,
                                        {name: arrays.processed}), FRAMES_PER_SECOND)


def _write_missing_videos(maker: SaliencyMaker, writer: SaliencyWriter,
                          missing: dict[int, list[SaliencyFunction]],
                          received: list[int]) -> None:
    """Write the missing videos of finished saliency, as long as no signal was received."""
    for number, unfinished in missing.items():
        if received:
            return
        for function in maker.plan.functions:
            name = maker.plan.file_name(function)
            if function not in unfinished and not writer.folder.video_file(number, name).exists():
                _write_video(writer, number, name, maker.samples.sample(number),
                             writer.folder.saliency(number, name))


def write_demonstration(maker: SaliencyMaker, writer: SaliencyWriter, numbers: Sequence[int],
                        batch_size: int, with_videos: bool, overwrite: bool) -> int:
    """Compare the value's saliency with and without gradients through the environment.

    Pictures of the frames, both saliencies and their difference, all in one scale of colours.
    Arguments, result and errors are those of ``write_saliency``.
    """
    value = SaliencyFunction(VALUE)
    plain, without = value.name, value.name + WITHOUT_ENV_GRADS
    # The folder is not that of the samples, so it is noted which they are.
    descriptions = {number: {**maker.description(value),
                             "bottleneck_vec_sha256": _checksum_of_vector(maker.samples, number)}
                    for number in numbers}
    if overwrite:
        for number in numbers:
            writer.forget(number, DIFFERENCE)
    waiting = {number for number in numbers
               if not writer.has(number, DIFFERENCE, descriptions[number])
               or (with_videos and not writer.folder.video_file(number, DIFFERENCE).exists())}
    with (deferred_signals("batch") as received,
          Progress(len(numbers), "demonstration", len(numbers) - len(waiting)) as progress):
        for batch in batches_with(numbers, batch_size, waiting.__contains__):
            if received:
                break
            samples = maker.read(batch)
            ((_, with_grads),) = maker.gradients(batch, samples, [value], False)
            ((_, without_grads),) = maker.gradients(batch, samples, [value], True)
            for row, number in enumerate(batch):
                if number not in waiting:
                    continue
                sample = _row(samples, row)
                maps = maker.maps(with_grads, row), maker.maps(without_grads, row)
                full = full_colour(*maps)
                pictures = {plain: coloured(maps[0], sample.frames, full),
                            "without environment gradients": coloured(maps[1], sample.frames,
                                                                      full),
                            "difference": coloured(maps[0] - maps[1], sample.frames, full)}
                writer.add(number, plain, saliency_arrays(with_grads, row, pictures[plain]))
                writer.add(number, without, saliency_arrays(
                    without_grads, row, pictures["without environment gradients"]))
                frames = list(film(number, sample.frames, sample.actions, pictures))
                writer.add_differences(number, frames)
                if with_videos:
                    writer.add_video(number, DIFFERENCE, frames, FRAMES_PER_SECOND)
                writer.finish(number, DIFFERENCE, descriptions[number])
                waiting.remove(number)
            progress.update(len(numbers) - len(waiting))
    return 128 + received[0] if waiting else 0


def _checksum_of_vector(samples: SampleFolder, number: int) -> str:
    (vector,) = samples.stacked_field("bottleneck_vec", [number])
    return hashlib.sha256(vector.tobytes()).hexdigest()


def combine_samples(simulator: Simulator, compute: Compute, samples: SampleFolder,
                    numbers: Sequence[int], description: dict, overwrite: bool) -> SampleFolder:
    """Simulate one sample from the mean of the bottleneck vectors of several.

    Args:
        description: what else decides it.

    Returns:
        A folder beside theirs, with the sample 0.

    Raises:
        UserError: if a sample is damaged, or the folder holds something else.
    """
    vectors = torch.from_numpy(samples.stacked_field("bottleneck_vec", numbers))
    num_steps = len(samples.sample(numbers[0]).frames)
    first, last = min(numbers), max(numbers)
    if len(numbers) > 1 and sorted(numbers) == list(range(first, last + 1)):
        name = f"{samples.path.name}_mean_of_{first}_to_{last}"
    else:
        name = "_".join([samples.path.name, "mean_of", *map(str, numbers[:10])])
        name += f"_and_{len(numbers) - 10}_more" if len(numbers) > 10 else ""
    writer = SampleWriter(samples.path.parent / name, {
        **description, "num_steps": num_steps, "combined_from": samples.description(),
        "combined_samples": list(numbers)}, overwrite)
    if not writer.has(0):
        (arrays,) = imagined_from(simulator, compute, combined_vector(vectors).unsqueeze(0),
                                  num_steps)
        writer.add(0, arrays, SampleOrigin(0, None, None, None, None))
    return writer.folder

"""Simulated rollouts on disk: a folder of samples, written by record_gen_samples.py.

Layout, as published except for the files marked *::

    sample_00000/ims.npy              frames
    sample_00000/rews.npy, dones.npy, agent_values.npy, agent_hs.npy, agent_logprobs.npy,
                 env_hs.npy, bottleneck_vec.npy      see SampleArrays
    sample_00000/actions.npy *        input actions of the steps
    sample_00000/origin.json *        start of the sample, and the forced action
    sample_00000/world.npy *          class probabilities of the squares in its world, and
    sample_00000/world_corner.npy *   the world's corner in the first image, see ``squares.World``;
                                      only from simulators with worlds
    videos/sample_00000.mp4
    videos/start_00000.mp4 *          nine samples of one start, one per manual action,
                                      arranged by the action's direction; with W worlds per start,
                                      start s in world w has the number s * W + w
    recording.json *                  settings of the samples

A sample with its final name is complete. Shards (``common.shards``) write the same files, except
``recording.json``: the first process that opens the folder joins the shards and writes this file.

Letters in shape comments: E deterministic state of the environment.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from common.errors import UserError
from common.files import save_json
from common.parameters import PARAMETER_SET
from common.results import ResultStore
from common.schemas import Array, Entry, File, Json, NpyFolder, Schema
from common.shards import WHOLE, Shard, ShardNotes, divided_number
from generative.squares import World

_SCRIPT, _ORIGIN_NAME = "record_gen_samples.py", "origin.json"
# Published name of each field of SampleArrays.
_NAMES = {"frames": "ims", "rewards": "rews", "terminals": "dones", "values": "agent_values",
          "hidden_states": "agent_hs", "log_probs": "agent_logprobs", "env_h": "env_hs",
          "bottleneck_vec": "bottleneck_vec", "actions": "actions"}


# Fields of SampleOrigin that are not written for samples without a world.
_WORLD_FIELDS = ("world", "world_seed", "ended_at")


class SampleFormat(NpyFolder):
    """Format of a sample's folder: arrays by file name, and a ``SampleOrigin`` as ``origin``.

    ``read`` returns only the arrays; ``SampleFolder.origin`` returns the origin.
    """

    def file_names(self) -> tuple[str, ...]:
        return (*super().file_names(), _ORIGIN_NAME)

    def write(self, path: Path, value: Mapping) -> None:
        super().write(path, {name: array for name, array in value.items() if name != "origin"})
        if "origin" in value:
            fields = dataclasses.asdict(value["origin"])
            if fields["world_seed"] is None:
                fields = {name: entry for name, entry in fields.items()
                          if name not in _WORLD_FIELDS}
            save_json(path / _ORIGIN_NAME, fields)


_WORLD = {"world": Array(np.float16, "n n K", optional=True),
          "world_corner": Array(np.float32, "2", optional=True),
          "world_places": Array(np.float16, "n n", optional=True),
          "world_velocities": Array(np.float16, "n n", optional=True),
          "world_looks": Array(np.int16, "n n", optional=True),
          "world_clock": Array(np.int64, "", optional=True)}
_SAMPLE = SampleFormat({
    "ims": Array(np.uint8, "T H W C"), "rews": Array(np.float32, "T"),
    "dones": Array(np.float32, "T"), "agent_values": Array(np.float32, "T"),
    "agent_hs": Array(np.float32, "T D"), "agent_logprobs": Array(np.float32, "T A"),
    "env_hs": Array(np.float32, "T E"), "bottleneck_vec": Array(np.float32, "V"),
    "actions": Array(np.int64, "T", optional=True), **_WORLD})
SAMPLES = Schema(
    "samples", _SCRIPT, items={
        "sample": Entry("sample_{:0>5}", _SAMPLE),
        "video": Entry("videos/sample_{:0>5}.mp4", File()),
        "start_video": Entry("videos/start_{:0>5}.mp4", File())},
    informative=("versions", PARAMETER_SET, "data_dir", "agent_file", "model_file"),
    settings_name="recording.json", flag="--data_save_dir", setting_types={
        "agent_file": str, "data_recording": dict | None, "swap": dict | None})
# Files in a sample folder that later stages read: all but the saliency maps, grad_*.npy.
PATTERNS = (SAMPLES.settings_name, f"sample_*/{_ORIGIN_NAME}", "sample_*/[!g]*.npy")


@dataclasses.dataclass(frozen=True)
class SampleArrays:
    """One sample, or several samples with an additional leading dimension.

    Attributes:
        frames: simulated frames, uint8 (T, H, W, C).
        rewards: rewards in the unit of the recorded data, float32 (T,).
        terminals: probability that the episode ends, float32 (T,).
        values: the agent's values, float32 (T,).
        hidden_states: the agent's hidden states after each step, float32 (T, D).
        log_probs: log-probabilities of the agent's actions, float32 (T, A).
        env_h: deterministic states of the environment, float32 (T, E).
        bottleneck_vec: bottleneck vector, float32 (V,).
        actions: input actions of the steps, int64 (T,). Unless actions are forced, the action that
            the agent chooses at a step is the input of the next step.
    """

    frames: np.ndarray
    rewards: np.ndarray
    terminals: np.ndarray
    values: np.ndarray
    hidden_states: np.ndarray
    log_probs: np.ndarray
    env_h: np.ndarray
    bottleneck_vec: np.ndarray
    actions: np.ndarray

    def __getitem__(self, row: int) -> SampleArrays:
        """Return one of several samples."""
        return SampleArrays(**{field: array[row] for field, array in vars(self).items()})


@dataclasses.dataclass(frozen=True)
class SampleOrigin:
    """Start and forced action of a sample.

    Attributes:
        start: number of the start; samples of a folder with the same start differ only in the
            manual action and in the world.
        window: number of the recorded window; None for a random start.
        episode: number of the recorded episode; None for a random start.
        frame: frame of the episode that the first simulated step shows; None for a random start.
        manual_action: name of the action forced at every step, or None.
        world: number of the world, counted from 0 for each start; None without worlds.
        world_seed: seed of the world, and of what lies beyond it; None without worlds.
        ended_at: step, counted from 0, at which the episode ends if ends are drawn; None if it does
            not end, or ends are not drawn. The sample continues after it.
    """

    start: int
    window: int | None = None
    episode: int | None = None
    frame: int | None = None
    manual_action: str | None = None
    world: int | None = None
    world_seed: int | None = None
    ended_at: int | None = None


def stack(folder: Path, arrays: Mapping[int, np.ndarray], what: str) -> np.ndarray:
    """Stack an array of several samples along a new first axis.

    Args:
        folder: folder of the samples, for the message.
        arrays: the array of each sample, by number of the sample.
        what: name of the array, for the message.

    Raises:
        UserError: if the shapes of the samples differ.
    """
    first = next(iter(arrays.values()))
    for number, array in arrays.items():
        if array.shape != first.shape:
            raise UserError(f"{what} of sample {number} in {folder} has the shape {array.shape}, "
                            f"but other samples have {first.shape}")
    return np.stack(list(arrays.values()))


class SampleFolder(ResultStore):
    """Reader of a folder of samples, or writer if opened with ``open_samples``.

    Args:
        path: the folder; shards recorded in it are joined.
        joined: False to leave shards unjoined.

    Raises:
        UserError: if a shard is missing.
    """

    def __init__(self, path: Path, joined: bool = True):
        super().__init__(path, SAMPLES)
        if joined and ShardNotes(self.path).exist():
            join_samples(self.path)

    def sample_folder(self, number: int) -> Path:
        return self.file_of("sample", number)

    def description(self) -> dict:
        """Return the settings of the samples; empty for published samples, which lack them."""
        return self.schema.read_settings(self.settings_file)

    @property
    def game(self) -> str:
        """Name of the game of the recording from which the samples start; "" if unknown."""
        recording = self.description().get("data_recording") or {}
        return (recording.get("env") or {}).get("env_name") or ""

    def numbers(self) -> list[int]:
        """Return the numbers of the samples in the folder, in ascending order.

        Raises:
            UserError: if there are no samples.
        """
        numbers = sorted(int(key) for key in self.keys("sample") if key.isdecimal())
        if not numbers:
            raise UserError(f"{self.path} holds no samples; {_SCRIPT} writes them")
        return numbers

    def require(self, numbers: Sequence[int]) -> None:
        """Raise UserError if a sample is missing; the message names the first missing one."""
        present = self.numbers()
        known = set(present)
        absent = next((number for number in numbers if number not in known), None)
        if absent is not None:
            needed = numbers if isinstance(numbers, range) else set(numbers)
            missing = len(needed) - sum(number in needed for number in known)
            raise UserError(f"{self.path} has no sample {absent}, one of {missing} missing; "
                            f"its {len(present)} samples have numbers from {present[0]} to "
                            f"{present[-1]}, see --sample_ids")

    def sample(self, number: int) -> SampleArrays:
        """Read one sample. If it stores no actions, like published samples, they are all -1.

        Raises:
            UserError: if a file is missing or damaged, or does not fit the shape of another file;
                the message names the file.
        """
        arrays = self.read("sample", number)
        arrays.setdefault("actions", np.full(len(arrays["ims"]), -1))
        return SampleArrays(**{field: arrays[name] for field, name in _NAMES.items()})

    def stacked(self, numbers: Sequence[int] | None = None) -> SampleArrays:
        """Stack several samples, by default all.

        Raises:
            UserError: see ``numbers`` and ``sample``; or if the shapes of the samples differ.
        """
        samples = {number: self.sample(number)
                   for number in (self.numbers() if numbers is None else numbers)}
        return SampleArrays(**{field: stack(
            self.path, {number: getattr(sample, field) for number, sample in samples.items()}, name)
            for field, name in _NAMES.items()})

    def stacked_field(self, field: str, numbers: Sequence[int] | None = None) -> np.ndarray:
        """Return one field of ``stacked``; only the files of this field are read.

        Args:
            field: name of a field of ``SampleArrays``.
            numbers: numbers of the samples; None for all.
        """
        numbers = self.numbers() if numbers is None else numbers
        return stack(self.path, {number: self._read_field(number, field) for number in numbers},
                     _NAMES[field])

    def has_origin(self, number: int) -> bool:
        """Return whether a sample stores its start, which published samples do not."""
        return (self.sample_folder(number) / _ORIGIN_NAME).is_file()

    def origin(self, number: int) -> SampleOrigin:
        """Read start and forced action of a sample, which published samples do not store.

        Raises:
            UserError: if the file is missing or damaged.
        """
        return Json(SampleOrigin).read(self.sample_folder(number) / _ORIGIN_NAME, _SCRIPT)

    def worlds(self, numbers: Sequence[int]) -> World | None:
        """Read the worlds of several samples as a batch, in the order of the numbers.

        A simulation from the bottleneck vectors in these worlds reproduces the samples.

        Returns:
            The worlds, on the CPU; None if the samples have none.

        Raises:
            UserError: if a file is missing or damaged, or only some of the samples have worlds.
        """
        found = [self.read("sample", number, form=NpyFolder(_WORLD)) for number in numbers]
        for number, arrays in zip(numbers, found):
            if arrays.keys() != found[0].keys():
                raise UserError(f"sample {number} in {self.path} {'has' if arrays else 'lacks'} a "
                                f"world, unlike sample {numbers[0]}; record the samples again")
        if not found or not found[0]:
            return None
        parts = {name: torch.from_numpy(stack(self.path, {number: arrays[name] for number, arrays
                                                          in zip(numbers, found)}, name))
                 for name in found[0]}
        seeds = torch.tensor([self.origin(number).world_seed or 0 for number in numbers])
        others = {"places": torch.float32, "velocities": torch.float32, "looks": torch.int64,
                  "clock": torch.int64}  # older samples have no objects
        return World.of(parts["world"].float(), parts["world_corner"], seeds=seeds, **{
            name: parts[f"world_{name}"].to(dtype) for name, dtype in others.items()
            if f"world_{name}" in parts})

    def add(self, number: int, arrays: SampleArrays, origin: SampleOrigin,
            world: World | None = None) -> None:
        """Write a sample.

        Args:
            world: one row of a batch of worlds, whose seed becomes the ``world_seed`` of the
                origin; None without worlds.

        Raises:
            UserError: if the folder of samples was deleted.
        """
        value = {name: getattr(arrays, field) for field, name in _NAMES.items()}
        if world is not None:
            value |= zip(_WORLD, (part.cpu().numpy() for part in (
                world.squares, world.corner, world.places, world.velocities, world.looks,
                world.clock)))
            origin = dataclasses.replace(origin, world_seed=int(world.seeds))
        self.write("sample", number, value={**value, "origin": origin})

    def _read_field(self, number: int, field: str) -> np.ndarray:
        name = _NAMES[field]
        arrays = self.read("sample", number, form=NpyFolder({name: _SAMPLE.fields[name]}))
        return arrays[name] if arrays else np.full(len(self._read_field(number, "frames")), -1)


def open_samples(path: Path, settings: dict, overwrite: bool = False, shard: Shard = WHOLE,
                 num_samples: int = 0, batch_size: int = 1) -> SampleFolder:
    """Create a folder of samples, or resume one with the same settings.

    Args:
        batch_size: size of the batches of consecutive samples that shards take turns to record.

    Raises:
        FolderInUse, UserError: see ``ResultStore.open``.
    """
    folder = SampleFolder(path, joined=shard == WHOLE and not overwrite)
    folder.open(settings, overwrite, shard, {"num_samples": num_samples, "batch_size": batch_size},
                needed=[("sample", number) for number in range(num_samples)])
    return folder


def join_samples(path: Path, num_samples: int | None = None) -> SampleFolder:
    """Join the samples that shards have recorded in a folder, unless they are joined already.

    Args:
        num_samples: number of samples that the folder should have; None for any number.

    Raises:
        UserError: if a shard or a sample is missing (the message names it), or the shards have
            recorded another number of samples.
    """
    folder = SampleFolder(path, joined=False)

    def check(divided: dict) -> None:
        number = divided_number(divided, "num_samples")
        if num_samples not in (None, number):
            raise UserError(f"the shards in {path} have recorded {number} samples, not "
                            f"{num_samples}; use --num_samples {number}")
        folder.require(range(number))

    folder.join(check)
    folder.require(range(num_samples or 0))
    return folder

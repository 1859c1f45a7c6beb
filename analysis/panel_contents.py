"""Content of the interpretability panel, collected from the files of earlier stages.

Letters in shape comments: R rows, one per step of each sample, in order; D hidden units, k
independent components, T steps per sample, H W C height, width and channels of a frame.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from analysis.panel_files import (
    NO_BEHAVIOUR,
    NOT_RECORDED,
    PanelContent,
    PanelSample,
    PanelSteps,
    SaliencyType,
    SampleSet,
)
from common.errors import UserError
from common.step_results import StepResults
from generative.saliency.files import SaliencyFolder
from generative.saliency.gradients import (
    DIRECTION,
    FUNCTIONS,
    VALUE_DELTA,
    WITHOUT_ENV_GRADS,
    SaliencyFunction,
    saliency_functions,
)
from generative.sample_files import SampleArrays, SampleFolder
from interventions.projector import Projector

_TITLES = {"value": "value", "action": "most likely action", "leftwards": "actions to the left",
           "jumping_up": "jumping up", "jumping_right": "jumping to the right",
           VALUE_DELTA: "change of value"}


@dataclasses.dataclass(frozen=True)
class Directions:
    """Directions shown in the panel.

    Attributes:
        projector: projector to the directions.
        matrices: checksums of the projector's files, by name.
        recorded: coordinates of recorded states, float32 (states, k).
        positions: player positions at the recorded states in cells, (states,) each, by column name;
            empty if they were not recorded.
    """

    projector: Projector
    matrices: dict[str, str]
    recorded: np.ndarray
    positions: dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class _Source:
    """One folder of samples.

    Attributes:
        samples: the folder.
        saliency: saliency of its samples.
        finished: names of the functions whose saliency is complete, for each sample shown, by
            sample number.
    """

    samples: SampleFolder
    saliency: SaliencyFolder
    finished: dict[int, list[str]]

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(self.finished)


def gather(experiment: str, folders: Sequence[SampleFolder], num_samples: int | None,
           directions: Directions, behaviours: StepResults | None,
           max_states: int) -> PanelContent:
    """Collect the content of a panel.

    Args:
        experiment: name of the experiment.
        folders: folders of samples, with distinct names.
        num_samples: maximum number of samples per folder; None for all.
        directions: directions shown in the panel.
        behaviours: results with the behaviours of the samples in one of the folders, or None.
        max_states: maximum number of recorded states, which are evenly spaced.

    Returns:
        The content; its ``sample`` function reads the samples one by one and can raise the same
        errors.

    Raises:
        UserError: if a file is missing or damaged or does not fit the others; the message names it.
    """
    names = [folder.path.name for folder in folders]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"two folders of samples have the name {name}; leave one of them out")
    sources = [_source(folder, num_samples) for folder in folders]
    samples = [source.samples.stacked(source.numbers) for source in sources]
    for source, arrays in zip(sources, samples):
        _check(source, arrays, len(directions.projector.mean), samples[0].frames.shape[2:])
    if directions.recorded.shape[1:] != (directions.projector.num_ics,):
        raise UserError(f"the recorded states have the shape {directions.recorded.shape}, but "
                        f"there are {directions.projector.num_ics} independent components; take "
                        "both from one analysis")
    for name, values in directions.positions.items():
        if len(values) != len(directions.recorded):
            raise UserError(f"the recording has {len(values)} rows of {name}, but there are "
                            f"{len(directions.recorded)} recorded states; make the analysis of the "
                            "hidden states again")
    height, width = samples[0].frames.shape[2:4]
    types = _saliency_types(sources, directions.matrices)
    finished = [names for source in sources for names in source.finished.values()]
    has_saliency = np.array([[of_type.name in names for of_type in types]
                             for names in finished]).reshape(len(finished), len(types)) > 0
    kept = np.linspace(0, len(directions.recorded) - 1,
                       min(max_states, len(directions.recorded))).round().astype(np.int64)
    return PanelContent(
        experiment,
        tuple(SampleSet(source.samples.path.name, source.numbers, arrays.frames.shape[1],
                        (source.samples.description().get("swap") or {}).get("unaltered"))
              for source, arrays in zip(sources, samples)),
        types, has_saliency, (height, width),
        _steps(samples, directions.projector),
        None if behaviours is None else _behaviours(behaviours, sources),
        directions.recorded[kept].astype(np.float32), len(directions.recorded),
        {name: values[kept].astype(np.float32) for name, values in directions.positions.items()},
        _reader(sources, types, directions.projector))


def _source(folder: SampleFolder, num_samples: int | None) -> _Source:
    saliency = SaliencyFolder(folder.path)
    return _Source(folder, saliency, saliency.finished(folder.numbers()[:num_samples]))


def _check(source: _Source, arrays: SampleArrays, units: int, frame: tuple[int, ...]) -> None:
    """Raise if the number of hidden units or the frame shape (H, W, C) differs from the
    expected."""
    if arrays.hidden_states.shape[2] != units:
        raise UserError(f"the samples in {source.samples.path} have "
                        f"{arrays.hidden_states.shape[2]} hidden units, but the directions are "
                        f"those of {units}")
    if arrays.frames.shape[2:] != frame:
        raise UserError(f"the frames in {source.samples.path} have the shape "
                        f"{arrays.frames.shape[2:]}, but those of the first folder {frame}")


def _steps(samples: list[SampleArrays], projector: Projector) -> PanelSteps:
    def rows(array_of: Callable[[SampleArrays], np.ndarray], dtype: type) -> np.ndarray:
        arrays = [array_of(each) for each in samples]  # each (samples, T, …)
        return np.concatenate([array.reshape(-1, *array.shape[2:]) for array in arrays]
                              ).astype(dtype)

    states = torch.from_numpy(rows(lambda each: each.hidden_states, np.float32))  # (R, D)
    return PanelSteps(
        coordinates=projector.coordinates(states, "ica").numpy(),
        rewards=rows(lambda each: each.rewards, np.float32),
        terminals=rows(lambda each: each.terminals, np.float32),
        values=rows(lambda each: each.values, np.float32),
        entered=rows(lambda each: np.where(each.actions < 0, NOT_RECORDED, each.actions), np.uint8),
        answers=rows(lambda each: each.log_probs.argmax(axis=2), np.uint8),
        probabilities=rows(lambda each: np.exp(each.log_probs.max(axis=2)), np.float32))


def _behaviours(folder: StepResults, sources: list[_Source]) -> np.ndarray:
    """Read the behaviour of each sample, NO_BEHAVIOUR if it was not analysed, int16 (samples,).

    Published behaviours do not name their samples; they are assigned to the first samples of the
    first folder.
    """
    behaviours, settings = folder.read("per_sample"), folder.settings()
    name = Path(settings["samples"]).name if settings else sources[0].samples.path.name
    source = next((each for each in sources if each.samples.path.name == name), None)
    if source is None:
        raise UserError(f"the behaviours in {folder.path} are of samples in {name}, which are not "
                        "shown; add them to --samples, or leave out --num_behaviour_samples")
    numbers = settings.get("sample_numbers", source.samples.numbers()[:len(behaviours)])
    if len(numbers) != len(behaviours):
        raise UserError(f"{folder.file('per_sample')} holds {len(behaviours)} behaviours, but "
                        f"there are {len(numbers)} samples for them")
    known = dict(zip(numbers, behaviours))
    return np.array([known.get(number, NO_BEHAVIOUR) if each is source else NO_BEHAVIOUR
                     for each in sources for number in each.numbers], dtype=np.int16)


def _reader(sources: list[_Source], types: tuple[SaliencyType, ...],
            projector: Projector) -> Callable[[int], PanelSample]:
    """Return a function that reads a sample by its index among the samples of all folders."""
    places = [(source, number) for source in sources for number in source.numbers]

    def read(place: int) -> PanelSample:
        source, number = places[place]
        frames = source.samples.stacked_field("frames", [number])[0]
        pictures, gradients = {}, {}
        for index, of_type in enumerate(types):
            if of_type.name in source.finished[number]:
                pictures[index] = _array(source, number, of_type, "processed", frames.shape)
                of_states = _array(source, number, of_type, "hidden_states",
                                   (len(frames), len(projector.mean)))
                gradients[index] = projector.gradient(torch.from_numpy(of_states), "ica").numpy()
        return PanelSample(frames, pictures, gradients)

    return read


def _array(source: _Source, number: int, of_type: SaliencyType, field: str,
           shape: tuple[int, ...]) -> np.ndarray:
    """Read a field of a sample's saliency, and raise if it does not have this shape."""
    array = source.saliency.stacked_field(field, of_type.name, [number])[0]
    path = source.saliency.file_of(field, number, of_type.name)
    if array.shape != shape:
        raise UserError(f"{path} has the shape {array.shape}, but its sample asks for {shape}")
    return array


def _saliency_types(sources: list[_Source],
                    matrices: dict[str, str]) -> tuple[SaliencyType, ...]:
    """Return the saliency types that at least one sample has, sorted by ``_order``.

    Raises:
        UserError: if saliency was computed with other directions than the panel's, or if a type was
            read at different steps in different samples.
    """
    found: dict[str, tuple[tuple[int, ...], Path]] = {}
    for source in sources:
        for number, names in source.finished.items():
            for name in names:
                path = source.saliency.file_of("description", number, name)
                description = source.saliency.description(number, name)
                if description.get("matrices_sha256") not in (None, matrices):
                    raise UserError(f"{path} says that its saliency is of other directions than "
                                    "those of this panel; make it again, or choose another "
                                    "--precomp_dir or --num_episodes")
                steps = tuple(description.get("common_timesteps", ()))
                earlier, earlier_path = found.setdefault(name, (steps, path))
                if steps != earlier:
                    raise UserError(f"{earlier_path} and {path} say that they were read at "
                                    "different steps; make one of them again")
    return tuple(_saliency_type(name, found[name][0]) for name in sorted(found, key=_order))


def _saliency_type(name: str, steps: tuple[int, ...]) -> SaliencyType:
    function = _function(name)
    if function is None:
        return SaliencyType(name, name.replace("_", " "), steps)
    title = _TITLES.get(function.what, "")
    if function.what == DIRECTION:
        title = function.direction_name
    if name.endswith(WITHOUT_ENV_GRADS):
        title += ", not through actions"
    return SaliencyType(name, title, () if function.what == VALUE_DELTA else steps)


def _order(name: str) -> tuple:
    function = _function(name)
    if function is None:
        return (True, False, 0, "", 0, name)
    return (False, name.endswith(WITHOUT_ENV_GRADS), FUNCTIONS.index(function.what),
            function.direction_type or "", function.direction or 0, name)


def _function(name: str) -> SaliencyFunction | None:
    """Return the saliency function of this name; None for a name that only published files use."""
    bare = name.removesuffix(WITHOUT_ENV_GRADS)
    if bare == DIRECTION:
        return None
    try:
        return saliency_functions([bare], (), "ica")[0]
    except UserError:
        return None

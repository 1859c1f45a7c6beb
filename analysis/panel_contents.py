"""Content of the interpretability panel, collected from the files of earlier stages.

Letters in shape comments: R rows (all steps of sample 0, then of sample 1, and so on); k
independent components.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from PIL import Image

from agents.agent_file import agent_title
from agents.provenance import check_agent
from agents.rollout_files import RolloutFolder
from analysis.decision_results import DECISION, FAILURES
from analysis.memory.sparse_features import NO_LABEL
from analysis.memory.sparse_report import EXAMPLE_SIZE
from analysis.panel_files import (
    NO_BEHAVIOUR,
    NOT_RECORDED,
    Dream,
    Failure,
    Feature,
    Interval,
    PanelContent,
    SaliencyType,
    Sample,
    SampleSet,
)
from analysis.steps import read_recorded_positions
from common.errors import UserError
from common.files import read_bytes, sha256
from common.game_constants import ACTION_LABELS
from common.results import ResultStore, Table
from common.step_results import StepResults
from common.video import frames_of
from envs.coin import GAME
from envs.objects import action_labels
from generative.saliency.files import SaliencyFolder
from generative.saliency.gradients import (
    COUNTERFACTUAL,
    FUNCTIONS,
    STATE_MAPS,
    SUFFIX_TITLES,
    VALUE_DELTA,
    SaliencyFunction,
    saliency_functions,
    suffix_of,
)
from generative.sample_files import SampleArrays, SampleFolder
from interventions.direction_folders import signed_label
from interventions.projector import Projector

_TITLES = {"value": "value", "action": "most likely action", "leftwards": "moving left",
           "jumping_up": "jumping up", "jumping_right": "jumping right",
           VALUE_DELTA: "change of value"}


@dataclasses.dataclass(frozen=True)
class _Source:
    """A folder of samples with their saliency.

    Attributes:
        saliency: reader of the saliency files in the same folder.
        finished: names of the functions whose saliency is complete, by the number of the sample;
            only for samples that are shown.
    """

    samples: SampleFolder
    saliency: SaliencyFolder
    finished: dict[int, list[str]]

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(self.finished)


def gather(experiment: str, folders: Sequence[SampleFolder], num_samples: int | None,
           hidden: StepResults, behaviours: StepResults | None, max_states: int,
           recordings: Mapping[str, RolloutFolder],
           features: tuple[ResultStore, ResultStore | None] | None) -> PanelContent:
    """Collect the content of a panel.

    Args:
        num_samples: maximum number of samples per folder, from the first on; None for all.
        hidden: results of hidden_analysis_precompute.py, with the directions and the recorded
            states.
        behaviours: results with the behaviours of the samples in one of the folders, or None.
        max_states: maximum number of recorded states to show, evenly spaced.
        recordings: recordings whose frames the samples start from, by name of the sample folder;
            folders without one are shown without recorded frames.
        features: results of analysis/sparse_features.py, paired with those of
            analysis/feature_dreams.py for the same features, or with None if no starts were
            optimised; None instead of the pair to show no features.

    Returns:
        The content; its ``sample`` function reads the samples one by one and can raise the same
        errors.

    Raises:
        UserError: if two folders have the same name, or if a file is missing, damaged or
            inconsistent with another file; the message names it.
    """
    names = [folder.path.name for folder in folders]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"two folders of samples have the name {name}; leave one of them out")
    sources = [_source(folder, num_samples) for folder in folders]
    samples = [source.samples.stacked(source.numbers) for source in sources]
    first = samples[0]
    for source, arrays in zip(sources, samples):
        if (arrays.frames.shape[2:] != first.frames.shape[2:]
                or arrays.hidden_states.shape[2] != first.hidden_states.shape[2]):
            raise UserError(
                f"{source.samples.path} has frames of the shape {arrays.frames.shape[2:]} and "
                f"{arrays.hidden_states.shape[2]} hidden units, but the first folder has "
                f"{first.frames.shape[2:]} and {first.hidden_states.shape[2]}")
    projector, matrices = Projector.load_for(first.hidden_states.shape[2], hidden.path,
                                             hidden.number,
                                             folders[0].description().get("agent_sha256"))
    recorded, positions = hidden.read("sources"), {}
    if data_dir := hidden.settings().get("data_dir"):
        positions = read_recorded_positions(RolloutFolder(data_dir), hidden.number)
    for name, values in positions.items():
        if len(values) != len(recorded):
            raise UserError(f"the recording has {len(values)} rows of {name}, but there are "
                            f"{len(recorded)} recorded states; run "
                            "hidden_analysis_precompute.py again")
    types = _saliency_types(sources, matrices)
    finished = [names for source in sources for names in source.finished.values()]
    has_saliency = np.array([[of_type.name in names for of_type in types]
                             for names in finished]).reshape(len(finished), len(types)) > 0
    kept = np.linspace(0, len(recorded) - 1,
                       min(max_states, len(recorded))).round().astype(np.int64)
    description = folders[0].description()
    env = (description.get("data_recording") or {}).get("env") or {}
    return PanelContent(
        experiment, agent_title(Path(description.get("agent_file", ""))),
        " ".join(filter(None, (env.get("env_name"), env.get("distribution_mode")))),
        tuple(SampleSet(source.samples.path.name, source.numbers, arrays.frames.shape[1],
                        (source.samples.description().get("swap") or {}).get("unaltered"),
                        *_variants(source, env.get("env_name", "")))
              for source, arrays in zip(sources, samples)),
        types, _saliency_maps(sources), has_saliency,
        (first.frames.shape[2], first.frames.shape[3]), _steps(samples, projector),
        None if behaviours is None else _behaviours(behaviours, sources),
        recorded[kept].astype(np.float32), len(recorded),
        {name: values[kept].astype(np.float32) for name, values in positions.items()},
        () if features is None else _features(*features, sources),
        _reader(sources, types, projector, recordings), _survivors(sources, samples, recordings))


def _variants(source: _Source, game: str) -> tuple[tuple[int | None, ...], tuple[str, ...]]:
    """Return the start of each sample, and how the sample differs from others of its start, with
    the game's names of actions; None and "" for published samples, which do not store them."""
    names = dict(zip(ACTION_LABELS, action_labels(game)))
    origins = [source.samples.origin(number) if source.samples.has_origin(number) else None
               for number in source.numbers]
    return tuple(None if each is None else each.start for each in origins), tuple(
        "" if each is None else ", ".join(filter(None, (
            "" if each.world is None else f"world {each.world + 1}",
            names.get(each.manual_action or ""))))
        for each in origins)


def _survivors(sources: list[_Source], samples: list[SampleArrays],
               recordings: Mapping[str, RolloutFolder]) -> np.ndarray:
    """Return whether each sample probably does not end, and its recorded episode neither, bool
    (N,)."""
    survive = []
    for source, arrays in zip(sources, samples):
        length = arrays.frames.shape[1]
        for number, ends in zip(source.numbers, arrays.terminals):
            recorded = recorded_frames(recordings.get(source.samples.path.name), source.samples,
                                       number, length)
            survive.append(np.prod(1 - np.clip(ends, 0, 1)) > 0.5
                           and (recorded is None or len(recorded) == length))
    return np.array(survive)


def read_failures(store: ResultStore, agent: str | None) -> tuple[Failure, ...]:
    """Read the failures of the study ``analysis/decisions.py`` that have a film.

    Args:
        agent: checksum of the agent in the panel; None if it is unknown.

    Raises:
        UserError: if the failures are those of another agent, or a file is missing or damaged.
    """
    check_agent(store.settings().get("agent_sha256"), agent,
                f"the decisions in {store.path} are those",
                "choose another --decisions_dir, or run analysis/decisions.py with this one")
    table = store.read("decisions", form=_DECISIONS)
    table = table[table["group"] == FAILURES].astype({"number": int})
    return tuple(Failure(
        row.number, row.cause.replace("_", " "), row["class"],
        None if np.isnan(row.before_end) else int(row.before_end),
        _label(row.action), _label(row.best_action),
        _known(row.taken_rate), _known(row.best_rate),
        store.file_of("films", f"{FAILURES}_{row.number}"))
        for _, row in table.iterrows() if store.has("films", f"{FAILURES}_{row.number}"))


def _label(action: float) -> str:
    return "" if np.isnan(action) else action_labels(GAME)[int(action)]  # decisions are of CoinRun


def _source(folder: SampleFolder, num_samples: int | None) -> _Source:
    saliency = SaliencyFolder(folder.path)
    return _Source(folder, saliency, saliency.finished(folder.numbers()[:num_samples]))


def _steps(samples: list[SampleArrays], projector: Projector) -> dict[str, np.ndarray]:
    """Compute the quantities at every step, see ``PanelContent.steps``."""
    def rows(field: str) -> np.ndarray:
        arrays = [getattr(of_folder, field) for of_folder in samples]  # each (samples, T, …)
        return np.concatenate([array.reshape(-1, *array.shape[2:]) for array in arrays])

    states = torch.from_numpy(rows("hidden_states").astype(np.float32))  # (R, D)
    actions, log_probs = rows("actions"), rows("log_probs")
    return {
        "coordinates": projector.coordinates(states, "ica").numpy(),
        **{field: rows(field).astype(np.float32) for field in ("rewards", "terminals", "values")},
        "entered": np.where(actions < 0, NOT_RECORDED, actions).astype(np.uint8),
        "answers": log_probs.argmax(axis=1).astype(np.uint8),
        "probabilities": np.exp(log_probs.max(axis=1)).astype(np.float32)}


def _behaviours(folder: StepResults, sources: list[_Source]) -> np.ndarray:
    """Read the behaviour of each sample, NO_BEHAVIOUR if it was not analysed, int16 (samples,).

    Published behaviours do not name their samples; they are assigned to the first samples of the
    first folder.
    """
    behaviours, settings = folder.read("per_sample"), folder.settings("samples")
    name = Path(settings["samples"]).name if settings else sources[0].samples.path.name
    analysed = next((source for source in sources if source.samples.path.name == name), None)
    if analysed is None:
        raise UserError(f"the behaviours in {folder.path} belong to samples in {name}, which are "
                        "not shown; add them to --samples, or leave out --num_behaviour_samples")
    numbers = settings.get("sample_numbers", analysed.samples.numbers()[:len(behaviours)])
    if len(numbers) != len(behaviours):
        raise UserError(f"{folder.file('per_sample')} holds {len(behaviours)} behaviours, but "
                        f"there are {len(numbers)} samples for them")
    known = dict(zip(numbers, behaviours))
    return np.array([known.get(number, NO_BEHAVIOUR) if source is analysed else NO_BEHAVIOUR
                     for source in sources for number in source.numbers], dtype=np.int16)


def _reader(sources: list[_Source], types: tuple[SaliencyType, ...], projector: Projector,
            recordings: Mapping[str, RolloutFolder]) -> Callable[[int], Sample]:
    """Return a function that reads a sample by its index among the samples of all folders."""
    places = [(source, number) for source in sources for number in source.numbers]

    def read(place: int) -> Sample:
        source, number = places[place]
        frames = source.samples.stacked_field("frames", [number])[0]
        images, gradients = {}, {}
        for index, of_type in enumerate(types):
            if of_type.name in source.finished[number]:
                maps = [_array(source, number, of_type, "processed", frames.shape)]
                if source.saliency.has("processed_states", number, of_type.name):
                    maps += list(_array(source, number, of_type, "processed_states",
                                        (len(STATE_MAPS), *frames.shape)))
                images[index] = np.stack(maps)
                of_states = _array(source, number, of_type, "hidden_states",
                                   (len(frames), len(projector.mean)))
                gradients[index] = projector.gradient(torch.from_numpy(of_states), "ica").numpy()
        recorded = recorded_frames(recordings.get(source.samples.path.name), source.samples,
                                   number, len(frames))
        return frames, recorded, images, gradients

    return read


def recorded_frames(recording: RolloutFolder | None, samples: SampleFolder, number: int,
                    length: int) -> np.ndarray | None:
    """Read recorded frames, beginning with the one that a sample's first step shows.

    Args:
        recording: the recording from which the sample starts, if it is available.
        samples: folder of the sample.
        length: largest number n of frames; n is smaller if the episode ends earlier.

    Returns:
        Frames, uint8 (n, H, W, C); None without a recording, or if the sample has a random start.
    """
    if recording is None:
        return None
    origin = samples.origin(number)
    if origin.episode is None or origin.frame is None:
        return None
    frames = recording.array_files(origin.episode).frames
    end = min(origin.frame + length, frames.shape[0] - 1)  # the last row is after the end
    return np.moveaxis(frames.rows(origin.frame, max(end, origin.frame + 1)), 1, -1)


def _array(source: _Source, number: int, of_type: SaliencyType, field: str,
           shape: tuple[int, ...]) -> np.ndarray:
    """Read one array of a sample's saliency.

    Raises:
        UserError: if the array's shape is not ``shape``.
    """
    array = source.saliency.stacked_field(field, of_type.name, [number])[0]
    if array.shape != shape:
        path = source.saliency.file_of(field, number, of_type.name)
        raise UserError(f"{path} has the shape {array.shape}, but its sample requires {shape}")
    return array


def _saliency_maps(sources: list[_Source]) -> tuple[str, ...]:
    """Return the titles of the saliency maps, see ``PanelContent.maps``."""
    has_states = any(source.saliency.has("processed_states", number, name)
                     for source in sources for number, names in source.finished.items()
                     for name in names)
    return ("pixels", *STATE_MAPS) if has_states else ("pixels",)


def _saliency_types(sources: list[_Source],
                    matrices: dict[str, str]) -> tuple[SaliencyType, ...]:
    """Return the saliency types that at least one sample has, in the order of the panel.

    Args:
        matrices: checksums of the direction files of the panel, by name.

    Raises:
        UserError: if saliency was computed with other directions than the panel's, or if a function
            was evaluated at different steps in different samples.
    """
    # Steps of each function, and the file that states them.
    steps_of: dict[str, tuple[tuple[int, ...], Path]] = {}
    for source in sources:
        for number, names in source.finished.items():
            for name in names:
                path = source.saliency.file_of("description", number, name)
                description = source.saliency.description(number, name)
                if description.get("matrices_sha256") not in (None, matrices):
                    raise UserError(f"the saliency described by {path} was computed with other "
                                    "directions than those of this panel; compute it again, or "
                                    "choose another --precomp_dir or --num_episodes")
                steps = tuple(description.get("common_timesteps", ()))
                earlier, earlier_path = steps_of.setdefault(name, (steps, path))
                if steps != earlier:
                    raise UserError(f"the saliency functions described by {earlier_path} and "
                                    f"{path} were evaluated at different steps; compute one of "
                                    "them again")
    in_order = sorted(_saliency_type(name, steps) for name, (steps, _) in steps_of.items())
    return tuple(of_type for _, of_type in in_order)


def _saliency_type(name: str, steps: tuple[int, ...]) -> tuple[tuple, SaliencyType]:
    """Return a sort key and the saliency type of a function.

    Args:
        steps: steps at which the function was evaluated.
    """
    functions: tuple[SaliencyFunction, ...] = ()
    with contextlib.suppress(UserError):  # raised for names that only published files use
        functions = saliency_functions([name.removesuffix(suffix_of(name))], (), "ica")
    if not functions or functions[0].action is not None:
        return (True, "", 0, "", 0, name), SaliencyType(name, name.replace("_", " "), steps)
    (function,) = functions
    suffix = suffix_of(name)
    title = function.direction_name if function.direction_type else _TITLES.get(function.what, "")
    return ((False, suffix, FUNCTIONS.index(function.what), function.direction_type or "",
             function.direction or 0, name),
            SaliencyType(name, title + SUFFIX_TITLES.get(suffix, ""),
                         () if function.what == VALUE_DELTA else steps, suffix == COUNTERFACTUAL))


def _features(store: ResultStore, dreams: ResultStore | None,
              sources: list[_Source]) -> tuple[Feature, ...]:
    """Read the ablated sparse features, strongest first.

    Raises:
        UserError: if the features belong to another agent than the samples, or ``dreams`` belongs
            to other features.
    """
    check_agent(store.settings().get("agent_sha256"),
                sources[0].samples.description().get("agent_sha256"),
                f"the features in {store.path} were found",
                "choose another --features_dir, or run analysis/sparse_features.py with this one")
    table = store.read("features", form=_FEATURES)
    effects = store.read("effects", form=_EFFECTS)
    effects = effects[effects["outcome"] == "success"].set_index("condition").add_prefix("success_")
    table = table[table["rank"].notna()].sort_values("rank")
    table = table.join(effects, on="feature_" + table["feature"].astype(str))
    of_features = {} if dreams is None else _dreams(dreams, store, sources)
    found = []
    for row in table.itertuples():
        label = "" if row.label == NO_LABEL else row.label.replace("_", " ")
        found.append(Feature(
            row.feature, signed_label(label, row.auc) if row.named else "", label,
            _interval(row.auc, row.low_95, row.high_95), row.frequency,
            _interval(row.kl, row.kl_low, row.kl_high), row.kl_control,
            _interval(row.success_effect, row.success_low_95, row.success_high_95),
            (_known(row.success_control_low), _known(row.success_control_high)),
            bool(row.success_claimed), of_features.get(row.feature),
            _examples(store, row.feature)))
    return tuple(found)


def _examples(store: ResultStore, feature: int) -> np.ndarray | None:
    if not store.has("examples", feature):
        return None
    with Image.open(io.BytesIO(read_bytes(store.file_of("examples", feature)))) as image:
        return frames_of(image, EXAMPLE_SIZE)


def _dreams(dreams: ResultStore, features: ResultStore,
            sources: list[_Source]) -> dict[int, Dream]:
    """Read the starts that were optimised for features, by the number of the feature."""
    settings = dreams.settings("step")
    if settings.get("sae_sha256") != sha256(features.file_of("sae")):
        raise UserError(f"the starts in {dreams.path} were optimised for other features than those "
                        f"in {features.path}; choose another --dreams_dir, or run "
                        "analysis/feature_dreams.py again")
    table = dreams.read("dreams", form=_DREAMS)
    if "active" in pd.read_csv(dreams.file_of("dreams"), nrows=0):
        table = dreams.read("dreams", form=_DREAMS_IN_GAME)
    penalty = dreams.read("starts", form=Table({"penalty": float}))["penalty"].iloc[0]
    folder = (dreams.path / f"penalty_{penalty:g}").resolve()
    shown = [number if source.samples.path.resolve() == folder else None
             for source in sources for number in source.numbers]
    return {row.feature: Dream(
        settings["step"], row.score, row.recorded_score, row.dreamed,
        bool(row.active) if "active" in table else None,
        row.others_active if "active" in table else None,
        shown.index(row.sample) if row.sample in shown else None) for row in table.itertuples()}


def _interval(*values: float) -> Interval:
    estimate, low, high = map(_known, values)
    return estimate, low, high


def _known(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


_DECISIONS = Table({**DECISION, "action": float, "best_action": float})
_FEATURES = Table({
    "feature": int, "rank": float, "label": str, "named": bool, **dict.fromkeys(
        ("auc", "low_95", "high_95", "frequency", "kl", "kl_low", "kl_high", "kl_control"), float)})
_EFFECTS = Table({
    "condition": str, "outcome": str, "claimed": bool, **dict.fromkeys(
        ("effect", "low_95", "high_95", "control_low", "control_high"), float)})
_DREAMS = Table({"feature": int, "sample": int, "score": float, "recorded_score": float,
                 "dreamed": bool})
_DREAMS_IN_GAME = Table({**_DREAMS.columns, "active": float, "others_active": float})

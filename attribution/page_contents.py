"""Contents of the attribution page, gathered from attributions, features and their recording.

Letters in shape comments: N steps of all trajectories, T steps of one, H W a layer's grid, F
features.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Collection
from pathlib import Path

import numpy as np
import pandas as pd

from attribution.advantages import AdvantageSettings, advantages_of, calibration_of
from attribution.checking.object_files import has_names, read_names
from attribution.failures.causes import ENDED, MULTIPLE, OTHER, TIMEOUT, recorded_causes
from attribution.feature_examples import THUMBNAIL as THUMBNAIL_SIDE
from attribution.feature_examples import Examples
from attribution.page_files import (
    ACTIVATION,
    ATTRIBUTION,
    KINDS,
    PRODUCT,
    PageAttribution,
    PageContent,
    PageExamples,
    PageLayer,
    PageMemory,
    PageObjects,
    PageOutput,
)
from attribution.recordings import Recording
from attribution.results import (
    ACTIVATIONS,
    ATTRIBUTION_SCRIPT,
    INPUT,
    THUMBNAIL,
    AttributionFolder,
    FeaturesFolder,
    LayerFeatures,
)
from attribution.trajectories import Trajectories, best_of_episodes, failures, spikes
from common.errors import UserError, nearest
from common.files import read_json
from common.game_constants import ACTION_LABELS, FRAME_SIZE
from common.results import ResultStore

PRODUCTS = "gradient_activation:"  # before the name of an output
_SCORES = ("auc", "low_95", "high_95", "chance_high")  # of a feature and a kind of object
MAX_NAME = 60  # letters of a feature's name
MOST_CELLS = 256  # of a layer whose activations are shown unasked: of larger ones they are large
_TITLES = {
    "value": "value", "taken": "log-probability of the action taken",
    "action": "log-probability of the likeliest action",
    "leftwards": "mean log-probability of going left",
    "jumping_up": "log-probability of jumping up",
    "jumping_right": "log-probability of jumping right",
    "log_prob_other": "log-probability of other keys",
    "log_prob_still": "log-probability of no direction",
    ACTIVATIONS: "activation of the features"}


def title_of(output: str) -> str:
    """An output's name for people."""
    if output in _TITLES:
        return _TITLES[output]
    for prefix, words in (("log_prob_any_", "log-probability of anything "),
                          ("log_prob_", "log-probability of "),
                          ("logit_sum_", "sum of logits: ")):
        if output.startswith(prefix):
            return words + output.removeprefix(prefix)
    if output.startswith(PRODUCTS):
        return f"gradient × activation: {title_of(output.removeprefix(PRODUCTS))}"
    number = output.removeprefix("logit_")
    return f"logit of {ACTION_LABELS[int(number)]}" if number.isdigit() else output


class Sources:
    """Attributions with the features and the recording that they are of.

    Args:
        attributions: folder of ``attribution.attribute``.
        features_dir: folder of ``attribution.features``.
        recording: of the agent.
        agents: digests of the agent, see ``agents.provenance.agent_digests``.
        objects: names and scores of the features, of which those of other features are left out.
        activations: names of the layers of which activations are shown as well; None for those of
            at most ``MOST_CELLS`` cells.

    Raises:
        UserError: if they do not belong together, or nothing is finished; both checksums are
            named; or there is no such layer.
    """

    def __init__(self, attributions: AttributionFolder, features_dir: Path, recording: Recording,
                 agents: Collection[str], objects: ResultStore,
                 activations: list[str] | None = None):
        self.attributions, self.recording = attributions, recording
        self._objects = objects
        found = attributions.settings()
        for key, accepted, what in (
                ("agent_sha256", agents, "another agent"),
                ("recording_sha256", {recording.sha256}, "another recording")):
            if found.get(key) not in accepted:
                raise UserError(f"the attributions in {attributions.path} are of {what}: its "
                                f"checksum is {str(found.get(key))[:12]}, not "
                                f"{' or '.join(sorted(each[:12] for each in accepted))}")
        self.tolerance = float(found.get("tolerance") or 0.01)
        self.layers = attributions.layers()
        self.gradients = _value_first(attributions.outputs(INPUT))
        if not self.layers and not self.gradients:
            raise UserError(f"{attributions.path} holds no finished attributions; python -m "
                            "attribution.attribute makes them")
        self.folders = {name: FeaturesFolder(features_dir, name) for name in self.layers}
        self.features: dict[str, LayerFeatures] = {}
        for name, folder in self.folders.items():
            features = self.features[name] = folder.read()
            expected = attributions.layer_settings(name).get("features_sha256")
            if features.checksum != expected:
                raise UserError(f"the attributions in {attributions.path} to the layer '{name}' "
                                f"are of features with the checksum {str(expected)[:12]}, and "
                                f"those in {folder.path} have {features.checksum[:12]}; make the "
                                "attributions again, or name the right --features_dir")
        for name in activations or ():
            if name not in self.features:
                raise UserError(f"there are no features of a layer '{name}' whose activations "
                                f"could be shown{nearest(name, self.features)}")
        self._with_activations = {
            name for name, features in self.features.items()
            if math.prod(features.found["grid"]) <= MOST_CELLS
        } if activations is None else {*activations}
        self.steps = attributions.trajectories()
        there = [self.gradients, *map(self._outputs_at, self.layers)]
        self.outputs = [*dict.fromkeys(itertools.chain(*there))]
        self.outputs.sort(key=_kind_of_output)  # keeps the order among equals

    @property
    def shown_layers(self) -> list[str]:
        """Names of the page's layers, in order of computation."""
        return [*([INPUT] if self.gradients else []), *self.layers]

    def outputs_at(self, layer: str) -> list[str]:
        """Names of what there is of a layer, as the page knows them."""
        return self.gradients if layer == INPUT else self._outputs_at(layer)

    def _outputs_at(self, layer: str) -> list[str]:
        files, count = self.attributions, len(self.steps.bounds) - 1
        outputs = _value_first(files.outputs(layer))
        products = [PRODUCTS + output for output in outputs if all(
            files.gradient_activation_file(layer, output, number).is_file()
            for number in range(count))]
        return [*outputs, *products, *([ACTIVATIONS] if self.has_activations(layer) else [])]

    def has_activations(self, layer: str) -> bool:
        """Whether the activations of a layer's features are to be shown, and are there for all
        trajectories."""
        return layer in self._with_activations and all(
            self.attributions.file(layer, ACTIVATIONS, number).is_file()
            for number in range(len(self.steps.bounds) - 1))

    def objects(self, layer: str) -> PageObjects | None:
        """Kinds of object that the features of a layer go with; None where they are not known."""
        if not has_names(self._objects, layer, self.features[layer].checksum):
            return None
        found = read_names(self._objects, layer)
        table = self._objects.read("scores", layer)[["feature", "kind", *_SCORES]]
        kinds = [[row._asdict() for row in rows.itertuples(index=False)] for rows in (
            table[(table["feature"] == feature) & table["auc"].notna()].sort_values(
                "auc", ascending=False).drop(columns="feature")
            for feature in range(self.features[layer].number))]
        return PageObjects(
            [found[key] for key in ("score", "score_low_95", "score_high_95", "score_chance")],
            [each["name"] or "" for each in found["features"]], kinds)

    def frames(self, trajectory: int) -> np.ndarray:
        """uint8 (T, 64, 64, 3)."""
        part = self.steps.part(trajectory)
        return self.recording.read(np.stack([part.episode, part.row], axis=1)).frames

    def attribution(self, layer: str, output: str, trajectory: int) -> PageAttribution:
        """Attributions along a trajectory, or activations or gradients in their place.

        Activations have no residual. Of gradients by the frame, colours are summed: how much the
        output changes if a pixel gets brighter.
        """
        if layer == INPUT:
            found = self.attributions.gradients(output, trajectory)
            grey = found.gradients.sum(axis=-1, keepdims=True, dtype=np.float32)
            return PageAttribution(grey * found.largest[:, None, None, None],
                                   output=found.output)
        if output == ACTIVATIONS:
            cells = self.attributions.activations(layer, trajectory)
            cells = np.concatenate([cells, np.zeros_like(cells[..., :1])], axis=-1)
            return PageAttribution(cells, cells.sum(axis=(1, 2), dtype=np.float32))
        if output.startswith(PRODUCTS):
            product = self.attributions.gradient_activation(
                layer, output.removeprefix(PRODUCTS), trajectory)
            return PageAttribution(product.cells, product.totals)
        found = self.attributions.attributed(layer, output, trajectory)
        return PageAttribution(found.cells, found.totals, found.output, found.baseline, found.gap)


    def lags(self, layer: str, output: str) -> int:
        """The most steps that attributions go back to, for all trajectories; 0 for none."""
        if _kind_of_output(output) or layer == INPUT:
            return 0
        files, count = self.attributions, len(self.steps.bounds) - 1
        there = [lags for lags in files.lags(layer, output) if all(
            files.memory_file(layer, output, lags, number).is_file() for number in range(count))]
        return max(there, default=0)

    def memory(self, layer: str, output: str, trajectory: int) -> PageMemory:
        """Attributions over the last steps along a trajectory."""
        found = self.attributions.over_time(layer, output, self.lags(layer, output), trajectory)
        return PageMemory(found.totals, found.older, found.baseline, found.gap)


def _kind_of_output(name: str) -> int:
    """Its place among ``KINDS``."""
    kind = ACTIVATION if name == ACTIVATIONS else (
        PRODUCT if name.startswith(PRODUCTS) else ATTRIBUTION)
    return KINDS.index(kind)


def _value_first(outputs: list[str]) -> list[str]:
    return sorted(outputs, key=lambda name: (name != "value", name))


def gather(sources: Sources, experiment: str, agent: str, remembers: bool, unit: AdvantageSettings,
           rows: pd.DataFrame, labels: dict[str, dict[int, str]], num_bookmarks: int,
           with_causes: bool, reports: dict[str, str]) -> PageContent:
    """All that a page shows.

    Args:
        experiment, agent: names for people.
        remembers: whether the agent has a memory.
        rows: of the recording.
        labels: names of features, see ``read_labels``.
        num_bookmarks: steps of each list.
        with_causes: play failed episodes once more, to say what ended them.
        reports: addresses of the sections of a report of checks, by the checks' names.
    """
    steps = sources.steps
    calibration = calibration_of(rows, unit.reward_scale, unit.gamma)
    advantages = advantages_of(steps, unit.reward_scale, unit.gamma, unit.lmbda)
    names = sources.outputs
    outputs = [PageOutput(name, title_of(name), KINDS[_kind_of_output(name)]) for name in names]
    layers = tuple(_layer(sources, name, names) for name in sources.shown_layers)
    env = sources.recording.description.get("env") or {}
    game = ", ".join(filter(None, (
        env.get("env_name"), env.get("distribution_mode"),
        {True: "backgrounds on", False: "backgrounds off"}.get(env.get("use_backgrounds")))))
    content = PageContent(
        experiment, (agent,), (0,) * (len(steps.bounds) - 1),
        game or "a game that the recording does not name", tuple(outputs),
        layers, steps, advantages.astype(np.float32),
        {**dataclasses.asdict(unit), "slope": _number(calibration.slope),
         "slope_low_95": _number(calibration.low_95),
         "slope_high_95": _number(calibration.high_95),
         "r2": _number(calibration.r2), "off": calibration.is_off},
        [], {name: {**dict(enumerate(sources.features[name].found.get("names", ()))),
                    **labels.get(name, {})} for name in sources.layers},
        _failures(sources) if with_causes else [], reports, sources.tolerance, remembers,
        sources.frames,
        lambda layer, output, trajectory: sources.attribution(
            sources.shown_layers[layer], outputs[output].name, trajectory),
        lambda layer, output: sources.lags(sources.shown_layers[layer], outputs[output].name),
        lambda layer, output, trajectory: sources.memory(
            sources.shown_layers[layer], outputs[output].name, trajectory))
    return dataclasses.replace(content, bookmarks=_bookmarks(sources, content, advantages,
                                                             num_bookmarks))


def joined(content: PageContent, other: PageContent) -> PageContent:
    """A page of two agents, such as an original and an edited one, whose attributions are reduced
    to the same features: the trajectories of one, and behind them those of the other.

    Raises:
        UserError: if the other lacks a layer or an output of the first.
    """
    layers = {layer.name: number for number, layer in enumerate(other.layers)}
    outputs = {output.name: number for number, output in enumerate(other.outputs)}
    for layer in content.layers:
        for output in layer.outputs:
            name = content.outputs[output].name
            if (layer.name not in layers or name not in outputs or outputs[name]
                    not in other.layers[layers[layer.name]].outputs):
                raise UserError(f"{other.agents[0]} has no attributions of {name} at {layer.name} "
                                f"as {content.agents[0]} has; make them with {ATTRIBUTION_SCRIPT}")
    count = content.num_trajectories

    def there(layer: int, output: int) -> tuple[int, int]:
        return layers[content.layers[layer].name], outputs[content.outputs[output].name]

    def lags(layer: int, output: int) -> int:
        own = content.lags(layer, output)
        return own if own == other.lags(*there(layer, output)) else 0

    def moved(steps: list[list]) -> list[list]:
        return [[trajectory + count, *rest] for trajectory, *rest in steps]

    causes = {each["cause"]: list(each["steps"]) for each in content.failures}
    for each in other.failures:
        causes.setdefault(each["cause"], []).extend(moved(each["steps"]))
    steps = {field.name: np.concatenate([getattr(content.steps, field.name),
                                         getattr(other.steps, field.name)])
             for field in dataclasses.fields(Trajectories)}
    steps["trajectory"] = np.concatenate([content.steps.trajectory,
                                          other.steps.trajectory + count])
    return dataclasses.replace(
        content, agents=content.agents + other.agents,
        agent_of=content.agent_of + (1,) * other.num_trajectories, steps=Trajectories(**steps),
        advantages=np.concatenate([content.advantages, other.advantages]),
        bookmarks=[*content.bookmarks, *(
            {**each, "title": f"{other.agents[0]}: {each['title']}", "steps": moved(each["steps"])}
            for each in other.bookmarks)],
        failures=[{"cause": cause, "steps": places} for cause, places in causes.items()],
        frames=lambda number: (content.frames(number) if number < count
                               else other.frames(number - count)),
        attribution=lambda layer, output, number: (
            content.attribution(layer, output, number) if number < count
            else other.attribution(*there(layer, output), number - count)),
        lags=lags, memory=lambda layer, output, number: (
            content.memory(layer, output, number) if number < count
            else other.memory(*there(layer, output), number - count)))


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _layer(sources: Sources, name: str, names: list[str]) -> PageLayer:
    there = sources.outputs_at(name)
    numbers = tuple(number for number, output in enumerate(names) if output in there)
    if name == INPUT:
        return PageLayer(name, "the frame itself", (FRAME_SIZE, FRAME_SIZE), 0, 1, 0, np.zeros(0),
                         {}, numbers, gradients=True)
    features = sources.features[name]
    found = features.found
    stability = found.get("stability") or [np.nan] * features.number
    facts = {title: found[key] for key, title in (
        ("observations", "observations"), ("explained", "squared attribution explained, held out"),
        ("residual_share", "residual, share of |attribution|"), ("value_mean", "value, mean"),
        ("value_deviation", "value, deviation"), ("baseline_mean", "its baseline G(0), mean"))
        if found.get(key) is not None}
    layer = PageLayer(
        name, features.settings.get("layer", name), tuple(found["grid"]), found["first_pixel"],
        found["stride"], features.number, np.array(stability, dtype=float), facts, numbers,
        bool(found.get("partial")), objects=sources.objects(name))
    return _with_examples(layer, sources, features)


def _with_examples(layer: PageLayer, sources: Sources, features: LayerFeatures) -> PageLayer:
    """The layer with the examples of its features, if it has any; they are frames of the recording
    that the features were found in, and left out if that is another."""
    folder = sources.folders[layer.name]
    same = features.settings.get("recording_sha256") == sources.recording.sha256
    kinds = folder.example_kinds() if same else []
    examples = {kind: folder.examples(kind) for kind in kinds}
    if not examples:
        return layer
    numbers = np.concatenate([each.observations.ravel() for each in examples.values()])
    used = np.unique(numbers[numbers >= 0])
    places = np.full(len(features.observations), -1)
    places[used] = np.arange(len(used))
    converted = {kind: _examples(each, places, None if kind == THUMBNAIL else float(kind))
                 for kind, each in examples.items()}
    return dataclasses.replace(
        layer, thumbnails=converted.pop(THUMBNAIL, None), spatial=tuple(converted.values()),
        pictures=sources.recording.read(features.observations[used]).frames)


def _examples(examples: Examples, places: np.ndarray, shares: float | None) -> PageExamples:
    """Examples whose observations have other numbers."""
    observations = examples.observations
    shape = observations.shape
    if len(shape) == 2:  # of a thumbnail, in reading order
        side = min(THUMBNAIL_SIDE, shape[1])
        shape = (shape[0], -(-shape[1] // side), side)
    missing = int(np.prod(shape[1:])) - int(np.prod(observations.shape[1:]))

    def shaped(array: np.ndarray, fill: float) -> np.ndarray:
        flat = array.reshape(len(array), -1, *array.shape[observations.ndim:])
        padded = np.pad(flat, [(0, 0), (0, missing)] + [(0, 0)] * (flat.ndim - 2),
                        constant_values=fill)
        return padded.reshape(*shape, *array.shape[observations.ndim:])

    boxes = examples.boxes.astype(np.float32)
    centres = (boxes[..., :2] + boxes[..., 2:]) / 2 - 0.5  # pixels are counted at their middles
    renumbered = np.where(observations >= 0, places[np.maximum(observations, 0)], -1)
    return PageExamples(shaped(renumbered, -1), shaped(centres, 0), shaped(examples.strengths, 0),
                        shares)


def _bookmarks(sources: Sources, content: PageContent, advantages: np.ndarray,
               most: int) -> list[dict]:
    """Lists of steps that are worth looking at first; those without any are left out."""
    steps = content.steps
    best = functools.partial(best_of_episodes, steps=steps, most=most)
    jumps = spikes(steps)
    badge, warning = ("", "") if not content.unit["off"] else (
        " (unit uncertain)", " Values and rewards do not seem to have the same unit, so this list "
        "may be wrong: export the page with another --reward_scale.")
    lists = [
        (f"Unexpected failures{badge}", "The lowest advantages, one an episode: it went worse "
         f"than expected.{warning}", best(-advantages), advantages),
        (f"Unexpected successes{badge}", "The highest advantages, one an episode: it went better "
         f"than expected.{warning}", best(advantages), advantages),
        ("Value spikes", "The value stands out from that of the frames before and after it: "
         "something was seen that was not there, or went away at once.", best(jumps), jumps),
        *((f"Failures: {each['cause'].replace('_', ' ')}", _why(each["cause"]), np.array(
            [steps.bounds[trajectory] + step for trajectory, step in each["steps"]]), None)
          for each in content.failures),
        *([] if content.failures else [
            ("Episodes without a reward", "Their last frames.", failures(steps, most), None)])]
    if sources.layers:
        layer = sources.layers[len(sources.layers) // 2]  # which the page shows first
        output = _value_first(sources.attributions.outputs(layer))[0]
        gaps, residuals = _errors(sources, layer, output)
        of = f"{title_of(output)} at {layer}"
        lists += [
            ("Largest gaps", f"The attributions of {of} lack most to the change of the output, "
             "as a share of it.", best(gaps), gaps),
            ("Largest residual", f"The features leave most of {of} unexplained, as a share of "
             "all |attribution|.", best(residuals), residuals)]
    return [{"title": title, "why": why,
             "steps": [[*content.place(step), None if scores is None else float(scores[step])]
                       for step in found.tolist()]}
            for title, why, found, scores in lists if len(found)]


def _why(cause: str) -> str:
    """Explanation of a cause of failure, for the page."""
    return {TIMEOUT: "Episodes that ended at the time limit.",
            MULTIPLE: "No kind of hazard alone ended these episodes, but all together: without "
                      "all of them near, the last step, played again, would not have.",
            OTHER: "Episodes that would have ended without any hazard near, too.",
            ENDED: "Episodes that failed; the hazards of this game are not known."}.get(
        cause, f"Without the {cause.replace('_', ' ')} nearby, the last step, played again in the "
               "real game, would not have ended these episodes.")


def _failures(sources: Sources) -> list[dict]:
    """Last steps of the failed episodes that are shown to their end, by their causes."""
    steps, found = sources.steps, {}
    ends = np.flatnonzero(steps.ended)
    causes = recorded_causes(sources.recording.folder, np.unique(steps.episode[ends]).tolist())
    for end in ends.tolist():
        if steps.episode[end] in causes:
            place = int(steps.trajectory[end]), int(end - steps.bounds[steps.trajectory[end]])
            found.setdefault(causes[steps.episode[end]], []).append(place)
    return [{"cause": cause, "steps": found[cause]} for cause in sorted(
        found, key=lambda cause: (-len(found[cause]), cause))]


def _errors(sources: Sources, layer: str, output: str) -> tuple[np.ndarray, np.ndarray]:
    """Gaps of all steps, and what share of |attribution| the residual is, (N,) each."""
    gaps, shares = [], []
    for trajectory in range(len(sources.steps.bounds) - 1):
        found = sources.attribution(layer, output, trajectory)
        sizes = np.abs(found.cells.astype(np.float32)).sum(axis=(1, 2))
        gaps.append(found.gap)
        shares.append(sizes[:, -1] / np.maximum(sizes.sum(axis=1), np.finfo(np.float32).tiny))
    return np.concatenate(gaps), np.concatenate(shares)


def read_labels(path: Path, features: dict[str, LayerFeatures]) -> dict[str, dict[int, str]]:
    """Names of features, as the page saves them: {layer: {number on the page, from 1: name}}.

    Returns:
        Names by layer and feature, features counted from 0.

    Raises:
        UserError: if the file is missing, or names a layer or a feature that there is not.
    """
    content = read_json(path)
    if not isinstance(content, dict) or not all(isinstance(each, dict)
                                                for each in content.values()):
        raise UserError(f"{path} holds no names of features by layer: "
                        '{"2b": {"1": "a name"}}')
    found: dict[str, dict[int, str]] = {}
    for layer, names in content.items():
        if layer not in features:
            raise UserError(f"{path} has names for a layer '{layer}', which is not shown"
                            f"{nearest(layer, features)}")
        for number, name in names.items():
            count = features[layer].number
            if not (number.isdecimal() and 1 <= int(number) <= count):
                raise UserError(f"{path} has a name for feature '{number}' of {layer}, whose "
                                f"features are numbered 1 to {count}")
            if not isinstance(name, str) or len(name) > MAX_NAME:
                raise UserError(f"in {path} the name of feature {number} of {layer} is no text of "
                                f"at most {MAX_NAME} letters")
            found.setdefault(layer, {})[int(number) - 1] = name
    return found

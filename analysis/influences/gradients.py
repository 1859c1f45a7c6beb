"""Gradients of independent components (ICs) and of the agent's answers with respect to earlier ICs,
from the gradients of saliency_experiments.py.

The stored gradients of a sample are divided by its number of copies twice: the scalar is a mean
over the copies, and so is the gradient that is stored. Here they are multiplied by that number
once, which gives gradients of the sample itself.

Letters in shape comments: M samples, T steps, L lags, D hidden units, I ICs, J targets: ICs, then
answers.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from agents.networks import Policy
from agents.outputs import ANSWERS
from analysis.behaviours import BEHAVIOUR_FILES
from analysis.parameters import BehavioursConfig
from common.errors import UserError
from common.parameters import ParameterSet
from common.progress import with_progress
from common.shards import readable
from common.step_results import StepResults
from generative.config import SaliencyConfig
from generative.flags import samples_of
from generative.saliency.files import SaliencyFolder
from generative.saliency.gradients import DIRECTION, WITHOUT_ENV_GRADS, SaliencyFunction
from generative.sample_files import SampleFolder
from interventions.config import DirectionFilesConfig
from interventions.flags import directions_folder
from interventions.projector import Projector

# Gradients of an IC with respect to the ICs of its own step are 1 for itself and 0 for the others,
# up to the rounding of the matrices.
_IDENTITY_TOLERANCE = 0.02
OUTLIER = 10  # times the median over samples
_ANSWERS = {"value": "value", "action": "log-probability of the likeliest action",
            "leftwards": "mean log-probability of going left",
            "jumping_up": "log-probability of jumping up",
            "jumping_right": "log-probability of jumping right"}


def members(labels: np.ndarray) -> dict[int | str, np.ndarray]:
    """Return the rows of each behaviour that occurs, by its number.

    Args:
        labels: behaviour of each sample, -1 for none (M,).
    """
    return {int(label): np.flatnonzero(labels == label) for label in np.unique(labels)
            if label >= 0}


def standardised(values: np.ndarray, what: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Standardise quantities over samples and steps.

    Args:
        values: (M, T, J).
        what: names of the quantities, for the message.

    Returns:
        The standardised quantities (M, T, J), and their standard deviations (J,).

    Raises:
        UserError: if one does not vary.
    """
    flat = values.reshape(-1, values.shape[-1]).astype(np.float64)
    deviations = flat.std(axis=0)
    for name, deviation in zip(what, deviations):
        if not deviation > 0:
            raise UserError(f"{name} does not vary over these samples, so nothing can be said "
                            "about what moves it")
    return (values - flat.mean(axis=0)) / deviations, deviations


def outlier_share(sizes: np.ndarray) -> np.ndarray:
    """Return the share of samples whose gradient is larger than ``OUTLIER`` times the median.

    A few samples' gradients explode on their way through the simulator and then decide a mean;
    so means are stored, as published, but claims and figures go by medians.

    Args:
        sizes: size of the gradient in each sample, not negative (M, …).

    Returns:
        float64 (…).
    """
    return (sizes > OUTLIER * np.median(sizes, axis=0)).mean(axis=0)


def ic_name(number: int) -> str:
    return f"IC {number}"


def answer_name(function: str) -> str:
    """Return the name of an output, a function of ``ANSWERS``, in texts and figures."""
    return _ANSWERS[function]


@dataclasses.dataclass(frozen=True)
class Coordinates:
    """Coordinates of the states and outputs of samples.

    Attributes:
        numbers: numbers of the samples (M,).
        ics: coordinates of the state that leaves each step, about the mean of the recorded
            states and in their standard deviations (M, T, I).
        states: the same as hidden units (M, T, D).
        answers: outputs of the agent by the name of the function, (M, T) each, standardised over
            these samples and steps.
        deviations: their standard deviations, by the same names; that of the value in its unit,
            all others in nats.
    """

    numbers: list[int]
    ics: np.ndarray
    states: np.ndarray
    answers: dict[str, np.ndarray]
    deviations: dict[str, float]


def read_coordinates(samples: SampleFolder, numbers: Sequence[int],
                     projector: Projector) -> Coordinates:
    """Read the coordinates of recorded samples.

    Raises:
        UserError: naming a file that is missing, damaged, of another shape or holds NaN; or if
            an answer does not vary.
    """
    fields = {field: torch.from_numpy(samples.stacked_field(field, numbers))
              for field in ("hidden_states", "values", "log_probs")}
    states = fields["hidden_states"]
    values = np.stack([function(fields["values"], fields["log_probs"]).numpy()
                       for function in ANSWERS.values()], axis=-1)  # (M, T, functions)
    scaled, deviations = standardised(values, [answer_name(name) for name in ANSWERS])
    return Coordinates(
        list(numbers), projector.coordinates(states, "ica").numpy(), states.numpy(),
        {name: scaled[..., i] for i, name in enumerate(ANSWERS)},
        {name: float(deviation) for name, deviation in zip(ANSWERS, deviations)})


@dataclasses.dataclass(frozen=True)
class Influences:
    """Gradients of targets at one step with respect to the ICs of earlier ones.

    Attributes:
        step: at which the targets are read, from 0.
        lags: 0 … ``step``, from the step itself backwards.
        answers: functions of ``ANSWERS`` among the targets, after the ICs.
        gradients: float32 (M, L, I, J): how many standard deviations a target at ``step`` moves
            for each one that an IC moves at ``step`` - lag. At lag 0 the part of the ICs is the
            identity.
        targets: the targets at all steps, ICs first (M, T, J).
        sources: the ICs at all steps (M, T, I).
    """

    step: int
    lags: tuple[int, ...]
    answers: tuple[str, ...]
    gradients: np.ndarray
    targets: np.ndarray
    sources: np.ndarray

    @property
    def num_ics(self) -> int:
        return self.sources.shape[2]

    @property
    def target_names(self) -> list[str]:
        """Names of the targets in tables: ``IC 3``, or the name of the function."""
        return [*map(ic_name, range(self.num_ics)), *self.answers]


class InfluenceReader:
    """Reads gradients with respect to ICs from the saliency of samples.

    Args:
        samples: folder of the samples.
        coordinates: coordinates of the samples to read.
        matrices: checksums of the projector's files, by name.
        settings: section ``saliency``; used for published samples, which do not store the
            settings of their saliency.

    Raises:
        UserError: if the settings have more than one step at which functions are read.
    """

    def __init__(self, samples: SampleFolder, coordinates: Coordinates, projector: Projector,
                 matrices: dict[str, str], settings: SaliencyConfig):
        if len(settings.common_timesteps) > 1:
            raise UserError("influences are those on one step, but common_timesteps has "
                            f"{len(settings.common_timesteps)}; make saliency with one, and give "
                            "--common_timesteps")
        (self.step,) = settings.common_timesteps
        self._num_copies = settings.batch_size
        self._folder, self._coordinates = SaliencyFolder(samples.path), coordinates
        self._projector, self._matrices = projector, matrices
        if self.step >= coordinates.ics.shape[1]:
            raise UserError(f"the samples in {samples.path} have {coordinates.ics.shape[1]} "
                            f"steps, too few for step {self.step} of common_timesteps, which "
                            "counts from 0")

    def has(self, answer: str, without_env_grads: bool) -> bool:
        """Return whether every sample has saliency of this function of ``ANSWERS``."""
        return not self._first_absent(SaliencyFunction(answer), without_env_grads)

    def lacking(self, without_env_grads: bool) -> str:
        """Return the first missing file of the ICs' saliency; empty if there is none."""
        for function in self._functions():
            absent = self._first_absent(function, without_env_grads)
            if absent:
                return absent
        return ""

    def read(self, answers: Sequence[str], without_env_grads: bool = False,
             policy: Policy | None = None) -> Influences:
        """Read the influences on all ICs and some outputs.

        Args:
            answers: functions of ``ANSWERS``.
            policy: the agent; if given, the influences on the answers are those of its read-out
                at the step itself, and no saliency of theirs is needed.

        Raises:
            UserError: naming a file that is missing, damaged, holds NaN, or was made at another
                step, with other directions, or with other gradients through the environment.
        """
        coordinates = self._coordinates
        functions = [*self._functions(),
                     *(SaliencyFunction(name) for name in answers if policy is None)]
        columns = [self._gradients(function, without_env_grads)
                   for function in with_progress(functions, len(functions), "function")]
        num_ics = self._projector.num_ics
        self._check_identity(np.stack(columns[:num_ics], axis=-1)[:, 0])
        if policy is not None:
            columns += [self._readout(policy, name, columns[0].shape) for name in answers]
        for i, name in enumerate(answers):
            columns[num_ics + i] = columns[num_ics + i] / coordinates.deviations[name]
        targets = np.concatenate(
            [coordinates.ics, *(coordinates.answers[name][..., None] for name in answers)], axis=-1)
        return Influences(self.step, tuple(range(self.step + 1)), tuple(answers),
                          np.stack(columns, axis=-1).astype(np.float32), targets, coordinates.ics)

    def _first_absent(self, function: SaliencyFunction, without_env_grads: bool) -> str:
        for number in self._coordinates.numbers:
            path = self._folder.file_of("hidden_states", number,
                                        _stored_name(function, without_env_grads))
            if not path.exists():
                return str(path)
        return ""

    def _functions(self) -> list[SaliencyFunction]:
        return [SaliencyFunction(DIRECTION, number, "ica")
                for number in range(self._projector.num_ics)]

    def _gradients(self, function: SaliencyFunction, without_env_grads: bool) -> np.ndarray:
        """Read the gradients of a function with respect to the ICs (M, L, I), lags ascending."""
        numbers = self._coordinates.numbers
        name = _stored_name(function, without_env_grads)
        num_copies = [self._copies(number, name, function, without_env_grads)
                      for number in numbers]
        stored = self._folder.stacked_field("hidden_states", name, numbers)  # (M, T, D)
        if stored.shape != self._coordinates.states.shape:
            raise UserError(f"the gradients of {name} have the shape {stored.shape}, not "
                            f"{self._coordinates.states.shape} as the samples' states")
        of_steps = self._projector.gradient(torch.from_numpy(stored), "ica").numpy()
        return of_steps[:, self.step::-1] * np.array(num_copies, np.float32)[:, None, None]

    def _copies(self, number: int, name: str, function: SaliencyFunction,
                without_env_grads: bool) -> int:
        """Return the number of copies of a sample, after checking the settings of its saliency."""
        found = self._folder.description(number, name)
        if not found:  # a published one
            return self._num_copies
        expected = {"common_timesteps": [self.step], "without_env_grads": without_env_grads}
        if function.direction is not None:
            expected["matrices_sha256"] = self._matrices
        for key, value in expected.items():
            if found.get(key) != value:
                path = self._folder.file_of("description", number, name)
                raise UserError(f"{path} says that its saliency was made with another "
                                f"{readable(key)}; make it again with saliency_experiments.py "
                                "--overwrite, or give what it was made with")
        return int(found["num_copies"])

    def _check_identity(self, gradients: np.ndarray) -> None:
        """Raise unless ICs at the step itself (M, I, I) move themselves and no others."""
        error = np.abs(gradients - np.eye(gradients.shape[1])).max()
        if not error < _IDENTITY_TOLERANCE:
            raise UserError("the gradients of the directions are not those of the directions in "
                            "--precomp_dir, or not of the step in common_timesteps, or of another "
                            "number of copies than the section saliency says: at that step an IC "
                            f"should move itself by 1 and no other, but is off by {error:.2f}")

    def _readout(self, policy: Policy, answer: str, shape: tuple[int, ...]) -> np.ndarray:
        """Gradients of an output through the agent's heads only (M, L, I): 0 except at lag 0."""
        states = torch.from_numpy(self._coordinates.states[:, self.step])
        if policy.fc_value.in_features != states.shape[-1]:
            raise UserError(f"the agent's heads read {policy.fc_value.in_features} units, but the "
                            f"samples' states have {states.shape[-1]}; give the --agent_file of "
                            "these samples")
        gradients = np.zeros(shape, np.float32)
        gradients[:, 0] = self._projector.gradient(readout_gradient(policy, answer, states),
                                                   "ica").numpy()
        return gradients


def _stored_name(function: SaliencyFunction, without_env_grads: bool) -> str:
    """Return the name of a function in the names of its files."""
    return function.name + (WITHOUT_ENV_GRADS if without_env_grads else "")


def readout_gradient(policy: Policy, answer: str, states: Tensor) -> Tensor:
    """Return gradients of an output with respect to the states (M, D) that the heads read."""
    leaf = states.clone().requires_grad_()
    with torch.enable_grad():
        log_probs = torch.log_softmax(policy.fc_policy(leaf), dim=-1)
        total = ANSWERS[answer](policy.fc_value(leaf).squeeze(-1), log_probs).sum()
    return torch.autograd.grad(total, leaf)[0]


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Inputs of the analyses of influences.

    Attributes:
        samples: folder of the samples.
        coordinates: coordinates of the chosen samples.
        projector: projector to the directions.
        matrices: checksums of the projector's files, by name.
        labels: behaviour of each sample, -1 for none (M,); None if behaviours are left out.
    """

    samples: SampleFolder
    coordinates: Coordinates
    projector: Projector
    matrices: dict[str, str]
    labels: np.ndarray | None

    @classmethod
    def read(cls, samples: SampleFolder, numbers: Sequence[int], precomputed: Path,
             num_episodes: int, behaviours: StepResults | None) -> Inputs:
        """Read samples, directions and behaviours.

        Args:
            numbers: numbers of the samples.
            precomputed: folder of the directions, computed from ``num_episodes`` episodes.
            behaviours: results of the behaviours, or None to leave them out.

        Raises:
            UserError: naming what is missing, damaged or does not fit.
        """
        samples.require(numbers)
        units = samples.stacked_field("hidden_states", numbers[:1]).shape[-1]
        projector, matrices = Projector.load_for(units, precomputed, num_episodes,
                                                 samples.description().get("agent_sha256"))
        labels = None if behaviours is None else labels_of(samples, numbers, behaviours)
        return cls(samples, read_coordinates(samples, numbers, projector), projector, matrices,
                   labels)

    @property
    def groups(self) -> dict[int | str, np.ndarray]:
        """Rows of the samples of each behaviour."""
        return {} if self.labels is None else members(self.labels)

    def description(self) -> dict:
        """Settings that identify the inputs."""
        return {"samples_dir": str(self.samples.path), "sample_ids": self.coordinates.numbers,
                "matrices_sha256": self.matrices,
                "samples_of_behaviours": None if self.labels is None else {
                    str(label): len(rows) for label, rows in self.groups.items()}}


def labels_of(samples: SampleFolder, numbers: Sequence[int],
              behaviours: StepResults) -> np.ndarray:
    """Read the behaviour of each of these samples, -1 for none (M,).

    Raises:
        UserError: if the file is missing or damaged, or they are of other samples.
    """
    path, labels = behaviours.file("per_sample"), behaviours.read("per_sample")
    if len(labels) != behaviours.number:
        raise UserError(f"{path} holds {len(labels)} behaviours, not one for each of "
                        f"{behaviours.number} samples")
    analysed = samples.numbers()[:behaviours.number]  # the first ones
    rows = {number: row for row, number in enumerate(analysed)}
    absent = [number for number in numbers if number not in rows]
    if absent or len(analysed) < behaviours.number:
        raise UserError(f"{path} has behaviours of {behaviours.number} samples, but "
                        + (f"not of sample {absent[0]}; find behaviours in more samples, or ask "
                           "for fewer with --sample_ids" if absent else
                           f"{samples.path} holds only {len(analysed)}; give the samples in "
                           "which they were found"))
    return labels[[rows[number] for number in numbers]]


def open_inputs(args: argparse.Namespace, parameters: ParameterSet) -> Inputs:
    """Read the samples, directions and behaviours that the flags of ``add_influence_flags`` choose.

    Raises:
        UserError: naming what is missing, damaged or does not fit.
    """
    numbers = parameters.get(SaliencyConfig).ids("sample_ids")
    if not numbers:
        raise UserError("there is nothing to do without samples: see --sample_ids")
    behaviours = None
    if not args.no_behaviours:
        behaviours = StepResults(
            args.behaviours_dir or parameters.folders.behaviours, BEHAVIOUR_FILES,
            parameters.get(BehavioursConfig).num_samples)
        if not behaviours.file("per_sample").exists():
            raise UserError(f"there is no file {behaviours.file('per_sample')}; "
                            f"{behaviours.schema.script} writes it, or give --no_behaviours")
    inputs = Inputs.read(samples_of(args, parameters), numbers,
                         directions_folder(args, parameters),
                         parameters.get(DirectionFilesConfig).num_episodes, behaviours)
    alone = sum(len(rows) == 1 for rows in inputs.groups.values())
    print(f"{len(numbers)} samples, {len(inputs.groups)} behaviours"
          + (f", {alone} of them with one sample" if alone else ""), flush=True)
    return inputs


def open_reader(inputs: Inputs, parameters: ParameterSet) -> InfluenceReader:
    """Open the saliency of these samples.

    Raises:
        UserError: see ``InfluenceReader``.
    """
    return InfluenceReader(inputs.samples, inputs.coordinates, inputs.projector, inputs.matrices,
                           parameters.get(SaliencyConfig))

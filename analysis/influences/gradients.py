"""Gradients of independent components (ICs) and of the agent's outputs with respect to earlier ICs,
from the gradients of saliency_experiments.py.

Saliency is computed on several simulated copies of each sample. The differentiated scalar is a mean
over the copies, and the stored gradient is again a mean over the copies. A stored gradient is
therefore the mean of the gradients of single copies, divided by the number of copies;
``InfluenceReader`` multiplies by this number.

Letters in shape comments: L lags; I ICs; J targets (ICs, then outputs).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from agents.networks import Policy
from agents.outputs import ANSWERS
from analysis.behaviours import BEHAVIOUR_FILES
from analysis.parameters import BehavioursConfig, InfluenceOptions
from common.errors import UserError
from common.parameters import ParameterSet
from common.progress import with_progress
from common.shards import readable
from common.step_results import StepResults
from generative.config import SaliencyConfig
from generative.saliency.files import SaliencyFolder
from generative.saliency.gradients import DIRECTION, WITHOUT_ENV_GRADS, SaliencyFunction
from generative.sample_files import SampleFolder
from interventions.projector import Projector

# The gradient of an IC with respect to the ICs of the same step is 1 for itself and 0 for others,
# up to the rounding of the matrices.
_IDENTITY_TOLERANCE = 0.02
OUTLIER = 10  # multiple of the median over samples above which a gradient is an outlier
ANSWER_NAMES = {"value": "value", "action": "log-probability of the most likely action",
                "leftwards": "mean log-probability of going left",
                "jumping_up": "log-probability of jumping up",
                "jumping_right": "log-probability of jumping right"}


def members(labels: np.ndarray) -> dict[int | str, np.ndarray]:
    """Return the row indices of the samples of each behaviour that occurs, by behaviour number.

    Args:
        labels: behaviour of each sample, -1 for none (M,).
    """
    return {int(label): np.flatnonzero(labels == label) for label in np.unique(labels)
            if label >= 0}


def outlier_share(sizes: np.ndarray) -> np.ndarray:
    """Compute the share of samples whose gradient is larger than OUTLIER times the median sample's.

    In a few samples, gradients explode on their way through the simulator and dominate the mean.
    Claims are therefore based on medians; means are stored only because they are published.

    Args:
        sizes: magnitude of the gradient in each sample, non-negative (M, …).

    Returns:
        Share of outliers, float64, with the shape of ``sizes`` without its first axis.
    """
    return (sizes > OUTLIER * np.median(sizes, axis=0)).mean(axis=0)


@dataclasses.dataclass(frozen=True)
class Coordinates:
    """IC coordinates, hidden states and outputs of samples.

    Attributes:
        numbers: numbers of the M samples.
        ics: IC coordinates of the state after each step, relative to the mean of the recorded
            states, in standard deviations of the recorded coordinates (M, T, I).
        states: the same states in hidden units (M, T, D).
        answers: outputs of the agent by name (a key of ``ANSWERS``), standardised over these
            samples and steps, (M, T) each.
        deviations: standard deviations of the outputs before standardisation, by name; in nats
            except for the value.
    """

    numbers: list[int]
    ics: np.ndarray
    states: np.ndarray
    answers: dict[str, np.ndarray]
    deviations: dict[str, float]


def read_coordinates(samples: SampleFolder, numbers: Sequence[int],
                     projector: Projector) -> Coordinates:
    """Read simulated samples, compute the IC coordinates of their states, and standardise their
    outputs.

    Args:
        samples: folder of the samples.
        projector: projector to the ICs.

    Raises:
        UserError: if a file is missing, is damaged, has another shape or contains NaN (the message
            names it), or if an output does not vary.
    """
    fields = {field: torch.from_numpy(samples.stacked_field(field, numbers))
              for field in ("hidden_states", "values", "log_probs")}
    states = fields["hidden_states"]
    answers, deviations = {}, {}
    for name, function in ANSWERS.items():
        values = function(fields["values"], fields["log_probs"]).numpy().astype(np.float64)
        deviations[name] = float(values.std())
        if not deviations[name] > 0:
            raise UserError(f"{ANSWER_NAMES[name]} does not vary over these samples, so influences "
                            "on it cannot be measured")
        answers[name] = (values - values.mean()) / deviations[name]
    return Coordinates(
        list(numbers), projector.coordinates(states, "ica").numpy(), states.numpy(),
        answers, deviations)


@dataclasses.dataclass(frozen=True)
class Influences:
    """Gradients of targets at one step with respect to the ICs of this and earlier steps.

    Attributes:
        step: step at which the targets are read, from 0.
        lags: lags from 0 to ``step``, counted backwards from ``step``.
        answers: names of the outputs among the targets; outputs follow the ICs.
        gradients: standard deviations by which a target moves at ``step`` per standard deviation of
            an IC at ``step`` - lag, float32 (M, L, I, J). At lag 0, the gradients between ICs are
            the identity.
        targets: values of the targets at all steps, ICs first (M, T, J).
        sources: coordinates of the ICs at all steps (M, T, I).
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
        """Names of the targets in tables: ``IC 3``, or the name of the output."""
        return [*(f"IC {i}" for i in range(self.num_ics)), *self.answers]


class InfluenceReader:
    """Reader of gradients with respect to ICs, from the saliency of samples.

    Args:
        samples: folder of the samples.
        coordinates: coordinates of the samples to read.
        projector: projector to the ICs.
        matrices: checksums of the projector's files, by name.
        settings: section ``saliency``. The targets are outputs and ICs at ``common_timesteps``.
            Published samples do not store their number of copies; for them, it is ``batch_size``.

    Raises:
        UserError: if the settings contain more than one step, or a step beyond the samples' end.
    """

    def __init__(self, samples: SampleFolder, coordinates: Coordinates, projector: Projector,
                 matrices: dict[str, str], settings: SaliencyConfig):
        if len(settings.common_timesteps) > 1:
            raise UserError("influences need targets at a single step, but common_timesteps has "
                            f"{len(settings.common_timesteps)}; compute saliency with one step, "
                            "and give it as --common_timesteps")
        (self.step,) = settings.common_timesteps
        self._num_copies = settings.batch_size
        self._folder, self._coordinates = SaliencyFolder(samples.path), coordinates
        self._projector, self._matrices = projector, matrices
        if self.step >= coordinates.ics.shape[1]:
            raise UserError(f"the samples in {samples.path} have {coordinates.ics.shape[1]} "
                            f"steps, too few for step {self.step} of common_timesteps, which "
                            "counts from 0")

    def has(self, answer: str, without_env_grads: bool) -> bool:
        """Return whether every sample has saliency of an output.

        Args:
            answer: name of the output, a key of ``ANSWERS``.
            without_env_grads: whether to look for saliency without gradients through the
                environment.
        """
        name = _stored_name(SaliencyFunction(answer), without_env_grads)
        return all(self._folder.file_of("hidden_states", number, name).exists()
                   for number in self._coordinates.numbers)

    def read(self, answers: Sequence[str], without_env_grads: bool = False,
             policy: Policy | None = None) -> Influences:
        """Read the influences on all ICs and some outputs.

        Args:
            answers: names of the outputs, keys of ``ANSWERS``.
            without_env_grads: whether to read the gradients without paths through the environment.
            policy: if given, the influences on the outputs are the gradients through the heads of
                this agent, which are 0 at lags above 0; if None, they are read from saliency.

        Raises:
            UserError: if a file is missing, is damaged or contains NaN, or was computed at another
                step, with other directions or with another ``without_env_grads``; if the gradients
                between ICs at lag 0 are not the identity; or if ``policy`` has another number of
                hidden units.
        """
        coordinates = self._coordinates
        num_ics = self._projector.num_ics
        functions = [*(SaliencyFunction(DIRECTION, number, "ica") for number in range(num_ics)),
                     *(SaliencyFunction(name) for name in answers if policy is None)]
        columns = [self._gradients(function, without_env_grads)
                   for function in with_progress(functions, len(functions), "function")]
        self._check_identity(np.stack(columns[:num_ics], axis=-1)[:, 0])
        if policy is not None:
            columns += [self._readout(policy, name, columns[0].shape) for name in answers]
        for i, name in enumerate(answers):
            columns[num_ics + i] = columns[num_ics + i] / coordinates.deviations[name]
        targets = np.concatenate(
            [coordinates.ics, *(coordinates.answers[name][..., None] for name in answers)], axis=-1)
        return Influences(self.step, tuple(range(self.step + 1)), tuple(answers),
                          np.stack(columns, axis=-1).astype(np.float32), targets, coordinates.ics)

    def _gradients(self, function: SaliencyFunction, without_env_grads: bool) -> np.ndarray:
        """Read the gradients of a function with respect to the ICs (M, L, I), by ascending lag."""
        numbers = self._coordinates.numbers
        name = _stored_name(function, without_env_grads)
        expected = {"common_timesteps": [self.step], "without_env_grads": without_env_grads}
        if function.direction is not None:
            expected["matrices_sha256"] = self._matrices
        num_copies = [self._copies(number, name, expected) for number in numbers]
        stored = self._folder.stacked_field("hidden_states", name, numbers)  # (M, T, D)
        if stored.shape != self._coordinates.states.shape:
            raise UserError(f"the gradients of {name} have the shape {stored.shape}, but the "
                            f"states of the samples have {self._coordinates.states.shape}")
        of_steps = self._projector.gradient(torch.from_numpy(stored), "ica").numpy()
        return of_steps[:, self.step::-1] * np.array(num_copies, np.float32)[:, None, None]

    def _copies(self, number: int, name: str, expected: dict) -> int:
        """Return the number of simulated copies from which a sample's saliency was computed.

        Raises:
            UserError: if the settings of the saliency differ from the expected ones.
        """
        description = self._folder.description(number, name)
        if not description:  # published samples have no description
            return self._num_copies
        for key, value in expected.items():
            if description.get(key) != value:
                path = self._folder.file_of("description", number, name)
                raise UserError(f"the saliency described by {path} was computed with another "
                                f"{readable(key)}; compute it again with saliency_experiments.py "
                                "--overwrite, or give the value that was used")
        return int(description["num_copies"])

    def _check_identity(self, gradients: np.ndarray) -> None:
        """Raise UserError unless the gradients between ICs of the same step (M, I, I) are identity
        matrices."""
        error = np.abs(gradients - np.eye(gradients.shape[1])).max()
        if not error < _IDENTITY_TOLERANCE:
            raise UserError("the gradients between ICs of the same step should be the identity "
                            f"matrix, but differ from it by up to {error:.2f}: the saliency of the "
                            "ICs was computed with other directions than those in --precomp_dir, "
                            "at another step than common_timesteps, or with another number of "
                            "copies than batch_size of the section saliency")

    def _readout(self, policy: Policy, answer: str, shape: tuple[int, ...]) -> np.ndarray:
        """Compute the gradients of an output with respect to the ICs through the agent's heads
        only: float32 (M, L, I), 0 except at lag 0.

        Args:
            answer: name of the output, a key of ``ANSWERS``.
            shape: M, L and I.
        """
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
    """Return the name of a saliency function in file names."""
    return function.name + (WITHOUT_ENV_GRADS if without_env_grads else "")


def readout_gradient(policy: Policy, answer: str, states: Tensor) -> Tensor:
    """Compute the gradients of an output with respect to the hidden states that the heads read.

    Args:
        answer: name of the output, a key of ``ANSWERS``.
        states: hidden states (M, D).

    Returns:
        Gradients (M, D).
    """
    leaf = states.clone().requires_grad_()
    with torch.enable_grad():
        log_probs = torch.log_softmax(policy.fc_policy(leaf), dim=-1)
        total = ANSWERS[answer](policy.fc_value(leaf).squeeze(-1), log_probs).sum()
    return torch.autograd.grad(total, leaf)[0]


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Samples, directions and behaviours from which influences are computed.

    Attributes:
        samples: folder of the samples.
        coordinates: IC coordinates, states and outputs of the chosen samples.
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
            samples: folder of the samples.
            num_episodes: number of episodes from which the directions were computed.
            behaviours: results of the behaviours, or None to leave them out.

        Raises:
            UserError: if a file is missing, damaged or inconsistent with another file; the message
                names it.
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
        """Row indices of the samples of each behaviour, by number of the behaviour; empty without
        behaviours."""
        return {} if self.labels is None else members(self.labels)

    def description(self) -> dict:
        """Return the settings that identify the inputs."""
        return {"samples_dir": str(self.samples.path), "sample_ids": self.coordinates.numbers,
                "matrices_sha256": self.matrices,
                "samples_of_behaviours": None if self.labels is None else {
                    str(label): len(rows) for label, rows in self.groups.items()}}


def labels_of(samples: SampleFolder, numbers: Sequence[int],
              behaviours: StepResults) -> np.ndarray:
    """Read the behaviour of each sample, -1 for none (M,).

    Args:
        samples: folder of the samples.
        numbers: numbers of the M samples.
        behaviours: results of the analysis that found the behaviours
            (``combined_agent_env_hx_analysis_precompute.py``).

    Raises:
        UserError: if the file of behaviours is missing or damaged, or lacks one of the samples; or
            if the folder holds fewer samples than were analysed.
    """
    path, labels = behaviours.file("per_sample"), behaviours.read("per_sample")
    if len(labels) != behaviours.number:
        raise UserError(f"{path} holds {len(labels)} behaviours, not one for each of "
                        f"{behaviours.number} samples")
    analysed = samples.numbers()[:behaviours.number]  # the first samples
    rows = {number: row for row, number in enumerate(analysed)}
    absent = [number for number in numbers if number not in rows]
    if absent or len(analysed) < behaviours.number:
        raise UserError(f"{path} has behaviours of {behaviours.number} samples, but "
                        + (f"not of sample {absent[0]}; find behaviours in more samples, or give "
                           "other --sample_ids" if absent else
                           f"{samples.path} holds only {len(analysed)}; give the samples in "
                           "which they were found"))
    return labels[[rows[number] for number in numbers]]


def open_inputs(options: InfluenceOptions) -> Inputs:
    """Read the samples, directions and behaviours, and print the numbers of samples and behaviours.

    Raises:
        UserError: if no samples are chosen, or if a file is missing, damaged or inconsistent with
            another file; the message names it.
    """
    parameters = options.parameters
    numbers = parameters.get(SaliencyConfig).ids("sample_ids")
    if not numbers:
        raise UserError("no samples are chosen; give their numbers as --sample_ids")
    behaviours = None
    if options.behaviours:
        behaviours = StepResults.open(
            options.behaviours_dir or parameters.folders.behaviours, BEHAVIOUR_FILES,
            parameters.get(BehavioursConfig).num_samples, "--num_samples",
            parameters.is_given(BehavioursConfig, "num_samples"))
        if not behaviours.file("per_sample").exists():
            raise UserError(f"there is no file {behaviours.file('per_sample')}; "
                            f"{behaviours.schema.script} writes it, or give --no_behaviours")
    inputs = Inputs.read(options.samples, numbers, options.directions_folder,
                         options.direction_episodes, behaviours)
    alone = sum(len(rows) == 1 for rows in inputs.groups.values())
    print(f"{len(numbers)} samples, {len(inputs.groups)} behaviours"
          + (f", {alone} of them with one sample" if alone else ""), flush=True)
    return inputs


def open_reader(inputs: Inputs, parameters: ParameterSet) -> InfluenceReader:
    """Open the saliency of the samples in ``inputs``.

    Raises:
        UserError: see ``InfluenceReader``.
    """
    return InfluenceReader(inputs.samples, inputs.coordinates, inputs.projector, inputs.matrices,
                           parameters.get(SaliencyConfig))

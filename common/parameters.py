"""Parameter sets of all stages after the training of the agent, read from
``hyperparams/interpreting_configs.yml``.

A parameter set is a tree of sections. A module reads its values from a section into a dataclass,
which names the section and checks the values. The YAML file documents the meaning and unit of each
value.
"""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from common.config import read_yaml, typed
from common.errors import UserError, nearest, shortened

INTERPRETING_CONFIG_FILE = (Path(__file__).parent.parent / "hyperparams"
                            / "interpreting_configs.yml")
BASE_SET = "defaults"
PARAMETER_SET = "interpreting_params_name"  # flag, and key of recording.json

MAX_IDS = 10**6  # numbers of samples or directions in a range


class AnalysisFolders:
    """Folders below ``analysis.save_dir`` as attributes, with the published folder names."""

    NAMES: ClassVar = {
        "hidden_states": "hx_analysis_precomp", "hidden_state_plots": "hx_plots",
        "env_states": "env_analysis_precomp", "env_state_plots": "env_plots",
        "bottleneck": "bottleneck_vec_analysis_precomp",
        "bottleneck_plots": "bottleneck_vec_plots",
        "behaviours": "combined_agent_env_hx_analysis_precomp",
        "behaviour_stability": "behaviour_stability",
        "behaviour_plots": "combined_agent_env_hx_plots", "jacobians": "jacob_analysis_precomp",
        "jacobian_plots": "jacob_plots", "correlations": "cross_corr_and_causation_plot_data",
        "correlation_plots": "cross_corr_and_causation_plots",
        "comparison": "dyn_grad_comparison_data", "comparison_plots": "dyn_grad_comparison_plots",
        "stories": "causal_stories", "readout": "value_and_action_weights",
        "saliency_demonstration": "demo_with_without_env_grads",
        "loss_over_time": "loss_over_time", "interventions": "interventions",
        "interventions_in_simulator": "interventions_in_simulator", "scan": "scan",
        "panel": "panel"}

    def __init__(self, save_dir: Path):
        self.save_dir = save_dir

    def __getattr__(self, name: str) -> Path:
        if name not in self.NAMES:
            raise AttributeError(name)
        return self.save_dir / self.NAMES[name]


def parameter_sets() -> list[str]:
    """Return the names of the parameter sets."""
    return list(read_yaml(INTERPRETING_CONFIG_FILE))


def positive(config, *names: str) -> None:
    """Check that fields of a configuration are positive and finite.

    Raises:
        UserError: if a field is not positive or not finite; the message names the field.
    """
    for name in names:
        if not 0 < getattr(config, name) < math.inf:
            raise UserError(f"{name} must be above 0, not {getattr(config, name)}")


def tail_fraction(config, name: str) -> None:
    """Check that a field is a fraction that can be cut off at both tails of a distribution.

    Raises:
        UserError: if the field is not above 0 and at most 0.5; the message names the field.
    """
    if not 0 < getattr(config, name) <= 0.5:
        raise UserError(f"{name} must be above 0 and at most 0.5, not {getattr(config, name)}")


def one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Check that a value is one of the choices.

    Args:
        name: name of the value, for the message.

    Raises:
        UserError: if the value is not a choice; the message suggests the most similar choice.
    """
    if value not in choices:
        raise UserError(f"unknown {name} '{value}'{nearest(value, choices)}")


def id_list(text: str, what: str) -> tuple[int, ...]:
    """Parse numbers such as "33 39 56 84", or a range such as "0 to 100", which excludes 100; a
    range that ends before it begins is empty.

    Args:
        what: name of the list, for messages.

    Raises:
        UserError: if the text has neither form, repeats a number, or the range is too large.
    """
    bounds = re.fullmatch(r"\s*(\d{1,20})\s+to\s+(\d{1,20})\s*", text)
    if bounds:
        begin, end = int(bounds[1]), int(bounds[2])
        if end - begin > MAX_IDS or end >= 2**31:
            raise UserError(f"{what} must be a range of at most {MAX_IDS} numbers below 2^31, not "
                            f"'{text}'")
        return tuple(range(begin, end))
    words = text.split()
    if not words or not all(re.fullmatch(r"\d{1,20}", word) for word in words):
        raise UserError(f"{what} must be numbers, or a range such as 0 to 100, not "
                        f"'{shortened(text, 200)}'")
    numbers = tuple(map(int, words))
    if len(set(numbers)) < len(numbers):
        raise UserError(f"{what} names a number more than once: '{shortened(text, 200)}'")
    return numbers


@dataclasses.dataclass(frozen=True)
class CommonConfig:
    """Device to compute on, and folders that the stages share.

    Attributes:
        device: auto (a GPU if available), gpu or cpu.
        gpu_device: index of the GPU.
        data_dir: folder of recorded rollouts.
        log_dir_base: folder whose subfolder ``results`` contains the trained simulators.
        generated_data_dir: folder of simulated rollouts.
    """

    section: ClassVar[str] = ""

    device: str
    gpu_device: int
    data_dir: str
    log_dir_base: str
    generated_data_dir: str

    def __post_init__(self):
        one_of("device", self.device, ("auto", "gpu", "cpu"))


class _HasSection(Protocol):
    """A dataclass whose class variable names its section of the parameter set."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    section: ClassVar[str]


Section = TypeVar("Section", bound=_HasSection)


class ParameterSet:
    """A parameter set, with values that override it.

    Args:
        name: name of the parameter set.
        overrides: overriding values by dotted name, such as ``gen_model.lr``.

    Raises:
        UserError: if the set does not exist (the message suggests the most similar name), or the
            set or ``overrides`` has a key that ``defaults`` lacks.
    """

    def __init__(self, name: str, overrides: dict[str, object] | None = None):
        self.name = name
        self._given = frozenset(overrides or {})
        sets = read_yaml(INTERPRETING_CONFIG_FILE)
        file = INTERPRETING_CONFIG_FILE.name
        for needed in (BASE_SET, name):
            if needed not in sets:
                raise UserError(f"there is no parameter set '{needed}' in {file}"
                                f"{nearest(needed, sets)}")
        self._source = f"{file}, '{name}'"
        self._values = _merged(sets[BASE_SET], sets[name], self._source)
        for key, value in (overrides or {}).items():
            self._values = _merged(self._values, _nested(key, value), self._source)

    def get(self, cls: type[Section]) -> Section:
        """Build a dataclass from its section; keys of other dataclasses in the section are ignored.

        Raises:
            UserError: if the section or a key is missing, or a value is of the wrong type or out of
                range; the message names it.
        """
        values: Any = self._values
        source = self._source
        for part in filter(None, cls.section.split(".")):
            values, source = values.get(part), f"{source}, '{part}'"
            if not isinstance(values, dict):
                raise UserError(f"{source}: the section is missing")
        names = [field.name for field in dataclasses.fields(cls)]
        return typed(cls, {key: values[key] for key in names if key in values}, source)

    def is_given(self, cls: type[Section], name: str) -> bool:
        """Return whether a field of a section is overridden, such as by a flag."""
        return f"{cls.section}.{name}" in self._given

    @property
    def common(self) -> CommonConfig:
        return self.get(CommonConfig)

    @property
    def folders(self) -> AnalysisFolders:
        """Folders of the analyses."""
        return AnalysisFolders(Path(self.get(_SaveDir).save_dir))

    @property
    def nested(self) -> dict[str, Any]:
        """All values, as nested mappings."""
        return self._values

    def flattened(self, *prefixes: str) -> dict[str, object]:
        """Return the values whose dotted names start with one of the prefixes, by dotted name."""
        return {name: value for name, value in flattened(self._values).items()
                if name.startswith(prefixes)}

    def named(self, cls: type[Section]) -> dict[str, object]:
        """Return the field values of a section's dataclass, by dotted name."""
        return flattened(dataclasses.asdict(self.get(cls)), f"{cls.section}.")


@dataclasses.dataclass(frozen=True)
class _SaveDir:
    section: ClassVar[str] = "analysis"
    save_dir: str


def flattened(values: dict, prefix: str = "") -> dict[str, object]:
    """Flatten nested values to a mapping by dotted name; tuples become lists.

    Args:
        prefix: beginning of all names.
    """
    flat: dict[str, object] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        flat.update(flattened(value, f"{name}.") if isinstance(value, dict) else {
            name: list(value) if isinstance(value, tuple) else value})
    return flat


def _nested(key: str, value: object) -> dict:
    """Nest a value in mappings, one for each part of the dotted name ``key``."""
    first, *rest = key.split(".")
    return {first: _nested(".".join(rest), value) if rest else value}


def _merged(values: dict, changes: dict, source: str) -> dict:
    """Merge ``changes`` into a copy of ``values``, section by section.

    Args:
        source: name of the file with the changes, for messages.

    Raises:
        UserError: if ``changes`` is not a mapping or has a key that ``values`` lacks.
    """
    if not isinstance(changes, dict):
        raise UserError(f"{source} must hold a mapping of names to values")
    merged = dict(values)
    for key, value in changes.items():
        if key not in values:
            raise UserError(f"{source}: unknown key '{key}'{nearest(str(key), values)}")
        if isinstance(values[key], dict):
            value = _merged(values[key], value, f"{source}, '{key}'")
        merged[key] = value
    return merged

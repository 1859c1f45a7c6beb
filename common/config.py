"""Parameter sets of the agent: the one reader of ``hyperparams/procgen/config.yml``."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import typing
from collections.abc import Iterator
from pathlib import Path

import yaml

from common.errors import UserError, nearest
from common.files import MAX_REASON, check_nested, read_bytes

AGENT_CONFIG_FILE = Path(__file__).parent.parent / "hyperparams" / "procgen" / "config.yml"
_given: dict[Path, dict] = {}  # see yaml_given


@dataclasses.dataclass(frozen=True)
class AgentConfig:
    """One parameter set. The meaning and unit of each value is in the YAML beside it."""

    algo: str
    architecture: str
    recurrent: bool
    n_envs: int
    n_steps: int
    epoch: int
    mini_batch_per_epoch: int
    mini_batch_size: int
    gamma: float
    lmbda: float
    use_gae: bool
    learning_rate: float
    grad_clip_norm: float
    eps_clip: float
    value_coef: float
    entropy_coef: float
    normalize_adv: bool
    normalize_rew: bool
    hidden_state_size: int
    learned_initial_state: bool
    kickstart_coef: float = 3.0
    kickstart_until: float = 0.7
    kickstart_value_coef: float = 0.0

    def __post_init__(self):
        for name in ("n_envs", "n_steps", "epoch", "mini_batch_per_epoch", "mini_batch_size",
                     "learning_rate", "grad_clip_norm", "eps_clip", "hidden_state_size"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"{name} must be above 0, not {getattr(self, name)}")
        for name in ("kickstart_coef", "kickstart_value_coef"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"{name} must not be negative, not {getattr(self, name)}")
        for name in ("gamma", "lmbda", "kickstart_until"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"{name} must lie between 0 and 1, not {getattr(self, name)}")
        for name, choices in (("algo", ("ppo",)), ("architecture", ("impala", "nature"))):
            if getattr(self, name) not in choices:
                value = getattr(self, name)
                raise UserError(f"unknown {name} '{value}'{nearest(value, choices)}")
        units = self.n_envs if self.recurrent else self.n_envs * self.n_steps
        if units % self.mini_batch_per_epoch:
            what = "n_envs" if self.recurrent else "n_envs * n_steps"
            raise UserError(f"{what} ({units}) must be a multiple of "
                            f"mini_batch_per_epoch ({self.mini_batch_per_epoch})")


def check_seed(seed: int) -> None:
    """Refuse a seed that some generator in use does not take.

    Raises:
        UserError: saying which it takes.
    """
    if not 0 <= seed < 2**32:
        raise UserError(f"the seed must lie between 0 and {2**32 - 1}, not {seed}")


def typed(cls: type, values: dict, source: str):
    """Build the dataclass ``cls`` from a mapping, checking every key and type.

    A key whose field has a default may be missing: files of older runs lack it.

    Raises:
        UserError: naming the unknown, missing or wrongly typed key and where it stands.
    """
    types = typing.get_type_hints(cls)
    hints = {field.name: types[field.name] for field in dataclasses.fields(cls)}
    if not isinstance(values, dict):
        raise UserError(f"{source} must hold a mapping of names to values")
    for key in values:
        if key not in hints:
            raise UserError(f"{source}: unknown key '{key}'{nearest(str(key), hints)}")
    optional = {field.name for field in dataclasses.fields(cls)
                if field.default is not dataclasses.MISSING}
    checked = {}
    for key, kind in hints.items():
        if key not in values:
            if key in optional:
                continue
            raise UserError(f"{source}: the key '{key}' is missing")
        checked[key] = _of_type(values[key], kind, f"{source}: '{key}'")
    return cls(**checked)


def _of_type(value, kind, what: str):
    """``value`` if it is of the type ``kind``: a plain one, a dataclass, a union, or a tuple."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return value if isinstance(value, kind) else typed(kind, value, what)
    if type(None) in parts:  # X | None
        (kind,) = (part for part in parts if part is not type(None))
        return None if value is None else _of_type(value, kind, what)
    if origin is tuple:  # tuple[X, ...], a list in YAML
        if not isinstance(value, list | tuple):
            raise UserError(f"{what} must be a list, not {value!r}")
        return tuple(_of_type(item, parts[0], what) for item in value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not kind:
        raise UserError(f"{what} must be a {kind.__name__}, not {value!r}")
    return value


def read_yaml(path: Path) -> dict:
    """Read a YAML file whose top level is a mapping.

    Raises:
        UserError: if the file is missing, no YAML, no mapping of names, or nested too deep.
    """
    if (given := _given.get(path.resolve())) is not None:
        return copy.deepcopy(given)
    text = read_bytes(path)
    try:
        content = yaml.safe_load(text)
    except Exception as error:  # of its values, such as dates, it raises almost anything
        reason = " ".join(str(error).split())[:MAX_REASON]
        raise UserError(f"{path} is not valid YAML: {reason}") from None
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise UserError(f"{path} must hold a mapping of names to values")
    check_nested(content, path)
    return content


@contextlib.contextmanager
def yaml_given(contents: dict[Path, dict]) -> Iterator[None]:
    """Let ``read_yaml`` give these contents for these files, whatever becomes of them meanwhile."""
    given = {path.resolve(): content for path, content in contents.items()}
    _given.update(given)
    try:
        yield
    finally:
        for path in given:
            del _given[path]


def load_agent_config(param_name: str, path: Path = AGENT_CONFIG_FILE) -> AgentConfig:
    """Return the parameter set ``param_name``.

    Raises:
        UserError: if there is no such set (naming the nearest), or the file is wrong.
    """
    sets = {name: value for name, value in read_yaml(path).items() if not name.startswith("x-")}
    if param_name not in sets:
        raise UserError(f"there is no parameter set '{param_name}' in {path.name}"
                        f"{nearest(param_name, sets)}")
    return typed(AgentConfig, sets[param_name], f"{path.name}, '{param_name}'")

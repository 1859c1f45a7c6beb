"""Parameter sets of the agent: the one reader of ``hyperparams/procgen/config.yml``."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from agents.networks import ARCHITECTURES
from common.config import read_yaml, typed
from common.errors import UserError, nearest

AGENT_CONFIG_FILE = Path(__file__).parent.parent / "hyperparams" / "procgen" / "config.yml"


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
    width: int = 1

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
        for name, choices in (("algo", ("ppo",)), ("architecture", ARCHITECTURES)):
            if getattr(self, name) not in choices:
                value = getattr(self, name)
                raise UserError(f"unknown {name} '{value}'{nearest(value, choices)}")
        if self.width not in ((1, 4) if self.architecture == "impala" else (1,)):
            raise UserError("width must be 1, or 4 for impala, not "
                            f"{self.width} for {self.architecture}")
        units = self.n_envs if self.recurrent else self.n_envs * self.n_steps
        if units % self.mini_batch_per_epoch:
            what = "n_envs" if self.recurrent else "n_envs * n_steps"
            raise UserError(f"{what} ({units}) must be a multiple of "
                            f"mini_batch_per_epoch ({self.mini_batch_per_epoch})")


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

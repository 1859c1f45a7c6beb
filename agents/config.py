"""Agent configuration: parameter sets, and options for the game and its levels.

This is the only module that reads ``hyperparams/procgen/config.yml``.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agents.agent_file import read_origin, usual_training
from agents.networks import ARCHITECTURES
from common.cli import OnOff, whole
from common.config import read_yaml, typed
from common.errors import UserError, nearest
from common.options import Options, option
from common.parameters import one_of, positive
from envs.procgen_env import DISPLAY_OPTIONS, MAX_LEVEL, EnvConfig

AGENT_CONFIG_FILE = Path(__file__).parent.parent / "hyperparams" / "procgen" / "config.yml"
# Published defaults, used if neither a flag nor the agent file sets a value.
_UNTRAINED = {"env_name": "coinrun", "distribution_mode": "easy", "use_backgrounds": False}
# Phrases of messages.
_ASSUMED: dict[str, Callable[[Any], Any]] = {
    "env_name": "the game {}".format, "distribution_mode": "the mode {}".format,
    "use_backgrounds": {False: "no backgrounds", True: "backgrounds"}.get}

level_seed = whole(0, MAX_LEVEL)

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class AgentConfig:
    """Parameter set of an agent: architecture and hyperparameters of PPO.

    Attributes:
        algo: algorithm; always "ppo".
        architecture: embedder, one of ``ARCHITECTURES``.
        recurrent: whether the agent has a GRU.
        n_envs: number of environments.
        n_steps: steps per environment in a rollout.
        epoch: passes over a rollout per update.
        mini_batch_per_epoch: gradient steps per pass.
        mini_batch_size: maximum number of frames per micro-batch, which limits memory.
        gamma, lmbda: discount factor, and lambda of the advantage estimates.
        use_gae: whether ``lmbda`` is used; otherwise lambda is 1.
        learning_rate: initial learning rate of Adam, which falls linearly to 0.
        grad_clip_norm: maximum norm of the gradient.
        eps_clip: half width of the clip range of probability ratios and values.
        value_coef, entropy_coef: weights of the value loss and of the entropy.
        normalize_adv: normalise the advantages of a rollout to mean 0 and standard deviation 1.
        normalize_rew: normalise the rewards, see ``envs.rewards.RewardNormalizer``.
        hidden_state_size: size of the GRU's state, and of IMPALA embeddings that feed a GRU.
        learned_initial_state: whether the GRU's initial state is trained; otherwise it is 0.
        kickstart_coef, kickstart_value_coef: initial weights of the distillation loss and of the
            value distance to a teacher.
        kickstart_until: fraction of the run after which both weights are 0.
        width: factor by which the numbers of channels of the IMPALA blocks are multiplied, 1 or 4.

    Raises:
        UserError: if a value is out of range; the message names it.
    """

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
        positive(self, "n_envs", "n_steps", "epoch", "mini_batch_per_epoch", "mini_batch_size",
                 "learning_rate", "grad_clip_norm", "eps_clip", "hidden_state_size")
        one_of("algo", self.algo, ("ppo",))
        one_of("architecture", self.architecture, ARCHITECTURES)
        for name in ("kickstart_coef", "kickstart_value_coef"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"{name} must not be negative, not {getattr(self, name)}")
        for name in ("gamma", "lmbda", "kickstart_until"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"{name} must lie between 0 and 1, not {getattr(self, name)}")
        if self.width not in ((1, 4) if self.architecture == "impala" else (1,)):
            raise UserError("width must be 1, or 4 for impala, not "
                            f"{self.width} for {self.architecture}")
        units = self.n_envs if self.recurrent else self.n_envs * self.n_steps
        if units % self.mini_batch_per_epoch:
            raise UserError(f"{'n_envs' if self.recurrent else 'n_envs * n_steps'} is {units}, but "
                            "must be a multiple of mini_batch_per_epoch, "
                            f"{self.mini_batch_per_epoch}")


def load_agent_config(param_name: str, path: Path = AGENT_CONFIG_FILE) -> AgentConfig:
    """Read the parameter set ``param_name`` from a YAML file.

    Raises:
        UserError: if the file has no such set, or the file or the set is invalid.
    """
    sets = {name: value for name, value in read_yaml(path).items() if not name.startswith("x-")}
    if param_name not in sets:
        raise UserError(f"there is no parameter set '{param_name}' in {path.name}"
                        f"{nearest(param_name, sets)}")
    return typed(AgentConfig, sets[param_name], f"{path.name}, '{param_name}'")


def _as_trained(text: str, name: str) -> str:
    """Return the help of a flag whose default is that of the agent's training."""
    return f"{text} (default: as in the agent's training, or {_UNTRAINED[name]} if unknown)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GameOptions(Options):
    """Options for the game and its levels; see ``env_config`` for the defaults."""

    env_name: str | None = option(None, _as_trained("one of Procgen's 16 games", "env_name"))
    distribution_mode: str | None = option(None, _as_trained(
        "easy, hard, extreme, memory or exploration", "distribution_mode"))
    start_level: int = option(0, "seed of the first level", type=level_seed)
    num_levels: int = option(0, "number of consecutive level seeds; 0 for all seeds",
                             type=level_seed)
    use_backgrounds: bool | None = option(
        None, "draw the game's background images, or none, as for the published agents",
        names=("--use_backgrounds", "--no_backgrounds"), action=OnOff, nargs=0)
    restrict_themes: bool = option(False, "draw all levels in one theme")
    use_monochrome_assets: bool = option(False, "draw objects as rectangles of one colour")
    use_sequential_levels: bool = option(
        False, "continue with another level when a level is solved, until the agent fails")
    center_agent: bool = option(
        True, "show the whole level instead of the player's surroundings, where they differ")

    def env_config(self, agent_file: Path | None = None) -> EnvConfig:
        """Return the game and levels.

        Log a warning that names the values that neither the options nor the agent file determine.

        Args:
            agent_file: agent whose training provides the defaults. Without it, or if the options
                select another game, the defaults are coinrun, easy and no backgrounds.

        Raises:
            UserError: if there is no such game or mode, the range of levels is invalid, or the
                agent file is missing or damaged.
        """
        flags = {name: value for name in _UNTRAINED
                 if (value := getattr(self, name)) is not None}
        trained, defaults = {}, _UNTRAINED
        if agent_file is not None:
            trained = {name: value for name, value in vars(read_origin(agent_file)).items()
                       if name in _UNTRAINED and value is not None}
            why = f"{agent_file} does not say how the agent was trained"
            program, usual = usual_training(agent_file)
            defaults = {**_UNTRAINED, **usual}
            game = trained.get("env_name")
            if game and flags.get("env_name", game) != game:
                trained, why = {}, f"{agent_file} was trained in {game}"
            assumed = {name: value for name, value in defaults.items()
                       if name not in {**flags, **trained}}
            if assumed:
                where = f" (mode and backgrounds as is usual with {program})" if usual else ""
                logger.warning("%s, so this is assumed: %s%s; to choose, give %s", why, ", ".join(
                    _ASSUMED[name](value) for name, value in assumed.items()), where, " and ".join(
                        "--use_backgrounds or --no_backgrounds" if name == "use_backgrounds"
                        else f"--{name}" for name in assumed))
        return EnvConfig(**{**defaults, **trained, **flags}, start_level=self.start_level,
                         num_levels=self.num_levels,
                         **{name: getattr(self, name) for name in DISPLAY_OPTIONS})

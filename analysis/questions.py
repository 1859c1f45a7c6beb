"""Options that the studies of ``docs/questions.md`` share."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from agents.config import GameOptions
from agents.provenance import agent_sha256
from common.cli import environments, seed
from common.errors import UserError
from common.files import versions
from common.options import ComputeOptions, option
from envs.coin import GAME
from envs.procgen_env import EnvConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuestionOptions(GameOptions, ComputeOptions):
    """Options of a study that plays levels of CoinRun."""

    agent_file: Path = option(help="agent that plays", names=("--agent_file", "--model_file"))
    num_envs: int = option(64, "number of episodes played in parallel", type=environments)
    seed: int = option(0, "seed of levels, actions and bootstrap", type=seed)

    def check_game(self, config: EnvConfig) -> EnvConfig:
        """Return the game; raise UserError if it is not CoinRun."""
        if config.env_name != GAME:
            raise UserError(f"this study plays levels of {GAME}, not of {config.env_name}")
        return config

    def unseen_levels(self) -> EnvConfig:
        """Return the game, with the levels on which the agent was not trained.

        Raises:
            UserError: if the game is not CoinRun, or see ``env_config``.
        """
        return self.check_game(self.env_config(self.agent_file).unseen_levels())

    def settings(self, config: EnvConfig) -> dict[str, Any]:
        """Return the settings of the result folder that all of these studies store."""
        return {"agent_file": self.agent_file.name, "agent_sha256": agent_sha256(self.agent_file),
                "env": vars(config), "seed": self.seed, "precision": self.compute.precision,
                "versions": versions()}

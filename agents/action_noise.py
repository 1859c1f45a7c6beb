"""Flattening the recorded policy, so that the simulator sees varied data.

The one reader of ``hyperparams/action_noise.yml``.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from torch import Tensor

from common.config import read_yaml, typed
from common.errors import UserError
from common.game_constants import NUM_ACTIONS

ACTION_NOISE_FILE = Path(__file__).parent.parent / "hyperparams" / "action_noise.yml"
_OTHER_GAMES = "other_games"


@dataclasses.dataclass(frozen=True)
class ActionNoise:
    """Alterations of the logits before an action is drawn, in this order.

    Attributes:
        enabled: whether record.py does it unless told otherwise.
        scale: logits are multiplied by this,
        lowest, highest: then clamped to this interval; None: not on this side,
        fixed_logits: then these actions get these logits.
    """

    enabled: bool
    scale: float
    lowest: float | None
    highest: float | None
    fixed_logits: dict

    def __post_init__(self):
        if None not in (self.lowest, self.highest) and self.lowest > self.highest:
            raise UserError(f"{ACTION_NOISE_FILE.name}: lowest ({self.lowest}) is above highest "
                            f"({self.highest})")
        for action, logit in self.fixed_logits.items():
            if action not in range(NUM_ACTIONS) or not isinstance(logit, int | float):
                raise UserError(f"{ACTION_NOISE_FILE.name}: fixed_logits must map actions 0 to "
                                f"{NUM_ACTIONS - 1} to numbers, not {action!r} to {logit!r}")

    def __call__(self, logits: Tensor) -> Tensor:
        """Altered logits (N, A)."""
        logits = logits * self.scale
        if (self.lowest, self.highest) != (None, None):
            logits = logits.clamp(self.lowest, self.highest)
        actions = list(self.fixed_logits)
        logits[:, actions] = torch.tensor([float(self.fixed_logits[a]) for a in actions]).to(logits)
        return logits


def load_action_noise(env_name: str) -> ActionNoise:
    """Read the section of a game, or the one of all other games.

    Raises:
        UserError: if the file has neither, or a section is damaged.
    """
    path, sections = ACTION_NOISE_FILE, read_yaml(ACTION_NOISE_FILE)
    name = env_name if env_name in sections else _OTHER_GAMES
    if not isinstance(sections.get(name), dict):
        raise UserError(f"{path.name} has no section '{env_name}', nor '{_OTHER_GAMES}'")
    return typed(ActionNoise, sections[name], f"{path.name}, {name}")

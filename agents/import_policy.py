"""Write an agent file of this project from a file of another program, see ``ImportOptions``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import ClassVar

from agents.agent_file import AgentOrigin, load_agent, read_origin, save_agent, weights_sha256
from agents.config import GameOptions
from agents.networks import Policy
from agents.wrapping import WrappedPolicy
from common.cli import output_file, whole
from common.errors import UserError
from common.game_constants import NUM_ACTIONS
from common.options import LogOptions, OutputFileOptions, command, option


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImportOptions(GameOptions, OutputFileOptions, LogOptions):
    """Write an agent file of this project from a file of CleanRL, Stable-Baselines3 or
    train-procgen-pytorch, and state in it how the agent was trained."""

    hidden: ClassVar = ("start_level", "num_levels")

    agent_file: Path = option(help="file of the agent", names=("agent_file",))
    output: Path = option(help="agent file to write, such as model.pth", type=output_file)
    reward_scale: float | None = option(
        None, "factor that converts the game's rewards to those that the values predict")
    gamma: float | None = option(None, "discount factor of the training")
    lmbda: float | None = option(None, "lambda of the advantage estimates of the training")
    actions: tuple[int, ...] | None = option(
        None, "for an agent with a reduced action set: Procgen's action (0 to 14) of each output "
              "of its policy head", type=whole(0, NUM_ACTIONS - 1), metavar="ACTION")


def import_policy(options: ImportOptions) -> Policy:
    """Write the agent file, and return the agent."""
    if options.actions and len(set(options.actions)) < len(options.actions):
        raise UserError("--actions must name each action once")
    policy = load_agent(options.agent_file, actions=options.actions)
    if isinstance(policy, WrappedPolicy):
        raise UserError(f"{options.agent_file} is code, which agent files do not hold; give it as "
                        "--agent_file itself")
    options.check_output(lambda path: weights_sha256(load_agent(path)) == weights_sha256(policy))
    known = read_origin(options.agent_file)
    if options.env_name is None and known.env_name is None:
        raise UserError(f"{options.agent_file} does not name the game of the agent's training; "
                        "give --env_name")
    env = options.env_config(options.agent_file)
    numbers = {name: value for name in ("reward_scale", "gamma", "lmbda")
               if (value := getattr(options, name)) is not None}
    origin = dataclasses.replace(known, env_name=env.env_name, **numbers,
                                 distribution_mode=env.distribution_mode,
                                 use_backgrounds=env.use_backgrounds)
    save_agent(options.output, policy, origin=origin)
    print(f"wrote {options.output}: {_described(origin)}\nto measure it:\n"
          f"    python evaluate.py --agent_file {options.output}")
    return policy


def _described(origin: AgentOrigin) -> str:
    return ", ".join(f"{name} {'unknown' if value is None else value}" for name, value in {
        "game": origin.env_name, "mode": origin.distribution_mode,
        "backgrounds": "yes" if origin.use_backgrounds else "no",
        "reward scale": origin.reward_scale, "discount": origin.gamma}.items())


main = command(ImportOptions, import_policy)

if __name__ == "__main__":
    raise SystemExit(main())

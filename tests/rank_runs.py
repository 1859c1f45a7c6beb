"""Runs of train.py and train_gen_model.py that a test makes by one process and, through torchrun,
by several: of a smaller parameter set than those of the files.

    torchrun tests/rank_runs.py all FOLDER AGENT_FILE DATA_DIR
    torchrun tests/rank_runs.py agent|simulator FLAGS OF THE SCRIPT
"""

from __future__ import annotations

import sys
from pathlib import Path

from conftest import tiny_config

import train
import train_gen_model

UPDATES, BATCHES = 4, 6
STEPS_AN_UPDATE = 8 * 24


def agent_arguments(logdir: Path, teacher: Path) -> list[str]:
    """A teacher, validation, and an agent file of every update."""
    return ["--exp_name", "t", "--env_name", "fruitbot", "--param_name", "tiny", "--seed", "4",
            "--num_timesteps", str(UPDATES * STEPS_AN_UPDATE), "--val_interval", "3",
            "--num_checkpoints", str(UPDATES), "--teacher_file", str(teacher), "--precision",
            "float32", "--device", "cpu", "--num_threads", "1", "--logdir", str(logdir)]


def simulator_arguments(log_dir_base: Path, agent: Path, data: Path) -> list[str]:
    """Weights of rare colours, and a batch that two processes cannot share evenly."""
    return ["--agent_file", str(agent), "--data_dir", str(data), "--log_dir_base",
            str(log_dir_base), "--interpreting_params_name", "tiny", "--gen_mod_exp_name", "t",
            "--seed", "4", "--log_interval", "2", "--max_batches", str(BATCHES), "--batch_size",
            "3", "--image_rarity", "0.5", "--precision", "float32", "--device", "cpu"]


def train_agent(argv: list[str], recurrent: bool = True) -> int:
    """train.py with short rollouts, and steps that are small because Adam makes as much of the
    rounding of a gradient near 0 as of a gradient. Two processes have minibatches of a recurrent
    agent of which one has no environment."""
    of_file = train.load_agent_config
    train.load_agent_config = lambda name: tiny_config(
        architecture="nature", n_steps=24, learning_rate=1e-4, recurrent=recurrent)
    try:
        return train.main(argv)
    finally:
        train.load_agent_config = of_file


def make_all(folder: Path, agent: Path, data: Path) -> int:
    """Train a recurrent agent, a feed-forward one, and a simulator, in folders of these names."""
    return (train_agent(agent_arguments(folder / "recurrent", agent))
            or train_agent(agent_arguments(folder / "feed-forward", agent), recurrent=False)
            or train_gen_model.main(simulator_arguments(folder / "simulator", agent, data)))


if __name__ == "__main__":
    what, *words = sys.argv[1:]
    if what == "all":
        raise SystemExit(make_all(*map(Path, words)))
    raise SystemExit(train_agent(words) if what == "agent" else train_gen_model.main(words))

"""Runs of train.py and train_gen_model.py that a test makes by one process and, through torchrun,
by several: ``torchrun tests/rank_runs.py FOLDER AGENT_FILE DATA_DIR``."""

from __future__ import annotations

import sys
from pathlib import Path

from conftest import tiny_config

import train
import train_gen_model

STEPS_AN_UPDATE = 8 * 64
UPDATES = 4
BATCHES = 8


def agent_arguments(logdir: Path, teacher: Path) -> list[str]:
    """A recurrent agent with a teacher, validation, and a learned initial state."""
    return ["--exp_name", "t", "--env_name", "fruitbot", "--param_name", "tiny", "--seed", "4",
            "--num_timesteps", str(UPDATES * STEPS_AN_UPDATE), "--val_interval", "3",
            "--teacher_file", str(teacher), "--precision", "float32", "--device", "cpu",
            "--num_threads", "1", "--logdir", str(logdir)]


def simulator_arguments(log_dir_base: Path, agent: Path, data: Path) -> list[str]:
    """A simulator with weights of rare colours and a batch that two processes share unevenly."""
    return ["--agent_file", str(agent), "--data_dir", str(data), "--log_dir_base",
            str(log_dir_base), "--interpreting_params_name", "tiny", "--gen_mod_exp_name", "t",
            "--seed", "4", "--log_interval", "2", "--max_batches", str(BATCHES), "--batch_size",
            "5", "--image_rarity", "0.5", "--precision", "float32", "--device", "cpu"]


def make_all(folder: Path, agent: Path, data: Path) -> None:
    """Train a recurrent agent, a feed-forward one, and a simulator, in folders of these names."""
    assert train.main(agent_arguments(folder / "recurrent", agent)) == 0
    of_file = train.load_agent_config
    train.load_agent_config = lambda name: tiny_config(recurrent=False)
    assert train.main(agent_arguments(folder / "feed-forward", agent)) == 0
    train.load_agent_config = of_file
    assert train_gen_model.main(simulator_arguments(folder / "simulator", agent, data)) == 0


if __name__ == "__main__":
    make_all(*map(Path, sys.argv[1:]))

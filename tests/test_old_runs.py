"""Runs of an earlier version (commit 3fcd7cc) resume and give the numbers of that version.

The agent's run folder is complete except for its agent file and events. The simulator's checkpoint
has the weights of the golden numbers, and the other entries that the earlier version stored.
"""

import dataclasses
import gzip
import json
import shutil

import numpy as np
import pandas as pd
import torch
from conftest import FLOAT32, GOLDEN, golden_weight

from agents.run_folder import TrainSettings
from agents.training import RESUME_NAME, TrainingRun
from common.config import load_settings
from generative.runs import SimulatorRunSettings
from generative.training import SimulatorTraining

OLD = GOLDEN / "old_runs"


def assert_logs_agree(found, expected, steps: str, timings: list[str]):
    found, expected = (pd.read_csv(path).drop(columns=timings) for path in (found, expected))
    assert found[steps].tolist() == expected[steps].tolist()
    pd.testing.assert_frame_equal(found[list(expected)], expected, rtol=1e-3, atol=1e-5,
                                  check_dtype=False)


def test_an_agents_run_goes_on(tmp_path):
    for name in ("hyperparameters.yml", "log.csv"):
        shutil.copy(OLD / "agent" / name, tmp_path / name)
    with gzip.open(OLD / "agent" / "resume.pth.gz") as file:
        (tmp_path / RESUME_NAME).write_bytes(file.read())
    run = TrainingRun(tmp_path, load_settings(tmp_path, TrainSettings), FLOAT32)
    assert (run.steps, run.updates) == (128, 2)
    assert run.train() == 0
    assert_logs_agree(tmp_path / "log.csv", OLD / "agent" / "expected_log.csv", "timesteps",
                      ["wall_time"])


def test_a_simulators_run_goes_on(tmp_path):
    agent = tmp_path / "agent.pth"
    shapes = json.loads((OLD / "simulator" / "agent.json").read_text())
    torch.save({"model_state_dict": {key: golden_weight(key, shape)
                                     for key, shape in shapes.items()},
                "optimizer_state_dict": {}, "learned_initial_state": True}, agent)
    with gzip.open(OLD / "simulator" / "checkpoint.json.gz", "rt") as file:
        stored = json.load(file)
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("hyperparameters.yml", "progress.csv"):
        shutil.copy(OLD / "simulator" / name, folder / name)
    torch.save({
        "gen_model_state_dict": {key: golden_weight(key, shape)
                                 for key, shape in stored["weights"].items()},
        "optimizer_state_dict": {
            "state": {i: {"step": torch.tensor(4.0), "exp_avg": torch.zeros(shape),
                          "exp_avg_sq": torch.full(shape, 1e-4)}
                      for i, shape in enumerate(stored["moments"])},
            "param_groups": [stored["group"]]},
        "generator": torch.tensor(stored["generator"], dtype=torch.uint8),
        **{key: stored[key] for key in ("batches", "wall_time", "unlogged")}},
        folder / "model_epoch0_batch4.pt")
    settings = dataclasses.replace(
        load_settings(folder, SimulatorRunSettings), agent_file=str(agent),
        data_dir=str(GOLDEN / "dataset" / "data"), max_batches=8)
    run = SimulatorTraining(folder, settings, FLOAT32)
    assert run.steps == 4
    assert run.train() == 0
    assert_logs_agree(folder / "progress.csv", OLD / "simulator" / "expected_progress.csv",
                      "batches", ["wall_time", "frames_per_second", "waiting_for_data"])
    assert np.isfinite(pd.read_csv(folder / "progress.csv")["loss"]).all()

"""Training on several processes: the numbers of one, and how all of them stop."""

import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import ROOT
from rank_runs import make_all

from common.agent_file import agent_files
from generative.runs import checkpoints


def torchrun(script, *argv, num=2):
    """The command that runs a script of ours on ``num`` processes."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone",
            f"--nproc_per_node={num}", script, *map(str, argv)]


@pytest.fixture(scope="module")
def by_one(agent_path, recording, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    make_all(folder, agent_path, recording / "data")
    return folder


@pytest.fixture(scope="module")
def by_two(agent_path, recording, tmp_path_factory):
    """The same by two processes."""
    folder = tmp_path_factory.mktemp("two")
    subprocess.run(torchrun("tests/rank_runs.py", folder, agent_path, recording / "data"),
                   cwd=ROOT, check=True, timeout=300)
    return folder


def agent_run(folder):
    (run,) = (folder / "procgen" / "fruitbot" / "t").iterdir()
    return run


def simulator_run(folder):
    (run,) = (folder / "results" / "t").iterdir()
    return run


def test_x(by_one, by_two):
    for kind in ("recurrent", "feed-forward"):
        logs = [pd.read_csv(agent_run(folder / kind) / "log.csv") for folder in (by_one, by_two)]
        print((logs[1] - logs[0]).T.to_string())
        w = [torch.load(agent_files(agent_run(f / kind))[-1], weights_only=True)["model_state_dict"] for f in (by_one, by_two)]
        print({k: float((w[0][k] - w[1][k]).abs().max()) for k in w[0]})
    logs = [pd.read_csv(simulator_run(folder / "simulator") / "progress.csv") for folder in (by_one, by_two)]
    print(pd.concat([logs[0].T, (logs[1] - logs[0]).T],axis=1).to_string())

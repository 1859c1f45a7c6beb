"""Export of the attribution page: consistency of inputs, error messages, unit of rewards."""

import json
import shutil

import numpy as np
import pandas as pd
import pytest
from attribution_run import refused
from attribution_view import GAMMA, LAMBDA, MAP, UNITS
from conftest import tiny_config, tiny_policy

from agents.agent_file import AgentOrigin, load_agent, save_agent
from agents.run_folder import TrainSettings
from attribution import page_agent
from attribution.page import read_labels
from attribution.page_agent import AttributedAgent
from attribution.results import ACTIVATIONS, read_features
from attribution.trajectories import AdvantageSettings, estimated_scale, find_advantage_settings
from common.config import save_settings
from common.errors import UserError
from envs.procgen_env import EnvConfig


@pytest.fixture(scope="module")
def run(attribution_export):
    return attribution_export.run


@pytest.fixture(scope="module")
def foreign(run, tmp_path_factory):
    """Files that do not belong to the run, by the flags of attribution.page."""
    path = tmp_path_factory.mktemp("foreign")
    save_agent(path / "agent_file", tiny_policy(seed=1))
    for flag, source in (("data_dir", run.recording.path),
                         ("attribution_dir", run.attributions.path),
                         ("features_dir", run.folder / "features")):
        shutil.copytree(source, path / flag)
    index = path / "data_dir" / "idx_to_episode.csv"
    shutil.rmtree(path / "data_dir" / "episode_00005")
    index.write_text("".join(line for line in index.open() if not line.endswith(",5\n")))
    directions = path / "features_dir" / MAP / "directions.npy"
    np.save(directions, np.load(directions)[::-1])
    (path / "attribution_dir" / MAP / "value" / "trajectory_00001.npz").write_bytes(b"x")
    return path


@pytest.mark.parametrize(("flag", "words"), [
    ("agent_file", "was recorded with an agent other than"),
    ("data_dir", "belong to another recording: its checksum is"),
    ("features_dir", f"to the layer '{MAP}' belong to features with the checksum"),
    ("attribution_dir", "trajectory_00001.npz"),
    ("exp_name", "page holds other data")])
def test_what_does_not_belong_together_is_refused(flag, words, run, foreign, tmp_path, capsys):
    if flag == "exp_name":  # any name; the output folder holds a foreign file
        (tmp_path / "page").mkdir()
        (tmp_path / "page" / "notes.txt").write_text("mine")
    assert words in refused(run, tmp_path / "page", capsys, f"--{flag}", str(foreign / flag))


def test_activations_are_of_the_layers_that_were_asked_for_or_of_small_ones(run, monkeypatch):
    def shown(activations):
        agent = AttributedAgent(run.agent, run.recording.path, run.attributions.path,
                                run.folder / "features", run.folder / "objects", activations)
        return [layer for layer in agent.layers if ACTIVATIONS in agent.outputs_at(layer)]

    assert (shown(None), shown([MAP]), shown([])) == ([MAP, UNITS], [MAP], [])
    with pytest.raises(UserError, match=r"'block4', which .* \(did you mean 'block3'\?\)"):
        shown(["block4"])
    monkeypatch.setattr(page_agent, "MAX_CELLS", 63)  # block3 has 64 cells
    assert shown(None) == [UNITS]


@pytest.mark.parametrize(("labels", "words"), [
    ({"block4": {"1": "x"}}, r"a layer 'block4', which is not shown \(did you mean 'block3'\?\)"),
    ({MAP: {"6": "x"}}, "a name for feature '6' of block3, whose features are numbered 1 to 5"),
    ({MAP: {"1": "x" * 61}}, "not a text of at most 60 characters"),
    ([1], "holds no names of features")])
def test_names_of_what_is_not_there_are_refused(labels, words, run, tmp_path):
    (tmp_path / "labels.json").write_text(json.dumps(labels))
    with pytest.raises(UserError, match=words):
        read_labels(tmp_path / "labels.json", {MAP: read_features(run.folder / "features", MAP)})


def test_rewards_have_the_unit_that_is_known(run, tmp_path):
    """The unit is that of the agent file, of its training run, or an estimate."""
    rows = pd.concat([run.recording.steps(number) for number in range(6)])
    agent = load_agent(run.agent)
    save_agent(tmp_path / "model_1.pth", agent, origin=AgentOrigin(2.0, gamma=0.9, lmbda=0.8))
    files = [tmp_path / "model_1.pth", run.agent]
    for number, config in enumerate((tiny_config(gamma=0.5), tiny_config(normalize_rew=False))):
        files.append(tmp_path / str(number) / "model_1.pth")
        files[-1].parent.mkdir()
        save_agent(files[-1], agent)
        save_settings(files[-1].parent, TrainSettings(
            "t", "tiny", EnvConfig("fruitbot", "easy"), config, 0, 64, 1, 1, "", "float32", 2))
    for file, scale, expected in (
            (files[0], "auto", (2.0, 0.9, 0.8)), (files[0], "raw", (1.0, 0.9, 0.8)),
            (files[0], 3.0, (3.0, 0.9, 0.8)),
            (files[1], "auto", (estimated_scale(rows), GAMMA, LAMBDA)),
            (files[2], "auto", (estimated_scale(rows, 0.5), 0.5, LAMBDA))):
        assert find_advantage_settings(file, scale, rows) == AdvantageSettings(*expected)
    assert find_advantage_settings(files[3], "auto", rows).reward_scale == 1

"""The export of the attribution page: what belongs together, refusals, the unit of rewards."""

import json
import shutil

import numpy as np
import pandas as pd
import pytest
from attribution_run import (
    exported,
)
from attribution_view import (
    GAMMA,
    LAMBDA,
    MAP,
    UNITS,
)
from conftest import tiny_config, tiny_policy
from page_data import read_script
from page_exports import HOSTILE_NAME as NAME

from agents.agent_file import AgentOrigin, load_agent, save_agent
from agents.run_folder import TrainSettings
from attribution import page as attribution_page
from attribution import page_contents
from attribution.advantages import (
    AdvantageSettings,
    estimated_scale,
    find_advantage_settings,
)
from attribution.page_files import AttributionPageFolder
from common.config import save_settings
from envs.procgen_env import EnvConfig


@pytest.fixture(scope="module")
def run(attribution_export):
    return attribution_export.run


@pytest.fixture(scope="module")
def folder(attribution_export):
    return AttributionPageFolder(attribution_export.page_file.parent)


def refused(run, output, capsys, *more, **changed):
    """The sentence with which attribution.page refuses; nothing may be left of its output."""
    argv = run.arguments(output, *more)
    for flag, value in changed.items():
        argv[argv.index(f"--{flag}") + 1] = str(value)
    before = sorted(output.rglob("*")) if output.exists() else None
    assert attribution_page.main(argv) == 2
    assert (sorted(output.rglob("*")) if output.exists() else None) == before
    assert not list(output.parent.glob(".*partial*"))
    return capsys.readouterr().err.strip().splitlines()[-1]


def test_what_does_not_belong_together_is_refused_with_its_checksums(run, tmp_path, capsys):
    output = tmp_path / "page"
    other = tmp_path / "model_1.pth"
    save_agent(other, tiny_policy(seed=1))
    assert "was recorded with another agent than" in refused(
        run, output, capsys, agent_file=other)
    shutil.copytree(run.recording.path, tmp_path / "data")
    index = tmp_path / "data" / "idx_to_episode.csv"
    shutil.rmtree(tmp_path / "data" / "episode_00005")
    index.write_text("".join(line for line in index.open() if not line.endswith(",5\n")))
    assert "are of another recording: its checksum is" in refused(
        run, output, capsys, data_dir=tmp_path / "data")
    shutil.copytree(run.folder / "features", tmp_path / "features")
    directions = tmp_path / "features" / MAP / "directions.npy"
    np.save(directions, np.load(directions)[::-1])
    message = refused(run, output, capsys, features_dir=tmp_path / "features")
    assert f"to the layer '{MAP}' are of features with the checksum" in message
    assert "which python -m attribution.attribute writes" in refused(
        run, output, capsys, attribution_dir=tmp_path)
    shutil.copytree(run.attributions.path, tmp_path / "attribution")
    (tmp_path / "attribution" / MAP / "value" / "trajectory_00001.npz").write_bytes(b"x")
    assert "trajectory_00001.npz" in refused(
        run, output, capsys, attribution_dir=tmp_path / "attribution")


def shown_activations(folder):
    """Names of the layers whose activations a page has."""
    manifest = read_script(folder.data_file("manifest"))
    kinds = [output["kind"] for output in manifest["outputs"]]
    return [layer["name"] for layer in manifest["layers"]
            if "activation" in [kinds[output] for output in layer["outputs"]]]


def test_activations_are_of_the_layers_that_were_asked_for_or_of_small_ones(
        run, folder, tmp_path, capsys, monkeypatch):
    assert shown_activations(folder) == [MAP, UNITS]
    assert shown_activations(exported(run, tmp_path / "one", "--activations", MAP)) == [MAP]
    assert shown_activations(exported(run, tmp_path / "none", "--activations")) == []
    assert "a layer 'block4' whose activations could be shown (did you mean 'block3'?)" in refused(
        run, tmp_path / "page", capsys, "--activations", "block4")
    monkeypatch.setattr(page_contents, "MAX_CELLS", 63)  # of block3's 64
    assert shown_activations(exported(run, tmp_path / "small")) == [UNITS]


@pytest.mark.parametrize(("labels", "words"), [
    ({"block4": {"1": "x"}}, "a layer 'block4', which is not shown (did you mean 'block3'?)"),
    ({MAP: {"6": "x"}}, "a name for feature '6' of block3, whose features are numbered 1 to 5"),
    ({MAP: {"0": "x"}}, "feature '0'"), ({MAP: {"1": 3}}, "no text of at most 60 letters"),
    ({MAP: {"1": "x" * 61}}, "no text of at most 60 letters"), ([1], "holds no names of features")])
def test_names_of_what_is_not_there_are_refused(labels, words, run, tmp_path, capsys):
    (tmp_path / "labels.json").write_text(json.dumps(labels))
    assert words in refused(run, tmp_path / "page", capsys, "--labels",
                            str(tmp_path / "labels.json"))


def test_a_folder_of_something_else_is_left_alone(run, tmp_path, capsys):
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / "notes.txt").write_text("mine")
    assert "page holds other data" in refused(run, tmp_path / "page", capsys)
    with pytest.raises(SystemExit):
        attribution_page.main(run.arguments(tmp_path / "x", "--reward_scale", "-1"))
    assert "must be auto, raw or a number above 0, not '-1'" in capsys.readouterr().err


def test_the_same_command_gives_the_same_files(run, folder, tmp_path):
    labels = str(run.folder / "labels.json")
    again = exported(run, tmp_path / "page", "--reward_scale", "0.5", "--labels", labels,
                     "--exp_name", NAME)
    names = sorted(path.relative_to(folder.path) for path in folder.path.rglob("*")
                   if path.is_file())
    assert len(names) > 15
    for name in names:
        assert (again.path / name).read_bytes() == (folder.path / name).read_bytes(), name
    exported(run, tmp_path / "page")  # and takes the place of an earlier one
    assert read_script(again.data_file("manifest"))["experiment"] == "Attribution"


def test_rewards_have_the_unit_that_is_known(run, tmp_path):
    """Of the agent file, of its training run, or as training scales them."""
    rows = pd.concat([run.recording.steps(number) for number in range(6)])
    agent = load_agent(run.agent)
    save_agent(tmp_path / "model_1.pth", agent, origin=AgentOrigin(2.0, gamma=0.9, lmbda=0.8))
    assert find_advantage_settings(tmp_path / "model_1.pth", "auto", rows) == AdvantageSettings(2.0,
                                                                                                0.9,
                                                                                                0.8)
    assert find_advantage_settings(tmp_path / "model_1.pth", "raw", rows) == AdvantageSettings(1.0,
                                                                                               0.9,
                                                                                               0.8)
    assert find_advantage_settings(tmp_path / "model_1.pth", 3.0, rows).reward_scale == 3
    assert find_advantage_settings(run.agent, "auto",
                                   rows) == AdvantageSettings(estimated_scale(rows), GAMMA, LAMBDA)
    for number, config in enumerate((tiny_config(gamma=0.5), tiny_config(normalize_rew=False))):
        folder = tmp_path / str(number)
        folder.mkdir()
        save_agent(folder / "model_1.pth", agent)
        save_settings(folder, TrainSettings("t", "tiny", EnvConfig("fruitbot", "easy"), config, 0,
                                            64, 1, 1, "", "float32", 2))
    assert find_advantage_settings(tmp_path / "0" / "model_1.pth", "auto",
                                   rows) == AdvantageSettings(
        estimated_scale(rows, 0.5), 0.5, LAMBDA)
    assert find_advantage_settings(tmp_path / "1" / "model_1.pth", "auto", rows).reward_scale == 1

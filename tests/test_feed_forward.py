"""The whole experiment with an agent without memory, in a game that is not CoinRun."""

import re

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import record_arguments, tiny_policy

import compare_interventions
import loss_over_time_experiment
import plot_value_and_action_weights
import record
import record_gen_samples
import saliency_experiments
import train_gen_model
from agents.agent_file import load_agent, save_agent
from agents.rollout_files import RolloutFolder
from analysis import hidden_analysis_plotting, hidden_analysis_precompute
from generative.runs import checkpoints, run_of
from generative.saliency.files import SaliencyFolder
from generative.sample_files import SampleFolder
from interventions.comparison import comparison_store, divergence, read_runs
from interventions.hidden_states_folder import hidden_state_results
from interventions.projector import Projector

NUM_EPISODES, NUM_SAMPLES, UNITS = 12, 6, 256
DEAD = [3, 200]  # units that a ReLU never lets through
COMMON = 2  # the step whose value is taken, set `tiny`


@pytest.fixture(scope="module")
def agent(tmp_path_factory):
    path = tmp_path_factory.mktemp("agent") / "model_0.pth"
    policy = tiny_policy(recurrent=False)
    with torch.no_grad():
        policy.embedder.fc.bias[DEAD] = -1e6
    save_agent(path, policy, {})
    return path


@pytest.fixture(scope="module")
def rollouts(agent, tmp_path_factory):
    logdir = tmp_path_factory.mktemp("rollouts")
    assert record.main(record_arguments(agent, logdir, NUM_EPISODES, "--env_name", "bigfish",
                                        "--no_videos")) == 0
    return logdir / "data"


@pytest.fixture(scope="module")
def flags(agent):
    return ["--agent_file", str(agent), "--interpreting_params_name", "tiny", "--device", "cpu",
            "--precision", "float32"]


@pytest.fixture(scope="module")
def simulator(flags, rollouts, tmp_path_factory):
    root = tmp_path_factory.mktemp("simulator")
    assert train_gen_model.main([*flags, "--data_dir", str(rollouts), "--log_dir_base", str(root),
                                 "--gen_mod_exp_name", "t", "--max_batches", "3"]) == 0
    (run,) = (root / "results" / "t").iterdir()
    return checkpoints(run)[-1]


@pytest.fixture(scope="module")
def samples(flags, simulator, rollouts, tmp_path_factory):
    root = tmp_path_factory.mktemp("samples")
    assert record_gen_samples.main([*flags, "--model_file", str(simulator), "--data_dir",
                                    str(rollouts), "--data_save_dir", str(root), "--num_samples",
                                    str(NUM_SAMPLES), "--no_videos"]) == 0
    return root


def states_flags(rollouts, precomputed):
    return ["--interpreting_params_name", "tiny", "--data_dir", str(rollouts), "--precomp_dir",
            str(precomputed)]


@pytest.fixture(scope="module")
def precomputed(rollouts, samples, tmp_path_factory):
    folder = tmp_path_factory.mktemp("analysis") / "hx_analysis_precomp"
    assert hidden_analysis_precompute.main([*states_flags(rollouts, folder),
                                            "--generated_data_dir", str(samples)]) == 0
    return folder


@torch.no_grad()
def test_recorded_states_are_those_that_the_values_are_read_off(rollouts, agent):
    policy, folder = load_agent(agent), RolloutFolder(rollouts)
    for number in range(NUM_EPISODES):
        episode = folder.episode(number)
        states = torch.from_numpy(np.array(episode.hidden_states))
        assert states.shape == (len(episode.steps) + 1, UNITS) and not states[0].any()
        assert states[1:-1].any(dim=1).all()  # the last frame is black
        np.testing.assert_allclose(policy.fc_value(states[1:]).squeeze(-1),
                                   episode.steps["value"], atol=1e-5)


def test_the_simulator_and_its_samples_have_the_agents_states(simulator, samples, agent):
    assert run_of(simulator).simulator.agent_hidden_size == UNITS
    arrays = SampleFolder(samples / "informed_init").stacked()
    assert arrays.hidden_states.shape == (NUM_SAMPLES, 4, UNITS)
    assert (arrays.hidden_states >= 0).all() and not arrays.hidden_states[..., DEAD].any()


def test_recordings_of_an_agent_of_another_size_are_refused(flags, simulator, recording, tmp_path,
                                                            capsys):
    argv = [*flags, "--data_dir", str(recording / "data"), "--log_dir_base", str(tmp_path / "new")]
    loss = [*argv, "--model_file", str(simulator), "--output_dir", str(tmp_path / "loss")]
    for main, arguments in ((train_gen_model.main, argv), (loss_over_time_experiment.main, loss)):
        assert main(arguments) == 2
        assert re.search("have 64 units, but those of the agent have 256; record this agent",
                         capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


def test_dead_units_leave_usable_directions(precomputed, rollouts, tmp_path):
    projector = Projector.load(precomputed, NUM_EPISODES)
    assert (projector.std[DEAD] == 1).all()
    folder = hidden_state_results(precomputed, NUM_EPISODES, NUM_SAMPLES)
    assert set(DEAD) <= set(folder.settings()["steps"]["scale"]["constant_units"])
    for kind in ("pca", "ica"):
        directions = projector.directions(kind)
        assert torch.isfinite(directions).all()
        assert directions[:4, DEAD].abs().max() < 1e-4 * directions[:4].abs().max()
    plots = tmp_path / "plots"
    assert hidden_analysis_plotting.main([*states_flags(rollouts, precomputed), "--output_dir",
                                          str(plots)]) == 0
    assert len(list(plots.rglob("*.png"))) > 3


def test_loss_over_time_is_measured(flags, simulator, rollouts, tmp_path):
    assert loss_over_time_experiment.main([*flags, "--model_file", str(simulator), "--data_dir",
                                           str(rollouts), "--output_dir",
                                           str(tmp_path / "out")]) == 0
    (table,) = (tmp_path / "out").glob("*.csv")
    found = pd.read_csv(table)
    assert np.isfinite(found[["mean", "low_95", "high_95"]]).all(axis=None)
    of_windows = found[~found["kind"].isin(("value_correlation", "psnr_of_mean_error"))]
    assert np.isfinite(of_windows["standard_deviation"]).all()


def test_saliency_reaches_the_state_that_is_read_and_the_environment(flags, simulator, samples,
                                                                     precomputed, agent, tmp_path,
                                                                     monkeypatch):
    monkeypatch.chdir(tmp_path)  # where pictures of the demonstration go
    argv = [*flags, "--model_file", str(simulator), "--generated_data_dir", str(samples),
            "--precomputed_analysis_data_path", str(precomputed), "--no_videos"]
    assert saliency_experiments.main([*argv, "--saliency_func_type", "value", "hx_direction"]) == 0
    folder = SaliencyFolder(samples / "informed_init")
    weight = load_agent(agent).fc_value.weight[0].detach().numpy()
    for number in range(NUM_SAMPLES):
        gradient = folder.saliency(number, "value").hidden_states
        # Of the value's mean over the sample's three copies, so divided by 3.
        np.testing.assert_allclose(gradient[COMMON], weight / 3, rtol=1e-3, atol=1e-6)
        assert gradient[:COMMON].any()  # through the action and the environment


def test_a_swapped_direction_stays_where_it_was(agent, precomputed, tmp_path):
    argv = record_arguments(
        agent, tmp_path, 2, "--env_name", "bigfish", "--no_videos", "--interpreting_params_name",
        "tiny", "--precomputed_analysis_data_path", str(precomputed), "--swap_directions_from", "1",
        "--swap_directions_to", "None")
    assert record.main(argv) == 0
    projector = Projector.load(precomputed, NUM_EPISODES)
    for number in range(2):
        states = torch.from_numpy(np.array(
            RolloutFolder(tmp_path / "data").episode(number).hidden_states))
        coordinates = projector.coordinates(states, "ica")
        assert coordinates[:, 1].std() < 1e-3 < 0.1 < coordinates[:, 0].std()


def test_interventions_and_read_out_weights(flags, agent, precomputed, tmp_path):
    common = [*flags, "--precomputed_analysis_data_path", str(precomputed)]
    assert compare_interventions.main([
        *common, "--env_name", "bigfish", "--num_episodes", "10", "--num_controls", "2",
        "--directions", "0", "--output_dir", str(tmp_path / "effects")]) == 0
    folder = comparison_store(tmp_path / "effects")
    assert divergence(read_runs(folder, "unaltered"), read_runs(folder, "ic_0_to_None"))[0].any()
    assert plot_value_and_action_weights.main([
        *common[:4], *common[8:], "--output_dir", str(tmp_path / "weights")]) == 0
    assert len(list((tmp_path / "weights").glob("*.png"))) == 3

"""The whole experiment with an agent without memory, in a game that is not CoinRun."""


import numpy as np
import pytest
import torch
from conftest import record_arguments, tiny_policy

import record
import record_gen_samples
import saliency_experiments
import train_gen_model
from agents.agent_file import load_agent, save_agent
from agents.rollout_files import RolloutFolder
from analysis import hidden_analysis_precompute
from generative.runs import checkpoints, run_of
from generative.saliency.files import SaliencyFolder
from generative.sample_files import SampleFolder
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


def test_dead_units_leave_usable_directions(precomputed):
    projector = Projector.load(precomputed, NUM_EPISODES)
    assert (projector.std[DEAD] == 1).all()
    folder = hidden_state_results(precomputed, NUM_EPISODES, NUM_SAMPLES)
    assert set(DEAD) <= set(folder.settings()["steps"]["scale"]["constant_units"])
    for kind in ("pca", "ica"):
        directions = projector.directions(kind)
        assert torch.isfinite(directions).all()
        assert directions[:4, DEAD].abs().max() < 1e-4 * directions[:4].abs().max()


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

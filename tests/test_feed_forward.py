"""The whole experiment with a feed-forward agent in a game other than CoinRun."""

from types import SimpleNamespace

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

pytestmark = pytest.mark.slow

NUM_EPISODES, NUM_SAMPLES, UNITS = 12, 6, 256
DEAD = [3, 200]  # units whose ReLU is always 0
COMMON = 2  # step whose value is differentiated in the set `tiny`


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    """Files and folders of an experiment, from its agent to the analysis of the agent's states."""
    root = tmp_path_factory.mktemp("experiment")
    agent, data = root / "model_0.pth", root / "data"
    policy = tiny_policy(recurrent=False)
    with torch.no_grad():
        policy.embedder.fc.bias[DEAD] = -1e6
    save_agent(agent, policy, {})
    assert record.main(record_arguments(agent, root, NUM_EPISODES, "--env_name", "bigfish",
                                        "--no_videos")) == 0
    flags = ["--agent_file", str(agent), "--interpreting_params_name", "tiny", "--device", "cpu",
             "--precision", "float32"]
    assert train_gen_model.main([*flags, "--data_dir", str(data), "--log_dir_base", str(root),
                                 "--gen_mod_exp_name", "t", "--max_batches", "3"]) == 0
    (run,) = (root / "results" / "t").iterdir()
    flags += ["--model_file", str(checkpoints(run)[-1])]
    assert record_gen_samples.main([*flags, "--data_dir", str(data), "--data_save_dir", str(root),
                                    "--num_samples", str(NUM_SAMPLES), "--no_videos"]) == 0
    precomputed = root / "hx_analysis_precomp"
    assert hidden_analysis_precompute.main([
        "--interpreting_params_name", "tiny", "--data_dir", str(data), "--precomp_dir",
        str(precomputed), "--generated_data_dir", str(root)]) == 0
    return SimpleNamespace(agent=agent, data=data, simulator=checkpoints(run)[-1], flags=flags,
                           samples=root / "informed_init", precomputed=precomputed)


@torch.no_grad()
def test_recorded_states_are_those_that_the_values_are_read_off(experiment):
    policy, folder = load_agent(experiment.agent), RolloutFolder(experiment.data)
    for number in range(NUM_EPISODES):
        episode = folder.episode(number)
        states = torch.from_numpy(np.array(episode.hidden_states))
        assert states.shape == (len(episode.steps) + 1, UNITS) and not states[0].any()
        assert states[1:-1].any(dim=1).all()  # the last frame is black
        np.testing.assert_allclose(policy.fc_value(states[1:]).squeeze(-1),
                                   episode.steps["value"], atol=1e-5)


def test_the_simulator_and_its_samples_have_the_agents_states(experiment):
    assert run_of(experiment.simulator).simulator.agent_hidden_size == UNITS
    arrays = SampleFolder(experiment.samples).stacked()
    assert arrays.hidden_states.shape == (NUM_SAMPLES, 4, UNITS)
    assert (arrays.hidden_states >= 0).all() and not arrays.hidden_states[..., DEAD].any()


def test_dead_units_leave_usable_directions(experiment):
    projector = Projector.load(experiment.precomputed, NUM_EPISODES)
    assert (projector.std[DEAD] == 1).all()
    folder = hidden_state_results(experiment.precomputed, NUM_EPISODES, NUM_SAMPLES)
    assert set(DEAD) <= set(folder.settings()["steps"]["scale"]["constant_units"])
    for kind in ("pca", "ica"):
        directions = projector.directions(kind)
        assert torch.isfinite(directions).all()
        assert directions[:4, DEAD].abs().max() < 1e-4 * directions[:4].abs().max()


def test_saliency_reaches_the_state_that_is_read_and_the_environment(experiment, tmp_path,
                                                                     monkeypatch):
    monkeypatch.chdir(tmp_path)  # output of the difference demonstration
    assert saliency_experiments.main([
        *experiment.flags, "--generated_data_dir", str(experiment.samples.parent),
        "--precomputed_analysis_data_path", str(experiment.precomputed), "--no_videos",
        "--saliency_func_type", "value", "hx_direction"]) == 0
    folder = SaliencyFolder(experiment.samples)
    weight = load_agent(experiment.agent).fc_value.weight[0].detach().numpy()
    for number in range(NUM_SAMPLES):
        gradient = folder.saliency(number, "value").hidden_states
        # The gradient is that of the mean over three copies of the sample, hence the division by 3.
        np.testing.assert_allclose(gradient[COMMON], weight / 3, rtol=1e-3, atol=1e-6)
        assert gradient[:COMMON].any()  # through the action and the environment

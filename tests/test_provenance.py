"""Digests of agents and recordings, which the scripts compare."""

import os
import shutil

import numpy as np
import pytest
import torch
from conftest import ROOT, record_arguments, tiny_policy, write_recording

import compare_interventions
import loss_over_time_experiment
import plot_value_and_action_weights
import record
import record_gen_samples
import train_gen_model
from agents.agent_file import save_agent
from agents.provenance import agent_digests, agent_sha256
from agents.rollout_files import RolloutFolder
from analysis import hidden_analysis_precompute, steering_vectors
from common.files import save_json, sha256


@pytest.fixture(scope="module")
def other_agent(tmp_path_factory):
    """An agent with the architecture of the agent of ``agent_path``, and other weights."""
    path = tmp_path_factory.mktemp("other") / "model_1.pth"
    save_agent(path, tiny_policy(1), {})
    return path


def damage(path, old_times):
    """Change the last byte of a file; `old_times` restores its modification time."""
    before = path.stat()
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    if old_times:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_the_digest_of_an_agent_is_that_of_its_weights(agent_path, other_agent, tmp_path):
    content = torch.load(agent_path, weights_only=True)
    torch.save({**content, "gamma": 0.5}, tmp_path / "again.pth")
    assert (tmp_path / "again.pth").read_bytes() != agent_path.read_bytes()
    assert agent_sha256(tmp_path / "again.pth") == agent_sha256(agent_path)
    assert not agent_digests(agent_path) & agent_digests(other_agent)
    torch.save({**content, "earlier_sha256": [agent_sha256(other_agent)]}, tmp_path / "again.pth")
    assert not agent_digests(tmp_path / "again.pth") & agent_digests(other_agent)


def test_earlier_files_of_shipped_agents_are_known():
    for name in ("coinrun_hard", "maze_anywhere", "maze_confined"):
        path = ROOT / "pretrained" / name / "model.pth"
        listed = torch.load(path, weights_only=True)["earlier_sha256"]
        assert listed and agent_digests(path) == {agent_sha256(path), sha256(path), *listed}


@pytest.mark.parametrize("name", ["ob.npy", "hx.npy", "lp.npy", "steps"])
def test_a_changed_episode_changes_the_digest_of_a_recording(recording, tmp_path, caplog, name):
    folder = RolloutFolder(shutil.copytree(recording / "data", tmp_path / "data"))
    path = folder.steps_file(3) if name == "steps" else folder.episode_folder(3) / name
    digest = folder.sha256()
    assert digest == folder.sha256(check_contents=True) and not caplog.text

    damage(path, old_times=True)
    assert folder.sha256() == digest  # size and time are unchanged, so the file is not read
    changed = folder.sha256(check_contents=True)
    assert changed != digest and "episode 3 changed" in caplog.text
    path.touch()
    assert folder.sha256() == changed


def test_a_recording_without_digests_is_read_with_a_warning(recording, tmp_path, caplog):
    folder = RolloutFolder(shutil.copytree(recording / "data", tmp_path / "data"))
    save_json(folder.description_file, folder.description())
    assert len(folder.sha256()) == 64 and "no digests" in caplog.text


def commands(agent, recording, matrices, simulator, folder):
    """Return commands that combine an agent with data, directions or a simulator."""
    tiny = ["--agent_file", str(agent), "--interpreting_params_name", "tiny"]
    on_cpu = ["--device", "cpu", "--precision", "float32"]
    data = ["--data_dir", str(recording / "data")]
    train = [*tiny, *on_cpu, "--max_batches", "1", "--batch_size", "4", "--num_sim_steps", "4",
             "--log_dir_base", str(folder)]
    found = ["--precomp_dir", str(matrices)]
    alone = folder / "published.pt"  # does not name its agent
    shutil.copy(simulator, alone)
    write_recording(folder / "published", [12, 9])  # does not name its agent
    return {
        "train on a recording": (train_gen_model, [*train, *data]),
        "train from a simulator": (train_gen_model, [
            *train, "--data_dir", str(folder / "published"), "--model_file", str(simulator)]),
        "sample": (record_gen_samples, [
            *tiny, *on_cpu, *data, "--model_file", str(alone), "--num_samples", "2",
            "--num_sim_steps", "3", "--no_videos", "--data_save_dir", str(folder / "samples")]),
        "evaluate a simulator": (loss_over_time_experiment, [
            *tiny, *on_cpu, *data, "--model_file", str(alone), "--num_sim_steps", "4",
            "--output_dir", str(folder / "card")]),
        "steering vectors": (steering_vectors, [
            *tiny, *data, "--split", "action=1", "--layer", "gru", "--num_episodes", "12",
            "--vector_file", str(folder / "vector.npz")]),
        "record with a swap": (record, [
            *record_arguments(agent, folder / "swap", 1), "--swap_directions_from", "0",
            "--swap_directions_to", "1", *found, "--num_direction_episodes", "12"]),
        "weights of directions": (plot_value_and_action_weights, [
            *tiny, *found, "--num_episodes", "12", "--output_dir", str(folder / "weights")]),
        "interventions": (compare_interventions, [
            *tiny, *found, "--num_direction_episodes", "12", "--directions", "0",
            "--num_episodes", "10", *on_cpu, "--output_dir", str(folder / "interventions")]),
    }


COMMANDS = ("train on a recording", "train from a simulator", "sample", "evaluate a simulator",
            "steering vectors", "record with a swap", "weights of directions", "interventions")


@pytest.mark.parametrize("name", COMMANDS)
def test_data_of_another_agent_is_refused(name, other_agent, recording, matrices, simulator_file,
                                          tmp_path, capsys):
    script, argv = commands(other_agent, recording, matrices, simulator_file, tmp_path)[name]
    assert script.main(argv) == 2
    said = capsys.readouterr().err
    assert "an agent other than" in said or "is not the agent of this simulator" in said, said


def test_hidden_states_of_two_agents_are_not_analysed_together(recording, other_agent, tmp_path,
                                                               capsys):
    samples = tmp_path / "samples" / "informed_init"
    samples.mkdir(parents=True)
    save_json(samples / "recording.json", {"agent_sha256": agent_sha256(other_agent)})
    for number in range(2):
        (samples / f"sample_{number:05d}").mkdir()
        np.save(samples / f"sample_{number:05d}" / "agent_hs.npy",
                np.zeros((3, 64), dtype=np.float32))
    assert hidden_analysis_precompute.main([
        "--interpreting_params_name", "tiny", "--data_dir", str(recording / "data"),
        "--generated_data_dir", str(tmp_path / "samples"), "--num_episodes", "12",
        "--num_generated_samples", "2", "--save_dir", str(tmp_path / "analysis")]) == 2
    assert "with an agent other than" in capsys.readouterr().err

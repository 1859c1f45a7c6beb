"""record.py: recordings match the game, and shards write the same files as one process."""

import dataclasses
import importlib
import json
import os
import shutil

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import FLOAT32, bytes_of_files, killed_at, read_video, record_arguments, refusal

import record
from agents import rollout_files
from agents.acting import load_action_noise, run_policy
from agents.agent_file import load_agent
from agents.provenance import agent_sha256
from agents.rollout_files import (
    STEP_COLUMNS,
    EpisodeArrays,
    RolloutFolder,
    RolloutWriter,
    join_recording,
)
from common.errors import UserError
from common.shards import Shard, ShardNotes
from common.video import mark_action
from envs.procgen_env import EnvConfig, ProcgenVectorEnv

EPISODES = range(12)


@pytest.fixture(scope="module")
def folder(recording):
    return RolloutFolder(recording / "data")


def test_files_have_the_published_layout(folder):
    for number in EPISODES:
        episode = folder.episode(number)
        length = len(episode.steps)
        assert episode.frames.shape == (length, 64, 64, 3) and episode.frames.dtype == np.uint8
        assert episode.hidden_states.shape == (length + 1, 64)
        assert episode.log_probs.shape == (length, 15)
        assert episode.hidden_states.dtype == episode.log_probs.dtype == np.float32
        header = folder.steps_file(number).read_text().splitlines()[0]
        assert header == "," + ",".join(STEP_COLUMNS)
    names = {path.name for path in folder.path.iterdir()}
    assert names == {"idx_to_episode.csv", "recording.json",
                     *(f"{stem}_{number:05d}{suffix}" for number in EPISODES for stem, suffix in (
                         ("episode", ""), ("data_gen_model", ".csv"), ("sample", ".mp4")))}


def test_videos_show_the_frames_and_the_actions(folder):
    for number in EPISODES[:2]:
        episode = folder.episode(number)
        video = read_video(folder.video_file(number))
        assert video.shape == (len(episode.frames), 192, 192, 3)
        shown = video.reshape(-1, 64, 3, 64, 3, 3).mean(axis=(2, 4))
        error = np.abs(shown - episode.frames)
        assert error[:, :50].mean() < 6  # above the mark of the action
        marks = [video[step, -38:, :38].astype(int) for step in range(len(video))]
        expected = [mark_action(np.zeros((192, 192, 3), np.uint8), action)[-38:, :38].astype(int)
                    for action in episode.steps["action"]]
        fits = [np.abs(mark - other).mean() for mark, other in zip(marks, expected)]
        others = [np.abs(mark - other).mean() for mark in marks for other in expected]
        assert np.mean(fits) < 0.9 * np.mean(others)


def test_steps_are_counted_through_the_whole_data_set(folder):
    index = folder.index()
    assert index["global_step"].tolist() == list(range(len(index)))
    steps = pd.concat([folder.steps(number) for number in EPISODES])
    assert steps["global_step"].tolist() == index["global_step"].tolist()
    assert steps["episode"].tolist() == index["episode"].tolist()
    for number in EPISODES:
        rows = folder.steps(number)
        assert rows["episode_step"].tolist() == list(range(len(rows)))
        assert rows["level_seed"].nunique() == 1


@pytest.mark.parametrize(("script", "flags"), [
    ("attribution.features", ["--output_dir"]), ("analysis.level_labels", ["--output_dir"]),
    ("hidden_analysis_precompute", ["--no_generated_samples", "--save_dir"]),
    ("train_gen_model", ["--log_dir_base"])])
def test_a_recording_without_episodes_is_refused(script, flags, agent_path, tmp_path, capsys):
    """A recording that has just begun lists no frames."""
    writer = RolloutWriter(tmp_path / "data", {"agent_sha256": agent_sha256(agent_path),
                                               "env": vars(EnvConfig("coinrun", "hard"))})
    main = importlib.import_module(script).main
    argv = ["--data_dir", writer.folder.path, *flags, tmp_path / "output"]
    if "agent_file" in {field.name for field in dataclasses.fields(main.options)}:
        argv += ["--agent_file", agent_path]
    assert "lists no frames; if record.py is running, wait" in refusal(main, argv, capsys)


def test_last_row_alone_is_the_terminal_step(folder):
    rewards = 0.0
    for number in EPISODES:
        episode = folder.episode(number)
        assert episode.steps["done"].tolist() == [0] * (len(episode.steps) - 1) + [1]
        assert not episode.frames[-1].any()
        assert episode.frames[:-1].reshape(len(episode.steps) - 1, -1).any(axis=1).all()
        assert episode.steps["reward"].iloc[0] == 0
        rewards += episode.steps["reward"].abs().sum()
    assert rewards > 0


def test_stored_frames_give_the_stored_states_and_log_probabilities(folder, agent_path):
    policy = load_agent(agent_path)
    noise = load_action_noise("fruitbot")
    for number in EPISODES:
        episode = folder.episode(number)
        assert np.array_equal(episode.hidden_states[0], policy.init_hx.detach().numpy())
        frames = np.array(episode.frames)
        entering = torch.from_numpy(np.array(episode.hidden_states[:-1]))
        output = run_policy(policy, FLOAT32, frames, entering)
        np.testing.assert_allclose(output.hidden_states, episode.hidden_states[1:], atol=1e-4)
        np.testing.assert_allclose(output.values, episode.steps["value"], atol=1e-4)
        log_probs = torch.log_softmax(noise(output.logits), dim=-1)
        np.testing.assert_allclose(log_probs, episode.log_probs, atol=1e-4)
        assert not np.allclose(output.log_probs, episode.log_probs, atol=0.1)


def test_stored_actions_on_the_stored_level_give_the_stored_frames(folder):
    for number in EPISODES:
        episode = folder.episode(number)
        level = int(episode.steps["level_seed"].iloc[0])
        env = ProcgenVectorEnv(EnvConfig("fruitbot", "easy", level, 1), 1, seed=99)
        for row in episode.steps.itertuples():
            observation = env.observe()
            assert bool(observation.first[0]) == (row.episode_step == 0 or row.done == 1)
            if row.episode_step:
                assert observation.rewards[0] == row.reward
            if not row.done:
                assert np.array_equal(observation.frames[0], episode.frames[row.episode_step])
                env.act(np.array([row.action], dtype=np.int32))
        env.close()


def test_noise_flattens_the_policy_as_specified():
    logits = torch.tensor([[4.0, -4.0, 1.0, *[0.5] * 12]])
    altered = load_action_noise("coinrun")(logits)[0]
    assert altered.tolist() == pytest.approx(
        [0.8, -1.8, 0.7, 0.35, 0.35, 0.35, 0.35, 0.1, 0.35, *[-3.0] * 6])
    assert logits[0, 0] == 4.0
    elsewhere = load_action_noise("maze")(logits)[0]  # keys have other meanings in other games
    assert elsewhere.tolist() == pytest.approx([2.8, -2.8, 0.7, *[0.35] * 12])


def test_without_noise_the_policy_itself_is_stored(agent_path, tmp_path, capsys):
    argv = record_arguments(agent_path, tmp_path, 2, "--no_action_noise", "--no_videos")
    assert record.main(argv) == 0
    assert "no action noise: success rate" in capsys.readouterr().out
    folder = RolloutFolder(tmp_path / "data")
    assert folder.description()["log_probs_of"] == "the policy"
    assert not list(folder.path.glob("*.mp4"))
    episode = folder.episode(0)
    output = run_policy(load_agent(agent_path), FLOAT32, np.array(episode.frames),
                        torch.from_numpy(np.array(episode.hidden_states[:-1])))
    np.testing.assert_allclose(output.log_probs, episode.log_probs, atol=1e-4)


def test_recording_can_be_extended(folder, agent_path, tmp_path, capsys):
    assert record.main(record_arguments(agent_path, tmp_path, 5)) == 0
    assert "frames; evaluate.py measures the agent without noise" in capsys.readouterr().out
    assert RolloutFolder(tmp_path / "data").index()["episode"].max() == 4
    assert record.main(record_arguments(agent_path, tmp_path, 12)) == 0
    assert bytes_of_files(tmp_path / "data") == bytes_of_files(folder.path)
    assert RolloutFolder(tmp_path / "data").sha256() == folder.sha256()


def test_description_says_what_made_the_data(folder, agent_path):
    description = json.loads((folder.path / "recording.json").read_text())
    assert description["agent_file"] == agent_path.name
    assert description["env"]["env_name"] == "fruitbot"
    assert description["interpreting_params_name"] == "defaults"
    assert description["log_probs_of"] == "the policy with action noise"
    assert description["action_noise"]["scale"] == 0.7
    assert "torch" in description["versions"]


# Work divided among jobs

@pytest.fixture
def run(agent_path, tmp_path):
    """A function that records the episodes of ``recording`` to a folder, and returns it."""
    def run_script(*more, status=0):
        assert record.main(record_arguments(agent_path, tmp_path / "shards", 12, *more)) == status
        return tmp_path / "shards" / "data"
    return run_script


@pytest.mark.parametrize(("batch_size", "parts"), [(1, 1), (1, 3), (4, 3), (7, 2), (4, 9)])
def test_whole_batches_are_dealt_to_one_shard_each(batch_size, parts):
    items = list(range(25))
    batches = [items[begin:begin + batch_size] for begin in range(0, 25, batch_size)]
    dealt = [Shard(part + 1, parts).of(items, batch_size) for part in range(parts)]
    assert sorted(item for own in dealt for item in own) == items
    for own in dealt:  # batches of a shard are batches of the whole
        for begin in range(0, len(own), batch_size):
            assert own[begin:begin + batch_size] in batches


def test_shards_give_the_recording_of_one_run(recording, run, tmp_path, capsys):
    data = run("--shard", "2/3")
    assert {path.name for path in data.glob("episode_*")} == {
        f"episode_{number:05d}" for number in (1, 4, 7, 10)}
    with killed_at(RolloutWriter, "add", 3):
        run("--shard", "3/3", status=130)
    assert not (data / "idx_to_episode.csv").exists()
    for more, words in (
            (["--join"], f"{data} lacks shards 1/3, 3/3, which have not been run to the end"),
            ([], "lacks shards 1/3, 3/3"),
            (["--shard", "1/3", "--num_episodes", "13"], "with another num_episodes")):
        before = bytes_of_files(data)
        run(*more, status=2)
        assert words in capsys.readouterr().err.splitlines()[-1]
        assert bytes_of_files(data) == before
    run("--shard", "3/3")
    run("--shard", "1/3")
    run("--join", "--num_episodes", "11", status=2)
    assert "have recorded 12 episodes, not 11" in capsys.readouterr().err
    unjoined = shutil.copytree(data, tmp_path / "unjoined")
    run("--join")
    assert bytes_of_files(data) == bytes_of_files(recording / "data")
    run("--join")
    run("--shard", "2/3")  # as if a batch system repeated the job
    run()
    assert bytes_of_files(data) == bytes_of_files(recording / "data")
    assert RolloutFolder(unjoined).index()["episode"].nunique() == 12  # readers join the shards
    assert bytes_of_files(unjoined) == bytes_of_files(data)
    run("--join", "--num_episodes", "13", status=2)
    assert "holds no shards that could be joined" in capsys.readouterr().err


def write_shards(path, num_episodes, parts):
    """Write tiny random episodes by shards, without joining them."""
    for part in range(1, parts + 1):
        own = Shard(part, parts)
        writer = RolloutWriter(path, {"kind": "test"}, shard=own, num_episodes=num_episodes)
        for number in own.of(range(num_episodes)):
            if not writer.has(number):
                writer.add(number, random_episode(number))
        writer.finish()


def write_whole(path, num_episodes=4):
    """Write tiny random episodes in one process."""
    writer = RolloutWriter(path, {"kind": "test"})
    for number in range(num_episodes):
        if not writer.has(number):
            writer.add(number, random_episode(number))
    writer.finish()


def random_episode(number):
    rng = np.random.default_rng(number)
    steps = pd.DataFrame({"level_seed": number, "episode_step": np.arange(3), "done": [0, 0, 1],
                          "reward": 0.0, "value": rng.normal(size=3), "action": 4})
    return EpisodeArrays(rng.integers(0, 256, (3, 64, 64, 3), dtype=np.uint8),
                         np.zeros((4, 8), np.float32), np.zeros((3, 15), np.float32), steps)


def test_a_recording_is_extended_by_shards(tmp_path):
    write_whole(tmp_path / "one", 9)
    write_whole(tmp_path / "more", 4)
    write_shards(tmp_path / "more", 9, 2)
    steps = join_recording(tmp_path / "more").all_steps(range(9))
    assert steps["global_step"].tolist() == list(range(27))
    assert bytes_of_files(tmp_path / "more") == bytes_of_files(tmp_path / "one")


@pytest.mark.parametrize("complete", [join_recording, write_whole])
def test_a_join_or_a_recording_that_is_killed_anywhere_is_repeated(complete, tmp_path):
    """If it is killed before any of its writes and deletions, another run completes the folder."""
    if complete is join_recording:
        write_shards(tmp_path / "begun", 4, 2)
    else:
        write_whole(tmp_path / "begun", 2)
    expected = shutil.copytree(tmp_path / "begun", tmp_path / "expected")
    complete(expected)
    for name in (*(f"data_gen_model_0000{number}.csv" for number in range(4)),
                 "idx_to_episode.csv", "recording.json"):
        assert (expected / name).is_file()
    assert not list(expected.glob(".*"))
    moments = 0
    for owner, method in ((os, "replace"), (os, "rename"), (type(expected), "unlink"),
                          (np, "save"), (rollout_files, "append_or_nothing")):
        for call in range(1, 100):
            data = shutil.copytree(tmp_path / "begun", tmp_path / f"{method}_{call}")
            try:
                with killed_at(owner, method, call):
                    complete(data)
                break  # no more calls
            except KeyboardInterrupt:
                moments += 1
            complete(data)
            assert bytes_of_files(data) == bytes_of_files(expected)
    assert moments > 10


def test_pieces_that_vanished_or_are_damaged_are_named(tmp_path):
    write_shards(tmp_path, 4, 2)
    waiting = tmp_path / ".steps_00001.csv"
    content = waiting.read_text()
    for damaged in (content[:60], content.replace("\n1,1,1,1,", "\n1,1,1,x,"), ""):
        waiting.write_text(damaged)
        with pytest.raises(UserError, match=r"steps_00001\.csv or its episode is damaged"):
            RolloutFolder(tmp_path)
    waiting.write_text(content)
    shutil.rmtree(tmp_path / "episode_00002")
    with pytest.raises(UserError, match=r"episode_00002/ob\.npy"):
        RolloutFolder(tmp_path)
    assert ShardNotes(tmp_path).exist()


def test_shards_with_other_settings_are_found_when_they_are_joined(tmp_path):
    """Two shards that start at the same moment may not notice each other."""
    write_shards(tmp_path, 4, 2)
    note = tmp_path / ".shards" / "2_of_2" / "shard.json"
    note.write_text(note.read_text().replace('"test"', '"other"'))
    with pytest.raises(UserError, match=r"shard 2/2 in .* has other settings than shard 1"):
        RolloutFolder(tmp_path)

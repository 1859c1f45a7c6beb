"""record.py: what it writes is what happened, and a kill loses nothing that was finished."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import av
import numpy as np
import pandas as pd
import pytest
import torch
from conftest import FLOAT32, ROOT, record_arguments, tiny_policy

import record
from agents.acting import load_action_noise, run_policy
from agents.agent_file import load_agent, save_agent
from agents.rollout_files import STEP_COLUMNS, RolloutFolder, RolloutWriter
from common.errors import UserError
from common.files import atomic_folder, remove_folder
from common.locks import FolderLock, check_unlocked
from common.video import mark_action
from envs.procgen_env import EnvConfig, LevelSlots, ProcgenVectorEnv

EPISODES = range(12)


@pytest.fixture(scope="module")
def folder(recording):
    return RolloutFolder(recording / "data")


def contents(path):
    """Every file below a folder but the videos: arrays, tables, or text."""
    found = {}
    for file in sorted(path.rglob("*")):
        name = str(file.relative_to(path))
        if file.suffix == ".npy":
            found[name] = np.load(file, allow_pickle=False)
        elif file.suffix == ".csv":
            found[name] = pd.read_csv(file).to_numpy()
        elif file.is_file() and file.suffix != ".mp4":
            found[name] = file.read_text()
    return found


def assert_same(data, expected):
    """Equal to the last digit."""
    assert data.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, str):
            assert data[name] == value, name
        else:
            np.testing.assert_array_equal(data[name], value, err_msg=name)


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
        with av.open(str(folder.video_file(number))) as container:
            video = np.stack([frame.to_ndarray(format="rgb24")
                              for frame in container.decode(video=0)])
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


def test_episodes_play_different_levels_with_different_actions(folder):
    levels = [folder.steps(number)["level_seed"].iloc[0] for number in EPISODES]
    assert len(set(levels)) == len(levels)
    first_actions = {tuple(folder.steps(number)["action"].iloc[:8]) for number in EPISODES}
    assert len(first_actions) == len(levels)


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
                assert np.array_equal(observation.frames[0],
                                      episode.frames[row.episode_step])
                env.act(np.array([row.action], dtype=np.int32))
        env.close()


def test_noise_flattens_the_policy_as_specified():
    logits = torch.tensor([[4.0, -4.0, 1.0, *[0.5] * 12]])
    altered = load_action_noise("coinrun")(logits)[0]
    assert altered.tolist() == pytest.approx(
        [0.8, -1.8, 0.7, 0.35, 0.35, 0.35, 0.35, 0.1, 0.35, *[-3.0] * 6])
    assert logits[0, 0] == 4.0
    elsewhere = load_action_noise("maze")(logits)[0]  # which key does what depends on the game
    assert elsewhere.tolist() == pytest.approx([2.8, -2.8, 0.7, *[0.35] * 12])


def test_a_recording_reports_what_was_played_and_how_well(agent_path, tmp_path, capsys):
    argv = record_arguments(agent_path, tmp_path, 2, "--no_videos")
    assert record.main(argv) == 0
    folder = RolloutFolder(tmp_path / "data")
    length = np.mean([folder.array_files(number).frames.shape[0] for number in range(2)])
    assert ("on easy fruitbot, no backgrounds, with action noise: success rate 0.0 %, mean length "
            f"{length:.1f} frames") in capsys.readouterr().out


def test_without_noise_the_policy_itself_is_stored(agent_path, tmp_path):
    argv = record_arguments(agent_path, tmp_path, 2, "--no_action_noise", "--no_videos")
    assert record.main(argv) == 0
    folder = RolloutFolder(tmp_path / "data")
    assert folder.description()["log_probs_of"] == "the policy"
    assert not list(folder.path.glob("*.mp4"))
    episode = folder.episode(0)
    output = run_policy(load_agent(agent_path), FLOAT32,
                        np.array(episode.frames),
                        torch.from_numpy(np.array(episode.hidden_states[:-1])))
    np.testing.assert_allclose(output.log_probs, episode.log_probs, atol=1e-4)


@pytest.mark.slow
def test_killed_recording_resumes_to_the_same_data(folder, agent_path, tmp_path):
    data = tmp_path / "data"
    process = subprocess.Popen([sys.executable, "record.py",
                                *record_arguments(agent_path, tmp_path, 12)],
                               cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while len(list(data.glob("episode_*"))) < 3:
        assert process.poll() is None
        time.sleep(0.005)
    process.kill()
    process.wait()
    finished = {path.name: contents(path) for path in data.glob("episode_*")}
    index = RolloutFolder(data).index()
    for number in index["episode"].unique():  # what the index names is whole
        assert len(RolloutFolder(data).steps(number)) == (index["episode"] == number).sum()
    assert record.main(record_arguments(agent_path, tmp_path, 12)) == 0
    for name, files in finished.items():
        assert_same(contents(data / name), files)
    assert_same(contents(data), contents(folder.path))


def test_kill_between_any_two_writes_is_put_right(folder, agent_path, tmp_path):
    """The states in which a kill can leave the folder, made by hand from a finished one."""
    def cut_index(data):
        lines = (data / "idx_to_episode.csv").read_text().splitlines(keepends=True)
        (data / "idx_to_episode.csv").write_text("".join(lines[:-5]))

    def no_csv(data):
        steps = pd.read_csv(data / "data_gen_model_00011.csv", index_col=0)
        steps.drop(columns=["episode", "global_step"]).to_csv(data / ".steps_00011.csv",
                                                              index=False)
        (data / "data_gen_model_00011.csv").unlink()

    def half_an_episode(data):
        for name in ("data_gen_model_00011.csv", "sample_00011.mp4"):
            (data / name).unlink()
        (data / "episode_00011").rename(data / ".episode_00011.partial")
        (data / ".episode_00011.partial" / "lp.npy").unlink()

    for number, damage in enumerate((cut_index, no_csv, half_an_episode)):
        logdir = tmp_path / str(number)
        shutil.copytree(folder.path, logdir / "data")
        damage(logdir / "data")
        assert record.main(record_arguments(agent_path, logdir, 12)) == 0
        assert_same(contents(logdir / "data"), contents(folder.path))


def test_recording_can_be_extended(folder, agent_path, tmp_path):
    assert record.main(record_arguments(agent_path, tmp_path, 5)) == 0
    assert RolloutFolder(tmp_path / "data").index()["episode"].max() == 4
    assert record.main(record_arguments(agent_path, tmp_path, 12)) == 0
    assert_same(contents(tmp_path / "data"), contents(folder.path))


def test_other_data_are_not_touched_unless_told(folder, agent_path, tmp_path, capsys):
    shutil.copytree(folder.path, tmp_path / "data")
    before = contents(tmp_path / "data")
    other = [*record_arguments(agent_path, tmp_path, 2), "--seed", "8", "--no_videos"]
    assert record.main(other) == 2
    assert "another seed" in capsys.readouterr().err
    (tmp_path / "data" / "recording.json").unlink()
    assert record.main(other) == 2
    assert "holds other data" in capsys.readouterr().err
    del before["recording.json"]
    assert_same(contents(tmp_path / "data"), before)
    assert record.main([*other, "--overwrite"]) == 0
    assert RolloutFolder(tmp_path / "data").index()["episode"].max() == 1


@pytest.mark.parametrize("kind", ["link", "second name", "pipe", "folder"])
def test_a_lock_that_is_no_regular_file_is_refused(kind, tmp_path):
    """A pipe does not hang, and the target of a link keeps its contents."""
    lock, other = tmp_path / ".lock", tmp_path / "other.txt"
    other.write_text("precious")
    {"link": lambda: lock.symlink_to(other), "second name": lambda: os.link(other, lock),
     "pipe": lambda: os.mkfifo(lock), "folder": lock.mkdir}[kind]()
    for use in (FolderLock, check_unlocked):
        with pytest.raises(UserError, match=re.escape(f"{lock} is a link, a pipe or a folder")):
            use(tmp_path)
    assert other.read_text() == "precious"


def test_temporary_files_do_not_follow_links(agent_path, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("precious")
    (tmp_path / ".copy.partial.pth").symlink_to(other)
    save_agent(tmp_path / "copy.pth", tiny_policy())
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".folder.partial").symlink_to(tmp_path / "elsewhere")
    with atomic_folder(tmp_path / "folder") as folder:
        (folder / "file").write_text("new")
    assert other.read_text() == "precious" and not list((tmp_path / "elsewhere").iterdir())
    assert not (tmp_path / "copy.pth").is_symlink() and not (tmp_path / "folder").is_symlink()
    load_agent(tmp_path / "copy.pth")


def test_overwrite_deletes_nothing_but_a_recording(folder, agent_path, tmp_path, capsys):
    data = shutil.copytree(folder.path, tmp_path / "data")
    argv = [*record_arguments(agent_path, tmp_path, 1), "--overwrite"]
    (data / "episode_00003" / "thesis.txt").write_text("precious")
    before = contents(data)
    assert record.main(argv) == 2
    assert "thesis.txt is no part of a recording" in capsys.readouterr().err
    assert_same(contents(data), before)
    (data / "episode_00003" / "thesis.txt").unlink()
    elsewhere = data.rename(tmp_path / "elsewhere")
    data.symlink_to(elsewhere)
    assert record.main(argv) == 2
    assert "data is a link" in capsys.readouterr().err and len(contents(elsewhere)) > 12


def test_a_folder_is_deleted_whole_or_not_at_all():
    """As a user who may not delete what lies in one of its folders."""
    root = Path(tempfile.mkdtemp())
    try:
        for name in ("a", "b", "c"):
            (root / "data" / name).mkdir(parents=True)
            (root / "data" / name / "ob.npy").write_text("frames")
        nobody = 65534
        for path in (root, *root.rglob("*")):
            if os.geteuid() == 0:
                os.chown(path, nobody, nobody)
        (root / "data" / "b").chmod(0o500)
        if os.geteuid() == 0:
            os.seteuid(nobody)
        try:
            with pytest.raises(PermissionError):
                remove_folder(root / "data")
        finally:
            os.seteuid(os.getuid())
        assert len(list(root.rglob("ob.npy"))) == 3
        (root / "data" / "b").chmod(0o700)
        remove_folder(root / "data")
        assert not list(root.iterdir())
    finally:
        shutil.rmtree(root)


def test_a_recording_whose_folder_is_deleted_stops(folder, tmp_path):
    writer, episode = RolloutWriter(tmp_path / "data", {"kind": "test"}), folder.episode(0)
    writer.add(0, episode)
    shutil.rmtree(tmp_path / "data")
    with pytest.raises(UserError, match="was deleted or moved while this process was at work"):
        writer.add(1, episode)
    assert not (tmp_path / "data").exists()


def test_description_says_what_made_the_data(folder, agent_path):
    description = json.loads((folder.path / "recording.json").read_text())
    assert description["agent_file"] == agent_path.name
    assert description["env"]["env_name"] == "fruitbot"
    assert description["interpreting_params_name"] == "defaults"
    assert description["log_probs_of"] == "the policy with action noise"
    assert description["action_noise"]["scale"] == 0.7
    assert "torch" in description["versions"]


def test_slots_play_the_level_they_are_given():
    slots = LevelSlots(EnvConfig("maze", "easy"), 2)
    slots.start(0, 17)
    slots.start(1, 17)
    assert np.array_equal(slots.frames[0], slots.frames[1])
    slots.start(1, 18)
    assert not np.array_equal(slots.frames[0], slots.frames[1])
    slots.close()

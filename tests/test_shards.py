"""Work divided among jobs: the shards' notes, and recordings of real rollouts."""

import os
import shutil

import numpy as np
import pandas as pd
import pytest
from conftest import bytes_of_files, killed_at, record_arguments

import record
from agents import rollout_files
from agents.rollout_files import EpisodeArrays, RolloutFolder, RolloutWriter, join_recording
from common.errors import UserError
from common.shards import Shard, ShardNotes


@pytest.fixture
def run(agent_path, tmp_path):
    """Records 12 episodes like the fixture ``recording``, to a folder that is given back."""
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
    for own in dealt:  # the division of what a shard has is that of the whole
        for begin in range(0, len(own), batch_size):
            assert own[begin:begin + batch_size] in batches


def test_shards_give_the_recording_of_one_run(recording, run, agent_path, tmp_path, capsys):
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
    run("--shard", "2/3")  # repeated by a batch system after all
    run()
    assert bytes_of_files(data) == bytes_of_files(recording / "data")
    assert RolloutFolder(unjoined).index()["episode"].nunique() == 12  # whoever reads it joins it
    assert bytes_of_files(unjoined) == bytes_of_files(data)
    run("--join", "--num_episodes", "13", status=2)
    assert "holds no shards that could be joined" in capsys.readouterr().err


def write_shards(path, num_episodes, parts):
    """Pieces and notes of shards, by the writer, of tiny random episodes."""
    for part in range(1, parts + 1):
        own = Shard(part, parts)
        writer = RolloutWriter(path, {"kind": "test"}, shard=own, num_episodes=num_episodes)
        for number in own.of(range(num_episodes)):
            if not writer.has(number):
                writer.add(number, random_episode(number))
        writer.finish()


def write_whole(path, num_episodes=4):
    """The same episodes by one process."""
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
    """Killed before each of its writes and deletions, it leaves what another one completes."""
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
                break  # it is not called so often
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
    """Two that begin at the same moment may not see each other."""
    write_shards(tmp_path, 4, 2)
    note = tmp_path / ".shards" / "2_of_2" / "shard.json"
    note.write_text(note.read_text().replace('"test"', '"other"'))
    with pytest.raises(UserError, match=r"shard 2/2 in .* has other settings than shard 1"):
        RolloutFolder(tmp_path)
